/*
 * probe.c - what happens inside a model on one batch, as a safetensors file: how results are compared with
 * those of other programs.
 *
 * The forward pass reports its tensors by name (dpl_model.probe); gradients and the parameters after a few
 * optimizer steps are added here. Everything is collected in memory first, since the file's header lists it.
 */
#include <stdio.h>

#include "api/api.h"

typedef struct collection {
    dpl_st_tensor *list; // names and data are owned
    size_t n, n_room;
    dpl_status status; // the first failure; later additions are ignored
    bool grad;         // gradients of hidden states are wanted
} collection;

typedef struct probe {
    dpl_model *model;
    dpl_config *config;
    dpl_batch batch;
    int64_t *labels; // (B, S)
    int32_t *ids, *targets;
    dpl_loss_rule rule;
    dpl_loss_sums sums;
    dpl_optimizer *optimizer;
    collection out;
} probe;

static const char *const probe_defaults[] = {
    "dtype=float32",
    "mtp_loss_scaling_factor=0.3",
    "learning_rate=1e-3",
    "adam_b1=0.9",
    "adam_b2=0.95",
    "adam_eps=1e-8",
    "adam_eps_root=0",
    "adam_weight_decay=0.1",
    "routed_bias_update_rate=0",
    "load_balance_loss_weight=0",
    "z_loss_multiplier=0",
    "gradient_clipping_threshold=0",
};

/* ---- the collection ---- */

static const dpl_st_tensor *find(const collection *c, const char *name)
{
    for (size_t i = 0; i < c->n; i++)
        if (!strcmp(c->list[i].name, name)) return &c->list[i];
    return NULL;
}

static dpl_status grow(collection *c)
{
    const size_t n_room = c->n_room ? 2 * c->n_room : 256;
    dpl_st_tensor *list = dpl_alloc_array(n_room, sizeof *list);
    if (!list) return dpl_fail(DPL_ENOMEM, "no memory to list %zu tensors", n_room);
    if (c->n) memcpy(list, c->list, c->n * sizeof *list);
    dpl_free(c->list);
    c->list = list;
    c->n_room = n_room;
    return DPL_OK;
}

// Copies a tensor in.
static void collect(collection *c, const char *name, dpl_st_dtype dtype, int rank,
                    const int64_t *shape, const void *data)
{
    if (c->status != DPL_OK) return;
    if (c->n == c->n_room) c->status = grow(c);
    if (c->status != DPL_OK) return;
    dpl_st_tensor t = {.dtype = dtype, .rank = rank, .bytes = dpl_st_dtype_bytes(dtype)};
    for (int i = 0; i < rank; i++)
        t.bytes *= (uint64_t)(t.shape[i] = shape[i]);
    char *copy_name = dpl_strdup(name);
    uint8_t *copy = dpl_alloc(t.bytes);
    if (!copy_name || !copy) {
        dpl_free(copy_name);
        dpl_free(copy);
        c->status = dpl_fail(DPL_ENOMEM, "no memory for the tensor %s", name);
        return;
    }
    memcpy(copy, data, t.bytes);
    t.name = copy_name;
    t.data = copy;
    c->list[c->n++] = t;
}

static void collect_f64(collection *c, const char *name, double value)
{
    collect(c, name, DPL_ST_F64, 1, (const int64_t[]){1}, &value);
}

static void on_tensor(void *arg, const char *name, bool is_int, int rank, const int64_t *shape,
                      const void *data)
{
    collection *c = arg;
    if (c->grad || strncmp(name, "dhidden.", 8) != 0)
        collect(c, name, is_int ? DPL_ST_I64 : DPL_ST_F32, rank, shape, data);
}

static void free_collection(collection *c)
{
    for (size_t i = 0; i < c->n; i++) {
        dpl_free((char *)(uintptr_t)c->list[i].name);
        dpl_free((uint8_t *)(uintptr_t)c->list[i].data);
    }
    dpl_free(c->list);
}

