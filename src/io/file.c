/*
 * file.c - mapped files for readers, all-or-nothing files and directories for writers.
 *
 * Whatever is written goes to a hidden name beside the final one, is synced, and is renamed: a
 * kill, a full disk or a power cut leaves the old state or the new one. Every write, sync and
 * rename of the folder passes through this file, so that tests can make each of them fail.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/io.h"

#define CHECKSUM_BLOCK ((size_t)1 << 20)
#define N_OPEN_MAX     32 // descriptors that a walk over a tree may hold

static atomic_size_t fault_countdown;

void dpl_fault_write(size_t nth)
{
    atomic_store(&fault_countdown, nth);
}

static bool fault_strikes(void)
{
    size_t left = atomic_load_explicit(&fault_countdown, memory_order_relaxed);
    while (left > 0) {
        if (!atomic_compare_exchange_weak(&fault_countdown, &left, left - 1)) continue;
        if (left == 1) errno = ENOSPC;
        return left == 1;
    }
    return false;
}

static dpl_status fail_long(const char *path)
{
    return dpl_fail(DPL_EIO, "path longer than %d bytes: %.60s...", PATH_MAX - 1, path);
}

/* ---- reading -------------------------------------------------------------------------------- */

dpl_status dpl_map_open(const char *path, dpl_map *map_out)
{
    if (strlen(path) >= PATH_MAX) return fail_long(path); // Else the reason is cut off.
    // A fifo without a writer would block; the kind is only known after opening.
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return dpl_fail(DPL_EIO, "cannot open %s: %m", path);
    struct stat st;
    dpl_status status = DPL_OK;
    dpl_map map = {(const uint8_t *)"", 0};
    if (fstat(fd, &st) != 0) {
        status = dpl_fail(DPL_EIO, "cannot read %s: %m", path);
    } else if (!S_ISREG(st.st_mode)) {
        status = dpl_fail(DPL_EIO, "cannot read %s: not a regular file", path);
    } else if (st.st_size > 0) { // The system refuses mappings of nothing.
        map.bytes = (size_t)st.st_size;
        void *data = mmap(NULL, map.bytes, PROT_READ, MAP_PRIVATE, fd, 0);
        map.data = data;
        if (data == MAP_FAILED) status = dpl_fail(DPL_EIO, "cannot map %s: %m", path);
    }
    close(fd);
    if (status == DPL_OK) *map_out = map;
    return status;
}

void dpl_map_close(dpl_map *map)
{
    if (map->bytes > 0) munmap((void *)(uintptr_t)map->data, map->bytes);
    *map = (dpl_map){NULL, 0};
}

dpl_status dpl_file_checksum(const char *path, uint64_t *sum_out, uint64_t *bytes_out)
{
    dpl_map map;
    DPL_TRY(dpl_map_open(path, &map));
    uint64_t sum = 0;
    for (size_t at = 0; at < map.bytes; at += CHECKSUM_BLOCK)
        sum = dpl_hash64(map.data + at, DPL_MIN(CHECKSUM_BLOCK, map.bytes - at), sum);
    *sum_out = sum;
    *bytes_out = map.bytes;
    dpl_map_close(&map);
    return DPL_OK;
}

/* ---- paths ---------------------------------------------------------------------------------- */

bool dpl_path_exists(const char *path)
{
    return access(path, F_OK) == 0;
}

