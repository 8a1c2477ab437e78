// model.c - the stack of layers: forward, loss, multi-token prediction, backward of a micro-batch.
//
// The head and its loss go over the tokens in blocks, forward and backward at once, so that the
// (B*S, V) logits never exist in memory. Everything a step needs comes from the context's arena and
// is released at its end.
#include <limits.h>
#include <math.h>
#include <stdio.h>

#include "model/block.h"

#define LOGITS_BLOCK ((size_t)4 << 20) // elements of one block of logits

/* ---- opening ---- */

dpl_status dpl_model_create(dpl_ctx *ctx, dpl_comm *comm, const dpl_model_config *config,
                            dpl_dtype dtype, dpl_model **model_out) {
    DPL_TRY(dpl_model_config_check(config));
    dpl_model *m = dpl_alloc(sizeof *m);
    if (!m) return dpl_fail(DPL_ENOMEM, "no memory for a model");
    m->ctx = ctx;
    m->comm = comm;
    m->config = *config;
    m->dtype = dtype;
    const dpl_status status = dpl_params_build(m);
    if (status != DPL_OK) {
        dpl_model_destroy(&m);
        return status;
    }
    *model_out = m;
    return DPL_OK;
}

void dpl_model_destroy(dpl_model **model) {
    if (!model || !*model) return;
    dpl_ctx_wait((*model)->ctx);
    dpl_params_free(*model);
    dpl_free((*model)->cos);
    dpl_free((*model)->sin);
    dpl_free(*model);
    *model = NULL;
}

dpl_status dpl_model_rope_tables(dpl_model *m, size_t n) {
    const size_t half = m->config.d_rope / 2;
    if (n <= m->n_positions) return DPL_OK;
    n = DPL_MIN(DPL_MAX(n, 2 * m->n_positions), m->config.max_positions);
    float *cosines = dpl_alloc_array(n * half, sizeof(float)),
          *sines = dpl_alloc_array(n * half, sizeof(float)),
          *frequency = dpl_alloc_array(half, sizeof(float));
    const bool good = cosines && sines && frequency;
    const double factor = good ? dpl_rope_frequencies(&m->config, frequency) : 0;
    for (size_t i = 0; i < n * half && good; i++) {
        const double angle = (double)(i / half) * (double)frequency[i % half];
        cosines[i] = (float)(cos(angle) * factor);
        sines[i] = (float)(sin(angle) * factor);
    }
    dpl_ctx_wait(m->ctx);
    dpl_free(frequency);
    dpl_free(good ? m->cos : cosines);
    dpl_free(good ? m->sin : sines);
    if (!good) return dpl_fail(DPL_ENOMEM, "no memory for the rotary tables of %zu positions", n);
    m->cos = cosines;
    m->sin = sines;
    m->n_positions = n;
    return DPL_OK;
}

/* ---- probing ---- */

static void send_probe(dpl_model *m, const char *stem, int layer, const char *tail, bool is_int,
                       int rank, const int64_t *shape, const void *data) {
    char name[64];
    if (layer < 0) snprintf(name, sizeof name, "%s", stem);
    else snprintf(name, sizeof name, "%s.%d%s", stem, layer, tail);
    m->probe(m->probe_arg, name, is_int, rank, shape, data);
}

void dpl_probe_mat(dpl_model *m, const char *stem, int layer, const dpl_stream *s, dpl_mat mat,
                   size_t width) {
    if (!m->probe) return;
    const size_t mark = dpl_ctx_mark(m->ctx);
    const dpl_mat copy = dpl_act_alloc(m, s->n_tokens, width, true);
    dpl_copy(m->ctx, mat, s->n_tokens, width, copy);
    dpl_ctx_wait(m->ctx);
    const int64_t shape[3] = {(int64_t)s->n_batch, (int64_t)s->n_seq, (int64_t)width};
    send_probe(m, stem, layer, "", false, 3, shape, copy.p);
    dpl_ctx_release(m->ctx, mark);
}

