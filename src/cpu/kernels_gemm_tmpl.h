// kernels_gemm_tmpl.h - the grouped GEMM's tile product and packing, for any width of vector.
//
// Included by kernels_LEVEL.c, which says what a register is: V floats as `vec`, OP(name) for
// its intrinsics, the tile's MR rows as EACH(X), loads and stores of the first n lanes, and how two
// registers' 128-bit lanes of even or odd number are joined. Every file has its own compiler flags;
// they make a multiply-add of each a * b + c.
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

typedef uint32_t vec_u32 __attribute__((vector_size(sizeof(vec))));

#define HIGH ((vec_u32){0} + 0xffff0000u) // the odd one of each pair of bf16

/* ---- tile product ---------------------------------------------------------------------------- */
// How the operands lie: both fp32; left fp32, right pairs of bf16; both pairs.
typedef enum tile_kind { TILE_F32, TILE_PAIRS, TILE_DOT } tile_kind;

// Few rows of narrow registers are twice as wide: else too few chains would be under way.
#define WIDE(m) (4 * V == 32 && (m) <= MR / 2)

// Accumulators have names, not an index: clang keeps an array of them in memory.
#define ZERO(i) vec acc0_##i = {0}, acc1_##i = {0}, acc2_##i = {0}, acc3_##i = {0};
#define PREFETCH(i)                                                 \
    if (i < m) {                                                    \
        _mm_prefetch((const char *)(c + i * ldc), _MM_HINT_T0);     \
        _mm_prefetch((const char *)(c + i * ldc + V), _MM_HINT_T0); \
    }
#define FETCH                                  \
    _mm_prefetch(fetch, _MM_HINT_T1);          \
    _mm_prefetch(fetch + beside, _MM_HINT_T1); \
    fetch += --left ? step : jump;             \
    left = left ? left : run;
// The line of the other half of a narrow tile: the hardware does not follow every second line.
#define FETCH_OTHER \
    if (4 * V == 32 && !WIDE(m) && first) _mm_prefetch((const char *)(b + 2 * V), _MM_HINT_T0);
#define STEP(i)                                                 \
    if (i < m) {                                                \
        const vec ai = OP(set1_ps)(a[i]);                       \
        acc0_##i = OP(fmadd_ps)(ai, b0, acc0_##i);              \
        acc1_##i = OP(fmadd_ps)(ai, b1, acc1_##i);              \
        if (WIDE(m)) acc2_##i = OP(fmadd_ps)(ai, b2, acc2_##i); \
        if (WIDE(m)) acc3_##i = OP(fmadd_ps)(ai, b3, acc3_##i); \
    }
#define STORE_AT(i, at, acc)                        \
    if (add) acc += OP(loadu_ps)(c + i * ldc + at); \
    OP(storeu_ps)(c + i * ldc + at, acc);
