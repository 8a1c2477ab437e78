// ranks.c - the ranks over which experts are spread: who has which expert, and the memory that they
// have in common.
#include <inttypes.h>

#include "moe/moe.h"

#define RESERVE_BYTES_MIN ((size_t)64 << 20)

static dpl_status split_experts(dpl_ep_ranks *ranks, const size_t *n_local) {
    const size_t R = (size_t)ranks->comm->n_ranks, E = ranks->n_experts;
    ranks->first = dpl_alloc_array(R + 1, sizeof *ranks->first);
    if (!ranks->first) return dpl_fail(DPL_ENOMEM, "no memory for the experts of %zu ranks", R);
    for (size_t r = 0; r < R; r++)
        ranks->first[r + 1] = n_local ? ranks->first[r] + n_local[r] : (r + 1) * E / R;
    DPL_CHECK(ranks->first[R] == E, "%zu experts on all ranks, expected %zu", ranks->first[R], E);
    return DPL_OK;
}

static dpl_status number_hosts(dpl_ep_ranks *ranks) {
    const int R = ranks->comm->n_ranks, *lowest = ranks->window->host;
    ranks->host = dpl_alloc_array((size_t)R, sizeof *ranks->host);
    if (!ranks->host) return dpl_fail(DPL_ENOMEM, "no memory for the hosts of %d ranks", R);
    for (int r = 0; r < R; r++)
        ranks->host[r] = lowest[r] == r ? (int)ranks->n_hosts++ : ranks->host[lowest[r]];
    return DPL_OK;
}

dpl_status dpl_ep_ranks_open(dpl_ctx *ctx, dpl_comm *comm, size_t n_experts, const size_t *n_local,
                             int island, dpl_ep_ranks *ranks) {
    ranks->n_experts = n_experts;
    if (comm) DPL_TRY(dpl_comm_split(comm, 0, &ranks->comm));
    else DPL_TRY(dpl_comm_open_self(&ranks->comm));
    DPL_TRY(dpl_comm_agree(ranks->comm, split_experts(ranks, n_local)));
    if (!dpl_ep_is_spread(ranks)) return DPL_OK;
    // Batch systems limit addresses: all ranks take what there is, by halves.
    dpl_status status = DPL_ENOMEM;
    for (size_t bytes = 4 * ctx->memory_bytes; status == DPL_ENOMEM && bytes >= RESERVE_BYTES_MIN;
         bytes /= 2)
        status = dpl_window_open(ranks->comm, bytes, island, &ranks->window);
    DPL_TRY(status);
    return dpl_comm_agree(ranks->comm, number_hosts(ranks));
}

void dpl_ep_ranks_close(dpl_ep_ranks *ranks) {
    if (ranks->window) dpl_window_close(&ranks->window);
    dpl_comm_close(&ranks->comm);
    dpl_free(ranks->first);
    dpl_free(ranks->host);
    *ranks = (dpl_ep_ranks){0};
}

dpl_status dpl_ep_rows_alloc(const dpl_ep *ep, size_t d, dpl_dtype dtype, dpl_mat *rows_out,
                             float **values_out) {
    const size_t rows_bytes = dpl_round_up(ep->n_rows * d * dpl_dtype_bytes(dtype), DPL_ALIGN);
    uint8_t *p = dpl_heap_alloc(ep->ranks->window->heap, rows_bytes + ep->n_rows * sizeof(float));
    DPL_EXPECT(p, DPL_ENOMEM, "no addresses left for the %zu rows that arrive", ep->n_rows);
    *rows_out = (dpl_mat){p, d, dtype};
    *values_out = (float *)(void *)(p + rows_bytes);
    return DPL_OK;
}

void dpl_ep_rows_free(const dpl_ep *ep, void *rows) {
    if (rows) dpl_heap_free(ep->ranks->window->heap, rows);
}

void dpl_ep_forget(const dpl_ep_ranks *ranks) {
    if (ranks->window) dpl_heap_reset(ranks->window->heap);
}

dpl_status dpl_ep_meet(dpl_ctx *ctx, const dpl_ep *ep, dpl_status mine, dpl_mat rows,
                       const float *values, dpl_spread *spread_out) {
    const dpl_window *w = ep->ranks->window;
    const size_t R = (size_t)w->n_ranks;
    const uint8_t *own = dpl_heap_base(w->heap);
    void **row_at = dpl_ctx_alloc(ctx, R * sizeof *row_at);
    float **value_at = dpl_ctx_alloc(ctx, R * sizeof *value_at);
    int64_t(*at)[2] = dpl_ctx_alloc(ctx, R * sizeof *at); // of rows and values, in a heap
    const int64_t own_at[2] = {rows.p ? (const uint8_t *)rows.p - own : 0,
                               values ? (const uint8_t *)values - own : 0};
    dpl_ctx_wait(ctx); // what is queued may still use memory that peers are about to write
    DPL_TRY(dpl_comm_agree_on(ep->ranks->comm, mine, own_at, sizeof own_at, at));
    for (size_t r = 0; r < R; r++) {
        const bool near = w->host[r] == w->host[ep->ranks->comm->rank];
        row_at[r] = near ? w->base[r] + at[r][0] : NULL;
        value_at[r] = near ? (float *)(void *)(w->base[r] + at[r][1]) : NULL;
    }
    *spread_out = (dpl_spread){ep->ids, ep->slot_row, ep->place, row_at, value_at, rows.dtype};
    return DPL_OK;
}
