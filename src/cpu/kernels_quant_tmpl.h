// kernels_quant_tmpl.h - quantization to 8- and 4-bit floats in vectors of a level's width.
//
// Included by kernels_LEVEL.c after kernels_rows_tmpl.h, whose vectors these are.
#include "cpu/kernels.h"

typedef int32_t reg_i32 __attribute__((vector_size(REG_BYTES)));

#define INF_BITS 0x7f800000u

// Without it, gcc makes the constants of a loop anew in each round.
#ifdef __clang__
#define UNROLL_4 _Pragma("unroll 4")
#else
#define UNROLL_4 _Pragma("GCC unroll 4")
#endif

#if defined(__AVX512F__)
typedef __m512i line;
#else
typedef __m256i line;
#endif

INLINE reg all_lanes(float x) {
    return (reg)OP(set1_ps)(x);
}

// What a format is, as constants where the compiler knows the format.
INLINE int mantissa_bits(dpl_code f) {
    return f == DPL_E4M3 ? 3 : f == DPL_E5M2 ? 2 : 1;
}
INLINE int exponent_bias(dpl_code f) {
    return f == DPL_E4M3 ? 7 : f == DPL_E5M2 ? 15 : 1;
}
INLINE float largest(dpl_code f) {
    return f == DPL_E4M3 ? 448.0f : f == DPL_E5M2 ? 57344.0f : 6.0f;
}
// 2^e for exponents of normal numbers.
INLINE float power_of_two(int e) {
    return float_of((uint32_t)(e + 127) << 23);
}

INLINE reg_u32 either(reg_u32 mask, reg_u32 yes, reg_u32 no) {
    return (mask & yes) | (~mask & no);
}
// Of numbers below 2^31.
INLINE reg_u32 below(reg_u32 a, reg_u32 b) {
    return (reg_u32)((reg_i32)a < (reg_i32)b);
}
INLINE reg_u32 where_below(reg_u32 a, reg_u32 b, reg_u32 yes, reg_u32 no) {
#if defined(__AVX512F__)
    const __mmask16 is_below = _mm512_cmplt_epi32_mask((__m512i)a, (__m512i)b);
    return (reg_u32)_mm512_mask_blend_epi32(is_below, (__m512i)no, (__m512i)yes);
#else
    return either(below(a, b), yes, no);
#endif
}
INLINE reg_u32 least(reg_u32 a, reg_u32 b) {
    return (reg_u32)OP(min_epu32)((line)a, (line)b);
}
INLINE reg_u32 greatest(reg_u32 a, reg_u32 b) {
    return (reg_u32)OP(max_epu32)((line)a, (line)b);
}

INLINE reg_u32 magnitude(reg x) {
    return (reg_u32)x & 0x7fffffffu;
}

/* ---- codes ----------------------------------------------------------------------------------- */
// Of numbers that are not NaN. The last bit of a sum with a power of two, so much above a number's
// binade, is a step of the format there: the sum is rounded to steps.
INLINE reg_u32 codes_of(dpl_code f, reg x) {
    const int m = mantissa_bits(f), bias = exponent_bias(f);
    const reg_u32 a = least(magnitude(x), (reg_u32){0} + bits_of(largest(f)));
    const reg_u32 normal = greatest(a, (reg_u32){0} + bits_of(power_of_two(1 - bias)));
    const reg_u32 above = (normal & INF_BITS) + ((uint32_t)(23 - m) << 23);
    const reg_u32 steps = (reg_u32)((reg)a + (reg)above) - above;
    const reg_u32 binade = (above >> (23 - m)) - ((uint32_t)(127 + 1 - bias + 23 - m) << m);
    const reg_u32 sign = (reg_u32)x >> (f == DPL_E2M1 ? 28 : 24) & (f == DPL_E2M1 ? 0x8 : 0x80);
    return (steps + binade) | sign;
}

INLINE reg numbers_of(dpl_code f, reg_u32 code) {
    const int m = mantissa_bits(f), shift = 23 - m, bias = exponent_bias(f);
    const uint32_t sign = f == DPL_E2M1 ? 0x8 : 0x80;
    const reg_u32 a = code & (sign - 1);
    const reg_u32 normal = (a << shift) + ((uint32_t)(127 - bias) << 23);
    const reg steps = __builtin_convertvector((reg_i32)a, reg) * power_of_two(1 - bias - m);
    reg_u32 x = either(below(a, (reg_u32){0} + (1u << m)), (reg_u32)steps, normal);
    if (f == DPL_E4M3) x = either((reg_u32)(a == 0x7f), (reg_u32){0} + 0x7fc00000u, x);
    // Infinity, and NaNs, which become quiet.
    const reg_u32 quiet = (reg_u32)(a > 0x7c) & 0x400000u;
    if (f == DPL_E5M2)
        x = either((reg_u32)(a >= 0x7c), (a << shift & 0x7fffff) | quiet | INF_BITS, x);
    return (reg)(x | (code & sign) << (f == DPL_E2M1 ? 28 : 24));
}

