// step.c - one optimizer step over the global batch, and one evaluation.
//
// The number of loss tokens of the whole batch is known before the first micro-batch runs, so each
// micro-batch's gradients have their final scale: the result is the same however it is split.
// Nothing of the trainer's state changes before every loss and gradient is known to be finite.
#include <math.h>

#include "train/train.h"

static dpl_batch batch_of(const dpl_tokens *t) {
    return (dpl_batch){t->n_batch, t->n_seq, t->ids, t->targets, t->segment, t->position};
}

// Of the tokens that each expert of each layer got.
static size_t count_elems(const dpl_model *m) {
    return (m->config.n_layers + m->config.n_mtp) * m->config.n_experts;
}

// Losses and tokens per expert of all ranks together.
static dpl_status add_ranks(dpl_model *model, const dpl_mesh *mesh, dpl_loss_sums *s) {
    double parts[] = {s->xent, s->z, s->mtp_xent, s->balance, s->router_z};
    DPL_TRY(dpl_comm_sum_i64(mesh->world, model->counts, count_elems(model)));
    DPL_TRY(dpl_comm_sum_f64(mesh->world, parts, DPL_COUNT(parts)));
    s->xent = parts[0], s->z = parts[1], s->mtp_xent = parts[2];
    s->balance = parts[3], s->router_z = parts[4];
    return DPL_OK;
}

static dpl_status run_micros(dpl_model *model, const dpl_loss_rule *rule, const dpl_tokens *batch,
                             dpl_tokens *micro, dpl_loss_sums *sums) {
    const size_t n_micros = micro ? batch->n_batch / micro->n_batch : 1;
    const dpl_batch piece = batch_of(micro ? micro : batch);
    const double n_tokens = sums->n_tokens, n_mtp = sums->mtp_tokens;
    const double scale = n_tokens > 0 ? 1 / n_tokens : 0;
    const double mtp_scale = n_mtp > 0 ? rule->mtp_weight / n_mtp : 0;
    dpl_comm *together = dpl_ep_batch(&model->ranks, rule->balance);
    dpl_status status = DPL_OK;
    for (size_t j = 0; j < n_micros; j++) {
        if (j + 1 == n_micros) dpl_model_end_step(model);
        if (status != DPL_OK) { // the others go on until all agree
            (void)dpl_model_sit_out(model, piece.n_seq, true);
            continue;
        }
        for (size_t row = 0; micro && row < micro->n_batch; row++) // strided, as MaxText splits
            dpl_tokens_copy_row(batch, j + row * n_micros, micro, row);
        double n = dpl_batch_targets(&piece, 0);
        if (together) DPL_TRY(dpl_comm_sum_f64(together, &n, 1)); // a failure is that of all
        const double share = n_tokens > 0 ? n / n_tokens : 0;
        dpl_loss_sums s;
        status = dpl_model_train_micro(model, &piece, rule, scale, mtp_scale, share, &s);
        if (together) status = dpl_comm_agree(together, status); // none goes on alone
        if (status != DPL_OK) continue;
        sums->xent += s.xent;
        sums->z += s.z;
        sums->mtp_xent += s.mtp_xent;
        sums->balance += share * s.balance;
        sums->router_z += share * s.router_z;
    }
    return status;
}

// Auxiliary losses are averaged by the micro-batches' loss tokens: the part of the batch that has
// none contributes nothing. Where they are over the batch, a micro-batch is that of all ranks
// together, which each contribute what their rows have in its losses.
dpl_status dpl_train_pass(dpl_model *model, const dpl_mesh *mesh, const dpl_loss_rule *rule,
                          const dpl_tokens *batch, dpl_tokens *micro, dpl_loss_sums *sums) {
    const dpl_batch whole = batch_of(batch);
    double n[2] = {dpl_batch_targets(&whole, 0), 0};
    for (size_t k = 1; k <= model->config.n_mtp; k++) n[1] += dpl_batch_targets(&whole, k);
    if (mesh) DPL_TRY(dpl_comm_sum_f64(mesh->world, n, 2));
    *sums = (dpl_loss_sums){.n_tokens = n[0], .mtp_tokens = n[1]};
    memset(model->counts, 0, count_elems(model) * sizeof *model->counts);
    dpl_model_zero_grads(model);
    dpl_status status = run_micros(model, rule, batch, micro, sums);
    if (!mesh) return status;
    if (!dpl_ep_batch(&model->ranks, rule->balance)) // else they have agreed
        status = dpl_comm_agree(mesh->world, status);
    DPL_TRY(status);
    return add_ranks(model, mesh, sums);
}

