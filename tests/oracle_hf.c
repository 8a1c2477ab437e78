/*
 * oracle_hf.c - where the oracle's configurations and parameters come from: config.json, a model
 * folder, or random numbers. The names are Hugging Face's.
 */
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "oracle.h"

static double number(const json_t *object, const char *key, double fallback) {
    const json_t *value = json_object_get(object, key);
    if (json_is_true(value)) return 1;
    if (json_is_false(value)) return 0;
    return json_is_number(value) ? json_number_value(value) : fallback;
}

static int integer(const json_t *object, const char *key, int fallback) {
    return (int)number(object, key, fallback);
}

static void rope_load(const json_t *root, oracle_config *c) {
    const json_t *new_form = json_object_get(root, "rope_parameters");
    const json_t *rope = new_form ? new_form : json_object_get(root, "rope_scaling");
    c->rope_theta = number(new_form ? new_form : root, "rope_theta", 10000);
    const char *kind = json_string_value(json_object_get(rope, "rope_type"));
    if (!kind) kind = json_string_value(json_object_get(rope, "type"));
    c->yarn.on = kind && strcmp(kind, "yarn") == 0;
    c->yarn.truncate = number(rope, "truncate", 1) != 0;
    c->yarn.factor = number(rope, "factor", 1);
    c->yarn.original_length = number(rope, "original_max_position_embeddings", 4096);
    c->yarn.beta_fast = number(rope, "beta_fast", 32);
    c->yarn.beta_slow = number(rope, "beta_slow", 1);
    c->yarn.mscale = number(rope, "mscale", 0);
    c->yarn.mscale_all_dim = number(rope, "mscale_all_dim", 0);
    c->yarn.attention_factor = number(rope, "attention_factor", 0);
}

bool oracle_config_load(const char *path, oracle_config *cfg_out) {
    json_t *root = json_load_file(path, 0, NULL);
    if (!root) return false;
    const char *type = json_string_value(json_object_get(root, "model_type"));
    const char *method = json_string_value(json_object_get(root, "topk_method"));
    const bool v2 = type && strcmp(type, "deepseek_v2") == 0;
    const bool no_groups = v2 && !(method && strcmp(method, "group_limited_greedy") == 0);
    oracle_config c = {
        .V = integer(root, "vocab_size", 0),
        .D = integer(root, "hidden_size", 0),
        .L = integer(root, "num_hidden_layers", 0),
        .H = integer(root, "num_attention_heads", 0),
        .n_dense = integer(root, "first_k_dense_replace", 0),
        .F_dense = integer(root, "intermediate_size", 0),
        .F_moe = integer(root, "moe_intermediate_size", 0),
        .n_shared = integer(root, "n_shared_experts", 0),
        .q_lora = integer(root, "q_lora_rank", 0),
        .kv_lora = integer(root, "kv_lora_rank", 0),
        .nope = integer(root, "qk_nope_head_dim", 0),
        .rope = integer(root, "qk_rope_head_dim", 0),
        .v_dim = integer(root, "v_head_dim", 0),
        .eps = number(root, "rms_norm_eps", 1e-6),
        .latent_eps = 1e-6,
        .attention_bias = number(root, "attention_bias", 0) != 0,
        .rope_interleave = v2 || number(root, "rope_interleave", 1) != 0,
        .tied = number(root, "tie_word_embeddings", 0) != 0,
        .mtp_layers = integer(root, "num_nextn_predict_layers", 0),
        .mtp_weight = 0.3,
        .bias_rate = 0.001,
    };
    // DeepSeek-V2: softmax, a group's single best, norm_topk_prob ignored.
    c.router = (oracle_router){
        .E = integer(root, "n_routed_experts", 0),
        .K = integer(root, "num_experts_per_tok", 0),
        .n_group = no_groups ? 1 : integer(root, "n_group", 1),
        .topk_group = integer(root, "topk_group", 1),
        .group_best = v2 ? 1 : 2,
        .softmax = v2,
        .norm_topk = !v2 && number(root, "norm_topk_prob", 1) != 0,
        .scale = number(root, "routed_scaling_factor", 1),
    };
    rope_load(root, &c);
    json_decref(root);
    *cfg_out = c;
    return true;
}

bool oracle_params_load(const char *path, oracle_set *params_out) {
    fixture f;
    if (!fixture_open(path, &f)) return false;
    *params_out = (oracle_set){0};
    for (int i = 0; i < f.n; i++) {
        double *value = fixture_values(&f.at[i]);
        oracle_add(params_out, true, f.at[i].name, f.at[i].n_dims, f.at[i].shape, value);
        free(value);
    }
    fixture_close(&f);
    return true;
}

