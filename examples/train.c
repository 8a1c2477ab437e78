/*
 * train.c - trains a small model on synthetic tokens, step by step, and prints the loss. No file is
 * written. Usage: train [CONFIG.yml] [key=value ...]
 */
#include <dropless.h>
#include <stdio.h>
#include <string.h>

static const char *const defaults[] = {
    "decoder_block=deepseek",
    "attention_type=mla",
    "vocab_size=256",
    "base_emb_dim=64",
    "base_num_decoder_layers=2",
    "first_num_dense_layers=1",
    "base_mlp_dim=128",
    "base_moe_mlp_dim=32",
    "num_experts=8",
    "num_experts_per_tok=2",
    "shared_experts=1",
    "routed_score_func=sigmoid",
    "routed_bias=true",
    "routed_bias_update_rate=0.001",
    "norm_topk_prob=true",
    "base_num_query_heads=4",
    "kv_lora_rank=32",
    "qk_nope_head_dim=16",
    "qk_rope_head_dim=8",
    "v_head_dim=16",
    "max_position_embeddings=64",
    "max_target_length=64",
    "per_device_batch_size=2",
    "dtype=float32",
    "dataset_type=synthetic",
    "steps=20",
    "learning_rate=3e-3",
    "enable_checkpointing=false",
};

static dpl_status configure(int argc, char **argv, dpl_config **config_out) {
    const char *path = argc > 1 && !strchr(argv[1], '=') ? argv[1] : NULL;
    dpl_status status = dpl_config_open(path, config_out);
    for (size_t i = 0; i < sizeof defaults / sizeof defaults[0] && status == DPL_OK && !path; i++)
        status = dpl_config_set(*config_out, defaults[i]);
    for (int i = path ? 2 : 1; i < argc && status == DPL_OK; i++)
        status = dpl_config_set(*config_out, argv[i]);
    return status;
}

// dpl_trainer_run() would do all of this, and write the run directory as well.
static dpl_status train(dpl_trainer *trainer, int64_t n_steps) {
    while (dpl_trainer_next_step(trainer) < n_steps) {
        dpl_step_metrics m;
        const dpl_status status = dpl_trainer_step(trainer, &m);
        if (status != DPL_OK) return status;
        printf("step %lld  loss %.4f  gradient norm %.3f  busiest expert %.2f times the mean\n",
               (long long)m.step, m.loss, m.raw_grad_norm, m.load_max_over_mean);
    }
    return DPL_OK;
}

int main(int argc, char **argv) {
    dpl_ctx *ctx = NULL;
    dpl_config *config = NULL;
    dpl_trainer *trainer = NULL;
    long long n_steps = 0;
    dpl_status status = configure(argc, argv, &config);
    if (status == DPL_OK) status = dpl_ctx_open(0, &ctx);
    if (status == DPL_OK) status = dpl_trainer_open(ctx, config, &trainer);
    if (status == DPL_OK && sscanf(dpl_config_get(config, "steps"), "%lld", &n_steps) == 1)
        status = train(trainer, n_steps);
    if (status != DPL_OK) fprintf(stderr, "%s: %s\n", dpl_status_text(status), dpl_error_message());
    dpl_trainer_close(&trainer);
    dpl_ctx_close(&ctx);
    dpl_config_close(&config);
    return status == DPL_OK ? 0 : 1;
}
