/*
 * test_weights.c - model directories: what is loaded, saved and loaded again is bitwise the same,
 * and every deviation from the model's tensors is an error that names them.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "io/io.h"
#include "modelkit.h"
#include "scratch.h"

static const char *const folders[] = {
    "deepseek_v3",      "deepseek_v3_noqlora", "deepseek_v3_yarn",  "deepseek_v3_halfrope",
    "deepseek_v3_bf16", "deepseek_v3_mtp",     "maxtext_trajectory"};

static void open_folder(const char *dir, dpl_dtype dtype, kit *k) {
    dpl_model_config config;
    check_ok(dpl_model_read_config(dir, &config, NULL));
    assert_true(kit_open(&config, dtype, NULL, 2, false, NULL, k));
}

static void assert_same_weights(const kit *a, const kit *b) {
    const dpl_model_config *c = &a->model->config;
    assert_int_equal(a->model->params.elems, b->model->params.elems);
    assert_memory_equal(a->model->params.master, b->model->params.master,
                        a->model->params.elems * sizeof(float));
    assert_memory_equal(a->model->router_bias, b->model->router_bias,
                        (c->n_layers + c->n_mtp) * c->n_experts * sizeof(float));
}

// A folder for one model, empty.
static const char *fresh_dir(const char *name) {
    const char *dir = scratch_path("%s", name);
    check_ok(dpl_remove_tree(dir));
    check_ok(dpl_make_dirs(dir));
    return dir;
}

/* ---- round trips ---- */

// The files of another program are the judge of what was loaded.
static void assert_holds(const kit *k, const fixture *f) {
    for (int i = 0; i < f->n; i++) {
        const dpl_disk_tensor *t = kit_disk(k->model, f->at[i].name);
        double *want = fixture_values(&f->at[i]);
        float *got = t->bias ? NULL : kit_gather(t, k->model->params.master);
        for (size_t j = 0; j < f->at[i].n; j++)
            assert_true((t->bias ? t->bias[j] : got[j]) == (float)want[j]);
        free(want), free(got);
    }
}

// Names, shapes and, when `same_dtype`, dtypes of one directory are those of another.
static void assert_same_tensors(const char *got_dir, const fixture *want, bool same_dtype) {
    fixture got;
    assert_true(fixture_open(got_dir, &got));
    assert_int_equal(got.n, want->n);
    for (int i = 0; i < want->n; i++) {
        const fixture_tensor *w = &want->at[i], *g = fixture_find(&got, w->name);
        if (!g) fail_msg("%s was not written", w->name);
        assert_int_equal(g->n_dims, w->n_dims);
        for (int d = 0; d < w->n_dims; d++) assert_int_equal(g->shape[d], w->shape[d]);
        if (!same_dtype) continue;
        if (strcmp(g->dtype, w->dtype) != 0) fail_msg("%s is %s", w->name, g->dtype);
        assert_memory_equal(g->data, w->data, w->bytes);
    }
    fixture_close(&got);
}

static void folders_survive_a_round_trip(void **state) {
    (void)state;
    if (!fixture_root()) skip();
    for (size_t i = 0; i < DPL_COUNT(folders); i++) {
        kit first, second;
        fixture f;
        const char *from = fixture_path("%s", folders[i]), *to = fresh_dir("again");
        dpl_dtype dtype;
        dpl_model_config config;
        check_ok(dpl_model_read_config(from, &config, &dtype));
        open_folder(from, DPL_F32, &first);
        check_ok(dpl_model_load(first.model, from));
        assert_true(fixture_open(from, &f));
        assert_holds(&first, &f);
        check_ok(dpl_model_save(first.model, to, dtype, 0));
        assert_same_tensors(to, &f, true); // dtypes and bits as the other program wrote them
        open_folder(to, DPL_BF16, &second);
        check_ok(dpl_model_load(second.model, to));
        assert_same_weights(&first, &second);
        kit_check_copy(second.model);
        fixture_close(&f);
        kit_close(&first);
        kit_close(&second);
    }
}

