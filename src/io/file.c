// file.c - mapped files for readers, all-or-nothing files and directories for writers.
//
// Whatever is written goes to a hidden name beside the final one, is synced, and is renamed: a
// kill, a full disk or a power cut leaves the old state or the new one. Every write, sync and
// rename of the folder passes through this file, so that tests can make each of them fail.
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <libgen.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/io.h"

#define PIECE_BYTES ((size_t)32 << 20) // between two signs of life

static atomic_size_t fault_countdown;

void dpl_fault_write(size_t nth) {
    atomic_store(&fault_countdown, nth);
}

static bool fault_strikes(void) {
    size_t left = atomic_load(&fault_countdown);
    while (left > 0 && !atomic_compare_exchange_weak(&fault_countdown, &left, left - 1)) continue;
    if (left == 1) errno = ENOSPC;
    return left == 1;
}

static dpl_status fail_long(const char *path) {
    return dpl_fail(DPL_EIO, "path longer than %d bytes: %.60s...", PATH_MAX - 1, path);
}

/* ---- reading -------------------------------------------------------------------------------- */
dpl_status dpl_map_open(const char *path, dpl_map *map_out) {
    if (strlen(path) >= PATH_MAX) return fail_long(path); // Else the reason is cut off.
    // A fifo without a writer would block; the kind is only known after opening.
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return dpl_fail(DPL_EIO, "cannot open %s: %m", path);
    struct stat st;
    void *data = fstat(fd, &st) == 0 ? NULL : MAP_FAILED;
    const bool regular = !data && S_ISREG(st.st_mode);
    if (regular && st.st_size > 0) // The system refuses mappings of nothing.
        data = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (data == MAP_FAILED) return dpl_fail(DPL_EIO, "cannot read %s: %m", path);
    if (!regular) return dpl_fail(DPL_EIO, "cannot read %s: not a regular file", path);
    *map_out = (dpl_map){data ? data : "", (size_t)st.st_size};
    return DPL_OK;
}

void dpl_map_close(dpl_map *map) {
    if (map->bytes > 0) munmap((void *)(uintptr_t)map->data, map->bytes);
    *map = (dpl_map){NULL, 0};
}

/* ---- paths ---------------------------------------------------------------------------------- */
bool dpl_path_exists(const char *path) {
    return access(path, F_OK) == 0;
}

bool dpl_path_is_dir(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

dpl_status dpl_path_join(const char *dir, const char *name, char *out) {
    const size_t n = strlen(dir);
    const bool slash = n > 0 && dir[n - 1] != '/';
    if (n + slash + strlen(name) >= PATH_MAX) return fail_long(n > 0 ? dir : name);
    memmove(out, dir, n + 1);
    strcpy(stpcpy(out + n, slash ? "/" : ""), name);
    return DPL_OK;
}

static dpl_status name_out(const char *path, dpl_out *out) {
    char copy[PATH_MAX], hidden[PATH_MAX + 8];
    if (strlen(path) >= PATH_MAX) return fail_long(path);
    const char *name = basename(strcpy(copy, path));
    DPL_CHECK(*name != '/' && strcmp(name, ".") && strcmp(name, ".."),
              "'%s' does not end in a name", path);
    snprintf(hidden, sizeof hidden, ".%s.tmp", name);
    strcpy(out->path, path);
    strcpy(out->dir, dirname(copy));
    out->fd = -1;
    return dpl_path_join(out->dir, hidden, out->temp);
}

dpl_status dpl_make_dirs(const char *path) {
    char part[PATH_MAX];
    DPL_TRY(dpl_path_join(path, "", part));
    for (char *at = part; (at = strchr(at + 1, '/')); *at = '/') {
        *at = '\0';
        const int error = mkdir(part, 0777) == 0 ? 0 : errno;
        DPL_EXPECT(error == 0 || dpl_path_is_dir(part), DPL_EIO, "cannot make the folder %s: %s",
                   part, strerror(error));
    }
    return DPL_OK;
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *where) {
    (void)st, (void)kind, (void)where;
    dpl_busy();
    return remove(path) == 0 ? 0 : (int)dpl_fail(DPL_EIO, "cannot remove %s: %m", path);
}

// Calls fn for everything below `path` and for itself, contents before their folder.
static dpl_status walk(const char *path, __nftw_func_t fn) {
    const int rc = nftw(path, fn, 32, FTW_DEPTH | FTW_PHYS); // 32 descriptors at most
    if (rc != -1) return (dpl_status)rc;                     // fn's own, which is never DPL_EINVAL
    return errno == ENOENT ? DPL_OK : dpl_fail(DPL_EIO, "cannot read %s: %m", path);
}

dpl_status dpl_remove_tree(const char *path) {
    return walk(path, remove_one);
}

/* ---- syncing and renaming ------------------------------------------------------------------- */
static dpl_status sync_fd(int fd, const char *path) {
    // Some file systems have nothing to sync for a folder and say EINVAL.
    const bool good = !fault_strikes() && (fsync(fd) == 0 || errno == EINVAL);
    return good ? DPL_OK : dpl_fail(DPL_EIO, "cannot sync %s: %m", path);
}

static dpl_status sync_path(const char *path) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return dpl_fail(DPL_EIO, "cannot open %s: %m", path);
    const dpl_status status = sync_fd(fd, path);
    close(fd);
    return status;
}

