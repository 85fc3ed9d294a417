/* Luma and chroma to RGB; to the bit as libjpeg, with what it calls fancy upsampling.
 *
 * Chroma of half the resolution is interpolated: a sample is made of its own one and the nearer one beside it, 3 to 1, in
 * each direction; where there is none, of its own alone. Halves are rounded up and down in turns. */

#include "cpu.h"
#include "jpeg_pixels.h"

enum { BITS = 16, HALF = 1 << (BITS - 1) };
enum { RED_CR = 91881, GREEN_CB = 22554, GREEN_CR = 46802, BLUE_CB = 116130 }; /* of 1 << BITS: 1.402, 0.34414, 0.71414, 1.772 */

static int sample_of(const PixelRow *row, int channel, int at) { /* times 4 where there are two rows */
    int own = row->own[channel][at];
    return row->down == 2 ? 3 * own + row->near[channel][at] : own;
}

static int chroma_at(const PixelRow *row, int channel, int luma) {
    if (row->across == 1) {
        int sample = sample_of(row, channel, luma);
        return row->down == 2 ? (sample + (row->upper ? 1 : 2)) >> 2 : sample;
    }
    int at = luma >> 1, odd = luma & 1, beside = odd ? at + 1 : at - 1;
    if (beside < 0 || beside >= row->width) beside = at;
    int sum = 3 * sample_of(row, channel, at) + sample_of(row, channel, beside);
    return row->down == 2 ? (sum + 8 - odd) >> 4 : (sum + 1 + odd) >> 2;
}

static uint8_t clamped(int value) { return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value); }

static void some_pixels(const PixelRow *row, int from, int to, uint8_t *rgb) {
    for (int i = from; i < to; i++) {
        int y = row->luma[i], blue = chroma_at(row, 0, row->begin + i) - 128, red = chroma_at(row, 1, row->begin + i) - 128;
        rgb[3 * i] = clamped(y + ((RED_CR * red + HALF) >> BITS));
        rgb[3 * i + 1] = clamped(y + ((-GREEN_CB * blue - GREEN_CR * red + HALF) >> BITS));
        rgb[3 * i + 2] = clamped(y + ((BLUE_CB * blue + HALF) >> BITS));
    }
}

static void plain(const PixelRow *row, uint8_t *rgb) { some_pixels(row, 0, row->count, rgb); }

#if defined(__x86_64__)

#include <immintrin.h>

#define AVX2 __attribute__((target("avx2")))
#define INLINE static inline __attribute__((always_inline)) AVX2

typedef __m256i Vector; /* 16 values of 16 bits */

INLINE Vector load(const uint8_t *samples) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i_u *)samples)); }

INLINE Vector thrice(Vector a, Vector b) { return _mm256_add_epi16(_mm256_add_epi16(a, _mm256_add_epi16(a, a)), b); }

INLINE Vector add(Vector a, int b) { return _mm256_add_epi16(a, _mm256_set1_epi16((int16_t)b)); }

INLINE Vector samples_of(const PixelRow *row, int channel, int at, int down) {
    Vector own = load(row->own[channel] + at);
    return down == 2 ? thrice(own, load(row->near[channel] + at)) : own;
}

/* Chroma of 32 pixels from an even one on, or of 16 if there is as much of it as of luma; less the centre. */
INLINE void chroma_of(const PixelRow *row, int channel, int luma, int across, int down, Vector found[2]) {
    if (across == 1) {
        found[0] = samples_of(row, channel, luma, down);
        if (down == 2) found[0] = _mm256_srli_epi16(add(found[0], row->upper ? 1 : 2), 2);
    } else {
        int at = luma >> 1, shift = down == 2 ? 4 : 2;
        Vector own = samples_of(row, channel, at, down);
        Vector even = add(thrice(own, samples_of(row, channel, at - 1, down)), down == 2 ? 8 : 1);
        Vector odd = add(thrice(own, samples_of(row, channel, at + 1, down)), down == 2 ? 7 : 2);
        even = _mm256_srli_epi16(even, shift), odd = _mm256_srli_epi16(odd, shift);
        Vector low = _mm256_unpacklo_epi16(even, odd), high = _mm256_unpackhi_epi16(even, odd);
        found[0] = _mm256_permute2x128_si256(low, high, 0x20), found[1] = add(_mm256_permute2x128_si256(low, high, 0x31), -128);
    }
    found[0] = add(found[0], -128);
}

