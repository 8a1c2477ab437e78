// mla.c - the attention block: norm, low-rank query, latent key and value, rotation, attention,
// output.
//
// kv_a's row is (latent, rotated key): the norm reads the first part, the rotation works in place
// on the second, and attention takes it as the key part that all heads share.
#include "model/block.h"

static void rotate(dpl_model *m, const dpl_stream *s, dpl_mat q, dpl_mat k_rope, bool inverse) {
    const dpl_model_config *c = &m->config;
    dpl_rope rope = {.cos = m->cos,
                     .sin = m->sin,
                     .position = s->position,
                     .n_heads = c->n_heads,
                     .head_stride = c->d_nope + c->d_rope,
                     .first = c->d_nope,
                     .d_rope = c->d_rope,
                     .interleaved = c->rope_interleave};
    dpl_rope_apply(m->ctx, &rope, s->n_tokens, inverse, q);
    rope.n_heads = 1;
    rope.first = 0;
    rope.head_stride = c->d_rope;
    dpl_rope_apply(m->ctx, &rope, s->n_tokens, inverse, k_rope);
}

static dpl_attention attention_of(const dpl_model *m, const dpl_stream *s,
                                  const dpl_block_saved *saved) {
    const dpl_model_config *c = &m->config;
    return (dpl_attention){.n_batch = s->n_batch,
                           .n_seq = s->n_seq,
                           .n_heads = c->n_heads,
                           .d_nope = c->d_nope,
                           .d_rope = c->d_rope,
                           .d_v = c->d_v,
                           .scale = (float)dpl_model_softmax_scale(c),
                           .segment = s->segment,
                           .q = saved->act[DPL_ACT_Q],
                           .kv = saved->act[DPL_ACT_KV],
                           .k_rope = dpl_mat_at(saved->act[DPL_ACT_KV_A], 0, c->kv_lora)};
}

static void query_forward(dpl_model *m, int layer, size_t n_rows, dpl_block_saved *saved) {
    const dpl_mat *act = saved->act, n = act[DPL_ACT_ATTN_NORM], q = act[DPL_ACT_Q];
    if (!m->config.q_lora) {
        dpl_linear_forward(m, layer, DPL_P_Q, n, n_rows, q);
        return;
    }
    const dpl_mat q_a = act[DPL_ACT_Q_A], q_n = act[DPL_ACT_Q_A_NORM];
    dpl_linear_forward(m, layer, DPL_P_Q_A, n, n_rows, q_a);
    saved->rstd_q = dpl_norm_forward(m, layer, DPL_P_Q_A_NORM, q_a, n_rows, q_n);
    dpl_linear_forward(m, layer, DPL_P_Q_B, q_n, n_rows, q);
}

// dq -> dn (accumulated).
static void query_backward(dpl_model *m, int layer, const dpl_stream *s,
                           const dpl_block_saved *saved, dpl_mat dq, dpl_mat dn) {
    const size_t T = s->n_tokens, width = m->config.q_lora;
    const dpl_mat n = saved->act[DPL_ACT_ATTN_NORM];
    if (!width) {
        dpl_linear_backward(m, layer, DPL_P_Q, dq, n, T, dn, true);
        return;
    }
    const dpl_mat dq_n = dpl_act_alloc(m, T, width, true), dq_a = dpl_act_alloc(m, T, width, false);
    dpl_linear_backward(m, layer, DPL_P_Q_B, dq, saved->act[DPL_ACT_Q_A_NORM], T, dq_n, false);
    dpl_norm_backward(m, layer, DPL_P_Q_A_NORM, dq_n, saved->act[DPL_ACT_Q_A], saved->rstd_q, T,
                      dq_a, false);
    dpl_linear_backward(m, layer, DPL_P_Q_A, dq_a, n, T, dn, true);
}

// Keys and values of every head, as training needs them.
static void attend(dpl_model *m, int layer, const dpl_stream *s, dpl_block_saved *saved) {
    const size_t T = s->n_tokens;
    const dpl_mat *act = saved->act;
    dpl_linear_forward(m, layer, DPL_P_KV_B, act[DPL_ACT_KV_A_NORM], T, act[DPL_ACT_KV]);
    saved->lse = dpl_ctx_alloc(m->ctx, T * m->config.n_heads * sizeof(float));
    const dpl_attention a = attention_of(m, s, saved);
    dpl_attention_forward(m->ctx, &a, act[DPL_ACT_CONTEXT], saved->lse);
}

