/*
 * ranks.c - see ranks.h.
 */
#include "ranks.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct one_rank {
    dpl_comm *comm;
    ranks_fn fn;
    void *arg;
} one_rank;

static void check(bool good, const char *what) {
    if (good) return;
    fprintf(stderr, "ranks: %s: %s\n", what, dpl_error_message());
    abort();
}

static void *run_rank(void *p) {
    one_rank *rank = p;
    rank->fn(rank->comm, rank->arg);
    dpl_comm_close(&rank->comm);
    return NULL;
}

static void run_threads(int n, ranks_fn fn, void *arg) {
    dpl_comm *comms[64];
    one_rank ranks[64];
    pthread_t threads[64];
    check(dpl_comm_open_threads(n, comms) == DPL_OK, "open");
    for (int r = 0; r < n; r++) {
        ranks[r] = (one_rank){comms[r], fn, arg};
        check(pthread_create(&threads[r], NULL, run_rank, &ranks[r]) == 0, "thread");
    }
    for (int r = 0; r < n; r++) pthread_join(threads[r], NULL);
}

static dpl_comm *world(void) {
    static dpl_comm *comm; // until the program ends
    if (!comm) check(dpl_comm_open_mpi(&comm) == DPL_OK, "mpi");
    return comm;
}

static void close_world(void) {
    dpl_comm *comm = world();
    dpl_comm_close(&comm);
}

void ranks_run(const char *transport, int n, ranks_fn fn, void *arg) {
    dpl_comm *comm = NULL;
    if (!strcmp(transport, "threads")) {
        run_threads(n, fn, arg);
        return;
    }
    if (!strcmp(transport, "self")) check(dpl_comm_open_self(&comm) == DPL_OK, "self");
    else check(dpl_comm_split(world(), world()->rank < n ? 0 : -1, &comm) == DPL_OK, "split");
    if (comm) fn(comm, arg);
    dpl_comm_close(&comm);
    if (!strcmp(transport, "mpi")) check(dpl_comm_barrier(world()) == DPL_OK, "barrier");
}

void ranks_run_all(ranks_fn fn, void *arg) {
    static const int numbers[] = {1, 2, 3, 4, 5, 8};
    static bool is_registered;
    const bool is_mpi = dpl_comm_launcher() != NULL;
    if (is_mpi && !is_registered) atexit(close_world);
    is_registered = is_mpi;
    if (!is_mpi) ranks_run("self", 1, fn, arg);
    for (size_t i = 0; i < DPL_COUNT(numbers); i++)
        if (!is_mpi) ranks_run("threads", numbers[i], fn, arg);
        else if (numbers[i] <= world()->n_ranks) ranks_run("mpi", numbers[i], fn, arg);
}
