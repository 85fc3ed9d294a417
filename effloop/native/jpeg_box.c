/* Decoding a box of a JPEG by its entropy index: nothing outside of it is read.
 *
 * The rows of MCUs that the box touches, from column to column of the index's states, are segments of the scan. They are
 * decoded to coefficients, some rows at a time, then to planes of samples, and these to pixels. */

#include "jpeg_box.h"

#include <stdlib.h>

#include "export.h"
#include "jpeg_coder.h"
#include "jpeg_pixels.h"
#include "jpeg_states.h"
#include "scratch.h"

enum { BESIDE = 1 };                        /* samples of chroma on each side of the box that interpolation reads */
enum { AT_ONCE = 1 << 18, MOST_ROWS = 64 }; /* bytes of coefficients, and rows of MCUs, that are decoded at a time */
enum { SPARE = 64 };                        /* bytes after memory, which may be written over */

struct BoxDecoder {
    Coder *coder;
    Memory scan, blocks, planes, pixels;
};

/* Samples of a component: those of the MCUs that are decoded. */
typedef struct {
    uint8_t *samples;
    ptrdiff_t stride;
    int across, down;  /* blocks in an MCU */
    int width, height; /* samples that are of the image */
    const uint16_t *quantizers;
} Plane;

/* One image. */
typedef struct {
    const Jpeg *jpeg;
    const uint8_t *scan;
    const States *states;
    const Box *box;
    int first_row, last_row, first, last; /* rows of MCUs and columns of states; the last ones are excluded */
    int column, mcus, blocks;             /* MCUs left of these, of a row of these, and blocks of an MCU */
    Plane planes[MAX_COMPONENTS];
} Job;

/* Where the reading of the index is: at the start of a row. */
typedef struct {
    Cursor rows, cells;
    State start;
} Reader;

static int units(int64_t pixels, int unit) { return (int)((pixels + unit - 1) / unit); }

static int least(int a, int b) { return a < b ? a : b; }

/* Which MCUs the box needs; 0: it isn't inside of the image, or the image is of a kind that is left to others. */
static int plan(Job *job) {
    const Jpeg *jpeg = job->jpeg;
    const Box *box = job->box;
    int across = jpeg->mcu_width / 8, down = jpeg->mcu_height / 8, wide = jpeg->mcu_width * job->states->grid;
    if (across > 2 || down > 2) return 0;
    if (across == 2 && jpeg->width < 6) return 0; /* libjpeg doesn't interpolate two samples of chroma */
    if (box->top < 0 || box->left < 0 || box->height < 1 || box->width < 1) return 0;
    if (box->height > jpeg->height - box->top || box->width > jpeg->width - box->left) return 0;
    int64_t above = box->top - BESIDE * down * (down > 1), before = box->left - BESIDE * across * (across > 1);
    job->first_row = above > 0 ? (int)(above / jpeg->mcu_height) : 0, job->first = before > 0 ? (int)(before / wide) : 0;
    job->last_row = least(units(2 * box->top + box->height - above, jpeg->mcu_height), jpeg->rows);
    job->last = least(units(2 * box->left + box->width - before, wide), job->states->per_row);
    job->column = job->first * job->states->grid;
    job->mcus = least(job->last * job->states->grid, jpeg->columns) - job->column;
    for (int i = 0; i < jpeg->components; i++) job->blocks += jpeg->blocks[i];
    return 1;
}

static int make_planes(BoxDecoder *decoder, Job *job) {
    const Jpeg *jpeg = job->jpeg;
    int across = jpeg->mcu_width / 8, down = jpeg->mcu_height / 8, rows = job->last_row - job->first_row;
    size_t size = 0, at[MAX_COMPONENTS];
    for (int i = 0; i < jpeg->components; i++) {
        Plane *plane = &job->planes[i];
        plane->across = i ? 1 : across, plane->down = i ? 1 : down;
        plane->stride = 8 * plane->across * job->mcus;
        plane->width = units(jpeg->width, across / plane->across) - 8 * plane->across * job->column;
        plane->height = units(jpeg->height, down / plane->down) - 8 * plane->down * job->first_row;
        plane->width = least(plane->width, (int)plane->stride), plane->height = least(plane->height, 8 * plane->down * rows);
        plane->quantizers = jpeg->quantizers[jpeg->quantizer[i]];
        at[i] = size, size += (size_t)plane->stride * (size_t)(8 * plane->down * rows);
    }
    uint8_t *samples = reserve(&decoder->planes, size + SPARE);
    for (int i = 0; i < jpeg->components; i++) job->planes[i].samples = samples + at[i];
    return samples != NULL;
}

/* Copies what is between two bytes without stuffed ones; returns its end, NULL if there is a marker in it. */
static uint8_t *unstuff(const uint8_t *from, const uint8_t *end, uint8_t *to) {
    while (from < end) {
        const uint8_t *found = memchr(from, 0xFF, (size_t)(end - from));
        size_t part = (size_t)((found ? found + 1 : end) - from);
        memcpy(to, from, part), to += part, from += part;
        if (found && from < end && *from++ != 0) return NULL;
    }
    return to;
}

