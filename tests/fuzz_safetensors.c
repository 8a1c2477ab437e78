/*
 * fuzz_safetensors.c - any bytes as a safetensors file: an error, or a file of which every element
 * can be read. Every second input gets a length in front, so that the fuzzer need not find it.
 */
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "io/io.h"

static void read_all(const dpl_st_tensor *tensor) {
    const size_t n = dpl_st_elems(tensor);
    if (n * dpl_st_dtype_bytes(tensor->dtype) != tensor->bytes) abort();
    float *f32 = malloc(n * sizeof *f32 + 1);
    int32_t *i32 = malloc(n * sizeof *i32 + 1);
    (void)dpl_st_read_f32(tensor, f32);
    (void)dpl_st_read_i32(tensor, INT64_MIN, INT32_MAX, i32);
    free(f32);
    free(i32);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    const int fd = memfd_create("fuzz", MFD_CLOEXEC);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (bytes > 0 && data[0] % 2) { // '{' is odd: the input is the header and the data.
        const uint8_t *end = memmem(data, bytes, "}}}", 3);
        const uint64_t header_bytes = end ? (uint64_t)(end + 2 - data) : bytes;
        if (write(fd, &header_bytes, 8) != 8) abort();
    }
    if (write(fd, data, bytes) != (ssize_t)bytes) abort();
    dpl_st_file *file = NULL;
    if (dpl_st_open(path, &file) == DPL_OK) {
        for (size_t i = 0; i < file->n_tensors; i++) {
            read_all(&file->tensors[i]);
            if (dpl_st_find(file, file->tensors[i].name) != &file->tensors[i]) abort();
        }
        dpl_st_close(&file);
    } else if (file || !strstr(dpl_error_message(), path)) {
        abort();
    }
    close(fd);
    return 0;
}
