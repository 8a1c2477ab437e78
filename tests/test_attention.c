/*
 * test_attention.c - attention forward and backward against the fp64 oracle and finite differences,
 * at every CPU level, both element types and mixed ones, odd sizes, documents and padding; bits
 * over threads, on a deferred context, and of a row whatever comes after it.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "cpu/kernels.h"
#include "cpu/ops.h"
#include "oracle.h"

#define SEED 20260
#define GAP  3 // columns between the rows of every matrix: neither read nor written

typedef struct shape {
    size_t b, s, h, nope, rope, v;
    int documents;  // 0: no segments, 1: in order, then padding; 2: in any order
    size_t sharing; // heads that share keys and values; 0: 1
} shape;

static size_t n_sharing(const shape *s) {
    return s->sharing ? s->sharing : 1;
}

// The operands and results of one run. Matrices are surrounded and interleaved by NaN.
enum { Q, KV, KR, DOUT, OUT, DQ, DKV, DKR, N_MATS };
typedef struct problem {
    shape s;
    dpl_dtype dtype; // the less exact one
    float scale;
    int32_t *segment;
    size_t width[N_MATS];
    dpl_mat m[N_MATS];
    float *lse;
} problem;

static size_t mat_bytes(const problem *p, int i) {
    return (p->s.b * p->s.s + 2) * p->m[i].ld * dpl_dtype_bytes(p->m[i].dtype);
}

static void *mat_base(const problem *p, int i) {
    return (uint8_t *)p->m[i].p - p->m[i].ld * dpl_dtype_bytes(p->m[i].dtype);
}

static double get(dpl_mat m, size_t row, size_t col) {
    const void *x = dpl_mat_at(m, row, col).p;
    return m.dtype == DPL_F32 ? *(const float *)x : dpl_bf16_to_f32(*(const uint16_t *)x);
}

static void put(dpl_mat m, size_t row, size_t col, double x) {
    void *to = dpl_mat_at(m, row, col).p;
    if (m.dtype == DPL_F32) *(float *)to = (float)x;
    else *(uint16_t *)to = dpl_f32_to_bf16((float)x);
}

static int32_t segment_of(const shape *s, size_t row, size_t position) {
    if (s->documents == 2) return (int32_t)(dpl_rng_u64(SEED, 77, row) % 4);
    if (row / s->s == 1) return 0; // the second sequence is padding
    return position * 8 >= s->s * 7 ? 0 : (int32_t)(1 + position * 3 / s->s);
}

// The class of arithmetic follows q alone; `mixed`: some other matrices have the other type.
static void problem_open_as(problem *p, shape s, dpl_dtype dtype, bool mixed) {
    const dpl_dtype other = dtype == DPL_F32 ? DPL_BF16 : DPL_F32;
    const size_t n_rows = s.b * s.s;
    *p = (problem){.s = s,
                   .dtype = mixed ? DPL_BF16 : dtype,
                   .scale = 1.25f / sqrtf((float)(s.nope + s.rope))};
    const size_t n_q = s.h * (s.nope + s.rope), n_kv = s.h / n_sharing(&s) * (s.nope + s.v);
    const size_t width[N_MATS] = {n_q, n_kv, s.rope, s.h * s.v, s.h * s.v, n_q, n_kv, s.rope};
    for (int i = 0; i < N_MATS; i++) {
        p->width[i] = width[i];
        const dpl_dtype type = i == DKR ? DPL_F32 : mixed && i % 2 ? other : dtype;
        p->m[i] = (dpl_mat){NULL, width[i] + GAP, type};
        uint8_t *base = malloc(mat_bytes(p, i));
        memset(base, 0xff, mat_bytes(p, i));
        p->m[i].p = base + p->m[i].ld * dpl_dtype_bytes(p->m[i].dtype);
        for (size_t r = 0; r < n_rows && i <= DOUT; r++)
            for (size_t c = 0; c < width[i]; c++)
                put(p->m[i], r, c, dpl_rng_normal(SEED, (uint64_t)i, r * width[i] + c));
    }
    p->lse = malloc(n_rows * s.h * sizeof(float));
    memset(p->lse, 0xff, n_rows * s.h * sizeof(float));
    if (s.documents) {
        p->segment = malloc(n_rows * sizeof *p->segment);
        for (size_t r = 0; r < n_rows; r++) p->segment[r] = segment_of(&s, r, r % s.s);
    }
}

static void problem_open(problem *p, shape s, dpl_dtype dtype) {
    problem_open_as(p, s, dtype, false);
}

static void problem_close(problem *p) {
    for (int i = 0; i < N_MATS; i++) free(mat_base(p, i));
    free(p->lse);
    free(p->segment);
}

static dpl_attention arguments(const problem *p) {
    return (dpl_attention){p->s.b,    p->s.s,   p->s.h,   p->s.nope,
                           p->s.rope, p->s.v,   p->scale, p->segment,
                           p->m[Q],   p->m[KV], p->m[KR], p->s.sharing ? p->s.h / p->s.sharing : 0};
}

static void run(dpl_ctx *ctx, problem *p) {
    const dpl_attention a = arguments(p);
    const size_t mark = dpl_ctx_mark(ctx);
    dpl_attention_forward(ctx, &a, p->m[OUT], p->lse);
    dpl_attention_backward(ctx, &a, p->m[OUT], p->lse, p->m[DOUT], p->m[DQ], p->m[DKV], p->m[DKR]);
    dpl_ctx_wait(ctx);
    assert_int_equal(dpl_ctx_mark(ctx), mark); // it keeps no memory
}

static dpl_ctx *open_ctx(const char *level, int n_threads, bool deferred) {
    setenv("DPL_CPU", level, 1);
    dpl_ctx *ctx = NULL;
    if (dpl_ctx_create(n_threads, deferred, 0, &ctx) != DPL_OK) return NULL; // not this machine
    return ctx;
}

/* ---- against the oracle ---- */

