/*
 * test_decode.c - generation: the decoder's logits are those of a whole pass at every position, in
 * whatever pieces the text is fed; sampling picks what its rules say.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "lab.h"
#include "modelkit.h"
#include "scratch.h"

enum { LENGTH = 300 }; // more than two of the decoder's blocks of 128

static oracle_config base_config(void) {
    oracle_config c = scene_small_config();
    c.V = 61;
    c.L = 3;
    c.n_shared = 1;
    c.attention_bias = false;
    c.rope_theta = 100;
    c.mtp_layers = 0;
    return c;
}

typedef struct text {
    scene s;
    kit k;
    float *logits; // (LENGTH, V) of a whole pass
} text;

static void open_text(const oracle_config *c, dpl_dtype dtype, int n_threads, text *t) {
    scene_open(c, 11, 1, LENGTH, false, &t->s);
    const dpl_model_config config = scene_config(c);
    assert_true(kit_open(&config, dtype, &t->s.params, n_threads, false, NULL, &t->k));
    t->logits = calloc((size_t)LENGTH * config.vocab, sizeof(float));
    const dpl_batch batch = scene_batch(&t->s);
    const dpl_loss_rule rule = scene_rule(c);
    check_ok(dpl_model_evaluate(t->k.model, &batch, &rule, t->logits, NULL));
}

static void close_text(text *t) {
    free(t->logits);
    kit_close(&t->k);
    scene_close(&t->s);
}

// Feeds the text in pieces of these sizes, the last size again and again; logits after each piece
// are compared with the whole pass. Returns the largest difference as a fraction of the largest
// logit. row_out: the last logits.
static double feed_pieces(text *t, const size_t *sizes, size_t n_sizes, float *row_out) {
    const size_t V = (size_t)t->s.cfg.V;
    dpl_decoder *d;
    double worst = 0, largest = 0;
    check_ok(dpl_decoder_open(t->k.model, LENGTH, &d));
    for (size_t i = 0, fed = 0; fed < LENGTH; i++) {
        const size_t n = DPL_MIN(sizes[DPL_MIN(i, n_sizes - 1)], LENGTH - fed);
        check_ok(dpl_decoder_feed(d, t->s.ids + fed, n, row_out));
        fed += n;
        const float *want = t->logits + (fed - 1) * V;
        for (size_t v = 0; v < V; v++) {
            worst = fmax(worst, fabs((double)row_out[v] - want[v]));
            largest = fmax(largest, fabs((double)want[v]));
            assert_true(isfinite(row_out[v]));
        }
    }
    dpl_decoder_close(&d);
    assert_null(d);
    assert_true(largest > 0.1);
    return worst / largest;
}

// One token at a time visits every position. The bits do not depend on the pieces.
static void check_all_pieces(const oracle_config *c, dpl_dtype dtype, double bound) {
    static const size_t one[] = {1}, whole[] = {LENGTH}, mixed[] = {5, 128, 1, 130, 2},
                        edges[] = {127, 1, 1, 128, 43};
    static const struct {
        const size_t *sizes;
        size_t n;
    } ways[] = {{one, 1}, {whole, 1}, {mixed, 5}, {edges, 5}};
    text t;
    open_text(c, dtype, 2, &t);
    const size_t bytes = (size_t)c->V * sizeof(float);
    float *first = malloc(bytes), *row = malloc(bytes);
    for (size_t i = 0; i < DPL_COUNT(ways); i++) {
        const double off = feed_pieces(&t, ways[i].sizes, ways[i].n, i ? row : first);
        print_message("  way %zu: off by %.2g of the largest logit\n", i, off);
        assert_true(off <= bound);
        if (i) assert_memory_equal(first, row, bytes);
    }
    free(first), free(row);
    close_text(&t);
}

// The order of summation differs where projections are absorbed, and nothing else.
static void logits_are_those_of_a_whole_pass(void **state) {
    (void)state;
    for (int variant = 0; variant < 7; variant++) {
        oracle_config c = base_config();
        if (variant == 1) c.q_lora = 0;
        if (variant == 2) c.attention_bias = true;
        if (variant == 3) {
            c.yarn.on = true, c.yarn.truncate = true, c.yarn.factor = 8;
            c.yarn.original_length = 64, c.yarn.beta_fast = 32, c.yarn.beta_slow = 1;
            c.yarn.mscale = 0.7, c.yarn.mscale_all_dim = 1.1;
        }
        if (variant == 4) c.tied = true;
        if (variant == 5) c.n_dense = 3, c.rope_interleave = false;
        if (variant == 6) c.n_dense = 0, c.q_lora = 0, c.attention_bias = true, c.mtp_layers = 1;
        print_message("variant %d\n", variant);
        check_all_pieces(&c, DPL_F32, 2e-5);
    }
}

// Every expert is chosen, so that a rounding cannot choose another one.
static void logits_of_a_bf16_model_are_near(void **state) {
    (void)state;
    oracle_config c = base_config();
    c.router = (oracle_router){.E = 4, .K = 4, .n_group = 1, .norm_topk = true, .scale = 1};
    check_all_pieces(&c, DPL_BF16, 8 * 0x1p-8);
}

static void two_decoders_do_not_meet(void **state) {
    (void)state;
    const oracle_config c = base_config();
    const size_t V = (size_t)c.V, n = 40;
    text t;
    open_text(&c, DPL_F32, 1, &t);
    float *alone = malloc(2 * n * V * sizeof(float)), *row = malloc(V * sizeof(float));
    dpl_decoder *d[2];
    const int32_t *ids[2] = {t.s.ids, t.s.ids + 150};
    for (size_t i = 0; i < 2; i++) {
        check_ok(dpl_decoder_open(t.k.model, n, &d[i]));
        for (size_t j = 0; j < n; j++)
            check_ok(dpl_decoder_feed(d[i], ids[i] + j, 1, alone + (i * n + j) * V));
        dpl_decoder_close(&d[i]);
    }
    assert_memory_not_equal(alone, alone + n * V, V * sizeof(float));
    for (size_t i = 0; i < 2; i++) check_ok(dpl_decoder_open(t.k.model, n, &d[i]));
    for (size_t j = 0; j < n; j++)
        for (size_t i = 0; i < 2; i++) {
            check_ok(dpl_decoder_feed(d[i], ids[i] + j, 1, row));
            assert_memory_equal(row, alone + (i * n + j) * V, V * sizeof(float));
        }
    for (size_t i = 0; i < 2; i++) dpl_decoder_close(&d[i]);
    free(alone), free(row);
    close_text(&t);
}

static void what_does_not_fit_is_refused(void **state) {
    (void)state;
    const oracle_config c = base_config();
    text t;
    open_text(&c, DPL_F32, 1, &t);
    dpl_model *m = t.k.model;
    dpl_decoder *d = NULL;
    check_error(dpl_decoder_open(m, 0, &d), DPL_EINVAL, "0 tokens", "max_position_embeddings");
    check_error(dpl_decoder_open(m, m->config.max_positions + 1, &d), DPL_EINVAL, "4097", "4096");
    assert_null(d);
    check_ok(dpl_decoder_open(m, 10, &d));
    float row[64], again[64];
    row[0] = 123;
    check_error(dpl_decoder_feed(d, t.s.ids, 11, row), DPL_EINVAL, "11 tokens after 0", "holds 10");
    check_error(dpl_decoder_feed(d, t.s.ids, 0, row), DPL_EINVAL, "no token", "");
    const int32_t bad[2] = {1, c.V}, negative[1] = {-1};
    check_error(dpl_decoder_feed(d, bad, 2, row), DPL_EINVAL, "token 1 is 61", "0 to 60");
    check_error(dpl_decoder_feed(d, negative, 1, row), DPL_EINVAL, "token 0 is -1", "0 to 60");
    assert_true(row[0] == 123);                      // nothing was written
    check_ok(dpl_decoder_feed(d, t.s.ids, 10, row)); // and nothing was fed
    check_error(dpl_decoder_feed(d, t.s.ids, 1, again), DPL_EINVAL, "1 tokens after 10",
                "holds 10");
    dpl_decoder_close(&d);
    check_ok(dpl_decoder_open(m, 10, &d));
    check_ok(dpl_decoder_feed(d, t.s.ids, 10, again));
    assert_memory_equal(row, again, (size_t)c.V * sizeof(float));
    dpl_decoder_close(&d);
    close_text(&t);
}

/* ---- sampling ---- */

