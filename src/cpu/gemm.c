// gemm.c - the grouped GEMM y = x W^T over ragged groups of rows, with both of its gradients.
//
// All three are one blocked loop: an M x 32*P block of the result, contracted in blocks of at most
// DPL_GEMM_KC, the left operand packed once per block and kept in L2, one right panel at a time in
// L1. A flat list of such blocks over all groups is split by cost, so that one hot expert keeps all
// threads busy and many small ones cost little more than reading their weights.
#include "cpu/row_io.h"

#define LINE       64  // bytes that one fetch brings
#define M_BLOCK    256 // rows of the packed left operand: M_BLOCK * DPL_GEMM_KC floats in L2
#define M_SPLIT    64  // rows are not split finer than this for more tasks
#define P_ROUNDED  8   // panels of a block whose result is rounded to bf16 at the end
#define TASKS      2   // a thread gets about so many: more even, but more packing
#define COST_MIN   1e6 // multiply-adds, below which another task costs more than it brings
#define ROWS_BYTES 8   // reading a group's weight costs about as much as so many rows

typedef enum gemm_op { FORWARD, DGRAD, WGRAD } gemm_op;

// How a group is cut into blocks, each a task.
typedef struct gemm_cut {
    size_t first_task, m_blocks, p_blocks;
} gemm_cut;

typedef struct gemm_args {
    gemm_op op;
    dpl_mat left, right, out; // forward: x, w, y; dgrad: dy, w, dx; wgrad: x, dy, dw
    dpl_dtype operand; // the numeric class: dtype of the weight, or of both of wgrad's operands
    dpl_groups groups;
    size_t n, k;
    bool accumulate;
    gemm_cut *cuts; // (groups + 1)
} gemm_args;

// A block of one group's product, out (m, 32 * n_panels) = left (m, depth) * right (depth, 32 *
// n_panels), and where its result is accumulated.
typedef struct gemm_block {
    const gemm_args *a;
    const dpl_gemm_kernels *g;
    size_t row, n_rows; // of the group
    size_t weight_row;  // its first row of 32 in a weight or weight gradient
    size_t m0, m, p0, n_panels, depth, n_cols;
    size_t n_tiles; // of m
    float *c;       // element (m0, first column of p0)
    size_t ldc, c_panel;
    float *packed_a, *packed_b;
} gemm_block;

/* ---- cutting into tasks ---------------------------------------------------------------------- */
// All of a group as one block.
static gemm_block whole_group(const gemm_args *a, size_t g) {
    const int64_t *offsets = a->groups.offsets;
    gemm_block b = {.a = a, .n_rows = a->groups.n_rows};
    if (offsets) {
        b.row = (size_t)offsets[g];
        b.n_rows = (size_t)offsets[g + 1] - b.row;
    }
    b.weight_row = g * dpl_div_up(a->n, DPL_PANEL) * a->k;
    b.m = a->op == WGRAD ? a->k : b.n_rows;
    b.depth = a->op == FORWARD ? a->k : a->op == DGRAD ? a->n : b.n_rows;
    b.n_cols = a->op == DGRAD ? a->k : a->n;
    b.n_panels = dpl_div_up(b.n_cols, DPL_PANEL);
    return b;
}

static double group_cost(const gemm_block *b) {
    return b->n_rows ? (double)(b->n_rows + ROWS_BYTES) * (double)b->a->n * (double)b->a->k : 0;
}

// The cut may follow the number of threads (through cost_task), because no element's chain depends
// on it.
static gemm_cut cut_group(const gemm_block *b, double cost_task, size_t first_task) {
    if (b->n_rows == 0) return (gemm_cut){first_task, 0, 0};
    const size_t p_most = b->a->out.dtype == DPL_BF16 ? P_ROUNDED : b->n_panels;
    gemm_cut cut = {first_task, dpl_div_up(b->m, M_BLOCK), dpl_div_up(b->n_panels, p_most)};
    const double tasks = group_cost(b) / cost_task;
    // Halve the longer side: a square block packs and reads the least for its work.
    while ((double)(cut.m_blocks * cut.p_blocks) < tasks) {
        const size_t height = b->m / cut.m_blocks, width = b->n_cols / cut.p_blocks;
        if (height >= 2 * M_SPLIT && height >= width) cut.m_blocks *= 2;
        else if (width >= 2 * DPL_PANEL) cut.p_blocks *= 2;
        else break;
    }
    return cut;
}

static size_t find_group(const gemm_args *a, size_t task) {
    size_t low = 0, high = a->groups.n; // first_task of low <= task < first_task of high
    while (high - low > 1) {
        const size_t mid = (low + high) / 2;
        if (a->cuts[mid].first_task <= task) low = mid;
        else high = mid;
    }
    return low;
}

