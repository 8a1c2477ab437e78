// model.h - the transformer around the MoE layer: configuration, parameters, passes, loss.
//
// The model is deepseek_v3 of Hugging Face transformers: RMSNorm, MLA, leading dense layers,
// sigmoid router with bias and groups, shared experts, multi-token prediction. Its files:
//   config.c   sizes, config.json, FLOPs    params.c  tensors, memory, initial values, names
//   shards.c   parameters over ranks        weights.c model directories   mla.c    attention block
//   block.c    one layer
//   model.c    the stack, loss, backward    decode.c  one token at a time with a latent cache
#pragma once

#include <jansson.h>

#include "comm/comm.h"
#include "cpu/ops.h"
#include "moe/moe.h"

/* ---- config.c ---- */
typedef struct dpl_rope_config {
    double theta;
    bool yarn;
    double factor, beta_fast, beta_slow, original_positions;
    double mscale, mscale_all_dim, attention_factor; // 0: not given
    bool truncate;
} dpl_rope_config;

typedef struct dpl_model_config {
    size_t vocab, d, n_layers, n_dense, n_heads;
    size_t q_lora, kv_lora, d_nope, d_rope, d_v;     // q_lora 0: full query projection
    size_t mlp_f, moe_f, n_experts, top_k, n_shared; // width of a dense layer, of one expert
    size_t n_groups, top_groups;                     // 1, 1: no groups
    size_t n_mtp, max_positions;
    bool sigmoid, routed_bias, norm_topk, tied, attention_bias, rope_interleave;
    double eps, routed_scale;
    dpl_rope_config rope;
} dpl_model_config;

// deepseek_v3 defaults of everything that has one.
void dpl_model_config_init(dpl_model_config *config);
// Sizes and ranges; each message names the option's key.
dpl_status dpl_model_config_check(const dpl_model_config *config);
dpl_status dpl_model_config_from_json(const json_t *object, dpl_model_config *config_out);
json_t *dpl_model_config_to_json(const dpl_model_config *config, dpl_dtype dtype); // new reference
// The field of an option's key as a number; names_out: what 0 and 1 stand for, NULL: themselves.
// False: the key is of no field. And from the option's text, which is a good one.
bool dpl_model_config_get(const dpl_model_config *config, const char *key, double *value_out,
                          const char *const **names_out);
void dpl_model_config_put(dpl_model_config *config, const char *key, const char *text);
bool dpl_model_layer_is_moe(const dpl_model_config *config, size_t layer); // MTP layers included
// FLOPs of a micro-batch's forward and backward, MaxText's count, MTP included; attention's part.
double dpl_model_flops(const dpl_model_config *config, size_t n_batch, size_t n_seq);
double dpl_model_attention_flops(const dpl_model_config *config, size_t n_batch, size_t n_seq);
double dpl_model_softmax_scale(const dpl_model_config *config);
// inv_freq (d_rope / 2) as transformers holds it; returns the factor on cos and sin.
double dpl_rope_frequencies(const dpl_model_config *config, float *inv_freq);

/* ---- parameters (params.c) ---- */
typedef enum dpl_param_id { // a bias follows its matrix; Q to O are the attention block's
    // clang-format off
    DPL_P_EMBED, DPL_P_HEAD, DPL_P_FINAL_NORM,
    DPL_P_ATTN_NORM, DPL_P_Q, DPL_P_Q_A, DPL_P_Q_A_BIAS, DPL_P_Q_A_NORM, DPL_P_Q_B,
    DPL_P_KV_A, DPL_P_KV_A_BIAS, DPL_P_KV_A_NORM, DPL_P_KV_B, DPL_P_O, DPL_P_O_BIAS,
    DPL_P_MLP_NORM, DPL_P_GATE_UP, DPL_P_DOWN, // of dense layers
    DPL_P_ROUTER, DPL_P_EXPERT_GATE_UP, DPL_P_EXPERT_DOWN,
    DPL_P_SHARED_GATE_UP, DPL_P_SHARED_DOWN,
    DPL_P_MTP_ENORM, DPL_P_MTP_HNORM, DPL_P_MTP_PROJ, DPL_P_MTP_NORM,
    DPL_P_N
    // clang-format on
} dpl_param_id;

