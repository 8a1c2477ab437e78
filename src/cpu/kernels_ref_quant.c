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

// The code of a number in a block with this scale; random NULL: to nearest even.
static uint8_t nv_code(float x, float tensor_scale, uint8_t scale, const uint64_t *random,
                       uint64_t at) {
    const float y = x * tensor_scale / dpl_code_to_f32(DPL_E4M3, scale);
    if (scale == 0) return 0;
    if (!random) return dpl_f32_to_code(DPL_E2M1, y);
    return dpl_f32_to_e2m1_random(y, dpl_rng_bits(random[0], random[1], at));
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
        uint8_t *byte = b->codes + r * b->ld_codes + (first + i) / 2;
        const uint8_t code = nv_code(x[i], tensor_scale, scale, b->seed_stream,
                                     b->first + r * b->ld_random + first + i);
        *byte = (uint8_t)(i % 2 ? *byte | code << 4 : code);
    }
}

static void nv_rows(const dpl_nv_rows *b) {
    for (size_t r = 0; r < b->m; r++)
        for (size_t c = 0; c < b->n; c += 16) nv_block(b, r, c, DPL_MIN(b->n - c, (size_t)16));
}

// Rows of one column, times the Hadamard matrix / 4.
static void rotated(const dpl_nv_columns *b, size_t c, float x[16]) {
    for (size_t i = 0; i < 16; i++) {
        x[i] = i < b->m && b->rows[i] ? element(b->dtype, b->rows[i], c) : 0;
        if (b->signs >> i & 1) x[i] = -x[i];
    }
    for (size_t h = 1; h < 16; h *= 2)
        for (size_t i = 0; i < 16; i++) {
            if (i & h) continue;
            const float even = x[i], odd = x[i + h];
            x[i] = even + odd;
            x[i + h] = even - odd;
        }
    for (size_t i = 0; i < 16; i++) x[i] *= 0.25f;
}

static void nv_columns_amax(const dpl_nv_columns *b, float *amax) {
    for (size_t c = 0; c < b->n; c++) {
        float x[16];
        rotated(b, c, x);
        for (size_t i = 0; i < 16; i++) amax[c] = larger(amax[c], x[i]);
    }
}

static void nv_columns(const dpl_nv_columns *b) {
    for (size_t c = 0; c < b->n; c++) {
        float x[16], amax = 0;
        rotated(b, c, x);
        for (size_t i = 0; i < 16; i++) amax = larger(amax, x[i]);
        b->scales[c] = dpl_nv_block_scale(amax, b->tensor_scale[c]);
        for (size_t i = 0; i < 16; i += 2) {
            uint8_t two[2];
            for (size_t j = 0; j < 2; j++)
                two[j] = nv_code(x[i + j], b->tensor_scale[c], b->scales[c], b->seed_stream,
                                 b->first + (i + j) * b->ld_random + c);
            b->codes[i / 2 * b->ld_codes + c] = (uint8_t)(two[0] | two[1] << 4);
        }
    }
}

// Where the code of row k and column n of a block lies: its byte, and how far it is shifted.
static size_t weight_byte(size_t k, size_t n, int *shift_out) {
    const size_t pair = k / 2, word = pair / 4 * 32 + 2 * n + k % 2;
    *shift_out = (int)(pair % 2) * 4;
    return 2 * word + pair % 4 / 2;
}

static uint8_t nv_weight(const float *x, size_t ld, float tensor_scale, uint8_t *codes,
                         uint8_t *transposed) {
    float amax = 0;
    for (size_t i = 0; i < 256; i++) amax = larger(amax, x[i / 16 * ld + i % 16]);
    const uint8_t scale = dpl_nv_block_scale(amax, tensor_scale);
    memset(codes, 0, 128);
    memset(transposed, 0, 128);
    for (size_t k = 0; k < 16; k++)
        for (size_t n = 0; n < 16; n++) {
            const uint8_t code = nv_code(x[k * ld + n], tensor_scale, scale, NULL, 0);
            int shift;
            uint8_t *to = codes + weight_byte(k, n, &shift);
            *to = (uint8_t)(*to | code << shift);
            to = transposed + weight_byte(n, k, &shift);
            *to = (uint8_t)(*to | code << shift);
        }
    return scale;
}

static uint16_t nv_expanded(uint8_t code, uint8_t scale) {
    return dpl_f32_to_bf16(dpl_code_to_f32(DPL_E2M1, code) * dpl_code_to_f32(DPL_E4M3, scale));
}

