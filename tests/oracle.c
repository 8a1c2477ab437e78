/*
 * oracle.c - see oracle.h. Forward stands beside backward; each backward pass recomputes what is
 * cheap from its saved inputs, so that little state has to be understood.
 *
 * Memory: what a pass allocates hangs on its `run` and is freed at the end. Dimensions are int:
 * the models that the oracle judges are tiny.
 */
#include "oracle.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void die(const char *what, const char *where) {
    fprintf(stderr, "oracle: %s: %s\n", what, where);
    abort();
}

static void *zeros(int n, size_t size) {
    void *p = calloc(n > 0 ? (size_t)n : 1, size);
    if (!p) die("out of memory", "");
    return p;
}

static void copy(double *to, const double *from, int n) {
    memcpy(to, from, (size_t)n * sizeof *to);
}

static void add(double *to, const double *from, int n) {
    for (int i = 0; i < n; i++) to[i] += from[i];
}

static double dot(const double *a, const double *b, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static double sigmoid(double x) {
    return 1 / (1 + exp(-x));
}

// p = softmax(x); returns logsumexp(x). p may be x.
static double softmax(const double *x, int n, double *p) {
    double top = -INFINITY, sum = 0;
    for (int i = 0; i < n; i++) top = fmax(top, x[i]);
    for (int i = 0; i < n; i++) sum += p[i] = exp(x[i] - top);
    for (int i = 0; i < n; i++) p[i] /= sum;
    return top + log(sum);
}

double oracle_random(uint64_t seed, uint64_t counter) {
    uint64_t z = seed * 0x9e3779b97f4a7c15u + counter * 0xd1342543de82ef95u + 0x2545f4914f6cdd1du;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return ((double)(z >> 11) + 0.5) * 0x1p-52 - 1;
}

/* ---- named tensors ---- */

oracle_tensor *oracle_add(oracle_set *set, bool params, const char *name, int n_dims,
                          const int *shape, const double *value) {
    if (oracle_find(set, name)) die("name used twice", name);
    if (set->n == set->capacity) {
        set->capacity = 2 * set->capacity + 64;
        set->at = realloc(set->at, (size_t)set->capacity * sizeof *set->at);
        if (!set->at) die("out of memory", name);
    }
    oracle_tensor *t = &set->at[set->n++];
    *t = (oracle_tensor){.name = strdup(name), .n_dims = n_dims, .n = 1};
    for (int i = 0; i < n_dims; i++) t->n *= t->shape[i] = shape[i];
    t->value = zeros(t->n, sizeof(double));
    if (value) copy(t->value, value, t->n);
    if (params) t->grad = zeros(t->n, sizeof(double));
    t->trainable = params && !strstr(name, "e_score_correction_bias") &&
                   !strstr(name, "shared_head.head") &&
                   !(strstr(name, "layers.") && strstr(name, "embed_tokens"));
    return t;
}

oracle_tensor *oracle_find(const oracle_set *set, const char *name) {
    for (int i = 0; i < set->n; i++) {
        if (strcmp(set->at[i].name, name) == 0) return &set->at[i];
    }
    return NULL;
}

oracle_tensor *oracle_get(const oracle_set *set, const char *format, ...) {
    char name[200];
    va_list args;
    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    oracle_tensor *t = oracle_find(set, name);
    if (!t) die("no such tensor", name);
    return t;
}

void oracle_zero_grads(oracle_set *set) {
    for (int i = 0; i < set->n; i++) {
        memset(set->at[i].grad, 0, (size_t)set->at[i].n * sizeof(double));
    }
}

void oracle_set_close(oracle_set *set) {
    for (int i = 0; i < set->n; i++) {
        oracle_tensor *t = &set->at[i];
        free(t->name), free(t->value), free(t->grad), free(t->m), free(t->v);
    }
    free(set->at);
    *set = (oracle_set){0};
}

/* ---- matrix product, RMSNorm ---- */

void oracle_gemm(bool ta, bool tb, int m, int n, int k, const double *a, const double *b,
                 double *c) {
    for (int i = 0; i < m; i++) {
        for (int j = 0; j < n; j++) {
            double sum = 0;
            for (int p = 0; p < k; p++) {
                sum += (ta ? a[p * m + i] : a[i * k + p]) * (tb ? b[j * k + p] : b[p * n + j]);
            }
            c[i * n + j] += sum;
        }
    }
}

void oracle_rmsnorm_forward(int T, int D, double eps, const double *x, const double *w, double *y) {
    for (int t = 0; t < T; t++, x += D, y += D) {
        const double r = 1 / sqrt(dot(x, x, D) / D + eps);
        for (int d = 0; d < D; d++) y[d] = x[d] * r * w[d];
    }
}

void oracle_rmsnorm_backward(int T, int D, double eps, const double *x, const double *w,
                             const double *dy, double *dx, double *dw) {
    for (int t = 0; t < T; t++, x += D, dy += D, dx += D) {
        const double r = 1 / sqrt(dot(x, x, D) / D + eps);
        double dr = 0; // d loss / d r; and dr/dx_d = -r^3 x_d / D
        for (int d = 0; d < D; d++) {
            dr += dy[d] * w[d] * x[d];
            dw[d] += dy[d] * x[d] * r;
        }
        for (int d = 0; d < D; d++) dx[d] = dy[d] * w[d] * r - dr * r * r * r * x[d] / D;
    }
}

/* ---- rotary embedding ---- */

static double yarn_mscale(double factor, double a) {
    return factor > 1 ? 0.1 * a * log(factor) + 1 : 1;
}

void oracle_rope_table(const oracle_config *c, double *inv_freq, double *amplitude) {
    const int d = c->rope;
    *amplitude = 1;
    for (int i = 0; i < d / 2; i++) inv_freq[i] = pow(c->rope_theta, -2.0 * i / d);
    if (!c->yarn.on) return;
    const double f = c->yarn.factor, m = c->yarn.mscale, m_all = c->yarn.mscale_all_dim;
    const bool both = m != 0 && m_all != 0;
    *amplitude = both ? yarn_mscale(f, m) / yarn_mscale(f, m_all) : yarn_mscale(f, 1);
    if (c->yarn.attention_factor != 0) *amplitude = c->yarn.attention_factor;
    // The index of the pair that turns `beta` times over the original length.
    const double turn = c->yarn.original_length / (2 * acos(-1.0));
    double low = d * log(turn / c->yarn.beta_fast) / (2 * log(c->rope_theta));
    double high = d * log(turn / c->yarn.beta_slow) / (2 * log(c->rope_theta));
    if (c->yarn.truncate) low = floor(low), high = ceil(high);
    low = fmax(low, 0), high = fmin(high, d - 1);
    if (high == low) high += 0.001;
    for (int i = 0; i < d / 2; i++) {
        const double ramp = fmin(fmax((i - low) / (high - low), 0), 1);
        inv_freq[i] = inv_freq[i] / f * ramp + inv_freq[i] * (1 - ramp);
    }
}

double oracle_softmax_scale(const oracle_config *c) {
    const double m_all = c->yarn.mscale_all_dim;
    const double m = c->yarn.on && m_all != 0 ? yarn_mscale(c->yarn.factor, m_all) : 1;
    return m * m / sqrt(c->nope + c->rope);
}

void oracle_rope(const oracle_config *c, int n_rows, int n_heads, int head_stride,
                 const int *position, int sign, double *x) {
    double amplitude, *freq = zeros(c->rope, sizeof *freq);
    oracle_rope_table(c, freq, &amplitude);
    const int half = c->rope / 2;
    for (int t = 0; t < n_rows; t++) {
        for (int h = 0; h < n_heads; h++, x += head_stride) {
            for (int i = 0; i < half; i++) {
                const double angle = position[t] * freq[i];
                const double co = amplitude * cos(angle), si = sign * amplitude * sin(angle);
                double *a = x + (c->rope_interleave ? 2 * i : i);
                double *b = x + (c->rope_interleave ? 2 * i + 1 : i + half);
                const double a0 = *a, b0 = *b;
                *a = a0 * co - b0 * si;
                *b = b0 * co + a0 * si;
            }
        }
    }
    free(freq);
}

/* ---- attention ---- */

// p[0..s] = softmax over the visible keys of query (b, s) in head h; 0 where not visible. A padding
// query sees nothing, and attention gives 0.
static void attention_row(const oracle_attention *a, int b, int s, int h, const double *q,
                          const double *k, double *p) {
    for (int j = 0; j <= s; j++) {
        const bool same = !a->segments || a->segments[b * a->S + j] == a->segments[b * a->S + s];
        const double *qs = q + ((b * a->S + s) * a->H + h) * a->dk;
        const double *kj = k + ((b * a->S + j) * a->H + h) * a->dk;
        p[j] = same ? a->scale * dot(qs, kj, a->dk) : -INFINITY;
    }
    softmax(p, s + 1, p);
    const bool padding = a->segments && a->segments[b * a->S + s] == 0;
    for (int j = 0; j <= s && padding; j++) p[j] = 0;
}

void oracle_attention_forward(const oracle_attention *a, const double *q, const double *k,
                              const double *v, double *y) {
    double *p = zeros(a->S, sizeof *p);
    for (int row = 0; row < a->B * a->S * a->H; row++) {
        const int h = row % a->H, s = row / a->H % a->S, b = row / a->H / a->S;
        attention_row(a, b, s, h, q, k, p);
        for (int i = 0; i < a->dv; i++) {
            double sum = 0;
            for (int j = 0; j <= s; j++) sum += p[j] * v[((b * a->S + j) * a->H + h) * a->dv + i];
            y[row * a->dv + i] = sum;
        }
    }
    free(p);
}

void oracle_attention_backward(const oracle_attention *a, const double *q, const double *k,
                               const double *v, const double *dy, double *dq, double *dk,
                               double *dv) {
    double *p = zeros(a->S, sizeof *p), *dp = zeros(a->S, sizeof *dp);
    const int n_rows = a->B * a->S * a->H;
    memset(dq, 0, (size_t)(n_rows * a->dk) * sizeof *dq);
    memset(dk, 0, (size_t)(n_rows * a->dk) * sizeof *dk);
    memset(dv, 0, (size_t)(n_rows * a->dv) * sizeof *dv);
    for (int row = 0; row < n_rows; row++) {
        const int h = row % a->H, s = row / a->H % a->S, b = row / a->H / a->S;
        attention_row(a, b, s, h, q, k, p);
        for (int j = 0; j <= s; j++) {
            const int other = (b * a->S + j) * a->H + h;
            dp[j] = dot(dy + row * a->dv, v + other * a->dv, a->dv);
            for (int i = 0; i < a->dv; i++) dv[other * a->dv + i] += p[j] * dy[row * a->dv + i];
        }
        const double mean = dot(p, dp, s + 1);
        for (int j = 0; j <= s; j++) {
            const int other = (b * a->S + j) * a->H + h;
            const double dscore = a->scale * p[j] * (dp[j] - mean);
            for (int i = 0; i < a->dk; i++) {
                dq[row * a->dk + i] += dscore * k[other * a->dk + i];
                dk[other * a->dk + i] += dscore * q[row * a->dk + i];
            }
        }
    }
    free(p), free(dp);
}

/* ---- gated MLP, experts ---- */

void oracle_mlp_row(const oracle_mlp *m, int D, const double *x, double scale, double *y) {
    for (int f = 0; f < m->F; f++) {
        const double g = dot(m->gate + f * D, x, D), u = dot(m->up + f * D, x, D);
        const double h = scale * g * sigmoid(g) * u;
        for (int d = 0; d < D; d++) y[d] += h * m->down[d * m->F + f];
    }
}

void oracle_mlp_row_backward(const oracle_mlp *m, int D, const double *x, double scale,
                             const double *dy, double *dx, double *dscale) {
    *dscale = 0;
    for (int f = 0; f < m->F; f++) {
        const double g = dot(m->gate + f * D, x, D), u = dot(m->up + f * D, x, D);
        const double sg = sigmoid(g), h = g * sg * u;
        double dh = 0; // of scale * h
        for (int d = 0; d < D; d++) {
            dh += dy[d] * m->down[d * m->F + f];
            m->ddown[d * m->F + f] += dy[d] * scale * h;
        }
        *dscale += dh * h;
        const double du = dh * scale * g * sg;
        const double dg = dh * scale * u * (sg + g * sg * (1 - sg));
        for (int d = 0; d < D; d++) {
            m->dgate[f * D + d] += dg * x[d];
            m->dup[f * D + d] += du * x[d];
            dx[d] += dg * m->gate[f * D + d] + du * m->up[f * D + d];
        }
    }
}

void oracle_experts_forward(int T, int D, int K, const oracle_mlp *experts, const double *x,
                            const int *ids, const double *weights, double *y) {
    for (int i = 0; i < T * K; i++) {
        if (ids[i] < 0) continue;
        oracle_mlp_row(&experts[ids[i]], D, x + i / K * D, weights[i], y + i / K * D);
    }
}

void oracle_experts_backward(int T, int D, int K, const oracle_mlp *experts, const double *x,
                             const int *ids, const double *weights, const double *dy, double *dx,
                             double *dweights) {
    for (int i = 0; i < T * K; i++) {
        const int row = i / K * D;
        dweights[i] = 0;
        if (ids[i] < 0) continue;
        oracle_mlp_row_backward(&experts[ids[i]], D, x + row, weights[i], dy + row, dx + row,
                                &dweights[i]);
    }
}

/* ---- router ---- */

void oracle_routing_open(oracle_routing *s, const oracle_router *r, int T) {
    double **by_expert[] = {&s->logits, &s->score, &s->dlogits, &s->dscore};
    for (int i = 0; i < 4; i++) *by_expert[i] = zeros(T * r->E, sizeof(double));
    s->weights = zeros(T * r->K, sizeof(double));
    s->dweights = zeros(T * r->K, sizeof(double));
    s->ids = zeros(T * r->K, sizeof(int));
}

void oracle_routing_close(oracle_routing *s) {
    free(s->logits), free(s->score), free(s->dlogits), free(s->dscore);
    free(s->weights), free(s->dweights), free(s->ids);
    *s = (oracle_routing){0};
}

// The index of the k-th largest of x (k from 0); equal values in the order of their indices.
static int kth_largest(const double *x, int n, int k) {
    for (int i = 0; i < n; i++) {
        int before = 0;
        for (int j = 0; j < n; j++) before += x[j] > x[i] || (x[j] == x[i] && j < i);
        if (before == k) return i;
    }
    die("a score is not a number", "router");
    return -1;
}

// Puts -inf on the experts of all groups but the topk_group best.
static void limit_groups(const oracle_router *r, double *choice) {
    const int size = r->E / r->n_group;
    double *sums = zeros(r->n_group, sizeof *sums);
    for (int g = 0; g < r->n_group; g++) {
        const double *x = choice + g * size;
        for (int k = 0; k < r->group_best && k < size; k++) sums[g] += x[kth_largest(x, size, k)];
    }
    for (int k = r->topk_group; k < r->n_group; k++) {
        const int out = kth_largest(sums, r->n_group, k);
        for (int e = 0; e < size; e++) choice[out * size + e] = -INFINITY;
    }
    free(sums);
}

void oracle_route_forward(const oracle_router *r, int T, const double *bias, const int *segments,
                          const int *given, oracle_routing *s) {
    double *choice = zeros(r->E, sizeof *choice);
    for (int t = 0; t < T; t++) {
        const double *logits = s->logits + t * r->E;
        double *score = s->score + t * r->E, *weights = s->weights + t * r->K, sum = 1e-20;
        int *ids = s->ids + t * r->K;
        if (r->softmax) softmax(logits, r->E, score);
        for (int e = 0; e < r->E; e++) {
            if (!r->softmax) score[e] = sigmoid(logits[e]);
            choice[e] = score[e] + (bias ? bias[e] : 0);
        }
        if (r->n_group > 1 && !given) limit_groups(r, choice);
        for (int k = 0; k < r->K; k++) {
            ids[k] = given ? given[t * r->K + k] : kth_largest(choice, r->E, k);
            if (segments && segments[t] == 0) ids[k] = -1;
            weights[k] = ids[k] < 0 ? 0 : score[ids[k]];
            sum += weights[k];
        }
        for (int k = 0; k < r->K; k++) weights[k] *= r->scale / (r->norm_topk ? sum : 1);
    }
    free(choice);
}

void oracle_route_backward(const oracle_router *r, int T, oracle_routing *s) {
    for (int t = 0; t < T; t++) {
        const double *score = s->score + t * r->E, *dw = s->dweights + t * r->K;
        double *dscore = s->dscore + t * r->E, *dlogits = s->dlogits + t * r->E;
        const int *ids = s->ids + t * r->K;
        double sum = 1e-20, along = 0;
        for (int k = 0; k < r->K; k++) {
            if (ids[k] < 0) continue;
            sum += score[ids[k]];
            along += dw[k] * score[ids[k]];
        }
        for (int k = 0; k < r->K; k++) {
            if (ids[k] < 0) continue;
            // Without norm w = scale * score; with it w = scale * score / sum.
            dscore[ids[k]] += r->scale * (r->norm_topk ? dw[k] / sum - along / (sum * sum) : dw[k]);
        }
        const double mean = dot(dscore, score, r->E);
        for (int e = 0; e < r->E; e++) {
            dlogits[e] += score[e] * (r->softmax ? dscore[e] - mean : dscore[e] * (1 - score[e]));
        }
    }
}

/* ---- one MoE layer ---- */

void oracle_moe_layer_forward(const oracle_moe *m, int T, const double *x, const int *segments,
                              const int *given, oracle_routing *s, double *y) {
    const int D = m->D, E = m->router.E;
    oracle_gemm(false, true, T, E, D, x, m->w_router, s->logits);
    oracle_route_forward(&m->router, T, m->bias, segments, given, s);
    memset(y, 0, (size_t)(T * D) * sizeof *y);
    oracle_experts_forward(T, D, m->router.K, m->experts, x, s->ids, s->weights, y);
    for (int t = 0; t < T && m->shared.F; t++) {
        oracle_mlp_row(&m->shared, D, x + t * D, 1, y + t * D);
    }
}

void oracle_moe_layer_backward(const oracle_moe *m, int T, const double *x, oracle_routing *s,
                               const double *dy, double *dx) {
    const int D = m->D, E = m->router.E;
    memset(dx, 0, (size_t)(T * D) * sizeof *dx);
    oracle_experts_backward(T, D, m->router.K, m->experts, x, s->ids, s->weights, dy, dx,
                            s->dweights);
    for (int t = 0; t < T && m->shared.F; t++) {
        double unused;
        oracle_mlp_row_backward(&m->shared, D, x + t * D, 1, dy + t * D, dx + t * D, &unused);
    }
    oracle_route_backward(&m->router, T, s);
    oracle_gemm(true, false, E, D, T, s->dlogits, x, m->dw_router);
    oracle_gemm(false, false, T, D, E, s->dlogits, m->w_router, dx);
}

/* ---- losses ---- */

// P of one token's scores, and with dP not NULL its gradient added to dscore.
static void balance_share(bool megatron, int E, const double *score, double *p, const double *dp,
                          double *dscore) {
    double sum = 1e-20;
    for (int e = 0; e < E; e++) sum += score[e];
    if (!megatron) softmax(score, E, p);
    for (int e = 0; e < E && megatron; e++) p[e] = score[e] / sum;
    if (!dp) return;
    const double mean = dot(p, dp, E);
    for (int e = 0; e < E; e++) dscore[e] += (dp[e] - mean) * (megatron ? 1 / sum : p[e]);
}

// One group of n tokens: returns sum over e of f * P; factor times that has its gradient added.
static double balance_group(const oracle_config *c, double factor, int n, const int *segments,
                            const oracle_routing *s, int first) {
    const int E = c->router.E, K = c->router.K;
    double *f = zeros(E, sizeof *f), *P = zeros(E, sizeof *P), *p = zeros(E, sizeof *p), tokens = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (int t = first; t < first + n; t++) {
            const double *score = s->score + t * E;
            if (segments && segments[t] == 0) continue;
            if (pass == 1) { // f is now the gradient of P of each token
                balance_share(c->balance_megatron, E, score, p, f, s->dscore + t * E);
                continue;
            }
            tokens++;
            balance_share(c->balance_megatron, E, score, p, NULL, NULL);
            add(P, p, E);
            for (int k = 0; k < K; k++) {
                const int id = c->balance_megatron ? kth_largest(score, E, k) : s->ids[t * K + k];
                if (id >= 0) f[id] += 1;
            }
        }
        for (int e = 0; e < E && pass == 0; e++) f[e] *= factor / (tokens * tokens * K);
    }
    const double loss = tokens > 0 ? dot(f, P, E) : 0;
    free(f), free(P), free(p);
    return loss;
}

