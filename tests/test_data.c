/*
 * test_data.c - batches: every token once, in an order that a seed and a position give, borders of
 * documents kept.
 *
 * Numbers in comments are rows of known-faults.md.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "scratch.h"
#include "trainkit.h"

static dpl_data open_data(const dpl_config *config, size_t n_batch) {
    dpl_data data = {0};
    check_ok(dpl_data_open(&config->o, n_batch, 256, &data));
    return data;
}

// Text in which each position is known by its bytes: 4-byte counters.
static void write_counters(const char *path, size_t bytes) {
    uint8_t *text = malloc(bytes);
    for (size_t i = 0; i < bytes; i++) text[i] = (uint8_t)(dpl_rng_u64(9, 9, i) & 0xff);
    scratch_write(path, text, bytes);
    free(text);
}

static int32_t byte_at(size_t i) {
    return (int32_t)(dpl_rng_u64(9, 9, i) & 0xff);
}

/* ---- order ---- */

static void shuffle_is_a_permutation(void **state) {
    (void)state;
    static const uint64_t sizes[] = {1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 4097};
    for (size_t s = 0; s < DPL_COUNT(sizes); s++)
        for (uint64_t epoch = 0; epoch < 3; epoch++) {
            const uint64_t n = sizes[s];
            uint8_t *seen = calloc(n, 1);
            for (uint64_t i = 0; i < n; i++) {
                const uint64_t j = dpl_shuffle(n, 5, epoch, i);
                assert_true(j < n && !seen[j]);
                seen[j] = 1;
            }
            free(seen);
        }
    // Another epoch and another seed are other orders, and no order is the identity.
    size_t same_epoch = 0, same_seed = 0, fixed = 0, steps = 0;
    for (uint64_t i = 0; i < 1000; i++) {
        same_epoch += dpl_shuffle(1000, 5, 0, i) == dpl_shuffle(1000, 5, 1, i);
        same_seed += dpl_shuffle(1000, 5, 0, i) == dpl_shuffle(1000, 6, 0, i);
        fixed += dpl_shuffle(1000, 5, 0, i) == i;
        steps += dpl_shuffle(1000, 5, 0, (i + 1) % 1000) == (dpl_shuffle(1000, 5, 0, i) + 1) % 1000;
    }
    assert_true(same_epoch < 10 && same_seed < 10 && fixed < 10 && steps < 10);
    // Sizes that no index in memory could hold.
    assert_true(dpl_shuffle(UINT64_C(1) << 50, 1, 2, 3) < UINT64_C(1) << 50);
}

// 10 samples, batches of 2: each epoch has each sample once, later epochs another order,
// and the position alone says how to go on.
static void epochs_and_positions(void **state) {
    (void)state;
    const char *path = scratch_path("epochs.txt");
    write_counters(path, 161); // ten windows of 16 tokens and the one that follows
    dpl_config *config = run_config("dataset_type=text", "eval_split_fraction=0",
                                    "data_shuffle_seed=3", NULL);
    run_set(config, "dataset_path=%s", path);
    dpl_data data = open_data(config, 2);
    assert_int_equal(dpl_data_samples(&data, false), 10);
    assert_int_equal(dpl_data_samples(&data, true), 0);
    dpl_tokens batch, two;
    check_ok(dpl_tokens_alloc(2, 16, &batch));
    check_ok(dpl_tokens_alloc(2, 16, &two));
    int order[40];
    for (uint64_t step = 0; step < 20; step++) {
        dpl_data_train(&data, 2 * step, 0, &batch);
        for (int row = 0; row < 2; row++) {
            int window = 0;
            while (memcmp(batch.ids + row * 16, (int32_t[16]){byte_at((size_t)window * 16)}, 4) !=
                       0 ||
                   batch.ids[row * 16 + 1] != byte_at((size_t)window * 16 + 1))
                window++;
            assert_true(window < 10);
            order[2 * step + (uint64_t)row] = window;
        }
    }
    for (int epoch = 0; epoch < 4; epoch++) {
        int seen = 0;
        for (int i = 0; i < 10; i++) seen |= 1 << order[epoch * 10 + i];
        assert_int_equal(seen, 1023);
        if (epoch) assert_memory_not_equal(order + epoch * 10, order, 10 * sizeof(int));
    }
    dpl_data again = open_data(config, 2); // a new process at step 7
    for (uint64_t step = 7; step < 16; step++) {
        dpl_data_train(&data, 2 * step, 0, &batch);
        dpl_data_train(&again, 2 * step, 0, &two);
        assert_memory_equal(batch.ids, two.ids, 4 * 2 * 16 * sizeof(int32_t));
    }
    dpl_data_close(&again);
    run_set(config, "enable_data_shuffling=false");
    dpl_data_train(&data, 12, 0, &batch);
    assert_int_equal(batch.ids[0], byte_at(32));
    run_set(config, "reuse_example_batch=1");
    dpl_data_train(&data, 12, 0, &batch);
    assert_int_equal(batch.ids[0], byte_at(0));
    dpl_data_close(&data);
    dpl_tokens_free(&batch);
    dpl_tokens_free(&two);
    dpl_config_close(&config);
}

