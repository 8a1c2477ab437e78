/*
 * test_api.c - section 5 of dropless.h: a model by its public functions alone, from a
 * configuration, to files and back, its loss, evaluation, generation and description, and what each
 * does with wrong arguments.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <jansson.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/base.h"
#include "io/io.h"
#include "scratch.h"

#define VOCAB     256
#define POSITIONS 64

static const char *const small[] = {
    "decoder_block=deepseek",
    "attention_type=mla",
    "vocab_size=256",
    "base_emb_dim=32",
    "base_num_decoder_layers=2",
    "first_num_dense_layers=1",
    "base_mlp_dim=48",
    "base_moe_mlp_dim=16",
    "num_experts=8",
    "num_experts_per_tok=2",
    "shared_experts=1",
    "routed_score_func=sigmoid",
    "routed_bias=true",
    "norm_topk_prob=true",
    "base_num_query_heads=2",
    "q_lora_rank=16",
    "kv_lora_rank=16",
    "qk_nope_head_dim=8",
    "qk_rope_head_dim=8",
    "v_head_dim=8",
    "max_position_embeddings=64",
    "max_target_length=32",
    "per_device_batch_size=2",
    "dtype=float32",
    "weight_init=normal",
    "init_std=0.3",
};

static dpl_config *small_config(const char *more) {
    dpl_config *config = NULL;
    check_ok(dpl_config_open(NULL, &config));
    for (size_t i = 0; i < sizeof small / sizeof small[0]; i++)
        check_ok(dpl_config_set(config, small[i]));
    if (more) check_ok(dpl_config_set(config, more));
    return config;
}

typedef struct rig {
    dpl_ctx *ctx;
    dpl_config *config;
    dpl_model *model;
} rig;

static rig rig_open(int n_threads, const char *more) {
    rig r = {.config = small_config(more)};
    check_ok(dpl_ctx_open(n_threads, &r.ctx));
    check_ok(dpl_model_open(r.ctx, NULL, r.config, &r.model));
    return r;
}

static void rig_close(rig *r) {
    dpl_model_close(&r->model);
    assert_null(r->model);
    dpl_config_close(&r->config);
    dpl_ctx_close(&r->ctx);
}

static const char *make_dir(const char *name) {
    const char *path = scratch_path("%s", name);
    assert_int_equal(mkdir(path, 0777), 0);
    return path;
}

static void fill_ids(int32_t *ids, size_t n, uint32_t seed) {
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        ids[i] = (int32_t)(seed >> 24);
    }
}

// Log softmax of one row at `id`, in double.
static double log_p(const float *row, int32_t id) {
    double top = row[0], sum = 0;
    for (int j = 1; j < VOCAB; j++) top = fmax(top, row[j]);
    for (int j = 0; j < VOCAB; j++) sum += exp(row[j] - top);
    return row[id] - top - log(sum);
}

/* ---- version and sizes ---- */

static void test_version(void **state) {
    (void)state;
    char text[32];
    snprintf(text, sizeof text, "%d.%d.%d", DPL_VERSION_MAJOR, DPL_VERSION_MINOR,
             DPL_VERSION_PATCH);
    assert_string_equal(dpl_version(), text); // CMake's number and the header's
}

