// kernels_nv_gemm_tmpl.h - products of NVFP4 operands in integers, for any width of vector.
//
// Included by kernels_LEVEL.c after kernels_gemm_tmpl.h and kernels_rows_tmpl.h. Twice a number of
// E2M1 is an integer up to 12, so the sum over a block of 16 is exact, and so is that sum times two
// scales of E4M3. Codes of weights become bytes on the way: they lie so that a register of them has
// the codes of four k for each column, in the order ORDER in which the left operand is packed.
#if REG == 16
typedef __m512i int_reg;
#define NV_MR        10
#define NV_COLUMNS   2 // registers of columns that go together: with two a broadcast serves both
#define NV_EACH(X)   X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9)
#define ALL_LANES(x) _mm512_broadcast_i32x4(x)
#define BITS_AT(p)   _mm512_loadu_si512(p)
#else
typedef __m256i int_reg;
#define NV_MR        6
#define NV_COLUMNS   1
#define NV_EACH(X)   X(0) X(1) X(2) X(3) X(4) X(5)
#define ALL_LANES(x) _mm256_broadcastsi128_si256(x)
#define BITS_AT(p)   _mm256_loadu_si256((const __m256i *)(const void *)(p))
#endif
#define NV_AHEAD 2048 // bytes of codes, which are fetched so early

// Which k of a block the bytes of a packed row are.
#define ORDER 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15

// E4M3 without a sign.
INLINE float scale_number(uint8_t code) {
    if (code == 0x7f) return float_of(0x7fc00000u);
    return code < 8 ? (float)code * 0x1p-9f : float_of(((uint32_t)code << 20) + (120u << 23));
}

/* ---- left operand ---------------------------------------------------------------------------- */
// For each block of 16: of m rows the scale (a quarter of it, for both factors are twice what they
// are), -12 times the sum of the row, and 16 bytes.
INLINE void pack_block(const uint8_t *codes, size_t bytes, uint8_t scale, float *scale_out,
                       int32_t *sum_out, uint8_t *to) {
    const __m128i twice = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m128i four_bits = _mm_set1_epi8(0xf), order = _mm_setr_epi8(ORDER);
    uint64_t pairs = 0;
    if (bytes >= 8) memcpy(&pairs, codes, 8);
    else memcpy(&pairs, codes, bytes);
    const __m128i both = _mm_cvtsi64_si128((long long)pairs);
    const __m128i even = _mm_and_si128(both, four_bits);
    const __m128i odd = _mm_and_si128(_mm_srli_epi16(both, 4), four_bits);
    const __m128i code = _mm_shuffle_epi8(_mm_unpacklo_epi8(even, odd), order);
    const __m128i x = _mm_shuffle_epi8(twice, code);
    const __m128i sums = _mm_sad_epu8(_mm_add_epi8(x, _mm_set1_epi8(12)), _mm_setzero_si128());
    const int32_t sum = _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 12 * 16;
    _mm_storeu_si128((__m128i *)(void *)to, x);
    memcpy(sum_out, &(int32_t){-12 * sum}, sizeof sum);
    memcpy(scale_out, &(float){0.25f * scale_number(scale)}, sizeof(float));
}

static void nv_pack(size_t m, size_t kc, const uint8_t *const *codes, const uint8_t *const *scales,
                    void *dst) {
    for (size_t l = 0; l < kc; l += 16) {
        float *scale = (float *)dst + l / 16 * 6 * m;
        int32_t *sum = (int32_t *)(void *)(scale + m);
        uint8_t *bytes = (uint8_t *)(sum + m);
        for (size_t i = 0; i < m; i++)
            if (codes[i])
                pack_block(codes[i] + l / 2, (kc - l + 1) / 2, scales[i][l / 16], scale + i,
                           sum + i, bytes + 16 * i);
            else scale[i] = 0, sum[i] = 0, memset(bytes + 16 * i, 0, 16);
    }
}

/* ---- tile ------------------------------------------------------------------------------------ */
// start + the sum of four products in each lane, four times: of bytes without a sign with bytes of
// one.
INLINE int_reg dot_16(int_reg start, int_reg b0, int_reg b1, int_reg b2, int_reg b3, int_reg x0,
                      int_reg x1, int_reg x2, int_reg x3) {
#if defined(__AVX512VNNI__)
    start = OP(dpbusd_epi32)(start, b0, x0);
    start = OP(dpbusd_epi32)(start, b1, x1);
    start = OP(dpbusd_epi32)(start, b2, x2);
    return OP(dpbusd_epi32)(start, b3, x3);
#else
    const int_reg low = OP(add_epi16)(OP(maddubs_epi16)(b0, x0), OP(maddubs_epi16)(b1, x1));
    const int_reg high = OP(add_epi16)(OP(maddubs_epi16)(b2, x2), OP(maddubs_epi16)(b3, x3));
    const int_reg sums = OP(madd_epi16)(OP(add_epi16)(low, high), OP(set1_epi16)(1));
    return OP(add_epi32)(start, sums);
#endif
}

