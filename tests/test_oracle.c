/*
 * test_oracle.c - the proof of the judge: the oracle against Hugging Face transformers and MaxText
 * (the reference files), finite differences, and itself where two ways must agree.
 *
 * Comparisons with files skip loudly where ../shared is absent; the others always run.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "oracle.h"

// fixtures/README.md section 4, "float64 oracle with its own inv_freq".
#define BOUND_HIDDEN 3e-7
#define BOUND_GRAD   1e-6
#define BOUND_LOSS   1e-8
#define BOUND_ADAMW  1e-6

static int failures; // of the running test; each is printed, so that one run shows them all

static void check(bool good, const char *model, const char *name, double error) {
    if (good) return;
    failures++;
    print_error("%s: %s: off by %g\n", model, name, error);
}

/* ---- models against transformers ---- */

typedef struct given { // one reference folder
    oracle_config cfg;
    oracle_set params;
    oracle_batch batch;
    int *ids, *targets;
    fixture want;
} given;

static void given_open(const char *name, const char *config, given *g) {
    assert_true(oracle_config_load(fixture_path("%s/%s", name, config), &g->cfg));
    assert_true(oracle_params_load(fixture_path("%s", name), &g->params));
    assert_true(fixture_open(fixture_path("%s/reference.safetensors", name), &g->want));
    const fixture_tensor *shape = fixture_find(&g->want, "input_ids");
    g->ids = fixture_int(&g->want, "input_ids", NULL);
    g->targets = fixture_int(&g->want, "targets", NULL);
    g->batch = (oracle_batch){shape->shape[0], shape->shape[1], g->ids, g->targets, NULL};
}

static void given_close(given *g) {
    oracle_set_close(&g->params);
    fixture_close(&g->want);
    free(g->ids), free(g->targets);
}

// The bound of a tensor of the reference; negative: it is no output of the oracle.
static double bound_of(const char *name) {
    const char *not_outputs[] = {"input_ids",     "labels",      "targets", "loss_mask",
                                 "rope.inv_freq", "mtp.targets", "grad.",   "adamw"};
    for (size_t i = 0; i < sizeof not_outputs / sizeof *not_outputs; i++) {
        if (strncmp(name, not_outputs[i], strlen(not_outputs[i])) == 0) return -1;
    }
    const size_t n = strlen(name);
    if (n > 4 && strcmp(name + n - 4, ".ids") == 0) return 0;
    if (n > 7 && strcmp(name + n - 7, ".counts") == 0) return 0;
    return strncmp(name, "dhidden", 7) == 0 ? BOUND_GRAD : BOUND_HIDDEN;
}

static void compare_outputs(const char *model, const given *g, const oracle_set *out) {
    int n_compared = 0;
    double worst = 0;
    for (int i = 0; i < g->want.n; i++) {
        const fixture_tensor *t = &g->want.at[i];
        const double bound = bound_of(t->name);
        if (bound < 0) continue;
        const oracle_tensor *got = oracle_find(out, t->name);
        if (!got || got->n != (int)t->n) {
            check(false, model, t->name, INFINITY);
            continue;
        }
        double *want = fixture_values(t);
        double error = fixture_relative(t->n, got->value, want);
        if (strstr(t->name, "loss") && t->n == 1) {
            error = fabs(got->value[0] - want[0]);
            check(error <= BOUND_LOSS, model, t->name, error);
        }
        check(error <= bound, model, t->name, error);
        worst = fmax(worst, error);
        n_compared++;
        free(want);
    }
    print_message("%s: %d outputs, worst error %.1e\n", model, n_compared, worst);
    assert_true(n_compared >= 20);
}

