// permute.c - step 2 of the layer: from expert ids to the row map, and the exchange of counts.
//
// Rows are sorted by expert, then token, so a row's place is known from the counts alone. Memory
// for N rows is taken by the caller after N is known: no buffer factor and no worst case.
#include "moe/moe.h"

#include <inttypes.h>

dpl_status dpl_ep_check_ranks(const dpl_comm *comm)
{
    if (comm->n_ranks != 1)
        return dpl_fail(DPL_ENOSUP, "expert parallelism over %d ranks (transport %s), expected 1",
                        comm->n_ranks, comm->ops->name);
    return DPL_OK;
}

dpl_status dpl_ep_check_ids(const int32_t *ids, size_t n_tokens, size_t top_k, size_t n_experts)
{
    for (size_t t = 0; t < n_tokens; t++) {
        const int32_t *row = ids + t * top_k;
        for (size_t k = 0; k < top_k; k++) {
            if (row[k] < -1 || (row[k] >= 0 && (size_t)row[k] >= n_experts))
                return dpl_fail(DPL_EINVAL,
                                "token %zu, slot %zu: expert id %" PRId32
                                ", expected 0 to %zu, or -1 to skip the slot",
                                t, k, row[k], n_experts - 1);
            for (size_t j = 0; j < k; j++)
                if (row[k] >= 0 && row[j] == row[k])
                    return dpl_fail(DPL_EINVAL,
                                    "token %zu: expert id %" PRId32
                                    " twice (slots %zu and %zu), expected distinct ids",
                                    t, row[k], j, k);
        }
    }
    return DPL_OK;
}

static dpl_status check_shape(const dpl_moe_shape *shape, size_t n_tokens)
{
    const size_t n_experts = shape->rule.n_experts, top_k = shape->rule.top_k;
    size_t n_slots;
    if (shape->first_expert != 0 || shape->n_local != n_experts)
        return dpl_fail(DPL_EINVAL, "experts %zu to %zu on the only rank, expected 0 to %zu",
                        shape->first_expert, shape->first_expert + shape->n_local - 1,
                        n_experts - 1);
    if (__builtin_mul_overflow(n_tokens, top_k, &n_slots) || n_slots > INT32_MAX)
        return dpl_fail(DPL_EINVAL, "%zu tokens of %zu experts each, expected at most %d in all",
                        n_tokens, top_k, INT32_MAX);
    return DPL_OK;
}

static size_t report_bytes(size_t n_experts)
{
    return sizeof(dpl_moe_report) + (n_experts + 1) * sizeof(int64_t);
}

dpl_status dpl_ep_plan(dpl_ctx *ctx, dpl_comm *comm, const dpl_moe_shape *shape, size_t n_tokens,
                       dpl_moe_memory *memory, dpl_ep *ep_out)
{
    DPL_TRY(dpl_ep_check_ranks(comm));
    const dpl_status status = check_shape(shape, n_tokens);
    if (status != DPL_OK) return dpl_comm_agree(comm, status);
    const size_t n_experts = shape->rule.n_experts, n_slots = n_tokens * shape->rule.top_k;
    dpl_ep ep = {.n_tokens = n_tokens, .top_k = shape->rule.top_k, .n_local = shape->n_local};
    ep.report = dpl_moe_keep(ctx, memory, report_bytes(n_experts));
    ep.offsets = ep.report->offsets;
    ep.slot_row = dpl_moe_keep(ctx, memory, n_slots * sizeof(int32_t));
    ep.row_slot = dpl_moe_keep(ctx, memory, n_slots * sizeof(int32_t));
    ep.counts = dpl_moe_keep(ctx, memory, n_experts * sizeof(int64_t));
    *ep_out = ep;
    return DPL_OK;
}

void dpl_ep_permute(dpl_ctx *ctx, const int32_t *ids, const dpl_ep *ep)
{
    const dpl_phase before = dpl_ctx_phase(ctx, DPL_PHASE_DISPATCH);
    dpl_permute(ctx, ids, ep->n_tokens * ep->top_k, ep->n_local, ep->offsets, ep->slot_row,
                ep->row_slot);
    dpl_ctx_phase(ctx, before);
}

// Each rank tells the owner of each expert how many rows come; with one rank the owner is this rank.
static dpl_status exchange_counts(dpl_comm *comm, dpl_ep *ep, int64_t *received)
{
    const size_t offset[] = {0}, bytes[] = {ep->n_local * sizeof(int64_t)};
    dpl_ticket ticket;
    DPL_TRY(comm->ops->all_to_all(comm, (dpl_blocks){ep->counts, offset, bytes},
                                  (dpl_blocks){received, offset, bytes}, &ticket));
    DPL_TRY(comm->ops->wait(comm, ticket));
    ep->n_rows = 0;
    for (size_t e = 0; e < ep->n_local; e++)
        ep->n_rows += (size_t)received[e];
    return DPL_OK;
}

dpl_status dpl_ep_exchange(dpl_ctx *ctx, dpl_comm *comm, dpl_ep *ep, double aux_out[2])
{
    const dpl_phase before = dpl_ctx_phase(ctx, DPL_PHASE_DISPATCH);
    const size_t mark = dpl_ctx_mark(ctx), bytes = report_bytes(ep->n_local);
    dpl_moe_report *report = dpl_ctx_alloc(ctx, bytes);
    int64_t *received = dpl_ctx_alloc(ctx, ep->n_local * sizeof(int64_t));
    dpl_ctx_read(ctx, report, ep->report, bytes);
    dpl_status status = DPL_OK;
    if (aux_out && report->bad_row >= 0)
        status = dpl_fail(DPL_ENUMERIC, "token %" PRId32 ": a router logit is NaN or infinite",
                          report->bad_row);
    status = dpl_comm_agree(comm, status);
    if (status == DPL_OK) {
        for (size_t e = 0; e < ep->n_local; e++)
            ep->counts[e] = report->offsets[e + 1] - report->offsets[e];
        status = exchange_counts(comm, ep, received);
    }
    if (status == DPL_OK && aux_out) memcpy(aux_out, report->aux, sizeof report->aux);
    dpl_ctx_release(ctx, mark);
    dpl_ctx_phase(ctx, before);
    return status;
}

dpl_status dpl_ep_prepare(dpl_ctx *ctx, dpl_comm *comm, const dpl_moe_shape *shape,
                          const int32_t *ids, size_t n_tokens, bool check, dpl_ep *ep_out)
{
    const size_t before = dpl_ctx_mark(ctx);
    dpl_ep ep;
    DPL_TRY(dpl_ep_plan(ctx, comm, shape, n_tokens, NULL, &ep));
    dpl_status status = DPL_OK;
    if (check) {
        const size_t mark = dpl_ctx_mark(ctx), bytes = n_tokens * ep.top_k * sizeof *ids;
        int32_t *host = dpl_ctx_alloc(ctx, bytes);
        dpl_ctx_read(ctx, host, ids, bytes);
        status = dpl_ep_check_ids(host, n_tokens, ep.top_k, shape->rule.n_experts);
        dpl_ctx_release(ctx, mark);
        if (status != DPL_OK) status = dpl_comm_agree(comm, status);
    }
    if (status == DPL_OK) {
        dpl_ep_permute(ctx, ids, &ep);
        status = dpl_ep_exchange(ctx, comm, &ep, NULL);
    }
    if (status == DPL_OK)
        *ep_out = ep;
    else
        dpl_ctx_release(ctx, before);
    return status;
}
