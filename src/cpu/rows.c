/*
 * rows.c - the operators that work row by row: norm, rotation, SwiGLU, add, copy, embedding, loss.
 *
 * Each handles fp32 and bf16 with one code path: a row is taken in blocks of DPL_ROW_BLOCK columns,
 * converted on the way into and out of a small buffer where it is bf16 (row_io.h). Sums over rows go
 * in chunks that depend on the shape alone, so the thread count never changes a bit.
 */
#include <math.h>

#include "cpu/row_io.h"

// What the arguments of each operator here start with: it runs fn on chunks of `grain` rows.
typedef struct row_op {
    const dpl_row_kernels *k;
    dpl_rows_fn fn;
    size_t n_rows, grain;
} row_op;

static row_op op_of(const dpl_ctx *ctx, dpl_rows_fn fn, size_t n_rows, size_t grain)
{
    return (row_op){&ctx->kernels->rows, fn, n_rows, grain};
}

static void run_op(dpl_ctx *ctx, const void *args)
{
    const row_op *op = args;
    dpl_ctx_rows(ctx, op->n_rows, op->grain, op->fn, (void *)(uintptr_t)args);
}

// Columns of the block that starts at `col`.
static size_t block_cols(size_t col, size_t d)
{
    return DPL_MIN((size_t)DPL_ROW_BLOCK, d - col);
}

// An output is listed for poisoning unless the operator also reads it.
static dpl_span span_unless(bool is_read, dpl_mat m, size_t n_rows, size_t d)
{
    return is_read ? (dpl_span){m.p, 0} : dpl_row_span(m, n_rows, d);
}

/* ---- RMSNorm ------------------------------------------------------------------------------------ */

typedef struct norm_args {
    row_op op;
    dpl_mat x, y, dy, dx;
    const float *gain, *rstd;
    float *rstd_out, *dgain;
    float *partial; // (chunks, d) sums of dgain
    size_t d;
    float eps;
    bool accumulate;
} norm_args;

static void norm_forward_rows(void *p, size_t first, size_t count, size_t i_chunk, int i_thread)
{
    const norm_args *a = p;
    (void)i_chunk, (void)i_thread;
    float buf[DPL_ROW_BLOCK];
    for (size_t row = first; row < first + count; row++) {
        double squares = 0;
        for (size_t col = 0; col < a->d; col += DPL_ROW_BLOCK) {
            const size_t n = block_cols(col, a->d);
            const float *x = dpl_row_load(a->op.k, dpl_mat_at(a->x, 0, col), row, n, buf);
            squares += (double)a->op.k->dot(x, x, n);
        }
        const float rstd = (float)(1.0 / sqrt(squares / (double)a->d + (double)a->eps));
        a->rstd_out[row] = rstd;
        for (size_t col = 0; col < a->d; col += DPL_ROW_BLOCK) {
            const size_t n = block_cols(col, a->d);
            const float *x = dpl_row_load(a->op.k, dpl_mat_at(a->x, 0, col), row, n, buf);
            float *y = dpl_row_target(dpl_mat_at(a->y, 0, col), row, buf);
            a->op.k->norm_forward(x, a->gain + col, rstd, y, n);
            dpl_row_store(a->op.k, dpl_mat_at(a->y, 0, col), row, y, n);
        }
    }
}

void dpl_rmsnorm_forward(dpl_ctx *ctx, dpl_mat x, const float *gain, size_t n_rows, size_t d,
                         float eps, dpl_mat y, float *rstd)
{
    const norm_args args = {.op = op_of(ctx, norm_forward_rows, n_rows, dpl_row_grain(d * 4)),
                            .x = x,
                            .y = y,
                            .gain = gain,
                            .rstd_out = rstd,
                            .d = d,
                            .eps = eps};
    const dpl_span outputs[] = {span_unless(y.p == x.p, y, n_rows, d),
                                {rstd, n_rows * sizeof *rstd}};
    dpl_ctx_submit(ctx, run_op, &args, sizeof args, outputs, DPL_COUNT(outputs));
}

