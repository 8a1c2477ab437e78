/*
 * kernels_rows_ref.c - the row kernels, plain C, the definition of right.
 * The template holds them; this file exists to get its own compiler flags.
 */
#include "cpu/kernels_rows_tmpl.h"

// kernels.h declares this, but it needs the other tables' headers too.
void dpl_row_kernels_ref(dpl_row_kernels *k);

void dpl_row_kernels_ref(dpl_row_kernels *k)
{
    fill(k);
}
