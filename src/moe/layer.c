// layer.c - one MoE layer: the five steps in order, the shared expert beside them, the way back.
//
// With more ranks than one the rows of tokens are copied to the ranks of their experts, and stay
// there until backward is over.
//
// The host reads results of operators at one place only, dpl_moe_prepare(): there N is learned, a
// logit that is not finite found, and the auxiliary losses fetched; behind it dpl_router_meet() has
// the sums of losses that are over the batch of several ranks. y = round(shared + sum of the
// routed rows): one fp32 sum. A gradient's time is counted under its step.
#include "moe/moe.h"

static void keep_routing(dpl_ctx *ctx, dpl_moe_memory *memory, const dpl_moe_shape *shape,
                         const dpl_ep_ranks *ranks, size_t n_tokens, dpl_moe_saved *s) {
    const size_t n_logits = n_tokens * shape->rule.n_experts;
    const size_t n_slots = n_tokens * shape->rule.top_k;
    s->ep = dpl_ep_alloc(ctx, memory, ranks, shape->rule.top_k, n_tokens);
    s->logits = dpl_moe_keep(ctx, memory, n_logits * sizeof(float));
    s->score = dpl_moe_keep(ctx, memory, n_logits * sizeof(float));
    s->ids = dpl_moe_keep(ctx, memory, n_slots * sizeof(int32_t));
    s->weights = dpl_moe_keep(ctx, memory, n_slots * sizeof(float));
}

static void keep_sums(dpl_ctx *ctx, dpl_moe_memory *memory, const dpl_moe_shape *shape,
                      dpl_moe_saved *s) {
    const size_t bytes = dpl_aux_n_sums(shape->rule.n_experts) * sizeof *s->sums;
    s->sums = dpl_moe_keep(ctx, memory, bytes);
    s->all = dpl_moe_keep(ctx, memory, bytes);
}

static void keep_mlp(dpl_ctx *ctx, dpl_moe_memory *memory, const dpl_moe_shape *shape,
                     size_t n_rows, size_t f, dpl_mlp *mlp) {
    mlp->gate_up = dpl_moe_mat(ctx, memory, n_rows, dpl_gate_up_width(f), shape->dtype);
    mlp->hidden = dpl_moe_mat(ctx, memory, n_rows, f, shape->dtype);
}

static void keep_rows(dpl_ctx *ctx, dpl_moe_memory *memory, const dpl_moe_shape *shape,
                      dpl_moe_saved *s) {
    const size_t n_rows = s->ep.n_rows, shared_f = shape->shared_f;
    if (!dpl_ep_is_spread(s->ep.ranks)) // else they come with the rows
        s->experts.row_weight = dpl_moe_keep(ctx, memory, n_rows * sizeof(float));
    keep_mlp(ctx, memory, shape, n_rows, shape->f, &s->experts);
    if (shared_f) keep_mlp(ctx, memory, shape, s->ep.n_tokens, shared_f, &s->shared);
}

size_t dpl_moe_saved_bytes(const dpl_moe_shape *shape, size_t n_tokens) {
    dpl_comm one = {.n_ranks = 1};
    size_t first[2] = {0, shape->rule.n_experts};
    const dpl_ep_ranks ranks = {.comm = &one, .n_experts = shape->rule.n_experts, .first = first};
    dpl_moe_memory count = {NULL, 0};
    dpl_moe_saved saved;
    keep_routing(NULL, &count, shape, &ranks, n_tokens, &saved);
    saved.ep.n_rows = n_tokens * shape->rule.top_k;
    keep_rows(NULL, &count, shape, &saved);
    return count.used_bytes;
}

// More rows may arrive than anybody foresaw: whether there is step memory for them, forward and on
// the way back. (With one rank the caller knows beforehand.)
static dpl_status check_rows(const dpl_ctx *ctx, const dpl_moe_memory *memory,
                             const dpl_moe_shape *shape, const dpl_moe_saved *s) {
    const double n = (double)s->ep.n_rows, item = (double)dpl_dtype_bytes(shape->dtype);
    const double bytes = 2 * n * item * (double)(dpl_gate_up_width(shape->f) + shape->f);
    if (memory || !dpl_ep_is_spread(s->ep.ranks)) return DPL_OK;
    DPL_EXPECT(bytes < (double)dpl_arena_free_bytes(ctx->arena), DPL_ENOMEM,
               "no step memory for the %zu rows that arrive: about %.3g GB", s->ep.n_rows,
               1e-9 * bytes);
    return DPL_OK;
}

