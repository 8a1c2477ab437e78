// params.c - the model's tensors: one table, one flat array a kind, the names on disk, the initial values.
//
// Master, gradient, moments and bf16 copy are flat arrays of the same order; a parameter is an offset into each.
// The Hugging Face layout (one row-major matrix a projection and expert) exists only on the way to and from files:
// a disk tensor is a slice of one parameter, moved by dpl_disk_gather and dpl_disk_scatter.
#include <math.h>
#include <stdio.h>

#include "model/model.h"

/* ---- the table ---- */

static size_t n_all_layers(const dpl_model_config *c)
{
    return c->n_layers + c->n_mtp;
}

static dpl_param *append(dpl_model *m, dpl_param param, size_t elems)
{
    dpl_params *p = &m->params;
    param.offset = p->elems;
    param.elems = elems;
    p->elems += dpl_round_up(elems, DPL_ALIGN / sizeof(float));
    p->list[p->n] = param;
    m->by_id[(size_t)(param.layer + 1) * DPL_P_N + param.id] = &p->list[p->n];
    return &p->list[p->n++];
}

static dpl_param *add(dpl_model *m, int layer, dpl_param_id id, size_t n_groups, size_t n, size_t k)
{
    const dpl_param param = {.id = id,
                             .layer = layer,
                             .in_panels = true,
                             .n_groups = n_groups,
                             .n = n,
                             .k = k,
                             .fan_in = (double)k};
    return append(m, param, n_groups * dpl_panel_elems(n, k));
}

static dpl_param *add_vector(dpl_model *m, int layer, dpl_param_id id, size_t k)
{
    return append(m, (dpl_param){.id = id, .layer = layer, .n_groups = 1, .n = 1, .k = k}, k);
}

static void add_norm(dpl_model *m, int layer, dpl_param_id id, size_t d)
{
    add_vector(m, layer, id, d)->ones = true;
}

static void add_gate_up(dpl_model *m, int layer, dpl_param_id id, size_t n_groups, size_t f,
                        size_t d)
{
    add(m, layer, id, n_groups, dpl_gate_up_width(f), d)->interleaved = true;
}

static void add_attention(dpl_model *m, int layer)
{
    const dpl_model_config *c = &m->config;
    const size_t heads_qk = c->n_heads * (c->d_nope + c->d_rope);
    add_norm(m, layer, DPL_P_ATTN_NORM, c->d);
    if (c->q_lora) {
        add(m, layer, DPL_P_Q_A, 1, c->q_lora, c->d);
        if (c->attention_bias) add_vector(m, layer, DPL_P_Q_A_BIAS, c->q_lora);
        add_norm(m, layer, DPL_P_Q_A_NORM, c->q_lora);
        add(m, layer, DPL_P_Q_B, 1, heads_qk, c->q_lora);
    } else {
        add(m, layer, DPL_P_Q, 1, heads_qk, c->d);
    }
    add(m, layer, DPL_P_KV_A, 1, c->kv_lora + c->d_rope, c->d);
    if (c->attention_bias) add_vector(m, layer, DPL_P_KV_A_BIAS, c->kv_lora + c->d_rope);
    add_norm(m, layer, DPL_P_KV_A_NORM, c->kv_lora);
    add(m, layer, DPL_P_KV_B, 1, c->n_heads * (c->d_nope + c->d_v), c->kv_lora);
    add(m, layer, DPL_P_O, 1, c->d, c->n_heads * c->d_v);
    if (c->attention_bias) add_vector(m, layer, DPL_P_O_BIAS, c->d);
    add_norm(m, layer, DPL_P_MLP_NORM, c->d);
}

static void add_mlp(dpl_model *m, int layer)
{
    const dpl_model_config *c = &m->config;
    if (!dpl_model_layer_is_moe(c, (size_t)layer)) {
        add_gate_up(m, layer, DPL_P_GATE_UP, 1, c->mlp_f, c->d);
        add(m, layer, DPL_P_DOWN, 1, c->d, c->mlp_f);
        return;
    }
    add(m, layer, DPL_P_ROUTER, 1, c->n_experts, c->d);
    add_gate_up(m, layer, DPL_P_EXPERT_GATE_UP, c->n_experts, c->moe_f, c->d);
    add(m, layer, DPL_P_EXPERT_DOWN, c->n_experts, c->d, c->moe_f);
    if (c->n_shared) {
        add_gate_up(m, layer, DPL_P_SHARED_GATE_UP, 1, c->moe_f * c->n_shared, c->d);
        add(m, layer, DPL_P_SHARED_DOWN, 1, c->d, c->moe_f * c->n_shared);
    }
}

