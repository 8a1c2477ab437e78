/*
 * dropless.h - dropless mixture-of-experts training, public API.
 *
 * Read from top to bottom: the sections follow a token through one step.
 *   1 status   2 context and ranks   3 operators of one layer   4 configuration   5 model
 *   6 training
 *
 * These hold for every function unless its own text says otherwise.
 *   - It returns DPL_OK (0) or a negative dpl_status; dpl_error_message() then says what, where and
 *     what was expected. DPL_EINVAL (an argument is NULL, out of range or misaligned) and
 *     DPL_ENOMEM may come from any function; others are listed.
 *   - Outputs are the last parameters, are named *_out, and are written only on success.
 *   - n_x counts things, x_bytes is a size in bytes, other lengths are in elements.
 *     Matrices are row-major; "(T, D)" is T rows of D elements. Workspaces (ws) are scratch memory
 *     of the caller, aligned to 64 bytes; too few ws_bytes are DPL_ENOSPC.
 *   - Pointers are borrowed for the call. What dpl_x_open() gives is owned by the caller, who calls
 *     dpl_x_close(): it sets the pointer to NULL; NULL, or a pointer to NULL, is fine.
 *   - A handle is used by one thread at a time. Two handles are independent.
 *   - It is deterministic: equal inputs, ranks and CPU level give equal bits, for any number of
 *     threads. No peer has a part in it, except in section 6. "Cost" is told unless it is small.
 */
#ifndef DROPLESS_H
#define DROPLESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DPL_API __attribute__((visibility("default")))

/* The soname carries DPL_VERSION_MAJOR: equal major, compatible binaries. Within one major no
 * function changes or goes, and structs grow at their end only: one that starts with struct_bytes
 * tells the library how much of it the caller knows; all others are frozen. */
#define DPL_VERSION_MAJOR 0
#define DPL_VERSION_MINOR 1
#define DPL_VERSION_PATCH 0
/** Version of the library that runs, "0.1.0". Never NULL. */
DPL_API const char *dpl_version(void);

/* ---- 1 status ------------------------------------------------------------------------------ */
#define DPL_STATUS_MAP(X)                                       \
    X(OK, 0, "success")                                         \
    X(EINVAL, -1, "invalid argument")                           \
    X(ENOMEM, -2, "out of memory")                              \
    X(ENOSPC, -3, "the given buffer is too small")              \
    X(EIO, -4, "a file could not be read or written")           \
    X(EFORMAT, -5, "a file is damaged or of another version")   \
    X(ECOMM, -6, "a peer failed; the communicator is unusable") \
    X(ENOSUP, -7, "not built in, or not on this machine")       \
    X(ENUMERIC, -8, "a value that must be finite is not")       \
    X(EINTR, -9, "stopped on request")

typedef enum dpl_status {
#define DPL_STATUS_ENUM(name, value, text) DPL_##name = value,
    DPL_STATUS_MAP(DPL_STATUS_ENUM)
#undef DPL_STATUS_ENUM
} dpl_status;

/** The fixed text of a status code; "unknown status" for any other number. Never NULL. */
DPL_API const char *dpl_status_text(dpl_status status);
/** What this thread's last failing call found, until its next one fails. Never NULL; first "". */
DPL_API const char *dpl_error_message(void);

/* ---- 2 context and ranks ------------------------------------------------------------------- */
/** Threads, kernels of this CPU, and the memory of a step. */
typedef struct dpl_ctx dpl_ctx;
/** Open a context; it must outlive everything opened with it. n_threads counts the caller, to 4096;
 * 0: as many as affinity and cgroup limits of this process allow. DPL_EINVAL too where the
 * environment's DPL_CPU names no level that this machine has. Cost: creates threads. */
DPL_API dpl_status dpl_ctx_open(int n_threads, dpl_ctx **ctx_out);
DPL_API void dpl_ctx_close(dpl_ctx **ctx);

/** How products of fp32 operands are computed from now on: "default" or "highest" by multiply-adds;
 * "bf16_x6" from three bf16 parts of each operand, without the three smallest of their products (an
 * operand loses at most 2^-24 of itself, sums are fp32: as exact as multiply-adds); "bf16_x3" from
 * two parts (relative errors of about 2^-16). With AMX both can be faster than multiply-adds, else
 * they are slower. An infinite operand gives NaN. Any other text is DPL_EINVAL.
 * Collective: no. Deterministic: the text alone decides, never the sizes. Cost: none. */
DPL_API dpl_status dpl_ctx_set_precision(dpl_ctx *ctx, const char *matmul_precision);

/** Threads, the caller included, 0 for NULL; CPU level: "ref", "avx2", "avx512", "avx512_bf16",
 * "amx" or (for tests, by DPL_CPU alone) "tiles", "" for NULL. */
DPL_API int dpl_ctx_threads(const dpl_ctx *ctx);
DPL_API const char *dpl_ctx_cpu_level(const dpl_ctx *ctx);

