// train.h - the step and the loop around the model.
//
// Files, in the order of use:
//   options.c    keys of MaxText and our own     model_options.c  from keys to the model's sizes
//   data.c       batches                         optimizer.c      learning rate, clipping, AdamW
//   step.c       an optimizer step, evaluation   checkpoint.c     what a run leaves behind
//   metrics.c    log line, metrics row           trainer.c        opening, resuming
//   loop.c       the run
#pragma once

#include <limits.h>
#include <stdatomic.h>

#include "io/io.h"
#include "model/model.h"

/* ---- options (options.c) ---- */
// kind, key, default, range (numbers: "LOW .. HIGH", "LOW ..", "> LOW") or choices, help.
// Kinds: I integer, F number, B true|false, T text, C one of the choices. Defaults are MaxText's.
// clang-format off
#define DPL_OPTION_MAP(X) \
    X(T, base_output_directory, "", "", "Folder of the run directories; empty: runs.") \
    X(T, run_name, "", "", "Name of the run directory; empty: run. A run there is resumed.") \
    X(I, steps, "150001", "-1 ..", "Optimizer steps in all; -1: learning_rate_schedule_steps.") \
    X(I, ranks, "1", "1 .. 4096", "Ranks that train together, threads; under MPI its processes.") \
    X(I, ici_data_parallelism, "1", "-1 ..", "Ranks along data, which hold all; -1: the rest.") \
    X(I, ici_fsdp_parallelism, "-1", "-1 ..", "Ranks that share all parameters; -1: the rest.") \
    X(I, ici_expert_parallelism, "1", "-1 ..", "Ranks that share the experts; -1: the rest.") \
    X(I, dcn_data_parallelism, "-1", "-1 ..", "Times so many along data; -1: 1.") \
    X(I, dcn_fsdp_parallelism, "1", "-1 ..", "Times so many along fsdp; -1: 1.") \
    X(I, dcn_expert_parallelism, "1", "-1 ..", "Times so many along expert; -1: 1.") \
    X(F, comm_timeout_s, "300", "> 0", "Seconds without a word after which a rank is given up.") \
    X(I, lane_threads, "0", "0 .. 1", "1: a thread a rank lets messages move under the compute.") \
    X(I, ep_chunks, "1", "1 .. 1024", "Parts in which a layer's tokens go to experts elsewhere.") \
    X(C, ep_wire, "dtype", "dtype|mxfp8", "Rows of tokens and gradients on their way to experts.") \
    X(B, ep_combine_reduce, "false", "", "Sum rows on their host before they go to another one.") \
    X(B, ep_shared_memory, "true", "", "false: messages between ranks of one host, too.") \
    X(I, threads, "0", "0 .. 4096", "Threads; 0: as many as allowed. Results are the same.") \
    X(C, decoder_block, "llama2", "deepseek|llama2", "Kind of layer; train needs deepseek.") \
    X(C, attention_type, "global", "mla|global", "Kind of attention; train needs mla.") \
    X(I, vocab_size, "32000", "1 .. 1073741824", "Token ids are 0 to vocab_size - 1; bytes: 256.") \
    X(I, base_emb_dim, "2048", "1 .. 1048576", "Width of the model.") \
    X(I, base_num_decoder_layers, "16", "1 .. 10000", "Decoder layers, dense and MoE; MTP aside.") \
    X(I, first_num_dense_layers, "0", "0 .. 10000", "Leading layers that have a dense MLP.") \
    X(I, base_mlp_dim, "7168", "1 .. 16777216", "Hidden width of a dense MLP.") \
    X(I, base_moe_mlp_dim, "-1", "-1 .. 1048576", "Hidden width of one expert; -1: base_mlp_dim.") \
    X(I, num_experts, "1", "1 .. 65536", "Routed experts of an MoE layer.") \
    X(I, num_experts_per_tok, "1", "1 .. 65536", "Experts that compute each token.") \
    X(I, shared_experts, "0", "0 .. 1024", "Experts that compute every token, as one wide MLP.") \
    X(F, routed_scaling_factor, "1.0", "", "Multiplies the weights of the routed experts.") \
    X(C, routed_score_func, "", "sigmoid|softmax|", "From router logits to scores.") \
    X(B, routed_bias, "false", "", "Choose experts by score plus a bias that has no gradient.") \
    X(F, routed_bias_update_rate, "0.0", "0 ..", "Step of that bias towards equal loads.") \
    X(B, norm_topk_prob, "false", "", "Divide the weights of a token's experts by their sum.") \
    X(I, n_routing_groups, "-1", "-1 .. 65536", "Groups of experts, chosen first; -1: none.") \
    X(I, topk_routing_group, "-1", "-1 .. 65536", "Groups that stay; -1: no groups.") \
    X(F, load_balance_loss_weight, "0.0", "0 ..", "Weight of the load balance loss.") \
    X(C, load_balance_scope, "sequence", "sequence|batch", "What the balance loss averages over.") \
    X(B, moe_use_megatron_seq_aux_loss, "false", "", "Megatron's balance loss; sigmoid only.") \
    X(F, router_z_loss_weight, "0.0", "0 ..", "Weight of the squared logsumexp of router logits.") \
    X(I, base_num_query_heads, "16", "1 .. 65536", "Attention heads.") \
    X(I, q_lora_rank, "0", "0 .. 1048576", "Rank of the query projection; 0: full.") \
    X(I, kv_lora_rank, "512", "1 .. 1048576", "Rank of keys and values: width of the cache.") \
    X(I, qk_nope_head_dim, "128", "1 .. 65536", "Width of a head's unrotated query and key.") \
    X(I, qk_rope_head_dim, "64", "2 .. 65536", "Width of the rotated part.") \
    X(I, v_head_dim, "128", "1 .. 65536", "Width of a head's value.") \
    X(C, rope_type, "default", "default|yarn", "Rotary frequencies: plain, or YaRN.") \
    X(F, rope_max_timescale, "10000", "> 1", "Base of the rotary frequencies (theta).") \
    X(B, rope_interleave, "true", "", "Rotate pairs (2i, 2i+1), as DeepSeek, instead of halves.") \
    X(F, rope_factor, "40", "1 ..", "YaRN: how many times longer sequences become.") \
    X(F, beta_fast, "32", "> 0", "YaRN: rotations above which a frequency stays.") \
    X(F, beta_slow, "1", "> 0", "YaRN: rotations below which it is divided by rope_factor.") \
    X(F, mscale, "1.0", "0 ..", "YaRN: growth of the softmax scale with rope_factor.") \
    X(B, rope_truncate, "true", "", "YaRN: round the range between beta_slow and beta_fast.") \
    X(I, max_position_embeddings, "163840", "1 .. 2147483647", "Longest sequence of the model.") \
    X(I, original_max_position_embeddings, "4096", "1 .. 2147483647", "YaRN: the longest before.") \
    X(F, normalization_layer_epsilon, "1e-5", "> 0", "Epsilon of RMSNorm.") \
    X(B, logits_via_embedding, "false", "", "Use the embedding as output head.") \
    X(I, mtp_num_layers, "0", "0 .. 64", "Multi-token prediction depths.") \
    X(F, mtp_loss_scaling_factor, "0.1", "0 ..", "Weight of the multi-token prediction loss.") \
    X(C, dtype, "bfloat16", "float32|bfloat16", "Format of weights and activations in products.") \
    X(C, quantization, "", "none|mxfp8|nvfp4|", \
      "Products with dense weights, of shared experts too.") \
    X(C, gmm_quantization, "", "none|mxfp8|nvfp4|", "Products with the weights of experts.") \
    X(C, mx_scale_rule, "up", "up|floor", "MXFP8 scales: no element saturates, or OCP's.") \
    X(C, mx_grad_format, "e4m3", "e4m3|e5m2", "MXFP8 elements of gradients of activations.") \
    X(C, matmul_precision, "default", "default|highest|bf16_x6|bf16_x3", \
      "fp32 products: by multiply-adds, or as 6 or 3 products of bf16.") \
    X(C, weight_init, "fan_in", "fan_in|maxtext|normal", "Fan-in, MaxText's, or N(0, init_std).") \
    X(F, init_std, "0.02", "> 0", "Standard deviation of weight_init=normal.") \
    X(I, init_weights_seed, "0", "0 ..", "Seed of the initial weights.") \
    X(T, load_parameters_path, "", "", "Start from the weights of this model or checkpoint.") \
    X(T, load_full_state_path, "", "", "Start from everything in this checkpoint directory.") \
    X(C, dataset_type, "synthetic", "synthetic|text|bin|safetensors", "Kind of training data.") \
    X(T, dataset_path, "", "", "Text file, token shard, folder of them; or safetensors file.") \
    X(T, eval_dataset_path, "", "", "Data of evaluation; empty: the last part of dataset_path.") \
    X(F, eval_split_fraction, "0.1", "0 .. 0.9", "How much of dataset_path that is; 0: nothing.") \
    X(I, dataset_token_bytes, "0", "0 .. 4", "Token width in headerless shards; 0: has header.") \
    X(B, packing, "true", "", "Fill sequences with documents; false: one each, then padding.") \
    X(B, attend_across_documents, "false", "", "Ignore the borders of documents.") \
    X(B, enable_data_shuffling, "true", "", "Draw the sequences in a random order each epoch.") \
    X(I, data_shuffle_seed, "0", "0 ..", "Seed of that order.") \
    X(I, num_epoch, "0", "0 ..", "End after this many passes over the data; 0: after steps.") \
    X(I, reuse_example_batch, "0", "0 .. 1", "1: every step uses the first batch.") \
    X(F, per_device_batch_size, "12", "1 .. 1048576", "Sequences of a micro-batch: whole number.") \
    X(I, max_target_length, "2048", "1 .. 16777216", "Tokens of a sequence.") \
    X(I, gradient_accumulation_steps, "1", "1 .. 65536", "Micro-batches of an optimizer step.") \
    X(F, learning_rate, "3e-5", "0 ..", "Highest learning rate.") \
    X(I, learning_rate_schedule_steps, "-1", "-1 ..", "Schedule length, then rate 0; -1: steps.") \
    X(F, warmup_steps_fraction, "0.1", "0 .. 1", "Part of the schedule that warms up.") \
    X(F, learning_rate_final_fraction, "0.1", "0 ..", "Last rate over learning_rate.") \
    X(C, lr_schedule_type, "cosine", "cosine|wsd", "Cosine, or constant with a decay at the end.") \
    X(F, wsd_decay_steps_fraction, "0.1", "0 .. 1", "wsd: part of the schedule that decays.") \
    X(C, wsd_decay_style, "linear", "linear|cosine", "wsd: shape of the decay.") \
    X(C, opt_type, "adamw", "adamw", "Optimizer.") \
    X(F, adam_b1, "0.9", "0 .. 0.999999999", "Decay of the first moment.") \
    X(F, adam_b2, "0.95", "0 .. 0.999999999", "Decay of the second moment.") \
    X(F, adam_eps, "1e-8", "0 ..", "Added to the root of the second moment.") \
    X(F, adam_eps_root, "0", "0 ..", "Added under that root.") \
    X(F, adam_weight_decay, "0.1", "0 ..", "Decoupled weight decay, times the learning rate.") \
    X(T, adamw_mask, "[]", "", "Regular expressions of tensors without weight decay.") \
    X(T, trainable_parameters_mask, "[]", "", "Regular expressions of tensors to train; []: all.") \
    X(F, gradient_clipping_threshold, "1.0", "0 ..", "Largest gradient norm; 0: no clipping.") \
    X(F, z_loss_multiplier, "0.0", "0 ..", "Weight of the squared logsumexp of the logits.") \
    X(I, eval_interval, "-1", "-1 ..", "Evaluate after every so many steps; 0, -1: never.") \
    X(I, eval_steps, "-1", "-1 ..", "Batches of an evaluation; -1: all data.") \
    X(I, eval_start_step, "0", "0 ..", "First step after which to evaluate.") \
    X(F, eval_per_device_batch_size, "0", "0 .. 1048576", "Evaluation batch; 0: as in training.") \
    X(F, target_eval_loss, "0.0", "0 ..", "Stop at this evaluation loss or less; 0: never.") \
    X(B, enable_checkpointing, "true", "", "Write checkpoints, and resume from those of the run.") \
    X(I, checkpoint_period, "10000", "1 ..", "Steps between checkpoints.") \
    X(I, max_num_checkpoints_to_keep, "0", "0 ..", "Older checkpoints are removed; 0: keep all.") \
    X(B, save_checkpoint_on_start, "true", "", "Write a checkpoint after step 0 too.") \
    X(B, save_checkpoint_on_completion, "true", "", "Write a checkpoint at the end.") \
    X(C, remat_policy, "none", "none", "Activations to compute again in the backward pass.") \
    X(B, step_profile, "false", "", "Print where the time of each step went.")
