// ep.c - section 3 of dropless.h, rows between ranks: what a layer does with its tokens, for any
// matrix of tokens.
//
// A handle owns two blocks of rows that the other ranks reach: one for the tokens that arrive, one
// for results and gradients on their way back. What is computed there is not copied again.
#include "api/api.h"

struct dpl_ep_group {
    dpl_ctx *ctx;
    dpl_ep_ranks ranks;
    size_t d, top_k;
    dpl_dtype dtype;
    int n_handles;
    bool closed; // by the caller
};

struct dpl_ep_handle {
    dpl_ep_group *group;
    dpl_ep ep;
    void *maps;
    int32_t *ids;
    dpl_mat block[2]; // (N, D)
    float *values[2]; // (N)
};

enum { ARRIVED, RETURNING }; // blocks

static dpl_status check_config(const dpl_ctx *ctx, const dpl_ep_config *config,
                               dpl_ep_group **group_out) {
    DPL_CHECK(ctx && config && group_out, "dpl_ep_group_open needs ctx && config && group_out");
    DPL_TRY(dpl_check_size("d", config->d, 1, (size_t)1 << 20));
    DPL_TRY(dpl_check_size("n_experts", config->n_experts, 1, 65536));
    DPL_TRY(dpl_check_size("top_k", config->top_k, 1, config->n_experts));
    return dpl_check_dtype("dtype", config->dtype);
}

// What is wrong on one rank is told to all, who are on their way to open it too.
dpl_status dpl_ep_group_open(dpl_ctx *ctx, dpl_comm *comm, const dpl_ep_config *config,
                             dpl_ep_group **group_out) {
    dpl_status status = check_config(ctx, config, group_out);
    const dpl_ep_config c = status == DPL_OK ? *config : (dpl_ep_config){.n_experts = 1};
    const uint64_t form = c.d << 32 | c.top_k << 8 | (uint64_t)c.dtype;
    dpl_ep_group *g = dpl_alloc(sizeof *g), none = {0};
    if (!g && status == DPL_OK) status = dpl_fail(DPL_ENOMEM, "no memory for a group of ranks");
    dpl_ep_group *opened = g ? g : &none;
    *opened = (dpl_ep_group){.ctx = ctx, .d = c.d, .top_k = c.top_k, .dtype = c.dtype};
    const int island = c.no_shared_memory ? -1 : 0;
    status = dpl_ep_ranks_open(ctx, comm, c.n_experts, c.n_local, island, form, status,
                               &opened->ranks);
    if (status == DPL_OK) {
        *group_out = g;
        return DPL_OK;
    }
    dpl_ep_ranks_close(&opened->ranks);
    dpl_free(g);
    return status;
}

// It lives on until its last handle is closed.
void dpl_ep_group_close(dpl_ep_group **group) {
    if (!group || !*group) return;
    dpl_ep_group *g = *group;
    *group = NULL;
    g->closed = true;
    if (g->n_handles > 0) return;
    dpl_ep_ranks_close(&g->ranks);
    dpl_free(g);
}

// The maps of a call, in one piece.
static dpl_status alloc_maps(dpl_ep_handle *h, size_t n_tokens) {
    const dpl_ep_group *g = h->group;
    dpl_moe_memory memory = {NULL, 0};
    dpl_ep_alloc(NULL, &memory, &g->ranks, g->top_k, n_tokens);
    const size_t ids_bytes = n_tokens * g->top_k * sizeof *h->ids;
    h->maps = dpl_alloc(memory.used_bytes + ids_bytes);
    if (!h->maps) return dpl_fail(DPL_ENOMEM, "no memory for the rows of %zu tokens", n_tokens);
    memory = (dpl_moe_memory){h->maps, 0};
    h->ep = dpl_ep_alloc(NULL, &memory, &g->ranks, g->top_k, n_tokens);
    h->ids = (int32_t *)(void *)((uint8_t *)h->maps + memory.used_bytes);
    return DPL_OK;
}

