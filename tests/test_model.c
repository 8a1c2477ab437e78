/*
 * test_model.c - the whole model: forward, losses and every gradient against the fp64 oracle and
 * the reference files, and its invariances (threads, CPU levels, deferred operators, accumulation,
 * memory).
 *
 * Bounds are those of fixtures/README.md section 4 for float32 kernels: relative to the largest
 * value of a tensor.
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
#include "model/block.h"
#include "modelkit.h"
#include "scratch.h"

#define BOUND_OUT  1e-5
#define BOUND_DX   2e-5
#define BOUND_GRAD 3e-5
#define BOUND_LOSS 5e-6

static int failures; // of the running test; each is printed, so that one run shows them all

static void check(bool good, const char *what, const char *name, double error) {
    if (good) return;
    failures++;
    print_error("%s: %s: off by %g\n", what, name, error);
}

static bool starts(const char *text, const char *with) {
    return strncmp(text, with, strlen(with)) == 0;
}

static bool ends(const char *text, const char *with) {
    const size_t n = strlen(text), m = strlen(with);
    return n >= m && strcmp(text + n - m, with) == 0;
}

/* ---- comparing with what the oracle or a reference file says ---- */

typedef struct tally {
    const char *what;
    double scale; // on the bounds
    int n_out, n_grad;
    double worst_out, worst_grad;
} tally;

static void compare_out(tally *t, const oracle_set *out, const char *name, size_t n,
                        const double *want) {
    const oracle_tensor *got = oracle_find(out, name);
    if (!got || (size_t)got->n != n) {
        check(false, t->what, name, INFINITY);
        return;
    }
    const bool exact = ends(name, ".ids") || ends(name, ".counts");
    const double bound = exact ? 0 : starts(name, "dhidden") ? BOUND_DX : BOUND_OUT;
    const double error = fixture_relative(n, got->value, want);
    check(error <= bound * t->scale, t->what, name, error);
    t->worst_out = fmax(t->worst_out, error);
    t->n_out++;
}

// Relative to the largest gradient of the tensor; what is below one ulp of the largest gradient of
// all is rounding noise (a softmax over one key has a gradient of 0 that arises from a difference).
// That of an expert without tokens is exactly 0.
static void compare_grad(tally *t, const kit *k, const char *name, size_t n, const double *want,
                         double top_of_all) {
    const dpl_disk_tensor *tensor = kit_disk(k->model, name);
    if (!tensor || kit_elems(tensor) != n) {
        check(false, t->what, name, INFINITY);
        return;
    }
    float *got = kit_gather(tensor, k->model->params.grad);
    double worst = 0, top = 0;
    for (size_t i = 0; i < n; i++) {
        const double error = fabs(got[i] - want[i]);
        worst = error < INFINITY ? fmax(worst, error) : INFINITY;
        top = fmax(top, fabs(want[i]));
    }
    const bool unused = top == 0 && strstr(name, ".experts.");
    const double floor = unused ? 0 : 0x1p-23 * top_of_all;
    const double error = worst == 0 ? 0 : worst / fmax(top, floor / BOUND_GRAD);
    check(error <= BOUND_GRAD * t->scale, t->what, name, error);
    t->worst_grad = fmax(t->worst_grad, error);
    t->n_grad++;
    free(got);
}

static bool is_output(const char *name, bool z_loss) {
    static const char *const others[] = {"loss", "mtp.loss", "aux.balance", "aux.router_z",
                                         "total_loss"};
    for (size_t i = 0; i < DPL_COUNT(others); i++)
        if (strcmp(name, others[i]) == 0) return false;
    if (z_loss && strcmp(name, "token_loss") == 0) return false; // the oracle's holds the z part
    return !ends(name, ".bias_next") && !ends(name, ".dlogits");
}

// Rows of padding are nobody's business: what they hold is not compared, as long as it is finite.
static void blank_padding(const scene *s, const oracle_tensor *want, oracle_tensor *got) {
    if (!s->segments || want->n_dims < 2 || want->shape[0] != s->n_batch ||
        want->shape[1] != s->n_seq || want->n != got->n)
        return;
    const int width = want->n / (s->n_batch * s->n_seq);
    for (int i = 0; i < want->n; i++)
        if (s->segments[i / width] == 0)
            got->value[i] = isfinite(got->value[i]) ? want->value[i] : NAN;
}

static void compare_losses(const scene *s, const kit_result *r, const oracle_set *want,
                           double bound, const char *what) {
    const struct {
        const char *name;
        double got;
    } rows[] = {
        {"loss", r->loss},
        {"total_loss", r->total},
        {"aux.balance", r->sums.balance},
        {"aux.router_z", r->sums.router_z},
        {s->cfg.mtp_layers ? "mtp.loss" : "loss", s->cfg.mtp_layers ? r->mtp_loss : r->loss}};
    for (size_t i = 0; i < DPL_COUNT(rows); i++) {
        const double value = oracle_get(want, "%s", rows[i].name)->value[0];
        const double error = fabs(rows[i].got - value);
        check(error <= bound * fmax(1, fabs(value)), what, rows[i].name, error);
    }
}

