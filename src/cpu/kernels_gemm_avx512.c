/*
 * kernels_gemm_avx512.c - the grouped GEMM's tile product and packing with 512-bit vectors.
 *
 * A tile is 14 x 32: 28 accumulators, two vectors of the right panel and a broadcast of the left
 * fill the 32 registers. Each row count has its own copy, so that few rows cost few instructions.
 */
#include <immintrin.h>

#include "cpu/kernels.h"

#define MR 14
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

static inline __mmask16 mask_of(size_t n) {
    return (__mmask16)(n >= 16 ? 0xffffu : (1u << n) - 1);
}

// Accumulators have names, not an index: clang keeps an array of 28 in memory.
#define EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13)
#define ZERO(i) __m512 acc0_##i = _mm512_setzero_ps(), acc1_##i = acc0_##i;
#define PREFETCH(i)                                                  \
    if (i < m) {                                                     \
        _mm_prefetch((const char *)(c + i * ldc), _MM_HINT_T0);      \
        _mm_prefetch((const char *)(c + i * ldc + 16), _MM_HINT_T0); \
    }
#define STEP(i)                                       \
    if (i < m) {                                      \
        const __m512 ai = _mm512_set1_ps(a[i]);       \
        acc0_##i = _mm512_fmadd_ps(ai, b0, acc0_##i); \
        acc1_##i = _mm512_fmadd_ps(ai, b1, acc1_##i); \
    }
#define STORE(i)                                                                       \
    if (i < m) {                                                                       \
        float *ci = c + i * ldc;                                                       \
        if (add) {                                                                     \
            acc0_##i = _mm512_add_ps(_mm512_maskz_loadu_ps(mask0, ci), acc0_##i);      \
            acc1_##i = _mm512_add_ps(_mm512_maskz_loadu_ps(mask1, ci + 16), acc1_##i); \
        }                                                                              \
        _mm512_mask_storeu_ps(ci, mask0, acc0_##i);                                    \
        _mm512_mask_storeu_ps(ci + 16, mask1, acc1_##i);                               \
    }

static inline __attribute__((always_inline)) void tile_rows(size_t m, size_t n, size_t kc,
                                                            const float *a, const float *b,
                                                            float *c, size_t ldc, bool add,
                                                            dpl_gemm_ahead ahead) {
    const char *fetch = ahead.p;
    size_t left = ahead.run;
    const __mmask16 mask0 = mask_of(n), mask1 = mask_of(n > 16 ? n - 16 : 0);
    EACH(ZERO)
    EACH(PREFETCH) // Also when c is only written: its lines arrive before they are needed.
    for (size_t l = 0; l < kc; ++l, a += m, b += 32) {
        _mm_prefetch(fetch, _MM_HINT_T1);
        fetch += --left ? ahead.step : ahead.jump;
        left = left ? left : ahead.run;
        const __m512 b0 = _mm512_loadu_ps(b), b1 = _mm512_loadu_ps(b + 16);
        EACH(STEP)
    }
    EACH(STORE)
}

static void tile_avx512(size_t m, size_t n, size_t kc, const float *a, const float *b, float *c,
                        size_t ldc, bool add, dpl_gemm_ahead ahead) {
    switch (m) {
#define ROWS(i)                                        \
    case i:                                            \
        tile_rows(i, n, kc, a, b, c, ldc, add, ahead); \
        break;
        ROWS(1)
        ROWS(2)
        ROWS(3)
        ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12) ROWS(13) ROWS(14)
#undef ROWS
    }
}

// fp32 bits of 16 bf16; round to nearest even, NaN made quiet, as dpl_f32_to_bf16 does.
static inline __m512i expand16(__m256i h) {
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
}

static inline __m256i round16(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    rounded = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), high,
                                   _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(rounded);
}

static inline __m512 load16(dpl_gemm_load load, __mmask16 mask, const void *src, size_t i) {
    if (load == DPL_LOAD_BF16) {
        return _mm512_castsi512_ps(
            expand16(_mm256_maskz_loadu_epi16(mask, (const uint16_t *)src + i)));
    }
    const __m512 x = _mm512_maskz_loadu_ps(mask, (const float *)src + i);
    return load == DPL_LOAD_F32 ? x : _mm512_castsi512_ps(expand16(round16(x)));
}

static inline __m512 pair_lo(__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}

static inline __m512 pair_hi(__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}