static void random_kit(const oracle_config *c, uint64_t seed, kit *k) {
    scene s;
    const dpl_model_config config = scene_config(c);
    scene_open(c, seed, 1, 4, false, &s);
    assert_true(kit_open(&config, DPL_F32, &s.params, 2, false, NULL, k));
    scene_close(&s);
}

static void bf16_files_keep_the_router_in_fp32(void **state) {
    (void)state;
    const oracle_config c = scene_small_config();
    kit k, again;
    fixture f;
    random_kit(&c, 1, &k);
    dpl_model_bias(k.model, 1)[2] = 1.001f; // bf16 would make it 1
    const char *dir = fresh_dir("bf16");
    check_ok(dpl_model_save(k.model, dir, DPL_BF16, 0));
    assert_true(fixture_open(dir, &f));
    for (int i = 0; i < f.n; i++) {
        const bool f32 = strstr(f.at[i].name, "mlp.gate.") != NULL;
        assert_string_equal(f.at[i].dtype, f32 ? "F32" : "BF16");
    }
    fixture_close(&f);
    open_folder(dir, DPL_F32, &again);
    check_ok(dpl_model_load(again.model, dir));
    assert_true(dpl_model_bias(again.model, 1)[2] == 1.001f);
    for (size_t i = 0; i < k.model->n_disk; i++) {
        const dpl_disk_tensor *t = &k.model->disk[i];
        if (!t->param) continue;
        float *want = kit_gather(t, k.model->params.master);
        float *got = kit_gather(kit_disk(again.model, t->name), again.model->params.master);
        for (size_t j = 0; j < kit_elems(t); j++)
            assert_true(got[j] == (t->param->id == DPL_P_ROUTER
                                       ? want[j]
                                       : dpl_bf16_to_f32(dpl_f32_to_bf16(want[j]))));
        free(want), free(got);
    }
    kit_close(&k);
    kit_close(&again);
}

static void random_models_survive_a_round_trip_in_shards(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 4; seed++) {
        scene s;
        kit first, second;
        scene_open_random(seed, &s);
        const dpl_model_config config = scene_config(&s.cfg);
        assert_true(kit_open(&config, DPL_F32, &s.params, 2, false, NULL, &first));
        const char *dir = fresh_dir("shards");
        check_ok(dpl_model_save(first.model, dir, DPL_F32, 5000));
        assert_true(scratch_count(dir) > 3); // config.json, index, shards
        assert_false(dpl_path_exists(scratch_path("shards/model.safetensors")));
        json_t *index = json_load_file(scratch_path("shards/model.safetensors.index.json"), 0,
                                       NULL);
        const json_t *map = json_object_get(index, "weight_map");
        assert_int_equal(json_object_size(map), first.model->n_disk);
        size_t bytes = 0;
        for (size_t i = 0; i < first.model->n_disk; i++)
            bytes += kit_elems(&first.model->disk[i]) * sizeof(float);
        assert_int_equal(
            json_integer_value(json_object_get(json_object_get(index, "metadata"), "total_size")),
            bytes);
        json_decref(index);
        open_folder(dir, DPL_F32, &second);
        check_ok(dpl_model_load(second.model, dir));
        assert_same_weights(&first, &second);
        kit_close(&second);
        // Fewer shards over them: the old ones are ignored.
        for (size_t i = 0; i < first.model->params.n; i++) {
            const dpl_param *p = &first.model->params.list[i];
            if (p->kind == DPL_NORM) first.model->params.master[p->offset] = 9;
        }
        check_ok(dpl_model_save(first.model, dir, DPL_F32, 20000));
        open_folder(dir, DPL_F32, &second);
        check_ok(dpl_model_load(second.model, dir));
        assert_same_weights(&first, &second);
        kit_close(&second);
        kit_close(&first);
        scene_close(&s);
    }
}

/* ---- files that differ from the model ---- */

// The tensors of a model as a directory, each of which may be changed before it is written.
typedef struct file_tensor {
    char name[160];
    dpl_st_dtype dtype;
    int rank;
    int64_t shape[2];
    float *values; // as many as F32 elements; other dtypes: bytes
    bool left_out;
} file_tensor;

