// kernels_nv_tmpl.h - NVFP4 in vectors of a level's width.
//
// Included by kernels_LEVEL.c after kernels_quant_tmpl.h, whose codes these are.
#define MADD(a, b, c)       ((reg)OP(fmadd_ps)((vec)(a), (vec)(b), (vec)(c)))
#define MINUS_PROD(a, b, c) ((reg)OP(fnmadd_ps)((vec)(a), (vec)(b), (vec)(c)))
#define MUL_EVENS(a, b)     ((reg_u32)OP(mul_epu32)((line)(a), (line)(b)))
typedef uint64_t reg_u64 __attribute__((vector_size(REG_BYTES)));

INLINE void multiply_wide(reg_u32 x, uint32_t by, reg_u32 *low, reg_u32 *high) {
    const reg_u32 m = (reg_u32){0} + by, odd = (reg_u32)((reg_u64){0} + 0xffffffff00000000u);
    const reg_u32 a = MUL_EVENS(x, m), b = MUL_EVENS((reg_u64)x >> 32, m);
    *low = either(odd, (reg_u32)((reg_u64)b << 32), a);
    *high = either(odd, b, (reg_u32)((reg_u64)a >> 32));
}

// dpl_rng_bits() of 128 elements.
INLINE void random_bits(const uint64_t seed_stream[2], uint64_t first, uint16_t bits[128]) {
    for (size_t c = 0; c < 16; c += REG) {
        const uint64_t counter = first / 128 * 16 + c; // its upper half is the same for all lanes
        uint32_t lane[REG];
        for (uint32_t i = 0; i < REG; i++) lane[i] = (uint32_t)counter + i;
        reg_u32 x[4];
        memcpy(&x[0], lane, sizeof lane);
        x[1] = (reg_u32){0} + (uint32_t)(counter >> 32);
        x[2] = (reg_u32){0} + (uint32_t)seed_stream[1];
        x[3] = (reg_u32){0} + (uint32_t)(seed_stream[1] >> 32);
        uint32_t k0 = (uint32_t)seed_stream[0], k1 = (uint32_t)(seed_stream[0] >> 32);
        for (int round = 0; round < 10; round++) {
            reg_u32 a_low, a_high, b_low, b_high;
            multiply_wide(x[0], 0xd2511f53u, &a_low, &a_high);
            multiply_wide(x[2], 0xcd9e8d57u, &b_low, &b_high);
            x[0] = b_high ^ x[1] ^ k0;
            x[1] = b_low;
            x[2] = a_high ^ x[3] ^ k1;
            x[3] = a_low;
            k0 += 0x9e3779b9u;
            k1 += 0xbb67ae85u;
        }
        for (size_t w = 0; w < 8; w++) {
            const reg_u32 bits_16 = w % 2 ? x[w / 2] >> 16 : x[w / 2] & 0xffff;
            const reg_u16 half = __builtin_convertvector(bits_16, reg_u16);
            memcpy(bits + 16 * w + c, &half, sizeof half);
        }
    }
}

// As dpl_f32_to_e2m1_random(), of numbers that are not NaN.
INLINE reg_u32 random_codes(reg x, const uint16_t *bits) {
    reg_u16 half;
    memcpy(&half, bits, sizeof half);
    const reg_u32 random = __builtin_convertvector(half, reg_u32);
    const reg_u32 a = least(magnitude(x), (reg_u32){0} + bits_of(6.0f));
    const reg_u32 normal = ((a + (random << 6)) >> 22) - (126 << 1);
    const reg steps = (reg)a * 2.0f + __builtin_convertvector((reg_i32)random, reg) * 0x1p-16f;
    const reg_u32 small = (reg_u32) __builtin_convertvector(steps, reg_i32);
    const reg_u32 sign = (reg_u32)x >> 28 & 0x8;
    return where_below(a, (reg_u32){0} + bits_of(1.0f), small, normal) | sign;
}