static void fill_losses(const dpl_trainer *t, const dpl_loss_sums *s, dpl_step_metrics *m) {
    const double n = s->n_tokens;
    m->total_weights = n;
    m->lm_loss = n > 0 ? (s->xent + s->z) / n : 0;
    m->z_loss = n > 0 ? s->z / n : 0;
    m->mtp_loss = s->mtp_tokens > 0 ? t->rule.mtp_weight * s->mtp_xent / s->mtp_tokens : 0;
    m->moe_lb_loss = s->balance;
    m->router_z_loss = s->router_z;
    m->loss = m->lm_loss + m->mtp_loss + m->moe_lb_loss + m->router_z_loss;
    m->perplexity = exp(m->lm_loss);
}

// The busiest expert's tokens over the mean, in the layer where that is worst.
static double load_max_over_mean(const dpl_model *model) {
    const size_t E = model->config.n_experts;
    double worst = 0;
    for (size_t at = 0; at < count_elems(model); at += E) {
        int64_t most = 0, all = 0;
        for (const int64_t *n = model->counts + at; n < model->counts + at + E; n++) {
            most = DPL_MAX(most, *n);
            all += *n;
        }
        if (all > 0) worst = DPL_MAX(worst, (double)most * (double)E / (double)all);
    }
    return worst;
}

static void fill_speed(const dpl_trainer *t, double seconds, dpl_step_metrics *m) {
    const double *phase = t->ctx->phase_s;
    m->seconds = seconds;
    m->tflops_per_device = t->step_flops / seconds * 1e-12;
    m->tokens_per_s_per_device = (double)(t->batch.n_batch * t->batch.n_seq) / seconds;
    m->mfu = t->peak_flops > 0 ? t->step_flops / seconds / t->peak_flops : 0;
    m->gmm_ms = 1e3 * phase[DPL_PHASE_GMM];
    m->dispatch_ms = 1e3 * phase[DPL_PHASE_DISPATCH];
    m->combine_ms = 1e3 * phase[DPL_PHASE_COMBINE];
    m->load_max_over_mean = load_max_over_mean(t->model);
}

// From the batch to new weights and biases, which come last.
static dpl_status make_step(dpl_trainer *t, dpl_step_metrics *m) {
    dpl_loss_sums sums;
    DPL_TRY(dpl_train_pass(t->model, &t->mesh, &t->rule, &t->batch, &t->micro, &sums));
    fill_losses(t, &sums, m);
    DPL_EXPECT(isfinite(m->loss), DPL_ENUMERIC, "the loss is not finite");
    dpl_ctx_phase(t->ctx, DPL_PHASE_OPTIMIZER);
    DPL_TRY(dpl_optimizer_norm(&t->optimizer, &t->mesh, &m->raw_grad_norm));
    m->grad_norm = dpl_optimizer_apply(&t->optimizer, m->learning_rate, m->raw_grad_norm);
    if (t->o->routed_bias_update_rate > 0 && t->model->config.routed_bias)
        dpl_model_update_bias(t->model, t->o->routed_bias_update_rate);
    dpl_ctx_wait(t->ctx);
    return DPL_OK;
}

