// model.c - the public functions of a model: its options, open, sizes, forward, loss, write.
#include <stdlib.h>

#include "api/api.h"

#define IDS_MAX ((size_t)1 << 30) // of one batch; stored indexes are int32

const char *dpl_version(void) {
    return DPL_VERSION;
}

const char *dpl_api_dtype_name(dpl_dtype dtype) {
    return dtype == DPL_F32 ? "float32" : "bfloat16";
}

/* ---- options, so that a run is evaluated as it was trained ---- */
dpl_status dpl_api_apply(dpl_config *config, const char *const *settings, size_t n_settings) {
    for (size_t i = 0; i < n_settings; i++) DPL_TRY(dpl_config_set(config, settings[i]));
    return DPL_OK;
}

dpl_status dpl_api_defaults(const dpl_model_config *model, dpl_dtype dtype,
                            dpl_config **config_out) {
    char length[32];
    dpl_config *config;
    DPL_TRY(dpl_config_open(NULL, &config));
    dpl_status status = dpl_config_put(config, "dtype", dpl_api_dtype_name(dtype));
    const uint64_t most = model->max_positions, now = (uint64_t)config->o.max_target_length;
    snprintf(length, sizeof length, "%llu", (unsigned long long)DPL_MIN(most, now));
    if (status == DPL_OK) status = dpl_config_put(config, "max_target_length", length);
    if (status == DPL_OK) *config_out = config;
    else dpl_config_close(&config);
    return status;
}

// The run that PATH is, or that it lies in as a checkpoint; false: none.
static bool find_run(const char *path, char *run_out) {
    if (!realpath(path, run_out)) return false;
    if (dpl_has_file(run_out, "config.yml") && dpl_has_file(run_out, "checkpoints")) return true;
    char *last = strrchr(run_out, '/');
    *last = '\0';
    char *above = strrchr(run_out, '/');
    if (!above || strcmp(above, "/checkpoints") != 0) return false;
    *above = '\0';
    return dpl_has_file(run_out, "config.yml");
}

dpl_status dpl_config_open_model(const char *path, dpl_config **config_out) {
    char dir[PATH_MAX];
    dpl_model_config model;
    dpl_dtype dtype;
    DPL_NEED(path && config_out);
    if (find_run(path, dir)) { // opening the model verifies the checkpoint
        DPL_TRY(dpl_path_join(dir, "config.yml", dir));
        return dpl_config_open(dir, config_out);
    }
    DPL_TRY(dpl_checkpoint_resolve(path, dir));
    DPL_TRY(dpl_model_read_config(dir, &model, &dtype));
    return dpl_api_defaults(&model, dtype, config_out);
}

/* ---- open ---- */
dpl_status dpl_model_open(dpl_ctx *ctx, const char *path, const dpl_config *config,
                          dpl_model **model_out) {
    char dir[PATH_MAX];
    dpl_model_config sizes;
    dpl_dtype dtype = DPL_F32;
    dpl_model *model = NULL;
    DPL_CHECK(ctx && model_out, "a context and a place for the model are needed");
    DPL_CHECK(path || config, "neither a path nor a configuration was given");
    if (path) {
        DPL_TRY(dpl_checkpoint_resolve(path, dir));
        DPL_TRY(dpl_model_read_config(dir, &sizes, &dtype));
    } else {
        DPL_TRY(dpl_config_model(config, &sizes));
    }
    if (config) {
        dtype = dpl_options_dtype(&config->o);
        DPL_TRY(dpl_ctx_set_precision(ctx, config->o.matmul_precision));
    }
    dpl_status status = dpl_model_create(ctx, &sizes, dtype, &model);
    if (status == DPL_OK && path) status = dpl_model_load(model, dir);
    if (status == DPL_OK && !path) status = dpl_options_init(&config->o, model);
    if (status == DPL_OK) *model_out = model;
    else dpl_model_close(&model);
    return status;
}

