// loop.c - the run: steps, evaluations and checkpoints at their times, and the files that tell of them.
//
// Order after a step: its row and line, then an evaluation, then a checkpoint. A resumed run cuts metrics.jsonl back to
// its checkpoint, so the file reads as if the run had never been interrupted.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "train/train.h"

typedef struct run {
    dpl_trainer *t;
    dpl_trainer_events events;
    FILE *log, *metrics;
    bool done; // the evaluation loss reached its target
} run;

/* ---- files ---- */

static dpl_status emit(run *r, const char *line)
{
    if (fprintf(r->log, "%s\n", line) < 0 || fflush(r->log) != 0)
        return dpl_fail(DPL_EIO, "%s/log.txt: cannot be written: %s", r->t->run_dir,
                        strerror(errno));
    if (r->events.line) r->events.line(r->events.arg, line);
    return DPL_OK;
}

static dpl_status write_row(run *r, json_t *row)
{
    char *text = row ? json_dumps(row, JSON_REAL_PRECISION(17)) : NULL;
    json_decref(row);
    if (!text) return dpl_fail(DPL_ENOMEM, "no memory for a row of metrics.jsonl");
    const bool good = fprintf(r->metrics, "%s\n", text) > 0 && fflush(r->metrics) == 0;
    free(text);
    if (good) return DPL_OK;
    return dpl_fail(DPL_EIO, "%s/metrics.jsonl: cannot be written: %s", r->t->run_dir,
                    strerror(errno));
}

static dpl_status open_log(const char *path, const char *mode, FILE **file_out)
{
    FILE *file = fopen(path, mode);
    if (!file)
        return dpl_fail(DPL_EIO, "%s: cannot be opened for writing: %s", path, strerror(errno));
    *file_out = file;
    return DPL_OK;
}

static bool evaluates(const dpl_options *o, int64_t step)
{
    return o->eval_interval > 0 && step >= o->eval_start_step &&
           (step - o->eval_start_step) % o->eval_interval == 0;
}

// Where a resumed run begins: a request to stop may have cut the evaluation there, and whether the target was reached
// stands in no checkpoint.
static bool evaluates_again(const dpl_trainer *t)
{
    return t->step > 0 && t->saved == t->step - 1 && evaluates(t->o, t->saved);
}

static dpl_status open_files(run *r)
{
    dpl_trainer *t = r->t;
    char path[PATH_MAX];
    const char *mode = t->step > 0 ? "a" : "w";
    DPL_TRY(dpl_make_dirs(t->run_dir));
    DPL_TRY(dpl_trainer_lock(t));
    DPL_TRY(dpl_path_join(t->run_dir, "config.yml", path));
    DPL_TRY(dpl_config_save(t->config, path));
    DPL_TRY(dpl_path_join(t->run_dir, "log.txt", path));
    DPL_TRY(open_log(path, mode, &r->log));
    if (t->step > 0) fputc('\n', r->log); // ends the line that a killed process or a full disk cut
    DPL_TRY(dpl_path_join(t->run_dir, "metrics.jsonl", path));
    if (t->step > 0) DPL_TRY(dpl_metrics_cut(path, t->step - 1, !evaluates_again(t)));
    return open_log(path, mode, &r->metrics);
}

static dpl_status write_head(run *r)
{
    const dpl_trainer *t = r->t;
    const dpl_model_config *c = &t->model->config;
    const double B = t->o->per_device_batch_size, all = t->step_flops;
    const double attention = (double)t->o->gradient_accumulation_steps *
                             dpl_model_attention_flops(c, (size_t)B, t->batch.n_seq);
    const double share = all > 0 ? 100 * attention / all : 0,
                 elems = (double)t->model->params.elems;
    char line[512];
    DPL_TRY(emit(r, "Per train step:"));
    dpl_format(line, sizeof line, " Total TFLOPs: %.2f", all * 1e-12);
    DPL_TRY(emit(r, line));
    dpl_format(line, sizeof line,
               " split as %.2f%% learnable weight flops and %.2f%% attention flops", 100 - share,
               share);
    DPL_TRY(emit(r, line));
    dpl_format(line, sizeof line, "number parameters: %.3f billion, active: %.3f billion",
               (double)dpl_model_param_count(c) * 1e-9,
               (double)dpl_model_active_param_count(c) * 1e-9);
    DPL_TRY(emit(r, line));
    const double copy = t->model->params.copy ? 2e-6 * elems : 0,
                 state = t->optimizer->m ? 8e-6 * elems : 0;
    dpl_format(line, sizeof line,
               "memory: weights %.1f MB, gradients %.1f MB, optimizer %.1f MB; remat_policy none "
               "keeps all activations",
               4e-6 * elems + copy, 4e-6 * elems, state);
    DPL_TRY(emit(r, line));
    dpl_format(line, sizeof line, "machine: %d threads, CPU level %s, peak %.1f GFLOP/s",
               dpl_ctx_threads(t->ctx), dpl_ctx_cpu_level(t->ctx), t->peak_flops * 1e-9);
    DPL_TRY(emit(r, line));
    if (t->step == 0) return DPL_OK;
    snprintf(line, sizeof line, "resuming after step %lld", (long long)t->step - 1);
    return emit(r, line);
}

