// kernels_ref.c - all kernels in plain C.
//
// This is the definition of right for the other levels and complete. Products and sums are separate
// operations here (no fused multiply-add), so it agrees with the other levels within rounding only.
#include "cpu/kernels_rows_tmpl.h"

#define MR 4

static void tile(size_t m, size_t n, size_t kc, const float *a, const float *b, float *c,
                 size_t ldc, bool add, dpl_gemm_ahead ahead) {
    (void)ahead;
    float acc[MR][32] = {{0}};
    for (size_t l = 0; l < kc; ++l, a += m, b += 32) {
        for (size_t i = 0; i < m; ++i) {
            for (size_t j = 0; j < 32; ++j) acc[i][j] += a[i] * b[j];
        }
    }
    for (size_t i = 0; i < m; ++i) {
        float *row = c + i * ldc;
        for (size_t j = 0; j < n; ++j) row[j] = add ? row[j] + acc[i][j] : acc[i][j];
    }
}

static inline float load_one(dpl_gemm_load load, const void *src, size_t i) {
    if (load == DPL_LOAD_BF16) return dpl_bf16_to_f32(((const uint16_t *)src)[i]);
    const float x = ((const float *)src)[i];
    return load == DPL_LOAD_F32 ? x : dpl_bf16_to_f32(dpl_f32_to_bf16(x));
}

static void pack_rows(dpl_gemm_load load, size_t m, size_t kc, const void *src, size_t ld, size_t w,
                      float *dst) {
    for (size_t l = 0; l < kc; ++l, dst += w) {
        for (size_t i = 0; i < m; ++i) dst[i] = load_one(load, src, i * ld + l);
        for (size_t i = m; i < w; ++i) dst[i] = 0;
    }
}

static void pack_cols(dpl_gemm_load load, size_t m, size_t kc, const void *src, size_t ld, size_t w,
                      float *dst) {
    for (size_t l = 0; l < kc; ++l, dst += w) {
        for (size_t i = 0; i < m; ++i) dst[i] = load_one(load, src, l * ld + i);
        for (size_t i = m; i < w; ++i) dst[i] = 0;
    }
}

static double peak_fma(size_t n_rounds, float *sink) {
    float acc[32];
    for (size_t j = 0; j < 32; ++j) acc[j] = sink[j];
    const float scale = sink[32], shift = sink[33]; // Read from memory: nothing folds away.
    for (size_t i = 0; i < n_rounds; ++i) {
        for (size_t j = 0; j < 32; ++j) acc[j] = acc[j] * scale + shift;
    }
    for (size_t j = 0; j < 32; ++j) sink[j] = acc[j];
    return (double)n_rounds * 32 * 2;
}

const dpl_kernels dpl_kernels_ref = {{MR, tile, pack_rows, pack_cols, peak_fma}, {ROW_KERNELS}};
