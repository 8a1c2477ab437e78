/*
 * bench_ep.c - `bench ep`: tokens to the ranks of their experts and back, on threads of this
 * process or, under an MPI launcher, on its processes. A time is that of the slowest rank.
 *
 * The limit is the time in which the ranks together copy as many bytes as rows arrive, each from
 * memory of its own to memory of its own. A dispatch reads a token once for all of its experts, so
 * it can be faster than that. With wire=mxfp8 tokens are quantized first, and rows of codes move.
 */
#include <math.h>
#include <stdio.h>

#include "bench.h"
#include "moe/moe.h"

static const char *const skews[] = {"balanced", "zipf", "hot", NULL};
enum { BALANCED, ZIPF, HOT }; // skews
static const char *const memories[] = {"shared", "messages", NULL};
static const char *const wires[] = {"bf16", "mxfp8", NULL};

typedef struct ep_bench {
    dpl_ep_config config;
    size_t tokens, skew, runs, mbytes; // tokens 0: several
    size_t d, wire;                    // d: of a token; a row of codes is as wide as config.d
    int threads;
    bool json;
} ep_bench;

typedef struct rank_bench {
    const ep_bench *b;
    dpl_comm *comm;
    dpl_ctx *ctx;
    dpl_ep_group *group;
    dpl_ep_handle *handle;
    dpl_ep_rows rows;
    size_t n_tokens;
    int32_t *ids;
    float *weights;
    void *x, *y;
    dpl_mat sent; // wire mxfp8: x as codes
    size_t mark;  // of the step's memory, where those begin
} rank_bench;

typedef struct operation {
    const char *name;
    dpl_status (*run)(rank_bench *r);
} operation;

static dpl_status prepare(rank_bench *r) {
    dpl_ep_handle_close(&r->handle);
    DPL_TRY(dpl_ep_prepare(r->group, r->ids, r->n_tokens, &r->handle));
    return dpl_ep_get_rows(r->handle, &r->rows);
}

static dpl_status quantize(rank_bench *r) {
    const dpl_mat x = {r->x, r->b->d, DPL_BF16};
    dpl_ctx_release(r->ctx, r->mark);
    r->sent = dpl_wire_pack(r->ctx, x, r->n_tokens, r->b->d);
    dpl_ctx_wait(r->ctx);
    return DPL_OK;
}

static dpl_status dispatch(rank_bench *r) {
    return dpl_ep_dispatch(r->handle, r->b->wire ? r->sent.p : r->x, 0, r->weights);
}

static dpl_status combine(rank_bench *r) {
    return dpl_ep_combine(r->handle, r->rows.rows, r->y, 0);
}

static const operation operations[] = {
    {"prepare", prepare}, {"quantize", quantize}, {"dispatch", dispatch}, {"combine", combine}};

static void choose(const ep_bench *b, int rank, size_t n_tokens, int32_t *ids) {
    const size_t E = b->config.n_experts, K = b->config.top_k;
    for (size_t t = 0; t < n_tokens; t++)
        for (size_t k = 0; k < K; k++) {
            const size_t slot = t * K + k;
            const double u = dpl_rng_uniform(3, (uint64_t)rank, slot);
            size_t e = (size_t)(u * (double)E) % E;
            if (b->skew == HOT && k == 0) e = 0;
            if (b->skew == ZIPF) e = (size_t)pow((double)E + 1, u) - 1;
            bool taken = true;
            for (e %= E; taken; e = taken ? (e + 1) % E : e) {
                taken = false;
                for (size_t i = 0; i < k; i++) taken |= ids[t * K + i] == (int32_t)e;
            }
            ids[slot] = (int32_t)e;
        }
}

static dpl_status measure(rank_bench *r, const operation *op, double *seconds_out) {
    double seconds[DPL_BENCH_RUNS_MAX];
    const size_t runs = DPL_MIN(DPL_MAX(r->b->runs, (size_t)1), (size_t)DPL_BENCH_RUNS_MAX);
    for (size_t i = 0; i <= runs; i++) { // the first one warms up
        DPL_TRY(dpl_comm_barrier(r->comm));
        const double start = dpl_now();
        DPL_TRY(op->run(r));
        DPL_TRY(dpl_bench_slowest(r->comm, dpl_now() - start, &seconds[i ? i - 1 : 0]));
    }
    *seconds_out = dpl_bench_middle(seconds, runs);
    return DPL_OK;
}

// Bytes a second that this rank copies while the others do so too.
static dpl_status measure_copy(const rank_bench *r, double *rate_out) {
    const size_t bytes = DPL_MAX(r->b->mbytes, (size_t)1) << 19;
    uint8_t *from = dpl_alloc(bytes), *to = dpl_alloc(bytes);
    dpl_status status = from && to ? DPL_OK : dpl_fail(DPL_ENOMEM, "bench ep: no memory");
    status = dpl_comm_agree(r->comm, status);
    double best = 0;
    for (int i = 0; status == DPL_OK && i < 5; i++) {
        if (i == 0) memset(from, 1, bytes);
        double seconds = 0;
        status = dpl_comm_barrier(r->comm);
        const double start = dpl_now();
        memcpy(to, from, bytes);
        if (status == DPL_OK) status = dpl_bench_slowest(r->comm, dpl_now() - start, &seconds);
        if (i > 0) best = DPL_MAX(best, (double)bytes / seconds);
    }
    dpl_free(from), dpl_free(to);
    *rate_out = best;
    return status;
}

