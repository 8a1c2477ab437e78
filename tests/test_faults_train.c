/*
 * test_faults_train.c - faults that users of other training systems reported, seen from a whole
 * step or run: what is counted once, what micro-batches must not change, values that are not
 * finite, resuming, memory.
 */
#include <fcntl.h>
#include <malloc.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include "modelkit.h"
#include "scratch.h"
#include "trainkit.h"

static dpl_ctx *ctx;

static int open_all(void **state) {
    return scratch_open(state) == 0 && dpl_ctx_open(2, &ctx) == DPL_OK ? 0 : -1;
}

static int close_all(void **state) {
    dpl_ctx_close(&ctx);
    return scratch_close(state);
}

static void close_run(dpl_trainer **t, dpl_config **config) {
    dpl_trainer_close(t);
    dpl_config_close(config);
}

static float *values_of(const dpl_trainer *t, int layer, dpl_param_id id) {
    return dpl_model_values(t->model, dpl_model_param(t->model, layer, id));
}

static void zero_values(const dpl_trainer *t, int layer, dpl_param_id id) {
    memset(values_of(t, layer, id), 0, dpl_model_param(t->model, layer, id)->elems * sizeof(float));
}

// A row-major batch of ids below `limit`; each counts where `counts` says so.
static void write_batch(const char *path, size_t n_rows, int limit, bool counts) {
    int32_t ids[8 * 16], out[8 * 16];
    for (size_t i = 0; i < n_rows * 16; i++) {
        ids[i] = (int32_t)(dpl_rng_u64(31, 1, i) % (uint64_t)limit);
        out[i] = counts;
    }
    run_write_batch(path, n_rows, 16, ids, ids, NULL, out);
}

/* ---- counted once -------------------------------------------------------------------------------
 */

// The norm is that of all gradients together: of every expert, and of a tensor that is used in
// three places (embedding, head, multi-token prediction) only once. One factor clips them all.
static void the_norm_counts_every_gradient_once(void **state) {
    (void)state;
    dpl_config *config = run_config("logits_via_embedding=true", "mtp_num_layers=1", NULL);
    dpl_trainer *t = run_open(ctx, config);
    const dpl_param *experts = dpl_model_param(t->model, 1, DPL_P_EXPERT_DOWN);
    const dpl_param *embed = dpl_model_param(t->model, -1, DPL_P_EMBED);
    const size_t one = experts->elems / 8;
    float *grad = dpl_model_grad(t->model, experts);
    double norm = 0;
    dpl_model_zero_grads(t->model);
    for (size_t e = 0; e < 4; e++) grad[e * one] = (float)(2 * (e + 1));
    check_ok(dpl_optimizer_norm(&t->optimizer, NULL, &norm));
    assert_true(fabs(norm - 10.954452) < 1e-6);
    dpl_model_grad(t->model, embed)[0] = 5;
    dpl_model_grad(t->model, dpl_model_param(t->model, 3, DPL_P_MTP_ENORM))[1] = 12;
    check_ok(dpl_optimizer_norm(&t->optimizer, NULL, &norm));
    assert_true(fabs(norm - 17) < 1e-12); // 4 + 16 + 36 + 64 + 25 + 144 = 289
    assert_true(fabs(dpl_optimizer_apply(&t->optimizer, 0.01, norm) - 1) < 1e-12);
    dpl_ctx_wait(ctx);
    const float *m = t->optimizer.m;
    for (size_t e = 0; e < 4; e++)
        assert_true(fabs(m[experts->offset + e * one] * 17 - 0.2 * (double)(e + 1)) < 1e-6);
    assert_true(fabs(m[embed->offset] * 17 - 0.5) < 1e-6);
    close_run(&t, &config);
}

