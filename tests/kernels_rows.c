// kernels_rows.c - bodies that check and benchmark the row kernels.
#include <math.h>
#include <stddef.h>

#include "cpu/ops.h"
#include "kernels.h"

// Levels differ in contraction alone: a few roundings of numbers of the size of the terms. Normal
// draws stay below 7, so a product of two is below 49.
#define U       0x1p-24
#define TERM    49.0
#define N_MAX   300
#define N_TRIES 40
#define N_BENCH 4096

// 0, 1, 2, ... 20, then anything.
static size_t size_of_try(kernel_test *t, size_t i) {
    return i <= 20 ? i : kernel_pick(t, 1, N_MAX);
}

#define EACH_SIZE(t, n) \
    for (size_t try_ = 0, n = 0; try_ < N_TRIES; kernel_done(t), n = size_of_try(t, ++try_))

static void near_sum(kernel_test *t, double got, double want, size_t n, double u) {
    const float difference = (float)(got - want), zero = 0;
    kernel_near(t, "sum", &difference, &zero, 1, (double)(n + 20) * u * TERM * 7);
}

static float *copy_of(kernel_test *t, const float *x, size_t n) {
    float *copy = kernel_floats(t, n);
    for (size_t i = 0; i < n; ++i) copy[i] = x[i];
    return copy;
}

static void check_max(kernel_test *t) {
    EACH_SIZE(t, n) {
        float *x = kernel_random(t, n);
        if (n > 1) x[n / 2] = NAN; // Passed over.
        const float got = t->k->rows.max(x, n), want = t->ref->rows.max(x, n);
        kernel_same(t, "max", &got, &want, sizeof got);
    }
    t->aligned = true;
    const float *x = kernel_random(t, N_BENCH);
    KERNEL_BENCH(t, N_BENCH, "elem", t->k->rows.max(x, N_BENCH));
}

static void check_dot(kernel_test *t) {
    EACH_SIZE(t, n) {
        const float *x = kernel_random(t, n), *y = kernel_random(t, n);
        near_sum(t, (double)t->k->rows.dot(x, y, n), (double)t->ref->rows.dot(x, y, n), n, U);
    }
    t->aligned = true;
    const float *x = kernel_random(t, N_BENCH), *y = kernel_random(t, N_BENCH);
    KERNEL_BENCH(t, N_BENCH, "elem", t->k->rows.dot(x, y, N_BENCH));
}

static void check_dot_as(kernel_test *t) {
    for (int types = 0; types < 4; types++) EACH_SIZE(t, n) {
            const float *x = kernel_random(t, n), *y = kernel_random(t, n);
            uint16_t *x16 = kernel_buffer(t, n * 2), *y16 = kernel_buffer(t, n * 2);
            float *x_is = copy_of(t, x, n), *y_is = copy_of(t, y, n);
            t->ref->rows.to_bf16(x, x16, n);
            t->ref->rows.to_bf16(y, y16, n);
            if (types & 1) t->ref->rows.from_bf16(x16, x_is, n);
            if (types & 2) t->ref->rows.from_bf16(y16, y_is, n);
            const float got = t->k->rows.dot_as(
                types & 1 ? DPL_BF16 : DPL_F32, types & 1 ? (const void *)x16 : x,
                types & 2 ? DPL_BF16 : DPL_F32, types & 2 ? (const void *)y16 : y, n);
            near_sum(t, (double)got, (double)t->ref->rows.dot(x_is, y_is, n), n, U);
        }
    t->aligned = true;
    const uint16_t *x = kernel_random_bf16(t, N_BENCH), *y = kernel_random_bf16(t, N_BENCH);
    KERNEL_BENCH(t, N_BENCH, "elem", t->k->rows.dot_as(DPL_BF16, x, DPL_BF16, y, N_BENCH));
}

static void check_sum_f64(kernel_test *t) {
    for (int squares = 0; squares < 2; squares++) EACH_SIZE(t, n) {
            float *x = kernel_random(t, n);
            near_sum(t, t->k->rows.sum_f64(x, squares, n), t->ref->rows.sum_f64(x, squares, n), n,
                     0x1p-53);
            if (n == 0) continue;
            x[n / 2] = INFINITY;
            if (isfinite(t->k->rows.sum_f64(x, squares, n)))
                kernel_same(t, "infinity", "0", "1", 1);
        }
    t->aligned = true;
    const float *x = kernel_random(t, N_BENCH);
    KERNEL_BENCH(t, N_BENCH, "elem", t->k->rows.sum_f64(x, true, N_BENCH));
}

