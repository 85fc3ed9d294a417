/* Huffman decoding of several segments of JPEG scans at a time, in one thread.
 *
 * Where a code begins is known only once the one before it is decoded, so a core that decodes a single segment mostly waits.
 * Here it decodes up to four in turns, each in a lane of its own. A step looks up the next PEEK bits of a lane, which gives up
 * to two coefficients and the end of the block. It has no branch that depends on the image, as that can't be predicted. */

#include "jpeg_coder.h"

#include "cpu.h"
#include "scratch.h"

enum { PEEK = 11 };              /* bits that are looked up */
enum { MOST = 18, STEPS = 3 };   /* bits that a step consumes at most; steps for each load of 56 bits */
enum { NOWHERE = 64 };           /* a distance that leads past the end of the block, where anything may be written */
enum { PAST = 127, ENDS = 128 }; /* the distance `last` where the table has no step; a flag: the part ends */
enum { TABLES = 2 * 4, STOP = TABLES }; /* Huffman tables, DC first; the steps after a segment's last part, which do nothing */

/* What to do for the next bits. From the lowest byte up:
 *   taken  1 byte   bits consumed; plus ENDS if the part ends
 *   place  1 byte   distance from the coefficient before to the first of two, in zigzag order; NOWHERE if there is only one
 *   last   1 byte   distance from the coefficient before to the last one; PAST if there is no such step
 *   size   1 byte   bits of the last one's value that must still be read; they are the last of those consumed
 *   first  2 bytes  value of the first one
 *   value  2 bytes  added to the `size` bits, gives the value of the last one
 * With the usual AC table for luma 01 10, 00 1, 1010 are a 2, a 1 and the end of the block: taken 11 + ENDS, place 1, last 2,
 * size 0, first 2, value 1; and 1111110110 0, a code and the sign of eight bits, is taken 18, place NOWHERE, last 1, size 8,
 * first 0, value -255. */
typedef uint64_t Step;

/* A Huffman code: its length, the bits of the value that follows, and the distance from the coefficient before, or PAST for the
 * end of the block. All 0: there is no such code. */
typedef struct {
    uint8_t bits, size, run;
} Code;

typedef struct {
    Huffman made; /* what the codes and the steps were made from */
    int32_t limit[17], offset[17]; /* by length: the first 16 bits that begin a longer code; from a code to its place in `codes` */
    Code codes[SYMBOLS];
} Table;

struct Coder {
    Step steps[TABLES + 1][1 << PEEK];
    Step tails[2][1 << PEEK]; /* what may follow a coefficient, while steps are made */
    Table tables[TABLES];
    uint32_t parts; /* in a segment */
    Memory memory; /* of `order` */
    const Step **order; /* the steps for each part of a segment, then twice STOP */
};

uint8_t *unstuff(const uint8_t *from, const uint8_t *end, uint8_t *to) {
    const uint8_t *found = from;
    while (found && from < end) {
        found = memchr(from, 0xFF, (size_t)(end - from));
        size_t size = (size_t)((found ? found + 1 : end) - from);
        memcpy(to, from, size), to += size, from += size;
        if (found && from < end && *from++ != 0) return NULL;
    }
    memset(to, 0, SCAN_SLACK);
    return to;
}

/* The bits from `at` on, then a 1: as bits are shifted out, its place tells how many. */
static inline uint64_t bits_at(const uint8_t *bytes, int64_t at) { return (load_be64(bytes + (at >> 3)) | 1) << (at & 7); }

/* The value in the first `size` bits, of which there are at most 15. */
static inline int value_of(uint64_t word, int size) {
    int negative = (int)(word >> 63) - 1; /* -1 if the first bit is 0, else 0 */
    return (int)(word >> 1 >> (63 - size)) - (((1 << size) - 1) & negative);
}

static Code code_of(int kind, int symbol, int length) {
    int run = symbol >> 4, size = symbol & 15;
    if (kind == DC) return symbol <= 11 ? (Code){(uint8_t)length, (uint8_t)symbol, 0} : (Code){0};
    if (size > 10 || (!size && run > 0 && run < 15)) return (Code){0};
    return (Code){(uint8_t)length, (uint8_t)size, (uint8_t)(size ? run + 1 : run ? 16 : PAST)};
}

/* The code that these bits begin with. */
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

/* A step, or what must be added to one. */
static Step step_of(int taken, int place, int last, int size, int first, int value) {
    Step low = (Step)taken + ((Step)place << 8) + ((Step)last << 16) + ((Step)size << 24);
    return low + ((Step)(uint16_t)first << 32) + ((Step)value << 48);
}

/* Makes steps for all `bits` bits, of at most so many coefficients, which consume at most `most` bits. A coefficient whose sign
 * but not whole value is among the bits is the last of its step. `tails` has what may follow the first coefficient: steps
 * of one coefficient less, or with a `last` of 0 of none; those for n bits begin at 1 << n. */
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
                if (!coefficients) return; /* no other code has none */
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

/* Makes the steps of a table, unless they are still there from the image before. */
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
        if (kind == AC && !(steps[i] >> 16 & PAST)) steps[i] += step_of(0, NOWHERE, 1, 0, 0, 0); /* overwrites only zeros */
    }
}

