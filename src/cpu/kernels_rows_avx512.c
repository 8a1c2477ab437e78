/*
 * kernels_rows_avx512.c - the row kernels, built with AVX-512.
 * The template holds them; this file exists to get its own compiler flags.
 */
#include "cpu/kernels_rows_tmpl.h"

// kernels.h declares this, but it needs the other tables' headers too.
void dpl_row_kernels_avx512(dpl_row_kernels *k);

void dpl_row_kernels_avx512(dpl_row_kernels *k)
{
    fill(k);
}
