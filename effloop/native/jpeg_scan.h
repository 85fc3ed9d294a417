/* Walking through a JPEG's entropy-coded data without decoding its coefficients. */

#ifndef EFFLOOP_JPEG_SCAN_H
#define EFFLOOP_JPEG_SCAN_H

#include "jpeg.h"

/* The states before each MCU, and after the last: columns * rows + 1 of them, row by row, which the caller frees.
 *
 * Returns 1, 0 if not every bit of the scan is as a baseline JPEG's has to be, -1 if there isn't enough memory. */
int scan_states(const uint8_t *data, const Jpeg *jpeg, State **found);

#endif