// Everything that the oracle computes.
static void compare_with_oracle(kit *k, scene *s, double scale, const char *what) {
    const oracle_batch batch = scene_oracle_batch(s);
    oracle_set want = {0};
    oracle_zero_grads(&s->params);
    oracle_run(&s->cfg, &s->params, &batch, true, &want);
    kit_result r;
    if (kit_train(k, s, &r) != DPL_OK) fail_msg("%s: %s", what, dpl_error_message());
    tally t = {.what = what, .scale = scale};
    compare_losses(s, &r, &want, BOUND_LOSS * scale, what);
    for (int i = 0; i < want.n; i++) {
        const oracle_tensor *tensor = &want.at[i];
        if (!is_output(tensor->name, s->cfg.z_multiplier != 0) || tensor->n == 0) continue;
        oracle_tensor *got = oracle_find(&r.out, tensor->name);
        if (!got && s->n_seq <= s->cfg.mtp_layers && starts(tensor->name, "router.")) continue;
        if (got) blank_padding(s, tensor, got);
        compare_out(&t, &r.out, tensor->name, (size_t)tensor->n, tensor->value);
    }
    double top = 0;
    for (int i = 0; i < s->params.n; i++)
        for (int j = 0; s->params.at[i].trainable && j < s->params.at[i].n; j++)
            top = fmax(top, fabs(s->params.at[i].grad[j]));
    for (int i = 0; i < s->params.n; i++) {
        const oracle_tensor *p = &s->params.at[i];
        if (p->trainable) compare_grad(&t, k, p->name, (size_t)p->n, p->grad, top);
    }
    print_message("%s: %d outputs, worst %.1e; %d gradients, worst %.1e\n", what, t.n_out,
                  t.worst_out, t.n_grad, t.worst_grad);
    assert_true(t.n_out >= 5 && t.n_grad >= 10);
    kit_result_close(&r);
    oracle_set_close(&want);
}

static void random_models_equal_the_oracle(void **state) {
    (void)state;
    failures = 0;
    for (uint64_t seed = 1; seed <= 40; seed++) {
        scene s;
        kit k;
        char what[32];
        snprintf(what, sizeof what, "seed %d", (int)seed);
        scene_open_random(seed, &s);
        const dpl_model_config config = scene_config(&s.cfg);
        assert_true(kit_open(&config, DPL_F32, &s.params, 2, false, NULL, &k));
        compare_with_oracle(&k, &s, 1, what);
        kit_close(&k);
        scene_close(&s);
    }
    assert_int_equal(failures, 0);
}

// The model that exercises most: packed documents, every auxiliary loss, two MTP depths.
static oracle_config rich_config(void) {
    oracle_config c = scene_small_config();
    c.router.group_best = 2;
    c.latent_eps = 1e-6;
    c.mtp_layers = 2;
    c.mtp_weight = 0.3;
    c.balance_weight = 0.7;
    c.router_z_weight = 0.3;
    c.z_multiplier = 0.2;
    c.bias_rate = 0.001;
    return c;
}

// Named cases of which each has been wrong in some other program.
static void known_cases_equal_the_oracle(void **state) {
    (void)state;
    static const struct {
        const char *what;
        int D, H, nope, rope, v_dim, kv_lora, V, B, S, mtp, K, E;
        bool packed;
    } cases[] = {
        {"value heads of another width", 24, 2, 8, 4, 6, 16, 70, 2, 11, 0, 3, 8, true},
        {"heads times width is not the model's width", 64, 8, 12, 4, 5, 16, 64, 1, 9, 1, 3, 8,
         true},
        {"vocabulary not a multiple of the panel", 24, 1, 8, 4, 6, 16, 97, 2, 11, 1, 3, 8, false},
        {"one token", 24, 2, 8, 4, 6, 16, 33, 1, 1, 0, 3, 8, false},
        {"one token a row, MTP without positions", 24, 2, 8, 4, 6, 16, 33, 3, 1, 1, 3, 8, false},
        {"one row", 24, 2, 8, 4, 6, 16, 33, 1, 17, 2, 3, 8, false},
        {"all experts chosen", 24, 2, 8, 4, 6, 16, 33, 2, 9, 1, 8, 8, true},
    };
    failures = 0;
    for (size_t i = 0; i < DPL_COUNT(cases); i++) {
        oracle_config c = rich_config();
        c.D = cases[i].D, c.H = cases[i].H, c.nope = cases[i].nope, c.rope = cases[i].rope;
        c.v_dim = cases[i].v_dim, c.kv_lora = cases[i].kv_lora, c.V = cases[i].V;
        c.mtp_layers = cases[i].mtp, c.router.K = cases[i].K, c.router.E = cases[i].E;
        if (c.router.K > 4) c.router.n_group = 1;
        scene s;
        kit k;
        scene_open(&c, 100 + i, cases[i].B, cases[i].S, cases[i].packed, &s);
        const dpl_model_config config = scene_config(&c);
        assert_true(kit_open(&config, DPL_F32, &s.params, 2, false, NULL, &k));
        compare_with_oracle(&k, &s, 1, cases[i].what);
        kit_close(&k);
        scene_close(&s);
    }
    assert_int_equal(failures, 0);
}

// Without any MoE layer the configuration needs no expert.
static void dense_model_equals_the_oracle(void **state) {
    (void)state;
    oracle_config c = rich_config();
    c.n_dense = c.L, c.mtp_layers = 0, c.balance_weight = 0, c.router_z_weight = 0;
    c.router.E = 0;
    scene s;
    kit k;
    failures = 0;
    scene_open(&c, 5, 2, 9, true, &s);
    dpl_model_config config = scene_config(&c);
    assert_true(kit_open(&config, DPL_F32, &s.params, 2, false, NULL, &k));
    compare_with_oracle(&k, &s, 1, "dense only");
    kit_close(&k);
    scene_close(&s);
    assert_int_equal(failures, 0);
}

/* ---- the reference files ---- */

static double top_gradient(const fixture *want) {
    double top = 0;
    for (int i = 0; i < want->n; i++) {
        if (!starts(want->at[i].name, "grad.")) continue;
        double *values = fixture_values(&want->at[i]);
        for (size_t j = 0; j < want->at[i].n; j++) top = fmax(top, fabs(values[j]));
        free(values);
    }
    return top;
}

