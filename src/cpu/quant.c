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
    dpl_codes by_row, by_column;
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
        if (dpl_first_block(DPL_MX_BLOCK, mid, first_row(groups, mid)) <= block) low = mid;
        else high = mid;
    }
    return low;
}

static dpl_mx_block block_at(const mx_args *a, const dpl_codes *to, dpl_mat x, size_t row, size_t m,
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
        const size_t from = dpl_mapped_row(a->map, row + r);
        uint8_t *to = (uint8_t *)scratch + r * bytes;
        if (from == DPL_NO_ROW) memset(to, 0, bytes);
        else memcpy(to, dpl_mat_at(a->x, from, col).p, bytes);
    }
    return (dpl_mat){scratch, n, a->x.dtype};
}

// Some columns of up to 32 rows, which come from memory once. With `more` the next ones follow.
static void quantize_block(const mx_args *a, const dpl_part *part, size_t i_task, bool more) {
    const size_t block = i_task / a->tasks_wide, col = i_task % a->tasks_wide * a->wide;
    const size_t n = DPL_MIN(a->n - col, a->wide), g = group_of(&a->groups, block);
    const size_t first = (size_t)first_row(&a->groups, g);
    const size_t row = first +
                       (block - dpl_first_block(DPL_MX_BLOCK, g, (int64_t)first)) * DPL_MX_BLOCK;
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
    const size_t blocks = dpl_column_blocks(DPL_MX_BLOCK, a->groups.n, a->groups.n_rows);
    const size_t n = blocks * a->tasks_wide;
    const size_t each = n / (TASKS_PER_THREAD * (size_t)dpl_ctx_threads(ctx));
    dpl_ctx_loop(ctx, (dpl_loop){quantize_blocks, n, DPL_MIN(DPL_MAX(each, 1), 8)}, a);
}

void dpl_mx_quantize(dpl_ctx *ctx, dpl_mat x, dpl_row_map map, dpl_groups groups, size_t n,
                     dpl_code format, dpl_scale_rule rule, dpl_codes by_row, dpl_codes by_column) {
    const size_t wide = TASK_BYTES / DPL_MX_BLOCK / dpl_dtype_bytes(x.dtype);
    const mx_args a = {x,      map,  groups, n,        wide, dpl_div_up(n, wide),
                       format, rule, by_row, by_column};
    if (groups.n == 0 || groups.n_rows == 0 || n == 0) return;
    DPL_SUBMIT(ctx, mx_quantize, a, {0});
}

