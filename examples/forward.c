/*
 * forward.c - opens a model and prints the likeliest next token after a few; without an argument, a
 * small new model is made in memory. Usage: forward [PATH]
 */
#include <dropless.h>
#include <stdio.h>
#include <stdlib.h>

static const char *const sizes[] = {
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
    "base_num_query_heads=4",
    "kv_lora_rank=32",
    "qk_nope_head_dim=16",
    "qk_rope_head_dim=8",
    "v_head_dim=16",
    "max_position_embeddings=64",
    "dtype=float32",
};

static dpl_status open_model(dpl_ctx *ctx, const char *path, dpl_model **model_out) {
    dpl_config *config = NULL;
    if (path) return dpl_model_open(ctx, path, NULL, model_out);
    dpl_status status = dpl_config_open(NULL, &config);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0] && status == DPL_OK; i++)
        status = dpl_config_set(config, sizes[i]);
    if (status == DPL_OK) status = dpl_model_open(ctx, NULL, config, model_out);
    dpl_config_close(&config);
    return status;
}

// Logits of every position in one call; the last row says what comes next.
static dpl_status print_next(dpl_model *model) {
    enum { N = 5 };
    const int32_t ids[N] = {70, 105, 114, 115, 116};
    dpl_model_info info = {.struct_bytes = sizeof info};
    dpl_status status = dpl_model_get_info(model, &info);
    if (status != DPL_OK) return status;
    printf("%s, %llu parameters, %llu used by a token\n", info.family,
           (unsigned long long)info.n_params, (unsigned long long)info.n_active_params);
    float *logits = malloc(N * info.vocab * sizeof *logits);
    if (!logits) return DPL_ENOMEM;
    status = dpl_model_forward(model, ids, 1, N, logits);
    if (status == DPL_OK) {
        const float *last = logits + (N - 1) * info.vocab;
        size_t best = 0;
        for (size_t i = 1; i < info.vocab; i++)
            if (last[i] > last[best]) best = i;
        printf("after \"First\": token %zu with logit %.4f\n", best, (double)last[best]);
    }
    free(logits);
    return status;
}

int main(int argc, char **argv) {
    dpl_ctx *ctx = NULL;
    dpl_model *model = NULL;
    dpl_status status = dpl_ctx_open(0, &ctx);
    if (status == DPL_OK) status = open_model(ctx, argc > 1 ? argv[1] : NULL, &model);
    if (status == DPL_OK) status = print_next(model);
    if (status != DPL_OK) fprintf(stderr, "%s: %s\n", dpl_status_text(status), dpl_error_message());
    dpl_model_close(&model);
    dpl_ctx_close(&ctx);
    return status == DPL_OK ? 0 : 1;
}
