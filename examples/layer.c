// layer.c - one MoE layer forward and backward on random tokens, with nothing but dropless.h:
// how many tokens each expert got, and how long the passes took.
#include <dropless.h>

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { T = 512, D = 256, F = 128, E = 16, K = 4 };

#define TRY(call)                                                 \
    do {                                                          \
        if (call) {                                               \
            fprintf(stderr, #call ": %s\n", dpl_error_message()); \
            exit(1);                                              \
        }                                                         \
    } while (0)

static double now_ms(void) {
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

// n numbers in (-scale, scale) from a small generator: every run prints the same counts.
static float *random_array(size_t n, float scale) {
    static uint32_t x = 1;
    float *values = malloc(n * sizeof *values);
    if (!values) exit(1);
    for (size_t i = 0; i < n; i++) {
        x = x * 1664525u + 1013904223u;
        values[i] = scale * ((float)(x >> 8) / 8388608.0f - 1.0f);
    }
    return values;
}

int main(void) {
    dpl_ctx *ctx = NULL;
    dpl_layer *layer = NULL;
    dpl_layer_config config = {.d = D, .f = F, .shared_f = F, .dtype = DPL_F32};
    config.rule = (dpl_route_rule){.n_experts = E,
                                   .top_k = K,
                                   .n_groups = 1,
                                   .top_groups = 1,
                                   .sigmoid = true,
                                   .norm_topk = true,
                                   .scale = 2.5f};
    TRY(dpl_ctx_open(0, &ctx));
    TRY(dpl_layer_open(&config, ctx, &layer));

    // Weights are row-major, shaped as Hugging Face checkpoints have them; the layer copies them.
    enum { ROUTER, GATE, UP, DOWN, S_GATE, S_UP, S_DOWN, X, DY, Y, DX, DROUTER, N_ARRAYS };
    const size_t expert = (size_t)F * D, tokens = (size_t)T * D, router = (size_t)E * D;
    const size_t sizes[N_ARRAYS] = {router, E * expert, E * expert, E * expert, expert, expert,
                                    expert, tokens,     tokens,     tokens,     tokens, router};
    float *a[N_ARRAYS];
    for (int i = 0; i < N_ARRAYS; i++) a[i] = random_array(sizes[i], i < X ? 0.1f : 1.0f);
    const dpl_layer_weights weights = {a[ROUTER], NULL,      a[GATE], a[UP],
                                       a[DOWN],   a[S_GATE], a[S_UP], a[S_DOWN]};
    TRY(dpl_layer_set_weights(layer, &weights));

    const size_t ws_bytes = dpl_layer_workspace_bytes(layer, T);
    void *ws = aligned_alloc(64, (ws_bytes + 63) / 64 * 64);
    int64_t counts[E];
    for (int pass = 0; ws && pass < 3; pass++) {
        const double start = now_ms(), gflop = 6.0 * D * F * T * (K + 1) * 1e-9;
        TRY(dpl_layer_forward(layer, a[X], 0, T, NULL, ws, ws_bytes, a[Y], 0, counts));
        const double forward_ms = now_ms() - start;
        TRY(dpl_layer_backward(layer, a[X], 0, ws, a[DY], 0, a[DX], 0));
        const double backward_ms = now_ms() - start - forward_ms;
        printf("pass %d: forward %.2f ms (%.1f GFLOPS), backward %.2f ms (%.1f GFLOPS)\n", pass,
               forward_ms, gflop / forward_ms * 1e3, backward_ms, 2e3 * gflop / backward_ms);
    }
    const dpl_layer_gradients gradients = {.router = a[DROUTER]};
    TRY(dpl_layer_get_gradients(layer, &gradients));
    printf("tokens per expert:");
    for (int e = 0; ws && e < E; e++) printf(" %lld", (long long)counts[e]);
    printf("\ny[0] %g, dx[0] %g, drouter[0] %g (%d threads, %s)\n", (double)a[Y][0],
           (double)a[DX][0], (double)a[DROUTER][0], dpl_ctx_threads(ctx), dpl_ctx_cpu_level(ctx));
    for (int i = 0; i < N_ARRAYS; i++) free(a[i]);
    free(ws);
    dpl_layer_close(&layer);
    dpl_ctx_close(&ctx);
    return 0;
}