// How often each id is drawn.
static void count_draws(const float *logits, size_t vocab, double temperature, double top_p,
                        uint64_t seed, int n, int *counts) {
    memset(counts, 0, vocab * sizeof *counts);
    for (int i = 0; i < n; i++) {
        const int32_t id = dpl_sample(logits, vocab, temperature, top_p, seed, (uint64_t)i);
        assert_in_range(id, 0, vocab - 1);
        counts[id]++;
    }
}

static void no_temperature_takes_the_largest(void **state) {
    (void)state;
    const float logits[] = {1, 3, -2, 3, 3}, low[] = {-7, -9, -INFINITY, -7};
    for (uint64_t draw = 0; draw < 20; draw++) {
        assert_int_equal(dpl_sample(logits, 5, 0, 1, 5, draw), 1); // the lowest id among equals
        assert_int_equal(dpl_sample(low, 4, 0, 0.5, 5, draw), 0);
        assert_int_equal(dpl_sample(logits, 1, 1, 1, 5, draw), 0);
        assert_int_equal(dpl_sample(logits, 5, 1, 1e-9, 5, draw), 1); // a nucleus of one
    }
}

static void the_nucleus_holds_the_fewest_that_reach_top_p(void **state) {
    (void)state;
    // Probabilities 0.3, 0.5, 0.2, exactly those of the first row; the last id is impossible.
    const float logits[] = {logf(0.6F), 0, logf(0.4F), -INFINITY}, equal[] = {2, 2, 2, 2};
    int n[4];
    count_draws(logits, 4, 1, 0.49, 3, 2000, n);
    assert_int_equal(n[1], 2000);
    count_draws(logits, 4, 1, 0.51, 3, 2000, n);
    assert_true(n[0] > 0 && n[1] > 0 && n[2] == 0 && n[3] == 0);
    assert_true(abs(n[0] - 750) < 110); // 0.3 / 0.8, five sigma
    count_draws(logits, 4, 1, 1, 3, 2000, n);
    assert_true(abs(n[0] - 600) < 103 && abs(n[1] - 1000) < 112 && abs(n[2] - 400) < 90);
    assert_int_equal(n[3], 0);
    count_draws(equal, 4, 1, 0.5, 3, 2000, n); // among equals the lowest ids are in
    assert_true(abs(n[0] - 1000) < 112 && n[0] + n[1] == 2000);
    count_draws(equal, 4, 1, 0.500001, 3, 2000, n);
    assert_true(n[2] > 0 && n[3] == 0);
    // The temperature widens or narrows: 0.5^2 / (0.3^2 + 0.5^2 + 0.2^2) = 0.658.
    count_draws(logits, 4, 0.5, 1, 3, 2000, n);
    assert_true(abs(n[1] - 1316) < 107);
    count_draws(logits, 4, 1e-6, 1, 3, 100, n);
    assert_int_equal(n[1], 100);
    count_draws(logits, 4, 1e6, 1, 3, 3000, n);
    assert_true(abs(n[0] - 1000) < 130 && abs(n[2] - 1000) < 130);
}