// gcc takes lanes apart one by one to convert between bytes and 32 bits.
INLINE reg_u32 codes_at(const uint8_t *p) {
#if defined(__AVX512F__)
    return (reg_u32)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
#else
    return (reg_u32)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
#endif
}

// Of codes below 256.
INLINE void store_codes(uint8_t *to, reg_u32 codes) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i *)(void *)to, _mm512_cvtepi32_epi8((__m512i)codes));
#else
    const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128((line)codes),
                                            _mm256_extracti128_si256((line)codes, 1));
    _mm_storel_epi64((__m128i *)(void *)to, _mm_packus_epi16(halves, halves));
#endif
}

INLINE void encode_as(dpl_code f, const float *x, uint8_t *codes, size_t n) {
    const reg_u32 nan = (reg_u32){0} + (f == DPL_E2M1 ? 0x7 : 0x7f);
    for (size_t i = 0; i < n; i += REG) {
        const size_t some = DPL_MIN(n - i, (size_t)REG);
        float in[REG] = {0};
        uint8_t out[REG];
        memcpy(in, x + i, some * sizeof *in);
        const reg v = load(in);
        store_codes(out, either((reg_u32)(v != v), nan, codes_of(f, v)));
        memcpy(codes + i, out, some);
    }
}

INLINE void decode_as(dpl_code f, const uint8_t *codes, float *x, size_t n) {
    for (size_t i = 0; i < n; i += REG) {
        const size_t some = DPL_MIN(n - i, (size_t)REG);
        uint8_t bytes[REG] = {0};
        memcpy(bytes, codes + i, some);
        const reg v = numbers_of(f, codes_at(bytes));
        memcpy(x + i, &v, some * sizeof *x);
    }
}

static void quant_encode(dpl_code format, const float *x, uint8_t *codes, size_t n) {
    if (format == DPL_E4M3) encode_as(DPL_E4M3, x, codes, n);
    else if (format == DPL_E5M2) encode_as(DPL_E5M2, x, codes, n);
    else encode_as(DPL_E2M1, x, codes, n);
}

static void quant_decode(dpl_code format, const uint8_t *codes, float *x, size_t n) {
    if (format == DPL_E4M3) decode_as(DPL_E4M3, codes, x, n);
    else if (format == DPL_E5M2) decode_as(DPL_E5M2, codes, x, n);
    else decode_as(DPL_E2M1, codes, x, n);
}

/* ---- MXFP8 ----------------------------------------------------------------------------------- */
// The scale bytes of blocks with these largest magnitudes, as bits.
INLINE reg_u32 scales_of(dpl_scale_rule rule, dpl_code f, reg_u32 amax) {
    if (rule == DPL_SCALE_FLOOR) {
        const reg_u32 most = (reg_u32){0} + ((bits_of(largest(f)) >> 23) - 127);
        const reg_u32 byte = greatest(amax >> 23, most) - most;
        const reg_u32 inf = (reg_u32)(amax == INF_BITS) & 0xfe;
        return either(below(amax, (reg_u32){0} + INF_BITS), byte,
                      either(inf != 0, inf, inf + 0xff));
    }
    const reg_u32 q = (reg_u32)((reg)amax * (1 / largest(f)));
    const reg_u32 exponent = q >> 23, least_up = (reg_u32)(exponent == 0) & 0x400000;
    const reg_u32 up = (reg_u32)((q & 0x7fffff) > least_up) & below(exponent, (reg_u32){0} + 0xfe);
    return exponent - up + (reg_u32)(q == INF_BITS); // a mask is -1
}

// 2^(127 - byte) of bytes that are not 0xff.
INLINE reg inverse_of(reg_u32 byte) {
    const reg_u32 smallest = (reg_u32){0} + 0x400000;
    return (reg)greatest((254 - byte) << 23, smallest);
}

// One maximum of each register, in order.
#if REG == 16
#define EVENS 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODDS  1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#else
#define EVENS 0, 2, 4, 6, 8, 10, 12, 14
#define ODDS  1, 3, 5, 7, 9, 11, 13, 15
#endif
INLINE reg_u32 maxima_across(reg_u32 r[REG]) {
    UNROLL for (int n = REG / 2; n > 0; n /= 2) UNROLL for (int i = 0; i < n; i++)
        r[i] = greatest(__builtin_shufflevector(r[2 * i], r[2 * i + 1], EVENS),
                        __builtin_shufflevector(r[2 * i], r[2 * i + 1], ODDS));
    return r[0];
}

#if defined(__AVX512BW__)
// In words: 32 numbers at a time, whether bf16 or fp32.
#define WORDS(w) _mm512_set1_epi16((short)(w))
typedef uint16_t word_lanes __attribute__((vector_size(64)));

INLINE __m512i bits_at(const void *p) {
    return _mm512_loadu_si512(p);
}

