/* Huffman decoding of segments of a scan, four at a time in one thread. */

#ifndef EFFLOOP_JPEG_CODER_H
#define EFFLOOP_JPEG_CODER_H

#include "jpeg.h"

enum { LANES = 4, BLOCK = 64 };
enum { SCAN_SLACK = 64 };  /* bytes of zeros after a segment: a lane reads on past its end */
enum { BLOCK_SLACK = 1 };  /* blocks after those of a segment, which may be overwritten */

/* The tables of a JPEG; those that the JPEG before had are kept. */
typedef struct Coder Coder;

Coder *coder_make(void); /* NULL: no memory */
void coder_free(Coder *);

/* Prepares for a JPEG, whose MCUs have so many blocks. 0: no memory for a segment of so many MCUs. */
int coder_open(Coder *, const Jpeg *jpeg, int mcus);

/* A segment: MCUs of a row. */
typedef struct {
    const uint8_t *bytes; /* without stuffed bytes */
    uint32_t at, end;     /* bits: where it begins, and where it has to end */
    int16_t *blocks;      /* zeros; gets the coefficients in natural order, DC values as differences */
    uint8_t *extents;     /* of each block: no coefficient after this one, in zigzag order, isn't 0 */
} Segment;

/* Decodes segments of as many MCUs as were prepared for. 0: one is damaged. */
int coder_run(Coder *, const Segment *segments, int count);

#endif
