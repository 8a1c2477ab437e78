// kernels_quant.c - bodies that check and benchmark quantization: every level the same bits.
#include <math.h>

#include "kernels.h"

#define N_BENCH 4096
#define M_BENCH 32

// Floats of any bits at all, in the first half near to what the formats can hold.
static float *anything(kernel_test *t, size_t n) {
    float *x = kernel_floats(t, n);
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)kernel_pick(t, 0, UINT32_MAX);
        if (i < n / 2) bits = (bits & 0x807fffff) | (uint32_t)(105 + bits % 40) << 23;
        memcpy(x + i, &bits, 4);
    }
    return x;
}

static void check_encode(kernel_test *t) {
    for (int f = 0; f < DPL_CODE_N; f++)
        for (size_t n = 0; n < 70; kernel_done(t), n++) {
            const float *x = anything(t, n);
            uint8_t *got = kernel_buffer(t, n), *want = kernel_buffer(t, n);
            t->k->quant.encode((dpl_code)f, x, got, n);
            t->ref->quant.encode((dpl_code)f, x, want, n);
            kernel_same(t, "codes", got, want, n);
        }
    t->aligned = true;
    const float *x = kernel_random(t, N_BENCH);
    uint8_t *codes = kernel_buffer(t, N_BENCH);
    KERNEL_BENCH(t, N_BENCH, "elem", t->k->quant.encode(DPL_E4M3, x, codes, N_BENCH));
}

static void check_decode(kernel_test *t) {
    for (int f = 0; f < DPL_CODE_N; f++)
        for (size_t n = 256; n < 290; kernel_done(t), n++) {
            uint8_t *codes = kernel_buffer(t, n);
            for (size_t i = 0; i < n; i++) codes[i] = (uint8_t)(f == DPL_E2M1 ? i % 16 : i);
            float *got = kernel_floats(t, n), *want = kernel_floats(t, n);
            t->k->quant.decode((dpl_code)f, codes, got, n);
            t->ref->quant.decode((dpl_code)f, codes, want, n);
            kernel_near(t, "numbers", got, want, n, 0);
            for (size_t i = 0; i < n; i++)
                if (got[i] == 0 && signbit(got[i]) != signbit(want[i]))
                    kernel_same(t, "sign of zero", got + i, want + i, 4);
        }
    t->aligned = true;
    const uint8_t *codes = kernel_buffer(t, N_BENCH);
    float *x = kernel_floats(t, N_BENCH);
    KERNEL_BENCH(t, N_BENCH, "elem", t->k->quant.decode(DPL_E4M3, codes, x, N_BENCH));
}

// Numbers of one block range, and now and then something odd: zeros, subnormals, Inf, NaN.
static void *block_numbers(kernel_test *t, dpl_dtype dtype, size_t n) {
    static const float odd[] = {0, -0.0f, 448, 448.0001f, 0x1p-126f, 0x1p-149f, 3.4e38f, 1e-38f};
    float *x = kernel_random(t, n);
    for (size_t i = 0; i < n; i++) {
        x[i] = ldexpf(x[i], (int)(i / 64 % 7) * 20 - 60);
        if (kernel_pick(t, 0, 99) == 0) x[i] = odd[kernel_pick(t, 0, DPL_COUNT(odd) - 1)];
        if (kernel_pick(t, 0, 999) == 0) x[i] = kernel_pick(t, 0, 1) ? INFINITY : NAN;
    }
    if (dtype == DPL_F32) return x;
    uint16_t *h = kernel_buffer(t, 2 * n);
    for (size_t i = 0; i < n; i++) h[i] = dpl_f32_to_bf16(x[i]);
    return h;
}