// Equal scores: the balance loss is its weight, the z-loss its weight times ln(8)^2, for any number
// of MoE layers and micro-batches. A layer that is left out, or counted again, shows.
static void each_layer_has_one_auxiliary_loss(void **state) {
    (void)state;
    static const char *const scopes[] = {"load_balance_scope=sequence", "load_balance_scope=batch"};
    for (int i = 0; i < 8; i++) {
        const int n_layers = i % 2 ? 4 : 2, n_micros = i / 2 % 2 ? 2 : 1;
        dpl_config *config = run_config("load_balance_loss_weight=0.5", "router_z_loss_weight=0.25",
                                        scopes[i / 4], NULL);
        run_set(config, "base_num_decoder_layers=%d", n_layers);
        run_set(config, "gradient_accumulation_steps=%d", n_micros);
        dpl_trainer *t = run_open(ctx, config);
        for (int layer = 1; layer < n_layers; layer++) zero_values(t, layer, DPL_P_ROUTER);
        const dpl_step_metrics m = run_steps(t, 1);
        assert_true(fabs(m.moe_lb_loss - 0.5) < 1e-6);
        assert_true(fabs(m.router_z_loss - 0.25 * log(8) * log(8)) < 1e-6);
        close_run(&t, &config);
    }
}

// With a head of zeros all gradients but its own come from the auxiliary losses: they are the same
// however the batch is split.
static void auxiliary_gradients_ignore_micro_batches(void **state) {
    (void)state;
    static const int n_micros[] = {1, 2, 4};
    float *first = NULL;
    for (int i = 0; i < 3; i++) {
        dpl_config *config = run_config("load_balance_loss_weight=1", "router_z_loss_weight=0.1",
                                        NULL);
        run_set(config, "per_device_batch_size=%d", 8 / n_micros[i]);
        run_set(config, "gradient_accumulation_steps=%d", n_micros[i]);
        dpl_trainer *t = run_open(ctx, config);
        zero_values(t, -1, DPL_P_HEAD);
        run_steps(t, 1);
        const size_t bytes = t->model->params.elems * sizeof(float);
        if (!first) first = memcpy(test_malloc(bytes), t->model->params.grad, bytes);
        for (size_t j = 0; j < t->model->params.n; j++) {
            const dpl_param *p = &t->model->params.list[j];
            if (p->id == DPL_P_HEAD) continue;
            const float *got = dpl_model_grad(t->model, p), *want = first + p->offset;
            double top = 0, worst = 0;
            for (size_t k = 0; k < p->elems; k++) {
                top = fmax(top, fabs(want[k]));
                worst = fmax(worst, fabs((double)got[k] - want[k]));
            }
            if (p->id == DPL_P_ROUTER) assert_true(top > 1e-3);
            assert_true(worst <= 1e-5 * top + 1e-8);
        }
        close_run(&t, &config);
    }
    test_free(first);
}

// Loads of micro-batches that add up to balance move no bias, and none moves before the step's end.
static void loads_that_cancel_move_no_bias(void **state) {
    (void)state;
    oracle_config c = scene_small_config();
    c.router = (oracle_router){.E = 4, .K = 1, .n_group = 1, .group_best = 2, .scale = 1};
    c.mtp_layers = 0;
    scene s;
    kit k;
    scene_open(&c, 33, 1, 4, false, &s);
    const dpl_model_config config = scene_config(&c);
    assert_true(kit_open(&config, DPL_F32, &s.params, 2, false, NULL, &k));
    const dpl_batch batch = scene_batch(&s);
    const dpl_loss_rule rule = scene_rule(&c);
    float *bias = dpl_model_bias(k.model, 1);
    for (int chosen = 0; chosen < 4; chosen++) {
        dpl_loss_sums sums;
        for (int e = 0; e < 4; e++) bias[e] = e == chosen ? 5 : -5;
        check_ok(dpl_model_train_micro(k.model, &batch, &rule, 1, 0, 1, &sums));
        for (int e = 0; e < 4; e++) {
            assert_true(bias[e] == (e == chosen ? 5 : -5));
            assert_int_equal(k.model->counts[4 + e], e <= chosen ? 4 : 0);
        }
    }
    for (int e = 0; e < 4; e++) bias[e] = 0.75f;
    dpl_model_update_bias(k.model, 0.001);
    for (int e = 0; e < 4; e++) assert_true(bias[e] == 0.75f);
    kit_close(&k);
    scene_close(&s);
}

