// probe.c - what happens inside a model on one batch, as a safetensors file: how results are
// compared with those of other programs.
//
// The forward pass reports its tensors by name (dpl_model.probe); gradients and the parameters
// after a few steps are added here. All is collected first, since the file's header lists it.
#include "api/api.h"

typedef struct probe {
    dpl_model *model;
    dpl_config *config;
    dpl_tokens tokens;
    dpl_loss_rule rule;
    dpl_loss_sums sums;
    dpl_optimizer optimizer;
    dpl_st_tensor *list; // what is collected; data are owned, the name stands behind them
    size_t n, n_room;
    dpl_status status; // the first failure; what comes later is not collected
    bool grad;         // gradients of hidden states are wanted
} probe;

// Over those of training.
static const char *const defaults[] = {"dtype=float32", "mtp_loss_scaling_factor=0.3",
                                       "learning_rate=1e-3", "gradient_clipping_threshold=0"};

/* ---- the collection ---- */
// Room for the data of one more tensor; NULL: none is wanted any more.
static void *add(probe *p, const char *name, dpl_st_dtype dtype, int rank, const int64_t *shape) {
    if (p->status != DPL_OK) return NULL;
    dpl_st_tensor t = {.dtype = dtype, .rank = rank, .bytes = dpl_st_dtype_bytes(dtype)};
    for (int i = 0; i < rank; i++) t.bytes *= (uint64_t)(t.shape[i] = shape[i]);
    uint8_t *data = p->n < p->n_room ? dpl_alloc(t.bytes + strlen(name) + 1) : NULL;
    if (!data) {
        p->status = dpl_fail(DPL_ENOMEM, "no memory for the tensor %s", name);
        return NULL;
    }
    t.data = data;
    t.name = strcpy((char *)data + t.bytes, name);
    p->list[p->n++] = t;
    return data;
}

static void collect(probe *p, const char *name, dpl_st_dtype dtype, int rank, const int64_t *shape,
                    const void *data) {
    void *copy = add(p, name, dtype, rank, shape);
    if (copy) memcpy(copy, data, p->list[p->n - 1].bytes);
}

static void collect_f64(probe *p, const char *name, double value) {
    collect(p, name, DPL_ST_F64, 1, (const int64_t[]){1}, &value);
}

static void on_tensor(void *arg, const char *name, bool is_int, int rank, const int64_t *shape,
                      const void *data) {
    probe *p = arg;
    if (p->grad || strncmp(name, "dhidden.", 8) != 0)
        collect(p, name, is_int ? DPL_ST_I64 : DPL_ST_F32, rank, shape, data);
}

// A flat array under its tensors' names on disk.
static dpl_status collect_flat(probe *p, const char *prefix, const float *flat) {
    for (size_t i = 0; i < p->model->n_disk; i++) {
        const dpl_disk_tensor *t = &p->model->disk[i];
        if (!t->param || t->copy_of_shared) continue;
        char name[192];
        snprintf(name, sizeof name, "%s.%s", prefix, t->name);
        float *values = add(p, name, DPL_ST_F32, t->rank, t->shape);
        if (values) dpl_disk_gather(t, flat, values);
    }
    return p->status;
}

/* ---- the batch ---- */
static dpl_status read_batch(probe *p, const dpl_st_file *file) {
    const int64_t vocab = (int64_t)p->model->config.vocab;
    const dpl_st_tensor *ids = dpl_st_find(file, "input_ids"),
                        *labels = dpl_st_find(file, "labels");
    DPL_EXPECT(ids && ids->rank == 2, DPL_EFORMAT, "%s: expected a tensor input_ids (B, S)",
               file->path);
    DPL_EXPECT(!labels || (labels->rank == 2 &&
                           memcmp(labels->shape, ids->shape, 2 * sizeof(int64_t)) == 0),
               DPL_EFORMAT, "%s: expected labels in the shape of input_ids, (%lld, %lld)",
               file->path, (long long)ids->shape[0], (long long)ids->shape[1]);
    const size_t n = dpl_st_elems(ids), n_seq = (size_t)ids->shape[1];
    DPL_TRY(dpl_api_check_batch(&p->model->config, (size_t)ids->shape[0], n_seq));
    DPL_TRY(dpl_tokens_alloc((size_t)ids->shape[0], n_seq, &p->tokens));
    int32_t *targets = p->tokens.targets;
    if (labels) DPL_TRY(dpl_st_read_i32(labels, INT64_MIN, vocab - 1, targets));
    DPL_TRY(dpl_st_read_i32(ids, 0, vocab - 1, p->tokens.ids));
    // Labels are not shifted: position s predicts labels[s + 1].
    const int32_t *unshifted = labels ? targets : p->tokens.ids;
    for (size_t i = 0; i < n; i++)
        targets[i] = (i + 1) % n_seq ? DPL_MAX(unshifted[i + 1], -1) : -1;
    return DPL_OK;
}

// The targets, those of the first multi-token depth without its (depth 1) first column.
static void collect_targets(probe *p, const char *name, size_t depth) {
    const size_t n_seq = p->tokens.n_seq, width = n_seq - depth;
    const int64_t shape[2] = {(int64_t)p->tokens.n_batch, (int64_t)width};
    int64_t *out = add(p, name, DPL_ST_I64, 2, shape);
    for (size_t i = 0; out && i < p->tokens.n_batch * width; i++) {
        const int32_t target = p->tokens.targets[i / width * n_seq + i % width + depth];
        out[i] = target < 0 ? -100 : target;
    }
}

