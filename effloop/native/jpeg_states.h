/* Entropy index of a JPEG: states of its decoder at every `grid` MCUs of each row, coded as differences.
 *
 *   0  magic (4 bytes, with the format's version)
 *   4  checksum of all that follows (8)
 *  12  checksum of the JPEG (8)
 *  20  size of the JPEG (4)
 *  24  grid (2), number of MCU rows (2)
 *  28  mean of the rows' bits (4), mean length of the rows' codes in bits (4)
 *  36  offset of the cells' codes in bits, from the end of this header (4)
 *  40  Rice parameters (9): of a row's length of codes, bits and up to three DC values, of a cell's bits and DC values
 *  49  codes. For each row: how many bits the codes of its cells take, and where the next row starts. Then for each
 *      row the states at `grid`, 2 `grid`, ... MCUs.
 *
 * Numbers are little-endian. All differences are Rice codes: a crop reads some hundred of them.
 */

#ifndef EFFLOOP_JPEG_STATES_H
#define EFFLOOP_JPEG_STATES_H

#include "jpeg.h"

enum { HEADER = 49, FIELDS = 9, ROW_LENGTH = 0, ROW_STATE = 1, CELL_STATE = 5, MAX_RICE = 24 };
enum { LONGEST_PREFIX = 20 }; /* ones of a code; more, and the number itself follows in 32 bits */

typedef struct {
    uint64_t jpeg_checksum;
    uint32_t jpeg_size, mean_row, mean_length, cells_at;
    int grid, rows, per_row; /* MCUs between states, rows of MCUs, states in a row */
    int components;
    uint8_t rice[FIELDS];
    const uint8_t *codes;
    size_t size; /* of the codes, in bytes */
} States;

/* A position in the codes; reading past their end gives zeros. */
typedef struct {
    const States *states;
    uint64_t at;
} Cursor;

/* Whether these bytes are an undamaged index of a JPEG of this size and structure; fills `states`. */
int states_open(const uint8_t *index, size_t size, const Jpeg *jpeg, size_t jpeg_size, States *states);

/* Read a row's entry: the bits of its cells' codes; `state` goes from the row's start to the next one's. */
uint32_t read_row(Cursor *cursor, State *state);

/* Go on by `count` states in a row; `mean` is that of the row's bits between two. */
void read_cells(Cursor *cursor, int count, uint32_t mean, State *state);

#endif