static void build_table(dpl_model *m)
{
    const dpl_model_config *c = &m->config;
    // Untied, the embedding is looked up by rows and never multiplied; tied, it is the head's matrix as well.
    const dpl_param rows = {
        .id = DPL_P_EMBED, .layer = -1, .n_groups = 1, .n = c->vocab, .k = c->d, .fan_in = 1};
    if (c->tied)
        add(m, -1, DPL_P_EMBED, 1, c->vocab, c->d);
    else
        append(m, rows, c->vocab * c->d);
    for (size_t layer = 0; layer < n_all_layers(c); layer++) {
        const int i = (int)layer;
        if (layer >= c->n_layers) {
            add_norm(m, i, DPL_P_MTP_ENORM, c->d);
            add_norm(m, i, DPL_P_MTP_HNORM, c->d);
            add(m, i, DPL_P_MTP_PROJ, 1, c->d, 2 * c->d);
        }
        add_attention(m, i);
        add_mlp(m, i);
        if (layer >= c->n_layers) add_norm(m, i, DPL_P_MTP_NORM, c->d);
    }
    add_norm(m, -1, DPL_P_FINAL_NORM, c->d);
    if (!c->tied) add(m, -1, DPL_P_HEAD, 1, c->vocab, c->d);
}

/* ---- names on disk ---- */

typedef struct disk_name {
    dpl_param_id id;
    const char *name; // after "model.layers.N."
} disk_name;

static const disk_name layer_names[] = {
    {DPL_P_MTP_ENORM, "enorm.weight"},
    {DPL_P_MTP_HNORM, "hnorm.weight"},
    {DPL_P_MTP_PROJ, "eh_proj.weight"},
    {DPL_P_MTP_NORM, "shared_head.norm.weight"},
    {DPL_P_ATTN_NORM, "input_layernorm.weight"},
    {DPL_P_Q, "self_attn.q_proj.weight"},
    {DPL_P_Q_A, "self_attn.q_a_proj.weight"},
    {DPL_P_Q_A_BIAS, "self_attn.q_a_proj.bias"},
    {DPL_P_Q_A_NORM, "self_attn.q_a_layernorm.weight"},
    {DPL_P_Q_B, "self_attn.q_b_proj.weight"},
    {DPL_P_KV_A, "self_attn.kv_a_proj_with_mqa.weight"},
    {DPL_P_KV_A_BIAS, "self_attn.kv_a_proj_with_mqa.bias"},
    {DPL_P_KV_A_NORM, "self_attn.kv_a_layernorm.weight"},
    {DPL_P_KV_B, "self_attn.kv_b_proj.weight"},
    {DPL_P_O, "self_attn.o_proj.weight"},
    {DPL_P_O_BIAS, "self_attn.o_proj.bias"},
    {DPL_P_MLP_NORM, "post_attention_layernorm.weight"},
    {DPL_P_GATE_UP, NULL}, // several tensors, worded by disk_suffix()
    {DPL_P_DOWN, "mlp.down_proj.weight"},
    {DPL_P_ROUTER, "mlp.gate.weight"},
    {DPL_P_EXPERT_GATE_UP, NULL},
    {DPL_P_EXPERT_DOWN, NULL},
    {DPL_P_SHARED_GATE_UP, NULL},
    {DPL_P_SHARED_DOWN, "mlp.shared_experts.down_proj.weight"},
};

static size_t logical_rows(const dpl_model_config *c, dpl_param_id id, const dpl_param *p)
{
    if (id == DPL_P_GATE_UP) return c->mlp_f;
    if (id == DPL_P_EXPERT_GATE_UP) return c->moe_f;
    if (id == DPL_P_SHARED_GATE_UP) return c->moe_f * c->n_shared;
    return p->n;
}

