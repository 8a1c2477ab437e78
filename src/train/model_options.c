// model_options.c - from keys to the model: sizes, rules, and what a model directory has to say about them.
//
// Routing follows the keys, never the model's name. A model that comes from a directory has its config.json's sizes: a
// key that was given must agree with them, the others take its values, so that config.yml describes what was trained.
#include <stddef.h>
#include <stdio.h>

#include "train/train.h"

typedef enum field_kind { SIZE, NUMBER, FLAG, SCORE, ROPE } field_kind;
_Static_assert(sizeof(size_t) == 8 && sizeof(double) == 8, "fields are compared as 8 bytes");
typedef struct model_key {
    const char *key;
    dpl_option_id id;
    field_kind kind;
    size_t offset;
} model_key;

// clang-format off
#define KEY(key, kind, field) {#key, DPL_OPT_##key, kind, offsetof(dpl_model_config, field)}
static const model_key model_keys[] = {
    KEY(vocab_size, SIZE, vocab), KEY(base_emb_dim, SIZE, d), KEY(base_num_decoder_layers, SIZE, n_layers),
    KEY(first_num_dense_layers, SIZE, n_dense), KEY(base_mlp_dim, SIZE, mlp_f),
    KEY(base_moe_mlp_dim, SIZE, moe_f), KEY(num_experts, SIZE, n_experts),
    KEY(num_experts_per_tok, SIZE, top_k), KEY(shared_experts, SIZE, n_shared),
    KEY(n_routing_groups, SIZE, n_groups), KEY(topk_routing_group, SIZE, top_groups),
    KEY(mtp_num_layers, SIZE, n_mtp), KEY(base_num_query_heads, SIZE, n_heads), KEY(q_lora_rank, SIZE, q_lora),
    KEY(kv_lora_rank, SIZE, kv_lora), KEY(qk_nope_head_dim, SIZE, d_nope), KEY(qk_rope_head_dim, SIZE, d_rope),
    KEY(v_head_dim, SIZE, d_v), KEY(max_position_embeddings, SIZE, max_positions),
    KEY(routed_scaling_factor, NUMBER, routed_scale), KEY(normalization_layer_epsilon, NUMBER, eps),
    KEY(rope_max_timescale, NUMBER, rope.theta), KEY(routed_bias, FLAG, routed_bias),
    KEY(norm_topk_prob, FLAG, norm_topk), KEY(logits_via_embedding, FLAG, tied),
    KEY(rope_interleave, FLAG, rope_interleave), KEY(routed_score_func, SCORE, sigmoid),
    KEY(rope_type, ROPE, rope.yarn), KEY(rope_factor, NUMBER, rope.factor), KEY(beta_fast, NUMBER, rope.beta_fast),
    KEY(beta_slow, NUMBER, rope.beta_slow), KEY(rope_truncate, FLAG, rope.truncate),
    KEY(original_max_position_embeddings, NUMBER, rope.original_positions), KEY(mscale, NUMBER, rope.mscale),
};
// clang-format on
#undef KEY

static void fill_rope(const dpl_options *o, dpl_model_config *c)
{
    dpl_rope_config *r = &c->rope;
    r->theta = o->rope_max_timescale;
    r->yarn = dpl_is(o->rope_type, "yarn");
    if (!r->yarn) return;
    r->factor = o->rope_factor;
    r->beta_fast = o->beta_fast;
    r->beta_slow = o->beta_slow;
    r->original_positions = (double)o->original_max_position_embeddings;
    r->truncate = o->rope_truncate;
    // MaxText scales only the softmax, and only where sequences became longer; both forms of mscale together
    // leave cos and sin unscaled.
    if (o->max_position_embeddings > o->original_max_position_embeddings)
        r->mscale = r->mscale_all_dim = o->mscale;
    else
        r->attention_factor = 1;
}

