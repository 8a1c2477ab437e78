// rows.c - the operators that work row by row: norm, rotation, sums, loss, and the movement
// of rows: copies, gathers (dispatch, embedding) and combine.
//
// Each handles fp32 and bf16 with one code path: a row is taken in blocks of DPL_ROW_BLOCK columns,
// converted on the way into and out of a small buffer where it is bf16 (row_io.h). Sums over rows
// go in chunks that depend on the shape alone, so the thread count never changes a bit.
#include <math.h>

#include "cpu/row_io.h"

// An output is listed for poisoning unless the operator also reads it.
static dpl_span span_unless(bool is_read, dpl_mat m, size_t n_rows, size_t d) {
    return is_read ? (dpl_span){m.p, 0} : dpl_row_span(m, n_rows, d);
}

typedef struct row_args {
    dpl_loop loop;
    size_t d;
    dpl_mat a, b, out;      // a: x; b: its second term or the gradient of what came of it
    dpl_mat sum;            // norm of a sum
    const float *weight;    // norm: gain (d)
    float *rstd;            // norm
    float *dgain, *partial; // norm backward; partial: (parts, d) sums of dgain
    float eps;
    bool accumulate;
} row_args;

// The operator that runs a->loop.fn on rows; `d_out` columns of a->out are its output.
static void submit_rows(dpl_ctx *ctx, const row_args *a, dpl_op_fn run, size_t d_out) {
    const size_t n_rows = a->loop.n_rows;
    const bool in_place = a->accumulate || a->out.p == a->a.p || a->out.p == a->b.p;
    DPL_SUBMIT(ctx, run, *a, span_unless(in_place, a->out, n_rows, d_out),
               {a->rstd, a->dgain ? 0 : n_rows * sizeof *a->rstd});
}

/* ---- RMSNorm --------------------------------------------------------------------------------- */
// y and rstd of a row of `from` whose sum of squares is known. x: all of the row, NULL: it is read,
// block by block.
static void norm_row(const row_args *a, const dpl_row_kernels *k, dpl_mat from, size_t row,
                     double squares, const float *x) {
    float buf[DPL_ROW_BLOCK];
    const float rstd = (float)(1.0 / sqrt(squares / (double)a->d + (double)a->eps));
    a->rstd[row] = rstd;
    DPL_EACH_BLOCK(col, n, a->d) {
        const float *block = x ? x : dpl_row_load(k, from, row, col, n, buf);
        float *y = dpl_row_target(a->out, row, col, buf);
        k->norm_forward(block, a->weight + col, rstd, y, n);
        dpl_row_store(k, a->out, row, col, y, n);
    }
}

static void norm_forward(const void *args, const dpl_part *part) {
    const row_args *a = args;
    float buf[DPL_ROW_BLOCK];
    for (size_t row = part->first; row < part->end; row++) {
        double squares = 0;
        const float *x = NULL;
        DPL_EACH_BLOCK(col, n, a->d) {
            x = dpl_row_load(part->k, a->a, row, col, n, buf);
            squares += (double)part->k->dot(x, x, n);
        }
        norm_row(a, part->k, a->a, row, squares, a->d <= DPL_ROW_BLOCK ? x : NULL);
    }
}

void dpl_rmsnorm_forward(dpl_ctx *ctx, dpl_mat x, const float *gain, size_t n_rows, size_t d,
                         float eps, dpl_mat y, float *rstd) {
    const dpl_loop loop = {norm_forward, n_rows, dpl_row_grain(d * 4)};
    const row_args a = {loop, d, x, .out = y, .weight = gain, .rstd = rstd, .eps = eps};
    submit_rows(ctx, &a, dpl_run_loop, d);
}

// The sum is normed while it is still in cache.
static void add_norm_forward(const void *args, const dpl_part *part) {
    const row_args *a = args;
    float a_buf[DPL_ROW_BLOCK], b_buf[DPL_ROW_BLOCK];
    for (size_t row = part->first; row < part->end; row++) {
        double squares = 0;
        DPL_EACH_BLOCK(col, n, a->d) {
            const float *x = dpl_row_load(part->k, a->a, row, col, n, a_buf);
            const float *more = dpl_row_load(part->k, a->b, row, col, n, b_buf);
            float *sum = dpl_mat_at(a->sum, row, col).p;
            squares += (double)part->k->add_squares(x, more, sum, n);
        }
        norm_row(a, part->k, a->sum, row, squares, NULL);
    }
}

