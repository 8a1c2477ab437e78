// route.c - routing: choice of experts, their weights, the auxiliary losses, and the order of rows
// by expert. Steps "router" and "permute" of the data path.
//
// Every choice is made in fp32 from one row alone, equal scores by lower id, so that recomputation,
// other batches and other numbers of threads choose alike. Sums over rows go in fixed chunks.
#include <math.h>

#include "cpu/row_io.h"

#define NORM_EPS   1e-20f // keeps a sum of underflowed scores from dividing by zero
#define ROUTE_ROWS 32     // rows of one task
#define AUX_ROWS   128    // rows whose sums are taken in one go: part of the result's bits
#define SLOT_CHUNK 16384  // slots of one sorting task

static bool routed(const int32_t *ids, size_t row, size_t top_k) {
    return ids[row * top_k] >= 0;
}

/* ---- choice and weights ---------------------------------------------------------------------- */
// Without an early exit, so that it becomes vector code.
static bool all_finite(const float *x, size_t n) {
    int good = 1;
    for (size_t i = 0; i < n; i++) good &= fabsf(x[i]) < INFINITY;
    return good;
}

// Writes the softmax of x to y, returns the logsumexp.
static float softmax_row(const dpl_row_kernels *k, const float *x, float *y, size_t n) {
    const float max = k->max(x, n), sum = k->exp_sub_sum(x, max, y, n);
    k->scale(1 / sum, y, n);
    return max + logf(sum);
}

// The `n_best` largest of x in falling order; of equals the lower index. Always distinct indexes.
static void find_best(const float *x, size_t n, size_t n_best, float *best, int32_t *best_id) {
    for (size_t i = 0; i < n; i++) {
        if (i >= n_best && !(x[i] > best[n_best - 1])) continue;
        size_t at = DPL_MIN(i, n_best - 1); // What came first stays first among equals.
        for (; at > 0 && x[i] > best[at - 1]; at--) {
            best[at] = best[at - 1];
            best_id[at] = best_id[at - 1];
        }
        best[at] = x[i];
        best_id[at] = (int32_t)i;
    }
}

// Sets the choice of experts outside the best groups to -inf. `score` holds 2 * n_groups floats and
// n_groups ids.
static void drop_groups(const dpl_route_rule *rule, float *choice, float *score) {
    const size_t size = rule->n_experts / rule->n_groups;
    float *best = score + rule->n_groups;
    int32_t *best_id = (int32_t *)(best + rule->n_groups);
    for (size_t g = 0; g < rule->n_groups; g++) {
        float top[2] = {0};
        int32_t top_id[2];
        find_best(choice + g * size, size, rule->group_top2 ? 2 : 1, top, top_id);
        score[g] = top[0] + top[1];
    }
    find_best(score, rule->n_groups, rule->top_groups, best, best_id);
    for (size_t i = 0; i < rule->top_groups; i++) score[best_id[i]] = NAN; // NaN marks the kept
    for (size_t g = 0; g < rule->n_groups; g++)
        for (size_t i = g * size; !isnan(score[g]) && i < (g + 1) * size; i++)
            choice[i] = -INFINITY;
}

typedef struct route_args {
    dpl_loop loop;
    dpl_route_rule rule;
    const float *logits, *bias;
    const int32_t *segment;
    float *score, *weights;
    int32_t *ids;
    int32_t *part_bad; // (parts): the lowest bad row of each, or -1
    int32_t *bad_row;
    const float *dweights; // backward
    float *dlogits;
} route_args;

