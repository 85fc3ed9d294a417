/* The inverse DCT of libjpeg-turbo's accurate integer method, to the bit: also where its 16-bit sums overflow.
 *
 * C. Loeffler, A. Ligtenberg and G. Moschytz, "Practical Fast 1-D DCT Algorithms with 11 Multiplications", ICASSP 1989,
 * with constants of 13 bits, and 2 more bits between the passes. */

#include <string.h>

#include "cpu.h"
#include "jpeg_pixels.h"

enum { C0298 = 2446, C0390 = 3196, C0541 = 4433, C0765 = 6270, C0899 = 7373, C1175 = 9633, C1501 = 12299, C1847 = 15137 };
enum { C1961 = 16069, C2053 = 16819, C2562 = 20995, C3072 = 25172 };
enum { FRACTION = 13, MORE = 2, FIRST = FRACTION - MORE, SECOND = FRACTION + MORE + 3, CENTRE = 128 };

static int16_t saturated(int32_t value) { return (int16_t)(value < INT16_MIN ? INT16_MIN : value > INT16_MAX ? INT16_MAX : value); }

static uint8_t sample_of(int16_t value) { return (uint8_t)((value < -CENTRE ? -CENTRE : value >= CENTRE ? CENTRE - 1 : value) + CENTRE); }

/* A sum of two products; overflows wrap around. */
static uint32_t sum(int32_t a, int32_t by_a, int32_t b, int32_t by_b) { return (uint32_t)a * (uint32_t)by_a + (uint32_t)b * (uint32_t)by_b; }

/* What the first pass makes of a value where all rows below are 0: libjpeg-turbo doesn't saturate it then. */
static int16_t first_of(int16_t value) { return (int16_t)((uint32_t)value << MORE); }

/* Eight values that are `step` apart. */
static void pass(int16_t *at, int step, int shift) {
    int16_t v[8];
    for (int i = 0; i < 8; i++) v[i] = at[i * step];
    int16_t z3 = (int16_t)(v[7] + v[3]), z4 = (int16_t)(v[5] + v[1]);
    uint32_t low = sum((int16_t)(v[0] + v[4]), 1 << FRACTION, 0, 0), high = sum((int16_t)(v[0] - v[4]), 1 << FRACTION, 0, 0);
    uint32_t outer = sum(v[2], C0541 + C0765, v[6], C0541), inner = sum(v[2], C0541, v[6], C0541 - C1847);
    uint32_t s3 = sum(z3, C1175 - C1961, z4, C1175), s4 = sum(z3, C1175, z4, C1175 - C0390);
    const uint32_t even[4] = {low + outer, high + inner, high - inner, low - outer};
    const uint32_t odd[4] = {sum(v[1], C1501 - C0899, v[7], -C0899) + s4, sum(v[3], C3072 - C2562, v[5], -C2562) + s3,
                             sum(v[5], C2053 - C2562, v[3], -C2562) + s4, sum(v[7], C0298 - C0899, v[1], -C0899) + s3};
    for (int i = 0; i < 4; i++) {
        uint32_t rounded = even[i] + (1u << (shift - 1));
        at[i * step] = saturated((int32_t)(rounded + odd[i]) >> shift);
        at[(7 - i) * step] = saturated((int32_t)(rounded - odd[i]) >> shift);
    }
}

static void plain(const int16_t *const blocks[2], const uint16_t *quantizers, uint8_t *const to[2], ptrdiff_t stride) {
    for (int block = 0; block < 2; block++) {
        int16_t values[64];
        for (int i = 0; i < 64; i++) values[i] = (int16_t)(blocks[block][i] * quantizers[i]);
        int rest = 0;
        for (int i = 8; i < 64; i++) rest |= blocks[block][i];
        for (int i = 0; i < 8; i++) {
            if (rest) {
                pass(values + i, 8, FIRST);
                continue;
            }
            int16_t value = first_of(values[i]);
            for (int j = 0; j < 8; j++) values[8 * j + i] = value;
        }
        for (int i = 0; i < 8; i++) pass(values + 8 * i, 1, SECOND);
        for (int i = 0; i < 64; i++) to[block][(i >> 3) * stride + (i & 7)] = sample_of(values[i]);
    }
}

void flat_block(int16_t dc, uint16_t quantizer, uint8_t *to, ptrdiff_t stride) {
    int16_t value = first_of((int16_t)(dc * quantizer));
    uint64_t row = 0x0101010101010101u * sample_of((int16_t)((value + 16) >> 5));
    for (int i = 0; i < 8; i++) memcpy(to + i * stride, &row, sizeof row);
}

#if defined(__x86_64__)

#include <immintrin.h>

#define AVX2 __attribute__((target("avx2")))
#define INLINE static inline __attribute__((always_inline)) AVX2

typedef __m256i Vector; /* half of it for each block */

INLINE Vector two(int low, int high) { return _mm256_set1_epi32((int)((uint32_t)(uint16_t)low | (uint32_t)(uint16_t)high << 16)); }

#define SUMS(a, b, low, high) \
    {_mm256_madd_epi16(_mm256_unpacklo_epi16(a, b), two(low, high)), _mm256_madd_epi16(_mm256_unpackhi_epi16(a, b), two(low, high))}
