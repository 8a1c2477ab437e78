/*
 * test_ep.c - experts spread over ranks: tokens, their gradients and those of the experts have the
 * bits of one rank, whatever the split, the load and the transport.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "lab.h"
#include "ranks.h"

#define R_MAX 8

typedef enum load_kind {
    EVEN,     // as many tokens on each rank as can be
    NONE,     // some ranks without tokens
    ONE,      // every token chooses the same experts, of one rank
    SKIPPED,  // padding among the tokens
    ZIPF,     // expert e about as often as 1 / (e + 1)
    LOPSIDED, // an uneven number of experts, some ranks without any
    LOAD_N
} load_kind;

typedef enum islands { // which ranks have memory in common
    TOGETHER,
    ALONE,
    PAIRS,
    ODD_EVEN
} islands;

typedef struct scene {
    lab all; // everything on one rank
    load_kind load;
    bool deferred;
    islands islands;
    size_t n_chunks; // 0: 1
    bool lane;
    bool reduces;
} scene;

static void scene_open(scene *s, load_kind load, dpl_dtype dtype) {
    lab_rule rule = {.t = 61, .d = 40, .f = 24, .shared_f = 24, .bias = true, .dtype = dtype};
    rule.rule = lab_sigmoid(10, 3);
    rule.seed = 31 + (uint64_t)load;
    *s = (scene){.load = load};
    lab_open(&rule, &s->all);
    for (size_t e = 7; load == ONE && e < 10; e++) s->all.bias[e] = 100;
    for (size_t e = 0; load == ZIPF && e < 10; e++) s->all.bias[e] = 2.0f / (float)(e + 1);
    s->all.segment = dpl_alloc_array(rule.t, sizeof *s->all.segment);
    for (size_t t = 0; t < rule.t; t++) s->all.segment[t] = load != SKIPPED || t % 4 != 1;
    dpl_ctx *ctx = lab_ctx(1, false, NULL);
    assert_non_null(ctx);
    assert_int_equal(lab_run(&s->all, ctx), DPL_OK);
    dpl_ctx_close(&ctx);
}

// Tokens before those of a rank.
static size_t first_token(const scene *s, int rank, int n_ranks) {
    const size_t T = s->all.rule.t, R = (size_t)n_ranks, r = (size_t)rank;
    if (s->load != NONE) return r * T / R;
    return r == 0 ? 0 : r == R ? T : (r + 1) / 2 * T / R; // odd ranks have none
}

static int island_of(const scene *s, int rank) {
    switch (s->islands) {
    case ALONE:
        return -1;
    case PAIRS:
        return rank / 2;
    case ODD_EVEN:
        return rank % 2;
    default:
        return 0;
    }
}

static void split_experts(const scene *s, int n_ranks, size_t *n_local) {
    size_t left = s->all.rule.rule.n_experts;
    for (int r = 0; r < n_ranks; r++) {
        n_local[r] = r == n_ranks - 1 ? left : (size_t)(r * 3 % 4);
        n_local[r] = DPL_MIN(n_local[r], left);
        left -= n_local[r];
    }
}

static dpl_weight slice(const dpl_weight *all, size_t first, size_t n, float **grad_out) {
    const size_t each = dpl_panel_elems(all->n, all->k);
    dpl_weight w = *all;
    w.p = (const uint8_t *)all->p + first * each * dpl_dtype_bytes(all->dtype);
    w.n_groups = n;
    w.grad = *grad_out = dpl_alloc_array(n * each + 1, sizeof(float));
    assert_non_null(w.grad);
    return w;
}

// In chunks a gradient has the same terms in another order: its fp32 sums, of at most T terms and
// the chunks, each round by 2^-24 of what is of the size of the result.
static void check_sums_of(const char *what, const scene *s, int rank, const float *is,
                          const float *expected, size_t n) {
    double difference = 0, all = 0;
    for (size_t i = 0; i < n; i++) {
        difference += ((double)is[i] - expected[i]) * ((double)is[i] - expected[i]);
        all += (double)expected[i] * expected[i];
    }
    const double terms = (double)(s->all.rule.t + s->n_chunks), bound = terms * 0x1p-24;
    if (difference > bound * bound * all)
        fail_msg("load %d, rank %d, %zu chunks: %s differs by %g of itself, expected at most %g",
                 (int)s->load, rank, s->n_chunks, what, sqrt(difference / all), bound);
}

// Sums of rows on their host round to the type of rows once more, each as much as half its last
// place; y rounds again.
static void check_reduced(const char *what, const scene *s, int rank, const void *is,
                          const void *expected, size_t n, dpl_dtype dtype) {
    double difference = 0, all = 0;
    for (size_t i = 0; i < n; i++) {
        const float a = dtype == DPL_F32 ? ((const float *)is)[i]
                                         : dpl_bf16_to_f32(((const uint16_t *)is)[i]);
        const float b = dtype == DPL_F32 ? ((const float *)expected)[i]
                                         : dpl_bf16_to_f32(((const uint16_t *)expected)[i]);
        difference += ((double)a - b) * ((double)a - b);
        all += (double)b * b;
    }
    const double bound = s->all.rule.dtype == DPL_F32 ? 0x1p-22 : 0x1p-7;
    if (!(difference <= bound * bound * all))
        fail_msg("load %d, rank %d: %s differs by %g of itself, expected at most %g", (int)s->load,
                 rank, what, sqrt(difference / all), bound);
}

static void check_rows(const char *what, const scene *s, int rank, const void *is,
                       const void *expected, size_t bytes) {
    if (memcmp(is, expected, bytes) == 0) return;
    const char *level = getenv("DPL_CPU");
    fail_msg("load %d, rank %d, level %s: %s differs from one rank", (int)s->load, rank,
             level ? level : "best", what);
}

// One rank's part of the layer, forward and backward, against the same rows of the whole.
static void run_rank(dpl_comm *comm, void *arg) {
    scene *s = arg;
    const lab *all = &s->all;
    const size_t d = all->rule.d, item = dpl_dtype_bytes(all->rule.dtype);
    const size_t at = first_token(s, comm->rank, comm->n_ranks);
    const size_t T = first_token(s, comm->rank + 1, comm->n_ranks) - at;
    size_t n_local[R_MAX];
    split_experts(s, comm->n_ranks, n_local);
    dpl_ep_ranks ranks = {0};
    dpl_ctx *ctx = lab_ctx(1 + comm->rank % 2, s->deferred, NULL);
    assert_int_equal(dpl_ep_ranks_open(ctx, comm, all->rule.rule.n_experts,
                                       s->load == LOPSIDED ? n_local : NULL,
                                       island_of(s, comm->rank), 0, DPL_OK, &ranks),
                     DPL_OK);
    ranks.n_chunks = s->n_chunks;
    ranks.reduces = s->reduces;
    assert_int_equal(dpl_comm_set_lane_threads(comm, s->lane), DPL_OK);
    const size_t first = ranks.first[comm->rank], n = dpl_ep_local_experts(&ranks);
    dpl_moe_weights w = all->weights;
    float *grads[5];
    w.gate_up = slice(&w.gate_up, first, n, &grads[0]);
    w.down = slice(&w.down, first, n, &grads[1]);
    w.router = slice(&w.router, 0, 1, &grads[2]);
    w.shared_gate_up = slice(&w.shared_gate_up, 0, 1, &grads[3]);
    w.shared_down = slice(&w.shared_down, 0, 1, &grads[4]);
    const dpl_mat x = {(uint8_t *)all->x_in + at * d * item, d, all->rule.dtype};
    const dpl_mat dy = {(uint8_t *)all->dy_in + at * d * item, d, all->rule.dtype};
    uint8_t *y = malloc(T * d * item + 1);
    float *dx = malloc((T * d + 1) * sizeof *dx);
    for (int round = 0; round < 2; round++) { // gradients of experts accumulate
        dpl_moe_saved saved;
        memset(y, 0xff, T * d * item);
        memset(dx, 0xff, T * d * sizeof *dx);
        assert_int_equal(dpl_moe_forward_in(ctx, &ranks, &all->shape, &w, x, T, all->segment + at,
                                            NULL, NULL, &saved, (dpl_mat){y, d, x.dtype}),
                         DPL_OK);
        assert_int_equal(
            dpl_moe_backward(ctx, &all->shape, &w, x, NULL, &saved, dy, dpl_mat_f32(dx, d)),
            DPL_OK);
        dpl_ctx_wait(ctx);
        dpl_moe_forget(&saved);
        if (s->reduces) {
            check_reduced("y", s, comm->rank, y, (const uint8_t *)all->y + at * d * item, T * d,
                          x.dtype);
            check_reduced("dx", s, comm->rank, dx, all->dx + at * d, T * d, DPL_F32);
        } else {
            check_rows("y", s, comm->rank, y, (const uint8_t *)all->y + at * d * item,
                       T * d * item);
            check_rows("dx", s, comm->rank, dx, all->dx + at * d, T * d * sizeof *dx);
        }
        if (round > 0) break;
        const size_t up = dpl_panel_elems(w.gate_up.n, d), down = dpl_panel_elems(d, w.down.k);
        const float *dup = all->weights.gate_up.grad + first * up;
        const float *ddown = all->weights.down.grad + first * down;
        if (s->n_chunks > 1) { // of experts, whose rows are the same ones
            check_sums_of("gradient of gate_up", s, comm->rank, grads[0], dup, n * up);
            check_sums_of("gradient of down", s, comm->rank, grads[1], ddown, n * down);
            continue;
        }
        check_rows("gradient of gate_up", s, comm->rank, grads[0], dup, n * up * sizeof(float));
        check_rows("gradient of down", s, comm->rank, grads[1], ddown, n * down * sizeof(float));
    }
    if (ranks.window) assert_int_equal(dpl_heap_used(ranks.window->heap), 0);
    // A rank that has no tokens, or whose experts get none, makes the same exchanges as any other:
    // else the others would wait for it.
    const uint64_t n_exchanges = ranks.comm->n_started;
    uint64_t all_exchanges[R_MAX];
    assert_int_equal(
        dpl_comm_gather_now(ranks.comm, &n_exchanges, sizeof n_exchanges, all_exchanges), DPL_OK);
    for (int r = 0; r < comm->n_ranks; r++) assert_int_equal(all_exchanges[r], n_exchanges);
    for (int i = 0; i < 5; i++) dpl_free(grads[i]);
    free(y);
    free(dx);
    dpl_ep_ranks_close(&ranks);
    dpl_ctx_close(&ctx);
}

static void run_loads(dpl_dtype dtype, bool deferred, islands islands_of_ranks) {
    for (int i = 0; i < LOAD_N; i++) {
        scene s;
        scene_open(&s, (load_kind)i, dtype);
        s.deferred = deferred;
        s.islands = islands_of_ranks;
        ranks_run_all(run_rank, &s);
        lab_close(&s.all);
    }
}

static void fp32_has_the_bits_of_one_rank(void **state) {
    (void)state;
    run_loads(DPL_F32, false, TOGETHER);
}

static void bf16_has_the_bits_of_one_rank(void **state) {
    (void)state;
    run_loads(DPL_BF16, false, TOGETHER);
}

static void operators_may_be_deferred(void **state) {
    (void)state;
    run_loads(DPL_F32, true, TOGETHER);
}

static void hosts_of_several_ranks_exchange_messages(void **state) {
    (void)state;
    run_loads(DPL_F32, false, PAIRS);
    run_loads(DPL_BF16, false, ODD_EVEN);
    run_loads(DPL_F32, true, ODD_EVEN);
}

static void without_shared_memory_rows_are_messages(void **state) {
    (void)state;
    run_loads(DPL_F32, false, ALONE);
    run_loads(DPL_BF16, true, ALONE);
}

// Chunks, some of them empty, and progress by a thread change nothing but the order of sums.
static void chunks_have_the_bits_of_one(void **state) {
    (void)state;
    static const size_t numbers[] = {2, 3, 7, 61 * 2};
    for (int i = 0; i < 2 * LOAD_N; i++)
        for (size_t j = 0; j < DPL_COUNT(numbers); j++) {
            scene s;
            scene_open(&s, (load_kind)(i / 2), (i + (int)j) % 2 ? DPL_BF16 : DPL_F32);
            s.n_chunks = numbers[j];
            s.lane = i % 2;
            s.islands = (islands)((size_t)i + j) % 4;
            s.deferred = (i + (int)j / 2) % 2;
            ranks_run_all(run_rank, &s);
            lab_close(&s.all);
        }
}

// Fewer bytes, and sums that round once more.
static void sums_of_a_host_are_close(void **state) {
    (void)state;
    for (int i = 0; i < 2 * LOAD_N; i++) {
        scene s;
        scene_open(&s, (load_kind)(i / 2), i % 2 ? DPL_BF16 : DPL_F32);
        s.n_chunks = 1 + 2 * (size_t)(i % 2);
        s.islands = (islands)(1 + i % 3);
        s.reduces = true;
        s.deferred = i % 4 == 1;
        ranks_run_all(run_rank, &s);
        lab_close(&s.all);
    }
}

// One rank gives up while rows are under way and lanes carry them: all end with its words.
static void give_up_between(dpl_comm *comm, void *arg) {
    scene *s = arg;
    const lab *all = &s->all;
    const size_t d = all->rule.d, T = all->rule.t;
    dpl_ep_ranks ranks = {0};
    dpl_ctx *ctx = lab_ctx(1, false, NULL);
    assert_int_equal(dpl_ep_ranks_open(ctx, comm, all->rule.rule.n_experts, NULL,
                                       island_of(s, comm->rank), 0, DPL_OK, &ranks),
                     DPL_OK);
    ranks.n_chunks = 3;
    assert_int_equal(dpl_comm_set_lane_threads(comm, 1), DPL_OK);
    dpl_ep ep = dpl_ep_alloc(ctx, NULL, &ranks, 3, T);
    int32_t *ids = calloc(T * 3, sizeof *ids);
    for (size_t i = 0; i < T * 3; i++) ids[i] = (int32_t)((i / 3 + i % 3 * 3) % 10);
    assert_int_equal(dpl_moe_prepare(ctx, ids, DPL_OK, &ep, NULL), DPL_OK);
    dpl_mat rows;
    float *values;
    assert_int_equal(dpl_ep_rows_alloc(&ep, d, all->rule.dtype, &rows, &values), DPL_OK);
    dpl_ep_move move = {.ep = &ep, .d = d, .rows = rows};
    dpl_status status = dpl_ep_meet(ctx, DPL_OK, &move, 1); // others may have given up already
    const dpl_mat x = {all->x_in, d, all->rule.dtype};
    const bool gives_up = comm->rank == comm->n_ranks - 1 && comm->n_ranks > 1;
    if (status == DPL_OK) status = dpl_moe_dispatch_start(ctx, &move, 0, x, NULL);
    if (status == DPL_OK) status = dpl_moe_dispatch_start(ctx, &move, 1, x, NULL);
    if (gives_up) dpl_comm_abort(comm, "the lights went out");
    for (size_t c = 0; c < 3 && status == DPL_OK; c++) {
        if (c == 2) status = dpl_moe_dispatch_start(ctx, &move, c, x, NULL);
        if (status == DPL_OK) status = dpl_moe_dispatch_wait(ctx, &move, c);
    }
    while (comm->n_ranks > 1 && status == DPL_OK) status = dpl_comm_barrier(comm);
    assert_int_equal(status, comm->n_ranks > 1 ? DPL_ECOMM : DPL_OK);
    if (status != DPL_OK) assert_non_null(strstr(dpl_error_message(), "the lights went out"));
    dpl_ep_rows_free(&ep, rows.p);
    free(ids);
    dpl_ep_ranks_close(&ranks);
    dpl_ctx_close(&ctx);
}

static void a_rank_that_gives_up_between_chunks_ends_all(void **state) {
    (void)state;
    if (dpl_comm_launcher()) skip(); // it is the end of all of MPI's ranks
    for (int i = TOGETHER; i <= ODD_EVEN; i++) {
        scene s;
        scene_open(&s, EVEN, DPL_F32);
        s.islands = (islands)i;
        for (int n = 2; n <= 5; n++) ranks_run("threads", n, give_up_between, &s);
        lab_close(&s.all);
    }
}

// A router logit that is not finite on one rank is an error on all, with the rank and the token.
static void run_bad_rank(dpl_comm *comm, void *arg) {
    const lab *all = arg;
    const size_t d = all->rule.d, T = all->rule.t;
    const int bad = comm->n_ranks - 1;
    dpl_ep_ranks ranks = {0};
    dpl_ctx *ctx = lab_ctx(1, false, NULL);
    assert_int_equal(dpl_ep_ranks_open(ctx, comm, 10, NULL, 0, 0, DPL_OK, &ranks), DPL_OK);
    dpl_moe_weights w = all->weights;
    float *grads[2], *x = malloc(T * d * sizeof *x), *y = malloc(T * d * sizeof *y);
    w.gate_up = slice(&w.gate_up, ranks.first[comm->rank], dpl_ep_local_experts(&ranks), &grads[0]);
    w.down = slice(&w.down, ranks.first[comm->rank], dpl_ep_local_experts(&ranks), &grads[1]);
    memcpy(x, all->x, T * d * sizeof *x);
    if (comm->rank == bad) x[5 * d + 1] = 1.0f / 0.0f;
    for (int round = 0; round < 3; round++) {
        dpl_moe_saved saved;
        const dpl_status status = dpl_moe_forward_in(ctx, &ranks, &all->shape, &w,
                                                     dpl_mat_f32(x, d), T, NULL, NULL, NULL, &saved,
                                                     dpl_mat_f32(y, d));
        if (round == 2) { // nothing was left behind
            assert_int_equal(status, DPL_OK);
            dpl_ctx_wait(ctx);
            dpl_moe_forget(&saved);
            check_rows("y", &(scene){0}, comm->rank, y, all->y, T * d * sizeof *y);
            continue;
        }
        char expected[64];
        snprintf(expected, sizeof expected, comm->n_ranks > 1 ? "rank %d: token 5" : "token 5",
                 bad);
        assert_int_equal(status, DPL_ENUMERIC);
        assert_non_null(strstr(dpl_error_message(), expected));
        if (round == 1) memcpy(x, all->x, T * d * sizeof *x);
    }
    for (int i = 0; i < 2; i++) dpl_free(grads[i]);
    free(x);
    free(y);
    dpl_ep_ranks_close(&ranks);
    dpl_ctx_close(&ctx);
}

static void an_error_of_one_rank_is_that_of_all(void **state) {
    (void)state;
    scene s;
    scene_open(&s, EVEN, DPL_F32);
    ranks_run_all(run_bad_rank, &s.all);
    lab_close(&s.all);
}

// Numbers of experts that are not those of all ranks together.
static void open_wrong(dpl_comm *comm, void *arg) {
    (void)arg;
    size_t n_local[R_MAX];
    for (size_t i = 0; i < R_MAX; i++) n_local[i] = 4;
    dpl_ep_ranks ranks = {0};
    dpl_ctx *ctx = lab_ctx(1, false, NULL);
    assert_int_equal(dpl_ep_ranks_open(ctx, comm, 3, n_local, 0, 0, DPL_OK, &ranks), DPL_EINVAL);
    assert_non_null(strstr(dpl_error_message(), "than the 3 that there are"));
    dpl_ep_ranks_close(&ranks);
    dpl_ctx_close(&ctx);
}

static void a_wrong_split_is_an_error(void **state) {
    (void)state;
    ranks_run_all(open_wrong, NULL);
}

// Memory follows what arrives: all rows to one rank take memory there and nowhere else, and it is
// given back when the spike is over.
static void heap_gives_back_a_spike(void **state) {
    (void)state;
    dpl_heap *heap;
    const size_t mb = (size_t)1 << 20;
    assert_int_equal(dpl_heap_open(256 * mb, false, &heap), DPL_OK);
    void *spike = dpl_heap_alloc(heap, 100 * mb);
    assert_non_null(spike);
    memset(spike, 1, 100 * mb);
    dpl_heap_free(heap, spike);
    assert_true(dpl_heap_touched(heap) >= 100 * mb);
    for (int i = 0; i < 10; i++) {
        uint8_t *a = dpl_heap_alloc(heap, 3 * mb), *b = dpl_heap_alloc(heap, 5), *c;
        assert_true(a && b && b >= a + 3 * mb);
        dpl_heap_free(heap, a);
        c = dpl_heap_alloc(heap, mb); // the lowest gap
        assert_ptr_equal(c, a);
        assert_true((uintptr_t)c % DPL_ALIGN == 0);
        memset(c, 2, mb);
        dpl_heap_free(heap, b);
        dpl_heap_free(heap, c);
    }
    assert_true(dpl_heap_touched(heap) < 10 * mb);
    assert_null(dpl_heap_alloc(heap, 256 * mb));
    assert_null(dpl_heap_alloc(heap, SIZE_MAX - 10));
    assert_non_null(dpl_heap_alloc(heap, 0));
    assert_non_null(dpl_heap_alloc(heap, 7));
    dpl_heap_reset(heap);
    assert_int_equal(dpl_heap_used(heap), 0);
    dpl_heap_close(&heap);
    assert_null(heap);
}

/* ---- the public functions ---- */
typedef struct traffic {
    size_t d, n_experts, top_k, t; // t: of the rank with the most tokens
    dpl_dtype dtype;
    bool to_one; // every token chooses the last experts
    bool messages;
} traffic;

