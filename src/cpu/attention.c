// attention.c - causal attention within document segments, forward and backward, as MLA needs it.
//
// The S x S scores exist only as blocks. Products are tile products of the GEMM kernels, in the
// class of q's type. Forward holds scores with keys as rows and 32 queries as columns, backward
// with queries as rows and 32 keys as columns: so probabilities are the right operand of the
// product that follows, unpacked. Blocks start at fixed keys and every query has its own chain: so
// do its bits.
#include <assert.h>
#include <math.h>

#include "cpu/row_io.h"

#define KEY_BLOCK    256            // keys that are packed, and contracted, at a time
#define QUERY_BLOCK  128            // backward: queries that are packed and contracted at a time
#define TASK_QUERIES ((size_t)512)  // forward: of a task, which packs the keys it sees
#define TASK_KEYS    ((size_t)1024) // backward: of a task, which packs the queries that see them
#define TASKS        8              // backward: so many a thread until parts of dq are added up
#define LINE         64             // bytes that one fetch brings
#define MANY         8              // l of a step are many: a product has few steps
#define HIDDEN       INT32_MIN      // for 0: the segment of a query that sees nothing

// Rows that are packed or stored soon. Products fetch them on their way: a head's are short pieces
// far from each other, which the processor does not foresee.
typedef struct attn_fetch {
    size_t n, i, row; // of the list; what is fetched now, and its next row
    struct {
        dpl_mat m;            // from the start of a line on
        size_t n_rows, lines; // lines of a row
    } list[6];
} attn_fetch;

// Packed operands (uint8_t) and sums of one thread; see kernels.h for how tiles on the left and
// panels on the right lie.
typedef struct attn_work {
    uint8_t *rows; // rows that do not lie as they are packed
    float *score;
    uint8_t *p;         // probabilities on the right, of class BF16
    int32_t *segment;   // of queries
    uint8_t *q, *k, *v; // forward: queries right, keys left, values left and transposed
    float *acc, *max, *sum;
    // Backward: keys right, keys and values right and transposed, sums of their gradients
    uint8_t *k_cols, *k_rows, *v_rows;
    float *dk, *dv;            // [panel of 32 keys][depth][32]
    uint8_t *q_cols;           // queries and gradients left, and transposed
    uint8_t *dout, *dout_cols; // (q is the queries)
    uint8_t *dscore;           // gradients of scores on the right, of class BF16
    uint8_t *dscore_left;      // and on the left
    float *delta, *dp, *dq;
    attn_fetch fetch;
} attn_work;

// The arguments of the operator; in a task: of one head of one sequence, where the matrices start.
typedef struct attn {
    dpl_attention a;
    dpl_mat out, dout, dq, dkv, dk_rope;
    float *lse;
    float *rope_parts; // backward: (B*H, S, d_rope), each head's share of dk_rope
    float *dq_parts;   // backward of several tasks a head: (tasks, n_group, S, ld_q)
    float *kv_parts;   // backward of shared keys and values: (B*H, S, d_nope + d_v) of dkv
    const dpl_gemm_kernels *g, *f32; // of the operands' class; for what is fp32 always
    const dpl_row_kernels *r;
    size_t depth, ld_q;    // of a query: its size, and that as whole panels
    size_t head0, n_group; // backward: the heads whose parts of dq are there
    uint8_t *work;         // n_threads times work_bytes
    size_t work_bytes, n_threads;
    attn_work *w;
    size_t first, end;       // of the queries (forward) or keys of a task
    const struct attn *next; // what this thread is likely to do after it, or NULL
} attn;
static_assert(sizeof(attn) <= DPL_OP_ARGS_MAX, "the queue holds a copy of the arguments");

/* ---- packing --------------------------------------------------------------------------------- */
// Bytes of n rows and a contraction of l on the left, and of 32 columns and l on the right.
static size_t left_bytes(const attn *h, size_t n, size_t l) {
    return n * dpl_round_up(l, h->g->depth) * h->g->left_bytes;
}

static size_t right_bytes(const attn *h, size_t l) {
    return DPL_PANEL * dpl_round_up(l, 2) * h->g->right_bytes;
}

// The first part of `rest` rows that are cut evenly into parts of at most `most`, which is even:
// none is left with a row or two, and pairs of rows stay together.
static size_t part_of(size_t rest, size_t most) {
    if (rest == 0) return 0;
    return DPL_MIN(rest, dpl_round_up(dpl_div_up(rest, dpl_div_up(rest, most)), 2));
}
#define EACH_PART(at, m, n, most) for (size_t at = 0, m; (m = part_of((n)-at, most)) > 0; at += m)

static dpl_gemm_load load_of(dpl_mat m) {
    return m.dtype == DPL_F32 ? DPL_LOAD_F32 : DPL_LOAD_BF16;
}

