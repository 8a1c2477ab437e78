/*
 * safetensors.c - reading and writing one safetensors file.
 *
 * A file is the header's length (8 bytes), the header (JSON: name -> dtype, shape, data_offsets)
 * and the data. The whole header is checked at open, against the file's size too, so that a tensor
 * that was found needs no further check. Data may lie at odd addresses, hence memcpy everywhere.
 */
#include <stdlib.h>

#include "io/io.h"

#define HEADER_BYTES_MAX ((uint64_t)100000000)

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "files are read as they lie in memory");

struct dpl_st_file {
    char *path;
    dpl_map map;
    dpl_st_tensor *tensors;        // in file order
    const dpl_st_tensor **by_name; // sorted
    size_t n_tensors;
    char *names; // one block, each name NUL-terminated
    json_t *metadata;
};

static const struct {
    const char *name;
    size_t bytes;
} dtypes[DPL_ST_N] = {
    [DPL_ST_BOOL] = {"BOOL", 1},       [DPL_ST_U8] = {"U8", 1},
    [DPL_ST_I8] = {"I8", 1},           [DPL_ST_F8_E5M2] = {"F8_E5M2", 1},
    [DPL_ST_F8_E4M3] = {"F8_E4M3", 1}, [DPL_ST_F8_E8M0] = {"F8_E8M0", 1},
    [DPL_ST_I16] = {"I16", 2},         [DPL_ST_U16] = {"U16", 2},
    [DPL_ST_F16] = {"F16", 2},         [DPL_ST_BF16] = {"BF16", 2},
    [DPL_ST_I32] = {"I32", 4},         [DPL_ST_U32] = {"U32", 4},
    [DPL_ST_F32] = {"F32", 4},         [DPL_ST_F64] = {"F64", 8},
    [DPL_ST_I64] = {"I64", 8},         [DPL_ST_U64] = {"U64", 8},
};

const char *dpl_st_dtype_name(dpl_st_dtype dtype)
{
    return dtypes[dtype].name;
}

size_t dpl_st_dtype_bytes(dpl_st_dtype dtype)
{
    return dtypes[dtype].bytes;
}

size_t dpl_st_elems(const dpl_st_tensor *tensor)
{
    size_t n = 1;
    for (int i = 0; i < tensor->rank; i++)
        n *= (size_t)tensor->shape[i];
    return n;
}

// product(shape) * dtype; false if it does not fit in 63 bits.
static bool shape_bytes(const dpl_st_tensor *tensor, uint64_t *bytes_out)
{
    uint64_t bytes = dtypes[tensor->dtype].bytes;
    for (int i = 0; i < tensor->rank; i++)
        if (__builtin_mul_overflow(bytes, (uint64_t)tensor->shape[i], &bytes) || bytes > INT64_MAX)
            return false;
    *bytes_out = bytes;
    return true;
}

/* ---- the header ----------------------------------------------------------------------------- */

// The byte of the file at which a tensor's entry starts; the header's start for an escaped name.
static size_t entry_offset(const dpl_st_file *file, size_t header_bytes, const char *name)
{
    const size_t name_bytes = strlen(name);
    const uint8_t *at = file->map.data + 8, *end = at + header_bytes;
    while (name_bytes > 0 && (at = memmem(at, (size_t)(end - at), name, name_bytes))) {
        if (at[-1] == '"' && at + name_bytes < end && at[name_bytes] == '"')
            return (size_t)(at - 1 - file->map.data);
        at++;
    }
    return 8;
}

