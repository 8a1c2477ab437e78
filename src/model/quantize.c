// quantize.c - which weights products use in MXFP8 or NVFP4, and what that takes.
#include "model/model.h"

#define ROUNDING 0x726f756e64696e67u // no other numbers are drawn with such seeds

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

static dpl_status open_codes(dpl_model *m, dpl_param *p) {
    dpl_quant_weight *w = &p->quant;
    const size_t codes = dpl_quant_code_bytes(w->rule.format, p->n_groups, p->n, p->k);
    const size_t scales = dpl_quant_scale_bytes(w->rule.format, p->n_groups, p->n, p->k);
    for (int way = 0; way < 2; way++) {
        w->codes[way] = dpl_alloc(codes);
        w->scales[way] = dpl_alloc(scales);
    }
    w->tensor_scale = dpl_alloc_array(p->n_groups, sizeof *w->tensor_scale);
    if (!w->codes[0] || !w->codes[1] || !w->scales[0] || !w->scales[1] || !w->tensor_scale)
        return dpl_fail(DPL_ENOMEM, "no memory for %.3f GB of quantized weights",
                        1e-9 * (double)codes);
    m->quant_bytes += 2 * (codes + scales);
    return DPL_OK;
}

static bool is_sharded(const dpl_model *m) {
    return dpl_model_shards(m) > 1;
}

static void mark_quantized(dpl_model *m, dpl_param *p, const dpl_quant_rule *rule) {
    dpl_span_of *span = m->params.units[p->layer + 1].span;
    while (p->offset >= span->first + span->elems) span++;
    span->quantized = true;
    p->quantized = true;
    p->quant.rule = *rule;
    p->quant.streams = p->streams;
    m->quant_elems += p->elems / dpl_model_shards(m);
}

dpl_status dpl_model_quantize(dpl_model *m, const dpl_quant_rule *dense,
                              const dpl_quant_rule *experts) {
    if (!dense && !experts) return DPL_OK;
    DPL_CHECK(m->dtype == DPL_BF16, "quantization needs dtype=bfloat16");
    for (dpl_param *p = m->params.list; p < m->params.list + m->params.n; p++) {
        const dpl_quant_rule *rule = is_dense_product(p->id) ? dense : NULL;
        if (dpl_param_is_expert(p)) rule = experts;
        if (!rule) continue;
        mark_quantized(m, p, rule);
        if (!is_sharded(m)) DPL_TRY(open_codes(m, p));
    }
    return is_sharded(m) ? dpl_shards_quantize(m, &m->quant_bytes) : DPL_OK;
}

void dpl_model_seed_rounding(dpl_model *m, uint64_t seed, uint64_t step, uint64_t rank) {
    m->ctx->random_seed = dpl_rng_u64(seed ^ ROUNDING, rank, step);
    for (size_t i = 0; i < m->params.n; i++) {
        dpl_param *p = &m->params.list[i];
        for (size_t way = 0; way < 2; way++) p->streams[way] = (uint64_t)(2 * i + way) << 32;
    }
}

void dpl_model_requantize(const dpl_model *m, const dpl_param *p) {
    if (p->quantized && !is_sharded(m))
        dpl_quant_weight_pack(m->ctx, m->params.master + p->offset, p->n_groups, p->n, p->k,
                              &p->quant);
}

void dpl_model_unquantize(dpl_model *m) {
    for (size_t i = 0; m->params.list && i < m->params.n; i++) {
        dpl_quant_weight *quant = &m->params.list[i].quant;
        if (!m->params.list[i].quantized || is_sharded(m)) continue;
        for (int way = 0; way < 2; way++) dpl_free(quant->codes[way]), dpl_free(quant->scales[way]);
        dpl_free(quant->tensor_scale);
    }
}