static dpl_status write_collection(const collection *c, const char *path)
{
    dpl_st_writer *writer = NULL;
    dpl_st_tensor *declared = dpl_alloc_array(c->n, sizeof *declared);
    if (!declared) return dpl_fail(DPL_ENOMEM, "no memory to list %zu tensors", c->n);
    memcpy(declared, c->list, c->n * sizeof *declared);
    for (size_t i = 0; i < c->n; i++)
        declared[i].data = NULL;
    dpl_status status = dpl_st_create(path, declared, c->n, NULL, &writer);
    for (size_t i = 0; i < c->n && status == DPL_OK; i++)
        status = dpl_st_append(writer, c->list[i].data, c->list[i].bytes);
    if (status == DPL_OK) status = dpl_st_finish(&writer);
    dpl_st_abandon(&writer);
    dpl_free(declared);
    return status;
}

/* ---- the batch ---- */

static dpl_status read_ids(const dpl_st_file *file, const char *name, const dpl_st_tensor *t,
                           size_t vocab, bool skip, int64_t *wide, int32_t *ids)
{
    const size_t n = dpl_st_elems(t);
    DPL_TRY(dpl_st_read_i64(t, 0, n, wide));
    for (size_t i = 0; i < n; i++) {
        if ((wide[i] < 0 && !skip) || wide[i] >= (int64_t)vocab)
            return dpl_fail(DPL_EINVAL, "%s: %s[%zu] is %lld, expected 0 to %zu", dpl_st_path(file),
                            name, i, (long long)wide[i], vocab - 1);
        ids[i] = wide[i] < 0 ? -1 : (int32_t)wide[i];
    }
    return DPL_OK;
}

static dpl_status read_batch(probe *p, const dpl_st_file *file)
{
    const size_t vocab = p->model->config.vocab;
    const dpl_st_tensor *ids = dpl_st_find(file, "input_ids"),
                        *labels = dpl_st_find(file, "labels");
    if (!ids || ids->rank != 2)
        return dpl_fail(DPL_EFORMAT, "%s: expected a tensor input_ids (B, S)", dpl_st_path(file));
    if (labels && (labels->rank != 2 || labels->shape[0] != ids->shape[0] ||
                   labels->shape[1] != ids->shape[1]))
        return dpl_fail(DPL_EFORMAT, "%s: expected labels in the shape of input_ids, (%lld, %lld)",
                        dpl_st_path(file), (long long)ids->shape[0], (long long)ids->shape[1]);
    const size_t n_batch = (size_t)ids->shape[0], n_seq = (size_t)ids->shape[1],
                 n = dpl_st_elems(ids);
    DPL_TRY(dpl_api_check_batch(&p->model->config, n_batch, n_seq));
    p->labels = dpl_alloc_array(n, sizeof *p->labels);
    p->ids = dpl_alloc_array(n, sizeof *p->ids);
    p->targets = dpl_alloc_array(n, sizeof *p->targets);
    if (!p->labels || !p->ids || !p->targets)
        return dpl_fail(DPL_ENOMEM, "no memory for a batch of %zu tokens", n);
    if (labels) DPL_TRY(read_ids(file, "labels", labels, vocab, true, p->labels, p->targets));
    DPL_TRY(read_ids(file, "input_ids", ids, vocab, false, p->labels, p->ids));
    // Labels are not shifted: position s predicts labels[s + 1].
    const int32_t *unshifted = labels ? p->targets : p->ids;
    for (size_t i = 0; i < n; i++)
        p->targets[i] = (i + 1) % n_seq ? unshifted[i + 1] : -1;
    p->batch = (dpl_batch){
        .n_batch = n_batch, .n_seq = n_seq, .ids = p->ids, .targets = p->targets};
    return DPL_OK;
}

static void collect_batch(probe *p)
{
    const size_t n = p->batch.n_batch * p->batch.n_seq;
    const int64_t shape[2] = {(int64_t)p->batch.n_batch, (int64_t)p->batch.n_seq};
    for (size_t i = 0; i < n; i++)
        p->labels[i] = p->targets[i] < 0 ? -100 : p->targets[i];
    collect(&p->out, "targets", DPL_ST_I64, 2, shape, p->labels);
    uint8_t *mask =
        (uint8_t *)p->labels; // the targets are copied: their memory is free for the mask
    for (size_t i = 0; i < n; i++)
        mask[i] = p->targets[i] >= 0;
    collect(&p->out, "loss_mask", DPL_ST_U8, 2, shape, mask);
}