// Bytes of two codes each.
INLINE void store_code_pairs(uint8_t *to, reg_u32 codes) {
    const reg_u64 both = (reg_u64)codes | (reg_u64)codes >> 28;
#if defined(__AVX512F__)
    _mm_storel_epi64((__m128i *)(void *)to, _mm512_cvtepi64_epi8((__m512i)both));
#else
    for (size_t i = 0; i < REG / 2; i++) to[i] = (uint8_t)both[i];
#endif
}

// y / by, correctly rounded: what a first quotient leaves is exact. Far above the largest code the
// first will do, infinities too. A zero keeps its sign.
INLINE reg quotient(reg y, reg by, reg inverse) {
    const reg q = y * inverse, exact = MADD(MINUS_PROD(q, by, y), inverse, q);
    const reg_u32 absolute = where_below(magnitude(q), (reg_u32)all_lanes(8), (reg_u32)exact,
                                         (reg_u32)q);
    return (reg)((absolute & 0x7fffffff) | ((reg_u32)y & 0x80000000u));
}

// The scales of blocks with these largest magnitudes, as bits.
INLINE reg_u32 nv_scales(reg_u32 amax, reg tensor_scale) {
    const reg wanted = (reg)amax / 6.0f * tensor_scale;
    return either((reg_u32)(wanted != wanted), (reg_u32){0} + 0x7f, codes_of(DPL_E4M3, wanted));
}

// The largest lane.
INLINE uint32_t most_of(reg_u32 x) {
    uint32_t lane[REG], most = 0;
    memcpy(lane, &x, sizeof lane);
    for (size_t j = 0; j < REG; j++) most = DPL_MAX(most, lane[j]);
    return most;
}

// A number's code is how many of seven products of the block's scale it exceeds: those of the
// midpoints between codes, of which every second one, a tie to the code above, is taken a bit
// smaller. They have few bits, so upper words compare as the numbers would. By code of the scale.
typedef struct nv_midpoints {
    int16_t word[128][8];
} nv_midpoints;

static void fill_midpoints(nv_midpoints *to) {
    typedef int16_t eight __attribute__((vector_size(16)));
    typedef float eight_f32 __attribute__((vector_size(32)));
    typedef uint32_t eight_u32 __attribute__((vector_size(32)));
    const eight_f32 four_times = {1, 3, 5, 7, 10, 14, 20, 0};
    const eight smaller = {0, 1, 0, 1, 0, 1, 0, 0}, last = {0, 0, 0, 0, 0, 0, 0, 0x7fff};
    for (int m = 0; m < 16; m++) { // significands of subnormal scales, then of the others
        const eight_u32 bits = (eight_u32)(four_times * (float)m);
        const eight words_of_1 = __builtin_convertvector(bits >> 16, eight) - smaller;
        for (int e = m < 8 ? 0 : 1; e < (m < 8 ? 1 : 16); e++) {
            const int16_t more = (int16_t)((DPL_MAX(e, 1) - 12) * 128);
            const eight row = (words_of_1 + more) | last; // the last one is never exceeded
            memcpy(to->word[8 * e + m % 8], &row, sizeof row);
        }
    }
}

#if defined(__AVX512BW__)
// Of the scale with this code, which is neither 0 nor NaN.
INLINE __m128i midpoints_of(const nv_midpoints *all, uint8_t scale) {
    return _mm_loadu_si128((const __m128i *)(const void *)all->word[scale]);
}

INLINE __m512i add_where(__m512i i, __m512i a, __m512i b, short step) {
    return _mm512_mask_add_epi16(i, _mm512_cmpgt_epu16_mask(a, b), i, WORDS(step));
}

