/*
 * test_mesh.c - training over a mesh of ranks: losses, counts, norms and weights are those of one
 * rank, auxiliary losses over the batch too; checkpoints go from any mesh to any other, and what
 * one rank finds ends all.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "ranks.h"
#include "scratch.h"
#include "trainkit.h"

enum { STEPS = 5, BATCH = 24, R_MAX = 6 };

typedef struct shape {
    int n_data, n_fsdp, n_expert;
    const char *extra; // assignments, with a space between them
} shape;

static int n_ranks_of(shape s) {
    return s.n_data * s.n_fsdp * s.n_expert;
}

typedef struct result {
    dpl_step_metrics steps[STEPS];
    dpl_eval_metrics eval;
    dpl_status status;
    char error[512];
} result;

typedef struct job {
    shape shape;
    const char *run_name;
    int first, end;  // steps
    result *results; // (R)
} job;

static dpl_config *mesh_config(const job *j, int n_ranks) {
    dpl_config *config = run_config("mtp_num_layers=1", "load_balance_loss_weight=0.01",
                                    "router_z_loss_weight=0.001", "eval_split_fraction=0.2",
                                    "dataset_type=text", "max_target_length=24", NULL);
    run_set(config, "dataset_path=%s", DPL_SOURCE_DIR "/data/shakespeare.txt");
    run_set(config, "vocab_size=256");
    run_set(config, "eval_steps=4");
    run_set(config, "per_device_batch_size=%d", BATCH / 2 / n_ranks);
    run_set(config, "gradient_accumulation_steps=2");
    run_set(config, "ici_data_parallelism=%d", j->shape.n_data);
    run_set(config, "ici_fsdp_parallelism=%d", j->shape.n_fsdp);
    run_set(config, "ici_expert_parallelism=%d", j->shape.n_expert);
    run_set(config, "run_name=%s", j->run_name);
    if (j->shape.extra) run_set_all(config, j->shape.extra);
    return config;
}

static dpl_status run_steps_of(dpl_trainer *t, const job *j, result *r) {
    assert_int_equal(dpl_trainer_next_step(t), j->first);
    for (int step = j->first; step < j->end; step++) DPL_TRY(dpl_trainer_step(t, &r->steps[step]));
    DPL_TRY(dpl_trainer_evaluate(t, &r->eval));
    return dpl_trainer_save(t);
}

static void run_rank(dpl_comm *comm, void *arg) {
    const job *j = arg;
    result *r = &j->results[comm->rank];
    dpl_ctx *ctx = run_ctx(1 + comm->rank % 2);
    dpl_config *config = mesh_config(j, comm->n_ranks);
    dpl_trainer *t = NULL;
    check_ok(dpl_ctx_join(ctx, comm));
    r->status = dpl_trainer_open(ctx, config, &t);
    if (r->status == DPL_OK) r->status = run_steps_of(t, j, r);
    snprintf(r->error, sizeof r->error, "%s", r->status == DPL_OK ? "" : dpl_error_message());
    dpl_trainer_close(&t);
    dpl_config_close(&config);
    dpl_ctx_close(&ctx);
}

static void run_job(const job *j) {
    ranks_run("threads", n_ranks_of(j->shape), run_rank, (void *)(uintptr_t)j);
}

static bool close_to(double a, double b, double bound) {
    return fabs(a - b) <= bound * DPL_MAX(1, fabs(b));
}

static void check_same(const result *a, const result *b, int first, int end, const char *what) {
    for (int i = first; i < end; i++) {
        const dpl_step_metrics *x = &a->steps[i], *y = &b->steps[i];
        // Sums over tokens go in another order; in fp32 that is what the weights see.
        const double bound = i == 0 ? 1e-12 : 2e-5;
        if (!close_to(x->loss, y->loss, bound) || !close_to(x->lm_loss, y->lm_loss, bound) ||
            !close_to(x->mtp_loss, y->mtp_loss, bound) ||
            !close_to(x->moe_lb_loss, y->moe_lb_loss, bound) ||
            !close_to(x->router_z_loss, y->router_z_loss, bound) ||
            !close_to(x->raw_grad_norm, y->raw_grad_norm, 2e-5) ||
            x->total_weights != y->total_weights || x->learning_rate != y->learning_rate)
            fail_msg("%s, step %d: loss %.9g and %.9g, norm %.9g and %.9g", what, i, x->loss,
                     y->loss, x->raw_grad_norm, y->raw_grad_norm);
    }
    assert_true(a->steps[first].load_max_over_mean == b->steps[first].load_max_over_mean);
    assert_true(close_to(a->eval.loss, b->eval.loss, 2e-5));
    assert_int_equal(a->eval.n_tokens, b->eval.n_tokens);
}

static void compare_meshes(const shape *shapes, size_t n, const char *extra, int end) {
    static result results[20][R_MAX];
    scratch_open(NULL);
    for (size_t i = 0; i < n; i++) {
        char name[32];
        snprintf(name, sizeof name, "alike%zu", i);
        job j = {shapes[i], name, 0, end, results[i]};
        if (!j.shape.extra) j.shape.extra = extra;
        run_job(&j);
        for (int r = 0; r < n_ranks_of(shapes[i]); r++) {
            assert_string_equal(results[i][r].error, "");
            check_same(&results[i][r], &results[0][0], 0, end, name);
        }
    }
    scratch_close(NULL);
}

static void every_mesh_trains_alike(void **state) {
    (void)state;
    static const shape shapes[] = {{1, 1, 1, NULL},
                                   {1, 1, 2, NULL},
                                   {2, 1, 1, NULL},
                                   {3, 1, 1, NULL},
                                   {3, 1, 2, NULL},
                                   {1, 2, 1, NULL},
                                   {1, 4, 1, NULL},
                                   {2, 2, 1, NULL},
                                   {1, 2, 2, NULL},
                                   {1, 3, 2, NULL},
                                   {1, 4, 1, "ici_fsdp_parallelism=-1"},
                                   {1, 4, 1, "dcn_fsdp_parallelism=2 ici_fsdp_parallelism=2"},
                                   {1, 1, 2, "ep_chunks=3 ep_shared_memory=false lane_threads=1"},
                                   {3, 1, 2, "ep_chunks=2"},
                                   {3, 1, 2, "ep_shared_memory=false lane_threads=1"},
                                   {1, 3, 2, "ep_shared_memory=false lane_threads=1 ep_chunks=2"},
                                   {2, 2, 1, "lane_threads=1"},
                                   {2, 1, 1, "dcn_data_parallelism=1"}};
    compare_meshes(shapes, DPL_COUNT(shapes), NULL, STEPS);
}

// A tied embedding is looked up in fp32 and multiplied in bf16. Later steps are not made: a
// weight that is rounded the other way moves them by more than sums do.
static void bf16_copies_are_gathered(void **state) {
    (void)state;
    static const shape shapes[] = {
        {1, 1, 1, NULL}, {1, 2, 1, NULL}, {2, 1, 1, NULL}, {1, 3, 1, NULL}, {1, 2, 2, NULL}};
    compare_meshes(shapes, DPL_COUNT(shapes), "dtype=bfloat16 eval_steps=1", 1);
    compare_meshes(shapes, DPL_COUNT(shapes),
                   "dtype=bfloat16 eval_steps=1 logits_via_embedding=true", 1);
}

// The forward pass is that of one rank. Blocks down the columns have the rows of an expert in the
// order in which the ranks have them, so gradients differ by what MXFP8 rounds: 2^-4 of a number,
// which Adam's first step makes of full size where the sign is in doubt.
static void spread_experts(const char *format, double within) {
    static const shape shapes[] = {{1, 1, 1, NULL}, {1, 1, 2, NULL}, {1, 1, 4, NULL}};
    static result results[DPL_COUNT(shapes)][R_MAX];
    scratch_open(NULL);
    for (size_t i = 0; i < DPL_COUNT(shapes); i++) {
        char name[32], extra[80];
        snprintf(name, sizeof name, "%s_%zu", format, i);
        snprintf(extra, sizeof extra, "dtype=bfloat16 gmm_quantization=%s eval_steps=1", format);
        job j = {shapes[i], name, 0, 1, results[i]};
        j.shape.extra = extra;
        run_job(&j);
        assert_string_equal(results[i][0].error, "");
        const dpl_step_metrics *m = &results[i][0].steps[0], *one = &results[0][0].steps[0];
        assert_true(close_to(m->loss, one->loss, 1e-9));
        assert_true(m->load_max_over_mean == one->load_max_over_mean);
        assert_true(close_to(m->raw_grad_norm, one->raw_grad_norm, within));
        assert_true(close_to(results[i][0].eval.loss, results[0][0].eval.loss, within));
    }
    scratch_close(NULL);
}

static void quantized_experts_are_spread(void **state) {
    (void)state;
    spread_experts("mxfp8", 1e-3);
    spread_experts("nvfp4", 2e-2); // rounded by chance, which falls otherwise on each rank
}

// Rows are rounded on any mesh, before they are moved: so the forward pass is that of one rank.
static void mxfp8_rows_are_those_of_one_rank(void **state) {
    (void)state;
    static const char *const wire = "dtype=bfloat16 ep_wire=mxfp8 eval_steps=1 ep_chunks=2 "
                                    "ep_shared_memory=false lane_threads=1";
    const shape shapes[] = {{1, 1, 1, NULL}, {1, 1, 2, NULL}, {1, 1, 4, NULL},
                            {2, 1, 2, NULL}, {1, 1, 2, wire}, {1, 2, 2, NULL}};
    compare_meshes(shapes, DPL_COUNT(shapes), "dtype=bfloat16 ep_wire=mxfp8 eval_steps=1", 1);
}

// Lanes, chunks, messages and both groups of products, over ranks of experts and of data (151 of
// known-faults.md). Sums by host differ by a rounding, after which MXFP8 may round the other way.
static void on_any_mesh(const char *format, double within) {
    static const shape shapes[] = {{1, 1, 1, ""},
                                   {1, 1, 2, "ep_chunks=2 lane_threads=1 ep_shared_memory=false"},
                                   {1, 1, 4, "ep_chunks=3"},
                                   {2, 1, 1, ""},
                                   {1, 2, 1, ""},
                                   {1, 3, 1, "lane_threads=1"},
                                   {2, 2, 1, ""},
                                   {1, 2, 2, "ep_chunks=2"},
                                   {2, 1, 2, "ep_combine_reduce=true ep_shared_memory=false"}};
    static result results[DPL_COUNT(shapes)][R_MAX];
    scratch_open(NULL);
    for (size_t i = 0; i < DPL_COUNT(shapes); i++) {
        char name[32], extra[200];
        snprintf(name, sizeof name, "%s_%zu", format, i);
        snprintf(extra, sizeof extra, "dtype=bfloat16 gmm_quantization=%s quantization=%s %s",
                 format, format, shapes[i].extra);
        job j = {shapes[i], name, 0, 2, results[i]};
        j.shape.extra = extra;
        run_job(&j);
        assert_string_equal(results[i][0].error, "");
        const double forward = i + 1 < DPL_COUNT(shapes) ? 1e-12 : 1e-4; // the last sums by host
        for (int step = 0; step < 2; step++)
            assert_true(close_to(results[i][0].steps[step].loss, results[0][0].steps[step].loss,
                                 step ? within : forward));
    }
    scratch_close(NULL);
}

// What is rounded by chance does not follow from which chunk happens to arrive first.
static void chance_repeats_itself(void **state) {
    (void)state;
    static const char *const settings[] = {"", " ep_shared_memory=false lane_threads=1"};
    static result results[2 * DPL_COUNT(settings)][R_MAX];
    scratch_open(NULL);
    for (size_t i = 0; i < DPL_COUNT(results); i++) {
        char name[32], extra[200];
        snprintf(name, sizeof name, "again_%zu", i);
        snprintf(extra, sizeof extra,
                 "dtype=bfloat16 gmm_quantization=nvfp4 quantization=nvfp4 ep_chunks=4%s",
                 settings[i / 2]);
        job j = {{1, 1, 2, extra}, name, 0, STEPS, results[i]};
        run_job(&j);
        assert_string_equal(results[i][0].error, "");
        for (int step = 0; step < STEPS; step++) {
            const dpl_step_metrics *m = &results[i][0].steps[step];
            const dpl_step_metrics *first = &results[0][0].steps[step];
            assert_true(m->loss == first->loss && m->raw_grad_norm == first->raw_grad_norm);
        }
    }
    scratch_close(NULL);
}

static void quantized_on_any_mesh(void **state) {
    (void)state;
    on_any_mesh("mxfp8", 1e-2);
    on_any_mesh("nvfp4", 5e-2);
}

// Products leave the padding of an odd width alone: what stands there is no gradient.
static void odd_widths_train_alike(void **state) {
    (void)state;
    static const shape shapes[] = {
        {1, 1, 1, NULL}, {1, 2, 1, NULL}, {1, 1, 2, NULL}, {1, 2, 2, NULL}, {2, 2, 1, NULL}};
    compare_meshes(shapes, DPL_COUNT(shapes),
                   "q_lora_rank=13 kv_lora_rank=21 base_moe_mlp_dim=19 base_mlp_dim=97", STEPS);
}

// Where sequences are too short for a depth its gradients are zero, on whatever rank they are.
static void depths_that_do_not_fit_stay(void **state) {
    (void)state;
    static const shape shapes[] = {{1, 1, 1, NULL}, {1, 2, 1, NULL}, {2, 1, 2, NULL}};
    compare_meshes(shapes, DPL_COUNT(shapes), "mtp_num_layers=3 max_target_length=3", STEPS);
}

/* ---- losses over the batch of all ranks ---- */