static void norm_backward_row(const norm_args *a, size_t row, float *dgain)
{
    float buf[DPL_ROW_BLOCK], dy_buf[DPL_ROW_BLOCK];
    double dot = 0;
    for (size_t col = 0; col < a->d; col += DPL_ROW_BLOCK) {
        const size_t n = block_cols(col, a->d);
        const float *x = dpl_row_load(a->op.k, dpl_mat_at(a->x, 0, col), row, n, buf);
        const float *dy = dpl_row_load(a->op.k, dpl_mat_at(a->dy, 0, col), row, n, dy_buf);
        dot += (double)a->op.k->norm_dot(dy, a->gain + col, x, n);
    }
    const double rstd = (double)a->rstd[row];
    const float c = (float)(rstd * rstd * rstd * dot / (double)a->d);
    for (size_t col = 0; col < a->d; col += DPL_ROW_BLOCK) {
        const size_t n = block_cols(col, a->d);
        const dpl_mat to = dpl_mat_at(a->dx, 0, col);
        const float *x = dpl_row_load(a->op.k, dpl_mat_at(a->x, 0, col), row, n, buf);
        const float *dy = dpl_row_load(a->op.k, dpl_mat_at(a->dy, 0, col), row, n, dy_buf);
        float *dx = dpl_row_target(to, row, buf);
        a->op.k->norm_backward(dy, a->gain + col, x, a->rstd[row], c, a->accumulate, dx,
                               dgain + col, n);
        dpl_row_store(a->op.k, to, row, dx, n);
    }
}

static void norm_backward_rows(void *p, size_t first, size_t count, size_t i_chunk, int i_thread)
{
    const norm_args *a = p;
    (void)i_thread;
    float *dgain = a->partial + i_chunk * a->d;
    memset(dgain, 0, a->d * sizeof *dgain);
    for (size_t row = first; row < first + count; row++)
        norm_backward_row(a, row, dgain);
}

static void add_partials(void *p, size_t first, size_t count, size_t i_chunk, int i_thread)
{
    const norm_args *a = p;
    (void)i_chunk, (void)i_thread;
    const size_t n_chunks = dpl_div_up(a->op.n_rows, a->op.grain);
    float *dgain = a->dgain + first;
    for (size_t chunk = 0; chunk < n_chunks; chunk++)
        a->op.k->add(dgain, a->partial + chunk * a->d + first, dgain, count);
}

static void run_norm_backward(dpl_ctx *ctx, const void *args)
{
    const norm_args *a = args;
    run_op(ctx, args);
    dpl_ctx_rows(ctx, a->d, 256, add_partials, (void *)(uintptr_t)args);
}

void dpl_rmsnorm_backward(dpl_ctx *ctx, dpl_mat dy, dpl_mat x, const float *gain, const float *rstd,
                          size_t n_rows, size_t d, dpl_mat dx, bool accumulate, float *dgain)
{
    const size_t mark = dpl_ctx_mark(ctx);
    // At most 64 chunks, so that the partial sums of dgain stay small beside the rows.
    const size_t grain = DPL_MAX(4, dpl_div_up(n_rows, 64)), n_chunks = dpl_div_up(n_rows, grain);
    const norm_args args = {.op = op_of(ctx, norm_backward_rows, n_rows, grain),
                            .x = x,
                            .dy = dy,
                            .dx = dx,
                            .gain = gain,
                            .rstd = rstd,
                            .dgain = dgain,
                            .partial = dpl_ctx_alloc(ctx, n_chunks * d * sizeof(float)),
                            .d = d,
                            .accumulate = accumulate};
    const bool is_read = accumulate || dx.p == dy.p || dx.p == x.p;
    const dpl_span outputs[] = {span_unless(is_read, dx, n_rows, d)};
    dpl_ctx_submit(ctx, run_norm_backward, &args, sizeof args, outputs, DPL_COUNT(outputs));
    dpl_ctx_release(ctx, mark); // A deferred context keeps the block until the operator has run.
}

/* ---- RoPE --------------------------------------------------------------------------------------- */

typedef struct rope_args {
    row_op op;
    dpl_rope rope;
    dpl_mat x;
    float sign; // of the sine: -1 rotates back
} rope_args;

