// combine.c - step 5 of the layer: the K rows of a token are summed at home, read from where their
// experts left them. The router weight is in the experts' rows already, so the sum is a plain one:
// in slot order, in fp32, rounded once. Its bits do not depend on where rows were computed. Its
// gradient is a dispatch of dy.
#include "moe/moe.h"

dpl_status dpl_moe_combine(dpl_ctx *ctx, const dpl_ep *ep, dpl_status mine, dpl_mat rows,
                           const float *row_value, dpl_ep_numbers numbers, size_t d,
                           bool accumulate, dpl_mat y, float *slot_value) {
    if (!dpl_ep_is_spread(ep->ranks)) {
        DPL_TRY(mine);
        dpl_combine_rows(ctx, rows, row_value, ep->slot_row, ep->n_tokens, ep->top_k, d, accumulate,
                         y, slot_value);
        return DPL_OK;
    }
    const size_t mark = dpl_ctx_mark(ctx);
    dpl_spread from;
    dpl_status status = dpl_ep_meet(ctx, ep, mine, rows, row_value, numbers, &from);
    if (status == DPL_OK && ep->ranks->n_hosts > 1) status = dpl_remote_fetch(ctx, ep, d, &from);
    if (status == DPL_OK) {
        dpl_combine_spread(ctx, &from, ep->n_tokens, ep->top_k, d, accumulate, y,
                           from.values ? slot_value : NULL);
        dpl_ctx_wait(ctx);
        status = dpl_comm_barrier(ep->ranks->comm); // none reads these rows any more
    }
    dpl_ctx_release(ctx, mark);
    return status;
}
