/*
 * test_faults_io.c - faults that users of other systems reported of model files: experts under each
 * other's names, matrices transposed because they are square, tensors left out, layers of
 * multi-token prediction dropped. Names, shapes and places are written down here a second time.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "io/io.h"
#include "modelkit.h"
#include "scratch.h"

#define PREFIX "model.layers.%d."

// A tensor that a directory must have.
typedef struct expected {
    char name[128];
    int rank, shape[2];
} expected;

typedef struct expected_set {
    expected at[400];
    int n;
} expected_set;

static void expect(expected_set *s, int rows, int cols, const char *format, ...) {
    assert_true(s->n < (int)DPL_COUNT(s->at));
    expected *e = &s->at[s->n++];
    *e = (expected){.rank = cols ? 2 : 1, .shape = {rows, cols}};
    va_list args;
    va_start(args, format);
    vsnprintf(e->name, sizeof e->name, format, args);
    va_end(args);
}

// Of the MLP "", "shared_experts." or "experts.3." of a layer.
static void expect_mlp(expected_set *s, int d, int f, int layer, const char *of) {
    expect(s, f, d, PREFIX "mlp.%sgate_proj.weight", layer, of);
    expect(s, f, d, PREFIX "mlp.%sup_proj.weight", layer, of);
    expect(s, d, f, PREFIX "mlp.%sdown_proj.weight", layer, of);
}

static void expect_layer(expected_set *s, const oracle_config *c, int layer) {
    const int D = c->D, V = c->V, E = c->router.E, F = c->F_moe;
    expect(s, D, 0, PREFIX "input_layernorm.weight", layer);
    expect(s, D, 0, PREFIX "post_attention_layernorm.weight", layer);
    expect(s, c->q_lora, D, PREFIX "self_attn.q_a_proj.weight", layer);
    expect(s, c->q_lora, 0, PREFIX "self_attn.q_a_layernorm.weight", layer);
    expect(s, c->H * (c->nope + c->rope), c->q_lora, PREFIX "self_attn.q_b_proj.weight", layer);
    expect(s, c->kv_lora + c->rope, D, PREFIX "self_attn.kv_a_proj_with_mqa.weight", layer);
    expect(s, c->kv_lora, 0, PREFIX "self_attn.kv_a_layernorm.weight", layer);
    expect(s, c->H * (c->nope + c->v_dim), c->kv_lora, PREFIX "self_attn.kv_b_proj.weight", layer);
    expect(s, D, c->H * c->v_dim, PREFIX "self_attn.o_proj.weight", layer);
    if (layer < c->n_dense) {
        expect_mlp(s, D, c->F_dense, layer, "");
        return;
    }
    expect(s, E, D, PREFIX "mlp.gate.weight", layer);
    expect(s, E, 0, PREFIX "mlp.gate.e_score_correction_bias", layer);
    for (int e = 0; e < E; e++) {
        char of[32];
        snprintf(of, sizeof of, "experts.%d.", e);
        expect_mlp(s, D, F, layer, of);
    }
    expect_mlp(s, D, c->n_shared * F, layer, "shared_experts.");
    if (layer < c->L) return;
    expect(s, D, 0, PREFIX "enorm.weight", layer);
    expect(s, D, 0, PREFIX "hnorm.weight", layer);
    expect(s, D, 2 * D, PREFIX "eh_proj.weight", layer);
    expect(s, D, 0, PREFIX "shared_head.norm.weight", layer);
    expect(s, V, D, PREFIX "shared_head.head.weight", layer);
    expect(s, V, D, PREFIX "embed_tokens.weight", layer);
}

// Every name and shape, and no other.
static void check_names(const fixture *f, const oracle_config *c) {
    static expected_set s;
    s.n = 0;
    expect(&s, c->V, c->D, "model.embed_tokens.weight");
    expect(&s, c->D, 0, "model.norm.weight");
    expect(&s, c->V, c->D, "lm_head.weight");
    for (int layer = 0; layer < c->L + c->mtp_layers; layer++) expect_layer(&s, c, layer);
    for (int i = 0; i < s.n; i++) {
        const fixture_tensor *t = fixture_find(f, s.at[i].name);
        if (!t) fail_msg("%s is missing", s.at[i].name);
        if (t->n_dims != s.at[i].rank || t->shape[0] != s.at[i].shape[0] ||
            (t->n_dims == 2 && t->shape[1] != s.at[i].shape[1]))
            fail_msg("%s has another shape", s.at[i].name);
    }
    assert_int_equal(f->n, s.n);
}

// Row r, column c of part 0 gate, 1 up, 2 down of an expert: no two are alike.
static float mark(int layer, int e, int part, int r, int c) {
    return (float)((((layer * 8 + e) * 3 + part) * 32 + r) * 32 + c);
}

// Puts the marks where the products read their weights; the loops over disk names are not used.
static void mark_experts(const oracle_config *c, const dpl_model *m, float *flat) {
    const size_t D = (size_t)c->D, F = (size_t)c->F_moe;
    for (int layer = c->n_dense; layer < c->L + c->mtp_layers; layer++)
        for (int i = 0; i < c->router.E * c->F_moe * c->D; i++) {
            const int e = i / (c->F_moe * c->D), f = i / c->D % c->F_moe, d = i % c->D;
            const dpl_param *up = dpl_model_param(m, layer, DPL_P_EXPERT_GATE_UP),
                            *down = dpl_model_param(m, layer, DPL_P_EXPERT_DOWN);
            float *gate_up = flat + up->offset + (size_t)e * dpl_panel_elems(up->n, D);
            const size_t row = dpl_gate_column((size_t)f);
            gate_up[dpl_panel_index(row, (size_t)d, D)] = mark(layer, e, 0, f, d);
            gate_up[dpl_panel_index(row + 16, (size_t)d, D)] = mark(layer, e, 1, f, d);
            flat[down->offset + (size_t)e * dpl_panel_elems(D, F) +
                 dpl_panel_index((size_t)d, (size_t)f, F)] = mark(layer, e, 2, d, f);
        }
}

static void check_marks(const fixture *f, const oracle_config *c, const char *prefix) {
    static const char *const parts[] = {"gate", "up", "down"};
    for (int layer = c->n_dense; layer < c->L + c->mtp_layers; layer++)
        for (int e = 0; e < c->router.E; e++)
            for (int part = 0; part < 3; part++) {
                char name[160];
                snprintf(name, sizeof name, "%s" PREFIX "mlp.experts.%d.%s_proj.weight", prefix,
                         layer, e, parts[part]);
                size_t n;
                double *got = fixture_f64(f, name, &n);
                const int cols = part < 2 ? c->D : c->F_moe;
                assert_int_equal(n, c->D * c->F_moe);
                for (int i = 0; i < (int)n; i++)
                    if (got[i] != mark(layer, e, part, i / cols, i % cols))
                        fail_msg("%s[%d] is %g", name, i, got[i]);
                free(got);
            }
}

// A width that is twice the other, both alike, and neither: out of memory into files and back, each
// expert under its own number, each matrix the right way round. So are the moments.
static void experts_keep_their_names_and_sides(void **state) {
    (void)state;
    static const int sizes[][2] = {{8, 6}, {16, 8}, {16, 16}, {8, 16}};
    for (size_t i = 0; i < DPL_COUNT(sizes); i++) {
        oracle_config c = scene_small_config();
        c.D = sizes[i][0], c.F_moe = sizes[i][1], c.L = 4, c.router.E = 6, c.router.n_group = 1;
        c.V = 1000, c.attention_bias = false;
        const dpl_model_config config = scene_config(&c);
        scene s;
        kit k, again;
        fixture f;
        scene_open(&c, 41 + i, 1, 4, false, &s);
        assert_true(kit_open(&config, DPL_F32, &s.params, 2, false, NULL, &k));
        assert_true(kit_open(&config, DPL_F32, NULL, 2, false, NULL, &again));
        const size_t n = k.model->params.elems, n_bias = 5 * (size_t)c.router.E;
        mark_experts(&c, k.model, k.model->params.master);
        for (size_t e = 0; e < n_bias; e++) k.model->router_bias[e] = 1.001f + (float)e;
        const char *dir = scratch_path("experts%zu", i);
        check_ok(dpl_make_dirs(dir));
        check_ok(dpl_model_save(k.model, dir, DPL_F32, i % 2 ? 30000 : 0));
        assert_true(fixture_open(dir, &f));
        check_names(&f, &c);
        check_marks(&f, &c, "");
        size_t n_one;
        double *bias = fixture_f64(&f, "model.layers.4.mlp.gate.e_score_correction_bias", &n_one);
        assert_int_equal(n_one, c.router.E);
        for (size_t e = 0; e < n_one; e++) assert_true(bias[e] == 1.001f + (float)(4 * n_one + e));
        free(bias);
        fixture_close(&f);
        check_ok(dpl_model_load(again.model, dir));
        assert_memory_equal(again.model->params.master, k.model->params.master, n * sizeof(float));
        assert_memory_equal(again.model->router_bias + c.router.E,
                            k.model->router_bias + c.router.E,
                            (n_bias - (size_t)c.router.E) * sizeof(float)); // layer 0 is dense

        float *m = calloc(n, sizeof *m), *back = calloc(n, sizeof *back);
        const char *path = scratch_path("moments%zu.safetensors", i), *const prefix = "m.";
        char part[PATH_MAX];
        mark_experts(&c, k.model, m);
        check_ok(dpl_model_save_flat(k.model, path, &prefix, &m, 1, part));
        assert_true(fixture_open(path, &f));
        check_marks(&f, &c, "m.");
        fixture_close(&f);
        check_ok(dpl_model_load_flat(again.model, path, &prefix, &back, 1));
        assert_memory_equal(back, m, n * sizeof *m);
        free(m), free(back);
        kit_close(&k);
        kit_close(&again);
        scene_close(&s);
    }
}

// A directory without one of its tensors, and with one that is no tensor of the model: each is
// named, and the model keeps its weights.
static void nothing_is_assigned_when_a_tensor_is_missing(void **state) {
    (void)state;
    oracle_config c = scene_small_config(), more = c;
    scene s;
    kit k, other;
    scene_open(&c, 45, 1, 4, false, &s);
    const dpl_model_config config = scene_config(&c);
    assert_true(kit_open(&config, DPL_F32, &s.params, 2, false, NULL, &k));
    more.router.E = 16; // its experts 8 to 15 are unknown to the smaller model, and the reverse
    const dpl_model_config larger = scene_config(&more);
    assert_true(kit_open(&larger, DPL_F32, NULL, 2, false, NULL, &other));
    const char *dir = scratch_path("missing");
    check_ok(dpl_make_dirs(dir));
    check_ok(dpl_model_save(k.model, dir, DPL_F32, 0));
    check_error(dpl_model_load(other.model, dir), DPL_EFORMAT, "missing", "experts.10.");
    check_ok(dpl_model_save(other.model, dir, DPL_F32, 0));
    const size_t bytes = k.model->params.elems * sizeof(float);
    float *before = memcpy(test_malloc(bytes), k.model->params.master, bytes);
    check_error(dpl_model_load(k.model, dir), DPL_EFORMAT, "not this model's", "experts.10.");
    assert_memory_equal(before, k.model->params.master, bytes);
    test_free(before);
    kit_close(&k);
    kit_close(&other);
    scene_close(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(experts_keep_their_names_and_sides),
        cmocka_unit_test(nothing_is_assigned_when_a_tensor_is_missing),
    };
    return cmocka_run_group_tests(tests, scratch_open, scratch_close);
}