// clang-format on

typedef int64_t dpl_opt_I;
typedef double dpl_opt_F;
typedef bool dpl_opt_B;
typedef const char *dpl_opt_T;
typedef const char *dpl_opt_C;
typedef struct dpl_options {
#define DPL_OPTION_FIELD(kind, key, ...) dpl_opt_##kind key;
    DPL_OPTION_MAP(DPL_OPTION_FIELD)
} dpl_options;
typedef enum dpl_option_id {
#define DPL_OPTION_ENUM(kind, key, ...) DPL_OPT_##key,
    DPL_OPTION_MAP(DPL_OPTION_ENUM) DPL_OPT_N
} dpl_option_id;

struct dpl_config {
    dpl_options o;
    char *text[DPL_OPT_N]; // canonical text of each value; T and C fields of `o` point here
    bool given[DPL_OPT_N]; // set by a file or an assignment
};

// What there is after a failure is the caller's too.
dpl_status dpl_config_clone(const dpl_config *from, dpl_config **config_out);
dpl_status dpl_config_put(dpl_config *config, const char *key, const char *value);
dpl_status dpl_config_save(const dpl_config *config, const char *path); // as YAML, every key
static inline bool dpl_is(const char *text, const char *choice) {
    return !strcmp(text, choice);
}
static inline dpl_dtype dpl_options_dtype(const dpl_options *o) {
    return dpl_is(o->dtype, "float32") ? DPL_F32 : DPL_BF16;
}

