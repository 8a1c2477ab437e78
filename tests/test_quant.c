/*
 * test_quant.c - 8- and 4-bit numbers, their scales and MXFP8 against reference vectors, which were
 * made by exact arithmetic, and against the definitions on sampled floats at every CPU level.
 *
 * DPL_ALL_FLOATS=1 encodes all 2^32 floats instead of a sample (some minutes).
 * Numbers in comments are rows of known-faults.md.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "cpu/kernels.h"
#include "fixture.h"
#include "lab.h"

static const char *const code_names[] = {"e4m3", "e5m2", "e2m1"};
static const char *const rule_names[] = {"up", "floor"};

static fixture reference;

#define NEED_REFERENCE() \
    if (!reference.at) skip()

static const fixture_tensor *find(const char *format, const char *a, const char *b, const char *c) {
    char name[64];
    snprintf(name, sizeof name, format, a, b, c);
    const fixture_tensor *t = fixture_find(&reference, name);
    if (!t) fail_msg("no tensor %s", name);
    return t;
}

static float *floats_of(const fixture_tensor *t) {
    double *values = fixture_values(t);
    float *x = malloc(t->n * sizeof *x + 1);
    for (size_t i = 0; i < t->n; i++) x[i] = (float)values[i];
    free(values);
    return x;
}

static bool same_float(float a, float b) {
    return (isnan(a) && isnan(b)) || memcmp(&a, &b, sizeof a) == 0;
}

static bool is_nan_code(dpl_code f, uint8_t code) {
    return isnan(dpl_code_to_f32(f, code));
}

/* ---- numbers --------------------------------------------------------------------------------- */
static void test_tables(void **state) {
    (void)state;
    NEED_REFERENCE();
    for (int f = 0; f < DPL_CODE_N; f++) {
        const fixture_tensor *t = find("table.%s%s%s", code_names[f], "", "");
        float *want = floats_of(t);
        for (size_t i = 0; i < t->n; i++)
            assert_true(same_float(dpl_code_to_f32((dpl_code)f, (uint8_t)i), want[i]));
        free(want);
    }
    float *want = floats_of(find("table.e8m0%s%s%s", "", "", "")); // 56: byte 0 is 2^-127
    for (int i = 0; i < 256; i++) assert_true(same_float(dpl_e8m0_to_f32((uint8_t)i), want[i]));
    assert_true(dpl_e8m0_to_f32(0) == 0x1p-127f);
    free(want);
    assert_true(dpl_code_max(DPL_E4M3) == 448 && dpl_code_max(DPL_E5M2) == 57344 &&
                dpl_code_max(DPL_E2M1) == 6);
}

static void compare_codes(const char *set, int f) {
    const fixture_tensor *in = find("%s.input%s%s", set, "", ""),
                         *want = find("%s.%s%s", set, code_names[f], "");
    float *x = floats_of(in);
    for (size_t i = 0; i < in->n; i++) {
        const uint8_t code = dpl_f32_to_code((dpl_code)f, x[i]);
        if (isnan(x[i])) assert_true(f == DPL_E2M1 || is_nan_code((dpl_code)f, code));
        else if (code != want->data[i])
            fail_msg("%s of %a is %#x, expected %#x", code_names[f], (double)x[i], code,
                     want->data[i]);
    }
    free(x);
}

static void test_codes(void **state) {
    (void)state;
    NEED_REFERENCE();
    for (int f = 0; f < DPL_CODE_N; f++) compare_codes("fp32", f), compare_codes("bf16", f);
}

static void compare_scales(const char *set, int rule, int f) {
    const fixture_tensor *in = find("%s.input%s%s", set, "", ""),
                         *want = find("%s.scale_%s.%s", set, rule_names[rule], code_names[f]);
    float *x = floats_of(in);
    for (size_t i = 0; i < in->n; i++)
        assert_int_equal(dpl_e8m0_scale((dpl_scale_rule)rule, (dpl_code)f, fabsf(x[i])),
                         want->data[i]);
    free(x);
}

static void test_scales(void **state) {
    (void)state;
    NEED_REFERENCE();
    for (int rule = 0; rule < 2; rule++)
        for (int f = 0; f < DPL_E2M1; f++)
            compare_scales("fp32", rule, f), compare_scales("bf16", rule, f);
}

enum { SOME = 4096, LEVELS = 2 };

