/*
 * test_train.c - the optimizer step: losses, gradients and biases against MaxText's own trajectory,
 * and what must not change them: micro-batches, threads, evaluation, padding; what a value that is
 * not finite may do: nothing.
 *
 * Numbers in comments are rows of known-faults.md.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "modelkit.h"
#include "scratch.h"
#include "trainkit.h"

/* ---- MaxText ---- */

static double json_at(const json_t *row, const char *key) {
    const json_t *value = json_object_get(row, key);
    assert_non_null(value);
    return json_number_value(value);
}

static void follow_maxtext(int n_batch, int n_micros) {
    const char *dir = fixture_path("maxtext_trajectory");
    dpl_config *config = run_config(NULL);
    dpl_config_close(&config);
    check_ok(dpl_config_open(NULL, &config));
    run_set(config, "base_output_directory=%s", scratch_path("runs"));
    run_set(config, "run_name=maxtext%d", n_micros);
    run_set(config, "load_parameters_path=%s", dir);
    run_set(config, "dataset_path=%s/batch.safetensors", dir);
    run_set(config, "per_device_batch_size=%d", n_batch);
    run_set(config, "gradient_accumulation_steps=%d", n_micros);
    const char *const more[] = {"dtype=float32",
                                "dataset_type=safetensors",
                                "max_target_length=32",
                                "steps=10",
                                "learning_rate=1e-3",
                                "warmup_steps_fraction=0.2",
                                "routed_bias_update_rate=0.001"};
    for (size_t i = 0; i < DPL_COUNT(more); i++) run_set(config, "%s", more[i]);
    dpl_ctx *ctx = run_ctx(2);
    dpl_trainer *t = run_open(ctx, config);

    FILE *file = fopen(fixture_path("maxtext_trajectory/metrics.jsonl"), "r");
    assert_non_null(file);
    char line[4096];
    for (int step = 0; step < 10; step++) {
        assert_non_null(fgets(line, sizeof line, file));
        json_t *row = json_loads(line, 0, NULL);
        const dpl_step_metrics m = run_steps(t, 1);
        assert_int_equal(m.step, step);
        const double loss = json_at(row, "learning/loss"),
                     norm = json_at(row, "learning/raw_grad_norm");
        printf("  step %d: loss %.7f (off by %.1e), norm %.7f (off by %.1e)\n", step, m.loss,
               m.loss - loss, m.raw_grad_norm, m.raw_grad_norm - norm);
        assert_true(fabs(m.loss - loss) < 5e-6);
        assert_true(fabs(m.raw_grad_norm - norm) < 5e-6);
        assert_true(fabs(m.grad_norm - json_at(row, "learning/grad_norm")) < 5e-6);
        assert_true(fabs(m.learning_rate - json_at(row, "learning/current_learning_rate")) < 1e-9);
        assert_true(m.total_weights == json_at(row, "learning/total_weights"));
        json_decref(row);
    }
    fclose(file);
    json_t *bias = json_load_file(fixture_path("maxtext_trajectory/bias_end.json"), 0, NULL);
    const json_t *layers = json_object_iter_value(json_object_iter(bias));
    assert_int_equal(json_array_size(layers), 2);
    for (size_t layer = 0; layer < 2; layer++)
        for (size_t e = 0; e < 8; e++) {
            const double want = json_number_value(json_array_get(json_array_get(layers, layer), e));
            assert_true(fabs(dpl_model_bias(t->model, layer + 1)[e] - want) < 5e-6);
        }
    json_decref(bias);
    dpl_trainer_close(&t);
    dpl_ctx_close(&ctx);
    dpl_config_close(&config);
}

static void ten_steps_of_maxtext(void **state) {
    (void)state;
    if (!fixture_root()) skip();
    follow_maxtext(4, 1);
    follow_maxtext(2, 2);
}

/* ---- invariance ---- */