// Over the cache, which this call's tokens enter first.
static void attend_cached(dpl_model *m, const dpl_stream *s, const dpl_mla_cache *cache,
                          const dpl_block_saved *saved) {
    const dpl_model_config *c = &m->config;
    const size_t T = s->n_tokens;
    dpl_copy(m->ctx, saved->act[DPL_ACT_KV_A_NORM], T, c->kv_lora,
             dpl_mat_at(dpl_mat_f32(cache->latent, c->kv_lora), cache->first, 0));
    dpl_copy(m->ctx, dpl_mat_at(saved->act[DPL_ACT_KV_A], 0, c->kv_lora), T, c->d_rope,
             dpl_mat_at(dpl_mat_f32(cache->k_rope, c->d_rope), cache->first, 0));
    const dpl_latent_attention a = {.n_rows = T,
                                    .first = cache->first,
                                    .n_heads = c->n_heads,
                                    .d_nope = c->d_nope,
                                    .d_rope = c->d_rope,
                                    .d_v = c->d_v,
                                    .d_latent = c->kv_lora,
                                    .scale = (float)dpl_model_softmax_scale(c),
                                    .q = saved->act[DPL_ACT_Q],
                                    .kv_b = cache->kv_b,
                                    .latent = cache->latent,
                                    .k_rope = cache->k_rope};
    dpl_latent_attention_forward(m->ctx, &a, saved->act[DPL_ACT_CONTEXT]);
}

void dpl_mla_forward(dpl_model *m, int layer, const dpl_stream *s, const dpl_mla_cache *cache,
                     dpl_block_saved *saved) {
    const size_t T = s->n_tokens, D = m->config.d;
    const dpl_mat *act = saved->act, x = act[DPL_ACT_INPUT], n = act[DPL_ACT_ATTN_NORM],
                  kv_a = act[DPL_ACT_KV_A], out = act[DPL_ACT_MLP_INPUT];
    saved->rstd_attn = dpl_norm_forward(m, layer, DPL_P_ATTN_NORM, x, T, n);
    query_forward(m, layer, T, saved);
    dpl_linear_forward(m, layer, DPL_P_KV_A, n, T, kv_a);
    saved->rstd_kv = dpl_norm_forward(m, layer, DPL_P_KV_A_NORM, kv_a, T, act[DPL_ACT_KV_A_NORM]);
    dpl_ctx_phase(m->ctx, DPL_PHASE_ATTENTION);
    rotate(m, s, act[DPL_ACT_Q], dpl_mat_at(kv_a, 0, m->config.kv_lora), false);
    if (cache) attend_cached(m, s, cache, saved);
    else attend(m, layer, s, saved);
    dpl_ctx_phase(m->ctx, DPL_PHASE_OTHER);
    dpl_linear_forward(m, layer, DPL_P_O, act[DPL_ACT_CONTEXT], T, out);
    dpl_probe_mat(m, "attn", layer, s, out, D);
    dpl_add(m->ctx, x, out, T, D, out);
}

void dpl_mla_backward(dpl_model *m, int layer, const dpl_stream *s, const dpl_block_saved *saved,
                      dpl_mat dx) {
    const dpl_model_config *c = &m->config;
    const size_t T = s->n_tokens, mark = dpl_ctx_mark(m->ctx);
    const dpl_mat *act = saved->act;
    const dpl_mat dcontext = dpl_act_alloc(m, T, c->n_heads * c->d_v, false),
                  dq = dpl_act_alloc(m, T, dpl_act_width(c, DPL_ACT_Q), false),
                  dkv = dpl_act_alloc(m, T, dpl_act_width(c, DPL_ACT_KV), false),
                  dkv_a = dpl_act_alloc(m, T, dpl_act_width(c, DPL_ACT_KV_A), true),
                  dkv_n = dpl_act_alloc(m, T, c->kv_lora, true),
                  dn = dpl_act_alloc(m, T, c->d, true), dk_rope = dpl_mat_at(dkv_a, 0, c->kv_lora);
    dpl_linear_backward(m, layer, DPL_P_O, dx, act[DPL_ACT_CONTEXT], T, dcontext, false);
    dpl_ctx_phase(m->ctx, DPL_PHASE_ATTENTION);
    const dpl_attention a = attention_of(m, s, saved);
    dpl_attention_backward(m->ctx, &a, act[DPL_ACT_CONTEXT], saved->lse, dcontext, dq, dkv,
                           dk_rope);
    rotate(m, s, dq, dk_rope, true);
    dpl_ctx_phase(m->ctx, DPL_PHASE_OTHER);
    dpl_linear_backward(m, layer, DPL_P_KV_B, dkv, act[DPL_ACT_KV_A_NORM], T, dkv_n, false);
    dpl_norm_backward(m, layer, DPL_P_KV_A_NORM, dkv_n, act[DPL_ACT_KV_A], saved->rstd_kv, T, dkv_a,
                      false);
    dpl_linear_backward(m, layer, DPL_P_KV_A, dkv_a, act[DPL_ACT_ATTN_NORM], T, dn, false);
    query_backward(m, layer, s, saved, dq, dn);
    dpl_norm_backward(m, layer, DPL_P_ATTN_NORM, dn, act[DPL_ACT_INPUT], saved->rstd_attn, T, dx,
                      true);
    dpl_ctx_release(m->ctx, mark);
}
