// tokens.c - documents of tokens from text files, folders and token shards.
//
// A document costs 8 bytes (where it starts), however many there are: small files are copied into
// shared blocks, larger ones are mapped, and a piece is one block or one mapping. Everything that
// can be wrong with a file is found at open, so that reading cannot fail.
#include <assert.h>
#include <dirent.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "io/io.h"

#define SMALL_BYTES  ((size_t)64 << 10) // smaller files are copied: a mapping costs a page and more
#define BLOCK_BYTES  ((size_t)1 << 20)
#define MAPPINGS_MAX 32768 // half of what Linux allows a process by default
#define HEADER_BYTES 1024
#define MAGIC_U16    20240520
#define MAGIC_U32    20240801
#define VERSION_U16  1
#define VERSION_U32  7 // llm.c's own number for this magic; version 1 is read as well

typedef struct dpl_piece {
    uint64_t first; // its first token; stands first, as find_start() wants it
    const uint8_t *data;
    int width;      // bytes of a token
    dpl_map map;    // data is in here,
    uint8_t *block; // or in here: BLOCK_BYTES or one large file
    size_t block_left;
} piece;

// Makes room for one more element; the room doubles whenever it is full, at powers of two.
static dpl_status grow(void *array, size_t n, size_t size) {
    if (n & (n - 1)) return DPL_OK;
    void *old, *larger = dpl_alloc_array(n > 0 ? 2 * n : 1, size);
    if (!larger) return dpl_fail(DPL_ENOMEM, "no memory for %zu files of data", n + 1);
    memcpy(&old, array, sizeof old);
    if (n > 0) memcpy(larger, old, n * size);
    memcpy(array, &larger, sizeof larger);
    dpl_free(old);
    return DPL_OK;
}

static uint32_t load_token(const uint8_t *data, int width, size_t i) {
    uint16_t v16;
    uint32_t v32;
    if (width == 1) return data[i];
    if (width == 2) return memcpy(&v16, data + 2 * i, 2), v16;
    return memcpy(&v32, data + 4 * i, 4), v32;
}

/* ---- adding files --------------------------------------------------------------------------- */
// Finds a shard's width, unless it is given, and where its tokens start.
static dpl_status bin_layout(const char *path, const dpl_map *map, int *width, size_t *offset) {
    uint32_t head[3] = {0};
    memcpy(head, map->data, DPL_MIN(map->bytes, sizeof head));
    const bool magic = map->bytes >= HEADER_BYTES && (head[0] == MAGIC_U16 || head[0] == MAGIC_U32);
    const size_t half = *width ? map->bytes % (size_t)*width : 0;
    if (*width && magic)
        return dpl_fail(DPL_EFORMAT, "%s: byte 0: a header; leave the width out", path);
    if (half) return dpl_fail(DPL_EFORMAT, "%s: byte %zu: half a token", path, map->bytes - half);
    if (*width) return DPL_OK;
    if (!magic)
        return dpl_fail(DPL_EFORMAT, "%s: byte 0: no token header (%d or %d), and no width given",
                        path, MAGIC_U16, MAGIC_U32);
    const uint32_t version = head[0] == MAGIC_U16 ? VERSION_U16 : VERSION_U32;
    if (head[1] != version && head[1] != 1)
        return dpl_fail(DPL_EFORMAT, "%s: byte 4: version %u, expected %u", path, head[1], version);
    *width = head[0] == MAGIC_U16 ? 2 : 4;
    *offset = HEADER_BYTES;
    if (head[2] > INT32_MAX || map->bytes - HEADER_BYTES != (size_t)head[2] * (size_t)*width)
        return dpl_fail(DPL_EFORMAT, "%s: byte 8: %u tokens of %d bytes in a file of %zu bytes",
                        path, head[2], *width, map->bytes);
    return DPL_OK;
}

static piece *add_piece(dpl_source *source, int width, const uint8_t *data) {
    if (grow(&source->pieces, source->n_pieces, sizeof(piece)) != DPL_OK) return NULL;
    piece *p = &source->pieces[source->n_pieces++];
    *p = (piece){.first = source->n_tokens, .data = data, .width = width};
    return p;
}

// Copies a small file behind the last one's bytes, or into a new block. A block has one width.
static dpl_status add_copy(dpl_source *source, const uint8_t *data, size_t bytes, int width) {
    piece *last = source->n_pieces > 0 ? &source->pieces[source->n_pieces - 1] : NULL;
    if (!last || last->width != width || last->block_left < bytes) {
        const size_t block_bytes = DPL_MAX(bytes, BLOCK_BYTES);
        if (!(last = add_piece(source, width, NULL))) return DPL_ENOMEM;
        last->data = last->block = dpl_alloc(block_bytes);
        last->block_left = block_bytes;
        if (!last->block)
            return dpl_fail(DPL_ENOMEM, "no memory for a block of %zu bytes", block_bytes);
    }
    memcpy(last->block + (source->n_tokens - last->first) * (uint64_t)width, data, bytes);
    last->block_left -= bytes;
    return DPL_OK;
}