// Sizes of the model by the options alone.
dpl_status dpl_config_model(const dpl_config *config, dpl_model_config *model_out);
// Sizes of the model in `dir`; keys that were given must agree, the others take its values.
dpl_status dpl_config_adopt(dpl_config *config, const char *dir, dpl_model_config *model_out);
// What no single key can say: combinations that are wrong or not supported.
dpl_status dpl_options_check(const dpl_options *o);
void dpl_options_warn(const dpl_options *o, const dpl_model_config *model);
dpl_status dpl_options_quantize(const dpl_options *o, dpl_model *model); // before values are there
dpl_loss_rule dpl_options_loss(const dpl_options *o);
// A fresh model's values, by weight_init, init_std and init_weights_seed.
dpl_status dpl_options_init(const dpl_options *o, dpl_model *model);

/* ---- the mesh of ranks (mesh.c) ---- */
typedef struct dpl_mesh {
    dpl_comm *world, *whole; // all; those that have the model between them: of one place along data
    dpl_model_ranks model;
    int n_data, n_fsdp, n_expert; // rank = (data * n_fsdp + fsdp) * n_expert + expert
} dpl_mesh;
// comm NULL: one rank. Collective. `mesh` is zero before, and closed after a failure too.
dpl_status dpl_mesh_open(const dpl_options *o, dpl_comm *comm, dpl_mesh *mesh);
// What does not fit the mesh.
dpl_status dpl_mesh_check(const dpl_mesh *mesh, size_t n_experts);
void dpl_mesh_close(dpl_mesh *mesh);
bool dpl_mesh_is_first(const dpl_mesh *mesh); // the rank that writes files and speaks
// DPL_EINVAL names a rank whose configuration, or what else decides (`more`), is another.
dpl_status dpl_mesh_compare(const dpl_mesh *mesh, const dpl_config *config, const uint64_t more[4]);
// Over the ranks, in their order. Collective.
dpl_status dpl_mesh_sum_squares(const dpl_mesh *mesh, const dpl_model *model, double *squares);

