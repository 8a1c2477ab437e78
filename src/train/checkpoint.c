// checkpoint.c - a run's state as a directory: model, optimizer, trainer, and a manifest with checksums of them all.
//
// A checkpoint is staged under another name and renamed when everything in it is on the disk: what has a step for its
// name is whole. The manifest has a checksum for each block of each file, so that damage is reported with its place.
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "train/train.h"

#define MANIFEST      "manifest.json"
#define MANIFEST_KIND "dropless checkpoint"
#define BLOCK_BYTES   ((size_t)4 << 20)
static const char *const moments[] = {"exp_avg.", "exp_avg_sq."};

/* ---- manifest ---- */

static void block_sum(const dpl_map *map, size_t i_block, char *text, size_t size)
{
    const size_t first = i_block * BLOCK_BYTES;
    const uint64_t sum = dpl_hash64(map->data + first, DPL_MIN(BLOCK_BYTES, map->bytes - first), 0);
    snprintf(text, size, "%016llx", (unsigned long long)sum);
}

static dpl_status describe_file(const char *dir, const char *name, json_t *files)
{
    char path[PATH_MAX], sum[32];
    dpl_map map;
    DPL_TRY(dpl_path_join(dir, name, path));
    DPL_TRY(dpl_map_open(path, &map));
    json_t *blocks = json_array();
    for (size_t i = 0; i < dpl_div_up(map.bytes, BLOCK_BYTES); i++) {
        block_sum(&map, i, sum, sizeof sum);
        json_array_append_new(blocks, json_string(sum));
    }
    json_t *entry = json_pack("{s:I, s:o}", "bytes", (json_int_t)map.bytes, "blocks", blocks);
    dpl_map_close(&map);
    if (entry && json_object_set_new(files, name, entry) == 0) return DPL_OK;
    return dpl_fail(DPL_ENOMEM, "no memory for the manifest of %s", dir);
}

static int is_visible(const struct dirent *entry)
{
    return entry->d_name[0] != '.';
}

static dpl_status write_manifest(const char *dir)
{
    struct dirent **list;
    char path[PATH_MAX];
    DPL_TRY(dpl_path_join(dir, MANIFEST, path));
    const int n = scandir(dir, &list, is_visible, alphasort);
    if (n < 0) return dpl_fail(DPL_EIO, "%s: cannot list the folder: %s", dir, strerror(errno));
    json_t *files = json_object();
    dpl_status status = files ? DPL_OK
                              : dpl_fail(DPL_ENOMEM, "no memory for the manifest of %s", dir);
    for (int i = 0; i < n; i++) {
        if (status == DPL_OK) status = describe_file(dir, list[i]->d_name, files);
        free(list[i]);
    }
    free(list);
    json_t *manifest = json_pack("{s:s, s:i, s:I, s:o}", "format", MANIFEST_KIND, "version", 1,
                                 "block_bytes", (json_int_t)BLOCK_BYTES, "files", files);
    if (status == DPL_OK && !manifest)
        status = dpl_fail(DPL_ENOMEM, "no memory for the manifest of %s", dir);
    if (status == DPL_OK) status = dpl_json_write(path, manifest);
    json_decref(manifest);
    return status;
}

static dpl_status verify_file(const char *dir, const char *name, const json_t *entry)
{
    char path[PATH_MAX], sum[32];
    dpl_map map;
    const json_t *blocks = json_object_get(entry, "blocks"),
                 *bytes = json_object_get(entry, "bytes");
    if (strchr(name, '/') || !json_is_array(blocks) || !json_is_integer(bytes))
        return dpl_fail(DPL_EFORMAT, "%s/" MANIFEST ": the entry \"%s\" is damaged", dir, name);
    DPL_TRY(dpl_path_join(dir, name, path));
    DPL_TRY(dpl_map_open(path, &map));
    dpl_status status = DPL_OK;
    if ((json_int_t)map.bytes != json_integer_value(bytes) ||
        json_array_size(blocks) != dpl_div_up(map.bytes, BLOCK_BYTES))
        status = dpl_fail(DPL_EFORMAT,
                          "%s: the file ends at byte %zu, expected %lld by the manifest", path,
                          map.bytes, (long long)json_integer_value(bytes));
    for (size_t i = 0; i < json_array_size(blocks) && status == DPL_OK; i++) {
        const char *want = json_string_value(json_array_get(blocks, i));
        block_sum(&map, i, sum, sizeof sum);
        if (!want || strcmp(want, sum) != 0)
            status = dpl_fail(DPL_EFORMAT,
                              "%s: damaged between byte %zu and %zu, the checksum differs", path,
                              i * BLOCK_BYTES, DPL_MIN((i + 1) * BLOCK_BYTES, map.bytes));
    }
    dpl_map_close(&map);
    return status;
}

