// permute.c - step 2 of the layer: from expert ids to the row map, and the exchange of counts.
//
// Rows are sorted by expert, then token, so a row's place is known from the counts alone. Memory
// for N rows is taken by the caller after N is known: no buffer factor and no worst case.
#include "moe/moe.h"

#include <inttypes.h>

void *dpl_moe_keep(dpl_ctx *ctx, dpl_moe_memory *memory, size_t bytes) {
    if (!memory) return dpl_ctx_alloc(ctx, bytes);
    void *p = memory->p ? memory->p + memory->used_bytes : NULL;
    memory->used_bytes += dpl_round_up(bytes, DPL_ALIGN);
    return p;
}

dpl_mat dpl_moe_mat(dpl_ctx *ctx, dpl_moe_memory *memory, size_t n_rows, size_t width,
                    dpl_dtype dtype) {
    const size_t bytes = n_rows * width * dpl_dtype_bytes(dtype);
    return (dpl_mat){dpl_moe_keep(ctx, memory, bytes), width, dtype};
}

dpl_status dpl_ep_check_slots(size_t n_tokens, size_t top_k) {
    DPL_CHECK(n_tokens <= (size_t)INT32_MAX / top_k,
              "%zu tokens of %zu experts each, expected at most %d in all", n_tokens, top_k,
              INT32_MAX);
    return DPL_OK;
}

dpl_status dpl_ep_check_ids(const int32_t *ids, size_t n_tokens, size_t top_k, size_t n_experts) {
    for (size_t slot = 0; slot < n_tokens * top_k; slot++) {
        const size_t t = slot / top_k, k = slot % top_k;
        const int32_t id = ids[slot];
        DPL_CHECK(id >= -1 && (id < 0 || (size_t)id < n_experts),
                  "token %zu, slot %zu: expert id %d, expected 0 to %zu, or -1 to skip the slot", t,
                  k, (int)id, n_experts - 1);
        for (size_t j = 0; j < k && id >= 0; j++)
            DPL_CHECK(ids[slot - k + j] != id,
                      "token %zu: expert id %d twice (slots %zu and %zu), expected distinct ids", t,
                      (int)id, j, k);
    }
    return DPL_OK;
}

static size_t report_bytes(const dpl_ep *ep) {
    return sizeof(dpl_moe_report) + ep->n_chunks * (ep->n_experts + 1) * sizeof(int64_t);
}

static dpl_ep_chunk alloc_chunk(dpl_ctx *ctx, dpl_moe_memory *memory, const dpl_ep *ep, size_t i) {
    const dpl_ep_ranks *ranks = ep->ranks;
    const size_t T = ep->n_tokens, E = ep->n_experts, R = (size_t)ranks->comm->n_ranks;
    dpl_ep_chunk chunk = {.first = i * T / ep->n_chunks};
    chunk.n_tokens = (i + 1) * T / ep->n_chunks - chunk.first;
    const size_t slots_bytes = chunk.n_tokens * ep->top_k * sizeof(int32_t);
    chunk.slot_row = dpl_moe_keep(ctx, memory, slots_bytes);
    chunk.row_slot = dpl_moe_keep(ctx, memory, slots_bytes);
    if (!dpl_ep_is_spread(ranks)) return chunk;
    chunk.offsets = dpl_moe_keep(ctx, memory, (ep->n_local + 1) * sizeof(int64_t));
    chunk.place = dpl_moe_keep(ctx, memory, E * sizeof(dpl_place));
    chunk.row_at = dpl_moe_keep(ctx, memory, (R + 1) * E * sizeof(int64_t));
    if (ranks->n_hosts <= 1) return chunk;
    chunk.n_unique = dpl_moe_keep(ctx, memory, R * ranks->n_hosts * sizeof(int64_t));
    chunk.unique_token = dpl_moe_keep(ctx, memory, slots_bytes);
    chunk.row_unique = dpl_moe_keep(ctx, memory, slots_bytes);
    chunk.sorted = dpl_moe_keep(ctx, memory, (E + 1) * sizeof(int64_t));
    if (ranks->reduces) chunk.home_row = dpl_moe_keep(ctx, memory, slots_bytes);
    return chunk;
}

dpl_ep dpl_ep_alloc(dpl_ctx *ctx, dpl_moe_memory *memory, const dpl_ep_ranks *ranks, size_t top_k,
                    size_t n_tokens) {
    dpl_ep ep = {.ranks = ranks, .n_tokens = n_tokens, .top_k = top_k};
    ep.n_experts = ranks->n_experts;
    ep.n_local = dpl_ep_local_experts(ranks);
    ep.n_chunks = dpl_ep_is_spread(ranks) ? DPL_MAX(1, ranks->n_chunks) : 1;
    ep.report = dpl_moe_keep(ctx, memory, report_bytes(&ep));
    ep.counts = dpl_moe_keep(ctx, memory, ep.n_experts * sizeof(int64_t));
    ep.chunks = dpl_moe_keep(ctx, memory, ep.n_chunks * sizeof *ep.chunks);
    for (size_t i = 0; i < ep.n_chunks; i++) {
        const dpl_ep_chunk chunk = alloc_chunk(ctx, memory, &ep, i);
        if (ep.chunks) ep.chunks[i] = chunk; // else bytes are only counted
    }
    return ep;
}

