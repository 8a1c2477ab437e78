// kernels.h - the kernel tables: one set of single-threaded functions for each CPU level.
//
// The plain-C table is the definition of right; the others differ from it within rounding. Block
// sizes travel with the kernels, so no caller asks which CPU it runs on.
#pragma once

#include "base/base.h"

#define INLINE static inline __attribute__((always_inline)) // in kernels_*

/* ---- grouped GEMM ---------------------------------------------------------------------------- */
// One tile product serves forward, dgrad and wgrad; what differs is only how its two operands are
// packed. There are three classes of arithmetic, by the type of the operands:
//   F32   each element of a tile is one chain of multiply-adds over the contraction l, from zero
//   BF16  the same over l in the order 1, 0, 3, 2, ...: that of VDPBF16PS, with subnormals as zero;
//         levels with tiles: of each 32 l an even and an odd chain from zero, whose sum is added
//   NV    of NVFP4, at levels without tiles: of each 16 l the sum in integers, times both scales,
//         which is exact so far; those in a chain from zero: the same bits at all levels
// in products of at most DPL_GEMM_KC (BF16: twice that) of the contraction, added in order, and
// whatever the sizes are: so the bits of a row do not depend on the rows that share its tile.
//
// The packed right operand is [l][32] in F32, and pairs [l / 2][32][2] of bf16 in BF16: as weights
// are held, which are used in place. Packed, a contraction of odd length (or one that `depth` of
// the class does not divide, on the left) has zeros after it.

#define DPL_GEMM_KC    256
#define DPL_GEMM_BLOCK ((size_t)512 << 10) // half of the smallest L2 of today's servers

// What a tile product fetches into L2 on its way, for a later one: at each `fetch` l (of the class)
// `each` lines. The first at p; then p moves on by `step` bytes, but each time that `run` lines (a
// multiple of `each`) are done by `jump` bytes.
typedef struct dpl_gemm_ahead {
    const void *p;
    size_t step, run, jump, each;
} dpl_gemm_ahead;

// How an element is read while it is packed.
typedef enum dpl_gemm_load {
    DPL_LOAD_F32,   // as it is in class F32; rounded to nearest even bf16 in BF16
    DPL_LOAD_BF16,  // exact in both
    DPL_LOAD_PART2, // BF16 only, of F32: what the rounding left, rounded
    DPL_LOAD_PART3  // and what that left, rounded
} dpl_gemm_load;

// Rows: element (i, l) is src[i * ld + l]. Columns: src[l * ld + i]. For i < m and l < kc; the rest
// up to w (32 on the right, m on the left) is 0.
typedef void (*dpl_gemm_packer)(dpl_gemm_load load, size_t m, size_t kc, const void *src, size_t ld,
                                size_t w, void *dst);

typedef struct dpl_gemm_kernels {
    const char *name;
    size_t mr;    // the most rows that a tile may have
    size_t kc;    // the longest contraction of one product; longer ones are added in order
    size_t depth; // a packed left operand is padded to a multiple of this
    size_t left_bytes, right_bytes; // of a packed element; right: 4 in F32, 2 in BF16
    size_t fetch;                   // the l of one step of dpl_gemm_ahead
    size_t block_bytes;             // of packed left operand that are kept in L2
    size_t pages;                   // in which a stream of weights is best fetched in turn
    // c[i*ldc + j] (+= if add, else =) the product of i < m <= mr and j < 32 over kc.
    void (*tile)(size_t m, size_t kc, const void *a, const void *b, float *c, size_t ldc, bool add,
                 dpl_gemm_ahead ahead);
    dpl_gemm_packer left_rows, left_cols, right_rows, right_cols;
    // right_rows where src is itself pairs [i / 2][ld][2] of bf16 (NULL in F32); 32 divides kc.
    dpl_gemm_packer right_pairs;
    // Rows of a panel c (m, 32): n columns of each from or to a matrix.
    void (*take)(size_t m, size_t n, const float *src, size_t ld, float *c);
    void (*put)(size_t m, size_t n, const float *c, dpl_dtype dtype, void *dst, size_t ld);
    // put past the caches, for results of which a product has more than stream_bytes; 0: never
    void (*put_past)(size_t m, size_t n, const float *c, dpl_dtype dtype, void *dst, size_t ld);
    size_t stream_bytes;
    // What a thread does before and after products of this class (NULL: nothing).
    unsigned (*enter)(void);
    void (*leave)(unsigned entered);
    bool flushes; // in between all arithmetic takes subnormals as zero
    // Register-resident multiply-adds of the kind that `tile` uses, from and to sink[0..31];
    // returns the operations done.
    double (*peak)(size_t n_rounds, float *sink);
    // Class NV alone: codes and scales of m rows over kc (NULL: a row of zeros), and in place of
    // `tile` their product with a weight's, as those lie there (ops.h). c has 32 columns a row.
    void (*nv_pack)(size_t m, size_t kc, const uint8_t *const *codes, const uint8_t *const *scales,
                    void *dst);
    void (*nv_tile)(size_t m, size_t kc, const void *a, const uint8_t *codes, const uint8_t *scales,
                    float *c, bool add);
} dpl_gemm_kernels;

