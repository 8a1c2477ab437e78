// main.c - the program: picks a command from the table, reads its arguments, answers --help.
//
// An argument like key=value is a setting wherever it stands; a file of that name is written ./a=b.
// The locale is never set, so numbers have a point everywhere.
#include "cli.h"

#include <ctype.h>
#include <fcntl.h>
#include <getopt.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

static int usage(const cli_command *c) {
    fprintf(stderr, "usage: dropless %s %s\nSee dropless %s --help\n", c->name, c->arguments,
            c->name);
    return CLI_USAGE;
}

int cli_usage(const cli_command *command, const char *format, ...) {
    va_list args;
    fprintf(stderr, "dropless %s: ", command->name);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    putc('\n', stderr);
    return usage(command);
}

int cli_fail(void) {
    const char *text = dpl_error_message(); // only what has no memory has no words
    fprintf(stderr, "dropless: %s\n", *text ? text : dpl_status_text(DPL_ENOMEM));
    return CLI_FAILURE;
}

int cli_fail_setting(dpl_status status) {
    (void)cli_fail();
    return status == DPL_EINVAL ? CLI_USAGE : CLI_FAILURE;
}

static int help(const cli_command *c) {
    dpl_option_info key;
    printf("usage: dropless %s %s\n\n%s\n", c->name, c->arguments, c->details);
    if (c->options[0].name) printf("\nOptions:\n");
    for (const cli_option *o = c->options; o->name; o++) {
        const int used = printf("  --%s %s", o->name, o->value ? o->value : "");
        printf("%*s%s\n", 23 - used, "", o->help);
    }
    printf(c == &cli_train ? "\nKeys (key=value here, key: value in the file):\n"
                           : "\nKeys are those of the configuration: see dropless train --help\n");
    for (size_t i = 0; c == &cli_train && dpl_config_option(i, &key) == DPL_OK; i++)
        printf("  %s=%s\n      %s (%s%s%s)\n", key.name, key.default_value, key.help, key.type,
               *key.range ? ", " : "", key.range);
    return CLI_OK;
}

/* ---- arguments ---- */
static bool is_setting(const char *text) {
    const char *p = text;
    while (isalnum((unsigned char)*p) || *p == '_' || *p == '-') p++;
    return p > text && *text != '-' && *p == '=';
}

static int parse_numbers(cli_args *args) {
    for (size_t i = 0; args->command->options[i].name; i++) {
        const cli_option *o = &args->command->options[i];
        const char *text = args->option[i];
        char *end;
        const double x = args->number[i] = text ? strtod(text, &end) : o->missing;
        if (!text || o->high == 0) continue;
        if (end == text || *end || !(x >= o->low && x <= o->high) || (o->whole && x != floor(x)))
            return cli_usage(args->command, "--%s is '%s', expected a %snumber from %g to %g",
                             o->name, text, o->whole ? "whole " : "", o->low, o->high);
    }
    return CLI_OK;
}

// An argument that is no option, after *n positional ones.
static int take(cli_args *args, const char *text, size_t *n) {
    if (is_setting(text)) args->settings[args->n_settings++] = text;
    else if (*n < args->command->n_positional) args->positional[(*n)++] = text;
    else return cli_usage(args->command, "unexpected argument '%s', expected key=value", text);
    return CLI_OK;
}

static int parse(int argc, char **argv, cli_args *args) {
    const cli_command *c = args->command;
    struct option table[CLI_OPTIONS_MAX + 1] = {{NULL, 0, NULL, 0}};
    size_t n = 0;
    int code = CLI_OK;
    for (int i = 0; c->options[i].name; i++)
        table[i] = (struct option){c->options[i].name, c->options[i].value != NULL, NULL, 'a' + i};
    // "-": what is no option comes as 1, where it stands, whatever the environment says.
    for (int found; (found = getopt_long(argc, argv, "-", table, NULL)) != -1 && code == CLI_OK;) {
        if (found == '?') return usage(c); // It has said what is wrong.
        if (found == 1) code = take(args, optarg, &n);
        else if (args->option[found - 'a'])
            return cli_usage(c, "--%s is given twice", table[found - 'a'].name);
        else args->option[found - 'a'] = optarg ? optarg : "";
    }
    for (; argv[optind] && code == CLI_OK; optind++) code = take(args, argv[optind], &n);
    if (code != CLI_OK) return code;
    if (n == c->n_positional) return parse_numbers(args);
    return cli_usage(c, "%zu of %zu arguments are missing", c->n_positional - n, c->n_positional);
}

