// layer.c - section 3 of dropless.h, the layer: weights in panels behind row-major arrays, and what
// forward keeps for backward in memory of the caller.
//
// The workspace begins with a record of the pass, so the layer itself remembers nothing between
// calls: any number of passes, of any number of layers, may be under way.
#include "api/api.h"

#define MAX_WIDTH   ((size_t)1 << 20)
#define PASS_MAGIC  UINT64_C(0x7373617020657564)
#define STEP_MARGIN ((size_t)64 << 20) // what operators take for themselves stays far below

enum { ROUTER, GATE_UP, DOWN, SHARED_GATE_UP, SHARED_DOWN, N_WEIGHTS };

struct dpl_layer {
    dpl_ctx *ctx;
    dpl_ep_ranks ranks;
    dpl_moe_shape shape;
    dpl_weight weight[N_WEIGHTS];
    void *packed[N_WEIGHTS]; // where the weights point
    float *bias;             // (E)
    dpl_moe_weights weights; // the same, as the passes take them; without bias: NULL
};

typedef struct pass { // at the start of a workspace
    uint64_t magic;
    const dpl_layer *layer;
    dpl_moe_saved saved;
} pass;

#define PASS_BYTES dpl_round_up(sizeof(pass), DPL_ALIGN)

static size_t weight_elems(const dpl_weight *w) {
    return w->n_groups * dpl_panel_elems(w->n, w->k);
}

static dpl_status alloc_weights(dpl_layer *layer) {
    bool complete = (layer->bias = dpl_alloc_array(layer->shape.rule.n_experts, sizeof(float)));
    for (size_t i = 0; i < N_WEIGHTS; i++) {
        dpl_weight *one = &layer->weight[i];
        one->p = layer->packed[i] = dpl_alloc_array(weight_elems(one), dpl_dtype_bytes(one->dtype));
        one->grad = dpl_alloc_array(weight_elems(one), sizeof(float));
        complete = complete && one->p && one->grad;
    }
    const dpl_weight *w = layer->weight;
    layer->weights = (dpl_moe_weights){w[ROUTER],         NULL,          w[GATE_UP], w[DOWN],
                                       w[SHARED_GATE_UP], w[SHARED_DOWN]};
    if (complete) return DPL_OK;
    return dpl_fail(DPL_ENOMEM, "no memory for a layer of %zu experts of (%zu, %zu)",
                    layer->shape.rule.n_experts, layer->shape.f, layer->shape.d);
}

dpl_status dpl_layer_open(const dpl_layer_config *config, dpl_ctx *ctx, dpl_layer **layer_out) {
    DPL_NEED(config && ctx && layer_out);
    const dpl_dtype dtype = config->dtype;
    const size_t d = config->d, f = config->f, sf = config->shared_f, e = config->rule.n_experts;
    const size_t n_shared = sf ? 1 : 0;
    DPL_TRY(dpl_check_size("d", d, 1, MAX_WIDTH));
    DPL_TRY(dpl_check_size("f", f, 1, MAX_WIDTH));
    DPL_TRY(dpl_check_size("shared_f", sf, 0, MAX_WIDTH));
    DPL_TRY(dpl_check_dtype("dtype", dtype));
    DPL_TRY(dpl_check_rule(&config->rule));
    dpl_layer *layer = dpl_alloc(sizeof *layer);
    if (!layer) return dpl_fail(DPL_ENOMEM, "no memory for a layer");
    layer->ctx = ctx;
    layer->shape = (dpl_moe_shape){d, f, sf, config->rule, dtype, false};
    layer->weight[ROUTER] = (dpl_weight){NULL, DPL_F32, 1, e, d, NULL, NULL, NULL};
    layer->weight[GATE_UP] = (dpl_weight){NULL, dtype, e,    dpl_gate_up_width(f),
                                          d,    NULL,  NULL, NULL};
    layer->weight[DOWN] = (dpl_weight){NULL, dtype, e, d, f, NULL, NULL, NULL};
    layer->weight[SHARED_GATE_UP] = (dpl_weight){NULL, dtype, n_shared, dpl_gate_up_width(sf),
                                                 d,    NULL,  NULL,     NULL};
    layer->weight[SHARED_DOWN] = (dpl_weight){NULL, dtype, n_shared, d, sf, NULL, NULL, NULL};
    dpl_status status = dpl_ep_ranks_open(ctx, NULL, e, NULL, 0, 0, DPL_OK, &layer->ranks);
    if (status == DPL_OK) status = alloc_weights(layer);
    if (status == DPL_OK) *layer_out = layer;
    else dpl_layer_close(&layer);
    return status;
}

