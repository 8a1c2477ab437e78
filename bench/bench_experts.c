// bench_experts.c - `bench experts`: gate and up, SwiGLU, down of all experts, forward, and forward
// with backward, which writes each weight's gradient once. No router, nothing is moved.
//
// A skewed load has as many rows as the balanced one; both take turns, so that `over_balanced` is
// of one time. The limit counts the weights in use, rows in and rows out once a pass.
#include <math.h>
#include <stdio.h>

#include "bench.h"
#include "cpu/kernels.h"
#include "moe/moe.h"

static const char *const skews[] = {"balanced", "zipf", "hot", NULL};
enum { BALANCED, ZIPF, HOT }; // skews

typedef struct experts_bench {
    dpl_ctx *ctx;
    dpl_mlp mlp;
    size_t rows, d, f, skew; // rows: of an expert, on average
    dpl_dtype dtype;
    int64_t *offsets[2]; // balanced, skewed
    dpl_mat y, dy, dx;
    bool backward, stale[2]; // of the two weights' gradients, which the next run replaces
} experts_bench;

static size_t weight_elems(const dpl_weight *w) {
    return w->n_groups * dpl_panel_elems(w->n, w->k);
}

static void run_experts(experts_bench *b) {
    b->stale[0] = b->stale[1] = true;
    dpl_experts_forward(b->ctx, &b->mlp, b->y);
    if (b->backward) dpl_experts_backward(b->ctx, &b->mlp, b->dy, b->dx, false, NULL);
    dpl_ctx_wait(b->ctx);
}

// Expert e's part of the rows: equal; as 1 / (e + 1); or 0.6 for the first, the others equal.
static void set_offsets(const experts_bench *b, size_t skew, int64_t *offsets) {
    const size_t E = b->mlp.groups.n, N = b->mlp.groups.n_rows;
    double all = 0, sum = 0;
    for (size_t e = 0; e < E; ++e) all += 1 / (double)(e + 1);
    for (size_t e = 0; e < E; ++e) {
        double part = 1 / (double)E;
        if (skew == ZIPF) part = 1 / (double)(e + 1) / all;
        if (skew == HOT && E > 1) part = e ? 0.4 / (double)(E - 1) : 0.6;
        sum += part;
        offsets[e + 1] = (int64_t)(e + 1 < E ? floor(sum * (double)N + 0.5) : (double)N);
    }
}

static bool make_weight(dpl_weight *w, dpl_dtype dtype, size_t n_experts, size_t n, size_t k) {
    *w = (dpl_weight){NULL, dtype, n_experts, n, k, NULL, NULL, NULL};
    w->p = dpl_bench_numbers(weight_elems(w), dtype);
    w->grad = dpl_alloc_array(weight_elems(w), sizeof(float));
    return w->p && w->grad;
}

static bool make_rows(const experts_bench *b, dpl_mat *m, size_t width) {
    *m = (dpl_mat){dpl_bench_numbers(b->mlp.groups.n_rows * width, b->dtype), width, b->dtype};
    return m->p;
}

static dpl_status make_operands(experts_bench *b, size_t n_experts) {
    dpl_mlp *mlp = &b->mlp;
    const size_t width = dpl_gate_up_width(b->f);
    mlp->groups = (dpl_groups){.n = n_experts, .n_rows = n_experts * b->rows};
    const bool made = make_weight(&mlp->gate_up_w, b->dtype, n_experts, width, b->d) &&
                      make_weight(&mlp->down_w, b->dtype, n_experts, b->d, b->f) &&
                      make_rows(b, &mlp->x, b->d) && make_rows(b, &mlp->gate_up, width) &&
                      make_rows(b, &mlp->hidden, b->f) && make_rows(b, &b->y, b->d) &&
                      make_rows(b, &b->dy, b->d) && make_rows(b, &b->dx, b->d);
    for (size_t i = 0; i < 2; ++i) {
        b->offsets[i] = dpl_alloc_array(n_experts + 1, sizeof(int64_t));
        if (b->offsets[i]) set_offsets(b, i ? b->skew : BALANCED, b->offsets[i]);
    }
    mlp->gate_up_w.stale = &b->stale[0];
    mlp->down_w.stale = &b->stale[1];
    return made && b->offsets[0] && b->offsets[1]
               ? DPL_OK
               : dpl_fail(DPL_ENOMEM, "bench experts: no memory for the operands");
}

static void drop_operands(experts_bench *b) {
    const dpl_weight *weights[] = {&b->mlp.gate_up_w, &b->mlp.down_w};
    for (size_t i = 0; i < DPL_COUNT(weights); ++i) {
        dpl_free((void *)(uintptr_t)weights[i]->p);
        dpl_free(weights[i]->grad);
    }
    void *const rest[] = {b->mlp.x.p, b->mlp.gate_up.p, b->mlp.hidden.p, b->y.p,
                          b->dy.p,    b->dx.p,          b->offsets[0],   b->offsets[1]};
    for (size_t i = 0; i < DPL_COUNT(rest); ++i) dpl_free(rest[i]);
}

