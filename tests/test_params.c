/*
 * test_params.c - the tensor table: names and shapes on disk, the way between rows on disk and
 * panels in memory, and initial values.
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

static void open_plain(const oracle_config *c, dpl_dtype dtype, int n_threads, kit *k) {
    const dpl_model_config config = scene_config(c);
    assert_true(kit_open(&config, dtype, NULL, n_threads, false, NULL, k));
}

/* ---- names and shapes ---- */

static void names_are_those_of_the_reference_folders(void **state) {
    (void)state;
    if (!fixture_root()) skip();
    static const char *const folders[] = {
        "deepseek_v3",      "deepseek_v3_noqlora", "deepseek_v3_yarn",  "deepseek_v3_halfrope",
        "deepseek_v3_bf16", "deepseek_v3_mtp",     "maxtext_trajectory"};
    for (size_t i = 0; i < DPL_COUNT(folders); i++) {
        fixture f;
        kit k;
        dpl_model_config config;
        check_ok(dpl_model_read_config(fixture_path("%s", folders[i]), &config, NULL));
        assert_true(kit_open(&config, DPL_F32, NULL, 1, false, NULL, &k));
        assert_true(fixture_open(fixture_path("%s", folders[i]), &f));
        for (int j = 0; j < f.n; j++) {
            const dpl_disk_tensor *t = kit_disk(k.model, f.at[j].name);
            if (!t) fail_msg("%s: the model has no %s", folders[i], f.at[j].name);
            assert_int_equal(t->rank, f.at[j].n_dims);
            assert_int_equal(t->shape[0], f.at[j].shape[0]);
            assert_int_equal(t->shape[1], f.at[j].n_dims > 1 ? f.at[j].shape[1] : 1);
        }
        assert_int_equal(k.model->n_disk, f.n);
        fixture_close(&f);
        kit_close(&k);
    }
}

// Every trainable element is on disk once, and the counts of config.c agree with the table.
static void counts_agree_with_the_table(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        scene s;
        kit k;
        scene_open_random(seed, &s);
        s.cfg.mtp_layers = 0;
        open_plain(&s.cfg, DPL_F32, 1, &k);
        size_t n = 0, n_oracle = 0;
        for (size_t i = 0; i < k.model->n_disk; i++)
            if (k.model->disk[i].param) n += kit_elems(&k.model->disk[i]);
        assert_int_equal(n, dpl_model_param_count(&k.model->config));
        for (int i = 0; i < s.params.n; i++) {
            const oracle_tensor *t = &s.params.at[i];
            int layer = -1;
            (void)sscanf(t->name, "model.layers.%d.", &layer);
            if (t->trainable && layer < s.cfg.L) n_oracle += (size_t)t->n;
        }
        assert_int_equal(n, n_oracle);
        kit_close(&k);
        scene_close(&s);
    }
}

static void tied_embedding_is_one_tensor(void **state) {
    (void)state;
    oracle_config c = scene_small_config();
    kit untied, tied;
    open_plain(&c, DPL_F32, 1, &untied);
    c.tied = true;
    open_plain(&c, DPL_F32, 1, &tied);
    assert_non_null(kit_disk(untied.model, "lm_head.weight"));
    assert_null(kit_disk(tied.model, "lm_head.weight"));
    const dpl_param *embed = dpl_model_param(tied.model, -1, DPL_P_EMBED);
    assert_null(dpl_model_param(tied.model, -1, DPL_P_HEAD));
    assert_int_equal(embed->kind, DPL_MATRIX); // it is the head's matrix as well
    assert_int_equal(dpl_model_param(untied.model, -1, DPL_P_EMBED)->kind, DPL_ROWS);
    // The copies of an MTP layer show the shared tensors.
    static const char *const copies[] = {"model.layers.2.embed_tokens.weight",
                                         "model.layers.2.shared_head.head.weight"};
    for (int i = 0; i < 2; i++) {
        const dpl_disk_tensor *t = kit_disk(tied.model, copies[i]);
        assert_true(t->copy_of_shared && t->param == embed);
        t = kit_disk(untied.model, copies[i]);
        assert_true(t->copy_of_shared);
        assert_int_equal(t->param->id, i ? DPL_P_HEAD : DPL_P_EMBED);
    }
    kit_close(&untied);
    kit_close(&tied);
}

/* ---- rows and panels ---- */

static float mark_of(size_t tensor, size_t element) {
    return (float)(1 + tensor * 2000 + element); // exact: below 2^24
}

