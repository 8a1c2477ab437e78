/*
 * fixture.h - reading of the reference files that tests compare with, and where they lie.
 *
 * Independent of src/io on purpose, and trusting: a damaged file ends the test program with a
 * message. Only the directory may be absent; a test then says so and skips.
 */
#ifndef DPL_TESTS_FIXTURE_H
#define DPL_TESTS_FIXTURE_H

#include <stdbool.h>
#include <stddef.h>

typedef struct fixture_tensor {
    char *name;
    char dtype[8]; // as in the file: F32, F64, BF16, I64, U8 ..
    int n_dims, shape[8];
    size_t n, bytes;
    const unsigned char *data;
} fixture_tensor;

typedef struct fixture {
    fixture_tensor *at; // in the order of the headers
    int n;
    unsigned char **files;
    int n_files;
} fixture;

// "<shared>/fixtures": $DPL_SHARED, else the compile definition DPL_SHARED_DIR, else ../shared.
// NULL, and a line on stderr, when there is none.
const char *fixture_root(void);
// Path below fixture_root(), which must exist; a rotating static buffer of eight.
const char *fixture_path(const char *format, ...) __attribute__((format(printf, 1, 2)));

// One safetensors file; or a model folder: model.safetensors, or the files of its index.
// False: no such file.
bool fixture_open(const char *path, fixture *f_out);
void fixture_close(fixture *f);

const fixture_tensor *fixture_find(const fixture *f, const char *name); // NULL when there is none
// Any dtype converted; the caller frees. A missing name ends the program. n_out may be NULL.
double *fixture_f64(const fixture *f, const char *name, size_t *n_out);
int *fixture_int(const fixture *f, const char *name, size_t *n_out);
double *fixture_values(const fixture_tensor *t);

// max |got - want| / max |want|; 0/0 is 0; NaN anywhere gives infinity.
double fixture_relative(size_t n, const double *got, const double *want);

#endif
