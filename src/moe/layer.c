// layer.c - one MoE layer: the five steps in order, the shared expert beside them, the way back.
//
// With more ranks than one the rows of tokens are copied to the ranks of their experts, and stay
// there until backward is over. Tokens go in chunks: while one is in the experts, the next is on
// its way there and those before are on their way back. What needs no rows of others, the shared
// expert and the gradients of weights, fills the beginning and the end.
//
// The host reads results of operators at one place only, dpl_moe_prepare(): there N is learned, a
// logit that is not finite found, and the auxiliary losses fetched; behind it dpl_router_meet() has
// the sums of losses that are over the batch of several ranks. y = round(shared + sum of the
// routed rows): one fp32 sum, as is dx. A gradient's time is counted under its step.
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
    // What the experts read is not what was there. (One rank has a row a token; while bytes are
    // counted that is not known.)
    const bool all_rows = !ctx || dpl_ep_is_spread(s->ep.ranks);
    if (shape->mx_wire)
        s->experts.x = dpl_moe_mat(ctx, memory, all_rows ? n_rows : s->ep.n_tokens, shape->d,
                                   DPL_BF16);
    keep_mlp(ctx, memory, shape, n_rows, shape->f, &s->experts);
    if (shared_f) keep_mlp(ctx, memory, shape, s->ep.n_tokens, shared_f, &s->shared);
    if (s->ep.ranks->reduces && s->ep.ranks->n_hosts > 1) dpl_remote_keep(ctx, &s->ep);
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

// More rows may arrive than anybody foresaw: whether there is step memory for what these take above
// the plan, forward and on the way back, beside what is planned. (With one rank there are none.)
static dpl_status check_rows(dpl_ctx *ctx, const dpl_moe_memory *memory, const dpl_moe_shape *shape,
                             const dpl_moe_saved *s) {
    const size_t planned = ctx->planned_end ? s->ep.n_tokens * s->ep.top_k : 0;
    const size_t extra = s->ep.n_rows - DPL_MIN(planned, s->ep.n_rows);
    const size_t sent = s->ep.ranks->n_hosts > 1 ? 2 * shape->d : 0;
    const bool quantized = s->experts.gate_up_w.quant; // then gradients are made of codes
    const size_t rounded = (shape->mx_wire ? 2 * shape->d : 0) +
                           (quantized ? shape->d + dpl_gate_up_width(shape->f) : 0);
    const size_t bytes = extra * dpl_dtype_bytes(shape->dtype) *
                         (2 * (dpl_gate_up_width(shape->f) + shape->f) + sent + rounded);
    const size_t mark = dpl_ctx_mark(ctx),
                 left = ctx->planned_end - DPL_MIN(ctx->planned_end, mark);
    if (memory || !dpl_ep_is_spread(s->ep.ranks)) return DPL_OK;
    DPL_EXPECT(bytes + left < dpl_arena_free_bytes(ctx->arena), DPL_ENOMEM,
               "no step memory for the %zu rows that arrive: about %.3g GB", s->ep.n_rows,
               1e-9 * (double)(bytes + left));
    if (ctx->planned_end) ctx->planned_end += bytes;
    return DPL_OK;
}

// What the experts read and where they leave it. One rank has every token here: products read them
// where they lie, and only weights are moved.
static dpl_status find_rows(dpl_ctx *ctx, const dpl_moe_shape *shape, dpl_mat x, dpl_moe_saved *s,
                            dpl_mat *arriving_out, dpl_mat *out_out) {
    dpl_mlp *experts = &s->experts;
    float *unused;
    if (!dpl_ep_is_spread(s->ep.ranks)) {
        if (shape->mx_wire) dpl_wire_round(ctx, x, s->ep.n_tokens, shape->d, experts->x);
        else experts->x = x;
        experts->map = (dpl_row_map){s->ep.chunks[0].row_slot, s->ep.top_k, s->ep.n_tokens};
        *out_out = dpl_moe_mat(ctx, NULL, s->ep.n_rows, shape->d, shape->dtype);
        return DPL_OK;
    }
    const size_t width = shape->mx_wire ? dpl_wire_width(shape->d) : shape->d;
    DPL_TRY(dpl_ep_rows_alloc(&s->ep, width, shape->dtype, arriving_out, &experts->row_weight));
    s->rows = arriving_out->p;
    if (!shape->mx_wire) experts->x = *arriving_out;
    return dpl_ep_rows_alloc(&s->ep, shape->d, shape->dtype, out_out, &unused);
}

