// optim.c - what the end of a step does with whole parameter arrays: the AdamW update with the
// bf16 compute copy in the same pass, and the sums that the gradient norm is made of.
//
// Arrays are flat here, in the panel order of their parameter; padding is 0 in the parameter and in
// the gradient, and every update maps that to 0. Sums go in fixed chunks, added in order in fp64.
#include "cpu/row_io.h"

#define CHUNK    ((size_t)8192) // elements: 128 KB of parameter, gradient and moments
#define PARTIALS ((size_t)1024) // of a sum, at most

typedef struct update_args {
    dpl_loop loop;
    dpl_adamw rule;
    const float *grad; // NULL: no update, the copy alone
    float *param, *m, *v;
    uint16_t *copy; // may be NULL
} update_args;

static void update(const void *args, const dpl_part *part) {
    const update_args *a = args;
    // In pieces, so that the copy is made of parameters that are still in the first cache.
    for (size_t i = part->first; i < part->end; i += DPL_ROW_BLOCK) {
        const size_t n = DPL_MIN(DPL_ROW_BLOCK, part->end - i);
        float *param = a->param + i;
        if (a->grad) part->k->adamw(&a->rule, a->grad + i, param, a->m + i, a->v + i, n);
        if (a->copy) part->k->to_bf16_pairs(param, a->copy + i, n);
    }
}

void dpl_adamw_step(dpl_ctx *ctx, const dpl_adamw *adamw, const float *grad, size_t n, float *param,
                    float *m, float *v, uint16_t *copy) {
    const update_args a = {{update, n, CHUNK}, *adamw, grad, param, m, v, copy};
    DPL_SUBMIT(ctx, dpl_run_loop, a, {copy, n * sizeof *copy});
}

void dpl_to_bf16(dpl_ctx *ctx, const float *x, size_t n, uint16_t *y) {
    const update_args a = {{update, n, CHUNK}, .param = (float *)(uintptr_t)x, .copy = y};
    DPL_SUBMIT(ctx, dpl_run_loop, a, {y, n * sizeof *y});
}

typedef struct sum_args {
    dpl_loop loop;
    const float *x;
    bool squares;
    double *partial, *out; // partial: one of each part
} sum_args;

static void sum_part(const void *args, const dpl_part *part) {
    const sum_args *a = args;
    const size_t n = part->end - part->first;
    a->partial[part->i] = part->k->sum_f64(a->x + part->first, a->squares, n);
}

static void run_sum(dpl_ctx *ctx, const void *args) {
    double partial[PARTIALS], sum = 0;
    sum_args a = *(const sum_args *)args;
    a.partial = partial;
    dpl_ctx_loop(ctx, a.loop, &a);
    for (size_t i = 0; i < dpl_div_up(a.loop.n_rows, a.loop.grain); i++) sum += partial[i];
    *a.out = sum;
}

void dpl_sum(dpl_ctx *ctx, const float *x, bool squares, size_t n, double *sum_out) {
    const size_t grain = DPL_MAX(CHUNK, dpl_div_up(n, PARTIALS));
    const sum_args args = {{sum_part, n, grain}, x, squares, NULL, sum_out};
    DPL_SUBMIT(ctx, run_sum, args, {sum_out, sizeof *sum_out});
}