// Two blocks from x[at] on.
INLINE void nv_two_blocks(dpl_dtype dtype, const nv_midpoints *all, const void *x, size_t at,
                          float tensor_scale, const uint8_t *scales, uint8_t *codes) {
    const __m512i y = upper_halves(
        (__m512i)(load_any(dtype, x, at) * all_lanes(tensor_scale)),
        (__m512i)(load_any(dtype, x, at + 16) * all_lanes(tensor_scale)));
    const __m512i a = _mm512_and_si512(y, WORDS(0x7fff));
    const __m256i both = _mm256_setr_m128i(midpoints_of(all, scales[0]),
                                           midpoints_of(all, scales[1]));
    const __m512i middle = _mm512_castsi256_si512(both);
    // The middle ones of the first block, then of the second: which half, which quarter, which.
    const __m512i first = _mm512_mask_mov_epi16(_mm512_setzero_si512(), 0xffff0000u, WORDS(8));
    __m512i i = first;
    i = add_where(i, a, _mm512_permutexvar_epi16(_mm512_add_epi16(i, WORDS(3)), middle), 4);
    i = add_where(i, a, _mm512_permutexvar_epi16(_mm512_add_epi16(i, WORDS(1)), middle), 2);
    i = add_where(i, a, _mm512_permutexvar_epi16(i, middle), 1);
    const __m512i sign = _mm512_and_si512(_mm512_srli_epi16(y, 12), WORDS(8));
    const __m512i code = _mm512_or_si512(_mm512_sub_epi16(i, first), sign);
    const __m512i pair = _mm512_or_si512(code, _mm512_srli_epi32(code, 12));
    _mm_storeu_si128((__m128i *)(void *)codes, _mm512_cvtepi32_epi8(pair));
}
#else
#define nv_two_blocks(dtype, all, x, at, tensor_scale, scales, codes) (void)(all)
#endif

// Up to REG whole blocks that follow each other; with `by_chance`, random: bits of theirs.
INLINE void nv_run(dpl_dtype dtype, bool by_chance, const nv_midpoints *all, size_t n_blocks,
                   const void *x, size_t at, float tensor_scale, const uint16_t *random,
                   uint8_t *codes, uint8_t *scales) {
    const reg_u32 most = run_maxima(dtype, 16, n_blocks, x, at);
    const reg_u32 byte = nv_scales(most, all_lanes(tensor_scale));
    const reg scale = numbers_of(DPL_E4M3, byte);
    uint8_t bytes[REG];
    float by[REG], inverse[REG];
    store_codes(bytes, byte);
    store(by, scale);
    store(inverse, 1.0f / scale);
    memcpy(scales, bytes, n_blocks);
    size_t done = 0;
    const size_t together = by_chance || REG < 16 ? 0 : n_blocks / 2 * 2;
    for (; done < together; done += 2)
        nv_two_blocks(dtype, all, x, at + 16 * done, tensor_scale, bytes + done, codes + 8 * done);
    UNROLL_4 for (size_t i = done; i < n_blocks; i++) for (size_t j = 0; j < 16; j += REG) {
        const reg y = load_any(dtype, x, at + 16 * i + j) * all_lanes(tensor_scale);
        const reg z = quotient(y, all_lanes(by[i]), all_lanes(inverse[i]));
        store_code_pairs(codes + 8 * i + j / 2,
                         by_chance ? random_codes(z, random + 16 * i + j) : codes_of(DPL_E2M1, z));
    }
    for (size_t i = 0; i < n_blocks; i++)
        if (bytes[i] == 0 || bytes[i] == 0x7f) memset(codes + 8 * i, bytes[i] ? 0x77 : 0, 8);
}