static void test_info(void **state) {
    (void)state;
    rig r = rig_open(1, NULL);
    dpl_model_info info = {.struct_bytes = sizeof info};
    check_ok(dpl_model_get_info(r.model, &info));
    assert_string_equal(info.family, "deepseek_v3");
    assert_string_equal(info.dtype, "float32");
    assert_int_equal(info.vocab, VOCAB);
    assert_int_equal(info.n_layers, 2);
    assert_int_equal(info.n_dense_layers, 1);
    assert_int_equal(info.n_experts, 8);
    assert_int_equal(info.positions_max, POSITIONS);
    // By hand: embedding and head, two attention blocks with three norms and the two of the layer,
    // final norm.
    const uint64_t attention = 32 * 16 + 16 * 2 * 16 + 32 * 24 + 16 * 2 * 16 + 16 * 32;
    const uint64_t rest = 2 * 256 * 32 + 2 * (attention + 2 * 32 + 16 + 16) + 32 + 3 * 32 * 48 +
                          8 * 32;
    assert_int_equal(info.n_params, rest + (8 + 1) * 3 * 32 * 16);
    assert_int_equal(info.n_active_params, rest + (2 + 1) * 3 * 32 * 16);
    // A caller that was built with an older header gets what it knows, and no byte more.
    dpl_model_info old;
    memset(&old, 0x55, sizeof old);
    old.struct_bytes = offsetof(dpl_model_info, n_params);
    check_ok(dpl_model_get_info(r.model, &old));
    assert_int_equal(old.n_experts, 8);
    assert_int_equal(old.n_params, UINT64_C(0x5555555555555555));
    old.struct_bytes = 0;
    check_error(dpl_model_get_info(r.model, &old), DPL_EINVAL, "struct_bytes", "");
    rig_close(&r);
}

/* ---- forward and loss ---- */

static void test_forward_rows(void **state) {
    (void)state;
    enum { B = 3, S = 20 };
    int32_t ids[B * S];
    fill_ids(ids, B * S, 1);
    float *all = malloc(sizeof(float) * B * S * VOCAB), *one = malloc(sizeof(float) * S * VOCAB);
    for (int n_threads = 1; n_threads <= 3; n_threads += 2) {
        rig r = rig_open(n_threads, NULL);
        check_ok(dpl_model_forward(r.model, ids, B, S, all));
        check_ok(dpl_model_forward(r.model, ids + S, 1, S, one));
        assert_memory_equal(one, all + S * VOCAB, sizeof(float) * S * VOCAB);
        // A shorter sequence gives the same bits for the positions that it has.
        check_ok(dpl_model_forward(r.model, ids + S, 1, S / 2, one));
        assert_memory_equal(one, all + S * VOCAB, sizeof(float) * (S / 2) * VOCAB);
        rig_close(&r);
    }
    free(all);
    free(one);
}

static void test_loss(void **state) {
    (void)state;
    enum { B = 2, S = 17 };
    int32_t ids[B * S], targets[B * S];
    fill_ids(ids, B * S, 2);
    fill_ids(targets, B * S, 3);
    targets[0] = targets[S + 4] = -100;
    rig r = rig_open(2, NULL);
    float *logits = malloc(sizeof(float) * B * S * VOCAB);
    check_ok(dpl_model_forward(r.model, ids, B, S, logits));
    double want = 0, got = 0;
    for (int i = 0; i < B * S; i++)
        if (targets[i] >= 0) want -= log_p(logits + i * VOCAB, targets[i]);
    size_t n = 0;
    check_ok(dpl_model_loss(r.model, ids, targets, B, S, &got, &n));
    assert_int_equal(n, B * S - 2);
    assert_true(fabs(got - want) < 1e-5 * want);
    check_ok(dpl_model_loss(r.model, ids, targets, B, S, &got, NULL));
    free(logits);
    rig_close(&r);
}

static void test_wrong_batches(void **state) {
    (void)state;
    rig r = rig_open(1, NULL);
    int32_t ids[4] = {0, 1, 2, 256}, targets[4] = {1, 2, 999, -1};
    float *logits = malloc(sizeof(float) * 4 * VOCAB);
    double loss = 7;
    check_error(dpl_model_forward(r.model, ids, 1, 4, logits), DPL_EINVAL, "256", "0 to 255");
    ids[3] = -1;
    check_error(dpl_model_forward(r.model, ids, 1, 4, logits), DPL_EINVAL, "-1", "0 to 255");
    check_error(dpl_model_forward(r.model, ids, 1, 0, logits), DPL_EINVAL, "0 tokens", "1 to 64");
    check_error(dpl_model_forward(r.model, ids, 0, 4, logits), DPL_EINVAL, "0 sequences", "");
    check_error(dpl_model_forward(r.model, ids, 1, POSITIONS + 1, logits), DPL_EINVAL, "65", "64");
    check_error(dpl_model_forward(r.model, ids, SIZE_MAX / 2, 4, logits), DPL_EINVAL, "sequences",
                "");
    check_error(dpl_model_forward(NULL, ids, 1, 4, logits), DPL_EINVAL, "dpl_model_forward",
                "needs model");
    check_error(dpl_model_loss(r.model, ids, targets, 1, 3, &loss, NULL), DPL_EINVAL, "999",
                "target");
    assert_true(loss == 7);
    free(logits);
    rig_close(&r);
}