static size_t tokens_of(const traffic *f, int rank) {
    return rank % 3 == 1 ? 0 : f->t - (size_t)rank % 2;
}

// Distinct experts; some slots are skipped.
static int32_t id_of(const traffic *f, int rank, size_t t, size_t k) {
    if (dpl_rng_u64(5, (uint64_t)rank, t * 64 + k) % 9 == 0) return -1;
    if (f->to_one) return (int32_t)(f->n_experts - 1 - k);
    const uint64_t first = dpl_rng_u64(7, (uint64_t)rank, t);
    return (int32_t)((first + k * (1 + first % 2)) % f->n_experts);
}

// Whole numbers that bf16 holds, and so do their sums.
static float token_value(int rank, size_t t, size_t j) {
    return (float)((rank * 3 + (int)(t % 11) + (int)(j % 5)) % 16);
}

static void *make_tokens(const traffic *f, int rank, size_t n) {
    void *p = calloc(n * f->d + 1, dpl_dtype_bytes(f->dtype));
    for (size_t i = 0; i < n * f->d; i++) {
        const float value = token_value(rank, i / f->d, i % f->d);
        if (f->dtype == DPL_F32) ((float *)p)[i] = value;
        else ((uint16_t *)p)[i] = dpl_f32_to_bf16(value);
    }
    return p;
}