INLINE void nv_row(dpl_dtype dtype, bool by_chance, const nv_midpoints *all, const dpl_nv_rows *b,
                   size_t r) {
    uint16_t random[DPL_MAX(16 * REG, 128)];
    uint8_t *codes = b->codes + r * b->ld_codes, *scales = b->scales + r * b->ld_scales;
    const size_t whole = b->n / 16, rest = b->n % 16, size = dpl_dtype_bytes(dtype);
    for (size_t i = 0; i < dpl_div_up(b->n, 16); i += REG) {
        const size_t n_blocks = DPL_MIN(DPL_MAX(whole, i) - i, (size_t)REG);
        for (size_t j = 0; by_chance && j < 16 * REG; j += 128)
            random_bits(b->seed_stream, b->first + r * b->ld_random + 16 * i + j, random + j);
        nv_run(dtype, by_chance, all, n_blocks, b->x, r * b->ld + 16 * i, b->tensor_scale[r],
               random, codes + 8 * i, scales + i);
        if (n_blocks == REG || rest == 0) continue;
        float last[16] = {0}; // of either type
        uint8_t last_codes[8];
        memcpy(last, (const uint8_t *)b->x + (r * b->ld + 16 * whole) * size, rest * size);
        nv_run(dtype, by_chance, all, 1, last, 0, b->tensor_scale[r], random + 16 * n_blocks,
               last_codes, scales + whole);
        if (rest % 2) last_codes[rest / 2] &= 0xf; // also in a block of NaN
        memcpy(codes + 8 * whole, last_codes, dpl_div_up(rest, 2));
    }
}

INLINE float amax_as(dpl_dtype dtype, const void *x, size_t n) {
    reg_u32 amax[2] = {0};
    size_t i = 0;
    for (; i + 2 * REG <= n; i += 2 * REG)
        for (size_t j = 0; j < 2; j++)
            amax[j] = greatest(amax[j], magnitude(load_any(dtype, x, i + j * REG)));
    uint32_t most = most_of(greatest(amax[0], amax[1]));
    for (; i < n; i++) most = DPL_MAX(most, bits_of(at_any(dtype, x, i)) & 0x7fffffffu);
    return float_of(most); // NaNs are above all numbers
}

static float quant_amax(dpl_dtype dtype, const void *x, size_t n) {
    return dtype == DPL_F32 ? amax_as(DPL_F32, x, n) : amax_as(DPL_BF16, x, n);
}

static void quant_nv_rows(const dpl_nv_rows *b) {
    nv_midpoints all;
    if (REG == 16 && !b->seed_stream) fill_midpoints(&all); // else nobody asks
    for (size_t r = 0; r < b->m; r++)
        if (b->seed_stream && b->dtype == DPL_F32) nv_row(DPL_F32, true, &all, b, r);
        else if (b->seed_stream) nv_row(DPL_BF16, true, &all, b, r);
        else if (b->dtype == DPL_F32) nv_row(DPL_F32, false, &all, b, r);
        else nv_row(DPL_BF16, false, &all, b, r);
}

/* ---- down the columns, rotated --------------------------------------------------------------- */
// REG columns of all 16 rows from column `at` on, times the Hadamard matrix / 4.
INLINE void rotated(dpl_dtype dtype, const dpl_nv_columns *b, const void *const rows[16], size_t at,
                    reg v[16]) {
    UNROLL for (size_t i = 0; i < 16; i++) {
        const reg_u32 sign = (reg_u32){0} + ((uint32_t)(b->signs >> i) << 31);
        const reg x = i < b->m && rows[i] ? load_any(dtype, rows[i], at) : (reg){0};
        v[i] = (reg)((reg_u32)x ^ sign);
    }
    UNROLL for (size_t h = 1; h < 16; h *= 2) UNROLL for (size_t i = 0; i < 16; i++) {
        if (i & h) continue;
        const reg even = v[i], odd = v[i + h];
        v[i] = even + odd;
        v[i + h] = even - odd;
    }
    UNROLL for (size_t i = 0; i < 16; i++) v[i] *= 0.25f;
}

// Of the columns that are left, where there are not REG any more, a copy with zeros.
typedef struct nv_tail {
    float numbers[16][REG]; // of either type
    const void *rows[16];
    uint8_t codes[8][REG], scales[REG];
    float tensor_scale[REG];
} nv_tail;