// Blocks of pairs, so that heads of any width fit the buffers.
static void rope_head(const rope_args *a, dpl_mat head, size_t row, const float *cos,
                      const float *sin)
{
    const size_t half = a->rope.d_rope / 2, block = DPL_ROW_BLOCK / 2;
    float buf[DPL_ROW_BLOCK];
    for (size_t i = 0; i < half; i += block) {
        const size_t n = DPL_MIN(block, half - i);
        if (a->rope.interleaved) {
            const dpl_mat at = dpl_mat_at(head, 0, 2 * i);
            float *x = dpl_row_target(at, row, buf);
            dpl_row_load(a->op.k, at, row, 2 * n, buf);
            a->op.k->rope_pairs(cos + i, sin + i, a->sign, x, n);
            dpl_row_store(a->op.k, at, row, x, 2 * n);
        } else {
            const dpl_mat at = dpl_mat_at(head, 0, i), at_hi = dpl_mat_at(head, 0, half + i);
            float *lo = dpl_row_target(at, row, buf);
            float *hi = dpl_row_target(at_hi, row, buf + block);
            dpl_row_load(a->op.k, at, row, n, buf);
            dpl_row_load(a->op.k, at_hi, row, n, buf + block);
            a->op.k->rope_split(cos + i, sin + i, a->sign, lo, hi, n);
            dpl_row_store(a->op.k, at, row, lo, n);
            dpl_row_store(a->op.k, at_hi, row, hi, n);
        }
    }
}

static void rope_rows(void *p, size_t first, size_t count, size_t i_chunk, int i_thread)
{
    const rope_args *a = p;
    const dpl_rope *r = &a->rope;
    (void)i_chunk, (void)i_thread;
    for (size_t row = first; row < first + count; row++) {
        const size_t angle = (size_t)r->position[row] * (r->d_rope / 2);
        for (size_t head = 0; head < r->n_heads; head++)
            rope_head(a, dpl_mat_at(a->x, 0, head * r->head_stride + r->first), row, r->cos + angle,
                      r->sin + angle);
    }
}

void dpl_rope_apply(dpl_ctx *ctx, const dpl_rope *rope, size_t n_rows, bool inverse, dpl_mat x)
{
    const rope_args args = {
        .op = op_of(ctx, rope_rows, n_rows, dpl_row_grain(rope->n_heads * rope->d_rope * 4)),
        .rope = *rope,
        .x = x,
        .sign = inverse ? -1.0f : 1.0f};
    dpl_ctx_submit(ctx, run_op, &args, sizeof args, NULL, 0);
}

/* ---- SwiGLU ------------------------------------------------------------------------------------- */

typedef struct swiglu_args {
    row_op op;
    dpl_mat gate_up, h, dh, dgate_up;
    const float *row_weight;
    float *drow_weight;
    size_t f;
} swiglu_args;

#define SWIGLU_BLOCK (DPL_ROW_BLOCK / 2) // columns of h; twice as many of gate_up

static void swiglu_forward_rows(void *p, size_t first, size_t count, size_t i_chunk, int i_thread)
{
    const swiglu_args *a = p;
    (void)i_chunk, (void)i_thread;
    float buf[DPL_ROW_BLOCK], h_buf[SWIGLU_BLOCK];
    for (size_t row = first; row < first + count; row++) {
        const float w = a->row_weight ? a->row_weight[row] : 1.0f;
        for (size_t col = 0; col < a->f; col += SWIGLU_BLOCK) {
            const size_t n = DPL_MIN((size_t)SWIGLU_BLOCK, a->f - col);
            const dpl_mat from = dpl_mat_at(a->gate_up, 0, 2 * col), to = dpl_mat_at(a->h, 0, col);
            const float *gate_up = dpl_row_load(a->op.k, from, row, dpl_gate_up_width(n), buf);
            float *h = dpl_row_target(to, row, h_buf);
            a->op.k->swiglu_forward(gate_up, w, h, n);
            dpl_row_store(a->op.k, to, row, h, n);
        }
    }
}

void dpl_swiglu_forward(dpl_ctx *ctx, dpl_mat gate_up, const float *row_weight, size_t n_rows,
                        size_t f, dpl_mat h)
{
    const swiglu_args args = {.op = op_of(ctx, swiglu_forward_rows, n_rows, dpl_row_grain(f * 8)),
                              .gate_up = gate_up,
                              .row_weight = row_weight,
                              .f = f,
                              .h = h};
    const dpl_span outputs[] = {dpl_row_span(h, n_rows, f)};
    dpl_ctx_submit(ctx, run_op, &args, sizeof args, outputs, DPL_COUNT(outputs));
}

