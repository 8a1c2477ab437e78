/*
 * test_route.c - choice of experts, auxiliary losses and row movement against the fp64 oracle,
 * finite differences and plain loops, at every CPU level; ties, bad logits, padding and skipped
 * slots; bits over threads and on a deferred context; offsets beyond 2^31.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "cpu/kernels.h"
#include "cpu/ops.h"
#include "oracle.h"

#define SEED   41973
#define CANARY 16 // elements of 0xff bytes behind every output

static const char *const levels[] = {"ref", "avx2", "avx512", "avx512_bf16", "amx", "tiles"};

static dpl_ctx *open_ctx(const char *level, int n_threads, bool deferred) {
    setenv("DPL_CPU", level, 1);
    dpl_ctx *ctx = NULL;
    if (dpl_ctx_create(n_threads, deferred, 0, &ctx) != DPL_OK) return NULL; // not this machine
    return ctx;
}

// An output: every byte 0xff, followed by a canary.
static void *output(size_t n, size_t size) {
    void *p = malloc((n + CANARY) * size);
    memset(p, 0xff, (n + CANARY) * size);
    return p;
}

static bool all_ones(const void *p, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (((const uint8_t *)p)[i] != 0xff) return false;
    return true;
}

static void check_canary(const void *p, size_t n, size_t size) {
    assert_true(all_ones((const uint8_t *)p + n * size, CANARY * size));
}

static float *normals(uint64_t stream, size_t n, float size) {
    float *x = malloc((n + 1) * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = size * (float)dpl_rng_normal(SEED, stream, i);
    return x;
}

static void assert_near(double got, double want, double bound) {
    if (!(fabs(got - want) <= bound))
        print_error("got %.9g, want %.9g, bound %g\n", got, want, bound);
    assert_true(fabs(got - want) <= bound);
}

/* ---- routing ---- */

typedef struct routing {
    dpl_route_rule rule;
    size_t t;
    float *logits, *bias;
    int32_t *segment;
    float *score, *weights, *dweights, *dlogits;
    int32_t *ids, bad_row;
} routing;

static void routing_open(routing *r, dpl_route_rule rule, size_t t, bool bias, bool padding) {
    const size_t n = t * rule.n_experts, n_slots = t * rule.top_k;
    *r = (routing){.rule = rule, .t = t, .logits = normals(1, n, 1.5f), .bad_row = 99};
    if (bias) r->bias = normals(2, rule.n_experts, 0.2f);
    r->dweights = normals(3, n_slots, 1);
    r->score = output(n, sizeof(float));
    r->dlogits = output(n, sizeof(float));
    r->weights = output(n_slots, sizeof(float));
    r->ids = output(n_slots, sizeof(int32_t));
    if (!padding) return;
    r->segment = malloc((t + 1) * sizeof *r->segment);
    for (size_t i = 0; i < t; i++) r->segment[i] = (int32_t)(dpl_rng_u64(SEED, 4, i) % 3);
}

static void routing_close(routing *r) {
    void *all[] = {r->logits,  r->bias,     r->segment, r->score,
                   r->weights, r->dweights, r->dlogits, r->ids};
    for (size_t i = 0; i < DPL_COUNT(all); i++) free(all[i]);
}

static void route(dpl_ctx *ctx, routing *r) {
    dpl_route_forward(ctx, &r->rule, r->logits, r->bias, r->segment, r->t, r->score, r->ids,
                      r->weights, &r->bad_row);
    dpl_route_backward(ctx, &r->rule, r->dweights, r->ids, r->score, r->t, r->dlogits);
    dpl_ctx_wait(ctx);
}

static oracle_router oracle_rule(const dpl_route_rule *r) {
    return (oracle_router){
        (int)r->n_experts,     (int)r->top_k, (int)r->n_groups, (int)r->top_groups,
        r->group_top2 ? 2 : 1, !r->sigmoid,   r->norm_topk,     r->scale};
}

static double *widen(const float *x, size_t n) {
    double *y = malloc((n + 1) * sizeof *y);
    for (size_t i = 0; i < n; i++) y[i] = x[i];
    return y;
}

// The oracle's view of the same logits and dweights, with forward done.
static void judge(const routing *r, oracle_router *rule, oracle_routing *s) {
    *rule = oracle_rule(&r->rule);
    oracle_routing_open(s, rule, (int)r->t);
    for (size_t i = 0; i < r->t * r->rule.n_experts; i++) s->logits[i] = r->logits[i];
    for (size_t i = 0; i < r->t * r->rule.top_k; i++) s->dweights[i] = r->dweights[i];
    double *bias = r->bias ? widen(r->bias, r->rule.n_experts) : NULL;
    oracle_route_forward(rule, (int)r->t, bias, r->segment, NULL, s);
    free(bias);
}

static double largest(const double *x, size_t n) {
    double max = 0;
    for (size_t i = 0; i < n; i++) max = fmax(max, fabs(x[i]));
    return max;
}