static void nv_copy_tail(const dpl_nv_columns *b, size_t c, nv_tail *t) {
    const size_t size = dpl_dtype_bytes(b->dtype);
    memset(t, 0, sizeof *t);
    for (size_t i = 0; i < b->m; i++) {
        if (!b->rows[i]) continue;
        memcpy(t->numbers[i], (const uint8_t *)b->rows[i] + c * size, (b->n - c) * size);
        t->rows[i] = t->numbers[i];
    }
}

INLINE reg_u32 rotated_maxima(const reg v[16]) {
    reg_u32 amax = magnitude(v[0]);
    UNROLL for (size_t i = 1; i < 16; i++) amax = greatest(amax, magnitude(v[i]));
    return amax;
}

INLINE void nv_columns_amax_as(dpl_dtype dtype, const dpl_nv_columns *b, float *amax) {
    const size_t whole = b->n / REG * REG;
    reg v[16];
    for (size_t c = 0; c < whole; c += REG) {
        rotated(dtype, b, b->rows, c, v);
        store(amax + c, (reg)greatest((reg_u32)load(amax + c), rotated_maxima(v)));
    }
    if (whole == b->n) return;
    nv_tail t;
    float more[REG];
    nv_copy_tail(b, whole, &t);
    rotated(dtype, b, t.rows, 0, v);
    store(more, (reg)rotated_maxima(v));
    for (size_t c = whole; c < b->n; c++)
        if (!(more[c - whole] <= amax[c])) amax[c] = more[c - whole];
}

// Codes and scales of REG columns; random: bits of theirs, 128 to the next row.
INLINE void nv_column_codes(bool by_chance, const reg v[16], reg tensor_scale,
                            const uint16_t *random, uint8_t *codes, size_t ld, uint8_t *scales) {
    const reg_u32 byte = nv_scales(rotated_maxima(v), tensor_scale);
    const reg_u32 nan = (reg_u32)(byte == 0x7f);
    const reg scale = numbers_of(DPL_E4M3, byte), inverse = 1.0f / scale;
    const reg_u32 some = (reg_u32)(byte != 0) & 0xff;
    store_codes(scales, byte);
    for (size_t i = 0; i < 16; i += 2, codes += ld) {
        reg_u32 two[2];
        for (size_t j = 0; j < 2; j++) {
            const reg z = quotient(v[i + j] * tensor_scale, scale, inverse);
            two[j] = by_chance ? random_codes(z, random + 128 * (i + j)) : codes_of(DPL_E2M1, z);
        }
        store_codes(codes, either(nan, (reg_u32){0} + 0x77, (two[0] | two[1] << 4) & some));
    }
}

INLINE void nv_columns_as(dpl_dtype dtype, bool by_chance, const dpl_nv_columns *b) {
    uint16_t random[16 * 128];
    reg v[16];
    for (size_t c = 0; c < b->n; c += REG) {
        for (size_t i = 0; by_chance && c % 128 == 0 && i < 16; i++)
            random_bits(b->seed_stream, b->first + i * b->ld_random + c, random + 128 * i);
        if (b->n - c >= REG) {
            rotated(dtype, b, b->rows, c, v);
            nv_column_codes(by_chance, v, load(b->tensor_scale + c), random + c % 128, b->codes + c,
                            b->ld_codes, b->scales + c);
            continue;
        }
        nv_tail t;
        nv_copy_tail(b, c, &t);
        memcpy(t.tensor_scale, b->tensor_scale + c, (b->n - c) * sizeof(float));
        rotated(dtype, b, t.rows, 0, v);
        nv_column_codes(by_chance, v, load(t.tensor_scale), random + c % 128, t.codes[0], REG,
                        t.scales);
        memcpy(b->scales + c, t.scales, b->n - c);
        for (size_t i = 0; i < 8; i++) memcpy(b->codes + i * b->ld_codes + c, t.codes[i], b->n - c);
    }
}

static void quant_nv_columns_amax(const dpl_nv_columns *b, float *amax) {
    if (b->dtype == DPL_F32) nv_columns_amax_as(DPL_F32, b, amax);
    else nv_columns_amax_as(DPL_BF16, b, amax);
}