void dpl_probe_routing(dpl_model *m, int layer, const dpl_moe_saved *saved) {
    if (!m->probe) return;
    const size_t E = m->config.n_experts, K = m->config.top_k, T = saved->n_tokens;
    const size_t mark = dpl_ctx_mark(m->ctx);
    int64_t *ids = dpl_ctx_alloc(m->ctx, T * K * sizeof *ids);
    dpl_ctx_wait(m->ctx);
    for (size_t i = 0; i < T * K; i++) ids[i] = saved->ids[i];
    const int64_t per_expert[2] = {(int64_t)T, (int64_t)E}, per_slot[2] = {(int64_t)T, (int64_t)K};
    send_probe(m, "router", layer, ".logits", false, 2, per_expert, saved->logits);
    send_probe(m, "router", layer, ".ids", true, 2, per_slot, ids);
    send_probe(m, "router", layer, ".weights", false, 2, per_slot, saved->weights);
    send_probe(m, "router", layer, ".counts", true, 1, &per_expert[1], saved->ep.counts);
    dpl_ctx_release(m->ctx, mark);
}

/* ---- the batch ---- */

static dpl_status fail_at(const dpl_batch *b, size_t i, const char *what, int32_t value,
                          const char *expected, size_t high, const char *why) {
    return dpl_fail(DPL_EINVAL, "%s %zu of row %zu is %d, expected %s%zu%s", what, i % b->n_seq,
                    i / b->n_seq, (int)value, expected, high, why);
}

static dpl_status check_batch(const dpl_model *m, const dpl_batch *b, size_t *n_positions_out) {
    const size_t V = m->config.vocab, limit = m->config.max_positions;
    if (!b->ids || b->n_batch == 0 || b->n_seq == 0)
        return dpl_fail(DPL_EINVAL, "a batch of %zu x %zu tokens, expected at least 1 x 1",
                        b->n_batch, b->n_seq);
    size_t last = b->n_seq - 1;
    for (size_t i = 0; i < b->n_batch * b->n_seq; i++) {
        const int32_t id = b->ids[i], target = b->targets ? b->targets[i] : -1;
        const int32_t position = b->position ? b->position[i] : 0;
        if (id < 0 || (size_t)id >= V)
            return fail_at(b, i, "token", id, "0 to ", V - 1, " (vocab_size - 1)");
        if (target >= 0 && (size_t)target >= V)
            return fail_at(b, i, "target", target, "at most ", V - 1, " (vocab_size - 1)");
        if (position < 0 || (size_t)position >= limit)
            return fail_at(b, i, "position", position, "0 to ", limit - 1, "");
        last = DPL_MAX(last, (size_t)position);
    }
    if (last >= limit)
        return dpl_fail(DPL_EINVAL,
                        "a sequence of %zu tokens, expected at most "
                        "max_position_embeddings = %zu",
                        b->n_seq, limit);
    *n_positions_out = last + 1;
    return DPL_OK;
}

static dpl_stream stream_of(dpl_model *m, const dpl_batch *b) {
    dpl_stream s = {b->n_batch, b->n_seq, b->n_batch * b->n_seq, b->segment, b->position};
    if (!s.position) {
        int32_t *position = dpl_ctx_alloc(m->ctx, s.n_tokens * sizeof *position);
        for (size_t i = 0; i < s.n_tokens; i++) position[i] = (int32_t)(i % s.n_seq);
        s.position = position;
    }
    return s;
}

// Depth k of multi-token prediction sees the embedding of the token k further and predicts the one
// after it. Where that token is in another document the position is padding.
static dpl_batch shift_batch(dpl_model *m, const dpl_batch *b, const dpl_stream *s, size_t depth) {
    const size_t n_seq = b->n_seq - depth, n = b->n_batch * n_seq;
    int32_t *block = dpl_ctx_alloc(m->ctx, 4 * n * sizeof *block);
    for (size_t i = 0; i < n; i++) {
        const size_t here = i / n_seq * b->n_seq + i % n_seq, there = here + depth;
        const int32_t segment = b->segment ? b->segment[here] : 1;
        const bool inside = !b->segment || (segment != 0 && segment == b->segment[there]);
        block[i] = b->ids[there];
        block[n + i] = b->targets && inside ? b->targets[there] : -1;
        block[2 * n + i] = inside ? segment : 0;
        block[3 * n + i] = s->position[here];
    }
    return (dpl_batch){b->n_batch, n_seq, block, block + n, block + 2 * n, block + 3 * n};
}

