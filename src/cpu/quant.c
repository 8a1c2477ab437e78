// quant.c - quantization of matrices whose rows belong to groups.
#include "cpu/quant.h"
#include "cpu/row_io.h"

#define TASK_COLUMNS ((size_t)1024) // a multiple of DPL_MX_BLOCK

typedef struct mx_args {
    dpl_mat x;
    dpl_groups groups;
    size_t n, tasks_wide;
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

static dpl_mx_block block_at(const mx_args *a, const dpl_mx *to, size_t row, size_t m, size_t col,
                             size_t n) {
    return (dpl_mx_block){.format = a->format,
                          .rule = a->rule,
                          .dtype = a->x.dtype,
                          .m = m,
                          .n = n,
                          .x = dpl_mat_at(a->x, row, col).p,
                          .codes = to->codes + row * to->ld_codes + col,
                          .ld = a->x.ld,
                          .ld_codes = to->ld_codes,
                          .ld_scales = to->ld_scales};
}

// Some columns of up to 32 rows, which come from memory once.
static void quantize_block(const void *args, const dpl_part *part) {
    const mx_args *a = args;
    const size_t block = part->i / a->tasks_wide, col = part->i % a->tasks_wide * TASK_COLUMNS;
    const size_t n = DPL_MIN(a->n - col, TASK_COLUMNS), g = group_of(&a->groups, block);
    const size_t first = (size_t)first_row(&a->groups, g);
    const size_t row = first + (block - dpl_mx_first_block(g, (int64_t)first)) * DPL_MX_BLOCK;
    const size_t end = (size_t)first_row(&a->groups, g + 1);
    if (row >= end) return;
    const size_t m = DPL_MIN(end - row, (size_t)DPL_MX_BLOCK);
    if (a->by_row.codes) {
        dpl_mx_block b = block_at(a, &a->by_row, row, m, col, n);
        b.scales = a->by_row.scales + row * b.ld_scales + col / DPL_MX_BLOCK;
        part->q->mx_rows(&b);
    }
    if (a->by_column.codes) {
        dpl_mx_block b = block_at(a, &a->by_column, row, m, col, n);
        b.scales = a->by_column.scales + block * b.ld_scales + col;
        part->q->mx_columns(&b);
    }
}

static void mx_quantize(dpl_ctx *ctx, const void *args) {
    const mx_args *a = args;
    const size_t blocks = dpl_mx_column_blocks(a->groups.n, a->groups.n_rows);
    dpl_ctx_loop(ctx, (dpl_loop){quantize_block, blocks * a->tasks_wide, 1}, a);
}

void dpl_mx_quantize(dpl_ctx *ctx, dpl_mat x, dpl_groups groups, size_t n, dpl_code format,
                     dpl_scale_rule rule, dpl_mx by_row, dpl_mx by_column) {
    const mx_args a = {x, groups, n, dpl_div_up(n, TASK_COLUMNS), format, rule, by_row, by_column};
    if (groups.n == 0 || groups.n_rows == 0 || n == 0) return;
    DPL_SUBMIT(ctx, mx_quantize, a, {0});
}

/* ---- operands of products -------------------------------------------------------------------- */
#define SLAB_WIDTH 512

// Each scale `times` times, as mx_expand() wants them.
static void repeat_scales(const uint8_t *scales, size_t n, size_t times, uint16_t *words) {
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < times; j++) words[i * times + j] = scales[i];
}

void dpl_mx_round_rows(const dpl_quant_kernels *q, const dpl_mx_slab *s, uint16_t *y) {
    const size_t width = dpl_mx_width(s->n), blocks = width / DPL_MX_BLOCK;
    uint8_t codes[SLAB_WIDTH] = {0}, scales[SLAB_WIDTH / DPL_MX_BLOCK] = {0};
    uint16_t words[SLAB_WIDTH];
    for (size_t r = 0; r < s->m; r++, y += width) {
        const dpl_mx_block b = {.format = s->format,
                                .rule = s->rule,
                                .dtype = s->x.dtype,
                                .m = 1,
                                .n = s->n,
                                .x = dpl_mat_row(s->x, r),
                                .codes = codes,
                                .scales = scales};
        q->mx_rows(&b);
        repeat_scales(scales, blocks, DPL_MX_BLOCK, words);
        q->mx_expand(s->format, width / DPL_MX_LINE, codes, words, DPL_MX_LINE, y);
    }
}

void dpl_mx_round_columns(const dpl_quant_kernels *q, const dpl_mx_slab *s, uint16_t *y) {
    const size_t width = dpl_mx_width(s->n);
    uint8_t codes[DPL_MX_BLOCK * SLAB_WIDTH], scales[SLAB_WIDTH] = {0};
    uint16_t words[SLAB_WIDTH];
    if (width > s->n) memset(codes, 0, DPL_MX_BLOCK * width);
    for (size_t row = 0; row < s->m; row += DPL_MX_BLOCK) {
        const dpl_mx_block b = {.format = s->format,
                                .rule = s->rule,
                                .dtype = s->x.dtype,
                                .m = DPL_MIN(s->m - row, (size_t)DPL_MX_BLOCK),
                                .n = s->n,
                                .x = dpl_mat_row(s->x, row),
                                .codes = codes,
                                .scales = scales,
                                .ld = s->x.ld,
                                .ld_codes = width};
        q->mx_columns(&b);
        repeat_scales(scales, width, 1, words);
        for (size_t r = 0; r < b.m; r++, y += width)
            q->mx_expand(s->format, width / DPL_MX_LINE, codes + r * width, words, DPL_MX_LINE, y);
    }
}

