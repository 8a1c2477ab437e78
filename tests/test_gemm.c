/*
 * test_gemm.c - the grouped GEMM, its gradients, panels and bias against fp64 loops at all levels.
 *
 * Tolerances follow from the arithmetic: a sum of n fp32 products errs by at most about
 * (n + blocks) * eps * sum |a b|; a result stored as bf16 by 2^-9 of itself on top.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "cpu/ops.h"

#define GROUPS_MAX 32
#define SAMPLES    400 // elements of a result that are checked when it has more
#define EXTRA_ROWS 2   // rows beyond the last group, which nobody may touch

static uint64_t seed, n_drawn;

// Uniform in -2 .. 2 with 24 bits: operands are many, so this is cheap.
static float draw(void) {
    const uint64_t bits = (seed + ++n_drawn) * 0x9e3779b97f4a7c15u;
    return (float)(((bits ^ bits >> 29) * 0xbf58476d1ce4e5b9u) >> 40) * 0x1p-22f - 2;
}

static dpl_ctx *open_ctx(const char *level, int n_threads, bool deferred) {
    dpl_ctx *ctx = NULL;
    setenv("DPL_CPU", level, 1);
    if (dpl_ctx_create(n_threads, deferred, 0, &ctx) != DPL_OK) {
        print_message("SKIPPED level %s: %s\n", level, dpl_error_message());
    }
    unsetenv("DPL_CPU");
    return ctx;
}

static const char *const levels[] = {"ref", "avx2", "avx512", "avx512_bf16", "amx", "tiles"};

/* ---- a problem: operands, and results with everything poisoned that must not be written --------
 */

typedef struct problem {
    size_t n_groups, n, k, n_rows, gap; // gap: elements between rows
    int64_t offsets[GROUPS_MAX + 1];
    dpl_dtype act, weight; // dtypes in memory
    dpl_mat x, dy;
    float *w_plain, *w_panels;
    uint16_t *w_bf16;
    dpl_weight w;
} problem;

typedef struct result {
    dpl_mat y, dx, dx_sum;
    float *dw, *dw_new; // += and =
} result;

static void *poisoned(size_t bytes) {
    void *p = malloc(bytes ? bytes : 1);
    assert_non_null(p);
    memset(p, 0xff, bytes);
    return p;
}

static size_t mat_bytes(size_t rows, size_t ld, dpl_dtype dtype) {
    return rows * ld * dpl_dtype_bytes(dtype);
}

static double element(dpl_mat m, size_t row, size_t col) {
    const void *p = dpl_mat_at(m, row, col).p;
    return m.dtype == DPL_F32 ? (double)*(const float *)p
                              : (double)dpl_bf16_to_f32(*(const uint16_t *)p);
}

// Exactly as long as its last element: a read past it is found by the sanitizer.
static dpl_mat random_mat(size_t rows, size_t cols, size_t gap, dpl_dtype dtype) {
    const size_t ld = cols + gap, n = rows ? (rows - 1) * ld + cols : 0;
    dpl_mat m = {poisoned(n * dpl_dtype_bytes(dtype)), ld, dtype};
    for (size_t r = 0; r < rows; ++r) {
        for (size_t c = 0; c < cols; ++c) {
            const float v = draw();
            if (dtype == DPL_F32) *(float *)dpl_mat_at(m, r, c).p = v;
            else *(uint16_t *)dpl_mat_at(m, r, c).p = dpl_f32_to_bf16(v);
        }
    }
    return m;
}

static problem make_problem(size_t n_groups, const int *sizes, size_t n, size_t k, size_t gap,
                            dpl_dtype act, dpl_dtype weight) {
    problem p = {.n_groups = n_groups, .n = n, .k = k, .gap = gap, .act = act, .weight = weight};
    const size_t n_w = n_groups * n * k, n_panels = n_groups * dpl_panel_elems(n, k);
    for (size_t g = 0; g < n_groups; ++g) p.offsets[g + 1] = p.offsets[g] + sizes[g];
    p.n_rows = (size_t)p.offsets[n_groups];
    p.x = random_mat(p.n_rows, k, gap, act);
    p.dy = random_mat(p.n_rows, n, gap, act);
    p.w_plain = poisoned(n_w * sizeof(float));
    p.w_panels = dpl_alloc(n_panels * sizeof(float));
    p.w_bf16 = dpl_alloc(n_panels * sizeof(uint16_t));
    for (size_t i = 0; i < n_w; ++i) {
        p.w_plain[i] = draw();
        if (weight == DPL_BF16) p.w_plain[i] = dpl_bf16_to_f32(dpl_f32_to_bf16(p.w_plain[i]));
        const size_t g = i / (n * k), r = i / k % n, c = i % k;
        const size_t at = g * dpl_panel_elems(n, k) + dpl_panel_index(r, c, k);
        p.w_panels[at] = p.w_plain[i];
        p.w_bf16[dpl_pair_index(at)] = dpl_f32_to_bf16(p.w_plain[i]);
    }
    p.w = (dpl_weight){weight == DPL_BF16 ? (void *)p.w_bf16 : (void *)p.w_panels,
                       weight,
                       n_groups,
                       n,
                       k,
                       NULL,
                       NULL,
                       NULL};
    return p;
}

static void free_problem(problem *p) {
    free(p->x.p), free(p->dy.p), free(p->w_plain);
    dpl_free(p->w_panels), dpl_free(p->w_bf16);
}

static float dw_start(size_t g, size_t n, size_t k) {
    return (float)(1 + g + n % 7) + (float)(k % 5) / 4;
}
static float dx_start(size_t row, size_t k) {
    return (float)(row % 3) - (float)(k % 11) / 8;
}

static result make_result(const problem *p) {
    const size_t rows = p->n_rows + EXTRA_ROWS, ld_y = p->n + p->gap, ld_x = p->k + p->gap;
    result r = {.y = {poisoned(mat_bytes(rows, ld_y, p->act)), ld_y, p->act},
                .dx = {poisoned(mat_bytes(rows, ld_x, p->act)), ld_x, p->act},
                .dx_sum = {poisoned(mat_bytes(rows, ld_x, DPL_F32)), ld_x, DPL_F32},
                .dw = poisoned(p->n_groups * dpl_panel_elems(p->n, p->k) * sizeof(float)),
                .dw_new = poisoned(p->n_groups * dpl_panel_elems(p->n, p->k) * sizeof(float))};
    for (size_t i = 0; i < p->n_rows * p->k; ++i) {
        *(float *)dpl_mat_at(r.dx_sum, i / p->k, i % p->k).p = dx_start(i / p->k, i % p->k);
    }
    // Groups without rows and the padding of panels keep their poison.
    for (size_t g = 0; g < p->n_groups; ++g) {
        if (p->offsets[g] == p->offsets[g + 1]) continue;
        for (size_t i = 0; i < p->n * p->k; ++i) {
            const size_t at = dpl_panel_index(i / p->k, i % p->k, p->k);
            r.dw[g * dpl_panel_elems(p->n, p->k) + at] = dw_start(g, i / p->k, i % p->k);
        }
    }
    return r;
}

