/*
 * st_write.c - writing safetensors: one file, or the weights of a model directory.
 *
 * A file's header says where each tensor lies, so all tensors are declared before the first byte,
 * and a file with too few or too many bytes never appears under its name. A directory gets one
 * file, or shards and then an index: a reader that finds the index finds all of them.
 */
#include <dirent.h>
#include <stdlib.h>
#include <unistd.h>

#include "io/io.h"

#define NAME_BYTES 64 // of a shard's name

struct dpl_st_writer {
    dpl_out out;
    uint64_t data_bytes, written;
    bool failed;
};

/* ---- one file ------------------------------------------------------------------------------- */

static dpl_status add_tensor(const char *path, json_t *header, const dpl_st_tensor *tensor,
                             uint64_t *end) {
    uint64_t bytes;
    if (!dpl_st_shape_bytes(tensor, &bytes) || bytes > INT64_MAX - *end)
        return dpl_fail(DPL_EINVAL, "%s: tensor %s has no valid dtype and shape", path,
                        tensor->name);
    if (!strcmp(tensor->name, "__metadata__") || json_object_get(header, tensor->name))
        return dpl_fail(DPL_EINVAL, "%s: the name %s is taken", path, tensor->name);
    json_t *shape = json_array();
    for (int i = 0; i < tensor->rank; i++)
        json_array_append_new(shape, json_integer(tensor->shape[i]));
    json_t *entry = json_pack("{s:s, s:o, s:[I, I]}", "dtype", dpl_st_dtype_name(tensor->dtype),
                              "shape", shape, "data_offsets", (json_int_t)*end,
                              (json_int_t)(*end + bytes));
    if (json_object_set_new(header, tensor->name, entry) != 0)
        return dpl_fail(DPL_EINVAL, "%s: the name %s is not UTF-8", path, tensor->name);
    *end += bytes;
    return DPL_OK;
}

static dpl_status make_header(const char *path, const dpl_st_tensor *tensors, size_t n_tensors,
                              const char *const *metadata, json_t *header, uint64_t *data_bytes) {
    json_t *map = metadata ? json_object() : NULL;
    int rc = metadata ? json_object_set_new(header, "__metadata__", map) : 0;
    for (; metadata && rc == 0 && metadata[0]; metadata += 2)
        rc = json_object_set_new(map, metadata[0], json_string(metadata[1]));
    if (rc != 0) return dpl_fail(DPL_EINVAL, "%s: metadata that are not UTF-8", path);
    for (size_t i = 0; i < n_tensors; i++)
        DPL_TRY(add_tensor(path, header, &tensors[i], data_bytes));
    return DPL_OK;
}

// The data start at a multiple of 8, as the format asks; spaces fill the header up.
static dpl_status write_header(dpl_out *out, const json_t *header) {
    char *text = json_dumps(header, JSON_COMPACT);
    if (!text) return dpl_fail(DPL_ENOMEM, "no memory for the header of %s", out->path);
    const size_t text_bytes = strlen(text);
    const uint64_t bytes = dpl_round_up(text_bytes, 8);
    dpl_status status = DPL_OK;
    if (bytes > DPL_ST_HEADER_MAX)
        status = dpl_fail(DPL_EINVAL, "%s: a header of %zu bytes is too long; write shards",
                          out->path, (size_t)bytes);
    if (status == DPL_OK) status = dpl_out_write(out, &bytes, 8);
    if (status == DPL_OK) status = dpl_out_write(out, text, text_bytes);
    if (status == DPL_OK) status = dpl_out_write(out, "       ", (size_t)bytes - text_bytes);
    free(text);
    return status;
}

dpl_status dpl_st_create(const char *path, const dpl_st_tensor *tensors, size_t n_tensors,
                         const char *const *metadata, dpl_st_writer **writer_out) {
    dpl_st_writer *writer = dpl_alloc(sizeof *writer);
    json_t *header = json_object();
    dpl_status status = DPL_OK;
    if (!writer || !header) status = dpl_fail(DPL_ENOMEM, "no memory to write %s", path);
    else status = make_header(path, tensors, n_tensors, metadata, header, &writer->data_bytes);
    if (status == DPL_OK) status = dpl_out_open(path, &writer->out);
    if (status == DPL_OK && (status = write_header(&writer->out, header)) != DPL_OK)
        dpl_out_abandon(&writer->out);
    json_decref(header);
    if (status == DPL_OK) *writer_out = writer;
    else dpl_free(writer);
    return status;
}

