/*
 * gemm.c - the grouped GEMM y = x W^T over ragged groups of rows, with both of its gradients.
 *
 * All three are one blocked loop: an M x 32*P block of the result, contracted in blocks of at most
 * DPL_GEMM_KC, the left operand packed once per block and kept in L2, one right panel at a time in
 * L1. A flat list of such blocks over all groups is split by cost, so that one hot expert keeps all
 * threads busy and many small ones cost little more than reading their weights.
 */
#include "cpu/row_io.h"

#define LINE       64  // bytes that one fetch brings
#define M_BLOCK    256 // rows of the packed left operand: M_BLOCK * DPL_GEMM_KC floats in L2
#define M_SPLIT    64  // rows are not split finer than this for more tasks
#define P_ROUNDED  8   // panels of a block whose result is rounded to bf16 at the end
#define TASKS      2   // a thread gets about so many: more even, but more packing
#define COST_MIN   1e6 // multiply-adds, below which another task costs more than it brings
#define ROWS_BYTES 8   // reading a group's weight costs about as much as so many rows

typedef enum gemm_op { FORWARD, DGRAD, WGRAD } gemm_op;

typedef struct gemm_args {
    gemm_op op;
    dpl_mat left;  // forward: x, dgrad: dy, wgrad: x
    dpl_mat right; // wgrad: dy
    dpl_mat out;   // forward: y, dgrad: dx, wgrad: dw
    const void *weight;
    dpl_dtype operand; // the numeric class: dtype of the weight, or of both of wgrad's operands
    dpl_groups groups;
    size_t n, k;
    bool accumulate;
    size_t *first_task; // (groups + 1)
} gemm_args;

// One group's product: out (m, 32 * n_panels) = left (m, depth) * right (depth, 32 * n_panels).
typedef struct gemm_shape {
    size_t row, m, depth, n_cols, n_panels;
    size_t m_blocks, p_blocks;
} gemm_shape;

typedef struct gemm_run {
    const gemm_args *a;
    dpl_ctx *ctx;
    double cost_task;
} gemm_run;

// A block of one group's product, and where its result is accumulated.
typedef struct gemm_block {
    const gemm_args *a;
    const dpl_gemm_kernels *k;
    size_t group, row;
    size_t m0, m, p0, n_panels, depth, n_cols;
    float *c; // element (m0, first column of p0)
    size_t ldc, c_panel;
    float *packed_a, *packed_b, *rounded;
} gemm_block;

static size_t group_rows(const dpl_groups *groups, size_t g, size_t *row_out) {
    if (!groups->offsets) {
        *row_out = 0;
        return groups->n_rows;
    }
    *row_out = (size_t)groups->offsets[g];
    return (size_t)(groups->offsets[g + 1] - groups->offsets[g]);
}

static double group_cost(const gemm_args *a, size_t rows) {
    return rows ? (double)(rows + ROWS_BYTES) * (double)a->n * (double)a->k : 0;
}

// How a group is cut into blocks. The cut may follow the number of threads (through cost_task),
// because no element's chain depends on it.
static gemm_shape group_shape(const gemm_args *a, size_t g, double cost_task) {
    gemm_shape s = {0};
    const size_t rows = group_rows(&a->groups, g, &s.row);
    s.m = a->op == WGRAD ? a->k : rows;
    s.depth = a->op == FORWARD ? a->k : a->op == DGRAD ? a->n : rows;
    s.n_cols = a->op == DGRAD ? a->k : a->n;
    s.n_panels = dpl_div_up(s.n_cols, DPL_PANEL);
    if (rows == 0 || s.m == 0 || s.n_panels == 0) return s;

    const size_t p_most = a->out.dtype == DPL_BF16 ? P_ROUNDED : s.n_panels;
    const double tasks = group_cost(a, rows) / cost_task;
    s.m_blocks = dpl_div_up(s.m, M_BLOCK);
    s.p_blocks = dpl_div_up(s.n_panels, p_most);
    // Halve the longer side: a square block packs and reads the least for its work.
    while ((double)(s.m_blocks * s.p_blocks) < tasks) {
        const size_t height = s.m / s.m_blocks, width = s.n_cols / s.p_blocks;
        if (height >= 2 * M_SPLIT && height >= width) s.m_blocks *= 2;
        else if (width >= 2 * DPL_PANEL) s.p_blocks *= 2;
        else break;
    }
    return s;
}

