// weights.c - model directories: config.json and safetensors, written as transformers reads them.
//
// Reading is strict: every tensor of the model is found exactly once with the right shape, and a
// tensor that the model does not know is an error, so that nothing is dropped silently or left at
// its initial value.
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

#include "io/io.h"
#include "model/model.h"

dpl_status dpl_model_read_config(const char *dir, dpl_model_config *config_out,
                                 dpl_dtype *dtype_out)
{
    char path[PATH_MAX];
    DPL_TRY(dpl_path_join(dir, "config.json", path));
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

static size_t largest_elems(const dpl_model *m)
{
    size_t largest = m->config.vocab * m->config.d;
    for (size_t i = 0; i < m->n_disk; i++)
        largest = DPL_MAX(largest, dpl_disk_elems(&m->disk[i]));
    return largest;
}

/* ---- reading ---- */

static dpl_status check_shape(const dpl_disk_tensor *want, const dpl_st_tensor *got,
                              const char *file)
{
    const int64_t rows = got->rank > 0 ? got->shape[0] : 1;
    const int64_t cols = got->rank > 1 ? got->shape[1] : 1;
    if (got->rank == want->rank && rows == want->shape[0] && cols == want->shape[1]) return DPL_OK;
    return dpl_fail(DPL_EFORMAT, "%s: \"%s\" has rank %d and shape (%lld, %lld), expected rank %d "
                    "and (%lld, %lld)", file, got->name, got->rank, (long long)rows,
                    (long long)cols, want->rank, (long long)want->shape[0],
                    (long long)want->shape[1]);
}

// values and other: as large as the tensor. A copy must equal what it repeats.
static dpl_status read_tensor(dpl_model *m, const dpl_disk_tensor *want, const dpl_st_tensor *got,
                              const char *file, float *values, float *other)
{
    DPL_TRY(check_shape(want, got, file));
    const size_t n = dpl_disk_elems(want);
    const dpl_status status = dpl_st_read_f32(got, 0, n, want->bias ? want->bias : values);
    if (status != DPL_OK) return dpl_fail_in(status, "%s", file);
    if (want->bias) return DPL_OK;
    if (!want->copy_of_shared) {
        dpl_disk_scatter(want, m->params.master, values);
        return DPL_OK;
    }
    dpl_disk_gather(want, m->params.master, other);
    if (memcmp(values, other, n * sizeof(float)) == 0) return DPL_OK;
    return dpl_fail(DPL_EFORMAT, "%s: \"%s\" differs from the embedding or head that it must repeat",
                    file, got->name);
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const dpl_disk_tensor *const *)a)[0]->name,
                  ((const dpl_disk_tensor *const *)b)[0]->name);
}

// Tensors that public files carry beside the model's: of layers after its last one, rotary tables.
static bool is_known_extra(const dpl_model *m, const char *name)
{
    static const char layers[] = "model.layers.", rotary[] = "rotary_emb.inv_freq";
    const size_t n = strlen(name), n_layers = sizeof layers - 1, n_rotary = sizeof rotary - 1;
    if (strncmp(name, layers, n_layers) == 0 && name[n_layers] >= '0' && name[n_layers] <= '9') {
        char *end;
        const unsigned long long layer = strtoull(name + n_layers, &end, 10);
        if (*end == '.' && layer >= m->config.n_layers + m->config.n_mtp) return true;
    }
    return n >= n_rotary && strcmp(name + n - n_rotary, rotary) == 0;
}

typedef struct name_list { // the first few names, and how many there are
    size_t n, used;
    char text[320];
} name_list;

static void list_name(name_list *list, const char *name)
{
    const size_t room = sizeof list->text - list->used;
    const int more = snprintf(list->text + list->used, room, "%s\"%s\"", list->n ? ", " : "", name);
    if (more > 0 && (size_t)more < room)
        list->used += (size_t)more;
    else
        list->text[list->used] = '\0';
    list->n++;
}