// Fills `tensor`, whose name is set, from its entry. Returns what is wrong, or NULL.
static const char *parse_tensor(const json_t *entry, uint64_t data_bytes, dpl_st_tensor *tensor,
                                uint64_t *begin_out)
{
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    const json_t *shape = json_object_get(entry, "shape");
    const json_t *offsets = json_object_get(entry, "data_offsets");
    if (!dtype) return "no dtype";
    int i_dtype = 0;
    while (i_dtype < DPL_ST_N && strcmp(dtypes[i_dtype].name, dtype))
        i_dtype++;
    if (i_dtype == DPL_ST_N) return "an unknown dtype";
    tensor->dtype = (dpl_st_dtype)i_dtype;

    if (!json_is_array(shape)) return "no shape";
    if (json_array_size(shape) > DPL_ST_RANK_MAX) return "too many dimensions";
    tensor->rank = (int)json_array_size(shape);
    for (int i = 0; i < tensor->rank; i++) {
        const json_t *size = json_array_get(shape, (size_t)i);
        if (!json_is_integer(size) || json_integer_value(size) < 0)
            return "a dimension that is not a count";
        tensor->shape[i] = json_integer_value(size);
    }
    if (!shape_bytes(tensor, &tensor->bytes)) return "a shape whose size overflows";

    const json_t *begin = json_array_get(offsets, 0), *end = json_array_get(offsets, 1);
    if (json_array_size(offsets) != 2 || !json_is_integer(begin) || !json_is_integer(end) ||
        json_integer_value(begin) < 0)
        return "no data_offsets of the form [begin, end]";
    const json_int_t first = json_integer_value(begin), last = json_integer_value(end);
    if (first > last) return "data_offsets that run backwards";
    if ((uint64_t)last > data_bytes) return "data beyond the end of the file";
    *begin_out = (uint64_t)first;
    if ((uint64_t)(last - first) != tensor->bytes)
        return "data_offsets that do not match dtype and shape";
    return NULL;
}

static int by_data(const void *a, const void *b)
{
    const dpl_st_tensor *x = a, *y = b;
    if (x->data != y->data) return x->data < y->data ? -1 : 1;
    // Tensors without elements may share a place; they come before what is there.
    return x->bytes != y->bytes ? (x->bytes < y->bytes ? -1 : 1) : strcmp(x->name, y->name);
}

static int by_name(const void *a, const void *b)
{
    return strcmp((*(const dpl_st_tensor *const *)a)->name,
                  (*(const dpl_st_tensor *const *)b)->name);
}

// Sorts the tensors by place; each must start where the one before it ended, the last at the end.
static dpl_status check_layout(dpl_st_file *file)
{
    qsort(file->tensors, file->n_tensors, sizeof *file->tensors, by_data);
    uint64_t header_bytes;
    memcpy(&header_bytes, file->map.data, 8);
    const uint8_t *expected = file->map.data + 8 + header_bytes;
    for (size_t i = 0; i < file->n_tensors; i++) {
        const dpl_st_tensor *tensor = &file->tensors[i];
        if (tensor->data != expected)
            return dpl_fail(DPL_EFORMAT, "%s: byte %zu: tensor %s %s", file->path,
                            (size_t)(tensor->data - file->map.data), tensor->name,
                            tensor->data < expected ? "overlaps the one before it"
                                                    : "has a hole before it");
        expected = tensor->data + tensor->bytes;
        file->by_name[i] = tensor;
    }
    if (expected != file->map.data + file->map.bytes)
        return dpl_fail(DPL_EFORMAT, "%s: byte %zu: %zu bytes that belong to no tensor", file->path,
                        (size_t)(expected - file->map.data),
                        (size_t)(file->map.data + file->map.bytes - expected));
    qsort(file->by_name, file->n_tensors, sizeof *file->by_name, by_name);
    return DPL_OK;
}

static dpl_status take_metadata(dpl_st_file *file, size_t header_bytes, json_t *metadata)
{
    const char *key;
    json_t *value;
    bool good = json_is_object(metadata);
    if (good) json_object_foreach(metadata, key, value) good = good && json_is_string(value);
    if (!good)
        return dpl_fail(DPL_EFORMAT, "%s: byte %zu: __metadata__ is not a map of strings",
                        file->path, entry_offset(file, header_bytes, "__metadata__"));
    file->metadata = json_incref(metadata);
    return DPL_OK;
}

