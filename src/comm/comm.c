// comm.c - what all transports share: exchanges under way, waiting for them, agreement on errors.
//
// What depends on a value is done here, from the gathered contributions of all ranks in the order
// of ranks, so that all ranks and all transports agree.
#include "comm/comm.h"

#include <stdarg.h>
#include <stdio.h>

typedef struct verdict {
    int32_t status;
    char text[508];
} verdict;

/* ---- failure ---- */
void dpl_world_fail(dpl_world *world, dpl_status status, const char *format, ...) {
    if (world->failed != DPL_OK) return;
    va_list args;
    va_start(args, format);
    vsnprintf(world->why, sizeof world->why, format, args);
    va_end(args);
    world->failed = status;
}

static void withdraw(dpl_comm *comm) {
    for (dpl_op *op = comm->flying; op; op = op->next) {
        if (!op->done && !op->withdrawn) comm->world->ops->withdraw(comm, op);
        op->withdrawn |= !op->done;
    }
}

// With a failure nothing is under way any more: callers may free what they exchanged.
static dpl_status failure(dpl_world *world) {
    if (world->failed == DPL_OK) return DPL_OK;
    for (dpl_comm *comm = world->comms; comm; comm = comm->next) withdraw(comm);
    return dpl_fail(world->failed, "%s", world->why);
}

static dpl_status check_alive(dpl_world *world) {
    pthread_mutex_lock(&world->lock);
    world->ops->look(world);
    const dpl_status status = failure(world);
    pthread_mutex_unlock(&world->lock);
    return status;
}

// An error that ranks have agreed on before has the number of its rank.
static bool names_rank(const char *text) {
    for (const char *p = strstr(text, "rank "); p; p = strstr(p + 1, "rank ")) {
        const size_t n = strspn(p + 5, "0123456789");
        if ((p == text || p[-1] == ' ') && n > 0 && p[5 + n] == ':') return true;
    }
    return false;
}

void dpl_comm_tell(dpl_comm *comm, dpl_status status) {
    if (status != DPL_OK && dpl_comm_ranks(comm) > 1 && !names_rank(dpl_error_message()))
        dpl_comm_abort(comm, dpl_error_message());
}

static void abort_locked(dpl_world *world, const char *why) {
    if (world->failed != DPL_OK) return;
    if (names_rank(why)) dpl_world_fail(world, DPL_ECOMM, "%s", why);
    else dpl_world_fail(world, DPL_ECOMM, "rank %d: %s", world->rank, why);
    world->ops->abort(world, world->why);
    for (dpl_comm *comm = world->comms; comm; comm = comm->next) withdraw(comm);
}

void dpl_comm_abort(dpl_comm *comm, const char *why) {
    if (!comm || !why) return;
    pthread_mutex_lock(&comm->world->lock);
    abort_locked(comm->world, why);
    pthread_mutex_unlock(&comm->world->lock);
}

bool dpl_comm_has_failed(dpl_comm *comm) {
    pthread_mutex_lock(&comm->world->lock);
    const bool failed = comm->world->failed != DPL_OK;
    pthread_mutex_unlock(&comm->world->lock);
    return failed;
}

// Some times within the time-out.
static void greet(dpl_world *world) {
    const double now = dpl_now();
    if (now - world->greeted < world->timeout_s / 8 || world->failed != DPL_OK) return;
    world->greeted = now;
    if (world->ops->greet) world->ops->greet(world);
}

void dpl_comm_alive(dpl_comm *comm) {
    if (!comm) return;
    pthread_mutex_lock(&comm->world->lock);
    greet(comm->world);
    pthread_mutex_unlock(&comm->world->lock);
}

// The peers wait for this rank: without a word they would do so until the time is over.
static dpl_status give_up(dpl_comm *comm, const char *what) {
    char text[96];
    snprintf(text, sizeof text, "no memory for %s of %d ranks", what, comm->n_ranks);
    dpl_comm_abort(comm, text);
    return dpl_fail(DPL_ENOMEM, "%s", text);
}

