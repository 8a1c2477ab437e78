/*
 * test_base.c - everything in src/base: error texts, blocks and the arena, the pool, CPU levels,
 * random numbers, the hash and bf16.
 *
 * The pool's cases are also what ThreadSanitizer looks at, the arena's what AddressSanitizer does.
 */
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/base.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HAS_ASAN 1
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define HAS_ASAN 1
#endif
#ifdef HAS_ASAN
#include <sanitizer/asan_interface.h>
#endif

/* ---- status and log ------------------------------------------------------------------------- */

static void *first_message(void *arg) {
    *(bool *)arg = dpl_error_message()[0] == '\0';
    dpl_fail(DPL_EIO, "the other thread's");
    return NULL;
}

static void test_status(void **state) {
    (void)state;
    assert_string_equal(dpl_status_text(DPL_OK), "success");
    assert_string_equal(dpl_status_text(DPL_EINTR), "stopped on request");
    assert_string_equal(dpl_status_text((dpl_status)-1000), "unknown status");
    assert_string_equal(dpl_status_text((dpl_status)1), "unknown status");

    assert_int_equal(dpl_fail(DPL_EINVAL, "top_k is %d, expected 1 to %d", 9, 8), DPL_EINVAL);
    assert_string_equal(dpl_error_message(), "top_k is 9, expected 1 to 8");
    assert_int_equal(dpl_fail_in(DPL_EFORMAT, "file %s", "a.yaml"), DPL_EFORMAT);
    assert_string_equal(dpl_error_message(), "file a.yaml: top_k is 9, expected 1 to 8");
    dpl_fail(DPL_EIO, "again: %s", dpl_error_message()); // The old text is an argument.
    assert_string_equal(dpl_error_message(), "again: file a.yaml: top_k is 9, expected 1 to 8");
    dpl_fail(DPL_EIO, "%s", "");
    dpl_fail_in(DPL_ENOMEM, "x");
    assert_string_equal(dpl_error_message(), "x: out of memory");

    bool fresh = false;
    pthread_t thread;
    dpl_fail(DPL_EIO, "mine");
    assert_int_equal(pthread_create(&thread, NULL, first_message, &fresh), 0);
    pthread_join(thread, NULL);
    assert_true(fresh);
    assert_string_equal(dpl_error_message(), "mine");
}

static void test_status_long(void **state) {
    (void)state;
    char text[3000];
    memset(text, 'a', sizeof text);
    text[sizeof text - 1] = '\0';
    dpl_fail(DPL_EIO, "%s", text);
    assert_int_equal(strlen(dpl_error_message()), 1023);
    dpl_fail_in(DPL_EIO, "place");
    assert_int_equal(strlen(dpl_error_message()), 1023);
    assert_memory_equal(dpl_error_message(), "place: aaa", 10);
    dpl_fail_in(DPL_EIO, "%s", text);
    assert_int_equal(strlen(dpl_error_message()), 1023);
    assert_string_equal(dpl_error_message() + 1020, "a: "); // The place alone fills the text.
}

static dpl_status pass_on(dpl_status status, int *n_reached) {
    DPL_TRY(status);
    ++*n_reached;
    return DPL_OK;
}

static void keep_line(void *arg, const char *line) {
    snprintf(arg, 64, "%s", line);
}

static void test_try_and_log(void **state) {
    (void)state;
    int n_reached = 0;
    assert_int_equal(pass_on(DPL_OK, &n_reached), DPL_OK);
    assert_int_equal(pass_on(DPL_ECOMM, &n_reached), DPL_ECOMM);
    assert_int_equal(n_reached, 1);

    char line[64] = "";
    dpl_log_sink(keep_line, line);
    dpl_log("step %d of %s", 3, "ten");
    dpl_log_sink(NULL, NULL);
    assert_string_equal(line, "step 3 of ten");

    const double before = dpl_now();
    usleep(2000);
    assert_true(dpl_now() - before >= 0.002);
}

/* ---- blocks --------------------------------------------------------------------------------- */

