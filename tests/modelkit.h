/*
 * modelkit.h - a model of src/model beside the oracle's: the same configuration, the same
 * parameters, one batch for both, everything that was computed under the names of the reference
 * files.
 */
#ifndef DPL_TESTS_MODELKIT_H
#define DPL_TESTS_MODELKIT_H

#include "fixture.h"
#include "model/model.h"
#include "oracle.h"

// One batch with a model's configuration and parameters.
typedef struct scene {
    oracle_config cfg;
    oracle_set params;
    int n_batch, n_seq;
    int *ids, *targets, *segments; // (B, S); segments may be NULL
    int32_t *positions;            // (B, S); NULL: 0..S-1
} scene;

// Small, with everything that the family has, and sizes that are multiples of nothing.
oracle_config scene_small_config(void);
// A small random configuration, with random weights and a random batch of packed documents.
void scene_open_random(uint64_t seed, scene *s);
void scene_open(const oracle_config *cfg, uint64_t seed, int n_batch, int n_seq, bool packed,
                scene *s);
// Weights, batch and configuration of a folder of ../shared/fixtures.
void scene_open_fixture(const char *name, const char *config, scene *s);
void scene_close(scene *s);
// Parameters to numbers that fp32 holds; `bf16`: matrices to bf16.
void scene_round(scene *s, bool bf16);
dpl_batch scene_batch(const scene *s);
double kit_mtp_targets(const dpl_model_config *config, const dpl_batch *batch); // of all depths
oracle_batch scene_oracle_batch(const scene *s);
dpl_model_config scene_config(const oracle_config *cfg);
dpl_loss_rule scene_rule(const oracle_config *cfg);

typedef struct kit {
    dpl_ctx *ctx;
    dpl_model *model;
} kit;

// A model on a context of its own (lab_ctx). False: this machine lacks the level. params NULL:
// zeros.
bool kit_open(const dpl_model_config *config, dpl_dtype dtype, const oracle_set *params,
              int n_threads, bool deferred, const char *level, kit *k);
void kit_close(kit *k);
void kit_fill(dpl_model *model, const oracle_set *params);
const dpl_disk_tensor *kit_disk(const dpl_model *model, const char *name); // NULL: none
float *kit_gather(const dpl_disk_tensor *t, const float *flat);            // the caller frees
size_t kit_elems(const dpl_disk_tensor *t);

typedef struct kit_result {
    dpl_loss_sums sums;
    double loss, mtp_loss, total; // normalized as the oracle's
    oracle_set out;               // what was probed
} kit_result;
// The bf16 compute copy is that of the masters, in the order of its panels.
void kit_check_copy(const dpl_model *model);
// Gradients are zeroed first; scales such that they are those of the oracle's total. result_out
// NULL: neither probed nor returned.
dpl_status kit_train(kit *k, const scene *s, kit_result *result_out);
void kit_result_close(kit_result *r);

#endif
