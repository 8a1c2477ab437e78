/*
 * bench_gemm.c - `bench machine`: what the machine can do; `bench gemm`: how much of that the
 * grouped GEMM reaches.
 *
 * The limit of a product is max(operations / peak, bytes / bandwidth), where the bytes are those of
 * every operand and result once. Data that fit in the caches can do better than that limit.
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "bench.h"
#include "cpu/kernels.h"

#define CHUNK_BYTES   ((size_t)1 << 20)
#define DISPATCH_RUNS 20
#define MEMORY_RUNS   7 // the best of so many is the machine's limit

/* ---- machine --------------------------------------------------------------------------------- */

typedef struct memory_run {
    const dpl_row_kernels *k;
    float *data;
    size_t n_chunks;
    bool write;
    float *max; // (n_chunks)
} memory_run;

// By the kernels of this level that do the least for each line of memory.
static void memory_task(void *arg, size_t i_task, int i_thread) {
    const memory_run *run = arg;
    const size_t n = CHUNK_BYTES / sizeof *run->data;
    float *x = run->data + i_task * n;
    (void)i_thread;
    if (run->write) run->k->scale(1, x, n);
    else run->max[i_task] = run->k->max(x, n);
}

static double measure_memory(dpl_ctx *ctx, memory_run *run, bool write) {
    double best = 0;
    run->write = write;
    for (int i = 0; i < MEMORY_RUNS; ++i) {
        const double start = dpl_now();
        dpl_pool_run(ctx->pool, run->n_chunks, memory_task, run);
        best = DPL_MAX(best, (double)(run->n_chunks * CHUNK_BYTES) / (dpl_now() - start));
    }
    return write ? 2 * best : best;
}

double dpl_bench_fma_peak(dpl_ctx *ctx) {
    const size_t parts = ctx->f32_parts;
    ctx->f32_parts = 0;
    const double flops = dpl_measure_peak(ctx, DPL_F32);
    ctx->f32_parts = parts;
    return flops;
}

dpl_status dpl_bench_machine(dpl_ctx *ctx, size_t test_bytes, dpl_bench_limits *limits_out) {
    memory_run run = {&ctx->kernels->rows, .n_chunks = DPL_MAX(test_bytes / CHUNK_BYTES, 1)};
    run.data = dpl_alloc(run.n_chunks * CHUNK_BYTES);
    run.max = dpl_alloc_array(run.n_chunks, sizeof *run.max);
    dpl_status status = DPL_OK;
    dpl_bench_limits found = {
        .flops = {dpl_measure_peak(ctx, DPL_F32), dpl_measure_peak(ctx, DPL_BF16)}};
    found.fma_flops = ctx->f32_parts ? dpl_bench_fma_peak(ctx) : found.flops[DPL_F32];
    if (run.data && run.max && found.flops[0] > 0 && found.flops[1] > 0 && found.fma_flops > 0) {
        // Writing comes first: memory that was never written is one page of zeros.
        found.rw_bytes = measure_memory(ctx, &run, true);
        found.read_bytes = measure_memory(ctx, &run, false);
        *limits_out = found;
    } else {
        status = dpl_fail(DPL_ENOMEM, "bench machine: no memory for %zu MiB of test data",
                          test_bytes >> 20);
    }
    dpl_free(run.data);
    dpl_free(run.max);
    return status;
}

static int failed(dpl_ctx *ctx) {
    fprintf(stderr, "%s\n", dpl_error_message());
    dpl_ctx_close(&ctx);
    return 1;
}

// The level that a class of products has its kernel from; or, without a class, the rows.
static const char *level_of(const dpl_ctx *ctx, const dpl_gemm_kernels *used, dpl_dtype class) {
    dpl_cpu_level level = DPL_CPU_REF;
    for (dpl_kernels k; level < ctx->level; level++) {
        dpl_cpu_kernels(level, &k);
        if (used ? k.gemm[class].tile == used->tile || k.same[class].tile == used->tile
                 : k.rows.add == ctx->kernels->rows.add)
            break;
    }
    return dpl_cpu_level_name(level);
}