double dpl_batch_mtp_tokens(const dpl_model_config *c, const dpl_batch *b) {
    double n = 0;
    for (size_t depth = 1; depth <= c->n_mtp && depth < b->n_seq; depth++)
        for (size_t i = 0; i < b->n_batch * b->n_seq; i++) {
            if (i % b->n_seq + depth >= b->n_seq || b->targets[i + depth] < 0) continue;
            n += !b->segment || (b->segment[i] != 0 && b->segment[i] == b->segment[i + depth]);
        }
    return n;
}

static double count_targets(const dpl_batch *b) {
    double n = 0;
    for (size_t i = 0; i < b->n_batch * b->n_seq; i++) n += b->targets && b->targets[i] >= 0;
    return n;
}

/* ---- embedding, norm, head ---- */

static dpl_mat embed(dpl_model *m, const int32_t *ids, size_t n_rows) {
    const dpl_mat x = dpl_act_alloc(m, n_rows, m->config.d, true);
    dpl_ctx_phase(m->ctx, DPL_PHASE_EMBED);
    dpl_embed_forward(m->ctx, dpl_model_values(m, dpl_model_param(m, -1, DPL_P_EMBED)),
                      m->config.tied, ids, n_rows, m->config.vocab, m->config.d, x);
    dpl_ctx_phase(m->ctx, DPL_PHASE_OTHER);
    return x;
}

static void embed_backward(dpl_model *m, dpl_mat dx, const int32_t *ids, size_t n_rows) {
    dpl_ctx_phase(m->ctx, DPL_PHASE_EMBED);
    dpl_embed_backward(m->ctx, dx, ids, m->config.tied, n_rows, m->config.vocab, m->config.d,
                       dpl_model_grad(m, dpl_model_param(m, -1, DPL_P_EMBED)));
    dpl_ctx_phase(m->ctx, DPL_PHASE_OTHER);
}

static const dpl_param *head_param(const dpl_model *m) {
    return dpl_model_param(m, -1, m->config.tied ? DPL_P_EMBED : DPL_P_HEAD);
}

static void head_logits(dpl_model *m, dpl_mat h, size_t n_rows, float *logits) {
    const dpl_weight w = dpl_model_weight(m, head_param(m));
    dpl_gemm_forward(m->ctx, h, &w, dpl_one_group(n_rows), dpl_mat_f32(logits, m->config.vocab));
}

// Cross-entropy of all rows. sums (2, device): xent, z. dh (rows, D) F32 is written if dh.p is not
// NULL, and the head's gradient accumulated; with dscale 0 nothing flows back. token_loss (rows) if
// not NULL.
static void head_loss(dpl_model *m, dpl_mat h, const int32_t *targets, size_t n_rows,
                      float z_weight, float dscale, double *sums, dpl_mat dh, float *token_loss) {
    const size_t V = m->config.vocab, mark = dpl_ctx_mark(m->ctx);
    const bool back = dh.p && dscale != 0;
    const size_t block = DPL_MIN(DPL_MAX(LOGITS_BLOCK / V, 64), n_rows);
    float *logits = dpl_ctx_alloc(m->ctx, block * V * sizeof(float));
    float *loss = token_loss ? token_loss : dpl_ctx_alloc(m->ctx, n_rows * sizeof(float));
    float *z = dpl_ctx_alloc(m->ctx, n_rows * sizeof(float));
    const dpl_weight w = dpl_model_weight(m, head_param(m));
    dpl_ctx_phase(m->ctx, DPL_PHASE_LOSS);
    if (dh.p && !back) dpl_zero(m->ctx, dh.p, n_rows * m->config.d * sizeof(float));
    for (size_t first = 0; first < n_rows; first += block) {
        const size_t n = DPL_MIN(block, n_rows - first);
        const dpl_mat rows = dpl_mat_at(h, first, 0), dlogits = dpl_mat_f32(logits, V);
        head_logits(m, rows, n, logits);
        dpl_xent(m->ctx, logits, V, targets + first, n, V, z_weight, back ? dscale : 0,
                 loss + first, z + first);
        if (!back) continue;
        dpl_gemm_dgrad(m->ctx, dlogits, &w, dpl_one_group(n), dpl_mat_at(dh, first, 0), false);
        dpl_gemm_wgrad(m->ctx, dlogits, rows, dpl_one_group(n), V, m->config.d, w.dtype,
                       dpl_model_grad(m, head_param(m)));
    }
    dpl_sum(m->ctx, loss, n_rows, &sums[0]);
    dpl_sum(m->ctx, z, n_rows, &sums[1]);
    dpl_ctx_phase(m->ctx, DPL_PHASE_OTHER);
    dpl_ctx_release(m->ctx, mark);
}