bool dpl_path_is_dir(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

dpl_status dpl_path_join(const char *dir, const char *name, char *out)
{
    const size_t dir_bytes = strlen(dir), name_bytes = strlen(name);
    const bool slash = dir_bytes > 0 && dir[dir_bytes - 1] != '/';
    if (dir_bytes + slash + name_bytes + 1 > PATH_MAX) return fail_long(dir_bytes > 0 ? dir : name);
    memmove(out, dir, dir_bytes);
    if (slash) out[dir_bytes] = '/';
    memcpy(out + dir_bytes + slash, name, name_bytes + 1);
    return DPL_OK;
}

// Cuts `path` into its folder and its last name, both with room for PATH_MAX bytes.
static dpl_status split_path(const char *path, char *dir, char *name)
{
    size_t end = strlen(path);
    if (end >= PATH_MAX) return fail_long(path);
    while (end > 0 && path[end - 1] == '/')
        end--;
    size_t start = end;
    while (start > 0 && path[start - 1] != '/')
        start--;
    memcpy(name, path + start, end - start);
    name[end - start] = '\0';
    if (!*name || !strcmp(name, ".") || !strcmp(name, ".."))
        return dpl_fail(DPL_EINVAL, "'%s' does not end in a name", path);
    while (start > 1 && path[start - 1] == '/')
        start--;
    memcpy(dir, path, start);
    if (start == 0) dir[start++] = '.';
    dir[start] = '\0';
    return DPL_OK;
}

// "DIR/.NAME.tmp" for "DIR/NAME".
static dpl_status temp_path(const char *path, char *temp)
{
    char dir[PATH_MAX], name[PATH_MAX], hidden[PATH_MAX + 8];
    DPL_TRY(split_path(path, dir, name));
    snprintf(hidden, sizeof hidden, ".%s.tmp", name);
    return dpl_path_join(dir, hidden, temp);
}

dpl_status dpl_make_dirs(const char *path)
{
    char part[PATH_MAX];
    DPL_TRY(dpl_path_join(path, "", part));
    for (char *at = part + 1; part[0] && *at; at++) {
        if (*at != '/') continue;
        *at = '\0';
        if (mkdir(part, 0777) != 0 && !dpl_path_is_dir(part))
            return dpl_fail(DPL_EIO, "cannot make the folder %s: %m", part);
        *at = '/';
    }
    return DPL_OK;
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *where)
{
    (void)st, (void)kind, (void)where;
    if (remove(path) == 0) return 0;
    (void)dpl_fail(DPL_EIO, "cannot remove %s: %m", path);
    return 1;
}

dpl_status dpl_remove_tree(const char *path)
{
    const int rc = nftw(path, remove_one, N_OPEN_MAX, FTW_DEPTH | FTW_PHYS);
    if (rc == 0 || (rc < 0 && errno == ENOENT)) return DPL_OK;
    return rc > 0 ? DPL_EIO : dpl_fail(DPL_EIO, "cannot remove %s: %m", path);
}

/* ---- syncing and renaming ------------------------------------------------------------------- */

static dpl_status sync_fd(int fd, const char *path)
{
    // Some file systems have nothing to sync for a folder and say EINVAL.
    if (fault_strikes() || (fsync(fd) != 0 && errno != EINVAL))
        return dpl_fail(DPL_EIO, "cannot sync %s: %m", path);
    return DPL_OK;
}

static dpl_status sync_path(const char *path, int flags)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC | flags);
    if (fd < 0) return dpl_fail(DPL_EIO, "cannot open %s: %m", path);
    const dpl_status status = sync_fd(fd, path);
    close(fd);
    return status;
}

dpl_status dpl_sync_dir(const char *path)
{
    return sync_path(path, O_DIRECTORY);
}

static dpl_status sync_parent(const char *path)
{
    char dir[PATH_MAX], name[PATH_MAX];
    DPL_TRY(split_path(path, dir, name));
    return dpl_sync_dir(dir);
}

static int rename_path(const char *from, const char *to, unsigned flags)
{
    return fault_strikes() ? -1 : renameat2(AT_FDCWD, from, AT_FDCWD, to, flags);
}

/* ---- files ---------------------------------------------------------------------------------- */

