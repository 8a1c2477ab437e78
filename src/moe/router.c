// router.c - step 1 of the layer: logits in fp32, choice of experts, weights, auxiliary losses.
//
// Nothing is read back here: what the host must know (was a logit not finite, the losses) goes
// into the report that dpl_moe_prepare() reads together with the counts. Losses over the batch of
// several ranks need the sums of all first: the ranks meet for them behind it.
#include "moe/moe.h"

void dpl_router_forward(dpl_ctx *ctx, const dpl_moe_shape *shape, const dpl_moe_weights *weights,
                        dpl_mat x, const int32_t *segment, const dpl_aux *aux,
                        const dpl_moe_saved *saved) {
    const dpl_route_rule *rule = &shape->rule;
    const size_t n_tokens = saved->ep.n_tokens;
    dpl_moe_report *report = saved->ep.report;
    dpl_gemm_forward(ctx, x, &weights->router, dpl_one_group(n_tokens),
                     dpl_mat_f32(saved->logits, rule->n_experts));
    dpl_route_forward(ctx, rule, saved->logits, weights->bias, segment, n_tokens, saved->score,
                      saved->ids, saved->weights, &report->bad_row);
    if (aux && saved->sums)
        dpl_aux_sums(ctx, rule, aux, saved->logits, saved->score, saved->ids, saved->sums);
    if (aux && !saved->sums)
        dpl_aux_losses(ctx, rule, aux, saved->logits, saved->score, saved->ids, report->aux, NULL);
    else dpl_zero(ctx, report->aux, sizeof report->aux);
}

dpl_status dpl_router_meet(dpl_ctx *ctx, const dpl_moe_shape *shape, const dpl_aux *aux,
                           dpl_status mine, dpl_moe_saved *saved) {
    const size_t n = dpl_aux_n_sums(shape->rule.n_experts), mark = dpl_ctx_mark(ctx);
    dpl_comm *batch = saved->ep.ranks->batch;
    if (!saved->sums) return mine;
    DPL_TRY(dpl_comm_agree(batch, mine));
    double *own = dpl_ctx_alloc(ctx, n * sizeof *own);
    dpl_ctx_read(ctx, own, saved->sums, n * sizeof *own);
    memcpy(saved->all, own, n * sizeof *own);
    const dpl_status status = dpl_comm_sum_f64(batch, saved->all, n);
    if (status == DPL_OK) dpl_aux_part(&shape->rule, aux, own, saved->all, saved->aux);
    dpl_ctx_release(ctx, mark);
    return status;
}

void dpl_router_backward(dpl_ctx *ctx, const dpl_moe_shape *shape, const dpl_moe_weights *weights,
                         dpl_mat x, const dpl_aux *aux, const dpl_moe_saved *saved,
                         const float *dweights, dpl_mat dx) {
    const dpl_route_rule *rule = &shape->rule;
    const dpl_groups all = dpl_one_group(saved->ep.n_tokens);
    const size_t mark = dpl_ctx_mark(ctx);
    float *dlogits = dpl_ctx_alloc(ctx, saved->ep.n_tokens * rule->n_experts * sizeof(float));
    double *values = dpl_ctx_alloc(ctx, 2 * sizeof(double)); // forward has reported them already
    dpl_route_backward(ctx, rule, dweights, saved->ids, saved->score, saved->ep.n_tokens, dlogits);
    if (aux && saved->sums)
        dpl_aux_gradient(ctx, rule, aux, saved->logits, saved->score, saved->ids, saved->all,
                         dlogits);
    else if (aux)
        dpl_aux_losses(ctx, rule, aux, saved->logits, saved->score, saved->ids, values, dlogits);
    const dpl_mat dl = dpl_mat_f32(dlogits, rule->n_experts);
    dpl_weight_grad(ctx, dl, x, (dpl_row_map){0}, all, &weights->router);
    dpl_gemm_dgrad(ctx, dl, &weights->router, all, dx, true);
    dpl_ctx_release(ctx, mark);
}
