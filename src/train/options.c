// options.c - the configuration: one table of keys gives parsing, help, config.yml, checkpoints.
//
// Every MaxText key is supported (DPL_OPTION_MAP), ignored with a notice as it cannot change the
// result here, or fixed: accepted with the value of what this program does, refused with another.
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>

#include "train/train.h"

typedef struct option {
    char kind;
    const char *key, *missing, *range, *help;
    size_t offset;
} option;

#define ROW(kind_, key_, default_, range_, help_) \
    {#kind_[0], #key_, default_, range_, help_, offsetof(dpl_options, key_)},
static const option options[] = {DPL_OPTION_MAP(ROW)};
#undef ROW

// "key" is ignored, "key=a|b" has these values; the first is worded in the error.
// clang-format off
#define MESH(axis) "ici_" axis "_parallelism=1|-1", "dcn_" axis "_parallelism=1|-1"
static const char *const maxtext_keys[] = {
    "model_name=default|", "global_parameter_scale=1", "mlp_activations=[\"silu\",\"linear\"]",
    "sparse_matmul=true", "capacity_factor=-1", "use_random_routing=false",
    "rope_attention_scaling=false", "dropout_rate=0", "mtp_eval_target_module=0",
    "weight_dtype=float32", "grad_dtype=float32", "mu_dtype=float32|",
    "te_gmm_quantization=|none", "skip_step_on_spikes=false",
    "abort_on_nan_loss=true", "abort_on_inf_loss=true", "tokenizer_path=", "add_bos=false",
    "add_eos=false", "grain_train_files=", "grain_file_type=arrayrecord", "hf_path=",
    "hf_train_files=", MESH("tensor"), MESH("pipeline"),
    MESH("context"), MESH("sequence"),
    "hardware", "skip_jax_distributed_system", "scan_layers", "param_scan_axis", "megablox",
    "jax_cache_dir", "enable_tensorboard", "log_config", "log_period", "metrics_file",
    "override_model_config", "attention", "cast_logits_to_fp32",
    "logits_dot_in_fp32", "float32_qk_product", "float32_logits", "float32_gate_logits",
    "float32_weight_sum", "ragged_buffer_factor", "moe_dropless_fallback", "use_ring_of_experts",
    "num_moe_token_chunks", "shard_optimizer_over_data", "shard_exp_on_fsdp", "base_num_kv_heads",
    "head_dim", "enable_dropout", "async_checkpointing", "train_split", "profiler",
    "skip_first_n_steps_for_profiler", "profiler_steps", "profile_periodically_period",
    "profile_cleanly", "max_segments_per_seq", "wi_tile_fwd_batch_seq", "tokenizer_type",
    "muon_beta", "skip_step_interval", "skip_step_scaling_factor", "decoder_layer_input", "context",
    "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo", "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo",
    "moe_x_sorted", "moe_routing_maps", "query_proj", "key_proj", "value_proj", "kv_proj",
    "qkv_proj", "out_proj", "query_wa_proj", "kv_wa_proj", "mla_q", "mla_kv", "attention_out",
};
// clang-format on

/* ---- values ---- */
// Is `text` one of "a|b|c"?
static bool is_choice(const char *text, const char *choices) {
    const size_t n = strlen(text);
    for (const char *p = choices; p; p = strchr(p, '|') ? strchr(p, '|') + 1 : NULL)
        if (strcspn(p, "|") == n && memcmp(p, text, n) == 0) return true;
    return false;
}

// "LOW .. HIGH", "LOW ..", "> LOW", or "" for any value.
static dpl_status check_range(const char *range, double value) {
    const bool open = range[0] == '>';
    const char *from = range + 2 * open, *dots = strstr(range, " ..");
    double low = -HUGE_VAL, high = HUGE_VAL;
    char text[32];
    snprintf(text, sizeof text, "%.*s", (int)strcspn(from, " "), from);
    if (text[0]) DPL_TRY(dpl_parse_f64(text, &low));
    if (dots && dots[3]) DPL_TRY(dpl_parse_f64(dots + 4, &high));
    if (value >= low && value <= high && !(open && value == low)) return DPL_OK;
    return dpl_fail(DPL_EINVAL, "%.17g is out of range, expected %s", value, range);
}

// The shortest text that reads back as the same number.
static void number_text(double value, char text[64]) {
    double back;
    for (int digits = 6; digits <= 17; digits++) {
        dpl_format(text, 64, "%.*g", digits, value);
        if (dpl_parse_f64(text, &back) == DPL_OK && back == value) return;
    }
}

typedef union parsed {
    int64_t i;
    double f;
    bool b;
} parsed;

// Checks a value; gives its canonical text in `buffer` if it is not a text.
static dpl_status parse_value(const option *opt, const char *text, parsed *v, char buffer[64]) {
    if (opt->kind == 'C')
        DPL_CHECK(is_choice(text, opt->range), "'%s' not supported, expected %s", text, opt->range);
    if (opt->kind == 'T' || opt->kind == 'C') return DPL_OK;
    if (!text[0]) text = opt->missing; // YAML's null
    if (opt->kind == 'B') {
        DPL_CHECK(is_choice(text, "true|false|True|False"), "'%s', expected true or false", text);
        v->b = text[0] == 't' || text[0] == 'T';
        snprintf(buffer, 64, "%s", v->b ? "true" : "false");
        return DPL_OK;
    }
    if (opt->kind == 'F') {
        DPL_TRY(dpl_parse_f64(text, &v->f));
        number_text(v->f, buffer);
        return check_range(opt->range, v->f);
    }
    DPL_TRY(dpl_parse_i64(text, &v->i));
    snprintf(buffer, 64, "%lld", (long long)v->i);
    return check_range(opt->range, (double)v->i);
}

static dpl_status set_option(dpl_config *config, size_t i, const char *text) {
    const option *opt = &options[i];
    const bool is_text = opt->kind == 'T' || opt->kind == 'C';
    char buffer[64];
    parsed v;
    const dpl_status status = parse_value(opt, text, &v, buffer);
    if (status != DPL_OK) return dpl_fail_in(status, "%s", opt->key);
    char *copy = dpl_strdup(is_text ? text : buffer);
    if (!copy) return dpl_fail(DPL_ENOMEM, "no memory for the value of %s", opt->key);
    dpl_free(config->text[i]);
    config->text[i] = copy;
    const void *from = is_text ? (const void *)&config->text[i] : &v;
    memcpy((uint8_t *)&config->o + opt->offset, from, opt->kind == 'B' ? sizeof v.b : sizeof v);
    return DPL_OK;
}

/* ---- keys ---- */
static size_t find_option(const char *key) {
    size_t i = 0;
    while (i < DPL_OPT_N && !dpl_is(options[i].key, key)) i++;
    return i;
}

// How unlike a key is what somebody wrote: Levenshtein distance of the texts before any '=', of 63
// characters at most; 1 where the key contains it.
static size_t unlikeness(const char *a, const char *b) {
    if (strstr(b, a)) return 1;
    const size_t n = DPL_MIN(strcspn(a, "="), 63u), m = DPL_MIN(strcspn(b, "="), 63u);
    size_t row[64];
    for (size_t j = 0; j <= m; j++) row[j] = j;
    for (size_t i = 1; i <= n; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= m; j++) {
            const size_t change = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = DPL_MIN(change, 1 + DPL_MIN(row[j], row[j - 1]));
        }
    }
    return row[m];
}

