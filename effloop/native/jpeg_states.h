/* The entropy index of a JPEG: the states of its entropy decoder at every `grid` MCUs of each row, stored as differences.
 *
 *   0  magic (4 bytes, with the format's version)
 *   4  checksum of all that follows (4)
 *   8  checksum of the JPEG (8)
 *  16  grid (2)
 *  18  bytes of the rows' codes (4), padded with zero bits
 *  22  Rice parameters (9): for rows, of the length of their cells' codes, of bit positions and of up to three DC predictors;
 *      for cells, of bit positions and of DC predictors
 *  31  codes of the rows: for each, the bits that the codes of its cells take, and the state at the start of the next row
 *      codes of the cells: for each row, the states at `grid`, 2 `grid`, ... MCUs
 *
 * Numbers are little-endian. All differences are Rice codes; decoding a crop reads some hundreds of them.
 */

#ifndef EFFLOOP_JPEG_STATES_H
#define EFFLOOP_JPEG_STATES_H

#include "jpeg.h"

enum { HEADER = 31, FIELDS = 9, ROW_LENGTH = 0, ROW_STATE = 1, CELL_STATE = 5, MAX_RICE = 24 };
enum { LONGEST_PREFIX = 20 }; /* most ones in a code; with so many, the number itself follows in 32 bits */

typedef struct {
    uint64_t jpeg_checksum;
    uint32_t cells_at, mean_row, mean_length; /* bits: where the cells' codes begin; of a row's scan and cells, on average */
    int grid, rows, per_row; /* MCUs between states, rows of MCUs, states in a row */
    int components;
    uint8_t rice[FIELDS];
    const uint8_t *codes;
    size_t size; /* of the codes, in bytes */
} States;

/* A position in the codes. Beyond their end, zeros are read. */
typedef struct {
    const States *states;
    uint64_t at;
} Cursor;

/* Opens an index; returns 0 if it is damaged. It belongs to `jpeg` only if `jpeg_checksum` is that of the file. */
int states_open(const uint8_t *index, size_t size, const Jpeg *jpeg, States *states);

uint32_t mean_row_bits(const Jpeg *jpeg);

/* Moves `state` from the start of a row to that of the next; returns the bits that the codes of the row's cells take. */
uint32_t read_row(Cursor *cursor, State *state);

/* Moves `state` on by `count` states within a row; `mean` is the mean number of bits between two of them. */
void read_cells(Cursor *cursor, int count, uint32_t mean, State *state);

#endif
