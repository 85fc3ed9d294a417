/* Decodes a box (a crop) of a JPEG, and as little as possible of what is around it.
 *
 * Decoding can start at a state of the entropy index, after a restart marker, or at the beginning of the scan. Each row of MCUs
 * that the box touches is decoded as one or more segments of the scan: with an index, a single one, from the last state before
 * the box to the first state after it; with restart markers, the intervals that overlap the box. Without either, whole rows are
 * decoded one after the other, from the top of the image to the lower edge of the box ("serial").
 *
 * The coefficients of a segment become samples at once, and rows of pixels are made of these when the caller asks for them, some
 * rows of MCUs at a time, so the data stays in the processor's cache. Positions and sizes are those of the scaled image. */

#include "jpeg_box.h"

#include <limits.h>
#include <stdlib.h>

#include "export.h"
#include "jpeg_coder.h"
#include "jpeg_pixels.h"
#include "jpeg_states.h"
#include "scratch.h"

_Static_assert((int)BOXES == (int)LANES, "serial boxes that are decoded together have a lane each");

enum { BESIDE = 1 };        /* chroma samples on each side of the box that are needed for interpolation */
enum { AT_ONCE = 1 << 18 }; /* samples that are made at a time */
enum { SPARE = 64 };        /* bytes past the end of samples and pixels that may be read and written */
enum { PADDING = 7 };       /* most bits that fill up the last byte before a restart marker or EOI */

/* Samples of a component: a row left from the MCUs above, for interpolation, and then those of the MCUs decoded last. */
typedef struct {
    uint8_t *samples;
    ptrdiff_t stride;
    int across, down;  /* blocks in an MCU */
    int side;          /* samples along a side of a block */
    int width, height; /* columns of `samples` that are in the image; rows of the whole image */
    int top;           /* row of the image that `samples` begins with */
    const uint16_t *quantizers;
} Plane;

/* States at both ends of a segment. */
typedef struct {
    State first, last;
} Bounds;

struct BoxDecoder {
    Coder *coder;
    Memory ends, unstuffed, coefficients, samples, pixels;
    Jpeg jpeg;
    Bounds *bounds; /* of each segment; if decoding is serial, where the next row begins, and the scan ends */
    const uint8_t *scan;
    Box box;
    int channels;
    int mcu_width, mcu_height;         /* pixels */
    int across, down, repeated;        /* luma samples for each chroma sample; whether chroma is repeated, not interpolated */
    int serial;                        /* whether there are neither restart markers nor a valid index */
    int unit, per_row;                 /* MCUs between two states or markers (1 if serial); how many such units a row has */
    int first, last;                   /* units that the box needs; `last` is excluded */
    int first_row, last_row, next_row; /* rows of MCUs that the box needs; `last_row` is excluded; the next to be decoded */
    int columns, pieces, blocks;       /* MCUs in a row that the box needs; segments in a row; blocks in an MCU */
    int mcus, skipped;                 /* MCUs in a segment; how many of them are left of the box */
    int at_once;                       /* rows of MCUs that are decoded together */
    int taken, end, damaged;           /* segments begun so far; those of the rows being decoded; whether one is damaged */
    size_t size, longest;              /* coefficients of a segment; bytes of the longest one, with slack */
    int row, until;                    /* the next row of pixels; the first row for which there are no samples yet */
    Plane planes[MAX_COMPONENTS];
};

static int divided_up(int64_t value, int by) { return (int)((value + by - 1) / by); }

static int least(int a, int b) { return a < b ? a : b; }

