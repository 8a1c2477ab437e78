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
    if (json_object_get(header, tensor->name))
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

// The data start at a multiple of 8, as the format asks; spaces fill the header up.
static dpl_status write_header(dpl_out *out, const json_t *header) {
    const size_t text_bytes = json_dumpb(header, NULL, 0, JSON_COMPACT);
    const uint64_t bytes = dpl_round_up(text_bytes, 8);
    if (bytes > DPL_ST_HEADER_MAX)
        return dpl_fail(DPL_EINVAL, "%s: a header of %zu bytes is too long; write shards",
                        out->path, (size_t)bytes);
    char *text = dpl_alloc(8 + bytes);
    if (!text) return dpl_fail(DPL_ENOMEM, "no memory for the header of %s", out->path);
    memcpy(text, &bytes, 8);
    memset(text + 8, ' ', bytes);
    json_dumpb(header, text + 8, text_bytes, JSON_COMPACT);
    const dpl_status status = dpl_out_write(out, text, 8 + bytes);
    dpl_free(text);
    return status;
}

dpl_status dpl_st_create(const char *path, const dpl_st_tensor *tensors, size_t n_tensors,
                         dpl_st_writer **writer_out) {
    dpl_st_writer *writer = dpl_alloc(sizeof *writer);
    json_t *header = json_pack("{s:{s:s}}", "__metadata__", "format", "pt");
    dpl_status status = writer && header ? DPL_OK
                                         : dpl_fail(DPL_ENOMEM, "no memory to write %s", path);
    for (size_t i = 0; i < n_tensors && status == DPL_OK; i++)
        status = add_tensor(path, header, &tensors[i], &writer->data_bytes);
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
    size_t *source;         // their numbers in the caller's list
    size_t n_tensors, n_shards;
    uint64_t shard_bytes;
    json_t *index;
} shard_plan;

static void shard_name(const shard_plan *plan, size_t i_shard, char name[NAME_BYTES]) {
    if (plan->n_shards == 1) strcpy(name, DPL_ST_SINGLE);
    else
        snprintf(name, NAME_BYTES, "model-%05zu-of-%05zu.safetensors", i_shard + 1, plan->n_shards);
}

// The tensor behind the last one of the shard that starts with `first`.
static size_t shard_end(const shard_plan *plan, size_t first) {
    uint64_t bytes = 0;
    for (size_t i = first; i < plan->n_tensors; i++) {
        if (bytes > 0 && bytes + plan->tensors[i].bytes > plan->shard_bytes) return i;
        bytes += plan->tensors[i].bytes;
    }
    return plan->n_tensors;
}

// Orders the tensors by width, cuts them into shards and lists those in the index.
static dpl_status make_plan(shard_plan *plan, const dpl_st_tensor *tensors) {
    const size_t n = plan->n_tensors;
    plan->tensors = dpl_alloc_array(n, sizeof *plan->tensors);
    plan->source = dpl_alloc_array(n, sizeof *plan->source);
    json_t *map = json_object();
    plan->index = json_pack("{s:o}", "weight_map", map);
    if (!plan->tensors || !plan->source || !plan->index)
        return dpl_fail(DPL_ENOMEM, "no memory to write %s", plan->dir);
    uint64_t total_bytes = 0;
    for (size_t i = 0; i < n; i++) DPL_TRY(add_tensor(plan->dir, map, &tensors[i], &total_bytes));
    dpl_st_tensor *next = plan->tensors;
    for (size_t i = 0; i < 4 * n; i++) { // widths 8, 4, 2, 1
        if (dpl_st_dtype_bytes(tensors[i % n].dtype) != 8u >> i / n) continue;
        plan->source[next - plan->tensors] = i % n;
        *next = tensors[i % n];
        (void)dpl_st_shape_bytes(next, &next->bytes);
        next++;
    }
    for (size_t i = shard_end(plan, 0); i < n; i = shard_end(plan, i)) plan->n_shards++;
    int rc = json_object_set_new(plan->index, "metadata",
                                 json_pack("{s:I}", "total_size", (json_int_t)total_bytes));
    for (size_t i = 0, end, i_shard = 0; i < n; i_shard++) {
        char file[NAME_BYTES];
        shard_name(plan, i_shard, file);
        for (end = shard_end(plan, i); i < end; i++)
            rc |= json_object_set_new(map, plan->tensors[i].name, json_string(file));
    }
    return rc == 0 ? DPL_OK : dpl_fail(DPL_ENOMEM, "no memory to write %s", plan->dir);
}

static dpl_status write_shard(const shard_plan *plan, size_t i_shard, size_t first, size_t end,
                              dpl_fill_fn fill, void *arg) {
    char name[NAME_BYTES], path[PATH_MAX];
    shard_name(plan, i_shard, name);
    DPL_TRY(dpl_path_join(plan->dir, name, path));
    dpl_st_writer *writer;
    DPL_TRY(dpl_st_create(path, plan->tensors + first, end - first, &writer));
    dpl_status status = DPL_OK;
    for (size_t i = first; i < end && status == DPL_OK; i++) {
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
    shard_plan plan = {.dir = dir,
                       .n_tensors = n_tensors,
                       .n_shards = 1,
                       .shard_bytes = shard_bytes > 0 ? shard_bytes : UINT64_MAX};
    char path[PATH_MAX];
    dpl_status status = dpl_path_join(dir, DPL_ST_INDEX, path);
    if (status == DPL_OK) status = make_plan(&plan, tensors);
    for (size_t i = 0, first = 0, end; i < plan.n_shards && status == DPL_OK; i++, first = end) {
        end = shard_end(&plan, first);
        status = write_shard(&plan, i, first, end, fill, arg);
    }
    if (status == DPL_OK && plan.n_shards > 1) status = dpl_json_write(path, plan.index);
    if (status == DPL_OK) status = remove_stale(&plan);
    json_decref(plan.index);
    dpl_free(plan.source);
    dpl_free(plan.tensors);
    return status;
}