// False: a logit or bias is not finite, and nothing but the score was written.
static bool route_row(const route_args *a, const dpl_row_kernels *k, size_t row, float *choice) {
    const dpl_route_rule *rule = &a->rule;
    const size_t n = rule->n_experts, n_k = rule->top_k;
    const float *logits = a->logits + row * n;
    float *score = a->score + row * n, *weights = a->weights + row * n_k, *work = choice + n;
    int32_t *ids = a->ids + row * n_k;
    memset(score, 0, n * sizeof *score);
    if (!all_finite(logits, n)) return false;
    if (rule->sigmoid) k->sigmoid(logits, score, n);
    else softmax_row(k, logits, score, n);
    memcpy(choice, score, n * sizeof *choice);
    if (a->bias) k->add(score, a->bias, choice, n);
    if (!all_finite(choice, n)) return false;
    if (rule->n_groups > 1) drop_groups(rule, choice, work);
    find_best(choice, n, n_k, work, ids);
    float sum = NORM_EPS;
    for (size_t i = 0; i < n_k; i++) sum += score[ids[i]];
    for (size_t i = 0; i < n_k; i++)
        weights[i] = score[ids[i]] / (rule->norm_topk ? sum : 1) * rule->scale;
    return true;
}

static void route_rows(const void *args, const dpl_part *part) {
    const route_args *a = args;
    const size_t n_k = a->rule.top_k, n = a->rule.n_experts;
    a->part_bad[part->i] = -1;
    for (size_t row = part->first; row < part->end; row++) {
        const bool padding = a->segment && a->segment[row] == 0;
        if (!padding && route_row(a, part->k, row, part->scratch)) continue;
        if (padding) memset(a->score + row * n, 0, n * sizeof(float));
        for (size_t k = 0; k < n_k; k++) {
            a->ids[row * n_k + k] = padding ? -1 : (int32_t)k;
            a->weights[row * n_k + k] = 0;
        }
        if (!padding && a->part_bad[part->i] < 0) a->part_bad[part->i] = (int32_t)row;
    }
}

static void run_route_forward(dpl_ctx *ctx, const void *args) {
    const route_args *a = args;
    dpl_run_loop(ctx, args);
    *a->bad_row = -1;
    for (size_t i = 0; i < dpl_div_up(a->loop.n_rows, ROUTE_ROWS) && *a->bad_row < 0; i++)
        *a->bad_row = a->part_bad[i];
}

void dpl_route_forward(dpl_ctx *ctx, const dpl_route_rule *rule, const float *logits,
                       const float *bias, const int32_t *segment, size_t n_rows, float *score,
                       int32_t *ids, float *weights, int32_t *bad_row) {
    const size_t mark = dpl_ctx_mark(ctx);
    int32_t *part_bad = dpl_ctx_alloc(ctx, dpl_div_up(n_rows, ROUTE_ROWS) * sizeof(int32_t));
    const dpl_loop loop = {route_rows, n_rows, ROUTE_ROWS};
    const route_args a = {loop,    *rule, logits,   bias,    segment, score,
                          weights, ids,   part_bad, bad_row, NULL,    NULL};
    DPL_SUBMIT(ctx, run_route_forward, a, {score, n_rows * rule->n_experts * sizeof *score},
               {ids, n_rows * rule->top_k * sizeof *ids},
               {weights, n_rows * rule->top_k * sizeof *weights}, {bad_row, sizeof *bad_row});
    dpl_ctx_release(ctx, mark);
}

// dlogits of one routed row. Each weight is scale * s_k / sum (or scale * s_k), so with c = the
// weighted mean of dweights, ds_k = scale * (dw_k - c) / sum. Duplicate ids add up.
static void route_grad_row(const route_args *a, size_t row, float *dlogits) {
    const dpl_route_rule *rule = &a->rule;
    const float *dweights = a->dweights + row * rule->top_k;
    const float *score = a->score + row * rule->n_experts;
    const int32_t *ids = a->ids + row * rule->top_k;
    float sum = 1, mean = 0;
    if (rule->norm_topk) {
        sum = NORM_EPS;
        for (size_t k = 0; k < rule->top_k; k++) sum += score[ids[k]];
        for (size_t k = 0; k < rule->top_k; k++) mean += score[ids[k]] / sum * dweights[k];
    }
    // Through softmax the unchosen experts have a gradient too: -s_e * sum_k s_k ds_k.
    float common = 0;
    for (size_t k = 0; k < rule->top_k; k++) {
        // s / sum first: both may be tiny, their quotient is not.
        const float s = score[ids[k]], g = s / sum * rule->scale * (dweights[k] - mean);
        dlogits[ids[k]] += rule->sigmoid ? (1 - s) * g : g;
        common += g;
    }
    if (!rule->sigmoid)
        for (size_t e = 0; e < rule->n_experts; e++) dlogits[e] -= score[e] * common;
}

