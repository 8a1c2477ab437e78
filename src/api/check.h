// check.h - what the operators and the layer of the public interface share.
#ifndef DPL_API_CHECK_H
#define DPL_API_CHECK_H

#include "moe/moe.h"

// DPL_EINVAL names the field.
dpl_status dpl_check_size(const char *name, size_t value, size_t min, size_t max);
dpl_status dpl_check_dtype(const char *name, dpl_dtype dtype);
dpl_status dpl_check_rule(const dpl_route_rule *rule);
// DPL_ENOSPC where ws_bytes < needed, DPL_EINVAL where it is not aligned.
dpl_status dpl_check_workspace(const void *ws, size_t ws_bytes, size_t needed);
// n_rows rows of the caller, `ld` elements from row to row (0: width).
dpl_status dpl_check_mat(const char *name, const void *p, size_t ld, size_t width, size_t n_rows,
                         dpl_dtype dtype, dpl_mat *mat_out);

// Row-major (n, k) to panels of dtype; those of BF16 by way of `panels` in fp32 (F32: not used).
void dpl_pack_rows(dpl_ctx *ctx, const float *rows, size_t n, size_t k, dpl_dtype dtype,
                   float *panels, void *packed);

#endif
