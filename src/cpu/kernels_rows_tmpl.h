// kernels_rows_tmpl.h - the row kernels as plain C, compiled once for each CPU level.
//
// Included by kernels_LEVEL.c, which only have other compiler flags. Loops are written so that
// gcc and clang vectorize them; reductions keep their lanes in a vector type of 16 floats, so the
// order of additions is the same on every machine and with every compiler. Between levels only the
// contraction of a * b + c into one rounding differs.
#include "cpu/kernels.h"
#include "cpu/ops.h"

#include <math.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Iterations of these loops are independent even where input and output are the same array. What
// clang does not vectorize (without optimization, with sanitizers) is right all the same.
#if defined(__clang__)
#pragma clang diagnostic ignored "-Wpass-failed"
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

// Reductions have 16 lanes (fp64: 8) at every level, in as few registers as the level needs.
#define LANES 16
#if defined(__AVX512F__)
#define REG_BYTES 64
#elif defined(__AVX2__)
#define REG_BYTES 32
#else
#define REG_BYTES 16
#endif
#define REG    (REG_BYTES / 4) // floats in a register
#define N_REGS (LANES / REG)
typedef float reg __attribute__((vector_size(REG_BYTES)));
typedef uint32_t reg_u32 __attribute__((vector_size(REG_BYTES)));
typedef uint16_t reg_u16 __attribute__((vector_size(REG_BYTES / 2)));

static inline reg load(const float *x) {
    reg v;
    memcpy(&v, x, sizeof v);
    return v;
}

static inline void store(float *x, reg v) {
    memcpy(x, &v, sizeof v);
}

// Where a is chosen unless b is better; so a NaN in a stays, and one in b is passed over.
#if defined(__AVX512F__)
#define PICK(op, better, a, b) ((reg)_mm512_##op##_ps((__m512)(b), (__m512)(a)))
#elif defined(__AVX2__)
#define PICK(op, better, a, b) ((reg)_mm256_##op##_ps((__m256)(b), (__m256)(a)))
#else
#define PICK(op, better, a, b) \
    ((reg)(((reg_u32)(better) & (reg_u32)(b)) | (~(reg_u32)(better) & (reg_u32)(a))))
#endif
static inline reg max_reg(reg a, reg b) {
    return PICK(max, b > a, a, b);
}

static inline reg min_reg(reg a, reg b) {
    return PICK(min, b < a, a, b);
}

typedef union word {
    float f;
    uint32_t u;
} word;

static inline uint32_t bits_of(float f) {
    return (word){.f = f}.u;
}

static inline float float_of(uint32_t u) {
    return (word){.u = u}.f;
}

// A kernel that computes `expression` for each i < n.
#define ELEMENTWISE(name, expression, ...)           \
    static void row_##name(__VA_ARGS__, size_t n) {  \
        INDEPENDENT for (size_t i = 0; i < n; i++) { \
            expression;                              \
        }                                            \
    }

/* ---- reductions ------------------------------------------------------------------------------ */
// Halves are folded onto each other, so that near lanes meet last.
typedef float lanes_8 __attribute__((vector_size(LANES / 2 * 4)));
typedef float lanes_4 __attribute__((vector_size(LANES)));

INLINE float fold(const void *lanes) {
    lanes_8 a[2];
    lanes_4 b[2];
    memcpy(a, lanes, sizeof a);
    a[0] += a[1];
    memcpy(b, a, sizeof b);
    b[0] += b[1];
    return (b[0][0] + b[0][2]) + (b[0][1] + b[0][3]);
}

// The sum of x * y * z, of which z may be NULL. Two sets of lanes hide the latency of the
// additions; the last elements go into lanes 0, 1, ...
INLINE float sum_products(const float *x, const float *y, const float *z, size_t n) {
    reg sum[2 * N_REGS] = {0};
    size_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES)
        for (size_t r = 0, j = i; r < 2 * N_REGS; r++, j += REG) {
            const reg xy = load(x + j) * load(y + j);
            sum[r] += z ? xy * load(z + j) : xy;
        }
    for (int r = 0; r < N_REGS; r++) sum[r] += sum[r + N_REGS];
    float lane[LANES];
    memcpy(lane, sum, sizeof lane);
    for (; i < n; i++) lane[i % LANES] += x[i] * y[i] * (z ? z[i] : 1);
    return fold(lane);
}

static float row_dot(const float *x, const float *y, size_t n) {
    return sum_products(x, y, NULL, n);
}

static float row_norm_dot(const float *dy, const float *gain, const float *x, size_t n) {
    return sum_products(dy, gain, x, n);
}

