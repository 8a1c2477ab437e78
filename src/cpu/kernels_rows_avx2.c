// kernels_rows_avx2.c - the row kernels, built with AVX2 and FMA.
// The template holds them; this file exists to get its own compiler flags.
#define FILL dpl_row_kernels_avx2
#include "cpu/kernels_rows_tmpl.h"
