/*
 * inspect.c - what a model, a checkpoint or a configuration is: sizes, types, FLOPs, bytes.
 *
 * Everything is put into one JSON object; the lines for people are made from the same object, so that the
 * two cannot differ. Weights are never read, except for a checkpoint's checksums.
 */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

#include "api/api.h"

typedef struct subject { // what is described
    const char *kind;    // "model", "checkpoint", "configuration"
    char dir[PATH_MAX];  // "": a configuration
    dpl_config *config;
    dpl_model_config sizes;
} subject;

void dpl_text_close(char **text)
{
    if (!text || !*text) return;
    dpl_free(*text);
    *text = NULL;
}

static bool ends_with(const char *text, const char *tail)
{
    const size_t n = strlen(text), n_tail = strlen(tail);
    return n >= n_tail && !strcmp(text + n - n_tail, tail);
}

static json_t *whole(uint64_t value)
{
    return json_integer((json_int_t)value);
}

/* ---- finding the subject ---- */

static dpl_status open_json(const char *path, subject *s)
{
    json_t *object;
    DPL_TRY(dpl_config_open(NULL, &s->config));
    DPL_TRY(dpl_json_read(path, &object));
    dpl_status status = dpl_model_config_from_json(object, &s->sizes);
    const json_t *dtype = json_object_get(object, "dtype");
    const char *name = json_string_value(dtype ? dtype : json_object_get(object, "torch_dtype"));
    const bool bf16 = name && dpl_is(name, "bfloat16");
    if (status == DPL_OK) status = dpl_api_fit(s->config, &s->sizes, bf16 ? DPL_BF16 : DPL_F32);
    json_decref(object);
    return status == DPL_OK ? DPL_OK : dpl_fail_in(status, "%s", path);
}

static dpl_status open_subject(const char *path, const char *const *settings, size_t n_settings,
                               subject *s)
{
    if (!dpl_path_exists(path)) return dpl_fail(DPL_EIO, "cannot find %s: %m", path);
    if (dpl_path_is_dir(path)) {
        char manifest[PATH_MAX];
        DPL_TRY(dpl_api_resolve(path, s->dir, NULL));
        if (ends_with(s->dir, "/.")) s->dir[strlen(s->dir) - 2] = '\0';
        DPL_TRY(dpl_path_join(s->dir, "manifest.json", manifest));
        s->kind = dpl_path_exists(manifest) ? "checkpoint" : "model";
        DPL_TRY(dpl_config_open_model(path, &s->config));
        DPL_TRY(dpl_model_read_config(s->dir, &s->sizes, NULL));
        return dpl_api_apply(s->config, settings, n_settings);
    }
    s->kind = "configuration";
    if (ends_with(path, ".json")) {
        DPL_TRY(open_json(path, s));
        return dpl_api_apply(s->config, settings, n_settings);
    }
    DPL_TRY(dpl_config_open(path, &s->config));
    DPL_TRY(dpl_api_apply(s->config, settings, n_settings));
    return dpl_config_model(s->config, &s->sizes);
}

/* ---- the object ---- */

static json_t *parameters(const dpl_model_config *c, const dpl_model_info *info)
{
    const uint64_t d = c->d, l = c->n_layers, head = c->d_nope + c->d_rope,
                   bias = c->attention_bias;
    const uint64_t n_moe = l - c->n_dense, expert = 3 * d * c->moe_f;
    const uint64_t query = c->q_lora
                               ? d * c->q_lora + c->q_lora * c->n_heads * head + bias * c->q_lora
                               : d * c->n_heads * head;
    const uint64_t kv_a = c->kv_lora + c->d_rope;
    const uint64_t attention = query + d * kv_a + bias * kv_a +
                               c->kv_lora * c->n_heads * (c->d_nope + c->d_v) +
                               c->n_heads * c->d_v * d + bias * d;
    const uint64_t norms = l * (2 * d + c->q_lora + c->kv_lora) + d;
    return json_pack(
        "{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "total", whole(info->n_params),
        "active_per_token", whole(info->n_active_params), "embedding_and_head",
        whole(c->vocab * d * (c->tied ? 1 : 2)), "attention", whole(l * attention), "dense_mlp",
        whole(c->n_dense * 3 * d * c->mlp_f), "router", whole(n_moe * d * c->n_experts), "experts",
        whole(n_moe * c->n_experts * expert), "shared_experts", whole(n_moe * c->n_shared * expert),
        "norms", whole(norms), "multi_token_prediction", whole(info->n_mtp_params));
}

static json_t *sizes(const dpl_model_config *c)
{
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "layers",
                     whole(c->n_layers), "dense_layers", whole(c->n_dense), "multi_token_layers",
                     whole(c->n_mtp), "width", whole(c->d), "heads", whole(c->n_heads),
                     "vocabulary", whole(c->vocab), "experts", whole(c->n_experts),
                     "experts_per_token", whole(c->top_k), "shared_experts", whole(c->n_shared),
                     "positions", whole(c->max_positions));
}

static json_t *memory(const dpl_model_config *c, const dpl_model_info *info, bool bf16)
{
    const uint64_t n = info->n_params + info->n_mtp_params;
    const uint64_t bias = (c->n_layers - c->n_dense + c->n_mtp) * c->n_experts *
                          (c->routed_bias ? 1 : 0);
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:o}", "weights_bytes", whole(4 * (n + bias)),
                     "compute_copy_bytes", whole(bf16 ? 2 * n : 0), "gradients_bytes", whole(4 * n),
                     "moments_bytes", whole(8 * n), "training_bytes_without_activations",
                     whole((bf16 ? 18 : 16) * n + 4 * bias), "generation_cache_bytes_per_token",
                     whole(info->cache_bytes_per_token));
}

