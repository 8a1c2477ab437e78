// quant.c - quantization of matrices whose rows belong to groups.
#include "cpu/quant.h"
#include "cpu/row_io.h"

#define TASK_BYTES ((size_t)256 << 10) // of numbers, which the second way reads from cache

#define TASKS_PER_THREAD 8

typedef struct mx_args {
    dpl_mat x;
    dpl_row_map map;
    dpl_groups groups;
    size_t n, wide, tasks_wide; // wide: columns of a task
    dpl_code format;
    dpl_scale_rule rule;
    dpl_mx by_row, by_column;
} mx_args;

static int64_t first_row(const dpl_groups *groups, size_t g) {
    if (groups->offsets) return groups->offsets[g];
    return g == 0 ? 0 : (int64_t)groups->n_rows;
}

// The last group whose blocks start at or before this one.
static size_t group_of(const dpl_groups *groups, size_t block) {
    size_t low = 0, high = groups->n;
    while (high - low > 1) {
        const size_t mid = (low + high) / 2;
        if (dpl_mx_first_block(mid, first_row(groups, mid)) <= block) low = mid;
        else high = mid;
    }
    return low;
}

static dpl_mx_block block_at(const mx_args *a, const dpl_mx *to, dpl_mat x, size_t row, size_t m,
                             size_t col, size_t n) {
    return (dpl_mx_block){.format = a->format,
                          .rule = a->rule,
                          .dtype = x.dtype,
                          .m = m,
                          .n = n,
                          .x = x.p,
                          .codes = to->codes + row * to->ld_codes + col,
                          .ld = x.ld,
                          .ld_codes = to->ld_codes,
                          .ld_scales = to->ld_scales};
}

// Where a block's numbers lie: in place, or gathered.
static dpl_mat numbers_at(const mx_args *a, void *scratch, size_t row, size_t m, size_t col,
                          size_t n) {
    const size_t bytes = n * dpl_dtype_bytes(a->x.dtype);
    if (!a->map.slot) return dpl_mat_at(a->x, row, col);
    for (size_t r = 0; r < m; r++) {
        const int32_t slot = a->map.slot[row + r];
        uint8_t *to = (uint8_t *)scratch + r * bytes;
        if (slot < 0) memset(to, 0, bytes);
        else memcpy(to, dpl_mat_at(a->x, (size_t)slot / a->map.top_k, col).p, bytes);
    }
    return (dpl_mat){scratch, n, a->x.dtype};
}

// Some columns of up to 32 rows, which come from memory once. With `more` the next ones follow.
static void quantize_block(const mx_args *a, const dpl_part *part, size_t i_task, bool more) {
    const size_t block = i_task / a->tasks_wide, col = i_task % a->tasks_wide * a->wide;
    const size_t n = DPL_MIN(a->n - col, a->wide), g = group_of(&a->groups, block);
    const size_t first = (size_t)first_row(&a->groups, g);
    const size_t row = first + (block - dpl_mx_first_block(g, (int64_t)first)) * DPL_MX_BLOCK;
    const size_t end = (size_t)first_row(&a->groups, g + 1);
    if (row >= end) return;
    const size_t m = DPL_MIN(end - row, (size_t)DPL_MX_BLOCK);
    const dpl_mat x = numbers_at(a, part->scratch, row, m, col, n);
    if (a->by_row.codes) {
        dpl_mx_block b = block_at(a, &a->by_row, x, row, m, col, n);
        b.scales = a->by_row.scales + row * b.ld_scales + col / DPL_MX_BLOCK;
        part->q->mx_rows(&b);
    }
    if (a->by_column.codes) {
        dpl_mx_block b = block_at(a, &a->by_column, x, row, m, col, n);
        b.scales = a->by_column.scales + block * b.ld_scales + col;
        if (more && !a->by_row.codes && !a->map.slot && a->tasks_wide == 1)
            b.ahead = m * x.ld * dpl_dtype_bytes(x.dtype);
        part->q->mx_columns(&b);
    }
}

static void quantize_blocks(const void *args, const dpl_part *part) {
    for (size_t i = part->first; i < part->end; i++)
        quantize_block(args, part, i, i + 1 < part->end);
}

static void mx_quantize(dpl_ctx *ctx, const void *args) {
    const mx_args *a = args;
    const size_t blocks = dpl_mx_column_blocks(a->groups.n, a->groups.n_rows);
    const size_t n = blocks * a->tasks_wide;
    const size_t each = n / (TASKS_PER_THREAD * (size_t)dpl_ctx_threads(ctx));
    dpl_ctx_loop(ctx, (dpl_loop){quantize_blocks, n, DPL_MIN(DPL_MAX(each, 1), 8)}, a);
}

