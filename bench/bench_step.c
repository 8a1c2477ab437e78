/*
 * bench_step.c - `bench step CONFIG`: whole optimizer steps of a configuration, data and all.
 *
 * The limit is the step's operations, as MaxText counts them, over the best peak of the compute
 * type before and after the steps; `fraction_fma` is of fp32's. Nothing is written: no checkpoints,
 * and a run name that no run directory has.
 */
#include <stdio.h>

#include "bench.h"
#include "train/train.h"

typedef struct step_bench {
    const char *path; // of the configuration
    dpl_config *config;
    dpl_ctx *ctx;
    dpl_trainer *trainer;
    size_t n;
    double seconds[DPL_BENCH_RUNS_MAX], sum_s, phase_s[DPL_PHASE_N], peak, fma_peak;
} step_bench;

static dpl_status configure(step_bench *b, const dpl_bench_args *args) {
    for (int i = 0; i < args->argc; ++i)
        if (!(args->used >> i & 1)) DPL_TRY(dpl_config_set(b->config, args->argv[i]));
    const dpl_options *o = &b->config->o;
    DPL_TRY(dpl_config_put(b->config, "run_name", ".bench-step"));
    DPL_TRY(dpl_config_put(b->config, "enable_checkpointing", "false"));
    DPL_TRY(dpl_config_put(b->config, "eval_interval", "-1"));
    if (dpl_is(o->dataset_type, "synthetic") || dpl_path_exists(o->dataset_path)) return DPL_OK;
    fprintf(stderr, "bench step: there is no '%s', so the data are synthetic\n", o->dataset_path);
    return dpl_config_put(b->config, "dataset_type", "synthetic");
}

static void measure_peaks(step_bench *b) {
    b->peak = DPL_MAX(b->peak, dpl_measure_peak(b->ctx, b->trainer->model->dtype));
    b->fma_peak = DPL_MAX(b->fma_peak, dpl_bench_fma_peak(b->ctx));
}

static dpl_status run_steps(step_bench *b, size_t warmup, size_t runs) {
    dpl_step_metrics m;
    const size_t most = runs ? DPL_MIN(runs, (size_t)DPL_BENCH_RUNS_MAX) : 10;
    measure_peaks(b);
    for (size_t i = 0; i < warmup; ++i) DPL_TRY(dpl_trainer_step(b->trainer, &m));
    while (b->n < most && (runs || b->n == 0 || b->sum_s < 5)) {
        const double start = dpl_now();
        DPL_TRY(dpl_trainer_step(b->trainer, &m));
        b->sum_s += b->seconds[b->n++] = dpl_now() - start;
        for (int i = 0; i < DPL_PHASE_N; ++i)
            b->phase_s[i] += b->ctx->phase_s[i]; // the trainer clears them in each step
    }
    measure_peaks(b);
    return b->peak > 0 && b->fma_peak > 0 ? DPL_OK : dpl_fail(DPL_ENOMEM, "bench step: no memory");
}

static void report_phases(const step_bench *b, bool json) {
    double rest_s = b->sum_s;
    for (int i = 0; i <= DPL_PHASE_N; ++i) {
        const double s = i < DPL_PHASE_N ? b->phase_s[i] : rest_s;
        rest_s -= s;
        printf(json ? "{\"bench\":\"step_phase\",\"phase\":\"%s\",\"ms\":%.4f,\"share\":%.4f}\n"
                    : "  %-13s %10.3f ms  %.4f\n",
               i < DPL_PHASE_N ? dpl_phase_name((dpl_phase)i) : "no_operator",
               1e3 * s / (double)b->n, s / b->sum_s);
    }
}

static dpl_status report(step_bench *b, bool json) {
    const double median_s = dpl_bench_middle(b->seconds, b->n), flops = b->trainer->step_flops;
    const double tokens = (double)(b->trainer->batch.n_batch * b->trainer->batch.n_seq);
    const dpl_dtype dtype = b->trainer->model->dtype;
    const double limit_s = flops / b->peak;
    json_t *row = json_pack("{ss ss ss si sf sf sf sf sf}", "bench", "step", "config", b->path,
                            "dtype", dpl_bench_dtypes[dtype], "threads", dpl_ctx_threads(b->ctx),
                            "median_ms", median_s * 1e3, "tokens_per_s", tokens / median_s,
                            "gflops", flops / median_s * 1e-9, "limit_ms", limit_s * 1e3,
                            "fraction", limit_s / median_s);
    if (dtype == DPL_BF16 || b->ctx->f32_parts)
        json_object_set_new(row, "fraction_fma", json_real(flops / b->fma_peak / median_s));
    return dpl_bench_print(row, json);
}

int dpl_bench_run_step(dpl_bench_args *args) {
    step_bench b = {.path = dpl_bench_word(args)};
    const size_t runs = dpl_bench_size(args, "runs", 0), warmup = dpl_bench_size(args, "warmup", 2);
    if (!b.path) fputs("bench step: CONFIG is missing\n", stderr);
    if (!b.path || args->bad) return 2;
    dpl_status status = dpl_config_open(b.path, &b.config);
    if (status == DPL_OK) status = configure(&b, args);
    const bool usage = status == DPL_EINVAL;
    if (status == DPL_OK) status = dpl_ctx_open((int)b.config->o.threads, &b.ctx);
    if (status == DPL_OK) status = dpl_trainer_open(b.ctx, b.config, &b.trainer);
    if (status == DPL_OK) status = run_steps(&b, warmup, runs);
    if (status == DPL_OK) status = report(&b, args->json);
    if (status == DPL_OK && b.config->o.step_profile) report_phases(&b, args->json);
    if (status != DPL_OK) fprintf(stderr, "dropless: %s\n", dpl_error_message());
    dpl_trainer_close(&b.trainer);
    dpl_ctx_close(&b.ctx);
    dpl_config_close(&b.config);
    return status == DPL_OK ? 0 : usage ? 2 : 1;
}