static void test_open_errors(void **state) {
    (void)state;
    dpl_ctx *ctx = NULL;
    dpl_model *model = NULL;
    dpl_config *config = small_config(NULL);
    check_ok(dpl_ctx_open(1, &ctx));
    check_error(dpl_model_open(ctx, NULL, NULL, &model), DPL_EINVAL, "neither", "");
    check_error(dpl_model_open(NULL, NULL, config, &model), DPL_EINVAL, "context", "");
    check_error(dpl_model_open(ctx, scratch_path("none"), NULL, &model), DPL_EIO, "none",
                "cannot find");
    check_error(dpl_model_open(ctx, "", NULL, &model), DPL_EINVAL, "empty", "");
    scratch_text(scratch_path("file"), "x");
    check_error(dpl_model_open(ctx, scratch_path("file"), NULL, &model), DPL_EIO, "file", "");
    make_dir("run");
    make_dir("bad");
    scratch_text(scratch_path("run/config.yml"), "steps: 3\n");
    check_error(dpl_model_open(ctx, scratch_path("run"), NULL, &model), DPL_EIO, "is no model", "");
    scratch_text(scratch_path("bad/config.json"), "{\"model_type\":\"deepseek_v3\",");
    check_error(dpl_model_open(ctx, scratch_path("bad"), NULL, &model), DPL_EFORMAT, "config.json",
                "");
    check_ok(dpl_config_set(config, "num_experts_per_tok=9"));
    check_error(dpl_model_open(ctx, NULL, config, &model), DPL_EINVAL, "num_experts_per_tok", "");
    assert_null(model);
    dpl_config_close(&config);
    dpl_ctx_close(&ctx);
    dpl_model_close(NULL);
    dpl_model_close(&model);
}

/* ---- files ---- */

static void expect_equal_models(dpl_model *a, dpl_model *b) {
    enum { S = 12 };
    int32_t ids[S];
    fill_ids(ids, S, 5);
    float *x = malloc(sizeof(float) * S * VOCAB), *y = malloc(sizeof(float) * S * VOCAB);
    check_ok(dpl_model_forward(a, ids, 1, S, x));
    check_ok(dpl_model_forward(b, ids, 1, S, y));
    assert_memory_equal(x, y, sizeof(float) * S * VOCAB);
    free(x);
    free(y);
}

static void test_write(void **state) {
    (void)state;
    rig r = rig_open(2, NULL);
    dpl_model *copy = NULL;
    const char *path = scratch_path("model");
    check_ok(dpl_model_write(r.model, path, "float32", 0));
    check_ok(dpl_model_open(r.ctx, path, NULL, &copy));
    expect_equal_models(r.model, copy);
    dpl_model_close(&copy);
    // In place of the first, in pieces; nothing is left beside it.
    check_ok(dpl_model_write(r.model, path, "float32", 20000));
    assert_true(scratch_count(path) > 4);
    assert_int_equal(scratch_count(scratch_path(".")), 1);
    check_ok(dpl_model_open(r.ctx, path, r.config, &copy));
    expect_equal_models(r.model, copy);
    dpl_model_close(&copy);
    // In one piece again: of the folder in pieces nothing stays.
    check_ok(dpl_model_write(r.model, path, "float32", 0));
    assert_int_equal(scratch_count(path), 2);
    make_dir("other");
    scratch_text(scratch_path("other/notes.txt"), "mine");
    check_error(dpl_model_write(r.model, scratch_path("other"), "float32", 0), DPL_EINVAL, "other",
                "no model");
    assert_true(scratch_holds(scratch_path("other/notes.txt"), "mine", 4));
    check_error(dpl_model_write(r.model, path, "float16", 0), DPL_EINVAL, "float16", "bfloat16");
    rig_close(&r);
}

