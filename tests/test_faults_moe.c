/*
 * test_faults_moe.c - faults that users of other MoE systems reported, on one rank: each test is
 * named after what must hold, and carries the number of its row in the list of known faults.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <sys/mman.h>

#include "lab.h"
#include "scratch.h"

static dpl_ctx *ctx;

static int open_ctx(void **state) {
    (void)state;
    ctx = lab_ctx(2, false, NULL);
    return ctx ? 0 : -1;
}

static int close_ctx(void **state) {
    (void)state;
    dpl_ctx_close(&ctx);
    return 0;
}

static bool all_zero_bits(const void *p, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (((const uint8_t *)p)[i]) return false;
    return true;
}

static float *random_floats(size_t n, uint64_t stream) {
    float *x = dpl_alloc_array(n, sizeof *x);
    assert_non_null(x);
    for (size_t i = 0; i < n; i++) x[i] = (float)dpl_rng_normal(7, stream, i);
    return x;
}

/* ---- grouped GEMM through the public functions ------------------------------------------------
 */

#define MAX_GROUPS 20
typedef struct groups_case {
    size_t n_groups, sizes[MAX_GROUPS], n, k, spare_rows, ld_extra;
} groups_case;

typedef struct dot { // a sum of products in double, and what bounds the error of an fp32 chain over
                     // it
    double sum, magnitude;
    size_t n;
} dot;

static void add_product(dot *d, float a, float b) {
    d->sum += (double)a * (double)b;
    d->magnitude += fabs((double)a * (double)b);
    d->n++;
}

static void expect_close(float is, const dot *d, const char *what) {
    if (!(fabs((double)is - d->sum) <= (double)(d->n + 1) * 0x1p-24 * d->magnitude))
        fail_msg("%s: %.9g, expected %.9g", what, (double)is, d->sum);
}

// Every element of the three products of group g.
static void check_group(const groups_case *c, size_t g, size_t row, size_t ldx, size_t ldy,
                        const float *x, const float *w, const float *dy, const float *y,
                        const float *dx, const float *dw) {
    const float *wg = w + g * c->n * c->k, *dwg = dw + g * c->n * c->k;
    for (size_t r = row; r < row + c->sizes[g]; r++) {
        for (size_t n = 0; n < c->n; n++) {
            dot d = {0};
            for (size_t k = 0; k < c->k; k++) add_product(&d, x[r * ldx + k], wg[n * c->k + k]);
            expect_close(y[r * ldy + n], &d, "y");
        }
        for (size_t k = 0; k < c->k; k++) {
            dot d = {0};
            for (size_t n = 0; n < c->n; n++) add_product(&d, dy[r * ldy + n], wg[n * c->k + k]);
            expect_close(dx[r * ldx + k], &d, "dx");
        }
    }
    for (size_t n = 0; n < c->n; n++)
        for (size_t k = 0; k < c->k; k++) {
            dot d = {0};
            for (size_t r = row; r < row + c->sizes[g]; r++)
                add_product(&d, dy[r * ldy + n], x[r * ldx + k]);
            expect_close(dwg[n * c->k + k], &d, "dw");
        }
}

// Rows and columns that belong to nobody hold NaN in the inputs and must keep their bits in the
// outputs.
static void run_groups(const groups_case *c, bool packed) {
    int64_t offsets[MAX_GROUPS + 1] = {0};
    for (size_t g = 0; g < c->n_groups; g++) offsets[g + 1] = offsets[g] + (int64_t)c->sizes[g];
    const size_t used = (size_t)offsets[c->n_groups], rows = used + c->spare_rows;
    const size_t ldx = c->k + c->ld_extra, ldy = c->n + c->ld_extra;
    const dpl_gemm_grouped g = {.n_groups = c->n_groups,
                                .n = c->n,
                                .k = c->k,
                                .offsets = offsets,
                                .n_rows = rows,
                                .ld_x = ldx,
                                .ld_y = ldy,
                                .packed = packed};
    const size_t n_w = c->n_groups * c->n * c->k, ws_bytes = dpl_gemm_workspace_bytes(&g);
    float *x = random_floats(rows * ldx, 1), *dy = random_floats(rows * ldy, 2);
    float *w = random_floats(n_w, 3), *ws = dpl_alloc(ws_bytes);
    float *y = dpl_alloc_array(rows * ldy, 4), *dx = dpl_alloc_array(rows * ldx, 4);
    float *dw = dpl_alloc_array(n_w, 4), *panels = dpl_alloc(dpl_gemm_packed_bytes(&g));
    memset(y, 0xff, rows * ldy * 4);
    memset(dx, 0xff, rows * ldx * 4);
    memset(ws, 0xff, ws_bytes);
    for (size_t r = 0; r < rows; r++) {
        for (size_t i = r < used ? c->k : 0; i < ldx; i++) x[r * ldx + i] = NAN;
        for (size_t i = r < used ? c->n : 0; i < ldy; i++) dy[r * ldy + i] = NAN;
    }
    assert_int_equal(dpl_gemm_pack(ctx, &g, w, ws, ws_bytes, panels), DPL_OK);
    const void *weight = packed ? (void *)panels : w;
    assert_int_equal(dpl_gemm_grouped_forward(ctx, &g, x, weight, ws, ws_bytes, y), DPL_OK);
    assert_int_equal(dpl_gemm_grouped_dgrad(ctx, &g, dy, weight, ws, ws_bytes, dx), DPL_OK);
    assert_int_equal(dpl_gemm_grouped_wgrad(ctx, &g, dy, x, ws, ws_bytes, dw), DPL_OK);
    for (size_t i = 0; i < c->n_groups; i++) {
        check_group(c, i, (size_t)offsets[i], ldx, ldy, x, w, dy, y, dx, dw);
        if (c->sizes[i] == 0) assert_true(all_zero_bits(dw + i * c->n * c->k, c->n * c->k * 4));
    }
    for (size_t r = 0; r < rows; r++)
        for (size_t i = r < used ? c->n : 0; i < ldy; i++) assert_true(isnan(y[r * ldy + i]));
    float *blocks[] = {x, dy, w, ws, y, dx, dw, panels};
    for (size_t i = 0; i < DPL_COUNT(blocks); i++) dpl_free(blocks[i]);
}

static void run_cases(const groups_case *cases, size_t n) {
    for (size_t i = 0; i < n; i++)
        for (int packed = 0; packed < 2; packed++) run_groups(&cases[i], packed);
}

// No tokens for some experts, the last one among them, or for all.
static void empty_groups_have_zero_gradients_and_no_stray_rows(void **state) {
    (void)state;
    static const groups_case cases[] = {
        {4, {5, 0, 3, 0}, 8, 8, 0, 0},
        {4, {0, 0, 0, 0}, 8, 8, 4, 0},
        {3, {0, 7, 0}, 9, 5, 2, 0},
        {3, {16, 16, 0}, 16, 16, 0, 0},
        {3, {0, 16, 16}, 16, 16, 0, 0},
        {3, {16, 0, 16}, 16, 16, 0, 0},
        {18, {6, 5, 6, 5, 5, 5}, 43, 64, 0, 0},
    };
    run_cases(cases, DPL_COUNT(cases));
}

// Groups smaller than any tile, or that begin where no tile does.
static void groups_of_any_size_and_start_are_right(void **state) {
    (void)state;
    static const groups_case cases[] = {
        {6, {1, 127, 128, 129, 0, 3}, 128, 128, 0, 0},
        {3, {128, 130, 65}, 64, 64, 0, 0},
        {5, {0, 1, 7, 8, 9}, 33, 31, 3, 0},
    };
    run_cases(cases, DPL_COUNT(cases));
}

// Rows behind the last group, and row distances that are multiples of nothing.
static void odd_strides_and_rows_beyond_the_last_group(void **state) {
    (void)state;
    static const size_t ks[] = {1, 7, 8, 9, 1025};
    for (size_t i = 0; i < DPL_COUNT(ks); i++) {
        const groups_case cases[] = {{3, {3, 0, 4}, 5, ks[i], 13, 0},
                                     {3, {3, 0, 4}, 5, ks[i], 0, 3}};
        run_cases(cases, 2);
    }
}