// The upper halves of both.
INLINE __m512i odd_words(__m512i low, __m512i high) {
    const __m512i odds = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37,
                                          35, 33, 31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7,
                                          5, 3, 1);
    return _mm512_permutex2var_epi16(low, odds, high);
}

// The upper half of each, whose last bit is set too where the lower half is not 0: so much decides
// how it is rounded.
INLINE __m512i upper_halves(__m512i low, __m512i high) {
    const __m512i lower = _mm512_set1_epi32(0xffff), carry = _mm512_set1_epi32(0x10000);
    __m512i u[2] = {low, high};
    for (int h = 0; h < 2; h++) {
        const __m512i carried = _mm512_add_epi32(_mm512_and_si512(u[h], lower), lower);
        u[h] = _mm512_ternarylogic_epi32(u[h], carried, carry, 0xf8); // a | (b & c)
    }
    return odd_words(u[0], u[1]);
}

INLINE __m512i upper_words(dpl_dtype dtype, const void *x, size_t i) {
    if (dtype == DPL_BF16) return bits_at((const uint16_t *)x + i);
    return upper_halves(bits_at((const float *)x + i), bits_at((const float *)x + i + 16));
}

// Scales from which on no subnormal of bf16 comes to anything, and before those of infinities.
INLINE bool in_words(uint32_t scale) {
    return scale >= 32 && scale < 0xfe;
}

// What the exponents of a block's elements are less by, in its codes.
INLINE int exponent_less(dpl_code f, uint32_t scale) {
    return ((int)scale - exponent_bias(f)) * 128;
}

INLINE __m256i signed_codes(__m512i code, __m512i x) {
    const __m512i sign = _mm512_srli_epi16(x, 8);
    return _mm512_cvtepi16_epi8(_mm512_ternarylogic_epi32(code, sign, WORDS(0x80), 0xf8));
}

// Where some are below the normal codes: each binade there loses a bit more than the `shift` of
// the others, and its leading bit has to be written out.
static __attribute__((noinline)) __m256i small_codes(__m512i x, __m512i t, int shift) {
    const __m512i written = _mm512_ternarylogic_epi32(x, WORDS(127), WORDS(128), 0xea); // a & b | c
    const __m512i steps = _mm512_mask_blend_epi16(_mm512_cmplt_epi16_mask(t, WORDS(128)), t,
                                                  written);
    const __m512i lost = _mm512_srli_epi16(
        _mm512_max_epi16(_mm512_sub_epi16(WORDS(255), t), _mm512_setzero_si512()), 7);
    const __m512i by = _mm512_add_epi16(lost, WORDS(shift));
    const __m512i half = _mm512_sllv_epi16(WORDS(1 << (shift - 1)), lost);
    const __m512i odd = _mm512_and_si512(_mm512_srlv_epi16(steps, by), WORDS(1));
    const __m512i up = _mm512_add_epi16(half, _mm512_add_epi16(odd, WORDS(-1)));
    return signed_codes(_mm512_srlv_epi16(_mm512_add_epi16(steps, up), by), x);
}

// Codes of words, `less` their exponents.
INLINE __m256i word_codes(dpl_code f, dpl_scale_rule rule, __m512i x, __m512i less) {
    const int shift = 7 - mantissa_bits(f);
    __m512i t = _mm512_sub_epi16(_mm512_and_si512(x, WORDS(0x7fff)), less);
    if (rule == DPL_SCALE_FLOOR)
        t = _mm512_min_epi16(t, WORDS((f == DPL_E4M3 ? 0x7e : 0x7b) << shift));
    if (__builtin_expect(_mm512_cmplt_epi16_mask(t, WORDS(128)) != 0, 0))
        return small_codes(x, t, shift);
    const __m512i odd = _mm512_and_si512((__m512i)((word_lanes)t >> shift), WORDS(1));
    const __m512i up = _mm512_add_epi16(t, _mm512_add_epi16(odd, WORDS((1 << (shift - 1)) - 1)));
    return signed_codes((__m512i)((word_lanes)up >> shift), x);
}
#endif

// A block's 32 codes.
INLINE void block_codes(dpl_code f, dpl_scale_rule rule, dpl_dtype dtype, const void *x, size_t at,
                        uint32_t scale, float inverse, uint8_t *codes) {
    (void)rule; // codes_of() always saturates
#if defined(__AVX512BW__)
    if (__builtin_expect(in_words(scale), 1)) {
        const __m512i less = WORDS(exponent_less(f, scale));
        _mm256_storeu_si256((__m256i *)(void *)codes,
                            word_codes(f, rule, upper_words(dtype, x, at), less));
        return;
    }
#endif
    for (size_t j = 0; j < 32; j += REG)
        store_codes(codes + j, codes_of(f, load_any(dtype, x, at + j) * inverse));
    if (scale == 0xff) memset(codes, 0x7f, 32);
}