static void compare_mx(kernel_test *t, bool rows, size_t m, size_t n, dpl_mx_block b) {
    const size_t n_scales = rows ? m * dpl_div_up(n, 32) : n;
    dpl_mx_block want = b;
    b.m = want.m = m, b.n = want.n = n;
    b.ld = want.ld = b.ld_codes = want.ld_codes = n;
    b.ld_scales = want.ld_scales = dpl_div_up(n, 32);
    b.x = want.x = block_numbers(t, b.dtype, m * n);
    b.codes = kernel_buffer(t, m * n), want.codes = kernel_buffer(t, m * n);
    b.scales = kernel_buffer(t, n_scales), want.scales = kernel_buffer(t, n_scales);
    (rows ? t->k->quant.mx_rows : t->k->quant.mx_columns)(&b);
    (rows ? t->ref->quant.mx_rows : t->ref->quant.mx_columns)(&want);
    kernel_same(t, "scales", b.scales, want.scales, n_scales);
    kernel_same(t, "codes", b.codes, want.codes, m * n);
}

static void check_mx(kernel_test *t, bool rows) {
    static const size_t widths[] = {0, 1, 31, 32, 33, 63, 64, 65, 127, 200, 511, 512, 544, 1100};
    for (int kind = 0; kind < 8; kind++)
        for (size_t i = 0; i < DPL_COUNT(widths); kernel_done(t), i++)
            compare_mx(t, rows, kernel_pick(t, rows ? 0 : 1, rows ? 5 : 32), widths[i],
                       (dpl_mx_block){.format = kind & 1 ? DPL_E5M2 : DPL_E4M3,
                                      .rule = kind & 2 ? DPL_SCALE_FLOOR : DPL_SCALE_UP,
                                      .dtype = kind & 4 ? DPL_BF16 : DPL_F32});
    t->aligned = true;
    const dpl_mx_block b = {.format = DPL_E4M3,
                            .dtype = DPL_BF16,
                            .m = M_BENCH,
                            .n = N_BENCH,
                            .x = kernel_random_bf16(t, M_BENCH * N_BENCH),
                            .codes = kernel_buffer(t, M_BENCH * N_BENCH),
                            .scales = kernel_buffer(t, M_BENCH * N_BENCH),
                            .ld = N_BENCH,
                            .ld_codes = N_BENCH,
                            .ld_scales = N_BENCH / 32};
    KERNEL_BENCH(t, M_BENCH * N_BENCH, "elem",
                 (rows ? t->k->quant.mx_rows : t->k->quant.mx_columns)(&b));
}

static void check_mx_rows(kernel_test *t) {
    check_mx(t, true);
}

static void check_mx_columns(kernel_test *t) {
    check_mx(t, false);
}

// Codes of any kind, or of usual blocks, and scales of all sizes, the odd ones seldom.
static void make_codes(kernel_test *t, int kind, uint8_t *codes, size_t n, uint8_t *scales,
                       size_t n_scales) {
    for (size_t i = 0; i < n; i++) {
        codes[i] = (uint8_t)kernel_pick(t, 0, 255);
        if (kind & 2 && kernel_pick(t, 0, 99)) codes[i] |= 0x20;            // not small
        if ((codes[i] & 0x7f) >= (kind & 1 ? 0x7c : 0x7f)) codes[i] = 0x80; // finite
    }
    for (size_t i = 0; i < n_scales; i++)
        scales[i] = (uint8_t)(kernel_pick(t, 0, kind & 4 ? 5 : 99) ? kernel_pick(t, 33, 220)
                                                                   : kernel_pick(t, 0, 255));
}

static void same_numbers(kernel_test *t, uint16_t *got, uint16_t *want, size_t n) {
    for (size_t i = 0; i < n; i++) // NaNs may differ
        if (isnan(dpl_bf16_to_f32(got[i])) && isnan(dpl_bf16_to_f32(want[i]))) got[i] = want[i] = 0;
    kernel_same(t, "numbers", got, want, 2 * n);
}

