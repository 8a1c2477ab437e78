// block.c - one decoder layer: attention block, then a dense MLP or the MoE layer, on an fp32
// residual stream; and the linear map and norm that all of the model is made of.
#include "model/block.h"

#define LATENT_EPS 1e-6f // of the latent norms, whatever the model's is, as transformers has it

size_t dpl_act_width(const dpl_model_config *c, dpl_act_id id) {
#define WIDTH(id, width) width,
    const size_t widths[] = {DPL_ACT_MAP(WIDTH)};
#undef WIDTH
    return widths[id];
}

dpl_mat dpl_act_alloc(dpl_model *m, size_t n_rows, size_t width, bool f32) {
    return dpl_moe_mat(m->ctx, NULL, n_rows, width, f32 ? DPL_F32 : m->dtype);
}

static const dpl_param *bias_of(const dpl_model *m, int layer, dpl_param_id id) {
    if (id != DPL_P_Q_A && id != DPL_P_KV_A && id != DPL_P_O) return NULL;
    return dpl_model_param(m, layer, (dpl_param_id)(id + 1));
}

void dpl_linear_forward(dpl_model *m, int layer, dpl_param_id id, dpl_mat x, size_t n_rows,
                        dpl_mat y) {
    const dpl_param *bias = bias_of(m, layer, id);
    const dpl_weight w = dpl_model_weight(m, dpl_model_param(m, layer, id));
    const dpl_phase before = dpl_ctx_phase(m->ctx, DPL_PHASE_GEMM);
    dpl_gemm_forward(m->ctx, x, &w, dpl_one_group(n_rows), y);
    if (bias) dpl_add(m->ctx, y, dpl_mat_f32(dpl_model_values(m, bias), 0), n_rows, bias->k, y);
    dpl_ctx_phase(m->ctx, before);
}

void dpl_linear_backward(dpl_model *m, int layer, dpl_param_id id, dpl_mat dy, dpl_mat x,
                         size_t n_rows, dpl_mat dx, bool accumulate) {
    const dpl_param *bias = bias_of(m, layer, id);
    const dpl_weight w = dpl_model_weight(m, dpl_model_param(m, layer, id));
    const dpl_groups rows = dpl_one_group(n_rows);
    const dpl_phase before = dpl_ctx_phase(m->ctx, DPL_PHASE_GEMM);
    if (bias)
        dpl_embed_backward(m->ctx, dy, NULL, false, n_rows, 1, bias->k, dpl_model_grad(m, bias));
    dpl_gemm_dgrad(m->ctx, dy, &w, rows, dx, accumulate);
    dpl_weight_grad(m->ctx, dy, x, (dpl_row_map){0}, rows, &w);
    dpl_ctx_phase(m->ctx, before);
}

static float norm_eps(const dpl_model *m, dpl_param_id id) {
    const bool latent = id == DPL_P_Q_A_NORM || id == DPL_P_KV_A_NORM;
    return latent ? LATENT_EPS : (float)m->config.eps;
}

float *dpl_norm_forward(dpl_model *m, int layer, dpl_param_id id, dpl_mat x, size_t n_rows,
                        dpl_mat y) {
    const dpl_param *gain = dpl_model_param(m, layer, id);
    float *rstd = dpl_ctx_alloc(m->ctx, n_rows * sizeof(float));
    const dpl_phase before = dpl_ctx_phase(m->ctx, DPL_PHASE_NORM);
    dpl_rmsnorm_forward(m->ctx, x, dpl_model_values(m, gain), n_rows, gain->k, norm_eps(m, id), y,
                        rstd);
    dpl_ctx_phase(m->ctx, before);
    return rstd;
}

float *dpl_add_norm_forward(dpl_model *m, int layer, dpl_param_id id, dpl_mat x, dpl_mat more,
                            size_t n_rows, dpl_mat sum, dpl_mat y) {
    const dpl_param *gain = dpl_model_param(m, layer, id);
    float *rstd = dpl_ctx_alloc(m->ctx, n_rows * sizeof(float));
    const dpl_phase before = dpl_ctx_phase(m->ctx, DPL_PHASE_NORM);
    dpl_add_rmsnorm_forward(m->ctx, x, more, dpl_model_values(m, gain), n_rows, gain->k,
                            norm_eps(m, id), sum, y, rstd);
    dpl_ctx_phase(m->ctx, before);
    return rstd;
}

void dpl_norm_backward(dpl_model *m, int layer, dpl_param_id id, dpl_mat dy, dpl_mat x,
                       const float *rstd, size_t n_rows, dpl_mat dx, bool accumulate) {
    const dpl_param *gain = dpl_model_param(m, layer, id);
    const dpl_phase before = dpl_ctx_phase(m->ctx, DPL_PHASE_NORM);
    dpl_rmsnorm_backward(m->ctx, dy, x, dpl_model_values(m, gain), rstd, n_rows, gain->k, dx,
                         accumulate, dpl_model_grad(m, gain));
    dpl_ctx_phase(m->ctx, before);
}

