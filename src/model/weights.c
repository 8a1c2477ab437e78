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
    size_t i_flat;
    const dpl_st_tensor *found; // when reading; NULL: the files lack it
    char name[192];
} slot;

typedef struct slots {
    dpl_model *m;
    const dpl_st_file *file; // when reading
    size_t n;
    slot *at;
    dpl_st_tensor *tensors;
    const char *const *prefixes;
    float *const *flats;
    size_t n_flats;
    float *values, *other; // each as large as the largest tensor
    float *room;           // for a unit that is whole (dpl_unit_room)
    size_t n_dealt;        // rounds of it, when writing
    dpl_status status;     // of those
} slots;

static void close_slots(slots *s) {
    dpl_free(s->at);
    dpl_free(s->tensors);
    dpl_free(s->values);
    dpl_free(s->other);
    dpl_free(s->room);
}

static void add_slot(slots *s, const dpl_disk_tensor *t, size_t i_flat, dpl_st_dtype dtype) {
    slot *at = &s->at[s->n];
    const size_t bytes = dpl_disk_elems(t) * dpl_st_dtype_bytes(dtype);
    at->t = t;
    at->i_flat = i_flat;
    snprintf(at->name, sizeof at->name, "%s%s", s->prefixes ? s->prefixes[i_flat] : "", t->name);
    s->tensors[s->n++] = (dpl_st_tensor){at->name, NULL, dtype, t->rank, {t->shape[0], t->shape[1]},
                                         NULL,     bytes};
}

// A model's own tensors unit by unit, or (with prefixes) of each flat array what the optimizer
// knows. To be closed after an error too.
static dpl_status open_slots(slots *s, dpl_dtype dtype) {
    const dpl_model *m = s->m;
    const size_t n = m->n_disk * s->n_flats;
    size_t elems = 0;
    for (size_t i = 0; i < m->n_disk; i++) elems = DPL_MAX(elems, dpl_disk_elems(&m->disk[i]));
    s->at = dpl_alloc_array(n + 1, sizeof *s->at); // one more when reading
    s->tensors = dpl_alloc_array(n + 1, sizeof *s->tensors);
    s->values = dpl_alloc_array(elems, sizeof(float));
    s->other = dpl_alloc_array(elems, sizeof(float));
    s->room = dpl_alloc_array(dpl_unit_room_elems(m), sizeof(float));
    DPL_EXPECT(s->at && s->tensors && s->values && s->other && s->room, DPL_ENOMEM,
               "no memory for %zu tensors of up to %zu elements", n, elems);
    for (size_t i = 0; i < s->n_flats * m->params.n_units; i++) {
        for (const dpl_disk_tensor *t = m->disk; t < m->disk + m->n_disk; t++) {
            if (t->unit != i % m->params.n_units) continue;
            if (s->prefixes && (!t->param || t->copy_of_shared)) continue;
            // The router and its bias choose experts: they stay fp32, as transformers keeps them.
            const bool f32 = dtype == DPL_F32 || t->bias || t->param->id == DPL_P_ROUTER;
            add_slot(s, t, i / m->params.n_units, f32 ? DPL_ST_F32 : DPL_ST_BF16);
        }
    }
    dpl_ctx_wait(m->ctx);
    return DPL_OK;
}

/* ---- reading ---- */
// Weights in E4M3 have a factor for each block of 128 x 128, the last ones of a row or column of
// what is left: in a tensor beside, as DeepSeek's files have it.
#define F8_BLOCK  128
#define F8_SUFFIX "_scale_inv"

static const dpl_st_tensor *scale_of(const dpl_st_file *file, const dpl_st_tensor *weight) {
    char name[256];
    snprintf(name, sizeof name, "%.200s" F8_SUFFIX, weight->name);
    return dpl_st_find(file, name);
}