/* ---- a step and what follows it ---- */

static dpl_status train_step(run *r)
{
    dpl_trainer *t = r->t;
    dpl_step_metrics m;
    char line[1024];
    const dpl_status status = dpl_trainer_step(t, &m);
    if (status ==
        DPL_ENUMERIC) { // the row tells what happened; the error itself goes to the caller
        json_t *row = json_pack("{s:I, s:n, s:s}", "step", (json_int_t)t->step, "loss", "error",
                                dpl_error_message());
        DPL_TRY(write_row(r, row));
    }
    DPL_TRY(status);
    dpl_metrics_line(t, &m, line, sizeof line);
    DPL_TRY(write_row(r, dpl_metrics_row(t, &m)));
    DPL_TRY(emit(r, line));
    if (t->o->step_profile) {
        dpl_metrics_profile(t, line, sizeof line);
        DPL_TRY(emit(r, line));
    }
    if (r->events.step) r->events.step(r->events.arg, &m, t->n_steps);
    return DPL_OK;
}

static dpl_status evaluate(run *r, int64_t step)
{
    const dpl_options *o = r->t->o;
    dpl_eval_metrics m;
    char line[256];
    if (!evaluates(o, step)) return DPL_OK;
    const dpl_status status = dpl_trainer_evaluate(r->t, &m);
    if (status == DPL_EINTR) return DPL_OK; // the loop sees the request too, and saves
    DPL_TRY(status);
    DPL_TRY(write_row(r, dpl_metrics_eval_row(step, &m)));
    dpl_format(
        line, sizeof line,
        "Completed eval after train step %lld, loss=%.3f, perplexity=%.3f, total_weights=%lld",
        (long long)step, m.loss, m.perplexity, (long long)m.n_tokens);
    DPL_TRY(emit(r, line));
    if (r->events.eval) r->events.eval(r->events.arg, step, &m);
    if (o->target_eval_loss <= 0 || m.loss > o->target_eval_loss) return DPL_OK;
    r->done = true;
    dpl_format(line, sizeof line, "target_eval_loss %.3f is reached after step %lld",
               o->target_eval_loss, (long long)step);
    return emit(r, line);
}

static dpl_status save(run *r, bool due)
{
    char line[PATH_MAX + 64];
    const dpl_trainer *t = r->t;
    if (!due || !t->o->enable_checkpointing || t->step == 0 || t->saved == t->step - 1)
        return DPL_OK;
    DPL_TRY(dpl_checkpoint_save(r->t));
    snprintf(line, sizeof line, "checkpoint: %s/checkpoints/%lld", t->run_dir, (long long)t->saved);
    return emit(r, line);
}

static dpl_status write_measured(run *r)
{
    char line[128];
    dpl_format(line, sizeof line, "memory: activations and temporaries %.1f MB, measured",
               (double)dpl_arena_peak_bytes(r->t->ctx->arena) * 1e-6);
    return emit(r, line);
}

static dpl_status train(run *r)
{
    dpl_trainer *t = r->t;
    const dpl_options *o = t->o;
    const int64_t first = t->step;
    if (evaluates_again(t)) DPL_TRY(evaluate(r, t->saved));
    while (t->step < t->n_steps && !t->stop && !r->done) {
        const int64_t step = t->step;
        DPL_TRY(train_step(r));
        if (step == first) DPL_TRY(write_measured(r));
        DPL_TRY(evaluate(r, step));
        DPL_TRY(
            save(r, step % o->checkpoint_period == 0 && (step > 0 || o->save_checkpoint_on_start)));
    }
    const bool stopped = t->stop && t->step < t->n_steps && !r->done;
    DPL_TRY(save(r, stopped || o->save_checkpoint_on_completion));
    if (stopped)
        return dpl_fail(DPL_EINTR, "stopped on request after %lld steps", (long long)t->step);
    return DPL_OK;
}

dpl_status dpl_trainer_run(dpl_trainer *trainer, const dpl_trainer_events *events)
{
    if (!trainer) return dpl_fail(DPL_EINVAL, "dpl_trainer_run: the trainer is NULL");
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
