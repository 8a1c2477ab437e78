// combine.c - step 5 of the layer: the K rows of a token are summed at home. The router weight is
// in the experts' rows already, so the sum is a plain one: in slot order, in fp32, with one
// rounding. Its bits do not depend on where the rows were computed. Its gradient is a dispatch of
// dy.
#include "moe/moe.h"

void dpl_ep_combine(dpl_ctx *ctx, const dpl_ep *ep, dpl_mat rows, const float *row_value, size_t d,
                    bool accumulate, dpl_mat y, float *slot_value) {
    dpl_combine_rows(ctx, rows, row_value, ep->slot_row, ep->n_tokens, ep->top_k, d, accumulate, y,
                     slot_value);
}