INLINE unsigned dpl_gemm_enter(const dpl_gemm_kernels *g) {
    return g->enter ? g->enter() : 0;
}
INLINE void dpl_gemm_leave(const dpl_gemm_kernels *g, unsigned entered) {
    if (g->leave) g->leave(entered);
}

/* ---- rows: fp32 loops over a row or a chunk -------------------------------------------------- */
// Every kernel takes any n, 0 included, and any alignment. An output may be the same array as an
// input, never shifted against it. Reductions add in 16 (fp64: 8) lanes of fixed meaning, combined
// in a fixed order.
struct dpl_adamw; // ops.h

// A block of attention scores, n rows of 32 columns. A query sees the keys of its segment that are
// not later; what it does not see counts as a score of -inf.
typedef struct dpl_scores {
    float scale;                                 // > 0
    int32_t key_minus_query;                     // positions of the first key and the first query
    const int32_t *row_segment, *column_segment; // NULL: all one segment
    const float *lse, *delta;                    // of each row; backward only
} dpl_scores;

// n rows of SwiGLU. gate_up, of out's type: blocks of 16 gate and 16 up columns, whole ones always.
typedef struct dpl_swiglu {
    dpl_dtype dtype;
    size_t n, f;
    const void *gate_up;
    void *out;
    size_t ld, ld_out;
    const float *weight; // of each row; NULL: 1
    float *sums;         // of each row, `step` apart; backward only; NULL: not wanted
    size_t step;
} dpl_swiglu;

typedef struct dpl_row_kernels {
    float (*max)(const float *x, size_t n); // -inf for n = 0; NaNs are passed over
    float (*dot)(const float *x, const float *y, size_t n);
    float (*dot_as)(dpl_dtype x_type, const void *x, dpl_dtype y_type, const void *y, size_t n);
    double (*sum_f64)(const float *x, bool squares, size_t n);

    void (*axpy)(float a, const float *x, float *y, size_t n); // y += a * x
    void (*add)(const float *a, const float *b, float *y, size_t n);
    void (*scale)(float a, float *x, size_t n);
    // y (= or +=) the sum of n elements of each row, of one type, added in order; n_rows > 0
    void (*sum_rows)(dpl_dtype type, const void *const *rows, size_t n_rows, bool accumulate,
                     float *y, size_t n);
    // y = exp(x - sub), returns the sum of y. exp is good to 2 ulp; -inf gives 0, NaN gives NaN.
    float (*exp_sub_sum)(const float *x, float sub, float *y, size_t n);
    void (*sigmoid)(const float *x, float *y, size_t n);

    void (*to_bf16)(const float *x, uint16_t *y, size_t n); // to nearest even, NaN stays NaN
    // The same with elements 32 apart as pairs: y[2j + h] of each 64 is x[32h + j]. n: whole 64s.
    void (*to_bf16_pairs)(const float *x, uint16_t *y, size_t n);
    void (*from_bf16)(const uint16_t *x, float *y, size_t n);

    // RMSNorm. y = x * rstd * gain
    void (*norm_forward)(const float *x, const float *gain, float rstd, float *y, size_t n);
    // y = a + b, returns dot(y, y), to the bit
    float (*add_squares)(const float *a, const float *b, float *y, size_t n);
    // sum of dy * gain * x
    float (*norm_dot)(const float *dy, const float *gain, const float *x, size_t n);
    // dx (= or +=) rstd * dy * gain - c * x;   dgain += dy * x * rstd
    void (*norm_backward)(const float *dy, const float *gain, const float *x, float rstd, float c,
                          bool accumulate, float *dx, float *dgain, size_t n);

    // Rotation of the n pairs (x[2i], x[2i+1]) or (x[i], x[i+n]) by (cos[i], sign * sin[i]).
    void (*rope)(const float *cos, const float *sin, float sign, bool interleaved, float *x,
                 size_t n);

    // out (f) = h = silu(gate) * up * weight
    void (*swiglu_forward)(const dpl_swiglu *b);
    // out = dgate_up, padding 0; sums: of dh * silu(gate) * up. dh: (n, 32), f <= 32
    void (*swiglu_backward)(const dpl_swiglu *b, const float *dh);

    // Attention: rows are keys, columns queries. Scores become p = exp(scale * (score - max)), max
    // the largest so far, 0 where that is below 2^-125: in place, or in `pairs` with each two rows
    // as pairs of bf16 (an odd last row and 0). max, sum: of each column so far, from -inf and 0
    // on; shrink: what sums from before are to be multiplied by. Returns whether one is not 1.
    bool (*softmax)(const dpl_scores *b, size_t n, float *score, uint16_t *pairs, float *max,
                    float *sum, float *shrink);
    // Rows are queries, columns keys. score becomes p = exp(scale * score - lse), dp becomes
    // d = p * (dp - delta) * scale: in place, or in bf16, where subnormals may be 0: both as pairs
    // of rows, and d as rows, too.
    void (*softmax_backward)(const dpl_scores *b, size_t n, float *score, float *dp,
                             uint16_t *p_pairs, uint16_t *d_pairs, uint16_t *d_rows);
    void (*scale_columns)(const float *factor, float *x, size_t n); // x (n, 32) *= factor (32)

    void (*adamw)(const struct dpl_adamw *a, const float *grad, float *param, float *m, float *v,
                  size_t n);
} dpl_row_kernels;

