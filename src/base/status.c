// status.c - error texts, the log line and the clock.
//
// The error text belongs to the thread that failed, so two contexts on two threads never read each
// other's. A text is formatted aside and copied, because an argument may be the old text itself.
#include <stdarg.h>
#include <stdio.h>
#include <time.h>

#include "base/base.h"

#define TEXT_BYTES 1024

static _Thread_local char error_text[TEXT_BYTES];

static dpl_log_fn log_fn;
static void *log_arg;

const char *dpl_status_text(dpl_status status) {
    switch (status) {
#define STATUS_CASE(name, value, text) \
    case DPL_##name:                   \
        return text;
        DPL_STATUS_MAP(STATUS_CASE)
#undef STATUS_CASE
    }
    return "unknown status";
}

static _Thread_local dpl_busy_fn busy_fn;
static _Thread_local void *busy_arg;

void dpl_busy_hook(dpl_busy_fn fn, void *arg) {
    busy_fn = fn;
    busy_arg = arg;
}

void dpl_busy(void) {
    if (busy_fn) busy_fn(busy_arg);
}

const char *dpl_error_message(void) {
    return error_text;
}

dpl_status dpl_fail(dpl_status status, const char *format, ...) {
    char text[TEXT_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    memcpy(error_text, text, sizeof text);
    return status;
}

dpl_status dpl_fail_in(dpl_status status, const char *format, ...) {
    char place[TEXT_BYTES - 2]; // room for ": ": of a long text the found part is what gets cut
    va_list args;
    va_start(args, format);
    vsnprintf(place, sizeof place, format, args);
    va_end(args);
    return dpl_fail(status, "%s: %s", place, error_text[0] ? error_text : dpl_status_text(status));
}

void dpl_log_sink(dpl_log_fn fn, void *arg) {
    log_fn = fn;
    log_arg = arg;
}

void dpl_log(const char *format, ...) {
    char line[TEXT_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    if (log_fn) log_fn(log_arg, line);
    else fprintf(stderr, "%s\n", line);
}

double dpl_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
