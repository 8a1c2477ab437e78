// quant.h - what the grouped GEMM has from quantization.
#pragma once

#include "cpu/kernels.h"
#include "cpu/ops.h"

// Rows x (m, n <= 512) rounded to MXFP8, in blocks along them, in bf16: y (m, n).
void dpl_mx_round_rows(const dpl_quant_kernels *q, dpl_code format, dpl_scale_rule rule, dpl_mat x,
                       size_t m, size_t n, uint16_t *y);

// Rows row .. row + m - 1, which lie where `map` says, and columns col .. col + n - 1 of NVFP4
// codes by row, without their tensor scales, in bf16: y (m, n). col: whole blocks.
void dpl_quant_expand_rows(const dpl_quant_kernels *q, dpl_codes codes, dpl_row_map map, size_t row,
                           size_t m, size_t col, size_t n, uint16_t *y);

// Rows l .. l + depth - 1 of a panel (of all groups' in a row) as pairs of bf16, [l / 2][32][2]; l:
// whole blocks. panel_depth: rows of a panel, whole blocks; way: DPL_QUANT_FORWARD or
// DPL_QUANT_DGRAD. Codes so far ahead in memory are fetched.
void dpl_quant_expand_panel(const dpl_quant_kernels *q, const dpl_quant_weight *w, int way,
                            size_t panel_depth, size_t panel, size_t l, size_t depth,
                            ptrdiff_t ahead, uint16_t *pairs);

// m rows and columns col .. col + n - 1 of codes by column, in bf16: y (m, n). first, block: the
// first row, and its block; in NVFP4 m is whole blocks.
void dpl_quant_expand_columns(const dpl_quant_kernels *q, dpl_code format, dpl_codes codes,
                              size_t first, size_t block, size_t m, size_t col, size_t n,
                              uint16_t *y);
