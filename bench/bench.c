// bench.c - the table of benchmarks, their arguments, and the median that all of them report.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "bench.h"
#include "cpu/kernels.h"

static const struct {
    const char *name, *keys;
    int (*run)(dpl_bench_args *args);
} kinds[] = {
    {"machine", "threads= mbytes=", dpl_bench_run_machine},
    {"gemm",
     "op=forward|dgrad|wgrad|all dtype=f32|bf16|mxfp8|nvfp4 precision=default|bf16_x6|bf16_x3 "
     "experts= "
     "rows= "
     "k= "
     "n= threads= runs=",
     dpl_bench_run_gemm},
    {"layer",
     "dtype=f32|bf16 experts= top_k= d= f= shared= rows= skew=balanced|zipf|hot threads= runs= "
     "mbytes=",
     dpl_bench_run_layer},
    {"experts", "dtype=f32|bf16 experts= rows= d= f= skew=balanced|zipf|hot threads= runs= mbytes=",
     dpl_bench_run_experts},
    {"step", "CONFIG runs= warmup= step_profile=true, and all keys of a configuration",
     dpl_bench_run_step},
    {"ep",
     "ranks= tokens= d= experts= top_k= dtype=bf16|f32 skew=balanced|zipf|hot "
     "memory=shared|messages wire=bf16|mxfp8 threads= runs= mbytes=",
     dpl_bench_run_ep},
    {"overlap",
     "ranks= layers= tokens= d= f= shared= experts= top_k= chunks= lane_threads=0|1 reduce=0|1 "
     "wire=bf16|mxfp8 "
     "memory=messages|shared threads= runs=",
     dpl_bench_run_overlap},
    {"quant",
     "way=row|column|both|all format=e4m3|e5m2|nvfp4 rounding=nearest|random scale_rule=up|floor "
     "dtype=bf16|f32 experts= rows= "
     "n= threads= runs=",
     dpl_bench_run_quant},
    {"report", "FILE.md quick=true", dpl_bench_run_report},
};

const char *dpl_bench_text(dpl_bench_args *args, const char *key, const char *otherwise) {
    const size_t n = strlen(key);
    for (int i = 0; i < args->argc; ++i) {
        if (strncmp(args->argv[i], key, n) != 0 || args->argv[i][n] != '=') continue;
        args->used |= (uint64_t)1 << i;
        otherwise = args->argv[i] + n + 1;
    }
    return otherwise;
}

