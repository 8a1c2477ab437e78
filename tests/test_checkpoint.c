/*
 * test_checkpoint.c - runs that are interrupted: what is on the disk at any moment, and what a
 * resumed run computes.
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
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "scratch.h"
#include "trainkit.h"

static dpl_ctx *ctx;

static int setup(void **state) {
    ctx = NULL;
    return scratch_open(state) == 0 && dpl_ctx_open(2, &ctx) == DPL_OK ? 0 : -1;
}
static int teardown(void **state) {
    dpl_ctx_close(&ctx);
    return scratch_close(state);
}

// A run on text with everything that has state: shuffled data, micro-batches, MTP, biases.
static dpl_config *text_run(const char *run_name, const char *more) {
    const char *path = scratch_path("text.txt");
    uint8_t text[1500];
    for (size_t i = 0; i < sizeof text; i++) text[i] = (uint8_t)(dpl_rng_u64(8, 8, i / 3) % 64);
    scratch_write(path, text, sizeof text);
    dpl_config *config = run_config(
        "dataset_type=text", "mtp_num_layers=1", "gradient_accumulation_steps=2",
        "per_device_batch_size=2", "learning_rate_schedule_steps=12", "steps=12",
        "warmup_steps_fraction=0.2", "checkpoint_period=100", "save_checkpoint_on_start=false",
        "load_balance_loss_weight=0.01", NULL);
    run_set_all(config, more);
    run_set(config, "dataset_path=%s", path);
    run_set(config, "run_name=%s", run_name);
    return config;
}

// Trains to the end and gives the trainer back.
static dpl_trainer *train(const dpl_config *config) {
    dpl_trainer *t = run_open(ctx, config);
    check_ok(dpl_trainer_run(t, NULL));
    return t;
}

static const char *in_run(const dpl_trainer *t, const char *name) {
    return scratch_path("runs/%s/%s", t->o->run_name, name);
}

// The rows of metrics.jsonl without the fields that tell times; each must be JSON.
static json_t *rows_of(const char *path) {
    static const char *const times[] = {
        "seconds",     "tflops_per_device", "tokens_per_s_per_device", "mfu", "gmm_ms",
        "dispatch_ms", "combine_ms"};
    json_t *rows = json_array();
    char line[8192];
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    while (fgets(line, sizeof line, file)) {
        json_t *row = json_loads(line, 0, NULL);
        assert_non_null(row);
        for (size_t i = 0; i < DPL_COUNT(times); i++) json_object_del(row, times[i]);
        json_array_append_new(rows, row);
    }
    fclose(file);
    return rows;
}

/* ---- resuming ---- */

// 12 steps, and 5 + 7 in a new trainer: the same bits of weights, moments, biases and
// metrics.
static void resumed_bits(const char *more) {
    dpl_config *straight_config = text_run("straight", more), *config = text_run("resumed", more);
    run_set(straight_config, "eval_interval=3");
    run_set(config, "eval_interval=3");
    dpl_trainer *straight = train(straight_config);
    run_set(config, "steps=5");
    dpl_trainer *t = train(config);
    assert_int_equal(t->saved, 4);
    dpl_trainer_close(&t);
    run_set(config, "steps=12");
    t = run_open(ctx, config);
    assert_int_equal(dpl_trainer_next_step(t), 5);
    assert_int_equal(t->position, 20);
    check_ok(dpl_trainer_run(t, NULL));
    run_same_state(t, straight);
    json_t *a = rows_of(in_run(straight, "metrics.jsonl")),
           *b = rows_of(in_run(t, "metrics.jsonl"));
    assert_int_equal(json_array_size(a), 12 + 4);
    assert_true(json_equal(a, b));
    json_decref(a);
    json_decref(b);
    // Running again has nothing to do and changes nothing.
    dpl_trainer_close(&t);
    t = train(config);
    run_same_state(t, straight);
    dpl_trainer_close(&t);
    dpl_trainer_close(&straight);
    dpl_config_close(&config);
    dpl_config_close(&straight_config);
    check_ok(dpl_remove_tree(scratch_path("runs")));
}

