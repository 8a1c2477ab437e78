// checkpoint.c - a run's state as a directory: model, optimizer, trainer, a manifest of checksums.
//
// A checkpoint is staged under another name and renamed when everything in it is on the disk: what
// has a step for its name is whole. Checksums are of blocks, so damage is reported with its place.
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "train/train.h"

#define MANIFEST      "manifest.json"
#define MANIFEST_KIND "dropless checkpoint"
#define BLOCK_BYTES   (4 << 20)
static const char *const moments[] = {"exp_avg.", "exp_avg_sq."};

/* ---- names in a folder ---- */
bool dpl_has_file(const char *dir, const char *name) {
    char path[PATH_MAX];
    return dpl_path_join(dir, name, path) == DPL_OK && dpl_path_exists(path);
}

static int is_visible(const struct dirent *entry) {
    return entry->d_name[0] != '.';
}

static int is_step(const struct dirent *entry) {
    const size_t len = strlen(entry->d_name);
    return len <= 18 && strspn(entry->d_name, "0123456789") == len;
}

// What a killed process left unfinished.
static int is_leftover(const struct dirent *entry) {
    const size_t len = strlen(entry->d_name);
    return len > 5 && entry->d_name[0] == '.' && dpl_is(entry->d_name + len - 4, ".tmp");
}

// Steps come from the oldest to the newest. No folder: no names. Freed with free_names().
static dpl_status list_names(const char *dir, int (*filter)(const struct dirent *),
                             struct dirent ***list_out, int *n_out) {
    *list_out = NULL;
    *n_out = scandir(dir, list_out, filter, versionsort);
    DPL_EXPECT(*n_out >= 0 || errno == ENOENT, DPL_EIO, "%s: cannot list the folder: %m", dir);
    return DPL_OK;
}

static void free_names(struct dirent **list, int n) {
    for (int i = 0; i < n; i++) free(list[i]);
    free(list);
}

// Renamed first: a kill in the middle of the removal must not leave half of a checkpoint as one.
static dpl_status remove_name(const char *dir, const char *name) {
    char path[PATH_MAX], hidden[PATH_MAX], leftover[NAME_MAX + 8];
    snprintf(leftover, sizeof leftover, name[0] == '.' ? "%s" : ".%s.tmp", name);
    DPL_TRY(dpl_path_join(dir, name, path));
    DPL_TRY(dpl_path_join(dir, leftover, hidden));
    DPL_EXPECT(rename(path, hidden) == 0, DPL_EIO, "%s: cannot be renamed: %m", path);
    return dpl_remove_tree(hidden);
}

static dpl_status remove_all_but(int64_t n_keep, const char *dir,
                                 int (*filter)(const struct dirent *)) {
    struct dirent **list;
    int n;
    dpl_status status = list_names(dir, filter, &list, &n);
    for (int i = 0; i < n - n_keep && status == DPL_OK; i++)
        status = remove_name(dir, list[i]->d_name);
    free_names(list, n);
    return status;
}

/* ---- manifest ---- */
// {"bytes": n, "blocks": [checksum, ...]}, a new reference.
static dpl_status describe_file(const char *dir, const char *name, json_t **entry_out) {
    char path[PATH_MAX];
    dpl_map map;
    DPL_TRY(dpl_path_join(dir, name, path));
    DPL_TRY(dpl_map_open(path, &map));
    json_t *blocks = json_array();
    for (size_t at = 0; at < map.bytes; at += BLOCK_BYTES) {
        const unsigned long long sum = dpl_hash64(map.data + at,
                                                  DPL_MIN((size_t)BLOCK_BYTES, map.bytes - at), 0);
        json_array_append_new(blocks, json_sprintf("%016llx", sum));
        dpl_busy();
    }
    *entry_out = json_pack("{s:I, s:o}", "bytes", (json_int_t)map.bytes, "blocks", blocks);
    dpl_map_close(&map);
    return *entry_out ? DPL_OK : dpl_fail(DPL_ENOMEM, "no memory for the checksums of %s", path);
}

