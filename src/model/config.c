// config.c - sizes and rules of the model: checks, config.json in both of its forms, rotary frequencies, FLOPs.
//
// A field of config.json that would change the result and is not supported is an error that names it; unknown
// keys are common in public files and harmless.
#include <math.h>
#include <stdlib.h>

#include "model/model.h"

void dpl_model_config_init(dpl_model_config *config)
{
    *config = (dpl_model_config){
        .n_groups = 1,
        .top_groups = 1,
        .max_positions = 4096,
        .sigmoid = true,
        .routed_bias = true,
        .norm_topk = true,
        .rope_interleave = true,
        .eps = 1e-6,
        .routed_scale = 1.0,
        .rope = {.theta = 10000.0,
                 .factor = 1.0,
                 .beta_fast = 32.0,
                 .beta_slow = 1.0,
                 .original_positions = 4096.0,
                 .truncate = true},
    };
}

bool dpl_model_layer_is_moe(const dpl_model_config *config, size_t layer)
{
    return config->n_experts > 0 && layer >= config->n_dense;
}

/* ---- checks ---- */

static dpl_status check_size(const char *key, size_t value, size_t low, size_t high)
{
    if (value >= low && value <= high) return DPL_OK;
    return dpl_fail(DPL_EINVAL, "%s is %zu, expected %zu to %zu", key, value, low, high);
}

static dpl_status check_experts(const dpl_model_config *c)
{
    const size_t e = c->n_experts;
    if (c->n_dense > c->n_layers)
        return dpl_fail(
            DPL_EINVAL,
            "first_num_dense_layers is %zu, expected at most base_num_decoder_layers = %zu",
            c->n_dense, c->n_layers);
    if (e == 0) {
        if (c->n_dense == c->n_layers && c->n_mtp == 0) return DPL_OK;
        return dpl_fail(DPL_EINVAL,
                        "num_experts is 0 but %zu layers are MoE layers, expected at least 1",
                        c->n_layers - c->n_dense + c->n_mtp);
    }
    DPL_TRY(check_size("num_experts", e, 1, 65536));
    if (e * (c->n_layers + c->n_mtp) > 1 << 20)
        return dpl_fail(DPL_EINVAL, "num_experts %zu in %zu layers, expected at most %d together",
                        e, c->n_layers + c->n_mtp, 1 << 20);
    DPL_TRY(check_size("num_experts_per_tok", c->top_k, 1, e));
    DPL_TRY(check_size("base_moe_mlp_dim", c->moe_f, 1, 1 << 20));
    DPL_TRY(check_size("shared_experts", c->n_shared, 0, 1024));
    DPL_TRY(check_size("n_routing_groups", c->n_groups, 1, e));
    DPL_TRY(check_size("topk_routing_group", c->top_groups, 1, c->n_groups));
    if (e % c->n_groups)
        return dpl_fail(DPL_EINVAL, "num_experts %zu is not divisible by n_routing_groups %zu", e,
                        c->n_groups);
    if (c->n_groups > 1 && e / c->n_groups < 2)
        return dpl_fail(DPL_EINVAL,
                        "n_routing_groups %zu leaves %zu expert a group, expected at least 2 "
                        "(a group's score is the sum of its two best)",
                        c->n_groups, e / c->n_groups);
    if (c->top_k > c->top_groups * (e / c->n_groups))
        return dpl_fail(
            DPL_EINVAL,
            "num_experts_per_tok %zu is more than the %zu experts of topk_routing_group = %zu "
            "groups",
            c->top_k, c->top_groups * (e / c->n_groups), c->top_groups);
    return DPL_OK;
}

static dpl_status check_rope(const dpl_rope_config *r)
{
    if (!(r->theta > 1 && isfinite(r->theta)))
        return dpl_fail(DPL_EINVAL, "rope_max_timescale is %g, expected more than 1", r->theta);
    const struct {
        const char *key;
        double value, low;
    } rows[] = {{"rope_factor", r->factor, 1},
                {"original_max_position_embeddings", r->original_positions, 1},
                {"beta_fast", r->beta_fast, 1e-9},
                {"beta_slow", r->beta_slow, 1e-9},
                {"mscale", r->mscale, 0},
                {"mscale_all_dim", r->mscale_all_dim, 0},
                {"attention_factor", r->attention_factor, 0}};
    for (size_t i = 0; r->yarn && i < DPL_COUNT(rows); i++)
        if (!(rows[i].value >= rows[i].low && rows[i].value <= 1e9))
            return dpl_fail(DPL_EINVAL, "%s is %g, expected %g to 1e9", rows[i].key, rows[i].value,
                            rows[i].low);
    return DPL_OK;
}