// Appends the slice (group, part) of `param`; `suffix` is the name after the layer's prefix.
static void add_disk(dpl_model *m, const dpl_param *param, size_t group, int part,
                     const char *prefix, const char *suffix)
{
    dpl_disk_tensor *t = &m->disk[m->n_disk++];
    const bool vector = !param->in_panels && param->id != DPL_P_EMBED;
    const size_t rows = logical_rows(&m->config, param->id, param);
    *t = (dpl_disk_tensor){.param = param, .group = group, .part = part, .rank = vector ? 1 : 2};
    t->shape[0] = (int64_t)(vector ? param->k : rows);
    t->shape[1] = (int64_t)(vector ? 1 : param->k);
    snprintf(t->name, sizeof t->name, "%s%s", prefix, suffix);
}

static void disk_suffix(const disk_name *entry, size_t group, int part, char *text, size_t size)
{
    const char *const projection = part == 0 ? "gate_proj" : "up_proj";
    if (entry->id == DPL_P_GATE_UP)
        snprintf(text, size, "mlp.%s.weight", projection);
    else if (entry->id == DPL_P_SHARED_GATE_UP)
        snprintf(text, size, "mlp.shared_experts.%s.weight", projection);
    else if (entry->id == DPL_P_EXPERT_GATE_UP)
        snprintf(text, size, "mlp.experts.%zu.%s.weight", group, projection);
    else if (entry->id == DPL_P_EXPERT_DOWN)
        snprintf(text, size, "mlp.experts.%zu.down_proj.weight", group);
    else
        snprintf(text, size, "%s", entry->name);
}

static void add_layer_disk(dpl_model *m, int layer)
{
    char prefix[48], suffix[64];
    snprintf(prefix, sizeof prefix, "model.layers.%d.", layer);
    if ((size_t)layer >=
        m->config.n_layers) { // public files repeat embedding and head under each MTP layer
        const dpl_param *head = dpl_model_param(m, -1, m->config.tied ? DPL_P_EMBED : DPL_P_HEAD);
        add_disk(m, dpl_model_param(m, -1, DPL_P_EMBED), 0, 0, prefix, "embed_tokens.weight");
        m->disk[m->n_disk - 1].copy_of_shared = true;
        add_disk(m, head, 0, 0, prefix, "shared_head.head.weight");
        m->disk[m->n_disk - 1].copy_of_shared = true;
    }
    for (size_t i = 0; i < DPL_COUNT(layer_names); i++) {
        const dpl_param *param = dpl_model_param(m, layer, layer_names[i].id);
        if (!param) continue;
        for (size_t group = 0; group < param->n_groups; group++) {
            for (int part = 0; part < (param->interleaved ? 2 : 1); part++) {
                disk_suffix(&layer_names[i], group, part, suffix, sizeof suffix);
                add_disk(m, param, group, part, prefix, suffix);
            }
        }
        if (param->id == DPL_P_ROUTER) {
            dpl_disk_tensor *t = &m->disk[m->n_disk++];
            *t = (dpl_disk_tensor){.rank = 1,
                                   .shape = {(int64_t)m->config.n_experts, 1},
                                   .bias = dpl_model_bias(m, (size_t)layer)};
            snprintf(t->name, sizeof t->name, "%smlp.gate.e_score_correction_bias", prefix);
        }
    }
}

static void build_disk_names(dpl_model *m)
{
    add_disk(m, dpl_model_param(m, -1, DPL_P_EMBED), 0, 0, "", "model.embed_tokens.weight");
    for (size_t layer = 0; layer < n_all_layers(&m->config); layer++)
        add_layer_disk(m, (int)layer);
    add_disk(m, dpl_model_param(m, -1, DPL_P_FINAL_NORM), 0, 0, "", "model.norm.weight");
    if (!m->config.tied)
        add_disk(m, dpl_model_param(m, -1, DPL_P_HEAD), 0, 0, "", "lm_head.weight");
}

void dpl_param_name(const dpl_model *model, const dpl_param *param, char *text, size_t size)
{
    for (size_t i = 0; i < model->n_disk; i++) {
        const dpl_disk_tensor *t = &model->disk[i];
        if (t->param != param || t->copy_of_shared) continue;
        const char *more = param->n_groups > 1  ? " and the other experts'"
                           : param->interleaved ? " and up_proj"
                                                : "";
        snprintf(text, size, "%s%s", t->name, more);
        return;
    }
    snprintf(text, size, "(unnamed)");
}