// With one rank the blocks are memory of this process, else of the window.
static dpl_status alloc_blocks(dpl_ep_handle *h) {
    const dpl_ep_group *g = h->group;
    for (int i = 0; i < 2; i++) {
        if (dpl_ep_is_spread(&g->ranks)) {
            DPL_TRY(dpl_ep_rows_alloc(&h->ep, g->d, g->dtype, &h->block[i], &h->values[i]));
            continue;
        }
        h->block[i] = (dpl_mat){dpl_alloc_array(h->ep.n_rows, g->d * dpl_dtype_bytes(g->dtype)),
                                g->d, g->dtype};
        h->values[i] = dpl_alloc_array(h->ep.n_rows, sizeof(float));
        DPL_EXPECT(h->block[i].p && h->values[i], DPL_ENOMEM, "no memory for %zu rows",
                   h->ep.n_rows);
    }
    return DPL_OK;
}

static void release(dpl_ep_handle *h) {
    dpl_ep_group *g = h->group;
    for (int i = 0; i < 2; i++) {
        if (dpl_ep_is_spread(&g->ranks)) {
            dpl_ep_rows_free(&h->ep, h->block[i].p);
            continue;
        }
        dpl_free(h->block[i].p);
        dpl_free(h->values[i]);
    }
    dpl_free(h->maps);
    if (--g->n_handles == 0 && g->closed) dpl_ep_group_close(&g);
}

dpl_status dpl_ep_prepare(dpl_ep_group *g, const int32_t *ids, size_t n_tokens,
                          dpl_ep_handle **handle_out) {
    DPL_NEED(g);
    dpl_status status = DPL_OK;
    dpl_ep_handle *h = dpl_alloc(sizeof *h), none = {0};
    if (!h) status = dpl_fail(DPL_ENOMEM, "no memory for a handle");
    dpl_ep_handle *made = h ? h : &none;
    made->group = g;
    g->n_handles++;
    if (status == DPL_OK && (!handle_out || (!ids && n_tokens > 0)))
        status = dpl_fail(DPL_EINVAL, "dpl_ep_prepare needs ids && handle_out");
    if (status == DPL_OK) status = dpl_ep_check_slots(n_tokens, g->top_k);
    if (status == DPL_OK) status = dpl_ep_check_ids(ids, n_tokens, g->top_k, g->ranks.n_experts);
    if (status == DPL_OK) status = alloc_maps(made, n_tokens);
    if (status == DPL_OK && n_tokens > 0) memcpy(made->ids, ids, n_tokens * g->top_k * sizeof *ids);
    status = dpl_comm_agree(g->ranks.comm, status);
    if (status == DPL_OK) status = dpl_moe_prepare(g->ctx, made->ids, DPL_OK, &made->ep, NULL);
    if (status == DPL_OK) status = dpl_comm_agree(g->ranks.comm, alloc_blocks(made));
    if (status == DPL_OK) {
        *handle_out = h;
        return DPL_OK;
    }
    release(made);
    dpl_free(h);
    return status;
}

void dpl_ep_handle_close(dpl_ep_handle **handle) {
    if (!handle || !*handle) return;
    dpl_ep_handle *h = *handle;
    release(h);
    dpl_free(h);
    *handle = NULL;
}

dpl_status dpl_ep_get_rows(const dpl_ep_handle *h, dpl_ep_rows *rows_out) {
    DPL_NEED(h && rows_out);
    *rows_out = (dpl_ep_rows){h->ep.n_rows,        h->ep.n_local,      h->ep.chunks[0].offsets,
                              h->block[ARRIVED].p, h->values[ARRIVED], h->block[RETURNING].p,
                              h->values[RETURNING]};
    return DPL_OK;
}

// The ranks are in step only if all of them come: a wrong argument is told to the others.
static dpl_status dispatch(dpl_ep_handle *h, int block, const void *x, size_t ld_x,
                           const float *weights, dpl_ep_numbers numbers) {
    const dpl_ep_group *g = h->group;
    dpl_mat from = {0};
    dpl_status status = dpl_check_mat("tokens", x, ld_x, g->d, h->ep.n_tokens, g->dtype, &from);
    status = dpl_moe_dispatch(g->ctx, &h->ep, status, from, weights, numbers, g->d, h->block[block],
                              h->values[block]);
    dpl_ctx_wait(g->ctx);
    return status;
}