// Loads are those of one step, also where no bias is balanced by them; evaluation adds nothing.
static void loads_do_not_pile_up_without_balancing(void **state) {
    (void)state;
    char text[700];
    for (size_t i = 0; i < sizeof text; i++) text[i] = (char)(dpl_rng_u64(34, 1, i) % 64);
    scratch_write(scratch_path("loads.txt"), text, sizeof text);
    for (int with_bias = 0; with_bias < 2; with_bias++) {
        dpl_config *config = run_config("dataset_type=text", "routed_bias_update_rate=0",
                                        with_bias ? "routed_bias=true" : "routed_bias=false", NULL);
        run_set(config, "dataset_path=%s", scratch_path("loads.txt"));
        dpl_trainer *t = run_open(ctx, config);
        for (int step = 0; step < 3; step++) {
            dpl_eval_metrics eval;
            run_steps(t, 1);
            check_ok(dpl_trainer_evaluate(t, &eval));
            for (size_t layer = 1; layer < 3; layer++) {
                int64_t all = 0;
                for (size_t e = 0; e < 8; e++) all += t->model->counts[layer * 8 + e];
                assert_int_equal(all, 4 * 16 * 2);
            }
            for (size_t e = 0; e < 3 * 8; e++) assert_true(t->model->router_bias[e] == 0);
        }
        close_run(&t, &config);
    }
}

/* ---- padding ------------------------------------------------------------------------------------
 */

// Rows of 16 tokens of which the first n_valid[row] are some; in micro-batches, or all at once.
static dpl_step_metrics run_padded(const int *n_valid, int n_rows, int n_micros, int64_t loads[8]) {
    int32_t ids[256], segments[256];
    for (int i = 0; i < n_rows * 16; i++) {
        ids[i] = (int32_t)(dpl_rng_u64(39, 1, (uint64_t)i) % 64);
        segments[i] = i % 16 < n_valid[i / 16];
    }
    const char *path = scratch_path("padded.safetensors");
    run_write_batch(path, (size_t)n_rows, 16, ids, ids, segments, segments);
    dpl_config *config = run_config("dataset_type=safetensors", "load_balance_loss_weight=0.01",
                                    NULL);
    run_set(config, "dataset_path=%s", path);
    run_set(config, "gradient_accumulation_steps=%d", n_micros);
    run_set(config, "per_device_batch_size=%d", n_rows / n_micros);
    dpl_trainer *t = run_open(ctx, config);
    const dpl_step_metrics m = run_steps(t, 1);
    memcpy(loads, t->model->counts + 8, 8 * sizeof *loads);
    close_run(&t, &config);
    return m;
}

// Parts of a batch may hold unequal numbers of tokens, one of them none: what counts is the whole.
static void parts_of_nothing_but_padding_are_fine(void **state) {
    (void)state;
    static const int uneven[4] = {5, 0, 8, 3};
    int64_t loads[2][8], all = 0;
    const dpl_step_metrics whole = run_padded(uneven, 4, 1, loads[0]),
                           parts = run_padded(uneven, 4, 4, loads[1]);
    assert_true(whole.total_weights == 16 && parts.total_weights == 16);
    assert_true(fabs(whole.lm_loss - parts.lm_loss) < 1e-6 && whole.lm_loss > 1);
    assert_memory_equal(loads[0], loads[1], sizeof loads[0]);
    for (size_t e = 0; e < 8; e++) all += loads[1][e];
    assert_int_equal(all, 16 * 2);
    // Four times 64 tokens, of which 48 are some, each to two experts.
    int most[16];
    for (size_t i = 0; i < 16; i++) most[i] = 12;
    run_padded(most, 16, 4, loads[0]);
    all = 0;
    for (size_t e = 0; e < 8; e++) all += loads[0][e];
    assert_int_equal(all, 384);
}

/* ---- values that are not finite -----------------------------------------------------------------
 */

