// threads.c - the transport of ranks that are threads of one process.
//
// A rank posts what it sends; each peer copies its block out of the sender's memory itself, as soon
// as it has started the same exchange, and counts down. An exchange is done when this rank has all
// blocks and the others have taken its own. Who has nothing to do watches one counter of events,
// first spinning, then asleep.
#include "comm/comm.h"

#define SPINS 2000 // about 50 us: longer than ranks that run side by side are apart

typedef struct kept { // what is freed when the last rank has left
    void (*free)(void *p);
    void *p;
    struct kept *next;
} kept;

typedef struct hub { // of all ranks
    _Atomic uint32_t n_events, n_greetings;
    atomic_bool *greetings; // (R, R): of each rank, from each
    atomic_int n_asleep, n_refs;
    bool spins; // every rank can have a processor
    atomic_bool failed;
    pthread_mutex_t lock; // of what follows
    char why[512];
    kept *kept;
} hub;

// What a rank has started, for the others to fetch.
typedef struct posted {
    _Alignas(DPL_ALIGN) _Atomic uint64_t id; // 0: nothing, or withdrawn
    atomic_int n_untaken, n_readers;
    const dpl_op *op;
} posted;

typedef struct group { // of a communicator; lives as long as the hub
    posted at[1];      // (R, DPL_OPS_MAX)
} group;

static posted *post_of(const dpl_comm *comm, int rank, uint64_t id) {
    group *g = comm->state;
    return &g->at[(size_t)rank * DPL_OPS_MAX + id % DPL_OPS_MAX];
}

static void tell(hub *h) {
    atomic_fetch_add(&h->n_events, 1);
    if (atomic_load(&h->n_asleep) > 0) dpl_futex_wake(&h->n_events, INT32_MAX);
}

static bool keep_in(hub *h, void (*free)(void *p), void *p) {
    kept *k = dpl_alloc(sizeof *k);
    if (!k) return false; // rather lost than freed too early
    pthread_mutex_lock(&h->lock);
    *k = (kept){free, p, h->kept};
    h->kept = k;
    pthread_mutex_unlock(&h->lock);
    return true;
}

static void keep(dpl_world *world, void (*free)(void *p), void *p) {
    (void)keep_in(world->state, free, p);
}

// A peer may still look at what a rank that has failed has posted: nothing of it goes before all.
static group *alloc_group(hub *h, int n_ranks) {
    group *g = dpl_alloc((size_t)n_ranks * DPL_OPS_MAX * sizeof(posted));
    if (!g || keep_in(h, dpl_free, g)) return g;
    dpl_free(g);
    return NULL;
}

/* ---- exchanges ---- */
static void start(dpl_comm *comm, dpl_op *op) {
    posted *mine = post_of(comm, comm->rank, op->id);
    // All look at the blocks of all, empty ones too: sizes that differ are found, and who is done
    // knows that nobody looks any more.
    op->n_due = (size_t)comm->n_ranks - 1;
    for (int r = 0; r < comm->n_ranks; r++) op->heard[r] = r == comm->rank;
    atomic_store(&mine->n_untaken, comm->n_ranks - 1);
    mine->op = op;
    atomic_store(&mine->id, op->id);
    tell(comm->world->state);
}

// Copies the block that `rank` sends to this one. False: there is none yet.
static bool take(dpl_comm *comm, const dpl_op *op, int rank) {
    posted *theirs = post_of(comm, rank, op->id);
    const size_t from = (size_t)rank, me = (size_t)comm->rank;
    if (atomic_load(&theirs->id) != op->id) return false;
    // Either this sees that it was withdrawn, or who withdraws it sees this reader.
    atomic_fetch_add(&theirs->n_readers, 1);
    bool there = atomic_load(&theirs->id) == op->id;
    if (there) {
        const dpl_blocks *send = &theirs->op->send;
        if (send->bytes[me] != op->receive.bytes[from]) {
            there = false; // it never comes
            dpl_world_fail(comm->world, DPL_EINVAL,
                           "threads: rank %d sends %zu bytes to rank %d, which expects %zu",
                           comm->members[rank], send->bytes[me], comm->members[comm->rank],
                           op->receive.bytes[from]);
        } else if (send->bytes[me] > 0) {
            memcpy((uint8_t *)op->receive.p + op->receive.offset[from],
                   (const uint8_t *)send->p + send->offset[me], send->bytes[me]);
        }
        atomic_fetch_sub(&theirs->n_untaken, 1);
    }
    atomic_fetch_sub(&theirs->n_readers, 1);
    return there;
}

static void advance(dpl_comm *comm, dpl_op *op) {
    const int R = comm->n_ranks;
    const size_t n_before = op->n_due;
    for (int i = 1; i < R && op->n_due > 0; i++) {
        const int rank = (comm->rank + i) % R;
        if (op->heard[rank] || !take(comm, op, rank)) continue;
        op->heard[rank] = true;
        op->n_due--;
        dpl_world_hear(comm->world, comm->members[rank]);
    }
    if (op->n_due < n_before) tell(comm->world->state);
    op->done = op->n_due == 0 && atomic_load(&post_of(comm, comm->rank, op->id)->n_untaken) == 0;
    if (comm->world->failed != DPL_OK) comm->world->ops->abort(comm->world, comm->world->why);
}