// A matrix is in panels (ops.h), in gate_up columns of gate and up alternate by 16. Row-major: rows
// that are looked up (the untied embedding), vectors (a norm begins as ones, a bias as zeros).
typedef enum dpl_param_kind {
    DPL_MATRIX,
    DPL_GATE_UP,
    DPL_ROWS,
    DPL_NORM,
    DPL_BIAS
} dpl_param_kind;

typedef struct dpl_param {
    dpl_param_id id;
    dpl_param_kind kind;
    int layer;              // -1: not in a layer. MTP module m is layer n_layers + m
    size_t n_groups, n, k;  // gate_up: n = 2 * round_up(F, 16). A vector: 1, 1, its length
    size_t offset, elems;   // in the layout, padding included; offset a multiple of 64
    size_t disk;            // index of its first tensor on disk
    bool stale;             // of its gradient: see dpl_weight
    bool quantized;         // products use codes instead of bf16
    dpl_quant_weight quant; // those; of a parameter that is sharded while its unit is whole
    uint64_t streams[2];    // of quant
} dpl_param;

// The layout is one array of all parameters, cut into units: those of a layer, or those outside of
// layers. A unit has three spans, each of which is sharded over the fsdp ranks in equal pieces, one
// a rank. The flat arrays have this rank's pieces, one after the other: with one fsdp rank they are
// the layout.
enum { DPL_SPAN_WIDE, DPL_SPAN_DENSE, DPL_SPAN_EXPERTS, DPL_SPAN_N }; // wide: used in fp32
typedef struct dpl_span_of {
    size_t first, elems; // in the layout; multiples of 64 * fsdp * replicas
    bool quantized;      // what is used of all in it is codes, made of fp32
    dpl_comm *replicas;  // ranks that have the same piece
} dpl_span_of;
typedef struct dpl_unit {
    size_t first, elems;
    dpl_span_of span[DPL_SPAN_N];
    // Where the unit is whole: in the flat arrays, or while a pass needs it. NULL: nowhere.
    float *values, *grad;
    uint16_t *copy;
} dpl_unit;

typedef struct dpl_params {
    dpl_param *list;
    size_t n;
    dpl_unit *units; // (layers incl. MTP + 1): outside of layers, then layer by layer
    size_t n_units;
    size_t elems;     // of the layout
    size_t own_elems; // of the flat arrays
    float *master;    // fp32
    float *grad;      // fp32, NULL until training begins
    uint16_t *copy;   // bf16 compute copy, NULL when computing in fp32
} dpl_params;

// Which ranks have what. A communicator that is NULL: this rank alone.
typedef struct dpl_model_ranks {
    dpl_comm *experts;          // they share the experts
    dpl_comm *fsdp;             // every parameter is sharded over them
    dpl_comm *dense, *replicas; // they have the same shards: of all but experts; of experts
    int data, n_data;           // this rank's place among groups of experts x fsdp ranks
    int island;                 // as dpl_ep_ranks_open() has it
} dpl_model_ranks;

// A tensor as it stands in a file: a slice of one parameter under its Hugging Face name.
typedef struct dpl_disk_tensor {
    char name[128];
    int rank;
    int64_t shape[2];
    const dpl_param *param; // NULL: a router bias
    size_t unit;            // that it belongs to; of a copy, that of what it repeats
    size_t group;           // expert, of those of this rank
    int owner;              // the rank of dpl_model.ranks that has it; of what all have, this one
    int part;               // gate_up: 0 gate, 1 up; else 0
    float *bias;            // router bias (E), F32 always on disk
    bool copy_of_shared;    // MTP: repeats embedding or head; must be equal when loaded
} dpl_disk_tensor;

/* ---- a batch, the loss ---- */
typedef struct dpl_batch { // all (B, S), host memory
    size_t n_batch, n_seq;
    const int32_t *ids;
    const int32_t *targets;  // the next id, < 0: no loss. NULL: forward only
    const int32_t *segment;  // document number, 0 padding; NULL: all 1
    const int32_t *position; // restarts per document; NULL: 0..S-1
} dpl_batch;

static inline size_t dpl_batch_tokens(const dpl_batch *batch) {
    return batch->n_batch * batch->n_seq;
}

typedef struct dpl_loss_rule {
    double z_weight;   // z_loss_multiplier
    double mtp_weight; // mtp_loss_scaling_factor
    dpl_balance_kind balance;
    double balance_weight, router_z_weight;
} dpl_loss_rule;

