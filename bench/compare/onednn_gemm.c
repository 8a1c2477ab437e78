// onednn_gemm.c - a product per expert in oneDNN 3: inner products with weights that it packed
// beforehand, all experts with the same number of rows, so that one compiled kernel serves all.
// Compiled and run by onednn.py; no part of the build.
//
//     onednn_gemm f32|bf16 EXPERTS ROWS K N RUNS      prints version and the median in microseconds
#include <dnnl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define TRY(call)                                               \
    do {                                                        \
        const dnnl_status_t status_ = (call);                   \
        if (status_ != dnnl_success) {                          \
            fprintf(stderr, "%s: status %d\n", #call, status_); \
            exit(1);                                            \
        }                                                       \
    } while (0)

static dnnl_engine_t engine;
static dnnl_stream_t stream;
static dnnl_data_type_t type;

static dnnl_memory_desc_t matrix(size_t rows, size_t columns, dnnl_format_tag_t tag) {
    dnnl_memory_desc_t desc;
    const dnnl_dims_t dims = {(dnnl_dim_t)rows, (dnnl_dim_t)columns};
    TRY(dnnl_memory_desc_create_with_tag(&desc, 2, dims, type, tag));
    return desc;
}

// Memory of small numbers: one byte pattern, which is 2^-6 or so in both types.
static dnnl_memory_t numbers(const_dnnl_memory_desc_t desc) {
    dnnl_memory_t memory;
    void *p;
    TRY(dnnl_memory_create(&memory, desc, engine, DNNL_MEMORY_ALLOCATE));
    TRY(dnnl_memory_get_data_handle(memory, &p));
    memset(p, 0x3c, dnnl_memory_desc_get_size(desc));
    return memory;
}

static void execute(dnnl_primitive_t primitive, int n, const dnnl_exec_arg_t *args) {
    TRY(dnnl_primitive_execute(primitive, stream, n, args));
}

// Each expert's weights are another block of memory, as in use.
static dnnl_memory_t *pack(const_dnnl_memory_desc_t packed, size_t n_experts, size_t n, size_t k) {
    const dnnl_memory_desc_t plain = matrix(n, k, dnnl_ab);
    const dnnl_memory_t rows = numbers(plain);
    dnnl_memory_t *weights = malloc(n_experts * sizeof *weights);
    dnnl_primitive_desc_t desc;
    dnnl_primitive_t reorder;
    TRY(weights ? dnnl_success : dnnl_out_of_memory);
    TRY(dnnl_reorder_primitive_desc_create(&desc, plain, engine, packed, engine, NULL));
    TRY(dnnl_primitive_create(&reorder, desc));
    for (size_t e = 0; e < n_experts; e++) {
        TRY(dnnl_memory_create(&weights[e], packed, engine, DNNL_MEMORY_ALLOCATE));
        execute(reorder, 2, (dnnl_exec_arg_t[]){{DNNL_ARG_FROM, rows}, {DNNL_ARG_TO, weights[e]}});
    }
    TRY(dnnl_stream_wait(stream));
    return weights;
}

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    size_t number[5];
    for (int i = 0; i < 5; i++) number[i] = i + 2 < argc ? strtoul(argv[i + 2], NULL, 10) : 0;
    const size_t n_experts = number[0], rows = number[1], k = number[2], n = number[3];
    const size_t runs = number[4];
    if (argc != 7 || !n_experts || !rows || !k || !n || !runs || runs > 1000) {
        fputs("onednn_gemm f32|bf16 EXPERTS ROWS K N RUNS\n", stderr);
        return 2;
    }
    type = strcmp(argv[1], "bf16") == 0 ? dnnl_bf16 : dnnl_f32;
    TRY(dnnl_engine_create(&engine, dnnl_cpu, 0));
    TRY(dnnl_stream_create(&stream, engine, dnnl_stream_default_flags));
    const dnnl_memory_desc_t x = matrix(rows, k, dnnl_ab), y = matrix(rows, n, dnnl_ab);
    dnnl_primitive_desc_t desc;
    dnnl_primitive_t product;
    TRY(dnnl_inner_product_forward_primitive_desc_create(&desc, engine, dnnl_forward_inference, x,
                                                         matrix(n, k, dnnl_format_tag_any), NULL, y,
                                                         NULL));
    TRY(dnnl_primitive_create(&product, desc));
    const_dnnl_memory_desc_t packed = dnnl_primitive_desc_query_md(desc, dnnl_query_weights_md, 0);
    dnnl_memory_t *weights = pack(packed, n_experts, n, k);
    const dnnl_memory_t in = numbers(matrix(n_experts * rows, k, dnnl_ab));
    const dnnl_memory_t out = numbers(matrix(n_experts * rows, n, dnnl_ab));
    dnnl_memory_t *xs = malloc(2 * n_experts * sizeof *xs), *ys = xs + n_experts;
    void *in_p, *out_p;
    TRY(xs ? dnnl_success : dnnl_out_of_memory);
    TRY(dnnl_memory_get_data_handle(in, &in_p));
    TRY(dnnl_memory_get_data_handle(out, &out_p));
    const size_t x_bytes = dnnl_memory_desc_get_size(x), y_bytes = dnnl_memory_desc_get_size(y);
    for (size_t e = 0; e < n_experts; e++) {
        TRY(dnnl_memory_create(&xs[e], x, engine, (char *)in_p + e * x_bytes));
        TRY(dnnl_memory_create(&ys[e], y, engine, (char *)out_p + e * y_bytes));
    }
    double us[1001];
    for (size_t run = 0; run <= runs; run++) { // the first does not count
        us[run] = now_us();
        for (size_t e = 0; e < n_experts; e++)
            execute(product, 3,
                    (dnnl_exec_arg_t[]){{DNNL_ARG_SRC, xs[e]},
                                        {DNNL_ARG_WEIGHTS, weights[e]},
                                        {DNNL_ARG_DST, ys[e]}});
        TRY(dnnl_stream_wait(stream));
        us[run] = now_us() - us[run];
    }
    qsort(us + 1, runs, sizeof *us, by_value);
    const dnnl_version_t *v = dnnl_version();
    printf("%d.%d.%d %.1f\n", v->major, v->minor, v->patch, us[1 + runs / 2]);
    return 0;
}
