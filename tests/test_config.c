/*
 * test_config.c - config.json in both of its forms, the rules that sizes must obey, hostile values,
 * and the counts of parameters and FLOPs of public models.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "modelkit.h"
#include "scratch.h"

static const char *const folders[] = {
    "deepseek_v3",      "deepseek_v3_noqlora", "deepseek_v3_yarn",  "deepseek_v3_halfrope",
    "deepseek_v3_bf16", "deepseek_v3_mtp",     "maxtext_trajectory"};

// A small model in the older form, with every field that matters.
static const char base_text[] =
    "{'model_type': 'deepseek_v3', 'vocab_size': 70, 'hidden_size': 24, 'num_hidden_layers': 3,"
    " 'num_attention_heads': 2, 'num_key_value_heads': 2, 'q_lora_rank': 10, 'kv_lora_rank': 16,"
    " 'qk_nope_head_dim': 8, 'qk_rope_head_dim': 4, 'v_head_dim': 6, 'intermediate_size': 40,"
    " 'first_k_dense_replace': 1, 'n_routed_experts': 8, 'num_experts_per_tok': 3,"
    " 'moe_intermediate_size': 18, 'n_shared_experts': 2, 'n_group': 4, 'topk_group': 2,"
    " 'routed_scaling_factor': 2.5, 'norm_topk_prob': true, 'num_nextn_predict_layers': 1,"
    " 'rms_norm_eps': 0.001, 'rope_theta': 10000.0, 'rope_scaling': {'type': 'yarn',"
    " 'factor': 40, 'original_max_position_embeddings': 4096, 'mscale': 0.7,"
    " 'mscale_all_dim': 1.0}, 'max_position_embeddings': 163840}";

static json_t *parse(const char *text) {
    json_t *object = json_loads(text, 0, NULL);
    if (object) return object;
    char *copy = strdup(text); // ' stands for "
    for (char *p = copy; *p; p++)
        if (*p == '\'') *p = '"';
    json_error_t error;
    object = json_loads(copy, JSON_REJECT_DUPLICATES, &error);
    if (!object) fail_msg("%s: %s", copy, error.text);
    free(copy);
    return object;
}

static json_t *base_with(const char *changes) {
    json_t *object = parse(base_text), *other = parse(changes);
    json_object_update(object, other);
    json_decref(other);
    return object;
}

static dpl_status read(const char *changes, dpl_model_config *config) {
    json_t *object = base_with(changes);
    const dpl_status status = dpl_model_config_from_json(object, config);
    json_decref(object);
    return status;
}

static void same(const char *field, double a, double b) {
    if (a != b) fail_msg("%s is %.17g and %.17g", field, a, b);
}

// Field by field: padding of the structures must not count.
static void assert_same(const dpl_model_config *a, const dpl_model_config *b) {
#define SAME(field) same(#field, (double)a->field, (double)b->field)
    SAME(vocab), SAME(d), SAME(n_layers), SAME(n_dense), SAME(n_heads), SAME(q_lora);
    SAME(kv_lora), SAME(d_nope), SAME(d_rope), SAME(d_v), SAME(mlp_f), SAME(moe_f);
    SAME(n_experts), SAME(top_k), SAME(n_shared), SAME(n_groups), SAME(top_groups);
    SAME(n_mtp), SAME(max_positions), SAME(sigmoid), SAME(routed_bias), SAME(norm_topk);
    SAME(tied), SAME(attention_bias), SAME(rope_interleave), SAME(eps), SAME(routed_scale);
    SAME(rope.theta), SAME(rope.yarn), SAME(rope.factor), SAME(rope.beta_fast);
    SAME(rope.beta_slow), SAME(rope.mscale), SAME(rope.mscale_all_dim);
    SAME(rope.attention_factor), SAME(rope.truncate);
    if (a->rope.yarn) SAME(rope.original_positions);
#undef SAME
}

/* ---- reading and writing ---- */