enum { WIDE = 24, LENGTH = 16, ROUTERS = 3, ROUTER_ELEMS = 32 * 32 };

typedef struct wide_result {
    dpl_step_metrics steps[3];
    float routers[ROUTERS][ROUTER_ELEMS]; // their gradients after step 0,
    bool whole[ROUTERS];                  // if this rank has all of it
} wide_result;

typedef struct wide_job {
    shape shape;
    bool equal;           // routers of zeros
    wide_result *results; // (R)
} wide_job;

// Rows of two micro-batches: of four ranks one has padding alone, one no token with a loss.
static void write_wide_batch(const char *path) {
    int32_t planes[4][WIDE * LENGTH];
    for (int i = 0; i < WIDE * LENGTH; i++) {
        const int row = i / LENGTH, column = i % LENGTH;
        const bool padding = (row >= 6 && row < 12) || (row % 3 == 0 && column > row % 7 + 3);
        planes[0][i] = (int32_t)(dpl_rng_u64(5, 1, (uint64_t)i) % 64);
        planes[1][i] = (int32_t)(dpl_rng_u64(5, 2, (uint64_t)i) % 64);
        planes[2][i] = !padding;
        planes[3][i] = !padding && (row < 12 || row >= 18) && (row != 20 || column < 3);
    }
    run_write_batch(path, WIDE, LENGTH, planes[0], planes[1], planes[2], planes[3]);
}