static void check_expand_pairs(kernel_test *t) {
    enum { BLOCKS = 7, BENCH = 16 };
    for (int kind = 0; kind < 16; kernel_done(t), kind++) {
        uint8_t *codes = kernel_buffer(t, BLOCKS * 1024), *scales = kernel_buffer(t, BLOCKS * 32);
        uint16_t *got = kernel_buffer(t, BLOCKS * 2048), *want = kernel_buffer(t, BLOCKS * 2048);
        make_codes(t, kind, codes, BLOCKS * 1024, scales, BLOCKS * 32);
        t->k->quant.expand_pairs(kind & 1 ? DPL_E5M2 : DPL_E4M3, BLOCKS, codes, scales, got, 0);
        t->ref->quant.expand_pairs(kind & 1 ? DPL_E5M2 : DPL_E4M3, BLOCKS, codes, scales, want, 0);
        same_numbers(t, got, want, BLOCKS * 1024);
    }
    t->aligned = true;
    uint8_t *codes = kernel_buffer(t, BENCH * 1024), *scales = kernel_buffer(t, BENCH * 32);
    uint16_t *y = kernel_buffer(t, BENCH * 2048);
    for (size_t i = 0; i < BENCH * 1024; i++) codes[i] = (uint8_t)(8 + i * 7 % 118);
    memset(scales, 120, BENCH * 32);
    KERNEL_BENCH(t, BENCH * 1024, "elem",
                 t->k->quant.expand_pairs(DPL_E4M3, BENCH, codes, scales, y, 0));
}

static void check_expand_columns(kernel_test *t) {
    enum { M = 32, BENCH_N = 256 };
    static const size_t widths[] = {0, 1, 31, 32, 33, 64, 65, 100, 128, 200};
    for (int kind = 0; kind < 16; kind++)
        for (size_t i = 0; i < DPL_COUNT(widths); kernel_done(t), i++) {
            const size_t n = widths[i], ld = n + 3, m = kernel_pick(t, 1, M);
            uint8_t *codes = kernel_buffer(t, M * ld), *scales = kernel_buffer(t, n);
            uint16_t *got = kernel_buffer(t, 2 * M * ld), *want = kernel_buffer(t, 2 * M * ld);
            make_codes(t, kind, codes, M * ld, scales, n);
            const dpl_code f = kind & 1 ? DPL_E5M2 : DPL_E4M3;
            t->k->quant.expand_columns(f, m, n, codes, ld, scales, got, ld);
            t->ref->quant.expand_columns(f, m, n, codes, ld, scales, want, ld);
            same_numbers(t, got, want, M * ld);
        }
    t->aligned = true;
    uint8_t *codes = kernel_buffer(t, M * BENCH_N), *scales = kernel_buffer(t, BENCH_N);
    uint16_t *y = kernel_buffer(t, 2 * M * BENCH_N);
    for (size_t i = 0; i < M * BENCH_N; i++) codes[i] = (uint8_t)(8 + i * 7 % 118);
    memset(scales, 120, BENCH_N);
    KERNEL_BENCH(
        t, M * BENCH_N, "elem",
        t->k->quant.expand_columns(DPL_E4M3, M, BENCH_N, codes, BENCH_N, scales, y, BENCH_N));
}

static void check_expand_row(kernel_test *t) {
    for (int kind = 0; kind < 16; kind++)
        for (size_t n = 0; n < 200; kernel_done(t), n += kernel_pick(t, 1, 9)) {
            uint8_t *codes = kernel_buffer(t, n), *scales = kernel_buffer(t, dpl_div_up(n, 32));
            uint16_t *got = kernel_buffer(t, 2 * n), *want = kernel_buffer(t, 2 * n);
            make_codes(t, kind, codes, n, scales, dpl_div_up(n, 32));
            t->k->quant.expand_row(kind & 1 ? DPL_E5M2 : DPL_E4M3, n, codes, scales, got);
            t->ref->quant.expand_row(kind & 1 ? DPL_E5M2 : DPL_E4M3, n, codes, scales, want);
            same_numbers(t, got, want, n);
        }
    t->aligned = true;
    uint8_t *codes = kernel_buffer(t, N_BENCH), *scales = kernel_buffer(t, N_BENCH / 32);
    uint16_t *y = kernel_buffer(t, 2 * N_BENCH);
    for (size_t i = 0; i < N_BENCH; i++) codes[i] = (uint8_t)(8 + i * 7 % 118);
    memset(scales, 120, N_BENCH / 32);
    KERNEL_BENCH(t, N_BENCH, "elem", t->k->quant.expand_row(DPL_E4M3, N_BENCH, codes, scales, y));
}

