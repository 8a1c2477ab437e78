// kernels_avx2.c - all kernels with AVX2 and FMA; the grouped GEMM's with 256-bit vectors.
//
// A tile is 6 x 32, done as two halves of 6 x 16: 12 accumulators, two vectors of the panel and a
// broadcast fill 15 of the 16 registers.
#include <immintrin.h>

#include "cpu/kernels_rows_tmpl.h"

#define V        8
#define OP(name) _mm256_##name
#define MR       6
#define EACH(X)  X(0) X(1) X(2) X(3) X(4) X(5)

typedef __m256 vec;

// All ones in the first n of 8 lanes.
INLINE __m256i mask_of(size_t n) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)DPL_MIN(n, (size_t)V)), lanes);
}

INLINE vec load_f32(size_t n, const float *p) {
    return n >= V ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, mask_of(n));
}

INLINE vec load_bf16(size_t n, const uint16_t *p) {
    uint16_t some[V] = {0};
    for (size_t j = 0; n < V && j < n; ++j) some[j] = p[j];
    const __m128i h = _mm_loadu_si128((const __m128i *)(n < V ? some : p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

// Stores n lanes, or all where what follows will be overwritten anyway: masked stores are slow.
INLINE void store_f32(size_t n, bool all, float *p, vec x) {
    if (n >= V || all) _mm256_storeu_ps(p, x);
    else if (n > 0) _mm256_maskstore_ps(p, mask_of(n), x);
}

INLINE vec even_lanes(vec a, vec b) {
    return _mm256_permute2f128_ps(a, b, 0x20);
}

INLINE vec odd_lanes(vec a, vec b) {
    return _mm256_permute2f128_ps(a, b, 0x31);
}

#include "cpu/kernels_gemm_tmpl.h"

const dpl_kernels dpl_kernels_avx2 = {{GEMM_KERNELS}, {ROW_KERNELS}};