// Bias after one step from 0: one update by the sign over all micro-batches (25).
static void check_first_bias(const dpl_trainer *t) {
    const dpl_model_config *c = &t->model->config;
    for (size_t layer = c->n_dense; layer < c->n_layers; layer++) {
        const int64_t *count = t->model->counts + layer * c->n_experts;
        int64_t all = 0;
        for (size_t e = 0; e < c->n_experts; e++) all += count[e];
        assert_int_equal(all, t->batch.n_batch * t->batch.n_seq * c->top_k);
        for (size_t e = 0; e < c->n_experts; e++) {
            const int64_t excess = all - count[e] * (int64_t)c->n_experts;
            const float want = excess > 0 ? 0.001f : excess < 0 ? -0.001f : 0.0f;
            assert_true(dpl_model_bias(t->model, layer)[e] == want);
        }
    }
}

// The same global batch in 1, 2, 4 micro-batches: loss, auxiliary losses (33, 35), norm, counts,
// bias (25).
static void micro_batches_change_nothing(void **state) {
    (void)state;
    static const int n_micros[] = {1, 2, 4};
    dpl_ctx *ctx = run_ctx(2);
    dpl_trainer *t[3];
    dpl_step_metrics m[3];
    for (int i = 0; i < 3; i++) {
        dpl_config *config = run_config("load_balance_loss_weight=0.01",
                                        "router_z_loss_weight=0.001", "z_loss_multiplier=1e-4",
                                        "mtp_num_layers=1", NULL);
        run_set(config, "run_name=micro%d", i);
        run_set(config, "per_device_batch_size=%d", 8 / n_micros[i]);
        run_set(config, "gradient_accumulation_steps=%d", n_micros[i]);
        t[i] = run_open(ctx, config);
        m[i] = run_steps(t[i], 1);
        check_first_bias(t[i]);
        assert_true(m[i].moe_lb_loss > 0.005 && m[i].router_z_loss > 0 && m[i].mtp_loss > 0 &&
                    m[i].z_loss > 0);
        assert_true(fabs(m[i].loss - m[i].lm_loss - m[i].mtp_loss - m[i].moe_lb_loss -
                         m[i].router_z_loss) < 1e-12);
        dpl_config_close(&config);
    }
    const size_t n_counts = 4 * 8;
    for (int i = 1; i < 3; i++) {
        assert_true(fabs(m[i].lm_loss - m[0].lm_loss) < 1e-6);
        assert_true(fabs(m[i].moe_lb_loss - m[0].moe_lb_loss) < 1e-7);
        assert_true(fabs(m[i].router_z_loss - m[0].router_z_loss) < 1e-7);
        assert_true(fabs(m[i].mtp_loss - m[0].mtp_loss) < 1e-6);
        assert_true(fabs(m[i].raw_grad_norm / m[0].raw_grad_norm - 1) < 1e-5);
        assert_memory_equal(t[i]->model->counts, t[0]->model->counts, n_counts * sizeof(int64_t));
        assert_memory_equal(t[i]->model->router_bias, t[0]->model->router_bias,
                            n_counts * sizeof(float));
        dpl_trainer_close(&t[i]);
    }
    dpl_trainer_close(&t[0]);
    dpl_ctx_close(&ctx);
}

static void threads_change_no_bit(void **state) {
    (void)state;
    static const int n_threads[] = {1, 2, 3, 8};
    static const char *const kinds[] = {
        "dtype=float32", "dtype=bfloat16",
        "dtype=bfloat16 quantization=mxfp8 gmm_quantization=mxfp8 mx_grad_format=e5m2",
        "dtype=bfloat16 quantization=nvfp4 gmm_quantization=nvfp4", "dtype=bfloat16 ep_wire=mxfp8"};
    for (size_t d = 0; d < DPL_COUNT(kinds); d++) {
        dpl_ctx *ctx[4];
        dpl_trainer *t[4];
        for (int i = 0; i < 4; i++) {
            dpl_config *config = run_config("mtp_num_layers=1", "load_balance_loss_weight=0.01",
                                            "gradient_accumulation_steps=2", NULL);
            run_set_all(config, kinds[d]);
            ctx[i] = run_ctx(n_threads[i]);
            t[i] = run_open(ctx[i], config);
            run_steps(t[i], 3);
            run_same_state(t[i], t[0]);
            dpl_config_close(&config);
        }
        for (int i = 0; i < 4; i++) {
            dpl_trainer_close(&t[i]);
            dpl_ctx_close(&ctx[i]);
        }
    }
}

