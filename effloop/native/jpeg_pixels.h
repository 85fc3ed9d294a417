/* From a JPEG's coefficients to pixels, with the very arithmetic of libjpeg-turbo. */

#ifndef EFFLOOP_JPEG_PIXELS_H
#define EFFLOOP_JPEG_PIXELS_H

#include <stddef.h>
#include <stdint.h>

enum { BATCH = 4 }; /* blocks */

/* The samples of so many blocks, in rows that are `stride` bytes apart; `quantizers` as coefficients, in natural order.
 * Two blocks may have the same place. */
typedef void Inverse(const int16_t *const blocks[BATCH], const uint16_t *quantizers, uint8_t *const to[BATCH],
                     ptrdiff_t stride);

/* To 8, 4, 2 or 1 samples a side: the smaller ones are means of the larger ones, about. */
Inverse *inverse_dct(int size);

/* A row of pixels. */
typedef struct {
    const uint8_t *luma;    /* from the first pixel on */
    const uint8_t *own[2];  /* chroma's row, from a sample of an even column on; NULL for grey */
    const uint8_t *near[2]; /* the row that is the nearer one of those above and below */
    int width;              /* samples of these rows; beside them there is none */
    int across, down;       /* 1 or 2 samples of luma for one of chroma */
    int repeated;           /* whether samples are repeated across instead of interpolated, and `down` is 1 then */
    int upper;              /* whether the nearer row is that above */
    int begin, count;       /* the first pixel, by luma's samples from where chroma's begin; how many */
} PixelRow;

/* Up to 64 bytes after a row's samples are read, and one before chroma's; only the row's own pixels are written. */
typedef void Colour(const PixelRow *, uint8_t *rgb);

Colour *to_rgb(void);

#endif
