// gemm.c - the grouped GEMM y = x W^T over ragged groups of rows, with both of its gradients.
//
// All three are one blocked loop: an M x 32*P block of the result. The left operand is packed once
// per block and kept in L2; for each panel of 32 columns the right one goes by in chunks that fit
// in L1 (weights are used where they lie, if their order allows), and the panel's sums stay near
// until they are complete. A flat list of such blocks over all groups is split by cost, so that one
// hot expert keeps all threads busy and many small ones cost little more than reading their
// weights.
#include "cpu/quant.h"
#include "cpu/row_io.h"

#define LINE       64 // bytes that one fetch brings
#define PAGE       ((size_t)4096)
#define MANY_TILES 8 // of a block: fewer pages at a time
#define FEW_ROWS   5
#define M_BLOCK    256 // rows of a block, at most
#define M_LEAST    64  // rows of a block, where there are as many
#define M_SPLIT    32  // rows are not split finer than this for more tasks
#define P_SUMS     32  // panels of a block whose sums have to wait for more of the contraction
#define TASKS      2   // a thread gets about so many: more even, but more packing
#define COST_MIN   1e6 // multiply-adds, below which another task costs more than it brings
#define ROWS_BYTES 8   // reading a group's weight costs about as much as so many rows
#define CODE_ROWS  16  // a tile of codes has no more
#define P_ZERO     8   // panels that one task zeroes in the gradient of a group without rows

typedef enum gemm_op { FORWARD, DGRAD, WGRAD } gemm_op;

// How a group is cut into blocks, each a task.
typedef struct gemm_cut {
    size_t first_task, m_blocks, p_blocks;
} gemm_cut;

// What becomes of a complete panel instead of being stored: in forward, SwiGLU of it, beside; in
// dgrad, as the gradient of hidden, that of gate_up.
typedef struct gemm_swiglu {
    dpl_mat mat; // forward: hidden; dgrad: gate_up; p NULL: a plain product
    size_t f;
    const float *row_weight;
    float *sums, *drow_weight; // dgrad: (rows, panels), of each panel; of all, or both NULL
} gemm_swiglu;

typedef struct gemm_args {
    gemm_op op;
    dpl_mat left, right, out;  // forward: x, w, y; dgrad: dy, w, dx; wgrad: x, dy, dw
    const dpl_gemm_kernels *g; // of the operands' class
    size_t n_parts;            // of each operand: more than 1 for fp32 made of bf16
    bool quantized; // operands are numbers of codes: of this weight's, on the left of codes too
                    // but where MXFP8 rounds rows as they are packed
    dpl_quant_weight quant;
    dpl_codes left_codes, right_codes; // by row, or in wgrad by column
    gemm_swiglu swiglu;
    dpl_row_map map; // of the rows of x on the left
    dpl_groups groups;
    size_t n, k;
    bool accumulate;
    bool past_caches; // the result, which is too long for them
    gemm_cut *cuts;   // (groups + 1)
} gemm_args;

// A block of one group's product, out (m, 32 * n_panels) = left (m, depth) * right (depth, 32 *
// n_panels).
typedef struct gemm_block {
    const gemm_args *a;
    const dpl_gemm_kernels *g;
    const dpl_row_kernels *k;
    const dpl_quant_kernels *q;
    size_t row, n_rows; // of the group
    size_t weight_row;  // its first row of 32 in a weight or weight gradient
    size_t k_rows;      // rows of a panel there
    bool streams;       // the weight's panels are those of the result
    size_t m0, m, p0, n_panels, depth, n_cols;
    size_t n_tiles;               // of m
    size_t chunk, slice;          // of the contraction: of one product; as much as fits on the left
    uint8_t *packed_a, *packed_b; // [part]
    size_t part_a, part_b;        // bytes of a part
    float *c;                     // sums of the first panel (m, 32)
    size_t c_panel;               // floats to those of the next: 0, it takes their place
    uint8_t *gathered;            // with a map: rows of x
    uint16_t *expanded, *expanded_right; // of codes: what is packed of either operand
    size_t group, code_block;            // code_block: in wgrad, of scales, the group's first
    unsigned entered;                    // what this thread was before products
} gemm_block;

// Of a weight's codes, which are there twice.
static int way_of(gemm_op op) {
    return op == FORWARD ? DPL_QUANT_FORWARD : DPL_QUANT_DGRAD;
}

// Then the tensor scales are left to the sums.
static bool is_nv(const gemm_args *a) {
    return a->quantized && a->quant.rule.format == DPL_E2M1;
}

/* ---- cutting into tasks ---------------------------------------------------------------------- */
// All of a group as one block.
static gemm_block whole_group(const gemm_args *a, size_t g) {
    const int64_t *offsets = a->groups.offsets;
    gemm_block b = {.a = a, .g = a->g, .n_rows = a->groups.n_rows, .group = g};
    if (offsets) {
        b.row = (size_t)offsets[g];
        b.n_rows = (size_t)offsets[g + 1] - b.row;
    }
    b.m = a->op == WGRAD ? a->k : b.n_rows;
    b.depth = a->op == FORWARD ? a->k : a->op == DGRAD ? a->n : b.n_rows;
    if (a->op == WGRAD && is_nv(a)) b.depth = dpl_round_up(b.n_rows, DPL_NV_BLOCK); // rotated
    b.n_cols = a->op == DGRAD ? a->k : a->n;
    b.n_panels = dpl_div_up(b.n_cols, DPL_PANEL);
    b.streams = a->op == FORWARD || (a->op == DGRAD && a->quantized);
    b.k_rows = b.streams && a->quantized ? dpl_round_up(b.depth, DPL_MX_BLOCK)
                                         : dpl_panel_depth(a->k);
    b.weight_row = g * (b.streams ? b.n_panels : dpl_div_up(a->n, DPL_PANEL)) * b.k_rows;
    b.code_block = dpl_first_block(is_nv(a) ? DPL_NV_BLOCK : DPL_MX_BLOCK, g, (int64_t)b.row);
    // Chunks are even, whole panels long, and depend on the depth only: so do the bits.
    const size_t n_chunks = DPL_MAX(1, dpl_div_up(b.depth, b.g->kc));
    b.chunk = dpl_round_up(dpl_div_up(b.depth, n_chunks), DPL_PANEL);
    return b;
}