void dpl_mx_expand_panel(const dpl_quant_kernels *q, const dpl_mx_weight *w, int way, size_t k,
                         size_t panel, size_t l, size_t depth, uint16_t *pairs) {
    const size_t panel_depth = dpl_mx_depth(k), end = l + dpl_round_up(depth, DPL_MX_BLOCK);
    const uint8_t *codes = w->codes[way] + panel * panel_depth * DPL_PANEL;
    uint16_t words[DPL_MX_BLOCK / 2 * DPL_MX_LINE];
    for (; l < end; l += DPL_MX_BLOCK, pairs += DPL_MX_BLOCK * DPL_PANEL) {
        if (way == DPL_MX_FORWARD) {
            const uint8_t *scales = w->scales[way] + panel * panel_depth + l;
            repeat_scales(scales, DPL_PANEL, 2, words);
        } else {
            const uint8_t *scales = w->scales[way] + panel * panel_depth + l;
            for (size_t i = 0; i < DPL_MX_BLOCK / 2; i++)
                for (size_t j = 0; j < DPL_MX_LINE; j++)
                    words[i * DPL_MX_LINE + j] = scales[2 * i + j % 2];
        }
        q->mx_expand(w->rule.format, DPL_MX_BLOCK / 2, codes + l * DPL_PANEL, words,
                     way == DPL_MX_FORWARD ? 0 : DPL_MX_LINE, pairs);
    }
}

typedef struct pack_args {
    dpl_loop loop;
    const float *panels;
    size_t k;
    dpl_mx_weight w;
} pack_args;

// A block of 32 x 32 of a panel, whose codes become pairs.
static void pack_block(const pack_args *a, const dpl_quant_kernels *q, int way, const float *x,
                       size_t m, size_t at, uint8_t *scales) {
    uint8_t codes[DPL_MX_BLOCK * DPL_PANEL] = {0}, *to = a->w.codes[way] + at;
    const dpl_mx_block b = {.format = a->w.rule.format,
                            .rule = a->w.rule.scale,
                            .dtype = DPL_F32,
                            .m = m,
                            .n = DPL_PANEL,
                            .x = x,
                            .codes = codes,
                            .scales = scales,
                            .ld = DPL_PANEL,
                            .ld_codes = DPL_PANEL,
                            .ld_scales = 1};
    if (way == DPL_MX_FORWARD) q->mx_columns(&b);
    else q->mx_rows(&b);
    for (size_t i = 0; i < DPL_MX_BLOCK; i += 2)
        for (size_t j = 0; j < DPL_PANEL; j++) {
            *to++ = codes[i * DPL_PANEL + j];
            *to++ = codes[(i + 1) * DPL_PANEL + j];
        }
}

static void pack_panel(const void *args, const dpl_part *part) {
    const pack_args *a = args;
    const size_t depth = dpl_mx_depth(a->k), panel = part->i;
    const float *x = a->panels + panel * dpl_panel_depth(a->k) * DPL_PANEL;
    for (size_t l = 0; l < a->k; l += DPL_MX_BLOCK) {
        const size_t m = DPL_MIN(a->k - l, (size_t)DPL_MX_BLOCK), at = panel * depth + l;
        uint8_t *forward = a->w.scales[DPL_MX_FORWARD] + at,
                *dgrad = a->w.scales[DPL_MX_DGRAD] + at;
        pack_block(a, part->q, DPL_MX_FORWARD, x + l * DPL_PANEL, m, at * DPL_PANEL, forward);
        memset(dgrad, 0, DPL_MX_BLOCK);
        pack_block(a, part->q, DPL_MX_DGRAD, x + l * DPL_PANEL, m, at * DPL_PANEL, dgrad);
    }
}

void dpl_mx_weight_pack(dpl_ctx *ctx, const float *panels, size_t n_groups, size_t n, size_t k,
                        const dpl_mx_weight *w_out) {
    const pack_args a = {{pack_panel, n_groups * dpl_div_up(n, DPL_PANEL), 1}, panels, k, *w_out};
    size_t bytes[3];
    dpl_mx_weight_bytes(n_groups, n, k, bytes);
    DPL_SUBMIT(ctx, dpl_run_loop, a, {w_out->codes[0], bytes[0]}, {w_out->codes[1], bytes[0]},
               {w_out->scales[0], bytes[1]}, {w_out->scales[1], bytes[2]});
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
    for (size_t row = part->first; row < part->end; row++) {
        const void *x = dpl_mat_row(a->x, row);
        float *scale = a->out.tensor_scale + row;
        *scale = dpl_nv_tensor_scale(part->q->amax(a->x.dtype, x, a->n));
        const dpl_nv_rows b = {.dtype = a->x.dtype,
                               .m = 1,
                               .n = a->n,
                               .x = x,
                               .tensor_scale = scale,
                               .codes = a->out.codes + row * a->out.ld_codes,
                               .scales = a->out.scales + row * a->out.ld_scales,
                               .seed_stream = a->random ? a->seed_stream : NULL,
                               .first = row * dpl_round_up(a->n, RANDOM_RUN)};
        part->q->nv_rows(&b);
    }
}

void dpl_nv_quantize(dpl_ctx *ctx, dpl_mat x, size_t n_rows, size_t n,
                     const uint64_t seed_stream[2], dpl_nv out) {
    const size_t row_bytes = n * dpl_dtype_bytes(x.dtype);
    nv_args a = {{quantize_rows, n_rows, dpl_row_grain(row_bytes)}, x, n, seed_stream, {0}, out};
    if (seed_stream) memcpy(a.seed_stream, seed_stream, sizeof a.seed_stream);
    DPL_SUBMIT(ctx, dpl_run_loop, a, {out.tensor_scale, n_rows * sizeof *out.tensor_scale});
}