void dpl_mx_quantize(dpl_ctx *ctx, dpl_mat x, dpl_row_map map, dpl_groups groups, size_t n,
                     dpl_code format, dpl_scale_rule rule, dpl_mx by_row, dpl_mx by_column) {
    const size_t wide = TASK_BYTES / DPL_MX_BLOCK / dpl_dtype_bytes(x.dtype);
    const mx_args a = {x,      map,  groups, n,        wide, dpl_div_up(n, wide),
                       format, rule, by_row, by_column};
    if (groups.n == 0 || groups.n_rows == 0 || n == 0) return;
    DPL_SUBMIT(ctx, mx_quantize, a, {0});
}

typedef struct expand_args {
    dpl_loop loop;
    dpl_mx mx;
    size_t n;
    dpl_code format;
    dpl_mat y;
} expand_args;

static void expand_rows(const void *args, const dpl_part *part) {
    const expand_args *a = args;
    for (size_t row = part->first; row < part->end; row++)
        part->q->expand_row(a->format, a->n, a->mx.codes + row * a->mx.ld_codes,
                            a->mx.scales + row * a->mx.ld_scales, dpl_mat_row(a->y, row));
}

void dpl_mx_expand_rows(dpl_ctx *ctx, dpl_mx by_row, size_t n_rows, size_t n, dpl_code format,
                        dpl_mat y) {
    const expand_args a = {{expand_rows, n_rows, dpl_row_grain(2 * n)}, by_row, n, format, y};
    DPL_SUBMIT(ctx, dpl_run_loop, a, dpl_row_span(y, n_rows, n));
}

/* ---- operands of products -------------------------------------------------------------------- */
#define ROUND_ROWS  16
#define ROUND_WIDTH 512

void dpl_mx_round_rows(const dpl_quant_kernels *q, dpl_code format, dpl_scale_rule rule, dpl_mat x,
                       size_t m, size_t n, uint16_t *y) {
    uint8_t codes[ROUND_ROWS * ROUND_WIDTH], scales[ROUND_ROWS * ROUND_WIDTH / DPL_MX_BLOCK];
    const bool whole = n % DPL_MX_BLOCK == 0; // then rows are one long row
    dpl_mx_block b = {.format = format,
                      .rule = rule,
                      .dtype = x.dtype,
                      .n = n,
                      .codes = codes,
                      .scales = scales,
                      .ld = x.ld,
                      .ld_codes = n,
                      .ld_scales = dpl_div_up(n, DPL_MX_BLOCK)};
    for (size_t r = 0; r < m; r += b.m, y += b.m * n) {
        b.m = DPL_MIN(m - r, whole ? (size_t)ROUND_ROWS : 1);
        b.x = dpl_mat_row(x, r);
        q->mx_rows(&b);
        q->expand_row(format, b.m * n, codes, scales, y);
    }
}

void dpl_mx_expand_panel(const dpl_quant_kernels *q, const dpl_mx_weight *w, int way,
                         size_t panel_depth, size_t panel, size_t l, size_t depth, ptrdiff_t ahead,
                         uint16_t *pairs) {
    const size_t at = panel * panel_depth + l;
    q->expand_pairs(w->rule.format, dpl_div_up(depth, DPL_MX_BLOCK), w->codes[way] + at * DPL_PANEL,
                    w->scales[way] + at, pairs, ahead);
}

void dpl_mx_expand_columns(const dpl_quant_kernels *q, dpl_code format, dpl_mx codes, size_t first,
                           size_t block, size_t m, size_t col, size_t n, uint16_t *y) {
    for (size_t r = 0; r < m; r += DPL_MX_BLOCK, block++)
        q->expand_columns(format, DPL_MIN(m - r, (size_t)DPL_MX_BLOCK), n,
                          codes.codes + (first + r) * codes.ld_codes + col, codes.ld_codes,
                          codes.scales + block * codes.ld_scales + col, y + r * n, n);
}

typedef struct pack_args {
    dpl_loop loop;
    const float *panels;
    size_t n, k;
    dpl_mx_weight w;
} pack_args;

// A block of 32 x 32 of a panel, (k, n), as codes of either way, and its scales.
static void quantize_block_32(const pack_args *a, const dpl_quant_kernels *q, bool columns,
                              const float *x, size_t m, uint8_t codes[DPL_MX_BLOCK][DPL_PANEL],
                              uint8_t *scales) {
    const dpl_mx_block b = {.format = a->w.rule.format,
                            .rule = a->w.rule.scale,
                            .dtype = DPL_F32,
                            .m = m,
                            .n = DPL_PANEL,
                            .x = x,
                            .codes = codes[0],
                            .scales = scales,
                            .ld = DPL_PANEL,
                            .ld_codes = DPL_PANEL,
                            .ld_scales = 1};
    memset(codes[m], 0, (DPL_MX_BLOCK - m) * DPL_PANEL);
    if (columns) q->mx_columns(&b);
    else q->mx_rows(&b);
}

