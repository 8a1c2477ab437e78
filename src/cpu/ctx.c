// ctx.c - the operator context: threads, arena and scratch; runs operators now or (deferred) later.
//
// The deferred queue stands in for a device's stream: it is drained in order by whoever waits.
// Outputs in the step arena are poisoned when the operator is queued, and the arena keeps released
// blocks alive meanwhile.
#include "cpu/ctx.h"

#include <unistd.h>

#include "cpu/kernels.h"

#define SCRATCH_BYTES  ((size_t)4 << 20)
#define STEP_BYTES_MIN ((size_t)64 << 20)
#define QUEUE_MAX      256 // a full queue is drained: long steps need no more memory

typedef struct queued_op {
    dpl_op_fn fn;
    dpl_phase phase;
    _Alignas(16) uint8_t args[DPL_OP_ARGS_MAX];
} queued_op;

struct dpl_queue {
    size_t n;
    queued_op ops[QUEUE_MAX];
};

const char *dpl_phase_name(dpl_phase phase) {
#define NAME(id, name) #name,
    static const char *const names[] = {DPL_PHASE_MAP(NAME)};
    return names[phase];
}

static dpl_status open_parts(dpl_ctx *ctx, int n_threads, bool deferred, size_t step_bytes) {
    DPL_TRY(dpl_cpu_level_detect(&ctx->level));
    ctx->kernels = dpl_alloc(sizeof *ctx->kernels);
    DPL_EXPECT(ctx->kernels, DPL_ENOMEM, "no memory for the kernel table of a context");
    dpl_cpu_kernels(ctx->level, ctx->kernels);
    dpl_cpu_kernels_choose(ctx->kernels);
    DPL_TRY(dpl_pool_open(n_threads, &ctx->pool));
    ctx->n_neighbours = 1;
    ctx->memory_bytes = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    // Batch systems limit addresses too (ulimit -v): take what there is.
    size_t bytes = step_bytes ? step_bytes : 4 * ctx->memory_bytes;
    dpl_status status;
    do status = dpl_arena_open(bytes, &ctx->arena);
    while (status != DPL_OK && !step_bytes && (bytes /= 2) >= STEP_BYTES_MIN);
    DPL_TRY(status);
    ctx->scratch = dpl_alloc_array((size_t)dpl_pool_threads(ctx->pool), SCRATCH_BYTES);
    if (deferred) ctx->queue = dpl_alloc(sizeof *ctx->queue);
    DPL_EXPECT(ctx->scratch && (ctx->queue || !deferred), DPL_ENOMEM,
               "no memory for the scratch of a context");
    dpl_arena_hold(ctx->arena, deferred);
    return DPL_OK;
}

dpl_status dpl_ctx_create(int n_threads, bool deferred, size_t step_bytes, dpl_ctx **ctx_out) {
    dpl_ctx *ctx = dpl_alloc(sizeof *ctx);
    DPL_EXPECT(ctx, DPL_ENOMEM, "no memory for a context");
    const dpl_status status = open_parts(ctx, n_threads, deferred, step_bytes);
    if (status == DPL_OK) *ctx_out = ctx;
    else dpl_ctx_close(&ctx);
    return status;
}

dpl_status dpl_ctx_open(int n_threads, dpl_ctx **ctx_out) {
    DPL_CHECK(ctx_out, "dpl_ctx_open: ctx_out is NULL");
    return dpl_ctx_create(n_threads, false, 0, ctx_out);
}

void dpl_ctx_close(dpl_ctx **ctx) {
    if (!ctx || !*ctx) return;
    dpl_ctx_wait(*ctx);
    dpl_pool_close(&(*ctx)->pool);
    dpl_arena_close(&(*ctx)->arena);
    dpl_free((*ctx)->scratch);
    dpl_free((*ctx)->queue);
    dpl_free((*ctx)->kernels);
    dpl_free(*ctx);
    *ctx = NULL;
}

