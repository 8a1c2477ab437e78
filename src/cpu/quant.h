// quant.h - what the grouped GEMM has from quantization.
#pragma once

#include "cpu/kernels.h"
#include "cpu/ops.h"

// Rows x (m, n <= 512) rounded to MXFP8, in blocks along them, in bf16: y (m, n).
void dpl_mx_round_rows(const dpl_quant_kernels *q, dpl_code format, dpl_scale_rule rule, dpl_mat x,
                       size_t m, size_t n, uint16_t *y);

// Rows l .. l + depth - 1 of a panel (of all groups' in a row) as pairs of bf16, [l / 2][32][2]; l:
// whole blocks. panel_depth: rows of a panel, whole blocks; way: DPL_MX_FORWARD or DPL_MX_DGRAD.
// Codes so far ahead in memory are fetched.
void dpl_mx_expand_panel(const dpl_quant_kernels *q, const dpl_mx_weight *w, int way,
                         size_t panel_depth, size_t panel, size_t l, size_t depth, ptrdiff_t ahead,
                         uint16_t *pairs);

// Rows first .. first + m - 1 and columns col .. col + n - 1 of codes that dpl_mx_quantize() made
// by column, in bf16: y (m, n). block: that of the first row.
void dpl_mx_expand_columns(const dpl_quant_kernels *q, dpl_code format, dpl_mx codes, size_t first,
                           size_t block, size_t m, size_t col, size_t n, uint16_t *y);
