/* Resizing by AVX2: across, four values of two rows at once.
 *
 * 16 bytes of each row are loaded, from no further than 16 before its end, and one instruction picks the two taps of
 * each value. */

#include <string.h>

#include "resize.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,tune=haswell")))
#define INLINE static inline __attribute__((always_inline)) AVX2
#define BLOCK 4
#define WINDOW 16

/* Four values of rows of the source: which bytes they are made of, and how. Both halves of a vector are alike. */
typedef struct {
    int offset[MOST_PAIRS];     /* of the windows, in bytes from a row's begin */
    __m256i bytes[MOST_PAIRS];  /* of the windows, for each value: low tap, nothing, high tap, nothing */
    __m256i weights[MOST_PAIRS];
} Block;

INLINE Block block_at(const Resize *job, int lane) {
    static const int32_t threes[] = {0, 0, 0, 1, 1, 1}, ones[] = {0, 1, 2, 3};
    static const int32_t channel[] = {0, 1, 2, 0, 1, 2};
    const Axis *axis = job->across;
    int channels = job->channels, pixel = lane / channels, phase = lane % channels, out = axis->out;
    int entry = job->flip ? out - 8 - pixel : pixel, end = axis->in * channels - WINDOW;
    int lowest = axis->first[job->flip ? entry + 7 - (channels == 3 ? 1 : 3) : entry];
    __m256i which = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)(channels == 3 ? threes + phase : ones)));
    if (job->flip)
        which = _mm256_sub_epi32(_mm256_set1_epi32(7), which);
    __m256i first = _mm256_permutevar8x32_epi32(_mm256_loadu_si256((const void *)(axis->first + entry)), which);
    __m256i low = _mm256_sub_epi32(first, _mm256_set1_epi32(lowest));
    if (channels == 3) {
        __m256i of_three = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)(channel + phase)));
        low = _mm256_add_epi32(_mm256_add_epi32(low, _mm256_slli_epi32(low, 1)), of_three);
    }
    __m256i high = _mm256_slli_epi32(_mm256_add_epi32(low, _mm256_set1_epi32(channels)), 16);
    __m256i bytes = _mm256_or_si256(_mm256_or_si256(low, high), _mm256_set1_epi32((int)0x80008000));
    Block block;
    for (int pair = 0; pair < axis->pairs; pair++) {
        int offset = (lowest + 2 * pair) * channels, begin = offset < end ? offset : end;
        __m256i weights = _mm256_loadu_si256((const void *)(axis->weights[pair] + entry));
        block.offset[pair] = begin;
        block.bytes[pair] = _mm256_add_epi32(bytes, _mm256_set1_epi32((offset - begin) * 0x10001));
        block.weights[pair] = _mm256_permutevar8x32_epi32(weights, which);
    }
    return block;
}

AVX2 static void prepare(const Resize *job) {
    Block *block = job->blocks;
    for (int lane = 0; lane < job->across->out * job->channels; lane += BLOCK)
        *block++ = block_at(job, lane);
}

INLINE __m256i sums(const uint8_t *even, const uint8_t *odd, const Block *block, int pairs, int precision) {
    __m256i sum = _mm256_set1_epi32(1 << precision >> 1);
    for (int pair = 0; pair < pairs; pair++) {
        int offset = block->offset[pair];
        __m128i first = _mm_loadu_si128((const void *)(even + offset));
        __m128i second = _mm_loadu_si128((const void *)(odd + offset));
        __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
        __m256i taps = _mm256_shuffle_epi8(both, block->bytes[pair]);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(taps, block->weights[pair]));
    }
    return _mm256_sra_epi32(sum, _mm_cvtsi32_si128(precision));
}

INLINE void strip(const Resize *job, const uint8_t *rows, ptrdiff_t stride, uint32_t *restrict made, int pairs) {
    int lanes = job->lanes, values = job->across->out * job->channels, precision = job->across->precision;
    const Block *restrict blocks = job->blocks;
    for (int lane = 0; lane < values; lane += BLOCK) {
        const Block block = *blocks++;
        for (int i = 0; i < STRIP; i++) {
            __m256i both = sums(rows + 2 * i * stride, rows + (2 * i + 1) * stride, &block, pairs, precision);
            __m128i odd = _mm_slli_epi32(_mm256_extracti128_si256(both, 1), 16);
            _mm_store_si128((void *)(made + i * lanes + lane), _mm_or_si128(_mm256_castsi256_si128(both), odd));
        }
    }
}

AVX2 static void across(const Resize *job, const uint8_t *rows, ptrdiff_t stride, uint32_t *restrict made) {
    switch (job->across->pairs) {
    case 1: strip(job, rows, stride, made, 1); break;
    case 2: strip(job, rows, stride, made, 2); break;
    case 3: strip(job, rows, stride, made, 3); break;
    default: strip(job, rows, stride, made, MOST_PAIRS);
    }
}

INLINE __m256i mixed(const uint32_t *const *rows, int lane, int count, const __m256i *weights, int precision) {
    __m256i sum[4];
    for (int part = 0; part < 4; part++) {
        sum[part] = _mm256_set1_epi32(1 << precision >> 1);
        for (int pair = 0; pair < count; pair++) {
            __m256i both = _mm256_load_si256((const void *)(rows[pair] + lane + 8 * part));
            sum[part] = _mm256_add_epi32(sum[part], _mm256_madd_epi16(both, weights[pair]));
        }
        sum[part] = _mm256_sra_epi32(sum[part], _mm_cvtsi32_si128(precision));
    }
    __m256i low = _mm256_packus_epi32(sum[0], sum[1]), high = _mm256_packus_epi32(sum[2], sum[3]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
}

INLINE void mix(const Resize *job, const uint32_t *const *pairs, const uint32_t *weights, int count, uint8_t *row) {
    __m256i spread[MOST_DOWN];
    int values = job->across->out * job->channels, precision = job->down->precision, lane = 0;
    for (int pair = 0; pair < count; pair++)
        spread[pair] = _mm256_set1_epi32((int)weights[pair]);
    for (; lane + 32 <= values; lane += 32)
        _mm256_storeu_si256((void *)(row + lane), mixed(pairs, lane, count, spread, precision));
    if (lane < values) {
        _Alignas(32) uint8_t rest[32];
        _mm256_store_si256((void *)rest, mixed(pairs, lane, count, spread, precision));
        memcpy(row + lane, rest, values - lane);
    }
}

AVX2 static void down(const Resize *job, const uint32_t *const *pairs, const uint32_t *weights, int count,
                      uint8_t *row) {
    switch (count) {
    case 1: mix(job, pairs, weights, 1, row); break;
    case 2: mix(job, pairs, weights, 2, row); break;
    case 3: mix(job, pairs, weights, 3, row); break;
    default: mix(job, pairs, weights, count, row);
    }
}

const Kernel resize_avx2 = {prepare, across, down, sizeof(Block) / BLOCK, WINDOW, BLOCK, WINDOW, 22};

_Static_assert(sizeof(Block) % BLOCK == 0, "a Block's bytes are counted for each value");

#endif