static void check_routing(dpl_route_rule rule, size_t t, bool bias, bool padding) {
    routing r;
    routing_open(&r, rule, t, bias, padding);
    oracle_router o;
    oracle_routing s;
    judge(&r, &o, &s);
    oracle_route_backward(&o, (int)t, &s);
    const size_t n = t * rule.n_experts, n_slots = t * rule.top_k;
    // exp is good to 2 ulp; sums of E (softmax) and K terms.
    const double unit = ldexp(1, -24),
                 terms = 16 + sqrt((double)rule.n_experts) + (double)rule.top_k;
    for (size_t l = 0; l < DPL_COUNT(levels); l++) {
        dpl_ctx *ctx = open_ctx(levels[l], 2, false);
        if (!ctx) continue;
        route(ctx, &r);
        assert_int_equal(r.bad_row, -1);
        for (size_t i = 0; i < n_slots; i++) {
            assert_int_equal(r.ids[i], s.ids[i]);
            assert_near(r.weights[i], s.weights[i], unit * terms * fabs(s.weights[i]));
        }
        const double size = fmax(largest(s.dlogits, n), 1e-3);
        for (size_t i = 0; i < n; i++)
            assert_near(r.dlogits[i], s.dlogits[i], 4 * unit * terms * size);
        check_canary(r.score, n, sizeof(float));
        check_canary(r.dlogits, n, sizeof(float));
        check_canary(r.weights, n_slots, sizeof(float));
        check_canary(r.ids, n_slots, sizeof(int32_t));
        dpl_ctx_close(&ctx);
    }
    oracle_routing_close(&s);
    routing_close(&r);
}

static dpl_route_rule sigmoid_rule(size_t n_experts, size_t top_k) {
    return (dpl_route_rule){n_experts, top_k, 1, 1, true, true, true, 1};
}

static void test_rules(void **state) {
    (void)state;
    print_message("seed %d\n", SEED);
    static const dpl_route_rule rules[] = {
        {8, 2, 1, 1, true, true, true, 2.5f},      {1, 1, 1, 1, true, true, true, 1},
        {64, 6, 8, 3, true, true, true, 2.5f},     {64, 6, 8, 3, true, true, false, 1.5f},
        {60, 4, 1, 1, false, false, false, 1},     {128, 8, 1, 1, false, false, true, 1},
        {64, 6, 8, 3, false, false, false, 16},    {257, 10, 1, 1, true, true, true, 1},
        {24, 24, 4, 4, true, true, true, 1},       {6, 2, 6, 3, true, true, true, 1},
        {1024, 12, 16, 4, true, true, true, 2.5f}, {12, 3, 4, 1, false, true, false, 1},
    };
    for (size_t i = 0; i < DPL_COUNT(rules); i++) {
        const size_t t = rules[i].n_experts > 256 ? 9 : 77;
        check_routing(rules[i], t, false, false);
        check_routing(rules[i], t, true, true);
        check_routing(rules[i], 1, true, false);
        check_routing(rules[i], 0, true, true);
    }
}

// The gradient along a random direction, measured on the weights of unchanged ids.
static void test_route_differences(void **state) {
    (void)state;
    static const dpl_route_rule rules[] = {{16, 4, 4, 2, true, true, true, 2.5f},
                                           {16, 4, 1, 1, true, true, false, 1},
                                           {16, 4, 1, 1, false, false, true, 1},
                                           {16, 4, 1, 1, false, false, false, 2}};
    dpl_ctx *ctx = open_ctx("ref", 1, false);
    for (size_t i = 0; i < DPL_COUNT(rules); i++) {
        routing r;
        routing_open(&r, rules[i], 1, true, false);
        route(ctx, &r);
        double slope = 0, measured = 0;
        const float step = 1.0f / 1024;
        for (int sign = 1; sign >= -1; sign -= 2) {
            for (size_t e = 0; e < 16; e++) {
                const float d = (float)dpl_rng_normal(SEED, 50, e);
                r.logits[e] += d * step * (float)(sign == 1 ? 1 : -2);
                if (sign == 1) slope += d * r.dlogits[e];
            }
            int32_t before[4];
            memcpy(before, r.ids, sizeof before);
            dpl_route_forward(ctx, &r.rule, r.logits, r.bias, NULL, 1, r.score, r.ids, r.weights,
                              &r.bad_row);
            assert_memory_equal(before, r.ids, sizeof before);
            for (size_t k = 0; k < 4; k++)
                measured += (float)sign * r.weights[k] * r.dweights[k] / (2 * step);
        }
        assert_near(slope, measured, 1e-3 * fabs(measured) + 1e-3);
        routing_close(&r);
    }
    dpl_ctx_close(&ctx);
}

// One row of given logits and bias through the rule.
static void route_one(const dpl_route_rule *rule, const float *logits, const float *bias,
                      int32_t *ids, float *weights) {
    for (size_t l = 0; l < DPL_COUNT(levels); l++) {
        dpl_ctx *ctx = open_ctx(levels[l], 1, false);
        if (!ctx) continue;
        float score[1024];
        int32_t bad_row, before[1024];
        memcpy(before, ids, rule->top_k * sizeof *ids);
        dpl_route_forward(ctx, rule, logits, bias, NULL, 1, score, ids, weights, &bad_row);
        assert_int_equal(bad_row, -1);
        if (l > 0) assert_memory_equal(before, ids, rule->top_k * sizeof *ids);
        dpl_ctx_close(&ctx);
    }
}

static float logit(double p) {
    return (float)log(p / (1 - p));
}

