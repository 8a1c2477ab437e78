/* fuzz_yaml.c - any bytes as a YAML configuration, and any text as a number. */
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "io/io.h"

static dpl_status take(void *arg, const char *key, const char *value, int line) {
    (void)arg;
    double real;
    int64_t integer;
    if (line < 1 || strlen(key) + strlen(value) > 1 << 24) abort();
    const bool is_real = dpl_parse_f64(value, &real) == DPL_OK;
    if (is_real && real - real != 0) abort();
    if (dpl_parse_i64(value, &integer) == DPL_OK && !is_real) abort();
    return DPL_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    const int fd = memfd_create("fuzz", MFD_CLOEXEC);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (write(fd, data, bytes) != (ssize_t)bytes) abort();
    if (dpl_yaml_read(path, take, NULL) != DPL_OK && !strstr(dpl_error_message(), path)) abort();
    close(fd);
    return 0;
}
