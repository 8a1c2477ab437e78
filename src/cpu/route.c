/*
 * route.c - routing: choice of experts, their weights, the auxiliary losses, and the movement of
 * rows into expert order and back. Steps "router" and "permute" of the data path.
 *
 * Every choice is made in fp32 from one row alone, equal scores by lower id, so that recomputation,
 * other batches and other numbers of threads choose alike. Sums over rows go in fixed chunks.
 */
#include <math.h>

#include "cpu/row_io.h"

#define NORM_EPS   1e-20f // keeps a sum of underflowed scores from dividing by zero
#define ROUTE_ROWS 32     // rows of one task
#define AUX_ROWS   128    // rows whose sums are taken in one go: part of the result's bits
#define SLOT_CHUNK 16384  // slots of one sorting task

static bool routed(const int32_t *ids, size_t row, size_t top_k)
{
    return ids[row * top_k] >= 0;
}

/* ---- choice and weights ---------------------------------------------------------------------- */

typedef struct route_args {
    dpl_route_rule rule;
    dpl_ctx *ctx;
    const float *logits, *bias;
    const int32_t *segment;
    size_t n_rows;
    float *score;
    int32_t *ids;
    float *weights;
    int32_t *chunk_bad; // (chunks): the lowest bad row of each, or -1
    int32_t *bad_row;
} route_args;

// On the bits and without an early exit, so that it becomes vector code.
static bool all_finite(const float *x, size_t n)
{
    const uint32_t exponent = 0x7f800000u;
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bad |= (bits & exponent) == exponent;
    }
    return bad == 0;
}

static void softmax_row(const dpl_row_kernels *k, const float *x, float *y, size_t n)
{
    const float sum = k->exp_sub_sum(x, k->max(x, n), y, n);
    k->scale(1 / sum, y, n);
}

// Puts (value, id) into the n best so far, sorted; what came first stays first among equals.
static void insert_best(float value, int32_t id, float *best, int32_t *best_id, size_t n,
                        size_t n_max)
{
    size_t i = n < n_max ? n : n_max - 1;
    for (; i > 0 && value > best[i - 1]; i--) {
        best[i] = best[i - 1];
        best_id[i] = best_id[i - 1];
    }
    best[i] = value;
    best_id[i] = id;
}

// The `n_best` largest of x in falling order; of equals the lower index. Always distinct indexes.
static void find_best(const float *x, size_t n, size_t n_best, float *best, int32_t *best_id)
{
    for (size_t i = 0; i < n; i++)
        if (i < n_best || x[i] > best[n_best - 1])
            insert_best(x[i], (int32_t)i, best, best_id, DPL_MIN(i, n_best), n_best);
}

// Sets the choice of experts outside the best groups to -inf. `work` holds 2 * n_groups floats and
// n_groups ids.
static void drop_groups(const dpl_route_rule *rule, float *choice, float *work)
{
    const size_t size = rule->n_experts / rule->n_groups;
    float *group_score = work, *best = work + rule->n_groups;
    int32_t *best_id = (int32_t *)(best + rule->n_groups);
    for (size_t g = 0; g < rule->n_groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (size_t i = 0; i < size; i++) {
            const float c = choice[g * size + i];
            if (c > first) {
                second = first;
                first = c;
            } else if (c > second) {
                second = c;
            }
        }
        group_score[g] = rule->group_top2 && size > 1 ? first + second : first;
    }
    find_best(group_score, rule->n_groups, rule->top_groups, best, best_id);
    for (size_t i = 0; i < rule->top_groups; i++)
        group_score[best_id[i]] = NAN; // NaN marks the kept
    for (size_t g = 0; g < rule->n_groups; g++)
        if (!isnan(group_score[g]))
            for (size_t i = 0; i < size; i++)
                choice[g * size + i] = -INFINITY;
}

static void weigh(const dpl_route_rule *rule, const float *score, const int32_t *ids,
                  float *weights)
{
    float sum = 0;
    for (size_t k = 0; k < rule->top_k; k++)
        sum += score[ids[k]];
    for (size_t k = 0; k < rule->top_k; k++) {
        const float s = score[ids[k]];
        weights[k] = (rule->norm_topk ? s / (sum + NORM_EPS) : s) * rule->scale;
    }
}