static void rows_survive_the_way_to_panels_and_back(void **state) {
    (void)state;
    const oracle_config c = scene_small_config();
    kit k;
    open_plain(&c, DPL_F32, 1, &k);
    float *flat = calloc(k.model->params.elems, sizeof *flat);
    size_t n_elems = 0, n_filled = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (size_t i = 0; i < k.model->n_disk; i++) {
            const dpl_disk_tensor *t = &k.model->disk[i];
            if (!t->param || t->copy_of_shared) continue;
            const size_t n = kit_elems(t);
            assert_true(n <= 2000);
            float values[2000];
            if (pass == 0) {
                for (size_t j = 0; j < n; j++) values[j] = mark_of(i, j);
                dpl_disk_scatter(t, flat, values);
                n_elems += n;
                continue;
            }
            dpl_disk_gather(t, flat, values); // nobody else wrote there
            for (size_t j = 0; j < n; j++) assert_true(values[j] == mark_of(i, j));
        }
    }
    for (size_t i = 0; i < k.model->params.elems; i++) n_filled += flat[i] != 0;
    assert_int_equal(n_filled, n_elems);
    for (size_t i = 0; i < k.model->params.n; i++)
        assert_int_equal(k.model->params.list[i].offset % 16, 0);
    free(flat);
    kit_close(&k);
}

// What a weight does is what its rows on disk say, square or not: y = x W^T with a unit vector
// gives a column.
static void check_column(kit *k, const char *name, size_t column) {
    const dpl_disk_tensor *t = kit_disk(k->model, name);
    const size_t rows = (size_t)t->shape[0], n = t->param->n, cols = t->param->k;
    float x[64] = {0}, y[64];
    assert_true(cols <= 64 && n <= 64);
    x[column] = 1;
    dpl_weight w = dpl_model_weight(k->model, t->param);
    w.p = (const float *)w.p + t->group * dpl_panel_elems(n, cols);
    w.n_groups = 1;
    dpl_gemm_forward(k->ctx, dpl_mat_f32(x, cols), &w, dpl_one_group(1), dpl_mat_f32(y, n));
    for (size_t r = 0; r < rows; r++) {
        const bool two = t->param->kind == DPL_GATE_UP;
        const size_t at = two ? dpl_gate_column(r) + 16 * (size_t)t->part : r;
        assert_true(y[at] ==
                    (float)(100 * r + column + 10000 * (size_t)t->part + 50000 * t->group));
    }
}

static void square_experts_are_not_transposed(void **state) {
    (void)state;
    for (int half = 0; half < 2; half++) { // F = D, and 2 F = D
        oracle_config c = scene_small_config();
        c.D = 16, c.F_moe = half ? 8 : 16, c.router.E = 8;
        kit k;
        open_plain(&c, DPL_F32, 1, &k);
        for (size_t i = 0; i < k.model->n_disk; i++) {
            const dpl_disk_tensor *t = &k.model->disk[i];
            if (!strstr(t->name, ".experts.")) continue;
            float values[256];
            const size_t cols = (size_t)t->shape[1];
            for (size_t j = 0; j < kit_elems(t); j++)
                values[j] = (float)(100 * (j / cols) + j % cols + 10000 * (size_t)t->part +
                                    50000 * t->group);
            dpl_disk_scatter(t, k.model->params.master, values);
        }
        for (size_t column = 0; column < 8; column++) {
            check_column(&k, "model.layers.1.mlp.experts.0.gate_proj.weight", column);
            check_column(&k, "model.layers.1.mlp.experts.3.up_proj.weight", column);
            check_column(&k, "model.layers.1.mlp.experts.7.down_proj.weight", column);
            check_column(&k, "model.layers.2.mlp.experts.5.down_proj.weight", column);
        }
        kit_close(&k);
    }
}

/* ---- initial values ---- */

// Equal bits of the tensors that two models have in common; returns their number.
static int compare_common(const kit *a, const kit *b, const char *part) {
    int n = 0;
    for (size_t i = 0; i < a->model->n_disk; i++) {
        const dpl_disk_tensor *t = &a->model->disk[i], *u = kit_disk(b->model, t->name);
        if (!t->param || !u || !strstr(t->name, part) || kit_elems(t) != kit_elems(u)) continue;
        float *x = kit_gather(t, a->model->params.master),
              *y = kit_gather(u, b->model->params.master);
        assert_memory_equal(x, y, kit_elems(t) * sizeof(float));
        free(x), free(y);
        n++;
    }
    return n;
}