// The first micro-batch is good and the second is not: nothing of the first is left behind.
static void a_bad_second_micro_batch_leaves_nothing(void **state) {
    (void)state;
    int32_t ids[64];
    for (size_t i = 0; i < 64; i++) ids[i] = i == 55 ? 63 : (int32_t)(dpl_rng_u64(35, 1, i) % 63);
    const char *path = scratch_path("second.safetensors");
    run_write_batch(path, 4, 16, ids, ids, NULL, NULL); // token 63 stands in the last row alone
    dpl_config *config = run_config("dataset_type=safetensors", "gradient_accumulation_steps=2",
                                    "per_device_batch_size=2", NULL);
    run_set(config, "dataset_path=%s", path);
    dpl_trainer *t = run_open(ctx, config), *same = run_open(ctx, config);
    run_steps(t, 2);
    run_steps(same, 2);
    float *row = values_of(t, -1, DPL_P_EMBED) + 63 * 32, kept = row[3];
    row[3] = NAN;
    dpl_step_metrics m;
    check_error(dpl_trainer_step(t, &m), DPL_ENUMERIC, "step 2", "embed");
    row[3] = kept;
    run_same_state(t, same);
    run_steps(t, 1);
    run_steps(same, 1);
    run_same_state(t, same);
    dpl_trainer_close(&same);
    close_run(&t, &config);
}

// The loss is finite and its gradients are not: weights, moments, bias and counters keep their
// bits, and the message names a tensor.
static void gradients_that_overflow_change_nothing(void **state) {
    (void)state;
    dpl_config *config = run_config("mtp_num_layers=1", "dtype=bfloat16", NULL);
    dpl_trainer *t = run_open(ctx, config), *same = run_open(ctx, config);
    run_steps(t, 2);
    run_steps(same, 2);
    const double weight = t->rule.mtp_weight;
    t->rule.mtp_weight = 1e300; // finite as a loss, infinite as a factor of fp32 gradients
    dpl_step_metrics m;
    check_error(dpl_trainer_step(t, &m), DPL_ENUMERIC, "step 2", "gradient");
    assert_non_null(strstr(dpl_error_message(), "model."));
    t->rule.mtp_weight = weight;
    run_same_state(t, same);
    run_steps(t, 1);
    run_steps(same, 1);
    run_same_state(t, same);
    dpl_trainer_close(&same);
    close_run(&t, &config);
}

/* ---- weight decay -------------------------------------------------------------------------------
 */

// No token counts, so the update is the decay alone: of all but what a mask names. The router bias
// is no parameter: it never decays.
static void decay_leaves_biases_and_the_router_bias(void **state) {
    (void)state;
    const oracle_config c = scene_small_config(); // its attention has biases
    scene s;
    kit k;
    const dpl_model_config sizes = scene_config(&c);
    scene_open(&c, 36, 1, 4, false, &s);
    assert_true(kit_open(&sizes, DPL_F32, &s.params, 2, false, NULL, &k));
    const char *dir = scratch_path("biases"), *batch = scratch_path("none.safetensors");
    check_ok(dpl_make_dirs(dir));
    check_ok(dpl_model_save(k.model, dir, DPL_F32, 0));
    write_batch(batch, 2, 64, false);
    dpl_config *config = NULL;
    check_ok(dpl_config_open(NULL, &config));
    run_set(config, "load_parameters_path=%s", dir);
    run_set(config, "dataset_path=%s", batch);
    run_set(config, "base_output_directory=%s", scratch_path("runs"));
    static const char *const rest[] = {"dtype=float32",
                                       "dataset_type=safetensors",
                                       "max_target_length=16",
                                       "per_device_batch_size=2",
                                       "steps=2",
                                       "warmup_steps_fraction=0",
                                       "learning_rate=0.1",
                                       "routed_bias_update_rate=0",
                                       "adamw_mask=[\".*norm.*\", \"bias$\"]"};
    for (size_t i = 0; i < DPL_COUNT(rest); i++) run_set(config, "%s", rest[i]);
    dpl_trainer *t = run_open(ctx, config);
    const size_t bytes = t->model->params.elems * sizeof(float);
    float *before = memcpy(test_malloc(bytes), t->model->params.master, bytes);
    for (size_t e = 0; e < 8; e++) dpl_model_bias(t->model, 1)[e] = 0.75f;
    const dpl_step_metrics m = run_steps(t, 1);
    assert_true(m.raw_grad_norm == 0);
    size_t n_biases = 0;
    for (size_t i = 0; i < t->model->params.n; i++) {
        const dpl_param *p = &t->model->params.list[i];
        const bool is_bias = p->id == DPL_P_Q_A_BIAS || p->id == DPL_P_KV_A_BIAS ||
                             p->id == DPL_P_O_BIAS;
        n_biases += is_bias;
        for (size_t j = p->offset; j < p->offset + p->elems; j++) {
            const double want = p->kind == DPL_NORM || is_bias ? before[j] : 0.99 * before[j];
            assert_true(fabs(t->model->params.master[j] - want) <= 2e-7 * fabs(want));
        }
    }
    assert_int_equal(n_biases, 9); // three in each of two layers and the MTP layer
    for (size_t e = 0; e < 8; e++) assert_true(dpl_model_bias(t->model, 1)[e] == 0.75f);
    test_free(before);
    close_run(&t, &config);
    kit_close(&k);
    scene_close(&s);
}

