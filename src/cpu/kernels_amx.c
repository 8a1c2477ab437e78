// kernels_amx.c - the grouped GEMM of class BF16 with the processor's tile registers.
//
// The instructions are written out instead of taken from immintrin.h: its macros do not tell every
// compiler that they read memory.
#include <stddef.h>

#define TILE_ZERO(t)        __asm__ volatile("tilezero %%tmm%c0" ::"i"(t))
#define TILE_LOAD(t, p, ld) MOVE_TILE("tileloadd (%1,%2), %%tmm%c0", t, p, ld)
#define TILE_STREAM(t, p, ld) \
    MOVE_TILE("tileloaddt1 (%1,%2), %%tmm%c0", t, p, ld) // not to stay in L1
#define TILE_STORE(t, p, ld) MOVE_TILE("tilestored %%tmm%c0, (%1,%2)", t, p, ld)
#define MOVE_TILE(instruction, t, p, ld) \
    __asm__ volatile(instruction ::"i"(t), "r"(p), "r"((ptrdiff_t)(ld)) : "memory")
#define TILE_DOT(c, a, b) \
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b))
#define TILE_CONFIGURE(config) __asm__ volatile("ldtilecfg %0" ::"m"(*(config)))
#define TILE_ENTER()           0
// Without live tiles a switch to another thread need not save their 8 KB.
#define TILE_LEAVE(entered) __asm__ volatile("tilerelease" ::"r"(entered))

#include "cpu/kernels_tiles_tmpl.h"

void dpl_kernels_amx(dpl_kernels *k) {
    set_table(k, "amx_bf16");
}
