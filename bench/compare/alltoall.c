// alltoall.c - dispatch and combine of dropless beside MPI_Alltoallv with packing and unpacking, in
// turns, in one process a rank. See alltoall.py.
//
// The other side does what a program without such a library does: it packs a row for each expert of
// a token, by expert; exchanges; and unpacks, since rows of one expert come from several ranks. On
// the way back the same, and the sum of a token's rows. Counts are known to both beforehand.
#include <dropless.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { D = 2048, E = 64, K = 6, RUNS = 15 };
typedef uint16_t bf16;

static int rank, n_ranks;

static void check(int good, const char *what) {
    if (good) return;
    fprintf(stderr, "alltoall: %s: %s\n", what, dpl_error_message());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static void *get(size_t bytes) {
    void *p = aligned_alloc(64, (bytes + 127) / 64 * 64);
    check(p != NULL, "no memory");
    memset(p, 0, bytes);
    return p;
}

static float to_f32(bf16 h) {
    const uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static bf16 to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static size_t chosen(size_t t, size_t k) { // distinct within a token, and even
    uint64_t x = (t + 1) * 0x9e3779b97f4a7c15u + (uint64_t)rank * 0xbf58476d1ce4e5b9u;
    x ^= x >> 29;
    return (size_t)((x % E + k * (1 + 2 * (x / E % 16))) % E);
}

/* ---- the other side ---- */
typedef struct plain {
    size_t T, n_received;
    size_t *slot_of, *row_of; // (T*K): of a packed row; and back
    int *to, *to_at, *from, *from_at;
    size_t *place; // (n_received): where a received row belongs
    bf16 *packed, *received, *rows;
} plain;

static int owner(size_t e) {
    int r = 0;
    while ((size_t)(r + 1) * E / (size_t)n_ranks <= e) r++;
    return r;
}

static void plan(plain *p, size_t T) {
    const size_t R = (size_t)n_ranks;
    size_t n[E] = {0}, at[E], *all = get(R * sizeof n);
    p->T = T;
    p->slot_of = get(T * K * sizeof(size_t)), p->row_of = get(T * K * sizeof(size_t));
    p->to = get(4 * R * sizeof(int)), p->to_at = p->to + R, p->from = p->to_at + R;
    p->from_at = p->from + R;
    for (size_t slot = 0; slot < T * K; slot++) n[chosen(slot / K, slot % K)]++;
    for (size_t e = 0, sum = 0; e < E; e++) at[e] = sum, sum += n[e];
    for (size_t slot = 0; slot < T * K; slot++) {
        p->row_of[slot] = at[chosen(slot / K, slot % K)]++;
        p->slot_of[p->row_of[slot]] = slot;
    }
    MPI_Allgather(n, sizeof n, MPI_BYTE, all, sizeof n, MPI_BYTE, MPI_COMM_WORLD);
    for (size_t e = 0; e < E; e++) {
        p->to[owner(e)] += (int)(n[e] * D * sizeof(bf16));
        for (size_t r = 0; r < R && owner(e) == rank; r++)
            p->from[r] += (int)(all[r * E + e] * D * sizeof(bf16));
    }
    for (size_t r = 1; r < R; r++) {
        p->to_at[r] = p->to_at[r - 1] + p->to[r - 1];
        p->from_at[r] = p->from_at[r - 1] + p->from[r - 1];
    }
    p->n_received = (size_t)(p->from_at[R - 1] + p->from[R - 1]) / (D * sizeof(bf16));
    p->place = get(p->n_received * sizeof(size_t));
    size_t row = 0;
    for (size_t e = 0; e < E; e++)
        for (size_t r = 0; r < R && owner(e) == rank; r++) {
            size_t from = (size_t)p->from_at[r] / (D * sizeof(bf16));
            for (size_t other = 0; other < e; other++)
                if (owner(other) == rank) from += all[r * E + other];
            for (size_t i = 0; i < all[r * E + e]; i++) p->place[from + i] = row++;
        }
    p->packed = get(T * K * D * sizeof(bf16));
    p->received = get(p->n_received * D * sizeof(bf16));
    p->rows = get(p->n_received * D * sizeof(bf16));
    free(all);
}

static void plain_dispatch(plain *p, const bf16 *x) {
    for (size_t row = 0; row < p->T * K; row++)
        memcpy(p->packed + row * D, x + p->slot_of[row] / K * D, D * sizeof(bf16));
    MPI_Alltoallv(p->packed, p->to, p->to_at, MPI_BYTE, p->received, p->from, p->from_at, MPI_BYTE,
                  MPI_COMM_WORLD);
    for (size_t i = 0; i < p->n_received; i++)
        memcpy(p->rows + p->place[i] * D, p->received + i * D, D * sizeof(bf16));
}

static void plain_combine(plain *p, bf16 *y) {
    for (size_t i = 0; i < p->n_received; i++)
        memcpy(p->received + i * D, p->rows + p->place[i] * D, D * sizeof(bf16));
    MPI_Alltoallv(p->received, p->from, p->from_at, MPI_BYTE, p->packed, p->to, p->to_at, MPI_BYTE,
                  MPI_COMM_WORLD);
    for (size_t t = 0; t < p->T; t++)
        for (size_t j = 0; j < D; j++) {
            float sum = 0;
            for (size_t k = 0; k < K; k++) sum += to_f32(p->packed[p->row_of[t * K + k] * D + j]);
            y[t * D + j] = to_bf16(sum);
        }
}

/* ---- both, in turns ---- */
static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Of what took the slowest rank since `start`.
static double slowest(double start) {
    double own = MPI_Wtime() - start, most;
    MPI_Allreduce(&own, &most, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    MPI_Barrier(MPI_COMM_WORLD);
    return most;
}

static void compare(dpl_ep_group *group, size_t T) {
    plain p = {0};
    plan(&p, T);
    bf16 *x = get(T * D * sizeof *x), *y = get(T * D * sizeof *y), *z = get(T * D * sizeof *z);
    int32_t *ids = get(T * K * sizeof *ids);
    for (size_t i = 0; i < T * D; i++) x[i] = to_bf16((float)(i * 2654435761u % 997) / 512 - 1);
    for (size_t slot = 0; slot < T * K; slot++) ids[slot] = (int32_t)chosen(slot / K, slot % K);
    dpl_ep_handle *handle = NULL;
    dpl_ep_rows rows;
    double ms[4][RUNS];
    check(dpl_ep_prepare(group, ids, T, &handle) == DPL_OK, "prepare");
    dpl_ep_get_rows(handle, &rows);
    for (int i = -2; i < RUNS; i++) {
        double *to = &ms[0][i < 0 ? 0 : i];
        double start = (MPI_Barrier(MPI_COMM_WORLD), MPI_Wtime());
        check(dpl_ep_dispatch(handle, x, 0, NULL) == DPL_OK, "dispatch");
        to[0] = slowest(start);
        start = MPI_Wtime();
        plain_dispatch(&p, x);
        to[RUNS] = slowest(start);
        start = MPI_Wtime();
        check(dpl_ep_combine(handle, rows.rows, y, 0) == DPL_OK, "combine");
        to[2 * RUNS] = slowest(start);
        start = MPI_Wtime();
        plain_combine(&p, z);
        to[3 * RUNS] = slowest(start);
        check(memcmp(rows.rows, p.rows, p.n_received * D * sizeof *x) == 0, "rows differ");
        check(memcmp(y, z, T * D * sizeof *x) == 0, "sums differ");
    }
    for (int i = 0; i < 4; i++) qsort(ms[i], RUNS, sizeof(double), by_value);
    if (rank == 0)
        printf("%zu %g %g %g %g\n", T, 1e3 * ms[0][RUNS / 2], 1e3 * ms[1][RUNS / 2],
               1e3 * ms[2][RUNS / 2], 1e3 * ms[3][RUNS / 2]);
    fflush(stdout);
    dpl_ep_handle_close(&handle);
    void *blocks[] = {x,    y,       z,        ids,        p.slot_of, p.row_of,
                      p.to, p.place, p.packed, p.received, p.rows};
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) free(blocks[i]);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    dpl_comm *comm = NULL;
    dpl_ctx *ctx = NULL;
    dpl_ep_group *group = NULL;
    const dpl_ep_config config = {D, E, K, DPL_BF16, NULL, false};
    check(dpl_comm_open_mpi(&comm) == DPL_OK, "mpi");
    rank = dpl_comm_rank(comm);
    n_ranks = dpl_comm_ranks(comm);
    check(dpl_ctx_open(1, &ctx) == DPL_OK, "context");
    check(dpl_ep_group_open(ctx, comm, &config, &group) == DPL_OK, "group");
    for (int i = 1; i < argc; i++) compare(group, (size_t)atoi(argv[i]));
    dpl_ep_group_close(&group);
    dpl_ctx_close(&ctx);
    dpl_comm_close(&comm);
    MPI_Finalize();
    return 0;
}
