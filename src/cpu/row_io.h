// row_io.h - how operators read and write rows of either element type with one code path.
//
// An F32 row is used where it lies; a BF16 row is converted into a buffer of the caller, who works
// on column blocks of DPL_ROW_BLOCK so that this buffer fits on the stack and stays in cache.
#pragma once

#include "cpu/kernels.h"
#include "cpu/ops.h"

#define DPL_ROW_BLOCK ((size_t)1024) // a multiple of DPL_PANEL

// Goes through columns 0 .. d-1 in blocks: `n` of them from `col` on.
#define DPL_EACH_BLOCK(col, n, d) \
    for (size_t col = 0, n; n = DPL_MIN(DPL_ROW_BLOCK, (d)-col), col < (d); col += n)

// `n` elements of `row` from `col` on as fp32: in place, or converted into scratch (n elements).
static inline const float *dpl_row_load(const dpl_row_kernels *k, dpl_mat m, size_t row, size_t col,
                                        size_t n, float *scratch) {
    const void *from = dpl_mat_at(m, row, col).p;
    if (m.dtype == DPL_F32) return from;
    k->from_bf16(from, scratch, n);
    return scratch;
}

// Where to compute them: in place, or scratch that dpl_row_store then converts.
static inline float *dpl_row_target(dpl_mat m, size_t row, size_t col, float *scratch) {
    return m.dtype == DPL_F32 ? dpl_mat_at(m, row, col).p : scratch;
}

static inline void dpl_row_store(const dpl_row_kernels *k, dpl_mat m, size_t row, size_t col,
                                 const float *x, size_t n) {
    void *to = dpl_mat_at(m, row, col).p;
    if (m.dtype == DPL_BF16) k->to_bf16(x, to, n);
    else if (to != x) memcpy(to, x, n * sizeof *x);
}

// Rows of `row_bytes` for one chunk of about 32 KB: enough work to be worth handing to a thread.
static inline size_t dpl_row_grain(size_t row_bytes) {
    return DPL_MAX(1, (size_t)32768 / DPL_MAX(1, row_bytes));
}

// The block that `n_rows` rows of `d` elements fill, for dpl_ctx_submit; empty where other columns
// lie between the rows.
static inline dpl_span dpl_row_span(dpl_mat m, size_t n_rows, size_t d) {
    const size_t bytes = n_rows * d * dpl_dtype_bytes(m.dtype);
    return (dpl_span){m.p, m.ld == d || n_rows <= 1 ? bytes : 0};
}
