// dispatch.c - step 3 of the layer: token rows to their experts, each gathered straight to its
// final place, in the memory of the rank that has the expert. Its gradient is a combine, with the
// gradients of the row weights beside it.
//
// A chunk is complete when the ranks of this host have written its rows: they tell each other.
#include "moe/moe.h"

dpl_status dpl_moe_dispatch_start(dpl_ctx *ctx, const dpl_ep_move *move, size_t chunk, dpl_mat x,
                                  const float *weights) {
    const dpl_ep *ep = move->ep;
    const dpl_ep_chunk *c = &ep->chunks[chunk];
    const dpl_phase outside = dpl_ctx_phase(ctx, move->phase);
    dpl_status status = DPL_OK;
    x = dpl_mat_at(x, c->first, 0);
    if (weights) weights += c->first * ep->top_k;
    if (!dpl_ep_is_spread(ep->ranks)) {
        dpl_gather_rows(ctx, x, weights, c->row_slot, ep->top_k, c->n_rows, move->d, move->rows,
                        weights ? move->values : NULL);
    } else {
        const dpl_spread to = dpl_ep_spread(move, chunk);
        if (ep->ranks->n_hosts > 1) status = dpl_remote_dispatch(ctx, move, chunk, x, weights);
        if (status == DPL_OK)
            dpl_scatter_rows(ctx, x, weights, &to, c->n_tokens, ep->top_k, move->d);
        if (status == DPL_OK && ep->ranks->n_hosts == 1)
            status = dpl_ep_signal(ctx, ep, &move->flights[chunk].signal);
    }
    dpl_ctx_phase(ctx, outside);
    return status;
}

dpl_status dpl_moe_dispatch_wait(dpl_ctx *ctx, const dpl_ep_move *move, size_t chunk) {
    const dpl_ep_ranks *ranks = move->ep->ranks;
    if (!dpl_ep_is_spread(ranks)) return DPL_OK;
    dpl_flight *flight = &move->flights[chunk];
    if (ranks->n_hosts > 1) {
        DPL_TRY(dpl_comm_wait(ranks->comm, flight->bulk));
        const dpl_phase outside = dpl_ctx_phase(ctx, move->phase);
        dpl_remote_deliver(ctx, move, chunk);
        dpl_ctx_phase(ctx, outside);
        DPL_TRY(dpl_ep_signal(ctx, move->ep, &flight->signal));
    }
    return dpl_comm_wait(ranks->comm, flight->signal);
}

dpl_status dpl_moe_dispatch(dpl_ctx *ctx, const dpl_ep *ep, dpl_status mine, dpl_mat x,
                            const float *weights, dpl_ep_numbers numbers, size_t d, dpl_mat rows,
                            float *row_weight) {
    const size_t mark = dpl_ctx_mark(ctx);
    dpl_ep_move move = {ep, d, rows, row_weight, numbers, ctx->phase, NULL, NULL, NULL};
    dpl_status status = dpl_ep_meet(ctx, mine, &move, 1);
    for (size_t i = 0; status == DPL_OK && i < ep->n_chunks; i++) {
        status = dpl_moe_dispatch_start(ctx, &move, i, x, weights);
        if (status == DPL_OK) status = dpl_moe_dispatch_wait(ctx, &move, i);
    }
    dpl_ctx_release(ctx, mark);
    return status;
}
