// kernels_tiles_tmpl.h - the grouped GEMM of class BF16 over tile registers of 16 x 64 bytes.
//
// Included by kernels_amx.c, where they are the processor's, and by kernels_tiles.c, where they are
// memory: so all but the instructions is tested on any machine. A block of the result is 32 x 32 in
// four tiles; a step of 32 of the contraction loads four tiles for four products. A packed left
// operand is [l / 32][m][32]: the rows of a tile are successive lines.
#include "cpu/kernels.h"

#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

#define ROWS  16 // of a tile
#define DEPTH 32 // of one product

// Numbers of the tile registers: C of the result, by 16 rows and 16 columns; A left, B right.
#define C00 0
#define C01 1
#define C10 2
#define C11 3
#define A0  4
#define A1  5
#define B0  6
#define B1  7

/* ---- tile product ---------------------------------------------------------------------------- */
// As LDTILECFG reads it.
typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;
_Static_assert(sizeof(tile_config) == 64, "as LDTILECFG reads it");

// Rows that C00, C01 and A0 have now in this thread; the other tiles have 16. 0: none has.
static _Thread_local size_t tile_rows;

INLINE void configure(size_t rows) {
    if (rows == tile_rows) return;
    tile_rows = rows;
    tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = ROWS;
    config.rows[C00] = config.rows[C01] = config.rows[A0] = (uint8_t)rows;
    TILE_CONFIGURE(&config);
}

static unsigned enter(void) {
    return TILE_ENTER();
}

static void leave(unsigned entered) {
    tile_rows = 0;
    TILE_LEAVE(entered);
}

// The last n < 32 of the contraction, with zeros after them: what follows them in memory may be
// anything, and NaN times the zeros on the left is NaN.
static const char *pad_right(const char *b, size_t n, char padded[2048]) {
    const size_t bytes = dpl_round_up(n, 2) / 2 * 128;
    memcpy(padded, b, bytes);
    memset(padded + bytes, 0, 2048 - bytes);
    return padded;
}

// Lines are fetched one or a few at a time between the products, where the load ports are idle.
#define FETCH                                      \
    for (size_t i = 0; i < ahead.each; i++) {      \
        __builtin_prefetch(fetch, 0, 2);           \
        fetch += --left ? ahead.step : ahead.jump; \
        left = left ? left : ahead.run;            \
    }
// A tile of the result is read right before its first product: the first operands come sooner.
#define START(t, from)                                      \
    if (l == 0) {                                           \
        if (add) TILE_STREAM(t, from, ldc * sizeof(float)); \
        else TILE_ZERO(t);                                  \
    }

// Without `two` at most 16 rows. With it m - 16 < 16 rows are new in the second pair of tiles; they
// are computed with rows of the first pair above them, twice and alike.
INLINE void product(bool two, size_t m, size_t kc, const char *a, const char *b, float *c,
                    size_t ldc, bool add, dpl_gemm_ahead ahead) {
    _Alignas(64) char padded[2048];
    const char *fetch = ahead.p;
    size_t left = ahead.run;
    float *const c1 = two ? c + (m - ROWS) * ldc : c;
    const size_t a1 = two ? (m - ROWS) * 64 : 0;
    for (size_t l = 0; l < kc; l += DEPTH, a += m * 64, b += 2048) {
        if (kc - l < DEPTH) b = pad_right(b, kc - l, padded);
        // Few rows stay in L1 from panel to panel, many go past it.
        if (two) TILE_STREAM(A0, a, 64);
        else TILE_LOAD(A0, a, 64);
        FETCH
        TILE_LOAD(B0, b, 128);
        START(C00, c)
        TILE_DOT(C00, A0, B0);
        FETCH
        TILE_LOAD(B1, b + 64, 128);
        START(C01, c + 16)
        TILE_DOT(C01, A0, B1);
        FETCH
        if (two) {
            TILE_STREAM(A1, a + a1, 64);
            START(C10, c1)
            TILE_DOT(C10, A1, B0);
        }
        FETCH
        if (two) {
            START(C11, c1 + 16)
            TILE_DOT(C11, A1, B1);
        }
    }
    TILE_STORE(C00, c, ldc * sizeof(float));
    TILE_STORE(C01, c + 16, ldc * sizeof(float));
    if (two) {
        TILE_STORE(C10, c1, ldc * sizeof(float));
        TILE_STORE(C11, c1 + 16, ldc * sizeof(float));
    }
}

