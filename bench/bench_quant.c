// bench_quant.c - `bench quant`: the quantizers against a copy of as many bytes in the same run.
//
// The limit is the time that a plain copy of the numbers would take for the bytes that are read and
// written: numbers in, codes and scales out.
#include <stdio.h>

#include "bench.h"
#include "cpu/kernels.h"

#define COPY_BYTES ((size_t)1 << 20)

static const char *const ways[] = {"all", "row", "column", "both", NULL};
static const char *const formats[] = {"e4m3", "e5m2", "nvfp4", NULL}; // as dpl_code
static const char *const roundings[] = {"nearest", "random", NULL};
static const char *const rules[] = {"up", "floor", NULL};

typedef struct quant_bench {
    dpl_ctx *ctx;
    size_t way, rows, n, bytes; // way: of ways; bytes: of x
    dpl_code format;
    dpl_scale_rule rule;
    dpl_mat x;
    dpl_groups groups;
    dpl_codes by_row, by_column, nv, nv_column;
    bool random;
    uint8_t *copy;
} quant_bench;

static void run_quantize(void *arg) {
    const quant_bench *b = arg;
    const dpl_codes none = {0};
    static const uint64_t seed_stream[2] = {1, 1};
    const uint64_t *random = b->random ? seed_stream : NULL;
    if (b->format == DPL_E2M1 && b->way == 1)
        dpl_nv_quantize(b->ctx, b->x, b->groups, b->n, random, b->nv);
    else if (b->format == DPL_E2M1)
        dpl_nv_quantize_columns(b->ctx, b->x, (dpl_row_map){0}, b->groups, b->n, 0x5a3c, random,
                                b->nv_column);
    else
        dpl_mx_quantize(b->ctx, b->x, (dpl_row_map){0}, b->groups, b->n, b->format, b->rule,
                        b->way == 2 ? none : b->by_row, b->way == 1 ? none : b->by_column);
    dpl_ctx_wait(b->ctx);
}

static void copy_chunk(void *arg, size_t i_task, int i_thread) {
    const quant_bench *b = arg;
    const size_t at = i_task * COPY_BYTES;
    (void)i_thread;
    memcpy(b->copy + at, (const uint8_t *)b->x.p + at, DPL_MIN(COPY_BYTES, b->bytes - at));
}

static void run_copy(void *arg) {
    const quant_bench *b = arg;
    dpl_pool_run(b->ctx->pool, dpl_div_up(b->bytes, COPY_BYTES), copy_chunk, arg);
}

static dpl_status report(quant_bench *b, size_t runs, bool json) {
    double medians[2];
    dpl_bench_turns(runs, (void (*const[])(void *)){run_quantize, run_copy}, b, medians);
    const double seconds = medians[0], copy_s = medians[1];
    const double elems = (double)b->rows * (double)b->n;
    const double codes = elems * (b->format == DPL_E2M1 ? 0.5 + 1.0 / 16 : 1 + 1.0 / DPL_MX_BLOCK);
    const double bytes = (double)b->bytes + codes * (b->way == 3 ? 2 : 1);
    const double copy_rate = 2 * (double)b->bytes / copy_s, limit_s = bytes / copy_rate;
    json_t *row = json_pack(
        "{ss ss ss ss ss sI sI si sf sf sf sf sf}", "bench", "quant", "way", ways[b->way], "format",
        formats[b->format], b->format == DPL_E2M1 ? "rounding" : "scale_rule",
        b->format == DPL_E2M1 ? roundings[b->random] : rules[b->rule], "dtype",
        dpl_bench_dtypes[b->x.dtype], "rows", (json_int_t)b->rows, "n", (json_int_t)b->n, "threads",
        dpl_ctx_threads(b->ctx), "median_us", seconds * 1e6, "gbs", bytes / seconds * 1e-9,
        "copy_gbs", copy_rate * 1e-9, "limit_us", limit_s * 1e6, "fraction", limit_s / seconds);
    return dpl_bench_print(row, json);
}

// Normal numbers: as activations are, few are tiny beside the others of their block.
static void *normal_numbers(size_t n, dpl_dtype dtype) {
    void *p = dpl_alloc_array(n, dpl_dtype_bytes(dtype));
    for (size_t i = 0; p && i < n; i++) {
        const float x = (float)dpl_rng_normal(1, 0, i % 65521);
        if (dtype == DPL_F32) ((float *)p)[i] = x;
        else ((uint16_t *)p)[i] = dpl_f32_to_bf16(x);
    }
    return p;
}

