// kernels.h - the kernel table: one set of single-threaded functions per CPU level.
//
// The plain-C table is complete and is the definition of right; each level then overwrites what it
// has. Block sizes travel with the kernels, so no caller asks which CPU it runs on.
#pragma once

#include "base/base.h"
#include "cpu/kernels_gemm.h"
#include "cpu/kernels_rows.h"

struct dpl_kernels {
    dpl_gemm_kernels gemm;
    dpl_row_kernels rows;
};

// The table of `level`: plain C, overwritten by each level up to it. Valid for ever.
const struct dpl_kernels *dpl_cpu_kernels(dpl_cpu_level level);

// Each instruction-set file has one non-static function; those of the rows: kernels_rows.h.
void dpl_gemm_kernels_ref(dpl_gemm_kernels *k);
void dpl_gemm_kernels_avx2(dpl_gemm_kernels *k);
void dpl_gemm_kernels_avx512(dpl_gemm_kernels *k);