// What offsets may be.
static void offsets_are_checked(void **state) {
    (void)state;
    static const struct {
        int64_t offsets[3];
        dpl_status status;
        const char *text;
    } cases[] = {{{0, 4, 8}, DPL_OK, NULL},
                 {{0, 0, 0}, DPL_OK, NULL},
                 {{0, 4, 9}, DPL_EINVAL, "offsets[2], of group 1, is 9, expected 4 to 8"},
                 {{0, 5, 4}, DPL_EINVAL, "offsets[2], of group 1, is 4, expected 5"},
                 {{1, 4, 8}, DPL_EINVAL, "offsets[0], of group 0, is 1, expected 0"},
                 {{0, -1, 8}, DPL_EINVAL, "of group 0, is -1"},
                 {{0, INT64_MIN, INT64_MAX}, DPL_EINVAL, "group 0"},
                 {{0, 4, INT64_MAX}, DPL_EINVAL, "expected 4 to 8"}};
    float x[32] = {0}, y[32] = {0}, w[32] = {0};
    dpl_gemm_grouped g = {.n_groups = 2, .n = 4, .k = 4, .n_rows = 8};
    float *ws = dpl_alloc(dpl_gemm_workspace_bytes(&g));
    for (size_t i = 0; i < DPL_COUNT(cases); i++) {
        g.offsets = cases[i].offsets;
        const size_t bytes = dpl_gemm_workspace_bytes(&g);
        assert_int_equal(dpl_gemm_grouped_forward(ctx, &g, x, w, ws, bytes, y), cases[i].status);
        if (cases[i].text) assert_non_null(strstr(dpl_error_message(), cases[i].text));
        assert_int_equal(dpl_gemm_grouped_wgrad(ctx, &g, y, x, ws, bytes, w), cases[i].status);
    }
    dpl_free(ws);
}

// Sizes of real models. Outputs are checked at places drawn at random.
static void large_weights_are_right_too(void **state) {
    (void)state;
    static const size_t sizes[][2] = {{64, 14336}, {14336, 64}, {4096, 512}, {4096, 4096}};
    for (size_t s = 0; s < DPL_COUNT(sizes); s++) {
        const size_t n = sizes[s][0], k = sizes[s][1], rows = 64;
        const int64_t offsets[] = {0, 40, 64};
        const dpl_gemm_grouped g = {
            .n_groups = 2, .n = n, .k = k, .offsets = offsets, .n_rows = rows};
        float *x = random_floats(rows * k, 1), *w = random_floats(2 * n * k, 3);
        float *y = dpl_alloc_array(rows * n, 4), *ws = dpl_alloc(dpl_gemm_workspace_bytes(&g));
        assert_int_equal(
            dpl_gemm_grouped_forward(ctx, &g, x, w, ws, dpl_gemm_workspace_bytes(&g), y), DPL_OK);
        for (uint64_t i = 0; i < 300; i++) {
            const size_t r = dpl_rng_u64(1, 1, i) % rows, c = dpl_rng_u64(1, 2, i) % n;
            dot d = {0};
            for (size_t l = 0; l < k; l++)
                add_product(&d, x[r * k + l], w[((r < 40 ? 0 : n) + c) * k + l]);
            expect_close(y[r * n + c], &d, "y");
        }
        dpl_free(x);
        dpl_free(w);
        dpl_free(y);
        dpl_free(ws);
    }
}

// The last of 256 experts lies 15 GB behind the first. Pages that nobody touches cost
// nothing.
static void the_last_expert_is_found_behind_4_gib(void **state) {
    (void)state;
    int64_t offsets[257] = {0};
    offsets[256] = 1;
    const dpl_gemm_grouped g = {
        .n_groups = 256, .n = 2048, .k = 7168, .offsets = offsets, .n_rows = 1};
    const size_t bytes = g.n_groups * g.n * g.k * sizeof(float);
    float *w = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (w == MAP_FAILED) skip();
    float *x = random_floats(g.k, 1), *y = dpl_alloc_array(g.n, 4);
    float *ws = dpl_alloc(dpl_gemm_workspace_bytes(&g)), *last = w + 255 * g.n * g.k;
    last[(g.n - 1) * g.k + g.k - 1] = 2;
    assert_int_equal(dpl_gemm_grouped_forward(ctx, &g, x, w, ws, dpl_gemm_workspace_bytes(&g), y),
                     DPL_OK);
    assert_true(y[g.n - 1] == 2 * x[g.k - 1] && y[0] == 0);
    munmap(w, bytes);
    dpl_free(x);
    dpl_free(y);
    dpl_free(ws);
}

/* ---- routing ----------------------------------------------------------------------------------
 */

#define MAX_ROUTE 4096
static float score[MAX_ROUTE], weights[MAX_ROUTE], logits[MAX_ROUTE];
static int32_t ids[MAX_ROUTE];
static int64_t counts[1024];

static dpl_status route(const dpl_route_rule *rule, size_t n_tokens, const float *bias) {
    return dpl_router_route(ctx, rule, n_tokens, logits, bias, NULL, score, ids, weights, counts);
}

static dpl_route_rule unscaled(size_t e, size_t k) {
    dpl_route_rule rule = lab_sigmoid(e, k);
    rule.scale = 1;
    return rule;
}

static float logit_of(double s) {
    return (float)log(s / (1 - s));
}

// A logit that is not finite is an error that names the token, and nothing is written.
static void logits_that_are_not_finite_name_their_token(void **state) {
    (void)state;
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    const dpl_route_rule rule = unscaled(128, 8);
    for (size_t b = 0; b < DPL_COUNT(bad); b++)
        for (size_t n_bad = 1; n_bad <= 128; n_bad += 127) {
            for (size_t i = 0; i < 3 * 128; i++)
                logits[i] = i / 128 == 1 && i % 128 < n_bad ? bad[b] : (float)(i % 7);
            ids[0] = -77;
            assert_int_equal(route(&rule, 3, NULL), DPL_ENUMERIC);
            assert_non_null(strstr(dpl_error_message(), "token 1"));
            assert_int_equal(ids[0], -77);
        }
}

// In the layer it is found at the read-back of the counts, before any expert runs.
static void a_layer_names_the_token_that_is_not_finite(void **state) {
    (void)state;
    for (int deferred = 0; deferred < 2; deferred++) {
        dpl_ctx *own = lab_ctx(2, deferred, NULL);
        lab_rule rule = {.t = 20, .d = 16, .f = 8, .rule = lab_sigmoid(8, 2), .seed = 3};
        lab l;
        lab_open(&rule, &l);
        l.x[13 * rule.d + 5] = NAN;
        l.x[17 * rule.d + 5] = INFINITY;
        lab_inputs(&l);
        const size_t mark = dpl_ctx_mark(own);
        assert_int_equal(lab_forward(&l, own), DPL_ENUMERIC);
        assert_non_null(strstr(dpl_error_message(), "token 13"));
        if (!deferred) assert_int_equal(dpl_ctx_mark(own), mark);
        assert_null(l.saved.ids);
        lab_close(&l);
        dpl_ctx_close(&own);
    }
}

// More than 256 experts. More experts than K.
static void ids_above_255_are_chosen(void **state) {
    (void)state;
    for (size_t e = 257; e <= 512; e += 255) {
        const dpl_route_rule rule = unscaled(e, 10);
        for (size_t i = 0; i < 4 * e; i++) logits[i] = (float)(i % e) / 64;
        assert_int_equal(route(&rule, 4, NULL), DPL_OK);
        for (size_t i = 0; i < 40; i++) assert_int_equal(ids[i], e - 1 - i % 10);
    }
    const dpl_route_rule two = unscaled(8, 2);
    for (size_t i = 0; i < 8; i++) logits[i] = (float)i;
    assert_int_equal(route(&two, 1, NULL), DPL_OK);
    assert_int_equal(ids[0], 7);
}

