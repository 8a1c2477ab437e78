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

dpl_status dpl_ep_check(dpl_comm *comm, const dpl_moe_shape *shape, size_t n_tokens) {
    DPL_EXPECT(comm->n_ranks == 1, DPL_ENOSUP,
               "expert parallelism over %d ranks (transport %s), expected 1", comm->n_ranks,
               comm->ops->name);
    const dpl_status status = dpl_ep_check_slots(n_tokens, shape->rule.top_k);
    return status == DPL_OK ? DPL_OK : dpl_comm_agree(comm, status);
}

static size_t report_bytes(size_t n_experts) {
    return sizeof(dpl_moe_report) + (n_experts + 1) * sizeof(int64_t);
}

dpl_ep dpl_ep_alloc(dpl_ctx *ctx, dpl_moe_memory *memory, const dpl_moe_shape *shape,
                    size_t n_tokens) {
    const size_t n_experts = shape->rule.n_experts, n_slots = n_tokens * shape->rule.top_k;
    dpl_ep ep = {.n_tokens = n_tokens, .top_k = shape->rule.top_k, .n_local = n_experts};
    ep.report = dpl_moe_keep(ctx, memory, report_bytes(n_experts));
    ep.slot_row = dpl_moe_keep(ctx, memory, n_slots * sizeof(int32_t));
    ep.row_slot = dpl_moe_keep(ctx, memory, n_slots * sizeof(int32_t));
    ep.counts = dpl_moe_keep(ctx, memory, n_experts * sizeof(int64_t));
    return ep;
}

// Each rank tells the owner of each expert how many rows come; with one rank the owner is this one.
static dpl_status exchange_counts(dpl_comm *comm, dpl_ep *ep, int64_t *received) {
    const size_t offset = 0, bytes = ep->n_local * sizeof(int64_t);
    dpl_ticket ticket;
    DPL_TRY(comm->ops->all_to_all(comm, (dpl_blocks){ep->counts, &offset, &bytes},
                                  (dpl_blocks){received, &offset, &bytes}, &ticket));
    DPL_TRY(comm->ops->wait(comm, ticket));
    ep->n_rows = 0;
    for (size_t e = 0; e < ep->n_local; e++) ep->n_rows += (size_t)received[e];
    return DPL_OK;
}

dpl_status dpl_ep_prepare(dpl_ctx *ctx, dpl_comm *comm, const int32_t *ids, dpl_ep *ep,
                          double aux_out[2]) {
    const size_t mark = dpl_ctx_mark(ctx), bytes = report_bytes(ep->n_local);
    dpl_moe_report *report = dpl_ctx_alloc(ctx, bytes);
    int64_t *received = dpl_ctx_alloc(ctx, ep->n_local * sizeof(int64_t));
    dpl_permute(ctx, ids, ep->n_tokens * ep->top_k, ep->n_local, ep->report->offsets, ep->slot_row,
                ep->row_slot);
    dpl_ctx_read(ctx, report, ep->report, bytes);
    dpl_status status = DPL_OK;
    if (aux_out && report->bad_row >= 0)
        status = dpl_fail(DPL_ENUMERIC, "token %" PRId32 ": a router logit is NaN or infinite",
                          report->bad_row);
    status = dpl_comm_agree(comm, status);
    for (size_t e = 0; e < ep->n_local; e++)
        ep->counts[e] = report->offsets[e + 1] - report->offsets[e];
    if (status == DPL_OK) status = exchange_counts(comm, ep, received);
    if (status == DPL_OK && aux_out) memcpy(aux_out, report->aux, sizeof report->aux);
    dpl_ctx_release(ctx, mark);
    return status;
}
