// layer.c - one MoE layer: the five steps in order, the shared expert beside them, the way back.
//
// The host reads results of operators at one place only, dpl_ep_prepare(): there N is learned, a
// logit that is not finite found, and the auxiliary losses fetched. y = round(shared + sum of the
// routed rows): one fp32 sum.
#include "moe/moe.h"

// A (rows, columns) matrix of activations.
static dpl_mat keep_mat(dpl_ctx *ctx, dpl_moe_memory *memory, dpl_dtype dtype, size_t n_rows,
                        size_t n_columns) {
    const size_t bytes = n_rows * n_columns * dpl_dtype_bytes(dtype);
    return (dpl_mat){dpl_moe_keep(ctx, memory, bytes), n_columns, dtype};
}

static dpl_groups expert_groups(const dpl_ep *ep) {
    return (dpl_groups){ep->n_local, ep->n_rows, ep->report->offsets};
}

static void keep_routing(dpl_ctx *ctx, dpl_moe_memory *memory, const dpl_moe_shape *shape,
                         dpl_moe_saved *s) {
    const size_t n_logits = s->n_tokens * shape->rule.n_experts;
    const size_t n_slots = s->n_tokens * shape->rule.top_k;
    s->ep = dpl_ep_alloc(ctx, memory, shape, s->n_tokens);
    s->logits = dpl_moe_keep(ctx, memory, n_logits * sizeof(float));
    s->score = dpl_moe_keep(ctx, memory, n_logits * sizeof(float));
    s->ids = dpl_moe_keep(ctx, memory, n_slots * sizeof(int32_t));
    s->weights = dpl_moe_keep(ctx, memory, n_slots * sizeof(float));
}

static void keep_rows(dpl_ctx *ctx, dpl_moe_memory *memory, const dpl_moe_shape *shape,
                      dpl_moe_saved *s) {
    const size_t n = s->n_rows, width = dpl_gate_up_width(shape->f), shared_f = shape->shared_f;
    s->rows = keep_mat(ctx, memory, shape->dtype, n, shape->d);
    s->row_weight = dpl_moe_keep(ctx, memory, n * sizeof(float));
    s->gate_up = keep_mat(ctx, memory, shape->dtype, n, width);
    s->hidden = keep_mat(ctx, memory, shape->dtype, n, shape->f);
    if (!shared_f) return;
    const size_t shared_width = dpl_gate_up_width(shared_f);
    s->shared_gate_up = keep_mat(ctx, memory, shape->dtype, s->n_tokens, shared_width);
    s->shared_hidden = keep_mat(ctx, memory, shape->dtype, s->n_tokens, shared_f);
}

size_t dpl_moe_saved_bytes(const dpl_moe_shape *shape, size_t n_tokens) {
    dpl_moe_memory count = {NULL, 0};
    dpl_moe_saved saved = {.n_tokens = n_tokens, .n_rows = n_tokens * shape->rule.top_k};
    keep_routing(NULL, &count, shape, &saved);
    keep_rows(NULL, &count, shape, &saved);
    return count.used_bytes;
}

dpl_status dpl_moe_forward_in(dpl_ctx *ctx, dpl_comm *comm, const dpl_moe_shape *shape,
                              const dpl_moe_weights *weights, dpl_mat x, size_t n_tokens,
                              const int32_t *segment, const dpl_aux *aux, dpl_moe_memory *memory,
                              dpl_moe_saved *saved_out, dpl_mat y) {
    const bool has_shared = shape->shared_f > 0, direct = !has_shared || y.dtype == DPL_F32;
    const size_t d = shape->d, before = dpl_ctx_mark(ctx);
    dpl_moe_saved s = {.n_tokens = n_tokens};
    DPL_TRY(dpl_ep_check(comm, shape, n_tokens));
    keep_routing(ctx, memory, shape, &s);
    dpl_router_forward(ctx, shape, weights, x, segment, aux, &s);
    const dpl_status status = dpl_ep_prepare(ctx, comm, s.ids, &s.ep, s.aux);
    if (status != DPL_OK) {
        dpl_ctx_release(ctx, before);
        return status;
    }
    s.n_rows = s.ep.n_rows;
    keep_rows(ctx, memory, shape, &s);
    const size_t mark = dpl_ctx_mark(ctx);
    const dpl_mat out = keep_mat(ctx, NULL, shape->dtype, s.n_rows, d);
    const dpl_mat sum = direct ? y : keep_mat(ctx, NULL, DPL_F32, n_tokens, d);
    dpl_ep_dispatch(ctx, &s.ep, x, s.weights, d, s.rows, s.row_weight);
    dpl_experts_forward(ctx, s.rows, s.row_weight, expert_groups(&s.ep), shape->f,
                        &weights->gate_up, &weights->down, s.gate_up, s.hidden, out);
    if (has_shared)
        dpl_experts_forward(ctx, x, NULL, dpl_one_group(n_tokens), shape->shared_f,
                            &weights->shared_gate_up, &weights->shared_down, s.shared_gate_up,
                            s.shared_hidden, sum);
    dpl_ep_combine(ctx, &s.ep, out, d, has_shared, sum);
    if (!direct) dpl_copy(ctx, sum, n_tokens, d, y);
    dpl_ctx_release(ctx, mark);
    *saved_out = s;
    return DPL_OK;
}

dpl_status dpl_moe_backward(dpl_ctx *ctx, dpl_comm *comm, const dpl_moe_shape *shape,
                            const dpl_moe_weights *weights, dpl_mat x, const dpl_aux *aux,
                            const dpl_moe_saved *saved, dpl_mat dy, dpl_mat dx,
                            const dpl_moe_grads *grads) {
    const size_t d = shape->d, n_slots = saved->n_tokens * shape->rule.top_k;
    DPL_TRY(dpl_ep_check_ranks(comm));
    const size_t mark = dpl_ctx_mark(ctx);
    const dpl_mat drows = keep_mat(ctx, NULL, shape->dtype, saved->n_rows, d);
    float *drow_weight = dpl_ctx_alloc(ctx, saved->n_rows * sizeof(float));
    float *dweights = dpl_ctx_alloc(ctx, n_slots * sizeof(float));
    dpl_ep_combine_bwd(ctx, &saved->ep, dy, d, drows);
    dpl_experts_backward(ctx, saved->rows, saved->row_weight, expert_groups(&saved->ep), shape->f,
                         &weights->gate_up, &weights->down, saved->gate_up, saved->hidden, drows,
                         drows, false, drow_weight, grads->gate_up, grads->down);
    dpl_ep_dispatch_bwd(ctx, &saved->ep, drows, drow_weight, d, dx, dweights);
    dpl_router_backward(ctx, shape, weights, x, aux, saved, dweights, dx, grads->router);
    if (shape->shared_f)
        dpl_experts_backward(ctx, x, NULL, dpl_one_group(saved->n_tokens), shape->shared_f,
                             &weights->shared_gate_up, &weights->shared_down, saved->shared_gate_up,
                             saved->shared_hidden, dy, dx, true, NULL, grads->shared_gate_up,
                             grads->shared_down);
    dpl_ctx_release(ctx, mark);
    return DPL_OK;
}
