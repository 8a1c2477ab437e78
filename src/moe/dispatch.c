// dispatch.c - step 3 of the layer: token rows to their experts, expert-sorted; and back for the
// gradient.
//
// One pass gathers a row straight to its final place. The gradient is a combine without weights:
// the K rows of a token are summed at home, in slot order.
#include "moe/moe.h"

dpl_status dpl_ep_dispatch(dpl_ctx *ctx, dpl_comm *comm, const dpl_ep *ep, dpl_mat x,
                           const float *weights, size_t d, dpl_mat rows, float *row_weight)
{
    DPL_TRY(dpl_ep_check_ranks(comm));
    const dpl_phase before = dpl_ctx_phase(ctx, DPL_PHASE_DISPATCH);
    dpl_gather_rows(ctx, x, weights, ep->row_slot, ep->top_k, ep->n_rows, d, rows, row_weight);
    dpl_ctx_phase(ctx, before);
    return DPL_OK;
}

dpl_status dpl_ep_dispatch_bwd(dpl_ctx *ctx, dpl_comm *comm, const dpl_ep *ep, dpl_mat drows,
                               const float *drow_w, size_t d, bool accumulate, dpl_mat dx,
                               float *dw)
{
    DPL_TRY(dpl_ep_check_ranks(comm));
    const dpl_phase before = dpl_ctx_phase(ctx, DPL_PHASE_DISPATCH);
    dpl_combine_rows(ctx, drows, drow_w, ep->slot_row, ep->n_tokens, ep->top_k, d, accumulate, dx,
                     drow_w ? dw : NULL);
    if (dw && !drow_w) dpl_zero(ctx, dw, ep->n_tokens * ep->top_k * sizeof *dw);
    dpl_ctx_phase(ctx, before);
    return DPL_OK;
}