static void free_result(result *r) {
    free(r->y.p), free(r->dx.p), free(r->dx_sum.p), free(r->dw), free(r->dw_new);
}

static void run_problem(dpl_ctx *ctx, const problem *p, result *r) {
    const dpl_groups groups = {p->n_groups, p->n_rows, p->offsets};
    dpl_gemm_forward(ctx, p->x, &p->w, groups, r->y);
    dpl_gemm_dgrad(ctx, p->dy, &p->w, groups, r->dx, false);
    dpl_gemm_dgrad(ctx, p->dy, &p->w, groups, r->dx_sum, true);
    dpl_gemm_wgrad(ctx, p->dy, p->x, (dpl_row_map){0}, groups, p->n, p->k, p->weight, true, r->dw);
    dpl_gemm_wgrad(ctx, p->dy, p->x, (dpl_row_map){0}, groups, p->n, p->k, p->weight, false,
                   r->dw_new);
    dpl_ctx_wait(ctx);
}

static void same_result(const problem *p, const result *a, const result *b) {
    const size_t rows = p->n_rows + EXTRA_ROWS;
    assert_memory_equal(a->y.p, b->y.p, mat_bytes(rows, a->y.ld, p->act));
    assert_memory_equal(a->dx.p, b->dx.p, mat_bytes(rows, a->dx.ld, p->act));
    assert_memory_equal(a->dx_sum.p, b->dx_sum.p, mat_bytes(rows, a->dx_sum.ld, DPL_F32));
    const size_t dw_bytes = p->n_groups * dpl_panel_elems(p->n, p->k) * sizeof(float);
    assert_memory_equal(a->dw, b->dw, dw_bytes);
    assert_memory_equal(a->dw_new, b->dw_new, dw_bytes);
}

/* ---- the judge ---------------------------------------------------------------------------------
 */

// An operand as the multiplication sees it.
static double operand(const problem *p, dpl_mat m, size_t row, size_t col) {
    const double v = element(m, row, col);
    return p->weight == DPL_BF16 ? (double)dpl_bf16_to_f32(dpl_f32_to_bf16((float)v)) : v;
}

static void near(const char *what, size_t row, size_t col, double got, double want, double sum_abs,
                 size_t depth, dpl_dtype stored) {
    double bound = (double)(depth + depth / 64 + 3) * (double)FLT_EPSILON * sum_abs;
    if (stored == DPL_BF16) bound += fabs(want) / 256;
    if (fabs(got - want) <= bound) return;
    print_error("%s (%zu, %zu) is %.9g, expected %.9g within %.3g\n", what, row, col, got, want,
                bound);
    fail();
}

static void judge_row(const problem *p, const result *r, size_t g, size_t row, size_t col,
                      bool dgrad) {
    const size_t depth = dgrad ? p->n : p->k;
    const float *w = p->w_plain + g * p->n * p->k;
    double sum = 0, sum_abs = 0;
    for (size_t l = 0; l < depth; ++l) {
        const double t = dgrad ? operand(p, p->dy, row, l) * (double)w[l * p->k + col]
                               : operand(p, p->x, row, l) * (double)w[col * p->k + l];
        sum += t, sum_abs += fabs(t);
    }
    if (!dgrad) {
        near("y", row, col, element(r->y, row, col), sum, sum_abs, depth, p->act);
        return;
    }
    const double start = (double)dx_start(row, col);
    near("dx", row, col, element(r->dx, row, col), sum, sum_abs, depth, p->act);
    near("dx +=", row, col, element(r->dx_sum, row, col), start + sum, sum_abs + fabs(start), depth,
         DPL_F32);
}

static void judge_dw(const problem *p, const result *r, size_t g, size_t n, size_t k) {
    const size_t first = (size_t)p->offsets[g], end = (size_t)p->offsets[g + 1];
    const double start = (double)dw_start(g, n, k);
    double sum = 0, sum_abs = 0;
    for (size_t row = first; row < end; ++row) {
        const double t = operand(p, p->dy, row, n) * operand(p, p->x, row, k);
        sum += t, sum_abs += fabs(t);
    }
    const size_t at = g * dpl_panel_elems(p->n, p->k) + dpl_panel_index(n, k, p->k);
    near("dw", n, k, (double)r->dw_new[at], sum, sum_abs, end - first, DPL_F32);
    near("dw +=", n, k, (double)r->dw[at], start + sum, sum_abs + fabs(start), end - first,
         DPL_F32);
}

// Calls fn for all of rows x cols elements, or for a sample that has the corners.
typedef void (*judge_fn)(const problem *p, const result *r, size_t g, size_t row, size_t col);

static void judge_all(const problem *p, const result *r, size_t g, size_t row0, size_t rows,
                      size_t cols, judge_fn fn) {
    const bool all = rows * cols <= SAMPLES;
    for (size_t i = 0; i < (all ? rows * cols : SAMPLES); ++i) {
        size_t at = all ? i : (size_t)(dpl_rng_u64(seed, 2, n_drawn++) % (rows * cols));
        if (i == 0) at = rows * cols - 1;
        if (i == 1) at = 0;
        fn(p, r, g, row0 + at / cols, at % cols);
    }
}

static void judge_y(const problem *p, const result *r, size_t g, size_t row, size_t col) {
    judge_row(p, r, g, row, col, false);
}

static void judge_dx(const problem *p, const result *r, size_t g, size_t row, size_t col) {
    judge_row(p, r, g, row, col, true);
}

static void still_poison(const void *p, size_t bytes) {
    const uint8_t *b = p;
    for (size_t i = 0; i < bytes; ++i) assert_int_equal(b[i], 0xff);
}