void dpl_add_rmsnorm_forward(dpl_ctx *ctx, dpl_mat a, dpl_mat b, const float *gain, size_t n_rows,
                             size_t d, float eps, dpl_mat sum, dpl_mat y, float *rstd) {
    const row_args args = {
        {add_norm_forward, n_rows, dpl_row_grain(d * 8)}, d, a, b, y, sum, gain, rstd, .eps = eps};
    DPL_SUBMIT(ctx, dpl_run_loop, args, dpl_row_span(y, n_rows, d),
               span_unless(sum.p == a.p || sum.p == b.p, sum, n_rows, d),
               {rstd, n_rows * sizeof *rstd});
}

static void norm_backward_row(const row_args *a, const dpl_row_kernels *k, size_t row,
                              float *dgain) {
    float buf[DPL_ROW_BLOCK], dy_buf[DPL_ROW_BLOCK];
    double dot = 0;
    const float *x = NULL, *dy = NULL;
    DPL_EACH_BLOCK(col, n, a->d) {
        x = dpl_row_load(k, a->a, row, col, n, buf);
        dy = dpl_row_load(k, a->b, row, col, n, dy_buf);
        dot += (double)k->norm_dot(dy, a->weight + col, x, n);
    }
    const double rstd = (double)a->rstd[row];
    const float c = (float)(rstd * rstd * rstd * dot / (double)a->d);
    DPL_EACH_BLOCK(col, n, a->d) {
        if (n < a->d) { // else they are still there
            x = dpl_row_load(k, a->a, row, col, n, buf);
            dy = dpl_row_load(k, a->b, row, col, n, dy_buf);
        }
        float *dx = dpl_row_target(a->out, row, col, buf);
        k->norm_backward(dy, a->weight + col, x, a->rstd[row], c, a->accumulate, dx, dgain + col,
                         n);
        dpl_row_store(k, a->out, row, col, dx, n);
    }
}

static void norm_backward(const void *args, const dpl_part *part) {
    const row_args *a = args;
    float *dgain = a->partial + part->i * a->d;
    memset(dgain, 0, a->d * sizeof *dgain);
    for (size_t row = part->first; row < part->end; row++)
        norm_backward_row(a, part->k, row, dgain);
}

static void add_partials(const void *args, const dpl_part *part) {
    const row_args *a = args;
    float *dgain = a->dgain + part->first;
    for (size_t chunk = 0; chunk < dpl_div_up(a->loop.n_rows, a->loop.grain); chunk++)
        part->k->add(dgain, a->partial + chunk * a->d + part->first, dgain,
                     part->end - part->first);
}

static void run_norm_backward(dpl_ctx *ctx, const void *args) {
    const row_args *a = args;
    dpl_run_loop(ctx, args);
    dpl_ctx_loop(ctx, (dpl_loop){add_partials, a->d, 256}, args);
}

void dpl_rmsnorm_backward(dpl_ctx *ctx, dpl_mat dy, dpl_mat x, const float *gain, const float *rstd,
                          size_t n_rows, size_t d, dpl_mat dx, bool accumulate, float *dgain) {
    const size_t mark = dpl_ctx_mark(ctx);
    // At most 64 chunks, so that the partial sums of dgain stay small beside the rows.
    const size_t grain = DPL_MAX(4, dpl_div_up(n_rows, 64));
    row_args a = {{norm_backward, n_rows, grain}, d, x, dy, dx, .weight = gain, .dgain = dgain};
    a.rstd = (float *)(uintptr_t)rstd;
    a.accumulate = accumulate;
    a.partial = dpl_ctx_alloc(ctx, dpl_div_up(n_rows, grain) * d * sizeof(float));
    submit_rows(ctx, &a, run_norm_backward, d);
    dpl_ctx_release(ctx, mark); // A deferred context keeps the block until the operator has run.
}

/* ---- RoPE ------------------------------------------------------------------------------------ */
typedef struct rope_args {
    dpl_loop loop;
    dpl_rope rope;
    dpl_mat x;
    float sign; // of the sine: -1 rotates back
} rope_args;

