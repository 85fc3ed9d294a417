/* From a JPEG's coefficients to pixels, with the very arithmetic of libjpeg-turbo. */

#ifndef EFFLOOP_JPEG_PIXELS_H
#define EFFLOOP_JPEG_PIXELS_H

#include <stddef.h>
#include <stdint.h>

/* 8x8 samples of each of two blocks, in rows that are `stride` bytes apart; `quantizers` as coefficients, in natural order. */
typedef void Inverse(const int16_t *const blocks[2], const uint16_t *quantizers, uint8_t *const to[2], ptrdiff_t stride);

Inverse *inverse_dct(void);

/* The samples of a block with no other coefficient than `dc`. */
void flat_block(int16_t dc, uint16_t quantizer, uint8_t *to, ptrdiff_t stride);

/* A row of pixels. */
typedef struct {
    const uint8_t *luma;    /* from the first pixel on */
    const uint8_t *own[2];  /* chroma's row, from a sample of an even column on */
    const uint8_t *near[2]; /* the row that is the nearer one of those above and below */
    int width;              /* samples of these rows; beside them there is none */
    int across, down;       /* 1 or 2 samples of luma for one of chroma */
    int upper;              /* whether the nearer row is that above */
    int begin, count;       /* the first pixel, by luma's samples from where chroma's begin; how many */
} PixelRow;

typedef void Colour(const PixelRow *, uint8_t *rgb);

Colour *to_rgb(void);

#endif
