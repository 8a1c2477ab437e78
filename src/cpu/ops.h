// ops.h - the operators of the CPU: grouped GEMM, row movement, routing, attention, elementwise.
//
// Every function submits to the context (ctx.h) and returns at once; arguments were validated by
// the caller when it planned, so nothing here can fail. Sizes are known on the host; what an
// operator itself computes (group offsets, ids) is passed as a pointer and read inside the operator
// only. Same inputs give the same bits for any number of threads, and the bits of a row never
// depend on other rows (except for sums over rows, which go in fixed chunks and fixed order).
#pragma once

#include "base/base.h"
#include "cpu/ctx.h"

// A row-major matrix in memory: row r starts at p + r * ld elements.
typedef struct dpl_mat {
    void *p;
    size_t ld;
    dpl_dtype dtype;
} dpl_mat;

static inline dpl_mat dpl_mat_f32(const float *p, size_t ld) {
    return (dpl_mat){(void *)(uintptr_t)p, ld, DPL_F32};
}
static inline void *dpl_mat_row(dpl_mat m, size_t row) {
    return (uint8_t *)m.p + row * m.ld * dpl_dtype_bytes(m.dtype);
}
static inline dpl_mat dpl_mat_at(dpl_mat m, size_t row, size_t col) {
    m.p = (uint8_t *)m.p + (row * m.ld + col) * dpl_dtype_bytes(m.dtype);
    return m;
}

/* ---- grouped GEMM (gemm.c) -------------------------------------------------------------------
 * A weight of n_groups groups is logically (n_groups, n, k): y = x W^T. In memory a group is a row
 * of panels of DPL_PANEL outputs, [n / 32][k][32], the last panel and an odd k padded with zeros.
 * Master weights, gradients and moments share this order. In BF16 each two rows of a panel are
 * interleaved, [n / 32][k / 2][32][2]: as products of pairs of bf16 want them. */

#define DPL_PANEL 32

typedef struct dpl_quant_weight dpl_quant_weight; // quant.c

typedef struct dpl_weight {
    const void *p;
    dpl_dtype dtype;
    size_t n_groups, n, k;
    float *grad; // of the same shape, in F32; NULL: not wanted
    bool *stale; // grad is of a step before: the next one replaces it; NULL: it adds
    const dpl_quant_weight
        *quant; // products are those of MXFP8 or NVFP4 operands: these codes, and
                // activations and gradients rounded; dtype is BF16, p not used
} dpl_weight;

static inline size_t dpl_panel_depth(size_t k) {
    return dpl_round_up(k, 2);
}
static inline size_t dpl_panel_elems(size_t n, size_t k) {
    return dpl_round_up(n, DPL_PANEL) * dpl_panel_depth(k);
}
// Of element (n, k) in F32.
static inline size_t dpl_panel_index(size_t n, size_t k, size_t k_total) {
    return (n / DPL_PANEL * dpl_panel_depth(k_total) + k) * DPL_PANEL + n % DPL_PANEL;
}

// The place in BF16 of what stands at i in F32.
static inline size_t dpl_pair_index(size_t i) {
    return i / 64 * 64 + i % 32 * 2 + i / 32 % 2;
}

// Rows of group g are offsets[g] .. offsets[g+1]-1, offsets non-decreasing, offsets[0] = 0. Rows
// beyond offsets[n] are neither read nor written. offsets NULL: one group of n_rows.
typedef struct dpl_groups {
    size_t n;
    size_t n_rows;          // all rows, known on the host: offsets[n] <= n_rows
    const int64_t *offsets; // (n + 1), device memory
} dpl_groups;
static inline dpl_groups dpl_one_group(size_t n_rows) {
    return (dpl_groups){1, n_rows, NULL};
}

// Where the rows of x lie: row r in row slot[r] / top_k, a row of zeros where slot[r] < 0; slot
// NULL: in row r. So tokens need not be copied to each of their experts.
typedef struct dpl_row_map {
    const int32_t *slot; // (rows), device memory
    size_t top_k, n_x;   // n_x: rows of x
} dpl_row_map;
#define DPL_NO_ROW SIZE_MAX // a row of zeros
static inline size_t dpl_mapped_row(dpl_row_map map, size_t row) {
    if (!map.slot) return row;
    return map.slot[row] < 0 ? DPL_NO_ROW : (size_t)map.slot[row] / map.top_k;
}

