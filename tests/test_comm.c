// test_comm.c - one suite over all transports: bytes arrive where they belong, errors agree.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "comm/comm.h"

static const char *const transports[] = {"self"};

static void each_transport(void (*check)(dpl_comm *comm)) {
    for (size_t i = 0; i < DPL_COUNT(transports); i++) {
        dpl_comm *comm = NULL;
        assert_int_equal(dpl_comm_open(transports[i], NULL, &comm), DPL_OK);
        check(comm);
        dpl_comm_close(&comm);
        assert_null(comm);
        dpl_comm_close(&comm); // NULL is fine
    }
}

static void check_all_to_all(dpl_comm *comm) {
    // Blocks of different places and sizes; the bytes around them stay as they are.
    uint8_t send[64], receive[64];
    for (size_t i = 0; i < sizeof send; i++) send[i] = (uint8_t)(100 * comm->rank + (int)i);
    for (size_t bytes = 0; bytes <= 40; bytes += 8) {
        memset(receive, 0xee, sizeof receive);
        const size_t from = 3, to = 11;
        dpl_ticket ticket;
        assert_int_equal(comm->ops->all_to_all(comm, (dpl_blocks){send, &from, &bytes},
                                               (dpl_blocks){receive, &to, &bytes}, &ticket),
                         DPL_OK);
        assert_int_equal(comm->ops->wait(comm, ticket), DPL_OK);
        for (size_t i = 0; i < sizeof receive; i++)
            assert_int_equal(receive[i], i >= to && i < to + bytes ? send[from + i - to] : 0xee);
    }
}

static void a_block_arrives_at_its_place(void **state) {
    (void)state;
    each_transport(check_all_to_all);
}

static void check_sizes(dpl_comm *comm) {
    uint8_t send[8] = {0}, receive[8] = {0};
    const size_t offset = 0, sent = 8, expected = 4;
    dpl_ticket ticket;
    assert_int_equal(comm->ops->all_to_all(comm, (dpl_blocks){send, &offset, &sent},
                                           (dpl_blocks){receive, &offset, &expected}, &ticket),
                     DPL_EINVAL);
    assert_non_null(strstr(dpl_error_message(), "8 bytes sent, 4 expected"));
}

static void a_block_of_another_size_is_an_error(void **state) {
    (void)state;
    each_transport(check_sizes);
}

static void check_all_gather(dpl_comm *comm) {
    const uint8_t mine[3] = {7, 8, (uint8_t)comm->rank};
    uint8_t all[sizeof mine + 1] = {0, 0, 0, 0xee};
    dpl_ticket ticket;
    assert_int_equal(comm->ops->all_gather(comm, mine, sizeof mine, all, &ticket), DPL_OK);
    assert_int_equal(comm->ops->wait(comm, ticket), DPL_OK);
    assert_memory_equal(all + 3 * comm->rank, mine, sizeof mine);
    assert_int_equal(all[3 * comm->n_ranks], 0xee);
}

static void every_rank_gets_all_contributions(void **state) {
    (void)state;
    each_transport(check_all_gather);
}

static void check_agree(dpl_comm *comm) {
    assert_int_equal(dpl_comm_agree(comm, DPL_OK), DPL_OK);
    const dpl_status mine = dpl_fail(DPL_ENUMERIC, "token 7 is not finite");
    assert_int_equal(dpl_comm_agree(comm, mine), DPL_ENUMERIC);
    assert_non_null(strstr(dpl_error_message(), "token 7 is not finite"));
}

static void every_rank_gets_the_same_error(void **state) {
    (void)state;
    each_transport(check_agree);
}

static void ignore(void *arg, const char *line) {
    (void)arg;
    (void)line;
}

static void check_abort(dpl_comm *comm) {
    dpl_log_sink(ignore, NULL);
    comm->ops->abort(comm, DPL_EIO, "disk is gone");
    dpl_log_sink(NULL, NULL);
    assert_int_equal(dpl_comm_agree(comm, DPL_OK), DPL_ECOMM);
    assert_int_equal(comm->ops->wait(comm, (dpl_ticket){0}), DPL_ECOMM);
}

static void after_abort_every_call_fails(void **state) {
    (void)state;
    each_transport(check_abort);
}

static void check_no_memory(dpl_comm *comm) {
    dpl_log_sink(ignore, NULL);
    dpl_fault_alloc(1);
    assert_int_equal(dpl_comm_agree(comm, DPL_OK), DPL_ENOMEM);
    dpl_fault_alloc(0);
    // Peers would have waited for this rank: the communicator is aborted, not left half way.
    assert_int_equal(dpl_comm_agree(comm, DPL_OK), DPL_ECOMM);
    dpl_log_sink(NULL, NULL);
}

static void no_memory_aborts_instead_of_hanging(void **state) {
    (void)state;
    each_transport(check_no_memory);
}

static void opening_names_what_is_built_in(void **state) {
    (void)state;
    dpl_comm *comm = NULL;
    assert_int_equal(dpl_comm_open("carrier pigeon", NULL, &comm), DPL_EINVAL);
    assert_non_null(strstr(dpl_error_message(), "self"));
    assert_int_equal(dpl_comm_open("self", "ranks=2", &comm), DPL_EINVAL);
    dpl_fault_alloc(1);
    assert_int_equal(dpl_comm_open("self", NULL, &comm), DPL_ENOMEM);
    dpl_fault_alloc(0);
    assert_null(comm);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_block_arrives_at_its_place),
        cmocka_unit_test(a_block_of_another_size_is_an_error),
        cmocka_unit_test(every_rank_gets_all_contributions),
        cmocka_unit_test(every_rank_gets_the_same_error),
        cmocka_unit_test(after_abort_every_call_fails),
        cmocka_unit_test(no_memory_aborts_instead_of_hanging),
        cmocka_unit_test(opening_names_what_is_built_in),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
