// loop.c - the run: steps, evaluations, checkpoints at their times, and the files that tell of it.
//
// Order after a step: its row and line, then an evaluation, then a checkpoint. A resumed run cuts
// metrics.jsonl back to its checkpoint: the file reads as if the run had never been interrupted. Of
// several ranks the first writes and speaks; all agree after each step whether to go on.
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "train/train.h"

static dpl_status write_line(dpl_trainer *t) {
    if (!dpl_mesh_is_first(&t->mesh)) return DPL_OK;
    DPL_EXPECT(fprintf(t->log, "%s\n", t->line) >= 0 && fflush(t->log) == 0, DPL_EIO,
               "%s/log.txt: cannot be written: %m", t->run_dir);
    if (t->events.line) t->events.line(t->events.arg, t->line);
    return DPL_OK;
}

#define SAY(t, ...)                                            \
    do {                                                       \
        dpl_format((t)->line, sizeof((t)->line), __VA_ARGS__); \
        DPL_TRY(write_line(t));                                \
    } while (0)

static dpl_status write_row(dpl_trainer *t, json_t *row) {
    if (!dpl_mesh_is_first(&t->mesh)) {
        json_decref(row);
        return DPL_OK;
    }
    char *text = row ? json_dumps(row, JSON_REAL_PRECISION(17)) : NULL;
    json_decref(row);
    if (!text) return dpl_fail(DPL_ENOMEM, "no memory for a row of metrics.jsonl");
    const bool good = fprintf(t->metrics, "%s\n", text) > 0 && fflush(t->metrics) == 0;
    free(text);
    DPL_EXPECT(good, DPL_EIO, "%s/metrics.jsonl: cannot be written: %m", t->run_dir);
    return DPL_OK;
}

static bool evaluates(const dpl_options *o, int64_t step) {
    return o->eval_interval > 0 && step >= o->eval_start_step &&
           (step - o->eval_start_step) % o->eval_interval == 0;
}

// Where a resumed run begins: a request to stop may have cut the evaluation there, and whether the
// target was reached stands in no checkpoint.
static bool evaluates_again(const dpl_trainer *t) {
    return t->saved == t->step - 1 && evaluates(t->o, t->saved);
}

static dpl_status open_text(const dpl_trainer *t, const char *path, FILE **file_out) {
    *file_out = fopen(path, t->step > 0 ? "a" : "w");
    DPL_EXPECT(*file_out, DPL_EIO, "%s: cannot be opened for writing: %m", path);
    return DPL_OK;
}

static dpl_status open_files(dpl_trainer *t) {
    char path[PATH_MAX];
    if (!dpl_mesh_is_first(&t->mesh)) return DPL_OK;
    DPL_TRY(dpl_make_dirs(t->run_dir));
    DPL_TRY(dpl_trainer_lock(t));
    DPL_TRY(dpl_path_join(t->run_dir, "config.yml", path));
    DPL_TRY(dpl_config_save(t->config, path));
    DPL_TRY(dpl_path_join(t->run_dir, "log.txt", path));
    DPL_TRY(open_text(t, path, &t->log));
    if (t->step > 0) fputc('\n', t->log); // ends the line that a killed process or a full disk cut
    DPL_TRY(dpl_path_join(t->run_dir, "metrics.jsonl", path));
    if (t->step > 0) DPL_TRY(dpl_metrics_cut(path, t->step - 1, !evaluates_again(t)));
    return open_text(t, path, &t->metrics);
}

typedef char host_name[64];

// "a", or "a, b": where the ranks from `first` on are, as many as share the experts.
static void list_hosts(const host_name *names, int first, int n, char *text, size_t size) {
    size_t used = 0;
    text[0] = '\0';
    for (int r = first; r < first + n && used < size; r++)
        if (r == first || strcmp(names[r], names[r - 1]) != 0)
            used += (size_t)snprintf(text + used, size - used, "%s%s", used ? ", " : "", names[r]);
}

