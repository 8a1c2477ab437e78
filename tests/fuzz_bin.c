/*
 * fuzz_bin.c - any bytes as a token shard. The first byte chooses width and vocabulary; with its
 * lowest bit a header with the right magic and count is put in front.
 */
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "io/io.h"

static void silent(void *arg, const char *line) {
    (void)arg, (void)line;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (bytes == 0) return 0;
    dpl_log_sink(silent, NULL);
    const int choice = data[0], width = choice >> 1 & 2 ? 4 : choice >> 1 & 1 ? 2 : 0;
    const size_t vocab = choice & 16 ? 300 : choice & 32 ? 65536 : 1u << 30;
    const int fd = memfd_create("fuzz", MFD_CLOEXEC);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (choice & 1) {
        const int32_t header[256] = {choice & 64 ? 20240801 : 20240520, 1,
                                     (int32_t)((bytes - 1) / (choice & 64 ? 4 : 2))};
        if (write(fd, header, sizeof header) != sizeof header) abort();
    }
    if (write(fd, data + 1, bytes - 1) != (ssize_t)bytes - 1) abort();
    dpl_source *source = NULL;
    if (dpl_source_open(path, choice & 128 ? 1 : width, vocab, &source) == DPL_OK) {
        const size_t n = source->n_tokens;
        int32_t *ids = malloc(n * sizeof *ids);
        dpl_source_read(source, 0, n, ids);
        for (size_t i = 0; i < n; i++)
            if (ids[i] < 0 || (size_t)ids[i] >= vocab) abort();
        if (n == 0 || dpl_source_document_of(source, n - 1) != 0) abort();
        free(ids);
        dpl_source_close(&source);
    } else if (source || !strstr(dpl_error_message(), path)) {
        abort();
    }
    close(fd);
    return 0;
}
