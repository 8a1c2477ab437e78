// trainkit.c - see trainkit.h.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "scratch.h"
#include "trainkit.h"

static const char *const tiny[] = {
    "decoder_block=deepseek",
    "attention_type=mla",
    "dtype=float32",
    "vocab_size=64",
    "base_emb_dim=32",
    "base_num_decoder_layers=3",
    "first_num_dense_layers=1",
    "base_mlp_dim=48",
    "base_moe_mlp_dim=16",
    "num_experts=8",
    "num_experts_per_tok=2",
    "shared_experts=1",
    "routed_score_func=sigmoid",
    "routed_bias=true",
    "routed_bias_update_rate=0.001",
    "routed_scaling_factor=2.5",
    "norm_topk_prob=true",
    "base_num_query_heads=2",
    "q_lora_rank=16",
    "kv_lora_rank=16",
    "qk_nope_head_dim=8",
    "qk_rope_head_dim=4",
    "v_head_dim=8",
    "normalization_layer_epsilon=1e-6",
    "max_position_embeddings=4096",
    "per_device_batch_size=4",
    "max_target_length=16",
    "steps=8",
    "learning_rate=0.01",
    "warmup_steps_fraction=0",
    "dataset_type=synthetic",
};

void run_set(dpl_config *config, const char *format, ...) {
    char text[4200];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    check_ok(dpl_config_set(config, text));
}

void run_set_all(dpl_config *config, const char *list) {
    for (const char *p = list, *end; p; p = *end ? end + 1 : NULL) {
        end = strchr(p, ' ') ? strchr(p, ' ') : p + strlen(p);
        if (end > p) run_set(config, "%.*s", (int)(end - p), p);
    }
}

dpl_config *run_config(const char *assignment, ...) {
    dpl_config *config = NULL;
    check_ok(dpl_config_open(NULL, &config));
    for (size_t i = 0; i < DPL_COUNT(tiny); i++) run_set(config, "%s", tiny[i]);
    run_set(config, "base_output_directory=%s", scratch_path("runs"));
    va_list args;
    va_start(args, assignment);
    for (const char *text = assignment; text; text = va_arg(args, const char *))
        run_set(config, "%s", text);
    va_end(args);
    return config;
}

dpl_ctx *run_ctx(int n_threads) {
    dpl_ctx *ctx = NULL;
    check_ok(dpl_ctx_open(n_threads, &ctx));
    return ctx;
}

dpl_trainer *run_open(dpl_ctx *ctx, const dpl_config *config) {
    dpl_trainer *t = NULL;
    check_ok(dpl_trainer_open(ctx, config, &t));
    return t;
}

dpl_step_metrics run_steps(dpl_trainer *t, int n) {
    dpl_step_metrics m = {0};
    for (int i = 0; i < n; i++) check_ok(dpl_trainer_step(t, &m));
    return m;
}

void run_same_state(const dpl_trainer *a, const dpl_trainer *b) {
    const size_t bytes = a->model->params.elems * sizeof(float);
    const dpl_model_config *c = &a->model->config;
    assert_int_equal(a->model->params.elems, b->model->params.elems);
    assert_memory_equal(a->model->params.master, b->model->params.master, bytes);
    if (a->optimizer.m) {
        assert_memory_equal(a->optimizer.m, b->optimizer.m, bytes);
        assert_memory_equal(a->optimizer.v, b->optimizer.v, bytes);
    }
    assert_memory_equal(a->model->router_bias, b->model->router_bias,
                        (c->n_layers + c->n_mtp) * c->n_experts * sizeof(float));
    assert_int_equal(a->step, b->step);
    assert_int_equal(a->position, b->position);
    assert_int_equal(a->optimizer.n_updates, b->optimizer.n_updates);
}

double run_weight_distance(const dpl_trainer *a, const dpl_trainer *b) {
    double most = 0;
    for (size_t i = 0; i < a->model->params.elems; i++)
        most = fmax(most, fabs((double)a->model->params.master[i] - b->model->params.master[i]));
    return most;
}

void run_write_batch(const char *path, size_t n_batch, size_t n_seq, const int32_t *inputs,
                     const int32_t *targets, const int32_t *input_segments,
                     const int32_t *target_segments) {
    const size_t n = n_batch * n_seq;
    int32_t *ones = malloc(n * sizeof *ones);
    for (size_t i = 0; i < n; i++) ones[i] = 1;
    const struct {
        const char *name;
        const int32_t *data;
    } planes[] = {{"inputs", inputs},
                  {"targets", targets},
                  {"inputs_segmentation", input_segments ? input_segments : ones},
                  {"targets_segmentation", target_segments ? target_segments : ones}};
    dpl_st_tensor list[DPL_COUNT(planes)];
    for (size_t i = 0; i < DPL_COUNT(planes); i++)
        list[i] = (dpl_st_tensor){.name = planes[i].name,
                                  .dtype = DPL_ST_I32,
                                  .rank = 2,
                                  .shape = {(int64_t)n_batch, (int64_t)n_seq},
                                  .data = (const uint8_t *)planes[i].data};
    check_ok(dpl_st_write(path, list, DPL_COUNT(planes), NULL, NULL));
    free(ones);
}