// Evaluation leaves no trace, and starts afresh each time.
static void evaluation_changes_nothing(void **state) {
    (void)state;
    char text[4000];
    for (size_t i = 0; i < sizeof text; i++) text[i] = (char)(dpl_rng_u64(1, 2, i) % 64);
    const char *path = scratch_path("eval.txt");
    scratch_write(path, text, sizeof text);
    dpl_ctx *ctx = run_ctx(2);
    dpl_config *config = run_config("dataset_type=text", "eval_per_device_batch_size=3", NULL);
    run_set(config, "dataset_path=%s", path);
    dpl_trainer *with = run_open(ctx, config), *without = run_open(ctx, config);
    for (int i = 0; i < 3; i++) {
        dpl_eval_metrics first, second;
        run_steps(with, 1);
        run_steps(without, 1);
        check_ok(dpl_trainer_evaluate(with, &first));
        check_ok(dpl_trainer_evaluate(with, &second));
        assert_true(first.loss == second.loss && first.n_tokens == second.n_tokens);
        assert_int_equal(first.n_tokens, 399); // each of the last 400 tokens but the first
        assert_true(fabs(first.perplexity - exp(first.loss)) < 1e-9);
        run_same_state(with, without);
    }
    dpl_trainer_close(&with);
    dpl_trainer_close(&without);
    dpl_config_close(&config);
    dpl_ctx_close(&ctx);
}

/* ---- what counts ---- */

typedef struct masks {
    int32_t ids[128], targets[128], in[128], out[128];
} masks;

static void fill_masks(masks *b) {
    for (int i = 0; i < 128; i++) {
        b->ids[i] = (int32_t)(dpl_rng_u64(3, 1, (uint64_t)i) % 64);
        b->targets[i] = (int32_t)(dpl_rng_u64(3, 2, (uint64_t)i) % 64);
        b->in[i] = b->out[i] = 1;
    }
}

static dpl_trainer *open_masks(dpl_ctx *ctx, const masks *b, int n_batch, int n_micros,
                               const char *extra) {
    const char *path = scratch_path("masks.safetensors");
    run_write_batch(path, (size_t)(n_batch * n_micros), 16, b->ids, b->targets, b->in, b->out);
    dpl_config *config = run_config("dataset_type=safetensors", extra, NULL);
    run_set(config, "dataset_path=%s", path);
    run_set(config, "per_device_batch_size=%d", n_batch);
    run_set(config, "gradient_accumulation_steps=%d", n_micros);
    dpl_trainer *t = run_open(ctx, config);
    dpl_config_close(&config);
    return t;
}

// The sum over tokens that count, divided by their number, wherever they stand.
static void masked_tokens_do_not_count(void **state) {
    (void)state;
    masks b;
    fill_masks(&b);
    for (int i = 0; i < 128;
         i++) { // row 0: one token counts, row 1: three, row 2: none, row 3: all
        const int row = i / 16, col = i % 16;
        b.out[i] = row == 0 ? col == 4 : row == 1 ? col < 3 : row == 3;
    }
    dpl_ctx *ctx = run_ctx(2);
    dpl_trainer *whole = open_masks(ctx, &b, 4, 1, "run_name=whole");
    const dpl_step_metrics a = run_steps(whole, 1);
    dpl_trainer *parts = open_masks(ctx, &b, 1, 4, "run_name=parts");
    const dpl_step_metrics c = run_steps(parts, 1);
    assert_true(a.total_weights == 20 && c.total_weights == 20);
    assert_true(fabs(a.loss - c.loss) < 1e-6);
    assert_true(fabs(a.raw_grad_norm / c.raw_grad_norm - 1) < 1e-5);
    // By hand: each row alone, weighted by its tokens.
    double sum = 0;
    for (int row = 0; row < 4; row++) {
        masks one = b;
        memcpy(one.ids, b.ids + 16 * row, 16 * sizeof(int32_t));
        memcpy(one.targets, b.targets + 16 * row, 16 * sizeof(int32_t));
        memcpy(one.out, b.out + 16 * row, 16 * sizeof(int32_t));
        dpl_trainer *t = open_masks(ctx, &one, 1, 1, "run_name=one");
        const dpl_step_metrics m = run_steps(t, 1);
        sum += m.loss * m.total_weights;
        dpl_trainer_close(&t);
    }
    assert_true(fabs(a.loss - sum / 20) < 1e-6);
    dpl_trainer_close(&whole);
    dpl_trainer_close(&parts);
    dpl_ctx_close(&ctx);
}