// What the experts read and where they leave it. One rank has every token here: products read them
// where they lie, and only weights are moved.
static dpl_status find_rows(dpl_ctx *ctx, const dpl_moe_shape *shape, dpl_mat x, dpl_moe_saved *s,
                            dpl_mat *out_out) {
    dpl_mlp *experts = &s->experts;
    float *unused;
    if (!dpl_ep_is_spread(s->ep.ranks)) {
        experts->x = x;
        experts->map = (dpl_row_map){s->ep.row_slot, s->ep.top_k};
        *out_out = dpl_moe_mat(ctx, NULL, s->ep.n_rows, shape->d, shape->dtype);
        return DPL_OK;
    }
    DPL_TRY(dpl_ep_rows_alloc(&s->ep, shape->d, shape->dtype, &experts->x, &experts->row_weight));
    s->rows = experts->x.p;
    return dpl_ep_rows_alloc(&s->ep, shape->d, shape->dtype, out_out, &unused);
}

static dpl_status run(dpl_ctx *ctx, const dpl_moe_shape *shape, dpl_status mine, dpl_mat x,
                      dpl_moe_saved *s, dpl_mat y) {
    const bool has_shared = shape->shared_f > 0, direct = !has_shared || y.dtype == DPL_F32;
    const bool spread = dpl_ep_is_spread(s->ep.ranks);
    const size_t d = shape->d, n_tokens = s->ep.n_tokens;
    const dpl_mat sum = direct ? y : dpl_moe_mat(ctx, NULL, n_tokens, d, DPL_F32);
    dpl_mat out = {0};
    if (mine == DPL_OK) mine = find_rows(ctx, shape, x, s, &out);
    dpl_status status = mine;
    status = dpl_moe_dispatch(ctx, &s->ep, status, x, s->weights, DPL_EP_WANTED, spread ? d : 0,
                              spread ? s->experts.x : (dpl_mat){0}, s->experts.row_weight);
    if (status == DPL_OK) {
        dpl_experts_forward(ctx, &s->experts, out);
        if (has_shared) dpl_experts_forward(ctx, &s->shared, sum);
        dpl_ctx_phase(ctx, DPL_PHASE_COMBINE);
        status = dpl_moe_combine(ctx, &s->ep, DPL_OK, out, NULL, DPL_EP_NONE, d, has_shared, sum,
                                 NULL);
    }
    if (status == DPL_OK && !direct) dpl_copy(ctx, sum, n_tokens, d, y);
    if (spread) dpl_ep_rows_free(&s->ep, out.p);
    return status;
}

dpl_status dpl_moe_forward_in(dpl_ctx *ctx, const dpl_ep_ranks *ranks, const dpl_moe_shape *shape,
                              const dpl_moe_weights *weights, dpl_mat x, size_t n_tokens,
                              const int32_t *segment, const dpl_aux *aux, dpl_moe_memory *memory,
                              dpl_moe_saved *saved_out, dpl_mat y) {
    const size_t before = dpl_ctx_mark(ctx);
    const dpl_phase outside = dpl_ctx_phase(ctx, DPL_PHASE_ROUTER);
    dpl_comm *batch = aux ? dpl_ep_batch(ranks, aux->kind) : NULL;
    dpl_moe_saved s = {0};
    dpl_status status = dpl_ep_check_slots(n_tokens, shape->rule.top_k);
    keep_routing(ctx, memory, shape, ranks, status == DPL_OK ? n_tokens : 0, &s);
    if (batch) keep_sums(ctx, memory, shape, &s);
    if (status == DPL_OK) dpl_router_forward(ctx, shape, weights, x, segment, aux, &s);
    dpl_ctx_phase(ctx, DPL_PHASE_DISPATCH);
    status = dpl_moe_prepare(ctx, s.ids, status, &s.ep, s.aux);
    status = dpl_router_meet(ctx, shape, aux, status, &s);
    if (status == DPL_OK) {
        s.experts.groups = (dpl_groups){s.ep.n_local, s.ep.n_rows, s.ep.offsets};
        s.experts.gate_up_w = weights->gate_up;
        s.experts.down_w = weights->down;
        s.shared = (dpl_mlp){.groups = dpl_one_group(n_tokens), .x = x};
        s.shared.gate_up_w = weights->shared_gate_up;
        s.shared.down_w = weights->shared_down;
        status = check_rows(ctx, memory, shape, &s);
        if (status == DPL_OK) keep_rows(ctx, memory, shape, &s);
        const size_t mark = dpl_ctx_mark(ctx);
        status = run(ctx, shape, status, x, &s, y);
        // The rest of the batch's ranks learn of it where they meet next.
        if (status != DPL_OK && batch) status = dpl_comm_agree(batch, status);
        dpl_ctx_release(ctx, mark);
    }
    dpl_ctx_phase(ctx, outside);
    if (status == DPL_OK) {
        *saved_out = s;
        return DPL_OK;
    }
    dpl_ep_rows_free(&s.ep, s.rows);
    dpl_ctx_release(ctx, before);
    return status;
}

