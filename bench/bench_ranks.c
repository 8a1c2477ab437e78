// bench_ranks.c - a benchmark on several ranks: threads of this process, or its MPI's processes.
#include <pthread.h>
#include <sched.h>
#include <stdio.h>

#include "bench.h"

typedef struct one_rank {
    dpl_comm *comm;
    dpl_bench_rank_fn fn;
    void *arg;
    dpl_status status;
} one_rank;

static void *run_rank(void *arg) {
    one_rank *r = arg;
    r->status = r->fn(r->comm, r->arg);
    // The others may wait for this rank.
    if (r->status != DPL_OK) dpl_comm_abort(r->comm, dpl_error_message());
    if (r->status != DPL_OK && dpl_comm_rank(r->comm) == 0)
        fprintf(stderr, "dropless: %s\n", dpl_error_message());
    dpl_comm_close(&r->comm);
    return NULL;
}

static void pin(pthread_t thread, const cpu_set_t *allowed, size_t *cpu) {
    cpu_set_t one;
    do *cpu = (*cpu + 1) % CPU_SETSIZE;
    while (!CPU_ISSET(*cpu, allowed));
    CPU_ZERO(&one);
    CPU_SET(*cpu, &one);
    pthread_setaffinity_np(thread, sizeof one, &one);
}

static dpl_status run_threads(size_t n, bool pins, dpl_bench_rank_fn fn, void *arg) {
    dpl_comm *comms[256];
    one_rank ranks[256];
    pthread_t threads[256];
    cpu_set_t allowed;
    size_t cpu = CPU_SETSIZE - 1;
    DPL_CHECK(n >= 1 && n <= DPL_COUNT(comms), "ranks=%zu, expected 1 to %zu", n, DPL_COUNT(comms));
    DPL_TRY(dpl_comm_open_threads((int)n, comms));
    pins = pins && sched_getaffinity(0, sizeof allowed, &allowed) == 0;
    for (size_t i = 0; i < n; i++) {
        ranks[i] = (one_rank){comms[i], fn, arg, DPL_OK};
        if (pthread_create(&threads[i], NULL, run_rank, &ranks[i])) {
            dpl_comm_abort(comms[i], "the system gives no more threads");
            for (size_t j = i; j < n; j++) dpl_comm_close(&comms[j]);
            for (size_t j = 0; j < i; j++) pthread_join(threads[j], NULL);
            return dpl_fail(DPL_ENOMEM, "the system gives no more than %zu threads", i);
        }
        if (pins) pin(threads[i], &allowed, &cpu);
    }
    dpl_status status = DPL_OK;
    for (size_t i = 0; i < n; i++) {
        pthread_join(threads[i], NULL);
        if (ranks[i].status != DPL_OK) status = ranks[i].status;
    }
    return status;
}

dpl_status dpl_bench_ranks(size_t n_ranks, bool pins, dpl_bench_rank_fn fn, void *arg) {
    if (!dpl_comm_launcher()) return run_threads(n_ranks, pins, fn, arg);
    one_rank rank = {.fn = fn, .arg = arg};
    const dpl_status status = dpl_comm_open_mpi(&rank.comm);
    if (status != DPL_OK) fprintf(stderr, "dropless: %s\n", dpl_error_message());
    if (status != DPL_OK) return status;
    run_rank(&rank);
    return rank.status;
}

dpl_status dpl_bench_slowest(dpl_comm *comm, double own, double *most_out) {
    double all[1024];
    DPL_CHECK(comm->n_ranks <= (int)DPL_COUNT(all), "bench: expected at most %zu ranks",
              DPL_COUNT(all));
    DPL_TRY(dpl_comm_gather_now(comm, &own, sizeof own, all));
    *most_out = 0;
    for (int r = 0; r < comm->n_ranks; r++) *most_out = DPL_MAX(*most_out, all[r]);
    return DPL_OK;
}
