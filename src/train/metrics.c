// metrics.c - what a step says about itself: the log line, the row of metrics.jsonl.
//
// Numbers are written with a decimal point whatever the process's locale, and those that are not finite as null: every
// line of metrics.jsonl is valid JSON.
#include <locale.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "cpu/kernels.h"
#include "train/train.h"

int dpl_format(char *text, size_t size, const char *format, ...)
{
    va_list args;
    const locale_t c = newlocale(LC_NUMERIC_MASK, "C", (locale_t)0);
    const locale_t before = c ? uselocale(c) : (locale_t)0;
    va_start(args, format);
    const int n = vsnprintf(text, size, format, args);
    va_end(args);
    if (c) {
        uselocale(before);
        freelocale(c);
    }
    return n;
}

void dpl_metrics_line(const dpl_trainer *t, const dpl_step_metrics *m, char *text, size_t size)
{
    char balance[48] = "", mtp[96] = "";
    if (t->model->config.n_experts > 1)
        dpl_format(balance, sizeof balance, ", moe_lb_loss: %.6f", m->moe_lb_loss);
    if (t->model->config.n_mtp > 0)
        dpl_format(mtp, sizeof mtp, ", main_model_loss: %.3f, mtp_loss: %.3f",
                   m->loss - m->mtp_loss, m->mtp_loss);
    dpl_format(
        text, size,
        "completed step: %lld, seconds: %.3f, TFLOP/s/device: %.3f, Tokens/s/device: %.3f, "
        "total_weights: %.0f, loss: %.3f, lm_loss: %.3f, perplexity: %.3f%s%s, gmm_ms: %.1f, "
        "dispatch_ms: %.1f, combine_ms: %.1f, load_max_over_mean: %.2f, mfu: %.3f",
        (long long)m->step, m->seconds, m->tflops_per_device, m->tokens_per_s_per_device,
        m->total_weights, m->loss, m->lm_loss, m->perplexity, balance, mtp, m->gmm_ms,
        m->dispatch_ms, m->combine_ms, m->load_max_over_mean, m->mfu);
}

void dpl_metrics_profile(const dpl_trainer *t, char *text, size_t size)
{
    size_t used = (size_t)dpl_format(text, size, "step profile, ms:");
    for (int i = 0; i < DPL_PHASE_N && used < size; i++)
        used += (size_t)dpl_format(text + used, size - used, "%s %s %.1f", i ? "," : "",
                                   dpl_phase_name((dpl_phase)i), 1e3 * t->ctx->phase_s[i]);
}

/* ---- rows ---- */

static void put(json_t *row, const char *key, double value)
{
    json_object_set_new(row, key, isfinite(value) ? json_real(value) : json_null());
}

json_t *dpl_metrics_row(const dpl_trainer *t, const dpl_step_metrics *m)
{
    json_t *row = json_object();
    if (!row) return NULL;
    const struct {
        const char *key;
        double value;
    } fields[] = {
        {"loss", m->loss},
        {"lm_loss", m->lm_loss},
        {"perplexity", m->perplexity},
        {"z_loss", m->z_loss},
        {"mtp_loss", m->mtp_loss},
        {"moe_lb_loss", m->moe_lb_loss},
        {"router_z_loss", m->router_z_loss},
        {"total_weights", m->total_weights},
        {"learning_rate", m->learning_rate},
        {"raw_grad_norm", m->raw_grad_norm},
        {"grad_norm", m->grad_norm},
        {"seconds", m->seconds},
        {"tflops_per_device", m->tflops_per_device},
        {"tokens_per_s_per_device", m->tokens_per_s_per_device},
        {"mfu", m->mfu},
        {"gmm_ms", m->gmm_ms},
        {"dispatch_ms", m->dispatch_ms},
        {"combine_ms", m->combine_ms},
        {"load_max_over_mean", m->load_max_over_mean},
    };
    json_object_set_new(row, "step", json_integer(m->step));
    for (size_t i = 0; i < DPL_COUNT(fields); i++)
        put(row, fields[i].key, fields[i].value);
    if (!t->o->step_profile) return row;
    for (int i = 0; i < DPL_PHASE_N; i++) {
        char key[64];
        snprintf(key, sizeof key, "phase_%s_ms", dpl_phase_name((dpl_phase)i));
        put(row, key, 1e3 * t->ctx->phase_s[i]);
    }
    return row;
}

json_t *dpl_metrics_eval_row(int64_t step, const dpl_eval_metrics *m)
{
    json_t *row = json_object();
    if (!row) return NULL;
    json_object_set_new(row, "step", json_integer(step));
    put(row, "eval_loss", m->loss);
    put(row, "eval_perplexity", m->perplexity);
    json_object_set_new(row, "eval_tokens", json_integer(m->n_tokens));
    return row;
}

static bool keep_line(const char *line, size_t n, int64_t step, bool eval)
{
    json_t *row = json_loadb(line, n, 0, NULL);
    const json_t *value = json_object_get(row, "step");
    if (!eval && json_object_get(row, "eval_loss")) step--;
    const bool keep = json_is_integer(value) && json_integer_value(value) <= step;
    json_decref(row);
    return keep;
}

dpl_status dpl_metrics_cut(const char *path, int64_t step, bool eval)
{
    dpl_map map;
    if (!dpl_path_exists(path)) return DPL_OK;
    DPL_TRY(dpl_map_open(path, &map));
    char *kept = dpl_alloc(map.bytes);
    size_t used = 0;
    const char *line = (const char *)map.data, *end = line + map.bytes;
    while (kept && line < end) {
        const char *stop = memchr(line, '\n', (size_t)(end - line));
        if (!stop) break; // a killed process left half a line
        const size_t n = (size_t)(stop - line) + 1;
        if (keep_line(line, n, step, eval)) {
            memcpy(kept + used, line, n);
            used += n;
        }
        line = stop + 1;
    }
    const dpl_status status = kept ? dpl_write_file(path, kept, used)
                                   : dpl_fail(DPL_ENOMEM, "no memory for %zu bytes of %s",
                                              map.bytes, path);
    dpl_free(kept);
    dpl_map_close(&map);
    return status;
}