// Sums over one micro-batch; the trainer adds them up and divides.
typedef struct dpl_loss_sums {
    double xent, z;              // sums over tokens with a target
    double n_tokens;             // their number, W
    double mtp_xent, mtp_tokens; // over all depths
    double balance, router_z;    // already weighted, normalized over this micro-batch: that of
                                 // this rank, or its part where they are over all ranks'
} dpl_loss_sums;

/* ---- the model (model.c) ---- */
// Receives what a pass computes, in that order. data: fp32 or int64, host memory.
typedef void (*dpl_probe_fn)(void *arg, const char *name, bool is_int, int rank,
                             const int64_t *shape, const void *data);

typedef struct dpl_model dpl_model;
typedef struct dpl_flow dpl_flow;
struct dpl_model {
    dpl_ctx *ctx;
    dpl_ep_ranks ranks;     // of the experts
    dpl_model_ranks others; // none NULL
    dpl_comm *alone;        // what stands there for nobody
    dpl_flow *flow;         // shards.c
    dpl_model_config config;
    dpl_dtype dtype;   // of compute: F32, or BF16 over fp32 masters
    dpl_moe_shape moe; // of every MoE layer
    dpl_params params;
    const dpl_param **by_id; // (n_layers + n_mtp + 1, DPL_P_N); row 0: outside layers
    dpl_disk_tensor *disk;   // (n_disk), the embedding first
    size_t n_disk;
    float *router_bias; // (layers incl. MTP, E); rows of dense layers unused
    int64_t *counts;    // (layers incl. MTP, E): tokens per expert since the trainer cleared it
    float *cos, *sin;   // (n_positions, d_rope / 2), one block, grown on demand
    size_t n_positions;
    size_t quant_elems, quant_bytes; // parameters that products use in codes, and what those take
    dpl_probe_fn probe;              // NULL: none
    void *probe_arg;
};

/* ---- MXFP8 and NVFP4 (quantize.c) ---- */
// From now on products with the weights of attention and of dense layers and shared experts
// (dense), or of experts, are quantized by a rule; NULL: they are not. Router, norms, embedding and
// head never are. Call before values are there. The bf16 copy of such a weight is not written.
dpl_status dpl_model_quantize(dpl_model *model, const dpl_quant_rule *dense,
                              const dpl_quant_rule *experts);
// A step begins on this rank: what it rounds by chance follows from these alone.
void dpl_model_seed_rounding(dpl_model *model, uint64_t seed, uint64_t step, uint64_t rank);
// It has new values. (Of one that is sharded, codes are made each time that it is gathered.)
void dpl_model_requantize(const dpl_model *model, const dpl_param *param);
void dpl_model_unquantize(dpl_model *model); // frees

dpl_status dpl_model_rope_tables(dpl_model *model, size_t n); // for positions below n
// DPL_ENOMEM: a pass over so many tokens, forward and (train) backward, needs more than there is.
dpl_status dpl_model_check_memory(const dpl_model *model, size_t n_batch, size_t n_seq, bool train);
// Forward and backward of one micro-batch. Gradients += d(loss)/dW with
//   loss = xent_scale * (xent + z) + mtp_scale * mtp_xent + aux_scale * (balance + router_z).
// DPL_ENUMERIC names layer and tensor where the first value that is not finite appears.
dpl_status dpl_model_train_micro(dpl_model *model, const dpl_batch *batch,
                                 const dpl_loss_rule *rule, double xent_scale, double mtp_scale,
                                 double aux_scale, dpl_loss_sums *sums_out);
// In place of a micro-batch of n_seq tokens a row that this rank cannot run: the exchanges that the
// others expect, so that all come to where they agree.
dpl_status dpl_model_sit_out(dpl_model *model, size_t n_seq, bool train);
// The next micro-batch is the last of the step: behind its backward pass the gradients are added up
// over all ranks.
void dpl_model_end_step(dpl_model *model);
// Forward only; counts and biases untouched. logits_out (B, S, V) if not NULL.
dpl_status dpl_model_evaluate(dpl_model *model, const dpl_batch *batch, const dpl_loss_rule *rule,
                              float *logits_out, dpl_loss_sums *sums_out);
// bias += rate * sign(mean(count) - count) per MoE layer.
void dpl_model_update_bias(dpl_model *model, double rate);
// Tokens with a target of depth k of multi-token prediction, 0: of the model itself. Over all
// micro-batches, what xent_scale and mtp_scale (all depths above 0) are divided by.
double dpl_batch_targets(const dpl_batch *batch, size_t k);

