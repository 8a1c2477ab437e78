// params.c - the model's tensors: one table of shapes and names on disk, memory, initial values.
//
// Master, gradient, moments and bf16 copy are flat arrays of the same order; a parameter is an
// offset into each (of several fsdp ranks: shards.c). The Hugging Face layout (one row-major matrix
// a projection and expert) exists only on the way to and from files: a disk tensor is a slice of
// one parameter.
#include <math.h>
#include <stdio.h>

#include "model/model.h"

/* ---- the table ---- */
typedef struct spec {
    dpl_param_id id;
    dpl_param_kind kind;
    bool present;
    size_t n_groups, n, k;
    const char *name; // on disk, after "model.layers.N."; with a dot at its end: an MLP's folder
} spec;

static bool is_expert(dpl_param_id id) {
    return id == DPL_P_EXPERT_GATE_UP || id == DPL_P_EXPERT_DOWN;
}

// Appends the slice (group, part) of `param`; NULL: the router bias of the layer.
static void add_disk(dpl_model *m, const spec *r, int layer, const dpl_param *param, size_t group,
                     int part) {
    dpl_disk_tensor *t = &m->disk[m->n_disk++];
    const bool vector = r->kind >= DPL_NORM, folder = r->name[strlen(r->name) - 1] == '.';
    *t = (dpl_disk_tensor){.param = param, .group = group, .part = part, .rank = vector ? 1 : 2};
    t->owner = m->ranks.comm->rank;
    if (is_expert(r->id)) {
        const size_t *first = m->ranks.first;
        t->owner = 0;
        while (first[t->owner + 1] <= group) t->owner++;
        t->group = group - first[t->owner];
    }
    t->shape[0] = (int64_t)(vector ? r->k : r->n);
    t->shape[1] = (int64_t)(vector ? 1 : r->k);
    t->copy_of_shared = param && param->layer != layer;
    t->unit = (size_t)((param ? param->layer : layer) + 1);
    if (!param) t->bias = dpl_model_bias(m, (size_t)layer);
    char prefix[48] = "", expert[24] = "";
    if (layer >= 0) snprintf(prefix, sizeof prefix, "model.layers.%d.", layer);
    if (is_expert(r->id)) snprintf(expert, sizeof expert, "%zu.", group);
    const char *const leaf = !folder                  ? ""
                             : r->kind != DPL_GATE_UP ? "down_proj.weight"
                             : part == 0              ? "gate_proj.weight"
                                                      : "up_proj.weight";
    snprintf(t->name, sizeof t->name, "%s%s%s%s", prefix, r->name, expert, leaf);
}

static void add_param(dpl_model *m, int layer, const spec *r) {
    dpl_params *p = &m->params;
    dpl_param *param = &p->list[p->n++];
    const bool two = r->kind == DPL_GATE_UP;
    const size_t n = two ? dpl_gate_up_width(r->n) : r->n;
    const size_t n_groups = is_expert(r->id) ? dpl_ep_local_experts(&m->ranks) : r->n_groups;
    const size_t elems = n_groups * (r->kind <= DPL_GATE_UP ? dpl_panel_elems(n, r->k) : n * r->k);
    *param = (dpl_param){.id = r->id,
                         .kind = r->kind,
                         .layer = layer,
                         .n_groups = n_groups,
                         .n = n,
                         .k = r->k,
                         .offset = p->elems,
                         .elems = elems,
                         .disk = m->n_disk};
    p->elems += dpl_round_up(elems, 2 * DPL_PANEL); // two rows of a panel: dpl_to_bf16
    m->by_id[(size_t)(layer + 1) * DPL_P_N + r->id] = param;
    for (size_t group = 0; group < r->n_groups; group++)
        for (int part = 0; part < 1 + two; part++) add_disk(m, r, layer, param, group, part);
    const spec bias = {DPL_P_N, DPL_BIAS, true, 1, 1, r->n, "mlp.gate.e_score_correction_bias"};
    if (r->id == DPL_P_ROUTER) add_disk(m, &bias, layer, NULL, 0, 0);
}