static void test_write_bfloat16(void **state) {
    (void)state;
    rig r = rig_open(2, NULL);
    dpl_model *a = NULL, *b = NULL;
    dpl_config *config = NULL;
    check_ok(dpl_model_write(r.model, scratch_path("half"), "bfloat16", 0));
    check_ok(dpl_config_open_model(scratch_path("half"), &config));
    assert_string_equal(dpl_config_get(config, "dtype"), "bfloat16");
    assert_string_equal(dpl_config_get(config, "max_target_length"), "64");
    check_ok(dpl_model_open(r.ctx, scratch_path("half"), NULL, &a));
    dpl_model_info info = {.struct_bytes = sizeof info};
    check_ok(dpl_model_get_info(a, &info));
    assert_string_equal(info.dtype, "bfloat16");
    check_ok(dpl_model_open(r.ctx, scratch_path("half"), r.config, &b)); // its dtype is float32
    check_ok(dpl_model_get_info(b, &info));
    assert_string_equal(info.dtype, "float32");
    dpl_model_close(&a);
    check_ok(
        dpl_model_write(b, scratch_path("again"), "bfloat16", 0)); // rounding twice changes nothing
    check_ok(dpl_model_open(r.ctx, scratch_path("again"), r.config, &a));
    expect_equal_models(a, b);
    dpl_model_close(&a);
    dpl_model_close(&b);
    dpl_config_close(&config);
    rig_close(&r);
}

/* ---- evaluation ---- */

// The loss of one document by windows, by hand.
static double document_loss(dpl_model *model, const char *text, size_t n, size_t window,
                            size_t *n_tokens) {
    double sum = 0;
    for (size_t at = 0; at + 1 < n; at += window) {
        const size_t len = n - 1 - at < window ? n - 1 - at : window;
        int32_t ids[POSITIONS], targets[POSITIONS];
        double part;
        for (size_t i = 0; i < len; i++) {
            ids[i] = (unsigned char)text[at + i];
            targets[i] = (unsigned char)text[at + i + 1];
        }
        check_ok(dpl_model_loss(model, ids, targets, 1, len, &part, NULL));
        sum += part;
        *n_tokens += len;
    }
    return sum;
}

typedef struct progress_log {
    uint64_t n_calls, last, total, stop_at;
} progress_log;

static int on_progress(void *arg, uint64_t n_done, uint64_t n_total) {
    progress_log *log = arg;
    log->n_calls++;
    log->last = n_done;
    log->total = n_total;
    return log->stop_at == n_done;
}

static void test_eval(void **state) {
    (void)state;
    rig r = rig_open(2, NULL);
    char first[203];
    for (size_t i = 0; i < sizeof first; i++) first[i] = (char)(i * 37 % 251);
    make_dir("texts");
    scratch_write(scratch_path("texts/a.txt"), first, sizeof first);
    scratch_text(scratch_path("texts/b.txt"), "x"); // nothing to predict
    scratch_text(scratch_path("texts/c.txt"), "To be, or not to be, that is the question");
    size_t n = 0;
    double want = document_loss(r.model, first, sizeof first, 32, &n);
    want += document_loss(r.model, "To be, or not to be, that is the question", 41, 32, &n);
    assert_int_equal(n, 202 + 40);
    double loss, again;
    uint64_t n_tokens;
    progress_log log = {0};
    check_ok(dpl_model_eval(r.model, scratch_path("texts"), r.config, on_progress, &log, &loss,
                            &n_tokens));
    assert_int_equal(n_tokens, n);
    assert_true(fabs(loss - want / (double)n) < 1e-6 * loss);
    assert_int_equal(log.n_calls, 5); // 7 + 2 windows in pairs
    assert_int_equal(log.last, log.total);
    check_ok(dpl_config_set(r.config, "eval_per_device_batch_size=5"));
    check_ok(dpl_model_eval(r.model, scratch_path("texts"), r.config, NULL, NULL, &again, NULL));
    assert_true(fabs(again - loss) < 1e-9);
    check_ok(dpl_config_set(r.config, "eval_steps=1"));
    check_ok(
        dpl_model_eval(r.model, scratch_path("texts"), r.config, NULL, NULL, &again, &n_tokens));
    assert_int_equal(n_tokens, 5 * 32);
    rig_close(&r);
}

