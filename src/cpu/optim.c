/*
 * optim.c - what the end of a step does with whole parameter arrays: AdamW or SGD update with the
 * bf16 compute copy in the same pass, and the sums that the gradient norm is made of.
 *
 * Arrays are flat here, in the panel order of their parameter; padding is 0 in the parameter and in
 * the gradient, and every update maps that to 0. Sums go in fixed chunks, added in order in fp64.
 */
#include "cpu/row_io.h"

#define CHUNK    ((size_t)8192) // elements: 128 KB of parameter, gradient and moments
#define PARTIALS ((size_t)1024) // of a sum, at most

typedef struct update_args {
    const dpl_row_kernels *k;
    dpl_rows_fn fn;
    dpl_adamw rule;
    const float *grad;
    float *param, *m, *v;
    uint16_t *copy;
    size_t n;
} update_args;

static void run_update(dpl_ctx *ctx, const void *args)
{
    const update_args *a = args;
    dpl_ctx_rows(ctx, a->n, CHUNK, a->fn, (void *)(uintptr_t)args);
}

static void submit_update(dpl_ctx *ctx, const update_args *args)
{
    const dpl_span copy = {args->copy, args->copy ? args->n * sizeof *args->copy : 0};
    dpl_ctx_submit(ctx, run_update, args, sizeof *args, &copy, 1);
}

static void adamw_chunk(void *p, size_t first, size_t count, size_t i_chunk, int i_thread)
{
    const update_args *a = p;
    (void)i_chunk, (void)i_thread;
    // In pieces, so that the copy is made of parameters that are still in the first cache.
    for (size_t i = first; i < first + count; i += DPL_ROW_BLOCK) {
        const size_t n = DPL_MIN((size_t)DPL_ROW_BLOCK, first + count - i);
        a->k->adamw(&a->rule, a->grad + i, a->param + i, a->m + i, a->v + i, n);
        if (a->copy) a->k->to_bf16(a->param + i, a->copy + i, n);
    }
}

void dpl_adamw_step(dpl_ctx *ctx, const dpl_adamw *adamw, const float *grad, size_t n, float *param,
                    float *m, float *v, uint16_t *copy)
{
    submit_update(
        ctx, &(update_args){&ctx->kernels->rows, adamw_chunk, *adamw, grad, param, m, v, copy, n});
}

static void sgd_chunk(void *p, size_t first, size_t count, size_t i_chunk, int i_thread)
{
    const update_args *a = p;
    (void)i_chunk, (void)i_thread;
    for (size_t i = first; i < first + count; i += DPL_ROW_BLOCK) {
        const size_t n = DPL_MIN((size_t)DPL_ROW_BLOCK, first + count - i);
        a->k->axpy(-a->rule.lr * a->rule.grad_scale, a->grad + i, a->param + i, n);
        if (a->copy) a->k->to_bf16(a->param + i, a->copy + i, n);
    }
}

void dpl_sgd_step(dpl_ctx *ctx, float lr, float grad_scale, const float *grad, size_t n,
                  float *param, uint16_t *copy)
{
    const dpl_adamw rule = {.lr = lr, .grad_scale = grad_scale};
    submit_update(ctx, &(update_args){&ctx->kernels->rows, sgd_chunk, rule, grad, param, NULL, NULL,
                                      copy, n});
}

static void to_bf16_chunk(void *p, size_t first, size_t count, size_t i_chunk, int i_thread)
{
    const update_args *a = p;
    (void)i_chunk, (void)i_thread;
    a->k->to_bf16(a->grad + first, a->copy + first, count);
}

void dpl_to_bf16(dpl_ctx *ctx, const float *x, size_t n, uint16_t *y)
{
    const update_args args = {
        .k = &ctx->kernels->rows, .fn = to_bf16_chunk, .grad = x, .copy = y, .n = n};
    submit_update(ctx, &args);
}

typedef struct sum_args {
    const float *x;
    size_t n;
    bool squares;
    double *out;
} sum_args;

typedef struct sum_job {
    const dpl_row_kernels *k;
    const sum_args *args;
    double partial[PARTIALS];
} sum_job;

static void sum_chunk(void *p, size_t first, size_t count, size_t i_chunk, int i_thread)
{
    sum_job *job = p;
    const float *x = job->args->x + first;
    (void)i_thread;
    job->partial[i_chunk] = job->args->squares ? job->k->sum_squares_f64(x, count)
                                               : job->k->sum_f64(x, count);
}

static void run_sum(dpl_ctx *ctx, const void *args)
{
    const sum_args *a = args;
    sum_job job;
    job.k = &ctx->kernels->rows;
    job.args = a;
    const size_t chunk = DPL_MAX(CHUNK, dpl_div_up(a->n, PARTIALS));
    dpl_ctx_rows(ctx, a->n, chunk, sum_chunk, &job);
    double sum = 0;
    for (size_t i = 0; i < dpl_div_up(a->n, chunk); i++)
        sum += job.partial[i];
    *a->out = sum;
}

void dpl_sum(dpl_ctx *ctx, const float *x, size_t n, double *sum_out)
{
    const sum_args args = {x, n, false, sum_out};
    dpl_ctx_submit(ctx, run_sum, &args, sizeof args, &(dpl_span){sum_out, sizeof *sum_out}, 1);
}

void dpl_sum_squares(dpl_ctx *ctx, const float *x, size_t n, double *sum_out)
{
    const sum_args args = {x, n, true, sum_out};
    dpl_ctx_submit(ctx, run_sum, &args, sizeof args, &(dpl_span){sum_out, sizeof *sum_out}, 1);
}
