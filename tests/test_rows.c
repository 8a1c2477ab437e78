/*
 * test_rows.c - the row, loss, embedding and optimizer operators against plain fp64 loops.
 *
 * Each case runs at every CPU level, in fp32 and bf16, with 1, 2, 3 and 8 threads and on a deferred
 * context; all runs of one level and type must leave the same bytes. Outputs start as 0xFF (NaN),
 * lie between canaries, and the columns between rows must stay as they were. Error bounds are
 * counted in roundings: U of fp32 times the size of what was added up.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "cpu/kernels.h"
#include "cpu/ops.h"

#define U          0x1p-24
#define U_BF16     0x1p-8
#define CANARY     64
#define GAP        0x5a // columns between rows
#define BLOCKS_MAX 32

typedef struct block {
    uint8_t *p;
    size_t rows, row_bytes, ld_bytes;
} block;

// The run that is going on, and the bytes that the first run of its kind left.
static struct {
    dpl_ctx *ctx;
    dpl_dtype dtype;
    uint64_t seed, stream;
    block blocks[BLOCKS_MAX];
    size_t n_blocks, mark;
    uint8_t *first_run;
    size_t first_bytes, at;
    bool is_first;
} t;

/* ---- blocks between canaries --------------------------------------------------------------------
 */

static void *block_new(size_t rows, size_t row_bytes, size_t ld_bytes) {
    const size_t bytes = rows * ld_bytes;
    uint8_t *p = dpl_ctx_alloc(t.ctx, bytes + 2 * CANARY);
    memset(p, 0xa5, CANARY);
    memset(p + CANARY, GAP, bytes);
    for (size_t r = 0; r < rows; r++) memset(p + CANARY + r * ld_bytes, 0xff, row_bytes);
    memset(p + CANARY + bytes, 0xa5, CANARY);
    assert_true(t.n_blocks < BLOCKS_MAX);
    t.blocks[t.n_blocks++] = (block){p + CANARY, rows, row_bytes, ld_bytes};
    return p + CANARY;
}

static dpl_mat mat_of(dpl_dtype dtype, size_t rows, size_t cols, size_t pad) {
    const size_t bytes = dpl_dtype_bytes(dtype);
    return (dpl_mat){block_new(rows, cols * bytes, (cols + pad) * bytes), cols + pad, dtype};
}

static float *floats(size_t n) {
    return block_new(1, n * 4, n * 4);
}

static double draw(void) {
    return dpl_rng_normal(t.seed, 7, t.stream++);
}

static void put(dpl_mat m, size_t row, size_t col, double x) {
    void *p = dpl_mat_at(m, row, col).p;
    if (m.dtype == DPL_F32) *(float *)p = (float)x;
    else *(uint16_t *)p = dpl_f32_to_bf16((float)x);
}

static double get(dpl_mat m, size_t row, size_t col) {
    const void *p = dpl_mat_at(m, row, col).p;
    return m.dtype == DPL_F32 ? (double)*(const float *)p
                              : (double)dpl_bf16_to_f32(*(const uint16_t *)p);
}

static dpl_mat mat_drawn(dpl_dtype dtype, size_t rows, size_t cols, size_t pad, double scale) {
    const dpl_mat m = mat_of(dtype, rows, cols, pad);
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < cols; c++) put(m, r, c, scale * draw());
    return m;
}

static float *floats_drawn(size_t n, double scale) {
    float *x = floats(n);
    for (size_t i = 0; i < n; i++) x[i] = (float)(scale * draw());
    return x;
}

static float *floats_copied(const float *from, size_t n) {
    float *x = floats(n);
    memcpy(x, from, n * sizeof *x);
    return x;
}

static void begin(void) {
    t.n_blocks = 0;
    t.mark = dpl_ctx_mark(t.ctx);
}

// Waits; then canaries and gaps must be whole, and all bytes those of the first run.
static void settle(void) {
    dpl_ctx_wait(t.ctx);
    for (size_t i = 0; i < t.n_blocks; i++) {
        const block *b = &t.blocks[i];
        const size_t bytes = b->rows * b->ld_bytes;
        for (size_t c = 0; c < CANARY; c++) {
            assert_int_equal(b->p[(ptrdiff_t)c - CANARY], 0xa5);
            assert_int_equal(b->p[bytes + c], 0xa5);
        }
        for (size_t r = 0; r < b->rows; r++)
            for (size_t c = b->row_bytes; c < b->ld_bytes; c++)
                assert_int_equal(b->p[r * b->ld_bytes + c], GAP);
        if (t.is_first) {
            t.first_run = realloc(t.first_run, t.at + bytes + 1);
            assert_non_null(t.first_run);
            memcpy(t.first_run + t.at, b->p, bytes);
            t.first_bytes = t.at + bytes;
        }
        assert_true(t.at + bytes <= t.first_bytes);
        assert_memory_equal(t.first_run + t.at, b->p, bytes);
        t.at += bytes;
    }
}

static void end(void) {
    dpl_ctx_release(t.ctx, t.mark);
}

