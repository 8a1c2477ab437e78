/*
 * test_gemm_mx.c - the grouped GEMM of MXFP8 operands against fp64 on the numbers that their codes
 * stand for, at every CPU level.
 *
 * Products of two codes are exact, so only the fp32 sums round: the bound is that of a sum of so
 * many terms, of the size of the terms. Groups have 0, 1, 33, 96 .. rows; n and k are not whole
 * panels or blocks.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "cpu/ops.h"
#include "lab.h"

#define U 0x1p-24

enum { GROUPS = 6, ROWS = 227 };
static const int64_t offsets[GROUPS + 1] = {0, 1, 1, 34, 130, 162, ROWS};

typedef struct problem {
    size_t n, k;
    dpl_dtype act;
    dpl_mx_rule rule;
    dpl_mat x, dy;
    float *panels; // of the weight
    dpl_mx_weight mx;
    dpl_weight w;
    dpl_groups groups;
    double *x_row, *x_column, *dy_row, *dy_column; // what the codes stand for
    double *w_forward, *w_dgrad;                   // (GROUPS, n, k)
} problem;

typedef struct result {
    float *y, *dx, *dw;
} result;

static void *get(size_t bytes) {
    void *p = malloc(bytes + 1);
    assert_non_null(p);
    memset(p, 0xff, bytes + 1);
    return p;
}

static dpl_mat random_mat(size_t rows, size_t cols, dpl_dtype dtype, uint64_t stream) {
    dpl_mat m = {get(rows * cols * dpl_dtype_bytes(dtype)), cols, dtype};
    for (size_t i = 0; i < rows * cols; i++) {
        const float v = ldexpf((float)dpl_rng_normal(7, stream, i), (int)(i / 41 % 5) - 2);
        if (dtype == DPL_F32) ((float *)m.p)[i] = v;
        else ((uint16_t *)m.p)[i] = dpl_f32_to_bf16(v);
    }
    return m;
}

static float at(dpl_mat m, size_t row, size_t col) {
    const void *p = dpl_mat_at(m, row, col).p;
    return m.dtype == DPL_F32 ? *(const float *)p : dpl_bf16_to_f32(*(const uint16_t *)p);
}

// What n numbers, `step` apart, become as one block, by definition.
static void dequantize(const problem *p, dpl_code f, size_t n, const float *x, double *y,
                       size_t step) {
    float amax = 0;
    for (size_t i = 0; i < n; i++) amax = fmaxf(amax, fabsf(x[i]));
    const float scale = dpl_e8m0_to_f32(dpl_e8m0_scale(p->rule.scale, f, amax));
    for (size_t i = 0; i < n; i++)
        y[i * step] = (double)dpl_code_to_f32(f, dpl_f32_to_code(f, x[i] / scale)) * (double)scale;
}

static double *rows_of(const problem *p, dpl_code f, dpl_mat m, size_t n) {
    double *y = get(ROWS * n * sizeof *y);
    for (size_t r = 0; r < ROWS; r++)
        for (size_t c = 0; c < n; c += 32) {
            float x[32];
            const size_t some = DPL_MIN(n - c, (size_t)32);
            for (size_t i = 0; i < some; i++) x[i] = at(m, r, c + i);
            dequantize(p, f, some, x, y + r * n + c, 1);
        }
    return y;
}

// Blocks of rows start anew with each group.
static double *columns_of(const problem *p, dpl_code f, dpl_mat m, size_t n) {
    double *y = get(ROWS * n * sizeof *y);
    for (size_t g = 0; g < GROUPS; g++)
        for (size_t r = (size_t)offsets[g]; r < (size_t)offsets[g + 1]; r += 32)
            for (size_t c = 0; c < n; c++) {
                float x[32];
                const size_t some = DPL_MIN((size_t)offsets[g + 1] - r, (size_t)32);
                for (size_t i = 0; i < some; i++) x[i] = at(m, r + i, c);
                dequantize(p, f, some, x, y + r * n + c, n);
            }
    return y;
}

// A weight's blocks: along k, or along n.
static void weight_numbers(problem *p) {
    const size_t n = p->n, k = p->k, elems = dpl_panel_elems(n, k);
    p->w_forward = get(GROUPS * n * k * sizeof(double));
    p->w_dgrad = get(GROUPS * n * k * sizeof(double));
    for (size_t g = 0; g < GROUPS; g++) {
        const float *panels = p->panels + g * elems;
        float x[32];
        for (size_t r = 0; r < n; r++)
            for (size_t c = 0; c < k; c += 32) {
                const size_t some = DPL_MIN(k - c, (size_t)32);
                for (size_t i = 0; i < some; i++) x[i] = panels[dpl_panel_index(r, c + i, k)];
                dequantize(p, p->rule.format, some, x, p->w_forward + (g * n + r) * k + c, 1);
            }
        for (size_t c = 0; c < k; c++)
            for (size_t r = 0; r < n; r += 32) {
                const size_t some = DPL_MIN(n - r, (size_t)32);
                for (size_t i = 0; i < some; i++) x[i] = panels[dpl_panel_index(r + i, c, k)];
                dequantize(p, p->rule.format, some, x, p->w_dgrad + (g * n + r) * k + c, k);
            }
    }
}

static void open_problem(problem *p) {
    const size_t n = p->n, k = p->k, elems = dpl_panel_elems(n, k);
    p->x = random_mat(ROWS, k, p->act, 1);
    p->dy = random_mat(ROWS, n, p->act, 2);
    p->panels = dpl_alloc(GROUPS * elems * sizeof(float));
    for (size_t i = 0; i < GROUPS * n * k; i++)
        p->panels[i / (n * k) * elems + dpl_panel_index(i / k % n, i % k, k)] =
            (float)dpl_rng_normal(7, 3, i) / sqrtf((float)k);
    const size_t bytes = dpl_mx_weight_bytes(GROUPS, n, k);
    p->mx.rule = p->rule;
    for (int way = 0; way < 2; way++)
        p->mx.codes[way] = get(bytes), p->mx.scales[way] = get(bytes / 32);
    p->groups = (dpl_groups){GROUPS, ROWS, offsets};
    p->w = (dpl_weight){NULL, DPL_BF16, GROUPS, n, k, NULL, NULL, &p->mx};
    p->x_row = rows_of(p, p->rule.format, p->x, k);
    p->x_column = columns_of(p, p->rule.format, p->x, k);
    p->dy_row = rows_of(p, p->rule.grad_format, p->dy, n);
    p->dy_column = columns_of(p, p->rule.grad_format, p->dy, n);
    weight_numbers(p);
}

static void close_problem(problem *p) {
    free(p->x.p), free(p->dy.p), dpl_free(p->panels);
    for (int way = 0; way < 2; way++) free(p->mx.codes[way]), free(p->mx.scales[way]);
    free(p->x_row), free(p->x_column), free(p->dy_row), free(p->dy_column);
    free(p->w_forward), free(p->w_dgrad);
}

static result run(dpl_ctx *ctx, problem *p) {
    const size_t elems = GROUPS * dpl_panel_elems(p->n, p->k);
    result r = {get(ROWS * p->n * 4), get(ROWS * p->k * 4), get(elems * 4)};
    dpl_mx_weight_pack(ctx, p->panels, GROUPS, p->n, p->k, &p->mx);
    dpl_gemm_forward(ctx, p->x, &p->w, p->groups, dpl_mat_f32(r.y, p->n));
    dpl_gemm_dgrad(ctx, p->dy, &p->w, p->groups, dpl_mat_f32(r.dx, p->k), false);
    dpl_gemm_mx_wgrad(ctx, p->dy, p->x, (dpl_row_map){0}, p->groups, p->n, p->k, &p->mx, false,
                      r.dw);
    dpl_ctx_wait(ctx);
    return r;
}

static void free_result(result *r) {
    free(r->y), free(r->dx), free(r->dw);
}

// Of all sums that were checked: the largest error over its bound.
static double worst;

// A sum of n products a[i * step_a] * b[i * step_b], and its bound.
static void near_sum(const char *what, float got, size_t n, const double *a, size_t step_a,
                     const double *b, size_t step_b) {
    double want = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        want += a[i * step_a] * b[i * step_b];
        size += fabs(a[i * step_a] * b[i * step_b]);
    }
    // A sum that is subnormal on its way may be taken as zero.
    const double bound = (double)(n + 4) * (U * size + 0x1p-126), error = fabs((double)got - want);
    if (!(error <= bound))
        fail_msg("%s is %.9g, expected %.9g within %.3g", what, (double)got, want, bound);
    if (bound > 0) worst = fmax(worst, error / bound);
}

static void check(const problem *p, const result *r) {
    const size_t n = p->n, k = p->k;
    for (size_t g = 0; g < GROUPS; g++) {
        const size_t first = (size_t)offsets[g], m = (size_t)offsets[g + 1] - first;
        const double *forward = p->w_forward + g * n * k, *dgrad = p->w_dgrad + g * n * k;
        for (size_t row = first; row < first + m; row++) {
            for (size_t c = 0; c < n; c++)
                near_sum("y", r->y[row * n + c], k, p->x_row + row * k, 1, forward + c * k, 1);
            for (size_t c = 0; c < k; c++)
                near_sum("dx", r->dx[row * k + c], n, p->dy_row + row * n, 1, dgrad + c, k);
        }
        const float *dw = r->dw + g * dpl_panel_elems(n, k);
        for (size_t i = 0; i < n * k; i++)
            near_sum("dw", dw[dpl_panel_index(i / k, i % k, k)], m,
                     p->dy_column + first * n + i / k, n, p->x_column + first * k + i % k, k);
    }
}

static void same(const problem *p, const result *a, const result *b) {
    const size_t elems = GROUPS * dpl_panel_elems(p->n, p->k);
    assert_memory_equal(a->y, b->y, ROWS * p->n * 4);
    assert_memory_equal(a->dx, b->dx, ROWS * p->k * 4);
    if (p->k % 2 == 0) assert_memory_equal(a->dw, b->dw, elems * 4); // padding keeps its poison
}

static void test_products(void **state) {
    (void)state;
    static const size_t shapes[][2] = {{32, 32}, {40, 97}, {96, 600}, {130, 34}, {1, 1}, {600, 70}};
    for (size_t i = 0; i < DPL_COUNT(shapes) * 2; i++) {
        problem p = {.n = shapes[i / 2][0], .k = shapes[i / 2][1]};
        p.act = i % 2 ? DPL_BF16 : DPL_F32;
        p.rule = (dpl_mx_rule){DPL_E4M3, i % 2 ? DPL_E5M2 : DPL_E4M3,
                               i % 3 == 2 ? DPL_SCALE_FLOOR : DPL_SCALE_UP};
        open_problem(&p);
        for (int level = 0; level < DPL_CPU_N; level++) {
            const char *name = dpl_cpu_level_name((dpl_cpu_level)level);
            dpl_ctx *one = lab_ctx(1, false, name), *many = lab_ctx(3, true, name);
            if (one) {
                result a = run(one, &p), b = run(many, &p);
                worst = 0;
                check(&p, &a);
                if (i == 4)
                    printf("%-12s n %zu k %zu: errors up to %.3f of (terms + 4) x 2^-24 x sum of "
                           "magnitudes\n",
                           name, p.n, p.k, worst);
                same(&p, &a, &b);
                free_result(&a), free_result(&b);
            }
            dpl_ctx_close(&one), dpl_ctx_close(&many);
        }
        close_problem(&p);
    }
}

// A row has the same bits alone as among others, and gathered through a map.
static void test_alone(void **state) {
    (void)state;
    problem p = {.n = 130, .k = 70, .act = DPL_BF16};
    open_problem(&p);
    int32_t slot[ROWS];
    for (int i = 0; i < ROWS; i++) slot[i] = 2 * i;
    for (int level = 0; level < DPL_CPU_N; level++) {
        dpl_ctx *ctx = lab_ctx(2, false, dpl_cpu_level_name((dpl_cpu_level)level));
        if (!ctx) continue;
        result all = run(ctx, &p);
        float *y = get(p.n * 4), *dw = get(GROUPS * dpl_panel_elems(p.n, p.k) * 4);
        const size_t bytes = dpl_mx_weight_bytes(1, p.n, p.k);
        for (size_t g = 0; g < GROUPS; g++)
            for (size_t row = (size_t)offsets[g]; row < (size_t)offsets[g + 1]; row += 5) {
                dpl_mx_weight own = p.mx;
                for (int way = 0; way < 2; way++) {
                    own.codes[way] += g * bytes;
                    own.scales[way] += g * bytes / 32;
                }
                dpl_weight w = p.w;
                w.n_groups = 1, w.mx = &own;
                dpl_gemm_forward(ctx, dpl_mat_at(p.x, row, 0), &w, dpl_one_group(1),
                                 dpl_mat_f32(y, p.n));
                dpl_ctx_wait(ctx);
                assert_memory_equal(y, all.y + row * p.n, p.n * 4);
            }
        dpl_gemm_mx_wgrad(ctx, p.dy, p.x, (dpl_row_map){slot, 2}, p.groups, p.n, p.k, &p.mx, false,
                          dw);
        dpl_ctx_wait(ctx);
        assert_memory_equal(dw, all.dw, GROUPS * dpl_panel_elems(p.n, p.k) * 4);
        free(y), free(dw);
        free_result(&all);
        dpl_ctx_close(&ctx);
    }
    close_problem(&p);
}

// Blocks whose scales are subnormal, and infinity: what products do with subnormals of their own
// does not reach what makes codes.
static void test_smallest_and_largest(void **state) {
    (void)state;
    problem p = {.n = 96, .k = 64, .act = DPL_F32};
    open_problem(&p);
    free(p.x_row), free(p.x_column);
    float *x = p.x.p;
    for (size_t i = 0; i < ROWS * p.k; i++) // the numbers of codes are normal, amax / 448 is not
        x[i] = (float)(100 + dpl_rng_u64(3, 0, i) % 600) * 0x1p-127f;
    p.x_row = rows_of(&p, DPL_E4M3, p.x, p.k);
    p.x_column = columns_of(&p, DPL_E4M3, p.x, p.k);
    for (size_t i = 0; i < GROUPS * dpl_panel_elems(p.n, p.k); i++)
        p.panels[i] = fabsf(p.panels[i]) + 0.5f;
    free(p.w_forward), free(p.w_dgrad);
    weight_numbers(&p);
    for (int level = 0; level < DPL_CPU_N; level++) {
        dpl_ctx *ctx = lab_ctx(2, false, dpl_cpu_level_name((dpl_cpu_level)level));
        if (!ctx) continue;
        result r = run(ctx, &p);
        check(&p, &r);
        const float kept = x[5 * p.k + 3];
        float y[96];
        x[5 * p.k + 3] = INFINITY;
        dpl_gemm_forward(ctx, dpl_mat_at(p.x, 5, 0), &p.w, dpl_one_group(1), dpl_mat_f32(y, p.n));
        dpl_ctx_wait(ctx);
        for (size_t c = 0; c < p.n; c++) assert_true(isinf(y[c]) && y[c] > 0);
        x[5 * p.k + 3] = kept;
        free_result(&r);
        dpl_ctx_close(&ctx);
    }
    close_problem(&p);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_smallest_and_largest),
                                       cmocka_unit_test(test_products),
                                       cmocka_unit_test(test_alone)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
