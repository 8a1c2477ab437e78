/*
 * bench_layer.c - `bench layer`: one MoE layer of dropless.h, forward, and forward with backward.
 *
 * The router's weights are unit vectors: the first columns of a token are its logits, so any load
 * can be had. The limit counts operands and results once a pass, of the experts in use.
 */
#include <math.h>
#include <stdio.h>

#include "bench.h"
#include "cpu/kernels.h"

static const char *const skews[] = {"balanced", "zipf", "hot", NULL};
enum { BALANCED, ZIPF, HOT }; // skews

typedef struct layer_bench {
    dpl_ctx *ctx;
    dpl_layer *layer;
    dpl_layer_config config;
    size_t rows, ws_bytes, skew;
    void *x, *dy, *y, *ws;
    float *dx;
    int64_t *counts; // (E)
    bool backward;
    dpl_status status;
} layer_bench;

static void run_layer(void *arg) {
    layer_bench *b = arg;
    if (b->status == DPL_OK)
        b->status = dpl_layer_forward(b->layer, b->x, 0, b->rows, NULL, b->ws, b->ws_bytes, b->y, 0,
                                      b->counts);
    if (b->status == DPL_OK && b->backward)
        b->status = dpl_layer_backward(b->layer, b->x, 0, b->ws, b->dy, 0, b->dx, 0);
}

static void set_load(const layer_bench *b) {
    const size_t E = b->config.rule.n_experts, K = b->config.rule.top_k, d = b->config.d;
    for (size_t t = 0; t < b->rows; ++t) {
        float *logits = b->dx + t * d; // free until the first backward pass
        for (size_t e = 0; e < E; ++e) logits[e] = -1;
        for (size_t k = 0; k < K; ++k) {
            size_t e = (t * K + k) % E;
            if (b->skew == HOT) e = k ? 1 + (t * (K - 1) + k - 1) % (E - 1) : 0;
            if (b->skew == ZIPF) // expert e about as often as 1 / (e + 1)
                e = (size_t)pow((double)E + 1, dpl_rng_uniform(1, 0, t * K + k)) - 1;
            while (e >= E || logits[e] > 0) // this token has it already
                e = e + 1 < E ? e + 1 : 0;
            logits[e] = 1;
        }
    }
    dpl_copy(b->ctx, dpl_mat_f32(b->dx, d), b->rows, d, (dpl_mat){b->x, d, b->config.dtype});
    dpl_ctx_wait(b->ctx);
}

static dpl_status open_layer(layer_bench *b) {
    DPL_TRY(dpl_layer_open(&b->config, b->ctx, &b->layer));
    const size_t E = b->config.rule.n_experts, d = b->config.d, n = b->rows * d;
    b->ws_bytes = dpl_layer_workspace_bytes(b->layer, b->rows);
    if (E > d || !b->rows || !b->ws_bytes)
        return dpl_fail(DPL_EINVAL, "expected experts=1 to d, rows=1 to 2^31 / top_k");
    float *w = dpl_bench_numbers(DPL_MAX(E * b->config.f, b->config.shared_f) * d, DPL_F32);
    float *router = dpl_alloc_array(E * d, sizeof *router);
    b->x = dpl_alloc_array(n, dpl_dtype_bytes(b->config.dtype));
    b->y = dpl_alloc_array(n, dpl_dtype_bytes(b->config.dtype));
    b->dy = dpl_bench_numbers(n, b->config.dtype);
    b->dx = dpl_bench_numbers(n, DPL_F32);
    b->ws = dpl_alloc(b->ws_bytes);
    b->counts = dpl_alloc_array(E, sizeof *b->counts);
    dpl_status status = dpl_fail(DPL_ENOMEM, "bench layer: no memory for weights and tokens");
    if (w && router && b->x && b->y && b->dy && b->dx && b->ws && b->counts) {
        for (size_t e = 0; e < E; ++e) router[e * d + e] = 1;
        set_load(b);
        const dpl_layer_weights weights = {router, NULL, w, w, w, w, w, w};
        status = dpl_layer_set_weights(b->layer, &weights);
    }
    dpl_free(w), dpl_free(router);
    return status;
}

