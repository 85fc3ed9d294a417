/* Decoding a box of a JPEG: by its entropy index or its restart markers nothing outside of it is decoded, else no row below.
 *
 * Each row of MCUs that the box touches has one segment of the scan, between two of the index's states, or several, between
 * restart markers; where there is neither, a row's segment is all of it, and begins where the one above has ended. Some rows
 * at a time are decoded to coefficients, and these to planes of samples, which rows of pixels are made of when they are asked
 * for: all that stays in the cache. */

#include "jpeg_box.h"

#include <limits.h>
#include <stdlib.h>

#include "export.h"
#include "jpeg_coder.h"
#include "jpeg_pixels.h"
#include "jpeg_states.h"
#include "scratch.h"

enum { BESIDE = 1 };          /* samples of chroma on each side of the box that interpolation reads */
enum { AT_ONCE = 1 << 17 };   /* bytes of coefficients that are decoded at a time */
enum { SPARE = 64 };          /* bytes after memory, which may be written over */
enum { PADDING = 7 };         /* bits before a restart marker, at most */

/* Samples of a component: a row that is kept, and those of the MCUs that were decoded last. */
typedef struct {
    uint8_t *samples;
    ptrdiff_t stride;
    int across, down;  /* blocks in an MCU */
    int side;          /* samples of a block in each direction */
    int width, height; /* of the image: columns from the box's first MCU on, and all rows */
    int top;           /* which row of the image is the first of these */
    const uint16_t *quantizers;
} Plane;

/* Both ends of a segment. */
typedef struct {
    State first, last;
} Bounds;

struct BoxDecoder {
    Coder *coder;
    Memory bounds, unstuffed, segments, coefficients, samples, pixels;
    Jpeg jpeg;
    const uint8_t *scan;
    Box box; /* of the image at the size that is decoded, as all pixels and samples here */
    int channels;
    int mcu_width, mcu_height;         /* pixels */
    int across, down, repeated;        /* samples of luma for one of chroma; whether that isn't interpolated */
    int unit, per_row;                 /* MCUs between two states or markers, and how many of these a row has */
    int first, last;                   /* of these, those of the box; the last is excluded */
    int first_row, last_row, next_row; /* of MCUs: the box's, and the first one that isn't decoded */
    int columns, pieces, blocks;       /* the box's MCUs of a row, segments of a row, blocks of an MCU */
    int mcus, skipped;                 /* MCUs of a segment, and how many of them are left of the box */
    int serial;                        /* whether a row begins where the one above has ended */
    int at_once;                       /* rows of MCUs that are decoded together */
    int row, until;                    /* the next row of pixels, and the first that has to wait for samples */
    Plane planes[MAX_COMPONENTS];
};

static int units(int64_t pixels, int unit) { return (int)((pixels + unit - 1) / unit); }

static int least(int a, int b) { return a < b ? a : b; }

/* Sizes at 1 / factor, as libjpeg chooses them; 0: it makes pixels of them in a way that isn't known here. */
static int plan_planes(BoxDecoder *decoder, int factor) {
    const Jpeg *jpeg = &decoder->jpeg;
    int across = jpeg->mcu_width / 8, down = jpeg->mcu_height / 8, side = 8 / factor;
    int doubled = across == 2 && down == 2 && side < 8; /* chroma is decoded to luma's size */
    decoder->across = doubled ? 1 : across, decoder->down = doubled ? 1 : down;
    decoder->mcu_width = jpeg->mcu_width / factor, decoder->mcu_height = jpeg->mcu_height / factor;
    for (int i = 0; i < jpeg->components; i++) {
        Plane *plane = &decoder->planes[i];
        plane->across = i ? 1 : across, plane->down = i ? 1 : down, plane->side = i && doubled ? 2 * side : side;
        plane->width = units((int64_t)jpeg->width * plane->across * plane->side, across * 8);
        plane->height = units((int64_t)jpeg->height * plane->down * plane->side, down * 8);
        plane->quantizers = jpeg->quantizers[jpeg->quantizer[i]];
    }
    decoder->repeated = side == 1 || (decoder->across == 2 && decoder->planes[1].width < 3);
    return across <= 2 && down <= 2;
}