static dpl_status make_operands(quant_bench *b, dpl_dtype dtype, int64_t **offsets_out) {
    const size_t E = b->groups.n, n_scales = dpl_div_up(b->n, DPL_MX_BLOCK);
    int64_t *offsets = dpl_alloc_array(E + 1, sizeof *offsets);
    b->x = (dpl_mat){normal_numbers(b->rows * b->n, dtype), b->n, dtype};
    b->bytes = b->rows * b->n * dpl_dtype_bytes(dtype);
    b->copy = dpl_alloc(b->bytes);
    const size_t nv_blocks = dpl_column_blocks(DPL_NV_BLOCK, E, b->rows);
    b->by_row = (dpl_codes){dpl_alloc_array(b->rows, b->n), dpl_alloc_array(b->rows, n_scales),
                            b->n, n_scales, NULL};
    b->by_column = (dpl_codes){dpl_alloc_array(b->rows + 8 * E, b->n),
                               dpl_alloc_array(dpl_column_blocks(DPL_MX_BLOCK, E, b->rows), b->n),
                               b->n, b->n, NULL};
    b->nv = (dpl_codes){b->by_row.codes, dpl_alloc_array(b->rows, dpl_div_up(b->n, 16)), b->n,
                        dpl_div_up(b->n, 16), dpl_alloc_array(b->rows, sizeof(float))};
    b->nv_column = (dpl_codes){b->by_column.codes, dpl_alloc_array(nv_blocks, b->n), b->n, b->n,
                               dpl_alloc_array(E * b->n, sizeof(float))};
    *offsets_out = offsets;
    if (!offsets || !b->x.p || !b->copy || !b->by_row.codes || !b->by_row.scales ||
        !b->by_column.codes || !b->by_column.scales || !b->nv.scales || !b->nv.tensor_scale ||
        !b->nv_column.scales || !b->nv_column.tensor_scale)
        return dpl_fail(DPL_ENOMEM, "bench quant: no memory for %zu x %zu numbers", b->rows, b->n);
    for (size_t e = 0; e <= E; e++) offsets[e] = (int64_t)(e * b->rows / E);
    b->groups.offsets = offsets;
    b->groups.n_rows = b->rows;
    return DPL_OK;
}

int dpl_bench_run_quant(dpl_bench_args *args) {
    quant_bench b = {.rows = dpl_bench_size(args, "rows", 16384),
                     .n = dpl_bench_size(args, "n", 2048),
                     .groups = {.n = dpl_bench_size(args, "experts", 64)}};
    const size_t way = dpl_bench_choice(args, "way", ways);
    b.format = (dpl_code)dpl_bench_choice(args, "format", formats);
    b.rule = (dpl_scale_rule)dpl_bench_choice(args, "scale_rule", rules);
    b.random = dpl_bench_choice(args, "rounding", roundings);
    const dpl_dtype dtype = (dpl_dtype)dpl_bench_choice(
                                args, "dtype", (const char *const[]){"bf16", "f32", NULL}) == 0
                                ? DPL_BF16
                                : DPL_F32;
    const int threads = (int)dpl_bench_size(args, "threads", 0);
    const size_t runs = dpl_bench_size(args, "runs", 15);
    if (!dpl_bench_args_done(args)) return 2;
    if (!b.rows || !b.n || !b.groups.n) {
        fputs("bench quant: expected sizes above 0\n", stderr);
        return 2;
    }
    int64_t *offsets = NULL;
    dpl_status status = dpl_ctx_create(threads, false, 0, &b.ctx);
    if (status == DPL_OK) status = make_operands(&b, dtype, &offsets);
    for (b.way = 1; status == DPL_OK && b.way < 4; b.way++)
        if ((way == 0 || way == b.way) && !(b.format == DPL_E2M1 && b.way == 3))
            status = report(&b, runs, args->json);
    if (status != DPL_OK) fprintf(stderr, "%s\n", dpl_error_message());
    dpl_free(b.x.p), dpl_free(b.copy), dpl_free(offsets);
    dpl_free(b.by_row.codes), dpl_free(b.by_row.scales);
    dpl_free(b.nv.scales), dpl_free(b.nv.tensor_scale);
    dpl_free(b.nv_column.scales), dpl_free(b.nv_column.tensor_scale);
    dpl_free(b.by_column.codes), dpl_free(b.by_column.scales);
    dpl_ctx_close(&b.ctx);
    return status != DPL_OK;
}
