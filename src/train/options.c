// options.c - the configuration: one table of keys that gives parsing, help, config.yml and the checkpoint's copy.
//
// Every MaxText key has one of three fates: supported (DPL_OPTION_MAP), ignored with a notice because it cannot change
// the result here, or fixed: accepted with the value that describes what this program does, refused with any other.
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

// clang-format off
static const char *const ignored[] = {
    "hardware", "skip_jax_distributed_system", "scan_layers", "param_scan_axis", "megablox", "jax_cache_dir",
    "enable_tensorboard", "log_config", "log_period", "metrics_file", "override_model_config", "attention",
    "matmul_precision", "cast_logits_to_fp32", "logits_dot_in_fp32", "float32_qk_product", "float32_logits",
    "float32_gate_logits", "float32_weight_sum", "ragged_buffer_factor", "moe_dropless_fallback",
    "use_ring_of_experts", "num_moe_token_chunks", "shard_optimizer_over_data", "shard_exp_on_fsdp",
    "base_num_kv_heads", "head_dim", "enable_dropout", "async_checkpointing", "train_split",
    "profiler", "skip_first_n_steps_for_profiler", "profiler_steps", "profile_periodically_period",
    "profile_cleanly", "max_segments_per_seq", "wi_tile_fwd_batch_seq", "tokenizer_type", "muon_beta",
    "skip_step_interval", "skip_step_scaling_factor", "decoder_layer_input", "context", "mlpwi", "mlpwi_0",
    "mlpwi_1", "mlpwo", "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo", "moe_x_sorted", "moe_routing_maps",
    "query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj", "out_proj", "query_wa_proj", "kv_wa_proj",
    "mla_q", "mla_kv", "attention_out",
};

typedef struct fixed_key {
    const char *key, *values; // "a|b"; the first is worded in the error
} fixed_key;
static const fixed_key fixed[] = {
    {"model_name", "default|"}, {"global_parameter_scale", "1"}, {"mlp_activations", "[\"silu\",\"linear\"]"},
    {"sparse_matmul", "true"}, {"capacity_factor", "-1"}, {"use_random_routing", "false"},
    {"rope_attention_scaling", "false"}, {"dropout_rate", "0"}, {"mtp_eval_target_module", "0"},
    {"weight_dtype", "float32"}, {"grad_dtype", "float32"}, {"mu_dtype", "float32|"}, {"quantization", "|none"},
    {"gmm_quantization", "|none"}, {"te_gmm_quantization", "|none"}, {"skip_step_on_spikes", "false"},
    {"abort_on_nan_loss", "true"}, {"abort_on_inf_loss", "true"}, {"tokenizer_path", ""}, {"add_bos", "false"},
    {"add_eos", "false"}, {"grain_train_files", ""}, {"grain_file_type", "arrayrecord"}, {"hf_path", ""},
    {"hf_train_files", ""}, {"ici_fsdp_parallelism", "1|-1"}, {"ici_expert_parallelism", "1|-1"},
    {"ici_data_parallelism", "1|-1"}, {"ici_tensor_parallelism", "1|-1"}, {"ici_pipeline_parallelism", "1|-1"},
    {"ici_context_parallelism", "1|-1"}, {"ici_sequence_parallelism", "1|-1"}, {"dcn_fsdp_parallelism", "1|-1"},
    {"dcn_expert_parallelism", "1|-1"}, {"dcn_data_parallelism", "1|-1"}, {"dcn_tensor_parallelism", "1|-1"},
    {"dcn_pipeline_parallelism", "1|-1"}, {"dcn_context_parallelism", "1|-1"},
};
// clang-format on

/* ---- values ---- */

// Is `text` one of "a|b|c"?
static bool is_choice(const char *text, const char *choices)
{
    const size_t n = strlen(text);
    for (const char *p = choices;; p++) {
        const size_t len = strcspn(p, "|");
        if (len == n && memcmp(p, text, n) == 0) return true;
        p += len;
        if (!*p) return false;
    }
}