// The parameters of a layer, or (-1) those outside of layers.
static size_t list_specs(const dpl_model_config *c, int layer, spec specs_out[DPL_P_N]) {
    const bool in = layer >= 0, out = !in, mtp = layer >= (int)c->n_layers;
    const bool moe = in && dpl_model_layer_is_moe(c, (size_t)layer), dense = in && !moe;
    const bool lora = in && c->q_lora > 0, bias = in && c->attention_bias;
    const bool shared = moe && c->n_shared > 0;
    const size_t d = c->d, e = c->n_experts, f = c->moe_f, shared_f = f * c->n_shared, v = c->vocab;
    const size_t qk = c->n_heads * (c->d_nope + c->d_rope), kv_a = c->kv_lora + c->d_rope;
    const size_t kv = c->n_heads * (c->d_nope + c->d_v), o = c->n_heads * c->d_v;
    // Untied, the embedding is looked up by rows and never multiplied; tied, it is the head's
    // matrix as well.
    const dpl_param_kind embed = c->tied ? DPL_MATRIX : DPL_ROWS;
    const spec rows[] = {
        {DPL_P_EMBED, embed, out, 1, v, d, "model.embed_tokens.weight"},
        {DPL_P_FINAL_NORM, DPL_NORM, out, 1, 1, d, "model.norm.weight"},
        {DPL_P_HEAD, DPL_MATRIX, out && !c->tied, 1, v, d, "lm_head.weight"},
        {DPL_P_MTP_ENORM, DPL_NORM, mtp, 1, 1, d, "enorm.weight"},
        {DPL_P_MTP_HNORM, DPL_NORM, mtp, 1, 1, d, "hnorm.weight"},
        {DPL_P_MTP_PROJ, DPL_MATRIX, mtp, 1, d, 2 * d, "eh_proj.weight"},
        {DPL_P_MTP_NORM, DPL_NORM, mtp, 1, 1, d, "shared_head.norm.weight"},
        {DPL_P_ATTN_NORM, DPL_NORM, in, 1, 1, d, "input_layernorm.weight"},
        {DPL_P_Q, DPL_MATRIX, in && !lora, 1, qk, d, "self_attn.q_proj.weight"},
        {DPL_P_Q_A, DPL_MATRIX, lora, 1, c->q_lora, d, "self_attn.q_a_proj.weight"},
        {DPL_P_Q_A_BIAS, DPL_BIAS, lora && bias, 1, 1, c->q_lora, "self_attn.q_a_proj.bias"},
        {DPL_P_Q_A_NORM, DPL_NORM, lora, 1, 1, c->q_lora, "self_attn.q_a_layernorm.weight"},
        {DPL_P_Q_B, DPL_MATRIX, lora, 1, qk, c->q_lora, "self_attn.q_b_proj.weight"},
        {DPL_P_KV_A, DPL_MATRIX, in, 1, kv_a, d, "self_attn.kv_a_proj_with_mqa.weight"},
        {DPL_P_KV_A_BIAS, DPL_BIAS, bias, 1, 1, kv_a, "self_attn.kv_a_proj_with_mqa.bias"},
        {DPL_P_KV_A_NORM, DPL_NORM, in, 1, 1, c->kv_lora, "self_attn.kv_a_layernorm.weight"},
        {DPL_P_KV_B, DPL_MATRIX, in, 1, kv, c->kv_lora, "self_attn.kv_b_proj.weight"},
        {DPL_P_O, DPL_MATRIX, in, 1, d, o, "self_attn.o_proj.weight"},
        {DPL_P_O_BIAS, DPL_BIAS, bias, 1, 1, d, "self_attn.o_proj.bias"},
        {DPL_P_MLP_NORM, DPL_NORM, in, 1, 1, d, "post_attention_layernorm.weight"},
        {DPL_P_GATE_UP, DPL_GATE_UP, dense, 1, c->mlp_f, d, "mlp."},
        {DPL_P_DOWN, DPL_MATRIX, dense, 1, d, c->mlp_f, "mlp."},
        {DPL_P_ROUTER, DPL_MATRIX, moe, 1, e, d, "mlp.gate.weight"},
        {DPL_P_EXPERT_GATE_UP, DPL_GATE_UP, moe, e, f, d, "mlp.experts."},
        {DPL_P_EXPERT_DOWN, DPL_MATRIX, moe, e, d, f, "mlp.experts."},
        {DPL_P_SHARED_GATE_UP, DPL_GATE_UP, shared, 1, shared_f, d, "mlp.shared_experts."},
        {DPL_P_SHARED_DOWN, DPL_MATRIX, shared, 1, d, shared_f, "mlp.shared_experts."}};
    size_t n = 0;
    for (size_t i = 0; i < DPL_COUNT(rows); i++)
        if (rows[i].present) specs_out[n++] = rows[i];
    return n;
}

