// operators.c - section 3 of dropless.h, the operators: grouped GEMM, routing and permutation on
// memory that the caller brings.
//
// Everything is validated here, since what lies below cannot fail. Row-major weights are packed
// group by group into one group's workspace just before use, and only those of groups with rows.
#include <math.h>

#include "api/api.h"

enum { MAX_EXPERTS = 65536 };

dpl_status dpl_check_size(const char *name, size_t value, size_t min, size_t max) {
    if (value >= min && value <= max) return DPL_OK;
    return dpl_fail(DPL_EINVAL, "%s=%zu, expected %zu to %zu", name, value, min, max);
}

dpl_status dpl_check_dtype(const char *name, dpl_dtype dtype) {
    if (dtype == DPL_F32 || dtype == DPL_BF16) return DPL_OK;
    return dpl_fail(DPL_EINVAL, "%s=%d, expected DPL_F32 or DPL_BF16", name, (int)dtype);
}

dpl_status dpl_check_rule(const dpl_route_rule *rule) {
    const size_t e = rule->n_experts, groups = rule->n_groups;
    DPL_TRY(dpl_check_size("n_experts", e, 1, MAX_EXPERTS));
    DPL_TRY(dpl_check_size("top_k", rule->top_k, 1, e));
    DPL_CHECK(groups > 0 && e % groups == 0, "n_groups=%zu does not divide n_experts=%zu", groups,
              e);
    DPL_TRY(dpl_check_size("top_groups", rule->top_groups, 1, groups));
    const size_t kept = rule->top_groups * (e / groups); // experts in the best groups
    DPL_CHECK(rule->top_k <= kept, "top_k=%zu, expected at most %zu: those of the best %zu groups",
              rule->top_k, kept, rule->top_groups);
    DPL_CHECK(!rule->group_top2 || groups == 1 || e / groups > 1,
              "group_top2 with 1 expert a group, expected at least 2");
    DPL_CHECK(isfinite(rule->scale), "scale=%g, expected a finite number", (double)rule->scale);
    return DPL_OK;
}

dpl_status dpl_check_workspace(const void *ws, size_t ws_bytes, size_t needed) {
    DPL_EXPECT(ws_bytes >= needed, DPL_ENOSPC, "workspace of %zu bytes, expected at least %zu",
               ws_bytes, needed);
    DPL_CHECK(ws && (uintptr_t)ws % DPL_ALIGN == 0,
              "workspace at %p, expected an address that %d divides", ws, DPL_ALIGN);
    return DPL_OK;
}

dpl_status dpl_check_mat(const char *name, const void *p, size_t ld, size_t width, size_t n_rows,
                         dpl_dtype dtype, dpl_mat *mat_out) {
    size_t elems;
    if (!ld) ld = width;
    if (ld < width || __builtin_mul_overflow(ld, n_rows, &elems) || elems > PTRDIFF_MAX / 4)
        return dpl_fail(DPL_EINVAL, "row distance of %s is %zu, expected %zu or more for %zu rows",
                        name, ld, width, n_rows);
    DPL_CHECK(p || !n_rows, "%s is NULL", name);
    *mat_out = (dpl_mat){(void *)(uintptr_t)p, ld, dtype};
    return DPL_OK;
}

void dpl_pack_rows(dpl_ctx *ctx, const float *rows, size_t n, size_t k, dpl_dtype dtype,
                   float *panels, void *packed) {
    dpl_panel_pack(ctx, rows, n, k, dtype == DPL_F32 ? packed : panels);
    if (dtype == DPL_BF16) dpl_to_bf16(ctx, panels, dpl_panel_elems(n, k), packed);
}

dpl_status dpl_check_finite(const char *name, const float *x, size_t n) {
    for (size_t i = 0; x && i < n; i++)
        DPL_CHECK(isfinite(x[i]), "%s[%zu] is NaN or infinite", name, i);
    return DPL_OK;
}

/* ---- grouped GEMM --------------------------------------------------------------------------- */
// Bytes of n_groups packed weights; 0 when a size is zero or they are too large to address.
static size_t packed_bytes(const dpl_gemm_grouped *g, size_t n_groups, size_t element) {
    size_t bytes;
    if (g->n > SIZE_MAX - DPL_PANEL || g->k > SIZE_MAX - 1 ||
        __builtin_mul_overflow(dpl_round_up(g->n, DPL_PANEL), dpl_panel_depth(g->k), &bytes) ||
        __builtin_mul_overflow(bytes, n_groups, &bytes) ||
        __builtin_mul_overflow(bytes, element, &bytes) || bytes > PTRDIFF_MAX / 2)
        return 0;
    return bytes;
}

size_t dpl_gemm_packed_bytes(const dpl_gemm_grouped *g) {
    return g ? packed_bytes(g, g->n_groups, dpl_dtype_bytes(g->weights)) : 0;
}

