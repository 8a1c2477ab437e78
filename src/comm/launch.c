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
    // In this order: what a launcher inside of an allocation sets comes before what srun has set.
    {"OMPI_COMM_WORLD_SIZE", "openmpi"}, // mpirun of Open MPI
    {"PMI_RANK", "mpich"},               // mpiexec of MPICH, srun --mpi=pmi2
    {"PMIX_RANK", "openmpi"},            // srun --mpi=pmix
};

// srun starts processes without any MPI, too: each would take itself for all there is.
static bool is_lone_step(void) {
    const char *n = getenv("SLURM_STEP_NUM_TASKS");
    return n && atoi(n) > 1;
}

const char *dpl_comm_launcher(void) {
    const char *forced = getenv("DPL_MPI");
    if (forced && *forced) return forced;
    for (size_t i = 0; i < DPL_COUNT(launchers); i++)
        if (getenv(launchers[i].variable)) return launchers[i].mpi;
    return is_lone_step() ? "srun" : NULL;
}

// The folder of the file that this is in, with a slash at its end; of a program that was found by
// PATH the system knows it.
static void own_folder(char path[PATH_MAX]) {
    Dl_info self = {0};
    path[0] = '\0';
    if (dladdr((void *)(uintptr_t)&dpl_comm_launcher, &self) && self.dli_fname &&
        strchr(self.dli_fname, '/')) {
        snprintf(path, PATH_MAX, "%s", self.dli_fname);
    } else {
        const ssize_t n = readlink("/proc/self/exe", path, PATH_MAX - 1);
        path[n > 0 ? n : 0] = '\0';
    }
    char *slash = strrchr(path, '/');
    if (slash) slash[1] = '\0';
}

// Beside the program or the library, where an installation has it, or where the user says.
static void *load(const char *mpi, char *tried, size_t tried_bytes) {
    char own[PATH_MAX], path[PATH_MAX + 64];
    own_folder(own);
    const char *given = getenv("DPL_MODULE_DIR");
    const struct {
        const char *folder, *below;
    } places[] = {{given && *given ? given : own, "/"},
                  {own, ""},
                  {own, "dropless/"},
                  {own, "../lib/dropless/"},
                  {DPL_INSTALL_MODULE_DIR, "/"}};
    void *module = NULL;
    snprintf(tried, tried_bytes, "no file");
    for (size_t i = 0; i < DPL_COUNT(places) && !module; i++) {
        if (!places[i].folder[0]) continue;
        snprintf(path, sizeof path, "%s%sdropless_%s.so", places[i].folder, places[i].below, mpi);
        if (access(path, F_OK) != 0) continue;
        // MPI's own plug-ins look for its symbols among the global ones.
        module = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
        if (!module && !strcmp(tried, "no file")) snprintf(tried, tried_bytes, "%s", dlerror());
    }
    return module;
}

// A launcher that the module does not know leaves each of its processes alone.
static dpl_status check_size(const dpl_comm *comm, const char *mpi) {
    const char *variable = strcmp(mpi, "mpich") ? "OMPI_COMM_WORLD_SIZE" : "PMI_SIZE";
    const char *size = getenv(variable);
    DPL_EXPECT(!size || atoi(size) == comm->n_ranks, DPL_ECOMM,
               "the launcher says %s=%s, but %s found %d ranks: set DPL_MPI to its MPI", variable,
               size, mpi, comm->n_ranks);
    return DPL_OK;
}

dpl_status dpl_comm_open_mpi(dpl_comm **comm_out) {
    static const dpl_comm_host host = {
        DPL_COMM_MODULE_VERSION, dpl_alloc,     dpl_free, dpl_now, dpl_fail,
        dpl_world_fail,          dpl_world_open};
    DPL_NEED(comm_out);
    const char *mpi = dpl_comm_launcher();
    DPL_CHECK(mpi, "mpi: no launcher started this process, expected mpirun, mpiexec or srun (or "
                   "DPL_MPI=openmpi or mpich)");
    DPL_CHECK(strcmp(mpi, "srun") != 0,
              "srun started %s processes that cannot find each other, expected srun --mpi=pmix "
              "(Open MPI) or --mpi=pmi2 (MPICH)",
              getenv("SLURM_STEP_NUM_TASKS"));
    char tried[512];
    void *module = load(mpi, tried, sizeof tried);
    dpl_comm_module_fn open_module = NULL;
    if (module) *(void **)&open_module = dlsym(module, DPL_COMM_MODULE_ENTRY);
    DPL_EXPECT(open_module, DPL_ENOSUP,
               "a launcher of %s started this process, but the module dropless_%s.so cannot be "
               "loaded (%s): install the MPI's development files and build again, or name its "
               "folder in DPL_MODULE_DIR",
               mpi, mpi, tried);
    DPL_TRY(open_module(&host, comm_out));
    const dpl_status status = check_size(*comm_out, mpi);
    if (status != DPL_OK) dpl_comm_close(comm_out);
    return status;
}