static void compare_grads(const char *model, const given *g) {
    int n_compared = 0, n_wanted = 0;
    double worst = 0;
    for (int i = 0; i < g->want.n; i++) n_wanted += strncmp(g->want.at[i].name, "grad.", 5) == 0;
    for (int i = 0; i < g->params.n; i++) {
        const oracle_tensor *got = &g->params.at[i];
        if (!got->trainable) continue;
        char name[200];
        snprintf(name, sizeof name, "grad.%s", got->name);
        double *want = fixture_f64(&g->want, name, NULL);
        const double error = fixture_relative((size_t)got->n, got->grad, want);
        check(error <= BOUND_GRAD, model, name, error);
        worst = fmax(worst, error);
        n_compared++;
        free(want);
    }
    print_message("%s: %d gradients, worst error %.1e\n", model, n_compared, worst);
    assert_int_equal(n_compared, n_wanted);
}

static void compare_rope(const char *model, const given *g) {
    size_t n;
    double *want = fixture_f64(&g->want, "rope.inv_freq", &n), amplitude;
    double *got = calloc(n, sizeof *got);
    assert_int_equal(n, g->cfg.rope / 2);
    oracle_rope_table(&g->cfg, got, &amplitude);
    for (size_t i = 0; i < n; i++) {
        const double error = fabs(got[i] / want[i] - 1);
        check(error < 1e-6, model, "rope.inv_freq", error);
    }
    free(want), free(got);
}

static void compare_adamw(const char *model, given *g) {
    const oracle_adamw opt = {1e-3, 0.9, 0.95, 1e-8, 0, 0.1};
    double worst = 0;
    int n_compared = 0;
    for (int step = 1; step <= 3; step++) {
        oracle_zero_grads(&g->params);
        oracle_run(&g->cfg, &g->params, &g->batch, true, NULL);
        oracle_adamw_step(&opt, step, &g->params);
        for (int i = 0; i < g->params.n && step != 2; i++) {
            const oracle_tensor *got = &g->params.at[i];
            char name[200];
            snprintf(name, sizeof name, "adamw%d.%s", step, got->name);
            if (!got->trainable) continue;
            double *want = fixture_f64(&g->want, name, NULL);
            snprintf(name, sizeof name, "grad.%s", got->name);
            double *grad = fixture_f64(&g->want, name, NULL);
            for (int j = 0; j < got->n; j++) {
                const double error = fabs(got->value[j] - want[j]);
                if (fabs(grad[j]) <= 1e-9 && grad[j] != 0) continue; // rounding noise: any sign
                check(error <= BOUND_ADAMW, model, got->name, error);
                worst = fmax(worst, error);
                n_compared++;
            }
            free(want), free(grad);
        }
    }
    print_message("%s: %d parameters after AdamW, worst error %.1e\n", model, n_compared, worst);
}

static void test_transformers(void **state) {
    const char *model = *state;
    if (!fixture_root()) skip();
    const char *configs[] = {"config.json", "config.legacy.json"};
    failures = 0;
    for (int i = 0; i < 2; i++) {
        given g = {0};
        oracle_set out = {0};
        given_open(model, configs[i], &g);
        oracle_run(&g.cfg, &g.params, &g.batch, true, &out);
        compare_outputs(model, &g, &out);
        compare_grads(model, &g);
        compare_rope(model, &g);
        if (fixture_find(&g.want, "adamw1.lm_head.weight")) compare_adamw(model, &g);
        oracle_set_close(&out);
        given_close(&g);
    }
    assert_int_equal(failures, 0);
}

/* ---- ten steps of MaxText ---- */

static double metric(const json_t *line, const char *key) {
    const json_t *value = json_object_get(line, key);
    assert_true(json_is_number(value));
    return json_number_value(value);
}

// Warm-up over 2 of 10 steps, then a cosine from 1e-3 to 1e-4 (maxtext-semantics.md section 6).
static double rate_at(int t) {
    if (t < 2) return 1e-3 * t / 2;
    const double a = (1 + cos(acos(-1.0) * (t - 2) / 7)) / 2;
    return 1e-3 * a + 1e-4 * (1 - a);
}

