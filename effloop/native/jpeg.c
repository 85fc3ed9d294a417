/* Reads the headers of baseline JPEGs, and computes checksums of files. */

#include "jpeg.h"

#include "export.h"

enum { MAX_SIDE = 65500, MAX_BLOCKS = 10 }; /* pixels that libjpeg decodes; blocks that the standard allows in an MCU */

const uint8_t PLACES[128] = {
    32, 1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6,  7,  14, 21, 28,
    35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63,
    64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64,
    64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64,
};

static unsigned be16(const uint8_t *at) { return (unsigned)at[0] << 8 | at[1]; }

/* Whether a table has codes, all of them fit their lengths, and none consists of ones only. */
static int huffman_valid(const Huffman *table) {
    uint32_t code = 0;
    for (int length = 1; length <= 16; length++) {
        code += table->counts[length - 1];
        if (code >= 1u << length) return 0;
        code <<= 1;
    }
    return table->total > 0;
}

static int read_tables(const uint8_t *at, const uint8_t *end, Jpeg *jpeg) {
    while (at < end) {
        if (end - at < 17 || at[0] >> 4 > 1 || (at[0] & 15) > 3) return 0;
        Huffman *table = &jpeg->huffman[at[0] >> 4][at[0] & 15];
        memcpy(table->counts, at + 1, 16);
        table->total = 0;
        for (int i = 0; i < 16; i++) table->total += table->counts[i];
        at += 17;
        if (table->total > SYMBOLS || end - at < table->total || !huffman_valid(table)) return 0;
        memcpy(table->symbols, at, (size_t)table->total);
        at += table->total;
    }
    return 1;
}

static int read_quantizers(const uint8_t *at, const uint8_t *end, Jpeg *jpeg) {
    while (at < end) {
        int wide = at[0] >> 4 != 0, number = at[0] & 15;
        if (number > 3 || end - at < 1 + 64 * (1 + wide)) return 0;
        at++;
        for (int i = 0; i < 64; i++, at += 1 + wide)
            jpeg->quantizers[number][i ? PLACES[i] : 0] = (uint16_t)(wide ? be16(at) : *at);
    }
    return 1;
}

static int read_frame(const uint8_t *at, size_t length, Jpeg *jpeg) {
    if (length < 11 || at[4] != 8) return 0;
    jpeg->height = (int)be16(at + 5), jpeg->width = (int)be16(at + 7), jpeg->components = at[9];
    if (!jpeg->height || !jpeg->width || jpeg->height > MAX_SIDE || jpeg->width > MAX_SIDE) return 0;
    if (jpeg->components != 1 && jpeg->components != 3) return 0;
    if (length != 8 + 3u * (unsigned)jpeg->components) return 0;
    int across = at[11] >> 4, down = at[11] & 15;
    if (across < 1 || across > 4 || down < 1 || down > 4) return 0;
    if (jpeg->components == 1) {
        across = down = 1; /* grey is coded block by block, whatever its sampling factors */
    } else if (at[14] != 0x11 || at[17] != 0x11 || across * down + 2 > MAX_BLOCKS) {
        return 0; /* several blocks of a chroma component in an MCU */
    }
    for (int i = 0; i < jpeg->components; i++) jpeg->quantizer[i] = at[12 + 3 * i];
    jpeg->is_rgb |= jpeg->components == 3 && at[10] == 'R' && at[13] == 'G' && at[16] == 'B';
    jpeg->blocks[0] = across * down, jpeg->blocks[1] = jpeg->blocks[2] = 1;
    jpeg->mcu_width = 8 * across, jpeg->mcu_height = 8 * down;
    jpeg->columns = (jpeg->width + jpeg->mcu_width - 1) / jpeg->mcu_width;
    jpeg->rows = (jpeg->height + jpeg->mcu_height - 1) / jpeg->mcu_height;
    return 1;
}

/* Accepts scans of all components, in the frame's order, with all coefficients. */
static int read_scan(const uint8_t *at, size_t length, const uint8_t *frame, Jpeg *jpeg) {
    int count = jpeg->components;
    if (length != 6 + 2u * (unsigned)count || at[4] != count) return 0;
    for (int i = 0; i < count; i++) {
        const uint8_t *component = at + 5 + 2 * i;
        if (component[0] != frame[10 + 3 * i] || component[1] >> 4 > 3 || (component[1] & 15) > 3) return 0;
        jpeg->table[DC][i] = component[1] >> 4, jpeg->table[AC][i] = component[1] & 15;
        if (!jpeg->huffman[DC][jpeg->table[DC][i]].total || !jpeg->huffman[AC][jpeg->table[AC][i]].total) return 0;
    }
    const uint8_t *rest = at + 5 + 2 * count;
    return rest[0] == 0 && rest[1] == 63 && rest[2] == 0;
}

