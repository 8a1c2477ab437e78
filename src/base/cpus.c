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

static int cpus_in_mask(void)
{
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

static bool read_line(const char *path, char *line, int line_bytes)
{
    FILE *f = fopen(path, "re");
    if (!f) return false;
    const bool ok = fgets(line, line_bytes, f) != NULL;
    fclose(f);
    return ok;
}

static int cut(int cpus, long long quota, long long period)
{
    if (quota <= 0 || period <= 0) return cpus;
    const long long allowed = DPL_MAX(quota / period, 1);
    return allowed < cpus ? (int)allowed : cpus;
}

static int cut_by_group(const char *folder, bool v2, int cpus)
{
    char path[PATH_MAX], line[128];
    long long quota = 0, period = 0;
    snprintf(path, sizeof path, "%s/%s", folder, v2 ? "cpu.max" : "cpu.cfs_quota_us");
    if (!read_line(path, line, sizeof line)) return cpus;
    if (v2) // "max 100000" has no quota and does not scan.
        return sscanf(line, "%lld %lld", &quota, &period) == 2 ? cut(cpus, quota, period) : cpus;
    quota = atoll(line);
    snprintf(path, sizeof path, "%s/cpu.cfs_period_us", folder);
    if (!read_line(path, line, sizeof line)) return cpus;
    return cut(cpus, quota, atoll(line));
}

// The quotas of all groups from `group` up to the root hold at once. A container may show paths
// of its host that do not exist inside; then only the root answers.
static int cut_by_groups(const char *root, const char *group, bool v2, int cpus)
{
    char folder[PATH_MAX / 2];
    const size_t root_chars = strlen(root);
    const int n = snprintf(folder, sizeof folder, "%s%s", root, group);
    if (n < 0 || (size_t)n >= sizeof folder) return cpus;
    for (;;) {
        cpus = cut_by_group(folder, v2, cpus);
        char *slash = strrchr(folder + root_chars, '/');
        if (!slash) return cpus;
        *slash = '\0';
    }
}

int dpl_cpus_quota(const char *proc_cgroup, const char *root, int cpus)
{
    FILE *f = fopen(proc_cgroup, "re");
    if (!f) return cpus;
    char line[PATH_MAX / 2], v1_root[PATH_MAX / 4];
    while (fgets(line, sizeof line, f)) {
        // Lines are "id:controllers:/path"; version 2 has id 0 and no controllers.
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':');
        char *group = controllers ? strchr(++controllers, ':') : NULL;
        if (!group) continue;
        *group++ = '\0';
        if (!controllers[0]) {
            cpus = cut_by_groups(root, group, true, cpus);
        } else if (!strncmp(controllers, "cpu,", 4) || strstr(controllers, ",cpu,") ||
                   !strcmp(controllers, "cpu") || !strcmp(controllers, "cpuacct,cpu")) {
            snprintf(v1_root, sizeof v1_root, "%s/cpu", root);
            cpus = cut_by_groups(v1_root, group, false, cpus);
        }
    }
    fclose(f);
    return cpus;
}

int dpl_cpus_allowed(void)
{
    return dpl_cpus_quota("/proc/self/cgroup", "/sys/fs/cgroup", DPL_MAX(cpus_in_mask(), 1));
}
