/*
 * main.c - the program: picks a command from the table and runs it.
 *
 * Exit codes: 0 success, 1 failure, 2 wrong usage. The locale is never set, so numbers have a point everywhere.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "cli.h"

// It parses its arguments itself: the benchmarks see the inside of the library, as no command does.
static const cli_command cli_bench = {
    .name = "bench",
    .arguments = "KIND [key=value ...] [--json]",
    .summary = "what this machine can do, and how much of it is reached",
};

static const cli_command *const commands[] = {&cli_train,   &cli_eval,  &cli_generate,
                                              &cli_inspect, &cli_probe, &cli_bench};
#define N_COMMANDS (sizeof commands / sizeof commands[0])

static void print_help(FILE *out)
{
    fprintf(out, "dropless %s: dropless mixture-of-experts training on CPUs\n\nCommands:\n",
            dpl_version());
    for (size_t i = 0; i < N_COMMANDS; i++)
        fprintf(out, "  dropless %s %s\n      %s\n", commands[i]->name, commands[i]->arguments,
                commands[i]->summary);
    fprintf(out, "\nPATH is a model directory, a checkpoint directory or a run directory (its "
                 "newest checkpoint).\n"
                 "--help works for every command; --version prints the version.\n"
                 "Exit codes: 0 success, 1 failure, 2 wrong usage.\n");
}

// How many letters of two short words differ (Levenshtein).
static size_t distance(const char *a, const char *b)
{
    size_t row[32];
    const size_t n_b = strlen(b) < 31 ? strlen(b) : 31;
    for (size_t j = 0; j <= n_b; j++)
        row[j] = j;
    for (size_t i = 0; a[i] && i < 31; i++) {
        size_t corner = row[0];
        row[0] = i + 1;
        for (size_t j = 0; j < n_b; j++) {
            const size_t change = corner + (a[i] != b[j]);
            const size_t shift = (row[j] < row[j + 1] ? row[j] : row[j + 1]) + 1;
            corner = row[j + 1];
            row[j + 1] = change < shift ? change : shift;
        }
    }
    return row[n_b];
}

static int unknown_command(const char *name)
{
    size_t best = 0;
    for (size_t i = 1; i < N_COMMANDS; i++)
        if (distance(name, commands[i]->name) < distance(name, commands[best]->name)) best = i;
    fprintf(stderr, "dropless: unknown command '%s'; the nearest is '%s'. See dropless --help\n",
            name, commands[best]->name);
    return CLI_USAGE;
}

static int run(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : NULL;
    if (!name) {
        print_help(stderr);
        return CLI_USAGE;
    }
    if (!strcmp(name, "--help") || !strcmp(name, "-h") || !strcmp(name, "help")) {
        print_help(stdout);
        return CLI_OK;
    }
    if (!strcmp(name, "--version")) {
        printf("dropless %s\n", dpl_version());
        return CLI_OK;
    }
    for (size_t i = 0; i < N_COMMANDS; i++) {
        if (strcmp(name, commands[i]->name) != 0) continue;
        if (commands[i] == &cli_bench) return dpl_bench_main(argc - 2, argv + 2);
        return cli_run(commands[i], argc - 1, argv + 1);
    }
    return unknown_command(name);
}

// A program that starts without its standard streams would give their numbers to files that it opens.
static void occupy_streams(void)
{
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0)
            (void)!open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY); // use still fails
}

int main(int argc, char **argv)
{
    occupy_streams();
    const int code = run(argc, argv);
    if (fflush(stdout) == 0 && !ferror(stdout)) return code;
    if (code == CLI_OK) perror("dropless: cannot write to standard output");
    return code == CLI_OK ? CLI_FAILURE : code;
}