static int read_segment(const uint8_t *data, size_t at, size_t length, Jpeg *jpeg) {
    const uint8_t *segment = data + at;
    switch (segment[1]) {
    case DHT: return read_tables(segment + 4, segment + 2 + length, jpeg);
    case DRI: jpeg->interval = (int)be16(segment + 4); return length == 4;
    case SOF0:
        if (jpeg->sof_at) return 0;
        jpeg->sof_at = at;
        return read_frame(segment, length, jpeg);
    case DQT: return read_quantizers(segment + 4, segment + 2 + length, jpeg);
    case APP0: if (length >= 16 && !memcmp(segment + 4, "JFIF", 5)) jpeg->has_jfif = 1; return 1;
    case APP9: /* written by with_interval_lengths in effloop/data/image/jpeg.py */
        if (length >= 10 && !memcmp(segment + 4, "EffLoop", 8)) jpeg->lengths_at = at + 12, jpeg->lengths = (int)(length - 10) / 2;
        return 1;
    case APP14: if (length >= 14 && !memcmp(segment + 4, "Adobe", 5)) jpeg->is_rgb = segment[15] != 1; return 1;
    default: return segment[1] == 0xFE || (segment[1] >= 0xE0 && segment[1] <= 0xEF);
    }
}

int jpeg_read(const uint8_t *data, size_t size, Jpeg *jpeg) {
    if (size < 4 || size > 1u << 28 || data[0] != 0xFF || data[1] != SOI) return 0;
    if (data[size - 3] == 0xFF || data[size - 2] != 0xFF || data[size - 1] != EOI) return 0; /* a fill byte; no EOI at the end */
    jpeg->sof_at = 0, jpeg->has_jfif = jpeg->is_rgb = jpeg->interval = jpeg->lengths = 0;
    memset(jpeg->quantizers, 0, sizeof jpeg->quantizers);
    for (int kind = DC; kind <= AC; kind++)
        for (int i = 0; i < 4; i++) jpeg->huffman[kind][i].total = 0;
    for (size_t at = 2; at + 4 <= size;) {
        size_t length = be16(data + at + 2);
        if (data[at] != 0xFF || length < 2 || at + 2 + length > size - 2) return 0;
        if (data[at + 1] == SOS) {
            jpeg->sos_at = at, jpeg->scan_at = at + 2 + length, jpeg->scan_end = size - 2;
            return jpeg->sof_at && read_scan(data + at, length, data + jpeg->sof_at, jpeg);
        }
        if (!read_segment(data, at, length, jpeg)) return 0;
        at += 2 + length;
    }
    return 0;
}

int jpeg_is_plain(const Jpeg *jpeg) {
    for (int i = 0; i < jpeg->components; i++) {
        const Huffman *codes = &jpeg->huffman[DC][jpeg->table[DC][i]];
        if (jpeg->quantizer[i] > 3 || !jpeg->quantizers[jpeg->quantizer[i]][0]) return 0;
        for (int j = 0; j < codes->total; j++)
            if (codes->symbols[j] > 15) return 0;
    }
    return jpeg->has_jfif || !jpeg->is_rgb;
}

/* Finds the offsets of the scan header and of its data, the MCUs between restart markers (0: none), and how many lengths of
 * intervals are stored. Returns 0 as jpeg_read. */
EXPORT int effloop_jpeg_layout(const uint8_t *data, int64_t size, int64_t found[4]) {
    Jpeg jpeg;
    if (size < 0 || !jpeg_read(data, (size_t)size, &jpeg)) return 0;
    found[0] = (int64_t)jpeg.sos_at, found[1] = (int64_t)jpeg.scan_at, found[2] = jpeg.interval, found[3] = jpeg.lengths;
    return 1;
}

/* A one-to-one function of the word for any state, and of the state for any word: no change of a single word is lost. */
static uint64_t mix(uint64_t state, uint64_t word) {
    state = (state ^ word) * 0x9E3779B97F4A7C15u;
    return state << 29 | state >> 35;
}

enum { LANES = 8, STRIPE = 8 * LANES }; /* independent sums, so that multiplications overlap; bytes of a word for each */

uint64_t checksum64(const uint8_t *data, size_t size) {
    uint64_t lanes[LANES], words[LANES];
    for (int i = 0; i < LANES; i++) lanes[i] = size + (uint64_t)i;
    for (; size >= STRIPE; data += STRIPE, size -= STRIPE) {
        memcpy(words, data, STRIPE);
        for (int i = 0; i < LANES; i++) lanes[i] = mix(lanes[i], words[i]);
    }
    memset(words, 0, STRIPE);
    if (size) memcpy(words, data, size);
    uint64_t sum = 0;
    for (int i = 0; i < LANES; i++) sum = mix(sum, mix(lanes[i], words[i]));
    return sum ^ sum >> 32;
}
