/*
 * cmd_inspect.c - dropless inspect: what a model, a checkpoint or a configuration is.
 */
#include "cli.h"

enum { JSON, MEMORY };
static const cli_option options[] = {
    [JSON] = {"--json", NULL, "print one JSON object"},
    [MEMORY] = {"--memory", NULL, "bytes that training and generation need, too"},
};

static int run(const cli_args *args)
{
    const unsigned flags = (args->option[JSON] ? DPL_INSPECT_JSON : 0) |
                           (args->option[MEMORY] ? DPL_INSPECT_MEMORY : 0);
    char *text = NULL;
    const dpl_status status = dpl_inspect(args->positional[0], args->settings, args->n_settings,
                                          flags, &text);
    if (status != DPL_OK) return cli_fail_setting(status);
    fputs(text, stdout);
    if (args->option[JSON]) putchar('\n');
    dpl_text_close(&text);
    return CLI_OK;
}

const cli_command cli_inspect = {
    .name = "inspect",
    .arguments = "PATH|CONFIG [--json] [--memory] [key=value ...]",
    .summary = "family, parameters, types, FLOPs, bytes; verifies the checksums of a checkpoint",
    .details = "CONFIG is a YAML configuration or a config.json: what it would make is described. "
               "FLOPs are MaxText's\n"
               "count for training on sequences of max_target_length.",
    .options = options,
    .n_options = sizeof options / sizeof options[0],
    .n_positional = 1,
    .takes_settings = true,
    .run = run,
};