/* ---- one block ------------------------------------------------------------------------------- */
static dpl_gemm_load load_of(dpl_dtype stored, dpl_dtype operand) {
    if (stored == DPL_BF16) return DPL_LOAD_BF16;
    return operand == DPL_BF16 ? DPL_LOAD_ROUNDED : DPL_LOAD_F32;
}

// Rows of the block's tile i start here, evenly cut so that no tile is left with a row or two.
static size_t tile_first(const gemm_block *b, size_t i) {
    return i * b->m / b->n_tiles;
}

// The left operand as it is stored, from row i of the block and contraction index l on.
static dpl_mat left_at(const gemm_block *b, size_t i, size_t l) {
    if (b->a->op == WGRAD) return dpl_mat_at(b->a->left, b->row + l, b->m0 + i);
    return dpl_mat_at(b->a->left, b->row + b->m0 + i, l);
}

// The right operand of panel p from contraction index l on. In dgrad it goes on for the rest of a
// panel of n only.
static dpl_mat right_at(const gemm_block *b, size_t p, size_t l) {
    const gemm_args *a = b->a;
    if (a->op == WGRAD) return dpl_mat_at(a->right, b->row + l, p * DPL_PANEL);
    const size_t row = a->op == FORWARD ? p * a->k + l : l / DPL_PANEL * a->k + p * DPL_PANEL;
    return dpl_mat_at(a->right, b->weight_row + row, 0);
}

static size_t panel_cols(const gemm_block *b, size_t p) {
    return DPL_MIN(b->n_cols - p * DPL_PANEL, (size_t)DPL_PANEL);
}

static void pack_left(const gemm_block *b, size_t first, size_t m, size_t l0, size_t depth) {
    const dpl_mat x = left_at(b, first, l0);
    (b->a->op == WGRAD ? b->g->pack_cols : b->g->pack_rows)(
        load_of(x.dtype, b->a->operand), m, depth, x.p, x.ld, m, b->packed_a + first * depth);
}

// The right operand (depth, 32) of panel p from contraction index l0 on. An F32 weight is used in
// place.
static const float *right_panel(const gemm_block *b, size_t p, size_t l0, size_t depth) {
    const gemm_args *a = b->a;
    const size_t n = panel_cols(b, p);
    const dpl_mat from = right_at(b, p, l0);
    const dpl_gemm_load load = load_of(from.dtype, a->operand);
    if (a->op == FORWARD && load == DPL_LOAD_F32) return from.p;
    if (a->op != DGRAD) {
        b->g->pack_cols(load, n, depth, from.p, from.ld, DPL_PANEL, b->packed_b);
        return b->packed_b;
    }
    for (size_t l = 0; l < depth; l += DPL_PANEL)
        b->g->pack_rows(load, n, DPL_MIN(depth - l, (size_t)DPL_PANEL), right_at(b, p, l0 + l).p,
                        DPL_PANEL, DPL_PANEL, b->packed_b + l * DPL_PANEL);
    return b->packed_b;
}

// A line of each of `run` rows of m, from byte `at` of its first row on.
static dpl_gemm_ahead fetch_rows(dpl_mat m, size_t at, size_t run) {
    return (dpl_gemm_ahead){(const uint8_t *)m.p + at, m.ld * dpl_dtype_bytes(m.dtype), run, 0};
}

// What the i-th tile of panel p fetches for later. In wgrad, where both operands lie in short
// pieces: one line of each row of the next panel's right operand, or of the next left operand.
static dpl_gemm_ahead fetch_wgrad(const gemm_block *b, size_t p, size_t l0, size_t depth,
                                  size_t i) {
    const size_t right_lines = DPL_PANEL * dpl_dtype_bytes(b->a->right.dtype) / LINE;
    const size_t left_bytes = b->m * dpl_dtype_bytes(b->a->left.dtype);
    if (i < right_lines) {
        if (p + 1 < b->p0 + b->n_panels) return fetch_rows(right_at(b, p + 1, l0), i * LINE, depth);
    } else {
        const size_t at = ((p - b->p0) * b->n_tiles + i - right_lines) * LINE;
        if (l0 + depth < b->depth && at < left_bytes)
            return fetch_rows(left_at(b, 0, l0 + depth), at, depth);
    }
    return (dpl_gemm_ahead){b->packed_b, 0, 1, 0};
}