// One group in fp32 panels, and its bf16 copy where the class of compute is BF16.
size_t dpl_gemm_workspace_bytes(const dpl_gemm_grouped *g) {
    const size_t bytes = g ? packed_bytes(g, 1, sizeof(float)) : 0;
    return g && g->weights == DPL_BF16 ? bytes + bytes / 2 : bytes;
}

static dpl_status check_sizes(const dpl_ctx *ctx, const dpl_gemm_grouped *g) {
    DPL_NEED(ctx && g);
    DPL_TRY(dpl_check_dtype("tokens", g->tokens));
    DPL_TRY(dpl_check_dtype("weights", g->weights));
    DPL_CHECK(dpl_gemm_packed_bytes(g) && dpl_gemm_workspace_bytes(g),
              "%zu groups of (%zu, %zu): a size is 0 or too large", g->n_groups, g->n, g->k);
    return DPL_OK;
}

// Everything but the weights; x and y are the matrices of width k and n, whichever way they go.
static dpl_status check_gemm(const dpl_ctx *ctx, const dpl_gemm_grouped *g, const void *x,
                             const void *y, dpl_mat *x_out, dpl_mat *y_out) {
    DPL_TRY(check_sizes(ctx, g));
    DPL_NEED(g->offsets);
    for (size_t i = 0; i <= g->n_groups; i++) {
        const long long low = i ? g->offsets[i - 1] : 0, high = i ? (long long)g->n_rows : 0;
        const long long at = g->offsets[i];
        DPL_CHECK(at >= low && at <= high,
                  "offsets[%zu], of group %zu, is %lld, expected %lld to %lld", i, i ? i - 1 : 0,
                  at, low, high);
    }
    const size_t n_rows = (size_t)g->offsets[g->n_groups];
    DPL_TRY(dpl_check_mat("x or dx", x, g->ld_x, g->k, n_rows, g->tokens, x_out));
    return dpl_check_mat("y or dy", y, g->ld_y, g->n, n_rows, g->tokens, y_out);
}

dpl_status dpl_gemm_pack(dpl_ctx *ctx, const dpl_gemm_grouped *g, const float *w, void *ws,
                         size_t ws_bytes, void *packed_out) {
    DPL_TRY(check_sizes(ctx, g));
    DPL_TRY(dpl_check_workspace(ws, ws_bytes, dpl_gemm_workspace_bytes(g)));
    DPL_NEED(w && packed_out && (uintptr_t)packed_out % DPL_ALIGN == 0);
    const size_t group_bytes = packed_bytes(g, 1, dpl_dtype_bytes(g->weights));
    for (size_t i = 0; i < g->n_groups; i++)
        dpl_pack_rows(ctx, w + i * g->n * g->k, g->n, g->k, g->weights, ws,
                      (uint8_t *)packed_out + i * group_bytes);
    dpl_ctx_wait(ctx);
    return DPL_OK;
}

typedef enum product { FORWARD, DGRAD, WGRAD } product;

// y from x and w, dx (in place of x) from dy (of y) and w, or dw (of w) += from x and dy.
static dpl_status run(dpl_ctx *ctx, const dpl_gemm_grouped *g, product which, const void *x_p,
                      void *w, void *ws, size_t ws_bytes, const void *y_p) {
    const bool packed = g && g->packed && which != WGRAD;
    dpl_mat x, y;
    DPL_TRY(check_gemm(ctx, g, x_p, y_p, &x, &y));
    if (g->offsets[g->n_groups] == 0) return DPL_OK;
    DPL_NEED(w && (!packed || (uintptr_t)w % DPL_ALIGN == 0));
    if (!packed) DPL_TRY(dpl_check_workspace(ws, ws_bytes, dpl_gemm_workspace_bytes(g)));
    for (size_t i = 0; i < (packed ? 1 : g->n_groups); i++) { // packed: all groups at once
        const size_t row = (size_t)g->offsets[i], n_rows = (size_t)g->offsets[i + 1] - row;
        if (n_rows == 0 && !packed) continue;
        const dpl_groups all = {g->n_groups, g->n_rows, g->offsets}, one = dpl_one_group(n_rows),
                         groups = packed ? all : one;
        const dpl_mat x_i = dpl_mat_at(x, row, 0), y_i = dpl_mat_at(y, row, 0);
        float *rows = (float *)w + i * g->n * g->k, *panels = packed ? w : ws;
        if (!packed && which != WGRAD) {
            if (g->weights == DPL_BF16) panels += dpl_panel_elems(g->n, g->k);
            dpl_pack_rows(ctx, rows, g->n, g->k, g->weights, ws, panels);
        }
        const dpl_weight weight = {panels, g->weights, packed ? g->n_groups : 1, g->n, g->k, NULL,
                                   NULL,   NULL};
        if (which == FORWARD) dpl_gemm_forward(ctx, x_i, &weight, groups, y_i);
        if (which == DGRAD) dpl_gemm_dgrad(ctx, y_i, &weight, groups, x_i, false);
        if (which == WGRAD) {
            dpl_panel_pack(ctx, rows, g->n, g->k, ws);
            dpl_gemm_wgrad(ctx, y_i, x_i, (dpl_row_map){0}, groups, g->n, g->k, g->weights, true,
                           ws);
            dpl_panel_unpack(ctx, ws, g->n, g->k, rows);
        }
        dpl_ctx_wait(ctx); // The workspace is used again.
    }
    return DPL_OK;
}