// False: a logit or bias is not finite, and nothing but the score was written.
static bool route_row(const route_args *a, size_t row, float *choice)
{
    const dpl_route_rule *rule = &a->rule;
    const dpl_row_kernels *k = &a->ctx->kernels->rows;
    const size_t n = rule->n_experts;
    const float *logits = a->logits + row * n;
    float *score = a->score + row * n;
    memset(score, 0, n * sizeof *score);
    if (!all_finite(logits, n)) return false;
    if (rule->sigmoid)
        k->sigmoid(logits, score, n);
    else
        softmax_row(k, logits, score, n);
    memcpy(choice, score, n * sizeof *choice);
    if (a->bias) k->add(score, a->bias, choice, n);
    if (!all_finite(choice, n)) return false;
    float *work = choice + n;
    if (rule->n_groups > 1) drop_groups(rule, choice, work);
    int32_t *ids = a->ids + row * rule->top_k;
    find_best(choice, n, rule->top_k, work, ids);
    weigh(rule, score, ids, a->weights + row * rule->top_k);
    return true;
}

static void route_rows(void *arg, size_t first, size_t count, size_t i_chunk, int i_thread)
{
    const route_args *a = arg;
    const size_t n_k = a->rule.top_k, n = a->rule.n_experts;
    float *choice = dpl_ctx_scratch(a->ctx, i_thread);
    a->chunk_bad[i_chunk] = -1;
    for (size_t row = first; row < first + count; row++) {
        const bool padding = a->segment && a->segment[row] == 0;
        if (!padding && route_row(a, row, choice)) continue;
        if (padding) memset(a->score + row * n, 0, n * sizeof(float));
        for (size_t k = 0; k < n_k; k++) {
            a->ids[row * n_k + k] = padding ? -1 : (int32_t)k;
            a->weights[row * n_k + k] = 0;
        }
        if (!padding && a->chunk_bad[i_chunk] < 0) a->chunk_bad[i_chunk] = (int32_t)row;
    }
}

static void run_route_forward(dpl_ctx *ctx, const void *args)
{
    route_args a = *(const route_args *)args;
    a.ctx = ctx;
    dpl_ctx_rows(ctx, a.n_rows, ROUTE_ROWS, route_rows, &a);
    *a.bad_row = -1;
    for (size_t i = 0; i < dpl_div_up(a.n_rows, ROUTE_ROWS) && *a.bad_row < 0; i++)
        *a.bad_row = a.chunk_bad[i];
}

void dpl_route_forward(dpl_ctx *ctx, const dpl_route_rule *rule, const float *logits,
                       const float *bias, const int32_t *segment, size_t n_rows, float *score,
                       int32_t *ids, float *weights, int32_t *bad_row)
{
    const size_t mark = dpl_ctx_mark(ctx);
    int32_t *chunk_bad = dpl_ctx_alloc(ctx, dpl_div_up(n_rows, ROUTE_ROWS) * sizeof(int32_t));
    const route_args a = {*rule, ctx, logits,  bias,      segment, n_rows,
                          score, ids, weights, chunk_bad, bad_row};
    const size_t n = n_rows * rule->n_experts, n_slots = n_rows * rule->top_k;
    const dpl_span outputs[] = {{score, n * sizeof *score},
                                {ids, n_slots * sizeof *ids},
                                {weights, n_slots * sizeof *weights},
                                {bad_row, sizeof *bad_row}};
    dpl_ctx_submit(ctx, run_route_forward, &a, sizeof a, outputs, DPL_COUNT(outputs));
    dpl_ctx_release(ctx, mark);
}

typedef struct route_grad_args {
    dpl_route_rule rule;
    const float *dweights;
    const int32_t *ids;
    const float *score;
    size_t n_rows;
    float *dlogits;
} route_grad_args;

