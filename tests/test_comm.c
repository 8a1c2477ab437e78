// test_comm.c - one suite over all transports: bytes arrive where they belong, errors agree.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "ranks.h"

#define R_MAX 8

static uint8_t byte_of(int from, int to, size_t i) {
    return (uint8_t)(31 * from + 7 * to + (int)i + 1);
}

// How many bytes a rank sends to another: some send nothing to some.
static size_t bytes_of(int from, int to, int round) {
    return (size_t)((from * 5 + to * 3 + round) % 7) * 9;
}

typedef struct exchange {
    uint8_t send[R_MAX * 64], receive[R_MAX * 64];
    size_t at[R_MAX], to[R_MAX], n_send[R_MAX], n_receive[R_MAX];
    dpl_ticket ticket;
} exchange;

static void start_exchange(dpl_comm *comm, int round, exchange *e) {
    size_t from = 3, to = 5; // the bytes around and between blocks stay as they are
    memset(e->receive, 0xee, sizeof e->receive);
    for (int r = 0; r < comm->n_ranks; r++) {
        e->n_send[r] = bytes_of(comm->rank, r, round);
        e->n_receive[r] = bytes_of(r, comm->rank, round);
        e->at[r] = from, from += e->n_send[r];
        e->to[r] = to, to += e->n_receive[r] + 1;
        for (size_t i = 0; i < e->n_send[r]; i++)
            e->send[e->at[r] + i] = byte_of(comm->rank, r, i + (size_t)round);
    }
    const dpl_blocks send = {e->send, e->at, e->n_send};
    const dpl_blocks receive = {e->receive, e->to, e->n_receive};
    assert_int_equal(dpl_comm_exchange(comm, send, receive, &e->ticket), DPL_OK);
}

static void check_exchange(dpl_comm *comm, int round, exchange *e) {
    assert_int_equal(dpl_comm_wait(comm, e->ticket), DPL_OK);
    for (int r = 0; r < comm->n_ranks; r++) {
        for (size_t i = 0; i < e->n_receive[r]; i++) {
            assert_int_equal(e->receive[e->to[r] + i], byte_of(r, comm->rank, i + (size_t)round));
            e->receive[e->to[r] + i] = 0xee;
        }
    }
    for (size_t i = 0; i < sizeof e->receive; i++) assert_int_equal(e->receive[i], 0xee);
}

static void exchange_in_turn(dpl_comm *comm, void *arg) {
    (void)arg;
    for (int round = 0; round < 30; round++) {
        exchange e;
        start_exchange(comm, round, &e);
        check_exchange(comm, round, &e);
    }
}

static void blocks_arrive_at_their_places(void **state) {
    (void)state;
    ranks_run_all(exchange_in_turn, NULL);
}

// More than a communicator has under way at a time, waited for in another order.
static void exchange_at_once(dpl_comm *comm, void *arg) {
    (void)arg;
    enum { N = DPL_OPS_MAX + 4 };
    static const int order[N] = {3,  0, 11, 1,  2, 7,  10, 4,  19, 5,
                                 18, 6, 9,  12, 8, 15, 14, 17, 13, 16};
    exchange *e = calloc(N, sizeof *e);
    for (int i = 0; i < N; i++) start_exchange(comm, i, &e[i]);
    for (int i = 0; i < N; i++) check_exchange(comm, order[i], &e[order[i]]);
    free(e);
}

static void many_may_be_under_way(void **state) {
    (void)state;
    ranks_run_all(exchange_at_once, NULL);
}

