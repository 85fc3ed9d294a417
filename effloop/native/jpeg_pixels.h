/* From the coefficients of a JPEG to pixels, the same to the bit as those of libjpeg-turbo. */

#ifndef EFFLOOP_JPEG_PIXELS_H
#define EFFLOOP_JPEG_PIXELS_H

#include <stddef.h>
#include <stdint.h>

enum { BATCH = 4 /* blocks that are transformed together */ };

/* Turns the coefficients of BATCH blocks into samples, in rows that are `stride` bytes apart. Coefficients and quantisation table
 * are in natural order. Several of the blocks may be the same. */
typedef void Inverse(const int16_t *const blocks[BATCH], const uint16_t *quantizers, uint8_t *const to[BATCH], ptrdiff_t stride);

/* The inverse DCT to blocks of 8, 4, 2 or 1 samples a side. */
Inverse *inverse_dct(int size);

/* What a row of pixels is made from. */
typedef struct {
    const uint8_t *luma;    /* that of the first pixel */
    const uint8_t *own[2];  /* the row of Cb and that of Cr, from the first sample needed; NULL for grey */
    const uint8_t *near[2]; /* those above or below, whichever is nearer to the pixels */
    int width;              /* samples in the rows of chroma; there are none beyond them */
    int across, down;       /* luma samples for each chroma sample: 1 or 2 */
    int repeated;           /* whether chroma is repeated instead of interpolated; `down` is 1 then */
    int upper;              /* whether `near` is the row above */
    int begin, count;       /* how many pixels left of the first one chroma begins; number of pixels */
} PixelRow;

/* Writes the pixels. It may read 64 bytes beyond the end of each row, and one before those of chroma. */
typedef void Colour(const PixelRow *, uint8_t *rgb);

Colour *to_rgb(void); /* the fastest on this processor */

#endif