// dlogits of one routed row. Each weight is scale * s_k / sum (or scale * s_k), so with c = the
// weighted mean of dweights, ds_k = scale * (dw_k - c) / sum. Duplicate ids add up.
static void route_grad_row(const dpl_route_rule *rule, const float *dweights, const int32_t *ids,
                           const float *score, float *dlogits)
{
    float sum = 1, mean = 0;
    if (rule->norm_topk) {
        sum = NORM_EPS;
        for (size_t k = 0; k < rule->top_k; k++)
            sum += score[ids[k]];
        for (size_t k = 0; k < rule->top_k; k++)
            mean += score[ids[k]] / sum * dweights[k];
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
        for (size_t e = 0; e < rule->n_experts; e++)
            dlogits[e] -= score[e] * common;
}

static void route_grad_rows(void *arg, size_t first, size_t count, size_t i_chunk, int i_thread)
{
    (void)i_chunk;
    (void)i_thread;
    const route_grad_args *a = arg;
    const size_t n_k = a->rule.top_k, n = a->rule.n_experts;
    memset(a->dlogits + first * n, 0, count * n * sizeof(float));
    for (size_t row = first; row < first + count; row++)
        if (routed(a->ids, row, n_k))
            route_grad_row(&a->rule, a->dweights + row * n_k, a->ids + row * n_k,
                           a->score + row * n, a->dlogits + row * n);
}

static void run_route_backward(dpl_ctx *ctx, const void *args)
{
    route_grad_args a = *(const route_grad_args *)args;
    dpl_ctx_rows(ctx, a.n_rows, ROUTE_ROWS, route_grad_rows, &a);
}

void dpl_route_backward(dpl_ctx *ctx, const dpl_route_rule *rule, const float *dweights,
                        const int32_t *ids, const float *score, size_t n_rows, float *dlogits)
{
    const route_grad_args a = {*rule, dweights, ids, score, n_rows, dlogits};
    const dpl_span output = {dlogits, n_rows * rule->n_experts * sizeof *dlogits};
    dpl_ctx_submit(ctx, run_route_backward, &a, sizeof a, &output, 1);
}

/* ---- auxiliary losses ------------------------------------------------------------------------ */

typedef struct aux_args {
    dpl_route_rule rule;
    dpl_aux aux;
    dpl_ctx *ctx;
    const float *logits, *score;
    const int32_t *ids;
    size_t n_groups, group_rows, group_chunks; // a group: the rows whose f and P belong together
    // Sums of each chunk of rows; the first chunk of a group then receives the sums of the group.
    int64_t *n_tokens; // (chunks)
    double *z;         // (chunks)
    int64_t *f;        // (chunks, E): slots on each expert
    double *p;         // (chunks, E): probabilities
    double *values_out;
    float *dlogits;
    float z_grad; // dscale * d z-loss / d lse^2 of one token
} aux_args;

// The distribution that P averages; returns what score was divided by (Megatron), else 1.
static float aux_probability(const aux_args *a, const float *score, float *prob)
{
    const dpl_row_kernels *k = &a->ctx->kernels->rows;
    const size_t n = a->rule.n_experts;
    if (a->aux.kind != DPL_BALANCE_MEGATRON) {
        softmax_row(k, score, prob, n);
        return 1;
    }
    const float sum = k->sum(score, n) + NORM_EPS;
    for (size_t e = 0; e < n; e++)
        prob[e] = score[e] / sum;
    return sum;
}

static float logsumexp(const dpl_row_kernels *k, const float *x, float *work, size_t n)
{
    const float max = k->max(x, n);
    return max + logf(k->exp_sub_sum(x, max, work, n));
}

static void sum_row(const aux_args *a, size_t row, size_t chunk, float *work)
{
    const size_t n = a->rule.n_experts, n_k = a->rule.top_k;
    const float *score = a->score + row * n;
    a->n_tokens[chunk]++;
    if (a->aux.z_weight != 0) {
        const double lse = logsumexp(&a->ctx->kernels->rows, a->logits + row * n, work, n);
        a->z[chunk] += lse * lse;
    }
    if (a->aux.balance_weight == 0) return;
    aux_probability(a, score, work);
    double *p = a->p + chunk * n;
    for (size_t e = 0; e < n; e++)
        p[e] += work[e];
    const int32_t *ids = a->ids + row * n_k;
    if (a->aux.kind == DPL_BALANCE_MEGATRON) {
        int32_t *own = (int32_t *)(work + n_k);
        find_best(score, n, n_k, work, own);
        ids = own;
    }
    for (size_t k = 0; k < n_k; k++)
        a->f[chunk * n + (size_t)ids[k]]++;
}

static void sum_chunk(void *arg, size_t chunk, int i_thread)
{
    const aux_args *a = arg;
    const size_t n = a->rule.n_experts, group = chunk / a->group_chunks;
    const size_t first = chunk % a->group_chunks * AUX_ROWS;
    const size_t last = DPL_MIN(first + AUX_ROWS, a->group_rows);
    a->n_tokens[chunk] = 0;
    a->z[chunk] = 0;
    memset(a->f + chunk * n, 0, n * sizeof *a->f);
    memset(a->p + chunk * n, 0, n * sizeof *a->p);
    for (size_t i = first; i < last; i++) {
        const size_t row = group * a->group_rows + i;
        if (routed(a->ids, row, a->rule.top_k))
            sum_row(a, row, chunk, dpl_ctx_scratch(a->ctx, i_thread));
    }
}

// Adds the chunks of a group into its first one, in order.
static void sum_group(void *arg, size_t group, int i_thread)
{
    (void)i_thread;
    const aux_args *a = arg;
    const size_t n = a->rule.n_experts, to = group * a->group_chunks;
    for (size_t chunk = to + 1; chunk < to + a->group_chunks; chunk++) {
        a->n_tokens[to] += a->n_tokens[chunk];
        a->z[to] += a->z[chunk];
        for (size_t e = 0; e < n; e++) {
            a->f[to * n + e] += a->f[chunk * n + e];
            a->p[to * n + e] += a->p[chunk * n + e];
        }
    }
}

// Both losses from the sums of the groups. Leaves in p of each group dscale * d loss / d prob.
static void finish_values(aux_args *a)
{
    const size_t n = a->rule.n_experts;
    size_t n_filled = 0;
    int64_t n_tokens = 0;
    double z = 0, balance = 0;
    for (size_t g = 0; g < a->n_groups; g++) {
        n_tokens += a->n_tokens[g * a->group_chunks];
        z += a->z[g * a->group_chunks];
        n_filled += a->n_tokens[g * a->group_chunks] > 0;
    }
    for (size_t g = 0; g < a->n_groups; g++) {
        const size_t to = g * a->group_chunks;
        const double tokens = (double)a->n_tokens[to];
        if (tokens == 0) continue;
        // E^2 times the mean over groups and experts.
        const double factor = a->aux.balance_weight * (double)n / (double)n_filled;
        for (size_t e = 0; e < n; e++) {
            const double f = (double)a->f[to * n + e] / (tokens * (double)a->rule.top_k);
            balance += factor * f * a->p[to * n + e] / tokens;
            a->p[to * n + e] = a->aux.dscale * factor * f / tokens;
        }
    }
    const double z_factor = n_tokens > 0 ? a->aux.z_weight / (double)n_tokens : 0;
    a->z_grad = (float)(a->aux.dscale * z_factor);
    a->values_out[0] = balance;
    a->values_out[1] = z * z_factor;
}

// dlogits += the gradient of the balance loss: through P, then through the score. f has none.
static void balance_grad_row(const aux_args *a, size_t row, float *prob)
{
    const size_t n = a->rule.n_experts;
    const double *dprob = a->p + row / a->group_rows * a->group_chunks * n;
    const float *score = a->score + row * n;
    float *dlogits = a->dlogits + row * n, *dscore = prob + n;
    const float sum = aux_probability(a, score, prob);
    double mean = 0, common = 0;
    for (size_t e = 0; e < n; e++)
        mean += dprob[e] * prob[e];
    for (size_t e = 0; e < n; e++) {
        const double d = dprob[e] - mean;
        dscore[e] = (float)(a->aux.kind == DPL_BALANCE_MEGATRON ? d / sum : d * prob[e]);
        common += dscore[e] * score[e];
    }
    for (size_t e = 0; e < n; e++)
        dlogits[e] += score[e] *
                      (a->rule.sigmoid ? dscore[e] * (1 - score[e]) : dscore[e] - (float)common);
}

static void aux_grad_rows(void *arg, size_t first, size_t count, size_t i_chunk, int i_thread)
{
    (void)i_chunk;
    const aux_args *a = arg;
    const dpl_row_kernels *k = &a->ctx->kernels->rows;
    const size_t n = a->rule.n_experts;
    float *work = dpl_ctx_scratch(a->ctx, i_thread);
    for (size_t row = first; row < first + count; row++) {
        if (!routed(a->ids, row, a->rule.top_k)) continue;
        if (a->aux.balance_weight != 0) balance_grad_row(a, row, work);
        if (a->aux.z_weight == 0) continue;
        const float *x = a->logits + row * n, max = k->max(x, n),
                    sum = k->exp_sub_sum(x, max, work, n);
        k->axpy(2 * a->z_grad * (max + logf(sum)) / sum, work, a->dlogits + row * n, n);
    }
}

static void run_aux(dpl_ctx *ctx, const void *args)
{
    aux_args a = *(const aux_args *)args;
    dpl_pool_run(ctx->pool, a.n_groups * a.group_chunks, sum_chunk, &a);
    dpl_pool_run(ctx->pool, a.n_groups, sum_group, &a);
    finish_values(&a);
    if (a.dlogits) dpl_ctx_rows(ctx, a.n_groups * a.group_rows, ROUTE_ROWS, aux_grad_rows, &a);
}

void dpl_aux_losses(dpl_ctx *ctx, const dpl_route_rule *rule, const dpl_aux *aux,
                    const float *logits, const float *score, const int32_t *ids, double *values_out,
                    float *dlogits)
{
    const bool batch = aux->kind == DPL_BALANCE_BATCH;
    aux_args a = {.rule = *rule,
                  .aux = *aux,
                  .ctx = ctx,
                  .logits = logits,
                  .score = score,
                  .ids = ids,
                  .values_out = values_out,
                  .dlogits = dlogits};
    a.group_rows = batch ? aux->n_batch * aux->n_seq : aux->n_seq;
    a.n_groups = a.group_rows == 0 ? 0 : batch ? 1 : aux->n_batch;
    a.group_chunks = dpl_div_up(a.group_rows, AUX_ROWS);
    const size_t mark = dpl_ctx_mark(ctx), n_chunks = a.n_groups * a.group_chunks;
    a.n_tokens = dpl_ctx_alloc(ctx, n_chunks * sizeof *a.n_tokens);
    a.z = dpl_ctx_alloc(ctx, n_chunks * sizeof *a.z);
    a.f = dpl_ctx_alloc(ctx, n_chunks * rule->n_experts * sizeof *a.f);
    a.p = dpl_ctx_alloc(ctx, n_chunks * rule->n_experts * sizeof *a.p);
    const dpl_span output = {values_out, 2 * sizeof *values_out};
    dpl_ctx_submit(ctx, run_aux, &a, sizeof a, &output, 1);
    dpl_ctx_release(ctx, mark);
}

/* ---- movement of rows ------------------------------------------------------------------------ */

typedef struct permute_args {
    const int32_t *ids;
    size_t n_slots, n_experts, n_chunks;
    int64_t *next; // (chunks, E): first the number of slots, then where the next one goes
    int64_t *offsets;
    int32_t *slot_row, *row_slot;
} permute_args;

static void count_slots(void *arg, size_t chunk, int i_thread)
{
    (void)i_thread;
    const permute_args *a = arg;
    int64_t *count = a->next + chunk * a->n_experts;
    memset(count, 0, a->n_experts * sizeof *count);
    const size_t end = DPL_MIN((chunk + 1) * SLOT_CHUNK, a->n_slots);
    for (size_t slot = chunk * SLOT_CHUNK; slot < end; slot++)
        if (a->ids[slot] >= 0) count[a->ids[slot]]++;
}

static void place_slots(void *arg, size_t chunk, int i_thread)
{
    (void)i_thread;
    const permute_args *a = arg;
    int64_t *next = a->next + chunk * a->n_experts;
    const size_t end = DPL_MIN((chunk + 1) * SLOT_CHUNK, a->n_slots);
    for (size_t slot = chunk * SLOT_CHUNK; slot < end; slot++) {
        const int32_t id = a->ids[slot];
        const int64_t row = id < 0 ? -1 : next[id]++;
        a->slot_row[slot] = (int32_t)row;
        if (row >= 0) a->row_slot[row] = (int32_t)slot;
    }
}

static void run_permute(dpl_ctx *ctx, const void *args)
{
    permute_args a = *(const permute_args *)args;
    dpl_pool_run(ctx->pool, a.n_chunks, count_slots, &a);
    int64_t row = 0;
    for (size_t e = 0; e < a.n_experts; e++) {
        a.offsets[e] = row;
        for (size_t chunk = 0; chunk < a.n_chunks; chunk++) {
            int64_t *next = &a.next[chunk * a.n_experts + e];
            const int64_t count = *next;
            *next = row;
            row += count;
        }
    }
    a.offsets[a.n_experts] = row;
    dpl_pool_run(ctx->pool, a.n_chunks, place_slots, &a);
    // Rows that no slot fills: a reader that takes them all finds no slot there, never a stale one.
    for (size_t r = (size_t)row; r < a.n_slots; r++)
        a.row_slot[r] = -1;
}

void dpl_permute(dpl_ctx *ctx, const int32_t *ids, size_t n_slots, size_t n_experts,
                 int64_t *offsets, int32_t *slot_row, int32_t *row_slot)
{
    const size_t mark = dpl_ctx_mark(ctx), n_chunks = dpl_div_up(n_slots, SLOT_CHUNK);
    int64_t *next = dpl_ctx_alloc(ctx, n_chunks * n_experts * sizeof *next);
    const permute_args a = {ids, n_slots, n_experts, n_chunks, next, offsets, slot_row, row_slot};
    const dpl_span outputs[] = {{offsets, (n_experts + 1) * sizeof *offsets},
                                {slot_row, n_slots * sizeof *slot_row},
                                {row_slot, n_slots * sizeof *row_slot}};
    dpl_ctx_submit(ctx, run_permute, &a, sizeof a, outputs, DPL_COUNT(outputs));
    dpl_ctx_release(ctx, mark);
}

typedef struct gather_args {
    const dpl_row_kernels *k;
    dpl_mat x;
    const float *weights;
    const int32_t *row_slot;
    size_t top_k, n_rows, d;
    dpl_mat rows;
    float *row_weight;
} gather_args;

// Rows lie anywhere, so the hardware does not see the next one coming.
static void fetch_ahead(const void *row, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += 64)
        __builtin_prefetch((const uint8_t *)row + i, 0, 2);
}