// The vectors of levels against the definitions.
static void compare_codes_of(const dpl_kernels *levels, const float *x, size_t n) {
    uint8_t got[SOME], want[SOME];
    for (int f = 0; f < DPL_CODE_N; f++) {
        for (size_t i = 0; i < n; i++) want[i] = dpl_f32_to_code((dpl_code)f, x[i]);
        for (int level = 0; level < LEVELS; level++) {
            levels[level].quant.encode((dpl_code)f, x, got, n);
            assert_memory_equal(got, want, n);
        }
    }
}

// A block of MXFP8 of each float alone.
static void compare_blocks_of(const dpl_kernels *levels, const dpl_kernels *ref, const float *x,
                              size_t n) {
    uint8_t got[SOME], want[SOME], scales[SOME], want_scales[SOME];
    for (int kind = 0; kind < 4; kind++) {
        dpl_mx_block b = {.format = (dpl_code)(kind % 2),
                          .rule = (dpl_scale_rule)(kind / 2),
                          .dtype = DPL_F32,
                          .m = 1,
                          .n = n,
                          .x = x,
                          .codes = want,
                          .scales = want_scales,
                          .ld = n,
                          .ld_codes = n,
                          .ld_scales = n};
        ref->quant.mx_columns(&b);
        b.codes = got, b.scales = scales;
        for (int level = 0; level < LEVELS; level++) {
            levels[level].quant.mx_columns(&b);
            assert_memory_equal(scales, want_scales, n);
            assert_memory_equal(got, want, n);
        }
    }
}

// Blocks are of a sample always.
static void test_floats(void **state) {
    (void)state;
    static float x[SOME];
    const bool all = getenv("DPL_ALL_FLOATS");
    dpl_kernels ref, levels[LEVELS];
    dpl_cpu_level best;
    assert_int_equal(dpl_cpu_level_detect(&best), DPL_OK);
    dpl_cpu_kernels(DPL_CPU_REF, &ref);
    dpl_cpu_kernels(DPL_MIN(best, DPL_CPU_AVX2), &levels[0]);
    dpl_cpu_kernels(DPL_MIN(best, DPL_CPU_AVX512), &levels[1]);
    const uint64_t step = all ? 1 : 40503, end = (uint64_t)1 << 32; // odd: all low bits are met
    size_t n = 0, n_compared = 0;
    for (uint64_t at = 0; at < end; at += step) {
        const uint32_t bits = (uint32_t)at;
        memcpy(x + n++, &bits, sizeof bits);
        if (n < SOME && at + step < end) continue;
        compare_codes_of(levels, x, n);
        if (!all || n_compared % 256 == 0) compare_blocks_of(levels, &ref, x, n);
        n_compared++, n = 0;
        if (all && n_compared % 65536 == 0) printf("%.0f %%\n", 100 * (double)at / (double)end);
    }
}

/* ---- matrices -------------------------------------------------------------------------------- */
typedef struct mx_out {
    dpl_codes rows, columns;
    size_t row_bytes, column_bytes; // of scales
    size_t elems;
} mx_out;

static dpl_codes buffers(size_t n_rows, size_t n, size_t n_scales, size_t ld_scales) {
    dpl_codes m = {malloc(n_rows * n + 1), malloc(n_scales + 1), n, ld_scales, NULL};
    memset(m.codes, 0xee, n_rows * n + 1);
    memset(m.scales, 0xee, n_scales + 1);
    return m;
}

// `offsets` NULL: one group. Both ways in one pass.
static mx_out quantize(dpl_ctx *ctx, const void *x, dpl_dtype dtype, size_t n_rows, size_t n,
                       const int64_t *offsets, size_t n_groups, dpl_code f, dpl_scale_rule rule) {
    const size_t blocks = dpl_div_up(n, DPL_MX_BLOCK);
    mx_out out = {.row_bytes = n_rows * blocks, .elems = n_rows * n};
    out.column_bytes = dpl_column_blocks(DPL_MX_BLOCK, n_groups, n_rows) * n;
    out.rows = buffers(n_rows, n, out.row_bytes, blocks);
    out.columns = buffers(n_rows, n, out.column_bytes, n);
    dpl_mx_quantize(ctx, (dpl_mat){(void *)(uintptr_t)x, n, dtype}, (dpl_row_map){0},
                    (dpl_groups){n_groups, n_rows, offsets}, n, f, rule, out.rows, out.columns);
    dpl_ctx_wait(ctx);
    // Nothing behind the ends.
    assert_int_equal(out.rows.codes[out.elems], 0xee);
    assert_int_equal(out.columns.codes[out.elems], 0xee);
    assert_int_equal(out.rows.scales[out.row_bytes], 0xee);
    assert_int_equal(out.columns.scales[out.column_bytes], 0xee);
    return out;
}

