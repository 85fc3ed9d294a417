/* Huffman decoding of segments of scans, four at a time in one thread. */

#ifndef EFFLOOP_JPEG_CODER_H
#define EFFLOOP_JPEG_CODER_H

#include "jpeg.h"

enum { LANES = 4, BLOCK = 64, PARTS = 2 /* of a block: its DC value, and the rest */ };
enum { SCAN_SLACK = 64 };  /* bytes of zeros after a scan: a lane reads on past its end */
enum { BLOCK_SLACK = 1 };  /* blocks before those of a segment and after them, which may be overwritten */
enum { DAMAGED = -1 };

/* The tables of a JPEG; those that the JPEG before had are kept. */
typedef struct Coder Coder;

Coder *coder_make(void); /* NULL: no memory */
void coder_free(Coder *);

/* Prepares for segments of so many MCUs of a JPEG. 0: no memory. */
int coder_open(Coder *, const Jpeg *jpeg, int mcus);

/* Consecutive MCUs: as many as its coder was prepared for. */
typedef struct {
    const Coder *coder;
    const uint8_t *bytes; /* without stuffed bytes */
    int64_t at, end;      /* bits: where it begins, and then where it has ended, or DAMAGED; no code may begin after `end` */
    int16_t *values;      /* zeros, which become the coefficients in natural order, DC values as differences */
    uint32_t *ends;       /* NULL; or gets the bit where each part ends, and `values` a number for each: its DC value, if it is one */
} Segment;

/* Decodes segments in turns. Where one has ended, `next` puts another one in its place, or returns 0: there is none. */
void coder_run(Segment segments[LANES], int count, int (*next)(void *from, Segment *), void *from);

#endif