double dpl_params_count(const dpl_model_config *c, bool mtp, size_t n_experts, bool multiplied) {
    double total = 0;
    for (int layer = -1; layer < (int)(c->n_layers + (mtp ? c->n_mtp : 0)); layer++) {
        spec rows[DPL_P_N];
        const spec *end = rows + list_specs(c, layer, rows);
        for (const spec *r = rows; r < end; r++) {
            if (multiplied && (r->kind > DPL_GATE_UP || r->id == DPL_P_MTP_PROJ)) continue;
            const double groups = (double)(is_expert(r->id) ? n_experts : 1);
            total += groups * (double)r->n * (double)r->k * (r->kind == DPL_GATE_UP ? 2 : 1);
        }
    }
    return total;
}

static int span_of(const spec *r) {
    if (is_expert(r->id)) return DPL_SPAN_EXPERTS;
    const bool wide = r->kind > DPL_GATE_UP || r->id == DPL_P_ROUTER || r->id == DPL_P_EMBED;
    return wide ? DPL_SPAN_WIDE : DPL_SPAN_DENSE;
}

// The parameters of a unit, span by span: each is cut into pieces of whole pairs of panel rows.
static void add_unit(dpl_model *m, int layer) {
    dpl_params *p = &m->params;
    dpl_unit *unit = &p->units[p->n_units++];
    spec rows[DPL_P_N];
    const size_t n = list_specs(&m->config, layer, rows);
    unit->first = p->elems;
    for (int i = 0; i < DPL_SPAN_N; i++) {
        dpl_span_of *span = &unit->span[i];
        span->first = p->elems;
        span->replicas = i == DPL_SPAN_EXPERTS ? m->others.replicas : m->others.dense;
        for (size_t j = 0; j < n; j++)
            if (span_of(&rows[j]) == i) add_param(m, layer, &rows[j]);
        const size_t R = (size_t)span->replicas->n_ranks;
        span->elems = dpl_round_up(p->elems - span->first, 2 * DPL_PANEL * dpl_model_shards(m) * R);
        p->elems = span->first + span->elems;
    }
    unit->elems = p->elems - unit->first;
}

static void build_table(dpl_model *m) {
    const dpl_model_config *c = &m->config;
    // Public files repeat embedding and head under each MTP layer.
    const spec copies[] = {{DPL_P_EMBED, DPL_ROWS, true, 1, c->vocab, c->d, "embed_tokens.weight"},
                           {c->tied ? DPL_P_EMBED : DPL_P_HEAD, DPL_ROWS, true, 1, c->vocab, c->d,
                            "shared_head.head.weight"}};
    for (int layer = -1; layer < (int)(c->n_layers + c->n_mtp); layer++) {
        add_unit(m, layer);
        for (size_t i = 0; i < DPL_COUNT(copies) && layer >= (int)c->n_layers; i++)
            add_disk(m, &copies[i], layer, dpl_model_param(m, -1, copies[i].id), 0, 0);
    }
    m->params.own_elems = m->params.elems / dpl_model_shards(m);
}

/* ---- memory ---- */
// NULL: the error is worded.
static void *alloc_flat(const dpl_model *m, size_t bytes, const char *what) {
    void *array = dpl_alloc_array(m->params.own_elems, bytes);
    const double gigabytes = 1e-9 * (double)m->params.own_elems * (double)bytes;
    if (!array) dpl_fail(DPL_ENOMEM, "no memory for %.3f GB of %s", gigabytes, what);
    return array;
}