static void free_mx(mx_out *out) {
    free(out->rows.codes), free(out->rows.scales);
    free(out->columns.codes), free(out->columns.scales);
}

static float number(dpl_code f, uint8_t code, uint8_t scale) {
    return dpl_code_to_f32(f, code) * dpl_e8m0_to_f32(scale);
}

// Codes but for NaNs, whose code is free.
static void same_codes(dpl_code f, const uint8_t *got, const uint8_t *want, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (!is_nan_code(f, want[i]) || !is_nan_code(f, got[i])) assert_int_equal(got[i], want[i]);
}

static void compare_matrix(dpl_ctx *ctx, int f, int rule) {
    const char *ft = code_names[f], *rl = rule_names[rule];
    const fixture_tensor *in = find("mx.x%s%s%s", "", "", "");
    const size_t n_rows = (size_t)in->shape[0], n = (size_t)in->shape[1];
    float *x = floats_of(in), *want = floats_of(find("mx.%s.%s.%s.dequant", ft, rl, "row"));
    mx_out out = quantize(ctx, x, DPL_F32, n_rows, n, NULL, 1, (dpl_code)f, (dpl_scale_rule)rule);
    assert_memory_equal(out.rows.scales, find("mx.%s.%s.%s.scales", ft, rl, "row")->data,
                        out.row_bytes);
    same_codes((dpl_code)f, out.rows.codes, find("mx.%s.%s.%s.codes", ft, rl, "row")->data,
               n_rows * n);
    assert_memory_equal(out.columns.scales, find("mx.%s.%s.%s.scales", ft, rl, "col")->data,
                        n_rows / 32 * n);
    same_codes((dpl_code)f, out.columns.codes, find("mx.%s.%s.%s.codes", ft, rl, "col")->data,
               n_rows * n);
    for (size_t i = 0; i < n_rows * n; i++) {
        const uint8_t scale = out.rows.scales[i / n * (n / 32) + i % n / 32];
        assert_true(same_float(number((dpl_code)f, out.rows.codes[i], scale), want[i]));
    }
    free_mx(&out);
    free(x), free(want);
}

static dpl_ctx *open_level(int level, int n_threads) {
    return lab_ctx(n_threads, false, dpl_cpu_level_name((dpl_cpu_level)level));
}

static void test_matrix(void **state) {
    (void)state;
    NEED_REFERENCE();
    for (int level = 0; level < DPL_CPU_N; level++) {
        dpl_ctx *ctx = open_level(level, 2);
        for (int kind = 0; ctx && kind < 4; kind++) compare_matrix(ctx, kind % 2, kind / 2);
        dpl_ctx_close(&ctx);
    }
}

// 63: what follows a row's last, short block is not part of it.
static void test_tail(void **state) {
    (void)state;
    NEED_REFERENCE();
    const fixture_tensor *in = find("mx.tail.x%s%s%s", "", "", "");
    const size_t n_rows = (size_t)in->shape[0], n = (size_t)in->shape[1];
    float *x = floats_of(in);
    for (int level = 0; level < DPL_CPU_N; level++) {
        dpl_ctx *ctx = open_level(level, 2);
        if (!ctx) continue;
        mx_out out = quantize(ctx, x, DPL_F32, n_rows, n, NULL, 1, DPL_E4M3, DPL_SCALE_UP);
        assert_memory_equal(out.rows.scales, find("mx.tail.scales%s%s%s", "", "", "")->data,
                            out.row_bytes);
        same_codes(DPL_E4M3, out.rows.codes, find("mx.tail.codes%s%s%s", "", "", "")->data,
                   n_rows * n);
        free_mx(&out);
        dpl_ctx_close(&ctx);
    }
    free(x);
}

static void compare_groups(dpl_ctx *ctx, const float *x, const int *offsets, const int *starts) {
    const fixture_tensor *in = find("mx.group.x%s%s%s", "", "", "");
    const uint8_t *want = find("mx.group.scales%s%s%s", "", "", "")->data;
    const size_t n_rows = (size_t)in->shape[0], n = (size_t)in->shape[1], n_groups = 5;
    int64_t wide[6];
    for (size_t g = 0; g <= n_groups; g++) wide[g] = offsets[g];
    mx_out out = quantize(ctx, x, DPL_F32, n_rows, n, wide, n_groups, DPL_E4M3, DPL_SCALE_UP);
    same_codes(DPL_E4M3, out.columns.codes, find("mx.group.codes%s%s%s", "", "", "")->data,
               n_rows * n);
    size_t i_block = 0;
    for (size_t g = 0; g < n_groups; g++)
        for (size_t row = (size_t)offsets[g]; row < (size_t)offsets[g + 1]; row += 32, i_block++) {
            assert_int_equal(row, starts[i_block]);
            const size_t at = dpl_first_block(DPL_MX_BLOCK, g, offsets[g]) +
                              (row - (size_t)offsets[g]) / 32;
            assert_memory_equal(out.columns.scales + at * n, want + i_block * n, n);
        }
    free_mx(&out);
}

