// io.h - files: all-or-nothing writing, JSON and YAML, safetensors, model directories, tokens.
//
// Every reader treats its file as hostile: bounds, overflow, duplicates and missing names are
// errors (DPL_EFORMAT) with the file's name and the byte offset, DPL_EIO where the system refused.
// Sizes are checked when a file is opened; reading one that is cut short later crashes.
#pragma once

#include <jansson.h>
#include <limits.h>
#include <stdio.h>

#include "base/base.h"

/* ---- files (file.c) -------------------------------------------------------------------------- */
typedef struct dpl_map { // a whole file, mapped read-only; an empty one: "" and 0 bytes
    const uint8_t *data;
    size_t bytes;
} dpl_map;
dpl_status dpl_map_open(const char *path, dpl_map *map_out);
void dpl_map_close(dpl_map *map);

bool dpl_path_exists(const char *path);
bool dpl_path_is_dir(const char *path);
dpl_status dpl_make_dirs(const char *path); // like mkdir -p
dpl_status dpl_remove_tree(const char *path);
// "DIR/NAME" into out, which holds PATH_MAX bytes and may be dir. Longer paths are errors anywhere.
dpl_status dpl_path_join(const char *dir, const char *name, char *out);

// A file or a folder that appears under its name when it is closed, synced, or not at all. Until
// then it is "DIR/.NAME.tmp".
typedef struct dpl_out {
    char path[PATH_MAX], dir[PATH_MAX], temp[PATH_MAX];
    int fd;             // -1: a folder, to be filled at temp
    size_t dirty_bytes; // written since the system was last asked to put them on the disk
} dpl_out;
dpl_status dpl_out_open(const char *path, dpl_out *out);
dpl_status dpl_out_open_dir(const char *path, dpl_out *out); // makes the folders above it too
dpl_status dpl_out_write(dpl_out *out, const void *data, size_t bytes);
// Puts it into its place, where a folder is swapped with what is there (DPL_ENOSUP: the file system
// cannot); removes it if that fails, or if `status` says that filling it has. Returns that failure.
dpl_status dpl_out_close(dpl_out *out, dpl_status status);
dpl_status dpl_write_file(const char *path, const void *data, size_t bytes); // all that at once
// Tests: the n-th write (halfway), sync or rename from now fails with ENOSPC, once (0: off).
void dpl_fault_write(size_t nth);

/* ---- JSON, YAML (text_formats.c) ------------------------------------------------------------- */
// Reads a JSON object, duplicate keys refused. Owned by the caller: json_decref().
dpl_status dpl_json_read(const char *path, json_t **object_out);
// All or nothing; numbers round-trip, keys keep their order.
dpl_status dpl_json_write(const char *path, const json_t *object);

// A flat YAML mapping (what MaxText's configurations are). Calls fn for each key in file order with
// the scalar's text; a sequence comes as its JSON text (["silu", "linear"]), null and "" as "".
// Nested mappings, anchors, tags, duplicate keys and several documents are errors with file and
// line, which are put before the text of a failing fn too.
typedef dpl_status (*dpl_yaml_fn)(void *arg, const char *key, const char *value, int line);
dpl_status dpl_yaml_read(const char *path, dpl_yaml_fn fn, void *arg);

// Numbers in any locale, whole string or nothing, finite. 1_000 and 0x10 are integers and floats
// (YAML 1.1 habits), 2e-5 is a float; 010 is no integer: 8 to some readers and 10 to others.
dpl_status dpl_parse_f64(const char *text, double *value_out);
dpl_status dpl_parse_i64(const char *text, int64_t *value_out);

/* ---- safetensors (st_read.c, st_write.c) ----------------------------------------------------- */
// clang-format off
#define DPL_ST_DTYPE_MAP(X) \
    X(BOOL, 1) X(U8, 1) X(I8, 1) X(F8_E5M2, 1) X(F8_E4M3, 1) X(F8_E8M0, 1) X(I16, 2) X(U16, 2) \
    X(F16, 2) X(BF16, 2) X(I32, 4) X(U32, 4) X(F32, 4) X(F64, 8) X(I64, 8) X(U64, 8)
// clang-format on
typedef enum dpl_st_dtype {
#define DPL_ST_ENUM(id, bytes) DPL_ST_##id,
    DPL_ST_DTYPE_MAP(DPL_ST_ENUM)
#undef DPL_ST_ENUM
        DPL_ST_N
} dpl_st_dtype;
const char *dpl_st_dtype_name(dpl_st_dtype dtype); // "F32"
size_t dpl_st_dtype_bytes(dpl_st_dtype dtype);