static void both_forms_give_the_same_model(void **state) {
    (void)state;
    if (!fixture_root()) skip();
    for (size_t i = 0; i < DPL_COUNT(folders); i++) {
        dpl_model_config config, legacy;
        oracle_config oracle;
        dpl_dtype dtype;
        const char *dir = fixture_path("%s", folders[i]);
        check_ok(dpl_model_read_config(dir, &config, &dtype));
        assert_int_equal(dtype, strstr(folders[i], "bf16") ? DPL_BF16 : DPL_F32);
        json_t *object = json_load_file(fixture_path("%s/config.legacy.json", folders[i]), 0, NULL);
        if (object) {
            check_ok(dpl_model_config_from_json(object, &legacy));
            assert_same(&config, &legacy);
        }
        assert_true(object || strcmp(folders[i], "maxtext_trajectory") == 0);
        json_decref(object);
        // And the same as another reader understands.
        assert_true(oracle_config_load(fixture_path("%s/config.json", folders[i]), &oracle));
        dpl_model_config other = scene_config(&oracle);
        other.max_positions = config.max_positions;
        assert_same(&config, &other);
    }
}

static void round_trip(const dpl_model_config *config) {
    dpl_model_config again;
    json_t *object = dpl_model_config_to_json(config, DPL_BF16);
    assert_non_null(object);
    assert_string_equal(json_string_value(json_object_get(object, "torch_dtype")), "bfloat16");
    // Through text, as a file would have it.
    char *text = json_dumps(object, 0);
    json_t *parsed = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    check_ok(dpl_model_config_from_json(parsed, &again));
    assert_same(config, &again);
    free(text);
    json_decref(parsed);
    json_decref(object);
}

static void what_is_written_reads_back(void **state) {
    (void)state;
    static const char *const changes[] = {
        "{}",
        "{'q_lora_rank': null, 'n_shared_experts': null, 'rope_scaling': null}",
        "{'tie_word_embeddings': true, 'attention_bias': true, 'rope_interleave': false}",
        "{'scoring_func': 'softmax', 'norm_topk_prob': false, 'n_group': 1, 'topk_group': 1}",
        "{'n_routed_experts': 0, 'first_k_dense_replace': 3, 'num_nextn_predict_layers': 0}",
        ("{'rope_scaling': {'rope_type': 'yarn', 'factor': 3.7, 'truncate': false,"
         " 'attention_factor': 1.25, 'beta_fast': 31.5, 'beta_slow': 0.9}}"),
        "{'routed_scaling_factor': 0.1, 'rms_norm_eps': 1e-5, 'rope_theta': 50000}"};
    for (size_t i = 0; i < DPL_COUNT(changes); i++) {
        dpl_model_config config;
        check_ok(read(changes[i], &config));
        round_trip(&config);
    }
}

// An absent key means what it means to transformers; null where a value is optional means none.
static void absent_keys_have_the_defaults_of_transformers(void **state) {
    (void)state;
    json_t *object = parse("{'model_type': 'deepseek_v3', 'vocab_size': 9, 'hidden_size': 24,"
                           " 'num_hidden_layers': 5, 'num_attention_heads': 2, 'kv_lora_rank': 16,"
                           " 'qk_nope_head_dim': 8, 'qk_rope_head_dim': 4, 'v_head_dim': 6,"
                           " 'unknown_key': {'a': [1]}, 'head_dim': 77}");
    dpl_model_config c;
    check_ok(dpl_model_config_from_json(object, &c));
    json_decref(object);
    assert_int_equal(c.q_lora, 1536);
    assert_int_equal(c.n_experts, 256);
    assert_int_equal(c.top_k, 8);
    assert_int_equal(c.n_shared, 1);
    assert_int_equal(c.n_groups, 8);
    assert_int_equal(c.top_groups, 4);
    assert_int_equal(c.n_dense, 3);
    assert_int_equal(c.moe_f, 2048);
    assert_int_equal(c.mlp_f, 18432);
    assert_int_equal(c.n_mtp, 0);
    assert_true(c.routed_scale == 2.5 && c.eps == 1e-6 && c.rope.theta == 10000);
    assert_true(c.rope_interleave && c.sigmoid && c.norm_topk && !c.tied && !c.attention_bias);
    assert_false(c.rope.yarn);
    check_ok(read("{'q_lora_rank': null, 'n_shared_experts': null, 'n_group': null,"
                  " 'topk_group': null}",
                  &c));
    assert_true(c.q_lora == 0 && c.n_shared == 0 && c.n_groups == 1);
    check_ok(read("{'first_k_dense_replace': 7, 'num_nextn_predict_layers': 0}", &c));
    assert_int_equal(c.n_dense, 3); // all layers are dense
    check_ok(read("{'rope_parameters': {'rope_type': 'default', 'rope_theta': 500},"
                  " 'max_position_embeddings': 163840}",
                  &c));
    assert_true(c.rope.theta == 500 && c.rope.original_positions == 4096); // it means nothing here
}

