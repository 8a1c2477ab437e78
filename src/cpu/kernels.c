// kernels.c - the kernel table of each CPU level.
#include "cpu/kernels.h"

const dpl_kernels *dpl_cpu_kernels(dpl_cpu_level level) {
    static const dpl_kernels *const tables[DPL_CPU_N] = {
        [DPL_CPU_REF] = &dpl_kernels_ref,
#if defined(__x86_64__)
        [DPL_CPU_AVX2] = &dpl_kernels_avx2,
        [DPL_CPU_AVX512] = &dpl_kernels_avx512,
#endif
    };
    return tables[level];
}
