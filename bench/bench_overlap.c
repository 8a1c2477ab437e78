/*
 * bench_overlap.c - `bench overlap`: how much of the exchanges of expert parallelism disappears
 * under the compute. A stack of MoE layers goes forward and back, as in a step, in turn without
 * overlap (whole micro-batches, no lane) and with it.
 *
 * Compute is the time inside operators without overlap, the rest of that run is communication.
 * Times are those of the slowest rank, medians over the runs.
 */
#include <math.h>
#include <stdio.h>

#include "bench.h"
#include "moe/moe.h"

static const char *const memories[] = {"messages", "shared", NULL};

typedef struct overlap_bench {
    size_t layers, tokens, d, f, shared, experts, top_k, chunks, memory, runs;
    int threads, lane_threads;
    bool reduces, wire, json;
} overlap_bench;

enum { BLOCKING, OVERLAPPED, N_WAYS };

typedef struct rank_bench {
    const overlap_bench *b;
    dpl_comm *comm;
    dpl_ctx *ctx;
    dpl_ep_ranks ranks;
    dpl_moe_shape shape;
    dpl_moe_weights *weights; // (layers)
    dpl_moe_saved *saved;     // (layers)
    void **blocks;            // what is to be freed
    size_t n_blocks;
    dpl_mat *x; // (layers + 1), BF16: the residual stream
    dpl_mat dy; // BF16
    double seconds[N_WAYS][DPL_BENCH_RUNS_MAX], compute[N_WAYS][DPL_BENCH_RUNS_MAX];
    double bytes; // of rows that this rank sends to other hosts in a run
} rank_bench;

/* ---- weights and tokens ---- */
static void *get(rank_bench *r, size_t bytes) {
    return r->blocks[r->n_blocks++] = dpl_alloc(bytes);
}

// Random numbers of this deviation; of a few, over and over.
static void *draw(rank_bench *r, uint64_t stream, size_t n, double deviation, dpl_dtype dtype) {
    enum { N = 4099 };
    float few[N];
    void *p = get(r, n * dpl_dtype_bytes(dtype));
    for (size_t i = 0; i < N; i++) few[i] = (float)(deviation * dpl_rng_normal(1, stream, i));
    for (size_t i = 0; p && i < n; i++)
        if (dtype == DPL_F32) ((float *)p)[i] = few[i % N];
        else ((uint16_t *)p)[i] = dpl_f32_to_bf16(few[i % N]);
    return p;
}

static dpl_weight weight(rank_bench *r, uint64_t stream, dpl_dtype dtype, size_t groups, size_t n,
                         size_t k) {
    const size_t elems = groups * dpl_panel_elems(n, k);
    return (dpl_weight){draw(r, stream, elems, 1 / sqrt((double)k), dtype),
                        dtype,
                        groups,
                        n,
                        k,
                        get(r, elems * sizeof(float)),
                        NULL,
                        NULL};
}

static dpl_status fill(rank_bench *r) {
    const overlap_bench *b = r->b;
    const size_t n = dpl_ep_local_experts(&r->ranks), d = b->d, sf = r->shape.shared_f;
    const size_t L = b->layers, n_x = b->tokens * d;
    r->blocks = dpl_alloc_array(L * 11 + 4, sizeof *r->blocks);
    r->weights = dpl_alloc_array(L, sizeof *r->weights);
    r->saved = dpl_alloc_array(L, sizeof *r->saved);
    r->x = dpl_alloc_array(L + 1, sizeof *r->x);
    DPL_EXPECT(r->blocks && r->weights && r->saved && r->x, DPL_ENOMEM, "bench overlap: no memory");
    const uint64_t rank = (uint64_t)r->comm->rank;
    for (size_t l = 0; l < L; l++) {
        const uint64_t s = 100 + 10 * l;
        r->weights[l] = (dpl_moe_weights){
            .router = weight(r, s, DPL_F32, 1, b->experts, d),
            .gate_up = weight(r, s + 1, DPL_BF16, n, dpl_gate_up_width(b->f), d),
            .down = weight(r, s + 2, DPL_BF16, n, d, b->f),
            .shared_gate_up = weight(r, s + 3, DPL_BF16, sf > 0, dpl_gate_up_width(sf), d),
            .shared_down = weight(r, s + 4, DPL_BF16, sf > 0, d, DPL_MAX(sf, 1))};
        r->x[l + 1] = (dpl_mat){get(r, 2 * n_x), d, DPL_BF16};
    }
    r->x[0] = (dpl_mat){get(r, 2 * n_x), d, DPL_BF16};
    r->dy = (dpl_mat){draw(r, rank + 50, n_x, 1e-3, DPL_BF16), d, DPL_BF16};
    bool complete = true;
    for (size_t i = 0; i < r->n_blocks; i++) complete = complete && r->blocks[i];
    DPL_EXPECT(complete, DPL_ENOMEM, "bench overlap: no memory for weights and tokens");
    for (size_t i = 0; i < n_x; i++) // of their own: they decide what goes where
        ((uint16_t *)r->x[0].p)[i] = dpl_f32_to_bf16((float)dpl_rng_normal(2, rank, i));
    return DPL_OK;
}