INLINE int_reg broadcast_at(const void *p) {
    int32_t x;
    memcpy(&x, p, sizeof x);
    return OP(set1_epi32)(x);
}

// 12 more than twice the numbers of codes, of which each byte has one in its low half.
INLINE int_reg weight_bytes(reg_u32 codes) {
    const __m128i of_codes = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4,
                                           0);
    return OP(shuffle_epi8)(ALL_LANES(of_codes), (int_reg)(codes & 0x0f0f0f0fu));
}

#define NV_ZERO(i) vec nv0_##i = {0}, nv1_##i = {0};
#define NV_ROW(i)                                                                           \
    if (i < m) {                                                                            \
        const uint8_t *x = bytes + 16 * i;                                                  \
        const int_reg x0 = broadcast_at(x), x1 = broadcast_at(x + 4);                       \
        const int_reg x2 = broadcast_at(x + 8), x3 = broadcast_at(x + 12);                  \
        const int_reg start = broadcast_at(sums + 4 * i);                                   \
        const int_reg sum0 = dot_16(start, b00, b01, b02, b03, x0, x1, x2, x3);             \
        nv0_##i = OP(fmadd_ps)(OP(cvtepi32_ps)(sum0), OP(set1_ps)(scale0[i]), nv0_##i);     \
        if (NV_COLUMNS == 2) {                                                              \
            const int_reg sum1 = dot_16(start, b10, b11, b12, b13, x0, x1, x2, x3);         \
            nv1_##i = OP(fmadd_ps)(OP(cvtepi32_ps)(sum1), OP(set1_ps)(scale1[i]), nv1_##i); \
        }                                                                                   \
    }
#define NV_STORE_AT(i, at, acc)                        \
    {                                                  \
        if (add) acc += OP(loadu_ps)(c + 32 * i + at); \
        OP(storeu_ps)(c + 32 * i + at, acc);           \
    }
#define NV_STORE(i)                                       \
    if (i < m) {                                          \
        NV_STORE_AT(i, 0, nv0_##i)                        \
        if (NV_COLUMNS == 2) NV_STORE_AT(i, REG, nv1_##i) \
    }

// NV_COLUMNS registers of columns: codes of the first one lie at `codes` of a block and have its
// scale i_scale.
INLINE void nv_tile_columns(size_t m, size_t kc, const uint8_t *a, const uint8_t *codes,
                            const uint8_t *scales, size_t i_scale, float *c, bool add) {
    NV_EACH(NV_ZERO)
    for (size_t l = 0; l < kc; l += 16, a += 24 * m, codes += 256, scales += 2) {
        const uint8_t *sums = a + 4 * m, *bytes = a + 8 * m;
        float scale0[REG], scale1[REG];
        const vec scale = load_f32(m, (const float *)(const void *)a);
        for (size_t at = 0; at < 256; at += 64)
            _mm_prefetch((const char *)codes + NV_AHEAD + at, _MM_HINT_T0);
        OP(storeu_ps)(scale0, scale * OP(set1_ps)(scale_number(scales[i_scale])));
        const reg_u32 w00 = (reg_u32)BITS_AT(codes), w01 = (reg_u32)BITS_AT(codes + 64);
        const int_reg b00 = weight_bytes(w00), b01 = weight_bytes(w00 >> 4);
        const int_reg b02 = weight_bytes(w01), b03 = weight_bytes(w01 >> 4);
        const size_t second = NV_COLUMNS == 2 ? 128 : 0;
        OP(storeu_ps)(scale1, scale * OP(set1_ps)(scale_number(scales[second / 128])));
        const reg_u32 w10 = (reg_u32)BITS_AT(codes + second);
        const reg_u32 w11 = (reg_u32)BITS_AT(codes + second + 64);
        const int_reg b10 = weight_bytes(w10), b11 = weight_bytes(w10 >> 4);
        const int_reg b12 = weight_bytes(w11), b13 = weight_bytes(w11 >> 4);
        NV_EACH(NV_ROW)
    }
    NV_EACH(NV_STORE)
}

#define NV_ROWS(i)                                                                              \
    case i + 1:                                                                                 \
        nv_tile_columns(i + 1, kc, a, codes + j / 16 * 128 + j % 16 * 4, scales, j / 16, c + j, \
                        add);                                                                   \
        break;

static void nv_tile(size_t m, size_t kc, const void *a, const uint8_t *codes, const uint8_t *scales,
                    float *c, bool add) {
    for (size_t j = 0; j < 32; j += NV_COLUMNS * REG) {
        switch (m) { NV_EACH(NV_ROWS) }
    }
}