static void test_eval_errors(void **state) {
    (void)state;
    rig r = rig_open(1, NULL);
    double loss = 7;
    char text[300];
    memset(text, 'a', sizeof text);
    scratch_write(scratch_path("t"), text, sizeof text);
    progress_log log = {.stop_at = 2};
    check_error(
        dpl_model_eval(r.model, scratch_path("t"), r.config, on_progress, &log, &loss, NULL),
        DPL_EINTR, "2 of 5", "");
    scratch_text(scratch_path("one"), "a");
    check_error(dpl_model_eval(r.model, scratch_path("one"), r.config, NULL, NULL, &loss, NULL),
                DPL_EINVAL, "no token to predict", "");
    check_error(dpl_model_eval(r.model, scratch_path("no"), r.config, NULL, NULL, &loss, NULL),
                DPL_EIO, "no", "");
    check_ok(dpl_config_set(r.config, "max_target_length=65"));
    check_error(dpl_model_eval(r.model, scratch_path("t"), r.config, NULL, NULL, &loss, NULL),
                DPL_EINVAL, "65", "max_position_embeddings");
    assert_true(loss == 7);
    rig_close(&r);
}

/* ---- generation ---- */

static dpl_generator_options greedy(size_t tokens_max) {
    return (dpl_generator_options){
        .struct_bytes = sizeof(dpl_generator_options), .tokens_max = tokens_max, .top_p = 1};
}

static void test_generate_greedy(void **state) {
    (void)state;
    enum { PROMPT = 9, N = 20 };
    rig r = rig_open(2, NULL);
    int32_t ids[PROMPT + N];
    fill_ids(ids, PROMPT, 8);
    const dpl_generator_options o = greedy(PROMPT + N);
    dpl_generator *whole = NULL, *pieces = NULL;
    check_ok(dpl_generator_open(r.model, &o, &whole));
    check_ok(dpl_generator_open(r.model, &o, &pieces));
    check_ok(dpl_generator_feed(whole, ids, PROMPT));
    for (int i = 0; i < PROMPT; i++) check_ok(dpl_generator_feed(pieces, ids + i, 1));
    float *logits = malloc(sizeof(float) * (PROMPT + N) * VOCAB);
    for (int i = 0; i < N; i++) {
        int32_t a, b;
        check_ok(dpl_generator_next(whole, &a));
        check_ok(dpl_generator_next(pieces, &b));
        assert_int_equal(a, b);
        // The likeliest token of the whole forward pass, up to its rounding.
        check_ok(dpl_model_forward(r.model, ids, 1, (size_t)(PROMPT + i), logits));
        const float *row = logits + (PROMPT + i - 1) * VOCAB;
        int best = 0;
        for (int j = 1; j < VOCAB; j++)
            if (row[j] > row[best]) best = j;
        assert_true(row[a] >= row[best] - 1e-4f);
        ids[PROMPT + i] = a;
    }
    int32_t more;
    check_error(dpl_generator_next(whole, &more), DPL_EINVAL, "29", "no more");
    check_error(dpl_generator_feed(whole, ids, 1), DPL_EINVAL, "29", "");
    free(logits);
    dpl_generator_close(&whole);
    dpl_generator_close(&pieces);
    rig_close(&r);
}

