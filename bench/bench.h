/*
 * bench.h - `dropless bench KIND key=value ... [--json]`: what ran, its median, the limit that this
 * machine sets (measured in the same run), and the fraction reached.
 *
 * Each kind is one function in a table (bench.c); it takes its arguments from dpl_bench_args,
 * which remembers what was asked for, so that an unknown key is found without a second list.
 */
#ifndef DPL_BENCH_H
#define DPL_BENCH_H

#include <jansson.h>

#include "comm/comm.h"
#include "cpu/ops.h"

// Arguments after "bench"; argv[0] is the kind. Returns the exit status: 0, 1 or 2 (usage).
int dpl_bench_main(int argc, char **argv);

typedef struct dpl_bench_args {
    int argc;
    char **argv; // key=value each, or a word without "="
    bool json, bad;
    uint64_t used; // bit i: argv[i] was asked for
} dpl_bench_args;

// The value of `key`, or `otherwise`. A wrong one sets args->bad and says so.
const char *dpl_bench_text(dpl_bench_args *args, const char *key, const char *otherwise);
size_t dpl_bench_size(dpl_bench_args *args, const char *key, size_t otherwise);
// The index of the value in a list that NULL ends; the first one is the default.
size_t dpl_bench_choice(dpl_bench_args *args, const char *key, const char *const *choices);
const char *dpl_bench_word(dpl_bench_args *args); // the next argument without "=", or NULL
// False, and says so, if an argument was bad or is left over. Call after asking for all of them.
bool dpl_bench_args_done(dpl_bench_args *args);

// What all threads of a context can do together.
typedef struct dpl_bench_limits {
    double flops[2];             // multiply and add a second, by dpl_dtype of the operands
    double fma_flops;            // by fp32 multiply-adds, whatever matmul_precision says
    double read_bytes, rw_bytes; // a second, of memory that no cache holds; rw counts both ways
} dpl_bench_limits;
double dpl_bench_fma_peak(dpl_ctx *ctx); // a second, whatever matmul_precision says
dpl_status dpl_bench_machine(dpl_ctx *ctx, size_t test_bytes, dpl_bench_limits *limits_out);

// What one run does: operations of a class, bytes read, bytes read and written (both counted).
typedef struct dpl_bench_work {
    dpl_dtype dtype;
    double flops, read_bytes, rw_bytes;
} dpl_bench_work;
// Prints the row after adding to it what was measured, its limit, and the fraction reached; where
// products are not by fp32 multiply-adds, also the fraction of what those would allow.
dpl_status dpl_bench_report(json_t *row, const dpl_bench_work *work, const dpl_bench_limits *limits,
                            double seconds, bool json);

// Runs fn(arg) once to warm up and then `runs` times; returns the median in seconds.
#define DPL_BENCH_RUNS_MAX 1000 // more are cut to it
double dpl_bench_median(size_t runs, void (*fn)(void *arg), void *arg);
// The same of two, which take turns: one time for both where the machine changes.
void dpl_bench_turns(size_t runs, void (*const fns[2])(void *arg), void *arg,
                     double medians_out[2]);
double dpl_bench_middle(double *seconds, size_t n); // sorts them; n > 0
void *dpl_bench_numbers(size_t n, dpl_dtype dtype); // for dpl_free(); NULL without memory

// Runs fn on n_ranks threads, or as a process of an MPI launcher on its ranks; rank 0 says what is
// wrong. pins: each thread has a processor of its own, as far as there are some. (bench_ranks.c)
typedef dpl_status (*dpl_bench_rank_fn)(dpl_comm *comm, void *arg);
dpl_status dpl_bench_ranks(size_t n_ranks, bool pins, dpl_bench_rank_fn fn, void *arg);
dpl_status dpl_bench_slowest(dpl_comm *comm, double own, double *most_out); // of all ranks

const char *dpl_bench_kernel(const dpl_ctx *ctx, dpl_dtype dtype); // of products
extern const char *const dpl_bench_dtypes[3]; // by dpl_dtype; for dpl_bench_choice

// One line: the row as JSON, or its values after their names. Takes the row; NULL is no memory.
dpl_status dpl_bench_print(json_t *row, bool json);
// From now on rows are appended to this array instead; NULL: printed again.
void dpl_bench_collect(json_t *rows);

// The kinds: arguments in, exit status out.
int dpl_bench_run_machine(dpl_bench_args *args);
int dpl_bench_run_gemm(dpl_bench_args *args);
int dpl_bench_run_layer(dpl_bench_args *args);
int dpl_bench_run_experts(dpl_bench_args *args);
int dpl_bench_run_step(dpl_bench_args *args);
int dpl_bench_run_ep(dpl_bench_args *args);
int dpl_bench_run_quant(dpl_bench_args *args);
int dpl_bench_run_overlap(dpl_bench_args *args);
int dpl_bench_run_report(dpl_bench_args *args);

#endif