static void check_axpy(kernel_test *t) {
    EACH_SIZE(t, n) {
        const float *x = kernel_random(t, n);
        float *y = kernel_random(t, n), *want = copy_of(t, y, n);
        t->k->rows.axpy(1.5f, x, y, n);
        t->ref->rows.axpy(1.5f, x, want, n);
        kernel_near(t, "axpy", y, want, n, 2 * U * TERM);
    }
    t->aligned = true;
    const float *x = kernel_random(t, N_BENCH);
    float *y = kernel_random(t, N_BENCH);
    KERNEL_BENCH(t, N_BENCH, "elem", t->k->rows.axpy(1e-9f, x, y, N_BENCH));
}

static void check_add(kernel_test *t) {
    EACH_SIZE(t, n) {
        float *a = kernel_random(t, n), *b = kernel_random(t, n);
        float *y = kernel_floats(t, n), *want = kernel_floats(t, n);
        t->k->rows.add(a, b, y, n);
        t->ref->rows.add(a, b, want, n);
        t->k->rows.add(a, b, a, n); // in place
        kernel_same(t, "add", y, want, n * sizeof *y);
        kernel_same(t, "add in place", a, want, n * sizeof *y);
    }
    t->aligned = true;
    const float *a = kernel_random(t, N_BENCH), *b = kernel_random(t, N_BENCH);
    float *y = kernel_floats(t, N_BENCH);
    KERNEL_BENCH(t, N_BENCH, "elem", t->k->rows.add(a, b, y, N_BENCH));
}

static void check_scale(kernel_test *t) {
    EACH_SIZE(t, n) {
        float *x = kernel_random(t, n), *want = copy_of(t, x, n);
        t->k->rows.scale(0.3f, x, n);
        t->ref->rows.scale(0.3f, want, n);
        kernel_same(t, "scale", x, want, n * sizeof *x);
    }
    t->aligned = true;
    float *x = kernel_random(t, N_BENCH);
    KERNEL_BENCH(t, N_BENCH, "elem", t->k->rows.scale(1, x, N_BENCH));
}

static void check_sum_rows(kernel_test *t) {
    const void *rows[7], *floats[7];
    EACH_SIZE(t, n) {
        const size_t n_rows = kernel_pick(t, 1, 7);
        const dpl_dtype type = n % 2 ? DPL_BF16 : DPL_F32;
        float *y = kernel_random(t, n), *want = copy_of(t, y, n);
        for (size_t i = 0; i < n_rows; ++i) {
            float *x = kernel_floats(t, n);
            const uint16_t *h = kernel_random_bf16(t, n);
            for (size_t j = 0; j < n; ++j) x[j] = dpl_bf16_to_f32(h[j]);
            floats[i] = x;
            rows[i] = type == DPL_F32 ? floats[i] : h;
        }
        t->k->rows.sum_rows(type, rows, n_rows, n_rows % 2, y, n);
        t->ref->rows.sum_rows(DPL_F32, floats, n_rows, n_rows % 2, want, n);
        kernel_same(t, "sum of rows", y, want, n * sizeof *y);
    }
    t->aligned = true;
    for (size_t i = 0; i < 4; ++i) rows[i] = kernel_random_bf16(t, N_BENCH);
    float *y = kernel_random(t, N_BENCH);
    KERNEL_BENCH(t, 4 * N_BENCH, "elem", t->k->rows.sum_rows(DPL_BF16, rows, 4, false, y, N_BENCH));
}

static void check_exp(kernel_test *t) {
    EACH_SIZE(t, n) {
        float *x = kernel_random(t, n);
        for (size_t i = 0; i < n; ++i) x[i] = i == 7 ? -INFINITY : i == 8 ? -1000 : 4 * x[i];
        const float sub = t->ref->rows.max(x, n); // As callers do: y <= 1.
        float *y = kernel_floats(t, n), *want = kernel_floats(t, n);
        const float got_sum = t->k->rows.exp_sub_sum(x, sub, y, n);
        const float want_sum = t->ref->rows.exp_sub_sum(x, sub, want, n);
        kernel_near(t, "exp", y, want, n, 4 * U);
        near_sum(t, (double)got_sum, (double)want_sum, n, U);
        t->k->rows.exp_sub_sum(x, sub, x, n);
        kernel_same(t, "exp in place", x, y, n * sizeof *y);
    }
    t->aligned = true;
    const float *x = kernel_random(t, N_BENCH);
    float *y = kernel_floats(t, N_BENCH);
    KERNEL_BENCH(t, N_BENCH, "elem", t->k->rows.exp_sub_sum(x, 3, y, N_BENCH));
}