static void check_line(const json_t *line, int t, double loss, double norm) {
    const struct {
        const char *key;
        double got, bound;
    } rows[] = {{"learning/loss", loss, 5e-6},
                {"learning/raw_grad_norm", norm, 5e-6},
                {"learning/current_learning_rate", rate_at(t), 1e-9},
                {"step", t, 0}};
    for (int i = 0; i < 4; i++) {
        const double error = fabs(rows[i].got - metric(line, rows[i].key));
        check(error <= rows[i].bound, "maxtext_trajectory", rows[i].key, error);
    }
}

static void test_maxtext(void **state) {
    (void)state;
    if (!fixture_root()) skip();
    failures = 0;
    oracle_config cfg;
    oracle_set params, out = {0};
    fixture data;
    assert_true(oracle_config_load(fixture_path("maxtext_trajectory/config.json"), &cfg));
    assert_true(oracle_params_load(fixture_path("maxtext_trajectory"), &params));
    assert_true(fixture_open(fixture_path("maxtext_trajectory/batch.safetensors"), &data));
    int *ids = fixture_int(&data, "inputs", NULL), *targets = fixture_int(&data, "targets", NULL);
    const int *shape = fixture_find(&data, "inputs")->shape;
    const oracle_batch batch = {shape[0], shape[1], ids, targets, NULL};
    FILE *metrics = fopen(fixture_path("maxtext_trajectory/metrics.jsonl"), "r");
    assert_non_null(metrics);
    for (int t = 0; t < 10; t++) {
        json_t *line = json_loadf(metrics, JSON_DISABLE_EOF_CHECK, NULL);
        assert_non_null(line);
        oracle_zero_grads(&params);
        const double loss = oracle_run(&cfg, &params, &batch, true, &out);
        const double norm = oracle_clip(&params, 1.0);
        check_line(line, t, loss, norm);
        const oracle_adamw opt = {rate_at(t), 0.9, 0.95, 1e-8, 0, 0.1};
        oracle_adamw_step(&opt, t + 1, &params);
        for (int l = cfg.n_dense; l < cfg.L; l++) {
            oracle_tensor *bias = oracle_get(&params,
                                             "model.layers.%d.mlp.gate.e_score_correction_bias", l);
            oracle_bias_update(bias->n, 0.001, oracle_get(&out, "router.%d.counts", l)->value,
                               bias->value);
        }
        oracle_set_close(&out);
        json_decref(line);
    }
    fclose(metrics);
    json_t *end = json_load_file(fixture_path("maxtext_trajectory/bias_end.json"), 0, NULL);
    json_t *want = json_object_iter_value(json_object_iter(end));
    assert_int_equal(json_array_size(want), cfg.L - cfg.n_dense);
    for (int i = 0; i < (cfg.L - cfg.n_dense) * cfg.router.E; i++) {
        const int l = i / cfg.router.E, e = i % cfg.router.E;
        const double got = oracle_get(&params, "model.layers.%d.mlp.gate.e_score_correction_bias",
                                      cfg.n_dense + l)
                               ->value[e];
        json_t *row = json_array_get(want, (size_t)l);
        const double error = fabs(got - json_number_value(json_array_get(row, (size_t)e)));
        check(error < 1e-8, "maxtext_trajectory", "router bias", error);
    }
    json_decref(end);
    free(ids), free(targets);
    fixture_close(&data);
    oracle_set_close(&params);
    assert_int_equal(failures, 0);
}

/* ---- finite differences ---- */

enum { B = 2, S = 11 };

static oracle_config small_config(void) {
    return (oracle_config){
        .V = 17,
        .D = 12,
        .L = 2,
        .H = 2,
        .n_dense = 1,
        .F_dense = 9,
        .F_moe = 5,
        .n_shared = 2,
        .router = {.E = 8,
                   .K = 3,
                   .n_group = 4,
                   .topk_group = 2,
                   .group_best = 2,
                   .norm_topk = true,
                   .scale = 2.5},
        .q_lora = 6,
        .kv_lora = 5,
        .nope = 4,
        .rope = 6,
        .v_dim = 3,
        .eps = 1e-3,
        .latent_eps = 1e-6,
        .attention_bias = true,
        .rope_interleave = true,
        .rope_theta = 100,
        .mtp_layers = 2,
        .mtp_weight = 0.3,
        .bias_rate = 0.001,
    };
}