static void swiglu_backward_rows(void *p, size_t first, size_t count, size_t i_chunk, int i_thread)
{
    const swiglu_args *a = p;
    (void)i_chunk, (void)i_thread;
    float buf[DPL_ROW_BLOCK], dh_buf[SWIGLU_BLOCK];
    for (size_t row = first; row < first + count; row++) {
        const float w = a->row_weight ? a->row_weight[row] : 1.0f;
        double dw = 0;
        for (size_t col = 0; col < a->f; col += SWIGLU_BLOCK) {
            const size_t n = DPL_MIN((size_t)SWIGLU_BLOCK, a->f - col),
                         width = dpl_gate_up_width(n);
            const dpl_mat to = dpl_mat_at(a->dgate_up, 0, 2 * col);
            const float *gate_up = dpl_row_load(a->op.k, dpl_mat_at(a->gate_up, 0, 2 * col), row,
                                                width, buf);
            const float *dh = dpl_row_load(a->op.k, dpl_mat_at(a->dh, 0, col), row, n, dh_buf);
            float *dgate_up = dpl_row_target(to, row, buf);
            dw += (double)a->op.k->swiglu_backward(dh, gate_up, w, dgate_up, n);
            dpl_row_store(a->op.k, to, row, dgate_up, width);
        }
        if (a->drow_weight) a->drow_weight[row] = (float)dw;
    }
}

void dpl_swiglu_backward(dpl_ctx *ctx, dpl_mat dh, dpl_mat gate_up, const float *row_weight,
                         size_t n_rows, size_t f, dpl_mat dgate_up, float *drow_weight)
{
    const swiglu_args args = {.op = op_of(ctx, swiglu_backward_rows, n_rows, dpl_row_grain(f * 8)),
                              .dh = dh,
                              .gate_up = gate_up,
                              .row_weight = row_weight,
                              .f = f,
                              .dgate_up = dgate_up,
                              .drow_weight = drow_weight};
    const dpl_span outputs[] = {
        span_unless(dgate_up.p == gate_up.p, dgate_up, n_rows, dpl_gate_up_width(f)),
        {drow_weight, drow_weight ? n_rows * sizeof *drow_weight : 0}};
    dpl_ctx_submit(ctx, run_op, &args, sizeof args, outputs, DPL_COUNT(outputs));
}

/* ---- add, copy, zero ---------------------------------------------------------------------------- */

typedef struct add_args {
    row_op op;
    dpl_mat a, b, out;
    size_t d;
} add_args;

static void add_rows(void *p, size_t first, size_t count, size_t i_chunk, int i_thread)
{
    const add_args *args = p;
    const dpl_row_kernels *k = args->op.k;
    (void)i_chunk, (void)i_thread;
    float a_buf[DPL_ROW_BLOCK], b_buf[DPL_ROW_BLOCK];
    for (size_t row = first; row < first + count; row++)
        for (size_t col = 0; col < args->d; col += DPL_ROW_BLOCK) {
            const size_t n = block_cols(col, args->d);
            const dpl_mat to = dpl_mat_at(args->out, 0, col);
            const float *a = dpl_row_load(k, dpl_mat_at(args->a, 0, col), row, n, a_buf);
            const float *b = dpl_row_load(k, dpl_mat_at(args->b, 0, col), row, n, b_buf);
            float *out = dpl_row_target(to, row, a_buf);
            k->add(a, b, out, n);
            dpl_row_store(k, to, row, out, n);
        }
}

void dpl_add(dpl_ctx *ctx, dpl_mat a, dpl_mat b, size_t n_rows, size_t d, dpl_mat out)
{
    const add_args args = {.op = op_of(ctx, add_rows, n_rows, dpl_row_grain(d * 8)),
                           .a = a,
                           .b = b,
                           .out = out,
                           .d = d};
    const dpl_span outputs[] = {span_unless(out.p == a.p || out.p == b.p, out, n_rows, d)};
    dpl_ctx_submit(ctx, run_op, &args, sizeof args, outputs, DPL_COUNT(outputs));
}

