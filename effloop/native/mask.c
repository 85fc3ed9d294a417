/* Masks, (rows, columns) of a byte each: a box of one in another size by nearest neighbour, and its classes counted.
 *
 * Row i of `height` rows is the box's row floor((i + 1/2) box_height / height), in whole numbers, columns likewise. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "export.h"

enum { OUTSIDE = 255, CLASSES = 256, TABLES = 4 };

typedef struct {
    const uint8_t *data;
    int64_t stride, rows, columns; /* stride in bytes */
} Mask;

static int64_t nearest(int64_t begin, int64_t length, int64_t size, int64_t i) {
    return begin + (2 * i + 1) * length / (2 * size);
}

/* Columns of the mask that the output's are taken from; those before *first and from *last on are outside. */
static int32_t *columns_of(const Mask *mask, const int64_t box[4], int64_t width, int64_t *first, int64_t *last) {
    int32_t *columns = malloc(sizeof *columns * (size_t)width);
    if (!columns) return NULL;
    *first = width;
    *last = 0;
    for (int64_t i = 0; i < width; i++) {
        int64_t column = nearest(box[1], box[3], width, i);
        columns[i] = (int32_t)column;
        if (column >= 0 && column < mask->columns) {
            if (i < *first) *first = i;
            *last = i + 1;
        }
    }
    return columns;
}

static void take(const uint8_t *row, const int32_t *columns, int64_t first, int64_t last, uint8_t *out) {
    if (last > first && columns[last - 1] - columns[first] == last - 1 - first) {
        memcpy(out + first, row + columns[first], (size_t)(last - first));
        return;
    }
    for (int64_t i = first; i < last; i++) out[i] = row[columns[i]];
}

/* The box (top, left, height, width), which may reach beyond the mask, as height x width bytes, rows of `out_stride`
 * bytes; what lies beyond is 255. Returns -1 where there is no memory. */
EXPORT int effloop_mask_crop(const uint8_t *data, int64_t stride, int64_t rows, int64_t columns, const int64_t *box,
                             uint8_t *out, int64_t out_stride, int64_t height, int64_t width) {
    Mask mask = {data, stride, rows, columns};
    int64_t first, last, before = -1;
    int32_t *from = columns_of(&mask, box, width, &first, &last);
    if (!from) return -1;
    for (int64_t i = 0; i < height; i++) {
        uint8_t *line = out + i * out_stride;
        int64_t row = nearest(box[0], box[2], height, i);
        if (row < 0 || row >= rows || last <= first) {
            memset(line, OUTSIDE, (size_t)width);
            continue;
        }
        if (row == before) {
            memcpy(line, line - out_stride, (size_t)width);
            continue;
        }
        before = row;
        memset(line, OUTSIDE, (size_t)first);
        memset(line + last, OUTSIDE, (size_t)(width - last));
        take(data + row * stride, from, first, last, line);
    }
    free(from);
    return 0;
}

/* How often each of 256 values is in what `effloop_mask_crop` would write, without what lies beyond the mask. Returns
 * -1 where there is no memory. */
EXPORT int effloop_mask_count(const uint8_t *data, int64_t stride, int64_t rows, int64_t columns, const int64_t *box,
                              int64_t height, int64_t width, int64_t *counts) {
    Mask mask = {data, stride, rows, columns};
    int64_t first, last;
    int32_t *from = columns_of(&mask, box, width, &first, &last);
    if (!from) return -1;
    /* Several tables: neighbours are often equal, and an addition would wait for the one before it. */
    uint32_t tables[TABLES][CLASSES] = {{0}};
    for (int64_t i = 0; i < height; i++) {
        int64_t row = nearest(box[0], box[2], height, i);
        if (row < 0 || row >= rows) continue;
        const uint8_t *line = data + row * stride;
        for (int64_t j = first; j < last; j++) tables[j % TABLES][line[from[j]]]++;
    }
    free(from);
    for (int value = 0; value < CLASSES; value++) {
        counts[value] = 0;
        for (int table = 0; table < TABLES; table++) counts[value] += tables[table][value];
    }
    return 0;
}
