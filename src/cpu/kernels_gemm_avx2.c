/*
 * kernels_gemm_avx2.c - the grouped GEMM's tile product and packing with 256-bit vectors.
 *
 * A tile is 6 x 32, done as two halves of 6 x 16: 12 accumulators, two vectors of the panel and a
 * broadcast fill 15 of the 16 registers.
 */
#include <immintrin.h>

#include "cpu/kernels.h"

#define MR 6
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

// All ones in the first n of 8 lanes.
static inline __m256i mask_of(size_t n) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)DPL_MIN(n, (size_t)8)), lanes);
}

static inline void add_store8(size_t n, float *c, __m256 acc, bool add) {
    if (n >= 8) {
        _mm256_storeu_ps(c, add ? _mm256_add_ps(_mm256_loadu_ps(c), acc) : acc);
    } else if (n > 0) {
        const __m256i mask = mask_of(n);
        if (add) acc = _mm256_add_ps(_mm256_maskload_ps(c, mask), acc);
        _mm256_maskstore_ps(c, mask, acc);
    }
}

// Accumulators have names, not an index: clang keeps an array of 12 in memory.
#define EACH(X) X(0) X(1) X(2) X(3) X(4) X(5)
#define ZERO(i) __m256 acc0_##i = _mm256_setzero_ps(), acc1_##i = acc0_##i;
#define PREFETCH(i) \
    if (i < m) _mm_prefetch((const char *)(c + i * ldc), _MM_HINT_T0);
#define STEP(i)                                       \
    if (i < m) {                                      \
        const __m256 ai = _mm256_broadcast_ss(a + i); \
        acc0_##i = _mm256_fmadd_ps(ai, b0, acc0_##i); \
        acc1_##i = _mm256_fmadd_ps(ai, b1, acc1_##i); \
    }