static float value_at(const traffic *f, const void *p, size_t i) {
    return f->dtype == DPL_F32 ? ((const float *)p)[i] : dpl_bf16_to_f32(((const uint16_t *)p)[i]);
}

static float weight_of(int rank, size_t slot) {
    return (float)(rank * 100000 + (int)slot);
}

// The rows are sorted by local expert, then rank, then token.
static void check_arrived(const traffic *f, const dpl_comm *comm, const dpl_ep_rows *rows,
                          const void *tokens, const float *weights) {
    size_t row = 0, first = 0;
    for (int r = 0; r < comm->rank; r++)
        first += (size_t)(r + 1) * f->n_experts / (size_t)comm->n_ranks -
                 (size_t)r * f->n_experts / (size_t)comm->n_ranks;
    for (size_t e = 0; e < rows->n_local; e++) {
        assert_int_equal(rows->offsets[e], row);
        for (int r = 0; r < comm->n_ranks; r++)
            for (size_t slot = 0; slot < tokens_of(f, r) * f->top_k; slot++) {
                const size_t t = slot / f->top_k;
                if (id_of(f, r, t, slot % f->top_k) != (int32_t)(first + e)) continue;
                for (size_t j = 0; j < f->d; j += 1 + f->d / 7)
                    assert_true(value_at(f, tokens, row * f->d + j) == token_value(r, t, j));
                if (weights) assert_true(weights[row] == weight_of(r, slot));
                row++;
            }
    }
    assert_int_equal(rows->n_rows, row);
    assert_int_equal(rows->offsets[rows->n_local], row);
}

