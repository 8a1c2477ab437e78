// base.h - what every other folder stands on; includes nothing of the project but dropless.h.
//
// Letters, used in names and shape comments everywhere: B batch, S sequence, T tokens on this
// rank, D model width, F expert hidden width, E experts, EL experts on this rank, K experts per
// token, N rows received, R ranks, V vocabulary, L layers, H heads.
// Gradients have the prefix d: parameter gradients accumulate (+=), activation gradients are
// written (=), the residual stream's gradient accumulates.
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "dropless.h"

#define DPL_ALIGN        64 // every block that the project allocates starts on a cache line
#define DPL_MIN(a, b)    ((a) < (b) ? (a) : (b))
#define DPL_MAX(a, b)    ((a) > (b) ? (a) : (b))
#define DPL_COUNT(array) (sizeof(array) / sizeof((array)[0]))

static inline size_t dpl_round_up(size_t x, size_t unit) {
    return (x + unit - 1) / unit * unit;
}
static inline size_t dpl_div_up(size_t x, size_t unit) {
    return (x + unit - 1) / unit;
}

/* ---- errors: the function that first decides on one words it, its callers only pass it on --- */
// Words this thread's error (dpl_error_message) and returns `status`.
dpl_status dpl_fail(dpl_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3), cold));
// Puts "place: " (a file, a key, a layer) before this thread's error text. Returns `status`.
dpl_status dpl_fail_in(dpl_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3), cold));

#define DPL_TRY(call)                          \
    do {                                       \
        const dpl_status status_ = (call);     \
        if (status_ != DPL_OK) return status_; \
    } while (0)
// DPL_EINVAL, or the status, with this text where the condition does not hold.
#define DPL_CHECK(condition, ...) DPL_EXPECT(condition, DPL_EINVAL, __VA_ARGS__)
#define DPL_EXPECT(condition, status, ...) \
    DPL_TRY((condition) ? DPL_OK : dpl_fail(status, __VA_ARGS__))
// Of the arguments of a public function.
#define DPL_NEED(condition) DPL_CHECK(condition, "%s needs %s", __func__, #condition)

/* ---- log: one line to the sink (stderr by default), for notices and warnings ---------------- */
typedef void (*dpl_log_fn)(void *arg, const char *line);
// fn NULL: stderr again. Not thread-safe: set at start.
void dpl_log_sink(dpl_log_fn fn, void *arg);
void dpl_log(const char *format, ...) __attribute__((format(printf, 1, 2)));

double dpl_now(void); // monotonic seconds

// What takes long, such as files, calls dpl_busy() again and again; it calls what this thread has
// given, which may tell those who wait for it. fn NULL, as at first: nobody.
typedef void (*dpl_busy_fn)(void *arg);
void dpl_busy_hook(dpl_busy_fn fn, void *arg);
void dpl_busy(void);

uint64_t dpl_build_hash(void); // another one for another build of the library or program

/* ---- memory --------------------------------------------------------------------------------- */
// Zeroed, DPL_ALIGN-aligned; from 2 MiB on aligned to 2 MiB, advised to huge pages and not touched
// yet: on a machine of several nodes memory lies near the thread that uses it first. 0 bytes give
// a valid pointer. NULL when memory is exhausted (or the fault injection below says so).
void *dpl_alloc(size_t bytes);
void *dpl_alloc_array(size_t count, size_t size); // NULL on overflow too
void dpl_free(void *p);                           // NULL is fine
char *dpl_strdup(const char *text);
// Tests: make the n-th dpl_alloc from now fail, once (0: off).
void dpl_fault_alloc(size_t nth);

// Step arena: address space is reserved once, memory is used as it is touched. Blocks are
// DPL_ALIGN-aligned and NOT zeroed. Released blocks are poisoned under ASan.
typedef struct dpl_arena dpl_arena;
dpl_status dpl_arena_open(size_t reserve_bytes, dpl_arena **arena_out);
void dpl_arena_close(dpl_arena **arena);
// Never NULL: running over the reservation is a programmer's error and aborts with a message.
void *dpl_arena_alloc(dpl_arena *arena, size_t bytes);
size_t dpl_arena_mark(const dpl_arena *arena);
void dpl_arena_release(dpl_arena *arena, size_t mark); // back to `mark`
bool dpl_arena_owns(const dpl_arena *arena, const void *p);
size_t dpl_arena_free_bytes(const dpl_arena *arena);
size_t dpl_arena_peak_bytes(const dpl_arena *arena);
// While held, release keeps its blocks alive (a deferred context has operators that use them);
// letting go performs what was asked for, except below a block that was taken since and lives.
void dpl_arena_hold(dpl_arena *arena, bool hold);

// Heap: blocks that may be released in any order, in a reservation that other processes can map
// when it is shared. Blocks are DPL_ALIGN-aligned and NOT zeroed. Of one thread, but that peers may
// write into its blocks.
typedef struct dpl_heap dpl_heap;
dpl_status dpl_heap_open(size_t reserve_bytes, bool shared, dpl_heap **heap_out);
void dpl_heap_close(dpl_heap **heap);
void *dpl_heap_alloc(dpl_heap *heap, size_t bytes); // NULL: no gap is left, or no memory
void dpl_heap_free(dpl_heap *heap, void *p);        // NULL is fine
void dpl_heap_reset(dpl_heap *heap);                // frees all blocks
void *dpl_heap_base(const dpl_heap *heap);
size_t dpl_heap_bytes(const dpl_heap *heap);   // of the reservation
size_t dpl_heap_used(const dpl_heap *heap);    // in blocks
size_t dpl_heap_touched(const dpl_heap *heap); // bytes from its start that may have memory
int dpl_heap_fd(const dpl_heap *heap);         // -1: not shared
uint64_t dpl_heap_mark(const dpl_heap *heap);  // shared: random, what its first 8 bytes are