static void compare_nv(kernel_test *t, size_t m, size_t n, bool random, dpl_nv_rows b) {
    const uint64_t seed_stream[2] = {kernel_pick(t, 0, UINT32_MAX), kernel_pick(t, 0, UINT32_MAX)};
    const size_t n_scales = m * dpl_div_up(n, 16), n_codes = m * dpl_div_up(n, 2);
    float *scale = kernel_random(t, m);
    // Of usual size, and so large and small that codes and scales become 0 or saturate.
    for (size_t i = 0; i < m; i++)
        scale[i] = ldexpf(fabsf(scale[i]), (int)kernel_pick(t, 0, 5) * 20 - 40);
    b.tensor_scale = scale;
    b.m = m, b.n = n, b.ld = n;
    b.ld_codes = dpl_div_up(n, 2), b.ld_scales = dpl_div_up(n, 16);
    b.x = block_numbers(t, b.dtype, m * n);
    if (random) b.seed_stream = seed_stream;
    b.first = (uint64_t)kernel_pick(t, 0, UINT32_MAX) * 128 * kernel_pick(t, 0, 999);
    b.ld_random = dpl_round_up(n, 128);
    dpl_nv_rows want = b;
    b.codes = kernel_buffer(t, n_codes), want.codes = kernel_buffer(t, n_codes);
    b.scales = kernel_buffer(t, n_scales), want.scales = kernel_buffer(t, n_scales);
    t->k->quant.nv_rows(&b);
    t->ref->quant.nv_rows(&want);
    kernel_same(t, "scales", b.scales, want.scales, n_scales);
    kernel_same(t, "codes", b.codes, want.codes, n_codes);
}

static void check_nv(kernel_test *t, bool random) {
    static const size_t widths[] = {0, 1, 2, 15, 16, 17, 31, 32, 127, 128, 144, 255, 256, 257, 700};
    for (int dtype = 0; dtype < 2; dtype++)
        for (size_t i = 0; i < DPL_COUNT(widths); kernel_done(t), i++)
            compare_nv(t, kernel_pick(t, 0, 5), widths[i], random,
                       (dpl_nv_rows){.dtype = (dpl_dtype)dtype});
    static const uint64_t seed_stream[2] = {1, 2};
    t->aligned = true;
    float *scale = kernel_floats(t, M_BENCH);
    for (size_t i = 0; i < M_BENCH; i++) scale[i] = 600;
    const dpl_nv_rows b = {.dtype = DPL_BF16,
                           .m = M_BENCH,
                           .n = N_BENCH,
                           .x = kernel_random_bf16(t, M_BENCH * N_BENCH),
                           .tensor_scale = scale,
                           .codes = kernel_buffer(t, M_BENCH * N_BENCH / 2),
                           .scales = kernel_buffer(t, M_BENCH * N_BENCH / 16),
                           .ld = N_BENCH,
                           .ld_codes = N_BENCH / 2,
                           .ld_scales = N_BENCH / 16,
                           .seed_stream = random ? seed_stream : NULL,
                           .ld_random = N_BENCH};
    KERNEL_BENCH(t, M_BENCH * N_BENCH, "elem", t->k->quant.nv_rows(&b));
}

static void check_nv_rows(kernel_test *t) {
    check_nv(t, false);
}

static void check_nv_rows_random(kernel_test *t) {
    check_nv(t, true);
}

// Rows of any numbers, some of them missing, and columns that are not whole vectors or runs.
static dpl_nv_columns nv_columns_case(kernel_test *t, dpl_dtype dtype, size_t n,
                                      uint64_t seed_stream[2]) {
    dpl_nv_columns b = {.dtype = dtype, .m = kernel_pick(t, 1, 16), .n = n, .ld_codes = n + 5};
    const uint8_t *x = block_numbers(t, dtype, 16 * n);
    for (size_t i = 0; i < b.m; i++)
        b.rows[i] = kernel_pick(t, 0, 9) ? x + i * n * dpl_dtype_bytes(dtype) : NULL;
    b.signs = (uint16_t)kernel_pick(t, 0, 0xffff);
    b.tensor_scale = kernel_random(t, n);
    for (size_t c = 0; c < n; c++)
        b.tensor_scale[c] = ldexpf(fabsf(b.tensor_scale[c]), (int)kernel_pick(t, 0, 5) * 20 - 40);
    for (size_t i = 0; i < 2; i++) seed_stream[i] = kernel_pick(t, 0, UINT32_MAX);
    b.first = (uint64_t)kernel_pick(t, 0, UINT32_MAX) * 128 * kernel_pick(t, 0, 999);
    b.ld_random = dpl_round_up(n, 128) + 128;
    return b;
}

