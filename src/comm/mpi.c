// mpi.c - the transport of processes that an MPI launcher has started: a module of its own for each
// MPI there is (module.h).
//
// Blocks are messages from rank to rank, large ones in pieces; an empty block is no message. All
// are sent in one communicator of MPI, those of each of ours with tags of its own: so nothing but
// the start and the end of MPI is a call that waits for other ranks. MPI is called with the world's
// lock held only, so that its level SERIALIZED is enough. A rank that gives up tells the others
// through a receive that each of them has posted from the start; an empty text there is a greeting.
#include <mpi.h>
#include <sched.h>
#include <stdio.h>
#include <unistd.h>

#include "comm/module.h"

#define PIECE_BYTES ((size_t)1 << 30) // counts of MPI are ints
#define SPINS       1000
#define LANE_US     400 // a look costs some 15 us: about 2 % of a processor
#define LINGER_S    0.3 // so that the others can say why before a launcher ends them
#define WITHDRAW_S  0.1

static const dpl_comm_host *host;

typedef struct mpi_world {
    MPI_Comm all, control;
    int n_tags;
    MPI_Request abort_request;
    char abort_text[512];
    MPI_Request *greetings; // (ranks): sent last
    bool owns;              // MPI was started here
    bool spins;
} mpi_world;

typedef struct mpi_request {
    int rank, bytes; // of a piece that is received; one that is sent: ~rank
} mpi_request;

typedef struct mpi_op {
    MPI_Request *requests;
    mpi_request *pieces;  // of each
    int *ready;           // scratch of MPI_Testsome
    MPI_Status *statuses; // of those
    int n, n_max, n_left;
} mpi_op;

static void abort_all(dpl_world *world, const char *why);

// After an error MPI is not to be relied on.
static bool good(dpl_world *world, int code, const char *what) {
    if (code == MPI_SUCCESS || world->failed != DPL_OK) return code == MPI_SUCCESS;
    char text[MPI_MAX_ERROR_STRING];
    int length = 0;
    if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) length = 0;
    host->world_fail(world, DPL_ECOMM, "rank %d: MPI: %s: %.*s", world->rank, what, length, text);
    abort_all(world, world->why);
    return false;
}

/* ---- exchanges ---- */
static size_t n_pieces(size_t bytes) {
    return (bytes + PIECE_BYTES - 1) / PIECE_BYTES;
}

static void free_op(dpl_op *op) {
    mpi_op *m = op->state;
    if (!m) return;
    host->free(m->requests);
    host->free(m->pieces);
    host->free(m->ready);
    host->free(m->statuses);
    host->free(m);
    op->state = NULL;
}

static bool make_room(dpl_comm *comm, dpl_op *op) {
    mpi_op *m = op->state;
    size_t n = 0;
    for (int r = 0; r < comm->n_ranks; r++)
        if (r != comm->rank) n += n_pieces(op->send.bytes[r]) + n_pieces(op->receive.bytes[r]);
    if (m && n <= (size_t)m->n_max) return true;
    free_op(op);
    if (!(op->state = m = host->alloc(sizeof *m))) return false;
    m->n_max = (int)n + 2 * comm->n_ranks;
    m->requests = host->alloc((size_t)m->n_max * sizeof *m->requests);
    m->pieces = host->alloc((size_t)m->n_max * sizeof *m->pieces);
    m->ready = host->alloc((size_t)m->n_max * sizeof *m->ready);
    m->statuses = host->alloc((size_t)m->n_max * sizeof *m->statuses);
    return m->requests && m->pieces && m->ready && m->statuses;
}