static dpl_status open_rank(rank_bench *r) {
    const overlap_bench *b = r->b;
    r->shape = (dpl_moe_shape){
        b->d,     b->f,   b->shared * b->f, {b->experts, b->top_k, 1, 1, true, false, true, 1},
        DPL_BF16, b->wire};
    DPL_TRY(dpl_comm_agree(r->comm, dpl_ctx_open(b->threads, &r->ctx)));
    DPL_TRY(dpl_ep_ranks_open(r->ctx, r->comm, b->experts, NULL, b->memory ? 0 : -1, 0, DPL_OK,
                              &r->ranks));
    r->ranks.reduces = b->reduces;
    return dpl_comm_agree(r->comm, fill(r));
}

static void close_rank(rank_bench *r) {
    for (size_t i = 0; i < r->n_blocks; i++) dpl_free(r->blocks[i]);
    dpl_free(r->blocks), dpl_free(r->weights), dpl_free(r->saved), dpl_free(r->x);
    dpl_ep_ranks_close(&r->ranks);
    dpl_ctx_close(&r->ctx);
}

/* ---- a step ---- */
// What crosses the border of this host: tokens once, rows of results.
static double sent_bytes(const rank_bench *r, const dpl_ep *ep) {
    const size_t H = r->ranks.n_hosts, R = (size_t)r->comm->n_ranks, me = (size_t)r->comm->rank;
    double rows = 0;
    for (size_t c = 0; H == R && c < ep->n_chunks; c++)
        for (size_t h = 0; h < H; h++) {
            const dpl_ep_chunk *chunk = &ep->chunks[c];
            if (h == me) continue;
            rows += (double)chunk->n_unique[me * H + h];
            if (r->ranks.reduces) rows += (double)chunk->n_unique[h * H + me];
            else
                for (size_t e = r->ranks.first[me]; e < r->ranks.first[me + 1]; e++)
                    rows += (double)(chunk->row_at[(h + 1) * ep->n_experts + e] -
                                     chunk->row_at[h * ep->n_experts + e]);
        }
    return 2 * 2 * (double)r->b->d * rows; // there and back, bf16
}

static dpl_status step(rank_bench *r) {
    const overlap_bench *b = r->b;
    const size_t T = b->tokens, d = b->d, mark = dpl_ctx_mark(r->ctx);
    const dpl_mat y = dpl_moe_mat(r->ctx, NULL, T, d, DPL_BF16);
    const dpl_mat dy = dpl_moe_mat(r->ctx, NULL, T, d, DPL_BF16);
    const dpl_mat dx = dpl_moe_mat(r->ctx, NULL, T, d, DPL_F32);
    r->bytes = 0;
    for (size_t l = 0; l < b->layers; l++) {
        DPL_TRY(dpl_moe_forward_in(r->ctx, &r->ranks, &r->shape, &r->weights[l], r->x[l], T, NULL,
                                   NULL, NULL, &r->saved[l], y));
        dpl_add(r->ctx, r->x[l], y, T, d, r->x[l + 1]);
        r->bytes += sent_bytes(r, &r->saved[l].ep);
    }
    dpl_copy(r->ctx, r->dy, T, d, dy);
    for (size_t l = b->layers; l-- > 0;) {
        DPL_TRY(dpl_moe_backward(r->ctx, &r->shape, &r->weights[l], r->x[l], NULL, &r->saved[l], dy,
                                 dx));
        dpl_moe_forget(&r->saved[l]);
        dpl_add(r->ctx, dy, dx, T, d, dy);
    }
    dpl_ctx_wait(r->ctx);
    dpl_ctx_release(r->ctx, mark);
    return DPL_OK;
}

static dpl_status measure(rank_bench *r, int way, double *seconds_out, double *compute_out) {
    double compute = 0;
    r->ranks.n_chunks = way == OVERLAPPED ? r->b->chunks : 1;
    DPL_TRY(dpl_comm_set_lane_threads(r->comm, way == OVERLAPPED ? r->b->lane_threads : 0));
    memset(r->ctx->phase_s, 0, sizeof r->ctx->phase_s);
    DPL_TRY(dpl_comm_barrier(r->comm));
    const double start = dpl_now();
    DPL_TRY(step(r));
    DPL_TRY(dpl_bench_slowest(r->comm, dpl_now() - start, seconds_out));
    for (int i = 0; i < DPL_PHASE_N; i++) compute += r->ctx->phase_s[i];
    return dpl_bench_slowest(r->comm, compute, compute_out);
}

