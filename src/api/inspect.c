// inspect.c - what a model, a checkpoint or a configuration is: sizes, types, FLOPs, bytes.
//
// Everything is put into one JSON object; the lines for people are made from the same object, so
// that the two cannot differ. Weights are never read, except for a checkpoint's checksums.
#include <fnmatch.h>
#include <stdlib.h>

#include "api/api.h"

typedef struct subject { // what is described
    const char *kind;    // "model", "checkpoint", "configuration"
    char dir[PATH_MAX];  // "": a configuration
    dpl_config *config;
    dpl_model_config sizes;
} subject;

void dpl_text_close(char **text) {
    if (!text) return;
    free(*text); // of open_memstream
    *text = NULL;
}

/* ---- finding the subject ---- */
static dpl_status open_dir(const char *path, subject *s) {
    DPL_TRY(dpl_checkpoint_resolve(path, s->dir));
    s->dir[strlen(s->dir) - 1] = '\0'; // the slash at its end
    s->kind = dpl_has_file(s->dir, "manifest.json") ? "checkpoint" : "model";
    DPL_TRY(dpl_config_open_model(path, &s->config));
    return dpl_model_read_config(s->dir, &s->sizes, NULL);
}

static dpl_status open_json(const char *path, subject *s) {
    dpl_dtype dtype;
    DPL_TRY(dpl_model_read_config(path, &s->sizes, &dtype));
    return dpl_api_defaults(&s->sizes, dtype, &s->config);
}

static dpl_status open_subject(const char *path, const char *const *settings, size_t n_settings,
                               subject *s) {
    DPL_EXPECT(dpl_path_exists(path), DPL_EIO, "cannot find %s: %m", path);
    const bool dir = dpl_path_is_dir(path), json = fnmatch("*.json", path, 0) == 0;
    DPL_TRY(dir    ? open_dir(path, s)
            : json ? open_json(path, s)
                   : dpl_config_open(path, &s->config));
    DPL_TRY(dpl_api_apply(s->config, settings, n_settings));
    return dir || json ? DPL_OK : dpl_config_model(s->config, &s->sizes);
}

/* ---- the object ---- */
static json_t *parameters(const dpl_model_config *c, const dpl_model_info *info) {
    const uint64_t d = c->d, n_moe = c->n_layers - c->n_dense, expert = 3 * d * c->moe_f;
    const uint64_t qk = c->n_heads * (c->d_nope + c->d_rope), kv_a = c->kv_lora + c->d_rope;
    const uint64_t query = c->q_lora ? c->q_lora * (d + qk) : d * qk, out = c->n_heads * c->d_v * d;
    const uint64_t kv = d * kv_a + c->kv_lora * c->n_heads * (c->d_nope + c->d_v);
    const uint64_t biases = c->attention_bias ? c->q_lora + kv_a + d : 0;
    const uint64_t norms = c->n_layers * (2 * d + c->q_lora + c->kv_lora) + d;
    // Each part is counted by itself: a test compares their sum with the total.
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "total", info->n_params,
                     "active_per_token", info->n_active_params, "embedding_and_head",
                     c->vocab * d * (c->tied ? 1 : 2), "attention",
                     c->n_layers * (query + kv + out + biases), "norms", norms, "dense_mlp",
                     c->n_dense * 3 * d * c->mlp_f, "router", n_moe * d * c->n_experts, "experts",
                     n_moe * c->n_experts * expert, "shared_experts", n_moe * c->n_shared * expert,
                     "multi_token_prediction", info->n_mtp_params);
}

static json_t *sizes(const dpl_model_config *c) {
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "layers", c->n_layers,
                     "dense_layers", c->n_dense, "multi_token_layers", c->n_mtp, "width", c->d,
                     "heads", c->n_heads, "vocabulary", c->vocab, "experts", c->n_experts,
                     "experts_per_token", c->top_k, "shared_experts", c->n_shared, "positions",
                     c->max_positions);
}

static json_t *bytes_per_parameter(int copy) {
    return json_pack("{s:i, s:i, s:i, s:i, s:i}", "master", 4, "gradient", 4, "moments", 8,
                     "compute_copy", copy, "all", 16 + copy);
}

static json_t *memory(const dpl_model_config *c, const dpl_model_info *info, bool bf16) {
    const uint64_t n = info->n_params + info->n_mtp_params, copy = bf16 ? 2 * n : 0;
    const uint64_t n_bias = (c->n_layers - c->n_dense + c->n_mtp) * c->n_experts * c->routed_bias;
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:{s:o, s:o}}", "weights_bytes",
                     4 * (n + n_bias), "compute_copy_bytes", copy, "gradients_bytes", 4 * n,
                     "moments_bytes", 8 * n, "training_bytes_without_activations",
                     16 * n + copy + 4 * n_bias, "generation_cache_bytes_per_token",
                     info->cache_bytes_per_token, "bytes_per_parameter", "float32",
                     bytes_per_parameter(0), "bfloat16", bytes_per_parameter(2));
}