static void rope_rows(const void *args, const dpl_part *part) {
    const rope_args *a = args;
    const dpl_rope *r = &a->rope;
    const dpl_row_kernels *k = part->k;
    const size_t half = r->d_rope / 2;
    for (size_t row = part->first; row < part->end; row++) {
        const float *cos = r->cos + (size_t)r->position[row] * half;
        const float *sin = r->sin + (size_t)r->position[row] * half;
        for (size_t head = 0; head < r->n_heads; head++) {
            const size_t col = head * r->head_stride + r->first;
            float *x = dpl_row_target(a->x, row, col, part->scratch);
            dpl_row_load(k, a->x, row, col, r->d_rope, x);
            k->rope(cos, sin, a->sign, r->interleaved, x, half);
            dpl_row_store(k, a->x, row, col, x, r->d_rope);
        }
    }
}

void dpl_rope_apply(dpl_ctx *ctx, const dpl_rope *rope, size_t n_rows, bool inverse, dpl_mat x) {
    const size_t grain = dpl_row_grain(rope->n_heads * rope->d_rope * 4);
    const rope_args args = {{rope_rows, n_rows, grain}, *rope, x, inverse ? -1.0f : 1.0f};
    DPL_SUBMIT(ctx, dpl_run_loop, args, {0});
}

/* ---- add, zero ------------------------------------------------------------------------------- */
static void add_rows(const void *args, const dpl_part *part) {
    const row_args *x = args;
    float a_buf[DPL_ROW_BLOCK], b_buf[DPL_ROW_BLOCK];
    for (size_t row = part->first; row < part->end; row++) DPL_EACH_BLOCK(col, n, x->d) {
            const float *a = dpl_row_load(part->k, x->a, row, col, n, a_buf);
            const float *b = dpl_row_load(part->k, x->b, row, col, n, b_buf);
            float *out = dpl_row_target(x->out, row, col, a_buf);
            part->k->add(a, b, out, n);
            dpl_row_store(part->k, x->out, row, col, out, n);
        }
}

void dpl_add(dpl_ctx *ctx, dpl_mat a, dpl_mat b, size_t n_rows, size_t d, dpl_mat out) {
    const row_args args = {{add_rows, n_rows, dpl_row_grain(d * 8)}, d, a, b, .out = out};
    submit_rows(ctx, &args, dpl_run_loop, d);
}

typedef struct zero_args {
    dpl_loop loop;
    uint8_t *p;
} zero_args;

static void zero_bytes(const void *args, const dpl_part *part) {
    memset(((const zero_args *)args)->p + part->first, 0, part->end - part->first);
}

void dpl_zero(dpl_ctx *ctx, void *p, size_t bytes) {
    const zero_args args = {{zero_bytes, bytes, (size_t)256 << 10}, p};
    DPL_SUBMIT(ctx, dpl_run_loop, args, {p, bytes});
}

/* ---- copy, gather, embedding ----------------------------------------------------------------- */
typedef struct gather_args {
    dpl_loop loop;
    size_t d;
    dpl_mat from, to;
    bool in_panels;     // from is a weight of (n_from, d)
    const int32_t *map; // row r comes from row map[r] / top_k; NULL: from row r
    size_t top_k, n_from;
    const float *weights;
    float *row_weight;
} gather_args;

#define NO_ROW SIZE_MAX

// Where a row comes from; one that the map sends outside is a row of zeros.
static size_t source_of(const gather_args *a, size_t row) {
    if (!a->map) return row;
    if (row >= a->loop.n_rows || a->map[row] < 0) return NO_ROW;
    const size_t from = (size_t)a->map[row] / a->top_k;
    return from < a->n_from ? from : NO_ROW;
}

// Rows lie anywhere, so the hardware does not see the next one coming.
static void fetch_bytes(const void *p, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)p + i, 0, 2);
}

static void copy_row(const dpl_row_kernels *k, const void *x, dpl_dtype from, void *y, dpl_dtype to,
                     size_t d) {
    if (from == to) memcpy(y, x, d * dpl_dtype_bytes(to)); // the bits of a NaN stay, too
    else if (to == DPL_BF16) k->to_bf16(x, y, d);
    else k->from_bf16(x, y, d);
}