/* ---- low precision --------------------------------------------------------------------------- */
// Every level gives the bits that the definitions of base/formats.c give.

// A block of a matrix as MXFP8: codes in the places of its elements, and a scale for each 32.
typedef struct dpl_mx_block {
    dpl_code format; // DPL_E4M3 or DPL_E5M2
    dpl_scale_rule rule;
    dpl_dtype dtype;
    size_t m, n;
    const void *x;
    uint8_t *codes, *scales;
    size_t ld, ld_codes, ld_scales;
    size_t ahead; // columns only: what lies so many bytes behind each number is fetched; 0: nothing
} dpl_mx_block;

// Rows as NVFP4: blocks of 16 along each row. A byte has the codes of two columns, the even one in
// its low half.
typedef struct dpl_nv_rows {
    dpl_dtype dtype;
    size_t m, n;
    const void *x;
    const float *tensor_scale; // of each row
    uint8_t *codes, *scales;
    size_t ld, ld_codes, ld_scales; // ld_codes: bytes
    // Rounding is by chance: element (r, c) has the random bits of first + r * ld_random + c, where
    // 128 divides first and ld_random. NULL: to nearest even.
    const uint64_t *seed_stream;
    uint64_t first;
    size_t ld_random;
} dpl_nv_rows;

// Up to 16 rows as NVFP4 down the columns, rotated (ops.h): rows after the m-th are zeros.
typedef struct dpl_nv_columns {
    dpl_dtype dtype;
    size_t m, n;
    const void *rows[16]; // NULL: zeros
    uint16_t signs;
    float *tensor_scale;     // (n)
    uint8_t *codes, *scales; // (8, n) of two rows each, (n)
    size_t ld_codes;
    // As of dpl_nv_rows; 128 divides ld_random and first.
    const uint64_t *seed_stream;
    uint64_t first;
    size_t ld_random;
} dpl_nv_columns;

