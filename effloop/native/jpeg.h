/* The headers of a baseline JPEG with a single scan, and the state of its entropy decoder. */

#ifndef EFFLOOP_JPEG_H
#define EFFLOOP_JPEG_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { DC, AC, MAX_COMPONENTS = 3, SYMBOLS = 256 };
enum { SOI = 0xD8, EOI = 0xD9, SOS = 0xDA, DQT = 0xDB, DRI = 0xDD, DHT = 0xC4, SOF0 = 0xC0, RST0 = 0xD0, APP0 = 0xE0, APP9 = 0xE9,
       APP14 = 0xEE };

/* A Huffman table as DHT stores it: the number of codes of each length from 1 to 16 bits, and their symbols in order. */
typedef struct {
    uint8_t counts[16];
    uint8_t symbols[SYMBOLS];
    int total;
} Huffman;

typedef struct {
    int width, height;             /* in pixels */
    int mcu_width, mcu_height;     /* size of an MCU (minimum coded unit) in pixels */
    int columns, rows;             /* number of MCUs across and down */
    int components;                /* 1 or 3 */
    int blocks[MAX_COMPONENTS];    /* blocks of each component in an MCU */
    int table[2][MAX_COMPONENTS];  /* numbers of the DC and the AC table that each component uses */
    Huffman huffman[2][4];         /* the tables, by DC or AC and by number; `total` is 0 for one that isn't defined */
    uint16_t quantizers[4][64];    /* quantisation tables, in natural order; the first value is 0 for one that isn't defined */
    int quantizer[MAX_COMPONENTS]; /* number of the one that each component uses */
    int has_jfif, is_rgb;          /* whether there is a JFIF header; whether, without one, the components are taken for RGB */
    int interval;                  /* MCUs between restart markers; 0: there are none */
    size_t lengths_at;             /* offset of the lengths of the restart intervals (with_interval_lengths in image/jpeg.py) */
    int lengths;                   /* how many of these there are, two bytes each; 0: they aren't stored */
    size_t sof_at, sos_at;         /* offsets of the frame header and of the scan header */
    size_t scan_at, scan_end;      /* offsets of the entropy-coded data, and of the EOI marker that ends it and the file */
} Jpeg;

/* State of the entropy decoder between two MCUs. */
typedef struct {
    uint32_t bit; /* position, counted from the start of the scan in the file, stuffed bytes included */
    int16_t dc[MAX_COMPONENTS + 1]; /* DC predictors, and a 0 that leaves no padding, so that memcmp compares states */
} State;

/* Reads the headers. Returns 0 unless this is a baseline JPEG of 1 or 3 components in a single scan. */
int jpeg_read(const uint8_t *data, size_t size, Jpeg *jpeg);

/* Whether libjpeg accepts the tables, and takes the components for grey or for luma and chroma. */
int jpeg_is_plain(const Jpeg *jpeg);

/* A checksum that differs if a single aligned 8-byte word does, and all but certainly otherwise. It detects damage and other
 * files, not forgery. */
uint64_t checksum64(const uint8_t *data, size_t size);

/* Where the 64 coefficients, in zigzag order, belong in a block, with 32 added for the DC coefficient; then 64 places past
 * its end. jpeg_coder.c, which writes the DC coefficient relative to an address 32 values lower, so needs no branch. */
extern const uint8_t PLACES[128];

static inline uint64_t load_be64(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return __builtin_bswap64(word);
}

#endif