// With lanes, switched on and off; what a rank has started is done while it does something else.
static void exchange_on_lanes(dpl_comm *comm, void *arg) {
    (void)arg;
    exchange *e = calloc(1, sizeof *e);
    for (int lanes = 1; lanes >= 0; lanes--) {
        assert_int_equal(dpl_comm_set_lane_threads(comm, lanes), DPL_OK);
        assert_int_equal(dpl_comm_set_lane_threads(comm, lanes), DPL_OK);
        exchange_in_turn(comm, NULL);
        exchange_at_once(comm, NULL);
    }
    assert_int_equal(dpl_comm_set_lane_threads(comm, 2), DPL_EINVAL);
    assert_int_equal(dpl_comm_set_lane_threads(comm, 1), DPL_OK);
    start_exchange(comm, 1, e);
    bool done = comm->n_ranks == 1;
    for (int i = 0; i < 10000 && !done; i++) {
        usleep(1000);
        pthread_mutex_lock(&comm->world->lock);
        done = comm->flying->done;
        pthread_mutex_unlock(&comm->world->lock);
    }
    assert_true(done);
    check_exchange(comm, 1, e);
    while (!dpl_comm_is_done(comm, e->ticket)) continue; // as one that has been waited for is
    assert_int_equal(dpl_comm_barrier(comm), DPL_OK);
    if (dpl_comm_launcher()) assert_int_equal(dpl_comm_set_lane_threads(comm, 0), DPL_OK);
    free(e);
}

static int count_threads(void) {
    int n = 0;
    DIR *dir = opendir("/proc/self/task");
    while (dir && readdir(dir)) n++;
    if (dir) closedir(dir);
    return n;
}

static void no_lane(dpl_comm *comm, void *arg) {
    (void)arg;
    const int before = count_threads();
    assert_int_equal(dpl_comm_set_lane_threads(comm, 1), DPL_OK);
    exchange_in_turn(comm, NULL);
    assert_int_equal(count_threads(), before);
}

static void lanes_make_progress(void **state) {
    (void)state;
    ranks_run_all(exchange_on_lanes, NULL);
    ranks_run("self", 1, no_lane, NULL);
    assert_int_equal(dpl_comm_set_lane_threads(NULL, 1), DPL_OK);
}

static void exchange_much(dpl_comm *comm, void *arg) {
    (void)arg;
    const size_t R = (size_t)comm->n_ranks, me = (size_t)comm->rank, n = (size_t)3 << 19;
    uint32_t *send = malloc(R * n * 4), *receive = malloc(R * n * 4);
    size_t at[R_MAX], bytes[R_MAX];
    for (size_t r = 0; r < R; r++) at[r] = r * n * 4, bytes[r] = n * 4;
    for (size_t i = 0; i < R * n; i++) send[i] = (uint32_t)(me * R * n + i);
    dpl_ticket ticket;
    const dpl_blocks from = {send, at, bytes}, to = {receive, at, bytes};
    assert_int_equal(dpl_comm_exchange(comm, from, to, &ticket), DPL_OK);
    assert_int_equal(dpl_comm_wait(comm, ticket), DPL_OK);
    for (size_t r = 0; r < R; r++)
        for (size_t i = 0; i < n; i++)
            if (receive[r * n + i] != r * R * n + me * n + i) fail_msg("rank %zu, word %zu", r, i);
    free(send);
    free(receive);
}

static void megabytes_arrive(void **state) {
    (void)state;
    ranks_run_all(exchange_much, NULL);
}

static void gather(dpl_comm *comm, void *arg) {
    (void)arg;
    for (int round = 0; round < 50; round++) {
        const uint8_t mine[3] = {7, (uint8_t)round, (uint8_t)comm->rank};
        uint8_t all[3 * R_MAX + 1];
        memset(all, 0xee, sizeof all);
        assert_int_equal(dpl_comm_gather_now(comm, mine, sizeof mine, all), DPL_OK);
        for (int r = 0; r < comm->n_ranks; r++) {
            assert_memory_equal(all + 3 * r, mine, 2);
            assert_int_equal(all[3 * r + 2], r);
        }
        assert_int_equal(all[3 * comm->n_ranks], 0xee);
    }
    assert_int_equal(dpl_comm_barrier(comm), DPL_OK);
}

static void every_rank_gets_all_contributions(void **state) {
    (void)state;
    ranks_run_all(gather, NULL);
}

// A gather is over only when all have come to it.
static void meet(dpl_comm *comm, void *arg) {
    atomic_int *n_here = arg;
    if (strcmp(dpl_comm_name(comm), "mpi") == 0) return; // no memory in common
    usleep((useconds_t)comm->rank * 3000);
    atomic_fetch_add(n_here, 1);
    assert_int_equal(dpl_comm_barrier(comm), DPL_OK);
    assert_int_equal(atomic_load(n_here) % comm->n_ranks, 0);
    assert_int_equal(dpl_comm_barrier(comm), DPL_OK);
    if (comm->rank == 0) atomic_store(n_here, 0);
    assert_int_equal(dpl_comm_barrier(comm), DPL_OK);
}