static dpl_status report(const rank_bench *r, const operation *op, double seconds, double bytes,
                         double rate) {
    const ep_bench *b = r->b;
    const double limit = bytes / rate;
    if (r->comm->rank > 0) return DPL_OK;
    json_t *row = json_pack("{ss ss ss ss ss si sI sI sI sI ss sf sf sf sf}", "bench", "ep", "op",
                            op->name, "transport", dpl_comm_name(r->comm), "memory",
                            memories[b->config.no_shared_memory], "wire", wires[b->wire], "ranks",
                            r->comm->n_ranks, "tokens", (json_int_t)r->n_tokens, "d",
                            (json_int_t)b->d, "experts", (json_int_t)b->config.n_experts, "top_k",
                            (json_int_t)b->config.top_k, "skew", skews[b->skew], "median_us",
                            seconds * 1e6, "gbs", bytes / seconds * 1e-9, "limit_us", limit * 1e6,
                            "fraction", op->run == prepare ? 0 : limit / seconds);
    return dpl_bench_print(row, b->json);
}

static dpl_status run_tokens(rank_bench *r, size_t n_tokens, double rate) {
    const dpl_ep_config *c = &r->b->config;
    const size_t n_slots = n_tokens * c->top_k;
    r->n_tokens = n_tokens;
    r->ids = dpl_alloc_array(n_slots, sizeof *r->ids);
    r->weights = dpl_alloc_array(n_slots, sizeof *r->weights);
    r->mark = dpl_ctx_mark(r->ctx);
    r->x = dpl_bench_numbers(n_tokens * r->b->d, c->dtype);
    r->y = dpl_bench_numbers(n_tokens * c->d, c->dtype);
    dpl_status status = DPL_OK;
    if (!r->ids || !r->weights || !r->x || !r->y)
        status = dpl_fail(DPL_ENOMEM, "bench ep: no memory for %zu tokens", n_tokens);
    status = dpl_comm_agree(r->comm, status);
    if (status == DPL_OK) choose(r->b, r->comm->rank, n_tokens, r->ids);
    for (size_t i = 0; status == DPL_OK && i < DPL_COUNT(operations); i++) {
        double seconds, most;
        // Results come back in bf16 whatever the wire, and are no rows of codes.
        if (operations[i].run == (r->b->wire ? combine : quantize)) continue;
        status = measure(r, &operations[i], &seconds);
        const size_t elems = operations[i].run == quantize ? n_tokens * r->b->d
                                                           : r->rows.n_rows * c->d;
        const double bytes = (double)elems * (double)dpl_dtype_bytes(c->dtype);
        if (status == DPL_OK) status = dpl_bench_slowest(r->comm, bytes, &most);
        if (status == DPL_OK) status = report(r, &operations[i], seconds, most, rate);
    }
    dpl_ep_handle_close(&r->handle);
    dpl_free(r->ids), dpl_free(r->weights), dpl_free(r->x), dpl_free(r->y);
    return status;
}

static dpl_status run_rank(dpl_comm *comm, void *arg) {
    rank_bench r = {.b = arg, .comm = comm};
    double rate;
    dpl_status status = dpl_ctx_open(r.b->threads, &r.ctx);
    status = dpl_comm_agree(comm, status);
    if (status == DPL_OK) status = dpl_ep_group_open(r.ctx, comm, &r.b->config, &r.group);
    if (status == DPL_OK) status = measure_copy(&r, &rate);
    const size_t given = r.b->tokens;
    static const size_t several[] = {64, 256, 1024, 4096, 8192};
    for (size_t i = 0; status == DPL_OK && i < (given ? 1 : DPL_COUNT(several)); i++)
        status = run_tokens(&r, given ? given : several[i], rate);
    dpl_ep_group_close(&r.group);
    dpl_ctx_close(&r.ctx);
    return status;
}

int dpl_bench_run_ep(dpl_bench_args *args) {
    ep_bench b = {.tokens = dpl_bench_size(args, "tokens", 0),
                  .skew = dpl_bench_choice(args, "skew", skews),
                  .runs = dpl_bench_size(args, "runs", 15),
                  .mbytes = dpl_bench_size(args, "mbytes", 256),
                  .threads = (int)dpl_bench_size(args, "threads", 1),
                  .json = args->json};
    const size_t n_ranks = dpl_bench_size(args, "ranks", 2);
    static const char *const dtypes[] = {"bf16", "f32", NULL};
    b.config = (dpl_ep_config){.d = dpl_bench_size(args, "d", 2048),
                               .n_experts = dpl_bench_size(args, "experts", 64),
                               .top_k = dpl_bench_size(args, "top_k", 6)};
    b.config.dtype = dpl_bench_choice(args, "dtype", dtypes) ? DPL_F32 : DPL_BF16;
    b.d = b.config.d;
    b.wire = dpl_bench_choice(args, "wire", wires);
    if (b.wire && b.config.dtype == DPL_F32) {
        fputs("bench ep: wire=mxfp8 is of dtype=bf16\n", stderr);
        return 2;
    }
    if (b.wire) b.config.d = dpl_wire_width(b.d);
    b.config.no_shared_memory = dpl_bench_choice(args, "memory", memories) == 1;
    if (!dpl_bench_args_done(args)) return 2;
    const dpl_status status = dpl_bench_ranks(n_ranks, b.threads == 1, run_rank, &b);
    return status == DPL_OK ? 0 : status == DPL_EINVAL ? 2 : 1;
}
