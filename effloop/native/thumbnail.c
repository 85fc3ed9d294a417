/* Thumbnails of JPEGs by the DC coefficients alone, which are the means of their blocks of 8x8 pixels. */

#include <math.h>
#include <stdlib.h>

#include "export.h"
#include "jpeg_scan.h"

enum { DQT = 0xDB, APP14 = 0xEE, MOST_SIDE = 64 };

/* What each component's DC values are multiplied with; 0: it isn't known, or the colours aren't YCbCr. */
static int read_quantizers(const uint8_t *data, const Jpeg *jpeg, int found[MAX_COMPONENTS]) {
    const uint8_t *frame = data + jpeg->sof_at;
    int tables[4] = {0};
    for (size_t at = 2; at < jpeg->sos_at; at += 2 + (size_t)(data[at + 2] << 8 | data[at + 3])) {
        const uint8_t *segment = data + at, *end = segment + 2 + (segment[2] << 8 | segment[3]);
        if (segment[1] == APP14 && end - segment >= 16 && !memcmp(segment + 4, "Adobe", 5) && !segment[15]) return 0;
        if (segment[1] != DQT) continue;
        for (const uint8_t *table = segment + 4; table + 65 <= end; table += table[0] >> 4 ? 129 : 65)
            tables[table[0] & 3] = table[0] >> 4 ? table[1] << 8 | table[2] : table[1];
    }
    for (int i = 0; i < jpeg->components; i++)
        if (frame[10 + 3 * i] == 'R' || !(found[i] = tables[frame[12 + 3 * i] & 3])) return 0;
    return 1;
}

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

/* Means of the values in side x side equal areas of an image of height x width blocks. */
static void average(const int64_t *sums, size_t stride, double height, double width, int side, float *out) {
    double above[MOST_SIDE + 1] = {0}, here[MOST_SIDE + 1], right[MOST_SIDE + 1], scale = side * side / (height * width);
    for (int x = 0; x <= side; x++) right[x] = width * x / side;
    for (int y = 0; y <= side; y++) {
        double down = height * y / side, part = down - floor(down);
        const int64_t *row = sums + (size_t)down * stride;
        for (int x = 0; x <= side; x++) {
            const int64_t *at = row + (size_t)right[x], *below = at + stride;
            double rest = right[x] - (double)(size_t)right[x];
            double upper = (double)at[0] + rest * (double)(at[1] - at[0]);
            double lower = (double)below[0] + rest * (double)(below[1] - below[0]);
            here[x] = upper + part * (lower - upper);
        }
        for (int x = 1; x <= side && y; x++)
            *out++ = (float)((here[x] - above[x] - here[x - 1] + above[x - 1]) * scale);
        memcpy(above, here, sizeof above);
    }
}

static uint8_t level(float value) { return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value + 0.5f); }

static void colour(const float *planes, size_t count, int components, uint8_t *out) {
    for (size_t i = 0; i < count; i++) {
        float y = planes[i], blue = components > 1 ? planes[count + i] : 0, red = components > 1 ? planes[2 * count + i] : 0;
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
    int quantizers[MAX_COMPONENTS];
} Place;

/* What the images are made with. */
typedef struct {
    int64_t *sums;
    int16_t *values;
    float *planes;
    size_t room;
} Memory;

static int finish(const Place *place, Memory *memory, int side, uint8_t *out) {
    const Jpeg *jpeg = &place->jpeg;
    int blocks = 0;
    for (int i = 0; i < jpeg->components; i++) blocks += jpeg->blocks[i];
    size_t rows = (size_t)(jpeg->rows * jpeg->mcu_height / 8) + 2, columns = (size_t)(jpeg->columns * jpeg->mcu_width / 8) + 2;
    if (memory->room < rows * columns) {
        free(memory->sums), free(memory->values);
        memory->room = rows * columns;
        memory->sums = malloc(memory->room * sizeof(int64_t)), memory->values = malloc(3 * memory->room * sizeof(int16_t));
        if (!memory->sums || !memory->values) return memory->room = 0;
    }
    if (!walk_values(place->walk, memory->values)) return 0;
    Part part = {jpeg->mcu_width / 8, jpeg->mcu_height / 8, 0};
    for (int i = 0; i < jpeg->components; part = (Part){1, 1, jpeg->blocks[0] + i++}) {
        float *plane = memory->planes + i * side * side;
        double height = (double)jpeg->height * part.down / jpeg->mcu_height;
        double width = (double)jpeg->width * part.across / jpeg->mcu_width;
        sum_up(jpeg, &part, blocks, memory->values, memory->sums);
        average(memory->sums, (size_t)(jpeg->columns * part.across) + 2, height, width, side, plane);
        for (int j = 0; j < side * side; j++) plane[j] = plane[j] * (float)place->quantizers[i] / 8 + (i ? 0 : 128);
    }
    colour(memory->planes, (size_t)(side * side), jpeg->components, out);
    return 1;
}

static int begin(Place *place, const uint8_t *data, size_t size, int side) {
    Jpeg *jpeg = &place->jpeg;
    if (!jpeg_read(data, size, jpeg) || jpeg->height < 8 * side || jpeg->width < 8 * side) return 0;
    return read_quantizers(data, jpeg, place->quantizers) && walk_open(place->walk, data, jpeg) == 1;
}

/* Thumbnails of several images, (count, side, side, 3): the whole image squashed, as it is stored; and checksums of their
 * bytes. done[i] is 0 where the image is left to others: it is no undamaged baseline JPEG of 8 * side pixels or more. */
EXPORT void effloop_thumbnails(const uint8_t *const *data, const int64_t *sizes, int64_t count, int side, uint8_t *out,
                               uint64_t *checksums, uint8_t *done) {
    Place places[WALKS];
    Walk *walks[WALKS];
    Memory memory = {.planes = malloc((size_t)(side * side) * MAX_COMPONENTS * sizeof(float))};
    int64_t next = 0, left = 0;
    for (int i = 0; i < WALKS; i++) walks[i] = places[i].walk = walk_make(), places[i].image = -1;
    do {
        left = 0;
        for (int i = 0; i < WALKS; i++) {
            Place *place = &places[i];
            if (place->image >= 0 && walk_ended(place->walk)) {
                done[place->image] = walk_ended(place->walk) == 1 && finish(place, &memory, side, out + place->image * side * side * 3);
                place->image = -1;
            }
            while (place->image < 0 && next < count) {
                checksums[next] = checksum64(data[next], (size_t)sizes[next]);
                done[next] = 0;
                if (begin(place, data[next], (size_t)sizes[next], side)) place->image = next;
                next++;
            }
            if (place->image < 0) walk_nowhere(place->walk);
            left += place->image >= 0;
        }
        if (left) walk_on(walks);
    } while (left);
    for (int i = 0; i < WALKS; i++) walk_free(walks[i]);
    free(memory.sums), free(memory.values), free(memory.planes);
}