static void test_groups(void **state) {
    (void)state;
    NEED_REFERENCE();
    float *x = floats_of(find("mx.group.x%s%s%s", "", "", ""));
    int *offsets = fixture_int(&reference, "mx.group.offsets", NULL);
    int *starts = fixture_int(&reference, "mx.group.block_starts", NULL);
    for (int level = 0; level < DPL_CPU_N; level++) {
        dpl_ctx *ctx = open_level(level, 2);
        if (ctx) compare_groups(ctx, x, offsets, starts);
        dpl_ctx_close(&ctx);
    }
    free(x), free(offsets), free(starts);
}

// 60: groups of any size (none, less than a block, a row more than one) give each group the bits
// that it has alone; so do any number of threads, a deferred context and bf16.
static void compare_alone(dpl_ctx *ctx, dpl_ctx *one, dpl_dtype dtype) {
    static const int64_t offsets[] = {0, 0, 1, 34, 66, 99, 99, 195, 196, 211};
    enum { GROUPS = 9, ROWS = 211, N = 1100 };
    const size_t size = dpl_dtype_bytes(dtype);
    uint8_t *x = malloc(ROWS * N * size);
    for (size_t i = 0; i < ROWS * N; i++) {
        const float v = ldexpf((float)dpl_rng_normal(3, 0, i), (int)(i / 700 % 9) * 3);
        if (dtype == DPL_F32) ((float *)(void *)x)[i] = v;
        else ((uint16_t *)(void *)x)[i] = dpl_f32_to_bf16(v);
    }
    mx_out all = quantize(ctx, x, dtype, ROWS, N, offsets, GROUPS, DPL_E4M3, DPL_SCALE_UP);
    for (size_t g = 0; g < GROUPS; g++) {
        const size_t first = (size_t)offsets[g], m = (size_t)offsets[g + 1] - first;
        mx_out own = quantize(one, x + first * N * size, dtype, m, N, NULL, 1, DPL_E4M3,
                              DPL_SCALE_UP);
        assert_memory_equal(all.rows.codes + first * N, own.rows.codes, m * N);
        assert_memory_equal(all.columns.codes + first * N, own.columns.codes, m * N);
        assert_memory_equal(all.rows.scales + first * all.rows.ld_scales, own.rows.scales,
                            own.row_bytes);
        assert_memory_equal(all.columns.scales + dpl_first_block(DPL_MX_BLOCK, g, offsets[g]) * N,
                            own.columns.scales, dpl_div_up(m, 32) * N);
        free_mx(&own);
    }
    free_mx(&all);
    free(x);
}

static void test_alone(void **state) {
    (void)state;
    dpl_ctx *one = lab_ctx(1, false, "ref");
    for (int level = 0; level < DPL_CPU_N; level++)
        for (int n_threads = 1; n_threads <= 3; n_threads++) {
            dpl_ctx *ctx = lab_ctx(n_threads, n_threads == 3,
                                   dpl_cpu_level_name((dpl_cpu_level)level));
            if (!ctx) continue;
            compare_alone(ctx, one, DPL_F32);
            compare_alone(ctx, one, DPL_BF16);
            dpl_ctx_close(&ctx);
        }
    dpl_ctx_close(&one);
}

// Half a step of the mantissa, 2^-4 of a number, or half the last step of the block: by the rule
// that never saturates the largest number is at most 448 scales, at least 224.
static void test_errors(void **state) {
    (void)state;
    enum { ROWS = 64, N = 512 };
    static float x[ROWS * N];
    for (size_t i = 0; i < ROWS * N; i++) x[i] = (float)dpl_rng_normal(4, 0, i);
    dpl_ctx *ctx = lab_ctx(2, false, dpl_cpu_level_name(dpl_cpu_level_machine()));
    mx_out out = quantize(ctx, x, DPL_F32, ROWS, N, NULL, 1, DPL_E4M3, DPL_SCALE_UP);
    double squares = 0, errors = 0, worst = 0;
    for (size_t i = 0; i < ROWS * N; i++) {
        const uint8_t scale = out.rows.scales[i / 32];
        const double error = fabs((double)number(DPL_E4M3, out.rows.codes[i], scale) -
                                  (double)x[i]);
        const double bound = fmax(fabs((double)x[i]) * 0x1p-4,
                                  (double)dpl_e8m0_to_f32(scale) * 0x1p-10);
        assert_true(error <= bound);
        worst = fmax(worst, error / bound);
        errors += error * error, squares += (double)x[i] * (double)x[i];
    }
    printf("MXFP8 of normal numbers: error %.4f of their size (rms), up to %.3f of the bound\n",
           sqrt(errors / squares), worst);
    assert_true(sqrt(errors / squares) < 0.03);
    free_mx(&out);
    dpl_ctx_close(&ctx);
}