double oracle_balance_loss(const oracle_config *c, int n_layers, int B, int S, const int *segments,
                           oracle_routing *s) {
    const int n_groups = c->balance_batch ? 1 : B, size = c->balance_batch ? B * S : S;
    int live = 0;
    for (int g = 0; g < n_groups; g++) {
        bool any = !segments;
        for (int t = 0; t < size && !any; t++) any = segments[g * size + t] != 0;
        live += any;
    }
    // weight * E^2 * mean over (group, expert), mean over layers (Megatron: sum).
    const double layers = c->balance_megatron ? 1 : n_layers;
    const double factor = live ? c->balance_weight * c->router.E / (live * layers) : 0;
    double loss = 0;
    for (int g = 0; g < n_groups; g++) {
        loss += balance_group(c, factor, size, segments, s, g * size);
    }
    return loss;
}

double oracle_router_z_loss(const oracle_config *c, int n_layers, int T, const int *segments,
                            oracle_routing *s) {
    const int E = c->router.E;
    double *p = zeros(E, sizeof *p), loss = 0;
    int tokens = 0;
    for (int t = 0; t < T; t++) tokens += !segments || segments[t] != 0;
    for (int t = 0; t < T; t++) {
        if (segments && segments[t] == 0) continue;
        const double factor = c->router_z_weight / tokens / n_layers;
        const double lse = softmax(s->logits + t * E, E, p);
        loss += factor * lse * lse;
        for (int e = 0; e < E; e++) s->dlogits[t * E + e] += factor * 2 * lse * p[e];
    }
    free(p);
    return loss;
}