// Rows of x as the rows of tiles.
static void left_rows(const attn *h, dpl_mat x, size_t n_rows, size_t n_cols, uint8_t *to) {
    EACH_PART(row, m, n_rows, h->g->mr) {
        h->g->left_rows(load_of(x), m, n_cols, dpl_mat_row(x, row), x.ld, m, to);
        to += left_bytes(h, m, n_cols);
    }
}

// Columns of x as the rows of tiles.
static void left_cols(const attn *h, dpl_mat x, size_t n_rows, size_t n_cols, uint8_t *to) {
    EACH_PART(col, m, n_cols, h->g->mr) {
        h->g->left_cols(load_of(x), m, n_rows, dpl_mat_at(x, 0, col).p, x.ld, m, to);
        to += left_bytes(h, m, n_rows);
    }
}

// Rows of x as the columns of panels.
static void right_rows(const attn *h, dpl_mat x, size_t n_rows, size_t n_cols, uint8_t *to) {
    for (size_t row = 0; row < n_rows; row += DPL_PANEL, to += right_bytes(h, n_cols))
        h->g->right_rows(load_of(x), DPL_MIN(DPL_PANEL, n_rows - row), n_cols, dpl_mat_row(x, row),
                         x.ld, DPL_PANEL, to);
}

// Columns of x as the columns of panels.
static void right_cols(const attn *h, dpl_mat x, size_t n_rows, size_t n_cols, uint8_t *to) {
    for (size_t col = 0; col < n_cols; col += DPL_PANEL, to += right_bytes(h, n_rows))
        h->g->right_cols(load_of(x), DPL_MIN(DPL_PANEL, n_cols - col), n_rows,
                         dpl_mat_at(x, 0, col).p, x.ld, DPL_PANEL, to);
}

static bool is_padding(const attn *h, size_t row) {
    return h->a.segment && h->a.segment[row] == 0;
}

static bool has_padding(const attn *h, size_t row, size_t n) {
    for (size_t end = row + n; row < end; row++)
        if (is_padding(h, row)) return true;
    return false;
}

static void copy_row(const attn *h, dpl_mat from, size_t row, size_t n, dpl_mat to) {
    const void *x = dpl_mat_row(from, row);
    if (from.dtype == to.dtype) memcpy(to.p, x, n * dpl_dtype_bytes(to.dtype));
    else if (to.dtype == DPL_F32) h->r->from_bf16(x, to.p, n);
    else h->r->to_bf16(x, to.p, n);
}

// n rows of x from row0 on, and beside them those of y. Padding rows are 0: a probability of 0
// times whatever they hold must be 0.
static dpl_mat gather(const attn *h, size_t row0, size_t n, dpl_mat x, size_t n_x, dpl_mat y,
                      size_t n_y) {
    if (n_y == 0 && !has_padding(h, row0, n)) return dpl_mat_at(x, row0, 0);
    const dpl_mat rows = {h->w->rows, n_x + n_y, h->a.q.dtype};
    for (size_t i = 0; i < n; i++) {
        const dpl_mat to = dpl_mat_at(rows, i, 0);
        if (is_padding(h, row0 + i)) {
            memset(to.p, 0, rows.ld * dpl_dtype_bytes(rows.dtype));
            continue;
        }
        copy_row(h, x, row0 + i, n_x, to);
        copy_row(h, y, row0 + i, n_y, dpl_mat_at(to, 0, n_x));
    }
    return rows;
}

static dpl_mat gather_keys(const attn *h, size_t row0, size_t n) {
    return gather(h, row0, n, h->a.kv, h->a.d_nope, h->a.k_rope, h->a.d_rope);
}

static dpl_mat gather_values(const attn *h, size_t row0, size_t n) {
    return gather(h, row0, n, dpl_mat_at(h->a.kv, 0, h->a.d_nope), h->a.d_v, h->a.q, 0);
}

static void fetch_nothing(const attn *h) {
    h->w->fetch = (attn_fetch){0};
}

// Also n_cols columns of m in n_rows rows from `row` on, as far as they exist.
static void fetch_rows(const attn *h, dpl_mat m, size_t row, size_t n_rows, size_t n_cols) {
    attn_fetch *f = &h->w->fetch;
    if (row >= h->a.n_seq) return;
    m = dpl_mat_at(m, row, 0);
    const size_t before = (uintptr_t)m.p % LINE, bytes = n_cols * dpl_dtype_bytes(m.dtype);
    m.p = (uint8_t *)m.p - before;
    f->list[f->n].m = m;
    f->list[f->n].n_rows = DPL_MIN(n_rows, h->a.n_seq - row);
    f->list[f->n++].lines = dpl_div_up(before + bytes, LINE);
}