static dpl_status add_entry(const char *dir, const char *name, json_t *files) {
    json_t *entry;
    DPL_TRY(describe_file(dir, name, &entry));
    DPL_EXPECT(json_object_set_new(files, name, entry) == 0, DPL_ENOMEM,
               "no memory for the checksums of %s/%s", dir, name);
    return DPL_OK;
}

// Of the files in a folder that `files` does not have yet.
static dpl_status describe_files(const char *dir, json_t *files) {
    struct dirent **list;
    int n;
    DPL_TRY(list_names(dir, is_visible, &list, &n));
    dpl_status status = DPL_OK;
    for (int i = 0; i < n && status == DPL_OK; i++)
        if (!json_object_get(files, list[i]->d_name))
            status = add_entry(dir, list[i]->d_name, files);
    free_names(list, n);
    return status;
}

// files: entries that ranks have made of their own files.
static dpl_status write_manifest(const char *dir, json_t *files) {
    char path[PATH_MAX];
    DPL_TRY(describe_files(dir, files));
    DPL_TRY(dpl_path_join(dir, MANIFEST, path));
    json_t *manifest = json_pack("{s:s, s:i, s:i, s:O}", "format", MANIFEST_KIND, "version", 1,
                                 "block_bytes", BLOCK_BYTES, "files", files);
    const dpl_status status = dpl_json_write(path, manifest);
    json_decref(manifest);
    return status;
}

static dpl_status verify_file(const char *dir, const char *name, json_t *want) {
    json_t *have, *found, *sums;
    json_int_t bytes, size;
    DPL_EXPECT(!strchr(name, '/') &&
                   json_unpack(want, "{s:I, s:o}", "bytes", &bytes, "blocks", &sums) == 0,
               DPL_EFORMAT, "%s/" MANIFEST ": the entry \"%s\" is damaged", dir, name);
    DPL_TRY(describe_file(dir, name, &have));
    json_unpack(have, "{s:I, s:o}", "bytes", &size, "blocks", &found);
    size_t i = 0;
    while (i < json_array_size(found) &&
           json_equal(json_array_get(found, i), json_array_get(sums, i)))
        i++;
    dpl_status status = DPL_OK;
    if (size != bytes)
        status = dpl_fail(DPL_EFORMAT, "%s/%s: ends at byte %lld, expected %lld by the manifest",
                          dir, name, (long long)size, (long long)bytes);
    else if (!json_equal(found, sums))
        status = dpl_fail(DPL_EFORMAT, "%s/%s: damaged between byte %zu and %zu by its checksum",
                          dir, name, i * BLOCK_BYTES, DPL_MIN((i + 1) * BLOCK_BYTES, (size_t)size));
    json_decref(have);
    return status;
}

dpl_status dpl_checkpoint_verify(const char *dir) {
    char path[PATH_MAX];
    json_t *manifest;
    DPL_NEED(dir);
    DPL_TRY(dpl_path_join(dir, MANIFEST, path));
    DPL_EXPECT(dpl_path_exists(path), DPL_EFORMAT, "%s: no checkpoint, it has no " MANIFEST, dir);
    DPL_TRY(dpl_json_read(path, &manifest));
    const char *kind;
    json_t *files = NULL, *needed;
    int version, block_bytes;
    dpl_status status = DPL_OK;
    if (json_unpack(manifest, "{s:s, s:i, s:i, s:o}", "format", &kind, "version", &version,
                    "block_bytes", &block_bytes, "files", &files) != 0 ||
        !dpl_is(kind, MANIFEST_KIND) || version != 1 || block_bytes != BLOCK_BYTES)
        status = dpl_fail(DPL_EFORMAT, "%s: not a checkpoint's, or of another version", path);
    else if (json_unpack(files, "{s:o, s:o}", "config.json", &needed, "trainer.json", &needed) != 0)
        status = dpl_fail(DPL_EFORMAT, "%s: lists no config.json or no trainer.json", path);
    for (void *at = json_object_iter(files); at && status == DPL_OK;
         at = json_object_iter_next(files, at))
        status = verify_file(dir, json_object_iter_key(at), json_object_iter_value(at));
    json_decref(manifest);
    return status;
}