static void route_grad_rows(const void *args, const dpl_part *part) {
    const route_args *a = args;
    for (size_t row = part->first; row < part->end; row++) {
        float *dlogits = a->dlogits + row * a->rule.n_experts;
        memset(dlogits, 0, a->rule.n_experts * sizeof *dlogits);
        if (routed(a->ids, row, a->rule.top_k)) route_grad_row(a, row, dlogits);
    }
}

void dpl_route_backward(dpl_ctx *ctx, const dpl_route_rule *rule, const float *dweights,
                        const int32_t *ids, const float *score, size_t n_rows, float *dlogits) {
    const route_args a = {.loop = {route_grad_rows, n_rows, ROUTE_ROWS},
                          .rule = *rule,
                          .score = (float *)(uintptr_t)score,
                          .ids = (int32_t *)(uintptr_t)ids,
                          .dweights = dweights,
                          .dlogits = dlogits};
    DPL_SUBMIT(ctx, dpl_run_loop, a, {dlogits, n_rows * rule->n_experts * sizeof *dlogits});
}

/* ---- auxiliary losses ------------------------------------------------------------------------ */
typedef struct aux_args {
    dpl_route_rule rule;
    dpl_aux aux;
    const float *logits, *score;
    const int32_t *ids;
    size_t n_groups, group_rows, group_chunks; // a group: the rows whose f and P belong together
    double *sums; // (chunks, WIDTH); the first chunk of a group then holds those of the group
    double *values_out;
    float *dlogits;
    const double *all; // sums that stand in for those of the rows
    float z_grad;      // dscale * d z-loss / d lse^2 of one token
} aux_args;

// Sums of a chunk of rows. f: slots on each expert; p: probabilities, later their gradients.
enum { TOKENS, Z, F };
#define P(n_experts)     (F + (n_experts))
#define WIDTH(n_experts) dpl_aux_n_sums(n_experts)

static double *group_sums(const aux_args *a, size_t group) {
    return a->sums + group * a->group_chunks * WIDTH(a->rule.n_experts);
}

// The distribution that P averages; returns what score was divided by (Megatron), else 1.
static float aux_probability(const aux_args *a, const dpl_row_kernels *k, const float *score,
                             float *prob) {
    const size_t n = a->rule.n_experts;
    if (a->aux.kind != DPL_BALANCE_MEGATRON) {
        softmax_row(k, score, prob, n);
        return 1;
    }
    const float sum = (float)k->sum_f64(score, false, n) + NORM_EPS;
    for (size_t e = 0; e < n; e++) prob[e] = score[e] / sum;
    return sum;
}

static void sum_row(const aux_args *a, const dpl_part *part, size_t row, double *sums) {
    const size_t n = a->rule.n_experts, n_k = a->rule.top_k;
    const float *score = a->score + row * n;
    float *work = part->scratch;
    sums[TOKENS]++;
    if (a->aux.z_weight != 0) {
        const double lse = softmax_row(part->k, a->logits + row * n, work, n);
        sums[Z] += lse * lse;
    }
    if (a->aux.balance_weight == 0) return;
    aux_probability(a, part->k, score, work);
    for (size_t e = 0; e < n; e++) sums[P(n) + e] += work[e];
    const int32_t *ids = a->ids + row * n_k;
    if (a->aux.kind == DPL_BALANCE_MEGATRON) {
        int32_t *own = (int32_t *)(work + n_k);
        find_best(score, n, n_k, work, own);
        ids = own;
    }
    for (size_t k = 0; k < n_k; k++) sums[F + ids[k]]++;
}