// The largest magnitudes of a block, as bits; of bf16, the lower halves are anything.
INLINE reg_u32 block_maxima(dpl_dtype dtype, size_t length, const void *x, size_t at) {
#if defined(__AVX512BW__)
    if (dtype == DPL_BF16 && length == 32) {
        const __m512i a = _mm512_and_si512(upper_words(dtype, x, at), WORDS(0x7fff));
        return (reg_u32)_mm512_max_epu32(a, _mm512_slli_epi32(a, 16));
    }
#endif
    reg_u32 amax = {0};
    for (size_t j = 0; j < length; j += REG)
        amax = greatest(amax, magnitude(load_any(dtype, x, at + j)));
    return amax;
}

// One of each of up to REG blocks that follow each other; of those that are not there 0.
INLINE reg_u32 run_maxima(dpl_dtype dtype, size_t length, size_t n_blocks, const void *x,
                          size_t at) {
    reg_u32 amax[REG];
    if (n_blocks == REG) {
        UNROLL for (size_t i = 0; i < REG; i++)
            amax[i] = block_maxima(dtype, length, x, at + length * i);
        return maxima_across(amax);
    }
    for (size_t i = 0; i < REG; i++)
        amax[i] = i < n_blocks ? block_maxima(dtype, length, x, at + length * i) : (reg_u32){0};
    return maxima_across(amax);
}

// Up to REG whole blocks that follow each other.
INLINE void mx_run(dpl_code f, dpl_scale_rule rule, dpl_dtype dtype, size_t n_blocks, const void *x,
                   size_t at, uint8_t *codes, uint8_t *scales) {
    reg_u32 most = run_maxima(dtype, 32, n_blocks, x, at);
    if (dtype == DPL_BF16) most &= 0xffff0000u;
    const reg_u32 byte = scales_of(rule, f, most);
    uint8_t bytes[REG];
    float inverse[REG];
    store_codes(bytes, byte);
    store(inverse, inverse_of(byte));
    memcpy(scales, bytes, n_blocks);
    for (size_t i = 0; i < n_blocks; i++)
        block_codes(f, rule, dtype, x, at + 32 * i, bytes[i], inverse[i], codes + 32 * i);
}

INLINE void mx_rows_as(dpl_code f, dpl_scale_rule rule, dpl_dtype dtype, const dpl_mx_block *b) {
    size_t whole = b->n / 32, m = b->m;
    const size_t rest = b->n % 32, size = dpl_dtype_bytes(dtype);
    // Rows that follow each other without a gap are one.
    if (rest == 0 && b->ld == b->n && b->ld_codes == b->n && b->ld_scales == whole && m > 0)
        whole *= m, m = 1;
    for (size_t r = 0; r < m; r++) {
        uint8_t *codes = b->codes + r * b->ld_codes, *scales = b->scales + r * b->ld_scales;
        for (size_t i = 0; i < whole; i += REG)
            mx_run(f, rule, dtype, DPL_MIN(whole - i, (size_t)REG), b->x, r * b->ld + 32 * i,
                   codes + 32 * i, scales + i);
        if (rest == 0) continue;
        float last[32] = {0}; // of either type
        uint8_t last_codes[32];
        memcpy(last, (const uint8_t *)b->x + (r * b->ld + 32 * whole) * size, rest * size);
        mx_run(f, rule, dtype, 1, last, 0, last_codes, scales + whole);
        memcpy(codes + 32 * whole, last_codes, rest);
    }
}

#define STRIP     64 // columns that go together: their codes fill a line
#define PER_STRIP (STRIP / REG)

// Codes of `m` rows of a strip whose scales are known.
INLINE void strip_codes(dpl_code f, dpl_scale_rule rule, dpl_dtype dtype, size_t m, const void *x,
                        size_t ld, const reg_u32 *scale, uint8_t *codes, size_t ld_codes) {
    (void)rule;
#if defined(__AVX512BW__)
    const reg_u32 lowest = least(least(scale[0], scale[1]), least(scale[2], scale[3]));
    const reg_u32 highest = greatest(greatest(scale[0], scale[1]), greatest(scale[2], scale[3]));
    if (_mm512_reduce_min_epu32((__m512i)lowest) >= 32 &&
        _mm512_reduce_max_epu32((__m512i)highest) < 0xfe) {
        __m512i less[2];
        for (int h = 0; h < 2; h++) {
            const __m256i a = _mm512_cvtepi32_epi16((__m512i)scale[2 * h]);
            const __m256i b = _mm512_cvtepi32_epi16((__m512i)scale[2 * h + 1]);
            less[h] = _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
            less[h] = _mm512_slli_epi16(_mm512_sub_epi16(less[h], WORDS(exponent_bias(f))), 7);
        }
        for (size_t r = 0; r < m; r++, codes += ld_codes)
            for (int h = 0; h < 2; h++) {
                const __m512i words = upper_words(dtype, x, r * ld + 32 * (size_t)h);
                _mm256_storeu_si256((__m256i *)(void *)(codes + 32 * h),
                                    word_codes(f, rule, words, less[h]));
            }
        return;
    }
#endif
    for (size_t r = 0; r < m; r++, codes += ld_codes)
        for (size_t j = 0; j < PER_STRIP; j++) {
            const reg y = load_any(dtype, x, r * ld + j * REG) * inverse_of(scale[j]);
            const reg_u32 nan = (reg_u32)(scale[j] == 0xff);
            store_codes(codes + j * REG, either(nan, (reg_u32){0} + 0x7f, codes_of(f, y)));
        }
}

