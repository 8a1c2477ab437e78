// kernels.c - the kernel table of each CPU level, and the choice among kernels with the same bits.
#include "cpu/kernels.h"

#define CHOICE_ROUNDS 5 // of which the best counts
#define CHOICE_CALLS  8

void dpl_cpu_kernels(dpl_cpu_level level, dpl_kernels *k_out) {
    *k_out = (dpl_kernels){0};
    dpl_kernels_ref(k_out);
    dpl_kernels_ref_quant(k_out);
#if defined(__x86_64__)
    const bool soft = level == DPL_CPU_TILES;
    if (soft) level = DPL_MIN(dpl_cpu_level_machine(), DPL_CPU_AVX512_BF16);
    if (level >= DPL_CPU_AVX2) dpl_kernels_avx2(k_out);
    if (level >= DPL_CPU_AVX512) dpl_kernels_avx512(k_out);
    if (level >= DPL_CPU_AVX512_BF16) dpl_kernels_avx512_bf16(k_out);
    if (level >= DPL_CPU_AMX) dpl_kernels_amx(k_out);
    if (soft) dpl_kernels_tiles(k_out);
#endif
}

// Seconds of a few whole tiles whose operands are in cache.
static double time_tile(const dpl_gemm_kernels *g, const void *left, const void *right, float *c) {
    double best = 1e9;
    const unsigned entered = dpl_gemm_enter(g);
    for (int i = 0; i < CHOICE_ROUNDS; i++) {
        const double start = dpl_now();
        for (int call = 0; call < CHOICE_CALLS; call++)
            g->tile(g->mr, g->kc, left, right, c, 32, true, (dpl_gemm_ahead){right, 0, 1, 0, 0});
        best = DPL_MIN(best, (dpl_now() - start) / (double)g->mr / (double)g->kc);
    }
    dpl_gemm_leave(g, entered);
    return best;
}

void dpl_cpu_kernels_choose(dpl_kernels *k) {
    for (int i = 0; i < 2; i++) {
        const dpl_gemm_kernels *a = &k->gemm[i], *b = &k->same[i];
        if (!b->name) continue;
        const size_t rows = DPL_MAX(a->mr, b->mr), kc = DPL_MAX(a->kc, b->kc);
        float *left = dpl_alloc(rows * kc * 4), *right = dpl_alloc(kc * 32 * 4);
        float *c = dpl_alloc(rows * 32 * sizeof *c);
        if (left && right && c && time_tile(b, left, right, c) < time_tile(a, left, right, c)) {
            const dpl_gemm_kernels faster = *b;
            k->same[i] = *a;
            k->gemm[i] = faster;
        }
        dpl_free(left), dpl_free(right), dpl_free(c);
    }
}