static dpl_config *wide_config(const wide_job *j) {
    dpl_config *config = run_config("mtp_num_layers=1", "load_balance_loss_weight=1",
                                    "router_z_loss_weight=0.1", "load_balance_scope=batch",
                                    "dataset_type=safetensors", "enable_checkpointing=false",
                                    "gradient_accumulation_steps=2", "comm_timeout_s=60", NULL);
    run_set(config, "dataset_path=%s", scratch_path("wide.safetensors"));
    run_set(config, "max_target_length=%d", LENGTH);
    run_set(config, "per_device_batch_size=%d", WIDE / 2 / n_ranks_of(j->shape));
    run_set(config, "ici_data_parallelism=%d", j->shape.n_data);
    run_set(config, "ici_fsdp_parallelism=%d", j->shape.n_fsdp);
    run_set(config, "ici_expert_parallelism=%d", j->shape.n_expert);
    return config;
}

// What this rank has of a parameter becomes 0.
static void clear(dpl_model *m, int layer, dpl_param_id id) {
    size_t own;
    const size_t n = dpl_param_own(m, dpl_model_param(m, layer, id), &own);
    memset(m->params.master + own, 0, n * sizeof(float));
    dpl_model_changed(m);
}

// With a head of zeros the gradients of step 0 come from the auxiliary losses alone.
static dpl_trainer *open_wide(dpl_ctx *ctx, const wide_job *j, const dpl_config *config) {
    dpl_trainer *t = run_open(ctx, config);
    clear(t->model, -1, DPL_P_HEAD);
    for (int i = 0; i < ROUTERS && j->equal; i++) clear(t->model, i + 1, DPL_P_ROUTER);
    return t;
}

