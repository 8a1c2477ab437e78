// peak.c - the arithmetic limit of this machine, measured: what mfu and the benchmarks' fractions
// refer to.
#include "cpu/kernels.h"
#include "cpu/ops.h"

#define TASKS  100   // a thread
#define ROUNDS 20000 // long enough to time, short enough to be rarely interrupted by others

static void peak_task(const void *args, const dpl_part *part) {
    double *best = *(double *const *)args + part->i_thread; // operations a second
    float sink[34];
    for (size_t i = 0; i < DPL_COUNT(sink); i++) sink[i] = 0.5f;
    const double start = dpl_now(), done = part->g[DPL_F32].peak(ROUNDS, sink);
    *best = DPL_MAX(*best, done / (dpl_now() - start));
}

double dpl_measure_peak(dpl_ctx *ctx) {
    const size_t n_threads = (size_t)dpl_pool_threads(ctx->pool);
    double sum = 0, best = 0;
    double *of_thread = dpl_alloc_array(n_threads, sizeof *of_thread);
    if (!of_thread) return 0;
    dpl_ctx_loop(ctx, (dpl_loop){peak_task, TASKS * n_threads, 1}, &of_thread);
    for (size_t i = 0; i < n_threads; i++) best = DPL_MAX(best, of_thread[i]);
    // A thread that got no task counts as the best.
    for (size_t i = 0; i < n_threads; i++) sum += of_thread[i] > 0 ? of_thread[i] : best;
    dpl_free(of_thread);
    return sum;
}