static void start_block(dpl_comm *comm, dpl_op *op, int rank, bool receives) {
    mpi_op *m = op->state;
    const dpl_blocks *b = receives ? &op->receive : &op->send;
    char *p = (char *)b->p + b->offset[rank];
    const mpi_world *w = comm->world->state;
    const int tag = comm->id * DPL_OPS_MAX + (int)(op->id % DPL_OPS_MAX);
    const int peer = comm->members[rank];
    for (size_t left = b->bytes[rank]; left > 0 && comm->world->failed == DPL_OK;) {
        const size_t n = DPL_MIN(left, PIECE_BYTES);
        MPI_Request *request = &m->requests[m->n];
        const int code = receives ? MPI_Irecv(p, (int)n, MPI_BYTE, peer, tag, w->all, request)
                                  : MPI_Isend(p, (int)n, MPI_BYTE, peer, tag, w->all, request);
        if (!good(comm->world, code, receives ? "MPI_Irecv" : "MPI_Isend")) return;
        m->pieces[m->n++] = (mpi_request){receives ? rank : ~rank, (int)n};
        p += n;
        left -= n;
    }
}

static void start(dpl_comm *comm, dpl_op *op) {
    const mpi_world *w = comm->world->state;
    const bool has_tag = comm->id < w->n_tags / DPL_OPS_MAX;
    if (!has_tag || !make_room(comm, op)) {
        host->world_fail(comm->world, DPL_ENOMEM, "rank %d: no %s for an exchange",
                         comm->world->rank, has_tag ? "memory" : "tags of MPI");
        abort_all(comm->world, comm->world->why);
        return;
    }
    mpi_op *m = op->state;
    m->n = 0;
    // Each starts with its neighbour, so that not all send to the same rank at once.
    for (int i = 1; i < comm->n_ranks; i++)
        start_block(comm, op, (comm->rank + comm->n_ranks - i) % comm->n_ranks, true);
    for (int i = 1; i < comm->n_ranks; i++)
        start_block(comm, op, (comm->rank + i) % comm->n_ranks, false);
    m->n_left = m->n;
    op->done = m->n == 0;
}

// A piece has come: as long as was expected?
static void receive_piece(dpl_comm *comm, dpl_op *op, const mpi_request *piece,
                          const MPI_Status *status) {
    dpl_world *world = comm->world;
    int bytes = 0;
    if (piece->rank < 0) return;
    if (!good(world, MPI_Get_count(status, MPI_BYTE, &bytes), "MPI_Get_count")) return;
    op->heard[piece->rank] = true;
    dpl_world_hear(world, comm->members[piece->rank]);
    if (bytes == piece->bytes) return;
    host->world_fail(world, DPL_EINVAL, "mpi: rank %d sends %d bytes to rank %d, which expects %d",
                     comm->members[piece->rank], bytes, world->rank, piece->bytes);
    abort_all(world, world->why);
}

static void advance(dpl_comm *comm, dpl_op *op) {
    mpi_op *m = op->state;
    int n_ready = 0;
    const int code = MPI_Testsome(m->n, m->requests, &n_ready, m->ready, m->statuses);
    if (!good(comm->world, code, "MPI_Testsome")) return;
    if (n_ready == MPI_UNDEFINED) { // there is no request left
        op->done = true;
        return;
    }
    for (int i = 0; i < n_ready; i++)
        receive_piece(comm, op, &m->pieces[m->ready[i]], &m->statuses[i]);
    m->n_left -= n_ready;
    op->done = m->n_left == 0 && comm->world->failed == DPL_OK;
}

static int late(const dpl_op *op) {
    const mpi_op *m = op->state;
    for (int i = 0; i < m->n; i++)
        if (m->requests[i] != MPI_REQUEST_NULL && m->pieces[i].rank < 0) return ~m->pieces[i].rank;
    return -1;
}

