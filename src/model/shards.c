// shards.c - parameters over the ranks of fsdp, and gradients over all ranks: what a pass needs is
// gathered one unit ahead of its use, what it leaves is added up behind it.
//
// A pass meets its units in an order that all ranks know beforehand. So a rank that cannot go on
// takes the rest of the way without computing, and the others come to where all agree that it
// failed. Exchanges are started before the operators of a unit and waited for after them.
//
// Sums go in the order of ranks: over fsdp, each rank its piece, then over the ranks that have the
// same piece. The last unit's three exchanges have nothing left to hide under.
#include "model/model.h"

#define LINE 64
#define ROOT 0 // outside of layers: needed from the first to the last moment of a pass

typedef struct slot { // memory for one unit that is whole
    size_t unit;      // whose weights are there or on their way; NO_UNIT: none
    bool comes;
    float *values, *grad;
    uint16_t *copy;
    uint8_t *codes; // of its quantized weights
    dpl_ticket tickets[DPL_SPAN_N];
} slot;

// The exchanges of a unit's gradients, one after the other.
typedef enum stage { SCATTER, REDUCE, HAND_OUT, N_STAGES } stage;

#define NO_UNIT SIZE_MAX

struct dpl_flow {
    bool active, train, last;
    bool replaces; // gradients: the first micro-batch of a step
    size_t n_units, at;
    size_t open;      // entered on the way back and not left; NO_UNIT: none
    slot slots[3];    // of layers, in turn; the third has the root
    float *scattered; // pieces of all fsdp ranks: as large as a unit
    float *reduced;   // parts of all replicas: as large as a piece
    size_t in[N_STAGES];
    dpl_ticket tickets[N_STAGES][DPL_SPAN_N];
};

static bool is_sharded(const dpl_model *m) {
    return m->others.fsdp->n_ranks > 1;
}

static dpl_comm *comm_of(const dpl_model *m, const dpl_span_of *span, stage i) {
    return i == SCATTER ? m->others.fsdp : span->replicas;
}

/* ---- memory ---- */
static bool open_slot(const dpl_model *m, size_t elems, slot *s) {
    s->unit = NO_UNIT;
    s->values = dpl_alloc_array(elems, sizeof *s->values);
    s->grad = dpl_alloc_array(elems, sizeof *s->grad);
    if (m->dtype == DPL_BF16) s->copy = dpl_alloc_array(elems, sizeof *s->copy);
    return s->values && s->grad && (s->copy || m->dtype != DPL_BF16);
}

static bool has_replicas(const dpl_model *m) {
    return m->others.dense->n_ranks > 1 || m->others.replicas->n_ranks > 1;
}

// Memory is used as it is touched: what a type of compute or a model without training leaves alone
// costs nothing.
dpl_status dpl_shards_open(dpl_model *m) {
    const dpl_params *p = &m->params;
    size_t most = 0; // of a layer
    for (size_t u = 1; u < p->n_units; u++) most = DPL_MAX(most, p->units[u].elems);
    dpl_flow *f = m->flow = dpl_alloc(sizeof *f);
    bool there = f != NULL;
    for (int i = 0; i < 3 && there && is_sharded(m); i++)
        there = open_slot(m, i < 2 ? most : p->units[ROOT].elems, &f->slots[i]);
    most = DPL_MAX(most, p->units[ROOT].elems);
    if (there && is_sharded(m)) there = (f->scattered = dpl_alloc_array(most, sizeof(float)));
    if (there && has_replicas(m))
        there = (f->reduced = dpl_alloc_array(most / dpl_model_shards(m), sizeof(float)));
    DPL_EXPECT(there, DPL_ENOMEM, "no memory for the %zu parameters of a layer", most);
    for (size_t u = 0; u < p->n_units && !is_sharded(m); u++) {
        p->units[u].values = p->master + p->units[u].first;
        if (p->copy) p->units[u].copy = p->copy + p->units[u].first;
    }
    for (int i = 0; i < N_STAGES; i++) f->in[i] = NO_UNIT;
    return DPL_OK;
}

void dpl_shards_close(dpl_model *m) {
    if (!m->flow) return;
    for (slot *s = m->flow->slots; s < m->flow->slots + 3; s++) {
        dpl_free(s->values);
        dpl_free(s->grad);
        dpl_free(s->copy);
        dpl_free(s->codes);
    }
    dpl_free(m->flow->scattered);
    dpl_free(m->flow->reduced);
    dpl_free(m->flow);
}