static void check_sums(const traffic *f, const dpl_comm *comm, const void *y, bool is_f32) {
    traffic as = *f;
    if (is_f32) as.dtype = DPL_F32;
    for (size_t t = 0; t < tokens_of(f, comm->rank); t++) {
        float n = 0;
        for (size_t k = 0; k < f->top_k; k++) n += id_of(f, comm->rank, t, k) >= 0;
        for (size_t j = 0; j < f->d; j++)
            assert_true(value_at(&as, y, t * f->d + j) == n * token_value(comm->rank, t, j));
    }
}

static void send_and_return(dpl_comm *comm, void *arg) {
    const traffic *f = arg;
    const size_t T = tokens_of(f, comm->rank), n_slots = T * f->top_k;
    const dpl_ep_config config = {f->d, f->n_experts, f->top_k, f->dtype, NULL, f->messages};
    dpl_ctx *ctx = lab_ctx(1, false, NULL);
    dpl_ep_group *group;
    dpl_ep_handle *handle, *other;
    dpl_ep_rows rows, again;
    assert_int_equal(dpl_ep_group_open(ctx, comm, &config, &group), DPL_OK);
    int32_t *ids = calloc(n_slots + 1, sizeof *ids);
    float *w = calloc(n_slots + 1, sizeof *w), *dw = calloc(n_slots + 1, sizeof *dw);
    float *dx = calloc(T * f->d + 1, sizeof *dx);
    void *x = make_tokens(f, comm->rank, T), *y = make_tokens(f, 0, T);
    for (size_t slot = 0; slot < n_slots; slot++) {
        ids[slot] = id_of(f, comm->rank, slot / f->top_k, slot % f->top_k);
        w[slot] = weight_of(comm->rank, slot);
    }
    assert_int_equal(dpl_ep_prepare(group, ids, T, &handle), DPL_OK);
    assert_int_equal(dpl_ep_prepare(group, ids, T, &other), DPL_OK);
    assert_int_equal(dpl_ep_get_rows(handle, &rows), DPL_OK);
    assert_int_equal(dpl_ep_get_rows(other, &again), DPL_OK);
    // Arrays of nothing may be NULL.
    assert_int_equal(dpl_ep_dispatch(handle, T ? x : NULL, 0, T ? w : NULL), DPL_OK);
    check_arrived(f, comm, &rows, rows.rows, rows.row_weights);
    // Sums of rows where they are, of the caller's copy, and of a second call in between.
    assert_int_equal(dpl_ep_combine(handle, rows.rows, y, 0), DPL_OK);
    check_sums(f, comm, y, false);
    assert_int_equal(dpl_ep_dispatch(other, x, 0, NULL), DPL_OK);
    const size_t bytes = rows.n_rows * f->d * dpl_dtype_bytes(f->dtype);
    void *copy = malloc(bytes + 1);
    memcpy(copy, rows.rows, bytes);
    memset(y, 0xff, T * f->d * dpl_dtype_bytes(f->dtype));
    assert_int_equal(dpl_ep_combine(handle, copy, y, 0), DPL_OK);
    check_sums(f, comm, y, false);
    assert_int_equal(dpl_ep_combine(other, again.rows, y, 0), DPL_OK);
    check_sums(f, comm, y, false);
    dpl_ep_handle_close(&other);
    // Backward.
    assert_int_equal(dpl_ep_combine_backward(handle, x, 0), DPL_OK);
    check_arrived(f, comm, &rows, rows.results, NULL);
    memset(dx, 0xff, T * f->d * sizeof *dx);
    memset(dw, 0xff, n_slots * sizeof *dw);
    const bool some = rows.n_rows > 0;
    assert_int_equal(dpl_ep_dispatch_backward(handle, some ? rows.results : NULL,
                                              some ? rows.row_weights : NULL, dx, 0, T ? dw : NULL),
                     DPL_OK);
    check_sums(f, comm, dx, true);
    for (size_t i = 0; i < n_slots; i++) assert_true(dw[i] == (ids[i] < 0 ? 0 : w[i]));
    // Numbers from elsewhere, beside rows where they are: what arrived stays.
    for (size_t i = 0; i < rows.n_rows; i++) rows.result_weights[i] = 2 * rows.row_weights[i];
    assert_int_equal(dpl_ep_dispatch_backward(handle, rows.rows, rows.result_weights, dx, 0, dw),
                     DPL_OK);
    check_arrived(f, comm, &rows, rows.rows, rows.row_weights);
    for (size_t i = 0; i < n_slots; i++) assert_true(dw[i] == (ids[i] < 0 ? 0 : 2 * w[i]));
    // Given on some ranks only.
    if (comm->n_ranks > 1) {
        const dpl_status status = dpl_ep_dispatch(handle, x, 0, comm->rank ? NULL : w);
        bool others = false;
        for (int r = 1; r < comm->n_ranks; r++) others |= tokens_of(f, r) > 0;
        assert_int_equal(status, others ? DPL_EINVAL : DPL_OK);
    }
    dpl_ep_handle_close(&handle);
    // A wrong id on one rank is an error on all, and the group goes on.
    const int bad = (comm->n_ranks - 1) / 6 * 6; // it has tokens
    const int32_t kept = ids[0];
    if (comm->rank == bad) ids[0] = (int32_t)f->n_experts;
    assert_int_equal(dpl_ep_prepare(group, ids, T, &handle), DPL_EINVAL);
    assert_non_null(strstr(dpl_error_message(), "token 0, slot 0: expert id"));
    ids[0] = kept;
    assert_int_equal(dpl_ep_prepare(group, ids, T, &handle), DPL_OK);
    assert_int_equal(dpl_ep_dispatch(handle, comm->rank == bad ? NULL : x, 0, w), DPL_EINVAL);
    assert_non_null(strstr(dpl_error_message(), "tokens is NULL"));
    assert_int_equal(dpl_ep_dispatch(handle, x, 0, w), DPL_OK);
    dpl_ep_group_close(&group); // lives on until its handle is closed
    dpl_ep_handle_close(&handle);
    dpl_ctx_close(&ctx);
    void *blocks[] = {ids, w, dw, dx, x, y, copy};
    for (size_t i = 0; i < DPL_COUNT(blocks); i++) free(blocks[i]);
}

