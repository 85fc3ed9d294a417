/* Cutting a crop out of a JPEG: its own bits, spliced into a smaller JPEG. */

#include "export.h"
#include "jpeg_dummy.h"
#include "jpeg_states.h"

/* A crop in MCUs, and what is copied. */
typedef struct {
    int first_row, last_row, first, last; /* rows of MCUs and columns of states; the last ones are excluded */
    int top, left, right;                 /* whether there is a dummy row above, or a column of dummies */
    int columns;                          /* of MCUs that are copied of each row */
} Cut;

typedef struct {
    const uint8_t *scan;
    uint32_t scan_bits;
    const States *states;
    const Dummies *dummies;
    Writer writer;
    uint8_t *end; /* of the room */
    int16_t dc[MAX_COMPONENTS + 1]; /* the decoder's predictors after what is written so far */
} Splice;

static uint8_t *put_bytes(uint8_t *to, const uint8_t *from, size_t size) {
    memcpy(to, from, size);
    return to + size;
}

static uint8_t *put_table(uint8_t *to, int kind, int number, const Huffman *table) {
    int length = 19 + table->total;
    *to++ = 0xFF, *to++ = DHT, *to++ = (uint8_t)(length >> 8), *to++ = (uint8_t)length;
    *to++ = (uint8_t)(kind << 4 | number);
    to = put_bytes(to, table->counts, 16);
    return put_bytes(to, table->symbols, (size_t)table->total);
}

/* Whether a decoder needs a segment: not the tables, which are replaced, nor EXIF and the like. */
static int is_kept(int marker) {
    return marker != DHT && marker != DRI && marker != 0xFE && (marker <= 0xE0 || marker >= 0xEE);
}

/* All before the entropy-coded data, with the crop's size; at most the original header and 8 tables. */
static uint8_t *put_header(uint8_t *to, const uint8_t *data, const Jpeg *jpeg, int height, int width) {
    uint8_t used[2][4] = {{0}};
    to = put_bytes(to, data, 2);
    for (size_t at = 2, next; at < jpeg->sos_at; at = next) {
        next = at + 2 + ((size_t)data[at + 2] << 8 | data[at + 3]);
        if (!is_kept(data[at + 1])) continue;
        uint8_t *segment = to;
        to = put_bytes(to, data + at, next - at);
        if (at != jpeg->sof_at) continue;
        segment[5] = (uint8_t)(height >> 8), segment[6] = (uint8_t)height;
        segment[7] = (uint8_t)(width >> 8), segment[8] = (uint8_t)width;
    }
    for (int i = 0; i < jpeg->components; i++)
        for (int kind = DC; kind <= AC; kind++) {
            int number = jpeg->table[kind][i];
            if (!used[kind][number]) to = put_table(to, kind, number, &jpeg->huffman[kind][number]);
            used[kind][number] = 1;
        }
    return put_bytes(to, data + jpeg->sos_at, jpeg->scan_at - jpeg->sos_at);
}

static int dummy_to(Splice *splice, const State *state) {
    if (splice->end - splice->writer.at < DUMMY_BYTES) return 0;
    if (!put_dummy(&splice->writer, splice->dummies, splice->dc, state->dc, (int)(state->bit & 7))) return 0;
    memcpy(splice->dc, state->dc, sizeof splice->dc);
    return 1;
}

/* MCUs after which nothing has changed, ending anywhere. */
static int dummies_ahead(Splice *splice, int count) {
    for (; count > 0; count--) {
        if (splice->end - splice->writer.at < DUMMY_BYTES) return 0;
        if (!put_dummy(&splice->writer, splice->dummies, splice->dc, splice->dc, -1)) return 0;
    }
    return 1;
}

/* Copy the bits between two states; the writer has to be at the first one's bit of a byte. */
static int copy_bits(Splice *splice, const State *from, const State *to) {
    Writer *writer = &splice->writer;
    uint32_t at = from->bit >> 3, end = to->bit >> 3;
    int skipped = from->bit & 7, rest = to->bit & 7;
    if (from->bit > to->bit || to->bit > splice->scan_bits || writer->bits != skipped) return 0;
    if (splice->end - writer->at < (ptrdiff_t)(end - at) + 8) return 0;
    if (at == end) {
        if (rest > skipped) put_bits(writer, splice->scan[at] >> (8 - rest) & ((1u << (rest - skipped)) - 1), rest - skipped);
    } else {
        put_bits(writer, splice->scan[at] & (0xFFu >> skipped), 8 - skipped);
        at += splice->scan[at] == 0xFF ? 2 : 1;
        if (at > end) return 0;
        writer->at = put_bytes(writer->at, splice->scan + at, end - at);
        if (rest) put_bits(writer, splice->scan[end] >> (8 - rest), rest);
    }
    memcpy(splice->dc, to->dc, sizeof splice->dc);
    return 1;
}

/* Read the states at the columns `first` and `last` of a row that begins at `start` and ends at `next`. */
static void read_bounds(Cursor cells, const Cut *cut, const State *start, const State *next, State bounds[2]) {
    int per_row = cells.states->per_row;
    uint32_t mean = (next->bit - start->bit) / (uint32_t)per_row;
    bounds[0] = *start;
    read_cells(&cells, cut->first, mean, &bounds[0]);
    bounds[1] = cut->last == per_row ? *next : bounds[0];
    if (cut->last < per_row) read_cells(&cells, cut->last - cut->first, mean, &bounds[1]);
}

static int splice_row(Splice *splice, const Cut *cut, int row, const State bounds[2]) {
    if (row == cut->first_row ? cut->left || cut->top : cut->left || cut->right) {
        if (row == cut->first_row && cut->top && !dummies_ahead(splice, cut->columns + cut->right - 1)) return 0;
        if (!dummy_to(splice, &bounds[0])) return 0;
    }
    return copy_bits(splice, &bounds[0], &bounds[1]);
}

