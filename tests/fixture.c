// fixture.c - see fixture.h.
#include "fixture.h"

#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void die(const char *what, const char *where) {
    fprintf(stderr, "fixture: %s: %s\n", what, where);
    abort();
}

static void *allocate(size_t bytes) {
    void *p = calloc(1, bytes ? bytes : 1);
    if (!p) die("out of memory", "");
    return p;
}

const char *fixture_root(void) {
    static char root[4096];
    if (root[0]) return root;
    const char *shared = getenv("DPL_SHARED");
#ifdef DPL_SHARED_DIR
    if (!shared) shared = DPL_SHARED_DIR;
#endif
    snprintf(root, sizeof root, "%s/fixtures", shared ? shared : "../shared");
    if (access(root, R_OK) == 0) return root;
    fprintf(stderr, "SKIPPED: no reference files at %s (set DPL_SHARED)\n", root);
    root[0] = 0;
    return NULL;
}

const char *fixture_path(const char *format, ...) {
    static char ring[8][4096];
    static int turn;
    char *path = ring[turn++ % 8], tail[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(tail, sizeof tail, format, args);
    va_end(args);
    if (snprintf(path, sizeof ring[0], "%s/%s", fixture_root(), tail) >= (int)sizeof ring[0]) {
        die("path too long", tail);
    }
    return path;
}

static unsigned char *read_file(const char *path, size_t *bytes_out) {
    FILE *file = fopen(path, "rb");
    if (!file) return NULL;
    fseek(file, 0, SEEK_END);
    const long bytes = ftell(file);
    rewind(file);
    if (bytes < 0) die("not a regular file", path);
    unsigned char *data = allocate((size_t)bytes);
    if (fread(data, 1, (size_t)bytes, file) != (size_t)bytes) die("cannot read", path);
    fclose(file);
    *bytes_out = (size_t)bytes;
    return data;
}

static void add_tensor(fixture *f, const char *name, json_t *entry, const unsigned char *data,
                       size_t bytes) {
    f->at = realloc(f->at, (size_t)(f->n + 1) * sizeof *f->at);
    if (!f->at) die("out of memory", name);
    fixture_tensor *t = &f->at[f->n++];
    *t = (fixture_tensor){.n = 1};
    t->name = strdup(name);
    snprintf(t->dtype, sizeof t->dtype, "%s", json_string_value(json_object_get(entry, "dtype")));
    json_t *shape = json_object_get(entry, "shape");
    json_t *range = json_object_get(entry, "data_offsets");
    t->n_dims = (int)json_array_size(shape);
    if (t->n_dims > 8) die("too many dimensions", name);
    for (int i = 0; i < t->n_dims; i++) {
        t->shape[i] = (int)json_integer_value(json_array_get(shape, (size_t)i));
        t->n *= (size_t)t->shape[i];
    }
    const size_t begin = (size_t)json_integer_value(json_array_get(range, 0));
    const size_t end = (size_t)json_integer_value(json_array_get(range, 1));
    if (begin > end || end > bytes) die("data outside of the file", name);
    t->data = data + begin;
    t->bytes = end - begin;
}

static bool add_file(fixture *f, const char *path) {
    size_t bytes = 0;
    unsigned char *data = read_file(path, &bytes);
    if (!data) return false;
    uint64_t header = 0;
    if (bytes >= 8) memcpy(&header, data, 8);
    if (bytes < 8 || header > bytes - 8) die("not a safetensors file", path);
    json_t *root = json_loadb((char *)data + 8, header, 0, NULL), *entry;
    if (!root) die("header is not JSON", path);
    const char *name;
    json_object_foreach(root, name, entry) {
        if (strcmp(name, "__metadata__") == 0) continue;
        add_tensor(f, name, entry, data + 8 + header, bytes - 8 - header);
    }
    json_decref(root);
    f->files = realloc(f->files, (size_t)(f->n_files + 1) * sizeof *f->files);
    if (!f->files) die("out of memory", path);
    f->files[f->n_files++] = data;
    return true;
}

bool fixture_open(const char *path, fixture *f_out) {
    fixture f = {0};
    char name[4096];
    snprintf(name, sizeof name, "%s/model.safetensors", path);
    if (add_file(&f, name)) {
        *f_out = f;
        return true;
    }
    snprintf(name, sizeof name, "%s/model.safetensors.index.json", path);
    json_t *index = json_load_file(name, 0, NULL), *seen = json_object(), *shard;
    const char *key;
    json_object_foreach(json_object_get(index, "weight_map"), key, shard) {
        const char *file = json_string_value(shard);
        if (json_object_get(seen, file)) continue;
        json_object_set(seen, file, json_true());
        snprintf(name, sizeof name, "%s/%s", path, file);
        if (!add_file(&f, name)) die("missing shard", name);
    }
    json_decref(seen);
    json_decref(index);
    if (f.n == 0 && !add_file(&f, path)) return false;
    *f_out = f;
    return true;
}

void fixture_close(fixture *f) {
    for (int i = 0; i < f->n; i++) free(f->at[i].name);
    for (int i = 0; i < f->n_files; i++) free(f->files[i]);
    free(f->at);
    free(f->files);
    *f = (fixture){0};
}

const fixture_tensor *fixture_find(const fixture *f, const char *name) {
    for (int i = 0; i < f->n; i++) {
        if (strcmp(f->at[i].name, name) == 0) return &f->at[i];
    }
    return NULL;
}

static double element(const fixture_tensor *t, size_t i) {
    float f32;
    double f64;
    int64_t i64;
    int32_t i32;
    uint32_t bits;
    uint16_t u16;
    if (strcmp(t->dtype, "F32") == 0) return memcpy(&f32, t->data + 4 * i, 4), f32;
    if (strcmp(t->dtype, "F64") == 0) return memcpy(&f64, t->data + 8 * i, 8), f64;
    if (strcmp(t->dtype, "I64") == 0) return memcpy(&i64, t->data + 8 * i, 8), (double)i64;
    if (strcmp(t->dtype, "I32") == 0) return memcpy(&i32, t->data + 4 * i, 4), i32;
    if (strcmp(t->dtype, "U8") == 0 || strcmp(t->dtype, "BOOL") == 0) return t->data[i];
    if (strcmp(t->dtype, "BF16") != 0) die("dtype not known", t->dtype);
    memcpy(&u16, t->data + 2 * i, 2);
    bits = (uint32_t)u16 << 16;
    return memcpy(&f32, &bits, 4), f32;
}

double *fixture_values(const fixture_tensor *t) {
    double *v = allocate(t->n * sizeof *v);
    for (size_t i = 0; i < t->n; i++) v[i] = element(t, i);
    return v;
}

double *fixture_f64(const fixture *f, const char *name, size_t *n_out) {
    const fixture_tensor *t = fixture_find(f, name);
    if (!t) die("no such tensor", name);
    if (n_out) *n_out = t->n;
    return fixture_values(t);
}

int *fixture_int(const fixture *f, const char *name, size_t *n_out) {
    const fixture_tensor *t = fixture_find(f, name);
    if (!t) die("no such tensor", name);
    if (n_out) *n_out = t->n;
    int *v = allocate(t->n * sizeof *v);
    for (size_t i = 0; i < t->n; i++) v[i] = (int)element(t, i);
    return v;
}

double fixture_relative(size_t n, const double *got, const double *want) {
    double worst = 0, largest = 0;
    for (size_t i = 0; i < n; i++) {
        const double error = fabs(got[i] - want[i]);
        if (!(error < INFINITY)) return INFINITY;
        worst = fmax(worst, error);
        largest = fmax(largest, fabs(want[i]));
    }
    return worst == 0 ? 0 : largest == 0 ? INFINITY : worst / largest;
}