/* ---- sizes ---- */
void dpl_api_describe(const dpl_model_config *c, dpl_dtype dtype, dpl_model_info *info) {
    const uint64_t all = dpl_model_param_count(c), active = dpl_model_active_param_count(c);
    const uint64_t with_mtp = (uint64_t)dpl_params_count(c, true, c->n_experts, false);
    const size_t most = c->max_positions, cache = c->n_layers * (c->kv_lora + c->d_rope);
    // clang-format off
    *info = (dpl_model_info){sizeof *info, "deepseek_v3", dpl_api_dtype_name(dtype),
                             c->vocab, c->d, c->n_heads, c->n_layers, c->n_dense, c->n_mtp,
                             c->n_experts, c->top_k, c->n_shared, most, all, active,
                             with_mtp - all, dpl_model_flops(c, 1, most) / (double)most,
                             cache * sizeof(float)};
    // clang-format on
}

dpl_status dpl_model_get_info(const dpl_model *model, dpl_model_info *info) {
    dpl_model_info all;
    DPL_NEED(model && info && info->struct_bytes >= sizeof info->struct_bytes);
    dpl_api_describe(&model->config, model->dtype, &all);
    all.struct_bytes = DPL_MIN(info->struct_bytes, sizeof all);
    memcpy(info, &all, all.struct_bytes);
    return DPL_OK;
}

/* ---- forward and loss ---- */
dpl_status dpl_api_check_batch(const dpl_model_config *config, size_t n_batch, size_t n_seq) {
    const size_t most = config->max_positions;
    DPL_CHECK(n_seq >= 1 && n_seq <= most,
              "a sequence of %zu tokens, expected 1 to %zu (max_position_embeddings)", n_seq, most);
    DPL_CHECK(n_batch >= 1 && n_batch <= IDS_MAX / n_seq,
              "a batch of %zu sequences of %zu tokens, expected 1 to %zu", n_batch, n_seq,
              IDS_MAX / n_seq);
    return DPL_OK;
}

dpl_status dpl_model_forward(dpl_model *model, const int32_t *ids, size_t n_batch, size_t n_seq,
                             float *logits_out) {
    DPL_NEED(model && ids && logits_out);
    DPL_TRY(dpl_api_check_batch(&model->config, n_batch, n_seq));
    const dpl_batch batch = {.n_batch = n_batch, .n_seq = n_seq, .ids = ids};
    return dpl_model_evaluate(model, &batch, &(dpl_loss_rule){0}, logits_out, NULL);
}

dpl_status dpl_model_loss(dpl_model *model, const int32_t *ids, const int32_t *targets,
                          size_t n_batch, size_t n_seq, double *loss_sum_out,
                          size_t *n_tokens_out) {
    dpl_loss_sums sums;
    DPL_NEED(model && ids && targets && loss_sum_out);
    DPL_TRY(dpl_api_check_batch(&model->config, n_batch, n_seq));
    const dpl_batch batch = {.n_batch = n_batch, .n_seq = n_seq, .ids = ids, .targets = targets};
    DPL_TRY(dpl_model_evaluate(model, &batch, &(dpl_loss_rule){0}, NULL, &sums));
    *loss_sum_out = sums.xent;
    if (n_tokens_out) *n_tokens_out = (size_t)sums.n_tokens;
    return DPL_OK;
}

/* ---- write ---- */
dpl_status dpl_model_write(dpl_model *model, const char *path, const char *dtype_name,
                           size_t shard_bytes) {
    dpl_out out;
    DPL_NEED(model && path && dtype_name);
    const dpl_dtype dtype = dpl_is(dtype_name, "float32") ? DPL_F32 : DPL_BF16;
    DPL_CHECK(dpl_is(dtype_name, dpl_api_dtype_name(dtype)),
              "dtype is \"%s\", expected float32 or bfloat16", dtype_name);
    DPL_CHECK(!dpl_path_exists(path) || dpl_has_file(path, "config.json"),
              "%s is no model directory: it will not be replaced", path);
    DPL_TRY(dpl_out_open_dir(path, &out));
    return dpl_out_close(&out, dpl_model_save(model, out.temp, dtype, shard_bytes));
}