/* ---- windows ---- */

// Training has the first part, evaluation the last; in each, every token but the first is predicted
// exactly once (131).
static void each_token_once(void **state) {
    (void)state;
    static const size_t sizes[] = {40, 161, 1000, 1009};
    for (size_t s = 0; s < DPL_COUNT(sizes); s++) {
        const char *path = scratch_path("once.txt");
        write_counters(path, sizes[s]);
        dpl_config *config = run_config("dataset_type=text", "eval_split_fraction=0.25", NULL);
        run_set(config, "dataset_path=%s", path);
        dpl_data data = open_data(config, 4);
        dpl_tokens b;
        check_ok(dpl_tokens_alloc(3, 16, &b));
        const size_t n_eval = sizes[s] / 4, split = sizes[s] - n_eval;
        for (int eval = 0; eval < 2; eval++) {
            size_t at = eval ? split : 0;
            run_set(config, "enable_data_shuffling=false");
            const uint64_t n = dpl_data_samples(&data, eval);
            for (uint64_t first = 0; first < n; first += 3) {
                if (eval) dpl_data_eval(&data, first, &b);
                else dpl_data_train(&data, first, 0, &b);
                for (size_t i = 0; i < 3 * 16; i++) {
                    if (first + i / 16 >=
                        n) { // past the last: padding, or in training the next epoch
                        if (eval) assert_true(b.targets[i] == -1 && b.segment[i] == 0);
                        continue;
                    }
                    if (b.targets[i] < 0) {
                        assert_int_equal(b.segment[i], 0);
                        continue;
                    }
                    assert_int_equal(b.segment[i], 1);
                    assert_int_equal(b.position[i], i % 16);
                    assert_int_equal(b.ids[i], byte_at(at));
                    assert_int_equal(b.targets[i], byte_at(++at));
                }
            }
            assert_int_equal(at + 1, eval ? sizes[s] : split);
        }
        dpl_tokens_free(&b);
        dpl_data_close(&data);
        dpl_config_close(&config);
    }
}

// Documents of 3, 1, 5 and 20 tokens.
static const char *write_documents(void) {
    const char *dir = scratch_path("documents");
    mkdir(dir, 0777);
    scratch_text(scratch_path("documents/a.txt"), "abc");
    scratch_text(scratch_path("documents/b.txt"), "d");
    scratch_text(scratch_path("documents/c.txt"), "efghi");
    scratch_text(scratch_path("documents/d.txt"), "jklmnopqrstuvwxyzABC");
    return dir;
}

static void check_rows(const dpl_data *data, size_t n_rows, const char *const *ids,
                       const char *const *targets, const char *const *segments,
                       const char *const *positions) {
    dpl_tokens b;
    check_ok(dpl_tokens_alloc(1, 8, &b));
    assert_int_equal(dpl_data_samples(data, false), n_rows);
    for (size_t row = 0; row < n_rows; row++) {
        dpl_data_train(data, row, 0, &b);
        for (size_t i = 0; i < 8; i++) {
            assert_int_equal(b.ids[i], ids[row][i] == '-' ? 0 : ids[row][i]);
            assert_int_equal(b.targets[i], targets[row][i] == '-' ? -1 : targets[row][i]);
            assert_int_equal(b.segment[i], segments[row][i] - '0');
            assert_int_equal(b.position[i], positions[row][i] - '0');
        }
    }
    dpl_tokens_free(&b);
}