static dpl_status take_tensors(dpl_st_file *file, size_t header_bytes, json_t *header)
{
    const char *name;
    json_t *entry;
    size_t names_bytes = 0;
    json_object_foreach(header, name, entry) names_bytes += strlen(name) + 1;
    const size_t n_max = json_object_size(header);
    file->names = dpl_alloc(names_bytes);
    file->tensors = dpl_alloc_array(n_max, sizeof *file->tensors);
    file->by_name = dpl_alloc_array(n_max, sizeof *file->by_name);
    if (!file->names || !file->tensors || !file->by_name)
        return dpl_fail(DPL_ENOMEM, "no memory for the header of %s", file->path);
    char *copy = file->names;
    json_object_foreach(header, name, entry)
    {
        if (!strcmp(name, "__metadata__")) {
            DPL_TRY(take_metadata(file, header_bytes, entry));
            continue;
        }
        dpl_st_tensor *tensor = &file->tensors[file->n_tensors++];
        uint64_t begin = 0;
        const char *wrong = parse_tensor(entry, file->map.bytes - 8 - header_bytes, tensor, &begin);
        if (wrong)
            return dpl_fail(DPL_EFORMAT, "%s: byte %zu: tensor %.200s has %s", file->path,
                            entry_offset(file, header_bytes, name), name, wrong);
        tensor->data = file->map.data + 8 + header_bytes + begin;
        tensor->name = strcpy(copy, name);
        copy += strlen(copy) + 1;
    }
    return DPL_OK;
}

static dpl_status read_header(dpl_st_file *file)
{
    uint64_t bytes;
    if (file->map.bytes < 8)
        return dpl_fail(DPL_EFORMAT, "%s: byte 0: %zu bytes are too few for a safetensors file",
                        file->path, file->map.bytes);
    memcpy(&bytes, file->map.data, 8);
    if (bytes > HEADER_BYTES_MAX || bytes > file->map.bytes - 8 || bytes < 2)
        return dpl_fail(DPL_EFORMAT,
                        "%s: byte 0: a header of %llu bytes in a file of %zu; not a "
                        "whole safetensors file",
                        file->path, (unsigned long long)bytes, file->map.bytes);
    if (file->map.data[8] != '{')
        return dpl_fail(DPL_EFORMAT, "%s: byte 8: the header does not start with '{'", file->path);
    json_error_t error;
    json_t *header = json_loadb((const char *)file->map.data + 8, (size_t)bytes,
                                JSON_REJECT_DUPLICATES, &error);
    if (!header)
        return dpl_fail(DPL_EFORMAT, "%s: byte %d: header: %s", file->path, 8 + error.position,
                        error.text);
    const dpl_status status = take_tensors(file, (size_t)bytes, header);
    json_decref(header);
    return status == DPL_OK ? check_layout(file) : status;
}

/* ---- the reader ----------------------------------------------------------------------------- */

dpl_status dpl_st_open(const char *path, dpl_st_file **file_out)
{
    dpl_st_file *file = dpl_alloc(sizeof *file);
    if (!file || !(file->path = dpl_strdup(path))) {
        dpl_free(file);
        return dpl_fail(DPL_ENOMEM, "no memory to open %s", path);
    }
    dpl_status status = dpl_map_open(path, &file->map);
    if (status == DPL_OK) status = read_header(file);
    if (status == DPL_OK)
        *file_out = file;
    else
        dpl_st_close(&file);
    return status;
}

void dpl_st_close(dpl_st_file **file)
{
    if (!file || !*file) return;
    dpl_map_close(&(*file)->map);
    json_decref((*file)->metadata);
    dpl_free((*file)->by_name);
    dpl_free((*file)->tensors);
    dpl_free((*file)->names);
    dpl_free((*file)->path);
    dpl_free(*file);
    *file = NULL;
}

size_t dpl_st_count(const dpl_st_file *file)
{
    return file->n_tensors;
}

const dpl_st_tensor *dpl_st_at(const dpl_st_file *file, size_t i)
{
    return &file->tensors[i];
}

const dpl_st_tensor *dpl_st_find(const dpl_st_file *file, const char *name)
{
    const dpl_st_tensor key = {.name = name}, *p_key = &key;
    const dpl_st_tensor **found = bsearch(&p_key, file->by_name, file->n_tensors,
                                          sizeof *file->by_name, by_name);
    return found ? *found : NULL;
}

const char *dpl_st_path(const dpl_st_file *file)
{
    return file->path;
}

const char *dpl_st_metadata(const dpl_st_file *file, const char *key)
{
    return json_string_value(json_object_get(file->metadata, key));
}

static float f16_to_f32(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    const uint32_t exponent = (half >> 10) & 31u, mantissa = half & 1023u;
    uint32_t bits = sign | ((exponent + 112u) << 23) | (mantissa << 13);
    if (exponent == 31) bits = sign | 0x7f800000u | (mantissa << 13);
    float f;
    memcpy(&f, &bits, 4);
    if (exponent > 0) return f;
    f = (float)mantissa * 0x1p-24f; // Subnormal: exact, because fp32 reaches further down.
    return sign ? -f : f;
}

