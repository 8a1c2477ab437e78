/*
 * cmd_eval.c - dropless eval: the loss of a model on a text.
 */
#include <inttypes.h>
#include <math.h>
#include <unistd.h>

#include "cli.h"

enum { DATA, JSON };
static const cli_option options[] = {
    [DATA] = {"--data", "FILE",
              "text file, or token shard with dataset_type=bin, or a folder of them (needed)"},
    [JSON] = {"--json", NULL, "print one JSON object"},
};

static int on_batch(void *arg, uint64_t n_done, uint64_t n_total)
{
    (void)arg;
    fprintf(stderr, "\rbatch %" PRIu64 "/%" PRIu64 "%s", n_done, n_total,
            n_done == n_total ? "\r\033[K" : "");
    return 0;
}

static int evaluate(const cli_args *args, dpl_ctx *ctx, const dpl_config *config)
{
    dpl_model *model = NULL;
    double loss = 0;
    uint64_t n_tokens = 0;
    const dpl_progress_fn progress = isatty(STDERR_FILENO) == 1 ? on_batch : NULL;
    dpl_status status = dpl_model_open(ctx, args->positional[0], config, &model);
    if (status == DPL_OK)
        status = dpl_model_eval(model, args->option[DATA], config, progress, NULL, &loss,
                                &n_tokens);
    dpl_model_close(&model);
    if (status != DPL_OK) return cli_fail();
    const double perplexity = exp(loss);
    if (!args->option[JSON])
        printf("loss: %.6f\ntokens: %" PRIu64 "\nperplexity: %.6f\n", loss, n_tokens, perplexity);
    else if (isfinite(perplexity))
        printf("{\"loss\":%.12g,\"tokens\":%" PRIu64 ",\"perplexity\":%.12g}\n", loss, n_tokens,
               perplexity);
    else
        printf("{\"loss\":%.12g,\"tokens\":%" PRIu64 ",\"perplexity\":null}\n", loss, n_tokens);
    return CLI_OK;
}

static int run(const cli_args *args)
{
    dpl_config *config = NULL;
    dpl_ctx *ctx = NULL;
    if (!args->option[DATA]) return cli_usage(args->command, "--data FILE is missing");
    int code = cli_open(args, args->positional[0], &config, &ctx);
    if (code == CLI_OK) code = evaluate(args, ctx, config);
    dpl_ctx_close(&ctx);
    dpl_config_close(&config);
    return code;
}

const cli_command cli_eval = {
    .name = "eval",
    .arguments = "PATH --data FILE [--json] [key=value ...]",
    .summary = "loss in nats per token and perplexity of a model on a text",
    .details = "Cuts each file into windows of max_target_length that do not overlap; every token "
               "but a file's\n"
               "first is predicted once. A run is evaluated with its own options, other models "
               "with the defaults;\n"
               "keys that matter: max_target_length, per_device_batch_size, eval_steps, "
               "dataset_type, dtype, threads.",
    .options = options,
    .n_options = sizeof options / sizeof options[0],
    .n_positional = 1,
    .takes_settings = true,
    .run = run,
};
