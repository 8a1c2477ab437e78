// weights.c - model directories: config.json and safetensors, written as transformers reads them.
//
// Reading is strict: every tensor of the model is found exactly once with the right shape, and a
// tensor that the model does not know is an error, so that nothing is dropped silently or left at
// its initial value.
#include <fnmatch.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

#include "io/io.h"
#include "model/model.h"

dpl_status dpl_model_read_config(const char *at, dpl_model_config *config_out,
                                 dpl_dtype *dtype_out) {
    char path[PATH_MAX];
    DPL_TRY(dpl_path_join(at, "config.json", path));
    if (dpl_path_exists(at) && !dpl_path_is_dir(at)) strcpy(path, at);
    json_t *object;
    DPL_TRY(dpl_json_read(path, &object));
    const dpl_status status = dpl_model_config_from_json(object, config_out);
    if (status == DPL_OK && dtype_out) {
        const json_t *dtype = json_object_get(object, "dtype");
        if (!dtype) dtype = json_object_get(object, "torch_dtype");
        const char *text = json_string_value(dtype);
        *dtype_out = text && strcmp(text, "bfloat16") == 0 ? DPL_BF16 : DPL_F32;
    }
    json_decref(object);
    return status == DPL_OK ? DPL_OK : dpl_fail_in(status, "%s", path);
}

/* ---- tensors of files, for the model and for flat arrays (moments) ---- */
typedef struct slot {
    const dpl_disk_tensor *t;
    float *flat;
    const dpl_st_tensor *found; // when reading; NULL: the files lack it
    char name[192];
} slot;

typedef struct slots {
    dpl_model *m;
    dpl_status status; // of fetching what other ranks have
    size_t n;
    slot *at;
    dpl_st_tensor *tensors;
    float *values, *other; // each as large as the largest tensor
} slots;

static void close_slots(slots *s) {
    dpl_free(s->at);
    dpl_free(s->tensors);
    dpl_free(s->values);
    dpl_free(s->other);
}

static void add_slot(slots *s, const dpl_disk_tensor *t, const char *prefix, float *flat,
                     dpl_st_dtype dtype) {
    slot *at = &s->at[s->n];
    const size_t bytes = dpl_disk_elems(t) * dpl_st_dtype_bytes(dtype);
    at->t = t;
    at->flat = flat;
    snprintf(at->name, sizeof at->name, "%s%s", prefix, t->name);
    s->tensors[s->n++] = (dpl_st_tensor){at->name, NULL, dtype, t->rank, {t->shape[0], t->shape[1]},
                                         NULL,     bytes};
}

// prefixes NULL: the whole model, else of each flat array what the optimizer knows. To be closed
// after an error too.
static dpl_status open_slots(dpl_model *m, const char *const *prefixes, float *const *flats,
                             size_t n_flats, dpl_dtype dtype, slots *s) {
    const size_t n = m->n_disk * n_flats;
    size_t elems = 0;
    for (size_t i = 0; i < m->n_disk; i++) elems = DPL_MAX(elems, dpl_disk_elems(&m->disk[i]));
    *s = (slots){.m = m,
                 .at = dpl_alloc_array(n + 1, sizeof *s->at), // one more when reading
                 .tensors = dpl_alloc_array(n + 1, sizeof *s->tensors),
                 .values = dpl_alloc_array(elems, sizeof(float)),
                 .other = dpl_alloc_array(elems, sizeof(float))};
    DPL_EXPECT(s->at && s->tensors && s->values && s->other, DPL_ENOMEM,
               "no memory for %zu tensors of up to %zu elements", n, elems);
    for (size_t i = 0; i < n; i++) {
        const dpl_disk_tensor *t = &m->disk[i % m->n_disk];
        if (prefixes && (!t->param || t->copy_of_shared)) continue;
        // The router and its bias choose experts: they stay fp32, as transformers keeps them.
        const bool f32 = dtype == DPL_F32 || t->bias || t->param->id == DPL_P_ROUTER;
        add_slot(s, t, prefixes ? prefixes[i / m->n_disk] : "", flats[i / m->n_disk],
                 f32 ? DPL_ST_F32 : DPL_ST_BF16);
    }
    dpl_ctx_wait(m->ctx);
    return DPL_OK;
}