/* Sizes at 1 / factor, as libjpeg chooses them. Returns 0 for sampling factors that are left to libjpeg-turbo. */
static int plan_planes(BoxDecoder *decoder, int factor) {
    const Jpeg *jpeg = &decoder->jpeg;
    int across = jpeg->mcu_width / 8, down = jpeg->mcu_height / 8, side = 8 / factor;
    int doubled = across == 2 && down == 2 && side < 8; /* chroma has the size of luma: its blocks are scaled less */
    decoder->across = doubled ? 1 : across, decoder->down = doubled ? 1 : down;
    decoder->mcu_width = jpeg->mcu_width / factor, decoder->mcu_height = jpeg->mcu_height / factor;
    for (int i = 0; i < jpeg->components; i++) {
        Plane *plane = &decoder->planes[i];
        plane->across = i ? 1 : across, plane->down = i ? 1 : down, plane->side = i && doubled ? 2 * side : side;
        plane->width = divided_up((int64_t)jpeg->width * plane->across * plane->side, across * 8);
        plane->height = divided_up((int64_t)jpeg->height * plane->down * plane->side, down * 8);
        plane->quantizers = jpeg->quantizers[jpeg->quantizer[i]];
    }
    decoder->repeated = side == 1 || (decoder->across == 2 && decoder->planes[1].width < 3);
    return across <= 2 && down <= 2;
}