/* ---- comparing ----------------------------------------------------------------------------------
 */

static void near(double got, double want, double bound, const char *what, size_t row, size_t col) {
    // Written so that NaN fails. The last term: what fp32 flushes or rounds near zero.
    if (got != want && !(fabs(got - want) <= bound + 0x1p-126))
        fail_msg("%s (%zu, %zu): got %.9g, want %.9g, bound %.3g, level %s, %s, seed %llu", what,
                 row, col, got, want, bound, dpl_ctx_cpu_level(t.ctx),
                 t.dtype == DPL_F32 ? "f32" : "bf16", (unsigned long long)t.seed);
}

// Adds the rounding of the store to the bound.
static void mat_near(dpl_mat m, size_t row, size_t col, double want, double bound,
                     const char *what) {
    const double store = m.dtype == DPL_BF16 ? U_BF16 * (fabs(want) + bound) : U * fabs(want);
    near(get(m, row, col), want, bound + store, what, row, col);
}

static bool open_ctx(const char *level, int threads, bool deferred) {
    setenv("DPL_CPU", level, 1);
    const dpl_status status = dpl_ctx_create(threads, deferred, (size_t)1 << 30, &t.ctx);
    if (status != DPL_OK) print_message("level %s left out: %s\n", level, dpl_error_message());
    unsetenv("DPL_CPU");
    return status == DPL_OK;
}

// Every level, type, thread count and kind of context.
static void each_way(void (*run_case)(void)) {
    static const struct {
        int threads;
        bool deferred;
    } ways[] = {{1, false}, {2, false}, {3, false}, {8, false}, {2, true}};
    for (int level = 0; level < DPL_CPU_N; level++)
        for (int dtype = DPL_F32; dtype <= DPL_BF16; dtype++)
            for (size_t way = 0; way < DPL_COUNT(ways); way++) {
                const char *name = dpl_cpu_level_name((dpl_cpu_level)level);
                if (!open_ctx(name, ways[way].threads, ways[way].deferred)) break;
                t.dtype = (dpl_dtype)dtype;
                t.is_first = way == 0;
                t.at = 0;
                if (t.is_first) t.first_bytes = 0;
                t.stream = 0;
                run_case();
                assert_int_equal(t.at, t.first_bytes);
                dpl_ctx_close(&t.ctx);
            }
}

static const struct {
    size_t n, d, pad;
} shapes[] = {{0, 5, 0},    {1, 1, 0},   {3, 17, 0},   {5, 64, 9},
              {2, 1025, 0}, {71, 37, 3}, {261, 13, 0}, {3, 3001, 5}};

/* ---- RMSNorm ------------------------------------------------------------------------------------
 */

#define EPS 1e-6f
// Roundings of a sum of squares: 64 + 5 additions in a block, then the square, the root, products.
#define NORM_U (96 * U)

static void check_norm_forward(dpl_mat x, const float *gain, size_t n, size_t d, dpl_mat y,
                               const float *rstd) {
    for (size_t r = 0; r < n; r++) {
        double squares = 0;
        for (size_t c = 0; c < d; c++) squares += get(x, r, c) * get(x, r, c);
        const double want = 1 / sqrt(squares / (double)d + (double)EPS);
        near((double)rstd[r], want, NORM_U * want, "rstd", r, 0);
        for (size_t c = 0; c < d; c++) {
            const double wanted = get(x, r, c) * want * (double)gain[c];
            mat_near(y, r, c, wanted, NORM_U * fabs(wanted), "norm y");
        }
    }
}

static void check_norm_backward(dpl_mat dy, dpl_mat x, const float *gain, const float *rstd,
                                size_t n, size_t d, dpl_mat dx, const double *before,
                                const float *dgain, const float *dgain_before) {
    double *want = calloc(2 * d, sizeof *want);
    assert_non_null(want);
    for (size_t r = 0; r < n; r++) {
        const double s = (double)rstd[r];
        double dot = 0, size = 0;
        for (size_t c = 0; c < d; c++) {
            const double term = get(dy, r, c) * (double)gain[c] * get(x, r, c);
            dot += term;
            size += fabs(term);
            want[c] += get(dy, r, c) * get(x, r, c) * s;
            want[d + c] += fabs(get(dy, r, c) * get(x, r, c) * s);
        }
        for (size_t c = 0; c < d; c++) {
            const double a = s * get(dy, r, c) * (double)gain[c];
            const double k = s * s * s / (double)d * get(x, r, c);
            const double old = before ? before[r * d + c] : 0;
            mat_near(dx, r, c, old + a - k * dot,
                     NORM_U * (fabs(a) + fabs(k) * size) + U * fabs(old), "norm dx");
        }
    }
    for (size_t c = 0; c < d; c++) {
        const double old = (double)dgain_before[c];
        near((double)dgain[c], old + want[c], ((double)n + 70) * U * (want[d + c] + fabs(old)),
             "dgain", 0, c);
    }
    free(want);
}

