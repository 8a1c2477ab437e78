// dispatch.c - step 3 of the layer: token rows to their experts, each gathered straight to its
// final place. Its gradient is a combine without weights.
#include "moe/moe.h"

void dpl_ep_dispatch(dpl_ctx *ctx, const dpl_ep *ep, dpl_mat x, const float *weights, size_t d,
                     dpl_mat rows, float *row_weight) {
    const dpl_phase before = dpl_ctx_phase(ctx, DPL_PHASE_DISPATCH);
    dpl_gather_rows(ctx, x, weights, ep->row_slot, ep->top_k, ep->n_rows, d, rows, row_weight);
    dpl_ctx_phase(ctx, before);
}

void dpl_ep_dispatch_bwd(dpl_ctx *ctx, const dpl_ep *ep, dpl_mat drows, const float *drow_w,
                         size_t d, dpl_mat dx, float *dw) {
    const dpl_phase before = dpl_ctx_phase(ctx, DPL_PHASE_DISPATCH);
    dpl_combine_rows(ctx, drows, drow_w, ep->slot_row, ep->n_tokens, ep->top_k, d, false, dx, dw);
    dpl_ctx_phase(ctx, before);
}
