/* scratch.c - see scratch.h. */
#include "scratch.h"

#include <dirent.h>
#include <malloc.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/base.h"
#include "io/io.h"

static char root[256];
static char log_text[16384];

int scratch_open(void **state) {
    (void)state;
    const char *base = getenv("TMPDIR");
    snprintf(root, sizeof root, "%.200s/dpl-test-XXXXXX", base && *base ? base : "/tmp");
    if (!mkdtemp(root)) {
        perror(root);
        return -1;
    }
    return 0;
}

int scratch_close(void **state) {
    (void)state;
    return dpl_remove_tree(root) == DPL_OK ? 0 : -1;
}

const char *scratch_path(const char *format, ...) {
    static _Thread_local char paths[16][8192];
    static _Thread_local int next;
    char *path = paths[next++ % 16];
    const int n = snprintf(path, sizeof paths[0], "%s/", root);
    va_list args;
    va_start(args, format);
    vsnprintf(path + n, sizeof paths[0] - (size_t)n, format, args);
    va_end(args);
    return path;
}

void scratch_write(const char *path, const void *data, size_t bytes) {
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(data, 1, bytes, file) != bytes || fclose(file) != 0)
        fail_msg("cannot write %s", path);
}

void scratch_text(const char *path, const char *text) {
    scratch_write(path, text, strlen(text));
}

bool scratch_holds(const char *path, const void *data, size_t bytes) {
    FILE *file = fopen(path, "rb");
    if (!file) return false;
    char *got = malloc(bytes + 1);
    const size_t n = fread(got, 1, bytes + 1, file);
    const bool same = n == bytes && memcmp(got, data, bytes) == 0;
    free(got);
    fclose(file);
    return same;
}

size_t scratch_count(const char *path) {
    DIR *dir = opendir(path);
    if (!dir) fail_msg("cannot read %s", path);
    size_t n = 0;
    const struct dirent *entry;
    while ((entry = readdir(dir))) n += strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..");
    closedir(dir);
    return n;
}

void scratch_check_error(dpl_status got, dpl_status want, const char *part, const char *part2,
                         const char *file, int line) {
    const char *text = got == DPL_OK ? "" : dpl_error_message();
    if (got == want && strstr(text, part) && strstr(text, part2)) return;
    fail_msg("%s:%d: status %d '%s'; expected %d with '%s' and '%s'", file, line, (int)got, text,
             (int)want, part, part2);
}

static void collect(void *arg, const char *line) {
    (void)arg;
    const size_t used = strlen(log_text);
    snprintf(log_text + used, sizeof log_text - used, "%s\n", line);
}

void scratch_log_start(void) {
    log_text[0] = '\0';
    dpl_log_sink(collect, NULL);
}

const char *scratch_log_stop(void) {
    dpl_log_sink(NULL, NULL);
    return log_text;
}

// A field of /proc/self/status, which Linux gives in kB.
static size_t status_bytes(const char *field) {
    char line[256];
    size_t kb = 0, n = strlen(field);
    FILE *file = fopen("/proc/self/status", "r");
    if (!file) fail_msg("no /proc/self/status");
    while (fgets(line, sizeof line, file))
        if (!strncmp(line, field, n) && sscanf(line + n, ": %zu", &kb) == 1) break;
    fclose(file);
    if (kb == 0) fail_msg("no %s in /proc/self/status", field);
    return kb << 10;
}

size_t scratch_resident_bytes(void) {
    return status_bytes("VmRSS");
}

size_t scratch_peak_bytes(void) {
    return status_bytes("VmHWM");
}

size_t scratch_used_bytes(void) {
    const struct mallinfo2 m = mallinfo2();
    return m.uordblks + m.hblkhd;
}
