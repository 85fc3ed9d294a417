/* Thumbnails of JPEGs, made from DC coefficients alone: each is the mean of a block of 8x8 pixels. */

#include <math.h>
#include <stdlib.h>

#include "export.h"
#include "jpeg_scan.h"

enum { SIDE = 32, PIXELS = SIDE * SIDE }; /* as in audit/records.py */

/* The blocks of a component in an MCU: how many there are across and down, and the number of the first. */
typedef struct {
    int across, down, first;
} Grid;

/* Sums of all values above and left of each corner of a block: (rows + 2, columns + 2), where the last row and column repeat. */
static void sum_up(const Jpeg *jpeg, const Grid *grid, int blocks, const int16_t *values, int64_t *sums) {
    size_t width = (size_t)(jpeg->columns * grid->across) + 2;
    memset(sums, 0, width * sizeof *sums);
    for (int y = 0; y < jpeg->rows; y++, values += jpeg->columns * blocks)
        for (int down = 0; down < grid->down; down++) {
            const int16_t *mcu = values + grid->first + down * grid->across;
            int64_t row = 0, *above = sums;
            *(sums += width) = 0;
            for (int64_t *at = sums + 1, *up = above + 1; at < sums + width - 1; mcu += blocks)
                for (int i = 0; i < grid->across; i++) row += mcu[i], *at++ = *up++ + row;
            sums[width - 1] = sums[width - 2];
        }
    memcpy(sums + width, sums, width * sizeof *sums);
}

/* Means of the values in SIDE x SIDE areas of equal size, of an image of height x width blocks. */
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

/* Works on one image at a time. */
typedef struct {
    Walk *walk;
    Jpeg jpeg;
    int64_t image;
} Place;

static int begin(Place *place, const uint8_t *data, size_t size, Segment *segment) {
    Jpeg *jpeg = &place->jpeg;
    if (!jpeg_read(data, size, jpeg) || jpeg->height < 8 * SIDE || jpeg->width < 8 * SIDE) return 0;
    return jpeg_is_plain(jpeg) && walk_open(place->walk, data, jpeg, segment) == 1;
}

static int finish(const Place *place, uint8_t *out) {
    const Jpeg *jpeg = &place->jpeg;
    float planes[MAX_COMPONENTS][PIXELS] = {{0}};
    int blocks = jpeg->blocks[0] + (jpeg->components == 3 ? 2 : 0);
    Grid grid = {jpeg->mcu_width / 8, jpeg->mcu_height / 8, 0};
    size_t rows = (size_t)(jpeg->rows * grid.down) + 2, columns = (size_t)(jpeg->columns * grid.across) + 2;
    int64_t *sums = malloc(rows * columns * sizeof *sums);
    int16_t *values = malloc((size_t)jpeg->rows * (size_t)jpeg->columns * (size_t)blocks * sizeof *values);
    int done = sums && values && walk_values(place->walk, values);
    for (int i = 0; i < jpeg->components && done; grid = (Grid){1, 1, jpeg->blocks[0] + i++}) {
        double height = (double)jpeg->height * grid.down / jpeg->mcu_height;
        double width = (double)jpeg->width * grid.across / jpeg->mcu_width;
        sum_up(jpeg, &grid, blocks, values, sums);
        average(sums, (size_t)(jpeg->columns * grid.across) + 2, height, width, planes[i]);
        for (int j = 0; j < PIXELS; j++) planes[i][j] *= (float)jpeg->quantizers[jpeg->quantizer[i]][0] / 8;
    }
    if (done) colour(planes, out);
    free(sums), free(values);
    return done;
}

/* All images: up to LANES of them are decoded at a time. */
typedef struct {
    const uint8_t *const *data;
    const int64_t *sizes;
    int64_t count, next;
    uint8_t *out, *done;
    Place places[LANES];
} Images;

/* Starts the next image that is suitable. Returns 0 if there is none. */
static int take(Images *images, Place *place, Segment *segment) {
    while (images->next < images->count) {
        place->image = images->next++;
        int begun = begin(place, images->data[place->image], (size_t)images->sizes[place->image], segment);
        segment->owner = place;
        if (begun) return 1;
    }
    return 0;
}

static int go_on(void *from, Segment *segment) {
    Images *images = from;
    Place *place = segment->owner;
    if (walk_on(place->walk, segment)) return 1;
    images->done[place->image] = (uint8_t)finish(place, images->out + place->image * PIXELS * 3);
    return take(images, place, segment);
}

/* Writes thumbnails, (count, SIDE, SIDE, 3), and checksums of the files. A thumbnail is the whole image as it is stored, whatever
 * its aspect ratio and orientation. done[i] is 0 if there is none, as image i isn't a baseline JPEG, has restart markers,
 * is damaged, or has a side of less than 8 * SIDE pixels. */
EXPORT void effloop_thumbnails(const uint8_t *const *data, const int64_t *sizes, int64_t count, uint8_t *out,
                               uint64_t *checksums, uint8_t *done) {
    Images images = {data, sizes, count, 0, out, done, {{0}}};
    Segment lanes[LANES];
    int open = 0;
    for (int64_t i = 0; i < count; i++) checksums[i] = checksum64(data[i], (size_t)sizes[i]), done[i] = 0;
    for (int i = 0; i < LANES; i++) {
        Place *place = &images.places[i];
        if ((place->walk = walk_make())) open += take(&images, place, &lanes[open]);
    }
    if (open) coder_run(lanes, open, go_on, &images);
    for (int i = 0; i < LANES; i++) walk_free(images.places[i].walk);
}