static void a_barrier_holds_all(void **state) {
    (void)state;
    atomic_int n_here = 0;
    ranks_run_all(meet, &n_here);
}

// Rows and columns of ranks, and exchanges in both at once and in the parent.
static void split(dpl_comm *comm, void *arg) {
    (void)arg;
    dpl_comm *pair, *parity, *none = comm;
    assert_int_equal(dpl_comm_split(comm, comm->rank / 2, &pair), DPL_OK);
    assert_int_equal(dpl_comm_split(comm, comm->rank % 2, &parity), DPL_OK);
    assert_int_equal(dpl_comm_split(comm, -1, &none), DPL_OK);
    assert_null(none);
    assert_int_equal(pair->rank, comm->rank % 2);
    assert_int_equal(pair->n_ranks, DPL_MIN(2, comm->n_ranks - comm->rank / 2 * 2));
    assert_int_equal(parity->rank, comm->rank / 2);
    exchange a, b, c;
    for (int round = 0; round < 5; round++) {
        start_exchange(pair, round, &a);
        start_exchange(comm, round, &b);
        start_exchange(parity, round, &c);
        check_exchange(parity, round, &c);
        check_exchange(comm, round, &b);
        check_exchange(pair, round, &a);
    }
    int32_t mine = comm->members[comm->rank], all[R_MAX];
    assert_int_equal(dpl_comm_gather_now(parity, &mine, sizeof mine, all), DPL_OK);
    for (int r = 0; r < parity->n_ranks; r++) assert_int_equal(all[r], parity->members[r]);
    dpl_comm_close(&pair);
    dpl_comm_close(&parity);
}

static void communicators_split(void **state) {
    (void)state;
    ranks_run_all(split, NULL);
}

static void sum(dpl_comm *comm, void *arg) {
    (void)arg;
    static const size_t sizes[] = {0, 1, 3, 7, 64, 1001};
    for (size_t s = 0; s < DPL_COUNT(sizes); s++) {
        const size_t n = sizes[s];
        double y[1001];
        int64_t z[1001];
        for (size_t i = 0; i < n; i++) {
            y[i] = dpl_rng_normal(2, (uint64_t)comm->rank, i);
            z[i] = (int64_t)(comm->rank + 1) << (i % 40);
        }
        assert_int_equal(dpl_comm_sum_f64(comm, y, n), DPL_OK);
        assert_int_equal(dpl_comm_sum_i64(comm, z, n), DPL_OK);
        for (size_t i = 0; i < n; i++) {
            double b = dpl_rng_normal(2, 0, i);
            for (int r = 1; r < comm->n_ranks; r++) {
                b += dpl_rng_normal(2, (uint64_t)r, i);
            }
            const int64_t all = comm->n_ranks * (comm->n_ranks + 1) / 2;
            assert_true(y[i] == b && z[i] == all << (i % 40));
        }
    }
}

static void sums_go_in_the_order_of_ranks(void **state) {
    (void)state;
    ranks_run_all(sum, NULL);
}

static void agree(dpl_comm *comm, void *arg) {
    (void)arg;
    char expected[64];
    for (int bad = 0; bad < comm->n_ranks; bad++) {
        assert_int_equal(dpl_comm_agree(comm, DPL_OK), DPL_OK);
        dpl_status mine = DPL_OK;
        if (comm->rank >= bad) mine = dpl_fail(DPL_ENUMERIC, "token %d is not finite", comm->rank);
        assert_int_equal(dpl_comm_agree(comm, mine), DPL_ENUMERIC);
        const char *form = comm->n_ranks > 1 ? "rank %d: token %d is not finite" : "token %d%.0d";
        snprintf(expected, sizeof expected, form, bad, comm->n_ranks > 1 ? bad : 0);
        assert_non_null(strstr(dpl_error_message(), expected));
    }
}