// Where the rows of every rank lie. all: of each rank, for each chunk, how many go to each expert;
// `ld` numbers from chunk to chunk.
static dpl_status place_rows(dpl_ep *ep, const int64_t *sorted, const int64_t *all, size_t ld) {
    const size_t R = (size_t)ep->ranks->comm->n_ranks, me = (size_t)ep->ranks->comm->rank;
    const size_t E = ep->n_experts, C = ep->n_chunks;
    for (size_t owner = 0; owner < R; owner++) {
        const size_t first = ep->ranks->first[owner], end = ep->ranks->first[owner + 1];
        int64_t n = 0;
        for (size_t c = 0; c < C; c++) {
            dpl_ep_chunk *chunk = &ep->chunks[c];
            const int64_t begin = n;
            for (size_t e = first; e < end; e++) {
                if (owner == me) chunk->offsets[e - first] = n - begin;
                for (size_t r = 0; r < R; r++) {
                    chunk->row_at[r * E + e] = n;
                    n += all[(r * C + c) * ld + e];
                }
                chunk->row_at[R * E + e] = n;
                const int64_t at = chunk->row_at[me * E + e];
                chunk->place[e] = (dpl_place){at - sorted[c * (E + 1) + e], (int64_t)owner};
            }
            DPL_CHECK(n <= INT32_MAX, "rank %zu: %" PRId64 " rows arrive, expected at most %d",
                      owner, n, INT32_MAX);
            if (owner != me) continue;
            chunk->offsets[end - first] = n - begin;
            chunk->first_row = (size_t)begin;
            chunk->n_rows = (size_t)(n - begin);
            ep->n_rows = (size_t)n;
        }
    }
    return DPL_OK;
}

// The choice of this rank: for each chunk (`ld` numbers), rows for each expert and, behind them,
// tokens for each other host.
static dpl_status permute(dpl_ctx *ctx, bool routed, dpl_ep *ep, dpl_moe_report *report,
                          int64_t *own, size_t ld) {
    const size_t E = ep->n_experts, n_slots = ep->n_tokens * ep->top_k, mark = dpl_ctx_mark(ctx);
    for (size_t c = 0; c < ep->n_chunks; c++) {
        const dpl_ep_chunk *chunk = &ep->chunks[c];
        dpl_permute(ctx, chunk->ids, chunk->n_tokens * ep->top_k, E,
                    ep->report->offsets + c * (E + 1), chunk->slot_row, chunk->row_slot);
    }
    dpl_ctx_read(ctx, report, ep->report, report_bytes(ep));
    for (size_t c = 0; c < ep->n_chunks; c++) {
        const int64_t *offsets = report->offsets + c * (E + 1);
        for (size_t e = 0; e < E; e++) {
            own[c * ld + e] = offsets[e + 1] - offsets[e];
            ep->counts[e] += own[c * ld + e];
        }
    }
    if (routed && report->bad_row >= 0)
        return dpl_fail(DPL_ENUMERIC, "token %" PRId32 ": a router logit is NaN or infinite",
                        report->bad_row);
    if (ep->ranks->n_hosts <= 1) return DPL_OK;
    int32_t *ids = dpl_ctx_alloc(ctx, n_slots * sizeof *ids);
    dpl_ctx_read(ctx, ids, ep->chunks[0].ids, n_slots * sizeof *ids);
    for (size_t c = 0; c < ep->n_chunks; c++) {
        dpl_ep_chunk *chunk = &ep->chunks[c];
        memcpy(chunk->sorted, report->offsets + c * (E + 1), (E + 1) * sizeof *chunk->sorted);
        dpl_remote_plan(ctx, ids + chunk->first * ep->top_k, ep, chunk, own + c * ld + E);
    }
    dpl_ctx_release(ctx, mark);
    return DPL_OK;
}

dpl_status dpl_moe_prepare(dpl_ctx *ctx, const int32_t *ids, dpl_status mine, dpl_ep *ep,
                           double aux_out[2]) {
    const size_t mark = dpl_ctx_mark(ctx), E = ep->n_experts, C = ep->n_chunks;
    const size_t H = ep->ranks->n_hosts > 1 ? ep->ranks->n_hosts : 0, ld = E + H;
    const size_t R = (size_t)ep->ranks->comm->n_ranks, bytes = C * ld * sizeof(int64_t);
    dpl_moe_report *report = dpl_ctx_alloc(ctx, report_bytes(ep));
    int64_t *own = memset(dpl_ctx_alloc(ctx, bytes), 0, bytes);
    int64_t *all = dpl_ctx_alloc(ctx, R * bytes);
    memset(ep->counts, 0, E * sizeof *ep->counts);
    for (size_t c = 0; c < C; c++) ep->chunks[c].ids = ids + ep->chunks[c].first * ep->top_k;
    if (mine == DPL_OK) mine = permute(ctx, aux_out != NULL, ep, report, own, ld);
    dpl_status status = dpl_comm_agree_on(ep->ranks->comm, mine, own, bytes, all);
    for (size_t i = 0; status == DPL_OK && i < R * C && H > 0; i++)
        memcpy(ep->chunks[i % C].n_unique + i / C * H, all + i * ld + E, H * sizeof *all);
    if (status == DPL_OK && dpl_ep_is_spread(ep->ranks)) {
        status = place_rows(ep, report->offsets, all, ld);
    } else if (status == DPL_OK) {
        ep->chunks[0].offsets = ep->report->offsets;
        ep->chunks[0].n_rows = ep->n_rows = (size_t)report->offsets[E];
    }
    if (status == DPL_OK && aux_out) memcpy(aux_out, report->aux, sizeof report->aux);
    dpl_ctx_release(ctx, mark);
    return status;
}