void dpl_layer_close(dpl_layer **layer) {
    if (!layer || !*layer) return;
    for (size_t i = 0; i < N_WEIGHTS; i++) {
        dpl_free((*layer)->packed[i]);
        dpl_free((*layer)->weight[i].grad);
    }
    dpl_free((*layer)->bias);
    dpl_ep_ranks_close(&(*layer)->ranks);
    dpl_free(*layer);
    *layer = NULL;
}

/* ---- weights in, gradients out -------------------------------------------------------------- */
// Hidden width where weight i has gate and up, in the interleaved order of SwiGLU's panels; else 0.
static size_t gate_width(const dpl_layer *layer, int i) {
    return i == GATE_UP ? layer->shape.f : i == SHARED_GATE_UP ? layer->shape.shared_f : 0;
}

// Weight i from row-major (groups, n, k), or from gate and up (groups, f, k); or its gradient to
// them, without those that are NULL.
static void copy(dpl_layer *layer, bool set, int i, const float *array, const float *up) {
    const dpl_weight *w = &layer->weight[i];
    const size_t k = w->k, f = gate_width(layer, i), elems = dpl_panel_elems(w->n, k);
    const size_t bytes = f ? w->n * k * sizeof *array : 0, mark = dpl_ctx_mark(layer->ctx);
    float *panels = dpl_ctx_alloc(layer->ctx, elems * sizeof *panels);
    float *both = memset(dpl_ctx_alloc(layer->ctx, bytes), 0, bytes);
    for (size_t g = 0; g < w->n_groups && (array || up); g++) {
        float *rows = f ? both : (float *)(uintptr_t)array + g * w->n * k;
        if (!set) dpl_panel_unpack(layer->ctx, w->grad + g * elems, w->n, k, rows);
        dpl_ctx_wait(layer->ctx);
        for (size_t r = 0; r < 2 * f; r++) { // of gate, then of up
            float *theirs = (float *)(uintptr_t)(r < f ? array : up);
            if (!theirs) continue;
            theirs += (g * f + r % f) * k;
            float *ours = both + (dpl_gate_column(r % f) + r / f * 16) * k;
            memcpy(set ? ours : theirs, set ? theirs : ours, k * sizeof *ours);
        }
        if (set)
            dpl_pack_rows(layer->ctx, rows, w->n, k, w->dtype, panels,
                          (uint8_t *)layer->packed[i] + g * elems * dpl_dtype_bytes(w->dtype));
        dpl_ctx_wait(layer->ctx);
    }
    dpl_ctx_release(layer->ctx, mark);
}

static void copy_all(dpl_layer *layer, bool set, const dpl_layer_weights *w) {
    copy(layer, set, ROUTER, w->router, NULL);
    copy(layer, set, GATE_UP, w->gate, w->up);
    copy(layer, set, DOWN, w->down, NULL);
    copy(layer, set, SHARED_GATE_UP, w->shared_gate, w->shared_up);
    copy(layer, set, SHARED_DOWN, w->shared_down, NULL);
}

dpl_status dpl_layer_set_weights(dpl_layer *layer, const dpl_layer_weights *w) {
    DPL_NEED(layer && w);
    const size_t e = layer->shape.rule.n_experts;
    DPL_CHECK(w->router && w->gate && w->up && w->down, "router, gate, up or down is NULL");
    DPL_NEED(!layer->shape.shared_f || (w->shared_gate && w->shared_up && w->shared_down));
    DPL_TRY(dpl_check_finite("router", w->router, e * layer->shape.d));
    DPL_TRY(dpl_check_finite("bias", w->bias, e));
    layer->weights.bias = w->bias ? layer->bias : NULL;
    if (w->bias) memcpy(layer->bias, w->bias, e * sizeof *layer->bias);
    copy_all(layer, true, w);
    return DPL_OK;
}

dpl_status dpl_layer_get_gradients(dpl_layer *layer, const dpl_layer_gradients *g) {
    DPL_NEED(layer && g);
    const dpl_layer_weights to = {g->router, NULL,           g->gate,      g->up,
                                  g->down,   g->shared_gate, g->shared_up, g->shared_down};
    copy_all(layer, false, &to);
    return DPL_OK;
}

