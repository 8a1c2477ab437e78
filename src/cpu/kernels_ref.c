// kernels_ref.c - all kernels in plain C.
//
// This is the definition of right for the other levels and complete. Products and sums are separate
// operations here (no fused multiply-add), so it agrees with the other levels within rounding only.
#include "cpu/kernels_rows_tmpl.h"

#define MR 4

/* ---- tile product ---------------------------------------------------------------------------- */
static void add_tile(size_t m, float acc[MR][32], float *c, size_t ldc, bool add) {
    for (size_t i = 0; i < m; ++i) {
        float *row = c + i * ldc;
        for (size_t j = 0; j < 32; ++j) row[j] = add ? row[j] + acc[i][j] : acc[i][j];
    }
}

static void tile_f32(size_t m, size_t kc, const void *left, const void *right, float *c, size_t ldc,
                     bool add, dpl_gemm_ahead ahead) {
    (void)ahead;
    const float *a = left, *b = right;
    float acc[MR][32] = {{0}};
    for (size_t l = 0; l < kc; ++l, a += m, b += 32)
        for (size_t i = 0; i < m; ++i)
            for (size_t j = 0; j < 32; ++j) acc[i][j] += a[i] * b[j];
    add_tile(m, acc, c, ldc, add);
}

static void tile_bf16(size_t m, size_t kc, const void *left, const void *right, float *c,
                      size_t ldc, bool add, dpl_gemm_ahead ahead) {
    (void)ahead;
    const float *a = left;
    const uint16_t *b = right;
    float acc[MR][32] = {{0}};
    for (size_t l = 0; l < kc; l += 2, a += 2 * m, b += 64)
        for (size_t odd = 2; odd-- > 0;)
            for (size_t i = 0; i < m; ++i)
                for (size_t j = 0; j < 32; ++j)
                    acc[i][j] += a[odd * m + i] * dpl_bf16_to_f32(b[2 * j + odd]);
    add_tile(m, acc, c, ldc, add);
}

/* ---- packing --------------------------------------------------------------------------------- */
static float load_one(dpl_gemm_load load, const void *src, size_t i) {
    return load == DPL_LOAD_BF16 ? dpl_bf16_to_f32(((const uint16_t *)src)[i])
                                 : ((const float *)src)[i];
}

static uint16_t load_bf16(dpl_gemm_load load, const void *src, size_t i) {
    if (load == DPL_LOAD_BF16) return ((const uint16_t *)src)[i];
    float x = ((const float *)src)[i];
    for (int part = DPL_LOAD_PART2; part <= (int)load; part++)
        x -= dpl_bf16_to_f32(dpl_f32_to_bf16(x));
    return dpl_f32_to_bf16(x);
}

// Of element (i, l): the step of i and of l in src.
typedef struct steps {
    size_t i, l;
} steps;

static void pack_f32(dpl_gemm_load load, size_t m, size_t kc, const void *src, steps s, size_t w,
                     float *dst) {
    for (size_t l = 0; l < kc; ++l, dst += w)
        for (size_t i = 0; i < w; ++i) dst[i] = i < m ? load_one(load, src, i * s.i + l * s.l) : 0;
}

// fp32 values that are bf16, with a row of zeros after an odd kc.
static void pack_rounded(dpl_gemm_load load, size_t m, size_t kc, const void *src, steps s,
                         size_t w, float *dst) {
    for (size_t l = 0; l < dpl_round_up(kc, 2); ++l, dst += w)
        for (size_t i = 0; i < w; ++i)
            dst[i] = i < m && l < kc ? dpl_bf16_to_f32(load_bf16(load, src, i * s.i + l * s.l)) : 0;
}

static void pack_pairs(dpl_gemm_load load, size_t m, size_t kc, const void *src, steps s, size_t w,
                       uint16_t *dst) {
    for (size_t l = 0; l < dpl_round_up(kc, 2); ++l)
        for (size_t i = 0; i < w; ++i)
            dst[(l / 2 * w + i) * 2 + l % 2] = i < m && l < kc
                                                   ? load_bf16(load, src, i * s.i + l * s.l)
                                                   : 0;
}

#define PACK(name, pack, step_i, step_l)                                                  \
    static void name(dpl_gemm_load load, size_t m, size_t kc, const void *src, size_t ld, \
                     size_t w, void *dst) {                                               \
        (void)ld;                                                                         \
        pack(load, m, kc, src, (steps){step_i, step_l}, w, dst);                          \
    }
PACK(rows_f32, pack_f32, ld, 1)
PACK(cols_f32, pack_f32, 1, ld)
PACK(rows_rounded, pack_rounded, ld, 1)
PACK(cols_rounded, pack_rounded, 1, ld)
PACK(rows_pairs, pack_pairs, ld, 1)
PACK(cols_pairs, pack_pairs, 1, ld)

static void pairs_pairs(dpl_gemm_load load, size_t m, size_t kc, const void *src, size_t ld,
                        size_t w, void *dst) {
    (void)load;
    const uint16_t *from = src;
    uint16_t *to = dst;
    for (size_t l = 0; l < kc; ++l)
        for (size_t i = 0; i < w; ++i)
            to[(l / 2 * w + i) * 2 + l % 2] = i < m ? from[(i / 2 * ld + l) * 2 + i % 2] : 0;
}

static void take(size_t m, size_t n, const float *src, size_t ld, float *c) {
    for (size_t i = 0; i < m; ++i) memcpy(c + i * 32, src + i * ld, n * sizeof *c);
}

static void put(size_t m, size_t n, const float *c, dpl_dtype dtype, void *dst, size_t ld) {
    for (size_t i = 0; i < m; ++i, c += 32)
        if (dtype == DPL_F32) memcpy((float *)dst + i * ld, c, n * sizeof *c);
        else row_to_bf16(c, (uint16_t *)dst + i * ld, n);
}

static double peak(size_t n_rounds, float *sink) {
    float acc[32];
    for (size_t j = 0; j < 32; ++j) acc[j] = sink[j];
    const float scale = sink[32], shift = sink[33]; // Read from memory: nothing folds away.
    for (size_t i = 0; i < n_rounds; ++i) {
        for (size_t j = 0; j < 32; ++j) acc[j] = acc[j] * scale + shift;
    }
    for (size_t j = 0; j < 32; ++j) sink[j] = acc[j];
    return (double)n_rounds * 32 * 2;
}

// clang-format off
void dpl_kernels_ref(dpl_kernels *k) {
    k->gemm[DPL_F32] = (dpl_gemm_kernels){
        "ref", MR, DPL_GEMM_KC, 1, 4, 4, 1, DPL_GEMM_BLOCK, 1, tile_f32, rows_f32, cols_f32,
        rows_f32, cols_f32, NULL, take, put, NULL, 0, NULL, NULL, false, peak, NULL, NULL};
    k->gemm[DPL_BF16] = (dpl_gemm_kernels){
        "ref", MR, 2 * DPL_GEMM_KC, 2, 4, 2, 2, DPL_GEMM_BLOCK, 1, tile_bf16, rows_rounded,
        cols_rounded, rows_pairs, cols_pairs, pairs_pairs, take, put, NULL, 0, NULL, NULL, false,
        peak, NULL, NULL};
    k->rows = (dpl_row_kernels){ROW_KERNELS};
}