/* ---- one pass ---- */

typedef struct mtp_pass {
    dpl_batch batch;
    dpl_stream stream;
    dpl_aux aux;
    dpl_mat embedded, previous, joined, y, normed, dh; // dh: gradient of normed
    float *rstd_e, *rstd_h, *rstd;
    dpl_block_saved block;
    double *sums; // device
} mtp_pass;

typedef struct pass {
    dpl_model *m;
    const dpl_batch *batch;
    const dpl_loss_rule *rule;
    bool train;
    double xent_scale, mtp_scale;
    float *logits_out; // (B, S, V) or NULL
    dpl_aux aux;
    dpl_layers layers;
    dpl_mat final, dfinal;
    float *rstd;
    double *sums; // (3, device): xent, z, squares of logits_out
    mtp_pass *mtp;
    size_t n_mtp;
} pass;

// The first tensor of layers first .. last, or outside of layers (with_rest), that is not finite.
static const char *bad_tensor(dpl_model *m, int first, int last, bool with_rest) {
    for (size_t i = 0; i < m->n_disk; i++) {
        const dpl_disk_tensor *t = &m->disk[i];
        if (!t->param || t->copy_of_shared) continue;
        const int layer = t->param->layer;
        if (layer < 0 ? !with_rest : layer < first || layer > last) continue;
        const size_t n = dpl_disk_elems(t), mark = dpl_ctx_mark(m->ctx);
        float *values = dpl_ctx_alloc(m->ctx, n * sizeof *values);
        dpl_disk_gather(t, m->params.master, values);
        bool good = true;
        for (size_t j = 0; j < n && good; j++) good = isfinite(values[j]);
        dpl_ctx_release(m->ctx, mark);
        if (!good) return t->name;
    }
    return NULL;
}

// Says where a pass stopped being finite. The layer that went wrong is the one whose output is the
// first bad one; a router that met it later is not to blame. Where all are good the error text that
// is there stands, unless a tensor explains it.
static dpl_status explain_not_finite(dpl_model *m, const dpl_layers *layers) {
    const size_t n = layers->n_done;
    double *squares = dpl_ctx_alloc(m->ctx, n * sizeof *squares);
    dpl_ctx_read(m->ctx, squares, layers->squares, n * sizeof *squares);
    size_t i = 0;
    while (i < n && isfinite(squares[i])) i++;
    const int layer = (int)i - 1; // of the first bad output; if there is none, of the last one
    const char *tensor = bad_tensor(m, layer, i == n ? INT_MAX : layer, i == n || i == 0);
    if (i == n) return tensor ? dpl_fail(DPL_ENUMERIC, "%s is not finite", tensor) : DPL_ENUMERIC;
    const char *const nor = tensor ? ", nor is " : "";
    if (!tensor) tensor = "";
    if (i == 0)
        return dpl_fail(DPL_ENUMERIC, "the embedding's output is not finite%s%s", nor, tensor);
    return dpl_fail(DPL_ENUMERIC, "the output of layer %d is not finite%s%s", layer, nor, tensor);
}

static void count_experts(const pass *p, size_t layer, const dpl_moe_saved *saved,
                          dpl_loss_sums *sums) {
    const size_t E = p->m->config.n_experts;
    for (size_t e = 0; e < E; e++) p->m->counts[layer * E + e] += saved->ep.counts[e];
    sums->balance += saved->aux[0];
    sums->router_z += saved->aux[1];
}

dpl_status dpl_layers_forward(dpl_model *m, const int32_t *ids, dpl_layers *l) {
    const size_t L = m->config.n_layers, T = l->stream.n_tokens, D = m->config.d;
    l->x = dpl_ctx_alloc(m->ctx, (L + 1) * sizeof *l->x);
    l->squares = dpl_ctx_alloc(m->ctx, (L + 1) * sizeof *l->squares);
    l->x[0] = embed(m, ids, T);
    dpl_probe_mat(m, "hidden.embed", -1, &l->stream, l->x[0], D);
    for (size_t i = 0; i <= L; i++) {
        dpl_sum_squares(m->ctx, l->x[i].p, T * D, &l->squares[i]);
        l->n_done = i + 1;
        if (i > 0) dpl_probe_mat(m, "hidden", (int)i - 1, &l->stream, l->x[i], D);
        if (i == L) break;
        dpl_block_saved unused;
        l->x[i + 1] = l->blocks || i == 0 ? dpl_act_alloc(m, T, D, true) : l->x[i - 1];
        const size_t mark = dpl_ctx_mark(m->ctx);
        DPL_TRY(dpl_block_forward(m, (int)i, &l->stream, l->aux, l->caches ? &l->caches[i] : NULL,
                                  l->x[i], l->x[i + 1], l->blocks ? &l->blocks[i] : &unused));
        if (!l->blocks) dpl_ctx_release(m->ctx, mark);
    }
    return DPL_OK;
}