static void judge_untouched(const problem *p, const result *r) {
    const size_t elem = dpl_dtype_bytes(p->act), rows = p->n_rows;
    for (size_t row = 0; row < rows; ++row) {
        still_poison(dpl_mat_at(r->y, row, p->n).p, p->gap * elem);
        still_poison(dpl_mat_at(r->dx, row, p->k).p, p->gap * elem);
    }
    still_poison(dpl_mat_row(r->y, rows), EXTRA_ROWS * r->y.ld * elem);
    still_poison(dpl_mat_row(r->dx, rows), EXTRA_ROWS * r->dx.ld * elem);
    still_poison(dpl_mat_row(r->dx_sum, rows), EXTRA_ROWS * r->dx_sum.ld * sizeof(float));
    for (size_t g = 0; g < p->n_groups; ++g) {
        const size_t elems = dpl_panel_elems(p->n, p->k);
        const float *dw = r->dw + g * elems, *dw_new = r->dw_new + g * elems;
        if (p->offsets[g] == p->offsets[g + 1]) {
            still_poison(dw, elems * sizeof *dw);
            for (size_t i = 0; i < elems; ++i) assert_true(dw_new[i] == 0);
        }
        for (size_t n = p->n; n < dpl_round_up(p->n, DPL_PANEL); ++n) {
            for (size_t k = 0; k < p->k; ++k)
                still_poison(dw + dpl_panel_index(n, k, p->k), sizeof *dw);
        }
    }
}

static void judge(const problem *p, const result *r) {
    for (size_t g = 0; g < p->n_groups; ++g) {
        const size_t row0 = (size_t)p->offsets[g], rows = (size_t)p->offsets[g + 1] - row0;
        if (rows == 0) continue;
        judge_all(p, r, g, row0, rows, p->n, judge_y);
        judge_all(p, r, g, row0, rows, p->k, judge_dx);
        judge_all(p, r, g, 0, p->n, p->k, judge_dw);
    }
    judge_untouched(p, r);
}

/* ---- cases -------------------------------------------------------------------------------------
 */

typedef struct shape {
    size_t n_groups;
    int sizes[GROUPS_MAX];
    size_t n, k, gap;
} shape;

static const shape shapes[] = {
    {4, {5, 0, 3, 0}, 8, 8, 0},
    {4, {0, 0, 0, 0}, 8, 8, 0},
    {3, {0, 7, 0}, 33, 20, 1},
    {3, {16, 16, 0}, 64, 32, 0},
    {3, {0, 16, 16}, 64, 32, 0},
    {3, {16, 0, 16}, 64, 32, 0},
    {18, {5, 6, 4, 7, 1, 9}, 43, 64, 0},
    {6, {1, 127, 128, 129, 0, 3}, 128, 128, 0},
    {2, {13, 3}, 1, 1, 2},
    {2, {13, 3}, 20, 7, 0},
    {2, {29, 1}, 7, 9, 5},
    {1, {15}, 31, 1025, 0},
    {2, {15, 30}, 1025, 31, 3},
    {3, {300, 2, 600}, 96, 300, 1}, // several row blocks, token blocks, contraction blocks
    {1, {270}, 70, 513, 0},
    {4, {1, 1, 1, 1}, 48, 520, 0},
    {1, {16}, 14336, 64, 0},
    {1, {16}, 64, 14336, 0},
    {2, {5, 11}, 512, 4096, 0},
    {2, {120, 60}, 130, 2100, 0}, // all of it fits where a whole number of chunks does not
};
static const dpl_dtype dtypes[][2] = {
    {DPL_F32, DPL_F32}, {DPL_BF16, DPL_F32}, {DPL_BF16, DPL_BF16}, {DPL_F32, DPL_BF16}};

static problem shape_problem(const shape *s, const dpl_dtype *dtype) {
    return make_problem(s->n_groups, s->sizes, s->n, s->k, s->gap, dtype[0], dtype[1]);
}

static void test_against_fp64(void **state) {
    (void)state;
    for (size_t l = 0; l < DPL_COUNT(levels); ++l) {
        dpl_ctx *ctx = open_ctx(levels[l], 2, false);
        if (!ctx) continue;
        for (size_t i = 0; i < DPL_COUNT(shapes) * DPL_COUNT(dtypes); ++i) {
            problem p = shape_problem(&shapes[i / DPL_COUNT(dtypes)],
                                      dtypes[i % DPL_COUNT(dtypes)]);
            result r = make_result(&p);
            run_problem(ctx, &p, &r);
            judge(&p, &r);
            free_result(&r);
            free_problem(&p);
        }
        dpl_ctx_close(&ctx);
    }
}

/* fp32 from parts of bf16: six products are as exact as multiply-adds, by the bound of those and by
 * their error on a long sum; three leave 2^-16 of each product. */
static double rms_error(const problem *p, dpl_ctx *ctx, const char *precision) {
    result r = make_result(p);
    assert_int_equal(dpl_ctx_set_precision(ctx, precision), DPL_OK);
    run_problem(ctx, p, &r);
    if (strcmp(precision, "bf16_x3") != 0) judge(p, &r);
    double squares = 0, size = 0;
    for (size_t row = 0; row < p->n_rows; ++row) {
        for (size_t n = 0; n < p->n; ++n) {
            double sum = 0;
            for (size_t l = 0; l < p->k; ++l)
                sum += element(p->x, row, l) * (double)p->w_plain[n * p->k + l];
            const double e = element(r.y, row, n) - sum;
            squares += e * e, size += sum * sum;
        }
    }
    free_result(&r);
    return sqrt(squares / size);
}

static void test_split_products(void **state) {
    static const size_t chosen[] = {2, 6, 11, 12, 13};
    static const shape long_sums = {1, {40}, 64, 2048, 0};
    (void)state;
    for (size_t l = 0; l < DPL_COUNT(levels); ++l) {
        dpl_ctx *ctx = open_ctx(levels[l], 2, false);
        if (!ctx) continue;
        for (size_t i = 0; i < DPL_COUNT(chosen) * 2; ++i) {
            problem p = shape_problem(&shapes[chosen[i / 2]], dtypes[i % 2]);
            result r = make_result(&p);
            assert_int_equal(dpl_ctx_set_precision(ctx, "bf16_x6"), DPL_OK);
            run_problem(ctx, &p, &r);
            judge(&p, &r);
            free_result(&r);
            free_problem(&p);
        }
        problem p = shape_problem(&long_sums, dtypes[0]);
        const double fma = rms_error(&p, ctx, "highest"), six = rms_error(&p, ctx, "bf16_x6");
        const double three = rms_error(&p, ctx, "bf16_x3");
        print_message("%s: relative error of multiply-adds %.2g, six products %.2g, three %.2g\n",
                      levels[l], fma, six, three);
        assert_true(six < 2 * fma && six < 1e-6);
        assert_true(three < 0x1p-16 && three > 2 * six);
        free_problem(&p);
        assert_int_equal(dpl_ctx_set_precision(ctx, "bf16_x2"), DPL_EINVAL);
        dpl_ctx_close(&ctx);
    }
}

