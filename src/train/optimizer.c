// optimizer.c - what an optimizer step does after the backward pass: learning rate, norm, update of
// every tensor.
//
// Sums of squares are taken tensor by tensor in their fixed order, so the norm has the same bits
// for any number of threads. A gradient that is not finite is found before anything was changed.
#include <math.h>
#include <regex.h>
#include <stdio.h>

#include "train/train.h"

// MaxText's cosine and warm-up/stable/decay curves. `step` counts the updates already made, so step
// 0 has rate 0 when there is a warm-up. Every division is guarded: any combination of fractions and
// lengths gives a finite rate.
double dpl_schedule_rate(const dpl_options *o, int64_t length, int64_t step) {
    const bool wsd = dpl_is(o->lr_schedule_type, "wsd");
    const double first = o->learning_rate, last = first * o->learning_rate_final_fraction;
    const int64_t warmup = (int64_t)((double)length * o->warmup_steps_fraction);
    int64_t decay = length - warmup; // it must not reach into the warm-up: the curve would jump
    if (wsd) decay = DPL_MIN(decay, (int64_t)((double)length * o->wsd_decay_steps_fraction));
    if (step >= length) return 0;
    if (step < warmup) return first * (double)step / (double)warmup;
    const int64_t into = step - (length - decay);
    if (into < 0) return first;
    const double part = decay > 1 ? (double)into / (double)(decay - 1) : 1;
    const bool linear = wsd && dpl_is(o->wsd_decay_style, "linear");
    const double a = linear ? 1 - part : (1 + cos(M_PI * part)) / 2;
    return first * a + last * (1 - a);
}

// MaxText's path of a tensor, as its masks are written against.
// clang-format off
static const char *const maxtext_paths[DPL_P_N] = {
    [DPL_P_EMBED] = "token_embedder/embedding", [DPL_P_HEAD] = "logits_dense/kernel",
    [DPL_P_FINAL_NORM] = "decoder_norm/scale",
    [DPL_P_ATTN_NORM] = "pre_self_attention_layer_norm/scale",
    [DPL_P_Q] = "self_attention/query/kernel", [DPL_P_Q_A] = "self_attention/wq_a/kernel",
    [DPL_P_Q_A_BIAS] = "self_attention/wq_a/bias", [DPL_P_Q_A_NORM] = "self_attention/q_norm/scale",
    [DPL_P_Q_B] = "self_attention/wq_b/kernel", [DPL_P_KV_A] = "self_attention/wkv_a/kernel",
    [DPL_P_KV_A_BIAS] = "self_attention/wkv_a/bias",
    [DPL_P_KV_A_NORM] = "self_attention/kv_norm/scale",
    [DPL_P_KV_B] = "self_attention/wkv_b/kernel", [DPL_P_O] = "self_attention/out/kernel",
    [DPL_P_O_BIAS] = "self_attention/out/bias",
    [DPL_P_MLP_NORM] = "post_self_attention_layer_norm/scale", [DPL_P_GATE_UP] = "mlp/wi/kernel",
    [DPL_P_DOWN] = "mlp/wo/kernel", [DPL_P_ROUTER] = "MoeBlock_0/gate/kernel",
    [DPL_P_EXPERT_GATE_UP] = "MoeBlock_0/wi", [DPL_P_EXPERT_DOWN] = "MoeBlock_0/wo",
    [DPL_P_SHARED_GATE_UP] = "shared_experts/wi/kernel",
    [DPL_P_SHARED_DOWN] = "shared_experts/wo/kernel",
    [DPL_P_MTP_ENORM] = "mtp_block/embedding_norm/scale",
    [DPL_P_MTP_HNORM] = "mtp_block/hidden_state_norm/scale",
    [DPL_P_MTP_PROJ] = "mtp_block/projection/kernel", [DPL_P_MTP_NORM] = "mtp_block/norm/scale",
};
// clang-format on