// A rank that found no memory has nowhere to put what the others say.
static void agree_without_memory(dpl_comm *comm, void *arg) {
    (void)arg;
    const int bad = comm->n_ranks - 1;
    int64_t own = comm->rank, all[R_MAX];
    dpl_status mine = DPL_OK;
    if (comm->rank == bad) mine = dpl_fail(DPL_ENOMEM, "no memory for a table");
    assert_int_equal(
        dpl_comm_agree_on(comm, mine, &own, sizeof own, comm->rank == bad ? NULL : all),
        DPL_ENOMEM);
    assert_non_null(strstr(dpl_error_message(), "no memory for a table"));
}

static void a_rank_without_memory_is_heard(void **state) {
    (void)state;
    ranks_run_all(agree_without_memory, NULL);
}

static void every_rank_gets_the_same_error(void **state) {
    (void)state;
    ranks_run_all(agree, NULL);
}

// One rank aborts while the others are in an exchange or come to it later.
static void abort_one(dpl_comm *comm, void *arg) {
    uint8_t all[R_MAX];
    const int bad = comm->n_ranks - 1;
    if (arg) assert_int_equal(dpl_comm_set_lane_threads(comm, 1), DPL_OK);
    if (comm->rank == bad) dpl_comm_abort(comm, "disk is gone");
    else if (comm->rank % 2) usleep(2000);
    const uint8_t mine = 1;
    dpl_status status = DPL_OK;
    while (status == DPL_OK) status = dpl_comm_gather_now(comm, &mine, 1, all);
    char expected[64];
    snprintf(expected, sizeof expected, "rank %d: disk is gone", bad);
    assert_int_equal(status, DPL_ECOMM);
    assert_string_equal(dpl_error_message(), expected);
    assert_int_equal(dpl_comm_agree(comm, DPL_OK), DPL_ECOMM);
    assert_int_equal(dpl_comm_wait(comm, (dpl_ticket){0}), DPL_ECOMM);
}

static void after_an_abort_every_call_fails(void **state) {
    (void)state;
    if (dpl_comm_launcher()) skip(); // it is the end of all of MPI's ranks
    ranks_run_all(abort_one, NULL);
    ranks_run_all(abort_one, (char[]){"on lanes"});
}

// Who stays away is named, by all who wait for it.
static void stay_away(dpl_comm *comm, void *arg) {
    const int away = comm->n_ranks / 2;
    if (arg) assert_int_equal(dpl_comm_set_lane_threads(comm, 1), DPL_OK);
    if (comm->n_ranks == 1) return;
    dpl_comm_set_timeout(comm, 0.2);
    if (comm->rank == away) usleep(500000);
    char expected[64];
    snprintf(expected, sizeof expected, "rank %d has not been heard of for 0.2 s", away);
    assert_int_equal(dpl_comm_barrier(comm), DPL_ECOMM);
    assert_non_null(strstr(dpl_error_message(), expected));
}

static void a_silent_rank_is_named(void **state) {
    (void)state;
    if (dpl_comm_launcher()) skip();
    ranks_run_all(stay_away, NULL);
    ranks_run("threads", 3, stay_away, (char[]){"on lanes"});
}

// Who waits for a rank that waits itself, for the one that is dead, names the latter.
static void wait_in_a_row(dpl_comm *comm, void *arg) {
    (void)arg;
    dpl_comm *low, *high; // ranks 0 and 1, 1 and 2
    assert_int_equal(dpl_comm_split(comm, comm->rank < 2 ? 0 : -1, &low), DPL_OK);
    assert_int_equal(dpl_comm_split(comm, comm->rank > 0 ? 0 : -1, &high), DPL_OK);
    dpl_comm_set_timeout(comm, 0.8);
    if (comm->rank == 1) usleep(500000);
    if (comm->rank == 2) usleep(2000000);
    assert_int_equal(dpl_comm_barrier(comm->rank == 0 ? low : high), DPL_ECOMM);
    assert_non_null(strstr(dpl_error_message(), "rank 2 has not been heard of"));
    dpl_comm_close(&low);
    dpl_comm_close(&high);
}

static void a_rank_that_waits_is_not_silent(void **state) {
    (void)state;
    if (dpl_comm_launcher()) skip();
    ranks_run("threads", 3, wait_in_a_row, NULL);
}