static void train_wide(dpl_comm *comm, void *arg) {
    const wide_job *j = arg;
    wide_result *r = &j->results[comm->rank];
    dpl_ctx *ctx = NULL;
    check_ok(dpl_ctx_create(1 + comm->rank % 2, comm->rank % 2, 0, &ctx)); // every other one defers
    dpl_config *config = wide_config(j);
    check_ok(dpl_ctx_join(ctx, comm));
    dpl_trainer *t = open_wide(ctx, j, config);
    for (int i = 0; i < 3; i++) {
        check_ok(dpl_trainer_step(t, &r->steps[i]));
        for (int k = 0; k < ROUTERS && i == 0; k++) {
            size_t own;
            const dpl_param *router = dpl_model_param(t->model, k + 1, DPL_P_ROUTER);
            r->whole[k] = dpl_param_own(t->model, router, &own) == ROUTER_ELEMS;
            if (r->whole[k])
                memcpy(r->routers[k], t->model->params.grad + own, sizeof r->routers[k]);
        }
    }
    dpl_trainer_close(&t);
    dpl_config_close(&config);
    dpl_ctx_close(&ctx);
}

static void check_wide(const wide_result *a, const wide_result *b) {
    for (int i = 0; i < 3; i++) {
        const dpl_step_metrics *x = &a->steps[i], *y = &b->steps[i];
        const double bound = i == 0 ? 1e-12 : 2e-5;
        assert_true(y->moe_lb_loss > 0.5 && y->router_z_loss > 0);
        assert_true(close_to(x->moe_lb_loss, y->moe_lb_loss, bound));
        assert_true(close_to(x->router_z_loss, y->router_z_loss, bound));
        assert_true(close_to(x->loss, y->loss, bound));
        assert_true(close_to(x->raw_grad_norm, y->raw_grad_norm, 2e-5));
    }
    for (int k = 0; k < ROUTERS; k++) {
        double top = 0, worst = 0;
        if (!a->whole[k]) continue; // the norm has it
        for (int e = 0; e < ROUTER_ELEMS; e++) {
            top = fmax(top, fabs((double)b->routers[k][e]));
            worst = fmax(worst, fabs((double)a->routers[k][e] - (double)b->routers[k][e]));
        }
        assert_true(top > 1e-3);
        if (worst > 1e-5 * top) fail_msg("router %d: %g of %g", k, worst, top);
    }
}

static void batch_losses_are_those_of_one_rank(void **state) {
    (void)state;
    static const shape shapes[] = {{1, 1, 1, NULL}, {2, 1, 1, NULL}, {1, 1, 2, NULL},
                                   {3, 1, 1, NULL}, {4, 1, 1, NULL}, {2, 1, 2, NULL},
                                   {1, 1, 4, NULL}, {3, 1, 2, NULL}, {1, 2, 1, NULL},
                                   {1, 4, 1, NULL}, {1, 2, 2, NULL}, {2, 2, 1, NULL}};
    static wide_result results[R_MAX], one;
    scratch_open(NULL);
    write_wide_batch(scratch_path("wide.safetensors"));
    for (int equal = 0; equal < 2; equal++)
        for (size_t i = 0; i < DPL_COUNT(shapes); i++) {
            const int R = n_ranks_of(shapes[i]);
            const wide_job j = {shapes[i], equal, results};
            ranks_run("threads", R, train_wide, (void *)(uintptr_t)&j);
            if (i == 0) one = results[0];
            for (int r = 0; r < R; r++) {
                if (!equal) check_wide(&results[r], &one);
                // Of equal scores the loss is its weight, once for all ranks.
                else assert_true(close_to(results[r].steps[0].moe_lb_loss, 1, 1e-6));
            }
        }
    scratch_close(NULL);
}

