// formats.c - 8- and 4-bit numbers and their scales, by definition: what the kernels must equal.
#include <float.h>
#include <math.h>

#include "base/base.h"

typedef struct code_format {
    int mantissa; // bits
    int bias;     // of the exponent
    uint8_t max;  // code of the largest finite value
} code_format;

static const code_format formats[DPL_CODE_N] = {
    [DPL_E4M3] = {3, 7, 0x7e}, [DPL_E5M2] = {2, 15, 0x7b}, [DPL_E2M1] = {1, 1, 0x7}};

static uint8_t sign_bit(dpl_code format) {
    return format == DPL_E2M1 ? 0x8 : 0x80;
}

float dpl_code_to_f32(dpl_code format, uint8_t code) {
    const code_format f = formats[format];
    const uint8_t sign = sign_bit(format), magnitude = code & (uint8_t)(sign - 1);
    const int exponent = magnitude >> f.mantissa, fraction = magnitude & ((1 << f.mantissa) - 1);
    float x = NAN;
    // A subnormal has the exponent of the smallest normal number, without its leading bit.
    if (magnitude <= f.max)
        x = ldexpf((float)(exponent ? fraction | 1 << f.mantissa : fraction),
                   DPL_MAX(exponent, 1) - f.bias - f.mantissa);
    else if (format == DPL_E5M2 && fraction == 0) x = INFINITY;
    return code & sign ? -x : x;
}

float dpl_code_max(dpl_code format) {
    return dpl_code_to_f32(format, formats[format].max);
}

uint8_t dpl_f32_to_code(dpl_code format, float x) {
    const code_format f = formats[format];
    if (isnan(x)) return format == DPL_E2M1 ? 0x7 : 0x7f;
    const uint8_t sign = signbit(x) ? sign_bit(format) : 0;
    const double a = fabs((double)x);
    if (a >= (double)dpl_code_max(format)) return sign | f.max;
    const int least = 1 - f.bias; // exponent of the smallest normal number
    const int exponent = a > 0 ? DPL_MAX(ilogb(a), least) : least;
    // The steps of this binade, of which rounding may reach the next one: its first code follows.
    const int steps = (int)nearbyint(ldexp(a, f.mantissa - exponent));
    return (uint8_t)(sign | (((exponent - least) << f.mantissa) + steps));
}

float dpl_e8m0_to_f32(uint8_t byte) {
    return byte == 0xff ? NAN : ldexpf(1, byte - 127);
}

// The exponent byte of a float, rounded up to the next power of two.
static uint8_t exponent_above(float q) {
    uint32_t bits;
    memcpy(&bits, &q, sizeof bits);
    const uint32_t exponent = bits >> 23, fraction = bits & 0x7fffff;
    if (exponent == 0) return fraction > 0x400000; // above 2^-127, which is 0
    return (uint8_t)(exponent + (fraction != 0 && exponent < 0xfe));
}

uint8_t dpl_e8m0_scale(dpl_scale_rule rule, dpl_code format, float amax) {
    if (isnan(amax)) return 0xff;
    if (isinf(amax)) return 0xfe;
    if (rule == DPL_SCALE_UP) return exponent_above(amax * (1 / dpl_code_max(format)));
    if (amax == 0) return 0;
    const int exponent = ilogbf(amax) - ilogbf(dpl_code_max(format)) + 127;
    return (uint8_t)DPL_MIN(DPL_MAX(exponent, 0), 254);
}

/* ---- NVFP4 ----------------------------------------------------------------------------------- */
float dpl_nv_tensor_scale(float amax) {
    const float scale = amax == 0 ? 1 : dpl_code_max(DPL_E4M3) * dpl_code_max(DPL_E2M1) / amax;
    return scale > FLT_MAX ? FLT_MAX : scale;
}

uint8_t dpl_nv_block_scale(float amax, float scale) {
    return dpl_f32_to_code(DPL_E4M3, amax / dpl_code_max(DPL_E2M1) * scale);
}

uint8_t dpl_f32_to_e2m1_random(float x, uint16_t bits) {
    if (isnan(x)) return 0x7;
    const uint8_t sign = signbit(x) ? 0x8 : 0;
    const float a = fminf(fabsf(x), dpl_code_max(DPL_E2M1));
    if (a < 1) return sign | (uint8_t)(a * 2 + (float)bits * 0x1p-16f); // steps of 1/2
    uint32_t u;
    memcpy(&u, &a, sizeof u);
    // 22 bits are cut off: as many random ones are added to them.
    return sign | (uint8_t)(((u + ((uint32_t)bits << 6)) >> 22) - (126 << 1));
}