typedef struct file_set {
    file_tensor *at;
    size_t n;
} file_set;

static file_set set_of(const dpl_model *m) {
    file_set s = {test_calloc(m->n_disk + 8, sizeof(file_tensor)), m->n_disk};
    for (size_t i = 0; i < m->n_disk; i++) {
        const dpl_disk_tensor *t = &m->disk[i];
        file_tensor *f = &s.at[i];
        *f = (file_tensor){
            .dtype = DPL_ST_F32, .rank = t->rank, .shape = {t->shape[0], t->shape[1]}};
        snprintf(f->name, sizeof f->name, "%s", t->name);
        f->values = t->bias ? calloc(kit_elems(t), sizeof(float)) : kit_gather(t, m->params.master);
        if (t->bias) memcpy(f->values, t->bias, kit_elems(t) * sizeof(float));
    }
    return s;
}

static file_tensor *set_find(file_set *s, const char *name) {
    for (size_t i = 0; i < s->n; i++)
        if (strcmp(s->at[i].name, name) == 0) return &s->at[i];
    fail_msg("no tensor %s", name);
    return NULL;
}

static void set_add(file_set *s, const char *name, size_t like) {
    file_tensor *f = &s->at[s->n++];
    *f = s->at[like];
    snprintf(f->name, sizeof f->name, "%s", name);
    const size_t n = (size_t)(f->shape[0] * f->shape[1]);
    f->values = calloc(n, sizeof(float));
    memcpy(f->values, s->at[like].values, n * sizeof(float));
}

static void set_close(file_set *s) {
    for (size_t i = 0; i < s->n; i++) free(s->at[i].values);
    test_free(s->at);
}

typedef struct writing {
    const dpl_st_tensor *tensors;
    float *const *values;
} writing;

static const void *values_of(void *p, size_t i) {
    const writing *w = p;
    return w->values[i];
}

static void set_write(const file_set *s, const char *dir) {
    dpl_st_tensor *tensors = test_calloc(s->n, sizeof *tensors);
    float **values = test_calloc(s->n, sizeof *values);
    size_t n = 0;
    for (size_t i = 0; i < s->n; i++) {
        const file_tensor *f = &s->at[i];
        if (f->left_out) continue;
        const size_t elems = (size_t)(f->shape[0] * f->shape[1]);
        values[n] = f->values;
        tensors[n++] = (dpl_st_tensor){.name = f->name,
                                       .dtype = f->dtype,
                                       .rank = f->rank,
                                       .shape = {f->shape[0], f->shape[1]},
                                       .bytes = elems * dpl_st_dtype_bytes(f->dtype)};
    }
    writing w = {tensors, values};
    check_ok(dpl_st_write_dir(dir, tensors, n, 0, values_of, &w));
    test_free(tensors), test_free(values);
}

#define EXPERT "model.layers.1.mlp.experts.3.up_proj.weight"