static void check_sigmoid(kernel_test *t) {
    EACH_SIZE(t, n) {
        float *x = kernel_random(t, n), *y = kernel_floats(t, n), *want = kernel_floats(t, n);
        for (size_t i = 0; i < n; ++i)
            x[i] = i == 5 ? INFINITY : i == 6 ? -INFINITY : i == 9 ? NAN : 9 * x[i];
        t->k->rows.sigmoid(x, y, n);
        t->ref->rows.sigmoid(x, want, n);
        kernel_near(t, "sigmoid", y, want, n, 6 * U);
        t->k->rows.sigmoid(x, x, n);
        kernel_same(t, "sigmoid in place", x, y, n * sizeof *y);
    }
    t->aligned = true;
    const float *x = kernel_random(t, N_BENCH);
    float *y = kernel_floats(t, N_BENCH);
    KERNEL_BENCH(t, N_BENCH, "elem", t->k->rows.sigmoid(x, y, N_BENCH));
}

static void check_to_bf16(kernel_test *t) {
    EACH_SIZE(t, n) {
        float *x = kernel_random(t, n);
        uint16_t *y = kernel_buffer(t, n * sizeof *y), *want = kernel_buffer(t, n * sizeof *want);
        for (size_t i = 0; i < n; ++i) {
            const uint32_t any = (uint32_t)dpl_rng_u64(t->seed, 2, t->n_drawn++);
            if (i % 2) memcpy(x + i, &any, sizeof any); // Any bits: NaNs, halfway cases, infinity.
            want[i] = dpl_f32_to_bf16(x[i]);
        }
        t->k->rows.to_bf16(x, y, n);
        kernel_same(t, "bf16", y, want, n * sizeof *y);
    }
    t->aligned = true;
    const float *x = kernel_random(t, N_BENCH);
    uint16_t *y = kernel_buffer(t, N_BENCH * sizeof *y);
    KERNEL_BENCH(t, N_BENCH, "elem", t->k->rows.to_bf16(x, y, N_BENCH));
}

static void check_to_bf16_pairs(kernel_test *t) {
    EACH_SIZE(t, n64) {
        const size_t n = 64 * (n64 % 20);
        float *x = kernel_random(t, n);
        uint16_t *y = kernel_buffer(t, n * sizeof *y), *want = kernel_buffer(t, n * sizeof *want);
        for (size_t i = 0; i < n; ++i) {
            const uint32_t any = (uint32_t)dpl_rng_u64(t->seed, 2, t->n_drawn++);
            if (i % 3) memcpy(x + i, &any, sizeof any);
            want[dpl_pair_index(i)] = dpl_f32_to_bf16(x[i]);
        }
        t->k->rows.to_bf16_pairs(x, y, n);
        kernel_same(t, "pairs", y, want, n * sizeof *y);
    }
    t->aligned = true;
    const float *x = kernel_random(t, N_BENCH);
    uint16_t *y = kernel_buffer(t, N_BENCH * sizeof *y);
    KERNEL_BENCH(t, N_BENCH, "elem", t->k->rows.to_bf16_pairs(x, y, N_BENCH));
}

static void check_from_bf16(kernel_test *t) {
    EACH_SIZE(t, n) {
        const uint16_t *x = kernel_random_bf16(t, n);
        float *y = kernel_floats(t, n), *want = kernel_floats(t, n);
        for (size_t i = 0; i < n; ++i) want[i] = dpl_bf16_to_f32(x[i]);
        t->k->rows.from_bf16(x, y, n);
        kernel_same(t, "fp32", y, want, n * sizeof *y);
    }
    t->aligned = true;
    const uint16_t *x = kernel_random_bf16(t, N_BENCH);
    float *y = kernel_floats(t, N_BENCH);
    KERNEL_BENCH(t, N_BENCH, "elem", t->k->rows.from_bf16(x, y, N_BENCH));
}

static void check_norm_forward(kernel_test *t) {
    EACH_SIZE(t, n) {
        const float *x = kernel_random(t, n), *gain = kernel_random(t, n);
        float *y = kernel_floats(t, n), *want = kernel_floats(t, n);
        t->k->rows.norm_forward(x, gain, 0.7f, y, n);
        t->ref->rows.norm_forward(x, gain, 0.7f, want, n);
        kernel_same(t, "norm", y, want, n * sizeof *y);
    }
    t->aligned = true;
    const float *x = kernel_random(t, N_BENCH), *gain = kernel_random(t, N_BENCH);
    float *y = kernel_floats(t, N_BENCH);
    KERNEL_BENCH(t, N_BENCH, "elem", t->k->rows.norm_forward(x, gain, 1, y, N_BENCH));
}