/* ---- threads -------------------------------------------------------------------------------- */
// Runs tasks 0..n_tasks-1, each exactly once, on the calling thread and the pool's own; returns
// when all are done. Which thread runs a task is not fixed, so its result must not depend on it.
// i_thread is 0..n_threads-1, for scratch memory of this run. Tasks must not call dpl_pool_run.
// While one thread's run is going on, a run of another thread happens on that thread alone.
typedef struct dpl_pool dpl_pool;
typedef void (*dpl_task_fn)(void *arg, size_t i_task, int i_thread);
// n_threads 0: as many as this process may use (affinity and cgroup quota). 1 creates no thread.
dpl_status dpl_pool_open(int n_threads, dpl_pool **pool_out);
void dpl_pool_close(dpl_pool **pool);
int dpl_pool_threads(const dpl_pool *pool);
void dpl_pool_run(dpl_pool *pool, size_t n_tasks, dpl_task_fn fn, void *arg);
int dpl_cpus_allowed(void);
// For those who spin, and who sleep while *word is `value` (may return early; seconds 0: no end).
void dpl_relax(void);
void dpl_futex_wait(_Atomic uint32_t *word, uint32_t value, double seconds);
void dpl_futex_wake(_Atomic uint32_t *word, int n_threads);
// `cpus` cut to the quotas of the groups listed in proc_cgroup, whose folders are under root.
int dpl_cpus_quota(const char *proc_cgroup, const char *root, int cpus);

/* ---- CPU levels ----------------------------------------------------------------------------- */
typedef enum dpl_cpu_level {
    DPL_CPU_REF,
    DPL_CPU_AVX2,
    DPL_CPU_AVX512,
    DPL_CPU_AVX512_BF16,
    DPL_CPU_AMX,
    DPL_CPU_TILES, // for tests: the arithmetic of AMX in AVX2, otherwise the level below AMX
    DPL_CPU_N
} dpl_cpu_level;
const char *dpl_cpu_level_name(dpl_cpu_level level);
// The best level of this machine, never TILES. Asks the system for the registers that it needs.
dpl_cpu_level dpl_cpu_level_machine(void);
// That level, or the one that the environment's DPL_CPU names. An unknown name, or one that the
// machine lacks, is DPL_EINVAL with what is possible.
dpl_status dpl_cpu_level_detect(dpl_cpu_level *level_out);

/* ---- random numbers: counter-based, so that any element can be drawn by any thread ---------- */
// A well-mixed 64-bit value of (seed, stream, counter); Philox4x32-10.
uint64_t dpl_rng_u64(uint64_t seed, uint64_t stream, uint64_t counter);
double dpl_rng_uniform(uint64_t seed, uint64_t stream, uint64_t counter); // in (0, 1)
double dpl_rng_normal(uint64_t seed, uint64_t stream, uint64_t counter);  // N(0, 1), Box-Muller
// 16 bits for element i of a tensor. (Those of 128 elements come from 16 counters, as vectors draw
// them: element 128 q + 16 w + c takes word w of counter 16 q + c.)
uint16_t dpl_rng_bits(uint64_t seed, uint64_t stream, uint64_t i);
uint64_t dpl_hash64(const void *data, size_t bytes, uint64_t seed); // not cryptographic

/* ---- number formats ------------------------------------------------------------------------- */
// dpl_dtype is public (dropless.h).
static inline size_t dpl_dtype_bytes(dpl_dtype dtype) {
    return dtype == DPL_F32 ? 4 : 2;
}

static inline float dpl_bf16_to_f32(uint16_t h) {
    const uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

// Round to nearest even; NaN stays NaN (made quiet).
static inline uint16_t dpl_f32_to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
    bits += 0x7fffu + ((bits >> 16) & 1u);
    return (uint16_t)(bits >> 16);
}

// 8- and 4-bit floats of a sign, an exponent and a mantissa, and scales of powers of two, as the
// OCP's formats for microscaling define them (formats.c). A code fills a byte; E2M1 its low half.
// E4M3 has no infinity, E2M1 no NaN either.
typedef enum dpl_code { DPL_E4M3, DPL_E5M2, DPL_E2M1, DPL_CODE_N } dpl_code;
float dpl_code_max(dpl_code format); // the largest finite value
float dpl_code_to_f32(dpl_code format, uint8_t code);
// To nearest even, saturating, infinities too; a zero keeps its sign. NaN: 0x7f, and 7 in E2M1.
uint8_t dpl_f32_to_code(dpl_code format, float x);

// Codes of a block are of x / 2^(byte - 127); byte 0xff is NaN, 0 means 2^-127 like any other.
float dpl_e8m0_to_f32(uint8_t byte);
typedef enum dpl_scale_rule {
    DPL_SCALE_UP,   // the least power of two with which no element saturates (TE's rule)
    DPL_SCALE_FLOOR // the exponents of amax and of the format's maximum alone; saturates (OCP's)
} dpl_scale_rule;
// The byte for a block whose largest magnitude is amax. Infinity: 0xfe; NaN: 0xff.
uint8_t dpl_e8m0_scale(dpl_scale_rule rule, dpl_code format, float amax);

// NVFP4: E2M1 codes of x * S / scale, where S belongs to a tensor and an E4M3 scale to each block.
float dpl_nv_tensor_scale(float amax);               // S: the largest block scale is 448
uint8_t dpl_nv_block_scale(float amax, float scale); // a code; 0: all codes of the block are 0
// Up or down by chance, the nearer number more often, so that the mean is x: `bits` are random.
uint8_t dpl_f32_to_e2m1_random(float x, uint16_t bits);