static void list_unknown(const dpl_model *m, const dpl_shards *shards,
                         const dpl_disk_tensor **sorted, name_list *unknown)
{
    size_t n_ignored = 0;
    for (size_t i = 0; i < dpl_shards_count(shards); i++) {
        dpl_disk_tensor key;
        const dpl_disk_tensor *key_p = &key;
        const char *name = dpl_shards_at(shards, i, NULL)->name;
        snprintf(key.name, sizeof key.name, "%s", name);
        if (strlen(name) < sizeof key.name &&
            bsearch(&key_p, sorted, m->n_disk, sizeof *sorted, compare_names))
            continue;
        if (m->config.tied && strcmp(name, "lm_head.weight") == 0) continue; // checked later
        if (is_known_extra(m, name))
            n_ignored++;
        else
            list_name(unknown, name);
    }
    if (n_ignored) dpl_log("%zu tensors beyond this model's layers were left unread", n_ignored);
}

// The names in the files are those of the model. Both kinds of deviation stand in one message: a
// renamed tensor is one of each.
static dpl_status check_names(const dpl_model *m, const dpl_shards *shards, const char *dir)
{
    const dpl_disk_tensor **sorted = dpl_alloc_array(m->n_disk, sizeof(dpl_disk_tensor *));
    if (!sorted) return dpl_fail(DPL_ENOMEM, "no memory to check %zu tensor names", m->n_disk);
    name_list missing = {0}, unknown = {0};
    for (size_t i = 0; i < m->n_disk; i++) {
        sorted[i] = &m->disk[i];
        if (!m->disk[i].copy_of_shared && !dpl_shards_find(shards, m->disk[i].name, NULL))
            list_name(&missing, m->disk[i].name);
    }
    qsort(sorted, m->n_disk, sizeof *sorted, compare_names);
    list_unknown(m, shards, sorted, &unknown);
    dpl_free(sorted);
    if (missing.n == 0 && unknown.n == 0) return DPL_OK;
    if (missing.n == 0)
        return dpl_fail(DPL_EFORMAT, "%s: %zu tensors are not this model's: %s", dir, unknown.n,
                        unknown.text);
    if (unknown.n == 0)
        return dpl_fail(DPL_EFORMAT, "%s: %zu tensors are missing: %s", dir, missing.n,
                        missing.text);
    return dpl_fail(DPL_EFORMAT, "%s: %zu tensors are missing: %s; %zu are not this model's: %s",
                    dir, missing.n, missing.text, unknown.n, unknown.text);
}

static dpl_status check_tied_head(dpl_model *m, const dpl_shards *shards, float *values,
                                  float *other)
{
    const char *file;
    const dpl_st_tensor *head = m->config.tied ? dpl_shards_find(shards, "lm_head.weight", &file)
                                               : NULL;
    if (!head) return DPL_OK;
    dpl_disk_tensor want = m->disk[0]; // the embedding stands first
    want.copy_of_shared = true;
    return read_tensor(m, &want, head, file, values, other);
}

// Copies come last: what they repeat must be there.
static dpl_status read_all(dpl_model *m, const dpl_shards *shards, float *values, float *other)
{
    for (int copies = 0; copies < 2; copies++)
        for (size_t i = 0; i < m->n_disk; i++) {
            const char *file;
            const dpl_st_tensor *got = dpl_shards_find(shards, m->disk[i].name, &file);
            if (got && m->disk[i].copy_of_shared == (copies == 1))
                DPL_TRY(read_tensor(m, &m->disk[i], got, file, values, other));
        }
    return check_tied_head(m, shards, values, other);
}

