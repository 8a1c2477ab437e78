/*
 * oracle.h - the judge: the deepseek_v3 model in double precision, written as plain loops.
 *
 * It shares no code with src/ and includes nothing of it. Speed does not matter here; being easy to
 * check by eye does. Everything is row-major, every matrix of the model is (out, in), y = x W^T.
 * Parameter gradients and those arguments marked += accumulate, everything else is written.
 * A missing tensor or impossible shape ends the test program with a message.
 */
#ifndef DPL_TESTS_ORACLE_H
#define DPL_TESTS_ORACLE_H

#include <stdbool.h>
#include <stdint.h>

/* ---- named tensors ---- */

typedef struct oracle_tensor {
    char *name; // a Hugging Face name, or an output's name
    int n_dims, shape[4], n;
    double *value;  // n elements; ids and counts are stored as doubles too
    double *grad;   // n elements; NULL in a set of outputs
    double *m, *v;  // AdamW's moments; NULL before the first step
    bool trainable; // not the router bias, not an MTP layer's copies of embedding and head
} oracle_tensor;

typedef struct oracle_set {
    oracle_tensor *at;
    int n, capacity;
} oracle_set;

// Copies `value` (zeros when NULL). `params` makes room for a gradient. The pointer is valid until
// the next addition.
oracle_tensor *oracle_add(oracle_set *set, bool params, const char *name, int n_dims,
                          const int *shape, const double *value);
oracle_tensor *oracle_find(const oracle_set *set, const char *name); // NULL when there is none
oracle_tensor *oracle_get(const oracle_set *set, const char *format, ...)
    __attribute__((format(printf, 2, 3))); // as above, but a missing name ends the program
void oracle_zero_grads(oracle_set *set);
void oracle_set_close(oracle_set *set);

/* ---- configuration ---- */

typedef struct oracle_router {
    int E, K;
    int n_group, topk_group; // n_group <= 1: no groups
    int group_best;          // a group's score is the sum of its so many best (2; DeepSeek-V2: 1)
    bool softmax;            // else sigmoid
    bool norm_topk;
    double scale; // routed_scaling_factor
} oracle_router;

typedef struct oracle_config {
    int V, D, L, H, n_dense, F_dense, F_moe, n_shared;
    oracle_router router;
    int q_lora, kv_lora, nope, rope, v_dim; // q_lora 0: one full query projection
    double eps, latent_eps;                 // latent_eps 1e-6: q_a_layernorm, kv_a_layernorm
    bool attention_bias;                    // only oracle_params_random looks at it
    bool rope_interleave, tied;
    double rope_theta;
    struct {
        bool on, truncate;
        double factor, original_length, beta_fast, beta_slow;
        double mscale, mscale_all_dim, attention_factor; // 0: not given
    } yarn;
    int mtp_layers;
    double mtp_weight; // mtp_loss_scaling_factor
    // Auxiliary losses; 0 switches one off.
    double balance_weight;  // load_balance_loss_weight
    bool balance_batch;     // load_balance_scope: batch
    bool balance_megatron;  // moe_use_megatron_seq_aux_loss
    double router_z_weight; // router_z_loss_weight
    double z_multiplier;    // z_loss_multiplier, on the logits of the head
    double bias_rate;       // for the output router.L.bias_next
} oracle_config;

// Reads a Hugging Face config.json (deepseek_v3 or _v2, new or old form). False: no such file.
bool oracle_config_load(const char *path, oracle_config *cfg_out);
// The tensors of a model folder (fixture_open). False: no such folder.
bool oracle_params_load(const char *path, oracle_set *params_out);
// All parameters of the model with random values: norms in 0.6 .. 1.4, router bias not zero.
void oracle_params_random(const oracle_config *cfg, uint64_t seed, oracle_set *params_out);

/* ---- the model ---- */

typedef struct oracle_batch {
    int B, S;
    const int *ids;      // (B, S)
    const int *targets;  // (B, S) shifted: position s predicts targets[s]; negative: no loss
    const int *segments; // (B, S) 1, 2, .. per document, 0 padding; NULL: one document per row
} oracle_batch;

/*
 * oracle_run: forward, and with `backward` every tensor's gradient (+=) of the total loss
 *     loss + mtp_weight * mtp.loss + aux.balance + aux.router_z          which it returns.
 * `out` (may be NULL) gets the tensors of fixtures/README.md section 3 except input_ids, labels and
 * targets; also aux.balance and aux.router_z (1), and with `backward` router.L.dlogits.
 *
 * Documents: attention sees the same segment only, positions restart. Padding is not routed (ids
 * -1, weights 0), not counted and in no auxiliary loss; attention gives it 0.
 * MTP depth k has S-k positions. Position s takes the embedding of token s+k and predicts
 * targets[s+k] from depth k-1's normed hidden state; where s+k lies in another document, position s
 * counts as padding. mtp.loss is the sum over all depths / number of their targets; tensors of
 * depth 1 are mtp.hidden and mtp.logits, deeper ones mtpK.hidden, mtpK.logits.
 * Balance loss of one layer: weight * E^2 * mean over groups and experts of f * P, a group being
 * one sequence (or the batch), f = slots on e / (tokens * K), P = mean softmax of the *score*;
 * groups without tokens are left out; mean over MoE layers, MTP's included. Megatron's form: f
 * from the top-K of the plain score, P = mean of score / (sum of scores + 1e-20), summed over
 * layers.
 */
double oracle_run(const oracle_config *cfg, oracle_set *params, const oracle_batch *batch,
                  bool backward, oracle_set *out);

