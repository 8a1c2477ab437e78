// lab.c - see lab.h.
#include "lab.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static void *get(size_t count, size_t size) {
    void *p = dpl_alloc_array(count, size);
    if (!p) {
        fprintf(stderr, "lab: out of memory\n");
        abort();
    }
    return p;
}

dpl_route_rule lab_sigmoid(size_t n_experts, size_t top_k) {
    return (dpl_route_rule){.n_experts = n_experts,
                            .top_k = top_k,
                            .n_groups = 1,
                            .top_groups = 1,
                            .sigmoid = true,
                            .group_top2 = true,
                            .norm_topk = true,
                            .scale = 2.5f};
}

static float rounded(const lab *l, double value) {
    const float f = (float)value;
    return l->rule.dtype == DPL_BF16 ? dpl_bf16_to_f32(dpl_f32_to_bf16(f)) : f;
}

static dpl_weight make_weight(const lab *l, size_t groups, size_t n, size_t k, bool router) {
    const dpl_dtype dtype = router ? DPL_F32 : l->rule.dtype;
    const size_t elems = groups * dpl_panel_elems(n, k);
    return (dpl_weight){get(elems, dpl_dtype_bytes(dtype)), dtype, groups, n, k,
                        get(elems, sizeof(float)),          NULL,  NULL};
}

// The packed tensor that holds a row-major one, and the place of element i in it.
static size_t locate(const lab *l, lab_id id, size_t i, const dpl_weight **w_out) {
    const dpl_moe_weights *w = &l->weights;
    const size_t d = l->rule.d, f = id >= LAB_SGATE ? l->rule.shared_f : l->rule.f;
    const bool down = id == LAB_DOWN || id == LAB_SDOWN;
    const size_t k = down ? f : d, n = id == LAB_ROUTER ? l->rule.rule.n_experts : down ? d : f;
    const size_t group = i / (n * k), row = i % (n * k) / k, column = i % k;
    size_t place = row;
    if (id == LAB_GATE || id == LAB_SGATE) place = dpl_gate_column(row);
    if (id == LAB_UP || id == LAB_SUP) place = dpl_gate_column(row) + 16;
    const dpl_weight *packed[] = {&w->router,         &w->gate_up,        &w->gate_up,    &w->down,
                                  &w->shared_gate_up, &w->shared_gate_up, &w->shared_down};
    *w_out = packed[id];
    return group * dpl_panel_elems(packed[id]->n, k) + dpl_panel_index(place, column, k);
}

void lab_pack(lab *l) {
    for (int id = 0; id < LAB_N; id++)
        for (size_t i = 0; i < l->n[id]; i++) {
            const dpl_weight *w;
            const size_t at = locate(l, (lab_id)id, i, &w);
            if (w->dtype == DPL_F32) ((float *)(uintptr_t)w->p)[at] = l->value[id][i];
            else
                ((uint16_t *)(uintptr_t)w->p)[dpl_pair_index(at)] = dpl_f32_to_bf16(
                    l->value[id][i]);
        }
}

void lab_inputs(lab *l) {
    const size_t n = l->rule.t * l->rule.d;
    for (size_t i = 0; i < n; i++)
        if (l->rule.dtype == DPL_F32) {
            ((float *)l->x_in)[i] = l->x[i];
            ((float *)l->dy_in)[i] = l->dy[i];
        } else {
            ((uint16_t *)l->x_in)[i] = dpl_f32_to_bf16(l->x[i]);
            ((uint16_t *)l->dy_in)[i] = dpl_f32_to_bf16(l->dy[i]);
        }
}

