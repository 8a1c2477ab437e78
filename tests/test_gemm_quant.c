/*
 * test_gemm_quant.c - the grouped GEMM of MXFP8 and NVFP4 operands against fp64 on the numbers that
 * their codes stand for, at every CPU level.
 *
 * Products of two codes are exact, so only the fp32 sums round, and in NVFP4 the division by tensor
 * scales: the bound is that of a sum of so many terms, of the size of the terms. Groups have 0, 1,
 * 33, 96 .. rows; n and k are not whole panels or blocks.
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

enum { GROUPS = 6, ROWS = 227, COLUMN_ROWS = ROWS + GROUPS * 16, SEED = 9, STREAM = 100 };
static const int64_t offsets[GROUPS + 1] = {0, 1, 1, 34, 130, 162, ROWS};

static const dpl_quant_rule nvfp4 = {.format = DPL_E2M1, .grad_format = DPL_E2M1};

typedef struct problem {
    size_t n, k;
    dpl_dtype act;
    dpl_quant_rule rule;
    dpl_mat x, dy;
    float *panels; // of the weight
    dpl_quant_weight quant;
    dpl_weight w;
    dpl_groups groups;
    double *x_row, *x_column, *dy_row, *dy_column;  // what the codes stand for
    size_t column_row[GROUPS], column_rows[GROUPS]; // where a group's are of what is by column
    double *w_forward, *w_dgrad;                    // (GROUPS, n, k)
    uint64_t *streams;
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

static bool is_nv(const problem *p) {
    return p->rule.format == DPL_E2M1;
}

// What a number becomes in NVFP4; random: its stream, 0: to nearest.
static double nv_number(float x, float tensor_scale, uint8_t scale, uint64_t random, uint64_t i) {
    const float by = dpl_code_to_f32(DPL_E4M3, scale), y = x * tensor_scale / by;
    if (scale == 0) return 0;
    const uint8_t code = random ? dpl_f32_to_e2m1_random(y, dpl_rng_bits(SEED, random, i))
                                : dpl_f32_to_code(DPL_E2M1, y);
    return (double)dpl_code_to_f32(DPL_E2M1, code) * (double)by / (double)tensor_scale;
}

static double *nv_rows_of(dpl_mat m, size_t n, uint64_t random) {
    double *y = get(ROWS * n * sizeof *y);
    for (size_t r = 0; r < ROWS; r++) {
        float most = 0;
        for (size_t c = 0; c < n; c++) most = fmaxf(most, fabsf(at(m, r, c)));
        const float tensor_scale = dpl_nv_tensor_scale(most);
        for (size_t c = 0; c < n; c += 16) {
            const size_t end = DPL_MIN(c + 16, n);
            float amax = 0;
            for (size_t i = c; i < end; i++) amax = fmaxf(amax, fabsf(at(m, r, i)));
            for (size_t i = c; i < end; i++)
                y[r * n + i] = nv_number(at(m, r, i), tensor_scale,
                                         dpl_nv_block_scale(amax, tensor_scale), random,
                                         r * dpl_round_up(n, 128) + i);
        }
    }
    return y;
}

// A column of a group, rotated, in blocks of 16 rows: by Sylvester's formula, not by stages, whose
// sums of few numbers of few bits are exact as well.
static void rotate(dpl_mat m, size_t g, size_t c, uint16_t signs, size_t n_rows, float *y) {
    for (size_t r = 0; r < n_rows; r++) {
        double sum = 0;
        for (size_t i = 0; i < 16; i++) {
            const size_t row = (size_t)offsets[g] + r / 16 * 16 + i;
            if (row >= (size_t)offsets[g + 1]) continue;
            const int odd = __builtin_popcount((unsigned)(r % 16 & i)) + (signs >> i);
            sum += (odd & 1 ? -1 : 1) * (double)at(m, row, c);
        }
        y[r] = (float)(sum / 4);
    }
}

static double *nv_columns_of(const problem *p, dpl_mat m, size_t n, uint64_t random) {
    double *y = get(COLUMN_ROWS * n * sizeof *y);
    const uint16_t signs = (uint16_t)dpl_rng_u64(SEED, STREAM + 1, UINT64_MAX);
    for (size_t g = 0; g < GROUPS; g++)
        for (size_t c = 0; c < n; c++) {
            float x[COLUMN_ROWS], most = 0;
            const size_t n_rows = p->column_rows[g];
            rotate(m, g, c, signs, n_rows, x);
            for (size_t r = 0; r < n_rows; r++) most = fmaxf(most, fabsf(x[r]));
            const float tensor_scale = dpl_nv_tensor_scale(most);
            for (size_t r = 0; r < n_rows; r++) {
                float amax = 0;
                for (size_t i = r / 16 * 16; i < r / 16 * 16 + 16; i++)
                    amax = fmaxf(amax, fabsf(x[i]));
                const size_t row = p->column_row[g] + r;
                y[row * n + c] = nv_number(x[r], tensor_scale,
                                           dpl_nv_block_scale(amax, tensor_scale), random,
                                           row * dpl_round_up(n, 128) + c);
            }
        }
    return y;
}

// Blocks of 16 x 16: the same numbers either way.
static void nv_weight_numbers(problem *p) {
    const size_t n = p->n, k = p->k, elems = dpl_panel_elems(n, k);
    for (size_t g = 0; g < GROUPS; g++) {
        const float *panels = p->panels + g * elems;
        float most = 0;
        for (size_t i = 0; i < elems; i++) most = fmaxf(most, fabsf(panels[i]));
        const float tensor_scale = dpl_nv_tensor_scale(most);
        for (size_t i = 0; i < n * k; i++) {
            const size_t r = i / k, c = i % k, r0 = r / 16 * 16, c0 = c / 16 * 16;
            float amax = 0;
            for (size_t j = r0; j < DPL_MIN(r0 + 16, n); j++)
                for (size_t l = c0; l < DPL_MIN(c0 + 16, k); l++)
                    amax = fmaxf(amax, fabsf(panels[dpl_panel_index(j, l, k)]));
            p->w_forward[g * n * k + i] = p->w_dgrad[g * n * k + i] = nv_number(
                panels[dpl_panel_index(r, c, k)], tensor_scale,
                dpl_nv_block_scale(amax, tensor_scale), 0, 0);
        }
    }
}

static double *rows_of(const problem *p, dpl_code f, dpl_mat m, size_t n) {
    if (f == DPL_E2M1) return nv_rows_of(m, n, m.p == p->dy.p ? STREAM : 0);
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
    if (f == DPL_E2M1) return nv_columns_of(p, m, n, m.p == p->dy.p ? STREAM + 1 : 0);
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
    if (is_nv(p)) {
        nv_weight_numbers(p);
        return;
    }
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
    const dpl_code f = p->rule.format;
    p->quant.rule = p->rule;
    for (int way = 0; way < 2; way++) {
        p->quant.codes[way] = get(dpl_quant_code_bytes(f, GROUPS, n, k));
        p->quant.scales[way] = get(dpl_quant_scale_bytes(f, GROUPS, n, k));
    }
    p->quant.tensor_scale = get(GROUPS * sizeof(float));
    p->streams = p->quant.streams = get(2 * sizeof(uint64_t));
    for (size_t g = 0; g < GROUPS; g++) {
        const size_t first = (size_t)offsets[g], m = (size_t)offsets[g + 1] - first;
        p->column_row[g] = is_nv(p) ? 16 * dpl_first_block(16, g, offsets[g]) : first;
        p->column_rows[g] = is_nv(p) ? dpl_round_up(m, 16) : m;
    }
    p->groups = (dpl_groups){GROUPS, ROWS, offsets};
    p->w = (dpl_weight){NULL, DPL_BF16, GROUPS, n, k, NULL, NULL, &p->quant};
    p->x_row = rows_of(p, p->rule.format, p->x, k);
    p->x_column = columns_of(p, p->rule.format, p->x, k);
    p->dy_row = rows_of(p, p->rule.grad_format, p->dy, n);
    p->dy_column = columns_of(p, p->rule.grad_format, p->dy, n);
    weight_numbers(p);
}

static void close_problem(problem *p) {
    free(p->x.p), free(p->dy.p), dpl_free(p->panels);
    for (int way = 0; way < 2; way++) free(p->quant.codes[way]), free(p->quant.scales[way]);
    free(p->quant.tensor_scale), free(p->streams);
    free(p->x_row), free(p->x_column), free(p->dy_row), free(p->dy_column);
    free(p->w_forward), free(p->w_dgrad);
}

static void set_streams(const problem *p) {
    p->streams[0] = STREAM, p->streams[1] = STREAM + 1;
}

static result run(dpl_ctx *ctx, problem *p) {
    const size_t elems = GROUPS * dpl_panel_elems(p->n, p->k);
    result r = {get(ROWS * p->n * 4), get(ROWS * p->k * 4), get(elems * 4)};
    ctx->random_seed = SEED;
    set_streams(p);
    dpl_quant_weight_pack(ctx, p->panels, GROUPS, p->n, p->k, &p->quant);
    dpl_gemm_forward(ctx, p->x, &p->w, p->groups, dpl_mat_f32(r.y, p->n));
    dpl_gemm_dgrad(ctx, p->dy, &p->w, p->groups, dpl_mat_f32(r.dx, p->k), false);
    dpl_gemm_quant_wgrad(ctx, p->dy, p->x, (dpl_row_map){0}, p->groups, p->n, p->k, &p->quant,
                         false, r.dw);
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
    const double bound = (double)(n + 9) * (U * size + 0x1p-126), error = fabs((double)got - want);
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
        const double *dy = p->dy_column + p->column_row[g] * n;
        const double *x = p->x_column + p->column_row[g] * k;
        for (size_t i = 0; i < n * k; i++)
            near_sum("dw", dw[dpl_panel_index(i / k, i % k, k)], p->column_rows[g], dy + i / k, n,
                     x + i % k, k);
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
    for (size_t i = 0; i < DPL_COUNT(shapes) * 4; i++) {
        problem p = {.n = shapes[i / 4][0], .k = shapes[i / 4][1]};
        p.act = i % 2 ? DPL_BF16 : DPL_F32;
        if (i / 2 % 2) p.rule = nvfp4;
        else
            p.rule = (dpl_quant_rule){DPL_E4M3, i % 2 ? DPL_E5M2 : DPL_E4M3,
                                      i / 2 % 3 ? DPL_SCALE_FLOOR : DPL_SCALE_UP};
        open_problem(&p);
        for (int level = 0; level < DPL_CPU_N; level++) {
            const char *name = dpl_cpu_level_name((dpl_cpu_level)level);
            dpl_ctx *one = lab_ctx(1, false, name), *many = lab_ctx(3, true, name);
            if (one) {
                result a = run(one, &p), b = run(many, &p);
                worst = 0;
                check(&p, &a);
                if (i == 8 || i == 10)
                    printf(
                        "%-12s %s n %zu k %zu: errors up to %.3f of (terms + 9) x 2^-24 x sum of "
                        "magnitudes\n",
                        name, is_nv(&p) ? "NVFP4" : "MXFP8", p.n, p.k, worst);
                same(&p, &a, &b);
                free_result(&a), free_result(&b);
            }
            dpl_ctx_close(&one), dpl_ctx_close(&many);
        }
        close_problem(&p);
    }
}

// The weight of one group.
static dpl_quant_weight weight_of(const problem *p, size_t g) {
    dpl_quant_weight own = p->quant;
    for (int way = 0; way < 2; way++) {
        own.codes[way] += g * dpl_quant_code_bytes(p->rule.format, 1, p->n, p->k);
        own.scales[way] += g * dpl_quant_scale_bytes(p->rule.format, 1, p->n, p->k);
    }
    own.tensor_scale += g;
    return own;
}

static void rows_alone(dpl_ctx *ctx, const problem *p, const result *all) {
    float *y = get(p->n * 4);
    for (size_t g = 0; g < GROUPS; g++)
        for (size_t row = (size_t)offsets[g]; row < (size_t)offsets[g + 1]; row += 5) {
            const dpl_quant_weight own = weight_of(p, g);
            dpl_weight w = p->w;
            w.n_groups = 1, w.quant = &own;
            dpl_gemm_forward(ctx, dpl_mat_at(p->x, row, 0), &w, dpl_one_group(1),
                             dpl_mat_f32(y, p->n));
            dpl_ctx_wait(ctx);
            assert_memory_equal(y, all->y + row * p->n, p->n * 4);
        }
    free(y);
}

// Rows gathered through a map, one of them missing, as if they lay in place.
static void rows_mapped(dpl_ctx *ctx, const problem *p, const result *all) {
    enum { MISSING = 50 };
    const size_t elems = GROUPS * dpl_panel_elems(p->n, p->k), f = p->n / 2;
    int32_t slot[ROWS];
    for (int i = 0; i < ROWS; i++) slot[i] = 2 * i;
    const dpl_row_map map = {slot, 2, ROWS};
    float *dw = get(elems * 4), *gate_up = get(ROWS * p->n * 4), *hidden = get(ROWS * f * 4);
    set_streams(p);
    dpl_gemm_quant_wgrad(ctx, p->dy, p->x, map, p->groups, p->n, p->k, &p->quant, false, dw);
    dpl_ctx_wait(ctx);
    assert_memory_equal(dw, all->dw, elems * 4);
    slot[MISSING] = -1;
    dpl_gemm_swiglu_forward(ctx, p->x, map, &p->w, p->groups, NULL, dpl_mat_f32(gate_up, p->n), f,
                            dpl_mat_f32(hidden, f));
    dpl_ctx_wait(ctx);
    for (size_t i = 0; i < p->n; i++) assert_true(gate_up[MISSING * p->n + i] == 0);
    memcpy(gate_up + MISSING * p->n, all->y + MISSING * p->n, p->n * 4);
    assert_memory_equal(gate_up, all->y, ROWS * p->n * 4);
    free(dw), free(gate_up), free(hidden);
}

// What is added to what is there: twice the same.
static void sums_added(dpl_ctx *ctx, const problem *p, const result *all) {
    const size_t elems = GROUPS * dpl_panel_elems(p->n, p->k);
    float *dx = get(ROWS * p->k * 4), *dw = get(elems * 4);
    memcpy(dx, all->dx, ROWS * p->k * 4);
    memcpy(dw, all->dw, elems * 4);
    set_streams(p);
    dpl_gemm_dgrad(ctx, p->dy, &p->w, p->groups, dpl_mat_f32(dx, p->k), true);
    dpl_gemm_quant_wgrad(ctx, p->dy, p->x, (dpl_row_map){0}, p->groups, p->n, p->k, &p->quant, true,
                         dw);
    dpl_ctx_wait(ctx);
    for (size_t i = 0; is_nv(p) && i < ROWS * p->k; i++) assert_true(dx[i] == 2 * all->dx[i]);
    for (size_t i = 0; is_nv(p) && i < elems; i++) assert_true(dw[i] == 2 * all->dw[i]);
    for (size_t i = 0; i < ROWS * p->k; i++) // sums that start from others round elsewhere
        assert_true(fabsf(dx[i] - 2 * all->dx[i]) <= 1e-4f * (1 + fabsf(dx[i])));
    free(dx), free(dw);
}

// A row has the same bits alone as among others, and gathered through a map.
static void test_alone(void **state) {
    (void)state;
    for (int nv = 0; nv < 2; nv++) {
        problem p = {.n = 160, .k = 70, .act = DPL_BF16};
        if (nv) p.rule = nvfp4;
        open_problem(&p);
        for (int level = 0; level < DPL_CPU_N; level++) {
            dpl_ctx *ctx = lab_ctx(2, false, dpl_cpu_level_name((dpl_cpu_level)level));
            if (!ctx) continue;
            result all = run(ctx, &p);
            rows_alone(ctx, &p, &all);
            rows_mapped(ctx, &p, &all);
            sums_added(ctx, &p, &all);
            free_result(&all);
            dpl_ctx_close(&ctx);
        }
        close_problem(&p);
    }
}

// Gradients of weights are those of the numbers themselves but for what 4 bits lose: rotations and
// rounding by chance leave the sum as it is on average. (67: and a weight is its transpose.)
static void test_nv_error(void **state) {
    (void)state;
    problem p = {.n = 96, .k = 64, .act = DPL_F32, .rule = nvfp4};
    open_problem(&p);
    for (size_t i = 0; i < ROWS * p.k; i++) ((float *)p.x.p)[i] = (float)dpl_rng_normal(1, 0, i);
    for (size_t i = 0; i < ROWS * p.n; i++) ((float *)p.dy.p)[i] = (float)dpl_rng_normal(1, 1, i);
    dpl_ctx *ctx = lab_ctx(2, false, dpl_cpu_level_name(dpl_cpu_level_machine()));
    enum { DRAWS = 64 };
    float *dw = get(GROUPS * dpl_panel_elems(p.n, p.k) * 4);
    double *mean = calloc(p.n * p.k, sizeof *mean), errors[2] = {0}, squares = 0;
    ctx->random_seed = 1;
    set_streams(&p);
    for (int draw = 0; draw < DRAWS; draw++) {
        dpl_gemm_quant_wgrad(ctx, p.dy, p.x, (dpl_row_map){0}, dpl_one_group(ROWS), p.n, p.k,
                             &p.quant, false, dw);
        dpl_ctx_wait(ctx);
        for (size_t i = 0; i < p.n * p.k; i++) {
            double want = 0;
            for (size_t r = 0; r < ROWS; r++)
                want += (double)at(p.dy, r, i / p.k) * (double)at(p.x, r, i % p.k);
            const double got = (double)dw[dpl_panel_index(i / p.k, i % p.k, p.k)];
            mean[i] += got / DRAWS;
            if (draw == 0) errors[0] += (got - want) * (got - want), squares += want * want;
            if (draw + 1 == DRAWS) errors[1] += (mean[i] - want) * (mean[i] - want);
        }
    }
    printf(
        "NVFP4 weight gradients of normal numbers: error %.3f of their size (rms), of the mean of "
        "%d %.3f\n",
        sqrt(errors[0] / squares), DRAWS, sqrt(errors[1] / squares));
    assert_true(sqrt(errors[0] / squares) < 0.2);
    assert_true(sqrt(errors[1] / squares) < 0.4 * sqrt(errors[0] / squares));
    free(dw), free(mean);
    dpl_ctx_close(&ctx);
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
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_smallest_and_largest), cmocka_unit_test(test_products),
        cmocka_unit_test(test_alone), cmocka_unit_test(test_nv_error)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
