// self.c - the transport of one rank: what is sent to oneself is copied. Nothing is ever in
// flight, so every ticket is complete when it is returned.
#include "comm/comm.h"

// The transport has no state but this: it was aborted.
static dpl_status check_alive(const dpl_comm *comm) {
    return comm->state ? dpl_fail(DPL_ECOMM, "self: the communicator was aborted") : DPL_OK;
}

static dpl_status open_self(const char *spec, dpl_comm *comm) {
    DPL_CHECK(!spec || !*spec, "self: '%s' given, expected no options", spec);
    comm->n_ranks = 1; // and rank 0
    return DPL_OK;
}

static void close_self(dpl_comm *comm) {
    comm->state = NULL;
}

static dpl_status all_to_all(dpl_comm *comm, dpl_blocks send, dpl_blocks receive,
                             dpl_ticket *ticket_out) {
    DPL_TRY(check_alive(comm));
    DPL_CHECK(send.bytes[0] == receive.bytes[0], "self: %zu bytes sent, %zu expected",
              send.bytes[0], receive.bytes[0]);
    memmove((uint8_t *)receive.p + receive.offset[0], (uint8_t *)send.p + send.offset[0],
            send.bytes[0]);
    *ticket_out = (dpl_ticket){0};
    return DPL_OK;
}

static dpl_status all_gather(dpl_comm *comm, const void *send, size_t bytes, void *receive,
                             dpl_ticket *ticket_out) {
    DPL_TRY(check_alive(comm));
    memmove(receive, send, bytes);
    *ticket_out = (dpl_ticket){0};
    return DPL_OK;
}

static dpl_status wait_self(dpl_comm *comm, dpl_ticket ticket) {
    (void)ticket; // complete since it was given out
    return check_alive(comm);
}

static void abort_self(dpl_comm *comm, dpl_status status, const char *why) {
    if (!comm->state) dpl_log("self: aborted: %s: %s", dpl_status_text(status), why);
    comm->state = comm;
}

const dpl_comm_ops dpl_comm_self = {"self",     open_self, close_self, all_to_all,
                                    all_gather, wait_self, abort_self};
