/* The inverse DCTs of libjpeg-turbo's vector code, to the bit, even where 16-bit sums overflow. The one to 8x8 samples is its
 * accurate integer method (jidctint.c); those to fewer (jidctred.c) average neighbouring samples.
 *
 * C. Loeffler, A. Ligtenberg and G. Moschytz, "Practical Fast 1-D DCT Algorithms with 11 Multiplications", ICASSP 1989.
 * Constants (C0298 is 0.298...) have 13 bits of fraction, values between the two passes 2. */

#include <string.h>

#include "cpu.h"
#include "jpeg_pixels.h"

enum { C0298 = 2446, C0390 = 3196, C0541 = 4433, C0765 = 6270, C0899 = 7373, C1175 = 9633, C1501 = 12299, C1847 = 15137 };
enum { C1961 = 16069, C2053 = 16819, C2562 = 20995, C3072 = 25172 };
enum { C0211 = 1730, C0509 = 4176, C0601 = 4926, C0720 = 5906, C0850 = 6967, C1061 = 8697, C1272 = 10426, C1451 = 11893 };
enum { C2172 = 17799, C3624 = 29692 };
enum { FRACTION = 13, MORE = 2, FIRST = FRACTION - MORE, SECOND = FRACTION + MORE + 3, CENTRE = 128 };

/* What is kept between the passes: by libjpeg-turbo's NEON, overflows wrap around. */
static int16_t saturated(int32_t value) {
    return (int16_t)(CPU_NEON ? value : value < INT16_MIN ? INT16_MIN : value > INT16_MAX ? INT16_MAX : value);
}

static uint8_t sample_of(int32_t value) {
    return (uint8_t)((value < -CENTRE ? -CENTRE : value >= CENTRE ? CENTRE - 1 : value) + CENTRE);
}

/* The sum of two products, which may overflow. */
static uint32_t sum(int32_t a, int32_t by_a, int32_t b, int32_t by_b) {
    return (uint32_t)a * (uint32_t)by_a + (uint32_t)b * (uint32_t)by_b;
}

/* The result of the first pass where all rows but the first are 0, which libjpeg-turbo doesn't saturate. */
static int16_t first_of(int16_t value) { return (int16_t)((uint32_t)value << MORE); }

/* Writes the sums of even and odd part from the start on, and their differences from the end back. */
static inline void combine(int16_t *at, int step, int size, int shift, const uint32_t *even, const uint32_t *odd) {
    for (int i = 0; i < size / 2; i++) {
        uint32_t rounded = even[i] + (1u << (shift - 1));
        at[i * step] = saturated((int32_t)(rounded + odd[i]) >> shift);
        at[(size - 1 - i) * step] = saturated((int32_t)(rounded - odd[i]) >> shift);
    }
}

/* Transforms eight values, `step` apart, in place. */
static inline void pass_8(int16_t *at, int step, int shift) {
    int16_t v[8];
    for (int i = 0; i < 8; i++) v[i] = at[i * step];
    int16_t z3 = (int16_t)(v[7] + v[3]), z4 = (int16_t)(v[5] + v[1]);
    uint32_t low = sum((int16_t)(v[0] + v[4]), 1 << FRACTION, 0, 0), high = sum((int16_t)(v[0] - v[4]), 1 << FRACTION, 0, 0);
    uint32_t outer = sum(v[2], C0541 + C0765, v[6], C0541), inner = sum(v[2], C0541, v[6], C0541 - C1847);
    uint32_t s3 = sum(z3, C1175 - C1961, z4, C1175), s4 = sum(z3, C1175, z4, C1175 - C0390);
    const uint32_t even[4] = {low + outer, high + inner, high - inner, low - outer};
    const uint32_t odd[4] = {sum(v[1], C1501 - C0899, v[7], -C0899) + s4, sum(v[3], C3072 - C2562, v[5], -C2562) + s3,
                             sum(v[5], C2053 - C2562, v[3], -C2562) + s4, sum(v[7], C0298 - C0899, v[1], -C0899) + s3};
    combine(at, step, 8, shift, even, odd);
}

/* Transforms eight values to four, which replace the first four. */
static inline void pass_4(int16_t *at, int step, int shift) {
    int16_t v[8];
    for (int i = 0; i < 8; i++) v[i] = at[i * step];
    uint32_t low = sum(v[0], 1 << (FRACTION + 1), 0, 0), other = sum(v[2], C1847, v[6], -C0765);
    const uint32_t even[2] = {low + other, low - other};
    const uint32_t odd[2] = {sum(v[1], C2562, v[3], C0899) + sum(v[5], -C0601, v[7], -C0509),
                             sum(v[1], C1061, v[3], -C2172) + sum(v[5], C1451, v[7], -C0211)};
    combine(at, step, 4, shift, even, odd);
}

