/*
 * layer.c - section 3 of dropless.h, the layer: weights in panels behind row-major arrays, and what
 * forward keeps for backward in memory of the caller.
 *
 * The workspace begins with a record of the pass, so the layer itself remembers nothing between
 * calls: any number of passes, of any number of layers, may be under way.
 */
#include <math.h>

#include "api/check.h"

#define MAX_WIDTH   ((size_t)1 << 20)
#define PASS_MAGIC  UINT64_C(0x7373617020657564)
#define STEP_MARGIN ((size_t)64 << 20) // what operators take for themselves stays far below

enum { ROUTER, GATE_UP, DOWN, SHARED_GATE_UP, SHARED_DOWN, N_WEIGHTS };

struct dpl_layer {
    dpl_ctx *ctx;
    dpl_comm *comm;
    dpl_moe_shape shape;
    dpl_weight weight[N_WEIGHTS];
    void *packed[N_WEIGHTS]; // where the weights point
    float *grad[N_WEIGHTS];
    float *bias; // (E)
    bool has_bias;
};

typedef struct pass { // at the start of a workspace
    uint64_t magic;
    const dpl_layer *layer;
    dpl_moe_saved saved;
} pass;

#define PASS_BYTES dpl_round_up(sizeof(pass), DPL_ALIGN)

static size_t weight_elems(const dpl_weight *w)
{
    return w->n_groups * dpl_panel_elems(w->n, w->k);
}

static dpl_status alloc_weights(dpl_layer *layer)
{
    bool complete = (layer->bias = dpl_alloc_array(layer->shape.rule.n_experts, sizeof(float)));
    for (size_t i = 0; i < N_WEIGHTS; i++) {
        dpl_weight *w = &layer->weight[i];
        w->p = layer->packed[i] = dpl_alloc_array(weight_elems(w), dpl_dtype_bytes(w->dtype));
        layer->grad[i] = dpl_alloc_array(weight_elems(w), sizeof(float));
        complete = complete && w->p && layer->grad[i];
    }
    if (complete) return DPL_OK;
    return dpl_fail(DPL_ENOMEM, "no memory for a layer of %zu experts of (%zu, %zu)",
                    layer->shape.rule.n_experts, layer->shape.f, layer->shape.d);
}

dpl_status dpl_layer_open(const dpl_layer_config *config, dpl_ctx *ctx, dpl_layer **layer_out)
{
    if (!config || !ctx || !layer_out)
        return dpl_fail(DPL_EINVAL, "dpl_layer_open: a pointer is NULL");
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
    layer->shape = (dpl_moe_shape){d, f, sf, config->rule, 0, e, dtype};
    layer->weight[ROUTER] = (dpl_weight){NULL, DPL_F32, 1, e, d};
    layer->weight[GATE_UP] = (dpl_weight){NULL, dtype, e, dpl_gate_up_width(f), d};
    layer->weight[DOWN] = (dpl_weight){NULL, dtype, e, d, f};
    layer->weight[SHARED_GATE_UP] = (dpl_weight){NULL, dtype, n_shared, dpl_gate_up_width(sf), d};
    layer->weight[SHARED_DOWN] = (dpl_weight){NULL, dtype, n_shared, d, sf};
    dpl_status status = dpl_comm_open("self", NULL, &layer->comm);
    if (status == DPL_OK) status = alloc_weights(layer);
    if (status == DPL_OK)
        *layer_out = layer;
    else
        dpl_layer_close(&layer);
    return status;
}

void dpl_layer_close(dpl_layer **layer)
{
    if (!layer || !*layer) return;
    for (size_t i = 0; i < N_WEIGHTS; i++) {
        dpl_free((*layer)->packed[i]);
        dpl_free((*layer)->grad[i]);
    }
    dpl_free((*layer)->bias);
    dpl_comm_close(&(*layer)->comm);
    dpl_free(*layer);
    *layer = NULL;
}

/* ---- weights in, gradients out -------------------------------------------------------------- */

// Group g of weight i from row-major (n, k).
static void pack_group(dpl_layer *layer, int i, size_t g, const float *rows)
{
    const dpl_weight *w = &layer->weight[i];
    const size_t elems = dpl_panel_elems(w->n, w->k), mark = dpl_ctx_mark(layer->ctx);
    float *panels = dpl_ctx_alloc(layer->ctx, elems * sizeof *panels);
    dpl_pack_rows(layer->ctx, rows, w->n, w->k, w->dtype, panels,
                  (uint8_t *)layer->packed[i] + g * elems * dpl_dtype_bytes(w->dtype));
    dpl_ctx_wait(layer->ctx);
    dpl_ctx_release(layer->ctx, mark);
}

static void pack(dpl_layer *layer, int i, const float *rows)
{
    const dpl_weight *w = &layer->weight[i];
    for (size_t g = 0; g < w->n_groups; g++)
        pack_group(layer, i, g, rows + g * w->n * w->k);
}

