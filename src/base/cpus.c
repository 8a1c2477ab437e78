/*
 * cpus.c - how many processors this process may really use: the affinity mask, cut to the quota of
 * its control groups (both versions). Asked when a pool opens without a given number of threads.
 *
 * A quota is rounded down: threads that wait for each other lose more by being throttled together
 * than they gain by a fraction of a processor.
 */
#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/base.h"

static int cpus_in_mask(void) {
    // The mask of a machine with more than 1024 processors does not fit cpu_set_t.
    for (int n_max = 1024; n_max <= 1 << 20; n_max *= 2) {
        cpu_set_t *mask = CPU_ALLOC((size_t)n_max);
        if (!mask) break;
        const size_t bytes = CPU_ALLOC_SIZE((size_t)n_max);
        const int rc = sched_getaffinity(0, bytes, mask);
        const bool too_small = rc < 0 && errno == EINVAL;
        const int n = rc < 0 ? 0 : CPU_COUNT_S(bytes, mask);
        CPU_FREE(mask);
        if (!too_small) return n;
    }
    return 0;
}

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
    long long v[2] = {0}, period[2] = {0};
    if (v2) { // "max 100000" has no quota and does not scan.
        if (read_numbers(folder, "cpu.max", v) < 2) return cpus;
    } else {
        if (read_numbers(folder, "cpu.cfs_quota_us", v) < 1) return cpus;
        if (read_numbers(folder, "cpu.cfs_period_us", period) < 1) return cpus;
        v[1] = period[0];
    }
    if (v[0] <= 0 || v[1] <= 0) return cpus;
    return (int)DPL_MIN((long long)cpus, DPL_MAX(v[0] / v[1], 1));
}

int dpl_cpus_quota(const char *proc_cgroup, const char *root, int cpus) {
    FILE *f = fopen(proc_cgroup, "re");
    if (!f) return cpus;
    char line[PATH_MAX / 2], list[PATH_MAX / 2], folder[PATH_MAX / 2];
    while (fgets(line, sizeof line, f)) {
        // Lines are "id:controllers:/path"; version 2 has id 0 and no controllers.
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':');
        char *group = controllers ? strchr(++controllers, ':') : NULL;
        if (!group) continue;
        *group++ = '\0';
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
    return dpl_cpus_quota("/proc/self/cgroup", "/sys/fs/cgroup", DPL_MAX(cpus_in_mask(), 1));
}