static void collect_mask(probe *p) {
    const int64_t shape[2] = {(int64_t)p->tokens.n_batch, (int64_t)p->tokens.n_seq};
    uint8_t *out = add(p, "loss_mask", DPL_ST_U8, 2, shape);
    for (size_t i = 0; out && i < p->tokens.n_batch * p->tokens.n_seq; i++)
        out[i] = p->tokens.targets[i] >= 0;
}

/* ---- passes ---- */
static double mean(double sum, double n) {
    return n > 0 ? sum / n : 0.0;
}

static void collect_losses(probe *p) {
    const dpl_loss_sums *s = &p->sums;
    const double loss = mean(s->xent, s->n_tokens), mtp = mean(s->mtp_xent, s->mtp_tokens);
    collect_f64(p, "loss", loss);
    if (p->model->config.n_mtp > 0) collect_f64(p, "mtp.loss", mtp);
    collect_f64(p, "total_loss",
                loss + mean(s->z, s->n_tokens) + p->rule.mtp_weight * mtp + s->balance +
                    s->router_z);
}

// Router biases after the first step.
static void update_bias(probe *p, bool first) {
    const dpl_model_config *c = &p->model->config;
    const double rate = p->config->o.routed_bias_update_rate;
    if (!c->routed_bias || rate == 0) return;
    dpl_model_update_bias(p->model, rate);
    for (size_t l = 0; l < c->n_layers + c->n_mtp && first; l++) {
        char name[64];
        snprintf(name, sizeof name, "router.%zu.bias_next", l);
        if (dpl_model_layer_is_moe(c, l))
            collect(p, name, DPL_ST_F32, 1, (const int64_t[]){(int64_t)c->n_experts},
                    dpl_model_bias(p->model, l));
    }
}

// Optimizer steps; the gradients and biases of the first one are there already.
static dpl_status run_steps(probe *p, size_t n_steps) {
    const dpl_options *o = &p->config->o;
    char prefix[32];
    DPL_TRY(dpl_optimizer_open(o, p->model, &p->optimizer));
    for (size_t i = 0; i < n_steps; i++) {
        double norm;
        if (i > 0) DPL_TRY(dpl_train_pass(p->model, NULL, &p->rule, &p->tokens, NULL, &p->sums));
        if (i > 0) update_bias(p, false);
        DPL_TRY(dpl_optimizer_norm(&p->optimizer, NULL, &norm));
        dpl_optimizer_apply(&p->optimizer, o->learning_rate, norm);
    }
    dpl_ctx_wait(p->model->ctx);
    snprintf(prefix, sizeof prefix, "adamw%zu", n_steps);
    return collect_flat(p, prefix, p->model->params.master);
}

static dpl_status run_probe(probe *p, const char *input_path, const dpl_probe_options *o) {
    dpl_st_file *file;
    DPL_TRY(dpl_st_open(input_path, &file));
    const dpl_status status = read_batch(p, file);
    dpl_st_close(&file);
    DPL_TRY(status);
    const dpl_model_config *c = &p->model->config;
    p->n_room = 2 * p->model->n_disk + 16 * (c->n_layers + c->n_mtp + 2); // more than there are
    p->list = dpl_alloc_array(p->n_room, sizeof *p->list);
    if (!p->list) return dpl_fail(DPL_ENOMEM, "no memory to list %zu tensors", p->n_room);
    p->rule = dpl_options_loss(&p->config->o);
    p->grad = o->grad != 0;
    p->model->probe = on_tensor;
    p->model->probe_arg = p;
    DPL_TRY(dpl_model_begin_training(p->model));
    DPL_TRY(dpl_train_pass(p->model, NULL, &p->rule, &p->tokens, NULL, &p->sums));
    p->model->probe = NULL; // later passes are those of other weights
    collect_targets(p, "targets", 0);
    collect_mask(p);
    if (c->n_mtp > 0 && p->tokens.n_seq > 1) collect_targets(p, "mtp.targets", 1);
    collect_losses(p);
    update_bias(p, true);
    if (o->grad) DPL_TRY(collect_flat(p, "grad", p->model->params.grad));
    return o->n_steps ? run_steps(p, o->n_steps) : p->status;
}

dpl_status dpl_model_probe(dpl_ctx *ctx, const char *path, const char *input_path,
                           const char *output_path, const dpl_probe_options *options) {
    const dpl_probe_options none = {.struct_bytes = sizeof none}, *o = options ? options : &none;
    DPL_NEED(ctx && path && input_path && output_path);
    DPL_CHECK(o->struct_bytes == sizeof *o, "struct_bytes must be sizeof(dpl_probe_options)");
    probe p = {0};
    dpl_status status = dpl_config_open(NULL, &p.config);
    if (status == DPL_OK) status = dpl_api_apply(p.config, defaults, DPL_COUNT(defaults));
    if (status == DPL_OK) status = dpl_api_apply(p.config, o->settings, o->n_settings);
    if (status == DPL_OK) status = dpl_model_open(ctx, path, p.config, &p.model);
    if (status == DPL_OK) status = run_probe(&p, input_path, o);
    if (status == DPL_OK) status = dpl_st_write(output_path, p.list, p.n, NULL, NULL);
    for (size_t i = 0; i < p.n; i++) dpl_free((void *)(uintptr_t)p.list[i].data);
    dpl_free(p.list);
    dpl_optimizer_close(&p.optimizer);
    dpl_tokens_free(&p.tokens);
    dpl_model_close(&p.model);
    dpl_config_close(&p.config);
    return status;
}