// gate and up (groups, f, d) into the interleaved order of SwiGLU's panels.
static void pack_gate_up(dpl_layer *layer, int i, size_t f, const float *gate, const float *up)
{
    const dpl_weight *w = &layer->weight[i];
    const size_t d = w->k, mark = dpl_ctx_mark(layer->ctx), bytes = w->n * d * sizeof(float);
    float *rows = memset(dpl_ctx_alloc(layer->ctx, bytes), 0, bytes);
    for (size_t g = 0; g < w->n_groups; g++) {
        for (size_t r = 0; r < f; r++) {
            float *row = rows + dpl_gate_column(r) * d;
            memcpy(row, gate + (g * f + r) * d, d * sizeof *rows);
            memcpy(row + 16 * d, up + (g * f + r) * d, d * sizeof *rows);
        }
        pack_group(layer, i, g, rows);
    }
    dpl_ctx_release(layer->ctx, mark);
}

static dpl_status check_finite(const char *name, const float *x, size_t n)
{
    for (size_t i = 0; x && i < n; i++)
        if (!isfinite(x[i]))
            return dpl_fail(DPL_EINVAL, "%s weight, element %zu: NaN or infinite", name, i);
    return DPL_OK;
}

dpl_status dpl_layer_set_weights(dpl_layer *layer, const dpl_layer_weights *weights)
{
    if (!layer || !weights) return dpl_fail(DPL_EINVAL, "dpl_layer_set_weights: a pointer is NULL");
    const dpl_layer_weights *w = weights;
    const size_t e = layer->shape.rule.n_experts, shared_f = layer->shape.shared_f;
    if (!w->router || !w->gate || !w->up || !w->down)
        return dpl_fail(DPL_EINVAL, "router, gate, up or down is NULL");
    if (shared_f && (!w->shared_gate || !w->shared_up || !w->shared_down))
        return dpl_fail(DPL_EINVAL,
                        "shared_gate, shared_up or shared_down is NULL, expected all three with "
                        "shared_f=%zu",
                        shared_f);
    DPL_TRY(check_finite("router", w->router, e * layer->shape.d));
    DPL_TRY(check_finite("bias", w->bias, e));
    layer->has_bias = w->bias != NULL;
    if (w->bias) memcpy(layer->bias, w->bias, e * sizeof *layer->bias);
    pack(layer, ROUTER, w->router);
    pack_gate_up(layer, GATE_UP, layer->shape.f, w->gate, w->up);
    pack(layer, DOWN, w->down);
    pack_gate_up(layer, SHARED_GATE_UP, shared_f, w->shared_gate, w->shared_up);
    pack(layer, SHARED_DOWN, w->shared_down);
    return DPL_OK;
}

static void unpack(const dpl_layer *layer, int i, float *rows)
{
    const dpl_weight *w = &layer->weight[i];
    if (!rows || !w->n_groups) return;
    dpl_panel_unpack(layer->ctx, layer->grad[i], w->n_groups, w->n, w->k, rows);
    dpl_ctx_wait(layer->ctx);
}

static void unpack_gate_up(const dpl_layer *layer, int i, size_t f, float *gate, float *up)
{
    const dpl_weight *w = &layer->weight[i];
    const size_t d = w->k, elems = dpl_panel_elems(w->n, d), mark = dpl_ctx_mark(layer->ctx);
    float *rows = dpl_ctx_alloc(layer->ctx, w->n * d * sizeof *rows);
    for (size_t g = 0; g < w->n_groups && (gate || up); g++) {
        dpl_panel_unpack(layer->ctx, layer->grad[i] + g * elems, 1, w->n, d, rows);
        dpl_ctx_wait(layer->ctx);
        for (size_t r = 0; r < f; r++) {
            const float *row = rows + dpl_gate_column(r) * d;
            if (gate) memcpy(gate + (g * f + r) * d, row, d * sizeof *rows);
            if (up) memcpy(up + (g * f + r) * d, row + 16 * d, d * sizeof *rows);
        }
    }
    dpl_ctx_release(layer->ctx, mark);
}

dpl_status dpl_layer_get_gradients(dpl_layer *layer, const dpl_layer_gradients *gradients)
{
    if (!layer || !gradients)
        return dpl_fail(DPL_EINVAL, "dpl_layer_get_gradients: a pointer is NULL");
    const dpl_layer_gradients *g = gradients;
    unpack(layer, ROUTER, g->router);
    unpack_gate_up(layer, GATE_UP, layer->shape.f, g->gate, g->up);
    unpack(layer, DOWN, g->down);
    unpack_gate_up(layer, SHARED_GATE_UP, layer->shape.shared_f, g->shared_gate, g->shared_up);
    unpack(layer, SHARED_DOWN, g->shared_down);
    return DPL_OK;
}