/* value * factor / (1 << BITS), rounded; the factor is from -HALF to HALF. */
INLINE Vector times(Vector value, int factor) {
    Vector twice = _mm256_mulhi_epi16(_mm256_add_epi16(value, value), _mm256_set1_epi16((int16_t)factor));
    return _mm256_srai_epi16(add(twice, 1), 1);
}

INLINE __m128i bytes(Vector values) {
    return _mm_packus_epi16(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
}

/* A third of 16 pixels, with the bytes of one channel. */
INLINE __m128i spread(__m128i values, int channel, int third) {
#define FROM(i) (char)((16 * third + (i)) % 3 == channel ? (16 * third + (i)) / 3 : -1)
    return _mm_shuffle_epi8(values, _mm_setr_epi8(FROM(0), FROM(1), FROM(2), FROM(3), FROM(4), FROM(5), FROM(6), FROM(7), FROM(8),
                                                  FROM(9), FROM(10), FROM(11), FROM(12), FROM(13), FROM(14), FROM(15)));
}

INLINE void store(const uint8_t *luma, Vector blue, Vector red, uint8_t *rgb) {
    const Vector y = load(luma), half = _mm256_set1_epi32(HALF);
    const Vector factors = _mm256_set1_epi32((int)((uint32_t)(uint16_t)-GREEN_CB | (uint32_t)((1 << BITS) - GREEN_CR) << 16));
    Vector r = _mm256_add_epi16(_mm256_add_epi16(y, red), times(red, RED_CR - (1 << BITS)));
    Vector b = _mm256_add_epi16(_mm256_add_epi16(y, _mm256_add_epi16(blue, blue)), times(blue, BLUE_CB - (2 << BITS)));
    Vector low = _mm256_madd_epi16(_mm256_unpacklo_epi16(blue, red), factors);
    Vector high = _mm256_madd_epi16(_mm256_unpackhi_epi16(blue, red), factors);
    low = _mm256_srai_epi32(_mm256_add_epi32(low, half), BITS), high = _mm256_srai_epi32(_mm256_add_epi32(high, half), BITS);
    Vector g = _mm256_sub_epi16(_mm256_add_epi16(y, _mm256_packs_epi32(low, high)), red);
    __m128i reds = bytes(r), greens = bytes(g), blues = bytes(b);
    _Pragma("GCC unroll 3")
    for (int third = 0; third < 3; third++) {
        __m128i mixed = _mm_or_si128(spread(reds, 0, third), spread(greens, 1, third));
        _mm_storeu_si128((__m128i_u *)(rgb + 16 * third), _mm_or_si128(mixed, spread(blues, 2, third)));
    }
}

/* The pixels at both ends of a row of chroma by themselves, the others in steps, of which the last may overlap. */
INLINE void inner(const PixelRow *row, int across, int down, uint8_t *rgb) {
    int step = 16 * across, edge = across - 1; /* samples that have none beside them on one side */
    int from = across * edge - row->begin, to = across * (row->width - edge) - row->begin;
    from = from > 0 ? from : row->begin % across, to = to < row->count ? to : row->count;
    to -= (row->begin + to) % across;
    if (to - from < step) from = to = row->count;
    for (int at = from; at < to; at += step) {
        Vector blue[2], red[2];
        at = at + step > to ? to - step : at;
        chroma_of(row, 0, row->begin + at, across, down, blue), chroma_of(row, 1, row->begin + at, across, down, red);
        for (int i = 0; i < across; i++) store(row->luma + at + 16 * i, blue[i], red[i], rgb + 3 * (at + 16 * i));
    }
    some_pixels(row, 0, from, rgb), some_pixels(row, to, row->count, rgb);
}

static AVX2 void fast(const PixelRow *row, uint8_t *rgb) {
    if (row->across == 2 && row->down == 2)
        inner(row, 2, 2, rgb);
    else if (row->across == 2)
        inner(row, 2, 1, rgb);
    else
        inner(row, 1, row->down, rgb);
}

#endif

Colour *to_rgb(void) {
#if defined(__x86_64__)
    if (cpu_has(CPU_AVX2)) return fast;
#endif
    return plain;
}
