/* Huffman decoding of segments of a scan, four at a time in one thread.
 *
 * A code's place is known when the one before it is decoded, so a core waits for each of them; while it waits for one
 * segment, it decodes the others'. One look into a table gives up to two coefficients and the end of the block, and a
 * step branches on nothing: where a block ends is as hard to foresee as the image itself. */

#include "jpeg_coder.h"

#include <stdlib.h>

enum { PEEK = 11, STEPS = 5 }; /* bits of a table's index, all that a step takes at most; steps for each load of bits */
enum { NOWHERE = 64 };         /* added to a coefficient's place, it is after the block */
enum { PAST = 127 };           /* as the advance of a step that the table doesn't have */

/* What a step does, from its lowest bits: 8, how many bits it takes; 8 and 8, how far from the last coefficient the
 * first and the second one are; 7, how far the step goes on; 1, whether the part of a block ends: its DC value, or the
 * rest; 16 and 16, the coefficients. */
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
    Step steps[1 << PEEK];
} Table;

struct Coder {
    Table tables[2 * 4];
    uint32_t parts; /* of a segment's blocks */
    size_t room;
    uint8_t *order; /* which table each of them has: 4 for those of AC, and its number */
};

static inline uint64_t bits_at(const uint8_t *bytes, uint32_t at) { return load_be64(bytes + (at >> 3)) << (at & 7); }

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
    int32_t code = (int32_t)(word >> 48);
    int length = 1;
    while (length <= 16 && code >= table->limit[length]) length++;
    if (length > 16) return (Code){0};
    int32_t place = (code >> (16 - length)) + table->offset[length];
    return place < 0 || place >= SYMBOLS ? (Code){0} : table->codes[place];
}

/* The step of all codes that lie within these bits, up to two coefficients. */
static Step step_of(const Table *table, int kind, uint64_t word) {
    unsigned taken = 0, place[2] = {NOWHERE, NOWHERE}, value[2] = {0, 0}, last = 0, count = 0, ends = 0;
    while (!ends) {
        Code code = find_code(table, word << taken);
        if (!code.bits || taken + code.bits + code.size > PEEK || (count == 2 && code.run != PAST)) break;
        taken += code.bits;
        ends = kind == DC || code.run == PAST;
        if (code.run != PAST) {
            place[count] = last += code.run;
            value[count++] = (uint16_t)value_of(word << taken, code.size);
        }
        taken += code.size;
    }
    if (!taken) return (Step)PAST << 24;
    return taken | place[0] << 8 | place[1] << 16 | last << 24 | ends << 31 | (Step)value[0] << 32 | (Step)value[1] << 48;
}

static void prepare(Table *table, const Huffman *wanted, int kind) {
    Huffman *made = &table->made;
    if (wanted->total == made->total && !memcmp(wanted->counts, made->counts, sizeof made->counts) &&
        !memcmp(wanted->symbols, made->symbols, (size_t)made->total))
        return;
    *made = *wanted;
    int32_t code = 0, place = 0;
    for (int length = 1; length <= 16; length++, code <<= 1) {
        table->offset[length] = place - code;
        for (int i = 0; i < wanted->counts[length - 1]; i++, code++, place++)
            table->codes[place] = code_of(kind, wanted->symbols[place], length);
        table->limit[length] = code << (16 - length);
    }
    for (uint64_t i = 0; i < 1 << PEEK; i++) table->steps[i] = step_of(table, kind, i << (64 - PEEK));
}

/* Where a segment's decoding is. */
typedef struct {
    const uint8_t *bytes;
    uint64_t word; /* its upper bits come next */
    uint32_t at, part;
    int last; /* coefficient of the block so far */
    int16_t *block;
    uint8_t *extents;
    uint32_t end;
} Lane;

/* One code, by its own branches. 0: there is none, or it would leave the block. */
static __attribute__((noinline)) int careful(const Coder *coder, Lane *lane) {
    uint64_t word = bits_at(lane->bytes, lane->at);
    int number = coder->order[lane->part], kind = number >> 2;
    Code code = find_code(&coder->tables[number], word);
    if (!code.bits || lane->at > lane->end) return 0;
    lane->at += code.bits + code.size;
    lane->word = bits_at(lane->bytes, lane->at);
    if (code.run != PAST) {
        lane->last += code.run;
        if (lane->last >= BLOCK) return 0;
        if (kind == DC || code.size) lane->block[NATURAL[lane->last]] = (int16_t)value_of(word << code.bits, code.size);
    }
    lane->extents[lane->part >> 1] = (uint8_t)lane->last;
    if (kind == DC || code.run == PAST || lane->last == BLOCK - 1)
        lane->part++, lane->block += kind == DC ? 0 : BLOCK, lane->last = 0;
    return 1;
}

