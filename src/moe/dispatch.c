// dispatch.c - step 3 of the layer: token rows to their experts, each gathered straight to its
// final place. Its gradient is a combine, with the gradients of the row weights beside it.
#include "moe/moe.h"

void dpl_ep_dispatch(dpl_ctx *ctx, const dpl_ep *ep, dpl_mat x, const float *weights, size_t d,
                     dpl_mat rows, float *row_weight) {
    dpl_gather_rows(ctx, x, weights, ep->row_slot, ep->top_k, ep->n_rows, d, rows, row_weight);
}