static void test_threads_do_not_matter(void **state) {
    static const int n_threads[] = {1, 2, 3, 8};
    static const size_t chosen[] = {7, 12, 13, 14, 15};
    (void)state;
    for (size_t l = 0; l < DPL_COUNT(levels); ++l) {
        dpl_ctx *ctx[DPL_COUNT(n_threads)];
        for (size_t t = 0; t < DPL_COUNT(n_threads); ++t)
            ctx[t] = open_ctx(levels[l], n_threads[t], false);
        for (size_t i = 0; ctx[0] && i < DPL_COUNT(chosen) * 2; ++i) {
            problem p = shape_problem(&shapes[chosen[i / 2]], dtypes[i % 2 * 2]);
            result want = make_result(&p);
            run_problem(ctx[0], &p, &want);
            for (size_t t = 1; t < DPL_COUNT(n_threads); ++t) {
                result got = make_result(&p);
                run_problem(ctx[t], &p, &got);
                same_result(&p, &got, &want);
                free_result(&got);
            }
            free_result(&want);
            free_problem(&p);
        }
        for (size_t t = 0; t < DPL_COUNT(n_threads); ++t) dpl_ctx_close(&ctx[t]);
    }
}

static void test_repeated_calls_are_equal(void **state) {
    (void)state;
    dpl_ctx *ctx = open_ctx("avx512", 2, false);
    if (!ctx) ctx = open_ctx("ref", 2, false);
    problem p = shape_problem(&shapes[7], dtypes[0]);
    result want = make_result(&p);
    run_problem(ctx, &p, &want);
    for (int i = 0; i < 100; ++i) {
        result got = make_result(&p);
        run_problem(ctx, &p, &got);
        same_result(&p, &got, &want);
        free_result(&got);
    }
    free_result(&want);
    free_problem(&p);
    dpl_ctx_close(&ctx);
}

// A result too long for the caches may be stored past them: its halves alone are the same bits.
static void test_long_results(void **state) {
    (void)state;
    enum { ROWS = 4400, N = 2048, K = 16 }; // 18 MB of bf16
    const size_t n_panels = dpl_panel_elems(N, K);
    uint16_t *w_bf16 = dpl_alloc(n_panels * sizeof *w_bf16);
    for (size_t i = 0; i < n_panels; i++) w_bf16[i] = dpl_f32_to_bf16(draw());
    dpl_mat x = random_mat(ROWS, K, 0, DPL_BF16);
    const dpl_weight w = {w_bf16, DPL_BF16, 1, N, K, NULL, NULL, NULL};
    uint16_t *whole = dpl_alloc(ROWS * N * sizeof *whole), *half = dpl_alloc(ROWS * N);
    for (size_t l = 0; l < DPL_COUNT(levels); l++) {
        dpl_ctx *ctx = open_ctx(levels[l], 2, false);
        if (!ctx) continue;
        dpl_gemm_forward(ctx, x, &w, dpl_one_group(ROWS), (dpl_mat){whole, N, DPL_BF16});
        for (size_t row = 0; row < ROWS; row += ROWS / 2) {
            dpl_gemm_forward(ctx, dpl_mat_at(x, row, 0), &w, dpl_one_group(ROWS / 2),
                             (dpl_mat){half, N, DPL_BF16});
            dpl_ctx_wait(ctx);
            assert_memory_equal(whole + row * N, half, ROWS / 2 * N * sizeof *half);
        }
        dpl_ctx_close(&ctx);
    }
    dpl_free(whole), dpl_free(half), dpl_free(w_bf16), free(x.p);
}

// A row alone gives the bits that it gives among others, even if one of those is not finite.
static void test_rows_are_independent(void **state) {
    (void)state;
    for (size_t l = 0; l < DPL_COUNT(levels); ++l) {
        dpl_ctx *ctx = open_ctx(levels[l], 2, false);
        if (!ctx) continue;
        for (size_t i = 0; i < DPL_COUNT(dtypes); ++i) {
            problem p = shape_problem(&shapes[13], dtypes[i]);
            if (p.act == DPL_F32) *(float *)dpl_mat_at(p.x, 17, 3).p = INFINITY;
            result among = make_result(&p), alone = make_result(&p);
            run_problem(ctx, &p, &among);
            for (size_t row = 0; row < p.n_rows; row += 1 + row / 40) {
                const size_t g = row < 300 ? 0 : row < 302 ? 1 : 2;
                const size_t w_bytes = dpl_panel_elems(p.n, p.k) * dpl_dtype_bytes(p.weight);
                const dpl_weight w = {
                    (const uint8_t *)p.w.p + g * w_bytes, p.weight, 1, p.n, p.k, NULL, NULL, NULL};
                dpl_gemm_forward(ctx, dpl_mat_at(p.x, row, 0), &w, dpl_one_group(1),
                                 dpl_mat_at(alone.y, row, 0));
                dpl_gemm_dgrad(ctx, dpl_mat_at(p.dy, row, 0), &w, dpl_one_group(1),
                               dpl_mat_at(alone.dx, row, 0), false);
                const size_t elem = dpl_dtype_bytes(p.act);
                assert_memory_equal(dpl_mat_row(alone.y, row), dpl_mat_row(among.y, row),
                                    p.n * elem);
                assert_memory_equal(dpl_mat_row(alone.dx, row), dpl_mat_row(among.dx, row),
                                    p.k * elem);
            }
            free_result(&among);
            free_result(&alone);
            free_problem(&p);
        }
        dpl_ctx_close(&ctx);
    }
}

static void test_deferred_context(void **state) {
    (void)state;
    dpl_ctx *now = open_ctx("ref", 1, false), *later = open_ctx("ref", 2, true);
    const int sizes[] = {40, 0, 9};
    problem p = make_problem(3, sizes, 50, 300, 0, DPL_F32, DPL_F32);
    result want = make_result(&p);
    run_problem(now, &p, &want);
    const size_t y_bytes = p.n_rows * p.n * sizeof(float);
    float *y = dpl_ctx_alloc(later, y_bytes);
    int64_t *offsets = dpl_ctx_alloc(later, sizeof p.offsets);
    memset(y, 0, y_bytes);
    memset(offsets, 0xff, sizeof p.offsets);
    const dpl_groups groups = {p.n_groups, p.n_rows, offsets};
    dpl_gemm_forward(later, p.x, &p.w, groups, (dpl_mat){y, p.n, DPL_F32});
    assert_true(isnan(y[0])); // Not computed yet, and the offsets are not known yet.
    memcpy(offsets, p.offsets, sizeof p.offsets);
    float *host = poisoned(y_bytes);
    dpl_ctx_read(later, host, y, y_bytes);
    assert_memory_equal(host, want.y.p, y_bytes);
    free(host);
    free_result(&want);
    free_problem(&p);
    dpl_ctx_close(&now);
    dpl_ctx_close(&later);
}