/** The ranks that compute together, each with a context of its own: threads of one process, or
 * processes. A rank is 0 to R - 1. */
typedef struct dpl_comm dpl_comm;

/** Open the communicators of n_ranks threads of this process; comms_out[r] is for the thread that
 * is rank r, which closes it too. All ranks end with their own dpl_comm_close(). n_ranks: 1 to
 * 4096. Cost: creates no thread. */
DPL_API dpl_status dpl_comm_open_threads(int n_ranks, dpl_comm **comms_out);

/** Open the communicator of the processes that mpirun, mpiexec or srun started together, this one
 * among them. Once in a process. MPI is started unless the program has done so. Which MPI, the
 * launcher's environment says, or that of DPL_MPI: "openmpi" or "mpich".
 * @return DPL_EINVAL no launcher started this process; DPL_ENOSUP the module of that MPI is not
 *         installed; DPL_ECOMM. Collective. */
DPL_API dpl_status dpl_comm_open_mpi(dpl_comm **comm_out);

/** The MPI whose launcher started this process, "openmpi" or "mpich"; "srun", where that started
 * several without one, which cannot find each other: dpl_comm_open_mpi() says so. NULL: nobody. */
DPL_API const char *dpl_comm_launcher(void);

/** Trainers opened with ctx from now on are of all ranks of comm, each of which has a context of
 * its own, with one CPU level. comm is borrowed until they are closed; NULL: of one rank again. */
DPL_API dpl_status dpl_ctx_join(dpl_ctx *ctx, dpl_comm *comm);

/** Close a communicator, after everything that was opened with it. A rank that closes while others
 * wait for it is missed by them as a dead one is: after the time-out. */
DPL_API void dpl_comm_close(dpl_comm **comm);

/** This rank, 0 for NULL; the number of ranks, 1 for NULL. */
DPL_API int dpl_comm_rank(const dpl_comm *comm);
DPL_API int dpl_comm_ranks(const dpl_comm *comm);

/** Make all ranks fail from now on, in what they wait for and in every later call, with DPL_ECOMM
 * and this text behind the number of this rank. For errors that the others cannot know of. */
DPL_API void dpl_comm_abort(dpl_comm *comm, const char *why);

/** Give up, with DPL_ECOMM, when nothing has come from any rank for so many seconds (first: 300)
 * while this one waits. All ranks then fail, with a message that names the silent one. Seconds that
 * are not above 0 change nothing. */
DPL_API void dpl_comm_set_timeout(dpl_comm *comm, double seconds);

/** Whether a thread makes progress on what this rank sends and receives while the rank computes, so
 * that exchanges go on meanwhile. Without it they do so while the rank waits. Results are the same.
 * @param comm      Any communicator of this rank: the thread is for all that it exchanges. It ends
 *                  with the last of them, or with 0. NULL, or one rank: there is none.
 * @param n_threads 0, as at first, or 1. Ranks may differ.
 * @return DPL_EINVAL any other number; DPL_ENOMEM the system gives no thread. Where MPI was started
 *         with less than MPI_THREAD_SERIALIZED there is none: DPL_OK, and rank 0 logs a notice.
 * Collective: no. Called by the rank's own thread, as everything else; what the lane finds wrong is
 * returned by the rank's next call. Deterministic: yes. Cost: while something is under way the
 * thread wakes some thousand times a second, about 2 % of a processor; else it sleeps. */
DPL_API dpl_status dpl_comm_set_lane_threads(dpl_comm *comm, int n_threads);

/* ---- 3 operators of one layer -------------------------------------------------------------- */
/** Element type of tokens, and of the weights in compute. */
typedef enum dpl_dtype { DPL_F32, DPL_BF16 } dpl_dtype;

/** A grouped GEMM: in rows offsets[g] .. offsets[g+1]-1, y = x W_g^T. Groups may be empty and may
 * start at any row: there is no alignment to keep and nothing is padded. */
typedef struct dpl_gemm_grouped {
    size_t n_groups, n, k;  /* W is (n_groups, n, k); each at least 1 */
    const int64_t *offsets; /* (n_groups + 1): from 0, never decreasing, the last at most n_rows */
    size_t n_rows;          /* of x, y, dx, dy; those past the last offset are left alone */
    dpl_dtype tokens;       /* of x, y, dx, dy */
    dpl_dtype weights;      /* of compute; BF16: both operands rounded. Sums are fp32 always */
    size_t ld_x, ld_y;      /* elements from row to row of x and dx (0: k), of y and dy (0: n) */
    bool packed;            /* w comes from dpl_gemm_pack(); else it is row-major fp32 */
} dpl_gemm_grouped;

/** Bytes of workspace for each function below (one group's weight), and of all weights as
 * dpl_gemm_pack() writes them. 0 if the sizes are invalid. */
DPL_API size_t dpl_gemm_workspace_bytes(const dpl_gemm_grouped *g);
DPL_API size_t dpl_gemm_packed_bytes(const dpl_gemm_grouped *g);