// Takes `map` over if it is kept (and empties it then).
static dpl_status add_data(dpl_source *source, const char *path, dpl_map *map) {
    int width = source->kind == DPL_SOURCE_TEXT ? 1 : source->bin_width;
    size_t offset = 0;
    if (source->kind == DPL_SOURCE_BIN && map->bytes > 0)
        DPL_TRY(bin_layout(path, map, &width, &offset));
    const uint8_t *data = map->data + offset;
    const size_t bytes = map->bytes - offset;
    if (bytes == 0) {
        if (source->n_empty++ == 0) dpl_log("note: %s is empty and skipped", path);
        return DPL_OK;
    }
    const size_t n = bytes / (size_t)width;
    const bool all_fit = width < 4 && source->vocab >= (size_t)1 << (8 * width);
    size_t bad = all_fit ? n : 0;
    while (bad < n && load_token(data, width, bad) < source->vocab) bad++;
    if (bad < n)
        return dpl_fail(DPL_EFORMAT, "%s: byte %zu: token %u, but the vocabulary has %zu", path,
                        offset + bad * (size_t)width, load_token(data, width, bad), source->vocab);
    DPL_TRY(grow(&source->documents, source->n_documents + 1, sizeof *source->documents));
    if (bytes < SMALL_BYTES || source->n_pieces >= MAPPINGS_MAX) {
        DPL_TRY(add_copy(source, data, bytes, width));
    } else {
        piece *p = add_piece(source, width, data);
        if (!p) return DPL_ENOMEM;
        p->map = *map;
        *map = (dpl_map){NULL, 0};
    }
    source->n_tokens += n;
    source->documents[++source->n_documents] = source->n_tokens;
    return DPL_OK;
}

static dpl_status add_file(dpl_source *source, const char *path) {
    dpl_map map;
    DPL_TRY(dpl_map_open(path, &map));
    const dpl_status status = add_data(source, path, &map);
    dpl_map_close(&map);
    return status;
}

/* ---- walking a folder ----------------------------------------------------------------------- */
typedef struct folder { // one that is being read
    const struct folder *parent;
    dev_t device;
    ino_t inode;
} folder;

static int is_visible(const struct dirent *entry) {
    return entry->d_name[0] != '.';
}

// Byte order, whatever the locale.
static int compare_names(const struct dirent **a, const struct dirent **b) {
    return strcmp((*a)->d_name, (*b)->d_name);
}

// Adds a file, or a folder and what is in it. `path` has room for PATH_MAX bytes and is restored.
static dpl_status add_path(dpl_source *source, char *path, const folder *parent) {
    struct stat st;
    if (stat(path, &st) != 0) return dpl_fail(DPL_EIO, "cannot read %s: %m", path);
    const size_t path_bytes = strlen(path);
    if (!S_ISDIR(st.st_mode)) {
        const bool bin = path_bytes > 4 && !strcmp(path + path_bytes - 4, ".bin");
        if (!parent || source->kind == DPL_SOURCE_TEXT || bin) return add_file(source, path);
        if (source->n_other++ == 0) dpl_log("note: %s is no .bin file and skipped", path);
        return DPL_OK;
    }
    for (const folder *f = parent; f; f = f->parent)
        if (f->device == st.st_dev && f->inode == st.st_ino)
            return dpl_fail(DPL_EIO, "%s: a link to a folder that it is in", path);
    const folder here = {parent, st.st_dev, st.st_ino};
    struct dirent **entries = NULL;
    const int n = scandir(path, &entries, is_visible, compare_names);
    if (n < 0) return dpl_fail(DPL_EIO, "cannot read the folder %s: %m", path);
    dpl_status status = DPL_OK;
    for (int i = 0; i < n; i++) {
        if (status == DPL_OK) status = dpl_path_join(path, entries[i]->d_name, path);
        if (status == DPL_OK) status = add_path(source, path, &here);
        path[path_bytes] = '\0';
        free(entries[i]);
    }
    free(entries);
    return status;
}

