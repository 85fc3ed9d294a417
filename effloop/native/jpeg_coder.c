/* Huffman decoding of segments of scans, four at a time in one thread.
 *
 * A code's place is known when the one before it is decoded, so a core waits for each of them; while it waits for one
 * segment, it decodes the others'. One look into a table gives up to two coefficients and the end of the block, and a
 * step branches on nothing: where a block ends is as hard to foresee as the image itself. */

#include "jpeg_coder.h"

#include <stdlib.h>

#include "cpu.h"

enum { PEEK = 11 };              /* bits of a table's index */
enum { MOST = 18, STEPS = 3 };   /* bits that a step takes at most; steps for each load of bits */
enum { NOWHERE = 64 };           /* added to a coefficient's number, it is after the block */
enum { PAST = 127, ENDS = 128 }; /* as the advance of a step that the table doesn't have; beside the bits: a part ends */
enum { TABLES = 2 * 4, STOP = TABLES }; /* those of DC come first; after a segment's last part, a lane stays in STOP */

/* What a step does, from its lowest byte: how many bits it takes, and ENDS; how far from the coefficient before it the first
 * of two is; how far the last one is; how many of the bits taken, at their end, are the last one's value; two bytes, the first
 * one's value; two, what is added to those bits to give the last one's. */
typedef uint64_t Step;

/* One code: its bits, those that follow it, the coefficients it goes on by; the last is PAST of what ends a block. All 0:
 * there is none. */
typedef struct {
    uint8_t bits, size, run;
} Code;

typedef struct {
    Huffman made; /* what this is of */
    int32_t limit[17], offset[17]; /* first 16 bits of the first code longer than this; from a code to its symbol's place */
    Code codes[SYMBOLS];
} Table;

struct Coder {
    Step steps[TABLES + 1][1 << PEEK];
    Step tails[2][1 << PEEK]; /* for tables in the making */
    Table tables[TABLES];
    uint32_t parts; /* of a segment's blocks */
    size_t room;
    const Step **order; /* the steps of each of them, and of two more */
};

/* The bits from `at` on, and after them one that is set: where it is says how many were taken. */
static inline uint64_t bits_at(const uint8_t *bytes, int64_t at) { return (load_be64(bytes + (at >> 3)) | 1) << (at & 7); }

/* The number that follows a code, in the first `size` of these bits; up to 15. */
static inline int value_of(uint64_t word, int size) {
    int least = (int)(word >> 63) - 1; /* -1 where the first bit is 0: it is negative */
    return (int)(word >> 1 >> (63 - size)) - (((1 << size) - 1) & least);
}

static Code code_of(int kind, int symbol, int length) {
    int run = symbol >> 4, size = symbol & 15;
    if (kind == DC) return symbol <= 11 ? (Code){(uint8_t)length, (uint8_t)symbol, 0} : (Code){0};
    if (size > 10 || (!size && run > 0 && run < 15)) return (Code){0};
    return (Code){(uint8_t)length, (uint8_t)size, (uint8_t)(size ? run + 1 : run ? 16 : PAST)};
}

static Code find_code(const Table *table, uint64_t word) {
    int32_t code = (int32_t)(word >> 48), length = 1;
    for (int i = 1; i <= 16; i++) length += code >= table->limit[i];
    int32_t place = length > 16 ? SYMBOLS : (code >> (16 - length)) + table->offset[length];
    return place < 0 || place >= SYMBOLS ? (Code){0} : table->codes[place];
}

static void find_codes(Table *table, const Huffman *wanted, int kind) {
    int32_t code = 0, place = 0;
    table->made = *wanted;
    for (int length = 1; length <= 16; length++, code <<= 1) {
        table->offset[length] = place - code;
        for (int i = 0; i < wanted->counts[length - 1]; i++, code++, place++)
            table->codes[place] = code_of(kind, wanted->symbols[place], length);
        table->limit[length] = code << (16 - length);
    }
}

/* Steps are added up. */
static Step step_of(int taken, int place, int last, int size, int first, int value) {
    Step low = (Step)taken + ((Step)place << 8) + ((Step)last << 16) + ((Step)size << 24);
    return low + ((Step)(uint16_t)first << 32) + ((Step)value << 48);
}

/* The steps by their next `bits` bits, with up to so many coefficients, and `most` bits. Where a coefficient's value isn't
 * among them, its sign is, and nothing follows. `tails` are the steps with one coefficient less by fewer bits: those by n bits
 * begin at 1 << n. */
