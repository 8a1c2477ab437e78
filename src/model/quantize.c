// quantize.c - which weights products use in MXFP8 or NVFP4, and what that takes.
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

static dpl_status quantize_param(dpl_model *m, dpl_param *p, dpl_quant_rule rule) {
    const size_t codes = dpl_quant_code_bytes(rule.format, p->n_groups, p->n, p->k);
    const size_t scales = dpl_quant_scale_bytes(rule.format, p->n_groups, p->n, p->k);
    dpl_quant_weight *w = &p->quant;
    w->rule = rule;
    for (int way = 0; way < 2; way++) {
        w->codes[way] = dpl_alloc(codes);
        w->scales[way] = dpl_alloc(scales);
    }
    w->tensor_scale = dpl_alloc_array(p->n_groups, sizeof *w->tensor_scale);
    if (!w->codes[0] || !w->codes[1] || !w->scales[0] || !w->scales[1] || !w->tensor_scale)
        return dpl_fail(DPL_ENOMEM, "no memory for %.3f GB of quantized weights",
                        1e-9 * (double)codes);
    m->quant_elems += p->elems;
    m->quant_bytes += 2 * (codes + scales);
    return DPL_OK;
}

dpl_status dpl_model_quantize(dpl_model *m, const dpl_quant_rule *dense,
                              const dpl_quant_rule *experts) {
    if (!dense && !experts) return DPL_OK;
    DPL_CHECK(m->dtype == DPL_BF16, "quantization needs dtype=bfloat16");
    DPL_EXPECT(dpl_model_shards(m) == 1, DPL_ENOSUP,
               "quantization of parameters that are sharded is not supported yet: expected "
               "ici_fsdp_parallelism=1 and dcn_fsdp_parallelism=1");
    for (dpl_param *p = m->params.list; p < m->params.list + m->params.n; p++) {
        const dpl_quant_rule *rule = dpl_param_is_expert(p)    ? experts
                                     : is_dense_product(p->id) ? dense
                                                               : NULL;
        if (rule) DPL_TRY(quantize_param(m, p, *rule));
    }
    return DPL_OK;
}

void dpl_model_requantize(const dpl_model *m, const dpl_param *p) {
    if (p->quant.codes[0])
        dpl_quant_weight_pack(m->ctx, m->params.master + p->offset, p->n_groups, p->n, p->k,
                              &p->quant);
}

void dpl_model_unquantize(dpl_model *m) {
    for (size_t i = 0; m->params.list && i < m->params.n; i++) {
        dpl_quant_weight *quant = &m->params.list[i].quant;
        for (int way = 0; way < 2; way++) dpl_free(quant->codes[way]), dpl_free(quant->scales[way]);
        dpl_free(quant->tensor_scale);
    }
}