// In forward and dgrad: the rows that the next tile packs, or this tile's part of the weight that
// the next panel uses.
static dpl_gemm_ahead fetch_ahead(const gemm_block *b, size_t p, size_t l0, size_t depth,
                                  size_t i) {
    const gemm_args *a = b->a;
    if (a->op == WGRAD) return fetch_wgrad(b, p, l0, depth, i);
    if (p == b->p0 && i + 1 < b->n_tiles) {
        const dpl_mat x = left_at(b, tile_first(b, i + 1), l0);
        const size_t elem = dpl_dtype_bytes(x.dtype), lines = dpl_div_up(depth * elem, LINE);
        return (dpl_gemm_ahead){x.p, LINE, lines, x.ld * elem - (lines - 1) * LINE};
    }
    size_t l = l0 + i * depth / b->n_tiles;
    if (++p == b->p0 + b->n_panels) p = b->p0, l += depth;
    if (l >= b->depth) return (dpl_gemm_ahead){b->packed_b, 0, 1, 0};
    const dpl_mat w = right_at(b, p, l);
    const size_t row_bytes = DPL_PANEL * dpl_dtype_bytes(w.dtype), step = row_bytes / b->n_tiles;
    if (a->op == FORWARD) return (dpl_gemm_ahead){w.p, step, depth, 0};
    // 32 rows of each panel of n.
    const size_t others = DPL_MAX(a->k, (size_t)DPL_PANEL) - DPL_PANEL;
    return (dpl_gemm_ahead){w.p, step, DPL_PANEL * b->n_tiles, others * row_bytes + step};
}

// The left operand is packed on the way of the first panel, tile by tile: while one tile is
// multiplied, memory brings the next.
static void panel_product(const gemm_block *b, size_t p, size_t l0, size_t depth) {
    const float *right = right_panel(b, p, l0, depth);
    float *c = b->c + (p - b->p0) * b->c_panel;
    for (size_t i = 0; i < b->n_tiles; ++i) {
        const size_t first = tile_first(b, i), m = tile_first(b, i + 1) - first;
        if (p == b->p0) pack_left(b, first, m, l0, depth);
        b->g->tile(m, panel_cols(b, p), depth, b->packed_a + first * depth, right,
                   c + first * b->ldc, b->ldc, l0 > 0 || b->a->accumulate,
                   fetch_ahead(b, p, l0, depth, i));
    }
}

// Contraction blocks are even, whole panels long, and depend on the depth only.
static void block_product(const gemm_block *b) {
    const size_t n = dpl_div_up(b->depth, DPL_GEMM_KC);
    const size_t step = dpl_round_up(dpl_div_up(b->depth, n), DPL_PANEL);
    for (size_t l0 = 0; l0 < b->depth; l0 += step)
        for (size_t p = b->p0; p < b->p0 + b->n_panels; ++p)
            panel_product(b, p, l0, DPL_MIN(b->depth - l0, step));
}

static void store_rounded(const gemm_block *b, const dpl_row_kernels *k) {
    for (size_t i = 0; i < b->m; ++i)
        for (size_t p = 0; p < b->n_panels; ++p) {
            const dpl_mat to = dpl_mat_at(b->a->out, b->row + b->m0 + i, (b->p0 + p) * DPL_PANEL);
            k->to_bf16(b->c + p * b->c_panel + i * b->ldc, to.p, panel_cols(b, b->p0 + p));
        }
}

static void run_task(const void *args, const dpl_part *part) {
    const gemm_args *a = args;
    const size_t g = find_group(a, part->i);
    const gemm_cut cut = a->cuts[g];
    const size_t i = part->i - cut.first_task, i_m = i / cut.p_blocks, i_p = i % cut.p_blocks;
    gemm_block b = whole_group(a, g);
    b.m0 = i_m * b.m / cut.m_blocks;
    b.m = (i_m + 1) * b.m / cut.m_blocks - b.m0;
    b.p0 = i_p * b.n_panels / cut.p_blocks;
    b.n_panels = (i_p + 1) * b.n_panels / cut.p_blocks - b.p0;
    b.g = part->g;
    b.n_tiles = dpl_div_up(b.m, b.g->mr);
    b.packed_b = part->scratch;
    b.packed_a = b.packed_b + DPL_GEMM_KC * DPL_PANEL;
    b.ldc = DPL_PANEL;
    if (a->op == WGRAD) {
        b.c = dpl_mat_row(a->out, b.weight_row + b.p0 * a->k + b.m0);
        b.c_panel = DPL_PANEL * a->k;
    } else if (a->out.dtype == DPL_BF16) {
        b.c = b.packed_a + M_BLOCK * DPL_GEMM_KC;
        b.c_panel = DPL_PANEL * b.m;
    } else {
        b.c = dpl_mat_at(a->out, b.row + b.m0, b.p0 * DPL_PANEL).p;
        b.ldc = a->out.ld;
        b.c_panel = DPL_PANEL;
    }
    block_product(&b);
    if (a->out.dtype == DPL_BF16) store_rounded(&b, part->k);
}