// The bits are those of the two kernels of the same level.
static void check_add_squares(kernel_test *t) {
    EACH_SIZE(t, n) {
        float *a = kernel_random(t, n), *b = kernel_random(t, n);
        float *y = kernel_floats(t, n), *want = kernel_floats(t, n);
        const float got_sum = t->k->rows.add_squares(a, b, y, n);
        t->ref->rows.add(a, b, want, n);
        const float want_sum = t->k->rows.dot(want, want, n);
        kernel_same(t, "sum", y, want, n * sizeof *y);
        kernel_same(t, "squares", &got_sum, &want_sum, sizeof got_sum);
        t->k->rows.add_squares(a, b, n % 2 ? a : b, n);
        kernel_same(t, "sum in place", n % 2 ? a : b, want, n * sizeof *y);
    }
    t->aligned = true;
    const float *a = kernel_random(t, N_BENCH), *b = kernel_random(t, N_BENCH);
    float *y = kernel_floats(t, N_BENCH);
    KERNEL_BENCH(t, N_BENCH, "elem", t->k->rows.add_squares(a, b, y, N_BENCH));
}

static void check_norm_dot(kernel_test *t) {
    EACH_SIZE(t, n) {
        const float *x = kernel_random(t, n), *y = kernel_random(t, n), *z = kernel_random(t, n);
        near_sum(t, (double)t->k->rows.norm_dot(x, y, z, n),
                 (double)t->ref->rows.norm_dot(x, y, z, n), n, U);
    }
    t->aligned = true;
    const float *x = kernel_random(t, N_BENCH), *y = kernel_random(t, N_BENCH);
    const float *z = kernel_random(t, N_BENCH);
    KERNEL_BENCH(t, N_BENCH, "elem", t->k->rows.norm_dot(x, y, z, N_BENCH));
}

static void check_norm_backward(kernel_test *t) {
    EACH_SIZE(t, n) {
        const float *dy = kernel_random(t, n), *gain = kernel_random(t, n);
        const float *x = kernel_random(t, n);
        float *dx = kernel_random(t, n), *want_dx = copy_of(t, dx, n);
        float *dgain = kernel_random(t, n), *want_dgain = copy_of(t, dgain, n);
        const bool add = n % 2;
        t->k->rows.norm_backward(dy, gain, x, 0.7f, 0.2f, add, dx, dgain, n);
        t->ref->rows.norm_backward(dy, gain, x, 0.7f, 0.2f, add, want_dx, want_dgain, n);
        kernel_near(t, "dx", dx, want_dx, n, 4 * U * TERM);
        kernel_near(t, "dgain", dgain, want_dgain, n, 4 * U * TERM);
    }
    t->aligned = true;
    const float *dy = kernel_random(t, N_BENCH), *gain = kernel_random(t, N_BENCH);
    const float *x = kernel_random(t, N_BENCH);
    float *dx = kernel_random(t, N_BENCH), *dgain = kernel_random(t, N_BENCH);
    KERNEL_BENCH(t, N_BENCH, "elem",
                 t->k->rows.norm_backward(dy, gain, x, 1, 0, false, dx, dgain, N_BENCH));
}

static void check_rope(kernel_test *t) {
    for (int interleaved = 0; interleaved < 2; interleaved++) EACH_SIZE(t, n) {
            const float *co = kernel_random(t, n), *si = kernel_random(t, n);
            float *x = kernel_random(t, 2 * n), *want = copy_of(t, x, 2 * n);
            t->k->rows.rope(co, si, -1, interleaved, x, n);
            t->ref->rows.rope(co, si, -1, interleaved, want, n);
            kernel_near(t, interleaved ? "pairs" : "split", x, want, 2 * n, 4 * U * TERM);
        }
    t->aligned = true;
    float *x = kernel_random(t, N_BENCH), *angle = kernel_random(t, N_BENCH);
    t->ref->rows.sigmoid(angle, angle, N_BENCH); // Below 1: repeated calls stay finite.
    t->ref->rows.scale(0.5f, angle, N_BENCH);
    KERNEL_BENCH(t, N_BENCH, "elem", t->k->rows.rope(angle, angle, 1, true, x, N_BENCH / 2));
}

// x as bf16, to which x is rounded as well.
static uint16_t *rounded(kernel_test *t, float *x, size_t n) {
    uint16_t *h = kernel_buffer(t, n * sizeof *h);
    for (size_t i = 0; i < n; ++i) {
        h[i] = dpl_f32_to_bf16(x[i]);
        x[i] = dpl_bf16_to_f32(h[i]);
    }
    return h;
}