static void check_nv_columns(kernel_test *t) {
    static const size_t widths[] = {0, 1, 7, 8, 15, 16, 17, 31, 32, 127, 128, 129, 200, 300};
    for (int kind = 0; kind < 4; kind++)
        for (size_t i = 0; i < DPL_COUNT(widths); kernel_done(t), i++) {
            const size_t n = widths[i], n_codes = 8 * (n + 5);
            uint64_t seed_stream[2];
            dpl_nv_columns b = nv_columns_case(t, (dpl_dtype)(kind & 1), n, seed_stream);
            if (kind & 2) b.seed_stream = seed_stream;
            float *got = kernel_floats(t, n), *want_amax = kernel_floats(t, n);
            for (size_t c = 0; c < n; c++) got[c] = want_amax[c] = kernel_pick(t, 0, 3) ? 0 : 1;
            t->k->quant.nv_columns_amax(&b, got);
            t->ref->quant.nv_columns_amax(&b, want_amax);
            kernel_near(t, "largest magnitudes", got, want_amax, n, 0);
            dpl_nv_columns want = b;
            b.codes = kernel_buffer(t, n_codes), want.codes = kernel_buffer(t, n_codes);
            memset(b.codes, 0xee, n_codes), memset(want.codes, 0xee, n_codes);
            b.scales = kernel_buffer(t, n), want.scales = kernel_buffer(t, n);
            t->k->quant.nv_columns(&b);
            t->ref->quant.nv_columns(&want);
            kernel_same(t, "scales", b.scales, want.scales, n);
            kernel_same(t, "codes", b.codes, want.codes, n_codes);
        }
    uint64_t seed_stream[2];
    t->aligned = true;
    dpl_nv_columns b = nv_columns_case(t, DPL_BF16, N_BENCH, seed_stream);
    const uint16_t *x = kernel_random_bf16(t, 16 * N_BENCH);
    for (size_t i = 0; i < 16; i++) b.rows[i] = x + i * N_BENCH;
    b.m = 16, b.ld_codes = N_BENCH;
    for (size_t c = 0; c < N_BENCH; c++) b.tensor_scale[c] = 600;
    b.codes = kernel_buffer(t, 8 * N_BENCH), b.scales = kernel_buffer(t, N_BENCH);
    KERNEL_BENCH(t, 16 * N_BENCH, "elem", t->k->quant.nv_columns(&b));
}

static void check_nv_weight(kernel_test *t) {
    for (int i = 0; i < 60; kernel_done(t), i++) {
        const size_t ld = kernel_pick(t, 16, 40);
        const float *x = i % 3 ? kernel_random(t, 16 * ld) : block_numbers(t, DPL_F32, 16 * ld);
        const float scale = ldexpf(1.5f, (int)kernel_pick(t, 0, 5) * 20 - 40);
        uint8_t *got = kernel_buffer(t, 257), *want = kernel_buffer(t, 257);
        got[256] = t->k->quant.nv_weight(x, ld, scale, got, got + 128);
        want[256] = t->ref->quant.nv_weight(x, ld, scale, want, want + 128);
        kernel_same(t, "codes and scale", got, want, 257);
    }
    t->aligned = true;
    const float *x = kernel_random(t, 256);
    uint8_t *codes = kernel_buffer(t, 256);
    KERNEL_BENCH(t, 256, "elem", t->k->quant.nv_weight(x, 16, 600, codes, codes + 128));
}

static uint8_t *random_bytes(kernel_test *t, size_t n, uint32_t most) {
    uint8_t *bytes = kernel_buffer(t, n);
    for (size_t i = 0; i < n; i++) bytes[i] = (uint8_t)kernel_pick(t, 0, most);
    return bytes;
}

