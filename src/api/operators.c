/*
 * operators.c - section 3 of dropless.h, the operators: grouped GEMM, routing and permutation on
 * memory that the caller brings.
 *
 * Everything is validated here, since what lies below cannot fail. Row-major weights are packed group
 * by group into one group's workspace just before they are used, and only those of groups with rows.
 */
#include <inttypes.h>
#include <math.h>

#include "api/check.h"
#include "moe/moe.h"

#define MAX_EXPERTS 65536

dpl_status dpl_check_rule(const dpl_route_rule *rule)
{
    const size_t e = rule->n_experts, k = rule->top_k, groups = rule->n_groups;
    if (e < 1 || e > MAX_EXPERTS)
        return dpl_fail(DPL_EINVAL, "n_experts=%zu, expected 1 to %d", e, MAX_EXPERTS);
    if (k < 1 || k > e) return dpl_fail(DPL_EINVAL, "top_k=%zu, expected 1 to n_experts=%zu", k, e);
    if (groups < 1 || e % groups != 0)
        return dpl_fail(DPL_EINVAL, "n_groups=%zu, expected a divisor of n_experts=%zu", groups, e);
    if (rule->top_groups < 1 || rule->top_groups > groups)
        return dpl_fail(DPL_EINVAL, "top_groups=%zu, expected 1 to n_groups=%zu", rule->top_groups,
                        groups);
    if (k > rule->top_groups * (e / groups))
        return dpl_fail(DPL_EINVAL,
                        "top_k=%zu, expected at most the %zu experts of the top_groups=%zu groups",
                        k, rule->top_groups * (e / groups), rule->top_groups);
    if (rule->group_top2 && groups > 1 && e / groups < 2)
        return dpl_fail(DPL_EINVAL, "group_top2 with 1 expert a group, expected at least 2");
    if (!isfinite(rule->scale))
        return dpl_fail(DPL_EINVAL, "scale=%g, expected a finite number", (double)rule->scale);
    return DPL_OK;
}

dpl_status dpl_check_workspace(const void *ws, size_t ws_bytes, size_t needed)
{
    if (ws_bytes < needed)
        return dpl_fail(DPL_ENOSPC, "workspace of %zu bytes, expected at least %zu", ws_bytes,
                        needed);
    if (needed && (!ws || (uintptr_t)ws % DPL_ALIGN))
        return dpl_fail(DPL_EINVAL, "workspace at %p, expected an address that %d divides", ws,
                        DPL_ALIGN);
    return DPL_OK;
}

/* ---- grouped GEMM --------------------------------------------------------------------------- */

// Bytes of n_groups packed weights; false when sizes are zero or too large to address.
static bool packed_bytes(const dpl_gemm_grouped *g, size_t n_groups, size_t element, size_t *out)
{
    size_t elems;
    if (!g || g->n < 1 || g->k < 1 || n_groups < 1 || g->n > SIZE_MAX - DPL_PANEL) return false;
    return !__builtin_mul_overflow(dpl_round_up(g->n, DPL_PANEL), g->k, &elems) &&
           !__builtin_mul_overflow(elems, n_groups, &elems) &&
           !__builtin_mul_overflow(elems, element, out) && *out <= PTRDIFF_MAX;
}

size_t dpl_gemm_packed_bytes(const dpl_gemm_grouped *g)
{
    size_t bytes;
    return g && packed_bytes(g, g->n_groups, dpl_dtype_bytes(g->weights), &bytes) ? bytes : 0;
}

// One group in fp32 panels, and its bf16 copy where the class of compute is BF16.
size_t dpl_gemm_workspace_bytes(const dpl_gemm_grouped *g)
{
    size_t bytes;
    if (!g || !packed_bytes(g, 1, sizeof(float), &bytes)) return 0;
    return g->weights == DPL_BF16 ? bytes + bytes / 2 : bytes;
}

static bool is_dtype(dpl_dtype dtype)
{
    return dtype == DPL_F32 || dtype == DPL_BF16;
}

