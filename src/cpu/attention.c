// attention.c - causal attention within document segments, forward and backward, as MLA needs it.
//
// The S x S scores exist only as blocks of a few query tiles by KEY_BLOCK keys: forward keeps a
// running maximum and sum of each query (online softmax), backward recomputes the probabilities
// from the kept logsumexp. All products are tile products of the GEMM kernels on packed operands of
// one head. Blocks start at fixed keys and every row has its own chain: so do its bits.
#include <assert.h>
#include <math.h>

#include "cpu/row_io.h"

#define KEY_BLOCK   256 // keys of a block of scores: a multiple of DPL_PANEL
#define HIDDEN      16  // the seen part of a row of scores is filled up to a multiple of this
#define BLOCK_ROWS  64  // about as many queries share a block of keys while it is in cache
#define TASK_BLOCKS 8   // forward: query blocks that share one packing of the keys

// Packed operands and accumulators of one thread. Panels are 32 wide: [panel][row][32]; key panels
// for the scores are [panel of 32 keys][depth][32]. `k` panels: those of nope, then those of rope.
typedef struct attn_work {
    float *kt, *right, *acc, *q, *score, *left, *max, *sum;
    float *vt, *dk, *dv, *q_cols, *dout, *dout_cols, *dp; // backward only
} attn_work;

// The arguments of the operator; in a task: of one head of one sequence, where the matrices start.
typedef struct attn {
    dpl_attention a;
    dpl_mat out, dout, dq, dkv, dk_rope;
    bool backward;
    float *lse;
    float *rope_parts; // backward: (B*H, S, d_rope), each head's share of dk_rope
    const dpl_gemm_kernels *g;
    const dpl_row_kernels *r;
    size_t n_tiles, block_tiles, task_tiles;     // query tiles of a sequence, a block, a task
    size_t depth, nope_cols, ld_k, ld_v, ld_acc; // of panels: in columns
    float *work;                                 // n_threads times work_size
    size_t work_size;
    attn_work w;
} attn;
static_assert(sizeof(attn) <= DPL_OP_ARGS_MAX, "the queue holds a copy of the arguments");

// Lays the work space of a head out; returns its size in floats. `base` may be NULL.
static size_t lay_out(attn *h, float *base) {
    attn_work *w = &h->w;
    const size_t mr = h->g->mr, rows = DPL_MAX(BLOCK_ROWS, mr), d_v = h->a.d_v;
    const size_t s = dpl_round_up(h->a.n_seq, DPL_PANEL);
    const size_t s_back = h->backward ? s : 0, rows_back = h->backward ? rows : 0;
    const struct {
        float **p;
        size_t n;
    } blocks[] = {
        {&w->kt, s * h->depth},      // keys for scores, depth d_nope + d_rope
        {&w->right, s * h->ld_acc},  // what acc takes from, as panels of S rows: v; backward: k
        {&w->acc, rows * h->ld_acc}, // unnormalized output; backward: dq; (rows, ld_acc)
        {&w->q, rows * h->depth},    // query tiles, already scaled: [tile][depth][rows of the tile]
        {&w->score, rows * KEY_BLOCK},             // (rows, KEY_BLOCK)
        {&w->left, DPL_MAX(rows, KEY_BLOCK) * mr}, // packed left operand of the second products
        {&w->max, rows},                           // of each row; backward: its delta
        {&w->sum, rows},                           // forward only: of each row
        {&w->vt, s_back * d_v},                    // values for dP, depth d_v
        {&w->dk, s_back * h->ld_k},                // sums (S, ld_k)
        {&w->dv, s_back * h->ld_v},                // sums (S, ld_v)
        {&w->q_cols, rows_back * h->ld_k},         // the queries as panels
        {&w->dout, rows_back * d_v},
        {&w->dout_cols, rows_back * h->ld_v},
        {&w->dp, rows_back * KEY_BLOCK},
    };
    size_t used = 0;
    for (size_t i = 0; i < DPL_COUNT(blocks); i++) {
        *blocks[i].p = base ? base + used : NULL;
        used += dpl_round_up(blocks[i].n, DPL_ALIGN / sizeof(float));
    }
    return used;
}