INLINE void mx_strip(dpl_code f, dpl_scale_rule rule, dpl_dtype dtype, size_t m, const void *x,
                     size_t ld, uint8_t *codes, size_t ld_codes, uint8_t *scales) {
    reg_u32 amax[PER_STRIP] = {0}, scale[PER_STRIP];
    for (size_t r = 0; r < m; r++)
        for (size_t j = 0; j < PER_STRIP; j++)
            amax[j] = greatest(amax[j], magnitude(load_any(dtype, x, r * ld + j * REG)));
    for (size_t j = 0; j < PER_STRIP; j++) {
        scale[j] = scales_of(rule, f, amax[j]);
        store_codes(scales + j * REG, scale[j]);
    }
    strip_codes(f, rule, dtype, m, x, ld, scale, codes, ld_codes);
}

// Many columns go row by row, as memory likes it: first the largest magnitudes, then codes.
#define MX_WIDE 2048

typedef struct wide_block {
    uint32_t amax[MX_WIDE]; // bits
#if defined(__AVX512BW__)
    int16_t less[MX_WIDE];
#else
    float inverse[MX_WIDE];
#endif
} wide_block;

// n: whole STRIPs up to MX_WIDE.
INLINE void wide_maxima(dpl_dtype dtype, size_t m, size_t n, const void *x, size_t ld,
                        wide_block *w) {
    memset(w->amax, 0, n * sizeof *w->amax);
    for (size_t r = 0; r < m; r++)
        for (size_t c = 0; c < n; c += REG) {
            reg_u32 amax;
            memcpy(&amax, w->amax + c, sizeof amax);
            amax = greatest(amax, magnitude(load_any(dtype, x, r * ld + c)));
            memcpy(w->amax + c, &amax, sizeof amax);
        }
}

// Whether all of the scales are of usual size, and nothing is NaN.
INLINE bool wide_scales(dpl_code f, dpl_scale_rule rule, size_t n, wide_block *w, uint8_t *scales) {
    reg_u32 lowest = (reg_u32){0} + 0xff, highest = {0};
    for (size_t c = 0; c < n; c += REG) {
        reg_u32 amax;
        memcpy(&amax, w->amax + c, sizeof amax);
        const reg_u32 scale = scales_of(rule, f, amax);
        lowest = least(lowest, scale), highest = greatest(highest, scale);
        store_codes(scales + c, scale);
#if defined(__AVX512BW__)
        const __m512i less = _mm512_slli_epi32((__m512i)(scale - (uint32_t)exponent_bias(f)), 7);
        _mm256_storeu_si256((__m256i *)(void *)(w->less + c), _mm512_cvtepi32_epi16(less));
#else
        store(w->inverse + c, inverse_of(scale));
#endif
    }
    uint32_t low[REG], high[REG];
    bool usual = true;
    memcpy(low, &lowest, sizeof low);
    memcpy(high, &highest, sizeof high);
    for (size_t j = 0; j < REG; j++) usual &= low[j] >= 32 && high[j] < 0xfe;
    return usual;
}

INLINE void wide_codes(dpl_code f, dpl_scale_rule rule, dpl_dtype dtype, size_t m, size_t n,
                       const void *x, size_t ld, const wide_block *w, uint8_t *codes,
                       size_t ld_codes, size_t ahead) {
    (void)rule;
    for (size_t r = 0; r < m; r++, codes += ld_codes) {
        const uint8_t *next = (const uint8_t *)x + r * ld * dpl_dtype_bytes(dtype) + ahead;
        (void)next;
#if defined(__AVX512BW__)
        for (size_t c = 0; c < n; c += 32) {
            for (size_t at = 0; at < 32 * dpl_dtype_bytes(dtype); at += 64)
                __builtin_prefetch(next + c * dpl_dtype_bytes(dtype) + at, 0, 2);
            _mm256_storeu_si256(
                (__m256i *)(void *)(codes + c),
                word_codes(f, rule, upper_words(dtype, x, r * ld + c), bits_at(w->less + c)));
        }
#else
        for (size_t c = 0; c < n; c += REG)
            store_codes(codes + c,
                        codes_of(f, load_any(dtype, x, r * ld + c) * load(w->inverse + c)));
#endif
    }
}

