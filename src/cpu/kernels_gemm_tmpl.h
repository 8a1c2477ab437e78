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

/* ---- tile product ---------------------------------------------------------------------------- */
// Accumulators have names, not an index: clang keeps an array of them in memory.
#define ZERO(i) vec acc0_##i = {0}, acc1_##i = {0};
#define PREFETCH(i)                                                 \
    if (i < m) {                                                    \
        _mm_prefetch((const char *)(c + i * ldc), _MM_HINT_T0);     \
        _mm_prefetch((const char *)(c + i * ldc + V), _MM_HINT_T0); \
    }
#define STEP(i)                                    \
    if (i < m) {                                   \
        const vec ai = OP(set1_ps)(a[i]);          \
        acc0_##i = OP(fmadd_ps)(ai, b0, acc0_##i); \
        acc1_##i = OP(fmadd_ps)(ai, b1, acc1_##i); \
    }
#define STORE(i)                                \
    if (i < m) {                                \
        float *ci = c + i * ldc;                \
        if (add) {                              \
            acc0_##i += load_f32(n0, ci);       \
            acc1_##i += load_f32(n1, ci + V);   \
        }                                       \
        store_f32(n0, false, ci, acc0_##i);     \
        store_f32(n1, false, ci + V, acc1_##i); \
    }

// 2 * V columns of a tile, of which n are stored.
INLINE void tile_rows(size_t m, size_t n, size_t kc, const float *a, const float *b, float *c,
                      size_t ldc, bool add, dpl_gemm_ahead ahead) {
    const char *fetch = ahead.p;
    size_t left = ahead.run;
    const size_t n0 = DPL_MIN(n, (size_t)V), n1 = DPL_MIN(n - n0, (size_t)V);
    EACH(ZERO)
    EACH(PREFETCH) // Also when c is only written: its lines arrive before they are needed.
    for (size_t l = 0; l < kc; ++l, a += m, b += 32) {
        _mm_prefetch(fetch, _MM_HINT_T1);
        fetch += --left ? ahead.step : ahead.jump;
        left = left ? left : ahead.run;
        const vec b0 = OP(loadu_ps)(b), b1 = OP(loadu_ps)(b + V);
        EACH(STEP)
    }
    EACH(STORE)
}

// Each row count has its own copy, so that few rows cost few instructions.
#define ROWS(i)                                                        \
    case i + 1:                                                        \
        tile_rows(i + 1, n - j, kc, a, b + j, c + j, ldc, add, ahead); \
        break;

static void tile(size_t m, size_t n, size_t kc, const float *a, const float *b, float *c,
                 size_t ldc, bool add, dpl_gemm_ahead ahead) {
    for (size_t j = 0; j < 32 && j < n; j += 2 * V) {
        switch (m) { EACH(ROWS) }
    }
}

/* ---- packing --------------------------------------------------------------------------------- */
// fp32 rounded to bf16 and back; nearest even, NaN made quiet, as dpl_f32_to_bf16 does.
INLINE vec round_to_bf16(vec x) {
    const vec_u32 bits = (vec_u32)x, nan = (vec_u32)(x != x);
    const vec_u32 rounded = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 0x400000;
    return (vec)(((nan & quiet) | (~nan & rounded)) & 0xffff0000);
}

// The first n of V elements from src[i] on, zeros after them.
INLINE vec load_as(dpl_gemm_load load, size_t n, const void *src, size_t i) {
    if (load == DPL_LOAD_BF16) return load_bf16(n, (const uint16_t *)src + i);
    const vec x = load_f32(n, (const float *)src + i);
    return load == DPL_LOAD_F32 ? x : round_to_bf16(x);
}

INLINE void transpose(vec r[V]) {
    vec t[V];
    UNROLL for (int i = 0; i < V; i += 4) { // 4x4 blocks inside each 128-bit lane
        const vec lo0 = OP(unpacklo_ps)(r[i], r[i + 1]), lo1 = OP(unpacklo_ps)(r[i + 2], r[i + 3]);
        const vec hi0 = OP(unpackhi_ps)(r[i], r[i + 1]), hi1 = OP(unpackhi_ps)(r[i + 2], r[i + 3]);
        r[i] = OP(shuffle_ps)(lo0, lo1, 0x44);
        r[i + 1] = OP(shuffle_ps)(lo0, lo1, 0xee);
        r[i + 2] = OP(shuffle_ps)(hi0, hi1, 0x44);
        r[i + 3] = OP(shuffle_ps)(hi0, hi1, 0xee);
    }
    UNROLL for (int lanes = 1; lanes < V / 4; lanes *= 2) { // then the blocks
        UNROLL for (int i = 0; i < V; i++) t[i] = r[i];
        UNROLL for (int i = 0; i < V / 2; i++) {
            const vec even = t[i / 4 * 8 + i % 4], odd = t[i / 4 * 8 + i % 4 + 4];
            r[i] = even_lanes(even, odd);
            r[i + V / 2] = odd_lanes(even, odd);
        }
    }
}

INLINE void pack_rows_as(dpl_gemm_load load, size_t m, size_t kc, const void *src, size_t ld,
                         size_t w, float *dst) {
    for (size_t i0 = 0; i0 < w; i0 += V) {
        for (size_t l0 = 0; l0 < kc; l0 += V) {
            vec r[V];
            UNROLL for (size_t i = 0; i < V; ++i) {
                if (i0 + i < m) r[i] = load_as(load, kc - l0, src, (i0 + i) * ld + l0);
                else r[i] = (vec){0};
            }
            transpose(r);
            UNROLL for (size_t l = 0; l < V; ++l) {
                if (l0 + l < kc)
                    store_f32(w - i0, w < V && (kc - l0 - l) * w >= V, dst + (l0 + l) * w + i0,
                              r[l]);
            }
        }
    }
}

INLINE void pack_cols_as(dpl_gemm_load load, size_t m, size_t kc, const void *src, size_t ld,
                         size_t w, float *dst) {
    for (size_t i = 0; i < w; i += V) {
        const size_t n = m > i ? m - i : 0;
        for (size_t l = 0; l < kc; ++l) {
            const vec x = load_as(load, n, src, l * ld + i);
            store_f32(w - i, w < V && (kc - l) * w >= V, dst + l * w + i, x);
        }
    }
}

// A copy for each way to load, so that the loops do not ask.
#define PACK(name)                                                                        \
    static void name(dpl_gemm_load load, size_t m, size_t kc, const void *src, size_t ld, \
                     size_t w, float *dst) {                                              \
        if (load == DPL_LOAD_F32) name##_as(DPL_LOAD_F32, m, kc, src, ld, w, dst);        \
        else if (load == DPL_LOAD_BF16) name##_as(DPL_LOAD_BF16, m, kc, src, ld, w, dst); \
        else name##_as(DPL_LOAD_ROUNDED, m, kc, src, ld, w, dst);                         \
    }
PACK(pack_rows)
PACK(pack_cols)

/* ---- peak ------------------------------------------------------------------------------------ */
#define CHAINS 12 // more than latency times throughput of a multiply-add

static double peak_fma(size_t n_rounds, float *sink) {
    vec acc[CHAINS];
    const vec scale = OP(set1_ps)(sink[32]), shift = OP(set1_ps)(sink[33]);
    UNROLL for (int i = 0; i < CHAINS; ++i) acc[i] = OP(set1_ps)(sink[i]);
    for (size_t round = 0; round < n_rounds; ++round) {
        UNROLL for (int i = 0; i < CHAINS; ++i) acc[i] = OP(fmadd_ps)(acc[i], scale, shift);
    }
    UNROLL for (int i = 0; i < CHAINS; ++i) sink[i] = acc[i][0];
    return (double)n_rounds * CHAINS * V * 2;
}

#define GEMM_KERNELS MR, tile, pack_rows, pack_cols, peak_fma
