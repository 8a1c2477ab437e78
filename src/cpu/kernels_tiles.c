// kernels_tiles.c - the grouped GEMM of class BF16 with the arithmetic of AMX, bit by bit, in AVX2.
//
// TDPBF16PS is, for each element, two chains of multiply-adds from zero over the 16 pairs, one of
// the even and one of the odd elements; then their sum is added. Each step rounds to nearest even,
// takes subnormals as zero and makes them zero, whatever MXCSR says: so here MXCSR says that.
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define TILE_ZERO(t)           memset(&tiles[t], 0, sizeof tiles[t])
#define TILE_LOAD(t, p, ld)    load_tile(t, p, ld)
#define TILE_STREAM(t, p, ld)  load_tile(t, p, ld)
#define TILE_STORE(t, p, ld)   store_tile(t, p, ld)
#define TILE_DOT(c, a, b)      dot(c, a, b)
#define TILE_CONFIGURE(config) load_config((config)->rows)
#define TILE_ENTER()           exact_rounding()
#define TILE_LEAVE(entered)    _mm_setcsr(entered)

typedef float vec __attribute__((vector_size(32)));
typedef uint32_t vec_u32 __attribute__((vector_size(32)));

static _Thread_local _Alignas(64) uint32_t tiles[8][16][16]; // fp32, or pairs of bf16
static _Thread_local uint8_t n_rows[8];                      // of each tile

static void load_config(const uint8_t *rows) {
    memcpy(n_rows, rows, sizeof n_rows);
    memset(tiles, 0, sizeof tiles);
}

// Round to nearest even, subnormals are zero and become zero, no traps.
static unsigned exact_rounding(void) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(0x9fc0);
    return before;
}

static void load_tile(int t, const void *p, size_t ld) {
    memset(tiles[t], 0, sizeof tiles[t]);
    for (size_t i = 0; i < n_rows[t]; i++) memcpy(tiles[t][i], (const char *)p + i * ld, 64);
}

static void store_tile(int t, void *p, size_t ld) {
    for (size_t i = 0; i < n_rows[t]; i++) memcpy((char *)p + i * ld, tiles[t][i], 64);
}

static inline vec high_words(vec_u32 pairs) {
    return (vec)(pairs & 0xffff0000u);
}

static inline vec low_words(vec_u32 pairs) {
    return (vec)(pairs << 16);
}

// Two rows at a time: eight chains hide the latency of a multiply-add.
static void dot(int c, int a, int b) {
    vec even[16][2], odd[16][2]; // of the right operand
    for (int q = 0; q < 16; q++)
        for (int h = 0; h < 2; h++) {
            vec_u32 pairs;
            memcpy(&pairs, &tiles[b][q][8 * h], sizeof pairs);
            even[q][h] = low_words(pairs), odd[q][h] = high_words(pairs);
        }
    for (int i = 0; i < n_rows[c]; i += 2) {
        vec e00 = {0}, e01 = {0}, e10 = {0}, e11 = {0}, o00 = {0}, o01 = {0}, o10 = {0}, o11 = {0};
        for (int q = 0; q < 16; q++) {
            const vec_u32 x0 = tiles[a][i][q] + (vec_u32){0},
                          x1 = tiles[a][i + 1][q] + (vec_u32){0};
            e00 = _mm256_fmadd_ps(low_words(x0), even[q][0], e00);
            e01 = _mm256_fmadd_ps(low_words(x0), even[q][1], e01);
            e10 = _mm256_fmadd_ps(low_words(x1), even[q][0], e10);
            e11 = _mm256_fmadd_ps(low_words(x1), even[q][1], e11);
            o00 = _mm256_fmadd_ps(high_words(x0), odd[q][0], o00);
            o01 = _mm256_fmadd_ps(high_words(x0), odd[q][1], o01);
            o10 = _mm256_fmadd_ps(high_words(x1), odd[q][0], o10);
            o11 = _mm256_fmadd_ps(high_words(x1), odd[q][1], o11);
        }
        const vec sums[4] = {e00 + o00, e01 + o01, e10 + o10, e11 + o11};
        vec old[4];
        memcpy(old, tiles[c][i], sizeof old);
        for (int h = 0; h < 4; h++) old[h] += sums[h];
        memcpy(tiles[c][i], old, sizeof old);
    }
}

#include "cpu/kernels_tiles_tmpl.h"

void dpl_kernels_tiles(dpl_kernels *k) {
    set_table(k, "soft_bf16");
    k->gemm[DPL_BF16].flushes = true;
}