dpl_status dpl_model_load(dpl_model *m, const char *dir)
{
    dpl_shards *shards;
    DPL_TRY(dpl_shards_open(dir, &shards));
    const size_t n = largest_elems(m);
    float *values = dpl_alloc_array(2 * n, sizeof(float));
    dpl_status status = check_names(m, shards, dir);
    if (status == DPL_OK && !values)
        status = dpl_fail(DPL_ENOMEM, "no memory to read tensors of %zu elements", n);
    if (status == DPL_OK) status = read_all(m, shards, values, values + n);
    if (status == DPL_OK) dpl_model_refresh(m);
    dpl_free(values);
    dpl_shards_close(&shards);
    return status;
}

/* ---- writing ---- */

typedef struct fill_arg {
    dpl_model *model;
    float *values;
    uint16_t *halves;
    const dpl_st_tensor *tensors;
} fill_arg;

static dpl_status fill_model(void *p, size_t i, dpl_st_writer *writer)
{
    const fill_arg *arg = p;
    const dpl_disk_tensor *t = &arg->model->disk[i];
    const size_t n = dpl_disk_elems(t);
    if (t->bias) return dpl_st_append(writer, t->bias, n * sizeof(float));
    dpl_disk_gather(t, arg->model->params.master, arg->values);
    if (arg->tensors[i].dtype == DPL_ST_F32)
        return dpl_st_append(writer, arg->values, n * sizeof(float));
    for (size_t j = 0; j < n; j++)
        arg->halves[j] = dpl_f32_to_bf16(arg->values[j]);
    return dpl_st_append(writer, arg->halves, n * sizeof(uint16_t));
}

static void describe(const dpl_disk_tensor *t, const char *name, dpl_st_dtype dtype,
                     dpl_st_tensor *out)
{
    *out = (dpl_st_tensor){.name = name, .dtype = dtype, .rank = t->rank,
                           .shape = {t->shape[0], t->shape[1]},
                           .bytes = dpl_disk_elems(t) * dpl_st_dtype_bytes(dtype)};
}

static dpl_status write_config(const dpl_model *m, const char *dir, dpl_dtype dtype)
{
    char path[PATH_MAX];
    DPL_TRY(dpl_path_join(dir, "config.json", path));
    json_t *object = dpl_model_config_to_json(&m->config, dtype);
    if (!object) return dpl_fail(DPL_ENOMEM, "no memory for %s", path);
    const dpl_status status = dpl_json_write(path, object);
    json_decref(object);
    return status;
}

dpl_status dpl_model_save(dpl_model *m, const char *dir, dpl_dtype dtype, size_t shard_bytes)
{
    const size_t n = largest_elems(m);
    dpl_st_tensor *tensors = dpl_alloc_array(m->n_disk, sizeof *tensors);
    fill_arg arg = {m, dpl_alloc_array(n, sizeof(float)), dpl_alloc_array(n, sizeof(uint16_t)),
                    tensors};
    dpl_status status = tensors && arg.values && arg.halves
                            ? write_config(m, dir, dtype)
                            : dpl_fail(DPL_ENOMEM, "no memory to write tensors of %zu elements", n);
    for (size_t i = 0; i < m->n_disk && status == DPL_OK; i++) {
        const dpl_disk_tensor *t = &m->disk[i];
        // The router and its bias choose experts: they stay fp32, as transformers keeps them.
        const bool f32 = dtype == DPL_F32 || t->bias || t->param->id == DPL_P_ROUTER;
        describe(t, t->name, f32 ? DPL_ST_F32 : DPL_ST_BF16, &tensors[i]);
    }
    dpl_ctx_wait(m->ctx);
    if (status == DPL_OK)
        status = dpl_shards_write(dir, tensors, m->n_disk, shard_bytes, fill_model, &arg);
    dpl_free(arg.values);
    dpl_free(arg.halves);
    dpl_free(tensors);
    return status;
}

/* ---- flat arrays (moments) ---- */

typedef struct flat_name {
    char text[192];
} flat_name;

