// st_write.c - writing safetensors: one file, or the weights of a model directory.
//
// A file's header says where each tensor lies, so their sizes come first and their bytes are asked
// for one tensor at a time. A directory gets one file, or shards and then an index: a reader that
// finds the index finds all of them.
#include <dirent.h>
#include <stdlib.h>
#include <unistd.h>

#include "io/io.h"

#define NAME_BYTES 64 // of a shard's name

typedef struct plan {
    const dpl_st_tensor *tensors;
    size_t *order; // of writing
    size_t n_tensors, n_shards;
    uint64_t shard_bytes;
    dpl_data_fn data_of;
    void *arg;
    json_t *index;
} plan;

static uint64_t bytes_at(const plan *p, size_t i) {
    uint64_t bytes = 0;
    (void)dpl_st_shape_bytes(&p->tensors[p->order[i]], &bytes);
    return bytes;
}

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

// Writes the tensors first .. end-1 of the order as one file.
static dpl_status write_part(const plan *p, const char *path, size_t first, size_t end) {
    json_t *header = json_pack("{s:{s:s}}", "__metadata__", "format", "pt");
    uint64_t n_bytes = 0;
    dpl_out out;
    dpl_status status = header ? DPL_OK : dpl_fail(DPL_ENOMEM, "no memory to write %s", path);
    for (size_t i = first; i < end && status == DPL_OK; i++)
        status = add_tensor(path, header, &p->tensors[p->order[i]], &n_bytes);
    if (status == DPL_OK) status = dpl_out_open(path, &out);
    const bool is_open = status == DPL_OK;
    if (is_open) status = write_header(&out, header);
    for (size_t i = first; i < end && status == DPL_OK; i++) {
        const size_t number = p->order[i];
        const void *data = p->data_of ? p->data_of(p->arg, number) : p->tensors[number].data;
        status = dpl_out_write(&out, data, bytes_at(p, i));
    }
    if (is_open) status = dpl_out_close(&out, status);
    json_decref(header);
    return status;
}

dpl_status dpl_st_write(const char *path, const dpl_st_tensor *tensors, size_t n_tensors,
                        dpl_data_fn data_of, void *arg) {
    plan p = {.tensors = tensors, .n_tensors = n_tensors, .data_of = data_of, .arg = arg};
    p.order = dpl_alloc_array(n_tensors, sizeof *p.order);
    if (!p.order) return dpl_fail(DPL_ENOMEM, "no memory to write %s", path);
    for (size_t i = 0; i < n_tensors; i++) p.order[i] = i;
    const dpl_status status = write_part(&p, path, 0, n_tensors);
    dpl_free(p.order);
    return status;
}

/* ---- a model directory ---------------------------------------------------------------------- */
static void shard_name(const plan *p, size_t i_shard, char name[NAME_BYTES]) {
    if (p->n_shards == 1) strcpy(name, DPL_ST_SINGLE);
    else snprintf(name, NAME_BYTES, "model-%05zu-of-%05zu.safetensors", i_shard + 1, p->n_shards);
}

// The tensor behind the last one of the shard that starts with `first`.
static size_t shard_end(const plan *p, size_t first) {
    uint64_t bytes = 0;
    for (size_t i = first; i < p->n_tensors; i++) {
        if (bytes > 0 && bytes + bytes_at(p, i) > p->shard_bytes) return i;
        bytes += bytes_at(p, i);
    }
    return p->n_tensors;
}

// Orders the tensors by width, cuts them into shards and lists those in the index.
static dpl_status make_plan(plan *p, const char *dir) {
    const size_t n = p->n_tensors;
    json_t *map = json_object();
    p->order = dpl_alloc_array(n, sizeof *p->order);
    p->index = json_pack("{s:o}", "weight_map", map);
    if (!p->order || !p->index) return dpl_fail(DPL_ENOMEM, "no memory to write %s", dir);
    uint64_t total_bytes = 0;
    for (size_t i = 0; i < n; i++) DPL_TRY(add_tensor(dir, map, &p->tensors[i], &total_bytes));
    size_t *next = p->order;
    for (size_t i = 0; i < 4 * n; i++) // widths 8, 4, 2, 1
        if (dpl_st_dtype_bytes(p->tensors[i % n].dtype) == 8u >> i / n) *next++ = i % n;
    for (size_t i = shard_end(p, 0); i < n; i = shard_end(p, i)) p->n_shards++;
    int rc = json_object_set_new(p->index, "metadata",
                                 json_pack("{s:I}", "total_size", (json_int_t)total_bytes));
    for (size_t i = 0, end, i_shard = 0; i < n; i_shard++) {
        char file[NAME_BYTES];
        shard_name(p, i_shard, file);
        for (end = shard_end(p, i); i < end; i++)
            rc |= json_object_set_new(map, p->tensors[p->order[i]].name, json_string(file));
    }
    return rc == 0 ? DPL_OK : dpl_fail(DPL_ENOMEM, "no memory to write %s", dir);
}

// Removes files of an earlier save that the new one did not replace.
static dpl_status remove_stale(const plan *p, const char *path) {
    DIR *dir = opendir(path);
    if (!dir) return dpl_fail(DPL_EIO, "cannot read the folder %s: %m", path);
    const bool sharded = p->n_shards > 1;
    dpl_status status = DPL_OK;
    const struct dirent *entry;
    while (status == DPL_OK && (entry = readdir(dir))) {
        size_t i, n;
        int end = 0;
        sscanf(entry->d_name, "model-%5zu-of-%5zu.safetensors%n", &i, &n, &end);
        const bool is_shard = end > 0 && !entry->d_name[end];
        if (strcmp(entry->d_name, sharded ? DPL_ST_SINGLE : DPL_ST_INDEX) != 0 &&
            (!is_shard || (sharded && n == p->n_shards && i >= 1 && i <= n)))
            continue;
        if (unlinkat(dirfd(dir), entry->d_name, 0) != 0)
            status = dpl_fail(DPL_EIO, "cannot remove %s/%s: %m", path, entry->d_name);
    }
    closedir(dir);
    return status;
}

dpl_status dpl_shards_write(const char *dir, const dpl_st_tensor *tensors, size_t n_tensors,
                            size_t shard_bytes, dpl_data_fn data_of, void *arg) {
    plan p = {.tensors = tensors,
              .n_tensors = n_tensors,
              .n_shards = 1,
              .shard_bytes = shard_bytes > 0 ? shard_bytes : UINT64_MAX,
              .data_of = data_of,
              .arg = arg};
    char name[NAME_BYTES], path[PATH_MAX];
    dpl_status status = make_plan(&p, dir);
    for (size_t i = 0, first = 0, end; i < p.n_shards && status == DPL_OK; i++, first = end) {
        end = shard_end(&p, first);
        shard_name(&p, i, name);
        status = dpl_path_join(dir, name, path);
        if (status == DPL_OK) status = write_part(&p, path, first, end);
    }
    if (status == DPL_OK && p.n_shards > 1) {
        status = dpl_path_join(dir, DPL_ST_INDEX, path);
        if (status == DPL_OK) status = dpl_json_write(path, p.index);
    }
    if (status == DPL_OK) status = remove_stale(&p, dir);
    json_decref(p.index);
    dpl_free(p.order);
    return status;
}
