// modelkit.c - see modelkit.h.
#include "modelkit.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "lab.h"

static void *get(size_t count, size_t size) {
    void *p = calloc(count ? count : 1, size);
    if (!p) {
        fprintf(stderr, "modelkit: out of memory\n");
        abort();
    }
    return p;
}

/* ---- a random scene ---- */

// A whole number from low to high; each call is another draw.
static int pick(uint64_t seed, uint64_t *counter, int low, int high) {
    const double u = (oracle_random(seed, (*counter)++) + 1) / 2;
    return DPL_MIN(low + (int)(u * (high - low + 1)), high);
}

static oracle_router random_router(uint64_t seed, uint64_t *n) {
    const int groups = pick(seed, n, 0, 1) ? pick(seed, n, 2, 4) : 1;
    const int each = pick(seed, n, 2, 4);
    oracle_router r = {.E = groups * each, .n_group = groups, .group_best = 2};
    r.topk_group = pick(seed, n, 1, groups);
    r.K = pick(seed, n, 1, DPL_MIN(r.topk_group * each, 4));
    r.softmax = pick(seed, n, 0, 3) == 0;
    r.norm_topk = pick(seed, n, 0, 1);
    r.scale = 0.5 + pick(seed, n, 0, 4);
    return r;
}

static void random_losses(uint64_t seed, uint64_t *n, oracle_config *c) {
    const int kind = pick(seed, n, 0, 3);
    c->balance_weight = kind ? 0.7 : 0;
    c->balance_batch = kind == 2;
    c->balance_megatron = kind == 3;
    c->router_z_weight = pick(seed, n, 0, 1) ? 0.3 : 0;
    c->z_multiplier = pick(seed, n, 0, 1) ? 0.2 : 0;
    c->mtp_weight = pick(seed, n, 0, 4) ? 0.3 : 0;
}

static void random_yarn(oracle_config *c) {
    c->yarn.on = true;
    c->yarn.truncate = true;
    c->yarn.factor = 8;
    c->yarn.original_length = 64;
    c->yarn.beta_fast = 32;
    c->yarn.beta_slow = 1;
    c->yarn.mscale = 0.7;
    c->yarn.mscale_all_dim = 1.1;
}

oracle_config scene_small_config(void) {
    return (oracle_config){
        .V = 70,
        .D = 24,
        .L = 2,
        .H = 2,
        .n_dense = 1,
        .F_dense = 19,
        .F_moe = 18,
        .n_shared = 2,
        .router = {.E = 8, .K = 3, .n_group = 4, .topk_group = 2, .norm_topk = true, .scale = 2.5},
        .q_lora = 10,
        .kv_lora = 16,
        .nope = 8,
        .rope = 4,
        .v_dim = 6,
        .eps = 1e-6,
        .attention_bias = true,
        .rope_interleave = true,
        .rope_theta = 10000,
        .mtp_layers = 1,
    };
}

