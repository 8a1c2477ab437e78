/*
 * model.c - the public functions of a model: open, forward, loss, write, sizes.
 *
 * Everything that a caller gives is checked here, once; below, sizes and ids are trusted.
 */
#include <limits.h>
#include <stddef.h>

#include "api/api.h"

#define IDS_MAX ((size_t)1 << 30) // of one batch; stored indexes are int32

const char *dpl_version(void)
{
    return DPL_VERSION;
}

dpl_status dpl_api_dtype(const char *name, dpl_dtype *dtype_out)
{
    if (name && !strcmp(name, "float32"))
        *dtype_out = DPL_F32;
    else if (name && !strcmp(name, "bfloat16"))
        *dtype_out = DPL_BF16;
    else
        return dpl_fail(DPL_EINVAL, "dtype is \"%s\", expected float32 or bfloat16",
                        name ? name : "");
    return DPL_OK;
}

const char *dpl_api_dtype_name(dpl_dtype dtype)
{
    return dtype == DPL_F32 ? "float32" : "bfloat16";
}

/* ---- open and close ---- */

dpl_status dpl_model_open(dpl_ctx *ctx, const char *path, const dpl_config *config,
                          dpl_model **model_out)
{
    char dir[PATH_MAX];
    dpl_model_config sizes;
    dpl_dtype dtype = DPL_F32;
    dpl_comm *comm = NULL;
    dpl_model *model = NULL;
    if (!ctx || !model_out)
        return dpl_fail(DPL_EINVAL, "a context and a place for the model are needed");
    if (!path && !config)
        return dpl_fail(DPL_EINVAL, "neither a path nor a configuration was given");
    if (path) {
        DPL_TRY(dpl_api_resolve(path, dir, NULL));
        DPL_TRY(dpl_model_read_config(dir, &sizes, &dtype));
    } else {
        DPL_TRY(dpl_config_model(config, &sizes));
    }
    if (config) DPL_TRY(dpl_api_dtype(config->o.dtype, &dtype));
    DPL_TRY(dpl_comm_open("self", NULL, &comm));
    dpl_status status = dpl_model_create(ctx, comm, &sizes, dtype, &model);
    if (status == DPL_OK && path) status = dpl_model_load(model, dir);
    if (status == DPL_OK && !path) dpl_options_init(&config->o, model);
    if (status == DPL_OK) {
        *model_out = model;
        return DPL_OK;
    }
    dpl_model_destroy(&model);
    dpl_comm_close(&comm);
    return status;
}

void dpl_model_close(dpl_model **model)
{
    if (!model || !*model) return;
    dpl_comm *comm = (*model)->comm;
    dpl_model_destroy(model);
    dpl_comm_close(&comm);
}

/* ---- sizes ---- */

void dpl_api_describe(const dpl_model_config *c, dpl_dtype dtype, dpl_model_info *info)
{
    *info = (dpl_model_info){
        .struct_bytes = sizeof *info,
        .family = "deepseek_v3",
        .dtype = dpl_api_dtype_name(dtype),
        .vocab = c->vocab,
        .width = c->d,
        .n_heads = c->n_heads,
        .n_layers = c->n_layers,
        .n_dense_layers = c->n_dense,
        .n_mtp_layers = c->n_mtp,
        .n_experts = c->n_experts,
        .n_experts_per_token = c->top_k,
        .n_shared_experts = c->n_shared,
        .positions_max = c->max_positions,
        .n_params = dpl_model_param_count(c),
        .n_active_params = dpl_model_active_param_count(c),
        .flops_per_token = dpl_model_flops(c, 1, c->max_positions) / (double)c->max_positions,
        .cache_bytes_per_token = c->n_layers * (c->kv_lora + c->d_rope) * sizeof(float),
    };
    // One MTP layer is one MoE layer, two norms before its projection (D, 2D), and the norm after it.
    dpl_model_config more = *c;
    more.n_layers++;
    const uint64_t layer = dpl_model_param_count(&more) - info->n_params;
    info->n_mtp_params = c->n_mtp * (layer + 2 * c->d * c->d + 3 * c->d);
}

dpl_status dpl_model_get_info(const dpl_model *model, dpl_model_info *info)
{
    dpl_model_info all;
    if (!model || !info || info->struct_bytes < sizeof info->struct_bytes)
        return dpl_fail(DPL_EINVAL, "struct_bytes must be set to sizeof(dpl_model_info)");
    dpl_api_describe(&model->config, model->dtype, &all);
    const size_t bytes = DPL_MIN(info->struct_bytes, sizeof all);
    all.struct_bytes = bytes;
    memcpy(info, &all, bytes);
    return DPL_OK;
}