// Two rows of packed documents; the second ends in padding. Targets stay in their document; one is
// masked.
typedef struct packed {
    int ids[B * S], targets[B * S], segments[B * S];
} packed;

static packed packed_make(uint64_t seed, int V) {
    static const int lengths[B][3] = {{4, 6, 1}, {5, 3, 0}};
    packed p;
    for (int b = 0; b < B; b++) {
        int s = 0;
        for (int doc = 0; doc < 3; doc++) {
            for (int i = 0; i < lengths[b][doc]; i++) p.segments[b * S + s++] = doc + 1;
        }
        while (s < S) p.segments[b * S + s++] = 0;
    }
    for (int i = 0; i < B * S; i++) {
        p.ids[i] = (int)((oracle_random(seed, (uint64_t)i) + 1) / 2 * V);
    }
    for (int i = 0; i < B * S; i++) {
        const bool last = i % S == S - 1 || p.segments[i + 1] != p.segments[i];
        p.targets[i] = last || p.segments[i] == 0 ? -100 : p.ids[i + 1];
    }
    p.targets[2] = -100;
    return p;
}

static double loss_at(const oracle_config *cfg, oracle_set *params, const oracle_batch *batch,
                      double *where, double step) {
    const double before = *where;
    *where = before + step;
    const double loss = oracle_run(cfg, params, batch, false, NULL);
    *where = before;
    return loss;
}

// Four elements of every tensor: its largest gradient and three others.
static void differentiate(const char *what, const oracle_config *cfg, uint64_t seed) {
    oracle_set params;
    oracle_params_random(cfg, seed, &params);
    const packed p = packed_make(seed, cfg->V);
    const oracle_batch batch = {B, S, p.ids, p.targets, p.segments};
    oracle_run(cfg, &params, &batch, true, NULL);
    double worst = 0;
    int n_zero = 0, n_checked = 0;
    const int n_tensors = params.n;
    for (int j = 0; j < params.n; j++) {
        oracle_tensor *t = &params.at[j];
        if (!t->trainable) continue;
        int top = 0;
        for (int i = 0; i < t->n; i++) top = fabs(t->grad[i]) > fabs(t->grad[top]) ? i : top;
        const double size = fabs(t->grad[top]);
        n_zero += size == 0;
        for (int k = 0; k < 4; k++) {
            const double u = (oracle_random(seed + 9, (uint64_t)(4 * j + k)) + 1) / 2;
            const int i = k == 0 ? top : (int)(u * t->n);
            const double h = 1e-5;
            const double slope = (loss_at(cfg, &params, &batch, &t->value[i], h) -
                                  loss_at(cfg, &params, &batch, &t->value[i], -h)) /
                                 (2 * h);
            const double error = fabs(slope - t->grad[i]) / fmax(size, 1e-3);
            check(error < 1e-6, what, t->name, error);
            worst = fmax(worst, error);
            n_checked++;
        }
    }
    print_message("%s, seed %d: %d elements, %d tensors without gradient, worst error %.1e\n", what,
                  (int)seed, n_checked, n_zero, worst);
    oracle_set_close(&params);
    assert_true(n_zero < n_tensors / 4); // unused experts; more would say that little was tested
}