// Who is long at a file and says so is waited for.
static void take_long(dpl_comm *comm, void *arg) {
    (void)arg;
    const int busy = comm->n_ranks / 2;
    dpl_comm_set_timeout(comm, 1.2);
    assert_int_equal(dpl_comm_barrier(comm), DPL_OK);
    for (int i = 0; i < 50 && comm->rank == busy; i++) {
        usleep(50000);
        dpl_comm_alive(comm);
    }
    assert_int_equal(dpl_comm_barrier(comm), DPL_OK);
    dpl_comm_set_timeout(comm, 300);
    assert_int_equal(dpl_comm_barrier(comm), DPL_OK);
}

static void a_busy_rank_is_waited_for(void **state) {
    (void)state;
    ranks_run(dpl_comm_launcher() ? "mpi" : "threads", 2, take_long, NULL);
}

static void disagree_on_sizes(dpl_comm *comm, void *arg) {
    const size_t wrong = *(const size_t *)arg;
    uint8_t send[R_MAX * 8] = {0}, receive[R_MAX * 8];
    size_t at[R_MAX], sent[R_MAX], expected[R_MAX];
    for (size_t r = 0; r < R_MAX; r++) {
        at[r] = 8 * r;
        sent[r] = 8;
        expected[r] = comm->n_ranks == 1 || (int)r != comm->rank ? wrong : 8;
    }
    dpl_ticket ticket;
    dpl_status status = dpl_comm_exchange(comm, (dpl_blocks){send, at, sent},
                                          (dpl_blocks){receive, at, expected}, &ticket);
    if (status == DPL_OK) status = dpl_comm_wait(comm, ticket);
    assert_int_not_equal(status, DPL_OK);
    assert_non_null(strstr(dpl_error_message(), "8 bytes"));
}

static void blocks_of_another_size_are_an_error(void **state) {
    (void)state;
    if (dpl_comm_launcher()) skip();
    for (size_t wrong = 0; wrong <= 4; wrong += 4) ranks_run_all(disagree_on_sizes, &wrong);
}

// Closed in the middle of an exchange: the others fail, and read nothing that is gone.
static void close_early(dpl_comm *comm, void *arg) {
    const useconds_t *delay_us =
        arg; // so that the others have its block, and it has none of theirs
    dpl_comm *child;
    assert_int_equal(dpl_comm_split(comm, 0, &child), DPL_OK);
    dpl_comm_set_timeout(comm, 0.2);
    exchange *e = calloc(1, sizeof *e);
    start_exchange(child, 0, e);
    if (comm->rank == 0) usleep(*delay_us);
    if (comm->rank > 0 && comm->n_ranks > 1)
        assert_true(dpl_comm_wait(child, e->ticket) == DPL_OK ||
                    strstr(dpl_error_message(), "0.2"));
    dpl_comm_close(&child);
    free(e);
}

static void a_communicator_may_be_closed_early(void **state) {
    (void)state;
    if (dpl_comm_launcher()) skip();
    for (useconds_t delay_us = 0; delay_us <= 50000; delay_us += 50000)
        ranks_run_all(close_early, &delay_us);
}

// Each allocation of a split fails once, on some rank: all ranks hear of it, nothing is left.
static void split_once(dpl_comm *comm, void *arg) {
    dpl_comm *child = NULL;
    dpl_comm_set_timeout(comm, 2);
    const dpl_status status = dpl_comm_split(comm, comm->rank % 2, &child);
    if (status == DPL_OK && dpl_comm_barrier(child) != DPL_OK) (void)status;
    if (status != DPL_OK) *(atomic_bool *)arg = true;
    dpl_comm_close(&child);
}

static void a_split_without_memory_fails_everywhere(void **state) {
    (void)state;
    if (dpl_comm_launcher()) skip();
    for (size_t nth = 1;; nth++) {
        atomic_bool failed = false;
        dpl_fault_alloc(18 + nth); // after those of the communicators themselves
        ranks_run("threads", 3, split_once, &failed);
        dpl_fault_alloc(0);
        if (!failed) break;
        assert_true(nth < 100);
    }
}