// Padding is not routed, not counted and does not change the loss or the auxiliary
// loss.
static void padding_is_not_routed(void **state) {
    (void)state;
    masks b;
    fill_masks(&b);
    for (int i = 0; i < 64; i++)
        if (i % 16 >= 12) b.in[i] = b.out[i] = 0;
    dpl_ctx *ctx = run_ctx(2);
    dpl_trainer *padded = open_masks(ctx, &b, 4, 1, "load_balance_loss_weight=0.01");
    const dpl_step_metrics a = run_steps(padded, 1);
    int64_t all = 0;
    for (size_t e = 0; e < 8; e++) all += padded->model->counts[8 + e];
    assert_int_equal(all, 4 * 12 * 2);
    for (int i = 0; i < 64; i++) // other bytes in the padding
        if (i % 16 >= 12) b.ids[i] = 63 - b.ids[i];
    dpl_trainer *other = open_masks(ctx, &b, 4, 1, "load_balance_loss_weight=0.01");
    const dpl_step_metrics c = run_steps(other, 1);
    assert_true(a.loss == c.loss && a.moe_lb_loss == c.moe_lb_loss &&
                a.raw_grad_norm == c.raw_grad_norm);
    assert_true(a.total_weights == 48);
    // The same tokens without any padding.
    masks short_rows = b;
    for (int i = 0; i < 48; i++) {
        short_rows.ids[i] = b.ids[i / 12 * 16 + i % 12];
        short_rows.targets[i] = b.targets[i / 12 * 16 + i % 12];
        short_rows.in[i] = short_rows.out[i] = 1;
    }
    const char *path = scratch_path("short.safetensors");
    run_write_batch(path, 4, 12, short_rows.ids, short_rows.targets, NULL, NULL);
    dpl_config *config = run_config("dataset_type=safetensors", "load_balance_loss_weight=0.01",
                                    "max_target_length=12", NULL);
    run_set(config, "dataset_path=%s", path);
    dpl_trainer *bare = run_open(ctx, config);
    const dpl_step_metrics d = run_steps(bare, 1);
    assert_true(fabs(a.lm_loss - d.lm_loss) < 1e-6 &&
                fabs(a.moe_lb_loss / d.moe_lb_loss - 1) < 1e-5);
    assert_true(fabs(a.raw_grad_norm / d.raw_grad_norm - 1) < 1e-5);
    assert_memory_equal(bare->model->counts, padded->model->counts, 3 * 8 * sizeof(int64_t));
    dpl_trainer_close(&bare);
    dpl_config_close(&config);
    dpl_trainer_close(&padded);
    dpl_trainer_close(&other);
    dpl_ctx_close(&ctx);
}

// Nothing counts: loss 0, gradients 0; what remains of the update is the decay (140).
static void decay_alone(const char *mask, bool norms_decay) {
    masks b;
    fill_masks(&b);
    memset(b.out, 0, sizeof b.out);
    dpl_ctx *ctx = run_ctx(1);
    char text[128];
    snprintf(text, sizeof text, "adamw_mask=%s", mask);
    dpl_trainer *t = open_masks(ctx, &b, 4, 1, text);
    dpl_config *config = t->config;
    run_set(config, "learning_rate=0.1");
    t->schedule_length = 8;
    const size_t bytes = t->model->params.elems * sizeof(float);
    float *before = malloc(bytes);
    memcpy(before, t->model->params.master, bytes);
    const dpl_step_metrics m = run_steps(t, 1);
    assert_true(m.loss == 0 && m.raw_grad_norm == 0 && m.total_weights == 0);
    for (size_t i = 0; i < t->model->params.n; i++) {
        const dpl_param *p = &t->model->params.list[i];
        for (size_t j = p->offset; j < p->offset + p->elems; j++) {
            const double want = p->kind == DPL_NORM && !norms_decay ? before[j] : 0.99 * before[j];
            assert_true(fabs(t->model->params.master[j] - want) <= 2e-7 * fabs(want));
        }
    }
    free(before);
    dpl_trainer_close(&t);
    dpl_ctx_close(&ctx);
}

