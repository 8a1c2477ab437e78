/*
 * fuzz_index.c - any bytes as the index of a model directory that holds two good shards, a and b,
 * with the tensors w0 (a) and w1 (b).
 */
#include <limits.h>
#include <stdlib.h>

#include "io/io.h"

static char dir[] = "/tmp/dpl-fuzz-XXXXXX";
static char index_path[PATH_MAX];

static void remove_dir(void) {
    (void)dpl_remove_tree(dir);
}

static void silent(void *arg, const char *line) {
    (void)arg, (void)line;
}

static void make_dir(void) {
    char path[PATH_MAX];
    dpl_log_sink(silent, NULL);
    if (!mkdtemp(dir) || atexit(remove_dir) != 0) abort();
    for (int i = 0; i < 2; i++) {
        const dpl_st_tensor tensor = {
            .name = i ? "w1" : "w0", .dtype = DPL_ST_U8, .data = (const uint8_t *)"x"};
        if (dpl_path_join(dir, i ? "b" : "a", path) != DPL_OK ||
            dpl_st_write(path, &tensor, 1, NULL, NULL) != DPL_OK)
            abort();
    }
    if (dpl_path_join(dir, "model.safetensors.index.json", index_path) != DPL_OK) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (!index_path[0]) make_dir();
    FILE *file = fopen(index_path, "wb");
    if (!file || fwrite(data, 1, bytes, file) != bytes || fclose(file) != 0) abort();
    dpl_st_file *shards = NULL;
    if (dpl_st_open(dir, &shards) == DPL_OK) {
        if (shards->n_tensors > 2) abort();
        for (size_t i = 0; i < shards->n_tensors; i++)
            if (shards->tensors[i].data[0] != 'x') abort();
        dpl_st_close(&shards);
    } else if (shards || !strstr(dpl_error_message(), dir)) {
        abort();
    }
    return 0;
}