#define DPL_ST_RANK_MAX   8
#define DPL_ST_HEADER_MAX ((uint64_t)100000000) // bytes
#define DPL_ST_SINGLE     "model.safetensors"
#define DPL_ST_INDEX      DPL_ST_SINGLE ".index.json"
typedef struct dpl_st_tensor {
    const char *name, *file; // owned by the reader; the writer's caller owns the name, has no file
    dpl_st_dtype dtype;
    int rank;
    int64_t shape[DPL_ST_RANK_MAX];
    const uint8_t *data; // reader: in the mapping
    uint64_t bytes;
} dpl_st_tensor;
size_t dpl_st_elems(const dpl_st_tensor *tensor);
// product(shape) * dtype. False: dtype or shape is not valid, or the size exceeds 63 bits.
bool dpl_st_shape_bytes(const dpl_st_tensor *tensor, uint64_t *bytes_out);

// One file, or the weights of a model directory: model.safetensors (which wins if both are there),
// or model.safetensors.index.json and the shards that it names; other shards are ignored. In the
// same way NAME.safetensors stands for NAME.safetensors.index.json where there is no such file.
typedef struct dpl_st_file {
    char path[PATH_MAX], index_path[PATH_MAX];
    size_t n_tensors;
    dpl_st_tensor *tensors; // sorted by name
    struct dpl_st_part *parts;
    json_t *index, *weight_map; // NULL: there is one file; the map is in the index
} dpl_st_file;
// Checks everything: header size (< 100 MB and inside the file), UTF-8, JSON, duplicates, dtype,
// shape overflow, offsets inside the file, no overlap, no hole, size = product(shape) * dtype. A
// shard missing on disk, a name absent from its shard, or a tensor in a shard that the index does
// not name is an error.
dpl_status dpl_st_open(const char *path, dpl_st_file **file_out);
void dpl_st_close(dpl_st_file **file);
const dpl_st_tensor *dpl_st_find(const dpl_st_file *file, const char *name); // NULL: none
// All elements, from F64, F32, F16, BF16; and from any integer dtype, where each must be low ..
// high (what lies below 32 bits becomes INT32_MIN). Other dtypes are errors.
dpl_status dpl_st_read_f32(const dpl_st_tensor *tensor, float *dst);
dpl_status dpl_st_read_i32(const dpl_st_tensor *tensor, int64_t low, int64_t high, int32_t *dst);

// The bytes of tensor i, as many as its dtype and shape say; they may be gone with the next call.
typedef const void *(*dpl_data_fn)(void *arg, size_t i_tensor);
// Writes what dpl_st_open reads: one file or, in a folder, model.safetensors, or shards of at most
// shard_bytes (0: no limit; a larger tensor has a shard of its own) and an index. Shards that an
// earlier call left there under other names stay, and nobody reads them. Wider dtypes come first,
// so that every tensor is aligned in its file, else the order stays. data_of NULL: the tensors' own
// `data`.
dpl_status dpl_st_write(const char *path, const dpl_st_tensor *tensors, size_t n_tensors,
                        dpl_data_fn data_of, void *arg);
dpl_status dpl_st_write_dir(const char *dir, const dpl_st_tensor *tensors, size_t n_tensors,
                            size_t shard_bytes, dpl_data_fn data_of, void *arg);

// Of NAME.safetensors in n_parts files: the path of part i, of their index; and writing that, when
// the parts are there, from the tensors of all parts, and the part of each.
dpl_status dpl_st_part_path(const char *path, size_t i, size_t n_parts, char *out);
dpl_status dpl_st_index_path(const char *path, char *out);
dpl_status dpl_st_write_index(const char *path, const dpl_st_tensor *tensors, size_t n_tensors,
                              const size_t *part_of, size_t n_parts);

/* ---- text and tokens (tokens.c) -------------------------------------------------------------- */
// Documents of tokens one after the other, each a file: text (UTF-8 bytes as tokens; nothing is
// dropped or replaced), or token shards: llm.c's header (256 int32: magic 20240520 and version 1:
// uint16, or magic 20240801 and version 7 or 1: uint32; then the token count), or headerless with
// the width given. A folder stands for its files, sorted by name, recursively; hidden ones are
// skipped, as are other names than *.bin where shards are wanted.
typedef struct dpl_source {
    uint64_t n_tokens;
    size_t n_documents;
    uint64_t *documents; // the first token of each; one more: n_tokens
    int token_bytes;
    size_t vocab;
    struct dpl_piece *pieces;
    size_t n_pieces, n_empty, n_other; // n_other: files of a folder that are no shards
} dpl_source;
// token_bytes: 1: text; 2, 4: shards without a header; 0: shards whose header decides. A token >=
// vocab is an error at open. Empty files are skipped with a notice; a source without any token is
// an error.
dpl_status dpl_source_open(const char *path, int token_bytes, size_t vocab,
                           dpl_source **source_out);
void dpl_source_close(dpl_source **source);
// The document of a token.
size_t dpl_source_document_of(const dpl_source *source, uint64_t token);
void dpl_source_read(const dpl_source *source, uint64_t first, size_t n, int32_t *ids);