static dpl_status parse_bool(const char *text, bool *out)
{
    if (!is_choice(text, "true|false|True|False"))
        return dpl_fail(DPL_EINVAL, "'%s', expected true or false", text);
    *out = text[0] == 't' || text[0] == 'T';
    return DPL_OK;
}

// "LOW .. HIGH", "LOW ..", "> LOW", or "" for any value.
static dpl_status check_range(const char *range, double value)
{
    char low_text[32] = "";
    double low, high;
    if (!range[0]) return DPL_OK;
    const bool open = range[0] == '>';
    const char *from = range + (open ? 2 : 0), *dots = strstr(from, " ..");
    snprintf(low_text, sizeof low_text, "%.*s", (int)(dots ? dots - from : (long)strlen(from)),
             from);
    DPL_TRY(dpl_parse_f64(low_text, &low));
    bool good = open ? value > low : value >= low;
    if (dots && dots[3]) {
        DPL_TRY(dpl_parse_f64(dots + 4, &high));
        good = good && value <= high;
    }
    return good ? DPL_OK : dpl_fail(DPL_EINVAL, "%.17g is out of range, expected %s", value, range);
}

// The shortest text that reads back as the same number.
static void number_text(double value, char *text, size_t size)
{
    for (int digits = 6; digits <= 17; digits++) {
        double back;
        dpl_format(text, size, "%.*g", digits, value);
        if (dpl_parse_f64(text, &back) == DPL_OK && back == value) return;
    }
}

// Checks `value` and gives its canonical text in `text`; writes it to *field, except for T and C.
static dpl_status parse_value(const option *opt, const char *value, void *field, char *text,
                              size_t size)
{
    if (!value[0] && opt->kind != 'T' && opt->kind != 'C') value = opt->missing; // YAML's null
    if (opt->kind == 'I') {
        int64_t i;
        DPL_TRY(dpl_parse_i64(value, &i));
        DPL_TRY(check_range(opt->range, (double)i));
        snprintf(text, size, "%lld", (long long)i);
        memcpy(field, &i, sizeof i);
    } else if (opt->kind == 'F') {
        double f;
        DPL_TRY(dpl_parse_f64(value, &f));
        DPL_TRY(check_range(opt->range, f));
        number_text(f, text, size);
        memcpy(field, &f, sizeof f);
    } else if (opt->kind == 'B') {
        bool b = false;
        DPL_TRY(parse_bool(value, &b));
        snprintf(text, size, "%s", b ? "true" : "false");
        memcpy(field, &b, sizeof b);
    } else if (opt->kind == 'C' && !is_choice(value, opt->range)) {
        return dpl_fail(DPL_EINVAL, "'%s' is not supported, expected %s", value, opt->range);
    }
    return DPL_OK;
}

static dpl_status set_option(dpl_config *config, size_t i, const char *value)
{
    const option *opt = &options[i];
    char buffer[64];
    union {
        int64_t i;
        double f;
        bool b;
    } parsed;
    const dpl_status status = parse_value(opt, value, &parsed, buffer, sizeof buffer);
    if (status != DPL_OK) return dpl_fail_in(status, "%s", opt->key);
    const bool is_text = opt->kind == 'T' || opt->kind == 'C';
    char *text = dpl_strdup(is_text ? value : buffer);
    if (!text) return dpl_fail(DPL_ENOMEM, "no memory for the value of %s", opt->key);
    uint8_t *field = (uint8_t *)&config->o + opt->offset;
    dpl_free(config->text[i]);
    config->text[i] = text;
    if (is_text)
        memcpy(field, &text, sizeof text);
    else
        memcpy(field, &parsed, opt->kind == 'B' ? sizeof parsed.b : sizeof parsed.i);
    return DPL_OK;
}

/* ---- keys ---- */

static size_t find_option(const char *key)
{
    size_t i = 0;
    while (i < DPL_OPT_N && strcmp(options[i].key, key) != 0)
        i++;
    return i;
}