static void rows_go_and_return(void **state) {
    (void)state;
    for (int i = 0; i < 8; i++) {
        traffic f = {.d = i % 3 ? 25 : 24, .n_experts = 9, .top_k = 4, .t = 50};
        f.dtype = i & 1 ? DPL_BF16 : DPL_F32;
        f.to_one = i & 2;
        f.messages = i & 4;
        ranks_run_all(send_and_return, &f);
    }
}

// Many ranks with a token or none, fewer experts than ranks; rows as wide as they come.
static void sizes_may_be_extreme(void **state) {
    (void)state;
    traffic few = {.d = 3, .n_experts = 40, .top_k = 2, .t = 1, .dtype = DPL_F32};
    traffic wide = {.d = 7168, .n_experts = 32, .top_k = 8, .t = 20, .dtype = DPL_BF16};
    if (dpl_comm_launcher()) skip(); // one number of ranks
    ranks_run("threads", 64, send_and_return, &few);
    few.messages = true;
    ranks_run("threads", 64, send_and_return, &few);
    ranks_run("threads", 4, send_and_return, &wide);
}

// Ranks that do not agree on what they open; one that cannot open it at all.
static void open_unequal(dpl_comm *comm, void *arg) {
    const int what = *(const int *)arg;
    size_t even[R_MAX], other[R_MAX];
    for (int r = 0; r < comm->n_ranks; r++) even[r] = other[r] = 2;
    dpl_ep_config config = {8, 2 * (size_t)comm->n_ranks, 2, DPL_F32, even, false};
    dpl_ctx *ctx = lab_ctx(1, false, NULL);
    dpl_ep_group *group = NULL;
    if (comm->n_ranks > 1 && comm->rank == comm->n_ranks - 1) {
        if (what == 0) config.d = 9;
        if (what == 1) config.dtype = DPL_BF16;
        if (what == 2) config.n_local = other, other[0] = 3, other[1] = 1;
        if (what == 3) config.d = 0;
        if (what == 4) other[0] = SIZE_MAX - 2, other[1] = 7, config.n_local = other;
    }
    const dpl_status status = dpl_ep_group_open(ctx, comm, &config, &group);
    assert_int_equal(status, comm->n_ranks > 1 ? DPL_EINVAL : DPL_OK);
    char expected[32];
    snprintf(expected, sizeof expected, "rank %d", comm->n_ranks - 1);
    if (status != DPL_OK) assert_non_null(strstr(dpl_error_message(), expected));
    dpl_ep_group_close(&group);
    dpl_ctx_close(&ctx);
}

