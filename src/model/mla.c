// mla.c - the attention block: norm, low-rank query, latent key and value, rotation, attention,
// output.
//
// kv_a's row is (latent, rotated key): the norm reads the first part, the rotation works in place
// on the second, and attention takes it as the key part that all heads share.
#include "model/block.h"

static void rotate(dpl_model *m, const dpl_batch *b, dpl_mat q, dpl_mat k_rope, bool inverse) {
    const dpl_model_config *c = &m->config;
    const size_t T = dpl_batch_tokens(b), R = c->d_rope;
    const bool pairs = c->rope_interleave;
    const dpl_rope heads = {m->cos,        m->sin,    b->position, c->n_heads,
                            c->d_nope + R, c->d_nope, R,           pairs};
    const dpl_rope shared = {m->cos, m->sin, b->position, 1, R, 0, R, pairs};
    dpl_rope_apply(m->ctx, &heads, T, inverse, q);
    dpl_rope_apply(m->ctx, &shared, T, inverse, k_rope);
}

static dpl_attention attention_of(const dpl_model *m, const dpl_batch *b, const dpl_mat *act) {
    const dpl_model_config *c = &m->config;
    const float scale = (float)dpl_model_softmax_scale(c);
    const dpl_mat k_rope = dpl_mat_at(act[DPL_ACT_KV_A], 0, c->kv_lora);
    // clang-format off
    return (dpl_attention){
        .n_batch = b->n_batch, .n_seq = b->n_seq, .n_heads = c->n_heads, .d_nope = c->d_nope,
        .d_rope = c->d_rope, .d_v = c->d_v, .scale = scale, .segment = b->segment,
        .q = act[DPL_ACT_Q], .kv = act[DPL_ACT_KV], .k_rope = k_rope};
    // clang-format on
}

// Over the cache, which this call's tokens enter first.
static void attend_cached(dpl_model *m, const dpl_batch *b, const dpl_mla_cache *cache,
                          const dpl_mat *act) {
    const dpl_model_config *c = &m->config;
    const size_t T = dpl_batch_tokens(b), R = c->d_rope;
    const float scale = (float)dpl_model_softmax_scale(c);
    const dpl_mat latents = dpl_mat_f32(cache->latent, c->kv_lora);
    const dpl_mat k_rope = dpl_mat_at(act[DPL_ACT_KV_A], 0, c->kv_lora);
    dpl_copy(m->ctx, act[DPL_ACT_KV_A_NORM], T, c->kv_lora, dpl_mat_at(latents, cache->first, 0));
    dpl_copy(m->ctx, k_rope, T, R, dpl_mat_at(dpl_mat_f32(cache->k_rope, R), cache->first, 0));
    // clang-format off
    const dpl_latent_attention a = {
        .n_rows = T, .first = cache->first, .n_heads = c->n_heads, .d_nope = c->d_nope,
        .d_rope = R, .d_v = c->d_v, .d_latent = c->kv_lora, .scale = scale,
        .q = act[DPL_ACT_Q], .kv_b = cache->kv_b, .latent = cache->latent, .k_rope = cache->k_rope};
    // clang-format on
    dpl_latent_attention_forward(m->ctx, &a, act[DPL_ACT_CONTEXT]);
}