/* ---- operators ------------------------------------------------------------------------------- */
static void run_gemm(dpl_ctx *ctx, const void *args) {
    const gemm_args *a = args;
    double cost = 0;
    size_t n_tasks = 0;
    for (size_t g = 0; g < a->groups.n; ++g) {
        const gemm_block b = whole_group(a, g);
        cost += group_cost(&b);
    }
    const double cost_task = DPL_MAX(cost / (TASKS * dpl_pool_threads(ctx->pool)), COST_MIN);
    for (size_t g = 0; g < a->groups.n; ++g) {
        const gemm_block b = whole_group(a, g);
        a->cuts[g] = cut_group(&b, cost_task, n_tasks);
        n_tasks += a->cuts[g].m_blocks * a->cuts[g].p_blocks;
    }
    dpl_ctx_loop(ctx, (dpl_loop){run_task, n_tasks, 1}, a);
}

static void submit_gemm(dpl_ctx *ctx, gemm_args a) {
    if (a.groups.n_rows == 0 || a.groups.n == 0 || a.n == 0 || a.k == 0) return;
    const size_t mark = dpl_ctx_mark(ctx);
    a.cuts = dpl_ctx_alloc(ctx, a.groups.n * sizeof *a.cuts);
    const dpl_span span = dpl_row_span(a.out, a.groups.n_rows, a.op == FORWARD ? a.n : a.k);
    DPL_SUBMIT(ctx, run_gemm, a, a.accumulate ? (dpl_span){0} : span);
    dpl_ctx_release(ctx, mark);
}

static void submit_with_weight(dpl_ctx *ctx, gemm_op op, dpl_mat left, const dpl_weight *w,
                               dpl_groups groups, dpl_mat out, bool accumulate) {
    const dpl_mat right = {(void *)(uintptr_t)w->p, DPL_PANEL, w->dtype};
    submit_gemm(ctx,
                (gemm_args){op, left, right, out, w->dtype, groups, w->n, w->k, accumulate, NULL});
}

void dpl_gemm_forward(dpl_ctx *ctx, dpl_mat x, const dpl_weight *w, dpl_groups groups, dpl_mat y) {
    submit_with_weight(ctx, FORWARD, x, w, groups, y, false);
}

void dpl_gemm_dgrad(dpl_ctx *ctx, dpl_mat dy, const dpl_weight *w, dpl_groups groups, dpl_mat dx,
                    bool accumulate) {
    submit_with_weight(ctx, DGRAD, dy, w, groups, dx, accumulate);
}

void dpl_gemm_wgrad(dpl_ctx *ctx, dpl_mat dy, dpl_mat x, dpl_groups groups, size_t n, size_t k,
                    dpl_dtype operand, float *dw) {
    const dpl_mat out = dpl_mat_f32(dw, DPL_PANEL);
    submit_gemm(ctx, (gemm_args){WGRAD, x, dy, out, operand, groups, n, k, true, NULL});
}

/* ---- panels ---------------------------------------------------------------------------------- */
typedef struct panel_args {
    dpl_loop loop;
    float *rows, *panels;
    size_t n, k;
    bool unpack;
} panel_args;

static void copy_panel(const void *args, const dpl_part *part) {
    const panel_args *a = args;
    const size_t first = part->i * DPL_PANEL, n = DPL_MIN(a->n - first, (size_t)DPL_PANEL);
    float *rows = a->rows + first * a->k, *panel = a->panels + first * a->k;
    if (a->unpack) part->g->pack_rows(DPL_LOAD_F32, a->k, n, panel, DPL_PANEL, a->k, rows);
    else part->g->pack_rows(DPL_LOAD_F32, n, a->k, rows, a->k, DPL_PANEL, panel);
}

void dpl_panel_pack(dpl_ctx *ctx, const float *rows, size_t n, size_t k, float *panels) {
    const dpl_loop loop = {copy_panel, dpl_div_up(n, DPL_PANEL), 1};
    const panel_args a = {loop, (float *)(uintptr_t)rows, panels, n, k, false};
    DPL_SUBMIT(ctx, dpl_run_loop, a, {panels, dpl_panel_elems(n, k) * sizeof *panels});
}

void dpl_panel_unpack(dpl_ctx *ctx, const float *panels, size_t n, size_t k, float *rows) {
    const dpl_loop loop = {copy_panel, dpl_div_up(n, DPL_PANEL), 1};
    const panel_args a = {loop, rows, (float *)(uintptr_t)panels, n, k, true};
    DPL_SUBMIT(ctx, dpl_run_loop, a, {rows, n * k * sizeof *rows});
}