// Operands are used as they are with an F32 weight; with a BF16 weight the activations are rounded
// to bf16 as well. Sums are fp32: chains over k in blocks of a fixed length, added in order
// (kernels.h). With ctx->f32_parts, F32 operands are split: see dpl_ctx.
// y (rows, n) = x (rows, k) W_g^T
void dpl_gemm_forward(dpl_ctx *ctx, dpl_mat x, const dpl_weight *w, dpl_groups groups, dpl_mat y);
// dx (rows, k) = dy (rows, n) W_g, or += with accumulate (dx is then F32)
void dpl_gemm_dgrad(dpl_ctx *ctx, dpl_mat dy, const dpl_weight *w, dpl_groups groups, dpl_mat dx,
                    bool accumulate);

// gate_up (rows, 2 * round_up(f, 16)): blocks of 16 gate, then 16 up columns, in one panel. Gate f
// is column dpl_gate_column(f), its up partner 16 further.
static inline size_t dpl_gate_column(size_t f) {
    return f / 16 * 32 + f % 16;
}
static inline size_t dpl_gate_up_width(size_t f) {
    return 2 * dpl_round_up(f, 16);
}
// gate_up = x W_g^T, and hidden (rows, f), of the same type, = silu(gate) * up * row_weight[row] of
// what is stored there; row_weight NULL: 1.
void dpl_gemm_swiglu_forward(dpl_ctx *ctx, dpl_mat x, dpl_row_map map, const dpl_weight *w,
                             dpl_groups groups, const float *row_weight, dpl_mat gate_up, size_t f,
                             dpl_mat hidden);
// Of dhidden = dy W_g, which is not stored (w: (n, k = f)): dgate_up, of gate_up's type, padding
// columns 0, and drow_weight (rows) = sum over f of dhidden * silu(gate) * up, NULL: not wanted.
void dpl_gemm_swiglu_backward(dpl_ctx *ctx, dpl_mat dy, const dpl_weight *w, dpl_groups groups,
                              const float *row_weight, dpl_mat gate_up, dpl_mat dgate_up,
                              float *drow_weight);

// dw[g] (panels of (n, k), F32) = dy_g^T x_g, or += with accumulate. `operand` BF16 rounds both
// operands first. The padding of an odd k is not written.
void dpl_gemm_wgrad(dpl_ctx *ctx, dpl_mat dy, dpl_mat x, dpl_row_map map, dpl_groups groups,
                    size_t n, size_t k, dpl_dtype operand, bool accumulate, float *dw);
// The same of both operands in codes, in blocks of rows of a group. quant: how; its codes are not
// used.
void dpl_gemm_quant_wgrad(dpl_ctx *ctx, dpl_mat dy, dpl_mat x, dpl_row_map map, dpl_groups groups,
                          size_t n, size_t k, const dpl_quant_weight *quant, bool accumulate,
                          float *dw);
static inline void dpl_weight_grad(dpl_ctx *ctx, dpl_mat dy, dpl_mat x, dpl_row_map map,
                                   dpl_groups groups, const dpl_weight *w) {
    if (!w->grad) return;
    const bool accumulate = !w->stale || !*w->stale;
    if (w->quant)
        dpl_gemm_quant_wgrad(ctx, dy, x, map, groups, w->n, w->k, w->quant, accumulate, w->grad);
    else dpl_gemm_wgrad(ctx, dy, x, map, groups, w->n, w->k, w->dtype, accumulate, w->grad);
    if (w->stale) *w->stale = false;
}
// Row-major (n, k) F32 to the panels of one group (with zero padding), and back.
void dpl_panel_pack(dpl_ctx *ctx, const float *rows, size_t n, size_t k, float *panels);
void dpl_panel_unpack(dpl_ctx *ctx, const float *panels, size_t n, size_t k, float *rows);

/* ---- elementwise (rows.c) -------------------------------------------------------------------- */
// y = x * rstd * gain, rstd (rows) = 1 / sqrt(mean(x^2) + eps) kept for backward.
void dpl_rmsnorm_forward(dpl_ctx *ctx, dpl_mat x, const float *gain, size_t n_rows, size_t d,
                         float eps, dpl_mat y, float *rstd);
