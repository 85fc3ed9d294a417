/* Decoding a box of a JPEG by its entropy index: nothing outside of it is read. */

#ifndef EFFLOOP_JPEG_BOX_H
#define EFFLOOP_JPEG_BOX_H

#include "jpeg_decode.h"

/* Memory and tables, which are used again. */
BoxDecoder *box_decoder_make(void); /* NULL: no memory */
void box_decoder_free(BoxDecoder *);
void box_decoder_shrink(BoxDecoder *, size_t most); /* free what is larger than this, in bytes */

/* The pixels, of 1 or 3 channels, which stay until the next call: those that libjpeg-turbo decodes. 0: the index doesn't
 * belong to the JPEG, or is damaged, or the JPEG is of a kind that is left to libjpeg-turbo, or there is no memory. */
int box_decode(BoxDecoder *, const uint8_t *data, size_t size, const uint8_t *index, size_t index_size, const Box *box,
               int channels, Region *found);

#endif
