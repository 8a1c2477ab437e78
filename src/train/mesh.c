// mesh.c - which rank does what: the axes data, fsdp and expert, the last one innermost.
//
// Every axis shards the batch. The ranks of the expert axis hold the experts between them, those of
// fsdp a piece each of every parameter that they have in common; along data all is repeated.
#include <stdio.h>

#include "train/train.h"

typedef struct axis {
    const char *name;
    int64_t ici, dcn;
} axis;

enum { DATA, FSDP, EXPERT }; // axes

// Sizes of the axes; one that is -1 takes what is left of the ranks.
static dpl_status resolve(const dpl_options *o, int n_ranks, int64_t sizes[3]) {
    const axis axes[3] = {{"data", o->ici_data_parallelism, o->dcn_data_parallelism},
                          {"fsdp", o->ici_fsdp_parallelism, o->dcn_fsdp_parallelism},
                          {"expert", o->ici_expert_parallelism, o->dcn_expert_parallelism}};
    int64_t known = 1;
    int open = -1;
    for (int i = 0; i < 3; i++) {
        const int64_t ici = axes[i].ici, dcn = axes[i].dcn;
        DPL_CHECK(ici != 0 && dcn != 0,
                  "ici_%s_parallelism or dcn_%s_parallelism is 0, expected -1 or 1 and more",
                  axes[i].name, axes[i].name);
        const bool fits = ici <= n_ranks && dcn <= n_ranks;
        sizes[i] = fits ? DPL_MAX(ici, 1) * DPL_MAX(dcn, 1) : DPL_MAX(ici, dcn);
        DPL_CHECK(sizes[i] <= n_ranks, "the mesh has %lld ranks along %s, there are %d in all",
                  (long long)sizes[i], axes[i].name, n_ranks);
        known *= sizes[i]; // at most 4096^3
        // By default fsdp takes the rest: another axis that is given it comes first.
        if (ici < 0 && (open < 0 || open == FSDP || i == EXPERT)) open = i;
    }
    DPL_CHECK(n_ranks % known == 0 && (open >= 0 || known == n_ranks),
              "%d ranks do not fill a mesh of data=%lld fsdp=%lld expert=%lld: the product of "
              "ici_*_parallelism and dcn_*_parallelism is to be the number of ranks",
              n_ranks, (long long)sizes[DATA], (long long)sizes[FSDP], (long long)sizes[EXPERT]);
    if (open >= 0) sizes[open] *= n_ranks / known;
    return DPL_OK;
}

dpl_status dpl_mesh_open(const dpl_options *o, dpl_comm *comm, dpl_mesh *mesh) {
    int64_t sizes[3] = {1, 1, 1};
    dpl_comm_set_timeout(comm, o->comm_timeout_s);
    DPL_TRY(dpl_comm_set_lane_threads(comm, (int)o->lane_threads));
    if (comm) DPL_TRY(dpl_comm_split(comm, 0, &mesh->world));
    else DPL_TRY(dpl_comm_open_self(&mesh->world));
    const int R = mesh->world->n_ranks;
    dpl_status status = resolve(o, R, sizes);
    if (status == DPL_OK && o->ranks != 1 && o->ranks != R)
        status = dpl_fail(DPL_EINVAL, "ranks=%lld, but the context is of %d (dpl_ctx_join)",
                          (long long)o->ranks, R);
    DPL_TRY(dpl_comm_agree(mesh->world, status));
    mesh->n_data = (int)sizes[DATA];
    mesh->n_fsdp = (int)sizes[FSDP];
    mesh->n_expert = (int)sizes[EXPERT];
    const int E = mesh->n_expert, group = mesh->world->rank / E, expert = mesh->world->rank % E;
    const int fsdp = group % mesh->n_fsdp, data = group / mesh->n_fsdp;
    dpl_model_ranks *m = &mesh->model;
    m->data = data;
    m->n_data = mesh->n_data;
    m->island = o->ep_shared_memory ? 0 : -1;
    DPL_TRY(dpl_comm_split(mesh->world, group, &m->experts));
    DPL_TRY(dpl_comm_split(mesh->world, data * E + expert, &m->fsdp));
    DPL_TRY(dpl_comm_split(mesh->world, fsdp, &m->dense));
    DPL_TRY(dpl_comm_split(mesh->world, fsdp * E + expert, &m->replicas));
    return dpl_comm_split(mesh->world, data, &mesh->whole);
}

dpl_status dpl_mesh_check(const dpl_mesh *mesh, size_t n_experts) {
    const size_t n = (size_t)mesh->n_expert;
    DPL_CHECK(n == 1 || (n_experts > 0 && n_experts % n == 0),
              "%zu experts over %zu ranks (ici_expert_parallelism), expected a number of experts "
              "that it divides",
              n_experts, n);
    return DPL_OK;
}

void dpl_mesh_close(dpl_mesh *mesh) {
    dpl_model_ranks *m = &mesh->model;
    dpl_comm **const all[] = {&m->experts,  &m->fsdp,     &m->dense,
                              &m->replicas, &mesh->whole, &mesh->world};
    for (size_t i = 0; i < DPL_COUNT(all); i++) dpl_comm_close(all[i]);
}

bool dpl_mesh_is_first(const dpl_mesh *mesh) {
    return mesh->world->rank == 0;
}

// Ranks that went different ways would miss each other in the middle of a run.
dpl_status dpl_mesh_compare(const dpl_mesh *mesh, const dpl_config *config,
                            const uint64_t more[4]) {
    const size_t R = (size_t)mesh->world->n_ranks;
    if (R == 1) return DPL_OK;
    uint64_t own[2] = {0, dpl_hash64(more, 4 * sizeof *more, dpl_build_hash())};
    for (size_t i = 0; i < DPL_OPT_N; i++) // threads do not change results
        if (i != DPL_OPT_threads && i != DPL_OPT_lane_threads)
            own[0] = dpl_hash64(config->text[i], strlen(config->text[i]), own[0]);
    uint64_t(*all)[2] = dpl_alloc_array(R, sizeof *all);
    dpl_status status = all ? DPL_OK : dpl_fail(DPL_ENOMEM, "no memory for %zu ranks", R);
    status = dpl_comm_agree_on(mesh->world, status, own, sizeof own, all);
    for (size_t r = 1; status == DPL_OK && r < R; r++)
        if (memcmp(all[r], all[0], sizeof *all) != 0)
            status = dpl_fail(DPL_EINVAL, "rank %zu: %s than rank 0", r,
                              all[r][0] != all[0][0]
                                  ? "another configuration"
                                  : "another build, CPU level (DPL_CPU) or other data");
    dpl_free(all);
    return status;
}

/* ---- what ranks add up ---- */
// squares (n params): of each parameter's gradients, of what this rank has. What is no expert is
// the same on all ranks along expert: the first one's counts.
dpl_status dpl_mesh_sum_squares(const dpl_mesh *mesh, const dpl_model *model, double *squares) {
    for (size_t i = 0; i < model->params.n && mesh->model.experts->rank > 0; i++)
        if (!dpl_param_is_expert(&model->params.list[i])) squares[i] = 0;
    return dpl_comm_sum_f64(mesh->whole, squares, model->params.n);
}