static void sum_chunk(const void *args, const dpl_part *part) {
    const aux_args *a = args;
    const size_t width = WIDTH(a->rule.n_experts), chunk = part->first;
    const size_t group = chunk / a->group_chunks, start = chunk % a->group_chunks * AUX_ROWS;
    double *sums = a->sums + chunk * width;
    memset(sums, 0, width * sizeof *sums);
    for (size_t i = start; i < DPL_MIN(start + AUX_ROWS, a->group_rows); i++)
        if (routed(a->ids, group * a->group_rows + i, a->rule.top_k))
            sum_row(a, part, group * a->group_rows + i, sums);
}

static void add_chunks(const aux_args *a) {
    const size_t width = WIDTH(a->rule.n_experts);
    for (size_t g = 0; g < a->n_groups; g++) {
        double *sums = group_sums(a, g);
        for (size_t i = width; i < a->group_chunks * width; i++) sums[i % width] += sums[i];
    }
}

// What `own` rows of a group contribute to the balance loss, in a mean over n_filled groups.
// dprob (E), which may be p of `own`: dscale * d loss / d prob; NULL: not wanted.
static double balance_part(const dpl_route_rule *rule, const dpl_aux *aux, const double *own,
                           const double *all, double n_filled, double *dprob) {
    const size_t n = rule->n_experts;
    const double tokens = all[TOKENS], *p = own + P(n);
    if (tokens == 0) return 0;
    // E^2 times the mean over groups and experts.
    const double factor = aux->balance_weight * (double)n / n_filled;
    double balance = 0;
    for (size_t e = 0; e < n; e++) {
        const double f = all[F + e] / (tokens * (double)rule->top_k);
        balance += factor * f * p[e] / tokens;
        if (dprob) dprob[e] = aux->dscale * factor * f / tokens;
    }
    return balance;
}

static double z_factor(const dpl_aux *aux, double n_tokens) {
    return n_tokens > 0 ? aux->z_weight / n_tokens : 0;
}

// Both losses from the sums. Leaves in p of each group dscale * d loss / d prob.
static void finish_values(aux_args *a, double *values_out) {
    double n_filled = 0, n_tokens = 0, z = 0, balance = 0;
    for (size_t g = 0; g < a->n_groups; g++) {
        const double *sums = group_sums(a, g);
        n_tokens += sums[TOKENS];
        z += sums[Z];
        n_filled += sums[TOKENS] > 0;
    }
    for (size_t g = 0; g < a->n_groups; g++) {
        double *sums = group_sums(a, g), *dprob = sums + P(a->rule.n_experts);
        balance += balance_part(&a->rule, &a->aux, sums, sums, n_filled, dprob);
    }
    a->z_grad = (float)(a->aux.dscale * z_factor(&a->aux, n_tokens));
    values_out[0] = balance;
    values_out[1] = z * z_factor(&a->aux, n_tokens);
}

void dpl_aux_part(const dpl_route_rule *rule, const dpl_aux *aux, const double *own,
                  const double *all, double values_out[2]) {
    values_out[0] = balance_part(rule, aux, own, all, 1, NULL);
    values_out[1] = own[Z] * z_factor(aux, all[TOKENS]);
}

// dlogits += the gradient of the balance loss: through P, then through the score. f has none.
static void balance_grad_row(const aux_args *a, const dpl_row_kernels *k, size_t row, float *prob) {
    const size_t n = a->rule.n_experts;
    const double *dprob = group_sums(a, row / a->group_rows) + P(n);
    const float *score = a->score + row * n;
    float *dlogits = a->dlogits + row * n, *dscore = prob + n;
    const float sum = aux_probability(a, k, score, prob);
    double mean = 0, common = 0;
    for (size_t e = 0; e < n; e++) mean += dprob[e] * prob[e];
    for (size_t e = 0; e < n; e++) {
        const double d = dprob[e] - mean;
        dscore[e] = (float)(a->aux.kind == DPL_BALANCE_MEGATRON ? d / sum : d * prob[e]);
        common += dscore[e] * score[e];
    }
    for (size_t e = 0; e < n; e++)
        dlogits[e] += score[e] *
                      (a->rule.sigmoid ? dscore[e] * (1 - score[e]) : dscore[e] - (float)common);
}

