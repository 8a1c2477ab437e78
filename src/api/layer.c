/*
 * layer.c - section 3 of dropless.h, the layer: weights in panels behind row-major arrays, and what
 * forward keeps for backward in memory of the caller.
 *
 * The workspace begins with a record of the pass, so the layer itself remembers nothing between
 * calls: any number of passes, of any number of layers, may be under way.
 */
#include <math.h>

#include "api/check.h"
#include "moe/moe.h"

#define MAX_WIDTH   ((size_t)1 << 20)
#define PASS_MAGIC  UINT64_C(0x7373617020657564)
#define STEP_MARGIN ((size_t)64 << 20) // what operators take for themselves stays far below

struct dpl_layer {
    dpl_ctx *ctx;
    dpl_comm *comm;
    dpl_moe_shape shape;
    dpl_moe_weights weights;
    dpl_moe_grads grads;
    float *bias; // (E)
};

typedef struct pass { // at the start of a workspace
    uint64_t magic;
    const dpl_layer *layer;
    dpl_moe_saved saved;
} pass;

#define PASS_BYTES dpl_round_up(sizeof(pass), DPL_ALIGN)
#define N_WEIGHTS  5

// The five packed tensors and their gradients, to treat them alike.
static void list_weights(dpl_layer *layer, dpl_weight **weights, float ***grads)
{
    dpl_weight *const w[N_WEIGHTS] = {&layer->weights.router, &layer->weights.gate_up,
                                      &layer->weights.down, &layer->weights.shared_gate_up,
                                      &layer->weights.shared_down};
    float **const g[N_WEIGHTS] = {&layer->grads.router, &layer->grads.gate_up, &layer->grads.down,
                                  &layer->grads.shared_gate_up, &layer->grads.shared_down};
    memcpy(weights, w, sizeof w);
    memcpy(grads, g, sizeof g);
}

static size_t weight_elems(const dpl_weight *w)
{
    return w->n_groups * dpl_panel_elems(w->n, w->k);
}

static dpl_status check_config(const dpl_layer_config *config)
{
    if (config->d < 1 || config->d > MAX_WIDTH)
        return dpl_fail(DPL_EINVAL, "d=%zu, expected 1 to %zu", config->d, MAX_WIDTH);
    if (config->f < 1 || config->f > MAX_WIDTH)
        return dpl_fail(DPL_EINVAL, "f=%zu, expected 1 to %zu", config->f, MAX_WIDTH);
    if (config->shared_f > MAX_WIDTH)
        return dpl_fail(DPL_EINVAL, "shared_f=%zu, expected 0 to %zu", config->shared_f, MAX_WIDTH);
    if (config->dtype != DPL_F32 && config->dtype != DPL_BF16)
        return dpl_fail(DPL_EINVAL, "dtype=%d, expected DPL_F32 or DPL_BF16", (int)config->dtype);
    return dpl_check_rule(&config->rule);
}

dpl_status dpl_layer_open(const dpl_layer_config *config, dpl_ctx *ctx, dpl_layer **layer_out)
{
    if (!config || !ctx || !layer_out)
        return dpl_fail(DPL_EINVAL, "dpl_layer_open: a pointer is NULL");
    DPL_TRY(check_config(config));
    const size_t d = config->d, f = config->f, sf = config->shared_f, e = config->rule.n_experts;
    const size_t n_shared = sf ? 1 : 0;
    dpl_layer *layer = dpl_alloc(sizeof *layer);
    if (!layer) return dpl_fail(DPL_ENOMEM, "no memory for a layer");
    layer->ctx = ctx;
    layer->shape = (dpl_moe_shape){d, f, sf, config->rule, 0, e, config->dtype};
    layer->weights = (dpl_moe_weights){
        .router = {NULL, DPL_F32, 1, e, d},
        .gate_up = {NULL, config->dtype, e, dpl_gate_up_width(f), d},
        .down = {NULL, config->dtype, e, d, f},
        .shared_gate_up = {NULL, config->dtype, n_shared, dpl_gate_up_width(sf), d},
        .shared_down = {NULL, config->dtype, n_shared, d, sf},
    };
    dpl_status status = dpl_comm_open("self", NULL, &layer->comm);
    dpl_weight *weights[N_WEIGHTS];
    float **grads[N_WEIGHTS];
    list_weights(layer, weights, grads);
    layer->bias = dpl_alloc_array(e, sizeof(float));
    bool complete = layer->bias != NULL;
    for (size_t i = 0; i < N_WEIGHTS; i++) {
        const size_t elems = weight_elems(weights[i]);
        weights[i]->p = dpl_alloc_array(elems, dpl_dtype_bytes(weights[i]->dtype));
        *grads[i] = dpl_alloc_array(elems, sizeof(float));
        complete = complete && weights[i]->p && *grads[i];
    }
    if (status == DPL_OK && !complete)
        status = dpl_fail(DPL_ENOMEM, "no memory for a layer of %zu experts of (%zu, %zu)", e, f,
                          d);
    if (status == DPL_OK)
        *layer_out = layer;
    else
        dpl_layer_close(&layer);
    return status;
}