static void run_out_of_memory(dpl_comm *comm, void *arg) {
    (void)arg;
    dpl_fault_alloc(1);
    assert_int_equal(dpl_comm_barrier(comm), DPL_ENOMEM);
    dpl_fault_alloc(0);
    // Peers would have waited for this rank: the communicator is aborted, not left half way.
    assert_int_equal(dpl_comm_agree(comm, DPL_OK), DPL_ECOMM);
}

static void no_memory_aborts_instead_of_hanging(void **state) {
    (void)state;
    if (dpl_comm_launcher()) skip();
    ranks_run("self", 1, run_out_of_memory, NULL);
    ranks_run("threads", 1, run_out_of_memory, NULL);
}

static void opening_fails_whole(void **state) {
    (void)state;
    dpl_comm *comms[3];
    assert_int_equal(dpl_comm_open_threads(0, comms), DPL_EINVAL);
    assert_int_equal(dpl_comm_open_threads(2, NULL), DPL_EINVAL);
    size_t nth = 0;
    dpl_status status;
    do { // each allocation fails once
        dpl_fault_alloc(++nth);
        status = dpl_comm_open_threads(3, comms);
    } while (status == DPL_ENOMEM);
    dpl_fault_alloc(0);
    assert_int_equal(status, DPL_OK);
    assert_true(nth > 6);
    dpl_fault_alloc(1);
    assert_int_equal(dpl_comm_set_lane_threads(comms[0], 1), DPL_ENOMEM);
    dpl_fault_alloc(0);
    assert_int_equal(dpl_comm_set_lane_threads(comms[1], 1), DPL_OK); // ends with its communicator
    for (int r = 0; r < 3; r++) {
        assert_int_equal(dpl_comm_rank(comms[r]), r);
        assert_int_equal(dpl_comm_ranks(comms[r]), 3);
        dpl_comm_close(&comms[r]);
        assert_null(comms[r]);
    }
    dpl_comm_close(&comms[0]); // NULL is fine
    assert_true(dpl_comm_rank(NULL) == 0 && dpl_comm_ranks(NULL) == 1);
}

// As a process of MPI, for test_mpi.sh: the last rank gives up, or falls silent.
static int fail_as_a_process(bool silent) {
    dpl_comm *comm;
    if (dpl_comm_open_mpi(&comm) != DPL_OK) return 2;
    const bool last = comm->rank == comm->n_ranks - 1;
    dpl_comm_set_timeout(comm, 1);
    if (last && silent) pause();
    if (last) dpl_comm_abort(comm, "disk is gone");
    dpl_status status;
    do status = dpl_comm_barrier(comm);
    while (status == DPL_OK);
    printf("rank %d: %s\n", comm->rank, dpl_error_message());
    fflush(stdout);
    dpl_comm_close(&comm);
    return status == DPL_ECOMM ? 3 : 2;
}

int main(int argc, char **argv) {
    if (argc > 1) return fail_as_a_process(strcmp(argv[1], "silent") == 0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_arrive_at_their_places),
        cmocka_unit_test(many_may_be_under_way),
        cmocka_unit_test(lanes_make_progress),
        cmocka_unit_test(megabytes_arrive),
        cmocka_unit_test(every_rank_gets_all_contributions),
        cmocka_unit_test(a_barrier_holds_all),
        cmocka_unit_test(communicators_split),
        cmocka_unit_test(sums_go_in_the_order_of_ranks),
        cmocka_unit_test(every_rank_gets_the_same_error),
        cmocka_unit_test(a_rank_without_memory_is_heard),
        cmocka_unit_test(after_an_abort_every_call_fails),
        cmocka_unit_test(a_silent_rank_is_named),
        cmocka_unit_test(a_rank_that_waits_is_not_silent),
        cmocka_unit_test(a_busy_rank_is_waited_for),
        cmocka_unit_test(blocks_of_another_size_are_an_error),
        cmocka_unit_test(a_communicator_may_be_closed_early),
        cmocka_unit_test(a_split_without_memory_fails_everywhere),
        cmocka_unit_test(no_memory_aborts_instead_of_hanging),
        cmocka_unit_test(opening_fails_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