static void add(json_t *object, const char *key, uint64_t n) {
    const json_int_t before = json_integer_value(json_object_get(object, key));
    json_object_set_new(object, key, json_integer(before + (json_int_t)n));
}

// All bytes, and those of each type.
static json_t *files(const dpl_st_file *weights) {
    json_t *object = json_pack("{s:I, s:i}", "tensors", weights->n_tensors, "bytes", 0);
    for (size_t i = 0; i < weights->n_tensors; i++) {
        const dpl_st_tensor *t = &weights->tensors[i];
        char key[32];
        snprintf(key, sizeof key, "%s_bytes", dpl_st_dtype_name(t->dtype));
        add(object, "bytes", t->bytes);
        add(object, key, t->bytes);
    }
    return object;
}

// The object is the caller's, on failure too.
static dpl_status describe(const char *path, const subject *s, unsigned flags,
                           json_t **object_out) {
    const dpl_dtype dtype = dpl_options_dtype(&s->config->o);
    const size_t n_seq = (size_t)s->config->o.max_target_length;
    const bool in_dir = s->dir[0] != '\0';
    dpl_st_file *weights;
    dpl_model_info info;
    DPL_TRY(dpl_model_config_check(&s->sizes));
    dpl_api_describe(&s->sizes, dtype, &info);
    json_t *object = *object_out = json_pack(
        "{s:s, s:o*, s:s, s:s, s:o, s:o, s:I, s:f}", "kind", s->kind, "path",
        json_string(in_dir ? s->dir : path), "family", info.family, "compute_dtype", info.dtype,
        "sizes", sizes(&s->sizes), "parameters", parameters(&s->sizes, &info), "sequence", n_seq,
        "training_flops_per_token", dpl_model_flops(&s->sizes, 1, n_seq) / (double)n_seq);
    if (flags & DPL_INSPECT_MEMORY)
        json_object_set_new(object, "memory", memory(&s->sizes, &info, dtype == DPL_BF16));
    if (!in_dir) return DPL_OK;
    DPL_TRY(dpl_st_open(s->dir, &weights));
    json_object_set_new(object, "files", files(weights));
    dpl_st_close(&weights);
    // Finding a checkpoint verifies it, or fails.
    if (dpl_is(s->kind, "checkpoint"))
        json_object_set_new(object, "checksums", json_string("verified"));
    return DPL_OK;
}

/* ---- as text ---- */
// 12,345,678 and, for bytes and FLOPs, the same in larger units.
static void print_number(FILE *out, const char *key, double value) {
    const bool bytes = strstr(key, "bytes") != NULL;
    const char *unit = " kMGTP";
    char digits[32];
    const int n = snprintf(digits, sizeof digits, "%.0f", value);
    for (int i = 0; i < n; i++) fprintf(out, "%s%c", i && (n - i) % 3 == 0 ? "," : "", digits[i]);
    if (value < 1e6 || (!bytes && !strstr(key, "flops"))) return;
    for (const double step = bytes ? 1024 : 1000; value >= step && unit[1]; unit++) value /= step;
    dpl_format(digits, sizeof digits, "%.2f", value);
    fprintf(out, "  (%s %c%s)", digits, *unit, bytes ? "iB" : "FLOP");
}

static void print_lines(FILE *out, json_t *object, int indent) {
    const char *key;
    json_t *value;
    json_object_foreach(object, key, value) {
        fprintf(out, "%*s", indent, "");
        for (const char *p = key; *p; p++) fputc(*p == '_' ? ' ' : *p, out);
        fputc(':', out);
        if (json_is_object(value)) {
            fputc('\n', out);
            print_lines(out, value, indent + 2);
            continue;
        }
        fprintf(out, "%*s", DPL_MAX(1, 36 - indent - (int)strlen(key)), "");
        if (json_is_string(value)) fputs(json_string_value(value), out);
        else print_number(out, key, json_number_value(value));
        fputc('\n', out);
    }
}

static dpl_status print(json_t *object, unsigned flags, char **text_out) {
    char *text = NULL;
    size_t bytes;
    FILE *out = object ? open_memstream(&text, &bytes) : NULL;
    if (out && flags & DPL_INSPECT_JSON)
        json_dumpf(object, out, JSON_COMPACT | JSON_REAL_PRECISION(17));
    else if (out) print_lines(out, object, 0);
    if (!out || fclose(out) != 0) {
        free(text);
        return dpl_fail(DPL_ENOMEM, "no memory for the description");
    }
    *text_out = text;
    return DPL_OK;
}

dpl_status dpl_inspect(const char *path, const char *const *settings, size_t n_settings,
                       unsigned flags, char **text_out) {
    DPL_NEED(path && text_out && (settings || !n_settings));
    subject s = {.kind = "configuration"};
    json_t *object = NULL;
    dpl_status status = open_subject(path, settings, n_settings, &s);
    if (status == DPL_OK) status = describe(path, &s, flags, &object);
    if (status == DPL_OK) status = print(object, flags, text_out);
    json_decref(object);
    dpl_config_close(&s.config);
    return status;
}
