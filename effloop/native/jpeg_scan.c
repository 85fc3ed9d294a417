/* Walking through a JPEG's entropy-coded data, row by row: where blocks begin, and their DC values. */

#include "jpeg_scan.h"

#include <stdatomic.h>
#include <stdlib.h>

enum { MAX_STATES = 1 << 22 }; /* 50 MB */

struct Walk {
    Coder *coder;
    const Jpeg *jpeg;
    int blocks, row;   /* in an MCU; the one that is walked through */
    uint32_t total;    /* parts of blocks */
    int64_t end, left; /* bits of the scan; after its last part, or DAMAGED */
    uint8_t *bytes;    /* the scan without stuffed bytes */
    uint32_t *ends;    /* of each part, in bits */
    uint32_t *marks;   /* offsets of its bytes FF, and UINT32_MAX */
    int16_t *values;   /* of each part */
    size_t room;
};

/* The scan without stuffed bytes; returns its size, 0 if there is a marker in it. `marks` gets the offsets of its bytes
 * FF, and UINT32_MAX. */
static size_t unstuff(const uint8_t *data, const Jpeg *jpeg, uint8_t *bytes, uint32_t *marks) {
    const uint8_t *from = data + jpeg->scan_at, *end = data + jpeg->scan_end;
    uint8_t *to = bytes;
    for (;;) {
        const uint8_t *found = memchr(from, 0xFF, (size_t)(end - from));
        size_t part = (size_t)((found ? found + 1 : end) - from);
        memcpy(to, from, part), to += part, from += part;
        *marks++ = found ? (uint32_t)(to - bytes - 1) : UINT32_MAX;
        if (!found) break;
        if (from == end || *from++ != 0) return 0;
    }
    memset(to, 0, SCAN_SLACK);
    return (size_t)(to - bytes);
}

/* Memory for an image: its scan, marks, and the parts of its blocks. */
static int reserve(Walk *walk, size_t size, size_t parts) {
    size_t bytes = (size + SCAN_SLACK + 7) / 8 * 8, words = size / 2 + 2 + parts;
    size_t room = bytes + words * sizeof(uint32_t) + parts * sizeof(int16_t);
    if (walk->room < room) {
        uint8_t *memory = malloc(room + room / 4);
        if (!memory) return 0;
        free(walk->bytes);
        walk->bytes = memory, walk->room = room + room / 4;
    }
    walk->ends = (uint32_t *)(void *)(walk->bytes + bytes), walk->marks = walk->ends + parts;
    walk->values = (int16_t *)(void *)(walk->ends + words);
    return 1;
}

int walk_open(Walk *walk, const uint8_t *data, const Jpeg *jpeg, Segment *segment) {
    size_t mcus = (size_t)jpeg->columns * (size_t)jpeg->rows, size = jpeg->scan_end - jpeg->scan_at, parts;
    walk->blocks = 0;
    for (int i = 0; i < jpeg->components; i++) walk->blocks += jpeg->blocks[i];
    parts = mcus * PARTS * (size_t)walk->blocks;
    if (mcus >= MAX_STATES || parts > 8 * size || jpeg->interval) return 0; /* each part has a bit */
    if (!reserve(walk, size, parts + PARTS) || !coder_open(walk->coder, jpeg, jpeg->columns)) return -1;
    walk->jpeg = jpeg, walk->row = 0, walk->total = (uint32_t)parts, walk->left = DAMAGED;
    walk->end = 8 * (int64_t)unstuff(data, jpeg, walk->bytes, walk->marks);
    *segment = (Segment){walk->coder, walk->bytes, 0, walk->end, walk->values, walk->ends};
    return walk->end != 0;
}

int walk_has(const Walk *walk, const Segment *segment) { return segment->coder == walk->coder; }

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
                if (last[i] < -1024 || last[i] > 1023) return 0; /* any two have a difference that can be coded */
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
    free(walk->bytes), free(walk);
}

/* Count the stuffed bytes, too. A state at a byte's first bit is after what is stuffed before it. */
static void count_stuffed(State *states, size_t count, const uint32_t *marks) {
    uint32_t stuffed = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t byte = states[i].bit >> 3;
        while (marks[stuffed] < byte) stuffed++;
        states[i].bit += 8 * stuffed;
    }
}

static _Atomic(Walk *) spare; /* for scan_states: its tables may fit again */

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
        if (complete == 1) count_stuffed(states, count, walk->marks);
        free(values);
    }
    if (complete != 1) free(*found), *found = NULL;
    walk_free(atomic_exchange(&spare, walk));
    return complete;
}
