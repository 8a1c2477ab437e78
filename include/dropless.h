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

/*
 * Version. The soname carries DPL_VERSION_MAJOR: equal major, compatible binaries. Within one major no function
 * changes or goes, and structs grow at their end only: one that starts with struct_bytes tells the library how
 * much of it the caller knows; all others are frozen.
 */
#define DPL_VERSION_MAJOR 0
#define DPL_VERSION_MINOR 1
#define DPL_VERSION_PATCH 0

/** Version of the library that runs, "0.1.0". Never NULL. */
DPL_API const char *dpl_version(void);

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

/* ---- 4 configuration ----------------------------------------------------------------------- */

/** Every option of training and of the model, by MaxText's keys. */
typedef struct dpl_config dpl_config;

typedef struct dpl_option_info {
    const char *name;          /* the key, "learning_rate" */
    const char *type;          /* "integer", "number", "true|false", "text", or the choices "a|b|c" */
    const char *default_value; /* as text, "" if empty */
    const char *range;         /* "0 .. 1", "" if any value of the type will do */
    const char *help;          /* one sentence */
} dpl_option_info;

/**
 * Options with their defaults, then those of a YAML file.
 *
 * @param path       A flat YAML mapping of keys; NULL: the defaults alone.
 * @param config_out Owned by the caller: dpl_config_close().
 *
 * @return DPL_OK; DPL_EIO, DPL_EFORMAT for the file; DPL_EINVAL for a key that does not exist (the message
 *         names the nearest one), a value out of range, or a MaxText key that would change the result and is
 *         not supported. The message names file, line and key. DPL_ENOMEM.
 *
 * Collective: no. Deterministic: yes. Cost: reads one small file.
 */
DPL_API dpl_status dpl_config_open(const char *path, dpl_config **config_out);

/** Close and set to NULL. NULL, or a pointer to NULL, is fine. */
DPL_API void dpl_config_close(dpl_config **config);

/**
 * Set one option from "key=value". Errors as dpl_config_open(); on error nothing changes.
 *
 * Collective: no. Deterministic: yes. Cost: none.
 */
DPL_API dpl_status dpl_config_set(dpl_config *config, const char *assignment);

/**
 * The value of an option as text that dpl_config_set() reads back. NULL for an unknown key. Valid until the
 * option is set again or the configuration closed.
 */
DPL_API const char *dpl_config_get(const dpl_config *config, const char *key);

/** Options there are; and the i-th of them in the order of --help (DPL_EINVAL past the end). */
DPL_API size_t dpl_config_option_count(void);
DPL_API dpl_status dpl_config_option(size_t i, dpl_option_info *info_out);

/* ---- 5 model ------------------------------------------------------------------------------- */

/**
 * A transformer of the deepseek_v3 family and its weights.
 *
 * Everywhere below, PATH is a model directory (config.json and safetensors, as Hugging Face transformers has
 * them), a checkpoint directory, or a run directory, which stands for its newest whole checkpoint.
 */
typedef struct dpl_model dpl_model;

/**
 * The options that belong to a model: those of its run (config.yml) where PATH is a run directory or a
 * checkpoint in one, else the defaults with `dtype` and `max_target_length` as its config.json has them.
 *
 * @param path       PATH.
 * @param config_out Owned by the caller: dpl_config_close().
 *
 * @return DPL_OK; DPL_EIO no model is there; DPL_EFORMAT, DPL_EINVAL its files are damaged; DPL_ENOMEM.
 *
 * Collective: no. Deterministic: yes. Cost: reads small files.
 */
DPL_API dpl_status dpl_config_open_model(const char *path, dpl_config **config_out);

/**
 * Open a model: from files, or new with initial weights.
 *
 * @param ctx       Must outlive the model.
 * @param path      PATH; NULL: the model that `config` describes, initialized by its `weight_init`,
 *                  `init_std` and `init_weights_seed`.
 * @param config    With a path only its `dtype` is used: the type to compute in. NULL: the type that
 *                  config.json names. Must not be NULL without a path.
 * @param model_out Owned by the caller: dpl_model_close().
 *
 * @return DPL_OK; DPL_EINVAL sizes that cannot be; DPL_EIO, DPL_EFORMAT the files; DPL_ENOSUP a field that
 *         would change the result and is not supported; DPL_ENOMEM.
 *
 * Collective: no. Deterministic: yes. Cost: reads all weights; 4 bytes of memory a parameter, 6 in bfloat16.
 */
DPL_API dpl_status dpl_model_open(dpl_ctx *ctx, const char *path, const dpl_config *config,
                                  dpl_model **model_out);

/** Close and set to NULL. NULL, or a pointer to NULL, is fine. */
DPL_API void dpl_model_close(dpl_model **model);

