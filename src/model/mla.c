// mla.c - the attention block: norm, low-rank query, latent key and value, rotation, attention, output.
//
// Forward stands beside backward. The latent norms use an epsilon of 1e-6 whatever the model's epsilon is, as
// transformers does. kv_a's row is (latent, rotated key): the norm reads the first part, the rotation works in
// place on the second, and attention takes it as the key part that all heads share.
#include "model/block.h"

#define LATENT_EPS 1e-6f

static void project(dpl_model *m, int layer, dpl_param_id id, dpl_mat x, size_t n_rows, dpl_mat y)
{
    const dpl_weight w = dpl_model_weight(m, dpl_model_param(m, layer, id));
    dpl_gemm_forward(m->ctx, x, &w, dpl_one_group(n_rows), y);
}

// dx = (or +=) dy W, dW += dy^T x
static void project_back(dpl_model *m, int layer, dpl_param_id id, dpl_mat dy, dpl_mat x,
                         size_t n_rows, dpl_mat dx, bool accumulate)
{
    const dpl_param *param = dpl_model_param(m, layer, id);
    const dpl_weight w = dpl_model_weight(m, param);
    const dpl_groups rows = dpl_one_group(n_rows);
    dpl_gemm_dgrad(m->ctx, dy, &w, rows, dx, accumulate);
    dpl_gemm_wgrad(m->ctx, dy, x, rows, param->n, param->k, w.dtype, dpl_model_grad(m, param));
}

static void add_bias(dpl_model *m, int layer, dpl_param_id id, size_t n_rows, dpl_mat y)
{
    const dpl_param *param = dpl_model_param(m, layer, id);
    if (param) dpl_bias_forward(m->ctx, dpl_model_values(m, param), n_rows, param->k, y);
}

static void add_bias_back(dpl_model *m, int layer, dpl_param_id id, dpl_mat dy, size_t n_rows)
{
    const dpl_param *param = dpl_model_param(m, layer, id);
    if (param) dpl_bias_backward(m->ctx, dy, n_rows, param->k, dpl_model_grad(m, param));
}

static void norm(dpl_model *m, int layer, dpl_param_id id, dpl_mat x, size_t n_rows, float eps,
                 dpl_mat y, float *rstd)
{
    const dpl_param *param = dpl_model_param(m, layer, id);
    const dpl_phase before = dpl_ctx_phase(m->ctx, DPL_PHASE_NORM);
    dpl_rmsnorm_forward(m->ctx, x, dpl_model_values(m, param), n_rows, param->k, eps, y, rstd);
    dpl_ctx_phase(m->ctx, before);
}

static void norm_back(dpl_model *m, int layer, dpl_param_id id, dpl_mat dy, dpl_mat x,
                      const float *rstd, size_t n_rows, dpl_mat dx, bool accumulate)
{
    const dpl_param *param = dpl_model_param(m, layer, id);
    const dpl_phase before = dpl_ctx_phase(m->ctx, DPL_PHASE_NORM);
    dpl_rmsnorm_backward(m->ctx, dy, x, dpl_model_values(m, param), rstd, n_rows, param->k, dx,
                         accumulate, dpl_model_grad(m, param));
    dpl_ctx_phase(m->ctx, before);
}