static dpl_status check_range(const dpl_st_tensor *tensor, size_t first, size_t n)
{
    const size_t n_elems = dpl_st_elems(tensor);
    if (first <= n_elems && n <= n_elems - first) return DPL_OK;
    return dpl_fail(DPL_EINVAL, "tensor %s has %zu elements, not %zu from %zu on", tensor->name,
                    n_elems, n, first);
}

// One element of a tensor by its index, whatever the address.
#define LOAD(type, i) \
    type v;           \
    memcpy(&v, tensor->data + (first + (i)) * sizeof(type), sizeof v)
#define CONVERT(id, type, expression)    \
    case DPL_ST_##id:                    \
        for (size_t i = 0; i < n; i++) { \
            LOAD(type, i);               \
            dst[i] = (expression);       \
        }                                \
        return DPL_OK;

dpl_status dpl_st_read_f32(const dpl_st_tensor *tensor, size_t first, size_t n, float *dst)
{
    DPL_TRY(check_range(tensor, first, n));
    switch (tensor->dtype) {
        CONVERT(F64, double, (float)v)
        CONVERT(F32, float, v)
        CONVERT(F16, uint16_t, f16_to_f32(v))
        CONVERT(BF16, uint16_t, dpl_bf16_to_f32(v))
    default:
        return dpl_fail(DPL_EFORMAT, "tensor %s is %s, expected F32, BF16, F16 or F64",
                        tensor->name, dpl_st_dtype_name(tensor->dtype));
    }
}

dpl_status dpl_st_read_i64(const dpl_st_tensor *tensor, size_t first, size_t n, int64_t *dst)
{
    DPL_TRY(check_range(tensor, first, n));
    switch (tensor->dtype) {
        CONVERT(BOOL, uint8_t, v)
        CONVERT(U8, uint8_t, v)
        CONVERT(I8, int8_t, v)
        CONVERT(U16, uint16_t, v)
        CONVERT(I16, int16_t, v)
        CONVERT(U32, uint32_t, v)
        CONVERT(I32, int32_t, v)
        CONVERT(I64, int64_t, v)
    case DPL_ST_U64:
        for (size_t i = 0; i < n; i++) {
            LOAD(uint64_t, i);
            if (v > INT64_MAX)
                return dpl_fail(DPL_EFORMAT, "tensor %s: element %zu does not fit in 63 bits",
                                tensor->name, first + i);
            dst[i] = (int64_t)v;
        }
        return DPL_OK;
    default:
        return dpl_fail(DPL_EFORMAT, "tensor %s is %s, expected integers", tensor->name,
                        dpl_st_dtype_name(tensor->dtype));
    }
}

/* ---- the writer ----------------------------------------------------------------------------- */

struct dpl_st_writer {
    dpl_out out;
    uint64_t data_bytes, written;
    bool failed;
};

static json_t *tensor_entry(const dpl_st_tensor *tensor, uint64_t begin, uint64_t bytes)
{
    json_t *shape = json_array();
    for (int i = 0; shape && i < tensor->rank; i++)
        json_array_append_new(shape, json_integer(tensor->shape[i]));
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", dpl_st_dtype_name(tensor->dtype), "shape",
                     shape, "data_offsets", (json_int_t)begin, (json_int_t)(begin + bytes));
}

static dpl_status add_tensor(const char *path, json_t *header, const dpl_st_tensor *tensor,
                             uint64_t *end)
{
    uint64_t bytes, sum;
    bool good = (unsigned)tensor->dtype < DPL_ST_N && tensor->rank >= 0 &&
                tensor->rank <= DPL_ST_RANK_MAX;
    for (int i = 0; good && i < tensor->rank; i++)
        good = tensor->shape[i] >= 0;
    if (!good || !shape_bytes(tensor, &bytes) || __builtin_add_overflow(*end, bytes, &sum) ||
        sum > INT64_MAX)
        return dpl_fail(DPL_EINVAL, "%s: tensor %s has no valid dtype and shape", path,
                        tensor->name);
    if (!strcmp(tensor->name, "__metadata__") || json_object_get(header, tensor->name))
        return dpl_fail(DPL_EINVAL, "%s: the name %s is taken", path, tensor->name);
    if (json_object_set_new(header, tensor->name, tensor_entry(tensor, *end, bytes)) != 0)
        return dpl_fail(DPL_EINVAL, "%s: the name %s is not UTF-8", path, tensor->name);
    *end = sum;
    return DPL_OK;
}

