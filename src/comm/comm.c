// comm.c - what all transports share: opening by name, agreement on errors.
//
// A transport only moves bytes. What depends on a value is done here, from the gathered
// contributions of all ranks in the order of ranks, so that all ranks and transports agree.
#include "comm/comm.h"

#include <stdio.h>

static const dpl_comm_ops *const transports[] = {&dpl_comm_self};
#define TRANSPORTS "self" // their names, for an error

typedef struct verdict {
    int32_t status;
    char text[508];
} verdict;

dpl_status dpl_comm_open(const char *transport, const char *spec, dpl_comm **comm_out) {
    const dpl_comm_ops *ops = NULL;
    for (size_t i = 0; i < DPL_COUNT(transports); i++)
        if (!strcmp(transports[i]->name, transport)) ops = transports[i];
    DPL_CHECK(ops, "transport '%s' is not built in, expected one of: " TRANSPORTS, transport);
    dpl_comm *comm = dpl_alloc(sizeof *comm);
    DPL_EXPECT(comm, DPL_ENOMEM, "no memory for a communicator");
    comm->ops = ops;
    const dpl_status status = ops->open(spec, comm);
    if (status == DPL_OK) *comm_out = comm;
    else dpl_free(comm);
    return status;
}

void dpl_comm_close(dpl_comm **comm) {
    if (!comm || !*comm) return;
    (*comm)->ops->close(*comm);
    dpl_free(*comm);
    *comm = NULL;
}

dpl_status dpl_comm_agree(dpl_comm *comm, dpl_status mine) {
    const size_t n_ranks = (size_t)comm->n_ranks;
    verdict own = {.status = mine};
    if (mine != DPL_OK) snprintf(own.text, sizeof own.text, "%s", dpl_error_message());
    verdict *all = dpl_alloc_array(n_ranks, sizeof own);
    if (!all) {
        const dpl_status failed = dpl_fail(DPL_ENOMEM, "no memory for %zu verdicts", n_ranks);
        // The peers are in the exchange already: without this rank they would wait for ever.
        comm->ops->abort(comm, failed, dpl_error_message());
        return failed;
    }
    dpl_ticket ticket;
    dpl_status status = comm->ops->all_gather(comm, &own, sizeof own, all, &ticket);
    if (status == DPL_OK) status = comm->ops->wait(comm, ticket);
    for (size_t rank = 0; rank < n_ranks && status == DPL_OK; rank++) {
        status = (dpl_status)all[rank].status; // the lowest rank that failed speaks for all
        if (status != DPL_OK && n_ranks > 1) dpl_fail(status, "rank %zu: %s", rank, all[rank].text);
    }
    dpl_free(all);
    return status;
}