static dpl_status check_sizes(const dpl_ctx *ctx, const dpl_gemm_grouped *g)
{
    if (!ctx || !g) return dpl_fail(DPL_EINVAL, "grouped GEMM: ctx or g is NULL");
    if (!is_dtype(g->weights) || !is_dtype(g->tokens))
        return dpl_fail(DPL_EINVAL,
                        "grouped GEMM: tokens=%d, weights=%d, expected DPL_F32 or "
                        "DPL_BF16",
                        (int)g->tokens, (int)g->weights);
    if (!dpl_gemm_packed_bytes(g) || !dpl_gemm_workspace_bytes(g))
        return dpl_fail(DPL_EINVAL,
                        "grouped GEMM: %zu groups of (%zu, %zu), expected sizes from 1 "
                        "that can be addressed",
                        g->n_groups, g->n, g->k);
    return DPL_OK;
}

static dpl_status check_rows(const char *name, size_t n_rows, size_t ld, size_t width)
{
    size_t bytes;
    if (ld && ld < width)
        return dpl_fail(DPL_EINVAL, "grouped GEMM: %s=%zu, expected at least %zu, or 0", name, ld,
                        width);
    if (__builtin_mul_overflow(n_rows, ld ? ld : width, &bytes) || bytes > PTRDIFF_MAX / 4)
        return dpl_fail(DPL_EINVAL, "grouped GEMM: n_rows=%zu with %s=%zu cannot be addressed",
                        n_rows, name, ld ? ld : width);
    return DPL_OK;
}

static dpl_status check_gemm(const dpl_ctx *ctx, const dpl_gemm_grouped *g)
{
    DPL_TRY(check_sizes(ctx, g));
    DPL_TRY(check_rows("ld_x", g->n_rows, g->ld_x, g->k));
    DPL_TRY(check_rows("ld_y", g->n_rows, g->ld_y, g->n));
    if (!g->offsets) return dpl_fail(DPL_EINVAL, "grouped GEMM: offsets is NULL");
    if (g->offsets[0] != 0)
        return dpl_fail(DPL_EINVAL, "grouped GEMM: offsets[0]=%" PRId64 ", expected 0",
                        g->offsets[0]);
    for (size_t i = 0; i < g->n_groups; i++)
        if (g->offsets[i + 1] < g->offsets[i])
            return dpl_fail(DPL_EINVAL,
                            "grouped GEMM: group %zu ends at %" PRId64 " but starts at %" PRId64, i,
                            g->offsets[i + 1], g->offsets[i]);
    const int64_t last = g->offsets[g->n_groups];
    if ((uint64_t)last > g->n_rows)
        return dpl_fail(DPL_EINVAL,
                        "grouped GEMM: the last group ends at %" PRId64
                        ", expected at most n_rows=%zu",
                        last, g->n_rows);
    return DPL_OK;
}

// Group i of row-major `w` in panels of the class of compute, in the workspace.
static dpl_weight pack_group(dpl_ctx *ctx, const dpl_gemm_grouped *g, const float *w, size_t i,
                             float *ws)
{
    const size_t elems = dpl_panel_elems(g->n, g->k);
    uint16_t *copy = (uint16_t *)(ws + elems);
    dpl_panel_pack(ctx, w + i * g->n * g->k, 1, g->n, g->k, ws);
    if (g->weights == DPL_BF16) dpl_to_bf16(ctx, ws, elems, copy);
    return (dpl_weight){g->weights == DPL_BF16 ? (void *)copy : ws, g->weights, 1, g->n, g->k};
}

dpl_status dpl_gemm_pack(dpl_ctx *ctx, const dpl_gemm_grouped *g, const float *w, void *ws,
                         size_t ws_bytes, void *packed_out)
{
    DPL_TRY(check_sizes(ctx, g));
    DPL_TRY(dpl_check_workspace(ws, ws_bytes, dpl_gemm_workspace_bytes(g)));
    if (!w || !packed_out || (uintptr_t)packed_out % DPL_ALIGN)
        return dpl_fail(DPL_EINVAL,
                        "dpl_gemm_pack: w=%p, packed_out=%p, expected the latter at an "
                        "address that %d divides",
                        (const void *)w, packed_out, DPL_ALIGN);
    const size_t group_bytes = dpl_panel_elems(g->n, g->k) * dpl_dtype_bytes(g->weights);
    for (size_t i = 0; i < g->n_groups; i++) {
        const dpl_weight packed = pack_group(ctx, g, w, i, ws);
        dpl_ctx_read(ctx, (uint8_t *)packed_out + i * group_bytes, packed.p, group_bytes);
    }
    return DPL_OK;
}