// Rows of a chunk as they came.
static void unpack_chunk(dpl_ctx *ctx, const dpl_moe_shape *shape, const dpl_ep_move *move,
                         size_t chunk, dpl_mat rows) {
    const dpl_ep_chunk *c = &move->ep->chunks[chunk];
    if (shape->mx_wire && dpl_ep_is_spread(move->ep->ranks))
        dpl_wire_unpack(ctx, dpl_mat_at(move->rows, c->first_row, 0), c->n_rows, shape->d,
                        dpl_mat_at(rows, c->first_row, 0));
}

// The experts on the rows of a chunk: their blocks hold those of all chunks, one behind the other.
static dpl_mlp mlp_of_chunk(const dpl_ep *ep, const dpl_mlp *experts, size_t chunk) {
    const dpl_ep_chunk *c = &ep->chunks[chunk];
    dpl_mlp mlp = *experts;
    mlp.groups = (dpl_groups){ep->n_local, c->n_rows, c->offsets};
    if (!mlp.map.slot) mlp.x = dpl_mat_at(mlp.x, c->first_row, 0);
    if (mlp.row_weight) mlp.row_weight += c->first_row;
    mlp.gate_up = dpl_mat_at(mlp.gate_up, c->first_row, 0);
    mlp.hidden = dpl_mat_at(mlp.hidden, c->first_row, 0);
    return mlp;
}

static void run_shared(dpl_ctx *ctx, const dpl_moe_saved *s, size_t first, size_t end,
                       dpl_mat sum) {
    dpl_mlp mlp = s->shared;
    if (mlp.gate_up.ld == 0 || first == end) return; // there is none, or nothing to do
    mlp.groups = dpl_one_group(end - first);
    mlp.x = dpl_mat_at(mlp.x, first, 0);
    mlp.gate_up = dpl_mat_at(mlp.gate_up, first, 0);
    mlp.hidden = dpl_mat_at(mlp.hidden, first, 0);
    dpl_experts_forward(ctx, &mlp, dpl_mat_at(sum, first, 0));
}

// to, back: of the tokens and of the results. The shared expert takes some tokens while the first
// chunk is on its way, the rest while the last one is; a sum may be made when it has been there.
static dpl_status run_chunks(dpl_ctx *ctx, const dpl_moe_shape *shape, dpl_mat x,
                             const dpl_moe_saved *s, const dpl_ep_move *moves, dpl_mat sum) {
    const dpl_ep_move *to = &moves[0], *back = &moves[1];
    const bool has_shared = shape->shared_f > 0;
    const dpl_ep *ep = &s->ep;
    const size_t T = ep->n_tokens, C = ep->n_chunks, split = ep->ranks->n_hosts > 1 ? T / 2 : 0;
    size_t n_done = 0;
    DPL_TRY(dpl_moe_dispatch_start(ctx, to, 0, x, s->weights));
    run_shared(ctx, s, 0, split, sum);
    for (size_t c = 0; c < C; c++) {
        if (c + 1 < C) DPL_TRY(dpl_moe_dispatch_start(ctx, to, c + 1, x, s->weights));
        DPL_TRY(dpl_moe_dispatch_wait(ctx, to, c));
        unpack_chunk(ctx, shape, to, c, s->experts.x);
        const dpl_mlp mlp = mlp_of_chunk(ep, &s->experts, c);
        dpl_experts_forward(ctx, &mlp, dpl_mat_at(back->rows, ep->chunks[c].first_row, 0));
        DPL_TRY(dpl_moe_combine_start(ctx, back, c, false));
        while (n_done < c && dpl_ep_has_arrived(back, n_done) &&
               (!has_shared || ep->chunks[n_done + 1].first <= split))
            DPL_TRY(dpl_moe_combine_wait(ctx, back, n_done++, has_shared, sum, NULL));
    }
    run_shared(ctx, s, split, T, sum);
    for (; n_done < C; n_done++)
        DPL_TRY(dpl_moe_combine_wait(ctx, back, n_done, has_shared, sum, NULL));
    return dpl_moe_combine_end(ctx, back);
}