static void copy_row(const dpl_row_kernels *k, dpl_mat from, size_t from_row, size_t d, dpl_mat to,
                     size_t to_row)
{
    const void *x = dpl_mat_row(from, from_row);
    void *y = dpl_mat_row(to, to_row);
    if (from.dtype == to.dtype)
        memcpy(y, x, d * dpl_dtype_bytes(to.dtype));
    else if (to.dtype == DPL_BF16)
        k->to_bf16(x, y, d);
    else
        k->from_bf16(x, y, d);
}

static void gather_chunk(void *arg, size_t first, size_t count, size_t i_chunk, int i_thread)
{
    (void)i_chunk;
    (void)i_thread;
    const gather_args *a = arg;
    for (size_t row = first; row < first + count; row++) {
        const int32_t slot = a->row_slot[row];
        const int32_t next = row + 1 < a->n_rows ? a->row_slot[row + 1] : -1;
        if (next >= 0)
            fetch_ahead(dpl_mat_row(a->x, (size_t)next / a->top_k),
                        a->d * dpl_dtype_bytes(a->x.dtype));
        if (slot < 0)
            memset(dpl_mat_row(a->rows, row), 0, a->d * dpl_dtype_bytes(a->rows.dtype));
        else
            copy_row(a->k, a->x, (size_t)slot / a->top_k, a->d, a->rows, row);
        if (a->weights) a->row_weight[row] = slot < 0 ? 0 : a->weights[slot];
    }
}

