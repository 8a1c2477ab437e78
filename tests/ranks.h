/*
 * ranks.h - runs one body on all ranks of a transport, so that one suite serves every transport.
 */
#ifndef DPL_TESTS_RANKS_H
#define DPL_TESTS_RANKS_H

#include "comm/comm.h"

typedef void (*ranks_fn)(dpl_comm *comm, void *arg);

// `self` has one rank, `threads` a thread a rank, `mpi` the first n processes of those that this
// program was started as; each rank calls fn once and its communicator is closed after it. A check
// that fails on any rank ends the program.
void ranks_run(const char *transport, int n, ranks_fn fn, void *arg);
// ranks_run() with self and with threads of 1, 2, 3, 4, 5, 8 ranks; as processes of MPI, with MPI
// of those numbers up to the number of processes.
void ranks_run_all(ranks_fn fn, void *arg);

#endif
