/*
 * cpu_level.c - which instruction-set level the kernels may use; asked when a context opens. It is
 * granted only when the processor and the system have all of its features.
 */
#include <stdio.h>
#include <stdlib.h>

#include "base/base.h"

static const char *const level_names[DPL_CPU_N] = {
#define LEVEL_NAME(id, name) name,
    DPL_CPU_MAP(LEVEL_NAME)
#undef LEVEL_NAME
};

const char *dpl_cpu_level_name(dpl_cpu_level level) {
    return (unsigned)level < DPL_CPU_N ? level_names[level] : "unknown";
}

static dpl_cpu_level machine_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return DPL_CPU_REF;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return DPL_CPU_AVX512;
    return DPL_CPU_AVX2;
#else
    return DPL_CPU_REF;
#endif
}

dpl_status dpl_cpu_level_detect(dpl_cpu_level *level_out) {
    const dpl_cpu_level best = machine_level();
    const char *wanted = getenv("DPL_CPU");
    const bool given = wanted && wanted[0];
    char possible[64] = "";
    size_t used = 0;
    for (unsigned i = 0; i <= (unsigned)best; i++) {
        if (given ? !strcmp(wanted, level_names[i]) : i == (unsigned)best) {
            *level_out = (dpl_cpu_level)i;
            return DPL_OK;
        }
        used += (size_t)snprintf(possible + used, sizeof possible - used, "%s%s", i ? ", " : "",
                                 level_names[i]);
    }
    return dpl_fail(DPL_EINVAL, "DPL_CPU=%s: this machine can do %s", wanted, possible);
}