static dpl_status add_files(const subject *s, json_t *object)
{
    dpl_shards *shards;
    DPL_TRY(dpl_shards_open(s->dir, &shards));
    uint64_t n_bytes[DPL_ST_N] = {0}, all = 0;
    for (size_t i = 0; i < dpl_shards_count(shards); i++) {
        const dpl_st_tensor *t = dpl_shards_at(shards, i, NULL);
        n_bytes[t->dtype] += t->bytes;
        all += t->bytes;
    }
    json_t *files = json_pack("{s:o, s:o}", "tensors", whole(dpl_shards_count(shards)), "bytes",
                              whole(all));
    for (int i = 0; i < DPL_ST_N; i++) {
        char key[32];
        snprintf(key, sizeof key, "%s_bytes", dpl_st_dtype_name((dpl_st_dtype)i));
        if (n_bytes[i]) json_object_set_new(files, key, whole(n_bytes[i]));
    }
    dpl_shards_close(&shards);
    json_object_set_new(object, "files", files);
    // Finding a checkpoint verifies it, or fails.
    if (dpl_is(s->kind, "checkpoint"))
        json_object_set_new(object, "checksums", json_string("verified"));
    return DPL_OK;
}

static dpl_status describe(const char *path, const subject *s, unsigned flags, json_t *object)
{
    const bool bf16 = dpl_is(s->config->o.dtype, "bfloat16");
    const size_t n_seq = (size_t)s->config->o.max_target_length;
    dpl_model_info info;
    DPL_TRY(dpl_model_config_check(&s->sizes));
    dpl_api_describe(&s->sizes, bf16 ? DPL_BF16 : DPL_F32, &info);
    json_object_set_new(object, "kind", json_string(s->kind));
    json_object_set_new(object, "path", json_string(s->dir[0] ? s->dir : path));
    json_object_set_new(object, "family", json_string(info.family));
    json_object_set_new(object, "compute_dtype", json_string(info.dtype));
    json_object_set_new(object, "sizes", sizes(&s->sizes));
    json_object_set_new(object, "parameters", parameters(&s->sizes, &info));
    json_object_set_new(object, "sequence", whole(n_seq));
    json_object_set_new(object, "training_flops_per_token",
                        json_real(dpl_model_flops(&s->sizes, 1, n_seq) / (double)n_seq));
    if (flags & DPL_INSPECT_MEMORY)
        json_object_set_new(object, "memory", memory(&s->sizes, &info, bf16));
    return s->dir[0] ? add_files(s, object) : DPL_OK;
}

/* ---- as text ---- */

// 12,345,678 and, for bytes and FLOPs, the same in larger units.
static void print_number(FILE *out, const char *key, double value)
{
    static const char *const units[] = {"", " k", " M", " G", " T", " P"};
    char digits[32];
    const int n = snprintf(digits, sizeof digits, "%.0f", value);
    for (int i = 0; i < n; i++)
        fprintf(out, "%s%c", i > 0 && (n - i) % 3 == 0 ? "," : "", digits[i]);
    if (value < 1e6 || (!strstr(key, "bytes") && !strstr(key, "flops"))) return;
    const double step = strstr(key, "bytes") ? 1024 : 1000;
    size_t unit = 0;
    while (value >= step && unit + 1 < DPL_COUNT(units)) {
        value /= step;
        unit++;
    }
    char text[32];
    dpl_format(text, sizeof text, "%.2f", value);
    fprintf(out, "  (%s%s%s)", text, units[unit], step > 1000 ? "iB" : "FLOP");
}

static void print_lines(FILE *out, json_t *object, int indent)
{
    const char *key;
    json_t *value;
    json_object_foreach(object, key, value)
    {
        char words[64];
        snprintf(words, sizeof words, "%s", key);
        for (char *p = words; *p; p++)
            if (*p == '_') *p = ' ';
        fprintf(out, "%*s%s:", indent, "", words);
        if (json_is_object(value)) {
            fputc('\n', out);
            print_lines(out, value, indent + 2);
            continue;
        }
        fprintf(out, "%*s", DPL_MAX(1, 36 - indent - (int)strlen(words)), "");
        if (json_is_string(value))
            fputs(json_string_value(value), out);
        else
            print_number(out, key, json_number_value(value));
        fputc('\n', out);
    }
}

static dpl_status print(json_t *object, unsigned flags, char **text_out)
{
    char *made = NULL;
    size_t bytes = 0;
    if (flags & DPL_INSPECT_JSON) {
        made = json_dumps(object, JSON_COMPACT | JSON_REAL_PRECISION(17));
    } else {
        FILE *out = open_memstream(&made, &bytes);
        if (out) print_lines(out, object, 0);
        if (out && fclose(out) != 0) {
            free(made);
            made = NULL;
        }
    }
    char *text = made ? dpl_strdup(made) : NULL;
    free(made);
    if (!text) return dpl_fail(DPL_ENOMEM, "no memory for the description");
    *text_out = text;
    return DPL_OK;
}

dpl_status dpl_inspect(const char *path, const char *const *settings, size_t n_settings,
                       unsigned flags, char **text_out)
{
    if (!path || !text_out || (!settings && n_settings))
        return dpl_fail(DPL_EINVAL, "a path and a place for the text are needed");
    subject s = {0};
    json_t *object = json_object();
    dpl_status status = object ? DPL_OK : dpl_fail(DPL_ENOMEM, "no memory for the description");
    if (status == DPL_OK) status = open_subject(path, settings, n_settings, &s);
    if (status == DPL_OK) status = describe(path, &s, flags, object);
    if (status == DPL_OK) status = print(object, flags, text_out);
    json_decref(object);
    dpl_config_close(&s.config);
    return status;
}
