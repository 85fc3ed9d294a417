/* Writes an entropy index, with as fine a grid as fits into the bytes that it may take. */

#include <stdlib.h>

#include "export.h"
#include "jpeg_scan.h"
#include "jpeg_states.h"

/* The codes of an index before they are written. */
typedef struct {
    const Jpeg *jpeg;
    const State *states; /* of all MCUs */
    int grid, per_row, cell_fields, row_fields;
    uint32_t *cells, *rows; /* differences, mapped to numbers from 0 on; `cell_fields` and `row_fields` of each */
    uint32_t mean_row, mean_length;
    uint8_t rice[FIELDS];
    size_t row_bytes, cell_bytes;
} Plan;

static uint32_t fold(uint32_t difference) { return difference << 1 ^ (uint32_t)((int32_t)difference >> 31); }

static int code_length(uint32_t value, int rice) {
    uint32_t ones = value >> rice;
    return ones < LONGEST_PREFIX ? (int)ones + 1 + rice : LONGEST_PREFIX + 32;
}

static uint32_t *fold_states(const Plan *plan, uint32_t mean, const State *from, const State *to, uint32_t *out) {
    *out++ = fold(to->bit - from->bit - mean);
    for (int i = 0; i < plan->jpeg->components; i++) *out++ = fold((uint32_t)(to->dc[i] - from->dc[i]));
    return out;
}

/* The least parameter with which the mean of the field's values isn't above a power of two. */
static int choose_rice(const uint32_t *values, size_t count, int stride) {
    uint64_t sum = 0, rice = 0;
    for (size_t i = 0; i < count; i++) sum += values[i * (size_t)stride];
    while (rice < MAX_RICE && (uint64_t)count << rice < sum) rice++;
    return (int)rice;
}

static void plan_cells(Plan *plan) {
    uint32_t *out = plan->cells;
    for (int row = 0; row < plan->jpeg->rows; row++) {
        const State *first = plan->states + (size_t)row * (size_t)plan->jpeg->columns;
        uint32_t mean = (first[plan->jpeg->columns].bit - first->bit) / (uint32_t)plan->per_row;
        for (int i = 1; i < plan->per_row; i++)
            out = fold_states(plan, mean, first + (i - 1) * plan->grid, first + i * plan->grid, out);
    }
    size_t count = (size_t)(plan->per_row - 1) * (size_t)plan->jpeg->rows;
    for (int i = 0; i < plan->cell_fields; i++)
        plan->rice[CELL_STATE + i] = (uint8_t)choose_rice(plan->cells + i, count, plan->cell_fields);
}

/* How many bits the codes of a row's cells take. */
static uint32_t cells_length(const Plan *plan, int row) {
    int count = (plan->per_row - 1) * plan->cell_fields;
    const uint32_t *values = plan->cells + (size_t)row * (size_t)count;
    uint32_t length = 0;
    for (int i = 0, field = 0; i < count; i++, field = field + 1 == plan->cell_fields ? 0 : field + 1)
        length += (uint32_t)code_length(values[i], plan->rice[CELL_STATE + field]);
    return length;
}

static void plan_cell_bytes(Plan *plan) {
    uint64_t bits = 0;
    for (int row = 0; row < plan->jpeg->rows; row++)
        bits += plan->rows[row * plan->row_fields] = cells_length(plan, row);
    plan->cell_bytes = (size_t)((bits + 7) / 8);
    plan->mean_length = (uint32_t)(plan->cell_bytes * 8 / (size_t)plan->jpeg->rows);
    plan->mean_row = mean_row_bits(plan->jpeg);
}

static void plan_row_bytes(Plan *plan) {
    size_t rows = (size_t)plan->jpeg->rows, columns = (size_t)plan->jpeg->columns;
    uint64_t bits = 0;
    for (size_t row = 0; row < rows; row++) {
        uint32_t *out = plan->rows + row * (size_t)plan->row_fields;
        *out = fold(*out - plan->mean_length);
        fold_states(plan, plan->mean_row, plan->states + row * columns, plan->states + (row + 1) * columns, out + 1);
    }
    for (int i = 0; i < plan->row_fields; i++) {
        int rice = choose_rice(plan->rows + i, rows, plan->row_fields);
        plan->rice[ROW_LENGTH + i] = (uint8_t)rice;
        for (size_t row = 0; row < rows; row++)
            bits += (unsigned)code_length(plan->rows[row * (size_t)plan->row_fields + (size_t)i], rice);
    }
    plan->row_bytes = (size_t)((bits + 7) / 8);
}

/* Bytes of the index at a grid. */
static size_t plan_grid(Plan *plan, int grid) {
    plan->grid = grid, plan->per_row = (plan->jpeg->columns + grid - 1) / grid;
    plan_cells(plan);
    plan_cell_bytes(plan);
    plan_row_bytes(plan);
    return HEADER + plan->row_bytes + plan->cell_bytes;
}

typedef struct {
    uint8_t *at;
    uint64_t pending;
    int bits;
} Output;

static void put(Output *output, uint32_t value, int count) {
    output->pending = output->pending << count | value;
    for (output->bits += count; output->bits >= 8; output->bits -= 8)
        *output->at++ = (uint8_t)(output->pending >> (output->bits - 8));
}

