// api.h - what the files of the public interface share: checks of arguments, paths, sizes.
#pragma once

#include <stdio.h>

#include "io/io.h"
#include "model/model.h"
#include "train/train.h"

/* ---- operators.c: DPL_EINVAL names the field ---- */
dpl_status dpl_check_size(const char *name, size_t value, size_t min, size_t max);
dpl_status dpl_check_dtype(const char *name, dpl_dtype dtype);
dpl_status dpl_check_rule(const dpl_route_rule *rule);
dpl_status dpl_check_finite(const char *name, const float *x, size_t n); // NULL is fine
// DPL_ENOSPC where ws_bytes < needed, DPL_EINVAL where it is not aligned.
dpl_status dpl_check_workspace(const void *ws, size_t ws_bytes, size_t needed);
// n_rows rows of the caller, `ld` elements from row to row (0: width).
dpl_status dpl_check_mat(const char *name, const void *p, size_t ld, size_t width, size_t n_rows,
                         dpl_dtype dtype, dpl_mat *mat_out);
// Row-major (n, k) to panels of dtype; those of BF16 by way of `panels` in fp32 (F32: not used).
void dpl_pack_rows(dpl_ctx *ctx, const float *rows, size_t n, size_t k, dpl_dtype dtype,
                   float *panels, void *packed);

/* ---- model.c ---- */
dpl_status dpl_api_apply(dpl_config *config, const char *const *settings, size_t n_settings);
// Defaults with this dtype, and with `max_target_length` cut to the positions of the model.
dpl_status dpl_api_defaults(const dpl_model_config *model, dpl_dtype dtype,
                            dpl_config **config_out);
void dpl_api_describe(const dpl_model_config *c, dpl_dtype dtype, dpl_model_info *info);
const char *dpl_api_dtype_name(dpl_dtype dtype);
// What must hold before memory of that size is touched; the model checks the rest.
dpl_status dpl_api_check_batch(const dpl_model_config *config, size_t n_batch, size_t n_seq);