static void rotate(dpl_model *m, const dpl_stream *s, dpl_mat q, dpl_mat k_rope, bool inverse)
{
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
                                  const dpl_block_saved *saved)
{
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

static dpl_mat keep(dpl_model *m, size_t n_rows, dpl_act_id id, dpl_block_saved *saved)
{
    const bool f32 = id == DPL_ACT_MLP_INPUT;
    saved->act[id] = dpl_act_alloc(m, n_rows, dpl_act_width(&m->config, id), f32);
    return saved->act[id];
}

static float *keep_floats(dpl_model *m, size_t n)
{
    return dpl_ctx_alloc(m->ctx, n * sizeof(float));
}

// Norm, query, latent: what the full and the incremental form share. Both rotated parts are rotated.
static void project_latents(dpl_model *m, int layer, const dpl_stream *s, dpl_block_saved *saved)
{
    const dpl_model_config *c = &m->config;
    const size_t T = s->n_tokens;
    dpl_ctx_phase(m->ctx, DPL_PHASE_GEMM);
    const dpl_mat n = keep(m, T, DPL_ACT_ATTN_NORM, saved);
    saved->rstd_attn = keep_floats(m, T);
    norm(m, layer, DPL_P_ATTN_NORM, saved->act[DPL_ACT_INPUT], T, (float)c->eps, n,
         saved->rstd_attn);

    const dpl_mat q = keep(m, T, DPL_ACT_Q, saved);
    if (c->q_lora) {
        const dpl_mat q_a = keep(m, T, DPL_ACT_Q_A, saved),
                      q_n = keep(m, T, DPL_ACT_Q_A_NORM, saved);
        saved->rstd_q = keep_floats(m, T);
        project(m, layer, DPL_P_Q_A, n, T, q_a);
        add_bias(m, layer, DPL_P_Q_A_BIAS, T, q_a);
        norm(m, layer, DPL_P_Q_A_NORM, q_a, T, LATENT_EPS, q_n, saved->rstd_q);
        project(m, layer, DPL_P_Q_B, q_n, T, q);
    } else {
        project(m, layer, DPL_P_Q, n, T, q);
    }

    const dpl_mat kv_a = keep(m, T, DPL_ACT_KV_A, saved),
                  kv_n = keep(m, T, DPL_ACT_KV_A_NORM, saved);
    saved->rstd_kv = keep_floats(m, T);
    project(m, layer, DPL_P_KV_A, n, T, kv_a);
    add_bias(m, layer, DPL_P_KV_A_BIAS, T, kv_a);
    norm(m, layer, DPL_P_KV_A_NORM, kv_a, T, LATENT_EPS, kv_n, saved->rstd_kv);
    dpl_ctx_phase(m->ctx, DPL_PHASE_ATTENTION);
    rotate(m, s, q, dpl_mat_at(kv_a, 0, c->kv_lora), false);
}

// Output projection and residual: context -> act[MLP_INPUT].
static void project_output(dpl_model *m, int layer, const dpl_stream *s, dpl_mat context,
                           dpl_block_saved *saved)
{
    const size_t T = s->n_tokens, D = m->config.d;
    const dpl_mat out = keep(m, T, DPL_ACT_MLP_INPUT, saved);
    dpl_ctx_phase(m->ctx, DPL_PHASE_GEMM);
    project(m, layer, DPL_P_O, context, T, out);
    add_bias(m, layer, DPL_P_O_BIAS, T, out);
    dpl_ctx_phase(m->ctx, DPL_PHASE_OTHER);
    dpl_probe_mat(m, "attn", layer, s, out, D);
    dpl_add(m->ctx, saved->act[DPL_ACT_INPUT], out, T, D, out);
}

void dpl_mla_forward(dpl_model *m, int layer, const dpl_stream *s, dpl_block_saved *saved)
{
    const size_t T = s->n_tokens;
    project_latents(m, layer, s, saved);
    const dpl_mat kv = keep(m, T, DPL_ACT_KV, saved);
    dpl_ctx_phase(m->ctx, DPL_PHASE_GEMM);
    project(m, layer, DPL_P_KV_B, saved->act[DPL_ACT_KV_A_NORM], T, kv);
    const dpl_mat context = keep(m, T, DPL_ACT_CONTEXT, saved);
    saved->lse = keep_floats(m, T * m->config.n_heads);
    dpl_ctx_phase(m->ctx, DPL_PHASE_ATTENTION);
    const dpl_attention a = attention_of(m, s, saved);
    dpl_attention_forward(m->ctx, &a, context, saved->lse);
    project_output(m, layer, s, context, saved);
}

void dpl_mla_decode(dpl_model *m, int layer, const dpl_stream *s, const dpl_mla_cache *cache,
                    size_t first, dpl_block_saved *saved)
{
    const dpl_model_config *c = &m->config;
    const size_t T = s->n_tokens;
    project_latents(m, layer, s, saved);
    const dpl_mat latent = dpl_mat_f32(cache->latent, c->kv_lora);
    const dpl_mat k_rope = dpl_mat_f32(cache->k_rope, c->d_rope);
    dpl_copy(m->ctx, saved->act[DPL_ACT_KV_A_NORM], T, c->kv_lora, dpl_mat_at(latent, first, 0));
    dpl_copy(m->ctx, dpl_mat_at(saved->act[DPL_ACT_KV_A], 0, c->kv_lora), T, c->d_rope,
             dpl_mat_at(k_rope, first, 0));
    const dpl_mat context = keep(m, T, DPL_ACT_CONTEXT, saved);
    const dpl_latent_attention a = {.n_rows = T,
                                    .first = first,
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
    dpl_latent_attention_forward(m->ctx, &a, context);
    project_output(m, layer, s, context, saved);
}

// Gradient through the query path: dq -> dn (accumulated).
static void query_backward(dpl_model *m, int layer, const dpl_stream *s,
                           const dpl_block_saved *saved, dpl_mat dq, dpl_mat dn)
{
    const dpl_model_config *c = &m->config;
    const size_t T = s->n_tokens;
    const dpl_mat n = saved->act[DPL_ACT_ATTN_NORM];
    if (!c->q_lora) {
        project_back(m, layer, DPL_P_Q, dq, n, T, dn, true);
        return;
    }
    const dpl_mat dq_n = dpl_act_alloc(m, T, c->q_lora, true),
                  dq_a = dpl_act_alloc(m, T, c->q_lora, false);
    project_back(m, layer, DPL_P_Q_B, dq, saved->act[DPL_ACT_Q_A_NORM], T, dq_n, false);
    norm_back(m, layer, DPL_P_Q_A_NORM, dq_n, saved->act[DPL_ACT_Q_A], saved->rstd_q, T, dq_a,
              false);
    add_bias_back(m, layer, DPL_P_Q_A_BIAS, dq_a, T);
    project_back(m, layer, DPL_P_Q_A, dq_a, n, T, dn, true);
}

void dpl_mla_backward(dpl_model *m, int layer, const dpl_stream *s, const dpl_block_saved *saved,
                      dpl_mat dx)
{
    const dpl_model_config *c = &m->config;
    const size_t T = s->n_tokens, mark = dpl_ctx_mark(m->ctx);
    const dpl_mat n = saved->act[DPL_ACT_ATTN_NORM];
    const dpl_mat dcontext = dpl_act_alloc(m, T, c->n_heads * c->d_v, false);
    const dpl_mat dq = dpl_act_alloc(m, T, dpl_act_width(c, DPL_ACT_Q), false);
    const dpl_mat dkv = dpl_act_alloc(m, T, dpl_act_width(c, DPL_ACT_KV), false);
    const dpl_mat dkv_a = dpl_act_alloc(m, T, dpl_act_width(c, DPL_ACT_KV_A), true);
    const dpl_mat dkv_n = dpl_act_alloc(m, T, c->kv_lora, true),
                  dn = dpl_act_alloc(m, T, c->d, true);
    const dpl_mat dk_rope = dpl_mat_at(dkv_a, 0, c->kv_lora);

    dpl_ctx_phase(m->ctx, DPL_PHASE_GEMM);
    add_bias_back(m, layer, DPL_P_O_BIAS, dx, T);
    project_back(m, layer, DPL_P_O, dx, saved->act[DPL_ACT_CONTEXT], T, dcontext, false);
    dpl_ctx_phase(m->ctx, DPL_PHASE_ATTENTION);
    const dpl_attention a = attention_of(m, s, saved);
    dpl_attention_backward(m->ctx, &a, saved->act[DPL_ACT_CONTEXT], saved->lse, dcontext, dq, dkv,
                           dk_rope);
    rotate(m, s, dq, dk_rope, true);
    dpl_ctx_phase(m->ctx, DPL_PHASE_GEMM);
    project_back(m, layer, DPL_P_KV_B, dkv, saved->act[DPL_ACT_KV_A_NORM], T, dkv_n, false);
    norm_back(m, layer, DPL_P_KV_A_NORM, dkv_n, saved->act[DPL_ACT_KV_A], saved->rstd_kv, T, dkv_a,
              false);
    add_bias_back(m, layer, DPL_P_KV_A_BIAS, dkv_a, T);
    project_back(m, layer, DPL_P_KV_A, dkv_a, n, T, dn, false);
    query_backward(m, layer, s, saved, dq, dn);
    norm_back(m, layer, DPL_P_ATTN_NORM, dn, saved->act[DPL_ACT_INPUT], saved->rstd_attn, T, dx,
              true);
    dpl_ctx_phase(m->ctx, DPL_PHASE_OTHER);
    dpl_ctx_release(m->ctx, mark);
}