/** Pack weights once, for many products. Uses n_groups, n, k and weights of g.
 * @param w          (n_groups, n, k), row-major, fp32.
 * @param packed_out dpl_gemm_packed_bytes(g) long, 64-byte aligned.
 * @return DPL_ENOSPC. Cost: one pass over w. */
DPL_API dpl_status dpl_gemm_pack(dpl_ctx *ctx, const dpl_gemm_grouped *g, const float *w, void *ws,
                                 size_t ws_bytes, void *packed_out);

/** The three products: y = x W_g^T; dx = dy W_g; dW_g += dy_g^T x_g.
 * @param x, dy    (n_rows, k) with ld_x and (n_rows, n) with ld_y, in g->tokens. Never written.
 * @param w        (n_groups, n, k) row-major fp32, or packed when g->packed.
 * @param ws       NULL and 0 bytes will do where g->packed, in forward and dgrad.
 * @param y_out, dx_out  Written for the rows of groups. Must not overlap the inputs.
 * @param dw       (n_groups, n, k) row-major fp32. That of an empty group keeps its bits.
 * @return DPL_ENOSPC; the message of DPL_EINVAL names group or field.
 * Deterministic: a row of y and dx depends on that row, W_g and CPU level alone.
 * Cost: 2 * rows * n * k operations; not packed: a pass over the weights of groups with rows. */
DPL_API dpl_status dpl_gemm_grouped_forward(dpl_ctx *ctx, const dpl_gemm_grouped *g, const void *x,
                                            const void *w, void *ws, size_t ws_bytes, void *y_out);
DPL_API dpl_status dpl_gemm_grouped_dgrad(dpl_ctx *ctx, const dpl_gemm_grouped *g, const void *dy,
                                          const void *w, void *ws, size_t ws_bytes, void *dx_out);
DPL_API dpl_status dpl_gemm_grouped_wgrad(dpl_ctx *ctx, const dpl_gemm_grouped *g, const void *dy,
                                          const void *x, void *ws, size_t ws_bytes, float *dw);

/** How experts are chosen. DeepSeek-V3: sigmoid, group_top2 and norm_topk true. */
typedef struct dpl_route_rule {
    size_t n_experts, top_k;     /* E: 1 to 65536, K: 1 to E */
    size_t n_groups, top_groups; /* 1, 1: none; n_groups divides E, kept ones hold K experts */
    bool sigmoid;                /* score: sigmoid of the logit; else softmax over all E */
    bool group_top2;             /* a group's score: sum of its two best (V3), else its best (V2) */
    bool norm_topk;              /* weights divided by (their sum + 1e-20) */
    float scale;                 /* the weights times this (routed_scaling_factor) */
} dpl_route_rule;

/** Choose K experts for each token: the best by score + bias, equal ones by lower id; weights are
 * scores without bias.
 * @param n_tokens    T; T * K at most 2^31 - 1.
 * @param logits, bias  (T, E); (E), or NULL.
 * @param segment     (T): 0 is padding, not routed (ids -1, weights 0) nor counted. NULL: none.
 * @param score_out   (T, E), for dpl_router_route_backward().
 * @param ids_out, weights_out  (T, K), in falling order of choice.
 * @param counts_out  (E): tokens that chose each expert. NULL: not wanted.
 * @return DPL_ENUMERIC a logit is NaN or infinite, the message names the token.
 * Deterministic: a token's result depends on that token alone. */
DPL_API dpl_status dpl_router_route(dpl_ctx *ctx, const dpl_route_rule *rule, size_t n_tokens,
                                    const float *logits, const float *bias, const int32_t *segment,
                                    float *score_out, int32_t *ids_out, float *weights_out,
                                    int64_t *counts_out);

/** dlogits_out (T, E) from dweights (T, K) and what dpl_router_route() gave. An id that is out of
 * range or twice in a token is DPL_EINVAL. */
DPL_API dpl_status dpl_router_route_backward(dpl_ctx *ctx, const dpl_route_rule *rule,
                                             size_t n_tokens, const float *score,
                                             const int32_t *ids, const float *dweights,
                                             float *dlogits_out);

/** Sort slots by expert, then token; slot = token * K + k.
 * @param ids          (T, K): 0 to E-1, distinct within a token; -1 skips the slot.
 * @param offsets_out  (E + 1): the rows of expert e are offsets[e] .. offsets[e+1]-1.
 * @param slot_row_out (T * K): the row of a slot, -1 where skipped.
 * @param row_slot_out (T * K): the slot of a row; offsets[E] entries are written. */
DPL_API dpl_status dpl_moe_permute(dpl_ctx *ctx, const int32_t *ids, size_t n_tokens, size_t top_k,
                                   size_t n_experts, int64_t *offsets_out, int32_t *slot_row_out,
                                   int32_t *row_slot_out);

