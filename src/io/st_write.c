// st_write.c - writing safetensors: one file, or the weights of a model directory.
//
// A file's header says where each tensor lies, so their sizes come first and their bytes are asked
// for one tensor at a time. A directory gets one file, or shards and then an index: a reader that
// finds the index finds all of them.
#include <errno.h>
#include <stdio.h>
#include <unistd.h>

#include "io/io.h"

#define NAME_BYTES 64 // of a shard's name

typedef struct place { // of a tensor
    const dpl_st_tensor *tensor;
    uint64_t bytes;
    size_t i_shard;
} place;

typedef struct plan {
    const dpl_st_tensor *tensors;
    size_t n_tensors;
    dpl_data_fn data_of;
    void *arg;
    size_t n_shards;
    place *places; // in the order of writing
    json_t *index;
} plan;

/* ---- one file ------------------------------------------------------------------------------- */
static dpl_status add_tensor(const char *path, json_t *header, const dpl_st_tensor *tensor,
                             uint64_t *end) {
    uint64_t bytes;
    DPL_CHECK(dpl_st_shape_bytes(tensor, &bytes) && bytes <= INT64_MAX - *end,
              "%s: tensor %s has no valid dtype and shape", path, tensor->name);
    DPL_CHECK(!json_object_get(header, tensor->name), "%s: the name %s is taken", path,
              tensor->name);
    json_t *shape = json_array();
    for (int i = 0; i < tensor->rank; i++)
        json_array_append_new(shape, json_integer(tensor->shape[i]));
    json_t *entry = json_pack("{s:s, s:o, s:[I, I]}", "dtype", dpl_st_dtype_name(tensor->dtype),
                              "shape", shape, "data_offsets", (json_int_t)*end,
                              (json_int_t)(*end + bytes));
    DPL_CHECK(json_object_set_new(header, tensor->name, entry) == 0, "%s: the name %s is not UTF-8",
              path, tensor->name);
    *end += bytes;
    return DPL_OK;
}