/* ---- errors ---- */

typedef struct bad_case {
    const char *changes;
    dpl_status status;
    const char *part, *part2;
} bad_case;

static void refuse_all(const bad_case *cases, size_t n) {
    for (size_t i = 0; i < n; i++) {
        dpl_model_config config = {.vocab = 123};
        const dpl_status status = read(cases[i].changes, &config);
        if (status != cases[i].status)
            print_error("%s: %s\n", cases[i].changes, dpl_error_message());
        check_error(status, cases[i].status, cases[i].part, cases[i].part2);
        assert_int_equal(config.vocab, 123); // nothing is written on failure
    }
}

static void fields_that_would_change_the_result_are_named(void **state) {
    (void)state;
    static const bad_case cases[] = {
        {"{'model_type': 'llama'}", DPL_ENOSUP, "model_type", "deepseek_v3"},
        {"{'model_type': null}", DPL_EFORMAT, "model_type", "missing"},
        {"{'hidden_act': 'gelu'}", DPL_ENOSUP, "hidden_act", "silu"},
        {"{'attention_dropout': 0.1}", DPL_ENOSUP, "attention_dropout", "only 0"},
        {"{'num_key_value_heads': 1}", DPL_ENOSUP, "num_key_value_heads", "= 2"},
        {"{'scoring_func': 'tanh'}", DPL_ENOSUP, "scoring_func", "softmax"},
        {"{'topk_method': 'greedy'}", DPL_ENOSUP, "topk_method", "noaux_tc"},
        {"{'moe_layer_freq': 2}", DPL_ENOSUP, "moe_layer_freq", "only 1"},
        {"{'quantization_config': {'quant_method': 'fp8'}}", DPL_ENOSUP, "quantization_config",
         "BF16"},
        {"{'quantization_config': {'quant_method': 'fp8', 'weight_block_size': [128, 64]}}",
         DPL_ENOSUP, "quantization_config", "[128, 128]"},
        {"{'quantization_config': {'quant_method': 'awq', 'weight_block_size': [128, 128]}}",
         DPL_ENOSUP, "quantization_config", "fp8"},
        {"{'rope_scaling': {'type': 'linear', 'factor': 2}}", DPL_ENOSUP, "\"type\"", "yarn"},
        {"{'rope_scaling': {'rope_type': 'llama3'}}", DPL_ENOSUP, "rope_type", "yarn"},
        {"{'rope_parameters': {'rope_type': 'dynamic'}}", DPL_ENOSUP, "rope_type", "yarn"},
        {"{'rope_parameters': {'partial_rotary_factor': 0.5}}", DPL_ENOSUP, "partial_rotary_factor",
         "only 1"},
        {"{'partial_rotary_factor': 0.5}", DPL_ENOSUP, "partial_rotary_factor", "only 1"}};
    refuse_all(cases, DPL_COUNT(cases));
}

