// kernels_rows_ref.c - the row kernels, plain C, the definition of right.
// The template holds them; this file exists to get its own compiler flags.
#define FILL dpl_row_kernels_ref
#include "cpu/kernels_rows_tmpl.h"