/* ---- a vocabulary that is no multiple of anything -----------------------------------------------
 */

// In memory the head has 1024 rows for 1000 tokens: those behind the last have no part in the
// softmax, and no choice of the largest logit can fall on them.
static void padding_of_the_vocabulary_is_never_chosen(void **state) {
    (void)state;
    oracle_config c = scene_small_config();
    c.V = 1000, c.mtp_layers = 0;
    kit k;
    const dpl_model_config config = scene_config(&c);
    assert_true(kit_open(&config, DPL_F32, NULL, 2, false, NULL, &k));
    const int32_t ids[4] = {999, 0, 500, 992}, targets[4] = {0, 500, 992, 999};
    const dpl_batch batch = {1, 4, ids, targets, NULL, NULL};
    const dpl_loss_rule rule = {0};
    dpl_loss_sums sums;
    check_ok(dpl_model_train_micro(k.model, &batch, &rule, 0.25, 0, 0, &sums));
    assert_true(fabs(sums.xent / 4 - log(1000)) < 1e-6); // a model of zeros: all are alike
    // Every logit is negative, the first one the least so; rows of padding would give 0.
    const dpl_param *embed = dpl_model_param(k.model, -1, DPL_P_EMBED);
    const dpl_disk_tensor *head = kit_disk(k.model, "lm_head.weight");
    float *values = dpl_model_values(k.model, embed), *rows = test_malloc(1000 * 24 * 4);
    for (size_t i = 0; i < embed->elems; i++) values[i] = 1;
    for (size_t i = 0; i < 24; i++)
        dpl_model_values(k.model, dpl_model_param(k.model, -1, DPL_P_FINAL_NORM))[i] = 1;
    for (size_t i = 0; i < 1000 * 24; i++) rows[i] = -(float)(1 + i / 24) / 24;
    dpl_disk_scatter(head, k.model->params.master, rows);
    float *logits = test_malloc(4 * 1000 * sizeof *logits);
    check_ok(dpl_model_evaluate(k.model, &batch, &rule, logits, &sums));
    for (size_t t = 0; t < 4; t++) {
        assert_int_equal(dpl_sample(logits + t * 1000, 1000, 0, 1, 1, t), 0);
        assert_true(fabs(logits[t * 1000] + 1) < 1e-5 &&
                    fabs(logits[t * 1000 + 999] + 1000) < 1e-2);
    }
    dpl_decoder *decoder = NULL;
    check_ok(dpl_decoder_open(k.model, 8, &decoder));
    check_ok(dpl_decoder_feed(decoder, ids, 4, logits));
    assert_int_equal(dpl_sample(logits, 1000, 0, 1, 1, 0), 0);
    for (uint64_t draw = 0; draw < 200; draw++)
        assert_true(dpl_sample(logits, 1000, 100, 1, 1, draw) < 1000);
    dpl_decoder_close(&decoder);
    test_free(rows);
    test_free(logits);
    kit_close(&k);
}

