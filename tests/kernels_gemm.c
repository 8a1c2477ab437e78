// kernels_gemm.c - checks and benchmarks the kernels of the grouped GEMM: tile products and packing
// of both operand classes, by one body each.
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>

#include "kernels.h"

static const dpl_gemm_ahead no_ahead = {"", 0, 1, 0, 0};

// How many l are packed for kc on the left.
static size_t left_rows_of(const dpl_gemm_kernels *g, size_t kc) {
    return dpl_round_up(kc, g->depth);
}

static size_t right_elems(size_t kc) {
    return dpl_round_up(kc, 32) * 32;
}

/* ---- tile ------------------------------------------------------------------------------------ */
typedef struct operands {
    size_t m, kc;
    const float *x, *w; // (m, kc), (32, kc)
    void *right;        // packed
} operands;

static void *pack_left(kernel_test *t, const dpl_gemm_kernels *g, const operands *o, size_t row,
                       size_t m) {
    void *left = kernel_buffer(t, m * left_rows_of(g, o->kc) * g->left_bytes);
    g->left_rows(DPL_LOAD_F32, m, o->kc, o->x + row * o->kc, o->kc, m, left);
    return left;
}

// c (m, ldc) of the class's kernels, in tiles of at most its own height.
static void multiply(kernel_test *t, const dpl_gemm_kernels *g, const operands *o, float *c,
                     size_t ldc, bool add, size_t height) {
    const unsigned entered = dpl_gemm_enter(g);
    for (size_t row = 0; row < o->m; row += height) {
        const size_t m = DPL_MIN(height, o->m - row);
        g->tile(m, o->kc, pack_left(t, g, o, row, m), o->right, c + row * ldc, ldc, add,
                (dpl_gemm_ahead){o->right, 64, 16, 4096, 1});
    }
    dpl_gemm_leave(g, entered);
}

// Both levels sum kc products of (rounded) operands in fp32, so they differ by at most
// (kc + 2) * eps * sum |a b|, and by what flushing subnormals takes.
static double bound_of(const operands *o) {
    double sum = 0;
    for (size_t l = 0; l < o->kc; ++l) {
        double a = 0, b = 0;
        for (size_t i = 0; i < o->m; ++i) a = fmax(a, fabs((double)o->x[i * o->kc + l]));
        for (size_t j = 0; j < 32; ++j) b = fmax(b, fabs((double)o->w[j * o->kc + l]));
        sum += a * b;
    }
    return (double)(o->kc + 2) * (double)FLT_EPSILON * (sum * 1.01 + (double)(o->m + 32)) + 1e-36;
}

static void check_tile_shape(kernel_test *t, int class, size_t m, size_t kc, bool add) {
    const dpl_gemm_kernels *g = &t->k->gemm[class], *ref = &t->ref->gemm[class];
    const size_t ldc = 32 + kernel_pick(t, 0, 5);
    operands o = {m, kc, kernel_random(t, m * kc), kernel_random(t, 32 * kc), NULL};
    o.right = kernel_buffer(t, right_elems(kc) * g->right_bytes);
    ref->right_rows(DPL_LOAD_F32, 32, kc, o.w, kc, 32, o.right); // the same format at each level
    float *got = kernel_floats(t, m * ldc), *want = kernel_floats(t, m * ldc);
    for (size_t i = 0; add && i < m; ++i)
        for (size_t j = 0; j < 32; ++j) got[i * ldc + j] = want[i * ldc + j] = (float)(i + j);
    float *alone = kernel_floats(t, m * ldc);
    memcpy(alone, got, m * ldc * sizeof *alone);
    multiply(t, ref, &o, want, ldc, add, ref->mr);
    multiply(t, g, &o, got, ldc, add, g->mr);
    kernel_near(t, "tile", got, want, m * ldc, bound_of(&o));
    multiply(t, g, &o, alone, ldc, add, 1);
    kernel_same(t, "rows alone", alone, got, m * ldc * sizeof *alone);
    if (t->k->same[class].name) {
        float *same = kernel_floats(t, m * ldc);
        for (size_t i = 0; add && i < m; ++i)
            for (size_t j = 0; j < 32; ++j) same[i * ldc + j] = (float)(i + j);
        multiply(t, &t->k->same[class], &o, same, ldc, add, t->k->same[class].mr);
        kernel_same(t, "the other kernel with the same bits", same, got, m * ldc * sizeof *same);
    }
    kernel_done(t);
}

