/* What is known of an image before it is decoded. */

#ifndef EFFLOOP_HEADERS_H
#define EFFLOOP_HEADERS_H

#include <stdint.h>

enum { OTHER, JPEG, PNM };

/* As `ROW` in data/image/encoded.py, field by field. */
typedef struct {
    int64_t at;            /* offset of a JPEG's frame header, or of raw pixels */
    int32_t height, width; /* at least 1 */
    uint8_t kind, channels, plain, complete;
    int32_t unused;
} Row;

#endif
