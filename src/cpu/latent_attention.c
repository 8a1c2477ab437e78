// latent_attention.c - attention of incremental decoding, on the compressed latent cache of MLA.
//
// One task a head and row. Scores of long sequences go through a running maximum in blocks of
// positions, so that the scratch does not grow with the sequence.
#include <math.h>

#include "cpu/row_io.h"

#define POSITIONS 256 // scores held at a time

typedef struct latent_args {
    dpl_loop loop; // over rows times heads
    dpl_latent_attention a;
    dpl_mat out;
} latent_args;

// mix (d_latent) = softmax(scores) latent, over positions 0 .. n-1.
static void attend(const dpl_row_kernels *k, const dpl_latent_attention *a, const float *q_latent,
                   const float *q_rope, size_t n, float *mix) {
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

static void attend_head(const void *args, const dpl_part *part) {
    const latent_args *x = args;
    const dpl_latent_attention *a = &x->a;
    const dpl_row_kernels *k = part->k;
    const size_t row = part->first / a->n_heads, h = part->first % a->n_heads;
    const size_t d_q = a->d_nope + a->d_rope;
    const float *kv_b = a->kv_b + h * (a->d_nope + a->d_v) * a->d_latent;
    float *q_latent = part->scratch, *mix = q_latent + a->d_latent;
    float *q_copy = mix + a->d_latent, *out_copy = q_copy + d_q;
    const float *q = dpl_row_load(k, a->q, row, h * d_q, d_q, q_copy);

    memset(q_latent, 0, a->d_latent * sizeof *q_latent);
    for (size_t j = 0; j < a->d_nope; j++)
        k->axpy(q[j], kv_b + j * a->d_latent, q_latent, a->d_latent);
    attend(k, a, q_latent, q + a->d_nope, a->first + row + 1, mix);
    float *y = dpl_row_target(x->out, row, h * a->d_v, out_copy);
    for (size_t j = 0; j < a->d_v; j++)
        y[j] = k->dot(kv_b + (a->d_nope + j) * a->d_latent, mix, a->d_latent);
    dpl_row_store(k, x->out, row, h * a->d_v, y, a->d_v);
}

void dpl_latent_attention_forward(dpl_ctx *ctx, const dpl_latent_attention *a, dpl_mat out) {
    const latent_args args = {{attend_head, a->n_rows * a->n_heads, 1}, *a, out};
    DPL_SUBMIT(ctx, dpl_run_loop, args, dpl_row_span(out, a->n_rows, a->n_heads * a->d_v));
}