static attn open_head(const attn *x, size_t i_head, const dpl_part *part) {
    attn h = *x;
    const size_t row0 = i_head / h.a.n_heads * h.a.n_seq, head = i_head % h.a.n_heads;
    const size_t query = head * h.depth, key = head * (h.a.d_nope + h.a.d_v);
    h.r = part->k;
    h.a.q = dpl_mat_at(x->a.q, row0, query);
    h.a.kv = dpl_mat_at(x->a.kv, row0, key);
    h.a.k_rope = dpl_mat_at(x->a.k_rope, row0, 0);
    h.out = dpl_mat_at(x->out, row0, head * h.a.d_v);
    if (h.backward) {
        h.dout = dpl_mat_at(x->dout, row0, head * h.a.d_v);
        h.dq = dpl_mat_at(x->dq, row0, query);
        h.dkv = dpl_mat_at(x->dkv, row0, key);
        h.rope_parts += i_head * h.a.n_seq * h.a.d_rope;
    }
    if (h.a.segment) h.a.segment += row0;
    h.lse += i_head * h.a.n_seq;
    lay_out(&h, x->work + (size_t)part->i_thread * x->work_size);
    return h;
}

// Tiles cut the sequence evenly, so that none is left with a row or two.
static size_t tile_row(const attn *h, size_t tile) {
    return tile * h->a.n_seq / h->n_tiles;
}

/* ---- packing --------------------------------------------------------------------------------- */
static dpl_gemm_load load_of(dpl_mat m) {
    return m.dtype == DPL_F32 ? DPL_LOAD_F32 : DPL_LOAD_BF16;
}

// Rows 0..n_rows of m as [row / 32][column][32], a column range of panels of `depth` columns.
static void pack_transposed(const attn *h, dpl_mat m, size_t n_rows, size_t n_columns, size_t depth,
                            float *to) {
    for (size_t row = 0; row < n_rows; row += DPL_PANEL)
        h->g->right_rows(load_of(m), DPL_MIN(DPL_PANEL, n_rows - row), n_columns,
                         dpl_mat_row(m, row), m.ld, DPL_PANEL, to + row * depth);
}

static bool is_padding(const attn *h, size_t row) {
    return h->a.segment && h->a.segment[row] == 0;
}

// Rows row0 .. row0+n_rows-1 of m as panels of 32 columns with `stride` rows each. Padding rows are
// 0: a probability of 0 times whatever they hold must be 0.
static void pack_panels(const attn *h, dpl_mat m, size_t row0, size_t n_rows, size_t n_columns,
                        size_t stride, float *to) {
    for (size_t col = 0; col < n_columns; col += DPL_PANEL, to += DPL_PANEL * stride) {
        h->g->right_cols(load_of(m), DPL_MIN(DPL_PANEL, n_columns - col), n_rows,
                         dpl_mat_at(m, row0, col).p, m.ld, DPL_PANEL, to);
        for (size_t row = 0; h->a.segment && row < n_rows; row++)
            if (is_padding(h, row0 + row)) memset(to + row * DPL_PANEL, 0, DPL_PANEL * sizeof *to);
    }
}

// All of the first n keys and values that a task needs; in backward n is S.
static void pack_keys(const attn *h, size_t n) {
    const attn_work *w = &h->w;
    const dpl_attention *a = &h->a;
    const dpl_mat v = dpl_mat_at(a->kv, 0, a->d_nope);
    pack_transposed(h, a->kv, n, a->d_nope, h->depth, w->kt);
    pack_transposed(h, a->k_rope, n, a->d_rope, h->depth, w->kt + a->d_nope * DPL_PANEL);
    if (!h->backward) {
        pack_panels(h, v, 0, n, a->d_v, a->n_seq, w->right);
        return;
    }
    pack_transposed(h, v, n, a->d_v, a->d_v, w->vt);
    pack_panels(h, a->kv, 0, n, a->d_nope, n, w->right);
    pack_panels(h, a->k_rope, 0, n, a->d_rope, n, w->right + n * h->nope_cols);
    memset(w->dk, 0, n * h->ld_k * sizeof(float));
    memset(w->dv, 0, n * h->ld_v * sizeof(float));
}

// Tiles first..last of rows of m, each [column][rows of the tile].
static void pack_tiles(const attn *h, dpl_mat m, size_t n_columns, size_t first, size_t last,
                       float *to) {
    for (size_t t = first; t < last; t++) {
        const size_t row = tile_row(h, t), n = tile_row(h, t + 1) - row;
        h->g->left_rows(load_of(m), n, n_columns, dpl_mat_row(m, row), m.ld, n, to);
        to += n * n_columns;
    }
}