static void check_tile(kernel_test *t, int class) {
    const dpl_gemm_kernels *g = &t->k->gemm[class];
    for (size_t m = 1; m <= g->mr; ++m)
        for (size_t i = 0; i < 6; ++i)
            check_tile_shape(t, class, m, i == 5 ? 0 : kernel_pick(t, 1, i ? 90 : g->kc), i % 2);
    t->aligned = true;
    operands o = {g->mr, g->kc, kernel_random(t, g->mr * g->kc), NULL, NULL};
    const void *left = pack_left(t, g, &o, 0, g->mr);
    const void *right = memset(kernel_buffer(t, right_elems(g->kc) * g->right_bytes), 0,
                               right_elems(g->kc) * g->right_bytes);
    float *c = kernel_floats(t, g->mr * 32);
    const unsigned entered = dpl_gemm_enter(g);
    KERNEL_BENCH(t, 2.0 * 32 * (double)(g->mr * g->kc), "FLOP",
                 g->tile(g->mr, g->kc, left, right, c, 32, false, no_ahead));
    dpl_gemm_leave(g, entered);
}

static void check_tile_f32(kernel_test *t) {
    check_tile(t, DPL_F32);
}

static void check_tile_bf16(kernel_test *t) {
    check_tile(t, DPL_BF16);
}

/* ---- packing --------------------------------------------------------------------------------- */
// src (rows: (m, kc), columns: (kc, m)) with nothing after its last element.
typedef struct packing {
    dpl_gemm_load load;
    size_t m, kc, ld, w;
    const void *src;
} packing;

static packing random_packing(kernel_test *t, int class, size_t i, bool rows, bool left) {
    packing p = {.m = kernel_pick(t, 1, left ? 40 : 32), .kc = kernel_pick(t, 1, 70)};
    p.load = (dpl_gemm_load)(i % (class == DPL_F32 ? 2 : 4));
    p.w = left ? p.m : 32;
    p.ld = (rows ? p.kc : p.m) + kernel_pick(t, 0, 3);
    const size_t n = ((rows ? p.m : p.kc) - 1) * p.ld + (rows ? p.kc : p.m);
    if (p.load == DPL_LOAD_BF16) {
        p.src = kernel_random_bf16(t, n);
    } else {
        float *src = kernel_random(t, n);
        if (p.load == DPL_LOAD_F32) src[n / 2] = i % 5 ? INFINITY : NAN;
        p.src = src;
    }
    return p;
}

// Element (i, l) of a left operand in the format of the level: what the tile makes of it against a
// right operand that is 1 at l and 0 elsewhere.
static void check_left(kernel_test *t, int class, bool rows) {
    const dpl_gemm_kernels *g = &t->k->gemm[class], *ref = &t->ref->gemm[class];
    const unsigned entered = dpl_gemm_enter(g);
    for (size_t round = 0; round < 24; ++round) {
        packing p = random_packing(t, class, round, rows, true);
        p.m = p.w = DPL_MIN(p.m, g->mr);
        const size_t bytes = right_elems(p.kc) * g->right_bytes, at = kernel_pick(t, 0, p.kc - 1);
        if (p.load == DPL_LOAD_F32) { // Neither Inf nor NaN where 0 is the factor.
            float *src = kernel_random(t, rows ? p.m * p.ld : p.kc * p.ld);
            p.src = src;
        }
        void *left = kernel_buffer(t, p.w * left_rows_of(g, p.kc) * g->left_bytes);
        (rows ? g->left_rows : g->left_cols)(p.load, p.m, p.kc, p.src, p.ld, p.w, left);
        void *right = memset(kernel_buffer(t, bytes), 0, bytes);
        for (size_t j = 0; j < 32; ++j) {
            if (class == DPL_F32) ((float *)right)[at * 32 + j] = 1;
            else ((uint16_t *)right)[(at / 2 * 32 + j) * 2 + at % 2] = 0x3f80;
        }
        float *got = kernel_floats(t, p.m * 32), *want = kernel_floats(t, p.m * 32);
        g->tile(p.m, p.kc, left, right, got, 32, false, no_ahead);
        for (size_t i = 0; i < p.m; ++i) {
            const size_t from = rows ? i * p.ld + at : at * p.ld + i;
            const uint8_t *src = (const uint8_t *)p.src +
                                 from * (p.load == DPL_LOAD_BF16 ? 2u : 4u);
            float one[2] = {0}; // one element, as the plain kernels pack it
            ref->left_rows(p.load, 1, 1, src, 1, 1, one);
            for (size_t j = 0; j < 32; ++j) want[i * 32 + j] = one[0];
        }
        kernel_near(t, "packed on the left", got, want, p.m * 32, 1e-37);
        kernel_done(t);
    }
    dpl_gemm_leave(g, entered);
    t->aligned = true;
    const size_t m = g->mr, ld = rows ? g->kc : m;
    const float *src = kernel_random(t, g->kc * m);
    void *dst = kernel_buffer(t, m * left_rows_of(g, g->kc) * g->left_bytes);
    KERNEL_BENCH(t, (double)(g->kc * m), "elem",
                 (rows ? g->left_rows : g->left_cols)(DPL_LOAD_F32, m, g->kc, src, ld, m, dst));
}