dpl_status dpl_trainer_step(dpl_trainer *t, dpl_step_metrics *metrics_out) {
    DPL_NEED(t && metrics_out);
    const double start = dpl_now();
    dpl_step_metrics m = {.step = t->step};
    m.learning_rate = dpl_schedule_rate(t->o, t->schedule_length, t->step);
    memset(t->ctx->phase_s, 0, sizeof t->ctx->phase_s);
    const size_t n_rows = t->batch.n_batch, rank = (size_t)t->mesh.world->rank;
    dpl_model_seed_rounding(t->model, (uint64_t)t->o->init_weights_seed, (uint64_t)t->step, rank);
    dpl_data_train(&t->data, t->position, rank * n_rows, &t->batch);
    const dpl_status status = make_step(t, &m);
    dpl_ctx_phase(t->ctx, DPL_PHASE_OTHER);
    if (status != DPL_OK) return dpl_fail_in(status, "step %lld", (long long)t->step);
    t->position += n_rows * (size_t)t->mesh.world->n_ranks;
    t->step++;
    fill_speed(t, dpl_now() - start, &m);
    *metrics_out = m;
    return DPL_OK;
}

// Ranks take batches in turn; past the last sample there is padding, since all make as many passes.
dpl_status dpl_evaluate(dpl_model *model, const dpl_mesh *mesh, const dpl_data *data,
                        const dpl_loss_rule *rule, int64_t most, dpl_tokens *tokens,
                        dpl_progress_fn progress, void *arg, dpl_eval_metrics *metrics_out) {
    const uint64_t R = mesh ? (uint64_t)mesh->world->n_ranks : 1;
    const uint64_t rank = mesh ? (uint64_t)mesh->world->rank : 0;
    uint64_t n_batches = (dpl_data_samples(data, true) - 1) / (tokens->n_batch * R) + 1;
    if (most > 0) n_batches = DPL_MIN(n_batches, (uint64_t)most);
    const dpl_batch batch = batch_of(tokens);
    double sums[2] = {0, 0}; // of losses; of tokens
    for (uint64_t i = 0; i < n_batches; i++) {
        dpl_loss_sums s;
        dpl_data_eval(data, (i * R + rank) * tokens->n_batch, tokens);
        dpl_status status = dpl_model_evaluate(model, &batch, rule, NULL, &s);
        if (status != DPL_OK) status = dpl_fail_in(status, "evaluation batch %zu", (size_t)i);
        else if (progress && progress(arg, i + 1, n_batches) != 0)
            status = dpl_fail(DPL_EINTR, "stopped after %zu of %zu batches", (size_t)i + 1,
                              (size_t)n_batches);
        DPL_TRY(mesh ? dpl_comm_agree(mesh->world, status) : status);
        sums[0] += s.xent + s.z;
        sums[1] += s.n_tokens;
    }
    if (mesh) DPL_TRY(dpl_comm_sum_f64(mesh->world, sums, 2));
    DPL_EXPECT(isfinite(sums[0]), DPL_ENUMERIC, "the evaluation loss is not finite");
    const double loss = sums[1] > 0 ? sums[0] / sums[1] : 0;
    *metrics_out = (dpl_eval_metrics){loss, exp(loss), (int64_t)sums[1]};
    return DPL_OK;
}

static int is_stopped(void *arg, uint64_t n_done, uint64_t n_total) {
    const dpl_trainer *t = arg;
    return t->stop && n_done < n_total;
}

dpl_status dpl_trainer_evaluate(dpl_trainer *t, dpl_eval_metrics *metrics_out) {
    DPL_NEED(t && metrics_out);
    DPL_CHECK(dpl_data_samples(&t->data, true) > 0,
              "no evaluation data: eval_dataset_path and eval_split_fraction give none");
    if (t->mesh.world->n_ranks == 1) // else one rank's request is agreed on after the first batch
        DPL_EXPECT(!t->stop, DPL_EINTR, "stopped on request before an evaluation");
    return dpl_evaluate(t->model, &t->mesh, &t->data, &t->rule, t->o->eval_steps, &t->eval,
                        is_stopped, t, metrics_out);
}
