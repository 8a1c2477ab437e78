/*
 * lab.h - one MoE layer with random weights, as the tests of src/moe see it: row-major values for
 * the oracle, packed ones for the layer, and the results of both side by side.
 */
#ifndef DPL_TESTS_LAB_H
#define DPL_TESTS_LAB_H

#include "moe/moe.h"
#include "oracle.h"

typedef struct lab_rule {
    size_t t, d, f, shared_f;
    dpl_route_rule rule;
    dpl_dtype dtype; // of compute, x and y
    bool bias;
    uint64_t seed;
    bool mx_wire;
} lab_rule;

typedef enum lab_id { // row-major tensors
    LAB_ROUTER,
    LAB_GATE,
    LAB_UP,
    LAB_DOWN,
    LAB_SGATE,
    LAB_SUP,
    LAB_SDOWN,
    LAB_N
} lab_id;

typedef struct lab {
    lab_rule rule;
    dpl_moe_shape shape;
    dpl_ep_ranks ranks;
    float *value[LAB_N];     // row-major; call lab_pack() after changing one
    double *expected[LAB_N]; // gradients
    size_t n[LAB_N];
    float *bias;        // (E) or NULL
    float *x, *dy;      // (T, D), exact in bf16 when that is the dtype
    int32_t *segment;   // (T) or NULL
    const dpl_aux *aux; // or NULL
    dpl_moe_weights weights;
    size_t grad_elems[5];
    void *x_in, *dy_in, *y; // in the dtype
    float *dx;
    double *y_expected, *dx_expected;
    double aux_expected[2];
    dpl_moe_saved saved;
    oracle_routing routing;
} lab;

dpl_route_rule lab_sigmoid(size_t n_experts, size_t top_k);
// Random weights and tokens. Ends the program when memory is short.
void lab_open(const lab_rule *rule, lab *l);
void lab_close(lab *l);
void lab_pack(lab *l);
void lab_inputs(lab *l); // x, dy -> x_in, dy_in
void lab_zero_grads(lab *l);
dpl_status lab_forward(lab *l, dpl_ctx *ctx); // y and saved; waits
void lab_backward(lab *l, dpl_ctx *ctx);      // dx and grads; waits
dpl_status lab_run(lab *l, dpl_ctx *ctx);     // both
void lab_oracle(lab *l, bool own_choice);     // own_choice false: the ids of `saved`
float lab_y(const lab *l, size_t i);
float lab_grad(const lab *l, lab_id id, size_t i); // element of the row-major tensor
uint64_t lab_hash(const lab *l);                   // of y, dx, gradients, ids, weights
// Root mean square of the difference over that of the expectation.
double lab_error(const lab *l, lab_id id);
double lab_error_y(const lab *l);
double lab_error_dx(const lab *l);
dpl_ctx *lab_ctx(int n_threads, bool deferred, const char *level); // NULL: machine lacks it

#endif
