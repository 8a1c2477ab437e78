/*
 * dropless.h - dropless mixture-of-experts training, public API.
 *
 * Read from top to bottom: the sections follow a token through one step.
 *   1 status   2 context   3 operators of one layer   4 configuration   5 model   6 training
 *
 * These hold for every function unless its own text says otherwise.
 *   - It returns DPL_OK (0) or a negative dpl_status; dpl_error_message() then says what, where
 *     and what was expected.
 *   - Outputs are the last parameters, are named *_out, and are written only on success.
 *   - n_x counts things, x_bytes is a size in bytes, other lengths are in elements.
 *     Matrices are row-major; "(T, D)" is T rows of D elements.
 *   - Pointers are borrowed for the call. "Owned by the caller" names the function that releases it.
 *   - A handle is used by one thread at a time. Two handles are independent.
 */
#ifndef DROPLESS_H
#define DROPLESS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define DPL_API __attribute__((visibility("default")))
#else
#define DPL_API
#endif

/* ---- 1 status ------------------------------------------------------------------------------ */

#define DPL_STATUS_MAP(X)                                              \
    X(OK, 0, "success")                                                \
    X(EINVAL, -1, "invalid argument")                                  \
    X(ENOMEM, -2, "out of memory")                                     \
    X(ENOSPC, -3, "the given buffer is too small")                     \
    X(EIO, -4, "a file could not be read or written")                  \
    X(EFORMAT, -5, "a file is damaged or of another version")          \
    X(ECOMM, -6, "a peer failed; the communicator is unusable")        \
    X(ENOSUP, -7, "not built in, or not on this machine")              \
    X(ENUMERIC, -8, "a value that must be finite is not")              \
    X(EINTR, -9, "stopped on request")

typedef enum dpl_status {
#define DPL_STATUS_ENUM(name, value, text) DPL_##name = value,
    DPL_STATUS_MAP(DPL_STATUS_ENUM)
#undef DPL_STATUS_ENUM
} dpl_status;

/** The fixed text of a status code; "unknown status" for any other number. Never NULL. */
DPL_API const char *dpl_status_text(dpl_status status);

/**
 * What the last failing call of this thread found: what, where, and what was expected.
 * Valid until this thread's next failing call. Never NULL; "" before the first failure.
 */
DPL_API const char *dpl_error_message(void);

/* ---- 2 context ----------------------------------------------------------------------------- */

/** Threads, kernels of this CPU, and the memory of a step. Used by one thread at a time. */
typedef struct dpl_ctx dpl_ctx;

/**
 * Open a context.
 *
 * @param n_threads Worker threads, the caller included; 0: as many as affinity and cgroup limits of this
 *                  process allow; 1 creates no thread. At most 4096.
 * @param ctx_out   Owned by the caller: dpl_ctx_close(). Must outlive everything opened with it.
 *
 * @return DPL_OK;
 *         DPL_EINVAL n_threads is out of range, or the environment's DPL_CPU names a level that does
 *                    not exist or that this machine does not have;
 *         DPL_ENOMEM no memory or threads.
 *
 * Collective: no.
 * Deterministic: results never depend on the number of threads.
 * Cost: creates the threads and reserves address space.
 */
DPL_API dpl_status dpl_ctx_open(int n_threads, dpl_ctx **ctx_out);

/** Close and set to NULL. NULL, or a pointer to NULL, is fine. */
DPL_API void dpl_ctx_close(dpl_ctx **ctx);

/** Threads of this context, the caller included. 0 for NULL. */
DPL_API int dpl_ctx_threads(const dpl_ctx *ctx);

/** The CPU level whose kernels are in use: "ref", "avx2" or "avx512". "" for NULL. */
DPL_API const char *dpl_ctx_cpu_level(const dpl_ctx *ctx);

#ifdef __cplusplus
}
#endif
#endif