/** Tokens to the ranks of their experts and back, for any matrix of tokens: what a layer does. The
 * group is of all ranks of a communicator; rank r has n_local[r] of the experts, after those of the
 * ranks before it. All functions but close and get are collective, in the same order on all ranks,
 * and an error of one rank is returned by all, with its number (but for a group or handle that is
 * NULL). Without memory in the middle of an exchange a rank gives up: the others get DPL_ECOMM.
 * Deterministic: a token gets the bits that one rank would give it, however experts, tokens and
 * ranks are split, and whatever the transport. */
typedef struct dpl_ep_group dpl_ep_group;
typedef struct dpl_ep_config {
    size_t d, n_experts, top_k; /* width of a token; experts of all ranks; of a token */
    dpl_dtype dtype;            /* of tokens and rows */
    const size_t *n_local; /* (R), any split, their sum is n_experts; NULL: as equal as can be */
    bool no_shared_memory; /* send messages to ranks of this machine, too */
} dpl_ep_config;

/** Open a group; comm, and ctx, of which each rank has its own, must outlive it and its handles.
 * comm NULL: one rank. DPL_EINVAL too where ranks differ in config. Cost: reserves addresses, for
 * each rank of this machine as many as it has memory, or less; memory only as rows come. */
DPL_API dpl_status dpl_ep_group_open(dpl_ctx *ctx, dpl_comm *comm, const dpl_ep_config *config,
                                     dpl_ep_group **group_out);
DPL_API void dpl_ep_group_close(dpl_ep_group **group);

/** Where the tokens of one call go. Any number may be open, and be closed in any order, also after
 * their group: it then lives on until the last one is. */
typedef struct dpl_ep_handle dpl_ep_handle;

/** Exchange how many rows go where, and take memory for those that arrive here: exactly N, at any
 * load. A row is a token for one of its experts.
 * @param ids      (T, K): experts of each token, distinct; -1 skips the slot. T may differ from
 *                 rank to rank and be 0; T * K and N are at most 2^31 - 1.
 * @return DPL_EINVAL names the token; DPL_ENOMEM there is none for what arrives. Cost: twice N * D
 *         elements of memory until closed. Pages of a spike are given back when no handle has been
 *         open eight more times. */
DPL_API dpl_status dpl_ep_prepare(dpl_ep_group *group, const int32_t *ids, size_t n_tokens,
                                  dpl_ep_handle **handle_out);
DPL_API void dpl_ep_handle_close(dpl_ep_handle **handle);

/** The rows of a handle, which owns all of it: sorted by local expert, then rank, then token. */
typedef struct dpl_ep_rows {
    size_t n_rows, n_local; /* N; EL */
    const int64_t
        *offsets;       /* (EL + 1): rows of the e-th expert of this rank, as in a grouped GEMM */
    void *rows;         /* (N, D): by dpl_ep_dispatch() */
    float *row_weights; /* (N): by dpl_ep_dispatch() */
    void *results;      /* (N, D): for what goes back; by dpl_ep_combine_backward(): drows */
    float *result_weights; /* (N): for drow_weights */
} dpl_ep_rows;
DPL_API dpl_status dpl_ep_get_rows(const dpl_ep_handle *handle, dpl_ep_rows *rows_out);

/** Forward: rows = x of their tokens; then y = sum of a token's rows, in slot order, with one
 * rounding. Backward: drows = dy of their tokens; then dx (in fp32) = sum of a token's drows.
 * @param x, dy         (T, D), `ld` elements from row to row (0: D).
 * @param weights       (T, K), go along as row_weights. NULL on all ranks: not wanted.
 * @param rows, drows   (N, D). Those of the handle (`rows` or `results`) are read where they are,
 *                      others are copied to `results` first, and their numbers to
 *                      `result_weights`.
 * @param drow_weights  (N), come back as dweights_out (T, K), 0 for skipped slots. Both NULL on all
 *                      ranks: not wanted. An array of no numbers may always be NULL.
 * @param y_out, dx_out (T, D). Must not overlap rows of a handle.
 * Cost: each row is copied once, there and back; between hosts a token crosses once for all its
 * experts there, and each row crosses on its way back, by way of step memory of ctx. */
DPL_API dpl_status dpl_ep_dispatch(dpl_ep_handle *handle, const void *x, size_t ld_x,
                                   const float *weights);
DPL_API dpl_status dpl_ep_combine(dpl_ep_handle *handle, const void *rows, void *y_out,
                                  size_t ld_y);
DPL_API dpl_status dpl_ep_combine_backward(dpl_ep_handle *handle, const void *dy, size_t ld_dy);
DPL_API dpl_status dpl_ep_dispatch_backward(dpl_ep_handle *handle, const void *drows,
                                            const float *drow_weights, float *dx_out, size_t ld_dx,
                                            float *dweights_out);

/** One MoE layer: router, SwiGLU experts, shared expert if wanted; their weights and gradients. */
typedef struct dpl_layer dpl_layer;
typedef struct dpl_layer_config {
    size_t d, f;         /* D model width, F hidden width of an expert: 1 to 2^20 */
    size_t shared_f;     /* hidden width of the shared expert; 0: none */
    dpl_route_rule rule; /* E and K are in it */
    dpl_dtype dtype;     /* of x, y, dy and of compute; the router computes in fp32 always */
} dpl_layer_config;