static void ranks_that_disagree_are_refused(void **state) {
    (void)state;
    for (int what = 0; what < 5; what++) ranks_run_all(open_unequal, &what);
}

// One rank gives up while another still writes into its memory.
static void leave_in_the_middle(dpl_comm *comm, void *arg) {
    (void)arg;
    const dpl_ep_config config = {4096, 2, 1, DPL_F32, NULL, false};
    const size_t T = comm->rank == 0 ? 3000 : 0;
    dpl_ctx *ctx = lab_ctx(1, false, NULL);
    dpl_ep_group *group;
    dpl_ep_handle *handle = NULL;
    assert_int_equal(dpl_ep_group_open(ctx, comm, &config, &group), DPL_OK);
    int32_t *ids = malloc((T + 1) * sizeof *ids);
    float *x = calloc(T * config.d + 1, sizeof *x);
    for (size_t t = 0; t < T; t++) ids[t] = 1; // all to rank 1
    if (dpl_ep_prepare(group, ids, T, &handle) == DPL_OK) {
        if (comm->rank == 1) dpl_comm_set_timeout(comm, 0.001);
        (void)dpl_ep_dispatch(handle, x, 0, NULL);
    }
    dpl_ep_handle_close(&handle);
    dpl_ep_group_close(&group);
    dpl_ctx_close(&ctx);
    free(ids);
    free(x);
}