void dpl_layer_zero_gradients(dpl_layer *layer) {
    if (!layer) return;
    for (size_t i = 0; i < N_WEIGHTS; i++)
        dpl_zero(layer->ctx, layer->weight[i].grad,
                 weight_elems(&layer->weight[i]) * sizeof(float));
    dpl_ctx_wait(layer->ctx);
}

/* ---- passes --------------------------------------------------------------------------------- */
size_t dpl_layer_workspace_bytes(const dpl_layer *layer, size_t n_tokens) {
    if (!layer || dpl_ep_check_slots(n_tokens, layer->shape.rule.top_k) != DPL_OK) return 0;
    return PASS_BYTES + dpl_moe_saved_bytes(&layer->shape, n_tokens);
}

// What one pass takes for itself is at most what it keeps, several times over for the two paths.
static dpl_status check_step_memory(const dpl_layer *layer, size_t n_tokens) {
    const size_t needed = 3 * dpl_layer_workspace_bytes(layer, n_tokens) + STEP_MARGIN;
    const size_t free_bytes = dpl_arena_free_bytes(layer->ctx->arena);
    if (needed <= free_bytes) return DPL_OK;
    return dpl_fail(DPL_ENOMEM, "%zu tokens need up to %zu bytes of step memory, %zu are reserved",
                    n_tokens, needed, free_bytes);
}

dpl_status dpl_layer_forward(dpl_layer *layer, const void *x, size_t ld_x, size_t n_tokens,
                             const int32_t *segment, void *ws, size_t ws_bytes, void *y_out,
                             size_t ld_y, int64_t *counts_out) {
    DPL_NEED(layer);
    const dpl_moe_shape *shape = &layer->shape;
    dpl_mat x_in, y;
    DPL_TRY(dpl_ep_check_slots(n_tokens, shape->rule.top_k));
    DPL_TRY(dpl_check_mat("x", x, ld_x, shape->d, n_tokens, shape->dtype, &x_in));
    DPL_TRY(dpl_check_mat("y_out", y_out, ld_y, shape->d, n_tokens, shape->dtype, &y));
    DPL_TRY(dpl_check_workspace(ws, ws_bytes, dpl_layer_workspace_bytes(layer, n_tokens)));
    DPL_TRY(check_step_memory(layer, n_tokens));
    pass *record = ws;
    record->magic = 0; // until there is something to go back from
    dpl_moe_memory memory = {(uint8_t *)ws + PASS_BYTES, 0};
    DPL_TRY(dpl_moe_forward_in(layer->ctx, &layer->ranks, shape, &layer->weights, x_in, n_tokens,
                               segment, NULL, &memory, &record->saved, y));
    dpl_ctx_wait(layer->ctx);
    record->layer = layer;
    record->magic = PASS_MAGIC;
    if (counts_out)
        memcpy(counts_out, record->saved.ep.counts, shape->rule.n_experts * sizeof *counts_out);
    return DPL_OK;
}

dpl_status dpl_layer_backward(dpl_layer *layer, const void *x, size_t ld_x, const void *ws,
                              const void *dy, size_t ld_dy, float *dx_out, size_t ld_dx) {
    DPL_NEED(layer && ws);
    const pass *record = ws;
    DPL_CHECK(record->magic == PASS_MAGIC && record->layer == layer,
              "ws holds no finished forward pass of this layer");
    const dpl_moe_shape *shape = &layer->shape;
    const size_t n_tokens = record->saved.ep.n_tokens;
    dpl_mat x_in, dy_in, dx;
    DPL_TRY(dpl_check_mat("x", x, ld_x, shape->d, n_tokens, shape->dtype, &x_in));
    DPL_TRY(dpl_check_mat("dy", dy, ld_dy, shape->d, n_tokens, shape->dtype, &dy_in));
    DPL_TRY(dpl_check_mat("dx_out", dx_out, ld_dx, shape->d, n_tokens, DPL_F32, &dx));
    DPL_TRY(check_step_memory(layer, n_tokens));
    const dpl_status status = dpl_moe_backward(layer->ctx, shape, &layer->weights, x_in, NULL,
                                               &record->saved, dy_in, dx);
    dpl_ctx_wait(layer->ctx);
    return status;
}
