// cpus.c - what this process may really use: how many processors (the affinity mask, cut to the
// quota of its control groups, both versions), and which instruction-set level (granted only when
// the processor and the system have all of its features). Asked when a pool or a context opens.
//
// A quota is rounded down: threads that wait for each other lose more by being throttled together
// than they gain by a fraction of a processor.
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "base/base.h"

/* ---- how many ------------------------------------------------------------------------------- */
// The numbers at the start of a file's first line: how many of two.
static int read_numbers(const char *folder, const char *name, long long out[2]) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "re");
    if (!f) return 0;
    const int n = fscanf(f, "%lld %lld", &out[0], &out[1]);
    fclose(f);
    return n;
}

static int cut_by_group(const char *folder, bool v2, int cpus) {
    long long v[3] = {0}; // quota, period; "max 100000" has no quota and does not scan.
    const bool found = v2 ? read_numbers(folder, "cpu.max", v) == 2
                          : read_numbers(folder, "cpu.cfs_quota_us", v) > 0 &&
                                read_numbers(folder, "cpu.cfs_period_us", v + 1) > 0;
    if (!found || v[0] <= 0 || v[1] <= 0) return cpus;
    return (int)DPL_MIN((long long)cpus, DPL_MAX(v[0] / v[1], 1));
}

int dpl_cpus_quota(const char *proc_cgroup, const char *root, int cpus) {
    FILE *f = fopen(proc_cgroup, "re");
    if (!f) return cpus;
    char line[PATH_MAX / 2], list[PATH_MAX / 2], folder[PATH_MAX / 2];
    while (fgets(line, sizeof line, f)) {
        // Lines are "id:controllers:/path"; version 2 has id 0 and no controllers.
        char *rest = line;
        strsep(&rest, ":");
        const char *controllers = strsep(&rest, ":"), *group = strsep(&rest, "\n");
        if (!group) continue;
        const bool v2 = !controllers[0];
        snprintf(list, sizeof list, ",%s,", controllers);
        const int n = snprintf(folder, sizeof folder, "%s%s%s", root, v2 ? "" : "/cpu", group);
        if ((!v2 && !strstr(list, ",cpu,")) || n < 0 || (size_t)n >= sizeof folder) continue;
        // The quotas of all groups up to the root hold at once. A container may show paths of its
        // host that do not exist inside; then only the root answers.
        const size_t root_chars = (size_t)n - strlen(group);
        for (char *slash = folder; slash; slash = strrchr(folder + root_chars, '/')) {
            if (slash != folder) *slash = '\0';
            cpus = cut_by_group(folder, v2, cpus);
        }
    }
    fclose(f);
    return cpus;
}

int dpl_cpus_allowed(void) {
    cpu_set_t mask[64]; // 65,536 processors; machines exist that have more than fit one set.
    const int rc = sched_getaffinity(0, sizeof mask, mask);
    const int n = rc < 0 ? 1 : CPU_COUNT_S(sizeof mask, mask);
    return dpl_cpus_quota("/proc/self/cgroup", "/sys/fs/cgroup", n);
}

/* ---- which level ---------------------------------------------------------------------------- */
static const char *const level_names[DPL_CPU_N] = {"ref",         "avx2", "avx512",
                                                   "avx512_bf16", "amx",  "tiles"};

const char *dpl_cpu_level_name(dpl_cpu_level level) {
    return (unsigned)level < DPL_CPU_N ? level_names[level] : "unknown";
}

#if defined(__x86_64__)
// Linux gives the tile registers to a process that asks, unless a signal stack is too small for
// them. Asking again is free.
static bool amx_granted(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const unsigned bf16 = 1u << 22, tile = 1u << 24;
    const long request = 0x1023, tile_data = 18; // ARCH_REQ_XCOMP_PERM of newer headers
    return (d & bf16) && (d & tile) && syscall(SYS_arch_prctl, request, tile_data) == 0;
}

dpl_cpu_level dpl_cpu_level_machine(void) {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return DPL_CPU_REF;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return DPL_CPU_AVX2;
    if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vnni"))
        return DPL_CPU_AVX512;
    return amx_granted() ? DPL_CPU_AMX : DPL_CPU_AVX512_BF16;
}
#else
dpl_cpu_level dpl_cpu_level_machine(void) {
    return DPL_CPU_REF;
}
#endif

dpl_status dpl_cpu_level_detect(dpl_cpu_level *level_out) {
    const unsigned best = dpl_cpu_level_machine();
    const char *wanted = getenv("DPL_CPU");
    unsigned level = best;
    if (wanted && wanted[0])
        for (level = 0; level < DPL_CPU_N && strcmp(wanted, level_names[level]) != 0; level++)
            continue;
    DPL_CHECK(level <= best || (level == DPL_CPU_TILES && best >= DPL_CPU_AVX2),
              "DPL_CPU=%s, expected ref, avx2, avx512, avx512_bf16 or amx, at most this machine's "
              "%s, or tiles where there is avx2",
              wanted, level_names[best]);
    *level_out = (dpl_cpu_level)level;
    return DPL_OK;
}