static void test_alloc(void **state) {
    (void)state;
    const size_t sizes[] = {0, 1, 63, 64, 4096, (2 << 20) - 1, 2 << 20, (5 << 20) + 3};
    for (size_t i = 0; i < DPL_COUNT(sizes); i++)
        for (int again = 0; again < 2; again++) { // The second block may be the first, used.
            unsigned char *p = dpl_alloc(sizes[i]);
            assert_non_null(p);
            assert_int_equal((uintptr_t)p % (sizes[i] < 2 << 20 ? DPL_ALIGN : 2 << 20), 0);
            size_t n_set = 0;
            for (size_t k = 0; k < sizes[i]; k++) n_set += p[k] != 0;
            assert_int_equal(n_set, 0);
            memset(p, 0xff, sizes[i]);
            dpl_free(p);
        }
    dpl_free(NULL);
    assert_null(dpl_alloc(SIZE_MAX));
    assert_null(dpl_alloc_array(SIZE_MAX / 2 + 2, 2)); // The product wraps to 2.
    assert_null(dpl_alloc_array((size_t)1 << 32, (size_t)1 << 32));
    void *p = dpl_alloc_array(3, 5);
    assert_non_null(p);
    dpl_free(p);
    char *copy = dpl_strdup("text");
    assert_string_equal(copy, "text");
    dpl_free(copy);
}

static void test_fault(void **state) {
    (void)state;
    dpl_fault_alloc(3);
    void *a = dpl_alloc(1), *b = dpl_alloc(1), *c = dpl_alloc(1), *d = dpl_alloc(1);
    assert_non_null(a);
    assert_non_null(b);
    assert_null(c);
    assert_non_null(d);
    dpl_fault_alloc(1);
    dpl_fault_alloc(0);
    char *e = dpl_strdup("x");
    assert_non_null(e);
    dpl_fault_alloc(1);
    assert_null(dpl_strdup("x"));
    dpl_free(a);
    dpl_free(b);
    dpl_free(d);
    dpl_free(e);
}

static void test_open_out_of_memory(void **state) {
    (void)state;
    dpl_arena *arena = (void *)0x1;
    dpl_fault_alloc(1);
    assert_int_equal(dpl_arena_open(4096, &arena), DPL_ENOMEM);
    assert_ptr_equal(arena, (void *)0x1); // Outputs are written only on success.
    assert_int_equal(dpl_arena_open(SIZE_MAX, &arena), DPL_ENOMEM);
    assert_int_equal(dpl_arena_open((size_t)1 << 60, &arena), DPL_ENOMEM);

    dpl_pool *pool = (void *)0x1;
    size_t n_failed = 0;
    for (size_t nth = 1;; nth++) {
        dpl_fault_alloc(nth);
        const dpl_status status = dpl_pool_open(3, &pool);
        if (status == DPL_OK) break;
        assert_int_equal(status, DPL_ENOMEM);
        assert_non_null(strstr(dpl_error_message(), "pool"));
        assert_ptr_equal(pool, (void *)0x1);
        n_failed++;
    }
    dpl_fault_alloc(0);
    assert_int_equal(n_failed, 2);
    dpl_pool_close(&pool);
    assert_int_equal(dpl_pool_open(1 << 20, &pool), DPL_EINVAL);
}

/* ---- arena ---------------------------------------------------------------------------------- */

static void test_arena(void **state) {
    (void)state;
    const size_t reserve = (size_t)8 << 20;
    dpl_arena *arena = NULL;
    assert_int_equal(dpl_arena_open(reserve, &arena), DPL_OK);
    assert_int_equal(dpl_arena_free_bytes(arena), reserve);
    assert_int_equal(dpl_arena_mark(arena), 0);

    char *a = dpl_arena_alloc(arena, 100);
    const size_t mark = dpl_arena_mark(arena);
    char *b = dpl_arena_alloc(arena, (size_t)3 << 20);
    assert_int_equal(mark, 128);
    assert_int_equal((uintptr_t)a % DPL_ALIGN, 0);
    assert_int_equal((uintptr_t)b % DPL_ALIGN, 0);
    assert_true(b >= a + 100);
    memset(a, 1, 100);
    memset(b, 2, (size_t)3 << 20);
    assert_int_equal(a[99], 1);
    assert_non_null(dpl_arena_alloc(arena, 0));
    assert_int_equal(dpl_arena_free_bytes(arena), reserve - 128 - ((size_t)3 << 20));

    assert_true(dpl_arena_owns(arena, a));
    assert_true(dpl_arena_owns(arena, b + 5));
    assert_false(dpl_arena_owns(arena, a - 1));
    assert_false(dpl_arena_owns(arena, &arena));
    assert_false(dpl_arena_owns(arena, NULL));

    dpl_arena_release(arena, mark);
    assert_int_equal(dpl_arena_mark(arena), mark);
    assert_int_equal(dpl_arena_peak_bytes(arena), 128 + ((size_t)3 << 20));
    assert_ptr_equal(dpl_arena_alloc(arena, 10), b);
    assert_int_equal(a[0], 1);
    dpl_arena_release(arena, 0);

    // A full arena is used to its last byte, again and again.
    for (int i = 0; i < 3; i++) {
        char *all = dpl_arena_alloc(arena, reserve);
        all[0] = all[reserve - 1] = 7;
        assert_int_equal(dpl_arena_free_bytes(arena), 0);
        dpl_arena_release(arena, 0);
    }
    dpl_arena_close(&arena);
    assert_null(arena);
    dpl_arena_close(&arena);
}

