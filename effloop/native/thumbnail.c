/* Thumbnails of JPEGs by the DC coefficients alone, which are the means of their blocks of 8x8 pixels. */

#include <math.h>
#include <stdlib.h>

#include "export.h"
#include "jpeg_scan.h"

enum { SIDE = 32, PIXELS = SIDE * SIDE }; /* as in audit/records.py */

/* A component's blocks: how many are beside and above each other in an MCU, and their first's place in it. */
typedef struct {
    int across, down, first;
} Part;

/* Sums of all values above and left of each corner of the blocks: (rows + 2, columns + 2), the last ones only repeat. */
static void sum_up(const Jpeg *jpeg, const Part *part, int blocks, const int16_t *values, int64_t *sums) {
    size_t width = (size_t)(jpeg->columns * part->across) + 2;
    memset(sums, 0, width * sizeof *sums);
    for (int y = 0; y < jpeg->rows; y++, values += jpeg->columns * blocks)
        for (int down = 0; down < part->down; down++) {
            const int16_t *mcu = values + part->first + down * part->across;
            int64_t row = 0, *above = sums;
            *(sums += width) = 0;
            for (int64_t *at = sums + 1, *up = above + 1; at < sums + width - 1; mcu += blocks)
                for (int i = 0; i < part->across; i++) row += mcu[i], *at++ = *up++ + row;
            sums[width - 1] = sums[width - 2];
        }
    memcpy(sums + width, sums, width * sizeof *sums);
}

/* Means of the values in SIDE x SIDE equal areas of an image of height x width blocks. */
static void average(const int64_t *sums, size_t stride, double height, double width, float *out) {
    double above[SIDE + 1], here[SIDE + 1], right[SIDE + 1], scale = PIXELS / (height * width);
    for (int x = 0; x <= SIDE; x++) right[x] = width * x / SIDE;
    for (int y = 0; y <= SIDE; y++) {
        double down = height * y / SIDE, part = down - floor(down);
        for (int x = 0; x <= SIDE; x++) {
            const int64_t *at = sums + (size_t)down * stride + (size_t)right[x], *below = at + stride;
            double rest = right[x] - (double)(size_t)right[x];
            double upper = (double)at[0] + rest * (double)(at[1] - at[0]);
            double lower = (double)below[0] + rest * (double)(below[1] - below[0]);
            here[x] = upper + part * (lower - upper);
        }
        for (int x = 1; x <= SIDE && y; x++)
            *out++ = (float)((here[x] - above[x] - here[x - 1] + above[x - 1]) * scale);
        memcpy(above, here, sizeof above);
    }
}

static uint8_t level(float value) { return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value + 0.5f); }

static void colour(float planes[MAX_COMPONENTS][PIXELS], uint8_t *out) {
    for (int i = 0; i < PIXELS; i++) {
        float y = planes[0][i] + 128, blue = planes[1][i], red = planes[2][i];
        *out++ = level(y + 1.402f * red);
        *out++ = level(y - 0.344136f * blue - 0.714136f * red);
        *out++ = level(y + 1.772f * blue);
    }
}

/* One image after the other. */
typedef struct {
    Walk *walk;
    Jpeg jpeg;
    int64_t image; /* which one; -1: none */
} Place;

static int begin(Place *place, const uint8_t *data, size_t size) {
    Jpeg *jpeg = &place->jpeg;
    if (!jpeg_read(data, size, jpeg) || jpeg->height < 8 * SIDE || jpeg->width < 8 * SIDE) return 0;
    return jpeg_is_plain(jpeg) && walk_open(place->walk, data, jpeg) == 1;
}

static int finish(const Place *place, uint8_t *out) {
    const Jpeg *jpeg = &place->jpeg;
    float planes[MAX_COMPONENTS][PIXELS] = {{0}};
    int blocks = jpeg->blocks[0] + (jpeg->components == 3 ? 2 : 0);
    Part part = {jpeg->mcu_width / 8, jpeg->mcu_height / 8, 0};
    size_t rows = (size_t)(jpeg->rows * part.down) + 2, columns = (size_t)(jpeg->columns * part.across) + 2;
    int64_t *sums = malloc(rows * columns * sizeof *sums);
    int16_t *values = malloc((size_t)jpeg->rows * (size_t)jpeg->columns * (size_t)blocks * sizeof *values);
    int done = sums && values && walk_ended(place->walk) == 1 && walk_values(place->walk, values);
    for (int i = 0; i < jpeg->components && done; part = (Part){1, 1, jpeg->blocks[0] + i++}) {
        double height = (double)jpeg->height * part.down / jpeg->mcu_height;
        double width = (double)jpeg->width * part.across / jpeg->mcu_width;
        sum_up(jpeg, &part, blocks, values, sums);
        average(sums, (size_t)(jpeg->columns * part.across) + 2, height, width, planes[i]);
        for (int j = 0; j < PIXELS; j++) planes[i][j] *= (float)jpeg->quantizers[jpeg->quantizer[i]][0] / 8;
    }
    if (done) colour(planes, out);
    free(sums), free(values);
    return done;
}

/* Thumbnails of several images, (count, SIDE, SIDE, 3): the whole image squashed, as it is stored; and checksums of their
 * bytes. done[i] is 0 where the image is left to others: it is no undamaged baseline JPEG of 8 * SIDE pixels or more. */
EXPORT void effloop_thumbnails(const uint8_t *const *data, const int64_t *sizes, int64_t count, uint8_t *out,
                               uint64_t *checksums, uint8_t *done) {
    Place places[WALKS];
    Walk *walks[WALKS];
    int64_t next = 0, left = 1;
    for (int i = 0; i < WALKS; i++) left = (walks[i] = places[i].walk = walk_make()) ? left : 0, places[i].image = -1;
    for (int64_t i = 0; i < count; i++) checksums[i] = checksum64(data[i], (size_t)sizes[i]), done[i] = 0;
    while (left) {
        left = 0;
        for (int i = 0; i < WALKS; i++) {
            Place *place = &places[i];
            if (place->image >= 0 && walk_ended(place->walk)) {
                done[place->image] = (uint8_t)finish(place, out + place->image * PIXELS * 3);
                place->image = -1;
            }
            for (; place->image < 0 && next < count; next++)
                if (begin(place, data[next], (size_t)sizes[next])) place->image = next;
            if (place->image < 0) walk_nowhere(place->walk);
            left += place->image >= 0;
        }
        if (left) walk_on(walks);
    }
    for (int i = 0; i < WALKS; i++) walk_free(walks[i]);
}