static void fill_experts(const dpl_options *o, dpl_model_config *c)
{
    c->n_dense = (size_t)o->first_num_dense_layers;
    c->moe_f = (size_t)(o->base_moe_mlp_dim > 0 ? o->base_moe_mlp_dim : o->base_mlp_dim);
    c->n_experts = (size_t)o->num_experts;
    c->top_k = (size_t)o->num_experts_per_tok;
    c->n_shared = (size_t)o->shared_experts;
    c->n_groups = (size_t)DPL_MAX(o->n_routing_groups, 1);
    c->top_groups = (size_t)(o->n_routing_groups > 0 ? DPL_MAX(o->topk_routing_group, 0) : 1);
    c->routed_scale = o->routed_scaling_factor;
    c->sigmoid = !dpl_is(o->routed_score_func, "softmax");
    c->routed_bias = o->routed_bias;
    c->norm_topk = o->norm_topk_prob;
}

static void fill_model(const dpl_options *o, dpl_model_config *c)
{
    dpl_model_config_init(c);
    c->vocab = (size_t)o->vocab_size;
    c->d = (size_t)o->base_emb_dim;
    c->n_layers = (size_t)o->base_num_decoder_layers;
    c->mlp_f = (size_t)o->base_mlp_dim;
    c->n_heads = (size_t)o->base_num_query_heads;
    c->q_lora = (size_t)o->q_lora_rank;
    c->kv_lora = (size_t)o->kv_lora_rank;
    c->d_nope = (size_t)o->qk_nope_head_dim;
    c->d_rope = (size_t)o->qk_rope_head_dim;
    c->d_v = (size_t)o->v_head_dim;
    c->n_mtp = (size_t)o->mtp_num_layers;
    c->max_positions = (size_t)o->max_position_embeddings;
    c->tied = o->logits_via_embedding;
    c->rope_interleave = o->rope_interleave;
    c->eps = o->normalization_layer_epsilon;
    fill_rope(o, c);
    fill_experts(o, c);
}

dpl_status dpl_config_model(const dpl_config *config, dpl_model_config *model_out)
{
    const dpl_options *o = &config->o;
    dpl_model_config c;
    if (!dpl_is(o->decoder_block, "deepseek"))
        return dpl_fail(DPL_EINVAL, "decoder_block is %s, expected deepseek", o->decoder_block);
    if (!dpl_is(o->attention_type, "mla"))
        return dpl_fail(DPL_EINVAL, "attention_type is %s, expected mla", o->attention_type);
    fill_model(o, &c);
    const bool moe = c.n_dense < c.n_layers || c.n_mtp > 0;
    if (moe && !o->routed_score_func[0])
        return dpl_fail(DPL_EINVAL, "routed_score_func is empty, expected sigmoid or softmax");
    DPL_TRY(dpl_model_config_check(&c));
    *model_out = c;
    return DPL_OK;
}

// The value of a model's field as the text of its key.
static void field_text(const model_key *key, const void *field, char *text, size_t size)
{
    static const char *const names[][2] = {
        {"false", "true"}, {"softmax", "sigmoid"}, {"default", "yarn"}};
    if (key->kind == SIZE)
        snprintf(text, size, "%zu", *(const size_t *)field);
    else if (key->kind == NUMBER)
        dpl_format(text, size, "%.17g", *(const double *)field);
    else
        snprintf(text, size, "%s", names[key->kind - FLAG][*(const bool *)field]);
}

