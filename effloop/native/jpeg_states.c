/* Reading an entropy index. Nothing in it is trusted: whoever uses a state has to check that it is inside of the file. */

#include "jpeg_states.h"

static uint64_t window(const Cursor *cursor) {
    size_t byte = cursor->at >> 3, size = cursor->states->size;
    uint8_t last[8] = {0};
    if (byte >= size) return 0;
    const uint8_t *from = cursor->states->codes + byte;
    if (size - byte < 8) from = memcpy(last, from, size - byte);
    return load_be64(from) << (cursor->at & 7);
}

static inline int32_t read_difference(Cursor *cursor, int field) {
    uint64_t bits = window(cursor);
    int rice = cursor->states->rice[field], ones = __builtin_clzll(~bits | 1);
    uint32_t value;
    if (ones < LONGEST_PREFIX) {
        uint64_t rest = bits << (ones + 1);
        value = (uint32_t)ones << rice | (uint32_t)(rest >> 1 >> (63 - rice));
        cursor->at += (unsigned)(ones + 1 + rice);
    } else {
        cursor->at += LONGEST_PREFIX;
        value = (uint32_t)(window(cursor) >> 32);
        cursor->at += 32;
    }
    return (int32_t)(value >> 1 ^ (0u - (value & 1)));
}

static inline void read_state(Cursor *cursor, int field, uint32_t mean, State *state) {
    state->bit += mean + (uint32_t)read_difference(cursor, field);
    for (int i = 0; i < cursor->states->components; i++)
        state->dc[i] = (int16_t)(state->dc[i] + read_difference(cursor, field + 1 + i));
}

uint32_t read_row(Cursor *cursor, State *state) {
    uint32_t length = cursor->states->mean_length + (uint32_t)read_difference(cursor, ROW_LENGTH);
    read_state(cursor, ROW_STATE, cursor->states->mean_row, state);
    return length;
}

void read_cell(Cursor *cursor, uint32_t mean, State *state) { read_state(cursor, CELL_STATE, mean, state); }

static uint64_t little(const uint8_t *at, int bytes) {
    uint64_t value = 0;
    while (bytes--) value = value << 8 | at[bytes];
    return value;
}

int states_open(const uint8_t *index, size_t size, const Jpeg *jpeg, size_t jpeg_size, States *states) {
    if (size < HEADER || memcmp(index, "EJI1", 4) != 0 || little(index + 4, 8) != checksum64(index + 12, size - 12))
        return 0;
    states->jpeg_checksum = little(index + 12, 8), states->jpeg_size = (uint32_t)little(index + 20, 4);
    states->grid = (int)little(index + 24, 2), states->rows = (int)little(index + 26, 2);
    states->mean_row = (uint32_t)little(index + 28, 4), states->mean_length = (uint32_t)little(index + 32, 4);
    states->cells_at = (uint32_t)little(index + 36, 4);
    memcpy(states->rice, index + 40, FIELDS);
    for (int i = 0; i < FIELDS; i++)
        if (states->rice[i] > MAX_RICE) return 0;
    states->codes = index + HEADER, states->size = size - HEADER;
    if (states->grid < 1 || states->rows != jpeg->rows || states->jpeg_size != jpeg_size) return 0;
    states->per_row = (jpeg->columns + states->grid - 1) / states->grid, states->components = jpeg->components;
    return 1;
}