double oracle_cross_entropy(int T, int V, double z, const double *logits, const int *targets,
                            double *row_loss, double *dlogits, int *count) {
    double sum = 0;
    *count = 0;
    memset(dlogits, 0, (size_t)(T * V) * sizeof *dlogits);
    for (int t = 0; t < T; t++) {
        row_loss[t] = 0;
        if (targets[t] < 0) continue;
        double *d = dlogits + t * V;
        const double lse = softmax(logits + t * V, V, d);
        row_loss[t] = lse - logits[t * V + targets[t]] + z * lse * lse;
        for (int i = 0; i < V; i++) d[i] *= 1 + 2 * z * lse;
        d[targets[t]] -= 1;
        sum += row_loss[t];
        (*count)++;
    }
    return sum;
}

/* ---- a pass through the model: its memory, its outputs, its parameters by name ---- */

typedef struct run {
    const oracle_config *cfg;
    oracle_set *params, *out;
    double **blocks;
    int n_blocks, capacity;
} run;

static double *buffer(run *r, int n) {
    if (r->n_blocks == r->capacity) {
        r->capacity = 2 * r->capacity + 64;
        r->blocks = realloc(r->blocks, (size_t)r->capacity * sizeof *r->blocks);
        if (!r->blocks) die("out of memory", "");
    }
    return r->blocks[r->n_blocks++] = zeros(n, sizeof(double));
}

