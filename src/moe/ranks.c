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
    dpl_status status = dpl_comm_agree_on(ranks->comm, mine, own, sizeof own, all);
    for (size_t r = 0; status == DPL_OK && r < R; r++) {
        ranks->memory_bytes = (size_t)DPL_MIN(ranks->memory_bytes, all[r][3]);
        if (memcmp(all[r], all[0], 3 * sizeof **all) != 0)
            status = dpl_fail(DPL_EINVAL,
                              "rank %zu: another width, type, number or split of experts than "
                              "rank 0",
                              r);
    }
    dpl_free(all);
    return status;
}

static dpl_status alloc_tables(dpl_ep_ranks *ranks) {
    const size_t R = (size_t)ranks->comm->n_ranks, E = ranks->n_experts, H = ranks->n_hosts;
    ranks->owner = dpl_alloc_array(E, sizeof *ranks->owner);
    ranks->host_expert = dpl_alloc_array(E, sizeof *ranks->host_expert);
    ranks->host_first = dpl_alloc_array(H + 1, sizeof *ranks->host_first);
    ranks->partner = dpl_alloc_array(H, sizeof *ranks->partner);
    ranks->served = dpl_alloc_array(R, sizeof *ranks->served);
    ranks->mate_at = dpl_alloc_array(R, sizeof *ranks->mate_at);
    ranks->mate_bytes = dpl_alloc_array(R, sizeof *ranks->mate_bytes);
    ranks->marks = dpl_alloc_array(R, 2);
    DPL_EXPECT(ranks->owner && ranks->host_expert && ranks->host_first && ranks->partner &&
                   ranks->served && ranks->mate_at && ranks->mate_bytes && ranks->marks,
               DPL_ENOMEM, "no memory for the hosts of %zu ranks", R);
    return DPL_OK;
}

static void list_experts(dpl_ep_ranks *ranks) {
    const size_t R = (size_t)ranks->comm->n_ranks;
    size_t n = 0;
    for (size_t h = 0; h < ranks->n_hosts; h++) {
        ranks->host_first[h] = n;
        for (size_t r = 0; r < R; r++)
            for (size_t e = ranks->first[r]; ranks->host[r] == (int)h && e < ranks->first[r + 1];
                 e++) {
                ranks->owner[e] = (int)r;
                ranks->host_expert[n++] = e;
            }
    }
    ranks->host_first[ranks->n_hosts] = n;
}

// The i-th rank of a host is stood in for by the i-th of another one, in turn where that has fewer:
// so they spread over the ranks there.
static dpl_status find_partners(dpl_ep_ranks *ranks) {
    const int R = ranks->comm->n_ranks, me = ranks->comm->rank, mine = ranks->host[me];
    int *place = dpl_alloc_array((size_t)R + ranks->n_hosts, sizeof *place);
    DPL_EXPECT(place, DPL_ENOMEM, "no memory for the hosts of %d ranks", R);
    int *n_there = place + R; // (H): ranks
    for (int r = 0; r < R; r++) {
        place[r] = n_there[ranks->host[r]]++;
        ranks->mate_at[r] = (size_t)r;
        ranks->mate_bytes[r] = r != me && ranks->host[r] == mine;
    }
    for (int r = 0; r < R; r++) {
        const int host = ranks->host[r];
        if (place[me] % n_there[host] == place[r]) ranks->partner[host] = r;
        if (host != mine && place[r] % n_there[mine] == place[me])
            ranks->served[ranks->n_served++] = r;
        ranks->has_mates |= n_there[host] > 1;
    }
    dpl_free(place);
    return DPL_OK;
}

static dpl_status build_tables(dpl_ep_ranks *ranks) {
    const int R = ranks->comm->n_ranks, *lowest = ranks->window->host;
    ranks->host = dpl_alloc_array((size_t)R, sizeof *ranks->host);
    if (!ranks->host) return dpl_fail(DPL_ENOMEM, "no memory for the hosts of %d ranks", R);
    for (int r = 0; r < R; r++)
        ranks->host[r] = lowest[r] == r ? (int)ranks->n_hosts++ : ranks->host[lowest[r]];
    DPL_TRY(alloc_tables(ranks));
    list_experts(ranks);
    return find_partners(ranks);
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
    return dpl_comm_agree(ranks->comm, build_tables(ranks));
}

