// combine.c - step 5 of the layer: y (T, D) is the plain sum of a token's K expert rows; and back
// for the gradient.
//
// The router weight is in the rows already. The sum goes in slot order, in fp32, with one
// rounding, so its bits do not depend on where the rows were computed. The gradient is a dispatch
// of dy.
#include "moe/moe.h"

dpl_status dpl_ep_combine(dpl_ctx *ctx, dpl_comm *comm, const dpl_ep *ep, dpl_mat rows, size_t d,
                          bool accumulate, dpl_mat y)
{
    DPL_TRY(dpl_ep_check_ranks(comm));
    const dpl_phase before = dpl_ctx_phase(ctx, DPL_PHASE_COMBINE);
    dpl_combine_rows(ctx, rows, NULL, ep->slot_row, ep->n_tokens, ep->top_k, d, accumulate, y,
                     NULL);
    dpl_ctx_phase(ctx, before);
    return DPL_OK;
}

dpl_status dpl_ep_combine_bwd(dpl_ctx *ctx, dpl_comm *comm, const dpl_ep *ep, dpl_mat dy, size_t d,
                              dpl_mat drows)
{
    DPL_TRY(dpl_ep_check_ranks(comm));
    const dpl_phase before = dpl_ctx_phase(ctx, DPL_PHASE_COMBINE);
    dpl_gather_rows(ctx, dy, NULL, ep->row_slot, ep->top_k, ep->n_rows, d, drows, NULL);
    dpl_ctx_phase(ctx, before);
    return DPL_OK;
}
