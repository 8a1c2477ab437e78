// data.c - batches: windows of a token stream in a shuffled order, or one fixed batch.
//
// A window holds S tokens and the one that follows each; windows do not overlap, so every token is
// predicted once in an epoch. The order of an epoch is a keyed permutation that is computed, not
// stored: a position is all that a checkpoint needs. The last part of the tokens is for evaluation
// unless that has data of its own.
#include "train/train.h"

dpl_status dpl_tokens_alloc(size_t n_batch, size_t n_seq, dpl_tokens *tokens) {
    const size_t n = n_batch * n_seq;
    int32_t *all = dpl_alloc_array(n, 4 * sizeof *all);
    if (!all) return dpl_fail(DPL_ENOMEM, "no memory for a batch of %zu tokens", n);
    *tokens = (dpl_tokens){n_batch, n_seq, all, all + n, all + 2 * n, all + 3 * n};
    for (size_t i = 0; i < n; i++) tokens->segment[i] = 1;
    for (size_t i = 0; i < n; i++) tokens->position[i] = (int32_t)(i % n_seq);
    return DPL_OK;
}

void dpl_tokens_free(dpl_tokens *tokens) {
    dpl_free(tokens->ids);
    *tokens = (dpl_tokens){0};
}

void dpl_tokens_copy_row(const dpl_tokens *from, size_t from_row, dpl_tokens *to, size_t to_row) {
    const size_t n = to->n_seq;
    for (size_t i = 0; i < 4; i++) // ids, targets, segment, position: one block of memory
        memcpy(to->ids + (i * to->n_batch + to_row) * n,
               from->ids + (i * from->n_batch + from_row) * n, n * sizeof *to->ids);
}

/* ---- the order of an epoch ---- */
// A four-round Feistel network on an even number of bits is a permutation of 0 .. 4^k - 1; a value
// past n - 1 is sent through again until it falls inside, which keeps it a permutation.
uint64_t dpl_shuffle(uint64_t n, uint64_t seed, uint64_t epoch, uint64_t i) {
    int half = 1;
    while (half < 32 && (UINT64_C(1) << 2 * half) < n) half++;
    const uint64_t mask = (UINT64_C(1) << half) - 1;
    do {
        uint64_t left = i >> half, right = i & mask;
        for (uint64_t round = 0; round < 4; round++) {
            const uint64_t mixed = left ^ (dpl_rng_u64(seed, epoch * 4 + round, right) & mask);
            left = right;
            right = mixed;
        }
        i = left << half | right;
    } while (i >= n);
    return i;
}

/* ---- windows ---- */
// The tokens first .. end-1: one span, or with packing=false one for each document.
static dpl_status open_set(const dpl_options *o, const dpl_source *source, uint64_t first,
                           uint64_t end, dpl_token_set *set) {
    const size_t from = o->packing ? 0 : dpl_source_document_of(source, first);
    const size_t to = o->packing ? 1 : dpl_source_document_of(source, end - 1) + 1;
    set->spans = dpl_alloc_array(to - from, sizeof *set->spans);
    if (!set->spans) return dpl_fail(DPL_ENOMEM, "no memory for %zu documents", to - from);
    for (size_t i = from; i < to; i++) {
        const uint64_t from_token = o->packing ? first : DPL_MAX(first, source->documents[i]);
        const uint64_t to_token = o->packing ? end : DPL_MIN(end, source->documents[i + 1]);
        if (to_token < from_token + 2) continue; // a single token predicts nothing
        set->spans[set->n_spans++] = (dpl_token_span){from_token, set->n_samples};
        set->n_samples += (to_token - from_token - 2) / (uint64_t)o->max_target_length + 1;
    }
    set->source = source;
    set->end = end;
    return DPL_OK;
}