/* The states at both ends of what is needed of the next row. */
static void read_bounds(Reader *reader, const Job *job, State bounds[2]) {
    const State start = reader->start;
    Cursor cells = reader->cells;
    int per_row = job->states->per_row;
    reader->cells.at += read_row(&reader->rows, &reader->start);
    uint32_t mean = (reader->start.bit - start.bit) / (uint32_t)per_row;
    bounds[0] = start;
    read_cells(&cells, job->first, mean, &bounds[0]);
    bounds[1] = job->last == per_row ? reader->start : bounds[0];
    if (job->last < per_row) read_cells(&cells, job->last - job->first, mean, &bounds[1]);
}

/* The segments between these states, in memory of their own; 0: there is none, or they aren't in order. */
static int make_segments(BoxDecoder *decoder, const Job *job, State (*bounds)[2], Segment *segments, int count) {
    uint32_t scan_bits = (uint32_t)(job->jpeg->scan_end - job->jpeg->scan_at) * 8, last = 0;
    size_t size = 0, blocks = (size_t)(job->mcus * job->blocks) + BLOCK_SLACK;
    for (int i = 0; i < count; i++) {
        if (bounds[i][0].bit < last || bounds[i][0].bit > bounds[i][1].bit || bounds[i][1].bit > scan_bits) return 0;
        last = bounds[i][1].bit;
        size += (bounds[i][1].bit - bounds[i][0].bit) / 8 + 2 + SCAN_SLACK;
    }
    uint8_t *to = reserve(&decoder->scan, size), *memory = reserve(&decoder->blocks, (size_t)count * blocks * (2 * BLOCK + 1));
    if (!to || !memory) return 0;
    memset(memory, 0, (size_t)count * blocks * 2 * BLOCK);
    for (int i = 0; i < count; i++) {
        const uint8_t *from = job->scan + (bounds[i][0].bit >> 3), *end = job->scan + ((bounds[i][1].bit + 7) >> 3);
        uint8_t *next = unstuff(from, end, to);
        if (!next) return 0;
        uint32_t unused = -bounds[i][1].bit & 7;
        segments[i] = (Segment){.bytes = to, .at = bounds[i][0].bit & 7, .end = (uint32_t)(next - to) * 8 - unused};
        segments[i].blocks = (int16_t *)(void *)memory + (size_t)i * blocks * BLOCK;
        segments[i].extents = memory + (size_t)count * blocks * 2 * BLOCK + (size_t)i * blocks;
        memset(next, 0, SCAN_SLACK), to = next + SCAN_SLACK;
    }
    return 1;
}

/* DC values from their differences; 0: they aren't what they should be in the end. */
static int add_up(const Job *job, const Segment *segment, const State bounds[2]) {
    State state = bounds[0];
    int16_t *block = segment->blocks;
    for (int mcu = 0; mcu < job->mcus; mcu++)
        for (int i = 0; i < job->jpeg->components; i++)
            for (int j = 0; j < job->jpeg->blocks[i]; j++, block += BLOCK)
                *block = state.dc[i] = (int16_t)(uint16_t)(state.dc[i] + *block);
    return !memcmp(state.dc, bounds[1].dc, sizeof state.dc);
}

/* The samples of a component in a row of MCUs; `first` is its first block in an MCU. */
static void make_samples(const Job *job, const Segment *segment, const Plane *plane, int first, int row, Inverse *inverse) {
    const int16_t *pair[2];
    uint8_t *to[2];
    int held = 0;
    for (int down = 0; down < plane->down; down++) {
        uint8_t *line = plane->samples + (size_t)(8 * (row * plane->down + down)) * (size_t)plane->stride;
        for (int mcu = 0; mcu < job->mcus; mcu++)
            for (int across = 0; across < plane->across; across++, line += 8) {
                size_t block = (size_t)(mcu * job->blocks + first + down * plane->across + across);
                const int16_t *values = segment->blocks + block * BLOCK;
                if (!segment->extents[block]) {
                    flat_block(*values, *plane->quantizers, line, plane->stride);
                    continue;
                }
                pair[held] = values, to[held] = line, held ^= 1;
                if (!held) inverse(pair, plane->quantizers, to, plane->stride);
            }
    }
    if (held) pair[1] = pair[0], to[1] = to[0], inverse(pair, plane->quantizers, to, plane->stride);
}

