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

TILE(tile_dot, TILE_DOT)

/* ---- a weight in NVFP4 ----------------------------------------------------------------------- */
// The bf16 numbers of the 16 codes of a block with this scale, twice.
INLINE __m512i block_numbers(uint8_t scale) {
    const __m512 of_codes = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f,
                                           -2, -3, -4, -6);
    float by = (float)scale * 0x1p-9f; // E4M3: the subnormal ones
    if (scale >= 8) by = float_of(((uint32_t)scale << 20) + ((127u - 7) << 23));
    if (scale == 0x7f) by = float_of(0x7fc00000u);
    const __m512 numbers = _mm512_mul_ps(of_codes, _mm512_set1_ps(by));
    const __m512i upper = _mm512_srli_epi32(_mm512_castps_si512(numbers), 16);
    return _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(upper));
}

#define NV_AHEAD   2048 // bytes
#define NV_ZERO(i) vec acc0_##i = {0}, acc1_##i = {0};
#define NV_STORE(i)              \
    if (i < m) {                 \
        STORE_AT(i, 0, acc0_##i) \
        STORE_AT(i, V, acc1_##i) \
    }

// Pair q of a block's rows.
#define NV_PAIR(q)                                                                           \
    {                                                                                        \
        const __m512i *line = (const __m512i *)(const void *)(codes + (q) / 4 * 64);         \
        const word_lanes w0 = (word_lanes)_mm512_loadu_si512(line);                          \
        const word_lanes w1 = (word_lanes)_mm512_loadu_si512(line + 2);                      \
        const __m512i b0 = _mm512_permutexvar_epi16((__m512i)(w0 >> (q) % 4 * 4), numbers0); \
        const __m512i b1 = _mm512_permutexvar_epi16((__m512i)(w1 >> (q) % 4 * 4), numbers1); \
        EACH(DOT)                                                                            \
        a += m;                                                                              \
    }

INLINE void nv_tile_rows(size_t m, size_t kc, const float *a, const uint8_t *codes,
                         const uint8_t *scales, float *c, bool add) {
    typedef uint16_t word_lanes __attribute__((vector_size(64)));
    const size_t ldc = 32;
    EACH(NV_ZERO)
    for (size_t l = 0; l < kc; l += 16, codes += 256, scales += 2) {
        const __m512i numbers0 = block_numbers(scales[0]), numbers1 = block_numbers(scales[1]);
        _mm_prefetch((const char *)codes + NV_AHEAD, _MM_HINT_T0);
        _mm_prefetch((const char *)codes + NV_AHEAD + 64, _MM_HINT_T0);
        _mm_prefetch((const char *)codes + NV_AHEAD + 128, _MM_HINT_T0);
        _mm_prefetch((const char *)codes + NV_AHEAD + 192, _MM_HINT_T0);
        if (kc - l >= 16) {
            NV_PAIR(0) NV_PAIR(1) NV_PAIR(2) NV_PAIR(3) NV_PAIR(4) NV_PAIR(5) NV_PAIR(6) NV_PAIR(7)
        } else {
            for (size_t q = 0; q < (kc - l + 1) / 2; q++) NV_PAIR(q)
        }
    }
    EACH(NV_STORE)
}

#define NV_ROWS(i)                                                              \
    case i + 1:                                                                 \
        if (i < DPL_NV_TILE) nv_tile_rows(i + 1, kc, a, codes, scales, c, add); \
        break;

static void nv_tile(size_t m, size_t kc, const void *a, const uint8_t *codes, const uint8_t *scales,
                    float *c, bool add) {
    switch (m) { EACH(NV_ROWS) }
}

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
    g->nv_tile = nv_tile;
    k->rows = (dpl_row_kernels){ROW_KERNELS};
}
