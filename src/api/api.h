/*
 * api.h - what the files of the public interface share: paths, settings, checks of what a caller gives.
 */
#ifndef DPL_API_API_H
#define DPL_API_API_H

#include <stdio.h>

#include "io/io.h"
#include "model/model.h"
#include "train/train.h"

/* ---- path.c ---- */
// The model directory of PATH (PATH_MAX each), and the run that it belongs to: "" if none, NULL: not wanted.
dpl_status dpl_api_resolve(const char *path, char *dir_out, char *run_out);
dpl_status dpl_api_apply(dpl_config *config, const char *const *settings, size_t n_settings);
// The value of an option that is a number; 0 where it is empty.
double dpl_api_number(const dpl_config *config, const char *key);

/* ---- model.c ---- */
// Sets `dtype`, and cuts `max_target_length` to the positions of a model.
dpl_status dpl_api_fit(dpl_config *config, const dpl_model_config *model, dpl_dtype dtype);
dpl_status dpl_api_dtype(const char *name, dpl_dtype *dtype_out);
const char *dpl_api_dtype_name(dpl_dtype dtype);
void dpl_api_describe(const dpl_model_config *c, dpl_dtype dtype, dpl_model_info *info);
// DPL_EINVAL names the first of n ids that is not in 0 .. vocab-1; with skip, negative ones are passed over.
dpl_status dpl_api_check_ids(const char *what, const int32_t *ids, size_t n, size_t vocab,
                             bool skip);
dpl_status dpl_api_check_batch(const dpl_model_config *config, size_t n_batch, size_t n_seq);

#endif
