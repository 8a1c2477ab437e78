// eval.c - the mean loss of a model over a text.
//
// The windows are those of training without packing, in the order of the text.
#include "api/api.h"

static dpl_status eval_data(dpl_model *model, const dpl_data *data, const dpl_options *o,
                            dpl_progress_fn progress, void *arg, dpl_eval_metrics *metrics_out) {
    const double rows = o->eval_per_device_batch_size > 0 ? o->eval_per_device_batch_size
                                                          : o->per_device_batch_size;
    // A text that fills few rows is not worth a whole batch.
    const double n_windows = (double)dpl_data_samples(data, true);
    const size_t n_batch = (size_t)DPL_MIN(DPL_MAX(rows, 1.0), n_windows);
    const size_t n_seq = (size_t)o->max_target_length;
    dpl_tokens t;
    DPL_TRY(dpl_api_check_batch(&model->config, n_batch, n_seq));
    DPL_TRY(dpl_tokens_alloc(n_batch, n_seq, &t));
    const dpl_status status = dpl_evaluate(model, NULL, data, &(dpl_loss_rule){0}, o->eval_steps,
                                           &t, progress, arg, metrics_out);
    dpl_tokens_free(&t);
    return status;
}

dpl_status dpl_model_eval(dpl_model *model, const char *data_path, const dpl_config *config,
                          dpl_progress_fn progress, void *arg, double *loss_out,
                          uint64_t *n_tokens_out) {
    dpl_config *defaults = NULL;
    dpl_data data = {0};
    dpl_eval_metrics m;
    DPL_NEED(model && data_path && loss_out);
    if (!config) DPL_TRY(dpl_config_open(NULL, &defaults));
    dpl_options o = config ? config->o : defaults->o;
    // A file that is given here is text unless it is said to be tokens.
    o.dataset_type = dpl_is(o.dataset_type, "bin") ? "bin" : "text";
    o.dataset_path = data_path;
    o.eval_dataset_path = "";
    o.eval_split_fraction = 1;
    o.packing = o.attend_across_documents = false;
    dpl_status status = dpl_data_open(&o, 1, model->config.vocab, &data);
    if (status == DPL_OK) status = eval_data(model, &data, &o, progress, arg, &m);
    dpl_data_close(&data);
    dpl_config_close(&defaults);
    if (status != DPL_OK) return status;
    *loss_out = m.loss;
    if (n_tokens_out) *n_tokens_out = (uint64_t)m.n_tokens;
    return DPL_OK;
}