// Then that of a group without rows is 0, and has to be written.
static bool new_gradient(const gemm_args *a) {
    return a->op == WGRAD && !a->accumulate;
}

static double group_cost(const gemm_block *b) {
    return b->n_rows ? (double)(b->n_rows + ROWS_BYTES) * (double)b->a->n * (double)b->a->k : 0;
}

// As much of the contraction, in whole chunks, as m packed rows of it may take.
static size_t slice_of(const gemm_block *b, size_t m) {
    const size_t chunk_bytes = m * b->chunk * b->g->left_bytes * b->a->n_parts;
    return b->chunk * DPL_MAX(1, b->g->block_bytes / chunk_bytes);
}

// Rows of a block: where weights are used in place few are enough, and with all of the contraction
// packed sums need not wait.
static size_t block_rows(const gemm_block *b) {
    const size_t row_bytes = b->depth * b->g->left_bytes * b->a->n_parts;
    if (!b->streams || b->a->n_parts > 1) return M_BLOCK;
    return DPL_MIN(M_BLOCK, DPL_MAX(M_LEAST, b->g->block_bytes / row_bytes));
}

// Whether sums that are not complete may be in the result.
static bool sums_in_out(const gemm_args *a) {
    return a->out.dtype == DPL_F32 && !a->swiglu.mat.p && !is_nv(a);
}

// Whether a block of m rows has to put sums aside until more of the left operand is packed.
static bool sums_wait(const gemm_block *b, size_t m) {
    return !sums_in_out(b->a) && slice_of(b, m) < b->depth;
}