static dpl_status unknown_key(const char *key) {
    const char *best = options[0].key;
    for (size_t i = 1; i < DPL_OPT_N + DPL_COUNT(maxtext_keys); i++) {
        const char *name = i < DPL_OPT_N ? options[i].key : maxtext_keys[i - DPL_OPT_N];
        if (i >= DPL_OPT_N && !strchr(name, '=')) break; // those that have no effect come last
        if (unlikeness(key, name) < unlikeness(key, best)) best = name;
    }
    return dpl_fail(DPL_EINVAL, "unknown key '%s'; the nearest known key is '%.*s'", key,
                    (int)strcspn(best, "="), best);
}

// A fixed key's value: equal as text without blanks and case, or as a number.
static dpl_status check_maxtext(const char *key, const char *values, const char *value) {
    char text[128] = "", want[64];
    double x, y;
    size_t n = 0;
    for (const char *p = value; *p && n + 1 < sizeof text; p++)
        if (*p != ' ') text[n++] = *p;
    for (const char *p = values; p; p = strchr(p, '|') ? strchr(p, '|') + 1 : NULL) {
        snprintf(want, sizeof want, "%.*s", (int)strcspn(p, "|"), p);
        if (strcasecmp(text, want) == 0) return DPL_OK;
        if (dpl_parse_f64(text, &x) == DPL_OK && dpl_parse_f64(want, &y) == DPL_OK && x == y)
            return DPL_OK;
    }
    return dpl_fail(DPL_EINVAL,
                    "%s: '%s' would change the result and is not supported, expected '%.*s'", key,
                    value, (int)strcspn(values, "|"), values);
}

dpl_status dpl_config_put(dpl_config *config, const char *key, const char *value) {
    const size_t i = find_option(key);
    if (i < DPL_OPT_N) {
        DPL_TRY(set_option(config, i, value));
        config->given[i] = true;
        return DPL_OK;
    }
    for (size_t j = 0; j < DPL_COUNT(maxtext_keys); j++) {
        const size_t len = strcspn(maxtext_keys[j], "=");
        if (strlen(key) != len || memcmp(maxtext_keys[j], key, len) != 0) continue;
        if (maxtext_keys[j][len]) return check_maxtext(key, maxtext_keys[j] + len + 1, value);
        dpl_log("notice: %s has no effect here and is ignored", key);
        return DPL_OK;
    }
    return unknown_key(key);
}