static void fill_byte(Output *output) { put(output, 0, -output->bits & 7); }

static void put_codes(Output *output, const uint32_t *values, size_t count, const uint8_t *rice, int stride) {
    for (size_t i = 0; i < count; i++)
        for (int field = 0; field < stride; field++, values++) {
            uint32_t ones = *values >> rice[field];
            if (ones < LONGEST_PREFIX) {
                put(output, ((1u << ones) - 1) << 1, (int)ones + 1);
                put(output, *values & ((1u << rice[field]) - 1), rice[field]);
            } else {
                put(output, (1u << LONGEST_PREFIX) - 1, LONGEST_PREFIX);
                put(output, *values, 32);
            }
        }
}

static void put_little(uint8_t *at, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) at[i] = (uint8_t)(value >> (8 * i));
}

static void write_index(const Plan *plan, const uint8_t *data, size_t data_size, uint8_t *out, size_t size) {
    size_t rows = (size_t)plan->jpeg->rows;
    Output output = {out + HEADER, 0, 0};
    memcpy(out, "EJI1", 4);
    put_little(out + 8, checksum64(data, data_size), 8);
    put_little(out + 16, (uint64_t)plan->grid, 2), put_little(out + 18, plan->row_bytes, 4);
    memcpy(out + 22, plan->rice, FIELDS);
    put_codes(&output, plan->rows, rows, plan->rice + ROW_LENGTH, plan->row_fields);
    fill_byte(&output);
    put_codes(&output, plan->cells, rows * (size_t)(plan->per_row - 1), plan->rice + CELL_STATE, plan->cell_fields);
    fill_byte(&output);
    put_little(out + 4, checksum64(out + 8, size - 8), 4);
}

/* Whether reading an index gives the states that it was made from. */
static int reads_back(const Plan *plan, const uint8_t *index, size_t size) {
    States states;
    if (!states_open(index, size, plan->jpeg, &states)) return 0;
    Cursor rows = {&states, 0}, cells = {&states, states.cells_at};
    State start = {0}, next = {0};
    for (int row = 0; row < states.rows; row++, start = next) {
        const State *expected = plan->states + (size_t)row * (size_t)plan->jpeg->columns;
        uint64_t end = read_row(&rows, &next) + cells.at;
        uint32_t mean = (next.bit - start.bit) / (uint32_t)states.per_row;
        for (int i = 0; i < states.per_row; i++) {
            if (i) read_cells(&cells, 1, mean, &start);
            if (memcmp(&start, expected + i * states.grid, sizeof start) != 0) return 0;
        }
        if (cells.at != end) return 0;
    }
    return memcmp(&start, plan->states + (size_t)states.rows * (size_t)plan->jpeg->columns, sizeof start) == 0;
}

/* Write the index of the finest grid that fits; returns its bytes, 0 if none does. */
static int64_t write_finest(Plan *plan, const uint8_t *data, size_t size, uint8_t *out, size_t room) {
    size_t count = (size_t)plan->jpeg->columns * (size_t)plan->jpeg->rows;
    int grid = (int)(count * 5 / 2 / (room + 1)) + 1; /* at least 2.5 bytes a state: coarser grids than this */
    for (;; grid += 1 + grid / 8) {
        size_t needed = plan_grid(plan, grid);
        if (needed <= room) {
            write_index(plan, data, size, out, needed);
            return reads_back(plan, out, needed) ? (int64_t)needed : 0;
        }
        if (grid >= plan->jpeg->columns) return 0;
    }
}

/* Writes the index of a JPEG to `out`, which has `room` bytes: the grid is as fine as that allows.
 *
 * Returns the index's size; 0 if it isn't a baseline JPEG with one scan and no restart markers, or damaged, or no grid fits;
 * -1 if there isn't enough memory. */
EXPORT int64_t effloop_jpeg_index(const uint8_t *data, int64_t size, uint8_t *out, int64_t room) {
    Jpeg jpeg;
    State *states = NULL;
    if (size < 0 || room < HEADER || !jpeg_read(data, (size_t)size, &jpeg) || jpeg.interval) return 0;
    int64_t written = scan_states(data, &jpeg, &states);
    if (written != 1) return written;
    Plan plan = {.jpeg = &jpeg, .states = states, .cell_fields = 1 + jpeg.components, .row_fields = 2 + jpeg.components};
    size_t rows = (size_t)jpeg.rows, cells = rows * (size_t)jpeg.columns * (size_t)plan.cell_fields;
    uint32_t *values = malloc((cells + rows * (size_t)plan.row_fields) * sizeof *values);
    plan.cells = values, plan.rows = values + cells;
    written = values ? write_finest(&plan, data, (size_t)size, out, (size_t)room) : -1;
    free(states), free(values);
    return written;
}

/* Whether an index is undamaged and belongs to these bytes. */
EXPORT int64_t effloop_jpeg_index_matches(const uint8_t *data, int64_t size, const uint8_t *index, int64_t index_size) {
    Jpeg jpeg;
    States states;
    if (size < 0 || index_size < 0 || !jpeg_read(data, (size_t)size, &jpeg)) return 0;
    if (!states_open(index, (size_t)index_size, &jpeg, &states)) return 0;
    return states.jpeg_checksum == checksum64(data, (size_t)size);
}