// Borders hold in targets, segments and positions; or do not, when asked; or each document has rows
// of its own.
static void documents(void **state) {
    (void)state;
    dpl_config *config = run_config("dataset_type=text", "eval_split_fraction=0",
                                    "max_target_length=8", "enable_data_shuffling=false", NULL);
    run_set(config, "dataset_path=%s", write_documents());
    dpl_data data = open_data(config, 1);
    check_rows(&data, 4, (const char *const[]){"abcdefgh", "ijklmnop", "qrstuvwx", "yzAB----"},
               (const char *const[]){"bc--fghi", "-klmnopq", "rstuvwxy", "zABC----"},
               (const char *const[]){"11123333", "12222222", "11111111", "11110000"},
               (const char *const[]){"01200123", "00123456", "01234567", "01230000"});
    dpl_data_close(&data);
    run_set(config, "attend_across_documents=true");
    data = open_data(config, 1);
    check_rows(&data, 4, (const char *const[]){"abcdefgh", "ijklmnop", "qrstuvwx", "yzAB----"},
               (const char *const[]){"bcdefghi", "jklmnopq", "rstuvwxy", "zABC----"},
               (const char *const[]){"11111111", "11111111", "11111111", "11110000"},
               (const char *const[]){"01234567", "01234567", "01234567", "01230000"});
    dpl_data_close(&data);
    run_set(config, "attend_across_documents=false");
    run_set(config, "packing=false");
    data = open_data(config, 1);
    check_rows(&data, 5,
               (const char *const[]){"ab------", "efgh----", "jklmnopq", "rstuvwxy", "zAB-----"},
               (const char *const[]){"bc------", "fghi----", "klmnopqr", "stuvwxyz", "ABC-----"},
               (const char *const[]){"11000000", "11110000", "11111111", "11111111", "11100000"},
               (const char *const[]){"01000000", "01230000", "01234567", "01234567", "01200000"});
    dpl_data_close(&data);
    dpl_config_close(&config);
}

// The training of a model sees nothing of another document: the loss of a row is that of its
// documents alone.
static void attention_stays_in_its_document(void **state) {
    (void)state;
    dpl_ctx *ctx = run_ctx(2);
    int32_t ids[32], targets[32], segments[32];
    for (int i = 0; i < 32; i++) {
        ids[i] = (int32_t)(dpl_rng_u64(4, 4, (uint64_t)i) % 64);
        targets[i] = (ids[i] * 7 + 1) % 64;
        segments[i] = i % 16 < 6 ? 1 : 2;
    }
    const char *path = scratch_path("packed.safetensors");
    double loss[2];
    for (int variant = 0; variant < 2; variant++) {
        // The second row repeats the first; its first document is another one the second time, and
        // does not count.
        int32_t out[32];
        for (int i = 0; i < 32; i++) {
            out[i] = segments[i] == 2;
            if (variant && segments[i] == 1) ids[i] = (ids[i] + 13) % 64;
        }
        run_write_batch(path, 2, 16, ids, targets, segments, out);
        dpl_config *config = run_config("dataset_type=safetensors", "per_device_batch_size=2",
                                        NULL);
        run_set(config, "dataset_path=%s", path);
        dpl_trainer *t = run_open(ctx, config);
        const dpl_step_metrics m = run_steps(t, 1);
        assert_true(m.total_weights == 20);
        loss[variant] = m.lm_loss;
        dpl_trainer_close(&t);
        dpl_config_close(&config);
    }
    assert_true(loss[0] == loss[1]);
    dpl_ctx_close(&ctx);
}

/* ---- sources ---- */