// Each size alone may be large; together they must leave every count of elements within 64 bits.
static dpl_status check_total(const dpl_model_config *c)
{
    const double d = (double)c->d, heads = (double)c->n_heads, kv = (double)c->kv_lora;
    const double qk = heads * (double)(c->d_nope + c->d_rope), v = heads * (double)c->d_v;
    const double attention = (d + qk) * (double)(c->q_lora ? c->q_lora : c->d) +
                             (d + qk + v) * (kv + (double)c->d_rope) + d * v;
    const double experts = (double)c->n_experts + (double)c->n_shared;
    const double mlp = 3 * d * ((double)c->mlp_f + experts * ((double)c->moe_f + 16));
    const double total = 2 * d * (double)c->vocab +
                         (double)(c->n_layers + c->n_mtp) * (attention + mlp + 2 * d * d);
    if (total < 0x1p50) return DPL_OK;
    return dpl_fail(DPL_EINVAL, "these sizes make about %g parameters, expected less than 2^50",
                    total);
}

dpl_status dpl_model_config_check(const dpl_model_config *c)
{
    DPL_TRY(check_size("vocab_size", c->vocab, 1, (size_t)1 << 30));
    DPL_TRY(check_size("base_emb_dim", c->d, 1, 1 << 20));
    DPL_TRY(check_size("base_num_decoder_layers", c->n_layers, 1, 10000));
    DPL_TRY(check_size("base_num_query_heads", c->n_heads, 1, 65536));
    DPL_TRY(check_size("q_lora_rank", c->q_lora, 0, 1 << 20));
    DPL_TRY(check_size("kv_lora_rank", c->kv_lora, 1, 65536));
    DPL_TRY(check_size("qk_nope_head_dim", c->d_nope, 1, 65536));
    DPL_TRY(check_size("qk_rope_head_dim", c->d_rope, 2, 65536));
    DPL_TRY(check_size("v_head_dim", c->d_v, 1, 65536));
    DPL_TRY(check_size("mtp_num_layers", c->n_mtp, 0, 64));
    DPL_TRY(check_size("max_position_embeddings", c->max_positions, 1, (size_t)1 << 31));
    if (c->d_rope % 2)
        return dpl_fail(DPL_EINVAL, "qk_rope_head_dim is %zu, expected an even number", c->d_rope);
    if (c->n_dense > 0) DPL_TRY(check_size("base_mlp_dim", c->mlp_f, 1, 1 << 24));
    if (!(c->eps > 0 && c->eps < 1))
        return dpl_fail(DPL_EINVAL,
                        "normalization_layer_epsilon is %g, expected more than 0 and less than 1",
                        c->eps);
    DPL_TRY(check_rope(&c->rope));
    if (!isfinite(c->routed_scale))
        return dpl_fail(DPL_EINVAL, "routed_scaling_factor is %g, expected a finite number",
                        c->routed_scale);
    DPL_TRY(check_experts(c));
    return check_total(c);
}

/* ---- config.json ---- */

// A required or optional number; fails on another type. Absent or null: `missing`.
static dpl_status get_number(const json_t *object, const char *key, double missing, double *out)
{
    const json_t *value = json_object_get(object, key);
    if (!value || json_is_null(value)) {
        if (isnan(missing))
            return dpl_fail(DPL_EFORMAT, "\"%s\" is missing, expected a number", key);
        *out = missing;
        return DPL_OK;
    }
    if (!json_is_number(value)) return dpl_fail(DPL_EFORMAT, "\"%s\" is not a number", key);
    *out = json_number_value(value);
    return DPL_OK;
}

static dpl_status get_size(const json_t *object, const char *key, double missing, size_t *out)
{
    double value;
    DPL_TRY(get_number(object, key, missing, &value));
    if (value < 0 || value > 9e15 || value != floor(value))
        return dpl_fail(DPL_EFORMAT, "\"%s\" is %g, expected a whole number from 0", key, value);
    *out = (size_t)value;
    return DPL_OK;
}

