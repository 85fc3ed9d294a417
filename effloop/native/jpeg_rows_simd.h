/* From YCbCr to RGB, STEP pixels at a time; jpeg_rows.c includes this once for each kind of vector. The first of two vectors
 * has the 16-bit values of the pixels at even places, the second those at odd places. */

INLINE Vector NAME(sum)(Vector a, Vector b) { return OP(add_epi16)(a, b); }

/* Three times `a`, plus `b`. */
INLINE Vector NAME(mix)(const uint8_t *a, const uint8_t *b) { return OP(maddubs_epi16)(NAME(pairs)(a, b), OP(set1_epi16)(0x103)); }

INLINE void NAME(split)(const uint8_t *samples, Vector found[2]) {
    found[0] = OP(srli_epi16)(OP(slli_epi16)(LOAD(samples), 8), 8), found[1] = OP(srli_epi16)(LOAD(samples), 8);
}

/* Chroma, signed; `odd` is 1 if the first pixel is in an odd column, else 0. */
INLINE void NAME(chroma)(const PixelRow *row, int channel, int luma, int across, int down, int odd, Vector found[2]) {
    const uint8_t *own = row->own[channel] + luma / across, *near = (down == 2 ? row->near : row->own)[channel] + luma / across;
    int side = down == 1 && row->repeated ? 0 : odd ? 1 : -1, other = odd - side, shift = 2 * (across + down) - 4;
    Vector beside[2];
    if (across == 1) {
        NAME(split)(own, found), NAME(split)(near, beside);
    } else if (down == 1) {
        found[0] = NAME(mix)(own, own + side), found[1] = NAME(mix)(own + odd, own + other);
    } else {
        found[0] = NAME(mix)(own, near), found[1] = NAME(mix)(own + odd, near + odd);
        beside[0] = NAME(mix)(own + side, near + side), beside[1] = NAME(mix)(own + other, near + other);
    }
    for (int i = 0; i < 2; i++) {
        int bias = shift == 0 ? 0 : across == 1 ? row->upper ? 1 : 2 : down == 1 ? 1 + (odd ^ i) : 8 - (odd ^ i);
        if (down == 2) found[i] = NAME(sum)(NAME(sum)(found[i], NAME(sum)(found[i], found[i])), beside[i]);
        found[i] = OP(srai_epi16)(NAME(sum)(found[i], OP(set1_epi16)((int16_t)(bias - (CENTRE << shift)))), shift);
    }
}

INLINE Vector NAME(green)(Vector pairs) { /* what Cb and Cr, alternating, add */
    const Vector factors = OP(set1_epi32)((int)((uint32_t)(-GREEN_CR / 2) << 16 | (uint16_t)(-GREEN_CB / 2)));
    return OP(srai_epi32)(OP(add_epi32)(OP(madd_epi16)(pairs, factors), OP(set1_epi32)(HALF / 2)), BITS - 1);
}

INLINE void NAME(step)(const PixelRow *row, int at, int across, int down, int odd, uint8_t *rgb) {
    Vector r[2], g[2], b[2], blue[2], red[2];
    NAME(split)(row->luma + at, r), memcpy(g, r, sizeof r), memcpy(b, r, sizeof r);
    if (across) NAME(chroma)(row, 0, row->begin + at, across, down, odd, blue);
    if (across) NAME(chroma)(row, 1, row->begin + at, across, down, odd, red);
    for (int i = 0; i < (across ? 2 : 0); i++) {
        Vector low = NAME(green)(OP(unpacklo_epi16)(blue[i], red[i])), high = NAME(green)(OP(unpackhi_epi16)(blue[i], red[i]));
        r[i] = NAME(sum)(r[i], OP(mulhrs_epi16)(NAME(sum)(red[i], red[i]), OP(set1_epi16)(TWICE_RED)));
        g[i] = NAME(sum)(g[i], OP(packs_epi32)(low, high));
        b[i] = NAME(sum)(b[i], OP(mulhrs_epi16)(NAME(sum)(blue[i], blue[i]), OP(set1_epi16)(TWICE_BLUE)));
    }
    NAME(store)(r, g, b, rgb);
}

/* The last step may overlap the one before. Pixels at the edges of chroma, which have no neighbour, are made once more. */
INLINE void NAME(steps)(const PixelRow *given, int across, int down, uint8_t *rgb) {
    const PixelRow row = *given;
    uint8_t few[3 * STEP], *to = row.count < STEP ? few : rgb;
    for (int next = 0; next < row.count; next += STEP) {
        int at = next + STEP <= row.count ? next : row.count < STEP ? 0 : row.count - STEP;
        int odd = across == 2 && ((row.begin + at) & 1);
        odd ? NAME(step)(&row, at, across, down, 1, to + 3 * at) : NAME(step)(&row, at, across, down, 0, to + 3 * at);
    }
    if (to == few) memcpy(rgb, few, 3 * (size_t)row.count);
    if (across == 2 && row.begin == 0) pixel(given, 0, rgb);
    if (across == 2 && row.begin + row.count == 2 * row.width) pixel(given, row.count - 1, rgb);
}

INLINE void NAME(row)(const PixelRow *row, uint8_t *rgb) {
    if (!row->own[0]) NAME(steps)(row, 0, 1, rgb);
    else if (row->across == 1) row->down == 1 ? NAME(steps)(row, 1, 1, rgb) : NAME(steps)(row, 1, 2, rgb);
    else row->down == 1 ? NAME(steps)(row, 2, 1, rgb) : NAME(steps)(row, 2, 2, rgb);
}

#undef INLINE
#undef NAME
#undef OP
#undef LOAD
#undef STEP
#undef Vector
