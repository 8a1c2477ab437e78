/*
 * kernels.c - checks each kernel function of each available CPU level against plain C, and
 * benchmarks it: kernels [--bench] [--function NAME] [--level LEVEL] [--seed N]
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "kernels.h"

#define CANARY_BYTES 64
#define CANARY       0xa5
#define TIME_S       2e-3 // one sample of a benchmark

typedef struct kernel_guard {
    struct kernel_guard *next;
    uint8_t *block, *p;
    size_t bytes;
} kernel_guard;

static void fail(kernel_test *t, const char *what) {
    if (t->ok) printf("FAIL %s %s: %s\n", t->function, t->level, what);
    t->ok = false;
}

void *kernel_buffer(kernel_test *t, size_t bytes) {
    kernel_guard *g = malloc(sizeof *g);
    uint8_t *block = aligned_alloc(64, dpl_round_up(bytes + 2 * CANARY_BYTES + 4, 64));
    if (!g || !block) {
        puts("out of memory");
        exit(1);
    }
    uint8_t *before = block + (t->aligned ? 0 : 4), *p = before + CANARY_BYTES;
    *g = (kernel_guard){t->guards, block, p, bytes};
    t->guards = g;
    memset(before, CANARY, CANARY_BYTES);
    memset(p, 0xff, bytes);
    memset(p + bytes, CANARY, CANARY_BYTES);
    return p;
}

void kernel_done(kernel_test *t) {
    while (t->guards) {
        kernel_guard *g = t->guards;
        const uint8_t *before = g->p - CANARY_BYTES, *after = g->p + g->bytes;
        for (size_t i = 0; i < CANARY_BYTES; ++i) {
            if (before[i] != CANARY) fail(t, "wrote before a buffer");
            if (after[i] != CANARY) fail(t, "wrote past a buffer");
        }
        t->guards = g->next;
        free(g->block);
        free(g);
    }
}

float *kernel_floats(kernel_test *t, size_t n) {
    return kernel_buffer(t, n * sizeof(float));
}

float *kernel_random(kernel_test *t, size_t n) {
    float *x = kernel_floats(t, n);
    for (size_t i = 0; i < n; ++i) x[i] = (float)dpl_rng_normal(t->seed, 0, t->n_drawn++);
    return x;
}

uint16_t *kernel_random_bf16(kernel_test *t, size_t n) {
    uint16_t *x = kernel_buffer(t, n * sizeof *x);
    for (size_t i = 0; i < n; ++i) {
        x[i] = dpl_f32_to_bf16((float)dpl_rng_normal(t->seed, 0, t->n_drawn++));
    }
    return x;
}

size_t kernel_pick(kernel_test *t, size_t low, size_t high) {
    return low + (size_t)(dpl_rng_u64(t->seed, 1, t->n_drawn++) % (high - low + 1));
}

void kernel_near(kernel_test *t, const char *what, const float *got, const float *want, size_t n,
                 double bound) {
    for (size_t i = 0; i < n; ++i) {
        const double a = (double)got[i], b = (double)want[i];
        if (fabs(a - b) <= bound || a == b || (isnan(a) && isnan(b))) continue;
        if (t->ok) {
            printf("%s[%zu] is %.9g, expected %.9g within %.3g\n", what, i, a, b, bound);
        }
        fail(t, what);
        return;
    }
}

void kernel_same(kernel_test *t, const char *what, const void *got, const void *want,
                 size_t bytes) {
    if (memcmp(got, want, bytes) != 0) fail(t, what);
}

bool kernel_bench_begin(kernel_test *t) {
    if (!t->bench || t->n_times == DPL_COUNT(t->times)) {
        t->n_times = 0;
        t->n_calls = 1;
        return false;
    }
    t->start = dpl_now();
    return true;
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void kernel_bench_end(kernel_test *t, double amount, const char *unit) {
    const double seconds = dpl_now() - t->start;
    if (t->n_times == 0 && seconds < TIME_S) { // Still looking for how many calls make a sample.
        t->n_calls *= 2;
        return;
    }
    t->times[t->n_times++] = seconds / (double)t->n_calls;
    if (t->n_times < DPL_COUNT(t->times)) return;
    qsort(t->times, t->n_times, sizeof *t->times, by_value);
    const double median = t->times[t->n_times / 2];
    printf("%-24s %-11s %10.1f ns %10.2f G%s/s\n", t->function, t->level, median * 1e9,
           amount / median * 1e-9, unit);
}

typedef struct options {
    bool bench;
    const char *function, *level;
    uint64_t seed;
} options;

static bool parse(int argc, char **argv, options *o) {
    for (int i = 1; i < argc; ++i) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(argv[i], "--bench") == 0) o->bench = true;
        else if (strcmp(argv[i], "--function") == 0 && value) o->function = argv[++i];
        else if (strcmp(argv[i], "--level") == 0 && value) o->level = argv[++i];
        else if (strcmp(argv[i], "--seed") == 0 && value) o->seed = strtoull(argv[++i], NULL, 0);
        else return false;
    }
    return true;
}

static void run_entries(const kernel_entry *entry, dpl_cpu_level level, const options *o,
                        size_t *n_run, size_t *n_failed) {
    for (; entry && entry->function; ++entry) {
        if (o->function && strcmp(o->function, entry->function) != 0) continue;
        dpl_kernels ref, k;
        dpl_cpu_kernels(DPL_CPU_REF, &ref);
        dpl_cpu_kernels(level, &k);
        kernel_test t = {.ref = &ref,
                         .k = &k,
                         .seed = o->seed,
                         .ok = true,
                         .bench = o->bench,
                         .function = entry->function,
                         .level = dpl_cpu_level_name(level),
                         .n_calls = 1};
        entry->body(&t);
        kernel_done(&t);
        ++*n_run;
        *n_failed += !t.ok;
    }
}

int main(int argc, char **argv) {
    options o = {.seed = (uint64_t)time(NULL)};
    dpl_cpu_level best;
    if (!parse(argc, argv, &o)) {
        puts("kernels [--bench] [--function NAME] [--level LEVEL] [--seed N]");
        return 2;
    }
    if (dpl_cpu_level_detect(&best) != DPL_OK) {
        puts(dpl_error_message());
        return 1;
    }
    printf("seed %llu\n", (unsigned long long)o.seed);
    size_t n_run = 0, n_failed = 0;
    best = DPL_MIN(best, dpl_cpu_level_machine());
    for (int level = 0; level < DPL_CPU_N; ++level) {
        const bool soft = level == DPL_CPU_TILES && best >= DPL_CPU_AVX2;
        if (level > (int)best && !soft) continue;
        if (o.level && strcmp(o.level, dpl_cpu_level_name((dpl_cpu_level)level)) != 0) continue;
        run_entries(kernel_gemm_entries, (dpl_cpu_level)level, &o, &n_run, &n_failed);
        run_entries(kernel_row_entries, (dpl_cpu_level)level, &o, &n_run, &n_failed);
        run_entries(kernel_quant_entries, (dpl_cpu_level)level, &o, &n_run, &n_failed);
    }
    printf("%zu checks, %zu failed\n", n_run, n_failed);
    return n_run == 0 || n_failed > 0;
}
