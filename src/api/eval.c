/*
 * eval.c - the mean loss of a model over a text.
 *
 * Each document is cut into windows that do not overlap; the first token of a window is the last one that
 * the window before predicted, so every token but a document's first is predicted once.
 */
#include "api/api.h"

typedef struct window_walk { // where the next row of a batch begins
    const dpl_source *source;
    size_t n_seq;
    size_t document;
    uint64_t at;
} window_walk;

typedef struct rows { // (B, S) each
    size_t n_batch, n_seq;
    int32_t *ids, *targets, *segment;
    int32_t *text; // (S + 1)
} rows;

// Tokens from the walk's place to the end of its document; moves on to a document that has two at least.
static uint64_t tokens_left(window_walk *walk)
{
    while (walk->document < dpl_source_documents(walk->source)) {
        const uint64_t end = dpl_source_document(walk->source, walk->document + 1);
        if (end - walk->at >= 2) return end - walk->at;
        walk->document++;
        walk->at = end;
    }
    return 0;
}

static uint64_t count_windows(const dpl_source *source, size_t n_seq)
{
    uint64_t n = 0;
    for (size_t d = 0; d < dpl_source_documents(source); d++) {
        const uint64_t tokens = dpl_source_document(source, d + 1) - dpl_source_document(source, d);
        n += (tokens - 1 + n_seq - 1) / n_seq; // a document has one token at least
    }
    return n;
}

// Fills the batch; rows without text, and the rest of a short row, are padding.
static void fill_rows(window_walk *walk, rows *r)
{
    const size_t n = r->n_seq;
    for (size_t b = 0; b < r->n_batch; b++) {
        int32_t *ids = r->ids + b * n, *targets = r->targets + b * n, *segment = r->segment + b * n;
        const size_t used = (size_t)DPL_MIN((uint64_t)n + 1, tokens_left(walk));
        if (used) dpl_source_read(walk->source, walk->at, used, r->text);
        for (size_t s = 0; s < n; s++) {
            const bool there = s + 1 < used;
            ids[s] = there ? r->text[s] : 0;
            targets[s] = there ? r->text[s + 1] : -1;
            segment[s] = there;
        }
        if (used) walk->at += used - 1;
    }
}

static dpl_status run_batches(dpl_model *model, window_walk *walk, rows *r, uint64_t n_batches,
                              dpl_progress_fn progress, void *arg, dpl_loss_sums *total)
{
    const dpl_batch batch = {.n_batch = r->n_batch,
                             .n_seq = r->n_seq,
                             .ids = r->ids,
                             .targets = r->targets,
                             .segment = r->segment};
    for (uint64_t i = 0; i < n_batches; i++) {
        dpl_loss_sums sums;
        fill_rows(walk, r);
        DPL_TRY(dpl_model_evaluate(model, &batch, &(dpl_loss_rule){0}, NULL, &sums));
        total->xent += sums.xent;
        total->n_tokens += sums.n_tokens;
        if (progress && progress(arg, i + 1, n_batches) != 0)
            return dpl_fail(DPL_EINTR, "stopped after %llu of %llu batches",
                            (unsigned long long)i + 1, (unsigned long long)n_batches);
    }
    return DPL_OK;
}

static dpl_status eval_source(dpl_model *model, const dpl_source *source, const dpl_config *config,
                              dpl_progress_fn progress, void *arg, dpl_loss_sums *total)
{
    const dpl_options *o = &config->o;
    const double batch = o->eval_per_device_batch_size > 0 ? o->eval_per_device_batch_size
                                                           : o->per_device_batch_size;
    const size_t n_seq = (size_t)o->max_target_length;
    const uint64_t n_windows = count_windows(source, n_seq);
    if (n_windows == 0)
        return dpl_fail(DPL_EINVAL, "the text has no token to predict, expected two at least");
    // A text that fills few rows is not worth a whole batch.
    rows r = {.n_batch = (size_t)DPL_MIN(DPL_MAX(batch, 1.0), (double)n_windows), .n_seq = n_seq};
    DPL_TRY(dpl_api_check_batch(&model->config, r.n_batch, n_seq));
    uint64_t n_batches = (n_windows + r.n_batch - 1) / r.n_batch;
    if (o->eval_steps > 0) n_batches = DPL_MIN(n_batches, (uint64_t)o->eval_steps);
    const size_t n = r.n_batch * n_seq;
    r.ids = dpl_alloc_array(3 * n + n_seq + 1, sizeof(int32_t));
    if (!r.ids) return dpl_fail(DPL_ENOMEM, "no memory for a batch of %zu tokens", n);
    r.targets = r.ids + n;
    r.segment = r.ids + 2 * n;
    r.text = r.ids + 3 * n;
    window_walk walk = {.source = source, .n_seq = n_seq};
    const dpl_status status = run_batches(model, &walk, &r, n_batches, progress, arg, total);
    dpl_free(r.ids);
    return status;
}

dpl_status dpl_model_eval(dpl_model *model, const char *data_path, const dpl_config *config,
                          dpl_progress_fn progress, void *arg, double *loss_out,
                          uint64_t *n_tokens_out)
{
    if (!model || !data_path || !loss_out)
        return dpl_fail(DPL_EINVAL, "a model, a data path and a place for the loss are needed");
    dpl_config *defaults = NULL;
    if (!config) DPL_TRY(dpl_config_open(NULL, &defaults));
    if (!config) config = defaults;
    // Other kinds are for training only; a file that is given here is text unless it is said to be tokens.
    const dpl_source_kind kind = dpl_is(config->o.dataset_type, "bin") ? DPL_SOURCE_BIN
                                                                       : DPL_SOURCE_TEXT;
    dpl_source *source = NULL;
    dpl_loss_sums total = {0};
    dpl_status status = dpl_source_open(data_path, kind, (int)config->o.dataset_token_bytes,
                                        model->config.vocab, &source);
    if (status == DPL_OK) status = eval_source(model, source, config, progress, arg, &total);
    dpl_source_close(&source);
    dpl_config_close(&defaults);
    if (status != DPL_OK) return status;
    *loss_out = total.xent / total.n_tokens;
    if (n_tokens_out) *n_tokens_out = (uint64_t)total.n_tokens;
    return DPL_OK;
}
