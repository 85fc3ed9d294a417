/* Cuts a crop out of a baseline JPEG's bytes without decoding it: effloop/data/image/jpeg.py says how. */

#include <stdint.h>
#include <string.h>

#include "export.h"
#include "jpeg_markers.h"

enum { SOF0 = 0xC0, DHT = 0xC4, RST0 = 0xD0, EOI = 0xD9, SOS = 0xDA, DRI = 0xDD, APP9 = 0xE9 };
enum { TOO_NARROW = 4 }; /* pixels: libjpeg doesn't interpolate chroma of one or two samples */

typedef struct {
    const uint8_t *bytes;
    int64_t size;
} Data;

typedef struct {
    int64_t first, last; /* of the units that are needed, the last exclusive */
} Span;

static int two(const uint8_t *at) { return at[0] << 8 | at[1]; }

static void put_two(uint8_t *at, int64_t value) {
    at[0] = (uint8_t)(value >> 8);
    at[1] = (uint8_t)value;
}

static int64_t units(int64_t length, int64_t unit) { return (length + unit - 1) / unit; }

/* Pixels of a minimum coded unit; 0 if it has several chroma samples. */
static int read_mcu(Data data, int64_t sof_at, int components, Layout *found) {
    found->mcu_height = found->mcu_width = 8;
    if (components == 1) return 1; /* coded block by block, whatever its factors say */
    if (components != 3 || sof_at + 18 > data.size) return 0;
    const uint8_t *sof = data.bytes + sof_at;
    if (sof[14] != 0x11 || sof[17] != 0x11) return 0;
    found->mcu_height = 8 * (sof[11] & 15);
    found->mcu_width = 8 * (sof[11] >> 4);
    return found->mcu_height && found->mcu_width;
}

/* One segment after the frame header's begin; 0 if the file is none that can be cut. */
static int read_segment(Data data, int64_t at, int64_t sof_at, Layout *found) {
    const uint8_t *here = data.bytes + at;
    int marker = here[1];
    if (here[0] != 0xFF || marker < 0xC0 || marker == 0xFF) return 0;
    if (marker == DRI) {
        if (at + 6 > data.size) return 0;
        found->interval = two(here + 4);
    } else if (marker == APP9 && at + 12 <= data.size && !memcmp(here + 4, "EffLoop", 8)) {
        found->lengths_at = at + 12;
        found->lengths = two(here + 2) > 10 ? (two(here + 2) - 10) / 2 : 0;
    } else if (marker < 0xD0 && marker != DHT && at != sof_at) {
        return 0; /* a second frame, or arithmetic coding */
    }
    return 1;
}

/* The structure of a baseline JPEG in one scan, of 1 or 3 components; 0 if it is something else. */
EXPORT int effloop_jpeg_layout(const uint8_t *bytes, int64_t size, int64_t sof_at, Layout *found) {
    Data data = {bytes, size};
    int64_t at = sof_at;
    memset(found, 0, sizeof *found);
    if (sof_at < 2 || sof_at > size - 10 || bytes[sof_at + 1] != SOF0) return 0;
    for (; at <= size - 4; at += 2 + two(bytes + at + 2)) {
        if (!read_segment(data, at, sof_at, found)) return 0;
        if (bytes[at + 1] == SOS) break;
    }
    int components = bytes[sof_at + 9];
    if (at > size - 5 || bytes[sof_at + 4] != 8 || !read_mcu(data, sof_at, components, found)) return 0;
    found->height = two(bytes + sof_at + 5);
    found->width = two(bytes + sof_at + 7);
    found->size_at = sof_at + 5;
    found->sos_at = at;
    found->scan_at = at + 2 + two(bytes + at + 2);
    return bytes[at + 4] == components;
}

/* Where the interval or the scan that begins at `at` ends, after its marker; 0 if no marker is left. */
static int64_t find_end(Data data, int64_t at) {
    while (at < data.size - 1) {
        const uint8_t *found = memchr(data.bytes + at, 0xFF, (size_t)(data.size - 1 - at));
        if (!found) return 0;
        at = found - data.bytes + 1;
        if (data.bytes[at]) return at + 1; /* FF 00 is a byte FF of the entropy-coded data */
    }
    return 0;
}

/* The units that cover a range of pixels and its neighbours' chroma: of half the resolution it is interpolated from the
 * sample to each side, which is two pixels wide. */
static Span covering(int64_t start, int64_t length, int64_t mcu, int64_t unit, int64_t count) {
    int64_t margin = mcu == 8 ? 0 : 2 * (mcu / 16), last = units(start + length + margin, unit);
    return (Span){(start > margin ? start - margin : 0) / unit, last < count ? last : count};
}

/* All before the scan, then the intervals of `down` and `across`, renumbered; returns its size, 0 if the markers aren't
 * where they belong. All of them are checked: entropy-coded data has none of these bytes, so of an image that decodes
 * without a warning all intervals then are where they should be, not only those that a box needs. */