// What goes wrong on the ranks of one group of experts.
typedef struct fault {
    const char *at;      // the probe at which there is no memory any more, NULL: there is
    int n_before;        // so many times it goes well
    dpl_param_id broken; // a parameter of `layer` that is not a number; DPL_P_N: none
    int layer;
    bool no_step_memory;
    dpl_status status;
    const char *text;
} fault;

static const fault faults[] = {
    {NULL, 0, DPL_P_ROUTER, 1, false, DPL_ENUMERIC, "rank"},
    {NULL, 0, DPL_P_ROUTER, 3, false, DPL_ENUMERIC, "rank"},
    {NULL, 0, DPL_P_HEAD, -1, false, DPL_ENUMERIC, "rank"},
    {NULL, 0, DPL_P_N, 0, true, DPL_ENOMEM, "a pass over"},
    {"attn.1", 0, DPL_P_N, 0, false, DPL_ENOMEM, "no memory for the"},
    {"attn.2", 1, DPL_P_N, 0, false, DPL_ENOMEM, "no memory for the"},
    {"attn.3", 0, DPL_P_N, 0, false, DPL_ENOMEM, "no memory for the"},
    {"dhidden.3", 1, DPL_P_N, 0, false, DPL_ENOMEM, "no memory for the"},
    {"dhidden.1", 0, DPL_P_N, 0, false, DPL_ENOMEM, "no memory for the"},
};

typedef struct prober {
    const fault *fault;
    dpl_model *model;
    int n_seen;
} prober;

static void take_memory(void *arg, const char *name, bool is_int, int rank, const int64_t *sizes,
                        const void *data) {
    (void)is_int, (void)rank, (void)sizes, (void)data;
    prober *p = arg;
    if (!strcmp(name, p->fault->at) && p->n_seen++ == p->fault->n_before)
        p->model->ranks.memory_bytes = 0;
}

static dpl_status step_with(dpl_trainer *t, const fault *f, bool bad, dpl_step_metrics *m) {
    dpl_model *model = t->model;
    const size_t rows_bytes = model->ranks.memory_bytes, step_bytes = t->ctx->memory_bytes;
    prober p = {f, model, 0};
    size_t own = 0;
    if (bad && f->broken != DPL_P_N)
        assert_true(dpl_param_own(model, dpl_model_param(model, f->layer, f->broken), &own) > 0);
    float *value = bad && f->broken != DPL_P_N ? &model->params.master[own] : NULL;
    const float before = value ? *value : 0;
    if (value) *value = NAN;
    if (bad && f->no_step_memory) t->ctx->memory_bytes = 1;
    if (bad && f->at) model->probe = take_memory, model->probe_arg = &p;
    const dpl_status status = dpl_trainer_step(t, m);
    model->probe = NULL;
    model->ranks.memory_bytes = rows_bytes;
    t->ctx->memory_bytes = step_bytes;
    if (value) *value = before;
    return status;
}

// A rank that fails takes the others with it, wherever it is; then all go on.
static void fail_wide(dpl_comm *comm, void *arg) {
    const wide_job *j = arg;
    wide_result *r = &j->results[comm->rank];
    const bool bad = comm->rank >= comm->n_ranks - j->shape.n_expert;
    dpl_ctx *ctx = run_ctx(1);
    dpl_config *config = wide_config(j);
    check_ok(dpl_ctx_join(ctx, comm));
    dpl_trainer *t = open_wide(ctx, j, config);
    for (size_t i = 0; i < DPL_COUNT(faults); i++) {
        const fault *f = &faults[i];
        if (f->at && j->shape.n_expert == 1) continue;             // no rows go anywhere
        if (f->broken != DPL_P_N && j->shape.n_fsdp > 1) continue; // all would get it
        const dpl_status status = step_with(t, f, bad, &r->steps[0]);
        if (status != f->status || !strstr(dpl_error_message(), f->text))
            fail_msg("rank %d, fault %zu: status %d, %s", comm->rank, i, status,
                     dpl_error_message());
    }
    check_ok(dpl_trainer_step(t, &r->steps[0]));
    dpl_trainer_close(&t);
    dpl_config_close(&config);
    dpl_ctx_close(&ctx);
}

static void one_rank_of_a_batch_ends_all(void **state) {
    (void)state;
    static const shape shapes[] = {{2, 1, 1, NULL}, {3, 1, 1, NULL}, {1, 1, 2, NULL},
                                   {2, 1, 2, NULL}, {1, 2, 1, NULL}, {1, 2, 2, NULL}};
    static wide_result results[R_MAX], one;
    scratch_open(NULL);
    write_wide_batch(scratch_path("wide.safetensors"));
    const wide_job alone = {{1, 1, 1, NULL}, false, &one};
    ranks_run("threads", 1, train_wide, (void *)(uintptr_t)&alone);
    for (size_t i = 0; i < DPL_COUNT(shapes); i++) {
        const wide_job j = {shapes[i], false, results};
        ranks_run("threads", n_ranks_of(shapes[i]), fail_wide, (void *)(uintptr_t)&j);
        assert_true(close_to(results[0].steps[0].loss, one.steps[0].loss, 1e-12));
    }
    scratch_close(NULL);
}