// The cut may follow the number of threads (through cost_task), because no element's chain depends
// on it.
static gemm_cut cut_group(const gemm_block *b, double cost_task, size_t first_task) {
    if (b->n_rows == 0)
        return (gemm_cut){first_task, new_gradient(b->a), dpl_div_up(b->n_panels, P_ZERO)};
    const size_t m_most = DPL_MIN(block_rows(b), b->m);
    const size_t p_most = sums_wait(b, m_most) ? P_SUMS : b->n_panels;
    gemm_cut cut = {first_task, dpl_div_up(b->m, m_most), dpl_div_up(b->n_panels, p_most)};
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

/* ---- operands of one block ------------------------------------------------------------------- */
// What is stored in bf16 has one part.
static size_t parts_of(const gemm_args *a, dpl_mat m) {
    return m.dtype == DPL_BF16 ? 1 : a->n_parts;
}

static dpl_gemm_load load_of(dpl_dtype stored, size_t part) {
    if (stored == DPL_BF16) return DPL_LOAD_BF16;
    return part == 0 ? DPL_LOAD_F32 : part == 1 ? DPL_LOAD_PART2 : DPL_LOAD_PART3;
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
    const size_t row = b->streams ? p * b->k_rows + l : l / DPL_PANEL * b->k_rows + p * DPL_PANEL;
    return dpl_mat_at(a->right, b->weight_row + row, 0);
}

static size_t panel_cols(const gemm_block *b, size_t p) {
    return DPL_MIN(b->n_cols - p * DPL_PANEL, (size_t)DPL_PANEL);
}

// Where rows from `first` on of the packed left operand lie, for a chunk that begins at l.
static uint8_t *packed_left(const gemm_block *b, size_t first, size_t l, size_t depth) {
    const size_t rows = dpl_round_up(depth, b->g->depth);
    return b->packed_a + (l % b->slice * b->m + first * rows) * b->g->left_bytes;
}

// Into L1. (Not inlined, gcc drops it: it has no effect.)
INLINE void fetch_bytes(const void *p, size_t bytes) {
    for (size_t at = 0; at < bytes; at += LINE) __builtin_prefetch((const uint8_t *)p + at, 0, 3);
}

// NULL: a row of zeros.
static const uint8_t *mapped_row(const gemm_args *a, size_t row, size_t col) {
    const size_t at = dpl_mapped_row(a->map, row);
    return at == DPL_NO_ROW ? NULL : dpl_mat_at(a->left, at, col).p;
}

// Copies `n` columns of rows that lie anywhere; the next one comes from memory meanwhile.
static void gather_rows(const gemm_block *b, size_t row, size_t n_rows, size_t col, size_t n) {
    const size_t bytes = n * dpl_dtype_bytes(b->a->left.dtype);
    const uint8_t *next = mapped_row(b->a, row, col);
    for (size_t r = 0; r < n_rows; r++) {
        const uint8_t *from = next;
        next = r + 1 < n_rows ? mapped_row(b->a, row + r + 1, col) : NULL;
        if (next) fetch_bytes(next, bytes);
        if (from) memcpy(b->gathered + r * bytes, from, bytes);
        else memset(b->gathered + r * bytes, 0, bytes);
    }
}

// As left_at, of rows that a map names: in forward those of one tile; in wgrad, where they are the
// contraction, those of one chunk, for all tiles of the block.
static dpl_mat gather_left(const gemm_block *b, size_t first, size_t m, size_t l, size_t depth) {
    const bool wgrad = b->a->op == WGRAD;
    const size_t n = wgrad ? b->m : depth;
    if (!wgrad) gather_rows(b, b->row + b->m0 + first, m, l, n);
    else if (first == 0) gather_rows(b, b->row + l, depth, b->m0, n);
    return dpl_mat_at((dpl_mat){b->gathered, n, b->a->left.dtype}, 0, wgrad ? first : 0);
}

// In wgrad: that of row l of the group.
static size_t block_of(const gemm_block *b, size_t l) {
    return b->code_block + l / (is_nv(b->a) ? DPL_NV_BLOCK : DPL_MX_BLOCK);
}

// What makes codes or numbers of codes is no product: there subnormals are what they are.
static void pause_products(const gemm_block *b) {
    if (b->g->flushes) dpl_gemm_leave(b->g, b->entered);
}

static void resume_products(const gemm_block *b) {
    if (b->g->flushes) (void)dpl_gemm_enter(b->g);
}

// As left_at, of codes: in forward and dgrad a chunk of a tile's rows, which MXFP8 rounds here; in
// wgrad a chunk of all columns of the block, for all its tiles.
static dpl_mat expand_left(const gemm_block *b, dpl_mat x, size_t first, size_t m, size_t l,
                           size_t depth) {
    const gemm_args *a = b->a;
    const dpl_quant_rule rule = a->quant.rule;
    const dpl_code format = a->op == DGRAD ? rule.grad_format : rule.format;
    if (a->op != WGRAD && is_nv(a)) {
        dpl_quant_expand_rows(b->q, a->left_codes, a->map, b->row + b->m0 + first, m, l, depth,
                              b->expanded);
        return (dpl_mat){b->expanded, depth, DPL_BF16};
    }
    if (a->op != WGRAD) {
        dpl_mx_round_rows(b->q, format, rule.scale, x, m, depth, b->expanded);
        return (dpl_mat){b->expanded, depth, DPL_BF16};
    }
    if (first == 0)
        dpl_quant_expand_columns(b->q, format, a->left_codes, b->row + l, block_of(b, l), depth,
                                 b->m0, b->m, b->expanded);
    return dpl_mat_at((dpl_mat){b->expanded, b->m, DPL_BF16}, 0, first);
}

// NVFP4 rows of a tile, whose products are those of codes.
static void pack_codes(const gemm_block *b, size_t first, size_t m, size_t l, size_t depth) {
    const gemm_args *a = b->a;
    const dpl_codes *of = &a->left_codes;
    const uint8_t *codes[CODE_ROWS], *scales[CODE_ROWS];
    for (size_t i = 0; i < m; i++) {
        const size_t at = dpl_mapped_row(a->map, b->row + b->m0 + first + i);
        const bool none = at == DPL_NO_ROW;
        codes[i] = none ? NULL : of->codes + at * of->ld_codes + l / 2;
        scales[i] = none ? NULL : of->scales + at * of->ld_scales + l / DPL_NV_BLOCK;
    }
    b->g->nv_pack(m, depth, codes, scales, packed_left(b, first, l, depth));
}

static void pack_left(const gemm_block *b, size_t first, size_t m, size_t l, size_t depth) {
    if (b->g->nv_tile) {
        pack_codes(b, first, m, l, depth);
        return;
    }
    const gemm_args *a = b->a;
    dpl_mat x = {0}; // there may be codes only
    if (a->left.p && a->map.slot) x = gather_left(b, first, m, l, depth);
    else if (a->left.p) x = left_at(b, first, l);
    if (a->quantized) {
        pause_products(b);
        x = expand_left(b, x, first, m, l, depth);
        resume_products(b);
    }
    uint8_t *to = packed_left(b, first, l, depth);
    const dpl_gemm_packer pack = a->op == WGRAD ? b->g->left_cols : b->g->left_rows;
    for (size_t part = 0; part < parts_of(a, x); part++, to += b->part_a)
        pack(load_of(x.dtype, part), m, depth, x.p, x.ld, m, to);
}

// The columns of panel p in wgrad.
static dpl_mat expand_right(const gemm_block *b, size_t p, size_t l, size_t depth) {
    const size_t n = panel_cols(b, p);
    pause_products(b);
    dpl_quant_expand_columns(b->q, b->a->quant.rule.grad_format, b->a->right_codes, b->row + l,
                             block_of(b, l), depth, p * DPL_PANEL, n, b->expanded_right);
    resume_products(b);
    return (dpl_mat){b->expanded_right, n, DPL_BF16};
}

static void pack_right(const gemm_block *b, size_t p, size_t l0, size_t depth, size_t part) {
    const gemm_args *a = b->a;
    const size_t n = panel_cols(b, p);
    const dpl_mat from = a->quantized ? expand_right(b, p, l0, depth) : right_at(b, p, l0);
    const dpl_gemm_load load = load_of(from.dtype, part);
    uint8_t *to = b->packed_b + part * b->part_b;
    if (a->op != DGRAD) {
        const size_t cols = a->op == FORWARD ? DPL_PANEL : n;
        b->g->right_cols(load, cols, depth, from.p, from.ld, DPL_PANEL, to);
        return;
    }
    // 32 rows of each panel of n: the padding of the last one is there to be read.
    const dpl_gemm_packer pack = from.dtype == DPL_BF16 ? b->g->right_pairs : b->g->right_rows;
    const size_t piece_bytes = n * DPL_PANEL * dpl_dtype_bytes(from.dtype);
    for (size_t l = 0; l < depth; l += DPL_PANEL, to += DPL_PANEL * DPL_PANEL * b->g->right_bytes) {
        if (l + DPL_PANEL < depth) fetch_bytes(right_at(b, p, l0 + l + DPL_PANEL).p, piece_bytes);
        pack(load, n, DPL_PANEL, right_at(b, p, l0 + l).p, DPL_PANEL, DPL_PANEL, to);
    }
}

// The chunk that is used after the one at (p, l0); false after the last.
static bool next_chunk(const gemm_block *b, size_t *p, size_t *l0) {
    const size_t slice = *l0 / b->slice * b->slice, end = DPL_MIN(slice + b->slice, b->depth);
    if ((*l0 += b->chunk) < end) return true;
    *l0 = slice;
    if (++*p < b->p0 + b->n_panels) return true;
    *p = b->p0;
    *l0 = end;
    return end < b->depth;
}

// A chunk of a weight's codes as bf16. With few rows memory is the limit: the next chunk comes
// meanwhile.
static void expand_weight(const gemm_block *b, size_t p, size_t l0, size_t depth) {
    const int way = way_of(b->a->op);
    const size_t panel = b->weight_row / b->k_rows + p;
    size_t next_p = p, next_l = l0;
    ptrdiff_t ahead = 0;
    if (b->m < FEW_ROWS && next_chunk(b, &next_p, &next_l))
        ahead = (const uint8_t *)right_at(b, next_p, next_l).p -
                (const uint8_t *)right_at(b, p, l0).p;
    pause_products(b);
    dpl_quant_expand_panel(b->q, &b->a->quant, way, b->k_rows, panel, l0, depth, ahead,
                           (uint16_t *)(void *)b->packed_b);
    resume_products(b);
}

// The right operand (depth, 32) of panel p from contraction index l0 on: weights of this class are
// used in place.
static const uint8_t *right_panel(const gemm_block *b, size_t p, size_t l0, size_t depth) {
    if (b->streams && b->a->quantized) {
        expand_weight(b, p, l0, depth);
        return b->packed_b;
    }
    if (b->a->op == FORWARD && b->a->n_parts == 1) return right_at(b, p, l0).p;
    for (size_t part = 0; part < parts_of(b->a, b->a->right); part++)
        pack_right(b, p, l0, depth, part);
    return b->packed_b;
}

// Both operands are codes, without ever being numbers.
static void code_product(const gemm_block *b, size_t p, size_t first, size_t m, size_t l,
                         size_t depth, float *c, bool add) {
    const dpl_quant_weight *w = &b->a->quant;
    const int way = way_of(b->a->op);
    const size_t at = b->weight_row + p * b->k_rows + l;
    b->g->nv_tile(m, depth, packed_left(b, first, l, depth), w->codes[way] + at * DPL_PANEL / 2,
                  w->scales[way] + at / DPL_NV_BLOCK * 2, c, add);
}

/* ---- what is fetched ahead ------------------------------------------------------------------- */
static dpl_gemm_ahead fetch_nothing(const gemm_block *b) {
    return (dpl_gemm_ahead){b->packed_b, 0, 1, 0, 0};
}

// A line of each of `run` rows of m, from byte `at` of its first row on.
static dpl_gemm_ahead fetch_rows(dpl_mat m, size_t at, size_t run) {
    return (dpl_gemm_ahead){(const uint8_t *)m.p + at, m.ld * dpl_dtype_bytes(m.dtype), run, 0, 1};
}

// In wgrad, where both operands lie in short pieces: one line of some rows of the next panel's
// right operand, or of the next left operand.
static dpl_gemm_ahead fetch_wgrad(const gemm_block *b, size_t p, size_t l0, size_t depth,
                                  size_t i) {
    const size_t rows = dpl_div_up(depth, b->g->fetch), shares = dpl_div_up(depth, rows);
    const size_t right_lines = DPL_PANEL * dpl_dtype_bytes(b->a->right.dtype) / LINE;
    const size_t left_bytes = b->m * dpl_dtype_bytes(b->a->left.dtype);
    const size_t l = i % shares * rows, line = i / shares;
    if (line < right_lines) {
        if (p + 1 < b->p0 + b->n_panels)
            return fetch_rows(right_at(b, p + 1, l0 + l), line * LINE, DPL_MIN(rows, depth - l));
    } else if (l0 + depth < b->depth && !b->a->map.slot) {
        const size_t at = ((p - b->p0) * b->n_tiles / shares + line - right_lines) * LINE;
        if (at < left_bytes && l0 + depth + l < b->depth)
            return fetch_rows(left_at(b, 0, l0 + depth + l), at,
                              DPL_MIN(rows, b->depth - l0 - depth - l));
    }
    return fetch_nothing(b);
}

// The weight of the next chunk in forward, whose lines follow each other: as many pages in turn as
// the kernels like, since the hardware fetches along each of them too.
static dpl_gemm_ahead fetch_pages(const gemm_block *b, const uint8_t *w, size_t bytes, size_t depth,
                                  size_t i) {
    const size_t slots = dpl_div_up(depth, b->g->fetch), lines = dpl_div_up(bytes, LINE);
    const size_t most = b->n_tiles < MANY_TILES ? b->g->pages : b->g->pages / 2;
    const size_t pages = DPL_MAX(1, DPL_MIN(most, bytes / PAGE));
    // A chunk that is not whole pages is cut into as many pieces, of at least a page each.
    const size_t rounds = DPL_MAX(1, bytes / (pages * PAGE));
    const size_t piece = dpl_div_up(lines, pages * rounds) * LINE;
    const size_t each = dpl_div_up(lines, slots * b->n_tiles), first = i * each * slots;
    const size_t round = first / (pages * piece / LINE) * pages * piece;
    const size_t at = round + first / pages * LINE % piece;
    return (dpl_gemm_ahead){w + at, piece, pages, LINE - (pages - 1) * piece, each};
}

// In forward and dgrad: the rows that the next tile packs, or this tile's part of the weight that
// is used next.
static dpl_gemm_ahead fetch_ahead(const gemm_block *b, size_t p, size_t l0, size_t depth,
                                  size_t i) {
    const gemm_args *a = b->a;
    const size_t slots = dpl_div_up(depth, b->g->fetch);
    if (a->op == WGRAD && a->quantized) return fetch_nothing(b);
    if (a->op == WGRAD) return fetch_wgrad(b, p, l0, depth, i);
    if (p == b->p0 && i + 1 < b->n_tiles && !a->map.slot && a->left.p) {
        const dpl_mat x = left_at(b, tile_first(b, i + 1), l0);
        const size_t elem = dpl_dtype_bytes(x.dtype), lines = dpl_div_up(depth * elem, LINE);
        return (dpl_gemm_ahead){x.p, LINE, lines, x.ld * elem - (lines - 1) * LINE,
                                dpl_div_up(lines * b->g->mr, slots)};
    }
    if (!next_chunk(b, &p, &l0)) return fetch_nothing(b);
    const size_t l = l0 + i * DPL_MIN(b->chunk, b->depth - l0) / b->n_tiles;
    const dpl_mat w = right_at(b, p, l);
    const size_t row_bytes = w.ld * dpl_dtype_bytes(w.dtype); // of 32 columns
    if (b->streams && b->g->pages > 1)
        return fetch_pages(b, right_at(b, p, l0).p, DPL_MIN(b->chunk, b->depth - l0) * row_bytes,
                           depth, i);
    // At few rows memory is the limit, and the hardware sees a plain stream coming.
    if (b->streams && b->m < FEW_ROWS && !a->quantized) return fetch_nothing(b);
    const size_t slot_bytes = row_bytes * b->g->fetch / b->n_tiles;
    const size_t each = dpl_div_up(slot_bytes, LINE), step = slot_bytes / each;
    if (b->streams) return (dpl_gemm_ahead){w.p, step, each * slots, step, each};
    // 32 rows of each panel of n.
    const size_t others = DPL_MAX(b->k_rows, (size_t)DPL_PANEL) - DPL_PANEL;
    return (dpl_gemm_ahead){w.p, step, DPL_PANEL / b->g->fetch * b->n_tiles * each,
                            others * row_bytes + step, each};
}

// Rows of what panel p ends with, which lie far apart, into L1 during the last product: the result,
// or what SwiGLU's gradient reads.
INLINE void fetch_end(const gemm_block *b, size_t p, size_t first, size_t m) {
    const gemm_args *a = b->a;
    const size_t wide = a->op == DGRAD && a->swiglu.mat.p ? 2 : 1;
    const dpl_mat all = wide == 2 ? a->swiglu.mat : a->out;
    const dpl_mat far = dpl_mat_at(all, b->row + b->m0 + first, p * DPL_PANEL * wide);
    const size_t elem = dpl_dtype_bytes(far.dtype), bytes = panel_cols(b, p) * wide * elem;
    const uint8_t *row = far.p;
    for (size_t i = 0; i < m; i++, row += far.ld * elem) fetch_bytes(row, bytes);
}

/* ---- one block ------------------------------------------------------------------------------- */
// One tile: of the parts of split operands all pairs that matter, in fp32.
static void tile_product(const gemm_block *b, size_t m, size_t depth, const uint8_t *left,
                         const uint8_t *right, float *c, bool add, dpl_gemm_ahead ahead) {
    const size_t n_left = parts_of(b->a, b->a->left), n_right = parts_of(b->a, b->a->right);
    for (size_t sum = 0; sum < b->a->n_parts; sum++)
        for (size_t i = 0; i <= sum; i++) {
            if (i >= n_left || sum - i >= n_right) continue;
            b->g->tile(m, depth, left + i * b->part_a, right + (sum - i) * b->part_b, c, DPL_PANEL,
                       add, ahead);
            add = true;
            ahead = fetch_nothing(b);
        }
}

// The rows of SwiGLU that complete sums of panel p are for, from `first` of the block on: columns
// 16 p on of hidden, or 64 p on of gate_up and its gradient.
static dpl_swiglu swiglu_rows(const gemm_block *b, size_t p, size_t first, size_t m) {
    const gemm_swiglu *s = &b->a->swiglu;
    const bool forward = b->a->op == FORWARD;
    const size_t row = b->row + b->m0 + first, f_panel = forward ? DPL_PANEL / 2 : DPL_PANEL;
    const size_t f = p * f_panel, n_panels = dpl_div_up(s->f, DPL_PANEL);
    const dpl_mat gate_up = dpl_mat_at(forward ? b->a->out : s->mat, row, 2 * f);
    const dpl_mat out = forward ? dpl_mat_at(s->mat, row, f) : dpl_mat_at(b->a->out, row, 2 * f);
    return (dpl_swiglu){.dtype = out.dtype,
                        .n = m,
                        .f = DPL_MIN(s->f - f, f_panel),
                        .gate_up = gate_up.p,
                        .out = out.p,
                        .ld = gate_up.ld,
                        .ld_out = out.ld,
                        .weight = s->row_weight ? s->row_weight + row : NULL,
                        .sums = s->sums ? s->sums + row * n_panels + p : NULL,
                        .step = n_panels};
}

// The result in panel p, from row i of the block on.
static dpl_mat out_panel(const gemm_block *b, size_t p, size_t i) {
    if (b->a->op != WGRAD) return dpl_mat_at(b->a->out, b->row + b->m0 + i, p * DPL_PANEL);
    return dpl_mat_at(b->a->out, b->weight_row + p * b->k_rows + b->m0 + i, 0);
}

static void finish_swiglu(const gemm_block *b, size_t p, size_t first, size_t m, const float *c) {
    const dpl_swiglu rows = swiglu_rows(b, p, first, m);
    if (b->a->op == DGRAD) {
        b->k->swiglu_backward(&rows, c);
        return;
    }
    b->g->put(m, DPL_PANEL, c, rows.dtype, (void *)(uintptr_t)rows.gate_up, rows.ld);
    b->k->swiglu_forward(&rows);
}

// The tensor scale of row i of the block's left operand in NVFP4.
static float left_scale(const gemm_block *b, size_t i) {
    const gemm_args *a = b->a;
    const float *scales = a->left_codes.tensor_scale;
    if (a->op == WGRAD) return scales[b->group * a->k + b->m0 + i];
    const size_t at = dpl_mapped_row(a->map, b->row + b->m0 + i);
    return at == DPL_NO_ROW ? 1 : scales[at];
}

// Sums of NVFP4 operands, of panel p, over the tensor scales; then what they are added to. A weight
// gradient is complete with this.
static void finish_nv(const gemm_block *b, size_t p, size_t first, size_t m, float *c) {
    const gemm_args *a = b->a;
    const bool wgrad = a->op == WGRAD;
    const size_t n = panel_cols(b, p);
    float by[DPL_PANEL] = {0}, rows[M_BLOCK];
    for (size_t j = 0; j < n; j++)
        by[j] = 1 / (wgrad ? a->right_codes.tensor_scale[b->group * a->n + p * DPL_PANEL + j]
                           : a->quant.tensor_scale[b->group]);
    for (size_t i = 0; i < m; i++) rows[i] = 1 / left_scale(b, first + i);
    b->q->nv_scale(m, c, rows, by, wgrad && a->accumulate, wgrad ? out_panel(b, p, first).p : c);
    for (size_t i = 0; i < m && a->accumulate && !wgrad; i++) {
        const float *old = out_panel(b, p, first + i).p;
        for (size_t j = 0; j < n; j++) c[i * DPL_PANEL + j] += old[j];
    }
}

// A slice of the contraction, from l0 on, for one panel. The left operand is packed on the way of
// the first panel, tile by tile: while one tile is multiplied, memory brings the next.
static void panel_product(const gemm_block *b, size_t p, size_t l0) {
    const gemm_args *a = b->a;
    const bool in_out = sums_in_out(a), nv = is_nv(a), wgrad = a->op == WGRAD;
    const bool of_codes = b->g->nv_tile;
    const size_t end = DPL_MIN(l0 + b->slice, b->depth), n = panel_cols(b, p);
    const dpl_mat out = out_panel(b, p, 0);
    float *c = b->c + (p - b->p0) * b->c_panel;
    bool add = l0 > 0 || (a->accumulate && !nv);
    if (add && !wgrad && in_out) b->g->take(b->m, n, out.p, out.ld, c);
    for (size_t l = l0; l < end; l += b->chunk, add = true) {
        const size_t depth = DPL_MIN(b->chunk, end - l);
        const uint8_t *right = of_codes ? NULL : right_panel(b, p, l, depth);
        for (size_t i = 0; i < b->n_tiles; ++i) {
            const size_t first = tile_first(b, i), m = tile_first(b, i + 1) - first;
            if (p == b->p0) pack_left(b, first, m, l, depth);
            if (l + depth == b->depth && !wgrad) fetch_end(b, p, first, m);
            if (of_codes) code_product(b, p, first, m, l, depth, c + first * DPL_PANEL, add);
            else
                tile_product(b, m, depth, packed_left(b, first, l, depth), right,
                             c + first * DPL_PANEL, add, fetch_ahead(b, p, l, depth, i));
            if (l + depth < b->depth || !(a->swiglu.mat.p || nv)) continue;
            // Not a product: subnormals are what they are.
            dpl_gemm_leave(b->g, b->entered);
            if (nv) finish_nv(b, p, first, m, c + first * DPL_PANEL);
            if (a->swiglu.mat.p) finish_swiglu(b, p, first, m, c + first * DPL_PANEL);
            (void)dpl_gemm_enter(b->g);
        }
    }
    if (wgrad || a->swiglu.mat.p) return;
    if (end == b->depth && a->past_caches) b->g->put_past(b->m, n, c, out.dtype, out.p, out.ld);
    else if (end == b->depth || in_out) b->g->put(b->m, n, c, out.dtype, out.p, out.ld);
}

static void block_product(gemm_block *b) {
    b->entered = dpl_gemm_enter(b->g);
    for (size_t l0 = 0; l0 < b->depth; l0 += b->slice)
        for (size_t p = b->p0; p < b->p0 + b->n_panels; ++p) panel_product(b, p, l0);
    dpl_gemm_leave(b->g, b->entered);
}

// Of the weight, from the block's first panel on.
static float *gradient_of(const gemm_block *b) {
    return dpl_mat_row(b->a->out, b->weight_row + b->p0 * b->k_rows + b->m0);
}

static void lay_out(gemm_block *b, uint8_t *scratch) {
    const dpl_gemm_kernels *g = b->g;
    b->n_tiles = dpl_div_up(b->m, g->mr);
    b->slice = slice_of(b, b->m);
    b->part_b = b->chunk * DPL_PANEL * g->right_bytes;
    b->part_a = dpl_round_up(
        b->m * DPL_MIN(b->slice, dpl_round_up(b->depth, b->chunk)) * g->left_bytes, LINE);
    b->packed_b = scratch;
    b->packed_a = b->packed_b + b->a->n_parts * b->part_b;
    uint8_t *rest = b->packed_a + b->a->n_parts * b->part_a;
    if (b->a->op == WGRAD && !is_nv(b->a)) {
        b->c = gradient_of(b);
        b->c_panel = b->k_rows * DPL_PANEL;
        b->gathered = rest;
    } else {
        b->c = (float *)(void *)rest;
        b->c_panel = sums_wait(b, b->m) ? b->m * DPL_PANEL : 0;
        b->gathered = (uint8_t *)(b->c + DPL_MAX(b->n_panels * b->c_panel, b->m * DPL_PANEL));
    }
    // Behind what is gathered: a chunk of a tile, or in wgrad of all columns of the block.
    const size_t columns = b->a->op == WGRAD ? b->m : g->mr;
    b->expanded = (uint16_t *)(void *)(b->gathered + columns * b->chunk * sizeof(float));
    b->expanded_right = b->expanded + columns * b->chunk;
}

static void run_task(const void *args, const dpl_part *part) {
    const gemm_args *a = args;
    const size_t g = find_group(a, part->i);
    const gemm_cut cut = a->cuts[g];
    const size_t i = part->i - cut.first_task, i_m = i / cut.p_blocks, i_p = i % cut.p_blocks;
    gemm_block b = whole_group(a, g);
    b.k = part->k;
    b.q = part->q;
    b.m0 = i_m * b.m / cut.m_blocks;
    b.m = (i_m + 1) * b.m / cut.m_blocks - b.m0;
    b.p0 = i_p * b.n_panels / cut.p_blocks;
    b.n_panels = (i_p + 1) * b.n_panels / cut.p_blocks - b.p0;
    if (b.n_rows == 0) {
        memset(gradient_of(&b), 0, b.n_panels * b.k_rows * DPL_PANEL * sizeof(float));
        return;
    }
    lay_out(&b, part->scratch);
    block_product(&b);
}

// The gradients of row weights: what each panel has of them, in order.
static void add_row_sums(const void *args, const dpl_part *part) {
    const gemm_args *a = args;
    const int64_t *offsets = a->groups.offsets;
    const size_t n = dpl_div_up(a->swiglu.f, DPL_PANEL);
    const size_t end = offsets ? DPL_MIN(part->end, (size_t)offsets[a->groups.n]) : part->end;
    for (size_t row = part->first; row < end; row++) {
        double sum = 0;
        for (size_t p = 0; p < n; p++) sum += (double)a->swiglu.sums[row * n + p];
        a->swiglu.drow_weight[row] = (float)sum;
    }
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
    if (a->swiglu.sums) dpl_ctx_loop(ctx, (dpl_loop){add_row_sums, a->groups.n_rows, 512}, a);
}

// What a product writes entirely: nothing that it adds to, no gradient of a weight.
static dpl_span out_span(const gemm_args *a) {
    const size_t f = a->swiglu.f, k = f ? dpl_gate_up_width(f) : a->k;
    if (a->accumulate || a->op == WGRAD) return (dpl_span){0};
    return dpl_row_span(a->out, a->groups.n_rows, a->op == FORWARD ? a->n : k);
}

static void submit_gemm(dpl_ctx *ctx, gemm_args a, dpl_dtype operand) {
    if ((a.groups.n_rows == 0 && !new_gradient(&a)) || a.groups.n == 0 || a.n == 0 || a.k == 0)
        return;
    const size_t mark = dpl_ctx_mark(ctx);
    const bool split = operand == DPL_F32 && ctx->f32_parts > 0;
    a.g = &ctx->kernels->gemm[split ? DPL_BF16 : operand];
    if (is_nv(&a) && a.op != WGRAD && ctx->kernels->nv.nv_tile) a.g = &ctx->kernels->nv;
    a.n_parts = split ? ctx->f32_parts : 1;
    const size_t out_cols = a.op == DGRAD ? a.k : a.n;
    a.past_caches = a.g->stream_bytes > 0 &&
                    a.groups.n_rows * out_cols * dpl_dtype_bytes(a.out.dtype) > a.g->stream_bytes;
    a.cuts = dpl_ctx_alloc(ctx, a.groups.n * sizeof *a.cuts);
    const size_t n_rows = a.groups.n_rows, n_panels = dpl_div_up(a.swiglu.f, DPL_PANEL);
    if (a.swiglu.drow_weight)
        a.swiglu.sums = dpl_ctx_alloc(ctx, n_rows * n_panels * sizeof *a.swiglu.sums);
    const dpl_span hidden = dpl_row_span(a.swiglu.mat, n_rows, a.swiglu.f);
    DPL_SUBMIT(ctx, run_gemm, a, out_span(&a), a.op == FORWARD ? hidden : (dpl_span){0},
               {a.swiglu.drow_weight, n_rows * sizeof *a.swiglu.drow_weight});
    dpl_ctx_release(ctx, mark);
}

// Rows as NVFP4, in the step's memory. stream: of what is rounded by chance next; NULL: nothing is.
static dpl_codes codes_by_row(dpl_ctx *ctx, dpl_mat x, dpl_groups groups, size_t n,
                              uint64_t *stream) {
    const size_t bytes = dpl_div_up(n, 2), blocks = dpl_div_up(n, DPL_NV_BLOCK);
    const dpl_codes codes = {dpl_ctx_alloc(ctx, groups.n_rows * bytes),
                             dpl_ctx_alloc(ctx, groups.n_rows * blocks), bytes, blocks,
                             dpl_ctx_alloc(ctx, groups.n_rows * sizeof(float))};
    const uint64_t seed_stream[2] = {ctx->random_seed, stream ? (*stream)++ : 0};
    dpl_nv_quantize(ctx, x, groups, n, stream ? seed_stream : NULL, codes);
    return codes;
}

// A product of rows on the left, which a map may name, with a weight.
static void submit_with_weight(dpl_ctx *ctx, gemm_args a, const dpl_weight *w) {
    const size_t mark = dpl_ctx_mark(ctx);
    a.right = (dpl_mat){(void *)(uintptr_t)w->p, DPL_PANEL, w->dtype};
    a.n = w->n, a.k = w->k;
    if (w->quant) {
        a.quantized = true;
        a.quant = *w->quant;
        // Where a piece of the codes lies is asked as if they were a matrix.
        const int way = way_of(a.op);
        a.right = (dpl_mat){a.quant.codes[way], is_nv(&a) ? DPL_PANEL / 4 : DPL_PANEL / 2,
                            DPL_BF16};
    }
    if (is_nv(&a)) {
        const dpl_groups rows = a.map.slot ? dpl_one_group(a.map.n_x) : a.groups;
        uint64_t *stream = a.op == DGRAD ? &a.quant.streams[0] : NULL;
        a.left_codes = codes_by_row(ctx, a.left, rows, a.op == FORWARD ? a.k : a.n, stream);
        a.left = (dpl_mat){NULL, 0, DPL_BF16};
    }
    submit_gemm(ctx, a, w->dtype);
    dpl_ctx_release(ctx, mark);
}

void dpl_gemm_forward(dpl_ctx *ctx, dpl_mat x, const dpl_weight *w, dpl_groups groups, dpl_mat y) {
    submit_with_weight(ctx, (gemm_args){.op = FORWARD, .left = x, .out = y, .groups = groups}, w);
}

void dpl_gemm_dgrad(dpl_ctx *ctx, dpl_mat dy, const dpl_weight *w, dpl_groups groups, dpl_mat dx,
                    bool accumulate) {
    submit_with_weight(
        ctx,
        (gemm_args){.op = DGRAD, .left = dy, .out = dx, .groups = groups, .accumulate = accumulate},
        w);
}

void dpl_gemm_swiglu_forward(dpl_ctx *ctx, dpl_mat x, dpl_row_map map, const dpl_weight *w,
                             dpl_groups groups, const float *row_weight, dpl_mat gate_up, size_t f,
                             dpl_mat hidden) {
    submit_with_weight(ctx,
                       (gemm_args){.op = FORWARD,
                                   .left = x,
                                   .out = gate_up,
                                   .swiglu = {hidden, f, row_weight, NULL, NULL},
                                   .map = map,
                                   .groups = groups},
                       w);
}

void dpl_gemm_swiglu_backward(dpl_ctx *ctx, dpl_mat dy, const dpl_weight *w, dpl_groups groups,
                              const float *row_weight, dpl_mat gate_up, dpl_mat dgate_up,
                              float *drow_weight) {
    submit_with_weight(ctx,
                       (gemm_args){.op = DGRAD,
                                   .left = dy,
                                   .out = dgate_up,
                                   .swiglu = {gate_up, w->k, row_weight, NULL, drow_weight},
                                   .groups = groups},
                       w);
}

void dpl_gemm_wgrad(dpl_ctx *ctx, dpl_mat dy, dpl_mat x, dpl_row_map map, dpl_groups groups,
                    size_t n, size_t k, dpl_dtype operand, bool accumulate, float *dw) {
    submit_gemm(ctx,
                (gemm_args){.op = WGRAD,
                            .left = x,
                            .right = dy,
                            .out = dpl_mat_f32(dw, DPL_PANEL),
                            .map = map,
                            .groups = groups,
                            .n = n,
                            .k = k,
                            .accumulate = accumulate},
                operand);
}

// Codes by column of what is multiplied, in the step's memory. signs, seed_stream: of NVFP4.
static dpl_codes codes_by_column(dpl_ctx *ctx, dpl_mat x, dpl_row_map map, dpl_groups groups,
                                 size_t n, dpl_code format, dpl_scale_rule rule, uint16_t signs,
                                 const uint64_t *seed_stream) {
    const bool nv = format == DPL_E2M1;
    const size_t block = nv ? DPL_NV_BLOCK : DPL_MX_BLOCK;
    const size_t blocks = dpl_column_blocks(block, groups.n, groups.n_rows);
    const size_t code_rows = nv ? blocks * DPL_NV_BLOCK / 2 : groups.n_rows;
    dpl_codes codes = {dpl_ctx_alloc(ctx, code_rows * n), dpl_ctx_alloc(ctx, blocks * n), n, n,
                       NULL};
    if (nv) {
        codes.tensor_scale = dpl_ctx_alloc(ctx, groups.n * n * sizeof(float));
        dpl_nv_quantize_columns(ctx, x, map, groups, n, signs, seed_stream, codes);
    } else {
        dpl_mx_quantize(ctx, x, map, groups, n, format, rule, (dpl_codes){0}, codes);
    }
    return codes;
}

void dpl_gemm_quant_wgrad(dpl_ctx *ctx, dpl_mat dy, dpl_mat x, dpl_row_map map, dpl_groups groups,
                          size_t n, size_t k, const dpl_quant_weight *quant, bool accumulate,
                          float *dw) {
    const dpl_quant_rule rule = quant->rule;
    const size_t mark = dpl_ctx_mark(ctx);
    gemm_args a = {.op = WGRAD,
                   .left = {NULL, k, DPL_BF16},
                   .right = {NULL, n, DPL_BF16},
                   .out = dpl_mat_f32(dw, DPL_PANEL),
                   .quantized = true,
                   .quant = *quant,
                   .groups = groups,
                   .n = n,
                   .k = k,
                   .accumulate = accumulate};
    const uint64_t seed_stream[2] = {ctx->random_seed, is_nv(&a) ? quant->streams[1]++ : 0};
    // Any numbers that rounding does not use.
    const uint16_t signs = (uint16_t)dpl_rng_u64(seed_stream[0], seed_stream[1], UINT64_MAX);
    a.left_codes = codes_by_column(ctx, x, map, groups, k, rule.format, rule.scale, signs, NULL);
    a.right_codes = codes_by_column(ctx, dy, (dpl_row_map){0}, groups, n, rule.grad_format,
                                    rule.scale, signs, seed_stream);
    submit_gemm(ctx, a, DPL_BF16);
    dpl_ctx_release(ctx, mark);
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
    const size_t depth = dpl_panel_depth(a->k);
    const dpl_gemm_packer pack = part->g[DPL_F32].left_rows; // a transposition
    float *rows = a->rows + first * a->k, *panel = a->panels + first * depth;
    if (a->unpack) {
        pack(DPL_LOAD_F32, a->k, n, panel, DPL_PANEL, a->k, rows);
        return;
    }
    pack(DPL_LOAD_F32, n, a->k, rows, a->k, DPL_PANEL, panel);
    memset(panel + a->k * DPL_PANEL, 0, (depth - a->k) * DPL_PANEL * sizeof *panel);
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