static void decay_reaches_all_but_the_mask(void **state) {
    (void)state;
    decay_alone("[]", true);
    decay_alone("[\".*norm.*\"]", false);
    decay_alone("[\"scale\"]", false); // MaxText's path
}

/* ---- values that are not finite ---- */

// Nothing is applied, and the message says where.
static void not_finite_changes_nothing(void **state) {
    (void)state;
    dpl_ctx *ctx = run_ctx(2);
    dpl_config *config = run_config("gradient_accumulation_steps=2", NULL);
    dpl_trainer *t = run_open(ctx, config), *same = run_open(ctx, config);
    run_steps(t, 2);
    run_steps(same, 2);
    const dpl_param *down = dpl_model_param(t->model, 2, DPL_P_DOWN);
    down = down ? down : dpl_model_param(t->model, 2, DPL_P_EXPERT_DOWN);
    float *weight = dpl_model_values(t->model, down), kept = weight[5];
    weight[5] = NAN;
    dpl_step_metrics m;
    check_error(dpl_trainer_step(t, &m), DPL_ENUMERIC, "step 2", "layer");
    weight[5] = kept;
    run_same_state(t, same);
    run_steps(t, 1); // and the next step is as if nothing had been
    run_steps(same, 1);
    run_same_state(t, same);

    // A gradient alone: the tensor and the expert are named.
    const dpl_param *experts = dpl_model_param(t->model, 1, DPL_P_EXPERT_GATE_UP);
    dpl_model_grad(t->model, experts)[experts->elems / 8 * 3 + 7] = INFINITY;
    double norm;
    check_error(dpl_optimizer_norm(&t->optimizer, NULL, &norm), DPL_ENUMERIC, "layer 1",
                "model.layers.1.mlp.experts.3.");
    check_error(dpl_optimizer_norm(&t->optimizer, NULL, &norm), DPL_ENUMERIC, "mlp.experts",
                "not finite");
    dpl_trainer_close(&t);
    dpl_trainer_close(&same);
    dpl_config_close(&config);
    dpl_ctx_close(&ctx);
}

/* ---- optimizers, clipping, masks ---- */

// 0 switches clipping off, a huge threshold never clips, a small one scales to the threshold.
static void clipping(void **state) {
    (void)state;
    static const char *const values[] = {"gradient_clipping_threshold=0",
                                         "gradient_clipping_threshold=1e30",
                                         "gradient_clipping_threshold=0.25"};
    dpl_ctx *ctx = run_ctx(2);
    double raw[3], after[3];
    for (int i = 0; i < 3; i++) {
        dpl_config *config = run_config(values[i], NULL);
        dpl_trainer *t = run_open(ctx, config);
        const dpl_step_metrics m = run_steps(t, 1);
        raw[i] = m.raw_grad_norm;
        after[i] = m.grad_norm;
        dpl_trainer_close(&t);
        dpl_config_close(&config);
    }
    assert_true(raw[0] == raw[1] && raw[0] == raw[2] && raw[0] > 0.3);
    assert_true(after[0] == raw[0] && after[1] == raw[0] && fabs(after[2] - 0.25) < 1e-12);
    dpl_config *config = run_config(NULL);
    check_error(dpl_config_set(config, "gradient_clipping_threshold=-1"), DPL_EINVAL,
                "gradient_clipping_threshold", "0 ..");
    check_error(dpl_config_set(config, "gradient_clipping_threshold=nan"), DPL_EINVAL,
                "gradient_clipping_threshold", "");
    dpl_config_close(&config);
    dpl_ctx_close(&ctx);
}

