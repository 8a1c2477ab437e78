// layer.c - one MoE layer: the five steps in order, the shared expert beside them, the way back.
//
// The host reads results of operators at one place only, dpl_ep_prepare(): there N is learned, a
// logit that is not finite found, and the auxiliary losses fetched. y = round(shared + sum of the
// routed rows): one fp32 sum. A gradient's time is counted under its step.
#include "moe/moe.h"

static void keep_routing(dpl_ctx *ctx, dpl_moe_memory *memory, const dpl_moe_shape *shape,
                         size_t n_tokens, dpl_moe_saved *s) {
    const size_t n_logits = n_tokens * shape->rule.n_experts;
    const size_t n_slots = n_tokens * shape->rule.top_k;
    s->ep = dpl_ep_alloc(ctx, memory, shape, n_tokens);
    s->logits = dpl_moe_keep(ctx, memory, n_logits * sizeof(float));
    s->score = dpl_moe_keep(ctx, memory, n_logits * sizeof(float));
    s->ids = dpl_moe_keep(ctx, memory, n_slots * sizeof(int32_t));
    s->weights = dpl_moe_keep(ctx, memory, n_slots * sizeof(float));
}

static void keep_mlp(dpl_ctx *ctx, dpl_moe_memory *memory, const dpl_moe_shape *shape,
                     size_t n_rows, size_t f, dpl_mlp *mlp) {
    mlp->gate_up = dpl_moe_mat(ctx, memory, n_rows, dpl_gate_up_width(f), shape->dtype);
    mlp->hidden = dpl_moe_mat(ctx, memory, n_rows, f, shape->dtype);
}

static void keep_rows(dpl_ctx *ctx, dpl_moe_memory *memory, const dpl_moe_shape *shape,
                      dpl_moe_saved *s) {
    const size_t n_rows = s->ep.n_rows, shared_f = shape->shared_f;
    s->experts.row_weight = dpl_moe_keep(ctx, memory, n_rows * sizeof(float));
    keep_mlp(ctx, memory, shape, n_rows, shape->f, &s->experts);
    if (shared_f) keep_mlp(ctx, memory, shape, s->ep.n_tokens, shared_f, &s->shared);
}

size_t dpl_moe_saved_bytes(const dpl_moe_shape *shape, size_t n_tokens) {
    dpl_moe_memory count = {NULL, 0};
    dpl_moe_saved saved;
    keep_routing(NULL, &count, shape, n_tokens, &saved);
    saved.ep.n_rows = n_tokens * shape->rule.top_k;
    keep_rows(NULL, &count, shape, &saved);
    return count.used_bytes;
}

dpl_status dpl_moe_forward_in(dpl_ctx *ctx, dpl_comm *comm, const dpl_moe_shape *shape,
                              const dpl_moe_weights *weights, dpl_mat x, size_t n_tokens,
                              const int32_t *segment, const dpl_aux *aux, dpl_moe_memory *memory,
                              dpl_moe_saved *saved_out, dpl_mat y) {
    const bool has_shared = shape->shared_f > 0, direct = !has_shared || y.dtype == DPL_F32;
    const size_t d = shape->d, before = dpl_ctx_mark(ctx);
    dpl_moe_saved s = {0};
    DPL_TRY(dpl_ep_check(comm, shape, n_tokens));
    const dpl_phase outside = dpl_ctx_phase(ctx, DPL_PHASE_ROUTER);
    keep_routing(ctx, memory, shape, n_tokens, &s);
    dpl_router_forward(ctx, shape, weights, x, segment, aux, &s);
    dpl_ctx_phase(ctx, DPL_PHASE_DISPATCH);
    const dpl_status status = dpl_ep_prepare(ctx, comm, s.ids, &s.ep, s.aux);
    if (status != DPL_OK) {
        dpl_ctx_phase(ctx, outside);
        dpl_ctx_release(ctx, before);
        return status;
    }
    const dpl_groups rows = {s.ep.n_local, s.ep.n_rows, s.ep.report->offsets};
    // One rank has every token here: products read them where they lie, only weights are moved.
    s.experts = (dpl_mlp){.groups = rows, .gate_up_w = weights->gate_up, .down_w = weights->down};
    s.experts.x = x;
    s.experts.map = (dpl_row_map){s.ep.row_slot, s.ep.top_k};
    s.shared = (dpl_mlp){.groups = dpl_one_group(n_tokens), .x = x};
    s.shared.gate_up_w = weights->shared_gate_up;
    s.shared.down_w = weights->shared_down;
    keep_rows(ctx, memory, shape, &s);
    const size_t mark = dpl_ctx_mark(ctx);
    const dpl_mat out = dpl_moe_mat(ctx, NULL, s.ep.n_rows, d, shape->dtype);
    const dpl_mat sum = direct ? y : dpl_moe_mat(ctx, NULL, n_tokens, d, DPL_F32);
    dpl_ep_dispatch(ctx, &s.ep, x, s.weights, 0, (dpl_mat){0}, s.experts.row_weight);
    dpl_experts_forward(ctx, &s.experts, out);
    if (has_shared) dpl_experts_forward(ctx, &s.shared, sum);
    dpl_ctx_phase(ctx, DPL_PHASE_COMBINE);
    dpl_ep_combine(ctx, &s.ep, out, NULL, d, has_shared, sum, NULL);
    if (!direct) dpl_copy(ctx, sum, n_tokens, d, y);
    dpl_ctx_phase(ctx, outside);
    dpl_ctx_release(ctx, mark);
    *saved_out = s;
    return DPL_OK;
}

void dpl_moe_backward(dpl_ctx *ctx, const dpl_moe_shape *shape, const dpl_moe_weights *weights,
                      dpl_mat x, const dpl_aux *aux, const dpl_moe_saved *saved, dpl_mat dy,
                      dpl_mat dx) {
    const size_t d = shape->d, n_rows = saved->ep.n_rows, mark = dpl_ctx_mark(ctx);
    const size_t n_slots = saved->ep.n_tokens * shape->rule.top_k;
    const dpl_mat drows = dpl_moe_mat(ctx, NULL, n_rows, d, shape->dtype);
    float *drow_weight = dpl_ctx_alloc(ctx, n_rows * sizeof(float));
    float *dweights = dpl_ctx_alloc(ctx, n_slots * sizeof(float));
    const dpl_phase outside = dpl_ctx_phase(ctx, DPL_PHASE_COMBINE);
    dpl_ep_dispatch(ctx, &saved->ep, dy, NULL, d, drows, NULL);
    dpl_mlp experts = saved->experts, shared = saved->shared;
    experts.x = shared.x = x; // the caller may have moved it
    dpl_experts_backward(ctx, &experts, drows, drows, false, drow_weight);
    dpl_ctx_phase(ctx, DPL_PHASE_DISPATCH);
    dpl_ep_combine(ctx, &saved->ep, drows, drow_weight, d, false, dx, dweights);
    dpl_ctx_phase(ctx, DPL_PHASE_ROUTER);
    dpl_router_backward(ctx, shape, weights, x, aux, saved, dweights, dx);
    if (shape->shared_f) dpl_experts_backward(ctx, &shared, dy, dx, true, NULL);
    dpl_ctx_phase(ctx, outside);
    dpl_ctx_release(ctx, mark);
}
