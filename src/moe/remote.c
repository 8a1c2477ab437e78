// remote.c - rows between hosts, as messages. On each other host a rank has one partner, and packs
// once what goes there: a token that several experts of the host want crosses once. The partner
// puts its rows into the memory of the ranks that have the experts, as a rank of the same host does
// itself. On the way back it collects the rows there and returns all of them: they are summed at
// home, in slot order, so the bits do not depend on the split. With `reduces` it returns their
// sums, which are fewer bytes and round once more.
#include "moe/moe.h"

// Rows of rank `source` for expert e, from row `*row_out` of the rank that has it.
static size_t rows_of(const dpl_ep *ep, const dpl_ep_chunk *chunk, int source, size_t e,
                      size_t *row_out) {
    const int64_t *at = chunk->row_at + (size_t)source * ep->n_experts + e;
    *row_out = (size_t)*at;
    return (size_t)(at[ep->n_experts] - *at);
}

static size_t count_rows(const dpl_ep *ep, const dpl_ep_chunk *chunk, int source, size_t host) {
    const dpl_ep_ranks *ranks = ep->ranks;
    size_t n = 0, row;
    for (size_t i = ranks->host_first[host]; i < ranks->host_first[host + 1]; i++)
        n += rows_of(ep, chunk, source, ranks->host_expert[i], &row);
    return n;
}

// Of a packet from `source` to `host`: its tokens, for each row which of them it is, and numbers.
typedef struct packet {
    size_t n_tokens, n_rows;
    uint8_t *tokens;
    int32_t *index;
    float *values;
} packet;

static size_t packet_at(const dpl_ep *ep, const dpl_ep_chunk *chunk, int source, size_t host,
                        size_t row_bytes, uint8_t *p, packet *out) {
    const size_t n_tokens = (size_t)chunk->n_unique[(size_t)source * ep->ranks->n_hosts + host];
    const size_t n_rows = count_rows(ep, chunk, source, host);
    const size_t tokens = dpl_round_up(n_tokens * row_bytes, DPL_ALIGN), list = 4 * n_rows;
    if (out)
        *out = (packet){n_tokens, n_rows, p, (int32_t *)(void *)(p + tokens),
                        (float *)(void *)(p + tokens + list)};
    return dpl_round_up(tokens + 2 * list, DPL_ALIGN);
}

// Tokens in order for each host; a sorted row's token is known by counting the rows of its expert.
void dpl_remote_plan(dpl_ctx *ctx, const int32_t *ids, const dpl_ep *ep, dpl_ep_chunk *chunk,
                     int64_t *n_unique) {
    const dpl_ep_ranks *ranks = ep->ranks;
    const size_t mark = dpl_ctx_mark(ctx), E = ep->n_experts, K = ep->top_k;
    int64_t *next_row = dpl_ctx_alloc(ctx, E * sizeof *next_row), begin = 0;
    memcpy(next_row, chunk->sorted, E * sizeof *next_row);
    if (chunk->home_row)
        memcpy(chunk->home_row, chunk->slot_row, chunk->n_tokens * K * sizeof *chunk->home_row);
    for (size_t h = 0; h < ranks->n_hosts; h++) {
        n_unique[h] = 0;
        if ((int)h == ranks->host[ranks->comm->rank]) continue;
        for (size_t t = 0; t < chunk->n_tokens; t++) {
            bool wanted = false;
            for (size_t slot = t * K; slot < (t + 1) * K; slot++) {
                const int32_t e = ids[slot];
                if (e < 0 || ranks->host[ranks->owner[e]] != (int)h) continue;
                chunk->row_unique[next_row[e]++] = (int32_t)(n_unique[h] * (int64_t)K) +
                                                   (int32_t)(slot - t * K);
                if (chunk->home_row) chunk->home_row[slot] = wanted ? -1 : (int32_t)n_unique[h];
                wanted = true;
            }
            if (wanted) chunk->unique_token[begin + n_unique[h]++] = (int32_t)t;
        }
        begin += n_unique[h];
    }
    dpl_ctx_release(ctx, mark);
}

/* ---- messages ---- */
static uint8_t *place_blocks(dpl_ctx *ctx, size_t R, size_t *at, const size_t *bytes) {
    size_t all = 0;
    for (size_t r = 0; r < R; r++) at[r] = all, all += bytes[r];
    return dpl_ctx_alloc(ctx, all);
}

// On the way back: a number for each row, then the rows, or their sums.
static size_t number_bytes(size_t n_rows) {
    return dpl_round_up(n_rows * sizeof(float), DPL_ALIGN);
}