static void missing_and_unknown_tensors_are_both_listed(void **state) {
    (void)state;
    const oracle_config c = scene_small_config();
    kit k;
    random_kit(&c, 2, &k);
    file_set s = set_of(k.model);
    const char *dir = fresh_dir("names");
    set_find(&s, EXPERT)->left_out = true;
    set_write(&s, dir);
    check_error(dpl_model_load(k.model, dir), DPL_EFORMAT, "1 tensors are missing", EXPERT);
    snprintf(set_find(&s, EXPERT)->name, sizeof s.at->name, "model.layers.1.mlp.experts.3.w3");
    s.at[s.n - 1].left_out = false;
    set_find(&s, "model.layers.1.mlp.experts.3.w3")->left_out = false; // renamed: one of each
    set_write(&s, dir);
    check_error(dpl_model_load(k.model, dir), DPL_EFORMAT, EXPERT,
                "model.layers.1.mlp.experts.3.w3");
    snprintf(set_find(&s, "model.layers.1.mlp.experts.3.w3")->name, sizeof s.at->name, EXPERT);
    static const char *const unknown[] = {
        "model.layers.1.mlp.experts.8.up_proj.weight", // one expert too many
        "model.layers.1x.mlp.up_proj.weight",
        "model.layers.-7.mlp.up_proj.weight",
        "model.layers.",
        "model.layers.3",
        "rotary_emb.inv_freq.more",
        "lm_head.weight.",
        ("a name that is longer than any of the model's names may be, so that a comparison of its "
         "first bytes alone would not do: model.norm.weight")};
    for (size_t i = 0; i < DPL_COUNT(unknown); i++) {
        set_add(&s, unknown[i], 3);
        set_write(&s, dir);
        check_error(dpl_model_load(k.model, dir), DPL_EFORMAT, "1 tensors are not this model's",
                    unknown[i]);
        free(s.at[--s.n].values);
    }
    // More than a message holds: the number is right all the same.
    for (size_t i = 0; i < s.n; i++) s.at[i].left_out = i > 2;
    set_write(&s, dir);
    char part[64];
    snprintf(part, sizeof part, "%zu tensors are missing", s.n - 3 - 2); // the copies may be
    check_error(dpl_model_load(k.model, dir), DPL_EFORMAT, part, "");
    set_close(&s);
    kit_close(&k);
}

static void wrong_shapes_and_types_are_errors(void **state) {
    (void)state;
    const oracle_config c = scene_small_config();
    kit k;
    random_kit(&c, 3, &k);
    file_set s = set_of(k.model);
    const char *dir = fresh_dir("shapes");
    file_tensor *t = set_find(&s, EXPERT);
    const file_tensor good = *t;
    t->shape[0] = good.shape[1], t->shape[1] = good.shape[0]; // transposed
    set_write(&s, dir);
    check_error(dpl_model_load(k.model, dir), DPL_EFORMAT, EXPERT,
                "(24, 18), expected rank 2 and (18, 24)");
    *t = good;
    t->rank = 1, t->shape[0] = good.shape[0] * good.shape[1], t->shape[1] = 1;
    set_write(&s, dir);
    check_error(dpl_model_load(k.model, dir), DPL_EFORMAT, EXPERT, "rank 1");
    *t = good;
    t->dtype = DPL_ST_I32;
    set_write(&s, dir);
    check_error(dpl_model_load(k.model, dir), DPL_EFORMAT, EXPERT, "I32");
    *t = good;
    t = set_find(&s, "model.layers.1.mlp.gate.e_score_correction_bias");
    t->shape[0] = 7;
    set_write(&s, dir);
    check_error(dpl_model_load(k.model, dir), DPL_EFORMAT, "e_score_correction_bias", "(7, 1)");
    t->shape[0] = 8;
    set_write(&s, dir);
    check_ok(dpl_model_load(k.model, dir));
    set_close(&s);
    kit_close(&k);
}

// Makes a tensor E4M3 with a factor for each block; `values_out` what those stand for. The factors'
// tensor is added.
static void make_f8(file_set *s, const char *name, float *values_out) {
    file_tensor *t = set_find(s, name), *scale = &s->at[s->n++];
    const size_t rows = (size_t)t->shape[0], cols = (size_t)t->shape[1];
    const size_t down = dpl_div_up(rows, 128), across = dpl_div_up(cols, 128);
    *scale = (file_tensor){
        .dtype = DPL_ST_F32, .rank = 2, .shape = {(int64_t)down, (int64_t)across}};
    snprintf(scale->name, sizeof scale->name, "%s_scale_inv", name);
    scale->values = calloc(down * across, sizeof(float));
    for (size_t i = 0; i < down * across; i++) scale->values[i] = 0.01f * (float)(i + 1);
    uint8_t *codes = calloc(rows * cols, sizeof(float));
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < cols; c++) {
            const float factor = scale->values[r / 128 * across + c / 128];
            codes[r * cols + c] = dpl_f32_to_code(DPL_E4M3, t->values[r * cols + c] / factor);
            values_out[r * cols + c] = dpl_code_to_f32(DPL_E4M3, codes[r * cols + c]) * factor;
        }
    free(t->values);
    t->values = (float *)(void *)codes;
    t->dtype = DPL_ST_F8_E4M3;
}