/* ---- reading ---- */
// Into the slice of the flat array. A copy must equal what it repeats.
static dpl_status read_slot(const slots *s, const slot *at) {
    const dpl_disk_tensor *want = at->t;
    const dpl_st_tensor *got = at->found;
    const int64_t rows = got->rank > 0 ? got->shape[0] : 1;
    const int64_t cols = got->rank > 1 ? got->shape[1] : 1;
    DPL_EXPECT(got->rank == want->rank && rows == want->shape[0] && cols == want->shape[1],
               DPL_EFORMAT,
               "%s: \"%s\" has rank %d and shape (%lld, %lld), expected rank %d and (%lld, %lld)",
               got->file, got->name, got->rank, (long long)rows, (long long)cols, want->rank,
               (long long)want->shape[0], (long long)want->shape[1]);
    if (!dpl_disk_is_here(s->m, want)) return DPL_OK;
    if (want->bias) return dpl_st_read_f32(got, want->bias);
    DPL_TRY(dpl_st_read_f32(got, s->values));
    if (!want->copy_of_shared) {
        dpl_disk_scatter(want, at->flat, s->values);
        return DPL_OK;
    }
    dpl_disk_gather(want, at->flat, s->other);
    DPL_EXPECT(memcmp(s->values, s->other, dpl_disk_elems(want) * sizeof(float)) == 0, DPL_EFORMAT,
               "%s: \"%s\" differs from the embedding or head that it must repeat", got->file,
               got->name);
    return DPL_OK;
}

static int compare_slots(const void *a, const void *b) {
    return strcmp(((const slot *)a)->name, ((const slot *)b)->name);
}

// Tensors that public files carry beside the model's: of layers after its last one, rotary tables.
static bool is_known_extra(const dpl_model *m, const char *name) {
    char digits[24], dot;
    if (sscanf(name, "model.layers.%23[0-9]%c", digits, &dot) == 2 && dot == '.' &&
        strtoull(digits, NULL, 10) >= m->config.n_layers + m->config.n_mtp)
        return true;
    return fnmatch("*rotary_emb.inv_freq", name, 0) == 0;
}

// Finds the slots' tensors: the names in the files are theirs, each once, but for copies. Both
// kinds of deviation stand in one message: a renamed tensor is one of each.
static dpl_status match_names(const dpl_model *m, const dpl_st_file *file, slots *s) {
    const char *missing = "none", *unknown = "none"; // the first of them
    size_t i = 0, j = 0, n_missing = 0, n_unknown = 0, n_ignored = 0;
    qsort(s->at, s->n, sizeof *s->at, compare_slots);
    while (i < s->n || j < file->n_tensors) {
        slot *at = &s->at[i]; // one past the last is there too
        const dpl_st_tensor *found = &file->tensors[j];
        const int order = i == s->n ? 1 : j == file->n_tensors ? -1 : strcmp(at->name, found->name);
        if (order == 0) at->found = found;
        else if (order < 0 && !at->t->copy_of_shared) missing = n_missing++ ? missing : at->name;
        else if (order > 0 && is_known_extra(m, found->name)) n_ignored++;
        else if (order > 0) unknown = n_unknown++ ? unknown : found->name;
        i += order <= 0;
        j += order >= 0;
    }
    if (n_ignored) dpl_log("%zu tensors beyond this model's layers were left unread", n_ignored);
    DPL_EXPECT(n_missing + n_unknown == 0, DPL_EFORMAT,
               "%s: %zu tensors are missing, the first: %s; %zu tensors are not this model's, the "
               "first: %s",
               file->path, n_missing, missing, n_unknown, unknown);
    return DPL_OK;
}

static dpl_status read_slots(const dpl_model *m, const dpl_st_file *file, slots *s) {
    DPL_TRY(match_names(m, file, s));
    // Copies come last: what they repeat must be there.
    for (int copies = 0; copies < 2; copies++)
        for (const slot *at = s->at; at < s->at + s->n; at++)
            if (at->found && at->t->copy_of_shared == (copies == 1)) DPL_TRY(read_slot(s, at));
    return DPL_OK;
}

dpl_status dpl_model_load_flat(dpl_model *m, const char *path, const char *const *prefixes,
                               float *const *flats, size_t n_flats) {
    dpl_st_file *file;
    slots s;
    DPL_TRY(dpl_st_open(path, &file));
    dpl_status status = open_slots(m, prefixes, flats, n_flats, DPL_F32, &s);
    dpl_disk_tensor tied_head = m->disk[0]; // the embedding, which a tied model's files may repeat
    tied_head.copy_of_shared = true;
    snprintf(tied_head.name, sizeof tied_head.name, "lm_head.weight");
    if (status == DPL_OK && m->config.tied && !prefixes)
        add_slot(&s, &tied_head, "", flats[0], DPL_ST_F32);
    if (status == DPL_OK) status = read_slots(m, file, &s);
    close_slots(&s);
    dpl_st_close(&file);
    return status;
}

dpl_status dpl_model_load(dpl_model *m, const char *dir) {
    DPL_TRY(dpl_model_load_flat(m, dir, NULL, &m->params.master, 1));
    dpl_model_refresh(m);
    return DPL_OK;
}

/* ---- writing ---- */
#define NO_MORE SIZE_MAX

