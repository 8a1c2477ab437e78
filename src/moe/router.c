// router.c - step 1 of the layer: logits in fp32, choice of experts, weights, auxiliary losses.
//
// Nothing is read back here: what the host must know (was a logit not finite, the losses) goes
// into the report that dpl_moe_prepare() reads together with the counts.
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
    if (aux)
        dpl_aux_losses(ctx, rule, aux, saved->logits, saved->score, saved->ids, report->aux, NULL);
    else dpl_zero(ctx, report->aux, sizeof report->aux);
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
    if (aux)
        dpl_aux_losses(ctx, rule, aux, saved->logits, saved->score, saved->ids, values, dlogits);
    const dpl_mat dl = dpl_mat_f32(dlogits, rule->n_experts);
    dpl_weight_grad(ctx, dl, x, (dpl_row_map){0}, all, &weights->router);
    dpl_gemm_dgrad(ctx, dl, &weights->router, all, dx, true);
    dpl_ctx_release(ctx, mark);
}