void scene_open_random(uint64_t seed, scene *s) {
    uint64_t n = 0;
    oracle_config c = {.V = pick(seed, &n, 17, 80), .D = pick(seed, &n, 9, 40)};
    c.L = pick(seed, &n, 1, 3);
    c.H = pick(seed, &n, 1, 3);
    c.n_dense = pick(seed, &n, 0, c.L);
    c.F_dense = pick(seed, &n, 5, 40);
    c.F_moe = pick(seed, &n, 3, 20);
    c.n_shared = pick(seed, &n, 0, 2);
    c.router = random_router(seed, &n);
    c.q_lora = pick(seed, &n, 0, 1) ? pick(seed, &n, 8, 24) : 0; // norms of fewer amplify errors
    c.kv_lora = pick(seed, &n, 8, 24);
    c.nope = pick(seed, &n, 1, 13);
    c.rope = 2 * pick(seed, &n, 1, 6);
    c.v_dim = pick(seed, &n, 1, 13);
    c.eps = pick(seed, &n, 0, 1) ? 1e-3 : 1e-6;
    c.latent_eps = 1e-6;
    c.attention_bias = pick(seed, &n, 0, 1);
    c.rope_interleave = pick(seed, &n, 0, 1);
    c.tied = pick(seed, &n, 0, 1);
    c.rope_theta = 100;
    c.mtp_layers = pick(seed, &n, 0, 2);
    if (pick(seed, &n, 0, 2) == 0) random_yarn(&c);
    random_losses(seed, &n, &c);
    const int n_batch = pick(seed, &n, 1, 3), n_seq = pick(seed, &n, 1 + c.mtp_layers, 20);
    scene_open(&c, seed, n_batch, n_seq, pick(seed, &n, 0, 1), s);
    const oracle_router *r = &c.router;
    fprintf(stderr,
            "seed %llu: V %d D %d L %d dense %d H %d q_lora %d E %d K %d groups %d/%d shared %d "
            "%s%s%s%s%s%s mtp %d balance %g%s%s z %g %g B %d S %d%s\n",
            (unsigned long long)seed, c.V, c.D, c.L, c.n_dense, c.H, c.q_lora, r->E, r->K,
            r->topk_group, r->n_group, c.n_shared, r->softmax ? "softmax" : "sigmoid",
            r->norm_topk ? " normed" : "", c.attention_bias ? " bias" : "",
            c.rope_interleave ? "" : " halves", c.tied ? " tied" : "", c.yarn.on ? " yarn" : "",
            c.mtp_layers, c.balance_weight, c.balance_batch ? " batch" : "",
            c.balance_megatron ? " megatron" : "", c.router_z_weight, c.z_multiplier, n_batch,
            n_seq, s->segments ? " packed" : "");
}

// Documents of random lengths; the last row may end in padding. Targets stay in their document,
// some are masked.
static void random_documents(uint64_t seed, scene *s) {
    uint64_t n = 0;
    const int S = s->n_seq, T = s->n_batch * S;
    int left = 0, document = 0;
    for (int i = 0; i < T; i++) {
        if (i % S == 0) left = document = 0;
        if (left-- == 0) {
            left = pick(seed, &n, 0, 7);
            document++;
        }
        s->segments[i] = i >= T - S / 4 ? 0 : document;
        const bool first = i % S == 0 || s->segments[i] != s->segments[i - 1];
        s->positions[i] = first ? 0 : s->positions[i - 1] + 1;
    }
}

void scene_open(const oracle_config *cfg, uint64_t seed, int n_batch, int n_seq, bool packed,
                scene *s) {
    const size_t T = (size_t)n_batch * (size_t)n_seq;
    *s = (scene){.cfg = *cfg, .n_batch = n_batch, .n_seq = n_seq};
    oracle_params_random(cfg, seed, &s->params);
    s->ids = get(T, sizeof *s->ids);
    s->targets = get(T, sizeof *s->targets);
    if (packed) {
        s->segments = get(T, sizeof *s->segments);
        s->positions = get(T, sizeof *s->positions);
        random_documents(seed + 1, s);
    }
    uint64_t n = 0;
    for (size_t i = 0; i < T; i++) s->ids[i] = pick(seed + 2, &n, 0, cfg->V - 1);
    for (size_t i = 0; i < T; i++) {
        const bool last = (i + 1) % (size_t)n_seq == 0;
        const bool inside = !last && (!packed || (s->segments[i] == s->segments[i + 1] &&
                                                  s->segments[i] != 0));
        s->targets[i] = inside && pick(seed + 2, &n, 0, 7) ? s->ids[i + 1] : -100;
    }
    scene_round(s, false);
}

void scene_open_fixture(const char *name, const char *config, scene *s) {
    fixture f;
    *s = (scene){0};
    if (!oracle_config_load(fixture_path("%s/%s", name, config), &s->cfg) ||
        !oracle_params_load(fixture_path("%s", name), &s->params) ||
        !fixture_open(fixture_path("%s/reference.safetensors", name), &f)) {
        fprintf(stderr, "modelkit: %s cannot be read\n", name);
        abort();
    }
    s->n_batch = fixture_find(&f, "input_ids")->shape[0];
    s->n_seq = fixture_find(&f, "input_ids")->shape[1];
    s->ids = fixture_int(&f, "input_ids", NULL);
    s->targets = fixture_int(&f, "targets", NULL);
    fixture_close(&f);
}

