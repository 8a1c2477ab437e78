// experts.c - step 4 of the layer: gate and up in one GEMM, SwiGLU times router weight, down. With
// one group and no row weights this is also the shared expert and the dense MLP.
//
// Since the router weight enters before the down projection, its gradient is a dot product in
// front of it, and the experts' outputs need not be kept for the backward pass.
#include "moe/moe.h"

static dpl_phase gemm_phase(dpl_groups groups) {
    return groups.offsets ? DPL_PHASE_GMM : DPL_PHASE_GEMM;
}

void dpl_experts_forward(dpl_ctx *ctx, dpl_mat rows, const float *row_weight, dpl_groups groups,
                         size_t f, const dpl_weight *gate_up_w, const dpl_weight *down_w,
                         dpl_mat gate_up, dpl_mat hidden, dpl_mat y) {
    const dpl_phase before = dpl_ctx_phase(ctx, gemm_phase(groups));
    dpl_gemm_forward(ctx, rows, gate_up_w, groups, gate_up);
    dpl_ctx_phase(ctx, DPL_PHASE_SWIGLU);
    dpl_swiglu_forward(ctx, gate_up, row_weight, groups.n_rows, f, hidden);
    dpl_ctx_phase(ctx, gemm_phase(groups));
    dpl_gemm_forward(ctx, hidden, down_w, groups, y);
    dpl_ctx_phase(ctx, before);
}

void dpl_experts_backward(dpl_ctx *ctx, dpl_mat rows, const float *row_weight, dpl_groups groups,
                          size_t f, const dpl_weight *gate_up_w, const dpl_weight *down_w,
                          dpl_mat gate_up, dpl_mat hidden, dpl_mat dy, dpl_mat drows,
                          bool accumulate, float *drow_weight, float *dgate_up_w, float *ddown_w) {
    const size_t n = groups.n_rows, d = down_w->n, width = dpl_gate_up_width(f);
    const size_t element = dpl_dtype_bytes(gate_up.dtype), mark = dpl_ctx_mark(ctx);
    const dpl_mat dhidden = {dpl_ctx_alloc(ctx, n * f * element), f, gate_up.dtype};
    const dpl_mat dgate_up = {dpl_ctx_alloc(ctx, n * width * element), width, gate_up.dtype};
    const dpl_phase before = dpl_ctx_phase(ctx, gemm_phase(groups));
    dpl_gemm_dgrad(ctx, dy, down_w, groups, dhidden, false);
    if (ddown_w) dpl_gemm_wgrad(ctx, dy, hidden, groups, d, f, down_w->dtype, ddown_w);
    dpl_ctx_phase(ctx, DPL_PHASE_SWIGLU);
    dpl_swiglu_backward(ctx, dhidden, gate_up, row_weight, n, f, dgate_up, drow_weight);
    dpl_ctx_phase(ctx, gemm_phase(groups));
    if (dgate_up_w)
        dpl_gemm_wgrad(ctx, dgate_up, rows, groups, width, d, gate_up_w->dtype, dgate_up_w);
    dpl_gemm_dgrad(ctx, dgate_up, gate_up_w, groups, drows, accumulate);
    dpl_ctx_release(ctx, mark);
    dpl_ctx_phase(ctx, before);
}