static void gather_panel_row(const gather_args *a, const dpl_row_kernels *k, size_t from,
                             size_t row) {
    float buf[DPL_ROW_BLOCK];
    const float *x = (const float *)a->from.p + dpl_panel_index(from, 0, a->d);
    DPL_EACH_BLOCK(col, n, a->d) {
        for (size_t i = 0; i < n; i++) buf[i] = x[(col + i) * DPL_PANEL];
        dpl_row_store(k, a->to, row, col, buf, n);
    }
}

static void move_row(const gather_args *a, const dpl_row_kernels *k, size_t from, size_t row) {
    if (from == NO_ROW) memset(dpl_mat_row(a->to, row), 0, a->d * dpl_dtype_bytes(a->to.dtype));
    else if (a->in_panels) gather_panel_row(a, k, from, row);
    else
        copy_row(k, dpl_mat_row(a->from, from), a->from.dtype, dpl_mat_row(a->to, row), a->to.dtype,
                 a->d);
}

static void gather_rows(const void *args, const dpl_part *part) {
    const gather_args *a = args;
    size_t next = source_of(a, part->first);
    for (size_t row = part->first; row < part->end; row++) {
        const size_t from = next;
        next = source_of(a, row + 1);
        if (next != NO_ROW && a->map && !a->in_panels)
            fetch_bytes(dpl_mat_row(a->from, next), a->d * dpl_dtype_bytes(a->from.dtype));
        if (a->d > 0) move_row(a, part->k, from, row);
        if (a->weights) a->row_weight[row] = from == NO_ROW ? 0 : a->weights[a->map[row]];
    }
}

static void gather(dpl_ctx *ctx, gather_args a, size_t n_rows) {
    a.loop = (dpl_loop){gather_rows, n_rows, dpl_row_grain(a.d * dpl_dtype_bytes(a.to.dtype))};
    DPL_SUBMIT(ctx, dpl_run_loop, a, dpl_row_span(a.to, n_rows, a.d),
               {a.row_weight, a.weights ? n_rows * sizeof *a.row_weight : 0});
}

void dpl_copy(dpl_ctx *ctx, dpl_mat src, size_t n_rows, size_t d, dpl_mat dst) {
    gather(ctx, (gather_args){.d = d, .from = src, .to = dst}, n_rows);
}

void dpl_gather_rows(dpl_ctx *ctx, dpl_mat x, const float *weights, const int32_t *row_slot,
                     size_t top_k, size_t n_rows, size_t d, dpl_mat rows, float *row_weight) {
    gather(ctx,
           (gather_args){{0}, d, x, rows, false, row_slot, top_k, SIZE_MAX, weights, row_weight},
           n_rows);
}

void dpl_embed_forward(dpl_ctx *ctx, const float *table, bool in_panels, const int32_t *ids,
                       size_t n_rows, size_t v, size_t d, dpl_mat y) {
    const dpl_mat from = dpl_mat_f32(table, d);
    gather(ctx, (gather_args){{0}, d, from, y, in_panels, ids, 1, v, NULL, NULL}, n_rows);
}

typedef struct embed_grad_args {
    dpl_loop loop; // over columns
    dpl_mat dy;
    const int32_t *ids;
    bool in_panels;
    size_t n_rows, v, d;
    float *dtable;
} embed_grad_args;

// A task owns columns and takes all rows in order: no two tasks add to the same element, whatever
// the ids, and a frequent id does not make one task the last.
#define EMBED_COLS 64

static void embed_backward(const void *args, const dpl_part *part) {
    const embed_grad_args *a = args;
    const size_t count = part->end - part->first;
    float buf[EMBED_COLS];
    for (size_t row = 0; row < a->n_rows; row++) {
        const int32_t signed_id = a->ids ? a->ids[row] : 0;
        if (signed_id < 0 || (size_t)signed_id >= a->v) continue;
        const size_t id = (size_t)signed_id;
        const float *dy = dpl_row_load(part->k, a->dy, row, part->first, count, buf);
        float *to = a->dtable + (a->in_panels ? dpl_panel_index(id, part->first, a->d)
                                              : id * a->d + part->first);
        if (a->in_panels)
            for (size_t i = 0; i < count; i++) to[i * DPL_PANEL] += dy[i];
        else part->k->add(to, dy, to, count);
    }
}

void dpl_embed_backward(dpl_ctx *ctx, dpl_mat dy, const int32_t *ids, bool in_panels, size_t n_rows,
                        size_t v, size_t d, float *dtable) {
    const embed_grad_args args = {
        {embed_backward, d, EMBED_COLS}, dy, ids, in_panels, n_rows, v, d, dtable};
    DPL_SUBMIT(ctx, dpl_run_loop, args, {0});
}

