/* Headers of the usual images, many in one call: effloop/data/image/encoded.py reads the others. */

#include <stdint.h>
#include <string.h>

#include "export.h"
#include "headers.h"

enum { SOS = 0xDA, EOI = 0xD9, TEM = 0x01, RST0 = 0xD0, SOI = 0xD8, DHT = 0xC4, JPG = 0xC8, DAC = 0xCC, APP1 = 0xE1 };

static int two(const uint8_t *at) { return at[0] << 8 | at[1]; }

static int is_sof(int marker) {
    return marker >= 0xC0 && marker <= 0xCF && marker != DHT && marker != JPG && marker != DAC;
}

/* A number in EXIF data; -1 beyond their end. */
static int64_t exif_number(const uint8_t *exif, int64_t size, int64_t at, int bytes) {
    if (at + bytes > size) return -1;
    int64_t number = 0;
    int big = exif[0] == 'M' && exif[1] == 'M';
    for (int i = 0; i < bytes; i++) number = number << 8 | exif[at + (big ? i : bytes - 1 - i)];
    return number;
}

/* Whether EXIF data turn their image, as `_orientation` in orientation.py finds out. */
static int exif_turns(const uint8_t *exif, int64_t size) {
    int64_t at = exif_number(exif, size, 4, 4), count = at < 0 ? 0 : exif_number(exif, size, at, 2);
    for (int64_t entry = at + 2; count-- > 0; entry += 12)
        if (exif_number(exif, size, entry, 2) == 0x0112) { /* orientation: a short, or a long (4) */
            int64_t value = exif_number(exif, size, entry + 8, exif_number(exif, size, entry + 2, 2) == 4 ? 4 : 2);
            return value > 1 && value < 9;
        }
    return 0;
}

/* As `_find_sof` in header.py, without bytes between segments; not of an image that EXIF turns, if it is to be turned. */
static void read_jpeg(const uint8_t *data, int64_t size, int turn, Row *row) {
    for (int64_t at = 2; at + 10 <= size;) {
        const uint8_t *here = data + at;
        int marker = here[1];
        if (here[0] != 0xFF || marker == 0 || marker == 0xFF || marker == SOS || marker == EOI) return;
        if (is_sof(marker)) {
            row->at = at;
            row->height = two(here + 5);
            row->width = two(here + 7);
            row->channels = here[9];
            row->plain = here[4] == 8 && marker <= 0xC2 && (here[9] == 1 || here[9] == 3);
            row->complete = data[size - 1] == EOI && data[size - 2] == 0xFF;
            row->kind = row->height && row->width ? JPEG : OTHER;
            return;
        }
        if (turn && marker == APP1 && !memcmp(here + 4, "Exif\0", 6)) { /* the first has it */
            int64_t end = at + 2 + two(here + 2);
            if (exif_turns(here + 10, (end < size ? end : size) - at - 10)) return;
            turn = 0;
        }
        at += marker == TEM || (marker >= RST0 && marker <= SOI) ? 2 : 2 + two(here + 2);
    }
}

/* A number of at most `most` digits, and the character after it; 0 if there is none. */
static int64_t read_number(const uint8_t *data, int64_t size, int most, uint8_t after, int64_t *at) {
    int64_t number = 0, first = *at;
    for (; *at < size && data[*at] >= '0' && data[*at] <= '9'; ++*at) {
        if (*at - first == most) return 0;
        number = 10 * number + (data[*at] - '0');
    }
    if (*at == first || *at == size || data[*at] != after) return 0;
    ++*at;
    return number;
}

/* As `pnm_header` in header.py writes it. */
static void read_pnm(const uint8_t *data, int64_t size, Row *row) {
    int64_t at = 3;
    if (size < 4 || data[2] != '\n') return;
    int64_t width = read_number(data, size, 9, ' ', &at), height = width ? read_number(data, size, 9, '\n', &at) : 0;
    if (!height || read_number(data, size, 3, '\n', &at) != 255) return;
    row->at = at;
    row->height = (int32_t)height;
    row->width = (int32_t)width;
    row->channels = data[1] == '6' ? 3 : 1;
    row->plain = 1;
    row->complete = size == at + height * width * row->channels;
    row->kind = PNM;
}

/* Fills a row for each image; `kind` is 0 for those that it can't read, and with `turn` for JPEGs that EXIF turns. Returns
 * how many these are. */
EXPORT int64_t effloop_headers(const uint8_t *const *images, const int64_t *sizes, int64_t count, int turn, Row *rows) {
    int64_t left = 0;
    memset(rows, 0, (size_t)count * sizeof *rows);
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *data = images[i];
        if (sizes[i] >= 3 && data[0] == 0xFF && data[1] == SOI && data[2] == 0xFF)
            read_jpeg(data, sizes[i], turn, rows + i);
        if (sizes[i] >= 3 && data[0] == 'P' && (data[1] == '5' || data[1] == '6')) read_pnm(data, sizes[i], rows + i);
        left += rows[i].kind == OTHER;
    }
    return left;
}