static bool is_scale(const dpl_st_file *file, const dpl_st_tensor *tensor) {
    char name[256];
    const size_t n = strlen(tensor->name), n_suffix = strlen(F8_SUFFIX);
    if (n < n_suffix || n > 255 || strcmp(tensor->name + n - n_suffix, F8_SUFFIX)) return false;
    snprintf(name, sizeof name, "%.*s", (int)(n - n_suffix), tensor->name);
    const dpl_st_tensor *weight = dpl_st_find(file, name);
    return weight && weight->dtype == DPL_ST_F8_E4M3;
}

// `room`: for the factors.
static dpl_status read_f8(const slots *s, const dpl_st_tensor *weight, float *room, float *dst) {
    const dpl_st_tensor *scale = scale_of(s->file, weight);
    DPL_EXPECT(scale, DPL_EFORMAT, "%s: tensor %s is F8_E4M3, but there is no %s" F8_SUFFIX,
               weight->file, weight->name, weight->name);
    const size_t rows = (size_t)weight->shape[0], cols = (size_t)weight->shape[1];
    const size_t across = dpl_div_up(cols, F8_BLOCK);
    DPL_EXPECT(weight->rank == 2 && scale->rank == 2 &&
                   scale->shape[0] == (int64_t)dpl_div_up(rows, F8_BLOCK) &&
                   scale->shape[1] == (int64_t)across,
               DPL_EFORMAT, "%s: tensor %s is not (%zu, %zu): one for each %d x %d of %s",
               scale->file, scale->name, dpl_div_up(rows, F8_BLOCK), across, F8_BLOCK, F8_BLOCK,
               weight->name);
    DPL_TRY(dpl_st_read_f32(scale, room));
    float values[256];
    for (int code = 0; code < 256; code++) values[code] = dpl_code_to_f32(DPL_E4M3, (uint8_t)code);
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < cols; c++)
            dst[r * cols + c] = values[weight->data[r * cols + c]] *
                                room[r / F8_BLOCK * across + c / F8_BLOCK];
    return DPL_OK;
}

static dpl_status read_values(const slots *s, const dpl_st_tensor *tensor) {
    if (tensor->dtype == DPL_ST_F8_E4M3) return read_f8(s, tensor, s->other, s->values);
    return dpl_st_read_f32(tensor, s->values);
}