/* ---- NVFP4 ----------------------------------------------------------------------------------- */
// A set of vectors with one scale for the tensor, by the kernel of a level.
static void compare_nv(const dpl_kernels *k, const char *set, bool packed) {
    const fixture_tensor *in = find("%s.x%s%s", set, "", "");
    const size_t m = (size_t)in->shape[0], n = (size_t)in->shape[1];
    float *x = floats_of(in), *s = floats_of(find("%s.S%s%s", set, "", ""));
    float *row_scale = malloc(m * sizeof *row_scale);
    uint8_t *codes = malloc(m * n / 2), *scales = malloc(m * n / 16);
    assert_true(dpl_nv_tensor_scale(k->quant.amax(DPL_F32, x, m * n)) == s[0]);
    for (size_t r = 0; r < m; r++) row_scale[r] = s[0];
    const dpl_nv_rows b = {DPL_F32, m,     n,      x,    row_scale, codes, scales,
                           n,       n / 2, n / 16, NULL, 0,         0};
    k->quant.nv_rows(&b);
    assert_memory_equal(scales, find("%s.scales%s%s", set, "", "")->data, m * n / 16);
    const uint8_t *want = find("%s.codes%s%s", set, "", "")->data;
    for (size_t i = 0; i < m * n; i++) assert_int_equal(codes[i / 2] >> i % 2 * 4 & 15, want[i]);
    if (packed) assert_memory_equal(codes, find("%s.packed%s%s", set, "", "")->data, m * n / 2);
    free(x), free(s), free(row_scale), free(codes), free(scales);
}

static void test_nv(void **state) {
    (void)state;
    NEED_REFERENCE();
    dpl_cpu_level best;
    dpl_kernels k;
    assert_int_equal(dpl_cpu_level_detect(&best), DPL_OK);
    for (int level = 0; level <= (int)best; level++) {
        dpl_cpu_kernels((dpl_cpu_level)level, &k);
        compare_nv(&k, "nv", true);
        compare_nv(&k, "nv.edge", false);
    }
    const fixture_tensor *zero = find("nv.zero.S%s%s%s", "", "", "");
    float *s = floats_of(zero);
    assert_true(s[0] == 1 && dpl_nv_tensor_scale(0) == 1);
    free(s);
}

typedef struct nv_out {
    dpl_codes nv;
    size_t n_codes, n_scales;
} nv_out;

static nv_out quantize_nv(dpl_ctx *ctx, const float *x, size_t m, size_t n,
                          const uint64_t *random) {
    nv_out out = {{.ld_codes = dpl_div_up(n, 2), .ld_scales = dpl_div_up(n, 16)}, 0, 0};
    out.n_codes = m * out.nv.ld_codes, out.n_scales = m * out.nv.ld_scales;
    out.nv.codes = malloc(out.n_codes), out.nv.scales = malloc(out.n_scales);
    out.nv.tensor_scale = malloc(m * sizeof(float));
    dpl_nv_quantize(ctx, dpl_mat_f32(x, n), dpl_one_group(m), n, random, out.nv);
    dpl_ctx_wait(ctx);
    return out;
}

static void free_nv(nv_out *out) {
    free(out->nv.codes), free(out->nv.scales), free(out->nv.tensor_scale);
}

static float nv_number(const nv_out *out, size_t r, size_t c) {
    const uint8_t code = out->nv.codes[r * out->nv.ld_codes + c / 2] >> c % 2 * 4 & 15;
    const uint8_t scale = out->nv.scales[r * out->nv.ld_scales + c / 16];
    return dpl_code_to_f32(DPL_E2M1, code) * dpl_code_to_f32(DPL_E4M3, scale) /
           out->nv.tensor_scale[r];
}

