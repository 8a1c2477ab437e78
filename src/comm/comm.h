// comm.h - the communicator: ranks that exchange bytes. A transport is one file, one const table.
//
// An exchange is started and waited for: a start returns a ticket, wait completes it, and every
// wait makes progress on everything that this rank has started, in whatever communicator. So does a
// lane (lane.c), a thread that does nothing else, where there is one; nothing depends on it. All
// ranks of a communicator start the same exchanges in the same order. A transport moves bytes and
// nothing else: sums and agreements are made here, in the order of ranks, so all transports give
// the same bits.
//
// Errors agree: a rank that fails passes its status through dpl_comm_agree() where all ranks meet,
// or aborts, and then every call of every rank fails with its text. So does a rank that the others
// have not heard of for comm_timeout_s.
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "base/base.h"

typedef struct dpl_world dpl_world;

// The bytes that this rank sends to, or receives from, each rank: block r is at p + offset[r].
typedef struct dpl_blocks {
    void *p;
    const size_t *offset, *bytes; // (R)
} dpl_blocks;

typedef struct dpl_ticket {
    uint64_t id; // 0: already complete
} dpl_ticket;

// An exchange under way. Blocks of this rank to itself are copied at the start.
typedef struct dpl_op {
    uint64_t id; // 1, 2, .. of its communicator
    dpl_blocks send, receive;
    bool done, withdrawn;
    bool *heard;  // (R) the block of a rank has come
    size_t n_due; // blocks that have not
    void *state;  // of the transport, kept for the next exchange
    struct dpl_op *next;
    size_t sizes[]; // (4, R): what send and receive point to
} dpl_op;

// Exchanges of one communicator that may be under way at a time; a further one waits for the first.
#define DPL_OPS_MAX   16
#define DPL_RANKS_MAX 4096

struct dpl_comm {
    dpl_world *world;
    int rank, n_ranks;
    int *members; // (R): their ranks in the world
    int id;       // no other communicator that has two ranks of this one has it
    void *state;  // of the transport
    uint64_t n_started;
    dpl_op *flying, *spare; // in the order of their start; for the next ones
    dpl_comm *next;         // of this rank
};

// Functions but open and split are called with the world's lock held, and return DPL_OK at once.
// What they find is the world's failure: dpl_world_fail().
// Where start() leaves every exchange done, there is no advance, withdraw or rest: NULL.
typedef struct dpl_comm_ops {
    const char *name;
    // Makes `child`, NULL where this rank is in none, of ranks of the parent, all of which call it.
    // NULL: nothing is to be done.
    dpl_status (*split)(dpl_comm *parent, dpl_comm *child);
    void (*close)(dpl_comm *comm); // NULL: nothing is to be done
    void (*start)(dpl_comm *comm, dpl_op *op);
    void (*advance)(dpl_comm *comm, dpl_op *op);  // sets `heard` and `done`
    void (*withdraw)(dpl_comm *comm, dpl_op *op); // after it nothing touches its blocks
    int (*late)(const dpl_op *op); // a rank that has not taken what this one sends; NULL: not known
    void (*free_op)(dpl_op *op);   // its state; NULL: it has none
    // Looks for an abort; what it returns changes when there may be something new.
    uint32_t (*look)(dpl_world *world);
    // Waits a little, at most until `seen` is no longer what look() would return. Without the lock.
    // n_rests DPL_RESTS_LANE: a lane, which sleeps so long that it costs little.
    void (*rest)(dpl_world *world, uint32_t seen, unsigned n_rests);
    void (*abort)(dpl_world *world, const char *why); // tells the others
    // Tells the others that this rank is alive: each one's look() says so to dpl_world_hear().
    // NULL: there are no others.
    void (*greet)(dpl_world *world);
    // Frees what peers may still use, when it is sure that they do not. NULL: at once.
    void (*keep)(dpl_world *world, void (*free)(void *p), void *p);
    void (*leave)(dpl_world *world); // the last of a world
} dpl_comm_ops;

#define DPL_RESTS_LANE UINT32_MAX