/* ---- the checkpoints of a run ---- */
dpl_status dpl_checkpoint_newest(const char *run_dir, bool clean, char *dir_out) {
    char checkpoints[PATH_MAX], path[PATH_MAX] = "", why[1024] = "";
    struct dirent **list;
    int n;
    DPL_TRY(dpl_path_join(run_dir, "checkpoints", checkpoints));
    if (clean) DPL_TRY(remove_all_but(0, checkpoints, is_leftover));
    DPL_TRY(list_names(checkpoints, is_step, &list, &n));
    dpl_status first = DPL_OK, status = DPL_OK;
    for (int i = n - 1; i >= 0; i--) {
        status = dpl_path_join(checkpoints, list[i]->d_name, path);
        if (status == DPL_OK) status = dpl_checkpoint_verify(path);
        if (status == DPL_OK) break;
        if (first == DPL_OK) snprintf(why, sizeof why, "%s", dpl_error_message());
        if (first == DPL_OK) first = status;
    }
    free_names(list, n);
    if (first == DPL_OK) memcpy(dir_out, path, sizeof path);
    if (first == DPL_OK) return DPL_OK;
    if (status != DPL_OK) return dpl_fail(first, "%s; there is no earlier good checkpoint", why);
    return dpl_fail(first, "%s; the newest good checkpoint is %s: move the damaged one away", why,
                    path);
}

dpl_status dpl_checkpoint_resolve(const char *path, char *dir_out) {
    char dir[PATH_MAX];
    DPL_CHECK(*path, "the path of the model is empty");
    DPL_EXPECT(dpl_path_exists(path), DPL_EIO, "cannot find the model %s: %m", path);
    if (dpl_has_file(path, MANIFEST)) {
        DPL_TRY(dpl_checkpoint_verify(path));
    } else if (dpl_has_file(path, "checkpoints/.")) { // a folder
        DPL_TRY(dpl_checkpoint_newest(path, false, dir));
        DPL_EXPECT(dir[0], DPL_EIO, "%s: the run has no checkpoint", path);
        path = dir;
    }
    DPL_EXPECT(dpl_has_file(path, "config.json"), DPL_EIO,
               "%s is no model: expected config.json or checkpoints in it", path);
    return dpl_path_join(path, "", dir_out);
}

/* ---- the trainer's state ---- */
static json_int_t global_batch(const dpl_trainer *t) {
    return (json_int_t)t->batch.n_batch * t->mesh.world->n_ranks;
}

static dpl_status write_state(const dpl_trainer *t, const char *path) {
    json_t *options = json_object();
    dpl_option_info info;
    for (size_t i = 0; i < DPL_OPT_N && dpl_config_option(i, &info) == DPL_OK; i++)
        json_object_set_new(options, info.name, json_string(t->config->text[i]));
    json_t *state = json_pack("{s:i, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:o}", "version", 1, "step",
                              t->step - 1, "n_updates", t->optimizer.n_updates, "data_position",
                              t->position, "data_samples", dpl_data_samples(&t->data, false),
                              "global_batch", global_batch(t), "max_target_length", t->batch.n_seq,
                              "cpu_level", dpl_ctx_cpu_level(t->ctx), "options", options);
    const dpl_status status = dpl_json_write(path, state);
    json_decref(state);
    return status;
}

static dpl_status apply_state(dpl_trainer *t, json_t *state, const char *path) {
    json_error_t error;
    json_int_t version, step, n_updates, position, samples, n_batch, n_seq;
    const char *level, *own_level = dpl_ctx_cpu_level(t->ctx);
    if (json_unpack_ex(state, &error, 0, "{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s}", "version",
                       &version, "step", &step, "n_updates", &n_updates, "data_position", &position,
                       "data_samples", &samples, "global_batch", &n_batch, "max_target_length",
                       &n_seq, "cpu_level", &level) != 0)
        return dpl_fail(DPL_EFORMAT, "%s: %s", path, error.text);
    const uint64_t most = UINT64_C(1) << 60; // of a count, so that what is computed from it fits
    DPL_EXPECT(version == 1 && (uint64_t)step < most && (uint64_t)n_updates < most &&
                   (uint64_t)position < most,
               DPL_EFORMAT, "%s: another version than 1, or a count out of range", path);
    const bool speaks = dpl_mesh_is_first(&t->mesh);
    DPL_CHECK(n_batch == global_batch(t) && n_seq == (json_int_t)t->batch.n_seq,
              "%s has %lld sequences of %lld tokens a step, the configuration has %lld of %zu: "
              "ranks * per_device_batch_size * gradient_accumulation_steps, max_target_length",
              path, (long long)n_batch, (long long)n_seq, (long long)global_batch(t),
              t->batch.n_seq);
    if (speaks && samples != (json_int_t)dpl_data_samples(&t->data, false))
        dpl_log("warning: the training data has %llu samples, it had %lld when %s was written: a "
                "run with other data needs another run_name",
                (unsigned long long)dpl_data_samples(&t->data, false), (long long)samples, path);
    if (speaks && !dpl_is(level, own_level))
        dpl_log("notice: %s was written at CPU level %s, this is %s: results go on within rounding",
                path, level, own_level);
    t->step = step + 1;
    t->optimizer.n_updates = n_updates;
    t->position = (uint64_t)position;
    return DPL_OK;
}