dpl_status dpl_checkpoint_verify(const char *dir)
{
    char path[PATH_MAX];
    json_t *manifest;
    if (!dir) return dpl_fail(DPL_EINVAL, "dpl_checkpoint_verify: dir is NULL");
    DPL_TRY(dpl_path_join(dir, MANIFEST, path));
    if (!dpl_path_exists(path))
        return dpl_fail(DPL_EFORMAT, "%s: no checkpoint, it has no " MANIFEST, dir);
    DPL_TRY(dpl_json_read(path, &manifest));
    const char *kind = json_string_value(json_object_get(manifest, "format")), *name;
    json_t *files = json_object_get(manifest, "files"), *entry;
    dpl_status status = DPL_OK;
    if (!kind || strcmp(kind, MANIFEST_KIND) != 0 || !json_is_object(files) ||
        json_integer_value(json_object_get(manifest, "version")) != 1 ||
        json_integer_value(json_object_get(manifest, "block_bytes")) != (json_int_t)BLOCK_BYTES)
        status = dpl_fail(DPL_EFORMAT,
                          "%s: not the manifest of a checkpoint, or of another version", path);
    static const char *const needed[] = {"config.json", "trainer.json"};
    for (size_t i = 0; i < DPL_COUNT(needed) && status == DPL_OK; i++)
        if (!json_object_get(files, needed[i]))
            status = dpl_fail(DPL_EFORMAT, "%s: lists no %s", path, needed[i]);
    json_object_foreach(files, name, entry)
    {
        if (status == DPL_OK) status = verify_file(dir, name, entry);
    }
    json_decref(manifest);
    return status;
}

/* ---- the checkpoints of a run ---- */

static bool is_step(const char *name)
{
    return name[0] && strlen(name) <= 18 && strspn(name, "0123456789") == strlen(name);
}

static int newest_first(const void *a, const void *b)
{
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x < y) - (x > y);
}

// Steps of the run's checkpoints, newest first; free() them. With `clean`, what a killed process left unfinished is
// removed on the way.
static dpl_status list_steps(const char *checkpoints, bool clean, int64_t **steps_out,
                             size_t *n_out)
{
    int64_t *steps = NULL;
    size_t n = 0;
    DIR *folder = opendir(checkpoints);
    dpl_status status = DPL_OK;
    if (!folder && errno != ENOENT)
        return dpl_fail(DPL_EIO, "%s: cannot list the folder: %s", checkpoints, strerror(errno));
    for (const struct dirent *entry; folder && status == DPL_OK && (entry = readdir(folder));) {
        const size_t len = strlen(entry->d_name);
        char path[PATH_MAX];
        if (is_step(entry->d_name)) {
            int64_t *more = realloc(steps, (n + 1) * sizeof *steps);
            if (!more) {
                status = dpl_fail(DPL_ENOMEM, "no memory for a list of %zu checkpoints", n + 1);
                break;
            }
            steps = more;
            steps[n++] = atoll(entry->d_name);
        } else if (clean && len > 5 && entry->d_name[0] == '.' &&
                   strcmp(entry->d_name + len - 4, ".tmp") == 0) {
            status = dpl_path_join(checkpoints, entry->d_name, path);
            if (status == DPL_OK) status = dpl_remove_tree(path);
        }
    }
    if (folder) closedir(folder);
    if (status != DPL_OK) {
        free(steps);
        return status;
    }
    if (n) qsort(steps, n, sizeof *steps, newest_first);
    *steps_out = steps;
    *n_out = n;
    return DPL_OK;
}

static dpl_status step_path(const char *checkpoints, int64_t step, char *out)
{
    char name[32];
    snprintf(name, sizeof name, "%lld", (long long)step);
    return dpl_path_join(checkpoints, name, out);
}

// Words the error about a damaged checkpoint with what the user can go back to.
static dpl_status name_previous(const char *checkpoints, const int64_t *steps, size_t n,
                                dpl_status status)
{
    char why[1024], good[PATH_MAX];
    snprintf(why, sizeof why, "%s", dpl_error_message());
    for (size_t i = 1; i < n; i++) {
        if (step_path(checkpoints, steps[i], good) == DPL_OK &&
            dpl_checkpoint_verify(good) == DPL_OK)
            return dpl_fail(
                status,
                "%s; the newest good checkpoint is %s: move the damaged one away to go on from it",
                why, good);
    }
    return dpl_fail(status, "%s; there is no earlier good checkpoint", why);
}

