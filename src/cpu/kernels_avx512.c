// kernels_avx512.c - all kernels with AVX-512; the grouped GEMM's with 512-bit vectors.
//
// A tile is 14 x 32: 28 accumulators, two vectors of the right panel and a broadcast of the left
// fill the 32 registers.
#include <immintrin.h>

#include "cpu/kernels_rows_tmpl.h"

#define V        16
#define OP(name) _mm512_##name
#define MR       14
#define EACH(X)  X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13)

typedef __m512 vec;

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

// Stores n lanes. That what follows may be overwritten (`all`) is of no use here.
INLINE void store_f32(size_t n, bool all, float *p, vec x) {
    (void)all;
    _mm512_mask_storeu_ps(p, mask_of(n), x);
}

INLINE vec even_lanes(vec a, vec b) {
    return _mm512_shuffle_f32x4(a, b, 0x88);
}

INLINE vec odd_lanes(vec a, vec b) {
    return _mm512_shuffle_f32x4(a, b, 0xdd);
}

#include "cpu/kernels_gemm_tmpl.h"

const dpl_kernels dpl_kernels_avx512 = {{GEMM_KERNELS}, {ROW_KERNELS}};