// The tensor that the lowest rank asks all ranks for; only its owner sends it, to that rank.
static dpl_status ask(const slots *s, size_t i, size_t *i_out) {
    const dpl_comm *comm = s->m->ranks.comm;
    size_t *all = dpl_alloc_array((size_t)comm->n_ranks, sizeof *all);
    if (!all) {
        dpl_comm_abort(s->m->ranks.comm, "no memory to write a model");
        return dpl_fail(DPL_ENOMEM, "no memory to write a model");
    }
    const dpl_status status = dpl_comm_gather_now(s->m->ranks.comm, &i, sizeof i, all);
    *i_out = all[0];
    dpl_free(all);
    return status;
}

static dpl_status move(const slots *s, size_t i) {
    dpl_comm *comm = s->m->ranks.comm;
    const dpl_disk_tensor *t = s->at[i].t;
    const size_t R = (size_t)comm->n_ranks, bytes = dpl_disk_elems(t) * sizeof(float);
    size_t *sizes = dpl_alloc_array(3 * R, sizeof *sizes); // zeros
    if (!sizes) {
        dpl_comm_abort(comm, "no memory to write a model");
        return dpl_fail(DPL_ENOMEM, "no memory to write a model");
    }
    size_t *const send = sizes + R, *const receive = sizes + 2 * R;
    if (dpl_disk_is_here(s->m, t)) dpl_disk_gather(t, s->at[i].flat, s->values);
    if (dpl_disk_is_here(s->m, t)) send[0] = bytes;
    if (comm->rank == 0) receive[t->owner] = bytes;
    dpl_ticket ticket;
    dpl_status status = dpl_comm_exchange(comm, (dpl_blocks){s->values, sizes, send},
                                          (dpl_blocks){s->values, sizes, receive}, &ticket);
    if (status == DPL_OK) status = dpl_comm_wait(comm, ticket);
    dpl_free(sizes);
    return status;
}

// What a rank that does not write does meanwhile.
static dpl_status serve(const slots *s) {
    for (size_t i = 0;;) {
        DPL_TRY(ask(s, NO_MORE, &i));
        if (i == NO_MORE) return DPL_OK;
        DPL_TRY(move(s, i));
    }
}

// The end of writing, of all ranks: the writer's status is that of all.
static dpl_status finish(slots *s, bool writes, dpl_status status) {
    size_t unused;
    if (!dpl_ep_is_spread(&s->m->ranks)) return status;
    if (writes && s->status == DPL_OK) s->status = ask(s, NO_MORE, &unused);
    if (writes && status == DPL_OK) status = s->status;
    return dpl_comm_agree(s->m->ranks.comm, status);
}

static const void *slot_data(void *arg, size_t i) {
    slots *s = arg;
    const dpl_disk_tensor *t = s->at[i].t;
    size_t unused;
    if (t->bias) return t->bias;
    if (dpl_disk_is_here(s->m, t)) {
        dpl_disk_gather(t, s->at[i].flat, s->values);
    } else if (s->status == DPL_OK) {
        s->status = ask(s, i, &unused);
        if (s->status == DPL_OK) s->status = move(s, i);
    }
    if (s->tensors[i].dtype == DPL_ST_F32) return s->values;
    uint16_t *halves = (void *)s->other;
    for (size_t j = 0; j < dpl_disk_elems(t); j++) halves[j] = dpl_f32_to_bf16(s->values[j]);
    return halves;
}

static dpl_status write_config(const dpl_model *m, const char *dir, dpl_dtype dtype) {
    char path[PATH_MAX];
    DPL_TRY(dpl_path_join(dir, "config.json", path));
    json_t *config = dpl_model_config_to_json(&m->config, dtype);
    const dpl_status status = config ? dpl_json_write(path, config)
                                     : dpl_fail(DPL_ENOMEM, "no memory for %s", path);
    json_decref(config);
    return status;
}

dpl_status dpl_model_save(dpl_model *m, const char *dir, dpl_dtype dtype, size_t shard_bytes) {
    slots s = {0};
    const bool writes = m->ranks.comm->rank == 0;
    dpl_status status = writes ? write_config(m, dir, dtype) : DPL_OK;
    if (status == DPL_OK) status = open_slots(m, NULL, &m->params.master, 1, dtype, &s);
    status = dpl_comm_agree(m->ranks.comm, status);
    if (status == DPL_OK) {
        status = writes ? dpl_st_write_dir(dir, s.tensors, s.n, shard_bytes, slot_data, &s)
                        : serve(&s);
        status = finish(&s, writes, status);
    }
    close_slots(&s);
    return status;
}

dpl_status dpl_model_save_flat(dpl_model *m, const char *path, const char *const *prefixes,
                               float *const *flats, size_t n_flats) {
    slots s;
    const bool writes = m->ranks.comm->rank == 0;
    dpl_status status = open_slots(m, prefixes, flats, n_flats, DPL_F32, &s);
    status = dpl_comm_agree(m->ranks.comm, status);
    if (status == DPL_OK) {
        status = writes ? dpl_st_write(path, s.tensors, s.n, slot_data, &s) : serve(&s);
        status = finish(&s, writes, status);
    }
    close_slots(&s);
    return status;
}