static void compare_with_reference(kit *k, const fixture *want, const kit_result *r, tally *t) {
    static const char *const skipped[] = {"input_ids",     "labels",      "targets", "loss_mask",
                                          "rope.inv_freq", "mtp.targets", "adamw"};
    const double top = top_gradient(want);
    for (int i = 0; i < want->n; i++) {
        const fixture_tensor *tensor = &want->at[i];
        bool skip_it = ends(tensor->name, ".bias_next");
        for (size_t j = 0; j < DPL_COUNT(skipped); j++) skip_it |= starts(tensor->name, skipped[j]);
        if (skip_it) continue;
        double *values = fixture_values(tensor);
        const double loss = strcmp(tensor->name, "loss") == 0         ? r->loss
                            : strcmp(tensor->name, "mtp.loss") == 0   ? r->mtp_loss
                            : strcmp(tensor->name, "total_loss") == 0 ? r->total
                                                                      : NAN;
        if (!isnan(loss))
            check(fabs(loss - values[0]) <= 1e-6 * values[0], t->what, tensor->name,
                  fabs(loss - values[0]));
        else if (starts(tensor->name, "grad."))
            compare_grad(t, k, tensor->name + 5, tensor->n, values, top);
        else compare_out(t, &r->out, tensor->name, tensor->n, values);
        free(values);
    }
}

// The router bias after one update with this batch, in fp32.
static void compare_bias(kit *k, const fixture *want, const char *what) {
    dpl_model_update_bias(k->model, 0.001);
    for (size_t layer = 0; layer < k->model->config.n_layers + k->model->config.n_mtp; layer++) {
        char name[64];
        snprintf(name, sizeof name, "router.%zu.bias_next", layer);
        if (!fixture_find(want, name)) continue;
        double *next = fixture_f64(want, name, NULL);
        for (size_t e = 0; e < k->model->config.n_experts; e++) {
            const double error = fabs(dpl_model_bias(k->model, layer)[e] - next[e]);
            check(error < 1e-7, what, name, error);
        }
        free(next);
    }
}

static void reference_folders_are_reproduced(void **state) {
    const char *name = *state;
    if (!fixture_root()) skip();
    failures = 0;
    scene s;
    kit k;
    fixture want;
    kit_result r;
    dpl_model_config config;
    scene_open_fixture(name, "config.json", &s);
    check_ok(dpl_model_read_config(fixture_path("%s", name), &config, NULL));
    assert_true(kit_open(&config, DPL_F32, NULL, 2, false, NULL, &k));
    check_ok(dpl_model_load(k.model, fixture_path("%s", name)));
    assert_true(fixture_open(fixture_path("%s/reference.safetensors", name), &want));
    check_ok(kit_train(&k, &s, &r));
    tally t = {.what = name, .scale = 1};
    compare_with_reference(&k, &want, &r, &t);
    compare_bias(&k, &want, name);
    print_message("%s: %d outputs, worst %.1e; %d gradients, worst %.1e\n", name, t.n_out,
                  t.worst_out, t.n_grad, t.worst_grad);
    assert_true(t.n_out >= 20 && t.n_grad >= 50);
    kit_result_close(&r);
    fixture_close(&want);
    kit_close(&k);
    scene_close(&s);
    assert_int_equal(failures, 0);
}

/* ---- bf16 ---- */

typedef struct error_sum {
    double difference, want;
} error_sum;

static void add_errors(error_sum *e, size_t n, const float *got, const double *want) {
    for (size_t i = 0; i < n; i++) {
        e->difference += (got[i] - want[i]) * (got[i] - want[i]);
        e->want += want[i] * want[i];
    }
}

// Every expert is chosen, so that no choice can flip. Each activation is rounded to bf16 (relative
// error of at most 2^-9, RMS 2^-9 / sqrt(3)) some ten times a layer, errors add up as a random
// walk: forward over 2 layers, 2 MTP layers and head about sqrt(50) of them, 1 %; the gradients see
// those of forward and backward, 2 %.
static void bf16_stays_near_the_oracle(void **state) {
    (void)state;
    oracle_config c = rich_config();
    c.router.K = c.router.E, c.router.n_group = 1;
    scene s;
    kit k;
    oracle_set want = {0};
    kit_result r;
    scene_open(&c, 42, 3, 16, true, &s);
    scene_round(&s, true);
    const dpl_model_config config = scene_config(&c);
    const oracle_batch batch = scene_oracle_batch(&s);
    oracle_run(&c, &s.params, &batch, true, &want);
    assert_true(kit_open(&config, DPL_BF16, &s.params, 2, false, NULL, &k));
    check_ok(kit_train(&k, &s, &r));
    failures = 0;
    compare_losses(&s, &r, &want, 2e-3, "bf16");
    error_sum logits = {0}, grads = {0};
    const oracle_tensor *got = oracle_get(&r.out, "logits"),
                        *expected = oracle_get(&want, "logits");
    for (int i = 0; i < got->n; i++) {
        logits.difference += pow(got->value[i] - expected->value[i], 2);
        logits.want += pow(expected->value[i], 2);
    }
    for (int i = 0; i < s.params.n; i++) {
        const oracle_tensor *p = &s.params.at[i];
        if (!p->trainable) continue;
        float *grad = kit_gather(kit_disk(k.model, p->name), k.model->params.grad);
        error_sum one = {0};
        add_errors(&one, (size_t)p->n, grad, p->grad);
        add_errors(&grads, (size_t)p->n, grad, p->grad);
        const double error = sqrt(one.difference / one.want);
        check(error < 0.06, "bf16", p->name, error); // a tensor alone may be three times as far off
        free(grad);
    }
    const double out_error = sqrt(logits.difference / logits.want),
                 grad_error = sqrt(grads.difference / grads.want);
    print_message("bf16: logits %.4f, gradients %.4f\n", out_error, grad_error);
    assert_true(out_error > 1e-4); // it was bf16 indeed
    assert_true(out_error < 0.01 && grad_error < 0.02);
    assert_int_equal(failures, 0);
    kit_result_close(&r);
    oracle_set_close(&want);
    kit_close(&k);
    scene_close(&s);
}