typedef struct dpl_model_info {
    size_t struct_bytes;       /* set by the caller: sizeof(dpl_model_info) */
    const char *family;        /* "deepseek_v3" */
    const char *dtype;         /* of compute: "float32" or "bfloat16" */
    size_t vocab, width, n_heads;
    size_t n_layers, n_dense_layers, n_mtp_layers; /* n_layers holds the dense ones, not the MTP ones */
    size_t n_experts, n_experts_per_token, n_shared_experts;
    size_t positions_max;      /* max_position_embeddings */
    uint64_t n_params;         /* trainable, MTP layers not counted */
    uint64_t n_active_params;  /* of them, what one token uses */
    uint64_t n_mtp_params;     /* MTP layers, without their copies of embedding and head */
    double flops_per_token;    /* forward and backward at a sequence of positions_max, MaxText's count */
    uint64_t cache_bytes_per_token; /* of a generator */
} dpl_model_info;

/**
 * Sizes of a model. Fields beyond `struct_bytes` are not written. DPL_EINVAL: struct_bytes was not set.
 *
 * Collective: no. Deterministic: yes. Cost: none.
 */
DPL_API dpl_status dpl_model_get_info(const dpl_model *model, dpl_model_info *info);

/**
 * Logits of a batch.
 *
 * @param ids        Tokens, (B, S), each from 0 to vocab - 1. Positions are 0 .. S-1.
 * @param n_batch    B, at least 1.
 * @param n_seq      S, from 1 to positions_max.
 * @param logits_out (B, S, vocab) in fp32.
 *
 * @return DPL_OK; DPL_EINVAL a size or an id out of range; DPL_ENUMERIC a value that is not finite, with its
 *         layer; DPL_ENOMEM.
 *
 * Collective: no. Deterministic: yes; the bits of a row of the batch do not depend on the other rows.
 * Cost: one forward pass.
 */
DPL_API dpl_status dpl_model_forward(dpl_model *model, const int32_t *ids, size_t n_batch, size_t n_seq,
                                     float *logits_out);

/**
 * Cross-entropy of a batch, in nats, without auxiliary losses.
 *
 * @param targets      (B, S): the token that each position predicts; negative: none.
 * @param loss_sum_out Sum over the positions that have a target.
 * @param n_tokens_out Their number; may be NULL.
 *
 * Other parameters, errors and the rest as dpl_model_forward().
 */
DPL_API dpl_status dpl_model_loss(dpl_model *model, const int32_t *ids, const int32_t *targets,
                                  size_t n_batch, size_t n_seq, double *loss_sum_out, size_t *n_tokens_out);

/** Called between steps of long work. Anything but 0 stops it with DPL_EINTR. */
typedef int (*dpl_progress_fn)(void *arg, uint64_t n_done, uint64_t n_total);

/**
 * Mean loss over a text. Each document is cut into windows of `max_target_length` that do not overlap; each of
 * its tokens but the first is predicted exactly once.
 *
 * @param data_path File or folder of the kind `dataset_type` (text or bin) of the configuration.
 * @param config    Used: dataset_type, max_target_length, eval_per_device_batch_size, per_device_batch_size,
 *                  eval_steps (batches at most; -1: all). NULL: defaults.
 * @param progress  NULL: none. Counts batches. `arg` is handed to it.
 * @param loss_out  Nats per token.
 * @param n_tokens_out Tokens predicted; may be NULL.
 *
 * @return As dpl_model_forward(); DPL_EIO, DPL_EFORMAT for the data; DPL_EINTR.
 *
 * Collective: no. Deterministic: yes. Cost: one forward pass a batch.
 */
DPL_API dpl_status dpl_model_eval(dpl_model *model, const char *data_path, const dpl_config *config,
                                  dpl_progress_fn progress, void *arg, double *loss_out,
                                  uint64_t *n_tokens_out);

/**
 * Write a model directory that transformers and dpl_model_open() read: all of it, or nothing under that name.
 *
 * @param path        The directory; made, or replaced if it is a model directory already.
 * @param dtype       "float32" or "bfloat16", of the matrices in the file. Router and its bias stay float32.
 * @param shard_bytes Weights per file at most; 0: one file.
 *
 * @return DPL_OK; DPL_EINVAL dtype, or `path` is something else than a model directory; DPL_EIO; DPL_ENOMEM.
 *
 * Collective: no. Deterministic: yes. Cost: writes all weights and syncs.
 */
DPL_API dpl_status dpl_model_write(dpl_model *model, const char *path, const char *dtype, size_t shard_bytes);

/* Generating text: one token at a time, with a cache of the compressed latent. */
typedef struct dpl_generator dpl_generator;