static void eval_data_of_its_own(void **state) {
    (void)state;
    const char *train = scratch_path("train.txt"), *eval = scratch_path("other.txt");
    write_counters(train, 100);
    scratch_text(eval, "abcdefghijklmnopqrstuvwxyz");
    dpl_config *config = run_config("dataset_type=text", NULL);
    run_set(config, "dataset_path=%s", train);
    run_set(config, "eval_dataset_path=%s", eval);
    dpl_data data = open_data(config, 4);
    dpl_tokens b;
    check_ok(dpl_tokens_alloc(1, 16, &b));
    assert_int_equal(dpl_data_samples(&data, false), 7);
    assert_int_equal(dpl_data_samples(&data, true), 2);
    dpl_data_eval(&data, 0, &b);
    assert_true(b.ids[0] == 'a' && b.targets[15] == 'q');
    dpl_tokens_free(&b);
    dpl_data_close(&data);
    dpl_config_close(&config);
}

// 137 and others: data that cannot be trained on is an error that says why.
static void wrong_data(void **state) {
    (void)state;
    dpl_data data = {0};
    dpl_config *config = run_config("dataset_type=text", NULL);
    run_set(config, "dataset_path=%s", scratch_path("none.txt"));
    check_error(dpl_data_open(&config->o, 4, 256, &data), DPL_EIO, "none.txt", "");
    dpl_data_close(&data);
    const char *path = scratch_path("short.txt");
    scratch_text(path, "");
    run_set(config, "dataset_path=%s", path);
    assert_int_not_equal(dpl_data_open(&config->o, 4, 256, &data), DPL_OK);
    dpl_data_close(&data);
    scratch_text(path, "a");
    check_error(dpl_data_open(&config->o, 4, 256, &data), DPL_EINVAL, "short.txt", "two at least");
    dpl_data_close(&data);
    scratch_text(path, "abc\xff");
    check_error(dpl_data_open(&config->o, 4, 128, &data), DPL_EFORMAT, "short.txt",
                "3"); // the offset
    dpl_data_close(&data);
    dpl_config_close(&config);

    int32_t ids[64] = {0}, targets[64] = {0};
    const char *batch = scratch_path("batch.safetensors");
    config = run_config("dataset_type=safetensors", NULL);
    run_set(config, "dataset_path=%s", batch);
    run_write_batch(batch, 2, 16, ids, targets, NULL, NULL);
    check_error(dpl_data_open(&config->o, 4, 256, &data), DPL_EINVAL, "batch.safetensors",
                "(4, 16)");
    dpl_data_close(&data);
    run_write_batch(batch, 4, 8, ids, targets, NULL, NULL);
    check_error(dpl_data_open(&config->o, 4, 256, &data), DPL_EINVAL, "inputs", "(4, 16)");
    dpl_data_close(&data);
    ids[37] = 256;
    run_write_batch(batch, 4, 16, ids, targets, NULL, NULL);
    check_error(dpl_data_open(&config->o, 4, 256, &data), DPL_EFORMAT, "256", "inputs[37]");
    dpl_data_close(&data);
    dpl_config_close(&config);
}

static void synthetic_is_one_batch(void **state) {
    (void)state;
    dpl_config *config = run_config(NULL);
    dpl_data data = open_data(config, 4);
    dpl_tokens a, b;
    check_ok(dpl_tokens_alloc(4, 16, &a));
    check_ok(dpl_tokens_alloc(4, 16, &b));
    dpl_data_train(&data, 0, 0, &a);
    dpl_data_train(&data, 400, 0, &b);
    assert_memory_equal(a.ids, b.ids, 4 * 64 * sizeof(int32_t));
    for (int i = 0; i < 64; i++) {
        assert_true(a.ids[i] >= 0 && a.ids[i] < 256 && a.segment[i] == 1 &&
                    a.position[i] == i % 16);
        if (i % 16 < 15) assert_int_equal(a.targets[i], a.ids[i + 1]);
    }
    dpl_tokens_free(&a);
    dpl_tokens_free(&b);
    dpl_data_close(&data);
    dpl_config_close(&config);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shuffle_is_a_permutation),
        cmocka_unit_test(epochs_and_positions),
        cmocka_unit_test(each_token_once),
        cmocka_unit_test(documents),
        cmocka_unit_test(attention_stays_in_its_document),
        cmocka_unit_test(eval_data_of_its_own),
        cmocka_unit_test(wrong_data),
        cmocka_unit_test(synthetic_is_one_batch),
    };
    return cmocka_run_group_tests(tests, scratch_open, scratch_close);
}