typedef struct oracle_adamw {
    double lr, beta1, beta2, eps, eps_root, decay;
} oracle_adamw;
// Step n = 1, 2, ..; all trainable tensors, decoupled decay.
void oracle_adamw_step(const oracle_adamw *opt, int n, oracle_set *params);
// Scales the gradients to norm c if theirs is not smaller (c 0: never). Returns the norm before.
double oracle_clip(oracle_set *params, double c);
// bias += rate * sign(mean(counts) - counts)
void oracle_bias_update(int E, double rate, const double *counts, double *bias);

/* ---- single operators ---- */

// c (m, n) += op(a) (m, k) op(b) (k, n); with ta, a is stored (k, m); with tb, b is stored (n, k).
void oracle_gemm(bool ta, bool tb, int m, int n, int k, const double *a, const double *b,
                 double *c);

void oracle_rmsnorm_forward(int T, int D, double eps, const double *x, const double *w, double *y);
void oracle_rmsnorm_backward(int T, int D, double eps, const double *x, const double *w,
                             const double *dy, double *dx, double *dw /* += */);

// inv_freq (rope/2) and the factor on cos and sin.
void oracle_rope_table(const oracle_config *cfg, double *inv_freq, double *amplitude);
// Rotates the first `rope` elements of each head in place; heads lie head_stride apart, rows
// n_heads * head_stride. Pairs go back to their own places. sign -1: the transpose (backward).
void oracle_rope(const oracle_config *cfg, int n_rows, int n_heads, int head_stride,
                 const int *position, int sign, double *x);
double oracle_softmax_scale(const oracle_config *cfg);

typedef struct oracle_attention {
    int B, S, H, dk, dv;
    double scale;
    const int *segments; // (B, S), may be NULL
} oracle_attention;
// q, k (B, S, H, dk); v, y (B, S, H, dv). Causal, within the segment; 0 for padding queries.
void oracle_attention_forward(const oracle_attention *a, const double *q, const double *k,
                              const double *v, double *y);
void oracle_attention_backward(const oracle_attention *a, const double *q, const double *k,
                               const double *v, const double *dy, double *dq, double *dk,
                               double *dv);

// down(silu(gate x) * up x). The d-pointers are += and used by the backward functions only.
typedef struct oracle_mlp {
    int F;
    const double *gate, *up, *down; // (F, D), (F, D), (D, F)
    double *dgate, *dup, *ddown;
} oracle_mlp;

// y += scale * mlp(x) for one row; backward: dx +=, and *dscale = dy . mlp(x).
void oracle_mlp_row(const oracle_mlp *m, int D, const double *x, double scale, double *y);
void oracle_mlp_row_backward(const oracle_mlp *m, int D, const double *x, double scale,
                             const double *dy, double *dx, double *dscale);

// y (T, D) += sum over slots of weight * expert(x). Slots with id -1 are skipped.
void oracle_experts_forward(int T, int D, int K, const oracle_mlp *experts, const double *x,
                            const int *ids, const double *weights, double *y);
// dx +=, dweights (T, K) written (0 for skipped slots).
void oracle_experts_backward(int T, int D, int K, const oracle_mlp *experts, const double *x,
                             const int *ids, const double *weights, const double *dy, double *dx,
                             double *dweights);

// One MoE layer's routing. ids (T, K): larger choice first, equal ones by lower id; -1: not routed.
typedef struct oracle_routing {
    double *logits, *score;     // (T, E)
    double *dlogits, *dscore;   // (T, E) zeroed by open; auxiliary losses add theirs, then
                                // the backward pass adds its own
    double *weights, *dweights; // (T, K)
    int *ids;
} oracle_routing;
void oracle_routing_open(oracle_routing *s, const oracle_router *r, int T);
void oracle_routing_close(oracle_routing *s);

// Fills score, ids, weights from s->logits. `bias` (E) may be NULL. `segments` (T) may be NULL;
// 0 is not routed. With `given` (T, K), these ids are taken instead of the top-K.
void oracle_route_forward(const oracle_router *r, int T, const double *bias, const int *segments,
                          const int *given, oracle_routing *s);
// From s->dweights: s->dscore += , then s->dlogits += .
void oracle_route_backward(const oracle_router *r, int T, oracle_routing *s);

typedef struct oracle_moe {
    oracle_router router;
    int D;
    const double *w_router, *bias; // (E, D); (E) or NULL
    double *dw_router;
    oracle_mlp *experts; // E
    oracle_mlp shared;   // F 0: none
} oracle_moe;
// y (T, D) = routed + shared experts.
void oracle_moe_layer_forward(const oracle_moe *m, int T, const double *x, const int *segments,
                              const int *given, oracle_routing *s, double *y);
void oracle_moe_layer_backward(const oracle_moe *m, int T, const double *x, oracle_routing *s,
                               const double *dy, double *dx);

// The auxiliary losses of one layer over B rows of S tokens; they add to s->dscore and s->dlogits.
// n_layers: number of MoE layers of the model.
double oracle_balance_loss(const oracle_config *cfg, int n_layers, int B, int S,
                           const int *segments, oracle_routing *s);
double oracle_router_z_loss(const oracle_config *cfg, int n_layers, int T, const int *segments,
                            oracle_routing *s);

// Sum over rows with target >= 0 of lse - logit[target] + z * lse^2; row_loss (T) and dlogits
// (T, V) of that sum. Returns it; *count gets the number of such rows.
double oracle_cross_entropy(int T, int V, double z, const double *logits, const int *targets,
                            double *row_loss, double *dlogits, int *count);

// Random numbers for tests: a counter is turned into a well-mixed value in (-1, 1).
double oracle_random(uint64_t seed, uint64_t counter);

#endif