// Copies an output. Shape: 0 ends it. layer < 0: the name is `what`, else "what.layer.tail".
static void record(run *r, const char *what, int layer, const char *tail, int n0, int n1, int n2,
                   const double *value) {
    if (!r->out) return;
    char name[80];
    snprintf(name, sizeof name, layer < 0 ? "%s" : "%s.%d%s", what, layer, tail);
    const int shape[3] = {n0, n1, n2};
    oracle_add(r->out, false, name, n2 ? 3 : n1 ? 2 : 1, shape, value);
}

// y (T, n_out) = x W^T + b; the bias where the model has one.
static double *linear(run *r, const char *layer, const char *name, int T, int n_in,
                      const double *x) {
    const oracle_tensor *w = oracle_get(r->params, "%s%s.weight", layer, name);
    char bias[200];
    snprintf(bias, sizeof bias, "%s%s.bias", layer, name);
    const oracle_tensor *b = oracle_find(r->params, bias);
    const int n_out = w->shape[0];
    if (w->n != n_out * n_in || (b && b->n != n_out)) die("wrong shape", w->name);
    double *y = buffer(r, T * n_out);
    oracle_gemm(false, true, T, n_out, n_in, x, w->value, y);
    for (int t = 0; t < T && b; t++) add(y + t * n_out, b->value, n_out);
    return y;
}