static dpl_mat x_mat(const dpl_gemm_grouped *g, const void *p)
{
    return (dpl_mat){(void *)(uintptr_t)p, g->ld_x ? g->ld_x : g->k, g->tokens};
}

static dpl_mat y_mat(const dpl_gemm_grouped *g, const void *p)
{
    return (dpl_mat){(void *)(uintptr_t)p, g->ld_y ? g->ld_y : g->n, g->tokens};
}

static size_t group_rows(const dpl_gemm_grouped *g, size_t i)
{
    return (size_t)(g->offsets[i + 1] - g->offsets[i]);
}

typedef struct product { // from rows `in` by a weight to rows `out`
    dpl_mat in, out;
    void (*multiply)(dpl_ctx *ctx, dpl_mat in, const dpl_weight *w, dpl_groups groups, dpl_mat out);
} product;

static void multiply_dgrad(dpl_ctx *ctx, dpl_mat dy, const dpl_weight *w, dpl_groups groups,
                           dpl_mat dx)
{
    dpl_gemm_dgrad(ctx, dy, w, groups, dx, false);
}

static dpl_status run_product(dpl_ctx *ctx, const dpl_gemm_grouped *g, const product *p,
                              const void *w, void *ws, size_t ws_bytes)
{
    if (g->offsets[g->n_groups] == 0) return DPL_OK;
    if (!p->in.p || !w || !p->out.p) return dpl_fail(DPL_EINVAL, "grouped GEMM: a matrix is NULL");
    if (g->packed) {
        if ((uintptr_t)w % DPL_ALIGN)
            return dpl_fail(DPL_EINVAL,
                            "grouped GEMM: packed weights at %p, expected an address "
                            "that %d divides",
                            w, DPL_ALIGN);
        const dpl_weight weight = {w, g->weights, g->n_groups, g->n, g->k};
        p->multiply(ctx, p->in, &weight, (dpl_groups){g->n_groups, g->n_rows, g->offsets}, p->out);
        dpl_ctx_wait(ctx);
        return DPL_OK;
    }
    DPL_TRY(dpl_check_workspace(ws, ws_bytes, dpl_gemm_workspace_bytes(g)));
    for (size_t i = 0; i < g->n_groups; i++) {
        if (group_rows(g, i) == 0) continue;
        const size_t row = (size_t)g->offsets[i];
        const dpl_weight weight = pack_group(ctx, g, w, i, ws);
        p->multiply(ctx, dpl_mat_at(p->in, row, 0), &weight, dpl_one_group(group_rows(g, i)),
                    dpl_mat_at(p->out, row, 0));
        dpl_ctx_wait(ctx); // The workspace is used again.
    }
    return DPL_OK;
}

dpl_status dpl_gemm_grouped_forward(dpl_ctx *ctx, const dpl_gemm_grouped *g, const void *x,
                                    const void *w, void *ws, size_t ws_bytes, void *y_out)
{
    DPL_TRY(check_gemm(ctx, g));
    const product p = {x_mat(g, x), y_mat(g, y_out), dpl_gemm_forward};
    return run_product(ctx, g, &p, w, ws, ws_bytes);
}

dpl_status dpl_gemm_grouped_dgrad(dpl_ctx *ctx, const dpl_gemm_grouped *g, const void *dy,
                                  const void *w, void *ws, size_t ws_bytes, void *dx_out)
{
    DPL_TRY(check_gemm(ctx, g));
    const product p = {y_mat(g, dy), x_mat(g, dx_out), multiply_dgrad};
    return run_product(ctx, g, &p, w, ws, ws_bytes);
}

dpl_status dpl_gemm_grouped_wgrad(dpl_ctx *ctx, const dpl_gemm_grouped *g, const void *dy,
                                  const void *x, void *ws, size_t ws_bytes, float *dw)
{
    DPL_TRY(check_gemm(ctx, g));
    if (g->offsets[g->n_groups] == 0) return DPL_OK;
    if (!dy || !x || !dw) return dpl_fail(DPL_EINVAL, "grouped GEMM: a matrix is NULL");
    DPL_TRY(dpl_check_workspace(ws, ws_bytes, dpl_gemm_workspace_bytes(g)));
    for (size_t i = 0; i < g->n_groups; i++) {
        if (group_rows(g, i) == 0) continue;
        const size_t row = (size_t)g->offsets[i];
        float *group = dw + i * g->n * g->k;
        dpl_panel_pack(ctx, group, 1, g->n, g->k, ws);
        dpl_gemm_wgrad(ctx, dpl_mat_at(y_mat(g, dy), row, 0), dpl_mat_at(x_mat(g, x), row, 0),
                       dpl_one_group(group_rows(g, i)), g->n, g->k, g->weights, ws);
        dpl_panel_unpack(ctx, ws, 1, g->n, g->k, group);
        dpl_ctx_wait(ctx);
    }
    return DPL_OK;
}