static void join(const Table *table, int kind, int bits, int coefficients, int most, const Step *tails, Step *steps) {
    memset(steps, 0, sizeof *steps << bits);
    for (int length = 1, place = 0, code = 0; length <= bits; length++, code <<= 1)
        for (int i = 0; i < table->made.counts[length - 1]; i++, code++, place++) {
            const Code each = table->codes[place];
            const int rest = bits - length, size = each.size, run = each.run;
            const int whole = length + size, taken = whole | (kind == DC || run == PAST ? ENDS : 0);
            Step *to = steps + ((size_t)code << rest);
            if (!each.bits || (run != PAST && !coefficients)) continue;
            if (run == PAST) {
                for (int j = 0; j < 1 << rest; j++) to[j] = (Step)taken;
            } else if (size > rest) {
                for (int j = 0; j < 1 << rest && rest && whole <= most; j++)
                    to[j] = step_of(taken, NOWHERE, run, size, 0, j >> (rest - 1) ? 0 : 1 - (1 << size));
            } else {
                const Step *tail = tails + ((size_t)1 << (rest - size));
                for (int own = 0; own < 1 << size; own++, to += 1 << (rest - size)) {
                    int value = 2 * own < 1 << size ? own + 1 - (1 << size) : own;
                    Step last = step_of(taken, NOWHERE, run, 0, 0, value);
                    Step first = step_of(taken, run - NOWHERE, run, 0, value, 0);
                    for (int j = 0; j < 1 << (rest - size); j++) to[j] = tail[j] + (tail[j] >> 16 & PAST ? first : last);
                }
            }
        }
}

/* Makes the steps of a table, unless it is that of the image before. */
static void prepare(Coder *coder, int number, const Huffman *wanted) {
    const int kind = number < TABLES / 2 ? DC : AC;
    Table *table = &coder->tables[number];
    Step *steps = coder->steps[number];
    const Huffman *made = &table->made;
    if (wanted->total == made->total && !memcmp(wanted->counts, made->counts, sizeof made->counts) &&
        !memcmp(wanted->symbols, made->symbols, (size_t)made->total))
        return;
    find_codes(table, wanted, kind);
    for (int level = 0; level <= kind; level++)
        for (int bits = 0; bits < PEEK; bits++)
            join(table, kind, bits, level, MOST - PEEK + bits, coder->tails[0], coder->tails[level] + ((size_t)1 << bits));
    join(table, kind, PEEK, kind + 1, MOST, coder->tails[kind], steps);
    for (int i = 0; i < 1 << PEEK; i++) {
        if (!steps[i]) steps[i] = step_of(0, 0, PAST, 0, 0, 0);
        if (kind == AC && !(steps[i] >> 16 & PAST)) steps[i] += step_of(0, NOWHERE, 1, 0, 0, 0); /* nothing is written over */
    }
}

/* Where a segment's decoding is. */
typedef struct {
    uint64_t word; /* its upper bits come next */
    int64_t at;    /* from where on it was loaded */
    uint32_t part, last; /* of the blocks, and coefficient of the block so far */
} Lane;

#define INLINE static inline __attribute__((always_inline))

INLINE int64_t reached(const Lane *lane) { return (lane->at & ~7) + __builtin_ctzll(lane->word); }

INLINE void load(const Segment *segment, Lane *lane, int64_t at) { lane->at = at, lane->word = bits_at(segment->bytes, at); }

/* One code, by its own branches. If there is none, or it would leave the block, the lane stops after its last part. */
static __attribute__((noinline)) void careful(const Segment *segment, Lane *lane) {
    const Coder *coder = segment->coder;
    const size_t number = (size_t)(coder->order[lane->part] - coder->steps[0]) >> PEEK;
    const int64_t at = reached(lane);
    const uint64_t word = bits_at(segment->bytes, at);
    const Code code = find_code(&coder->tables[number], word);
    const uint32_t last = lane->last + (code.run != PAST ? code.run : 0);
    if (!code.bits || at > segment->end || last >= BLOCK) {
        lane->part = coder->parts + 1;
        return;
    }
    const int16_t value = (int16_t)value_of(word << code.bits, code.size);
    const uint32_t ends = number < TABLES / 2 || code.run == PAST || last == BLOCK - 1;
    load(segment, lane, at + code.bits + code.size);
    if (segment->ends)
        segment->values[lane->part] = value, segment->ends[lane->part] = (uint32_t)lane->at;
    else if (number < TABLES / 2 || code.size)
        segment->values[lane->part * (BLOCK / PARTS) + PLACES[last] - BLOCK / PARTS] = value;
    lane->part += ends, lane->last = ends ? 0 : last;
}

INLINE void step_on(const Segment *segment, Lane *lane, const Step *const *order, int16_t *values, uint32_t *ends) {
    Step step = order[lane->part][lane->word >> (64 - PEEK)];
    uint32_t last = lane->last + (uint8_t)(step >> 16);
    if (__builtin_expect(last >= BLOCK - 1, 0)) {
        Lane slow = *lane;
        careful(segment, &slow);
        *lane = slow;
        return;
    }
    uint64_t bits = lane->word >> (-step & 63) & (((uint64_t)1 << (uint8_t)(step >> 24)) - 1);
    int16_t value = (int16_t)(bits + (step >> 48));
    lane->word <<= step & 63;
    if (ends) {
        values[lane->part] = value, ends[lane->part] = (uint32_t)reached(lane);
    } else {
        int16_t *part = values + lane->part * (BLOCK / PARTS) - BLOCK / PARTS;
        part[PLACES[lane->last + (uint8_t)(step >> 8)]] = (int16_t)(step >> 32);
        part[PLACES[last]] = value;
    }
    lane->part += (uint8_t)step / ENDS, lane->last = step & ENDS ? 0 : last;
}