// Neither side of the largest one is whole blocks (109 of known-faults.md).
static void blocks_of_fp8_are_read(void **state) {
    (void)state;
    oracle_config c = scene_small_config();
    c.D = 200, c.F_moe = 300;
    kit k;
    random_kit(&c, 5, &k);
    static const char *const names[] = {EXPERT, "model.layers.1.mlp.experts.0.down_proj.weight",
                                        "model.layers.0.self_attn.o_proj.weight"};
    static float values[DPL_COUNT(names)][200 * 400];
    file_set s = set_of(k.model);
    for (size_t i = 0; i < DPL_COUNT(names); i++) make_f8(&s, names[i], values[i]);
    const char *dir = fresh_dir("fp8");
    set_write(&s, dir);
    memset(k.model->params.master, 0, k.model->params.own_elems * sizeof(float));
    check_ok(dpl_model_load(k.model, dir));
    for (size_t i = 0; i < DPL_COUNT(names); i++)
        for (size_t j = 0; j < k.model->n_disk; j++) {
            const dpl_disk_tensor *t = &k.model->disk[j];
            if (strcmp(t->name, names[i]) != 0) continue;
            float *got = kit_gather(t, k.model->params.master);
            assert_memory_equal(got, values[i], kit_elems(t) * sizeof(float));
            free(got);
        }
    file_tensor *scale = set_find(&s, EXPERT "_scale_inv");
    scale->left_out = true;
    set_write(&s, dir);
    check_error(dpl_model_load(k.model, dir), DPL_EFORMAT, EXPERT, "there is no");
    scale->left_out = false;
    scale->shape[0]--;
    set_write(&s, dir);
    check_error(dpl_model_load(k.model, dir), DPL_EFORMAT, EXPERT "_scale_inv", "is not (3, 2)");
    scale->shape[0]++;
    scale->dtype = DPL_ST_I32;
    set_write(&s, dir);
    check_error(dpl_model_load(k.model, dir), DPL_EFORMAT, EXPERT "_scale_inv", "I32");
    // Factors of a tensor that has none are not the model's.
    scale->dtype = DPL_ST_F32;
    snprintf(scale->name, sizeof scale->name, "model.norm.weight_scale_inv");
    set_write(&s, dir);
    check_error(dpl_model_load(k.model, dir), DPL_EFORMAT, "model.norm.weight_scale_inv",
                "not this");
    set_close(&s);
    kit_close(&k);
}

static void copies_of_an_mtp_layer_must_be_equal(void **state) {
    (void)state;
    static const char *const copies[] = {"model.layers.2.embed_tokens.weight",
                                         "model.layers.2.shared_head.head.weight"};
    for (int tied = 0; tied < 2; tied++) {
        oracle_config c = scene_small_config();
        c.tied = tied;
        kit k;
        random_kit(&c, 4, &k);
        file_set s = set_of(k.model); // with the copies, as save writes them
        const char *dir = fresh_dir("copies");
        for (int i = 0; i < 2; i++) {
            file_tensor *t = set_find(&s, copies[i]);
            t->values[77] += 1;
            set_write(&s, dir);
            check_error(dpl_model_load(k.model, dir), DPL_EFORMAT, copies[i], "differs");
            t->values[77] -= 1;
            t->left_out = true; // a file may lack them
        }
        set_write(&s, dir);
        check_ok(dpl_model_load(k.model, dir));
        // The name sets of what is read and what is written are equal.
        fixture f;
        check_ok(dpl_model_save(k.model, dir, DPL_F32, 0));
        assert_true(fixture_open(dir, &f));
        for (int i = 0; i < 2; i++) assert_non_null(fixture_find(&f, copies[i]));
        assert_int_equal(f.n, k.model->n_disk);
        fixture_close(&f);
        set_close(&s);
        kit_close(&k);
    }
}