static void draw(dpl_model *model, double temperature, double top_p, uint64_t seed, int32_t *ids,
                 size_t n) {
    dpl_generator_options o = greedy(n + 1);
    o.temperature = temperature;
    o.top_p = top_p;
    o.seed = seed;
    dpl_generator *g = NULL;
    const int32_t start = 65;
    check_ok(dpl_generator_open(model, &o, &g));
    check_ok(dpl_generator_feed(g, &start, 1));
    for (size_t i = 0; i < n; i++) check_ok(dpl_generator_next(g, &ids[i]));
    dpl_generator_close(&g);
}

static void test_generate_draws(void **state) {
    (void)state;
    enum { N = 40 };
    rig r = rig_open(1, NULL), other = rig_open(3, NULL);
    int32_t a[N], b[N], c[N];
    draw(r.model, 1, 1, 7, a, N);
    draw(other.model, 1, 1, 7, b, N);
    assert_memory_equal(a, b, sizeof a); // threads do not matter
    draw(r.model, 1, 1, 8, c, N);
    assert_memory_not_equal(a, c, sizeof a);
    draw(r.model, 0, 1, 7, a, N);
    draw(r.model, 1, 1e-9, 9, b, N); // a nucleus of one token
    assert_memory_equal(a, b, sizeof a);
    rig_close(&r);
    rig_close(&other);
}

static void test_generator_errors(void **state) {
    (void)state;
    rig r = rig_open(1, NULL);
    dpl_generator *g = NULL;
    int32_t id = 3;
    dpl_generator_options o = greedy(POSITIONS + 1);
    check_error(dpl_generator_open(r.model, &o, &g), DPL_EINVAL, "65", "1 to 64");
    o = greedy(8);
    o.temperature = NAN;
    check_error(dpl_generator_open(r.model, &o, &g), DPL_EINVAL, "temperature", "");
    o = greedy(8);
    o.top_p = 0;
    check_error(dpl_generator_open(r.model, &o, &g), DPL_EINVAL, "top_p", "");
    o = greedy(8);
    o.struct_bytes = 3;
    check_error(dpl_generator_open(r.model, &o, &g), DPL_EINVAL, "struct_bytes", "");
    assert_null(g);
    o = greedy(8);
    check_ok(dpl_generator_open(r.model, &o, &g));
    check_error(dpl_generator_next(g, &id), DPL_EINVAL, "nothing was fed", "");
    id = 256;
    check_error(dpl_generator_feed(g, &id, 1), DPL_EINVAL, "256", "");
    check_error(dpl_generator_feed(g, &id, 0), DPL_EINVAL, "at least one", "");
    dpl_generator_close(&g);
    dpl_generator_close(NULL);
    rig_close(&r);
}

/* ---- inspect ---- */

static json_t *inspect(const char *path, const char *const *settings, size_t n_settings,
                       unsigned flags) {
    char *text = NULL;
    check_ok(dpl_inspect(path, settings, n_settings, DPL_INSPECT_JSON | flags, &text));
    json_t *object = json_loads(text, 0, NULL);
    assert_non_null(object);
    dpl_text_close(&text);
    assert_null(text);
    return object;
}

static void test_inspect(void **state) {
    (void)state;
    rig r = rig_open(1, NULL);
    dpl_model_info info = {.struct_bytes = sizeof info};
    check_ok(dpl_model_get_info(r.model, &info));
    check_ok(dpl_model_write(r.model, scratch_path("m"), "float32", 0));
    const char *const shorter[] = {"max_target_length=16"};
    json_t *object = inspect(scratch_path("m"), shorter, 1, DPL_INSPECT_MEMORY);
    assert_string_equal(json_string_value(json_object_get(object, "kind")), "model");
    assert_int_equal(json_integer_value(json_object_get(object, "sequence")), 16);
    json_t *params = json_object_get(object, "parameters"), *value;
    const char *key;
    json_int_t sum = 0, total = json_integer_value(json_object_get(params, "total"));
    json_object_foreach(params, key, value) if (strcmp(key, "total") != 0 &&
                                                strcmp(key, "active_per_token") != 0)
        sum += json_integer_value(value);
    assert_int_equal(sum, total);
    assert_int_equal(total, info.n_params);
    const json_t *files = json_object_get(object, "files");
    // The router bias of the MoE layer is in the file and is no parameter.
    assert_int_equal(json_integer_value(json_object_get(files, "bytes")), 4 * (info.n_params + 8));
    const json_t *memory = json_object_get(object, "memory");
    assert_int_equal(json_integer_value(json_object_get(memory, "moments_bytes")),
                     8 * info.n_params);
    json_t *same = inspect(scratch_path("m/config.json"), NULL, 0, 0);
    assert_string_equal(json_string_value(json_object_get(same, "kind")), "configuration");
    assert_true(json_equal(json_object_get(same, "parameters"), params));
    json_decref(same);
    json_decref(object);
    rig_close(&r);
}

