/*
 * scratch.h - a scratch folder for tests of files, files with given bytes, and checks of errors.
 *
 * Everything here ends the test with a message when the system refuses.
 */
#ifndef DPL_TESTS_SCRATCH_H
#define DPL_TESTS_SCRATCH_H

#include <stdbool.h>
#include <stddef.h>

#include "dropless.h"

// A new folder below $TMPDIR (or /tmp); removed with all that is in it.
int scratch_open(void **state); // fit for cmocka's setup and teardown
int scratch_close(void **state);
// A path in the scratch folder; a rotating static buffer of sixteen.
const char *scratch_path(const char *format, ...) __attribute__((format(printf, 1, 2)));
void scratch_write(const char *path, const void *data, size_t bytes);
void scratch_text(const char *path, const char *text);
// True if the file holds exactly these bytes.
bool scratch_holds(const char *path, const void *data, size_t bytes);
// The names in a folder, hidden ones too, without . and ..
size_t scratch_count(const char *path);

// The status is as wanted, and the error text holds both parts.
void scratch_check_error(dpl_status got, dpl_status want, const char *part, const char *part2,
                         const char *file, int line);
#define check_error(got, want, part, part2) \
    scratch_check_error(got, want, part, part2, __FILE__, __LINE__)
#define check_ok(call) scratch_check_error(call, DPL_OK, "", "", __FILE__, __LINE__)

// Memory of this process: resident now and at most so far; of the heap what is in use, which is
// exact, where the other two may hide behind what was freed. Sanitizers keep what was freed.
size_t scratch_resident_bytes(void);
size_t scratch_peak_bytes(void);
size_t scratch_used_bytes(void);
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define HAS_SANITIZER 1
#endif
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define HAS_SANITIZER 1
#endif
#ifndef HAS_SANITIZER
#define HAS_SANITIZER 0
#endif

// Collects log lines between start and stop; stop gives the text.
void scratch_log_start(void);
const char *scratch_log_stop(void);

#endif