void dpl_comm_keep(dpl_comm *comm, void (*free)(void *p), void *p) {
    dpl_world *world = comm->world;
    pthread_mutex_lock(&world->lock);
    const bool keeps = world->ops->keep && world->failed != DPL_OK;
    if (keeps) world->ops->keep(world, free, p);
    pthread_mutex_unlock(&world->lock);
    if (!keeps) free(p);
}

/* ---- communicators ---- */
static dpl_comm *alloc_comm(dpl_world *world, int rank, int n_ranks, const int *members) {
    dpl_comm *comm = dpl_alloc(sizeof *comm);
    if (!comm) return NULL;
    comm->members = dpl_alloc_array((size_t)n_ranks, sizeof *comm->members);
    if (!comm->members) {
        dpl_free(comm);
        return NULL;
    }
    for (int i = 0; i < n_ranks; i++) comm->members[i] = members ? members[i] : i;
    comm->world = world;
    comm->rank = rank;
    comm->n_ranks = n_ranks;
    return comm;
}

static void free_ops(const dpl_comm *comm, dpl_op *list) {
    while (list) {
        dpl_op *op = list;
        list = op->next;
        if (comm->world->ops->free_op) comm->world->ops->free_op(op);
        dpl_free(op->heard);
        dpl_free(op);
    }
}

static void free_comm(dpl_comm *comm) {
    free_ops(comm, comm->flying);
    free_ops(comm, comm->spare);
    dpl_free(comm->members);
    dpl_free(comm);
}

dpl_status dpl_world_open(const dpl_comm_ops *ops, int rank, int n_ranks, void *world_state,
                          void *comm_state, dpl_comm **comm_out) {
    dpl_world *world = dpl_alloc(sizeof *world);
    dpl_comm *comm = world ? alloc_comm(world, rank, n_ranks, NULL) : NULL;
    if (comm) world->heard_s = dpl_alloc_array((size_t)n_ranks, sizeof *world->heard_s);
    if (!comm || !world->heard_s) {
        if (comm) free_comm(comm);
        dpl_free(world);
        return dpl_fail(DPL_ENOMEM, "no memory for a communicator of %d ranks", n_ranks);
    }
    world->ops = ops;
    world->rank = rank;
    world->n_ranks = n_ranks;
    world->state = world_state;
    world->timeout_s = 300;
    pthread_mutex_init(&world->lock, NULL);
    comm->state = comm_state;
    world->comms = comm;
    world->next_id = 1;
    *comm_out = comm;
    return DPL_OK;
}

void dpl_comm_close(dpl_comm **comm) {
    if (!comm || !*comm) return;
    dpl_comm *c = *comm;
    dpl_world *world = c->world;
    pthread_mutex_lock(&world->lock);
    if (world->comms == c && !c->next) dpl_lane_close(world);
    dpl_comm **at = &world->comms;
    while (*at != c) at = &(*at)->next;
    *at = c->next;
    withdraw(c); // what nobody has waited for
    if (world->ops->close) world->ops->close(c);
    free_comm(c);
    const bool last = !world->comms;
    if (last) world->ops->leave(world);
    pthread_mutex_unlock(&world->lock);
    if (last) {
        pthread_mutex_destroy(&world->lock);
        dpl_free(world->heard_s);
        dpl_free(world);
    }
    *comm = NULL;
}

typedef struct choice {
    int color, next_id;
} choice;

// The ranks of the parent that have chosen as this one. NULL where it has chosen none.
static dpl_status make_child(dpl_comm *parent, const choice *all, dpl_comm **child_out) {
    const int R = parent->n_ranks, color = all[parent->rank].color;
    int *members = dpl_alloc_array((size_t)R, sizeof *members), n = 0, rank = 0, id = 0;
    for (int r = 0; r < R && members; r++) {
        id = DPL_MAX(id, all[r].next_id);
        if (color < 0 || all[r].color != color) continue;
        if (r == parent->rank) rank = n;
        members[n++] = parent->members[r];
    }
    parent->world->next_id = id + 1;
    if (n > 0) *child_out = alloc_comm(parent->world, rank, n, members);
    if (*child_out) (*child_out)->id = id;
    const bool complete = members && (n == 0 || *child_out);
    dpl_free(members);
    return complete ? DPL_OK : dpl_fail(DPL_ENOMEM, "no memory for a communicator of %d ranks", R);
}

