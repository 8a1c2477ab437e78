// decode.c - generation, one token (or a prompt) at a time. The cache holds each position's
// compressed latent and rotated key, not keys and values per head; the up-projections are absorbed
// into query and output.
#include <math.h>
#include <stdlib.h>

#include "model/block.h"

#define PROMPT_BLOCK 128 // tokens fed through the layers at once

struct dpl_decoder {
    dpl_model *model;
    size_t max_tokens, n_tokens;
    float *memory;         // everything in cache
    dpl_mla_cache cache[]; // (L)
};

// The up-projection in row-major order, as it is multiplied in compute: rounded if the copy is.
static void unpack_kv_b(const dpl_model *m, int layer, float *rows) {
    const dpl_disk_tensor *t = &m->disk[dpl_model_param(m, layer, DPL_P_KV_B)->disk];
    dpl_disk_gather(t, m->params.master, rows);
    for (size_t i = 0; i < dpl_disk_elems(t) && m->params.copy; i++)
        rows[i] = dpl_bf16_to_f32(dpl_f32_to_bf16(rows[i]));
}

dpl_status dpl_decoder_open(dpl_model *m, size_t max_tokens, dpl_decoder **decoder_out) {
    const dpl_model_config *c = &m->config;
    DPL_CHECK(max_tokens > 0 && max_tokens <= c->max_positions,
              "a context of %zu tokens, expected 1 to max_position_embeddings = %zu", max_tokens,
              c->max_positions);
    DPL_TRY(dpl_model_rope_tables(m, max_tokens));
    const size_t latent = max_tokens * c->kv_lora, rope = max_tokens * c->d_rope;
    const size_t per_layer = latent + rope + c->n_heads * (c->d_nope + c->d_v) * c->kv_lora;
    dpl_decoder *d = dpl_alloc(sizeof *d + c->n_layers * sizeof *d->cache);
    if (d) d->memory = dpl_alloc_array(c->n_layers * per_layer, sizeof(float));
    if (!d || !d->memory) {
        dpl_decoder_close(&d);
        return dpl_fail(DPL_ENOMEM, "no memory for a decoding cache of %zu tokens", max_tokens);
    }
    d->model = m;
    d->max_tokens = max_tokens;
    dpl_ctx_wait(m->ctx);
    for (size_t i = 0; i < c->n_layers; i++) {
        float *block = d->memory + i * per_layer;
        d->cache[i] = (dpl_mla_cache){block, block + latent, block + latent + rope, 0};
        unpack_kv_b(m, (int)i, d->cache[i].kv_b);
    }
    *decoder_out = d;
    return DPL_OK;
}

void dpl_decoder_close(dpl_decoder **decoder) {
    if (!decoder || !*decoder) return;
    dpl_free((*decoder)->memory);
    dpl_free(*decoder);
    *decoder = NULL;
}

// logits_out NULL: more blocks follow, whose last token's logits are wanted.
static dpl_status feed_block(dpl_decoder *d, const int32_t *ids, size_t n, float *logits_out) {
    dpl_model *m = d->model;
    const size_t V = m->config.vocab;
    int32_t *position = dpl_ctx_alloc(m->ctx, n * sizeof *position);
    for (size_t i = 0; i < n; i++) position[i] = (int32_t)(d->n_tokens + i);
    for (size_t i = 0; i < m->config.n_layers; i++) d->cache[i].first = d->n_tokens;
    dpl_layers l = {.batch = {1, n, ids, NULL, NULL, position}, .caches = d->cache};
    DPL_TRY(dpl_layers_forward(m, &l));
    d->n_tokens += n;
    if (!logits_out) return DPL_OK;
    float *logits = dpl_ctx_alloc(m->ctx, V * sizeof(float));
    dpl_model_head(m, dpl_mat_at(l.x[m->config.n_layers], n - 1, 0), 1, logits);
    dpl_ctx_read(m->ctx, logits_out, logits, V * sizeof(float));
    return DPL_OK;
}

dpl_status dpl_decoder_feed(dpl_decoder *d, const int32_t *ids, size_t n, float *logits_out) {
    dpl_model *m = d->model;
    DPL_CHECK(n > 0, "no token to feed");
    DPL_CHECK(n <= d->max_tokens - d->n_tokens, "%zu tokens after %zu, the context holds %zu", n,
              d->n_tokens, d->max_tokens);
    for (size_t i = 0; i < n; i++)
        DPL_CHECK(ids[i] >= 0 && (size_t)ids[i] < m->config.vocab,
                  "token %zu is %d, expected 0 to %zu (vocab_size - 1)", i, (int)ids[i],
                  m->config.vocab - 1);
    for (size_t i = 0; i < n; i += PROMPT_BLOCK) {
        const size_t count = DPL_MIN(PROMPT_BLOCK, n - i), mark = dpl_ctx_mark(m->ctx);
        const dpl_status status = feed_block(d, ids + i, count, i + count == n ? logits_out : NULL);
        dpl_ctx_wait(m->ctx);
        dpl_ctx_release(m->ctx, mark);
        DPL_TRY(status);
    }
    return DPL_OK;
}

/* ---- sampling ---- */
typedef struct candidate {
    double p;
    int32_t id;
} candidate;

static int larger_first(const void *a, const void *b) {
    const candidate *x = a, *y = b;
    if (x->p != y->p) return x->p > y->p ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

int32_t dpl_sample(const float *logits, size_t vocab, double temperature, double top_p,
                   uint64_t seed, uint64_t draw) {
    size_t best = 0;
    for (size_t i = 1; i < vocab; i++)
        if (logits[i] > logits[best]) best = i;
    candidate *list = temperature > 0 ? dpl_alloc_array(vocab, sizeof *list) : NULL;
    if (!list) return (int32_t)best;
    double total = 0;
    for (size_t i = 0; i < vocab; i++) {
        const double below = (double)logits[i] - (double)logits[best];
        list[i] = (candidate){exp(below / temperature), (int32_t)i};
        total += list[i].p;
    }
    qsort(list, vocab, sizeof *list, larger_first);
    // The nucleus: the fewest most probable tokens that hold top_p of the mass.
    size_t n = 0;
    double mass = 0;
    while (n < vocab && (n == 0 || mass < top_p * total)) mass += list[n++].p;
    double u = dpl_rng_uniform(seed, 0x73616d706c65, draw) * mass;
    size_t i = 0;
    while (i + 1 < n && u >= list[i].p) u -= list[i++].p;
    const int32_t id = list[i].id;
    dpl_free(list);
    return id;
}