static void test_known_choices(void **state) {
    (void)state;
    int32_t ids[16];
    float weights[16], logits[512];
    dpl_route_rule rule = sigmoid_rule(512, 10);
    for (size_t e = 0; e < 512; e++) logits[e] = (float)e / 64; // ids above 255
    route_one(&rule, logits, NULL, ids, weights);
    for (int k = 0; k < 10; k++) assert_int_equal(ids[k], 511 - k);

    rule = sigmoid_rule(8, 2); // any id, however small K is
    for (size_t e = 0; e < 8; e++) logits[e] = e == 7 ? 1.0f : 0;
    route_one(&rule, logits, NULL, ids, weights);
    assert_int_equal(ids[0], 7);
    assert_int_equal(ids[1], 0);

    // The bias is not rounded to bf16, where both of these are 1.
    const float bias2[] = {1.0f, 1.001f};
    rule = sigmoid_rule(2, 1);
    memset(logits, 0, sizeof logits);
    route_one(&rule, logits, bias2, ids, weights);
    assert_int_equal(ids[0], 1);

    // The weight comes from the score, not from (score + bias) - bias.
    const float bias4[] = {12, 12, 12, 12};
    for (int e = 0; e < 4; e++) logits[e] = -18;
    rule = sigmoid_rule(4, 2);
    rule.scale = 2.5f;
    route_one(&rule, logits, bias4, ids, weights);
    for (int k = 0; k < 2; k++) assert_near(weights[k], 1.25, 1e-6);
    for (int k = 0; k < 2; k++) assert_int_equal(ids[k], k);

    // Each token is normalized alone, then scaled.
    rule.n_experts = 2;
    const double scores[2][2] = {{.2, .6}, {.9, .3}};
    for (int t = 0; t < 2; t++) {
        for (int e = 0; e < 2; e++) logits[e] = logit(scores[t][e]);
        route_one(&rule, logits, NULL, ids, weights);
        assert_int_equal(ids[0], t == 0);
        assert_near(weights[0], 1.875, 1e-5);
        assert_near(weights[1], 0.625, 1e-5);
    }
}

static void test_known_groups(void **state) {
    (void)state;
    int32_t ids[4];
    float weights[4], logits[8];
    // The two best of a group count, whatever K / top_groups is.
    dpl_route_rule rule = {8, 4, 2, 1, true, true, true, 1};
    const double pairs[] = {.9, .9, .1, .1, .7, .7, .7, .7};
    for (int e = 0; e < 8; e++) logits[e] = logit(pairs[e]);
    route_one(&rule, logits, NULL, ids, weights);
    for (int k = 0; k < 4; k++) assert_int_equal(ids[k], k);
    // The best alone (DeepSeek-V2) decides otherwise.
    const double single[] = {.9, .1, .1, .1, .7, .7, .7, .7};
    for (int e = 0; e < 8; e++) logits[e] = logit(single[e]);
    route_one(&rule, logits, NULL, ids, weights);
    assert_int_equal(ids[0], 4);
    rule.group_top2 = false;
    route_one(&rule, logits, NULL, ids, weights);
    assert_int_equal(ids[0], 0);
    // Equal groups: the lower one. An excluded group never comes back, even with negative choices.
    const float bias[] = {-5, -5, -5, -5, -9, -9, -9, -9};
    memset(logits, 0, sizeof logits);
    route_one(&rule, logits, NULL, ids, weights);
    for (int k = 0; k < 4; k++) assert_int_equal(ids[k], k);
    route_one(&rule, logits, bias, ids, weights);
    for (int k = 0; k < 4; k++) assert_int_equal(ids[k], k);
}

static void test_ties(void **state) {
    (void)state;
    for (int n_threads = 1; n_threads <= 8; n_threads = n_threads * 2 + 1) {
        dpl_ctx *ctx = open_ctx("avx2", n_threads, false);
        if (!ctx) skip();
        routing r;
        for (int softmax = 0; softmax < 2; softmax++) {
            dpl_route_rule rule = sigmoid_rule(128, 6);
            rule.sigmoid = !softmax;
            routing_open(&r, rule, 256, false, false);
            memset(r.logits, 0, 256 * 128 * sizeof(float));
            route(ctx, &r);
            for (size_t i = 0; i < 256 * 6; i++) assert_int_equal(r.ids[i], i % 6);
            routing_close(&r);
        }
        dpl_ctx_close(&ctx);
    }
}

static void test_bad_logits(void **state) {
    (void)state;
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (size_t l = 0; l < DPL_COUNT(levels); l++) {
        dpl_ctx *ctx = open_ctx(levels[l], 3, false);
        if (!ctx) continue;
        for (size_t i = 0; i < 6; i++) {
            routing r;
            dpl_route_rule rule = sigmoid_rule(128, 8);
            rule.sigmoid = i < 3;
            routing_open(&r, rule, 300, true, true);
            for (size_t t = 0; t < 300; t++) r.segment[t] = t != 3;
            // Whole rows and a single logit; padding row 3 is not looked at.
            for (size_t e = 0; e < 128; e++)
                r.logits[200 * 128 + e] = r.logits[3 * 128 + e] = bad[i % 3];
            r.logits[77 * 128 + 127] = bad[i % 3];
            route(ctx, &r);
            assert_int_equal(r.bad_row, 77);
            for (size_t k = 0; k < 8; k++) {
                assert_int_equal(r.ids[77 * 8 + k], k);
                assert_int_equal(r.ids[200 * 8 + k], k);
                assert_int_equal(r.ids[3 * 8 + k], -1);
                assert_true(r.weights[77 * 8 + k] == 0 && r.weights[200 * 8 + k] == 0);
            }
            for (size_t n = 0; n < 300 * 128; n++)
                assert_true(isfinite(r.score[n]) && isfinite(r.dlogits[n]));
            r.bias[5] = bad[i % 3]; // spoils every row that is routed
            route(ctx, &r);
            assert_int_equal(r.bad_row, 0);
            routing_close(&r);
        }
        dpl_ctx_close(&ctx);
    }
}

/* ---- auxiliary losses ---- */