#define STORE(i)                                                       \
    if (i < m) {                                                       \
        add_store8(n, c + i * ldc, acc0_##i, add);                     \
        add_store8(n > 8 ? n - 8 : 0, c + i * ldc + 8, acc1_##i, add); \
    }

// 16 columns of a tile, of which n are stored.
static inline __attribute__((always_inline)) void half_rows(size_t m, size_t n, size_t kc,
                                                            const float *a, const float *b,
                                                            float *c, size_t ldc, bool add,
                                                            dpl_gemm_ahead ahead) {
    const char *fetch = ahead.p;
    size_t left = ahead.run;
    EACH(ZERO)
    EACH(PREFETCH) // Also when c is only written: its lines arrive before they are needed.
    for (size_t l = 0; l < kc; ++l, a += m, b += 32) {
        _mm_prefetch(fetch, _MM_HINT_T1);
        fetch += --left ? ahead.step : ahead.jump;
        left = left ? left : ahead.run;
        const __m256 b0 = _mm256_loadu_ps(b), b1 = _mm256_loadu_ps(b + 8);
        EACH(STEP)
    }
    EACH(STORE)
}

static void tile_avx2(size_t m, size_t n, size_t kc, const float *a, const float *b, float *c,
                      size_t ldc, bool add, dpl_gemm_ahead ahead) {
    for (size_t j = 0; j < n; j += 16) {
        switch (m) {
#define ROWS(i)                                                    \
    case i:                                                        \
        half_rows(i, n - j, kc, a, b + j, c + j, ldc, add, ahead); \
        break;
            ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#undef ROWS
        }
    }
}

static inline __m256 expand8(__m128i h) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

// bf16 of 8 fp32 in the low halves; nearest even, NaN made quiet, as dpl_f32_to_bf16 does.
static inline __m256i round8(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    return _mm256_blendv_epi8(rounded, quiet,
                              _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}

static inline __m256 load8(dpl_gemm_load load, size_t n, const void *src, size_t i) {
    if (load == DPL_LOAD_BF16) {
        const uint16_t *p = (const uint16_t *)src + i;
        if (n >= 8) return expand8(_mm_loadu_si128((const __m128i *)p));
        uint16_t some[8] = {0};
        for (size_t j = 0; j < n; ++j) some[j] = p[j];
        return expand8(_mm_loadu_si128((const __m128i *)some));
    }
    const float *p = (const float *)src + i;
    const __m256 x = n >= 8 ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, mask_of(n));
    if (load == DPL_LOAD_F32) return x;
    return _mm256_castsi256_ps(_mm256_slli_epi32(round8(x), 16));
}

// Stores n lanes, or all 8 where what follows will be overwritten anyway: masked stores are slow.
static inline void store8(size_t n, bool all, float *dst, __m256 x) {
    if (n >= 8 || all) _mm256_storeu_ps(dst, x);
    else _mm256_maskstore_ps(dst, mask_of(n), x);
}

static inline __attribute__((always_inline)) void transpose8(__m256 r[8]) {
    __m256 t[8];
    UNROLL for (int i = 0; i < 8; i += 4) {
        const __m256 lo0 = _mm256_unpacklo_ps(r[i], r[i + 1]);
        const __m256 hi0 = _mm256_unpackhi_ps(r[i], r[i + 1]);
        const __m256 lo1 = _mm256_unpacklo_ps(r[i + 2], r[i + 3]);
        const __m256 hi1 = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
        t[i] = _mm256_shuffle_ps(lo0, lo1, 0x44);
        t[i + 1] = _mm256_shuffle_ps(lo0, lo1, 0xee);
        t[i + 2] = _mm256_shuffle_ps(hi0, hi1, 0x44);
        t[i + 3] = _mm256_shuffle_ps(hi0, hi1, 0xee);
    }
    UNROLL for (int i = 0; i < 4; ++i) {
        r[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
    }
}

static inline __attribute__((always_inline)) void pack_rows_as(dpl_gemm_load load, size_t m,
                                                               size_t kc, const void *src,
                                                               size_t ld, size_t w, float *dst) {
    for (size_t i0 = 0; i0 < w; i0 += 8) {
        for (size_t l0 = 0; l0 < kc; l0 += 8) {
            __m256 r[8];
            UNROLL for (size_t i = 0; i < 8; ++i) {
                if (i0 + i < m) r[i] = load8(load, kc - l0, src, (i0 + i) * ld + l0);
                else r[i] = _mm256_setzero_ps();
            }
            transpose8(r);
            const size_t n_l = DPL_MIN(kc - l0, (size_t)8);
            float *d = dst + l0 * w + i0;
            for (size_t l = 0; l < n_l; ++l) {
                store8(w - i0, w < 8 && (kc - l0 - l) * w >= 8, d + l * w, r[l]);
            }
        }
    }
}

static void pack_rows_avx2(dpl_gemm_load load, size_t m, size_t kc, const void *src, size_t ld,
                           size_t w, float *dst) {
    if (load == DPL_LOAD_F32) pack_rows_as(DPL_LOAD_F32, m, kc, src, ld, w, dst);
    else if (load == DPL_LOAD_BF16) pack_rows_as(DPL_LOAD_BF16, m, kc, src, ld, w, dst);
    else pack_rows_as(DPL_LOAD_ROUNDED, m, kc, src, ld, w, dst);
}

static inline __attribute__((always_inline)) void pack_cols_as(dpl_gemm_load load, size_t m,
                                                               size_t kc, const void *src,
                                                               size_t ld, size_t w, float *dst) {
    for (size_t l = 0; l < kc; ++l) {
        for (size_t i = 0; i < w; i += 8) {
            const size_t n = m > i ? m - i : 0;
            const __m256 x = n ? load8(load, n, src, l * ld + i) : _mm256_setzero_ps();
            store8(w - i, (kc - l) * w >= i + 8, dst + l * w + i, x);
        }
    }
}

static void pack_cols_avx2(dpl_gemm_load load, size_t m, size_t kc, const void *src, size_t ld,
                           size_t w, float *dst) {
    if (load == DPL_LOAD_F32) pack_cols_as(DPL_LOAD_F32, m, kc, src, ld, w, dst);
    else if (load == DPL_LOAD_BF16) pack_cols_as(DPL_LOAD_BF16, m, kc, src, ld, w, dst);
    else pack_cols_as(DPL_LOAD_ROUNDED, m, kc, src, ld, w, dst);
}

static double peak_fma_avx2(size_t n_rounds, float *sink) {
    __m256 acc[12];
    const __m256 scale = _mm256_set1_ps(sink[32]), shift = _mm256_set1_ps(sink[33]);
    UNROLL for (int i = 0; i < 12; ++i) acc[i] = _mm256_set1_ps(sink[i]);
    for (size_t round = 0; round < n_rounds; ++round) {
        UNROLL for (int i = 0; i < 12; ++i) acc[i] = _mm256_fmadd_ps(acc[i], scale, shift);
    }
    UNROLL for (int i = 0; i < 12; ++i) sink[i] = _mm256_cvtss_f32(acc[i]);
    return (double)n_rounds * 12 * 8 * 2;
}

void dpl_gemm_kernels_avx2(dpl_gemm_kernels *k) {
    k->name = "f32_avx2";
    k->mr = MR;
    k->tile = tile_avx2;
    k->pack_rows = pack_rows_avx2;
    k->pack_cols = pack_cols_avx2;
    k->peak_fma = peak_fma_avx2;
}
