/*
 * cli.c - arguments, help and errors of the commands.
 *
 * An argument that looks like key=value is a setting wherever it stands; a file of such a name is written ./a=b.
 */
#include "cli.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* ---- errors ---- */

int cli_usage(const cli_command *command, const char *format, ...)
{
    va_list args;
    fprintf(stderr, "dropless %s: ", command->name);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fprintf(stderr, "\nusage: dropless %s %s\nSee dropless %s --help\n", command->name,
            command->arguments, command->name);
    return CLI_USAGE;
}

int cli_fail(void)
{
    fprintf(stderr, "dropless: %s\n", dpl_error_message());
    return CLI_FAILURE;
}

int cli_fail_setting(dpl_status status)
{
    (void)cli_fail();
    return status == DPL_EINVAL ? CLI_USAGE : CLI_FAILURE;
}

/* ---- help ---- */

static void list_keys(void)
{
    printf("\nKeys (dropless train CONFIG key=value; the same in the file as key: value):\n");
    for (size_t i = 0; i < dpl_config_option_count(); i++) {
        dpl_option_info o;
        if (dpl_config_option(i, &o) != DPL_OK) return;
        printf("  %s=%s\n      %s (%s%s%s)\n", o.name, o.default_value, o.help, o.type,
               *o.range ? ", " : "", o.range);
    }
}

void cli_help(const cli_command *c)
{
    printf("usage: dropless %s %s\n\n%s\n", c->name, c->arguments, c->details);
    if (c->n_options) printf("\nOptions:\n");
    for (size_t i = 0; i < c->n_options; i++) {
        const cli_option *o = &c->options[i];
        char name[40];
        snprintf(name, sizeof name, "%s%s%s", o->name, o->value ? " " : "",
                 o->value ? o->value : "");
        printf("  %-20s %s\n", name, o->help);
    }
    if (c->lists_keys)
        list_keys();
    else if (c->takes_settings)
        printf("\nKeys are those of the configuration: see dropless train --help\n");
}

/* ---- arguments ---- */

static bool is_setting(const char *text)
{
    const size_t n = strspn(text,
                            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-");
    return n > 0 && text[0] != '-' && text[n] == '=';
}

// Takes argv[*i], and its value from argv[*i + 1] unless it stands behind "=".
static int parse_option(const cli_command *c, int argc, char **argv, int *i, cli_args *args)
{
    const char *text = argv[*i], *equals = strchr(text, '=');
    const size_t n = equals ? (size_t)(equals - text) : strlen(text);
    for (size_t o = 0; o < c->n_options; o++) {
        const cli_option *option = &c->options[o];
        if (strlen(option->name) != n || strncmp(option->name, text, n) != 0) continue;
        if (!option->value && equals) return cli_usage(c, "%s takes no value", option->name);
        if (args->option[o]) return cli_usage(c, "%s is given twice", option->name);
        if (option->value && !equals && *i + 1 >= argc)
            return cli_usage(c, "%s needs a value, %s", option->name, option->value);
        args->option[o] = !option->value ? "" : equals ? equals + 1 : argv[++*i];
        return CLI_OK;
    }
    return cli_usage(c, "unknown option '%.*s'", (int)n, text);
}

static int parse(const cli_command *c, int argc, char **argv, const char **positional,
                 const char **settings, cli_args *args)
{
    size_t n_positional = 0;
    bool options = true;
    for (int i = 1; i < argc; i++) {
        if (options && !strcmp(argv[i], "--")) {
            options = false;
        } else if (options && argv[i][0] == '-' && argv[i][1]) {
            const int code = parse_option(c, argc, argv, &i, args);
            if (code != CLI_OK) return code;
        } else if (c->takes_settings && is_setting(argv[i])) {
            settings[args->n_settings++] = argv[i];
        } else if (n_positional < c->n_positional) {
            positional[n_positional++] = argv[i];
        } else {
            return cli_usage(c, "unexpected argument '%s'%s", argv[i],
                             c->takes_settings ? ", expected key=value" : "");
        }
    }
    if (n_positional < c->n_positional)
        return cli_usage(c, "%zu of %zu arguments are missing", c->n_positional - n_positional,
                         c->n_positional);
    return CLI_OK;
}

int cli_run(const cli_command *command, int argc, char **argv)
{
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++)
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) {
            cli_help(command);
            return CLI_OK;
        }
    const char **texts = calloc(2 * (size_t)argc + 1, sizeof *texts);
    if (!texts) {
        fprintf(stderr, "dropless: no memory for %d arguments\n", argc);
        return CLI_FAILURE;
    }
    cli_args args = {.command = command, .positional = texts, .settings = texts + argc};
    int code = parse(command, argc, argv, texts, texts + argc, &args);
    if (code == CLI_OK) code = command->run(&args);
    free(texts);
    return code;
}

bool cli_number(const cli_args *args, size_t option, double missing, double low, double high,
                bool whole, double *value_out)
{
    const char *text = args->option[option];
    char *end = NULL;
    *value_out = missing;
    if (!text) return true;
    errno = 0;
    const double value = strtod(text, &end);
    *value_out = value;
    if (end != text && *end == '\0' && value >= low && value <= high &&
        (!whole || value == floor(value)))
        return true;
    (void)cli_usage(args->command, "%s is '%s', expected a %snumber from %g to %g",
                    args->command->options[option].name, text, whole ? "whole " : "", low, high);
    return false;
}

/* ---- what commands open ---- */

int cli_open_ctx(const dpl_config *config, dpl_ctx **ctx_out)
{
    const char *threads = dpl_config_get(config, "threads");
    return dpl_ctx_open(threads ? atoi(threads) : 0, ctx_out) == DPL_OK ? CLI_OK : cli_fail();
}

int cli_open(const cli_args *args, const char *path, dpl_config **config_out, dpl_ctx **ctx_out)
{
    if (dpl_config_open_model(path, config_out) != DPL_OK) return cli_fail();
    for (size_t i = 0; i < args->n_settings; i++) {
        const dpl_status status = dpl_config_set(*config_out, args->settings[i]);
        if (status != DPL_OK) return cli_fail_setting(status);
    }
    return cli_open_ctx(*config_out, ctx_out);
}
