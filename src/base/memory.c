// memory.c - blocks that live long (dpl_alloc) and the arena whose blocks live for one step.
//
// The arena reserves address space once and lets the system back it page by page, so planning may
// be generous. Under AddressSanitizer every block is followed by a poisoned red zone of its own
// size: an offset is then simply scaled, and marks, peaks and plans are the same in all builds.
#include <sanitizer/asan_interface.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/base.h"

// The sanitizer's macros do nothing without it.
#ifndef __has_feature
#define __has_feature(feature) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#define STRETCH 2
#else
#define STRETCH 1
#endif

#define HUGE_BYTES ((size_t)2 << 20)

/* ---- long-lived blocks ---------------------------------------------------------------------- */
static atomic_size_t fault_countdown;

void dpl_fault_alloc(size_t nth) {
    atomic_store(&fault_countdown, nth);
}

static bool fault_strikes(void) {
    size_t left = atomic_load_explicit(&fault_countdown, memory_order_relaxed);
    while (left > 0 && !atomic_compare_exchange_weak(&fault_countdown, &left, left - 1)) continue;
    return left == 1;
}

// In front of each block.
typedef struct block_header {
    void *base;
    size_t mapped_bytes; // 0: from malloc
} block_header;

// A large block is a mapping: its pages come zeroed, each from the memory near the thread that
// touches it first. Leaks inside of mappings are not found, so sanitizers get plain blocks.
static void *alloc_pages(size_t bytes) {
    const size_t mapped = dpl_round_up(bytes, HUGE_BYTES) + 2 * HUGE_BYTES;
    void *base = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return NULL;
    char *p = (char *)base + HUGE_BYTES + (HUGE_BYTES - (uintptr_t)base % HUGE_BYTES) % HUGE_BYTES;
    // Advice comes before the first touch, else the pages are already small. It may be refused.
    (void)madvise(p, bytes, MADV_HUGEPAGE);
    ((block_header *)(void *)p)[-1] = (block_header){base, mapped};
    return p;
}

void *dpl_alloc(size_t bytes) {
    if (fault_strikes() || bytes > PTRDIFF_MAX / 2) return NULL;
    if (bytes >= HUGE_BYTES && STRETCH == 1) return alloc_pages(bytes);
    const size_t align = bytes >= HUGE_BYTES ? HUGE_BYTES : DPL_ALIGN;
    void *base;
    if (posix_memalign(&base, align, bytes + align)) return NULL;
    memset(base, 0, bytes + align);
    char *p = (char *)base + align;
    ((block_header *)(void *)p)[-1] = (block_header){base, 0};
    ASAN_POISON_MEMORY_REGION(base, align);
    return p;
}

void *dpl_alloc_array(size_t count, size_t size) {
    size_t bytes;
    return __builtin_mul_overflow(count, size, &bytes) ? NULL : dpl_alloc(bytes);
}

void dpl_free(void *p) {
    if (!p) return;
    ASAN_UNPOISON_MEMORY_REGION((char *)p - DPL_ALIGN, DPL_ALIGN);
    const block_header header = ((block_header *)p)[-1];
    ASAN_UNPOISON_MEMORY_REGION(header.base, (size_t)((char *)p - (char *)header.base));
    if (header.mapped_bytes) munmap(header.base, header.mapped_bytes);
    else free(header.base);
}

char *dpl_strdup(const char *text) {
    const size_t bytes = strlen(text) + 1;
    char *copy = dpl_alloc(bytes);
    if (copy) memcpy(copy, text, bytes);
    return copy;
}

/* ---- step arena ----------------------------------------------------------------------------- */
// All sizes are in planned bytes; the address of offset x is base + x * STRETCH.
struct dpl_arena {
    char *base; // on a huge page's boundary, inside the mapping
    void *mapping;
    size_t mapping_bytes;
    size_t reserved, used, peak;
    bool held;
    // While held: blocks in [dead_from, dead_to) are released in name only.
    size_t dead_from, dead_to;
};