static void check_right(kernel_test *t, int class, bool rows) {
    const dpl_gemm_kernels *g = &t->k->gemm[class], *ref = &t->ref->gemm[class];
    const dpl_gemm_packer pack = rows ? g->right_rows : g->right_cols;
    for (size_t round = 0; round < 60; ++round) {
        const packing p = random_packing(t, class, round, rows, false);
        const size_t n = p.w * dpl_round_up(p.kc, class == DPL_F32 ? 1 : 2) * g->right_bytes;
        void *got = kernel_buffer(t, n), *want = kernel_buffer(t, n);
        pack(p.load, p.m, p.kc, p.src, p.ld, p.w, got);
        (rows ? ref->right_rows : ref->right_cols)(p.load, p.m, p.kc, p.src, p.ld, p.w, want);
        kernel_same(t, "packed on the right", got, want, n);
        kernel_done(t);
    }
    t->aligned = true;
    const float *src = kernel_random(t, g->kc * 32);
    void *dst = kernel_buffer(t, right_elems(g->kc) * g->right_bytes);
    KERNEL_BENCH(t, (double)(g->kc * 32), "elem",
                 pack(DPL_LOAD_F32, 32, g->kc, src, rows ? g->kc : 32, 32, dst));
}

#define CHECK_PACK(side, which, rows)                           \
    static void check_##side##_##which##_f32(kernel_test *t) {  \
        check_##side(t, DPL_F32, rows);                         \
    }                                                           \
    static void check_##side##_##which##_bf16(kernel_test *t) { \
        check_##side(t, DPL_BF16, rows);                        \
    }
CHECK_PACK(left, rows, true)
CHECK_PACK(left, cols, false)
CHECK_PACK(right, rows, true)
CHECK_PACK(right, cols, false)

static void check_right_pairs(kernel_test *t) {
    const dpl_gemm_kernels *g = &t->k->gemm[DPL_BF16], *ref = &t->ref->gemm[DPL_BF16];
    for (size_t round = 0; round < 60; ++round) {
        const size_t m = kernel_pick(t, 1, 32), kc = 32 * kernel_pick(t, 1, 3);
        const size_t ld = kc + kernel_pick(t, 0, 3);
        const uint16_t *src = kernel_random_bf16(t, (((m + 1) / 2 - 1) * ld + kc) * 2);
        uint16_t *got = kernel_buffer(t, kc * 64), *want = kernel_buffer(t, kc * 64);
        // Of an odd m the last pair has a second half, which nothing says is 0.
        g->right_pairs(DPL_LOAD_BF16, m, kc, src, ld, 32, got);
        ref->right_pairs(DPL_LOAD_BF16, m, kc, src, ld, 32, want);
        for (size_t q = 0; m % 2 && q < kc / 2; ++q)
            memset(got + (q * 32 + m) * 2, 0, 4), memset(want + (q * 32 + m) * 2, 0, 4);
        kernel_same(t, "pairs", got, want, kc * 64);
        kernel_done(t);
    }
    t->aligned = true;
    const uint16_t *src = kernel_random_bf16(t, 32 * 32);
    void *dst = kernel_buffer(t, 32 * 64);
    KERNEL_BENCH(t, 32 * 32, "elem", g->right_pairs(DPL_LOAD_BF16, 32, 32, src, 32, 32, dst));
}