#define EACH(i, count) _Pragma("GCC unroll 4") for (int i = 0; i < count; i++)

/* Goes on until a lane has ended. */
INLINE void turns(const Segment *segments, Lane *given, const int count, const int notes) {
    Lane lanes[LANES];
    const uint8_t *bytes[LANES];
    const Step *const *order[LANES];
    int16_t *values[LANES];
    uint32_t *ends[LANES], parts[LANES];
    int64_t end[LANES];
    EACH(i, count) {
        const Segment *own = &segments[i];
        lanes[i] = given[i], bytes[i] = own->bytes, end[i] = own->end, values[i] = own->values, ends[i] = own->ends;
        order[i] = own->coder->order, parts[i] = own->coder->parts;
    }
    for (;;) {
        int stopped = 0;
        EACH(i, count) {
            int64_t at = lanes[i].at = reached(&lanes[i]);
            stopped |= (lanes[i].part >= parts[i]) | (at > end[i]);
            lanes[i].word = bits_at(bytes[i], at);
        }
        if (stopped) break;
        for (int step = 0; step < STEPS; step++)
            EACH(i, count) step_on(&segments[i], &lanes[i], order[i], values[i], notes ? ends[i] : NULL);
    }
    EACH(i, count) given[i] = lanes[i];
}

static Lane lane_of(const Segment *segment) {
    Lane lane = {0};
    load(segment, &lane, segment->at);
    return lane;
}

INLINE void run(Segment *segments, int open, int (*next)(void *, Segment *), void *from) {
    Lane lanes[LANES];
    const int notes = segments[0].ends != NULL;
    for (int i = 0; i < open; i++) lanes[i] = lane_of(&segments[i]);
    while (open) {
        if (notes)
            open == LANES ? turns(segments, lanes, LANES, 1) : turns(segments, lanes, 1, 1);
        else if (open == LANES)
            turns(segments, lanes, LANES, 0);
        else
            open > 1 ? turns(segments, lanes, 2, 0) : turns(segments, lanes, 1, 0);
        for (int i = 0; i < open; i++) {
            const uint32_t parts = segments[i].coder->parts;
            const int64_t at = reached(&lanes[i]);
            if (lanes[i].part < parts && at <= segments[i].end) continue;
            segments[i].at = lanes[i].part == parts && at <= segments[i].end ? at : DAMAGED;
            if (next(from, &segments[i]))
                lanes[i] = lane_of(&segments[i]);
            else
                segments[i] = segments[--open], lanes[i--] = lanes[open];
        }
    }
}

typedef int Next(void *from, Segment *);

static void run_plain(Segment *segments, int count, Next *next, void *from) { run(segments, count, next, from); }

#if defined(__x86_64__)
__attribute__((target("avx2,bmi,bmi2"))) /* which come together, and have shifts that set no flags */
static void run_avx2(Segment *segments, int count, Next *next, void *from) { run(segments, count, next, from); }
#else
#define run_avx2 run_plain
#endif

void coder_run(Segment *segments, int count, Next *next, void *from) {
    (cpu_has(CPU_AVX2) ? run_avx2 : run_plain)(segments, count, next, from);
}

int coder_open(Coder *coder, const Jpeg *jpeg, int mcus) {
    uint32_t blocks = 0, part = 0;
    for (int i = 0; i < jpeg->components; i++) blocks += (uint32_t)jpeg->blocks[i];
    coder->parts = PARTS * blocks * (uint32_t)mcus;
    size_t size = (coder->parts + PARTS) * sizeof *coder->order;
    if (coder->room < size) {
        free(coder->order);
        coder->order = malloc(coder->room = size + size / 4);
        if (!coder->order) return coder->room = 0;
    }
    for (int i = 0; i < jpeg->components; i++) {
        for (int kind = DC; kind <= AC; kind++) {
            int number = 4 * kind + jpeg->table[kind][i];
            prepare(coder, number, &jpeg->huffman[kind][jpeg->table[kind][i]]);
            for (int block = 0; block < jpeg->blocks[i]; block++)
                coder->order[part + PARTS * (uint32_t)block + (uint32_t)kind] = coder->steps[number];
        }
        part += PARTS * (uint32_t)jpeg->blocks[i];
    }
    for (; part < coder->parts; part++) coder->order[part] = coder->order[part - PARTS * blocks];
    coder->order[part] = coder->order[part + 1] = coder->steps[STOP]; /* which are 0: a lane stays there */
    return 1;
}

Coder *coder_make(void) { return calloc(1, sizeof(Coder)); }

void coder_free(Coder *coder) {
    if (coder) free(coder->order);
    free(coder);
}