static dpl_status report(rank_bench *r, size_t runs) {
    const overlap_bench *b = r->b;
    double ms[N_WAYS], compute[N_WAYS], bytes;
    DPL_TRY(dpl_bench_slowest(r->comm, r->bytes, &bytes));
    if (r->comm->rank > 0) return DPL_OK;
    for (int i = 0; i < N_WAYS; i++) {
        ms[i] = 1e3 * dpl_bench_middle(r->seconds[i], runs);
        compute[i] = 1e3 * dpl_bench_middle(r->compute[i], runs);
    }
    const double comm = ms[BLOCKING] - compute[BLOCKING];
    json_t *row = json_pack(
        "{ss ss si si sI sI sI sI sI sI sI sI si sf sf sf sf sf sf sf sf sf}", "bench", "overlap",
        "transport", dpl_comm_name(r->comm), "ranks", r->comm->n_ranks, "threads",
        dpl_ctx_threads(r->ctx), "layers", (json_int_t)b->layers, "tokens", (json_int_t)b->tokens,
        "d", (json_int_t)b->d, "f", (json_int_t)b->f, "shared", (json_int_t)b->shared, "experts",
        (json_int_t)b->experts, "top_k", (json_int_t)b->top_k, "chunks", (json_int_t)b->chunks,
        "lane_threads", b->lane_threads, "sent_mb", 1e-6 * bytes, "blocking_ms", ms[BLOCKING],
        "compute_ms", compute[BLOCKING], "comm_ms", comm, "comm_over_compute",
        comm / compute[BLOCKING], "overlapped_ms", ms[OVERLAPPED], "operators_ms",
        compute[OVERLAPPED], "hidden", (ms[BLOCKING] - ms[OVERLAPPED]) / comm,
        "overlapped_over_compute", ms[OVERLAPPED] / compute[BLOCKING]);
    return dpl_bench_print(row, b->json);
}

static dpl_status run_rank(dpl_comm *comm, void *arg) {
    const overlap_bench *b = arg;
    const size_t runs = DPL_MIN(DPL_MAX(b->runs, (size_t)1), (size_t)DPL_BENCH_RUNS_MAX);
    rank_bench *r = dpl_alloc(sizeof *r);
    dpl_status status = r ? DPL_OK : dpl_fail(DPL_ENOMEM, "bench overlap: no memory");
    status = dpl_comm_agree(comm, status);
    if (status != DPL_OK) {
        dpl_free(r);
        return status;
    }
    r->b = b;
    r->comm = comm;
    status = open_rank(r);
    for (size_t i = 0; i <= runs; i++) // the first one warms up
        for (int way = 0; status == DPL_OK && way < N_WAYS; way++) {
            const size_t at = i ? i - 1 : 0;
            status = measure(r, way, &r->seconds[way][at], &r->compute[way][at]);
        }
    if (status == DPL_OK) status = report(r, runs);
    close_rank(r);
    dpl_free(r);
    return status;
}

int dpl_bench_run_overlap(dpl_bench_args *args) {
    static const char *const lanes[] = {"1", "0", NULL}, *const reduces[] = {"0", "1", NULL},
                             *const wires[] = {"bf16", "mxfp8", NULL};
    overlap_bench b = {.layers = dpl_bench_size(args, "layers", 2),
                       .tokens = dpl_bench_size(args, "tokens", 2048),
                       .d = dpl_bench_size(args, "d", 1024),
                       .f = dpl_bench_size(args, "f", 1024),
                       .shared = dpl_bench_size(args, "shared", 1),
                       .experts = dpl_bench_size(args, "experts", 8),
                       .top_k = dpl_bench_size(args, "top_k", 2),
                       .chunks = dpl_bench_size(args, "chunks", 4),
                       .memory = dpl_bench_choice(args, "memory", memories),
                       .runs = dpl_bench_size(args, "runs", 9),
                       .threads = (int)dpl_bench_size(args, "threads", 1),
                       .lane_threads = dpl_bench_choice(args, "lane_threads", lanes) == 0,
                       .reduces = dpl_bench_choice(args, "reduce", reduces) == 1,
                       .wire = dpl_bench_choice(args, "wire", wires) == 1,
                       .json = args->json};
    const size_t n_ranks = dpl_bench_size(args, "ranks", 2);
    if (!dpl_bench_args_done(args)) return 2;
    if (!b.layers || !b.tokens || !b.d || !b.f || !b.chunks || !b.top_k || b.top_k > b.experts ||
        b.experts > 65536 || b.d > 1 << 20 || b.f > 1 << 20 || b.tokens > 1 << 20) {
        fprintf(stderr, "bench overlap: expected sizes of at least 1, top_k=1 to experts\n");
        return 2;
    }
    const dpl_status status = dpl_bench_ranks(n_ranks, b.threads == 1, run_rank, &b);
    return status == DPL_OK ? 0 : status == DPL_EINVAL ? 2 : 1;
}