static dpl_status get_bool(const json_t *object, const char *key, bool missing, bool *out)
{
    const json_t *value = json_object_get(object, key);
    if (value && !json_is_null(value) && !json_is_boolean(value))
        return dpl_fail(DPL_EFORMAT, "\"%s\" is not true or false", key);
    *out = json_is_boolean(value) ? json_is_true(value) : missing;
    return DPL_OK;
}

// A text field that must have one of two values if it is there.
static dpl_status expect_text(const json_t *object, const char *key, const char *good,
                              const char *also)
{
    const json_t *value = json_object_get(object, key);
    if (!value || json_is_null(value)) return DPL_OK;
    const char *text = json_string_value(value);
    if (text && (strcmp(text, good) == 0 || (also && strcmp(text, also) == 0))) return DPL_OK;
    return dpl_fail(DPL_ENOSUP, "\"%s\" is \"%s\", only \"%s\"%s%s%s is supported", key,
                    text ? text : "(not text)", good, also ? " or \"" : "", also ? also : "",
                    also ? "\"" : "");
}

static dpl_status read_rope(const json_t *object, dpl_model_config *c)
{
    const json_t *nested = json_object_get(object, "rope_parameters");
    const bool new_form = nested && !json_is_null(nested);
    if (new_form && !json_is_object(nested))
        return dpl_fail(DPL_EFORMAT, "\"rope_parameters\" is not an object");
    const json_t *scaling = new_form ? nested : json_object_get(object, "rope_scaling");
    dpl_rope_config *r = &c->rope;
    DPL_TRY(get_number(new_form ? nested : object, "rope_theta", 10000.0, &r->theta));
    double partial;
    DPL_TRY(get_number(new_form ? nested : object, "partial_rotary_factor", 1.0, &partial));
    if (partial != 1)
        return dpl_fail(DPL_ENOSUP, "\"partial_rotary_factor\" is %g, only 1 is supported",
                        partial);
    r->yarn = false;
    if (!scaling || json_is_null(scaling)) return DPL_OK;
    if (!json_is_object(scaling)) return dpl_fail(DPL_EFORMAT, "\"rope_scaling\" is not an object");
    const char *key = json_object_get(scaling, "rope_type") ? "rope_type" : "type";
    DPL_TRY(expect_text(scaling, key, "default", "yarn"));
    const char *type = json_string_value(json_object_get(scaling, key));
    r->yarn = type && strcmp(type, "yarn") == 0;
    if (!r->yarn) return DPL_OK;
    DPL_TRY(get_number(scaling, "factor", NAN, &r->factor));
    DPL_TRY(get_number(scaling, "beta_fast", 32.0, &r->beta_fast));
    DPL_TRY(get_number(scaling, "beta_slow", 1.0, &r->beta_slow));
    DPL_TRY(get_number(scaling, "mscale", 0.0, &r->mscale));
    DPL_TRY(get_number(scaling, "mscale_all_dim", 0.0, &r->mscale_all_dim));
    DPL_TRY(get_number(scaling, "attention_factor", 0.0, &r->attention_factor));
    size_t original;
    DPL_TRY(
        get_size(scaling, "original_max_position_embeddings", (double)c->max_positions, &original));
    r->original_positions = (double)original;
    return get_bool(scaling, "truncate", true, &r->truncate);
}

static dpl_status read_experts(const json_t *o, dpl_model_config *c)
{
    DPL_TRY(expect_text(o, "scoring_func", "sigmoid", "softmax"));
    const char *score = json_string_value(json_object_get(o, "scoring_func"));
    c->sigmoid = !score || strcmp(score, "sigmoid") == 0;
    DPL_TRY(expect_text(o, "topk_method", "noaux_tc", NULL));
    size_t frequency;
    DPL_TRY(get_size(o, "moe_layer_freq", 1, &frequency));
    if (frequency != 1)
        return dpl_fail(DPL_ENOSUP, "\"moe_layer_freq\" is %zu, only 1 is supported", frequency);
    DPL_TRY(get_size(o, "n_routed_experts", 0, &c->n_experts));
    DPL_TRY(get_size(o, "num_experts_per_tok", c->n_experts ? NAN : 0, &c->top_k));
    DPL_TRY(get_size(o, "moe_intermediate_size", c->n_experts ? NAN : 0, &c->moe_f));
    DPL_TRY(get_size(o, "n_shared_experts", 0, &c->n_shared));
    DPL_TRY(get_size(o, "n_group", 1, &c->n_groups));
    DPL_TRY(get_size(o, "topk_group", 1, &c->top_groups));
    DPL_TRY(get_size(o, "first_k_dense_replace", 0, &c->n_dense));
    DPL_TRY(get_size(o, "num_nextn_predict_layers", 0, &c->n_mtp));
    DPL_TRY(get_bool(o, "norm_topk_prob", true, &c->norm_topk));
    return get_number(o, "routed_scaling_factor", 1.0, &c->routed_scale);
}