typedef struct judged {
    double *q, *k, *v, *dout, *out, *dq, *dk, *dv, *dkr;
} judged;

static double *zeros(size_t n) {
    return calloc(n + 1, sizeof(double));
}

// As products take it.
static double operand(const problem *p, int i, size_t row, size_t col) {
    const double x = get(p->m[i], row, col);
    return p->m[Q].dtype == DPL_F32 ? x : dpl_bf16_to_f32(dpl_f32_to_bf16((float)x));
}

static void judge(const problem *p, judged *j) {
    const shape *s = &p->s;
    const size_t rows = s->b * s->s, d = s->nope + s->rope;
    *j = (judged){zeros(rows * s->h * d),    zeros(rows * s->h * d),    zeros(rows * s->h * s->v),
                  zeros(rows * s->h * s->v), zeros(rows * s->h * s->v), zeros(rows * s->h * d),
                  zeros(rows * s->h * d),    zeros(rows * s->h * s->v), zeros(rows * s->rope)};
    for (size_t r = 0; r < rows; r++)
        for (size_t h = 0; h < s->h; h++) {
            const size_t at = (r * s->h + h) * d, atv = (r * s->h + h) * s->v;
            const size_t kv = h / n_sharing(s) * (s->nope + s->v);
            for (size_t c = 0; c < d; c++) {
                j->q[at + c] = operand(p, Q, r, h * d + c);
                j->k[at + c] = c < s->nope ? operand(p, KV, r, kv + c)
                                           : operand(p, KR, r, c - s->nope);
            }
            for (size_t c = 0; c < s->v; c++) {
                j->v[atv + c] = operand(p, KV, r, kv + s->nope + c);
                j->dout[atv + c] = operand(p, DOUT, r, h * s->v + c);
            }
        }
    const oracle_attention a = {(int)s->b, (int)s->s, (int)s->h, (int)d,
                                (int)s->v, p->scale,  p->segment};
    oracle_attention_forward(&a, j->q, j->k, j->v, j->out);
    oracle_attention_backward(&a, j->q, j->k, j->v, j->dout, j->dq, j->dk, j->dv);
    for (size_t r = 0; r < rows; r++)
        for (size_t h = 0; h < s->h; h++)
            for (size_t c = 0; c < s->rope; c++)
                j->dkr[r * s->rope + c] += j->dk[(r * s->h + h) * d + s->nope + c];
    for (size_t head = 0; head < rows * s->h; head++) { // to the first of those that share
        const size_t first = head - head % s->h % n_sharing(s);
        for (size_t c = 0; head != first && c < d; c++) j->dk[first * d + c] += j->dk[head * d + c];
        for (size_t c = 0; head != first && c < s->v; c++)
            j->dv[first * s->v + c] += j->dv[head * s->v + c];
    }
}

