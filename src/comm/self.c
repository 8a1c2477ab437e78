// self.c - the transport of one rank: what is sent to oneself has been copied at the start, so
// nothing is ever under way.
#include "comm/comm.h"

static void start_self(dpl_comm *comm, dpl_op *op) {
    (void)comm;
    op->done = true;
}

static uint32_t look_self(dpl_world *world) {
    (void)world;
    return 0;
}

static void abort_self(dpl_world *world, const char *why) {
    (void)world, (void)why; // there are no others
}

static void leave_self(dpl_world *world) {
    (void)world;
}

static const dpl_comm_ops self = {
    .name = "self",
    .start = start_self,
    .look = look_self,
    .abort = abort_self,
    .leave = leave_self,
};

dpl_status dpl_comm_open_self(dpl_comm **comm_out) {
    return dpl_world_open(&self, 0, 1, NULL, NULL, comm_out);
}