// What the first multi-token depth predicts: the token two further.
static void collect_mtp_targets(probe *p)
{
    const size_t n_seq = p->batch.n_seq, n = p->batch.n_batch * (n_seq - 1);
    const int64_t shape[2] = {(int64_t)p->batch.n_batch, (int64_t)n_seq - 1};
    if (p->model->config.n_mtp == 0 || n == 0) return;
    for (size_t i = 0; i < n; i++) {
        const int32_t target = p->targets[i / (n_seq - 1) * n_seq + i % (n_seq - 1) + 1];
        p->labels[i] = target < 0 ? -100 : target;
    }
    collect(&p->out, "mtp.targets", DPL_ST_I64, 2, shape, p->labels);
}

/* ---- one pass ---- */

static double mean(double sum, double n)
{
    return n > 0 ? sum / n : 0.0;
}

static void collect_losses(probe *p)
{
    const dpl_loss_sums *s = &p->sums;
    const double loss = mean(s->xent, s->n_tokens), mtp = mean(s->mtp_xent, s->mtp_tokens);
    collect_f64(&p->out, "loss", loss);
    if (p->model->config.n_mtp > 0) collect_f64(&p->out, "mtp.loss", mtp);
    collect_f64(&p->out, "total_loss",
                loss + mean(s->z, s->n_tokens) + p->rule.mtp_weight * mtp + s->balance +
                    s->router_z);
}

// The router bias after one step with these counts.
static void collect_bias_next(probe *p, double rate)
{
    const dpl_model_config *c = &p->model->config;
    for (size_t l = 0; l < c->n_layers + c->n_mtp && c->routed_bias && rate != 0; l++) {
        char name[64];
        snprintf(name, sizeof name, "router.%zu.counts", l);
        const dpl_st_tensor *counts = find(&p->out, name);
        if (!counts) continue; // a dense layer
        float *next = dpl_alloc_array(c->n_experts, sizeof(float));
        if (!next) {
            p->out.status = dpl_fail(DPL_ENOMEM, "no memory for the router bias of layer %zu", l);
            return;
        }
        const int64_t *n = (const int64_t *)(const void *)counts->data;
        double sum = 0;
        for (size_t e = 0; e < c->n_experts; e++)
            sum += (double)n[e];
        for (size_t e = 0; e < c->n_experts; e++) {
            const double gap = sum / (double)c->n_experts - (double)n[e];
            next[e] = dpl_model_bias(p->model, l)[e] + (float)(rate * ((gap > 0) - (gap < 0)));
        }
        snprintf(name, sizeof name, "router.%zu.bias_next", l);
        collect(&p->out, name, DPL_ST_F32, 1, (const int64_t[]){(int64_t)c->n_experts}, next);
        dpl_free(next);
    }
}

// Forward and backward; the gradients stay in the model.
static dpl_status run_pass(probe *p)
{
    dpl_model *m = p->model;
    double n_targets = 0;
    for (size_t i = 0; i < p->batch.n_batch * p->batch.n_seq; i++)
        n_targets += p->targets[i] >= 0;
    memset(m->counts, 0,
           (m->config.n_layers + m->config.n_mtp) * m->config.n_experts * sizeof(int64_t));
    dpl_model_zero_grads(m);
    return dpl_model_train_micro(
        m, &p->batch, &p->rule, mean(1, n_targets),
        mean(p->rule.mtp_weight, dpl_batch_mtp_tokens(&m->config, &p->batch)), 1.0, &p->sums);
}

// A flat array under its tensors' names on disk.
static dpl_status collect_flat(probe *p, const char *prefix, const float *flat)
{
    for (size_t i = 0; i < p->model->n_disk; i++) {
        const dpl_disk_tensor *t = &p->model->disk[i];
        if (!t->param || t->copy_of_shared) continue;
        char name[192];
        float *values = dpl_alloc_array((size_t)(t->shape[0] * t->shape[1]), sizeof(float));
        if (!values) return dpl_fail(DPL_ENOMEM, "no memory for the tensor %s", t->name);
        dpl_disk_gather(t, flat, values);
        snprintf(name, sizeof name, "%s.%s", prefix, t->name);
        collect(&p->out, name, DPL_ST_F32, t->rank, t->shape, values);
        dpl_free(values);
    }
    return p->out.status;
}

