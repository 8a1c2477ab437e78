// model.c - the stack of layers: forward, loss, multi-token prediction, backward of a micro-batch.
//
// The head and its loss go over the tokens in blocks, forward and backward at once, so that the
// (B*S, V) logits never exist in memory. Everything a step needs comes from the context's arena and
// is released at its end.
#include <math.h>
#include <stdio.h>

#include "model/block.h"

#define LOGITS_BLOCK ((size_t)4 << 20) // elements of one block of logits

dpl_status dpl_model_rope_tables(dpl_model *m, size_t n) {
    const size_t half = m->config.d_rope / 2;
    if (n <= m->n_positions) return DPL_OK;
    n = DPL_MIN(DPL_MAX(n, 2 * m->n_positions), m->config.max_positions);
    float *table = dpl_alloc_array((2 * n + 1) * half, sizeof(float)); // cos, sin, frequencies
    if (!table) return dpl_fail(DPL_ENOMEM, "no memory for the rotary tables of %zu positions", n);
    float *frequency = table + 2 * n * half;
    const double factor = dpl_rope_frequencies(&m->config, frequency);
    for (size_t i = 0; i < n * half; i++) {
        const double angle = (double)(i / half) * (double)frequency[i % half];
        table[i] = (float)(cos(angle) * factor);
        table[n * half + i] = (float)(sin(angle) * factor);
    }
    dpl_ctx_wait(m->ctx);
    dpl_free(m->cos);
    m->cos = table;
    m->sin = table + n * half;
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

void dpl_probe_mat(dpl_model *m, const char *stem, int layer, const dpl_batch *b, dpl_mat mat,
                   size_t width) {
    if (!m->probe) return;
    const size_t mark = dpl_ctx_mark(m->ctx), T = dpl_batch_tokens(b);
    const dpl_mat copy = dpl_act_alloc(m, T, width, true);
    dpl_copy(m->ctx, mat, T, width, copy);
    dpl_ctx_wait(m->ctx);
    const int64_t shape[3] = {(int64_t)b->n_batch, (int64_t)b->n_seq, (int64_t)width};
    send_probe(m, stem, layer, "", false, 3, shape, copy.p);
    dpl_ctx_release(m->ctx, mark);
}

void dpl_probe_routing(dpl_model *m, int layer, const dpl_moe_saved *saved) {
    if (!m->probe) return;
    const size_t E = m->config.n_experts, K = m->config.top_k, T = saved->ep.n_tokens;
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
static dpl_status check_at(const dpl_batch *b, size_t i, const char *what, int32_t value, int low,
                           size_t n, const char *why) {
    if (value >= low && (value < 0 || (size_t)value < n)) return DPL_OK;
    return dpl_fail(DPL_EINVAL, "%s %zu of row %zu is %d, expected %d to %zu%s", what, i % b->n_seq,
                    i / b->n_seq, (int)value, low, n - 1, why);
}

static dpl_status check_batch(const dpl_model *m, const dpl_batch *b, size_t *n_positions_out) {
    const size_t V = m->config.vocab, limit = m->config.max_positions;
    DPL_CHECK(b->ids && b->n_batch > 0 && b->n_seq > 0,
              "a batch of %zu x %zu tokens, expected at least 1 x 1", b->n_batch, b->n_seq);
    DPL_CHECK(b->n_seq <= limit,
              "a sequence of %zu tokens, expected at most max_position_embeddings = %zu", b->n_seq,
              limit);
    size_t last = b->n_seq - 1;
    for (size_t i = 0; i < dpl_batch_tokens(b); i++) {
        const int32_t target = b->targets ? DPL_MAX(b->targets[i], -1) : -1;
        const int32_t position = b->position ? b->position[i] : 0;
        DPL_TRY(check_at(b, i, "token", b->ids[i], 0, V, " (vocab_size - 1)"));
        DPL_TRY(check_at(b, i, "target", target, -1, V, " (vocab_size - 1)"));
        DPL_TRY(check_at(b, i, "position", position, 0, limit, ""));
        last = DPL_MAX(last, (size_t)position);
    }
    *n_positions_out = last + 1;
    return DPL_OK;
}

static dpl_batch with_positions(dpl_model *m, dpl_batch b) {
    if (b.position) return b;
    int32_t *counted = dpl_ctx_alloc(m->ctx, dpl_batch_tokens(&b) * sizeof *counted);
    for (size_t i = 0; i < dpl_batch_tokens(&b); i++) counted[i] = (int32_t)(i % b.n_seq);
    b.position = counted;
    return b;
}

// Depth k of multi-token prediction sees the embedding of the token k further and predicts the one
// after it. Where that token is in another document the position is padding.
static dpl_batch shift(dpl_model *m, const dpl_batch *b, size_t k) {
    const size_t n_seq = b->n_seq - k, n = b->n_batch * n_seq;
    int32_t *block = dpl_ctx_alloc(m->ctx, 4 * n * sizeof *block);
    for (size_t i = 0; i < n; i++) {
        const size_t here = i / n_seq * b->n_seq + i % n_seq, there = here + k;
        const int32_t segment = b->segment ? b->segment[here] : 1;
        const bool inside = !b->segment || (segment != 0 && segment == b->segment[there]);
        block[i] = b->ids[there];
        block[n + i] = inside ? b->targets[there] : -1;
        block[2 * n + i] = inside ? segment : 0;
        block[3 * n + i] = b->position[here];
    }
    return (dpl_batch){b->n_batch, n_seq, block, block + n, block + 2 * n, block + 3 * n};
}

double dpl_batch_targets(const dpl_batch *b, size_t k) {
    double n = 0;
    for (size_t i = 0; b->targets && i + k < dpl_batch_tokens(b); i++) {
        if (i % b->n_seq + k >= b->n_seq || b->targets[i + k] < 0) continue;
        n += k == 0 || !b->segment || (b->segment[i] != 0 && b->segment[i] == b->segment[i + k]);
    }
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

/* ---- one pass ---- */
// What follows the layers (depth 0) or a layer of multi-token prediction: final norm, head, loss.
// Depth k has an own layer, continues from the normed output of depth k - 1, whose sequences are
// one longer, and predicts the token k further.
typedef struct depth {
    int layer; // depth 0: -1
    dpl_param_id norm;
    dpl_batch batch;
    dpl_aux aux;
    dpl_mat y, normed, dnormed; // y: output of the last layer
    float *rstd;
    double *sums;                       // (3, device): xent, z, squares of logits_out
    dpl_mat embedded, previous, joined; // from here on: not of depth 0
    float *rstd_e, *rstd_h;
    dpl_block_saved block;
} depth;

typedef struct pass {
    dpl_model *m;
    const dpl_batch *batch;
    const dpl_loss_rule *rule;
    bool train;
    double xent_scale, mtp_scale, aux_scale;
    float *logits_out; // (B, S, V) or NULL
    dpl_layers layers;
    depth *depths; // (n_mtp + 1)
    size_t n_mtp;
} pass;

// Losses of all rows, and their sums. In training the gradient goes to dnormed and into the head's.
static void cross_entropy(const pass *p, size_t k, float *loss, float *z) {
    dpl_model *m = p->m;
    const depth *d = &p->depths[k];
    const size_t V = m->config.vocab, n_rows = dpl_batch_tokens(&d->batch),
                 mark = dpl_ctx_mark(m->ctx);
    const size_t block = DPL_MIN(DPL_MAX(LOGITS_BLOCK / V, 64), n_rows);
    const float scale = (float)(k ? p->mtp_scale : p->xent_scale);
    const dpl_mat logits = dpl_act_alloc(m, block, V, true);
    const dpl_weight w = dpl_model_weight(m, head_param(m));
    dpl_ctx_phase(m->ctx, DPL_PHASE_LOSS);
    if (p->train && scale == 0)
        dpl_zero(m->ctx, d->dnormed.p, n_rows * m->config.d * sizeof(float));
    for (size_t first = 0; first < n_rows; first += block) {
        const size_t n = DPL_MIN(block, n_rows - first);
        const dpl_mat h = dpl_mat_at(d->normed, first, 0);
        head_logits(m, h, n, logits.p);
        dpl_xent(m->ctx, logits.p, V, d->batch.targets + first, n, V,
                 k ? 0 : (float)p->rule->z_weight, scale, loss + first, z + first);
        if (scale == 0) continue;
        dpl_gemm_dgrad(m->ctx, logits, &w, dpl_one_group(n), dpl_mat_at(d->dnormed, first, 0),
                       false);
        dpl_weight_grad(m->ctx, logits, h, (dpl_row_map){0}, dpl_one_group(n), &w);
    }
    dpl_sum(m->ctx, loss, false, n_rows, &d->sums[0]);
    dpl_sum(m->ctx, z, false, n_rows, &d->sums[1]);
    dpl_ctx_phase(m->ctx, DPL_PHASE_OTHER);
    dpl_ctx_release(m->ctx, mark);
}

// Logits and losses in full, for comparison with other programs; only when somebody probes.
static void probe_head(const pass *p, size_t k, const float *loss) {
    dpl_model *m = p->m;
    const depth *d = &p->depths[k];
    char number[24] = "", hidden_name[48] = "hidden.final", logits_name[48] = "logits";
    if (k > 1) snprintf(number, sizeof number, "%zu", k);
    if (k > 0) snprintf(hidden_name, sizeof hidden_name, "mtp%s.hidden", number);
    if (k > 0) snprintf(logits_name, sizeof logits_name, "mtp%s.logits", number);
    dpl_probe_mat(m, hidden_name, -1, &d->batch, d->normed, m->config.d);
    if (!m->probe || !p->train) return;
    const size_t mark = dpl_ctx_mark(m->ctx);
    const dpl_mat logits = dpl_act_alloc(m, dpl_batch_tokens(&d->batch), m->config.vocab, true);
    head_logits(m, d->normed, dpl_batch_tokens(&d->batch), logits.p);
    dpl_probe_mat(m, logits_name, -1, &d->batch, logits, m->config.vocab);
    const int64_t shape[2] = {(int64_t)d->batch.n_batch, (int64_t)d->batch.n_seq};
    if (k == 0) m->probe(m->probe_arg, "token_loss", false, 2, shape, loss);
    dpl_ctx_release(m->ctx, mark);
}

static void head_forward(const pass *p, size_t k) {
    dpl_model *m = p->m;
    depth *d = &p->depths[k];
    const size_t T = dpl_batch_tokens(&d->batch), D = m->config.d;
    d->normed = dpl_act_alloc(m, T, D, false);
    d->rstd = dpl_norm_forward(m, d->layer, d->norm, d->y, T, d->normed);
    if (p->train) d->dnormed = dpl_act_alloc(m, T, D, true);
    d->sums = dpl_ctx_alloc(m->ctx, 3 * sizeof(double));
    dpl_zero(m->ctx, d->sums, 3 * sizeof(double));
    const size_t mark = dpl_ctx_mark(m->ctx);
    float *loss = dpl_ctx_alloc(m->ctx, T * sizeof *loss),
          *z = dpl_ctx_alloc(m->ctx, T * sizeof *z);
    if (p->logits_out) {
        head_logits(m, d->normed, T, p->logits_out);
        dpl_sum(m->ctx, p->logits_out, true, T * m->config.vocab, &d->sums[2]);
    }
    if (d->batch.targets) cross_entropy(p, k, loss, z);
    probe_head(p, k, loss);
    dpl_ctx_release(m->ctx, mark);
}

static bool is_finite(dpl_model *m, const float *x, size_t n) {
    size_t i = 0;
    dpl_ctx_wait(m->ctx);
    while (i < n && isfinite(x[i])) i++;
    return i == n;
}

// The first tensor of a layer (-1: outside of layers) that is not finite; with `more` of the layers
// behind it and outside of layers too.
static const char *bad_tensor(dpl_model *m, int layer, bool more) {
    for (size_t i = 0; i < m->n_disk; i++) {
        const dpl_disk_tensor *t = &m->disk[i];
        if (!t->param || t->copy_of_shared) continue;
        const int its = t->param->layer;
        if (its != layer && (!more || (its >= 0 && its < layer))) continue;
        if (!dpl_disk_is_finite(m, t, m->params.master)) return t->name;
    }
    return NULL;
}

// Says where a pass stopped being finite: the layers run again, and each output is looked at. The
// layer that went wrong is the one whose output is the first bad one; a router that would meet it
// is not to blame. Where all are good the error text that is there stands, unless a tensor explains
// it.
static dpl_status explain_not_finite(pass *p) {
    dpl_model *m = p->m;
    const dpl_probe_fn probe = m->probe;
    bool bad = false;
    dpl_layers again = {.batch = with_positions(m, *p->batch), .bad = &bad};
    m->probe = NULL; // it has seen all this
    dpl_layers_forward(m, &again);
    m->probe = probe;
    const int layer = (int)again.n_done - 1; // of the first bad output, or what ran behind the last
    const char *tensor = bad_tensor(m, layer, !bad);
    if (!bad) return tensor ? dpl_fail(DPL_ENUMERIC, "%s is not finite", tensor) : DPL_ENUMERIC;
    char place[32] = "the embedding";
    if (layer >= 0) snprintf(place, sizeof place, "layer %d", layer);
    return dpl_fail(DPL_ENUMERIC, "the output of %s is not finite%s%s", place,
                    tensor ? ", nor is " : "", tensor ? tensor : "");
}

static void count_experts(dpl_model *m, size_t layer, const dpl_moe_saved *saved,
                          dpl_loss_sums *sums) {
    const size_t E = m->config.n_experts;
    for (size_t e = 0; e < E; e++) m->counts[layer * E + e] += saved->ep.counts[e];
    sums->balance += saved->aux[0];
    sums->router_z += saved->aux[1];
}

dpl_status dpl_layers_forward(dpl_model *m, dpl_layers *l) {
    const size_t L = m->config.n_layers, T = dpl_batch_tokens(&l->batch), D = m->config.d;
    l->x = dpl_ctx_alloc(m->ctx, (L + 1) * sizeof *l->x);
    DPL_TRY(dpl_flow_enter(m, 0));
    l->x[0] = embed(m, l->batch.ids, T);
    dpl_probe_mat(m, "hidden.embed", -1, &l->batch, l->x[0], D);
    for (size_t i = 0; i <= L; i++) {
        if (l->bad) *l->bad = !is_finite(m, l->x[i].p, T * D);
        if (l->bad && *l->bad) return DPL_ENUMERIC;
        l->n_done = i + 1;
        if (i > 0) dpl_probe_mat(m, "hidden", (int)i - 1, &l->batch, l->x[i], D);
        if (i == L) break;
        dpl_block_saved unused;
        l->x[i + 1] = l->blocks || i == 0 ? dpl_act_alloc(m, T, D, true) : l->x[i - 1];
        DPL_TRY(dpl_flow_enter(m, i + 1));
        const size_t mark = dpl_ctx_mark(m->ctx);
        DPL_TRY(dpl_block_forward(m, (int)i, &l->batch, l->aux, l->caches ? &l->caches[i] : NULL,
                                  l->x[i], l->x[i + 1], l->blocks ? &l->blocks[i] : &unused));
        if (!l->blocks && dpl_model_layer_is_moe(&m->config, i)) dpl_moe_forget(&unused.moe);
        if (!l->blocks) dpl_ctx_release(m->ctx, mark);
    }
    return DPL_OK;
}

static dpl_status mtp_forward(pass *p, size_t k, dpl_loss_sums *sums) {
    dpl_model *m = p->m;
    const size_t D = m->config.d;
    const depth *from = &p->depths[k - 1];
    depth *d = &p->depths[k];
    d->layer = (int)(m->config.n_layers + k - 1);
    d->norm = DPL_P_MTP_NORM;
    d->batch = shift(m, &p->layers.batch, k);
    d->aux = *p->layers.aux;
    const size_t T = dpl_batch_tokens(&d->batch), S = d->aux.n_seq = d->batch.n_seq;
    DPL_TRY(dpl_flow_enter(m, (size_t)d->layer + 1));
    d->embedded = embed(m, d->batch.ids, T);
    d->previous = dpl_act_alloc(m, T, D, false);
    for (size_t b = 0; b < d->batch.n_batch; b++)
        dpl_copy(m->ctx, dpl_mat_at(from->normed, b * (S + 1), 0), S, D,
                 dpl_mat_at(d->previous, b * S, 0));
    d->joined = dpl_act_alloc(m, T, 2 * D, false);
    const dpl_mat x = dpl_act_alloc(m, T, D, true), right = dpl_mat_at(d->joined, 0, D);
    d->rstd_e = dpl_norm_forward(m, d->layer, DPL_P_MTP_ENORM, d->embedded, T, d->joined);
    d->rstd_h = dpl_norm_forward(m, d->layer, DPL_P_MTP_HNORM, d->previous, T, right);
    dpl_linear_forward(m, d->layer, DPL_P_MTP_PROJ, d->joined, T, x);
    d->y = dpl_act_alloc(m, T, D, true);
    DPL_TRY(dpl_block_forward(m, d->layer, &d->batch, &d->aux, NULL, x, d->y, &d->block));
    count_experts(m, (size_t)d->layer, &d->block.moe, sums);
    dpl_probe_mat(m, "hidden", d->layer, &d->batch, d->y, D);
    head_forward(p, k);
    return DPL_OK;
}

// dy: gradient of y on entry.
static dpl_status mtp_backward(pass *p, size_t k, dpl_mat dy) {
    dpl_model *m = p->m;
    const depth *from = &p->depths[k - 1];
    depth *d = &p->depths[k];
    const size_t D = m->config.d, T = dpl_batch_tokens(&d->batch), S = d->batch.n_seq;
    const dpl_mat djoined = dpl_act_alloc(m, T, 2 * D, true), right = dpl_mat_at(djoined, 0, D),
                  dx = dpl_act_alloc(m, T, D, true);
    dpl_probe_mat(m, "dhidden", d->layer, &d->batch, dy, D);
    DPL_TRY(dpl_block_backward(m, d->layer, &d->batch, &d->aux, &d->block, dy));
    dpl_linear_backward(m, d->layer, DPL_P_MTP_PROJ, dy, d->joined, T, djoined, false);
    dpl_norm_backward(m, d->layer, DPL_P_MTP_ENORM, djoined, d->embedded, d->rstd_e, T, dx, false);
    embed_backward(m, dx, d->batch.ids, T);
    dpl_norm_backward(m, d->layer, DPL_P_MTP_HNORM, right, d->previous, d->rstd_h, T, dx, false);
    for (size_t b = 0; b < d->batch.n_batch; b++) {
        const dpl_mat rows = dpl_mat_at(from->dnormed, b * (S + 1), 0);
        dpl_add(m->ctx, rows, dpl_mat_at(dx, b * S, 0), S, D, rows);
    }
    return DPL_OK;
}

// Units that a pass goes through: sequences may be too short for the last depths.
static size_t pass_units(const dpl_model *m, size_t n_seq, bool train) {
    const size_t n_mtp = train ? DPL_MIN(m->config.n_mtp, n_seq - 1) : 0;
    return 1 + m->config.n_layers + n_mtp;
}

static dpl_status layers_backward(dpl_model *m, const dpl_layers *l, dpl_mat dx) {
    for (size_t i = m->config.n_layers; i-- > 0;) {
        dpl_probe_mat(m, "dhidden", (int)i, &l->batch, dx, m->config.d);
        DPL_TRY(dpl_flow_enter(m, i + 1));
        DPL_TRY(dpl_block_backward(m, (int)i, &l->batch, l->aux, &l->blocks[i], dx));
        DPL_TRY(dpl_flow_leave(m, i + 1));
    }
    DPL_TRY(dpl_flow_enter(m, 0));
    embed_backward(m, dx, l->batch.ids, dpl_batch_tokens(&l->batch));
    return DPL_OK;
}

static dpl_status backward(pass *p) {
    dpl_model *m = p->m;
    for (size_t u = m->params.n_units; u-- > pass_units(m, p->batch->n_seq, true);) {
        DPL_TRY(dpl_flow_enter(m, u)); // depths that sequences are too short for
        DPL_TRY(dpl_flow_leave(m, u));
    }
    for (size_t k = p->n_mtp + 1; k-- > 0;) {
        const depth *d = &p->depths[k];
        const size_t T = dpl_batch_tokens(&d->batch), mark = dpl_ctx_mark(m->ctx);
        const dpl_mat dy = dpl_act_alloc(m, T, m->config.d, true);
        const size_t unit = (size_t)d->layer + 1;
        if (k) DPL_TRY(dpl_flow_enter(m, unit));
        dpl_norm_backward(m, d->layer, d->norm, d->dnormed, d->y, d->rstd, T, dy, false);
        DPL_TRY(k ? mtp_backward(p, k, dy) : layers_backward(m, &p->layers, dy));
        DPL_TRY(dpl_flow_leave(m, unit)); // what is outside of layers comes last
        dpl_ctx_release(m->ctx, mark);
    }
    return DPL_OK;
}

static dpl_status read_sums(const pass *p, dpl_loss_sums *sums) {
    double all = sums->balance + sums->router_z;
    for (size_t k = 0; k <= p->n_mtp; k++) {
        double values[3];
        dpl_ctx_read(p->m->ctx, values, p->depths[k].sums, sizeof values);
        *(k ? &sums->mtp_xent : &sums->xent) += values[0];
        *(k ? &sums->mtp_tokens : &sums->n_tokens) += dpl_batch_targets(&p->layers.batch, k);
        sums->z += values[1];
        all += values[0] + values[1] + values[2];
    }
    DPL_EXPECT(isfinite(all), DPL_ENUMERIC, "the %s not finite, all layers' outputs are",
               p->train ? "loss is" : "logits are");
    return DPL_OK;
}

// The ranks that end together: those of the experts; of the batch where its losses are over all.
static dpl_comm *comm_of(const pass *p) {
    const dpl_ep_ranks *ranks = &p->m->ranks;
    dpl_comm *batch = p->train ? dpl_ep_batch(ranks, p->rule->balance) : NULL;
    return batch ? batch : ranks->comm;
}

static dpl_aux aux_of(const pass *p) {
    const dpl_model_config *c = &p->m->config;
    const double n_moe = c->n_experts ? (double)(c->n_layers - c->n_dense + c->n_mtp) : 1;
    // Megatron's balance loss is a sum over layers, the others are means.
    const double balance = p->rule->balance == DPL_BALANCE_MEGATRON ? 1 : n_moe;
    // clang-format off
    return (dpl_aux){
        .kind = p->rule->balance, .balance_weight = (float)(p->rule->balance_weight / balance),
        .z_weight = (float)(p->rule->router_z_weight / n_moe), .dscale = (float)p->aux_scale,
        .n_batch = p->batch->n_batch, .n_seq = p->batch->n_seq};
    // clang-format on
}

static dpl_status run_pass(pass *p, dpl_loss_sums *sums) {
    dpl_model *m = p->m;
    dpl_layers *l = &p->layers;
    const size_t L = m->config.n_layers;
    dpl_aux aux;
    if (p->train) {
        aux = aux_of(p);
        l->aux = &aux;
        l->blocks = dpl_ctx_alloc(m->ctx, L * sizeof *l->blocks);
        p->n_mtp = DPL_MIN(m->config.n_mtp, l->batch.n_seq - 1);
    }
    p->depths = dpl_ctx_alloc(m->ctx, (p->n_mtp + 1) * sizeof *p->depths);
    DPL_TRY(dpl_layers_forward(m, l));
    for (size_t i = m->config.n_dense; i < L && p->train; i++)
        count_experts(m, i, &l->blocks[i].moe, sums);
    p->depths[0] = (depth){.layer = -1, .norm = DPL_P_FINAL_NORM, .batch = l->batch, .y = l->x[L]};
    head_forward(p, 0);
    for (size_t k = 1; k <= p->n_mtp; k++) DPL_TRY(mtp_forward(p, k, sums));
    // Whose loss is not finite must not leave the others alone on the way back.
    DPL_TRY(dpl_comm_agree(comm_of(p), read_sums(p, sums)));
    return p->train ? backward(p) : DPL_OK;
}

// Bytes that a layer keeps for backward for each token. An MoE layer is asked for 64 tokens: then
// the padding between its blocks does not count.
static double layer_bytes(const dpl_model *m, size_t layer) {
    const dpl_model_config *c = &m->config;
    const bool moe = dpl_model_layer_is_moe(c, layer);
    const double item = (double)dpl_dtype_bytes(m->dtype);
    double bytes = 4 * (double)c->n_heads + 16 + 2 * (4 - item) * (double)c->d; // stream: fp32
    for (int id = 0; id < (moe ? DPL_ACT_MLPWI : DPL_ACT_N); id++)
        bytes += item * (double)dpl_act_width(c, (dpl_act_id)id);
    return moe ? bytes + (double)dpl_moe_saved_bytes(&m->moe, 64) / 64 : bytes;
}

// An upper bound of what a pass takes from the step arena: what is kept for backward (in evaluation
// one layer at a time), the gradients of one layer, one block of logits.
static double pass_bytes(const dpl_model *m, double n_tokens, bool train) {
    const dpl_model_config *c = &m->config;
    double all = 0, most = 0;
    for (size_t layer = 0; layer < c->n_layers + c->n_mtp; layer++) {
        all += layer_bytes(m, layer);
        most = DPL_MAX(most, layer_bytes(m, layer));
    }
    // Of gradients, which are fp32 where what is kept may be bf16; and beside the layers.
    const double temporary = (train ? 8.0 / (double)dpl_dtype_bytes(m->dtype) : 1) * most;
    const double ends = 24 * (double)c->d * (1 + (double)c->n_mtp);
    const double logits = 4 * DPL_MAX((double)LOGITS_BLOCK, 64 * (double)c->vocab);
    return n_tokens * ((train ? all : most) + temporary + ends) + logits;
}

dpl_status dpl_model_check_memory(const dpl_model *m, size_t n_batch, size_t n_seq, bool train) {
    const double rows = (double)n_batch, cols = (double)n_seq;
    const double bytes = pass_bytes(m, rows * cols, train);
    const size_t share = m->ctx->memory_bytes / m->ctx->n_neighbours;
    const double most = (double)DPL_MIN(share, dpl_arena_free_bytes(m->ctx->arena));
    if (bytes <= most) return DPL_OK;
    return dpl_fail(DPL_ENOMEM,
                    "a pass over %.0f x %.0f tokens needs about %.3g GB, there are %.3g GB: use a "
                    "smaller per_device_batch_size or max_target_length",
                    rows, cols, 1e-9 * bytes, 1e-9 * most);
}

static dpl_status start_pass(pass *p) {
    dpl_model *m = p->m;
    size_t n_positions = 0;
    dpl_status good = check_batch(m, p->batch, &n_positions);
    if (good == DPL_OK)
        good = dpl_model_check_memory(m, p->batch->n_batch, p->batch->n_seq, p->train);
    if (good == DPL_OK) good = dpl_model_rope_tables(m, n_positions);
    DPL_TRY(dpl_comm_agree(comm_of(p), good));
    p->layers.batch = with_positions(m, *p->batch);
    return DPL_OK;
}

static dpl_status run_batch(pass *p, dpl_loss_sums *sums_out) {
    dpl_model *m = p->m;
    dpl_loss_sums sums = {0};
    const size_t mark = dpl_ctx_mark(m->ctx);
    dpl_flow_start(m, pass_units(m, p->batch->n_seq, p->train), p->train);
    dpl_status status = start_pass(p);
    const bool started = status == DPL_OK;
    const double planned = pass_bytes(m, (double)dpl_batch_tokens(p->batch), p->train);
    if (started) m->ctx->planned_end = mark + (size_t)planned;
    if (started) status = run_pass(p, &sums);
    m->ctx->planned_end = 0;
    status = dpl_flow_finish(m, status);
    dpl_ctx_release(m->ctx, mark);
    // Layer by layer once more; ranks that stop at different layers would miss each other.
    const bool alone = !dpl_ep_is_spread(&m->ranks) && dpl_model_shards(m) == 1;
    if (status == DPL_ENUMERIC && started && alone) status = explain_not_finite(p);
    dpl_ctx_release(m->ctx, mark);
    dpl_ctx_wait(m->ctx);
    dpl_ep_forget(&m->ranks);
    if (status == DPL_OK && sums_out) *sums_out = sums;
    return status;
}

dpl_status dpl_model_sit_out(dpl_model *m, size_t n_seq, bool train) {
    dpl_flow_start(m, pass_units(m, n_seq, train), train);
    return dpl_flow_finish(m, DPL_OK);
}

dpl_status dpl_model_train_micro(dpl_model *m, const dpl_batch *batch, const dpl_loss_rule *rule,
                                 double xent_scale, double mtp_scale, double aux_scale,
                                 dpl_loss_sums *sums_out) {
    DPL_CHECK(batch->targets, "a training batch needs targets");
    DPL_CHECK(m->params.grad, "dpl_model_begin_training() was not called");
    pass p = {.m = m, .batch = batch, .rule = rule, .train = true};
    p.xent_scale = xent_scale;
    p.mtp_scale = mtp_scale;
    p.aux_scale = aux_scale;
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