static void norm_shape(size_t n, size_t d, size_t pad, bool accumulate) {
    begin();
    const dpl_mat x = mat_drawn(t.dtype, n, d, pad, 2), y = mat_of(t.dtype, n, d, pad);
    for (size_t c = 0; n > 1 && c < d; c++) put(x, 1, c, 0); // a row of zeros
    const float *gain = floats_drawn(d, 1);
    float *rstd = floats(n);
    dpl_rmsnorm_forward(t.ctx, x, gain, n, d, EPS, y, rstd);
    const dpl_mat dy = mat_drawn(t.dtype, n, d, pad, 1);
    dpl_mat dx = mat_of(accumulate ? DPL_F32 : t.dtype, n, d, pad);
    double *before = calloc(n * d + 1, sizeof *before);
    assert_non_null(before);
    for (size_t r = 0; accumulate && r < n; r++)
        for (size_t c = 0; c < d; c++) {
            put(dx, r, c, draw());
            before[r * d + c] = get(dx, r, c);
        }
    float *dgain = floats_drawn(d, 1), *dgain_before = floats_copied(dgain, d);
    dpl_rmsnorm_backward(t.ctx, dy, x, gain, rstd, n, d, dx, accumulate, dgain);
    settle();
    check_norm_forward(x, gain, n, d, y, rstd);
    check_norm_backward(dy, x, gain, rstd, n, d, dx, accumulate ? before : NULL, dgain,
                        dgain_before);
    free(before);
    end();
}

// The norm of a sum has the bits of the two operators; `in_place` 1: sum is a, 2: sum is b.
static void add_norm_shape(size_t n, size_t d, size_t pad, dpl_dtype y_dtype, int in_place) {
    begin();
    const dpl_dtype a_dtype = in_place == 1 ? DPL_F32 : t.dtype;
    const dpl_mat a = mat_drawn(a_dtype, n, d, pad, 2);
    const dpl_mat b = mat_drawn(in_place == 2 ? DPL_F32 : t.dtype, n, d, pad + 1, 1);
    const dpl_mat want_sum = mat_of(DPL_F32, n, d, pad), want_y = mat_of(y_dtype, n, d, pad);
    const dpl_mat sum = in_place ? in_place == 1 ? a : b : mat_of(DPL_F32, n, d, 2);
    const dpl_mat y = mat_of(y_dtype, n, d, pad);
    const float *gain = floats_drawn(d, 1);
    float *want_rstd = floats(n), *rstd = floats(n);
    dpl_add(t.ctx, a, b, n, d, want_sum);
    dpl_rmsnorm_forward(t.ctx, want_sum, gain, n, d, EPS, want_y, want_rstd);
    dpl_add_rmsnorm_forward(t.ctx, a, b, gain, n, d, EPS, sum, y, rstd);
    settle();
    assert_memory_equal(rstd, want_rstd, n * sizeof *rstd);
    for (size_t r = 0; r < n; r++) {
        assert_memory_equal(dpl_mat_row(sum, r), dpl_mat_row(want_sum, r), d * sizeof(float));
        assert_memory_equal(dpl_mat_row(y, r), dpl_mat_row(want_y, r),
                            d * dpl_dtype_bytes(y_dtype));
    }
    end();
}

static void norm_case(void) {
    for (size_t i = 0; i < DPL_COUNT(shapes); i++) {
        for (int accumulate = 0; accumulate < 2; accumulate++)
            norm_shape(shapes[i].n, shapes[i].d, shapes[i].pad, accumulate);
        for (int way = 0; way < 6; way++)
            add_norm_shape(shapes[i].n, shapes[i].d, shapes[i].pad, (dpl_dtype)(way % 2), way / 2);
    }
}

static void test_norm(void **state) {
    (void)state, each_way(norm_case);
}

/* ---- RoPE ---------------------------------------------------------------------------------------
 */

static void rope_shape(size_t n, size_t n_heads, size_t d_rope, size_t pad, bool interleaved) {
    const size_t first = 3, stride = first + d_rope + 2, half = d_rope / 2, n_positions = 9;
    begin();
    const dpl_mat x = mat_drawn(t.dtype, n, n_heads * stride, pad, 1);
    const dpl_mat y = mat_of(t.dtype, n, n_heads * stride, pad);
    dpl_copy(t.ctx, x, n, n_heads * stride, y);
    float *cosine = floats(n_positions * half), *sine = floats(n_positions * half);
    for (size_t i = 0; i < n_positions * half; i++) {
        const double angle = draw() * 3;
        cosine[i] = (float)cos(angle), sine[i] = (float)sin(angle);
    }
    int32_t *position = block_new(1, n * 4, n * 4);
    for (size_t r = 0; r < n; r++) position[r] = (int32_t)((r * 5 + 1) % n_positions);
    const bool inverse = n % 2;
    const dpl_rope rope = {cosine, sine, position, n_heads, stride, first, d_rope, interleaved};
    dpl_rope_apply(t.ctx, &rope, n, inverse, y);
    settle();
    for (size_t r = 0; r < n; r++)
        for (size_t h = 0; h < n_heads; h++)
            for (size_t c = 0; c < stride; c++) {
                const size_t at = h * stride + c;
                if (c < first || c >= first + d_rope) { // not rotated
                    assert_true(get(y, r, at) == get(x, r, at));
                    continue;
                }
                const size_t i = c - first, pair = interleaved ? i / 2 : i % half;
                const bool is_second = interleaved ? i % 2 : i >= half;
                const size_t step = interleaved ? 1 : half;
                const double other = get(x, r, is_second ? at - step : at + step);
                const size_t angle = (size_t)position[r] * half + pair;
                const double co = (double)cosine[angle];
                const double si = (double)sine[angle] * (inverse ? -1 : 1);
                mat_near(y, r, at, get(x, r, at) * co + (is_second ? other : -other) * si,
                         3 * U * (fabs(get(x, r, at)) + fabs(other)), "rope");
            }
    end();
}