/* ---- save and load ---- */
// Each rank writes its part of the large files, and checks it: the first one puts the entries of
// all into the manifest.
static dpl_status describe_part(const char *dir, const char *part, json_t *files) {
    return part[0] ? add_entry(dir, strrchr(part, '/') + 1, files) : DPL_OK;
}

static dpl_status write_parts(dpl_trainer *t, const char *dir, json_t *files) {
    char path[PATH_MAX], weights[PATH_MAX], state[PATH_MAX] = "";
    float *const flats[] = {t->optimizer.m, t->optimizer.v};
    const dpl_status joined = dpl_path_join(dir, "optimizer.safetensors", path);
    DPL_TRY(dpl_comm_agree(t->mesh.world, joined));
    // All ranks come to both ends, whatever fails: they exchange what they write.
    const dpl_status first = dpl_model_save_part(t->model, dir, weights);
    char why[1024] = "";
    if (first != DPL_OK) snprintf(why, sizeof why, "%s", dpl_error_message());
    const dpl_status second = dpl_model_save_flat(t->model, path, moments, flats, DPL_COUNT(flats),
                                                  state);
    if (first != DPL_OK) return dpl_fail(first, "%s", why);
    DPL_TRY(second);
    DPL_TRY(describe_part(dir, weights, files));
    return describe_part(dir, state, files);
}

// The entries of all ranks, on the first one.
static dpl_status collect_entries(dpl_trainer *t, json_t *files) {
    dpl_comm *world = t->mesh.world;
    const size_t R = (size_t)world->n_ranks;
    if (R == 1) return DPL_OK;
    char *text = json_dumps(files, JSON_COMPACT), *all = NULL;
    size_t *sizes = dpl_alloc_array(4 * R, sizeof *sizes), n = text ? strlen(text) : 0, sum = 0;
    size_t *const zero = sizes, *const send = sizes ? sizes + R : NULL,
                  *const at = sizes ? sizes + 2 * R : NULL,
                  *const come = sizes ? sizes + 3 * R : NULL;
    dpl_status status = text && sizes ? DPL_OK : dpl_fail(DPL_ENOMEM, "no memory for the manifest");
    status = dpl_comm_agree_on(world, status, &n, sizeof n, come);
    for (size_t r = 0; status == DPL_OK && r < R; r++) {
        if (world->rank > 0) come[r] = 0;
        at[r] = sum;
        sum += come[r];
    }
    if (status == DPL_OK && !(all = dpl_alloc(sum + 1)))
        status = dpl_fail(DPL_ENOMEM, "no memory for the manifest");
    status = dpl_comm_agree(world, status);
    if (status == DPL_OK) {
        send[0] = n;
        dpl_ticket ticket;
        status = dpl_comm_exchange(world, (dpl_blocks){text, zero, send},
                                   (dpl_blocks){all, at, come}, &ticket);
        if (status == DPL_OK) status = dpl_comm_wait(world, ticket);
    }
    for (size_t r = 1; status == DPL_OK && r < R && world->rank == 0; r++) {
        json_t *theirs = json_loadb(all + at[r], come[r], 0, NULL);
        if (!theirs || json_object_update(files, theirs) != 0)
            status = dpl_fail(DPL_ENOMEM, "no memory for the manifest");
        json_decref(theirs);
    }
    free(text);
    dpl_free(all);
    dpl_free(sizes);
    return status;
}