/* ---- products that end with SwiGLU --------------------------------------------------------------
 */

// Of a gated MLP of width d and f: gate_up = x W_in^T, hidden, and dhidden = dy W_out on the way
// back. There gate_up is another one, whose padding may hold anything.
typedef struct mlp {
    problem in, out;
    size_t f;
    dpl_mat gate_up;
    float *row_weight; // NULL: without
} mlp;

typedef struct mlp_result {
    dpl_mat gate_up, hidden, dgate_up;
    float *drow_weight;
} mlp_result;

static mlp make_mlp(const shape *s, const dpl_dtype *dtype, bool weighted) {
    const size_t f = s->k, width = dpl_gate_up_width(f);
    mlp p = {.f = f};
    p.in = make_problem(s->n_groups, s->sizes, width, s->n, s->gap, dtype[0], dtype[1]);
    p.out = make_problem(s->n_groups, s->sizes, s->n, f, s->gap, dtype[0], dtype[1]);
    const size_t rows = p.in.n_rows;
    p.gate_up = random_mat(rows, width, s->gap, dtype[0]);
    for (size_t c = f; c < dpl_round_up(f, 16); ++c)
        for (size_t i = 0; i < 2 * rows; ++i)
            memset(dpl_mat_at(p.gate_up, i / 2, dpl_gate_column(c) + i % 2 * 16).p, 0xff,
                   dpl_dtype_bytes(dtype[0]));
    if (weighted) p.row_weight = random_mat(rows, 1, 0, DPL_F32).p;
    return p;
}

static void free_mlp(mlp *p) {
    free_problem(&p->in), free_problem(&p->out);
    free(p->gate_up.p), free(p->row_weight);
}

static dpl_mat poisoned_mat(const mlp *p, size_t cols, dpl_dtype dtype) {
    const size_t ld = cols + p->in.gap;
    return (dpl_mat){poisoned(mat_bytes(p->in.n_rows + EXTRA_ROWS, ld, dtype)), ld, dtype};
}

static mlp_result make_mlp_result(const mlp *p) {
    return (mlp_result){poisoned_mat(p, p->in.n, p->in.act), poisoned_mat(p, p->f, p->in.act),
                        poisoned_mat(p, p->in.n, p->in.act),
                        poisoned((p->in.n_rows + EXTRA_ROWS) * sizeof(float))};
}

static void free_mlp_result(mlp_result *r) {
    free(r->gate_up.p), free(r->hidden.p), free(r->dgate_up.p), free(r->drow_weight);
}

static void run_mlp(dpl_ctx *ctx, const mlp *p, mlp_result *r) {
    const dpl_groups groups = {p->in.n_groups, p->in.n_rows, p->in.offsets};
    dpl_gemm_swiglu_forward(ctx, p->in.x, (dpl_row_map){0}, &p->in.w, groups, p->row_weight,
                            r->gate_up, p->f, r->hidden);
    dpl_gemm_swiglu_backward(ctx, p->out.dy, &p->out.w, groups, p->row_weight, p->gate_up,
                             r->dgate_up, p->row_weight ? r->drow_weight : NULL);
    dpl_ctx_wait(ctx);
}

static void same_mat(const mlp *p, dpl_mat a, dpl_mat b) {
    assert_memory_equal(a.p, b.p, mat_bytes(p->in.n_rows + EXTRA_ROWS, a.ld, a.dtype));
}

static void same_mlp_result(const mlp *p, const mlp_result *a, const mlp_result *b) {
    same_mat(p, a->gate_up, b->gate_up);
    same_mat(p, a->hidden, b->hidden);
    same_mat(p, a->dgate_up, b->dgate_up);
    assert_memory_equal(a->drow_weight, b->drow_weight,
                        (p->in.n_rows + EXTRA_ROWS) * sizeof(float));
}

static void within(const char *what, size_t row, size_t col, double got, double want, double bound,
                   dpl_dtype stored) {
    if (stored == DPL_BF16) bound += fabs(want) / 256;
    if (fabs(got - want) <= bound) return;
    print_error("%s (%zu, %zu) is %.9g, expected %.9g within %.3g\n", what, row, col, got, want,
                bound);
    fail();
}

// The sigmoid is good to a few roundings, or to the smallest normal number; so are its products.
static double sigmoid_bound(double s, double times) {
    return fabs(times) * (16 * 0x1p-24 * s + 4 * (double)FLT_MIN);
}

static void judge_hidden(const mlp *p, const mlp_result *r, size_t row, size_t col) {
    const size_t at = dpl_gate_column(col);
    const double g = element(r->gate_up, row, at), u = element(r->gate_up, row, at + 16);
    const double s = 1 / (1 + exp(-g)), w = p->row_weight ? (double)p->row_weight[row] : 1;
    within("hidden", row, col, element(r->hidden, row, col), g * s * u * w,
           sigmoid_bound(s, g * u * w), p->in.act);
}

// dh: dhidden in fp32. Adds to the gradient of the row's weight and to the size of its terms.
static void judge_dgate_up(const mlp *p, const mlp_result *r, dpl_mat dh, size_t row, size_t col,
                           double drow[2]) {
    const size_t at = dpl_gate_column(col);
    const double g = element(p->gate_up, row, at), u = element(p->gate_up, row, at + 16);
    const double s = 1 / (1 + exp(-g)), w = p->row_weight ? (double)p->row_weight[row] : 1;
    const double d = element(dh, row, col);
    // 1 - s carries the absolute error of s.
    within("dgate", row, at, element(r->dgate_up, row, at), d * w * u * s * (1 + g * (1 - s)),
           sigmoid_bound(s, d * w * u * (1 + fabs(g))), p->in.act);
    within("dup", row, at + 16, element(r->dgate_up, row, at + 16), d * w * g * s,
           sigmoid_bound(s, d * w * g), p->in.act);
    drow[0] += d * g * s * u;
    drow[1] += fabs(d * g * s * u);
}