/* Which MCUs the box needs; 0: it isn't inside of the image. */
static int plan(BoxDecoder *decoder) {
    const Jpeg *jpeg = &decoder->jpeg;
    const Box *box = &decoder->box;
    int wide = decoder->mcu_width * decoder->unit, most;
    int64_t above = box->top - BESIDE * decoder->down * (decoder->down > 1);
    int64_t before = box->left - BESIDE * decoder->across * (decoder->across > 1);
    if (box->top < 0 || box->left < 0 || box->height < 1 || box->width < 1) return 0;
    if (box->height > decoder->planes->height - box->top || box->width > decoder->planes->width - box->left) return 0;
    decoder->first_row = above > 0 ? (int)(above / decoder->mcu_height) : 0;
    decoder->first = before > 0 ? (int)(before / wide) : 0;
    decoder->last_row = least(units(2 * box->top + box->height - above, decoder->mcu_height), jpeg->rows);
    decoder->last = least(units(2 * box->left + box->width - before, wide), decoder->per_row);
    decoder->columns = least(decoder->last * decoder->unit, jpeg->columns) - decoder->first * decoder->unit;
    decoder->pieces = jpeg->interval ? decoder->last - decoder->first : 1;
    decoder->mcus = decoder->serial ? jpeg->columns : decoder->columns / decoder->pieces;
    decoder->skipped = decoder->serial ? decoder->first * decoder->unit : 0;
    decoder->blocks = 0;
    for (int i = 0; i < jpeg->components; i++) decoder->blocks += jpeg->blocks[i];
    most = AT_ONCE / (decoder->columns * decoder->blocks * 2 * BLOCK) / LANES * LANES;
    decoder->at_once = decoder->serial ? 1 : least(most < LANES ? LANES : most, decoder->last_row - decoder->first_row);
    decoder->next_row = decoder->serial ? 0 : decoder->first_row, decoder->row = (int)box->top, decoder->until = 0;
    return 1;
}

static int make_planes(BoxDecoder *decoder) {
    size_t size = 0, at[MAX_COMPONENTS];
    for (int i = 0; i < decoder->jpeg.components; i++) {
        Plane *plane = &decoder->planes[i];
        int wide = plane->across * plane->side, skipped = decoder->first * decoder->unit * wide;
        plane->stride = decoder->columns * wide;
        plane->width = least(plane->width - skipped, (int)plane->stride);
        at[i] = size, size += (size_t)plane->stride * (size_t)(1 + decoder->at_once * plane->down * plane->side);
    }
    uint8_t *samples = reserve(&decoder->samples, size + SPARE);
    for (int i = 0; i < decoder->jpeg.components; i++) decoder->planes[i].samples = samples + at[i];
    return samples != NULL;
}

/* The states at both ends of the box in each row; 0: they aren't in order. */
static int read_index(const BoxDecoder *decoder, const States *states, Bounds *bounds) {
    Cursor rows = {states, 0}, cells = {states, states->cells_at};
    State start = {0}, next = {0};
    uint32_t end = (uint32_t)(decoder->jpeg.scan_end - decoder->jpeg.scan_at) * 8, last = 0;
    for (int row = 0; row < decoder->last_row; row++, start = next) {
        uint32_t length = read_row(&rows, &next), mean = (next.bit - start.bit) / (uint32_t)decoder->per_row;
        if (row >= decoder->first_row) {
            Cursor cell = cells;
            bounds->first = start;
            read_cells(&cell, decoder->first, mean, &bounds->first);
            bounds->last = decoder->last == decoder->per_row ? next : bounds->first;
            if (decoder->last < decoder->per_row) read_cells(&cell, decoder->last - decoder->first, mean, &bounds->last);
            if (bounds->first.bit < last || bounds->first.bit > bounds->last.bit || bounds->last.bit > end) return 0;
            last = bounds++->last.bit;
        }
        cells.at += length;
    }
    return 1;
}

/* Where the interval that begins at a byte ends, after its marker; 0 if no marker is left. */
static size_t find_marker(const uint8_t *data, size_t size, size_t at) {
    while (at < size - 1) {
        const uint8_t *found = memchr(data + at, 0xFF, size - 1 - at);
        if (!found) return 0;
        at = (size_t)(found - data) + 1;
        if (data[at]) return at + 1; /* FF 00 is a byte FF of the entropy-coded data */
    }
    return 0;
}

/* The restart intervals of the box; 0: a marker isn't where it belongs. All of them are checked: entropy-coded data has none
 * of these bytes, so of an image that decodes without a warning all intervals then are where they should be. */