void dpl_ep_ranks_close(dpl_ep_ranks *ranks) {
    if (ranks->window) dpl_window_close(&ranks->window);
    dpl_comm_close(&ranks->comm);
    void *tables[] = {ranks->first,      ranks->host,    ranks->owner,  ranks->host_expert,
                      ranks->host_first, ranks->partner, ranks->served, ranks->mate_at,
                      ranks->mate_bytes, ranks->marks};
    for (size_t i = 0; i < DPL_COUNT(tables); i++) dpl_free(tables[i]);
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

/* ---- meeting ---- */
typedef struct meeting { // what a rank tells of a move: where its block lies in its heap
    int64_t rows, values;
    int64_t numbers; // dpl_ep_numbers
} meeting;

#define MOVES_MAX 2

// all: of each rank, for each move.
static dpl_status agree_on_numbers(const meeting *all, size_t R, size_t n_moves, bool *wanted_out) {
    size_t says[3] = {0};
    for (size_t r = 0; r < R; r++) says[all[r * n_moves].numbers]++;
    DPL_CHECK(!says[DPL_EP_WANTED] || !says[DPL_EP_NONE],
              "weights are NULL on %zu ranks and given on %zu, expected the same on all",
              says[DPL_EP_NONE], says[DPL_EP_WANTED]);
    *wanted_out = says[DPL_EP_WANTED] > 0;
    return DPL_OK;
}

static void find_peers(dpl_ctx *ctx, dpl_ep_move *move, const meeting *all, size_t n_moves,
                       bool wanted) {
    const dpl_window *w = move->ep->ranks->window;
    const size_t R = (size_t)w->n_ranks, C = move->ep->n_chunks;
    move->peer_rows = dpl_ctx_alloc(ctx, R * sizeof *move->peer_rows);
    float **values = dpl_ctx_alloc(ctx, R * sizeof *values);
    for (size_t r = 0; r < R; r++) {
        const bool near = w->host[r] == w->host[move->ep->ranks->comm->rank];
        move->peer_rows[r] = near ? w->base[r] + all[r * n_moves].rows : NULL;
        values[r] = near ? (float *)(void *)(w->base[r] + all[r * n_moves].values) : NULL;
    }
    move->peer_values = wanted ? values : NULL;
    move->flights = memset(dpl_ctx_alloc(ctx, C * sizeof *move->flights), 0,
                           C * sizeof *move->flights);
}

dpl_status dpl_ep_meet(dpl_ctx *ctx, dpl_status mine, dpl_ep_move *moves, size_t n_moves) {
    const dpl_ep_ranks *ranks = moves->ep->ranks;
    if (!dpl_ep_is_spread(ranks)) return mine;
    const size_t R = (size_t)ranks->comm->n_ranks;
    const uint8_t *heap = dpl_heap_base(ranks->window->heap);
    meeting own[MOVES_MAX] = {{0}}, *all = dpl_ctx_alloc(ctx, R * n_moves * sizeof *all);
    for (size_t i = 0; i < n_moves; i++) {
        own[i].numbers = moves[i].numbers;
        if (moves[i].rows.p) own[i].rows = (const uint8_t *)moves[i].rows.p - heap;
        if (moves[i].values) own[i].values = (const uint8_t *)moves[i].values - heap;
    }
    dpl_ctx_wait(ctx); // what is queued may still use memory that peers are about to write
    DPL_TRY(dpl_comm_agree_on(ranks->comm, mine, own, n_moves * sizeof *own, all));
    for (size_t i = 0; i < n_moves; i++) {
        bool wanted;
        DPL_TRY(agree_on_numbers(all + i, R, n_moves, &wanted));
        find_peers(ctx, &moves[i], all + i, n_moves, wanted);
    }
    return DPL_OK;
}

dpl_spread dpl_ep_spread(const dpl_ep_move *move, size_t chunk) {
    const dpl_ep_chunk *c = &move->ep->chunks[chunk];
    return (dpl_spread){c->ids,          c->slot_row,       c->place,
                        move->peer_rows, move->peer_values, move->rows.dtype};
}

bool dpl_ep_has_arrived(const dpl_ep_move *move, size_t chunk) {
    if (!move->flights) return true;
    dpl_comm *comm = move->ep->ranks->comm;
    const dpl_flight *flight = &move->flights[chunk];
    return dpl_comm_is_done(comm, flight->bulk) && dpl_comm_is_done(comm, flight->signal);
}

dpl_status dpl_ep_signal(dpl_ctx *ctx, const dpl_ep *ep, dpl_ticket *ticket_out) {
    const dpl_ep_ranks *ranks = ep->ranks;
    const dpl_blocks send = {ranks->marks, ranks->mate_at, ranks->mate_bytes};
    const dpl_blocks receive = {ranks->marks + ranks->comm->n_ranks, send.offset, send.bytes};
    *ticket_out = (dpl_ticket){0};
    dpl_ctx_wait(ctx);
    return ranks->has_mates ? dpl_comm_exchange(ranks->comm, send, receive, ticket_out) : DPL_OK;
}