/** Row-major fp32, shaped as Hugging Face checkpoints have them, the experts of a layer stacked. */
typedef struct dpl_layer_weights {
    const float *router;                                /* (E, D) */
    const float *bias;                                  /* (E), only for the choice; NULL: none */
    const float *gate, *up, *down;                      /* (E, F, D), (E, F, D), (E, D, F) */
    const float *shared_gate, *shared_up, *shared_down; /* of one expert; NULL with shared_f 0 */
} dpl_layer_weights;
typedef struct dpl_layer_gradients { /* the same shapes; NULL: not wanted */
    float *router, *gate, *up, *down, *shared_gate, *shared_up, *shared_down;
} dpl_layer_gradients;

/** Open a layer with zero weights and gradients. ctx must outlive it; any number of layers may
 * share one, on one thread. Cost: memory of the weights in dtype and once in fp32. */
DPL_API dpl_status dpl_layer_open(const dpl_layer_config *config, dpl_ctx *ctx,
                                  dpl_layer **layer_out);
DPL_API void dpl_layer_close(dpl_layer **layer);

/** Copy all weights into the layer. DPL_EINVAL: one that the layer needs is NULL, or a bias or
 * router weight is not finite; nothing is changed then. Cost: one pass over the weights. */
DPL_API dpl_status dpl_layer_set_weights(dpl_layer *layer, const dpl_layer_weights *weights);

/** Bytes that a forward pass of n_tokens keeps, whatever the routing. 0: T * K exceeds 2^31 - 1. */
DPL_API size_t dpl_layer_workspace_bytes(const dpl_layer *layer, size_t n_tokens);

/** Run the layer forward. No token is dropped.
 * @param x          Tokens, (T, D), row r at x + r * ld_x elements. ld_x: at least D, or 0 for D.
 * @param n_tokens   T; may be 0 and differ from call to call.
 * @param segment    (T): 0 is padding, which only the shared expert sees. NULL: no padding.
 * @param ws         dpl_layer_workspace_bytes(), left alone until backward, which needs it. Any
 *                   number of passes may be under way, each with its own.
 * @param y_out      (T, D), row distance ld_y. Must not overlap x.
 * @param counts_out (E): tokens that chose each expert. NULL: not wanted.
 * @return DPL_ENOSPC; DPL_ENUMERIC a router logit is NaN or infinite, the message names the token.
 * Deterministic: a row of y depends on that row of x, weights and CPU level alone.
 * Cost: 6 * D * F * (T * K) operations and the shared expert's; step memory of ctx for the rows. */
DPL_API dpl_status dpl_layer_forward(dpl_layer *layer, const void *x, size_t ld_x, size_t n_tokens,
                                     const int32_t *segment, void *ws, size_t ws_bytes, void *y_out,
                                     size_t ld_y, int64_t *counts_out);

/** Run the layer backward: gradients of the weights accumulate in the layer, dx is written.
 * @param x      As in the forward pass, unchanged.
 * @param ws     From dpl_layer_forward() of this layer, else DPL_EINVAL. Is read only.
 * @param dy     (T, D), row distance ld_dy (0: D), in dtype. Never written.
 * @param dx_out (T, D) fp32, row distance ld_dx (0: D). Must not overlap the inputs.
 * Cost: twice that of forward. */
DPL_API dpl_status dpl_layer_backward(dpl_layer *layer, const void *x, size_t ld_x, const void *ws,
                                      const void *dy, size_t ld_dy, float *dx_out, size_t ld_dx);

/** Set all gradients to zero; copy out those whose pointers are not NULL. */
DPL_API void dpl_layer_zero_gradients(dpl_layer *layer);
DPL_API dpl_status dpl_layer_get_gradients(dpl_layer *layer, const dpl_layer_gradients *gradients);

/* ---- 4 configuration ----------------------------------------------------------------------- */
/** Every option of training and of the model, by MaxText's keys. */
typedef struct dpl_config dpl_config;
typedef struct dpl_option_info {
    const char *name;          /* the key, "learning_rate" */
    const char *type;          /* "integer", "number", "true|false", "text", or "a|b|c": choices */
    const char *default_value; /* as text, "" if empty */
    const char *range;         /* "0 .. 1", "" if any value of the type will do */
    const char *help;          /* one sentence */
} dpl_option_info;

/** Options with their defaults, then those of a YAML file.
 * @param path A flat YAML mapping of keys; NULL: the defaults alone.
 * @return DPL_EIO, DPL_EFORMAT for the file; DPL_EINVAL for an unknown key (the message has the
 *         nearest one), a value out of range, or a MaxText key that would change the result and is
 *         not supported. The message names file, line and key. */
DPL_API dpl_status dpl_config_open(const char *path, dpl_config **config_out);
DPL_API void dpl_config_close(dpl_config **config);