static inline __attribute__((always_inline)) void transpose16(__m512 r[16]) {
    __m512 t[16];
    UNROLL for (int i = 0; i < 16; i += 4) { // 4x4 blocks inside each 128-bit lane
        const __m512 lo0 = _mm512_unpacklo_ps(r[i], r[i + 1]);
        const __m512 hi0 = _mm512_unpackhi_ps(r[i], r[i + 1]);
        const __m512 lo1 = _mm512_unpacklo_ps(r[i + 2], r[i + 3]);
        const __m512 hi1 = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
        t[i] = pair_lo(lo0, lo1);
        t[i + 1] = pair_hi(lo0, lo1);
        t[i + 2] = pair_lo(hi0, hi1);
        t[i + 3] = pair_hi(hi0, hi1);
    }
    UNROLL for (int i = 0; i < 4; ++i) { // then the 4x4 lanes
        const __m512 x0 = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88);
        const __m512 x1 = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
        const __m512 y0 = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88);
        const __m512 y1 = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
        r[i] = _mm512_shuffle_f32x4(x0, y0, 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(x0, y0, 0xdd);
        r[i + 4] = _mm512_shuffle_f32x4(x1, y1, 0x88);
        r[i + 12] = _mm512_shuffle_f32x4(x1, y1, 0xdd);
    }
}

static inline __attribute__((always_inline)) void pack_rows_as(dpl_gemm_load load, size_t m,
                                                               size_t kc, const void *src,
                                                               size_t ld, size_t w, float *dst) {
    for (size_t i0 = 0; i0 < w; i0 += 16) {
        const __mmask16 out = mask_of(w - i0);
        for (size_t l0 = 0; l0 < kc; l0 += 16) {
            const __mmask16 in = mask_of(kc - l0);
            __m512 r[16];
            UNROLL for (size_t i = 0; i < 16; ++i) {
                const bool real = i0 + i < m;
                r[i] = load16(load, real ? in : 0, src, real ? (i0 + i) * ld + l0 : 0);
            }
            transpose16(r);
            float *d = dst + l0 * w + i0;
            if (kc - l0 >= 16) {
                UNROLL for (size_t l = 0; l < 16; ++l) _mm512_mask_storeu_ps(d + l * w, out, r[l]);
            } else {
                for (size_t l = 0; l < kc - l0; ++l) _mm512_mask_storeu_ps(d + l * w, out, r[l]);
            }
        }
    }
}

static void pack_rows_avx512(dpl_gemm_load load, size_t m, size_t kc, const void *src, size_t ld,
                             size_t w, float *dst) {
    if (load == DPL_LOAD_F32) pack_rows_as(DPL_LOAD_F32, m, kc, src, ld, w, dst);
    else if (load == DPL_LOAD_BF16) pack_rows_as(DPL_LOAD_BF16, m, kc, src, ld, w, dst);
    else pack_rows_as(DPL_LOAD_ROUNDED, m, kc, src, ld, w, dst);
}

static inline __attribute__((always_inline)) void pack_cols_as(dpl_gemm_load load, size_t m,
                                                               size_t kc, const void *src,
                                                               size_t ld, size_t w, float *dst) {
    for (size_t i0 = 0; i0 < w; i0 += 16) {
        const __mmask16 out = mask_of(w - i0), in = m > i0 ? mask_of(m - i0) : 0;
        for (size_t l = 0; l < kc; ++l) {
            _mm512_mask_storeu_ps(dst + l * w + i0, out, load16(load, in, src, l * ld + i0));
        }
    }
}

static void pack_cols_avx512(dpl_gemm_load load, size_t m, size_t kc, const void *src, size_t ld,
                             size_t w, float *dst) {
    if (load == DPL_LOAD_F32) pack_cols_as(DPL_LOAD_F32, m, kc, src, ld, w, dst);
    else if (load == DPL_LOAD_BF16) pack_cols_as(DPL_LOAD_BF16, m, kc, src, ld, w, dst);
    else pack_cols_as(DPL_LOAD_ROUNDED, m, kc, src, ld, w, dst);
}

static double peak_fma_avx512(size_t n_rounds, float *sink) {
    __m512 acc[24];
    const __m512 scale = _mm512_set1_ps(sink[32]), shift = _mm512_set1_ps(sink[33]);
    UNROLL for (int i = 0; i < 24; ++i) acc[i] = _mm512_set1_ps(sink[i]);
    for (size_t round = 0; round < n_rounds; ++round) {
        UNROLL for (int i = 0; i < 24; ++i) acc[i] = _mm512_fmadd_ps(acc[i], scale, shift);
    }
    UNROLL for (int i = 0; i < 24; ++i) sink[i] = _mm512_cvtss_f32(acc[i]);
    return (double)n_rounds * 24 * 16 * 2;
}

void dpl_gemm_kernels_avx512(dpl_gemm_kernels *k) {
    k->name = "f32_avx512";
    k->mr = MR;
    k->tile = tile_avx512;
    k->pack_rows = pack_rows_avx512;
    k->pack_cols = pack_cols_avx512;
    k->peak_fma = peak_fma_avx512;
}