/* ---- params.c ---- */
// Parameters are zero until they are initialized or loaded. Closed by dpl_model_close().
dpl_status dpl_model_create(dpl_ctx *ctx, const dpl_model_config *config, dpl_dtype dtype,
                            dpl_model **model_out);
// Spread over ranks, whose communicators outlive it. Collective, as are its passes and writing.
dpl_status dpl_model_create_spread(dpl_ctx *ctx, const dpl_model_ranks *ranks,
                                   const dpl_model_config *config, dpl_dtype dtype,
                                   dpl_model **model_out);
static inline bool dpl_param_is_expert(const dpl_param *param) {
    return param->id == DPL_P_EXPERT_GATE_UP || param->id == DPL_P_EXPERT_DOWN;
}
static inline bool dpl_disk_is_here(const dpl_model *model, const dpl_disk_tensor *tensor) {
    return tensor->owner == model->ranks.comm->rank;
}
// Elements, without padding, with n_experts of the experts; a double: exact, and it does not wrap.
// multiplied: of the matrices that FLOPs are counted of.
double dpl_params_count(const dpl_model_config *config, bool mtp, size_t n_experts,
                        bool multiplied);
// Trainable parameters without MTP; those of a token: without the E - K experts that it leaves out.
static inline uint64_t dpl_model_param_count(const dpl_model_config *config) {
    return (uint64_t)dpl_params_count(config, false, config->n_experts, false);
}
static inline uint64_t dpl_model_active_param_count(const dpl_model_config *config) {
    return (uint64_t)dpl_params_count(config, false, config->top_k, false);
}
// std 0: by each matrix's fan-in, or what MaxText takes for it; else N(0, std) everywhere.
dpl_status dpl_model_init(dpl_model *model, bool maxtext, double std, uint64_t seed);
void dpl_model_refresh(dpl_model *model);              // bf16 copies; after any change of masters
void dpl_model_changed(dpl_model *model);              // or this, where they are up to date
dpl_status dpl_model_begin_training(dpl_model *model); // gradients, zeroed
// A micro-batch adds to all gradients, the first one after dpl_model_zero_grads() replaces them.
void dpl_model_zero_grads(dpl_model *model);
// Of one unit: what the next contribution replaces, or is zeroed for it; zeroes those that nothing
// has contributed to.
void dpl_model_renew_grads(dpl_model *model, size_t unit);
void dpl_model_settle_grads(dpl_model *model, size_t unit);
// The parameter `id` of a layer (-1: outside layers), NULL if the model has none.
static inline const dpl_param *dpl_model_param(const dpl_model *model, int layer, dpl_param_id id) {
    return model->by_id[(size_t)(layer + 1) * DPL_P_N + id];
}
// Its compute weight, its fp32 values, its gradient (NULL: not training).
dpl_weight dpl_model_weight(const dpl_model *model, const dpl_param *param);
static inline dpl_unit *dpl_model_unit(const dpl_model *model, const dpl_param *param) {
    return &model->params.units[param->layer + 1];
}
static inline float *dpl_model_values(const dpl_model *model, const dpl_param *param) {
    const dpl_unit *unit = dpl_model_unit(model, param);
    return unit->values + (param->offset - unit->first);
}
static inline float *dpl_model_grad(const dpl_model *model, const dpl_param *param) {
    const dpl_unit *unit = param ? dpl_model_unit(model, param) : NULL;
    return unit && unit->grad ? unit->grad + (param->offset - unit->first) : NULL;
}
static inline float *dpl_model_bias(const dpl_model *model, size_t layer) {
    return model->router_bias + layer * model->config.n_experts;
}
// Between row-major `values` and the tensor's slice of an array in the layout, or of its part that
// begins with element `first`.
void dpl_disk_gather_from(const dpl_disk_tensor *tensor, const float *part, size_t first,
                          float *values);
void dpl_disk_scatter_to(const dpl_disk_tensor *tensor, float *part, size_t first,
                         const float *values);