typedef struct dpl_quant_kernels {
    void (*encode)(dpl_code format, const float *x, uint8_t *codes, size_t n); // a byte each
    void (*decode)(dpl_code format, const uint8_t *codes, float *x, size_t n);
    // Blocks along the rows, each row's last one of what is left: scales (m, ceil(n / 32)).
    void (*mx_rows)(const dpl_mx_block *b);
    // Blocks down the columns, of all m <= 32 rows: scales (n).
    void (*mx_columns)(const dpl_mx_block *b);
    // bf16 numbers of MXFP8 codes, exact but where bf16 has no such exponent. A code that is not
    // finite has the scale of NaN. Of weights: blocks of 32 x 32 as pairs, [block][16][32][2], with
    // a scale for each column, [block][32]. What lies so far ahead of a code is fetched.
    void (*expand_pairs)(dpl_code format, size_t n_blocks, const uint8_t *codes,
                         const uint8_t *scales, uint16_t *y, ptrdiff_t ahead);
    // Of rows (m, n) with a scale for each column; of a row with one for each 32.
    void (*expand_columns)(dpl_code format, size_t m, size_t n, const uint8_t *codes, size_t ld,
                           const uint8_t *scales, uint16_t *y, size_t ld_y);
    void (*expand_row)(dpl_code format, size_t n, const uint8_t *codes, const uint8_t *scales,
                       uint16_t *y);
    float (*amax)(dpl_dtype dtype, const void *x, size_t n); // 0 for n = 0; NaN if one is
    // The last block of a row, and its last byte, of what is left: scales (m, ceil(n / 16)).
    void (*nv_rows)(const dpl_nv_rows *b);
    // The larger of amax (n) and the magnitudes of each rotated column; NaN if one is.
    void (*nv_columns_amax)(const dpl_nv_columns *b, float *amax);
    void (*nv_columns)(const dpl_nv_columns *b);
    // A block of 16 x 16 of a weight's panel, rows ld apart, with one scale, which is returned; 128
    // bytes of codes as they lie in a weight (ops.h), and of the transposed block.
    uint8_t (*nv_weight)(const float *x, size_t ld, float tensor_scale, uint8_t *codes,
                         uint8_t *transposed);
    // bf16 of codes and scales of blocks, without the tensor scale: exact. Of weights: blocks of 16
    // x 32 as pairs, [block][8][32][2], with two scales each; of 16 rows (16, n); of a row (n).
    void (*nv_expand_pairs)(size_t n_blocks, const uint8_t *codes, const uint8_t *scales,
                            uint16_t *y, ptrdiff_t ahead);
    void (*nv_expand_columns)(size_t n, const uint8_t *codes, size_t ld, const uint8_t *scales,
                              uint16_t *y, size_t ld_y);
    void (*nv_expand_row)(size_t n, const uint8_t *codes, const uint8_t *scales, uint16_t *y);
    // y (m, 32) = (or +=, in one rounding) sums (m, 32) * rows (m) * columns (32). y may be sums.
    void (*nv_scale)(size_t m, const float *sums, const float *rows, const float *columns, bool add,
                     float *y);
} dpl_quant_kernels;

/* ---- levels ---------------------------------------------------------------------------------- */
typedef struct dpl_kernels {
    dpl_gemm_kernels gemm[2]; // by dpl_dtype: the class
    dpl_gemm_kernels nv;      // nv_tile NULL: products of NVFP4 are those of the bf16 it expands to
    dpl_gemm_kernels same[2]; // name NULL, or another one with the same bits: the faster is chosen
    dpl_row_kernels rows;
    dpl_quant_kernels quant;
} dpl_kernels;

// What packs results, and sizes, are those of bf16.
INLINE void dpl_set_nv_gemm(dpl_kernels *k, const char *name, size_t mr,
                            void (*pack)(size_t, size_t, const uint8_t *const *,
                                         const uint8_t *const *, void *),
                            void (*tile)(size_t, size_t, const void *, const uint8_t *,
                                         const uint8_t *, float *, bool)) {
    k->nv = k->gemm[DPL_BF16];
    k->nv.name = name;
    k->nv.mr = mr;
    k->nv.depth = 16;
    k->nv.left_bytes = 2;
    k->nv.tile = NULL;
    k->nv.nv_pack = pack;
    k->nv.nv_tile = tile;
    k->nv.enter = NULL;
    k->nv.leave = NULL;
    k->nv.flushes = false;
}

// Each level sets what it has; what it lacks stays as the level below left it.
void dpl_kernels_ref(dpl_kernels *k), dpl_kernels_ref_quant(dpl_kernels *k);
void dpl_kernels_avx2(dpl_kernels *k);
void dpl_kernels_avx512(dpl_kernels *k), dpl_kernels_avx512_bf16(dpl_kernels *k);
void dpl_kernels_amx(dpl_kernels *k), dpl_kernels_tiles(dpl_kernels *k);
// The kernels of a level; among those with the same bits the first.
void dpl_cpu_kernels(dpl_cpu_level level, dpl_kernels *k_out);
// Measures for a few milliseconds and puts the faster of two with the same bits into gemm[].
void dpl_cpu_kernels_choose(dpl_kernels *k);