static void resumed_run_repeats_the_straight_one(void **state) {
    (void)state;
    resumed_bits("dtype=float32");
    resumed_bits("dtype=bfloat16");
    resumed_bits("dtype=bfloat16 quantization=mxfp8 gmm_quantization=mxfp8");
    resumed_bits("dtype=bfloat16 quantization=nvfp4 gmm_quantization=nvfp4");
}

static void stop_at_line(void *arg, const char *line) {
    if (strncmp(line, "completed step: 3,", 18) == 0) dpl_trainer_stop(arg);
}

static void stop_at_two(void *arg, const dpl_step_metrics *m, int64_t n_steps) {
    assert_int_equal(n_steps, 12);
    if (m->step == 2) dpl_trainer_stop(arg);
}

// A stop finishes the step and writes a checkpoint; going on repeats the straight run.
static void stop_request(void **state) {
    (void)state;
    dpl_config *config = text_run("stopped", "steps=12"),
               *straight_config = text_run("straight", "steps=12");
    dpl_trainer *t = run_open(ctx, config);
    const dpl_trainer_events events = {.arg = t, .step = stop_at_two};
    check_error(dpl_trainer_run(t, &events), DPL_EINTR, "after 3 steps", "");
    dpl_trainer_close(&t);
    check_ok(dpl_checkpoint_verify(scratch_path("runs/stopped/checkpoints/2")));
    // Once more, with an evaluation due: it is given up, the checkpoint is not.
    run_set(config, "eval_interval=1");
    t = run_open(ctx, config);
    const dpl_trainer_events at_line = {.arg = t, .line = stop_at_line};
    check_error(dpl_trainer_run(t, &at_line), DPL_EINTR, "after 4 steps", "");
    dpl_trainer_close(&t);
    check_ok(dpl_checkpoint_verify(scratch_path("runs/stopped/checkpoints/3")));
    t = train(config);
    dpl_trainer *straight = train(straight_config);
    run_same_state(t, straight);
    dpl_trainer_close(&t);
    dpl_trainer_close(&straight);
    dpl_config_close(&config);
    dpl_config_close(&straight_config);
}

// A run that died after its checkpoint: rows past it, and half a line, are cut away. A line that is
// damaged costs no other.
static void metrics_are_cut_back(void **state) {
    (void)state;
    dpl_config *config = text_run("cut", "checkpoint_period=3");
    run_set(config, "save_checkpoint_on_completion=false");
    run_set(config, "steps=6"); // a checkpoint of step 3, rows to step 5
    dpl_trainer *t = train(config);
    dpl_trainer_close(&t);
    const char *path = scratch_path("runs/cut/metrics.jsonl");
    FILE *file = fopen(path, "a");
    fputs("{\"step\": 6, \"los", file);
    fclose(file);
    file = fopen(path, "r+");
    fputs("}", file); // of step 0
    fclose(file);
    run_set(config, "steps=9");
    t = train(config);
    json_t *rows = rows_of(path);
    assert_int_equal(json_array_size(rows), 8);
    for (size_t i = 0; i < 8; i++)
        assert_int_equal(json_integer_value(json_object_get(json_array_get(rows, i), "step")),
                         (json_int_t)i + 1);
    json_decref(rows);
    dpl_trainer_close(&t);
    // A new run under the name of one that left no checkpoint starts with empty files.
    check_ok(dpl_remove_tree(scratch_path("runs/cut/checkpoints")));
    run_set(config, "steps=2");
    t = train(config);
    rows = rows_of(path);
    assert_int_equal(json_array_size(rows), 2);
    json_decref(rows);
    dpl_trainer_close(&t);
    dpl_config_close(&config);
}

// What must agree between a checkpoint and the configuration that goes on with it.
static void mismatches(void **state) {
    (void)state;
    dpl_config *config = text_run("mismatch", "steps=3");
    dpl_trainer *t = train(config);
    dpl_trainer_close(&t);
    static const char *const bad[][4] = {
        {"per_device_batch_size=3", "4 sequences", "per_device_batch_size",
         "per_device_batch_size=2"},
        {"max_target_length=8", "16 tokens", "max_target_length", "max_target_length=16"},
        {"base_emb_dim=16", "base_emb_dim=16", "32", "base_emb_dim=32"},
    };
    for (size_t i = 0; i < DPL_COUNT(bad); i++) {
        run_set(config, "%s", bad[i][0]);
        check_error(dpl_trainer_open(ctx, config, &t), DPL_EINVAL, bad[i][1], bad[i][2]);
        run_set(config, "%s", bad[i][3]);
    }
    // The same global batch in other micro-batches is fine.
    run_set(config, "per_device_batch_size=4");
    run_set(config, "gradient_accumulation_steps=1");
    t = run_open(ctx, config);
    assert_int_equal(dpl_trainer_next_step(t), 3);
    dpl_trainer_close(&t);
    dpl_config_close(&config);
}

