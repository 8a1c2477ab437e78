// experts.c - step 4 of the layer: gate and up in one GEMM that ends with SwiGLU times router
// weight, down. With one group and no row weights this is also the shared expert and the dense MLP.
//
// Since the router weight enters before the down projection, its gradient is a dot product in
// front of it, and the experts' outputs need not be kept for the backward pass.
#include "moe/moe.h"

static dpl_phase gemm_phase(const dpl_mlp *mlp) {
    return mlp->groups.offsets ? DPL_PHASE_GMM : DPL_PHASE_GEMM;
}

void dpl_experts_forward(dpl_ctx *ctx, const dpl_mlp *mlp, dpl_mat y) {
    const dpl_phase before = dpl_ctx_phase(ctx, gemm_phase(mlp));
    dpl_gemm_swiglu_forward(ctx, mlp->x, mlp->map, &mlp->gate_up_w, mlp->groups, mlp->row_weight,
                            mlp->gate_up, mlp->down_w.k, mlp->hidden);
    dpl_gemm_forward(ctx, mlp->hidden, &mlp->down_w, mlp->groups, y);
    dpl_ctx_phase(ctx, before);
}

void dpl_experts_gate_backward(dpl_ctx *ctx, const dpl_mlp *mlp, dpl_mat dy, dpl_mat dgate_up,
                               float *drow_weight) {
    const dpl_phase before = dpl_ctx_phase(ctx, gemm_phase(mlp));
    dpl_gemm_swiglu_backward(ctx, dy, &mlp->down_w, mlp->groups, mlp->row_weight, mlp->gate_up,
                             dgate_up, drow_weight);
    dpl_ctx_phase(ctx, before);
}

void dpl_experts_wgrad(dpl_ctx *ctx, const dpl_mlp *mlp, dpl_mat dy, dpl_mat dgate_up) {
    const dpl_phase before = dpl_ctx_phase(ctx, gemm_phase(mlp));
    dpl_weight_grad(ctx, dy, mlp->hidden, (dpl_row_map){0}, mlp->groups, &mlp->down_w);
    dpl_weight_grad(ctx, dgate_up, mlp->x, mlp->map, mlp->groups, &mlp->gate_up_w);
    dpl_ctx_phase(ctx, before);
}

void dpl_experts_dgrad(dpl_ctx *ctx, const dpl_mlp *mlp, dpl_mat dgate_up, dpl_mat dx,
                       bool accumulate) {
    const dpl_phase before = dpl_ctx_phase(ctx, gemm_phase(mlp));
    dpl_gemm_dgrad(ctx, dgate_up, &mlp->gate_up_w, mlp->groups, dx, accumulate);
    dpl_ctx_phase(ctx, before);
}

dpl_mat dpl_experts_dgate_up(dpl_ctx *ctx, const dpl_mlp *mlp) {
    return dpl_moe_mat(ctx, NULL, mlp->groups.n_rows, mlp->gate_up_w.n, mlp->gate_up.dtype);
}

void dpl_experts_backward(dpl_ctx *ctx, const dpl_mlp *mlp, dpl_mat dy, dpl_mat dx, bool accumulate,
                          float *drow_weight) {
    const size_t mark = dpl_ctx_mark(ctx);
    const dpl_mat dgate_up = dpl_experts_dgate_up(ctx, mlp);
    dpl_experts_gate_backward(ctx, mlp, dy, dgate_up, drow_weight);
    dpl_experts_wgrad(ctx, mlp, dy, dgate_up);
    dpl_experts_dgrad(ctx, mlp, dgate_up, dx, accumulate);
    dpl_ctx_release(ctx, mark);
}
