// kernels_softmax_tmpl.h - attention's row kernels, on blocks of scores 32 columns wide.
//
// Part of kernels_rows_tmpl.h. Columns or rows are independent of each other, so a whole register
// of them goes through the softmax at once. One pass does all that is to be done with a score while
// it is in a register: scale, mask, exp, sum and rounding to the pairs of bf16 that products take.
typedef int32_t reg_i32 __attribute__((vector_size(REG_BYTES)));

#define WIDTH    32 // columns
#define LOG2_E   1.44269504088896341f
#define EACH_REG (size_t c = 0; c < WIDTH; c += REG)

// 2^x for x <= 0, good to 2 ulp, and 0 below 2^-125: subnormals are slow. NaN goes through.
static inline reg exp2_reg(reg x) {
#if defined(__AVX512DQ__)
    const reg r = (reg)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const float magic = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const uint32_t magic_bits = 0x4b400000u;
    x = max_reg(x, (reg){0} - 127.0f);
    const reg t = x + magic, r = x - (t - magic);
#endif
    reg p = r * 0x1.41d334p-13f + 0x1.5f456ap-10f; // minimax on |r| <= 1/2
    p = p * r + 0x1.3b2dbcp-7f;
    p = p * r + 0x1.c6aed4p-5f;
    p = p * r + 0x1.ebfbdap-3f;
    p = p * r + 0x1.62e430p-1f;
    p = p * r + 1.0f;
#if defined(__AVX512DQ__)
    const __mmask16 not_small = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-125), _CMP_NLT_UQ);
    return (reg)_mm512_maskz_scalef_ps(not_small, (__m512)p, (__m512)(x - r));
#else
    return p * (reg)(((reg_u32)t - magic_bits + 127) << 23); // times 0 for -127
#endif
}

static inline reg choose(reg_u32 mask, reg a, reg b) {
    return (reg)((mask & (reg_u32)a) | (~mask & (reg_u32)b));
}

// Of row i, where columns from c on are seen.
INLINE reg_u32 seen_of(const dpl_scores *b, bool keys_down, int32_t i, size_t c) {
    static const int32_t numbers[WIDTH] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10,
                                           11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                           22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
    reg_i32 column, segment;
    memcpy(&column, numbers + c, sizeof column);
    reg_u32 seen = keys_down ? (reg_u32)(column >= i + b->key_minus_query)
                             : (reg_u32)(column <= i - b->key_minus_query);
    if (b->row_segment) {
        memcpy(&segment, b->column_segment + c, sizeof segment);
        seen &= (reg_u32)(segment == b->row_segment[i]);
    }
    return seen;
}

// The instruction takes subnormals as zero, and so do products of bf16.
INLINE void store_words(uint16_t *to, reg x) {
#if defined(__AVX512BF16__)
    const reg_u16 words = (reg_u16)_mm512_cvtneps_pbh((__m512)x);
#else
    const reg_u16 words = __builtin_convertvector(bf16_above(x) >> 16, reg_u16);
#endif
    memcpy(to, &words, sizeof words);
}