// sum (F32) = a + b, and y and rstd of the sum, with the bits of the two operators, but each row is
// taken once. sum may be a or b.
void dpl_add_rmsnorm_forward(dpl_ctx *ctx, dpl_mat a, dpl_mat b, const float *gain, size_t n_rows,
                             size_t d, float eps, dpl_mat sum, dpl_mat y, float *rstd);
// dx = (or +=, accumulate, dx F32) the gradient; dgain (d) +=
void dpl_rmsnorm_backward(dpl_ctx *ctx, dpl_mat dy, dpl_mat x, const float *gain, const float *rstd,
                          size_t n_rows, size_t d, dpl_mat dx, bool accumulate, float *dgain);

// Rotates, in place, columns first .. first+d_rope-1 of each head; head h starts at column
// h * head_stride. cos, sin: (positions, d_rope / 2), attention factor included. Pairs are (2i,
// 2i+1) if interleaved, else (i, i + d_rope/2). inverse: the transpose, for backward.
typedef struct dpl_rope {
    const float *cos, *sin;
    const int32_t *position; // (rows)
    size_t n_heads, head_stride, first, d_rope;
    bool interleaved;
} dpl_rope;
void dpl_rope_apply(dpl_ctx *ctx, const dpl_rope *rope, size_t n_rows, bool inverse, dpl_mat x);

// out = a + b, may be either; a or b with ld 0 is one row for all: a bias. A copy converts between
// element types.
void dpl_add(dpl_ctx *ctx, dpl_mat a, dpl_mat b, size_t n_rows, size_t d, dpl_mat out);
void dpl_copy(dpl_ctx *ctx, dpl_mat src, size_t n_rows, size_t d, dpl_mat dst);
void dpl_zero(dpl_ctx *ctx, void *p, size_t bytes);

// table: row-major (v, d) F32, or panels of (n = v, k = d) when in_panels (tied with the head).
void dpl_embed_forward(dpl_ctx *ctx, const float *table, bool in_panels, const int32_t *ids,
                       size_t n_rows, size_t v, size_t d, dpl_mat y);
// dtable += in row order for each id (no atomics). ids NULL: all 0, as a bias's gradient wants.
void dpl_embed_backward(dpl_ctx *ctx, dpl_mat dy, const int32_t *ids, bool in_panels, size_t n_rows,
                        size_t v, size_t d, float *dtable);

// loss[r] = lse - logit[target], zloss[r] = z * lse^2, both 0 where target < 0. With dscale != 0
// logits become dscale * d(loss + zloss)/dlogits.
void dpl_xent(dpl_ctx *ctx, float *logits, size_t ld, const int32_t *targets, size_t n_rows,
              size_t v, float z, float dscale, float *loss, float *zloss);

/* ---- attention (attention.c) ------------------------------------------------------------------
 * Causal attention of B sequences of S rows. Keys have two parts, as MLA makes them: one per head
 * (d_nope) and a rotated one shared by all (d_rope, which may be 0). Heads of queries may share the
 * keys and values of a head, as in grouped-query attention: H / HK in turn. A query sees the keys
 * of its segment that are not later. Segment 0 is padding: such a query gives 0. */
typedef struct dpl_attention {
    size_t n_batch, n_seq, n_heads, d_nope, d_rope, d_v;
    float scale;
    const int32_t *segment; // (B*S), NULL: all 1
    dpl_mat q;              // (B*S, H*(d_nope+d_rope)): of each head nope, then rope
    dpl_mat kv;             // (B*S, HK*(d_nope+d_v)): of each head key nope, then value
    dpl_mat k_rope;         // (B*S, d_rope)
    size_t n_kv_heads;      // HK, which divides H; 0: H
} dpl_attention;
// out (B*S, H*d_v); lse (B*H*S) = logsumexp of the scaled scores, kept for backward.
void dpl_attention_forward(dpl_ctx *ctx, const dpl_attention *a, dpl_mat out, float *lse);
// dq, dkv, dk_rope are laid out as q, kv, k_rope. dk_rope is F32: the sum over heads, in order.
void dpl_attention_backward(dpl_ctx *ctx, const dpl_attention *a, dpl_mat out, const float *lse,
                            dpl_mat dout, dpl_mat dq, dpl_mat dkv, dpl_mat dk_rope);

