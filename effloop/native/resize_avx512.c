/* Resizing by AVX-512 with VBMI and VNNI (Intel from Ice Lake on, AMD from Zen 4 on): 16 values at once.
 *
 * Across: 64 bytes of a row are loaded, and one instruction picks the two taps of each value. Loads are masked at the
 * row's end, so that no byte behind it is touched. */

#include "resize.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")))
#define INLINE static inline __attribute__((always_inline)) AVX512
#define BLOCK 16
#define WINDOW 64

/* 16 values of rows of the source: which bytes they are made of, and how. */
typedef struct {
    int offset;       /* of the window, in bytes from a row's begin */
    int step;         /* from a pair of taps to the next, in bytes */
    __m512i bytes;    /* of the window, for each value: low tap, nothing, high tap, nothing */
    __m512i weights[MOST_PAIRS];
    __mmask64 inside[MOST_PAIRS]; /* bytes of the windows that are the row's */
} Block;

INLINE Block block_at(const Resize *job, int lane) {
    static const int32_t threes[] = {0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5};
    static const int32_t ones[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    static const int32_t channel[] = {0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2};
    const Axis *axis = job->across;
    int channels = job->channels, pixel = lane / channels, phase = lane % channels, out = axis->out;
    int entry = job->flip ? out - BLOCK - pixel : pixel, row_bytes = axis->in * channels;
    __m512i which = _mm512_loadu_si512(channels == 3 ? threes + phase : ones);
    int lowest = job->flip ? axis->first[entry + BLOCK - 1 - (channels == 3 ? 5 : 15)] : axis->first[entry];
    Block block = {.offset = lowest * channels, .step = 2 * channels};
    if (job->flip)
        which = _mm512_sub_epi32(_mm512_set1_epi32(BLOCK - 1), which);
    __m512i first = _mm512_permutexvar_epi32(which, _mm512_loadu_si512(axis->first + entry));
    __m512i low = _mm512_sub_epi32(first, _mm512_set1_epi32(lowest));
    if (channels == 3)
        low = _mm512_add_epi32(_mm512_add_epi32(low, _mm512_slli_epi32(low, 1)), _mm512_loadu_si512(channel + phase));
    __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(channels));
    block.bytes = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    for (int pair = 0; pair < axis->pairs; pair++) {
        int rest = row_bytes - block.offset - pair * block.step;
        block.weights[pair] = _mm512_permutexvar_epi32(which, _mm512_loadu_si512(axis->weights[pair] + entry));
        block.inside[pair] = rest >= WINDOW ? ~0ull : rest <= 0 ? 0 : (1ull << rest) - 1;
    }
    return block;
}

AVX512 static void prepare(const Resize *job) {
    Block *block = job->blocks;
    for (int lane = 0; lane < job->across->out * job->channels; lane += BLOCK)
        *block++ = block_at(job, lane);
}

INLINE __m512i sums(const uint8_t *row, const Block *block, int pairs, int precision) {
    __m512i sum = _mm512_set1_epi32(1 << precision >> 1);
    for (int pair = 0; pair < pairs; pair++) {
        __m512i window = _mm512_maskz_loadu_epi8(block->inside[pair], row + block->offset + pair * block->step);
        __m512i taps = _mm512_maskz_permutexvar_epi8(0x5555555555555555, block->bytes, window);
        sum = _mm512_dpwssd_epi32(sum, taps, block->weights[pair]);
    }
    return sum;
}

INLINE void strip(const Resize *job, const uint8_t *rows, ptrdiff_t stride, uint32_t *restrict made, int pairs) {
    int lanes = job->lanes, values = job->across->out * job->channels, precision = job->across->precision;
    const Block *restrict blocks = job->blocks;
    const __m512i left = _mm512_set1_epi32(precision - 16);
    for (int lane = 0; lane < values; lane += BLOCK) {
        const Block block = *blocks++;
        for (int i = 0; i < STRIP; i++) {
            __m512i even = sums(rows + 2 * i * stride, &block, pairs, precision);
            __m512i odd = sums(rows + (2 * i + 1) * stride, &block, pairs, precision);
            even = _mm512_srl_epi32(even, _mm_cvtsi32_si128(precision));
            odd = _mm512_rorv_epi32(odd, left); /* its value is in the high half, up to a precision of 16 */
            _mm512_store_si512(made + i * lanes + lane, _mm512_mask_mov_epi16(even, 0xaaaaaaaa, odd));
        }
    }
}

AVX512 static void across(const Resize *job, const uint8_t *rows, ptrdiff_t stride, uint32_t *restrict made) {
    switch (job->across->pairs) {
    case 1: strip(job, rows, stride, made, 1); break;
    case 2: strip(job, rows, stride, made, 2); break;
    case 3: strip(job, rows, stride, made, 3); break;
    default: strip(job, rows, stride, made, MOST_PAIRS);
    }
}

/* 64 values: the ring's rows are rounded up to that many. */
INLINE __m512i mixed(const uint32_t *const *rows, int lane, int count, const __m512i *weights, int precision) {
    __m512i sum[4];
    for (int part = 0; part < 4; part++) {
        sum[part] = _mm512_set1_epi32(1 << precision >> 1);
        for (int pair = 0; pair < count; pair++) {
            __m512i both = _mm512_load_si512(rows[pair] + lane + 16 * part);
            sum[part] = _mm512_dpwssd_epi32(sum[part], both, weights[pair]);
        }
        sum[part] = _mm512_sra_epi32(sum[part], _mm_cvtsi32_si128(precision));
    }
    __m512i low = _mm512_packus_epi32(sum[0], sum[1]), high = _mm512_packus_epi32(sum[2], sum[3]);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high));
}

INLINE void mix(const Resize *job, const uint32_t *const *pairs, const uint32_t *weights, int count, uint8_t *row) {
    __m512i spread[MOST_DOWN];
    int values = job->across->out * job->channels, precision = job->down->precision, lane = 0;
    for (int pair = 0; pair < count; pair++)
        spread[pair] = _mm512_set1_epi32((int)weights[pair]);
    for (; lane + 64 <= values; lane += 64)
        _mm512_storeu_si512(row + lane, mixed(pairs, lane, count, spread, precision));
    if (lane < values)
        _mm512_mask_storeu_epi8(row + lane, (1ull << (values - lane)) - 1, mixed(pairs, lane, count, spread, precision));
}

AVX512 static void down(const Resize *job, const uint32_t *const *pairs, const uint32_t *weights, int count,
                        uint8_t *row) {
    switch (count) {
    case 1: mix(job, pairs, weights, 1, row); break;
    case 2: mix(job, pairs, weights, 2, row); break;
    case 3: mix(job, pairs, weights, 3, row); break;
    default: mix(job, pairs, weights, count, row);
    }
}

const Kernel resize_avx512 = {prepare, across, down, sizeof(Block) / BLOCK, WINDOW, BLOCK, 1, 16};

_Static_assert(sizeof(Block) % BLOCK == 0, "a Block's bytes are counted for each value");

#endif
