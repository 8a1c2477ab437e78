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
typedef __m256d vec_f64;

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

// The first n of 2 * V words.
INLINE vec load_words(size_t n, const uint16_t *p) {
    uint16_t some[2 * V] = {0};
    for (size_t j = 0; n < 2 * V && j < n; ++j) some[j] = p[j];
    return _mm256_loadu_ps((const float *)(n < 2 * V ? some : p));
}

// Stores n lanes, or all where what follows will be overwritten anyway: masked stores are slow.
INLINE void store_f32(size_t n, bool all, float *p, vec x) {
    if (n >= V || all) _mm256_storeu_ps(p, x);
    else if (n > 0) _mm256_maskstore_ps(p, mask_of(n), x);
}

// The high words of n lanes.
INLINE void store_bf16(size_t n, uint16_t *p, vec x) {
    const __m256i words = _mm256_srli_epi32(_mm256_castps_si256(x), 16);
    const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
    const __m128i all = _mm_packus_epi32(low, high);
    uint16_t some[V];
    _mm_storeu_si128((__m128i *)(n < V ? some : p), all);
    for (size_t j = 0; n < V && j < n; ++j) p[j] = some[j];
}

INLINE vec swap_middle(vec x) {
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    return _mm256_castsi256_ps(
        _mm256_shuffle_epi8(_mm256_castps_si256(x), _mm256_broadcastsi128_si256(order)));
}

INLINE vec even_lanes(vec a, vec b) {
    return _mm256_permute2f128_ps(a, b, 0x20);
}

INLINE vec odd_lanes(vec a, vec b) {
    return _mm256_permute2f128_ps(a, b, 0x31);
}

#include "cpu/kernels_gemm_tmpl.h"
#include "cpu/kernels_quant_tmpl.h"

#include "cpu/kernels_nv_gemm_tmpl.h"
#include "cpu/kernels_nv_tmpl.h"

void dpl_kernels_avx2(dpl_kernels *k) {
    k->gemm[DPL_F32] = (dpl_gemm_kernels)GEMM_F32("avx2");
    k->gemm[DPL_BF16] = (dpl_gemm_kernels)GEMM_BF16("avx2");
    dpl_set_nv_gemm(k, "avx2", NV_MR, nv_pack, nv_tile);
    k->rows = (dpl_row_kernels){ROW_KERNELS};
    k->quant = (dpl_quant_kernels){QUANT_KERNELS};
}