// Marks the parameters that one expression selects, by a tensor's name on disk or MaxText's path.
static dpl_status mark_matches(const char *key, const char *expression, const dpl_model *model,
                               bool *marks) {
    regex_t regex;
    char why[128];
    const int error = regcomp(&regex, expression, REG_EXTENDED | REG_NOSUB);
    regerror(error, &regex, why, sizeof why);
    DPL_CHECK(!error, "%s: '%s' is not a regular expression: %s", key, expression, why);
    dpl_status status = DPL_OK;
    for (size_t i = 0; i < model->params.n && status == DPL_OK; i++) {
        const dpl_param *param = &model->params.list[i];
        const char *names[2] = {NULL, NULL}; // a tensor that matches, and one that does not
        for (size_t j = 0; j < model->n_disk; j++) {
            const dpl_disk_tensor *t = &model->disk[j];
            if (t->param == param && !t->copy_of_shared)
                names[regexec(&regex, t->name, 0, NULL, 0) != 0] = t->name;
        }
        const bool by_path = regexec(&regex, maxtext_paths[param->id], 0, NULL, 0) == 0;
        marks[i] |= by_path || names[0];
        if (!by_path && names[0] && names[1])
            status = dpl_fail(DPL_EINVAL,
                              "%s: '%s' selects %s but not %s, its other part; select both", key,
                              expression, names[0], names[1]);
    }
    regfree(&regex);
    return status;
}

static dpl_status mark_list(const char *key, const char *list, const dpl_model *model,
                            bool *marks) {
    json_t *array = json_loads(list, 0, NULL);
    dpl_status status = DPL_OK;
    if (list[0] && !json_is_array(array))
        status = dpl_fail(DPL_EINVAL, "%s is '%s', expected a list like [\".*norm.*\"]", key, list);
    for (size_t i = 0; i < json_array_size(array) && status == DPL_OK; i++) {
        const char *expression = json_string_value(json_array_get(array, i));
        status = expression ? mark_matches(key, expression, model, marks)
                            : dpl_fail(DPL_EINVAL, "%s: element %zu is not text", key, i);
    }
    json_decref(array);
    return status;
}

static dpl_status fill_masks(const dpl_options *o, dpl_optimizer *opt) {
    const char *mask = o->trainable_parameters_mask;
    size_t n_trained = 0;
    DPL_TRY(mark_list("adamw_mask", o->adamw_mask, opt->model, opt->decays));
    DPL_TRY(mark_list("trainable_parameters_mask", mask, opt->model, opt->trains));
    for (size_t i = 0; i < opt->model->params.n; i++) {
        opt->decays[i] = !opt->decays[i];
        if (!mask[0] || dpl_is(mask, "[]")) opt->trains[i] = true;
        n_trained += opt->trains[i];
    }
    DPL_CHECK(n_trained > 0, "trainable_parameters_mask %s selects no tensor", mask);
    return DPL_OK;
}

dpl_status dpl_optimizer_open(const dpl_options *o, dpl_model *model, dpl_optimizer *opt) {
    const size_t n = model->params.n, elems = model->params.own_elems;
    opt->model = model;
    opt->o = o;
    opt->trains = dpl_alloc_array(n, sizeof *opt->trains);
    opt->decays = dpl_alloc_array(n, sizeof *opt->decays);
    opt->squares = dpl_alloc_array(n, sizeof *opt->squares);
    opt->m = dpl_alloc_array(elems, sizeof *opt->m);
    opt->v = dpl_alloc_array(elems, sizeof *opt->v);
    DPL_EXPECT(opt->trains && opt->decays && opt->squares && opt->m && opt->v, DPL_ENOMEM,
               "no memory for %zu moments of the optimizer", 2 * elems);
    return fill_masks(o, opt);
}

void dpl_optimizer_close(dpl_optimizer *opt) {
    void *blocks[] = {opt->trains, opt->decays, opt->squares, opt->m, opt->v};
    for (size_t i = 0; i < DPL_COUNT(blocks); i++) dpl_free(blocks[i]);
    *opt = (dpl_optimizer){0};
}

