/*
 * eval.c - the mean loss of a model over a text.
 *
 * The windows are those of training without packing, in the order of the text.
 */
#include "api/api.h"

static dpl_status run_batches(dpl_model *model, const dpl_data *data, uint64_t n_batches,
                              dpl_tokens *t, dpl_progress_fn progress, void *arg,
                              dpl_loss_sums *total) {
    const dpl_batch batch = {t->n_batch, t->n_seq, t->ids, t->targets, t->segment, t->position};
    const uint64_t n_windows = dpl_data_samples(data, false);
    for (uint64_t i = 0; i < n_batches; i++) {
        const uint64_t first = i * t->n_batch;
        dpl_loss_sums sums;
        dpl_data_train(data, first, t);
        // Rows past the last window start over: they are not to be counted again.
        const size_t n_new = (size_t)DPL_MIN(t->n_batch, n_windows - first) * t->n_seq;
        memset(t->targets + n_new, 0xff, (t->n_batch * t->n_seq - n_new) * sizeof *t->targets);
        DPL_TRY(dpl_model_evaluate(model, &batch, &(dpl_loss_rule){0}, NULL, &sums));
        total->xent += sums.xent;
        total->n_tokens += sums.n_tokens;
        if (progress && progress(arg, i + 1, n_batches) != 0)
            return dpl_fail(DPL_EINTR, "stopped after %llu of %llu batches",
                            (unsigned long long)i + 1, (unsigned long long)n_batches);
    }
    return DPL_OK;
}

static dpl_status eval_data(dpl_model *model, const dpl_data *data, const dpl_options *o,
                            dpl_progress_fn progress, void *arg, dpl_loss_sums *total) {
    const uint64_t n_windows = dpl_data_samples(data, false);
    const double rows = o->eval_per_device_batch_size > 0 ? o->eval_per_device_batch_size
                                                          : o->per_device_batch_size;
    // A text that fills few rows is not worth a whole batch.
    const size_t n_batch = (size_t)DPL_MIN(DPL_MAX(rows, 1.0), (double)n_windows);
    uint64_t n_batches = (n_windows - 1) / n_batch + 1;
    if (o->eval_steps > 0) n_batches = DPL_MIN(n_batches, (uint64_t)o->eval_steps);
    dpl_tokens t;
    DPL_TRY(dpl_api_check_batch(&model->config, n_batch, (size_t)o->max_target_length));
    DPL_TRY(dpl_tokens_alloc(n_batch, (size_t)o->max_target_length, &t));
    const dpl_status status = run_batches(model, data, n_batches, &t, progress, arg, total);
    dpl_tokens_free(&t);
    return status;
}

dpl_status dpl_model_eval(dpl_model *model, const char *data_path, const dpl_config *config,
                          dpl_progress_fn progress, void *arg, double *loss_out,
                          uint64_t *n_tokens_out) {
    dpl_config *defaults = NULL;
    dpl_data *data = NULL;
    dpl_loss_sums total = {0};
    DPL_CHECK(model && data_path && loss_out,
              "a model, a data path and a place for the loss are needed");
    if (!config) DPL_TRY(dpl_config_open(NULL, &defaults));
    dpl_options o = config ? config->o : defaults->o;
    // A file that is given here is text unless it is said to be tokens.
    o.dataset_type = dpl_is(o.dataset_type, "bin") ? "bin" : "text";
    o.dataset_path = data_path;
    o.eval_dataset_path = "";
    o.eval_split_fraction = 0;
    o.packing = o.attend_across_documents = o.enable_data_shuffling = false;
    o.reuse_example_batch = 0;
    dpl_status status = dpl_data_open(&o, 1, model->config.vocab, &data);
    if (status == DPL_OK) status = eval_data(model, data, &o, progress, arg, &total);
    dpl_data_close(&data);
    dpl_config_close(&defaults);
    if (status != DPL_OK) return status;
    *loss_out = total.xent / total.n_tokens;
    if (n_tokens_out) *n_tokens_out = (uint64_t)total.n_tokens;
    return DPL_OK;
}