/* ---- masks ----------------------------------------------------------------------------------- */
static void find_range(const int32_t *segment, size_t n, int32_t *low, int32_t *high) {
    *low = *high = segment[0];
    for (size_t i = 1; i < n; i++) {
        *low = DPL_MIN(*low, segment[i]);
        *high = DPL_MAX(*high, segment[i]);
    }
}

// False: no query of q0..q1 shares a segment with a key of k0..k1. Else *mixed_out says whether a
// pair may not.
static bool block_visible(const attn *h, size_t q0, size_t q1, size_t k0, size_t k1,
                          bool *mixed_out) {
    int32_t q_low, q_high, k_low, k_high;
    *mixed_out = false;
    if (!h->a.segment) return true;
    find_range(h->a.segment + q0, q1 - q0, &q_low, &q_high);
    find_range(h->a.segment + k0, k1 - k0, &k_low, &k_high);
    *mixed_out = q_low != q_high || k_low != k_high;
    return q_low <= k_high && k_low <= q_high && (q_low != 0 || q_high != 0);
}

// Of keys k0..k0+n, `row` sees a prefix, whose length is returned (0 if it sees none). Hides those
// of other segments in it, and what follows up to a whole number of vectors. dp may be NULL.
static size_t mask_row(const attn *h, size_t row, size_t k0, size_t n, bool mixed, float *score,
                       float *dp) {
    if (row < k0 || is_padding(h, row)) return 0;
    n = DPL_MIN(n, row + 1 - k0);
    for (size_t j = n; j < dpl_round_up(n, HIDDEN); j++) score[j] = -INFINITY;
    size_t seen = n;
    for (size_t j = 0; mixed && j < n; j++) {
        if (h->a.segment[k0 + j] == h->a.segment[row]) continue;
        score[j] = -INFINITY;
        if (dp) dp[j] = 0;
        seen--;
    }
    return seen > 0 ? n : 0;
}

/* ---- products -------------------------------------------------------------------------------- */
// One tile product. Operands are in L2 already: what it would fetch ahead is its own first line.
static void multiply(const attn *h, size_t m, size_t n, size_t kc, const float *left,
                     const float *right, float *c, size_t ldc, bool add) {
    (void)n;
    h->g->tile(m, kc, left, right, c, ldc, add, (dpl_gemm_ahead){right, 0, 1, 0, 0});
}

// score (m, n_keys) = one packed tile times keys k0.. ; whole panels of score are written.
static void multiply_keys(const attn *h, size_t m, size_t depth, const float *tile,
                          const float *keys, size_t k0, size_t n_keys, float *score) {
    for (size_t j = 0; j < n_keys; j += DPL_PANEL)
        multiply(h, m, DPL_PANEL, depth, tile, keys + (k0 + j) * depth, score + j, KEY_BLOCK,
                 false);
}

// c (m, ld) += packed left (kc, m) times panels of `stride` rows, from row `first` on.
static void multiply_panels(const attn *h, size_t m, size_t kc, const float *panels, size_t stride,
                            size_t first, float *c, size_t ld) {
    for (size_t j = 0; j < ld; j += DPL_PANEL)
        multiply(h, m, DPL_PANEL, kc, h->w.left, panels + j * stride + first * DPL_PANEL, c + j, ld,
                 true);
}

/* ---- scores of one tile ---------------------------------------------------------------------- */
// Scores to probabilities relative to the running maximum, which may rise and rescale what was
// summed so far.
static void soften_row(const attn *h, size_t i, size_t n, size_t n_keys, float *score) {
    const attn_work *w = &h->w;
    n = dpl_round_up(n, HIDDEN);
    if (n > 0) {
        const float max = h->r->max(score, n);
        if (max > w->max[i]) {
            if (w->sum[i] != 0) {
                const float shrink = expf(w->max[i] - max);
                w->sum[i] *= shrink;
                h->r->scale(shrink, w->acc + i * h->ld_v, h->ld_v);
            }
            w->max[i] = max;
        }
        w->sum[i] += h->r->exp_sub_sum(score, w->max[i], score, n);
    }
    if (n < n_keys) memset(score + n, 0, (n_keys - n) * sizeof *score);
}