// Attention of new rows over the cached latents of one sequence: row i stands at position first + i
// and sees the cache up to there. kv_b (H * (d_nope + d_v), d_latent), row-major F32, is absorbed:
// no key or value is ever expanded.
typedef struct dpl_latent_attention {
    size_t n_rows, first, n_heads, d_nope, d_rope, d_v, d_latent;
    float scale;
    dpl_mat q;                           // (n_rows, H * (d_nope + d_rope))
    const float *kv_b, *latent, *k_rope; // latent (positions, d_latent), k_rope (positions, d_rope)
} dpl_latent_attention;
void dpl_latent_attention_forward(dpl_ctx *ctx, const dpl_latent_attention *a, dpl_mat out);

/* ---- routing and row movement (route.c, rows.c) ---------------------------------------------- */
// DeepSeek-V3's order: score, choice = score + bias, groups, top-K with the lower id first among
// equals, unbiased weights, normalization with +1e-20, scale. Rows with segment 0 get ids -1 and
// weights 0. score (T, E) is kept for backward. *bad_row = the lowest row with a logit that is not
// finite, or -1; its ids are 0..K-1, its weights 0.
void dpl_route_forward(dpl_ctx *ctx, const dpl_route_rule *rule, const float *logits,
                       const float *bias, const int32_t *segment, size_t n_rows, float *score,
                       int32_t *ids, float *weights, int32_t *bad_row);
// dlogits (T, E) = from dweights (T, K).
void dpl_route_backward(dpl_ctx *ctx, const dpl_route_rule *rule, const float *dweights,
                        const int32_t *ids, const float *score, size_t n_rows, float *dlogits);

// Auxiliary losses of one MoE layer. Rows with ids -1 (padding) count nowhere.
typedef enum dpl_balance_kind {
    DPL_BALANCE_SEQUENCE, // MaxText: softmax over the score, per sequence, * E^2
    DPL_BALANCE_BATCH,    // the same with f and P over all rows
    DPL_BALANCE_MEGATRON  // P from score / sum of scores, f from a top-K without bias and groups
} dpl_balance_kind;
typedef struct dpl_aux {
    dpl_balance_kind kind;
    float balance_weight, z_weight; // 0: off; divided by the number of layers where it is a mean
    float dscale;                   // multiplies the gradients
    size_t n_batch, n_seq;
} dpl_aux;
// values_out[0] = balance loss, [1] = router z-loss, each weighted; dlogits (T, E) += dscale *
// their gradient (dlogits NULL: values only).
void dpl_aux_losses(dpl_ctx *ctx, const dpl_route_rule *rule, const dpl_aux *aux,
                    const float *logits, const float *score, const int32_t *ids, double *values_out,
                    float *dlogits);

// The same for a batch (DPL_BALANCE_BATCH) whose rows are spread over several calls, say of ranks:
// each makes sums of its own, theirs are added up, and all the calls together have the losses of
// one that has all rows. Of `aux` the sizes are those of this call's rows.
static inline size_t dpl_aux_n_sums(size_t n_experts) {
    return 2 + 2 * n_experts;
}
void dpl_aux_sums(dpl_ctx *ctx, const dpl_route_rule *rule, const dpl_aux *aux, const float *logits,
                  const float *score, const int32_t *ids, double *sums);
// On the host: what the rows of `own` contribute to the losses of all.
void dpl_aux_part(const dpl_route_rule *rule, const dpl_aux *aux, const double *own,
                  const double *all, double values_out[2]);
// dlogits += dscale * the gradient of the losses of all
void dpl_aux_gradient(dpl_ctx *ctx, const dpl_route_rule *rule, const dpl_aux *aux,
                      const float *logits, const float *score, const int32_t *ids,
                      const double *all, float *dlogits);

// Stable counting sort of the (T, K) ids by expert; slot = t * K + k; ids < 0 are skipped. offsets
// (E + 1); slot_row (T*K): the row of a slot or -1; row_slot (T*K): the slot of a row or -1.
void dpl_permute(dpl_ctx *ctx, const int32_t *ids, size_t n_slots, size_t n_experts,
                 int64_t *offsets, int32_t *slot_row, int32_t *row_slot);
// rows[r] = x[row_slot[r] / K], row_weight[r] = weights[row_slot[r]] (weights NULL: not wanted)
void dpl_gather_rows(dpl_ctx *ctx, dpl_mat x, const float *weights, const int32_t *row_slot,
                     size_t top_k, size_t n_rows, size_t d, dpl_mat rows, float *row_weight);
