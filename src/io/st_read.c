// st_read.c - reading safetensors: one file, or the weights of a model directory.
//
// A file is the header's length (8 bytes), the header (JSON: name -> dtype, shape, data_offsets)
// and the data. The whole header is checked at open, against the file's size too, so that a tensor
// that was found needs no further check. Data may lie at odd addresses, hence memcpy everywhere.
// In a directory with an index that alone decides which files are read, so shards that an earlier
// save left do no harm; a file and the index that disagree are an error, because one of them is
// damaged and weights would stay at their random start.
#include <math.h>
#include <stdlib.h>

#include "io/io.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "files are read as they lie in memory");

typedef struct dpl_st_part { // one file
    struct dpl_st_part *next;
    dpl_map map;
    const uint8_t *data; // in the map: where the header ends
    json_t *header;      // owns the tensors' names
    char path[PATH_MAX];
} part;

static const struct {
    const char *name;
    size_t bytes;
} dtypes[DPL_ST_N] = {
#define ROW(id, bytes) {#id, bytes},
    DPL_ST_DTYPE_MAP(ROW)
#undef ROW
};

const char *dpl_st_dtype_name(dpl_st_dtype dtype) {
    return dtypes[dtype].name;
}

size_t dpl_st_dtype_bytes(dpl_st_dtype dtype) {
    return dtypes[dtype].bytes;
}

size_t dpl_st_elems(const dpl_st_tensor *tensor) {
    size_t n = 1;
    for (int i = 0; i < tensor->rank; i++) n *= (size_t)tensor->shape[i];
    return n;
}

bool dpl_st_shape_bytes(const dpl_st_tensor *tensor, uint64_t *bytes_out) {
    if ((unsigned)tensor->dtype >= DPL_ST_N || (unsigned)tensor->rank > DPL_ST_RANK_MAX)
        return false;
    int64_t bytes = (int64_t)dtypes[tensor->dtype].bytes;
    for (int i = 0; i < tensor->rank; i++)
        if (tensor->shape[i] < 0 || __builtin_mul_overflow(bytes, tensor->shape[i], &bytes))
            return false;
    *bytes_out = (uint64_t)bytes;
    return true;
}

/* ---- the header ----------------------------------------------------------------------------- */
// The byte of the file at which a tensor's entry starts; the header's start for an escaped name.
static size_t entry_offset(const part *file, const char *name) {
    char quoted[256];
    snprintf(quoted, sizeof quoted, "\"%.250s\"", name);
    const uint8_t *header = file->map.data + 8;
    const uint8_t *at = memmem(header, (size_t)(file->data - header), quoted, strlen(quoted));
    return at ? (size_t)(at - file->map.data) : 8;
}

// Fills `tensor`, but for its name, from its entry. Returns what is wrong, or NULL.
static const char *parse_tensor(const part *file, json_t *entry, dpl_st_tensor *tensor) {
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    const json_t *shape = json_object_get(entry, "shape");
    if (!dtype) return "no dtype";
    while (tensor->dtype < DPL_ST_N && strcmp(dtypes[tensor->dtype].name, dtype)) tensor->dtype++;
    if (tensor->dtype == DPL_ST_N) return "an unknown dtype";

    if (!json_is_array(shape)) return "no shape";
    if (json_array_size(shape) > DPL_ST_RANK_MAX) return "too many dimensions";
    tensor->rank = (int)json_array_size(shape);
    for (int i = 0; i < tensor->rank; i++) {
        const json_t *size = json_array_get(shape, (size_t)i);
        tensor->shape[i] = json_is_integer(size) ? json_integer_value(size) : -1;
    }
    if (!dpl_st_shape_bytes(tensor, &tensor->bytes))
        return "a dimension that is not a count, or a shape whose size overflows";

    json_int_t begin, end;
    if (json_unpack(entry, "{s:[I,I!]}", "data_offsets", &begin, &end) != 0 || begin < 0)
        return "no data_offsets of the form [begin, end]";
    if (begin > end) return "data_offsets that run backwards";
    if (end > file->map.data + file->map.bytes - file->data)
        return "data beyond the end of the file";
    if ((uint64_t)(end - begin) != tensor->bytes)
        return "data_offsets that do not match dtype and shape";
    tensor->data = file->data + begin;
    return NULL;
}