// Logits and losses in full, for comparison with other programs; only when somebody probes.
static void probe_loss(dpl_model *m, const char *logits_name, const char *loss_name,
                       const dpl_stream *s, dpl_mat h, const float *token_loss) {
    if (!m->probe) return;
    const size_t mark = dpl_ctx_mark(m->ctx);
    const dpl_mat logits = dpl_act_alloc(m, s->n_tokens, m->config.vocab, true);
    head_logits(m, h, s->n_tokens, logits.p);
    dpl_probe_mat(m, logits_name, -1, s, logits, m->config.vocab);
    const int64_t shape[2] = {(int64_t)s->n_batch, (int64_t)s->n_seq};
    if (loss_name) m->probe(m->probe_arg, loss_name, false, 2, shape, token_loss);
    dpl_ctx_release(m->ctx, mark);
}

// What depth continues from, and its gradient: the output after the final norm, deeper the normed
// output of the depth before. Its sequences are one longer.
static dpl_mat mtp_source(const pass *p, size_t depth, bool gradient) {
    if (depth == 1) return gradient ? p->dfinal : p->final;
    return gradient ? p->mtp[depth - 2].dh : p->mtp[depth - 2].normed;
}

static dpl_status mtp_forward(pass *p, size_t depth, dpl_loss_sums *sums) {
    dpl_model *m = p->m;
    const int layer = (int)(m->config.n_layers + depth - 1);
    const size_t D = m->config.d;
    mtp_pass *t = &p->mtp[depth - 1];
    t->batch = shift_batch(m, p->batch, &p->layers.stream, depth);
    t->stream = stream_of(m, &t->batch);
    t->aux = p->aux;
    t->aux.n_seq = t->stream.n_seq;
    const size_t T = t->stream.n_tokens, S = t->batch.n_seq;
    t->embedded = embed(m, t->batch.ids, T);
    t->previous = dpl_act_alloc(m, T, D, false);
    for (size_t b = 0; b < t->batch.n_batch; b++)
        dpl_copy(m->ctx, dpl_mat_at(mtp_source(p, depth, false), b * (S + 1), 0), S, D,
                 dpl_mat_at(t->previous, b * S, 0));
    t->joined = dpl_act_alloc(m, T, 2 * D, false);
    const dpl_mat x = dpl_act_alloc(m, T, D, true), right = dpl_mat_at(t->joined, 0, D);
    t->rstd_e = dpl_norm_forward(m, layer, DPL_P_MTP_ENORM, t->embedded, T, t->joined);
    t->rstd_h = dpl_norm_forward(m, layer, DPL_P_MTP_HNORM, t->previous, T, right);
    dpl_linear_forward(m, layer, DPL_P_MTP_PROJ, t->joined, T, x);
    t->y = dpl_act_alloc(m, T, D, true);
    DPL_TRY(dpl_block_forward(m, layer, &t->stream, &t->aux, NULL, x, t->y, &t->block));
    count_experts(p, (size_t)layer, &t->block.moe, sums);
    dpl_probe_mat(m, "hidden", layer, &t->stream, t->y, D);
    t->normed = dpl_act_alloc(m, T, D, false);
    t->rstd = dpl_norm_forward(m, layer, DPL_P_MTP_NORM, t->y, T, t->normed);
    t->dh = dpl_act_alloc(m, T, D, true);
    t->sums = dpl_ctx_alloc(m->ctx, 2 * sizeof(double));
    head_loss(m, t->normed, t->batch.targets, T, 0, (float)p->mtp_scale, t->sums, t->dh, NULL);
    char number[24] = "", hidden_name[48], logits_name[48];
    if (depth > 1) snprintf(number, sizeof number, "%zu", depth);
    snprintf(hidden_name, sizeof hidden_name, "mtp%s.hidden", number);
    snprintf(logits_name, sizeof logits_name, "mtp%s.logits", number);
    dpl_probe_mat(m, hidden_name, -1, &t->stream, t->normed, D);
    probe_loss(m, logits_name, NULL, &t->stream, t->normed, NULL);
    return DPL_OK;
}