typedef struct expand_args {
    dpl_loop loop;
    dpl_codes mx;
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

void dpl_mx_expand_rows(dpl_ctx *ctx, dpl_codes by_row, size_t n_rows, size_t n, dpl_code format,
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

void dpl_quant_expand_rows(const dpl_quant_kernels *q, dpl_codes codes, dpl_row_map map, size_t row,
                           size_t m, size_t col, size_t n, uint16_t *y) {
    for (size_t r = row; r < row + m; r++, y += n) {
        const size_t at = dpl_mapped_row(map, r);
        if (at == DPL_NO_ROW) memset(y, 0, n * sizeof *y);
        else
            q->nv_expand_row(n, codes.codes + at * codes.ld_codes + col / 2,
                             codes.scales + at * codes.ld_scales + col / DPL_NV_BLOCK, y);
    }
}

void dpl_quant_expand_panel(const dpl_quant_kernels *q, const dpl_quant_weight *w, int way,
                            size_t panel_depth, size_t panel, size_t l, size_t depth,
                            ptrdiff_t ahead, uint16_t *pairs) {
    const size_t at = panel * panel_depth + l;
    if (w->rule.format == DPL_E2M1)
        q->nv_expand_pairs(dpl_div_up(depth, DPL_NV_BLOCK), w->codes[way] + at * DPL_PANEL / 2,
                           w->scales[way] + at / DPL_NV_BLOCK * 2, pairs, ahead);
    else
        q->expand_pairs(w->rule.format, dpl_div_up(depth, DPL_MX_BLOCK),
                        w->codes[way] + at * DPL_PANEL, w->scales[way] + at, pairs, ahead);
}

void dpl_quant_expand_columns(const dpl_quant_kernels *q, dpl_code format, dpl_codes codes,
                              size_t first, size_t block, size_t m, size_t col, size_t n,
                              uint16_t *y) {
    if (format == DPL_E2M1) {
        for (size_t r = 0; r < m; r += DPL_NV_BLOCK, block++)
            q->nv_expand_columns(n, codes.codes + block * 8 * codes.ld_codes + col, codes.ld_codes,
                                 codes.scales + block * codes.ld_scales + col, y + r * n, n);
        return;
    }
    for (size_t r = 0; r < m; r += DPL_MX_BLOCK, block++)
        q->expand_columns(format, DPL_MIN(m - r, (size_t)DPL_MX_BLOCK), n,
                          codes.codes + (first + r) * codes.ld_codes + col, codes.ld_codes,
                          codes.scales + block * codes.ld_scales + col, y + r * n, n);
}

/* ---- weights --------------------------------------------------------------------------------- */
typedef struct pack_args {
    const float *panels;
    size_t n_groups, n, k;
    dpl_quant_weight w;
    float *amax; // NVFP4: of each panel
    dpl_adamw rule;
    const float *grad; // NULL: no update
    float *param, *m, *v;
} pack_args;

// The update of n_rows rows of a panel from row l on: what is made of them next is still in cache.
static void update_rows(const pack_args *a, const dpl_part *part, size_t l, size_t n_rows) {
    const size_t i = (part->i * dpl_panel_depth(a->k) + l) * DPL_PANEL;
    if (a->grad)
        part->k->adamw(&a->rule, a->grad + i, a->param + i, a->m + i, a->v + i, n_rows * DPL_PANEL);
}

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

static void mx_pack_panel(const void *args, const dpl_part *part) {
    const pack_args *a = args;
    const size_t depth = dpl_round_up(a->k, DPL_MX_BLOCK), panels = dpl_div_up(a->n, DPL_PANEL);
    const size_t g = part->i / panels, p = part->i % panels;
    const float *x = a->panels + part->i * dpl_panel_depth(a->k) * DPL_PANEL;
    uint8_t codes[DPL_MX_BLOCK + 1][DPL_PANEL];
    for (size_t l = 0; l < a->k; l += DPL_MX_BLOCK) {
        const size_t m = DPL_MIN(a->k - l, (size_t)DPL_MX_BLOCK), at = part->i * depth + l;
        uint8_t *to = a->w.codes[DPL_QUANT_FORWARD] + at * DPL_PANEL;
        update_rows(a, part, l, m);
        quantize_block_32(a, part->q, true, x + l * DPL_PANEL, m, codes,
                          a->w.scales[DPL_QUANT_FORWARD] + at);
        for (size_t i = 0; i < DPL_MX_BLOCK; i += 2)
            for (size_t j = 0; j < DPL_PANEL; j++, to += 2)
                to[0] = codes[i][j], to[1] = codes[i + 1][j];
        // The same place of the transposed weight.
        const size_t there = (g * depth / DPL_MX_BLOCK + l / DPL_MX_BLOCK) * panels * DPL_PANEL +
                             p * DPL_PANEL;
        uint8_t *scales = a->w.scales[DPL_QUANT_DGRAD] + there;
        to = a->w.codes[DPL_QUANT_DGRAD] + there * DPL_PANEL;
        memset(scales, 0, DPL_MX_BLOCK);
        quantize_block_32(a, part->q, false, x + l * DPL_PANEL, m, codes, scales);
        for (size_t j = 0; j < DPL_PANEL; j += 2)
            for (size_t i = 0; i < DPL_MX_BLOCK; i++, to += 2) memcpy(to, &codes[i][j], 2);
    }
}

static void panel_amax(const void *args, const dpl_part *part) {
    const pack_args *a = args;
    const float *x = a->panels + part->i * dpl_panel_depth(a->k) * DPL_PANEL;
    float most = 0;
    for (size_t l = 0; l < a->k; l += DPL_MX_BLOCK) {
        const size_t m = DPL_MIN(a->k - l, (size_t)DPL_MX_BLOCK);
        update_rows(a, part, l, m);
        const float amax = part->q->amax(DPL_F32, x + l * DPL_PANEL, m * DPL_PANEL);
        if (!(amax <= most)) most = amax; // NaN stays
    }
    a->amax[part->i] = most;
}

// Rows l .. l + 15 of panel p of a group, columns first, then the others: those of the transposed
// weight too.
static void nv_pack_rows(const pack_args *a, const dpl_quant_kernels *q, size_t g, size_t p,
                         size_t l, float tensor_scale) {
    const size_t panels = dpl_div_up(a->n, DPL_PANEL), panels_k = dpl_div_up(a->k, DPL_PANEL);
    const float *x = a->panels + (g * panels + p) * dpl_panel_depth(a->k) * DPL_PANEL;
    float padded[DPL_NV_BLOCK * DPL_PANEL] = {0};
    const float *rows = x + l * DPL_PANEL;
    if (l + DPL_NV_BLOCK > a->k) {
        if (l < a->k) memcpy(padded, rows, (a->k - l) * DPL_PANEL * sizeof *rows);
        rows = padded;
    }
    const size_t here = (g * panels + p) * panels_k * 2 + l / DPL_NV_BLOCK;
    for (size_t h = 0; h < 2; h++) {
        const size_t at = 2 * here + h;
        const size_t there = ((g * panels_k + l / DPL_PANEL) * panels + p) * 4 + 2 * h +
                             l / DPL_NV_BLOCK % 2;
        const uint8_t scale = q->nv_weight(rows + h * DPL_NV_BLOCK, DPL_PANEL, tensor_scale,
                                           a->w.codes[DPL_QUANT_FORWARD] + at * 128,
                                           a->w.codes[DPL_QUANT_DGRAD] + there * 128);
        a->w.scales[DPL_QUANT_FORWARD][at] = a->w.scales[DPL_QUANT_DGRAD][there] = scale;
    }
}

static void nv_pack_panel(const void *args, const dpl_part *part) {
    const pack_args *a = args;
    const size_t panels = dpl_div_up(a->n, DPL_PANEL), g = part->i / panels, p = part->i % panels;
    float amax = 0;
    for (size_t i = g * panels; i < (g + 1) * panels; i++)
        if (!(a->amax[i] <= amax)) amax = a->amax[i]; // NaN stays
    const float tensor_scale = dpl_nv_tensor_scale(amax);
    if (p == 0) a->w.tensor_scale[g] = tensor_scale;
    for (size_t l = 0; l < dpl_round_up(a->k, DPL_PANEL); l += DPL_NV_BLOCK)
        nv_pack_rows(a, part->q, g, p, l, tensor_scale);
}

static void pack_weight(dpl_ctx *ctx, const void *args) {
    const pack_args *a = args;
    const size_t n_panels = a->n_groups * dpl_div_up(a->n, DPL_PANEL);
    const bool nv = a->w.rule.format == DPL_E2M1;
    if (nv) dpl_ctx_loop(ctx, (dpl_loop){panel_amax, n_panels, 1}, a);
    dpl_ctx_loop(ctx, (dpl_loop){nv ? nv_pack_panel : mx_pack_panel, n_panels, 1}, a);
}

static void submit_pack(dpl_ctx *ctx, pack_args a) {
    const dpl_code format = a.w.rule.format;
    const size_t mark = dpl_ctx_mark(ctx), n_panels = a.n_groups * dpl_div_up(a.n, DPL_PANEL);
    const size_t codes = dpl_quant_code_bytes(format, a.n_groups, a.n, a.k);
    const size_t scales = dpl_quant_scale_bytes(format, a.n_groups, a.n, a.k);
    if (format == DPL_E2M1) a.amax = dpl_ctx_alloc(ctx, n_panels * sizeof *a.amax);
    DPL_SUBMIT(ctx, pack_weight, a, {a.w.codes[0], codes}, {a.w.codes[1], codes},
               {a.w.scales[0], scales}, {a.w.scales[1], scales});
    dpl_ctx_release(ctx, mark);
}

void dpl_quant_weight_pack(dpl_ctx *ctx, const float *panels, size_t n_groups, size_t n, size_t k,
                           const dpl_quant_weight *w_out) {
    submit_pack(ctx,
                (pack_args){.panels = panels, .n_groups = n_groups, .n = n, .k = k, .w = *w_out});
}

void dpl_adamw_quantize(dpl_ctx *ctx, const dpl_adamw *adamw, const float *grad, size_t n_groups,
                        size_t n, size_t k, float *param, float *m, float *v,
                        const dpl_quant_weight *w_out) {
    submit_pack(ctx, (pack_args){.panels = param,
                                 .n_groups = n_groups,
                                 .n = n,
                                 .k = k,
                                 .w = *w_out,
                                 .rule = *adamw,
                                 .grad = grad,
                                 .param = param,
                                 .m = m,
                                 .v = v});
}

/* ---- NVFP4 ----------------------------------------------------------------------------------- */
#define RANDOM_RUN 128 // elements whose random bits are drawn together
#define NV_STRIP   128 // columns of a task: whole runs

typedef struct nv_args {
    dpl_loop loop;
    dpl_mat x;
    dpl_groups groups;
    size_t n;
    bool random;
    uint64_t seed_stream[2];
    dpl_codes out;
} nv_args;

static void quantize_rows(const void *args, const dpl_part *part) {
    const nv_args *a = args;
    const size_t n_rows = (size_t)first_row(&a->groups, a->groups.n);
    const size_t first = part->first, end = DPL_MIN(part->end, n_rows);
    if (first >= end) return;
    for (size_t row = first; row < end; row++)
        a->out.tensor_scale[row] = dpl_nv_tensor_scale(
            part->q->amax(a->x.dtype, dpl_mat_row(a->x, row), a->n));
    const dpl_nv_rows b = {.dtype = a->x.dtype,
                           .m = end - first,
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

void dpl_nv_quantize(dpl_ctx *ctx, dpl_mat x, dpl_groups groups, size_t n,
                     const uint64_t seed_stream[2], dpl_codes out) {
    const size_t grain = dpl_row_grain(n * dpl_dtype_bytes(x.dtype));
    nv_args a = {{quantize_rows, groups.n_rows, grain}, x, groups, n, seed_stream, {0}, out};
    if (seed_stream) memcpy(a.seed_stream, seed_stream, sizeof a.seed_stream);
    DPL_SUBMIT(ctx, dpl_run_loop, a, {0});
}

typedef struct nv_columns_args {
    dpl_loop loop;
    dpl_mat x;
    dpl_row_map map;
    dpl_groups groups;
    size_t n;
    uint16_t signs;
    bool random;
    uint64_t seed_stream[2];
    dpl_codes out;
} nv_columns_args;

// Rows of a group from `row` on, at most 16.
static void take_rows(const nv_columns_args *a, size_t row, size_t end, size_t col,
                      dpl_nv_columns *b) {
    b->m = DPL_MIN(end - row, (size_t)DPL_NV_BLOCK);
    for (size_t i = 0; i < b->m; i++) {
        const size_t at = dpl_mapped_row(a->map, row + i);
        b->rows[i] = at == DPL_NO_ROW ? NULL : dpl_mat_at(a->x, at, col).p;
    }
}

// Some columns of a group, twice: they stay in a cache between.
static void quantize_columns(const void *args, const dpl_part *part) {
    const nv_columns_args *a = args;
    const size_t strips = dpl_div_up(a->n, NV_STRIP), g = part->i / strips;
    const size_t col = part->i % strips * NV_STRIP, n = DPL_MIN(a->n - col, (size_t)NV_STRIP);
    const size_t first = (size_t)first_row(&a->groups, g);
    const size_t end = (size_t)first_row(&a->groups, g + 1);
    const size_t first_block = dpl_first_block(DPL_NV_BLOCK, g, (int64_t)first);
    float *tensor_scale = a->out.tensor_scale + g * a->n + col, amax[NV_STRIP] = {0};
    dpl_nv_columns b = {.dtype = a->x.dtype,
                        .n = n,
                        .signs = a->signs,
                        .tensor_scale = tensor_scale,
                        .ld_codes = a->out.ld_codes,
                        .seed_stream = a->random ? a->seed_stream : NULL,
                        .ld_random = dpl_round_up(a->n, RANDOM_RUN)};
    for (size_t row = first; row < end; row += DPL_NV_BLOCK) {
        take_rows(a, row, end, col, &b);
        part->q->nv_columns_amax(&b, amax);
    }
    for (size_t c = 0; c < n; c++) tensor_scale[c] = dpl_nv_tensor_scale(amax[c]);
    for (size_t row = first; row < end; row += DPL_NV_BLOCK) {
        const size_t block = first_block + (row - first) / DPL_NV_BLOCK;
        take_rows(a, row, end, col, &b);
        b.codes = a->out.codes + block * 8 * a->out.ld_codes + col;
        b.scales = a->out.scales + block * a->out.ld_scales + col;
        b.first = block * DPL_NV_BLOCK * b.ld_random + col;
        part->q->nv_columns(&b);
    }
}

void dpl_nv_quantize_columns(dpl_ctx *ctx, dpl_mat x, dpl_row_map map, dpl_groups groups, size_t n,
                             uint16_t signs, const uint64_t seed_stream[2], dpl_codes out) {
    const dpl_loop loop = {quantize_columns, groups.n * dpl_div_up(n, NV_STRIP), 1};
    nv_columns_args a = {loop, x, map, groups, n, signs, seed_stream, {0}, out};
    if (seed_stream) memcpy(a.seed_stream, seed_stream, sizeof a.seed_stream);
    DPL_SUBMIT(ctx, dpl_run_loop, a, {out.tensor_scale, groups.n * n * sizeof(float)});
}
