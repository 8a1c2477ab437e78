// kernels_avx512.c - all kernels with AVX-512; the grouped GEMM's with 512-bit vectors.
#include "cpu/kernels_avx512.h"
#include "cpu/kernels_gemm_tmpl.h"
#include "cpu/kernels_rows_tmpl.h"

#include "cpu/kernels_quant_tmpl.h"

#include "cpu/kernels_nv_gemm_tmpl.h"
#include "cpu/kernels_nv_tmpl.h"

void dpl_kernels_avx512(dpl_kernels *k) {
    k->gemm[DPL_F32] = (dpl_gemm_kernels)GEMM_F32("avx512");
    k->gemm[DPL_BF16] = (dpl_gemm_kernels)GEMM_BF16("avx512");
    dpl_set_nv_gemm(k, "avx512", NV_MR, nv_pack, nv_tile);
    k->rows = (dpl_row_kernels){ROW_KERNELS};
    k->quant = (dpl_quant_kernels){QUANT_KERNELS};
}
