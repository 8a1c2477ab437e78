/*
 * path.c - what a PATH stands for: a model directory, a checkpoint, or the newest checkpoint of a run.
 *
 * Also the options that belong to such a model, so that a run is evaluated as it was trained.
 */
#include <limits.h>
#include <stdlib.h>

#include "api/api.h"

static bool has_file(const char *dir, const char *name)
{
    char path[PATH_MAX];
    return dpl_path_join(dir, name, path) == DPL_OK && dpl_path_exists(path);
}

// The run that a checkpoint directory lies in, "" if it lies in none.
static void find_run(const char *dir, char *run_out)
{
    char path[PATH_MAX], *real = NULL;
    run_out[0] = '\0';
    if (dpl_path_join(dir, "..", path) == DPL_OK) real = realpath(path, NULL);
    const char *name = real ? strrchr(real, '/') : NULL;
    if (name && !strcmp(name, "/checkpoints") && dpl_path_join(path, "..", path) == DPL_OK &&
        has_file(path, "config.yml"))
        memcpy(run_out, path, strlen(path) + 1);
    free(real);
}

dpl_status dpl_api_resolve(const char *path, char *dir_out, char *run_out)
{
    char dir[PATH_MAX];
    if (!path || !*path) return dpl_fail(DPL_EINVAL, "the path of the model is empty");
    if (!dpl_path_exists(path)) return dpl_fail(DPL_EIO, "cannot find the model %s: %m", path);
    const dpl_status status = dpl_checkpoint_resolve(path, dir);
    // The argument is in order; what should be there is missing.
    if (status != DPL_OK) return status == DPL_EINVAL ? DPL_EIO : status;
    if (!has_file(dir, "config.json"))
        return dpl_fail(
            DPL_EIO,
            "%s is no model: expected a folder with config.json, or a run with checkpoints", path);
    if (run_out) find_run(dir, run_out);
    memcpy(dir_out, dir, sizeof dir);
    return DPL_OK;
}

dpl_status dpl_api_apply(dpl_config *config, const char *const *settings, size_t n_settings)
{
    for (size_t i = 0; i < n_settings; i++)
        DPL_TRY(dpl_config_set(config, settings[i]));
    return DPL_OK;
}

dpl_status dpl_api_fit(dpl_config *config, const dpl_model_config *model, dpl_dtype dtype)
{
    char text[64];
    DPL_TRY(dpl_config_put(config, "dtype", dpl_api_dtype_name(dtype)));
    if ((uint64_t)config->o.max_target_length <= model->max_positions) return DPL_OK;
    snprintf(text, sizeof text, "%zu", model->max_positions);
    return dpl_config_put(config, "max_target_length", text);
}

dpl_status dpl_config_open_model(const char *path, dpl_config **config_out)
{
    char dir[PATH_MAX], run[PATH_MAX], yaml[PATH_MAX];
    DPL_TRY(dpl_api_resolve(path, dir, run));
    if (run[0]) {
        DPL_TRY(dpl_path_join(run, "config.yml", yaml));
        return dpl_config_open(yaml, config_out);
    }
    dpl_model_config model;
    dpl_dtype dtype;
    dpl_config *config;
    DPL_TRY(dpl_model_read_config(dir, &model, &dtype));
    DPL_TRY(dpl_config_open(NULL, &config));
    const dpl_status status = dpl_api_fit(config, &model, dtype);
    if (status == DPL_OK)
        *config_out = config;
    else
        dpl_config_close(&config);
    return status;
}
