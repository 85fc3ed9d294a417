/* Structure of baseline JPEGs with one interleaved scan, and the states of their entropy decoder. */

#ifndef EFFLOOP_JPEG_H
#define EFFLOOP_JPEG_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { DC, AC, MAX_COMPONENTS = 3, MAX_BLOCKS = 10, SYMBOLS = 256, END_OF_BLOCK = 0 };
enum { MOST_SIDE = 65500 }; /* that libjpeg decodes */
enum { SOI = 0xD8, EOI = 0xD9, SOS = 0xDA, DQT = 0xDB, DRI = 0xDD, DHT = 0xC4, SOF0 = 0xC0, RST0 = 0xD0, APP0 = 0xE0, APP9 = 0xE9,
       APP14 = 0xEE };

/* A Huffman table as DHT stores it: how many codes there are of 1 to 16 bits, and their symbols in order. */
typedef struct {
    uint8_t counts[16];
    uint8_t symbols[SYMBOLS];
    int total;
} Huffman;

typedef struct {
    int width, height;           /* pixels */
    int mcu_width, mcu_height;   /* pixels of a minimum coded unit */
    int columns, rows;           /* of MCUs */
    int components;              /* 1 or 3 */
    int blocks[MAX_COMPONENTS];  /* of each component in an MCU */
    int table[2][MAX_COMPONENTS]; /* which DC and which AC table a component uses */
    Huffman huffman[2][4];       /* by class and number; total is 0 where there is none */
    uint16_t quantizers[4][64];  /* by number, in natural order; the first is 0 where there is none */
    int quantizer[MAX_COMPONENTS]; /* which of them a component uses */
    int has_jfif, is_rgb;        /* whether it has JFIF's header; whether its components aren't luma and chroma, if it hasn't */
    int interval;                /* MCUs between restart markers; 0: there are none */
    size_t lengths_at;           /* where the bytes of each interval are, two for each, if they are stored */
    int lengths;                 /* how many intervals that are; 0: they aren't stored */
    size_t sof_at, sos_at;       /* offsets of the frame's and the scan's header */
    size_t scan_at, scan_end;    /* offset of the entropy-coded data, and of the EOI that ends it and the file */
} Jpeg;

/* State of the entropy decoder between two MCUs. */
typedef struct {
    uint32_t bit; /* from the scan's start, in the file as it is, with its stuffed bytes */
    int16_t dc[MAX_COMPONENTS + 1]; /* the last is always 0: no bytes between, so that states compare as memory */
} State;

/* Whether this is a JPEG whose scan can be cut; fills `jpeg`. */
int jpeg_read(const uint8_t *data, size_t size, Jpeg *jpeg);

/* Whether libjpeg takes the tables, and the components are luma and, if there are three, chroma. */
int jpeg_is_plain(const Jpeg *jpeg);

/* Whether there is no marker in the scan; FF FF is a fill byte. */
int jpeg_ends_after_scan(const uint8_t *data, const Jpeg *jpeg);

/* Whether a table has at least one code, and none that is too long for its place or of ones only. */
int huffman_valid(const Huffman *table);

/* A checksum that changes with any change within one of the aligned 8-byte words, and with others as good as always.
 * It finds damage and other files, not forgeries. */
uint64_t checksum64(const uint8_t *data, size_t size);

/* Of 64 coefficients in zigzag order, where they are in an 8x8 block, but that of DC is 32 further; then 64 places after the
 * block. jpeg_coder.c has DC values in a part of their own, half a block before the others. */
extern const uint8_t PLACES[128];

static inline uint64_t load_be64(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return __builtin_bswap64(word);
}

static inline int bit_length(uint32_t value) { return value ? 32 - __builtin_clz(value) : 0; }

#endif