/* ---- invariances ---- */

typedef struct bits { // all results of one pass
    dpl_loss_sums sums;
    float *grad;
    int64_t *counts;
    size_t n_grad, n_counts;
} bits;

static bool bits_of(const scene *s, dpl_dtype dtype, int n_threads, bool deferred,
                    const char *level, bits *b) {
    kit k;
    const dpl_model_config config = scene_config(&s->cfg);
    if (!kit_open(&config, dtype, &s->params, n_threads, deferred, level, &k)) return false;
    const dpl_batch batch = scene_batch(s);
    const dpl_loss_rule rule = scene_rule(&s->cfg);
    if (dpl_model_train_micro(k.model, &batch, &rule, 0.01, 0.02, 1, &b->sums) != DPL_OK)
        fail_msg("%s", dpl_error_message());
    b->n_grad = k.model->params.elems;
    b->n_counts = config.n_experts * (config.n_layers + config.n_mtp);
    b->grad = test_malloc(b->n_grad * sizeof(float));
    b->counts = test_malloc(b->n_counts * sizeof(int64_t));
    memcpy(b->grad, k.model->params.grad, b->n_grad * sizeof(float));
    memcpy(b->counts, k.model->counts, b->n_counts * sizeof(int64_t));
    kit_close(&k);
    return true;
}

static void bits_close(bits *b) {
    test_free(b->grad), test_free(b->counts);
}

static void assert_bits_equal(const bits *a, const bits *b) {
    assert_memory_equal(&a->sums, &b->sums, sizeof a->sums);
    assert_memory_equal(a->grad, b->grad, a->n_grad * sizeof(float));
    assert_memory_equal(a->counts, b->counts, a->n_counts * sizeof(int64_t));
}

// Sizes beyond the blocks of every operator.
static void scene_open_large(scene *s) {
    oracle_config c = rich_config();
    c.V = 1500, c.D = 96, c.F_dense = 130, c.F_moe = 40, c.router.E = 16, c.H = 4;
    scene_open(&c, 77, 3, 150, true, s);
}

static void threads_and_queue_change_no_bit(void **state) {
    (void)state;
    static const char *const levels[] = {"ref", "avx2", "avx512", "avx512_bf16", "amx", "tiles"};
    scene s;
    scene_open_large(&s);
    for (int dtype = 0; dtype < 2; dtype++) {
        const dpl_dtype type = dtype ? DPL_BF16 : DPL_F32;
        for (size_t i = 0; i < DPL_COUNT(levels); i++) {
            bits one, other;
            if (!bits_of(&s, type, 1, false, levels[i], &one)) {
                print_message("level %s: not on this machine\n", levels[i]);
                continue;
            }
            static const int threads[] = {2, 3, 8};
            for (size_t t = 0; t < DPL_COUNT(threads); t++) {
                assert_true(bits_of(&s, type, threads[t], false, levels[i], &other));
                assert_bits_equal(&one, &other);
                bits_close(&other);
            }
            assert_true(bits_of(&s, type, 2, true, levels[i], &other)); // operators queued
            assert_bits_equal(&one, &other);
            bits_close(&other);
            bits_close(&one);
        }
    }
    scene_close(&s);
}

static void every_level_equals_the_oracle(void **state) {
    (void)state;
    static const char *const levels[] = {"ref", "avx2", "avx512", "avx512_bf16", "amx", "tiles"};
    failures = 0;
    scene s;
    const oracle_config c = rich_config();
    scene_open(&c, 3, 2, 20, true, &s);
    for (size_t i = 0; i < DPL_COUNT(levels); i++) {
        kit k;
        const dpl_model_config config = scene_config(&c);
        if (!kit_open(&config, DPL_F32, &s.params, 2, false, levels[i], &k)) continue;
        compare_with_oracle(&k, &s, 1, levels[i]);
        kit_close(&k);
    }
    scene_close(&s);
    assert_int_equal(failures, 0);
}

// Two micro-batches after one another give the sum of their gradients: a second pass starts from
// the first one's bits, so that accumulating the same batch from zero and from itself must agree
// within one rounding an addend.
static void gradients_accumulate(void **state) {
    (void)state;
    const oracle_config c = rich_config();
    scene s;
    kit k;
    scene_open(&c, 9, 2, 12, true, &s);
    const dpl_model_config config = scene_config(&c);
    assert_true(kit_open(&config, DPL_F32, &s.params, 2, false, NULL, &k));
    const dpl_batch batch = scene_batch(&s);
    const dpl_loss_rule rule = scene_rule(&c);
    dpl_loss_sums sums, again;
    const size_t n = k.model->params.elems, E = config.n_experts;
    check_ok(dpl_model_train_micro(k.model, &batch, &rule, 0.05, 0.02, 1, &sums));
    float *once = test_malloc(n * sizeof *once);
    memcpy(once, k.model->params.grad, n * sizeof *once);
    int64_t *counts = test_malloc(4 * E * sizeof *counts);
    memcpy(counts, k.model->counts, 4 * E * sizeof *counts);
    check_ok(dpl_model_train_micro(k.model, &batch, &rule, 0.05, 0.02, 1, &again));
    assert_memory_equal(&sums, &again, sizeof sums);
    double top = 0, worst = 0;
    for (size_t i = 0; i < n; i++) {
        top = fmax(top, fabs(once[i]));
        worst = fmax(worst, fabs(k.model->params.grad[i] - 2.0 * once[i]));
    }
    print_message("accumulated: worst %.1e of %.1e\n", worst, top);
    assert_true(worst < 4e-7 * top);
    for (size_t i = 0; i < 4 * E; i++) assert_int_equal(k.model->counts[i], 2 * counts[i]);
    // Zeroed, the gradients are the first ones again.
    dpl_model_zero_grads(k.model);
    check_ok(dpl_model_train_micro(k.model, &batch, &rule, 0.05, 0.02, 1, &again));
    assert_memory_equal(once, k.model->params.grad, n * sizeof *once);
    test_free(once), test_free(counts);
    kit_close(&k);
    scene_close(&s);
}

