// remote.c - rows between hosts, as messages. To each other host a rank has one counterpart, and
// packs once what goes there: a token that several experts of the host want crosses once. The
// counterpart puts its rows into the memory of the ranks that have the experts, as a rank of the
// same host does itself. On the way back it collects the rows there and returns all of them: they
// are summed at home, in slot order, so the bits do not depend on the split.
#include "moe/moe.h"

// The rank of `host` that stands in for rank `of`: they spread over the ranks there.
static int counterpart(const dpl_ep_ranks *ranks, int of, size_t host) {
    const int R = ranks->comm->n_ranks;
    int index = 0, n = 0;
    for (int r = 0; r < of; r++) index += ranks->host[r] == ranks->host[of];
    for (int r = 0; r < R; r++) n += ranks->host[r] == (int)host;
    index %= n;
    for (int r = 0; r < R; r++)
        if (ranks->host[r] == (int)host && index-- == 0) return r;
    return -1;
}

static bool has_expert(const dpl_ep_ranks *ranks, size_t host, int owner) {
    return ranks->host[owner] == (int)host && ranks->first[owner] < ranks->first[owner + 1];
}

// Goes through the experts of a host: `e` with its `owner`.
#define EACH_EXPERT(ranks, at, owner, e)                         \
    for (int owner = 0; owner < (ranks)->comm->n_ranks; owner++) \
        for (size_t e = (ranks)->first[owner];                   \
             has_expert(ranks, at, owner) && e < (ranks)->first[owner + 1]; e++)

static size_t count_rows(const dpl_ep *ep, int source, size_t host) {
    int64_t n = 0;
    EACH_EXPERT(ep->ranks, host, owner, e) n += ep->all[(size_t)source * ep->n_experts + e];
    return (size_t)n;
}

// Of a packet from `source` to `host`: its tokens, for each row which of them it is, and numbers.
typedef struct packet {
    size_t n_tokens, n_rows;
    uint8_t *tokens;
    int32_t *index;
    float *values;
} packet;

static size_t packet_at(const dpl_ep *ep, int source, size_t host, size_t row_bytes, uint8_t *p,
                        packet *out) {
    const size_t n_tokens = (size_t)ep->n_unique[(size_t)source * ep->ranks->n_hosts + host];
    const size_t n_rows = count_rows(ep, source, host);
    const size_t tokens = dpl_round_up(n_tokens * row_bytes, DPL_ALIGN), list = 4 * n_rows;
    if (out)
        *out = (packet){n_tokens, n_rows, p, (int32_t *)(void *)(p + tokens),
                        (float *)(void *)(p + tokens + list)};
    return dpl_round_up(tokens + 2 * list, DPL_ALIGN);
}

// Tokens in order for each host; a sorted row's token is known by counting the rows of its expert.
void dpl_remote_plan(dpl_ctx *ctx, const int32_t *ids, dpl_ep *ep, int64_t *n_unique) {
    const dpl_ep_ranks *ranks = ep->ranks;
    const size_t mark = dpl_ctx_mark(ctx), E = ep->n_experts, K = ep->top_k;
    int32_t *owner_of = dpl_ctx_alloc(ctx, E * sizeof *owner_of);
    int64_t *next_row = dpl_ctx_alloc(ctx, E * sizeof *next_row), begin = 0;
    for (int r = 0; r < ranks->comm->n_ranks; r++)
        for (size_t e = ranks->first[r]; e < ranks->first[r + 1]; e++) owner_of[e] = r;
    memcpy(next_row, ep->sorted, E * sizeof *next_row);
    for (size_t h = 0; h < ranks->n_hosts; h++) {
        n_unique[h] = 0;
        for (size_t t = 0; t < ep->n_tokens && (int)h != ranks->host[ranks->comm->rank]; t++) {
            bool wanted = false;
            for (size_t slot = t * K; slot < (t + 1) * K; slot++) {
                const int32_t e = ids[slot];
                if (e < 0 || ranks->host[owner_of[e]] != (int)h) continue;
                ep->row_unique[next_row[e]++] = (int32_t)n_unique[h];
                wanted = true;
            }
            if (wanted) ep->unique_token[begin + n_unique[h]++] = (int32_t)t;
        }
        begin += n_unique[h];
    }
    dpl_ctx_release(ctx, mark);
}

/* ---- messages ---- */
typedef struct mail { // (R) each
    size_t *send_at, *send_bytes, *receive_at, *receive_bytes;
    uint8_t *send, *receive;
} mail;

static mail mail_open(dpl_ctx *ctx, size_t R) {
    mail m;
    size_t **const arrays[] = {&m.send_at, &m.send_bytes, &m.receive_at, &m.receive_bytes};
    for (size_t i = 0; i < DPL_COUNT(arrays); i++) {
        *arrays[i] = dpl_ctx_alloc(ctx, R * sizeof(size_t));
        memset(*arrays[i], 0, R * sizeof(size_t));
    }
    return m;
}