// Contraction blocks are even, whole panels long, and depend on the depth only.
static size_t depth_step(size_t depth) {
    const size_t n = DPL_MAX(dpl_div_up(depth, DPL_GEMM_KC), 1);
    return DPL_MAX(dpl_round_up(dpl_div_up(depth, n), DPL_PANEL), 1);
}

static dpl_gemm_load load_of(dpl_dtype stored, dpl_dtype operand) {
    if (stored == DPL_BF16) return DPL_LOAD_BF16;
    return operand == DPL_BF16 ? DPL_LOAD_ROUNDED : DPL_LOAD_F32;
}

// Rows m0 .. m0+m of the block's tile i, evenly cut so that no tile is left with a row or two.
static size_t tile_first(const gemm_block *b, size_t i, size_t n_tiles) {
    return i * b->m / n_tiles;
}

static void pack_left(const gemm_block *b, size_t i, size_t n_tiles, size_t l0, size_t depth) {
    const gemm_args *a = b->a;
    const dpl_gemm_load load = load_of(a->left.dtype, a->operand);
    const size_t first = tile_first(b, i, n_tiles), m = tile_first(b, i + 1, n_tiles) - first;
    float *dst = b->packed_a + first * depth;
    if (a->op == WGRAD) {
        const dpl_mat x = dpl_mat_at(a->left, b->row + l0, b->m0 + first);
        b->k->pack_cols(load, m, depth, x.p, x.ld, m, dst);
    } else {
        const dpl_mat x = dpl_mat_at(a->left, b->row + b->m0 + first, l0);
        b->k->pack_rows(load, m, depth, x.p, x.ld, m, dst);
    }
}

// The right operand (depth, 32) of panel p from contraction index l0 on. An F32 weight is used in
// place.
static const float *right_panel(const gemm_block *b, size_t p, size_t l0, size_t depth) {
    const gemm_args *a = b->a;
    const size_t n_valid = DPL_MIN(b->n_cols - p * DPL_PANEL, (size_t)DPL_PANEL);
    if (a->op == WGRAD) {
        const dpl_mat dy = dpl_mat_at(a->right, b->row + l0, p * DPL_PANEL);
        b->k->pack_cols(load_of(dy.dtype, a->operand), n_valid, depth, dy.p, dy.ld, DPL_PANEL,
                        b->packed_b);
        return b->packed_b;
    }
    const dpl_mat w = {(void *)(uintptr_t)a->weight, DPL_PANEL, a->operand};
    const size_t group_row = b->group * dpl_div_up(a->n, DPL_PANEL) * a->k;
    const dpl_gemm_load load = load_of(a->operand, a->operand);
    if (a->op == FORWARD) {
        const void *src = dpl_mat_row(w, group_row + p * a->k + l0);
        if (a->operand == DPL_F32) return src;
        b->k->pack_cols(load, DPL_PANEL, depth, src, DPL_PANEL, DPL_PANEL, b->packed_b);
        return b->packed_b;
    }
    for (size_t l = 0; l < depth; l += DPL_PANEL) {
        const size_t panel = (l0 + l) / DPL_PANEL;
        const void *src = dpl_mat_row(w, group_row + panel * a->k + p * DPL_PANEL);
        b->k->pack_rows(load, n_valid, DPL_MIN(depth - l, (size_t)DPL_PANEL), src, DPL_PANEL,
                        DPL_PANEL, b->packed_b + l * DPL_PANEL);
    }
    return b->packed_b;
}

