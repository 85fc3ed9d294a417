/* Antialiased bilinear resizing of uint8 images: what its files share. */

#ifndef EFFLOOP_RESIZE_H
#define EFFLOOP_RESIZE_H

#include <stddef.h>
#include <stdint.h>

#define MOST_PAIRS 4  /* of taps for an output pixel: 8 taps, for images shrunk to a quarter or more */
#define PADDING 16    /* entries before and after an axis, so that whole vectors can be read; their weights are 0 */
#define MOST_SIDE 65535

/* The fixed-point weights of one side: output i is the sum of taps first[i], first[i] + 1, ... */
typedef struct {
    int in, out;
    int pairs;              /* of taps, for each output; those that it doesn't need have weights of 0 */
    int precision;          /* weights are in 1 / (1 << precision) */
    int bytes, cached;      /* its memory; whether it stays */
    int reach[PADDING];     /* by k: the largest first[i + k] - first[i] */
    const int32_t *first;   /* (out,), with PADDING */
    const uint32_t *weights[MOST_PAIRS]; /* (out,) each, with PADDING: tap 2t in the low half, 2t + 1 in the high */
} Axis;

#define STRIP 4           /* pairs of rows that are resized across together */
#define MOST_DOWN (MOST_PAIRS + 1) /* pairs of rows for an output row: 8 taps may begin with an odd row */

typedef struct Kernel Kernel;

/* One image. Rows are resized in pairs: a word holds a value of an even row and of the odd one below it. */
typedef struct {
    const uint8_t *source;
    ptrdiff_t stride;       /* of source rows, in bytes */
    const uint8_t *(*next)(void *from, int count); /* gives the next rows, or NULL for damage; used instead of `source` */
    void *from;
    uint8_t *target;        /* contiguous */
    int channels, flip;
    const Axis *across, *down;
    const Kernel *kernel;
    int row, lanes;         /* bytes in a row of the source, values in one of the target, rounded up */
    uint32_t *ring;         /* (CAPACITY, lanes) pairs of rows that were resized across */
    void *blocks;           /* what the kernel has prepared */
    uint8_t *end;           /* (2 * STRIP, row): a copy of the last rows, for a strip that begins with them */
} Resize;

struct Kernel {
    /* Writes `blocks`: which taps the values of a row are made of. */
    void (*prepare)(const Resize *);
    /* STRIP pairs of rows of the source -> as many of the ring. */
    void (*across)(const Resize *, const uint8_t *rows, ptrdiff_t stride, uint32_t *restrict pairs);
    /* `count` pairs of the ring -> a row of the target. */
    void (*down)(const Resize *, const uint32_t *const *pairs, const uint32_t *weights, int count, uint8_t *row);
    size_t bytes;           /* of `blocks`, for each value of a row */
    int window;             /* bytes of a row that one instruction can choose from */
    int block;              /* values that it makes of them */
    int least;              /* bytes in a row of the source */
    int finest;             /* precision of the weights across, at most */
};

extern const Kernel resize_avx2, resize_avx512;

/* An axis from the cache, or made; NULL: no memory, or too many taps. Give it back with axis_done. */
const Axis *axis_get(int in, int out);
void axis_done(const Axis *);

/* Prepares resizing (height, width, channels) to (out_height, out_width, channels); 0 where another implementation has
 * to do it. `level` is that of effloop_resize. Then set `source`, or `next` and `from`, and `stride`, `target` and `flip`, and
 * run it; close it in any case. */
int resize_open(Resize *, int64_t height, int64_t width, int channels, int64_t out_height, int64_t out_width, int level);
int resize_run(Resize *); /* 0: no memory, or `next` gave NULL */
void resize_close(Resize *);

#endif