// argv[0] is the command's name.
static int run_command(const cli_command *command, int argc, char **argv) {
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++)
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) return help(command);
    // The settings gather behind the name in argv, where all has been read by then.
    cli_args args = {.command = command, .settings = (const char **)argv + 1};
    char name[32];
    snprintf(name, sizeof name, "dropless %s", command->name);
    argv[0] = name; // getopt's messages start with it.
    int code = parse(argc, argv, &args);
    if (code == CLI_OK) code = command->run(&args);
    dpl_model_close(&args.model);
    dpl_ctx_close(&args.ctx);
    dpl_config_close(&args.config);
    return code;
}

int cli_open(cli_args *args, cli_source source) {
    const char *path = source == CLI_DEFAULTS ? NULL : args->positional[0];
    dpl_status status;
    if (source == CLI_MODEL && dpl_config_open_model(path, &args->config) != DPL_OK)
        return cli_fail();
    status = source == CLI_MODEL ? DPL_OK : dpl_config_open(path, &args->config);
    for (size_t i = 0; i < args->n_settings && status == DPL_OK; i++)
        status = dpl_config_set(args->config, args->settings[i]);
    if (status != DPL_OK) return cli_fail_setting(status);
    status = dpl_ctx_open(atoi(dpl_config_get(args->config, "threads")), &args->ctx);
    if (status == DPL_OK && source == CLI_MODEL)
        status = dpl_model_open(args->ctx, path, args->config, &args->model);
    return status == DPL_OK ? CLI_OK : cli_fail();
}

/* ---- the program ---- */
static const cli_command *const commands[] = {&cli_train, &cli_eval, &cli_generate, &cli_inspect,
                                              &cli_probe};
enum { N_COMMANDS = sizeof commands / sizeof commands[0] };

static int print_help(FILE *out, int code) {
    fprintf(out, "dropless %s: dropless mixture-of-experts training on CPUs\n\nCommands:\n",
            dpl_version());
    for (size_t i = 0; i < N_COMMANDS; i++)
        fprintf(out, "  dropless %s %s\n      %s\n", commands[i]->name, commands[i]->arguments,
                commands[i]->summary);
    fprintf(out, "  dropless bench KIND [key=value ...] [--json]\n"
                 "      what this machine can do, and how much of it is reached\n");
    fprintf(out, "\nPATH is a model directory, a checkpoint directory or a run directory (its "
                 "newest checkpoint).\n"
                 "--help works for every command; --version prints the version.\n"
                 "Exit codes: 0 success, 1 failure, 2 wrong usage.\n");
    return code;
}

static int run(int argc, char **argv) {
    const char *name = argv[1];
    if (argc < 2) return print_help(stderr, CLI_USAGE);
    if (!strcmp(name, "--help") || !strcmp(name, "-h") || !strcmp(name, "help"))
        return print_help(stdout, CLI_OK);
    if (!strcmp(name, "--version")) {
        printf("dropless %s\n", dpl_version());
        return CLI_OK;
    }
    // It parses its arguments itself: it sees the inside of the library, as no command does.
    if (!strcmp(name, "bench")) return dpl_bench_main(argc - 2, argv + 2);
    for (size_t i = 0; i < N_COMMANDS; i++)
        if (!strcmp(name, commands[i]->name)) return run_command(commands[i], argc - 1, argv + 1);
    fprintf(stderr, "dropless: unknown command '%s'\n", name);
    return print_help(stderr, CLI_USAGE);
}

int main(int argc, char **argv) {
    // A program without its standard streams would give their numbers to files that it opens. With
    // the wrong direction their use still fails.
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0) (void)!open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY);
    const int code = run(argc, argv);
    if (fflush(stdout) == 0 && !ferror(stdout)) return code;
    if (code == CLI_OK) perror("dropless: cannot write to standard output");
    return code == CLI_OK ? CLI_FAILURE : code;
}
