// fuzz_config.c - libFuzzer: any JSON as config.json. What is accepted must write and read back as
// the same model.
#include <stdio.h>
#include <stdlib.h>

#include "model/model.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(bool good, const char *what) {
    if (good) return;
    fprintf(stderr, "fuzz_config: %s\n", what);
    abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    json_t *object = json_loadb((const char *)data, size, JSON_REJECT_DUPLICATES, NULL);
    dpl_model_config config, again;
    if (!json_is_object(object) || dpl_model_config_from_json(object, &config) != DPL_OK) {
        json_decref(object);
        return 0;
    }
    json_t *written = dpl_model_config_to_json(&config, DPL_F32);
    must(written != NULL, "an accepted configuration cannot be written");
    must(dpl_model_config_from_json(written, &again) == DPL_OK, dpl_error_message());
    must(dpl_model_param_count(&config) == dpl_model_param_count(&again), "parameters differ");
    must(dpl_model_flops(&config, 1, 4096) == dpl_model_flops(&again, 1, 4096), "FLOPs differ");
    must(dpl_model_softmax_scale(&config) == dpl_model_softmax_scale(&again), "scales differ");
    float *frequencies = calloc(config.d_rope, sizeof *frequencies);
    must(frequencies != NULL, "out of memory");
    const double factor = dpl_rope_frequencies(&config, frequencies);
    for (size_t i = 0; i < config.d_rope / 2; i++)
        must(frequencies[i] >= 0 && frequencies[i] <= 1, "a frequency is out of range");
    must(factor > 0 && factor < 1e10, "the rotary factor is out of range");
    free(frequencies);
    json_decref(written);
    json_decref(object);
    return 0;
}
