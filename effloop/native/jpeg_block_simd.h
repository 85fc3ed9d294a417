/* Inverse DCTs with vectors, each 128-bit lane of which holds one block; jpeg_block.c includes this once for each kind of vector.
 *
 * It defines: TARGET (attribute), Vector (type), LANES (per vector), NAME (of a function), OP (an intrinsic), LOAD (eight values
 * from each block), REPEAT (the same eight values for each block), ANY (whether any bit is set). */

#define FIXED static inline __attribute__((always_inline)) TARGET
#define PAIRS(a, b) {OP(unpacklo_epi16)(a, b), OP(unpackhi_epi16)(a, b)}
#define BY(low, high) OP(set1_epi32)((int)((uint32_t)(uint16_t)(low) | (uint32_t)(uint16_t)(high) << 16))
#define SUM(pairs, low, high) OP(madd_epi16)(pairs, BY(low, high)) /* `sum` of each pair */
#define PLUS OP(add_epi32)
#define MINUS OP(sub_epi32)
#define SAMPLES(a, b) OP(add_epi8)(OP(packs_epi16)(a, b), OP(set1_epi8)((char)CENTRE))

/* Loads LANES blocks, dequantised. Returns 0 if values are so large that `first_of` may matter. */
FIXED int NAME(load)(const int16_t *const *blocks, const uint16_t *quantizers, Vector v[8]) {
    for (int i = 0; i < 8; i++) v[i] = OP(mullo_epi16)(LOAD(blocks, 8 * i), REPEAT(quantizers + 8 * i));
    return !(ANY(v[0] ^ OP(srai_epi16)(OP(slli_epi16)(v[0], MORE), MORE)));
}

/* `combine`, to every second one of 2 * `size` vectors. */
FIXED void NAME(combine)(const Vector *even, const Vector *odd, int size, int shift, Vector *to) {
    for (int i = 0; i < size / 2; i++) {
        to[2 * i] = OP(srai_epi32)(PLUS(even[i], odd[i]), shift);
        to[2 * (size - 1 - i)] = OP(srai_epi32)(MINUS(even[i], odd[i]), shift);
    }
}

/* `pass_8` for the eight columns of each block. */
FIXED void NAME(pass_8)(Vector v[8], const int shift) {
    const Vector half = OP(set1_epi32)(1 << (shift - 1)), v04[2] = PAIRS(OP(add_epi16)(v[0], v[4]), OP(sub_epi16)(v[0], v[4]));
    const Vector z34[2] = PAIRS(OP(add_epi16)(v[7], v[3]), OP(add_epi16)(v[5], v[1]));
    const Vector v17[2] = PAIRS(v[1], v[7]), v35[2] = PAIRS(v[3], v[5]), v26[2] = PAIRS(v[2], v[6]);
    Vector sums[8][2];
    for (int i = 0; i < 2; i++) {
        Vector low = PLUS(half, SUM(v04[i], 1 << FRACTION, 0)), high = PLUS(half, SUM(v04[i], 0, 1 << FRACTION));
        Vector outer = SUM(v26[i], C0541 + C0765, C0541), inner = SUM(v26[i], C0541, C0541 - C1847);
        Vector s3 = SUM(z34[i], C1175 - C1961, C1175), s4 = SUM(z34[i], C1175, C1175 - C0390);
        const Vector even[4] = {PLUS(low, outer), PLUS(high, inner), MINUS(high, inner), MINUS(low, outer)};
        const Vector odd[4] = {PLUS(s4, SUM(v17[i], C1501 - C0899, -C0899)), PLUS(s3, SUM(v35[i], C3072 - C2562, -C2562)),
                               PLUS(s4, SUM(v35[i], -C2562, C2053 - C2562)), PLUS(s3, SUM(v17[i], -C0899, C0298 - C0899))};
        NAME(combine)(even, odd, 8, shift, &sums[0][i]);
    }
    for (int i = 0; i < 8; i++) v[i] = OP(packs_epi32)(sums[i][0], sums[i][1]);
}

