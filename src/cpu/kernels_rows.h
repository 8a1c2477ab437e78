// kernels_rows.h - the row part of the kernel table: fp32 loops that operators run over a row or
// a chunk. One template (kernels_rows_tmpl.h) is compiled once for each CPU level; nothing but the
// instruction set differs.
//
// Every kernel takes any n, 0 included, and any alignment. An output may be the same array as an
// input, never shifted against it. Reductions add in 16 (fp64: 8) lanes of fixed meaning, combined
// in a fixed order.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct dpl_adamw; // ops.h

typedef struct dpl_row_kernels {
    float (*max)(const float *x, size_t n); // -inf for n = 0; NaNs are passed over
    float (*sum)(const float *x, size_t n);
    float (*dot)(const float *x, const float *y, size_t n);
    double (*sum_f64)(const float *x, size_t n);
    double (*sum_squares_f64)(const float *x, size_t n);

    void (*axpy)(float a, const float *x, float *y, size_t n); // y += a * x
    void (*add)(const float *a, const float *b, float *y, size_t n);
    void (*scale)(float a, float *x, size_t n);
    // y = exp(x - sub), returns the sum of y. exp is good to 2 ulp; -inf gives 0, NaN gives NaN.
    float (*exp_sub_sum)(const float *x, float sub, float *y, size_t n);
    void (*sigmoid)(const float *x, float *y, size_t n);

    void (*to_bf16)(const float *x, uint16_t *y, size_t n); // to nearest even, NaN stays NaN
    void (*from_bf16)(const uint16_t *x, float *y, size_t n);

    // RMSNorm. y = x * rstd * gain
    void (*norm_forward)(const float *x, const float *gain, float rstd, float *y, size_t n);
    // sum of dy * gain * x
    float (*norm_dot)(const float *dy, const float *gain, const float *x, size_t n);
    // dx (= or +=) rstd * dy * gain - c * x;   dgain += dy * x * rstd
    void (*norm_backward)(const float *dy, const float *gain, const float *x, float rstd, float c,
                          bool accumulate, float *dx, float *dgain, size_t n);

    // Rotation of the pairs (lo[i], hi[i]) or (x[2i], x[2i+1]) by (cos[i], sign * sin[i]).
    void (*rope_split)(const float *cos, const float *sin, float sign, float *lo, float *hi,
                       size_t n);
    void (*rope_pairs)(const float *cos, const float *sin, float sign, float *x, size_t n);

    // gate_up: blocks of 16 gate and 16 up columns, whole blocks always. h (f) = silu(g) * u * w
    void (*swiglu_forward)(const float *gate_up, float w, float *h, size_t f);
    // dgate_up, padding 0; returns the sum of dh * silu(g) * u
    float (*swiglu_backward)(const float *dh, const float *gate_up, float w, float *dgate_up,
                             size_t f);

    void (*adamw)(const struct dpl_adamw *a, const float *grad, float *param, float *m, float *v,
                  size_t n);
} dpl_row_kernels;

// The one function of each instruction-set file.
void dpl_row_kernels_ref(dpl_row_kernels *k);
void dpl_row_kernels_avx2(dpl_row_kernels *k);
void dpl_row_kernels_avx512(dpl_row_kernels *k);