static dpl_status read_fields(const json_t *o, dpl_model_config *config_out)
{
    dpl_model_config c;
    dpl_model_config_init(&c);
    if (!json_is_string(json_object_get(o, "model_type")))
        return dpl_fail(DPL_EFORMAT, "\"model_type\" is missing, expected \"deepseek_v3\"");
    DPL_TRY(expect_text(o, "model_type", "deepseek_v3", NULL));
    DPL_TRY(expect_text(o, "hidden_act", "silu", NULL));
    const json_t *quantized = json_object_get(o, "quantization_config");
    if (quantized && !json_is_null(quantized))
        return dpl_fail(DPL_ENOSUP,
                        "\"quantization_config\" is set: quantized weights are not supported yet, "
                        "expected F32, BF16 or F16 weights");
    double dropout;
    DPL_TRY(get_number(o, "attention_dropout", 0.0, &dropout));
    if (dropout != 0)
        return dpl_fail(DPL_ENOSUP, "\"attention_dropout\" is %g, only 0 is supported", dropout);
    DPL_TRY(get_size(o, "vocab_size", NAN, &c.vocab));
    DPL_TRY(get_size(o, "hidden_size", NAN, &c.d));
    DPL_TRY(get_size(o, "num_hidden_layers", NAN, &c.n_layers));
    DPL_TRY(get_size(o, "num_attention_heads", NAN, &c.n_heads));
    size_t kv_heads;
    DPL_TRY(get_size(o, "num_key_value_heads", (double)c.n_heads, &kv_heads));
    if (kv_heads != c.n_heads)
        return dpl_fail(DPL_ENOSUP,
                        "\"num_key_value_heads\" is %zu, expected num_attention_heads = %zu",
                        kv_heads, c.n_heads);
    DPL_TRY(get_size(o, "q_lora_rank", 0, &c.q_lora));
    DPL_TRY(get_size(o, "kv_lora_rank", NAN, &c.kv_lora));
    DPL_TRY(get_size(o, "qk_nope_head_dim", NAN, &c.d_nope));
    DPL_TRY(get_size(o, "qk_rope_head_dim", NAN, &c.d_rope));
    DPL_TRY(get_size(o, "v_head_dim", NAN, &c.d_v));
    DPL_TRY(get_size(o, "intermediate_size", 0, &c.mlp_f));
    DPL_TRY(get_size(o, "max_position_embeddings", 4096, &c.max_positions));
    DPL_TRY(get_number(o, "rms_norm_eps", 1e-6, &c.eps));
    DPL_TRY(get_bool(o, "tie_word_embeddings", false, &c.tied));
    DPL_TRY(get_bool(o, "attention_bias", false, &c.attention_bias));
    DPL_TRY(get_bool(o, "rope_interleave", true, &c.rope_interleave));
    DPL_TRY(read_experts(o, &c));
    DPL_TRY(read_rope(o, &c));
    c.n_dense = DPL_MIN(c.n_dense, c.n_layers);
    DPL_TRY(dpl_model_config_check(&c));
    *config_out = c;
    return DPL_OK;
}

dpl_status dpl_model_config_from_json(const json_t *o, dpl_model_config *config_out)
{
    // What transformers takes where a key is absent; null is a value of its own.
    json_t *full = json_pack("{s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:f}", "q_lora_rank",
                             1536, "intermediate_size", 18432, "moe_intermediate_size", 2048,
                             "n_routed_experts", 256, "num_experts_per_tok", 8, "n_shared_experts",
                             1, "n_group", 8, "topk_group", 4, "first_k_dense_replace", 3,
                             "routed_scaling_factor", 2.5);
    if (!full || json_object_update(full, (json_t *)(uintptr_t)o)) {
        json_decref(full);
        return dpl_fail(DPL_ENOMEM, "no memory for a model's configuration");
    }
    const dpl_status status = read_fields(full, config_out);
    json_decref(full);
    return status;
}