static void test_inspect_errors(void **state) {
    (void)state;
    char *text = NULL;
    const char *const bad[] = {"no_such_key=1"};
    scratch_text(scratch_path("c.yml"), "vocab_size: 7\n");
    scratch_text(scratch_path("c.json"), "{}");
    check_error(dpl_inspect(scratch_path("none"), NULL, 0, 0, &text), DPL_EIO, "none", "");
    check_error(dpl_inspect(scratch_path("c.yml"), bad, 1, 0, &text), DPL_EINVAL, "no_such_key",
                "");
    check_error(dpl_inspect(scratch_path("c.yml"), NULL, 0, 0, &text), DPL_EINVAL, "decoder_block",
                "");
    check_error(dpl_inspect(scratch_path("c.json"), NULL, 0, 0, &text), DPL_EFORMAT, "c.json",
                "model_type");
    check_error(dpl_inspect(NULL, NULL, 0, 0, &text), DPL_EINVAL, "path", "");
    assert_null(text);
}

/* ---- no memory, no disk ---- */

typedef struct faults {
    rig *r;
    char input[512], output[512], model[512];
} faults;

static dpl_status all_calls(const faults *f) {
    dpl_model *model = NULL;
    dpl_generator *g = NULL;
    dpl_config *config = NULL;
    char *text = NULL;
    const dpl_generator_options o = greedy(4);
    const dpl_probe_options probe = {.struct_bytes = sizeof probe, .grad = 1, .n_steps = 1};
    int32_t ids[3] = {1, 2, 3};
    double loss;
    dpl_status status = dpl_model_open(f->r->ctx, f->model, NULL, &model);
    if (status == DPL_OK) status = dpl_generator_open(model, &o, &g);
    if (status == DPL_OK) status = dpl_generator_feed(g, ids, 3);
    if (status == DPL_OK) status = dpl_generator_next(g, ids);
    if (status == DPL_OK) status = dpl_config_open_model(f->model, &config);
    if (status == DPL_OK) status = dpl_model_eval(model, f->input, config, NULL, NULL, &loss, NULL);
    if (status == DPL_OK) status = dpl_inspect(f->model, NULL, 0, 0, &text);
    if (status == DPL_OK)
        status = dpl_model_probe(f->r->ctx, f->model, scratch_path("ids"), scratch_path("p"),
                                 &probe);
    // Last, because it waits for the disk.
    if (status == DPL_OK) status = dpl_model_write(model, f->output, "float32", 0);
    dpl_text_close(&text);
    dpl_config_close(&config);
    dpl_generator_close(&g);
    dpl_model_close(&model);
    return status;
}

// A batch for a probe, by hand: safetensors with input_ids (1, 4).
static void write_input(const char *path) {
    static const char header[] =
        "{\"input_ids\":{\"dtype\":\"I64\",\"shape\":[1,4],\"data_offsets\":[0,32]}}";
    unsigned char file[8 + sizeof header - 1 + 32] = {sizeof header - 1};
    memcpy(file + 8, header, sizeof header - 1);
    for (size_t i = 0; i < 4; i++) file[8 + sizeof header - 1 + 8 * i] = (unsigned char)(7 * i);
    scratch_write(path, file, sizeof file);
}

