/*
 * kernels.h - how one body checks and benchmarks a kernel function at every CPU level.
 *
 * A body makes its inputs and outputs (guarded buffers: canaries around them, 0xFF inside, so that
 * an element written outside or not at all shows), calls the plain-C function and the one under
 * test, compares, and wraps one call of the latter in KERNEL_BENCH.
 */
#ifndef DPL_TESTS_KERNELS_H
#define DPL_TESTS_KERNELS_H

#include "cpu/kernels.h"

typedef struct kernel_test {
    const struct dpl_kernels *ref, *k; // plain C, and the level under test
    uint64_t seed, n_drawn;
    bool ok, bench;
    bool aligned; // buffers from now on start on cache lines: set before those of a benchmark
    const char *function, *level;
    struct kernel_guard *guards;
    // one measurement
    double start, times[15];
    size_t n_times, n_calls;
} kernel_test;

typedef struct kernel_entry {
    const char *function;
    void (*body)(kernel_test *t);
} kernel_entry;

// Each file of bodies has one list, ended by {NULL, NULL}.
extern const kernel_entry kernel_gemm_entries[];
extern const kernel_entry kernel_quant_entries[];
extern const kernel_entry kernel_row_entries[] __attribute__((weak));

// Guarded memory, released after the body. Its address is an odd multiple of 4 unless t->aligned.
void *kernel_buffer(kernel_test *t, size_t bytes);
float *kernel_floats(kernel_test *t, size_t n); // poisoned
float *kernel_random(kernel_test *t, size_t n); // normally distributed
uint16_t *kernel_random_bf16(kernel_test *t, size_t n);
size_t kernel_pick(kernel_test *t, size_t low, size_t high); // low..high
// Frees all buffers after looking at their canaries: call between shapes to keep memory small.
void kernel_done(kernel_test *t);

// |got - want| <= bound for each of n; two NaNs are equal. Says what differs and fails the test.
void kernel_near(kernel_test *t, const char *what, const float *got, const float *want, size_t n,
                 double bound);
void kernel_same(kernel_test *t, const char *what, const void *got, const void *want, size_t bytes);

// Measures `call`, which does `amount` of `unit` (say 1e9 * GFLOP): printed as unit per second.
#define KERNEL_BENCH(t, amount, unit, call)                               \
    while (kernel_bench_begin(t)) {                                       \
        for (size_t i_call_ = 0; i_call_ < (t)->n_calls; ++i_call_) call; \
        kernel_bench_end(t, amount, unit);                                \
    }
bool kernel_bench_begin(kernel_test *t);
void kernel_bench_end(kernel_test *t, double amount, const char *unit);

#endif
