/*
 * block.h - one decoder layer, inside src/model: activations by name, attention block, block.
 *
 * One table names what a layer keeps for its backward pass, with MaxText's names and the widths; memory
 * plans and policies read the same table. The residual stream is fp32 in every compute type.
 */
#ifndef DPL_BLOCK_H
#define DPL_BLOCK_H

#include "model/model.h"

// id, name, width of a row, fp32 in every compute type
#define DPL_ACT_MAP(X)                                             \
    X(INPUT, "decoder_layer_input", c->d, true)                    \
    X(ATTN_NORM, "attention_norm", c->d, false)                    \
    X(Q_A, "query_wa_proj", c->q_lora, false)                      \
    X(Q_A_NORM, "query_wa_norm", c->q_lora, false)                 \
    X(Q, "query_proj", c->n_heads *(c->d_nope + c->d_rope), false) \
    X(KV_A, "kv_wa_proj", c->kv_lora + c->d_rope, false)           \
    X(KV_A_NORM, "kv_wa_norm", c->kv_lora, false)                  \
    X(KV, "kv_proj", c->n_heads *(c->d_nope + c->d_v), false)      \
    X(CONTEXT, "context", c->n_heads * c->d_v, false)              \
    X(MLP_INPUT, "out_proj", c->d, true)                           \
    X(MLP_NORM, "mlp_norm", c->d, false)                           \
    X(MLPWI, "mlpwi", dpl_gate_up_width(c->mlp_f), false)          \
    X(MLP_HIDDEN, "mlp_hidden", c->mlp_f, false)

typedef enum dpl_act_id {
#define DPL_ACT_ENUM(id, name, width, f32) DPL_ACT_##id,
    DPL_ACT_MAP(DPL_ACT_ENUM)
#undef DPL_ACT_ENUM
        DPL_ACT_N
} dpl_act_id;
const char *dpl_act_name(dpl_act_id id);
size_t dpl_act_width(const dpl_model_config *config, dpl_act_id id);

// The tokens of one pass through a layer, in the shape (B, S).
typedef struct dpl_stream {
    size_t n_batch, n_seq, n_tokens;
    const int32_t *segment; // NULL: all 1
    const int32_t *position;
} dpl_stream;

typedef struct dpl_block_saved {
    dpl_mat act[DPL_ACT_N];
    float *rstd_attn, *rstd_q, *rstd_kv, *rstd_mlp; // (T)
    float *lse;                                     // (B*H*S)
    dpl_moe_saved moe;
} dpl_block_saved;

// A block of the step arena for n_rows rows of an activation.
dpl_mat dpl_act_alloc(dpl_model *model, size_t n_rows, size_t width, bool f32);

// mla.c. act[INPUT] -> act[MLP_INPUT] = input + attention; everything between is allocated and kept.
void dpl_mla_forward(dpl_model *model, int layer, const dpl_stream *stream, dpl_block_saved *saved);
// dx (T, D) F32: gradient of act[MLP_INPUT] on entry, of act[INPUT] on return.
void dpl_mla_backward(dpl_model *model, int layer, const dpl_stream *stream,
                      const dpl_block_saved *saved, dpl_mat dx);

// One layer's cache of incremental decoding: row p belongs to position p.
typedef struct dpl_mla_cache {
    float *latent; // (max, kv_lora) after its norm
    float *k_rope; // (max, d_rope) rotated
    float *
        kv_b; // (H * (d_nope + d_v), kv_lora) row-major: up-projections, absorbed into query and output
} dpl_mla_cache;
// act[INPUT] -> act[MLP_INPUT] for tokens at positions first, first+1, ... of one sequence; fills the cache.
void dpl_mla_decode(dpl_model *model, int layer, const dpl_stream *stream,
                    const dpl_mla_cache *cache, size_t first, dpl_block_saved *saved);

// block.c. The second half of a layer: act[MLP_INPUT] -> out.
dpl_status dpl_block_mlp(dpl_model *model, int layer, const dpl_stream *stream, const dpl_aux *aux,
                         dpl_mat out, dpl_block_saved *saved);
// x -> out (T, D), both F32. aux NULL: no auxiliary losses.
dpl_status dpl_block_forward(dpl_model *model, int layer, const dpl_stream *stream,
                             const dpl_aux *aux, dpl_mat x, dpl_mat out,
                             dpl_block_saved *saved_out);
// dx: gradient of out on entry, of x on return.
dpl_status dpl_block_backward(dpl_model *model, int layer, const dpl_stream *stream,
                              const dpl_aux *aux, const dpl_block_saved *saved, dpl_mat dx);

// model.c. Sends an activation to model->probe as "stem.layer" (layer < 0: "stem"), shape (B, S, width).
void dpl_probe_mat(dpl_model *model, const char *stem, int layer, const dpl_stream *stream,
                   dpl_mat mat, size_t width);
// Final norm and head of n_rows rows; temporaries from the arena, which the caller releases.
void dpl_model_head(dpl_model *model, dpl_mat x, size_t n_rows, float *logits);
void dpl_probe_routing(dpl_model *model, int layer, const dpl_moe_saved *saved);

#endif