// Each element within half the widest step of its block (1/6 of the largest), or by chance within
// all of it, and a 16th for the rounding of the scale; a row's bits are its own.
static void test_nv_rows(void **state) {
    (void)state;
    enum { ROWS = 37, N = 330 };
    static float x[ROWS * N];
    static const uint64_t random[2] = {5, 9};
    for (size_t i = 0; i < ROWS * N; i++)
        x[i] = ldexpf((float)dpl_rng_normal(1, 1, i), (int)(i / N % 20) - 10);
    dpl_ctx *one = lab_ctx(1, false, "ref");
    for (int level = 0; level < DPL_CPU_N; level++)
        for (int by_chance = 0; by_chance < 2; by_chance++) {
            dpl_ctx *ctx = open_level(level, 3);
            if (!ctx) continue;
            const uint64_t *r = by_chance ? random : NULL;
            nv_out all = quantize_nv(ctx, x, ROWS, N, r), ref = quantize_nv(one, x, ROWS, N, r);
            assert_memory_equal(all.nv.codes, ref.nv.codes, all.n_codes);
            assert_memory_equal(all.nv.scales, ref.nv.scales, all.n_scales);
            for (size_t i = 0; i < ROWS * N; i++) {
                float amax = 0;
                const size_t block = i % N / 16 * 16;
                for (size_t c = block; c < DPL_MIN(block + 16, (size_t)N); c++)
                    amax = fmaxf(amax, fabsf(x[i / N * N + c]));
                const float step = amax * (1 + 1 / 16.0f) / 3 * (by_chance ? 1 : 0.5f);
                assert_true(fabsf(nv_number(&all, i / N, i % N) - x[i]) <= step + amax / 16);
            }
            nv_out row = quantize_nv(ctx, x + 3 * N, 1, N, NULL);
            if (!by_chance)
                assert_memory_equal(row.nv.codes, all.nv.codes + 3 * all.nv.ld_codes, row.n_codes);
            free_nv(&all), free_nv(&ref), free_nv(&row);
            dpl_ctx_close(&ctx);
        }
    dpl_ctx_close(&one);
}

// 64: the mean of numbers rounded by chance is theirs, and only the neighbours come up. 65: another
// stream gives another pattern, the same gives the same. 66: a block of zeros beside others.
static void test_nv_faults(void **state) {
    (void)state;
    static float x[1024 + 32];
    dpl_ctx *ctx = lab_ctx(2, false, dpl_cpu_level_name(dpl_cpu_level_machine()));
    for (size_t i = 0; i < 1024; i++) x[i] = i % 16 ? 1.25f : 6;
    uint64_t random[2] = {11, 0};
    nv_out out = quantize_nv(ctx, x, 1, 1024, random), again = quantize_nv(ctx, x, 1, 1024, random);
    double sum = 0;
    for (size_t i = 0; i < 1024; i++) {
        const float got = nv_number(&out, 0, i);
        if (i % 16 == 0) assert_true(fabsf(got - 6) < 1e-5f);
        else assert_true(fabsf(got - 1) < 1e-5f || fabsf(got - 1.5f) < 1e-5f), sum += (double)got;
    }
    assert_true(fabs(sum / 960 - 1.25) < 0.02);
    assert_memory_equal(out.nv.codes, again.nv.codes, out.n_codes);
    free_nv(&again);
    random[1]++;
    again = quantize_nv(ctx, x, 1, 1024, random);
    assert_memory_not_equal(out.nv.codes, again.nv.codes, out.n_codes);
    free_nv(&out), free_nv(&again);
    memset(x, 0, sizeof x);
    x[16] = 1;
    out = quantize_nv(ctx, x, 1, 32, NULL);
    assert_true(out.nv.scales[0] == 0 && out.nv.scales[1] == 0x7e);
    for (size_t i = 0; i < 32; i++) assert_true(nv_number(&out, 0, i) == x[i]);
    free_nv(&out);
    dpl_ctx_close(&ctx);
}

