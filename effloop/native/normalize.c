/* Pixels to normalised numbers, in place: x * scale + offset, with a scale and an offset for each channel.
 *
 * An image's numbers take 4 bytes each, and its pixels lie in the last quarter of these bytes. Front to back, no
 * number is written over a pixel that is still to be read: number i ends at byte 4 i + 4, pixel i + 1 is at byte
 * 3 n + i + 1 of the image's 4 n, and 4 i + 4 <= 3 n + i + 1 for all i + 1 < n. The same holds for blocks of pixels
 * that are read before their numbers are written, and for planes of up to 4 channels. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cpu.h"
#include "export.h"

#ifdef __clang__ /* gcc -std=c11 doesn't contract */
#pragma STDC FP_CONTRACT OFF
#endif

enum { MOST_CHANNELS = 4, BLOCK = 192 }; /* whole pixels of 1, 2, 3 and 4 channels */

typedef struct {
    float scale[BLOCK], offset[BLOCK];
} Factors;

typedef void Convert(const uint8_t *pixels, size_t count, const Factors *by, float *out);

/* Rounded after multiplying and after adding. */
static void rounded_twice(const uint8_t *restrict pixels, size_t count, const Factors *restrict by,
                          float *restrict out) {
    for (size_t i = 0; i < count; i++) {
        float product = (float)pixels[i] * by->scale[i];
        out[i] = product + by->offset[i];
    }
}

/* Rounded once. */
#define ROUNDED_ONCE(name)                                                                                    \
    static void name(const uint8_t *restrict pixels, size_t count, const Factors *restrict by,                \
                     float *restrict out) {                                                                   \
        for (size_t i = 0; i < count; i++) out[i] = fmaf((float)pixels[i], by->scale[i], by->offset[i]);      \
    }

ROUNDED_ONCE(rounded_once)

#ifdef __x86_64__
__attribute__((target("avx2,fma"))) ROUNDED_ONCE(rounded_once_avx2)
#endif

static Convert *converter(int fused) {
    if (!fused) return rounded_twice;
#ifdef __x86_64__
    if (cpu_has(CPU_FMA)) return rounded_once_avx2;
#endif
    return rounded_once;
}

static void interleaved(uint8_t *image, size_t bytes, const Factors *by, Convert *convert) {
    uint8_t pixels[BLOCK];
    float *out = (float *)(void *)image;
    for (size_t at = 0; at < bytes; at += BLOCK) {
        size_t count = bytes - at < BLOCK ? bytes - at : BLOCK;
        memcpy(pixels, image + 3 * bytes + at, count);
        convert(pixels, count, by, out + at);
    }
}

/* One channel of `count` pixels. */
static inline void channel_of(const uint8_t *restrict pixels, size_t count, size_t channels, uint8_t *restrict plane) {
    for (size_t i = 0; i < count; i++) plane[i] = pixels[channels * i];
}

static void planar(uint8_t *image, size_t bytes, size_t channels, const Factors by[], Convert *convert) {
    uint8_t pixels[BLOCK], plane[BLOCK];
    size_t size = bytes / channels, most = BLOCK / channels;
    float *out = (float *)(void *)image;
    for (size_t at = 0; at < size; at += most) {
        size_t count = size - at < most ? size - at : most;
        memcpy(pixels, image + 3 * bytes + channels * at, channels * count);
        for (size_t channel = 0; channel < channels; channel++) {
            if (channels == 3) /* known to the compiler, this takes half the time */
                channel_of(pixels + channel, count, 3, plane);
            else
                channel_of(pixels + channel, count, channels, plane);
            convert(plane, count, &by[channel], out + channel * size + at);
        }
    }
}

/* Normalise `count` images of 4 `bytes` bytes each, aligned as numbers are, whose last `bytes` are their pixels,
 * channel by channel; `split` writes a plane for each channel instead. `scale` and `offset` have a number for each of
 * the 1 to 4 channels. `fused` rounds once. Returns -1, and does nothing, if an image isn't of whole pixels. */
EXPORT int effloop_normalize(uint8_t *images, size_t count, size_t bytes, size_t channels, int split, int fused,
                             const float *scale, const float *offset) {
    Factors by[MOST_CHANNELS];
    if (!channels || channels > MOST_CHANNELS || bytes % channels) return -1;
    for (size_t set = 0; set < (split ? channels : 1); set++)
        for (size_t i = 0; i < BLOCK; i++) {
            size_t channel = split ? set : i % channels;
            by[set].scale[i] = scale[channel];
            by[set].offset[i] = offset[channel];
        }
    Convert *convert = converter(fused);
    for (size_t i = 0; i < count; i++) {
        uint8_t *image = images + 4 * bytes * i;
        if (split)
            planar(image, bytes, channels, by, convert);
        else
            interleaved(image, bytes, by, convert);
    }
    return 0;
}