// Ties go to the lower id.
static void equal_scores_choose_the_lower_ids(void **state) {
    (void)state;
    for (int n_threads = 1; n_threads <= 3; n_threads += 2) {
        dpl_ctx *own = lab_ctx(n_threads, false, NULL);
        const dpl_route_rule rule = unscaled(8, 2);
        memset(logits, 0, sizeof logits);
        for (int again = 0; again < 2; again++) {
            assert_int_equal(
                dpl_router_route(own, &rule, 300, logits, NULL, NULL, score, ids, weights, counts),
                DPL_OK);
            for (size_t i = 0; i < 600; i++) assert_int_equal(ids[i], i % 2);
        }
        assert_true(counts[0] == 300 && counts[1] == 300 && counts[2] == 0);
        dpl_ctx_close(&own);
    }
}

// The choice is made in fp32. Weights are scores without the bias, however small.
static void bias_only_decides_and_in_fp32(void **state) {
    (void)state;
    const dpl_route_rule one = unscaled(2, 1);
    const float close[] = {1.0f, 1.001f};
    memset(logits, 0, sizeof logits);
    assert_int_equal(route(&one, 1, close), DPL_OK);
    assert_int_equal(ids[0], 1);

    const dpl_route_rule two = unscaled(8, 2);
    float bias[8];
    for (size_t i = 0; i < 8; i++) {
        logits[i] = -18;
        bias[i] = 12;
    }
    assert_int_equal(route(&two, 1, bias), DPL_OK);
    assert_true(weights[0] == 0.5f && weights[1] == 0.5f);
}

// Normalized within a token, then scaled.
static void weights_are_normalized_per_token_then_scaled(void **state) {
    (void)state;
    dpl_route_rule rule = lab_sigmoid(2, 2);
    static const double scores[] = {0.2, 0.6, 0.9, 0.3}, expected[] = {1.875, 0.625, 1.875, 0.625};
    for (size_t i = 0; i < 4; i++) logits[i] = logit_of(scores[i]);
    assert_int_equal(route(&rule, 2, NULL), DPL_OK);
    assert_true(ids[0] == 1 && ids[1] == 0 && ids[2] == 0 && ids[3] == 1);
    for (size_t i = 0; i < 4; i++) assert_true(fabs((double)weights[i] - expected[i]) < 1e-6);
}

// A group's score is the sum of its two best, whatever K is.
static void group_score_is_the_sum_of_the_two_best(void **state) {
    (void)state;
    dpl_route_rule rule = unscaled(8, 4);
    rule.n_groups = 2;
    rule.top_groups = 1;
    static const double scores[] = {0.9, 0.9, 0.1, 0.1, 0.7, 0.7, 0.7, 0.7};
    for (size_t i = 0; i < 8; i++) logits[i] = logit_of(scores[i]);
    assert_int_equal(route(&rule, 1, NULL), DPL_OK);
    for (int32_t i = 0; i < 4; i++) assert_int_equal(ids[i], i);
}

// With one normalized expert a token the router learns nothing from the task; without, it
// does.
static void one_normalized_expert_gives_the_router_no_gradient(void **state) {
    (void)state;
    for (int norm = 0; norm < 2; norm++) {
        lab_rule rule = {.t = 12, .d = 16, .f = 8, .rule = lab_sigmoid(4, 1), .seed = 5};
        rule.rule.norm_topk = norm;
        lab l;
        lab_open(&rule, &l);
        assert_int_equal(lab_run(&l, ctx), DPL_OK);
        double largest = 0;
        for (size_t i = 0; i < l.n[LAB_ROUTER]; i++)
            largest = fmax(largest, fabs((double)lab_grad(&l, LAB_ROUTER, i)));
        if (norm) assert_true(largest < 1e-6);
        else assert_true(largest > 1e-3);
        lab_close(&l);
    }
}

// Equal tokens choose alike in any place, with any number of threads, twice in a row.
static void equal_tokens_choose_alike(void **state) {
    (void)state;
    static const int n_threads[] = {1, 3, 8};
    lab_rule rule = {.t = 256, .d = 64, .f = 8, .rule = lab_sigmoid(128, 6), .seed = 6};
    lab l;
    lab_open(&rule, &l);
    for (size_t i = 0; i < rule.t * rule.d; i++) l.x[i] = l.x[i % rule.d];
    lab_inputs(&l);
    int32_t first[6];
    for (size_t n = 0; n < DPL_COUNT(n_threads); n++) {
        dpl_ctx *own = lab_ctx(n_threads[n], false, NULL);
        for (int again = 0; again < 2; again++) {
            assert_int_equal(lab_forward(&l, own), DPL_OK);
            if (n == 0 && !again) memcpy(first, l.saved.ids, sizeof first);
            for (size_t i = 0; i < rule.t * 6; i++) assert_int_equal(l.saved.ids[i], first[i % 6]);
        }
        dpl_ctx_close(&own);
    }
    lab_close(&l);
}

/* ---- ids given by a caller, permutation, dispatch and combine -----------------------------------
 */

// What a caller with ids of its own does.
static dpl_status prepare(const dpl_ep_ranks *ranks, const dpl_moe_shape *shape,
                          const int32_t *given, size_t n_tokens, dpl_ep *ep) {
    DPL_TRY(dpl_ep_check_slots(n_tokens, shape->rule.top_k));
    DPL_TRY(dpl_ep_check_ids(given, n_tokens, shape->rule.top_k, shape->rule.n_experts));
    *ep = dpl_ep_alloc(ctx, NULL, ranks, shape->rule.top_k, n_tokens);
    return dpl_moe_prepare(ctx, given, DPL_OK, ep, NULL);
}

// An id twice in a token, or outside of -1 .. E-1, is an error that names the token.
static void ids_of_a_caller_are_checked(void **state) {
    (void)state;
    static const struct {
        int32_t ids[4];
        const char *text;
    } cases[] = {{{0, 3, 1, 1}, "token 1: expert id 1 twice"},
                 {{0, 4, 1, 2}, "token 0, slot 1: expert id 4"},
                 {{0, 1, 5, 2}, "token 1, slot 0: expert id 5"},
                 {{0, 1, 2, -2}, "token 1, slot 1: expert id -2"},
                 {{INT32_MAX, 0, 0, 1}, "token 0"},
                 {{-1, -1, -1, -1}, NULL}};
    const dpl_moe_shape shape = {.d = 4, .f = 4, .rule = lab_sigmoid(4, 2)};
    dpl_ep_ranks ranks = {0};
    assert_int_equal(dpl_ep_ranks_open(ctx, NULL, shape.rule.n_experts, NULL, 0, 0, DPL_OK, &ranks),
                     DPL_OK);
    for (size_t i = 0; i < DPL_COUNT(cases); i++) {
        int64_t offsets[5];
        int32_t slot_row[4], row_slot[4];
        dpl_ep ep;
        const dpl_status expected = cases[i].text ? DPL_EINVAL : DPL_OK;
        assert_int_equal(dpl_moe_permute(ctx, cases[i].ids, 2, 2, 4, offsets, slot_row, row_slot),
                         expected);
        if (cases[i].text) assert_non_null(strstr(dpl_error_message(), cases[i].text));
        assert_int_equal(prepare(&ranks, &shape, cases[i].ids, 2, &ep), expected);
        if (cases[i].text) assert_non_null(strstr(dpl_error_message(), cases[i].text));
    }
    dpl_ep_ranks_close(&ranks);
}