/* ---- routing and permutation ---------------------------------------------------------------- */

static dpl_status check_routing(const dpl_ctx *ctx, const dpl_route_rule *rule, size_t n_tokens)
{
    if (!ctx || !rule) return dpl_fail(DPL_EINVAL, "routing: ctx or rule is NULL");
    DPL_TRY(dpl_check_rule(rule));
    if (n_tokens > (size_t)INT32_MAX / rule->top_k)
        return dpl_fail(DPL_EINVAL, "%zu tokens of %zu experts each, expected at most %d in all",
                        n_tokens, rule->top_k, INT32_MAX);
    return DPL_OK;
}

dpl_status dpl_router_route(dpl_ctx *ctx, const dpl_route_rule *rule, size_t n_tokens,
                            const float *logits, const float *bias, const int32_t *segment,
                            float *score_out, int32_t *ids_out, float *weights_out,
                            int64_t *counts_out)
{
    DPL_TRY(check_routing(ctx, rule, n_tokens));
    if (n_tokens && (!logits || !score_out || !ids_out || !weights_out))
        return dpl_fail(DPL_EINVAL, "dpl_router_route: a pointer is NULL");
    const size_t e = rule->n_experts;
    for (size_t i = 0; i < n_tokens * e; i++) // First, since outputs are written on success only.
        if (!isfinite(logits[i]) && !(segment && segment[i / e] == 0))
            return dpl_fail(DPL_ENUMERIC, "token %zu: the logit of expert %zu is NaN or infinite",
                            i / e, i % e);
    for (size_t i = 0; bias && i < e; i++)
        if (!isfinite(bias[i])) return dpl_fail(DPL_EINVAL, "bias[%zu] is NaN or infinite", i);
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
                                     float *dlogits_out)
{
    DPL_TRY(check_routing(ctx, rule, n_tokens));
    if (n_tokens && (!score || !ids || !dweights || !dlogits_out))
        return dpl_fail(DPL_EINVAL, "dpl_router_route_backward: a pointer is NULL");
    DPL_TRY(dpl_ep_check_ids(ids, n_tokens, rule->top_k, rule->n_experts));
    dpl_route_backward(ctx, rule, dweights, ids, score, n_tokens, dlogits_out);
    dpl_ctx_wait(ctx);
    return DPL_OK;
}

dpl_status dpl_moe_permute(dpl_ctx *ctx, const int32_t *ids, size_t n_tokens, size_t top_k,
                           size_t n_experts, int64_t *offsets_out, int32_t *slot_row_out,
                           int32_t *row_slot_out)
{
    if (!ctx || !offsets_out || (n_tokens && (!ids || !slot_row_out || !row_slot_out)))
        return dpl_fail(DPL_EINVAL, "dpl_moe_permute: a pointer is NULL");
    if (n_experts < 1 || n_experts > MAX_EXPERTS || top_k < 1 || top_k > n_experts)
        return dpl_fail(DPL_EINVAL,
                        "n_experts=%zu, top_k=%zu, expected 1 <= top_k <= n_experts <= "
                        "%d",
                        n_experts, top_k, MAX_EXPERTS);
    if (n_tokens > (size_t)INT32_MAX / top_k)
        return dpl_fail(DPL_EINVAL, "%zu tokens of %zu experts each, expected at most %d in all",
                        n_tokens, top_k, INT32_MAX);
    DPL_TRY(dpl_ep_check_ids(ids, n_tokens, top_k, n_experts));
    dpl_permute(ctx, ids, n_tokens * top_k, n_experts, offsets_out, slot_row_out, row_slot_out);
    dpl_ctx_wait(ctx);
    return DPL_OK;
}
