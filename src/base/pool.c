// pool.c - the threads that run the tasks of every operator.
//
// A run opens a gate, and threads that are awake walk in and take task numbers from a counter. The
// caller takes tasks too and shuts the gate when none is left: a thread that wakes too late finds
// it shut. No run allocates or, while the threads spin, calls the system.
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/base.h"

#define SPIN_S      50e-6
#define THREADS_MAX 4096
#define GATE_OPEN   0x80000000u

struct dpl_pool {
    int n_threads, n_started; // the caller's included
    atomic_int n_numbered;    // threads that have taken their i_thread
    pthread_mutex_t busy;     // held by the thread whose run it is
    pthread_t *threads;       // n_threads; the first stands for the caller
    // The run. Written while the gate is shut and empty, read by those inside only.
    dpl_task_fn fn;
    void *arg;
    size_t n_tasks;
    // Each on its own cache line: all threads write them.
    _Alignas(DPL_ALIGN) atomic_size_t next_task;
    _Alignas(DPL_ALIGN) _Atomic uint32_t gate;   // GATE_OPEN | number of workers inside
    _Alignas(DPL_ALIGN) _Atomic uint32_t n_runs; // what idle workers watch; wraps
    _Atomic uint32_t n_sleeping;
    atomic_bool caller_sleeps;
    atomic_bool quit;
};

void dpl_relax(void) {
#if defined(__x86_64__)
    __asm__ volatile("pause");
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void dpl_futex_wait(_Atomic uint32_t *word, uint32_t value, double seconds) {
    const time_t whole = (time_t)seconds;
    const struct timespec limit = {whole, (long)(1e9 * (seconds - (double)whole))};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, seconds > 0 ? &limit : NULL, NULL, 0);
}

void dpl_futex_wake(_Atomic uint32_t *word, int n_threads) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, n_threads, NULL, NULL, 0);
}

// Spins until *word differs from `value` (returns true) or SPIN_S has passed.
static bool spin_while_equal(_Atomic uint32_t *word, uint32_t value) {
    double give_up = 0;
    for (unsigned i = 1;; i++) {
        if (atomic_load_explicit(word, memory_order_acquire) != value) return true;
        dpl_relax();
        if (i % 64) continue; // The clock costs more than a look.
        const double now = dpl_now();
        if (give_up == 0) give_up = now + SPIN_S;
        else if (now > give_up) return false;
    }
}

static void take_tasks(dpl_pool *pool, int i_thread) {
    size_t i;
    while ((i = atomic_fetch_add_explicit(&pool->next_task, 1, memory_order_relaxed)) <
           pool->n_tasks)
        pool->fn(pool->arg, i, i_thread);
}

static void help(dpl_pool *pool, int i_thread) {
    uint32_t gate = atomic_load(&pool->gate);
    do
        if (!(gate & GATE_OPEN)) return;
    while (!atomic_compare_exchange_weak(&pool->gate, &gate, gate + 1));
    take_tasks(pool, i_thread);
    // The last one out of a shut gate wakes the caller. Either this sees caller_sleeps, or the
    // caller, which sets it first and looks at the gate after, sees the empty gate.
    if (atomic_fetch_sub(&pool->gate, 1) == 1 && atomic_load(&pool->caller_sleeps))
        dpl_futex_wake(&pool->gate, 1);
}

static void *work(void *arg) {
    dpl_pool *pool = arg;
    const int i_thread = 1 + atomic_fetch_add(&pool->n_numbered, 1); // the caller has 0
    uint32_t seen = 0;
    for (;;) {
        if (!spin_while_equal(&pool->n_runs, seen)) {
            atomic_fetch_add(&pool->n_sleeping, 1);
            while (atomic_load(&pool->n_runs) == seen) dpl_futex_wait(&pool->n_runs, seen, 0);
            atomic_fetch_sub(&pool->n_sleeping, 1);
        }
        seen = atomic_load(&pool->n_runs);
        if (atomic_load(&pool->quit)) return NULL;
        help(pool, i_thread);
    }
}

