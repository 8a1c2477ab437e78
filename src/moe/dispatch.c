// dispatch.c - steps 3 and 5 of the layer: token rows to their experts, and the sum of a token's K
// expert rows back at home; each is the gradient of the other.
//
// One pass gathers a row straight to its final place. The router weight is in the experts' rows
// already, so the sum is a plain one: in slot order, in fp32, with one rounding. Its bits do not
// depend on where the rows were computed.
#include "moe/moe.h"

void dpl_ep_dispatch(dpl_ctx *ctx, const dpl_ep *ep, dpl_mat x, const float *weights, size_t d,
                     dpl_mat rows, float *row_weight)
{
    const dpl_phase before = dpl_ctx_phase(ctx, DPL_PHASE_DISPATCH);
    dpl_gather_rows(ctx, x, weights, ep->row_slot, ep->top_k, ep->n_rows, d, rows, row_weight);
    dpl_ctx_phase(ctx, before);
}

void dpl_ep_combine(dpl_ctx *ctx, const dpl_ep *ep, dpl_mat rows, size_t d, bool accumulate,
                    dpl_mat y)
{
    const dpl_phase before = dpl_ctx_phase(ctx, DPL_PHASE_COMBINE);
    dpl_combine_rows(ctx, rows, NULL, ep->slot_row, ep->n_tokens, ep->top_k, d, accumulate, y,
                     NULL);
    dpl_ctx_phase(ctx, before);
}

void dpl_ep_dispatch_bwd(dpl_ctx *ctx, const dpl_ep *ep, dpl_mat drows, const float *drow_w,
                         size_t d, dpl_mat dx, float *dw)
{
    const dpl_phase before = dpl_ctx_phase(ctx, DPL_PHASE_DISPATCH);
    dpl_combine_rows(ctx, drows, drow_w, ep->slot_row, ep->n_tokens, ep->top_k, d, false, dx, dw);
    dpl_ctx_phase(ctx, before);
}

void dpl_ep_combine_bwd(dpl_ctx *ctx, const dpl_ep *ep, dpl_mat dy, size_t d, dpl_mat drows)
{
    const dpl_phase before = dpl_ctx_phase(ctx, DPL_PHASE_COMBINE);
    dpl_gather_rows(ctx, dy, NULL, ep->row_slot, ep->top_k, ep->n_rows, d, drows, NULL);
    dpl_ctx_phase(ctx, before);
}
