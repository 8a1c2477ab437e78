/*
 * cli.h - what the commands share: their description, arguments, errors and exit codes.
 */
#ifndef CLI_H
#define CLI_H

#include <dropless.h>
#include <stdbool.h>
#include <stdio.h>

#define CLI_OK          0
#define CLI_FAILURE     1
#define CLI_USAGE       2
#define CLI_OPTIONS_MAX 16

typedef struct cli_option {
    const char *name;  // "--tokens"
    const char *value; // what help calls its value, "N"; NULL: a flag
    const char *help;
} cli_option;

typedef struct cli_command cli_command;

typedef struct cli_args {
    const cli_command *command;
    const char *option[CLI_OPTIONS_MAX]; // as in the command's list: NULL: not given; flags: ""
    const char *const *positional;       // as many as the command asks for
    const char *const *settings;         // key=value
    size_t n_settings;
} cli_args;

struct cli_command {
    const char *name;
    const char *arguments; // after the name, as help shows it
    const char *summary;   // one line
    const char *details;   // a paragraph
    const cli_option *options;
    size_t n_options, n_positional;
    bool takes_settings;
    bool lists_keys; // help ends with all keys of the configuration
    int (*run)(const cli_args *args);
};

extern const cli_command cli_train, cli_eval, cli_generate, cli_inspect, cli_probe;

// Parses and runs; answers --help. argv[0] is the command's name.
int cli_run(const cli_command *command, int argc, char **argv);
void cli_help(const cli_command *command);

// Print to stderr. `cli_usage` is for arguments that are wrong and returns CLI_USAGE, `cli_fail` says what the
// library's last error was and returns CLI_FAILURE, or CLI_USAGE for wrong keys and values (DPL_EINVAL).
int cli_usage(const cli_command *command, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
int cli_fail(void);
int cli_fail_setting(dpl_status status);

// The option's number; `missing` if it was not given. False after an error on stderr.
bool cli_number(const cli_args *args, size_t option, double missing, double low, double high,
                bool whole, double *value_out);

// Opens the options of the model at PATH with the settings over them, and a context with their threads.
// Returns an exit code; both are to be closed in any case.
int cli_open(const cli_args *args, const char *path, dpl_config **config_out, dpl_ctx **ctx_out);
int cli_open_ctx(const dpl_config *config, dpl_ctx **ctx_out);

// bench/bench.h, linked into the program. argv[0] is the kind of benchmark. Returns an exit code.
int dpl_bench_main(int argc, char **argv);

#endif