dpl_status dpl_comm_split(dpl_comm *parent, int color, dpl_comm **comm_out) {
    const dpl_comm_ops *ops = parent->world->ops;
    const choice own = {color, parent->world->next_id};
    choice *all = dpl_alloc_array((size_t)parent->n_ranks, sizeof *all);
    dpl_comm *child = NULL;
    dpl_status status = DPL_OK;
    if (!all) status = dpl_fail(DPL_ENOMEM, "no memory for %d ranks", parent->n_ranks);
    status = dpl_comm_agree(parent, status);
    if (status == DPL_OK) status = dpl_comm_gather_now(parent, &own, sizeof own, all);
    if (status == DPL_OK) status = dpl_comm_agree(parent, make_child(parent, all, &child));
    if (status == DPL_OK && ops->split) status = ops->split(parent, child);
    dpl_free(all);
    if (status != DPL_OK) {
        if (child) free_comm(child);
        return status;
    }
    if (child) {
        pthread_mutex_lock(&parent->world->lock);
        child->next = parent->world->comms;
        parent->world->comms = child;
        pthread_mutex_unlock(&parent->world->lock);
    }
    *comm_out = child;
    return DPL_OK;
}

int dpl_comm_rank(const dpl_comm *comm) {
    return comm ? comm->rank : 0;
}

int dpl_comm_ranks(const dpl_comm *comm) {
    return comm ? comm->n_ranks : 1;
}

void dpl_comm_set_timeout(dpl_comm *comm, double seconds) {
    if (!comm || !(seconds > 0)) return;
    pthread_mutex_lock(&comm->world->lock);
    comm->world->timeout_s = seconds;
    pthread_mutex_unlock(&comm->world->lock);
}

/* ---- progress ---- */
bool dpl_world_advance(dpl_world *world) {
    bool is_flying = false;
    for (dpl_comm *comm = world->comms; comm && world->failed == DPL_OK; comm = comm->next)
        for (dpl_op *op = comm->flying; op && world->failed == DPL_OK; op = op->next) {
            if (!op->done && !op->withdrawn) world->ops->advance(comm, op);
            is_flying |= !op->done && !op->withdrawn;
        }
    return is_flying && world->failed == DPL_OK;
}

static bool is_silent(const dpl_world *world, int rank, double since) {
    return world->waited_s - DPL_MAX(world->heard_s[rank], since) > world->timeout_s;
}

// Whom an exchange waits for: who has sent nothing, or has not taken what this rank sends, and is
// silent. Where the transport does not know who has taken, it is who is silent. -1: nobody.
static int find_silent(const dpl_comm *comm, const dpl_op *op, double since) {
    const dpl_world *world = comm->world;
    bool all_sent = true;
    int silent = -1;
    for (int r = 0; r < comm->n_ranks; r++) {
        if (r == comm->rank) continue;
        const bool is = is_silent(world, comm->members[r], since);
        if (is && !op->heard[r]) return r;
        if (is && silent < 0) silent = r;
        all_sent &= op->heard[r];
    }
    if (!all_sent || !world->ops->late) return all_sent ? silent : -1;
    const int late = world->ops->late(op);
    return late >= 0 && is_silent(world, comm->members[late], since) ? late : -1;
}

// Ranks that wait, or are busy, give signs of life. So one that gives none is named by who waits
// for it, and those who wait for others meanwhile go on waiting. since: waited_s when the wait
// began.
static void check_silence(dpl_comm *comm, const dpl_op *op, double since) {
    dpl_world *world = comm->world;
    if (world->waited_s - since < world->timeout_s) return;
    const int rank = find_silent(comm, op, since);
    char text[200];
    if (rank < 0) return;
    snprintf(text, sizeof text,
             "rank %d has not been heard of for %g s (comm_timeout_s): dead, stopped or slow",
             comm->members[rank], world->timeout_s);
    abort_locked(world, text);
}