static void run_gather(dpl_ctx *ctx, const void *args)
{
    gather_args a = *(const gather_args *)args;
    dpl_ctx_rows(ctx, a.n_rows, dpl_row_grain(a.d * dpl_dtype_bytes(a.rows.dtype)), gather_chunk,
                 &a);
}

void dpl_gather_rows(dpl_ctx *ctx, dpl_mat x, const float *weights, const int32_t *row_slot,
                     size_t top_k, size_t n_rows, size_t d, dpl_mat rows, float *row_weight)
{
    const gather_args a = {&ctx->kernels->rows, x, weights, row_slot, top_k, n_rows, d, rows,
                           row_weight};
    const dpl_span outputs[] = {dpl_row_span(rows, n_rows, d),
                                {row_weight, weights ? n_rows * sizeof *row_weight : 0}};
    dpl_ctx_submit(ctx, run_gather, &a, sizeof a, outputs, DPL_COUNT(outputs));
}

typedef struct combine_args {
    const dpl_row_kernels *k;
    dpl_mat rows;
    const float *row_value;
    const int32_t *slot_row;
    size_t n_tokens, top_k, d;
    bool accumulate;
    dpl_mat y;
    float *slot_value;
} combine_args;

// n columns of one token; `sum` and `row` are buffers of n elements.
static void combine_block(const combine_args *a, dpl_mat rows, dpl_mat y, size_t token, size_t n,
                          float *sum, float *row)
{
    const int32_t *slot_row = a->slot_row + token * a->top_k;
    float *to = a->accumulate ? sum : dpl_row_target(y, token, sum);
    bool any = false;
    for (size_t i = 0; i < a->top_k; i++) {
        if (slot_row[i] < 0) continue;
        const float *x = dpl_row_load(a->k, rows, (size_t)slot_row[i], n, row);
        if (any)
            a->k->add(to, x, to, n);
        else
            memcpy(to, x, n * sizeof *to);
        any = true;
    }
    if (!any) memset(to, 0, n * sizeof *to);
    if (!a->accumulate) {
        dpl_row_store(a->k, y, token, to, n);
    } else if (any) {
        float *total = dpl_mat_row(y, token);
        a->k->add(total, sum, total, n);
    }
}