static uint8_t *place_blocks(dpl_ctx *ctx, size_t R, size_t *at, const size_t *bytes) {
    size_t all = 0;
    for (size_t r = 0; r < R; r++) at[r] = all, all += bytes[r];
    return dpl_ctx_alloc(ctx, all);
}

// On the way back: a number for each row, then the rows.
static size_t number_bytes(size_t n_rows) {
    return dpl_round_up(n_rows * sizeof(float), DPL_ALIGN);
}

static size_t back_bytes(const dpl_ep *ep, int source, size_t host, size_t row_bytes) {
    const size_t n = count_rows(ep, source, host);
    return number_bytes(n) + dpl_round_up(n * row_bytes, DPL_ALIGN);
}

// What this rank sends to the counterparts and what it gets as one; back: the reverse.
static mail address(dpl_ctx *ctx, const dpl_ep *ep, size_t row_bytes, bool back) {
    const dpl_ep_ranks *ranks = ep->ranks;
    const int me = ranks->comm->rank, R = ranks->comm->n_ranks;
    const size_t mine = (size_t)ranks->host[me];
    mail m = mail_open(ctx, (size_t)R);
    size_t *to = back ? m.receive_bytes : m.send_bytes,
           *from = back ? m.send_bytes : m.receive_bytes;
    for (size_t h = 0; h < ranks->n_hosts; h++)
        if (h != mine)
            to[counterpart(ranks, me, h)] = back ? back_bytes(ep, me, h, row_bytes)
                                                 : packet_at(ep, me, h, row_bytes, NULL, NULL);
    for (int s = 0; s < R; s++)
        if (ranks->host[s] != (int)mine && counterpart(ranks, s, mine) == me)
            from[s] = back ? back_bytes(ep, s, mine, row_bytes)
                           : packet_at(ep, s, mine, row_bytes, NULL, NULL);
    m.send = place_blocks(ctx, (size_t)R, m.send_at, m.send_bytes);
    m.receive = place_blocks(ctx, (size_t)R, m.receive_at, m.receive_bytes);
    return m;
}

static dpl_status start(const dpl_ep *ep, const mail *m, dpl_ticket *ticket_out) {
    return dpl_comm_exchange(ep->ranks->comm, (dpl_blocks){m->send, m->send_at, m->send_bytes},
                             (dpl_blocks){m->receive, m->receive_at, m->receive_bytes}, ticket_out);
}

/* ---- there ---- */
static void pack(dpl_ctx *ctx, const dpl_ep *ep, dpl_mat x, const float *weights, bool numbers,
                 size_t d, dpl_dtype dtype, const mail *m) {
    const dpl_ep_ranks *ranks = ep->ranks;
    const int me = ranks->comm->rank;
    const int32_t *tokens = ep->unique_token;
    for (size_t h = 0; h < ranks->n_hosts; h++) {
        if ((int)h == ranks->host[me]) continue;
        packet p;
        packet_at(ep, me, h, d * dpl_dtype_bytes(dtype),
                  m->send + m->send_at[counterpart(ranks, me, h)], &p);
        dpl_gather_rows(ctx, x, NULL, tokens, 1, p.n_tokens, d, (dpl_mat){p.tokens, d, dtype},
                        NULL);
        tokens += p.n_tokens;
        size_t row = 0;
        EACH_EXPERT(ranks, h, owner, e) {
            const size_t first = (size_t)ep->sorted[e], n = (size_t)(ep->sorted[e + 1]) - first;
            memcpy(p.index + row, ep->row_unique + first, n * sizeof *p.index);
            if (numbers)
                dpl_gather_rows(ctx, x, weights, ep->row_slot + first, ep->top_k, n, 0,
                                (dpl_mat){0}, p.values + row);
            row += n;
        }
    }
}

