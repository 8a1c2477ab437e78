// cli.h - what the commands share: their description, arguments, errors and exit codes.
#pragma once

#include <dropless.h>
#include <stdbool.h>
#include <stdio.h>

enum { CLI_OK, CLI_FAILURE, CLI_USAGE }; // exit codes
enum { CLI_OPTIONS_MAX = 8, CLI_POSITIONAL_MAX = 3 };

typedef struct cli_option {
    const char *name;  // "tokens"; NULL ends a list
    const char *value; // what help calls its value, "N"; NULL: a flag
    const char *help;
    double low, high, missing; // of a number; high 0: none
    bool whole;
} cli_option;
#define CLI_TEXT(name, value, help) \
    { name, value, help, 0, 0, 0, false }
#define CLI_FLAG(name, help) CLI_TEXT(name, NULL, help)

typedef struct cli_command cli_command;

typedef struct cli_args {
    const cli_command *command;
    const char *option[CLI_OPTIONS_MAX]; // as in the command's list: NULL: not given; flags: ""
    double number[CLI_OPTIONS_MAX];
    const char *positional[CLI_POSITIONAL_MAX]; // as many as the command asks for
    const char **settings;                      // key=value
    size_t n_settings;
    dpl_config *config; // what the command opens; main closes all three
    dpl_ctx *ctx;
    dpl_model *model;
} cli_args;

struct cli_command {
    const char *name;
    const char *arguments; // after the name, as help shows it
    const char *summary;   // one line
    const char *details;   // a paragraph
    int (*run)(cli_args *args);
    size_t n_positional;
    cli_option options[CLI_OPTIONS_MAX];
};

extern const cli_command cli_train, cli_eval, cli_generate, cli_inspect, cli_probe;

// Print to stderr. `cli_usage` is for wrong arguments and returns CLI_USAGE, `cli_fail` words the
// library's last error and returns CLI_FAILURE; with _setting CLI_USAGE where it was DPL_EINVAL.
int cli_usage(const cli_command *command, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
int cli_fail(void);
int cli_fail_setting(dpl_status status);

// Opens args->config, which the first positional or the model there has, puts the settings over it,
// opens args->ctx with its threads, and the model. Returns an exit code.
typedef enum cli_source { CLI_DEFAULTS, CLI_CONFIG, CLI_MODEL } cli_source;
int cli_open(cli_args *args, cli_source source);

// bench/bench.h, linked into the program. argv[0] is the kind of benchmark. Returns an exit code.
int dpl_bench_main(int argc, char **argv);