static void rope_case(void) {
    for (int interleaved = 0; interleaved < 2; interleaved++) {
        rope_shape(0, 1, 4, 0, interleaved);
        rope_shape(5, 3, 2, 1, interleaved);
        rope_shape(67, 2, 22, 0, interleaved);
        rope_shape(2, 1, 64, 7, interleaved);
        rope_shape(3, 1, 2060, 0, interleaved);
    }
}

static void test_rope(void **state) {
    (void)state, each_way(rope_case);
}

/* ---- add, copy, zero ----------------------------------------------------------------------------
 */

static void move_shape(size_t n, size_t d, size_t pad) {
    begin();
    const dpl_dtype other = t.dtype == DPL_F32 ? DPL_BF16 : DPL_F32;
    const dpl_mat a = mat_drawn(t.dtype, n, d, pad, 1), b = mat_drawn(other, n, d, 0, 1);
    const dpl_mat sum = mat_of(t.dtype, n, d, pad), in_place = mat_of(t.dtype, n, d, pad);
    const dpl_mat converted = mat_of(other, n, d, pad);
    uint8_t *zeros = block_new(1, n * d + 1, n * d + 1);
    dpl_add(t.ctx, a, b, n, d, sum);
    dpl_copy(t.ctx, a, n, d, in_place);
    dpl_add(t.ctx, in_place, b, n, d, in_place);
    dpl_copy(t.ctx, a, n, d, converted);
    dpl_zero(t.ctx, zeros, n * d);
    settle();
    for (size_t r = 0; r < n; r++)
        for (size_t c = 0; c < d; c++) {
            mat_near(sum, r, c, get(a, r, c) + get(b, r, c), U * fabs(get(a, r, c) + get(b, r, c)),
                     "add");
            assert_true(get(in_place, r, c) == get(sum, r, c));
            const float x = (float)get(a, r, c);
            const float want = other == DPL_F32 ? x : dpl_bf16_to_f32(dpl_f32_to_bf16(x));
            assert_true(get(converted, r, c) == (double)want);
        }
    for (size_t i = 0; i < n * d; i++) assert_int_equal(zeros[i], 0);
    assert_int_equal(zeros[n * d], 0xff);
    end();
}

static void move_case(void) {
    for (size_t i = 0; i < DPL_COUNT(shapes); i++)
        move_shape(shapes[i].n, shapes[i].d, shapes[i].pad);
}

static void test_add_copy_zero(void **state) {
    (void)state, each_way(move_case);
}

/* ---- embedding ----------------------------------------------------------------------------------
 */

static size_t table_index(bool in_panels, size_t id, size_t c, size_t d) {
    return in_panels ? dpl_panel_index(id, c, d) : id * d + c;
}

// Nothing is rounded forward (but the store); backward adds in row order in fp32: exact equality.
static void embed_shape(size_t n, size_t d, size_t pad, bool in_panels) {
    const size_t v = 45, n_table = in_panels ? dpl_panel_elems(v, d) : v * d;
    begin();
    const float *table = floats_drawn(n_table, 1);
    float *dtable = floats_drawn(n_table, 1), *want = floats_copied(dtable, n_table);
    int32_t *ids = block_new(1, n * 4, n * 4);
    for (size_t r = 0; r < n; r++)
        ids[r] = (int32_t)(dpl_rng_u64(t.seed, 8, r) % v) / (r % 3 ? 1 : 9);
    if (n > 2) ids[2] = -1;
    if (n > 3) ids[3] = (int32_t)v; // Outside: a row of zeros, no gradient.
    const dpl_mat y = mat_of(t.dtype, n, d, pad), dy = mat_drawn(t.dtype, n, d, pad, 1);
    dpl_embed_forward(t.ctx, table, in_panels, ids, n, v, d, y);
    dpl_embed_backward(t.ctx, dy, ids, in_panels, n, v, d, dtable);
    settle();
    for (size_t r = 0; r < n; r++) {
        const bool is_known = ids[r] >= 0 && (size_t)ids[r] < v;
        for (size_t c = 0; c < d; c++) {
            const size_t at = is_known ? table_index(in_panels, (size_t)ids[r], c, d) : 0;
            const float x = is_known ? table[at] : 0;
            const float stored = t.dtype == DPL_F32 ? x : dpl_bf16_to_f32(dpl_f32_to_bf16(x));
            assert_true(get(y, r, c) == (double)stored);
            if (is_known) want[at] += (float)get(dy, r, c);
        }
    }
    assert_memory_equal(dtable, want, n_table * sizeof *want);
    end();
}