static void pack_panel(const void *args, const dpl_part *part) {
    const pack_args *a = args;
    const size_t depth = dpl_round_up(a->k, DPL_MX_BLOCK), panels = dpl_div_up(a->n, DPL_PANEL);
    const size_t g = part->i / panels, p = part->i % panels;
    const float *x = a->panels + part->i * dpl_panel_depth(a->k) * DPL_PANEL;
    uint8_t codes[DPL_MX_BLOCK + 1][DPL_PANEL];
    for (size_t l = 0; l < a->k; l += DPL_MX_BLOCK) {
        const size_t m = DPL_MIN(a->k - l, (size_t)DPL_MX_BLOCK), at = part->i * depth + l;
        uint8_t *to = a->w.codes[DPL_MX_FORWARD] + at * DPL_PANEL;
        quantize_block_32(a, part->q, true, x + l * DPL_PANEL, m, codes,
                          a->w.scales[DPL_MX_FORWARD] + at);
        for (size_t i = 0; i < DPL_MX_BLOCK; i += 2)
            for (size_t j = 0; j < DPL_PANEL; j++, to += 2)
                to[0] = codes[i][j], to[1] = codes[i + 1][j];
        // The same place of the transposed weight.
        const size_t there = (g * depth / DPL_MX_BLOCK + l / DPL_MX_BLOCK) * panels * DPL_PANEL +
                             p * DPL_PANEL;
        uint8_t *scales = a->w.scales[DPL_MX_DGRAD] + there;
        to = a->w.codes[DPL_MX_DGRAD] + there * DPL_PANEL;
        memset(scales, 0, DPL_MX_BLOCK);
        quantize_block_32(a, part->q, false, x + l * DPL_PANEL, m, codes, scales);
        for (size_t j = 0; j < DPL_PANEL; j += 2)
            for (size_t i = 0; i < DPL_MX_BLOCK; i++, to += 2) memcpy(to, &codes[i][j], 2);
    }
}

void dpl_mx_weight_pack(dpl_ctx *ctx, const float *panels, size_t n_groups, size_t n, size_t k,
                        const dpl_mx_weight *w_out) {
    const pack_args a = {
        {pack_panel, n_groups * dpl_div_up(n, DPL_PANEL), 1}, panels, n, k, *w_out};
    const size_t bytes = dpl_mx_weight_bytes(n_groups, n, k);
    DPL_SUBMIT(ctx, dpl_run_loop, a, {w_out->codes[0], bytes}, {w_out->codes[1], bytes},
               {w_out->scales[0], bytes / DPL_MX_BLOCK}, {w_out->scales[1], bytes / DPL_MX_BLOCK});
}

/* ---- NVFP4 ----------------------------------------------------------------------------------- */
#define RANDOM_RUN 128 // elements whose random bits are drawn together

typedef struct nv_args {
    dpl_loop loop;
    dpl_mat x;
    size_t n;
    bool random;
    uint64_t seed_stream[2];
    dpl_nv out;
} nv_args;

static void quantize_rows(const void *args, const dpl_part *part) {
    const nv_args *a = args;
    const size_t first = part->first;
    for (size_t row = first; row < part->end; row++)
        a->out.tensor_scale[row] = dpl_nv_tensor_scale(
            part->q->amax(a->x.dtype, dpl_mat_row(a->x, row), a->n));
    const dpl_nv_rows b = {.dtype = a->x.dtype,
                           .m = part->end - first,
                           .n = a->n,
                           .x = dpl_mat_row(a->x, first),
                           .tensor_scale = a->out.tensor_scale + first,
                           .codes = a->out.codes + first * a->out.ld_codes,
                           .scales = a->out.scales + first * a->out.ld_scales,
                           .ld = a->x.ld,
                           .ld_codes = a->out.ld_codes,
                           .ld_scales = a->out.ld_scales,
                           .seed_stream = a->random ? a->seed_stream : NULL,
                           .first = first * dpl_round_up(a->n, RANDOM_RUN),
                           .ld_random = dpl_round_up(a->n, RANDOM_RUN)};
    part->q->nv_rows(&b);
}

void dpl_nv_quantize(dpl_ctx *ctx, dpl_mat x, size_t n_rows, size_t n,
                     const uint64_t seed_stream[2], dpl_nv out) {
    const size_t row_bytes = n * dpl_dtype_bytes(x.dtype);
    nv_args a = {{quantize_rows, n_rows, dpl_row_grain(row_bytes)}, x, n, seed_stream, {0}, out};
    if (seed_stream) memcpy(a.seed_stream, seed_stream, sizeof a.seed_stream);
    DPL_SUBMIT(ctx, dpl_run_loop, a, {out.tensor_scale, n_rows * sizeof *out.tensor_scale});
}