static void test_arena_hold(void **state) {
    (void)state;
    dpl_arena *arena = NULL;
    assert_int_equal(dpl_arena_open(1 << 16, &arena), DPL_OK);
    dpl_arena_alloc(arena, 64);

    // Operators one after the other, each with its own scratch: all of it goes at the end.
    dpl_arena_hold(arena, true);
    char *scratch[3];
    for (int i = 0; i < 3; i++) {
        const size_t mark = dpl_arena_mark(arena);
        scratch[i] = dpl_arena_alloc(arena, 64);
        memset(scratch[i], i, 64);
        dpl_arena_release(arena, mark);
        assert_int_equal(dpl_arena_mark(arena), mark + 64);
    }
    for (int i = 0; i < 3; i++) assert_int_equal(scratch[i][63], i);
    dpl_arena_hold(arena, false);
    assert_int_equal(dpl_arena_mark(arena), 64);

    // A block between two scratches lives; the scratch above it goes.
    dpl_arena_hold(arena, true);
    size_t mark = dpl_arena_mark(arena);
    dpl_arena_alloc(arena, 64);
    dpl_arena_release(arena, mark);
    char *kept = dpl_arena_alloc(arena, 64);
    mark = dpl_arena_mark(arena);
    dpl_arena_alloc(arena, 64);
    dpl_arena_release(arena, mark);
    dpl_arena_hold(arena, false);
    assert_int_equal(dpl_arena_mark(arena), mark);
    memset(kept, 9, 64);

    // A block taken after the last release lives too.
    dpl_arena_hold(arena, true);
    dpl_arena_release(arena, 64);
    dpl_arena_alloc(arena, 64);
    mark = dpl_arena_mark(arena);
    dpl_arena_hold(arena, false);
    assert_int_equal(dpl_arena_mark(arena), mark);

    // An outer release takes everything; holding without any release takes nothing.
    dpl_arena_hold(arena, true);
    dpl_arena_release(arena, mark - 64);
    dpl_arena_release(arena, 64);
    dpl_arena_hold(arena, false);
    assert_int_equal(dpl_arena_mark(arena), 64);
    dpl_arena_hold(arena, true);
    dpl_arena_alloc(arena, 64);
    dpl_arena_hold(arena, false);
    assert_int_equal(dpl_arena_mark(arena), 128);
    dpl_arena_close(&arena);
}