void dpl_layer_close(dpl_layer **layer)
{
    if (!layer || !*layer) return;
    dpl_weight *weights[N_WEIGHTS];
    float **grads[N_WEIGHTS];
    list_weights(*layer, weights, grads);
    for (size_t i = 0; i < N_WEIGHTS; i++) {
        dpl_free((void *)(uintptr_t)weights[i]->p);
        dpl_free(*grads[i]);
    }
    dpl_free((*layer)->bias);
    dpl_comm_close(&(*layer)->comm);
    dpl_free(*layer);
    *layer = NULL;
}

/* ---- weights in, gradients out -------------------------------------------------------------- */

// Group `group` from row-major (n, k).
static void pack_group(dpl_ctx *ctx, const dpl_weight *w, size_t group, const float *rows)
{
    const size_t elems = dpl_panel_elems(w->n, w->k), mark = dpl_ctx_mark(ctx);
    if (w->dtype == DPL_F32) {
        dpl_panel_pack(ctx, rows, 1, w->n, w->k, (float *)(uintptr_t)w->p + group * elems);
    } else {
        float *panels = dpl_ctx_alloc(ctx, elems * sizeof *panels);
        dpl_panel_pack(ctx, rows, 1, w->n, w->k, panels);
        dpl_to_bf16(ctx, panels, elems, (uint16_t *)(uintptr_t)w->p + group * elems);
    }
    dpl_ctx_wait(ctx);
    dpl_ctx_release(ctx, mark);
}

static void pack_plain(dpl_ctx *ctx, const dpl_weight *w, const float *rows)
{
    for (size_t g = 0; g < w->n_groups; g++)
        pack_group(ctx, w, g, rows + g * w->n * w->k);
}

// gate and up (groups, f, d) into the interleaved order of SwiGLU's panels.
static void pack_gate_up(dpl_ctx *ctx, const dpl_weight *w, size_t f, const float *gate,
                         const float *up)
{
    const size_t d = w->k, mark = dpl_ctx_mark(ctx);
    float *rows = dpl_ctx_alloc(ctx, w->n * d * sizeof *rows);
    memset(rows, 0, w->n * d * sizeof *rows);
    for (size_t g = 0; g < w->n_groups; g++) {
        for (size_t i = 0; i < f; i++) {
            float *row = rows + dpl_gate_column(i) * d;
            memcpy(row, gate + (g * f + i) * d, d * sizeof *rows);
            memcpy(row + 16 * d, up + (g * f + i) * d, d * sizeof *rows);
        }
        pack_group(ctx, w, g, rows);
    }
    dpl_ctx_release(ctx, mark);
}

static dpl_status check_finite(const char *name, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!isfinite(x[i]))
            return dpl_fail(DPL_EINVAL, "%s weight, element %zu: NaN or infinite", name, i);
    return DPL_OK;
}