INLINE void mx_columns_as(dpl_code f, dpl_scale_rule rule, dpl_dtype dtype, const dpl_mx_block *b) {
    const size_t size = dpl_dtype_bytes(dtype), end = b->n / STRIP * STRIP;
    wide_block w;
    for (size_t c = 0, n; c < end; c += n) {
        const uint8_t *x = (const uint8_t *)b->x + c * size;
        uint8_t *codes = b->codes + c, *scales = b->scales + c;
        n = DPL_MIN(end - c, (size_t)MX_WIDE);
        wide_maxima(dtype, b->m, n, x, b->ld, &w);
        if (__builtin_expect(wide_scales(f, rule, n, &w, scales), 1))
            wide_codes(f, rule, dtype, b->m, n, x, b->ld, &w, codes, b->ld_codes, b->ahead);
        else
            for (size_t i = 0; i < n; i += STRIP)
                mx_strip(f, rule, dtype, b->m, x + i * size, b->ld, codes + i, b->ld_codes,
                         scales + i);
    }
    const size_t n = b->n - end;
    if (n == 0) return;
    float x[32 * STRIP] = {0}; // of either type
    uint8_t codes[32 * STRIP], scales[STRIP];
    for (size_t r = 0; r < b->m; r++)
        memcpy((uint8_t *)x + r * STRIP * size, (const uint8_t *)b->x + (r * b->ld + end) * size,
               n * size);
    mx_strip(f, rule, dtype, b->m, x, STRIP, codes, STRIP, scales);
    for (size_t r = 0; r < b->m; r++)
        memcpy(b->codes + r * b->ld_codes + end, codes + r * STRIP, n);
    memcpy(b->scales + end, scales, n);
}

// A copy for each kind, so that the loops do not ask.
#define MX_OF(as, f, rule, b)                               \
    do {                                                    \
        if ((b)->dtype == DPL_F32) as(f, rule, DPL_F32, b); \
        else as(f, rule, DPL_BF16, b);                      \
    } while (0)
#define MX_KERNEL(name, as)                                                      \
    static void name(const dpl_mx_block *b) {                                    \
        const bool up = b->rule == DPL_SCALE_UP;                                 \
        if (b->format == DPL_E4M3 && up) MX_OF(as, DPL_E4M3, DPL_SCALE_UP, b);   \
        else if (b->format == DPL_E4M3) MX_OF(as, DPL_E4M3, DPL_SCALE_FLOOR, b); \
        else if (up) MX_OF(as, DPL_E5M2, DPL_SCALE_UP, b);                       \
        else MX_OF(as, DPL_E5M2, DPL_SCALE_FLOOR, b);                            \
    }
MX_KERNEL(quant_mx_rows, mx_rows_as)
MX_KERNEL(quant_mx_columns, mx_columns_as)

/* ---- MXFP8 as bf16 --------------------------------------------------------------------------- */
// A line: as many codes as a register has bytes. Their numbers fill two registers of words.
#define LINE_CODES REG_BYTES
typedef int16_t words __attribute__((vector_size(REG_BYTES)));

#if defined(__AVX512F__)
#define EIGHTS_APART(x)      _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), x)
#define ANY_WITHOUT(x, bits) (_mm512_testn_epi8_mask(x, _mm512_set1_epi8(bits)) != 0)
#else
#define EIGHTS_APART(x) _mm256_permute4x64_epi64(x, 0xd8)
#define ANY_WITHOUT(x, bits)                                                             \
    (_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_and_si256(x, _mm256_set1_epi8(bits)), \
                                            _mm256_setzero_si256())) != 0)
#endif

INLINE line line_at(const uint8_t *p) {
    line x;
    memcpy(&x, p, sizeof x);
    return x;
}

// What the exponents of a line are more by than in its codes; whether each of its numbers is a
// normal one of bf16, or 0.
typedef struct exponents {
    words more[2];
    bool usual;
} exponents;

INLINE exponents exponents_of(dpl_code f, words scale0, words scale1) {
    exponents e;
    const words least_usual = (words){0} + 32, most_usual = (words){0} + 222;
    const words out = (scale0 < least_usual) | (scale0 > most_usual) | (scale1 < least_usual) |
                      (scale1 > most_usual);
    e.more[0] = (scale0 - (int16_t)exponent_bias(f)) << 7;
    e.more[1] = (scale1 - (int16_t)exponent_bias(f)) << 7;
    line any;
    memcpy(&any, &out, sizeof any);
#if defined(__AVX512F__)
    e.usual = _mm512_test_epi32_mask(any, any) == 0;
#else
    e.usual = _mm256_testz_si256(any, any);
#endif
    return e;
}

// Any codes and exponents.
static __attribute__((noinline)) void expand_any(dpl_code f, line codes, const exponents *e,
                                                 uint16_t *y) {
    uint8_t code[LINE_CODES];
    int16_t more[LINE_CODES];
    memcpy(code, &codes, sizeof code);
    memcpy(more, e->more, sizeof more);
    for (size_t j = 0; j < LINE_CODES; j++)
        y[j] = dpl_f32_to_bf16(dpl_code_to_f32(f, code[j]) *
                               dpl_e8m0_to_f32((uint8_t)((more[j] >> 7) + exponent_bias(f))));
}