static dpl_status build(dpl_model *m) {
    const dpl_model_config *c = &m->config;
    const size_t layers = c->n_layers + c->n_mtp, moe_layers = c->n_experts ? layers : 0;
    m->by_id = dpl_alloc_array((layers + 1) * DPL_P_N, sizeof *m->by_id);
    m->params.list = dpl_alloc_array((layers + 1) * DPL_P_N, sizeof *m->params.list);
    m->params.units = dpl_alloc_array(layers + 1, sizeof *m->params.units);
    m->router_bias = dpl_alloc_array(moe_layers * c->n_experts, sizeof *m->router_bias);
    m->counts = dpl_alloc_array(moe_layers * c->n_experts, sizeof *m->counts);
    m->disk = dpl_alloc_array(8 + layers * (DPL_P_N + 3 + 3 * c->n_experts), sizeof *m->disk);
    if (!m->by_id || !m->params.list || !m->params.units || !m->router_bias || !m->counts ||
        !m->disk)
        return dpl_fail(DPL_ENOMEM, "no memory for the tensor table of %zu layers", layers);
    build_table(m);
    const bool copy = m->dtype == DPL_BF16;
    m->params.master = alloc_flat(m, sizeof(float), "fp32 weights");
    if (copy) m->params.copy = alloc_flat(m, sizeof(uint16_t), "bf16 weights");
    return m->params.master && (m->params.copy || !copy) ? dpl_shards_open(m) : DPL_ENOMEM;
}

dpl_status dpl_model_begin_training(dpl_model *m) {
    if (!m->params.grad) m->params.grad = alloc_flat(m, sizeof(float), "fp32 gradients");
    if (!m->params.grad) return DPL_ENOMEM;
    for (size_t u = 0; u < m->params.n_units && dpl_model_shards(m) == 1; u++)
        m->params.units[u].grad = m->params.grad + m->params.units[u].first;
    return DPL_OK;
}

dpl_status dpl_model_create(dpl_ctx *ctx, const dpl_model_config *config, dpl_dtype dtype,
                            dpl_model **model_out) {
    static const dpl_model_ranks none = {.n_data = 1};
    return dpl_model_create_spread(ctx, &none, config, dtype, model_out);
}

// Alone where there are no others.
static dpl_status open_ranks(dpl_model *m, const dpl_model_ranks *ranks) {
    m->others = *ranks;
    dpl_comm **const all[] = {&m->others.experts, &m->others.fsdp, &m->others.dense,
                              &m->others.replicas};
    DPL_TRY(dpl_comm_open_self(&m->alone));
    for (size_t i = 0; i < DPL_COUNT(all); i++)
        if (!*all[i]) *all[i] = m->alone;
    return dpl_ep_ranks_open(m->ctx, m->others.experts, m->config.n_experts, NULL, ranks->island, 0,
                             DPL_OK, &m->ranks);
}

dpl_status dpl_model_create_spread(dpl_ctx *ctx, const dpl_model_ranks *ranks,
                                   const dpl_model_config *config, dpl_dtype dtype,
                                   dpl_model **model_out) {
    DPL_TRY(dpl_model_config_check(config));
    dpl_model *m = dpl_alloc(sizeof *m);
    if (!m) return dpl_fail(DPL_ENOMEM, "no memory for a model");
    m->ctx = ctx;
    m->config = *config;
    m->dtype = dtype;
    // clang-format off
    const dpl_route_rule rule = {
        .n_experts = config->n_experts, .top_k = config->top_k, .n_groups = config->n_groups,
        .top_groups = config->top_groups, .sigmoid = config->sigmoid, .group_top2 = true,
        .norm_topk = config->norm_topk, .scale = (float)config->routed_scale};
    // clang-format on
    const size_t shared_f = config->moe_f * config->n_shared;
    m->moe = (dpl_moe_shape){config->d, config->moe_f, shared_f, rule, dtype, false};
    dpl_status status = open_ranks(m, ranks);
    if (status == DPL_OK) status = build(m);
    if (status == DPL_OK) *model_out = m;
    else dpl_model_close(&m);
    return status;
}

void dpl_model_close(dpl_model **model) {
    if (!model || !*model) return;
    dpl_model *m = *model;
    dpl_ctx_wait(m->ctx);
    dpl_shards_close(m);
    dpl_model_unquantize(m);
    dpl_ep_ranks_close(&m->ranks);
    dpl_comm_close(&m->alone);
    void *blocks[] = {m->by_id, m->params.list,   m->params.units, m->router_bias, m->counts,
                      m->disk,  m->params.master, m->params.grad,  m->params.copy, m->cos,
                      m};
    for (size_t i = 0; i < DPL_COUNT(blocks); i++) dpl_free(blocks[i]);
    *model = NULL;
}

static void settle_grad(const dpl_model *m, dpl_param *param) {
    if (param->stale) dpl_zero(m->ctx, dpl_model_grad(m, param), param->elems * sizeof(float));
    param->stale = false;
}