void dpl_moe_forget(dpl_moe_saved *saved) {
    dpl_ep_rows_free(&saved->ep, saved->rows);
    saved->rows = NULL;
}

static dpl_status alloc_gradients(dpl_ctx *ctx, const dpl_moe_shape *shape, const dpl_ep *ep,
                                  dpl_mat *rows_out, float **values_out) {
    *rows_out = (dpl_mat){0};
    if (dpl_ep_is_spread(ep->ranks))
        return dpl_ep_rows_alloc(ep, shape->d, shape->dtype, rows_out, values_out);
    *rows_out = dpl_moe_mat(ctx, NULL, ep->n_rows, shape->d, shape->dtype);
    *values_out = dpl_ctx_alloc(ctx, ep->n_rows * sizeof(float));
    return DPL_OK;
}

dpl_status dpl_moe_backward(dpl_ctx *ctx, const dpl_moe_shape *shape,
                            const dpl_moe_weights *weights, dpl_mat x, const dpl_aux *aux,
                            const dpl_moe_saved *saved, dpl_mat dy, dpl_mat dx) {
    const size_t d = shape->d, mark = dpl_ctx_mark(ctx);
    const size_t n_slots = saved->ep.n_tokens * shape->rule.top_k;
    const bool spread = dpl_ep_is_spread(saved->ep.ranks);
    float *dweights = dpl_ctx_alloc(ctx, n_slots * sizeof(float)), *drow_weight = NULL;
    dpl_mat drows;
    const dpl_phase outside = dpl_ctx_phase(ctx, DPL_PHASE_COMBINE);
    dpl_status status = alloc_gradients(ctx, shape, &saved->ep, &drows, &drow_weight);
    status = dpl_moe_dispatch(ctx, &saved->ep, status, dy, NULL, DPL_EP_NONE, d, drows, NULL);
    dpl_mlp experts = saved->experts, shared = saved->shared;
    shared.x = x; // the caller may have moved it, and the weights
    shared.gate_up_w = weights->shared_gate_up, shared.down_w = weights->shared_down;
    experts.gate_up_w = weights->gate_up, experts.down_w = weights->down;
    if (!spread) experts.x = x;
    if (status == DPL_OK) {
        dpl_experts_backward(ctx, &experts, drows, drows, false, drow_weight);
        dpl_ctx_phase(ctx, DPL_PHASE_DISPATCH);
        status = dpl_moe_combine(ctx, &saved->ep, DPL_OK, drows, drow_weight, DPL_EP_WANTED, d,
                                 false, dx, dweights);
    }
    if (status == DPL_OK) {
        dpl_ctx_phase(ctx, DPL_PHASE_ROUTER);
        dpl_router_backward(ctx, shape, weights, x, aux, saved, dweights, dx);
        if (shape->shared_f) dpl_experts_backward(ctx, &shared, dy, dx, true, NULL);
    }
    if (spread) dpl_ep_rows_free(&saved->ep, drows.p);
    dpl_ctx_phase(ctx, outside);
    dpl_ctx_release(ctx, mark);
    return status;
}