static int64_t copy_intervals(Data data, const Layout *layout, Span down, Span across, int64_t rows, int64_t per_row,
                              uint8_t *out) {
    const uint8_t *lengths = layout->lengths == rows * per_row ? data.bytes + layout->lengths_at : 0;
    int64_t start = layout->scan_at, to = layout->scan_at, copied = 0;
    if (lengths && layout->lengths_at + 2 * layout->lengths > data.size) return 0;
    memcpy(out, data.bytes, (size_t)to);
    for (int64_t number = 0, row = 0; row < rows; row++)
        for (int64_t column = 0; column < per_row; column++, number++) {
            int64_t end = lengths ? start + (lengths[2 * number] | lengths[2 * number + 1] << 8) : find_end(data, start);
            int marker = number + 1 == rows * per_row ? EOI : RST0 + (int)(number & 7);
            if (end < 2 || end > data.size || data.bytes[end - 1] != marker || data.bytes[end - 2] != 0xFF) return 0;
            if (row >= down.first && row < down.last && column >= across.first && column < across.last) {
                memcpy(out + to, data.bytes + start, (size_t)(end - start));
                to += end - start;
                out[to - 1] = (uint8_t)(RST0 + (copied++ & 7));
            }
            start = end;
        }
    out[to - 1] = EOI;
    return start == data.size ? to : 0;
}

static int64_t crop_intervals(Data data, const Layout *layout, const int64_t box[4], uint8_t *out, int64_t shown[5]) {
    int64_t columns = units(layout->width, layout->mcu_width), rows = units(layout->height, layout->mcu_height);
    if (columns % layout->interval) return 0; /* a row doesn't begin with an interval */
    int64_t per_row = columns / layout->interval, wide = layout->mcu_width * layout->interval;
    Span down = covering(box[0], box[2], layout->mcu_height, layout->mcu_height, rows);
    Span across = covering(box[1], box[3], layout->mcu_width, wide, per_row);
    if (across.first && layout->width - across.first * wide <= TOO_NARROW) across.first--;
    int64_t size = copy_intervals(data, layout, down, across, rows, per_row, out);
    shown[0] = down.first * layout->mcu_height;
    shown[1] = across.first * wide;
    int64_t below = layout->height - shown[0], beside = layout->width - shown[1];
    shown[2] = (down.last - down.first) * layout->mcu_height;
    shown[3] = (across.last - across.first) * wide;
    shown[2] = shown[2] < below ? shown[2] : below;
    shown[3] = shown[3] < beside ? shown[3] : beside;
    shown[4] = 0;
    return size;
}

int jpeg_ends_after_scan(const uint8_t *bytes, int64_t size, const Layout *layout) {
    enum { BLOCK = 256 };
    int64_t at = layout->scan_at, last = size - 2;
    if (at > last || bytes[last] != 0xFF || bytes[last + 1] != EOI) return 0;
    while (at < last) {
        int found = 0;
        int64_t end = last - at < BLOCK ? last : at + BLOCK;
        for (; at < end; at++) /* vectors: 4 µs for 100 KB, where memchr from FF to FF takes 20 */
            found |= (bytes[at] == 0xFF) & ((uint8_t)(bytes[at + 1] + 1) > 1);
        if (found) return 0;
    }
    return 1;
}

/* The rows to `bottom`: all of the file, whose frame header ends it there. The decoder has to be lenient, and a lenient
 * one fills with grey from a stray marker on, so there must be none. */
static int64_t crop_bottom(Data data, const Layout *layout, int64_t bottom, uint8_t *out, int64_t shown[5]) {
    int64_t height = bottom + BELOW;
    if (height >= layout->height || !jpeg_ends_after_scan(data.bytes, data.size, layout)) return 0;
    memcpy(out, data.bytes, (size_t)data.size);
    shown[0] = shown[1] = 0;
    shown[2] = height;
    shown[3] = layout->width;
    shown[4] = 1;
    return data.size;
}

/* Writes a JPEG of at least a box to out, which has as much room as the file itself.
 *
 * bottom: whether a file without restart markers may be cut below the box.
 * shown: top, left, height and width of what it shows; whether there is data after its last row.
 * Returns its size, or 0 if the file doesn't allow it. */
EXPORT int64_t effloop_jpeg_cut(const uint8_t *bytes, int64_t size, int64_t sof_at, const int64_t box[4], int bottom,
                                 uint8_t *out, int64_t shown[5]) {
    Layout layout;
    Data data = {bytes, size};
    if (!effloop_jpeg_layout(bytes, size, sof_at, &layout) || layout.scan_at > size) return 0;
    if (box[0] < 0 || box[1] < 0 || box[2] < 1 || box[3] < 1) return 0;
    if (box[0] + box[2] > layout.height || box[1] + box[3] > layout.width) return 0;
    int64_t length = 0;
    if (layout.interval)
        length = crop_intervals(data, &layout, box, out, shown);
    else if (bottom)
        length = crop_bottom(data, &layout, box[0] + box[2], out, shown);
    if (length) {
        put_two(out + layout.size_at, shown[2]);
        put_two(out + layout.size_at + 2, shown[3]);
    }
    return length;
}