static void withdraw(dpl_comm *comm, dpl_op *op) {
    posted *mine = post_of(comm, comm->rank, op->id);
    atomic_store(&mine->id, 0);
    while (atomic_load(&mine->n_readers) > 0) dpl_relax();
}

/* ---- waiting ---- */
static uint32_t look(dpl_world *world) {
    hub *h = world->state;
    const uint32_t n_events = atomic_load(&h->n_events);
    if (atomic_load(&h->failed) && world->failed == DPL_OK) {
        pthread_mutex_lock(&h->lock);
        dpl_world_fail(world, DPL_ECOMM, "%s", h->why);
        pthread_mutex_unlock(&h->lock);
    }
    const uint32_t n_greetings = atomic_load(&h->n_greetings);
    for (int r = 0; r < world->n_ranks && n_greetings != world->n_greetings; r++)
        if (atomic_exchange(&h->greetings[(size_t)(world->rank * world->n_ranks + r)], 0))
            dpl_world_hear(world, r);
    world->n_greetings = n_greetings;
    return n_events;
}

static void greet(dpl_world *world) {
    hub *h = world->state;
    for (int r = 0; r < world->n_ranks; r++)
        atomic_store(&h->greetings[(size_t)(r * world->n_ranks + world->rank)], 1);
    atomic_fetch_add(&h->n_greetings, 1);
    tell(h);
}

static void rest(dpl_world *world, uint32_t seen, unsigned n_rests) {
    hub *h = world->state;
    if (h->spins && n_rests < SPINS) {
        dpl_relax();
        return;
    }
    atomic_fetch_add(&h->n_asleep, 1);
    dpl_futex_wait(&h->n_events, seen, n_rests == DPL_RESTS_LANE ? 1e-3 : 10e-3);
    atomic_fetch_sub(&h->n_asleep, 1);
}

static void abort_all(dpl_world *world, const char *why) {
    hub *h = world->state;
    pthread_mutex_lock(&h->lock);
    if (!atomic_load(&h->failed)) memcpy(h->why, why, strnlen(why, sizeof h->why - 1));
    atomic_store(&h->failed, true);
    pthread_mutex_unlock(&h->lock);
    tell(h);
}

/* ---- communicators ---- */
// The first rank of each new communicator makes what its ranks share.
static dpl_status split(dpl_comm *parent, dpl_comm *child) {
    const size_t R = (size_t)parent->n_ranks;
    group *mine = child && child->rank == 0 ? alloc_group(parent->world->state, child->n_ranks)
                                            : NULL;
    dpl_status status = DPL_OK;
    if (child && child->rank == 0 && !mine)
        status = dpl_fail(DPL_ENOMEM, "no memory for %d ranks", child->n_ranks);
    group **all = dpl_alloc_array(R, sizeof *all);
    if (!all) status = dpl_fail(DPL_ENOMEM, "no memory for %zu ranks", R);
    status = dpl_comm_agree(parent, status);
    if (status == DPL_OK) status = dpl_comm_gather_now(parent, &mine, sizeof mine, all);
    for (size_t r = 0; status == DPL_OK && child && r < R; r++)
        if (parent->members[r] == child->members[0]) child->state = all[r];
    dpl_free(all);
    return status;
}

static void leave_hub(hub *h, int n_ranks) {
    if (atomic_fetch_sub(&h->n_refs, n_ranks) != n_ranks) return;
    for (kept *k = h->kept, *next; k; k = next) {
        next = k->next;
        k->free(k->p);
        dpl_free(k);
    }
    pthread_mutex_destroy(&h->lock);
    dpl_free(h->greetings);
    dpl_free(h);
}

static void leave(dpl_world *world) {
    leave_hub(world->state, 1);
}

static const dpl_comm_ops threads = {
    .name = "threads",
    .split = split,
    .start = start,
    .advance = advance,
    .withdraw = withdraw,
    .look = look,
    .rest = rest,
    .abort = abort_all,
    .greet = greet,
    .keep = keep,
    .leave = leave,
};

dpl_status dpl_comm_open_threads(int n_ranks, dpl_comm **comms_out) {
    DPL_NEED(comms_out);
    DPL_CHECK(n_ranks >= 1 && n_ranks <= DPL_RANKS_MAX, "%d ranks, expected 1 to %d", n_ranks,
              DPL_RANKS_MAX);
    hub *h = dpl_alloc(sizeof *h);
    if (!h) return dpl_fail(DPL_ENOMEM, "no memory for %d ranks", n_ranks);
    atomic_store(&h->n_refs, n_ranks);
    h->spins = n_ranks <= dpl_cpus_allowed();
    pthread_mutex_init(&h->lock, NULL);
    const size_t R = (size_t)n_ranks;
    h->greetings = dpl_alloc_array(R * R, sizeof *h->greetings);
    group *g = h->greetings ? alloc_group(h, n_ranks) : NULL;
    if (!g) {
        leave_hub(h, n_ranks);
        return dpl_fail(DPL_ENOMEM, "no memory for %d ranks", n_ranks);
    }
    for (int r = 0; r < n_ranks; r++) {
        const dpl_status status = dpl_world_open(&threads, r, n_ranks, h, g, &comms_out[r]);
        if (status == DPL_OK) continue;
        for (int i = r; i > 0; i--) dpl_comm_close(&comms_out[i - 1]);
        leave_hub(h, n_ranks - r);
        return status;
    }
    return DPL_OK;
}
