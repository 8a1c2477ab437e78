// path.c - what a PATH stands for: a model directory, a checkpoint, or the newest one of a run.
//
// Also the options that belong to such a model, so that a run is evaluated as it was trained.
#include <stdlib.h>

#include "api/api.h"

dpl_status dpl_api_apply(dpl_config *config, const char *const *settings, size_t n_settings) {
    for (size_t i = 0; i < n_settings; i++) DPL_TRY(dpl_config_set(config, settings[i]));
    return DPL_OK;
}

dpl_status dpl_api_defaults(const dpl_model_config *model, dpl_dtype dtype,
                            dpl_config **config_out) {
    char length[32];
    dpl_config *config;
    DPL_TRY(dpl_config_open(NULL, &config));
    dpl_status status = dpl_config_put(config, "dtype", dpl_api_dtype_name(dtype));
    const uint64_t most = model->max_positions, now = (uint64_t)config->o.max_target_length;
    snprintf(length, sizeof length, "%llu", (unsigned long long)DPL_MIN(most, now));
    if (status == DPL_OK) status = dpl_config_put(config, "max_target_length", length);
    if (status == DPL_OK) *config_out = config;
    else dpl_config_close(&config);
    return status;
}

// The run that PATH is, or that it lies in as a checkpoint; false: none.
static bool find_run(const char *path, char *run_out) {
    if (!realpath(path, run_out)) return false;
    if (dpl_has_file(run_out, "config.yml") && dpl_has_file(run_out, "checkpoints")) return true;
    char *last = strrchr(run_out, '/');
    *last = '\0';
    char *above = strrchr(run_out, '/');
    if (!above || strcmp(above, "/checkpoints") != 0) return false;
    *above = '\0';
    return dpl_has_file(run_out, "config.yml");
}

dpl_status dpl_config_open_model(const char *path, dpl_config **config_out) {
    char dir[PATH_MAX];
    dpl_model_config model;
    dpl_dtype dtype;
    DPL_NEED(path && config_out);
    if (find_run(path, dir)) { // opening the model verifies the checkpoint
        DPL_TRY(dpl_path_join(dir, "config.yml", dir));
        return dpl_config_open(dir, config_out);
    }
    DPL_TRY(dpl_checkpoint_resolve(path, dir));
    DPL_TRY(dpl_model_read_config(dir, &model, &dtype));
    return dpl_api_defaults(&model, dtype, config_out);
}