static void copy_rows(void *p, size_t first, size_t count, size_t i_chunk, int i_thread)
{
    const add_args *args = p;
    (void)i_chunk, (void)i_thread;
    float buf[DPL_ROW_BLOCK];
    for (size_t row = first; row < first + count; row++)
        for (size_t col = 0; col < args->d; col += DPL_ROW_BLOCK) {
            const size_t n = block_cols(col, args->d);
            const dpl_mat from = dpl_mat_at(args->a, 0, col), to = dpl_mat_at(args->out, 0, col);
            if (from.dtype == to.dtype) // No round trip: the bits of a NaN stay, too.
                memcpy(dpl_mat_row(to, row), dpl_mat_row(from, row), n * dpl_dtype_bytes(to.dtype));
            else
                dpl_row_store(args->op.k, to, row, dpl_row_load(args->op.k, from, row, n, buf), n);
        }
}

void dpl_copy(dpl_ctx *ctx, dpl_mat src, size_t n_rows, size_t d, dpl_mat dst)
{
    const add_args args = {
        .op = op_of(ctx, copy_rows, n_rows, dpl_row_grain(d * 4)), .a = src, .out = dst, .d = d};
    const dpl_span outputs[] = {dpl_row_span(dst, n_rows, d)};
    dpl_ctx_submit(ctx, run_op, &args, sizeof args, outputs, DPL_COUNT(outputs));
}

static void zero_bytes(void *p, size_t first, size_t count, size_t i_chunk, int i_thread)
{
    const dpl_span *span = p;
    (void)i_chunk, (void)i_thread;
    memset((uint8_t *)span->p + first, 0, count);
}

static void run_zero(dpl_ctx *ctx, const void *args)
{
    dpl_span span = *(const dpl_span *)args;
    dpl_ctx_rows(ctx, span.bytes, (size_t)256 << 10, zero_bytes, &span);
}

void dpl_zero(dpl_ctx *ctx, void *p, size_t bytes)
{
    const dpl_span span = {p, bytes};
    dpl_ctx_submit(ctx, run_zero, &span, sizeof span, &span, 1);
}

/* ---- embedding ---------------------------------------------------------------------------------- */

typedef struct embed_args {
    row_op op;
    const float *table;
    float *dtable;
    dpl_mat y, dy;
    const int32_t *ids;
    size_t n_rows, v, d; // backward runs on columns, so op.n_rows is d
    bool in_panels;
} embed_args;

// Element 0 of an id's row; its next columns follow at *stride.
static size_t embed_index(const embed_args *a, int32_t id, size_t *stride)
{
    *stride = a->in_panels ? DPL_PANEL : 1;
    return a->in_panels ? dpl_panel_index((size_t)id, 0, a->d) : (size_t)id * a->d;
}

// An id outside the table is a row of zeros without a gradient.
static bool in_table(const embed_args *a, int32_t id)
{
    return id >= 0 && (size_t)id < a->v;
}

static void embed_forward_rows(void *p, size_t first, size_t count, size_t i_chunk, int i_thread)
{
    const embed_args *a = p;
    (void)i_chunk, (void)i_thread;
    float buf[DPL_ROW_BLOCK];
    for (size_t row = first; row < first + count; row++) {
        const int32_t id = a->ids[row];
        for (size_t col = 0; col < a->d; col += DPL_ROW_BLOCK) {
            const size_t n = block_cols(col, a->d);
            const float *x = buf;
            if (!in_table(a, id)) {
                memset(buf, 0, n * sizeof *buf);
            } else {
                size_t stride;
                const float *from = a->table + embed_index(a, id, &stride) + col * stride;
                if (stride == 1)
                    x = from;
                else
                    for (size_t i = 0; i < n; i++)
                        buf[i] = from[i * stride];
            }
            dpl_row_store(a->op.k, dpl_mat_at(a->y, 0, col), row, x, n);
        }
    }
}

void dpl_embed_forward(dpl_ctx *ctx, const float *table, bool in_panels, const int32_t *ids,
                       size_t n_rows, size_t v, size_t d, dpl_mat y)
{
    const embed_args args = {.op = op_of(ctx, embed_forward_rows, n_rows, dpl_row_grain(d * 4)),
                             .table = table,
                             .in_panels = in_panels,
                             .ids = ids,
                             .v = v,
                             .d = d,
                             .y = y};
    const dpl_span outputs[] = {dpl_row_span(y, n_rows, d)};
    dpl_ctx_submit(ctx, run_op, &args, sizeof args, outputs, DPL_COUNT(outputs));
}

// A task owns columns and takes all rows in order: no two tasks add to the same element, whatever
// the ids, and a frequent id does not make one task the last.
#define EMBED_COLS 64