static json_t *rope_to_json(const dpl_rope_config *r)
{
    if (!r->yarn) return json_null();
    json_t *o = json_pack("{s:s, s:s, s:f, s:f, s:f, s:I, s:b}", "rope_type", "yarn", "type",
                          "yarn", "factor", r->factor, "beta_fast", r->beta_fast, "beta_slow",
                          r->beta_slow, "original_max_position_embeddings",
                          (json_int_t)r->original_positions, "truncate", r->truncate);
    if (o && r->mscale != 0) json_object_set_new(o, "mscale", json_real(r->mscale));
    if (o && r->mscale_all_dim != 0)
        json_object_set_new(o, "mscale_all_dim", json_real(r->mscale_all_dim));
    if (o && r->attention_factor != 0)
        json_object_set_new(o, "attention_factor", json_real(r->attention_factor));
    return o;
}

json_t *dpl_model_config_to_json(const dpl_model_config *c, dpl_dtype dtype)
{
    // The older form (rope_theta, rope_scaling): every version of transformers and the inference engines read it.
    json_t *o = json_pack(
        "{s:[s], s:s, s:I, s:I, s:I, s:I, s:I, s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:I}",
        "architectures", "DeepseekV3ForCausalLM", "model_type", "deepseek_v3", "vocab_size",
        (json_int_t)c->vocab, "hidden_size", (json_int_t)c->d, "num_hidden_layers",
        (json_int_t)c->n_layers, "num_attention_heads", (json_int_t)c->n_heads,
        "num_key_value_heads", (json_int_t)c->n_heads, "q_lora_rank",
        c->q_lora ? json_integer((json_int_t)c->q_lora) : json_null(), "kv_lora_rank",
        (json_int_t)c->kv_lora, "qk_nope_head_dim", (json_int_t)c->d_nope, "qk_rope_head_dim",
        (json_int_t)c->d_rope, "v_head_dim", (json_int_t)c->d_v, "intermediate_size",
        (json_int_t)c->mlp_f, "first_k_dense_replace", (json_int_t)c->n_dense,
        "max_position_embeddings", (json_int_t)c->max_positions);
    json_t *rest = json_pack(
        "{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:b, s:f, s:s, s:s, s:f, s:f, s:o, s:b, s:b, s:b, "
        "s:s, s:s, s:n, s:n}",
        "n_routed_experts", (json_int_t)c->n_experts, "num_experts_per_tok", (json_int_t)c->top_k,
        "moe_intermediate_size", (json_int_t)c->moe_f, "n_shared_experts", (json_int_t)c->n_shared,
        "n_group", (json_int_t)c->n_groups, "topk_group", (json_int_t)c->top_groups,
        "num_nextn_predict_layers", (json_int_t)c->n_mtp, "norm_topk_prob", c->norm_topk,
        "routed_scaling_factor", c->routed_scale, "scoring_func",
        c->sigmoid ? "sigmoid" : "softmax", "topk_method", "noaux_tc", "rms_norm_eps", c->eps,
        "rope_theta", c->rope.theta, "rope_scaling", rope_to_json(&c->rope), "rope_interleave",
        c->rope_interleave, "tie_word_embeddings", c->tied, "attention_bias", c->attention_bias,
        "hidden_act", "silu", "torch_dtype", dtype == DPL_F32 ? "float32" : "bfloat16",
        "bos_token_id", "eos_token_id");
    if (!o || !rest || json_object_update(o, rest)) {
        json_decref(o);
        o = NULL;
    }
    json_decref(rest);
    return o;
}

/* ---- rotary embedding ---- */

static double yarn_scale(double factor, double mscale)
{
    return factor > 1 ? 0.1 * mscale * log(factor) + 1.0 : 1.0;
}

double dpl_model_softmax_scale(const dpl_model_config *c)
{
    const double scale = 1.0 / sqrt((double)(c->d_nope + c->d_rope));
    if (!c->rope.yarn || c->rope.mscale_all_dim == 0) return scale;
    const double m = yarn_scale(c->rope.factor, c->rope.mscale_all_dim);
    return scale * m * m;
}

