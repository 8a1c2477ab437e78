// kernels_rows_avx512.c - the row kernels, built with AVX-512.
// The template holds them; this file exists to get its own compiler flags.
#define FILL dpl_row_kernels_avx512
#include "cpu/kernels_rows_tmpl.h"
