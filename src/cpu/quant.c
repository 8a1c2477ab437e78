// quant.c - quantization of matrices whose rows belong to groups.
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