/* ---- data (data.c) ---- */
typedef struct dpl_tokens { // (n_batch, n_seq) each, one owned block of memory
    size_t n_batch, n_seq;
    int32_t *ids, *targets, *segment, *position;
} dpl_tokens;
// Rows without any token yet, each one document.
dpl_status dpl_tokens_alloc(size_t n_batch, size_t n_seq, dpl_tokens *tokens);
void dpl_tokens_free(dpl_tokens *tokens);
void dpl_tokens_copy_row(const dpl_tokens *from, size_t from_row, dpl_tokens *to, size_t to_row);

typedef struct dpl_token_span { // tokens that windows do not reach across; one a document
    uint64_t first;             // in the source
    uint64_t samples_before;
} dpl_token_span;
typedef struct dpl_token_set { // windows, or the rows of a fixed batch
    const dpl_source *source;
    dpl_token_span *spans;
    size_t n_spans;
    uint64_t end;       // of the last span
    uint64_t n_samples; // 0: no data
    dpl_tokens fixed;   // n_batch 0: windows
} dpl_token_set;
typedef struct dpl_data {
    const dpl_options *o;
    dpl_source *source, *eval_source;
    dpl_token_set train, eval;
    int32_t *window; // S + 1 tokens
} dpl_data;
// `n_batch` rows are what a training step takes: a fixed batch must have that many. `data` is zero
// before, and closed by the caller after a failure too.
dpl_status dpl_data_open(const dpl_options *o, size_t n_batch, size_t vocab, dpl_data *data);
void dpl_data_close(dpl_data *data);
uint64_t dpl_data_samples(const dpl_data *data, bool eval); // of an epoch; 0: no such data
// Samples position + first, ... of the endless sequence of epochs, in the shuffled order.
void dpl_data_train(const dpl_data *data, uint64_t position, size_t first, dpl_tokens *tokens);
// Evaluation samples first, first + 1, ..; rows past the last are padding.
void dpl_data_eval(const dpl_data *data, uint64_t first, dpl_tokens *tokens);
// The i-th of 0 .. n-1 in the order of (seed, epoch): a permutation that needs no memory.
uint64_t dpl_shuffle(uint64_t n, uint64_t seed, uint64_t epoch, uint64_t i);

