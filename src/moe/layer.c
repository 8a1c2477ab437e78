// layer.c - one MoE layer: the five steps in order, the shared expert beside them, and the way
// back.
//
// The host reads results of operators at one place only, dpl_ep_exchange(): there N is learned, a
// logit that is not finite found, and the auxiliary losses fetched. y = round(shared + sum of the
// routed rows): one fp32 sum.
#include "moe/moe.h"

// A (rows, columns) matrix of activations, kept for backward.
static dpl_mat keep_mat(dpl_ctx *ctx, dpl_moe_memory *memory, const dpl_moe_shape *shape,
                        size_t n_rows, size_t n_columns)
{
    const size_t bytes = n_rows * n_columns * dpl_dtype_bytes(shape->dtype);
    return (dpl_mat){dpl_moe_keep(ctx, memory, bytes), n_columns, shape->dtype};
}

static dpl_mat temporary(dpl_ctx *ctx, dpl_dtype dtype, size_t n_rows, size_t n_columns)
{
    return (dpl_mat){dpl_ctx_alloc(ctx, n_rows * n_columns * dpl_dtype_bytes(dtype)), n_columns,
                     dtype};
}

static dpl_groups expert_groups(const dpl_moe_shape *shape, const dpl_ep *ep)
{
    return (dpl_groups){shape->n_local, ep->n_rows, ep->offsets};
}

size_t dpl_moe_saved_bytes(const dpl_moe_shape *shape, size_t n_tokens)
{
    const size_t n_experts = shape->rule.n_experts, n_slots = n_tokens * shape->rule.top_k;
    const size_t element = dpl_dtype_bytes(shape->dtype);
    const size_t width = dpl_gate_up_width(shape->f), s_width = dpl_gate_up_width(shape->shared_f);
    const size_t blocks[] = {
        sizeof(dpl_moe_report) + (n_experts + 1) * sizeof(int64_t), // in the order of allocation
        n_slots * sizeof(int32_t),
        n_slots * sizeof(int32_t),
        n_experts * sizeof(int64_t),
        n_tokens * n_experts * sizeof(float),
        n_tokens * n_experts * sizeof(float),
        n_slots * sizeof(int32_t),
        n_slots * sizeof(float),
        n_slots * shape->d * element,
        n_slots * sizeof(float),
        n_slots * width * element,
        n_slots * shape->f * element,
        n_tokens * s_width * element,
        n_tokens * shape->shared_f * element,
    };
    size_t bytes = 0;
    for (size_t i = 0; i < DPL_COUNT(blocks); i++)
        bytes += dpl_round_up(blocks[i], DPL_ALIGN);
    return bytes;
}

// Steps 1 and 2, then memory for exactly the rows that come.
static dpl_status route(dpl_ctx *ctx, dpl_comm *comm, const dpl_moe_shape *shape,
                        const dpl_moe_weights *weights, dpl_mat x, const int32_t *segment,
                        const dpl_aux *aux, dpl_moe_memory *memory, dpl_moe_saved *saved)
{
    const size_t n_tokens = saved->n_tokens;
    DPL_TRY(dpl_ep_plan(ctx, comm, shape, n_tokens, memory, &saved->ep));
    dpl_router_forward(ctx, shape, weights, x, n_tokens, segment, aux, memory, saved);
    dpl_ep_permute(ctx, saved->ids, &saved->ep);
    DPL_TRY(dpl_ep_exchange(ctx, comm, &saved->ep, saved->aux));
    const size_t n_rows = saved->n_rows = saved->ep.n_rows;
    saved->rows = keep_mat(ctx, memory, shape, n_rows, shape->d);
    saved->row_weight = dpl_moe_keep(ctx, memory, n_rows * sizeof(float));
    saved->gate_up = keep_mat(ctx, memory, shape, n_rows, dpl_gate_up_width(shape->f));
    saved->hidden = keep_mat(ctx, memory, shape, n_rows, shape->f);
    if (shape->shared_f) {
        const size_t width = dpl_gate_up_width(shape->shared_f);
        saved->shared_gate_up = keep_mat(ctx, memory, shape, n_tokens, width);
        saved->shared_hidden = keep_mat(ctx, memory, shape, n_tokens, shape->shared_f);
    }
    return DPL_OK;
}