/* ---- the configuration as an object ---- */
static dpl_status put_line(void *arg, const char *key, const char *value, int line) {
    (void)line;
    return dpl_config_put(arg, key, value);
}

dpl_status dpl_config_open(const char *path, dpl_config **config_out) {
    DPL_NEED(config_out);
    dpl_config *config = dpl_alloc(sizeof *config);
    if (!config) return dpl_fail(DPL_ENOMEM, "no memory for a configuration");
    dpl_status status = DPL_OK;
    for (size_t i = 0; i < DPL_OPT_N && status == DPL_OK; i++)
        status = set_option(config, i, options[i].missing);
    if (status == DPL_OK && path) status = dpl_yaml_read(path, put_line, config);
    if (status != DPL_OK) dpl_config_close(&config);
    if (status == DPL_OK) *config_out = config;
    return status;
}

dpl_status dpl_config_clone(const dpl_config *from, dpl_config **config_out) {
    DPL_TRY(dpl_config_open(NULL, config_out));
    memcpy((*config_out)->given, from->given, sizeof from->given);
    for (size_t i = 0; i < DPL_OPT_N; i++) DPL_TRY(set_option(*config_out, i, from->text[i]));
    return DPL_OK;
}

void dpl_config_close(dpl_config **config) {
    if (!config || !*config) return;
    for (size_t i = 0; i < DPL_OPT_N; i++) dpl_free((*config)->text[i]);
    dpl_free(*config);
    *config = NULL;
}

dpl_status dpl_config_set(dpl_config *config, const char *assignment) {
    char key[128];
    DPL_NEED(config && assignment);
    const size_t n = strcspn(assignment, "=");
    DPL_CHECK(n > 0 && assignment[n], "'%s' is not an assignment, expected key=value", assignment);
    DPL_CHECK(n < sizeof key, "the key of '%.40s...' is too long", assignment);
    snprintf(key, sizeof key, "%.*s", (int)n, assignment);
    return dpl_config_put(config, key, assignment + n + 1);
}

const char *dpl_config_get(const dpl_config *config, const char *key) {
    if (!config || !key) return NULL;
    const size_t i = find_option(key);
    return i < DPL_OPT_N ? config->text[i] : NULL;
}

size_t dpl_config_option_count(void) {
    return DPL_OPT_N;
}

dpl_status dpl_config_option(size_t i, dpl_option_info *info_out) {
    DPL_CHECK(info_out && i < DPL_OPT_N, "option %zu, expected less than %d", i, DPL_OPT_N);
    const option *opt = &options[i];
    static const char kinds[] = "IFBT", *const types[] = {"integer", "number", "true|false",
                                                          "text"};
    const char *kind = strchr(kinds, opt->kind); // NULL: a choice
    *info_out = (dpl_option_info){opt->key, kind ? types[kind - kinds] : opt->range, opt->missing,
                                  kind ? opt->range : "", opt->help};
    return DPL_OK;
}

// Text is quoted as JSON, which YAML reads; a list is JSON already.
static dpl_status print_option(FILE *file, const option *opt, const char *text) {
    const bool may_quote = opt->kind == 'T' || opt->kind == 'C';
    json_t *list = text[0] == '[' ? json_loads(text, 0, NULL) : NULL;
    json_t *value = may_quote && !list ? json_string(text) : NULL;
    fprintf(file, "%s: ", opt->key);
    const bool good = value ? json_dumpf(value, file, JSON_ENCODE_ANY) == 0
                            : (list || !may_quote) && fputs(text, file) >= 0;
    fputc('\n', file);
    json_decref(list);
    json_decref(value);
    return good ? DPL_OK : dpl_fail(DPL_EINVAL, "%s: '%s' is not UTF-8 text", opt->key, text);
}

dpl_status dpl_config_save(const dpl_config *config, const char *path) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *file = open_memstream(&text, &bytes);
    if (!file) return dpl_fail(DPL_ENOMEM, "no memory for %s", path);
    dpl_status status = DPL_OK;
    for (size_t i = 0; i < DPL_OPT_N && status == DPL_OK; i++)
        status = print_option(file, &options[i], config->text[i]);
    if (fclose(file) != 0 && status == DPL_OK)
        status = dpl_fail(DPL_ENOMEM, "no memory for %s", path);
    if (status == DPL_OK) status = dpl_write_file(path, text, bytes);
    free(text);
    return status;
}