// score becomes p = exp(score - lse), dp becomes dscore = p * (dp - delta); 0 where nothing is
// seen.
static void backward_row(const attn *h, size_t i, size_t row, size_t n, size_t n_keys, float *score,
                         float *dp) {
    const float delta = h->w.max[i];
    if (n > 0) h->r->exp_sub_sum(score, h->lse[row], score, dpl_round_up(n, HIDDEN));
    for (size_t j = 0; j < n; j++) dp[j] = score[j] * (dp[j] - delta);
    if (n == n_keys) return;
    memset(score + n, 0, (n_keys - n) * sizeof *score);
    memset(dp + n, 0, (n_keys - n) * sizeof *dp);
}

// A tile of m queries from row0 on, the rows from i0 on of its block, against n_keys keys from k0.
// Forward: acc += p v. Backward: leaves p and dscore, and acc += dscore k.
static void attend_tile(const attn *h, size_t row0, size_t m, size_t i0, size_t k0, size_t n_keys,
                        bool mixed) {
    const attn_work *w = &h->w;
    const size_t n = row0 + m <= k0 ? 0 : DPL_MIN(n_keys, row0 + m - k0);
    float *score = h->backward ? w->score + i0 * KEY_BLOCK : w->score; // else it stays in L1
    float *dp = h->backward ? w->dp + i0 * KEY_BLOCK : NULL;
    multiply_keys(h, m, h->depth, w->q + i0 * h->depth, w->kt, k0, n, score);
    if (dp) multiply_keys(h, m, h->a.d_v, w->dout + i0 * h->a.d_v, w->vt, k0, n, dp);
    for (size_t i = 0; i < m; i++) {
        float *s = score + i * KEY_BLOCK, *ds = dp ? dp + i * KEY_BLOCK : NULL;
        const size_t seen = mask_row(h, row0 + i, k0, n, mixed, s, ds);
        if (dp) backward_row(h, i0 + i, row0 + i, seen, n_keys, s, ds);
        else soften_row(h, i0 + i, seen, n, s);
    }
    if (n == 0) return;
    h->g->left_rows(DPL_LOAD_F32, m, n, dp ? dp : score, KEY_BLOCK, m, w->left);
    multiply_panels(h, m, n, w->right, h->a.n_seq, k0, w->acc + i0 * h->ld_acc, h->ld_acc);
}

// dk and dv of n_keys keys from k0 on += what the n queries from q0 on say.
static void backward_keys(const attn *h, size_t q0, size_t n, size_t k0, size_t n_keys) {
    const attn_work *w = &h->w;
    const size_t n_tiles = dpl_div_up(n_keys, h->g->mr);
    for (size_t t = 0; t < n_tiles; t++) {
        const size_t j = t * n_keys / n_tiles, m = (t + 1) * n_keys / n_tiles - j, key = k0 + j;
        const size_t first = key > q0 ? key - q0 : 0; // Earlier queries see none of these keys.
        const size_t at = first * KEY_BLOCK + j, n_seen = n - first;
        h->g->left_cols(DPL_LOAD_F32, m, n_seen, w->score + at, KEY_BLOCK, m, w->left);
        multiply_panels(h, m, n_seen, w->dout_cols, n, first, w->dv + key * h->ld_v, h->ld_v);
        h->g->left_cols(DPL_LOAD_F32, m, n_seen, w->dp + at, KEY_BLOCK, m, w->left);
        multiply_panels(h, m, n_seen, w->q_cols, n, first, w->dk + key * h->ld_k, h->ld_k);
    }
}

// Query tiles first..last against all keys that they see.
static void attend(const attn *h, size_t first, size_t last) {
    const size_t q0 = tile_row(h, first), q1 = tile_row(h, last);
    pack_tiles(h, h->a.q, h->depth, first, last, h->w.q);
    h->r->scale(h->a.scale, h->w.q, (q1 - q0) * h->depth);
    memset(h->w.acc, 0, (q1 - q0) * h->ld_acc * sizeof(float));
    for (size_t k0 = 0; k0 < q1; k0 += KEY_BLOCK) {
        const size_t n_keys = DPL_MIN(KEY_BLOCK, q1 - k0);
        bool mixed;
        if (!block_visible(h, q0, q1, k0, k0 + n_keys, &mixed)) continue;
        for (size_t tile = first; tile < last; tile++) {
            const size_t row0 = tile_row(h, tile), m = tile_row(h, tile + 1) - row0;
            attend_tile(h, row0, m, row0 - q0, k0, n_keys, mixed);
        }
        if (h->backward) backward_keys(h, q0, q1 - q0, k0, n_keys);
    }
}