// Seconds of a turn, as far as this rank was awake: a job may be stopped as a whole.
static double awake_s(double *last) {
    const double now = dpl_now(), passed = now - *last;
    *last = now;
    return DPL_MIN(passed, 0.1);
}

static bool is_done(const dpl_comm *comm, uint64_t id, const dpl_op **op_out) {
    const dpl_op *op = comm->flying;
    while (op && op->id != id) op = op->next;
    *op_out = op;
    return !op || op->done;
}

// Until the exchange is done, or the world has failed. Called and returns with the lock held.
static dpl_status wait_locked(dpl_comm *comm, uint64_t id) {
    dpl_world *world = comm->world;
    double last = dpl_now();
    const double since = world->waited_s;
    const dpl_op *op;
    for (unsigned n_rests = 0;; n_rests++) {
        const uint32_t seen = world->ops->look(world);
        dpl_world_advance(world);
        if (is_done(comm, id, &op) || world->failed != DPL_OK) break;
        world->waited_s += awake_s(&last);
        greet(world);
        check_silence(comm, op, since);
        world->waits = true;
        pthread_mutex_unlock(&world->lock);
        world->ops->rest(world, seen, n_rests);
        pthread_mutex_lock(&world->lock);
    }
    if (world->lane && world->waits) dpl_lane_wake(world);
    world->waits = false;
    return is_done(comm, id, &op) ? DPL_OK : failure(world); // even if somebody has failed since
}

/* ---- exchanges ---- */
static dpl_op *alloc_op(const dpl_comm *comm) {
    const size_t R = (size_t)comm->n_ranks;
    dpl_op *op = dpl_alloc(sizeof *op + 4 * R * sizeof(size_t));
    if (!op) return NULL;
    op->heard = dpl_alloc(R);
    if (op->heard) return op;
    dpl_free(op);
    return NULL;
}

static void copy_own_block(const dpl_comm *comm, const dpl_op *op) {
    const size_t me = (size_t)comm->rank;
    memmove((uint8_t *)op->receive.p + op->receive.offset[me],
            (uint8_t *)op->send.p + op->send.offset[me], op->receive.bytes[me]);
}

static void fill_op(const dpl_comm *comm, dpl_op *op, dpl_blocks send, dpl_blocks receive) {
    const size_t R = (size_t)comm->n_ranks;
    const size_t *const from[] = {send.offset, send.bytes, receive.offset, receive.bytes};
    for (size_t i = 0; i < DPL_COUNT(from); i++)
        memcpy(op->sizes + i * R, from[i], R * sizeof(size_t));
    op->send = (dpl_blocks){send.p, op->sizes, op->sizes + R};
    op->receive = (dpl_blocks){receive.p, op->sizes + 2 * R, op->sizes + 3 * R};
    op->done = op->withdrawn = false;
    op->n_due = 0;
    for (size_t r = 0; r < R; r++) {
        op->heard[r] = (int)r == comm->rank || receive.bytes[r] == 0;
        op->n_due += !op->heard[r];
    }
}

static dpl_status start_locked(dpl_comm *comm, dpl_blocks send, dpl_blocks receive,
                               dpl_ticket *ticket_out) {
    const size_t me = (size_t)comm->rank;
    DPL_TRY(failure(comm->world));
    DPL_CHECK(send.bytes[me] == receive.bytes[me], "%s: %zu bytes sent, %zu expected",
              dpl_comm_name(comm), send.bytes[me], receive.bytes[me]);
    if (comm->n_started >= DPL_OPS_MAX)
        DPL_TRY(wait_locked(comm, comm->n_started + 1 - DPL_OPS_MAX));
    dpl_op *op = comm->spare;
    if (op) comm->spare = op->next;
    else if (!(op = alloc_op(comm))) return DPL_ENOMEM;
    fill_op(comm, op, send, receive);
    copy_own_block(comm, op);
    op->id = ++comm->n_started;
    op->next = NULL;
    dpl_op **last = &comm->flying;
    while (*last) last = &(*last)->next;
    *last = op;
    comm->world->ops->start(comm, op);
    if (comm->world->lane && !op->done) dpl_lane_wake(comm->world);
    *ticket_out = (dpl_ticket){op->id};
    return failure(comm->world);
}