static void judged_close(judged *j) {
    double *all[] = {j->q, j->k, j->v, j->dout, j->out, j->dq, j->dk, j->dv, j->dkr};
    for (size_t i = 0; i < DPL_COUNT(all); i++) free(all[i]);
}

// Compares columns of a head. The bound is on the largest error against the largest value.
typedef struct worst {
    double error, size;
} worst;

static void look(worst *w, double got, double want) {
    const double error = fabs(got - want);
    if (!(error <= w->error)) w->error = error;
    if (fabs(want) > w->size) w->size = fabs(want);
}

static void compare(const problem *p, const judged *j, const char *level) {
    const shape *s = &p->s;
    const size_t rows = s->b * s->s, d = s->nope + s->rope;
    worst w[N_MATS] = {{0, 0}};
    for (size_t r = 0; r < rows; r++)
        for (size_t h = 0; h < s->h; h++) {
            const size_t at = (r * s->h + h) * d, atv = (r * s->h + h) * s->v,
                         kv = h / n_sharing(s) * (s->nope + s->v);
            const bool first = h % n_sharing(s) == 0;
            for (size_t c = 0; c < d; c++) look(&w[DQ], get(p->m[DQ], r, h * d + c), j->dq[at + c]);
            for (size_t c = 0; first && c < s->nope; c++)
                look(&w[DKV], get(p->m[DKV], r, kv + c), j->dk[at + c]);
            for (size_t c = 0; c < s->v; c++) {
                look(&w[OUT], get(p->m[OUT], r, h * s->v + c), j->out[atv + c]);
                if (first) look(&w[DKV], get(p->m[DKV], r, kv + s->nope + c), j->dv[atv + c]);
            }
        }
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < s->rope; c++)
            look(&w[DKR], get(p->m[DKR], r, c), j->dkr[r * s->rope + c]);
    // fp32: chains of d and of S terms. bf16: every result is rounded by 2^-9 of itself, and so are
    // the probabilities and gradients of scores of which it is the sum: independently, so that they
    // add less than 2^-9 of the largest result. And delta, a dot product of d_v rounded outputs,
    // enters the gradients times the scale and a key or query (of up to 4).
    const double chain = sqrt((double)(d + s->v)) + sqrt((double)s->s) * 2;
    const double fp32 = ldexp(1, -24) * (16 + 4 * chain),
                 bf16 = p->dtype == DPL_BF16 ? ldexp(1, -8) : 0;
    const double delta = bf16 * sqrt((double)s->v) * p->scale * 4;
    for (int i = OUT; i < N_MATS; i++) {
        const double bound = (fp32 + bf16) * fmax(w[i].size, 1) + (i == OUT ? 0 : delta);
        if (!(w[i].error <= bound))
            print_error("%s B%zu S%zu H%zu %zu+%zu,%zu documents %d dtype %d matrix %d: error %g, "
                        "bound %g\n",
                        level, s->b, s->s, s->h, s->nope, s->rope, s->v, s->documents,
                        (int)p->dtype, i, w[i].error, bound);
        assert_true(w[i].error <= bound);
    }
}

static bool all_ones(const void *p, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (((const uint8_t *)p)[i] != 0xff) return false;
    return true;
}

