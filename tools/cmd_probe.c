/*
 * cmd_probe.c - dropless probe: what happens inside a model on one batch, for comparisons with other programs.
 */
#include <string.h>

#include "cli.h"

enum { GRAD, STEPS };
static const cli_option options[] = {
    [GRAD] = {"--grad", NULL, "write gradients too: grad.NAME, dhidden.L"},
    [STEPS] = {"--steps", "N",
               "write the parameters after N optimizer steps on this batch: adamwN.NAME"},
};

static int run(const cli_args *args)
{
    double n_steps;
    if (!cli_number(args, STEPS, 0, 0, 1e6, true, &n_steps)) return CLI_USAGE;
    const dpl_probe_options o = {.struct_bytes = sizeof o,
                                 .grad = args->option[GRAD] != NULL,
                                 .n_steps = (size_t)n_steps,
                                 .settings = args->settings,
                                 .n_settings = args->n_settings};
    // The settings go to the library; the number of threads is needed before.
    dpl_config *config = NULL;
    dpl_ctx *ctx = NULL;
    dpl_status status = dpl_config_open(NULL, &config);
    for (size_t i = 0; i < args->n_settings && status == DPL_OK; i++)
        status = dpl_config_set(config, args->settings[i]);
    int code = status == DPL_OK ? cli_open_ctx(config, &ctx) : cli_fail_setting(status);
    const char *const *paths = args->positional;
    if (code == CLI_OK && dpl_model_probe(ctx, paths[0], paths[1], paths[2], &o) != DPL_OK)
        code = cli_fail();
    dpl_ctx_close(&ctx);
    dpl_config_close(&config);
    return code;
}

const cli_command cli_probe = {
    .name = "probe",
    .arguments = "PATH INPUT.safetensors OUTPUT.safetensors [--grad] [--steps N] [key=value ...]",
    .summary = "logits, hidden states, routing, gradients of one batch in a file",
    .details =
        "INPUT has input_ids (B, S) and optionally labels (B, S), not shifted, -100 where there is "
        "no loss.\n"
        "OUTPUT gets targets, loss_mask, logits, token_loss, loss, total_loss, "
        "hidden.{embed,L,final}, attn.L,\n"
        "mlp.L, router.L.{logits,ids,weights,counts} and mtp.*. Defaults here: dtype float32,\n"
        "mtp_loss_scaling_factor 0.3, AdamW at a constant 1e-3 (0.9, 0.95, 1e-8, decay 0.1), no "
        "clipping,\n"
        "routed_bias_update_rate 0 (with another, router.L.bias_next too).",
    .options = options,
    .n_options = sizeof options / sizeof options[0],
    .n_positional = 3,
    .takes_settings = true,
    .run = run,
};
