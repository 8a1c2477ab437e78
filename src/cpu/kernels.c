// kernels.c - fills the kernel tables: plain C first, then each level overwrites what it has.
#include "cpu/kernels.h"

#include <pthread.h>

static struct dpl_kernels tables[DPL_CPU_N];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void fill(void) {
    for (int level = 0; level < DPL_CPU_N; level++) {
        struct dpl_kernels *k = &tables[level];
        dpl_gemm_kernels_ref(&k->gemm);
        dpl_row_kernels_ref(&k->rows);
        if (level >= DPL_CPU_AVX2) {
            dpl_gemm_kernels_avx2(&k->gemm);
            dpl_row_kernels_avx2(&k->rows);
        }
        if (level >= DPL_CPU_AVX512) {
            dpl_gemm_kernels_avx512(&k->gemm);
            dpl_row_kernels_avx512(&k->rows);
        }
    }
}

const struct dpl_kernels *dpl_cpu_kernels(dpl_cpu_level level) {
    pthread_once(&once, fill);
    return &tables[level];
}