static void check_nv_expand_pairs(kernel_test *t) {
    enum { BENCH = 32 };
    for (size_t blocks = 0; blocks < 20; kernel_done(t), blocks++) {
        const uint8_t *codes = random_bytes(t, blocks * 256, 255);
        const uint8_t *scales = random_bytes(t, blocks * 2, 0x7f);
        uint16_t *got = kernel_buffer(t, blocks * 1024), *want = kernel_buffer(t, blocks * 1024);
        t->k->quant.nv_expand_pairs(blocks, codes, scales, got, 0);
        t->ref->quant.nv_expand_pairs(blocks, codes, scales, want, 0);
        same_numbers(t, got, want, blocks * 512);
    }
    t->aligned = true;
    const uint8_t *codes = random_bytes(t, BENCH * 256, 255);
    const uint8_t *scales = random_bytes(t, BENCH * 2, 0x7e);
    uint16_t *y = kernel_buffer(t, BENCH * 1024);
    KERNEL_BENCH(t, BENCH * 512, "elem", t->k->quant.nv_expand_pairs(BENCH, codes, scales, y, 0));
}

static void check_nv_expand_columns(kernel_test *t) {
    enum { BENCH_N = 256 };
    for (size_t n = 0; n < 80; kernel_done(t), n++) {
        const size_t ld = n + 3;
        const uint8_t *codes = random_bytes(t, 8 * ld, 255);
        const uint8_t *scales = random_bytes(t, n, 0x7f);
        uint16_t *got = kernel_buffer(t, 32 * ld), *want = kernel_buffer(t, 32 * ld);
        memset(got, 0xee, 32 * ld), memset(want, 0xee, 32 * ld);
        t->k->quant.nv_expand_columns(n, codes, ld, scales, got, ld);
        t->ref->quant.nv_expand_columns(n, codes, ld, scales, want, ld);
        same_numbers(t, got, want, 16 * ld);
    }
    t->aligned = true;
    const uint8_t *codes = random_bytes(t, 8 * BENCH_N, 255);
    const uint8_t *scales = random_bytes(t, BENCH_N, 0x7e);
    uint16_t *y = kernel_buffer(t, 32 * BENCH_N);
    KERNEL_BENCH(t, 16 * BENCH_N, "elem",
                 t->k->quant.nv_expand_columns(BENCH_N, codes, BENCH_N, scales, y, BENCH_N));
}

static void check_nv_expand_row(kernel_test *t) {
    for (size_t n = 0; n < 330; kernel_done(t), n += kernel_pick(t, 1, 9)) {
        const uint8_t *codes = random_bytes(t, dpl_div_up(n, 2), 255);
        const uint8_t *scales = random_bytes(t, dpl_div_up(n, 16), 0x7f);
        uint16_t *got = kernel_buffer(t, 2 * n), *want = kernel_buffer(t, 2 * n);
        t->k->quant.nv_expand_row(n, codes, scales, got);
        t->ref->quant.nv_expand_row(n, codes, scales, want);
        same_numbers(t, got, want, n);
    }
    t->aligned = true;
    const uint8_t *codes = random_bytes(t, N_BENCH / 2, 255);
    const uint8_t *scales = random_bytes(t, N_BENCH / 16, 0x7e);
    uint16_t *y = kernel_buffer(t, 2 * N_BENCH);
    KERNEL_BENCH(t, N_BENCH, "elem", t->k->quant.nv_expand_row(N_BENCH, codes, scales, y));
}

static void check_nv_scale(kernel_test *t) {
    enum { BENCH_M = 64 };
    for (size_t m = 0; m < 20; kernel_done(t), m++) {
        const float *sums = kernel_random(t, m * 32), *rows = kernel_random(t, m);
        const float *columns = kernel_random(t, 32);
        float *got = kernel_random(t, m * 32), *want = kernel_floats(t, m * 32);
        memcpy(want, got, m * 32 * sizeof *want);
        t->k->quant.nv_scale(m, sums, rows, columns, m % 2, got);
        t->ref->quant.nv_scale(m, sums, rows, columns, m % 2, want);
        kernel_near(t, "scaled sums", got, want, m * 32, 0);
    }
    t->aligned = true;
    float *sums = kernel_random(t, BENCH_M * 32), *rows = kernel_random(t, BENCH_M);
    KERNEL_BENCH(t, BENCH_M * 32, "elem",
                 t->k->quant.nv_scale(BENCH_M, sums, rows, rows, true, sums));
}