static TARGET void NAME(inverse_8)(const int16_t *const blocks[BATCH], const uint16_t *quantizers, uint8_t *const to[BATCH],
                                   ptrdiff_t stride) {
    Vector v[8], next[8];
    for (int at = 0; at < BATCH; at += LANES) {
        if (!NAME(load)(blocks + at, quantizers, v)) {
            plain_8(blocks, quantizers, to, stride);
            return;
        }
        NAME(pass_8)(v, FIRST);
        for (int round = 0; round < 3; round++) {
            for (int i = 0; i < 4; i++)
                next[2 * i] = OP(unpacklo_epi16)(v[i], v[i + 4]), next[2 * i + 1] = OP(unpackhi_epi16)(v[i], v[i + 4]);
            for (int i = 0; i < 8; i++) v[i] = next[i];
        }
        NAME(pass_8)(v, SECOND);
        for (int i = 0; i < 4; i++) v[i] = SAMPLES(v[2 * i], v[2 * i + 1]);
        for (int round = 0; round < 3; round++) {
            for (int i = 0; i < 2; i++)
                next[2 * i] = OP(unpacklo_epi8)(v[i], v[i + 2]), next[2 * i + 1] = OP(unpackhi_epi8)(v[i], v[i + 2]);
            for (int i = 0; i < 4; i++) v[i] = next[i];
        }
        for (int i = 0; i < 8; i++)
            for (int lane = 0; lane < LANES; lane++) {
                uint64_t row = (uint64_t)v[i / 2][2 * lane + i % 2];
                memcpy(to[at + lane] + i * stride, &row, sizeof row);
            }
    }
}

/* `pass_4` for four columns, from pairs of their values. */
FIXED void NAME(pass_4)(Vector v00, Vector v13, Vector v26, Vector v57, const int shift, Vector *to) {
    Vector low = PLUS(OP(set1_epi32)(1 << (shift - 1)), SUM(v00, 1 << FRACTION, 1 << FRACTION)), other = SUM(v26, C1847, -C0765);
    const Vector even[2] = {PLUS(low, other), MINUS(low, other)};
    const Vector odd[2] = {PLUS(SUM(v13, C2562, C0899), SUM(v57, -C0601, -C0509)),
                           PLUS(SUM(v13, C1061, -C2172), SUM(v57, C1451, -C0211))};
    NAME(combine)(even, odd, 4, shift, to);
}

static TARGET void NAME(inverse_4)(const int16_t *const blocks[BATCH], const uint16_t *quantizers, uint8_t *const to[BATCH],
                                   ptrdiff_t stride) {
    Vector v[8], sums[4][2];
    for (int at = 0; at < BATCH; at += LANES) {
        if (!NAME(load)(blocks + at, quantizers, v)) {
            plain_4(blocks, quantizers, to, stride);
            return;
        }
        const Vector v00[2] = PAIRS(v[0], v[0]), v13[2] = PAIRS(v[1], v[3]), v26[2] = PAIRS(v[2], v[6]), v57[2] = PAIRS(v[5], v[7]);
        for (int i = 0; i < 2; i++) NAME(pass_4)(v00[i], v13[i], v26[i], v57[i], FIRST + 1, &sums[0][i]);
        for (int i = 0; i < 4; i++) v[i] = OP(packs_epi32)(sums[i][0], sums[i][1]);
        const Vector upper[2] = PAIRS(v[0], v[1]), lower[2] = PAIRS(v[2], v[3]);
        for (int i = 0; i < 2; i++) /* pairs of columns */
            v[2 * i] = OP(unpacklo_epi32)(upper[i], lower[i]), v[2 * i + 1] = OP(unpackhi_epi32)(upper[i], lower[i]);
        NAME(pass_4)(OP(unpacklo_epi16)(v[0], v[0]), OP(unpackhi_epi16)(v[0], v[1]), OP(unpacklo_epi16)(v[1], v[3]),
                     OP(unpackhi_epi16)(v[2], v[3]), SECOND + 1, &sums[0][0]);
        const Vector rows[2] = PAIRS(OP(packs_epi32)(sums[0][0], sums[2][0]), OP(packs_epi32)(sums[1][0], sums[3][0]));
        v[0] = SAMPLES(OP(unpacklo_epi32)(rows[0], rows[1]), OP(unpackhi_epi32)(rows[0], rows[1]));
        for (int i = 0; i < 4 * LANES; i++) memcpy(to[at + i / 4] + i % 4 * stride, (const char *)v + 4 * i, 4);
    }
}

#undef TARGET
#undef Vector
#undef LANES
#undef NAME
#undef OP
#undef LOAD
#undef REPEAT
#undef ANY