/* ---- optimizer (optimizer.c) ---- */
// Of a schedule of `length` steps, after `step` updates.
double dpl_schedule_rate(const dpl_options *o, int64_t length, int64_t step);
typedef struct dpl_optimizer {
    dpl_model *model;
    const dpl_options *o;
    float *m, *v;          // flat
    bool *trains, *decays; // (n params)
    double *squares;       // (n params)
    int64_t n_updates;
} dpl_optimizer;
// As dpl_data_open() and dpl_data_close().
dpl_status dpl_optimizer_open(const dpl_options *o, dpl_model *model, dpl_optimizer *optimizer);
void dpl_optimizer_close(dpl_optimizer *optimizer);
// L2 norm of the gradients that train. DPL_ENUMERIC names the tensor whose gradient is not finite.
// mesh NULL: one rank.
dpl_status dpl_optimizer_norm(dpl_optimizer *optimizer, const dpl_mesh *mesh, double *norm_out);
// Clips gradients of this norm, and gives the norm after that.
double dpl_optimizer_apply(dpl_optimizer *optimizer, double rate, double norm);

/* ---- the trainer (trainer.c, step.c, loop.c) ---- */
struct dpl_trainer {
    dpl_ctx *ctx;
    dpl_config *config; // our own copy, resolved
    const dpl_options *o;
    dpl_mesh mesh;
    dpl_model *model;
    dpl_data data;
    dpl_optimizer optimizer;
    dpl_loss_rule rule;
    dpl_tokens batch, micro, eval;
    int64_t step, n_steps;         // the next one; where training ends
    int64_t schedule_length;       // in steps
    int64_t saved;                 // the newest checkpoint's step, -1: none
    uint64_t position;             // training samples used so far
    double step_flops, peak_flops; // of one step; of this machine per second, 0 until measured
    char run_dir[PATH_MAX];
    int lock_fd;      // of the run directory; -1: not locked
    atomic_bool stop; // set by signal handlers and other threads
    // While dpl_trainer_run() goes on: of metrics.jsonl and log.txt, whose newest line this is.
    dpl_trainer_events events;
    FILE *log, *metrics;
    char line[PATH_MAX + 128];
    bool done; // the evaluation loss reached its target
};

