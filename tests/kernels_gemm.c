// kernels_gemm.c - bodies that check and benchmark the kernels of the grouped GEMM.
#include <float.h>
#include <math.h>
#include <stddef.h>

#include "kernels.h"

// The tile product against plain C. Both round each product and sum at most once per term, so they
// differ by at most 2 * depth * eps * sum |a b| <= 2 * depth^2 * eps * max |a| * max |b|.
static void tile_shape(kernel_test *t, size_t m, size_t n, size_t depth, bool add) {
    const size_t ldc = n + kernel_pick(t, 0, 5);
    const float *b = kernel_random(t, depth * 32);
    const float *a = kernel_random(t, depth * m);
    float *got = kernel_floats(t, m * ldc), *want = kernel_floats(t, m * ldc);
    for (size_t i = 0; add && i < m; ++i) {
        for (size_t j = 0; j < n; ++j) got[i * ldc + j] = want[i * ldc + j] = (float)(i + j);
    }
    // The plain tile has fewer rows; a row does not depend on the others.
    float *row = kernel_floats(t, depth);
    for (size_t i = 0; i < m; ++i) {
        for (size_t l = 0; l < depth; ++l) row[l] = a[l * m + i];
        t->ref->gemm.tile(1, n, depth, row, b, want + i * ldc, ldc, add,
                          (dpl_gemm_ahead){b, 64, 16, 4096});
    }
    t->k->gemm.tile(m, n, depth, a, b, got, ldc, add, (dpl_gemm_ahead){b, 64, 16, 4096});
    double sum = 0, largest = 0;
    for (size_t l = 0; l < depth; ++l) {
        double a_max = 0, b_max = 0;
        for (size_t i = 0; i < m; ++i) a_max = fmax(a_max, fabs((double)a[l * m + i]));
        for (size_t j = 0; j < 32; ++j) b_max = fmax(b_max, fabs((double)b[l * 32 + j]));
        sum += a_max * b_max;
    }
    largest = add ? (double)(m + n) : 0;
    const double bound = (double)(depth + 2) * (double)FLT_EPSILON * (sum + largest);
    kernel_near(t, "tile", got, want, m * ldc, bound);
    // The bits of a row are the same in a tile of its own.
    float *alone = kernel_floats(t, n);
    for (size_t i = 0; i < m; ++i) {
        for (size_t l = 0; l < depth; ++l) row[l] = a[l * m + i];
        for (size_t j = 0; add && j < n; ++j) alone[j] = (float)(i + j);
        t->k->gemm.tile(1, n, depth, row, b, alone, n, add, (dpl_gemm_ahead){b, 0, 1, 0});
        kernel_same(t, "a row alone", alone, got + i * ldc, n * sizeof *alone);
    }
    kernel_done(t);
}

static void check_tile(kernel_test *t) {
    const size_t mr = t->k->gemm.mr;
    for (size_t m = 1; m <= mr; ++m) {
        for (size_t i = 0; i < 6; ++i) {
            const size_t n = i < 2 ? 32 : kernel_pick(t, 1, 32);
            tile_shape(t, m, n, i == 5 ? 0 : kernel_pick(t, 1, DPL_GEMM_KC), i % 2 == 0);
        }
    }
    t->aligned = true;
    const float *a = kernel_random(t, DPL_GEMM_KC * mr), *b = kernel_random(t, DPL_GEMM_KC * 32);
    float *c = kernel_floats(t, mr * 32);
    KERNEL_BENCH(t, 2.0 * 32 * (double)(mr * DPL_GEMM_KC), "FLOP",
                 t->k->gemm.tile(mr, 32, DPL_GEMM_KC, a, b, c, 32, false,
                                 (dpl_gemm_ahead){b, 64, 16, 4096}));
}

typedef void (*pack_fn)(dpl_gemm_load load, size_t m, size_t kc, const void *src, size_t ld,
                        size_t w, float *dst);

static void check_pack(kernel_test *t, pack_fn pack, pack_fn ref, bool rows) {
    for (size_t i = 0; i < 60; ++i) {
        const dpl_gemm_load load = (dpl_gemm_load)(i % 3);
        const size_t m = kernel_pick(t, 1, 40), kc = kernel_pick(t, 1, 70);
        const size_t w = i % 2 ? m : dpl_round_up(m, 32);
        const size_t ld = (rows ? kc : m) + kernel_pick(t, 0, 3), n_lines = rows ? m : kc;
        const size_t n = (n_lines - 1) * ld + (rows ? kc : m); // Nothing after the last element.
        const void *src = load == DPL_LOAD_BF16 ? (void *)kernel_random_bf16(t, n)
                                                : (void *)kernel_random(t, n);
        float *got = kernel_floats(t, w * kc), *want = kernel_floats(t, w * kc);
        if (load != DPL_LOAD_BF16) ((float *)(uintptr_t)src)[n / 2] = i % 4 ? INFINITY : NAN;
        ref(load, m, kc, src, ld, w, want);
        pack(load, m, kc, src, ld, w, got);
        kernel_same(t, "packed", got, want, w * kc * sizeof *got);
        kernel_done(t);
    }
    t->aligned = true;
    const size_t m = t->k->gemm.mr, ld = rows ? DPL_GEMM_KC : m;
    const float *src = kernel_random(t, DPL_GEMM_KC * m);
    float *dst = kernel_floats(t, DPL_GEMM_KC * m);
    KERNEL_BENCH(t, (double)(DPL_GEMM_KC * m), "elem",
                 pack(DPL_LOAD_F32, m, DPL_GEMM_KC, src, ld, m, dst));
}

static void check_pack_rows(kernel_test *t) {
    check_pack(t, t->k->gemm.pack_rows, t->ref->gemm.pack_rows, true);
}

static void check_pack_cols(kernel_test *t) {
    check_pack(t, t->k->gemm.pack_cols, t->ref->gemm.pack_cols, false);
}

// x -> x * 0.5 + 1 tends to 2 from any start: the work was done, and as many times as it says.
static void check_peak_fma(kernel_test *t) {
    float *sink = kernel_random(t, 34);
    sink[32] = 0.5f, sink[33] = 1;
    if (!(t->k->gemm.peak_fma(100, sink) >= 100 * 2)) kernel_same(t, "operations", "0", "1", 1);
    for (size_t i = 0; i < 12; ++i) kernel_near(t, "fixed point", &sink[i], &(float){2}, 1, 1e-6);
    KERNEL_BENCH(t, t->k->gemm.peak_fma(1000, sink), "FLOP", t->k->gemm.peak_fma(1000, sink));
}

const kernel_entry kernel_gemm_entries[] = {
    {"gemm_tile", check_tile},
    {"gemm_pack_rows", check_pack_rows},
    {"gemm_pack_cols", check_pack_cols},
    {"gemm_peak_fma", check_peak_fma},
    {NULL, NULL},
};

_Static_assert(sizeof(dpl_gemm_kernels) - offsetof(dpl_gemm_kernels, tile) ==
                   (DPL_COUNT(kernel_gemm_entries) - 1) * sizeof(void (*)(void)),
               "each function of the table has a check entry");