static void check_aux(dpl_route_rule rule, dpl_balance_kind kind, size_t b, size_t s,
                      bool padding) {
    routing r;
    routing_open(&r, rule, b * s, true, padding);
    for (size_t i = 0; padding && b > 1 && i < s; i++) r.segment[i] = 0; // a sequence of padding
    oracle_router o;
    oracle_routing judged;
    judge(&r, &o, &judged);
    const oracle_config c = {.router = o,
                             .balance_weight = 0.5,
                             .router_z_weight = 0.25,
                             .balance_batch = kind == DPL_BALANCE_BATCH,
                             .balance_megatron = kind == DPL_BALANCE_MEGATRON};
    const size_t n = b * s * rule.n_experts;
    memset(judged.dweights, 0, b * s * rule.top_k * sizeof(double));
    const double balance = oracle_balance_loss(&c, 1, (int)b, (int)s, r.segment, &judged);
    const double z = oracle_router_z_loss(&c, 1, (int)(b * s), r.segment, &judged);
    oracle_route_backward(&o, (int)(b * s), &judged);
    const double size = largest(judged.dlogits, n);
    for (size_t l = 0; l < DPL_COUNT(levels); l++) {
        dpl_ctx *ctx = open_ctx(levels[l], 2, false);
        if (!ctx) continue;
        route(ctx, &r);
        const dpl_aux aux = {kind, 0.5f, 0.25f, 3, b, s};
        double values[2] = {NAN, NAN};
        for (size_t i = 0; i < n; i++) r.dlogits[i] = 1;
        dpl_aux_losses(ctx, &rule, &aux, r.logits, r.score, r.ids, values, r.dlogits);
        assert_near(values[0], balance, 2e-6 * balance);
        assert_near(values[1], z, 2e-6 * z);
        for (size_t i = 0; i < n; i++)
            assert_near(r.dlogits[i], 1 + 3 * judged.dlogits[i], 1e-5 * size + ldexp(1, -23));
        double again[2];
        dpl_aux_losses(ctx, &rule, &aux, r.logits, r.score, r.ids, again, NULL);
        assert_memory_equal(values, again, sizeof values);
        dpl_ctx_close(&ctx);
    }
    oracle_routing_close(&judged);
    routing_close(&r);
}

static void test_aux(void **state) {
    (void)state;
    const dpl_route_rule rules[] = {{16, 4, 4, 2, true, true, true, 2.5f},
                                    {9, 2, 1, 1, false, false, false, 1},
                                    {1, 1, 1, 1, true, true, true, 1}};
    for (size_t i = 0; i < DPL_COUNT(rules); i++)
        for (int kind = DPL_BALANCE_SEQUENCE; kind <= DPL_BALANCE_MEGATRON; kind++)
            for (int padding = 0; padding < 2; padding++) {
                check_aux(rules[i], (dpl_balance_kind)kind, 3, 7, padding);
                check_aux(rules[i], (dpl_balance_kind)kind, 2, 300, padding);
                check_aux(rules[i], (dpl_balance_kind)kind, 1, 1, false);
            }
}

// Rows first .. end-1 as a call of its own.
typedef struct part {
    size_t first, end;
    double *own;
} part;

static void check_parts(const routing *r, dpl_ctx *ctx, const size_t *ends, size_t n_parts) {
    const size_t n = r->rule.n_experts, n_sums = dpl_aux_n_sums(n);
    dpl_aux aux = {DPL_BALANCE_BATCH, 0.5f, 0.25f, 3, 1, r->t};
    double want[2], values[2] = {0, 0}, *all = calloc(n_sums, sizeof *all);
    float *want_dlogits = calloc(r->t * n + 1, sizeof *want_dlogits);
    part parts[8];
    dpl_aux_losses(ctx, &r->rule, &aux, r->logits, r->score, r->ids, want, want_dlogits);
    for (size_t i = 0; i < n_parts; i++) {
        part *p = &parts[i];
        *p = (part){i ? ends[i - 1] : 0, ends[i], output(n_sums, sizeof(double))};
        aux.n_seq = p->end - p->first;
        dpl_aux_sums(ctx, &r->rule, &aux, r->logits + p->first * n, r->score + p->first * n,
                     r->ids + p->first * r->rule.top_k, p->own);
        dpl_ctx_wait(ctx);
        check_canary(p->own, n_sums, sizeof(double));
        for (size_t j = 0; j < n_sums; j++) all[j] += p->own[j];
    }
    float *got = calloc(r->t * n + 1, sizeof *got);
    for (size_t i = 0; i < n_parts; i++) {
        const part *p = &parts[i];
        double mine[2];
        aux.n_seq = p->end - p->first;
        dpl_aux_part(&r->rule, &aux, p->own, all, mine);
        values[0] += mine[0], values[1] += mine[1];
        dpl_aux_gradient(ctx, &r->rule, &aux, r->logits + p->first * n, r->score + p->first * n,
                         r->ids + p->first * r->rule.top_k, all, got + p->first * n);
    }
    dpl_ctx_wait(ctx);
    // The sums are fp64 of the same fp32 terms, in another order.
    for (int i = 0; i < 2; i++) assert_near(values[i], want[i], 1e-13 * fabs(want[i]));
    for (size_t i = 0; i < r->t * n; i++)
        assert_near(got[i], want_dlogits[i], 4e-7 * fabs((double)want_dlogits[i]) + 1e-12);
    for (size_t i = 0; i < n_parts; i++) free(parts[i].own);
    free(all), free(want_dlogits), free(got);
}