// Products and sums in the order of sum_products().
static float row_add_squares(const float *a, const float *b, float *y, size_t n) {
    reg sum[2 * N_REGS] = {0};
    size_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES)
        for (size_t r = 0, j = i; r < 2 * N_REGS; r++, j += REG) {
            const reg v = load(a + j) + load(b + j);
            store(y + j, v);
            sum[r] += v * v;
        }
    for (int r = 0; r < N_REGS; r++) sum[r] += sum[r + N_REGS];
    float lane[LANES];
    memcpy(lane, sum, sizeof lane);
    for (; i < n; i++) {
        const float v = a[i] + b[i];
        y[i] = v;
        lane[i % LANES] += v * v;
    }
    return fold(lane);
}

static float row_max(const float *x, size_t n) {
    reg best[4];
    for (int r = 0; r < 4; r++) best[r] = (reg){0} - INFINITY;
    size_t i = 0;
    for (; i + 4 * REG <= n; i += 4 * REG)
        for (int r = 0; r < 4; r++) best[r] = max_reg(best[r], load(x + i + r * REG));
    for (; i + REG <= n; i += REG) best[0] = max_reg(best[0], load(x + i));
    const reg top = max_reg(max_reg(best[0], best[1]), max_reg(best[2], best[3]));
    float lane[REG];
    store(lane, top);
    for (; i < n; i++) lane[0] = x[i] > lane[0] ? x[i] : lane[0];
    for (int half = REG / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++)
            lane[l] = lane[l + half] > lane[l] ? lane[l + half] : lane[l];
    return lane[0];
}

// The square of a float is exact in fp64 and cannot overflow there.
INLINE double sum_powers_f64(const float *x, size_t n, bool square) {
    double t[LANES / 2] = {0};
    size_t i = 0;
    for (; i + LANES / 2 <= n; i += LANES / 2)
        for (size_t l = 0; l < LANES / 2; l++)
            t[l] += (double)x[i + l] * (square ? (double)x[i + l] : 1);
    for (size_t l = 0; i < n; i++, l++) t[l] += (double)x[i] * (square ? (double)x[i] : 1);
    return ((t[0] + t[4]) + (t[2] + t[6])) + ((t[1] + t[5]) + (t[3] + t[7]));
}

static double row_sum_f64(const float *x, bool squares, size_t n) {
    return squares ? sum_powers_f64(x, n, true) : sum_powers_f64(x, n, false);
}

/* ---- elementwise ----------------------------------------------------------------------------- */
// To nearest even; the result is in the upper half, below it anything.
static inline reg_u32 bf16_above(reg x) {
    const reg_u32 u = (reg_u32)x, nan = (reg_u32)(x != x);
    return (nan & (u | 0x400000u)) | (~nan & (u + 0x7fffu + ((u >> 16) & 1u)));
}

static inline reg_u16 bf16_reg(reg x) {
#if defined(__AVX512BF16__)
    // The instruction takes subnormals as zero.
    if (__builtin_expect(_mm512_fpclass_ps_mask((__m512)x, 0x20) == 0, 1))
        return (reg_u16)_mm512_cvtneps_pbh((__m512)x);
#endif
    return __builtin_convertvector(bf16_above(x) >> 16, reg_u16);
}

static void row_to_bf16(const float *x, uint16_t *y, size_t n) {
    size_t i = 0;
    for (; i + REG <= n; i += REG) {
        const reg_u16 h = bf16_reg(load(x + i));
        memcpy(y + i, &h, sizeof h);
    }
    for (; i < n; i++) y[i] = dpl_f32_to_bf16(x[i]);
}

static void row_to_bf16_pairs(const float *x, uint16_t *y, size_t n) {
    for (size_t i = 0; i < n; i += 64)
        for (size_t j = 0; j < 32; j += REG) {
            const reg_u32 low = bf16_above(load(x + i + j));
            const reg_u32 high = bf16_above(load(x + i + 32 + j));
            const reg_u32 pairs = (low >> 16) | (high & 0xffff0000u);
            memcpy(y + i + 2 * j, &pairs, sizeof pairs);
        }
}

ELEMENTWISE(axpy, y[i] += a * x[i], float a, const float *x, float *y)
ELEMENTWISE(add, y[i] = a[i] + b[i], const float *a, const float *b, float *y)
ELEMENTWISE(scale, x[i] *= a, float a, float *x)
ELEMENTWISE(from_bf16, y[i] = float_of((uint32_t)x[i] << 16), const uint16_t *x, float *y)
ELEMENTWISE(norm_forward, y[i] = x[i] * rstd * gain[i], const float *x, const float *gain,
            float rstd, float *y)