/* ---- forward and loss ---- */

dpl_status dpl_api_check_ids(const char *what, const int32_t *ids, size_t n, size_t vocab,
                             bool skip)
{
    for (size_t i = 0; i < n; i++) {
        if (skip && ids[i] < 0) continue;
        if (ids[i] < 0 || (size_t)ids[i] >= vocab)
            return dpl_fail(DPL_EINVAL, "%s %zu is %d, expected 0 to %zu", what, i, ids[i],
                            vocab - 1);
    }
    return DPL_OK;
}

dpl_status dpl_api_check_batch(const dpl_model_config *config, size_t n_batch, size_t n_seq)
{
    if (n_seq < 1 || n_seq > config->max_positions)
        return dpl_fail(DPL_EINVAL,
                        "the sequence has %zu tokens, expected 1 to %zu (max_position_embeddings)",
                        n_seq, config->max_positions);
    if (n_batch < 1 || n_batch > IDS_MAX / n_seq)
        return dpl_fail(DPL_EINVAL, "the batch has %zu sequences of %zu tokens, expected 1 to %zu",
                        n_batch, n_seq, IDS_MAX / n_seq);
    return DPL_OK;
}

static dpl_status evaluate(dpl_model *model, const dpl_batch *batch, float *logits,
                           dpl_loss_sums *sums_out)
{
    const size_t n = batch->n_batch * batch->n_seq;
    DPL_TRY(dpl_api_check_ids("id", batch->ids, n, model->config.vocab, false));
    if (batch->targets)
        DPL_TRY(dpl_api_check_ids("target", batch->targets, n, model->config.vocab, true));
    return dpl_model_evaluate(model, batch, &(dpl_loss_rule){0}, logits, sums_out);
}

dpl_status dpl_model_forward(dpl_model *model, const int32_t *ids, size_t n_batch, size_t n_seq,
                             float *logits_out)
{
    dpl_loss_sums sums;
    if (!model || !ids || !logits_out)
        return dpl_fail(DPL_EINVAL, "model, ids and logits are needed");
    DPL_TRY(dpl_api_check_batch(&model->config, n_batch, n_seq));
    return evaluate(model, &(dpl_batch){.n_batch = n_batch, .n_seq = n_seq, .ids = ids}, logits_out,
                    &sums);
}

dpl_status dpl_model_loss(dpl_model *model, const int32_t *ids, const int32_t *targets,
                          size_t n_batch, size_t n_seq, double *loss_sum_out, size_t *n_tokens_out)
{
    dpl_loss_sums sums;
    if (!model || !ids || !targets || !loss_sum_out)
        return dpl_fail(DPL_EINVAL, "model, ids, targets and a place for the loss are needed");
    DPL_TRY(dpl_api_check_batch(&model->config, n_batch, n_seq));
    const dpl_batch batch = {.n_batch = n_batch, .n_seq = n_seq, .ids = ids, .targets = targets};
    DPL_TRY(evaluate(model, &batch, NULL, &sums));
    *loss_sum_out = sums.xent;
    if (n_tokens_out) *n_tokens_out = (size_t)sums.n_tokens;
    return DPL_OK;
}

/* ---- write ---- */

dpl_status dpl_model_write(dpl_model *model, const char *path, const char *dtype_name,
                           size_t shard_bytes)
{
    dpl_dtype dtype;
    char staged[PATH_MAX], config[PATH_MAX];
    if (!model || !path) return dpl_fail(DPL_EINVAL, "a model and a path are needed");
    DPL_TRY(dpl_api_dtype(dtype_name, &dtype));
    DPL_TRY(dpl_path_join(path, "config.json", config));
    if (dpl_path_exists(path) && !dpl_path_exists(config))
        return dpl_fail(DPL_EINVAL,
                        "%s is there and is no model directory: it will not be replaced", path);
    DPL_TRY(dpl_stage_open(path, staged, sizeof staged));
    dpl_status status = dpl_model_save(model, staged, dtype, shard_bytes);
    if (status == DPL_OK) status = dpl_stage_commit(staged, path);
    if (status != DPL_OK) dpl_stage_abandon(staged);
    return status;
}
