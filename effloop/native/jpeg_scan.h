/* Walks through the entropy-coded data of a JPEG, for where blocks begin and for their DC coefficients. */

#ifndef EFFLOOP_JPEG_SCAN_H
#define EFFLOOP_JPEG_SCAN_H

#include "jpeg_coder.h"

/* Finds the states before each MCU, row by row, and that after the last: columns * rows + 1 of them, to be freed by the caller.
 *
 * Returns 1; 0 if there are restart markers or damage; -1 if there isn't enough memory. */
int scan_states(const uint8_t *data, const Jpeg *jpeg, State **found);

/* Walks through the scan of one image at a time, and is used again for others. */
typedef struct Walk Walk;

Walk *walk_make(void); /* NULL: no memory */
void walk_free(Walk *);

/* Starts an image: makes a segment of its first row of MCUs, for coder_run. Returns as scan_states. */
int walk_open(Walk *, const uint8_t *data, const Jpeg *, Segment *);

/* To be called when a segment has ended: makes the next row of it. Returns 0 if it was the last row, or is damaged. */
int walk_on(Walk *, Segment *);

/* Writes the DC coefficients of all blocks, in the order of the scan. Returns 0 if it is damaged, or one is out of range. */
int walk_values(const Walk *, int16_t *values);

#endif