// p * 2^n for whole numbers n from -151 to 129, in two factors or by an instruction that does so:
// results down to the smallest subnormal and up to infinity come out right.
static inline reg times_power(reg p, reg n) {
#if defined(__AVX512F__)
    return (reg)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    // Adding this leaves n + 512 in the low bits; NaN: any bits will do.
    const reg_u32 k = (reg_u32)(n + 12583424.0f) & 0x3ff, half = k >> 1;
    return p * (reg)((half - 256 + 127) << 23) * (reg)((k - half - 256 + 127) << 23);
#endif
}

INLINE reg widened(const uint16_t *x) {
#if defined(__AVX512F__) // gcc 12 makes two instructions of the conversion below
    const __m512i u = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)x));
    return (reg)_mm512_slli_epi32(u, 16);
#else
    reg_u16 h;
    memcpy(&h, x, sizeof h);
    return (reg)(__builtin_convertvector(h, reg_u32) << 16);
#endif
}

INLINE reg load_any(dpl_dtype type, const void *x, size_t i) {
    return type == DPL_F32 ? load((const float *)x + i) : widened((const uint16_t *)x + i);
}

INLINE float at_any(dpl_dtype type, const void *x, size_t i) {
    return type == DPL_F32 ? ((const float *)x)[i] : dpl_bf16_to_f32(((const uint16_t *)x)[i]);
}

INLINE void store_any(dpl_dtype type, void *y, size_t i, reg v) {
    if (type == DPL_F32) {
        store((float *)y + i, v);
        return;
    }
    const reg_u16 h = bf16_reg(v);
    memcpy((uint16_t *)y + i, &h, sizeof h);
}

// A few elements.
INLINE void copy_any(dpl_dtype type, const void *x, size_t x_at, dpl_dtype y_type, void *y,
                     size_t y_at, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const float v = at_any(type, x, x_at + i);
        if (y_type == DPL_F32) ((float *)y)[y_at + i] = v;
        else ((uint16_t *)y)[y_at + i] = dpl_f32_to_bf16(v);
    }
}

INLINE void sum_rows(dpl_dtype type, const void *const *rows, size_t n_rows, bool accumulate,
                     float *y, size_t n) {
    size_t j = 0;
    for (; j + REG <= n; j += REG) {
        reg sum = load_any(type, rows[0], j);
        for (size_t i = 1; i < n_rows; i++) sum += load_any(type, rows[i], j);
        store(y + j, accumulate ? load(y + j) + sum : sum);
    }
    for (; j < n; j++) {
        float sum = at_any(type, rows[0], j);
        for (size_t i = 1; i < n_rows; i++) sum += at_any(type, rows[i], j);
        y[j] = accumulate ? y[j] + sum : sum;
    }
}

static void row_sum_rows(dpl_dtype type, const void *const *rows, size_t n_rows, bool accumulate,
                         float *y, size_t n) {
    if (type == DPL_F32) sum_rows(DPL_F32, rows, n_rows, accumulate, y, n);
    else sum_rows(DPL_BF16, rows, n_rows, accumulate, y, n);
}

// exp without branches: x = n ln 2 + r, |r| <= ln 2 / 2, and a polynomial for e^r whose relative
// error is at most 3.1e-9 (by Remez' exchange with the first two coefficients held at 1).
static inline reg exp_reg(reg x) {
    const float magic = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer
    x = min_reg(max_reg(x, (reg){0} - 104.0f), (reg){0} + 89.0f);
    const reg n = x * 1.44269504088896341f + magic - magic;
    reg r = x - n * 0.693145751953125f; // ln 2 in two parts, the first times n is exact
    r = r - n * 1.42860682030941723e-6f;
    reg p = r * 0.001381454011592057f + 0.00836874514940075f;
    p = p * r + 0.04166839078794084f;
    p = p * r + 0.16666520398710893f;
    p = p * r + 0.4999999343210075f;
    p = p * (r * r) + r;
    return times_power(p + 1.0f, n);
}

static inline reg sigmoid_reg(reg x) {
    return 1.0f / (1.0f + exp_reg(-x));
}

INLINE void exp_block(const float *x, float sub, float *y, reg *sum) {
    for (int r = 0; r < N_REGS; r++) {
        const reg e = exp_reg(load(x + r * REG) - sub);
        sum[r] += e;
        store(y + r * REG, e);
    }
}

