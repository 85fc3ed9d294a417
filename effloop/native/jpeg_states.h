/* Entropy index of a JPEG: states of its decoder at every `grid` MCUs of each row, coded as differences.
 *
 *   0  magic (4 bytes, with the format's version)
 *   4  checksum of all that follows (4)
 *   8  checksum of the JPEG (8)
 *  16  grid (2)
 *  18  bytes of the rows' codes (4), which are filled up with zeros; then come those of the cells
 *  22  Rice parameters (9): of a row's length of codes, bits and up to three DC values, of a cell's bits and DC values
 *  31  codes. For each row: how many bits the codes of its cells take, and where the next row starts. Then for each
 *      row the states at `grid`, 2 `grid`, ... MCUs.
 *
 * Numbers are little-endian. All differences are Rice codes: a crop reads some hundred of them.
 */

#ifndef EFFLOOP_JPEG_STATES_H
#define EFFLOOP_JPEG_STATES_H

#include "jpeg.h"

enum { HEADER = 31, FIELDS = 9, ROW_LENGTH = 0, ROW_STATE = 1, CELL_STATE = 5, MAX_RICE = 24 };
enum { LONGEST_PREFIX = 20 }; /* ones of a code; more, and the number itself follows in 32 bits */

typedef struct {
    uint64_t jpeg_checksum;
    uint32_t cells_at, mean_row, mean_length; /* in bits; the means follow from the sizes of the scan and the codes */
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

/* Whether these bytes are an undamaged index, of a JPEG with this structure if it has the checksum; fills `states`. */
int states_open(const uint8_t *index, size_t size, const Jpeg *jpeg, States *states);

uint32_t mean_row_bits(const Jpeg *jpeg);

/* Read a row's entry: the bits of its cells' codes; `state` goes from the row's start to the next one's. */
uint32_t read_row(Cursor *cursor, State *state);

/* Go on by `count` states in a row; `mean` is that of the row's bits between two. */
void read_cells(Cursor *cursor, int count, uint32_t mean, State *state);

#endif