static size_t mail_bytes(const dpl_ep *ep, const dpl_ep_chunk *chunk, int source, size_t host,
                         size_t row_bytes, bool back) {
    if (!back) return packet_at(ep, chunk, source, host, row_bytes, NULL, NULL);
    const size_t n = count_rows(ep, chunk, source, host);
    const size_t n_sums = (size_t)chunk->n_unique[(size_t)source * ep->ranks->n_hosts + host];
    return number_bytes(n) + dpl_round_up((chunk->home_row ? n_sums : n) * row_bytes, DPL_ALIGN);
}

// What this rank sends to its partners and what it gets as one; back: the reverse.
static dpl_mail address(dpl_ctx *ctx, const dpl_ep_move *move, size_t chunk, bool back) {
    const dpl_ep *ep = move->ep;
    const dpl_ep_ranks *ranks = ep->ranks;
    const dpl_ep_chunk *c = &ep->chunks[chunk];
    const size_t R = (size_t)ranks->comm->n_ranks, mine = (size_t)ranks->host[ranks->comm->rank];
    const size_t row_bytes = move->d * dpl_dtype_bytes(move->rows.dtype);
    size_t *sizes = dpl_ctx_alloc(ctx, 4 * R * sizeof *sizes);
    memset(sizes, 0, 4 * R * sizeof *sizes);
    dpl_mail m = {sizes, sizes + R, sizes + 2 * R, sizes + 3 * R, NULL, NULL};
    size_t *to = back ? m.receive_bytes : m.send_bytes;
    size_t *from = back ? m.send_bytes : m.receive_bytes;
    for (size_t h = 0; h < ranks->n_hosts; h++)
        if (h != mine)
            to[ranks->partner[h]] = mail_bytes(ep, c, ranks->comm->rank, h, row_bytes, back);
    for (size_t i = 0; i < ranks->n_served; i++)
        from[ranks->served[i]] = mail_bytes(ep, c, ranks->served[i], mine, row_bytes, back);
    m.send = place_blocks(ctx, R, m.send_at, m.send_bytes);
    m.receive = place_blocks(ctx, R, m.receive_at, m.receive_bytes);
    return m;
}

static dpl_status start(dpl_ctx *ctx, const dpl_ep_move *move, dpl_flight *flight) {
    const dpl_mail *m = &flight->mail;
    dpl_ctx_wait(ctx);
    return dpl_comm_exchange(
        move->ep->ranks->comm, (dpl_blocks){m->send, m->send_at, m->send_bytes},
        (dpl_blocks){m->receive, m->receive_at, m->receive_bytes}, &flight->bulk);
}

/* ---- there ---- */
static void pack(dpl_ctx *ctx, const dpl_ep_move *move, const dpl_ep_chunk *chunk, size_t host,
                 dpl_mat x, const float *weights, const int32_t *tokens, uint8_t *to) {
    const dpl_ep *ep = move->ep;
    const dpl_ep_ranks *ranks = ep->ranks;
    const dpl_dtype dtype = move->rows.dtype;
    packet p;
    packet_at(ep, chunk, ranks->comm->rank, host, move->d * dpl_dtype_bytes(dtype), to, &p);
    dpl_gather_rows(ctx, x, NULL, tokens, 1, p.n_tokens, move->d,
                    (dpl_mat){p.tokens, move->d, dtype}, NULL);
    size_t row = 0;
    for (size_t i = ranks->host_first[host]; i < ranks->host_first[host + 1]; i++) {
        const int64_t *sorted = chunk->sorted + ranks->host_expert[i];
        const size_t first = (size_t)sorted[0], n = (size_t)sorted[1] - first;
        memcpy(p.index + row, chunk->row_unique + first, n * sizeof *p.index);
        if (move->peer_values)
            dpl_gather_rows(ctx, x, weights, chunk->row_slot + first, ep->top_k, n, 0, (dpl_mat){0},
                            p.values + row);
        row += n;
    }
}

dpl_status dpl_remote_dispatch(dpl_ctx *ctx, const dpl_ep_move *move, size_t chunk, dpl_mat x,
                               const float *weights) {
    const dpl_ep_ranks *ranks = move->ep->ranks;
    const dpl_ep_chunk *c = &move->ep->chunks[chunk];
    const int me = ranks->comm->rank;
    const int32_t *tokens = c->unique_token;
    dpl_flight *flight = &move->flights[chunk];
    const dpl_mail m = flight->mail = address(ctx, move, chunk, false);
    for (size_t h = 0; h < ranks->n_hosts; h++) {
        if ((int)h == ranks->host[me]) continue;
        pack(ctx, move, c, h, x, weights, tokens, m.send + m.send_at[ranks->partner[h]]);
        tokens += c->n_unique[(size_t)me * ranks->n_hosts + h];
    }
    return start(ctx, move, flight);
}