// Returns dx; the gradients of weight and bias are +=.
static double *linear_backward(run *r, const char *layer, const char *name, int T, int n_in,
                               const double *x, const double *dy) {
    const oracle_tensor *w = oracle_get(r->params, "%s%s.weight", layer, name);
    char bias[200];
    snprintf(bias, sizeof bias, "%s%s.bias", layer, name);
    const oracle_tensor *b = oracle_find(r->params, bias);
    double *dx = buffer(r, T * n_in);
    oracle_gemm(true, false, w->shape[0], n_in, T, dy, x, w->grad);
    oracle_gemm(false, false, T, n_in, w->shape[0], dy, w->value, dx);
    for (int t = 0; t < T && b; t++) add(b->grad, dy + t * b->n, b->n);
    return dx;
}

static double *norm(run *r, const char *layer, const char *name, int T, int D, double eps,
                    const double *x) {
    const oracle_tensor *w = oracle_get(r->params, "%s%s.weight", layer, name);
    if (w->n != D) die("wrong shape", w->name);
    double *y = buffer(r, T * D);
    oracle_rmsnorm_forward(T, D, eps, x, w->value, y);
    return y;
}

static double *norm_backward(run *r, const char *layer, const char *name, int T, int D, double eps,
                             const double *x, const double *dy) {
    const oracle_tensor *w = oracle_get(r->params, "%s%s.weight", layer, name);
    double *dx = buffer(r, T * D);
    oracle_rmsnorm_backward(T, D, eps, x, w->value, dy, dx, w->grad);
    return dx;
}

static oracle_mlp mlp_get(run *r, const char *layer, const char *name, int F) {
    const oracle_tensor *g = oracle_get(r->params, "%s%s.gate_proj.weight", layer, name);
    const oracle_tensor *u = oracle_get(r->params, "%s%s.up_proj.weight", layer, name);
    const oracle_tensor *d = oracle_get(r->params, "%s%s.down_proj.weight", layer, name);
    const int n = F * r->cfg->D;
    if (g->n != n || u->n != n || d->n != n || g->shape[0] != F) die("wrong shape", g->name);
    return (oracle_mlp){F, g->value, u->value, d->value, g->grad, u->grad, d->grad};
}

/* ---- one block ---- */

typedef struct rows { // the positions that a stack of blocks works on
    int B, S, T;
    int *segments, *position; // (B, S)
} rows;

typedef struct block { // one decoder layer and what its backward pass needs
    char name[40];     // "model.layers.3."
    int index;
    rows w;
    const double *x, *n1, *mid, *n2; // input; normed; after attention; normed
    double *qa, *qn, *q, *latent, *ln, *k, *v, *context;
    bool is_moe;
    oracle_mlp dense;
    oracle_moe moe;
    oracle_routing routing;
} block;

static oracle_attention attention_shape(const oracle_config *c, const rows *w) {
    return (oracle_attention){
        w->B, w->S, c->H, c->nope + c->rope, c->v_dim, oracle_softmax_scale(c), w->segments};
}

// Multi-head latent attention: (T, D) -> (T, D).
static double *mla_forward(run *r, block *b, const double *x) {
    const oracle_config *c = r->cfg;
    const int T = b->w.T, H = c->H, dk = c->nope + c->rope, dv = c->v_dim, kvl = c->kv_lora;
    char p[80];
    snprintf(p, sizeof p, "%sself_attn.", b->name);
    if (c->q_lora) {
        b->qa = linear(r, p, "q_a_proj", T, c->D, x);
        b->qn = norm(r, p, "q_a_layernorm", T, c->q_lora, c->latent_eps, b->qa);
        b->q = linear(r, p, "q_b_proj", T, c->q_lora, b->qn);
    } else {
        b->q = linear(r, p, "q_proj", T, c->D, x);
    }
    double *kva = linear(r, p, "kv_a_proj_with_mqa", T, c->D, x); // latent, then one rope key
    b->latent = buffer(r, T * kvl);
    for (int t = 0; t < T; t++) copy(b->latent + t * kvl, kva + t * (kvl + c->rope), kvl);
    b->ln = norm(r, p, "kv_a_layernorm", T, kvl, c->latent_eps, b->latent);
    const double *kvb = linear(r, p, "kv_b_proj", T, kvl, b->ln); // per head: key, then value
    oracle_rope(c, T, H, dk, b->w.position, 1, b->q + c->nope);
    oracle_rope(c, T, 1, kvl + c->rope, b->w.position, 1, kva + kvl);
    b->k = buffer(r, T * H * dk), b->v = buffer(r, T * H * dv);
    for (int i = 0; i < T * H; i++) {
        copy(b->k + i * dk, kvb + i * (c->nope + dv), c->nope);
        copy(b->k + i * dk + c->nope, kva + i / H * (kvl + c->rope) + kvl, c->rope);
        copy(b->v + i * dv, kvb + i * (c->nope + dv) + c->nope, dv);
    }
    b->context = buffer(r, T * H * dv);
    const oracle_attention a = attention_shape(c, &b->w);
    oracle_attention_forward(&a, b->q, b->k, b->v, b->context);
    return linear(r, p, "o_proj", T, H * dv, b->context);
}

