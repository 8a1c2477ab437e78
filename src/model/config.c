// config.c - sizes and rules of the model: checks, config.json in both of its forms, rotary
// frequencies, FLOPs.
//
// One table of fields serves reading, checking and writing. A key of config.json that would change
// the result and is not supported is an error that names it; unknown keys are common and harmless.
#include <math.h>
#include <stddef.h>

#include "io/io.h"
#include "model/model.h"

void dpl_model_config_init(dpl_model_config *config) {
    // clang-format off
    *config = (dpl_model_config){
        .n_groups = 1, .top_groups = 1, .max_positions = 4096, .sigmoid = true, .routed_bias = true,
        .norm_topk = true, .rope_interleave = true, .eps = 1e-6, .routed_scale = 1,
        .rope = {.theta = 10000, .factor = 1, .beta_fast = 32, .beta_slow = 1,
                 .original_positions = 4096, .truncate = true}};
    // clang-format on
}

bool dpl_model_layer_is_moe(const dpl_model_config *config, size_t layer) {
    return config->n_experts > 0 && layer >= config->n_dense;
}

/* ---- the table ---- */
// WHOLE: a double. Names of what false and true stand for begin with FLAG's.
typedef enum field_kind { SIZE, NUMBER, WHOLE, FLAG, SCORE, ROPE } field_kind;
static const char *const names[][2] = {
    {"false", "true"}, {"softmax", "sigmoid"}, {"default", "yarn"}};

// EXPERTS: checked where there are experts. YARN: checked, and written, with YaRN. OPTION: not in
// config.json as it stands.
typedef enum field_group { MODEL, EXPERTS, THETA, YARN, OPTION } field_group;

typedef struct field {
    field_group group;
    field_kind kind;
    const char *json, *key; // key: the name of the option, for messages about the value
    size_t offset;
    // What transformers takes where the key is absent (MUST: an error); null leaves what init gave.
    double absent;
    double low, high;
} field;