/* The planes; 0: there is damage, or no memory. */
static int decode_rows(BoxDecoder *decoder, const Job *job) {
    Inverse *inverse = inverse_dct();
    Reader reader = {{job->states, 0}, {job->states, job->states->cells_at}, {0}};
    State bounds[MOST_ROWS][2];
    Segment segments[MOST_ROWS];
    int most = AT_ONCE / (job->mcus * job->blocks * 2 * BLOCK);
    most = most < LANES ? LANES : least(most, MOST_ROWS);
    for (int row = 0; row < job->first_row; row++) reader.cells.at += read_row(&reader.rows, &reader.start);
    for (int row = job->first_row; row < job->last_row;) {
        int count = least(most, job->last_row - row);
        for (int i = 0; i < count; i++) read_bounds(&reader, job, bounds[i]);
        if (!make_segments(decoder, job, bounds, segments, count) || !coder_run(decoder->coder, segments, count)) return 0;
        for (int i = 0; i < count; i++, row++) {
            if (!add_up(job, &segments[i], bounds[i])) return 0;
            for (int component = 0, first = 0; component < job->jpeg->components; first += job->jpeg->blocks[component++])
                make_samples(job, &segments[i], &job->planes[component], first, row - job->first_row, inverse);
        }
    }
    return 1;
}

/* The samples of a row of the box, and of chroma with one more on each side. */
static PixelRow pixel_row(const Job *job, int row, int left) {
    const Plane *luma = &job->planes[0], *chroma = &job->planes[1];
    PixelRow found = {.across = luma->across, .down = luma->down, .upper = !(row & 1), .count = (int)job->box->width};
    int first = left / found.across, near = row / found.down + (found.upper ? -1 : 1);
    first = first < BESIDE ? 0 : first - BESIDE, near = near < 0 ? 0 : least(near, chroma->height - 1);
    found.luma = luma->samples + row * luma->stride + left;
    found.begin = left - first * found.across, found.width = chroma->width - first;
    for (int i = 0; i < 2; i++) {
        found.own[i] = job->planes[1 + i].samples + row / found.down * chroma->stride + first;
        found.near[i] = job->planes[1 + i].samples + near * chroma->stride + first;
    }
    return found;
}

static int make_pixels(BoxDecoder *decoder, const Job *job, int channels, Region *found) {
    int left = (int)job->box->left - job->column * job->jpeg->mcu_width;
    int top = (int)job->box->top - job->first_row * job->jpeg->mcu_height;
    size_t width = (size_t)job->box->width, stride = width * (size_t)channels;
    uint8_t *pixels = reserve(&decoder->pixels, stride * (size_t)job->box->height + SPARE);
    Colour *colour = to_rgb();
    if (!pixels) return 0;
    for (int row = 0; row < job->box->height; row++) {
        const uint8_t *luma = job->planes[0].samples + (top + row) * job->planes[0].stride + left;
        uint8_t *to = pixels + (size_t)row * stride;
        if (channels == 1) {
            memcpy(to, luma, width);
        } else if (job->jpeg->components == 1) {
            for (size_t i = 0; i < stride; i++) to[i] = luma[i / 3];
        } else {
            const PixelRow pixel = pixel_row(job, top + row, left);
            colour(&pixel, to);
        }
    }
    *found = (Region){pixels, (ptrdiff_t)stride};
    return 1;
}

int box_decode(BoxDecoder *decoder, const uint8_t *data, size_t size, const uint8_t *index, size_t index_size, const Box *box,
               int channels, Region *found) {
    Jpeg jpeg;
    States states;
    Job job = {.jpeg = &jpeg, .states = &states, .box = box};
    if (!jpeg_read(data, size, &jpeg) || !states_open(index, index_size, &jpeg, &states)) return 0;
    if (!jpeg_is_plain(&jpeg) || !plan(&job) || checksum64(data, size) != states.jpeg_checksum) return 0;
    job.scan = data + jpeg.scan_at;
    return coder_open(decoder->coder, &jpeg, job.mcus) && make_planes(decoder, &job) && decode_rows(decoder, &job) &&
           make_pixels(decoder, &job, channels, found);
}

BoxDecoder *box_decoder_make(void) {
    BoxDecoder *decoder = calloc(1, sizeof *decoder);
    if (decoder && (decoder->coder = coder_make())) return decoder;
    free(decoder);
    return NULL;
}

void box_decoder_shrink(BoxDecoder *decoder, size_t most) {
    Memory *all[] = {&decoder->scan, &decoder->blocks, &decoder->planes, &decoder->pixels};
    for (int i = 0; i < 4; i++) shrink(all[i], most);
}

void box_decoder_free(BoxDecoder *decoder) {
    if (!decoder) return;
    box_decoder_shrink(decoder, 0);
    coder_free(decoder->coder);
    free(decoder);
}

/* Writes a box's pixels (height, width, channels); 0 as box_decode. */
EXPORT int effloop_jpeg_box(const uint8_t *data, int64_t size, const uint8_t *index, int64_t index_size, const int64_t box[4],
                            int channels, uint8_t *out) {
    const Box wanted = {box[0], box[1], box[2], box[3]};
    BoxDecoder *decoder = size < 0 || index_size < 0 ? NULL : box_decoder_make();
    Region found;
    int done = decoder && box_decode(decoder, data, (size_t)size, index, (size_t)index_size, &wanted, channels, &found);
    size_t row = done ? (size_t)wanted.width * (size_t)channels : 0;
    for (int64_t i = 0; done && i < wanted.height; i++) memcpy(out + (size_t)i * row, found.pixels + i * found.stride, row);
    box_decoder_free(decoder);
    return done;
}