// What the i-th tile of panel p fetches for later. In wgrad, where both operands lie in short
// pieces: one line of each row of the next panel's right operand, or of the next left operand.
static dpl_gemm_ahead fetch_wgrad(const gemm_block *b, size_t p, size_t l0, size_t depth, size_t i,
                                  size_t n_tiles) {
    const dpl_mat dy = b->a->right, x = b->a->left;
    const size_t dy_elem = dpl_dtype_bytes(dy.dtype), x_elem = dpl_dtype_bytes(x.dtype);
    const size_t dy_lines = DPL_PANEL * dy_elem / LINE;
    if (i < dy_lines && p + 1 < b->p0 + b->n_panels) {
        const uint8_t *at = dpl_mat_at(dy, b->row + l0, (p + 1) * DPL_PANEL).p;
        return (dpl_gemm_ahead){at + i * LINE, dy.ld * dy_elem, depth, 0};
    }
    const size_t line = (p - b->p0) * n_tiles + i - dy_lines;
    if (i < dy_lines || l0 + depth >= b->depth || line * LINE >= b->m * x_elem)
        return (dpl_gemm_ahead){b->packed_b, 0, 1, 0};
    const uint8_t *at = dpl_mat_at(x, b->row + l0 + depth, b->m0).p;
    return (dpl_gemm_ahead){at + line * LINE, x.ld * x_elem, depth, 0};
}

// In forward and dgrad: the rows that the next tile packs, or this tile's part of the weight that
// the next panel uses.
static dpl_gemm_ahead fetch_ahead(const gemm_block *b, size_t p, size_t l0, size_t depth, size_t i,
                                  size_t n_tiles) {
    const gemm_args *a = b->a;
    if (a->op == WGRAD) return fetch_wgrad(b, p, l0, depth, i, n_tiles);
    if (p == b->p0 && i + 1 < n_tiles) {
        const dpl_mat x = dpl_mat_at(a->left, b->row + b->m0 + tile_first(b, i + 1, n_tiles), l0);
        const size_t elem = dpl_dtype_bytes(x.dtype), lines = dpl_div_up(depth * elem, LINE);
        return (dpl_gemm_ahead){x.p, LINE, lines, x.ld * elem - (lines - 1) * LINE};
    }
    const size_t row_bytes = DPL_PANEL * dpl_dtype_bytes(a->operand);
    size_t l = l0 + i * depth / n_tiles;
    if (++p == b->p0 + b->n_panels) p = b->p0, l += depth;
    if (l >= b->depth) return (dpl_gemm_ahead){b->packed_b, 0, 1, 0};
    const size_t group_row = b->group * dpl_div_up(a->n, DPL_PANEL) * a->k;
    const uint8_t *w = (const uint8_t *)a->weight + group_row * row_bytes;
    const size_t step_bytes = row_bytes / n_tiles;
    if (a->op == FORWARD)
        return (dpl_gemm_ahead){w + (p * a->k + l) * row_bytes, step_bytes, depth, 0};
    // 32 rows of each panel of n.
    return (dpl_gemm_ahead){
        w + (l / DPL_PANEL * a->k + p * DPL_PANEL) * row_bytes, step_bytes, DPL_PANEL * n_tiles,
        (DPL_MAX(a->k, (size_t)DPL_PANEL) - DPL_PANEL) * row_bytes + step_bytes};
}

// The left operand is packed on the way of the first panel, tile by tile: while one tile is
// multiplied, memory brings the next.
static void panel_product(const gemm_block *b, size_t p, size_t l0, size_t depth, size_t n_tiles) {
    const float *right = right_panel(b, p, l0, depth);
    const size_t n = DPL_MIN(b->n_cols - p * DPL_PANEL, (size_t)DPL_PANEL);
    float *c = b->c + (p - b->p0) * b->c_panel;
    for (size_t i = 0; i < n_tiles; ++i) {
        const size_t first = tile_first(b, i, n_tiles), m = tile_first(b, i + 1, n_tiles) - first;
        if (p == b->p0) pack_left(b, i, n_tiles, l0, depth);
        b->k->tile(m, n, depth, b->packed_a + first * depth, right, c + first * b->ldc, b->ldc,
                   l0 > 0 || b->a->accumulate, fetch_ahead(b, p, l0, depth, i, n_tiles));
    }
}

