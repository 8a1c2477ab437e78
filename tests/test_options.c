/*
 * test_options.c - keys and values: what is read, what is refused and with which words, what comes
 * out again.
 *
 * Numbers in comments are rows of known-faults.md.
 */
#include <locale.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "fixture.h"
#include "scratch.h"
#include "trainkit.h"

static dpl_config *config;

static int open_defaults(void **state) {
    (void)state;
    return dpl_config_open(NULL, &config) == DPL_OK ? 0 : -1;
}
static int close_config(void **state) {
    (void)state;
    dpl_config_close(&config);
    return 0;
}

// Numbers as YAML and people write them.
static void numbers(void **state) {
    (void)state;
    static const struct {
        const char *text;
        double value;
    } good[] = {{"2e-5", 2e-5},  {"2.0e-5", 2e-5}, {"2E-5", 2e-5}, {".5", 0.5},
                {"1_000", 1000}, {"0x10", 16},     {"0", 0}};
    for (size_t i = 0; i < DPL_COUNT(good); i++) {
        run_set(config, "learning_rate=%s", good[i].text);
        assert_true(config->o.learning_rate == good[i].value);
    }
    run_set(config, "steps=1_000");
    assert_int_equal(config->o.steps, 1000);
    run_set(config, "steps=0x10");
    assert_int_equal(config->o.steps, 16);
    static const char *const bad[] = {"1e400", "nan", "inf", "abc", "1.0.0", "2e-5x", "0,5", "1 2"};
    for (size_t i = 0; i < DPL_COUNT(bad); i++) {
        char text[64];
        snprintf(text, sizeof text, "learning_rate=%s", bad[i]);
        check_error(dpl_config_set(config, text), DPL_EINVAL, "learning_rate", "");
    }
    assert_true(config->o.learning_rate == 0);
    static const char *const bad_steps[] = {"steps=2.5", "steps=1e400",
                                            "steps=", "steps=9223372036854775808", "steps=-2"};
    for (size_t i = 0; i < DPL_COUNT(bad_steps); i++)
        if (strcmp(bad_steps[i], "steps=") != 0)
            check_error(dpl_config_set(config, bad_steps[i]), DPL_EINVAL, "steps", "");
    assert_int_equal(config->o.steps, 16);
    check_ok(dpl_config_set(config, "steps=")); // YAML's null: the default
    assert_int_equal(config->o.steps, 150001);
}

static void ranges_and_choices(void **state) {
    (void)state;
    check_error(dpl_config_set(config, "adam_b1=1"), DPL_EINVAL, "adam_b1", "0 .. 0.999999999");
    check_error(dpl_config_set(config, "ranks=0"), DPL_EINVAL, "ranks", "1 .. 4096");
    check_error(dpl_config_set(config, "init_std=0"), DPL_EINVAL, "init_std", "> 0");
    check_error(dpl_config_set(config, "opt_type=muon"), DPL_EINVAL, "opt_type", "adamw");
    check_error(dpl_config_set(config, "remat_policy=full"), DPL_EINVAL, "remat_policy",
                "not supported");
    check_error(dpl_config_set(config, "norm_topk_prob=maybe"), DPL_EINVAL, "norm_topk_prob",
                "true or false");
    check_error(dpl_config_set(config, "steps"), DPL_EINVAL, "steps", "key=value");
    check_error(dpl_config_set(config, "=5"), DPL_EINVAL, "=5", "key=value");
    run_set(config, "norm_topk_prob=True");
    assert_string_equal(dpl_config_get(config, "norm_topk_prob"), "true");
    assert_null(dpl_config_get(config, "no_such_key"));
}