// What a subnormal code is worth in steps of the normal ones, as if those went on below.
INLINE __m128i small_steps(dpl_code f) {
    const __m128i e4m3 = _mm_setr_epi8(0, -16, -8, -4, 0, 2, 4, 6, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m128i e5m2 = _mm_setr_epi8(0, -4, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    return f == DPL_E4M3 ? e4m3 : e5m2;
}

// With subnormal codes and zeros.
#if defined(__AVX512BW__)
static __attribute__((noinline)) void expand_small(dpl_code f, line codes, const exponents *e,
                                                   uint16_t *y) {
    const int m = mantissa_bits(f), shift = 7 - m;
    const __m512i a = _mm512_and_si512(codes, _mm512_set1_epi8(0x7f));
    const __mmask64 small = _mm512_cmplt_epi8_mask(a, _mm512_set1_epi8((char)(1 << m)));
    const __mmask64 some = _mm512_test_epi8_mask(a, a);
    const __m512i of_small = _mm512_broadcast_i32x4(small_steps(f));
    const __m512i steps = _mm512_mask_shuffle_epi8(a, small, of_small, a);
    for (int h = 0; h < 2; h++) {
        const __m256i s = h ? _mm512_extracti64x4_epi64(steps, 1) : _mm512_castsi512_si256(steps);
        const __m256i c = h ? _mm512_extracti64x4_epi64(codes, 1) : _mm512_castsi512_si256(codes);
        const __m512i scaled = (__m512i)((word_lanes)_mm512_cvtepi8_epi16(s) << shift);
        const __m512i number = _mm512_maskz_add_epi16((__mmask32)(some >> 32 * h), scaled,
                                                      (__m512i)e->more[h]);
        _mm512_storeu_si512(y + 32 * h, _mm512_ternarylogic_epi32(number, _mm512_cvtepi8_epi16(c),
                                                                  WORDS(0x8000), 0xf8));
    }
}
#else
INLINE words wide_half(line x, int h) {
    return (words)_mm256_cvtepi8_epi16(h ? _mm256_extracti128_si256(x, 1)
                                         : _mm256_castsi256_si128(x));
}

static __attribute__((noinline)) void expand_small(dpl_code f, line codes, const exponents *e,
                                                   uint16_t *y) {
    const int m = mantissa_bits(f), shift = 7 - m;
    const line a = _mm256_and_si256(codes, _mm256_set1_epi8(0x7f));
    const line small = _mm256_cmpgt_epi8(_mm256_set1_epi8((char)(1 << m)), a);
    const line some = _mm256_cmpgt_epi8(a, _mm256_setzero_si256());
    const line of_small = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(small_steps(f)), a);
    const line steps = _mm256_blendv_epi8(a, of_small, small);
    for (int h = 0; h < 2; h++) {
        const words number = ((wide_half(steps, h) << shift) + e->more[h]) & wide_half(some, h);
        const words with_sign = number | (wide_half(codes, h) & (int16_t)0x8000);
        memcpy(y + 16 * h, &with_sign, sizeof with_sign);
    }
}
#endif

// A code shifted to the place of bf16's exponent and mantissa, with its sign above, is the number
// but for its exponent's bias.
INLINE void expand_halves(dpl_code f, line codes, const exponents *e, uint16_t *y[2]) {
    uint16_t both[LINE_CODES];
    if (__builtin_expect(!e->usual, 0)) {
        expand_any(f, codes, e, both);
        for (int h = 0; h < 2; h++) memcpy(y[h], both + LINE_CODES / 2 * h, LINE_CODES);
    } else if (__builtin_expect(ANY_WITHOUT(codes, f == DPL_E4M3 ? 0x78 : 0x7c), 0)) {
        expand_small(f, codes, e, both);
        for (int h = 0; h < 2; h++) memcpy(y[h], both + LINE_CODES / 2 * h, LINE_CODES);
    } else {
        const line apart = EIGHTS_APART(codes), zero = (line){0};
        const words high[2] = {(words)OP(unpacklo_epi8)(zero, apart),
                               (words)OP(unpackhi_epi8)(zero, apart)};
        for (int h = 0; h < 2; h++) {
            const int shift = f == DPL_E4M3 ? 4 : 3, kept = f == DPL_E4M3 ? 0x87ff : 0x8fff;
            const words number = ((high[h] >> shift) & (int16_t)kept) + e->more[h];
            memcpy(y[h], &number, sizeof number);
        }
    }
}

INLINE void expand_line(dpl_code f, line codes, const exponents *e, uint16_t *y) {
    uint16_t *halves[2] = {y, y + LINE_CODES / 2};
    expand_halves(f, codes, e, halves);
}

// n < LINE_CODES.
INLINE void expand_few(dpl_code f, size_t n, const uint8_t *codes, const exponents *e,
                       uint16_t *y) {
    uint8_t in[LINE_CODES];
    uint16_t out[LINE_CODES];
    memset(in, 1 << mantissa_bits(f), sizeof in); // not small
    memcpy(in, codes, n);
    expand_line(f, line_at(in), e, out);
    memcpy(y, out, n * sizeof *y);
}

INLINE words words_of(const uint8_t *bytes) {
    typedef uint8_t half_line __attribute__((vector_size(LINE_CODES / 2)));
    half_line b;
    memcpy(&b, bytes, sizeof b);
    return __builtin_convertvector(b, words);
}

INLINE void expand_pairs_as(dpl_code f, size_t n_blocks, const uint8_t *codes,
                            const uint8_t *scales, uint16_t *y, ptrdiff_t ahead) {
    for (size_t i = 0; i < n_blocks; i++, scales += 32) {
        uint8_t twice[64];
        for (int j = 0; j < 32; j++) twice[2 * j] = twice[2 * j + 1] = scales[j];
        exponents e[64 / LINE_CODES];
        for (size_t j = 0; j < DPL_COUNT(e); j++)
            e[j] = exponents_of(f, words_of(twice + j * LINE_CODES),
                                words_of(twice + j * LINE_CODES + LINE_CODES / 2));
        for (size_t l = 0; l < 16; l++) {
            __builtin_prefetch(codes + ahead, 0, 2);
            for (size_t j = 0; j < DPL_COUNT(e); j++, codes += LINE_CODES, y += LINE_CODES)
                expand_line(f, line_at(codes), &e[j], y);
        }
    }
}

// Half as many columns as a line has: two rows at a time.
INLINE void expand_half_columns(dpl_code f, size_t m, const uint8_t *codes, size_t ld,
                                const uint8_t *scales, uint16_t *y, size_t ld_y) {
    const exponents e = exponents_of(f, words_of(scales), words_of(scales));
    uint16_t unused[LINE_CODES / 2];
    for (size_t r = 0; r < m; r += 2) {
        const size_t second = r + 1 < m ? r + 1 : r;
        uint8_t two[LINE_CODES];
        memcpy(two, codes + r * ld, LINE_CODES / 2);
        memcpy(two + LINE_CODES / 2, codes + second * ld, LINE_CODES / 2);
        uint16_t *halves[2] = {y + r * ld_y, second > r ? y + second * ld_y : unused};
        expand_halves(f, line_at(two), &e, halves);
    }
}

INLINE void expand_columns_as(dpl_code f, size_t m, size_t n, const uint8_t *codes, size_t ld,
                              const uint8_t *scales, uint16_t *y, size_t ld_y) {
    for (size_t c = 0; c < n; c += LINE_CODES) {
        const size_t some = DPL_MIN(n - c, (size_t)LINE_CODES);
        uint8_t scale[LINE_CODES];
        memset(scale, 127, sizeof scale);
        memcpy(scale, scales + c, some);
        if (2 * some == LINE_CODES) {
            expand_half_columns(f, m, codes + c, ld, scale, y + c, ld_y);
            break;
        }
        const exponents e = exponents_of(f, words_of(scale), words_of(scale + LINE_CODES / 2));
        for (size_t r = 0; r < m; r++)
            if (some == LINE_CODES)
                expand_line(f, line_at(codes + r * ld + c), &e, y + r * ld_y + c);
            else expand_few(f, some, codes + r * ld + c, &e, y + r * ld_y + c);
    }
}

INLINE void expand_row_as(dpl_code f, size_t n, const uint8_t *codes, const uint8_t *scales,
                          uint16_t *y) {
    for (size_t c = 0; c < n; c += LINE_CODES) {
        const int16_t s0 = scales[c / 32], s1 = c + 32 < n ? scales[(c + LINE_CODES / 2) / 32] : s0;
        const exponents e = exponents_of(f, (words){0} + s0, (words){0} + s1);
        if (n - c >= LINE_CODES) expand_line(f, line_at(codes + c), &e, y + c);
        else expand_few(f, n - c, codes + c, &e, y + c);
    }
}

static void quant_expand_pairs(dpl_code f, size_t n_blocks, const uint8_t *codes,
                               const uint8_t *scales, uint16_t *y, ptrdiff_t ahead) {
    if (f == DPL_E4M3) expand_pairs_as(DPL_E4M3, n_blocks, codes, scales, y, ahead);
    else expand_pairs_as(DPL_E5M2, n_blocks, codes, scales, y, ahead);
}

static void quant_expand_columns(dpl_code f, size_t m, size_t n, const uint8_t *codes, size_t ld,
                                 const uint8_t *scales, uint16_t *y, size_t ld_y) {
    if (f == DPL_E4M3) expand_columns_as(DPL_E4M3, m, n, codes, ld, scales, y, ld_y);
    else expand_columns_as(DPL_E5M2, m, n, codes, ld, scales, y, ld_y);
}

static void quant_expand_row(dpl_code f, size_t n, const uint8_t *codes, const uint8_t *scales,
                             uint16_t *y) {
    if (f == DPL_E4M3) expand_row_as(DPL_E4M3, n, codes, scales, y);
    else expand_row_as(DPL_E5M2, n, codes, scales, y);
}