// Counts of a checkpoint that nobody can have reached are damage, not numbers to go on from.
static void counts_out_of_range(void **state) {
    (void)state;
    dpl_config *config = text_run("counts", "steps=2");
    dpl_trainer *t = train(config);
    static const char *const keys[] = {"step", "n_updates", "data_position"};
    static const json_int_t values[] = {INT64_MAX, INT64_MIN, -1, (json_int_t)1 << 60};
    const char *dir = in_run(t, "checkpoints/1"), *path = in_run(t, "checkpoints/1/trainer.json");
    for (size_t i = 0; i < DPL_COUNT(keys) * DPL_COUNT(values); i++) {
        json_t *json;
        check_ok(dpl_json_read(path, &json));
        const json_int_t before = json_integer_value(json_object_get(json, keys[i % 3]));
        json_object_set_new(json, keys[i % 3], json_integer(values[i / 3]));
        check_ok(dpl_json_write(path, json));
        check_error(dpl_checkpoint_load(t, dir), DPL_EFORMAT, "trainer.json", "out of range");
        json_object_set_new(json, keys[i % 3], json_integer(before));
        check_ok(dpl_json_write(path, json));
        json_decref(json);
    }
    check_ok(dpl_checkpoint_load(t, dir));
    dpl_trainer_close(&t);
    dpl_config_close(&config);
}

// load_parameters_path: weights only; load_full_state_path: everything; the run's own checkpoint
// wins over both (90).
static void starting_points(void **state) {
    (void)state;
    dpl_config *config = text_run("source", "steps=3");
    dpl_trainer *source = train(config), *t;
    dpl_config *weights = text_run("weights", "steps=3"), *full = text_run("full", "steps=3");
    run_set(weights, "load_parameters_path=%s",
            scratch_path("runs/source")); // a run: its newest checkpoint
    t = run_open(ctx, weights);
    assert_memory_equal(t->model->params.master, source->model->params.master,
                        t->model->params.elems * sizeof(float));
    assert_true(t->step == 0 && t->position == 0 && t->optimizer.n_updates == 0 &&
                t->optimizer.m[0] == 0);
    check_ok(dpl_trainer_run(t, NULL));
    dpl_trainer_close(&t);
    run_set(weights, "steps=4");
    t = run_open(ctx, weights);
    assert_int_equal(t->step, 3); // its own
    dpl_trainer_close(&t);
    run_set(full, "load_full_state_path=%s", scratch_path("runs/source/checkpoints/2"));
    t = run_open(ctx, full);
    run_same_state(t, source);
    dpl_trainer_close(&t);
    run_set(full, "load_full_state_path=%s", scratch_path("nowhere"));
    assert_int_not_equal(dpl_trainer_open(ctx, full, &t), DPL_OK);
    dpl_trainer_close(&source);
    dpl_config_close(&config);
    dpl_config_close(&weights);
    dpl_config_close(&full);
}

/* ---- what is on the disk ---- */

// The file holds the live biases, in fp32, under one name.
static void biases_are_saved(void **state) {
    (void)state;
    dpl_config *config = text_run("bias", "steps=3");
    dpl_trainer *t = train(config);
    dpl_st_file *file = NULL;
    check_ok(dpl_st_open(scratch_path("runs/bias/checkpoints/2/model.safetensors"), &file));
    size_t n_found = 0;
    for (size_t i = 0; i < file->n_tensors; i++)
        n_found += strstr(file->tensors[i].name, "bias") != NULL;
    assert_int_equal(n_found, 3); // two MoE layers and the MTP layer
    for (int layer = 1; layer < 4; layer++) {
        char name[96];
        snprintf(name, sizeof name, "model.layers.%d.mlp.gate.e_score_correction_bias", layer);
        const dpl_st_tensor *tensor = dpl_st_find(file, name);
        assert_non_null(tensor);
        assert_int_equal(tensor->dtype, DPL_ST_F32);
        const float *live = dpl_model_bias(t->model, (size_t)layer);
        assert_memory_equal(tensor->data, live, 8 * sizeof(float));
        assert_true(live[0] != 0 || live[1] != 0);
    }
    dpl_st_close(&file);
    dpl_trainer_close(&t);
    dpl_config_close(&config);
}