static dpl_status write_places(dpl_trainer *t) {
    const dpl_mesh *mesh = &t->mesh;
    const int R = mesh->world->n_ranks, E = mesh->n_expert, F = mesh->n_fsdp;
    host_name own = "";
    char hosts[512];
    host_name *names = dpl_alloc_array((size_t)R, sizeof *names);
    dpl_status status = names ? DPL_OK : dpl_fail(DPL_ENOMEM, "no memory for names of hosts");
    gethostname(own, sizeof own - 1);
    status = dpl_comm_agree_on(mesh->world, status, own, sizeof own, names);
    for (int first = 0; first < R && status == DPL_OK; first += E) {
        list_hosts(names, first, E, hosts, sizeof hosts);
        dpl_format(t->line, sizeof t->line, " data %d, fsdp %d: ranks %d to %d, by expert, on %s",
                   first / E / F, first / E % F, first, first + E - 1, hosts);
        status = write_line(t);
    }
    dpl_free(names);
    return status;
}

static dpl_status write_mesh(dpl_trainer *t) {
    const dpl_mesh *mesh = &t->mesh;
    const dpl_model *m = t->model;
    const double bytes = (double)m->params.own_elems * (m->params.copy ? 18 : 16) +
                         (double)m->quant_bytes - 2 * (double)m->quant_elems;
    SAY(t, "mesh: data %d x fsdp %d x expert %d, %s: %d ranks of %d threads", mesh->n_data,
        mesh->n_fsdp, mesh->n_expert, dpl_comm_name(mesh->world), mesh->world->n_ranks,
        dpl_ctx_threads(t->ctx));
    DPL_TRY(write_places(t));
    SAY(t, " %.1f MB of weights, gradients and optimizer a rank; experts a rank: %zu of %zu",
        1e-6 * bytes, dpl_ep_local_experts(&t->model->ranks), t->model->config.n_experts);
    SAY(t, " and up to %.1f MB for gradients that are added up%s",
        1e-6 * (double)dpl_shards_bytes(t->model),
        mesh->n_fsdp > 1 ? " and what is gathered: two layers, and what is outside of layers" : "");
    return DPL_OK;
}

static dpl_status write_head(dpl_trainer *t) {
    const dpl_model_config *c = &t->model->config;
    const size_t B = (size_t)t->o->per_device_batch_size;
    const double n_micros = (double)t->o->gradient_accumulation_steps, all = t->step_flops;
    const double attention = n_micros * dpl_model_attention_flops(c, B, t->batch.n_seq);
    const double share = all > 0 ? 100 * attention / all : 0;
    const double mb = 1e-6 * (double)t->model->params.own_elems;
    const double codes_mb = 1e-6 *
                            ((double)t->model->quant_bytes - 2 * (double)t->model->quant_elems);
    SAY(t, "Per train step:");
    SAY(t, " Total TFLOPs: %.2f", all * 1e-12);
    SAY(t, " split as %.2f%% learnable weight flops and %.2f%% attention flops", 100 - share,
        share);
    SAY(t, "number parameters: %.3f billion, active: %.3f billion",
        (double)dpl_model_param_count(c) * 1e-9, (double)dpl_model_active_param_count(c) * 1e-9);
    SAY(t,
        "memory: weights %.1f MB, gradients %.1f MB, optimizer %.1f MB; "
        "remat_policy none keeps all activations",
        (t->model->params.copy ? 6 : 4) * mb + codes_mb, 4 * mb, 8 * mb);
    SAY(t, "machine: %d threads, CPU level %s, peak %.1f GFLOP/s", dpl_ctx_threads(t->ctx),
        dpl_ctx_cpu_level(t->ctx), t->peak_flops * 1e-9);
    SAY(t, "data: %llu training samples of %zu tokens, %zu a step; %llu for evaluation",
        (unsigned long long)dpl_data_samples(&t->data, false), t->batch.n_seq,
        t->batch.n_batch * (size_t)t->mesh.world->n_ranks,
        (unsigned long long)dpl_data_samples(&t->data, true));
    if (t->mesh.world->n_ranks > 1) DPL_TRY(write_mesh(t));
    if (t->step > 0) SAY(t, "resuming after step %lld", (long long)t->step - 1);
    if (t->step >= t->n_steps)
        SAY(t, "nothing to do: the run has its %lld steps; give more steps, or another run_name",
            (long long)t->n_steps);
    return DPL_OK;
}