// Skipped slots shift nothing, there and back.
static void skipped_slots_shift_no_rows(void **state) {
    (void)state;
    enum { T = 4, K = 2, D = 3 };
    static const int32_t given[] = {0, -1, -1, -1, 3, 1, 2, 0};
    static const float x[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
    static const float w[] = {0.5f, 99, 99, 99, 0.25f, 0.75f, 1, 2};
    static const int32_t source[] = {0, 3, 2, 3, 2},
                         slot[] = {0, 7, 5, 6, 4}; // by expert, then token
    static const float copies[] = {1, 0, 2, 2};    // of each token
    const dpl_moe_shape shape = {.d = D, .f = 4, .rule = lab_sigmoid(4, K)};
    dpl_ep_ranks ranks = {0};
    dpl_ep ep;
    assert_int_equal(dpl_ep_ranks_open(ctx, NULL, shape.rule.n_experts, NULL, 0, 0, DPL_OK, &ranks),
                     DPL_OK);
    assert_int_equal(prepare(&ranks, &shape, given, T, &ep), DPL_OK);
    assert_int_equal(ep.n_rows, 5);
    assert_true(ep.counts[0] == 2 && ep.counts[1] == 1 && ep.counts[2] == 1 && ep.counts[3] == 1);
    float rows[5 * D], row_w[5], y[T * D], dw[T * K];
    memset(y, 0xff, sizeof y);
    memset(dw, 0xff, sizeof dw);
    assert_int_equal(dpl_moe_dispatch(ctx, &ep, DPL_OK, dpl_mat_f32(x, D), w, DPL_EP_WANTED, D,
                                      dpl_mat_f32(rows, D), row_w),
                     DPL_OK);
    for (size_t r = 0; r < 5; r++) {
        assert_memory_equal(rows + r * D, x + source[r] * D, sizeof(float) * D);
        assert_true(row_w[r] == w[slot[r]]);
    }
    assert_int_equal(dpl_moe_combine(ctx, &ep, DPL_OK, dpl_mat_f32(rows, D), NULL, DPL_EP_NONE, D,
                                     false, dpl_mat_f32(y, D), NULL),
                     DPL_OK);
    for (size_t i = 0; i < T * D; i++) assert_true(y[i] == copies[i / D] * x[i]);
    assert_int_equal(dpl_moe_combine(ctx, &ep, DPL_OK, dpl_mat_f32(rows, D), NULL, DPL_EP_NONE, D,
                                     true, dpl_mat_f32(y, D), NULL),
                     DPL_OK);
    for (size_t i = 0; i < T * D; i++) assert_true(y[i] == 2 * copies[i / D] * x[i]);
    assert_int_equal(dpl_moe_combine(ctx, &ep, DPL_OK, dpl_mat_f32(rows, D), row_w, DPL_EP_WANTED,
                                     D, false, dpl_mat_f32(y, D), dw),
                     DPL_OK);
    for (size_t i = 0; i < T * K; i++) assert_true(dw[i] == (given[i] < 0 ? 0 : w[i]));
    for (size_t i = 0; i < T * D; i++) assert_true(y[i] == copies[i / D] * x[i]);
    dpl_ep_ranks_close(&ranks);
}

// The sum over a token's experts is in fp32 and rounded once.
static void combine_rounds_once(void **state) {
    (void)state;
    const dpl_moe_shape shape = {.d = 1, .f = 4, .rule = lab_sigmoid(8, 8)};
    static const int32_t given[] = {0, 1, 2, 3, 4, 5, 6, 7};
    uint16_t rows[8], y = 0;
    for (size_t i = 0; i < 8; i++) rows[i] = dpl_f32_to_bf16(i ? 0x1p-9f : 1.0f);
    dpl_ep_ranks ranks = {0};
    dpl_ep ep;
    assert_int_equal(dpl_ep_ranks_open(ctx, NULL, shape.rule.n_experts, NULL, 0, 0, DPL_OK, &ranks),
                     DPL_OK);
    assert_int_equal(prepare(&ranks, &shape, given, 1, &ep), DPL_OK);
    assert_int_equal(dpl_moe_combine(ctx, &ep, DPL_OK, (dpl_mat){rows, 1, DPL_BF16}, NULL,
                                     DPL_EP_NONE, 1, false, (dpl_mat){&y, 1, DPL_BF16}, NULL),
                     DPL_OK);
    assert_true(dpl_bf16_to_f32(y) == 1.015625f);
    dpl_ep_ranks_close(&ranks);
}

// Without routed experts the layer is its shared expert, bit for bit, whatever the scale.
static void the_shared_expert_counts_fully(void **state) {
    (void)state;
    for (int dtype = 0; dtype < 2; dtype++) {
        lab_rule rule = {.t = 19,
                         .d = 40,
                         .f = 24,
                         .shared_f = 24,
                         .rule = lab_sigmoid(8, 2),
                         .dtype = (dpl_dtype)dtype,
                         .seed = 8};
        lab l;
        lab_open(&rule, &l);
        memset(l.value[LAB_DOWN], 0, l.n[LAB_DOWN] * sizeof(float));
        lab_pack(&l);
        assert_int_equal(lab_forward(&l, ctx), DPL_OK);
        const dpl_mat x = {l.x_in, rule.d, rule.dtype};
        const size_t element = dpl_dtype_bytes(rule.dtype), bytes = rule.t * rule.d * element;
        void *y = dpl_alloc(bytes);
        assert_ptr_equal(l.saved.shared.x.p, x.p);
        dpl_experts_forward(ctx, &l.saved.shared, (dpl_mat){y, rule.d, rule.dtype});
        assert_memory_equal(y, l.y, bytes);
        dpl_free(y);
        lab_close(&l);
    }
}

// Counts are the histogram, also when nearly all tokens choose the same experts, and the same when
// the forward pass runs again. So are the auxiliary losses.
static void counts_are_exact_and_repeatable(void **state) {
    (void)state;
    lab_rule rule = {.t = 2304, .d = 16, .f = 8, .rule = lab_sigmoid(32, 8), .seed = 9};
    lab l;
    lab_open(&rule, &l);
    const dpl_aux aux = {DPL_BALANCE_BATCH, 0.5f, 0.5f, 1, 1, rule.t};
    l.aux = &aux;
    for (size_t i = 10 * rule.d; i < rule.t * rule.d; i++) l.x[i] = l.x[10 * rule.d + i % rule.d];
    lab_inputs(&l);
    double losses[2] = {0};
    for (int again = 0; again < 2; again++) {
        assert_int_equal(lab_forward(&l, ctx), DPL_OK);
        int64_t histogram[32] = {0};
        for (size_t i = 0; i < rule.t * 8; i++) histogram[l.saved.ids[i]]++;
        assert_memory_equal(histogram, l.saved.ep.counts, sizeof histogram);
        if (again) assert_memory_equal(losses, l.saved.aux, sizeof losses);
        memcpy(losses, l.saved.aux, sizeof losses);
    }
    lab_close(&l);
}

// Padding is not routed, not counted, and in no auxiliary loss or gradient.
static void padding_changes_nothing(void **state) {
    (void)state;
    double losses[2][2];
    int64_t routed[2][8];
    float *router[2];
    for (int padded = 0; padded < 2; padded++) {
        lab_rule rule = {
            .t = padded ? 80 : 50, .d = 24, .f = 16, .rule = lab_sigmoid(8, 2), .seed = 10};
        lab l;
        lab_open(&rule, &l);
        // Sequences of 5 tokens; padded to 8, with padding on both sides.
        float *x = random_floats(50 * rule.d, 1), *dy = random_floats(50 * rule.d, 2);
        if (padded) l.segment = dpl_alloc_array(rule.t, sizeof *l.segment);
        for (size_t t = 0; t < rule.t; t++) {
            const size_t place = t % 8, from = padded ? t / 8 * 5 + place - 1 : t;
            if (padded && (place < 1 || place > 5)) continue;
            if (padded) l.segment[t] = 1;
            memcpy(l.x + t * rule.d, x + from * rule.d, rule.d * sizeof *x);
            memcpy(l.dy + t * rule.d, dy + from * rule.d, rule.d * sizeof *x);
        }
        lab_inputs(&l);
        const dpl_aux aux = {DPL_BALANCE_SEQUENCE, 0.5f, 0.5f, 1, 10, padded ? 8 : 5};
        l.aux = &aux;
        assert_int_equal(lab_run(&l, ctx), DPL_OK);
        assert_int_equal(l.saved.ep.n_rows, 100);
        memcpy(losses[padded], l.saved.aux, sizeof losses[padded]);
        memcpy(routed[padded], l.saved.ep.counts, sizeof routed[padded]);
        router[padded] = dpl_alloc_array(l.n[LAB_ROUTER], sizeof(float));
        for (size_t i = 0; i < l.n[LAB_ROUTER]; i++)
            router[padded][i] = lab_grad(&l, LAB_ROUTER, i);
        for (size_t t = 0; padded && t < rule.t; t++)
            if (!l.segment[t])
                assert_true(all_zero_bits((float *)l.y + t * rule.d, rule.d * 4) &&
                            all_zero_bits(l.dx + t * rule.d, rule.d * 4));
        dpl_free(x);
        dpl_free(dy);
        lab_close(&l);
    }
    assert_memory_equal(routed[0], routed[1], sizeof routed[0]);
    for (int i = 0; i < 2; i++)
        assert_true(fabs(losses[0][i] - losses[1][i]) < 1e-6 * losses[0][i]);
    double largest = 0;
    for (size_t i = 0; i < 8 * 24; i++) largest = fmax(largest, fabs((double)router[0][i]));
    for (size_t i = 0; i < 8 * 24; i++)
        assert_true(fabs((double)router[0][i] - (double)router[1][i]) < 1e-5 * largest);
    dpl_free(router[0]);
    dpl_free(router[1]);
}

/* ---- the layer as a whole -----------------------------------------------------------------------
 */

// The gradient of an expert without tokens is zero to the bit, after a call in which it had
// some.
static void experts_without_tokens_have_zero_gradient(void **state) {
    (void)state;
    lab_rule rule = {
        .t = 40, .d = 24, .f = 16, .rule = lab_sigmoid(8, 2), .bias = true, .seed = 12};
    lab l;
    lab_open(&rule, &l);
    assert_int_equal(lab_run(&l, ctx), DPL_OK); // leaves its traces in the memory of the step
    dpl_ctx_release(ctx, 0);
    for (size_t e = 0; e < 8; e++) l.bias[e] = e == 2 || e == 5 ? 10 : -10;
    lab_zero_grads(&l);
    memset(&l.saved, 0, sizeof l.saved);
    assert_int_equal(lab_run(&l, ctx), DPL_OK);
    for (size_t e = 0; e < 8; e++) {
        const bool used = e == 2 || e == 5;
        assert_int_equal(l.saved.ep.counts[e], used ? 40 : 0);
        const size_t gate_up = l.grad_elems[1] / 8, down = l.grad_elems[2] / 8;
        assert_true(all_zero_bits(l.weights.gate_up.grad + e * gate_up, gate_up * 4) == !used);
        assert_true(all_zero_bits(l.weights.down.grad + e * down, down * 4) == !used);
    }
    lab_close(&l);
}

static size_t peak_of(size_t n_tokens, bool one_expert, size_t n_padding) {
    dpl_ctx *own = lab_ctx(2, false, NULL);
    lab_rule rule = {.t = n_tokens,
                     .d = 32,
                     .f = 24,
                     .shared_f = 8,
                     .rule = lab_sigmoid(8, 1),
                     .bias = true,
                     .seed = 13};
    lab l;
    lab_open(&rule, &l);
    for (size_t e = 0; one_expert && e < 8; e++) l.bias[e] = e == 3 ? 10 : -10;
    l.segment = dpl_alloc_array(n_tokens, sizeof *l.segment);
    for (size_t t = n_padding; t < n_tokens; t++) l.segment[t] = 1;
    assert_int_equal(lab_run(&l, own), DPL_OK);
    if (one_expert) assert_int_equal(l.saved.ep.counts[3], n_tokens - n_padding);
    const size_t peak = dpl_arena_peak_bytes(own->arena);
    lab_close(&l);
    dpl_ctx_close(&own);
    return peak;
}

// Memory follows the rows that arrive: it does not depend on where they go.
static void memory_is_that_of_the_rows_that_arrive(void **state) {
    (void)state;
    const size_t peak = peak_of(512, true, 0);
    assert_int_equal(peak, peak_of(512, false, 0));
    assert_true(peak_of(64, true, 0) < peak / 6);
    // The gradient of rows, which are read where they lie; gate_up and its gradient; hidden, whose
    // gradient is never stored.
    const size_t row_bytes = 4 * (32 + 2 * 64 + 24);
    assert_true(peak - peak_of(512, false, 256) >= 256 * row_bytes);
}

// Of every parameter the gradient accumulates; dx is written.
static void two_backward_calls_double_every_gradient(void **state) {
    (void)state;
    lab_rule rule = {
        .t = 30, .d = 24, .f = 16, .shared_f = 8, .rule = lab_sigmoid(6, 2), .seed = 14};
    lab l;
    lab_open(&rule, &l);
    assert_int_equal(lab_run(&l, ctx), DPL_OK);
    float *once[LAB_N], *dx = dpl_alloc_array(rule.t * rule.d, sizeof *dx);
    memcpy(dx, l.dx, rule.t * rule.d * sizeof *dx);
    for (int id = 0; id < LAB_N; id++) {
        once[id] = dpl_alloc_array(l.n[id], sizeof(float));
        for (size_t i = 0; i < l.n[id]; i++) once[id][i] = lab_grad(&l, (lab_id)id, i);
    }
    lab_backward(&l, ctx);
    assert_memory_equal(dx, l.dx, rule.t * rule.d * sizeof *dx);
    for (int id = 0; id < LAB_N; id++) {
        double largest = 0;
        for (size_t i = 0; i < l.n[id]; i++) {
            // The sum over tokens may start from what is there: then the last bits differ.
            const double twice = 2 * (double)once[id][i];
            assert_true(fabs((double)lab_grad(&l, (lab_id)id, i) - twice) <=
                        1e-5 * (1 + fabs(twice)));
            largest = fmax(largest, fabs(twice));
        }
        assert_true(largest > 0.01);
        dpl_free(once[id]);
    }
    dpl_free(dx);
    lab_close(&l);
}

// Dy as a view with a row distance, twice in a row: equal gradients, inputs unchanged.
static void strided_gradients_are_read_only(void **state) {
    (void)state;
    for (int dtype = 0; dtype < 2; dtype++) {
        lab_rule rule = {.t = 30,
                         .d = 24,
                         .f = 16,
                         .shared_f = 8,
                         .rule = lab_sigmoid(6, 2),
                         .dtype = (dpl_dtype)dtype,
                         .seed = 15};
        lab l;
        lab_open(&rule, &l);
        assert_int_equal(lab_run(&l, ctx), DPL_OK);
        const uint64_t dense = lab_hash(&l);
        const size_t element = dpl_dtype_bytes(rule.dtype), ld = 2 * rule.d + 1;
        const size_t row_bytes = rule.d * element, bytes = rule.t * ld * element;
        uint8_t *wide = dpl_alloc(bytes), *before = dpl_alloc(bytes);
        memset(wide, 0xff, bytes);
        for (size_t t = 0; t < rule.t; t++)
            memcpy(wide + t * ld * element, (uint8_t *)l.dy_in + t * row_bytes, row_bytes);
        memcpy(before, wide, bytes);
        for (int again = 0; again < 2; again++) {
            lab_zero_grads(&l);
            memset(l.dx, 0xff, rule.t * rule.d * sizeof *l.dx);
            assert_int_equal(dpl_moe_backward(ctx, &l.shape, &l.weights,
                                              (dpl_mat){l.x_in, rule.d, rule.dtype}, NULL, &l.saved,
                                              (dpl_mat){wide, ld, rule.dtype},
                                              dpl_mat_f32(l.dx, rule.d)),
                             DPL_OK);
            assert_true(lab_hash(&l) == dense);
            assert_memory_equal(wide, before, bytes);
        }
        dpl_free(wide);
        dpl_free(before);
        lab_close(&l);
    }
}

static void run_alone(lab *l, uint64_t *hash) {
    lab_zero_grads(l);
    assert_int_equal(lab_run(l, ctx), DPL_OK);
    *hash = lab_hash(l);
    lab_zero_grads(l);
}

// Forward A, forward B, then backward in either order.
static void passes_may_interleave(void **state) {
    (void)state;
    for (int order = 0; order < 2; order++) {
        lab_rule rules[2] = {
            {.t = 30, .d = 24, .f = 16, .rule = lab_sigmoid(6, 2), .seed = 16},
            {.t = 17, .d = 40, .f = 8, .shared_f = 8, .rule = lab_sigmoid(4, 3), .seed = 17}};
        lab l[2];
        uint64_t alone[2];
        for (int i = 0; i < 2; i++) {
            lab_open(&rules[i], &l[i]);
            run_alone(&l[i], &alone[i]);
        }
        assert_int_equal(lab_forward(&l[0], ctx), DPL_OK);
        assert_int_equal(lab_forward(&l[1], ctx), DPL_OK);
        lab_backward(&l[order], ctx);
        lab_backward(&l[1 - order], ctx);
        for (int i = 0; i < 2; i++) {
            assert_true(lab_hash(&l[i]) == alone[i]);
            lab_close(&l[i]);
        }
    }
}

// Gradients that are not wanted are not computed, and cost nothing else its bits.
static void gradients_may_be_left_out(void **state) {
    (void)state;
    lab_rule rule = {
        .t = 30, .d = 24, .f = 16, .shared_f = 8, .rule = lab_sigmoid(6, 2), .seed = 18};
    lab l;
    lab_open(&rule, &l);
    assert_int_equal(lab_run(&l, ctx), DPL_OK);
    float *dx = dpl_alloc_array(rule.t * rule.d, sizeof *dx);
    memcpy(dx, l.dx, rule.t * rule.d * sizeof *dx);
    const dpl_moe_weights weights_and_grads = l.weights;
    dpl_weight *all[] = {&l.weights.router, &l.weights.gate_up, &l.weights.down,
                         &l.weights.shared_gate_up, &l.weights.shared_down};
    for (size_t i = 0; i < DPL_COUNT(all); i++) all[i]->grad = NULL;
    assert_int_equal(lab_run(&l, ctx), DPL_OK);
    assert_memory_equal(dx, l.dx, rule.t * rule.d * sizeof *dx);
    l.weights = weights_and_grads;
    dpl_free(dx);
    lab_close(&l);
}

/* ---- memory and its borders ---------------------------------------------------------------------
 */

// A buffer of rows is longer than its rows: what lies behind them reaches no token, neither there
// nor back.
static void rows_behind_the_last_reach_no_token(void **state) {
    (void)state;
    enum { T = 3, ROWS = 32, D = 5 };
    static const int32_t given[T] = {1, 0, 1}, row_of[T] = {1, 0, 2};
    int64_t offsets[3];
    int32_t slot_row[T], row_slot[ROWS];
    float x[T * D], rows[ROWS * D], y[T * D], dx[T * D], dw[T], row_w[ROWS];
    const float w[T] = {0.5f, 2, 4};
    for (size_t i = 0; i < T * D; i++) x[i] = (float)(i + 1);
    memset(row_slot, 0, sizeof row_slot); // padding as others fill it: all of token 0
    assert_int_equal(dpl_moe_permute(ctx, given, T, 1, 2, offsets, slot_row, row_slot), DPL_OK);
    assert_memory_equal(slot_row, row_of, sizeof row_of);
    for (size_t i = 0; i < ROWS * D; i++) rows[i] = NAN;
    for (size_t i = 0; i < ROWS; i++) row_w[i] = NAN;
    dpl_gather_rows(ctx, dpl_mat_f32(x, D), w, row_slot, 1, T, D, dpl_mat_f32(rows, D), row_w);
    for (size_t i = T * D; i < ROWS * D; i++) assert_true(isnan(rows[i]));
    for (size_t i = T; i < ROWS; i++) assert_true(isnan(row_w[i]));
    dpl_combine_rows(ctx, dpl_mat_f32(rows, D), NULL, slot_row, T, 1, D, false, dpl_mat_f32(y, D),
                     NULL);
    assert_memory_equal(y, x, sizeof x);
    dpl_combine_rows(ctx, dpl_mat_f32(rows, D), row_w, slot_row, T, 1, D, false, dpl_mat_f32(dx, D),
                     dw);
    assert_memory_equal(dx, x, sizeof x);
    assert_memory_equal(dw, w, sizeof w);
}

// A loss that does not depend on the routing weights brings no gradient of them: the tokens' own
// comes all the same.
static void gradients_of_weights_may_be_absent(void **state) {
    (void)state;
    enum { T = 2, K = 2, D = 3 };
    static const int32_t given[T * K] = {0, 3, 3, 1};
    const dpl_moe_shape shape = {.d = D, .f = 4, .rule = lab_sigmoid(4, K)};
    float drows[T * K * D], dx[T * D];
    dpl_ep_ranks ranks = {0};
    dpl_ep ep;
    assert_int_equal(dpl_ep_ranks_open(ctx, NULL, shape.rule.n_experts, NULL, 0, 0, DPL_OK, &ranks),
                     DPL_OK);
    assert_int_equal(prepare(&ranks, &shape, given, T, &ep), DPL_OK);
    for (size_t i = 0; i < T * K * D; i++) drows[i] = (float)(1 << i);
    memset(dx, 0xff, sizeof dx);
    assert_int_equal(dpl_moe_combine(ctx, &ep, DPL_OK, dpl_mat_f32(drows, D), NULL, DPL_EP_NONE, D,
                                     false, dpl_mat_f32(dx, D), NULL),
                     DPL_OK);
    dpl_ctx_wait(ctx);
    // Rows by expert, then token: 0 of token 0, 1 of token 1, 3 of token 0, 3 of token 1.
    for (size_t i = 0; i < T * D; i++) {
        const size_t t = i / D, d = i % D;
        assert_true(dx[i] == drows[t * D + d] + drows[(2 + t) * D + d]);
    }
    const dpl_route_rule rule = lab_sigmoid(4, K);
    const float some[4] = {0.5f, 0.5f, 0.5f, 0.5f};
    float dlogits[4];
    assert_int_equal(dpl_router_route_backward(ctx, &rule, 1, some, given, NULL, dlogits),
                     DPL_EINVAL);
    dpl_ep_ranks_close(&ranks);
}

// The workspace that is asked for is enough when every token goes to the same experts, to the byte;
// one byte less is an error that says how much is needed.
static void the_workspace_is_enough_for_any_routing(void **state) {
    (void)state;
    lab_rule rule = {
        .t = 200, .d = 24, .f = 20, .rule = lab_sigmoid(8, 2), .bias = true, .seed = 21};
    lab l;
    lab_open(&rule, &l);
    for (size_t e = 0; e < 8; e++) l.bias[e] = e == 1 || e == 6 ? 10 : -10;
    const dpl_layer_config config = {rule.d, rule.f, 0, rule.rule, DPL_F32};
    const dpl_layer_weights w = {.router = l.value[LAB_ROUTER],
                                 .bias = l.bias,
                                 .gate = l.value[LAB_GATE],
                                 .up = l.value[LAB_UP],
                                 .down = l.value[LAB_DOWN]};
    dpl_layer *layer = NULL;
    assert_int_equal(dpl_layer_open(&config, ctx, &layer), DPL_OK);
    assert_int_equal(dpl_layer_set_weights(layer, &w), DPL_OK);
    const size_t bytes = dpl_layer_workspace_bytes(layer, rule.t), canary = 256;
    uint8_t *ws = dpl_alloc(bytes + canary);
    int64_t loads[8];
    memset(ws, 0xa5, bytes + canary);
    assert_int_equal(dpl_layer_forward(layer, l.x, 0, rule.t, NULL, ws, bytes - 1, l.y, 0, loads),
                     DPL_ENOSPC);
    char needed[32];
    snprintf(needed, sizeof needed, "%zu", bytes);
    assert_non_null(strstr(dpl_error_message(), needed));
    assert_int_equal(dpl_layer_forward(layer, l.x, 0, rule.t, NULL, ws, bytes, l.y, 0, loads),
                     DPL_OK);
    assert_int_equal(dpl_layer_backward(layer, l.x, 0, ws, l.dy, 0, l.dx, 0), DPL_OK);
    for (size_t e = 0; e < 8; e++) assert_int_equal(loads[e], e == 1 || e == 6 ? 200 : 0);
    for (size_t i = 0; i < canary; i++) assert_int_equal(ws[bytes + i], 0xa5);
    dpl_free(ws);
    dpl_layer_close(&layer);
    lab_close(&l);
}

// Rows as wide as those of the largest models, a few of them.
static void wide_rows_stay_in_their_bounds(void **state) {
    (void)state;
    lab_rule rule = {.t = 5, .d = 7168, .f = 8, .rule = lab_sigmoid(4, 2), .seed = 22};
    lab l;
    lab_open(&rule, &l);
    assert_int_equal(lab_run(&l, ctx), DPL_OK);
    lab_oracle(&l, false);
    const double bound = 0x1p-24 * (12 + sqrt(7168.0));
    assert_true(lab_error_y(&l) < bound && lab_error_dx(&l) < bound);
    for (int id = 0; id < LAB_SGATE; id++) assert_true(lab_error(&l, (lab_id)id) < bound);
    lab_close(&l);
}

/* ---- rows far apart: address space that is reserved and hardly touched --------------------------
 */

#define FAR_ROWS 4
#define FAR_LD   (((size_t)1 << 30) + 64) // three of these are more than 2^31 elements

static dpl_mat far_mat(dpl_dtype dtype) {
    const size_t bytes = FAR_ROWS * FAR_LD * dpl_dtype_bytes(dtype);
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    if (p == MAP_FAILED) {
        print_message("SKIPPED: no address space of %zu bytes\n", bytes);
        skip();
    }
    return (dpl_mat){p, FAR_LD, dtype};
}

static void far_free(dpl_mat m) {
    munmap(m.p, FAR_ROWS * FAR_LD * dpl_dtype_bytes(m.dtype));
}

// The rows of the near matrix that keeps the expected bits.
static void far_fill(dpl_mat far, dpl_mat near, size_t width) {
    for (size_t r = 0; r < FAR_ROWS; r++)
        memcpy(dpl_mat_row(far, r), dpl_mat_row(near, r), width * dpl_dtype_bytes(far.dtype));
}

static void far_equal(dpl_mat far, dpl_mat near, size_t width) {
    for (size_t r = 0; r < FAR_ROWS; r++)
        assert_memory_equal(dpl_mat_row(far, r), dpl_mat_row(near, r),
                            width * dpl_dtype_bytes(far.dtype));
}

#define FAR_WIDTH 48

static dpl_mat near_mat(float *p, uint64_t stream) {
    for (size_t i = 0; i < FAR_ROWS * FAR_WIDTH; i++) p[i] = (float)dpl_rng_normal(8, stream, i);
    return dpl_mat_f32(p, FAR_WIDTH);
}

// Moving rows: out of far ones and into far ones.
static void moved_rows_may_lie_far_apart(void **state) {
    (void)state;
    static const int32_t slots[FAR_ROWS] = {3, 1, 0, 2};
    float a[FAR_ROWS * FAR_WIDTH], b[FAR_ROWS * FAR_WIDTH];
    const dpl_mat x = near_mat(a, 1), y = dpl_mat_f32(b, FAR_WIDTH);
    const dpl_mat from = far_mat(DPL_F32), to = far_mat(DPL_F32);
    far_fill(from, x, FAR_WIDTH);
    dpl_gather_rows(ctx, x, NULL, slots, 1, FAR_ROWS, FAR_WIDTH, y, NULL);
    dpl_gather_rows(ctx, from, NULL, slots, 1, FAR_ROWS, FAR_WIDTH, to, NULL);
    far_equal(to, y, FAR_WIDTH);
    dpl_combine_rows(ctx, x, NULL, slots, FAR_ROWS, 1, FAR_WIDTH, true, y, NULL);
    dpl_combine_rows(ctx, from, NULL, slots, FAR_ROWS, 1, FAR_WIDTH, true, to, NULL);
    far_equal(to, y, FAR_WIDTH);
    dpl_copy(ctx, from, FAR_ROWS, FAR_WIDTH, to);
    far_equal(to, x, FAR_WIDTH);
    far_free(from);
    far_free(to);
}

// Norm, rotation and loss, forward and backward.
static void rows_of_any_operator_may_lie_far_apart(void **state) {
    (void)state;
    enum { D = FAR_WIDTH };
    float a[FAR_ROWS * D], b[FAR_ROWS * D], c[FAR_ROWS * D], gain[D], dgain[2][D] = {{0}, {0}};
    float rstd[2][FAR_ROWS], loss[2][FAR_ROWS], zloss[2][FAR_ROWS];
    const dpl_mat x = near_mat(a, 1), y = near_mat(b, 2), dx = near_mat(c, 3);
    const dpl_mat fx = far_mat(DPL_F32), fy = far_mat(DPL_F32), fdx = far_mat(DPL_F32);
    far_fill(fx, x, D);
    for (size_t i = 0; i < D; i++) gain[i] = (float)(1 + i) / D;
    dpl_rmsnorm_forward(ctx, x, gain, FAR_ROWS, D, 1e-6f, y, rstd[0]);
    dpl_rmsnorm_forward(ctx, fx, gain, FAR_ROWS, D, 1e-6f, fy, rstd[1]);
    far_equal(fy, y, D);
    dpl_rmsnorm_backward(ctx, y, x, gain, rstd[0], FAR_ROWS, D, dx, false, dgain[0]);
    dpl_rmsnorm_backward(ctx, fy, fx, gain, rstd[1], FAR_ROWS, D, fdx, false, dgain[1]);
    far_equal(fdx, dx, D);
    assert_memory_equal(dgain[0], dgain[1], sizeof dgain[0]);

    static const int32_t position[FAR_ROWS] = {0, 1, 0, 1}, targets[FAR_ROWS] = {0, D - 1, -1, 7};
    const dpl_rope rope = {gain, gain + 8, position, 2, D / 2, 4, 8, true};
    dpl_rope_apply(ctx, &rope, FAR_ROWS, false, y);
    dpl_rope_apply(ctx, &rope, FAR_ROWS, false, fy);
    far_equal(fy, y, D);
    dpl_xent(ctx, y.p, y.ld, targets, FAR_ROWS, D, 0.1f, 0.5f, loss[0], zloss[0]);
    dpl_xent(ctx, fy.p, fy.ld, targets, FAR_ROWS, D, 0.1f, 0.5f, loss[1], zloss[1]);
    far_equal(fy, y, D);
    assert_memory_equal(loss[0], loss[1], sizeof loss[0]);
    far_free(fx);
    far_free(fy);
    far_free(fdx);
}

// All gradients of a GEMM, not its forward pass alone.
static void gradients_of_far_rows_are_right(void **state) {
    (void)state;
    enum { D = FAR_WIDTH, ELEMS = (D + 31) / 32 * 32 * D };
    float a[FAR_ROWS * D], b[FAR_ROWS * D], c[FAR_ROWS * D];
    const dpl_mat x = near_mat(a, 1), dy = near_mat(b, 2), dx = near_mat(c, 3);
    const dpl_mat fx = far_mat(DPL_F32), fdy = far_mat(DPL_F32), fdx = far_mat(DPL_F32);
    float *w = random_floats(ELEMS, 4);
    float *dw[2] = {dpl_alloc_array(ELEMS, 4), dpl_alloc_array(ELEMS, 4)};
    const dpl_weight weight = {w, DPL_F32, 1, D, D, NULL, NULL, NULL};
    const dpl_groups rows = dpl_one_group(FAR_ROWS);
    far_fill(fx, x, D);
    far_fill(fdy, dy, D);
    dpl_gemm_dgrad(ctx, dy, &weight, rows, dx, false);
    dpl_gemm_dgrad(ctx, fdy, &weight, rows, fdx, false);
    far_equal(fdx, dx, D);
    dpl_gemm_wgrad(ctx, dy, x, (dpl_row_map){0}, rows, D, D, DPL_F32, true, dw[0]);
    dpl_gemm_wgrad(ctx, fdy, fx, (dpl_row_map){0}, rows, D, D, DPL_F32, true, dw[1]);
    dpl_ctx_wait(ctx);
    assert_memory_equal(dw[0], dw[1], ELEMS * sizeof(float));
    assert_false(all_zero_bits(dw[0], ELEMS * sizeof(float)));
    for (int i = 0; i < 2; i++) dpl_free(dw[i]);
    dpl_free(w);
    far_free(fx);
    far_free(fdy);
    far_free(fdx);
}

// Attention over rows that lie far apart; all of its matrices at once.
static void attention_of_far_rows_is_right(void **state) {
    (void)state;
    enum { H = 2, NOPE = 8, ROPE = 4, V = 6, N = 8 };
    static const size_t width[N] = {H * (NOPE + ROPE), H * (NOPE + V), ROPE, H * V, H * V,
                                    H * (NOPE + ROPE), H * (NOPE + V), ROPE};
    static float values[N][FAR_ROWS * FAR_WIDTH];
    float lse[2][FAR_ROWS * H];
    dpl_mat near[N], far[N];
    for (size_t i = 0; i < N; i++) {
        near[i] = near_mat(values[i], i);
        far[i] = far_mat(DPL_F32);
        far_fill(far[i], near[i], width[i]);
    }
    for (int is_far = 0; is_far < 2; is_far++) {
        const dpl_mat *m = is_far ? far : near;
        const dpl_attention a = {.n_batch = 1,
                                 .n_seq = FAR_ROWS,
                                 .n_heads = H,
                                 .d_nope = NOPE,
                                 .d_rope = ROPE,
                                 .d_v = V,
                                 .scale = 0.3f,
                                 .q = m[0],
                                 .kv = m[1],
                                 .k_rope = m[2]};
        dpl_attention_forward(ctx, &a, m[4], lse[is_far]);
        dpl_attention_backward(ctx, &a, m[4], lse[is_far], m[3], m[5], m[6], m[7]);
        dpl_ctx_wait(ctx);
    }
    assert_memory_equal(lse[0], lse[1], sizeof lse[0]);
    for (size_t i = 4; i < N; i++) far_equal(far[i], near[i], width[i]);
    for (size_t i = 0; i < N; i++) far_free(far[i]);
}

// An embedding of more than 2^31 elements: its last row is read, and its gradient goes there.
static void the_last_row_of_a_large_embedding_is_found(void **state) {
    (void)state;
    enum { N = 3 };
    const size_t v = 299600, d = 7168, bytes = v * d * sizeof(float);
    float *table = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    float *dtable = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (table == MAP_FAILED || dtable == MAP_FAILED) skip();
    const int32_t tokens[N] = {(int32_t)v - 1, 0, (int32_t)v - 1};
    float *y = dpl_alloc_array(N * d, sizeof *y);
    for (size_t c = 0; c < d; c++) table[(v - 1) * d + c] = (float)(c + 1);
    dpl_embed_forward(ctx, table, false, tokens, N, v, d, dpl_mat_f32(y, d));
    dpl_ctx_wait(ctx);
    for (size_t c = 0; c < d; c++)
        assert_true(y[c] == (float)(c + 1) && y[d + c] == 0 && y[2 * d + c] == y[c]);
    dpl_embed_backward(ctx, dpl_mat_f32(y, d), tokens, false, N, v, d, dtable);
    dpl_ctx_wait(ctx);
    for (size_t c = 0; c < d; c++)
        assert_true(dtable[(v - 1) * d + c] == 2 * (float)(c + 1) && dtable[c] == 0);
    dpl_free(y);
    munmap(table, bytes);
    munmap(dtable, bytes);
}

/* ---- what holds over many calls, and between ranks ------------------------------------------- */

// A thousand calls, each with another number of tokens and another few experts that get them all:
// memory does not grow. Sanitizers keep what was freed.
static void uneven_loads_take_no_more_and_more_memory(void **state) {
    (void)state;
    enum { STEPS = 1000, WARM = 100, T = 160 };
    lab_rule rule = {
        .t = T, .d = 32, .f = 24, .rule = lab_sigmoid(16, 2), .bias = true, .seed = 24};
    dpl_ctx *own = lab_ctx(2, false, NULL);
    lab l;
    lab_open(&rule, &l);
    size_t resident = 0, used = 0, peak = 0;
    for (uint64_t step = 0; step < STEPS; step++) {
        for (size_t e = 0; e < 16; e++)
            l.bias[e] = (float)(5 * dpl_rng_normal(24, 100 + step / 8, e));
        l.rule.t = step % 50 == 7 ? T : dpl_rng_u64(24, 1, step) % (T + 1);
        assert_int_equal(lab_run(&l, own), DPL_OK);
        dpl_ctx_release(own, 0);
        if (step != WARM) continue;
        peak = dpl_arena_peak_bytes(own->arena);
        resident = scratch_resident_bytes();
        used = scratch_used_bytes();
    }
    assert_int_equal(dpl_arena_peak_bytes(own->arena), peak);
    assert_true(scratch_used_bytes() <= used + 4096);
    if (!HAS_SANITIZER) assert_true(scratch_resident_bytes() <= resident + resident / 100);
    lab_close(&l);
    dpl_ctx_close(&own);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(empty_groups_have_zero_gradients_and_no_stray_rows),
        cmocka_unit_test(groups_of_any_size_and_start_are_right),
        cmocka_unit_test(odd_strides_and_rows_beyond_the_last_group),
        cmocka_unit_test(offsets_are_checked),
        cmocka_unit_test(large_weights_are_right_too),
        cmocka_unit_test(the_last_expert_is_found_behind_4_gib),
        cmocka_unit_test(logits_that_are_not_finite_name_their_token),
        cmocka_unit_test(a_layer_names_the_token_that_is_not_finite),
        cmocka_unit_test(ids_above_255_are_chosen),
        cmocka_unit_test(equal_scores_choose_the_lower_ids),
        cmocka_unit_test(bias_only_decides_and_in_fp32),
        cmocka_unit_test(weights_are_normalized_per_token_then_scaled),
        cmocka_unit_test(group_score_is_the_sum_of_the_two_best),
        cmocka_unit_test(one_normalized_expert_gives_the_router_no_gradient),
        cmocka_unit_test(equal_tokens_choose_alike),
        cmocka_unit_test(ids_of_a_caller_are_checked),
        cmocka_unit_test(skipped_slots_shift_no_rows),
        cmocka_unit_test(combine_rounds_once),
        cmocka_unit_test(the_shared_expert_counts_fully),
        cmocka_unit_test(counts_are_exact_and_repeatable),
        cmocka_unit_test(padding_changes_nothing),
        cmocka_unit_test(experts_without_tokens_have_zero_gradient),
        cmocka_unit_test(memory_is_that_of_the_rows_that_arrive),
        cmocka_unit_test(two_backward_calls_double_every_gradient),
        cmocka_unit_test(strided_gradients_are_read_only),
        cmocka_unit_test(passes_may_interleave),
        cmocka_unit_test(gradients_may_be_left_out),
        cmocka_unit_test(rows_behind_the_last_reach_no_token),
        cmocka_unit_test(gradients_of_weights_may_be_absent),
        cmocka_unit_test(the_workspace_is_enough_for_any_routing),
        cmocka_unit_test(wide_rows_stay_in_their_bounds),
        cmocka_unit_test(moved_rows_may_lie_far_apart),
        cmocka_unit_test(rows_of_any_operator_may_lie_far_apart),
        cmocka_unit_test(gradients_of_far_rows_are_right),
        cmocka_unit_test(attention_of_far_rows_is_right),
        cmocka_unit_test(the_last_row_of_a_large_embedding_is_found),
        cmocka_unit_test(uneven_loads_take_no_more_and_more_memory),
    };
    return cmocka_run_group_tests(tests, open_ctx, close_ctx);
}