#define STORE(i)                         \
    if (i < m) {                         \
        STORE_AT(i, 0, acc0_##i)         \
        STORE_AT(i, V, acc1_##i)         \
        if (WIDE(m)) {                   \
            STORE_AT(i, 2 * V, acc2_##i) \
            STORE_AT(i, 3 * V, acc3_##i) \
        }                                \
    }
#ifndef DOT // the pairs of a[i] times those of b0 and b1, at a level that can
#define DOT(i)
#endif

// 2 * V columns of a tile, or 4 * V. A load of V floats from b is V columns of pairs as well.
INLINE void tile_rows(tile_kind kind, bool first, size_t m, size_t kc, const float *a,
                      const float *b, float *c, size_t ldc, bool add, dpl_gemm_ahead ahead) {
    const char *fetch = ahead.p;
    // Two lines at a time at most: what is more than that would keep the loads waiting.
    const size_t more = ahead.each > 1, beside = more * ahead.step;
    const size_t step = ahead.step + beside, jump = ahead.jump + beside;
    const size_t run = ahead.run >> more;
    size_t left = run;
    EACH(ZERO)
    EACH(PREFETCH) // Also when c is only written: its lines arrive before they are needed.
    if (kind != TILE_PAIRS) {
        for (size_t l = 0; l < kc; l += kind == TILE_DOT ? 2 : 1, a += m, b += 32) {
            FETCH
            FETCH_OTHER
            const vec b0 = OP(loadu_ps)(b), b1 = OP(loadu_ps)(b + V);
            const vec b2 = WIDE(m) ? OP(loadu_ps)(b + 2 * V) : b0;
            const vec b3 = WIDE(m) ? OP(loadu_ps)(b + 3 * V) : b0;
            if (kind == TILE_DOT) {
                EACH(DOT)
            } else {
                EACH(STEP)
            }
        }
    } else {
        for (size_t l = 0; l < kc; l += 2, a += m, b += 32) {
            FETCH
            FETCH_OTHER
            const vec_u32 w0 = (vec_u32)OP(loadu_ps)(b), w1 = (vec_u32)OP(loadu_ps)(b + V);
            const vec_u32 w2 = WIDE(m) ? (vec_u32)OP(loadu_ps)(b + 2 * V) : w0;
            const vec_u32 w3 = WIDE(m) ? (vec_u32)OP(loadu_ps)(b + 3 * V) : w0;
            vec b0 = (vec)(w0 & HIGH), b1 = (vec)(w1 & HIGH);
            vec b2 = (vec)(w2 & HIGH), b3 = (vec)(w3 & HIGH);
            a += m;
            EACH(STEP)
            b0 = (vec)(w0 << 16), b1 = (vec)(w1 << 16);
            b2 = (vec)(w2 << 16), b3 = (vec)(w3 << 16);
            a -= m;
            EACH(STEP)
            a += m;
        }
    }
    EACH(STORE)
}

// Each row count has its own copy, so that few rows cost few instructions.
#define ROWS(i)                                                               \
    case i + 1:                                                               \
        tile_rows(kind, j == 0, i + 1, kc, a, b + j, c + j, ldc, add, ahead); \
        break;

INLINE void tile(tile_kind kind, size_t m, size_t kc, const float *a, const float *b, float *c,
                 size_t ldc, bool add, dpl_gemm_ahead ahead) {
    for (size_t j = 0; j < 32; j += WIDE(m) ? 4 * V : 2 * V) {
        switch (m) { EACH(ROWS) }
    }
}

#define TILE(name, kind)                                                                 \
    static inline void name(size_t m, size_t kc, const void *a, const void *b, float *c, \
                            size_t ldc, bool add, dpl_gemm_ahead ahead) {                \
        tile(kind, m, kc, a, b, c, ldc, add, ahead);                                     \
    }
TILE(tile_f32, TILE_F32)
TILE(tile_pairs, TILE_PAIRS)

// VDPBF16PS takes subnormals as zero; multiply-adds do if they are told to.
static inline unsigned flush_subnormals(void) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    return before;
}

static inline void restore_subnormals(unsigned before) {
    _mm_setcsr(before);
}

/* ---- packing --------------------------------------------------------------------------------- */
// What packing makes of elements: fp32, fp32 that are bf16, or pairs of bf16 (rounded last).
typedef enum pack_kind { PACK_F32, PACK_ROUNDED, PACK_PAIRS } pack_kind;

// fp32 rounded to bf16 and back; nearest even, NaN made quiet, as dpl_f32_to_bf16 does.
INLINE vec round_to_bf16(vec x) {
    const vec_u32 bits = (vec_u32)x, nan = (vec_u32)(x != x);
    const vec_u32 rounded = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 0x400000;
    return (vec)(((nan & quiet) | (~nan & rounded)) & HIGH);
}

// The first n of V elements from src[i] on, zeros after them.
INLINE vec load_as(pack_kind kind, dpl_gemm_load load, size_t n, const void *src, size_t i) {
    if (load == DPL_LOAD_BF16) return load_bf16(n, (const uint16_t *)src + i);
    vec x = load_f32(n, (const float *)src + i);
    if (kind == PACK_F32) return x;
    if (load == DPL_LOAD_PART2 || load == DPL_LOAD_PART3) x -= round_to_bf16(x);
    if (load == DPL_LOAD_PART3) x -= round_to_bf16(x);
    return kind == PACK_PAIRS ? x : round_to_bf16(x);
}

// Transposes the matrix whose rows are r[0..group * V / 4], of elements of which `group` fill a
// 128-bit lane: 4 of 32 bits or 2 of 64.
INLINE void transpose(int group, vec *r) {
    const int n = group * V / 4;
    vec t[V];
    UNROLL for (int i = 0; i < n; i += group) { // blocks inside each 128-bit lane
        if (group == 2) {
            const vec lo = (vec)OP(unpacklo_pd)((vec_f64)r[i], (vec_f64)r[i + 1]);
            r[i + 1] = (vec)OP(unpackhi_pd)((vec_f64)r[i], (vec_f64)r[i + 1]);
            r[i] = lo;
            continue;
        }
        const vec lo0 = OP(unpacklo_ps)(r[i], r[i + 1]), lo1 = OP(unpacklo_ps)(r[i + 2], r[i + 3]);
        const vec hi0 = OP(unpackhi_ps)(r[i], r[i + 1]), hi1 = OP(unpackhi_ps)(r[i + 2], r[i + 3]);
        r[i] = OP(shuffle_ps)(lo0, lo1, 0x44);
        r[i + 1] = OP(shuffle_ps)(lo0, lo1, 0xee);
        r[i + 2] = OP(shuffle_ps)(hi0, hi1, 0x44);
        r[i + 3] = OP(shuffle_ps)(hi0, hi1, 0xee);
    }
    UNROLL for (int lanes = 1; lanes < V / 4; lanes *= 2) { // then the blocks
        UNROLL for (int i = 0; i < n; i++) t[i] = r[i];
        UNROLL for (int i = 0; i < n / 2; i++) {
            const vec even = t[i / group * 2 * group + i % group];
            const vec odd = t[i / group * 2 * group + i % group + group];
            r[i] = even_lanes(even, odd);
            r[i + n / 2] = odd_lanes(even, odd);
        }
    }
}

// Dst rows of w, of which V from i on are written and `left` rows are to come: what would be
// written too much is overwritten, where there is something to come.
INLINE void store_packed(size_t i, size_t w, size_t left, float *dst, vec x) {
    store_f32(w - i, w < V && left * w >= V, dst + i, x);
}

// fp32 out, for kinds F32 and ROUNDED.
INLINE void rows_as(pack_kind kind, dpl_gemm_load load, size_t m, size_t kc, const void *src,
                    size_t ld, size_t w, float *dst) {
    for (size_t i0 = 0; i0 < w; i0 += V) {
        for (size_t l0 = 0; l0 < kc; l0 += V) {
            vec r[V];
            UNROLL for (size_t i = 0; i < V; ++i) {
                if (i0 + i < m) r[i] = load_as(kind, load, kc - l0, src, (i0 + i) * ld + l0);
                else r[i] = (vec){0};
            }
            transpose(4, r);
            UNROLL for (size_t l = 0; l < V; ++l) if (l0 + l < kc)
                store_packed(i0, w, kc - l0 - l, dst + (l0 + l) * w, r[l]);
        }
    }
}

INLINE void cols_as(pack_kind kind, dpl_gemm_load load, size_t m, size_t kc, const void *src,
                    size_t ld, size_t w, float *dst) {
    for (size_t i = 0; i < w; i += V) {
        const size_t n = m > i ? m - i : 0;
        for (size_t l = 0; l < kc; ++l)
            store_packed(i, w, kc - l, dst + l * w, load_as(kind, load, n, src, l * ld + i));
    }
}

INLINE vec pair_of(vec even, vec odd) { // of fp32 that are bf16
    return (vec)((vec_u32)even >> 16 | ((vec_u32)odd & HIGH));
}

#ifndef PAIRS_NATIVE // else the level has its own
// Of two rows, rounded: V pairs of what stands in both.
INLINE vec pairs_across(vec even, vec odd) {
    return pair_of(round_to_bf16(even), round_to_bf16(odd));
}

// Of 2 * V elements of a row, rounded: pair q comes to lane pair_lane(q).
INLINE vec pairs_along(vec low, vec high) {
    low = round_to_bf16(low), high = round_to_bf16(high);
    return pair_of(OP(shuffle_ps)(low, high, 0x88), OP(shuffle_ps)(low, high, 0xdd));
}

INLINE size_t pair_lane(size_t q) {
    return q < V / 2 ? q / 2 * 4 + q % 2 : (q - V / 2) / 2 * 4 + 2 + q % 2;
}

INLINE void put_bf16(size_t n, const float *c, uint16_t *dst) {
    UNROLL for (size_t j = 0; j < 32; j += V) if (j < n)
        store_bf16(n - j, dst + j, round_to_bf16(OP(loadu_ps)(c + j)));
}
#endif

// V pairs along l from src[i] on, n elements of which exist.
INLINE vec load_pairs(dpl_gemm_load load, size_t n, const void *src, size_t i) {
    if (load == DPL_LOAD_BF16) return load_words(n, (const uint16_t *)src + i);
    const vec low = load_as(PACK_PAIRS, load, n, src, i);
    return pairs_along(low, load_as(PACK_PAIRS, load, n > V ? n - V : 0, src, i + V));
}

INLINE void rows_pairs_as(dpl_gemm_load load, size_t m, size_t kc, const void *src, size_t ld,
                          size_t w, float *dst) {
    const size_t n_pairs = (kc + 1) / 2;
    for (size_t i0 = 0; i0 < w; i0 += V) {
        for (size_t q0 = 0; q0 < n_pairs; q0 += V) {
            vec r[V];
            UNROLL for (size_t i = 0; i < V; ++i) {
                if (i0 + i < m) r[i] = load_pairs(load, kc - 2 * q0, src, (i0 + i) * ld + 2 * q0);
                else r[i] = (vec){0};
            }
            transpose(4, r);
            UNROLL for (size_t q = 0; q < V; ++q) if (q0 + q < n_pairs)
                store_packed(i0, w, n_pairs - q0 - q, dst + (q0 + q) * w,
                             r[load == DPL_LOAD_BF16 ? q : pair_lane(q)]);
        }
    }
}

INLINE void cols_pairs_as(dpl_gemm_load load, size_t m, size_t kc, const void *src, size_t ld,
                          size_t w, float *dst) {
    const size_t n_pairs = (kc + 1) / 2;
    for (size_t i = 0; i < w; i += V) {
        const size_t n = m > i ? m - i : 0;
        for (size_t q = 0; q < n_pairs; ++q) {
            const vec even = load_as(PACK_PAIRS, load, n, src, 2 * q * ld + i);
            const size_t n_odd = 2 * q + 1 < kc ? n : 0;
            const vec odd = load_as(PACK_PAIRS, load, n_odd, src, (2 * q + (n_odd > 0)) * ld + i);
            store_packed(i, w, n_pairs - q, dst + q * w,
                         load == DPL_LOAD_BF16 ? pair_of(even, odd) : pairs_across(even, odd));
        }
    }
}

// A copy for each way to load, so that the loops do not ask.
#define EACH_LOAD(call)                                    \
    if (load == DPL_LOAD_F32) call(DPL_LOAD_F32);          \
    else if (load == DPL_LOAD_BF16) call(DPL_LOAD_BF16);   \
    else if (load == DPL_LOAD_PART2) call(DPL_LOAD_PART2); \
    else call(DPL_LOAD_PART3);
#define PACK(name, body)                                                                         \
    static inline void name(dpl_gemm_load load, size_t m, size_t kc, const void *src, size_t ld, \
                            size_t w, void *dst) {                                               \
        body                                                                                     \
    }
#define ROWS_F32(how)     rows_as(PACK_F32, how, m, kc, src, ld, w, dst)
#define COLS_F32(how)     cols_as(PACK_F32, how, m, kc, src, ld, w, dst)
#define ROWS_ROUNDED(how) rows_as(PACK_ROUNDED, how, m, kc, src, ld, w, dst)
#define COLS_ROUNDED(how) cols_as(PACK_ROUNDED, how, m, kc, src, ld, w, dst)
#define ROWS_PAIRS(how)   rows_pairs_as(how, m, kc, src, ld, w, dst)
#define COLS_PAIRS(how)   cols_pairs_as(how, m, kc, src, ld, w, dst)
#define ZERO_ODD \
    if (kc % 2) memset((float *)dst + kc * w, 0, w * sizeof(float));
PACK(rows_f32, if (load == DPL_LOAD_BF16) ROWS_F32(DPL_LOAD_BF16); else ROWS_F32(DPL_LOAD_F32);)
PACK(cols_f32, if (load == DPL_LOAD_BF16) COLS_F32(DPL_LOAD_BF16); else COLS_F32(DPL_LOAD_F32);)
PACK(rows_rounded, EACH_LOAD(ROWS_ROUNDED) ZERO_ODD)
PACK(cols_rounded, EACH_LOAD(COLS_ROUNDED) ZERO_ODD)
PACK(rows_pairs, EACH_LOAD(ROWS_PAIRS))
PACK(cols_pairs, EACH_LOAD(COLS_PAIRS))

// Within each 64 bits (two l, each a pair along i) the middle words change places: so the pairs go
// along l. What is left is a transposition of elements of 64 bits: two pairs.
static inline void pairs_pairs(dpl_gemm_load load, size_t m, size_t kc, const void *src, size_t ld,
                               size_t w, void *dst) {
    (void)load;
    const size_t n_rows = (m + 1) / 2;
    for (size_t p0 = 0; p0 < w / 2; p0 += V / 2) {
        for (size_t l0 = 0; l0 < kc; l0 += V) {
            vec r[V / 2];
            UNROLL for (size_t p = 0; p < V / 2; ++p) {
                if (p0 + p < n_rows)
                    r[p] = swap_middle(OP(loadu_ps)((const float *)src + (p0 + p) * ld + l0));
                else r[p] = (vec){0};
            }
            transpose(2, r);
            UNROLL for (size_t q = 0; q < V / 2; ++q)
                OP(storeu_ps)((float *)dst + (l0 / 2 + q) * w + 2 * p0, r[q]);
        }
    }
}

/* ---- panels ---------------------------------------------------------------------------------- */
static inline void take(size_t m, size_t n, const float *src, size_t ld, float *c) {
    for (size_t i = 0; i < m; ++i)
        UNROLL for (size_t j = 0; j < 32; j += V) if (j < n)
            OP(storeu_ps)(c + i * 32 + j, load_f32(n - j, src + i * ld + j));
}

static inline void put(size_t m, size_t n, const float *c, dpl_dtype dtype, void *dst, size_t ld) {
    for (size_t i = 0; i < m; ++i, c += 32) {
        if (dtype == DPL_BF16) {
            put_bf16(n, c, (uint16_t *)dst + i * ld);
            continue;
        }
        UNROLL for (size_t j = 0; j < 32; j += V) if (j < n)
            store_f32(n - j, false, (float *)dst + i * ld + j, OP(loadu_ps)(c + j));
    }
}

/* ---- peak ------------------------------------------------------------------------------------ */
#define CHAINS 12 // more than latency times throughput of a multiply-add

static inline double peak_fma(size_t n_rounds, float *sink) {
    vec acc[CHAINS];
    const vec scale = OP(set1_ps)(sink[32]), shift = OP(set1_ps)(sink[33]);
    UNROLL for (int i = 0; i < CHAINS; ++i) acc[i] = OP(set1_ps)(sink[i]);
    for (size_t round = 0; round < n_rounds; ++round) {
        UNROLL for (int i = 0; i < CHAINS; ++i) acc[i] = OP(fmadd_ps)(acc[i], scale, shift);
    }
    UNROLL for (int i = 0; i < CHAINS; ++i) sink[i] = acc[i][0];
    return (double)n_rounds * CHAINS * V * 2;
}

/* ---- tables ---------------------------------------------------------------------------------- */
#define GEMM_F32(level)                                                                           \
    {                                                                                             \
        level, MR, DPL_GEMM_KC, 1, 4, 4, 1, DPL_GEMM_BLOCK, 1, tile_f32, rows_f32, cols_f32,      \
            rows_f32, cols_f32, NULL, take, put, NULL, 0, NULL, NULL, false, peak_fma, NULL, NULL \
    }
#define GEMM_BF16(level)                                                                     \
    {                                                                                        \
        level, MR, 2 * DPL_GEMM_KC, 2, 4, 2, 2, DPL_GEMM_BLOCK, 1, tile_pairs, rows_rounded, \
            cols_rounded, rows_pairs, cols_pairs, pairs_pairs, take, put, NULL, 0,           \
            flush_subnormals, restore_subnormals, true, peak_fma, NULL, NULL                 \
    }