dpl_status dpl_gemm_grouped_forward(dpl_ctx *ctx, const dpl_gemm_grouped *g, const void *x,
                                    const void *w, void *ws, size_t ws_bytes, void *y_out) {
    return run(ctx, g, FORWARD, x, (void *)(uintptr_t)w, ws, ws_bytes, y_out);
}

dpl_status dpl_gemm_grouped_dgrad(dpl_ctx *ctx, const dpl_gemm_grouped *g, const void *dy,
                                  const void *w, void *ws, size_t ws_bytes, void *dx_out) {
    return run(ctx, g, DGRAD, dx_out, (void *)(uintptr_t)w, ws, ws_bytes, dy);
}

dpl_status dpl_gemm_grouped_wgrad(dpl_ctx *ctx, const dpl_gemm_grouped *g, const void *dy,
                                  const void *x, void *ws, size_t ws_bytes, float *dw) {
    return run(ctx, g, WGRAD, x, dw, ws, ws_bytes, dy);
}

/* ---- routing and permutation ---------------------------------------------------------------- */
static dpl_status check_routing(const dpl_ctx *ctx, const dpl_route_rule *rule, size_t n_tokens) {
    DPL_NEED(ctx && rule);
    DPL_TRY(dpl_check_rule(rule));
    return dpl_ep_check_slots(n_tokens, rule->top_k);
}

dpl_status dpl_router_route(dpl_ctx *ctx, const dpl_route_rule *rule, size_t n_tokens,
                            const float *logits, const float *bias, const int32_t *segment,
                            float *score_out, int32_t *ids_out, float *weights_out,
                            int64_t *counts_out) {
    DPL_TRY(check_routing(ctx, rule, n_tokens));
    DPL_NEED(!n_tokens || (logits && score_out && ids_out && weights_out));
    const size_t e = rule->n_experts;
    for (size_t i = 0; i < n_tokens * e; i++) // First, since outputs are written on success only.
        if (!isfinite(logits[i]) && !(segment && segment[i / e] == 0))
            return dpl_fail(DPL_ENUMERIC, "token %zu: the logit of expert %zu is NaN or infinite",
                            i / e, i % e);
    DPL_TRY(dpl_check_finite("bias", bias, e));
    const size_t mark = dpl_ctx_mark(ctx);
    int32_t *bad_row = dpl_ctx_alloc(ctx, sizeof *bad_row);
    dpl_route_forward(ctx, rule, logits, bias, segment, n_tokens, score_out, ids_out, weights_out,
                      bad_row);
    dpl_ctx_wait(ctx);
    dpl_ctx_release(ctx, mark);
    if (counts_out) memset(counts_out, 0, e * sizeof *counts_out);
    for (size_t i = 0; counts_out && i < n_tokens * rule->top_k; i++)
        if (ids_out[i] >= 0) counts_out[ids_out[i]]++;
    return DPL_OK;
}

dpl_status dpl_router_route_backward(dpl_ctx *ctx, const dpl_route_rule *rule, size_t n_tokens,
                                     const float *score, const int32_t *ids, const float *dweights,
                                     float *dlogits_out) {
    DPL_TRY(check_routing(ctx, rule, n_tokens));
    DPL_NEED(!n_tokens || (score && ids && dweights && dlogits_out));
    DPL_TRY(dpl_ep_check_ids(ids, n_tokens, rule->top_k, rule->n_experts));
    dpl_route_backward(ctx, rule, dweights, ids, score, n_tokens, dlogits_out);
    dpl_ctx_wait(ctx);
    return DPL_OK;
}

dpl_status dpl_moe_permute(dpl_ctx *ctx, const int32_t *ids, size_t n_tokens, size_t top_k,
                           size_t n_experts, int64_t *offsets_out, int32_t *slot_row_out,
                           int32_t *row_slot_out) {
    DPL_NEED(ctx && offsets_out && (!n_tokens || (ids && slot_row_out && row_slot_out)));
    DPL_TRY(dpl_check_size("n_experts", n_experts, 1, MAX_EXPERTS));
    DPL_TRY(dpl_check_size("top_k", top_k, 1, n_experts));
    DPL_TRY(dpl_ep_check_slots(n_tokens, top_k));
    DPL_TRY(dpl_ep_check_ids(ids, n_tokens, top_k, n_experts));
    dpl_permute(ctx, ids, n_tokens * top_k, n_experts, offsets_out, slot_row_out, row_slot_out);
    dpl_ctx_wait(ctx);
    return DPL_OK;
}