// Two rows, or one and zeros, as pairs of bf16.
INLINE void store_pairs(uint16_t *to, reg even, reg odd) {
#if defined(__AVX512BF16__)
    static const uint16_t order[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                       21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                       11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i words = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    const __m512i pairs = _mm512_permutexvar_epi16(_mm512_loadu_si512(order), words);
#else
    const reg_u32 low = bf16_above(even) >> 16, high = bf16_above(odd) & 0xffff0000u;
    const reg_u32 pairs = low | high;
#endif
    memcpy(to, &pairs, sizeof pairs);
}

// The maximum of a column with what is hidden as -inf, also in memory.
INLINE reg column_max(const dpl_scores *b, size_t n, float *score, size_t c, reg max) {
    const int64_t all_see = b->row_segment ? 0 : 1 - (int64_t)b->key_minus_query;
    const size_t n_free = (size_t)DPL_MIN((int64_t)n, DPL_MAX(all_see, 0));
    reg best[4] = {max, max, max, max};
    size_t i = 0;
    for (; i + 4 <= n_free; i += 4)
        for (size_t j = 0; j < 4; j++)
            best[j] = max_reg(best[j], load(score + (i + j) * WIDTH + c));
    for (; i < n_free; i++) best[0] = max_reg(best[0], load(score + i * WIDTH + c));
    for (; i < n; i++) {
        float *s = score + i * WIDTH + c;
        const reg x = choose(seen_of(b, true, (int32_t)i, c), load(s), (reg){0} - INFINITY);
        best[0] = max_reg(best[0], x);
        store(s, x);
    }
    return max_reg(max_reg(best[0], best[1]), max_reg(best[2], best[3]));
}

INLINE reg softmax_column(size_t n, float scale, reg max, float *score, uint16_t *pairs) {
    reg even = {0}, odd = {0};
    const reg shift = max * scale;
    for (size_t i = 0; i < n; i += 2, score += 2 * WIDTH) {
        reg p[2] = {exp2_reg(load(score) * scale - shift)};
        if (i + 1 < n) p[1] = exp2_reg(load(score + WIDTH) * scale - shift);
        even += p[0];
        odd += p[1];
        if (pairs) store_pairs(pairs + i * WIDTH, p[0], p[1]);
        if (pairs) continue;
        store(score, p[0]);
        if (i + 1 < n) store(score + WIDTH, p[1]);
    }
    return even + odd;
}

static bool row_softmax(const dpl_scores *b, size_t n, float *score, uint16_t *pairs, float *max,
                        float *sum, float *shrink) {
    const float scale = b->scale * LOG2_E;
    reg_u32 changed = {0};
    for
        EACH_REG {
            const reg before = load(max + c), now = column_max(b, n, score, c, before);
            // Where nothing was seen until now there is nothing to shrink, and no -inf - -inf.
            const reg_u32 some = (reg_u32)(before > -INFINITY),
                          more = some & (reg_u32)(now > before);
            const reg less = choose(more, (before - now) * scale, (reg){0});
            const reg factor = choose(more, exp2_reg(less), (reg){0} + 1.0f);
            const reg top = choose((reg_u32)(now > -INFINITY), now, (reg){0});
            const reg add = pairs ? softmax_column(n, scale, top, score + c, pairs + 2 * c)
                                  : softmax_column(n, scale, top, score + c, NULL);
            store(sum + c, load(sum + c) * factor + add);
            store(max + c, now);
            store(shrink + c, factor);
            changed |= more;
        }
    uint32_t any = 0, lane[REG];
    memcpy(lane, &changed, sizeof lane);
    for (size_t l = 0; l < REG; l++) any |= lane[l];
    return any != 0;
}

// Probabilities (the first) and their gradients of row i from column c on.
INLINE void grad_row(const dpl_scores *b, bool masked, size_t i, size_t c, const float *score,
                     const float *dp, reg p_d[2]) {
    const reg x = load(score + i * WIDTH + c) * (b->scale * LOG2_E) - b->lse[i] * LOG2_E;
    const reg p = exp2_reg(x);
    const reg d = p * (load(dp + i * WIDTH + c) * b->scale - b->delta[i] * b->scale);
    const reg_u32 seen = masked ? seen_of(b, false, (int32_t)i, c) : ~(reg_u32){0};
    p_d[0] = (reg)(seen & (reg_u32)p);
    p_d[1] = (reg)(seen & (reg_u32)d);
}

INLINE void grad_rows(const dpl_scores *where, bool masked, bool bf16, size_t n, float *score,
                      float *dp, uint16_t *p_pairs, uint16_t *d_pairs, uint16_t *d_rows) {
    const dpl_scores b = *where; // which no store changes
    for (size_t i = 0; i < n; i += 2)
        for
            EACH_REG {
                const size_t at = i * WIDTH + c;
                reg x[2] = {{0}}, y[2] = {{0}};
                grad_row(&b, masked, i, c, score, dp, x);
                if (i + 1 < n) grad_row(&b, masked, i + 1, c, score, dp, y);
                if (bf16) {
                    store_pairs(p_pairs + at + c, x[0], y[0]);
                    store_pairs(d_pairs + at + c, x[1], y[1]);
                    store_words(d_rows + at, x[1]);
                    if (i + 1 < n) store_words(d_rows + at + WIDTH, y[1]);
                    continue;
                }
                store(score + at, x[0]);
                store(dp + at, x[1]);
                if (i + 1 == n) continue;
                store(score + at + WIDTH, y[0]);
                store(dp + at + WIDTH, y[1]);
            }
}

static void row_softmax_backward(const dpl_scores *b, size_t n, float *score, float *dp,
                                 uint16_t *p_pairs, uint16_t *d_pairs, uint16_t *d_rows) {
    const bool masked = b->row_segment || b->key_minus_query + WIDTH - 1 > 0;
#define GRAD_ROWS(masked, bf16) grad_rows(b, masked, bf16, n, score, dp, p_pairs, d_pairs, d_rows)
    if (masked && p_pairs) GRAD_ROWS(true, true);
    else if (masked) GRAD_ROWS(true, false);
    else if (p_pairs) GRAD_ROWS(false, true);
    else GRAD_ROWS(false, false);
}

// Of two rows that may be bf16.
static float row_dot_as(dpl_dtype x_type, const void *x, dpl_dtype y_type, const void *y,
                        size_t n) {
    reg sum[N_REGS] = {0};
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (size_t r = 0, j = i; r < N_REGS; r++, j += REG)
            sum[r] += load_any(x_type, x, j) * load_any(y_type, y, j);
    float lane[LANES];
    memcpy(lane, sum, sizeof lane);
    for (; i < n; i++) lane[i % LANES] += at_any(x_type, x, i) * at_any(y_type, y, i);
    return fold(lane);
}

static void row_scale_columns(const float *factor, float *x, size_t n) {
    for
        EACH_REG
    for (size_t i = 0; i < n; i++)
        store(x + i * WIDTH + c, load(x + i * WIDTH + c) * load(factor + c));
}