static int by_data(const void *a, const void *b) {
    const dpl_st_tensor *x = a, *y = b;
    if (x->data != y->data) return x->data < y->data ? -1 : 1;
    // Tensors without elements may share a place; they come before what is there.
    return x->bytes != y->bytes ? (x->bytes < y->bytes ? -1 : 1) : strcmp(x->name, y->name);
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const dpl_st_tensor *)a)->name, ((const dpl_st_tensor *)b)->name);
}

// Each tensor must start where the one before it ended, the last must end with the file.
static dpl_status check_layout(const part *file, dpl_st_tensor *tensors, size_t n_tensors) {
    qsort(tensors, n_tensors, sizeof *tensors, by_data);
    const uint8_t *expected = file->data, *end = file->map.data + file->map.bytes;
    for (const dpl_st_tensor *tensor = tensors; tensor < tensors + n_tensors; tensor++) {
        DPL_EXPECT(tensor->data == expected, DPL_EFORMAT, "%s: byte %zu: tensor %.200s %s",
                   file->path, (size_t)(tensor->data - file->map.data), tensor->name,
                   tensor->data < expected ? "overlaps the one before it" : "has a hole before it");
        expected += tensor->bytes;
    }
    DPL_EXPECT(expected == end, DPL_EFORMAT, "%s: byte %zu: %zu bytes that belong to no tensor",
               file->path, (size_t)(expected - file->map.data), (size_t)(end - expected));
    return DPL_OK;
}

// Appends a file's tensors to those of `all`, where there is room for them.
static dpl_status take_tensors(const part *file, dpl_st_file *all) {
    dpl_st_tensor *const first = all->tensors + all->n_tensors, *next = first;
    const char *name;
    json_t *entry;
    json_object_foreach(file->header, name, entry) {
        if (!strcmp(name, "__metadata__")) continue;
        *next = (dpl_st_tensor){.name = name, .file = file->path};
        const char *wrong = parse_tensor(file, entry, next++);
        DPL_EXPECT(!wrong, DPL_EFORMAT, "%s: byte %zu: tensor %.200s has %s", file->path,
                   entry_offset(file, name), name, wrong);
    }
    all->n_tensors = (size_t)(next - all->tensors);
    return check_layout(file, first, (size_t)(next - first));
}

static dpl_status read_header(part *file) {
    const dpl_map *map = &file->map;
    uint64_t bytes = 0;
    if (map->bytes >= 8) memcpy(&bytes, map->data, 8);
    DPL_EXPECT(bytes >= 2 && bytes <= DPL_ST_HEADER_MAX && bytes <= map->bytes - 8, DPL_EFORMAT,
               "%s: byte 0: no safetensors: a header of %llu bytes of %zu", file->path,
               (unsigned long long)bytes, map->bytes);
    file->data = map->data + 8 + bytes;
    DPL_EXPECT(map->data[8] == '{', DPL_EFORMAT, "%s: byte 8: the header does not start with '{'",
               file->path);
    json_error_t error;
    file->header = json_loadb((const char *)map->data + 8, bytes, JSON_REJECT_DUPLICATES, &error);
    DPL_EXPECT(file->header, DPL_EFORMAT, "%s: byte %d: header: %s", file->path, 8 + error.position,
               error.text);
    json_t *metadata = json_object_get(file->header, "__metadata__"), *value;
    const char *key;
    bool strings = !metadata || json_is_object(metadata);
    json_object_foreach(metadata, key, value) strings = strings && json_is_string(value);
    DPL_EXPECT(strings, DPL_EFORMAT, "%s: byte %zu: __metadata__ is not a map of strings",
               file->path, entry_offset(file, "__metadata__"));
    return DPL_OK;
}

// Opens a file, unless it is open.
static dpl_status open_part(dpl_st_file *all, const char *dir, const char *name) {
    char path[PATH_MAX];
    DPL_TRY(dpl_path_join(dir, name, path));
    for (const part *file = all->parts; file; file = file->next)
        if (!strcmp(file->path, path)) return DPL_OK;
    part *file = dpl_alloc(sizeof *file);
    DPL_EXPECT(file, DPL_ENOMEM, "no memory to open %s", path);
    strcpy(file->path, path);
    file->next = all->parts;
    all->parts = file; // From here on closing frees it.
    DPL_TRY(dpl_map_open(path, &file->map));
    return read_header(file);
}

