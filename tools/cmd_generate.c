/*
 * cmd_generate.c - dropless generate: continues a prompt; the text, and nothing else, goes to stdout.
 *
 * Bytes are tokens where the vocabulary has no more than 256. Each byte is passed on as it comes; a reader sees
 * whole characters as soon as their last byte is there.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"

enum { PROMPT, PROMPT_IDS, TOKENS, TEMPERATURE, TOP_P, SEED };
static const cli_option options[] = {
    [PROMPT] = {"--prompt", "TEXT",
                "what to continue, its bytes are tokens; -: from stdin; default: a line end"},
    [PROMPT_IDS] = {"--prompt-ids", "I,J,...",
                    "token ids instead; the answer is then printed as ids"},
    [TOKENS] = {"--tokens", "N", "tokens to generate (default 200, or what fits)"},
    [TEMPERATURE] = {"--temperature", "X", "0: always the likeliest token (default 1)"},
    [TOP_P] = {"--top-p", "P",
               "draw from the likeliest tokens with this probability together (default 1)"},
    [SEED] = {"--seed", "N", "of the draws (default 0)"},
};

typedef struct prompt {
    int32_t *ids;
    size_t n, n_room;
} prompt;

static bool add(prompt *p, int32_t id)
{
    if (p->n == p->n_room) {
        const size_t n_room = p->n_room ? 2 * p->n_room : 1024;
        int32_t *ids = realloc(p->ids, n_room * sizeof *ids);
        if (!ids) {
            fprintf(stderr, "dropless: no memory for a prompt of %zu tokens\n", n_room);
            return false;
        }
        p->ids = ids;
        p->n_room = n_room;
    }
    p->ids[p->n++] = id;
    return true;
}

static int read_stdin(prompt *p)
{
    char block[4096];
    for (size_t n; (n = fread(block, 1, sizeof block, stdin)) > 0;)
        for (size_t i = 0; i < n; i++)
            if (!add(p, (unsigned char)block[i])) return CLI_FAILURE;
    if (!ferror(stdin)) return CLI_OK;
    perror("dropless: cannot read the prompt from standard input");
    return CLI_FAILURE;
}

static int read_ids(const cli_args *args, prompt *p)
{
    const char *text = args->option[PROMPT_IDS];
    for (;;) {
        char *end;
        errno = 0;
        const long long id = strtoll(text, &end, 10);
        if (end == text || errno || id < 0 || id > INT32_MAX || (*end && *end != ','))
            return cli_usage(args->command,
                             "--prompt-ids is '%s', expected ids with commas between",
                             args->option[PROMPT_IDS]);
        if (!add(p, (int32_t)id)) return CLI_FAILURE;
        if (!*end) return CLI_OK;
        text = end + 1;
    }
}

static int read_prompt(const cli_args *args, prompt *p)
{
    if (args->option[PROMPT_IDS]) return read_ids(args, p);
    const char *text = args->option[PROMPT] ? args->option[PROMPT] : "\n";
    int code = CLI_OK;
    if (!strcmp(text, "-"))
        code = read_stdin(p);
    else
        for (; *text && code == CLI_OK; text++)
            if (!add(p, (unsigned char)*text)) code = CLI_FAILURE;
    if (code == CLI_OK && p->n == 0) return cli_usage(args->command, "the prompt is empty");
    return code;
}

static int stream(dpl_generator *generator, size_t n_tokens, bool as_ids)
{
    for (size_t i = 0; i < n_tokens; i++) {
        int32_t id;
        if (dpl_generator_next(generator, &id) != DPL_OK) return cli_fail();
        if (as_ids)
            printf("%s%d", i ? " " : "", (int)id);
        else
            putchar(id);
        if (fflush(stdout) != 0) return CLI_OK; // main reports it
    }
    if (as_ids || isatty(STDOUT_FILENO) == 1) putchar('\n');
    return CLI_OK;
}

static int generate(const cli_args *args, dpl_model *model, const prompt *p, size_t n_tokens,
                    dpl_generator_options *o)
{
    dpl_model_info info = {.struct_bytes = sizeof info};
    dpl_generator *generator = NULL;
    const bool as_ids = args->option[PROMPT_IDS] != NULL;
    if (dpl_model_get_info(model, &info) != DPL_OK) return cli_fail();
    if (!as_ids && info.vocab > 256) {
        fprintf(stderr,
                "dropless: the model has %zu tokens, not bytes, and tokenizers are not supported: "
                "use --prompt-ids\n",
                info.vocab);
        return CLI_FAILURE;
    }
    if (!args->option[TOKENS] && p->n < info.positions_max && n_tokens > info.positions_max - p->n)
        n_tokens = info.positions_max - p->n;
    if (n_tokens > info.positions_max || p->n > info.positions_max - n_tokens)
        return cli_usage(args->command,
                         "a prompt of %zu and --tokens %zu are more than the model's %zu positions",
                         p->n, n_tokens, info.positions_max);
    o->tokens_max = p->n + n_tokens;
    dpl_status status = dpl_generator_open(model, o, &generator);
    if (status == DPL_OK) status = dpl_generator_feed(generator, p->ids, p->n);
    const int code = status == DPL_OK ? stream(generator, n_tokens, as_ids) : cli_fail();
    dpl_generator_close(&generator);
    return code;
}

static int run(const cli_args *args)
{
    double n_tokens, temperature, top_p, seed;
    if (!cli_number(args, TOKENS, 200, 0, 1e9, true, &n_tokens) ||
        !cli_number(args, TEMPERATURE, 1, 0, 1e6, false, &temperature) ||
        !cli_number(args, TOP_P, 1, 1e-9, 1, false, &top_p) ||
        !cli_number(args, SEED, 0, 0, 9007199254740992.0, true, &seed))
        return CLI_USAGE;
    if (args->option[PROMPT] && args->option[PROMPT_IDS])
        return cli_usage(args->command, "--prompt and --prompt-ids exclude each other");
    dpl_generator_options o = {.struct_bytes = sizeof o,
                               .temperature = temperature,
                               .top_p = top_p,
                               .seed = (uint64_t)seed};
    dpl_config *config = NULL;
    dpl_ctx *ctx = NULL;
    dpl_model *model = NULL;
    prompt p = {0};
    int code = read_prompt(args, &p);
    if (code == CLI_OK) code = cli_open(args, args->positional[0], &config, &ctx);
    if (code == CLI_OK && dpl_model_open(ctx, args->positional[0], config, &model) != DPL_OK)
        code = cli_fail();
    if (code == CLI_OK) code = generate(args, model, &p, (size_t)n_tokens, &o);
    dpl_model_close(&model);
    dpl_ctx_close(&ctx);
    dpl_config_close(&config);
    free(p.ids);
    return code;
}

const cli_command cli_generate = {
    .name = "generate",
    .arguments = "PATH [--prompt TEXT] [--tokens N] [--temperature X] [--top-p P] [--seed N] "
                 "[key=value ...]",
    .summary = "continue a text",
    .details = "Prints the continuation on stdout as it comes, and nothing else. Equal model, "
               "prompt, options and\n"
               "seed give equal text. Keys that matter: dtype, threads.",
    .options = options,
    .n_options = sizeof options / sizeof options[0],
    .n_positional = 1,
    .takes_settings = true,
    .run = run,
};