static dpl_status mtp_backward(pass *p, size_t depth) {
    dpl_model *m = p->m;
    const int layer = (int)(m->config.n_layers + depth - 1);
    const size_t D = m->config.d, mark = dpl_ctx_mark(m->ctx);
    mtp_pass *t = &p->mtp[depth - 1];
    const size_t T = t->stream.n_tokens, S = t->batch.n_seq;
    const dpl_mat dy = dpl_act_alloc(m, T, D, true), d = dpl_act_alloc(m, T, D, true),
                  djoined = dpl_act_alloc(m, T, 2 * D, true), right = dpl_mat_at(djoined, 0, D);
    dpl_norm_backward(m, layer, DPL_P_MTP_NORM, t->dh, t->y, t->rstd, T, dy, false);
    dpl_probe_mat(m, "dhidden", layer, &t->stream, dy, D);
    DPL_TRY(dpl_block_backward(m, layer, &t->stream, &t->aux, &t->block, dy));
    dpl_linear_backward(m, layer, DPL_P_MTP_PROJ, dy, t->joined, T, djoined, false);
    dpl_norm_backward(m, layer, DPL_P_MTP_ENORM, djoined, t->embedded, t->rstd_e, T, d, false);
    embed_backward(m, d, t->batch.ids, T);
    dpl_norm_backward(m, layer, DPL_P_MTP_HNORM, right, t->previous, t->rstd_h, T, d, false);
    for (size_t b = 0; b < t->batch.n_batch; b++) {
        const dpl_mat rows = dpl_mat_at(mtp_source(p, depth, true), b * (S + 1), 0);
        dpl_add(m->ctx, rows, dpl_mat_at(d, b * S, 0), S, D, rows);
    }
    dpl_ctx_release(m->ctx, mark);
    return DPL_OK;
}

static dpl_status backward(pass *p) {
    dpl_model *m = p->m;
    const dpl_layers *l = &p->layers;
    const size_t L = m->config.n_layers, T = l->stream.n_tokens, D = m->config.d;
    for (size_t depth = p->n_mtp; depth > 0; depth--) DPL_TRY(mtp_backward(p, depth));
    const dpl_mat dx = dpl_act_alloc(m, T, D, true);
    dpl_norm_backward(m, -1, DPL_P_FINAL_NORM, p->dfinal, l->x[L], p->rstd, T, dx, false);
    for (size_t i = L; i-- > 0;) {
        dpl_probe_mat(m, "dhidden", (int)i, &l->stream, dx, D);
        DPL_TRY(dpl_block_backward(m, (int)i, &l->stream, &p->aux, &l->blocks[i], dx));
    }
    embed_backward(m, dx, p->batch->ids, T);
    return DPL_OK;
}

static dpl_status read_sums(const pass *p, dpl_loss_sums *sums) {
    double main[3], mtp[2];
    dpl_ctx_read(p->m->ctx, main, p->sums, sizeof main);
    sums->xent = main[0];
    sums->z = main[1];
    for (size_t i = 0; i < p->n_mtp; i++) {
        dpl_ctx_read(p->m->ctx, mtp, p->mtp[i].sums, sizeof mtp);
        sums->mtp_xent += mtp[0];
        sums->mtp_tokens += count_targets(&p->mtp[i].batch);
    }
    const double all = sums->xent + sums->z + sums->mtp_xent + sums->balance + sums->router_z;
    if (isfinite(all + main[2])) return DPL_OK;
    return dpl_fail(DPL_ENUMERIC, "the %s not finite, all layers' outputs are",
                    p->train ? "loss is" : "logits are");
}