double dpl_rope_frequencies(const dpl_model_config *c, float *inv_freq)
{
    const dpl_rope_config *r = &c->rope;
    const double d = (double)c->d_rope;
    const size_t half = c->d_rope / 2;
    for (size_t i = 0; i < half; i++)
        inv_freq[i] = (float)pow(r->theta, -2.0 * (double)i / d);
    if (!r->yarn) return 1.0;
    // Frequencies that turn often in the original length stay, slow ones are divided by the factor, a ramp between.
    const double per_turn = r->original_positions / (2 * M_PI), log_theta2 = 2 * log(r->theta);
    double low = d * log(per_turn / r->beta_fast) / log_theta2,
           high = d * log(per_turn / r->beta_slow) / log_theta2;
    if (r->truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = fmax(low, 0);
    high = fmin(high, d - 1);
    if (high == low) high += 0.001;
    for (size_t i = 0; i < half; i++) {
        const double f = pow(r->theta, -2.0 * (double)i / d);
        const double ramp = fmin(fmax(((double)i - low) / (high - low), 0), 1);
        inv_freq[i] = (float)(f / r->factor * ramp + f * (1 - ramp));
    }
    if (r->attention_factor != 0) return r->attention_factor;
    if (r->mscale != 0 && r->mscale_all_dim != 0)
        return yarn_scale(r->factor, r->mscale) / yarn_scale(r->factor, r->mscale_all_dim);
    return yarn_scale(r->factor, 1.0);
}

/* ---- counts ---- */

static uint64_t attention_params(const dpl_model_config *c)
{
    const uint64_t heads_qk = c->n_heads * (c->d_nope + c->d_rope), bias = c->attention_bias;
    uint64_t n = c->q_lora ? c->d * c->q_lora + c->q_lora + c->q_lora * heads_qk + bias * c->q_lora
                           : c->d * heads_qk;
    n += c->d * (c->kv_lora + c->d_rope) + bias * (c->kv_lora + c->d_rope) + c->kv_lora;
    n += c->kv_lora * c->n_heads * (c->d_nope + c->d_v);
    return n + c->n_heads * c->d_v * c->d + bias * c->d;
}

static uint64_t count_params(const dpl_model_config *c, uint64_t experts)
{
    const uint64_t n_moe = c->n_layers - c->n_dense;
    uint64_t n = c->vocab * c->d * (c->tied ? 1 : 2) + c->d;
    n += c->n_layers * (attention_params(c) + 2 * c->d);
    n += c->n_dense * 3 * c->d * c->mlp_f;
    return n + n_moe * (c->d * c->n_experts + 3 * c->d * c->moe_f * (experts + c->n_shared));
}

uint64_t dpl_model_param_count(const dpl_model_config *c)
{
    return count_params(c, c->n_experts);
}
uint64_t dpl_model_active_param_count(const dpl_model_config *c)
{
    return count_params(c, c->top_k);
}

double dpl_model_attention_flops(const dpl_model_config *c, size_t n_batch, size_t n_seq)
{
    const double per_layer = (double)n_batch * (double)n_seq * (double)n_seq * (double)c->n_heads *
                             (double)(c->d_nope + c->d_rope + c->d_v);
    return 3 * per_layer * (double)(c->n_layers + c->n_mtp);
}

double dpl_model_flops(const dpl_model_config *c, size_t n_batch, size_t n_seq)
{
    const double tokens = 2.0 * (double)n_batch * (double)n_seq, d = (double)c->d,
                 h = (double)c->n_heads;
    const double qk = h * (double)(c->d_nope + c->d_rope);
    const double q = c->q_lora ? (d + qk) * (double)c->q_lora : d * qk;
    const double kv = d * (double)(c->kv_lora + c->d_rope) +
                      (double)c->kv_lora * h * (double)(c->d_nope + c->d_v);
    const double projections = tokens * (q + kv + d * h * (double)c->d_v);
    const double dense = tokens * 3 * (double)c->mlp_f * d;
    const double moe = tokens * d *
                       ((double)c->n_experts +
                        3 * (double)c->moe_f * (double)(c->n_shared + c->top_k));
    const double n_moe = c->n_experts ? (double)(c->n_layers - c->n_dense + c->n_mtp) : 0;
    return 3 * (projections * (double)(c->n_layers + c->n_mtp) + dense * (double)c->n_dense +
                moe * n_moe + tokens * d * (double)c->vocab) +
           dpl_model_attention_flops(c, n_batch, n_seq);
}