// Gives the quantized weights of a unit their places from `at` on (NULL: none). Returns the bytes.
static size_t place_codes(dpl_model *m, size_t u, uint8_t *at) {
    size_t bytes = 0;
    for (dpl_param *p = m->params.list; p < m->params.list + m->params.n; p++) {
        if (!p->quantized || p->layer + 1 != (int)u) continue;
        const dpl_code f = p->quant.rule.format;
        const size_t codes = dpl_quant_code_bytes(f, p->n_groups, p->n, p->k);
        const size_t scales = dpl_quant_scale_bytes(f, p->n_groups, p->n, p->k);
        for (int way = 0; way < 2; way++) {
            if (at) p->quant.codes[way] = at + bytes;
            bytes += dpl_round_up(codes, LINE);
            if (at) p->quant.scales[way] = at + bytes;
            bytes += dpl_round_up(scales, LINE);
        }
        if (at) p->quant.tensor_scale = (float *)(void *)(at + bytes);
        bytes += dpl_round_up(p->n_groups * sizeof(float), LINE);
    }
    return bytes;
}

dpl_status dpl_shards_quantize(dpl_model *m, size_t *bytes_out) {
    size_t most = 0;
    *bytes_out = 0;
    for (size_t u = 1; u < m->params.n_units; u++) most = DPL_MAX(most, place_codes(m, u, NULL));
    for (int i = 0; i < 2; i++) { // nothing outside of layers is quantized
        m->flow->slots[i].codes = dpl_alloc(most);
        DPL_EXPECT(m->flow->slots[i].codes, DPL_ENOMEM, "no memory for %.3f GB of codes",
                   1e-9 * (double)most);
        *bytes_out += most;
    }
    return DPL_OK;
}

size_t dpl_shards_bytes(const dpl_model *m) {
    const dpl_params *p = &m->params;
    size_t layer = 0;
    for (size_t u = 1; u < p->n_units; u++) layer = DPL_MAX(layer, p->units[u].elems);
    const size_t root = p->units[ROOT].elems,
                 weight = 4 + dpl_dtype_bytes(m->dtype); // and gradient
    const size_t most = 4 * DPL_MAX(layer, root);
    const size_t whole = is_sharded(m) ? (2 * layer + root) * weight + most : 0;
    return whole + (has_replicas(m) ? most / dpl_model_shards(m) : 0);
}

size_t dpl_param_own(const dpl_model *m, const dpl_param *param, size_t *own_out) {
    const size_t F = dpl_model_shards(m), end = param->offset + param->elems;
    const dpl_span_of *span = dpl_model_unit(m, param)->span;
    while (param->offset >= span->first + span->elems) span++;
    const size_t piece = span->elems / F;
    const size_t low = span->first + (size_t)m->others.fsdp->rank * piece;
    const size_t from = DPL_MAX(low, param->offset), to = DPL_MIN(low + piece, end);
    *own_out = span->first / F + (from - low);
    return from < to ? to - from : 0;
}

/* ---- weights: brought here before they are used ---- */
static size_t n_steps(const dpl_model *m) {
    return m->flow->n_units + (m->flow->train ? m->params.n_units : 0);
}

static size_t unit_at(const dpl_model *m, size_t step) {
    const dpl_flow *f = m->flow;
    return step < f->n_units ? step : m->params.n_units - 1 - (step - f->n_units);
}

static slot *find_slot(dpl_flow *f, size_t unit) {
    if (unit == ROOT) return &f->slots[2];
    return f->slots[0].unit == unit ? &f->slots[0] : &f->slots[1];
}

static dpl_status fetch(dpl_model *m, size_t u, slot *s) {
    const dpl_unit *unit = &m->params.units[u];
    const size_t F = dpl_model_shards(m);
    dpl_ctx_wait(m->ctx); // what is queued may use the slot, or change the weights
    s->unit = u;
    s->comes = true;
    for (int i = 0; i < DPL_SPAN_N; i++) {
        const dpl_span_of *span = &unit->span[i];
        const size_t own = span->first / F, at = span->first - unit->first, n = span->elems / F;
        const bool wide = i == DPL_SPAN_WIDE || !s->copy || span->quantized;
        if (n > 0 && wide)
            DPL_TRY(dpl_comm_gather(m->others.fsdp, m->params.master + own, n * sizeof(float),
                                    s->values + at, &s->tickets[i]));
        else if (n > 0)
            DPL_TRY(dpl_comm_gather(m->others.fsdp, m->params.copy + own, n * sizeof(uint16_t),
                                    s->copy + at, &s->tickets[i]));
    }
    return DPL_OK;
}