void dpl_layer_zero_gradients(dpl_layer *layer)
{
    if (!layer) return;
    for (size_t i = 0; i < N_WEIGHTS; i++)
        dpl_zero(layer->ctx, layer->grad[i], weight_elems(&layer->weight[i]) * sizeof(float));
    dpl_ctx_wait(layer->ctx);
}

/* ---- passes --------------------------------------------------------------------------------- */

static dpl_moe_weights moe_weights(const dpl_layer *layer)
{
    const dpl_weight *w = layer->weight;
    return (dpl_moe_weights){w[ROUTER], layer->has_bias ? layer->bias : NULL,
                             w[GATE_UP], w[DOWN], w[SHARED_GATE_UP], w[SHARED_DOWN]};
}

size_t dpl_layer_workspace_bytes(const dpl_layer *layer, size_t n_tokens)
{
    if (!layer || dpl_ep_check_slots(n_tokens, layer->shape.rule.top_k) != DPL_OK) return 0;
    return PASS_BYTES + dpl_moe_saved_bytes(&layer->shape, n_tokens);
}

// What one pass takes for itself is at most what it keeps, several times over for the two paths.
static dpl_status check_step_memory(const dpl_layer *layer, size_t n_tokens)
{
    const size_t needed = 3 * dpl_layer_workspace_bytes(layer, n_tokens) + STEP_MARGIN;
    const size_t free_bytes = dpl_arena_free_bytes(layer->ctx->arena);
    if (needed <= free_bytes) return DPL_OK;
    return dpl_fail(DPL_ENOMEM, "%zu tokens need up to %zu bytes of step memory, %zu are reserved",
                    n_tokens, needed, free_bytes);
}

dpl_status dpl_layer_forward(dpl_layer *layer, const void *x, size_t ld_x, size_t n_tokens,
                             const int32_t *segment, void *ws, size_t ws_bytes, void *y_out,
                             size_t ld_y, int64_t *counts_out)
{
    if (!layer) return dpl_fail(DPL_EINVAL, "dpl_layer_forward: layer is NULL");
    const dpl_moe_shape *shape = &layer->shape;
    const dpl_moe_weights weights = moe_weights(layer);
    dpl_mat x_in, y;
    DPL_TRY(dpl_ep_check_slots(n_tokens, shape->rule.top_k));
    DPL_TRY(dpl_check_mat("x", x, ld_x, shape->d, n_tokens, shape->dtype, &x_in));
    DPL_TRY(dpl_check_mat("y_out", y_out, ld_y, shape->d, n_tokens, shape->dtype, &y));
    DPL_TRY(dpl_check_workspace(ws, ws_bytes, dpl_layer_workspace_bytes(layer, n_tokens)));
    DPL_TRY(check_step_memory(layer, n_tokens));
    pass *record = ws;
    record->magic = 0; // until there is something to go back from
    dpl_moe_memory memory = {(uint8_t *)ws + PASS_BYTES, 0};
    DPL_TRY(dpl_moe_forward_in(layer->ctx, layer->comm, shape, &weights, x_in, n_tokens, segment,
                               NULL, &memory, &record->saved, y));
    dpl_ctx_wait(layer->ctx);
    record->layer = layer;
    record->magic = PASS_MAGIC;
    if (counts_out)
        memcpy(counts_out, record->saved.ep.counts, shape->rule.n_experts * sizeof *counts_out);
    return DPL_OK;
}

dpl_status dpl_layer_backward(dpl_layer *layer, const void *x, size_t ld_x, const void *ws,
                              const void *dy, size_t ld_dy, float *dx_out, size_t ld_dx)
{
    if (!layer || !ws) return dpl_fail(DPL_EINVAL, "dpl_layer_backward: layer or ws is NULL");
    const pass *record = ws;
    if (record->magic != PASS_MAGIC || record->layer != layer)
        return dpl_fail(DPL_EINVAL, "ws holds no finished forward pass of this layer");
    const dpl_moe_shape *shape = &layer->shape;
    const dpl_moe_weights weights = moe_weights(layer);
    float **g = layer->grad;
    const dpl_moe_grads grads = {g[ROUTER], g[GATE_UP], g[DOWN], g[SHARED_GATE_UP], g[SHARED_DOWN]};
    const size_t n_tokens = record->saved.n_tokens;
    dpl_mat x_in, dy_in, dx;
    DPL_TRY(dpl_check_mat("x", x, ld_x, shape->d, n_tokens, shape->dtype, &x_in));
    DPL_TRY(dpl_check_mat("dy", dy, ld_dy, shape->d, n_tokens, shape->dtype, &dy_in));
    DPL_TRY(dpl_check_mat("dx_out", dx_out, ld_dx, shape->d, n_tokens, DPL_F32, &dx));
    DPL_TRY(check_step_memory(layer, n_tokens));
    DPL_TRY(dpl_moe_backward(layer->ctx, layer->comm, shape, &weights, x_in, NULL, &record->saved,
                             dy_in, dx, &grads));
    dpl_ctx_wait(layer->ctx);
    return DPL_OK;
}