/* ---- the source ----------------------------------------------------------------------------- */
dpl_status dpl_source_open(const char *path, dpl_source_kind kind, int bin_width, size_t vocab,
                           dpl_source **source_out) {
    char walk[PATH_MAX];
    if (kind == DPL_SOURCE_BIN && bin_width != 0 && bin_width != 2 && bin_width != 4)
        return dpl_fail(DPL_EINVAL, "token width %d, expected 2 or 4, or 0 for the header's",
                        bin_width);
    if (vocab < 1 || vocab > INT32_MAX)
        return dpl_fail(DPL_EINVAL, "vocabulary of %zu, expected 1 to %d", vocab, INT32_MAX);
    DPL_TRY(dpl_path_join("", path, walk));
    dpl_source *source = dpl_alloc(sizeof *source);
    if (!source) return dpl_fail(DPL_ENOMEM, "no memory to open %s", path);
    *source = (dpl_source){.kind = kind, .bin_width = bin_width, .vocab = vocab};
    dpl_status status = grow(&source->documents, 0, sizeof *source->documents);
    if (status == DPL_OK) status = add_path(source, walk, NULL);
    if (status == DPL_OK && source->n_tokens == 0)
        status = dpl_fail(DPL_EFORMAT, "%s: byte 0: there is no token in it", path);
    if (source->n_empty > 1) dpl_log("note: %s: %zu files are empty", path, source->n_empty);
    if (source->n_other > 1) dpl_log("note: %s: %zu files are no .bin", path, source->n_other);
    if (status == DPL_OK) *source_out = source;
    else dpl_source_close(&source);
    return status;
}

void dpl_source_close(dpl_source **source) {
    if (!source || !*source) return;
    for (size_t i = 0; i < (*source)->n_pieces; i++) {
        dpl_map_close(&(*source)->pieces[i].map);
        dpl_free((*source)->pieces[i].block);
    }
    dpl_free((*source)->pieces);
    dpl_free((*source)->documents);
    dpl_free(*source);
    *source = NULL;
}

// The last of n elements that start at or before `token`; an element begins with its start.
static size_t find_start(const void *elements, size_t n, size_t size, uint64_t token) {
    size_t low = 0;
    for (size_t high = n; high - low > 1;) {
        const size_t middle = low + (high - low) / 2;
        uint64_t start;
        memcpy(&start, (const char *)elements + middle * size, sizeof start);
        *(start <= token ? &low : &high) = middle;
    }
    return low;
}

size_t dpl_source_document_of(const dpl_source *source, uint64_t token) {
    assert(token < source->n_tokens);
    return find_start(source->documents, source->n_documents, sizeof *source->documents, token);
}

void dpl_source_read(const dpl_source *source, uint64_t first, size_t n, int32_t *ids) {
    assert(first <= source->n_tokens && n <= source->n_tokens - first);
    size_t i = find_start(source->pieces, source->n_pieces, sizeof(piece), first);
    for (; n > 0; i++) {
        const piece *p = &source->pieces[i];
        const uint64_t end = i + 1 < source->n_pieces ? p[1].first : source->n_tokens;
        const size_t n_here = (size_t)DPL_MIN((uint64_t)n, end - first);
        const uint8_t *data = p->data + (size_t)(first - p->first) * (size_t)p->width;
        for (size_t j = 0; j < n_here; j++) ids[j] = (int32_t)load_token(data, p->width, j);
        first += n_here;
        ids += n_here;
        n -= n_here;
    }
}

dpl_status dpl_bin_write(const char *path, size_t vocab, const int32_t *ids, size_t n) {
    if (n > INT32_MAX)
        return dpl_fail(DPL_EINVAL, "%s: %zu tokens; a shard holds at most %d", path, n, INT32_MAX);
    const size_t width = vocab <= 65536 ? 2 : 4, bytes = HEADER_BYTES + n * width;
    const uint32_t header[3] = {width == 2 ? MAGIC_U16 : MAGIC_U32,
                                width == 2 ? VERSION_U16 : VERSION_U32, (uint32_t)n};
    uint8_t *file = dpl_alloc(bytes);
    if (!file) return dpl_fail(DPL_ENOMEM, "no memory to write %s", path);
    memcpy(file, header, sizeof header);
    dpl_status status = DPL_OK;
    for (size_t i = 0; i < n && status == DPL_OK; i++) {
        memcpy(file + HEADER_BYTES + i * width, &ids[i], width); // The low bytes come first.
        if (ids[i] < 0 || (size_t)ids[i] >= vocab)
            status = dpl_fail(DPL_EINVAL, "%s: token %zu is %d, but the vocabulary has %zu", path,
                              i, ids[i], vocab);
    }
    if (status == DPL_OK) status = dpl_write_file(path, file, bytes);
    dpl_free(file);
    return status;
}