dpl_status dpl_ctx_set_precision(dpl_ctx *ctx, const char *matmul_precision) {
    DPL_NEED(ctx && matmul_precision);
    static const char *const names[] = {"default", "highest", "bf16_x3", "bf16_x6"};
    static const size_t parts[] = {0, 0, 2, 3};
    for (size_t i = 0; i < DPL_COUNT(names); i++)
        if (strcmp(matmul_precision, names[i]) == 0) {
            ctx->f32_parts = parts[i];
            return DPL_OK;
        }
    return dpl_fail(DPL_EINVAL, "matmul_precision '%s', expected %s, %s, %s or %s",
                    matmul_precision, names[0], names[1], names[2], names[3]);
}

dpl_status dpl_ctx_join(dpl_ctx *ctx, dpl_comm *comm) {
    DPL_NEED(ctx);
    ctx->comm = comm;
    return DPL_OK;
}

int dpl_ctx_threads(const dpl_ctx *ctx) {
    return ctx ? dpl_pool_threads(ctx->pool) : 0;
}

const char *dpl_ctx_cpu_level(const dpl_ctx *ctx) {
    return ctx ? dpl_cpu_level_name(ctx->level) : "";
}

static void run(dpl_ctx *ctx, dpl_phase phase, dpl_op_fn fn, const void *args) {
    const double start = dpl_now();
    fn(ctx, args);
    ctx->phase_s[phase] += dpl_now() - start;
}

static void drain(dpl_ctx *ctx) {
    const queued_op *op = ctx->queue->ops;
    for (size_t i = 0; i < ctx->queue->n; i++, op++) run(ctx, op->phase, op->fn, op->args);
    ctx->queue->n = 0;
}

void dpl_ctx_submit(dpl_ctx *ctx, dpl_op_fn fn, const void *args, size_t args_bytes,
                    const dpl_span *outputs, size_t n_outputs) {
    if (!ctx->queue) {
        run(ctx, ctx->phase, fn, args);
        return;
    }
    if (ctx->queue->n == QUEUE_MAX) drain(ctx);
    for (size_t i = 0; i < n_outputs; i++)
        if (dpl_arena_owns(ctx->arena, outputs[i].p)) memset(outputs[i].p, 0xff, outputs[i].bytes);
    queued_op *op = &ctx->queue->ops[ctx->queue->n++];
    op->fn = fn;
    op->phase = ctx->phase;
    memcpy(op->args, args, args_bytes);
}

void dpl_ctx_wait(dpl_ctx *ctx) {
    if (!ctx->queue) return;
    drain(ctx);
    // Nothing uses a released block any more: perform the releases that were put off.
    dpl_arena_hold(ctx->arena, false);
    dpl_arena_hold(ctx->arena, true);
}

void dpl_ctx_read(dpl_ctx *ctx, void *host, const void *device, size_t bytes) {
    dpl_ctx_wait(ctx);
    memcpy(host, device, bytes);
}

typedef struct loop_run {
    dpl_ctx *ctx;
    dpl_loop loop;
    const void *args;
} loop_run;

static void run_part(void *p, size_t i, int i_thread) {
    const loop_run *run = p;
    const dpl_loop *loop = &run->loop;
    const size_t first = i * loop->grain, end = DPL_MIN(first + loop->grain, loop->n_rows);
    uint8_t *scratch = run->ctx->scratch + (size_t)i_thread * SCRATCH_BYTES;
    const dpl_kernels *k = run->ctx->kernels;
    const dpl_part part = {first, end, i, &k->rows, k->gemm, &k->quant, scratch, i_thread};
    loop->fn(run->args, &part);
}

void dpl_ctx_loop(dpl_ctx *ctx, dpl_loop loop, const void *args) {
    loop_run run = {ctx, loop, args};
    dpl_pool_run(ctx->pool, dpl_div_up(loop.n_rows, loop.grain), run_part, &run);
}

void dpl_run_loop(dpl_ctx *ctx, const void *args) {
    dpl_ctx_loop(ctx, *(const dpl_loop *)args, args);
}