// y[t] = (or +=, y F32) the sum over k, in slot order, with one rounding, of rows[slot_row[t, k]],
// skipping -1. slot_value[t*K+k] = row_value[row], 0 where -1 (row_value NULL: not wanted).
void dpl_combine_rows(dpl_ctx *ctx, dpl_mat rows, const float *row_value, const int32_t *slot_row,
                      size_t n_tokens, size_t top_k, size_t d, bool accumulate, dpl_mat y,
                      float *slot_value);

// Rows of slots that are spread over the ranks of experts. The row of slot s, with expert
// e = ids[s] >= 0, is number slot_row[s] + place[e].shift of rows[place[e].rank], (., d) of
// `dtype`; a number that belongs to it stands at the same place of values[place[e].rank].
typedef struct dpl_place {
    int64_t shift;
    int64_t rank;
} dpl_place;
typedef struct dpl_spread {
    const int32_t *ids, *slot_row; // (T*K)
    const dpl_place *place;        // (E)
    void *const *rows;             // (R)
    float *const *values;          // (R); NULL: there are none
    dpl_dtype dtype;
} dpl_spread;
// Each slot's row = that of its token, d 0: not wanted; its number = weights[slot], NULL: not
// wanted. Nothing where `rows` of the rank is NULL.
void dpl_scatter_rows(dpl_ctx *ctx, dpl_mat x, const float *weights, const dpl_spread *to,
                      size_t n_tokens, size_t top_k, size_t d);
// As dpl_combine_rows(); slot_value (T*K) = the numbers, 0 where -1, NULL: not wanted.
void dpl_combine_spread(dpl_ctx *ctx, const dpl_spread *from, size_t n_tokens, size_t top_k,
                        size_t d, bool accumulate, dpl_mat y, float *slot_value);

/* ---- quantization (quant.c) -------------------------------------------------------------------
 * MXFP8: each 32 elements along a contraction have a scale (base.h). NVFP4: each 16 have one, and a
 * scale besides that they were multiplied by first, the tensor scale: one for each row along the
 * contraction, so that a row's bits do not depend on others, and one for a weight of a group. Rows
 * and columns are quantized independently of each other, from the numbers. */
#define DPL_MX_BLOCK 32
#define DPL_NV_BLOCK 16

// MXFP8 has a byte for each element, where the element lies. In NVFP4 a byte has two codes that
// follow each other along the contraction, the first in its low half.
typedef struct dpl_codes {
    uint8_t *codes, *scales; // NULL: not wanted
    size_t ld_codes, ld_scales;
    float *tensor_scale; // NVFP4
} dpl_codes;

// Blocks down the columns start anew with each group: its first one is this row of scales. Rows of
// scales between the blocks of two groups are not written.
static inline size_t dpl_first_block(size_t block, size_t group, int64_t first_row) {
    return (size_t)first_row / block + group;
}
static inline size_t dpl_column_blocks(size_t block, size_t n_groups, size_t n_rows) {
    return n_rows / block + n_groups;
}

// x (rows, n), whose rows lie where `map` says, in one pass. by_row: codes (rows, n), scales (rows,
// ceil(n / 32)). by_column: codes (rows, n), scales (column_blocks(), n).
void dpl_mx_quantize(dpl_ctx *ctx, dpl_mat x, dpl_row_map map, dpl_groups groups, size_t n,
                     dpl_code format, dpl_scale_rule rule, dpl_codes by_row, dpl_codes by_column);

// y (rows, n), BF16, of codes and scales by row.
void dpl_mx_expand_rows(dpl_ctx *ctx, dpl_codes by_row, size_t n_rows, size_t n, dpl_code format,
                        dpl_mat y);

// NVFP4 by row: codes (rows, ceil(n / 2)), scales (rows, ceil(n / 16)), tensor_scale (rows).
// seed_stream: rounding by chance, with row r's random bits of its own; NULL: to nearest even.
void dpl_nv_quantize(dpl_ctx *ctx, dpl_mat x, dpl_groups groups, size_t n,
                     const uint64_t seed_stream[2], dpl_codes out);
// NVFP4 down the columns, for weight gradients: each block of 16 rows of a group, zeros after its
// end, is first rotated, which a product of two matrices so made does not see: multiplied by the
// Hadamard matrix / 4, bit i of `signs` meaning that row i is negated before. codes (8 *
// column_blocks(), n) of two rows each, scales (column_blocks(), n), tensor_scale (groups, n).
void dpl_nv_quantize_columns(dpl_ctx *ctx, dpl_mat x, dpl_row_map map, dpl_groups groups, size_t n,
                             uint16_t signs, const uint64_t seed_stream[2], dpl_codes out);