dpl_status dpl_out_open(const char *path, dpl_out *out)
{
    char temp[PATH_MAX];
    DPL_TRY(temp_path(path, temp));
    const int fd = open(temp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (fd < 0) return dpl_fail(DPL_EIO, "cannot create %s: %m", temp);
    *out = (dpl_out){.path = dpl_strdup(path), .temp = dpl_strdup(temp), .fd = fd};
    if (out->path && out->temp) return DPL_OK;
    unlink(temp);
    dpl_out_abandon(out);
    return dpl_fail(DPL_ENOMEM, "no memory to write %s", path);
}

dpl_status dpl_out_write(dpl_out *out, const void *data, size_t bytes)
{
    const char *at = data;
    const bool fault = bytes > 0 && fault_strikes();
    size_t left = fault ? bytes / 2 : bytes;
    while (left > 0) {
        const ssize_t n = write(out->fd, at, DPL_MIN(left, (size_t)1 << 30));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return dpl_fail(DPL_EIO, "cannot write %s: %m", out->path);
        at += n;
        left -= (size_t)n;
    }
    if (!fault) return DPL_OK;
    errno = ENOSPC;
    return dpl_fail(DPL_EIO, "cannot write %s: %m", out->path);
}

dpl_status dpl_out_commit(dpl_out *out)
{
    dpl_status status = sync_fd(out->fd, out->path);
    // Some file systems report a full disk only here.
    if (close(out->fd) != 0 && status == DPL_OK)
        status = dpl_fail(DPL_EIO, "cannot write %s: %m", out->path);
    out->fd = -1;
    if (status == DPL_OK && rename_path(out->temp, out->path, 0) != 0)
        status = dpl_fail(DPL_EIO, "cannot rename %s to %s: %m", out->temp, out->path);
    if (status == DPL_OK) {
        status = sync_parent(out->path);
        dpl_free(out->temp);
        out->temp = NULL;
    }
    dpl_out_abandon(out);
    return status;
}

void dpl_out_abandon(dpl_out *out)
{
    if (out->fd >= 0) close(out->fd);
    if (out->temp) unlink(out->temp);
    dpl_free(out->temp);
    dpl_free(out->path);
    *out = (dpl_out){.fd = -1};
}

dpl_status dpl_write_file(const char *path, const void *data, size_t bytes)
{
    dpl_out out;
    DPL_TRY(dpl_out_open(path, &out));
    const dpl_status status = dpl_out_write(&out, data, bytes);
    if (status == DPL_OK) return dpl_out_commit(&out);
    dpl_out_abandon(&out);
    return status;
}

/* ---- directories ---------------------------------------------------------------------------- */

dpl_status dpl_stage_open(const char *final_path, char *staged_path_out, size_t path_size)
{
    char temp[PATH_MAX], dir[PATH_MAX], name[PATH_MAX];
    DPL_TRY(split_path(final_path, dir, name));
    DPL_TRY(temp_path(final_path, temp));
    if (strlen(temp) >= path_size)
        return dpl_fail(DPL_ENOSPC, "a path of %zu bytes does not fit in %zu: %s", strlen(temp),
                        path_size, temp);
    DPL_TRY(dpl_make_dirs(dir));
    DPL_TRY(dpl_remove_tree(temp)); // what a killed run left
    if (mkdir(temp, 0777) != 0) return dpl_fail(DPL_EIO, "cannot make the folder %s: %m", temp);
    strcpy(staged_path_out, temp);
    return DPL_OK;
}

static int sync_one(const char *path, const struct stat *st, int kind, struct FTW *where)
{
    (void)st, (void)where;
    if (kind == FTW_SL) return 0;
    return sync_path(path, O_NOFOLLOW) == DPL_OK ? 0 : 1;
}

dpl_status dpl_stage_commit(const char *staged_path, const char *final_path)
{
    const int rc = nftw(staged_path, sync_one, N_OPEN_MAX, FTW_DEPTH | FTW_PHYS);
    if (rc != 0) return rc > 0 ? DPL_EIO : dpl_fail(DPL_EIO, "cannot sync %s: %m", staged_path);
    // A plain rename serves where nothing, or an empty folder, has the name.
    bool swapped = false;
    if (rename_path(staged_path, final_path, 0) != 0) {
        swapped = errno == ENOTEMPTY || errno == EEXIST;
        if (!swapped)
            return dpl_fail(DPL_EIO, "cannot rename %s to %s: %m", staged_path, final_path);
        // Both names are whole at every moment; the old folder is removed only after the sync.
        if (rename_path(staged_path, final_path, RENAME_EXCHANGE) != 0)
            return errno == EINVAL || errno == ENOSYS
                       ? dpl_fail(DPL_ENOSUP,
                                  "this file system cannot replace %s in one step: "
                                  "remove it first",
                                  final_path)
                       : dpl_fail(DPL_EIO, "cannot replace %s: %m", final_path);
    }
    DPL_TRY(sync_parent(final_path));
    if (swapped && dpl_remove_tree(staged_path) != DPL_OK)
        dpl_log("the new %s is in place, but: %s", final_path, dpl_error_message());
    return DPL_OK;
}

void dpl_stage_abandon(const char *staged_path)
{
    if (dpl_remove_tree(staged_path) != DPL_OK) dpl_log("%s", dpl_error_message());
}
