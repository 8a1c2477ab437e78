// cmd_train.c - dropless train: runs a configuration, shows how it goes, stops when it is told to.
//
// The first SIGINT or SIGTERM lets the step finish and a checkpoint be written; the second ends the
// process at once, which leaves the checkpoints that are there whole.
#include <signal.h>
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

static int train(cli_args *args) {
    dpl_trainer *trainer = NULL;
    progress p = {.terminal = isatty(STDOUT_FILENO) == 1};
    const dpl_trainer_events events = {.arg = &p, .line = on_line, .step = on_step};
    const int code = cli_open(args, CLI_CONFIG);
    if (code != CLI_OK) return code;
    if (dpl_trainer_open(args->ctx, args->config, &trainer) != DPL_OK) return cli_fail();
    running = trainer;
    catch_signals();
    const dpl_status status = dpl_trainer_run(trainer, &events);
    if (p.terminal) printf("\n%s\n", dpl_trainer_run_dir(trainer));
    running = NULL;
    dpl_trainer_close(&trainer);
    // A reader of the output that went away is no failure of the training.
    fflush(stdout);
    clearerr(stdout);
    return status == DPL_OK || status == DPL_EINTR ? CLI_OK : cli_fail();
}

const cli_command cli_train = {
    "train",
    "CONFIG [key=value ...]",
    "train a model, or go on with a run that was stopped",
    "CONFIG is a YAML file of keys; key=value overrides it. config.yml, log.txt, metrics.jsonl\n"
    "and checkpoints/STEP/ are written to base_output_directory/run_name/. If it has a\n"
    "checkpoint already, training goes on after the newest one. Ctrl-C or SIGTERM finishes the\n"
    "step, writes a checkpoint and exits with 0; a second one exits at once.",
    train,
    1,
    {CLI_FLAG(NULL, NULL)},
};