static void embed_case(void) {
    for (size_t i = 0; i < DPL_COUNT(shapes); i++)
        for (int in_panels = 0; in_panels < 2; in_panels++)
            embed_shape(shapes[i].n, shapes[i].d, shapes[i].pad, in_panels);
}

static void test_embed(void **state) {
    (void)state, each_way(embed_case);
}

/* ---- cross-entropy ------------------------------------------------------------------------------
 */

static void check_xent_row(const float *x, int32_t target, size_t v, double z, double dscale,
                           const float *got, float loss, float zloss) {
    double max = -INFINITY, sum = 0;
    for (size_t c = 0; c < v; c++) max = fmax(max, (double)x[c]);
    for (size_t c = 0; c < v; c++) sum += exp((double)x[c] - max);
    const double lse = max + log(sum), want = lse - (double)x[target];
    // A block sums in 64 + 5 additions; exp has 2 ulp; the argument's own rounding is taken below.
    const double err = 80 * U;
    near((double)loss, want, err + U * fabs(want), "loss", 0, 0);
    near((double)zloss, z * lse * lse, z * (2 * fabs(lse) + err) * err + U * z * lse * lse, "zloss",
         0, 0);
    for (size_t c = 0; c < v; c++) {
        const double p = exp((double)x[c] - lse), slope = dscale * (1 + 2 * z * lse);
        const double d = slope * p - (c == (size_t)target ? dscale : 0);
        const double far = (double)x[c] == -INFINITY ? 0 : fabs((double)x[c] - max);
        const double bound = fabs(slope) * p * (err + U * far) + U * fabs(d);
        near((double)got[c], dscale != 0 ? d : (double)x[c], dscale != 0 ? bound : 0, "dlogits", 0,
             c);
    }
}

static void xent_shape(size_t n, size_t v, size_t pad, float z, float dscale, double scale) {
    begin();
    const dpl_mat logits = mat_drawn(DPL_F32, n, v, pad, scale);
    for (size_t r = 0; r < n && v > 2; r++) put(logits, r, (r * 3 + 1) % v, -INFINITY);
    const dpl_mat before = mat_of(DPL_F32, n, v, pad);
    dpl_copy(t.ctx, logits, n, v, before);
    int32_t *targets = block_new(1, n * 4, n * 4);
    for (size_t r = 0; r < n; r++)
        targets[r] = r % 4 == 3 ? -1 : (int32_t)((r * 3 + (v > 2 ? 2 : 0)) % v);
    float *loss = floats(n), *zloss = floats(n);
    dpl_xent(t.ctx, logits.p, logits.ld, targets, n, v, z, dscale, loss, zloss);
    settle();
    for (size_t r = 0; r < n; r++) {
        const float *x = dpl_mat_row(before, r), *got = dpl_mat_row(logits, r);
        if (targets[r] >= 0) {
            check_xent_row(x, targets[r], v, (double)z, (double)dscale, got, loss[r], zloss[r]);
            continue;
        }
        assert_true(loss[r] == 0 && zloss[r] == 0);
        for (size_t c = 0; c < v; c++) assert_true(got[c] == (dscale != 0 ? 0 : x[c]));
    }
    end();
}

static void xent_case(void) {
    if (t.dtype == DPL_BF16) { // Logits are fp32 always; this turn takes the widest vocabulary.
        xent_shape(2, 200003, 0, 1e-4f, 0.5f, 4);
        return;
    }
    for (size_t i = 0; i < DPL_COUNT(shapes); i++) {
        xent_shape(shapes[i].n, shapes[i].d, shapes[i].pad, 0, 0, 3);
        xent_shape(shapes[i].n, shapes[i].d, shapes[i].pad, 0, 0.25f, 3);
        xent_shape(shapes[i].n, shapes[i].d, shapes[i].pad, 1e-3f, 1.5f, 3);
        xent_shape(shapes[i].n, shapes[i].d, shapes[i].pad, 1e-8f, 1.0f, 3000); // no overflow
    }
}

static void test_xent(void **state) {
    (void)state, each_way(xent_case);
}

// Logits at the end of the range, a target at -inf, and what is not a number.
static void test_xent_extremes(void **state) {
    (void)state;
    assert_true(open_ctx("ref", 1, false));
    float x[4][3] = {{3e38f, -3e38f, 0}, {0, -INFINITY, 0}, {NAN, 0, 0}, {INFINITY, 0, 0}};
    const int32_t targets[4] = {0, 1, 1, 1};
    float loss[4], zloss[4];
    dpl_xent(t.ctx, x[0], 3, targets, 4, 3, 0, 1, loss, zloss);
    assert_true(loss[0] == 0 && x[0][0] == 0 && x[0][1] == 0 && x[0][2] == 0);
    assert_true(isinf(loss[1]) && loss[1] > 0);
    assert_true(x[1][0] == 0.5f && x[1][1] == -1.0f);
    assert_true(isnan(loss[2]));
    assert_true(!isfinite(loss[3]));
    dpl_ctx_close(&t.ctx);
}