static dpl_status start(dpl_comm *comm, dpl_blocks send, dpl_blocks receive,
                        dpl_ticket *ticket_out) {
    pthread_mutex_lock(&comm->world->lock);
    const dpl_status status = start_locked(comm, send, receive, ticket_out);
    pthread_mutex_unlock(&comm->world->lock);
    return status == DPL_ENOMEM ? give_up(comm, "an exchange") : status;
}

dpl_status dpl_comm_exchange(dpl_comm *comm, dpl_blocks send, dpl_blocks receive,
                             dpl_ticket *ticket_out) {
    return start(comm, send, receive, ticket_out);
}

// Blocks of equal size. With `same` every rank gets the one block that there is.
static dpl_status start_equal(dpl_comm *comm, const void *send, bool same, size_t bytes,
                              void *receive, dpl_ticket *ticket_out) {
    const size_t R = (size_t)comm->n_ranks;
    size_t few[3 * 16], *sizes = R <= 16 ? few : dpl_alloc_array(3 * R, sizeof *sizes);
    if (!sizes) return give_up(comm, "an exchange");
    size_t *const zero = sizes, *const each = sizes + R, *const place = sizes + 2 * R;
    for (size_t r = 0; r < R; r++) zero[r] = 0, each[r] = bytes, place[r] = r * bytes;
    const dpl_blocks from = {(void *)(uintptr_t)send, same ? zero : place, each},
                     to = {receive, place, each};
    const dpl_status status = start(comm, from, to, ticket_out);
    if (sizes != few) dpl_free(sizes);
    return status;
}

dpl_status dpl_comm_gather(dpl_comm *comm, const void *send, size_t bytes, void *receive,
                           dpl_ticket *ticket_out) {
    return start_equal(comm, send, true, bytes, receive, ticket_out);
}

dpl_status dpl_comm_swap(dpl_comm *comm, const void *send, size_t bytes, void *receive,
                         dpl_ticket *ticket_out) {
    return start_equal(comm, send, false, bytes, receive, ticket_out);
}

dpl_status dpl_comm_wait(dpl_comm *comm, dpl_ticket ticket) {
    if (!ticket.id) return check_alive(comm->world);
    pthread_mutex_lock(&comm->world->lock);
    const dpl_status status = wait_locked(comm, ticket.id);
    dpl_op **at = &comm->flying;
    while (*at && (*at)->id != ticket.id) at = &(*at)->next;
    if (*at && (*at)->done) {
        dpl_op *op = *at;
        *at = op->next;
        op->next = comm->spare;
        comm->spare = op;
    }
    pthread_mutex_unlock(&comm->world->lock);
    return status;
}

bool dpl_comm_is_done(dpl_comm *comm, dpl_ticket ticket) {
    dpl_world *world = comm->world;
    const dpl_op *op;
    if (!ticket.id) return true;
    pthread_mutex_lock(&world->lock);
    world->ops->look(world);
    dpl_world_advance(world);
    const bool done = is_done(comm, ticket.id, &op) || world->failed != DPL_OK;
    pthread_mutex_unlock(&world->lock);
    return done;
}

dpl_status dpl_comm_gather_now(dpl_comm *comm, const void *send, size_t bytes, void *receive) {
    dpl_ticket ticket;
    DPL_TRY(dpl_comm_gather(comm, send, bytes, receive, &ticket));
    return dpl_comm_wait(comm, ticket);
}

dpl_status dpl_comm_barrier(dpl_comm *comm) {
    uint8_t few[64] = {0}, *all = few;
    if (comm->n_ranks > (int)sizeof few && !(all = dpl_alloc((size_t)comm->n_ranks)))
        return give_up(comm, "a barrier");
    const uint8_t mine = 1;
    const dpl_status status = dpl_comm_gather_now(comm, &mine, 1, all);
    if (all != few) dpl_free(all);
    return status;
}

