// st_write.c - writing safetensors: one file, or the weights of a model directory.
//
// A file's header says where each tensor lies, so their sizes come first and their bytes are asked
// for one tensor at a time. A directory gets one file, or shards and then an index: a reader that
// finds the index finds all of them.
#include <errno.h>
#include <stdio.h>
#include <unistd.h>

#include "io/io.h"

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
    place *places;    // in the order of writing
    size_t *shard_of; // each tensor
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

/* ---- the index ------------------------------------------------------------------------------ */
#define SUFFIX ".safetensors"

dpl_status dpl_st_part_path(const char *path, size_t i, size_t n_parts, char *out) {
    const size_t stem = strlen(path) - strlen(SUFFIX);
    const int n = snprintf(out, PATH_MAX, "%.*s-%05zu-of-%05zu" SUFFIX, (int)stem, path, i + 1,
                           n_parts);
    return n < PATH_MAX ? DPL_OK : dpl_fail(DPL_EINVAL, "%s: the path is too long", path);
}

dpl_status dpl_st_index_path(const char *path, char *out) {
    const int n = snprintf(out, PATH_MAX, "%s.index.json", path);
    return n < PATH_MAX ? DPL_OK : dpl_fail(DPL_EINVAL, "%s: the path is too long", path);
}

static dpl_status fill_index(const char *path, const dpl_st_tensor *tensors, size_t n_tensors,
                             const size_t *part_of, size_t n_parts, json_t *index) {
    json_t *map = json_object_get(index, "weight_map");
    uint64_t total_bytes = 0;
    char part[PATH_MAX];
    for (size_t i = 0; i < n_tensors; i++) {
        DPL_TRY(dpl_st_part_path(path, part_of[i], n_parts, part));
        const char *slash = strrchr(part, '/');
        total_bytes += dpl_st_elems(&tensors[i]) * dpl_st_dtype_bytes(tensors[i].dtype);
        DPL_EXPECT(
            json_object_set_new(map, tensors[i].name, json_string(slash ? slash + 1 : part)) == 0,
            DPL_ENOMEM, "no memory for the index of %s", path);
    }
    json_t *size = json_pack("{s:I}", "total_size", (json_int_t)total_bytes);
    DPL_EXPECT(json_object_set_new(index, "metadata", size) == 0, DPL_ENOMEM,
               "no memory for the index of %s", path);
    return DPL_OK;
}

dpl_status dpl_st_write_index(const char *path, const dpl_st_tensor *tensors, size_t n_tensors,
                              const size_t *part_of, size_t n_parts) {
    char at[PATH_MAX];
    DPL_TRY(dpl_st_index_path(path, at));
    json_t *index = json_pack("{s:{}}", "weight_map");
    DPL_EXPECT(index, DPL_ENOMEM, "no memory for the index of %s", path);
    dpl_status status = fill_index(path, tensors, n_tensors, part_of, n_parts, index);
    if (status == DPL_OK) status = dpl_json_write(at, index);
    json_decref(index);
    return status;
}

/* ---- the plan ------------------------------------------------------------------------------- */
// Before anything is written: names that repeat in another shard, too.
static dpl_status check_tensors(const plan *p, const char *path) {
    json_t *names = json_object();
    uint64_t bytes = 0;
    dpl_status status = names ? DPL_OK : dpl_fail(DPL_ENOMEM, "no memory to write %s", path);
    for (size_t i = 0; i < p->n_tensors && status == DPL_OK; i++)
        status = add_tensor(path, names, &p->tensors[i], &bytes);
    json_decref(names);
    return status;
}

// Orders the tensors by width and cuts them into shards.
static dpl_status make_plan(plan *p, const char *path, uint64_t shard_bytes) {
    const size_t n = p->n_tensors;
    p->places = dpl_alloc_array(n, sizeof *p->places);
    p->shard_of = dpl_alloc_array(n, sizeof *p->shard_of);
    DPL_EXPECT(p->places && p->shard_of, DPL_ENOMEM, "no memory to write %s", path);
    DPL_TRY(check_tensors(p, path));
    uint64_t used = 0;
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
        p->shard_of[i % n] = p->n_shards - 1;
        *next++ = (place){tensor, bytes, p->n_shards - 1};
    }
    return DPL_OK;
}

static dpl_status write_dir(const plan *p, const char *dir) {
    char single[PATH_MAX], index[PATH_MAX], path[PATH_MAX];
    const bool sharded = p->n_shards > 1;
    DPL_TRY(dpl_path_join(dir, DPL_ST_SINGLE, single));
    DPL_TRY(dpl_path_join(dir, DPL_ST_INDEX, index));
    for (size_t i = 0; i < p->n_shards; i++) {
        if (sharded) DPL_TRY(dpl_st_part_path(single, i, p->n_shards, path));
        DPL_TRY(write_shard(p, i, sharded ? path : single));
    }
    if (sharded)
        DPL_TRY(dpl_st_write_index(single, p->tensors, p->n_tensors, p->shard_of, p->n_shards));
    // What an earlier save left in the other form would be read instead, or look as if.
    const char *other = sharded ? single : index;
    DPL_EXPECT(unlink(other) == 0 || errno == ENOENT, DPL_EIO, "cannot remove %s: %m", other);
    return DPL_OK;
}

static void close_plan(plan *p) {
    dpl_free(p->shard_of);
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
