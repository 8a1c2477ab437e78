// combine.c - step 5 of the layer: the K rows of a token are summed at home. The router weight is
// in the experts' rows already, so the sum is a plain one: in slot order, in fp32, with one
// rounding. Its bits do not depend on where the rows were computed. Its gradient is a dispatch of
// dy.
#include "moe/moe.h"

void dpl_ep_combine(dpl_ctx *ctx, const dpl_ep *ep, dpl_mat rows, size_t d, bool accumulate,
                    dpl_mat y) {
    const dpl_phase before = dpl_ctx_phase(ctx, DPL_PHASE_COMBINE);
    dpl_combine_rows(ctx, rows, NULL, ep->slot_row, ep->n_tokens, ep->top_k, d, accumulate, y,
                     NULL);
    dpl_ctx_phase(ctx, before);
}

void dpl_ep_combine_bwd(dpl_ctx *ctx, const dpl_ep *ep, dpl_mat dy, size_t d, dpl_mat drows) {
    const dpl_phase before = dpl_ctx_phase(ctx, DPL_PHASE_COMBINE);
    dpl_gather_rows(ctx, dy, NULL, ep->row_slot, ep->top_k, ep->n_rows, d, drows, NULL);
    dpl_ctx_phase(ctx, before);
}