/* ---- finite differences -------------------------------------------------------------------------
 */

#define FD_D 21
typedef struct fd_case {
    size_t n; // variables
    float fixed[FD_D];
    double (*loss)(const struct fd_case *c, const double *x);
} fd_case;

static void fd_check(const fd_case *c, const double *x0, const float *got) {
    double x[3 * FD_D];
    memcpy(x, x0, c->n * sizeof *x);
    for (size_t i = 0; i < c->n; i++) {
        const double h = 1e-5;
        x[i] = x0[i] + h;
        const double above = c->loss(c, x);
        x[i] = x0[i] - h;
        const double below = c->loss(c, x);
        x[i] = x0[i];
        // Truncation is h^2 = 1e-10, cancellation 1e-16 / h = 1e-11, times sizes of a few tens.
        near((double)got[i], (above - below) / (2 * h), 1e-7 + NORM_U * 50, "finite difference", 0,
             i);
    }
}

static double norm_loss(const fd_case *c, const double *x) {
    double squares = 0, loss = 0;
    for (int i = 0; i < FD_D; i++) squares += x[i] * x[i];
    for (int i = 0; i < FD_D; i++)
        loss += (double)c->fixed[i] * x[i] * x[FD_D + i] / sqrt(squares / FD_D + (double)EPS);
    return loss;
}

static double xent_loss(const fd_case *c, const double *x) {
    double sum = 0;
    for (int i = 0; i < FD_D; i++) sum += exp(x[i]);
    const double lse = log(sum);
    return (double)c->fixed[0] * (lse - x[5] + 0.125 * lse * lse);
}

static void test_finite_differences(void **state) {
    (void)state;
    assert_true(open_ctx("ref", 2, false));
    fd_case c;
    double x[3 * FD_D];
    float in[3 * FD_D], got[3 * FD_D], y[FD_D], scalar[2];
    for (int i = 0; i < FD_D; i++) c.fixed[i] = (float)draw();
    for (int i = 0; i < 3 * FD_D; i++) x[i] = (double)(in[i] = (float)draw());

    c.n = 2 * FD_D, c.loss = norm_loss;
    memset(got, 0, sizeof got);
    dpl_rmsnorm_forward(t.ctx, dpl_mat_f32(in, FD_D), in + FD_D, 1, FD_D, EPS, dpl_mat_f32(y, FD_D),
                        scalar);
    dpl_rmsnorm_backward(t.ctx, dpl_mat_f32(c.fixed, FD_D), dpl_mat_f32(in, FD_D), in + FD_D,
                         scalar, 1, FD_D, dpl_mat_f32(got, FD_D), false, got + FD_D);
    fd_check(&c, x, got);

    const int32_t target = 5;
    memcpy(got, in, sizeof got);
    dpl_xent(t.ctx, got, FD_D, &target, 1, FD_D, 0.125f, c.fixed[0], scalar, scalar + 1);
    c.n = FD_D, c.loss = xent_loss;
    fd_check(&c, x, got);
    dpl_ctx_close(&t.ctx);
}

/* ---- optimizer ----------------------------------------------------------------------------------
 */

static void check_adamw(const dpl_adamw *a, size_t n, const float *g, const float *before[3],
                        const float *p, const float *m, const float *v) {
    const double c1 = 1 - (double)a->b1, c2 = 1 - (double)a->b2;
    for (size_t i = 0; i < n; i++) {
        const double gi = (double)g[i] * (double)a->grad_scale;
        const double m1 = (double)a->b1 * (double)before[1][i], m2 = c1 * gi;
        const double vi = (double)a->b2 * (double)before[2][i] + c2 * gi * gi;
        near((double)m[i], m1 + m2, 4 * U * (fabs(m1) + fabs(m2)), "m", 0, i);
        near((double)v[i], vi, 6 * U * vi, "v", 0, i);
        const double den = sqrt(vi / (double)a->correct2 + (double)a->eps_root) + (double)a->eps;
        const double u = (m1 + m2) / (double)a->correct1 / den;
        const double u_err = 16 * U * (fabs(m1) + fabs(m2)) / (double)a->correct1 / den;
        const double pi = (double)before[0][i], lr = (double)a->lr;
        near((double)p[i], pi - lr * (u + (double)a->decay * pi),
             U * fabs(pi) + lr * (u_err + 4 * U * fabs((double)a->decay * pi)) + U * lr * fabs(u),
             "p", 0, i);
    }
}