static void quant_nv_columns(const dpl_nv_columns *b) {
    if (b->seed_stream && b->dtype == DPL_F32) nv_columns_as(DPL_F32, true, b);
    else if (b->seed_stream) nv_columns_as(DPL_BF16, true, b);
    else if (b->dtype == DPL_F32) nv_columns_as(DPL_F32, false, b);
    else nv_columns_as(DPL_BF16, false, b);
}

/* ---- weights --------------------------------------------------------------------------------- */
// Codes of a block, a byte each, as they lie in a weight: 2 x 32 words.
INLINE void store_weight(uint8_t block[16][16], uint8_t *codes) {
    for (size_t n = 0; n < 16; n += REG)
        for (size_t q = 0; q < 2; q++) {
            reg_u32 pairs = {0}; // of words
            UNROLL for (size_t i = 0; i < 8; i++) pairs |= codes_at(&block[8 * q + i][n])
                                                           << (i / 2 * 4 + i % 2 * 16);
            memcpy(codes + 64 * q + 4 * n, &pairs, sizeof pairs);
        }
}

static uint8_t quant_nv_weight(const float *x, size_t ld, float tensor_scale, uint8_t *codes,
                               uint8_t *transposed) {
    reg_u32 amax = {0};
    for (size_t r = 0; r < 16; r++)
        for (size_t c = 0; c < 16; c += REG) amax = greatest(amax, magnitude(load(x + r * ld + c)));
    const reg_u32 byte = nv_scales((reg_u32){0} + most_of(amax), all_lanes(tensor_scale));
    const reg_u32 nan = (reg_u32)(byte == 0x7f);
    const reg scale = numbers_of(DPL_E4M3, byte), inverse = 1.0f / scale;
    const reg_u32 some = (reg_u32)(byte != 0) & 0xf;
    uint8_t block[16][16], across[16][16];
    for (size_t r = 0; r < 16; r++)
        for (size_t c = 0; c < 16; c += REG) {
            const reg y = load(x + r * ld + c) * all_lanes(tensor_scale);
            const reg_u32 code = codes_of(DPL_E2M1, quotient(y, scale, inverse)) & some;
            store_codes(&block[r][c], either(nan, (reg_u32){0} + 0x7, code));
        }
    for (size_t r = 0; r < 16; r++)
        for (size_t c = 0; c < 16; c++) across[c][r] = block[r][c];
    store_weight(block, codes);
    store_weight(across, transposed);
    return (uint8_t)byte[0];
}

/* ---- NVFP4 as bf16 --------------------------------------------------------------------------- */
// The numbers of codes, of which the lowest four bits count.
INLINE reg code_numbers(reg_u32 code) {
#if defined(__AVX512F__)
    const __m512 all = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3,
                                      -4, -6);
    return (reg)_mm512_permutexvar_ps((__m512i)code, all);
#else
    return numbers_of(DPL_E2M1, code & 0xf);
#endif
}

INLINE void store_upper(uint16_t *to, reg x) {
    const reg_u16 upper = __builtin_convertvector((reg_u32)x >> 16, reg_u16);
    memcpy(to, &upper, sizeof upper);
}

INLINE void store_two_upper(uint16_t *to, reg low, reg high) {
#if defined(__AVX512BW__)
    _mm512_storeu_si512(to, odd_words((__m512i)low, (__m512i)high));
#else
    store_upper(to, low);
    store_upper(to + REG, high);
#endif
}

// Up to REG scales, and zeros after them.
INLINE void scale_numbers(const uint8_t *scales, size_t n, float *to) {
    uint8_t bytes[REG] = {0};
    if (n < REG) memcpy(bytes, scales, n);
    store(to, numbers_of(DPL_E4M3, codes_at(n < REG ? bytes : scales)));
}

