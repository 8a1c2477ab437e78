/*
 * test_moe.c - one MoE layer as a whole: against the fp64 oracle, by finite differences, and what
 * must not change any bit: threads, deferred operators, the other tokens of the call.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>

#include "lab.h"

static const char *const levels[] = {"ref", "avx2", "avx512", "avx512_bf16", "amx", "tiles"};

static const lab_rule plain = {.t = 33, .d = 40, .f = 24, .seed = 11};

// Shapes that are multiples of nothing, every kind of routing, with and without shared expert and
// bias.
static size_t make_rules(dpl_dtype dtype, lab_rule rules[8]) {
    size_t n = 0;
    lab_rule r = plain;
    r.dtype = dtype;
    r.rule = lab_sigmoid(8, 2);
    rules[n++] = r;
    r.rule = lab_sigmoid(12, 3);
    r.rule.n_groups = 4;
    r.rule.top_groups = 2;
    r.bias = true;
    r.shared_f = 24;
    r.seed = 12;
    rules[n++] = r;
    r = (lab_rule){.t = 7, .d = 33, .f = 17, .shared_f = 19, .dtype = dtype, .seed = 13};
    r.rule = lab_sigmoid(5, 5);
    rules[n++] = r;
    r = (lab_rule){.t = 1, .d = 1, .f = 1, .shared_f = 1, .dtype = dtype, .seed = 14};
    r.rule = lab_sigmoid(1, 1);
    r.rule.norm_topk = false;
    rules[n++] = r;
    r = (lab_rule){.t = 130, .d = 96, .f = 48, .dtype = dtype, .seed = 15};
    r.rule = lab_sigmoid(32, 6); // a softmax family without renormalization
    r.rule.sigmoid = false;
    r.rule.norm_topk = false;
    r.rule.scale = 1;
    rules[n++] = r;
    r.rule.norm_topk = true;
    r.rule.n_groups = 8;
    r.rule.top_groups = 3;
    r.rule.group_top2 = false;
    r.seed = 16;
    rules[n++] = r;
    return n;
}

// Relative RMS errors of y, dx and each gradient, from the same expert ids.
static void check_errors(lab *l, double bound, const char *level) {
    static const char *const names[LAB_N] = {"router",      "gate",      "up",         "down",
                                             "shared gate", "shared up", "shared down"};
    lab_oracle(l, false);
    const double y = lab_error_y(l), dx = lab_error_dx(l);
    if (!(y < bound && dx < bound))
        fail_msg("%s, seed %llu: y %g, dx %g, bound %g", level, (unsigned long long)l->rule.seed, y,
                 dx, bound);
    for (int id = 0; id < LAB_N; id++) {
        const double error = lab_error(l, (lab_id)id);
        if (!(error < bound))
            fail_msg("%s, seed %llu: %s %g, bound %g", level, (unsigned long long)l->rule.seed,
                     names[id], error, bound);
    }
}

// Relative errors: in fp32 a dozen roundings in a row and sums, whose errors grow with the root of
// their length; in bf16 the sums are fp32, and gate/up, hidden, rows and y are rounded to 9 bits.
static double error_bound(const lab_rule *rule) {
    if (rule->dtype == DPL_BF16) return 4 * 0x1p-9;
    return 0x1p-24 * (12 + sqrt((double)(rule->d + rule->f + rule->t)));
}

static void compare_levels(dpl_dtype dtype) {
    for (size_t i = 0; i < DPL_COUNT(levels); i++) {
        dpl_ctx *ctx = lab_ctx(2, false, levels[i]);
        if (!ctx) {
            print_message("level %s: not on this machine\n", levels[i]);
            continue;
        }
        lab_rule rules[8];
        const size_t n = make_rules(dtype, rules);
        for (size_t r = 0; r < n; r++) {
            lab l;
            lab_open(&rules[r], &l);
            const size_t mark = dpl_ctx_mark(ctx);
            assert_int_equal(lab_run(&l, ctx), DPL_OK);
            check_errors(&l, error_bound(&l.rule), levels[i]);
            dpl_ctx_release(ctx, mark);
            lab_close(&l);
        }
        dpl_ctx_close(&ctx);
    }
}

static void fp32_layer_equals_the_oracle(void **state) {
    (void)state;
    compare_levels(DPL_F32);
}

static void bf16_layer_stays_within_its_roundings(void **state) {
    (void)state;
    compare_levels(DPL_BF16);
}

static void choice_equals_the_oracle(void **state) {
    (void)state;
    dpl_ctx *ctx = lab_ctx(2, false, NULL);
    lab_rule rules[8];
    const size_t n = make_rules(DPL_F32, rules);
    for (size_t r = 0; r < n; r++) {
        lab l;
        lab_open(&rules[r], &l);
        assert_int_equal(lab_forward(&l, ctx), DPL_OK);
        lab_oracle(&l, true);
        for (size_t i = 0; i < l.rule.t * l.rule.rule.top_k; i++)
            assert_int_equal(l.saved.ids[i], l.routing.ids[i]);
        int64_t total = 0;
        for (size_t e = 0; e < l.rule.rule.n_experts; e++) total += l.saved.ep.counts[e];
        assert_int_equal(total, l.rule.t * l.rule.rule.top_k);
        assert_int_equal(l.saved.ep.n_rows, total);
        lab_close(&l);
    }
    dpl_ctx_close(&ctx);
}

static void auxiliary_losses_equal_the_oracle(void **state) {
    (void)state;
    dpl_ctx *ctx = lab_ctx(2, false, NULL);
    static const dpl_balance_kind kinds[] = {DPL_BALANCE_SEQUENCE, DPL_BALANCE_BATCH,
                                             DPL_BALANCE_MEGATRON};
    for (size_t i = 0; i < DPL_COUNT(kinds); i++) {
        lab_rule rule = {.t = 36, .d = 24, .f = 16, .rule = lab_sigmoid(8, 2), .seed = 21};
        lab l;
        lab_open(&rule, &l);
        const dpl_aux aux = {kinds[i], 0.5f, 0.25f, 1, 3, 12};
        l.aux = &aux;
        l.segment = dpl_alloc_array(rule.t, sizeof *l.segment);
        for (size_t t = 0; t < rule.t; t++)
            l.segment[t] = t % 12 < 10; // the last two of each sequence are padding
        assert_int_equal(lab_run(&l, ctx), DPL_OK);
        check_errors(&l, error_bound(&l.rule), "aux");
        for (int a = 0; a < 2; a++)
            assert_true(l.aux_expected[a] > 0 &&
                        fabs(l.saved.aux[a] - l.aux_expected[a]) < 1e-6 * l.aux_expected[a]);
        lab_close(&l);
    }
    dpl_ctx_close(&ctx);
}

// sum of y * dy in fp64.
static double objective(const lab *l) {
    double sum = 0;
    for (size_t i = 0; i < l->rule.t * l->rule.d; i++)
        sum += (double)lab_y(l, i) * (double)l->dy[i];
    return sum;
}

// (L(v + h u) - L(v - h u)) / 2h against <gradient, u> for a random direction u.
static void check_direction(lab *l, dpl_ctx *ctx, float *values, size_t n,
                            float (*gradient)(const lab *, int, size_t), int id) {
    const double h = 1e-3;
    double expected = 0, norm = 0;
    float *before = dpl_alloc_array(n, sizeof *before);
    memcpy(before, values, n * sizeof *before);
    double side[2];
    for (size_t i = 0; i < n; i++) {
        const double u = dpl_rng_normal(99, (uint64_t)id, i);
        expected += u * (double)gradient(l, id, i);
        norm += (double)gradient(l, id, i) * (double)gradient(l, id, i);
    }
    for (int s = 0; s < 2; s++) {
        for (size_t i = 0; i < n; i++)
            values[i] = (float)((double)before[i] +
                                (s ? h : -h) * dpl_rng_normal(99, (uint64_t)id, i));
        lab_pack(l);
        lab_inputs(l);
        assert_int_equal(lab_forward(l, ctx), DPL_OK);
        side[s] = objective(l);
    }
    memcpy(values, before, n * sizeof *before);
    dpl_free(before);
    // <gradient, u> has the size of the gradient's norm; curvature and rounding are far below.
    const double slope = (side[1] - side[0]) / (2 * h);
    if (!(fabs(slope - expected) < 2e-3 * sqrt(norm)) || norm == 0)
        fail_msg("tensor %d: slope %.8g, gradient %.8g, norm %.3g", id, slope, expected,
                 sqrt(norm));
}

static float gradient_of_weight(const lab *l, int id, size_t i) {
    return lab_grad(l, (lab_id)id, i);
}
static float gradient_of_x(const lab *l, int id, size_t i) {
    (void)id;
    return l->dx[i];
}

static void gradients_are_the_slopes_of_the_output(void **state) {
    (void)state;
    dpl_ctx *ctx = lab_ctx(2, false, NULL);
    lab_rule rule = {
        .t = 9, .d = 20, .f = 12, .shared_f = 10, .rule = lab_sigmoid(6, 6), .seed = 31};
    lab l; // All experts are chosen, so that no step changes the choice.
    lab_open(&rule, &l);
    assert_int_equal(lab_run(&l, ctx), DPL_OK);
    for (int id = 0; id < LAB_N; id++)
        check_direction(&l, ctx, l.value[id], l.n[id], gradient_of_weight, id);
    check_direction(&l, ctx, l.x, rule.t * rule.d, gradient_of_x, LAB_N);
    lab_close(&l);
    dpl_ctx_close(&ctx);
}

// Everything that a call gives, as one number.
static uint64_t run_hash(const lab_rule *rule, int n_threads, bool deferred, const char *level) {
    dpl_ctx *ctx = lab_ctx(n_threads, deferred, level);
    if (!ctx) return 0;
    lab l;
    lab_open(rule, &l);
    const dpl_aux aux = {DPL_BALANCE_BATCH, 0.1f, 0.1f, 1, 1, rule->t};
    l.aux = &aux;
    assert_int_equal(lab_run(&l, ctx), DPL_OK);
    assert_int_equal(lab_run(&l, ctx), DPL_OK); // accumulates
    const uint64_t hash = lab_hash(&l);
    lab_close(&l);
    dpl_ctx_close(&ctx);
    return hash;
}

static lab_rule big_rule(dpl_dtype dtype) {
    lab_rule rule = {.t = 700, .d = 72, .f = 56, .shared_f = 40, .dtype = dtype, .seed = 41};
    rule.rule = lab_sigmoid(16, 4);
    rule.bias = true;
    return rule;
}

static void bits_do_not_depend_on_threads(void **state) {
    (void)state;
    static const int n_threads[] = {2, 3, 8};
    for (int dtype = 0; dtype < 2; dtype++)
        for (size_t i = 0; i < DPL_COUNT(levels); i++) {
            const lab_rule rule = big_rule((dpl_dtype)dtype);
            const uint64_t one = run_hash(&rule, 1, false, levels[i]);
            for (size_t n = 0; one && n < DPL_COUNT(n_threads); n++)
                assert_true(run_hash(&rule, n_threads[n], false, levels[i]) == one);
        }
}

static void a_deferred_context_gives_the_same_bits(void **state) {
    (void)state;
    for (int dtype = 0; dtype < 2; dtype++) {
        const lab_rule rule = big_rule((dpl_dtype)dtype);
        assert_true(run_hash(&rule, 2, true, NULL) == run_hash(&rule, 2, false, NULL));
    }
}

// Of tokens and gradients that MXFP8 holds exactly, or not: eighths up to 1 of either sign.
static uint64_t wire_hash(bool wire, bool exact, int n_threads, bool deferred) {
    lab_rule rule = big_rule(DPL_BF16);
    rule.mx_wire = wire;
    dpl_ctx *ctx = lab_ctx(n_threads, deferred, NULL);
    lab l;
    lab_open(&rule, &l);
    for (size_t i = 0; exact && i < rule.t * rule.d; i++) {
        l.x[i] = (float)(dpl_rng_u64(7, 1, i) % 17) / 8 - 1;
        l.dy[i] = (float)(dpl_rng_u64(7, 2, i) % 17) / 8 - 1;
    }
    lab_inputs(&l);
    assert_int_equal(lab_run(&l, ctx), DPL_OK);
    const uint64_t hash = lab_hash(&l);
    lab_close(&l);
    dpl_ctx_close(&ctx);
    return hash;
}

static void rows_that_mxfp8_holds_keep_their_bits(void **state) {
    (void)state;
    const uint64_t plain_hash = wire_hash(false, true, 2, false);
    assert_true(wire_hash(true, true, 2, false) == plain_hash);
    assert_true(wire_hash(true, true, 3, true) == plain_hash);
    assert_true(wire_hash(true, false, 2, false) != wire_hash(false, false, 2, false));
    assert_true(wire_hash(true, false, 2, false) == wire_hash(true, false, 3, true));
}

static void row_bits_do_not_depend_on_other_tokens(void **state) {
    (void)state;
    dpl_ctx *ctx = lab_ctx(2, false, NULL);
    for (int dtype = 0; dtype < 2; dtype++) {
        lab_rule rule = big_rule((dpl_dtype)dtype);
        rule.t = 150;
        lab l;
        lab_open(&rule, &l);
        assert_int_equal(lab_run(&l, ctx), DPL_OK);
        const size_t d = rule.d, element = dpl_dtype_bytes(rule.dtype);
        uint8_t *y = dpl_alloc_array(rule.t * d, element), *x = l.x_in, *dy = l.dy_in;
        float *dx = dpl_alloc_array(rule.t * d, sizeof *dx);
        memcpy(y, l.y, rule.t * d * element);
        memcpy(dx, l.dx, rule.t * d * sizeof *dx);
        for (size_t t = 0; t < rule.t; t += 7) { // each alone
            l.rule.t = 1;
            l.x_in = x + t * d * element;
            l.dy_in = dy + t * d * element;
            assert_int_equal(lab_run(&l, ctx), DPL_OK);
            assert_memory_equal(l.y, y + t * d * element, d * element);
            assert_memory_equal(l.dx, dx + t * d, d * sizeof *dx);
        }
        l.x_in = x;
        l.dy_in = dy;
        dpl_free(y);
        dpl_free(dx);
        lab_close(&l);
    }
    dpl_ctx_close(&ctx);
}

static void no_tokens_is_a_call_like_any_other(void **state) {
    (void)state;
    for (int deferred = 0; deferred < 2; deferred++) {
        dpl_ctx *ctx = lab_ctx(2, deferred, NULL);
        lab_rule rule = big_rule(DPL_BF16);
        rule.t = 0;
        lab l;
        lab_open(&rule, &l);
        assert_int_equal(lab_run(&l, ctx), DPL_OK);
        assert_int_equal(l.saved.ep.n_rows, 0);
        for (size_t e = 0; e < rule.rule.n_experts; e++) assert_int_equal(l.saved.ep.counts[e], 0);
        for (int id = 0; id < LAB_N; id++)
            for (size_t i = 0; i < l.n[id]; i++) assert_true(lab_grad(&l, (lab_id)id, i) == 0);
        lab_close(&l);
        dpl_ctx_close(&ctx);
    }
}

// Row numbers are int32: more slots than that are refused before anything is read.
static void too_many_slots_are_refused(void **state) {
    (void)state;
    assert_int_equal(dpl_ep_check_slots((size_t)INT32_MAX / 2, 2), DPL_OK);
    assert_int_equal(dpl_ep_check_slots((size_t)INT32_MAX / 2 + 1, 2), DPL_EINVAL);
    assert_int_equal(dpl_ep_check_slots(SIZE_MAX / 2, 2), DPL_EINVAL);
}

static void time_is_counted_by_phase(void **state) {
    (void)state;
    dpl_ctx *ctx = lab_ctx(2, false, NULL);
    const lab_rule rule = big_rule(DPL_F32);
    lab l;
    lab_open(&rule, &l);
    ctx->phase = DPL_PHASE_NORM;
    assert_int_equal(lab_run(&l, ctx), DPL_OK);
    static const dpl_phase used[] = {DPL_PHASE_GMM, DPL_PHASE_GEMM, DPL_PHASE_ROUTER,
                                     DPL_PHASE_DISPATCH, DPL_PHASE_COMBINE};
    for (size_t i = 0; i < DPL_COUNT(used); i++) assert_true(ctx->phase_s[used[i]] > 0);
    assert_int_equal(ctx->phase, DPL_PHASE_NORM);
    assert_true(ctx->phase_s[DPL_PHASE_NORM] == 0 && ctx->phase_s[DPL_PHASE_OTHER] == 0);
    lab_close(&l);
    dpl_ctx_close(&ctx);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fp32_layer_equals_the_oracle),
        cmocka_unit_test(bf16_layer_stays_within_its_roundings),
        cmocka_unit_test(choice_equals_the_oracle),
        cmocka_unit_test(auxiliary_losses_equal_the_oracle),
        cmocka_unit_test(gradients_are_the_slopes_of_the_output),
        cmocka_unit_test(bits_do_not_depend_on_threads),
        cmocka_unit_test(a_deferred_context_gives_the_same_bits),
        cmocka_unit_test(rows_that_mxfp8_holds_keep_their_bits),
        cmocka_unit_test(row_bits_do_not_depend_on_other_tokens),
        cmocka_unit_test(no_tokens_is_a_call_like_any_other),
        cmocka_unit_test(too_many_slots_are_refused),
        cmocka_unit_test(time_is_counted_by_phase),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