// One element followed in double precision over three steps.
static void adamw_by_hand(void **state) {
    (void)state;
    dpl_ctx *ctx = run_ctx(1);
    dpl_config *config = run_config("gradient_clipping_threshold=0", NULL);
    dpl_trainer *t = run_open(ctx, config);
    const dpl_param *param = dpl_model_param(t->model, 1, DPL_P_O);
    double p = dpl_model_values(t->model, param)[3], m = 0, v = 0;
    for (int n = 1; n <= 3; n++) {
        const double rate = run_steps(t, 1).learning_rate, g = dpl_model_grad(t->model, param)[3];
        const double p1 = pow(0.9, n), p2 = pow(0.95, n);
        m = 0.9 * m + 0.1 * g;
        v = 0.95 * v + 0.05 * g * g;
        p -= rate * (m / (1 - p1) / (sqrt(v / (1 - p2)) + 1e-8) + 0.1 * p);
        assert_true(fabs(dpl_model_values(t->model, param)[3] - p) < 1e-6);
    }
    dpl_trainer_close(&t);
    dpl_config_close(&config);
    dpl_ctx_close(&ctx);
}

static void only_what_is_to_be_trained(void **state) {
    (void)state;
    dpl_ctx *ctx = run_ctx(2);
    dpl_config *config = run_config("trainable_parameters_mask=[\"experts\", \"^lm_head\"]", NULL);
    dpl_trainer *t = run_open(ctx, config);
    const size_t bytes = t->model->params.elems * sizeof(float);
    float *before = malloc(bytes);
    memcpy(before, t->model->params.master, bytes);
    run_steps(t, 2);
    for (size_t i = 0; i < t->model->params.n; i++) {
        const dpl_param *p = &t->model->params.list[i];
        const bool trains = p->id == DPL_P_EXPERT_GATE_UP || p->id == DPL_P_EXPERT_DOWN ||
                            p->id == DPL_P_HEAD || p->id == DPL_P_SHARED_GATE_UP ||
                            p->id == DPL_P_SHARED_DOWN;
        const bool moved = memcmp(before + p->offset, t->model->params.master + p->offset,
                                  p->elems * 4) != 0;
        assert_int_equal(moved, trains);
    }
    free(before);
    dpl_trainer_close(&t);
    run_set(config, "trainable_parameters_mask=[\"no such tensor\"]");
    check_error(dpl_trainer_open(ctx, config, &t), DPL_EINVAL, "trainable_parameters_mask",
                "selects no tensor");
    run_set(config, "trainable_parameters_mask=[\"experts.0.\"]");
    check_error(dpl_trainer_open(ctx, config, &t), DPL_EINVAL, "select both", "mlp.experts.");
    run_set(config, "trainable_parameters_mask=[\"(\"]");
    check_error(dpl_trainer_open(ctx, config, &t), DPL_EINVAL, "regular expression", "");
    run_set(config, "trainable_parameters_mask=norm");
    check_error(dpl_trainer_open(ctx, config, &t), DPL_EINVAL, "expected a list", "");
    dpl_config_close(&config);
    dpl_ctx_close(&ctx);
}

// Steps of 0.001 from 0.75 are not lost.
static void bias_steps_are_kept(void **state) {
    (void)state;
    dpl_ctx *ctx = run_ctx(1);
    dpl_config *config = run_config("dtype=bfloat16", NULL);
    dpl_trainer *t = run_open(ctx, config);
    float *bias = dpl_model_bias(t->model, 1);
    bias[0] = 0.75f;
    memset(t->model->counts, 0, 3 * 8 * sizeof(int64_t));
    t->model->counts[8 + 1] = 16; // all on expert 1
    for (int i = 0; i < 10; i++) dpl_model_update_bias(t->model, 0.001);
    assert_true(fabs(bias[0] - 0.76) < 1e-6 && fabs(bias[1] + 0.01) < 1e-6);
    dpl_trainer_close(&t);
    dpl_config_close(&config);
    dpl_ctx_close(&ctx);
}