// The last n % LANES elements are computed in a buffer.
static float row_exp_sub_sum(const float *x, float sub, float *y, size_t n) {
    reg sum[N_REGS] = {0};
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) exp_block(x + i, sub, y + i, sum);
    if (i < n) {
        float t[LANES];
        for (size_t l = 0; l < LANES; l++) t[l] = i + l < n ? x[i + l] : -INFINITY; // adds 0
        exp_block(t, sub, t, sum);
        memcpy(y + i, t, (n - i) * sizeof *t);
    }
    return fold(sum);
}

static void row_sigmoid(const float *x, float *y, size_t n) {
    size_t i = 0;
    for (; i + REG <= n; i += REG) store(y + i, sigmoid_reg(load(x + i)));
    float t[REG] = {0};
    memcpy(t, x + i, (n - i) * sizeof *t);
    store(t, sigmoid_reg(load(t)));
    memcpy(y + i, t, (n - i) * sizeof *t);
}

/* ---- RMSNorm and RoPE ------------------------------------------------------------------------ */
static void row_norm_backward(const float *dy, const float *gain, const float *x, float rstd,
                              float c, bool accumulate, float *dx, float *dgain, size_t n) {
    const uint32_t keep = accumulate ? ~0u : 0; // A mask, as what dx holds may be a NaN.
    INDEPENDENT
    for (size_t i = 0; i < n; i++) {
        const float dyi = dy[i], xi = x[i];
        dgain[i] += dyi * (xi * rstd);
        dx[i] = float_of(bits_of(dx[i]) & keep) + (rstd * (dyi * gain[i]) - c * xi);
    }
}

// Pairs start `step` apart.
INLINE void rotate(const float *cos, const float *sin, float sign, float *lo, float *hi,
                   size_t step, size_t n) {
    INDEPENDENT
    for (size_t i = 0; i < n; i++) {
        const float a = lo[i * step], b = hi[i * step], s = sign * sin[i];
        lo[i * step] = a * cos[i] - b * s;
        hi[i * step] = b * cos[i] + a * s;
    }
}

static void row_rope(const float *cos, const float *sin, float sign, bool interleaved, float *x,
                     size_t n) {
    if (interleaved) rotate(cos, sin, sign, x, x + 1, 2, n);
    else rotate(cos, sin, sign, x, x + n, 1, n);
}

/* ---- SwiGLU: gate_up comes in blocks of 16 gate and 16 up columns ---------------------------- */
INLINE void swiglu_block(dpl_dtype type, const void *g, size_t at, float w, dpl_dtype h_type,
                         void *h, size_t h_at) {
    for (size_t l = 0; l < LANES; l += REG) {
        const reg gate = load_any(type, g, at + l), up = load_any(type, g, at + l + LANES);
        store_any(h_type, h, h_at + l, gate * sigmoid_reg(gate) * up * w);
    }
}

INLINE void swiglu_forward(dpl_dtype type, const void *gate_up, float w, void *h, size_t f) {
    float t[LANES] = {0};
    size_t i = 0;
    for (; i + LANES <= f; i += LANES) swiglu_block(type, gate_up, 2 * i, w, type, h, i);
    if (i < f) swiglu_block(type, gate_up, 2 * i, w, DPL_F32, t, 0);
    copy_any(DPL_F32, t, 0, type, h, i, f - i);
}

INLINE void swiglu_forward_rows(dpl_dtype type, const dpl_swiglu *b, size_t f) {
    const size_t bytes = dpl_dtype_bytes(type);
    const char *gate_up = b->gate_up;
    char *h = b->out;
    for (size_t i = 0; i < b->n; i++, gate_up += b->ld * bytes, h += b->ld_out * bytes)
        swiglu_forward(type, gate_up, b->weight ? b->weight[i] : 1.0f, h, f);
}

INLINE void swiglu_forward_as(dpl_dtype type, const dpl_swiglu *b) {
    if (b->f == LANES) swiglu_forward_rows(type, b, LANES); // without a loop over columns
    else swiglu_forward_rows(type, b, b->f);
}

static void row_swiglu_forward(const dpl_swiglu *b) {
    const dpl_swiglu copy = *b;
    if (copy.dtype == DPL_F32) swiglu_forward_as(DPL_F32, &copy);
    else swiglu_forward_as(DPL_BF16, &copy);
}