// Levenshtein distance; texts are cut at 63 characters.
static size_t edit_distance(const char *a, const char *b)
{
    const size_t n = DPL_MIN(strlen(a), (size_t)63), m = DPL_MIN(strlen(b), (size_t)63);
    size_t row[64];
    for (size_t j = 0; j <= m; j++)
        row[j] = j;
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

static dpl_status unknown_key(const char *key)
{
    const char *best = "";
    size_t least = SIZE_MAX;
    for (size_t i = 0; i < DPL_OPT_N + DPL_COUNT(fixed) + DPL_COUNT(ignored); i++) {
        const size_t j = i - DPL_OPT_N;
        const char *name = i < DPL_OPT_N          ? options[i].key
                           : j < DPL_COUNT(fixed) ? fixed[j].key
                                                  : ignored[j - DPL_COUNT(fixed)];
        const size_t distance = edit_distance(key, name);
        if (distance < least) {
            least = distance;
            best = name;
        }
    }
    return dpl_fail(DPL_EINVAL, "unknown key '%s'; the nearest known key is '%s'", key, best);
}

// A fixed key's value: equal as text without blanks and case of true/false, or as a number.
static bool same_value(const char *value, const char *want, size_t want_len)
{
    char a[128] = "", b[64] = "";
    double x, y;
    for (size_t n = 0; *value && n + 1 < sizeof a; value++)
        if (*value != ' ') a[n++] = *value;
    snprintf(b, sizeof b, "%.*s", (int)want_len, want);
    if (strcasecmp(a, b) == 0) return true;
    return dpl_parse_f64(a, &x) == DPL_OK && dpl_parse_f64(b, &y) == DPL_OK && x == y;
}

static dpl_status check_fixed(const fixed_key *entry, const char *value)
{
    for (const char *p = entry->values;; p++) {
        const size_t len = strcspn(p, "|");
        if (same_value(value, p, len)) return DPL_OK;
        p += len;
        if (!*p) break;
    }
    return dpl_fail(DPL_EINVAL,
                    "%s: '%s' is not supported and would change the result, expected '%.*s'",
                    entry->key, value, (int)strcspn(entry->values, "|"), entry->values);
}

dpl_status dpl_config_put(dpl_config *config, const char *key, const char *value)
{
    const size_t i = find_option(key);
    if (i < DPL_OPT_N) {
        DPL_TRY(set_option(config, i, value));
        config->given[i] = true;
        return DPL_OK;
    }
    for (size_t j = 0; j < DPL_COUNT(fixed); j++)
        if (strcmp(fixed[j].key, key) == 0) return check_fixed(&fixed[j], value);
    for (size_t j = 0; j < DPL_COUNT(ignored); j++) {
        if (strcmp(ignored[j], key) != 0) continue;
        dpl_log("notice: %s has no effect here and is ignored", key);
        return DPL_OK;
    }
    return unknown_key(key);
}

/* ---- the configuration as an object ---- */

static dpl_status put_line(void *arg, const char *key, const char *value, int line)
{
    (void)line;
    return dpl_config_put(arg, key, value);
}

dpl_status dpl_config_open(const char *path, dpl_config **config_out)
{
    if (!config_out) return dpl_fail(DPL_EINVAL, "dpl_config_open: config_out is NULL");
    dpl_config *config = dpl_alloc(sizeof *config);
    if (!config) return dpl_fail(DPL_ENOMEM, "no memory for a configuration");
    dpl_status status = DPL_OK;
    for (size_t i = 0; i < DPL_OPT_N && status == DPL_OK; i++)
        status = set_option(config, i, options[i].missing);
    if (status == DPL_OK && path) status = dpl_yaml_read(path, put_line, config);
    if (status != DPL_OK)
        dpl_config_close(&config);
    else
        *config_out = config;
    return status;
}

dpl_status dpl_config_clone(const dpl_config *config, dpl_config **config_out)
{
    dpl_config *copy;
    DPL_TRY(dpl_config_open(NULL, &copy));
    dpl_status status = DPL_OK;
    for (size_t i = 0; i < DPL_OPT_N && status == DPL_OK; i++)
        status = set_option(copy, i, config->text[i]);
    memcpy(copy->given, config->given, sizeof copy->given);
    if (status != DPL_OK)
        dpl_config_close(&copy);
    else
        *config_out = copy;
    return status;
}

void dpl_config_close(dpl_config **config)
{
    if (!config || !*config) return;
    for (size_t i = 0; i < DPL_OPT_N; i++)
        dpl_free((*config)->text[i]);
    dpl_free(*config);
    *config = NULL;
}

dpl_status dpl_config_set(dpl_config *config, const char *assignment)
{
    if (!config || !assignment) return dpl_fail(DPL_EINVAL, "dpl_config_set: an argument is NULL");
    const char *equals = strchr(assignment, '=');
    if (!equals || equals == assignment)
        return dpl_fail(DPL_EINVAL, "'%s' is not an assignment, expected key=value", assignment);
    char key[128];
    if ((size_t)(equals - assignment) >= sizeof key)
        return dpl_fail(DPL_EINVAL, "the key of '%.40s...' is too long", assignment);
    snprintf(key, sizeof key, "%.*s", (int)(equals - assignment), assignment);
    return dpl_config_put(config, key, equals + 1);
}

const char *dpl_config_get(const dpl_config *config, const char *key)
{
    if (!config || !key) return NULL;
    const size_t i = find_option(key);
    return i < DPL_OPT_N ? config->text[i] : NULL;
}

size_t dpl_config_option_count(void)
{
    return DPL_OPT_N;
}

dpl_status dpl_config_option(size_t i, dpl_option_info *info_out)
{
    if (!info_out || i >= DPL_OPT_N)
        return dpl_fail(DPL_EINVAL, "option %zu, expected less than %d and an info_out", i,
                        DPL_OPT_N);
    const option *opt = &options[i];
    const bool choices = opt->kind == 'C';
    const char *type = choices            ? opt->range
                       : opt->kind == 'I' ? "integer"
                       : opt->kind == 'F' ? "number"
                       : opt->kind == 'B' ? "true|false"
                                          : "text";
    *info_out = (dpl_option_info){opt->key, type, opt->missing, choices ? "" : opt->range,
                                  opt->help};
    return DPL_OK;
}

// Text is quoted as JSON, which YAML reads; a list is JSON already.
static dpl_status append_value(FILE *file, char kind, const char *text)
{
    json_t *value = text[0] == '[' ? json_loads(text, 0, NULL) : NULL;
    if ((kind != 'T' && kind != 'C') || value) {
        json_decref(value);
        fprintf(file, "%s\n", text);
        return DPL_OK;
    }
    value = json_string(text);
    char *quoted = value ? json_dumps(value, JSON_ENCODE_ANY) : NULL;
    json_decref(value);
    if (!quoted) return dpl_fail(DPL_EINVAL, "'%s' is not UTF-8 text", text);
    fprintf(file, "%s\n", quoted);
    free(quoted);
    return DPL_OK;
}

dpl_status dpl_config_save(const dpl_config *config, const char *path)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *file = open_memstream(&text, &bytes);
    if (!file) return dpl_fail(DPL_ENOMEM, "no memory for %s", path);
    dpl_status status = DPL_OK;
    for (size_t i = 0; i < DPL_OPT_N && status == DPL_OK; i++) {
        fprintf(file, "%s: ", options[i].key);
        status = append_value(file, options[i].kind, config->text[i]);
    }
    if (fclose(file) != 0 && status == DPL_OK)
        status = dpl_fail(DPL_ENOMEM, "no memory for %s", path);
    if (status == DPL_OK) status = dpl_write_file(path, text, bytes);
    free(text);
    return status;
}