// Into the slice of its unit. A copy must equal what it repeats.
static dpl_status read_slot(const slots *s, const slot *at, float *whole) {
    const dpl_disk_tensor *want = at->t;
    const size_t first = s->m->params.units[want->unit].first;
    dpl_busy();
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
    DPL_TRY(read_values(s, got));
    if (!want->copy_of_shared) {
        dpl_disk_scatter_to(want, whole, first, s->values);
        return DPL_OK;
    }
    dpl_disk_gather_from(want, whole, first, s->other);
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
        else if (order > 0 && !is_scale(file, found)) // that is read with its weight
            unknown = n_unknown++ ? unknown : found->name;
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

static dpl_status read_unit(slots *s, size_t i_flat, size_t unit) {
    float *flat = s->flats[i_flat], *whole = dpl_unit_room(s->m, unit, flat, s->room);
    memset(s->room, 0, dpl_unit_room_elems(s->m) * sizeof *s->room); // padding too
    // Copies come last: what they repeat must be there.
    for (int copies = 0; copies < 2; copies++)
        for (const slot *at = s->at; at < s->at + s->n; at++)
            if (at->found && at->i_flat == i_flat && at->t->unit == unit &&
                at->t->copy_of_shared == (copies == 1))
                DPL_TRY(read_slot(s, at, whole));
    dpl_unit_put(s->m, unit, whole, flat);
    return DPL_OK;
}

static dpl_status read_slots(const dpl_model *m, const dpl_st_file *file, slots *s) {
    s->file = file;
    DPL_TRY(match_names(m, file, s));
    for (size_t i = 0; i < s->n_flats; i++)
        for (size_t unit = 0; unit < m->params.n_units; unit++) DPL_TRY(read_unit(s, i, unit));
    return DPL_OK;
}

dpl_status dpl_model_load_flat(dpl_model *m, const char *path, const char *const *prefixes,
                               float *const *flats, size_t n_flats) {
    dpl_st_file *file;
    slots s = {.m = m, .prefixes = prefixes, .flats = flats, .n_flats = n_flats};
    DPL_TRY(dpl_st_open(path, &file));
    dpl_status status = open_slots(&s, DPL_F32);
    dpl_disk_tensor tied_head = m->disk[0]; // the embedding, which a tied model's files may repeat
    tied_head.copy_of_shared = true;
    snprintf(tied_head.name, sizeof tied_head.name, "lm_head.weight");
    if (status == DPL_OK && m->config.tied && !prefixes) add_slot(&s, &tied_head, 0, DPL_ST_F32);
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
// Units are dealt out to ranks in turn: the fsdp ranks get one each, put together from the pieces
// of all, in rounds that the groups along data take in turn. What is no expert is written by one of
// the ranks that share the experts.
static size_t writer_of(const dpl_model *m, const dpl_disk_tensor *t) {
    const size_t F = dpl_model_shards(m), E = (size_t)m->others.experts->n_ranks;
    const size_t data = t->unit / F % (size_t)m->others.n_data;
    const bool expert = t->param && dpl_param_is_expert(t->param);
    return (data * F + t->unit % F) * E + (expert ? (size_t)t->owner : t->unit % E);
}

static size_t n_writers(const dpl_model *m) {
    return (size_t)m->others.n_data * dpl_model_shards(m) * (size_t)m->others.experts->n_ranks;
}

static size_t own_writer(const dpl_model *m) {
    const size_t E = (size_t)m->others.experts->n_ranks, F = dpl_model_shards(m);
    return ((size_t)m->others.data * F + (size_t)m->others.fsdp->rank) * E +
           (size_t)m->others.experts->rank;
}

// Deals out what comes before round `end`, if it has not been. All ranks do all of them, in order,
// whatever becomes of their files.
static void deal_until(slots *s, size_t end) {
    const dpl_model *m = s->m;
    const size_t F = dpl_model_shards(m), n_rounds = dpl_div_up(m->params.n_units, F);
    for (; s->n_dealt < end; s->n_dealt++) {
        const size_t round = s->n_dealt % n_rounds;
        if (round % (size_t)m->others.n_data != (size_t)m->others.data) continue;
        if (s->status == DPL_OK)
            s->status = dpl_unit_deal(m, round * F, s->flats[s->n_dealt / n_rounds], s->room);
    }
}

static const void *slot_data(void *arg, size_t i) {
    slots *s = arg;
    const dpl_model *m = s->m;
    const dpl_disk_tensor *t = s->at[i].t;
    const size_t F = dpl_model_shards(m), n_rounds = dpl_div_up(m->params.n_units, F);
    float *flat = s->flats[s->at[i].i_flat];
    dpl_busy();
    if (t->bias) return t->bias;
    deal_until(s, s->at[i].i_flat * n_rounds + t->unit / F + 1);
    dpl_disk_gather_from(t, dpl_unit_room(m, t->unit, flat, s->room),
                         m->params.units[t->unit].first, s->values);
    if (s->tensors[i].dtype == DPL_ST_F32) return s->values;
    uint16_t *halves = (void *)s->other;
    for (size_t j = 0; j < dpl_disk_elems(t); j++) halves[j] = dpl_f32_to_bf16(s->values[j]);
    return halves;
}

// Which part of the files each tensor is in, and how many parts there are: ranks that write nothing
// have none. own_out: the part of this rank; n_parts where it has none.
static size_t number_parts(const slots *s, size_t *part_of, size_t *number, size_t *own_out) {
    const size_t W = n_writers(s->m);
    size_t n_parts = 0;
    memset(number, 0, W * sizeof *number);
    for (size_t i = 0; i < s->n; i++) number[writer_of(s->m, s->at[i].t)] = 1;
    for (size_t w = 0; w < W; w++) number[w] = number[w] ? n_parts++ : SIZE_MAX;
    for (size_t i = 0; i < s->n; i++) part_of[i] = number[writer_of(s->m, s->at[i].t)];
    *own_out = DPL_MIN(number[own_writer(s->m)], n_parts);
    return n_parts;
}

// The slots that this rank writes, with their names where they were.
static void keep_own(slots *s, const size_t *part_of, size_t own) {
    size_t n = 0;
    for (size_t i = 0; i < s->n; i++) {
        if (part_of[i] != own) continue;
        s->tensors[n] = s->tensors[i];
        s->at[n] = s->at[i];
        s->tensors[n].name = s->at[n].name;
        n++;
    }
    s->n = n;
}

static dpl_status write_parts(slots *s, const char *path, char *part_out) {
    const size_t n = s->n, W = n_writers(s->m);
    size_t *part_of = dpl_alloc_array(n + W, sizeof *part_of), own;
    DPL_EXPECT(part_of, DPL_ENOMEM, "no memory to write %s", path);
    const size_t n_parts = number_parts(s, part_of, part_of + n, &own);
    dpl_status status = DPL_OK;
    if (own_writer(s->m) == 0) status = dpl_st_write_index(path, s->tensors, n, part_of, n_parts);
    if (own < n_parts && status == DPL_OK) status = dpl_st_part_path(path, own, n_parts, part_out);
    if (own < n_parts && status == DPL_OK) {
        keep_own(s, part_of, own);
        status = dpl_st_write(part_out, s->tensors, s->n, slot_data, s);
    }
    dpl_free(part_of);
    return status;
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

// What this rank has to do with a file; of several ranks each writes a part of it.
static dpl_status write_slots(slots *s, const char *path, char *part_out) {
    const size_t n_rounds = dpl_div_up(s->m->params.n_units, dpl_model_shards(s->m));
    dpl_status status = open_slots(s, DPL_F32);
    if (status != DPL_OK) { // the others wait for what this rank has
        if (n_writers(s->m) > 1) dpl_comm_abort(s->m->others.fsdp, dpl_error_message());
        return status;
    }
    if (n_writers(s->m) > 1) status = write_parts(s, path, part_out);
    else status = dpl_st_write(path, s->tensors, s->n, slot_data, s);
    deal_until(s, s->n_flats * n_rounds);
    return status == DPL_OK ? s->status : status;
}

dpl_status dpl_model_save(dpl_model *m, const char *dir, dpl_dtype dtype, size_t shard_bytes) {
    slots s = {.m = m, .flats = &m->params.master, .n_flats = 1};
    DPL_TRY(write_config(m, dir, dtype));
    dpl_status status = open_slots(&s, dtype);
    if (status == DPL_OK)
        status = dpl_st_write_dir(dir, s.tensors, s.n, shard_bytes, slot_data, &s);
    close_slots(&s);
    return status;
}

dpl_status dpl_model_save_part(dpl_model *m, const char *dir, char *part_out) {
    char path[PATH_MAX];
    slots s = {.m = m, .flats = &m->params.master, .n_flats = 1};
    dpl_status config = own_writer(m) == 0 ? write_config(m, dir, DPL_F32) : DPL_OK;
    *part_out = '\0';
    DPL_TRY(dpl_path_join(dir, DPL_ST_SINGLE, path)); // as long on all ranks
    const dpl_status status = write_slots(&s, path, part_out);
    close_slots(&s);
    return config != DPL_OK ? config : status;
}

dpl_status dpl_model_save_flat(dpl_model *m, const char *path, const char *const *prefixes,
                               float *const *flats, size_t n_flats, char *part_out) {
    slots s = {.m = m, .prefixes = prefixes, .flats = flats, .n_flats = n_flats};
    *part_out = '\0';
    const dpl_status status = write_slots(&s, path, part_out);
    close_slots(&s);
    return status;
}
