// window.c - see window.h.
//
// Ranks of one process share its addresses. Other processes of a machine map the file behind a heap
// by way of /proc, so nothing has a name and nothing is left when they end, however they end.
#include "comm/window.h"

#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct card { // what a rank tells the others of its heap
    uint64_t machine, base, bytes;
    int32_t pid, fd, island, unused;
} card;

// The same for processes that see each other: they have booted together and share a /proc.
static uint64_t machine_id(void) {
    char text[128] = {0}, space[64] = {0};
    const int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    const ssize_t n = fd >= 0 ? read(fd, text, sizeof text - 1) : 0;
    if (fd >= 0) close(fd);
    if (n <= 0) return (uint64_t)getpid(); // alone
    const ssize_t m = readlink("/proc/self/ns/pid", space, sizeof space - 1);
    return dpl_hash64(text, (size_t)n, dpl_hash64(space, m > 0 ? (size_t)m : 0, 0));
}

// A file that another process has open, NULL: it cannot be reached.
static uint8_t *map_peer(const card *peer) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)peer->pid, (int)peer->fd);
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return NULL;
    void *p = mmap(NULL, peer->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    close(fd);
    return p == MAP_FAILED ? NULL : p;
}

static void map_peers(dpl_window *w, int rank, const card *cards) {
    const card *own = &cards[rank];
    for (int r = 0; r < w->n_ranks; r++) {
        const card *peer = &cards[r];
        if (r == rank) w->base[r] = dpl_heap_base(w->heap);
        else if (peer->machine != own->machine || peer->island != own->island) continue;
        else if (peer->pid == own->pid) w->base[r] = (uint8_t *)(uintptr_t)peer->base;
        else if (peer->fd >= 0 && (w->base[r] = map_peer(peer))) w->mapped_bytes[r] = peer->bytes;
    }
}

// One host is what every rank of it can reach: a rank joins the first whose ranks all see it.
static void find_hosts(dpl_window *w, const uint8_t *sees) {
    const int R = w->n_ranks;
    for (int r = 0; r < R; r++) {
        w->host[r] = r;
        for (int h = 0; h < r && w->host[r] == r; h++) {
            bool all = w->host[h] == h;
            for (int i = h; i < r && all; i++)
                if (w->host[i] == h) all = sees[i * R + r] && sees[r * R + i];
            if (all) w->host[r] = h;
        }
    }
}

static dpl_status map_all(dpl_comm *comm, dpl_window *w, int island) {
    const size_t R = (size_t)comm->n_ranks;
    const card own = {.machine = machine_id(),
                      .island = island < 0 ? -1 - comm->rank : island,
                      .base = (uint64_t)(uintptr_t)dpl_heap_base(w->heap),
                      .bytes = dpl_heap_bytes(w->heap),
                      .pid = getpid(),
                      .fd = dpl_heap_fd(w->heap)};
    card *cards = dpl_alloc_array(R, sizeof *cards);
    uint8_t *seen = dpl_alloc(R + R * R), *sees = seen + R;
    dpl_status status = DPL_OK;
    if (!cards || !seen) status = dpl_fail(DPL_ENOMEM, "no memory for the windows of %zu ranks", R);
    status = dpl_comm_agree(comm, status);
    if (status == DPL_OK) status = dpl_comm_gather_now(comm, &own, sizeof own, cards);
    if (status == DPL_OK) map_peers(w, comm->rank, cards);
    for (size_t r = 0; status == DPL_OK && r < R; r++) seen[r] = w->base[r] != NULL;
    if (status == DPL_OK) status = dpl_comm_gather_now(comm, seen, R, sees);
    if (status == DPL_OK) find_hosts(w, sees);
    dpl_free(cards);
    dpl_free(seen);
    return status;
}

dpl_status dpl_window_open(dpl_comm *comm, size_t reserve_bytes, int island,
                           dpl_window **window_out) {
    const size_t R = (size_t)comm->n_ranks;
    dpl_window *w = dpl_alloc(sizeof *w);
    dpl_status status = DPL_OK;
    if (w) {
        w->n_ranks = comm->n_ranks;
        w->base = dpl_alloc_array(R, sizeof *w->base);
        w->host = dpl_alloc_array(R, sizeof *w->host);
        w->mapped_bytes = dpl_alloc_array(R, sizeof *w->mapped_bytes);
    }
    if (!w || !w->base || !w->host || !w->mapped_bytes)
        status = dpl_fail(DPL_ENOMEM, "no memory for the windows of %zu ranks", R);
    // Ranks of one process have its addresses in common anyway.
    const bool file = island >= 0 && strcmp(dpl_comm_name(comm), "mpi") == 0;
    if (status == DPL_OK) status = dpl_heap_open(reserve_bytes, file, &w->heap);
    status = dpl_comm_agree(comm, status);
    if (status == DPL_OK) status = map_all(comm, w, island);
    if (status == DPL_OK) *window_out = w;
    else dpl_window_close(&w);
    return status;
}

void dpl_window_close(dpl_window **window) {
    dpl_window *w = *window;
    if (!w) return;
    for (int r = 0; r < w->n_ranks && w->mapped_bytes; r++)
        if (w->mapped_bytes[r]) munmap(w->base[r], w->mapped_bytes[r]);
    dpl_heap_close(&w->heap);
    dpl_free(w->base);
    dpl_free(w->host);
    dpl_free(w->mapped_bytes);
    dpl_free(w);
    *window = NULL;
}