// A few rows of at most 32, with weights or without, with gaps in all that is read and written.
typedef struct swiglu_case {
    dpl_swiglu b;
    float *gate_up, *got, *want;
    uint16_t *gate_up_16, *got_16;
    size_t n_out;
} swiglu_case;

static swiglu_case draw_swiglu(kernel_test *t, size_t n, size_t wide) {
    const size_t f = DPL_MIN(n, (size_t)32), m = 1 + n % 4;
    const size_t ld = 2 * dpl_round_up(f, 16) + n % 3, ld_out = wide * dpl_round_up(f, 16) + n % 5;
    swiglu_case c = {.b = {.n = m, .f = f, .ld = ld, .ld_out = ld_out}, .n_out = m * ld_out};
    float *w = kernel_floats(t, m);
    for (size_t i = 0; i < m; ++i) w[i] = 0.6f / (float)(1 + i);
    c.b.weight = n % 2 ? w : NULL;
    c.gate_up = kernel_random(t, m * ld);
    c.gate_up_16 = rounded(t, c.gate_up, m * ld);
    c.got = kernel_floats(t, c.n_out), c.want = kernel_floats(t, c.n_out);
    c.got_16 = kernel_buffer(t, c.n_out * sizeof *c.got_16);
    return c;
}

static dpl_swiglu swiglu_of(const swiglu_case *c, dpl_dtype dtype, void *out, float *sums) {
    dpl_swiglu b = c->b;
    b.dtype = dtype;
    b.gate_up = dtype == DPL_F32 ? (void *)c->gate_up : (void *)c->gate_up_16;
    b.out = out, b.sums = sums, b.step = 3;
    return b;
}

static void check_swiglu_forward(kernel_test *t) {
    EACH_SIZE(t, n) {
        swiglu_case c = draw_swiglu(t, n, 1);
        const dpl_swiglu got = swiglu_of(&c, DPL_F32, c.got, NULL);
        const dpl_swiglu want = swiglu_of(&c, DPL_F32, c.want, NULL);
        const dpl_swiglu got_16 = swiglu_of(&c, DPL_BF16, c.got_16, NULL);
        t->k->rows.swiglu_forward(&got);
        t->k->rows.swiglu_forward(&got_16);
        t->ref->rows.swiglu_forward(&want);
        kernel_near(t, "h", c.got, c.want, c.n_out, 12 * U * TERM);
        kernel_same(t, "h of bf16", c.got_16, rounded(t, c.got, c.n_out),
                    c.n_out * sizeof *c.got_16);
    }
    t->aligned = true;
    const size_t n = N_BENCH / 16;
    const dpl_swiglu b = {.dtype = DPL_BF16,
                          .n = n,
                          .f = 16,
                          .gate_up = kernel_random_bf16(t, 2 * N_BENCH),
                          .out = kernel_buffer(t, N_BENCH * 2),
                          .ld = 32,
                          .ld_out = 16};
    KERNEL_BENCH(t, N_BENCH, "elem", t->k->rows.swiglu_forward(&b));
}

static void check_swiglu_backward(kernel_test *t) {
    EACH_SIZE(t, n) {
        swiglu_case c = draw_swiglu(t, n, 2);
        const size_t m = c.b.n;
        const float *dh = kernel_random(t, m * 32);
        float *sums[3];
        for (int i = 0; i < 3; ++i) sums[i] = kernel_floats(t, 3 * m - 2);
        const dpl_swiglu got = swiglu_of(&c, DPL_F32, c.got, sums[0]);
        const dpl_swiglu want = swiglu_of(&c, DPL_F32, c.want, sums[1]);
        const dpl_swiglu got_16 = swiglu_of(&c, DPL_BF16, c.got_16, sums[2]);
        t->k->rows.swiglu_backward(&got, dh);
        t->k->rows.swiglu_backward(&got_16, dh);
        t->ref->rows.swiglu_backward(&want, dh);
        kernel_near(t, "dgate_up", c.got, c.want, c.n_out, 16 * U * TERM * 7);
        // In place, and without sums.
        dpl_swiglu in_place = swiglu_of(&c, DPL_F32, c.gate_up, NULL);
        in_place.ld_out = in_place.ld;
        t->k->rows.swiglu_backward(&in_place, dh);
        for (size_t i = 0; i < m; ++i)
            kernel_same(t, "dgate_up in place", c.gate_up + i * c.b.ld, c.got + i * c.b.ld_out,
                        2 * dpl_round_up(c.b.f, 16) * sizeof *c.got);
        kernel_same(t, "dgate_up of bf16", c.got_16, rounded(t, c.got, c.n_out),
                    c.n_out * sizeof *c.got_16);
        kernel_same(t, "sums of bf16", sums[2], sums[0], (3 * m - 2) * sizeof(float));
        for (size_t i = 0; i < m; ++i)
            near_sum(t, (double)sums[0][3 * i], (double)sums[1][3 * i], c.b.f + 12, U);
    }
    t->aligned = true;
    const size_t n = N_BENCH / 32;
    const float *dh = kernel_random(t, N_BENCH);
    const dpl_swiglu b = {.dtype = DPL_BF16,
                          .n = n,
                          .f = 32,
                          .gate_up = kernel_random_bf16(t, 2 * N_BENCH),
                          .out = kernel_buffer(t, 2 * N_BENCH * 2),
                          .ld = 64,
                          .ld_out = 64,
                          .sums = kernel_floats(t, n),
                          .step = 1};
    KERNEL_BENCH(t, N_BENCH, "elem", t->k->rows.swiglu_backward(&b, dh));
}