#define MUST NAN
#define KEEP INFINITY // absent is as null
#define ROW(group, json, key, member, kind, absent, low, high) \
    { group, kind, #json, #key, offsetof(dpl_model_config, member), absent, low, high }
static const field fields[] = {
    ROW(MODEL, vocab_size, vocab_size, vocab, SIZE, MUST, 1, 0x1p30),
    ROW(MODEL, hidden_size, base_emb_dim, d, SIZE, MUST, 1, 0x1p20),
    ROW(MODEL, num_hidden_layers, base_num_decoder_layers, n_layers, SIZE, MUST, 1, 10000),
    ROW(MODEL, num_attention_heads, base_num_query_heads, n_heads, SIZE, MUST, 1, 65536),
    ROW(MODEL, q_lora_rank, q_lora_rank, q_lora, SIZE, 1536, 0, 0x1p20),
    ROW(MODEL, kv_lora_rank, kv_lora_rank, kv_lora, SIZE, MUST, 1, 65536),
    ROW(MODEL, qk_nope_head_dim, qk_nope_head_dim, d_nope, SIZE, MUST, 1, 65536),
    ROW(MODEL, qk_rope_head_dim, qk_rope_head_dim, d_rope, SIZE, MUST, 2, 65536),
    ROW(MODEL, v_head_dim, v_head_dim, d_v, SIZE, MUST, 1, 65536),
    ROW(MODEL, intermediate_size, base_mlp_dim, mlp_f, SIZE, 18432, 0, 0x1p24),
    ROW(MODEL, num_nextn_predict_layers, mtp_num_layers, n_mtp, SIZE, KEEP, 0, 64),
    ROW(MODEL, max_position_embeddings, max_position_embeddings, max_positions, SIZE, KEEP, 1,
        0x1p31),
    ROW(MODEL, rms_norm_eps, normalization_layer_epsilon, eps, NUMBER, KEEP, 1e-38, 1),
    ROW(MODEL, tie_word_embeddings, logits_via_embedding, tied, FLAG, KEEP, 0, 1),
    ROW(MODEL, attention_bias, attention_bias, attention_bias, FLAG, KEEP, 0, 1),
    ROW(MODEL, rope_interleave, rope_interleave, rope_interleave, FLAG, KEEP, 0, 1),
    ROW(MODEL, norm_topk_prob, norm_topk_prob, norm_topk, FLAG, KEEP, 0, 1),
    ROW(MODEL, routed_scaling_factor, routed_scaling_factor, routed_scale, NUMBER, 2.5, -1e9, 1e9),
    ROW(EXPERTS, n_routed_experts, num_experts, n_experts, SIZE, 256, 1, 65536),
    ROW(EXPERTS, num_experts_per_tok, num_experts_per_tok, top_k, SIZE, 8, 1, 65536),
    ROW(EXPERTS, moe_intermediate_size, base_moe_mlp_dim, moe_f, SIZE, 2048, 1, 0x1p20),
    ROW(EXPERTS, n_shared_experts, shared_experts, n_shared, SIZE, 1, 0, 1024),
    ROW(EXPERTS, n_group, n_routing_groups, n_groups, SIZE, 8, 1, 65536),
    ROW(EXPERTS, topk_group, topk_routing_group, top_groups, SIZE, 4, 1, 65536),
    ROW(EXPERTS, first_k_dense_replace, first_num_dense_layers, n_dense, SIZE, 3, 0, 10000),
    ROW(THETA, rope_theta, rope_max_timescale, rope.theta, NUMBER, KEEP, 1.001, 1e300),
    ROW(YARN, factor, rope_factor, rope.factor, NUMBER, MUST, 1, 1e9),
    ROW(YARN, beta_fast, beta_fast, rope.beta_fast, NUMBER, KEEP, 1e-9, 1e9),
    ROW(YARN, beta_slow, beta_slow, rope.beta_slow, NUMBER, KEEP, 1e-9, 1e9),
    ROW(YARN, mscale, mscale, rope.mscale, NUMBER, KEEP, 0, 1e9),
    ROW(YARN, mscale_all_dim, mscale_all_dim, rope.mscale_all_dim, NUMBER, KEEP, 0, 1e9),
    ROW(YARN, attention_factor, attention_factor, rope.attention_factor, NUMBER, KEEP, 0, 1e9),
    ROW(YARN, original_max_position_embeddings, original_max_position_embeddings,
        rope.original_positions, WHOLE, KEEP, 1, 1e9),
    ROW(YARN, truncate, rope_truncate, rope.truncate, FLAG, KEEP, 0, 1),
    ROW(OPTION, , routed_score_func, sigmoid, SCORE, KEEP, 0, 1),
    ROW(OPTION, , routed_bias, routed_bias, FLAG, KEEP, 0, 1),
    ROW(OPTION, , rope_type, rope.yarn, ROPE, KEEP, 0, 1)};
#undef ROW

static double value_of(const field *f, const dpl_model_config *c) {
    const void *at = (const uint8_t *)c + f->offset;
    if (f->kind == SIZE) return (double)*(const size_t *)at;
    return f->kind >= FLAG ? (double)*(const bool *)at : *(const double *)at;
}

static void set_value(const field *f, double value, dpl_model_config *c) {
    void *at = (uint8_t *)c + f->offset;
    if (f->kind == SIZE) *(size_t *)at = (size_t)DPL_MAX(value, 0); // -1 of an option: not given
    else if (f->kind >= FLAG) *(bool *)at = value != 0;
    else *(double *)at = value;
}

static const field *find_field(const char *key) {
    for (size_t i = 0; i < DPL_COUNT(fields); i++)
        if (strcmp(fields[i].key, key) == 0) return &fields[i];
    return NULL;
}

bool dpl_model_config_get(const dpl_model_config *c, const char *key, double *value_out,
                          const char *const **names_out) {
    const field *f = find_field(key);
    if (!f) return false;
    *value_out = value_of(f, c);
    *names_out = f->kind >= FLAG ? names[f->kind - FLAG] : NULL;
    return true;
}

void dpl_model_config_put(dpl_model_config *c, const char *key, const char *text) {
    const field *f = find_field(key);
    double value = 0;
    if (!f) return;
    if (f->kind >= FLAG) value = strcmp(text, names[f->kind - FLAG][0]) != 0;
    else (void)dpl_parse_f64(text, &value);
    set_value(f, value, c);
}

/* ---- checks ---- */
static dpl_status check_range(const char *key, double value, double low, double high) {
    DPL_CHECK(value >= low && value <= high, "%s is %.15g, expected %.15g to %.15g", key, value,
              low, high);
    return DPL_OK;
}

static dpl_status check_fields(field_group group, const dpl_model_config *c) {
    for (const field *f = fields; f < fields + DPL_COUNT(fields); f++)
        if (f->group == group) DPL_TRY(check_range(f->key, value_of(f, c), f->low, f->high));
    return DPL_OK;
}

static dpl_status check_experts(const dpl_model_config *c) {
    const size_t e = c->n_experts, layers = c->n_layers + c->n_mtp, n_moe = layers - c->n_dense;
    DPL_CHECK(c->n_dense <= c->n_layers,
              "first_num_dense_layers is %zu, expected at most base_num_decoder_layers = %zu",
              c->n_dense, c->n_layers);
    if (e == 0 && n_moe == 0) return DPL_OK;
    DPL_CHECK(e > 0, "num_experts is 0 but %zu layers are MoE layers, expected at least 1", n_moe);
    DPL_TRY(check_range("num_experts_per_tok", (double)c->top_k, 1, (double)e));
    DPL_TRY(check_range("n_routing_groups", (double)c->n_groups, 1, (double)e));
    DPL_TRY(check_range("topk_routing_group", (double)c->top_groups, 1, (double)c->n_groups));
    DPL_TRY(check_fields(EXPERTS, c));
    DPL_CHECK(e * layers <= 1 << 20, "num_experts %zu in %zu layers, expected at most %d together",
              e, layers, 1 << 20);
    const size_t each = e / c->n_groups;
    DPL_CHECK(e % c->n_groups == 0, "num_experts %zu is not divisible by n_routing_groups %zu", e,
              c->n_groups);
    DPL_CHECK(
        c->n_groups == 1 || each >= 2,
        "n_routing_groups %zu leaves %zu expert a group, expected at least 2 (a group's score is "
        "the sum of its two best)",
        c->n_groups, each);
    DPL_CHECK(
        c->top_k <= c->top_groups * each,
        "num_experts_per_tok %zu is more than the %zu experts of topk_routing_group = %zu groups",
        c->top_k, c->top_groups * each, c->top_groups);
    return DPL_OK;
}

dpl_status dpl_model_config_check(const dpl_model_config *c) {
    DPL_TRY(check_fields(MODEL, c));
    DPL_CHECK(c->d_rope % 2 == 0, "qk_rope_head_dim is %zu, expected an even number", c->d_rope);
    DPL_CHECK(c->n_dense == 0 || c->mlp_f > 0, "base_mlp_dim is 0, expected at least 1");
    DPL_TRY(check_fields(THETA, c));
    if (c->rope.yarn) DPL_TRY(check_fields(YARN, c));
    DPL_TRY(check_experts(c));
    // Each size alone may be large; together they leave every count of elements within 64 bits.
    const double total = dpl_params_count(c, true, c->n_experts, false);
    DPL_CHECK(total < 0x1p50, "these sizes make about %g parameters, expected less than 2^50",
              total);
    return DPL_OK;
}

/* ---- config.json ---- */
static bool is_given(const json_t *value) {
    return value && !json_is_null(value);
}

static dpl_status read_field(const json_t *object, const field *f, dpl_model_config *c) {
    const json_t *json = json_object_get(object, f->json);
    if (!is_given(json)) {
        DPL_EXPECT(!isnan(f->absent), DPL_EFORMAT, "\"%s\" is missing, expected a number", f->json);
        if (!json && f->absent != KEEP) set_value(f, f->absent, c);
        return DPL_OK;
    }
    const bool flag = f->kind == FLAG;
    DPL_EXPECT(flag ? json_is_boolean(json) : json_is_number(json), DPL_EFORMAT, "\"%s\" is not %s",
               f->json, flag ? "true or false" : "a number");
    const double value = flag ? json_is_true(json) : json_number_value(json);
    DPL_EXPECT(f->kind == NUMBER || (value >= 0 && value <= 9e15 && value == floor(value)),
               DPL_EFORMAT, "\"%s\" is %g, expected a whole number from 0", f->json, value);
    set_value(f, value, c);
    return DPL_OK;
}

static dpl_status read_fields(const json_t *object, field_group group, dpl_model_config *c) {
    for (const field *f = fields; f < fields + DPL_COUNT(fields); f++)
        if (f->group == group) DPL_TRY(read_field(object, f, c));
    return DPL_OK;
}

// A number that must have one value if it is there; `name` goes before the value in the message.
static dpl_status expect_number(const json_t *object, const char *key, const char *name,
                                double good) {
    const json_t *value = json_object_get(object, key);
    if (!is_given(value)) return DPL_OK;
    DPL_EXPECT(json_is_number(value), DPL_EFORMAT, "\"%s\" is not a number", key);
    DPL_EXPECT(json_number_value(value) == good, DPL_ENOSUP, "\"%s\" is %g, only %s%g is supported",
               key, json_number_value(value), name, good);
    return DPL_OK;
}

static bool is_text(const json_t *object, const char *key, const char *text) {
    const char *value = json_string_value(json_object_get(object, key));
    return value && text && strcmp(value, text) == 0;
}

// A text that must be one of two (also NULL: of one) if it is there.
static dpl_status expect_text(const json_t *object, const char *key, const char *good,
                              const char *also) {
    const json_t *value = json_object_get(object, key);
    if (!is_given(value) || is_text(object, key, good) || is_text(object, key, also)) return DPL_OK;
    return dpl_fail(DPL_ENOSUP, "\"%s\" is \"%s\", only \"%s\"%s%s%s is supported", key,
                    json_is_string(value) ? json_string_value(value) : "(not text)", good,
                    also ? " or \"" : "", also ? also : "", also ? "\"" : "");
}

// The older form has rope_theta and rope_scaling, the newer one both in rope_parameters.
static dpl_status read_rope(const json_t *object, dpl_model_config *c) {
    const char *form = is_given(json_object_get(object, "rope_parameters")) ? "rope_parameters"
                                                                            : "rope_scaling";
    const json_t *scaling = json_object_get(object, form);
    DPL_EXPECT(!is_given(scaling) || json_is_object(scaling), DPL_EFORMAT,
               "\"%s\" is not an object", form);
    const json_t *base = strcmp(form, "rope_scaling") == 0 ? object : scaling;
    DPL_TRY(read_fields(base, THETA, c));
    DPL_TRY(expect_number(base, "partial_rotary_factor", "", 1));
    if (!is_given(scaling)) return DPL_OK;
    const char *key = json_object_get(scaling, "rope_type") ? "rope_type" : "type";
    DPL_TRY(expect_text(scaling, key, "default", "yarn"));
    c->rope.yarn = is_text(scaling, key, "yarn");
    if (!c->rope.yarn) return DPL_OK;
    c->rope.original_positions = (double)c->max_positions;
    return read_fields(scaling, YARN, c);
}

// Weights may be those of DeepSeek's files; what was done to activations there does not matter.
static dpl_status check_quantization(const json_t *quantization) {
    if (!is_given(quantization)) return DPL_OK;
    const json_t *block = json_object_get(quantization, "weight_block_size");
    const bool of_128 = json_array_size(block) == 2 &&
                        json_integer_value(json_array_get(block, 0)) == 128 &&
                        json_integer_value(json_array_get(block, 1)) == 128;
    const json_t *format = json_object_get(quantization, "fmt");
    DPL_EXPECT(
        is_text(quantization, "quant_method", "fp8") && of_128 &&
            (!is_given(format) || is_text(quantization, "fmt", "e4m3")),
        DPL_ENOSUP,
        "\"quantization_config\" is of weights that are not supported, expected F32, BF16 or "
        "F16, or fp8 in e4m3 with \"weight_block_size\" [128, 128]");
    return DPL_OK;
}

dpl_status dpl_model_config_from_json(const json_t *o, dpl_model_config *config_out) {
    dpl_model_config c;
    dpl_model_config_init(&c);
    DPL_EXPECT(json_is_string(json_object_get(o, "model_type")), DPL_EFORMAT,
               "\"model_type\" is missing, expected \"deepseek_v3\"");
    DPL_TRY(expect_text(o, "model_type", "deepseek_v3", NULL));
    DPL_TRY(expect_text(o, "hidden_act", "silu", NULL));
    DPL_TRY(expect_text(o, "topk_method", "noaux_tc", NULL));
    DPL_TRY(expect_text(o, "scoring_func", "sigmoid", "softmax"));
    c.sigmoid = !is_text(o, "scoring_func", "softmax");
    DPL_TRY(expect_number(o, "attention_dropout", "", 0));
    DPL_TRY(expect_number(o, "moe_layer_freq", "", 1));
    DPL_TRY(check_quantization(json_object_get(o, "quantization_config")));
    DPL_TRY(read_fields(o, MODEL, &c));
    DPL_TRY(expect_number(o, "num_key_value_heads", "num_attention_heads = ", (double)c.n_heads));
    DPL_TRY(read_fields(o, EXPERTS, &c));
    DPL_TRY(read_rope(o, &c));
    c.n_dense = DPL_MIN(c.n_dense, c.n_layers);
    DPL_TRY(dpl_model_config_check(&c));
    *config_out = c;
    return DPL_OK;
}

static int write_fields(json_t *object, field_group group, const dpl_model_config *c) {
    int failed = 0;
    for (const field *f = fields; f < fields + DPL_COUNT(fields); f++) {
        const double value = value_of(f, c);
        const bool absent = f->kind == NUMBER && f->absent == KEEP && value == 0; // not given
        if (f->group != group || absent) continue;
        json_t *json = f->kind == FLAG     ? json_boolean(value != 0)
                       : f->kind == NUMBER ? json_real(value)
                                           : json_integer((json_int_t)value);
        failed |= json_object_set_new(object, f->json, json);
    }
    return failed;
}

json_t *dpl_model_config_to_json(const dpl_model_config *c, dpl_dtype dtype) {
    // The older form: every version of transformers and the inference engines read it.
    json_t *o = json_pack("{s:[s], s:s, s:I, s:s, s:s, s:s, s:s, s:n, s:n, s:n}", "architectures",
                          "DeepseekV3ForCausalLM", "model_type", "deepseek_v3",
                          "num_key_value_heads", (json_int_t)c->n_heads, "scoring_func",
                          names[SCORE - FLAG][c->sigmoid], "topk_method", "noaux_tc", "hidden_act",
                          "silu", "torch_dtype", dtype == DPL_F32 ? "float32" : "bfloat16",
                          "rope_scaling", "bos_token_id", "eos_token_id");
    int failed = write_fields(o, MODEL, c) | write_fields(o, EXPERTS, c) |
                 write_fields(o, THETA, c);
    if (!c->q_lora) failed |= json_object_set_new(o, "q_lora_rank", json_null());
    if (c->rope.yarn) {
        json_t *scaling = json_pack("{s:s, s:s}", "rope_type", "yarn", "type", "yarn");
        failed |= write_fields(scaling, YARN, c);
        failed |= json_object_set_new(o, "rope_scaling", scaling);
    }
    if (!failed) return o;
    json_decref(o);
    return NULL;
}

/* ---- rotary embedding ---- */
static double yarn_scale(double factor, double mscale) {
    return factor > 1 ? 0.1 * mscale * log(factor) + 1.0 : 1.0;
}

double dpl_model_softmax_scale(const dpl_model_config *c) {
    const double scale = 1.0 / sqrt((double)(c->d_nope + c->d_rope));
    if (!c->rope.yarn || c->rope.mscale_all_dim == 0) return scale;
    const double m = yarn_scale(c->rope.factor, c->rope.mscale_all_dim);
    return scale * m * m;
}

double dpl_rope_frequencies(const dpl_model_config *c, float *inv_freq) {
    const dpl_rope_config *r = &c->rope;
    const double d = (double)c->d_rope;
    double low = 0, high = 0;
    if (r->yarn) {
        const double per_turn = r->original_positions / (2 * M_PI), turns = 2 * log(r->theta);
        low = d * log(per_turn / r->beta_fast) / turns;
        high = d * log(per_turn / r->beta_slow) / turns;
        low = fmax(r->truncate ? floor(low) : low, 0);
        high = fmin(r->truncate ? ceil(high) : high, d - 1);
        if (high == low) high += 0.001;
    }
    for (size_t i = 0; i < c->d_rope / 2; i++) {
        const double f = pow(r->theta, -2.0 * (double)i / d);
        // YaRN: frequencies that turn often in the original length stay, slow ones are divided by
        // the factor, a ramp between.
        const double ramp = r->yarn ? fmin(fmax(((double)i - low) / (high - low), 0), 1) : 0;
        inv_freq[i] = (float)(f / r->factor * ramp + f * (1 - ramp));
    }
    if (!r->yarn) return 1;
    if (r->attention_factor != 0) return r->attention_factor;
    if (r->mscale != 0 && r->mscale_all_dim != 0)
        return yarn_scale(r->factor, r->mscale) / yarn_scale(r->factor, r->mscale_all_dim);
    return yarn_scale(r->factor, 1.0);
}

/* ---- counts ---- */
double dpl_model_attention_flops(const dpl_model_config *c, size_t n_batch, size_t n_seq) {
    const double per_layer = (double)n_batch * (double)n_seq * (double)n_seq * (double)c->n_heads *
                             (double)(c->d_nope + c->d_rope + c->d_v);
    return 3 * per_layer * (double)(c->n_layers + c->n_mtp);
}

double dpl_model_flops(const dpl_model_config *c, size_t n_batch, size_t n_seq) {
    return 6 * (double)n_batch * (double)n_seq * dpl_params_count(c, true, c->top_k, true) +
           dpl_model_attention_flops(c, n_batch, n_seq);
}
