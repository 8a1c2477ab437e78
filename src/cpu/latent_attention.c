// latent_attention.c - attention of incremental decoding, on the compressed latent cache of MLA.
//
// One task a head and row. Scores of long sequences go through a running maximum in blocks of positions, so that the
// scratch does not grow with the sequence.
#include <math.h>

#include "cpu/row_io.h"

#define POSITIONS 256 // scores held at a time

typedef struct latent_args {
    dpl_latent_attention a;
    dpl_mat out;
} latent_args;

typedef struct latent_task {
    dpl_ctx *ctx;
    const latent_args *args;
} latent_task;

// mix (d_latent) = softmax(scores) latent, over positions 0 .. n-1.
static void attend(const dpl_row_kernels *k, const dpl_latent_attention *a, const float *q_latent,
                   const float *q_rope, size_t n, float *mix)
{
    float score[POSITIONS], top = -INFINITY, total = 0;
    memset(mix, 0, a->d_latent * sizeof *mix);
    for (size_t p0 = 0; p0 < n; p0 += POSITIONS) {
        const size_t count = DPL_MIN(POSITIONS, n - p0);
        for (size_t i = 0; i < count; i++)
            score[i] = a->scale *
                       (k->dot(q_latent, a->latent + (p0 + i) * a->d_latent, a->d_latent) +
                        k->dot(q_rope, a->k_rope + (p0 + i) * a->d_rope, a->d_rope));
        const float new_top = fmaxf(top, k->max(score, count)), shrink = expf(top - new_top);
        k->scale(shrink, mix, a->d_latent);
        total = total * shrink + k->exp_sub_sum(score, new_top, score, count);
        for (size_t i = 0; i < count; i++)
            k->axpy(score[i], a->latent + (p0 + i) * a->d_latent, mix, a->d_latent);
        top = new_top;
    }
    k->scale(1 / total, mix, a->d_latent);
}

static void run_head(void *p, size_t i_task, int i_thread)
{
    const latent_task *task = p;
    const dpl_latent_attention *a = &task->args->a;
    const dpl_row_kernels *k = &task->ctx->kernels->rows;
    const size_t row = i_task / a->n_heads, h = i_task % a->n_heads, d_q = a->d_nope + a->d_rope;
    const float *kv_b = a->kv_b + h * (a->d_nope + a->d_v) * a->d_latent;
    float *q_latent = dpl_ctx_scratch(task->ctx, i_thread);
    float *mix = q_latent + a->d_latent, *q_copy = mix + a->d_latent, *out_copy = q_copy + d_q;
    const float *q = dpl_row_load(k, dpl_mat_at(a->q, 0, h * d_q), row, d_q, q_copy);

    memset(q_latent, 0, a->d_latent * sizeof *q_latent);
    for (size_t j = 0; j < a->d_nope; j++)
        k->axpy(q[j], kv_b + j * a->d_latent, q_latent, a->d_latent);
    attend(k, a, q_latent, q + a->d_nope, a->first + row + 1, mix);
    const dpl_mat out = dpl_mat_at(task->args->out, 0, h * a->d_v);
    float *y = dpl_row_target(out, row, out_copy);
    for (size_t j = 0; j < a->d_v; j++)
        y[j] = k->dot(kv_b + (a->d_nope + j) * a->d_latent, mix, a->d_latent);
    dpl_row_store(k, out, row, y, a->d_v);
}

static void run_latent(dpl_ctx *ctx, const void *p)
{
    const latent_args *args = p;
    latent_task task = {ctx, args};
    dpl_pool_run(ctx->pool, args->a.n_rows * args->a.n_heads, run_head, &task);
}

void dpl_latent_attention_forward(dpl_ctx *ctx, const dpl_latent_attention *a, dpl_mat out)
{
    const latent_args args = {*a, out};
    const dpl_span span = dpl_row_span(out, a->n_rows, a->n_heads * a->d_v);
    dpl_ctx_submit(ctx, run_latent, &args, sizeof args, &span, 1);
}
