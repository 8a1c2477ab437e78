/*
 * test_tiles.c - the product over tile registers, bit by bit against a plain statement of its
 * arithmetic: as AVX2 on any machine, and as the processor's own instructions where it has them.
 */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "cpu/kernels.h"

#define SEED   7741
#define KC     (2 * DPL_GEMM_KC)
#define M      32
#define CANARY 0x7fabcdefu // a NaN that no product makes

typedef enum inputs { ORDINARY, WIDE, ANY_BITS, SUBNORMAL, UNDERFLOW, NOT_FINITE, INPUTS_N } inputs;

static uint64_t draw; // of the random numbers

static uint32_t word(void) {
    return (uint32_t)dpl_rng_u64(SEED, 0, draw++);
}

static size_t below(size_t n) {
    return word() % n;
}

static float scaled(int exponent, int range) {
    const float x = (float)(int32_t)word() * 0x1p-31f;
    return ldexpf(x, exponent - (int)below((size_t)range));
}

static uint16_t input(inputs kind) {
    const uint16_t bits = (uint16_t)word();
    switch (kind) {
    case ORDINARY:
        return dpl_f32_to_bf16(scaled(0, 1));
    case WIDE:
        return dpl_f32_to_bf16(scaled(30, 60));
    case ANY_BITS:
        return (bits & 0x7f80) == 0x7f80 ? bits & 0xbfff : bits;
    case SUBNORMAL:
        return bits & 0x1000 ? bits & 0x80ff : dpl_f32_to_bf16(scaled(20, 3));
    case UNDERFLOW:
        return dpl_f32_to_bf16(scaled(-60, 6));
    default:
        return below(100) ? dpl_f32_to_bf16(scaled(0, 1)) : bits | 0x7f80;
    }
}

/* ---- the arithmetic -------------------------------------------------------------------------- */
static float flush(float x) {
    return fabsf(x) < FLT_MIN ? copysignf(0, x) : x;
}

// a * b + c, rounded to nearest even, zero where the result would be subnormal if it were rounded
// to 24 bits: that is found with all exponents higher. What rounds up to the least normal number
// from below only because a subnormal has fewer bits is zero as well.
static float multiply_add(float a, float b, float c) {
    const float result = fmaf(a, b, c);
    if (!(fabsf(result) <= FLT_MIN)) return result;
    int a_exponent, b_exponent;
    a = frexpf(a, &a_exponent), b = frexpf(b, &b_exponent);
    const int up = 100, half = (a_exponent + b_exponent + up) / 2;
    const float high = fmaf(ldexpf(a, half), ldexpf(b, a_exponent + b_exponent + up - half),
                            ldexpf(c, up));
    return fabsf(high) < ldexpf(FLT_MIN, up) ? copysignf(0, high) : result;
}

// Element (i, j) of c + a b; a (m, KC), b (KC, 32).
static float element(const uint16_t *a, const uint16_t *b, size_t kc, size_t i, size_t j, float c) {
    for (size_t l0 = 0; l0 < kc; l0 += 32) {
        float chain[2] = {0};
        for (size_t l = l0; l < l0 + 32; l++) {
            const float x = l < kc ? flush(dpl_bf16_to_f32(a[i * KC + l])) : 0;
            const float y = l < kc ? flush(dpl_bf16_to_f32(b[l * 32 + j])) : 0;
            chain[l % 2] = multiply_add(x, y, chain[l % 2]);
        }
        c = flush(flush(c) + flush(chain[0] + chain[1]));
    }
    return c;
}

static bool same(float got, float want) {
    return memcmp(&got, &want, sizeof got) == 0 || (isnan(got) && isnan(want));
}

/* ---- products -------------------------------------------------------------------------------- */
typedef struct operands {
    uint16_t a[M * KC], b[KC * 32];
} operands;

// Exactly as long as they may be read; behind the right one stands what must not be used.
static uint16_t *pack_right(const operands *o, size_t kc) {
    const size_t n = dpl_round_up(kc, 2) * 32;
    uint16_t *packed = malloc((n + 64) * sizeof *packed);
    memset(packed, 0xff, (n + 64) * sizeof *packed);
    for (size_t l = 0; l < dpl_round_up(kc, 2); l++)
        for (size_t j = 0; j < 32; j++)
            packed[(l / 2 * 32 + j) * 2 + l % 2] = l < kc ? o->b[l * 32 + j] : 0;
    return packed;
}