static void block_product(const gemm_block *b) {
    const size_t n_tiles = dpl_div_up(b->m, b->k->mr), step = depth_step(b->depth);
    size_t l0 = 0;
    do { // Once even if there is nothing to contract: the result is zero then.
        const size_t depth = DPL_MIN(b->depth - l0, step);
        for (size_t p = b->p0; p < b->p0 + b->n_panels; ++p)
            panel_product(b, p, l0, depth, n_tiles);
        l0 += depth;
    } while (l0 < b->depth);
}

static void store_rounded(const gemm_block *b, void (*to_bf16)(const float *, uint16_t *, size_t)) {
    for (size_t i = 0; i < b->m; ++i) {
        for (size_t p = 0; p < b->n_panels; ++p) {
            const size_t col = (b->p0 + p) * DPL_PANEL;
            to_bf16(b->c + p * b->c_panel + i * b->ldc,
                    dpl_mat_at(b->a->out, b->row + b->m0 + i, col).p,
                    DPL_MIN(b->n_cols - col, (size_t)DPL_PANEL));
        }
    }
}

static size_t find_group(const size_t *first_task, size_t n_groups, size_t task) {
    size_t low = 0, high = n_groups; // first_task[low] <= task < first_task[high]
    while (high - low > 1) {
        const size_t mid = (low + high) / 2;
        if (first_task[mid] <= task) low = mid;
        else high = mid;
    }
    return low;
}

static void run_task(void *arg, size_t i_task, int i_thread) {
    const gemm_run *run = arg;
    const gemm_args *a = run->a;
    const size_t g = find_group(a->first_task, a->groups.n, i_task);
    const gemm_shape s = group_shape(a, g, run->cost_task);
    const size_t i = i_task - a->first_task[g], i_m = i / s.p_blocks, i_p = i % s.p_blocks;
    float *scratch = dpl_ctx_scratch(run->ctx, i_thread);
    gemm_block b = {.a = a, .k = &run->ctx->kernels->gemm, .group = g, .row = s.row};

    b.m0 = i_m * s.m / s.m_blocks;
    b.m = (i_m + 1) * s.m / s.m_blocks - b.m0;
    b.p0 = i_p * s.n_panels / s.p_blocks;
    b.n_panels = (i_p + 1) * s.n_panels / s.p_blocks - b.p0;
    b.depth = s.depth;
    b.n_cols = s.n_cols;
    b.packed_b = scratch;
    b.packed_a = scratch + DPL_GEMM_KC * DPL_PANEL;
    if (a->op == WGRAD) {
        const size_t group_row = g * s.n_panels * a->k;
        b.c = dpl_mat_row(a->out, group_row + b.p0 * a->k + b.m0);
        b.ldc = DPL_PANEL;
        b.c_panel = DPL_PANEL * a->k;
    } else if (a->out.dtype == DPL_BF16) {
        b.c = b.packed_a + M_BLOCK * DPL_GEMM_KC;
        b.ldc = DPL_PANEL;
        b.c_panel = DPL_PANEL * b.m;
    } else {
        b.c = dpl_mat_at(a->out, s.row + b.m0, b.p0 * DPL_PANEL).p;
        b.ldc = a->out.ld;
        b.c_panel = DPL_PANEL;
    }
    block_product(&b);
    if (a->out.dtype == DPL_BF16) store_rounded(&b, run->ctx->kernels->rows.to_bf16);
}

static void run_gemm(dpl_ctx *ctx, const void *args) {
    const gemm_args *a = args;
    gemm_run run = {.a = a, .ctx = ctx};
    double cost = 0;
    size_t n_tasks = 0, row;
    for (size_t g = 0; g < a->groups.n; ++g) cost += group_cost(a, group_rows(&a->groups, g, &row));
    run.cost_task = DPL_MAX(cost / (TASKS * dpl_pool_threads(ctx->pool)), COST_MIN);
    for (size_t g = 0; g < a->groups.n; ++g) {
        const gemm_shape s = group_shape(a, g, run.cost_task);
        a->first_task[g] = n_tasks;
        n_tasks += s.m_blocks * s.p_blocks;
    }
    a->first_task[a->groups.n] = n_tasks;
    if (n_tasks) dpl_pool_run(ctx->pool, n_tasks, run_task, &run);
}