dpl_status dpl_st_append(dpl_st_writer *writer, const void *data, size_t bytes) {
    dpl_status status;
    if (bytes > writer->data_bytes - writer->written)
        status = dpl_fail(DPL_EINVAL, "%s: more than the %llu bytes that its tensors have",
                          writer->out.path, (unsigned long long)writer->data_bytes);
    else status = dpl_out_write(&writer->out, data, bytes);
    if (status == DPL_OK) writer->written += bytes;
    writer->failed = writer->failed || status != DPL_OK;
    return status;
}

dpl_status dpl_st_finish(dpl_st_writer **writer) {
    dpl_st_writer *w = *writer;
    dpl_status status;
    if (w->failed || w->written != w->data_bytes)
        status = dpl_fail(DPL_EINVAL, "%s: %llu of %llu bytes were written", w->out.path,
                          (unsigned long long)w->written, (unsigned long long)w->data_bytes);
    else status = dpl_out_commit(&w->out);
    dpl_st_abandon(writer);
    return status;
}

void dpl_st_abandon(dpl_st_writer **writer) {
    if (!writer || !*writer) return;
    dpl_out_abandon(&(*writer)->out);
    dpl_free(*writer);
    *writer = NULL;
}

/* ---- a model directory ---------------------------------------------------------------------- */

typedef struct shard_plan {
    const char *dir;
    dpl_st_tensor *tensors; // in the order of writing
    size_t *source, *shard; // their numbers in the caller's list; their shards
    size_t n_tensors, n_shards;
    uint64_t total_bytes;
} shard_plan;

static void shard_name(const shard_plan *plan, size_t i_shard, char name[NAME_BYTES]) {
    if (plan->n_shards == 1) strcpy(name, DPL_ST_SINGLE);
    else
        snprintf(name, NAME_BYTES, "model-%05zu-of-%05zu.safetensors", i_shard + 1, plan->n_shards);
}

// Orders the tensors by width and cuts them into shards.
static dpl_status make_plan(shard_plan *plan, const dpl_st_tensor *tensors, size_t shard_bytes) {
    const size_t n = plan->n_tensors;
    plan->tensors = dpl_alloc_array(n, sizeof *plan->tensors);
    plan->source = dpl_alloc_array(n, sizeof *plan->source);
    plan->shard = dpl_alloc_array(n, sizeof *plan->shard);
    if (!plan->tensors || !plan->source || !plan->shard)
        return dpl_fail(DPL_ENOMEM, "no memory to write %s", plan->dir);
    size_t n_placed = 0;
    uint64_t in_shard = 0, bytes;
    for (size_t i = 0; i < 4 * n; i++) { // widths 8, 4, 2, 1
        const dpl_st_tensor *tensor = &tensors[i % n];
        if (!dpl_st_shape_bytes(tensor, &bytes) || bytes > INT64_MAX - plan->total_bytes)
            return dpl_fail(DPL_EINVAL, "tensor %s has no valid dtype and shape", tensor->name);
        if (dpl_st_dtype_bytes(tensor->dtype) != 8u >> i / n) continue;
        const bool full = shard_bytes > 0 && in_shard > 0 && in_shard + bytes > shard_bytes;
        in_shard = full ? bytes : in_shard + bytes;
        plan->n_shards += full;
        plan->total_bytes += bytes;
        plan->source[n_placed] = i % n;
        plan->shard[n_placed] = plan->n_shards - 1;
        plan->tensors[n_placed] = *tensor;
        plan->tensors[n_placed++].bytes = bytes;
    }
    return DPL_OK;
}