#if defined(__AVX512BW__)
// A block's numbers are 16, the same in either half.
INLINE void expand_weight(const uint8_t *codes, float scale, uint16_t *y) {
    const reg sixteen = code_numbers(
        (reg_u32)_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    const __m512i upper = _mm512_srli_epi32((__m512i)(sixteen * all_lanes(scale)), 16);
    const __m512i numbers = _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(upper));
    for (size_t q = 0; q < 2; q++) {
        const __m512i four = bits_at(codes + 64 * q);
        uint16_t *to = y + 4 * q * 64;
        _mm512_storeu_si512(to, _mm512_permutexvar_epi16(four, numbers));
        _mm512_storeu_si512(to + 64, _mm512_permutexvar_epi16(_mm512_srli_epi16(four, 4), numbers));
        _mm512_storeu_si512(to + 128,
                            _mm512_permutexvar_epi16(_mm512_srli_epi16(four, 8), numbers));
        _mm512_storeu_si512(to + 192,
                            _mm512_permutexvar_epi16(_mm512_srli_epi16(four, 12), numbers));
    }
}
#else
// Tables of the lower and of the upper bytes of a block's 16 numbers.
INLINE void expand_weight(const uint8_t *codes, float scale, uint16_t *y) {
    uint8_t bytes[2][32];
    const __m256i one = _mm256_set1_epi16(0xf);
    for (size_t i = 0; i < 16; i += REG) {
        uint16_t upper[REG];
        reg_u32 code = {0};
        for (uint32_t j = 0; j < REG; j++) code[j] = (uint32_t)i + j;
        store_upper(upper, code_numbers(code) * all_lanes(scale));
        for (size_t j = 0; j < REG; j++)
            for (size_t h = 0; h < 2; h++)
                bytes[h][i + j] = bytes[h][i + j + 16] = (uint8_t)(upper[j] >> 8 * h);
    }
    const __m256i low = _mm256_loadu_si256((const __m256i *)(const void *)bytes[0]);
    const __m256i high = _mm256_loadu_si256((const __m256i *)(const void *)bytes[1]);
    for (size_t i = 0; i < 4; i++) {
        __m256i four = _mm256_loadu_si256((const __m256i *)(const void *)(codes + 32 * i));
        for (size_t j = 0; j < 4; j++, four = _mm256_srli_epi16(four, 4)) {
            const __m256i code = _mm256_and_si256(four, one); // a byte of 0x80 gives 0
            const __m256i l = _mm256_or_si256(code, _mm256_set1_epi16((short)0x8000));
            const __m256i h = _mm256_or_si256(_mm256_slli_epi16(code, 8), _mm256_set1_epi16(0x80));
            const __m256i halves = _mm256_or_si256(_mm256_shuffle_epi8(low, l),
                                                   _mm256_shuffle_epi8(high, h));
            _mm256_storeu_si256((__m256i *)(void *)(y + (i / 2 * 4 + j) * 64 + i % 2 * 16), halves);
        }
    }
}
#endif

static void quant_nv_expand_pairs(size_t n_blocks, const uint8_t *codes, const uint8_t *scales,
                                  uint16_t *y, ptrdiff_t ahead) {
    float scale[REG];
    for (size_t i = 0; i < 2 * n_blocks; i++, codes += 128) {
        if (i % REG == 0) scale_numbers(scales + i, 2 * n_blocks - i, scale);
        __builtin_prefetch(codes + ahead, 0, 2);
        __builtin_prefetch(codes + ahead + 64, 0, 2);
        expand_weight(codes, scale[i % REG], y + i / 2 * 512 + i % 2 * 32);
    }
}

// 2 * REG columns of two rows.
INLINE void expand_two_rows(const uint8_t *codes, reg scale0, reg scale1, uint16_t *y, size_t ld) {
    const reg_u32 low = codes_at(codes), high = codes_at(codes + REG);
    store_two_upper(y, code_numbers(low) * scale0, code_numbers(high) * scale1);
    store_two_upper(y + ld, code_numbers(low >> 4) * scale0, code_numbers(high >> 4) * scale1);
}