// Matrices get their gradient from products, which can as well replace it: to zero it first would
// take as long as the norm of all gradients. To the others single elements are added.
void dpl_model_renew_grads(dpl_model *m, size_t unit) {
    for (dpl_param *p = m->params.list; p < m->params.list + m->params.n; p++) {
        if (p->layer + 1 != (int)unit) continue;
        p->stale = true;
        // Products leave the padding of an odd k alone, which in a slot is another layer's.
        const bool padded = dpl_model_shards(m) > 1 && p->k % 2 == 1;
        if (p->kind > DPL_GATE_UP || p->id == DPL_P_EMBED || padded) settle_grad(m, p);
    }
}

void dpl_model_settle_grads(dpl_model *m, size_t unit) {
    for (dpl_param *p = m->params.list; p < m->params.list + m->params.n; p++)
        if (p->layer + 1 == (int)unit) settle_grad(m, p);
}

// This rank's pieces of what products use in bf16.
static void refresh_copy(const dpl_model *m) {
    const size_t F = dpl_model_shards(m);
    for (const dpl_unit *u = m->params.units; u < m->params.units + m->params.n_units; u++)
        for (const dpl_span_of *span = u->span; span < u->span + DPL_SPAN_N; span++) {
            const size_t own = span->first / F;
            if (!span->quantized)
                dpl_to_bf16(m->ctx, m->params.master + own, span->elems / F, m->params.copy + own);
        }
}

void dpl_model_refresh(dpl_model *m) {
    if (m->params.copy) refresh_copy(m);
    for (size_t i = 0; m->quant_elems && i < m->params.n; i++)
        dpl_model_requantize(m, &m->params.list[i]);
    dpl_model_changed(m);
}

dpl_weight dpl_model_weight(const dpl_model *m, const dpl_param *param) {
    if (!param) return (dpl_weight){0};
    // The router always computes in fp32.
    const dpl_dtype dtype = param->id == DPL_P_ROUTER ? DPL_F32 : m->dtype;
    const dpl_unit *unit = dpl_model_unit(m, param);
    const void *p = unit->values + (param->offset - unit->first);
    if (dtype == DPL_BF16) p = unit->copy + (param->offset - unit->first);
    float *grad = dpl_model_grad(m, param);
    bool *stale = &m->params.list[param - m->params.list].stale;
    const dpl_quant_weight *quant = param->quantized ? &param->quant : NULL;
    return (dpl_weight){p, dtype, param->n_groups, param->n, param->k, grad, stale, quant};
}

/* ---- row-major slices ---- */
// Where row `r` of the slice begins, and the step from one column to the next.
static size_t slice_row(const dpl_disk_tensor *t, size_t r, size_t *step_out) {
    const dpl_param *p = t->param;
    const bool panels = p->kind <= DPL_GATE_UP;
    *step_out = panels ? DPL_PANEL : 1;
    if (!panels) return p->offset + r * p->k;
    const size_t n = p->kind == DPL_GATE_UP ? dpl_gate_column(r) + 16 * (size_t)t->part : r;
    return p->offset + t->group * dpl_panel_elems(p->n, p->k) + dpl_panel_index(n, 0, p->k);
}

static size_t slice_rows(const dpl_disk_tensor *t) {
    return dpl_disk_elems(t) / t->param->k;
}

void dpl_disk_gather_from(const dpl_disk_tensor *t, const float *part, size_t first,
                          float *values) {
    size_t step;
    for (size_t r = 0; r < slice_rows(t); r++) {
        const float *src = part + (slice_row(t, r, &step) - first);
        for (size_t i = 0; i < t->param->k; i++) *values++ = src[i * step];
    }
}

void dpl_disk_scatter_to(const dpl_disk_tensor *t, float *part, size_t first, const float *values) {
    size_t step;
    for (size_t r = 0; r < slice_rows(t); r++) {
        float *dst = part + (slice_row(t, r, &step) - first);
        for (size_t i = 0; i < t->param->k; i++) dst[i * step] = *values++;
    }
}