/* ---- attention, against its statement in fp64 ---- */
#define WIDTH 32
#define SCALE 0.5 // of scores that are below 30: p differs by a few roundings of numbers up to 40

typedef struct score_case {
    dpl_scores b;
    size_t n;
    float *score;
    int32_t segment[2][N_MAX]; // of rows and columns
} score_case;

static void draw_scores(kernel_test *t, score_case *c) {
    c->n = kernel_pick(t, 1, 70);
    c->b = (dpl_scores){.scale = (float)SCALE, .key_minus_query = -1000};
    c->score = kernel_random(t, c->n * WIDTH);
    t->ref->rows.scale(4, c->score, c->n * WIDTH);
    for (int i = 0; i < 3; ++i) c->score[kernel_pick(t, 0, c->n * WIDTH - 1)] = NAN;
    if (kernel_pick(t, 0, 1)) c->b.key_minus_query = (int32_t)kernel_pick(t, 0, 100) - 50;
    if (kernel_pick(t, 0, 1)) return;
    for (size_t i = 0; i < c->n; ++i) c->segment[0][i] = (int32_t)kernel_pick(t, 1, 2);
    for (size_t i = 0; i < WIDTH; ++i) c->segment[1][i] = (int32_t)kernel_pick(t, 1, 3);
    c->b.row_segment = c->segment[0];
    c->b.column_segment = c->segment[1];
}

static bool is_seen(const score_case *c, size_t i, size_t j, bool row_is_key) {
    const int64_t row = (int64_t)i, column = (int64_t)j;
    const int64_t key = (row_is_key ? row : column) + c->b.key_minus_query;
    if (key > (row_is_key ? column : row)) return false;
    return !c->b.row_segment || c->segment[0][i] == c->segment[1][j];
}

// That the pairs of rows of y are those of x, rounded; an odd last row has zeros.
static void same_pairs(kernel_test *t, const char *what, const uint16_t *y, const float *x,
                       size_t n) {
    uint16_t want[2 * WIDTH];
    for (size_t i = 0; i < n; i += 2) {
        for (size_t j = 0; j < 2 * WIDTH; ++j)
            want[j] = i + j % 2 < n ? dpl_f32_to_bf16(x[(i + j % 2) * WIDTH + j / 2]) : 0;
        kernel_same(t, what, y + i * WIDTH, want, sizeof want);
    }
}