static void aux_grad_rows(const void *args, const dpl_part *part) {
    const aux_args *a = args;
    const size_t n = a->rule.n_experts;
    float *work = part->scratch;
    for (size_t row = part->first; row < part->end; row++) {
        if (!routed(a->ids, row, a->rule.top_k)) continue;
        if (a->aux.balance_weight != 0) balance_grad_row(a, part->k, row, work);
        if (a->aux.z_weight == 0) continue;
        const float lse = softmax_row(part->k, a->logits + row * n, work, n);
        part->k->axpy(2 * a->z_grad * lse, work, a->dlogits + row * n, n);
    }
}

static void sum_all_rows(dpl_ctx *ctx, const aux_args *a) {
    dpl_ctx_loop(ctx, (dpl_loop){sum_chunk, a->n_groups * a->group_chunks, 1}, a);
    add_chunks(a);
}

static void add_gradients(dpl_ctx *ctx, const aux_args *a) {
    dpl_ctx_loop(ctx, (dpl_loop){aux_grad_rows, a->n_groups * a->group_rows, ROUTE_ROWS}, a);
}

static void run_aux(dpl_ctx *ctx, const void *args) {
    aux_args a = *(const aux_args *)args;
    sum_all_rows(ctx, &a);
    finish_values(&a, a.values_out);
    if (a.dlogits) add_gradients(ctx, &a);
}

static void run_aux_sums(dpl_ctx *ctx, const void *args) {
    const aux_args *a = args;
    const size_t bytes = WIDTH(a->rule.n_experts) * sizeof *a->sums;
    sum_all_rows(ctx, a);
    if (a->n_groups > 0) memcpy(a->values_out, a->sums, bytes);
    else memset(a->values_out, 0, bytes);
}

static void run_aux_gradient(dpl_ctx *ctx, const void *args) {
    aux_args a = *(const aux_args *)args;
    double values[2];
    if (a.n_groups == 0) return;
    memcpy(a.sums, a.all, WIDTH(a.rule.n_experts) * sizeof *a.sums);
    finish_values(&a, values);
    add_gradients(ctx, &a);
}

// The caller releases the sums' memory when the operator is submitted.
static aux_args aux_of(dpl_ctx *ctx, const dpl_route_rule *rule, const dpl_aux *aux,
                       const float *logits, const float *score, const int32_t *ids) {
    const bool batch = aux->kind == DPL_BALANCE_BATCH;
    aux_args a = {.rule = *rule, .aux = *aux, .logits = logits, .score = score, .ids = ids};
    a.group_rows = batch ? aux->n_batch * aux->n_seq : aux->n_seq;
    a.n_groups = a.group_rows == 0 ? 0 : batch ? 1 : aux->n_batch;
    a.group_chunks = dpl_div_up(a.group_rows, AUX_ROWS);
    a.sums = dpl_ctx_alloc(ctx,
                           a.n_groups * a.group_chunks * WIDTH(rule->n_experts) * sizeof *a.sums);
    return a;
}

void dpl_aux_losses(dpl_ctx *ctx, const dpl_route_rule *rule, const dpl_aux *aux,
                    const float *logits, const float *score, const int32_t *ids, double *values_out,
                    float *dlogits) {
    const size_t mark = dpl_ctx_mark(ctx);
    aux_args a = aux_of(ctx, rule, aux, logits, score, ids);
    a.values_out = values_out;
    a.dlogits = dlogits;
    DPL_SUBMIT(ctx, run_aux, a, {values_out, 2 * sizeof *values_out});
    dpl_ctx_release(ctx, mark);
}

