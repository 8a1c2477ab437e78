// dispatch.c - step 3 of the layer: token rows to their experts, each gathered straight to its
// final place, in the memory of the rank that has the expert. Its gradient is a combine, with the
// gradients of the row weights beside it.
#include "moe/moe.h"

dpl_status dpl_moe_dispatch(dpl_ctx *ctx, const dpl_ep *ep, dpl_status mine, dpl_mat x,
                            const float *weights, dpl_ep_numbers numbers, size_t d, dpl_mat rows,
                            float *row_weight) {
    if (!dpl_ep_is_spread(ep->ranks)) {
        DPL_TRY(mine);
        dpl_gather_rows(ctx, x, weights, ep->row_slot, ep->top_k, ep->n_rows, d, rows, row_weight);
        return DPL_OK;
    }
    const size_t mark = dpl_ctx_mark(ctx);
    dpl_spread to;
    dpl_status status = dpl_ep_meet(ctx, ep, mine, rows, row_weight, numbers, &to);
    if (status == DPL_OK) {
        if (ep->ranks->n_hosts > 1) status = dpl_remote_dispatch(ctx, ep, x, weights, d, &to);
        else dpl_scatter_rows(ctx, x, weights, &to, ep->n_tokens, ep->top_k, d);
        dpl_ctx_wait(ctx);
    }
    if (status == DPL_OK) status = dpl_comm_barrier(ep->ranks->comm); // all rows have come
    dpl_ctx_release(ctx, mark);
    return status;
}