dpl_status dpl_layer_set_weights(dpl_layer *layer, const dpl_layer_weights *weights)
{
    if (!layer || !weights) return dpl_fail(DPL_EINVAL, "dpl_layer_set_weights: a pointer is NULL");
    const dpl_moe_shape *shape = &layer->shape;
    const size_t e = shape->rule.n_experts;
    if (!weights->router || !weights->gate || !weights->up || !weights->down)
        return dpl_fail(DPL_EINVAL, "router, gate, up or down is NULL");
    if (shape->shared_f && (!weights->shared_gate || !weights->shared_up || !weights->shared_down))
        return dpl_fail(DPL_EINVAL,
                        "shared_gate, shared_up or shared_down is NULL, expected all "
                        "three with shared_f=%zu",
                        shape->shared_f);
    DPL_TRY(check_finite("router", weights->router, e * shape->d));
    if (weights->bias) DPL_TRY(check_finite("bias", weights->bias, e));
    dpl_ctx *ctx = layer->ctx;
    dpl_moe_weights *w = &layer->weights;
    if (weights->bias) memcpy(layer->bias, weights->bias, e * sizeof *layer->bias);
    w->bias = weights->bias ? layer->bias : NULL;
    pack_plain(ctx, &w->router, weights->router);
    pack_gate_up(ctx, &w->gate_up, shape->f, weights->gate, weights->up);
    pack_plain(ctx, &w->down, weights->down);
    if (shape->shared_f) {
        pack_gate_up(ctx, &w->shared_gate_up, shape->shared_f, weights->shared_gate,
                     weights->shared_up);
        pack_plain(ctx, &w->shared_down, weights->shared_down);
    }
    return DPL_OK;
}

static void unpack_gate_up(dpl_ctx *ctx, const dpl_weight *w, size_t f, const float *grad,
                           float *gate, float *up)
{
    const size_t d = w->k, elems = dpl_panel_elems(w->n, d), mark = dpl_ctx_mark(ctx);
    float *rows = dpl_ctx_alloc(ctx, w->n * d * sizeof *rows);
    for (size_t g = 0; g < w->n_groups && (gate || up); g++) {
        dpl_panel_unpack(ctx, grad + g * elems, 1, w->n, d, rows);
        dpl_ctx_wait(ctx);
        for (size_t i = 0; i < f; i++) {
            const float *row = rows + dpl_gate_column(i) * d;
            if (gate) memcpy(gate + (g * f + i) * d, row, d * sizeof *rows);
            if (up) memcpy(up + (g * f + i) * d, row + 16 * d, d * sizeof *rows);
        }
    }
    dpl_ctx_release(ctx, mark);
}

static void unpack_plain(dpl_ctx *ctx, const dpl_weight *w, const float *grad, float *rows)
{
    if (rows) dpl_panel_unpack(ctx, grad, w->n_groups, w->n, w->k, rows);
}

dpl_status dpl_layer_get_gradients(dpl_layer *layer, const dpl_layer_gradients *gradients)
{
    if (!layer || !gradients)
        return dpl_fail(DPL_EINVAL, "dpl_layer_get_gradients: a pointer is NULL");
    const dpl_moe_weights *w = &layer->weights;
    const dpl_moe_grads *from = &layer->grads;
    dpl_ctx *ctx = layer->ctx;
    unpack_plain(ctx, &w->router, from->router, gradients->router);
    unpack_gate_up(ctx, &w->gate_up, layer->shape.f, from->gate_up, gradients->gate, gradients->up);
    unpack_plain(ctx, &w->down, from->down, gradients->down);
    if (layer->shape.shared_f) {
        unpack_gate_up(ctx, &w->shared_gate_up, layer->shape.shared_f, from->shared_gate_up,
                       gradients->shared_gate, gradients->shared_up);
        unpack_plain(ctx, &w->shared_down, from->shared_down, gradients->shared_down);
    }
    dpl_ctx_wait(ctx);
    return DPL_OK;
}

void dpl_layer_zero_gradients(dpl_layer *layer)
{
    if (!layer) return;
    dpl_weight *weights[N_WEIGHTS];
    float **grads[N_WEIGHTS];
    list_weights(layer, weights, grads);
    for (size_t i = 0; i < N_WEIGHTS; i++)
        dpl_zero(layer->ctx, *grads[i], weight_elems(weights[i]) * sizeof(float));
    dpl_ctx_wait(layer->ctx);
}