// One row an operation: which kernel computes it, of which level, and why that one.
static dpl_status report_kernels(const dpl_ctx *ctx, const dpl_bench_limits *limits, bool json) {
    static const char *const names[] = {"f32_gemm", "bf16_gemm", "f32_attention", "bf16_attention",
                                        "rows"};
    const char *forced = getenv("DPL_CPU");
    for (size_t i = 0; i < DPL_COUNT(names); ++i) {
        const dpl_dtype class = i % 2 ? DPL_BF16 : DPL_F32;
        const bool products = i < 4;
        const dpl_gemm_kernels *used = products ? &ctx->kernels->gemm[class] : NULL;
        const char *other = products ? ctx->kernels->same[class].name : NULL;
        const char *level = level_of(ctx, used, class);
        char why[128];
        snprintf(why, sizeof why, "%s%s%s%s",
                 forced && *forced ? "forced by DPL_CPU" : "best of this machine",
                 other ? "; faster when measured than " : "", other ? other : "",
                 other ? ", whose bits are the same" : "");
        json_t *row = json_pack("{ss ss ss ss ss}", "bench", "machine_kernel", "op", names[i],
                                "level", level, "kernel", used ? used->name : level, "why", why);
        if (products) json_object_set_new(row, "gflops", json_real(limits->flops[class] * 1e-9));
        DPL_TRY(dpl_bench_print(row, json));
    }
    return DPL_OK;
}

// Each task waits until all of its run have begun: so every thread takes part.
typedef struct dispatch_run {
    atomic_size_t n_begun;
    size_t n_tasks;
} dispatch_run;

static void dispatch_task(void *arg, size_t i_task, int i_thread) {
    dispatch_run *run = arg;
    (void)i_task, (void)i_thread;
    atomic_fetch_add(&run->n_begun, 1);
    while (atomic_load(&run->n_begun) % run->n_tasks) continue;
}

// Seconds from the start of a run of the pool to its end, when there is nothing to do in it.
static double measure_dispatch(dpl_ctx *ctx) {
    dispatch_run run = {0, (size_t)dpl_ctx_threads(ctx)};
    double best = 1;
    for (int i = 0; i < DISPATCH_RUNS; ++i) {
        atomic_store(&run.n_begun, 0);
        const double start = dpl_now();
        for (int j = 0; j < DISPATCH_RUNS; ++j)
            dpl_pool_run(ctx->pool, run.n_tasks, dispatch_task, &run);
        best = DPL_MIN(best, (dpl_now() - start) / DISPATCH_RUNS);
    }
    return best;
}

int dpl_bench_run_machine(dpl_bench_args *args) {
    const int threads = (int)dpl_bench_size(args, "threads", 0);
    const size_t test_bytes = dpl_bench_size(args, "mbytes", 512) << 20;
    if (!dpl_bench_args_done(args)) return 2;
    dpl_ctx *ctx = NULL;
    dpl_bench_limits limits;
    if (dpl_ctx_create(threads, false, 0, &ctx) != DPL_OK) return failed(ctx);
    if (dpl_bench_machine(ctx, test_bytes, &limits) != DPL_OK) return failed(ctx);
    json_t *row = json_pack(
        "{ss si ss sf sf sf sf sf}", "bench", "machine", "threads", dpl_ctx_threads(ctx), "level",
        dpl_ctx_cpu_level(ctx), "gflops", limits.flops[DPL_F32] * 1e-9, "gflops_bf16",
        limits.flops[DPL_BF16] * 1e-9, "read_gbs", limits.read_bytes * 1e-9, "read_write_gbs",
        limits.rw_bytes * 1e-9, "dispatch_us", measure_dispatch(ctx) * 1e6);
    if (dpl_bench_print(row, args->json) != DPL_OK) return failed(ctx);
    if (report_kernels(ctx, &limits, args->json) != DPL_OK) return failed(ctx);
    dpl_ctx_close(&ctx);
    return 0;
}

/* ---- gemm ------------------------------------------------------------------------------------ */

static const char *const op_names[] = {"forward", "dgrad", "wgrad"};
static const char *const operands[] = {"f32", "bf16", "mxfp8", "nvfp4",
                                       NULL}; // the first two: dpl_dtype
enum { MXFP8 = 2, NVFP4 };
static const char *const precisions[] = {"default", "bf16_x6", "bf16_x3", NULL};