// The losses of a batch are those of its parts together, whose rows may be few, none, or padding.
static void test_aux_parts(void **state) {
    (void)state;
    static const dpl_route_rule rules[] = {{16, 4, 4, 2, true, true, true, 2.5f},
                                           {9, 2, 1, 1, false, false, false, 1}};
    static const size_t ends[][4] = {{700}, {350, 700}, {1, 400, 700}, {128, 128, 300, 700}};
    for (size_t i = 0; i < DPL_COUNT(rules); i++)
        for (int deferred = 0; deferred < 2; deferred++)
            for (size_t l = 0; l < DPL_COUNT(levels); l++) {
                dpl_ctx *ctx = open_ctx(levels[l], 2, deferred);
                if (!ctx) continue;
                routing r;
                routing_open(&r, rules[i], 700, true, true);
                for (int t = 128; t < 300; t++) r.segment[t] = 0;
                route(ctx, &r);
                for (size_t n = 1; n <= 4; n++) check_parts(&r, ctx, ends[n - 1], n);
                for (int t = 0; t < 700 * (int)rules[i].top_k; t++) r.ids[t] = -1;
                check_parts(&r, ctx, ends[3], 4); // padding alone has no loss
                routing_close(&r);
                dpl_ctx_close(&ctx);
            }
}

static void test_aux_known(void **state) {
    (void)state;
    dpl_ctx *ctx = open_ctx("ref", 2, false);
    // Perfect balance gives the weight itself.
    const dpl_route_rule rule = sigmoid_rule(4, 2);
    const float score[16] = {.5f, .5f, .5f, .5f, .5f, .5f, .5f, .5f,
                             .5f, .5f, .5f, .5f, .5f, .5f, .5f, .5f};
    const float logits[16] = {0};
    const int32_t balanced[8] = {0, 1, 2, 3, 0, 1, 2, 3};
    double values[2];
    dpl_aux aux = {DPL_BALANCE_SEQUENCE, 1, 1, 1, 1, 4};
    dpl_aux_losses(ctx, &rule, &aux, logits, score, balanced, values, NULL);
    assert_near(values[0], 1, 1e-7);
    assert_near(values[1], log(4) * log(4), 1e-6);
    aux.balance_weight = aux.z_weight = 0;
    float dlogits[16] = {0};
    dpl_aux_losses(ctx, &rule, &aux, logits, score, balanced, values, dlogits);
    assert_true(values[0] == 0 && values[1] == 0);
    for (int i = 0; i < 16; i++) assert_true(dlogits[i] == 0);

    // Padding changes nothing, not even a bit; a batch of padding alone has no loss.
    routing r;
    routing_open(&r, sigmoid_rule(8, 2), 8, false, true);
    for (int i = 0; i < 8; i++) r.segment[i] = i < 5;
    route(ctx, &r);
    double padded[2];
    for (int kind = DPL_BALANCE_SEQUENCE; kind <= DPL_BALANCE_MEGATRON; kind++) {
        aux = (dpl_aux){(dpl_balance_kind)kind, 0.01f, 0.001f, 1, 1, 5};
        dpl_aux_losses(ctx, &r.rule, &aux, r.logits, r.score, r.ids, values, NULL);
        aux.n_seq = 8;
        dpl_aux_losses(ctx, &r.rule, &aux, r.logits, r.score, r.ids, padded, NULL);
        assert_memory_equal(values, padded, sizeof values);
        assert_true(values[0] > 0 && values[1] > 0);
        for (int i = 0; i < 16; i++) r.ids[i] = kind == DPL_BALANCE_MEGATRON ? -1 : r.ids[i];
    }
    dpl_aux_losses(ctx, &r.rule, &aux, r.logits, r.score, r.ids, values, r.dlogits);
    assert_true(values[0] == 0 && values[1] == 0);
    aux.n_batch = 0;
    dpl_aux_losses(ctx, &r.rule, &aux, r.logits, r.score, r.ids, values, r.dlogits);
    assert_true(values[0] == 0 && values[1] == 0);
    routing_close(&r);
    dpl_ctx_close(&ctx);
}

/* ---- permute, gather, combine ---- */

typedef struct sorted {
    size_t n_slots, n_experts;
    int32_t *ids;
    int64_t *offsets;
    int32_t *slot_row, *row_slot;
} sorted;

// kind 0: random with skipped slots, 1: one expert, 2: all skipped, 3: random
static void sorted_open(sorted *s, size_t n_slots, size_t n_experts, int kind) {
    *s = (sorted){n_slots,
                  n_experts,
                  output(n_slots, 4),
                  output(n_experts + 1, 8),
                  output(n_slots, 4),
                  output(n_slots, 4)};
    for (size_t i = 0; i < n_slots; i++) {
        const uint64_t x = dpl_rng_u64(SEED, 6, i);
        s->ids[i] = (int32_t)(x % n_experts);
        if (kind == 1) s->ids[i] = (int32_t)n_experts - 1;
        if (kind == 2 || (kind == 0 && x % 5 == 0)) s->ids[i] = -1;
    }
}

static void sorted_close(sorted *s) {
    free(s->ids), free(s->offsets), free(s->slot_row), free(s->row_slot);
}

static void permute(dpl_ctx *ctx, sorted *s) {
    dpl_permute(ctx, s->ids, s->n_slots, s->n_experts, s->offsets, s->slot_row, s->row_slot);
    dpl_ctx_wait(ctx);
}