/* How far the decoding of a segment has come. */
typedef struct {
    uint64_t word;       /* from bits_at, without the bits that were consumed since */
    int64_t at;          /* the bit that it was loaded from */
    uint32_t part, last; /* the part of the segment; its last coefficient so far */
} Lane;

#define INLINE static inline __attribute__((always_inline))

INLINE int64_t reached(const Lane *lane) { return (lane->at & ~7) + __builtin_ctzll(lane->word); }

INLINE Lane lane_of(const Segment *segment) { return (Lane){bits_at(segment->bytes, segment->at), segment->at, 0, 0}; }

/* Decodes a single code, for which there is no step or which may be a block's last coefficient. A code that doesn't exist or
 * leaves the block sends the lane past its last part. */
static __attribute__((noinline)) void decode_code(const Segment *segment, Lane *lane) {
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
    lane->at = at + code.bits + code.size, lane->word = bits_at(segment->bytes, lane->at);
    if (segment->ends)
        segment->values[lane->part] = value, segment->ends[lane->part] = (uint32_t)lane->at;
    else if (number < TABLES / 2 || code.size)
        segment->values[lane->part * (BLOCK / PARTS) + PLACES[last] - BLOCK / PARTS] = value;
    lane->part += ends, lane->last = ends ? 0 : last;
}

/* `alone` is NULL; or the steps for the lane's part, if it is the only lane: as nothing else is done while they are looked up,
 * a branch is faster then, though it is often mispredicted. */
INLINE void take_step(const Segment *segment, Lane *lane, const Step *const *order, int16_t *values, uint32_t *ends,
                      const Step **alone) {
    Step step = (alone ? *alone : order[lane->part])[lane->word >> (64 - PEEK)];
    uint32_t last = lane->last + (uint8_t)(step >> 16);
    if (__builtin_expect(last >= BLOCK - 1, 0)) {
        Lane slow = *lane;
        decode_code(segment, &slow);
        *lane = slow;
        if (alone) *alone = order[lane->part];
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
    lane->last = alone || !(step & ENDS) ? last : 0;
    if (!alone)
        lane->part += (uint8_t)step / ENDS;
    else if (step & ENDS)
        *alone = order[++lane->part], lane->last = 0;
}

#define EACH(i, count) _Pragma("GCC unroll 4") for (int i = 0; i < count; i++)

/* Decodes in `count` lanes, until one of them has come to its end. */
INLINE void take_turns(const Segment *segments, Lane *given, const int count, const int with_ends) {
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
    const Step *alone = order[0][lanes[0].part];
    for (;;) {
        int stopped = 0;
        EACH(i, count) {
            int64_t at = lanes[i].at = reached(&lanes[i]);
            stopped |= (lanes[i].part >= parts[i]) | (at > end[i]);
            lanes[i].word = bits_at(bytes[i], at);
        }
        if (stopped) break;
        for (int step = 0; step < STEPS; step++)
            EACH(i, count) {
                uint32_t *own = with_ends ? ends[i] : NULL;
                take_step(&segments[i], &lanes[i], order[i], values[i], own, count == 1 ? &alone : NULL);
            }
    }
    EACH(i, count) given[i] = lanes[i];
}

INLINE void run(Segment *segments, int open, Next *next, void *from) {
    Lane lanes[LANES];
    const int with_ends = segments[0].ends != NULL;
    for (int i = 0; i < open; i++) lanes[i] = lane_of(&segments[i]);
    while (open) {
        if (with_ends)
            open == LANES ? take_turns(segments, lanes, LANES, 1) : take_turns(segments, lanes, 1, 1);
        else if (open == LANES)
            take_turns(segments, lanes, LANES, 0);
        else
            open > 1 ? take_turns(segments, lanes, 2, 0) : take_turns(segments, lanes, 1, 0);
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

static void run_plain(Segment *segments, int count, Next *next, void *from) { run(segments, count, next, from); }

#if defined(__x86_64__)
__attribute__((target("avx2,bmi,bmi2"))) /* BMI, whose shifts leave the flags alone, comes with AVX2 */
static void run_avx2(Segment *segments, int count, Next *next, void *from) { run(segments, count, next, from); }
#else
#define run_avx2 run_plain
#endif

void coder_run(Segment segments[LANES], int count, Next *next, void *from) {
    (cpu_has(CPU_AVX2) ? run_avx2 : run_plain)(segments, count, next, from);
}

int coder_open(Coder *coder, const Jpeg *jpeg, int mcus) {
    uint32_t blocks = 0, part = 0;
    for (int i = 0; i < jpeg->components; i++) blocks += (uint32_t)jpeg->blocks[i];
    coder->parts = PARTS * blocks * (uint32_t)mcus;
    coder->order = (const Step **)(void *)reserve(&coder->memory, (coder->parts + PARTS) * sizeof *coder->order);
    if (!coder->order) return 0;
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
    coder->order[part] = coder->order[part + 1] = coder->steps[STOP]; /* all 0: a lane stays there */
    return 1;
}

Coder *coder_make(void) { return calloc(1, sizeof(Coder)); }

void coder_free(Coder *coder) {
    if (coder) free(coder->memory.bytes);
    free(coder);
}