// 67: the codes of a weight, transposed, are those of the transposed weight, and so are scales.
static void test_nv_transposed(void **state) {
    (void)state;
    enum { N = 96, K = 50, CODES = 96 * 64 / 2, SCALES = 96 * 64 / 256 };
    float *rows[2], *panels[2];
    dpl_quant_weight w[2];
    for (int i = 0; i < 2; i++) {
        w[i] = (dpl_quant_weight){.rule = {.format = DPL_E2M1, .grad_format = DPL_E2M1}};
        rows[i] = malloc(N * K * sizeof(float));
        panels[i] = dpl_alloc(dpl_panel_elems(i ? K : N, i ? N : K) * sizeof(float));
        for (int way = 0; way < 2; way++)
            w[i].codes[way] = malloc(CODES), w[i].scales[way] = malloc(SCALES);
        w[i].tensor_scale = malloc(sizeof(float));
    }
    for (size_t i = 0; i < N * K; i++)
        rows[0][i] = rows[1][i % K * N + i / K] = (float)dpl_rng_normal(3, 1, i);
    for (int level = 0; level < DPL_CPU_N; level++) {
        dpl_ctx *ctx = open_level(level, 2);
        if (!ctx) continue;
        for (int i = 0; i < 2; i++) {
            const size_t n = i ? K : N, k = i ? N : K;
            assert_int_equal(dpl_quant_code_bytes(DPL_E2M1, 1, n, k), CODES);
            assert_int_equal(dpl_quant_scale_bytes(DPL_E2M1, 1, n, k), SCALES);
            dpl_panel_pack(ctx, rows[i], n, k, panels[i]);
            dpl_quant_weight_pack(ctx, panels[i], 1, n, k, &w[i]);
            dpl_ctx_wait(ctx);
        }
        assert_true(w[0].tensor_scale[0] == w[1].tensor_scale[0]);
        for (int way = 0; way < 2; way++) {
            assert_memory_equal(w[0].codes[way], w[1].codes[!way], CODES);
            assert_memory_equal(w[0].scales[way], w[1].scales[!way], SCALES);
        }
        dpl_ctx_close(&ctx);
    }
    for (int i = 0; i < 2; i++) {
        free(rows[i]), dpl_free(panels[i]), free(w[i].tensor_scale);
        for (int way = 0; way < 2; way++) free(w[i].codes[way]), free(w[i].scales[way]);
    }
}

/* ---- with the optimizer ---------------------------------------------------------------------- */
enum { W_GROUPS = 3, W_N = 70, W_K = 97, W_ELEMS = W_GROUPS * 96 * 98 };

typedef struct updated {
    float *param, *m, *v;
    dpl_quant_weight w;
} updated;

static updated open_updated(dpl_code format) {
    updated u = {0};
    float **const arrays[] = {&u.param, &u.m, &u.v};
    u.w.rule = (dpl_quant_rule){format, format, DPL_SCALE_UP};
    for (size_t a = 0; a < 3; a++) {
        *arrays[a] = calloc(W_ELEMS, sizeof(float));
        for (size_t i = 0; i < W_GROUPS * W_N * W_K; i++)
            (*arrays[a])[i / (W_N * W_K) * 96 * 98 + dpl_panel_index(i / W_K % W_N, i % W_K, W_K)] =
                fabsf((float)dpl_rng_normal(8, a, i));
    }
    for (int way = 0; way < 2; way++) {
        u.w.codes[way] = malloc(dpl_quant_code_bytes(format, W_GROUPS, W_N, W_K));
        u.w.scales[way] = malloc(dpl_quant_scale_bytes(format, W_GROUPS, W_N, W_K));
    }
    u.w.tensor_scale = calloc(W_GROUPS, sizeof(float));
    return u;
}

static void close_updated(updated *u) {
    free(u->param), free(u->m), free(u->v), free(u->w.tensor_scale);
    for (int way = 0; way < 2; way++) free(u->w.codes[way]), free(u->w.scales[way]);
}

// An update that makes codes on the way gives what an update and then packing give.
static void test_updates(void **state) {
    (void)state;
    static const dpl_adamw rule = {0.9, 0.99, 1e-2f, 1e-8f, 0, 0.1f, 0.5f, 0.3f, 0.7f};
    float *grad = calloc(W_ELEMS, sizeof *grad);
    assert_int_equal(dpl_panel_elems(W_N, W_K) * W_GROUPS, W_ELEMS);
    for (size_t i = 0; i < W_GROUPS * W_N * W_K; i++)
        grad[i / (W_N * W_K) * 96 * 98 + dpl_panel_index(i / W_K % W_N, i % W_K, W_K)] =
            (float)dpl_rng_normal(8, 9, i);
    for (int level = 0; level < DPL_CPU_N; level++)
        for (int nv = 0; nv < 2; nv++) {
            const dpl_code f = nv ? DPL_E2M1 : DPL_E4M3;
            dpl_ctx *ctx = open_level(level, 3);
            if (!ctx) continue;
            updated a = open_updated(f), b = open_updated(f);
            dpl_adamw_step(ctx, &rule, grad, W_ELEMS, a.param, a.m, a.v, NULL);
            dpl_quant_weight_pack(ctx, a.param, W_GROUPS, W_N, W_K, &a.w);
            dpl_adamw_quantize(ctx, &rule, grad, W_GROUPS, W_N, W_K, b.param, b.m, b.v, &b.w);
            dpl_ctx_wait(ctx);
            assert_memory_equal(a.param, b.param, W_ELEMS * sizeof(float));
            assert_memory_equal(a.m, b.m, W_ELEMS * sizeof(float));
            assert_memory_equal(a.v, b.v, W_ELEMS * sizeof(float));
            assert_memory_equal(a.w.tensor_scale, b.w.tensor_scale, W_GROUPS * sizeof(float));
            for (int way = 0; way < 2; way++) {
                assert_memory_equal(a.w.codes[way], b.w.codes[way],
                                    dpl_quant_code_bytes(f, W_GROUPS, W_N, W_K));
                assert_memory_equal(a.w.scales[way], b.w.scales[way],
                                    dpl_quant_scale_bytes(f, W_GROUPS, W_N, W_K));
            }
            close_updated(&a), close_updated(&b);
            dpl_ctx_close(&ctx);
        }
    free(grad);
}