static void test_differences(void **state) {
    (void)state;
    failures = 0;
    const oracle_config plain = small_config();
    oracle_config c = plain;
    differentiate("plain", &c, 1);
    c.balance_weight = 0.7, c.router_z_weight = 0.3, c.z_multiplier = 0.2;
    differentiate("balance loss per sequence, z-losses", &c, 2);
    c.balance_batch = true, c.router_z_weight = 0;
    differentiate("balance loss of the batch", &c, 3);
    c = plain, c.balance_weight = 0.7, c.balance_megatron = true, c.router.norm_topk = false;
    differentiate("Megatron's balance loss, weights not normalized", &c, 4);
    c = plain, c.router.softmax = true, c.router.group_best = 1, c.balance_weight = 0.7;
    c.q_lora = 0, c.n_shared = 0;
    c.tied = true, c.rope_interleave = false, c.attention_bias = false;
    differentiate("softmax, tied, half rotary, no query LoRA, no shared expert", &c, 5);
    c = plain, c.router.n_group = 1, c.router.softmax = true;
    c.yarn.on = true, c.yarn.factor = 8, c.yarn.original_length = 64, c.yarn.beta_fast = 32;
    c.yarn.beta_slow = 1, c.yarn.mscale = 0.7, c.yarn.mscale_all_dim = 1.1;
    differentiate("yarn, softmax renormalized", &c, 6);
    assert_int_equal(failures, 0);
}

/* ---- two ways that must agree ---- */

static double grad_difference(const oracle_set *a, const oracle_set *b) {
    double worst = 0;
    for (int i = 0; i < a->n; i++) {
        const oracle_tensor *t = oracle_get(b, "%s", a->at[i].name);
        worst = fmax(worst, fixture_relative((size_t)t->n, a->at[i].grad, t->grad));
    }
    return worst;
}

// Packed documents equal the same documents one to a row, padded: losses and gradients, auxiliary
// ones of batch scope included.
static void test_packing(void **state) {
    (void)state;
    oracle_config cfg = small_config();
    cfg.balance_weight = 0.7, cfg.balance_batch = true, cfg.router_z_weight = 0.3;
    oracle_set one, two;
    oracle_params_random(&cfg, 7, &one);
    oracle_params_random(&cfg, 7, &two);
    const packed p = packed_make(7, cfg.V);
    int ids[5 * S], targets[5 * S], segments[5 * S];
    for (int i = 0; i < 5 * S; i++) ids[i] = i % cfg.V, targets[i] = -100, segments[i] = 0;
    int row = -1, column = 0;
    for (int i = 0; i < B * S; i++) {
        if (p.segments[i] == 0) continue;
        if (i % S == 0 || p.segments[i] != p.segments[i - 1]) row++, column = 0;
        const int to = row * S + column++;
        ids[to] = p.ids[i], targets[to] = p.targets[i], segments[to] = 4;
    }
    assert_int_equal(row, 4);
    const oracle_batch packed_batch = {B, S, p.ids, p.targets, p.segments};
    const oracle_batch row_batch = {5, S, ids, targets, segments};
    const double a = oracle_run(&cfg, &one, &packed_batch, true, NULL);
    const double b = oracle_run(&cfg, &two, &row_batch, true, NULL);
    assert_true(fabs(a - b) < 1e-12);
    assert_true(grad_difference(&one, &two) < 1e-10);
    // And it is not so by chance: without the segments the loss is another one.
    const oracle_batch wrong = {B, S, p.ids, p.targets, NULL};
    assert_true(fabs(oracle_run(&cfg, &two, &wrong, false, NULL) - a) > 1e-4);
    oracle_set_close(&one), oracle_set_close(&two);
}