// Runs fn in a child with stderr to /dev/null; returns its signal, 0 if it lived.
static int signal_of(void (*fn)(dpl_arena *arena), dpl_arena *arena) {
    fflush(NULL);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        signal(SIGABRT, SIG_DFL);
        if (!freopen("/dev/null", "w", stderr)) _exit(3);
        fn(arena);
        _exit(0);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static void take_too_much(dpl_arena *arena) {
    dpl_arena_alloc(arena, 4097);
}

static void take_wrapping(dpl_arena *arena) {
    dpl_arena_alloc(arena, SIZE_MAX);
}

static void release_upwards(dpl_arena *arena) {
    dpl_arena_release(arena, 64);
}

static void take_enough(dpl_arena *arena) {
    dpl_arena_alloc(arena, 4096);
}

static void test_arena_misuse(void **state) {
    (void)state;
    dpl_arena *arena = NULL;
    assert_int_equal(dpl_arena_open(4096, &arena), DPL_OK);
    assert_int_equal(signal_of(take_enough, arena), 0);
    assert_int_equal(signal_of(take_too_much, arena), SIGABRT);
    assert_int_equal(signal_of(take_wrapping, arena), SIGABRT);
    assert_int_equal(signal_of(release_upwards, arena), SIGABRT);
    dpl_arena_close(&arena);
}

static void test_arena_poison(void **state) {
    (void)state;
#ifdef HAS_ASAN
    dpl_arena *arena = NULL;
    assert_int_equal(dpl_arena_open(1 << 16, &arena), DPL_OK);
    char *a = dpl_arena_alloc(arena, 100);
    char *b = dpl_arena_alloc(arena, 64);
    assert_false(__asan_address_is_poisoned(a + 99));
    for (char *p = a + 100; p < b; p++) assert_true(__asan_address_is_poisoned(p));
    assert_true(b - (a + 100) >= 64);
    assert_false(__asan_address_is_poisoned(b + 63));
    assert_true(__asan_address_is_poisoned(b + 64));
    dpl_arena_release(arena, 128);
    assert_true(__asan_address_is_poisoned(b));
    dpl_arena_hold(arena, true);
    dpl_arena_release(arena, 0);
    assert_false(__asan_address_is_poisoned(a));
    dpl_arena_hold(arena, false);
    assert_true(__asan_address_is_poisoned(a));
    dpl_arena_close(&arena);
    assert_false(__asan_address_is_poisoned(a)); // for whoever gets these addresses next
#else
    print_message("skipped: needs a build with AddressSanitizer\n");
    skip();
#endif
}

/* ---- pool ----------------------------------------------------------------------------------- */

#define TASKS_MAX 1000
typedef struct job {
    int n_threads;
    unsigned input[TASKS_MAX]; // plain memory, written before the run
    unsigned output[TASKS_MAX];
    unsigned n_tasks_by_thread[8]; // Not atomic: no two threads have one number.
} job;

static void square(void *arg, size_t i_task, int i_thread) {
    job *j = arg;
    if (i_thread < 0 || i_thread >= j->n_threads) abort();
    j->n_tasks_by_thread[i_thread]++;
    j->output[i_task] += j->input[i_task] * j->input[i_task];
}

static void run_square(dpl_pool *pool, job *j, size_t n_tasks, unsigned salt) {
    for (size_t i = 0; i < TASKS_MAX; i++) {
        j->input[i] = (unsigned)i + salt;
        j->output[i] = 1;
    }
    memset(j->n_tasks_by_thread, 0, sizeof j->n_tasks_by_thread);
    dpl_pool_run(pool, n_tasks, square, j);
    size_t n_done = 0;
    for (size_t i = 0; i < DPL_COUNT(j->n_tasks_by_thread); i++) n_done += j->n_tasks_by_thread[i];
    if (n_done != n_tasks) fail_msg("%zu tasks run of %zu", n_done, n_tasks);
    for (size_t i = 0; i < TASKS_MAX; i++) {
        const unsigned x = (unsigned)i + salt;
        const unsigned expected = i < n_tasks ? x * x + 1 : 1;
        if (j->output[i] != expected) fail_msg("task %zu of %zu", i, n_tasks);
    }
}

static void test_pool(void **state) {
    (void)state;
    const int thread_counts[] = {1, 2, 3, 8};
    const size_t task_counts[] = {0, 1, 2, 3, 7, 64, TASKS_MAX};
    for (size_t t = 0; t < DPL_COUNT(thread_counts); t++) {
        dpl_pool *pool = NULL;
        assert_int_equal(dpl_pool_open(thread_counts[t], &pool), DPL_OK);
        assert_int_equal(dpl_pool_threads(pool), thread_counts[t]);
        job j = {.n_threads = thread_counts[t]};
        for (unsigned round = 0; round < 100; round++) {
            for (size_t n = 0; n < DPL_COUNT(task_counts); n++)
                run_square(pool, &j, task_counts[n], round);
            if (round % 25 == 0) usleep(1000); // Now and then the threads fall asleep.
        }
        dpl_pool_close(&pool);
        assert_null(pool);
        dpl_pool_close(&pool);
    }
}

static void test_pool_open_close(void **state) {
    (void)state;
    for (int i = 0; i < 50; i++) {
        dpl_pool *pool = NULL;
        assert_int_equal(dpl_pool_open(4, &pool), DPL_OK);
        if (i % 2) {
            job j = {.n_threads = 4};
            run_square(pool, &j, 5, 0);
        }
        dpl_pool_close(&pool);
    }
    dpl_pool *pool = NULL;
    assert_int_equal(dpl_pool_open(0, &pool), DPL_OK);
    assert_int_equal(dpl_pool_threads(pool), dpl_cpus_allowed());
    dpl_pool_close(&pool);
}

typedef struct meeting {
    pthread_barrier_t barrier;
    int i_thread_by_task[2];
} meeting;

static void meet(void *arg, size_t i_task, int i_thread) {
    meeting *m = arg;
    m->i_thread_by_task[i_task] = i_thread;
    pthread_barrier_wait(&m->barrier);
}

// Two tasks that wait for each other: only two threads at once can end this run.
static void test_pool_is_parallel(void **state) {
    (void)state;
    dpl_pool *pool = NULL;
    assert_int_equal(dpl_pool_open(2, &pool), DPL_OK);
    meeting m;
    pthread_barrier_init(&m.barrier, NULL, 2);
    for (int i = 0; i < 200; i++) {
        if (i % 50 == 0) usleep(2000);
        dpl_pool_run(pool, 2, meet, &m);
        assert_int_equal(m.i_thread_by_task[0] + m.i_thread_by_task[1], 1);
    }
    pthread_barrier_destroy(&m.barrier);
    dpl_pool_close(&pool);
}

static void sleep_in_later_task(void *arg, size_t i_task, int i_thread) {
    (void)i_thread;
    if (i_task > 0) usleep(3000);
    ((unsigned *)arg)[i_task]++;
}

// The caller outlasts its spin and is woken by the last worker.
static void test_pool_slow_tasks(void **state) {
    (void)state;
    dpl_pool *pool = NULL;
    assert_int_equal(dpl_pool_open(3, &pool), DPL_OK);
    for (int i = 0; i < 10; i++) {
        unsigned n_runs[3] = {0};
        dpl_pool_run(pool, 3, sleep_in_later_task, n_runs);
        for (int k = 0; k < 3; k++) assert_int_equal(n_runs[k], 1);
    }
    dpl_pool_close(&pool);
}

static void *call_often(void *arg) {
    job *j = calloc(1, sizeof *j);
    if (!j) abort();
    j->n_threads = dpl_pool_threads(arg);
    for (unsigned i = 0; i < 200; i++) run_square(arg, j, 1 + i % 20, i);
    free(j);
    return NULL;
}

static void nested(void *arg, size_t i_task, int i_thread) {
    (void)i_task;
    (void)i_thread;
    job *j = calloc(1, sizeof *j);
    if (!j) abort();
    j->n_threads = dpl_pool_threads(arg);
    run_square(arg, j, 9, 3);
    free(j);
}

static void test_pool_callers(void **state) {
    (void)state;
    dpl_pool *pool = NULL;
    assert_int_equal(dpl_pool_open(2, &pool), DPL_OK);
    pthread_t callers[3];
    for (int i = 0; i < 3; i++) // one after the other
        if (!pthread_create(&callers[i], NULL, call_often, pool)) pthread_join(callers[i], NULL);
    for (int i = 0; i < 3; i++) // at once
        assert_int_equal(pthread_create(&callers[i], NULL, call_often, pool), 0);
    for (int i = 0; i < 3; i++) pthread_join(callers[i], NULL);
    dpl_pool_run(pool, 8, nested, pool); // not allowed, but it must not hang
    dpl_pool_close(&pool);
}

static double process_cpu_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void test_pool_idle_sleeps(void **state) {
    (void)state;
    dpl_pool *pool = NULL;
    assert_int_equal(dpl_pool_open(8, &pool), DPL_OK);
    job j = {.n_threads = 8};
    run_square(pool, &j, 100, 0);
    const double before = process_cpu_s();
    usleep(500000);
    const double used_s = process_cpu_s() - before;
    // Spinning would use half a second of each processor; a bounded spin is 7 x 50 us of work.
    if (used_s > 0.05) fail_msg("idle threads used %g s in 0.5 s", used_s);
    dpl_pool_close(&pool);
}

/* ---- processors ----------------------------------------------------------------------------- */

static void test_cpus(void **state) {
    (void)state;
    cpu_set_t before, one;
    assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
    const int n = dpl_cpus_allowed();
    assert_in_range(n, 1, CPU_COUNT(&before));
    size_t cpu = 0;
    while (!CPU_ISSET(cpu, &before)) cpu++;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    const int n_pinned = dpl_cpus_allowed();
    sched_setaffinity(0, sizeof before, &before);
    assert_int_equal(n_pinned, 1);
}

static void write_file(const char *folder, const char *name, const char *text) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void test_cpus_quota(void **state) {
    (void)state;
    char root[] = "/tmp/dpl_test_base_XXXXXX";
    assert_non_null(mkdtemp(root));
    char list[300], outer[300], inner[300], v1[300];
    snprintf(list, sizeof list, "%s/list", root);
    snprintf(outer, sizeof outer, "%s/outer", root);
    snprintf(inner, sizeof inner, "%s/outer/inner", root);
    snprintf(v1, sizeof v1, "%s/cpu", root);
    assert_int_equal(mkdir(outer, 0700) | mkdir(inner, 0700) | mkdir(v1, 0700), 0);
    assert_int_equal(dpl_cpus_quota(list, root, 64), 64); // no such file

    write_file(root, "list", "1:memory:/x\n0::/outer/inner\n");
    assert_int_equal(dpl_cpus_quota(list, root, 64), 64);
    write_file(inner, "cpu.max", "max 100000\n");
    assert_int_equal(dpl_cpus_quota(list, root, 64), 64);
    write_file(inner, "cpu.max", "850000 100000\n");
    assert_int_equal(dpl_cpus_quota(list, root, 64), 8);
    assert_int_equal(dpl_cpus_quota(list, root, 4), 4);
    write_file(outer, "cpu.max", "200000 100000\n"); // The tighter one counts, wherever it is.
    assert_int_equal(dpl_cpus_quota(list, root, 64), 2);
    write_file(inner, "cpu.max", "50000 100000\n");
    assert_int_equal(dpl_cpus_quota(list, root, 64), 1);
    write_file(root, "list", "0::/unknown/inside\n"); // as seen from inside a container
    write_file(root, "cpu.max", "300000 100000\n");
    assert_int_equal(dpl_cpus_quota(list, root, 64), 3);

    write_file(root, "list", "4:cpu,cpuacct:/\n3:cpuset:/\n");
    write_file(v1, "cpu.cfs_period_us", "100000\n");
    write_file(v1, "cpu.cfs_quota_us", "-1\n");
    assert_int_equal(dpl_cpus_quota(list, root, 64), 64);
    write_file(v1, "cpu.cfs_quota_us", "500000\n");
    assert_int_equal(dpl_cpus_quota(list, root, 64), 5);
    write_file(root, "list", "3:cpuset:/\n");
    assert_int_equal(dpl_cpus_quota(list, root, 64), 64);

    const char *made[] = {"list",
                          "cpu.max",
                          "outer/cpu.max",
                          "outer/inner/cpu.max",
                          "cpu/cpu.cfs_period_us",
                          "cpu/cpu.cfs_quota_us",
                          "outer/inner",
                          "outer",
                          "cpu",
                          ""};
    for (size_t i = 0; i < DPL_COUNT(made); i++) {
        char path[512];
        snprintf(path, sizeof path, "%s/%s", root, made[i]);
        assert_int_equal(remove(path), 0);
    }
}

static void test_cpu_level(void **state) {
    (void)state;
    char *before = getenv("DPL_CPU") ? strdup(getenv("DPL_CPU")) : NULL;
    dpl_cpu_level best = DPL_CPU_N, level = DPL_CPU_N;
    unsetenv("DPL_CPU");
    assert_int_equal(dpl_cpu_level_detect(&best), DPL_OK);
    assert_in_range(best, 0, DPL_CPU_AMX);
    assert_int_equal(best, dpl_cpu_level_machine());
    for (unsigned i = 0; i < DPL_CPU_N; i++) {
        setenv("DPL_CPU", dpl_cpu_level_name((dpl_cpu_level)i), 1);
        level = DPL_CPU_N;
        const dpl_status status = dpl_cpu_level_detect(&level);
        const unsigned needs = i == DPL_CPU_TILES ? DPL_CPU_AVX2 : i;
        assert_int_equal(status, needs <= (unsigned)best ? DPL_OK : DPL_EINVAL);
        assert_int_equal(level, status == DPL_OK ? i : DPL_CPU_N);
    }
    setenv("DPL_CPU", "avx1024", 1);
    level = DPL_CPU_N;
    assert_int_equal(dpl_cpu_level_detect(&level), DPL_EINVAL);
    assert_int_equal(level, DPL_CPU_N);
    assert_non_null(strstr(dpl_error_message(), "avx1024"));
    assert_non_null(strstr(dpl_error_message(), "ref"));
    assert_string_equal(dpl_cpu_level_name(DPL_CPU_AVX512), "avx512");
    assert_string_equal(dpl_cpu_level_name(DPL_CPU_AVX512_BF16), "avx512_bf16");
    assert_string_equal(dpl_cpu_level_name(DPL_CPU_AMX), "amx");
    assert_string_equal(dpl_cpu_level_name(DPL_CPU_TILES), "tiles");
    assert_string_equal(dpl_cpu_level_name(DPL_CPU_N), "unknown");
    if (before) setenv("DPL_CPU", before, 1);
    else unsetenv("DPL_CPU");
    free(before);
}

/* ---- random numbers and the hash ------------------------------------------------------------ */

// The known answers that the authors of Random123 publish for philox4x32-10.
static const struct {
    uint64_t seed, stream, counter, first, second;
} known[] = {
    {0, 0, 0, 0xe169c58d6627e8d5u, 0x9b00dbd8bc57ac4cu},
    {UINT64_MAX, UINT64_MAX, UINT64_MAX, 0x41c83b0e408f276du, 0x6d5451fda20bc7c6u},
    {0x299f31d0a4093822u, 0x0370734413198a2eu, 0x85a308d3243f6a88u, 0x94fdccebd16cfe09u,
     0x24126ea15001e420u},
};

static double uniform_of(uint64_t bits) {
    return ldexp((double)(bits >> 12) + 0.5, -52);
}

static void test_rng_known(void **state) {
    (void)state;
    for (size_t i = 0; i < DPL_COUNT(known); i++) {
        const uint64_t seed = known[i].seed, stream = known[i].stream, at = known[i].counter;
        assert_true(dpl_rng_u64(seed, stream, at) == known[i].first);
        assert_true(dpl_rng_uniform(seed, stream, at) == uniform_of(known[i].first));
        const double radius = sqrt(-2 * log(uniform_of(known[i].first)));
        const double angle = 2 * acos(-1.0) * uniform_of(known[i].second);
        assert_true(fabs(dpl_rng_normal(seed, stream, at) - radius * cos(angle)) < 1e-12);
    }
    // The ends of the uniform range, from the formula that the known answers confirm.
    assert_true(uniform_of(0) > 0 && uniform_of(UINT64_MAX) < 1);
}

static void test_rng_distribution(void **state) {
    (void)state;
    const uint64_t seed = (uint64_t)time(NULL);
    print_message("seed %llu\n", (unsigned long long)seed);
    enum { N = 200000, BINS = 20 };
    size_t bins[BINS] = {0};
    double sum = 0, sum2 = 0, sum4 = 0, cross = 0, previous = 0;
    for (uint64_t i = 0; i < N; i++) {
        const double u = dpl_rng_uniform(seed, 1, i), z = dpl_rng_normal(seed, 2, i);
        assert_true(u > 0 && u < 1);
        bins[(size_t)(u * BINS)]++;
        sum += z;
        sum2 += z * z;
        sum4 += z * z * z * z;
        cross += z * previous;
        previous = z;
    }
    double chi2 = 0;
    for (size_t i = 0; i < BINS; i++)
        chi2 += pow((double)bins[i] - (double)N / BINS, 2) / ((double)N / BINS);
    // Each bound is six of its standard deviations or more: one false alarm in 10^8 runs.
    assert_true(chi2 < 19 + 6 * sqrt(2 * 19.0) + 20);
    assert_true(fabs(sum / N) < 6 / sqrt(N));
    assert_true(fabs(sum2 / N - 1) < 6 * sqrt(2.0 / N));
    assert_true(fabs(sum4 / N - 3) < 6 * sqrt(96.0 / N));
    assert_true(fabs(cross / N) < 6 / sqrt(N));
}

static int n_bits_set(uint64_t x) {
    return __builtin_popcountll(x);
}

static void test_hash(void **state) {
    (void)state;
    unsigned char data[200];
    for (size_t i = 0; i < sizeof data; i++) data[i] = (unsigned char)dpl_rng_u64(1, 2, i);
    double n_changed = 0, n_flips = 0;
    for (size_t n = 0; n <= 130; n++) {
        const uint64_t hash = dpl_hash64(data, n, 7);
        assert_true(hash == dpl_hash64(data, n, 7));
        assert_true(hash != dpl_hash64(data, n, 8));
        assert_true(hash != dpl_hash64(data, n + 1, 7));
        unsigned char moved[140];
        memcpy(moved + 3, data, n); // The address's alignment makes no difference.
        assert_true(hash == dpl_hash64(moved + 3, n, 7));
        for (size_t bit = 0; bit < 8 * n; bit++) {
            data[bit / 8] ^= (unsigned char)(1u << bit % 8);
            const uint64_t other = dpl_hash64(data, n, 7);
            data[bit / 8] ^= (unsigned char)(1u << bit % 8);
            const int n_differ = n_bits_set(hash ^ other);
            assert_in_range(n_differ, 8, 56);
            n_changed += n_differ;
            n_flips++;
        }
    }
    assert_true(fabs(n_changed / n_flips - 32) < 6 * 4 / sqrt(n_flips)); // 4: sd of 64 fair bits

    // Zeros of every length, and exchanged blocks, differ; parts chained by the seed do too.
    uint64_t seen[200];
    const unsigned char zeros[200] = {0};
    for (size_t n = 0; n < 200; n++) {
        seen[n] = dpl_hash64(zeros, n, 0);
        for (size_t k = 0; k < n; k++) assert_true(seen[k] != seen[n]);
    }
    unsigned char swapped[128];
    memcpy(swapped, data + 32, 32);
    memcpy(swapped + 32, data, 32);
    memcpy(swapped + 64, data + 64, 64);
    assert_true(dpl_hash64(swapped, 128, 0) != dpl_hash64(data, 128, 0));
    assert_true(dpl_hash64(data + 64, 64, dpl_hash64(data, 64, 0)) !=
                dpl_hash64(data, 64, dpl_hash64(data + 64, 64, 0)));
}

// Files hold these values: a change of the function is a change of the format.
static void test_hash_is_stable(void **state) {
    (void)state;
    const char text[] = "The quick brown fox jumps over the lazy dog, then over the next one.";
    static const struct {
        size_t bytes;
        uint64_t seed, hash;
    } cases[] = {
        {0, 0, 0x48218226ff3cd4bfu},  {1, 0, 0x8ad2ae970af28843u},  {8, 1, 0xc5d3d3c05b34ad0cu},
        {31, 0, 0x3480b103529c4e88u}, {32, 0, 0xdd4d611b1716ae24u}, {68, 99, 0xad891e4443b9b8d7u},
    };
    for (size_t i = 0; i < DPL_COUNT(cases); i++) {
        const uint64_t hash = dpl_hash64(text, cases[i].bytes, cases[i].seed);
        if (hash != cases[i].hash)
            fail_msg("%zu bytes: 0x%016llx", cases[i].bytes, (unsigned long long)hash);
    }
}

/* ---- bf16 ----------------------------------------------------------------------------------- */

static float float_of(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

// The nearest bf16 by distance in fp64, independent of the bit trick: of the two neighbours `low`
// and `low + 1` (in magnitude) the closer one, the even one on a tie.
static uint16_t nearest(float f, uint16_t low) {
    const uint16_t high = (uint16_t)(low + 1);
    const double x = fabs((double)f), a = fabs((double)dpl_bf16_to_f32(low));
    double b = fabs((double)dpl_bf16_to_f32(high));
    if (isinf(b)) b = 0x1p128; // where the next value would be
    if (x - a != b - x) return x - a < b - x ? low : high;
    return low & 1 ? high : low;
}

static void test_bf16(void **state) {
    (void)state;
    const uint32_t tails[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff, 0x1234, 0xabcd};
    for (uint32_t h = 0; h <= 0xffff; h++) {
        const uint16_t half = (uint16_t)h;
        const float f = dpl_bf16_to_f32(half);
        if (isnan(f)) {
            assert_true(isnan(dpl_bf16_to_f32(dpl_f32_to_bf16(f))));
            assert_int_equal(dpl_f32_to_bf16(f) & 0x8000, half & 0x8000);
            continue;
        }
        if (dpl_f32_to_bf16(f) != half) fail_msg("0x%04x does not come back", h);
        if (isinf(f)) continue;
        for (size_t i = 0; i < DPL_COUNT(tails); i++) {
            const float x = float_of(h << 16 | tails[i]);
            if (dpl_f32_to_bf16(x) != nearest(x, half)) fail_msg("%a rounds wrongly", (double)x);
        }
    }
    // NaNs whose payload lies in the lower half only must not become infinite.
    assert_true(isnan(dpl_bf16_to_f32(dpl_f32_to_bf16(float_of(0x7f800001u)))));
    assert_true(isnan(dpl_bf16_to_f32(dpl_f32_to_bf16(float_of(0xffffffffu)))));
    assert_int_equal(dpl_dtype_bytes(DPL_F32), 4);
    assert_int_equal(dpl_dtype_bytes(DPL_BF16), 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_status),
        cmocka_unit_test(test_status_long),
        cmocka_unit_test(test_try_and_log),
        cmocka_unit_test(test_alloc),
        cmocka_unit_test(test_fault),
        cmocka_unit_test(test_open_out_of_memory),
        cmocka_unit_test(test_arena),
        cmocka_unit_test(test_arena_hold),
        cmocka_unit_test(test_arena_misuse),
        cmocka_unit_test(test_arena_poison),
        cmocka_unit_test(test_pool),
        cmocka_unit_test(test_pool_open_close),
        cmocka_unit_test(test_pool_is_parallel),
        cmocka_unit_test(test_pool_slow_tasks),
        cmocka_unit_test(test_pool_callers),
        cmocka_unit_test(test_pool_idle_sleeps),
        cmocka_unit_test(test_cpus),
        cmocka_unit_test(test_cpus_quota),
        cmocka_unit_test(test_cpu_level),
        cmocka_unit_test(test_rng_known),
        cmocka_unit_test(test_rng_distribution),
        cmocka_unit_test(test_hash),
        cmocka_unit_test(test_hash_is_stable),
        cmocka_unit_test(test_bf16),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