static void memory_outlives_a_rank_that_gives_up(void **state) {
    (void)state;
    if (dpl_comm_launcher()) skip();
    ranks_run("threads", 2, leave_in_the_middle, NULL);
}

static void wrong_groups_are_refused(void **state) {
    (void)state;
    static const struct {
        dpl_ep_config config;
        const char *text;
    } cases[] = {{{.d = 0, .n_experts = 4, .top_k = 2}, "d=0"},
                 {{.d = 8, .n_experts = 0, .top_k = 2}, "n_experts=0"},
                 {{.d = 8, .n_experts = 4, .top_k = 5}, "top_k=5"},
                 {{.d = 8, .n_experts = 4, .top_k = 2, .dtype = (dpl_dtype)7}, "dtype=7"}};
    dpl_ctx *ctx = lab_ctx(1, false, NULL);
    dpl_ep_group *group = NULL;
    for (size_t i = 0; i < DPL_COUNT(cases); i++) {
        assert_int_equal(dpl_ep_group_open(ctx, NULL, &cases[i].config, &group), DPL_EINVAL);
        assert_non_null(strstr(dpl_error_message(), cases[i].text));
    }
    assert_int_equal(dpl_ep_group_open(ctx, NULL, NULL, &group), DPL_EINVAL);
    assert_null(group);
    dpl_ep_group_close(&group);
    dpl_ep_handle_close(NULL);
    dpl_ctx_close(&ctx);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fp32_has_the_bits_of_one_rank),
        cmocka_unit_test(bf16_has_the_bits_of_one_rank),
        cmocka_unit_test(operators_may_be_deferred),
        cmocka_unit_test(hosts_of_several_ranks_exchange_messages),
        cmocka_unit_test(without_shared_memory_rows_are_messages),
        cmocka_unit_test(chunks_have_the_bits_of_one),
        cmocka_unit_test(sums_of_a_host_are_close),
        cmocka_unit_test(a_rank_that_gives_up_between_chunks_ends_all),
        cmocka_unit_test(an_error_of_one_rank_is_that_of_all),
        cmocka_unit_test(a_wrong_split_is_an_error),
        cmocka_unit_test(heap_gives_back_a_spike),
        cmocka_unit_test(rows_go_and_return),
        cmocka_unit_test(sizes_may_be_extreme),
        cmocka_unit_test(wrong_groups_are_refused),
        cmocka_unit_test(ranks_that_disagree_are_refused),
        cmocka_unit_test(memory_outlives_a_rank_that_gives_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