// A chain of meshes, each of which goes on from the checkpoint of the one before.
static void checkpoints_go_to_any_mesh(void **state) {
    (void)state;
    static const shape shapes[STEPS] = {
        {1, 2, 2, NULL}, {2, 1, 1, NULL}, {1, 3, 1, NULL}, {3, 1, 2, NULL}, {1, 1, 1, NULL}};
    static result whole[R_MAX], part[R_MAX];
    scratch_open(NULL);
    const job straight = {{1, 1, 1, NULL}, "straight", 0, STEPS, whole};
    run_job(&straight);
    for (int i = 0; i < STEPS; i++) {
        const job j = {shapes[i], "chain", i, i + 1, part};
        run_job(&j);
        assert_string_equal(part[0].error, "");
    }
    check_same(part, whole, 0, STEPS, "chain");
    scratch_close(NULL);
}

static void expect_error(shape s, dpl_status status, const char *text) {
    static result results[R_MAX];
    scratch_open(NULL);
    const job j = {s, "refused", 0, 1, results};
    run_job(&j);
    for (int r = 0; r < n_ranks_of(s); r++) {
        assert_true(results[r].status == status || results[r].status == DPL_ECOMM);
        if (!strstr(results[r].error, text)) fail_msg("rank %d: %s", r, results[r].error);
    }
    assert_false(dpl_path_exists(scratch_path("runs/refused")));
    scratch_close(NULL);
}

static void meshes_that_cannot_be_are_refused(void **state) {
    (void)state;
    expect_error((shape){1, 1, 3, NULL}, DPL_EINVAL, "8 experts over 3 ranks");
    expect_error((shape){1, 1, 2, "ici_fsdp_parallelism=2"}, DPL_EINVAL, "do not fill a mesh");
    expect_error((shape){2, 1, 1, "ici_data_parallelism=4"}, DPL_EINVAL, "4 ranks along data");
    expect_error((shape){2, 1, 1, "dcn_expert_parallelism=0"}, DPL_EINVAL, "is 0");
    expect_error((shape){2, 1, 1, "ranks=3"}, DPL_EINVAL, "ranks=3, but the context is of 2");
    expect_error((shape){1, 1, 2, "dcn_data_parallelism=4294967296"}, DPL_EINVAL, "along data");
}

// A write that fails on any rank ends all ranks, with its message; the checkpoint before stays
// whole, and the run goes on from it.
static void a_full_disk_ends_all_ranks(void **state) {
    (void)state;
    static result results[R_MAX];
    scratch_open(NULL);
    const job good = {{1, 2, 2, NULL}, "full", 0, 1, results};
    run_job(&good);
    assert_string_equal(results[0].error, "");
    const job bad = {{1, 2, 2, NULL}, "full", 1, 2, results};
    for (size_t nth = 1; nth <= 34; nth += nth / 2 + 1) {
        dpl_fault_write(nth);
        run_job(&bad);
        dpl_fault_write(0);
        for (int r = 0; r < 4; r++) {
            assert_int_not_equal(results[r].status, DPL_OK);
            if (!strstr(results[r].error, "No space left"))
                fail_msg("write %zu, rank %d: %s", nth, r, results[r].error);
        }
        check_ok(dpl_checkpoint_verify(scratch_path("runs/full/checkpoints/0")));
    }
    run_job(&bad);
    assert_string_equal(results[0].error, "");
    scratch_close(NULL);
}

// Gradients of one step, written as a checkpoint's arrays are: a part by each rank.
typedef struct grad_job {
    job job;
    char path[256];
} grad_job;

static void run_gradients(dpl_comm *comm, void *arg) {
    const grad_job *g = arg;
    static const char *const prefix[] = {"grad."};
    char part[PATH_MAX];
    dpl_ctx *ctx = run_ctx(1);
    dpl_config *config = mesh_config(&g->job, comm->n_ranks);
    check_ok(dpl_ctx_join(ctx, comm));
    dpl_trainer *t = run_open(ctx, config);
    dpl_loss_sums sums;
    dpl_data_train(&t->data, 0, (size_t)comm->rank * t->batch.n_batch, &t->batch);
    check_ok(dpl_train_pass(t->model, &t->mesh, &t->rule, &t->batch, &t->micro, &sums));
    check_ok(dpl_model_save_flat(t->model, g->path, prefix, &t->model->params.grad, 1, part));
    dpl_trainer_close(&t);
    dpl_config_close(&config);
    dpl_ctx_close(&ctx);
}

