/*
 * test_fixtures.c - dropless probe against the reference files: logits, hidden states, routing,
 * gradients and optimizer steps of every deepseek_v3 folder, in both forms of config.json.
 *
 * The same comparison as compare.py beside the references, with the same bounds, without Python.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dropless.h"
#include "fixture.h"
#include "scratch.h"

// Group, bound on max |got - want| / max |want|.
static const struct bound {
    const char *group;
    double relative;
} bounds[] = {
    {"logits", 1e-5}, {"loss", 1e-6}, {"token_loss", 1e-5}, {"hidden", 1e-5},
    {"attn", 1e-5},   {"mlp", 1e-5},  {"dhidden", 2e-5},    {"router", 1e-5},
    {"grad", 3e-5},   {"mtp", 1e-5},  {"total_loss", 1e-6},
};

typedef struct verdict {
    int n_compared, n_bad;
    size_t n_far, n_steps; // elements of adamwN.* that are off by more than rounding, of all
    double top_grad;
    bool silent;
} verdict;

static bool starts(const char *text, const char *with) {
    return strncmp(text, with, strlen(with)) == 0;
}

static bool ends(const char *text, const char *with) {
    const size_t n = strlen(text), m = strlen(with);
    return n >= m && strcmp(text + n - m, with) == 0;
}

static void bad(verdict *v, const char *name, const char *what, double value) {
    if (v->n_bad++ < 10 && !v->silent) print_error("%s: %s %g\n", name, what, value);
}

static double largest(const double *x, size_t n) {
    double top = 0;
    for (size_t i = 0; i < n; i++) top = fmax(top, fabs(x[i]));
    return top;
}

// Slots of a token may come in any order: sorts ids, and weights with them.
static void sort_slots(double *ids, double *weights, size_t n_rows, size_t k) {
    for (size_t r = 0; r < n_rows; r++)
        for (size_t i = 1; i < k; i++)
            for (size_t j = i; j > 0 && ids[r * k + j - 1] > ids[r * k + j]; j--) {
                double *const both[] = {ids, weights};
                for (int b = 0; b < 2; b++) {
                    double *x = both[b] + r * k + j, swap = x[0];
                    x[0] = x[-1];
                    x[-1] = swap;
                }
            }
}

static void compare_steps(verdict *v, const char *name, const double *got, const double *want,
                          size_t n) {
    for (size_t i = 0; i < n; i++) {
        const double off = fabs(got[i] - want[i]);
        // A gradient of rounding noise becomes a whole step of the rate: most within the first
        // bound, all in this.
        if (!(off <= 2e-3)) bad(v, name, "off by", off);
        v->n_far += off > 1e-5;
    }
    v->n_steps += n;
}

static void compare_values(verdict *v, const char *name, const double *got, const double *want,
                           size_t n) {
    double bound = 0, error = 0;
    const size_t n_group = strcspn(name, ".");
    for (size_t i = 0; i < sizeof bounds / sizeof bounds[0]; i++)
        if (strlen(bounds[i].group) == n_group && starts(name, bounds[i].group))
            bound = bounds[i].relative;
    for (size_t i = 0; i < n; i++)
        error = isfinite(got[i]) ? fmax(error, fabs(got[i] - want[i])) : INFINITY;
    double top = largest(want, n);
    if (starts(name, "grad.") && top > 0) top = fmax(top, 1e-4 * v->top_grad);
    // An expert without tokens, top 0, has a gradient of exactly zero.
    if (error > bound * top) bad(v, name, "relative error", error / top);
}

static void compare_slots(verdict *v, const char *name, double *got, double *want,
                          const fixture *got_file, const fixture *want_file,
                          const fixture_tensor *t) {
    char weights[128];
    snprintf(weights, sizeof weights, "%.*s.weights", (int)(strlen(name) - 4), name);
    const size_t k = (size_t)t->shape[1];
    double *got_w = fixture_f64(got_file, weights, NULL),
           *want_w = fixture_f64(want_file, weights, NULL);
    sort_slots(got, got_w, t->n / k, k);
    sort_slots(want, want_w, t->n / k, k);
    compare_values(v, weights, got_w, want_w, t->n);
    for (size_t i = 0; i < t->n; i++)
        if (got[i] != want[i]) {
            bad(v, name, "another expert in slot", (double)i);
            break;
        }
    free(got_w);
    free(want_w);
}

static void compare(verdict *v, const fixture *got_file, const fixture *want_file,
                    const fixture_tensor *want_t) {
    const char *name = want_t->name;
    const fixture_tensor *got_t = fixture_find(got_file, name);
    if (!got_t || got_t->n != want_t->n) {
        bad(v, name, got_t ? "elements in the output:" : "missing in the output",
            got_t ? (double)got_t->n : 0);
        return;
    }
    double *got = fixture_values(got_t), *want = fixture_values(want_t);
    v->n_compared++;
    if (starts(name, "adamw")) compare_steps(v, name, got, want, want_t->n);
    else if (starts(name, "router.") && ends(name, ".ids"))
        compare_slots(v, name, got, want, got_file, want_file, want_t);
    else if (want_t->dtype[0] == 'I' || want_t->dtype[0] == 'U') {
        for (size_t i = 0; i < want_t->n; i++)
            if (got[i] != want[i]) {
                bad(v, name, "differs in element", (double)i);
                break;
            }
    } else compare_values(v, name, got, want, want_t->n);
    free(got);
    free(want);
}

// Everything that the reference has must be there, but what a probe does not write.
static bool is_wanted(const char *name, size_t n_steps) {
    char steps[32];
    snprintf(steps, sizeof steps, "adamw%zu.", n_steps);
    if (starts(name, "adamw")) return starts(name, steps);
    if (ends(name, ".bias_next")) return n_steps == 0; // steps leave the bias alone
    return !starts(name, "rope.") && strcmp(name, "input_ids") != 0 &&
           strcmp(name, "labels") != 0 && !(starts(name, "router.") && ends(name, ".weights"));
}

static void check_folder(const char *dir, const char *folder, size_t n_steps,
                         const char *const *settings, size_t n_settings, verdict *v) {
    dpl_ctx *ctx = NULL;
    const char *out = scratch_path("out.safetensors");
    char input[512], reference[512];
    snprintf(input, sizeof input, "%s/input.safetensors", fixture_path("%s", folder));
    snprintf(reference, sizeof reference, "%s/reference.safetensors", fixture_path("%s", folder));
    const dpl_probe_options o = {.struct_bytes = sizeof o,
                                 .grad = 1,
                                 .n_steps = n_steps,
                                 .settings = settings,
                                 .n_settings = n_settings};
    check_ok(dpl_ctx_open(2, &ctx));
    check_ok(dpl_model_probe(ctx, dir, input, out, &o));
    dpl_ctx_close(&ctx);
    fixture got, want;
    assert_true(fixture_open(out, &got));
    assert_true(fixture_open(reference, &want));
    for (int i = 0; i < want.n; i++)
        if (starts(want.at[i].name, "grad.")) {
            double *x = fixture_values(&want.at[i]);
            v->top_grad = fmax(v->top_grad, largest(x, want.at[i].n));
            free(x);
        }
    for (int i = 0; i < want.n; i++)
        if (is_wanted(want.at[i].name, n_steps)) compare(v, &got, &want, &want.at[i]);
    fixture_close(&got);
    fixture_close(&want);
}

// A folder's model with its other configuration.
static const char *legacy_dir(const char *folder) {
    static char dir[512];
    snprintf(dir, sizeof dir, "%s", scratch_path("legacy"));
    char command[4096];
    const char *from = fixture_path("%s", folder);
    snprintf(command, sizeof command,
             "rm -rf '%s' && mkdir '%s' && cp '%s'/model* '%s' && cp '%s/config.legacy.json' "
             "'%s/config.json'",
             dir, dir, from, dir, from, dir);
    assert_int_equal(system(command), 0);
    return dir;
}

static void test_folder(const char *folder, size_t n_steps) {
    static const char *const bias_rate[] = {
        "routed_bias_update_rate=0.001"}; // for router.L.bias_next
    if (!fixture_root()) skip();
    for (int legacy = 0; legacy < 2; legacy++) {
        verdict v = {0};
        const char *dir = legacy ? legacy_dir(folder) : fixture_path("%s", folder);
        const size_t n = legacy ? 0 : n_steps;
        check_folder(dir, folder, n, bias_rate, n ? 0 : 1, &v);
        print_message("%s%s: %d tensors, %d problems, %zu of %zu stepped elements beyond 1e-5\n",
                      folder, legacy ? " (legacy)" : "", v.n_compared, v.n_bad, v.n_far, v.n_steps);
        assert_int_equal(v.n_bad, 0);
        assert_true(v.n_compared > 100);
        assert_true((double)v.n_far <= 1e-4 * (double)v.n_steps);
    }
}

#define FOLDER(name, n_steps)                      \
    static void test_##name(void **state) {        \
        (void)state;                               \
        test_folder("deepseek_v3" #name, n_steps); \
    }
FOLDER(, 3)
FOLDER(_bf16, 0)
FOLDER(_halfrope, 0)
FOLDER(_mtp, 0)
FOLDER(_noqlora, 0)
FOLDER(_yarn, 0)

// The comparison itself: a loss that is weighted by a hundredth too much must be seen.
static void test_wrong_weight(void **state) {
    (void)state;
    if (!fixture_root()) skip();
    static const char *const settings[] = {"mtp_loss_scaling_factor=0.303"};
    verdict v = {.silent = true};
    check_folder(fixture_path("deepseek_v3_mtp"), "deepseek_v3_mtp", 0, settings, 1, &v);
    assert_in_range(v.n_bad, 50, v.n_compared); // total_loss and most gradients
}

#define WITH_FILES(test) cmocka_unit_test_setup_teardown(test, scratch_open, scratch_close)

int main(void) {
    const struct CMUnitTest tests[] = {
        WITH_FILES(test_),
        WITH_FILES(test__bf16),
        WITH_FILES(test__halfrope),
        WITH_FILES(test__mtp),
        WITH_FILES(test__noqlora),
        WITH_FILES(test__yarn),
        WITH_FILES(test_wrong_weight),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
