// comm.h - the communicator: ranks that exchange bytes. A transport is one file, one const table.
//
// Calls are started and waited for: a start returns a ticket, wait completes it, and every wait
// makes progress on everything that was started. All ranks start the same calls in the same order.
// Errors agree: a rank that fails passes its status through dpl_comm_agree() before the next
// exchange, or aborts.
#pragma once

#include "base/base.h"

typedef struct dpl_comm dpl_comm;
typedef struct dpl_ticket {
    uint64_t id; // 0: already complete
} dpl_ticket;

// The bytes that this rank sends to, or receives from, each rank: block r is at p + offset[r].
typedef struct dpl_blocks {
    void *p;
    const size_t *offset, *bytes; // (R)
} dpl_blocks;

typedef struct dpl_comm_ops {
    const char *name;
    dpl_status (*open)(const char *spec, dpl_comm *comm);
    void (*close)(dpl_comm *comm);
    dpl_status (*all_to_all)(dpl_comm *comm, dpl_blocks send, dpl_blocks receive,
                             dpl_ticket *ticket_out);
    dpl_status (*all_gather)(dpl_comm *comm, const void *send, size_t bytes,
                             void *receive, // (R, bytes)
                             dpl_ticket *ticket_out);
    dpl_status (*wait)(dpl_comm *comm, dpl_ticket ticket);
    void (*abort)(dpl_comm *comm, dpl_status status, const char *why);
} dpl_comm_ops;

struct dpl_comm {
    const dpl_comm_ops *ops;
    int rank, n_ranks;
    void *state; // the transport's own
};

extern const dpl_comm_ops dpl_comm_self; // one rank: a block to itself is a copy

// Opens a transport by name; an unknown one is DPL_EINVAL with the list of those built in.
dpl_status dpl_comm_open(const char *transport, const char *spec, dpl_comm **comm_out);
void dpl_comm_close(dpl_comm **comm);
// The status of the lowest rank that failed, with its text: the same on every rank. Collective.
dpl_status dpl_comm_agree(dpl_comm *comm, dpl_status mine);
