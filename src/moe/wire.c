// wire.c - rows of tokens on their way to the experts in MXFP8: half of the bytes of bf16.
//
// On the way a row is a row of bf16 like any other to those who move it: its codes, its scales and
// maybe a byte to make them even. It is rounded wherever its expert is, also on this rank: so that
// results are those of any other mesh.
#include "moe/moe.h"

size_t dpl_wire_width(size_t d) {
    return dpl_div_up(d + dpl_div_up(d, DPL_MX_BLOCK), 2);
}

static dpl_codes parts_of(dpl_mat wire, size_t d) {
    const size_t row_bytes = wire.ld * sizeof(uint16_t);
    return (dpl_codes){wire.p, (uint8_t *)wire.p + d, row_bytes, row_bytes, NULL};
}

dpl_mat dpl_wire_pack(dpl_ctx *ctx, dpl_mat x, size_t n_rows, size_t d) {
    const dpl_mat wire = dpl_moe_mat(ctx, NULL, n_rows, dpl_wire_width(d), DPL_BF16);
    dpl_mx_quantize(ctx, x, (dpl_row_map){0}, dpl_one_group(n_rows), d, DPL_E4M3, DPL_SCALE_UP,
                    parts_of(wire, d), (dpl_codes){0});
    return wire;
}

void dpl_wire_unpack(dpl_ctx *ctx, dpl_mat wire, size_t n_rows, size_t d, dpl_mat y) {
    dpl_mx_expand_rows(ctx, parts_of(wire, d), n_rows, d, DPL_E4M3, y);
}

void dpl_wire_round(dpl_ctx *ctx, dpl_mat x, size_t n_rows, size_t d, dpl_mat y) {
    const size_t mark = dpl_ctx_mark(ctx);
    dpl_wire_unpack(ctx, dpl_wire_pack(ctx, x, n_rows, d), n_rows, d, y);
    dpl_ctx_release(ctx, mark);
}
