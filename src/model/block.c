// block.c - one decoder layer: attention block, then a dense MLP or the MoE layer, on an fp32 residual stream.
#include "model/block.h"

const char *dpl_act_name(dpl_act_id id)
{
    static const char *const names[] = {
#define NAME(id, name, width, f32) name,
        DPL_ACT_MAP(NAME)
#undef NAME
    };
    return names[id];
}

size_t dpl_act_width(const dpl_model_config *c, dpl_act_id id)
{
    switch (id) {
#define WIDTH(id, name, width, f32) \
    case DPL_ACT_##id:              \
        return width;
        DPL_ACT_MAP(WIDTH)
#undef WIDTH
    case DPL_ACT_N:
        break;
    }
    return 0;
}

dpl_mat dpl_act_alloc(dpl_model *m, size_t n_rows, size_t width, bool f32)
{
    const dpl_dtype dtype = f32 ? DPL_F32 : m->dtype;
    return (dpl_mat){dpl_ctx_alloc(m->ctx, n_rows * width * dpl_dtype_bytes(dtype)), width, dtype};
}

static dpl_moe_shape moe_shape(const dpl_model *m)
{
    const dpl_model_config *c = &m->config;
    return (dpl_moe_shape){.d = c->d,
                           .f = c->moe_f,
                           .shared_f = c->moe_f * c->n_shared,
                           .n_local = c->n_experts,
                           .dtype = m->dtype,
                           .rule = {.n_experts = c->n_experts,
                                    .top_k = c->top_k,
                                    .n_groups = c->n_groups,
                                    .top_groups = c->top_groups,
                                    .sigmoid = c->sigmoid,
                                    .group_top2 = true,
                                    .norm_topk = c->norm_topk,
                                    .scale = (float)c->routed_scale}};
}

static dpl_moe_weights moe_weights(const dpl_model *m, int layer)
{
    return (dpl_moe_weights){
        .router = dpl_model_weight(m, dpl_model_param(m, layer, DPL_P_ROUTER)),
        .bias = m->config.routed_bias ? dpl_model_bias(m, (size_t)layer) : NULL,
        .gate_up = dpl_model_weight(m, dpl_model_param(m, layer, DPL_P_EXPERT_GATE_UP)),
        .down = dpl_model_weight(m, dpl_model_param(m, layer, DPL_P_EXPERT_DOWN)),
        .shared_gate_up = dpl_model_weight(m, dpl_model_param(m, layer, DPL_P_SHARED_GATE_UP)),
        .shared_down = dpl_model_weight(m, dpl_model_param(m, layer, DPL_P_SHARED_DOWN))};
}

static dpl_moe_grads moe_grads(const dpl_model *m, int layer)
{
    return (dpl_moe_grads){
        .router = dpl_model_grad(m, dpl_model_param(m, layer, DPL_P_ROUTER)),
        .gate_up = dpl_model_grad(m, dpl_model_param(m, layer, DPL_P_EXPERT_GATE_UP)),
        .down = dpl_model_grad(m, dpl_model_param(m, layer, DPL_P_EXPERT_DOWN)),
        .shared_gate_up = dpl_model_grad(m, dpl_model_param(m, layer, DPL_P_SHARED_GATE_UP)),
        .shared_down = dpl_model_grad(m, dpl_model_param(m, layer, DPL_P_SHARED_DOWN))};
}

dpl_status dpl_block_forward(dpl_model *m, int layer, const dpl_stream *s, const dpl_aux *aux,
                             dpl_mat x, dpl_mat out, dpl_block_saved *saved)
{
    *saved = (dpl_block_saved){.act[DPL_ACT_INPUT] = x};
    dpl_mla_forward(m, layer, s, saved);
    return dpl_block_mlp(m, layer, s, aux, out, saved);
}

