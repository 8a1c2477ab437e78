// trainer.c - opening a run: options, model, data, optimizer.
//
// Three places can give the weights. A checkpoint of the run itself comes first, so that the same
// command goes on where it was interrupted; then load_full_state_path or load_parameters_path; else
// the initial values of the seed.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <unistd.h>

#include "train/train.h"

typedef struct origin {
    char dir[PATH_MAX]; // "": initial values
    bool full, own;     // a checkpoint with everything, else weights only; of this run
} origin;

static dpl_status resolve_run(dpl_trainer *t) {
    if (!t->o->base_output_directory[0])
        DPL_TRY(dpl_config_put(t->config, "base_output_directory", "runs"));
    if (!t->o->run_name[0]) DPL_TRY(dpl_config_put(t->config, "run_name", "run"));
    DPL_TRY(dpl_options_check(t->o));
    return dpl_path_join(t->o->base_output_directory, t->o->run_name, t->run_dir);
}

// Two processes in one run directory would each remove what the other is writing. The lock goes
// with the process, however that ends; a file system without locks is used without.
dpl_status dpl_trainer_lock(dpl_trainer *t) {
    char path[PATH_MAX];
    if (t->lock_fd >= 0) return DPL_OK;
    DPL_TRY(dpl_path_join(t->run_dir, ".lock", path));
    const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (fd < 0) return errno == ENOENT ? DPL_OK : dpl_fail(DPL_EIO, "cannot open %s: %m", path);
    if (flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        close(fd);
        return dpl_fail(DPL_EIO, "%s: another process is training in it", t->run_dir);
    }
    t->lock_fd = fd;
    return DPL_OK;
}

static dpl_status find_origin(const dpl_trainer *t, origin *from) {
    *from = (origin){0};
    if (t->o->enable_checkpointing) DPL_TRY(dpl_checkpoint_newest(t->run_dir, true, from->dir));
    from->own = from->full = from->dir[0] != '\0';
    if (from->own) return DPL_OK;
    from->full = t->o->load_full_state_path[0] != '\0';
    const char *path = from->full ? t->o->load_full_state_path : t->o->load_parameters_path;
    return path[0] ? dpl_checkpoint_resolve(path, from->dir) : DPL_OK;
}

// The first rank looks into the folders: it removes what a killed run has left there.
static dpl_status agree_on_origin(dpl_trainer *t, origin *from) {
    const size_t R = (size_t)t->mesh.world->n_ranks;
    origin *all = dpl_alloc_array(R, sizeof *all);
    dpl_status status = all ? DPL_OK : dpl_fail(DPL_ENOMEM, "no memory for %zu ranks", R);
    *from = (origin){0};
    if (status == DPL_OK && dpl_mesh_is_first(&t->mesh)) {
        status = dpl_trainer_lock(t); // later where there is no such folder yet
        if (status == DPL_OK) status = find_origin(t, from);
    }
    status = dpl_comm_agree_on(t->mesh.world, status, from, sizeof *from, all);
    if (status == DPL_OK) *from = all[0];
    dpl_free(all);
    return status;
}

static dpl_status open_model(dpl_trainer *t, const origin *from) {
    dpl_model_config sizes;
    if (from->dir[0]) DPL_TRY(dpl_config_adopt(t->config, from->dir, &sizes));
    else DPL_TRY(dpl_config_model(t->config, &sizes));
    DPL_TRY(dpl_mesh_check(&t->mesh, sizes.n_experts));
    DPL_TRY(dpl_ctx_set_precision(t->ctx, t->o->matmul_precision));
    DPL_TRY(dpl_model_create_spread(t->ctx, &t->mesh.model, &sizes, dpl_options_dtype(t->o),
                                    &t->model));
    DPL_TRY(dpl_options_quantize(t->o, t->model));
    t->model->ranks.batch = t->mesh.world;
    t->model->ranks.n_chunks = (size_t)t->o->ep_chunks;
    t->model->ranks.reduces = t->o->ep_combine_reduce;
    DPL_TRY(dpl_model_begin_training(t->model));
    if (dpl_mesh_is_first(&t->mesh)) dpl_options_warn(t->o, &sizes);
    if (!from->dir[0]) return dpl_options_init(t->o, t->model);
    if (!from->full) return dpl_model_load(t->model, from->dir);
    return DPL_OK; // everything else is loaded when there is an optimizer
}

