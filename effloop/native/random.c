/* Keyed random numbers: effloop/data/random.py says what they are. */

#include <stdint.h>

#include "random.h"
#include "export.h"

/* out[i] = the key of sample ids[i], of whose keys `key` is. */
EXPORT void effloop_sample_keys(const int64_t *ids, int64_t count, uint64_t key, uint64_t *out) {
    for (int64_t i = 0; i < count; i++) out[i] = mix(mix((uint64_t)ids[i] + 1) ^ key);
}

/* out[i] = the i-th key of another stream. */
EXPORT void effloop_stream(const uint64_t *keys, int64_t count, uint64_t key, uint64_t *out) {
    for (int64_t i = 0; i < count; i++) out[i] = mix(keys[i] ^ key);
}

/* (count, each): the numbers from `first` on of each key. */
EXPORT void effloop_words(const uint64_t *keys, int64_t count, int64_t first, int64_t each, uint64_t *out) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t n = 0; n < each; n++) *out++ = word(keys[i], first + n);
}

/* As `effloop_words` from the first on, in [0, 1). */
EXPORT void effloop_uniforms(const uint64_t *keys, int64_t count, int64_t each, double *out) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t n = 0; n < each; n++) *out++ = uniform(keys[i], n);
}