/* ---- combine, and rows of other ranks -------------------------------------------------------- */
typedef struct combine_args {
    dpl_loop loop;
    size_t d, top_k;
    dpl_mat rows, y;
    const float *row_value;
    const int32_t *slot_row;
    bool accumulate;
    float *slot_value;
    dpl_spread spread; // place NULL: all rows are in `rows`
} combine_args;

static void *spread_row(const dpl_spread *s, size_t slot, size_t d) {
    const dpl_place *place = &s->place[s->ids[slot]];
    const size_t row = (size_t)(s->slot_row[slot] + place->shift);
    return (uint8_t *)s->rows[place->rank] + row * d * dpl_dtype_bytes(s->dtype);
}

static bool is_here(const dpl_spread *s, size_t slot) {
    return s->rows[s->place[s->ids[slot]].rank] != NULL;
}

static float *spread_value(const dpl_spread *s, size_t slot) {
    const dpl_place *place = &s->place[s->ids[slot]];
    return s->values[place->rank] + s->slot_row[slot] + place->shift;
}

// Of the row of a slot, whose slot_row is not negative, column `col`.
static const void *slot_source(const combine_args *a, size_t slot, size_t col) {
    if (!a->spread.place) return dpl_mat_at(a->rows, (size_t)a->slot_row[slot], col).p;
    const uint8_t *row = spread_row(&a->spread, slot, a->d);
    return row + col * dpl_dtype_bytes(a->rows.dtype);
}

static float slot_number(const combine_args *a, size_t slot) {
    if (a->slot_row[slot] < 0) return 0;
    return a->spread.place ? *spread_value(&a->spread, slot) : a->row_value[a->slot_row[slot]];
}

// n columns of one token. `from` holds top_k pointers.
static void combine_block(const combine_args *a, const dpl_row_kernels *k, size_t token, size_t col,
                          size_t n, const void **from) {
    float buf[DPL_ROW_BLOCK], *to = dpl_row_target(a->y, token, col, buf);
    size_t n_from = 0;
    for (size_t slot = token * a->top_k; slot < (token + 1) * a->top_k; slot++)
        if (a->slot_row[slot] >= 0) from[n_from++] = slot_source(a, slot, col);
    if (n_from > 0) k->sum_rows(a->rows.dtype, from, n_from, a->accumulate, to, n);
    else if (!a->accumulate) memset(to, 0, n * sizeof *to);
    if (a->y.dtype == DPL_BF16) dpl_row_store(k, a->y, token, col, to, n);
}

static void combine_rows(const void *args, const dpl_part *part) {
    const combine_args *a = args;
    const size_t row_bytes = a->d * dpl_dtype_bytes(a->rows.dtype);
    for (size_t token = part->first; token < part->end; token++) {
        for (size_t slot = (token + 1) * a->top_k; slot < (token + 2) * a->top_k; slot++)
            if (token + 1 < part->end && a->slot_row[slot] >= 0)
                fetch_bytes(slot_source(a, slot, 0), row_bytes);
        DPL_EACH_BLOCK(col, n, a->d)
        combine_block(a, part->k, token, col, n, part->scratch);
        if (!a->slot_value) continue;
        for (size_t slot = token * a->top_k; slot < (token + 1) * a->top_k; slot++)
            a->slot_value[slot] = slot_number(a, slot);
    }
}

static void combine(dpl_ctx *ctx, combine_args a, size_t n_tokens) {
    const size_t grain = dpl_row_grain(a.d * a.top_k * dpl_dtype_bytes(a.rows.dtype));
    a.loop = (dpl_loop){combine_rows, n_tokens, grain};
    DPL_SUBMIT(ctx, dpl_run_loop, a, span_unless(a.accumulate, a.y, n_tokens, a.d),
               {a.slot_value, a.slot_value ? n_tokens * a.top_k * sizeof *a.slot_value : 0});
}

void dpl_combine_rows(dpl_ctx *ctx, dpl_mat rows, const float *row_value, const int32_t *slot_row,
                      size_t n_tokens, size_t top_k, size_t d, bool accumulate, dpl_mat y,
                      float *slot_value) {
    combine(ctx,
            (combine_args){{0},
                           d,
                           top_k,
                           rows,
                           y,
                           row_value,
                           slot_row,
                           accumulate,
                           row_value ? slot_value : NULL,
                           {0}},
            n_tokens);
}