// A key that does not exist is an error with the nearest one that does.
static void unknown_keys(void **state) {
    (void)state;
    check_error(dpl_config_set(config, "learning_rte=1e-4"), DPL_EINVAL, "'learning_rte'",
                "'learning_rate'");
    check_error(dpl_config_set(config, "num-epochs=3"), DPL_EINVAL, "'num-epochs'", "'num_epoch'");
    check_error(dpl_config_set(config, "ici_fsdp_paralelism=1"), DPL_EINVAL, "",
                "'ici_fsdp_parallelism'");
    check_error(dpl_config_set(config, "weight_decay=0"), DPL_EINVAL, "", "'adam_weight_decay'");
    check_error(dpl_config_set(config, "batch_size=8"), DPL_EINVAL, "", "'per_device_batch_size'");
    // Keys that have no effect are not what anybody wants.
    check_error(dpl_config_set(config, "mlpwi_2=1"), DPL_EINVAL, "'mlpwi_2'", "nearest");
    assert_null(strstr(dpl_error_message(), "'mlpwi_0'"));
    char longer[200];
    memset(longer, 'k', sizeof longer - 3);
    memcpy(longer + sizeof longer - 3, "=1", 3);
    check_error(dpl_config_set(config, longer), DPL_EINVAL, "too long", "");
    const char *path = scratch_path("wrong.yml");
    scratch_text(path, "steps: 3\nlearning_rte: 1e-4\n");
    dpl_config *other = NULL;
    check_error(dpl_config_open(path, &other), DPL_EINVAL, "wrong.yml", "learning_rte");
    scratch_text(path, "steps: 3\n\nlearning_rate: abc\n");
    check_error(dpl_config_open(path, &other), DPL_EINVAL, "learning_rate", "3"); // the line
    assert_null(other);
}

// Keys of MaxText: what cannot change the result is ignored aloud, what would change it is refused.
static void keys_of_maxtext(void **state) {
    (void)state;
    scratch_log_start();
    check_ok(dpl_config_set(config, "hardware=cpu"));
    check_ok(dpl_config_set(config, "scan_layers=false"));
    const char *log = scratch_log_stop();
    assert_non_null(strstr(log, "hardware has no effect"));
    assert_non_null(strstr(log, "scan_layers has no effect"));
    static const char *const good[] = {
        "quantization=",           "capacity_factor=-1.0",
        "ici_fsdp_parallelism=-1", "mlp_activations=[\"silu\", \"linear\"]",
        "sparse_matmul=True",      "weight_dtype=float32",
        "model_name=default"};
    for (size_t i = 0; i < DPL_COUNT(good); i++) check_ok(dpl_config_set(config, good[i]));
    static const char *const bad[][3] = {
        {"quantization=fp8", "quantization", "fp8"},
        {"capacity_factor=1.25", "capacity_factor", "-1"},
        {"ici_tensor_parallelism=2", "ici_tensor", "'1'"},
        {"ici_context_parallelism=4", "ici_context", "'1'"},
        {"weight_dtype=bfloat16", "weight_dtype", "float32"},
        {"model_name=deepseek3-671b", "model_name", "default"},
        {"skip_step_on_spikes=true", "skip_step", "false"},
        {"mlp_activations=[\"gelu\"]", "mlp_act", "silu"},
    };
    for (size_t i = 0; i < DPL_COUNT(bad); i++)
        check_error(dpl_config_set(config, bad[i][0]), DPL_EINVAL, bad[i][1], bad[i][2]);
}

// Every option's default is inside its own range, and what config.yml holds reads back as the same
// values.
static void the_table_is_consistent(void **state) {
    (void)state;
    dpl_option_info info;
    for (size_t i = 0; i < dpl_config_option_count(); i++) {
        char text[256];
        check_ok(dpl_config_option(i, &info));
        assert_true(info.help[0] && info.help[strlen(info.help) - 1] == '.');
        snprintf(text, sizeof text, "%s=%s", info.name, info.default_value);
        check_ok(dpl_config_set(config, text));
    }
    check_error(dpl_config_option(dpl_config_option_count(), &info), DPL_EINVAL, "option", "");
    run_set(config, "learning_rate=0.1234567890123456789");
    run_set(config, "run_name=a \"quoted\": # name\twith\\tab");
    run_set(config, "adamw_mask=[\".*norm.*\", \"bias\"]");
    run_set(config, "load_parameters_path=yes");
    const char *path = scratch_path("all.yml");
    check_ok(dpl_config_save(config, path));
    dpl_config *back = NULL;
    check_ok(dpl_config_open(path, &back));
    for (size_t i = 0; i < dpl_config_option_count(); i++) {
        check_ok(dpl_config_option(i, &info));
        assert_true(back->given[i]);
        if (strcmp(info.name, "adamw_mask") != 0)
            assert_string_equal(dpl_config_get(back, info.name), dpl_config_get(config, info.name));
    }
    assert_true(back->o.learning_rate == config->o.learning_rate);
    assert_non_null(strstr(back->o.adamw_mask, "\".*norm.*\""));
    dpl_config_close(&back);
}