void scene_close(scene *s) {
    oracle_set_close(&s->params);
    free(s->ids), free(s->targets), free(s->segments), free(s->positions);
    *s = (scene){0};
}

void scene_round(scene *s, bool bf16) {
    for (int i = 0; i < s->params.n; i++) {
        oracle_tensor *t = &s->params.at[i];
        for (int j = 0; j < t->n; j++) {
            const float f = (float)t->value[j];
            t->value[j] = bf16 && t->n_dims == 2 ? dpl_bf16_to_f32(dpl_f32_to_bf16(f)) : f;
        }
    }
}

double kit_mtp_targets(const dpl_model_config *config, const dpl_batch *batch) {
    double n = 0;
    for (size_t k = 1; k <= config->n_mtp; k++) n += dpl_batch_targets(batch, k);
    return n;
}

dpl_batch scene_batch(const scene *s) {
    return (dpl_batch){(size_t)s->n_batch, (size_t)s->n_seq, s->ids,
                       s->targets,         s->segments,      s->positions};
}

oracle_batch scene_oracle_batch(const scene *s) {
    return (oracle_batch){s->n_batch, s->n_seq, s->ids, s->targets, s->segments};
}

dpl_loss_rule scene_rule(const oracle_config *c) {
    return (dpl_loss_rule){.z_weight = c->z_multiplier,
                           .mtp_weight = c->mtp_weight,
                           .balance = c->balance_megatron ? DPL_BALANCE_MEGATRON
                                      : c->balance_batch  ? DPL_BALANCE_BATCH
                                                          : DPL_BALANCE_SEQUENCE,
                           .balance_weight = c->balance_weight,
                           .router_z_weight = c->router_z_weight};
}

dpl_model_config scene_config(const oracle_config *c) {
    dpl_model_config m;
    dpl_model_config_init(&m);
    m.vocab = (size_t)c->V, m.d = (size_t)c->D, m.n_heads = (size_t)c->H;
    m.n_layers = (size_t)c->L, m.n_dense = (size_t)c->n_dense, m.n_mtp = (size_t)c->mtp_layers;
    m.q_lora = (size_t)c->q_lora, m.kv_lora = (size_t)c->kv_lora;
    m.d_nope = (size_t)c->nope, m.d_rope = (size_t)c->rope, m.d_v = (size_t)c->v_dim;
    m.mlp_f = (size_t)c->F_dense, m.moe_f = (size_t)c->F_moe, m.n_shared = (size_t)c->n_shared;
    m.n_experts = (size_t)c->router.E, m.top_k = (size_t)c->router.K;
    m.n_groups = (size_t)DPL_MAX(c->router.n_group, 1);
    m.top_groups = m.n_groups > 1 ? (size_t)c->router.topk_group : 1;
    m.sigmoid = !c->router.softmax, m.norm_topk = c->router.norm_topk;
    m.routed_scale = c->router.scale;
    m.tied = c->tied, m.attention_bias = c->attention_bias, m.eps = c->eps;
    m.rope_interleave = c->rope_interleave;
    m.rope.theta = c->rope_theta;
    m.rope.yarn = c->yarn.on;
    if (c->yarn.on) {
        m.rope.factor = c->yarn.factor, m.rope.original_positions = c->yarn.original_length;
        m.rope.beta_fast = c->yarn.beta_fast, m.rope.beta_slow = c->yarn.beta_slow;
        m.rope.mscale = c->yarn.mscale, m.rope.mscale_all_dim = c->yarn.mscale_all_dim;
        m.rope.attention_factor = c->yarn.attention_factor, m.rope.truncate = c->yarn.truncate;
    }
    return m;
}

/* ---- the model ---- */

size_t kit_elems(const dpl_disk_tensor *t) {
    return (size_t)(t->shape[0] * t->shape[1]);
}