static void a_seed_gives_the_same_draws(void **state) {
    (void)state;
    float logits[100];
    for (int i = 0; i < 100; i++) logits[i] = (float)(i % 7) / 3;
    int n_same_seed = 0, n_other_seed = 0, n_other_draw = 0;
    for (uint64_t draw = 0; draw < 200; draw++) {
        const int32_t id = dpl_sample(logits, 100, 1, 0.95, 7, draw);
        n_same_seed += dpl_sample(logits, 100, 1, 0.95, 7, draw) == id;
        n_other_seed += dpl_sample(logits, 100, 1, 0.95, 8, draw) == id;
        n_other_draw += dpl_sample(logits, 100, 1, 0.95, 7, draw + 1) == id;
    }
    assert_int_equal(n_same_seed, 200);
    assert_true(n_other_seed < 30 && n_other_draw < 30);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_are_those_of_a_whole_pass),
        cmocka_unit_test(logits_of_a_bf16_model_are_near),
        cmocka_unit_test(two_decoders_do_not_meet),
        cmocka_unit_test(what_does_not_fit_is_refused),
        cmocka_unit_test(no_temperature_takes_the_largest),
        cmocka_unit_test(the_nucleus_holds_the_fewest_that_reach_top_p),
        cmocka_unit_test(a_seed_gives_the_same_draws),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