static void check_canaries(const problem *p) {
    for (int i = 0; i < N_MATS; i++) {
        const size_t e = dpl_dtype_bytes(p->m[i].dtype), rows = p->s.b * p->s.s;
        assert_true(all_ones(mat_base(p, i), p->m[i].ld * e));
        assert_true(all_ones(dpl_mat_row(p->m[i], rows), p->m[i].ld * e));
        for (size_t r = 0; r < rows; r++)
            assert_true(all_ones(dpl_mat_at(p->m[i], r, p->width[i]).p, GAP * e));
    }
}

// Padding queries: output and logsumexp are exactly 0, and so is every gradient of padding rows.
static void check_padding(const problem *p) {
    for (size_t r = 0; p->segment && r < p->s.b * p->s.s; r++) {
        if (p->segment[r] != 0) continue;
        for (int i = OUT; i < N_MATS; i++)
            for (size_t c = 0; c < p->width[i]; c++) assert_true(get(p->m[i], r, c) == 0);
        for (size_t h = 0; h < p->s.h; h++)
            assert_true(p->lse[(r / p->s.s * p->s.h + h) * p->s.s + r % p->s.s] == 0);
    }
}

static const char *const levels[] = {"ref", "avx2", "avx512", "avx512_bf16", "amx", "tiles"};

static void check_shape_as(shape s, dpl_dtype dtype, bool mixed) {
    problem p;
    problem_open_as(&p, s, dtype, mixed);
    judged j;
    judge(&p, &j);
    for (size_t l = 0; l < DPL_COUNT(levels); l++) {
        dpl_ctx *ctx = open_ctx(levels[l], 2, false);
        if (!ctx) continue;
        for (int i = OUT; i < N_MATS; i++) memset(mat_base(&p, i), 0xff, mat_bytes(&p, i));
        run(ctx, &p);
        compare(&p, &j, levels[l]);
        check_canaries(&p);
        check_padding(&p);
        dpl_ctx_close(&ctx);
    }
    judged_close(&j);
    problem_close(&p);
}

static void check_shape(shape s, dpl_dtype dtype) {
    check_shape_as(s, dtype, false);
}

static void test_oracle(void **state) {
    (void)state;
    print_message("seed %d\n", SEED);
    static const shape shapes[] = {
        {1, 1, 1, 8, 4, 6, 0, 0},      {2, 3, 1, 1, 1, 1, 0, 0},
        {2, 13, 2, 8, 4, 6, 0, 0},     {1, 33, 3, 12, 4, 16, 0, 0},
        {2, 57, 2, 8, 4, 6, 1, 0},     {3, 131, 1, 5, 2, 3, 2, 0},
        {2, 256, 2, 32, 16, 32, 0, 0}, {2, 300, 2, 64, 32, 64, 1, 0},
        {1, 257, 1, 40, 24, 72, 2, 0}, {2, 200, 1, 128, 64, 128, 2, 0},
        {1, 600, 1, 16, 8, 33, 1, 0},  {1, 70, 1, 520, 30, 300, 0, 0},
        {2, 1100, 1, 8, 4, 6, 1, 0},   {1, 1300, 1, 7, 4, 9, 2, 0},
        {2, 57, 4, 16, 0, 16, 1, 2},   {1, 300, 6, 64, 0, 64, 2, 3},
        {1, 1100, 4, 8, 4, 6, 1, 4},
    };
    for (size_t i = 0; i < DPL_COUNT(shapes); i++) {
        check_shape(shapes[i], DPL_F32);
        check_shape(shapes[i], DPL_BF16);
        check_shape_as(shapes[i], DPL_F32, true);
        check_shape_as(shapes[i], DPL_BF16, true);
    }
}

static void test_long_sequence(void **state) {
    (void)state;
    check_shape((shape){1, 4096, 1, 8, 4, 6, 0, 0}, DPL_F32);
    check_shape((shape){1, 4096, 1, 8, 4, 6, 1, 0}, DPL_BF16);
}

/* ---- finite differences ---- */

static double loss(dpl_ctx *ctx, problem *p) {
    const dpl_attention a = arguments(p);
    dpl_attention_forward(ctx, &a, p->m[OUT], p->lse);
    double sum = 0;
    for (size_t r = 0; r < p->s.b * p->s.s; r++)
        for (size_t c = 0; c < p->width[OUT]; c++)
            sum += get(p->m[OUT], r, c) * get(p->m[DOUT], r, c);
    return sum;
}

