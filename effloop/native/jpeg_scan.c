/* Walks through the entropy-coded data of a JPEG, row by row, for where blocks begin and for their DC coefficients. */

#include "jpeg_scan.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "scratch.h"

enum { MAX_STATES = 1 << 22 }; /* 50 MB */

struct Walk {
    Coder *coder;
    const Jpeg *jpeg;
    int blocks, row;   /* blocks in an MCU; the row of MCUs that comes next */
    uint32_t total;    /* parts of blocks in the image */
    int64_t end, left; /* bits of the scan; how many are left after its last part, or DAMAGED */
    Memory memory;     /* the scan from `unstuff`, and then: */
    uint32_t *ends;    /* of each part, in bits */
    int16_t *values;   /* of each part */
};

int walk_open(Walk *walk, const uint8_t *data, const Jpeg *jpeg, Segment *segment) {
    size_t mcus = (size_t)jpeg->columns * (size_t)jpeg->rows, size = jpeg->scan_end - jpeg->scan_at, parts;
    walk->blocks = 0;
    for (int i = 0; i < jpeg->components; i++) walk->blocks += jpeg->blocks[i];
    parts = mcus * PARTS * (size_t)walk->blocks;
    if (mcus >= MAX_STATES || parts > 8 * size || jpeg->interval) return 0; /* each part takes at least a bit */
    size_t bytes = (size + SCAN_SLACK + 7) / 8 * 8, words = parts + PARTS;
    uint8_t *memory = reserve(&walk->memory, bytes + words * sizeof(uint32_t) + words * sizeof(int16_t));
    if (!memory || !coder_open(walk->coder, jpeg, jpeg->columns)) return -1;
    walk->ends = (uint32_t *)(void *)(memory + bytes), walk->values = (int16_t *)(void *)(walk->ends + words);
    walk->jpeg = jpeg, walk->row = 0, walk->total = (uint32_t)parts, walk->left = DAMAGED;
    const uint8_t *end = unstuff(data + jpeg->scan_at, data + jpeg->scan_end, memory);
    walk->end = end ? 8 * (end - memory) : 0;
    *segment = (Segment){walk->coder, memory, 0, walk->end, walk->values, walk->ends, NULL, 0};
    return walk->end != 0;
}

int walk_on(Walk *walk, Segment *segment) {
    const int parts = PARTS * walk->blocks * walk->jpeg->columns;
    segment->values += parts, segment->ends += parts;
    if (++walk->row < walk->jpeg->rows) return segment->at != DAMAGED;
    walk->left = segment->at == DAMAGED ? DAMAGED : walk->end - segment->at;
    return 0;
}

int walk_values(const Walk *walk, int16_t *values) {
    const int16_t *difference = walk->values;
    int last[MAX_COMPONENTS] = {0};
    if (walk->left < 0 || walk->left > 7) return 0;
    for (uint32_t part = 0; part < walk->total;)
        for (int i = 0; i < walk->jpeg->components; i++)
            for (int j = 0; j < walk->jpeg->blocks[i]; j++, part += PARTS) {
                last[i] += difference[part];
                if (last[i] < -1024 || last[i] > 1023) return 0; /* the difference of any two can be coded */
                *values++ = (int16_t)last[i];
            }
    return 1;
}

Walk *walk_make(void) {
    Walk *walk = calloc(1, sizeof *walk);
    if (walk && (walk->coder = coder_make())) return walk;
    free(walk);
    return NULL;
}

void walk_free(Walk *walk) {
    if (!walk) return;
    coder_free(walk->coder);
    free(walk->memory.bytes), free(walk);
}

/* Adds the stuffed bytes to the states' positions. A state at the first bit of a byte comes after a byte stuffed before it. */
static void count_stuffed(State *states, size_t count, const uint8_t *bytes) {
    uint32_t stuffed = 0, byte = 0;
    for (size_t i = 0; i < count; i++) {
        for (; byte < states[i].bit >> 3; byte++) stuffed += bytes[byte] == 0xFF;
        states[i].bit += 8 * stuffed;
    }
}

static _Atomic(Walk *) spare; /* kept by scan_states, as the next JPEG may have the same tables */

static int walk_next(void *walk, Segment *segment) { return walk_on(walk, segment); }

int scan_states(const uint8_t *data, const Jpeg *jpeg, State **found) {
    const size_t count = (size_t)jpeg->columns * (size_t)jpeg->rows + 1;
    Walk *walk = atomic_exchange(&spare, NULL);
    Segment lanes[LANES];
    if (!walk) walk = walk_make();
    int complete = walk ? walk_open(walk, data, jpeg, lanes) : -1;
    *found = NULL;
    if (complete == 1) {
        coder_run(lanes, 1, walk_next, walk);
        State *states = *found = calloc(count, sizeof *states);
        int16_t *values = malloc(walk->total / PARTS * sizeof *values), *next = values;
        complete = states && values ? walk_values(walk, values) : -1;
        for (size_t i = 1; i < count && complete == 1; i++) {
            states[i].bit = walk->ends[PARTS * i * (size_t)walk->blocks - 1];
            for (int j = 0; j < jpeg->components; j++) states[i].dc[j] = (next += jpeg->blocks[j])[-1];
        }
        if (complete == 1) count_stuffed(states, count, walk->memory.bytes);
        free(values);
    }
    if (complete != 1) free(*found), *found = NULL;
    walk_free(atomic_exchange(&spare, walk));
    return complete;
}