static dpl_status train_step(dpl_trainer *t) {
    dpl_step_metrics m;
    const dpl_status status = dpl_trainer_step(t, &m);
    if (status == DPL_ENUMERIC) // the row tells what happened; the error itself goes to the caller
        DPL_TRY(write_row(t, json_pack("{s:I, s:n, s:s}", "step", t->step, "loss", "error",
                                       dpl_error_message())));
    DPL_TRY(status);
    DPL_TRY(write_row(t, dpl_metrics_row(t, &m)));
    dpl_metrics_line(t, &m, t->line, sizeof t->line);
    DPL_TRY(write_line(t));
    dpl_metrics_profile(t, t->line, sizeof t->line);
    if (t->o->step_profile) DPL_TRY(write_line(t));
    if (t->events.step) t->events.step(t->events.arg, &m, t->n_steps);
    return DPL_OK;
}

static dpl_status evaluate(dpl_trainer *t, int64_t step) {
    const dpl_options *o = t->o;
    dpl_eval_metrics m;
    if (!evaluates(o, step)) return DPL_OK;
    const dpl_status status = dpl_trainer_evaluate(t, &m);
    if (status == DPL_EINTR) return DPL_OK; // the loop sees the request too, and saves
    DPL_TRY(status);
    DPL_TRY(write_row(t, dpl_metrics_eval_row(step, &m)));
    SAY(t, "Completed eval after train step %zu, loss=%.3f, perplexity=%.3f, total_weights=%zu",
        (size_t)step, m.loss, m.perplexity, (size_t)m.n_tokens);
    if (t->events.eval) t->events.eval(t->events.arg, step, &m);
    t->done = o->target_eval_loss > 0 && m.loss <= o->target_eval_loss;
    if (t->done)
        SAY(t, "target_eval_loss %.3f is reached after step %zu", o->target_eval_loss,
            (size_t)step);
    return DPL_OK;
}

// A request to stop that one rank has got stops all of them after the same step.
static dpl_status agree_on_stop(dpl_trainer *t, bool *stops_out) {
    int64_t n_stops = t->stop;
    DPL_TRY(dpl_comm_sum_i64(t->mesh.world, &n_stops, 1));
    *stops_out = n_stops > 0;
    return DPL_OK;
}

static dpl_status save(dpl_trainer *t, bool due) {
    if (!due || !t->o->enable_checkpointing || t->step == 0 || t->saved == t->step - 1)
        return DPL_OK;
    DPL_TRY(dpl_trainer_save(t));
    SAY(t, "checkpoint: %s/checkpoints/%lld", t->run_dir, (long long)t->saved);
    return DPL_OK;
}

static dpl_status train(dpl_trainer *t) {
    const dpl_options *o = t->o;
    const int64_t first = t->step;
    bool stops;
    if (evaluates_again(t)) DPL_TRY(evaluate(t, t->saved));
    DPL_TRY(agree_on_stop(t, &stops));
    while (t->step < t->n_steps && !stops && !t->done) {
        const int64_t step = t->step;
        DPL_TRY(train_step(t));
        if (step == first)
            SAY(t, "memory: activations and temporaries %.1f MB, measured",
                1e-6 * (double)dpl_arena_peak_bytes(t->ctx->arena));
        DPL_TRY(evaluate(t, step));
        const bool due = step > 0 ? step % o->checkpoint_period == 0 : o->save_checkpoint_on_start;
        DPL_TRY(save(t, due));
        DPL_TRY(agree_on_stop(t, &stops));
    }
    const bool stopped = stops && t->step < t->n_steps && !t->done;
    DPL_TRY(save(t, stopped || o->save_checkpoint_on_completion));
    if (!stopped) return DPL_OK;
    return dpl_fail(DPL_EINTR, "stopped on request after %lld steps", (long long)t->step);
}

dpl_status dpl_trainer_run(dpl_trainer *t, const dpl_trainer_events *events) {
    DPL_NEED(t);
    t->events = events ? *events : (dpl_trainer_events){0};
    t->done = false;
    if (t->peak_flops == 0) t->peak_flops = dpl_measure_peak(t->ctx, t->model->dtype);
    dpl_status status = open_files(t);
    if (status == DPL_OK) status = write_head(t);
    if (status == DPL_OK) status = train(t);
    // The others may wait for this rank: they end with its message.
    if (status != DPL_EINTR) dpl_comm_tell(t->mesh.world, status);
    if (t->log) fclose(t->log);
    if (t->metrics) fclose(t->metrics);
    t->log = t->metrics = NULL;
    return status;
}
