// kernels_avx512_bf16.c - the product of bf16 pairs by VDPBF16PS, and rows that are rounded to bf16
// by an instruction.
//
// On some processors it has twice the speed of multiply-adds, on others half. Their results are the
// same bits, so both are in the table and what is faster here is used.
#include "cpu/kernels_avx512.h"
#include "cpu/kernels_rows_tmpl.h"

#define DOT(i)                                                   \
    if (i < m) {                                                 \
        const __m512bh ai = (__m512bh)_mm512_set1_ps(a[i]);      \
        acc0_##i = _mm512_dpbf16_ps(acc0_##i, ai, (__m512bh)b0); \
        acc1_##i = _mm512_dpbf16_ps(acc1_##i, ai, (__m512bh)b1); \
    }

#include "cpu/kernels_gemm_tmpl.h"

#include "cpu/kernels_nv_gemm_tmpl.h"

TILE(tile_dot, TILE_DOT)

// Whole lines only; what is there for others to read is complete at the end.
static void put_past(size_t m, size_t n, const float *c, dpl_dtype dtype, void *dst, size_t ld) {
    const size_t row_bytes = ld * dpl_dtype_bytes(dtype);
    if (n < 32 || ((uintptr_t)dst | row_bytes) % 64) {
        put(m, n, c, dtype, dst, ld);
        return;
    }
    for (size_t i = 0; i < m; i++, c += 32) {
        const __m512 low = _mm512_loadu_ps(c), high = _mm512_loadu_ps(c + 16);
        uint8_t *row = (uint8_t *)dst + i * row_bytes;
        if (dtype == DPL_F32) {
            _mm512_stream_ps((void *)row, low);
            _mm512_stream_ps((void *)(row + 64), high);
        } else {
            uint16_t line[32];
            put_bf16(32, c, line);
            _mm512_stream_si512((void *)row, _mm512_loadu_si512(line));
        }
    }
    _mm_sfence();
}

static double peak_dot(size_t n_rounds, float *sink) {
    vec acc[CHAINS];
    const __m512bh x = (__m512bh)_mm512_set1_ps(sink[33]), y = (__m512bh)_mm512_set1_ps(sink[32]);
    UNROLL for (int i = 0; i < CHAINS; ++i) acc[i] = _mm512_set1_ps(sink[i]);
    for (size_t round = 0; round < n_rounds; ++round) {
        UNROLL for (int i = 0; i < CHAINS; ++i) acc[i] = _mm512_dpbf16_ps(acc[i], x, y);
    }
    UNROLL for (int i = 0; i < CHAINS; ++i) sink[i] = acc[i][0];
    return (double)n_rounds * CHAINS * V * 4;
}

void dpl_kernels_avx512_bf16(dpl_kernels *k) {
    dpl_gemm_kernels *g = &k->gemm[DPL_BF16];
    k->same[DPL_BF16] = *g;
    g->name = "avx512_bf16";
    g->left_bytes = 2;
    g->tile = tile_dot;
    g->left_rows = rows_pairs;
    g->left_cols = cols_pairs;
    g->right_rows = rows_pairs;
    g->right_cols = cols_pairs;
    g->put = put;
    g->put_past = put_past;
    g->enter = NULL;
    g->leave = NULL;
    g->flushes = false;
    g->peak = peak_dot;
    dpl_set_nv_gemm(k, "avx512_vnni", NV_MR, nv_pack, nv_tile);
    k->rows = (dpl_row_kernels){ROW_KERNELS};
}
