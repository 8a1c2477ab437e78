/*
 * shards.c - the weights of a model directory: one safetensors file, or shards with an index.
 *
 * The index alone decides which files are read and which of them holds a tensor, so shards that an
 * earlier save left behind do no harm; a file and the index that disagree are an error, because
 * one of them is damaged and weights would stay at their random start.
 */
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <unistd.h>

#include "io/io.h"

#define SINGLE_NAME "model.safetensors"
#define INDEX_NAME  "model.safetensors.index.json"

typedef struct place {
    const dpl_st_tensor *tensor;
    const char *file;
} place;

struct dpl_shards {
    dpl_st_file **files;
    size_t n_files;
    place *places, *by_name; // in file order; sorted
    size_t n_places;
};

/* ---- reading -------------------------------------------------------------------------------- */

static int compare_places(const void *a, const void *b)
{
    return strcmp(((const place *)a)->tensor->name, ((const place *)b)->tensor->name);
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static dpl_status make_places(dpl_shards *shards, const char *dir)
{
    size_t n = 0;
    for (size_t i = 0; i < shards->n_files; i++)
        n += dpl_st_count(shards->files[i]);
    shards->places = dpl_alloc_array(n, sizeof *shards->places);
    shards->by_name = dpl_alloc_array(n, sizeof *shards->by_name);
    if (!shards->places || !shards->by_name)
        return dpl_fail(DPL_ENOMEM, "no memory to open %s", dir);
    for (size_t i = 0; i < shards->n_files; i++) {
        const dpl_st_file *file = shards->files[i];
        for (size_t j = 0; j < dpl_st_count(file); j++)
            shards->places[shards->n_places++] = (place){dpl_st_at(file, j), dpl_st_path(file)};
    }
    if (n > 0) memcpy(shards->by_name, shards->places, n * sizeof *shards->places);
    qsort(shards->by_name, n, sizeof *shards->by_name, compare_places);
    return DPL_OK;
}

static dpl_status open_file(dpl_shards *shards, const char *dir, const char *name)
{
    char path[PATH_MAX];
    DPL_TRY(dpl_path_join(dir, name, path));
    DPL_TRY(dpl_st_open(path, &shards->files[shards->n_files]));
    shards->n_files++;
    return DPL_OK;
}

// The distinct file names of the index, sorted; the names stay the map's.
static dpl_status list_files(const char *path, json_t *map, const char ***names_out, size_t *n_out)
{
    const char **names = dpl_alloc_array(json_object_size(map), sizeof *names);
    if (!names) return dpl_fail(DPL_ENOMEM, "no memory to read %s", path);
    const char *tensor;
    json_t *file;
    size_t n = 0, n_distinct = 0;
    json_object_foreach(map, tensor, file)
    {
        const char *name = json_string_value(file);
        if (!name || !*name || strchr(name, '/')) {
            dpl_free(names);
            return dpl_fail(DPL_EFORMAT,
                            "%s: weight_map: tensor %.200s: expected the name of a "
                            "file in this folder",
                            path, tensor);
        }
        names[n++] = name;
    }
    qsort(names, n, sizeof *names, compare_names);
    for (size_t i = 0; i < n; i++)
        if (i == 0 || strcmp(names[i], names[n_distinct - 1])) names[n_distinct++] = names[i];
    *names_out = names;
    *n_out = n_distinct;
    return DPL_OK;
}

// Every tensor of the index must be in its file, and every tensor of the files in the index.
static dpl_status compare_with_index(const dpl_shards *shards, const char *path, json_t *map)
{
    for (size_t i = 0; i < shards->n_places; i++) {
        const place *p = &shards->places[i];
        const char *listed = json_string_value(json_object_get(map, p->tensor->name));
        if (!listed || strcmp(listed, strrchr(p->file, '/') + 1))
            return dpl_fail(DPL_EFORMAT, "%s: holds tensor %.200s, which %s puts %s%s", p->file,
                            p->tensor->name, path, listed ? "in " : "nowhere",
                            listed ? listed : "");
    }
    const char *name;
    json_t *file;
    json_object_foreach(map, name, file)
    {
        if (!dpl_shards_find(shards, name, NULL))
            return dpl_fail(DPL_EFORMAT, "%s: weight_map: tensor %.200s is not in %s", path, name,
                            json_string_value(file));
    }
    return DPL_OK;
}

// Public models exist whose total_size is wrong though all weights are there.
static void check_total(const dpl_shards *shards, const char *path, const json_t *index)
{
    const json_t *total = json_object_get(json_object_get(index, "metadata"), "total_size");
    uint64_t bytes = 0;
    for (size_t i = 0; i < shards->n_places; i++)
        bytes += shards->places[i].tensor->bytes;
    if (json_is_number(total) && json_number_value(total) != (double)bytes)
        dpl_log("note: %s: total_size is %.0f, but its tensors have %llu bytes", path,
                json_number_value(total), (unsigned long long)bytes);
}

static dpl_status open_index(dpl_shards *shards, const char *dir, const char *path, json_t *index)
{
    json_t *map = json_object_get(index, "weight_map");
    if (!json_is_object(map)) return dpl_fail(DPL_EFORMAT, "%s: no object named weight_map", path);
    const char **names = NULL;
    size_t n_names = 0;
    DPL_TRY(list_files(path, map, &names, &n_names));
    shards->files = dpl_alloc_array(n_names, sizeof *shards->files);
    dpl_status status = DPL_OK;
    if (!shards->files) status = dpl_fail(DPL_ENOMEM, "no memory to open %s", dir);
    for (size_t i = 0; i < n_names && status == DPL_OK; i++)
        status = open_file(shards, dir, names[i]);
    dpl_free(names);
    DPL_TRY(status);
    DPL_TRY(make_places(shards, dir));
    DPL_TRY(compare_with_index(shards, path, map));
    check_total(shards, path, index);
    return DPL_OK;
}

static dpl_status open_single(dpl_shards *shards, const char *dir)
{
    shards->files = dpl_alloc_array(1, sizeof *shards->files);
    if (!shards->files) return dpl_fail(DPL_ENOMEM, "no memory to open %s", dir);
    DPL_TRY(open_file(shards, dir, SINGLE_NAME));
    return make_places(shards, dir);
}

dpl_status dpl_shards_open(const char *dir, dpl_shards **shards_out)
{
    char single[PATH_MAX], index_path[PATH_MAX];
    DPL_TRY(dpl_path_join(dir, SINGLE_NAME, single));
    DPL_TRY(dpl_path_join(dir, INDEX_NAME, index_path));
    const bool has_single = dpl_path_exists(single), has_index = dpl_path_exists(index_path);
    if (!has_single && !has_index)
        return dpl_fail(DPL_EIO, "%s: neither " SINGLE_NAME " nor " INDEX_NAME " is there", dir);
    if (has_single && has_index)
        dpl_log("note: %s has " SINGLE_NAME " and an index; the index is not used", dir);
    dpl_shards *shards = dpl_alloc(sizeof *shards);
    if (!shards) return dpl_fail(DPL_ENOMEM, "no memory to open %s", dir);
    json_t *index = NULL;
    dpl_status status;
    if (has_single)
        status = open_single(shards, dir);
    else if ((status = dpl_json_read(index_path, &index)) == DPL_OK)
        status = open_index(shards, dir, index_path, index);
    json_decref(index);
    if (status == DPL_OK)
        *shards_out = shards;
    else
        dpl_shards_close(&shards);
    return status;
}

void dpl_shards_close(dpl_shards **shards)
{
    if (!shards || !*shards) return;
    for (size_t i = 0; i < (*shards)->n_files; i++)
        dpl_st_close(&(*shards)->files[i]);
    dpl_free((*shards)->by_name);
    dpl_free((*shards)->places);
    dpl_free((*shards)->files);
    dpl_free(*shards);
    *shards = NULL;
}

size_t dpl_shards_count(const dpl_shards *shards)
{
    return shards->n_places;
}

const dpl_st_tensor *dpl_shards_at(const dpl_shards *shards, size_t i, const char **file_out)
{
    if (file_out) *file_out = shards->places[i].file;
    return shards->places[i].tensor;
}

const dpl_st_tensor *dpl_shards_find(const dpl_shards *shards, const char *name,
                                     const char **file_out)
{
    const dpl_st_tensor key = {.name = name};
    const place wanted = {.tensor = &key};
    const place *found = bsearch(&wanted, shards->by_name, shards->n_places,
                                 sizeof *shards->by_name, compare_places);
    if (!found) return NULL;
    if (file_out) *file_out = found->file;
    return found->tensor;
}

/* ---- writing -------------------------------------------------------------------------------- */

typedef struct shard_plan {
    const char *dir;
    dpl_st_tensor *tensors; // in the order of writing
    size_t *source;         // their numbers in the caller's list
    size_t *shard_end;      // the first tensor of the next shard
    size_t n_tensors, n_shards;
    uint64_t total_bytes;
    dpl_fill_fn fill;
    void *arg;
} shard_plan;

static void shard_name(const shard_plan *plan, size_t i_shard, char name[64])
{
    if (plan->n_shards == 1)
        strcpy(name, SINGLE_NAME);
    else
        snprintf(name, 64, "model-%05zu-of-%05zu.safetensors", i_shard + 1, plan->n_shards);
}

// Orders the tensors by width and cuts them into shards.
static dpl_status make_plan(shard_plan *plan, const dpl_st_tensor *tensors, size_t shard_bytes)
{
    const size_t n = plan->n_tensors;
    plan->tensors = dpl_alloc_array(n, sizeof *plan->tensors);
    plan->source = dpl_alloc_array(n, sizeof *plan->source);
    plan->shard_end = dpl_alloc_array(n + 1, sizeof *plan->shard_end);
    if (!plan->tensors || !plan->source || !plan->shard_end)
        return dpl_fail(DPL_ENOMEM, "no memory to write %s", plan->dir);
    size_t n_placed = 0, in_shard = 0;
    for (size_t width = 8; width > 0; width /= 2) {
        for (size_t i = 0; i < n; i++) {
            if ((unsigned)tensors[i].dtype >= DPL_ST_N || tensors[i].rank < 0 ||
                tensors[i].rank > DPL_ST_RANK_MAX)
                return dpl_fail(DPL_EINVAL, "tensor %s has no valid dtype and shape",
                                tensors[i].name);
            if (dpl_st_dtype_bytes(tensors[i].dtype) != width) continue;
            dpl_st_tensor *tensor = &plan->tensors[n_placed];
            *tensor = tensors[i];
            tensor->bytes = dpl_st_elems(tensor) * width;
            if (shard_bytes > 0 && in_shard > 0 && tensor->bytes > shard_bytes - in_shard) {
                plan->shard_end[plan->n_shards++] = n_placed;
                in_shard = 0;
            }
            // A shard whose one tensor is too large is full, and no more.
            in_shard = DPL_MIN(in_shard + tensor->bytes, shard_bytes);
            plan->total_bytes += tensor->bytes;
            plan->source[n_placed++] = i;
        }
    }
    plan->shard_end[plan->n_shards++] = n;
    return DPL_OK;
}

static dpl_status make_index(const shard_plan *plan, json_t **index_out)
{
    json_t *map = json_object();
    json_t *index = json_pack("{s:{s:I}, s:o}", "metadata", "total_size",
                              (json_int_t)plan->total_bytes, "weight_map", map);
    if (!index) return dpl_fail(DPL_ENOMEM, "no memory to write %s", plan->dir);
    dpl_status status = DPL_OK;
    for (size_t i = 0, shard = 0; i < plan->n_tensors && status == DPL_OK; i++) {
        while (i >= plan->shard_end[shard])
            shard++;
        const char *name = plan->tensors[i].name;
        char file[64];
        shard_name(plan, shard, file);
        if (json_object_get(map, name))
            status = dpl_fail(DPL_EINVAL, "%s: the name %s is taken", plan->dir, name);
        else if (json_object_set_new(map, name, json_string(file)) != 0)
            status = dpl_fail(DPL_EINVAL, "%s: the name %s is not UTF-8", plan->dir, name);
    }
    if (status == DPL_OK)
        *index_out = index;
    else
        json_decref(index);
    return status;
}

static dpl_status write_shard(const shard_plan *plan, size_t i_shard)
{
    static const char *const metadata[] = {"format", "pt", NULL};
    const size_t first = i_shard > 0 ? plan->shard_end[i_shard - 1] : 0;
    const size_t end = plan->shard_end[i_shard];
    char name[64], path[PATH_MAX];
    shard_name(plan, i_shard, name);
    DPL_TRY(dpl_path_join(plan->dir, name, path));
    dpl_st_writer *writer;
    DPL_TRY(dpl_st_create(path, plan->tensors + first, end - first, metadata, &writer));
    dpl_status status = DPL_OK;
    for (size_t i = first; i < end && status == DPL_OK; i++) {
        const uint64_t before = dpl_st_appended(writer);
        status = plan->fill(plan->arg, plan->source[i], writer);
        const uint64_t filled = dpl_st_appended(writer) - before;
        if (status == DPL_OK && filled != plan->tensors[i].bytes)
            status = dpl_fail(DPL_EINVAL, "%s: tensor %s got %llu bytes, expected %llu", path,
                              plan->tensors[i].name, (unsigned long long)filled,
                              (unsigned long long)plan->tensors[i].bytes);
    }
    if (status == DPL_OK) return dpl_st_finish(&writer);
    dpl_st_abandon(&writer);
    return status;
}

// Removes files of an earlier save that the new one did not replace.
static dpl_status remove_stale(const shard_plan *plan)
{
    DIR *dir = opendir(plan->dir);
    if (!dir) return dpl_fail(DPL_EIO, "cannot read the folder %s: %m", plan->dir);
    dpl_status status = DPL_OK;
    const struct dirent *entry;
    while (status == DPL_OK && (entry = readdir(dir))) {
        size_t i = 0, n = 0;
        int end = 0;
        sscanf(entry->d_name, "model-%5zu-of-%5zu.safetensors%n", &i, &n, &end);
        const bool is_shard = end > 0 && !entry->d_name[end];
        const bool kept = plan->n_shards > 1 && n == plan->n_shards && i >= 1 && i <= n;
        const char *other = plan->n_shards > 1 ? SINGLE_NAME : INDEX_NAME;
        if ((!is_shard || kept) && strcmp(entry->d_name, other)) continue;
        if (unlinkat(dirfd(dir), entry->d_name, 0) != 0)
            status = dpl_fail(DPL_EIO, "cannot remove %s/%s: %m", plan->dir, entry->d_name);
    }
    closedir(dir);
    return status;
}

dpl_status dpl_shards_write(const char *dir, const dpl_st_tensor *tensors, size_t n_tensors,
                            size_t shard_bytes, dpl_fill_fn fill, void *arg)
{
    shard_plan plan = {.dir = dir, .n_tensors = n_tensors, .fill = fill, .arg = arg};
    json_t *index = NULL;
    dpl_status status = make_plan(&plan, tensors, shard_bytes);
    if (status == DPL_OK) status = make_index(&plan, &index);
    for (size_t i = 0; i < plan.n_shards && status == DPL_OK; i++)
        status = write_shard(&plan, i);
    char path[PATH_MAX];
    if (status == DPL_OK && plan.n_shards > 1) {
        status = dpl_path_join(dir, INDEX_NAME, path);
        if (status == DPL_OK) status = dpl_json_write(path, index);
    }
    if (status == DPL_OK) status = remove_stale(&plan);
    json_decref(index);
    dpl_free(plan.shard_end);
    dpl_free(plan.source);
    dpl_free(plan.tensors);
    return status;
}