static void check_softmax(kernel_test *t) {
    score_case c;
    for (size_t i_try = 0; i_try < N_TRIES; ++i_try, kernel_done(t)) {
        draw_scores(t, &c);
        const size_t n = c.n;
        float *max = kernel_random(t, WIDTH), *sum = kernel_random(t, WIDTH);
        for (size_t j = 0; j < WIDTH; ++j) {
            max[j] = i_try % 2 ? 9 * max[j] : -INFINITY; // something was seen before, or nothing
            sum[j] = i_try % 2 ? fabsf(sum[j]) : 0;
        }
        float *want = kernel_floats(t, n * WIDTH), want_state[3][WIDTH];
        for (size_t j = 0; j < WIDTH; ++j) {
            double top = (double)max[j], total = 0;
            for (size_t i = 0; i < n; ++i)
                if (is_seen(&c, i, j, true)) top = fmax(top, (double)c.score[i * WIDTH + j]);
            for (size_t i = 0; i < n; ++i) {
                const double s = (double)c.score[i * WIDTH + j];
                const double p = is_seen(&c, i, j, true) ? exp(SCALE * (s - top)) : 0;
                total += p;
                want[i * WIDTH + j] = (float)p;
            }
            const double shrink = isinf(max[j]) ? 1 : exp(SCALE * ((double)max[j] - top));
            want_state[0][j] = (float)top;
            want_state[1][j] = (float)((double)sum[j] * shrink + total);
            want_state[2][j] = (float)shrink;
        }
        float *copy = copy_of(t, c.score, n * WIDTH), *shrink = kernel_floats(t, WIDTH);
        float *max2 = copy_of(t, max, WIDTH), *sum2 = copy_of(t, sum, WIDTH);
        float *shrink2 = kernel_floats(t, WIDTH);
        uint16_t *pairs = kernel_buffer(t, dpl_round_up(n, 2) * WIDTH * sizeof *pairs);
        const bool shrinks = t->k->rows.softmax(&c.b, n, c.score, NULL, max, sum, shrink);
        kernel_near(t, "p", c.score, want, n * WIDTH, 80 * U);
        kernel_near(t, "max", max, want_state[0], WIDTH, 0);
        kernel_near(t, "sum", sum, want_state[1], WIDTH, 80 * U * (double)(n + 7));
        kernel_near(t, "shrink", shrink, want_state[2], WIDTH, 80 * U);
        for (size_t j = 0; j < WIDTH; ++j)
            if (shrink[j] != 1 && !shrinks) kernel_same(t, "to be shrunk", "0", "1", 1);
        t->k->rows.softmax(&c.b, n, copy, pairs, max2, sum2, shrink2);
        same_pairs(t, "pairs", pairs, c.score, n);
        kernel_same(t, "max", max2, max, WIDTH * sizeof *max);
        kernel_same(t, "sum", sum2, sum, WIDTH * sizeof *sum);
        kernel_same(t, "shrink", shrink2, shrink, WIDTH * sizeof *shrink);
    }
    t->aligned = true;
    const size_t n = N_BENCH / WIDTH;
    float *score = kernel_random(t, N_BENCH), *max = kernel_random(t, WIDTH);
    float *sum = kernel_random(t, WIDTH), *shrink = kernel_floats(t, WIDTH);
    uint16_t *pairs = kernel_buffer(t, N_BENCH * sizeof *pairs);
    c.b = (dpl_scores){.scale = 1, .key_minus_query = -1000};
    KERNEL_BENCH(t, N_BENCH, "elem", t->k->rows.softmax(&c.b, n, score, pairs, max, sum, shrink));
}

static void check_softmax_backward(kernel_test *t) {
    score_case c;
    for (size_t i_try = 0; i_try < N_TRIES; ++i_try, kernel_done(t)) {
        draw_scores(t, &c);
        const size_t n = c.n;
        float *dp = kernel_random(t, n * WIDTH), *lse = kernel_random(t, n);
        for (size_t i = 0; i < n; ++i) lse[i] += 20; // so that p is below 1
        c.b.lse = lse;
        c.b.delta = kernel_random(t, n);
        float *want_p = kernel_floats(t, n * WIDTH), *want_d = kernel_floats(t, n * WIDTH);
        for (size_t i = 0; i < n; ++i)
            for (size_t j = 0; j < WIDTH; ++j) {
                const double s = SCALE * (double)c.score[i * WIDTH + j] - (double)lse[i];
                const double p = is_seen(&c, i, j, false) ? exp(s) : 0;
                const double d = (double)dp[i * WIDTH + j] - (double)c.b.delta[i];
                want_p[i * WIDTH + j] = (float)p;
                want_d[i * WIDTH + j] = (float)(p * d * SCALE);
            }
        float *score2 = copy_of(t, c.score, n * WIDTH), *dp2 = copy_of(t, dp, n * WIDTH);
        const size_t bytes = n * WIDTH * sizeof(uint16_t);
        const size_t pair_bytes = dpl_round_up(n, 2) * WIDTH * sizeof(uint16_t);
        uint16_t *p_pairs = kernel_buffer(t, pair_bytes), *d_pairs = kernel_buffer(t, pair_bytes);
        uint16_t *d_rows = kernel_buffer(t, bytes), *want_rows = kernel_buffer(t, bytes);
        t->k->rows.softmax_backward(&c.b, n, c.score, dp, NULL, NULL, NULL);
        kernel_near(t, "p", c.score, want_p, n * WIDTH, 80 * U);
        kernel_near(t, "d", dp, want_d, n * WIDTH, 7 * 84 * U);
        t->k->rows.softmax_backward(&c.b, n, score2, dp2, p_pairs, d_pairs, d_rows);
        same_pairs(t, "pairs of p", p_pairs, c.score, n);
        same_pairs(t, "pairs of d", d_pairs, dp, n);
        for (size_t i = 0; i < n * WIDTH; ++i) want_rows[i] = dpl_f32_to_bf16(dp[i]);
        kernel_same(t, "rows of d", d_rows, want_rows, bytes);
    }
    t->aligned = true;
    const size_t n = N_BENCH / WIDTH;
    float *score = kernel_random(t, N_BENCH), *dp = kernel_random(t, N_BENCH);
    const float *lse = kernel_random(t, n);
    uint16_t *pairs = kernel_buffer(t, N_BENCH * 6);
    c.b = (dpl_scores){.scale = 1, .key_minus_query = -1000, .lse = lse, .delta = lse};
    KERNEL_BENCH(t, N_BENCH, "elem",
                 t->k->rows.softmax_backward(&c.b, n, score, dp, pairs, pairs + N_BENCH,
                                             pairs + 2 * N_BENCH));
}

