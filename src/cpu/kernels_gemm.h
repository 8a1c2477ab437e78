// kernels_gemm.h - single-threaded pieces of the grouped GEMM, with the block sizes that fit them.
//
// One tile product serves forward, dgrad and wgrad; what differs is only how its two operands are
// packed. Every element of a tile is one chain over the contraction that starts at zero, whatever
// m and n are: so the bits of a row do not depend on the rows that share its tile.
#pragma once

#include "base/base.h"

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
    const char *name;
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