static dpl_status run_pass(pass *p, dpl_loss_sums *sums) {
    dpl_model *m = p->m;
    const dpl_stream *s = &p->layers.stream;
    const size_t L = m->config.n_layers, T = s->n_tokens, D = m->config.d;
    float *token_loss = NULL;
    if (p->train) {
        p->layers.aux = &p->aux;
        p->layers.blocks = dpl_ctx_alloc(m->ctx, L * sizeof *p->layers.blocks);
        p->n_mtp = DPL_MIN(m->config.n_mtp, s->n_seq - 1);
        p->mtp = dpl_ctx_alloc(m->ctx, p->n_mtp * sizeof *p->mtp);
        p->dfinal = dpl_act_alloc(m, T, D, true);
        token_loss = dpl_ctx_alloc(m->ctx, T * sizeof(float));
    }
    p->sums = dpl_ctx_alloc(m->ctx, 3 * sizeof(double));
    dpl_zero(m->ctx, p->sums, 3 * sizeof(double));
    DPL_TRY(dpl_layers_forward(m, p->batch->ids, &p->layers));
    for (size_t i = m->config.n_dense; i < L && p->train; i++)
        count_experts(p, i, &p->layers.blocks[i].moe, sums);
    p->final = dpl_act_alloc(m, T, D, false);
    p->rstd = dpl_norm_forward(m, -1, DPL_P_FINAL_NORM, p->layers.x[L], T, p->final);
    dpl_probe_mat(m, "hidden.final", -1, s, p->final, D);
    if (p->logits_out) {
        head_logits(m, p->final, T, p->logits_out);
        dpl_sum_squares(m->ctx, p->logits_out, T * m->config.vocab, &p->sums[2]);
    }
    if (p->batch->targets)
        head_loss(m, p->final, p->batch->targets, T, (float)p->rule->z_weight, (float)p->xent_scale,
                  p->sums, p->dfinal, token_loss);
    if (p->train) probe_loss(m, "logits", "token_loss", s, p->final, token_loss);
    for (size_t depth = 1; depth <= p->n_mtp; depth++) DPL_TRY(mtp_forward(p, depth, sums));
    DPL_TRY(read_sums(p, sums));
    return p->train ? backward(p) : DPL_OK;
}

static dpl_aux aux_of(const dpl_model *m, const dpl_loss_rule *rule, double dscale,
                      const dpl_batch *b) {
    const dpl_model_config *c = &m->config;
    const double n_moe = c->n_experts ? (double)(c->n_layers - c->n_dense + c->n_mtp) : 1;
    // Megatron's balance loss is a sum over layers, the others are means.
    const double balance = rule->balance == DPL_BALANCE_MEGATRON ? 1 : n_moe;
    return (dpl_aux){.kind = rule->balance,
                     .dscale = (float)dscale,
                     .n_batch = b->n_batch,
                     .n_seq = b->n_seq,
                     .balance_weight = (float)(rule->balance_weight / balance),
                     .z_weight = (float)(rule->router_z_weight / n_moe)};
}

// What a pass takes from the step arena, rounded up: what is kept for backward (in evaluation one
// layer at a time), the gradients of one layer, one block of logits. largest_out names what takes most.
static double pass_bytes(const dpl_model *m, double n_tokens, bool train,
                         const char **largest_out) {
    const dpl_model_config *c = &m->config;
    const double item = (double)dpl_dtype_bytes(m->dtype), K = (double)c->top_k;
    const double F = (double)dpl_gate_up_width(c->moe_f), layers = (double)(c->n_layers + c->n_mtp);
    const double n_moe = c->n_experts ? layers - (double)c->n_dense : 0;
    // Rows in expert order, gate and up, SwiGLU's output; the shared expert's two; the router's.
    const double moe = item * (K * ((double)c->d + 1.5 * F) + 1.5 * F * (double)c->n_shared) +
                       8 * (double)c->n_experts + 16 * K;
    double attention = 4 * (double)c->n_heads + 16, dense = 0, most = moe * n_moe;
    *largest_out = "moe_mlpwi";
    for (int id = 0; id < DPL_ACT_N; id++) {
        const bool of_dense = id == DPL_ACT_MLPWI || id == DPL_ACT_MLP_HIDDEN;
        const bool residual = id == DPL_ACT_INPUT || id == DPL_ACT_MLP_INPUT;
        const double bytes = (residual ? 4 : item) * (double)dpl_act_width(c, (dpl_act_id)id);
        const double all = bytes * (of_dense ? (double)c->n_dense : layers);
        *(of_dense ? &dense : &attention) += bytes;
        if (all <= most) continue;
        most = all;
        *largest_out = dpl_act_name((dpl_act_id)id);
    }
    const double one = attention + DPL_MAX(n_moe > 0 ? moe : 0, dense);
    const double kept = train ? layers * attention + n_moe * moe + (double)c->n_dense * dense : one;
    const double temporary = (train ? 2 * one * 4 / item : one) +
                             24 * (double)c->d * (1 + (double)c->n_mtp);
    const double logits = 4 * DPL_MAX((double)LOGITS_BLOCK, 64 * (double)c->vocab);
    return n_tokens * (kept + temporary) + logits;
}

