// heap.c - blocks in one reservation of addresses, which other processes may map: what ranks write
// into each other's memory.
//
// The reservation is as large as it likes: the system backs what is touched. A block takes the
// lowest gap that it fits in, so what is in use stays low, and pages above what the last rounds
// needed are given back. A round ends when the last block is released.
#include <sanitizer/asan_interface.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/base.h"

#define HUGE_BYTES ((size_t)2 << 20)
#define RED_ZONE   DPL_ALIGN // after each block, so that AddressSanitizer sees what runs over
#define ROUNDS     8         // a spike is given back after so many
#define MARK_BYTES DPL_ALIGN // at the start, by which peers know that it is this heap

typedef struct heap_block {
    size_t at, bytes;
    struct heap_block *next;
} heap_block;

struct dpl_heap {
    char *base;
    size_t reserved;
    int fd;                   // -1: of this process alone
    heap_block *used, *spare; // by address
    size_t high[ROUNDS];      // the end of the highest block in each of the last rounds
    size_t round;
    size_t touched; // pages below may have memory
    size_t highest; // that `touched` ever was
};

dpl_status dpl_heap_open(size_t reserve_bytes, bool shared, dpl_heap **heap_out) {
    dpl_heap *heap = dpl_alloc(sizeof *heap);
    if (!heap) return dpl_fail(DPL_ENOMEM, "no memory for a heap");
    heap->fd = shared ? memfd_create("dropless", MFD_CLOEXEC) : -1;
    heap->reserved = dpl_round_up(reserve_bytes, HUGE_BYTES);
    const int flags = (shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS) | MAP_NORESERVE;
    const bool has_file = !shared || (heap->fd >= 0 && !ftruncate(heap->fd, (off_t)heap->reserved));
    void *base = MAP_FAILED;
    if (has_file) base = mmap(NULL, heap->reserved, PROT_READ | PROT_WRITE, flags, heap->fd, 0);
    if (base == MAP_FAILED) {
        dpl_fail(DPL_ENOMEM, "cannot reserve %zu bytes of addresses%s: %m", heap->reserved,
                 shared ? " to share with other ranks" : "");
        if (heap->fd >= 0) close(heap->fd);
        dpl_free(heap);
        return DPL_ENOMEM;
    }
    (void)madvise(base, heap->reserved, MADV_HUGEPAGE); // may be refused
    heap->base = base;
    if (shared && getrandom(base, sizeof(uint64_t), 0) < 0) *(uint64_t *)base = (uintptr_t)heap;
    *heap_out = heap;
    return DPL_OK;
}

static void free_list(heap_block *block) {
    while (block) {
        heap_block *next = block->next;
        dpl_free(block);
        block = next;
    }
}

void dpl_heap_close(dpl_heap **heap) {
    dpl_heap *h = *heap;
    if (!h) return;
    ASAN_UNPOISON_MEMORY_REGION(h->base, h->highest); // the next owner expects it clean
    munmap(h->base, h->reserved);
    if (h->fd >= 0) close(h->fd);
    free_list(h->used);
    free_list(h->spare);
    dpl_free(h);
    *heap = NULL;
}

void *dpl_heap_alloc(dpl_heap *heap, size_t bytes) {
    const size_t taken = dpl_round_up(bytes, DPL_ALIGN) + RED_ZONE;
    heap_block **at = &heap->used, *block = heap->spare;
    size_t start = MARK_BYTES;
    for (; *at && (*at)->at - start < taken; at = &(*at)->next) start = (*at)->at + (*at)->bytes;
    if (bytes > heap->reserved || taken > heap->reserved - start) return NULL;
    if (block) heap->spare = block->next;
    else if (!(block = dpl_alloc(sizeof *block))) return NULL;
    *block = (heap_block){start, taken, *at};
    *at = block;
    const size_t end = start + taken, page_end = dpl_round_up(end, HUGE_BYTES);
    size_t *high = &heap->high[heap->round % ROUNDS];
    *high = DPL_MAX(*high, page_end);
    heap->touched = DPL_MAX(heap->touched, page_end);
    heap->highest = DPL_MAX(heap->highest, heap->touched);
    ASAN_UNPOISON_MEMORY_REGION(heap->base + start, bytes);
    ASAN_POISON_MEMORY_REGION(heap->base + start + bytes, taken - bytes);
    return heap->base + start;
}

static void end_round(dpl_heap *heap) {
    size_t keep = HUGE_BYTES; // of the mark
    for (size_t i = 0; i < ROUNDS; i++) keep = DPL_MAX(keep, heap->high[i]);
    heap->high[++heap->round % ROUNDS] = 0;
    if (keep >= heap->touched) return;
    const int advice = heap->fd >= 0 ? MADV_REMOVE : MADV_DONTNEED;
    if (!madvise(heap->base + keep, heap->touched - keep, advice)) heap->touched = keep;
}

void dpl_heap_free(dpl_heap *heap, void *p) {
    if (!p) return;
    const size_t start = (size_t)((char *)p - heap->base);
    heap_block **at = &heap->used;
    while ((*at)->at != start) at = &(*at)->next;
    heap_block *block = *at;
    ASAN_POISON_MEMORY_REGION(p, block->bytes);
    *at = block->next;
    block->next = heap->spare;
    heap->spare = block;
    if (!heap->used) end_round(heap);
}

void dpl_heap_reset(dpl_heap *heap) {
    while (heap->used) dpl_heap_free(heap, heap->base + heap->used->at);
}

void *dpl_heap_base(const dpl_heap *heap) {
    return heap->base;
}

size_t dpl_heap_bytes(const dpl_heap *heap) {
    return heap->reserved;
}

size_t dpl_heap_used(const dpl_heap *heap) {
    size_t bytes = 0;
    for (const heap_block *block = heap->used; block; block = block->next) bytes += block->bytes;
    return bytes;
}

uint64_t dpl_heap_mark(const dpl_heap *heap) {
    uint64_t mark = 0;
    if (heap->fd >= 0) memcpy(&mark, heap->base, sizeof mark);
    return mark;
}

size_t dpl_heap_touched(const dpl_heap *heap) {
    return heap->touched;
}

int dpl_heap_fd(const dpl_heap *heap) {
    return heap->fd;
}
