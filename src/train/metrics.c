// metrics.c - what a step says about itself: the log line, the row of metrics.jsonl.
//
// Numbers are written with a decimal point whatever the process's locale, and those that are not
// finite as null: every line of metrics.jsonl is valid JSON.
#include <locale.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>

#include "train/train.h"

int dpl_format(char *text, size_t size, const char *format, ...) {
    const locale_t c = newlocale(LC_NUMERIC_MASK, "C", (locale_t)0); // 0: the locale stays
    const locale_t before = uselocale(c);
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(text, size, format, args);
    va_end(args);
    uselocale(before);
    if (c) freelocale(c);
    return n;
}

void dpl_metrics_line(const dpl_trainer *t, const dpl_step_metrics *m, char *text, size_t size) {
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

void dpl_metrics_profile(const dpl_trainer *t, char *text, size_t size) {
    size_t used = (size_t)dpl_format(text, size, "step profile, ms:");
    for (int i = 0; i < DPL_PHASE_N && used < size; i++)
        used += (size_t)dpl_format(text + used, size - used, "%s %s %.1f", i ? "," : "",
                                   dpl_phase_name((dpl_phase)i), 1e3 * t->ctx->phase_s[i]);
}

static void put(json_t *row, const char *key, double value) {
    json_object_set_new(row, key, isfinite(value) ? json_real(value) : json_null());
}

json_t *dpl_metrics_row(const dpl_trainer *t, const dpl_step_metrics *m) {
    json_t *row = json_pack("{s:I}", "step", m->step);
    char key[64];
// clang-format off
#define FIELDS(X) \
    X(loss) X(lm_loss) X(perplexity) X(z_loss) X(mtp_loss) X(moe_lb_loss) X(router_z_loss) \
    X(total_weights) X(learning_rate) X(raw_grad_norm) X(grad_norm) X(seconds) X(mfu) X(gmm_ms) \
    X(tflops_per_device) X(tokens_per_s_per_device) X(dispatch_ms) X(combine_ms) \
    X(load_max_over_mean)
// clang-format on
#define PUT(name) put(row, #name, m->name);
    FIELDS(PUT)
    for (int i = 0; i < DPL_PHASE_N && t->o->step_profile; i++) {
        snprintf(key, sizeof key, "phase_%s_ms", dpl_phase_name((dpl_phase)i));
        put(row, key, 1e3 * t->ctx->phase_s[i]);
    }
    return row;
}

json_t *dpl_metrics_eval_row(int64_t step, const dpl_eval_metrics *m) {
    json_t *row = json_pack("{s:I, s:I}", "step", step, "eval_tokens", m->n_tokens);
    put(row, "eval_loss", m->loss);
    put(row, "eval_perplexity", m->perplexity);
    return row;
}

static bool keep_line(const char *line, size_t n, int64_t step, bool eval) {
    json_t *row = json_loadb(line, n, 0, NULL);
    const json_t *value = json_object_get(row, "step");
    if (!eval && json_object_get(row, "eval_loss")) step--;
    const bool keep = json_is_integer(value) && json_integer_value(value) <= step;
    json_decref(row);
    return keep;
}

dpl_status dpl_metrics_cut(const char *path, int64_t step, bool eval) {
    dpl_map map;
    if (!dpl_path_exists(path)) return DPL_OK;
    DPL_TRY(dpl_map_open(path, &map));
    char *kept = dpl_alloc(map.bytes);
    const char *line = (const char *)map.data, *end = line + map.bytes, *stop;
    size_t used = 0;
    // What a killed process left of a line has no end.
    for (; kept && (stop = memchr(line, '\n', (size_t)(end - line))); line = stop + 1) {
        const size_t n = (size_t)(stop - line) + 1;
        if (!keep_line(line, n, step, eval)) continue;
        memcpy(kept + used, line, n);
        used += n;
    }
    const dpl_status status = kept ? dpl_write_file(path, kept, used)
                                   : dpl_fail(DPL_ENOMEM, "no memory for a copy of %s", path);
    dpl_free(kept);
    dpl_map_close(&map);
    return status;
}