// The tensors of all flat arrays in order: element i is disk tensor i % n_disk of flat i / n_disk, or
// NULL where the optimizer does not know it. Its name is a prefix and its name on disk.
static const dpl_disk_tensor *flat_at(const dpl_model *m, const char *const *prefixes, size_t i,
                                      flat_name *name_out)
{
    const dpl_disk_tensor *t = &m->disk[i % m->n_disk];
    if (!t->param || t->copy_of_shared) return NULL;
    snprintf(name_out->text, sizeof name_out->text, "%s%s", prefixes[i / m->n_disk], t->name);
    return t;
}

static dpl_status write_flat(dpl_model *m, const char *path, const char *const *prefixes,
                             float *const *flats, size_t n, flat_name *names,
                             dpl_st_tensor *tensors, float *values)
{
    dpl_st_writer *writer;
    const dpl_disk_tensor *t;
    size_t n_tensors = 0;
    for (size_t i = 0; i < n; i++)
        if ((t = flat_at(m, prefixes, i, &names[i])))
            describe(t, names[i].text, DPL_ST_F32, &tensors[n_tensors++]);
    DPL_TRY(dpl_st_create(path, tensors, n_tensors, NULL, &writer));
    dpl_status status = DPL_OK;
    for (size_t i = 0; i < n && status == DPL_OK; i++) {
        if (!(t = flat_at(m, prefixes, i, &names[i]))) continue;
        dpl_disk_gather(t, flats[i / m->n_disk], values);
        status = dpl_st_append(writer, values, dpl_disk_elems(t) * sizeof(float));
    }
    if (status == DPL_OK) status = dpl_st_finish(&writer);
    dpl_st_abandon(&writer);
    return status;
}

dpl_status dpl_model_save_flat(dpl_model *m, const char *path, const char *const *prefixes,
                               float *const *flats, size_t n_flats)
{
    const size_t n = m->n_disk * n_flats;
    dpl_st_tensor *tensors = dpl_alloc_array(n, sizeof *tensors);
    flat_name *names = dpl_alloc_array(n, sizeof *names);
    float *values = dpl_alloc_array(largest_elems(m), sizeof(float));
    dpl_ctx_wait(m->ctx);
    const dpl_status status =
        tensors && names && values
            ? write_flat(m, path, prefixes, flats, n, names, tensors, values)
            : dpl_fail(DPL_ENOMEM, "no memory to write %zu tensors", n);
    dpl_free(tensors);
    dpl_free(names);
    dpl_free(values);
    return status;
}

static dpl_status read_flat(dpl_model *m, const dpl_st_file *file, const char *const *prefixes,
                            float *const *flats, size_t n, float *values)
{
    for (size_t i = 0; i < n; i++) {
        flat_name name;
        const dpl_disk_tensor *t = flat_at(m, prefixes, i, &name);
        if (!t) continue;
        const dpl_st_tensor *got = dpl_st_find(file, name.text);
        if (!got)
            return dpl_fail(DPL_EFORMAT, "%s: tensor \"%s\" is missing", dpl_st_path(file),
                            name.text);
        DPL_TRY(check_shape(t, got, dpl_st_path(file)));
        DPL_TRY(dpl_st_read_f32(got, 0, dpl_disk_elems(t), values));
        dpl_disk_scatter(t, flats[i / m->n_disk], values);
    }
    return DPL_OK;
}

dpl_status dpl_model_load_flat(dpl_model *m, const char *path, const char *const *prefixes,
                               float *const *flats, size_t n_flats)
{
    dpl_st_file *file;
    DPL_TRY(dpl_st_open(path, &file));
    const size_t n = largest_elems(m);
    float *values = dpl_alloc_array(n, sizeof(float));
    const dpl_status status =
        values ? read_flat(m, file, prefixes, flats, m->n_disk * n_flats, values)
               : dpl_fail(DPL_ENOMEM, "no memory for a tensor of %zu elements", n);
    dpl_free(values);
    dpl_st_close(&file);
    return status;
}