// Moves matrix `i` by step along a direction; returns the gradient's component along it.
static double move(problem *p, int i, double step) {
    const int grad = i == Q ? DQ : i == KV ? DKV : DKR;
    double slope = 0;
    for (size_t r = 0; r < p->s.b * p->s.s; r++)
        for (size_t c = 0; c < p->width[i]; c++) {
            const double d = dpl_rng_normal(SEED, 99 + (uint64_t)i, r * 1000 + c);
            put(p->m[i], r, c, get(p->m[i], r, c) + step * d);
            slope += d * get(p->m[grad], r, c);
        }
    return slope;
}

static void test_finite_differences(void **state) {
    (void)state;
    dpl_ctx *ctx = open_ctx("ref", 1, false);
    for (int documents = 0; documents <= 2; documents += 2) {
        problem p;
        problem_open(&p, (shape){2, 19, 2, 8, 4, 6, documents, 0}, DPL_F32);
        run(ctx, &p);
        for (int i = Q; i <= KR; i++) {
            const double step = 1.0 / 256, slope = move(&p, i, step), up = loss(ctx, &p);
            move(&p, i, -2 * step);
            const double down = loss(ctx, &p), measured = (up - down) / (2 * step);
            move(&p, i, step);
            if (fabs(measured - slope) > 2e-3 * fabs(slope) + 1e-3)
                print_error("matrix %d: slope %g, measured %g\n", i, slope, measured);
            assert_true(fabs(measured - slope) <= 2e-3 * fabs(slope) + 1e-3);
        }
        problem_close(&p);
    }
    dpl_ctx_close(&ctx);
}

/* ---- bits ---- */

static void assert_same_bits(const problem *a, const problem *b) {
    for (int i = OUT; i < N_MATS; i++)
        assert_memory_equal(mat_base(a, i), mat_base(b, i), mat_bytes(a, i));
    assert_memory_equal(a->lse, b->lse, a->s.b * a->s.s * a->s.h * sizeof(float));
}

static void check_threads(const char *level, shape s, dpl_dtype dtype) {
    problem one, many;
    dpl_ctx *ctx = open_ctx(level, 1, false);
    if (!ctx) return;
    problem_open(&one, s, dtype);
    run(ctx, &one);
    dpl_ctx_close(&ctx);
    for (int n_threads = 2; n_threads <= 8; n_threads += n_threads == 2 ? 1 : 5) {
        problem_open(&many, s, dtype);
        ctx = open_ctx(level, n_threads, false);
        run(ctx, &many);
        run(ctx, &many); // and again, over what is there
        assert_same_bits(&one, &many);
        dpl_ctx_close(&ctx);
        problem_close(&many);
    }
    problem_close(&one);
}

static void test_threads(void **state) {
    (void)state;
    for (size_t l = 0; l < DPL_COUNT(levels); l++) {
        check_threads(levels[l], (shape){2, 650, 3, 8, 4, 6, 1, 0}, DPL_F32);
        check_threads(levels[l], (shape){2, 650, 3, 8, 4, 6, 1, 0}, DPL_BF16);
        // Several tasks add to a query's gradient, for as many heads at once as threads want.
        check_threads(levels[l], (shape){1, 1100, 9, 3, 2, 4, 1, 0}, DPL_F32);
    }
}

static void test_deferred(void **state) {
    (void)state;
    problem plain, late;
    const shape s = {2, 150, 2, 8, 4, 6, 2, 0};
    problem_open(&plain, s, DPL_F32);
    problem_open(&late, s, DPL_F32);
    dpl_ctx *ctx = open_ctx("ref", 2, false);
    run(ctx, &plain);
    dpl_ctx_close(&ctx);
    ctx = open_ctx("ref", 2, true);
    const size_t lse_bytes = s.b * s.s * s.h * sizeof(float);
    const dpl_attention a = arguments(&late);
    float *lse = dpl_ctx_alloc(ctx, lse_bytes);
    memset(lse, 0, lse_bytes);
    dpl_attention_forward(ctx, &a, late.m[OUT], lse);
    dpl_attention_backward(ctx, &a, late.m[OUT], lse, late.m[DOUT], late.m[DQ], late.m[DKV],
                           late.m[DKR]);
    assert_true(all_ones(lse, lse_bytes)); // nothing has run yet, and its output is poisoned
    dpl_ctx_read(ctx, late.lse, lse, lse_bytes);
    assert_same_bits(&plain, &late);
    dpl_ctx_close(&ctx);
    problem_close(&plain);
    problem_close(&late);
}