// The z-loss of the head is in `loss`, over positions with a target, and not in mtp.loss; padding
// gets nothing from attention but the bias; the total is the sum of its parts.
static void test_loss_parts(void **state) {
    (void)state;
    oracle_config cfg = small_config();
    oracle_set params, plain = {0}, with = {0};
    oracle_params_random(&cfg, 10, &params);
    const packed p = packed_make(10, cfg.V);
    const oracle_batch batch = {B, S, p.ids, p.targets, p.segments};
    oracle_run(&cfg, &params, &batch, false, &plain);
    cfg.z_multiplier = 0.2, cfg.balance_weight = 0.7, cfg.router_z_weight = 0.3;
    const double total = oracle_run(&cfg, &params, &batch, false, &with);
    const char *parts[] = {"loss", "mtp.loss", "aux.balance", "aux.router_z"};
    double sum = 0, z = 0, n = 0;
    for (int i = 0; i < 4; i++) {
        const double value = oracle_get(&with, "%s", parts[i])->value[0];
        assert_true(value > 1e-3);
        sum += i == 1 ? 0.3 * value : value;
    }
    assert_true(fabs(total - sum) < 1e-12);
    const double *logits = oracle_get(&plain, "logits")->value;
    for (int i = 0; i < B * S; i++) {
        double e = 0;
        for (int v = 0; v < cfg.V; v++) e += exp(logits[i * cfg.V + v]);
        if (p.targets[i] >= 0) z += 0.2 * log(e) * log(e), n++;
    }
    const double grown = oracle_get(&with, "loss")->value[0] - oracle_get(&plain, "loss")->value[0];
    assert_true(fabs(grown - z / n) < 1e-12);
    assert_true(oracle_get(&with, "mtp.loss")->value[0] ==
                oracle_get(&plain, "mtp.loss")->value[0]);
    const double *bias = oracle_get(&params, "model.layers.1.self_attn.o_proj.bias")->value;
    const double *last = oracle_get(&plain, "attn.1")->value + (B * S - 1) * cfg.D;
    assert_int_equal(p.segments[B * S - 1], 0);
    assert_memory_equal(last, bias, (size_t)cfg.D * sizeof *bias);
    oracle_set_close(&plain), oracle_set_close(&with), oracle_set_close(&params);
}

// A batch in which nothing has a target: loss 0, gradients exactly 0.
static void test_no_targets(void **state) {
    (void)state;
    const oracle_config cfg = small_config();
    oracle_set params;
    oracle_params_random(&cfg, 8, &params);
    packed p = packed_make(8, cfg.V);
    for (int i = 0; i < B * S; i++) p.targets[i] = -100;
    const oracle_batch batch = {B, S, p.ids, p.targets, p.segments};
    assert_true(oracle_run(&cfg, &params, &batch, true, NULL) == 0);
    for (int j = 0; j < params.n; j++) {
        for (int i = 0; i < params.at[j].n; i++) assert_true(params.at[j].grad[i] == 0);
    }
    oracle_set_close(&params);
}

/* ---- single pieces with values worked out by hand ---- */

static void test_gemm(void **state) {
    (void)state;
    const double a[6] = {1, 2, 3, 4, 5, 6}, at[6] = {1, 4, 2, 5, 3, 6};   // (2, 3)
    const double b[6] = {1, 0, 2, 1, -1, 3}, bt[6] = {1, 2, -1, 0, 1, 3}; // (3, 2)
    const double want[4] = {3, 12, 9, 24};                                // 1 + a b
    for (int i = 0; i < 4; i++) {
        double c[4] = {1, 1, 1, 1};
        oracle_gemm(i & 1, i & 2, 2, 2, 3, i & 1 ? at : a, i & 2 ? bt : b, c);
        assert_memory_equal(c, want, sizeof want);
    }
}