// Receives are cancelled; what a peer is in the middle of sending is given a moment to come. MPI is
// not called again after a failure, so nothing arrives later.
static void withdraw(dpl_comm *comm, dpl_op *op) {
    (void)comm;
    mpi_op *m = op->state;
    int done = 0;
    for (int i = 0; m && i < m->n; i++)
        if (m->requests[i] != MPI_REQUEST_NULL && m->pieces[i].rank >= 0)
            MPI_Cancel(&m->requests[i]);
    for (const double end = host->now() + WITHDRAW_S; m && !done && host->now() < end;)
        if (MPI_Testall(m->n, m->requests, &done, MPI_STATUSES_IGNORE) != MPI_SUCCESS) break;
    for (int i = 0; m && i < m->n; i++)
        if (m->requests[i] != MPI_REQUEST_NULL) MPI_Request_free(&m->requests[i]);
}

/* ---- waiting ---- */
static void listen(dpl_world *world) {
    mpi_world *w = world->state;
    good(world,
         MPI_Irecv(w->abort_text, sizeof w->abort_text, MPI_BYTE, MPI_ANY_SOURCE, 0, w->control,
                   &w->abort_request),
         "MPI_Irecv");
}

static uint32_t look(dpl_world *world) {
    mpi_world *w = world->state;
    int there = 0;
    MPI_Status status;
    if (world->failed != DPL_OK ||
        !good(world, MPI_Test(&w->abort_request, &there, &status), "MPI_Test") || !there)
        return 0;
    if (w->abort_text[0]) {
        host->world_fail(world, DPL_ECOMM, "%.500s", w->abort_text);
    } else {
        dpl_world_hear(world, status.MPI_SOURCE);
        listen(world);
    }
    return 0;
}

// A rank that has not taken the last one gets no other.
static void greet(dpl_world *world) {
    static const char empty[1];
    mpi_world *w = world->state;
    int done = 0;
    for (int r = 0; r < world->n_ranks; r++) {
        MPI_Request *request = &w->greetings[r];
        if (r == world->rank ||
            !good(world, MPI_Test(request, &done, MPI_STATUS_IGNORE), "MPI_Test"))
            continue;
        if (done)
            good(world, MPI_Isend(empty, 1, MPI_BYTE, r, 0, w->control, request), "MPI_Isend");
    }
}

static void rest(dpl_world *world, uint32_t seen, unsigned n_rests) {
    (void)seen;
    const mpi_world *w = world->state;
    if (w->spins && n_rests < SPINS) return;
    if (n_rests == DPL_RESTS_LANE) usleep(LANE_US);
    else if (n_rests < 2 * SPINS) sched_yield();
    else usleep(50);
}

static void abort_all(dpl_world *world, const char *why) {
    const mpi_world *w = world->state;
    static char text[512]; // messages may be under way until the process ends
    snprintf(text, sizeof text, "%s", why);
    MPI_Request *requests = host->alloc((size_t)world->n_ranks * sizeof *requests);
    int n = 0, done = 0;
    for (int r = 0; requests && r < world->n_ranks; r++)
        if (r != world->rank &&
            MPI_Isend(text, sizeof text, MPI_BYTE, r, 0, w->control, &requests[n]) == MPI_SUCCESS)
            n++;
    // A rank that is stopped does not take its message: the others are given a moment only.
    for (const double end = host->now() + LINGER_S; n > 0 && !done && host->now() < end;)
        if (MPI_Testall(n, requests, &done, MPI_STATUSES_IGNORE) != MPI_SUCCESS) break;
}

/* ---- the end ---- */
// Ending MPI is a meeting of all ranks: after a failure somebody may be missing.
static void leave(dpl_world *world) {
    mpi_world *w = world->state;
    if (world->failed == DPL_OK) {
        MPI_Waitall(world->n_ranks, w->greetings, MPI_STATUSES_IGNORE);
        MPI_Cancel(&w->abort_request);
        MPI_Request_free(&w->abort_request);
        MPI_Comm_free(&w->control);
        MPI_Comm_free(&w->all);
        if (w->owns) MPI_Finalize();
        host->free(w->greetings);
        host->free(w);
    } else {
        usleep((useconds_t)(1e6 * LINGER_S));
    }
}