bool dpl_disk_is_finite(const dpl_model *m, const dpl_disk_tensor *t, const float *flat) {
    size_t step, own;
    const size_t n = dpl_param_own(m, t->param, &own), F = dpl_model_shards(m);
    const dpl_unit *unit = dpl_model_unit(m, t->param);
    const dpl_span_of *span = unit->span;
    while (t->param->offset >= span->first + span->elems) span++;
    // Where in the layout the element is that stands at `own`.
    const size_t low = own - span->first / F + span->first +
                       (size_t)m->others.fsdp->rank * (span->elems / F);
    for (size_t r = 0; r < slice_rows(t); r++)
        for (size_t i = 0, at = slice_row(t, r, &step); i < t->param->k; i++, at += step)
            if (at - low < n && !isfinite(flat[at - low + own])) return false;
    return true;
}

/* ---- initial values ---- */
// An element's value is a function of the seed, its tensor's name on disk and its place there: it
// depends neither on the number of threads nor on the order in memory.
typedef struct init_task {
    float *whole; // of the tensor's unit
    size_t first;
    const dpl_disk_tensor *tensor;
    uint64_t seed, stream;
    double std;
    bool truncated;
} init_task;

static double draw(const init_task *task, uint64_t counter) {
    const dpl_param_kind kind = task->tensor->param->kind;
    if (kind >= DPL_NORM) return kind == DPL_NORM;
    if (!task->truncated) return task->std * dpl_rng_normal(task->seed, task->stream, counter);
    // Cut at two sigma; the divisor is the standard deviation of what is left.
    for (uint64_t again = 0;; again++) {
        const double z = dpl_rng_normal(task->seed, task->stream + again, counter);
        if (fabs(z) <= 2) return task->std * (z / 0.87962566103423978);
    }
}

static void init_row(void *arg, size_t row, int i_thread) {
    (void)i_thread;
    const init_task *task = arg;
    size_t step;
    float *dst = task->whole + (slice_row(task->tensor, row, &step) - task->first);
    const size_t k = task->tensor->param->k;
    for (size_t i = 0; i < k; i++) dst[i * step] = (float)draw(task, row * k + i);
}

static double fan_in(const dpl_model_config *c, const dpl_param *p, bool maxtext) {
    // MaxText: 1 for the embedding even when it is the head too; the experts' axis goes into the
    // fan, and the wrong one of the two others.
    if (p->kind == DPL_ROWS || (maxtext && p->id == DPL_P_EMBED)) return 1;
    if (!maxtext || !is_expert(p->id)) return (double)p->k;
    return (double)c->n_experts * (double)(p->id == DPL_P_EXPERT_DOWN ? c->d : c->moe_f);
}

static void init_unit(dpl_model *m, size_t unit, bool maxtext, double std, uint64_t seed,
                      float *whole) {
    for (size_t i = 0; i < m->n_disk; i++) {
        const dpl_disk_tensor *t = &m->disk[i];
        if (t->unit != unit || t->bias || t->copy_of_shared || !dpl_disk_is_here(m, t)) continue;
        const dpl_param_id id = t->param->id;
        const bool attention = id >= DPL_P_Q && id <= DPL_P_O;
        const double size = std > 0 ? std : 1 / sqrt(fan_in(&m->config, t->param, maxtext));
        init_task task = {whole,
                          m->params.units[unit].first,
                          t,
                          seed,
                          dpl_hash64(t->name, strlen(t->name), 0),
                          size,
                          std == 0 && id != DPL_P_EMBED && !attention};
        dpl_pool_run(m->ctx->pool, slice_rows(t), init_row, &task);
    }
}

dpl_status dpl_model_init(dpl_model *m, bool maxtext, double std, uint64_t seed) {
    const size_t n = dpl_unit_room_elems(m);
    float *room = dpl_alloc_array(n, sizeof *room); // zeros, which the padding stays
    DPL_EXPECT(room, DPL_ENOMEM, "no memory for the initial values of a layer");
    for (size_t i = 0; i < m->n_disk; i++)
        if (m->disk[i].bias) memset(m->disk[i].bias, 0, m->config.n_experts * sizeof(float));
    for (size_t u = 0; u < m->params.n_units; u++) {
        memset(room, 0, n * sizeof *room);
        float *whole = dpl_unit_room(m, u, m->params.master, room);
        init_unit(m, u, maxtext, std, seed, whole);
        dpl_unit_put(m, u, whole, m->params.master);
    }
    dpl_free(room);
    dpl_model_refresh(m);
    return DPL_OK;
}