/* ---- passes --------------------------------------------------------------------------------- */

size_t dpl_layer_workspace_bytes(const dpl_layer *layer, size_t n_tokens)
{
    if (!layer || n_tokens > (size_t)INT32_MAX / layer->shape.rule.top_k) return 0;
    return PASS_BYTES + dpl_moe_saved_bytes(&layer->shape, n_tokens);
}

static dpl_status make_mat(const char *name, const void *p, size_t ld, size_t d, size_t n_tokens,
                           dpl_dtype dtype, dpl_mat *mat_out)
{
    size_t elems;
    if (!ld) ld = d;
    if (ld < d || __builtin_mul_overflow(ld, n_tokens, &elems) || elems > PTRDIFF_MAX / 4)
        return dpl_fail(DPL_EINVAL,
                        "row distance of %s is %zu, expected %zu or more (or 0), and "
                        "%zu rows that can be addressed",
                        name, ld, d, n_tokens);
    if (!p && n_tokens) return dpl_fail(DPL_EINVAL, "%s is NULL", name);
    *mat_out = (dpl_mat){(void *)(uintptr_t)p, ld, dtype};
    return DPL_OK;
}

// What one pass takes for itself is at most what it keeps, several times over for the two paths.
static dpl_status check_step_memory(const dpl_layer *layer, size_t n_tokens)
{
    const size_t needed = 3 * dpl_layer_workspace_bytes(layer, n_tokens) + STEP_MARGIN;
    if (needed > dpl_arena_free_bytes(layer->ctx->arena))
        return dpl_fail(DPL_ENOMEM,
                        "%zu tokens need up to %zu bytes of step memory, %zu are "
                        "reserved",
                        n_tokens, needed, dpl_arena_free_bytes(layer->ctx->arena));
    return DPL_OK;
}

dpl_status dpl_layer_forward(dpl_layer *layer, const void *x, size_t ld_x, size_t n_tokens,
                             const int32_t *segment, void *ws, size_t ws_bytes, void *y_out,
                             size_t ld_y, int64_t *counts_out)
{
    if (!layer) return dpl_fail(DPL_EINVAL, "dpl_layer_forward: layer is NULL");
    const dpl_moe_shape *shape = &layer->shape;
    const size_t needed = dpl_layer_workspace_bytes(layer, n_tokens);
    if (!needed)
        return dpl_fail(DPL_EINVAL, "%zu tokens of %zu experts each, expected at most %d in all",
                        n_tokens, shape->rule.top_k, INT32_MAX);
    dpl_mat x_in, y;
    DPL_TRY(make_mat("x", x, ld_x, shape->d, n_tokens, shape->dtype, &x_in));
    DPL_TRY(make_mat("y_out", y_out, ld_y, shape->d, n_tokens, shape->dtype, &y));
    DPL_TRY(dpl_check_workspace(ws, ws_bytes, needed));
    DPL_TRY(check_step_memory(layer, n_tokens));
    pass *record = ws;
    record->magic = 0; // until there is something to go back from
    dpl_moe_memory memory = {(uint8_t *)ws + PASS_BYTES, 0};
    DPL_TRY(dpl_moe_forward_in(layer->ctx, layer->comm, shape, &layer->weights, x_in, n_tokens,
                               segment, NULL, &memory, &record->saved, y));
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
    const size_t n_tokens = record->saved.n_tokens;
    dpl_mat x_in, dy_in, dx;
    DPL_TRY(make_mat("x", x, ld_x, shape->d, n_tokens, shape->dtype, &x_in));
    DPL_TRY(make_mat("dy", dy, ld_dy, shape->d, n_tokens, shape->dtype, &dy_in));
    DPL_TRY(make_mat("dx_out", dx_out, ld_dx, shape->d, n_tokens, DPL_F32, &dx));
    DPL_TRY(check_step_memory(layer, n_tokens));
    DPL_TRY(dpl_moe_backward(layer->ctx, layer->comm, shape, &layer->weights, x_in, NULL,
                             &record->saved, dy_in, dx, &layer->grads));
    dpl_ctx_wait(layer->ctx);
    return DPL_OK;
}
