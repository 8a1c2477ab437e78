// quantize.c - which weights products use in MXFP8, and what that takes.
#include "model/model.h"

static bool is_dense_product(dpl_param_id id) {
    switch (id) {
    case DPL_P_Q:
    case DPL_P_Q_A:
    case DPL_P_Q_B:
    case DPL_P_KV_A:
    case DPL_P_KV_B:
    case DPL_P_O:
    case DPL_P_GATE_UP:
    case DPL_P_DOWN:
    case DPL_P_SHARED_GATE_UP:
    case DPL_P_SHARED_DOWN:
    case DPL_P_MTP_PROJ:
        return true;
    default:
        return false;
    }
}

static dpl_status quantize_param(dpl_model *m, dpl_param *p, dpl_mx_rule rule) {
    const size_t bytes = dpl_mx_weight_bytes(p->n_groups, p->n, p->k);
    p->mx.rule = rule;
    for (int way = 0; way < 2; way++) {
        p->mx.codes[way] = dpl_alloc(bytes);
        p->mx.scales[way] = dpl_alloc(bytes / DPL_MX_BLOCK);
        if (!p->mx.codes[way] || !p->mx.scales[way])
            return dpl_fail(DPL_ENOMEM, "no memory for %.3f GB of MXFP8 weights",
                            1e-9 * (double)bytes);
    }
    m->mx_elems += p->elems;
    m->mx_bytes += 2 * (bytes + bytes / DPL_MX_BLOCK);
    return DPL_OK;
}

dpl_status dpl_model_quantize(dpl_model *m, bool dense, bool experts, dpl_mx_rule rule) {
    if (!dense && !experts) return DPL_OK;
    DPL_CHECK(m->dtype == DPL_BF16, "quantization needs dtype=bfloat16");
    DPL_EXPECT(dpl_model_shards(m) == 1, DPL_ENOSUP,
               "quantization of parameters that are sharded is not supported yet: expected "
               "ici_fsdp_parallelism=1 and dcn_fsdp_parallelism=1");
    for (dpl_param *p = m->params.list; p < m->params.list + m->params.n; p++)
        if ((dense && is_dense_product(p->id)) || (experts && dpl_param_is_expert(p)))
            DPL_TRY(quantize_param(m, p, rule));
    return DPL_OK;
}

void dpl_model_requantize(const dpl_model *m, const dpl_param *p) {
    if (p->mx.codes[0])
        dpl_mx_weight_pack(m->ctx, m->params.master + p->offset, p->n_groups, p->n, p->k, &p->mx);
}

void dpl_model_unquantize(dpl_model *m) {
    for (size_t i = 0; m->params.list && i < m->params.n; i++) {
        dpl_mx_weight *mx = &m->params.list[i].mx;
        for (int way = 0; way < 2; way++) dpl_free(mx->codes[way]), dpl_free(mx->scales[way]);
    }
}