static void hostile_values_are_refused(void **state) {
    (void)state;
    static const bad_case cases[] = {
        {"{'vocab_size': null}", DPL_EFORMAT, "vocab_size", "missing"},
        {"{'vocab_size': '70'}", DPL_EFORMAT, "vocab_size", "not a number"},
        {"{'vocab_size': [70]}", DPL_EFORMAT, "vocab_size", "not a number"},
        {"{'vocab_size': true}", DPL_EFORMAT, "vocab_size", "not a number"},
        {"{'vocab_size': -70}", DPL_EFORMAT, "vocab_size", "whole number"},
        {"{'vocab_size': 70.5}", DPL_EFORMAT, "vocab_size", "whole number"},
        {"{'vocab_size': 1e300}", DPL_EFORMAT, "vocab_size", "whole number"},
        {"{'vocab_size': 9223372036854775807}", DPL_EFORMAT, "vocab_size", "whole number"},
        {"{'vocab_size': 0}", DPL_EINVAL, "vocab_size", "expected 1"},
        {"{'hidden_size': 0}", DPL_EINVAL, "base_emb_dim", "expected 1"},
        {"{'hidden_size': 1e12}", DPL_EINVAL, "base_emb_dim", "1048576"},
        {"{'num_hidden_layers': 0}", DPL_EINVAL, "base_num_decoder_layers", "0"},
        {"{'num_hidden_layers': 10001}", DPL_EINVAL, "base_num_decoder_layers", "10000"},
        {"{'num_attention_heads': 0, 'num_key_value_heads': 0}", DPL_EINVAL, "base_num_query_heads",
         "0"},
        {"{'kv_lora_rank': 0}", DPL_EINVAL, "kv_lora_rank", "0"},
        {"{'qk_rope_head_dim': 5}", DPL_EINVAL, "qk_rope_head_dim", "even"},
        {"{'qk_rope_head_dim': 0}", DPL_EINVAL, "qk_rope_head_dim", "expected 2"},
        {"{'v_head_dim': 0}", DPL_EINVAL, "v_head_dim", "0"},
        {"{'rms_norm_eps': 0}", DPL_EINVAL, "epsilon", "0"},
        {"{'rms_norm_eps': 'a'}", DPL_EFORMAT, "rms_norm_eps", "not a number"},
        {"{'tie_word_embeddings': 1}", DPL_EFORMAT, "tie_word_embeddings", "true or false"},
        {"{'norm_topk_prob': 'yes'}", DPL_EFORMAT, "norm_topk_prob", "true or false"},
        {"{'hidden_act': 3}", DPL_ENOSUP, "hidden_act", "not text"},
        {"{'rope_theta': 0}", DPL_EINVAL, "rope_max_timescale", "0"},
        {"{'rope_scaling': 'yarn'}", DPL_EFORMAT, "rope_scaling", "not an object"},
        {"{'rope_parameters': [1]}", DPL_EFORMAT, "rope_parameters", "not an object"},
        {"{'rope_scaling': {'type': 'yarn'}}", DPL_EFORMAT, "factor", "missing"},
        {"{'rope_scaling': {'type': 'yarn', 'factor': 0.5}}", DPL_EINVAL, "rope_factor", "0.5"},
        {"{'rope_scaling': {'type': 'yarn', 'factor': 2, 'beta_fast': 0}}", DPL_EINVAL, "beta_fast",
         "0"},
        {"{'rope_scaling': {'type': 'yarn', 'factor': 2, 'beta_slow': -1}}", DPL_EINVAL,
         "beta_slow", "-1"},
        {"{'rope_scaling': {'type': 'yarn', 'factor': 2,"
         " 'original_max_position_embeddings': 0}}",
         DPL_EINVAL, "original_max_position_embeddings", "0"},
        {"{'rope_scaling': {'type': 'yarn', 'factor': 2, 'truncate': 'no'}}", DPL_EFORMAT,
         "truncate", "true or false"},
        // Sizes of which each is possible and all together are not.
        {"{'hidden_size': 1048576, 'vocab_size': 1073741824}", DPL_EINVAL, "parameters", "2^50"},
        {"{'num_hidden_layers': 10000, 'n_routed_experts': 65536}", DPL_EINVAL, "num_experts",
         "10001 layers"}};
    refuse_all(cases, DPL_COUNT(cases));
}

static void routing_must_be_possible(void **state) {
    (void)state;
    static const bad_case cases[] = {
        {"{'num_experts_per_tok': 9}", DPL_EINVAL, "num_experts_per_tok", "1 to 8"},
        {"{'num_experts_per_tok': 0}", DPL_EINVAL, "num_experts_per_tok", "1 to 8"},
        {"{'n_routed_experts': 0}", DPL_EINVAL, "num_experts", "3 layers are MoE"},
        {"{'n_group': 3}", DPL_EINVAL, "not divisible", "n_routing_groups 3"},
        {"{'n_group': 0}", DPL_EINVAL, "n_routing_groups", "expected 1"},
        {"{'n_group': 8, 'num_experts_per_tok': 1}", DPL_EINVAL, "n_routing_groups 8",
         "at least 2"},
        {"{'topk_group': 5}", DPL_EINVAL, "topk_routing_group", "1 to 4"},
        {"{'topk_group': 0}", DPL_EINVAL, "topk_routing_group", "1 to 4"},
        {"{'topk_group': 1}", DPL_EINVAL, "num_experts_per_tok 3", "2 experts"},
        {"{'moe_intermediate_size': 0}", DPL_EINVAL, "base_moe_mlp_dim", "0"},
        {"{'intermediate_size': 0}", DPL_EINVAL, "base_mlp_dim", "0"}};
    refuse_all(cases, DPL_COUNT(cases));
    dpl_model_config config;
    check_ok(read("{'num_experts_per_tok': 4}", &config)); // all of the two groups
    check_ok(read("{'num_experts_per_tok': 8, 'topk_group': 4}", &config));
    dpl_model_config_init(&config);
    assert_int_equal(dpl_model_config_check(&config), DPL_EINVAL); // sizes have no default
    check_ok(read("{}", &config));
    config.n_dense = 4;
    check_error(dpl_model_config_check(&config), DPL_EINVAL, "first_num_dense_layers is 4", "= 3");
}