/* ---- the layer ---- */
static dpl_weight weight(const dpl_model *m, int layer, dpl_param_id id) {
    return dpl_model_weight(m, dpl_model_param(m, layer, id));
}

static dpl_moe_weights moe_weights(const dpl_model *m, int layer) {
    const float *bias = m->config.routed_bias ? dpl_model_bias(m, (size_t)layer) : NULL;
    // clang-format off
    return (dpl_moe_weights){
        weight(m, layer, DPL_P_ROUTER), bias,
        weight(m, layer, DPL_P_EXPERT_GATE_UP), weight(m, layer, DPL_P_EXPERT_DOWN),
        weight(m, layer, DPL_P_SHARED_GATE_UP), weight(m, layer, DPL_P_SHARED_DOWN)};
    // clang-format on
}

static dpl_mlp dense_mlp(const dpl_model *m, int layer, const dpl_block_saved *saved,
                         size_t n_rows) {
    const dpl_weight in = weight(m, layer, DPL_P_GATE_UP), out = weight(m, layer, DPL_P_DOWN);
    const dpl_mat *act = saved->act;
    return (dpl_mlp){.groups = dpl_one_group(n_rows),
                     .gate_up_w = in,
                     .down_w = out,
                     .x = act[DPL_ACT_MLP_NORM],
                     .gate_up = act[DPL_ACT_MLPWI],
                     .hidden = act[DPL_ACT_MLP_HIDDEN]};
}

dpl_status dpl_block_forward(dpl_model *m, int layer, const dpl_batch *b, const dpl_aux *aux,
                             const dpl_mla_cache *cache, dpl_mat x, dpl_mat out,
                             dpl_block_saved *saved) {
    const bool moe = dpl_model_layer_is_moe(&m->config, (size_t)layer);
    const size_t T = dpl_batch_tokens(b);
    *saved = (dpl_block_saved){.act[DPL_ACT_INPUT] = x};
    for (dpl_act_id id = DPL_ACT_INPUT + 1; id < (moe ? DPL_ACT_MLPWI : DPL_ACT_N); id++)
        saved->act[id] = dpl_act_alloc(m, T, dpl_act_width(&m->config, id),
                                       id == DPL_ACT_MLP_INPUT);
    dpl_mla_forward(m, layer, b, cache, saved);
    const dpl_mat middle = saved->act[DPL_ACT_MLP_INPUT], n = saved->act[DPL_ACT_MLP_NORM];
    saved->rstd_mlp = dpl_add_norm_forward(m, layer, DPL_P_MLP_NORM, x, middle, T, middle, n);
    if (moe) {
        const dpl_moe_weights weights = moe_weights(m, layer);
        const dpl_status status = dpl_moe_forward_in(m->ctx, &m->ranks, &m->moe, &weights, n, T,
                                                     b->segment, aux, NULL, &saved->moe, out);
        if (status != DPL_OK) return dpl_fail_in(status, "layer %d", layer);
        dpl_probe_routing(m, layer, &saved->moe);
    } else {
        const dpl_mlp mlp = dense_mlp(m, layer, saved, T);
        dpl_experts_forward(m->ctx, &mlp, out);
    }
    dpl_probe_mat(m, "mlp", layer, b, out, m->config.d);
    dpl_add(m->ctx, middle, out, T, m->config.d, out);
    return DPL_OK;
}

dpl_status dpl_block_backward(dpl_model *m, int layer, const dpl_batch *b, const dpl_aux *aux,
                              dpl_block_saved *saved, dpl_mat dx) {
    const dpl_model_config *c = &m->config;
    const size_t T = dpl_batch_tokens(b), mark = dpl_ctx_mark(m->ctx);
    const dpl_mat n = saved->act[DPL_ACT_MLP_NORM], dn = dpl_act_alloc(m, T, c->d, true);
    if (dpl_model_layer_is_moe(c, (size_t)layer)) {
        const dpl_moe_weights weights = moe_weights(m, layer);
        const dpl_status status = dpl_moe_backward(m->ctx, &m->moe, &weights, n, aux, &saved->moe,
                                                   dx, dn);
        if (status != DPL_OK) return dpl_fail_in(status, "layer %d, backward", layer);
        dpl_moe_forget(&saved->moe);
    } else {
        const dpl_mlp mlp = dense_mlp(m, layer, saved, T);
        dpl_experts_backward(m->ctx, &mlp, dx, dn, false, NULL);
    }
    dpl_norm_backward(m, layer, DPL_P_MLP_NORM, dn, saved->act[DPL_ACT_MLP_INPUT], saved->rstd_mlp,
                      T, dx, true);
    dpl_ctx_release(m->ctx, mark);
    dpl_mla_backward(m, layer, b, saved, dx);
    return DPL_OK;
}
