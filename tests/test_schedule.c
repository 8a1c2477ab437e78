/*
 * test_schedule.c - learning rates against MaxText's rules, written down a second time, and the
 * lengths at which other programs divide by zero.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include "scratch.h"
#include "trainkit.h"

typedef struct curve {
    dpl_config *config;
    int64_t length;
} curve;

static curve make(const char *type, const char *style, double warmup, double decay,
                  int64_t length) {
    dpl_config *config = run_config(NULL);
    run_set(config, "lr_schedule_type=%s", type);
    run_set(config, "wsd_decay_style=%s", style);
    run_set(config, "warmup_steps_fraction=%.17g", warmup);
    run_set(config, "wsd_decay_steps_fraction=%.17g", decay);
    run_set(config, "learning_rate=0.01");
    run_set(config, "learning_rate_final_fraction=0.1");
    return (curve){config, length};
}

static double rate_at(const curve *c, int64_t step) {
    return dpl_schedule_rate(&c->config->o, c->length, step);
}

static double slope(double t, double n) {
    return n > 1 ? t / (n - 1) : 1;
}

// The rules in the order of MaxText's description, with segments as lists instead of one formula.
static double by_the_rules(const char *type, const char *style, double warmup, double decay,
                           int64_t L, int64_t t) {
    const int64_t W = (int64_t)((double)L * warmup), D = (int64_t)((double)L * decay);
    const double lr0 = 0.01, lr1 = 0.001;
    if (t >= L) return 0;
    if (t < W) return lr0 * (double)t / (double)W;
    if (type[0] == 'c') {
        const double a =
            L - W == 1 ? 0 : 0.5 * (1 + cos(acos(-1.0) * slope((double)(t - W), (double)(L - W))));
        return lr0 * a + lr1 * (1 - a);
    }
    if (t < L - D) return lr0;
    const double part = slope((double)(t - (L - D)), (double)D);
    if (style[0] == 'l') return lr0 + (lr1 - lr0) * part;
    return lr1 + (lr0 - lr1) * 0.5 * (1 + cos(acos(-1.0) * part));
}

static void follows_the_rules(void **state) {
    (void)state;
    static const char *const kinds[][2] = {
        {"cosine", "linear"}, {"wsd", "linear"}, {"wsd", "cosine"}};
    static const double parts[][2] = {{0, 0}, {0.1, 0.1}, {0.2, 0.5}, {0.5, 0.5}, {0, 1}, {1, 0}};
    static const int64_t lengths[] = {1, 2, 7, 10, 300};
    for (size_t k = 0; k < 3; k++)
        for (size_t p = 0; p < DPL_COUNT(parts); p++)
            for (size_t n = 0; n < DPL_COUNT(lengths); n++) {
                curve s = make(kinds[k][0], kinds[k][1], parts[p][0], parts[p][1], lengths[n]);
                for (int64_t t = 0; t < lengths[n] + 3; t++) {
                    const double want = by_the_rules(kinds[k][0], kinds[k][1], parts[p][0],
                                                     parts[p][1], lengths[n], t);
                    assert_true(fabs(rate_at(&s, t) - want) < 1e-12);
                }
                dpl_config_close(&s.config);
            }
}

// With a warm-up step 0 has rate 0, as in MaxText; the last step has the final rate.
static void first_and_last(void **state) {
    (void)state;
    curve s = make("cosine", "linear", 0.2, 0, 10), none = make("cosine", "linear", 0, 0, 10);
    assert_true(rate_at(&s, 0) == 0 && rate_at(&s, 1) == 0.005);
    assert_true(rate_at(&s, 2) == 0.01 && fabs(rate_at(&s, 9) - 0.001) < 1e-15);
    assert_true(rate_at(&s, 10) == 0 && rate_at(&none, 0) == 0.01);
    // 20 steps of warm-up in the benchmark's 300.
    curve bench = make("cosine", "linear", 0.066667, 0, 300);
    assert_true(rate_at(&bench, 19) < 0.01 && rate_at(&bench, 20) == 0.01);
    assert_true(rate_at(&bench, 10) == 0.01 * 10 / 20);
    dpl_config_close(&s.config);
    dpl_config_close(&none.config);
    dpl_config_close(&bench.config);
}

// Warm-up and decay of any length in runs of any length: finite, up and then down.
static void no_division_by_zero(void **state) {
    (void)state;
    static const int cases[][3] = {{0, 0, 1}, {0, 10, 10}, {10, 0, 10}, {8, 8, 10},
                                   {1, 0, 1}, {1, 1, 1},   {5, 5, 10}};
    static const char *const styles[] = {"linear", "cosine"};
    for (size_t i = 0; i < DPL_COUNT(cases); i++)
        for (size_t k = 0; k < 4; k++) {
            const int64_t L = cases[i][2];
            curve s = make(k < 2 ? "wsd" : "cosine", styles[k % 2], (double)cases[i][0] / (double)L,
                           (double)cases[i][1] / (double)L, L);
            bool falling = false;
            double before = 0;
            for (int64_t t = 0; t < L; t++) {
                const double rate = rate_at(&s, t);
                assert_true(isfinite(rate) && rate >= 0 && rate <= 0.01 + 1e-15);
                if (rate < before) falling = true;
                else assert_true(!falling || rate == before);
                before = rate;
            }
            dpl_config_close(&s.config);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(follows_the_rules),
        cmocka_unit_test(first_and_last),
        cmocka_unit_test(no_division_by_zero),
    };
    return cmocka_run_group_tests(tests, scratch_open, scratch_close);
}