static void a_damaged_file_is_an_error_with_its_path(void **state) {
    (void)state;
    dpl_model_config config;
    check_error(dpl_model_read_config(scratch_path("none"), &config, NULL), DPL_EIO, "config.json",
                "");
    scratch_text(scratch_path("config.json"), "{\"model_type\": ");
    check_error(dpl_model_read_config(scratch_path("."), &config, NULL), DPL_EFORMAT, "config.json",
                "");
    scratch_text(scratch_path("config.json"), "{\"model_type\": \"deepseek_v3\"}");
    check_error(dpl_model_read_config(scratch_path("."), &config, NULL), DPL_EFORMAT, "config.json",
                "vocab_size");
}

/* ---- rotary embedding ---- */

static void softmax_scale_is_that_of_yarn(void **state) {
    (void)state;
    dpl_model_config c;
    check_ok(read("{'num_attention_heads': 8, 'num_key_value_heads': 8, 'hidden_size': 64,"
                  " 'qk_nope_head_dim': 12, 'rope_scaling': null}",
                  &c));
    assert_true(dpl_model_softmax_scale(&c) == 0.25); // not that of 64 / 8
    check_ok(read("{'qk_nope_head_dim': 128, 'qk_rope_head_dim': 64}", &c));
    // m = 0.1 ln(40) + 1 = 1.368888, its square 1.873854.
    assert_true(fabs(dpl_model_softmax_scale(&c) - 0.1352337) < 1e-7);
    c.rope.mscale_all_dim = 0.707;
    assert_true(fabs(dpl_model_softmax_scale(&c) * sqrt(192.0) - 1.5896262) < 1e-6);
}

static void frequencies_are_those_of_transformers(void **state) {
    (void)state;
    if (!fixture_root()) skip();
    for (size_t i = 0; i + 1 < DPL_COUNT(folders); i++) {
        dpl_model_config config;
        fixture f;
        float got[64];
        check_ok(dpl_model_read_config(fixture_path("%s", folders[i]), &config, NULL));
        assert_true(fixture_open(fixture_path("%s/reference.safetensors", folders[i]), &f));
        size_t n;
        double *want = fixture_f64(&f, "rope.inv_freq", &n);
        assert_int_equal(n, config.d_rope / 2);
        const double factor = dpl_rope_frequencies(&config, got);
        assert_true(factor == 1); // yarn's mscales are equal there
        for (size_t j = 0; j < n; j++) assert_true(fabs(got[j] - want[j]) <= 0x1p-23 * want[j]);
        free(want);
        fixture_close(&f);
    }
    dpl_model_config c;
    float freq[2];
    check_ok(read("{}", &c)); // mscale 0.7, mscale_all_dim 1
    const double m = (0.07 * log(40) + 1) / (0.1 * log(40) + 1);
    assert_true(fabs(dpl_rope_frequencies(&c, freq) - m) < 1e-12);
    c.rope.mscale = 0;
    assert_true(fabs(dpl_rope_frequencies(&c, freq) - (0.1 * log(40) + 1)) < 1e-12);
    c.rope.attention_factor = 1.25;
    assert_true(dpl_rope_frequencies(&c, freq) == 1.25);
}

/* ---- counts ---- */

static double count(const json_t *object, const char *key) {
    const json_t *value = json_object_get(object, key);
    if (!json_is_number(value)) fail_msg("counts.json has no number %s", key);
    return json_number_value(value);
}