static void embed_backward_cols(void *p, size_t first, size_t count, size_t i_chunk, int i_thread)
{
    const embed_args *a = p;
    (void)i_chunk, (void)i_thread;
    float buf[EMBED_COLS];
    const dpl_mat from = dpl_mat_at(a->dy, 0, first);
    for (size_t row = 0; row < a->n_rows; row++) {
        const int32_t id = a->ids[row];
        if (!in_table(a, id)) continue;
        const float *dy = dpl_row_load(a->op.k, from, row, count, buf);
        size_t stride;
        float *to = a->dtable + embed_index(a, id, &stride);
        to += first * stride;
        if (stride == 1)
            a->op.k->add(to, dy, to, count);
        else
            for (size_t i = 0; i < count; i++)
                to[i * stride] += dy[i];
    }
}

void dpl_embed_backward(dpl_ctx *ctx, dpl_mat dy, const int32_t *ids, bool in_panels, size_t n_rows,
                        size_t v, size_t d, float *dtable)
{
    const embed_args args = {.op = op_of(ctx, embed_backward_cols, d, EMBED_COLS),
                             .dy = dy,
                             .ids = ids,
                             .in_panels = in_panels,
                             .n_rows = n_rows,
                             .v = v,
                             .d = d,
                             .dtable = dtable};
    dpl_ctx_submit(ctx, run_op, &args, sizeof args, NULL, 0);
}

/* ---- cross-entropy ------------------------------------------------------------------------------ */

typedef struct xent_args {
    row_op op;
    float *logits;
    size_t ld;
    const int32_t *targets;
    size_t v;
    float z, dscale;
    float *loss, *zloss;
} xent_args;

// exp(logit - max) never overflows. With a gradient wanted it replaces the logits, else it only
// passes through a buffer.
static double xent_sum(const xent_args *a, float *x, float max)
{
    float buf[DPL_ROW_BLOCK];
    double sum = 0;
    for (size_t col = 0; col < a->v; col += DPL_ROW_BLOCK) {
        float *to = a->dscale != 0.0f ? x + col : buf;
        sum += (double)a->op.k->exp_sub_sum(x + col, max, to, block_cols(col, a->v));
    }
    return sum;
}

static void xent_row(const xent_args *a, size_t row)
{
    float *x = a->logits + row * a->ld;
    const int32_t target = a->targets[row];
    if (target < 0) {
        a->loss[row] = a->zloss[row] = 0.0f;
        if (a->dscale != 0.0f) memset(x, 0, a->v * sizeof *x);
        return;
    }
    const float max = a->op.k->max(x, a->v);
    const double x_target = (double)x[target];
    const double sum = xent_sum(a, x, max);
    const double lse = (double)max + log(sum);
    a->loss[row] = (float)((double)max - x_target + log(sum));
    a->zloss[row] = a->z != 0.0f ? (float)((double)a->z * lse * lse) : 0.0f;
    if (a->dscale == 0.0f) return;
    // d lse / dx = p, so d(loss + zloss) / dx = (1 + 2 z lse) p - [x is the target]
    const double slope = a->z != 0.0f ? 1.0 + 2.0 * (double)a->z * lse : 1.0;
    a->op.k->scale((float)((double)a->dscale * slope / sum), x, a->v);
    x[target] -= a->dscale;
}

static void xent_rows(void *p, size_t first, size_t count, size_t i_chunk, int i_thread)
{
    (void)i_chunk, (void)i_thread;
    for (size_t row = first; row < first + count; row++)
        xent_row(p, row);
}

void dpl_xent(dpl_ctx *ctx, float *logits, size_t ld, const int32_t *targets, size_t n_rows,
              size_t v, float z, float dscale, float *loss, float *zloss)
{
    const xent_args args = {.op = op_of(ctx, xent_rows, n_rows, dpl_row_grain(v * 4)),
                            .logits = logits,
                            .ld = ld,
                            .targets = targets,
                            .v = v,
                            .z = z,
                            .dscale = dscale,
                            .loss = loss,
                            .zloss = zloss};
    const dpl_span outputs[] = {{loss, n_rows * sizeof *loss}, {zloss, n_rows * sizeof *zloss}};
    dpl_ctx_submit(ctx, run_op, &args, sizeof args, outputs, DPL_COUNT(outputs));
}