// Of the tensors of a parameter the first whose gradient is not finite, on whatever rank.
static dpl_status name_bad_gradient(const dpl_model *model, const dpl_mesh *mesh,
                                    const dpl_param *param) {
    const dpl_disk_tensor *t = &model->disk[param->disk], *end = model->disk + model->n_disk;
    while (t < end && t->param == param &&
           (!dpl_disk_is_here(model, t) || dpl_disk_is_finite(model, t, model->params.grad)))
        t++;
    const size_t R = mesh ? (size_t)mesh->whole->n_ranks : 1;
    size_t first = t < end && t->param == param ? (size_t)(t - model->disk) : SIZE_MAX, one = first,
           *all = R > 1 ? dpl_alloc_array(R, sizeof *all) : &one;
    char layer[32] = "";
    if (!all) dpl_comm_abort(mesh->whole, "no memory to name a gradient");
    if (!all) return dpl_fail(DPL_ENOMEM, "no memory to name a gradient");
    dpl_status status = R > 1 ? dpl_comm_gather_now(mesh->whole, &first, sizeof first, all)
                              : DPL_OK;
    for (size_t r = 0; r < R; r++) first = DPL_MIN(first, all[r]);
    if (all != &one) dpl_free(all);
    DPL_TRY(status);
    if (param->layer >= 0) snprintf(layer, sizeof layer, "layer %d, ", param->layer);
    if (first == SIZE_MAX)
        return dpl_fail(DPL_ENUMERIC, "%sthe sum of gradients is not finite", layer);
    return dpl_fail(DPL_ENUMERIC, "%s%s: the gradient is not finite", layer,
                    model->disk[first].name);
}

dpl_status dpl_optimizer_norm(dpl_optimizer *opt, const dpl_mesh *mesh, double *norm_out) {
    const dpl_model *model = opt->model;
    double sum = 0;
    size_t at;
    memset(opt->squares, 0, model->params.n * sizeof *opt->squares);
    for (size_t i = 0; i < model->params.n; i++) {
        const size_t n = dpl_param_own(model, &model->params.list[i], &at);
        if (opt->trains[i] && n > 0)
            dpl_sum(model->ctx, model->params.grad + at, true, n, &opt->squares[i]);
    }
    dpl_ctx_wait(model->ctx);
    if (mesh) DPL_TRY(dpl_mesh_sum_squares(mesh, model, opt->squares));
    for (size_t i = 0; i < model->params.n; i++) {
        if (!isfinite(opt->squares[i]))
            return name_bad_gradient(model, mesh, &model->params.list[i]);
        sum += opt->squares[i];
    }
    *norm_out = sqrt(sum);
    return DPL_OK;
}

double dpl_optimizer_apply(dpl_optimizer *opt, double rate, double norm) {
    const dpl_model *model = opt->model;
    const dpl_options *o = opt->o;
    const double clip = o->gradient_clipping_threshold;
    const double scale = clip > 0 && norm >= clip ? clip / norm : 1;
    const double n = (double)++opt->n_updates;
    // clang-format off
    dpl_adamw rule = {.b1 = o->adam_b1, .b2 = o->adam_b2, .lr = (float)rate,
                      .eps = (float)o->adam_eps, .eps_root = (float)o->adam_eps_root,
                      .correct1 = (float)(1 - pow(o->adam_b1, n)),
                      .correct2 = (float)(1 - pow(o->adam_b2, n)), .grad_scale = (float)scale};
    // clang-format on
    for (size_t i = 0; i < model->params.n; i++) {
        const dpl_param *param = &model->params.list[i];
        size_t at;
        const size_t n_own = dpl_param_own(model, param, &at);
        if (!opt->trains[i] || n_own == 0) continue;
        rule.decay = opt->decays[i] ? (float)o->adam_weight_decay : 0.0f;
        float *grad = model->params.grad + at, *master = model->params.master + at;
        if (param->quantized && dpl_model_shards(model) == 1) {
            dpl_adamw_quantize(model->ctx, &rule, grad, param->n_groups, param->n, param->k, master,
                               opt->m + at, opt->v + at, &param->quant);
            continue;
        }
        const bool copied = model->params.copy && param->kind <= DPL_GATE_UP && !param->quantized;
        dpl_adamw_step(model->ctx, &rule, grad, n_own, master, opt->m + at, opt->v + at,
                       copied ? model->params.copy + at : NULL);
    }
    dpl_model_changed(opt->model);
    return norm * scale;
}