// d silu(g) = s * (1 + g * (1 - s)), s = sigmoid(g)
INLINE void swiglu_grad_block(dpl_dtype type, const float *dh, const void *g, size_t i, float w,
                              void *dg, reg *sum) {
    for (size_t l = 0; l < LANES; l += REG) {
        const reg gate = load_any(type, g, 2 * i + l), up = load_any(type, g, 2 * i + l + LANES);
        const reg d = load(dh + i + l), dw = d * w;
        const reg s = sigmoid_reg(gate), silu = gate * s;
        sum[l / REG] += d * (silu * up);
        store_any(type, dg, 2 * i + l, dw * up * (s * (1.0f + gate * (1.0f - s))));
        store_any(type, dg, 2 * i + l + LANES, dw * silu);
    }
}

INLINE void swiglu_backward(dpl_dtype type, const float *dh, const void *gate_up, float w,
                            void *dgate_up, size_t f, reg *sum) {
    size_t i = 0;
    for (; i + LANES <= f; i += LANES) swiglu_grad_block(type, dh, gate_up, i, w, dgate_up, sum);
    if (i < f) { // The padding may hold anything: compute on copies where it is 0.
        float d[LANES] = {0}, g[2 * LANES] = {0}, dg[2 * LANES];
        memcpy(d, dh + i, (f - i) * sizeof *d);
        copy_any(type, gate_up, 2 * i, DPL_F32, g, 0, f - i);
        copy_any(type, gate_up, 2 * i + LANES, DPL_F32, g, LANES, f - i);
        swiglu_grad_block(DPL_F32, d, g, 0, w, dg, sum);
        copy_any(DPL_F32, dg, 0, type, dgate_up, 2 * i, 2 * LANES);
    }
}

INLINE void swiglu_backward_rows(dpl_dtype type, const dpl_swiglu *b, const float *dh, size_t f) {
    const size_t bytes = dpl_dtype_bytes(type);
    const char *gate_up = b->gate_up;
    char *out = b->out;
    for (size_t i = 0; i < b->n; i++, dh += DPL_PANEL) {
        reg sum[N_REGS] = {0};
        swiglu_backward(type, dh, gate_up, b->weight ? b->weight[i] : 1.0f, out, f, sum);
        if (b->sums) b->sums[i * b->step] = fold(sum);
        gate_up += b->ld * bytes, out += b->ld_out * bytes;
    }
}

INLINE void swiglu_backward_as(dpl_dtype type, const dpl_swiglu *b, const float *dh) {
    if (b->f == DPL_PANEL) swiglu_backward_rows(type, b, dh, DPL_PANEL);
    else swiglu_backward_rows(type, b, dh, b->f);
}

static void row_swiglu_backward(const dpl_swiglu *b, const float *dh) {
    const dpl_swiglu copy = *b;
    if (copy.dtype == DPL_F32) swiglu_backward_as(DPL_F32, &copy, dh);
    else swiglu_backward_as(DPL_BF16, &copy, dh);
}

/* ---- optimizer ------------------------------------------------------------------------------- */
// Where all of a gradient's history is 0 the update is the decay alone, even with eps = 0.
static void row_adamw(const dpl_adamw *rule, const float *grad, float *param, float *m, float *v,
                      size_t n) {
    const dpl_adamw a = *rule;
    const float b1 = (float)a.b1, b2 = (float)a.b2, c1 = (float)(1 - a.b1), c2 = (float)(1 - a.b2);
    // One division an element: three would take longer than memory does.
    const float unbias = 1 / a.correct2, rate = a.lr / a.correct1, decay = a.lr * a.decay;
    INDEPENDENT
    for (size_t i = 0; i < n; i++) {
        const float g = grad[i] * a.grad_scale;
        const float mi = b1 * m[i] + c1 * g;
        const float vi = b2 * v[i] + c2 * (g * g);
        const float den = sqrtf(vi * unbias + a.eps_root) + a.eps;
        const float not_zero = den + (float)(den == 0.0f); // without a branch
        m[i] = mi;
        v[i] = vi;
        param[i] -= rate * mi / not_zero + decay * param[i];
    }
}

#include "cpu/kernels_softmax_tmpl.h"

#define ROW_KERNELS                                                                        \
    row_max, row_dot, row_dot_as, row_sum_f64, row_axpy, row_add, row_scale, row_sum_rows, \
        row_exp_sub_sum, row_sigmoid, row_to_bf16, row_to_bf16_pairs, row_from_bf16,       \
        row_norm_forward, row_add_squares, row_norm_dot, row_norm_backward, row_rope,      \
        row_swiglu_forward, row_swiglu_backward, row_softmax, row_softmax_backward,        \
        row_scale_columns, row_adamw
