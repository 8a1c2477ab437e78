// cmd_train.c - dropless train: runs a configuration, shows how it goes, stops when it is told to.
//
// The first SIGINT or SIGTERM lets the step finish and a checkpoint be written; the second ends the
// process at once, which leaves the checkpoints that are there whole.
//
// With ranks=R this thread is rank 0, and R - 1 more are started; as processes of MPI each is one
// rank. Rank 0 speaks, and all ranks end with the same error.
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"

static dpl_trainer *volatile running;
static volatile sig_atomic_t n_signals;

static void on_signal(int number) {
    static const char text[] =
        "\nstopping after this step and a checkpoint; once more to end at once\n";
    if (n_signals++ > 0) _exit(128 + number);
    if (running) dpl_trainer_stop(running);
    (void)!write(STDERR_FILENO, text, sizeof text - 1);
}

static void on_lost_page(int number) {
    static const char text[] = "\ndropless: a file that is being read became shorter\n";
    (void)number;
    (void)!write(STDERR_FILENO, text, sizeof text - 1);
    _exit(CLI_FAILURE);
}

static void catch_signals(void) {
    struct sigaction act = {.sa_handler = on_signal, .sa_flags = SA_RESTART}, before;
    sigemptyset(&act.sa_mask);
    sigaction(SIGTERM, &act, NULL);
    // A shell without job control starts background jobs with SIGINT ignored: that is to stay so.
    if (sigaction(SIGINT, NULL, &before) == 0 && before.sa_handler != SIG_IGN)
        sigaction(SIGINT, &act, NULL);
    signal(SIGBUS, on_lost_page);
    // A reader that goes away does not end a run: everything is in log.txt too.
    signal(SIGPIPE, SIG_IGN);
}

typedef struct progress {
    bool terminal;
    double step_s; // smoothed
} progress;

static void on_line(void *arg, const char *line) {
    const progress *p = arg;
    // On a terminal the steps are shown in one line that updates.
    if (p->terminal && !strncmp(line, "completed step:", 15)) return;
    printf("%s%s\n", p->terminal ? "\r\033[K" : "", line);
    fflush(stdout);
}

static void on_step(void *arg, const dpl_step_metrics *m, int64_t n_steps) {
    progress *p = arg;
    if (!p->terminal) return;
    p->step_s = p->step_s > 0 ? 0.9 * p->step_s + 0.1 * m->seconds : m->seconds;
    const long long left = (long long)(p->step_s * (double)(n_steps - m->step - 1));
    printf("\r\033[Kstep %lld/%lld  loss %.4f  %.0f tokens/s  %lld:%02lld:%02lld left",
           (long long)m->step + 1, (long long)n_steps, m->loss, m->tokens_per_s_per_device,
           left / 3600, left / 60 % 60, left % 60);
    fflush(stdout);
}

/* ---- ranks ---- */
typedef struct rank {
    const dpl_config *config;
    dpl_comm *comm;
    dpl_ctx *ctx; // of rank 0 it is there already
    int n_threads;
    pthread_t thread;
} rank;

static dpl_status train_rank(rank *r, const dpl_trainer_events *events) {
    dpl_trainer *trainer = NULL;
    dpl_status status = r->ctx ? DPL_OK : dpl_ctx_open(r->n_threads, &r->ctx);
    if (status != DPL_OK) dpl_comm_abort(r->comm, dpl_error_message());
    if (status == DPL_OK) status = dpl_ctx_join(r->ctx, r->comm);
    if (status == DPL_OK) status = dpl_trainer_open(r->ctx, r->config, &trainer);
    if (status == DPL_OK && events) running = trainer;
    if (status == DPL_OK) status = dpl_trainer_run(trainer, events);
    if (events && ((progress *)events->arg)->terminal && trainer)
        printf("\n%s\n", dpl_trainer_run_dir(trainer));
    if (events) running = NULL;
    dpl_trainer_close(&trainer);
    return status;
}

static void *run_rank(void *arg) {
    rank *r = arg;
    (void)train_rank(r, NULL); // rank 0 hears of an error too
    dpl_ctx_close(&r->ctx);
    dpl_comm_close(&r->comm);
    return NULL;
}