static void nv_expand_pairs(size_t n_blocks, const uint8_t *codes, const uint8_t *scales,
                            uint16_t *y, ptrdiff_t ahead) {
    (void)ahead;
    for (size_t i = 0; i < n_blocks; i++, codes += 256, scales += 2)
        for (size_t k = 0; k < 16; k++)
            for (size_t n = 0; n < 32; n++) {
                int shift;
                const uint8_t byte = codes[n / 16 * 128 + weight_byte(k, n % 16, &shift)];
                y[((i * 8 + k / 2) * 32 + n) * 2 + k % 2] = nv_expanded(byte >> shift & 15,
                                                                        scales[n / 16]);
            }
}

static void nv_expand_columns(size_t n, const uint8_t *codes, size_t ld, const uint8_t *scales,
                              uint16_t *y, size_t ld_y) {
    for (size_t r = 0; r < 16; r++)
        for (size_t c = 0; c < n; c++)
            y[r * ld_y + c] = nv_expanded(codes[r / 2 * ld + c] >> r % 2 * 4 & 15, scales[c]);
}

static void nv_expand_row(size_t n, const uint8_t *codes, const uint8_t *scales, uint16_t *y) {
    for (size_t c = 0; c < n; c++)
        y[c] = nv_expanded(codes[c / 2] >> c % 2 * 4 & 15, scales[c / 16]);
}

static void nv_scale(size_t m, const float *sums, const float *rows, const float *columns, bool add,
                     float *y) {
    for (size_t i = 0; i < m * 32; i++) {
        const float x = sums[i] * rows[i / 32], by = columns[i % 32];
        y[i] = add ? fmaf(x, by, y[i]) : x * by;
    }
}

#define NV_MR 4

// For each block of 16: of m rows the scale, a quarter of it, and the numbers, twice of them.
static void nv_pack(size_t m, size_t kc, const uint8_t *const *codes, const uint8_t *const *scales,
                    void *dst) {
    for (size_t l = 0; l < kc; l += 16) {
        float *scale = (float *)dst + l / 16 * 5 * m;
        for (size_t i = 0; i < m; i++) {
            int8_t *x = (int8_t *)(scale + m) + 16 * i;
            scale[i] = codes[i] ? 0.25f * dpl_code_to_f32(DPL_E4M3, scales[i][l / 16]) : 0;
            for (size_t j = 0; j < 16; j++) {
                const bool there = codes[i] && l + j < kc;
                const int byte = there ? codes[i][(l + j) / 2] >> j % 2 * 4 : 0;
                x[j] = (int8_t)(2 * dpl_code_to_f32(DPL_E2M1, byte & 15));
            }
        }
    }
}

static void nv_tile(size_t m, size_t kc, const void *a, const uint8_t *codes, const uint8_t *scales,
                    float *c, bool add) {
    for (size_t i = 0; i < m; i++)
        for (size_t n = 0; n < 32; n++) {
            float sum = 0;
            for (size_t l = 0; l < kc; l += 16) {
                const float *scale = (const float *)a + l / 16 * 5 * m;
                const int8_t *x = (const int8_t *)(scale + m) + 16 * i;
                const uint8_t *block = codes + l / 16 * 256 + n / 16 * 128;
                int dot = 0, shift;
                for (size_t k = 0; k < 16; k++) {
                    const uint8_t byte = block[weight_byte(k, n % 16, &shift)];
                    dot += x[k] * (int)(2 * dpl_code_to_f32(DPL_E2M1, byte >> shift & 15));
                }
                const float by = dpl_code_to_f32(DPL_E4M3, scales[l / 16 * 2 + n / 16]);
                sum += (float)dot * (scale[i] * by);
            }
            c[i * 32 + n] = add ? sum + c[i * 32 + n] : sum;
        }
}

void dpl_kernels_ref_quant(dpl_kernels *k) {
    k->quant = (dpl_quant_kernels){
        encode,         decode,     mx_rows,         mx_columns,        expand_pairs,
        expand_columns, expand_row, amax_of,         nv_rows,           nv_columns_amax,
        nv_columns,     nv_weight,  nv_expand_pairs, nv_expand_columns, nv_expand_row,
        nv_scale};
    dpl_set_nv_gemm(k, "ref", NV_MR, nv_pack, nv_tile);
}