static double *mla_backward(run *r, block *b, const double *x, const double *dy) {
    const oracle_config *c = r->cfg;
    const int T = b->w.T, H = c->H, dk = c->nope + c->rope, dv = c->v_dim, kvl = c->kv_lora;
    char p[80];
    snprintf(p, sizeof p, "%sself_attn.", b->name);
    const double *dcontext = linear_backward(r, p, "o_proj", T, H * dv, b->context, dy);
    double *dq = buffer(r, T * H * dk), *dkey = buffer(r, T * H * dk);
    double *dval = buffer(r, T * H * dv);
    const oracle_attention a = attention_shape(c, &b->w);
    oracle_attention_backward(&a, b->q, b->k, b->v, dcontext, dq, dkey, dval);
    double *dkva = buffer(r, T * (kvl + c->rope)), *dkvb = buffer(r, T * H * (c->nope + dv));
    for (int i = 0; i < T * H; i++) {
        copy(dkvb + i * (c->nope + dv), dkey + i * dk, c->nope);
        copy(dkvb + i * (c->nope + dv) + c->nope, dval + i * dv, dv);
        add(dkva + i / H * (kvl + c->rope) + kvl, dkey + i * dk + c->nope, c->rope);
    }
    oracle_rope(c, T, H, dk, b->w.position, -1, dq + c->nope);
    oracle_rope(c, T, 1, kvl + c->rope, b->w.position, -1, dkva + kvl);
    const double *dln = linear_backward(r, p, "kv_b_proj", T, kvl, b->ln, dkvb);
    const double *dlatent = norm_backward(r, p, "kv_a_layernorm", T, kvl, c->latent_eps, b->latent,
                                          dln);
    for (int t = 0; t < T; t++) copy(dkva + t * (kvl + c->rope), dlatent + t * kvl, kvl);
    double *dx = linear_backward(r, p, "kv_a_proj_with_mqa", T, c->D, x, dkva);
    if (c->q_lora) {
        const double *dqn = linear_backward(r, p, "q_b_proj", T, c->q_lora, b->qn, dq);
        const double *dqa = norm_backward(r, p, "q_a_layernorm", T, c->q_lora, c->latent_eps, b->qa,
                                          dqn);
        add(dx, linear_backward(r, p, "q_a_proj", T, c->D, x, dqa), T * c->D);
    } else {
        add(dx, linear_backward(r, p, "q_proj", T, c->D, x, dq), T * c->D);
    }
    return dx;
}

static void record_routing(run *r, const block *b) {
    const int T = b->w.T, E = r->cfg->router.E, K = r->cfg->router.K, i = b->index;
    double *ids = buffer(r, T * K), *counts = buffer(r, E), *next = buffer(r, E);
    for (int j = 0; j < T * K; j++) {
        ids[j] = b->routing.ids[j];
        if (b->routing.ids[j] >= 0) counts[b->routing.ids[j]] += 1;
    }
    record(r, "router", i, ".logits", T, E, 0, b->routing.logits);
    record(r, "router", i, ".ids", T, K, 0, ids);
    record(r, "router", i, ".weights", T, K, 0, b->routing.weights);
    record(r, "router", i, ".counts", E, 0, 0, counts);
    if (!b->moe.bias) return;
    copy(next, b->moe.bias, E);
    oracle_bias_update(E, r->cfg->bias_rate, counts, next);
    record(r, "router", i, ".bias_next", E, 0, 0, next);
}

static void moe_get(run *r, block *b) {
    const oracle_config *c = r->cfg;
    char name[120];
    snprintf(name, sizeof name, "%smlp.gate.e_score_correction_bias", b->name);
    const oracle_tensor *w = oracle_get(r->params, "%smlp.gate.weight", b->name);
    const oracle_tensor *bias = oracle_find(r->params, name);
    b->moe = (oracle_moe){c->router, c->D, w->value, bias ? bias->value : NULL, w->grad, NULL, {0}};
    b->moe.experts = zeros(c->router.E, sizeof *b->moe.experts);
    for (int e = 0; e < c->router.E; e++) {
        snprintf(name, sizeof name, "mlp.experts.%d", e);
        b->moe.experts[e] = mlp_get(r, b->name, name, c->F_moe);
    }
    if (c->n_shared) {
        b->moe.shared = mlp_get(r, b->name, "mlp.shared_experts", c->F_moe * c->n_shared);
    }
    oracle_routing_open(&b->routing, &c->router, b->w.T);
}

// x (T, D) -> the residual stream after the layer.
static double *block_forward(run *r, block *b, int index, const rows *w, const double *x) {
    const oracle_config *c = r->cfg;
    const int T = w->T, D = c->D;
    snprintf(b->name, sizeof b->name, "model.layers.%d.", index);
    b->index = index, b->w = *w, b->x = x, b->is_moe = index >= c->n_dense;
    b->n1 = norm(r, b->name, "input_layernorm", T, D, c->eps, x);
    double *mid = mla_forward(r, b, b->n1);
    record(r, "attn", index, "", w->B, w->S, D, mid);
    add(mid, x, T * D);
    b->mid = mid;
    b->n2 = norm(r, b->name, "post_attention_layernorm", T, D, c->eps, mid);
    double *y = buffer(r, T * D);
    if (b->is_moe) {
        moe_get(r, b);
        oracle_moe_layer_forward(&b->moe, T, b->n2, w->segments, NULL, &b->routing, y);
        record_routing(r, b);
    } else {
        b->dense = mlp_get(r, b->name, "mlp", c->F_dense);
        for (int t = 0; t < T; t++) oracle_mlp_row(&b->dense, D, b->n2 + t * D, 1, y + t * D);
    }
    record(r, "mlp", index, "", w->B, w->S, D, y);
    add(y, mid, T * D);
    record(r, "hidden", index, "", w->B, w->S, D, y);
    return y;
}

// dy: gradient of the layer's output; returns that of its input.
static double *block_backward(run *r, block *b, const double *dy) {
    const oracle_config *c = r->cfg;
    const int T = b->w.T, D = c->D;
    record(r, "dhidden", b->index, "", b->w.B, b->w.S, D, dy);
    double *dn2 = buffer(r, T * D), unused;
    if (b->is_moe) {
        oracle_moe_layer_backward(&b->moe, T, b->n2, &b->routing, dy, dn2);
        record(r, "router", b->index, ".dlogits", T, c->router.E, 0, b->routing.dlogits);
    } else {
        for (int t = 0; t < T; t++) {
            const int at = t * D;
            oracle_mlp_row_backward(&b->dense, D, b->n2 + at, 1, dy + at, dn2 + at, &unused);
        }
    }
    double *dmid = norm_backward(r, b->name, "post_attention_layernorm", T, D, c->eps, b->mid, dn2);
    add(dmid, dy, T * D);
    const double *dn1 = mla_backward(r, b, b->n1, dmid);
    double *dx = norm_backward(r, b->name, "input_layernorm", T, D, c->eps, b->x, dn1);
    add(dx, dmid, T * D);
    return dx;
}

/* ---- the model ---- */

typedef struct head { // what predicts: a stack's normed output and its loss
    double *hidden, *dlogits, sum;
    int count;
} head;

typedef struct depth { // one MTP module
    block b;
    rows w;
    head head;
    double *e, *h;     // embedding of token s+k, hidden of depth k-1
    double *cat, *out; // their norms side by side; output of the block
    int *ids;          // (B, S-k) token s+k
} depth;

