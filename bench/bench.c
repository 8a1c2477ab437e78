// bench.c - the table of benchmarks, their arguments, and the median that all of them report.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "bench.h"

#define RUNS_MAX 1000

static const struct {
    const char *name, *keys;
    int (*run)(dpl_bench_args *args);
} kinds[] = {
    {"machine", "threads= mbytes=", dpl_bench_run_machine},
    {"gemm", "op=forward|dgrad|wgrad|all dtype=f32|bf16 experts= rows= k= n= threads= runs=",
     dpl_bench_run_gemm},
};

const char *dpl_bench_text(dpl_bench_args *args, const char *key, const char *otherwise)
{
    const size_t n = strlen(key);
    for (int i = 0; i < args->argc; ++i) {
        if (strncmp(args->argv[i], key, n) != 0 || args->argv[i][n] != '=') continue;
        args->used |= (uint64_t)1 << i;
        otherwise = args->argv[i] + n + 1;
    }
    return otherwise;
}

size_t dpl_bench_size(dpl_bench_args *args, const char *key, size_t otherwise)
{
    const char *text = dpl_bench_text(args, key, NULL);
    if (!text) return otherwise;
    char *end;
    errno = 0;
    const unsigned long long value = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end || errno || value > (1ull << 40)) {
        fprintf(stderr, "%s=%s: expected a whole number\n", key, text);
        args->bad = true;
    }
    return (size_t)value;
}

const char *dpl_bench_word(dpl_bench_args *args)
{
    for (int i = 0; i < args->argc; ++i) {
        if (strchr(args->argv[i], '=') || args->used >> i & 1) continue;
        args->used |= (uint64_t)1 << i;
        return args->argv[i];
    }
    return NULL;
}

bool dpl_bench_args_done(dpl_bench_args *args)
{
    for (int i = 0; i < args->argc; ++i) {
        if (args->used >> i & 1) continue;
        fprintf(stderr, "unknown argument %s\n", args->argv[i]);
        args->bad = true;
    }
    return !args->bad;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double dpl_bench_median(size_t runs, void (*fn)(void *arg), void *arg)
{
    double seconds[RUNS_MAX];
    runs = DPL_MIN(DPL_MAX(runs, (size_t)1), (size_t)RUNS_MAX);
    fn(arg);
    for (size_t i = 0; i < runs; ++i) {
        const double start = dpl_now();
        fn(arg);
        seconds[i] = dpl_now() - start;
    }
    qsort(seconds, runs, sizeof *seconds, by_value);
    return seconds[runs / 2];
}

static void usage(FILE *to)
{
    fputs("dropless bench KIND [key=value ...] [--json]\n", to);
    for (size_t i = 0; i < DPL_COUNT(kinds); ++i)
        fprintf(to, "  %-8s %s\n", kinds[i].name, kinds[i].keys);
}

int dpl_bench_main(int argc, char **argv)
{
    char *rest[64];
    dpl_bench_args args = {.argv = rest};
    for (int i = 1; i < argc; ++i) {
        if (strcmp(argv[i], "--help") == 0) {
            usage(stdout);
            return 0;
        }
        if (strcmp(argv[i], "--json") == 0)
            args.json = true;
        else if (args.argc < (int)DPL_COUNT(rest))
            rest[args.argc++] = argv[i];
    }
    for (size_t i = 0; argc > 0 && i < DPL_COUNT(kinds); ++i) {
        if (strcmp(argv[0], kinds[i].name) == 0) return kinds[i].run(&args);
    }
    const bool help = argc > 0 && strcmp(argv[0], "--help") == 0;
    usage(help ? stdout : stderr);
    return help ? 0 : 2;
}