// How the operands of products are rounded. format E2M1 is NVFP4, which has no rules to choose:
// gradients are rounded by chance, and what weight gradients are made of is rotated.
typedef struct dpl_quant_rule {
    dpl_code format, grad_format; // of activations and weights; of gradients of activations
    dpl_scale_rule scale;
} dpl_quant_rule;

// A weight in codes, twice, since its contraction is along k in forward and along n in dgrad. In
// forward they lie as BF16 weights do, in dgrad so do those of the transposed weight; n and k are
// rounded up to multiples of 32, with zeros after their ends.
// MXFP8: codes [group][n / 32][k / 2][32][2], scales [group][n / 32][k / 32][32]; transposed, n and
// k change places.
// NVFP4: blocks of 16 x 16, so both are of the same numbers. codes [group][n / 32][k / 16][2][2]
// [32] words: of a block's eight pairs of rows k the first four, then the others; of 16 columns
// both of a pair; a word has the four pairs' codes, the lowest bits those of the first. scales
// [group][n / 32][k / 16][2], tensor_scale (groups).
enum { DPL_QUANT_FORWARD, DPL_QUANT_DGRAD };
struct dpl_quant_weight {
    dpl_quant_rule rule;
    uint8_t *codes[2], *scales[2];
    float *tensor_scale; // NVFP4
    // NVFP4: where gradients of x, and of the weight, have their random numbers from next. Each has
    // its own count: in which order the two come may depend on what has arrived.
    uint64_t *streams;
};
// Bytes of each of codes[] and of each of scales[].
static inline size_t dpl_quant_code_bytes(dpl_code format, size_t n_groups, size_t n, size_t k) {
    const size_t n_codes = n_groups * dpl_round_up(n, DPL_MX_BLOCK) * dpl_round_up(k, DPL_MX_BLOCK);
    return format == DPL_E2M1 ? n_codes / 2 : n_codes;
}
static inline size_t dpl_quant_scale_bytes(dpl_code format, size_t n_groups, size_t n, size_t k) {
    const size_t n_codes = dpl_quant_code_bytes(DPL_E4M3, n_groups, n, k);
    return n_codes / (format == DPL_E2M1 ? DPL_NV_BLOCK * DPL_NV_BLOCK : DPL_MX_BLOCK);
}
// From panels in F32.
void dpl_quant_weight_pack(dpl_ctx *ctx, const float *panels, size_t n_groups, size_t n, size_t k,
                           const dpl_quant_weight *w_out);

/* ---- optimizer and reductions (optim.c) ------------------------------------------------------ */
typedef struct dpl_adamw {
    double b1, b2; // in fp32 1 - b2 would lose what correct2 keeps
    float lr, eps, eps_root, decay;
    float correct1, correct2; // 1 - b1^n, 1 - b2^n
    float grad_scale;         // the gradient is multiplied by this first (clipping)
} dpl_adamw;
// One pass: moments, update, and the bf16 compute copy if there is one (NULL: none).
void dpl_adamw_step(dpl_ctx *ctx, const dpl_adamw *a, const float *grad, size_t n, float *param,
                    float *m, float *v, uint16_t *copy);
// The same of a weight in panels, n and k of each group, and the codes of its new values.
void dpl_adamw_quantize(dpl_ctx *ctx, const dpl_adamw *a, const float *grad, size_t n_groups,
                        size_t n, size_t k, float *param, float *m, float *v,
                        const dpl_quant_weight *w_out);
// Of x, or of its squares, in fixed chunks, in order. Not finite if any x is not.
void dpl_sum(dpl_ctx *ctx, const float *x, bool squares, size_t n, double *sum_out);
// The copy alone: weights in panels (whose BF16 order it has), n a multiple of 64.
void dpl_to_bf16(dpl_ctx *ctx, const float *x, size_t n, uint16_t *y);

// The multiply-adds of a class of products, between registers, as FLOP/s: the sum of each thread's
// best while all work; 0 without memory (peak.c). With f32_parts: of products made of several.
double dpl_measure_peak(dpl_ctx *ctx, dpl_dtype dtype);