// Gradients and losses of a batch, one micro-batch after the other; of one alone, `micro` may be
// NULL. Tokens per expert are counted from 0. Of all ranks of the mesh; NULL: one rank.
dpl_status dpl_train_pass(dpl_model *model, const dpl_mesh *mesh, const dpl_loss_rule *rule,
                          const dpl_tokens *batch, dpl_tokens *micro, dpl_loss_sums *sums_out);
// Loss over `most` batches of the size of `tokens`, of all ranks together (0, -1: all), of
// evaluation data.
dpl_status dpl_evaluate(dpl_model *model, const dpl_mesh *mesh, const dpl_data *data,
                        const dpl_loss_rule *rule, int64_t most, dpl_tokens *tokens,
                        dpl_progress_fn progress, void *arg, dpl_eval_metrics *metrics_out);
void dpl_trainer_say_alive(void *world); // for dpl_busy_hook(): a communicator
// DPL_EIO: another process has the run directory. One that is not there is left for the next call.
dpl_status dpl_trainer_lock(dpl_trainer *t);

/* ---- checkpoints (checkpoint.c) ---- */
dpl_status dpl_checkpoint_load(dpl_trainer *t, const char *dir); // a verified one, everything
bool dpl_has_file(const char *dir, const char *name);            // or folder
// The newest checkpoint of a run directory, verified; "" if none. A damaged one is an error
// that names the newest good one before it. What a killed process left is removed if `clean`.
dpl_status dpl_checkpoint_newest(const char *run_dir, bool clean, char *dir_out);
// The model directory of PATH (dropless.h), with a slash at its end; a checkpoint is verified.
dpl_status dpl_checkpoint_resolve(const char *path, char *dir_out);

/* ---- metrics (metrics.c) ---- */
void dpl_metrics_line(const dpl_trainer *t, const dpl_step_metrics *m, char *text, size_t size);
void dpl_metrics_profile(const dpl_trainer *t, char *text, size_t size);
// One row, a new reference; numbers that are not finite become null. NULL without memory.
json_t *dpl_metrics_row(const dpl_trainer *t, const dpl_step_metrics *m);
json_t *dpl_metrics_eval_row(int64_t step, const dpl_eval_metrics *m);
// Drops the rows after `step`, without `eval` also its evaluation, and half a line at the end.
dpl_status dpl_metrics_cut(const char *path, int64_t step, bool eval);
// snprintf with a decimal point, whatever the locale.
int dpl_format(char *text, size_t size, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