// Rows of depth k (0: the main model). Positions count from the start of each document.
static rows rows_make(const oracle_batch *batch, int k) {
    const int B = batch->B, S = batch->S - k;
    rows w = {B, S, B * S, zeros(B * S, sizeof(int)), zeros(B * S, sizeof(int))};
    for (int i = 0; i < w.T; i++) {
        const int from = i / S * batch->S + i % S;
        const int *seg = batch->segments;
        w.segments[i] = !seg ? 1 : seg[from] == seg[from + k] ? seg[from] : 0;
        const bool goes_on = i % S > 0 && (!seg || seg[from] == seg[from - 1]);
        w.position[i] = goes_on ? w.position[i - 1] + 1 : 0;
    }
    return w;
}

static void rows_free(rows *w) {
    free(w->segments), free(w->position);
}

static const char *head_name(const run *r) {
    const bool tied = r->cfg->tied || !oracle_find(r->params, "lm_head.weight");
    return tied ? "model.embed_tokens" : "lm_head";
}

static double *embed(run *r, int T, const int *ids) {
    const int D = r->cfg->D;
    const oracle_tensor *w = oracle_get(r->params, "model.embed_tokens.weight");
    double *x = buffer(r, T * D);
    for (int t = 0; t < T; t++) {
        if (ids[t] < 0 || ids[t] >= r->cfg->V) die("token outside of the vocabulary", "embed");
        copy(x + t * D, w->value + ids[t] * D, D);
    }
    return x;
}

static void embed_backward(run *r, int T, const int *ids, const double *dx) {
    const int D = r->cfg->D;
    const oracle_tensor *w = oracle_get(r->params, "model.embed_tokens.weight");
    for (int t = 0; t < T; t++) add(w->grad + ids[t] * D, dx + t * D, D);
}

// Logits and loss of `hidden` at depth k.
static head head_forward(run *r, const oracle_batch *batch, int k, const rows *w, double *hidden) {
    const int V = r->cfg->V, D = r->cfg->D;
    head h = {hidden, buffer(r, w->T * V), 0, 0};
    double *row_loss = buffer(r, w->T);
    int *targets = zeros(w->T, sizeof *targets);
    for (int i = 0; i < w->T; i++) {
        // A row whose token s+k is in another document predicts nothing; nor does padding.
        targets[i] = w->segments[i] ? batch->targets[i / w->S * batch->S + i % w->S + k] : -1;
    }
    const double *logits = linear(r, "", head_name(r), w->T, D, hidden);
    const double z = k ? 0 : r->cfg->z_multiplier;
    h.sum = oracle_cross_entropy(w->T, V, z, logits, targets, row_loss, h.dlogits, &h.count);
    free(targets);
    char name[32];
    snprintf(name, sizeof name, k > 1 ? "mtp%d.logits" : k ? "mtp.logits" : "logits", k);
    record(r, name, -1, "", w->B, w->S, V, logits);
    if (k == 0) record(r, "token_loss", -1, "", w->B, w->S, 0, row_loss);
    return h;
}

static double *head_backward(run *r, const rows *w, const head *h, double factor) {
    for (int i = 0; i < w->T * r->cfg->V; i++) h->dlogits[i] *= factor;
    return linear_backward(r, "", head_name(r), w->T, r->cfg->D, h->hidden, h->dlogits);
}

// Depth k: from depth k-1's normed hidden state (rows of S-k+1) to its own.
static double *depth_forward(run *r, const oracle_batch *batch, depth *d, int k,
                             const double *prev) {
    const oracle_config *c = r->cfg;
    const int D = c->D, S = batch->S - k, T = batch->B * S;
    char p[40], name[32];
    snprintf(p, sizeof p, "model.layers.%d.", c->L + k - 1);
    d->w = rows_make(batch, k);
    d->ids = zeros(T, sizeof(int));
    d->h = buffer(r, T * D), d->cat = buffer(r, T * 2 * D);
    for (int i = 0; i < T; i++) {
        d->ids[i] = batch->ids[i / S * batch->S + i % S + k];
        copy(d->h + i * D, prev + (i / S * (S + 1) + i % S) * D, D);
    }
    d->e = embed(r, T, d->ids);
    const double *en = norm(r, p, "enorm", T, D, c->eps, d->e);
    const double *hn = norm(r, p, "hnorm", T, D, c->eps, d->h);
    for (int i = 0; i < T; i++) {
        copy(d->cat + i * 2 * D, en + i * D, D);
        copy(d->cat + i * 2 * D + D, hn + i * D, D);
    }
    const double *x = linear(r, p, "eh_proj", T, 2 * D, d->cat);
    d->out = block_forward(r, &d->b, c->L + k - 1, &d->w, x);
    double *hidden = norm(r, p, "shared_head.norm", T, D, c->eps, d->out);
    snprintf(name, sizeof name, k > 1 ? "mtp%d.hidden" : "mtp.hidden", k);
    record(r, name, -1, "", batch->B, S, D, hidden);
    d->head = head_forward(r, batch, k, &d->w, hidden);
    return hidden;
}

// dhidden (rows of depth k): what deeper modules ask for; dprev (rows of depth k-1) is +=.
static void depth_backward(run *r, depth *d, int k, double factor, const double *dhidden,
                           double *dprev) {
    const oracle_config *c = r->cfg;
    const int D = c->D, T = d->w.T, S = d->w.S;
    char p[40];
    snprintf(p, sizeof p, "model.layers.%d.", c->L + k - 1);
    double *dh = head_backward(r, &d->w, &d->head, factor);
    add(dh, dhidden, T * D);
    const double *dout = norm_backward(r, p, "shared_head.norm", T, D, c->eps, d->out, dh);
    const double *dx = block_backward(r, &d->b, dout);
    const double *dcat = linear_backward(r, p, "eh_proj", T, 2 * D, d->cat, dx);
    double *den = buffer(r, T * D), *dhn = buffer(r, T * D);
    for (int i = 0; i < T; i++) {
        copy(den + i * D, dcat + i * 2 * D, D);
        copy(dhn + i * D, dcat + i * 2 * D + D, D);
    }
    embed_backward(r, T, d->ids, norm_backward(r, p, "enorm", T, D, c->eps, d->e, den));
    const double *dfrom = norm_backward(r, p, "hnorm", T, D, c->eps, d->h, dhn);
    for (int i = 0; i < T; i++) add(dprev + (i / S * (S + 1) + i % S) * D, dfrom + i * D, D);
}

