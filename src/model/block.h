// block.h - one decoder layer, inside src/model: activations by name, attention block, block.
//
// One table names what a layer keeps for its backward pass. The residual stream is fp32 in every
// compute type.
#pragma once

#include "model/model.h"

// id, width of a row. INPUT and MLP_INPUT are the residual stream.
// clang-format off
#define DPL_ACT_MAP(X)                                    \
    X(INPUT, c->d)                                        \
    X(ATTN_NORM, c->d)                                    \
    X(Q_A, c->q_lora)                                     \
    X(Q_A_NORM, c->q_lora)                                \
    X(Q, c->n_heads * (c->d_nope + c->d_rope))            \
    X(KV_A, c->kv_lora + c->d_rope)                       \
    X(KV_A_NORM, c->kv_lora)                              \
    X(KV, c->n_heads * (c->d_nope + c->d_v))              \
    X(CONTEXT, c->n_heads * c->d_v)                       \
    X(MLP_INPUT, c->d)                                    \
    X(MLP_NORM, c->d)                                     \
    X(MLPWI, dpl_gate_up_width(c->mlp_f))                 \
    X(MLP_HIDDEN, c->mlp_f)
// clang-format on
#define DPL_ACT_ENUM(id, width) DPL_ACT_##id,
typedef enum dpl_act_id { DPL_ACT_MAP(DPL_ACT_ENUM) DPL_ACT_N } dpl_act_id;
#undef DPL_ACT_ENUM
size_t dpl_act_width(const dpl_model_config *config, dpl_act_id id);

typedef struct dpl_block_saved {
    dpl_mat act[DPL_ACT_N];
    float *rstd_attn, *rstd_q, *rstd_kv, *rstd_mlp; // (T)
    float *lse;                                     // (B*H*S)
    dpl_moe_saved moe;
} dpl_block_saved;

/* ---- block.c: what all of src/model is made of. Blocks come from the step arena. ---- */
// Batches here were checked and have their positions.
dpl_mat dpl_act_alloc(dpl_model *model, size_t n_rows, size_t width, bool f32);
// y = x W^T + bias, if the matrix `id` has one.
void dpl_linear_forward(dpl_model *model, int layer, dpl_param_id id, dpl_mat x, size_t n_rows,
                        dpl_mat y);
// dx = (or +=) dy W, dW += dy^T x, dbias +=
void dpl_linear_backward(dpl_model *model, int layer, dpl_param_id id, dpl_mat dy, dpl_mat x,
                         size_t n_rows, dpl_mat dx, bool accumulate);
// Returns rstd (rows).
float *dpl_norm_forward(dpl_model *model, int layer, dpl_param_id id, dpl_mat x, size_t n_rows,
                        dpl_mat y);
// The same of sum = x + more, both F32; sum may be one of them.
float *dpl_add_norm_forward(dpl_model *model, int layer, dpl_param_id id, dpl_mat x, dpl_mat more,
                            size_t n_rows, dpl_mat sum, dpl_mat y);
// dx = (or +=), dgain +=
void dpl_norm_backward(dpl_model *model, int layer, dpl_param_id id, dpl_mat dy, dpl_mat x,
                       const float *rstd, size_t n_rows, dpl_mat dx, bool accumulate);

// One layer's cache of incremental decoding: row p belongs to position p.
typedef struct dpl_mla_cache {
    float *latent; // (max, kv_lora) after its norm
    float *k_rope; // (max, d_rope) rotated
    float *kv_b;   // (H * (d_nope + d_v), kv_lora) row-major, absorbed into query and output
    size_t first;  // position of the first token of this call
} dpl_mla_cache;
// x -> out (T, D), both F32. aux NULL: no auxiliary losses. cache: NULL, or of the one sequence
// that the tokens continue; it is filled.
dpl_status dpl_block_forward(dpl_model *model, int layer, const dpl_batch *batch,
                             const dpl_aux *aux, const dpl_mla_cache *cache, dpl_mat x, dpl_mat out,
                             dpl_block_saved *saved_out);
// dx: gradient of out on entry, of x on return.
dpl_status dpl_block_backward(dpl_model *model, int layer, const dpl_batch *batch,
                              const dpl_aux *aux, dpl_block_saved *saved, dpl_mat dx);

/* ---- mla.c ---- */
// act[INPUT] -> act[MLP_INPUT] = attention, to which the caller adds the input; the blocks between
// are there already.
void dpl_mla_forward(dpl_model *model, int layer, const dpl_batch *batch,
                     const dpl_mla_cache *cache, dpl_block_saved *saved);
// dx (T, D) F32: gradient of act[MLP_INPUT] on entry, of act[INPUT] on return.
void dpl_mla_backward(dpl_model *model, int layer, const dpl_batch *batch,
                      const dpl_block_saved *saved, dpl_mat dx);

/* ---- model.c ---- */
// Sends an activation to model->probe as "stem.layer" (layer < 0: "stem"), shape (B, S, width).
void dpl_probe_mat(dpl_model *model, const char *stem, int layer, const dpl_batch *batch,
                   dpl_mat mat, size_t width);
void dpl_probe_routing(dpl_model *model, int layer, const dpl_moe_saved *saved);
typedef struct dpl_layers { // one pass through all layers
    dpl_batch batch;
    const dpl_aux *aux;          // NULL: no auxiliary losses
    const dpl_mla_cache *caches; // (L): the pass decodes; NULL: it does not
    dpl_block_saved *blocks;     // (L), kept for backward; NULL: nothing is kept
    bool *bad;                   // NULL, or: look at each output; set it and stop where one is bad
    dpl_mat *x;                  // (L + 1): residual stream before layer 0, 1, ..., after the last
    size_t n_done;               // so many of these are there, after an error too; the bad one not
} dpl_layers;
// Embedding and layers. The caller sets the fields above x.
dpl_status dpl_layers_forward(dpl_model *model, dpl_layers *layers);
// Final norm and head of n_rows rows; temporaries from the arena, which the caller releases.
void dpl_model_head(dpl_model *model, dpl_mat x, size_t n_rows, float *logits);