static uint16_t *pack_left(const dpl_gemm_kernels *g, const operands *o, size_t m, size_t kc) {
    uint16_t *packed = malloc(m * dpl_round_up(kc, g->depth) * sizeof *packed);
    g->left_rows(DPL_LOAD_BF16, m, kc, o->a, KC, m, packed);
    return packed;
}

static void check_product(const dpl_gemm_kernels *g, const operands *o, size_t m, size_t kc,
                          bool add, size_t ldc) {
    float c[(M + 2) * 40], before[(M + 2) * 40];
    for (size_t i = 0; i < DPL_COUNT(c); i++) memcpy(&c[i], &(uint32_t){CANARY}, sizeof c[i]);
    float *first = c + ldc;
    for (size_t i = 0; i < m; i++)
        for (size_t j = 0; j < 32; j++) first[i * ldc + j] = scaled(0, 130 * (int)below(2) + 1);
    memcpy(before, c, sizeof c);
    uint16_t *left = pack_left(g, o, m, kc), *right = pack_right(o, kc);
    const unsigned entered = g->enter();
    g->tile(m, kc, left, right, first, ldc, add, (dpl_gemm_ahead){right, 64, 8, 64, 1});
    g->leave(entered);
    free(left), free(right);
    for (size_t at = 0; at < DPL_COUNT(c); at++) {
        const size_t i = at / ldc - 1, j = at % ldc;
        if (at < ldc || i >= m || j >= 32) {
            assert_memory_equal(&c[at], &before[at], sizeof c[at]);
            continue;
        }
        const float want = element(o->a, o->b, kc, i, j, add ? before[at] : 0);
        if (!same(c[at], want))
            fail_msg("m %zu kc %zu add %d (%zu, %zu): got %a, want %a", m, kc, add, i, j,
                     (double)c[at], (double)want);
    }
}

static void check_products(const dpl_gemm_kernels *g) {
    static const size_t lengths[] = {0, 1, 2, 31, 32, 33, 95, 256, KC - 1, KC};
    operands *o = malloc(sizeof *o);
    for (inputs kind = 0; kind < INPUTS_N; kind++) {
        for (size_t i = 0; i < DPL_COUNT(o->a); i++) o->a[i] = input(kind);
        for (size_t i = 0; i < DPL_COUNT(o->b); i++)
            o->b[i] = input(kind == SUBNORMAL ? WIDE : kind);
        for (size_t m = 1; m <= g->mr; m++)
            for (int i = 0; i < 3; i++)
                check_product(g, o, m, lengths[below(DPL_COUNT(lengths))], i == 1 || below(2),
                              32 + 8 * below(2));
    }
    free(o);
}

// 2^-126 less a little rounds to a subnormal of 24 bits: zero. A little more of it does not.
static void check_least(const dpl_gemm_kernels *g) {
    operands *o = calloc(1, sizeof *o);
    o->a[0] = o->b[0] = dpl_f32_to_bf16(0x1p-63f);
    o->a[2] = dpl_f32_to_bf16(-0x1.8p-75f), o->b[2 * 32] = dpl_f32_to_bf16(0x1p-76f);
    o->b[1] = o->b[0], o->b[2 * 32 + 1] = dpl_f32_to_bf16(0x1p-77f);
    check_product(g, o, 1, 32, false, 32);
    assert_true(element(o->a, o->b, 32, 0, 0, 0) == 0);
    assert_true(element(o->a, o->b, 32, 0, 1, 0) == 0x1p-126f);
    free(o);
}

/* ---- packing --------------------------------------------------------------------------------- */
static uint16_t part(dpl_gemm_load load, const void *src, size_t i) {
    if (load == DPL_LOAD_BF16) return ((const uint16_t *)src)[i];
    float x = ((const float *)src)[i];
    for (int n = load == DPL_LOAD_PART2 ? 1 : load == DPL_LOAD_PART3 ? 2 : 0; n > 0; n--)
        x -= dpl_bf16_to_f32(dpl_f32_to_bf16(x));
    return dpl_f32_to_bf16(x);
}