dpl_status dpl_checkpoint_newest(const char *run_dir, bool clean, char *dir_out)
{
    char checkpoints[PATH_MAX], dir[PATH_MAX] = "";
    int64_t *steps;
    size_t n;
    DPL_TRY(dpl_path_join(run_dir, "checkpoints", checkpoints));
    DPL_TRY(list_steps(checkpoints, clean, &steps, &n));
    dpl_status status = n ? step_path(checkpoints, steps[0], dir) : DPL_OK;
    if (n && status == DPL_OK) {
        status = dpl_checkpoint_verify(dir);
        if (status != DPL_OK) status = name_previous(checkpoints, steps, n, status);
    }
    free(steps);
    if (status == DPL_OK) memcpy(dir_out, dir, sizeof dir);
    return status;
}

dpl_status dpl_checkpoint_resolve(const char *path, char *dir_out)
{
    char manifest[PATH_MAX], checkpoints[PATH_MAX];
    DPL_TRY(dpl_path_join(path, MANIFEST, manifest));
    DPL_TRY(dpl_path_join(path, "checkpoints", checkpoints));
    if (dpl_path_exists(manifest))
        DPL_TRY(dpl_checkpoint_verify(path));
    else if (dpl_path_is_dir(checkpoints)) {
        char dir[PATH_MAX];
        DPL_TRY(dpl_checkpoint_newest(path, false, dir));
        if (!dir[0]) return dpl_fail(DPL_EINVAL, "%s: the run has no checkpoint", path);
        memcpy(dir_out, dir, sizeof dir);
        return DPL_OK;
    }
    return dpl_path_join(path, ".", dir_out);
}

// Renamed first: a kill in the middle of the removal must not leave half of a checkpoint under its name.
static dpl_status remove_step(const char *checkpoints, int64_t step)
{
    char path[PATH_MAX], hidden[PATH_MAX], name[48];
    snprintf(name, sizeof name, ".%lld.tmp", (long long)step);
    DPL_TRY(step_path(checkpoints, step, path));
    DPL_TRY(dpl_path_join(checkpoints, name, hidden));
    if (rename(path, hidden) != 0)
        return dpl_fail(DPL_EIO, "%s: cannot be renamed: %s", path, strerror(errno));
    return dpl_remove_tree(hidden);
}

static dpl_status remove_old(const char *checkpoints, int64_t n_keep)
{
    int64_t *steps;
    size_t n;
    if (n_keep <= 0) return DPL_OK;
    DPL_TRY(list_steps(checkpoints, false, &steps, &n));
    dpl_status status = DPL_OK;
    for (size_t i = n; i > (size_t)n_keep && status == DPL_OK; i--)
        status = remove_step(checkpoints, steps[i - 1]);
    free(steps);
    return status;
}

/* ---- the trainer's state ---- */

static json_t *state_of(const dpl_trainer *t)
{
    json_t *options = json_object();
    dpl_option_info info;
    for (size_t i = 0; i < DPL_OPT_N && dpl_config_option(i, &info) == DPL_OK; i++)
        json_object_set_new(options, info.name, json_string(t->config->text[i]));
    return json_pack("{s:i, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:s, s:o}", "version", 1, "step",
                     (json_int_t)(t->step - 1), "n_updates", (json_int_t)t->optimizer->n_updates,
                     "data_position", (json_int_t)t->position, "data_samples",
                     (json_int_t)dpl_data_samples(t->data, false), "global_batch",
                     (json_int_t)t->batch.n_batch, "max_target_length", (json_int_t)t->batch.n_seq,
                     "opt_type", t->o->opt_type, "cpu_level", dpl_ctx_cpu_level(t->ctx), "options",
                     options);
}

static dpl_status get_count(const json_t *state, const char *path, const char *key, int64_t *out)
{
    const json_t *value = json_object_get(state, key);
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return dpl_fail(DPL_EFORMAT, "%s: \"%s\" is not a whole number from 0", path, key);
    *out = json_integer_value(value);
    return DPL_OK;
}