static void tile(size_t m, size_t kc, const void *a, const void *b, float *c, size_t ldc, bool add,
                 dpl_gemm_ahead ahead) {
    for (size_t i = 0; kc == 0 && !add && i < m; i++) memset(c + i * ldc, 0, 32 * sizeof *c);
    if (kc == 0) return;
    configure(DPL_MIN(m, (size_t)ROWS));
    if (m > ROWS) product(true, m, kc, a, b, c, ldc, add, ahead);
    else product(false, m, kc, a, b, c, ldc, add, ahead);
}

/* ---- packing --------------------------------------------------------------------------------- */
// Nearest even, NaN made quiet, as dpl_f32_to_bf16 does; in the high half. Without a branch.
INLINE uint32_t rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t up = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 0x400000;
    return (x != x ? quiet : up) & 0xffff0000u;
}

// What rounding leaves.
INLINE float rest(float x) {
    const uint32_t bits = rounded(x);
    float of_bits;
    memcpy(&of_bits, &bits, 4);
    return x - of_bits;
}

INLINE uint16_t load_one(dpl_gemm_load load, const void *src, size_t i) {
    if (load == DPL_LOAD_BF16) return ((const uint16_t *)src)[i];
    float x = ((const float *)src)[i];
    if (load == DPL_LOAD_PART2 || load == DPL_LOAD_PART3) x = rest(x);
    if (load == DPL_LOAD_PART3) x = rest(x);
    return (uint16_t)(rounded(x) >> 16);
}

// n <= 32 elements from src[i] on, zeros after them.
INLINE void load_line(dpl_gemm_load load, size_t n, const void *src, size_t i, uint16_t *line) {
    if (n >= 32 && load == DPL_LOAD_BF16) {
        memcpy(line, (const uint16_t *)src + i, 64);
        return;
    }
    if (n >= 32) {
        for (size_t j = 0; j < 32; j++) line[j] = load_one(load, src, i + j);
        return;
    }
    for (size_t j = 0; j < n; j++) line[j] = load_one(load, src, i + j);
    for (size_t j = n; j < 32; j++) line[j] = 0;
}

// A few rows at a time, each from its start to its end: so many streams the processor follows.
INLINE void rows_as(dpl_gemm_load load, size_t m, size_t kc, const void *src, size_t ld,
                    uint16_t *dst) {
    for (size_t i0 = 0; i0 < m; i0 += 8)
        for (size_t l = 0; l < kc; l += DEPTH)
            for (size_t i = i0; i < m && i < i0 + 8; i++)
                load_line(load, kc - l, src, i * ld + l, dst + l * m + i * 32);
}

typedef uint32_t pairs __attribute__((vector_size(32)));

#define SHUFFLE2(i, j, low, high)                                     \
    do {                                                              \
        const pairs first = __builtin_shufflevector(r[i], r[j], low); \
        r[j] = __builtin_shufflevector(r[i], r[j], high);             \
        r[i] = first;                                                 \
    } while (0)
#define LOW_32   0, 8, 1, 9, 4, 12, 5, 13
#define HIGH_32  2, 10, 3, 11, 6, 14, 7, 15
#define LOW_64   0, 1, 8, 9, 4, 5, 12, 13
#define HIGH_64  2, 3, 10, 11, 6, 7, 14, 15
#define LOW_128  0, 1, 2, 3, 8, 9, 10, 11
#define HIGH_128 4, 5, 6, 7, 12, 13, 14, 15

// dst[i][0..15] = from[0..15][i] for i < n <= 8, where `from` holds pairs along its first index.
INLINE void transpose_8x16(const uint32_t (*from)[32], size_t n, uint16_t *dst) {
    pairs r[8];
    UNROLL for (int q = 0; q < 8; q++) memcpy(&r[q], from[q], sizeof r[q]);
    UNROLL for (int q = 0; q < 8; q += 2) SHUFFLE2(q, q + 1, LOW_32, HIGH_32);
    UNROLL for (int q = 0; q < 8; q += 4) {
        SHUFFLE2(q, q + 2, LOW_64, HIGH_64);
        SHUFFLE2(q + 1, q + 3, LOW_64, HIGH_64);
    }
    UNROLL for (int q = 0; q < 4; q++) SHUFFLE2(q, q + 4, LOW_128, HIGH_128);
    UNROLL for (size_t q = 0; q < 8; q++) {
        const size_t i = (q & 4) | (q & 1) << 1 | (q & 2) >> 1;
        if (i < n) memcpy(dst + i * 32, &r[q], sizeof r[q]);
    }
}