/* ---- resuming -----------------------------------------------------------------------------------
 */

static dpl_config *data_run(const char *name, const char *path, int n_batch, int n_steps) {
    dpl_config *config = run_config("dataset_type=bin", "eval_split_fraction=0",
                                    "dataset_token_bytes=2", NULL);
    run_set(config, "run_name=%s", name);
    run_set(config, "dataset_path=%s", path);
    run_set(config, "per_device_batch_size=%d", n_batch);
    run_set(config, "learning_rate_schedule_steps=%d", n_steps);
    run_set(config, "steps=%d", n_steps);
    return config;
}

// Stops in the middle of a later epoch, or of a later file, and goes on: the samples that follow
// are those of a run that was never stopped.
static void the_order_of_samples_survives_a_stop(void **state) {
    (void)state;
    static const struct {
        const char *name;
        int n_files, n_batch, stop, n_steps;
    } cases[] = {{"epochs", 1, 2, 7, 16}, {"files", 2, 1, 13, 24}};
    for (size_t i = 0; i < DPL_COUNT(cases); i++) {
        char path[256];
        snprintf(path, sizeof path, "%s", scratch_path("%s.data", cases[i].name));
        check_ok(dpl_make_dirs(path));
        for (int f = 0; f < cases[i].n_files; f++) {
            uint16_t ids[161]; // ten windows of 16 tokens; the last file has one that follows
            const size_t n = f == cases[i].n_files - 1 ? 161 : 160;
            for (size_t k = 0; k < n; k++)
                ids[k] = (uint16_t)(dpl_rng_u64(37, (uint64_t)f, k) % 64);
            scratch_write(scratch_path("%s.data/%d.bin", cases[i].name, f), ids, 2 * n);
        }
        dpl_config *config = data_run(cases[i].name, path, cases[i].n_batch, cases[i].n_steps);
        dpl_trainer *t = run_open(ctx, config);
        run_steps(t, cases[i].stop);
        check_ok(dpl_trainer_save(t));
        dpl_trainer_close(&t);
        t = run_open(ctx, config);
        assert_int_equal(dpl_trainer_next_step(t), cases[i].stop);
        assert_int_equal(t->position, cases[i].stop * cases[i].n_batch);
        run_set(config, "run_name=straight%zu", i);
        dpl_trainer *straight = run_open(ctx, config);
        run_steps(straight, cases[i].n_steps);
        run_steps(t, cases[i].n_steps - cases[i].stop);
        run_same_state(t, straight);
        dpl_trainer_close(&straight);
        close_run(&t, &config);
    }
}

// Another split of the same global batch, other numbers of threads: the same loss, the same count.
static void another_split_goes_on_with_the_same_loss(void **state) {
    (void)state;
    static const int n_micros[] = {2, 1, 4};
    dpl_config *config = run_config("load_balance_loss_weight=0.01",
                                    "gradient_accumulation_steps=2", "per_device_batch_size=2",
                                    "run_name=split", NULL);
    dpl_trainer *t = run_open(ctx, config);
    run_steps(t, 3);
    check_ok(dpl_trainer_save(t));
    dpl_trainer_close(&t);
    double loss = 0;
    for (int i = 0; i < 3; i++) {
        dpl_ctx *own = run_ctx(i + 1);
        run_set(config, "gradient_accumulation_steps=%d", n_micros[i]);
        run_set(config, "per_device_batch_size=%d", 4 / n_micros[i]);
        t = run_open(own, config);
        assert_int_equal(dpl_trainer_next_step(t), 3);
        const dpl_step_metrics m = run_steps(t, 1);
        assert_int_equal(m.step, 3);
        if (i == 0) loss = m.loss;
        assert_true(fabs(m.loss - loss) < 1e-6);
        dpl_trainer_close(&t);
        dpl_ctx_close(&own);
    }
    dpl_config_close(&config);
}