/** Set one option from "key=value". Errors as dpl_config_open(); on error nothing changes. */
DPL_API dpl_status dpl_config_set(dpl_config *config, const char *assignment);

/** The value of an option as text that dpl_config_set() reads back, valid until the option is set
 * again or the configuration closed. NULL for an unknown key. */
DPL_API const char *dpl_config_get(const dpl_config *config, const char *key);

/** Options there are; and the i-th of them in the order of --help (DPL_EINVAL past the end). */
DPL_API size_t dpl_config_option_count(void);
DPL_API dpl_status dpl_config_option(size_t i, dpl_option_info *info_out);

/* ---- 5 model ------------------------------------------------------------------------------- */
/** A transformer of the deepseek_v3 family and its weights.
 * Everywhere below, PATH is a model directory (config.json and safetensors, as Hugging Face
 * transformers has them), a checkpoint directory, or a run directory, which stands for its newest
 * whole checkpoint. What reads or describes weights verifies a checkpoint's checksums first. */
typedef struct dpl_model dpl_model;
/** The options that belong to the model at PATH: those of its run (config.yml) where it is a run
 * directory or a checkpoint in one, else defaults with `dtype` and `max_target_length` as its
 * config.json has them. DPL_EIO no model is there; DPL_EFORMAT, DPL_EINVAL damaged files. */
DPL_API dpl_status dpl_config_open_model(const char *path, dpl_config **config_out);

/** Open a model: from files, or new with initial weights. ctx must outlive it.
 * @param path   PATH; NULL: the model that `config` describes, initialized by its `weight_init`,
 *               `init_std` and `init_weights_seed`.
 * @param config With a path only its `dtype` is used, the type to compute in; NULL: the type that
 *               config.json names.
 * @return DPL_EINVAL sizes that cannot be; DPL_EIO, DPL_EFORMAT the files; DPL_ENOSUP a field that
 *         would change the result and is not supported.
 * Cost: reads all weights; 4 bytes of memory a parameter, 6 in bfloat16. */
DPL_API dpl_status dpl_model_open(dpl_ctx *ctx, const char *path, const dpl_config *config,
                                  dpl_model **model_out);
DPL_API void dpl_model_close(dpl_model **model);

typedef struct dpl_model_info {
    size_t struct_bytes;        /* set by the caller: sizeof(dpl_model_info) */
    const char *family, *dtype; /* "deepseek_v3"; of compute: "float32" or "bfloat16" */
    size_t vocab, width, n_heads;
    size_t n_layers, n_dense_layers, n_mtp_layers; /* n_layers: with the dense, without the MTP */
    size_t n_experts, n_experts_per_token, n_shared_experts;
    size_t positions_max;               /* max_position_embeddings */
    uint64_t n_params, n_active_params; /* trainable, without MTP; what one token uses */
    uint64_t n_mtp_params;              /* MTP layers, without their copies of embedding and head */
    double flops_per_token;             /* of training at positions_max tokens, MaxText's count */
    uint64_t cache_bytes_per_token;     /* of a generator */
} dpl_model_info;

/** Sizes of a model. Fields beyond `struct_bytes` are not written. DPL_EINVAL: it was not set. */
DPL_API dpl_status dpl_model_get_info(const dpl_model *model, dpl_model_info *info);

/** Logits of a batch.
 * @param ids        Tokens, (B, S), each from 0 to vocab - 1. Positions are 0 .. S-1.
 * @param n_batch, n_seq  B, at least 1; S, from 1 to positions_max.
 * @param logits_out (B, S, vocab) in fp32.
 * @return DPL_ENUMERIC a value that is not finite, with its layer; logits_out may be written.
 * Deterministic: each row of the batch by itself. Cost: one forward pass. */
DPL_API dpl_status dpl_model_forward(dpl_model *model, const int32_t *ids, size_t n_batch,
                                     size_t n_seq, float *logits_out);

/** Cross-entropy of a batch, in nats, without auxiliary losses; all else as dpl_model_forward().
 * @param targets (B, S): the token that each position predicts; negative: none.
 * @param loss_sum_out, n_tokens_out  Over positions that have a target; their number, or NULL. */
DPL_API dpl_status dpl_model_loss(dpl_model *model, const int32_t *ids, const int32_t *targets,
                                  size_t n_batch, size_t n_seq, double *loss_sum_out,
                                  size_t *n_tokens_out);

/** Called between steps of long work. Anything but 0 stops it with DPL_EINTR. */
typedef int (*dpl_progress_fn)(void *arg, uint64_t n_done, uint64_t n_total);

/** Mean loss over a text. Each document is cut into windows of `max_target_length` that do not
 * overlap; each of its tokens but the first is predicted exactly once.
 * @param data_path File or folder of the kind `dataset_type` (text or bin) of the configuration.
 * @param config    Used: dataset_type, max_target_length, eval_per_device_batch_size,
 *                  per_device_batch_size, eval_steps (batches at most; -1: all). NULL: defaults.
 * @param progress  NULL: none. Counts batches. `arg` is handed to it.
 * @param loss_out, n_tokens_out  Nats per token; tokens predicted, may be NULL.
 * @return DPL_ENUMERIC as dpl_model_forward(); DPL_EIO, DPL_EFORMAT for the data; DPL_EINTR.
 * Cost: one forward pass a batch. */