// One expert a token with normalized weights learns nothing in the router; the user is told.
static void one_expert_normalized_is_told(void **state) {
    (void)state;
    dpl_ctx *ctx = run_ctx(1);
    for (int norm = 0; norm < 2; norm++) {
        dpl_config *config = run_config(
            "num_experts_per_tok=1", norm ? "norm_topk_prob=true" : "norm_topk_prob=false", NULL);
        scratch_log_start();
        dpl_trainer *t = run_open(ctx, config);
        const char *log = scratch_log_stop();
        assert_int_equal(strstr(log, "router learns nothing") != NULL, norm);
        run_steps(t, 1);
        const dpl_param *router = dpl_model_param(t->model, 1, DPL_P_ROUTER);
        double squares = 0;
        for (size_t i = 0; i < router->elems; i++)
            squares += pow(dpl_model_grad(t->model, router)[i], 2);
        // score / (score + 1e-20) is 1 in fp32: what is left is rounding of the quotient rule.
        assert_true(norm ? squares < 1e-16 : squares > 1e-9);
        dpl_trainer_close(&t);
        dpl_config_close(&config);
    }
    dpl_ctx_close(&ctx);
}

// bf16 learns as well, and its compute copy follows the masters.
static void bf16_trains(void **state) {
    (void)state;
    dpl_ctx *ctx = run_ctx(2);
    dpl_config *config = run_config("dtype=bfloat16", "steps=40", NULL);
    dpl_trainer *t = run_open(ctx, config);
    const double first = run_steps(t, 1).loss, last = run_steps(t, 30).loss;
    assert_true(last < 0.6 * first);
    kit_check_copy(t->model);
    dpl_trainer_close(&t);
    dpl_config_close(&config);
    dpl_ctx_close(&ctx);
}

// Codes are those of the weights. Returns how many weights have some.
static size_t check_codes(dpl_trainer *t) {
    size_t n_quantized = 0;
    for (size_t j = 0; j < t->model->params.n; j++) {
        const dpl_param *p = &t->model->params.list[j];
        const dpl_code f = p->quant.rule.format;
        const size_t codes = dpl_quant_code_bytes(f, p->n_groups, p->n, p->k);
        const size_t scales = dpl_quant_scale_bytes(f, p->n_groups, p->n, p->k);
        const size_t bytes = p->n_groups * sizeof(float);
        if (!p->quant.codes[0]) continue;
        n_quantized++;
        dpl_quant_weight own = p->quant;
        own.tensor_scale = dpl_alloc(bytes);
        for (int way = 0; way < 2; way++)
            own.codes[way] = dpl_alloc(codes), own.scales[way] = dpl_alloc(scales);
        dpl_quant_weight_pack(t->ctx, t->model->params.master + p->offset, p->n_groups, p->n, p->k,
                              &own);
        dpl_ctx_wait(t->ctx);
        if (f == DPL_E2M1) assert_memory_equal(own.tensor_scale, p->quant.tensor_scale, bytes);
        for (int way = 0; way < 2; way++) {
            assert_memory_equal(own.codes[way], p->quant.codes[way], codes);
            assert_memory_equal(own.scales[way], p->quant.scales[way], scales);
            dpl_free(own.codes[way]), dpl_free(own.scales[way]);
        }
        dpl_free(own.tensor_scale);
    }
    return n_quantized;
}

// Codes follow the weights through steps and evaluation, and the loss falls as in bf16, but for
// what a format loses of it.
static void quantized_training(void **state) {
    (void)state;
    static const struct {
        const char *keys;
        double loses;
    } kinds[] = {{"", 0},
                 {"gmm_quantization=mxfp8 quantization=mxfp8", 0.01},
                 {"gmm_quantization=mxfp8", 0.01},
                 {"quantization=mxfp8", 0.01},
                 {"gmm_quantization=nvfp4 quantization=nvfp4", 0.05},
                 {"gmm_quantization=nvfp4", 0.05},
                 {"gmm_quantization=mxfp8 quantization=nvfp4", 0.05}};
    double first = 0, losses[DPL_COUNT(kinds)];
    for (size_t i = 0; i < DPL_COUNT(kinds); i++) {
        dpl_ctx *ctx = run_ctx(2);
        dpl_config *config = run_config("dtype=bfloat16", "steps=40", NULL);
        run_set_all(config, kinds[i].keys);
        dpl_trainer *t = run_open(ctx, config);
        if (i == 0) first = run_steps(t, 1).loss;
        losses[i] = run_steps(t, i ? 31 : 30).loss;
        assert_int_equal(check_codes(t) > 0, i > 0);
        dpl_trainer_close(&t);
        dpl_config_close(&config);
        dpl_ctx_close(&ctx);
    }
    for (size_t i = 1; i < DPL_COUNT(kinds); i++) {
        printf("%s: loss %.5f, in bf16 %.5f, at first %.5f\n", kinds[i].keys, losses[i], losses[0],
               first);
        assert_true(losses[i] != losses[0]); // something was rounded
        assert_true(fabs(losses[i] - losses[0]) < kinds[i].loses * (first - losses[0]));
    }
}