// Without a weight on cross-entropy no product reaches the head, but the router's losses reach the
// embedding: whether tied or not, nothing is left there of the step before.
static void gradients_do_not_outlive_their_step(void **state) {
    (void)state;
    for (int tied = 0; tied < 2; tied++) {
        oracle_config c = rich_config();
        c.tied = tied;
        scene s;
        kit k;
        scene_open(&c, 9, 2, 12, true, &s);
        const dpl_model_config config = scene_config(&c);
        assert_true(kit_open(&config, DPL_F32, &s.params, 2, false, NULL, &k));
        const dpl_batch batch = scene_batch(&s);
        const dpl_loss_rule rule = scene_rule(&c);
        const size_t bytes = k.model->params.elems * sizeof(float);
        dpl_loss_sums sums;
        check_ok(dpl_model_train_micro(k.model, &batch, &rule, 0, 0, 1, &sums));
        float *fresh = test_malloc(bytes);
        memcpy(fresh, k.model->params.grad, bytes);
        check_ok(dpl_model_train_micro(k.model, &batch, &rule, 0.05, 0.02, 1, &sums));
        assert_memory_not_equal(fresh, k.model->params.grad, bytes);
        dpl_model_zero_grads(k.model);
        check_ok(dpl_model_train_micro(k.model, &batch, &rule, 0, 0, 1, &sums));
        assert_memory_equal(fresh, k.model->params.grad, bytes);
        test_free(fresh);
        kit_close(&k);
        scene_close(&s);
    }
}

// Four rows at once, or two and two: the same counts, and gradients that differ by roundings of
// their sums.
static void micro_batches_add_up_to_the_batch(void **state) {
    (void)state;
    oracle_config c = rich_config();
    c.balance_weight = c.router_z_weight = 0; // normalized in each micro-batch
    scene s;
    kit k;
    scene_open(&c, 17, 4, 12, true, &s);
    const dpl_model_config config = scene_config(&c);
    assert_true(kit_open(&config, DPL_F32, &s.params, 2, false, NULL, &k));
    const dpl_loss_rule rule = scene_rule(&c);
    const size_t n = k.model->params.elems, n_counts = 4 * config.n_experts;
    dpl_loss_sums all, part, sum = {0};
    const dpl_batch batch = scene_batch(&s);
    check_ok(dpl_model_train_micro(k.model, &batch, &rule, 0.05, 0.02, 1, &all));
    float *whole = test_malloc(n * sizeof *whole);
    int64_t *counts = test_malloc(n_counts * sizeof *counts);
    memcpy(whole, k.model->params.grad, n * sizeof *whole);
    memcpy(counts, k.model->counts, n_counts * sizeof *counts);
    dpl_model_zero_grads(k.model);
    memset(k.model->counts, 0, n_counts * sizeof *counts);
    for (int i = 0; i < 2; i++) {
        const size_t at = (size_t)(i * 2 * s.n_seq);
        const dpl_batch half = {
            2, (size_t)s.n_seq, s.ids + at, s.targets + at, s.segments + at, s.positions + at};
        check_ok(dpl_model_train_micro(k.model, &half, &rule, 0.05, 0.02, 1, &part));
        sum.xent += part.xent, sum.z += part.z, sum.mtp_xent += part.mtp_xent;
        sum.n_tokens += part.n_tokens, sum.mtp_tokens += part.mtp_tokens;
    }
    assert_memory_equal(counts, k.model->counts, n_counts * sizeof *counts);
    assert_true(sum.n_tokens == all.n_tokens && sum.mtp_tokens == all.mtp_tokens);
    assert_true(sum.mtp_tokens == kit_mtp_targets(&config, &batch));
    assert_true(fabs(sum.xent + sum.z - all.xent - all.z) < 1e-12 * all.xent);
    assert_true(fabs(sum.mtp_xent - all.mtp_xent) < 1e-12 * all.mtp_xent);
    double top = 0, worst = 0;
    for (size_t i = 0; i < n; i++) {
        top = fmax(top, fabs(whole[i]));
        worst = fmax(worst, fabs(k.model->params.grad[i] - (double)whole[i]));
    }
    print_message("in two halves: worst %.1e of %.1e\n", worst, top);
    assert_true(worst < 4e-7 * top);
    test_free(whole), test_free(counts);
    kit_close(&k);
    scene_close(&s);
}

// Padding of the flat arrays is no parameter: it stays zero in the gradients, so it does in the
// weights.
static void padding_has_no_gradient(void **state) {
    (void)state;
    const oracle_config c = rich_config();
    scene s;
    kit k;
    scene_open(&c, 10, 2, 12, false, &s);
    const dpl_model_config config = scene_config(&c);
    assert_true(kit_open(&config, DPL_F32, &s.params, 2, false, NULL, &k));
    assert_int_equal(kit_train(&k, &s, NULL), DPL_OK);
    dpl_params *p = &k.model->params;
    float *zeros = calloc(65536, sizeof *zeros);
    for (size_t i = 0; i < k.model->n_disk; i++) {
        const dpl_disk_tensor *t = &k.model->disk[i];
        assert_true(kit_elems(t) <= 65536);
        if (t->param) dpl_disk_scatter(t, p->grad, zeros);
    }
    for (size_t i = 0; i < p->elems; i++) assert_true(p->grad[i] == 0);
    free(zeros);
    kit_close(&k);
    scene_close(&s);
}