dpl_status dpl_config_adopt(dpl_config *config, const char *dir, dpl_model_config *model_out)
{
    dpl_model_config have, want;
    dpl_dtype dtype;
    DPL_TRY(dpl_model_read_config(dir, &have, &dtype));
    fill_model(&config->o, &want);
    for (size_t i = 0; i < DPL_COUNT(model_keys); i++) {
        const model_key *key = &model_keys[i];
        const void *a = (const uint8_t *)&have + key->offset,
                   *b = (const uint8_t *)&want + key->offset;
        char text[64];
        const bool same = memcmp(a, b, key->kind >= FLAG ? sizeof(bool) : 8) == 0;
        if (same && config->text[key->id][0]) continue; // an empty choice is to be filled in
        field_text(key, a, text, sizeof text);
        if (!same && config->given[key->id])
            return dpl_fail(DPL_EINVAL, "%s=%s, but the model in %s has %s", key->key,
                            config->text[key->id], dir, text);
        DPL_TRY(dpl_config_put(config, key->key, text));
        config->given[key->id] = false;
    }
    DPL_TRY(dpl_config_put(config, "decoder_block", "deepseek"));
    DPL_TRY(dpl_config_put(config, "attention_type", "mla"));
    *model_out = have;
    return DPL_OK;
}

void dpl_options_init(const dpl_options *o, dpl_model *model)
{
    const dpl_init_rule rule = dpl_is(o->weight_init, "maxtext")  ? DPL_INIT_MAXTEXT
                               : dpl_is(o->weight_init, "normal") ? DPL_INIT_NORMAL
                                                                  : DPL_INIT_FAN_IN;
    dpl_model_init(model, rule, o->init_std, (uint64_t)o->init_weights_seed);
    dpl_model_refresh(model);
}

dpl_status dpl_options_check(const dpl_options *o)
{
    if (o->per_device_batch_size != (double)(int64_t)o->per_device_batch_size)
        return dpl_fail(DPL_EINVAL, "per_device_batch_size is %g, expected a whole number",
                        o->per_device_batch_size);
    if (o->eval_per_device_batch_size != (double)(int64_t)o->eval_per_device_batch_size)
        return dpl_fail(DPL_EINVAL, "eval_per_device_batch_size is %g, expected a whole number",
                        o->eval_per_device_batch_size);
    if (o->per_device_batch_size * (double)o->max_target_length > 1e9)
        return dpl_fail(DPL_EINVAL,
                        "per_device_batch_size times max_target_length is over 1e9 tokens");
    if (o->steps < 0 && o->learning_rate_schedule_steps < 1)
        return dpl_fail(DPL_EINVAL, "steps is -1, which takes the length of the schedule, but "
                                    "learning_rate_schedule_steps is not given");
    if (o->load_parameters_path[0] && o->load_full_state_path[0])
        return dpl_fail(DPL_EINVAL,
                        "load_parameters_path and load_full_state_path exclude each other");
    if (o->moe_use_megatron_seq_aux_loss && !dpl_is(o->routed_score_func, "sigmoid"))
        return dpl_fail(DPL_EINVAL,
                        "moe_use_megatron_seq_aux_loss needs routed_score_func=sigmoid");
    if (o->dataset_token_bytes != 0 && o->dataset_token_bytes != 2 && o->dataset_token_bytes != 4)
        return dpl_fail(DPL_EINVAL, "dataset_token_bytes is %lld, expected 0, 2 or 4",
                        (long long)o->dataset_token_bytes);
    if (!dpl_is(o->dataset_type, "synthetic") && !o->dataset_path[0])
        return dpl_fail(DPL_EINVAL, "dataset_path is empty, but dataset_type is %s",
                        o->dataset_type);
    return DPL_OK;
}

void dpl_options_warn(const dpl_options *o, const dpl_model_config *c)
{
    if (c->n_experts > 0 && c->top_k == 1 && c->norm_topk)
        dpl_log("warning: num_experts_per_tok=1 with norm_topk_prob=true makes every routing "
                "weight constant, so the "
                "router learns nothing from the loss");
    if (o->routed_bias_update_rate > 0 && !c->routed_bias)
        dpl_log("warning: routed_bias_update_rate has no effect without routed_bias=true");
    if ((size_t)o->max_target_length > c->max_positions)
        dpl_log("warning: max_target_length %lld is longer than max_position_embeddings %zu",
                (long long)o->max_target_length, c->max_positions);
}