/* ---- memory ---- */

dpl_status dpl_params_build(dpl_model *m)
{
    const dpl_model_config *c = &m->config;
    const size_t layers = n_all_layers(c), moe_layers = c->n_experts ? layers : 0;
    m->by_id = dpl_alloc_array((layers + 1) * DPL_P_N, sizeof *m->by_id);
    m->params.list = dpl_alloc_array((layers + 1) * DPL_P_N, sizeof *m->params.list);
    m->router_bias = dpl_alloc_array(moe_layers * c->n_experts, sizeof *m->router_bias);
    m->counts = dpl_alloc_array(moe_layers * c->n_experts, sizeof *m->counts);
    m->disk = dpl_alloc_array(8 + layers * (DPL_P_N + 3 + 3 * c->n_experts), sizeof *m->disk);
    if (!m->by_id || !m->params.list || !m->router_bias || !m->counts || !m->disk)
        return dpl_fail(DPL_ENOMEM, "no memory for the tensor table of %zu layers", layers);
    build_table(m);
    build_disk_names(m);
    m->params.master = dpl_alloc_array(m->params.elems, sizeof(float));
    if (!m->params.master)
        return dpl_fail(DPL_ENOMEM, "no memory for %.3f GB of fp32 weights",
                        4e-9 * (double)m->params.elems);
    if (m->dtype == DPL_BF16) {
        m->params.copy = dpl_alloc_array(m->params.elems, sizeof(uint16_t));
        if (!m->params.copy)
            return dpl_fail(DPL_ENOMEM, "no memory for %.3f GB of bf16 weights",
                            2e-9 * (double)m->params.elems);
    }
    return DPL_OK;
}

void dpl_params_free(dpl_model *m)
{
    dpl_free(m->by_id);
    dpl_free(m->params.list);
    dpl_free(m->router_bias);
    dpl_free(m->counts);
    dpl_free(m->disk);
    dpl_free(m->params.master);
    dpl_free(m->params.grad);
    dpl_free(m->params.copy);
}

dpl_status dpl_model_begin_training(dpl_model *m)
{
    if (m->params.grad) return DPL_OK;
    m->params.grad = dpl_alloc_array(m->params.elems, sizeof(float));
    if (m->params.grad) return DPL_OK;
    return dpl_fail(DPL_ENOMEM, "no memory for %.3f GB of fp32 gradients",
                    4e-9 * (double)m->params.elems);
}

void dpl_model_zero_grads(dpl_model *m)
{
    dpl_zero(m->ctx, m->params.grad, m->params.elems * sizeof(float));
}

void dpl_model_refresh(dpl_model *m)
{
    if (m->params.copy) dpl_to_bf16(m->ctx, m->params.master, m->params.elems, m->params.copy);
}

dpl_weight dpl_model_weight(const dpl_model *m, const dpl_param *param)
{
    if (!param) return (dpl_weight){0};
    // The router always computes in fp32.
    const bool bf16 = m->params.copy && param->id != DPL_P_ROUTER;
    const void *p = bf16 ? (const void *)(m->params.copy + param->offset)
                         : m->params.master + param->offset;
    return (dpl_weight){p, bf16 ? DPL_BF16 : DPL_F32, param->n_groups, param->n, param->k};
}

/* ---- row-major slices ---- */

// Where row `r` of the slice begins, and the step from one column to the next.
static size_t slice_row(const dpl_disk_tensor *t, size_t r, size_t *step_out)
{
    const dpl_param *p = t->param;
    *step_out = p->in_panels ? DPL_PANEL : 1;
    if (!p->in_panels) return p->offset + r * p->k;
    const size_t n = p->interleaved ? dpl_gate_column(r) + 16 * (size_t)t->part : r;
    return p->offset + t->group * dpl_panel_elems(p->n, p->k) + dpl_panel_index(n, 0, p->k);
}

static size_t slice_rows(const dpl_disk_tensor *t)
{
    return t->rank == 2 ? (size_t)t->shape[0] : 1;
}