static dpl_status make_index(const shard_plan *plan, json_t **index_out) {
    json_t *map = json_object();
    *index_out = json_pack("{s:{s:I}, s:o}", "metadata", "total_size",
                           (json_int_t)plan->total_bytes, "weight_map", map);
    if (!*index_out) return dpl_fail(DPL_ENOMEM, "no memory to write %s", plan->dir);
    for (size_t i = 0; i < plan->n_tensors; i++) {
        const char *name = plan->tensors[i].name;
        char file[NAME_BYTES];
        shard_name(plan, plan->shard[i], file);
        if (json_object_get(map, name))
            return dpl_fail(DPL_EINVAL, "%s: the name %s is taken", plan->dir, name);
        if (json_object_set_new(map, name, json_string(file)) != 0)
            return dpl_fail(DPL_EINVAL, "%s: the name %s is not UTF-8", plan->dir, name);
    }
    return DPL_OK;
}

// Moves *next from the shard's first tensor to the one behind its last.
static dpl_status write_shard(const shard_plan *plan, size_t i_shard, dpl_fill_fn fill, void *arg,
                              size_t *next) {
    static const char *const metadata[] = {"format", "pt", NULL};
    const size_t first = *next;
    while (*next < plan->n_tensors && plan->shard[*next] == i_shard) ++*next;
    char name[NAME_BYTES], path[PATH_MAX];
    shard_name(plan, i_shard, name);
    DPL_TRY(dpl_path_join(plan->dir, name, path));
    dpl_st_writer *writer;
    DPL_TRY(dpl_st_create(path, plan->tensors + first, *next - first, metadata, &writer));
    dpl_status status = DPL_OK;
    for (size_t i = first; i < *next && status == DPL_OK; i++) {
        const uint64_t before = writer->written;
        status = fill(arg, plan->source[i], writer);
        if (status == DPL_OK && writer->written - before != plan->tensors[i].bytes)
            status = dpl_fail(DPL_EINVAL, "%s: tensor %s got %llu bytes, expected %llu", path,
                              plan->tensors[i].name, (unsigned long long)(writer->written - before),
                              (unsigned long long)plan->tensors[i].bytes);
    }
    if (status == DPL_OK) return dpl_st_finish(&writer);
    dpl_st_abandon(&writer);
    return status;
}

// Removes files of an earlier save that the new one did not replace.
static dpl_status remove_stale(const shard_plan *plan) {
    DIR *dir = opendir(plan->dir);
    if (!dir) return dpl_fail(DPL_EIO, "cannot read the folder %s: %m", plan->dir);
    const bool sharded = plan->n_shards > 1;
    dpl_status status = DPL_OK;
    const struct dirent *entry;
    while (status == DPL_OK && (entry = readdir(dir))) {
        size_t i, n;
        int end = 0;
        sscanf(entry->d_name, "model-%5zu-of-%5zu.safetensors%n", &i, &n, &end);
        const bool is_shard = end > 0 && !entry->d_name[end];
        if (strcmp(entry->d_name, sharded ? DPL_ST_SINGLE : DPL_ST_INDEX) != 0 &&
            (!is_shard || (sharded && n == plan->n_shards && i >= 1 && i <= n)))
            continue;
        if (unlinkat(dirfd(dir), entry->d_name, 0) != 0)
            status = dpl_fail(DPL_EIO, "cannot remove %s/%s: %m", plan->dir, entry->d_name);
    }
    closedir(dir);
    return status;
}

dpl_status dpl_shards_write(const char *dir, const dpl_st_tensor *tensors, size_t n_tensors,
                            size_t shard_bytes, dpl_fill_fn fill, void *arg) {
    shard_plan plan = {.dir = dir, .n_tensors = n_tensors, .n_shards = 1};
    json_t *index = NULL;
    char path[PATH_MAX];
    dpl_status status = dpl_path_join(dir, DPL_ST_INDEX, path);
    if (status == DPL_OK) status = make_plan(&plan, tensors, shard_bytes);
    if (status == DPL_OK) status = make_index(&plan, &index);
    for (size_t i = 0, next = 0; i < plan.n_shards && status == DPL_OK; i++)
        status = write_shard(&plan, i, fill, arg, &next);
    if (status == DPL_OK && plan.n_shards > 1) status = dpl_json_write(path, index);
    if (status == DPL_OK) status = remove_stale(&plan);
    json_decref(index);
    dpl_free(plan.shard);
    dpl_free(plan.source);
    dpl_free(plan.tensors);
    return status;
}
