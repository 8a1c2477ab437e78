// window.c - see window.h.
//
// Ranks of one process share its addresses. Other processes of a machine map the file behind a heap
// by way of /proc, so nothing has a name and nothing is left when they end, however they end.
#include "comm/window.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct card { // what a rank tells the others of its heap
    uint64_t machine, process, base, bytes, mark;
    int32_t pid, fd, island, unused;
} card;

static uint64_t random_number(void) {
    uint64_t x = (uint64_t)getpid();
    (void)!getrandom(&x, sizeof x, 0);
    return x;
}

// The same for processes that may see each other: they have booted together and share a /proc.
// Whether they do is found out by looking.
static uint64_t machine_id(void) {
    char text[128] = {0}, space[64] = {0};
    const int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    const ssize_t n = fd >= 0 ? read(fd, text, sizeof text - 1) : 0;
    if (fd >= 0) close(fd);
    if (n <= 0) return random_number(); // alone
    const ssize_t m = readlink("/proc/self/ns/pid", space, sizeof space - 1);
    return dpl_hash64(text, (size_t)n, dpl_hash64(space, m > 0 ? (size_t)m : 0, 0));
}

static uint64_t own_process;

static void draw_process(void) {
    own_process = random_number();
}

static uint64_t process_id(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, draw_process);
    return own_process;
}

// The heap behind a file that another process has open; NULL: it cannot be reached, or is another.
static dpl_status map_peer(const card *peer, uint8_t **base_out) {
    char path[64];
    struct stat st;
    uint64_t mark;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)peer->pid, (int)peer->fd);
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return DPL_OK;
    void *p = MAP_FAILED;
    const bool same = !fstat(fd, &st) && (uint64_t)st.st_size == peer->bytes &&
                      pread(fd, &mark, sizeof mark, 0) == sizeof mark && mark == peer->mark;
    if (same)
        p = mmap(NULL, peer->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    const bool full = same && p == MAP_FAILED && errno == ENOMEM;
    close(fd);
    if (p != MAP_FAILED) *base_out = p;
    return full ? dpl_fail(DPL_ENOMEM, "no addresses left for the memory of other ranks") : DPL_OK;
}

static dpl_status map_peers(dpl_window *w, int rank, const card *cards) {
    const card *own = &cards[rank];
    for (int r = 0; r < w->n_ranks; r++) {
        const card *peer = &cards[r];
        if (r == rank) w->base[r] = dpl_heap_base(w->heap);
        else if (peer->machine != own->machine || peer->island != own->island) continue;
        else if (peer->process == own->process) w->base[r] = (uint8_t *)(uintptr_t)peer->base;
        else if (peer->fd >= 0) {
            DPL_TRY(map_peer(peer, &w->base[r]));
            if (w->base[r]) w->mapped_bytes[r] = peer->bytes;
        }
    }
    return DPL_OK;
}

// One host is what every rank of it can reach: a rank joins the first whose ranks all see it.
static void find_hosts(dpl_window *w, const uint8_t *sees) {
    const int R = w->n_ranks;
    for (int r = 0; r < R; r++) {
        w->host[r] = r;
        for (int h = 0; h < r && w->host[r] == r; h++) {
            bool all = w->host[h] == h;
            for (int i = h; i < r && all; i++)
                if (w->host[i] == h)
                    all = sees[(size_t)i * (size_t)R + (size_t)r] &&
                          sees[(size_t)r * (size_t)R + (size_t)i];
            if (all) w->host[r] = h;
        }
    }
}

static dpl_status map_all(dpl_comm *comm, dpl_window *w, int island) {
    const size_t R = (size_t)comm->n_ranks;
    const card own = {.machine = machine_id(),
                      .process = process_id(),
                      .mark = dpl_heap_mark(w->heap),
                      .island = island < 0 ? -1 - comm->rank : island,
                      .base = (uint64_t)(uintptr_t)dpl_heap_base(w->heap),
                      .bytes = dpl_heap_bytes(w->heap),
                      .pid = getpid(),
                      .fd = dpl_heap_fd(w->heap)};
    card *cards = dpl_alloc_array(R, sizeof *cards);
    uint8_t *seen = dpl_alloc(R + R * R);
    dpl_status status = DPL_OK;
    if (!cards || !seen) status = dpl_fail(DPL_ENOMEM, "no memory for the windows of %zu ranks", R);
    status = dpl_comm_agree(comm, status);
    if (status == DPL_OK) status = dpl_comm_gather_now(comm, &own, sizeof own, cards);
    if (status == DPL_OK) status = dpl_comm_agree(comm, map_peers(w, comm->rank, cards));
    for (size_t r = 0; status == DPL_OK && r < R; r++) seen[r] = w->base[r] != NULL;
    if (status == DPL_OK) status = dpl_comm_gather_now(comm, seen, R, seen + R);
    if (status == DPL_OK) find_hosts(w, seen + R);
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
        w->comm = comm;
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

static void free_heap(void *p) {
    dpl_heap *heap = p;
    dpl_heap_close(&heap);
}

// After a failure a rank of this process may still be writing here.
void dpl_window_close(dpl_window **window) {
    dpl_window *w = *window;
    if (!w) return;
    for (int r = 0; r < w->n_ranks && w->mapped_bytes; r++)
        if (w->mapped_bytes[r]) munmap(w->base[r], w->mapped_bytes[r]);
    if (w->heap) dpl_comm_keep(w->comm, free_heap, w->heap);
    dpl_free(w->base);
    dpl_free(w->host);
    dpl_free(w->mapped_bytes);
    dpl_free(w);
    *window = NULL;
}

dpl_status dpl_comm_neighbours(dpl_comm *comm, size_t *n_out) {
    const uint64_t own = machine_id();
    uint64_t *all = dpl_alloc_array((size_t)comm->n_ranks, sizeof *all);
    const dpl_status mine = all ? DPL_OK : dpl_fail(DPL_ENOMEM, "no memory to count ranks");
    const dpl_status status = dpl_comm_agree_on(comm, mine, &own, sizeof own, all);
    size_t n = 0;
    for (int r = 0; status == DPL_OK && r < comm->n_ranks; r++) n += all[r] == own;
    dpl_free(all);
    if (status == DPL_OK) *n_out = n;
    return status;
}