/* Finds the MCUs that the box needs. Returns 0 if it isn't inside the image. */
static int plan(BoxDecoder *decoder) {
    const Jpeg *jpeg = &decoder->jpeg;
    const Box *box = &decoder->box;
    int wide = decoder->mcu_width * decoder->unit, most;
    if (box->top < 0 || box->left < 0 || box->height < 1 || box->width < 1) return 0;
    if (box->height > decoder->planes->height - box->top || box->width > decoder->planes->width - box->left) return 0;
    int64_t above = box->top - BESIDE * decoder->down * (decoder->down > 1);
    int64_t before = box->left - BESIDE * decoder->across * (decoder->across > 1);
    decoder->first_row = above > 0 ? (int)(above / decoder->mcu_height) : 0;
    decoder->first = before > 0 ? (int)(before / wide) : 0;
    decoder->last_row = least(divided_up(2 * box->top + box->height - above, decoder->mcu_height), jpeg->rows);
    decoder->last = least(divided_up(2 * box->left + box->width - before, wide), decoder->per_row);
    decoder->columns = least(decoder->last * decoder->unit, jpeg->columns) - decoder->first * decoder->unit;
    decoder->pieces = jpeg->interval ? decoder->last - decoder->first : 1;
    decoder->mcus = decoder->serial ? jpeg->columns : decoder->columns / decoder->pieces;
    decoder->skipped = decoder->serial ? decoder->first * decoder->unit : 0;
    decoder->blocks = 0;
    for (int i = 0; i < jpeg->components; i++) decoder->blocks += jpeg->blocks[i];
    most = decoder->serial ? jpeg->rows : AT_ONCE / (decoder->columns * decoder->blocks * BLOCK) / LANES * LANES;
    decoder->at_once = least(most < LANES ? LANES : most, decoder->last_row - decoder->first_row);
    decoder->next_row = decoder->first_row, decoder->row = (int)box->top;
    decoder->until = decoder->taken = decoder->damaged = 0;
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

/* Reads the states at both ends of the box in each row. Returns 0 if they aren't in order. */
static int read_index(const BoxDecoder *decoder, const States *states) {
    Bounds *bounds = decoder->bounds;
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

/* Where the restart interval that begins at `at` ends, with its marker; 0 if there are no more markers. */
static size_t find_marker(const uint8_t *data, size_t size, size_t at) {
    while (at < size - 1) {
        const uint8_t *found = memchr(data + at, 0xFF, size - 1 - at);
        if (!found) return 0;
        at = (size_t)(found - data) + 1;
        if (data[at]) return at + 1; /* FF 00 stands for a byte FF of data */
    }
    return 0;
}

/* Finds the box's restart intervals. Returns 0 if any marker of the image isn't where it belongs. As no marker can occur in
 * entropy-coded data, stored lengths that pass this are right, unless the image is damaged. */
static int find_intervals(const BoxDecoder *decoder, const uint8_t *data, size_t size) {
    Bounds *bounds = decoder->bounds;
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

/* Makes room for a segment in each lane, or for the scan if decoding is serial. Returns 0 if that has a marker, or no memory. */
static int make_room(BoxDecoder *decoder) {
    const size_t size = decoder->jpeg.scan_end - decoder->jpeg.scan_at, lanes = decoder->serial ? 1 : LANES;
    const int count = decoder->serial ? 0 : (decoder->last_row - decoder->first_row) * decoder->pieces;
    decoder->size = (size_t)(decoder->mcus * decoder->blocks * BLOCK), decoder->longest = decoder->serial ? size : 0;
    for (int i = 0; i < count; i++) {
        size_t bytes = (decoder->bounds[i].last.bit - decoder->bounds[i].first.bit) / 8 + 2;
        decoder->longest = bytes > decoder->longest ? bytes : decoder->longest;
    }
    decoder->longest += SCAN_SLACK;
    uint8_t *scan = reserve(&decoder->unstuffed, lanes * decoder->longest), *end = scan;
    size_t coefficients = lanes * (decoder->size + BLOCK_SLACK * BLOCK) + BLOCK_SLACK * BLOCK;
    if (!scan || !reserve(&decoder->coefficients, coefficients * sizeof(int16_t))) return 0;
    if (!decoder->serial) return 1;
    if (!(end = unstuff(decoder->scan, decoder->scan + size, scan))) return 0;
    *decoder->bounds = (Bounds){{0}, {.bit = (uint32_t)(end - scan) * 8}};
    return 1;
}

/* Goes on with the next segment, in the memory of one that has ended. Returns 0 if there is none, or damage. */
static int go_on(BoxDecoder *decoder, Segment *segment) {
    if (decoder->damaged || decoder->taken == decoder->end) return 0;
    segment->number = decoder->taken++;
    memset(segment->values, 0, decoder->size * sizeof *segment->values);
    if (decoder->serial) return 1; /* it begins where the one before has ended */
    const uint32_t first = decoder->bounds[segment->number].first.bit, last = decoder->bounds[segment->number].last.bit;
    uint8_t *end = unstuff(decoder->scan + (first >> 3), decoder->scan + ((last + 7) >> 3), segment->bytes);
    if (!end) return decoder->damaged = 1, 0;
    segment->at = first & 7, segment->end = (end - segment->bytes) * 8 - (-last & 7);
    return 1;
}

/* Begins a lane with a segment in memory of its own. */
static int begin(BoxDecoder *decoder, Segment *segment, size_t lane) {
    int16_t *values = (int16_t *)(void *)decoder->coefficients.bytes + lane * (decoder->size + BLOCK_SLACK * BLOCK);
    uint8_t *bytes = decoder->unstuffed.bytes + lane * decoder->longest;
    *segment = (Segment){decoder->coder, bytes, 0, decoder->bounds->last.bit, values + BLOCK_SLACK * BLOCK, NULL, decoder, 0};
    return go_on(decoder, segment);
}

/* Adds up the differences of DC coefficients. Returns 0 if the result isn't what the index says. */
static int add_up(const BoxDecoder *decoder, const Segment *segment, Bounds *bounds) {
    int16_t *block = segment->values, *dc = bounds->first.dc;
    for (int mcu = 0; mcu < decoder->mcus; mcu++)
        for (int i = 0; i < decoder->jpeg.components; i++)
            for (int j = 0; j < decoder->jpeg.blocks[i]; j++, block += BLOCK)
                *block = dc[i] = (int16_t)(uint16_t)(dc[i] + *block);
    return decoder->serial || decoder->jpeg.interval || !memcmp(dc, bounds->last.dc, sizeof bounds->last.dc);
}

/* Makes a component's samples from a segment. `first` is the component's first block in an MCU. */
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

/* Makes the samples of a segment whose coefficients have been decoded, and goes on. */
static int next_segment(void *from, Segment *segment) {
    BoxDecoder *decoder = segment->owner;
    const Jpeg *jpeg = &decoder->jpeg;
    const int pieces = decoder->pieces, row = segment->number / pieces + (decoder->serial ? 0 : decoder->first_row);
    const int64_t left = segment->end - segment->at; /* bits */
    const int64_t most = decoder->serial && row + 1 < jpeg->rows ? left : decoder->serial || jpeg->interval ? PADDING : 0;
    Bounds *bounds = decoder->bounds + (decoder->serial ? 0 : segment->number);
    (void)from;
    decoder->damaged |= segment->at == DAMAGED || left > most || !add_up(decoder, segment, bounds);
    for (int i = 0, first = 0; i < jpeg->components && row >= decoder->first_row && !decoder->damaged; first += jpeg->blocks[i++]) {
        const Plane *plane = &decoder->planes[i];
        const int high = plane->down * plane->side, wide = plane->across * plane->side * decoder->columns / pieces;
        uint8_t *to = plane->samples + (row * high - plane->top) * plane->stride + segment->number % pieces * wide;
        make_samples(decoder, segment, plane, first, to);
    }
    return go_on(decoder, segment);
}

void box_decode(BoxDecoder *const *decoders, int count) {
    Segment lanes[LANES];
    int open = 0;
    for (int i = 0; i < count; i++) {
        BoxDecoder *decoder = decoders[i];
        const int rows = least(decoder->at_once, decoder->last_row - decoder->next_row);
        for (int j = 0; j < decoder->jpeg.components; j++) {
            Plane *plane = &decoder->planes[j];
            const int high = plane->down * plane->side;
            memcpy(plane->samples, plane->samples + decoder->at_once * high * plane->stride, (size_t)plane->stride);
            plane->top = decoder->next_row * high - 1;
        }
        decoder->next_row += rows;
        decoder->end = decoder->serial ? decoder->last_row : (decoder->next_row - decoder->first_row) * decoder->pieces;
        decoder->until = decoder->next_row * decoder->mcu_height - (decoder->down > 1);
        if (decoder->next_row == decoder->last_row) decoder->until = INT_MAX;
        for (size_t lane = 0; lane < (decoder->serial ? 1 : LANES) && open < LANES; lane++)
            open += begin(decoder, &lanes[open], lane);
    }
    if (open) coder_run(lanes, open, next_segment, NULL);
}

int box_waits(const BoxDecoder *decoder) { return decoder->serial && !decoder->until; }

static const uint8_t *row_of(const Plane *plane, int row) { return plane->samples + (row - plane->top) * plane->stride; }

/* Where the samples are from which a row of the box is made. */
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
        while (decoder->row >= decoder->until && !decoder->damaged) box_decode(&decoder, 1);
        if (decoder->damaged) return NULL;
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
    decoder->per_row = divided_up(jpeg->columns, decoder->unit);
    decoder->scan = data + jpeg->scan_at, decoder->box = *box, decoder->channels = channels;
    if (!plan_planes(decoder, factor) || !plan(decoder) || !make_planes(decoder)) return 0;
    size_t segments = (size_t)(decoder->last_row - decoder->first_row) * (size_t)decoder->pieces;
    decoder->bounds = (Bounds *)(void *)reserve(&decoder->ends, segments * sizeof(Bounds));
    if (!decoder->bounds || !coder_open(decoder->coder, jpeg, decoder->mcus)) return 0;
    if (indexed && !read_index(decoder, &states)) return 0;
    if (jpeg->interval && !find_intervals(decoder, data, size)) return 0;
    return make_room(decoder);
}

BoxDecoder *box_decoder_make(void) {
    BoxDecoder *decoder = calloc(1, sizeof *decoder);
    if (decoder && (decoder->coder = coder_make())) return decoder;
    free(decoder);
    return NULL;
}

void box_decoder_shrink(BoxDecoder *decoder, size_t most) {
    Memory *all[] = {&decoder->ends, &decoder->unstuffed, &decoder->coefficients, &decoder->samples, &decoder->pixels};
    for (int i = 0; i < 5; i++) shrink(all[i], most);
}

void box_decoder_free(BoxDecoder *decoder) {
    if (!decoder) return;
    box_decoder_shrink(decoder, 0);
    coder_free(decoder->coder);
    free(decoder);
}

/* Writes the pixels (height, width, channels) of a box of the image at 1 / factor of its size. Returns 0 as box_open. */
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