static void tied_models_take_a_head_that_is_equal(void **state) {
    (void)state;
    oracle_config c = scene_small_config();
    c.tied = true, c.mtp_layers = 0;
    kit k, again;
    random_kit(&c, 5, &k);
    const char *dir = fresh_dir("tied");
    check_ok(dpl_model_save(k.model, dir, DPL_F32, 0));
    fixture f;
    assert_true(fixture_open(dir, &f));
    assert_null(fixture_find(&f, "lm_head.weight")); // one copy
    fixture_close(&f);
    json_t *config = json_load_file(scratch_path("tied/config.json"), 0, NULL);
    assert_true(json_is_true(json_object_get(config, "tie_word_embeddings")));
    json_decref(config);
    open_folder(dir, DPL_F32, &again);
    check_ok(dpl_model_load(again.model, dir));
    assert_same_weights(&k, &again);
    file_set s = set_of(k.model);
    set_add(&s, "lm_head.weight", 0); // the embedding stands first
    set_write(&s, dir);
    check_ok(dpl_model_load(again.model, dir));
    assert_same_weights(&k, &again);
    s.at[s.n - 1].values[1] += 1;
    set_write(&s, dir);
    check_error(dpl_model_load(again.model, dir), DPL_EFORMAT, "lm_head.weight", "differs");
    set_close(&s);
    kit_close(&k);
    kit_close(&again);
}

static void layers_beyond_are_left_unread_with_a_notice(void **state) {
    (void)state;
    oracle_config c = scene_small_config();
    kit with, without;
    random_kit(&c, 6, &with);
    c.mtp_layers = 0;
    const dpl_model_config config = scene_config(&c);
    assert_true(kit_open(&config, DPL_F32, NULL, 2, false, NULL, &without));
    file_set s = set_of(with.model);
    set_add(&s, "model.layers.0.self_attn.rotary_emb.inv_freq", 3);
    set_add(&s, "model.layers.18446744073709551617.x", 3);
    const char *dir = fresh_dir("beyond");
    set_write(&s, dir);
    scratch_log_start();
    check_ok(dpl_model_load(without.model, dir));
    const char *log = scratch_log_stop();
    size_t n = 2;
    for (size_t i = 0; i < with.model->n_disk; i++)
        n += strstr(with.model->disk[i].name, "model.layers.2.") != NULL;
    char part[64];
    snprintf(part, sizeof part, "%zu tensors beyond this model's layers", n);
    if (!strstr(log, part)) fail_msg("the log is %s, expected %s", log, part);
    for (size_t i = 0; i < without.model->n_disk; i++) {
        const dpl_disk_tensor *t = &without.model->disk[i], *u = kit_disk(with.model, t->name);
        if (!t->param) continue;
        float *got = kit_gather(t, without.model->params.master);
        float *want = kit_gather(u, with.model->params.master);
        assert_memory_equal(got, want, kit_elems(t) * sizeof(float));
        free(got), free(want);
    }
    set_close(&s);
    kit_close(&with);
    kit_close(&without);
}

static void missing_shards_are_named(void **state) {
    (void)state;
    const oracle_config c = scene_small_config();
    kit k;
    random_kit(&c, 7, &k);
    const char *dir = fresh_dir("shard");
    check_ok(dpl_model_save(k.model, dir, DPL_F32, 20000));
    json_t *index = json_load_file(scratch_path("shard/model.safetensors.index.json"), 0, NULL);
    const char *file = json_string_value(
        json_object_get(json_object_get(index, "weight_map"), EXPERT));
    assert_non_null(file);
    assert_int_equal(remove(scratch_path("shard/%s", file)), 0);
    check_error(dpl_model_load(k.model, dir), DPL_EIO, file, "");
    json_decref(index);
    check_error(dpl_model_load(k.model, fresh_dir("empty")), DPL_EIO, "empty", "");
    kit_close(&k);
}

/* ---- flat arrays ---- */