static dpl_status report(const experts_bench *b, const dpl_bench_limits *limits, double seconds,
                         double over_balanced, bool json) {
    const int64_t *offsets = b->offsets[1];
    const size_t E = b->mlp.groups.n;
    int64_t most = 0;
    double used = 0; // experts
    for (size_t e = 0; e < E; ++e) {
        most = DPL_MAX(most, offsets[e + 1] - offsets[e]);
        used += offsets[e + 1] > offsets[e];
    }
    const double n = (double)b->mlp.groups.n_rows, d = (double)b->d, f = (double)b->f;
    const double passes = b->backward ? 2 : 1; // the backward pass has twice the operations
    const double weights = 3 * d * f * used, elem = (double)dpl_dtype_bytes(b->dtype);
    const dpl_bench_work work = {.dtype = b->dtype,
                                 .flops = (2 * passes - 1) * 2 * n * 3 * d * f,
                                 .read_bytes = passes * elem * (weights + 2 * n * d),
                                 .rw_bytes = b->backward ? 4 * 3 * d * f * (double)E : 0};
    json_t *row = json_pack(
        "{ss ss ss sI sI sI sI ss sf sf si ss}", "bench", "experts", "op",
        b->backward ? "forward_backward" : "forward", "dtype", dpl_bench_dtypes[b->dtype],
        "experts", (json_int_t)E, "rows", (json_int_t)b->rows, "d", (json_int_t)b->d, "f",
        (json_int_t)b->f, "skew", skews[b->skew], "load_max_over_mean",
        (double)most / (double)b->rows, "over_balanced", over_balanced, "threads",
        dpl_ctx_threads(b->ctx), "kernel", dpl_bench_kernel(b->ctx, b->dtype));
    return dpl_bench_report(row, &work, limits, seconds, json);
}

// The balanced load is not timed a second time where it is the one asked for.
static dpl_status run_pass(experts_bench *b, const dpl_bench_limits *limits, size_t runs,
                           bool json) {
    double seconds[2] = {0}, skewed[DPL_BENCH_RUNS_MAX], ratios[DPL_BENCH_RUNS_MAX];
    runs = DPL_MIN(DPL_MAX(runs, (size_t)1), (size_t)DPL_BENCH_RUNS_MAX);
    for (size_t run = 0; run < runs; ++run) {
        for (size_t i = b->skew == BALANCED; i < 2; ++i) {
            b->mlp.groups.offsets = b->offsets[i];
            if (run == 0) run_experts(b); // to warm up
            const double start = dpl_now();
            run_experts(b);
            seconds[i] = dpl_now() - start;
        }
        skewed[run] = seconds[1];
        ratios[run] = b->skew == BALANCED ? 1 : seconds[1] / seconds[0];
    }
    return report(b, limits, dpl_bench_middle(skewed, runs), dpl_bench_middle(ratios, runs), json);
}

int dpl_bench_run_experts(dpl_bench_args *args) {
    experts_bench b = {.skew = dpl_bench_choice(args, "skew", skews),
                       .rows = dpl_bench_size(args, "rows", 48),
                       .d = dpl_bench_size(args, "d", 2048),
                       .f = dpl_bench_size(args, "f", 1408),
                       .dtype = (dpl_dtype)dpl_bench_choice(args, "dtype", dpl_bench_dtypes)};
    const size_t n_experts = dpl_bench_size(args, "experts", 64);
    const size_t runs = dpl_bench_size(args, "runs", 9);
    const size_t mbytes = dpl_bench_size(args, "mbytes", 512);
    const int threads = (int)dpl_bench_size(args, "threads", 0);
    if (!dpl_bench_args_done(args)) return 2;
    if (!n_experts || !b.rows || !b.d || !b.f || n_experts > 1 << 20 || b.rows > 1 << 20 ||
        b.d > 1 << 20 || b.f > 1 << 20) {
        fputs("bench experts: expected experts=, rows=, d= and f= of 1 to 2^20\n", stderr);
        return 2;
    }
    dpl_bench_limits limits;
    dpl_status status = dpl_ctx_open(threads, &b.ctx);
    if (status == DPL_OK) status = dpl_bench_machine(b.ctx, mbytes << 20, &limits);
    if (status == DPL_OK) status = make_operands(&b, n_experts);
    for (int i = 0; status == DPL_OK && i < 2; ++i, b.backward = true)
        status = run_pass(&b, &limits, runs, args->json);
    if (status != DPL_OK) fprintf(stderr, "dropless: %s\n", dpl_error_message());
    drop_operands(&b);
    dpl_ctx_close(&b.ctx);
    return status == DPL_OK ? 0 : 1;
}
