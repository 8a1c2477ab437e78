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

static size_t report_bytes(size_t n_experts) {
    return sizeof(dpl_moe_report) + (n_experts + 1) * sizeof(int64_t);
}

dpl_ep dpl_ep_alloc(dpl_ctx *ctx, dpl_moe_memory *memory, const dpl_ep_ranks *ranks, size_t top_k,
                    size_t n_tokens) {
    const size_t n_experts = ranks->n_experts, n_slots = n_tokens * top_k;
    dpl_ep ep = {.ranks = ranks, .n_tokens = n_tokens, .top_k = top_k, .n_experts = n_experts};
    ep.n_local = dpl_ep_local_experts(ranks);
    ep.report = dpl_moe_keep(ctx, memory, report_bytes(n_experts));
    ep.slot_row = dpl_moe_keep(ctx, memory, n_slots * sizeof(int32_t));
    ep.row_slot = dpl_moe_keep(ctx, memory, n_slots * sizeof(int32_t));
    ep.counts = dpl_moe_keep(ctx, memory, n_experts * sizeof(int64_t));
    if (!dpl_ep_is_spread(ranks)) return ep;
    ep.offsets = dpl_moe_keep(ctx, memory, (ep.n_local + 1) * sizeof(int64_t));
    ep.place = dpl_moe_keep(ctx, memory, n_experts * sizeof(dpl_place));
    if (ranks->n_hosts <= 1) return ep;
    const size_t R = (size_t)ranks->comm->n_ranks;
    ep.all = dpl_moe_keep(ctx, memory, R * n_experts * sizeof(int64_t));
    ep.n_unique = dpl_moe_keep(ctx, memory, R * ranks->n_hosts * sizeof(int64_t));
    ep.unique_token = dpl_moe_keep(ctx, memory, n_slots * sizeof(int32_t));
    ep.row_unique = dpl_moe_keep(ctx, memory, n_slots * sizeof(int32_t));
    ep.sorted = dpl_moe_keep(ctx, memory, (n_experts + 1) * sizeof(int64_t));
    return ep;
}

// Rows lie by expert, then source rank, then token. all (R, ld): what every rank sends.
static dpl_status place_rows(dpl_ep *ep, const int64_t *own_offsets, const int64_t *all,
                             size_t ld) {
    const int R = ep->ranks->comm->n_ranks, me = ep->ranks->comm->rank;
    for (int owner = 0; owner < R; owner++) {
        const size_t first = ep->ranks->first[owner], end = ep->ranks->first[owner + 1];
        int64_t n = 0;
        for (size_t e = first; e < end; e++) {
            if (owner == me) ep->offsets[e - first] = n;
            for (int r = 0; r < R; r++) {
                if (r == me) ep->place[e] = (dpl_place){n - own_offsets[e], owner};
                n += all[(size_t)r * ld + e];
            }
        }
        DPL_CHECK(n <= INT32_MAX, "rank %d: %" PRId64 " rows arrive, expected at most %d", owner, n,
                  INT32_MAX);
        if (owner != me) continue;
        ep->offsets[end - first] = n;
        ep->n_rows = (size_t)n;
    }
    return DPL_OK;
}

// The choice of this rank: its counts and, for other hosts, what goes there.
static dpl_status permute(dpl_ctx *ctx, bool routed, dpl_ep *ep, dpl_moe_report *report,
                          int64_t *n_unique) {
    const size_t E = ep->n_experts, n_slots = ep->n_tokens * ep->top_k;
    dpl_permute(ctx, ep->ids, n_slots, E, ep->report->offsets, ep->slot_row, ep->row_slot);
    dpl_ctx_read(ctx, report, ep->report, report_bytes(E));
    for (size_t e = 0; e < E; e++) ep->counts[e] = report->offsets[e + 1] - report->offsets[e];
    if (routed && report->bad_row >= 0)
        return dpl_fail(DPL_ENUMERIC, "token %" PRId32 ": a router logit is NaN or infinite",
                        report->bad_row);
    if (ep->ranks->n_hosts <= 1) return DPL_OK;
    const size_t mark = dpl_ctx_mark(ctx);
    int32_t *ids = dpl_ctx_alloc(ctx, n_slots * sizeof *ids);
    dpl_ctx_read(ctx, ids, ep->ids, n_slots * sizeof *ids);
    memcpy(ep->sorted, report->offsets, (E + 1) * sizeof *ep->sorted);
    dpl_remote_plan(ctx, ids, ep, n_unique);
    dpl_ctx_release(ctx, mark);
    return DPL_OK;
}

dpl_status dpl_moe_prepare(dpl_ctx *ctx, const int32_t *ids, dpl_status mine, dpl_ep *ep,
                           double aux_out[2]) {
    const size_t mark = dpl_ctx_mark(ctx), E = ep->n_experts, H = ep->ranks->n_hosts;
    const size_t R = (size_t)ep->ranks->comm->n_ranks, n = E + (H > 1 ? H : 0);
    dpl_moe_report *report = dpl_ctx_alloc(ctx, report_bytes(E));
    // Of each rank: how many rows go to each expert, and tokens to each host.
    int64_t *own = dpl_ctx_alloc(ctx, n * sizeof(int64_t));
    int64_t *all = dpl_ctx_alloc(ctx, R * n * sizeof(int64_t));
    memset(own, 0, n * sizeof(int64_t));
    ep->ids = ids;
    if (mine == DPL_OK) mine = permute(ctx, aux_out != NULL, ep, report, own + E);
    memcpy(own, ep->counts, E * sizeof(int64_t));
    dpl_status status = dpl_comm_agree_on(ep->ranks->comm, mine, own, n * sizeof(int64_t), all);
    for (size_t r = 0; status == DPL_OK && H > 1 && r < R; r++)
        memcpy(ep->n_unique + r * H, all + r * n + E, H * sizeof(int64_t));
    for (size_t r = 0; status == DPL_OK && H > 1 && r < R; r++)
        memcpy(ep->all + r * E, all + r * n, E * sizeof(int64_t));
    if (status == DPL_OK && dpl_ep_is_spread(ep->ranks)) {
        status = place_rows(ep, report->offsets, all, n);
    } else if (status == DPL_OK) {
        ep->offsets = ep->report->offsets;
        ep->n_rows = (size_t)report->offsets[E];
    }
    if (status == DPL_OK && aux_out) memcpy(aux_out, report->aux, sizeof report->aux);
    dpl_ctx_release(ctx, mark);
    return status;
}