void dpl_aux_sums(dpl_ctx *ctx, const dpl_route_rule *rule, const dpl_aux *aux, const float *logits,
                  const float *score, const int32_t *ids, double *sums) {
    const size_t mark = dpl_ctx_mark(ctx);
    aux_args a = aux_of(ctx, rule, aux, logits, score, ids);
    a.values_out = sums;
    DPL_SUBMIT(ctx, run_aux_sums, a, {sums, WIDTH(rule->n_experts) * sizeof *sums});
    dpl_ctx_release(ctx, mark);
}

void dpl_aux_gradient(dpl_ctx *ctx, const dpl_route_rule *rule, const dpl_aux *aux,
                      const float *logits, const float *score, const int32_t *ids,
                      const double *all, float *dlogits) {
    const size_t mark = dpl_ctx_mark(ctx);
    aux_args a = aux_of(ctx, rule, aux, logits, score, ids);
    a.all = all;
    a.dlogits = dlogits;
    DPL_SUBMIT(ctx, run_aux_gradient, a, {0});
    dpl_ctx_release(ctx, mark);
}

/* ---- order of rows --------------------------------------------------------------------------- */
typedef struct permute_args {
    const int32_t *ids;
    size_t n_slots, n_experts;
    int64_t *next; // (parts, E): first the number of slots, then where the next one goes
    int64_t *offsets;
    int32_t *slot_row, *row_slot;
} permute_args;

static void count_slots(const void *args, const dpl_part *part) {
    const permute_args *a = args;
    int64_t *count = a->next + part->i * a->n_experts;
    memset(count, 0, a->n_experts * sizeof *count);
    for (size_t slot = part->first; slot < part->end; slot++)
        if (a->ids[slot] >= 0) count[a->ids[slot]]++;
}

static void place_slots(const void *args, const dpl_part *part) {
    const permute_args *a = args;
    int64_t *next = a->next + part->i * a->n_experts;
    for (size_t slot = part->first; slot < part->end; slot++) {
        const int32_t id = a->ids[slot];
        const int64_t row = id < 0 ? -1 : next[id]++;
        a->slot_row[slot] = (int32_t)row;
        if (row >= 0) a->row_slot[row] = (int32_t)slot;
    }
}

static void run_permute(dpl_ctx *ctx, const void *args) {
    const permute_args *a = args;
    dpl_ctx_loop(ctx, (dpl_loop){count_slots, a->n_slots, SLOT_CHUNK}, a);
    int64_t row = 0;
    for (size_t e = 0; e < a->n_experts; e++) {
        a->offsets[e] = row;
        for (size_t part = 0; part < dpl_div_up(a->n_slots, SLOT_CHUNK); part++) {
            int64_t *next = &a->next[part * a->n_experts + e];
            const int64_t count = *next;
            *next = row;
            row += count;
        }
    }
    a->offsets[a->n_experts] = row;
    dpl_ctx_loop(ctx, (dpl_loop){place_slots, a->n_slots, SLOT_CHUNK}, a);
    // Rows that no slot fills: a reader that takes them all finds no slot there, never a stale one.
    for (size_t r = (size_t)row; r < a->n_slots; r++) a->row_slot[r] = -1;
}

void dpl_permute(dpl_ctx *ctx, const int32_t *ids, size_t n_slots, size_t n_experts,
                 int64_t *offsets, int32_t *slot_row, int32_t *row_slot) {
    const size_t mark = dpl_ctx_mark(ctx);
    int64_t *next = dpl_ctx_alloc(ctx, dpl_div_up(n_slots, SLOT_CHUNK) * n_experts * sizeof *next);
    const permute_args a = {ids, n_slots, n_experts, next, offsets, slot_row, row_slot};
    DPL_SUBMIT(ctx, run_permute, a, {offsets, (n_experts + 1) * sizeof *offsets},
               {slot_row, n_slots * sizeof *slot_row}, {row_slot, n_slots * sizeof *row_slot});
    dpl_ctx_release(ctx, mark);
}