// gate_up has the bits of the plain product, and the gradient is that of its fp32 dhidden: both are
// held against fp64 elsewhere.
static void judge_mlp(dpl_ctx *ctx, const mlp *p, const mlp_result *r) {
    const dpl_groups groups = {p->in.n_groups, p->in.n_rows, p->in.offsets};
    const dpl_mat plain = poisoned_mat(p, p->in.n, p->in.act);
    const dpl_mat dh = poisoned_mat(p, p->f, DPL_F32);
    const size_t rows = p->in.n_rows, elem = dpl_dtype_bytes(p->in.act), gap = p->in.gap * elem;
    dpl_gemm_forward(ctx, p->in.x, &p->in.w, groups, plain);
    dpl_gemm_dgrad(ctx, p->out.dy, &p->out.w, groups, dh, false);
    dpl_ctx_wait(ctx);
    same_mat(p, r->gate_up, plain);
    const size_t step = 1 + rows / 20; // one row in so many, the last one too
    for (size_t i = 0; i < rows; i += step) {
        const size_t row = rows - 1 - i;
        double drow[2] = {0};
        for (size_t col = 0; col < p->f; ++col) {
            judge_hidden(p, r, row, col);
            judge_dgate_up(p, r, dh, row, col, drow);
        }
        for (size_t col = p->f; col < dpl_round_up(p->f, 16); ++col) {
            const size_t at = dpl_gate_column(col);
            assert_true(element(r->dgate_up, row, at) == 0);
            assert_true(element(r->dgate_up, row, at + 16) == 0);
        }
        if (p->row_weight)
            within("drow_weight", row, 0, (double)r->drow_weight[row], drow[0],
                   64 * 0x1p-24 * drow[1], DPL_F32);
    }
    for (size_t row = 0; row < rows; ++row) {
        still_poison(dpl_mat_at(r->hidden, row, p->f).p, gap);
        still_poison(dpl_mat_at(r->dgate_up, row, p->in.n).p, gap);
    }
    still_poison(dpl_mat_row(r->hidden, rows), EXTRA_ROWS * r->hidden.ld * elem);
    still_poison(dpl_mat_row(r->dgate_up, rows), EXTRA_ROWS * r->dgate_up.ld * elem);
    const size_t untouched = p->row_weight ? rows : 0;
    still_poison(r->drow_weight + untouched, (rows + EXTRA_ROWS - untouched) * sizeof(float));
    free(plain.p), free(dh.p);
}

static const shape wide_mlp = {2, {290, 10}, 2100, 40, 1}; // whose sums have to wait

static void check_mlp(dpl_ctx *ctx, const shape *s, const dpl_dtype *dtype, bool weighted) {
    mlp p = make_mlp(s, dtype, weighted);
    mlp_result r = make_mlp_result(&p);
    run_mlp(ctx, &p, &r);
    judge_mlp(ctx, &p, &r);
    free_mlp_result(&r);
    free_mlp(&p);
}

static void test_swiglu(void **state) {
    (void)state;
    for (size_t l = 0; l < DPL_COUNT(levels); ++l) {
        dpl_ctx *ctx = open_ctx(levels[l], 2, false);
        if (!ctx) continue;
        for (size_t i = 0; i < (DPL_COUNT(shapes) + 1) * DPL_COUNT(dtypes); ++i) {
            const size_t n = i / DPL_COUNT(dtypes);
            check_mlp(ctx, n < DPL_COUNT(shapes) ? &shapes[n] : &wide_mlp,
                      dtypes[i % DPL_COUNT(dtypes)], n % 2 == 0);
        }
        assert_int_equal(dpl_ctx_set_precision(ctx, "bf16_x6"), DPL_OK);
        check_mlp(ctx, &wide_mlp, dtypes[0], true);
        check_mlp(ctx, &shapes[13], dtypes[1], true);
        dpl_ctx_close(&ctx);
    }
}

static void test_swiglu_threads_do_not_matter(void **state) {
    static const int n_threads[] = {1, 2, 3, 8, 3};
    (void)state;
    for (size_t l = 0; l < DPL_COUNT(levels); ++l) {
        dpl_ctx *ctx[DPL_COUNT(n_threads)];
        for (size_t t = 0; t < DPL_COUNT(n_threads); ++t) // the last one runs them later
            ctx[t] = open_ctx(levels[l], n_threads[t], t == 4);
        for (size_t i = 0; ctx[0] && i < 6; ++i) {
            const shape *s = i / 2 == 0 ? &shapes[13] : i / 2 == 1 ? &shapes[14] : &wide_mlp;
            mlp p = make_mlp(s, dtypes[i % 2 * 2], true);
            mlp_result want = make_mlp_result(&p);
            run_mlp(ctx[0], &p, &want);
            for (size_t t = 1; t < DPL_COUNT(n_threads); ++t) {
                mlp_result got = make_mlp_result(&p);
                run_mlp(ctx[t], &p, &got);
                same_mlp_result(&p, &got, &want);
                free_mlp_result(&got);
            }
            free_mlp_result(&want);
            free_mlp(&p);
        }
        for (size_t t = 0; t < DPL_COUNT(n_threads); ++t) dpl_ctx_close(&ctx[t]);
    }
}

// Each row alone gives what it gives among others.
static void test_swiglu_rows_are_independent(void **state) {
    const shape *s = &shapes[13];
    (void)state;
    for (size_t l = 0; l < DPL_COUNT(levels); ++l) {
        dpl_ctx *ctx = open_ctx(levels[l], 2, false);
        for (size_t i = 0; ctx && i < DPL_COUNT(dtypes); ++i) {
            mlp p = make_mlp(s, dtypes[i], true), one = p;
            mlp_result among = make_mlp_result(&p), alone = make_mlp_result(&p);
            run_mlp(ctx, &p, &among);
            one.in.n_groups = one.out.n_groups = one.in.n_rows = 1;
            memcpy(one.in.offsets, (const int64_t[]){0, 1}, 2 * sizeof(int64_t));
            for (size_t row = 0; row < p.in.n_rows; ++row) {
                const size_t g = row < 300   ? 0
                                 : row < 302 ? 1
                                             : 2,
                             elem = dpl_dtype_bytes(p.in.weight);
                one.in.x = dpl_mat_at(p.in.x, row, 0);
                one.out.dy = dpl_mat_at(p.out.dy, row, 0);
                one.gate_up = dpl_mat_at(p.gate_up, row, 0);
                one.row_weight = p.row_weight + row;
                one.in.w.p = (const uint8_t *)p.in.w.p + g * dpl_panel_elems(p.in.n, p.in.k) * elem;
                one.out.w.p = (const uint8_t *)p.out.w.p +
                              g * dpl_panel_elems(p.out.n, p.out.k) * elem;
                one.in.w.n_groups = one.out.w.n_groups = 1;
                mlp_result r = {dpl_mat_at(alone.gate_up, row, 0), dpl_mat_at(alone.hidden, row, 0),
                                dpl_mat_at(alone.dgate_up, row, 0), alone.drow_weight + row};
                run_mlp(ctx, &one, &r);
            }
            same_mlp_result(&p, &alone, &among);
            free_mlp_result(&among);
            free_mlp_result(&alone);
            free_mlp(&p);
        }
        dpl_ctx_close(&ctx);
    }
}