// What all communicators of a rank share.
struct dpl_world {
    const dpl_comm_ops *ops;
    int rank, n_ranks;
    double timeout_s;
    void *state; // of the transport
    pthread_mutex_t lock;
    dpl_comm *comms;
    int next_id;
    bool no_lane;          // the transport may be called by the thread that opened it alone
    bool waits;            // that thread is in a wait, where it makes progress itself
    struct dpl_lane *lane; // NULL: none
    double waited_s;       // by this rank, in all
    double *heard_s;       // (n_ranks): waited_s at the last sign of life
    double greeted;        // when
    uint32_t n_greetings;  // of the transport: that it has seen
    dpl_status failed;
    char why[512];
};

/* ---- opening ---- */
dpl_status dpl_comm_open_self(dpl_comm **comm_out); // one rank
// A rank's world with its communicator of all ranks, around what the transport has made. The
// transport's leave() is called when that communicator, the last one, is closed.
dpl_status dpl_world_open(const dpl_comm_ops *ops, int rank, int n_ranks, void *world_state,
                          void *comm_state, dpl_comm **comm_out);
// Of the ranks that give the same color, in their order; color < 0: of none, *comm_out is NULL.
// Collective.
dpl_status dpl_comm_split(dpl_comm *parent, int color, dpl_comm **comm_out);
static inline const char *dpl_comm_name(const dpl_comm *comm) {
    return comm->world->ops->name;
}

/* ---- exchanges ---- */
// Sizes must be the same at both ends; blocks of 0 bytes are not sent. What `p` points to is left
// alone until the exchange is waited for; offsets and bytes are copied.
dpl_status dpl_comm_exchange(dpl_comm *comm, dpl_blocks send, dpl_blocks receive,
                             dpl_ticket *ticket_out);
// receive (R, bytes), bytes > 0. Complete only after every rank has started it.
dpl_status dpl_comm_gather(dpl_comm *comm, const void *send, size_t bytes, void *receive,
                           dpl_ticket *ticket_out);
// Block r of send (R, bytes) to rank r, block r of receive (R, bytes) from it.
dpl_status dpl_comm_swap(dpl_comm *comm, const void *send, size_t bytes, void *receive,
                         dpl_ticket *ticket_out);
dpl_status dpl_comm_wait(dpl_comm *comm, dpl_ticket ticket);
// The same two, waited for.
dpl_status dpl_comm_gather_now(dpl_comm *comm, const void *send, size_t bytes, void *receive);
dpl_status dpl_comm_barrier(dpl_comm *comm);
// Makes progress and waits for nobody. After a failure everything is done: the wait says so.
bool dpl_comm_is_done(dpl_comm *comm, dpl_ticket ticket);

/* ---- sums: x (n) of all ranks, in the order of ranks, the same bits everywhere ---- */
dpl_status dpl_comm_sum_f64(dpl_comm *comm, double *x, size_t n);
dpl_status dpl_comm_sum_i64(dpl_comm *comm, int64_t *x, size_t n);

/* ---- errors ---- */
// The status of the lowest rank that failed, with its text: the same on every rank. Collective.
dpl_status dpl_comm_agree(dpl_comm *comm, dpl_status mine);
// The same in one exchange with a gather, whose result is good only where the status is DPL_OK.
dpl_status dpl_comm_agree_on(dpl_comm *comm, dpl_status mine, const void *send, size_t bytes,
                             void *receive);
bool dpl_comm_has_failed(dpl_comm *comm);
// Aborts with this thread's error, of which the others may not know; not where it names a rank:
// then all have agreed on it, and some may still be at that.
void dpl_comm_tell(dpl_comm *comm, dpl_status status);
// This rank is at something that takes long, such as a file: the others go on waiting. To be called
// again and again; it tells them some times within the time-out. NULL: nobody waits.
void dpl_comm_alive(dpl_comm *comm);
// Frees memory that ranks of this process reach in each other's place: after a failure a peer may
// still be at it.
void dpl_comm_keep(dpl_comm *comm, void (*free)(void *p), void *p);
/* ---- lane.c: called with the world's lock held ---- */
// On what is under way; none: nothing is.
bool dpl_world_advance(dpl_world *world);
void dpl_lane_wake(dpl_world *world);  // something was started, or a wait is over
void dpl_lane_close(dpl_world *world); // gives the lock away meanwhile

// For transports: a sign of life of a rank of the world.
static inline void dpl_world_hear(dpl_world *world, int rank) {
    world->heard_s[rank] = world->waited_s;
}
// For transports: why every further call fails. The first reason stays.
void dpl_world_fail(dpl_world *world, dpl_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
