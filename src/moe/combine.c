// combine.c - step 5 of the layer: the K rows of a token are summed at home, read from where their
// experts left them. The router weight is in the experts' rows already, so the sum is a plain one:
// in slot order, in fp32, rounded once. Its bits do not depend on where rows were computed. Its
// gradient is a dispatch of dy.
//
// Rows are read when the ranks of this host have told each other that theirs are computed, and
// their memory is free again when all have told that they have read.
#include "moe/moe.h"

dpl_status dpl_moe_combine_start(dpl_ctx *ctx, const dpl_ep_move *move, size_t chunk, bool met) {
    const dpl_ep_ranks *ranks = move->ep->ranks;
    if (!dpl_ep_is_spread(ranks)) return DPL_OK;
    dpl_flight *flight = &move->flights[chunk];
    dpl_status status = DPL_OK;
    if (!met) status = dpl_ep_signal(ctx, move->ep, &flight->signal);
    if (status != DPL_OK || ranks->n_hosts == 1) return status;
    DPL_TRY(dpl_comm_wait(ranks->comm, flight->signal));
    flight->signal = (dpl_ticket){0};
    const dpl_phase outside = dpl_ctx_phase(ctx, move->phase);
    status = dpl_remote_return(ctx, move, chunk);
    dpl_ctx_phase(ctx, outside);
    return status;
}

dpl_status dpl_moe_combine_wait(dpl_ctx *ctx, const dpl_ep_move *move, size_t chunk,
                                bool accumulate, dpl_mat y, float *slot_value) {
    const dpl_ep *ep = move->ep;
    const dpl_ep_chunk *c = &ep->chunks[chunk];
    const bool spread = dpl_ep_is_spread(ep->ranks);
    if (spread) DPL_TRY(dpl_comm_wait(ep->ranks->comm, move->flights[chunk].bulk));
    if (spread) DPL_TRY(dpl_comm_wait(ep->ranks->comm, move->flights[chunk].signal));
    const dpl_phase outside = dpl_ctx_phase(ctx, move->phase);
    y = dpl_mat_at(y, c->first, 0);
    if (slot_value) slot_value += c->first * ep->top_k;
    if (!spread) {
        dpl_combine_rows(ctx, move->rows, move->numbers == DPL_EP_NONE ? NULL : move->values,
                         c->slot_row, c->n_tokens, ep->top_k, move->d, accumulate, y, slot_value);
    } else {
        const size_t mark = dpl_ctx_mark(ctx);
        dpl_spread from = dpl_ep_spread(move, chunk);
        if (ep->ranks->n_hosts > 1) dpl_remote_receive(ctx, move, chunk, &from, slot_value);
        dpl_combine_spread(ctx, &from, c->n_tokens, ep->top_k, move->d, accumulate, y,
                           from.values ? slot_value : NULL);
        dpl_ctx_release(ctx, mark);
    }
    dpl_ctx_phase(ctx, outside);
    return DPL_OK;
}

dpl_status dpl_moe_combine_end(dpl_ctx *ctx, const dpl_ep_move *move) {
    if (!dpl_ep_is_spread(move->ep->ranks)) return DPL_OK;
    dpl_ticket read;
    DPL_TRY(dpl_ep_signal(ctx, move->ep, &read));
    return dpl_comm_wait(move->ep->ranks->comm, read);
}

dpl_status dpl_moe_combine(dpl_ctx *ctx, const dpl_ep *ep, dpl_status mine, dpl_mat rows,
                           float *row_value, dpl_ep_numbers numbers, size_t d, bool accumulate,
                           dpl_mat y, float *slot_value) {
    const size_t mark = dpl_ctx_mark(ctx);
    dpl_ep_move move = {ep, d, rows, row_value, numbers, ctx->phase, NULL, NULL, NULL};
    dpl_status status = dpl_ep_meet(ctx, mine, &move, 1);
    for (size_t i = 0; status == DPL_OK && i < ep->n_chunks; i++) {
        status = dpl_moe_combine_start(ctx, &move, i, true);
        if (status == DPL_OK)
            status = dpl_moe_combine_wait(ctx, &move, i, accumulate, y, slot_value);
    }
    if (status == DPL_OK) status = dpl_moe_combine_end(ctx, &move);
    dpl_ctx_release(ctx, mark);
    return status;
}
