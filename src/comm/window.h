// window.h - memory that ranks of one host write and read in common.
#pragma once

#include "comm/comm.h"

typedef struct dpl_window {
    dpl_comm *comm;
    dpl_heap *heap; // of this rank
    uint8_t **base; // (R): where the heap of each rank begins here; NULL: on another host
    int n_ranks;
    int *host;            // (R): the lowest rank of each rank's host
    size_t *mapped_bytes; // (R); 0: nothing to unmap
} dpl_window;

// Reserves a heap and maps those of the other ranks that are of this process or of this machine and
// give the same `island`; below 0: none. What `host` says is the same on all ranks: two share
// memory in both directions, or are of two hosts. DPL_ENOMEM: not enough addresses for all of them.
// Collective.
dpl_status dpl_window_open(dpl_comm *comm, size_t reserve_bytes, int island,
                           dpl_window **window_out);
void dpl_window_close(dpl_window **window);
// Ranks on this rank's machine, itself included. Collective.
dpl_status dpl_comm_neighbours(dpl_comm *comm, size_t *n_out);
