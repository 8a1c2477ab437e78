// kernels_ref_quant.c - quantization in plain C: the definitions of base/formats.c, one by one.
#include <math.h>

#include "cpu/kernels.h"

static void encode(dpl_code format, const float *x, uint8_t *codes, size_t n) {
    for (size_t i = 0; i < n; i++) codes[i] = dpl_f32_to_code(format, x[i]);
}

static void decode(dpl_code format, const uint8_t *codes, float *x, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] = dpl_code_to_f32(format, codes[i]);
}

// One block of n elements, `step` apart.
static void quantize_block(const dpl_mx_block *b, size_t first, size_t first_code, size_t n,
                           size_t step, size_t step_codes, uint8_t *scale_out) {
    float x[32], amax = 0;
    for (size_t i = 0; i < n; i++) {
        const size_t at = first + i * step;
        x[i] = b->dtype == DPL_F32 ? ((const float *)b->x)[at]
                                   : dpl_bf16_to_f32(((const uint16_t *)b->x)[at]);
        if (!(fabsf(x[i]) <= amax)) amax = isnan(amax) ? amax : fabsf(x[i]);
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

void dpl_kernels_ref_quant(dpl_kernels *k) {
    k->quant = (dpl_quant_kernels){encode, decode, mx_rows, mx_columns};
}
