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

enum { WINDOW = 57 }; /* bits that a load gives at any offset in a byte */

/* Bits of the codes in a register: they are loaded once for several codes. */
typedef struct {
    uint64_t word;
    int used;
} Loaded;

static inline int32_t read_difference(Cursor *cursor, Loaded *loaded, int rice) {
    int ones = __builtin_clzll(~loaded->word | 1);
    if (loaded->used + ones + 1 + rice > WINDOW || ones >= LONGEST_PREFIX) {
        cursor->at += (unsigned)loaded->used;
        *loaded = (Loaded){window(cursor), 0};
        ones = __builtin_clzll(~loaded->word | 1);
    }
    uint32_t value;
    if (ones < LONGEST_PREFIX) {
        uint64_t rest = loaded->word << ones << 1;
        value = (uint32_t)ones << rice | (uint32_t)(rest >> 1 >> (63 - rice));
        loaded->word = rest << rice, loaded->used += ones + 1 + rice;
    } else {
        value = (uint32_t)(loaded->word << LONGEST_PREFIX >> 32);
        loaded->word = 0, loaded->used = WINDOW;
        cursor->at -= WINDOW - LONGEST_PREFIX - 32;
    }
    return (int32_t)(value >> 1 ^ (0u - (value & 1)));
}

static inline void read_state(Cursor *cursor, Loaded *loaded, const uint8_t *rice, uint32_t mean, State *state) {
    state->bit += mean + (uint32_t)read_difference(cursor, loaded, rice[0]);
    for (int i = 0; i < cursor->states->components; i++)
        state->dc[i] = (int16_t)(uint16_t)((uint32_t)state->dc[i] + (uint32_t)read_difference(cursor, loaded, rice[1 + i]));
}

uint32_t read_row(Cursor *cursor, State *state) {
    const States *states = cursor->states;
    Loaded loaded = {window(cursor), 0};
    uint32_t length = states->mean_length + (uint32_t)read_difference(cursor, &loaded, states->rice[ROW_LENGTH]);
    read_state(cursor, &loaded, states->rice + ROW_STATE, states->mean_row, state);
    cursor->at += (unsigned)loaded.used;
    return length;
}

void read_cells(Cursor *cursor, int count, uint32_t mean, State *state) {
    Loaded loaded = {window(cursor), 0};
    for (; count > 0; count--) read_state(cursor, &loaded, cursor->states->rice + CELL_STATE, mean, state);
    cursor->at += (unsigned)loaded.used;
}

static uint64_t little(const uint8_t *at, int bytes) {
    uint64_t value = 0;
    while (bytes--) value = value << 8 | at[bytes];
    return value;
}

uint32_t mean_row_bits(const Jpeg *jpeg) { return (uint32_t)((jpeg->scan_end - jpeg->scan_at) * 8 / (size_t)jpeg->rows); }

int states_open(const uint8_t *index, size_t size, const Jpeg *jpeg, States *states) {
    if (size < HEADER || size > 1u << 28 || memcmp(index, "EJI1", 4) != 0) return 0;
    if (little(index + 4, 4) != (uint32_t)checksum64(index + 8, size - 8)) return 0;
    states->codes = index + HEADER, states->size = size - HEADER;
    states->jpeg_checksum = little(index + 8, 8);
    states->grid = (int)little(index + 16, 2);
    uint32_t row_bytes = (uint32_t)little(index + 18, 4);
    memcpy(states->rice, index + 22, FIELDS);
    for (int i = 0; i < FIELDS; i++)
        if (states->rice[i] > MAX_RICE) return 0;
    if (states->grid < 1 || row_bytes > states->size) return 0;
    states->cells_at = 8 * row_bytes;
    states->rows = jpeg->rows, states->components = jpeg->components;
    states->per_row = (jpeg->columns + states->grid - 1) / states->grid;
    states->mean_row = mean_row_bits(jpeg);
    states->mean_length = (uint32_t)((states->size - row_bytes) * 8 / (size_t)states->rows);
    return 1;
}