void dpl_disk_gather(const dpl_disk_tensor *t, const float *flat, float *values)
{
    const size_t k = t->param->k;
    for (size_t r = 0; r < slice_rows(t); r++) {
        size_t step;
        const float *src = flat + slice_row(t, r, &step);
        for (size_t i = 0; i < k; i++)
            values[r * k + i] = src[i * step];
    }
}

void dpl_disk_scatter(const dpl_disk_tensor *t, float *flat, const float *values)
{
    const size_t k = t->param->k;
    for (size_t r = 0; r < slice_rows(t); r++) {
        size_t step;
        float *dst = flat + slice_row(t, r, &step);
        for (size_t i = 0; i < k; i++)
            dst[i * step] = values[r * k + i];
    }
}

/* ---- initial values ---- */

// An element's value is a function of the seed, its tensor's name on disk and its place there: it depends neither on
// the number of threads nor on the order in memory.
typedef struct init_task {
    dpl_model *model;
    const dpl_disk_tensor *tensor;
    uint64_t seed, stream;
    double std;
    bool truncated;
} init_task;

static double draw(const init_task *task, uint64_t counter)
{
    if (!task->truncated) return dpl_rng_normal(task->seed, task->stream, counter);
    // Cut at two sigma; the divisor is the standard deviation of what is left.
    for (uint64_t again = 0;; again++) {
        const double z = dpl_rng_normal(task->seed, task->stream + again, counter);
        if (fabs(z) <= 2) return z / 0.87962566103423978;
    }
}

static void init_row(void *arg, size_t row, int i_thread)
{
    (void)i_thread;
    const init_task *task = arg;
    size_t step;
    float *dst = task->model->params.master + slice_row(task->tensor, row, &step);
    const size_t k = task->tensor->param->k;
    for (size_t i = 0; i < k; i++)
        dst[i * step] = (float)(task->std * draw(task, row * k + i));
}

static void init_rule(const dpl_model_config *c, const dpl_param *p, dpl_init_rule rule, double std,
                      init_task *task)
{
    const bool expert = p->id == DPL_P_EXPERT_GATE_UP || p->id == DPL_P_EXPERT_DOWN;
    const bool attention = p->id == DPL_P_Q || p->id == DPL_P_Q_A || p->id == DPL_P_Q_B ||
                           p->id == DPL_P_KV_A || p->id == DPL_P_KV_B || p->id == DPL_P_O;
    if (rule == DPL_INIT_NORMAL) {
        task->std = std;
        task->truncated = false;
        return;
    }
    double fan_in = p->fan_in;
    if (rule == DPL_INIT_MAXTEXT && p->id == DPL_P_EMBED)
        fan_in = 1; // even when it is the head too
    // MaxText takes the experts' axis into the fan, and the wrong one of the two others.
    if (rule == DPL_INIT_MAXTEXT && expert)
        fan_in = (double)c->n_experts * (double)(p->id == DPL_P_EXPERT_GATE_UP ? c->moe_f : c->d);
    task->std = 1 / sqrt(fan_in);
    task->truncated = p->id != DPL_P_EMBED && !attention;
}

void dpl_model_init(dpl_model *m, dpl_init_rule rule, double std, uint64_t seed)
{
    for (size_t i = 0; i < m->params.n; i++) {
        const dpl_param *p = &m->params.list[i];
        for (size_t j = 0; p->fan_in == 0 && j < p->k; j++)
            m->params.master[p->offset + j] = p->ones;
    }
    for (size_t i = 0; i < m->n_disk; i++) {
        const dpl_disk_tensor *t = &m->disk[i];
        if (!t->param || t->copy_of_shared || t->param->fan_in == 0) continue;
        init_task task = {.model = m,
                          .tensor = t,
                          .seed = seed,
                          .stream = dpl_hash64(t->name, strlen(t->name), 0)};
        init_rule(&m->config, t->param, rule, std, &task);
        dpl_pool_run(m->ctx->pool, slice_rows(t), init_row, &task);
    }
    if (m->config.n_experts)
        memset(m->router_bias, 0, n_all_layers(&m->config) * m->config.n_experts * sizeof(float));
    dpl_model_refresh(m);
}