/* ---- a model directory, or files by an index ------------------------------------------------- */
static dpl_status open_listed(dpl_st_file *all, const char *dir) {
    const char *tensor;
    json_t *value;
    DPL_TRY(dpl_json_read(all->index_path, &all->index));
    all->weight_map = json_object_get(all->index, "weight_map");
    DPL_EXPECT(json_is_object(all->weight_map), DPL_EFORMAT, "%s: no object named weight_map",
               all->index_path);
    json_object_foreach(all->weight_map, tensor, value) {
        const char *name = json_string_value(value);
        DPL_EXPECT(name && *name && !strchr(name, '/'), DPL_EFORMAT,
                   "%s: weight_map: tensor %.200s: no file in this folder", all->index_path,
                   tensor);
        DPL_TRY(open_part(all, dir, name));
    }
    return DPL_OK;
}

static dpl_status open_dir(dpl_st_file *all, const char *dir) {
    char single[PATH_MAX];
    DPL_TRY(dpl_path_join(dir, DPL_ST_SINGLE, single));
    DPL_TRY(dpl_path_join(dir, DPL_ST_INDEX, all->index_path));
    const bool has_single = dpl_path_exists(single), has_index = dpl_path_exists(all->index_path);
    DPL_EXPECT(has_single || has_index, DPL_EIO,
               "%s: neither " DPL_ST_SINGLE " nor an index is there", dir);
    if (has_single && has_index)
        dpl_log("note: %s has " DPL_ST_SINGLE " and an index; the index is not used", dir);
    return has_single ? open_part(all, dir, DPL_ST_SINGLE) : open_listed(all, dir);
}

// What is not there may have been written in parts.
static dpl_status open_file(dpl_st_file *all, const char *path) {
    char dir[PATH_MAX];
    DPL_TRY(dpl_st_index_path(path, all->index_path));
    if (dpl_path_exists(path) || !dpl_path_exists(all->index_path)) return open_part(all, "", path);
    const char *slash = strrchr(path, '/');
    snprintf(dir, sizeof dir, "%.*s", slash ? (int)(slash - path) + 1 : 2, slash ? path : "./");
    return open_listed(all, dir);
}

static bool is_in(const dpl_st_tensor *tensor, const char *file) {
    return tensor && file && !strcmp(strrchr(tensor->file, '/') + 1, file);
}

// The index and the files must agree on where each tensor is.
static dpl_status check_index(const dpl_st_file *all) {
    uint64_t bytes = 0;
    const char *name;
    json_t *value;
    json_object_foreach(all->weight_map, name, value)
        DPL_EXPECT(is_in(dpl_st_find(all, name), json_string_value(value)), DPL_EFORMAT,
                   "%s: weight_map: tensor %.200s is not in %s", all->index_path, name,
                   json_string_value(value));
    for (const dpl_st_tensor *t = all->tensors; t < all->tensors + all->n_tensors; t++) {
        const char *listed = json_string_value(json_object_get(all->weight_map, t->name));
        DPL_EXPECT(is_in(t, listed), DPL_EFORMAT,
                   "%s: holds tensor %.200s, which the index puts %s%s", t->file, t->name,
                   listed ? "in " : "nowhere", listed ? listed : "");
        bytes += t->bytes;
    }
    // Public models exist whose total_size is wrong though all weights are there.
    const json_t *total = json_object_get(json_object_get(all->index, "metadata"), "total_size");
    if (json_is_number(total) && json_number_value(total) != (double)bytes)
        dpl_log("note: %s: total_size is %.0f, but its tensors have %llu bytes", all->path,
                json_number_value(total), (unsigned long long)bytes);
    return DPL_OK;
}