/* ---- large offsets: address space that is reserved but hardly touched ---------------------------
 */

static void *reserve(size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    if (p == MAP_FAILED) {
        print_message("SKIPPED: cannot reserve %zu bytes of address space\n", bytes);
        skip();
    }
    madvise(p, bytes, MADV_NOHUGEPAGE);
    return p;
}

static void test_last_expert_of_a_large_weight(void **state) {
    enum { E = 256, N = 2048, K = 7168 };
    const size_t elems = (size_t)N * K, bytes = E * elems * sizeof(float);
    (void)state;
    float *w = reserve(bytes), *dw = reserve(bytes), *last = w + (E - 1) * elems;
    dpl_ctx *ctx = open_ctx("ref", 2, false);
    int64_t offsets[E + 1] = {0};
    offsets[E] = 1;
    for (size_t i = 0; i < elems; i += 7) last[i] = (float)(i % 1000) / 1000 - 0.4f;
    const dpl_mat x = random_mat(1, K, 0, DPL_F32), dy = random_mat(1, N, 0, DPL_F32);
    float y[2][N], *dx = poisoned(2 * K * sizeof *dx);
    const dpl_weight all = {w, DPL_F32, E, N, K, NULL, NULL, NULL},
                     one = {last, DPL_F32, 1, N, K, NULL, NULL, NULL};
    const dpl_groups groups = {E, 1, offsets};
    dpl_gemm_forward(ctx, x, &all, groups, dpl_mat_f32(y[0], N));
    dpl_gemm_forward(ctx, x, &one, dpl_one_group(1), dpl_mat_f32(y[1], N));
    assert_memory_equal(y[0], y[1], sizeof y[0]);
    dpl_gemm_dgrad(ctx, dy, &all, groups, dpl_mat_f32(dx, K), false);
    dpl_gemm_dgrad(ctx, dy, &one, dpl_one_group(1), dpl_mat_f32(dx + K, K), false);
    assert_memory_equal(dx, dx + K, K * sizeof *dx);
    dpl_gemm_wgrad(ctx, dy, x, (dpl_row_map){0}, groups, N, K, DPL_F32, true, dw);
    for (size_t i = 0; i < elems; i += 101) {
        const size_t n = i / K, k = i % K;
        const float want = (float)(element(dy, 0, n) * element(x, 0, k));
        assert_true(dw[(E - 1) * elems + dpl_panel_index(n, k, K)] == want);
    }
    assert_true(dw[0] == 0 && dw[(E - 1) * elems - 1] == 0);
    free(x.p), free(dy.p), free(dx);
    munmap(w, bytes), munmap(dw, bytes);
    dpl_ctx_close(&ctx);
}

/* Rows that a map names give the bits that their copies give, rows of zeros where it names none. */
static void check_map(dpl_ctx *ctx, dpl_dtype x_dtype, dpl_dtype operand, size_t f, size_t k) {
    enum { T = 37, TOP_K = 3, GROUPS = 3, ROWS = 300 };
    static const int64_t offsets[GROUPS + 1] = {0, 11, 11, ROWS};
    const dpl_groups groups = {GROUPS, ROWS, offsets};
    const size_t n = dpl_gate_up_width(f), elems = GROUPS * dpl_panel_elems(n, k);
    const dpl_mat x = random_mat(T, k, 3, x_dtype), dy = random_mat(ROWS, n, 0, x_dtype);
    const dpl_mat copies = random_mat(ROWS, k, 0, x_dtype);
    int32_t slot[ROWS];
    for (size_t r = 0; r < ROWS; ++r) {
        slot[r] = (int32_t)(dpl_rng_u64(seed, 3, n_drawn++) % (T * TOP_K + 9)) - 9;
        void *to = dpl_mat_row(copies, r);
        const size_t bytes = k * dpl_dtype_bytes(x_dtype);
        if (slot[r] < 0) memset(to, 0, bytes);
        else memcpy(to, dpl_mat_row(x, (size_t)slot[r] / TOP_K), bytes);
    }
    float *panels = dpl_alloc_array(elems, sizeof *panels);
    uint16_t *halves = dpl_alloc_array(elems, sizeof *halves);
    for (size_t i = 0; i < elems; ++i) halves[i] = dpl_f32_to_bf16(panels[i] = draw());
    const dpl_weight w = {operand == DPL_F32 ? (void *)panels : (void *)halves,
                          operand,
                          GROUPS,
                          n,
                          k,
                          NULL,
                          NULL,
                          NULL};
    dpl_mat gate_up[2], hidden[2];
    float *dw[2];
    for (int i = 0; i < 2; ++i) {
        const dpl_row_map map = {i ? slot : NULL, TOP_K, 0};
        gate_up[i] = random_mat(ROWS, n, 0, x_dtype), hidden[i] = random_mat(ROWS, f, 0, x_dtype);
        dw[i] = dpl_alloc_array(elems, sizeof *dw[i]);
        dpl_gemm_swiglu_forward(ctx, i ? x : copies, map, &w, groups, NULL, gate_up[i], f,
                                hidden[i]);
        dpl_gemm_wgrad(ctx, dy, i ? x : copies, map, groups, n, k, operand, false, dw[i]);
    }
    dpl_ctx_wait(ctx);
    assert_memory_equal(gate_up[0].p, gate_up[1].p, mat_bytes(ROWS, n, x_dtype));
    assert_memory_equal(hidden[0].p, hidden[1].p, mat_bytes(ROWS, f, x_dtype));
    assert_memory_equal(dw[0], dw[1], elems * sizeof *dw[0]);
    for (int i = 0; i < 2; ++i) free(gate_up[i].p), free(hidden[i].p), dpl_free(dw[i]);
    free(x.p), free(dy.p), free(copies.p), dpl_free(panels), dpl_free(halves);
}