/* ---- forward --------------------------------------------------------------------------------- */
static void forward_block(const attn *h, size_t first, size_t last) {
    const attn_work *w = &h->w;
    const size_t q0 = tile_row(h, first), n = tile_row(h, last) - q0;
    for (size_t i = 0; i < n; i++) {
        w->max[i] = -INFINITY;
        w->sum[i] = 0;
    }
    attend(h, first, last);
    for (size_t i = 0; i < n; i++) {
        float *acc = w->acc + i * h->ld_v;
        const bool padding = is_padding(h, q0 + i);
        if (!padding) h->r->scale(1 / w->sum[i], acc, h->a.d_v);
        dpl_row_store(h->r, h->out, q0 + i, 0, acc, h->a.d_v);
        h->lse[q0 + i] = padding ? 0 : w->max[i] + logf(w->sum[i]);
    }
}

/* ---- backward -------------------------------------------------------------------------------- */
// delta = the dot product of output and its gradient: what the softmax subtracts from dp.
static float find_delta(const attn *h, size_t row) {
    float out_row[DPL_ROW_BLOCK], dout_row[DPL_ROW_BLOCK], sum = 0;
    DPL_EACH_BLOCK(col, n, h->a.d_v) {
        const float *out = dpl_row_load(h->r, h->out, row, col, n, out_row);
        const float *dout = dpl_row_load(h->r, h->dout, row, col, n, dout_row);
        sum += h->r->dot(out, dout, n);
    }
    return sum;
}

static void backward_block(const attn *h, size_t first, size_t last) {
    const attn_work *w = &h->w;
    const size_t q0 = tile_row(h, first), n = tile_row(h, last) - q0;
    pack_tiles(h, h->dout, h->a.d_v, first, last, w->dout);
    pack_panels(h, h->a.q, q0, n, h->a.d_nope, n, w->q_cols);
    pack_panels(h, dpl_mat_at(h->a.q, 0, h->a.d_nope), q0, n, h->a.d_rope, n,
                w->q_cols + n * h->nope_cols);
    h->r->scale(h->a.scale, w->q_cols, n * h->ld_k);
    pack_panels(h, h->dout, q0, n, h->a.d_v, n, w->dout_cols);
    for (size_t i = 0; i < n; i++) w->max[i] = find_delta(h, q0 + i);
    attend(h, first, last);
    for (size_t i = 0; i < n; i++) {
        float *acc = w->acc + i * h->ld_k; // keys were not scaled, queries were
        h->r->scale(h->a.scale, acc, h->ld_k);
        dpl_row_store(h->r, h->dq, q0 + i, 0, acc, h->a.d_nope);
        dpl_row_store(h->r, h->dq, q0 + i, h->a.d_nope, acc + h->nope_cols, h->a.d_rope);
    }
}

// After all queries of a head.
static void store_key_grads(const attn *h) {
    const size_t d_nope = h->a.d_nope, d_rope = h->a.d_rope;
    for (size_t row = 0; row < h->a.n_seq; row++) {
        const float *dk = h->w.dk + row * h->ld_k, *dv = h->w.dv + row * h->ld_v;
        dpl_row_store(h->r, h->dkv, row, 0, dk, d_nope);
        dpl_row_store(h->r, h->dkv, row, d_nope, dv, h->a.d_v);
        memcpy(h->rope_parts + row * d_rope, dk + h->nope_cols, d_rope * sizeof *dk);
    }
}

static void sum_rope(const void *args, const dpl_part *part) {
    const attn *x = args;
    const size_t n_seq = x->a.n_seq, n_heads = x->a.n_heads, d = x->a.d_rope;
    for (size_t row = part->first; row < part->end; row++) {
        const float *share = x->rope_parts + (row / n_seq * n_heads * n_seq + row % n_seq) * d;
        float *sum = dpl_mat_row(x->dk_rope, row);
        memset(sum, 0, d * sizeof *sum);
        for (size_t head = 0; head < n_heads; head++, share += n_seq * d)
            part->k->add(sum, share, sum, d);
    }
}