// Whoever has a weight has all of it now: the codes are those of one rank.
static void make_codes(dpl_model *m, slot *s) {
    const dpl_unit *unit = &m->params.units[s->unit];
    (void)place_codes(m, s->unit, s->codes);
    for (dpl_param *p = m->params.list; p < m->params.list + m->params.n; p++)
        if (p->quantized && p->layer + 1 == (int)s->unit)
            dpl_quant_weight_pack(m->ctx, s->values + (p->offset - unit->first), p->n_groups, p->n,
                                  p->k, &p->quant);
}

static dpl_status arrive(dpl_model *m, slot *s) {
    dpl_unit *unit = &m->params.units[s->unit];
    const dpl_span_of *wide = &unit->span[DPL_SPAN_WIDE];
    for (int i = 0; i < DPL_SPAN_N && s->comes; i++)
        if (unit->span[i].elems > 0) DPL_TRY(dpl_comm_wait(m->others.fsdp, s->tickets[i]));
    // A tied embedding is looked up in fp32 and multiplied in bf16.
    if (s->comes && s->copy && s->unit == ROOT && m->config.tied)
        dpl_to_bf16(m->ctx, s->values, wide->elems, s->copy);
    if (s->comes && s->codes) make_codes(m, s);
    s->comes = false;
    unit->values = s->values;
    unit->copy = s->copy;
    return DPL_OK;
}

// The slot that a unit has, or is to have: not that of the unit that is in use.
static slot *slot_for(dpl_flow *f, size_t unit, size_t in_use) {
    slot *s = find_slot(f, unit);
    if (s->unit == unit || unit == ROOT) return s;
    return f->slots[0].unit == in_use ? &f->slots[1] : &f->slots[0];
}

static dpl_status bring(dpl_model *m, size_t step) {
    dpl_flow *f = m->flow;
    const size_t u = unit_at(m, step),
                 next = step + 1 < n_steps(m) ? unit_at(m, step + 1) : NO_UNIT;
    if (u >= f->n_units) return DPL_OK; // not of this pass
    slot *s = slot_for(f, u, NO_UNIT);
    if (s->unit != u) DPL_TRY(fetch(m, u, s));
    DPL_TRY(arrive(m, s));
    if (next >= f->n_units || next == ROOT) return DPL_OK;
    s = slot_for(f, next, u);
    if (s->unit == next) return DPL_OK;
    if (s->unit != NO_UNIT) m->params.units[s->unit].values = NULL; // it goes
    return fetch(m, next, s);
}

void dpl_model_changed(dpl_model *m) {
    for (int i = 0; i < 3; i++) m->flow->slots[i].unit = NO_UNIT;
}

/* ---- gradients: added up behind ---- */
// A unit's gradients begin anew in the slot of its weights.
static void begin_grads(dpl_model *m, size_t u) {
    if (!is_sharded(m)) return;
    slot *s = u == ROOT ? &m->flow->slots[2] : &m->flow->slots[u % 2];
    m->params.units[u].grad = s->grad;
    dpl_model_renew_grads(m, u);
}

static dpl_mat blocks(const float *p) { // of 64 elements, which all pieces are made of
    return dpl_mat_f32(p, 64);
}

// to (n) = the sum of R blocks in their order, or += .
static void add_up(const dpl_model *m, float *from, size_t R, size_t n, bool adds, float *to) {
    for (size_t r = 1; r < R; r++)
        dpl_add(m->ctx, blocks(from), blocks(from + r * n), n / 64, 64, blocks(from));
    if (adds) dpl_add(m->ctx, blocks(to), blocks(from), n / 64, 64, blocks(to));
    else dpl_copy(m->ctx, blocks(from), n / 64, 64, blocks(to));
}

// What a stage does with a span: R blocks of n numbers each.
typedef struct part {
    dpl_comm *comm;
    size_t R, n;
    float *whole;      // the span's gradients, of all pieces
    float *own, *mine; // this rank's piece, and the block of it that this rank adds up
    float *received;   // SCATTER, REDUCE
} part;