// served: where the slots of this source stand in served_ids and served_row.
static size_t unpack(dpl_ctx *ctx, const dpl_ep_move *move, const dpl_ep_chunk *chunk, int source,
                     size_t served, uint8_t *from) {
    const dpl_ep *ep = move->ep;
    const dpl_ep_ranks *ranks = ep->ranks;
    const dpl_dtype dtype = move->rows.dtype;
    const size_t host = (size_t)ranks->host[ranks->comm->rank], d = move->d;
    packet p;
    packet_at(ep, chunk, source, host, d * dpl_dtype_bytes(dtype), from, &p);
    const size_t n_slots = p.n_tokens * ep->top_k;
    if (chunk->home_row) memset(chunk->served_row + served, 0xff, n_slots * sizeof(int32_t));
    for (size_t i = ranks->host_first[host], at = 0; i < ranks->host_first[host + 1]; i++) {
        const size_t e = ranks->host_expert[i];
        const int owner = ranks->owner[e];
        size_t row, n = rows_of(ep, chunk, source, e, &row);
        const dpl_mat to = dpl_mat_at((dpl_mat){move->peer_rows[owner], d, dtype}, row, 0);
        dpl_gather_rows(ctx, (dpl_mat){p.tokens, d, dtype}, NULL, p.index + at, ep->top_k, n, d, to,
                        NULL);
        for (size_t r = 0; chunk->home_row && r < n; r++) {
            const size_t slot = served + (size_t)p.index[at + r];
            chunk->served_ids[slot] = (int32_t)e;
            chunk->served_row[slot] = (int32_t)(row + r);
        }
        if (move->peer_values)
            dpl_copy(ctx, dpl_mat_f32(p.values + at, 1), n, 1,
                     dpl_mat_f32(move->peer_values[owner] + row, 1));
        at += n;
    }
    return n_slots;
}

void dpl_remote_deliver(dpl_ctx *ctx, const dpl_ep_move *move, size_t chunk) {
    const dpl_ep_ranks *ranks = move->ep->ranks;
    const dpl_mail *m = &move->flights[chunk].mail;
    size_t served = 0;
    for (size_t i = 0; i < ranks->n_served; i++)
        served += unpack(ctx, move, &move->ep->chunks[chunk], ranks->served[i], served,
                         m->receive + m->receive_at[ranks->served[i]]);
}

/* ---- and back ---- */
void dpl_remote_keep(dpl_ctx *ctx, const dpl_ep *ep) {
    const dpl_ep_ranks *ranks = ep->ranks;
    const size_t H = ranks->n_hosts, mine = (size_t)ranks->host[ranks->comm->rank];
    for (dpl_ep_chunk *chunk = ep->chunks; chunk < ep->chunks + ep->n_chunks; chunk++) {
        size_t n = 0;
        for (size_t i = 0; i < ranks->n_served; i++)
            n += (size_t)chunk->n_unique[(size_t)ranks->served[i] * H + mine] * ep->top_k;
        chunk->served_ids = dpl_ctx_alloc(ctx, n * sizeof(int32_t));
        chunk->served_row = dpl_ctx_alloc(ctx, n * sizeof(int32_t));
    }
}

// The sums of a source's rows here, of a token each.
static size_t sum_rows(dpl_ctx *ctx, const dpl_ep_move *move, const dpl_ep_chunk *chunk, int source,
                       size_t served, dpl_mat sums) {
    const dpl_ep *ep = move->ep;
    const dpl_ep_ranks *ranks = ep->ranks;
    const size_t host = (size_t)ranks->host[ranks->comm->rank];
    const size_t n = (size_t)chunk->n_unique[(size_t)source * ranks->n_hosts + host];
    dpl_place *place = dpl_ctx_alloc(ctx, ep->n_experts * sizeof *place);
    for (size_t e = 0; e < ep->n_experts; e++) place[e] = (dpl_place){0, ranks->owner[e]};
    const dpl_spread rows = {chunk->served_ids + served,
                             chunk->served_row + served,
                             place,
                             move->peer_rows,
                             NULL,
                             sums.dtype};
    dpl_combine_spread(ctx, &rows, n, ep->top_k, move->d, false, sums, NULL);
    return n * ep->top_k;
}