static dpl_status open_batches(dpl_trainer *t) {
    const size_t B = (size_t)t->o->per_device_batch_size, S = (size_t)t->o->max_target_length;
    const size_t n_rows = B * (size_t)t->o->gradient_accumulation_steps;
    const double own = t->o->eval_per_device_batch_size;
    const size_t longest = t->model->config.max_positions;
    DPL_CHECK(S <= longest, "max_target_length %zu is longer than max_position_embeddings %zu", S,
              longest);
    DPL_TRY(dpl_model_check_memory(t->model, B, S, true));
    DPL_TRY(dpl_tokens_alloc(n_rows, S, &t->batch));
    DPL_TRY(dpl_tokens_alloc(B, S, &t->micro));
    DPL_TRY(dpl_tokens_alloc(own > 0 ? (size_t)own : B, S, &t->eval));
    DPL_TRY(dpl_data_open(t->o, n_rows * (size_t)t->mesh.world->n_ranks, t->model->config.vocab,
                          &t->data));
    DPL_CHECK(t->o->eval_interval <= 0 || dpl_data_samples(&t->data, true) > 0,
              "eval_interval needs data: eval_dataset_path and eval_split_fraction give none");
    t->step_flops = (double)(n_rows / B) * dpl_model_flops(&t->model->config, B, S);
    return DPL_OK;
}

static void set_lengths(dpl_trainer *t) {
    const dpl_options *o = t->o;
    const int64_t scheduled = o->learning_rate_schedule_steps;
    t->n_steps = o->steps >= 0 ? o->steps : scheduled;
    t->schedule_length = scheduled > 0 ? scheduled : t->n_steps;
    if (o->num_epoch == 0) return;
    const double samples = (double)dpl_data_samples(&t->data, false) * (double)o->num_epoch;
    const double n_rows = (double)t->batch.n_batch * (double)t->mesh.world->n_ranks;
    const double most = DPL_MAX(1.0, samples / n_rows);
    if (most < (double)t->n_steps) t->n_steps = (int64_t)most;
}

void dpl_trainer_say_alive(void *world) {
    dpl_comm_alive(world);
}

static dpl_status open_parts(dpl_trainer *t) {
    origin from;
    t->o = &t->config->o;
    DPL_TRY(resolve_run(t));
    DPL_TRY(dpl_mesh_open(t->o, t->ctx->comm, &t->mesh));
    dpl_busy_hook(dpl_trainer_say_alive, t->mesh.world);
    DPL_TRY(dpl_comm_neighbours(t->mesh.world, &t->ctx->n_neighbours));
    DPL_TRY(agree_on_origin(t, &from));
    DPL_TRY(open_model(t, &from));
    DPL_TRY(open_batches(t));
    const uint64_t more[4] = {dpl_data_samples(&t->data, false), dpl_data_samples(&t->data, true),
                              t->ctx->level, t->model->config.n_layers};
    DPL_TRY(dpl_mesh_compare(&t->mesh, t->config, more));
    DPL_TRY(dpl_optimizer_open(t->o, t->model, &t->optimizer));
    set_lengths(t);
    t->rule = dpl_options_loss(t->o);
    if (from.full) DPL_TRY(dpl_checkpoint_load(t, from.dir));
    if (from.own) t->saved = t->step - 1;
    return DPL_OK;
}

dpl_status dpl_trainer_open(dpl_ctx *ctx, const dpl_config *config, dpl_trainer **trainer_out) {
    DPL_NEED(ctx && config && trainer_out);
    dpl_trainer *t = dpl_alloc(sizeof *t);
    dpl_status status = DPL_OK;
    if (!t) status = dpl_fail(DPL_ENOMEM, "no memory for a trainer");
    if (t) {
        t->ctx = ctx;
        t->saved = t->lock_fd = -1;
        status = dpl_config_clone(config, &t->config);
    }
    if (status == DPL_OK) status = open_parts(t);
    dpl_busy_hook(NULL, NULL);
    // The others may wait for this rank: they end with its message.
    dpl_comm_tell(ctx->comm, status);
    if (status != DPL_OK) dpl_trainer_close(&t);
    if (status == DPL_OK) *trainer_out = t;
    return status;
}

void dpl_trainer_close(dpl_trainer **trainer) {
    if (!trainer || !*trainer) return;
    dpl_trainer *t = *trainer;
    dpl_optimizer_close(&t->optimizer);
    dpl_data_close(&t->data);
    dpl_model_close(&t->model);
    dpl_tokens_free(&t->batch);
    dpl_tokens_free(&t->micro);
    dpl_tokens_free(&t->eval);
    dpl_config_close(&t->config);
    dpl_mesh_close(&t->mesh);
    if (t->lock_fd >= 0) close(t->lock_fd);
    dpl_free(t);
    *trainer = NULL;
}

int64_t dpl_trainer_next_step(const dpl_trainer *trainer) {
    return trainer ? trainer->step : 0;
}

const char *dpl_trainer_run_dir(const dpl_trainer *trainer) {
    return trainer ? trainer->run_dir : "";
}

void dpl_trainer_stop(dpl_trainer *trainer) {
    if (trainer) atomic_store(&trainer->stop, true);
}