static dpl_status apply_state(dpl_trainer *t, const json_t *state, const char *path)
{
    int64_t version, step, n_updates, position, samples, batch, length;
    DPL_TRY(get_count(state, path, "version", &version));
    DPL_TRY(get_count(state, path, "step", &step));
    DPL_TRY(get_count(state, path, "n_updates", &n_updates));
    DPL_TRY(get_count(state, path, "data_position", &position));
    DPL_TRY(get_count(state, path, "data_samples", &samples));
    DPL_TRY(get_count(state, path, "global_batch", &batch));
    DPL_TRY(get_count(state, path, "max_target_length", &length));
    if (version != 1)
        return dpl_fail(DPL_EFORMAT, "%s: version %lld, expected 1", path, (long long)version);
    if (batch != (int64_t)t->batch.n_batch || length != (int64_t)t->batch.n_seq)
        return dpl_fail(
            DPL_EINVAL,
            "%s was trained with %lld sequences of %lld tokens a step, the configuration has "
            "%zu of %zu (per_device_batch_size * gradient_accumulation_steps, max_target_length)",
            path, (long long)batch, (long long)length, t->batch.n_batch, t->batch.n_seq);
    const char *level = json_string_value(json_object_get(state, "cpu_level"));
    if (samples != (int64_t)dpl_data_samples(t->data, false))
        dpl_log("warning: the training data has %llu samples, it had %lld when the checkpoint was "
                "written",
                (unsigned long long)dpl_data_samples(t->data, false), (long long)samples);
    if (level && strcmp(level, dpl_ctx_cpu_level(t->ctx)) != 0)
        dpl_log("notice: the checkpoint was written at CPU level %s, this is %s: results go on "
                "within rounding",
                level, dpl_ctx_cpu_level(t->ctx));
    t->step = step + 1;
    t->optimizer->n_updates = n_updates;
    t->position = (uint64_t)position;
    return DPL_OK;
}

/* ---- save and load ---- */

static dpl_status write_parts(dpl_trainer *t, const char *dir)
{
    char path[PATH_MAX];
    float *const flats[] = {t->optimizer->m, t->optimizer->v};
    DPL_TRY(dpl_model_save(t->model, dir, DPL_F32, 0));
    if (t->optimizer->m) {
        DPL_TRY(dpl_path_join(dir, "optimizer.safetensors", path));
        DPL_TRY(dpl_model_save_flat(t->model, path, moments, flats, DPL_COUNT(flats)));
    }
    DPL_TRY(dpl_path_join(dir, "trainer.json", path));
    json_t *state = state_of(t);
    if (!state) return dpl_fail(DPL_ENOMEM, "no memory for %s", path);
    const dpl_status status = dpl_json_write(path, state);
    json_decref(state);
    return status == DPL_OK ? write_manifest(dir) : status;
}

dpl_status dpl_checkpoint_save(dpl_trainer *t)
{
    char checkpoints[PATH_MAX], path[PATH_MAX], staged[PATH_MAX];
    if (t->step == 0) return dpl_fail(DPL_EINVAL, "there is nothing to save before the first step");
    DPL_TRY(dpl_path_join(t->run_dir, "checkpoints", checkpoints));
    DPL_TRY(dpl_make_dirs(checkpoints));
    DPL_TRY(step_path(checkpoints, t->step - 1, path));
    DPL_TRY(dpl_stage_open(path, staged, sizeof staged));
    dpl_status status = write_parts(t, staged);
    if (status == DPL_OK) status = dpl_stage_commit(staged, path);
    if (status != DPL_OK) {
        dpl_stage_abandon(staged);
        return dpl_fail_in(status, "checkpoint of step %lld", (long long)t->step - 1);
    }
    t->saved = t->step - 1;
    if (remove_old(checkpoints, t->o->max_num_checkpoints_to_keep) != DPL_OK)
        dpl_log("warning: an old checkpoint could not be removed: %s", dpl_error_message());
    return DPL_OK;
}

dpl_status dpl_checkpoint_load(dpl_trainer *t, const char *dir)
{
    char path[PATH_MAX];
    json_t *state;
    float *const flats[] = {t->optimizer->m, t->optimizer->v};
    DPL_TRY(dpl_path_join(dir, "trainer.json", path));
    DPL_TRY(dpl_json_read(path, &state));
    const char *opt_type = json_string_value(json_object_get(state, "opt_type"));
    dpl_status status = apply_state(t, state, path);
    if (status == DPL_OK && (!opt_type || strcmp(opt_type, t->o->opt_type) != 0))
        status = dpl_fail(DPL_EINVAL, "%s: the optimizer was %s, the configuration has opt_type=%s",
                          path, opt_type ? opt_type : "(missing)", t->o->opt_type);
    json_decref(state);
    DPL_TRY(status);
    DPL_TRY(dpl_model_load(t->model, dir));
    if (!t->optimizer->m) return DPL_OK;
    DPL_TRY(dpl_path_join(dir, "optimizer.safetensors", path));
    return dpl_model_load_flat(t->model, path, moments, flats, DPL_COUNT(flats));
}