static dpl_status train_threads(rank *first, int n_ranks, const dpl_trainer_events *events) {
    dpl_comm **comms = calloc((size_t)n_ranks, sizeof(dpl_comm *));
    rank *ranks = calloc((size_t)n_ranks, sizeof *ranks);
    int n = 1;
    sigset_t all, before;
    dpl_status status = comms && ranks ? dpl_comm_open_threads(n_ranks, comms) : DPL_ENOMEM;
    // Signals are for this thread.
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; status == DPL_OK && n < n_ranks; n++) {
        ranks[n] = (rank){.config = first->config, .comm = comms[n], .n_threads = first->n_threads};
        if (pthread_create(&ranks[n].thread, NULL, run_rank, &ranks[n])) break;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (status == DPL_OK) first->comm = comms[0];
    if (status == DPL_OK && n < n_ranks)
        dpl_comm_abort(first->comm, "the system gives no more threads");
    if (status == DPL_OK) status = train_rank(first, events);
    for (int i = 1; i < n && ranks && comms && comms[0]; i++) pthread_join(ranks[i].thread, NULL);
    for (int i = n; comms && comms[0] && i < n_ranks; i++) dpl_comm_close(&comms[i]);
    free(comms);
    free(ranks);
    return status;
}

// To start and to end MPI is to meet all ranks, and MPI waits for ever.
static void on_alarm(int number) {
    static const char text[] = "dropless: another rank is missing at the start or end of MPI\n";
    (void)number;
    (void)!write(STDERR_FILENO, text, sizeof text - 1);
    _exit(CLI_FAILURE);
}

static void limit_time(const dpl_config *config) {
    signal(SIGALRM, on_alarm);
    const double seconds = atof(dpl_config_get(config, "comm_timeout_s"));
    alarm(seconds < 1e6 ? 1 + (unsigned)seconds : 1000000);
}

// Under MPI the launcher says how many ranks there are.
static int join_launched(cli_args *args, rank *first) {
    char text[32];
    limit_time(args->config);
    if (dpl_comm_open_mpi(&first->comm) != DPL_OK) return cli_fail();
    alarm(0);
    const int n = dpl_comm_ranks(first->comm), given = atoi(dpl_config_get(args->config, "ranks"));
    if (given != 1 && given != n)
        return cli_usage(args->command, "ranks=%d, but the launcher started %d", given, n);
    snprintf(text, sizeof text, "ranks=%d", n);
    return dpl_config_set(args->config, text) == DPL_OK ? CLI_OK : cli_fail();
}

// Of those that this process may use, the share of one rank of this host.
static int threads_of(const cli_args *args, int n_local) {
    const int given = atoi(dpl_config_get(args->config, "threads"));
    const int share = dpl_ctx_threads(args->ctx) / (n_local > 0 ? n_local : 1);
    return given > 0 ? given : share > 0 ? share : 1;
}

static int local_ranks(void) {
    const char *n = getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
    if (!n) n = getenv("MPI_LOCALNRANKS");
    return n ? atoi(n) : 1;
}

static int train(cli_args *args) {
    progress p = {.terminal = isatty(STDOUT_FILENO) == 1};
    const dpl_trainer_events events = {.arg = &p, .line = on_line, .step = on_step};
    int code = cli_open(args, CLI_CONFIG);
    if (code != CLI_OK) return code;
    const bool launched = dpl_comm_launcher() != NULL;
    rank first = {.config = args->config};
    if (launched && (code = join_launched(args, &first)) != CLI_OK) return code;
    const int n_ranks = atoi(dpl_config_get(args->config, "ranks"));
    first.n_threads = threads_of(args, launched ? local_ranks() : n_ranks);
    if (first.n_threads != dpl_ctx_threads(args->ctx)) {
        dpl_ctx_close(&args->ctx);
        if (dpl_ctx_open(first.n_threads, &args->ctx) != DPL_OK) return cli_fail();
    }
    first.ctx = args->ctx;
    catch_signals();
    const bool threads = !launched && n_ranks > 1;
    const dpl_status status = threads ? train_threads(&first, n_ranks, &events)
                                      : train_rank(&first, &events);
    if (status != DPL_OK && status != DPL_EINTR) code = cli_fail();
    dpl_ctx_join(args->ctx, NULL);
    if (launched) limit_time(args->config);
    dpl_comm_close(&first.comm);
    alarm(0);
    // A reader of the output that went away is no failure of the training.
    fflush(stdout);
    clearerr(stdout);
    return code;
}

const cli_command cli_train = {
    "train",
    "CONFIG [key=value ...]",
    "train a model, or go on with a run that was stopped",
    "CONFIG is a YAML file of keys; key=value overrides it. config.yml, log.txt, metrics.jsonl\n"
    "and checkpoints/STEP/ are written to base_output_directory/run_name/. If it has a\n"
    "checkpoint already, training goes on after the newest one. Ctrl-C or SIGTERM finishes the\n"
    "step, writes a checkpoint and exits with 0; a second one exits at once.\n"
    "ranks=N trains on N ranks in this process; under mpirun, mpiexec or srun each process is\n"
    "one. ici_expert_parallelism, ici_fsdp_parallelism and ici_data_parallelism say what they\n"
    "share (docs/distributed.md).",
    train,
    1,
    {CLI_FLAG(NULL, NULL)},
};