// The n-th allocation, then the n-th write, fails; each failure is reported, nothing leaks or is
// left half-done.
static void test_faults(void **state) {
    (void)state;
    rig r = rig_open(1, NULL);
    faults f = {.r = &r};
    snprintf(f.model, sizeof f.model, "%s", scratch_path("m"));
    snprintf(f.input, sizeof f.input, "%s", scratch_path("text"));
    snprintf(f.output, sizeof f.output, "%s", scratch_path("out"));
    check_ok(dpl_model_write(r.model, f.model, "float32", 0));
    scratch_text(f.input, "A text that is long enough to be cut in two windows of thirty-two.");
    write_input(scratch_path("ids"));
    check_ok(all_calls(&f));
    void (*const inject[])(size_t) = {dpl_fault_alloc, dpl_fault_write};
    const dpl_status expected[] = {DPL_ENOMEM, DPL_EIO};
    for (int kind = 0; kind < 2; kind++) {
        size_t n = 1;
        for (dpl_status status = expected[kind]; status != DPL_OK; n++) {
            inject[kind](n);
            status = all_calls(&f);
            inject[kind](0);
            if (status != DPL_OK) assert_int_equal(status, expected[kind]);
            assert_int_equal(scratch_count(scratch_path(".")), 5); // no temporary names
            dpl_model *model = NULL;
            check_ok(dpl_model_open(r.ctx, f.output, NULL, &model));
            dpl_model_close(&model);
        }
        print_message("%zu places failed\n", n - 2);
        assert_in_range(n, 10, 100000);
    }
    rig_close(&r);
}

// A locale whose decimal sign is a comma; made in the scratch folder where the system has none.
// False: no way.
static bool set_comma_locale(void) {
    if (setlocale(LC_NUMERIC, "de_DE.UTF-8")) return true;
    char command[512];
    snprintf(command, sizeof command, "localedef -i de_DE -f UTF-8 %s > /dev/null 2>&1",
             scratch_path("de_DE.UTF-8"));
    if (system(command) != 0) return false;
    setenv("LOCPATH", scratch_path("."), 1);
    return setlocale(LC_NUMERIC, "de_DE.UTF-8") != NULL;
}

static void test_locale(void **state) {
    (void)state;
    if (!set_comma_locale()) {
        print_message("SKIPPED: the locale de_DE.UTF-8 can be neither found nor made\n");
        skip();
    }
    char comma[16];
    snprintf(comma, sizeof comma, "%.1f", 0.5);
    assert_string_equal(comma, "0,5");
    rig r = rig_open(1, "learning_rate=2.5e-4");
    assert_string_equal(dpl_config_get(r.config, "learning_rate"), "0.00025");
    check_ok(dpl_model_write(r.model, scratch_path("m"), "float32", 0));
    dpl_model *copy = NULL;
    check_ok(dpl_model_open(r.ctx, scratch_path("m"), NULL, &copy));
    expect_equal_models(r.model, copy);
    json_decref(inspect(scratch_path("m"), NULL, 0, 0));
    char *text = NULL;
    check_ok(dpl_inspect(scratch_path("m"), NULL, 0, DPL_INSPECT_MEMORY, &text));
    dpl_text_close(&text);
    dpl_model_close(&copy);
    rig_close(&r);
    setlocale(LC_NUMERIC, "C");
    unsetenv("LOCPATH");
}

#define WITH_FILES(test) cmocka_unit_test_setup_teardown(test, scratch_open, scratch_close)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_version),
        cmocka_unit_test(test_info),
        cmocka_unit_test(test_forward_rows),
        cmocka_unit_test(test_loss),
        cmocka_unit_test(test_wrong_batches),
        WITH_FILES(test_open_errors),
        WITH_FILES(test_write),
        WITH_FILES(test_write_bfloat16),
        WITH_FILES(test_eval),
        WITH_FILES(test_eval_errors),
        cmocka_unit_test(test_generate_greedy),
        cmocka_unit_test(test_generate_draws),
        cmocka_unit_test(test_generator_errors),
        WITH_FILES(test_inspect),
        WITH_FILES(test_inspect_errors),
        WITH_FILES(test_faults),
        WITH_FILES(test_locale),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
