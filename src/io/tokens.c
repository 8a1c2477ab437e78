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

typedef struct dpl_piece {
    uint64_t first; // its first token; stands first, as find_start() wants it
    const uint8_t *data;
    size_t width;   // bytes of a token
    dpl_map map;    // data is in here,
    uint8_t *block; // or is this: BLOCK_BYTES or one large file
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

static uint32_t load_token(const uint8_t *data, size_t width, size_t i) {
    uint16_t v16;
    uint32_t v32;
    if (width == 1) return data[i];
    if (width == 2) return memcpy(&v16, data + 2 * i, 2), v16;
    return memcpy(&v32, data + 4 * i, 4), v32;
}

/* ---- adding files --------------------------------------------------------------------------- */
// Finds a shard's width, unless it is given, and where its tokens start.
static dpl_status bin_layout(const char *path, const dpl_map *map, size_t *width, size_t *offset) {
    uint32_t head[3] = {0}; // magic, version, number of tokens
    memcpy(head, map->data, DPL_MIN(map->bytes, sizeof head));
    const bool magic = map->bytes >= HEADER_BYTES && (head[0] == MAGIC_U16 || head[0] == MAGIC_U32);
    if (*width) {
        const size_t half = map->bytes % *width;
        DPL_EXPECT(!magic, DPL_EFORMAT, "%s: byte 0: a header; leave the width out", path);
        DPL_EXPECT(!half, DPL_EFORMAT, "%s: byte %zu: half a token", path, map->bytes - half);
        return DPL_OK;
    }
    DPL_EXPECT(magic, DPL_EFORMAT, "%s: byte 0: no token header (%d or %d), and no width given",
               path, MAGIC_U16, MAGIC_U32);
    // Version 7 is llm.c's own for the wide tokens; version 1 is read as well.
    const uint32_t version = head[0] == MAGIC_U16 ? 1 : 7;
    DPL_EXPECT(head[1] == version || head[1] == 1, DPL_EFORMAT,
               "%s: byte 4: version %u, expected %u", path, head[1], version);
    *width = head[0] == MAGIC_U16 ? 2 : 4;
    *offset = HEADER_BYTES;
    DPL_EXPECT(head[2] <= INT32_MAX && map->bytes - HEADER_BYTES == head[2] * *width, DPL_EFORMAT,
               "%s: byte 8: %u tokens of %zu bytes in a file of %zu bytes", path, head[2], *width,
               map->bytes);
    return DPL_OK;
}

// Keeps a file's tokens: copies a small file behind the last one's, or into a new block, and takes
// the map of a larger one over (and empties it).
static dpl_status keep(dpl_source *source, const uint8_t *data, size_t bytes, size_t width,
                       dpl_map *map) {
    const bool copy = bytes < SMALL_BYTES || source->n_pieces >= MAPPINGS_MAX;
    piece *p = source->n_pieces > 0 ? &source->pieces[source->n_pieces - 1] : NULL;
    const bool room = copy && p && p->block && p->width == width &&
                      (source->n_tokens - p->first) * width + bytes <= BLOCK_BYTES;
    if (!room) {
        DPL_TRY(grow(&source->pieces, source->n_pieces, sizeof(piece)));
        p = &source->pieces[source->n_pieces];
        *p = (piece){.first = source->n_tokens, .data = data, .width = width};
        if (copy) {
            p->data = p->block = dpl_alloc(DPL_MAX(bytes, BLOCK_BYTES));
            DPL_EXPECT(p->block, DPL_ENOMEM, "no memory for a block of %zu bytes", bytes);
        } else {
            p->map = *map;
            *map = (dpl_map){NULL, 0};
        }
        source->n_pieces++;
    }
    if (copy) memcpy(p->block + (source->n_tokens - p->first) * width, data, bytes);
    return DPL_OK;
}

static dpl_status add_data(dpl_source *source, const char *path, dpl_map *map) {
    size_t width = (size_t)source->token_bytes, offset = 0;
    if (width != 1 && map->bytes > 0) DPL_TRY(bin_layout(path, map, &width, &offset));
    const uint8_t *data = map->data + offset;
    const size_t bytes = map->bytes - offset;
    if (bytes == 0) {
        if (source->n_empty++ == 0) dpl_log("note: %s is empty and skipped", path);
        return DPL_OK;
    }
    const size_t n = bytes / width;
    const bool all_fit = width < 4 && source->vocab >= (size_t)1 << (8 * width);
    size_t good = all_fit ? n : 0;
    while (good < n && load_token(data, width, good) < source->vocab) good++;
    DPL_EXPECT(good == n, DPL_EFORMAT, "%s: byte %zu: token %u, but the vocabulary has %zu", path,
               offset + good * width, load_token(data, width, good), source->vocab);
    DPL_TRY(grow(&source->documents, source->n_documents + 1, sizeof *source->documents));
    DPL_TRY(keep(source, data, bytes, width, map));
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
        if (!parent || source->token_bytes == 1 || bin) return add_file(source, path);
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
dpl_status dpl_source_open(const char *path, int token_bytes, size_t vocab,
                           dpl_source **source_out) {
    char walk[PATH_MAX];
    DPL_CHECK(token_bytes >= 0 && token_bytes <= 4 && token_bytes != 3,
              "token width %d, expected 2 or 4, or 0 for the header's", token_bytes);
    DPL_CHECK(vocab >= 1 && vocab <= INT32_MAX, "vocabulary of %zu, expected 1 to %d", vocab,
              INT32_MAX);
    DPL_TRY(dpl_path_join("", path, walk));
    dpl_source *source = dpl_alloc(sizeof *source);
    if (!source) return dpl_fail(DPL_ENOMEM, "no memory to open %s", path);
    *source = (dpl_source){.token_bytes = token_bytes, .vocab = vocab};
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
        const uint8_t *data = p->data + (first - p->first) * p->width;
        for (size_t j = 0; j < n_here; j++) ids[j] = (int32_t)load_token(data, p->width, j);
        first += n_here;
        ids += n_here;
        n -= n_here;
    }
}