static void check_pack(const dpl_gemm_kernels *g, dpl_gemm_load load, bool rows, size_t m,
                       size_t kc) {
    const size_t ld = (rows ? kc : m) + below(5),
                 n = (rows ? m - 1 : kc - 1) * ld + (rows ? kc : m);
    uint32_t *src = malloc(n * sizeof *src);
    for (size_t i = 0; i < n; i++) { // read as fp32 or, the first half of it, as bf16
        static const uint32_t odd[] = {0x7f800000, 0x7fc00000, 0x7fffffff, 0xff800001,
                                       0x007fffff, 0x80000001, 0x80000000, 0x7f7fffff};
        const float x = scaled(10, 20);
        memcpy(&src[i], below(50) ? (const void *)&x : &odd[below(8)], sizeof x);
    }
    const size_t n_packed = m * dpl_round_up(kc, 32);
    uint16_t *packed = malloc((n_packed + 1) * sizeof *packed);
    packed[n_packed] = 0x7fab;
    (rows ? g->left_rows : g->left_cols)(load, m, kc, src, ld, m, packed);
    assert_int_equal(packed[n_packed], 0x7fab);
    for (size_t l = 0; l < dpl_round_up(kc, 32); l++)
        for (size_t i = 0; i < m; i++) {
            const uint16_t got = packed[(l / 32 * m + i) * 32 + l % 32];
            const uint16_t want = l < kc ? part(load, src, rows ? i * ld + l : l * ld + i) : 0;
            if (got != want)
                fail_msg("load %d rows %d m %zu kc %zu (%zu, %zu): got %04x, want %04x", load, rows,
                         m, kc, i, l, got, want);
        }
    free(src), free(packed);
}

static void check_packs(const dpl_gemm_kernels *g) {
    assert_int_equal(g->depth, 32);
    for (size_t m = 1; m <= g->mr; m++)
        for (int load = 0; load < 4; load++)
            for (int rows = 0; rows < 2; rows++)
                check_pack(g, (dpl_gemm_load)load, rows, m, 1 + below(100));
}

// Each block adds 16 pairs of products to every element.
static void check_peak(const dpl_gemm_kernels *g) {
    float sink[34];
    for (size_t i = 0; i < 32; i++) sink[i] = (float)i;
    sink[32] = 0.5f, sink[33] = 1;
    const unsigned entered = g->enter();
    const double done = g->peak(160, sink);
    g->leave(entered);
    assert_true(done == 10.0 * 4 * 16 * 16 * 32 * 2);
    for (size_t i = 0; i < 32; i++) assert_true(sink[i] == (float)i + 10 * 8);
}

/* ---- tables ---------------------------------------------------------------------------------- */
static dpl_gemm_kernels open_table(void (*set)(dpl_kernels *k), dpl_cpu_level needs) {
    const dpl_cpu_level level = dpl_cpu_level_machine();
    if (level < needs) {
        print_message("SKIPPED: needs %s, this machine is %s\n", dpl_cpu_level_name(needs),
                      dpl_cpu_level_name(level));
        skip();
    }
    dpl_kernels k = {0};
    set(&k);
    print_message("%s, seed %d\n", k.gemm[DPL_BF16].name, SEED);
    return k.gemm[DPL_BF16];
}

#if !defined(__x86_64__) // neither table is there, nor a level that has one
#define dpl_kernels_tiles dpl_kernels_ref
#define dpl_kernels_amx   dpl_kernels_ref
#endif
#define TEST(what, table, needs)                                           \
    static void test_##what##_##table(void **state) {                      \
        (void)state;                                                       \
        const dpl_gemm_kernels g = open_table(dpl_kernels_##table, needs); \
        check_##what(&g);                                                  \
    }
TEST(products, tiles, DPL_CPU_AVX2)
TEST(least, tiles, DPL_CPU_AVX2)
TEST(packs, tiles, DPL_CPU_AVX2)
TEST(peak, tiles, DPL_CPU_AVX2)
TEST(products, amx, DPL_CPU_AMX)
TEST(least, amx, DPL_CPU_AMX)
TEST(packs, amx, DPL_CPU_AMX)
TEST(peak, amx, DPL_CPU_AMX)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products_tiles), cmocka_unit_test(test_least_tiles),
        cmocka_unit_test(test_packs_tiles),    cmocka_unit_test(test_peak_tiles),
        cmocka_unit_test(test_products_amx),   cmocka_unit_test(test_least_amx),
        cmocka_unit_test(test_packs_amx),      cmocka_unit_test(test_peak_amx),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