DPL_API dpl_status dpl_model_eval(dpl_model *model, const char *data_path, const dpl_config *config,
                                  dpl_progress_fn progress, void *arg, double *loss_out,
                                  uint64_t *n_tokens_out);

/** Write a model directory that transformers and dpl_model_open() read: all of it, or nothing.
 * @param path        Made, or replaced if it is a model directory; anything else is DPL_EINVAL.
 * @param dtype       "float32" or "bfloat16", of matrices. Router and its bias stay float32.
 * @param shard_bytes Weights per file at most; 0: one file.
 * @return DPL_EIO. Cost: writes all weights and syncs. */
DPL_API dpl_status dpl_model_write(dpl_model *model, const char *path, const char *dtype,
                                   size_t shard_bytes);

/** Generating text: one token at a time, with a cache of the compressed latent. */
typedef struct dpl_generator dpl_generator;
typedef struct dpl_generator_options {
    size_t struct_bytes; /* sizeof(dpl_generator_options) */
    size_t tokens_max;   /* prompt and answer together; at most positions_max. Sizes the cache */
    double temperature;  /* 0: always the likeliest token (the lowest id among equals) */
    double top_p;        /* above 0, to 1: the smallest set of tokens with this probability */
    uint64_t seed;
} dpl_generator_options;

/** Open a generator. The model must outlive it and not change meanwhile.
 * Cost: memory of cache_bytes_per_token (dpl_model_info) times tokens_max. */
DPL_API dpl_status dpl_generator_open(dpl_model *model, const dpl_generator_options *options,
                                      dpl_generator **generator_out);
DPL_API void dpl_generator_close(dpl_generator **generator);

/** Feed n_ids >= 1 tokens; or draw the next one, which becomes part of the text. DPL_EINVAL: an id
 * out of range, more than tokens_max in all, or a draw before anything was fed. */
DPL_API dpl_status dpl_generator_feed(dpl_generator *generator, const int32_t *ids, size_t n_ids);
DPL_API dpl_status dpl_generator_next(dpl_generator *generator, int32_t *id_out);

typedef struct dpl_probe_options {
    size_t struct_bytes;         /* sizeof(dpl_probe_options) */
    int grad;                    /* not 0: gradients too */
    size_t n_steps;              /* optimizer steps on this batch; 0: none */
    const char *const *settings; /* "key=value", over the defaults of a probe */
    size_t n_settings;
} dpl_probe_options;

/** Run a batch through a model and write what happened inside, to compare with other programs.
 * @param input_path  A safetensors file: input_ids (B, S), and labels (B, S) if wanted, not
 *                    shifted, -100 where there is no loss (missing: input_ids).
 * @param output_path Written, with: targets, loss_mask, logits, token_loss, loss, total_loss,
 *                    hidden.{embed,L,final}, attn.L, mlp.L, router.L.{logits,ids,weights,counts},
 *                    mtp.*; with `grad` also grad.NAME and dhidden.L; with `n_steps` N also
 *                    adamwN.NAME. NAME is the tensor's name in the model directory.
 * @param options     NULL: no gradients, no steps. Defaults of a probe: dtype float32,
 *                    mtp_loss_scaling_factor 0.3, AdamW at a constant 1e-3 (0.9, 0.95, 1e-8, decay
 *                    0.1), no clipping, bias rate 0 (with another, router.L.bias_next too).
 * @return As dpl_model_open() and dpl_model_forward().
 * Cost: a few passes; everything is held in memory. */
DPL_API dpl_status dpl_model_probe(dpl_ctx *ctx, const char *path, const char *input_path,
                                   const char *output_path, const dpl_probe_options *options);

#define DPL_INSPECT_JSON   1u /* one JSON object instead of lines for people */
#define DPL_INSPECT_MEMORY 2u /* bytes of memory that training will need, kind by kind */

/** Describe a model, or what a configuration would make: family, parameters, types, FLOPs, bytes.
 * @param path     PATH, or a YAML configuration of training, or a config.json.
 * @param settings "key=value" over that configuration; n_settings 0: none.
 * @param flags    DPL_INSPECT_*, or 0.
 * @param text_out Owned by the caller: dpl_text_close().
 * @return As dpl_model_open(); DPL_EFORMAT too where a checksum is wrong.
 * Cost: reads a checkpoint once; never holds the weights. */
DPL_API dpl_status dpl_inspect(const char *path, const char *const *settings, size_t n_settings,
                               unsigned flags, char **text_out);
DPL_API void dpl_text_close(char **text);

/** Verify sizes and checksums of a checkpoint directory. DPL_EFORMAT a file is damaged or missing,
 * or there is no manifest; DPL_EIO. Cost: reads the checkpoint once. */