static dpl_loss_rule loss_rule(const dpl_options *o)
{
    const dpl_balance_kind kind = o->moe_use_megatron_seq_aux_loss         ? DPL_BALANCE_MEGATRON
                                  : dpl_is(o->load_balance_scope, "batch") ? DPL_BALANCE_BATCH
                                                                           : DPL_BALANCE_SEQUENCE;
    return (dpl_loss_rule){.z_weight = o->z_loss_multiplier,
                           .mtp_weight = o->mtp_loss_scaling_factor,
                           .balance = kind,
                           .balance_weight = o->load_balance_loss_weight,
                           .router_z_weight = o->router_z_loss_weight};
}

/* ---- optimizer steps ---- */

// The gradients of the first step are there already.
static dpl_status run_steps(probe *p, size_t n_steps)
{
    const dpl_options *o = &p->config->o;
    char prefix[32];
    DPL_TRY(dpl_optimizer_open(o, p->model, &p->optimizer));
    for (size_t i = 0; i < n_steps; i++) {
        double norm;
        if (i > 0) DPL_TRY(run_pass(p));
        DPL_TRY(dpl_optimizer_norm(p->optimizer, &norm));
        const double clip = o->gradient_clipping_threshold;
        dpl_optimizer_apply(p->optimizer, o->learning_rate,
                            clip > 0 && norm > clip ? clip / norm : 1.0);
        dpl_model_update_bias(p->model, o->routed_bias_update_rate);
    }
    dpl_ctx_wait(p->model->ctx);
    snprintf(prefix, sizeof prefix, "adamw%zu", n_steps);
    return collect_flat(p, prefix, p->model->params.master);
}

static dpl_status run_probe(probe *p, const char *input_path, const dpl_probe_options *o)
{
    dpl_st_file *file;
    DPL_TRY(dpl_st_open(input_path, &file));
    const dpl_status status = read_batch(p, file);
    dpl_st_close(&file);
    DPL_TRY(status);
    const dpl_options *settings = &p->config->o;
    p->rule = loss_rule(settings);
    p->out.grad = o->grad != 0;
    p->model->probe = on_tensor;
    p->model->probe_arg = &p->out;
    DPL_TRY(dpl_model_begin_training(p->model));
    DPL_TRY(run_pass(p));
    p->model->probe = NULL; // later passes are those of other weights
    collect_batch(p);
    collect_mtp_targets(p);
    collect_losses(p);
    collect_bias_next(p, settings->routed_bias_update_rate);
    if (o->grad) DPL_TRY(collect_flat(p, "grad", p->model->params.grad));
    return o->n_steps ? run_steps(p, o->n_steps) : p->out.status;
}

dpl_status dpl_model_probe(dpl_ctx *ctx, const char *path, const char *input_path,
                           const char *output_path, const dpl_probe_options *options)
{
    const dpl_probe_options none = {.struct_bytes = sizeof none}, *o = options ? options : &none;
    if (!ctx || !path || !input_path || !output_path)
        return dpl_fail(DPL_EINVAL, "a context and three paths are needed");
    if (o->struct_bytes != sizeof *o)
        return dpl_fail(DPL_EINVAL, "struct_bytes must be sizeof(dpl_probe_options)");
    probe p = {0};
    dpl_status status = dpl_config_open(NULL, &p.config);
    if (status == DPL_OK)
        status = dpl_api_apply(p.config, probe_defaults, DPL_COUNT(probe_defaults));
    if (status == DPL_OK) status = dpl_api_apply(p.config, o->settings, o->n_settings);
    if (status == DPL_OK) status = dpl_model_open(ctx, path, p.config, &p.model);
    if (status == DPL_OK) status = run_probe(&p, input_path, o);
    if (status == DPL_OK) status = write_collection(&p.out, output_path);
    free_collection(&p.out);
    dpl_optimizer_close(&p.optimizer);
    dpl_free(p.targets);
    dpl_free(p.ids);
    dpl_free(p.labels);
    dpl_model_close(&p.model);
    dpl_config_close(&p.config);
    return status;
}