#define SHIFTED(a) \
    {_mm256_srai_epi32(_mm256_unpacklo_epi16(zero, a), 16 - FRACTION), _mm256_srai_epi32(_mm256_unpackhi_epi16(zero, a), 16 - FRACTION)}

/* `pass` of eight columns at once. */
INLINE void pass_avx2(Vector v[8], const int shift) {
    const Vector zero = _mm256_setzero_si256(), half = _mm256_set1_epi32(1 << (shift - 1));
    Vector z3 = _mm256_add_epi16(v[7], v[3]), z4 = _mm256_add_epi16(v[5], v[1]);
    Vector sum = _mm256_add_epi16(v[0], v[4]), difference = _mm256_sub_epi16(v[0], v[4]);
    Vector low[2] = SHIFTED(sum), high[2] = SHIFTED(difference);
    Vector outer[2] = SUMS(v[2], v[6], C0541 + C0765, C0541), inner[2] = SUMS(v[2], v[6], C0541, C0541 - C1847);
    Vector s3[2] = SUMS(z3, z4, C1175 - C1961, C1175), s4[2] = SUMS(z3, z4, C1175, C1175 - C0390);
    Vector odd[4][2] = {SUMS(v[1], v[7], C1501 - C0899, -C0899), SUMS(v[3], v[5], C3072 - C2562, -C2562),
                        SUMS(v[5], v[3], C2053 - C2562, -C2562), SUMS(v[7], v[1], C0298 - C0899, -C0899)};
    Vector up[4][2], down[4][2];
    for (int i = 0; i < 2; i++) {
        Vector even[4] = {_mm256_add_epi32(low[i], outer[i]), _mm256_add_epi32(high[i], inner[i]),
                          _mm256_sub_epi32(high[i], inner[i]), _mm256_sub_epi32(low[i], outer[i])};
        for (int j = 0; j < 4; j++) {
            Vector rounded = _mm256_add_epi32(even[j], half), other = _mm256_add_epi32(odd[j][i], j & 1 ? s3[i] : s4[i]);
            up[j][i] = _mm256_srai_epi32(_mm256_add_epi32(rounded, other), shift);
            down[j][i] = _mm256_srai_epi32(_mm256_sub_epi32(rounded, other), shift);
        }
    }
    for (int j = 0; j < 4; j++) {
        v[j] = _mm256_packs_epi32(up[j][0], up[j][1]);
        v[7 - j] = _mm256_packs_epi32(down[j][0], down[j][1]);
    }
}

INLINE void transpose(Vector v[8]) {
    Vector once[8];
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 4; i++)
            once[2 * i] = _mm256_unpacklo_epi16(v[i], v[i + 4]), once[2 * i + 1] = _mm256_unpackhi_epi16(v[i], v[i + 4]);
        memcpy(v, once, sizeof once);
    }
}

INLINE Vector both(const void *low, const void *high) { return _mm256_loadu2_m128i((const __m128i_u *)high, (const __m128i_u *)low); }

static AVX2 void fast(const int16_t *const blocks[2], const uint16_t *quantizers, uint8_t *const to[2], ptrdiff_t stride) {
    Vector v[8], rest = _mm256_setzero_si256();
    for (int i = 0; i < 8; i++) {
        Vector row = both(blocks[0] + 8 * i, blocks[1] + 8 * i);
        if (i) rest = _mm256_or_si256(rest, row);
        v[i] = _mm256_mullo_epi16(row, both(quantizers + 8 * i, quantizers + 8 * i));
    }
    Vector empty = _mm256_cmpeq_epi64(rest, _mm256_setzero_si256()); /* and the other half of a block's */
    empty = _mm256_and_si256(empty, _mm256_shuffle_epi32(empty, _MM_SHUFFLE(1, 0, 3, 2)));
    Vector first = _mm256_slli_epi16(v[0], MORE);
    pass_avx2(v, FIRST);
    if (!_mm256_testz_si256(empty, empty))
        for (int i = 0; i < 8; i++) v[i] = _mm256_blendv_epi8(v[i], first, empty);
    transpose(v), pass_avx2(v, SECOND), transpose(v);
    for (int i = 0; i < 8; i += 2) {
        Vector rows = _mm256_add_epi8(_mm256_packs_epi16(v[i], v[i + 1]), _mm256_set1_epi8((char)CENTRE));
        __m128i one = _mm256_castsi256_si128(rows), other = _mm256_extracti128_si256(rows, 1);
        _mm_storel_epi64((__m128i_u *)(to[0] + i * stride), one);
        _mm_storel_epi64((__m128i_u *)(to[0] + (i + 1) * stride), _mm_unpackhi_epi64(one, one));
        _mm_storel_epi64((__m128i_u *)(to[1] + i * stride), other);
        _mm_storel_epi64((__m128i_u *)(to[1] + (i + 1) * stride), _mm_unpackhi_epi64(other, other));
    }
}

#endif

Inverse *inverse_dct(void) {
#if defined(__x86_64__)
    if (cpu_has(CPU_AVX2)) return fast;
#endif
    return plain;
}