// False: there is nothing to do.
static bool part_of(const dpl_model *m, const dpl_unit *unit, stage i, int span_id, part *p_out) {
    const dpl_flow *f = m->flow;
    const dpl_span_of *span = &unit->span[span_id];
    dpl_comm *comm = comm_of(m, span, i);
    const size_t R = (size_t)comm->n_ranks, F = dpl_model_shards(m);
    const size_t at = span->first - unit->first, n = span->elems / (i == SCATTER ? F : F * R);
    float *own = m->params.grad + span->first / F;
    if (n == 0 || R == 1) return false;
    float *received = i == SCATTER ? f->scattered + at : f->reduced + at / F;
    *p_out = (part){comm, R, n, unit->grad + at, own, own + (size_t)comm->rank * n, received};
    return true;
}

static dpl_status begin_stage(dpl_model *m, stage i, size_t u) {
    dpl_flow *f = m->flow;
    const dpl_unit *unit = &m->params.units[u];
    part p;
    dpl_ctx_wait(m->ctx);
    f->in[i] = u;
    for (int j = 0; j < DPL_SPAN_N; j++) {
        if (!part_of(m, unit, i, j, &p)) continue;
        const size_t bytes = p.n * sizeof(float);
        dpl_ticket *ticket = &f->tickets[i][j];
        DPL_TRY(i == HAND_OUT ? dpl_comm_gather(p.comm, p.mine, bytes, p.own, ticket)
                              : dpl_comm_swap(p.comm, i == SCATTER ? p.whole : p.own, bytes,
                                              p.received, ticket));
    }
    return DPL_OK;
}

static dpl_status end_stage(dpl_model *m, stage i) {
    dpl_flow *f = m->flow;
    const dpl_unit *unit = &m->params.units[f->in[i]];
    part p;
    f->in[i] = NO_UNIT;
    for (int j = 0; j < DPL_SPAN_N; j++) {
        if (!part_of(m, unit, i, j, &p)) continue;
        DPL_TRY(dpl_comm_wait(p.comm, f->tickets[i][j]));
        if (i == SCATTER) add_up(m, p.received, p.R, p.n, !f->replaces, p.own);
        else if (i == REDUCE) add_up(m, p.received, p.R, p.n, false, p.mine);
    }
    return DPL_OK;
}

// What is under way goes one stage further, the oldest first, then `u` begins.
static dpl_status push(dpl_model *m, size_t u) {
    dpl_flow *f = m->flow;
    const stage first = is_sharded(m) ? SCATTER : REDUCE, n = f->last ? N_STAGES : REDUCE;
    for (int i = N_STAGES - 1; i >= (int)first; i--) {
        const size_t done = f->in[i];
        if (done == NO_UNIT) continue;
        DPL_TRY(end_stage(m, (stage)i));
        if (i + 1 < (int)n) DPL_TRY(begin_stage(m, (stage)(i + 1), done));
    }
    return u != NO_UNIT && first < n ? begin_stage(m, first, u) : DPL_OK;
}

static bool is_idle(const dpl_flow *f) {
    for (int i = 0; i < N_STAGES; i++)
        if (f->in[i] != NO_UNIT) return false;
    return true;
}

/* ---- a pass ---- */
void dpl_flow_start(dpl_model *m, size_t n_units, bool train) {
    dpl_flow *f = m->flow;
    f->active = true;
    f->train = train;
    f->n_units = n_units;
    f->at = 0;
    f->open = NO_UNIT;
    for (int i = 0; i < N_STAGES; i++) f->in[i] = NO_UNIT;
    if (train) begin_grads(m, ROOT); // the head's come first
}

dpl_status dpl_flow_enter(dpl_model *m, size_t unit) {
    dpl_flow *f = m->flow;
    if (!f->active) return DPL_OK;
    const size_t step = f->at++;
    DPL_EXPECT(unit_at(m, step) == unit, DPL_EINVAL, "layer %zu out of its turn", unit);
    if (is_sharded(m)) DPL_TRY(bring(m, step));
    if (step >= f->n_units) f->open = unit;
    if (step >= f->n_units && unit != ROOT) begin_grads(m, unit);
    return DPL_OK;
}