// Documents of a window become segments 1, 2, ..; positions count from their, or its, start.
// Past the last sample there is padding.
static void fill_row(const dpl_data *data, const dpl_token_set *set, uint64_t sample,
                     dpl_tokens *tokens, size_t row) {
    if (sample < set->fixed.n_batch) {
        dpl_tokens_copy_row(&set->fixed, (size_t)sample, tokens, row);
        return;
    }
    const bool across = data->o->attend_across_documents;
    const size_t S = tokens->n_seq, at = row * S;
    size_t n = 0, document = 0, low = 0, high = set->n_spans; // n tokens have a next one
    uint64_t first = 0, border = 0;
    if (sample < set->n_samples) {
        while (high - low > 1) {
            const size_t middle = (low + high) / 2;
            *(set->spans[middle].samples_before <= sample ? &low : &high) = middle;
        }
        const dpl_token_span *s = &set->spans[low];
        first = s->first + (sample - s->samples_before) * S;
        document = dpl_source_document_of(set->source, first);
        border = set->source->documents[document + 1];
        const uint64_t end = data->o->packing ? set->end : DPL_MIN(set->end, border);
        n = (size_t)DPL_MIN((uint64_t)S, end - first - 1);
        dpl_source_read(set->source, first, n + 1, data->window);
    }
    int32_t segment = 1, position = 0;
    for (size_t i = 0; i < S; i++) {
        const bool real = i < n;
        while (real && !across && first + i >= border) {
            border = set->source->documents[++document + 1];
            segment += position > 0;
            position = 0;
        }
        const bool next = real && (across || first + i + 1 < border);
        tokens->ids[at + i] = real ? data->window[i] : 0;
        tokens->targets[at + i] = next ? data->window[i + 1] : -1;
        tokens->segment[at + i] = real ? segment : 0;
        tokens->position[at + i] = real ? position++ : 0;
    }
}

// A fixed batch serves evaluation too unless there is another one.
static const dpl_token_set *eval_set(const dpl_data *data) {
    return data->train.fixed.n_batch && !data->eval.n_samples ? &data->train : &data->eval;
}

uint64_t dpl_data_samples(const dpl_data *data, bool eval) {
    return eval ? eval_set(data)->n_samples : data->train.n_samples;
}

void dpl_data_train(const dpl_data *data, uint64_t position, size_t first, dpl_tokens *tokens) {
    const uint64_t n = data->train.n_samples, seed = (uint64_t)data->o->data_shuffle_seed;
    const bool shuffles = data->o->enable_data_shuffling && !data->train.fixed.n_batch;
    if (data->o->reuse_example_batch) position = 0;
    position += first;
    for (size_t row = 0; row < tokens->n_batch; row++, position++) {
        const uint64_t i = position % n;
        const uint64_t sample = shuffles ? dpl_shuffle(n, seed, position / n, i) : i;
        fill_row(data, &data->train, sample, tokens, row);
    }
}

void dpl_data_eval(const dpl_data *data, uint64_t first, dpl_tokens *tokens) {
    for (size_t row = 0; row < tokens->n_batch; row++)
        fill_row(data, eval_set(data), first + row, tokens, row);
}

/* ---- fixed batches ---- */
static dpl_status fill_synthetic(const dpl_options *o, size_t n_batch, size_t vocab,
                                 dpl_token_set *set) {
    dpl_tokens *batch = &set->fixed;
    DPL_TRY(dpl_tokens_alloc(n_batch, (size_t)o->max_target_length, batch));
    const size_t S = batch->n_seq;
    set->n_samples = n_batch;
    for (size_t i = 0; i < n_batch * S; i++) {
        const uint64_t at = i / S * (S + 1) + i % S, seed = (uint64_t)o->data_shuffle_seed;
        batch->ids[i] = (int32_t)(dpl_rng_u64(seed, 0, at) % vocab);
        batch->targets[i] = (int32_t)(dpl_rng_u64(seed, 0, at + 1) % vocab);
    }
    return DPL_OK;
}

// Checks the shape of a (B, S) tensor of integers; n_batch 0: any B. NULL where there is none.
static dpl_status find_plane(const dpl_st_file *file, const char *name, size_t n_batch,
                             size_t n_seq, const dpl_st_tensor **tensor_out) {
    const dpl_st_tensor *t = *tensor_out = dpl_st_find(file, name);
    if (!t || (t->rank == 2 && (size_t)t->shape[1] == n_seq && t->shape[0] > 0 &&
               (n_batch == 0 || (size_t)t->shape[0] == n_batch)))
        return DPL_OK;
    return dpl_fail(DPL_EINVAL, "%s: %s has %d dimensions, the last of %lld, expected (%zu, %zu)",
                    file->path, name, t->rank, (long long)t->shape[t->rank > 0 ? t->rank - 1 : 0],
                    n_batch, n_seq);
}

// Reads integers low .. high; a tensor that is missing leaves `values` alone, where it may.
static dpl_status read_plane(const dpl_st_file *file, const char *name, int32_t low, int32_t high,
                             const dpl_tokens *shape, int32_t *values) {
    const dpl_st_tensor *t;
    DPL_TRY(find_plane(file, name, shape->n_batch, shape->n_seq, &t));
    return t ? dpl_st_read_i32(t, low, high, values) : DPL_OK;
}

