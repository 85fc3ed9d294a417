/* Walking through a JPEG's entropy-coded data without decoding its coefficients. */

#ifndef EFFLOOP_JPEG_SCAN_H
#define EFFLOOP_JPEG_SCAN_H

#include "jpeg.h"

/* The states before each MCU, and after the last: columns * rows + 1 of them, row by row, which the caller frees.
 *
 * Returns 1, 0 if not every bit of the scan is as a baseline JPEG's has to be, -1 if there isn't enough memory. */
int scan_states(const uint8_t *data, const Jpeg *jpeg, State **found);

/* A walk through the scan of one image after the other. */
typedef struct Walk Walk;

enum { WALKS = 4 }; /* that go on in turns */

Walk *walk_make(void); /* NULL: not enough memory */
void walk_free(Walk *);

/* Begin with an image; returns as scan_states. */
int walk_open(Walk *, const uint8_t *data, const Jpeg *);
Walk *walk_nowhere(Walk *); /* without one: it doesn't end */

/* Go on until one has ended. */
void walk_on(Walk *const walks[WALKS]);

/* 0: it hasn't ended; 1: at the end of the scan; -1: the scan is damaged. */
int walk_ended(const Walk *);

/* The DC value of each block, in the order of the scan, when it has ended; 0 if one is out of its range. */
int walk_values(const Walk *, int16_t *values);

#endif
