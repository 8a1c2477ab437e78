// peak.c - the arithmetic limits of this machine, measured: what mfu and the benchmarks' fractions
// refer to.
#include "cpu/kernels.h"
#include "cpu/ops.h"

#define TASKS  100   // a thread
#define ROUNDS 20000 // long enough to time, short enough to be rarely interrupted by others

typedef struct peak_args {
    dpl_dtype dtype;
    double *best; // operations a second, of each thread
} peak_args;

static void peak_task(const void *p, const dpl_part *part) {
    const peak_args *args = p;
    const dpl_gemm_kernels *g = &part->g[args->dtype];
    double *best = &args->best[part->i_thread];
    float sink[34];
    for (size_t i = 0; i < DPL_COUNT(sink); i++) sink[i] = 0.5f;
    const unsigned entered = dpl_gemm_enter(g);
    const double start = dpl_now(), done = g->peak(ROUNDS, sink);
    *best = DPL_MAX(*best, done / (dpl_now() - start));
    dpl_gemm_leave(g, entered);
}

double dpl_measure_peak(dpl_ctx *ctx, dpl_dtype dtype) {
    const size_t parts = dtype == DPL_F32 ? ctx->f32_parts : 0;
    const size_t n_threads = (size_t)dpl_pool_threads(ctx->pool);
    double sum = 0, best = 0;
    const peak_args args = {parts ? DPL_BF16 : dtype,
                            dpl_alloc_array(n_threads, sizeof *args.best)};
    if (!args.best) return 0;
    dpl_ctx_loop(ctx, (dpl_loop){peak_task, TASKS * n_threads, 1}, &args);
    for (size_t i = 0; i < n_threads; i++) best = DPL_MAX(best, args.best[i]);
    // A thread that got no task counts as the best.
    for (size_t i = 0; i < n_threads; i++) sum += args.best[i] > 0 ? args.best[i] : best;
    dpl_free(args.best);
    return parts ? sum / (double)(parts * (parts + 1) / 2) : sum;
}