static void fill_random(lab *l) {
    const size_t d = l->rule.d, n_x = l->rule.t * d;
    uint64_t stream = 0;
    for (int id = 0; id < LAB_N; id++) {
        const bool down = id == LAB_DOWN || id == LAB_SDOWN;
        const size_t k = down ? (id == LAB_DOWN ? l->rule.f : l->rule.shared_f) : d;
        const double std = (id == LAB_ROUTER ? 2.0 : 1.5) / sqrt((double)DPL_MAX(k, (size_t)1));
        for (size_t i = 0; i < l->n[id]; i++) {
            const double value = std * dpl_rng_normal(l->rule.seed, stream, i);
            l->value[id][i] = id == LAB_ROUTER ? (float)value : rounded(l, value);
        }
        stream++;
    }
    for (size_t i = 0; i < n_x; i++) {
        l->x[i] = rounded(l, dpl_rng_normal(l->rule.seed, stream, i));
        l->dy[i] = rounded(l, dpl_rng_normal(l->rule.seed, stream + 1, i));
    }
    for (size_t e = 0; l->bias && e < l->rule.rule.n_experts; e++)
        l->bias[e] = (float)(0.1 * dpl_rng_normal(l->rule.seed, stream + 2, e));
}

void lab_open(const lab_rule *rule, lab *l) {
    const size_t n_e = rule->rule.n_experts, d = rule->d, f = rule->f, sf = rule->shared_f;
    const size_t n_x = rule->t * d, element = dpl_dtype_bytes(rule->dtype);
    *l = (lab){.rule = *rule};
    l->shape = (dpl_moe_shape){d, f, sf, rule->rule, rule->dtype, rule->mx_wire};
    if (dpl_ep_ranks_open(NULL, NULL, n_e, NULL, 0, 0, DPL_OK, &l->ranks) != DPL_OK) abort();
    const size_t n[LAB_N] = {n_e * d, n_e * f * d, n_e * f * d, n_e * d * f,
                             sf * d,  sf * d,      d * sf};
    for (int id = 0; id < LAB_N; id++) {
        l->n[id] = n[id];
        l->value[id] = get(n[id], sizeof(float));
        l->expected[id] = get(n[id], sizeof(double));
    }
    l->weights.router = make_weight(l, 1, n_e, d, true);
    l->weights.gate_up = make_weight(l, n_e, dpl_gate_up_width(f), d, false);
    l->weights.down = make_weight(l, n_e, d, f, false);
    l->weights.shared_gate_up = make_weight(l, 1, dpl_gate_up_width(sf), d, false);
    l->weights.shared_down = make_weight(l, 1, d, sf, false);
    const dpl_weight *w[] = {&l->weights.router, &l->weights.gate_up, &l->weights.down,
                             &l->weights.shared_gate_up, &l->weights.shared_down};
    for (int i = 0; i < 5; i++)
        l->grad_elems[i] = w[i]->n_groups * dpl_panel_elems(w[i]->n, w[i]->k);
    if (rule->bias) l->weights.bias = l->bias = get(n_e, sizeof(float));
    l->x = get(n_x, sizeof(float));
    l->dy = get(n_x, sizeof(float));
    l->x_in = get(n_x, element);
    l->dy_in = get(n_x, element);
    l->y = get(n_x, element);
    l->dx = get(n_x, sizeof(float));
    l->y_expected = get(n_x, sizeof(double));
    l->dx_expected = get(n_x, sizeof(double));
    fill_random(l);
    lab_pack(l);
    lab_inputs(l);
}

void lab_close(lab *l) {
    if (l->routing.logits) oracle_routing_close(&l->routing);
    dpl_ep_ranks_close(&l->ranks);
    for (int id = 0; id < LAB_N; id++) {
        dpl_free(l->value[id]);
        dpl_free(l->expected[id]);
    }
    void *blocks[] = {(void *)(uintptr_t)l->weights.router.p,
                      (void *)(uintptr_t)l->weights.gate_up.p,
                      (void *)(uintptr_t)l->weights.down.p,
                      (void *)(uintptr_t)l->weights.shared_gate_up.p,
                      (void *)(uintptr_t)l->weights.shared_down.p,
                      l->weights.router.grad,
                      l->weights.gate_up.grad,
                      l->weights.down.grad,
                      l->weights.shared_gate_up.grad,
                      l->weights.shared_down.grad,
                      l->bias,
                      l->x,
                      l->dy,
                      l->x_in,
                      l->dy_in,
                      l->y,
                      l->dx,
                      l->y_expected,
                      l->dx_expected,
                      l->segment};
    for (size_t i = 0; i < DPL_COUNT(blocks); i++) dpl_free(blocks[i]);
    *l = (lab){0};
}