static void moments_survive_a_round_trip(void **state) {
    (void)state;
    const oracle_config c = scene_small_config();
    kit k;
    random_kit(&c, 8, &k);
    const size_t n = k.model->params.elems;
    float *flats[2], *again[2];
    for (int f = 0; f < 2; f++) {
        flats[f] = calloc(n, sizeof(float));
        again[f] = calloc(n, sizeof(float));
        for (size_t i = 0; i < n; i++) // padding is zero, as it is in every flat array
            if (k.model->params.master[i] != 0) flats[f][i] = (float)(i + 1) * (f ? -0.5f : 1);
    }
    static const char *const prefixes[] = {"m.", "v."};
    const char *path = scratch_path("moments.safetensors");
    char part[PATH_MAX];
    check_ok(dpl_model_save_flat(k.model, path, prefixes, flats, 2, part));
    check_ok(dpl_model_load_flat(k.model, path, prefixes, again, 2));
    for (int f = 0; f < 2; f++) assert_memory_equal(flats[f], again[f], n * sizeof(float));
    dpl_st_file *file;
    check_ok(dpl_st_open(path, &file));
    assert_non_null(dpl_st_find(file, "v." EXPERT));
    assert_null(dpl_st_find(file, "m.model.layers.1.mlp.gate.e_score_correction_bias"));
    assert_null(dpl_st_find(file, "m.model.layers.2.embed_tokens.weight"));
    dpl_st_close(&file);
    static const char *const others[] = {"m.", "w."};
    check_error(dpl_model_load_flat(k.model, path, others, again, 2), DPL_EFORMAT,
                "w.lm_head.weight", "moments.safetensors");
    for (int f = 0; f < 2; f++) free(flats[f]), free(again[f]);
    kit_close(&k);
}

/* ---- faults ---- */

static void failing_allocations_and_writes_are_errors(void **state) {
    (void)state;
    const oracle_config c = scene_small_config();
    kit k, again;
    random_kit(&c, 9, &k);
    const char *dir = fresh_dir("faults");
    dpl_status status = DPL_ENOMEM;
    for (size_t nth = 1; status != DPL_OK; nth++) {
        dpl_fault_alloc(nth);
        status = dpl_model_save(k.model, dir, DPL_F32, 20000);
        dpl_fault_alloc(0);
        if (status != DPL_OK) assert_int_equal(status, DPL_ENOMEM);
        assert_true(nth < 2000);
    }
    status = DPL_EIO;
    for (size_t nth = 1; status != DPL_OK; nth++) {
        dpl_fault_write(nth);
        status = dpl_model_save(k.model, dir, DPL_F32, 20000);
        dpl_fault_write(0);
        if (status != DPL_OK) assert_int_equal(status, DPL_EIO);
        assert_true(nth < 2000);
    }
    open_folder(dir, DPL_F32, &again);
    status = DPL_ENOMEM;
    for (size_t nth = 1; status != DPL_OK; nth++) {
        dpl_fault_alloc(nth);
        status = dpl_model_load(again.model, dir);
        dpl_fault_alloc(0);
        if (status != DPL_OK) assert_int_equal(status, DPL_ENOMEM);
        assert_true(nth < 2000);
    }
    assert_same_weights(&k, &again);
    kit_close(&k);
    kit_close(&again);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(folders_survive_a_round_trip),
        cmocka_unit_test(bf16_files_keep_the_router_in_fp32),
        cmocka_unit_test(random_models_survive_a_round_trip_in_shards),
        cmocka_unit_test(missing_and_unknown_tensors_are_both_listed),
        cmocka_unit_test(wrong_shapes_and_types_are_errors),
        cmocka_unit_test(blocks_of_fp8_are_read),
        cmocka_unit_test(copies_of_an_mtp_layer_must_be_equal),
        cmocka_unit_test(tied_models_take_a_head_that_is_equal),
        cmocka_unit_test(layers_beyond_are_left_unread_with_a_notice),
        cmocka_unit_test(missing_shards_are_named),
        cmocka_unit_test(moments_survive_a_round_trip),
        cmocka_unit_test(failing_allocations_and_writes_are_errors),
    };
    return cmocka_run_group_tests(tests, scratch_open, scratch_close);
}