static void only_the_newest_are_kept(void **state) {
    (void)state;
    dpl_config *config = text_run("kept", "checkpoint_period=2");
    run_set(config, "max_num_checkpoints_to_keep=2");
    run_set(config, "save_checkpoint_on_start=true");
    // What a killed process left is removed when the run is opened.
    check_ok(dpl_make_dirs(scratch_path("runs/kept/checkpoints/.7.tmp")));
    scratch_text(scratch_path("runs/kept/checkpoints/.7.tmp/model.safetensors"), "half");
    dpl_trainer *t = train(config);
    assert_int_equal(scratch_count(scratch_path("runs/kept/checkpoints")), 2);
    check_ok(dpl_checkpoint_verify(scratch_path("runs/kept/checkpoints/10")));
    check_ok(dpl_checkpoint_verify(scratch_path("runs/kept/checkpoints/11")));
    dpl_trainer_close(&t);
    dpl_config_close(&config);
}

static void flip_byte(const char *path, long at) {
    FILE *file = fopen(path, "r+");
    assert_non_null(file);
    fseek(file, at, SEEK_SET);
    const int byte = fgetc(file);
    fseek(file, at, SEEK_SET);
    fputc(byte ^ 1, file);
    fclose(file);
}

// One wrong bit anywhere, a short file, a missing file: an error with the place and the good one
// before it (93).
static void damage_is_found(void **state) {
    (void)state;
    dpl_config *config = text_run("damaged", "checkpoint_period=2");
    run_set(config, "steps=5"); // checkpoints 2 and 4
    dpl_trainer *t = train(config);
    dpl_trainer_close(&t);
    static const char *const files[] = {"model.safetensors", "optimizer.safetensors",
                                        "trainer.json", "config.json"};
    for (size_t i = 0; i < DPL_COUNT(files); i++) {
        const char *path = scratch_path("runs/damaged/checkpoints/4/%s", files[i]);
        struct stat info;
        assert_int_equal(stat(path, &info), 0);
        for (int k = 0; k < 3; k++) {
            const long at = k * (info.st_size - 1) / 2;
            flip_byte(path, at);
            check_error(dpl_trainer_open(ctx, config, &t), DPL_EFORMAT, files[i], "byte");
            check_error(dpl_trainer_open(ctx, config, &t), DPL_EFORMAT, "4/", "checkpoints/2");
            flip_byte(path, at);
        }
    }
    check_ok(dpl_checkpoint_verify(scratch_path("runs/damaged/checkpoints/4")));
    const char *model = scratch_path("runs/damaged/checkpoints/4/model.safetensors");
    assert_int_equal(truncate(model, 1000), 0);
    check_error(dpl_trainer_open(ctx, config, &t), DPL_EFORMAT, "ends at byte 1000",
                "checkpoints/2");
    assert_int_equal(unlink(model), 0);
    check_error(dpl_trainer_open(ctx, config, &t), DPL_EIO, "model.safetensors", "checkpoints/2");
    scratch_text(scratch_path("runs/damaged/checkpoints/4/manifest.json"),
                 "{\"format\": \"other\"}");
    check_error(dpl_trainer_open(ctx, config, &t), DPL_EFORMAT, "manifest.json", "checkpoints/2");
    assert_int_equal(unlink(scratch_path("runs/damaged/checkpoints/4/manifest.json")), 0);
    check_error(dpl_trainer_open(ctx, config, &t), DPL_EFORMAT, "checkpoints/4", "checkpoints/2");
    assert_int_equal(rename(scratch_path("runs/damaged/checkpoints/4"), scratch_path("away")), 0);
    t = run_open(ctx, config); // as the message advises
    assert_int_equal(dpl_trainer_next_step(t), 3);
    dpl_trainer_close(&t);
    dpl_config_close(&config);
}