static void block_aux(run *r, block *b, int n_moe, double *balance, double *z) {
    if (!b->is_moe) return;
    const rows *w = &b->w;
    *balance += oracle_balance_loss(r->cfg, n_moe, w->B, w->S, w->segments, &b->routing);
    *z += oracle_router_z_loss(r->cfg, n_moe, w->T, w->segments, &b->routing);
}

typedef struct model { // everything that one pass keeps
    rows w;
    block *blocks;
    depth *depths;
    double *last; // before the final norm
    head main;
    int mtp_count;
} model;

static double model_forward(run *r, const oracle_batch *batch, model *m) {
    const oracle_config *c = r->cfg;
    const int n_moe = c->L - c->n_dense + c->mtp_layers;
    double *x = embed(r, m->w.T, batch->ids), mtp_sum = 0, balance = 0, z = 0;
    record(r, "hidden.embed", -1, "", m->w.B, m->w.S, c->D, x);
    for (int l = 0; l < c->L; l++) x = block_forward(r, &m->blocks[l], l, &m->w, x);
    m->last = x;
    x = norm(r, "", "model.norm", m->w.T, c->D, c->eps, x);
    record(r, "hidden.final", -1, "", m->w.B, m->w.S, c->D, x);
    m->main = head_forward(r, batch, 0, &m->w, x);
    for (int k = 1; k <= c->mtp_layers; k++) {
        depth *d = &m->depths[k - 1];
        x = depth_forward(r, batch, d, k, x);
        mtp_sum += d->head.sum;
        m->mtp_count += d->head.count;
        block_aux(r, &d->b, n_moe, &balance, &z);
    }
    for (int l = 0; l < c->L; l++) block_aux(r, &m->blocks[l], n_moe, &balance, &z);
    const double loss = m->main.count ? m->main.sum / m->main.count : 0;
    const double mtp = m->mtp_count ? mtp_sum / m->mtp_count : 0;
    const double total = loss + c->mtp_weight * mtp + balance + z;
    record(r, "loss", -1, "", 1, 0, 0, &loss);
    if (c->mtp_layers) record(r, "mtp.loss", -1, "", 1, 0, 0, &mtp);
    record(r, "aux.balance", -1, "", 1, 0, 0, &balance);
    record(r, "aux.router_z", -1, "", 1, 0, 0, &z);
    record(r, "total_loss", -1, "", 1, 0, 0, &total);
    return total;
}

static void model_backward(run *r, const oracle_batch *batch, model *m) {
    const oracle_config *c = r->cfg;
    const int T = m->w.T;
    const double factor = m->mtp_count ? c->mtp_weight / m->mtp_count : 0;
    double *dh = buffer(r, T * c->D); // of the deepest module's hidden state: nobody asks for it
    for (int k = c->mtp_layers; k > 0; k--) {
        double *dprev = buffer(r, T * c->D);
        depth_backward(r, &m->depths[k - 1], k, factor, dh, dprev);
        dh = dprev;
    }
    add(dh, head_backward(r, &m->w, &m->main, m->main.count ? 1.0 / m->main.count : 0), T * c->D);
    double *dx = norm_backward(r, "", "model.norm", T, c->D, c->eps, m->last, dh);
    for (int l = c->L - 1; l >= 0; l--) dx = block_backward(r, &m->blocks[l], dx);
    embed_backward(r, T, batch->ids, dx);
}

double oracle_run(const oracle_config *cfg, oracle_set *params, const oracle_batch *batch,
                  bool backward, oracle_set *out) {
    run r = {.cfg = cfg, .params = params, .out = out};
    model m = {.w = rows_make(batch, 0)};
    m.blocks = zeros(cfg->L, sizeof *m.blocks);
    m.depths = zeros(cfg->mtp_layers, sizeof *m.depths);
    const double total = model_forward(&r, batch, &m);
    if (backward) model_backward(&r, batch, &m);
    for (int l = 0; l < cfg->L + cfg->mtp_layers; l++) {
        block *b = l < cfg->L ? &m.blocks[l] : &m.depths[l - cfg->L].b;
        free(b->moe.experts);
        oracle_routing_close(&b->routing);
    }
    for (int k = 0; k < cfg->mtp_layers; k++) rows_free(&m.depths[k].w), free(m.depths[k].ids);
    for (int i = 0; i < r.n_blocks; i++) free(r.blocks[i]);
    rows_free(&m.w);
    free(r.blocks), free(m.blocks), free(m.depths);
    return total;
}

/* ---- optimizer ---- */

void oracle_adamw_step(const oracle_adamw *o, int n, oracle_set *params) {
    for (int j = 0; j < params->n; j++) {
        oracle_tensor *t = &params->at[j];
        if (!t->trainable) continue;
        if (!t->m) t->m = zeros(t->n, sizeof(double));
        if (!t->v) t->v = zeros(t->n, sizeof(double));
        for (int i = 0; i < t->n; i++) {
            const double g = t->grad[i];
            t->m[i] = o->beta1 * t->m[i] + (1 - o->beta1) * g;
            t->v[i] = o->beta2 * t->v[i] + (1 - o->beta2) * g * g;
            const double m = t->m[i] / (1 - pow(o->beta1, n)), v = t->v[i] / (1 - pow(o->beta2, n));
            t->value[i] -= o->lr * (m / (sqrt(v + o->eps_root) + o->eps) + o->decay * t->value[i]);
        }
    }
}

double oracle_clip(oracle_set *params, double c) {
    double sum = 0;
    for (int j = 0; j < params->n; j++) {
        const oracle_tensor *t = &params->at[j];
        if (t->trainable) sum += dot(t->grad, t->grad, t->n);
    }
    const double norm_before = sqrt(sum);
    if (c <= 0 || norm_before < c) return norm_before;
    for (int j = 0; j < params->n; j++) {
        for (int i = 0; i < params->at[j].n; i++) params->at[j].grad[i] *= c / norm_before;
    }
    return norm_before;
}

void oracle_bias_update(int E, double rate, const double *counts, double *bias) {
    double mean = 0;
    for (int e = 0; e < E; e++) mean += counts[e] / E;
    for (int e = 0; e < E; e++) {
        // Counts are integers: compare with the exact mean, whose sum above may be an ulp off.
        const double gap = mean - counts[e];
        if (fabs(gap) > 1e-9) bias[e] += gap > 0 ? rate : -rate;
    }
}
