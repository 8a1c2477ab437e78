// kernels_avx512.h - the registers of the levels with AVX-512, for kernels_gemm_tmpl.h.
//
// A tile is 14 x 32: 28 accumulators, two vectors of the right panel and a broadcast of the left
// fill the 32 registers.
#pragma once

#include <immintrin.h>

#include "cpu/kernels.h"

#define V        16
#define OP(name) _mm512_##name
#define MR       14
#define EACH(X)  X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13)

typedef __m512 vec;
typedef __m512d vec_f64;

INLINE __mmask16 mask_of(size_t n) {
    return (__mmask16)(0xffffu >> (V - DPL_MIN(n, (size_t)V)));
}

INLINE vec load_f32(size_t n, const float *p) {
    return _mm512_maskz_loadu_ps(mask_of(n), p);
}

INLINE vec load_bf16(size_t n, const uint16_t *p) {
    const __m512i h = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask_of(n), p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(h, 16));
}

// The first n of 2 * V words.
INLINE vec load_words(size_t n, const uint16_t *p) {
    const __mmask32 mask = 0xffffffffu >> (2 * V - DPL_MIN(n, (size_t)(2 * V)));
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, p));
}

// Stores n lanes. That what follows may be overwritten (`all`) is of no use here.
INLINE void store_f32(size_t n, bool all, float *p, vec x) {
    (void)all;
    _mm512_mask_storeu_ps(p, mask_of(n), x);
}

// The high words of n lanes.
INLINE void store_bf16(size_t n, uint16_t *p, vec x) {
    const __m512i words = _mm512_srli_epi32(_mm512_castps_si512(x), 16);
    _mm512_mask_cvtepi32_storeu_epi16(p, mask_of(n), words);
}

INLINE vec swap_middle(vec x) {
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    return _mm512_castsi512_ps(
        _mm512_shuffle_epi8(_mm512_castps_si512(x), _mm512_broadcast_i32x4(order)));
}

INLINE vec even_lanes(vec a, vec b) {
    return _mm512_shuffle_f32x4(a, b, 0x88);
}

INLINE vec odd_lanes(vec a, vec b) {
    return _mm512_shuffle_f32x4(a, b, 0xdd);
}

#ifdef __AVX512BF16__
#define PAIRS_NATIVE

// In order: the first row's element is the low half of a pair.
INLINE vec pairs_across(vec even, vec odd) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9,
                                           24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1,
                                           16, 0);
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
    return (vec)_mm512_permutexvar_epi16(order, both);
}

INLINE vec pairs_along(vec low, vec high) {
    return (vec)_mm512_cvtne2ps_pbh(high, low);
}

INLINE size_t pair_lane(size_t q) {
    return q;
}

INLINE void put_bf16(size_t n, const float *c, uint16_t *dst) {
    const __m512i row = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(c + V), _mm512_loadu_ps(c));
    const __mmask32 mask = 0xffffffffu >> (2 * V - DPL_MIN(n, (size_t)(2 * V)));
    _mm512_mask_storeu_epi16(dst, mask, row);
}
#endif