static void combine_chunk(void *arg, size_t first, size_t count, size_t i_chunk, int i_thread)
{
    (void)i_chunk;
    (void)i_thread;
    const combine_args *a = arg;
    float sum[DPL_ROW_BLOCK], row[DPL_ROW_BLOCK];
    for (size_t token = first; token < first + count; token++) {
        for (size_t j = 0; j < a->d; j += DPL_ROW_BLOCK)
            combine_block(a, dpl_mat_at(a->rows, 0, j), dpl_mat_at(a->y, 0, j), token,
                          DPL_MIN(DPL_ROW_BLOCK, a->d - j), sum, row);
        if (!a->row_value) continue;
        for (size_t slot = token * a->top_k; slot < (token + 1) * a->top_k; slot++)
            a->slot_value[slot] = a->slot_row[slot] < 0 ? 0 : a->row_value[a->slot_row[slot]];
    }
}

static void run_combine(dpl_ctx *ctx, const void *args)
{
    combine_args a = *(const combine_args *)args;
    const size_t row_bytes = a.d * a.top_k * dpl_dtype_bytes(a.rows.dtype);
    dpl_ctx_rows(ctx, a.n_tokens, dpl_row_grain(row_bytes), combine_chunk, &a);
}

void dpl_combine_rows(dpl_ctx *ctx, dpl_mat rows, const float *row_value, const int32_t *slot_row,
                      size_t n_tokens, size_t top_k, size_t d, bool accumulate, dpl_mat y,
                      float *slot_value)
{
    const combine_args a = {&ctx->kernels->rows, rows, row_value, slot_row, n_tokens, top_k, d,
                            accumulate,          y,    slot_value};
    const dpl_span y_span = dpl_row_span(y, n_tokens, d);
    const dpl_span outputs[] = {
        {y.p, accumulate ? 0 : y_span.bytes},
        {slot_value, row_value ? n_tokens * top_k * sizeof *slot_value : 0}};
    dpl_ctx_submit(ctx, run_combine, &a, sizeof a, outputs, DPL_COUNT(outputs));
}