static void check_sorted(const sorted *s) {
    int64_t row = 0;
    for (size_t e = 0; e < s->n_experts; e++) {
        assert_int_equal(s->offsets[e], row);
        for (size_t slot = 0; slot < s->n_slots; slot++) {
            if (s->ids[slot] != (int32_t)e) continue;
            assert_int_equal(s->slot_row[slot], row);
            assert_int_equal(s->row_slot[row], slot);
            row++;
        }
    }
    assert_int_equal(s->offsets[s->n_experts], row);
    for (size_t slot = 0; slot < s->n_slots; slot++)
        if (s->ids[slot] < 0) assert_int_equal(s->slot_row[slot], -1);
    for (size_t r = (size_t)row; r < s->n_slots; r++) assert_int_equal(s->row_slot[r], -1);
    check_canary(s->offsets, s->n_experts + 1, 8);
    check_canary(s->slot_row, s->n_slots, 4);
    check_canary(s->row_slot, s->n_slots, 4);
}

static void test_permute(void **state) {
    (void)state;
    static const size_t sizes[][2] = {{0, 4}, {1, 1}, {8, 4}, {1000, 300}, {50001, 7}, {16384, 3}};
    for (int n_threads = 1; n_threads <= 8; n_threads += n_threads == 3 ? 5 : 1) {
        dpl_ctx *ctx = open_ctx("ref", n_threads, false);
        for (size_t i = 0; i < DPL_COUNT(sizes); i++)
            for (int kind = 0; kind < 4; kind++) {
                sorted s;
                sorted_open(&s, sizes[i][0], sizes[i][1], kind);
                permute(ctx, &s);
                check_sorted(&s);
                sorted_close(&s);
            }
        dpl_ctx_close(&ctx);
    }
}

static double get(dpl_mat m, size_t row, size_t col) {
    const void *x = dpl_mat_at(m, row, col).p;
    return m.dtype == DPL_F32 ? *(const float *)x : dpl_bf16_to_f32(*(const uint16_t *)x);
}

static dpl_mat random_mat(uint64_t stream, size_t rows, size_t d, dpl_dtype dtype) {
    const dpl_mat m = {output(rows * (d + 5), dpl_dtype_bytes(dtype)), d + 5, dtype};
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < d; c++) {
            const float x = (float)dpl_rng_normal(SEED, stream, r * d + c);
            if (dtype == DPL_F32) *(float *)dpl_mat_at(m, r, c).p = x;
            else *(uint16_t *)dpl_mat_at(m, r, c).p = dpl_f32_to_bf16(x);
        }
    return m;
}

static void check_gaps(dpl_mat m, size_t rows, size_t d) {
    const size_t size = dpl_dtype_bytes(m.dtype);
    for (size_t r = 0; r < rows; r++) assert_true(all_ones(dpl_mat_at(m, r, d).p, 5 * size));
    check_canary(m.p, rows * (d + 5), size);
}

static float rounded(float x, dpl_dtype dtype) {
    return dtype == DPL_F32 ? x : dpl_bf16_to_f32(dpl_f32_to_bf16(x));
}

static void check_gather(dpl_ctx *ctx, const sorted *s, size_t top_k, size_t d, dpl_dtype from,
                         dpl_dtype to) {
    const size_t n_tokens = s->n_slots / top_k;
    const dpl_mat x = random_mat(7, n_tokens, d, from),
                  rows = {output(s->n_slots * (d + 5), to ? 2 : 4), d + 5, to};
    float *weights = normals(8, s->n_slots, 1), *row_weight = output(s->n_slots, 4);
    dpl_gather_rows(ctx, x, weights, s->row_slot, top_k, s->n_slots, d, rows, row_weight);
    for (size_t r = 0; r < s->n_slots; r++) {
        const int32_t slot = s->row_slot[r]; // rows beyond the last are zero
        assert_true(row_weight[r] == (slot < 0 ? 0 : weights[slot]));
        for (size_t c = 0; c < d; c++) {
            const float want = slot < 0 ? 0 : (float)get(x, (size_t)slot / top_k, c);
            assert_true((float)get(rows, r, c) == rounded(want, to));
        }
    }
    check_gaps(rows, s->n_slots, d);
    check_canary(row_weight, s->n_slots, 4);
    dpl_gather_rows(ctx, x, NULL, s->row_slot, top_k, s->n_slots, d, rows, NULL);
    free(x.p), free(rows.p), free(weights), free(row_weight);
}

static void check_combine(dpl_ctx *ctx, const sorted *s, size_t top_k, size_t d, dpl_dtype from,
                          dpl_dtype to, bool accumulate) {
    const size_t n_tokens = s->n_slots / top_k, n_rows = (size_t)s->offsets[s->n_experts];
    // Rows that no slot names stay NaN: they are never read.
    const dpl_mat rows = random_mat(9, n_rows, d, from), before = random_mat(10, n_tokens, d, to);
    dpl_mat y = {output(n_tokens * (d + 5), to ? 2 : 4), d + 5, to};
    if (accumulate) memcpy(y.p, before.p, n_tokens * (d + 5) * (to ? 2 : 4));
    float *value = normals(11, n_rows, 1), *slot_value = output(s->n_slots, 4);
    dpl_combine_rows(ctx, rows, value, s->slot_row, n_tokens, top_k, d, accumulate, y, slot_value);
    for (size_t t = 0; t < n_tokens; t++)
        for (size_t c = 0; c < d; c++) {
            float sum = 0;
            for (size_t k = 0; k < top_k; k++) {
                const int32_t row = s->slot_row[t * top_k + k];
                if (row >= 0) sum += (float)get(rows, (size_t)row, c);
            }
            if (accumulate) sum += (float)get(before, t, c);
            assert_true((float)get(y, t, c) == rounded(sum, to));
        }
    for (size_t i = 0; i < s->n_slots; i++)
        assert_true(slot_value[i] == (s->slot_row[i] < 0 ? 0 : value[s->slot_row[i]]));
    check_gaps(y, n_tokens, d);
    check_canary(slot_value, s->n_slots, 4);
    free(rows.p), free(before.p), free(y.p), free(value), free(slot_value);
}