void dpl_combine_spread(dpl_ctx *ctx, const dpl_spread *from, size_t n_tokens, size_t top_k,
                        size_t d, bool accumulate, dpl_mat y, float *slot_value) {
    const dpl_mat rows = {NULL, d, from->dtype};
    combine(
        ctx,
        (combine_args){{0}, d, top_k, rows, y, NULL, from->slot_row, accumulate, slot_value, *from},
        n_tokens);
}

typedef struct scatter_args {
    dpl_loop loop;
    size_t d, top_k;
    dpl_mat x;
    const float *weights;
    dpl_spread to;
} scatter_args;

// A token is read once and written to each of its experts.
static void scatter_rows(const void *args, const dpl_part *part) {
    const scatter_args *a = args;
    for (size_t slot = part->first * a->top_k; slot < part->end * a->top_k; slot++) {
        if (a->to.slot_row[slot] < 0 || !is_here(&a->to, slot)) continue;
        const void *x = dpl_mat_row(a->x, slot / a->top_k);
        if (a->d > 0)
            copy_row(part->k, x, a->x.dtype, spread_row(&a->to, slot, a->d), a->to.dtype, a->d);
        if (a->to.values) *spread_value(&a->to, slot) = a->weights[slot];
    }
}

void dpl_scatter_rows(dpl_ctx *ctx, dpl_mat x, const float *weights, const dpl_spread *to,
                      size_t n_tokens, size_t top_k, size_t d) {
    const size_t grain = dpl_row_grain(d * top_k * dpl_dtype_bytes(x.dtype));
    const scatter_args a = {{scatter_rows, n_tokens, grain}, d, top_k, x, weights, *to};
    DPL_SUBMIT(ctx, dpl_run_loop, a, {0});
}

/* ---- cross-entropy --------------------------------------------------------------------------- */
typedef struct xent_args {
    dpl_loop loop;
    float *logits;
    size_t ld, v;
    const int32_t *targets;
    float z, dscale;
    float *loss, *zloss;
} xent_args;

static void xent_row(const xent_args *a, const dpl_row_kernels *k, size_t row) {
    float *x = a->logits + row * a->ld, buf[DPL_ROW_BLOCK];
    const int32_t target = a->targets[row];
    if (target < 0) {
        a->loss[row] = a->zloss[row] = 0.0f;
        if (a->dscale != 0.0f) memset(x, 0, a->v * sizeof *x);
        return;
    }
    const float max = k->max(x, a->v);
    const double x_target = (double)x[target];
    double sum = 0;
    // exp(logit - max) never overflows. With a gradient wanted it replaces the logits.
    DPL_EACH_BLOCK(col, n, a->v) {
        sum += (double)k->exp_sub_sum(x + col, max, a->dscale != 0 ? x + col : buf, n);
    }
    const double log_sum = log(sum), lse = (double)max + log_sum;
    a->loss[row] = (float)((double)max - x_target + log_sum);
    a->zloss[row] = a->z != 0.0f ? (float)((double)a->z * lse * lse) : 0.0f;
    if (a->dscale == 0.0f) return;
    // d lse / dx = p, so d(loss + zloss) / dx = (1 + 2 z lse) p - [x is the target]
    const double slope = a->z != 0.0f ? 1.0 + 2.0 * (double)a->z * lse : 1.0;
    k->scale((float)((double)a->dscale * slope / sum), x, a->v);
    x[target] -= a->dscale;
}

static void xent_rows(const void *args, const dpl_part *part) {
    for (size_t row = part->first; row < part->end; row++) xent_row(args, part->k, row);
}

void dpl_xent(dpl_ctx *ctx, float *logits, size_t ld, const int32_t *targets, size_t n_rows,
              size_t v, float z, float dscale, float *loss, float *zloss) {
    const xent_args args = {
        {xent_rows, n_rows, dpl_row_grain(v * 4)}, logits, ld, v, targets, z, dscale, loss, zloss};
    DPL_SUBMIT(ctx, dpl_run_loop, args, {loss, n_rows * sizeof *loss},
               {zloss, n_rows * sizeof *zloss});
}