typedef struct dpl_generator_options {
    size_t struct_bytes;  /* sizeof(dpl_generator_options) */
    size_t tokens_max;    /* prompt and answer together; at most positions_max. Sizes the cache */
    double temperature;   /* 0: always the likeliest token (the lowest id among equals) */
    double top_p;         /* above 0, to 1: the smallest set of tokens with this probability together */
    uint64_t seed;
} dpl_generator_options;

/**
 * Open a generator.
 *
 * @param model         Must outlive it and not change meanwhile.
 * @param generator_out Owned by the caller: dpl_generator_close().
 *
 * @return DPL_OK; DPL_EINVAL an option out of range; DPL_ENOMEM.
 *
 * Collective: no. Deterministic: equal model, options and tokens give equal tokens.
 * Cost: cache_bytes_per_token (dpl_model_info) times tokens_max.
 */
DPL_API dpl_status dpl_generator_open(dpl_model *model, const dpl_generator_options *options,
                                      dpl_generator **generator_out);

/**
 * Feed n_ids >= 1 tokens of a prompt. DPL_EINVAL: an id out of range, or more than tokens_max in all.
 *
 * Collective: no. Deterministic: yes. Cost: one forward pass of n_ids tokens.
 */
DPL_API dpl_status dpl_generator_feed(dpl_generator *generator, const int32_t *ids, size_t n_ids);

/**
 * Draw the next token; it becomes part of the text. DPL_EINVAL: nothing was fed, or tokens_max is reached.
 *
 * Collective: no. Deterministic: yes. Cost: one forward pass of one token.
 */
DPL_API dpl_status dpl_generator_next(dpl_generator *generator, int32_t *id_out);

/** Close and set to NULL. NULL, or a pointer to NULL, is fine. */
DPL_API void dpl_generator_close(dpl_generator **generator);

typedef struct dpl_probe_options {
    size_t struct_bytes;         /* sizeof(dpl_probe_options) */
    int grad;                    /* not 0: gradients too */
    size_t n_steps;              /* optimizer steps on this batch; 0: none */
    const char *const *settings; /* "key=value", over the defaults of a probe */
    size_t n_settings;
} dpl_probe_options;

/**
 * Run a batch through a model and write what happened inside: the means of comparing with other programs.
 *
 * @param path        PATH.
 * @param input_path  A safetensors file: input_ids (B, S), and labels (B, S) if wanted, not shifted, -100 where
 *                    there is no loss (missing: input_ids).
 * @param output_path Written, with: targets, loss_mask, logits, token_loss, loss, total_loss,
 *                    hidden.{embed,L,final}, attn.L, mlp.L, router.L.{logits,ids,weights,counts}, mtp.*; with
 *                    `grad` also grad.NAME and dhidden.L; with `n_steps` N also adamwN.NAME. NAME is the tensor's
 *                    name in the model directory.
 * @param options     NULL: no gradients, no steps. Defaults of a probe: dtype float32, mtp_loss_scaling_factor
 *                    0.3, AdamW at a constant 1e-3 (0.9, 0.95, 1e-8, decay 0.1), no clipping, bias rate 0.
 *
 * @return As dpl_model_open() and dpl_model_forward().
 *
 * Collective: no. Deterministic: yes. Cost: a few passes; everything is held in memory.
 */
DPL_API dpl_status dpl_model_probe(dpl_ctx *ctx, const char *path, const char *input_path,
                                   const char *output_path, const dpl_probe_options *options);

#define DPL_INSPECT_JSON 1u   /* one JSON object instead of lines for people */
#define DPL_INSPECT_MEMORY 2u /* bytes of memory that training will need, kind by kind */

/**
 * Describe a model, or what a configuration would make: family, parameters, types, FLOPs, bytes. The checksums
 * of a checkpoint are verified.
 *
 * @param path     PATH, or a YAML configuration of training, or a config.json.
 * @param settings "key=value" over that configuration; n_settings 0: none.
 * @param flags    DPL_INSPECT_*, or 0.
 * @param text_out Owned by the caller: dpl_text_close().
 *
 * @return As dpl_model_open(); DPL_EFORMAT too where a checksum is wrong.
 *
 * Collective: no. Deterministic: yes. Cost: reads a checkpoint once; never holds the weights.
 */
DPL_API dpl_status dpl_inspect(const char *path, const char *const *settings, size_t n_settings,
                               unsigned flags, char **text_out);

/** Free a text that this library returned, and set to NULL. */
DPL_API void dpl_text_close(char **text);

/**
 * Verify sizes and checksums of a checkpoint.
 *
 * @param path A checkpoint or run directory.
 *
 * @return DPL_OK; DPL_EFORMAT a file is damaged, missing, or there is no manifest; DPL_EIO; DPL_ENOMEM.
 *
 * Collective: no. Deterministic: yes. Cost: reads the checkpoint once.
 */
DPL_API dpl_status dpl_checkpoint_verify(const char *path);

#ifdef __cplusplus
}
#endif
#endif