/* ---- tasks ----------------------------------------------------------------------------------- */
// Some query tiles of one head: in backward all, as they add to the same keys.
static void run_task(const void *args, const dpl_part *part) {
    const attn *x = args;
    const size_t n_parts = dpl_div_up(x->n_tiles, x->task_tiles);
    const attn h = open_head(x, part->first / n_parts, part);
    const size_t first = part->first % n_parts * x->task_tiles;
    const size_t last = DPL_MIN(first + x->task_tiles, x->n_tiles);
    pack_keys(&h, tile_row(&h, last));
    for (size_t tile = first; tile < last; tile += x->block_tiles) {
        const size_t end = DPL_MIN(tile + x->block_tiles, last);
        if (h.backward) backward_block(&h, tile, end);
        else forward_block(&h, tile, end);
    }
    if (h.backward) store_key_grads(&h);
}

static void run(dpl_ctx *ctx, const void *args) {
    const attn *x = args;
    const size_t n_tasks = x->a.n_batch * x->a.n_heads * dpl_div_up(x->n_tiles, x->task_tiles);
    const size_t grain = dpl_row_grain((x->a.n_heads + 1) * x->a.d_rope * sizeof(float));
    dpl_ctx_loop(ctx, (dpl_loop){run_task, n_tasks, 1}, x);
    if (x->backward) dpl_ctx_loop(ctx, (dpl_loop){sum_rope, x->a.n_batch * x->a.n_seq, grain}, x);
}

static void submit(dpl_ctx *ctx, attn x, const dpl_span outputs[3]) {
    const size_t mark = dpl_ctx_mark(ctx), rope_rows = x.a.n_batch * x.a.n_heads * x.a.n_seq;
    x.backward = x.dq.p;
    x.g = &ctx->kernels->gemm[DPL_F32];
    x.n_tiles = dpl_div_up(x.a.n_seq, x.g->mr);
    x.block_tiles = DPL_MAX(1, BLOCK_ROWS / x.g->mr);
    x.task_tiles = x.backward ? DPL_MAX(1, x.n_tiles) : x.block_tiles * TASK_BLOCKS;
    x.depth = x.a.d_nope + x.a.d_rope;
    x.nope_cols = dpl_round_up(x.a.d_nope, DPL_PANEL);
    x.ld_k = x.nope_cols + dpl_round_up(x.a.d_rope, DPL_PANEL);
    x.ld_v = dpl_round_up(x.a.d_v, DPL_PANEL);
    x.ld_acc = x.backward ? x.ld_k : x.ld_v;
    x.work_size = lay_out(&x, NULL);
    x.work = dpl_ctx_alloc(ctx, (size_t)dpl_pool_threads(ctx->pool) * x.work_size * sizeof(float));
    if (x.backward) x.rope_parts = dpl_ctx_alloc(ctx, rope_rows * x.a.d_rope * sizeof(float));
    dpl_ctx_submit(ctx, run, &x, sizeof x, outputs, 3);
    dpl_ctx_release(ctx, mark);
}

void dpl_attention_forward(dpl_ctx *ctx, const dpl_attention *a, dpl_mat out, float *lse) {
    const size_t n_rows = a->n_batch * a->n_seq;
    const dpl_span outputs[3] = {dpl_row_span(out, n_rows, a->n_heads * a->d_v),
                                 {lse, n_rows * a->n_heads * sizeof *lse}};
    submit(ctx, (attn){.a = *a, .out = out, .lse = lse}, outputs);
}

void dpl_attention_backward(dpl_ctx *ctx, const dpl_attention *a, dpl_mat out, const float *lse,
                            dpl_mat dout, dpl_mat dq, dpl_mat dkv, dpl_mat dk_rope) {
    const size_t n_rows = a->n_batch * a->n_seq;
    const dpl_span outputs[3] = {dpl_row_span(dq, n_rows, a->n_heads * (a->d_nope + a->d_rope)),
                                 dpl_row_span(dkv, n_rows, a->n_heads * (a->d_nope + a->d_v)),
                                 dpl_row_span(dk_rope, n_rows, a->d_rope)};
    attn x = {.a = *a, .out = out, .dout = dout, .dq = dq, .dkv = dkv, .dk_rope = dk_rope};
    x.lse = (float *)(uintptr_t)lse;
    submit(ctx, x, outputs);
}
