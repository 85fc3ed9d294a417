#ifndef EFFLOOP_RANDOM_H
#define EFFLOOP_RANDOM_H

#include <stdint.h>

#define GOLDEN 0x9E3779B97F4A7C15u

/* SplitMix64's finaliser. */
static inline uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

/* A key's random numbers, from number 0 on. */
static inline uint64_t word(uint64_t key, int64_t number) { return mix(key + ((uint64_t)number + 1) * GOLDEN); }

static inline double uniform(uint64_t key, int64_t number) { return (double)(word(key, number) >> 11) * 0x1p-53; }

#endif
