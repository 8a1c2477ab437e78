// peak.c - the arithmetic limit of this machine, measured: what mfu and the benchmarks' fractions refer to.
#include "cpu/kernels.h"
#include "cpu/ops.h"

#define TASKS 100 // a thread
#define ROUNDS \
    20000 // long enough to time, short enough to be rarely interrupted by another process

typedef struct peak_run {
    const dpl_gemm_kernels *k;
    double *best; // (n_threads), operations a second
} peak_run;

static void peak_task(void *arg, size_t i_task, int i_thread) {
    const peak_run *run = arg;
    float sink[64];
    (void)i_task;
    for (size_t i = 0; i < DPL_COUNT(sink); i++) sink[i] = 0.5f;
    const double start = dpl_now(), done = run->k->peak_fma(ROUNDS, sink);
    run->best[i_thread] = DPL_MAX(run->best[i_thread], done / (dpl_now() - start));
}

double dpl_measure_peak(dpl_ctx *ctx) {
    const int n_threads = dpl_pool_threads(ctx->pool);
    double sum = 0, best = 0;
    peak_run run = {&ctx->kernels->gemm, dpl_alloc_array((size_t)n_threads, sizeof(double))};
    if (!run.best) return 0;
    dpl_pool_run(ctx->pool, TASKS * (size_t)n_threads, peak_task, &run);
    for (int i = 0; i < n_threads; i++) best = DPL_MAX(best, run.best[i]);
    for (int i = 0; i < n_threads; i++)
        sum += run.best[i] > 0 ? run.best[i] : best; // a thread that got no task: as the best
    dpl_free(run.best);
    return sum;
}
