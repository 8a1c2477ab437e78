// launch.c - finding out whether an MPI launcher started this process, and loading the module of
// that MPI. A launcher without its module is an error: its ranks would be lone processes that all
// train in one run directory.
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "comm/module.h"

// Environment variables that a launcher sets, and the MPI whose processes it starts.
static const struct {
    const char *variable, *mpi;
} launchers[] = {
    {"OMPI_COMM_WORLD_SIZE", "openmpi"}, // mpirun of Open MPI
    {"PMIX_RANK", "openmpi"},            // srun --mpi=pmix
    {"PMI_RANK", "mpich"},               // mpiexec of MPICH, srun --mpi=pmi2
};

const char *dpl_comm_launcher(void) {
    const char *forced = getenv("DPL_MPI");
    if (forced && *forced) return forced;
    for (size_t i = 0; i < DPL_COUNT(launchers); i++)
        if (getenv(launchers[i].variable)) return launchers[i].mpi;
    return NULL;
}

static dpl_status check_slurm(void) {
    const char *n = getenv("SLURM_STEP_NUM_TASKS");
    DPL_CHECK(!n || atoi(n) <= 1,
              "srun started %s processes that cannot find each other, expected srun --mpi=pmix "
              "(Open MPI) or --mpi=pmi2 (MPICH)",
              n);
    return DPL_OK;
}

// Beside the program or the library, where an installation has it, or where the user says.
static void *load(const char *mpi, char *tried, size_t tried_bytes) {
    static const char *const below[] = {"", "dropless/", "../lib/dropless/"};
    Dl_info self;
    char path[PATH_MAX];
    void *module = NULL;
    const char *own = getenv("DPL_MODULE_DIR");
    snprintf(tried, tried_bytes, "no file");
    for (size_t i = 0; i < DPL_COUNT(below) + 2 && !module; i++) {
        if (i == 0 && !(own && *own)) continue;
        if (i == 0) {
            snprintf(path, sizeof path, "%s/dropless_%s.so", own, mpi);
        } else if (i <= DPL_COUNT(below)) {
            if (!dladdr((void *)(uintptr_t)&dpl_comm_launcher, &self) || !self.dli_fname) continue;
            const char *slash = strrchr(self.dli_fname, '/');
            const int n = slash ? (int)(slash - self.dli_fname) + 1 : 0;
            snprintf(path, sizeof path, "%.*s%sdropless_%s.so", n, self.dli_fname, below[i - 1],
                     mpi);
        } else {
            snprintf(path, sizeof path, DPL_INSTALL_MODULE_DIR "/dropless_%s.so", mpi);
        }
        // MPI's own plug-ins look for its symbols among the global ones.
        if (access(path, F_OK) == 0 && !(module = dlopen(path, RTLD_NOW | RTLD_GLOBAL)))
            snprintf(tried, tried_bytes, "%s", dlerror());
    }
    return module;
}

dpl_status dpl_comm_open_mpi(dpl_comm **comm_out) {
    static const dpl_comm_host host = {
        DPL_COMM_MODULE_VERSION, dpl_alloc,     dpl_free, dpl_now, dpl_fail,
        dpl_world_fail,          dpl_world_open};
    DPL_NEED(comm_out);
    const char *mpi = dpl_comm_launcher();
    if (!mpi) {
        DPL_TRY(check_slurm());
        return dpl_fail(DPL_EINVAL, "mpi: no launcher started this process, expected mpirun, "
                                    "mpiexec or srun (or DPL_MPI=openmpi or mpich)");
    }
    char tried[512];
    void *module = load(mpi, tried, sizeof tried);
    dpl_comm_module_fn open_module = NULL;
    if (module) *(void **)&open_module = dlsym(module, DPL_COMM_MODULE_ENTRY);
    DPL_EXPECT(open_module, DPL_ENOSUP,
               "a launcher of %s started this process, but the module dropless_%s.so cannot be "
               "loaded (%s): install the MPI's development files and build again, or name its "
               "folder in DPL_MODULE_DIR",
               mpi, mpi, tried);
    return open_module(&host, comm_out);
}