typedef struct gemm_bench {
    dpl_ctx *ctx;
    int op; // index of op_names
    size_t n_experts, rows, n, k;
    dpl_dtype dtype;
    size_t operand;        // index of operands
    const char *precision; // of fp32 products
    dpl_mat x, y;
    dpl_weight w;
    dpl_quant_weight quant;
    uint64_t streams[2];
    bool plain; // the products of bf16 that those of codes are compared with
    dpl_groups groups;
    float *dw;
} gemm_bench;

static void run_op(void *arg) {
    const gemm_bench *b = arg;
    dpl_weight w = b->w;
    if (b->operand >= MXFP8 && !b->plain) w.quant = &b->quant;
    w.grad = b->dw;
    if (b->op == 0) dpl_gemm_forward(b->ctx, b->x, &w, b->groups, b->y);
    if (b->op == 1) dpl_gemm_dgrad(b->ctx, b->y, &w, b->groups, b->x, false);
    if (b->op == 2) dpl_weight_grad(b->ctx, b->y, b->x, (dpl_row_map){0}, b->groups, &w);
    dpl_ctx_wait(b->ctx);
}

static void run_plain(void *arg) {
    gemm_bench *b = arg;
    b->plain = true;
    run_op(b);
    b->plain = false;
}

static dpl_status report(gemm_bench *b, const dpl_bench_limits *limits, size_t runs, bool json) {
    const bool compares = b->operand >= MXFP8;
    double medians[2];
    if (compares) dpl_bench_turns(runs, (void (*const[])(void *)){run_op, run_plain}, b, medians);
    else medians[0] = dpl_bench_median(runs, run_op, b);
    const double seconds = medians[0];
    const double rows = (double)(b->n_experts * b->rows);
    const double n = (double)b->n, k = (double)b->k, weights = (double)b->n_experts * n * k;
    const double elem = (double)dpl_dtype_bytes(b->dtype);
    const double weight = weights * (b->operand == MXFP8   ? 1 + 1.0 / DPL_MX_BLOCK
                                     : b->operand == NVFP4 ? 0.5 + 1.0 / 256
                                                           : elem);
    const dpl_bench_work work = {.dtype = b->dtype,
                                 .flops = 2 * rows * n * k,
                                 .read_bytes = elem * rows * (n + k) + (b->op < 2 ? weight : 0),
                                 .rw_bytes = b->op < 2 ? 0 : 8 * weights};
    const dpl_gemm_kernels *nv = &b->ctx->kernels->nv;
    const bool in_integers = b->operand == NVFP4 && b->op < 2 && nv->nv_tile;
    json_t *row = json_pack("{ss ss ss sI sI sI sI si ss}", "bench", "gemm", "op", op_names[b->op],
                            "dtype", operands[b->operand], "experts", (json_int_t)b->n_experts,
                            "rows", (json_int_t)b->rows, "k", (json_int_t)b->k, "n",
                            (json_int_t)b->n, "threads", dpl_ctx_threads(b->ctx), "kernel",
                            in_integers ? nv->name : dpl_bench_kernel(b->ctx, b->dtype));
    if (b->ctx->f32_parts) json_object_set_new(row, "precision", json_string(b->precision));
    if (compares) {
        json_object_set_new(row, "bf16_us", json_real(medians[1] * 1e6));
        json_object_set_new(row, "over_bf16", json_real(medians[1] / seconds));
    }
    return dpl_bench_report(row, &work, limits, seconds, json);
}

// One expert's weight for all.
static dpl_status make_codes(gemm_bench *b) {
    float *panels = dpl_bench_numbers(dpl_panel_elems(b->n, b->k), DPL_F32);
    dpl_quant_weight *w = &b->quant;
    w->streams = b->streams;
    if (b->operand == NVFP4) w->rule = (dpl_quant_rule){DPL_E2M1, DPL_E2M1, DPL_SCALE_UP};
    const size_t codes = dpl_quant_code_bytes(w->rule.format, 1, b->n, b->k);
    const size_t scales = dpl_quant_scale_bytes(w->rule.format, 1, b->n, b->k);
    for (int way = 0; way < 2; way++) {
        w->codes[way] = dpl_alloc_array(b->n_experts, codes);
        w->scales[way] = dpl_alloc_array(b->n_experts, scales);
    }
    w->tensor_scale = dpl_alloc_array(b->n_experts, sizeof *w->tensor_scale);
    const bool complete = panels && w->codes[0] && w->codes[1] && w->scales[0] && w->scales[1] &&
                          w->tensor_scale;
    for (size_t g = 0; g < b->n_experts && complete; g++) {
        dpl_quant_weight own = *w;
        for (int way = 0; way < 2; way++)
            own.codes[way] += g * codes, own.scales[way] += g * scales;
        own.tensor_scale += g;
        dpl_quant_weight_pack(b->ctx, panels, 1, b->n, b->k, &own);
    }
    dpl_ctx_wait(b->ctx);
    dpl_free(panels);
    return complete ? DPL_OK : dpl_fail(DPL_ENOMEM, "bench gemm: no memory for the operands");
}