static int splice_rows(Splice *splice, const Cut *cut) {
    const States *states = splice->states;
    Cursor rows = {states, 0}, cells = {states, states->cells_at};
    State start = {0}, next = {0}, bounds[2];
    for (int row = 0; row < cut->last_row; row++, start = next) {
        uint32_t length = read_row(&rows, &next);
        if (row >= cut->first_row) {
            read_bounds(cells, cut, &start, &next, bounds);
            if (!splice_row(splice, cut, row, bounds)) return 0;
        }
        cells.at += length;
    }
    return !cut->right || dummies_ahead(splice, 1);
}

static int units(int pixels, int unit) { return (pixels + unit - 1) / unit; }

/* What of the image a box (top, left, height, width) needs, with `margin` pixels on each side that interpolation
 * of chroma of half the resolution reads; 0 if that is all of it. */
static int plan_cut(const Jpeg *jpeg, const States *states, const int32_t *box, int margin, Cut *cut) {
    int across = margin * (jpeg->mcu_width / 16), down = margin * (jpeg->mcu_height / 16);
    int wide = jpeg->mcu_width * states->grid, per_row = states->per_row;
    if (box[0] < 0 || box[1] < 0 || box[2] < 1 || box[3] < 1) return 0;
    if (box[2] > jpeg->height - box[0] || box[3] > jpeg->width - box[1]) return 0;
    cut->first_row = box[0] > down ? (box[0] - down) / jpeg->mcu_height : 0;
    cut->first = box[1] > across ? (box[1] - across) / wide : 0;
    cut->last_row = units(box[0] + box[2] + down, jpeg->mcu_height), cut->last = units(box[1] + box[3] + across, wide);
    if (cut->last_row > jpeg->rows) cut->last_row = jpeg->rows;
    if (cut->last > per_row) cut->last = per_row;
    cut->left = cut->first > 0, cut->right = !cut->left && cut->last < per_row;
    cut->top = !cut->left && cut->first_row > 0;
    int end = cut->last * states->grid;
    cut->columns = (end < jpeg->columns ? end : jpeg->columns) - cut->first * states->grid;
    return cut->last_row - cut->first_row < jpeg->rows || cut->last - cut->first < per_row;
}

/* Where the crop's pixels are in the image: (top, left, height, width), of which top and left count dummies, too. */
static int plan_size(const Jpeg *jpeg, const States *states, const Cut *cut, int32_t *shown) {
    int top = cut->first_row * jpeg->mcu_height, left = cut->first * states->grid * jpeg->mcu_width;
    int height = (cut->last_row - cut->first_row) * jpeg->mcu_height, width = cut->columns * jpeg->mcu_width;
    if (height > jpeg->height - top) height = jpeg->height - top;
    if (width > jpeg->width - left) width = jpeg->width - left;
    shown[0] = top - cut->top * jpeg->mcu_height, shown[1] = left - cut->left * jpeg->mcu_width;
    shown[2] = height + cut->top * jpeg->mcu_height, shown[3] = width + (cut->left + cut->right) * jpeg->mcu_width;
    return shown[2] <= 65535 && shown[3] <= 65535;
}

/* Cut a crop out of a JPEG.
 *
 * data, index: the JPEG and its index.
 * box: top, left, height and width in pixels.
 * margin: pixels beside the box that interpolation of chroma of half the resolution reads, if there is any.
 * out: room for the smaller JPEG.
 * shown: top, left, height and width of its pixels in the image; its left and upper edge may be dummies.
 *
 * Returns its bytes; 0 if the index doesn't belong to the JPEG, or is damaged, or the box needs all of the image, or
 * there isn't enough room.
 */
EXPORT int64_t effloop_jpeg_crop(const uint8_t *data, int64_t size, const uint8_t *index, int64_t index_size,
                                 const int32_t *box, int32_t margin, uint8_t *out, int64_t room, int32_t *shown) {
    enum { TABLES = 4 * 280, PADDING = 512 }; /* libjpeg-turbo leaves its fast path before the last 512 bytes a block */
    Jpeg jpeg;
    States states;
    Dummies dummies;
    Cut cut;
    if (size < 0 || index_size < 0 || !jpeg_read(data, (size_t)size, &jpeg)) return 0;
    if (!states_open(index, (size_t)index_size, &jpeg, &states)) return 0;
    if (!plan_cut(&jpeg, &states, box, margin, &cut) || !plan_size(&jpeg, &states, &cut, shown)) return 0;
    if (!dummies_prepare(&jpeg, &dummies) || checksum64(data, (size_t)size) != states.jpeg_checksum) return 0;
    int padding = PADDING * (jpeg.blocks[0] + jpeg.components - 1);
    if (room < (int64_t)jpeg.scan_at + 2 * TABLES + padding) return 0;
    uint8_t *end = out + room - padding - 4;
    uint8_t *scan = put_header(out, data, &jpeg, shown[2], shown[3]);
    Splice splice = {data + jpeg.scan_at, (uint32_t)(jpeg.scan_end - jpeg.scan_at) * 8, &states, &dummies, {scan, 0, 0}, end, {0}};
    if (!splice_rows(&splice, &cut)) return 0;
    Writer *writer = &splice.writer;
    if (writer->bits) put_bits(writer, 0xFFu >> writer->bits, 8 - writer->bits);
    *writer->at++ = 0xFF, *writer->at++ = EOI;
    memset(writer->at, 0, (size_t)padding);
    return writer->at + padding - out;
}
