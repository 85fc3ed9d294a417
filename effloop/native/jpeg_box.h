/* Decoding a box of a JPEG: by its entropy index or its restart markers nothing outside of it is decoded, else no row below. */

#ifndef EFFLOOP_JPEG_BOX_H
#define EFFLOOP_JPEG_BOX_H

#include "jpeg_decode.h"

/* Memory and tables, which are used again. */
BoxDecoder *box_decoder_make(void); /* NULL: no memory */
void box_decoder_free(BoxDecoder *);
void box_decoder_shrink(BoxDecoder *, size_t most); /* free what is larger than this, in bytes */

/* Prepares for the pixels, of 1 or 3 channels, of a box of the image at 1 / factor (1, 2, 4, 8) of its size: those that
 * libjpeg-turbo decodes. An index that is damaged, or of another JPEG, is as good as none, which has a size of 0. 0: the JPEG is
 * of a kind that is left to libjpeg-turbo, or damaged, or there is no memory. */
int box_open(BoxDecoder *, const uint8_t *data, size_t size, const uint8_t *index, size_t index_size, const Box *box, int factor,
             int channels);

/* The next `count` rows of the box, without gaps, which stay until the next call; NULL: there is damage, or no memory. */
const uint8_t *box_rows(BoxDecoder *, int count);

#endif
