// module.h - between the library and the module of an MPI, which is loaded at run time: so one
// program serves every MPI, and a machine without any. A module sees no symbol of the library.
#pragma once

#include "comm/comm.h"

#define DPL_COMM_MODULE_VERSION 5 // raised with every change here or of a struct in comm.h

typedef struct dpl_comm_host {
    int version;
    void *(*alloc)(size_t bytes);
    void (*free)(void *p);
    double (*now)(void);
    dpl_status (*fail)(dpl_status status, const char *format, ...);
    void (*world_fail)(dpl_world *world, dpl_status status, const char *format, ...);
    dpl_status (*world_open)(const dpl_comm_ops *ops, int rank, int n_ranks, void *world_state,
                             void *comm_state, dpl_comm **comm_out);
} dpl_comm_host;

// What a module exports. Opens a communicator of all processes that were launched together.
#define DPL_COMM_MODULE_ENTRY "dpl_comm_module_open"
typedef dpl_status (*dpl_comm_module_fn)(const dpl_comm_host *host, dpl_comm **comm_out);