void dpl_mla_forward(dpl_model *m, int layer, const dpl_batch *b, const dpl_mla_cache *cache,
                     dpl_block_saved *saved) {
    const size_t T = dpl_batch_tokens(b), D = m->config.d;
    const dpl_mat *act = saved->act, x = act[DPL_ACT_INPUT], n = act[DPL_ACT_ATTN_NORM],
                  q_a = act[DPL_ACT_Q_A], q_n = act[DPL_ACT_Q_A_NORM], q = act[DPL_ACT_Q],
                  kv_a = act[DPL_ACT_KV_A], kv_n = act[DPL_ACT_KV_A_NORM],
                  context = act[DPL_ACT_CONTEXT], out = act[DPL_ACT_MLP_INPUT];
    saved->rstd_attn = dpl_norm_forward(m, layer, DPL_P_ATTN_NORM, x, T, n);
    if (m->config.q_lora) {
        dpl_linear_forward(m, layer, DPL_P_Q_A, n, T, q_a);
        saved->rstd_q = dpl_norm_forward(m, layer, DPL_P_Q_A_NORM, q_a, T, q_n);
        dpl_linear_forward(m, layer, DPL_P_Q_B, q_n, T, q);
    } else {
        dpl_linear_forward(m, layer, DPL_P_Q, n, T, q);
    }
    dpl_linear_forward(m, layer, DPL_P_KV_A, n, T, kv_a);
    saved->rstd_kv = dpl_norm_forward(m, layer, DPL_P_KV_A_NORM, kv_a, T, kv_n);
    dpl_ctx_phase(m->ctx, DPL_PHASE_ATTENTION);
    rotate(m, b, q, dpl_mat_at(kv_a, 0, m->config.kv_lora), false);
    if (cache) {
        attend_cached(m, b, cache, act);
    } else { // keys and values of every head, as training needs them
        dpl_linear_forward(m, layer, DPL_P_KV_B, kv_n, T, act[DPL_ACT_KV]);
        saved->lse = dpl_ctx_alloc(m->ctx, T * m->config.n_heads * sizeof(float));
        const dpl_attention a = attention_of(m, b, act);
        dpl_attention_forward(m->ctx, &a, context, saved->lse);
    }
    dpl_ctx_phase(m->ctx, DPL_PHASE_OTHER);
    dpl_linear_forward(m, layer, DPL_P_O, context, T, out);
    dpl_probe_mat(m, "attn", layer, b, out, D);
}

void dpl_mla_backward(dpl_model *m, int layer, const dpl_batch *b, const dpl_block_saved *saved,
                      dpl_mat dx) {
    const dpl_model_config *c = &m->config;
    const size_t T = dpl_batch_tokens(b), mark = dpl_ctx_mark(m->ctx);
    const dpl_mat *act = saved->act, n = act[DPL_ACT_ATTN_NORM], context = act[DPL_ACT_CONTEXT];
    const dpl_mat dcontext = dpl_act_alloc(m, T, c->n_heads * c->d_v, false),
                  dq = dpl_act_alloc(m, T, dpl_act_width(c, DPL_ACT_Q), false),
                  dkv = dpl_act_alloc(m, T, dpl_act_width(c, DPL_ACT_KV), false),
                  dkv_a = dpl_act_alloc(m, T, dpl_act_width(c, DPL_ACT_KV_A), true),
                  dkv_n = dpl_act_alloc(m, T, c->kv_lora, true),
                  dn = dpl_act_alloc(m, T, c->d, true), dk_rope = dpl_mat_at(dkv_a, 0, c->kv_lora),
                  dq_n = dpl_act_alloc(m, T, c->q_lora, true),
                  dq_a = dpl_act_alloc(m, T, c->q_lora, false);
    dpl_linear_backward(m, layer, DPL_P_O, dx, context, T, dcontext, false);
    dpl_ctx_phase(m->ctx, DPL_PHASE_ATTENTION);
    const dpl_attention a = attention_of(m, b, act);
    dpl_attention_backward(m->ctx, &a, context, saved->lse, dcontext, dq, dkv, dk_rope);
    rotate(m, b, dq, dk_rope, true);
    dpl_ctx_phase(m->ctx, DPL_PHASE_OTHER);
    dpl_linear_backward(m, layer, DPL_P_KV_B, dkv, act[DPL_ACT_KV_A_NORM], T, dkv_n, false);
    dpl_norm_backward(m, layer, DPL_P_KV_A_NORM, dkv_n, act[DPL_ACT_KV_A], saved->rstd_kv, T, dkv_a,
                      false);
    dpl_linear_backward(m, layer, DPL_P_KV_A, dkv_a, n, T, dn, false);
    if (c->q_lora) {
        dpl_linear_backward(m, layer, DPL_P_Q_B, dq, act[DPL_ACT_Q_A_NORM], T, dq_n, false);
        dpl_norm_backward(m, layer, DPL_P_Q_A_NORM, dq_n, act[DPL_ACT_Q_A], saved->rstd_q, T, dq_a,
                          false);
        dpl_linear_backward(m, layer, DPL_P_Q_A, dq_a, n, T, dn, true);
    } else {
        dpl_linear_backward(m, layer, DPL_P_Q, dq, n, T, dn, true);
    }
    dpl_norm_backward(m, layer, DPL_P_ATTN_NORM, dn, act[DPL_ACT_INPUT], saved->rstd_attn, T, dx,
                      true);
    dpl_ctx_release(m->ctx, mark);
}