static dpl_status run(dpl_ctx *ctx, const dpl_moe_shape *shape, dpl_status mine, dpl_mat x,
                      dpl_moe_saved *s, dpl_mat y) {
    const bool has_shared = shape->shared_f > 0, direct = !has_shared || y.dtype == DPL_F32;
    const bool spread = dpl_ep_is_spread(s->ep.ranks);
    const size_t d = shape->d, n_tokens = s->ep.n_tokens;
    const dpl_mat sum = direct ? y : dpl_moe_mat(ctx, NULL, n_tokens, d, DPL_F32);
    dpl_mat arriving = {0}, out = {0};
    if (mine == DPL_OK) mine = find_rows(ctx, shape, x, s, &arriving, &out);
    dpl_ep_move moves[] = {{.ep = &s->ep,
                            .d = arriving.ld,
                            .rows = arriving,
                            .values = s->experts.row_weight,
                            .numbers = DPL_EP_WANTED,
                            .phase = DPL_PHASE_DISPATCH},
                           {.ep = &s->ep, .d = d, .rows = out, .phase = DPL_PHASE_COMBINE}};
    dpl_status status = dpl_ep_meet(ctx, mine, moves, DPL_COUNT(moves));
    if (status == DPL_OK && spread && shape->mx_wire) x = dpl_wire_pack(ctx, x, n_tokens, d);
    if (status == DPL_OK) status = run_chunks(ctx, shape, x, s, moves, sum);
    dpl_ctx_phase(ctx, DPL_PHASE_COMBINE);
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
        s.experts.groups = (dpl_groups){s.ep.n_local, s.ep.n_rows, s.ep.chunks[0].offsets};
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

/* ---- backward ---- */
typedef struct way_back {
    const dpl_moe_saved *s;
    dpl_mlp experts;
    dpl_mat arriving;     // rows of dy, which drows are or come from
    dpl_mat drows;        // (N, D): of the experts' results
    dpl_mat dgate_up;     // (N, 2F')
    dpl_mat dx_rows;      // (N, D): of the rows of tokens; with one rank drows itself
    float *drow_weight;   // (N)
    float *dweights;      // (T, K)
    size_t n_wgrads;      // chunks whose weights' gradients are there
    dpl_ep_move moves[2]; // of dy; of dx_rows
} way_back;

static dpl_status alloc_gradients(dpl_ctx *ctx, const dpl_moe_shape *shape, way_back *b) {
    const dpl_ep *ep = &b->s->ep;
    float *unused;
    b->dgate_up = dpl_experts_dgate_up(ctx, &b->experts);
    if (dpl_ep_is_spread(ep->ranks)) {
        const size_t width = shape->mx_wire ? dpl_wire_width(shape->d) : shape->d;
        DPL_TRY(dpl_ep_rows_alloc(ep, width, shape->dtype, &b->arriving, &unused));
        b->drows = b->arriving;
        if (shape->mx_wire) b->drows = dpl_moe_mat(ctx, NULL, ep->n_rows, shape->d, DPL_BF16);
        return dpl_ep_rows_alloc(ep, shape->d, shape->dtype, &b->dx_rows, &b->drow_weight);
    }
    b->arriving = b->drows = b->dx_rows = dpl_moe_mat(ctx, NULL, ep->n_rows, shape->d,
                                                      shape->dtype);
    b->drow_weight = dpl_ctx_alloc(ctx, ep->n_rows * sizeof(float));
    return DPL_OK;
}

// Of the next chunk. They may wait, but go in the order of chunks: so the sums have their bits.
static void add_wgrad(dpl_ctx *ctx, way_back *b) {
    const size_t row = b->s->ep.chunks[b->n_wgrads].first_row;
    const dpl_mlp mlp = mlp_of_chunk(&b->s->ep, &b->experts, b->n_wgrads++);
    dpl_experts_wgrad(ctx, &mlp, dpl_mat_at(b->drows, row, 0), dpl_mat_at(b->dgate_up, row, 0));
}

// The gradients of a chunk's rows, which others wait for.
static void run_backward(dpl_ctx *ctx, way_back *b, size_t chunk) {
    const size_t row = b->s->ep.chunks[chunk].first_row;
    const dpl_mlp mlp = mlp_of_chunk(&b->s->ep, &b->experts, chunk);
    const dpl_mat dgate_up = dpl_mat_at(b->dgate_up, row, 0);
    dpl_experts_gate_backward(ctx, &mlp, dpl_mat_at(b->drows, row, 0), dgate_up,
                              b->drow_weight + row);
    if (b->dx_rows.p == b->drows.p) add_wgrad(ctx, b); // before these rows are written over
    dpl_experts_dgrad(ctx, &mlp, dgate_up, dpl_mat_at(b->dx_rows, row, 0), false);
}

static dpl_mat dy_on_its_way(dpl_ctx *ctx, const dpl_moe_shape *shape, const dpl_ep *ep,
                             dpl_mat dy) {
    if (!shape->mx_wire) return dy;
    if (dpl_ep_is_spread(ep->ranks)) return dpl_wire_pack(ctx, dy, ep->n_tokens, shape->d);
    const dpl_mat rounded = dpl_moe_mat(ctx, NULL, ep->n_tokens, shape->d, DPL_BF16);
    dpl_wire_round(ctx, dy, ep->n_tokens, shape->d, rounded);
    return rounded;
}

// dx = that of the shared expert, to which the experts' is added. Gradients of weights wait until
// there is nothing else to do, or all rows are on their way.
static dpl_status run_chunks_backward(dpl_ctx *ctx, const dpl_moe_shape *shape, way_back *b,
                                      const dpl_mlp *shared, dpl_mat dy, dpl_mat dx) {
    const size_t C = b->s->ep.n_chunks;
    const dpl_ep_move *to = &b->moves[0], *back = &b->moves[1];
    dpl_mat dshared = {0};
    size_t n_done = 0;
    const dpl_mat sent = dy_on_its_way(ctx, shape, &b->s->ep, dy);
    DPL_TRY(dpl_moe_dispatch_start(ctx, to, 0, sent, NULL));
    if (shared) {
        dshared = dpl_experts_dgate_up(ctx, shared);
        dpl_experts_gate_backward(ctx, shared, dy, dshared, NULL);
        dpl_experts_dgrad(ctx, shared, dshared, dx, false);
    }
    for (size_t c = 0; c < C; c++) {
        if (c + 1 < C) DPL_TRY(dpl_moe_dispatch_start(ctx, to, c + 1, sent, NULL));
        while (b->n_wgrads < c && !dpl_ep_has_arrived(to, c)) add_wgrad(ctx, b);
        DPL_TRY(dpl_moe_dispatch_wait(ctx, to, c));
        unpack_chunk(ctx, shape, to, c, b->drows);
        run_backward(ctx, b, c);
        DPL_TRY(dpl_moe_combine_start(ctx, back, c, false));
        while (n_done < c && dpl_ep_has_arrived(back, n_done))
            DPL_TRY(dpl_moe_combine_wait(ctx, back, n_done++, shared, dx, b->dweights));
    }
    while (b->n_wgrads < C) add_wgrad(ctx, b);
    if (shared) dpl_experts_wgrad(ctx, shared, dy, dshared);
    for (; n_done < C; n_done++)
        DPL_TRY(dpl_moe_combine_wait(ctx, back, n_done, shared, dx, b->dweights));
    return dpl_moe_combine_end(ctx, back);
}

dpl_status dpl_moe_backward(dpl_ctx *ctx, const dpl_moe_shape *shape,
                            const dpl_moe_weights *weights, dpl_mat x, const dpl_aux *aux,
                            const dpl_moe_saved *saved, dpl_mat dy, dpl_mat dx) {
    const size_t d = shape->d, mark = dpl_ctx_mark(ctx);
    const size_t n_slots = saved->ep.n_tokens * shape->rule.top_k;
    const dpl_ep *ep = &saved->ep;
    way_back b = {.s = saved, .experts = saved->experts};
    dpl_mlp shared = saved->shared;
    // The caller may have moved tokens and weights.
    if (b.experts.map.slot && !shape->mx_wire) b.experts.x = x;
    b.experts.gate_up_w = weights->gate_up, b.experts.down_w = weights->down;
    shared.x = x;
    shared.gate_up_w = weights->shared_gate_up, shared.down_w = weights->shared_down;
    const dpl_phase outside = dpl_ctx_phase(ctx, DPL_PHASE_COMBINE);
    b.dweights = dpl_ctx_alloc(ctx, n_slots * sizeof(float));
    dpl_status status = alloc_gradients(ctx, shape, &b);
    b.moves[0] = (dpl_ep_move){
        .ep = ep, .d = b.arriving.ld, .rows = b.arriving, .phase = DPL_PHASE_COMBINE};
    b.moves[1] = (dpl_ep_move){.ep = ep,
                               .d = d,
                               .rows = b.dx_rows,
                               .values = b.drow_weight,
                               .numbers = DPL_EP_WANTED,
                               .phase = DPL_PHASE_DISPATCH};
    status = dpl_ep_meet(ctx, status, b.moves, DPL_COUNT(b.moves));
    if (status == DPL_OK)
        status = run_chunks_backward(ctx, shape, &b, shape->shared_f ? &shared : NULL, dy, dx);
    if (status == DPL_OK) {
        dpl_ctx_phase(ctx, DPL_PHASE_ROUTER);
        dpl_router_backward(ctx, shape, weights, x, aux, saved, b.dweights, dx);
    }
    if (dpl_ep_is_spread(ep->ranks)) {
        dpl_ep_rows_free(ep, b.arriving.p);
        dpl_ep_rows_free(ep, b.dx_rows.p);
    }
    dpl_ctx_phase(ctx, outside);
    dpl_ctx_release(ctx, mark);
    return status;
}
