// build.c - which build this is: linkers leave a number in a note of the file, which is another one
// for every other content.
#include <link.h>

#include "base/base.h"

typedef struct search {
    ElfW(Addr) address; // of the object that is looked for
    uint64_t hash;
} search;

static int visit(struct dl_phdr_info *info, size_t size, void *arg) {
    (void)size;
    search *s = arg;
    uint64_t hash = dpl_hash64(DPL_VERSION, sizeof DPL_VERSION, 0);
    bool here = false;
    for (const ElfW(Phdr) *p = info->dlpi_phdr; p < info->dlpi_phdr + info->dlpi_phnum; p++) {
        const ElfW(Addr) at = info->dlpi_addr + p->p_vaddr;
        here |= p->p_type == PT_LOAD && s->address - at < p->p_memsz;
        if (p->p_type == PT_NOTE) hash = dpl_hash64((const void *)at, p->p_memsz, hash);
    }
    if (here) s->hash = hash;
    return here;
}

uint64_t dpl_build_hash(void) {
    search s = {(ElfW(Addr))(uintptr_t)&dpl_build_hash, 0};
    dl_iterate_phdr(visit, &s);
    return s.hash;
}