static dpl_status check_memory(const pass *p) {
    const char *largest;
    const double rows = (double)p->batch->n_batch, cols = (double)p->batch->n_seq;
    const double bytes = pass_bytes(p->m, rows * cols, p->train, &largest);
    const double most = (double)DPL_MIN(p->m->ctx->memory_bytes,
                                        dpl_arena_free_bytes(p->m->ctx->arena));
    if (bytes <= most) return DPL_OK;
    return dpl_fail(
        DPL_ENOMEM,
        "a pass over %.0f x %.0f tokens needs about %.3g GB, there are %.3g GB; most goes "
        "to %s: use a smaller per_device_batch_size or max_target_length",
        rows, cols, 1e-9 * bytes, 1e-9 * most, largest);
}

static dpl_status run_batch(pass *p, dpl_loss_sums *sums_out) {
    dpl_model *m = p->m;
    size_t n_positions = 0;
    DPL_TRY(check_batch(m, p->batch, &n_positions));
    DPL_TRY(check_memory(p));
    DPL_TRY(dpl_model_rope_tables(m, n_positions));
    const size_t mark = dpl_ctx_mark(m->ctx);
    p->layers.stream = stream_of(m, p->batch);
    dpl_loss_sums sums = {.n_tokens = count_targets(p->batch)};
    dpl_status status = run_pass(p, &sums);
    if (status == DPL_ENUMERIC) status = explain_not_finite(m, &p->layers);
    dpl_ctx_release(m->ctx, mark);
    dpl_ctx_wait(m->ctx);
    if (status == DPL_OK && sums_out) *sums_out = sums;
    return status;
}

dpl_status dpl_model_train_micro(dpl_model *m, const dpl_batch *batch, const dpl_loss_rule *rule,
                                 double xent_scale, double mtp_scale, double aux_scale,
                                 dpl_loss_sums *sums_out) {
    if (!batch->targets) return dpl_fail(DPL_EINVAL, "a training batch needs targets");
    if (!m->params.grad) return dpl_fail(DPL_EINVAL, "dpl_model_begin_training() was not called");
    pass p = {.m = m,
              .batch = batch,
              .rule = rule,
              .train = true,
              .xent_scale = xent_scale,
              .mtp_scale = mtp_scale,
              .aux = aux_of(m, rule, aux_scale, batch)};
    return run_batch(&p, sums_out);
}

dpl_status dpl_model_evaluate(dpl_model *m, const dpl_batch *batch, const dpl_loss_rule *rule,
                              float *logits_out, dpl_loss_sums *sums_out) {
    pass p = {.m = m, .batch = batch, .rule = rule, .logits_out = logits_out};
    return run_batch(&p, sums_out);
}

void dpl_model_head(dpl_model *m, dpl_mat x, size_t n_rows, float *logits) {
    const dpl_mat y = dpl_act_alloc(m, n_rows, m->config.d, false);
    dpl_norm_forward(m, -1, DPL_P_FINAL_NORM, x, n_rows, y);
    head_logits(m, y, n_rows, logits);
}

/* ---- after the optimizer step ---- */

void dpl_model_update_bias(dpl_model *m, double rate) {
    const size_t E = m->config.n_experts, layers = m->config.n_layers + m->config.n_mtp;
    for (size_t layer = 0; layer < layers; layer++) {
        if (!dpl_model_layer_is_moe(&m->config, layer)) continue;
        const int64_t *count = m->counts + layer * E;
        float *bias = dpl_model_bias(m, layer);
        int64_t total = 0;
        for (size_t e = 0; e < E; e++) total += count[e];
        // sign(mean - count) in whole numbers: total / E against count[e].
        for (size_t e = 0; e < E; e++) {
            const int64_t excess = total - count[e] * (int64_t)E;
            bias[e] += (float)(rate * (double)((excess > 0) - (excess < 0)));
        }
    }
}