static void test_rows(void **state) {
    (void)state;
    static const size_t shapes[][3] = {
        {12, 2, 5}, {64, 1, 1}, {90, 6, 1027}, {80, 8, 2048}, {0, 2, 3}};
    for (size_t l = 0; l < DPL_COUNT(levels); l++) {
        dpl_ctx *ctx = open_ctx(levels[l], 2, false);
        if (!ctx) continue;
        for (size_t i = 0; i < DPL_COUNT(shapes); i++)
            for (int kind = 0; kind < 3; kind++) {
                sorted s;
                sorted_open(&s, shapes[i][0], 5, kind);
                permute(ctx, &s);
                for (int dtypes = 0; dtypes < 4; dtypes++) {
                    const dpl_dtype from = (dpl_dtype)(dtypes % 2), to = (dpl_dtype)(dtypes / 2);
                    check_gather(ctx, &s, shapes[i][1], shapes[i][2], from, to);
                    check_combine(ctx, &s, shapes[i][1], shapes[i][2], from, to, false);
                    if (to == DPL_F32)
                        check_combine(ctx, &s, shapes[i][1], shapes[i][2], from, to, true);
                }
                sorted_close(&s);
            }
        dpl_ctx_close(&ctx);
    }
}

static void test_known_rows(void **state) {
    (void)state;
    dpl_ctx *ctx = open_ctx("ref", 2, false);
    // Skipped slots, an expert named twice by one token: there and back gives x times its slots.
    const int32_t cases[2][8] = {{0, -1, -1, -1, 3, 1, 2, 0}, {1, 1, 0, 3, 2, 2, -1, 1}};
    for (int i = 0; i < 2; i++) {
        int64_t offsets[5];
        int32_t slot_row[8], row_slot[8];
        float x[4], rows[8], y[4];
        for (int t = 0; t < 4; t++) x[t] = (float)(1 << t);
        dpl_permute(ctx, cases[i], 8, 4, offsets, slot_row, row_slot);
        dpl_gather_rows(ctx, dpl_mat_f32(x, 1), NULL, row_slot, 2, 8, 1, dpl_mat_f32(rows, 1),
                        NULL);
        dpl_combine_rows(ctx, dpl_mat_f32(rows, 1), NULL, slot_row, 4, 2, 1, false,
                         dpl_mat_f32(y, 1), NULL);
        for (int t = 0; t < 4; t++) {
            const int n = (cases[i][2 * t] >= 0) + (cases[i][2 * t + 1] >= 0);
            assert_true(y[t] == (float)n * x[t]);
        }
    }
    // The sum is fp32 with one rounding: 1 + 7 * 2^-9 is not 1 in bf16.
    uint16_t parts[8], sum;
    int32_t slot_row[8];
    for (int k = 0; k < 8; k++) {
        parts[k] = dpl_f32_to_bf16(k == 0 ? 1 : ldexpf(1, -9));
        slot_row[k] = k;
    }
    dpl_combine_rows(ctx, (dpl_mat){parts, 1, DPL_BF16}, NULL, slot_row, 1, 8, 1, false,
                     (dpl_mat){&sum, 1, DPL_BF16}, NULL);
    assert_true(dpl_bf16_to_f32(sum) == 1.015625f);
    dpl_ctx_close(&ctx);
}

// Elements beyond 2^31: the offset of a row is 64 bits wide.
static void test_far_rows(void **state) {
    (void)state;
    const size_t n_rows = 299600, d = 7168, bytes = n_rows * d * 2;
    uint16_t *x = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (x == MAP_FAILED) {
        print_message("skipped: no address space for %zu bytes\n", bytes);
        skip();
    }
    for (size_t c = 0; c < d; c++) x[(n_rows - 1) * d + c] = (uint16_t)(c + 1);
    dpl_ctx *ctx = open_ctx("ref", 2, false);
    const dpl_mat far = {x, d, DPL_BF16};
    const dpl_mat near = {output(2 * d, 2), d, DPL_BF16};
    const int32_t rows[] = {0, (int32_t)n_rows - 1};
    for (int combine = 0; combine < 2; combine++) {
        if (combine) dpl_combine_rows(ctx, far, NULL, rows, 2, 1, d, false, near, NULL);
        else dpl_gather_rows(ctx, far, NULL, rows, 1, 2, d, near, NULL);
        for (size_t c = 0; c < d; c++) {
            assert_int_equal(((uint16_t *)near.p)[c], 0);
            assert_int_equal(((uint16_t *)near.p)[d + c], c + 1);
        }
    }
    dpl_ctx_close(&ctx);
    free(near.p);
    munmap(x, bytes);
}

/* ---- bits ---- */