// An embedding thousands of times as long as the other tensors: each finds its moments again.
static void tensors_of_very_uneven_sizes_resume(void **state) {
    (void)state;
    dpl_config *config = run_config("vocab_size=50000", "base_emb_dim=8",
                                    "base_num_decoder_layers=2", "run_name=uneven", NULL);
    dpl_trainer *t = run_open(ctx, config);
    run_steps(t, 2);
    check_ok(dpl_trainer_save(t));
    run_set(config, "run_name=other"); // the directory is locked as long as the first is open
    run_set(config, "load_full_state_path=%s", scratch_path("runs/uneven/checkpoints/1"));
    dpl_trainer *back = run_open(ctx, config);
    run_same_state(back, t);
    run_steps(back, 1);
    run_steps(t, 1);
    run_same_state(back, t);
    dpl_trainer_close(&back);
    close_run(&t, &config);
}

// Weights alone are no full state: that is an error, not a run with fresh moments.
static void a_model_directory_is_no_full_state(void **state) {
    (void)state;
    dpl_config *config = run_config("run_name=weights", NULL);
    dpl_trainer *t = run_open(ctx, config), *other = NULL;
    const char *dir = scratch_path("exported");
    check_ok(dpl_make_dirs(dir));
    check_ok(dpl_model_save(t->model, dir, DPL_F32, 0));
    run_set(config, "run_name=full");
    run_set(config, "load_full_state_path=%s", dir);
    check_error(dpl_trainer_open(ctx, config, &other), DPL_EIO, "exported/trainer.json", "");
    assert_null(other);
    close_run(&t, &config);
}

/* ---- memory -------------------------------------------------------------------------------------
 */

typedef struct watch {
    dpl_trainer *t;
    size_t resident, used, peak;
} watch;

static void push_tokens_about(void *arg, const dpl_step_metrics *m, int64_t n_steps) {
    watch *w = arg;
    (void)n_steps;
    for (size_t e = 0; e < 3 * 8; e++)
        w->t->model->router_bias[e] = (float)(3 * dpl_rng_normal(38, (uint64_t)m->step / 8, e));
    if (m->step != 100) return;
    w->peak = dpl_arena_peak_bytes(w->t->ctx->arena);
    w->resident = scratch_resident_bytes();
    w->used = scratch_used_bytes();
}

// A thousand steps whose tokens crowd on ever other experts: the run does not grow.
static void a_long_uneven_run_does_not_grow(void **state) {
    (void)state;
    dpl_config *config = run_config("steps=1000", "enable_checkpointing=false", "base_emb_dim=16",
                                    "per_device_batch_size=2", "run_name=long", NULL);
    if (HAS_SANITIZER) run_set(config, "steps=200");
    dpl_trainer *t = run_open(ctx, config);
    watch w = {.t = t};
    const dpl_trainer_events events = {.arg = &w, .step = push_tokens_about};
    check_ok(dpl_trainer_run(t, &events));
    assert_int_equal(dpl_arena_peak_bytes(ctx->arena), w.peak);
    assert_true(scratch_used_bytes() <= w.used + 4096);
    // Sanitizers keep what was freed.
    if (!HAS_SANITIZER) assert_true(scratch_resident_bytes() <= w.resident + w.resident / 100);
    close_run(&t, &config);
}

// Tens of thousands of documents of a few bytes each: a run over them costs a few words a document,
// not an object each. A million of them would take less than 100 MB.
static void runs_over_tiny_documents_are_cheap(void **state) {
    (void)state;
    enum { N = 50000 };
    char dir[PATH_MAX], target[PATH_MAX];
    snprintf(dir, sizeof dir, "%s", scratch_path("tiny"));
    snprintf(target, sizeof target, "%s", scratch_path("target"));
    check_ok(dpl_make_dirs(dir));
    scratch_text(target, "abc");
    const int fd = open(dir, O_RDONLY | O_DIRECTORY);
    for (size_t i = 0; i < N; i++) { // links are cheaper than files
        char name[32];
        snprintf(name, sizeof name, "%zu", i);
        assert_int_equal(linkat(AT_FDCWD, target, fd, name, 0), 0);
    }
    close(fd);
    for (int packing = 0; packing < 2; packing++) {
        dpl_config *config = run_config("dataset_type=text", "vocab_size=256",
                                        packing ? "packing=true" : "packing=false", NULL);
        run_set(config, "dataset_path=%s", dir);
        malloc_trim(0);
        FILE *file = fopen("/proc/self/clear_refs", "w"); // the peak starts anew
        if (file) fputs("5", file), fclose(file);
        const size_t before = scratch_peak_bytes();
        dpl_trainer *t = run_open(ctx, config);
        const size_t bytes = scratch_peak_bytes() - before;
        print_message("%d documents, packing %d: %zu bytes at most\n", N, packing, bytes);
        if (!HAS_SANITIZER) assert_true(bytes < 100 * N + ((size_t)4 << 20));
        run_steps(t, 1);
        close_run(&t, &config);
    }
}