/* ---- known faults ---------------------------------------------------------------------------- */
static void test_faults(void **state) {
    (void)state;
    dpl_ctx *ctx = lab_ctx(1, false, dpl_cpu_level_name(dpl_cpu_level_machine()));
    float x[2 * 64] = {0};
    for (int i = 0; i < 64; i++) x[64 + i] = (float)(i + 1);
    // 54: a row of zeros, both ways.
    mx_out out = quantize(ctx, x, DPL_F32, 2, 64, NULL, 1, DPL_E4M3, DPL_SCALE_UP);
    for (size_t i = 0; i < 128; i++) {
        const float by_row = number(DPL_E4M3, out.rows.codes[i], out.rows.scales[i / 32]);
        const float by_column = number(DPL_E4M3, out.columns.codes[i], out.columns.scales[i % 64]);
        assert_true(isfinite(by_row) && isfinite(by_column));
        if (i < 64) assert_true(by_row == 0 && by_column == 0);
        else assert_true(fabsf(by_row - x[i]) <= x[i] / 16 && fabsf(by_column - x[i]) <= x[i] / 16);
    }
    free_mx(&out);
    // 55: tiny blocks neither vanish nor turn into NaN.
    for (int i = 0; i < 32; i++) x[i] = 1e-38f, x[32 + i] = dpl_bf16_to_f32(1), x[64 + i] = 1;
    out = quantize(ctx, x, DPL_F32, 1, 96, NULL, 1, DPL_E4M3, DPL_SCALE_UP);
    for (size_t i = 0; i < 96; i++) {
        const float got = number(DPL_E4M3, out.rows.codes[i], out.rows.scales[i / 32]);
        assert_true(isfinite(got) && fabsf(got - x[i]) <= x[i] / 16 + 0x1p-137f);
    }
    free_mx(&out);
    // 57: 511 saturates by OCP's rule alone.
    memset(x, 0, sizeof x);
    x[0] = 511, x[1] = 1;
    for (int rule = 0; rule < 2; rule++) {
        out = quantize(ctx, x, DPL_F32, 1, 32, NULL, 1, DPL_E4M3, (dpl_scale_rule)rule);
        assert_int_equal(out.rows.scales[0], rule == DPL_SCALE_UP ? 128 : 127);
        assert_true(number(DPL_E4M3, out.rows.codes[0], out.rows.scales[0]) ==
                    (rule == DPL_SCALE_UP ? 512.0f : 448.0f));
        free_mx(&out);
    }
    dpl_ctx_close(&ctx);
}

int main(void) {
    const char *root = fixture_root();
    if (root && !fixture_open(fixture_path("formats.safetensors"), &reference)) return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tables),        cmocka_unit_test(test_codes),
        cmocka_unit_test(test_scales),        cmocka_unit_test(test_floats),
        cmocka_unit_test(test_matrix),        cmocka_unit_test(test_tail),
        cmocka_unit_test(test_errors),        cmocka_unit_test(test_nv),
        cmocka_unit_test(test_nv_rows),       cmocka_unit_test(test_nv_faults),
        cmocka_unit_test(test_nv_transposed), cmocka_unit_test(test_updates),
        cmocka_unit_test(test_groups),        cmocka_unit_test(test_alone),
        cmocka_unit_test(test_faults)};
    const int n_failed = cmocka_run_group_tests(tests, NULL, NULL);
    fixture_close(&reference);
    return n_failed;
}