// Operands for all three operations, sized by the caller's n_experts, rows, n and k.
static dpl_status make_operands(gemm_bench *b, int64_t **offsets_out) {
    const size_t n_rows = b->n_experts * b->rows,
                 n_weights = b->n_experts * dpl_panel_elems(b->n, b->k);
    int64_t *offsets = dpl_alloc_array(b->n_experts + 1, sizeof *offsets);
    b->x = (dpl_mat){dpl_bench_numbers(n_rows * b->k, b->dtype), b->k, b->dtype};
    b->y = (dpl_mat){dpl_bench_numbers(n_rows * b->n, b->dtype), b->n, b->dtype};
    b->w = (dpl_weight){dpl_bench_numbers(n_weights, b->dtype),
                        b->dtype,
                        b->n_experts,
                        b->n,
                        b->k,
                        NULL,
                        NULL,
                        NULL};
    b->dw = dpl_alloc_array(n_weights, sizeof *b->dw);
    *offsets_out = offsets;
    if (!offsets || !b->x.p || !b->y.p || !b->w.p || !b->dw)
        return dpl_fail(DPL_ENOMEM, "bench gemm: no memory for the operands");
    for (size_t g = 0; g <= b->n_experts; ++g) offsets[g] = (int64_t)(g * b->rows);
    b->groups = (dpl_groups){b->n_experts, n_rows, offsets};
    return DPL_OK;
}

int dpl_bench_run_gemm(dpl_bench_args *args) {
    const char *const ops[] = {"all", "forward", "dgrad", "wgrad", NULL}; // as op_names
    const int op = (int)dpl_bench_choice(args, "op", ops);
    gemm_bench b = {.n_experts = dpl_bench_size(args, "experts", 8),
                    .rows = dpl_bench_size(args, "rows", 256),
                    .k = dpl_bench_size(args, "k", 2048),
                    .n = dpl_bench_size(args, "n", 1408)};
    const int threads = (int)dpl_bench_size(args, "threads", 0);
    const size_t runs = dpl_bench_size(args, "runs", 9);
    b.precision = precisions[dpl_bench_choice(args, "precision", precisions)];
    b.operand = dpl_bench_choice(args, "dtype", operands);
    b.dtype = b.operand >= MXFP8 ? DPL_BF16 : (dpl_dtype)b.operand;
    if (!dpl_bench_args_done(args)) return 2;
    if (!b.n_experts || !b.n || !b.k) {
        fputs("bench gemm: expected sizes above 0\n", stderr);
        return 2;
    }
    dpl_bench_limits limits;
    int64_t *offsets = NULL;
    dpl_status status = dpl_ctx_create(threads, false, 0, &b.ctx);
    if (status == DPL_OK) status = dpl_ctx_set_precision(b.ctx, b.precision);
    if (status == DPL_OK) status = dpl_bench_machine(b.ctx, (size_t)512 << 20, &limits);
    if (status == DPL_OK) status = make_operands(&b, &offsets);
    if (status == DPL_OK && b.operand >= MXFP8) status = make_codes(&b);
    for (b.op = 0; status == DPL_OK && b.op < (int)DPL_COUNT(op_names); ++b.op) {
        if (op && op != b.op + 1) continue;
        status = report(&b, &limits, runs, args->json);
    }
    for (int way = 0; way < 2; way++) dpl_free(b.quant.codes[way]), dpl_free(b.quant.scales[way]);
    dpl_free(b.quant.tensor_scale);
    dpl_free(b.x.p), dpl_free(b.y.p), dpl_free((void *)(uintptr_t)b.w.p);
    dpl_free(b.dw), dpl_free(offsets);
    if (status != DPL_OK) return failed(b.ctx);
    dpl_ctx_close(&b.ctx);
    return 0;
}