static const dpl_comm_ops mpi = {
    .name = "mpi",
    .start = start,
    .advance = advance,
    .late = late,
    .withdraw = withdraw,
    .free_op = free_op,
    .look = look,
    .rest = rest,
    .abort = abort_all,
    .greet = greet,
    .leave = leave,
};

/* ---- opening ---- */
// Ranks of this machine that would share a processor do not spin.
static bool has_processors(void) {
    MPI_Comm shared;
    cpu_set_t allowed;
    int n = 1, n_cpus = (int)sysconf(_SC_NPROCESSORS_ONLN);
    // A rank that is bound to one processor has it for itself.
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
        if (CPU_COUNT(&allowed) == 1) return true;
        n_cpus = CPU_COUNT(&allowed);
    }
    if (MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &shared))
        return false;
    MPI_Comm_size(shared, &n);
    MPI_Comm_free(&shared);
    return n <= n_cpus;
}

static dpl_status start_mpi(bool *owns_out, int *level_out) {
    int is_started = 0, is_over = 0, level = MPI_THREAD_SINGLE;
    MPI_Finalized(&is_over);
    if (is_over) return host->fail(DPL_ECOMM, "MPI has ended in this process");
    MPI_Initialized(&is_started);
    if (!is_started && MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level) != MPI_SUCCESS)
        return host->fail(DPL_ECOMM, "MPI_Init_thread failed");
    *owns_out = !is_started;
    if (is_started) MPI_Query_thread(&level);
    *level_out = level;
    if (is_started) return DPL_OK; // what errors do is that program's choice
    // Of calls that name no communicator.
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
    return DPL_OK;
}

__attribute__((visibility("default"))) dpl_status dpl_comm_module_open(const dpl_comm_host *from,
                                                                       dpl_comm **comm_out);

dpl_status dpl_comm_module_open(const dpl_comm_host *from, dpl_comm **comm_out) {
    host = from;
    if (host->version != DPL_COMM_MODULE_VERSION)
        return host->fail(DPL_ENOSUP, "module of version %d, library of version %d",
                          DPL_COMM_MODULE_VERSION, host->version);
    mpi_world *w = host->alloc(sizeof *w);
    if (!w) return host->fail(DPL_ENOMEM, "no memory for a communicator");
    int rank = 0, n_ranks = 1, found = 0, level = 0, *most;
    dpl_status status = start_mpi(&w->owns, &level);
    if (status == DPL_OK && (MPI_Comm_dup(MPI_COMM_WORLD, &w->all) != MPI_SUCCESS ||
                             MPI_Comm_dup(MPI_COMM_WORLD, &w->control) != MPI_SUCCESS))
        status = host->fail(DPL_ECOMM, "MPI_Comm_dup failed");
    if (status != DPL_OK) {
        host->free(w);
        return status;
    }
    MPI_Comm_rank(w->all, &rank);
    MPI_Comm_size(w->all, &n_ranks);
    w->n_tags = 32768; // that every MPI has
    if (MPI_Comm_get_attr(w->all, MPI_TAG_UB, &most, &found) == MPI_SUCCESS && found)
        w->n_tags = *most;
    MPI_Comm_set_errhandler(w->all, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(w->control, MPI_ERRORS_RETURN);
    w->spins = has_processors();
    w->greetings = host->alloc((size_t)n_ranks * sizeof *w->greetings);
    for (int r = 0; r < n_ranks && w->greetings; r++) w->greetings[r] = MPI_REQUEST_NULL;
    status = w->greetings ? host->world_open(&mpi, rank, n_ranks, w, NULL, comm_out)
                          : host->fail(DPL_ENOMEM, "no memory for a communicator");
    if (status == DPL_OK) listen((*comm_out)->world);
    if (status == DPL_OK) (*comm_out)->world->no_lane = level < MPI_THREAD_SERIALIZED;
    return status;
}