// What comes after a row, and what padding rows hold, changes no bit of it.
static void check_row_independence(dpl_ctx *ctx, dpl_dtype dtype) {
    const size_t whole = 1333, part = 1150, e = dpl_dtype_bytes(dtype);
    problem p, q;
    problem_open(&p, (shape){1, whole, 2, 8, 4, 6, 0, 0}, dtype);
    problem_open(&q, (shape){1, part, 2, 8, 4, 6, 0, 0}, dtype);
    run(ctx, &p);
    run(ctx, &q);
    assert_memory_equal(p.m[OUT].p, q.m[OUT].p, part * p.m[OUT].ld * e);
    assert_memory_equal(p.m[DQ].p, q.m[DQ].p, part * p.m[DQ].ld * e);
    problem_close(&p);
    problem_close(&q);
}

static void check_nan_in_padding(dpl_ctx *ctx, dpl_dtype dtype) {
    problem clean, dirty;
    const shape s = {2, 170, 2, 8, 4, 6, 2, 0};
    problem_open(&clean, s, dtype);
    problem_open(&dirty, s, dtype);
    for (size_t r = 0; r < s.b * s.s; r++)
        for (int i = Q; dirty.segment[r] == 0 && i <= DOUT; i++)
            for (size_t c = 0; c < dirty.width[i]; c++) put(dirty.m[i], r, c, NAN);
    run(ctx, &clean);
    run(ctx, &dirty);
    assert_same_bits(&clean, &dirty);
    problem_close(&clean);
    problem_close(&dirty);
}

// A NaN that a query does see is never hidden: rows before it are right, rows after it NaN.
static void check_nan_is_kept(dpl_ctx *ctx, dpl_dtype dtype) {
    for (int i = KV; i <= KR; i++) {
        problem p;
        problem_open(&p, (shape){1, 300, 1, 8, 4, 6, 0, 0}, dtype);
        for (size_t r = 250; r < 300; r++) put(p.m[i], r, 0, NAN); // some of a block, then all
        run(ctx, &p);
        for (size_t r = 0; r < 300; r++) assert_true(isnan(get(p.m[OUT], r, 0)) == (r >= 250));
        problem_close(&p);
    }
}

static void each_level(void (*check)(dpl_ctx *ctx, dpl_dtype dtype)) {
    for (size_t l = 0; l < DPL_COUNT(levels); l++) {
        dpl_ctx *ctx = open_ctx(levels[l], 2, false);
        if (!ctx) continue;
        check(ctx, DPL_F32);
        check(ctx, DPL_BF16);
        dpl_ctx_close(&ctx);
    }
}

static void test_row_independence(void **state) {
    (void)state;
    each_level(check_row_independence);
}

static void test_nan_in_padding(void **state) {
    (void)state;
    each_level(check_nan_in_padding);
}

static void test_nan_is_kept(void **state) {
    (void)state;
    each_level(check_nan_is_kept);
}

static void test_nothing(void **state) {
    (void)state;
    check_shape((shape){0, 5, 2, 8, 4, 6, 1, 0}, DPL_F32);
    check_shape((shape){2, 0, 2, 8, 4, 6, 1, 0}, DPL_F32);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_oracle),
        cmocka_unit_test(test_long_sequence),
        cmocka_unit_test(test_finite_differences),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_deferred),
        cmocka_unit_test(test_row_independence),
        cmocka_unit_test(test_nan_in_padding),
        cmocka_unit_test(test_nan_is_kept),
        cmocka_unit_test(test_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