// A locale with a decimal comma changes neither reading nor writing.
static void locale_with_commas(void **state) {
    (void)state;
    static const char *const names[] = {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8", "de_DE"};
    bool found = false;
    for (size_t i = 0; i < DPL_COUNT(names) && !found; i++)
        found = setlocale(LC_ALL, names[i]) != NULL;
    if (!found) { // made here where the system has only its description
        char command[512];
        setenv("LOCPATH", scratch_path("locales"), 1);
        snprintf(
            command, sizeof command,
            "mkdir -p $LOCPATH && localedef -i de_DE -f UTF-8 $LOCPATH/de_DE.UTF-8 2>/dev/null");
        found = system(command) == 0 && setlocale(LC_ALL, "de_DE.UTF-8") != NULL;
    }
    if (!found) {
        print_message("no locale with a decimal comma is installed\n");
        skip();
    }
    char text[64];
    snprintf(text, sizeof text, "%.1f", 0.5);
    assert_string_equal(text, "0,5"); // the locale does what this test needs
    run_set(config, "learning_rate=0.1");
    assert_true(config->o.learning_rate == 0.1);
    run_set(config, "learning_rate=1e-4");
    assert_string_equal(dpl_config_get(config, "learning_rate"), "0.0001");
    dpl_step_metrics m = {.loss = 1.5, .lm_loss = 1.25};
    dpl_ctx *ctx = run_ctx(1);
    dpl_config *tiny = run_config("adam_weight_decay=0.125", NULL);
    dpl_trainer *t = run_open(ctx, tiny);
    char line[1024];
    dpl_metrics_line(t, &m, line, sizeof line);
    assert_non_null(strstr(line, "loss: 1.500, lm_loss: 1.250"));
    json_t *row = dpl_metrics_row(t, &m);
    char *dumped = json_dumps(row, JSON_REAL_PRECISION(17));
    assert_non_null(strstr(dumped, "\"lm_loss\": 1.25"));
    free(dumped);
    json_decref(row);
    dpl_trainer_close(&t);
    dpl_config_close(&tiny);
    dpl_ctx_close(&ctx);
    setlocale(LC_ALL, "C");
}

// Routing that cannot be is found before anything is trained.
static void impossible_models(void **state) {
    (void)state;
    static const char *const bad[][3] = {
        {"num_experts_per_tok=9", "num_experts_per_tok", ""},
        {"n_routing_groups=2", "topk_routing_group", ""},
        {"first_num_dense_layers=4", "first_num_dense_layers", ""},
        {"qk_rope_head_dim=5", "qk_rope_head_dim", "even"},
        {"routed_score_func=", "routed_score_func", "sigmoid"},
        {"decoder_block=llama2", "decoder_block", "deepseek"},
        {"attention_type=global", "attention_type", "mla"},
        {"per_device_batch_size=1.5", "per_device_batch_size", "whole"},
        {"dataset_type=text", "dataset_path", "empty"},
    };
    dpl_ctx *ctx = run_ctx(1);
    for (size_t i = 0; i < DPL_COUNT(bad); i++) {
        dpl_config *tiny = run_config(bad[i][0], NULL);
        dpl_trainer *t = NULL;
        check_error(dpl_trainer_open(ctx, tiny, &t), DPL_EINVAL, bad[i][1], bad[i][2]);
        assert_null(t);
        dpl_config_close(&tiny);
    }
    dpl_trainer *t = NULL;
    dpl_config *tiny = run_config("n_routing_groups=3", "topk_routing_group=2", NULL);
    check_error(dpl_trainer_open(ctx, tiny, &t), DPL_EINVAL, "num_experts 8", "n_routing_groups 3");
    run_set(tiny, "n_routing_groups=4");
    run_set(tiny, "topk_routing_group=5");
    check_error(dpl_trainer_open(ctx, tiny, &t), DPL_EINVAL, "topk_routing_group", "");
    run_set(tiny, "topk_routing_group=1");
    run_set(tiny, "num_experts_per_tok=3");
    check_error(dpl_trainer_open(ctx, tiny, &t), DPL_EINVAL, "num_experts_per_tok 3", "2 experts");
    dpl_config_close(&tiny);
    check_error(dpl_config_set(config, "num_experts=0"), DPL_EINVAL, "num_experts", "1 ..");
    check_error(dpl_config_set(config, "num_experts_per_tok=0"), DPL_EINVAL, "num_experts_per_tok",
                "1 ..");
    dpl_ctx_close(&ctx);
}

// Options that exclude each other, or need each other.
static void combinations(void **state) {
    (void)state;
    dpl_ctx *ctx = run_ctx(1);
    dpl_trainer *t = NULL;
    dpl_config *tiny = run_config("load_parameters_path=a", "load_full_state_path=b", NULL);
    check_error(dpl_trainer_open(ctx, tiny, &t), DPL_EINVAL, "exclude each other", "");
    dpl_config_close(&tiny);
    tiny = run_config("moe_use_megatron_seq_aux_loss=true", "routed_score_func=softmax", NULL);
    check_error(dpl_trainer_open(ctx, tiny, &t), DPL_EINVAL, "moe_use_megatron_seq_aux_loss",
                "sigmoid");
    dpl_config_close(&tiny);
    tiny = run_config("steps=-1", NULL);
    check_error(dpl_trainer_open(ctx, tiny, &t), DPL_EINVAL, "learning_rate_schedule_steps", "");
    run_set(tiny, "learning_rate_schedule_steps=5");
    t = run_open(ctx, tiny);
    assert_int_equal(t->n_steps, 5);
    dpl_trainer_close(&t);
    dpl_config_close(&tiny);
    dpl_ctx_close(&ctx);
}

// A model directory has the sizes; keys that were given must agree with it, the rest is taken over.
static void sizes_of_a_directory(void **state) {
    (void)state;
    if (!fixture_root()) skip();
    const char *dir = fixture_path("maxtext_trajectory");
    dpl_model_config model;
    run_set(config, "vocab_size=128");
    check_ok(dpl_config_adopt(config, dir, &model));
    assert_int_equal(config->o.base_emb_dim, 64);
    assert_int_equal(config->o.num_experts, 8);
    assert_true(config->o.norm_topk_prob && config->o.normalization_layer_epsilon == 1e-6);
    assert_string_equal(config->o.decoder_block, "deepseek");
    assert_string_equal(config->o.routed_score_func, "sigmoid");
    dpl_model_config again; // what was taken over describes the same model
    check_ok(dpl_config_model(config, &again));
    assert_int_equal(dpl_model_param_count(&again), dpl_model_param_count(&model));
    assert_int_equal(dpl_model_param_count(&model), 174696);
    run_set(config, "base_moe_mlp_dim=64");
    check_error(dpl_config_adopt(config, dir, &model), DPL_EINVAL, "base_moe_mlp_dim=64", "32");
}

int main(void) {
#define TEST(f) cmocka_unit_test_setup_teardown(f, open_defaults, close_config)
    const struct CMUnitTest tests[] = {
        TEST(numbers),
        TEST(ranges_and_choices),
        TEST(unknown_keys),
        TEST(keys_of_maxtext),
        TEST(the_table_is_consistent),
        TEST(locale_with_commas),
        TEST(impossible_models),
        TEST(combinations),
        TEST(sizes_of_a_directory),
    };
#undef TEST
    return cmocka_run_group_tests(tests, scratch_open, scratch_close);
}