static int find_intervals(const BoxDecoder *decoder, const uint8_t *data, size_t size, Bounds *bounds) {
    const Jpeg *jpeg = &decoder->jpeg;
    const int count = jpeg->rows * decoder->per_row;
    const uint8_t *lengths = jpeg->lengths == count ? data + jpeg->lengths_at : NULL;
    size_t start = jpeg->scan_at, end;
    for (int i = 0; i < count; i++, start = end) {
        int row = i / decoder->per_row, column = i % decoder->per_row, marker = i + 1 == count ? EOI : RST0 + (i & 7);
        end = lengths ? start + (lengths[2 * i] | (size_t)lengths[2 * i + 1] << 8) : find_marker(data, size, start);
        if (end < start + 2 || end > size || data[end - 2] != 0xFF || data[end - 1] != marker) return 0;
        if (row < decoder->first_row || row >= decoder->last_row || column < decoder->first || column >= decoder->last) continue;
        *bounds++ = (Bounds){{.bit = (uint32_t)(start - jpeg->scan_at) * 8}, {.bit = (uint32_t)(end - 2 - jpeg->scan_at) * 8}};
    }
    return start == size;
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

/* Where a serial decoding begins; 0: there is a marker in the scan, or no memory. */
static int begin(BoxDecoder *decoder, Bounds *bounds) {
    const size_t size = decoder->jpeg.scan_end - decoder->jpeg.scan_at;
    uint8_t *bytes = reserve(&decoder->unstuffed, size + SCAN_SLACK);
    uint8_t *end = bytes ? unstuff(decoder->scan, decoder->scan + size, bytes) : NULL;
    if (!end) return 0;
    memset(end, 0, SCAN_SLACK);
    *bounds = (Bounds){{0}, {.bit = (uint32_t)(end - bytes) * 8}};
    return 1;
}

/* Some segments that are being decoded. */
typedef struct {
    Segment *segments;
    Bounds *bounds;
    int count, taken;
    int padding, damaged; /* bits that may be left at the end of a segment; whether there are more */
} Run;

/* Memory for `count` segments, and their parts of the scan; 0: there isn't enough, or there is a marker in one. */
static int prepare(BoxDecoder *decoder, Run *run) {
    size_t size = 0, blocks = (size_t)(decoder->mcus * decoder->blocks) + BLOCK_SLACK;
    size_t bytes = ((size_t)run->count * blocks + BLOCK_SLACK) * sizeof(int16_t[BLOCK]);
    for (int i = 0; i < run->count; i++) size += (run->bounds[i].last.bit - run->bounds[i].first.bit) / 8 + 2 + SCAN_SLACK;
    uint8_t *memory = reserve(&decoder->coefficients, bytes), *to = decoder->unstuffed.bytes;
    run->segments = (Segment *)(void *)reserve(&decoder->segments, (size_t)run->count * sizeof *run->segments);
    if (!decoder->serial) to = reserve(&decoder->unstuffed, size);
    if (!to || !memory || !run->segments) return 0;
    memset(memory, 0, bytes);
    for (int i = 0; i < run->count; i++) {
        const uint32_t first = run->bounds[i].first.bit, last = run->bounds[i].last.bit;
        Segment *segment = &run->segments[i];
        int16_t *values = (int16_t *)(void *)memory + ((size_t)i * blocks + BLOCK_SLACK) * BLOCK;
        *segment = (Segment){decoder->coder, to, first, last, values, NULL};
        if (decoder->serial) continue;
        uint8_t *end = unstuff(decoder->scan + (first >> 3), decoder->scan + ((last + 7) >> 3), to);
        if (!end) return 0;
        segment->at = first & 7, segment->end = (end - to) * 8 - (-last & 7);
        memset(end, 0, SCAN_SLACK), to = end + SCAN_SLACK;
    }
    return 1;
}

/* Goes on with another segment, and none after damage. */
static int next_segment(void *from, Segment *segment) {
    Run *run = from;
    run->damaged |= segment->at < 0 || segment->end - segment->at > run->padding;
    if (run->damaged || run->taken == run->count) return 0;
    *segment = run->segments[run->taken++];
    return 1;
}

/* Decodes the segments' coefficients; 0: one is damaged. */
static int decode_segments(const BoxDecoder *decoder, Run *run) {
    Segment lanes[LANES];
    const int open = least(run->count, LANES), ends = decoder->next_row + 1 == decoder->jpeg.rows;
    memcpy(lanes, run->segments, (size_t)open * sizeof *lanes);
    run->taken = open, run->padding = decoder->serial && !ends ? INT_MAX : decoder->serial || decoder->jpeg.interval ? PADDING : 0;
    coder_run(lanes, open, next_segment, run);
    if (decoder->serial) run->bounds->first.bit = (uint32_t)lanes[0].at;
    return !run->damaged;
}

/* DC values from their differences; 0: they aren't what they should be in the end. */
static int add_up(const BoxDecoder *decoder, const Segment *segment, Bounds *bounds) {
    int16_t *block = segment->values, *dc = bounds->first.dc;
    for (int mcu = 0; mcu < decoder->mcus; mcu++)
        for (int i = 0; i < decoder->jpeg.components; i++)
            for (int j = 0; j < decoder->jpeg.blocks[i]; j++, block += BLOCK)
                *block = dc[i] = (int16_t)(uint16_t)(dc[i] + *block);
    return decoder->serial || decoder->jpeg.interval || !memcmp(dc, bounds->last.dc, sizeof bounds->last.dc);
}

/* The samples of a component in a segment; `first` is its first block in an MCU, `to` where its samples begin. */
static void make_samples(const BoxDecoder *decoder, const Segment *segment, const Plane *plane, int first, uint8_t *to) {
    Inverse *inverse = inverse_dct(plane->side);
    const int16_t *blocks[BATCH];
    uint8_t *places[BATCH];
    int held = 0;
    for (int down = 0; down < plane->down; down++, to += plane->side * plane->stride) {
        const int16_t *block = segment->values + (decoder->skipped * decoder->blocks + first + down * plane->across) * BLOCK;
        for (int i = 0; i < decoder->columns / decoder->pieces * plane->across; i++) {
            blocks[held] = block, places[held++] = to + i * plane->side;
            block += BLOCK * (plane->across == 1 || i % 2 ? decoder->blocks - plane->across + 1 : 1);
            if (held == BATCH) inverse(blocks, plane->quantizers, places, plane->stride), held = 0;
        }
    }
    if (!held) return;
    for (; held < BATCH; held++) blocks[held] = blocks[held - 1], places[held] = places[held - 1];
    inverse(blocks, plane->quantizers, places, plane->stride);
}

/* The samples of the next rows of MCUs; 0: there is damage, or no memory. */
static int decode_rows(BoxDecoder *decoder) {
    const Jpeg *jpeg = &decoder->jpeg;
    const int rows = least(decoder->at_once, decoder->last_row - decoder->next_row), pieces = decoder->pieces;
    Run run = {.bounds = (Bounds *)(void *)decoder->bounds.bytes, .count = rows * pieces};
    if (!decoder->serial) run.bounds += (decoder->next_row - decoder->first_row) * pieces;
    if (!prepare(decoder, &run) || !decode_segments(decoder, &run)) return 0;
    for (int i = 0; i < run.count; i++)
        if (!add_up(decoder, &run.segments[i], &run.bounds[i])) return 0;
    for (int component = 0, first = 0; component < jpeg->components; first += jpeg->blocks[component++]) {
        Plane *plane = &decoder->planes[component];
        const int high = plane->down * plane->side, wide = plane->across * plane->side * decoder->columns / pieces;
        if (decoder->next_row < decoder->first_row) continue;
        memcpy(plane->samples, plane->samples + decoder->at_once * high * plane->stride, (size_t)plane->stride);
        plane->top = decoder->next_row * high - 1;
        for (int i = 0; i < run.count; i++) {
            uint8_t *to = plane->samples + (1 + i / pieces * high) * plane->stride + i % pieces * wide;
            make_samples(decoder, &run.segments[i], plane, first, to);
        }
    }
    decoder->next_row += rows;
    if (decoder->next_row > decoder->first_row) decoder->until = decoder->next_row * decoder->mcu_height - (decoder->down > 1);
    if (decoder->next_row == decoder->last_row) decoder->until = INT_MAX;
    return 1;
}

static const uint8_t *row_of(const Plane *plane, int row) { return plane->samples + (row - plane->top) * plane->stride; }

/* The samples of a row of the box, and of chroma with one more on each side. */
static PixelRow pixel_row(const BoxDecoder *decoder, int row) {
    const Plane *chroma = &decoder->planes[1];
    PixelRow found = {.across = decoder->across, .upper = !(row & 1), .count = (int)decoder->box.width};
    int left = (int)decoder->box.left - decoder->first * decoder->unit * decoder->mcu_width;
    int first = left / found.across, near = row / decoder->down + (found.upper ? -1 : 1);
    found.repeated = decoder->repeated, found.down = found.repeated ? 1 : decoder->down;
    first = first < BESIDE ? 0 : first - BESIDE, near = near < 0 ? 0 : least(near, chroma->height - 1);
    found.luma = row_of(&decoder->planes[0], row) + left;
    found.begin = left - first * found.across, found.width = chroma->width - first;
    for (int i = 0; i < 2 && decoder->jpeg.components == 3; i++) {
        found.own[i] = row_of(&chroma[i], row / decoder->down) + first;
        found.near[i] = found.down > 1 ? row_of(&chroma[i], near) + first : found.own[i];
    }
    return found;
}

const uint8_t *box_rows(BoxDecoder *decoder, int count) {
    const size_t stride = (size_t)(decoder->box.width * decoder->channels);
    uint8_t *to = reserve(&decoder->pixels, stride * (size_t)count + SPARE);
    Colour *colour = to_rgb();
    for (int i = 0; i < count && to; i++, to += stride) {
        while (decoder->row >= decoder->until)
            if (!decode_rows(decoder)) return NULL;
        const PixelRow row = pixel_row(decoder, decoder->row++);
        if (decoder->channels == 1)
            memcpy(to, row.luma, stride);
        else
            colour(&row, to);
    }
    return to ? decoder->pixels.bytes : NULL;
}

int box_open(BoxDecoder *decoder, const uint8_t *data, size_t size, const uint8_t *index, size_t index_size, const Box *box,
             int factor, int channels) {
    Jpeg *jpeg = &decoder->jpeg;
    States states;
    if (!jpeg_read(data, size, jpeg) || !jpeg_is_plain(jpeg) || (jpeg->interval && jpeg->columns % jpeg->interval)) return 0;
    int indexed = !jpeg->interval && states_open(index, index_size, jpeg, &states);
    if (indexed) indexed = checksum64(data, size) == states.jpeg_checksum;
    decoder->serial = !jpeg->interval && !indexed;
    decoder->unit = indexed ? states.grid : jpeg->interval ? jpeg->interval : 1;
    decoder->per_row = units(jpeg->columns, decoder->unit);
    decoder->scan = data + jpeg->scan_at, decoder->box = *box, decoder->channels = channels;
    if (!plan_planes(decoder, factor) || !plan(decoder) || !make_planes(decoder)) return 0;
    size_t segments = (size_t)(decoder->last_row - decoder->first_row) * (size_t)decoder->pieces;
    Bounds *bounds = (Bounds *)(void *)reserve(&decoder->bounds, segments * sizeof *bounds);
    if (!bounds || !coder_open(decoder->coder, jpeg, decoder->mcus)) return 0;
    if (indexed) return read_index(decoder, &states, bounds);
    return decoder->serial ? begin(decoder, bounds) : find_intervals(decoder, data, size, bounds);
}

BoxDecoder *box_decoder_make(void) {
    BoxDecoder *decoder = calloc(1, sizeof *decoder);
    if (decoder && (decoder->coder = coder_make())) return decoder;
    free(decoder);
    return NULL;
}

void box_decoder_shrink(BoxDecoder *decoder, size_t most) {
    Memory *all[] = {&decoder->bounds,       &decoder->unstuffed, &decoder->segments,
                     &decoder->coefficients, &decoder->samples,   &decoder->pixels};
    for (int i = 0; i < 6; i++) shrink(all[i], most);
}

void box_decoder_free(BoxDecoder *decoder) {
    if (!decoder) return;
    box_decoder_shrink(decoder, 0);
    coder_free(decoder->coder);
    free(decoder);
}

/* Writes the pixels (height, width, channels) of a box of the image at 1 / factor of its size; 0 as box_open. */
EXPORT int effloop_jpeg_box(const uint8_t *data, int64_t size, const uint8_t *index, int64_t index_size, const int64_t box[4],
                            int factor, int channels, uint8_t *out) {
    const Box wanted = {box[0], box[1], box[2], box[3]};
    BoxDecoder *decoder = size < 0 || index_size < 0 ? NULL : box_decoder_make();
    int done = decoder && box_open(decoder, data, (size_t)size, index, (size_t)index_size, &wanted, factor, channels);
    for (int64_t row = 0; done && row < wanted.height; row++, out += wanted.width * channels) {
        const uint8_t *pixels = box_rows(decoder, 1);
        done = pixels != NULL;
        if (done) memcpy(out, pixels, (size_t)(wanted.width * channels));
    }
    box_decoder_free(decoder);
    return done;
}
