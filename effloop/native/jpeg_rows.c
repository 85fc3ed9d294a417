/* From YCbCr to RGB, with libjpeg's "fancy upsampling".
 *
 * Chroma of half the resolution is interpolated: in each direction, the sample that a pixel lies in has a weight of 3, and the
 * neighbour nearer to the pixel a weight of 1; at the edge, where there is no neighbour, the sample counts alone. Ties are rounded
 * up for one pixel and down for the next. */

#include <string.h>

#include "cpu.h"
#include "jpeg_pixels.h"

enum { BITS = 16, HALF = 1 << (BITS - 1), CENTRE = 128 };
enum { RED_CR = 91881, GREEN_CB = 22554, GREEN_CR = 46802, BLUE_CB = 116130 }; /* of 1 << BITS: 1.402, 0.34414, 0.71414, 1.772 */

static inline __attribute__((always_inline)) int chroma_of(const PixelRow *row, int channel, int luma) { /* signed */
    const uint8_t *own = row->own[channel], *near = row->down == 2 ? row->near[channel] : own;
    if (row->across == 1 && row->down == 1) return own[luma] - CENTRE;
    int doubled = row->across == 2, at = luma >> doubled, odd = luma & doubled, beside = odd ? at + 1 : at - 1;
    if (!doubled || row->repeated || beside < 0 || beside >= row->width) beside = at;
    int bias = row->down == 1 ? 4 + 4 * odd : doubled ? 8 - odd : row->upper ? 4 : 8;
    return ((9 * own[at] + 3 * near[at] + 3 * own[beside] + near[beside] + bias) >> 4) - CENTRE;
}

static uint8_t clamped(int value) { return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value); }

static inline __attribute__((always_inline)) void pixel(const PixelRow *row, int at, uint8_t *restrict rgb) {
    int blue = row->own[0] ? chroma_of(row, 0, row->begin + at) : 0, red = row->own[0] ? chroma_of(row, 1, row->begin + at) : 0;
    rgb[3 * at] = clamped(row->luma[at] + ((RED_CR * red + HALF) >> BITS));
    rgb[3 * at + 1] = clamped(row->luma[at] + ((-GREEN_CB * blue - GREEN_CR * red + HALF) >> BITS));
    rgb[3 * at + 2] = clamped(row->luma[at] + ((BLUE_CB * blue + HALF) >> BITS));
}

static void plain(const PixelRow *row, uint8_t *restrict rgb) {
    for (int i = 0; i < row->count; i++) pixel(row, i, rgb);
}

#if defined(__x86_64__)

#include <immintrin.h>

enum { TWICE_RED = 22972, TWICE_BLUE = 29033 }; /* of 1 << 15, for twice the chroma: the same results for all of its values */

#define FOUR(F, n) F(n), F((n) + 1), F((n) + 2), F((n) + 3)
#define SIXTEEN(F, n) FOUR(F, n), FOUR(F, (n) + 4), FOUR(F, (n) + 8), FOUR(F, (n) + 12)
#define ALL(F, n) SIXTEEN(F, n), SIXTEEN(F, (n) + 16), SIXTEEN(F, (n) + 32), SIXTEEN(F, (n) + 48)

#define INLINE static inline __attribute__((always_inline, target("avx2")))
#define NAME(name) name##_avx2
#define OP(name) _mm256_##name
#define LOAD(from) _mm256_loadu_si256((const __m256i_u *)(from))
#define STEP 32
#define Vector __m256i

/* Bytes from `a` and `b`, alternating. */
INLINE Vector pairs_avx2(const uint8_t *a, const uint8_t *b) {
    Vector first = _mm256_loadu2_m128i((const __m128i_u *)(a + 8), (const __m128i_u *)a);
    return _mm256_unpacklo_epi8(first, _mm256_loadu2_m128i((const __m128i_u *)(b + 8), (const __m128i_u *)b));
}

/* Packs two vectors into one, and shuffles it so that three such vectors only have to be blended. */
INLINE Vector spread(Vector low, Vector high, int third) {
#define PLACE(n) (((48 + (n) / 16 * 2 - (n) % 16 / 2 * 2) % 3 * 16 + (n) % 16) / 6 + (n) % 2 * 8)
    static const uint8_t places[3][16] = {{SIXTEEN(PLACE, 0)}, {SIXTEEN(PLACE, 16)}, {SIXTEEN(PLACE, 32)}};
    Vector all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i_u *)places[third]));
    return _mm256_shuffle_epi8(_mm256_packus_epi16(low, high), all);
}

INLINE void store_avx2(const Vector r[2], const Vector g[2], const Vector b[2], uint8_t *rgb) {
    Vector one = spread(r[0], g[0], 0), two = spread(b[0], r[1], 1), three = spread(g[1], b[1], 2);
    Vector low = _mm256_blend_epi16(_mm256_blend_epi16(one, two, 0x92), three, 0x24);
    Vector middle = _mm256_blend_epi16(_mm256_blend_epi16(one, two, 0x24), three, 0x49);
    Vector high = _mm256_blend_epi16(_mm256_blend_epi16(one, two, 0x49), three, 0x92);
    _mm256_storeu_si256((__m256i_u *)rgb, _mm256_permute2x128_si256(low, middle, 0x20));
    _mm256_storeu_si256((__m256i_u *)(rgb + 32), _mm256_permute2x128_si256(high, low, 0x30));
    _mm256_storeu_si256((__m256i_u *)(rgb + 64), _mm256_permute2x128_si256(middle, high, 0x31));
}

#include "jpeg_rows_simd.h"

#define INLINE static inline __attribute__((always_inline, target("avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")))
#define NAME(name) name##_avx512
#define OP(name) _mm512_##name
#define LOAD(from) _mm512_loadu_si512(from)
#define STEP 64
#define Vector __m512i

INLINE Vector pairs_avx512(const uint8_t *a, const uint8_t *b) {
#define TURN(n) ((n) / 2 + (n) % 2 * 64)
    static const uint8_t turns[64] = {ALL(TURN, 0)};
    Vector first = _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i_u *)a));
    return _mm512_permutex2var_epi8(first, LOAD(turns), _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i_u *)b)));
}

INLINE void store_avx512(const Vector r[2], const Vector g[2], const Vector b[2], uint8_t *rgb) {
#define BYTE(n) ((n) / 48 * 16 + (n) % 48 / 6 + (n) / 3 % 2 * 8 + ((n) % 3 == 1) * 64)
    static const uint8_t places[3][64] = {{ALL(BYTE, 0)}, {ALL(BYTE, 64)}, {ALL(BYTE, 128)}};
    static const uint64_t blue[3] = {0x4924924924924924, 0x2492492492492492, 0x9249249249249249};
    Vector reds = OP(packus_epi16)(r[0], r[1]), greens = OP(packus_epi16)(g[0], g[1]), blues = OP(packus_epi16)(b[0], b[1]);
    for (int i = 0; i < 3; i++) {
        Vector from = LOAD(places[i]), mixed = _mm512_permutex2var_epi8(reds, from, greens);
        _mm512_storeu_si512(rgb + 64 * i, _mm512_mask_permutexvar_epi8(mixed, blue[i], from, blues));
    }
}

#include "jpeg_rows_simd.h"

#endif

Colour *to_rgb(void) {
#if defined(__x86_64__)
    if (cpu_has(CPU_AVX2)) return cpu_has(CPU_AVX512) ? row_avx512 : row_avx2;
#endif
    return plain;
}