static void optim_size(size_t n) {
    const dpl_adamw a = {.lr = 0.01f,
                         .b1 = 0.9f,
                         .b2 = 0.95f,
                         .eps = 1e-8f,
                         .eps_root = 1e-12f,
                         .decay = 0.1f,
                         .correct1 = 0.271f,
                         .correct2 = 0.142625f,
                         .grad_scale = 0.5f};
    begin();
    const float *g = floats_drawn(n, 1);
    float *p = floats_drawn(n, 1), *m = floats_drawn(n, 0.1), *v = floats_drawn(n, 0.1);
    for (size_t i = 0; i < n; i++) v[i] *= v[i];
    const float *before[] = {floats_copied(p, n), floats_copied(m, n), floats_copied(v, n)};
    uint16_t *copy = block_new(1, n * 2, n * 2), *rounded = block_new(1, n * 2, n * 2);
    double *sums = block_new(1, 16, 16);
    const bool panels = n % 64 == 0, has_copy = t.dtype == DPL_BF16 && panels;
    dpl_adamw_step(t.ctx, &a, g, n, p, m, v, has_copy ? copy : NULL);
    if (panels) dpl_to_bf16(t.ctx, g, n, rounded);
    dpl_sum(t.ctx, g, false, n, sums);
    dpl_sum(t.ctx, g, true, n, sums + 1);
    settle();
    check_adamw(&a, n, g, before, p, m, v);
    double sum = 0, size = 0, squares = 0;
    for (size_t i = 0; i < n; i++) {
        const size_t at = panels ? dpl_pair_index(i) : i;
        assert_int_equal(rounded[at], panels ? dpl_f32_to_bf16(g[i]) : 0xffff);
        assert_int_equal(copy[at], has_copy ? dpl_f32_to_bf16(p[i]) : 0xffff);
        sum += (double)g[i], size += fabs((double)g[i]), squares += (double)g[i] * (double)g[i];
    }
    near(sums[0], sum, 2 * (double)n * 0x1p-53 * size, "sum", 0, 0);
    near(sums[1], squares, 2 * (double)n * 0x1p-53 * squares, "sum of squares", 0, 0);
    end();
}

static void optim_case(void) {
    static const size_t sizes[] = {0, 1, 15, 64, 1023, 8193, 8256, 30011, 30016};
    for (size_t i = 0; i < DPL_COUNT(sizes); i++) optim_size(sizes[i]);
}

static void test_optim(void **state) {
    (void)state, each_way(optim_case);
}

// Weight decay reaches every element, gradient or not; an array of zeros with learning rate 0 and
// the zero padding of a panel stay zero, even with eps 0.
static void adamw_edge_case(void) {
    enum { N = 37 };
    dpl_adamw a = {.lr = 0.1f,
                   .b1 = 0.9f,
                   .b2 = 0.999f,
                   .eps = 1e-8f,
                   .decay = 0.1f,
                   .correct1 = 0.1f,
                   .correct2 = 0.001f,
                   .grad_scale = 1};
    begin();
    float *g = floats(N), *p = floats_drawn(N, 1), *m = floats(N), *v = floats(N);
    const float *before = floats_copied(p, N);
    memset(g, 0, N * 4), memset(m, 0, N * 4), memset(v, 0, N * 4);
    dpl_adamw_step(t.ctx, &a, g, N, p, m, v, NULL);
    dpl_ctx_wait(t.ctx);
    for (size_t i = 0; i < N; i++)
        near((double)p[i], 0.99 * (double)before[i], 2 * U * fabs((double)before[i]), "decay", 0,
             i);

    for (size_t i = 0; i < N; i++) p[i] = 0, g[i] = i % 2 ? 0.0f : 1.0f;
    a.lr = 0;
    dpl_adamw_step(t.ctx, &a, g, N, p, m, v, NULL);
    dpl_ctx_wait(t.ctx);
    for (size_t i = 0; i < N; i++) assert_true(p[i] == 0);
    a.lr = 0.1f, a.eps = 0;
    dpl_adamw_step(t.ctx, &a, g, N, p, m, v, NULL);
    settle();
    for (size_t i = 0; i < N; i++) {
        if (i % 2) assert_true(p[i] == 0 && m[i] == 0 && v[i] == 0);
        else assert_true(isfinite(p[i]) && p[i] < 0);
    }
    end();
}

static void test_adamw_edges(void **state) {
    (void)state, each_way(adamw_edge_case);
}

// One bad element anywhere shows in the sum of squares, and large ones do not overflow it.
static void sum_squares_case(void) {
    enum { N = 20000 };
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    begin();
    float *x = floats_drawn(N, 1);
    double *sum = block_new(1, 8, 8);
    for (size_t at = 0; at < N; at += 1999)
        for (size_t i = 0; i < DPL_COUNT(bad); i++) {
            const float good = x[at];
            x[at] = bad[i];
            dpl_sum(t.ctx, x, true, N, sum);
            dpl_ctx_wait(t.ctx);
            assert_true(!isfinite(*sum));
            x[at] = good;
        }
    x[5] = 3e38f;
    dpl_sum(t.ctx, x, true, N, sum);
    settle();
    near(*sum, (double)x[5] * (double)x[5], 1e-15 * *sum, "large square", 0, 0);
    end();
}

