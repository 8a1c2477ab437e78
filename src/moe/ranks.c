// ranks.c - the ranks over which experts are spread: who has which expert, and the memory that they
// have in common.
#include <inttypes.h>

#include "moe/moe.h"

#define RESERVE_BYTES_MIN ((size_t)64 << 20)

static dpl_status split_experts(dpl_ep_ranks *ranks, const size_t *n_local) {
    const size_t R = (size_t)ranks->comm->n_ranks, E = ranks->n_experts;
    ranks->first = dpl_alloc_array(R + 1, sizeof *ranks->first);
    if (!ranks->first) return dpl_fail(DPL_ENOMEM, "no memory for the experts of %zu ranks", R);
    for (size_t r = 0; r < R; r++) {
        const size_t left = E - ranks->first[r],
                     n = n_local ? n_local[r] : (r + 1) * E / R - r * E / R;
        DPL_CHECK(n <= left, "n_local: more experts on ranks 0 to %zu than the %zu that there are",
                  r, E);
        ranks->first[r + 1] = ranks->first[r] + n;
    }
    DPL_CHECK(ranks->first[R] == E, "%zu experts on all ranks, expected %zu", ranks->first[R], E);
    return DPL_OK;
}

// Ranks that disagree would write where nobody expects it.
static dpl_status compare(dpl_ep_ranks *ranks, uint64_t form, dpl_status mine) {
    const size_t R = (size_t)ranks->comm->n_ranks;
    uint64_t own[4] = {ranks->n_experts, form, 0, ranks->memory_bytes};
    if (mine == DPL_OK) own[2] = dpl_hash64(ranks->first, (R + 1) * sizeof *ranks->first, 0);
    uint64_t(*all)[4] = dpl_alloc_array(R, sizeof *all);
    if (!all && mine == DPL_OK) mine = dpl_fail(DPL_ENOMEM, "no memory for %zu ranks", R);
    dpl_status status = all ? dpl_comm_agree_on(ranks->comm, mine, own, sizeof own, all)
                            : dpl_comm_agree(ranks->comm, mine);
    for (size_t r = 0; status == DPL_OK && r < R; r++) {
        ranks->memory_bytes = (size_t)DPL_MIN(ranks->memory_bytes, all[r][3]);
        if (memcmp(all[r], all[0], 3 * sizeof **all) != 0)
            status = dpl_fail(DPL_EINVAL,
                              "rank %zu has another width, type, number or split of experts than "
                              "rank 0",
                              r);
    }
    dpl_free(all);
    return status;
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
                             int island, uint64_t form, dpl_status mine, dpl_ep_ranks *ranks) {
    ranks->n_experts = n_experts;
    if (comm) DPL_TRY(dpl_comm_split(comm, 0, &ranks->comm));
    else DPL_TRY(dpl_comm_open_self(&ranks->comm));
    if (ctx) ranks->memory_bytes = ctx->memory_bytes;
    if (mine == DPL_OK) mine = split_experts(ranks, n_local);
    DPL_TRY(compare(ranks, form, mine));
    if (!dpl_ep_is_spread(ranks)) return DPL_OK;
    // A process has the addresses of all ranks of its machine. Where they are limited, all ranks
    // take what there is, by halves.
    const size_t each = DPL_MAX(1, 4 / (size_t)ranks->comm->n_ranks) * ranks->memory_bytes;
    dpl_status status = DPL_ENOMEM;
    for (size_t bytes = each; status == DPL_ENOMEM && bytes >= RESERVE_BYTES_MIN; bytes /= 2)
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
    if (p && dpl_heap_used(ep->ranks->window->heap) > ep->ranks->memory_bytes) {
        dpl_heap_free(ep->ranks->window->heap, p);
        p = NULL;
    }
    DPL_EXPECT(p, DPL_ENOMEM, "no memory for the %zu rows of %zu numbers that arrive", ep->n_rows,
               d);
    *rows_out = (dpl_mat){p, d, dtype};
    *values_out = (float *)(void *)(p + rows_bytes);
    return DPL_OK;
}

// After a failure a peer may still be writing into these blocks: they stay until the heap goes.
void dpl_ep_rows_free(const dpl_ep *ep, void *rows) {
    if (rows && !dpl_comm_has_failed(ep->ranks->comm)) dpl_heap_free(ep->ranks->window->heap, rows);
}

void dpl_ep_forget(const dpl_ep_ranks *ranks) {
    if (ranks->window && !dpl_comm_has_failed(ranks->comm)) dpl_heap_reset(ranks->window->heap);
}

typedef struct meeting { // what a rank tells at a meeting: where its blocks lie in its heap
    int64_t rows, values;
    int64_t numbers; // dpl_ep_numbers
} meeting;

static dpl_status agree_on_numbers(const meeting *all, size_t R, bool *wanted_out) {
    size_t says[3] = {0};
    for (size_t r = 0; r < R; r++) says[all[r].numbers]++;
    DPL_CHECK(!says[DPL_EP_WANTED] || !says[DPL_EP_NONE],
              "weights are NULL on %zu ranks and given on %zu, expected the same on all",
              says[DPL_EP_NONE], says[DPL_EP_WANTED]);
    *wanted_out = says[DPL_EP_WANTED] > 0;
    return DPL_OK;
}

dpl_status dpl_ep_meet(dpl_ctx *ctx, const dpl_ep *ep, dpl_status mine, dpl_mat rows,
                       const float *values, dpl_ep_numbers numbers, dpl_spread *spread_out) {
    const dpl_window *w = ep->ranks->window;
    const size_t R = (size_t)w->n_ranks;
    const uint8_t *heap = dpl_heap_base(w->heap);
    void **row_at = dpl_ctx_alloc(ctx, R * sizeof *row_at);
    float **value_at = dpl_ctx_alloc(ctx, R * sizeof *value_at);
    meeting own = {.numbers = numbers}, *all = dpl_ctx_alloc(ctx, R * sizeof *all);
    if (rows.p) own.rows = (const uint8_t *)rows.p - heap;
    if (values) own.values = (const uint8_t *)values - heap;
    bool wanted;
    dpl_ctx_wait(ctx); // what is queued may still use memory that peers are about to write
    DPL_TRY(dpl_comm_agree_on(ep->ranks->comm, mine, &own, sizeof own, all));
    DPL_TRY(agree_on_numbers(all, R, &wanted));
    for (size_t r = 0; r < R; r++) {
        const bool near = w->host[r] == w->host[ep->ranks->comm->rank];
        row_at[r] = near ? w->base[r] + all[r].rows : NULL;
        value_at[r] = near ? (float *)(void *)(w->base[r] + all[r].values) : NULL;
    }
    *spread_out = (dpl_spread){ep->ids,   ep->slot_row, ep->place, row_at, wanted ? value_at : NULL,
                               rows.dtype};
    return DPL_OK;
}