/* ---- agreement ---- */
// A rank that has failed may have nowhere to put the blocks: they come after all verdicts.
static dpl_status read_verdicts(const dpl_comm *comm, const uint8_t *all, size_t bytes,
                                uint8_t *receive) {
    const size_t R = (size_t)comm->n_ranks, each = sizeof(verdict) + bytes;
    for (size_t r = 0; r < R; r++) {
        verdict v;
        memcpy(&v, all + r * each, sizeof v);
        // The lowest rank that failed speaks for all.
        if (v.status != DPL_OK && names_rank(v.text))
            return dpl_fail((dpl_status)v.status, "%s", v.text);
        if (v.status != DPL_OK)
            return dpl_fail((dpl_status)v.status, "rank %d: %s", comm->members[r], v.text);
    }
    for (size_t r = 0; r < R && bytes > 0; r++)
        memcpy(receive + r * bytes, all + r * each + sizeof(verdict), bytes);
    return DPL_OK;
}

dpl_status dpl_comm_agree_on(dpl_comm *comm, dpl_status mine, const void *send, size_t bytes,
                             void *receive) {
    if (comm->n_ranks == 1) { // with itself it agrees
        DPL_TRY(mine);
        if (bytes > 0) memcpy(receive, send, bytes);
        return check_alive(comm->world);
    }
    verdict own = {.status = mine};
    if (mine != DPL_OK) snprintf(own.text, sizeof own.text, "%s", dpl_error_message());
    const size_t each = sizeof own + bytes;
    uint8_t *all = dpl_alloc_array((size_t)comm->n_ranks + 1, each);
    if (!all) return give_up(comm, "verdicts");
    uint8_t *mine_out = all + (size_t)comm->n_ranks * each;
    memcpy(mine_out, &own, sizeof own);
    if (bytes > 0) memcpy(mine_out + sizeof own, send, bytes);
    dpl_status status = dpl_comm_gather_now(comm, mine_out, each, all);
    if (status == DPL_OK) status = read_verdicts(comm, all, bytes, receive);
    dpl_free(all);
    return status;
}

dpl_status dpl_comm_agree(dpl_comm *comm, dpl_status mine) {
    return dpl_comm_agree_on(comm, mine, NULL, 0, NULL);
}

/* ---- sums ---- */
// Each rank adds up a part of all arrays, in the order of ranks, and hands it out: so what a rank
// sends and receives does not grow with their number.
typedef void (*sum_fn)(const void *parts, size_t R, size_t n, void *sum);

static dpl_status sum_parts(dpl_comm *comm, void *x, size_t n, size_t width, sum_fn add) {
    const size_t R = (size_t)comm->n_ranks, part = dpl_div_up(n, R), bytes = part * width;
    if (R == 1 || n == 0) return DPL_OK;
    uint8_t *whole = dpl_alloc_array(2 * R + 1, bytes); // zeros
    if (!whole) return give_up(comm, "a sum");
    uint8_t *parts = whole + R * bytes, *mine = parts + R * bytes;
    memcpy(whole, x, n * width);
    dpl_ticket ticket;
    dpl_status status = dpl_comm_swap(comm, whole, bytes, parts, &ticket);
    if (status == DPL_OK) status = dpl_comm_wait(comm, ticket);
    if (status == DPL_OK) add(parts, R, part, mine);
    if (status == DPL_OK) status = dpl_comm_gather_now(comm, mine, bytes, whole);
    if (status == DPL_OK) memcpy(x, whole, n * width);
    dpl_free(whole);
    return status;
}

#define SUM(name, type)                                                        \
    static void add_##type(const void *parts, size_t R, size_t n, void *sum) { \
        const type *from = parts;                                              \
        type *to = sum;                                                        \
        memcpy(to, from, n * sizeof *to);                                      \
        for (size_t r = 1; r < R; r++)                                         \
            for (size_t i = 0; i < n; i++) to[i] += from[r * n + i];           \
    }                                                                          \
    dpl_status name(dpl_comm *comm, type *x, size_t n) {                       \
        return sum_parts(comm, x, n, sizeof *x, add_##type);                   \
    }
SUM(dpl_comm_sum_f64, double)
SUM(dpl_comm_sum_i64, int64_t)
