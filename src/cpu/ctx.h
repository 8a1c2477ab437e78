// ctx.h - the context that every operator takes: threads, kernel table, step memory, phase clock.
//
// Operators are submitted, not called: nothing may assume that an operator has finished before
// dpl_ctx_wait() or dpl_ctx_read() says so. On the plain context an operator runs at once. A
// deferred context (for tests) queues operators and poisons their outputs until somebody waits,
// which shows every place that reads a result too early; a device would behave in the same way.
#pragma once

#include "base/base.h"

typedef struct dpl_kernels dpl_kernels; // kernels.h

// Where a step's time goes; `step_profile=true` prints one row a phase.
// clang-format off
#define DPL_PHASE_MAP(X) X(OTHER, other) X(GMM, grouped_gemm) X(GEMM, dense_gemm) \
    X(ATTENTION, attention) X(ROUTER, router) X(DISPATCH, dispatch) X(COMBINE, combine) \
    X(NORM, norm) X(EMBED, embedding) X(LOSS, head_loss) X(OPTIMIZER, optimizer)
// clang-format on
#define DPL_PHASE_ENUM(id, name) DPL_PHASE_##id,
typedef enum dpl_phase { DPL_PHASE_MAP(DPL_PHASE_ENUM) DPL_PHASE_N } dpl_phase;
const char *dpl_phase_name(dpl_phase phase);

struct dpl_ctx {
    dpl_pool *pool;
    dpl_kernels *kernels;
    dpl_cpu_level level;
    size_t f32_parts;        // 0: fp32 products by multiply-adds; else of so many bf16 (dropless.h)
    uint64_t random_seed;    // of what is rounded by chance; one for each step and rank
    size_t memory_bytes;     // of this machine
    size_t n_neighbours;     // ranks that share it, this one included
    size_t planned_end;      // of the arena: where the caller's pass may come to; 0: not known
    dpl_comm *comm;          // that it has joined; NULL: one rank
    dpl_arena *arena;        // the step's memory; operators take temporary buffers from it too
    uint8_t *scratch;        // for use inside one task, a block of 4 MB per thread
    struct dpl_queue *queue; // NULL: operators run at once
    double phase_s[DPL_PHASE_N]; // time spent by operators since the owner last cleared it
    dpl_phase phase;             // what operators are counted under now
};

// `step_bytes` is the address space reserved for the step arena (0: four times physical memory).
dpl_status dpl_ctx_create(int n_threads, bool deferred, size_t step_bytes, dpl_ctx **ctx_out);

// Sets the phase for what follows and returns the one before, to be set again by the caller.
static inline dpl_phase dpl_ctx_phase(dpl_ctx *ctx, dpl_phase phase) {
    const dpl_phase before = ctx->phase;
    ctx->phase = phase;
    return before;
}

/* ---- for operators ---- */
typedef struct dpl_span {
    void *p;
    size_t bytes;
} dpl_span;

typedef void (*dpl_op_fn)(dpl_ctx *ctx, const void *args);
#define DPL_OP_ARGS_MAX 512

// Runs `fn(ctx, args)` now, or queues a copy of args. `outputs` are the blocks that the operator
// writes entirely without reading them (never list an accumulated or in-place block).
void dpl_ctx_submit(dpl_ctx *ctx, dpl_op_fn fn, const void *args, size_t args_bytes,
                    const dpl_span *outputs, size_t n_outputs);

// Some of the rows of an operator, for one thread.
typedef struct dpl_part {
    size_t first, end, i; // rows first .. end-1; the number of this part
    const struct dpl_row_kernels *k;
    const struct dpl_gemm_kernels *g; // [dpl_dtype]
    const struct dpl_quant_kernels *q;
    void *scratch; // 4 MB of this thread
    int i_thread;
} dpl_part;
typedef void (*dpl_part_fn)(const void *args, const dpl_part *part);

// Runs `fn` on parts of `grain` rows each, whatever the number of threads.
typedef struct dpl_loop {
    dpl_part_fn fn;
    size_t n_rows, grain;
} dpl_loop;
void dpl_ctx_loop(dpl_ctx *ctx, dpl_loop loop, const void *args); // inside an operator
// A dpl_op_fn for operators that do nothing else: their args start with a dpl_loop.
void dpl_run_loop(dpl_ctx *ctx, const void *args);

// dpl_ctx_submit with a struct of arguments, and behind it each output as a dpl_span, or {0}.
#define DPL_SUBMIT(ctx, fn, args, ...)                                              \
    dpl_ctx_submit(ctx, fn, &(args), sizeof(args), (const dpl_span[]){__VA_ARGS__}, \
                   DPL_COUNT(((const dpl_span[]){__VA_ARGS__})))

/* ---- for callers of operators ---- */
void dpl_ctx_wait(dpl_ctx *ctx); // until everything submitted has finished
// The explicit read-back: waits, then copies from an operator's output to host memory.
void dpl_ctx_read(dpl_ctx *ctx, void *host, const void *device, size_t bytes);

// A block of the step arena, and its release in stack order: all that came after a mark.
static inline void *dpl_ctx_alloc(dpl_ctx *ctx, size_t bytes) {
    return dpl_arena_alloc(ctx->arena, bytes);
}
static inline size_t dpl_ctx_mark(const dpl_ctx *ctx) {
    return dpl_arena_mark(ctx->arena);
}
static inline void dpl_ctx_release(dpl_ctx *ctx, size_t mark) {
    dpl_arena_release(ctx->arena, mark);
}