// Sums of the same BATCH * 24 products in another order.
static void compare_gradients(const char *path, const char *reference, const char *what) {
    dpl_st_file *got, *want;
    check_ok(dpl_st_open(path, &got));
    check_ok(dpl_st_open(reference, &want));
    assert_int_equal(got->n_tensors, want->n_tensors);
    for (size_t i = 0; i < want->n_tensors; i++) {
        const dpl_st_tensor *w = &want->tensors[i], *g = dpl_st_find(got, w->name);
        assert_non_null(g);
        const size_t n = dpl_st_elems(w);
        float *x = test_malloc(n * sizeof *x), *y = test_malloc(n * sizeof *y);
        check_ok(dpl_st_read_f32(g, x));
        check_ok(dpl_st_read_f32(w, y));
        double most = 0, worst = 0;
        for (size_t j = 0; j < n; j++) {
            most = fmax(most, fabs((double)y[j]));
            worst = fmax(worst, fabs((double)x[j] - (double)y[j]));
        }
        if (worst > most * BATCH * 24 * 0x1p-24)
            fail_msg("%s: %s: %g apart, of up to %g", what, w->name, worst, most);
        test_free(x);
        test_free(y);
    }
    dpl_st_close(&got);
    dpl_st_close(&want);
}

static void gradients_differ_by_the_order_of_sums(void **state) {
    (void)state;
    static const shape shapes[] = {{1, 1, 1, NULL}, {2, 1, 1, NULL},         {1, 2, 1, NULL},
                                   {1, 1, 2, NULL}, {1, 3, 1, NULL},         {1, 2, 2, NULL},
                                   {3, 1, 2, NULL}, {1, 1, 2, "ep_chunks=3"}};
    static grad_job jobs[DPL_COUNT(shapes)];
    scratch_open(NULL);
    for (size_t i = 0; i < DPL_COUNT(shapes); i++) {
        char name[32];
        snprintf(name, sizeof name, "mesh%zu", i);
        jobs[i].job = (job){shapes[i], "gradients", 0, 0, NULL};
        snprintf(jobs[i].path, sizeof jobs[i].path, "%s",
                 scratch_path("gradients%zu.safetensors", i));
        ranks_run("threads", n_ranks_of(shapes[i]), run_gradients, &jobs[i]);
        compare_gradients(jobs[i].path, jobs[0].path, name);
    }
    scratch_close(NULL);
}

// A rank that cannot run its first micro-batch: the others go on to where all agree, and can go on
// after that.
static void run_unfit(dpl_comm *comm, void *arg) {
    const job *j = arg;
    dpl_ctx *ctx = run_ctx(1);
    dpl_config *config = mesh_config(j, comm->n_ranks);
    check_ok(dpl_ctx_join(ctx, comm));
    dpl_trainer *t = run_open(ctx, config);
    dpl_loss_sums sums;
    const int bad = comm->n_ranks - 1;
    char error[64];
    const int32_t before = t->batch.ids[1];
    if (comm->rank == bad) t->batch.ids[1] = 999;
    const dpl_status status = dpl_train_pass(t->model, &t->mesh, &t->rule, &t->batch, &t->micro,
                                             &sums);
    assert_int_equal(status, DPL_EINVAL);
    snprintf(error, sizeof error, "rank %d: token 1 of row 0 is 999", bad);
    if (strncmp(dpl_error_message(), error, strlen(error))) fail_msg("%s", dpl_error_message());
    t->batch.ids[1] = before;
    check_ok(dpl_train_pass(t->model, &t->mesh, &t->rule, &t->batch, &t->micro, &sums));
    dpl_trainer_close(&t);
    dpl_config_close(&config);
    dpl_ctx_close(&ctx);
}

static void a_rank_that_cannot_go_on_keeps_pace(void **state) {
    (void)state;
    static const shape shapes[] = {{2, 1, 1, NULL}, {1, 2, 1, NULL}, {1, 1, 2, NULL},
                                   {1, 4, 1, NULL}, {1, 2, 2, NULL}, {3, 1, 2, NULL}};
    for (size_t i = 0; i < DPL_COUNT(shapes); i++) {
        job j = {shapes[i], "unfit", 0, 0, NULL};
        scratch_open(NULL);
        ranks_run("threads", n_ranks_of(shapes[i]), run_unfit, &j);
        scratch_close(NULL);
    }
}

// The gradient of an expert of another rank, and of a piece that another rank has.
typedef struct poison {
    const char *tensor, *error;
} poison;

static void run_poisoned(dpl_comm *comm, void *arg) {
    const poison *p = arg;
    const job j = {{1, 2, 2, NULL}, "poisoned", 0, 0, NULL};
    dpl_ctx *ctx = run_ctx(1);
    dpl_config *config = mesh_config(&j, comm->n_ranks);
    check_ok(dpl_ctx_join(ctx, comm));
    dpl_trainer *t = run_open(ctx, config);
    dpl_loss_sums sums;
    double norm;
    check_ok(dpl_train_pass(t->model, &t->mesh, &t->rule, &t->batch, &t->micro, &sums));
    for (size_t i = 0, own; i < t->model->n_disk; i++) {
        const dpl_disk_tensor *tensor = &t->model->disk[i];
        if (strcmp(tensor->name, p->tensor) || !dpl_disk_is_here(t->model, tensor)) continue;
        // Its last column: element 63 of a row of panels, in the piece of one of the two.
        const size_t n = dpl_param_own(t->model, tensor->param, &own);
        if (n > 0 && t->mesh.model.fsdp->rank == 1) t->model->params.grad[own + n - 1] = NAN;
    }
    assert_int_equal(dpl_optimizer_norm(&t->optimizer, &t->mesh, &norm), DPL_ENUMERIC);
    if (strcmp(dpl_error_message(), p->error)) fail_msg("%s", dpl_error_message());
    dpl_trainer_close(&t);
    dpl_config_close(&config);
    dpl_ctx_close(&ctx);
}