dpl_status dpl_block_mlp(dpl_model *m, int layer, const dpl_stream *s, const dpl_aux *aux,
                         dpl_mat out, dpl_block_saved *saved)
{
    const dpl_model_config *c = &m->config;
    const size_t T = s->n_tokens;
    const dpl_mat middle = saved->act[DPL_ACT_MLP_INPUT];
    const dpl_mat n = saved->act[DPL_ACT_MLP_NORM] = dpl_act_alloc(m, T, c->d, false);
    saved->rstd_mlp = dpl_ctx_alloc(m->ctx, T * sizeof(float));
    dpl_ctx_phase(m->ctx, DPL_PHASE_NORM);
    dpl_rmsnorm_forward(m->ctx, middle,
                        dpl_model_values(m, dpl_model_param(m, layer, DPL_P_MLP_NORM)), T, c->d,
                        (float)c->eps, n, saved->rstd_mlp);
    dpl_ctx_phase(m->ctx, DPL_PHASE_OTHER);

    if (dpl_model_layer_is_moe(c, (size_t)layer)) {
        const dpl_moe_shape shape = moe_shape(m);
        const dpl_moe_weights weights = moe_weights(m, layer);
        const dpl_status status = dpl_moe_forward(m->ctx, m->comm, &shape, &weights, n, T,
                                                  s->segment, aux, &saved->moe, out);
        if (status != DPL_OK) return dpl_fail_in(status, "layer %d", layer);
        dpl_probe_routing(m, layer, &saved->moe);
    } else {
        const dpl_weight gate_up = dpl_model_weight(m, dpl_model_param(m, layer, DPL_P_GATE_UP));
        const dpl_weight down = dpl_model_weight(m, dpl_model_param(m, layer, DPL_P_DOWN));
        saved->act[DPL_ACT_MLPWI] = dpl_act_alloc(m, T, dpl_gate_up_width(c->mlp_f), false);
        saved->act[DPL_ACT_MLP_HIDDEN] = dpl_act_alloc(m, T, c->mlp_f, false);
        dpl_ctx_phase(m->ctx, DPL_PHASE_GEMM);
        dpl_experts_forward(m->ctx, n, NULL, dpl_one_group(T), c->mlp_f, &gate_up, &down,
                            saved->act[DPL_ACT_MLPWI], saved->act[DPL_ACT_MLP_HIDDEN], out);
        dpl_ctx_phase(m->ctx, DPL_PHASE_OTHER);
    }
    dpl_probe_mat(m, "mlp", layer, s, out, c->d);
    dpl_add(m->ctx, middle, out, T, c->d, out);
    return DPL_OK;
}

dpl_status dpl_block_backward(dpl_model *m, int layer, const dpl_stream *s, const dpl_aux *aux,
                              const dpl_block_saved *saved, dpl_mat dx)
{
    const dpl_model_config *c = &m->config;
    const size_t T = s->n_tokens, mark = dpl_ctx_mark(m->ctx);
    const dpl_mat n = saved->act[DPL_ACT_MLP_NORM], dn = dpl_act_alloc(m, T, c->d, true);
    if (dpl_model_layer_is_moe(c, (size_t)layer)) {
        const dpl_moe_shape shape = moe_shape(m);
        const dpl_moe_weights weights = moe_weights(m, layer);
        const dpl_moe_grads grads = moe_grads(m, layer);
        const dpl_status status = dpl_moe_backward(m->ctx, m->comm, &shape, &weights, n, aux,
                                                   &saved->moe, dx, dn, &grads);
        if (status != DPL_OK) return dpl_fail_in(status, "layer %d, backward", layer);
    } else {
        const dpl_param *gate_up = dpl_model_param(m, layer, DPL_P_GATE_UP);
        const dpl_param *down = dpl_model_param(m, layer, DPL_P_DOWN);
        const dpl_weight gate_up_w = dpl_model_weight(m, gate_up),
                         down_w = dpl_model_weight(m, down);
        dpl_ctx_phase(m->ctx, DPL_PHASE_GEMM);
        dpl_experts_backward(m->ctx, n, NULL, dpl_one_group(T), c->mlp_f, &gate_up_w, &down_w,
                             saved->act[DPL_ACT_MLPWI], saved->act[DPL_ACT_MLP_HIDDEN], dx, dn,
                             false, NULL, dpl_model_grad(m, gate_up), dpl_model_grad(m, down));
    }
    const dpl_param *norm = dpl_model_param(m, layer, DPL_P_MLP_NORM);
    dpl_ctx_phase(m->ctx, DPL_PHASE_NORM);
    dpl_rmsnorm_backward(m->ctx, dn, saved->act[DPL_ACT_MLP_INPUT], dpl_model_values(m, norm),
                         saved->rstd_mlp, T, c->d, dx, true, dpl_model_grad(m, norm));
    dpl_ctx_phase(m->ctx, DPL_PHASE_OTHER);
    dpl_ctx_release(m->ctx, mark);
    dpl_mla_backward(m, layer, s, saved, dx);
    return DPL_OK;
}