static inline void dpl_disk_gather(const dpl_disk_tensor *tensor, const float *layout,
                                   float *values) {
    dpl_disk_gather_from(tensor, layout, 0, values);
}
static inline void dpl_disk_scatter(const dpl_disk_tensor *tensor, float *layout,
                                    const float *values) {
    dpl_disk_scatter_to(tensor, layout, 0, values);
}
// Of what this rank has of the tensor in a flat array.
bool dpl_disk_is_finite(const dpl_model *model, const dpl_disk_tensor *tensor, const float *flat);
static inline size_t dpl_disk_elems(const dpl_disk_tensor *tensor) {
    return (size_t)(tensor->shape[0] * tensor->shape[1]);
}

/* ---- shards.c: parameters over the ranks of fsdp, gradients over all ---- */
dpl_status dpl_shards_open(dpl_model *model); // when the flat arrays are there
// Some are quantized now: memory for the codes of what is gathered; *bytes_out of it.
dpl_status dpl_shards_quantize(dpl_model *model, size_t *bytes_out);
void dpl_shards_close(dpl_model *model);
static inline size_t dpl_model_shards(const dpl_model *model) {
    return (size_t)model->others.fsdp->n_ranks;
}
size_t dpl_shards_bytes(const dpl_model *model); // of what is gathered, and its gradients
// What this rank has of a parameter: n elements, in the flat arrays from *own_out.
size_t dpl_param_own(const dpl_model *model, const dpl_param *param, size_t *own_out);
// A pass goes through the units up to n_units in order and, with `train`, through all in reverse:
// enter() brings a unit to this rank and asks for the next one, leave() follows backward. finish()
// takes the way that is left without computing, and gives `status`, or what became of its own.
// Without start(), enter() and leave() do nothing.
void dpl_flow_start(dpl_model *model, size_t n_units, bool train);
dpl_status dpl_flow_enter(dpl_model *model, size_t unit);
dpl_status dpl_flow_leave(dpl_model *model, size_t unit);
dpl_status dpl_flow_finish(dpl_model *model, dpl_status status);
// A unit of a flat array as a whole: where it lies already, else `room`. To be filled, then put().
float *dpl_unit_room(const dpl_model *model, size_t unit, float *flat, float *room);
void dpl_unit_put(const dpl_model *model, size_t unit, const float *whole, float *flat);
// Elements that `room` has to have; 0: units are whole in the flat arrays.
size_t dpl_unit_room_elems(const dpl_model *model);
// Units `first` .. to the fsdp ranks 0 .., each whole in the `room` of its rank. Collective.
dpl_status dpl_unit_deal(const dpl_model *model, size_t first, const float *flat, float *room);

/* ---- weights.c ---- */
// Strict: every tensor of the model exactly once, unknown ones are errors.
dpl_status dpl_model_load(dpl_model *model, const char *dir);
// Into an existing folder, of one rank.
dpl_status dpl_model_save(dpl_model *model, const char *dir, dpl_dtype dtype, size_t shard_bytes);
// In fp32, by all ranks of the mesh, each of which writes a part, after an error too. The path of
// what this rank wrote as a part goes to part_out (PATH_MAX): "" where it has none. Collective.
dpl_status dpl_model_save_part(dpl_model *model, const char *dir, char *part_out);
// Of a model directory, or a file like its config.json. dtype_out NULL: not wanted.
dpl_status dpl_model_read_config(const char *at, dpl_model_config *config_out,
                                 dpl_dtype *dtype_out);
// Flat arrays (moments) in one file, under disk names behind a prefix for each array. Of several
// ranks as above.
dpl_status dpl_model_save_flat(dpl_model *model, const char *path, const char *const *prefixes,
                               float *const *flats, size_t n_flats, char *part_out);
dpl_status dpl_model_load_flat(dpl_model *model, const char *path, const char *const *prefixes,
                               float *const *flats, size_t n_flats);

/* ---- decode.c ---- */
typedef struct dpl_decoder dpl_decoder;
dpl_status dpl_decoder_open(dpl_model *model, size_t max_tokens, dpl_decoder **decoder_out);
void dpl_decoder_close(dpl_decoder **decoder);
// Feeds n more tokens; logits_out (V) of the last one.
dpl_status dpl_decoder_feed(dpl_decoder *decoder, const int32_t *ids, size_t n, float *logits_out);
// Temperature 0 is argmax (lowest id among equals); top_p in (0, 1]. Draw number `draw` of `seed`.
int32_t dpl_sample(const float *logits, size_t vocab, double temperature, double top_p,
                   uint64_t seed, uint64_t draw);