// What is not finite does not vanish in codes: weights that are NaN or infinite, one at a time.
static void keeps_what_is_not_finite(const char *format) {
    static const dpl_param_id ids[] = {DPL_P_EXPERT_GATE_UP, DPL_P_EXPERT_DOWN, DPL_P_KV_B};
    dpl_ctx *ctx = run_ctx(2);
    dpl_config *config = run_config("dtype=bfloat16", NULL);
    char keys[64];
    snprintf(keys, sizeof keys, "gmm_quantization=%s quantization=%s", format, format);
    run_set_all(config, keys);
    dpl_trainer *t = run_open(ctx, config), *same = run_open(ctx, config);
    run_steps(t, 2);
    run_steps(same, 2);
    for (size_t i = 0; i < 2 * DPL_COUNT(ids); i++) {
        const dpl_param *p = dpl_model_param(t->model, 1, ids[i / 2]);
        float *weight = dpl_model_values(t->model, p), kept = weight[5];
        dpl_step_metrics m;
        weight[5] = i % 2 ? NAN : INFINITY;
        dpl_model_requantize(t->model, p);
        check_error(dpl_trainer_step(t, &m), DPL_ENUMERIC, "step 2", "layer");
        weight[5] = kept;
        dpl_model_requantize(t->model, p);
    }
    run_steps(t, 1);
    run_steps(same, 1);
    run_same_state(t, same);
    dpl_trainer_close(&t);
    dpl_trainer_close(&same);
    dpl_config_close(&config);
    dpl_ctx_close(&ctx);
}

static void codes_keep_what_is_not_finite(void **state) {
    (void)state;
    keeps_what_is_not_finite("mxfp8");
    keeps_what_is_not_finite("nvfp4");
}

static void quantization_needs_bf16(void **state) {
    (void)state;
    dpl_ctx *ctx = run_ctx(1);
    dpl_config *config = run_config("dtype=float32", "gmm_quantization=mxfp8", NULL);
    dpl_trainer *t = NULL;
    assert_int_equal(dpl_trainer_open(ctx, config, &t), DPL_EINVAL);
    assert_non_null(strstr(dpl_error_message(), "quantization needs dtype=bfloat16"));
    assert_null(t);
    dpl_config_close(&config);
    dpl_ctx_close(&ctx);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quantized_training),
        cmocka_unit_test(codes_keep_what_is_not_finite),
        cmocka_unit_test(quantization_needs_bf16),
        cmocka_unit_test(ten_steps_of_maxtext),
        cmocka_unit_test(micro_batches_change_nothing),
        cmocka_unit_test(threads_change_no_bit),
        cmocka_unit_test(evaluation_changes_nothing),
        cmocka_unit_test(masked_tokens_do_not_count),
        cmocka_unit_test(padding_is_not_routed),
        cmocka_unit_test(decay_reaches_all_but_the_mask),
        cmocka_unit_test(not_finite_changes_nothing),
        cmocka_unit_test(clipping),
        cmocka_unit_test(adamw_by_hand),
        cmocka_unit_test(only_what_is_to_be_trained),
        cmocka_unit_test(bias_steps_are_kept),
        cmocka_unit_test(one_expert_normalized_is_told),
        cmocka_unit_test(bf16_trains),
    };
    return cmocka_run_group_tests(tests, scratch_open, scratch_close);
}