/* ---- evaluation ---- */

static void evaluation_equals_training_and_changes_nothing(void **state) {
    (void)state;
    const oracle_config c = rich_config();
    for (int deferred = 0; deferred < 2; deferred++) {
        scene s;
        kit k;
        scene_open(&c, 11, 2, 12, true, &s);
        const dpl_model_config config = scene_config(&c);
        assert_true(kit_open(&config, DPL_F32, &s.params, 2, deferred, NULL, &k));
        const dpl_batch batch = scene_batch(&s);
        const dpl_loss_rule rule = scene_rule(&c);
        kit_result r;
        assert_int_equal(kit_train(&k, &s, &r), DPL_OK);
        const size_t layers = 4, E = config.n_experts;
        const size_t n_logits = (size_t)(s.n_batch * s.n_seq) * config.vocab;
        int64_t *counts = test_malloc(layers * E * sizeof *counts);
        float *bias = test_malloc(layers * E * sizeof *bias);
        float *logits = test_malloc(n_logits * sizeof *logits);
        memcpy(counts, k.model->counts, layers * E * sizeof *counts);
        memcpy(bias, k.model->router_bias, layers * E * sizeof *bias);
        for (int again = 0; again < 2; again++) {
            dpl_loss_sums sums;
            check_ok(dpl_model_evaluate(k.model, &batch, &rule, logits, &sums));
            assert_true(sums.xent == r.sums.xent && sums.z == r.sums.z);
            assert_true(sums.n_tokens == r.sums.n_tokens && sums.mtp_tokens == 0);
            const oracle_tensor *want = oracle_get(&r.out, "logits");
            assert_int_equal(want->n, n_logits);
            for (size_t i = 0; i < n_logits; i++) assert_true(logits[i] == (float)want->value[i]);
        }
        assert_memory_equal(counts, k.model->counts, layers * E * sizeof *counts);
        assert_memory_equal(bias, k.model->router_bias, layers * E * sizeof *bias);
        // Without targets there are logits and no loss; without logits, a loss.
        dpl_batch only_ids = batch;
        only_ids.targets = NULL;
        check_ok(dpl_model_evaluate(k.model, &only_ids, &rule, logits, NULL));
        assert_true(logits[0] == (float)oracle_get(&r.out, "logits")->value[0]);
        dpl_loss_sums sums;
        check_ok(dpl_model_evaluate(k.model, &batch, &rule, NULL, &sums));
        assert_true(sums.xent == r.sums.xent);
        test_free(counts), test_free(bias), test_free(logits);
        kit_result_close(&r);
        kit_close(&k);
        scene_close(&s);
    }
}

// The bits of a row do not depend on the other rows of the batch.
static void rows_are_independent(void **state) {
    (void)state;
    const oracle_config c = rich_config();
    scene s;
    kit k;
    scene_open(&c, 12, 3, 10, false, &s);
    const dpl_model_config config = scene_config(&c);
    assert_true(kit_open(&config, DPL_F32, &s.params, 2, false, NULL, &k));
    const size_t row = 10 * config.vocab;
    float *all = test_malloc(3 * row * sizeof *all), *one = test_malloc(row * sizeof *one);
    const dpl_batch batch = {3, 10, s.ids, NULL, NULL, NULL};
    check_ok(dpl_model_evaluate(k.model, &batch, NULL, all, NULL));
    for (size_t b = 0; b < 3; b++) {
        const dpl_batch single = {1, 10, s.ids + 10 * b, NULL, NULL, NULL};
        check_ok(dpl_model_evaluate(k.model, &single, NULL, one, NULL));
        assert_memory_equal(one, all + b * row, row * sizeof *one);
        const dpl_batch shorter = {1, 7, s.ids + 10 * b, NULL, NULL, NULL};
        check_ok(dpl_model_evaluate(k.model, &shorter, NULL, one, NULL));
        assert_memory_equal(one, all + b * row, 7 * config.vocab * sizeof *one);
    }
    test_free(all), test_free(one);
    kit_close(&k);
    scene_close(&s);
}

/* ---- memory ---- */

static size_t peak_of(const scene *s, bool train) {
    kit k;
    const dpl_model_config config = scene_config(&s->cfg);
    assert_true(kit_open(&config, DPL_F32, &s->params, 2, false, NULL, &k));
    const size_t before = dpl_ctx_mark(k.ctx);
    if (train) {
        assert_int_equal(kit_train(&k, s, NULL), DPL_OK);
    } else {
        const dpl_batch batch = scene_batch(s);
        const dpl_loss_rule rule = scene_rule(&s->cfg);
        check_ok(dpl_model_evaluate(k.model, &batch, &rule, NULL, NULL));
    }
    assert_int_equal(dpl_ctx_mark(k.ctx), before);
    const size_t peak = dpl_arena_peak_bytes(k.ctx->arena);
    kit_close(&k);
    return peak;
}

// What a layer keeps by the table of block.h, and the rest of a step beside it.
static size_t planned_bytes(const scene *s) {
    const dpl_model_config c = scene_config(&s->cfg);
    const size_t T = (size_t)(s->n_batch * s->n_seq);
    size_t width = 8 * c.d + c.n_heads + 8;
    for (int i = 0; i < DPL_ACT_N; i++) width += dpl_act_width(&c, (dpl_act_id)i);
    const dpl_moe_shape moe = {.d = c.d,
                               .f = c.moe_f,
                               .shared_f = c.moe_f * c.n_shared,
                               .dtype = DPL_F32,
                               .rule = {.n_experts = c.n_experts, .top_k = c.top_k}};
    const size_t layer = T * width * sizeof(float) + dpl_moe_saved_bytes(&moe, T) + 8192;
    const size_t logits = T * c.vocab * sizeof(float);
    return (c.n_layers + c.n_mtp + 3) * layer + logits; // 3: temporaries of one layer's backward
}