static dpl_status make_header(const char *path, const dpl_st_tensor *tensors, size_t n_tensors,
                              const char *const *metadata, json_t *header, uint64_t *data_bytes)
{
    if (metadata) {
        json_t *map = json_object();
        int rc = json_object_set_new(header, "__metadata__", map);
        for (; rc == 0 && metadata[0]; metadata += 2)
            rc = json_object_set_new(map, metadata[0], json_string(metadata[1]));
        if (rc != 0) return dpl_fail(DPL_EINVAL, "%s: metadata that are not UTF-8", path);
    }
    for (size_t i = 0; i < n_tensors; i++)
        DPL_TRY(add_tensor(path, header, &tensors[i], data_bytes));
    return DPL_OK;
}

// The data start at a multiple of 8, as the format asks; spaces fill the header up.
static dpl_status write_header(dpl_out *out, const json_t *header)
{
    static const char spaces[] = "       ";
    char *text = json_dumps(header, JSON_COMPACT);
    if (!text) return dpl_fail(DPL_ENOMEM, "no memory for the header of %s", out->path);
    const size_t text_bytes = strlen(text);
    const uint64_t bytes = dpl_round_up(text_bytes, 8);
    dpl_status status = DPL_OK;
    if (bytes > HEADER_BYTES_MAX)
        status = dpl_fail(DPL_EINVAL, "%s: a header of %zu bytes is too long; write shards",
                          out->path, (size_t)bytes);
    if (status == DPL_OK) status = dpl_out_write(out, &bytes, 8);
    if (status == DPL_OK) status = dpl_out_write(out, text, text_bytes);
    if (status == DPL_OK) status = dpl_out_write(out, spaces, (size_t)bytes - text_bytes);
    free(text);
    return status;
}

dpl_status dpl_st_create(const char *path, const dpl_st_tensor *tensors, size_t n_tensors,
                         const char *const *metadata, dpl_st_writer **writer_out)
{
    dpl_st_writer *writer = dpl_alloc(sizeof *writer);
    json_t *header = json_object();
    dpl_status status = DPL_OK;
    if (writer) writer->out.fd = -1;
    if (!writer || !header) {
        status = dpl_fail(DPL_ENOMEM, "no memory to write %s", path);
    } else {
        status = make_header(path, tensors, n_tensors, metadata, header, &writer->data_bytes);
    }
    if (status == DPL_OK) status = dpl_out_open(path, &writer->out);
    if (status == DPL_OK) status = write_header(&writer->out, header);
    json_decref(header);
    if (status == DPL_OK)
        *writer_out = writer;
    else
        dpl_st_abandon(&writer);
    return status;
}

dpl_status dpl_st_append(dpl_st_writer *writer, const void *data, size_t bytes)
{
    dpl_status status;
    if (bytes > writer->data_bytes - writer->written)
        status = dpl_fail(DPL_EINVAL, "%s: more than the %llu bytes that its tensors have",
                          writer->out.path, (unsigned long long)writer->data_bytes);
    else
        status = dpl_out_write(&writer->out, data, bytes);
    if (status == DPL_OK)
        writer->written += bytes;
    else
        writer->failed = true;
    return status;
}

uint64_t dpl_st_appended(const dpl_st_writer *writer)
{
    return writer->written;
}

dpl_status dpl_st_finish(dpl_st_writer **writer)
{
    dpl_st_writer *w = *writer;
    dpl_status status = DPL_OK;
    if (w->failed || w->written != w->data_bytes)
        status = dpl_fail(DPL_EINVAL, "%s: %llu of %llu bytes were written", w->out.path,
                          (unsigned long long)w->written, (unsigned long long)w->data_bytes);
    else
        status = dpl_out_commit(&w->out);
    dpl_st_abandon(writer);
    return status;
}

void dpl_st_abandon(dpl_st_writer **writer)
{
    if (!writer || !*writer) return;
    dpl_out_abandon(&(*writer)->out);
    dpl_free(*writer);
    *writer = NULL;
}