static dpl_status report(const layer_bench *b, const dpl_bench_limits *limits, double seconds,
                         bool json) {
    const dpl_layer_config *c = &b->config;
    const size_t E = c->rule.n_experts, K = c->rule.top_k;
    int64_t most = 0;
    double used = 0; // experts
    for (size_t e = 0; e < E; ++e) {
        most = DPL_MAX(most, b->counts[e]);
        used += b->counts[e] > 0;
    }
    const double T = (double)b->rows, d = (double)c->d, f = (double)c->f;
    const double shared_f = (double)c->shared_f, elem = (double)dpl_dtype_bytes(c->dtype);
    const double router = d * (double)E, weights = 3 * d * (used * f + shared_f);
    const double passes = b->backward ? 2 : 1; // the backward pass has twice the operations
    const double flops = (2 * passes - 1) * 2 * T * (router + 3 * d * ((double)K * f + shared_f));
    const double dx = b->backward ? 4 * T * d : 0;
    const dpl_bench_work work = {
        .dtype = c->dtype,
        .flops = flops,
        .read_bytes = passes * (4 * router + elem * (weights + 2 * T * d)) + dx,
        .rw_bytes = b->backward ? 8 * (router + weights) : 0 /* gradients accumulate */};
    json_t *row = json_pack(
        "{ss ss ss sI sI sI sI sI sI ss sf si ss}", "bench", "layer", "op",
        b->backward ? "forward_backward" : "forward", "dtype", dpl_bench_dtypes[c->dtype],
        "experts", (json_int_t)E, "top_k", (json_int_t)K, "d", (json_int_t)c->d, "f",
        (json_int_t)c->f, "shared", (json_int_t)(shared_f / f), "rows", (json_int_t)b->rows, "skew",
        skews[b->skew], "load_max_over_mean", (double)most * (double)E / (T * (double)K), "threads",
        dpl_ctx_threads(b->ctx), "kernel", dpl_bench_kernel(b->ctx, c->dtype));
    return dpl_bench_report(row, &work, limits, seconds, json);
}

int dpl_bench_run_layer(dpl_bench_args *args) {
    layer_bench b = {
        .skew = dpl_bench_choice(args, "skew", skews),
        .rows = dpl_bench_size(args, "rows", 1024),
        .config = {.d = dpl_bench_size(args, "d", 1024),
                   .f = dpl_bench_size(args, "f", 512),
                   .shared_f = dpl_bench_size(args, "shared", 1),
                   .rule = {dpl_bench_size(args, "experts", 16), dpl_bench_size(args, "top_k", 4),
                            1, 1, true, false, true, 1}}};
    const int threads = (int)dpl_bench_size(args, "threads", 0);
    const size_t runs = dpl_bench_size(args, "runs", 9),
                 mbytes = dpl_bench_size(args, "mbytes", 512);
    b.config.dtype = (dpl_dtype)dpl_bench_choice(args, "dtype", dpl_bench_dtypes);
    if (!dpl_bench_args_done(args)) return 2;
    b.config.shared_f = DPL_MIN(b.config.shared_f, (size_t)1 << 21) * b.config.f; // 2^61 at most
    dpl_bench_limits limits;
    b.status = dpl_ctx_open(threads, &b.ctx);
    if (b.status == DPL_OK) b.status = open_layer(&b);
    if (b.status == DPL_OK) b.status = dpl_bench_machine(b.ctx, mbytes << 20, &limits);
    for (int i = 0; b.status == DPL_OK && i < 2; ++i, b.backward = true) {
        const double seconds = dpl_bench_median(runs, run_layer, &b);
        if (b.status == DPL_OK) b.status = report(&b, &limits, seconds, args->json);
    }
    if (b.status != DPL_OK) fprintf(stderr, "dropless: %s\n", dpl_error_message());
    dpl_free(b.x), dpl_free(b.dy), dpl_free(b.dx), dpl_free(b.y);
    dpl_free(b.ws), dpl_free(b.counts);
    dpl_layer_close(&b.layer);
    dpl_ctx_close(&b.ctx);
    return b.status == DPL_OK ? 0 : b.status == DPL_EINVAL ? 2 : 1;
}