// Uniform with standard deviation n_in^-1/2; vectors: norms around 1, others around 0.
static void random_tensor(oracle_set *set, uint64_t seed, int n_out, int n_in, const char *format,
                          ...) {
    char name[200];
    va_list args;
    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    const int shape[2] = {n_out, n_in};
    oracle_tensor *t = oracle_add(set, true, name, n_in ? 2 : 1, shape, NULL);
    const bool is_norm = strstr(name, "norm.weight") != NULL;
    const double size = n_in ? sqrt(3.0 / n_in) : is_norm ? 0.4 : 0.1;
    for (int i = 0; i < t->n; i++) {
        const double u = oracle_random(seed + (uint64_t)set->n * 1000003u, (uint64_t)i);
        t->value[i] = is_norm + size * u;
    }
}

static void random_mlp(oracle_set *set, uint64_t seed, int D, int F, const char *name) {
    random_tensor(set, seed, F, D, "%s.gate_proj.weight", name);
    random_tensor(set, seed, F, D, "%s.up_proj.weight", name);
    random_tensor(set, seed, D, F, "%s.down_proj.weight", name);
}

static void random_attention(const oracle_config *c, uint64_t seed, int l, oracle_set *set) {
    char p[60];
    snprintf(p, sizeof p, "model.layers.%d.self_attn", l);
    const int dq = c->H * (c->nope + c->rope), kva = c->kv_lora + c->rope;
    if (c->q_lora) {
        random_tensor(set, seed, c->q_lora, c->D, "%s.q_a_proj.weight", p);
        if (c->attention_bias) random_tensor(set, seed, c->q_lora, 0, "%s.q_a_proj.bias", p);
        random_tensor(set, seed, c->q_lora, 0, "%s.q_a_layernorm.weight", p);
        random_tensor(set, seed, dq, c->q_lora, "%s.q_b_proj.weight", p);
    } else {
        random_tensor(set, seed, dq, c->D, "%s.q_proj.weight", p);
    }
    random_tensor(set, seed, kva, c->D, "%s.kv_a_proj_with_mqa.weight", p);
    if (c->attention_bias) random_tensor(set, seed, kva, 0, "%s.kv_a_proj_with_mqa.bias", p);
    random_tensor(set, seed, c->kv_lora, 0, "%s.kv_a_layernorm.weight", p);
    random_tensor(set, seed, c->H * (c->nope + c->v_dim), c->kv_lora, "%s.kv_b_proj.weight", p);
    random_tensor(set, seed, c->D, c->H * c->v_dim, "%s.o_proj.weight", p);
    if (c->attention_bias) random_tensor(set, seed, c->D, 0, "%s.o_proj.bias", p);
}

static void random_layer(const oracle_config *c, uint64_t seed, int l, oracle_set *set) {
    char p[60], name[100];
    snprintf(p, sizeof p, "model.layers.%d", l);
    const char *norms[] = {"enorm", "hnorm", "shared_head.norm"};
    if (l >= c->L) {
        for (int i = 0; i < 3; i++) random_tensor(set, seed, c->D, 0, "%s.%s.weight", p, norms[i]);
        random_tensor(set, seed, c->D, 2 * c->D, "%s.eh_proj.weight", p);
    }
    random_tensor(set, seed, c->D, 0, "%s.input_layernorm.weight", p);
    random_attention(c, seed, l, set);
    random_tensor(set, seed, c->D, 0, "%s.post_attention_layernorm.weight", p);
    snprintf(name, sizeof name, "%s.mlp", p);
    if (l < c->n_dense) {
        random_mlp(set, seed, c->D, c->F_dense, name);
        return;
    }
    random_tensor(set, seed, c->router.E, c->D, "%s.gate.weight", name);
    if (!c->router.softmax) {
        random_tensor(set, seed, c->router.E, 0, "%s.gate.e_score_correction_bias", name);
    }
    for (int e = 0; e < c->router.E; e++) {
        snprintf(name, sizeof name, "%s.mlp.experts.%d", p, e);
        random_mlp(set, seed, c->D, c->F_moe, name);
    }
    snprintf(name, sizeof name, "%s.mlp.shared_experts", p);
    if (c->n_shared) random_mlp(set, seed, c->D, c->F_moe * c->n_shared, name);
}

void oracle_params_random(const oracle_config *c, uint64_t seed, oracle_set *params_out) {
    *params_out = (oracle_set){0};
    random_tensor(params_out, seed, c->V, c->D, "model.embed_tokens.weight");
    for (int l = 0; l < c->L + c->mtp_layers; l++) random_layer(c, seed, l, params_out);
    random_tensor(params_out, seed, c->D, 0, "model.norm.weight");
    if (!c->tied) random_tensor(params_out, seed, c->V, c->D, "lm_head.weight");
}
