// kernels_ref_quant.c - quantization in plain C: the definitions of base/formats.c, one by one.
#include <math.h>

#include "cpu/kernels.h"

static void encode(dpl_code format, const float *x, uint8_t *codes, size_t n) {
    for (size_t i = 0; i < n; i++) codes[i] = dpl_f32_to_code(format, x[i]);
}

static void decode(dpl_code format, const uint8_t *codes, float *x, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] = dpl_code_to_f32(format, codes[i]);
}

static float element(dpl_dtype dtype, const void *x, size_t i) {
    return dtype == DPL_F32 ? ((const float *)x)[i] : dpl_bf16_to_f32(((const uint16_t *)x)[i]);
}

// NaN, if one of the two is.
static float larger(float amax, float x) {
    return isnan(amax) || fabsf(x) <= amax ? amax : fabsf(x);
}

// One block of n elements, `step` apart.
static void quantize_block(const dpl_mx_block *b, size_t first, size_t first_code, size_t n,
                           size_t step, size_t step_codes, uint8_t *scale_out) {
    float x[32], amax = 0;
    for (size_t i = 0; i < n; i++) {
        x[i] = element(b->dtype, b->x, first + i * step);
        amax = larger(amax, x[i]);
    }
    *scale_out = dpl_e8m0_scale(b->rule, b->format, amax);
    // The product is exact, but for what is far below the smallest code.
    const float inverse = *scale_out == 0xff ? NAN : ldexpf(1, 127 - *scale_out);
    for (size_t i = 0; i < n; i++)
        b->codes[first_code + i * step_codes] = dpl_f32_to_code(b->format, x[i] * inverse);
}

static void mx_rows(const dpl_mx_block *b) {
    for (size_t r = 0; r < b->m; r++)
        for (size_t c = 0; c < b->n; c += 32)
            quantize_block(b, r * b->ld + c, r * b->ld_codes + c, DPL_MIN(b->n - c, (size_t)32), 1,
                           1, b->scales + r * b->ld_scales + c / 32);
}

static void mx_columns(const dpl_mx_block *b) {
    for (size_t c = 0; c < b->n; c++)
        quantize_block(b, c, c, b->m, b->ld, b->ld_codes, b->scales + c);
}

static uint16_t expanded(dpl_code format, uint8_t code, uint8_t scale) {
    return dpl_f32_to_bf16(dpl_code_to_f32(format, code) * dpl_e8m0_to_f32(scale));
}

static void expand_pairs(dpl_code format, size_t n_blocks, const uint8_t *codes,
                         const uint8_t *scales, uint16_t *y, ptrdiff_t ahead) {
    (void)ahead;
    for (size_t i = 0; i < n_blocks * 1024; i++)
        y[i] = expanded(format, codes[i], scales[i / 1024 * 32 + i % 64 / 2]);
}

static void expand_columns(dpl_code format, size_t m, size_t n, const uint8_t *codes, size_t ld,
                           const uint8_t *scales, uint16_t *y, size_t ld_y) {
    for (size_t r = 0; r < m; r++)
        for (size_t c = 0; c < n; c++)
            y[r * ld_y + c] = expanded(format, codes[r * ld + c], scales[c]);
}

static void expand_row(dpl_code format, size_t n, const uint8_t *codes, const uint8_t *scales,
                       uint16_t *y) {
    for (size_t c = 0; c < n; c++) y[c] = expanded(format, codes[c], scales[c / 32]);
}

static float amax_of(dpl_dtype dtype, const void *x, size_t n) {
    float amax = 0;
    for (size_t i = 0; i < n; i++) amax = larger(amax, element(dtype, x, i));
    return amax;
}

static void nv_block(const dpl_nv_rows *b, size_t r, size_t first, size_t n) {
    const float tensor_scale = b->tensor_scale[r];
    float x[16], amax = 0;
    for (size_t i = 0; i < n; i++) {
        x[i] = element(b->dtype, b->x, r * b->ld + first + i);
        amax = larger(amax, x[i]);
    }
    const uint8_t scale = dpl_nv_block_scale(amax, tensor_scale);
    b->scales[r * b->ld_scales + first / 16] = scale;
    for (size_t i = 0; i < n; i++) {
        const float y = x[i] * tensor_scale / dpl_code_to_f32(DPL_E4M3, scale);
        const uint64_t at = b->first + r * b->ld_random + first + i, *random = b->seed_stream;
        uint8_t *byte = b->codes + r * b->ld_codes + (first + i) / 2;
        const uint8_t code = scale == 0 ? 0
                             : random
                                 ? dpl_f32_to_e2m1_random(y, dpl_rng_bits(random[0], random[1], at))
                                 : dpl_f32_to_code(DPL_E2M1, y);
        *byte = (uint8_t)(i % 2 ? *byte | code << 4 : code);
    }
}

static void nv_rows(const dpl_nv_rows *b) {
    for (size_t r = 0; r < b->m; r++)
        for (size_t c = 0; c < b->n; c += 16) nv_block(b, r, c, DPL_MIN(b->n - c, (size_t)16));
}

void dpl_kernels_ref_quant(dpl_kernels *k) {
    k->quant = (dpl_quant_kernels){encode,         decode,     mx_rows, mx_columns, expand_pairs,
                                   expand_columns, expand_row, amax_of, nv_rows};
}
