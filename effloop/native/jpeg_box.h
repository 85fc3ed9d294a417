/* Decodes a box (a crop) of a JPEG, and as little as possible of what is around it. */

#ifndef EFFLOOP_JPEG_BOX_H
#define EFFLOOP_JPEG_BOX_H

#include "jpeg_decode.h"

/* A decoder for one image at a time, which keeps its memory and its tables. */
BoxDecoder *box_decoder_make(void); /* NULL: no memory */
void box_decoder_free(BoxDecoder *);
void box_decoder_shrink(BoxDecoder *, size_t most); /* free what is larger than this, in bytes */

/* Prepares to decode a box of the image at 1 / factor (1, 2, 4, 8) of its size to 1 or 3 channels, with the pixels of
 * libjpeg-turbo. `index_size` is 0 if there is no entropy index; one that is damaged or belongs to another JPEG is ignored.
 * Returns 0 if the JPEG is damaged or of a kind that is left to libjpeg-turbo, or there is no memory. */
int box_open(BoxDecoder *, const uint8_t *data, size_t size, const uint8_t *index, size_t index_size, const Box *box, int factor,
             int channels);

/* Whether nothing has been decoded yet, and only serially can be; and decodes up to LANES of such images in turns, which is faster
 * than one by one. */
int box_waits(const BoxDecoder *);
void box_decode(BoxDecoder *const *, int count);

/* The next `count` rows of the box, contiguous and valid until the next call; NULL: damage, or no memory. */
const uint8_t *box_rows(BoxDecoder *, int count);

#endif