void lab_zero_grads(lab *l) {
    float *grads[] = {l->weights.router.grad, l->weights.gate_up.grad, l->weights.down.grad,
                      l->weights.shared_gate_up.grad, l->weights.shared_down.grad};
    for (int i = 0; i < 5; i++)
        if (grads[i]) memset(grads[i], 0, l->grad_elems[i] * sizeof(float));
}

dpl_status lab_forward(lab *l, dpl_ctx *ctx) {
    const size_t d = l->rule.d;
    const dpl_mat x = {l->x_in, d, l->rule.dtype}, y = {l->y, d, l->rule.dtype};
    memset(l->y, 0xff, l->rule.t * d * dpl_dtype_bytes(l->rule.dtype));
    const dpl_status status = dpl_moe_forward_in(ctx, &l->ranks, &l->shape, &l->weights, x,
                                                 l->rule.t, l->segment, l->aux, NULL, &l->saved, y);
    dpl_ctx_wait(ctx);
    return status;
}

void lab_backward(lab *l, dpl_ctx *ctx) {
    const size_t d = l->rule.d;
    const dpl_mat x = {l->x_in, d, l->rule.dtype}, dy = {l->dy_in, d, l->rule.dtype};
    memset(l->dx, 0xff, l->rule.t * d * sizeof(float));
    if (dpl_moe_backward(ctx, &l->shape, &l->weights, x, l->aux, &l->saved, dy,
                         dpl_mat_f32(l->dx, d)) != DPL_OK)
        abort();
    dpl_ctx_wait(ctx);
}

dpl_status lab_run(lab *l, dpl_ctx *ctx) {
    DPL_TRY(lab_forward(l, ctx));
    lab_backward(l, ctx);
    return DPL_OK;
}

static double *widen(const float *x, size_t n) {
    double *y = get(n, sizeof(double));
    for (size_t i = 0; i < n; i++) y[i] = x[i];
    return y;
}

void lab_oracle(lab *l, bool own_choice) {
    const size_t n_e = l->rule.rule.n_experts, d = l->rule.d, f = l->rule.f, n_x = l->rule.t * d;
    const int n_tokens = (int)l->rule.t;
    double *value[LAB_N], *x = widen(l->x, n_x), *dy = widen(l->dy, n_x);
    double *bias = l->bias ? widen(l->bias, n_e) : NULL;
    oracle_mlp *experts = get(n_e, sizeof *experts);
    for (int id = 0; id < LAB_N; id++) {
        value[id] = widen(l->value[id], l->n[id]);
        memset(l->expected[id], 0, l->n[id] * sizeof(double));
    }
    for (size_t e = 0; e < n_e; e++) {
        const size_t at = e * d * f;
        experts[e] = (oracle_mlp){(int)f,
                                  value[LAB_GATE] + at,
                                  value[LAB_UP] + at,
                                  value[LAB_DOWN] + at,
                                  l->expected[LAB_GATE] + at,
                                  l->expected[LAB_UP] + at,
                                  l->expected[LAB_DOWN] + at};
    }
    const dpl_route_rule *r = &l->rule.rule;
    const oracle_moe moe = {
        .router = {(int)n_e, (int)r->top_k, (int)r->n_groups, (int)r->top_groups,
                   r->group_top2 ? 2 : 1, !r->sigmoid, r->norm_topk, r->scale},
        .D = (int)d,
        .w_router = value[LAB_ROUTER],
        .bias = bias,
        .dw_router = l->expected[LAB_ROUTER],
        .experts = experts,
        .shared = {(int)l->rule.shared_f, value[LAB_SGATE], value[LAB_SUP], value[LAB_SDOWN],
                   l->expected[LAB_SGATE], l->expected[LAB_SUP], l->expected[LAB_SDOWN]}};
    if (l->routing.logits) oracle_routing_close(&l->routing);
    oracle_routing_open(&l->routing, &moe.router, n_tokens);
    memset(l->dx_expected, 0, n_x * sizeof(double));
    memset(l->y_expected, 0, n_x * sizeof(double));
    oracle_moe_layer_forward(&moe, n_tokens, x, l->segment, own_choice ? NULL : l->saved.ids,
                             &l->routing, l->y_expected);
    if (l->aux) { // one MoE layer; its losses enter through the gradients of score and logits
        const oracle_config cfg = {.router = moe.router,
                                   .balance_weight = l->aux->balance_weight,
                                   .balance_batch = l->aux->kind == DPL_BALANCE_BATCH,
                                   .balance_megatron = l->aux->kind == DPL_BALANCE_MEGATRON,
                                   .router_z_weight = l->aux->z_weight};
        const int b = (int)l->aux->n_batch, s = (int)l->aux->n_seq;
        l->aux_expected[0] = oracle_balance_loss(&cfg, 1, b, s, l->segment, &l->routing);
        l->aux_expected[1] = oracle_router_z_loss(&cfg, 1, n_tokens, l->segment, &l->routing);
    }
    oracle_moe_layer_backward(&moe, n_tokens, x, &l->routing, dy, l->dx_expected);
    for (int id = 0; id < LAB_N; id++) dpl_free(value[id]);
    dpl_free(experts);
    dpl_free(bias);
    dpl_free(x);
    dpl_free(dy);
}