static void test_sum_squares_not_finite(void **state) {
    (void)state, each_way(sum_squares_case);
}

/* ---- kernels and index widths -------------------------------------------------------------------
 */

static void kernel_case(void) {
    static const float special[] = {0,      -0.0f, 1,      -87.5f, -95,      -103.9f,  -104.1f,
                                    -1e30f, 88.7f, 88.73f, 1e30f,  INFINITY, -INFINITY};
    const dpl_row_kernels *k = &t.ctx->kernels->rows;
    enum { N = 5003 };
    static float x[N], y[N];
    for (size_t i = 0; i < N; i++)
        x[i] = i < DPL_COUNT(special) ? special[i] : (float)(-104 + 193.0 * (double)i / N);
    k->exp_sub_sum(x, 0, y, N);
    for (size_t i = 0; i < N; i++) {
        const double want = exp((double)x[i]);
        if ((float)want == INFINITY) assert_true(y[i] == INFINITY);
        else if (!(fabs((double)y[i] - want) <= 4 * U * want + 0x1p-149)) // 2 ulp
            fail_msg("exp(%.9g) = %.9g, want %.9g", (double)x[i], (double)y[i], want);
    }
    assert_true(y[12] == 0); // -inf
    x[3] = NAN;
    assert_true(isnan(k->exp_sub_sum(x, 0, y, 40)) && isnan(y[3]));
    k->sigmoid(x, y, 40);
    assert_true(isnan(y[3]) && y[0] == 0.5f && y[11] == 1 && y[12] == 0);
    uint16_t h[40];
    uint32_t snan = 0x7f800001;
    memcpy(x, &snan, 4);
    x[1] = INFINITY, x[2] = 3.4e38f, x[3] = -INFINITY;
    k->to_bf16(x, h, 40);
    for (size_t i = 0; i < 40; i++) assert_int_equal(h[i], dpl_f32_to_bf16(x[i]));

    double sum = 0, dot = 0;
    for (size_t n = 0; n < 200; n++) {
        for (size_t i = 0; i < n; i++) x[i] = (float)draw(), y[i] = (float)draw();
        double want_sum = 0, want_dot = 0, want_max = -INFINITY;
        for (size_t i = 0; i < n; i++) {
            want_sum += (double)x[i], want_dot += (double)x[i] * (double)y[i];
            want_max = fmax(want_max, (double)x[i]);
        }
        sum = k->sum_f64(x, false, n), dot = (double)k->dot(x, y, n);
        near(sum, want_sum, 20 * U * (double)n, "sum", 0, n);
        near(dot, want_dot, 20 * U * (double)n, "dot", 0, n);
        assert_true((double)k->max(x, n) == want_max);
    }
}

static void test_kernels(void **state) {
    (void)state, each_way(kernel_case);
}

// Rows that start beyond 2^31 elements, in memory that is only touched where it is used.
static void test_far_rows(void **state) {
    (void)state;
    enum { F = 19, ROWS = 4 };
    const size_t ld = ((size_t)1 << 30) + 64, bytes = ROWS * ld * sizeof(uint16_t);
    void *far[2];
    for (int i = 0; i < 2; i++) {
        far[i] = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (far[i] == MAP_FAILED) { // An address space limit, not a fault of ours.
            print_message("SKIPPED: no address space of %zu bytes\n", bytes);
            skip();
        }
    }
    assert_true(open_ctx("ref", 2, false));
    t.dtype = DPL_BF16;
    const dpl_mat x = {far[0], ld, DPL_BF16}, y = {far[1], ld, DPL_BF16};
    for (size_t r = 0; r < ROWS; r++)
        for (size_t c = 0; c < F; c++) put(x, r, c, draw());
    dpl_add(t.ctx, x, x, ROWS, F, y);
    for (size_t r = 0; r < ROWS; r++)
        for (size_t c = 0; c < F; c++) assert_true(get(y, r, c) == 2 * get(x, r, c));
    dpl_ctx_close(&t.ctx);
    for (int i = 0; i < 2; i++) munmap(far[i], bytes);
}

int main(void) {
    const char *seed = getenv("DPL_SEED");
    t.seed = seed ? strtoull(seed, NULL, 10) : 1;
    print_message("seed %llu (DPL_SEED)\n", (unsigned long long)t.seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_norm),
        cmocka_unit_test(test_rope),
        cmocka_unit_test(test_add_copy_zero),
        cmocka_unit_test(test_embed),
        cmocka_unit_test(test_xent),
        cmocka_unit_test(test_xent_extremes),
        cmocka_unit_test(test_finite_differences),
        cmocka_unit_test(test_optim),
        cmocka_unit_test(test_adamw_edges),
        cmocka_unit_test(test_sum_squares_not_finite),
        cmocka_unit_test(test_kernels),
        cmocka_unit_test(test_far_rows),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    free(t.first_run);
    return failed;
}
