/*
 * trainkit.h - small training runs for tests: a tiny model's configuration, batches written as
 * files.
 */
#ifndef DPL_TESTS_TRAINKIT_H
#define DPL_TESTS_TRAINKIT_H

#include "train/train.h"

// A tiny model with every part but MTP and groups, on made-up data, fp32, in the scratch folder;
// then the assignments, which end with NULL. The test fails where one is refused.
dpl_config *run_config(const char *assignment, ...);
void run_set(dpl_config *config, const char *format, ...) __attribute__((format(printf, 2, 3)));
void run_set_all(dpl_config *config, const char *list); // assignments with spaces between them
dpl_ctx *run_ctx(int n_threads);
dpl_trainer *run_open(dpl_ctx *ctx, const dpl_config *config);
// Makes n steps; the metrics of the last one.
dpl_step_metrics run_steps(dpl_trainer *t, int n);

// Ends the test where two trainers differ in a bit of weights, moments or router bias.
void run_same_state(const dpl_trainer *a, const dpl_trainer *b);
// max |a - b| over the weights.
double run_weight_distance(const dpl_trainer *a, const dpl_trainer *b);

// MaxText's batch file from (n_batch, n_seq) arrays; segments NULL: all 1.
void run_write_batch(const char *path, size_t n_batch, size_t n_seq, const int32_t *inputs,
                     const int32_t *targets, const int32_t *input_segments,
                     const int32_t *target_segments);

#endif
