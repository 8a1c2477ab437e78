// generate.c - text, one token at a time, over the decoder with its cache of the compressed latent.
//
// A drawn token is fed when the next one is asked for, so the last token of a text costs no pass.
#include "api/api.h"

struct dpl_generator {
    dpl_model *model;
    dpl_decoder *decoder;
    float *logits; // (V) after the newest token that was fed
    dpl_generator_options options;
    size_t n_tokens; // of the text so far, the pending one included
    uint64_t n_drawn;
    int32_t pending; // drawn and not fed yet; -1: none
};

dpl_status dpl_generator_open(dpl_model *model, const dpl_generator_options *o,
                              dpl_generator **generator_out) {
    DPL_NEED(model && o && generator_out);
    DPL_CHECK(o->struct_bytes == sizeof *o, "struct_bytes must be sizeof(dpl_generator_options)");
    DPL_TRY(dpl_check_size("tokens_max", o->tokens_max, 1, model->config.max_positions));
    DPL_CHECK(o->temperature >= 0 && o->temperature <= 1e6, "temperature=%g, expected 0 to 1e6",
              o->temperature);
    DPL_CHECK(o->top_p > 0 && o->top_p <= 1, "top_p is %g, expected above 0 to 1", o->top_p);
    dpl_generator *g = dpl_alloc(sizeof *g);
    if (g) *g = (dpl_generator){.model = model, .options = *o, .pending = -1};
    if (g) g->logits = dpl_alloc_array(model->config.vocab, sizeof(float));
    dpl_status status = g && g->logits ? DPL_OK : dpl_fail(DPL_ENOMEM, "no memory for a generator");
    if (status == DPL_OK) status = dpl_decoder_open(model, o->tokens_max, &g->decoder);
    if (status == DPL_OK) *generator_out = g;
    else dpl_generator_close(&g);
    return status;
}

void dpl_generator_close(dpl_generator **generator) {
    if (!generator || !*generator) return;
    dpl_decoder_close(&(*generator)->decoder);
    dpl_free((*generator)->logits);
    dpl_free(*generator);
    *generator = NULL;
}

static dpl_status feed_pending(dpl_generator *g) {
    if (g->pending >= 0) DPL_TRY(dpl_decoder_feed(g->decoder, &g->pending, 1, g->logits));
    g->pending = -1;
    return DPL_OK;
}

dpl_status dpl_generator_feed(dpl_generator *g, const int32_t *ids, size_t n_ids) {
    DPL_CHECK(g && ids && n_ids > 0, "a generator and at least one id are needed");
    DPL_TRY(feed_pending(g));
    DPL_TRY(dpl_decoder_feed(g->decoder, ids, n_ids, g->logits));
    g->n_tokens += n_ids;
    return DPL_OK;
}

dpl_status dpl_generator_next(dpl_generator *g, int32_t *id_out) {
    DPL_NEED(g && id_out);
    const dpl_generator_options *o = &g->options;
    DPL_CHECK(g->n_tokens > 0, "nothing was fed, expected at least one token first");
    DPL_CHECK(g->n_tokens < o->tokens_max, "the text has its %zu tokens, no more fit", g->n_tokens);
    DPL_TRY(feed_pending(g));
    g->pending = dpl_sample(g->logits, g->model->config.vocab, o->temperature, o->top_p, o->seed,
                            g->n_drawn++);
    g->n_tokens++;
    *id_out = g->pending;
    return DPL_OK;
}