// Whichever write, sync or rename fails, the checkpoint before is whole and the newest, and
// nothing of the new one is left; also when it was to replace one of the same step.
static void any_write_may_fail(void **state) {
    (void)state;
    dpl_config *config = text_run("full", "mtp_num_layers=0");
    run_set(config, "num_experts=2"); // fewer tensors, fewer writes
    run_set(config, "base_num_decoder_layers=2");
    dpl_trainer *t = run_open(ctx, config);
    run_steps(t, 1);
    check_ok(dpl_trainer_save(t));
    for (int again = 0; again < 2; again++) {
        if (!again) run_steps(t, 1);
        char newest[PATH_MAX];
        size_t n = 0;
        for (dpl_status status = DPL_EIO; status != DPL_OK; n++) {
            assert_true(n < 1000);
            dpl_fault_write(n + 1);
            status = dpl_trainer_save(t);
            dpl_fault_write(0);
            if (status == DPL_OK) break;
            assert_int_equal(status, DPL_EIO);
            assert_non_null(strstr(dpl_error_message(), "checkpoint of step 1"));
            check_ok(dpl_checkpoint_newest(t->run_dir, false, newest));
            // Whole (it was verified): the earlier one, or the new one where only the last sync
            // failed.
            const bool is_new = strcmp(strrchr(newest, '/'), "/1") == 0;
            assert_true(is_new || (!again && strcmp(strrchr(newest, '/'), "/0") == 0));
            assert_int_equal(scratch_count(scratch_path("runs/full/checkpoints")), is_new ? 2 : 1);
        }
        print_message("  %zu places to fail\n", n);
        assert_true(n > 8);
        check_ok(dpl_checkpoint_newest(t->run_dir, false, newest));
        assert_string_equal(strrchr(newest, '/'), "/1");
        dpl_trainer *back = run_open(ctx, config);
        run_same_state(back, t);
        dpl_trainer_close(&back);
    }
    dpl_trainer_close(&t);
    dpl_config_close(&config);
}

// Whichever allocation fails while a run is opened or resumed: an error, and nothing leaks (the
// sanitizers look).
static void any_allocation_may_fail(void **state) {
    (void)state;
    dpl_config *config = text_run("memory", "mtp_num_layers=0");
    run_set(config, "num_experts=2");
    run_set(config, "base_num_decoder_layers=2");
    for (int resumed = 0; resumed < 2; resumed++) {
        dpl_trainer *t = NULL;
        size_t n = 0;
        for (dpl_status status = DPL_ENOMEM; status != DPL_OK; n++) {
            assert_true(n < 5000);
            dpl_fault_alloc(n + 1);
            status = dpl_trainer_open(ctx, config, &t);
            dpl_fault_alloc(0);
            if (status == DPL_OK) break;
            assert_int_equal(status, DPL_ENOMEM);
            assert_null(t);
        }
        print_message("  %zu places to fail\n", n);
        assert_true(n > 50);
        assert_int_equal(t->step, resumed);
        run_steps(t, 1);
        check_ok(dpl_trainer_save(t));
        dpl_trainer_close(&t);
    }
    dpl_config_close(&config);
}

/* ---- the files of a run ---- */

static void count_line(void *arg, const char *line) {
    int *n = arg;
    if (strncmp(line, "completed step: ", 16) == 0) n[0]++;
    if (strncmp(line, "Completed eval after train step ", 32) == 0) n[1]++;
    assert_null(strchr(line, '\n'));
}