dpl_status dpl_flow_leave(dpl_model *m, size_t unit) {
    dpl_flow *f = m->flow;
    if (!f->active) return DPL_OK;
    f->open = NO_UNIT;
    dpl_model_settle_grads(m, unit);
    return push(m, unit);
}

dpl_status dpl_flow_finish(dpl_model *m, dpl_status status) {
    dpl_flow *f = m->flow;
    dpl_status mine = DPL_OK;
    if (f->open != NO_UNIT) mine = dpl_flow_leave(m, f->open);
    while (mine == DPL_OK && f->at < n_steps(m)) {
        mine = dpl_flow_enter(m, unit_at(m, f->at));
        if (mine == DPL_OK && f->open != NO_UNIT) mine = dpl_flow_leave(m, f->open);
    }
    while (mine == DPL_OK && !is_idle(f)) mine = push(m, NO_UNIT);
    if (f->train) f->last = f->replaces = false;
    f->active = false;
    dpl_ctx_wait(m->ctx);
    return status != DPL_OK ? status : mine;
}

void dpl_model_zero_grads(dpl_model *m) {
    m->flow->replaces = true;
    for (size_t u = 0; u < m->params.n_units && !is_sharded(m); u++) dpl_model_renew_grads(m, u);
}

void dpl_model_end_step(dpl_model *m) {
    m->flow->last = true;
}

/* ---- flat arrays, unit by unit ---- */
size_t dpl_unit_room_elems(const dpl_model *m) {
    size_t most = 0;
    for (size_t u = 0; u < m->params.n_units && is_sharded(m); u++)
        most = DPL_MAX(most, m->params.units[u].elems);
    return most;
}

float *dpl_unit_room(const dpl_model *m, size_t u, float *flat, float *room) {
    return is_sharded(m) ? room : flat + m->params.units[u].first;
}

void dpl_unit_put(const dpl_model *m, size_t u, const float *whole, float *flat) {
    const dpl_unit *unit = &m->params.units[u];
    const size_t F = dpl_model_shards(m), rank = (size_t)m->others.fsdp->rank;
    for (int i = 0; i < DPL_SPAN_N && is_sharded(m); i++) {
        const dpl_span_of *span = &unit->span[i];
        const size_t n = span->elems / F;
        memcpy(flat + span->first / F, whole + (span->first - unit->first) + rank * n,
               n * sizeof(float));
    }
}

// One exchange for a span of all these units. sizes (4, F): zero
static dpl_status deal_span(const dpl_model *m, size_t first, int i, const float *flat, float *room,
                            size_t *sizes) {
    const size_t F = dpl_model_shards(m), me = (size_t)m->others.fsdp->rank;
    size_t *const at = sizes, *const bytes = sizes + F, *const to = sizes + 2 * F,
                  *const come = sizes + 3 * F;
    const dpl_unit *units = m->params.units + first;
    for (size_t r = 0; r < F; r++) {
        at[r] = bytes[r] = come[r] = 0;
        if (first + r >= m->params.n_units) continue;
        at[r] = units[r].span[i].first / F * sizeof(float);
        bytes[r] = units[r].span[i].elems / F * sizeof(float);
    }
    if (first + me < m->params.n_units) {
        room += units[me].span[i].first - units[me].first;
        for (size_t r = 0; r < F; r++) come[r] = bytes[me], to[r] = r * bytes[me];
    }
    dpl_ticket ticket;
    DPL_TRY(dpl_comm_exchange(m->others.fsdp, (dpl_blocks){(void *)(uintptr_t)flat, at, bytes},
                              (dpl_blocks){room, to, come}, &ticket));
    return dpl_comm_wait(m->others.fsdp, ticket);
}

dpl_status dpl_unit_deal(const dpl_model *m, size_t first, const float *flat, float *room) {
    if (!is_sharded(m)) return DPL_OK;
    size_t *sizes = dpl_alloc_array(4 * dpl_model_shards(m), sizeof *sizes);
    if (!sizes) {
        dpl_comm_abort(m->others.fsdp, "no memory to collect parameters");
        return dpl_fail(DPL_ENOMEM, "no memory to collect parameters");
    }
    dpl_status status = DPL_OK;
    for (int i = 0; i < DPL_SPAN_N && status == DPL_OK; i++)
        status = deal_span(m, first, i, flat, room, sizes);
    dpl_free(sizes);
    return status;
}