static int sync_one(const char *path, const struct stat *st, int kind, struct FTW *where) {
    (void)st, (void)where;
    dpl_busy();
    return kind == FTW_SL ? 0 : (int)sync_path(path);
}

static int rename_path(const char *from, const char *to, unsigned flags) {
    return fault_strikes() ? -1 : renameat2(AT_FDCWD, from, AT_FDCWD, to, flags);
}

// Gives `temp` the name `path`, in `dir`. A plain rename serves for files, and where nothing, or an
// empty folder, has the name. Else the names are swapped, so that both folders are whole at every
// moment; the old one goes after the sync.
static dpl_status put_in_place(const char *temp, const char *path, const char *dir) {
    int rc = rename_path(temp, path, 0);
    const bool swap = rc != 0 && (errno == ENOTEMPTY || errno == EEXIST);
    if (swap) rc = rename_path(temp, path, RENAME_EXCHANGE);
    DPL_EXPECT(rc == 0 || !swap || (errno != EINVAL && errno != ENOSYS), DPL_ENOSUP,
               "this file system cannot replace %s in one step: remove it first", path);
    DPL_EXPECT(rc == 0, DPL_EIO, "cannot rename %s to %s: %m", temp, path);
    DPL_TRY(sync_path(dir));
    if (swap && dpl_remove_tree(temp) != DPL_OK)
        dpl_log("the new %s is in place, but: %s", path, dpl_error_message());
    return DPL_OK;
}

/* ---- writing -------------------------------------------------------------------------------- */
dpl_status dpl_out_open(const char *path, dpl_out *out) {
    DPL_TRY(name_out(path, out));
    out->fd = open(out->temp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666);
    DPL_EXPECT(out->fd >= 0, DPL_EIO, "cannot create %s: %m", out->temp);
    return DPL_OK;
}

dpl_status dpl_out_open_dir(const char *path, dpl_out *out) {
    DPL_TRY(name_out(path, out));
    DPL_TRY(dpl_remove_tree(out->temp)); // what a killed run left
    return dpl_make_dirs(out->temp);
}

// Pages go to the disk as they are written, so that the sync at the end does not take minutes.
static void write_back(dpl_out *out, size_t n) {
    out->dirty_bytes += n;
    if (out->dirty_bytes < PIECE_BYTES) return;
    (void)sync_file_range(out->fd, 0, 0, // all: what was begun before is waited for
                          SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE);
    out->dirty_bytes = 0;
    dpl_busy();
}

dpl_status dpl_out_write(dpl_out *out, const void *data, size_t bytes) {
    const char *at = data;
    const bool fault = bytes > 0 && fault_strikes();
    for (size_t left = fault ? bytes / 2 : bytes; left > 0;) {
        const ssize_t n = write(out->fd, at, DPL_MIN(left, PIECE_BYTES));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return dpl_fail(DPL_EIO, "cannot write %s: %m", out->path);
        at += n;
        left -= (size_t)n;
        write_back(out, (size_t)n);
    }
    return fault ? dpl_fail(DPL_EIO, "cannot write %s: %s", out->path, strerror(ENOSPC)) : DPL_OK;
}

dpl_status dpl_out_close(dpl_out *out, dpl_status status) {
    const bool folder = out->fd < 0;
    if (status == DPL_OK) status = folder ? walk(out->temp, sync_one) : sync_fd(out->fd, out->path);
    // Some file systems report a full disk only here.
    if (!folder && close(out->fd) != 0 && status == DPL_OK)
        status = dpl_fail(DPL_EIO, "cannot write %s: %m", out->path);
    if (status == DPL_OK) status = put_in_place(out->temp, out->path, out->dir);
    if (status != DPL_OK && dpl_remove_tree(out->temp) != DPL_OK)
        dpl_log("%s", dpl_error_message());
    return status;
}

dpl_status dpl_write_file(const char *path, const void *data, size_t bytes) {
    dpl_out out;
    DPL_TRY(dpl_out_open(path, &out));
    return dpl_out_close(&out, dpl_out_write(&out, data, bytes));
}