static size_t collect(dpl_ctx *ctx, const dpl_ep_move *move, const dpl_ep_chunk *chunk, int source,
                      size_t served, uint8_t *to) {
    const dpl_ep *ep = move->ep;
    const dpl_ep_ranks *ranks = ep->ranks;
    const dpl_dtype dtype = move->rows.dtype;
    const size_t host = (size_t)ranks->host[ranks->comm->rank], d = move->d;
    float *numbers = (float *)(void *)to;
    const dpl_mat rows = {to + number_bytes(count_rows(ep, chunk, source, host)), d, dtype};
    for (size_t i = ranks->host_first[host], at = 0; i < ranks->host_first[host + 1]; i++) {
        const int owner = ranks->owner[ranks->host_expert[i]];
        size_t row, n = rows_of(ep, chunk, source, ranks->host_expert[i], &row);
        const dpl_mat from = dpl_mat_at((dpl_mat){move->peer_rows[owner], d, dtype}, row, 0);
        if (!chunk->home_row) dpl_copy(ctx, from, n, d, dpl_mat_at(rows, at, 0));
        if (move->peer_values)
            dpl_copy(ctx, dpl_mat_f32(move->peer_values[owner] + row, 1), n, 1,
                     dpl_mat_f32(numbers + at, 1));
        at += n;
    }
    return chunk->home_row ? sum_rows(ctx, move, chunk, source, served, rows) : 0;
}

dpl_status dpl_remote_return(dpl_ctx *ctx, const dpl_ep_move *move, size_t chunk) {
    const dpl_ep_ranks *ranks = move->ep->ranks;
    dpl_flight *flight = &move->flights[chunk];
    const dpl_mail m = flight->mail = address(ctx, move, chunk, true);
    size_t served = 0;
    for (size_t i = 0; i < ranks->n_served; i++)
        served += collect(ctx, move, &move->ep->chunks[chunk], ranks->served[i], served,
                          m.send + m.send_at[ranks->served[i]]);
    return start(ctx, move, flight);
}

// What a host has returned stands in one message, whichever of its ranks had the experts.
void dpl_remote_receive(dpl_ctx *ctx, const dpl_ep_move *move, size_t chunk, dpl_spread *spread,
                        float *slot_value) {
    const dpl_ep *ep = move->ep;
    const dpl_ep_ranks *ranks = ep->ranks;
    const dpl_ep_chunk *c = &ep->chunks[chunk];
    const dpl_mail *m = &move->flights[chunk].mail;
    const size_t E = ep->n_experts, R = (size_t)ranks->comm->n_ranks;
    const int me = ranks->comm->rank;
    dpl_place *place = dpl_ctx_alloc(ctx, E * sizeof *place);
    void **rows = dpl_ctx_alloc(ctx, R * sizeof *rows);
    float **numbers = dpl_ctx_alloc(ctx, R * sizeof *numbers);
    memcpy(place, c->place, E * sizeof *place);
    memcpy(rows, move->peer_rows, R * sizeof *rows);
    if (move->peer_values) memcpy(numbers, move->peer_values, R * sizeof *numbers);
    for (size_t h = 0; h < ranks->n_hosts; h++) {
        if ((int)h == ranks->host[me]) continue;
        uint8_t *p = m->receive + m->receive_at[ranks->partner[h]];
        uint8_t *first_row = p + number_bytes(count_rows(ep, c, me, h));
        int64_t row = 0;
        for (size_t i = ranks->host_first[h]; i < ranks->host_first[h + 1]; i++) {
            const size_t e = ranks->host_expert[i];
            const int owner = ranks->owner[e];
            place[e] = (dpl_place){row - c->sorted[e], owner};
            numbers[owner] = (float *)(void *)p;
            rows[owner] = first_row;
            row += c->sorted[e + 1] - c->sorted[e];
        }
    }
    spread->place = place;
    spread->rows = rows;
    if (move->peer_values) spread->values = numbers;
    if (!c->home_row) return;
    // Numbers have come for each row, of rows only sums.
    if (spread->values && slot_value)
        dpl_combine_spread(ctx, spread, c->n_tokens, ep->top_k, 0, false, (dpl_mat){0}, slot_value);
    dpl_place *sums = dpl_ctx_alloc(ctx, E * sizeof *sums);
    memcpy(sums, place, E * sizeof *sums);
    for (size_t e = 0; e < E; e++)
        if (ranks->host[ranks->owner[e]] != ranks->host[me]) sums[e].shift = 0;
    spread->place = sums;
    spread->slot_row = c->home_row;
    spread->values = NULL;
}