static void test_mapped_rows(void **state) {
    (void)state;
    for (size_t l = 0; l < DPL_COUNT(levels); ++l) {
        dpl_ctx *ctx = open_ctx(levels[l], 2, false);
        for (size_t i = 0; ctx && i < DPL_COUNT(dtypes); ++i) {
            check_map(ctx, dtypes[i][0], dtypes[i][1], 20, 33);
            check_map(ctx, dtypes[i][0], dtypes[i][1], 48, 1100);
        }
        dpl_ctx_close(&ctx);
    }
}

static void test_rows_far_apart(void **state) {
    enum { ROWS = 5, N = 40, K = 50 };
    const size_t ld = ((size_t)1 << 30) + 1, bytes = ROWS * ld * sizeof(float);
    (void)state;
    dpl_ctx *ctx = open_ctx("ref", 2, false);
    const int sizes[] = {ROWS};
    problem p = make_problem(1, sizes, N, K, 0, DPL_F32, DPL_F32);
    const dpl_mat x = {reserve(bytes), ld, DPL_F32}, y = {reserve(bytes), ld, DPL_F32};
    result want = make_result(&p);
    run_problem(ctx, &p, &want);
    for (size_t row = 0; row < ROWS; ++row)
        memcpy(dpl_mat_row(x, row), dpl_mat_row(p.x, row), K * sizeof(float));
    dpl_gemm_forward(ctx, x, &p.w, dpl_one_group(ROWS), y);
    for (size_t row = 0; row < ROWS; ++row) {
        assert_memory_equal(dpl_mat_row(y, row), dpl_mat_row(want.y, row), N * sizeof(float));
    }
    munmap(x.p, bytes), munmap(y.p, bytes);
    free_result(&want);
    free_problem(&p);
    dpl_ctx_close(&ctx);
}

/* ---- panels and bias ----------------------------------------------------------------------------
 */

static void test_panels(void **state) {
    static const size_t sizes[][3] = {{1, 1, 1}, {3, 33, 20}, {2, 64, 7}, {1, 100, 1025}};
    (void)state;
    for (size_t i = 0; i < DPL_COUNT(levels) * DPL_COUNT(sizes); ++i) {
        dpl_ctx *ctx = open_ctx(levels[i / DPL_COUNT(sizes)], 2, false);
        if (!ctx) continue;
        const size_t *s = sizes[i % DPL_COUNT(sizes)], n_groups = s[0], n = s[1], k = s[2];
        const size_t n_plain = n_groups * n * k, n_panel = n_groups * dpl_panel_elems(n, k);
        const dpl_mat plain = random_mat(n_groups * n, k, 0, DPL_F32);
        float *panels = poisoned(n_panel * sizeof *panels),
              *back = poisoned(n_plain * sizeof *back);
        for (size_t g = 0; g < n_groups; ++g)
            dpl_panel_pack(ctx, dpl_mat_row(plain, g * n), n, k,
                           panels + g * dpl_panel_elems(n, k));
        const size_t rows = dpl_round_up(n, DPL_PANEL), depth = dpl_panel_depth(k);
        for (size_t at = 0; at < n_groups * rows * depth; ++at) {
            const size_t g = at / depth / rows, r = at / depth % rows, c = at % depth;
            const float want = r < n && c < k ? (float)element(plain, g * n + r, c) : 0;
            assert_true(panels[g * dpl_panel_elems(n, k) + dpl_panel_index(r, c, k)] == want);
        }
        for (size_t g = 0; g < n_groups; ++g)
            dpl_panel_unpack(ctx, panels + g * dpl_panel_elems(n, k), n, k, back + g * n * k);
        assert_memory_equal(back, plain.p, n_plain * sizeof *back);
        free(plain.p), free(panels), free(back);
        dpl_ctx_close(&ctx);
    }
}

// As the model has it: a row that every row adds, and the weight of an input that is always 1.
static void test_bias(void **state) {
    enum { ROWS = 201, N = 150, GAP = 3 };
    (void)state;
    for (size_t i = 0; i < DPL_COUNT(levels) * 2; ++i) {
        const dpl_dtype dtype = i % 2 ? DPL_BF16 : DPL_F32;
        dpl_ctx *ctx = open_ctx(levels[i / 2], 2, false);
        if (!ctx) continue;
        const dpl_mat bias = random_mat(1, N, 0, DPL_F32), y = random_mat(ROWS, N, GAP, dtype);
        const dpl_mat dbias = random_mat(1, N, 0, DPL_F32);
        double *before = poisoned(ROWS * N * sizeof *before), *want = poisoned(N * sizeof *want);
        double sum_abs[N];
        for (size_t c = 0; c < N; ++c) want[c] = element(dbias, 0, c), sum_abs[c] = fabs(want[c]);
        for (size_t r = 0; r < ROWS; ++r) {
            for (size_t c = 0; c < N; ++c) {
                before[r * N + c] = element(y, r, c);
                want[c] += before[r * N + c], sum_abs[c] += fabs(before[r * N + c]);
            }
        }
        dpl_embed_backward(ctx, y, NULL, false, ROWS, 1, N, dbias.p);
        dpl_add(ctx, y, dpl_mat_f32(bias.p, 0), ROWS, N, y);
        for (size_t c = 0; c < N; ++c) {
            near("dbias", 0, c, element(dbias, 0, c), want[c], sum_abs[c], ROWS, DPL_F32);
            for (size_t r = 0; r < ROWS; ++r) {
                const double b = element(bias, 0, c), a = before[r * N + c];
                near("y + bias", r, c, element(y, r, c), a + b, fabs(a) + fabs(b), 1, dtype);
            }
        }
        for (size_t r = 0; r + 1 < ROWS; ++r)
            still_poison(dpl_mat_at(y, r, N).p, GAP * dpl_dtype_bytes(dtype));
        free(bias.p), free(y.p), free(dbias.p), free(before), free(want);
        dpl_ctx_close(&ctx);
    }
}

int main(int argc, char **argv) {
    seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    printf("seed %llu\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_fp64),
        cmocka_unit_test(test_split_products),
        cmocka_unit_test(test_threads_do_not_matter),
        cmocka_unit_test(test_repeated_calls_are_equal),
        cmocka_unit_test(test_long_results),
        cmocka_unit_test(test_rows_are_independent),
        cmocka_unit_test(test_deferred_context),
        cmocka_unit_test(test_swiglu),
        cmocka_unit_test(test_swiglu_threads_do_not_matter),
        cmocka_unit_test(test_swiglu_rows_are_independent),
        cmocka_unit_test(test_last_expert_of_a_large_weight),
        cmocka_unit_test(test_mapped_rows),
        cmocka_unit_test(test_rows_far_apart),
        cmocka_unit_test(test_panels),
        cmocka_unit_test(test_bias),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
