/* Walking through a JPEG's entropy-coded data: where blocks begin, and their DC values. */

#ifndef EFFLOOP_JPEG_SCAN_H
#define EFFLOOP_JPEG_SCAN_H

#include "jpeg_coder.h"

/* The states before each MCU, and after the last: columns * rows + 1 of them, row by row, which the caller frees.
 *
 * Returns 1, 0 if not every bit of the scan is as a baseline JPEG's has to be, -1 if there isn't enough memory. */
int scan_states(const uint8_t *data, const Jpeg *jpeg, State **found);

/* A walk through the scan of one image after the other. */
typedef struct Walk Walk;

Walk *walk_make(void); /* NULL: not enough memory */
void walk_free(Walk *);

/* Begins with an image, whose first row is a segment; returns as scan_states. */
int walk_open(Walk *, const uint8_t *data, const Jpeg *, Segment *);

/* Whether a segment is this walk's. */
int walk_has(const Walk *, const Segment *);

/* After a segment: goes on with the next row and returns 1; 0: it was the last one, or damaged. */
int walk_on(Walk *, Segment *);

/* The DC value of each block, in the order of the scan, when it has ended; 0: the scan is damaged, or one is out of its range. */
int walk_values(const Walk *, int16_t *values);

#endif