/* ---- either --------------------------------------------------------------------------------- */
static dpl_status open_all(dpl_st_file *all, const char *path) {
    size_t n_max = 0;
    DPL_EXPECT(all, DPL_ENOMEM, "no memory to open %s", path);
    DPL_TRY(dpl_path_join("", path, all->path));
    DPL_TRY(dpl_path_is_dir(path) ? open_dir(all, path) : open_file(all, path));
    for (const part *file = all->parts; file; file = file->next)
        n_max += json_object_size(file->header);
    all->tensors = dpl_alloc_array(n_max, sizeof *all->tensors);
    DPL_EXPECT(all->tensors, DPL_ENOMEM, "no memory for the headers of %s", path);
    for (const part *file = all->parts; file; file = file->next) DPL_TRY(take_tensors(file, all));
    qsort(all->tensors, all->n_tensors, sizeof *all->tensors, by_name);
    return all->index ? check_index(all) : DPL_OK;
}

dpl_status dpl_st_open(const char *path, dpl_st_file **file_out) {
    dpl_st_file *all = dpl_alloc(sizeof *all);
    const dpl_status status = open_all(all, path);
    if (status == DPL_OK) *file_out = all;
    else dpl_st_close(&all);
    return status;
}

void dpl_st_close(dpl_st_file **file) {
    if (!file || !*file) return;
    for (part *p = (*file)->parts, *next; p; p = next) {
        next = p->next;
        dpl_map_close(&p->map);
        json_decref(p->header);
        dpl_free(p);
    }
    json_decref((*file)->index);
    dpl_free((*file)->tensors);
    dpl_free(*file);
    *file = NULL;
}

const dpl_st_tensor *dpl_st_find(const dpl_st_file *file, const char *name) {
    const dpl_st_tensor key = {.name = name};
    return bsearch(&key, file->tensors, file->n_tensors, sizeof key, by_name);
}

/* ---- values --------------------------------------------------------------------------------- */
static float f16_to_f32(uint16_t half) {
    uint32_t bits = (half & 0x7fffu) << 13; // The same number, but for the exponent's bias.
    float f;
    memcpy(&f, &bits, 4);
    f = f >= 0x1p-96f ? f * INFINITY + (half & 0x3ff ? NAN : 0) : f * 0x1p112f;
    return half & 0x8000 ? -f : f;
}

#define CONVERT(id, type, expression)                              \
    case DPL_ST_##id:                                              \
        for (size_t i = 0; i < n; i++) {                           \
            type v;                                                \
            memcpy(&v, tensor->data + i * sizeof(type), sizeof v); \
            dst[i] = (expression);                                 \
        }                                                          \
        return DPL_OK;

dpl_status dpl_st_read_f32(const dpl_st_tensor *tensor, float *dst) {
    const size_t n = dpl_st_elems(tensor);
    switch (tensor->dtype) {
        CONVERT(F64, double, (float)v)
        CONVERT(F32, float, v)
        CONVERT(F16, uint16_t, f16_to_f32(v))
        CONVERT(BF16, uint16_t, dpl_bf16_to_f32(v))
    default:
        return dpl_fail(DPL_EFORMAT, "%s: tensor %s is %s, expected F32, BF16, F16 or F64",
                        tensor->file, tensor->name, dpl_st_dtype_name(tensor->dtype));
    }
}

dpl_status dpl_st_read_i32(const dpl_st_tensor *tensor, int64_t low, int64_t high, int32_t *dst) {
    const char *name = dpl_st_dtype_name(tensor->dtype);
    const size_t width = dpl_st_dtype_bytes(tensor->dtype), n_bits_unused = 64 - 8 * width;
    const bool is_signed = *name == 'I';
    DPL_EXPECT(is_signed || *name == 'U' || tensor->dtype == DPL_ST_BOOL, DPL_EFORMAT,
               "%s: tensor %s is %s, expected integers", tensor->file, tensor->name, name);
    for (size_t i = 0; i < dpl_st_elems(tensor); i++) {
        uint64_t bits = 0;
        memcpy(&bits, tensor->data + i * width, width);
        const int64_t v = is_signed ? (int64_t)(bits << n_bits_unused) >> n_bits_unused
                                    : (int64_t)DPL_MIN(bits, (uint64_t)INT64_MAX);
        DPL_EXPECT(v >= low && v <= high, DPL_EFORMAT, "%s: %s[%zu] is %lld, expected %lld to %lld",
                   tensor->file, tensor->name, i, (long long)v, (long long)low, (long long)high);
        dst[i] = (int32_t)DPL_MAX(v, INT32_MIN);
    }
    return DPL_OK;
}