static void initial_values_depend_on_seed_and_name_alone(void **state) {
    (void)state;
    oracle_config c = scene_small_config();
    kit one, other;
    open_plain(&c, DPL_BF16, 1, &one);
    dpl_model_init(one.model, false, 0, 7);
    const size_t n = one.model->params.elems;
    for (int threads = 2; threads <= 3; threads++) {
        open_plain(&c, DPL_BF16, threads, &other);
        dpl_model_init(other.model, false, 0, 7);
        assert_memory_equal(one.model->params.master, other.model->params.master,
                            n * sizeof(float));
        assert_memory_equal(one.model->params.copy, other.model->params.copy, n * 2);
        kit_check_copy(other.model);
        kit_close(&other);
    }
    // Again over other values, from another seed, and back.
    const dpl_disk_tensor *router = kit_disk(one.model, "model.layers.1.mlp.gate.weight");
    float *before = kit_gather(router, one.model->params.master);
    dpl_model_bias(one.model, 1)[3] = 5;
    dpl_model_values(one.model, dpl_model_param(one.model, 0, DPL_P_O_BIAS))[2] = 5;
    dpl_model_init(one.model, false, 0, 8);
    float *after = kit_gather(router, one.model->params.master);
    assert_memory_not_equal(before, after, kit_elems(router) * sizeof(float));
    free(before), free(after);
    assert_true(dpl_model_bias(one.model, 1)[3] == 0);
    assert_true(dpl_model_values(one.model, dpl_model_param(one.model, 0, DPL_P_O_BIAS))[2] == 0);
    dpl_model_init(one.model, false, 0, 7);
    // A model that lies otherwise in memory has the same values under the same names.
    c.tied = true, c.L = 3;
    open_plain(&c, DPL_F32, 2, &other);
    dpl_model_init(other.model, false, 0, 7);
    assert_true(compare_common(&one, &other, "model.layers.1.") > 20);
    kit_close(&other);
    kit_close(&one);
}

typedef struct statistics {
    double mean, std, top;
} statistics;

static statistics measure(const kit *k, const dpl_disk_tensor *t) {
    statistics s = {0};
    const size_t n = kit_elems(t);
    float *x = kit_gather(t, k->model->params.master);
    for (size_t i = 0; i < n; i++) {
        s.mean += x[i] / (double)n;
        s.std += (double)x[i] * x[i] / (double)n;
        s.top = fmax(s.top, fabs(x[i]));
    }
    s.std = sqrt(s.std);
    free(x);
    return s;
}

// Sizes such that each tensor has thousands of elements and no two fans are equal.
static oracle_config wide_config(void) {
    oracle_config c = scene_small_config();
    c.V = 300, c.D = 96, c.F_dense = 110, c.F_moe = 50, c.n_shared = 2, c.q_lora = 70;
    c.kv_lora = 60, c.H = 4, c.nope = 20, c.rope = 10, c.v_dim = 18, c.router.E = 32;
    c.router.n_group = 1;
    return c;
}

typedef struct expected {
    const char *name;
    double fan_in, maxtext; // 1 / std^2
    bool truncated;
} expected;

static const expected table[] = {
    {"model.embed_tokens.weight", 1, 1, false},
    {"lm_head.weight", 96, 96, true},
    {"model.layers.0.self_attn.q_a_proj.weight", 96, 96, false},
    {"model.layers.0.self_attn.q_b_proj.weight", 70, 70, false},
    {"model.layers.1.self_attn.kv_a_proj_with_mqa.weight", 96, 96, false},
    {"model.layers.1.self_attn.kv_b_proj.weight", 60, 60, false},
    {"model.layers.0.self_attn.o_proj.weight", 72, 72, false},
    {"model.layers.0.mlp.gate_proj.weight", 96, 96, true},
    {"model.layers.0.mlp.up_proj.weight", 96, 96, true},
    {"model.layers.0.mlp.down_proj.weight", 110, 110, true},
    {"model.layers.1.mlp.gate.weight", 96, 96, true},
    {"model.layers.1.mlp.shared_experts.gate_proj.weight", 96, 96, true},
    {"model.layers.1.mlp.shared_experts.down_proj.weight", 100, 100, true},
    {"model.layers.1.mlp.experts.3.gate_proj.weight", 96, 32 * 50, true},
    {"model.layers.1.mlp.experts.31.up_proj.weight", 96, 32 * 50, true},
    {"model.layers.1.mlp.experts.0.down_proj.weight", 50, 32 * 96, true},
    {"model.layers.2.eh_proj.weight", 192, 192, true},
};

static void check_statistics(const kit *k, const char *name, double std, bool truncated) {
    const dpl_disk_tensor *t = kit_disk(k->model, name);
    if (!t) fail_msg("no tensor %s", name);
    const double n = (double)kit_elems(t);
    const statistics s = measure(k, t);
    // Five standard errors of a normal sample, which a cut one stays below.
    if (fabs(s.std / std - 1) > 5 / sqrt(2 * n) || fabs(s.mean) > 5 * std / sqrt(n))
        fail_msg("%s: mean %g, deviation %g, expected 0 and %g", name, s.mean, s.std, std);
    const double cut = 2 / 0.87962566103423978 * std;
    if (truncated ? s.top > 1.000001 * cut : s.top < 1.05 * cut)
        fail_msg("%s: largest %g, cut at %g: %d", name, s.top, cut, truncated);
}

