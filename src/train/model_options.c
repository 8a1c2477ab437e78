// model_options.c - from keys to the model: sizes, rules, and what a model directory says of them.
//
// Routing follows the keys, never the model's name. A model from a directory has its config.json's
// sizes: a key that was given must agree, the others take its values, for config.yml to be true.
#include <math.h>
#include <stddef.h>
#include <stdio.h>

#include "train/train.h"

#define KEY(kind, key, ...) #key,
static const char *const keys[] = {DPL_OPTION_MAP(KEY)};
#undef KEY

static void fill_model(const dpl_config *config, dpl_model_config *c) {
    const dpl_options *o = &config->o;
    dpl_model_config_init(c);
    dpl_rope_config plain = c->rope;
    for (size_t i = 0; i < DPL_OPT_N; i++) dpl_model_config_put(c, keys[i], config->text[i]);
    if (c->moe_f == 0) c->moe_f = c->mlp_f;
    if (c->n_groups == 0) c->n_groups = c->top_groups = 1;
    if (!c->rope.yarn) { // YaRN's keys have no meaning
        plain.theta = c->rope.theta;
        c->rope = plain;
        return;
    }
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
              "decoder_block is %s and attention_type is %s: a configuration must set them to "
              "deepseek and mla",
              o->decoder_block, o->attention_type);
    fill_model(config, &c);
    DPL_CHECK((c.n_dense >= c.n_layers && c.n_mtp == 0) || o->routed_score_func[0],
              "routed_score_func is empty, expected sigmoid or softmax");
    DPL_TRY(dpl_model_config_check(&c));
    *model_out = c;
    return DPL_OK;
}

dpl_status dpl_config_adopt(dpl_config *config, const char *dir, dpl_model_config *model_out) {
    dpl_model_config have, want;
    DPL_TRY(dpl_model_read_config(dir, &have, NULL));
    fill_model(config, &want);
    for (size_t i = 0; i < DPL_OPT_N; i++) {
        const char *const *names;
        double value, wanted;
        char text[64];
        if (!dpl_model_config_get(&want, keys[i], &wanted, &names)) continue;
        dpl_model_config_get(&have, keys[i], &value, &names);
        if (value == wanted && config->text[i][0]) continue; // an empty choice is to be filled in
        if (names) snprintf(text, sizeof text, "%s", names[value != 0]);
        else dpl_format(text, sizeof text, "%.17g", value);
        DPL_CHECK(value == wanted || !config->given[i], "%s=%s, but the model in %s has %s",
                  keys[i], config->text[i], dir, text);
        DPL_TRY(dpl_config_put(config, keys[i], text));
        config->given[i] = false;
    }
    DPL_TRY(dpl_config_put(config, "decoder_block", "deepseek"));
    DPL_TRY(dpl_config_put(config, "attention_type", "mla"));
    *model_out = have;
    return DPL_OK;
}

dpl_status dpl_options_init(const dpl_options *o, dpl_model *model) {
    const double std = dpl_is(o->weight_init, "normal") ? o->init_std : 0;
    return dpl_model_init(model, dpl_is(o->weight_init, "maxtext"), std,
                          (uint64_t)o->init_weights_seed);
}

// NULL: none.
static const dpl_quant_rule *rule_of(const char *option, const dpl_quant_rule *mxfp8) {
    static const dpl_quant_rule nvfp4 = {.format = DPL_E2M1, .grad_format = DPL_E2M1};
    return dpl_is(option, "mxfp8") ? mxfp8 : dpl_is(option, "nvfp4") ? &nvfp4 : NULL;
}

dpl_status dpl_options_quantize(const dpl_options *o, dpl_model *model) {
    const dpl_quant_rule mxfp8 = {DPL_E4M3, dpl_is(o->mx_grad_format, "e5m2") ? DPL_E5M2 : DPL_E4M3,
                                  dpl_is(o->mx_scale_rule, "floor") ? DPL_SCALE_FLOOR
                                                                    : DPL_SCALE_UP};
    model->moe.mx_wire = dpl_is(o->ep_wire, "mxfp8");
    DPL_CHECK(!model->moe.mx_wire || model->dtype == DPL_BF16,
              "ep_wire=mxfp8 needs dtype=bfloat16");
    return dpl_model_quantize(model, rule_of(o->quantization, &mxfp8),
                              rule_of(o->gmm_quantization, &mxfp8));
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
}