static inline __attribute__((always_inline)) int step_on(const Coder *coder, Lane *lane) {
    Step step = coder->tables[coder->order[lane->part]].steps[lane->word >> (64 - PEEK)];
    int last = lane->last + (int)(step >> 24 & PAST);
    if (__builtin_expect(last >= BLOCK - 1, 0)) return careful(coder, lane);
    lane->block[NATURAL[lane->last + (int)(step >> 8 & 255)]] = (int16_t)(step >> 32);
    lane->block[NATURAL[lane->last + (int)(step >> 16 & 255)]] = (int16_t)(step >> 48);
    lane->extents[lane->part >> 1] = (uint8_t)last;
    lane->at += (uint32_t)(step & 63), lane->word <<= step & 63;
    uint32_t ends = (uint32_t)(step >> 31 & 1);
    lane->block += BLOCK * (ends & lane->part);
    lane->part += ends, lane->last = ends ? 0 : last;
    return 1;
}

/* Goes on until a lane is about to end; 0: one is damaged. */
static inline __attribute__((always_inline)) int turns(const Coder *coder, Lane *given, int count) {
    Lane lanes[LANES];
    memcpy(lanes, given, (size_t)count * sizeof *lanes);
    for (int good = 1; good;) {
        int near = 0;
        _Pragma("GCC unroll 4")
        for (int i = 0; i < count; i++) near |= lanes[i].part + STEPS >= coder->parts || lanes[i].at > lanes[i].end;
        if (near) {
            memcpy(given, lanes, (size_t)count * sizeof *lanes);
            return 1;
        }
        _Pragma("GCC unroll 4")
        for (int i = 0; i < count; i++) lanes[i].word = bits_at(lanes[i].bytes, lanes[i].at);
        for (int step = 0; step < STEPS; step++)
            _Pragma("GCC unroll 4")
        for (int i = 0; i < count; i++) good &= step_on(coder, &lanes[i]);
    }
    return 0;
}

static Lane lane_of(const Segment *segment) {
    Lane lane = {.bytes = segment->bytes, .at = segment->at, .end = segment->end};
    lane.block = segment->blocks, lane.extents = segment->extents;
    return lane;
}

/* The last codes of a lane, one by one. */
static int finish(const Coder *coder, Lane *lane) {
    while (lane->part < coder->parts)
        if (!careful(coder, lane)) return 0;
    return lane->at == lane->end;
}

int coder_run(Coder *coder, const Segment *segments, int count) {
    Lane lanes[LANES];
    int taken = 0, open = 0;
    while (open < LANES && taken < count) lanes[open++] = lane_of(&segments[taken++]);
    while (open) {
        int good = open == LANES ? turns(coder, lanes, LANES) : open > 1 ? turns(coder, lanes, 2) : turns(coder, lanes, 1);
        for (int i = 0; i < open && good; i++) {
            if (lanes[i].part + STEPS < coder->parts && lanes[i].at <= lanes[i].end) continue;
            good = finish(coder, &lanes[i]);
            if (taken < count)
                lanes[i] = lane_of(&segments[taken++]);
            else
                lanes[i--] = lanes[--open];
        }
        if (!good) return 0;
    }
    return 1;
}

int coder_open(Coder *coder, const Jpeg *jpeg, int mcus) {
    uint32_t blocks = 0, part = 0;
    for (int i = 0; i < jpeg->components; i++) blocks += (uint32_t)jpeg->blocks[i];
    coder->parts = 2 * blocks * (uint32_t)mcus;
    if (coder->room < coder->parts) {
        free(coder->order);
        coder->order = malloc(coder->room = coder->parts + coder->parts / 4);
        if (!coder->order) return coder->room = 0;
    }
    for (int i = 0; i < jpeg->components; i++) {
        for (int kind = DC; kind <= AC; kind++) {
            int number = jpeg->table[kind][i];
            prepare(&coder->tables[4 * kind + number], &jpeg->huffman[kind][number], kind);
            for (int block = 0; block < jpeg->blocks[i]; block++)
                coder->order[part + 2 * (uint32_t)block + (uint32_t)kind] = (uint8_t)(4 * kind + number);
        }
        part += 2 * (uint32_t)jpeg->blocks[i];
    }
    for (; part < coder->parts; part++) coder->order[part] = coder->order[part - 2 * blocks];
    return 1;
}

Coder *coder_make(void) { return calloc(1, sizeof(Coder)); }

void coder_free(Coder *coder) {
    if (coder) free(coder->order);
    free(coder);
}