static void quant_nv_expand_columns(size_t n, const uint8_t *codes, size_t ld,
                                    const uint8_t *scales, uint16_t *y, size_t ld_y) {
    float scale[2 * REG];
    size_t c = 0;
    for (; c + 2 * REG <= n; c += 2 * REG) {
        for (size_t j = 0; j < 2 * REG; j += REG) scale_numbers(scales + c + j, REG, scale + j);
        const reg scale0 = load(scale), scale1 = load(scale + REG);
        UNROLL for (size_t i = 0; i < 8; i++)
            expand_two_rows(codes + i * ld + c, scale0, scale1, y + 2 * i * ld_y + c, ld_y);
    }
    const size_t rest = n - c;
    if (rest == 0) return;
    uint8_t last_scales[2 * REG] = {0};
    memcpy(last_scales, scales + c, rest);
    for (size_t j = 0; j < 2 * REG; j += REG) scale_numbers(last_scales + j, REG, scale + j);
    for (size_t i = 0; i < 8; i++) {
        uint8_t last[2 * REG] = {0};
        uint16_t rows[2][2 * REG];
        memcpy(last, codes + i * ld + c, rest);
        expand_two_rows(last, load(scale), load(scale + REG), rows[0], 2 * REG);
        for (size_t j = 0; j < 2; j++)
            memcpy(y + (2 * i + j) * ld_y + c, rows[j], rest * sizeof *y);
    }
}

// REG codes that follow each other.
INLINE reg code_pair_numbers(const uint8_t *codes) {
    uint64_t two = 0;
    memcpy(&two, codes, REG / 2);
    const reg_u64 pair = (reg_u64)OP(cvtepu8_epi64)(_mm_cvtsi64_si128((long long)two));
    return code_numbers((reg_u32)(pair | pair << 28));
}

INLINE void expand_16(const uint8_t *codes, float scale, uint16_t *y) {
    for (size_t i = 0; i < 16; i += REG)
        store_upper(y + i, code_pair_numbers(codes + i / 2) * all_lanes(scale));
}

/* ---- sums ------------------------------------------------------------------------------------ */
static void quant_nv_scale(size_t m, const float *sums, const float *rows, const float *columns,
                           bool add, float *y) {
    for (size_t i = 0; i < m; i++, sums += 32, y += 32)
        UNROLL for (size_t j = 0; j < 32; j += REG) {
            const reg x = load(sums + j) * all_lanes(rows[i]), by = load(columns + j);
            store(y + j, add ? MADD(x, by, load(y + j)) : x * by);
        }
}

static void quant_nv_expand_row(size_t n, const uint8_t *codes, const uint8_t *scales,
                                uint16_t *y) {
    const size_t whole = n / 16, rest = n % 16;
    float scale[REG];
    for (size_t i = 0; i < dpl_div_up(n, 16); i++) {
        if (i % REG == 0) scale_numbers(scales + i, dpl_div_up(n, 16) - i, scale);
        if (i < whole) {
            expand_16(codes + 8 * i, scale[i % REG], y + 16 * i);
            continue;
        }
        uint8_t last[8] = {0};
        uint16_t halves[16];
        memcpy(last, codes + 8 * i, dpl_div_up(rest, 2));
        expand_16(last, scale[i % REG], halves);
        memcpy(y + 16 * i, halves, rest * sizeof *y);
    }
}

#define QUANT_KERNELS                                                                             \
    quant_encode, quant_decode, quant_mx_rows, quant_mx_columns, quant_expand_pairs,              \
        quant_expand_columns, quant_expand_row, quant_amax, quant_nv_rows, quant_nv_columns_amax, \
        quant_nv_columns, quant_nv_weight, quant_nv_expand_pairs, quant_nv_expand_columns,        \
        quant_nv_expand_row, quant_nv_scale