// Everything once; returns a hash of all results.
static uint64_t hash_all(dpl_ctx *ctx) {
    routing r;
    routing_open(&r, (dpl_route_rule){64, 6, 8, 3, true, true, true, 2.5f}, 1200, true, true);
    route(ctx, &r);
    uint64_t hash = 0;
    for (int kind = DPL_BALANCE_SEQUENCE; kind <= DPL_BALANCE_MEGATRON; kind++) {
        const dpl_aux aux = {(dpl_balance_kind)kind, 0.1f, 0.2f, 1, 2, 600};
        double values[2];
        dpl_aux_losses(ctx, &r.rule, &aux, r.logits, r.score, r.ids, values, r.dlogits);
        dpl_ctx_wait(ctx);
        hash = dpl_hash64(values, sizeof values, hash);
    }
    hash = dpl_hash64(r.score, 1200 * 64 * 4, hash);
    hash = dpl_hash64(r.dlogits, 1200 * 64 * 4, hash);
    hash = dpl_hash64(r.weights, 1200 * 6 * 4, hash);
    hash = dpl_hash64(r.ids, 1200 * 6 * 4, hash);
    routing_close(&r);
    sorted s;
    sorted_open(&s, 60000, 40, 0);
    permute(ctx, &s);
    hash = dpl_hash64(s.row_slot, 60000 * 4, hash);
    const size_t n_rows = (size_t)s.offsets[40];
    const dpl_mat rows = random_mat(12, n_rows, 3, DPL_BF16),
                  y = {output(20000 * 8, 4), 8, DPL_F32};
    dpl_combine_rows(ctx, rows, NULL, s.slot_row, 20000, 3, 3, false, y, NULL);
    dpl_ctx_wait(ctx);
    hash = dpl_hash64(y.p, 20000 * 8 * 4, hash);
    free(rows.p), free(y.p);
    sorted_close(&s);
    return hash;
}

static void test_threads(void **state) {
    (void)state;
    for (size_t l = 0; l < DPL_COUNT(levels); l++) {
        uint64_t first = 0;
        static const int n_threads[] = {1, 2, 3, 8, 2};
        for (size_t i = 0; i < DPL_COUNT(n_threads); i++) {
            dpl_ctx *ctx = open_ctx(levels[l], n_threads[i], i == 4); // the last one defers
            if (!ctx) break;
            const size_t mark = dpl_ctx_mark(ctx);
            const uint64_t hash = hash_all(ctx);
            if (i == 0) first = hash;
            assert_true(hash == first);
            assert_int_equal(dpl_ctx_mark(ctx), mark); // temporaries are given back
            dpl_ctx_close(&ctx);
        }
    }
}

// A row's choice and weights do not depend on the rows around it.
static void test_row_alone(void **state) {
    (void)state;
    dpl_ctx *ctx = open_ctx("ref", 2, false);
    routing all, one;
    const dpl_route_rule rule = {64, 6, 8, 3, true, true, true, 2.5f};
    routing_open(&all, rule, 100, true, false);
    routing_open(&one, rule, 1, true, false);
    route(ctx, &all);
    for (size_t t = 0; t < 100; t++) {
        memcpy(one.logits, all.logits + t * 64, 64 * sizeof(float));
        memcpy(one.dweights, all.dweights + t * 6, 6 * sizeof(float));
        route(ctx, &one);
        assert_memory_equal(one.ids, all.ids + t * 6, 6 * sizeof(int32_t));
        assert_memory_equal(one.weights, all.weights + t * 6, 6 * sizeof(float));
        assert_memory_equal(one.dlogits, all.dlogits + t * 64, 64 * sizeof(float));
    }
    routing_close(&all);
    routing_close(&one);
    dpl_ctx_close(&ctx);
}

// Nothing has run before somebody waits, and what will be written is poisoned till then.
static void test_deferred(void **state) {
    (void)state;
    dpl_ctx *ctx = open_ctx("ref", 2, true);
    sorted s;
    sorted_open(&s, 600, 9, 0);
    const size_t mark = dpl_ctx_mark(ctx);
    int64_t *offsets = dpl_ctx_alloc(ctx, 10 * sizeof *offsets);
    int32_t *slot_row = dpl_ctx_alloc(ctx, 600 * 4), *row_slot = dpl_ctx_alloc(ctx, 600 * 4);
    float *x = dpl_ctx_alloc(ctx, 300 * 4), *rows = dpl_ctx_alloc(ctx, 600 * 4);
    float *y = dpl_ctx_alloc(ctx, 300 * 4);
    for (int i = 0; i < 300; i++) x[i] = (float)i;
    memset(offsets, 0, 80), memset(rows, 0, 2400), memset(y, 0, 1200);
    dpl_permute(ctx, s.ids, 600, 9, offsets, slot_row, row_slot);
    dpl_gather_rows(ctx, dpl_mat_f32(x, 1), NULL, row_slot, 2, 600, 1, dpl_mat_f32(rows, 1), NULL);
    dpl_combine_rows(ctx, dpl_mat_f32(rows, 1), NULL, slot_row, 300, 2, 1, false, dpl_mat_f32(y, 1),
                     NULL);
    assert_true(all_ones(offsets, 80) && all_ones(slot_row, 2400) && all_ones(rows, 2400) &&
                all_ones(y, 1200));
    float back[300];
    dpl_ctx_read(ctx, back, y, sizeof back);
    for (int t = 0; t < 300; t++)
        assert_true(back[t] == (float)t * (float)((s.ids[2 * t] >= 0) + (s.ids[2 * t + 1] >= 0)));
    dpl_ctx_release(ctx, mark);
    sorted_close(&s);
    dpl_ctx_close(&ctx);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rules),         cmocka_unit_test(test_route_differences),
        cmocka_unit_test(test_known_choices), cmocka_unit_test(test_known_groups),
        cmocka_unit_test(test_ties),          cmocka_unit_test(test_bad_logits),
        cmocka_unit_test(test_aux),           cmocka_unit_test(test_aux_known),
        cmocka_unit_test(test_aux_parts),     cmocka_unit_test(test_permute),
        cmocka_unit_test(test_rows),          cmocka_unit_test(test_known_rows),
        cmocka_unit_test(test_far_rows),      cmocka_unit_test(test_threads),
        cmocka_unit_test(test_row_alone),     cmocka_unit_test(test_deferred),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