// The data start at a multiple of 8, as the format asks; spaces fill the header up.
static dpl_status write_header(dpl_out *out, const json_t *header) {
    const size_t text_bytes = json_dumpb(header, NULL, 0, JSON_COMPACT);
    const uint64_t bytes = dpl_round_up(text_bytes, 8);
    DPL_CHECK(bytes <= DPL_ST_HEADER_MAX, "%s: a header of %zu bytes is too long; write shards",
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

static dpl_status write_data(const plan *p, size_t i_shard, const json_t *header, dpl_out *out) {
    DPL_TRY(write_header(out, header));
    for (const place *at = p->places; at < p->places + p->n_tensors; at++) {
        if (at->i_shard != i_shard) continue;
        const size_t i = (size_t)(at->tensor - p->tensors);
        const void *data = p->data_of ? p->data_of(p->arg, i) : at->tensor->data;
        DPL_TRY(dpl_out_write(out, data, at->bytes));
    }
    return DPL_OK;
}

static dpl_status write_shard(const plan *p, size_t i_shard, const char *path) {
    json_t *header = json_pack("{s:{s:s}}", "__metadata__", "format", "pt");
    uint64_t n_bytes = 0;
    dpl_out out;
    dpl_status status = header ? DPL_OK : dpl_fail(DPL_ENOMEM, "no memory to write %s", path);
    for (size_t i = 0; i < p->n_tensors && status == DPL_OK; i++)
        if (p->places[i].i_shard == i_shard)
            status = add_tensor(path, header, p->places[i].tensor, &n_bytes);
    if (status == DPL_OK) status = dpl_out_open(path, &out);
    if (status == DPL_OK) status = dpl_out_close(&out, write_data(p, i_shard, header, &out));
    json_decref(header);
    return status;
}

/* ---- the plan ------------------------------------------------------------------------------- */
static void shard_name(const plan *p, size_t i_shard, char name[NAME_BYTES]) {
    if (p->n_shards == 1) strcpy(name, DPL_ST_SINGLE);
    else snprintf(name, NAME_BYTES, "model-%05zu-of-%05zu.safetensors", i_shard + 1, p->n_shards);
}

// Orders the tensors by width, cuts them into shards and lists those in the index.
static dpl_status make_plan(plan *p, const char *path, uint64_t shard_bytes) {
    const size_t n = p->n_tensors;
    json_t *map = json_object();
    p->places = dpl_alloc_array(n, sizeof *p->places);
    p->index = json_pack("{s:o}", "weight_map", map);
    if (!p->places || !p->index) return dpl_fail(DPL_ENOMEM, "no memory to write %s", path);
    uint64_t total_bytes = 0, used = 0;
    for (size_t i = 0; i < n; i++) DPL_TRY(add_tensor(path, map, &p->tensors[i], &total_bytes));
    place *next = p->places;
    for (size_t i = 0; i < 4 * n; i++) { // widths 8, 4, 2, 1
        const dpl_st_tensor *tensor = &p->tensors[i % n];
        if (dpl_st_dtype_bytes(tensor->dtype) != 8u >> i / n) continue;
        const uint64_t bytes = dpl_st_elems(tensor) * dpl_st_dtype_bytes(tensor->dtype);
        if (used > 0 && used + bytes > shard_bytes) {
            p->n_shards++;
            used = 0;
        }
        used += bytes;
        *next++ = (place){tensor, bytes, p->n_shards - 1};
    }
    int rc = json_object_set_new(p->index, "metadata",
                                 json_pack("{s:I}", "total_size", (json_int_t)total_bytes));
    for (size_t i = 0; i < n; i++) {
        char file[NAME_BYTES];
        shard_name(p, p->places[i].i_shard, file);
        rc |= json_object_set_new(map, p->places[i].tensor->name, json_string(file));
    }
    return rc == 0 ? DPL_OK : dpl_fail(DPL_ENOMEM, "no memory to write %s", path);
}

static dpl_status write_dir(const plan *p, const char *dir) {
    char name[NAME_BYTES], path[PATH_MAX];
    for (size_t i = 0; i < p->n_shards; i++) {
        shard_name(p, i, name);
        DPL_TRY(dpl_path_join(dir, name, path));
        DPL_TRY(write_shard(p, i, path));
    }
    const bool sharded = p->n_shards > 1;
    if (sharded) DPL_TRY(dpl_path_join(dir, DPL_ST_INDEX, path));
    if (sharded) DPL_TRY(dpl_json_write(path, p->index));
    // What an earlier save left in the other form would be read instead, or look as if.
    DPL_TRY(dpl_path_join(dir, sharded ? DPL_ST_SINGLE : DPL_ST_INDEX, path));
    DPL_EXPECT(unlink(path) == 0 || errno == ENOENT, DPL_EIO, "cannot remove %s: %m", path);
    return DPL_OK;
}

static void close_plan(plan *p) {
    json_decref(p->index);
    dpl_free(p->places);
}

dpl_status dpl_st_write(const char *path, const dpl_st_tensor *tensors, size_t n_tensors,
                        dpl_data_fn data_of, void *arg) {
    plan p = {tensors, n_tensors, data_of, arg, 1, NULL, NULL};
    dpl_status status = make_plan(&p, path, UINT64_MAX);
    if (status == DPL_OK) status = write_shard(&p, 0, path);
    close_plan(&p);
    return status;
}

dpl_status dpl_st_write_dir(const char *dir, const dpl_st_tensor *tensors, size_t n_tensors,
                            size_t shard_bytes, dpl_data_fn data_of, void *arg) {
    plan p = {tensors, n_tensors, data_of, arg, 1, NULL, NULL};
    dpl_status status = make_plan(&p, dir, shard_bytes > 0 ? shard_bytes : UINT64_MAX);
    if (status == DPL_OK) status = write_dir(&p, dir);
    close_plan(&p);
    return status;
}