DPL_API dpl_status dpl_checkpoint_verify(const char *dir);

/* ---- 6 training ---------------------------------------------------------------------------- */
/** One training run: model, data, optimizer, and the run directory. All ranks call its functions,
 * in the same order (collective), but for those that only tell or stop. */
typedef struct dpl_trainer dpl_trainer;

/** One optimizer step. Sums over the global batch are divided by its number of loss tokens. */
typedef struct dpl_step_metrics {
    int64_t step;      /* from 0 */
    double seconds;    /* wall time of the step, data included */
    double loss;       /* what is minimized, auxiliary losses included */
    double lm_loss;    /* cross entropy in nats per token, z-loss included */
    double perplexity; /* exp(lm_loss) */
    double z_loss, mtp_loss, moe_lb_loss, router_z_loss; /* weighted; z_loss is in lm_loss */
    double total_weights;                                /* tokens that counted in the loss */
    double learning_rate, raw_grad_norm, grad_norm;      /* norms: before and after clipping */
    double tflops_per_device, tokens_per_s_per_device;
    double mfu; /* fraction of the measured peak of this machine; 0: not measured */
    double gmm_ms, dispatch_ms, combine_ms;
    double load_max_over_mean; /* busiest expert, worst layer; 0 without MoE layers */
} dpl_step_metrics;

typedef struct dpl_eval_metrics {
    double loss, perplexity; /* nats per token, auxiliary losses not added; exp(loss) */
    int64_t n_tokens;        /* tokens predicted */
} dpl_eval_metrics;

/** Called by dpl_trainer_run() on its own thread; each may be NULL. Must not call the trainer, but
 * dpl_trainer_stop(). */
typedef struct dpl_trainer_events {
    void *arg;
    void (*line)(void *arg, const char *line); /* every line of log.txt, without its end */
    void (*step)(void *arg, const dpl_step_metrics *metrics, int64_t n_steps); /* after its line */
    void (*eval)(void *arg, int64_t step, const dpl_eval_metrics *metrics);    /* after its line */
} dpl_trainer_events;

/** Make ready for training: check the options, open the data, make or load the model. The run
 * continues after the newest checkpoint of base_output_directory/run_name, which wins over
 * load_parameters_path. ctx must outlive the trainer; config is copied.
 * @return DPL_EINVAL options that do not fit together, or with the model directory or checkpoint;
 *         DPL_EIO, DPL_EFORMAT data, model or checkpoint cannot be read; a damaged checkpoint is
 *         named with the place of the damage and the newest good one before it.
 * Cost: memory of the model, gradients and optimizer. */
DPL_API dpl_status dpl_trainer_open(dpl_ctx *ctx, const dpl_config *config,
                                    dpl_trainer **trainer_out);
DPL_API void dpl_trainer_close(dpl_trainer **trainer); /* writes nothing */

/** How many steps have been made, 0 for NULL; the run directory until it is closed, "" for NULL. */
DPL_API int64_t dpl_trainer_next_step(const dpl_trainer *trainer);
DPL_API const char *dpl_trainer_run_dir(const dpl_trainer *trainer);

/** One optimizer step: batch, forward, backward, update. Writes no file. DPL_ENUMERIC a loss or
 * gradient is not finite: the message names step, layer and tensor; weights, optimizer state and
 * router bias are as before the step. Cost: no allocation after the first step. */
DPL_API dpl_status dpl_trainer_step(dpl_trainer *trainer, dpl_step_metrics *metrics_out);

/** Evaluate on the evaluation data, from its beginning. Changes nothing. DPL_EINVAL there is no
 * such data; DPL_ENUMERIC; DPL_EINTR dpl_trainer_stop() was called. */
DPL_API dpl_status dpl_trainer_evaluate(dpl_trainer *trainer, dpl_eval_metrics *metrics_out);

/** Write a checkpoint of the state after the last step, and remove those beyond
 * max_num_checkpoints_to_keep. A kill or a full disk at any moment leaves the earlier ones whole.
 * DPL_EINVAL before the first step; DPL_EIO. Cost: 12 bytes a parameter, written and read. */
DPL_API dpl_status dpl_trainer_save(dpl_trainer *trainer);

/** Train to the end: steps, evaluations and checkpoints as configured, in a run directory with
 * config.yml, log.txt, metrics.jsonl and checkpoints/.
 * @param events What to call on the way; NULL: nothing.
 * @return DPL_EINTR dpl_trainer_stop() was called, the step was finished and a checkpoint written;
 *         DPL_ENUMERIC, DPL_EIO as above. The newest checkpoint is the state to go on from. */
DPL_API dpl_status dpl_trainer_run(dpl_trainer *trainer, const dpl_trainer_events *events);

/** Make dpl_trainer_run() finish its step, save and return. Safe in signal handlers and threads. */
DPL_API void dpl_trainer_stop(dpl_trainer *trainer);

#ifdef __cplusplus
}
#endif
#endif