static void submit_gemm(dpl_ctx *ctx, gemm_args *a) {
    if (a->groups.n_rows == 0 || a->groups.n == 0 || a->n == 0 || a->k == 0) return;
    const size_t mark = dpl_ctx_mark(ctx);
    a->first_task = dpl_ctx_alloc(ctx, (a->groups.n + 1) * sizeof *a->first_task);
    const dpl_span span = dpl_row_span(a->out, a->groups.n_rows, a->op == FORWARD ? a->n : a->k);
    dpl_ctx_submit(ctx, run_gemm, a, sizeof *a, &span, a->accumulate ? 0 : 1);
    dpl_ctx_release(ctx, mark);
}

void dpl_gemm_forward(dpl_ctx *ctx, dpl_mat x, const dpl_weight *w, dpl_groups groups, dpl_mat y) {
    gemm_args a = {.op = FORWARD,
                   .left = x,
                   .out = y,
                   .weight = w->p,
                   .operand = w->dtype,
                   .groups = groups,
                   .n = w->n,
                   .k = w->k};
    submit_gemm(ctx, &a);
}

void dpl_gemm_dgrad(dpl_ctx *ctx, dpl_mat dy, const dpl_weight *w, dpl_groups groups, dpl_mat dx,
                    bool accumulate) {
    gemm_args a = {.op = DGRAD,
                   .left = dy,
                   .out = dx,
                   .weight = w->p,
                   .operand = w->dtype,
                   .groups = groups,
                   .n = w->n,
                   .k = w->k,
                   .accumulate = accumulate};
    submit_gemm(ctx, &a);
}

void dpl_gemm_wgrad(dpl_ctx *ctx, dpl_mat dy, dpl_mat x, dpl_groups groups, size_t n, size_t k,
                    dpl_dtype operand, float *dw) {
    gemm_args a = {.op = WGRAD,
                   .left = x,
                   .right = dy,
                   .out = dpl_mat_f32(dw, DPL_PANEL),
                   .operand = operand,
                   .groups = groups,
                   .n = n,
                   .k = k,
                   .accumulate = true};
    submit_gemm(ctx, &a);
}

/* ---- panels ---------------------------------------------------------------------------------- */

typedef struct panel_args {
    const float *src;
    float *dst;
    size_t n_groups, n, k;
    bool unpack;
} panel_args;

typedef struct panel_run {
    const panel_args *a;
    const dpl_gemm_kernels *k;
} panel_run;

static void panel_task(void *arg, size_t i_task, int i_thread) {
    const panel_run *run = arg;
    const panel_args *a = run->a;
    const size_t n_panels = dpl_div_up(a->n, DPL_PANEL);
    const size_t g = i_task / n_panels, p = i_task % n_panels;
    const size_t n = DPL_MIN(a->n - p * DPL_PANEL, (size_t)DPL_PANEL);
    const size_t plain = (g * a->n + p * DPL_PANEL) * a->k, panel = i_task * DPL_PANEL * a->k;
    (void)i_thread;
    if (a->unpack) {
        run->k->pack_rows(DPL_LOAD_F32, a->k, n, a->src + panel, DPL_PANEL, a->k, a->dst + plain);
    } else {
        run->k->pack_rows(DPL_LOAD_F32, n, a->k, a->src + plain, a->k, DPL_PANEL, a->dst + panel);
    }
}

static void run_panels(dpl_ctx *ctx, const void *args) {
    const panel_args *a = args;
    panel_run run = {a, &ctx->kernels->gemm};
    const size_t n_tasks = a->n_groups * dpl_div_up(a->n, DPL_PANEL);
    if (n_tasks) dpl_pool_run(ctx->pool, n_tasks, panel_task, &run);
}

void dpl_panel_pack(dpl_ctx *ctx, const float *src, size_t n_groups, size_t n, size_t k,
                    float *dst) {
    const panel_args a = {src, dst, n_groups, n, k, false};
    const dpl_span span = {dst, n_groups * dpl_panel_elems(n, k) * sizeof *dst};
    dpl_ctx_submit(ctx, run_panels, &a, sizeof a, &span, 1);
}