// Products of codes: sums in integers, so the same bits.
static void compare_nv_tile(kernel_test *t, size_t m, size_t kc) {
    const size_t blocks = dpl_div_up(kc, 16), size = m * blocks * 32;
    const uint8_t *codes[16], *scales[16];
    for (size_t i = 0; i < m; i++) {
        uint8_t *row = random_bytes(t, dpl_div_up(kc, 2), 255);
        if (kc % 2) row[kc / 2] &= 0xf;
        codes[i] = kernel_pick(t, 0, 9) ? row : NULL;
        scales[i] = random_bytes(t, blocks, kernel_pick(t, 0, 30) ? 0x7e : 0x7f);
    }
    const uint8_t *weight = random_bytes(t, blocks * 256, 255);
    const uint8_t *weight_scales = random_bytes(t, blocks * 2, kernel_pick(t, 0, 30) ? 0x7e : 0x7f);
    void *left = kernel_buffer(t, size), *want_left = kernel_buffer(t, size);
    float *got = kernel_random(t, m * 32), *want = kernel_floats(t, m * 32);
    memcpy(want, got, m * 32 * sizeof *want);
    t->k->nv.nv_pack(m, kc, codes, scales, left);
    t->k->nv.nv_tile(m, kc, left, weight, weight_scales, got, kc % 3 == 0);
    t->ref->nv.nv_pack(m, kc, codes, scales, want_left);
    t->ref->nv.nv_tile(m, kc, want_left, weight, weight_scales, want, kc % 3 == 0);
    for (size_t i = 0; i < m * 32; i++)
        if (isnan(got[i]) && isnan(want[i])) got[i] = want[i] = 0;
    kernel_same(t, "sums", got, want, m * 32 * sizeof *got);
}

static void check_nv_tile(kernel_test *t) {
    enum { BENCH_KC = 512 };
    if (!t->k->nv.nv_tile) return;
    for (size_t m = 1; m <= t->k->nv.mr; m++)
        for (size_t kc = 1; kc <= 130; kc += kernel_pick(t, 1, 9)) {
            compare_nv_tile(t, m, kc);
            kernel_done(t);
        }
    t->aligned = true;
    const size_t m = t->k->nv.mr;
    const uint8_t *codes[16], *scales[16];
    for (size_t i = 0; i < m; i++) {
        codes[i] = random_bytes(t, BENCH_KC / 2, 255);
        scales[i] = random_bytes(t, BENCH_KC / 16, 0x7e);
    }
    const uint8_t *weight = random_bytes(t, BENCH_KC * 16, 255);
    const uint8_t *weight_scales = random_bytes(t, BENCH_KC / 8, 0x7e);
    void *left = kernel_buffer(t, m * BENCH_KC * 2);
    float *c = kernel_floats(t, m * 32);
    t->k->nv.nv_pack(m, BENCH_KC, codes, scales, left);
    KERNEL_BENCH(t, 2e-9 * (double)m * BENCH_KC * 32 * 1e9, "flop",
                 t->k->nv.nv_tile(m, BENCH_KC, left, weight, weight_scales, c, false));
}

const kernel_entry kernel_quant_entries[] = {{"encode", check_encode},
                                             {"decode", check_decode},
                                             {"mx_rows", check_mx_rows},
                                             {"mx_columns", check_mx_columns},
                                             {"expand_pairs", check_expand_pairs},
                                             {"expand_columns", check_expand_columns},
                                             {"expand_row", check_expand_row},
                                             {"nv_rows", check_nv_rows},
                                             {"nv_rows_random", check_nv_rows_random},
                                             {"nv_columns", check_nv_columns},
                                             {"nv_weight", check_nv_weight},
                                             {"nv_expand_pairs", check_nv_expand_pairs},
                                             {"nv_expand_columns", check_nv_expand_columns},
                                             {"nv_expand_row", check_nv_expand_row},
                                             {"nv_scale", check_nv_scale},
                                             {"nv_tile", check_nv_tile},
                                             {NULL, NULL}};