static void memory_is_released_and_bounded(void **state) {
    (void)state;
    oracle_config c = rich_config();
    c.D = 64;
    scene two, six;
    scene_open(&c, 13, 2, 40, true, &two);
    c.L = 6;
    scene_open(&c, 13, 2, 40, true, &six);
    const size_t train = peak_of(&six, true), plan = planned_bytes(&six);
    print_message("peak of training %zu bytes, planned %zu\n", train, plan);
    assert_true(train > plan / 4 && train <= plan);
    // Evaluation keeps nothing: six layers take what two take, but for a pointer to each output.
    const size_t of_six = peak_of(&six, false), of_two = peak_of(&two, false);
    assert_true(of_six - of_two <= dpl_round_up(4 * sizeof(dpl_mat), DPL_ALIGN));
    assert_true(of_six < train / 3);
    scene_close(&two);
    scene_close(&six);
}

/* ---- errors ---- */

static void bad_batches_are_refused(void **state) {
    (void)state;
    const oracle_config c = rich_config();
    scene s;
    kit k;
    scene_open(&c, 14, 2, 6, true, &s);
    dpl_model_config config = scene_config(&c);
    config.max_positions = 6;
    assert_true(kit_open(&config, DPL_F32, &s.params, 2, false, NULL, &k));
    const dpl_batch good = scene_batch(&s);
    const dpl_loss_rule rule = scene_rule(&c);
    dpl_loss_sums sums = {.xent = 123};
#define REFUSED(part, change)                                                                  \
    do {                                                                                       \
        dpl_batch batch = good;                                                                \
        change;                                                                                \
        check_error(dpl_model_train_micro(k.model, &batch, &rule, 1, 1, 1, &sums), DPL_EINVAL, \
                    part, "");                                                                 \
        assert_true(sums.xent == 123);                                                         \
    } while (0)
    REFUSED("0 x 6", batch.n_batch = 0);
    REFUSED("2 x 0", batch.n_seq = 0);
    REFUSED("at least 1 x 1", batch.ids = NULL);
    REFUSED("needs targets", batch.targets = NULL);
    const int id = s.ids[8], target = s.targets[8], position = s.positions[8];
    s.ids[8] = -1;
    REFUSED("token 2 of row 1 is -1", (void)0);
    s.ids[8] = c.V;
    REFUSED("expected 0 to 69", (void)0);
    check_error(dpl_model_evaluate(k.model, &good, &rule, NULL, &sums), DPL_EINVAL,
                "token 2 of row 1 is 70", "");
    s.ids[8] = id, s.targets[8] = c.V;
    REFUSED("target 2 of row 1 is 70", (void)0);
    s.targets[8] = target, s.positions[8] = 6;
    REFUSED("position 2 of row 1 is 6", (void)0);
    s.positions[8] = -1;
    REFUSED("position 2 of row 1 is -1", (void)0);
    s.positions[8] = position;
    int32_t ids[7] = {0}, targets[7] = {0};
    const dpl_batch too_long = {1, 7, ids, targets, NULL, NULL};
    check_error(dpl_model_train_micro(k.model, &too_long, &rule, 1, 1, 1, &sums), DPL_EINVAL,
                "a sequence of 7 tokens", "max_position_embeddings = 6");
#undef REFUSED
    for (size_t i = 0; i < k.model->params.elems; i++) assert_true(k.model->params.grad[i] == 0);
    check_ok(dpl_model_train_micro(k.model, &good, &rule, 1, 1, 1, &sums));
    kit_close(&k);
    scene_close(&s);
}

// One NaN: the message names the layer in which it arose and the tensor that holds it.
static void expect_nan(const char *tensor, const char *layer) {
    oracle_config c = rich_config();
    c.L = 3;
    for (int deferred = 0; deferred < 2; deferred++) {
        scene s;
        kit k;
        scene_open(&c, 15, 4, 16, false, &s);
        oracle_get(&s.params, "%s", tensor)->value[5] = NAN;
        const dpl_model_config config = scene_config(&c);
        assert_true(kit_open(&config, DPL_F32, &s.params, 2, deferred, NULL, &k));
        const size_t before = dpl_ctx_mark(k.ctx);
        check_error(kit_train(&k, &s, NULL), DPL_ENUMERIC, tensor, layer);
        assert_int_equal(dpl_ctx_mark(k.ctx), before);
        if (!strstr(tensor, "layers.3")) { // evaluation does not run the MTP layers
            const dpl_batch batch = scene_batch(&s);
            const dpl_loss_rule rule = scene_rule(&c);
            check_error(dpl_model_evaluate(k.model, &batch, &rule, NULL, NULL), DPL_ENUMERIC,
                        tensor, layer);
            assert_int_equal(dpl_ctx_mark(k.ctx), before);
        }
        kit_close(&k);
        scene_close(&s);
    }
}

