/* Huffman decoding of several segments of JPEG scans at a time, in one thread. */

#ifndef EFFLOOP_JPEG_CODER_H
#define EFFLOOP_JPEG_CODER_H

#include "jpeg.h"

enum { LANES = 4 /* segments at a time */, BLOCK = 64, PARTS = 2 /* of a block: its DC coefficient, and its AC coefficients */ };
enum { SCAN_SLACK = 64 };  /* zeros after the bytes of a segment, as more is read than needed */
enum { BLOCK_SLACK = 1 };  /* blocks before and after those of a segment, which may be overwritten */
enum { DAMAGED = -1 };

/* The decoding tables of a JPEG. Those that the next JPEG also uses aren't computed again. */
typedef struct Coder Coder;

Coder *coder_make(void); /* NULL: no memory */
void coder_free(Coder *);

/* Prepares a coder for segments of `mcus` MCUs each. Returns 0 if there is no memory. */
int coder_open(Coder *, const Jpeg *jpeg, int mcus);

/* Copies a piece of a scan without its stuffed bytes, and SCAN_SLACK zeros behind it. Returns where these begin, or NULL if there
 * is a marker in the piece. */
uint8_t *unstuff(const uint8_t *from, const uint8_t *end, uint8_t *to);

/* Consecutive MCUs, as many as the coder was prepared for. */
typedef struct {
    const Coder *coder;
    uint8_t *bytes;       /* from `unstuff` */
    int64_t at, end;      /* the bit where it begins, afterwards that where it ended or DAMAGED; no code may begin after `end` */
    int16_t *values;      /* zeros, overwritten by coefficients in natural order; those of DC are still differences */
    uint32_t *ends;       /* or NULL. Gets the bit where each part ends; `values` then gets one value per part, meaningful for DC */
    void *owner;          /* this and the next one are the caller's */
    int number;
} Segment;

/* Replaces a segment that has ended with another. Returns 0 if none is left. */
typedef int Next(void *from, Segment *);

/* Decodes the first `count` segments in turns, until `next` has no more. Either all of them have `ends`, or none has. */
void coder_run(Segment segments[LANES], int count, Next *next, void *from);

#endif