static void run_directory(void **state) {
    (void)state;
    dpl_config *config = text_run("files", "eval_interval=2");
    run_set(config, "eval_start_step=1");
    run_set(config, "steps=6");
    run_set(config, "step_profile=true");
    int n[2] = {0, 0};
    const dpl_trainer_events events = {.arg = n, .line = count_line};
    dpl_trainer *t = run_open(ctx, config);
    check_ok(dpl_trainer_run(t, &events));
    assert_true(n[0] == 6 && n[1] == 3);
    assert_string_equal(dpl_trainer_run_dir(t), scratch_path("runs/files"));
    json_t *rows = rows_of(in_run(t, "metrics.jsonl"));
    assert_int_equal(json_array_size(rows), 9);
    const json_t *first = json_array_get(rows, 0), *eval = json_array_get(rows, 2);
    static const char *const keys[] = {"step",
                                       "loss",
                                       "lm_loss",
                                       "learning_rate",
                                       "raw_grad_norm",
                                       "load_max_over_mean",
                                       "phase_attention_ms"};
    for (size_t i = 0; i < DPL_COUNT(keys); i++) assert_non_null(json_object_get(first, keys[i]));
    assert_int_equal(json_integer_value(json_object_get(eval, "step")), 1);
    assert_int_equal(json_integer_value(json_object_get(eval, "eval_tokens")), 149);
    assert_true(json_real_value(json_object_get(eval, "eval_loss")) > 1);
    json_decref(rows);
    dpl_config *back = NULL; // config.yml starts the same run
    check_ok(dpl_config_open(in_run(t, "config.yml"), &back));
    assert_string_equal(dpl_config_get(back, "run_name"), "files");
    assert_int_equal(back->o.base_emb_dim, 32);
    dpl_config_close(&back);
    dpl_trainer_close(&t);
    dpl_config_close(&config);
}

// A loss that is not finite ends the run with an error; metrics.jsonl stays JSON, the
// checkpoint stays good.
static void not_finite_ends_the_run(void **state) {
    (void)state;
    dpl_config *config = text_run("nan", "steps=12");
    run_set(config, "steps=2");
    dpl_trainer *t = train(config);
    dpl_trainer_close(&t);
    run_set(config, "steps=12");
    t = run_open(ctx, config);
    dpl_model_values(t->model, dpl_model_param(t->model, -1, DPL_P_FINAL_NORM))[3] = NAN;
    check_error(dpl_trainer_run(t, NULL), DPL_ENUMERIC, "step 2", "");
    json_t *rows = rows_of(in_run(t, "metrics.jsonl"));
    assert_int_equal(json_array_size(rows), 3);
    assert_true(json_is_null(json_object_get(json_array_get(rows, 2), "loss")));
    json_decref(rows);
    dpl_step_metrics m = {.loss = NAN, .perplexity = INFINITY};
    json_t *row = dpl_metrics_row(t, &m);
    assert_true(json_is_null(json_object_get(row, "loss")) &&
                json_is_null(json_object_get(row, "perplexity")));
    json_decref(row);
    dpl_trainer_close(&t);
    t = train(config); // from the checkpoint, as if nothing had been
    rows = rows_of(scratch_path("runs/nan/metrics.jsonl"));
    assert_int_equal(json_array_size(rows), 12);
    json_decref(rows);
    dpl_trainer_close(&t);
    dpl_config_close(&config);
}

static void ends_by_epochs_and_by_loss(void **state) {
    (void)state;
    dpl_config *config = text_run("epochs", "num_epoch=1");
    run_set(config, "steps=1000"); // 1350 tokens are 85 windows, 21 steps of 4
    dpl_trainer *t = train(config);
    assert_int_equal(t->step, 21);
    dpl_trainer_close(&t);
    dpl_config_close(&config);
    config = text_run("target", "eval_interval=1");
    run_set(config, "target_eval_loss=100");
    t = train(config);
    assert_true(t->step == 1 && t->saved == 0);
    dpl_trainer_close(&t);
    run_set(config, "run_name=none");
    run_set(config, "enable_checkpointing=false");
    t = train(config);
    assert_false(dpl_path_exists(scratch_path("runs/none/checkpoints")));
    dpl_trainer_close(&t);
    run_set(config, "eval_split_fraction=0");
    check_error(dpl_trainer_open(ctx, config, &t), DPL_EINVAL, "eval_interval",
                "eval_split_fraction");
    dpl_config_close(&config);
}

int main(void) {
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(resumed_run_repeats_the_straight_one),
        TEST(stop_request),
        TEST(metrics_are_cut_back),
        TEST(counts_out_of_range),
        TEST(mismatches),
        TEST(starting_points),
        TEST(biases_are_saved),
        TEST(only_the_newest_are_kept),
        TEST(damage_is_found),
        TEST(any_write_may_fail),
        TEST(any_allocation_may_fail),
        TEST(run_directory),
        TEST(not_finite_ends_the_run),
        TEST(ends_by_epochs_and_by_loss),
    };
#undef TEST
    return cmocka_run_group_tests(tests, NULL, NULL);
}