// The reservation of the step arena is made smaller than the pass needs: refused before anything is
// computed.
static void a_pass_beyond_the_memory_is_refused(void **state) {
    (void)state;
    scene s;
    kit k;
    scene_open_random(3, &s);
    const dpl_model_config config = scene_config(&s.cfg);
    assert_true(kit_open(&config, DPL_F32, &s.params, 1, false, "ref", &k));
    const dpl_batch batch = scene_batch(&s);
    const dpl_loss_rule rule = {0};
    dpl_loss_sums sums;
    const size_t memory = k.ctx->memory_bytes;
    k.ctx->memory_bytes = 100000;
    assert_int_equal(dpl_model_evaluate(k.model, &batch, &rule, NULL, &sums), DPL_ENOMEM);
    assert_non_null(strstr(dpl_error_message(), "per_device_batch_size"));
    k.ctx->memory_bytes = memory;
    assert_int_equal(dpl_model_evaluate(k.model, &batch, &rule, NULL, &sums), DPL_OK);
    assert_true(dpl_arena_peak_bytes(k.ctx->arena) < ((size_t)1 << 30));
    kit_close(&k);
    scene_close(&s);
}

static void nan_is_an_error_with_its_layer(void **state) {
    (void)state;
    // After layer 1 the next router trips over the NaN; after the last layer nothing routes, so the
    // loss does.
    static const struct {
        const char *layer, *tensor;
    } cases[] = {{"layer 1", "model.layers.1.mlp.experts.2.down_proj.weight"},
                 {"layer 2", "model.layers.2.mlp.experts.2.up_proj.weight"},
                 {"", "model.layers.1.mlp.gate.weight"},
                 {"layer 0", "model.layers.0.self_attn.o_proj.weight"},
                 {"", "model.norm.weight"},
                 {"", "lm_head.weight"},
                 {"embedding", "model.embed_tokens.weight"},
                 {"", "model.layers.3.mlp.experts.1.down_proj.weight"},
                 {"", "model.layers.3.shared_head.norm.weight"}};
    for (size_t i = 0; i < DPL_COUNT(cases); i++) expect_nan(cases[i].tensor, cases[i].layer);
}

/* ---- the router bias ---- */

static void bias_moves_by_the_sign_of_the_summed_counts(void **state) {
    (void)state;
    oracle_config c = rich_config();
    c.router = (oracle_router){.E = 4, .K = 1, .n_group = 1, .group_best = 2, .scale = 1};
    scene s;
    kit k;
    scene_open(&c, 16, 1, 4, false, &s);
    const dpl_model_config config = scene_config(&c);
    assert_true(kit_open(&config, DPL_F32, NULL, 1, false, NULL, &k));
    int64_t *counts = k.model->counts + 1 * 4; // of layer 1, the first MoE layer
    float *bias = dpl_model_bias(k.model, 1);
    // Two micro-batches whose counts cancel: the update after both is exactly nothing.
    const int64_t balanced[4] = {4, 4, 4, 4};
    memcpy(counts, balanced, sizeof balanced);
    for (int e = 0; e < 4; e++) bias[e] = 0.75f;
    dpl_model_update_bias(k.model, 0.001);
    for (int e = 0; e < 4; e++) assert_true(bias[e] == 0.75f);
    // Mean 2: below, above, exactly the mean, below. Ten updates do not get lost in bf16.
    const int64_t uneven[4] = {1, 5, 2, 0};
    memcpy(counts, uneven, sizeof uneven);
    for (int i = 0; i < 10; i++) dpl_model_update_bias(k.model, 0.001);
    assert_true(fabs(bias[0] - 0.760) < 1e-6 && fabs(bias[1] - 0.740) < 1e-6);
    assert_true(bias[2] == 0.75f && fabs(bias[3] - 0.760) < 1e-6);
    // A mean that is not a whole number, and counts that fp32 does not hold.
    const int64_t large[4] = {(int64_t)1 << 40, ((int64_t)1 << 40) + 1, (int64_t)1 << 40,
                              (int64_t)1 << 40};
    memcpy(counts, large, sizeof large);
    for (int e = 0; e < 4; e++) bias[e] = 0;
    dpl_model_update_bias(k.model, 0.5);
    assert_true(bias[0] == 0.5f && bias[1] == -0.5f && bias[2] == 0.5f && bias[3] == 0.5f);
    for (int e = 0; e < 4;
         e++) // the other MoE layers counted nothing, the dense layer has no router
        assert_true(dpl_model_bias(k.model, 2)[e] == 0 && dpl_model_bias(k.model, 0)[e] == 0);
    kit_close(&k);
    scene_close(&s);
}

int main(void) {
#define FOLDER(name) \
    { name, reference_folders_are_reproduced, NULL, NULL, name }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_models_equal_the_oracle),
        cmocka_unit_test(known_cases_equal_the_oracle),
        cmocka_unit_test(dense_model_equals_the_oracle),
        FOLDER("deepseek_v3"),
        FOLDER("deepseek_v3_noqlora"),
        FOLDER("deepseek_v3_yarn"),
        FOLDER("deepseek_v3_halfrope"),
        FOLDER("deepseek_v3_bf16"),
        FOLDER("deepseek_v3_mtp"),
        cmocka_unit_test(every_level_equals_the_oracle),
        cmocka_unit_test(bf16_stays_near_the_oracle),
        cmocka_unit_test(threads_and_queue_change_no_bit),
        cmocka_unit_test(gradients_accumulate),
        cmocka_unit_test(gradients_do_not_outlive_their_step),
        cmocka_unit_test(micro_batches_add_up_to_the_batch),
        cmocka_unit_test(padding_has_no_gradient),
        cmocka_unit_test(evaluation_equals_training_and_changes_nothing),
        cmocka_unit_test(rows_are_independent),
        cmocka_unit_test(memory_is_released_and_bounded),
        cmocka_unit_test(bad_batches_are_refused),
        cmocka_unit_test(a_pass_beyond_the_memory_is_refused),
        cmocka_unit_test(nan_is_an_error_with_its_layer),
        cmocka_unit_test(bias_moves_by_the_sign_of_the_summed_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
