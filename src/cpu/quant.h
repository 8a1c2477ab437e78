// quant.h - what the grouped GEMM has from quantization: operands rounded to MXFP8 as it packs
// them, and pieces of quantized weights as bf16.
#pragma once

#include "cpu/kernels.h"
#include "cpu/ops.h"

#define DPL_MX_LINE 64 // codes that are expanded together

// A slab of m x n numbers, of which the result has n rounded up to whole lines a row.
typedef struct dpl_mx_slab {
    dpl_code format;
    dpl_scale_rule rule;
    dpl_mat x;
    size_t m, n;
} dpl_mx_slab;
static inline size_t dpl_mx_width(size_t n) {
    return dpl_round_up(n, DPL_MX_LINE);
}

// The slab rounded to MXFP8, in bf16 (m, dpl_mx_width(n)), in blocks along its rows, or down its
// columns, from the first on. What follows column n of a row is anything. n: at most 512.
void dpl_mx_round_rows(const dpl_quant_kernels *q, const dpl_mx_slab *s, uint16_t *y);
void dpl_mx_round_columns(const dpl_quant_kernels *q, const dpl_mx_slab *s, uint16_t *y);

// Rows l .. l + depth - 1 of a panel (of all groups' in a row) as pairs of bf16, [l / 2][32][2];
// l and depth: whole blocks, or up to the end of k. way: DPL_MX_FORWARD or DPL_MX_DGRAD.
void dpl_mx_expand_panel(const dpl_quant_kernels *q, const dpl_mx_weight *w, int way, size_t k,
                         size_t panel, size_t l, size_t depth, uint16_t *pairs);