static void check_scale_columns(kernel_test *t) {
    EACH_SIZE(t, n) {
        float *x = kernel_random(t, n * WIDTH), *want = copy_of(t, x, n * WIDTH);
        const float *factor = kernel_random(t, WIDTH);
        t->k->rows.scale_columns(factor, x, n);
        for (size_t i = 0; i < n * WIDTH; ++i) want[i] *= factor[i % WIDTH];
        kernel_same(t, "scaled", x, want, n * WIDTH * sizeof *x);
    }
    t->aligned = true;
    float *x = kernel_random(t, N_BENCH), factor[WIDTH];
    for (size_t i = 0; i < WIDTH; ++i) factor[i] = 1;
    KERNEL_BENCH(t, N_BENCH, "elem", t->k->rows.scale_columns(factor, x, N_BENCH / WIDTH));
}

static void check_adamw(kernel_test *t) {
    const dpl_adamw rule = {.lr = 0.01f,
                            .b1 = 0.9f,
                            .b2 = 0.95f,
                            .eps = 1e-8f,
                            .decay = 0.1f,
                            .correct1 = 0.1f,
                            .correct2 = 0.05f,
                            .grad_scale = 0.5f};
    EACH_SIZE(t, n) {
        const float *grad = kernel_random(t, n);
        float *p = kernel_random(t, n), *want_p = copy_of(t, p, n);
        float *m = kernel_random(t, n), *want_m = copy_of(t, m, n);
        float *v = kernel_random(t, n);
        for (size_t i = 0; i < n; ++i) v[i] = v[i] * v[i] + 0.1f;
        float *want_v = copy_of(t, v, n);
        t->k->rows.adamw(&rule, grad, p, m, v, n);
        t->ref->rows.adamw(&rule, grad, want_p, want_m, want_v, n);
        kernel_near(t, "m", m, want_m, n, 4 * U * 7);
        kernel_near(t, "v", v, want_v, n, 4 * U * TERM);
        // m / 0.1 is below 70, the root above 1: the update is below 0.01 * 70.
        kernel_near(t, "param", p, want_p, n, U * 14 + 16 * U * 0.01 * 70);
    }
    t->aligned = true;
    const float *grad = kernel_random(t, N_BENCH);
    float *p = kernel_random(t, N_BENCH), *m = kernel_random(t, N_BENCH);
    float *v = copy_of(t, grad, N_BENCH);
    t->ref->rows.sigmoid(v, v, N_BENCH);
    KERNEL_BENCH(t, N_BENCH, "elem", t->k->rows.adamw(&rule, grad, p, m, v, N_BENCH));
}

const kernel_entry kernel_row_entries[] = {
    {"row_max", check_max},
    {"row_dot", check_dot},
    {"row_dot_as", check_dot_as},
    {"row_sum_f64", check_sum_f64},
    {"row_axpy", check_axpy},
    {"row_add", check_add},
    {"row_scale", check_scale},
    {"row_sum_rows", check_sum_rows},
    {"row_exp_sub_sum", check_exp},
    {"row_sigmoid", check_sigmoid},
    {"row_to_bf16", check_to_bf16},
    {"row_to_bf16_pairs", check_to_bf16_pairs},
    {"row_from_bf16", check_from_bf16},
    {"row_norm_forward", check_norm_forward},
    {"row_add_squares", check_add_squares},
    {"row_norm_dot", check_norm_dot},
    {"row_norm_backward", check_norm_backward},
    {"row_rope", check_rope},
    {"row_swiglu_forward", check_swiglu_forward},
    {"row_swiglu_backward", check_swiglu_backward},
    {"row_softmax", check_softmax},
    {"row_softmax_backward", check_softmax_backward},
    {"row_scale_columns", check_scale_columns},
    {"row_adamw", check_adamw},
    {NULL, NULL},
};

_Static_assert(sizeof(dpl_row_kernels) ==
                   (DPL_COUNT(kernel_row_entries) - 1) * sizeof(void (*)(void)),
               "each function of the table has a check entry");
