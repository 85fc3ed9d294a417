/* Decodes a box of a JPEG with libjpeg-turbo. */

#ifndef EFFLOOP_JPEG_DECODE_H
#define EFFLOOP_JPEG_DECODE_H

#include <stddef.h>
#include <stdint.h>

/* What a thread decodes with, this way or as in jpeg_box.h. */
typedef struct Workspace Workspace;
typedef struct BoxDecoder BoxDecoder;

/* A box of an image, in pixels of the image. */
typedef struct {
    int64_t top, left, height, width;
} Box;

/* One JPEG, and what is wanted of it. */
typedef struct {
    const uint8_t *data;
    size_t size;
    int64_t height, width; /* that its header says */
    int channels;          /* 1 or 3 of the result */
    int factor;            /* decode to 1 / factor of its size: 1, 2, 4, 8 */
    Box box;               /* the pixels wanted, of the result */
    int partial;           /* whether it has one baseline scan, of which rows and columns may be left out */
} JpegRequest;

/* Pixels of the box. */
typedef struct {
    const uint8_t *pixels;
    ptrdiff_t stride; /* bytes between rows */
} Region;

Workspace *workspace_take(void); /* NULL: no memory, or no library */
void workspace_give_back(Workspace *);

enum { BOXES = 4 }; /* as LANES */

/* One of BOXES decoders; NULL: no memory. */
BoxDecoder *workspace_boxes(Workspace *, int number);

/* The pixels, which stay until the next call with this workspace; 0: there is an error or as much as a warning, or the
 * JPEG is of a kind that is left to others. */
int jpeg_decode(Workspace *, const JpegRequest *, Region *);

#endif
