// mesh.c - which rank does what: the axes data, fsdp and expert, the last one innermost.
//
// Every axis shards the batch. The ranks of the expert axis hold the experts between them; all else
// is on every rank.
#include <stdio.h>

#include "train/train.h"

typedef struct axis {
    const char *name;
    int64_t ici, dcn;
} axis;

// Sizes of the axes; one that is -1 takes what is left of the ranks.
static dpl_status resolve(const dpl_options *o, int n_ranks, int64_t sizes[3]) {
    const axis axes[3] = {{"data", o->ici_data_parallelism, o->dcn_data_parallelism},
                          {"fsdp", o->ici_fsdp_parallelism, o->dcn_fsdp_parallelism},
                          {"expert", o->ici_expert_parallelism, o->dcn_expert_parallelism}};
    int64_t known = 1;
    int open = -1;
    for (int i = 0; i < 3; i++) {
        DPL_CHECK(axes[i].ici != 0 && axes[i].dcn != 0,
                  "ici_%s_parallelism or dcn_%s_parallelism is 0, expected -1 or 1 and more",
                  axes[i].name, axes[i].name);
        sizes[i] = DPL_MAX(axes[i].ici, 1) * DPL_MAX(axes[i].dcn, 1);
        DPL_CHECK(sizes[i] <= n_ranks, "the mesh has %lld ranks along %s, there are %d in all",
                  (long long)sizes[i], axes[i].name, n_ranks);
        known *= sizes[i];
        if (axes[i].ici < 0) open = i;
    }
    DPL_CHECK(n_ranks % known == 0 && (open >= 0 || known == n_ranks),
              "%d ranks do not fill a mesh of data=%lld fsdp=%lld expert=%lld: the product of "
              "ici_*_parallelism and dcn_*_parallelism is to be the number of ranks",
              n_ranks, (long long)sizes[0], (long long)sizes[1], (long long)sizes[2]);
    if (open >= 0) sizes[open] *= n_ranks / known;
    DPL_EXPECT(sizes[1] == 1, DPL_ENOSUP,
               "sharding over fsdp=%lld ranks, expected 1: set ici_expert_parallelism=%d or "
               "ici_data_parallelism=%d",
               (long long)sizes[1], n_ranks, n_ranks);
    return DPL_OK;
}

dpl_status dpl_mesh_open(const dpl_options *o, dpl_comm *comm, dpl_mesh *mesh) {
    int64_t sizes[3] = {1, 1, 1};
    if (comm) DPL_TRY(dpl_comm_split(comm, 0, &mesh->world));
    else DPL_TRY(dpl_comm_open_self(&mesh->world));
    DPL_TRY(dpl_comm_agree(mesh->world, resolve(o, mesh->world->n_ranks, sizes)));
    mesh->n_data = (int)sizes[0];
    mesh->n_expert = (int)sizes[2];
    dpl_comm_set_timeout(mesh->world, o->comm_timeout_s);
    const int rank = mesh->world->rank;
    DPL_TRY(dpl_comm_split(mesh->world, rank / mesh->n_expert, &mesh->experts));
    return dpl_comm_split(mesh->world, rank % mesh->n_expert, &mesh->replicas);
}

dpl_status dpl_mesh_check(const dpl_mesh *mesh, const dpl_options *o, size_t n_experts) {
    const size_t n = (size_t)mesh->n_expert;
    DPL_CHECK(n == 1 || (n_experts > 0 && n_experts % n == 0),
              "%zu experts over %zu ranks (ici_expert_parallelism), expected a number of experts "
              "that it divides",
              n_experts, n);
    DPL_EXPECT(mesh->world->n_ranks == 1 || !dpl_is(o->load_balance_scope, "batch") ||
                   o->load_balance_loss_weight == 0,
               DPL_ENOSUP, "load_balance_scope=batch over %d ranks, expected sequence",
               mesh->world->n_ranks);
    return DPL_OK;
}

void dpl_mesh_close(dpl_mesh *mesh) {
    dpl_comm_close(&mesh->replicas);
    dpl_comm_close(&mesh->experts);
    dpl_comm_close(&mesh->world);
}

bool dpl_mesh_is_first(const dpl_mesh *mesh) {
    return mesh->world->rank == 0;
}

/* ---- what ranks add up ---- */
// An expert's gradient is that of the tokens of all ranks along its expert axis already.
dpl_status dpl_mesh_sum_gradients(const dpl_mesh *mesh, dpl_model *model) {
    if (mesh->world->n_ranks == 1) return DPL_OK;
    dpl_ctx_wait(model->ctx);
    for (size_t i = 0; i < model->params.n; i++) {
        const dpl_param *param = &model->params.list[i];
        dpl_comm *comm = dpl_param_is_expert(param) ? mesh->replicas : mesh->world;
        DPL_TRY(dpl_comm_sum_f32(comm, dpl_model_grad(model, param), param->elems));
    }
    return DPL_OK;
}

// squares (n params): of each parameter's gradients, of experts those of this rank.
dpl_status dpl_mesh_sum_squares(const dpl_mesh *mesh, const dpl_model *model, double *squares) {
    if (mesh->experts->n_ranks == 1) return DPL_OK;
    double *part = dpl_alloc_array(model->params.n, sizeof *part);
    dpl_status status = DPL_OK;
    if (!part) status = dpl_fail(DPL_ENOMEM, "no memory for a norm");
    status = dpl_comm_agree(mesh->experts, status);
    for (size_t i = 0; status == DPL_OK && i < model->params.n; i++)
        if (dpl_param_is_expert(&model->params.list[i])) part[i] = squares[i];
    if (status == DPL_OK) status = dpl_comm_sum_f64(mesh->experts, part, model->params.n);
    for (size_t i = 0; status == DPL_OK && i < model->params.n; i++)
        if (dpl_param_is_expert(&model->params.list[i])) squares[i] = part[i];
    dpl_free(part);
    return status;
}