// MaxText's batch: a target counts where targets_segmentation is not 0; padding predicts nothing.
static dpl_status read_planes(const dpl_st_file *file, size_t n_batch, size_t n_seq, size_t vocab,
                              dpl_tokens *b) {
    const int32_t max_id = (int32_t)vocab - 1;
    const dpl_st_tensor *inputs;
    DPL_TRY(find_plane(file, "inputs", n_batch, n_seq, &inputs));
    DPL_EXPECT(inputs && dpl_st_find(file, "targets"), DPL_EFORMAT,
               "%s: tensor \"inputs\" or \"targets\" is missing", file->path);
    DPL_TRY(dpl_tokens_alloc((size_t)inputs->shape[0], n_seq, b));
    const size_t n = b->n_batch * n_seq;
    DPL_TRY(dpl_st_read_i32(inputs, 0, max_id, b->ids));
    DPL_TRY(read_plane(file, "inputs_position", 0, INT32_MAX, b, b->position));
    DPL_TRY(read_plane(file, "targets", -1, max_id, b, b->targets));
    DPL_TRY(read_plane(file, "targets_segmentation", 0, INT32_MAX, b, b->segment));
    for (size_t i = 0; i < n; i++) {
        if (b->segment[i] == 0) b->targets[i] = -1;
        b->segment[i] = 1;
    }
    DPL_TRY(read_plane(file, "inputs_segmentation", 0, INT32_MAX, b, b->segment));
    for (size_t i = 0; i < n; i++)
        if (b->segment[i] == 0) b->targets[i] = -1;
    return DPL_OK;
}

static dpl_status read_batch(const char *path, size_t n_batch, size_t n_seq, size_t vocab,
                             dpl_token_set *set) {
    dpl_st_file *file;
    DPL_TRY(dpl_st_open(path, &file));
    const dpl_status status = read_planes(file, n_batch, n_seq, vocab, &set->fixed);
    set->n_samples = set->fixed.n_batch;
    dpl_st_close(&file);
    return status;
}

/* ---- open and close ---- */
static dpl_status open_streams(dpl_data *data, size_t vocab) {
    const dpl_options *o = data->o;
    const int width = dpl_is(o->dataset_type, "text") ? 1 : (int)o->dataset_token_bytes;
    DPL_CHECK(o->dataset_token_bytes % 2 == 0, "dataset_token_bytes is odd, expected 0, 2 or 4");
    DPL_TRY(dpl_source_open(o->dataset_path, width, vocab, &data->source));
    const uint64_t n = data->source->n_tokens;
    uint64_t n_train = n - (uint64_t)((double)n * o->eval_split_fraction);
    if (o->eval_dataset_path[0]) {
        DPL_TRY(dpl_source_open(o->eval_dataset_path, width, vocab, &data->eval_source));
        const uint64_t n_eval = data->eval_source->n_tokens;
        DPL_TRY(open_set(o, data->eval_source, 0, n_eval, &data->eval));
        n_train = n;
    } else if (n_train < n) {
        DPL_TRY(open_set(o, data->source, n_train, n, &data->eval));
    }
    if (n_train > 0) DPL_TRY(open_set(o, data->source, 0, n_train, &data->train));
    DPL_CHECK((n_train > 0 ? &data->train : &data->eval)->n_samples > 0,
              "%s: no token to predict: %llu tokens, expected two at least", o->dataset_path,
              (unsigned long long)(n_train > 0 ? n_train : n));
    return DPL_OK;
}

dpl_status dpl_data_open(const dpl_options *o, size_t n_batch, size_t vocab, dpl_data *data) {
    const size_t n_seq = (size_t)o->max_target_length;
    data->o = o;
    data->window = dpl_alloc_array(n_seq + 1, sizeof *data->window);
    DPL_EXPECT(data->window, DPL_ENOMEM, "no memory for a window of %zu tokens", n_seq);
    if (dpl_is(o->dataset_type, "synthetic"))
        return fill_synthetic(o, n_batch, vocab, &data->train);
    if (!dpl_is(o->dataset_type, "safetensors")) return open_streams(data, vocab);
    DPL_TRY(read_batch(o->dataset_path, n_batch, n_seq, vocab, &data->train));
    if (!o->eval_dataset_path[0]) return DPL_OK;
    return read_batch(o->eval_dataset_path, 0, n_seq, vocab, &data->eval);
}

void dpl_data_close(dpl_data *data) {
    dpl_free(data->train.spans);
    dpl_free(data->eval.spans);
    dpl_free(data->window);
    dpl_tokens_free(&data->train.fixed);
    dpl_tokens_free(&data->eval.fixed);
    dpl_source_close(&data->source);
    dpl_source_close(&data->eval_source);
    *data = (dpl_data){0};
}
