// kernels.h - the kernel tables: one set of single-threaded functions for each CPU level.
//
// The plain-C table is the definition of right; the others differ from it within rounding. Block
// sizes travel with the kernels, so no caller asks which CPU it runs on.
#pragma once

#include "base/base.h"

/* ---- grouped GEMM ---------------------------------------------------------------------------- */
// One tile product serves forward, dgrad and wgrad; what differs is only how its two operands are
// packed. Every element of a tile is one chain over the contraction that starts at zero, whatever
// m and n are: so the bits of a row do not depend on the rows that share its tile.
#define DPL_GEMM_KC 256 // the longest chain; the same at every level

// How an element becomes fp32 while it is packed.
typedef enum dpl_gemm_load {
    DPL_LOAD_F32,
    DPL_LOAD_BF16,   // exact
    DPL_LOAD_ROUNDED // F32 rounded to bf16: the numeric class of bf16 operands
} dpl_gemm_load;

// What a tile product fetches into L2 on its way, for a later one: a line at p, then p moves on by
// `step` bytes, but each time that `run` steps are done by `jump` bytes.
typedef struct dpl_gemm_ahead {
    const void *p;
    size_t step, run, jump;
} dpl_gemm_ahead;

typedef struct dpl_gemm_kernels {
    size_t mr; // the most rows that a tile may have
    // c[i*ldc + j] (+= if add, else =) sum over l of a[l*m + i] * b[l*32 + j], for i < m <= mr and
    // j < n <= 32. Only n columns of c are touched; b has 32.
    void (*tile)(size_t m, size_t n, size_t kc, const float *a, const float *b, float *c,
                 size_t ldc, bool add, dpl_gemm_ahead ahead);
    // dst[l*w + i] = src[i*ld + l] for i < m, l < kc, and 0 for m <= i < w.
    void (*pack_rows)(dpl_gemm_load load, size_t m, size_t kc, const void *src, size_t ld, size_t w,
                      float *dst);
    // dst[l*w + i] = src[l*ld + i] for i < m, l < kc, and 0 for m <= i < w.
    void (*pack_cols)(dpl_gemm_load load, size_t m, size_t kc, const void *src, size_t ld, size_t w,
                      float *dst);
    // Register-resident chains x = x * sink[32] + sink[33] of this level's widest multiply-add,
    // from and to sink[0..31]; returns the operations done.
    double (*peak_fma)(size_t n_rounds, float *sink);
} dpl_gemm_kernels;

/* ---- rows: fp32 loops over a row or a chunk -------------------------------------------------- */
// Every kernel takes any n, 0 included, and any alignment. An output may be the same array as an
// input, never shifted against it. Reductions add in 16 (fp64: 8) lanes of fixed meaning, combined
// in a fixed order.
struct dpl_adamw; // ops.h

typedef struct dpl_row_kernels {
    float (*max)(const float *x, size_t n); // -inf for n = 0; NaNs are passed over
    float (*dot)(const float *x, const float *y, size_t n);
    double (*sum_f64)(const float *x, bool squares, size_t n);

    void (*axpy)(float a, const float *x, float *y, size_t n); // y += a * x
    void (*add)(const float *a, const float *b, float *y, size_t n);
    void (*scale)(float a, float *x, size_t n);
    // y = exp(x - sub), returns the sum of y. exp is good to 2 ulp; -inf gives 0, NaN gives NaN.
    float (*exp_sub_sum)(const float *x, float sub, float *y, size_t n);
    void (*sigmoid)(const float *x, float *y, size_t n);

    void (*to_bf16)(const float *x, uint16_t *y, size_t n); // to nearest even, NaN stays NaN
    // The same with elements 32 apart as pairs: y[2j + h] of each 64 is x[32h + j]. n: whole 64s.
    void (*to_bf16_pairs)(const float *x, uint16_t *y, size_t n);
    void (*from_bf16)(const uint16_t *x, float *y, size_t n);

    // RMSNorm. y = x * rstd * gain
    void (*norm_forward)(const float *x, const float *gain, float rstd, float *y, size_t n);
    // sum of dy * gain * x
    float (*norm_dot)(const float *dy, const float *gain, const float *x, size_t n);
    // dx (= or +=) rstd * dy * gain - c * x;   dgain += dy * x * rstd
    void (*norm_backward)(const float *dy, const float *gain, const float *x, float rstd, float c,
                          bool accumulate, float *dx, float *dgain, size_t n);

    // Rotation of the n pairs (x[2i], x[2i+1]) or (x[i], x[i+n]) by (cos[i], sign * sin[i]).
    void (*rope)(const float *cos, const float *sin, float sign, bool interleaved, float *x,
                 size_t n);

    // gate_up: blocks of 16 gate and 16 up columns, whole blocks always. h (f) = silu(g) * u * w
    void (*swiglu_forward)(const float *gate_up, float w, float *h, size_t f);
    // dgate_up, padding 0; returns the sum of dh * silu(g) * u
    float (*swiglu_backward)(const float *dh, const float *gate_up, float w, float *dgate_up,
                             size_t f);

    void (*adamw)(const struct dpl_adamw *a, const float *grad, float *param, float *m, float *v,
                  size_t n);
} dpl_row_kernels;

/* ---- levels ---------------------------------------------------------------------------------- */
typedef struct dpl_kernels {
    dpl_gemm_kernels gemm;
    dpl_row_kernels rows;
} dpl_kernels;

extern const dpl_kernels dpl_kernels_ref, dpl_kernels_avx2, dpl_kernels_avx512;
const dpl_kernels *dpl_cpu_kernels(dpl_cpu_level level);