static void check_constants(const kit *k) {
    for (size_t i = 0; i < k->model->n_disk; i++) {
        const dpl_disk_tensor *t = &k->model->disk[i];
        if (!t->param || t->rank != 1) continue;
        const bool one = strstr(t->name, "norm.weight") != NULL;
        float *x = kit_gather(t, k->model->params.master);
        for (size_t j = 0; j < kit_elems(t); j++) assert_true(x[j] == (one ? 1 : 0));
        free(x);
    }
    const size_t n = k->model->config.n_experts * 3;
    for (size_t i = 0; i < n; i++) assert_true(k->model->router_bias[i] == 0);
}

static void initial_values_have_the_deviation_of_their_rule(void **state) {
    (void)state;
    const oracle_config c = wide_config();
    kit k;
    open_plain(&c, DPL_F32, 2, &k);
    for (unsigned r = 0; r < 3; r++) { // by fan-in, MaxText's, N(0, std)
        const bool maxtext = r == 1, normal = r == 2;
        dpl_model_init(k.model, maxtext, normal ? 0.006 : 0, 1 + r);
        for (size_t i = 0; i < DPL_COUNT(table); i++) {
            const double fan = maxtext ? table[i].maxtext : table[i].fan_in;
            check_statistics(&k, table[i].name, normal ? 0.006 : 1 / sqrt(fan),
                             !normal && table[i].truncated);
        }
        check_constants(&k);
    }
    // Padding is still zero: as many elements differ from zero as there are parameters with values.
    size_t n_filled = 0, n_elems = 0;
    for (size_t i = 0; i < k.model->params.elems; i++) n_filled += k.model->params.master[i] != 0;
    for (size_t i = 0; i < k.model->n_disk; i++) {
        const dpl_disk_tensor *t = &k.model->disk[i];
        const bool bias = t->rank == 1 && !strstr(t->name, "norm.weight");
        if (t->param && !t->copy_of_shared && !bias) n_elems += kit_elems(t);
    }
    assert_int_equal(n_filled, n_elems);
    kit_close(&k);
}

// A tied embedding is a head too: its fan is D, but 1 where MaxText's values are wanted.
static void tied_embedding_has_its_own_deviation(void **state) {
    (void)state;
    oracle_config c = wide_config();
    c.tied = true;
    kit k;
    open_plain(&c, DPL_F32, 2, &k);
    dpl_model_init(k.model, false, 0, 1);
    check_statistics(&k, "model.embed_tokens.weight", 1 / sqrt(96), false);
    dpl_model_init(k.model, true, 0, 1);
    check_statistics(&k, "model.embed_tokens.weight", 1, false);
    kit_close(&k);
}

/* ---- memory ---- */

static void every_failing_allocation_is_an_error(void **state) {
    (void)state;
    const oracle_config c = scene_small_config();
    const dpl_model_config config = scene_config(&c);
    dpl_ctx *ctx;
    check_ok(dpl_ctx_open(1, &ctx));
    dpl_status status = DPL_ENOMEM;
    size_t nth = 0;
    while (status == DPL_ENOMEM) {
        dpl_model *model = NULL;
        dpl_fault_alloc(++nth);
        status = dpl_model_create(ctx, &config, DPL_BF16, &model);
        if (status == DPL_OK) status = dpl_model_begin_training(model);
        if (status == DPL_OK) status = dpl_model_rope_tables(model, 8);
        dpl_fault_alloc(0);
        dpl_model_close(&model);
        assert_null(model);
        if (status != DPL_OK) check_error(status, DPL_ENOMEM, "no memory", "");
    }
    check_ok(status);
    assert_true(nth > 11); // there are as many at least
    dpl_ctx_close(&ctx);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_are_those_of_the_reference_folders),
        cmocka_unit_test(counts_agree_with_the_table),
        cmocka_unit_test(tied_embedding_is_one_tensor),
        cmocka_unit_test(rows_survive_the_way_to_panels_and_back),
        cmocka_unit_test(square_experts_are_not_transposed),
        cmocka_unit_test(initial_values_depend_on_seed_and_name_alone),
        cmocka_unit_test(initial_values_have_the_deviation_of_their_rule),
        cmocka_unit_test(tied_embedding_has_its_own_deviation),
        cmocka_unit_test(every_failing_allocation_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