static void test_route(void **state) {
    (void)state;
    oracle_router r = {.E = 6, .K = 2, .n_group = 1, .group_best = 2, .scale = 3};
    r.norm_topk = true;
    oracle_routing s;
    oracle_routing_open(&s, &r, 3);
    const int segments[3] = {1, 0, 1};
    s.logits[12 + 4] = 1, s.logits[12 + 5] = 1; // of token 2; all others are equal
    oracle_route_forward(&r, 3, NULL, segments, NULL, &s);
    const int want[6] = {0, 1, -1, -1, 4, 5}; // lower id first; padding not routed
    assert_memory_equal(s.ids, want, sizeof want);
    const double weights[6] = {1.5, 1.5, 0, 0, 1.5, 1.5};
    for (int i = 0; i < 6; i++) assert_true(fabs(s.weights[i] - weights[i]) < 1e-15);
    // The bias decides who is chosen, not the weight. Groups of two: the best sum of two wins,
    // although the single best choice (expert 0) is in another group.
    const double bias[6] = {0.3, -0.9, 0.2, 0.2, 0, 0};
    r.n_group = 3, r.topk_group = 1, r.norm_topk = false;
    oracle_route_forward(&r, 1, bias, NULL, NULL, &s);
    assert_int_equal(s.ids[0], 2);
    assert_int_equal(s.ids[1], 3);
    assert_true(s.weights[0] == 1.5);
    r.group_best = 1;
    oracle_route_forward(&r, 1, bias, NULL, NULL, &s);
    assert_int_equal(s.ids[0], 0);
    // Given ids: -1 has no weight and does not count in the normalization.
    const int chosen[2] = {-1, 5};
    r.norm_topk = true;
    oracle_route_forward(&r, 1, NULL, NULL, chosen, &s);
    assert_true(s.weights[0] == 0 && fabs(s.weights[1] - 3) < 1e-15 && s.ids[0] == -1);
    oracle_routing_close(&s);
}

// A perfectly balanced router: MaxText's loss is its weight, and so is Megatron's; z = log(E)^2.
static void test_balanced(void **state) {
    (void)state;
    oracle_config c = {.router = {.E = 4, .K = 2, .n_group = 1, .scale = 1}};
    c.balance_weight = 0.01, c.router_z_weight = 0.5;
    oracle_routing s;
    oracle_routing_open(&s, &c.router, 4);
    const int chosen[8] = {0, 1, 2, 3, 0, 1, 2, 3};
    oracle_route_forward(&c.router, 4, NULL, NULL, chosen, &s);
    assert_true(fabs(oracle_balance_loss(&c, 5, 2, 2, NULL, &s) - 0.01 / 5) < 1e-15);
    assert_true(fabs(oracle_router_z_loss(&c, 5, 4, NULL, &s) - 0.1 * log(4) * log(4)) < 1e-15);
    const int segments[4] = {1, 1, 0, 0}; // the second sequence is padding: it counts nowhere
    oracle_route_forward(&c.router, 4, NULL, segments, chosen, &s);
    assert_true(fabs(oracle_balance_loss(&c, 5, 2, 2, segments, &s) - 0.01 / 5) < 1e-15);
    c.balance_megatron = true; // equal scores: its own top-K takes experts 0 and 1; P is 1/4 each
    assert_true(fabs(oracle_balance_loss(&c, 5, 2, 2, NULL, &s) - 0.01) < 1e-15);
    // Everything on two of four experts, with all of P there: twice the balanced value.
    c.balance_megatron = false;
    for (int i = 0; i < 16; i++) s.score[i] = i % 4 < 2 ? 100 : 0;
    for (int i = 0; i < 8; i++) s.ids[i] = i % 2;
    assert_true(fabs(oracle_balance_loss(&c, 1, 2, 2, NULL, &s) - 0.02) < 1e-15);
    // Each sequence on its own two experts: unbalanced by sequence, balanced as a batch.
    for (int i = 0; i < 16; i++) s.score[i] = (i % 4 < 2) == (i < 8) ? 100 : 0;
    for (int i = 0; i < 8; i++) s.ids[i] = i % 2 + (i < 4 ? 0 : 2);
    assert_true(fabs(oracle_balance_loss(&c, 1, 2, 2, NULL, &s) - 0.02) < 1e-15);
    c.balance_batch = true;
    assert_true(fabs(oracle_balance_loss(&c, 1, 2, 2, NULL, &s) - 0.01) < 1e-15);
    oracle_routing_close(&s);
}

