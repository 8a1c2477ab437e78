// model_options.c - from keys to the model: sizes, rules, and what a model directory says of them.
//
// Routing follows the keys, never the model's name. A model from a directory has its config.json's
// sizes: a key that was given must agree, the others take its values, for config.yml to be true.
#include <math.h>
#include <stddef.h>
#include <stdio.h>

#include "train/train.h"

// WHOLE: a double from an integer. Names of what false and true stand for begin with FLAG's.
typedef enum field_kind { SIZE, NUMBER, WHOLE, FLAG, SCORE, ROPE } field_kind;
static const char *const names[][2] = {
    {"false", "true"}, {"softmax", "sigmoid"}, {"default", "yarn"}};
_Static_assert(sizeof(size_t) == 8 && sizeof(double) == 8, "fields are copied as 8 bytes");
typedef struct model_key {
    const char *key;
    dpl_option_id id;
    field_kind kind;
    size_t option, field; // offsets
} model_key;

// clang-format off
#define KEY(key, kind, field) \
    {#key, DPL_OPT_##key, kind, offsetof(dpl_options, key), offsetof(dpl_model_config, field)}
static const model_key model_keys[] = {
    KEY(vocab_size, SIZE, vocab), KEY(base_emb_dim, SIZE, d),
    KEY(base_num_decoder_layers, SIZE, n_layers), KEY(first_num_dense_layers, SIZE, n_dense),
    KEY(base_mlp_dim, SIZE, mlp_f), KEY(base_moe_mlp_dim, SIZE, moe_f),
    KEY(num_experts, SIZE, n_experts), KEY(num_experts_per_tok, SIZE, top_k),
    KEY(shared_experts, SIZE, n_shared), KEY(n_routing_groups, SIZE, n_groups),
    KEY(topk_routing_group, SIZE, top_groups), KEY(mtp_num_layers, SIZE, n_mtp),
    KEY(base_num_query_heads, SIZE, n_heads), KEY(q_lora_rank, SIZE, q_lora),
    KEY(kv_lora_rank, SIZE, kv_lora), KEY(qk_nope_head_dim, SIZE, d_nope),
    KEY(qk_rope_head_dim, SIZE, d_rope), KEY(v_head_dim, SIZE, d_v),
    KEY(max_position_embeddings, SIZE, max_positions),
    KEY(routed_scaling_factor, NUMBER, routed_scale), KEY(normalization_layer_epsilon, NUMBER, eps),
    KEY(routed_bias, FLAG, routed_bias), KEY(norm_topk_prob, FLAG, norm_topk),
    KEY(logits_via_embedding, FLAG, tied), KEY(rope_interleave, FLAG, rope_interleave),
    KEY(routed_score_func, SCORE, sigmoid), KEY(rope_max_timescale, NUMBER, rope.theta),
    KEY(rope_type, ROPE, rope.yarn), // what follows has a meaning only with yarn
    KEY(rope_factor, NUMBER, rope.factor), KEY(beta_fast, NUMBER, rope.beta_fast),
    KEY(beta_slow, NUMBER, rope.beta_slow), KEY(rope_truncate, FLAG, rope.truncate),
    KEY(original_max_position_embeddings, WHOLE, rope.original_positions),
    KEY(mscale, NUMBER, rope.mscale),
};
#undef KEY
// clang-format on

static void fill_field(const model_key *key, const dpl_options *o, dpl_model_config *c) {
    const void *from = (const uint8_t *)o + key->option;
    void *to = (uint8_t *)c + key->field;
    if (key->kind == WHOLE) *(double *)to = (double)*(const int64_t *)from;
    else if (key->kind > FLAG)
        *(bool *)to = !dpl_is(*(const char *const *)from, names[key->kind - FLAG][0]);
    else memcpy(to, from, key->kind == FLAG ? sizeof(bool) : 8);
}

static void fill_model(const dpl_options *o, dpl_model_config *c) {
    dpl_model_config_init(c);
    for (size_t i = 0; i < DPL_COUNT(model_keys); i++) {
        fill_field(&model_keys[i], o, c);
        if (model_keys[i].kind == ROPE && !c->rope.yarn) break;
    }
    if (o->base_moe_mlp_dim <= 0) c->moe_f = c->mlp_f;
    if (o->n_routing_groups <= 0) c->n_groups = c->top_groups = 1;
    else if (o->topk_routing_group < 0) c->top_groups = 0;
    if (!c->rope.yarn) return;
    // MaxText scales only the softmax, and only where sequences became longer; both forms of mscale
    // together leave cos and sin unscaled.
    if (o->max_position_embeddings > o->original_max_position_embeddings) {
        c->rope.mscale_all_dim = c->rope.mscale;
    } else {
        c->rope.mscale = 0;
        c->rope.attention_factor = 1;
    }
}

dpl_status dpl_config_model(const dpl_config *config, dpl_model_config *model_out) {
    const dpl_options *o = &config->o;
    dpl_model_config c;
    DPL_CHECK(dpl_is(o->decoder_block, "deepseek") && dpl_is(o->attention_type, "mla"),
              "decoder_block=%s and attention_type=%s, expected deepseek and mla", o->decoder_block,
              o->attention_type);
    fill_model(o, &c);
    DPL_CHECK((c.n_dense >= c.n_layers && c.n_mtp == 0) || o->routed_score_func[0],
              "routed_score_func is empty, expected sigmoid or softmax");
    DPL_TRY(dpl_model_config_check(&c));
    *model_out = c;
    return DPL_OK;
}

dpl_status dpl_config_adopt(dpl_config *config, const char *dir, dpl_model_config *model_out) {
    dpl_model_config have, want;
    dpl_dtype dtype;
    DPL_TRY(dpl_model_read_config(dir, &have, &dtype));
    fill_model(&config->o, &want);
    for (size_t i = 0; i < DPL_COUNT(model_keys); i++) {
        const model_key *key = &model_keys[i];
        const void *a = (uint8_t *)&have + key->field, *b = (uint8_t *)&want + key->field;
        const bool same = memcmp(a, b, key->kind >= FLAG ? sizeof(bool) : 8) == 0;
        char text[64];
        if (same && config->text[key->id][0]) continue; // an empty choice is to be filled in
        if (key->kind == SIZE) snprintf(text, sizeof text, "%zu", *(const size_t *)a);
        else if (key->kind < FLAG) dpl_format(text, sizeof text, "%.17g", *(const double *)a);
        else snprintf(text, sizeof text, "%s", names[key->kind - FLAG][*(const bool *)a]);
        DPL_CHECK(same || !config->given[key->id], "%s=%s, but the model in %s has %s", key->key,
                  config->text[key->id], dir, text);
        DPL_TRY(dpl_config_put(config, key->key, text));
        config->given[key->id] = false;
    }
    DPL_TRY(dpl_config_put(config, "decoder_block", "deepseek"));
    DPL_TRY(dpl_config_put(config, "attention_type", "mla"));
    *model_out = have;
    return DPL_OK;
}

void dpl_options_init(const dpl_options *o, dpl_model *model) {
    dpl_init_rule rule = DPL_INIT_FAN_IN;
    if (dpl_is(o->weight_init, "maxtext")) rule = DPL_INIT_MAXTEXT;
    if (dpl_is(o->weight_init, "normal")) rule = DPL_INIT_NORMAL;
    dpl_model_init(model, rule, o->init_std, (uint64_t)o->init_weights_seed);
    dpl_model_refresh(model);
}

dpl_loss_rule dpl_options_loss(const dpl_options *o) {
    dpl_balance_kind kind = DPL_BALANCE_SEQUENCE;
    if (dpl_is(o->load_balance_scope, "batch")) kind = DPL_BALANCE_BATCH;
    if (o->moe_use_megatron_seq_aux_loss) kind = DPL_BALANCE_MEGATRON;
    return (dpl_loss_rule){o->z_loss_multiplier, o->mtp_loss_scaling_factor, kind,
                           o->load_balance_loss_weight, o->router_z_loss_weight};
}

dpl_status dpl_options_check(const dpl_options *o) {
    const double B = o->per_device_batch_size, eval_B = o->eval_per_device_batch_size;
    const struct {
        bool wrong;
        const char *what;
    } rules[] = {
        {B != floor(B), "per_device_batch_size is not a whole number"},
        {eval_B != floor(eval_B), "eval_per_device_batch_size is not a whole number"},
        {B * (double)o->max_target_length > 1e9,
         "per_device_batch_size times max_target_length is over 1e9 tokens"},
        {o->steps < 0 && o->learning_rate_schedule_steps < 1,
         "steps=-1 stands for learning_rate_schedule_steps, which is not given"},
        {o->load_parameters_path[0] && o->load_full_state_path[0],
         "load_parameters_path and load_full_state_path exclude each other"},
        {o->moe_use_megatron_seq_aux_loss && !dpl_is(o->routed_score_func, "sigmoid"),
         "moe_use_megatron_seq_aux_loss needs routed_score_func=sigmoid"},
        {o->dataset_token_bytes % 2 != 0, "dataset_token_bytes is odd, expected 0, 2 or 4"},
        {!dpl_is(o->dataset_type, "synthetic") && !o->dataset_path[0],
         "dataset_path is empty, expected data of the kind dataset_type"},
    };
    for (size_t i = 0; i < DPL_COUNT(rules); i++) DPL_CHECK(!rules[i].wrong, "%s", rules[i].what);
    return DPL_OK;
}

void dpl_options_warn(const dpl_options *o, const dpl_model_config *c) {
    if (c->n_experts > 0 && c->top_k == 1 && c->norm_topk)
        dpl_log("warning: num_experts_per_tok=1 with norm_topk_prob=true makes routing weights "
                "constant: the router learns nothing from the loss");
    if (o->routed_bias_update_rate > 0 && !c->routed_bias)
        dpl_log("warning: routed_bias_update_rate has no effect without routed_bias=true");
    if ((size_t)o->max_target_length > c->max_positions)
        dpl_log("warning: max_target_length %lld is longer than max_position_embeddings %zu",
                (long long)o->max_target_length, c->max_positions);
}