// Goes through what `source` has with the experts of this host: n rows from `row` of the owner's.
#define EACH_BLOCK(ep, source, owner, e, row, n)                                                   \
    for (int owner = 0; owner < (ep)->ranks->comm->n_ranks; owner++)                               \
        for (int64_t e##_all = 0, e = (int64_t)(ep)->ranks->first[owner], row, n;                  \
             has_expert((ep)->ranks, (size_t)(ep)->ranks->host[(ep)->ranks->comm->rank], owner) && \
             e < (int64_t)(ep)->ranks->first[owner + 1] &&                                         \
             (row = e##_all + rows_before(ep, source, e), n = rows_of(ep, source, e), true);       \
             e##_all += rows_before(ep, (ep)->ranks->comm->n_ranks, e), e++)

static int64_t rows_of(const dpl_ep *ep, int source, int64_t e) {
    return ep->all[(size_t)source * ep->n_experts + (size_t)e];
}

static int64_t rows_before(const dpl_ep *ep, int source, int64_t e) {
    int64_t n = 0;
    for (int r = 0; r < source; r++) n += rows_of(ep, r, e);
    return n;
}

static void unpack(dpl_ctx *ctx, const dpl_ep *ep, int source, size_t d, const dpl_spread *local,
                   uint8_t *from) {
    const size_t row_bytes = d * dpl_dtype_bytes(local->dtype);
    packet p;
    packet_at(ep, source, (size_t)ep->ranks->host[ep->ranks->comm->rank], row_bytes, from, &p);
    size_t at = 0;
    EACH_BLOCK(ep, source, owner, e, row, n) {
        const dpl_mat to = {(uint8_t *)local->rows[owner] + (size_t)row * row_bytes, d,
                            local->dtype};
        dpl_gather_rows(ctx, (dpl_mat){p.tokens, d, local->dtype}, NULL, p.index + at, 1, (size_t)n,
                        d, to, NULL);
        if (local->values)
            dpl_copy(ctx, dpl_mat_f32(p.values + at, 1), (size_t)n, 1,
                     dpl_mat_f32(local->values[owner] + row, 1));
        at += (size_t)n;
    }
}

dpl_status dpl_remote_dispatch(dpl_ctx *ctx, const dpl_ep *ep, dpl_mat x, const float *weights,
                               size_t d, const dpl_spread *local) {
    const mail m = address(ctx, ep, d * dpl_dtype_bytes(local->dtype), false);
    dpl_ticket ticket;
    pack(ctx, ep, x, weights, local->values != NULL, d, local->dtype, &m);
    dpl_ctx_wait(ctx);
    DPL_TRY(start(ep, &m, &ticket));
    dpl_scatter_rows(ctx, x, weights, local, ep->n_tokens, ep->top_k, d); // meanwhile
    dpl_ctx_wait(ctx);
    DPL_TRY(dpl_comm_wait(ep->ranks->comm, ticket));
    for (int s = 0; s < ep->ranks->comm->n_ranks; s++)
        if (m.receive_bytes[s] > 0) unpack(ctx, ep, s, d, local, m.receive + m.receive_at[s]);
    return DPL_OK;
}

/* ---- and back ---- */
static void collect(dpl_ctx *ctx, const dpl_ep *ep, int source, size_t d, const dpl_spread *local,
                    uint8_t *to) {
    const size_t row_bytes = d * dpl_dtype_bytes(local->dtype);
    const size_t n_rows = count_rows(ep, source, (size_t)ep->ranks->host[ep->ranks->comm->rank]);
    float *numbers = (float *)(void *)to;
    to += number_bytes(n_rows);
    size_t at = 0;
    EACH_BLOCK(ep, source, owner, e, row, n) {
        const dpl_mat from = {(uint8_t *)local->rows[owner] + (size_t)row * row_bytes, d,
                              local->dtype};
        dpl_copy(ctx, from, (size_t)n, d, (dpl_mat){to + at * row_bytes, d, local->dtype});
        if (local->values)
            dpl_copy(ctx, dpl_mat_f32(local->values[owner] + row, 1), (size_t)n, 1,
                     dpl_mat_f32(numbers + at, 1));
        at += (size_t)n;
    }
}

dpl_status dpl_remote_fetch(dpl_ctx *ctx, const dpl_ep *ep, size_t d, dpl_spread *spread) {
    const dpl_ep_ranks *ranks = ep->ranks;
    const size_t row_bytes = d * dpl_dtype_bytes(spread->dtype), E = ep->n_experts;
    const int me = ranks->comm->rank, R = ranks->comm->n_ranks;
    const mail m = address(ctx, ep, row_bytes, true);
    dpl_place *place = dpl_ctx_alloc(ctx, E * sizeof *place);
    void **rows = dpl_ctx_alloc(ctx, (size_t)R * sizeof *rows);
    float **numbers = dpl_ctx_alloc(ctx, (size_t)R * sizeof *numbers);
    dpl_ticket ticket;
    for (int s = 0; s < R; s++)
        if (m.send_bytes[s] > 0) collect(ctx, ep, s, d, spread, m.send + m.send_at[s]);
    dpl_ctx_wait(ctx);
    DPL_TRY(start(ep, &m, &ticket));
    memcpy(place, ep->place, E * sizeof *place);
    memcpy(rows, spread->rows, (size_t)R * sizeof *rows);
    if (spread->values) memcpy(numbers, spread->values, (size_t)R * sizeof *numbers);
    for (size_t h = 0; h < ranks->n_hosts; h++) {
        if ((int)h == ranks->host[me]) continue;
        uint8_t *p = m.receive + m.receive_at[counterpart(ranks, me, h)];
        int64_t row = 0;
        EACH_EXPERT(ranks, h, owner, e) {
            place[e] = (dpl_place){row - ep->sorted[e], owner};
            numbers[owner] = (float *)(void *)p;
            rows[owner] = p + number_bytes(count_rows(ep, me, h));
            row += ep->sorted[e + 1] - ep->sorted[e];
        }
    }
    spread->place = place;
    spread->rows = rows;
    if (spread->values) spread->values = numbers;
    return dpl_comm_wait(ranks->comm, ticket);
}