/* ---- panels and peak ------------------------------------------------------------------------- */
static void check_take(kernel_test *t) {
    for (size_t round = 0; round < 40; ++round) {
        const size_t m = kernel_pick(t, 1, 9), n = round % 3 ? kernel_pick(t, 1, 32) : 32;
        const size_t ld = n + kernel_pick(t, 0, 9);
        const float *src = kernel_random(t, (m - 1) * ld + n);
        float *got = kernel_floats(t, m * 32);
        t->k->gemm[round % 2].take(m, n, src, ld, got);
        for (size_t i = 0; i < m; ++i)
            kernel_same(t, "taken", got + i * 32, src + i * ld, n * sizeof *got);
        kernel_done(t);
    }
}

static void check_put(kernel_test *t) {
    for (size_t round = 0; round < 60; ++round) {
        const dpl_dtype dtype = round % 2 ? DPL_BF16 : DPL_F32;
        const size_t m = kernel_pick(t, 1, 9), n = round % 3 ? kernel_pick(t, 1, 32) : 32;
        const size_t ld = round < 40 ? n + kernel_pick(t, 0, 9) : 32 * (round % 3 + 1);
        const size_t bytes = ((m - 1) * ld + n) * dpl_dtype_bytes(dtype);
        t->aligned = round >= 40;
        float *c = kernel_random(t, m * 32);
        c[n / 2] = round % 5 ? NAN : INFINITY;
        void *got = kernel_buffer(t, bytes), *want = kernel_buffer(t, bytes);
        t->k->gemm[round / 2 % 2].put(m, n, c, dtype, got, ld);
        t->ref->gemm[0].put(m, n, c, dtype, want, ld);
        kernel_same(t, "put", got, want, bytes);
        memset(got, 0xff, bytes);
        if (t->k->gemm[1].put_past) {
            t->k->gemm[1].put_past(m, n, c, dtype, got, ld);
            kernel_same(t, "put_past", got, want, bytes);
        }
        kernel_done(t);
    }
    t->aligned = true;
    const float *c = kernel_random(t, 256 * 32);
    uint16_t *dst = kernel_buffer(t, 256 * 32 * 2);
    KERNEL_BENCH(t, 256 * 32, "elem", t->k->gemm[1].put(256, 32, c, DPL_BF16, dst, 32));
}

// As many operations as it says, and with the values that they should have.
static void check_peak(kernel_test *t) {
    float *sink = kernel_random(t, 34);
    const dpl_gemm_kernels *g = &t->k->gemm[DPL_F32];
    sink[32] = 0.5f, sink[33] = 1; // x -> x * 0.5 + 1 tends to 2 from any start
    if (!(g->peak(100, sink) >= 100 * 2)) kernel_same(t, "operations", "0", "1", 1);
    for (size_t i = 0; i < 12; ++i) kernel_near(t, "fixed point", &sink[i], &(float){2}, 1, 1e-6);
    KERNEL_BENCH(t, g->peak(1000, sink), "FLOP", g->peak(1000, sink));
    g = &t->k->gemm[DPL_BF16];
    const unsigned entered = dpl_gemm_enter(g);
    KERNEL_BENCH(t, g->peak(1000, sink), "FLOP", g->peak(1000, sink));
    dpl_gemm_leave(g, entered);
}

const kernel_entry kernel_gemm_entries[] = {
    {"gemm_tile_f32", check_tile_f32},
    {"gemm_tile_bf16", check_tile_bf16},
    {"gemm_left_rows_f32", check_left_rows_f32},
    {"gemm_left_cols_f32", check_left_cols_f32},
    {"gemm_left_rows_bf16", check_left_rows_bf16},
    {"gemm_left_cols_bf16", check_left_cols_bf16},
    {"gemm_right_rows_f32", check_right_rows_f32},
    {"gemm_right_cols_f32", check_right_cols_f32},
    {"gemm_right_rows_bf16", check_right_rows_bf16},
    {"gemm_right_cols_bf16", check_right_cols_bf16},
    {"gemm_right_pairs", check_right_pairs},
    {"gemm_take", check_take},
    {"gemm_put", check_put},
    {"gemm_peak", check_peak},
    {NULL, NULL},
};
