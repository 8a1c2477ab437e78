// loop.c - the run: steps, evaluations, checkpoints at their times, and the files that tell of it.
//
// Order after a step: its row and line, then an evaluation, then a checkpoint. A resumed run cuts
// metrics.jsonl back to its checkpoint: the file reads as if the run had never been interrupted.
#include <stdio.h>
#include <stdlib.h>

#include "train/train.h"

typedef struct run {
    dpl_trainer *t;
    dpl_trainer_events events;
    FILE *log, *metrics;
    bool done; // the evaluation loss reached its target
    char line[PATH_MAX + 128];
} run;

static dpl_status write_line(run *r) {
    DPL_EXPECT(fprintf(r->log, "%s\n", r->line) >= 0 && fflush(r->log) == 0, DPL_EIO,
               "%s/log.txt: cannot be written: %m", r->t->run_dir);
    if (r->events.line) r->events.line(r->events.arg, r->line);
    return DPL_OK;
}

#define SAY(r, ...)                                          \
    do {                                                     \
        dpl_format((r)->line, sizeof(r)->line, __VA_ARGS__); \
        DPL_TRY(write_line(r));                              \
    } while (0)

static dpl_status write_row(run *r, json_t *row) {
    char *text = row ? json_dumps(row, JSON_REAL_PRECISION(17)) : NULL;
    json_decref(row);
    if (!text) return dpl_fail(DPL_ENOMEM, "no memory for a row of metrics.jsonl");
    const bool good = fprintf(r->metrics, "%s\n", text) > 0 && fflush(r->metrics) == 0;
    free(text);
    DPL_EXPECT(good, DPL_EIO, "%s/metrics.jsonl: cannot be written: %m", r->t->run_dir);
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

static dpl_status open_files(run *r) {
    dpl_trainer *t = r->t;
    char path[PATH_MAX];
    DPL_TRY(dpl_make_dirs(t->run_dir));
    DPL_TRY(dpl_trainer_lock(t));
    DPL_TRY(dpl_path_join(t->run_dir, "config.yml", path));
    DPL_TRY(dpl_config_save(t->config, path));
    DPL_TRY(dpl_path_join(t->run_dir, "log.txt", path));
    DPL_TRY(open_text(t, path, &r->log));
    if (t->step > 0) fputc('\n', r->log); // ends the line that a killed process or a full disk cut
    DPL_TRY(dpl_path_join(t->run_dir, "metrics.jsonl", path));
    if (t->step > 0) DPL_TRY(dpl_metrics_cut(path, t->step - 1, !evaluates_again(t)));
    return open_text(t, path, &r->metrics);
}

static dpl_status write_head(run *r) {
    const dpl_trainer *t = r->t;
    const dpl_model_config *c = &t->model->config;
    const size_t B = (size_t)t->o->per_device_batch_size;
    const double n_micros = (double)t->o->gradient_accumulation_steps, all = t->step_flops;
    const double attention = n_micros * dpl_model_attention_flops(c, B, t->batch.n_seq);
    const double share = all > 0 ? 100 * attention / all : 0;
    const double mb = 1e-6 * (double)t->model->params.elems;
    SAY(r, "Per train step:");
    SAY(r, " Total TFLOPs: %.2f", all * 1e-12);
    SAY(r, " split as %.2f%% learnable weight flops and %.2f%% attention flops", 100 - share,
        share);
    SAY(r, "number parameters: %.3f billion, active: %.3f billion",
        (double)dpl_model_param_count(c) * 1e-9, (double)dpl_model_active_param_count(c) * 1e-9);
    SAY(r,
        "memory: weights %.1f MB, gradients %.1f MB, optimizer %.1f MB; remat_policy none keeps "
        "all "
        "activations",
        (t->model->params.copy ? 6 : 4) * mb, 4 * mb, 8 * mb);
    SAY(r, "machine: %d threads, CPU level %s, peak %.1f GFLOP/s", dpl_ctx_threads(t->ctx),
        dpl_ctx_cpu_level(t->ctx), t->peak_flops * 1e-9);
    if (t->step > 0) SAY(r, "resuming after step %lld", (long long)t->step - 1);
    return DPL_OK;
}

static dpl_status train_step(run *r) {
    dpl_trainer *t = r->t;
    dpl_step_metrics m;
    const dpl_status status = dpl_trainer_step(t, &m);
    if (status == DPL_ENUMERIC) // the row tells what happened; the error itself goes to the caller
        DPL_TRY(write_row(r, json_pack("{s:I, s:n, s:s}", "step", t->step, "loss", "error",
                                       dpl_error_message())));
    DPL_TRY(status);
    DPL_TRY(write_row(r, dpl_metrics_row(t, &m)));
    dpl_metrics_line(t, &m, r->line, sizeof r->line);
    DPL_TRY(write_line(r));
    dpl_metrics_profile(t, r->line, sizeof r->line);
    if (t->o->step_profile) DPL_TRY(write_line(r));
    if (r->events.step) r->events.step(r->events.arg, &m, t->n_steps);
    return DPL_OK;
}

static dpl_status evaluate(run *r, int64_t step) {
    const dpl_options *o = r->t->o;
    dpl_eval_metrics m;
    if (!evaluates(o, step)) return DPL_OK;
    const dpl_status status = dpl_trainer_evaluate(r->t, &m);
    if (status == DPL_EINTR) return DPL_OK; // the loop sees the request too, and saves
    DPL_TRY(status);
    DPL_TRY(write_row(r, dpl_metrics_eval_row(step, &m)));
    SAY(r, "Completed eval after train step %zu, loss=%.3f, perplexity=%.3f, total_weights=%zu",
        (size_t)step, m.loss, m.perplexity, (size_t)m.n_tokens);
    if (r->events.eval) r->events.eval(r->events.arg, step, &m);
    r->done = o->target_eval_loss > 0 && m.loss <= o->target_eval_loss;
    if (r->done)
        SAY(r, "target_eval_loss %.3f is reached after step %zu", o->target_eval_loss,
            (size_t)step);
    return DPL_OK;
}

static dpl_status save(run *r, bool due) {
    dpl_trainer *t = r->t;
    if (!due || !t->o->enable_checkpointing || t->step == 0 || t->saved == t->step - 1)
        return DPL_OK;
    DPL_TRY(dpl_trainer_save(t));
    SAY(r, "checkpoint: %s/checkpoints/%lld", t->run_dir, (long long)t->saved);
    return DPL_OK;
}

static dpl_status train(run *r) {
    dpl_trainer *t = r->t;
    const dpl_options *o = t->o;
    const int64_t first = t->step;
    if (evaluates_again(t)) DPL_TRY(evaluate(r, t->saved));
    while (t->step < t->n_steps && !t->stop && !r->done) {
        const int64_t step = t->step;
        DPL_TRY(train_step(r));
        if (step == first)
            SAY(r, "memory: activations and temporaries %.1f MB, measured",
                1e-6 * (double)dpl_arena_peak_bytes(t->ctx->arena));
        DPL_TRY(evaluate(r, step));
        const bool due = step > 0 ? step % o->checkpoint_period == 0 : o->save_checkpoint_on_start;
        DPL_TRY(save(r, due));
    }
    const bool stopped = t->stop && t->step < t->n_steps && !r->done;
    DPL_TRY(save(r, stopped || o->save_checkpoint_on_completion));
    if (!stopped) return DPL_OK;
    return dpl_fail(DPL_EINTR, "stopped on request after %lld steps", (long long)t->step);
}

dpl_status dpl_trainer_run(dpl_trainer *trainer, const dpl_trainer_events *events) {
    DPL_NEED(trainer);
    run r = {.t = trainer};
    if (events) r.events = *events;
    if (trainer->peak_flops == 0) trainer->peak_flops = dpl_measure_peak(trainer->ctx);
    dpl_status status = open_files(&r);
    if (status == DPL_OK) status = write_head(&r);
    if (status == DPL_OK) status = train(&r);
    if (r.log) fclose(r.log);
    if (r.metrics) fclose(r.metrics);
    return status;
}