// One MoE layer by itself, with given ids of which some are -1: a skipped slot adds nothing, an
// expert without rows has a gradient of exactly 0, and dx agrees with finite differences.
static void test_moe_layer(void **state) {
    (void)state;
    enum { T = 4, D = 5, F = 3, E = 4, K = 2 };
    double w[E * D], dw[E * D] = {0}, e_w[E][3][F * D], e_dw[E][3][F * D] = {0};
    double x[T * D], y[T * D], dy[T * D], dx[T * D];
    oracle_mlp experts[E];
    for (int i = 0; i < E * D; i++) w[i] = oracle_random(1, (uint64_t)i);
    for (int e = 0; e < E; e++) {
        for (int i = 0; i < 3 * F * D; i++) {
            (&e_w[e][0][0])[i] = oracle_random(2 + (uint64_t)e, (uint64_t)i);
        }
        experts[e] = (oracle_mlp){F,          e_w[e][0],  e_w[e][1], e_w[e][2],
                                  e_dw[e][0], e_dw[e][1], e_dw[e][2]};
    }
    for (int i = 0; i < T * D; i++) {
        x[i] = oracle_random(8, (uint64_t)i), dy[i] = oracle_random(9, (uint64_t)i);
    }
    const oracle_moe m = {{.E = E, .K = K, .n_group = 1, .norm_topk = true, .scale = 2},
                          D,
                          w,
                          NULL,
                          dw,
                          experts,
                          {0}};
    const int chosen[T * K] = {0, -1, -1, -1, 3, 1, -1, 0};
    double sums[2];
    for (int i = 0; i < T * D; i++) {
        oracle_routing s;
        for (int side = 0; side < 2; side++) {
            const double before = x[i];
            x[i] += side ? 1e-5 : -1e-5;
            oracle_routing_open(&s, &m.router, T);
            oracle_moe_layer_forward(&m, T, x, NULL, chosen, &s, y);
            x[i] = before, sums[side] = 0;
            for (int j = 0; j < T * D; j++) sums[side] += dy[j] * y[j];
            oracle_routing_close(&s);
        }
        oracle_routing_open(&s, &m.router, T);
        oracle_moe_layer_forward(&m, T, x, NULL, chosen, &s, y);
        oracle_moe_layer_backward(&m, T, x, &s, dy, dx);
        oracle_routing_close(&s);
        assert_true(fabs((sums[1] - sums[0]) / 2e-5 - dx[i]) < 1e-8);
    }
    for (int i = 0; i < 3 * F * D; i++) assert_true((&e_dw[2][0][0])[i] == 0);
    for (int d = 0; d < D; d++) assert_true(y[D + d] == 0 && dx[D + d] == 0);
    // A weight normalized over one slot is a constant: no gradient for expert 0's router row.
    assert_true(e_dw[3][0][0] != 0 && fabs(dw[0]) < 1e-12 && fabs(dw[3 * D]) > 1e-6);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gemm),
        cmocka_unit_test(test_route),
        cmocka_unit_test(test_balanced),
        cmocka_unit_test(test_moe_layer),
        cmocka_unit_test(test_packing),
        cmocka_unit_test(test_loss_parts),
        cmocka_unit_test(test_no_targets),
        cmocka_unit_test(test_differences),
        cmocka_unit_test(test_maxtext),
        {"deepseek_v3", test_transformers, NULL, NULL, "deepseek_v3"},
        {"deepseek_v3_noqlora", test_transformers, NULL, NULL, "deepseek_v3_noqlora"},
        {"deepseek_v3_yarn", test_transformers, NULL, NULL, "deepseek_v3_yarn"},
        {"deepseek_v3_halfrope", test_transformers, NULL, NULL, "deepseek_v3_halfrope"},
        {"deepseek_v3_bf16", test_transformers, NULL, NULL, "deepseek_v3_bf16"},
        {"deepseek_v3_mtp", test_transformers, NULL, NULL, "deepseek_v3_mtp"},
        {"deepseek_v2", test_transformers, NULL, NULL, "deepseek_v2"},
        {"deepseek_v2_group", test_transformers, NULL, NULL, "deepseek_v2_group"},
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