// What a product over l fetches: a line at each step, or a row where steps are few.
static dpl_gemm_ahead fetch_ahead(const attn *h, size_t l, const void *none) {
    attn_fetch *f = &h->w->fetch;
    if (f->i == f->n) return (dpl_gemm_ahead){none, 0, 1, 0, 0};
    const dpl_mat m = f->list[f->i].m;
    const size_t lines = f->list[f->i].lines, row_bytes = m.ld * dpl_dtype_bytes(m.dtype);
    const size_t each = h->g->fetch < MANY ? 1 : lines;
    const void *from = dpl_mat_row(m, f->row);
    f->row += DPL_MAX(1, l / h->g->fetch * each / lines);
    if (f->row >= f->list[f->i].n_rows) {
        f->row = 0;
        f->i++;
    }
    return (dpl_gemm_ahead){from, LINE, lines, row_bytes - (lines - 1) * LINE, each};
}

// c (m, 32), rows ldc apart, (+= or) = left (m, l) right (l, 32), which are in L2 already.
static void multiply(const attn *h, size_t m, size_t l, const uint8_t *left, const uint8_t *right,
                     float *c, size_t ldc, bool add) {
    for (size_t done = 0, n; done < l; done += n) {
        n = DPL_MIN(h->g->kc, l - done);
        h->g->tile(m, n, left + done * m * h->g->left_bytes,
                   right + done * DPL_PANEL * h->g->right_bytes, c, ldc, add || done > 0,
                   fetch_ahead(h, n, right));
    }
}

