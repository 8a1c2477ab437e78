// comm.c - what all transports share: opening by name, agreement on errors, sums in rank order.
//
// A transport only moves bytes. Everything that depends on a value is done here, from the
// gathered contributions of all ranks and in the order of ranks, so that every rank and every
// transport gets the same bits.
#include "comm/comm.h"

#include <stdio.h>

static const dpl_comm_ops *const transports[] = {&dpl_comm_self};

#define TEXT_BYTES 508
typedef struct verdict {
    int32_t status;
    char text[TEXT_BYTES];
} verdict;

dpl_status dpl_comm_open(const char *transport, const char *spec, dpl_comm **comm_out)
{
    char names[256] = "";
    for (size_t i = 0; i < DPL_COUNT(transports); i++) {
        const dpl_comm_ops *ops = transports[i];
        if (strcmp(ops->name, transport) != 0) {
            const size_t used = strlen(names);
            snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", ops->name);
            continue;
        }
        dpl_comm *comm = dpl_alloc(sizeof *comm);
        if (!comm) return dpl_fail(DPL_ENOMEM, "no memory for a communicator");
        comm->ops = ops;
        const dpl_status status = ops->open(spec, comm);
        if (status != DPL_OK) {
            dpl_free(comm);
            return status;
        }
        *comm_out = comm;
        return DPL_OK;
    }
    return dpl_fail(DPL_EINVAL, "transport '%s' is not built in, expected one of: %s", transport,
                    names);
}

void dpl_comm_close(dpl_comm **comm)
{
    if (!comm || !*comm) return;
    (*comm)->ops->close(*comm);
    dpl_free(*comm);
    *comm = NULL;
}

// (R, bytes) of everybody, or NULL with *status_out. The caller frees it.
static void *gather(dpl_comm *comm, const void *mine, size_t bytes, dpl_status *status_out)
{
    void *all = dpl_alloc_array((size_t)comm->n_ranks, bytes);
    if (!all) {
        *status_out = dpl_fail(DPL_ENOMEM, "no memory to gather %zu bytes of %d ranks", bytes,
                               comm->n_ranks);
        // The peers are in the exchange already: without this rank they would wait for ever.
        comm->ops->abort(comm, *status_out, dpl_error_message());
        return NULL;
    }
    dpl_ticket ticket;
    *status_out = comm->ops->all_gather(comm, mine, bytes, all, &ticket);
    if (*status_out == DPL_OK) *status_out = comm->ops->wait(comm, ticket);
    if (*status_out == DPL_OK) return all;
    dpl_free(all);
    return NULL;
}

dpl_status dpl_comm_agree(dpl_comm *comm, dpl_status mine)
{
    verdict own = {.status = mine};
    if (mine != DPL_OK) snprintf(own.text, sizeof own.text, "%s", dpl_error_message());
    dpl_status status;
    verdict *all = gather(comm, &own, sizeof own, &status);
    if (!all) return status;
    int first = 0; // the lowest rank that failed speaks for all
    while (first < comm->n_ranks && all[first].status == DPL_OK)
        first++;
    if (first < comm->n_ranks) {
        status = (dpl_status)all[first].status;
        if (comm->n_ranks > 1) dpl_fail(status, "rank %d: %s", first, all[first].text);
    }
    dpl_free(all);
    return status;
}

dpl_status dpl_comm_sum_f64(dpl_comm *comm, double *values, size_t n)
{
    dpl_status status;
    double *all = gather(comm, values, n * sizeof *values, &status);
    if (!all) return status;
    for (size_t i = 0; i < n; i++) {
        values[i] = all[i];
        for (size_t rank = 1; rank < (size_t)comm->n_ranks; rank++)
            values[i] += all[rank * n + i];
    }
    dpl_free(all);
    return DPL_OK;
}

dpl_status dpl_comm_sum_i64(dpl_comm *comm, int64_t *values, size_t n)
{
    dpl_status status;
    int64_t *all = gather(comm, values, n * sizeof *values, &status);
    if (!all) return status;
    for (size_t i = 0; i < n; i++) {
        values[i] = all[i];
        for (size_t rank = 1; rank < (size_t)comm->n_ranks; rank++)
            values[i] += all[rank * n + i];
    }
    dpl_free(all);
    return DPL_OK;
}