/* One block, to 8x8 or 4x4 samples. */
static inline void plain(const int16_t *block, const uint16_t *quantizers, int size, uint8_t *to, ptrdiff_t stride) {
    int16_t values[64];
    int rest = 0, more = size < 8;
    for (int i = 0; i < 64; i++) values[i] = (int16_t)(block[i] * quantizers[i]);
    for (int i = 8; i < 64; i++) rest |= size == 8 || i >> 3 != 4 ? block[i] : 0;
    for (int i = 0; i < 8; i++) {
        if (rest) {
            (size == 8 ? pass_8 : pass_4)(values + i, 8, FIRST + more);
            continue;
        }
        int16_t value = first_of(values[i]);
        for (int j = 0; j < size; j++) values[8 * j + i] = value;
    }
    for (int i = 0; i < size; i++) {
        (size == 8 ? pass_8 : pass_4)(values + 8 * i, 1, SECOND + more);
        for (int j = 0; j < size; j++) to[i * stride + j] = sample_of(values[8 * i + j]);
    }
}

static void plain_8(const int16_t *const blocks[BATCH], const uint16_t *quantizers, uint8_t *const to[BATCH], ptrdiff_t stride) {
    for (int i = 0; i < BATCH; i++) plain(blocks[i], quantizers, 8, to[i], stride);
}

static void plain_4(const int16_t *const blocks[BATCH], const uint16_t *quantizers, uint8_t *const to[BATCH], ptrdiff_t stride) {
    for (int i = 0; i < BATCH; i++) plain(blocks[i], quantizers, 4, to[i], stride);
}

/* The odd part of a transform of eight values to two. */
static uint32_t odd_2(int32_t v1, int32_t v3, int32_t v5, int32_t v7) {
    return sum(v1, C3624, v3, -C1272) + sum(v5, C0850, v7, -C0720);
}

static void plain_2(const int16_t *const blocks[BATCH], const uint16_t *quantizers, uint8_t *const to[BATCH], ptrdiff_t stride) {
    const int shift = FIRST + 2, second = SECOND + 2;
    for (int block = 0; block < BATCH; block++) {
        int16_t v[64];
        int32_t rows[2][8];
        for (int i = 0; i < 64; i++) v[i] = (int16_t)(blocks[block][i] * quantizers[i]);
        for (int i = 0; i < 8; i++) {
            uint32_t low = sum(v[i], 1 << (FRACTION + 2), 1, 1 << (shift - 1));
            uint32_t odd = odd_2(v[8 + i], v[24 + i], v[40 + i], v[56 + i]);
            rows[0][i] = (int32_t)(low + odd) >> shift, rows[1][i] = (int32_t)(low - odd) >> shift;
        }
        for (int i = 0; i < 2; i++) {
            const int32_t *row = rows[i]; /* row[0] isn't saturated */
            uint32_t low = sum(CPU_NEON ? (int16_t)row[0] : row[0], 1 << (FRACTION + 2), 1, 1 << (second - 1));
            uint32_t odd = odd_2(saturated(row[1]), saturated(row[3]), saturated(row[5]), saturated(row[7]));
            to[block][i * stride] = sample_of((int32_t)(low + odd) >> second);
            to[block][i * stride + 1] = sample_of((int32_t)(low - odd) >> second);
        }
    }
}

/* The mean; values of more than 13 bits wrap around. */
static void plain_1(const int16_t *const blocks[BATCH], const uint16_t *quantizers, uint8_t *const to[BATCH], ptrdiff_t stride) {
    (void)stride;
    for (int i = 0; i < BATCH; i++) *to[i] = sample_of((int32_t)(((uint32_t)(*blocks[i] * *quantizers) + 4) << 19) >> 22);
}

#if defined(__x86_64__)

#include <immintrin.h>

#define EIGHT(at) _mm_loadu_si128((const __m128i_u *)(at))
#define TWICE_EIGHT(at, i) _mm256_loadu2_m128i((const __m128i_u *)((at)[1] + (i)), (const __m128i_u *)((at)[0] + (i)))

#define TARGET __attribute__((target("avx2")))
#define Vector __m256i
#define LANES 2
#define NAME(name) name##_avx2
#define OP(name) _mm256_##name
#define LOAD(blocks, i) TWICE_EIGHT(blocks, i)
#define REPEAT(at) _mm256_broadcastsi128_si256(EIGHT(at))
#define ANY(v) !_mm256_testz_si256(v, v)
#include "jpeg_block_simd.h"

#define TARGET __attribute__((target("avx512f,avx512bw")))
#define Vector __m512i
#define LANES 4
#define NAME(name) name##_avx512
#define OP(name) _mm512_##name
#define LOAD(blocks, i) _mm512_inserti64x4(_mm512_castsi256_si512(TWICE_EIGHT(blocks, i)), TWICE_EIGHT((blocks) + 2, i), 1)
#define REPEAT(at) _mm512_broadcast_i32x4(EIGHT(at))
#define ANY(v) _mm512_test_epi64_mask(v, v)
#include "jpeg_block_simd.h"

#endif

Inverse *inverse_dct(int size) {
#if defined(__x86_64__)
    if (cpu_has(CPU_AVX512) && size > 2) return size == 8 ? inverse_8_avx512 : inverse_4_avx512;
    if (cpu_has(CPU_AVX2) && size > 2) return size == 8 ? inverse_8_avx2 : inverse_4_avx2;
#endif
    return size == 8 ? plain_8 : size == 4 ? plain_4 : size == 2 ? plain_2 : plain_1;
}