static void a_bad_gradient_is_named_by_all(void **state) {
    (void)state;
    static const poison cases[] = {
        {"model.layers.1.mlp.experts.7.down_proj.weight",
         "layer 1, model.layers.1.mlp.experts.7.down_proj.weight: the gradient is not finite"},
        {"lm_head.weight", "lm_head.weight: the gradient is not finite"}};
    for (size_t i = 0; i < DPL_COUNT(cases); i++) {
        scratch_open(NULL);
        ranks_run("threads", 4, run_poisoned, (void *)(uintptr_t)&cases[i]);
        scratch_close(NULL);
    }
}

// Ranks that were given different configurations.
static void run_unequal(dpl_comm *comm, void *arg) {
    (void)arg;
    const job j = {{2, 1, 1, comm->rank ? "checkpoint_period=7" : NULL}, "unequal", 0, 0, NULL};
    dpl_ctx *ctx = run_ctx(1);
    dpl_config *config = mesh_config(&j, comm->n_ranks);
    dpl_trainer *t = NULL;
    check_ok(dpl_ctx_join(ctx, comm));
    assert_int_not_equal(dpl_trainer_open(ctx, config, &t), DPL_OK);
    assert_non_null(strstr(dpl_error_message(), "rank 1: another configuration than rank 0"));
    dpl_config_close(&config);
    dpl_ctx_close(&ctx);
}

static void unequal_configurations_are_refused(void **state) {
    (void)state;
    scratch_open(NULL);
    ranks_run("threads", 2, run_unequal, NULL);
    scratch_close(NULL);
}

// With one rank a run that failed can be tried again.
static void one_rank_may_try_again(void **state) {
    (void)state;
    scratch_open(NULL);
    dpl_ctx *ctx = run_ctx(1);
    dpl_config *config = run_config("run_name=again", "steps=2", NULL);
    dpl_trainer *t = run_open(ctx, config);
    dpl_fault_write(1);
    assert_int_not_equal(dpl_trainer_run(t, NULL), DPL_OK);
    dpl_fault_write(0);
    check_ok(dpl_trainer_run(t, NULL));
    assert_int_equal(dpl_trainer_next_step(t), 2);
    dpl_trainer_close(&t);
    dpl_config_close(&config);
    dpl_ctx_close(&ctx);
    scratch_close(NULL);
}

static void stop_rank(dpl_comm *comm, void *arg) {
    dpl_status *status = arg;
    const job j = {{1, 1, 2, NULL}, "stopped", 0, 0, NULL};
    dpl_ctx *ctx = run_ctx(1);
    dpl_config *config = mesh_config(&j, comm->n_ranks);
    check_ok(dpl_ctx_join(ctx, comm));
    dpl_trainer *t = run_open(ctx, config);
    if (comm->rank == 1) dpl_trainer_stop(t); // only this one is told
    status[comm->rank] = dpl_trainer_run(t, NULL);
    dpl_trainer_close(&t);
    dpl_config_close(&config);
    dpl_ctx_close(&ctx);
}

static void one_rank_stops_all(void **state) {
    (void)state;
    dpl_status status[2] = {DPL_OK, DPL_OK};
    scratch_open(NULL);
    ranks_run("threads", 2, stop_rank, status);
    assert_int_equal(status[0], DPL_EINTR);
    assert_int_equal(status[1], DPL_EINTR);
    scratch_close(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_mesh_trains_alike),
        cmocka_unit_test(batch_losses_are_those_of_one_rank),
        cmocka_unit_test(one_rank_of_a_batch_ends_all),
        cmocka_unit_test(bf16_copies_are_gathered),
        cmocka_unit_test(depths_that_do_not_fit_stay),
        cmocka_unit_test(quantized_experts_are_spread),
        cmocka_unit_test(quantized_on_any_mesh),
        cmocka_unit_test(chance_repeats_itself),
        cmocka_unit_test(mxfp8_rows_are_those_of_one_rank),
        cmocka_unit_test(odd_widths_train_alike),
        cmocka_unit_test(checkpoints_go_to_any_mesh),
        cmocka_unit_test(meshes_that_cannot_be_are_refused),
        cmocka_unit_test(a_full_disk_ends_all_ranks),
        cmocka_unit_test(gradients_differ_by_the_order_of_sums),
        cmocka_unit_test(a_rank_that_cannot_go_on_keeps_pace),
        cmocka_unit_test(a_bad_gradient_is_named_by_all),
        cmocka_unit_test(one_rank_stops_all),
        cmocka_unit_test(unequal_configurations_are_refused),
        cmocka_unit_test(one_rank_may_try_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