static dpl_status fill_checkpoint(dpl_trainer *t, const char *dir, json_t *files) {
    char path[PATH_MAX];
    dpl_status status = files ? DPL_OK : dpl_fail(DPL_ENOMEM, "no memory for the manifest");
    DPL_TRY(dpl_comm_agree(t->mesh.world, status));
    DPL_TRY(dpl_comm_agree(t->mesh.world, write_parts(t, dir, files)));
    DPL_TRY(collect_entries(t, files));
    if (!dpl_mesh_is_first(&t->mesh)) return DPL_OK;
    DPL_TRY(dpl_path_join(dir, "trainer.json", path));
    DPL_TRY(write_state(t, path));
    return write_manifest(dir, files);
}

// The first rank makes the folder, tells the others where, and gives it its name in the end.
static dpl_status write_checkpoint(dpl_trainer *t, const char *name) {
    typedef char folder[PATH_MAX];
    char checkpoints[PATH_MAX], path[PATH_MAX];
    dpl_out out = {0};
    const bool first = dpl_mesh_is_first(&t->mesh);
    folder *all = dpl_alloc_array((size_t)t->mesh.world->n_ranks, sizeof *all);
    json_t *files = json_object();
    dpl_status status = all ? DPL_OK : dpl_fail(DPL_ENOMEM, "no memory for a checkpoint");
    if (status == DPL_OK && first) status = dpl_path_join(t->run_dir, "checkpoints", checkpoints);
    if (status == DPL_OK && first) status = dpl_path_join(checkpoints, name, path);
    if (status == DPL_OK && first) status = dpl_out_open_dir(path, &out);
    const bool opened = first && status == DPL_OK;
    status = dpl_comm_agree_on(t->mesh.world, status, out.temp, sizeof out.temp, all);
    if (status == DPL_OK) status = fill_checkpoint(t, all[0], files);
    if (opened) status = dpl_out_close(&out, status);
    json_decref(files);
    dpl_free(all);
    return status;
}

static dpl_status save(dpl_trainer *t) {
    char checkpoints[PATH_MAX], name[32];
    snprintf(name, sizeof name, "%lld", (long long)t->step - 1);
    dpl_status status = write_checkpoint(t, name);
    if (status != DPL_OK) status = dpl_fail_in(status, "checkpoint of step %s", name);
    DPL_TRY(dpl_comm_agree(t->mesh.world, status));
    t->saved = t->step - 1;
    const int64_t n_keep = t->o->max_num_checkpoints_to_keep;
    if (n_keep == 0 || !dpl_mesh_is_first(&t->mesh)) return DPL_OK;
    DPL_TRY(dpl_path_join(t->run_dir, "checkpoints", checkpoints));
    if (remove_all_but(n_keep, checkpoints, is_step) != DPL_OK)
        dpl_log("warning: an old checkpoint could not be removed: %s", dpl_error_message());
    return DPL_OK;
}

dpl_status dpl_trainer_save(dpl_trainer *t) {
    DPL_NEED(t);
    DPL_CHECK(t->step > 0, "there is nothing to save before the first step");
    dpl_busy_hook(dpl_trainer_say_alive, t->mesh.world);
    const dpl_status status = save(t);
    dpl_busy_hook(NULL, NULL);
    return status;
}

dpl_status dpl_checkpoint_load(dpl_trainer *t, const char *dir) {
    char path[PATH_MAX];
    json_t *state;
    float *const flats[] = {t->optimizer.m, t->optimizer.v};
    DPL_TRY(dpl_path_join(dir, "trainer.json", path));
    DPL_TRY(dpl_json_read(path, &state));
    const dpl_status status = apply_state(t, state, path);
    json_decref(state);
    DPL_TRY(status);
    DPL_TRY(dpl_model_load(t->model, dir));
    DPL_TRY(dpl_path_join(dir, "optimizer.safetensors", path));
    return dpl_model_load_flat(t->model, path, moments, flats, DPL_COUNT(flats));
}