/* ---- counts of a public model -------------------------------------------------------------------
 */

// 671 billion parameters, of which a token uses 37: published numbers, not a formula of ours.
static void the_largest_model_has_its_published_sizes(void **state) {
    (void)state;
    json_t *object = json_pack(
        "{s:s,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i}",
        "model_type", "deepseek_v3", "vocab_size", 129280, "hidden_size", 7168, "num_hidden_layers",
        61, "num_attention_heads", 128, "num_key_value_heads", 128, "q_lora_rank", 1536,
        "kv_lora_rank", 512, "qk_nope_head_dim", 128, "qk_rope_head_dim", 64, "v_head_dim", 128,
        "intermediate_size", 18432, "first_k_dense_replace", 3, "n_routed_experts", 256,
        "num_experts_per_tok", 8, "moe_intermediate_size", 2048, "n_shared_experts", 1, "n_group",
        8, "topk_group", 4, "num_nextn_predict_layers", 1);
    assert_non_null(object);
    dpl_model_config config;
    check_ok(dpl_model_config_from_json(object, &config));
    json_decref(object);
    const double all = (double)dpl_model_param_count(&config),
                 active = (double)dpl_model_active_param_count(&config);
    print_message("%.2f billion, %.2f billion of a token\n", all * 1e-9, active * 1e-9);
    assert_true(fabs(all / 671e9 - 1) < 0.01);
    assert_true(fabs(active / 37e9 - 1) < 0.02);
    // FLOPs are those of the experts that compute: a quarter of them, a quarter of the FLOPs.
    dpl_model_config few = config, many = config, none = config;
    few.top_k = 8, many.top_k = 32, none.top_k = 4;
    const double step = dpl_model_flops(&few, 1, 64) - dpl_model_flops(&none, 1, 64);
    assert_true(fabs((dpl_model_flops(&many, 1, 64) - dpl_model_flops(&few, 1, 64)) / step - 6) <
                1e-9);
    assert_true(fabs(step / (3 * 4 * 6.0 * 64 * 2048 * 7168 * 59) - 1) < 1e-9); // 58 layers, 1 MTP
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_norm_counts_every_gradient_once),
        cmocka_unit_test(each_layer_has_one_auxiliary_loss),
        cmocka_unit_test(auxiliary_gradients_ignore_micro_batches),
        cmocka_unit_test(loads_that_cancel_move_no_bias),
        cmocka_unit_test(loads_do_not_pile_up_without_balancing),
        cmocka_unit_test(parts_of_nothing_but_padding_are_fine),
        cmocka_unit_test(a_bad_second_micro_batch_leaves_nothing),
        cmocka_unit_test(gradients_that_overflow_change_nothing),
        cmocka_unit_test(decay_leaves_biases_and_the_router_bias),
        cmocka_unit_test(padding_of_the_vocabulary_is_never_chosen),
        cmocka_unit_test(the_order_of_samples_survives_a_stop),
        cmocka_unit_test(another_split_goes_on_with_the_same_loss),
        cmocka_unit_test(tensors_of_very_uneven_sizes_resume),
        cmocka_unit_test(a_model_directory_is_no_full_state),
        cmocka_unit_test(a_long_uneven_run_does_not_grow),
        cmocka_unit_test(runs_over_tiny_documents_are_cheap),
        cmocka_unit_test(the_largest_model_has_its_published_sizes),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