static void shut_gate(dpl_pool *pool) {
    uint32_t inside = atomic_fetch_and(&pool->gate, ~GATE_OPEN) & ~GATE_OPEN;
    while (inside) {
        if (!spin_while_equal(&pool->gate, inside)) {
            atomic_store(&pool->caller_sleeps, true);
            if ((inside = atomic_load(&pool->gate)) != 0) dpl_futex_wait(&pool->gate, inside, 0);
            atomic_store(&pool->caller_sleeps, false);
        }
        inside = atomic_load(&pool->gate);
    }
}

void dpl_pool_run(dpl_pool *pool, size_t n_tasks, dpl_task_fn fn, void *arg) {
    // A pool that is busy with another thread's run does not keep this caller waiting.
    if (n_tasks <= 1 || pool->n_threads == 1 || pthread_mutex_trylock(&pool->busy)) {
        for (size_t i = 0; i < n_tasks; i++) fn(arg, i, 0);
        return;
    }
    pool->fn = fn;
    pool->arg = arg;
    pool->n_tasks = n_tasks;
    atomic_store_explicit(&pool->next_task, 0, memory_order_relaxed);
    atomic_store(&pool->gate, GATE_OPEN);
    atomic_fetch_add(&pool->n_runs, 1);
    // Threads that spin come by themselves; only the rest is worth a system call. One that counts
    // as spinning and is about to sleep looks at n_runs once more before it does.
    const int n_workers = pool->n_threads - 1, n_asleep = (int)atomic_load(&pool->n_sleeping);
    const int n_to_wake = (int)DPL_MIN(n_tasks - 1, (size_t)n_workers) - (n_workers - n_asleep);
    if (n_to_wake > 0) dpl_futex_wake(&pool->n_runs, n_to_wake);
    take_tasks(pool, 0);
    shut_gate(pool);
    pthread_mutex_unlock(&pool->busy);
}

static void start_workers(dpl_pool *pool) {
    // Signals are for the program's own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; pool->n_started < pool->n_threads; pool->n_started++)
        if (pthread_create(&pool->threads[pool->n_started], NULL, work, pool)) break;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

dpl_status dpl_pool_open(int n_threads, dpl_pool **pool_out) {
    DPL_CHECK(n_threads >= 0 && n_threads <= THREADS_MAX,
              "threads=%d, expected 0 (all this process may use) to %d", n_threads, THREADS_MAX);
    if (n_threads == 0) n_threads = DPL_MIN(dpl_cpus_allowed(), THREADS_MAX);
    dpl_pool *pool = dpl_alloc(sizeof *pool);
    DPL_EXPECT(pool, DPL_ENOMEM, "pool: no memory for %d threads", n_threads);
    pthread_mutex_init(&pool->busy, NULL);
    pool->n_threads = n_threads;
    pool->n_started = 1;
    pool->threads = dpl_alloc_array((size_t)n_threads, sizeof *pool->threads);
    if (pool->threads) start_workers(pool);
    if (pool->threads && pool->n_started == n_threads) {
        *pool_out = pool;
        return DPL_OK;
    }
    dpl_fail(DPL_ENOMEM, "pool: the system gave %d threads of %d", pool->n_started, n_threads);
    dpl_pool_close(&pool);
    return DPL_ENOMEM;
}

void dpl_pool_close(dpl_pool **pool) {
    dpl_pool *p = *pool;
    if (!p) return;
    atomic_store(&p->quit, true);
    atomic_fetch_add(&p->n_runs, 1);
    dpl_futex_wake(&p->n_runs, INT_MAX);
    for (int i = 1; i < p->n_started; i++) pthread_join(p->threads[i], NULL);
    pthread_mutex_destroy(&p->busy);
    dpl_free(p->threads);
    dpl_free(p);
    *pool = NULL;
}

int dpl_pool_threads(const dpl_pool *pool) {
    return pool->n_threads;
}