float lab_y(const lab *l, size_t i) {
    return l->rule.dtype == DPL_F32 ? ((const float *)l->y)[i]
                                    : dpl_bf16_to_f32(((const uint16_t *)l->y)[i]);
}

float lab_grad(const lab *l, lab_id id, size_t i) {
    const dpl_weight *w;
    const size_t at = locate(l, id, i, &w);
    return w->grad[at];
}

uint64_t lab_hash(const lab *l) {
    const size_t n_x = l->rule.t * l->rule.d, n_slots = l->rule.t * l->rule.rule.top_k;
    uint64_t h = dpl_hash64(l->y, n_x * dpl_dtype_bytes(l->rule.dtype), 1);
    h = dpl_hash64(l->dx, n_x * sizeof(float), h);
    h = dpl_hash64(l->saved.ids, n_slots * sizeof(int32_t), h);
    h = dpl_hash64(l->saved.weights, n_slots * sizeof(float), h);
    h = dpl_hash64(l->saved.aux, sizeof l->saved.aux, h);
    float *grads[] = {l->weights.router.grad, l->weights.gate_up.grad, l->weights.down.grad,
                      l->weights.shared_gate_up.grad, l->weights.shared_down.grad};
    for (int i = 0; i < 5; i++) h = dpl_hash64(grads[i], l->grad_elems[i] * sizeof(float), h);
    return h;
}

typedef struct error_sum {
    double difference, expected;
} error_sum;

static void add_error(error_sum *s, double is, double expected) {
    s->difference += (is - expected) * (is - expected);
    s->expected += expected * expected;
}

static double relative(error_sum s) {
    if (s.difference == 0) return 0;
    return sqrt(s.difference / s.expected);
}

double lab_error(const lab *l, lab_id id) {
    error_sum s = {0};
    for (size_t i = 0; i < l->n[id]; i++) add_error(&s, lab_grad(l, id, i), l->expected[id][i]);
    return relative(s);
}

double lab_error_y(const lab *l) {
    error_sum s = {0};
    for (size_t i = 0; i < l->rule.t * l->rule.d; i++) add_error(&s, lab_y(l, i), l->y_expected[i]);
    return relative(s);
}

double lab_error_dx(const lab *l) {
    error_sum s = {0};
    for (size_t i = 0; i < l->rule.t * l->rule.d; i++) add_error(&s, l->dx[i], l->dx_expected[i]);
    return relative(s);
}

dpl_ctx *lab_ctx(int n_threads, bool deferred, const char *level) {
    dpl_ctx *ctx = NULL;
    if (!level) // leaves the environment alone: ranks may be threads
        return dpl_ctx_create(n_threads, deferred, (size_t)1 << 30, &ctx) == DPL_OK ? ctx : NULL;
    const char *set = getenv("DPL_CPU");
    char *before = set ? dpl_strdup(set) : NULL;
    setenv("DPL_CPU", level, 1);
    const dpl_status status = dpl_ctx_create(n_threads, deferred, (size_t)1 << 30, &ctx);
    if (before) setenv("DPL_CPU", before, 1);
    else unsetenv("DPL_CPU");
    dpl_free(before);
    return status == DPL_OK ? ctx : NULL;
}