// Steps 3 to 5.
static dpl_status compute(dpl_ctx *ctx, dpl_comm *comm, const dpl_moe_shape *shape,
                          const dpl_moe_weights *weights, dpl_mat x, const dpl_moe_saved *saved,
                          dpl_mat y)
{
    const size_t d = shape->d, n_tokens = saved->n_tokens;
    const bool has_shared = shape->shared_f > 0;
    const dpl_mat out = temporary(ctx, shape->dtype, saved->n_rows, d);
    const bool direct = !has_shared || y.dtype == DPL_F32;
    const dpl_mat sum = direct ? y : temporary(ctx, DPL_F32, n_tokens, d);
    DPL_TRY(dpl_ep_dispatch(ctx, comm, &saved->ep, x, saved->weights, d, saved->rows,
                            saved->row_weight));
    dpl_experts_forward(ctx, saved->rows, saved->row_weight, expert_groups(shape, &saved->ep),
                        shape->f, &weights->gate_up, &weights->down, saved->gate_up, saved->hidden,
                        out);
    if (has_shared)
        dpl_experts_forward(ctx, x, NULL, dpl_one_group(n_tokens), shape->shared_f,
                            &weights->shared_gate_up, &weights->shared_down, saved->shared_gate_up,
                            saved->shared_hidden, sum);
    DPL_TRY(dpl_ep_combine(ctx, comm, &saved->ep, out, d, has_shared, sum));
    if (!direct) dpl_copy(ctx, sum, n_tokens, d, y);
    return DPL_OK;
}

dpl_status dpl_moe_forward_in(dpl_ctx *ctx, dpl_comm *comm, const dpl_moe_shape *shape,
                              const dpl_moe_weights *weights, dpl_mat x, size_t n_tokens,
                              const int32_t *segment, const dpl_aux *aux, dpl_moe_memory *memory,
                              dpl_moe_saved *saved_out, dpl_mat y)
{
    dpl_moe_saved saved = {.n_tokens = n_tokens};
    const size_t before = dpl_ctx_mark(ctx);
    dpl_status status = route(ctx, comm, shape, weights, x, segment, aux, memory, &saved);
    const size_t mark = dpl_ctx_mark(ctx);
    if (status == DPL_OK) status = compute(ctx, comm, shape, weights, x, &saved, y);
    if (status == DPL_OK) *saved_out = saved;
    dpl_ctx_release(ctx, status == DPL_OK ? mark : before);
    return status;
}

dpl_status dpl_moe_forward(dpl_ctx *ctx, dpl_comm *comm, const dpl_moe_shape *shape,
                           const dpl_moe_weights *weights, dpl_mat x, size_t n_tokens,
                           const int32_t *segment, const dpl_aux *aux, dpl_moe_saved *saved_out,
                           dpl_mat y)
{
    return dpl_moe_forward_in(ctx, comm, shape, weights, x, n_tokens, segment, aux, NULL, saved_out,
                              y);
}

dpl_status dpl_moe_backward(dpl_ctx *ctx, dpl_comm *comm, const dpl_moe_shape *shape,
                            const dpl_moe_weights *weights, dpl_mat x, const dpl_aux *aux,
                            const dpl_moe_saved *saved, dpl_mat dy, dpl_mat dx,
                            const dpl_moe_grads *grads)
{
    const size_t d = shape->d, n_slots = saved->n_tokens * shape->rule.top_k;
    DPL_TRY(dpl_ep_check_ranks(comm));
    const size_t mark = dpl_ctx_mark(ctx);
    const dpl_mat drows = temporary(ctx, shape->dtype, saved->n_rows, d);
    float *drow_weight = dpl_ctx_alloc(ctx, saved->n_rows * sizeof(float));
    float *dweights = dpl_ctx_alloc(ctx, n_slots * sizeof(float));
    DPL_TRY(dpl_ep_combine_bwd(ctx, comm, &saved->ep, dy, d, drows));
    dpl_experts_backward(ctx, saved->rows, saved->row_weight, expert_groups(shape, &saved->ep),
                         shape->f, &weights->gate_up, &weights->down, saved->gate_up, saved->hidden,
                         drows, drows, false, drow_weight, grads->gate_up, grads->down);
    DPL_TRY(dpl_ep_dispatch_bwd(ctx, comm, &saved->ep, drows, drow_weight, d, false, dx, dweights));
    dpl_router_backward(ctx, shape, weights, x, aux, saved, dweights, dx, grads->router);
    if (shape->shared_f)
        dpl_experts_backward(ctx, x, NULL, dpl_one_group(saved->n_tokens), shape->shared_f,
                             &weights->shared_gate_up, &weights->shared_down, saved->shared_gate_up,
                             saved->shared_hidden, dy, dx, true, NULL, grads->shared_gate_up,
                             grads->shared_down);
    dpl_ctx_release(ctx, mark);
    return DPL_OK;
}