INLINE void cols_as(dpl_gemm_load load, size_t m, size_t kc, const void *src, size_t ld,
                    uint16_t *dst) {
    _Alignas(64) uint32_t merged[DEPTH / 2][32];
    for (size_t l = 0; l < kc; l += DEPTH) {
        for (size_t q = 0; q < DEPTH / 2; q++) {
            _Alignas(64) uint16_t even[32], odd[32];
            const size_t i = l + 2 * q, n_even = i < kc ? m : 0, n_odd = i + 1 < kc ? m : 0;
            load_line(load, n_even, src, n_even ? i * ld : 0, even);
            load_line(load, n_odd, src, n_odd ? (i + 1) * ld : 0, odd);
            for (int j = 0; j < 32; j++) merged[q][j] = even[j] | (uint32_t)odd[j] << 16;
        }
        for (size_t i = 0; i < m; i += 8)
            for (size_t q = 0; q < DEPTH / 2; q += 8)
                transpose_8x16((const uint32_t(*)[32]) & merged[q][i], m - i,
                               dst + l * m + i * 32 + 2 * q);
    }
}

// A copy for each way to load, so that the loops do not ask. The width is m.
#define PACK(name, as)                                                                    \
    static void name(dpl_gemm_load load, size_t m, size_t kc, const void *src, size_t ld, \
                     size_t w, void *dst) {                                               \
        (void)w;                                                                          \
        if (load == DPL_LOAD_F32) as(DPL_LOAD_F32, m, kc, src, ld, dst);                  \
        else if (load == DPL_LOAD_BF16) as(DPL_LOAD_BF16, m, kc, src, ld, dst);           \
        else if (load == DPL_LOAD_PART2) as(DPL_LOAD_PART2, m, kc, src, ld, dst);         \
        else as(DPL_LOAD_PART3, m, kc, src, ld, dst);                                     \
    }
PACK(left_rows, rows_as)
PACK(left_cols, cols_as)

/* ---- peak ------------------------------------------------------------------------------------ */
#define PEAK_ROUNDS 16 // count as one: a block is as much work as many multiply-adds

static double peak(size_t n_rounds, float *sink) {
    _Alignas(64) float a[ROWS * 16], b[ROWS * 16], c[ROWS * 16];
    for (size_t i = 0; i < ROWS * 16; i++) a[i] = sink[33], b[i] = sink[32], c[i] = sink[i % 32];
    const size_t n_blocks = dpl_div_up(n_rounds, PEAK_ROUNDS);
    configure(ROWS);
    TILE_LOAD(A0, a, 64);
    TILE_LOAD(A1, a, 64);
    TILE_LOAD(B0, b, 64);
    TILE_LOAD(B1, b, 64);
    TILE_LOAD(C00, c, 64);
    TILE_LOAD(C01, c, 64);
    TILE_LOAD(C10, c, 64);
    TILE_LOAD(C11, c, 64);
    for (size_t i = 0; i < n_blocks; i++) {
        TILE_DOT(C00, A0, B0);
        TILE_DOT(C01, A0, B1);
        TILE_DOT(C10, A1, B0);
        TILE_DOT(C11, A1, B1);
    }
    TILE_STORE(C00, c, 64);
    memcpy(sink, c, 32 * sizeof *sink);
    return (double)n_blocks * 4 * ROWS * 16 * DEPTH * 2;
}

/* ---- table ----------------------------------------------------------------------------------- */
// What packs the right operand, and panels, is that of the level below.
INLINE void set_table(dpl_kernels *k, const char *name) {
    dpl_gemm_kernels *g = &k->gemm[DPL_BF16];
    g->name = name;
    g->mr = 2 * ROWS;
    g->kc = 2 * DPL_GEMM_KC;
    g->depth = DEPTH;
    g->left_bytes = 2;
    g->block_bytes = (size_t)1 << 20; // half of the L2 of these processors
    g->stream_bytes = g->put_past ? (size_t)16 << 20 : 0;
    g->pages = 8;
    g->fetch = DEPTH / 4;
    g->tile = tile;
    g->left_rows = left_rows;
    g->left_cols = left_cols;
    g->enter = enter;
    g->leave = leave;
    g->peak = peak;
    k->nv = (dpl_gemm_kernels){0};             // tiles are faster
    k->same[DPL_BF16] = (dpl_gemm_kernels){0}; // the bits of the level below differ
}