// The columns of x (n, 32), of which n_rows count, become rows.
static void store_columns(const attn *h, const float *x, size_t n, size_t n_rows, dpl_mat to) {
    float rows[DPL_PANEL * DPL_PANEL];
    for (size_t i = 0; i < n; i += DPL_PANEL, x += DPL_PANEL * DPL_PANEL) {
        const size_t m = DPL_MIN(DPL_PANEL, n - i);
        h->f32->right_rows(DPL_LOAD_F32, m, n_rows, x, DPL_PANEL, DPL_PANEL, rows);
        h->f32->put(n_rows, m, rows, to.dtype, dpl_mat_at(to, 0, i).p, to.ld);
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

// False: no query of the n_q from q0 on shares a segment with a key of the n_k from k0 on. Else
// *mixed_out says whether a pair may not.
static bool block_visible(const attn *h, size_t q0, size_t n_q, size_t k0, size_t n_k,
                          bool *mixed_out) {
    int32_t q_low, q_high, k_low, k_high;
    *mixed_out = false;
    if (!h->a.segment) return true;
    find_range(h->a.segment + q0, n_q, &q_low, &q_high);
    find_range(h->a.segment + k0, n_k, &k_low, &k_high);
    *mixed_out = q_low != q_high || k_low != k_high;
    return q_low <= k_high && k_low <= q_high && (q_low != 0 || q_high != 0);
}

// Those of n queries; the rest up to `all` sees nothing.
static void query_segments(const attn *h, size_t q0, size_t n, size_t all) {
    for (size_t i = 0; h->a.segment && i < all; i++)
        h->w->segment[i] = i < n && !is_padding(h, q0 + i) ? h->a.segment[q0 + i] : HIDDEN;
}

static dpl_scores scores_of(const attn *h, size_t q, size_t k) {
    return (dpl_scores){.scale = h->a.scale, .key_minus_query = (int32_t)k - (int32_t)q};
}

/* ---- forward --------------------------------------------------------------------------------- */
// n_q <= 32 queries, those from i on of the task, against n keys from k0 on, which are packed.
static void attend_panel(const attn *h, size_t q, size_t n_q, size_t i, size_t k0, size_t n,
                         size_t n_packed) {
    const attn_work *w = h->w;
    const size_t d_v = h->a.d_v;
    const uint8_t *query = w->q + i / DPL_PANEL * right_bytes(h, h->depth);
    float *acc = w->acc + i * d_v, shrink[DPL_PANEL];
    dpl_scores scores = scores_of(h, q, k0);
    bool mixed;
    if (!block_visible(h, q, n_q, k0, n, &mixed)) return;
    if (mixed) {
        query_segments(h, q, n_q, DPL_PANEL);
        scores.row_segment = h->a.segment + k0;
        scores.column_segment = w->segment;
    }
    EACH_PART(key, m, n_packed, h->g->mr) {
        if (key >= n) break;
        multiply(h, m, h->depth, w->k + left_bytes(h, key, h->depth), query,
                 w->score + key * DPL_PANEL, DPL_PANEL, false);
    }
    uint16_t *pairs = h->a.q.dtype == DPL_BF16 ? (uint16_t *)w->p : NULL;
    if (h->r->softmax(&scores, n, w->score, pairs, w->max + i, w->sum + i, shrink))
        h->r->scale_columns(shrink, acc, d_v);
    const uint8_t *p = pairs ? w->p : (const uint8_t *)w->score;
    EACH_PART(col, m, d_v, h->g->mr) {
        multiply(h, m, n, w->v + left_bytes(h, col, n_packed), p, acc + col * DPL_PANEL, DPL_PANEL,
                 true);
    }
}

// What comes after the keys from k0 on: the next ones, or the outputs and the next task.
static void fetch_after_keys(const attn *h, size_t q0, size_t q1, size_t k0) {
    const size_t next = k0 + KEY_BLOCK, kv_cols = h->a.d_nope + h->a.d_v;
    fetch_nothing(h);
    if (next < q1) {
        fetch_rows(h, h->a.kv, next, KEY_BLOCK, kv_cols);
        return;
    }
    fetch_rows(h, h->out, q0, q1 - q0, h->a.d_v);
    if (!h->next) return;
    fetch_rows(h, h->next->a.q, h->next->first, TASK_QUERIES, h->depth);
    fetch_rows(h, h->next->a.kv, 0, KEY_BLOCK, kv_cols);
}

// The queries q0..q1 against the keys of a block, as far as they see them.
static void attend_keys(const attn *h, size_t q0, size_t q1, size_t k0) {
    const size_t n_keys = DPL_MIN(KEY_BLOCK, q1 - k0);
    bool mixed;
    if (!block_visible(h, q0, q1 - q0, k0, n_keys, &mixed)) return;
    left_rows(h, gather_keys(h, k0, n_keys), n_keys, h->depth, h->w->k);
    left_cols(h, gather_values(h, k0, n_keys), n_keys, h->a.d_v, h->w->v);
    fetch_after_keys(h, q0, q1, k0);
    for (size_t q = DPL_MAX(q0, k0); q < q1; q += DPL_PANEL) {
        const size_t n_q = DPL_MIN(DPL_PANEL, q1 - q), n = DPL_MIN(n_keys, q + n_q - k0);
        attend_panel(h, q, n_q, q - q0, k0, n, n_keys);
    }
}

// Divides by the sum of each query and stores.
static void finish_panel(const attn *h, size_t q, size_t n_q, size_t i) {
    const attn_work *w = h->w;
    float factor[DPL_PANEL];
    for (size_t j = 0; j < DPL_PANEL; j++) factor[j] = 1 / w->sum[i + j];
    h->r->scale_columns(factor, w->acc + i * h->a.d_v, h->a.d_v);
    store_columns(h, w->acc + i * h->a.d_v, h->a.d_v, n_q, dpl_mat_at(h->out, q, 0));
    for (size_t j = 0; j < n_q; j++) {
        h->lse[q + j] = w->max[i + j] * h->a.scale + logf(w->sum[i + j]);
        if (!is_padding(h, q + j)) continue;
        memset(dpl_mat_row(h->out, q + j), 0, h->a.d_v * dpl_dtype_bytes(h->out.dtype));
        h->lse[q + j] = 0;
    }
}

static void forward_task(const attn *h, size_t q0, size_t q1) {
    const attn_work *w = h->w;
    const size_t all = dpl_round_up(q1 - q0, DPL_PANEL);
    for (size_t i = 0; i < all; i++) {
        w->max[i] = -INFINITY;
        w->sum[i] = 0;
    }
    memset(w->acc, 0, all * h->a.d_v * sizeof *w->acc);
    for (size_t q = q0; q < q1; q += KEY_BLOCK) {
        const size_t n = DPL_MIN(KEY_BLOCK, q1 - q);
        right_rows(h, gather(h, q, n, h->a.q, h->depth, h->a.q, 0), n, h->depth,
                   w->q + (q - q0) / DPL_PANEL * right_bytes(h, h->depth));
    }
    for (size_t k0 = 0; k0 < q1; k0 += KEY_BLOCK) attend_keys(h, q0, q1, k0);
    for (size_t q = q0; q < q1; q += DPL_PANEL)
        finish_panel(h, q, DPL_MIN(DPL_PANEL, q1 - q), q - q0);
}

/* ---- backward -------------------------------------------------------------------------------- */
// All of a task's keys, from k0 on.
static void pack_keys(const attn *h, size_t k0, size_t k1) {
    const attn_work *w = h->w;
    for (size_t k = k0; k < k1; k += KEY_BLOCK) {
        const size_t n = DPL_MIN(KEY_BLOCK, k1 - k), panel = (k - k0) / DPL_PANEL;
        const dpl_mat keys = gather_keys(h, k, n);
        right_rows(h, keys, n, h->depth, w->k_rows + panel * right_bytes(h, h->depth));
        right_cols(h, keys, n, h->depth,
                   w->k_cols +
                       (k - k0) / KEY_BLOCK * right_bytes(h, KEY_BLOCK * h->ld_q / DPL_PANEL));
        right_rows(h, gather_values(h, k, n), n, h->a.d_v,
                   w->v_rows + panel * right_bytes(h, h->a.d_v));
    }
    const size_t n_keys = dpl_round_up(k1 - k0, DPL_PANEL);
    memset(w->dk, 0, n_keys * h->depth * sizeof(float));
    memset(w->dv, 0, n_keys * h->a.d_v * sizeof(float));
}

static void pack_queries(const attn *h, size_t q0, size_t n) {
    const attn_work *w = h->w;
    const dpl_mat q = gather(h, q0, n, h->a.q, h->depth, h->a.q, 0);
    left_rows(h, q, n, h->depth, w->q);
    left_cols(h, q, n, h->depth, w->q_cols);
    const dpl_mat dout = gather(h, q0, n, h->dout, h->a.d_v, h->dout, 0);
    left_rows(h, dout, n, h->a.d_v, w->dout);
    left_cols(h, dout, n, h->a.d_v, w->dout_cols);
    // The dot product of output and its gradient is what the softmax subtracts from dp.
    for (size_t i = 0; i < n; i++)
        w->delta[i] = h->r->dot_as(h->out.dtype, dpl_mat_row(h->out, q0 + i), h->dout.dtype,
                                   dpl_mat_row(h->dout, q0 + i), h->a.d_v);
    query_segments(h, q0, n, n);
}

// What comes after n queries from q0 on: their dq, and the next queries or the next task.
static void fetch_after_queries(const attn *h, size_t q0, size_t n) {
    const size_t kv_cols = h->a.d_nope + h->a.d_v;
    const attn *then = h;
    size_t q = q0 + n;
    fetch_nothing(h);
    if (!h->dq_parts) fetch_rows(h, h->dq, q0, n, h->depth);
    if (q == h->a.n_seq) {
        fetch_rows(h, h->dkv, h->first, h->end - h->first, kv_cols);
        if (!h->next) return;
        then = h->next;
        q = then->first;
        fetch_rows(then, then->a.kv, q, KEY_BLOCK, kv_cols);
    }
    fetch_rows(then, then->a.q, q, QUERY_BLOCK, h->depth);
    fetch_rows(then, then->dout, q, QUERY_BLOCK, h->a.d_v);
    fetch_rows(then, then->out, q, QUERY_BLOCK, h->a.d_v);
}

// The n queries from q0 on against 32 keys from k on, the panel `j` of a block and `panel` of the
// task: dk, dv += their part; leaves the gradients of the scores on the left.
static void backward_panel(const attn *h, size_t q0, size_t n, size_t k, size_t j, size_t panel,
                           bool mixed) {
    const attn_work *w = h->w;
    const size_t d_v = h->a.d_v;
    const bool bf16 = h->a.q.dtype == DPL_BF16;
    const uint8_t *p = bf16 ? w->p : (uint8_t *)w->score;
    const uint8_t *dscore = bf16 ? w->dscore : (uint8_t *)w->dp;
    int32_t key_segment[DPL_PANEL];
    for (size_t i = 0; mixed && i < DPL_PANEL; i++)
        key_segment[i] = h->a.segment[DPL_MIN(k + i, h->a.n_seq - 1)];
    size_t first = 0;
    EACH_PART(row, m, n, h->g->mr) {
        if (q0 + row + m <= k) {
            first = row + m;
            continue;
        }
        float *score = w->score + (bf16 ? 0 : row * DPL_PANEL);
        float *dp = w->dp + (bf16 ? 0 : row * DPL_PANEL);
        multiply(h, m, h->depth, w->q + left_bytes(h, row, h->depth),
                 w->k_rows + panel * right_bytes(h, h->depth), score, DPL_PANEL, false);
        multiply(h, m, d_v, w->dout + left_bytes(h, row, d_v),
                 w->v_rows + panel * right_bytes(h, d_v), dp, DPL_PANEL, false);
        dpl_scores scores = scores_of(h, q0 + row, k);
        if (mixed) {
            scores.row_segment = w->segment + row;
            scores.column_segment = key_segment;
        }
        scores.lse = h->lse + q0 + row;
        scores.delta = w->delta + row;
        h->r->softmax_backward(
            &scores, m, score, dp, bf16 ? (uint16_t *)w->p + row * DPL_PANEL : NULL,
            bf16 ? (uint16_t *)w->dscore + row * DPL_PANEL : NULL, (uint16_t *)w->rows);
        h->g->left_rows(bf16 ? DPL_LOAD_BF16 : DPL_LOAD_F32, m, DPL_PANEL,
                        bf16 ? w->rows : (uint8_t *)dp, DPL_PANEL, m,
                        w->dscore_left + left_bytes(h, row, KEY_BLOCK) +
                            left_bytes(h, m, j * DPL_PANEL));
    }
    // Earlier queries see none of these keys. A packed left operand can start at whole depths only.
    const size_t l0 = first / h->g->depth * h->g->depth, right0 = right_bytes(h, l0);
    memset((uint8_t *)(uintptr_t)p + right0, 0, right_bytes(h, first) - right0);
    memset((uint8_t *)(uintptr_t)dscore + right0, 0, right_bytes(h, first) - right0);
    EACH_PART(col, m, d_v, h->g->mr) {
        multiply(h, m, n - l0, w->dout_cols + left_bytes(h, col, n) + left_bytes(h, m, l0),
                 p + right0, w->dv + (panel * d_v + col) * DPL_PANEL, DPL_PANEL, true);
    }
    EACH_PART(col, m, h->depth, h->g->mr) {
        multiply(h, m, n - l0, w->q_cols + left_bytes(h, col, n) + left_bytes(h, m, l0),
                 dscore + right0, w->dk + (panel * h->depth + col) * DPL_PANEL, DPL_PANEL, true);
    }
}

// dq (n, ld_q) of the queries from q0 on += what n_keys keys from k0 on say.
static void add_dq(const attn *h, size_t q0, size_t n, size_t k0, size_t n_keys,
                   const uint8_t *k_cols, float *dq) {
    for (size_t col = 0; col < h->depth; col += DPL_PANEL, k_cols += right_bytes(h, n_keys)) {
        EACH_PART(row, m, n, h->g->mr) {
            if (q0 + row + m <= k0) continue;
            const size_t seen = DPL_MIN(n_keys, dpl_round_up(q0 + row + m - k0, DPL_PANEL));
            multiply(h, m, seen, h->w->dscore_left + left_bytes(h, row, KEY_BLOCK), k_cols,
                     dq + row * h->ld_q + col, h->ld_q, true);
        }
    }
}

// n queries from q0 on and the keys k0..k1 of a task.
static void backward_block(const attn *h, size_t q0, size_t n, size_t k0, size_t k1, float *dq) {
    const size_t end = DPL_MIN(k1, q0 + n); // of the keys that one of them sees
    pack_queries(h, q0, n);
    fetch_after_queries(h, q0, n);
    memset(dq, 0, n * h->ld_q * sizeof *dq);
    for (size_t k = k0; k < end; k += KEY_BLOCK) {
        const size_t n_keys = DPL_MIN(KEY_BLOCK, k1 - k), stop = DPL_MIN(k + KEY_BLOCK, end);
        bool mixed;
        if (!block_visible(h, q0, n, k, n_keys, &mixed)) continue;
        for (size_t j = 0; k + j * DPL_PANEL < stop; j++)
            backward_panel(h, q0, n, k + j * DPL_PANEL, j, (k - k0) / DPL_PANEL + j, mixed);
        add_dq(h, q0, n, k, n_keys,
               h->w->k_cols +
                   (k - k0) / KEY_BLOCK * right_bytes(h, KEY_BLOCK * h->ld_q / DPL_PANEL),
               dq);
    }
    for (size_t i = 0; !h->dq_parts && i < n; i++)
        dpl_row_store(h->r, h->dq, q0 + i, 0, dq + i * h->ld_q, h->depth);
}

static void backward_task(const attn *h, size_t k0, size_t k1) {
    const attn_work *w = h->w;
    const size_t d_nope = h->a.d_nope, d_rope = h->a.d_rope, d_v = h->a.d_v;
    const dpl_mat rope = dpl_mat_f32(h->rope_parts, d_rope);
    pack_keys(h, k0, k1);
    EACH_PART(q0, n, h->a.n_seq, QUERY_BLOCK) {
        if (q0 + n <= k0) continue;
        backward_block(h, q0, n, k0, k1, h->dq_parts ? h->dq_parts + q0 * h->ld_q : w->dq);
    }
    for (size_t k = k0; k < k1; k += DPL_PANEL) {
        const size_t n = DPL_MIN(DPL_PANEL, k1 - k), at = k - k0;
        const float *dk = w->dk + at * h->depth;
        store_columns(h, dk, d_nope, n, dpl_mat_at(h->dkv, k, 0));
        store_columns(h, dk + d_nope * DPL_PANEL, d_rope, n, dpl_mat_at(rope, k, 0));
        store_columns(h, w->dv + at * d_v, d_v, n, dpl_mat_at(h->dkv, k, d_nope));
    }
}

/* ---- tasks ----------------------------------------------------------------------------------- */
static void *carve(uint8_t *base, size_t *used, size_t n, size_t elem_bytes) {
    void *p = base ? base + *used : NULL;
    *used += dpl_round_up(n * elem_bytes, DPL_ALIGN);
    return p;
}

// Lays the work space of a task out; returns its bytes. `base` may be NULL.
static size_t lay_out(const attn *h, uint8_t *base, attn_work *w) {
    const size_t s = dpl_round_up(h->a.n_seq, DPL_PANEL), d = h->depth, d_v = h->a.d_v;
    size_t n = 0; // bytes used
    w->rows = carve(base, &n, KEY_BLOCK * DPL_MAX(d, d_v), sizeof(float));
    w->score = carve(base, &n, KEY_BLOCK * DPL_PANEL, sizeof(float));
    w->p = carve(base, &n, KEY_BLOCK * DPL_PANEL, sizeof(uint16_t));
    w->segment = carve(base, &n, QUERY_BLOCK, sizeof(int32_t));
    if (!h->dq.p) {
        const size_t n_q = DPL_MIN(s, TASK_QUERIES);
        w->q = carve(base, &n, n_q / DPL_PANEL, right_bytes(h, d));
        w->k = carve(base, &n, 1, left_bytes(h, KEY_BLOCK, d));
        w->v = carve(base, &n, 1, left_bytes(h, d_v, KEY_BLOCK));
        w->acc = carve(base, &n, n_q * d_v, sizeof(float));
        w->max = carve(base, &n, n_q, sizeof(float));
        w->sum = carve(base, &n, n_q, sizeof(float));
        return n;
    }
    const size_t n_k = DPL_MIN(s, TASK_KEYS), n_q = QUERY_BLOCK;
    w->k_rows = carve(base, &n, n_k / DPL_PANEL, right_bytes(h, d));
    w->v_rows = carve(base, &n, n_k / DPL_PANEL, right_bytes(h, d_v));
    w->k_cols = carve(base, &n, dpl_div_up(n_k, KEY_BLOCK) * h->ld_q / DPL_PANEL,
                      right_bytes(h, KEY_BLOCK));
    w->dk = carve(base, &n, n_k * d, sizeof(float));
    w->dv = carve(base, &n, n_k * d_v, sizeof(float));
    w->q = carve(base, &n, 1, left_bytes(h, n_q, d));
    w->q_cols = carve(base, &n, 1, left_bytes(h, d, n_q));
    w->dout = carve(base, &n, 1, left_bytes(h, n_q, d_v));
    w->dout_cols = carve(base, &n, 1, left_bytes(h, d_v, n_q));
    w->dscore = carve(base, &n, n_q * DPL_PANEL, sizeof(uint16_t));
    w->dscore_left = carve(base, &n, 1, left_bytes(h, n_q, KEY_BLOCK));
    w->delta = carve(base, &n, n_q, sizeof(float));
    w->dp = carve(base, &n, n_q * DPL_PANEL, sizeof(float));
    w->dq = carve(base, &n, n_q * h->ld_q, sizeof(float));
    return n;
}

// Heads of queries that share one of keys and values.
static size_t n_sharing(const dpl_attention *a) {
    return a->n_kv_heads ? a->n_heads / a->n_kv_heads : 1;
}

// Where head i_head of the group is.
static attn open_head(const attn *x, size_t i_head) {
    attn h = *x;
    i_head += x->head0;
    const size_t row0 = i_head / h.a.n_heads * h.a.n_seq, head = i_head % h.a.n_heads;
    const size_t kv_cols = h.a.d_nope + h.a.d_v;
    const size_t query = head * h.depth, key = head / n_sharing(&h.a) * kv_cols;
    h.a.q = dpl_mat_at(x->a.q, row0, query);
    h.a.kv = dpl_mat_at(x->a.kv, row0, key);
    h.a.k_rope = dpl_mat_at(x->a.k_rope, row0, 0);
    h.out = dpl_mat_at(x->out, row0, head * h.a.d_v);
    if (h.dq.p) {
        h.dout = dpl_mat_at(x->dout, row0, head * h.a.d_v);
        h.dq = dpl_mat_at(x->dq, row0, query);
        h.dkv = dpl_mat_at(x->dkv, row0, key);
        if (h.kv_parts) h.dkv = dpl_mat_f32(h.kv_parts + i_head * h.a.n_seq * kv_cols, kv_cols);
        h.rope_parts += i_head * h.a.n_seq * h.a.d_rope;
    }
    if (h.a.segment) h.a.segment += row0;
    h.lse += i_head * h.a.n_seq;
    return h;
}

// A part of the queries (forward) or keys of one head. The longest come first: threads end
// together.
static attn open_task(const attn *x, size_t i_task, attn_work *w) {
    attn h = open_head(x, i_task % x->n_group);
    const size_t n = x->a.n_seq, i = i_task / x->n_group;
    const size_t size = h.dq.p ? TASK_KEYS : TASK_QUERIES, n_tasks = dpl_div_up(n, size);
    h.first = (h.dq.p ? i : n_tasks - 1 - i) * size;
    h.end = DPL_MIN(n, h.first + size);
    if (h.dq_parts) h.dq_parts += i_task * n * h.ld_q;
    h.w = w;
    return h;
}

static void run_task(const void *args, const dpl_part *part) {
    const attn *x = args;
    attn_work w;
    attn h = open_task(x, part->first, &w), next;
    const size_t i_next = part->first + x->n_threads;
    const size_t size = h.dq.p ? TASK_KEYS : TASK_QUERIES;
    if (i_next < x->n_group * dpl_div_up(x->a.n_seq, size)) {
        next = open_task(x, i_next, &w);
        h.next = &next;
    }
    lay_out(&h, x->work + (size_t)part->i_thread * x->work_bytes, &w);
    h.r = part->k;
    const unsigned entered = dpl_gemm_enter(h.g);
    if (h.dq.p) backward_task(&h, h.first, h.end);
    else forward_task(&h, h.first, h.end);
    dpl_gemm_leave(h.g, entered);
}

// Adds up what each task of a head said about a query.
static void sum_dq(const void *args, const dpl_part *part) {
    const attn *x = args;
    const size_t n_seq = x->a.n_seq, step = x->n_group * n_seq * x->ld_q;
    attn h = *x;
    for (size_t row = part->first; row < part->end; row++) {
        if (row == part->first || row % n_seq == 0) h = open_head(x, row / n_seq);
        float *sum = x->dq_parts + row * x->ld_q;
        h.r = part->k;
        for (size_t i = 1; i <= row % n_seq / TASK_KEYS; i++)
            h.r->add(sum, sum + i * step, sum, h.depth);
        dpl_row_store(h.r, h.dq, row % n_seq, 0, sum, h.depth);
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

// dkv of a token: what the heads that share keys and values said, in order.
static void sum_kv(const void *args, const dpl_part *part) {
    const attn *x = args;
    const size_t n_seq = x->a.n_seq, n_cols = x->a.d_nope + x->a.d_v, n = n_sharing(&x->a);
    for (size_t row = part->first; row < part->end; row++)
        for (size_t head = 0; head < x->a.n_heads; head += n) {
            const size_t at = (row / n_seq * x->a.n_heads + head) * n_seq + row % n_seq;
            float *sum = x->kv_parts + at * n_cols;
            for (size_t i = 1; i < n; i++) part->k->add(sum, sum + i * n_seq * n_cols, sum, n_cols);
            dpl_row_store(part->k, x->dkv, row, head / n * n_cols, sum, n_cols);
        }
}

static void run(dpl_ctx *ctx, const void *args) {
    attn x = *(const attn *)args;
    const size_t n_heads = x.a.n_batch * x.a.n_heads, n_seq = x.a.n_seq;
    const size_t n_tasks = dpl_div_up(n_seq, x.dq.p ? TASK_KEYS : TASK_QUERIES);
    for (; x.head0 < n_heads; x.head0 += x.n_group) {
        x.n_group = DPL_MIN(x.n_group, n_heads - x.head0);
        dpl_ctx_loop(ctx, (dpl_loop){run_task, x.n_group * n_tasks, 1}, &x);
        const size_t grain = dpl_row_grain(x.ld_q * n_tasks * sizeof(float));
        if (x.dq_parts) dpl_ctx_loop(ctx, (dpl_loop){sum_dq, x.n_group * n_seq, grain}, &x);
    }
    const size_t grain = dpl_row_grain((x.a.n_heads + 1) * x.a.d_rope * sizeof(float));
    if (x.dq.p) dpl_ctx_loop(ctx, (dpl_loop){sum_rope, x.a.n_batch * n_seq, grain}, &x);
    if (x.kv_parts) dpl_ctx_loop(ctx, (dpl_loop){sum_kv, x.a.n_batch * n_seq, 4}, &x);
}

static void submit(dpl_ctx *ctx, attn x, const dpl_span outputs[3]) {
    const size_t mark = dpl_ctx_mark(ctx), n_threads = (size_t)dpl_pool_threads(ctx->pool);
    const size_t n_heads = x.a.n_batch * x.a.n_heads, n_tasks = dpl_div_up(x.a.n_seq, TASK_KEYS);
    x.g = &ctx->kernels->gemm[x.a.q.dtype];
    x.f32 = &ctx->kernels->gemm[DPL_F32];
    x.depth = x.a.d_nope + x.a.d_rope;
    x.ld_q = dpl_round_up(x.depth, DPL_PANEL);
    x.n_group = n_heads;
    x.n_threads = n_threads;
    attn_work w;
    x.work_bytes = lay_out(&x, NULL, &w);
    x.work = dpl_ctx_alloc(ctx, n_threads * x.work_bytes);
    if (x.dq.p) x.rope_parts = dpl_ctx_alloc(ctx, n_heads * x.a.n_seq * x.a.d_rope * sizeof(float));
    if (x.dq.p && n_sharing(&x.a) > 1)
        x.kv_parts = dpl_ctx_alloc(ctx,
                                   n_heads * x.a.n_seq * (x.a.d_nope + x.a.d_v) * sizeof(float));
    if (x.dq.p && n_tasks > 1) {
        x.n_group = DPL_MIN(n_heads, dpl_div_up(TASKS * n_threads, n_tasks));
        x.dq_parts = dpl_ctx_alloc(ctx, n_tasks * x.n_group * x.a.n_seq * x.ld_q * sizeof(float));
    }
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
    const size_t n_rows = a->n_batch * a->n_seq, n_kv = a->n_heads / n_sharing(a);
    const dpl_span outputs[3] = {dpl_row_span(dq, n_rows, a->n_heads * (a->d_nope + a->d_rope)),
                                 dpl_row_span(dkv, n_rows, n_kv * (a->d_nope + a->d_v)),
                                 dpl_row_span(dk_rope, n_rows, a->d_rope)};
    attn x = {.a = *a, .out = out, .dout = dout, .dq = dq, .dkv = dkv, .dk_rope = dk_rope};
    x.lse = (float *)(uintptr_t)lse;
    submit(ctx, x, outputs);
}