void kit_fill(dpl_model *m, const oracle_set *params) {
    for (size_t i = 0; i < m->n_disk; i++) {
        const dpl_disk_tensor *t = &m->disk[i];
        const oracle_tensor *from = oracle_find(params, t->name);
        if (!from) continue; // a copy, or the router bias of a softmax router
        if ((size_t)from->n != kit_elems(t)) {
            fprintf(stderr, "modelkit: %s: %d elements, the model has %zu\n", t->name, from->n,
                    kit_elems(t));
            abort();
        }
        float *values = get(kit_elems(t), sizeof *values);
        for (int j = 0; j < from->n; j++) values[j] = (float)from->value[j];
        if (t->bias) memcpy(t->bias, values, kit_elems(t) * sizeof *values);
        else dpl_disk_scatter(t, m->params.master, values);
        free(values);
    }
    dpl_model_refresh(m);
}

bool kit_open(const dpl_model_config *config, dpl_dtype dtype, const oracle_set *params,
              int n_threads, bool deferred, const char *level, kit *k) {
    *k = (kit){.ctx = lab_ctx(n_threads, deferred, level)};
    if (!k->ctx) return false;
    if (dpl_model_create(k->ctx, config, dtype, &k->model) != DPL_OK ||
        dpl_model_begin_training(k->model) != DPL_OK) {
        fprintf(stderr, "modelkit: %s\n", dpl_error_message());
        abort();
    }
    if (params) kit_fill(k->model, params);
    return true;
}

void kit_close(kit *k) {
    dpl_model_close(&k->model);
    dpl_ctx_close(&k->ctx);
}

const dpl_disk_tensor *kit_disk(const dpl_model *m, const char *name) {
    for (size_t i = 0; i < m->n_disk; i++)
        if (strcmp(m->disk[i].name, name) == 0) return &m->disk[i];
    return NULL;
}

float *kit_gather(const dpl_disk_tensor *t, const float *flat) {
    float *values = get(kit_elems(t), sizeof *values);
    dpl_disk_gather(t, flat, values);
    return values;
}

/* ---- one pass ---- */

static void capture(void *arg, const char *name, bool is_int, int rank, const int64_t *shape,
                    const void *data) {
    int dims[4] = {0}, n = 1;
    for (int i = 0; i < rank; i++) n *= dims[i] = (int)shape[i];
    oracle_tensor *t = oracle_add(arg, false, name, rank, dims, NULL);
    for (int i = 0; i < n; i++)
        t->value[i] = is_int ? (double)((const int64_t *)data)[i] : ((const float *)data)[i];
}

dpl_status kit_train(kit *k, const scene *s, kit_result *result_out) {
    const dpl_batch batch = scene_batch(s);
    const dpl_loss_rule rule = scene_rule(&s->cfg);
    double n_tokens = 0;
    for (int i = 0; i < s->n_batch * s->n_seq; i++) n_tokens += s->targets[i] >= 0;
    const double n_mtp = kit_mtp_targets(&k->model->config, &batch);
    const double scale = n_tokens > 0 ? 1 / n_tokens : 0, mtp = n_mtp > 0 ? 1 / n_mtp : 0;
    kit_result r = {0};
    if (result_out) {
        k->model->probe = capture;
        k->model->probe_arg = &r.out;
    }
    dpl_model_zero_grads(k->model);
    const dpl_status status = dpl_model_train_micro(k->model, &batch, &rule, scale,
                                                    s->cfg.mtp_weight * mtp, 1, &r.sums);
    k->model->probe = NULL;
    if (!result_out) return status;
    r.loss = scale * (r.sums.xent + r.sums.z);
    r.mtp_loss = mtp * r.sums.mtp_xent;
    r.total = r.loss + s->cfg.mtp_weight * r.mtp_loss + r.sums.balance + r.sums.router_z;
    *result_out = r;
    if (status != DPL_OK) oracle_set_close(&result_out->out);
    return status;
}

void kit_result_close(kit_result *r) {
    oracle_set_close(&r->out);
}

void kit_check_copy(const dpl_model *model) {
    const dpl_params *p = &model->params;
    for (size_t i = 0; i < p->n; i++) {
        const dpl_param *one = &p->list[i];
        for (size_t j = 0; one->kind <= DPL_GATE_UP && j < one->elems; j++)
            assert_int_equal(p->copy[one->offset + dpl_pair_index(j)],
                             dpl_f32_to_bf16(p->master[one->offset + j]));
    }
}