size_t dpl_bench_size(dpl_bench_args *args, const char *key, size_t otherwise) {
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

size_t dpl_bench_choice(dpl_bench_args *args, const char *key, const char *const *choices) {
    const char *text = dpl_bench_text(args, key, choices[0]);
    for (size_t i = 0; choices[i]; ++i) {
        if (strcmp(text, choices[i]) == 0) return i;
    }
    fprintf(stderr, "%s=%s: expected", key, text);
    for (size_t i = 0; choices[i]; ++i) fprintf(stderr, "%s%s", i ? "|" : " ", choices[i]);
    fputc('\n', stderr);
    args->bad = true;
    return 0;
}

const char *dpl_bench_word(dpl_bench_args *args) {
    for (int i = 0; i < args->argc; ++i) {
        if (strchr(args->argv[i], '=') || args->used >> i & 1) continue;
        args->used |= (uint64_t)1 << i;
        return args->argv[i];
    }
    return NULL;
}

bool dpl_bench_args_done(dpl_bench_args *args) {
    for (int i = 0; i < args->argc; ++i) {
        if (args->used >> i & 1) continue;
        fprintf(stderr, "unknown argument %s\n", args->argv[i]);
        args->bad = true;
    }
    return !args->bad;
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double dpl_bench_middle(double *seconds, size_t n) {
    qsort(seconds, n, sizeof *seconds, by_value);
    return seconds[n / 2];
}

double dpl_bench_median(size_t runs, void (*fn)(void *arg), void *arg) {
    double seconds[DPL_BENCH_RUNS_MAX];
    runs = DPL_MIN(DPL_MAX(runs, (size_t)1), (size_t)DPL_BENCH_RUNS_MAX);
    fn(arg);
    for (size_t i = 0; i < runs; ++i) {
        const double start = dpl_now();
        fn(arg);
        seconds[i] = dpl_now() - start;
    }
    return dpl_bench_middle(seconds, runs);
}

void dpl_bench_turns(size_t runs, void (*const fns[2])(void *arg), void *arg,
                     double medians_out[2]) {
    double seconds[2][DPL_BENCH_RUNS_MAX];
    runs = DPL_MIN(DPL_MAX(runs, (size_t)1), (size_t)DPL_BENCH_RUNS_MAX);
    for (int fn = 0; fn < 2; fn++) fns[fn](arg);
    for (size_t i = 0; i < runs; ++i)
        for (int fn = 0; fn < 2; fn++) {
            const double start = dpl_now();
            fns[fn](arg);
            seconds[fn][i] = dpl_now() - start;
        }
    for (int fn = 0; fn < 2; fn++) medians_out[fn] = dpl_bench_middle(seconds[fn], runs);
}

// Small numbers, so that no result overflows in any number of runs.
void *dpl_bench_numbers(size_t n, dpl_dtype dtype) {
    void *p = dpl_alloc_array(n, dpl_dtype_bytes(dtype));
    for (size_t i = 0; p && i < n; ++i) {
        const float value = (float)(i * 2654435761u % 1024) * 0x1p-20f - 0x1p-11f;
        if (dtype == DPL_F32) ((float *)p)[i] = value;
        else ((uint16_t *)p)[i] = dpl_f32_to_bf16(value);
    }
    return p;
}

const char *const dpl_bench_dtypes[3] = {[DPL_F32] = "f32", [DPL_BF16] = "bf16"};

const char *dpl_bench_kernel(const dpl_ctx *ctx, dpl_dtype dtype) {
    return ctx->kernels->gemm[ctx->f32_parts ? DPL_BF16 : dtype].name;
}

dpl_status dpl_bench_report(json_t *row, const dpl_bench_work *work, const dpl_bench_limits *limits,
                            double seconds, bool json) {
    const double peak = limits->flops[work->dtype];
    const double bytes_s = work->read_bytes / limits->read_bytes +
                           work->rw_bytes / limits->rw_bytes;
    const double flops_s = work->flops / peak, least_s = DPL_MAX(flops_s, bytes_s);
    const double fma_s = DPL_MAX(work->flops / limits->fma_flops, bytes_s);
    json_t *found = json_pack("{sf sf sf ss sf sf sf}", "median_us", seconds * 1e6, "gflops",
                              work->flops / seconds * 1e-9, "gbs",
                              (work->read_bytes + work->rw_bytes) / seconds * 1e-9, "limit",
                              bytes_s > flops_s ? "bytes" : "flops", "limit_us", least_s * 1e6,
                              "fraction", least_s / seconds, "fraction_fma", fma_s / seconds);
    const bool good = json_object_update(row, found) == 0; // false without either
    json_decref(found);
    if (!good) json_decref(row);
    return dpl_bench_print(good ? row : NULL, json);
}

static json_t *collected; // rows go here instead, where it is set

void dpl_bench_collect(json_t *rows) {
    collected = rows;
}

dpl_status dpl_bench_print(json_t *row, bool json) {
    if (collected && row && json_array_append_new(collected, row) == 0) return DPL_OK;
    char *text = row ? json_dumps(row, JSON_COMPACT | JSON_REAL_PRECISION(6)) : NULL;
    const bool good = text != NULL;
    const char *key;
    json_t *value;
    if (good && json) puts(text);
    if (good && !json) {
        json_object_foreach(row, key, value) {
            if (strcmp(key, "bench") != 0) printf(" %s=", key);
            if (json_is_string(value)) fputs(json_string_value(value), stdout);
            if (json_is_number(value)) printf("%.6g", json_number_value(value));
        }
        putchar('\n');
    }
    fflush(stdout);
    free(text);
    json_decref(row);
    return good ? DPL_OK : dpl_fail(DPL_ENOMEM, "bench: no memory, or text that is not UTF-8");
}

static void usage(FILE *to) {
    fputs("dropless bench KIND [key=value ...] [--json]\n", to);
    for (size_t i = 0; i < DPL_COUNT(kinds); ++i)
        fprintf(to, "  %-8s %s\n", kinds[i].name, kinds[i].keys);
}

int dpl_bench_main(int argc, char **argv) {
    char *rest[64];
    dpl_bench_args args = {.argv = rest};
    for (int i = 1; i < argc; ++i) {
        if (strcmp(argv[i], "--help") == 0) {
            usage(stdout);
            return 0;
        }
        if (strcmp(argv[i], "--json") == 0) args.json = true;
        else if (args.argc < (int)DPL_COUNT(rest)) rest[args.argc++] = argv[i];
    }
    for (size_t i = 0; argc > 0 && i < DPL_COUNT(kinds); ++i) {
        if (strcmp(argv[0], kinds[i].name) == 0) return kinds[i].run(&args);
    }
    const bool help = argc > 0 && strcmp(argv[0], "--help") == 0;
    usage(help ? stdout : stderr);
    return help ? 0 : 2;
}