dpl_status dpl_arena_open(size_t reserve_bytes, dpl_arena **arena_out) {
    dpl_arena *arena = dpl_alloc(sizeof *arena);
    if (!arena) return dpl_fail(DPL_ENOMEM, "arena: no memory for its %zu bytes", sizeof *arena);
    arena->mapping = MAP_FAILED;
    if (reserve_bytes <= PTRDIFF_MAX / (2 * STRETCH)) {
        arena->reserved = dpl_round_up(reserve_bytes, DPL_ALIGN);
        arena->mapping_bytes = arena->reserved * STRETCH + HUGE_BYTES;
        arena->mapping = mmap(NULL, arena->mapping_bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    if (arena->mapping == MAP_FAILED) {
        dpl_free(arena);
        return dpl_fail(DPL_ENOMEM, "arena: cannot reserve %zu bytes of addresses", reserve_bytes);
    }
    (void)madvise(arena->mapping, arena->mapping_bytes, MADV_HUGEPAGE);
    const uintptr_t start = (uintptr_t)arena->mapping;
    arena->base = (char *)arena->mapping + (dpl_round_up(start, HUGE_BYTES) - start);
    *arena_out = arena;
    return DPL_OK;
}

void dpl_arena_close(dpl_arena **arena) {
    dpl_arena *a = *arena;
    if (!a) return;
    // The next owner of these addresses expects them clean.
    ASAN_UNPOISON_MEMORY_REGION(a->base, a->peak * STRETCH);
    munmap(a->mapping, a->mapping_bytes);
    dpl_free(a);
    *arena = NULL;
}

void *dpl_arena_alloc(dpl_arena *arena, size_t bytes) {
    if (bytes > arena->reserved - arena->used) {
        fprintf(stderr, "dropless: arena: %zu bytes asked for, %zu of %zu reserved are free\n",
                bytes, arena->reserved - arena->used, arena->reserved);
        abort();
    }
    const size_t rounded = dpl_round_up(bytes, DPL_ALIGN);
    char *p = arena->base + arena->used * STRETCH;
    ASAN_POISON_MEMORY_REGION(p, rounded * STRETCH);
    ASAN_UNPOISON_MEMORY_REGION(p, bytes);
    arena->used += rounded;
    arena->peak = DPL_MAX(arena->peak, arena->used);
    return p;
}

size_t dpl_arena_mark(const dpl_arena *arena) {
    return arena->used;
}

static void release_now(dpl_arena *arena, size_t mark) {
    ASAN_POISON_MEMORY_REGION(arena->base + mark * STRETCH, (arena->used - mark) * STRETCH);
    arena->used = mark;
}

void dpl_arena_release(dpl_arena *arena, size_t mark) {
    if (mark > arena->used) {
        fprintf(stderr, "dropless: arena: release to %zu, but only %zu bytes are in use\n", mark,
                arena->used);
        abort();
    }
    if (!arena->held) {
        release_now(arena, mark);
        return;
    }
    // A mark at or below the dead range joins it; one above it stands on a block that still lives.
    arena->dead_from = mark > arena->dead_to ? mark : DPL_MIN(mark, arena->dead_from);
    arena->dead_to = arena->used;
}

bool dpl_arena_owns(const dpl_arena *arena, const void *p) {
    const uintptr_t offset = (uintptr_t)p - (uintptr_t)arena->base; // wraps when p is below
    return offset < arena->reserved * STRETCH;
}

size_t dpl_arena_free_bytes(const dpl_arena *arena) {
    return arena->reserved - arena->used;
}

size_t dpl_arena_peak_bytes(const dpl_arena *arena) {
    return arena->peak;
}

void dpl_arena_hold(dpl_arena *arena, bool hold) {
    if (hold == arena->held) return;
    arena->held = hold;
    if (hold) arena->dead_from = arena->dead_to = arena->used;
    else if (arena->dead_to == arena->used) release_now(arena, arena->dead_from);
    // Else a block was taken after the last release: it lives, and so what lies below it stays.
}