void dpl_panel_unpack(dpl_ctx *ctx, const float *src, size_t n_groups, size_t n, size_t k,
                      float *dst) {
    const panel_args a = {src, dst, n_groups, n, k, true};
    const dpl_span span = {dst, n_groups * n * k * sizeof *dst};
    dpl_ctx_submit(ctx, run_panels, &a, sizeof a, &span, 1);
}

/* ---- bias ------------------------------------------------------------------------------------ */

#define BIAS_ROWS 64 // rows that one fp32 partial sum takes
#define BIAS_COLS 64

typedef struct bias_args {
    const float *bias;
    float *dbias;
    size_t n_rows, n;
    dpl_mat y;
} bias_args;

typedef struct bias_run {
    const bias_args *a;
    const dpl_row_kernels *k;
} bias_run;

static void bias_rows(void *arg, size_t first, size_t count, size_t i_chunk, int i_thread) {
    const bias_run *run = arg;
    const bias_args *a = run->a;
    (void)i_chunk, (void)i_thread;
    for (size_t row = first; row < first + count; ++row) {
        for (size_t col = 0; col < a->n; col += BIAS_COLS) {
            const size_t n = DPL_MIN(a->n - col, (size_t)BIAS_COLS);
            const dpl_mat y = dpl_mat_at(a->y, row, col);
            float buffer[BIAS_COLS];
            const float *x = dpl_row_load(run->k, y, 0, n, buffer);
            float *sum = dpl_row_target(y, 0, buffer);
            run->k->add(x, a->bias + col, sum, n);
            dpl_row_store(run->k, y, 0, sum, n);
        }
    }
}

static void run_bias_forward(dpl_ctx *ctx, const void *args) {
    bias_run run = {args, &ctx->kernels->rows};
    dpl_ctx_rows(ctx, run.a->n_rows, dpl_row_grain(run.a->n * sizeof(float)), bias_rows, &run);
}

static void bias_cols(void *arg, size_t i_task, int i_thread) {
    const bias_run *run = arg;
    const bias_args *a = run->a;
    const size_t col = i_task * BIAS_COLS, n = DPL_MIN(a->n - col, (size_t)BIAS_COLS);
    double sum[BIAS_COLS] = {0};
    (void)i_thread;
    for (size_t row0 = 0; row0 < a->n_rows; row0 += BIAS_ROWS) {
        float part[BIAS_COLS] = {0}, buffer[BIAS_COLS];
        for (size_t row = row0; row < DPL_MIN(row0 + BIAS_ROWS, a->n_rows); ++row) {
            const float *dy = dpl_row_load(run->k, dpl_mat_at(a->y, row, col), 0, n, buffer);
            run->k->add(dy, part, part, n);
        }
        for (size_t j = 0; j < n; ++j) sum[j] += (double)part[j];
    }
    for (size_t j = 0; j < n; ++j) a->dbias[col + j] += (float)sum[j];
}

static void run_bias_backward(dpl_ctx *ctx, const void *args) {
    bias_run run = {args, &ctx->kernels->rows};
    if (run.a->n) dpl_pool_run(ctx->pool, dpl_div_up(run.a->n, BIAS_COLS), bias_cols, &run);
}

void dpl_bias_forward(dpl_ctx *ctx, const float *bias, size_t n_rows, size_t n, dpl_mat y) {
    const bias_args a = {.bias = bias, .n_rows = n_rows, .n = n, .y = y};
    dpl_ctx_submit(ctx, run_bias_forward, &a, sizeof a, NULL, 0);
}

void dpl_bias_backward(dpl_ctx *ctx, dpl_mat dy, size_t n_rows, size_t n, float *dbias) {
    const bias_args a = {.dbias = dbias, .n_rows = n_rows, .n = n, .y = dy};
    dpl_ctx_submit(ctx, run_bias_backward, &a, sizeof a, NULL, 0);
}