dpl_status dpl_ep_dispatch(dpl_ep_handle *h, const void *x, size_t ld_x, const float *weights) {
    DPL_NEED(h);
    const dpl_ep_numbers none = h->ep.n_tokens == 0 ? DPL_EP_ANY : DPL_EP_NONE;
    return dispatch(h, ARRIVED, x, ld_x, weights, weights ? DPL_EP_WANTED : none);
}

dpl_status dpl_ep_combine_backward(dpl_ep_handle *h, const void *dy, size_t ld_dy) {
    DPL_NEED(h);
    return dispatch(h, RETURNING, dy, ld_dy, NULL, DPL_EP_NONE);
}

// Rows that others are to read lie in a block of the handle, or are copied to the one for that; and
// so do numbers.
static dpl_mat reachable_rows(const dpl_ep_handle *h, const void *rows) {
    const dpl_ep_group *g = h->group;
    if (rows == h->block[ARRIVED].p) return h->block[ARRIVED];
    if (rows != h->block[RETURNING].p)
        dpl_copy(g->ctx, (dpl_mat){(void *)(uintptr_t)rows, g->d, g->dtype}, h->ep.n_rows, g->d,
                 h->block[RETURNING]);
    return h->block[RETURNING];
}

static float *reachable_values(const dpl_ep_handle *h, const float *values) {
    if (values == h->values[ARRIVED]) return h->values[ARRIVED];
    if (values && values != h->values[RETURNING])
        dpl_copy(h->group->ctx, dpl_mat_f32(values, 1), h->ep.n_rows, 1,
                 dpl_mat_f32(h->values[RETURNING], 1));
    return h->values[RETURNING];
}

static dpl_status combine(dpl_ep_handle *h, dpl_status status, const void *rows,
                          const float *values, dpl_ep_numbers numbers, dpl_dtype dtype, void *y,
                          size_t ld_y, float *slot_value) {
    const dpl_ep_group *g = h->group;
    dpl_mat to = {0}, from = h->block[RETURNING];
    if (status == DPL_OK)
        status = dpl_check_mat("the sums", y, ld_y, g->d, h->ep.n_tokens, dtype, &to);
    if (status == DPL_OK && !rows && h->ep.n_rows > 0)
        status = dpl_fail(DPL_EINVAL, "rows is NULL");
    if (status == DPL_OK && h->ep.n_rows > 0) from = reachable_rows(h, rows);
    float *const from_values = reachable_values(h, status == DPL_OK ? values : NULL);
    status = dpl_moe_combine(g->ctx, &h->ep, status, from,
                             numbers == DPL_EP_NONE ? NULL : from_values, numbers, g->d, false, to,
                             slot_value);
    dpl_ctx_wait(g->ctx);
    return status;
}

dpl_status dpl_ep_combine(dpl_ep_handle *h, const void *rows, void *y_out, size_t ld_y) {
    DPL_NEED(h);
    return combine(h, DPL_OK, rows, NULL, DPL_EP_NONE, h->group->dtype, y_out, ld_y, NULL);
}

dpl_status dpl_ep_dispatch_backward(dpl_ep_handle *h, const void *drows, const float *drow_weights,
                                    float *dx_out, size_t ld_dx, float *dweights_out) {
    DPL_NEED(h);
    // An array of no numbers may be NULL.
    const bool gives = drow_weights || h->ep.n_rows == 0;
    const bool takes = dweights_out || h->ep.n_tokens == 0;
    dpl_ep_numbers numbers = drow_weights || dweights_out ? DPL_EP_WANTED : DPL_EP_NONE;
    dpl_status status = DPL_OK;
    if (numbers == DPL_EP_NONE && gives && takes) numbers = DPL_EP_ANY;
    if (numbers == DPL_EP_WANTED && !(gives && takes))
        status = dpl_fail(DPL_EINVAL, "one of drow_weights and dweights_out is NULL, expected "
                                      "neither or both");
    return combine(h, status, drows, drow_weights, numbers, DPL_F32, dx_out, ld_dx, dweights_out);
}
