/* Dummy MCUs: codes of a JPEG's own tables, extended where they lack one. */

#include "jpeg_dummy.h"

/* Add symbols that a table lacks as codes of 16 bits, which come last; the code of ones only stays unused. */
static int extend(Huffman *table, const uint8_t *symbols, int count) {
    uint32_t used = 0;
    for (int length = 1; length <= 16; length++) used += (uint32_t)table->counts[length - 1] << (16 - length);
    for (int i = 0; i < count; i++) {
        if (memchr(table->symbols, symbols[i], (size_t)table->total)) continue;
        if (used + 1 >= 1u << 16 || table->total == SYMBOLS || table->counts[15] == 255) return 0;
        table->symbols[table->total++] = symbols[i];
        table->counts[15]++, used++;
    }
    return 1;
}

static void read_dc_codes(const Huffman *table, Code *codes) {
    uint32_t code = 0;
    for (int length = 1, place = 0; length <= 16; length++, code <<= 1)
        for (int i = 0; i < table->counts[length - 1]; i++, code++, place++)
            if (table->symbols[place] < 12) codes[table->symbols[place]] = (Code){code, length};
}

/* The end of a block; and, if wanted, the shortest coefficient with an odd number of bits, of which seven fit. */
static void read_ac_codes(const Huffman *table, Code *end, Code *filler) {
    uint32_t code = 0;
    for (int length = 1, place = 0; length <= 16; length++, code <<= 1)
        for (int i = 0; i < table->counts[length - 1]; i++, code++, place++) {
            int symbol = table->symbols[place], bits = symbol & 15, total = length + bits;
            if (symbol == END_OF_BLOCK) *end = (Code){code, length};
            if (!filler || !bits || bits > 10 || symbol >> 4 > 7 || total % 2 == 0) continue;
            if (!filler->length || total < filler->length) *filler = (Code){code << bits, total};
        }
}

int dummies_prepare(Jpeg *jpeg, Dummies *dummies) {
    static const uint8_t categories[12] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, coefficients[2] = {END_OF_BLOCK, 1};
    dummies->components = jpeg->components, dummies->length = 0, dummies->filler.length = 0;
    for (int i = 0; i < jpeg->components; i++) {
        Huffman *dc = &jpeg->huffman[DC][jpeg->table[DC][i]], *ac = &jpeg->huffman[AC][jpeg->table[AC][i]];
        if (!extend(dc, categories, 12) || !extend(ac, coefficients, 2)) return 0;
    }
    for (int i = 0; i < jpeg->components; i++) {
        read_dc_codes(&jpeg->huffman[DC][jpeg->table[DC][i]], dummies->dc[i]);
        read_ac_codes(&jpeg->huffman[AC][jpeg->table[AC][i]], &dummies->end[i], i ? NULL : &dummies->filler);
        Code none = dummies->dc[i][0], end = dummies->end[i];
        dummies->empty[i] = (Code){none.code << end.length | end.code, none.length + end.length};
        dummies->others[i] = jpeg->blocks[i] - 1;
        dummies->length += end.length + dummies->others[i] * dummies->empty[i].length;
    }
    if (!dummies->filler.length) return 0;
    for (int i = 7; i >= 0; i--) dummies->fillers[dummies->filler.length * i & 7] = i;
    return 1;
}

/* A DC code with the bits of the difference; length 0 if there is none. */
static Code dc_code(const Code *codes, int difference) {
    int size = bit_length((uint32_t)(difference < 0 ? -difference : difference));
    if (size > 11) return (Code){0, 0};
    uint32_t bits = (uint32_t)(difference < 0 ? difference + (1 << size) - 1 : difference);
    return (Code){codes[size].code << size | bits, codes[size].length + size};
}

int put_dummy(Writer *writer, const Dummies *dummies, const int16_t *from, const int16_t *to, int phase) {
    Code codes[MAX_COMPONENTS];
    int length = writer->bits + dummies->length, count = 0;
    for (int i = 0; i < dummies->components; i++) {
        codes[i] = dc_code(dummies->dc[i], to[i] - from[i]);
        if (!codes[i].length) return 0;
        length += codes[i].length;
    }
    if (phase >= 0) count = dummies->fillers[(phase - length) & 7];
    for (int i = 0; i < dummies->components; i++) {
        put_bits(writer, codes[i].code, codes[i].length);
        for (; count; count--) put_bits(writer, dummies->filler.code, dummies->filler.length);
        put_bits(writer, dummies->end[i].code, dummies->end[i].length);
        for (int j = 0; j < dummies->others[i]; j++)
            put_bits(writer, dummies->empty[i].code, dummies->empty[i].length);
    }
    return 1;
}