static void counts_are_those_of_the_public_model(void **state) {
    (void)state;
    if (!fixture_root()) skip();
    json_t *root = json_load_file(fixture_path("counts.json"), 0, NULL);
    const json_t *model = json_object_get(json_object_get(root, "models"), "DeepSeek-V3");
    dpl_model_config c;
    check_ok(dpl_model_config_from_json(json_object_get(model, "config"), &c));
    assert_int_equal(dpl_model_param_count(&c), 671026404352);
    assert_true((double)dpl_model_param_count(&c) == count(model, "parameters"));
    assert_true((double)dpl_model_active_param_count(&c) ==
                count(model, "active_parameters_per_token"));
    assert_int_equal(c.n_mtp, 1);
    dpl_model_config plain = c;
    plain.n_mtp = 0; // the reference counts the model without its MTP layer
    size_t i;
    json_t *row;
    json_array_foreach(json_object_get(model, "flops"), i, row) {
        const size_t B = (size_t)count(row, "B"), S = (size_t)count(row, "S");
        assert_true(dpl_model_flops(&plain, B, S) == count(row, "total"));
        assert_true(dpl_model_attention_flops(&plain, B, S) == 3 * 61 * count(row, "attn"));
        // An MTP layer costs its attention and one MoE layer; the head is not counted again (as in
        // MaxText).
        const double layer = 3 * (count(row, "q") + count(row, "kv") + count(row, "attn") +
                                  count(row, "out") + count(row, "moe") / 58);
        assert_true(fabs(dpl_model_flops(&c, B, S) - count(row, "total") - layer) <
                    1e-12 * count(row, "total"));
    }
    assert_int_equal(i, 2);
    assert_true(fabs(dpl_model_flops(&plain, 1, 4096) / 4096 - 250.449887232e9) < 1);
    json_decref(root);
}

// Only what a token uses is counted; an embedding that is looked up costs nothing; the shared
// expert has its own width.
static void flops_follow_what_is_computed(void **state) {
    (void)state;
    dpl_model_config c, other;
    check_ok(read("{'rope_scaling': null, 'num_nextn_predict_layers': 0, 'n_group': 1,"
                  " 'topk_group': 1, 'n_shared_experts': 0}",
                  &c));
    const double T = 5 * 7;
    other = c;
    c.top_k = 2, other.top_k = 8;
    const double ffn = 6 * 3 * T * 18 * 24 * 2; // of one expert a token, in both MoE layers
    assert_true(dpl_model_flops(&other, 5, 7) - dpl_model_flops(&c, 5, 7) == 6 * ffn);
    other = c;
    other.tied = true;
    assert_true(dpl_model_flops(&other, 5, 7) == dpl_model_flops(&c, 5, 7));
    assert_int_equal(dpl_model_param_count(&c) - dpl_model_param_count(&other), 70 * 24);
    other = c;
    other.n_shared = 3;
    assert_true(dpl_model_flops(&other, 5, 7) - dpl_model_flops(&c, 5, 7) == 3 * ffn);
    other = c;
    other.vocab += 10;
    assert_true(dpl_model_flops(&other, 5, 7) - dpl_model_flops(&c, 5, 7) == 6 * T * 24 * 10);
    other = c; // full query projection
    other.q_lora = 0;
    const double with = 24 * 10 + 10 * 24, without = 24 * 24; // both heads together are 24 wide
    assert_true(dpl_model_flops(&c, 5, 7) - dpl_model_flops(&other, 5, 7) ==
                3 * 6 * T * (with - without));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(both_forms_give_the_same_model),
        cmocka_unit_test(what_is_written_reads_back),
        cmocka_unit_test(absent_keys_have_the_defaults_of_transformers),
        cmocka_unit_test(fields_that_would_change_the_result_are_named),
        cmocka_unit_test(hostile_values_are_refused),
        cmocka_unit_test(routing_must_be_possible),
        cmocka_unit_test_setup_teardown(a_damaged_file_is_an_error_with_its_path, scratch_open,
                                        scratch_close),
        cmocka_unit_test(softmax_scale_is_that_of_yarn),
        cmocka_unit_test(frequencies_are_those_of_transformers),
        cmocka_unit_test(counts_are_those_of_the_public_model),
        cmocka_unit_test(flops_follow_what_is_computed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
