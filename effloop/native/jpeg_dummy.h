/* MCUs that carry no picture: they bring the DC predictors and the bit position to where a copied part begins. */

#ifndef EFFLOOP_JPEG_DUMMY_H
#define EFFLOOP_JPEG_DUMMY_H

#include "jpeg.h"

/* Entropy-coded data being written, with its stuffed bytes. The caller sees to the room. */
typedef struct {
    uint8_t *at;
    uint64_t pending; /* its lower `bits` bits aren't written yet: less than 8 */
    int bits;
} Writer;

typedef struct {
    uint32_t code;
    int length;
} Code;

typedef struct {
    int components;
    Code dc[MAX_COMPONENTS][12];   /* by category */
    Code end[MAX_COMPONENTS];      /* of a block */
    Code empty[MAX_COMPONENTS];    /* a block after the first: no difference, end */
    int others[MAX_COMPONENTS];    /* how many of them an MCU has */
    Code filler;                   /* a coefficient of an odd number of bits */
    int fillers[8];                /* how many of them add this number of bits, modulo 8 */
    int length;                    /* bits of an MCU without fillers and without the first blocks' DC codes */
} Dummies;

enum { DUMMY_BYTES = 192 }; /* more than an MCU takes with stuffed bytes: 2 * 10 * 32 + 3 * 11 + 7 * 26 bits */

/* Extend a JPEG's tables by codes of 16 bits for what dummies need and they lack; 0 if there is no room for them. */
int dummies_prepare(Jpeg *jpeg, Dummies *dummies);

/* Write an MCU after which predictors that were `from` are `to`, and which ends at bit `phase` of a byte, or anywhere
 * if that is below 0. 0 if a difference has no code. */
int put_dummy(Writer *writer, const Dummies *dummies, const int16_t *from, const int16_t *to, int phase);

static inline void put_bits(Writer *writer, uint32_t value, int count) { /* up to 32 */
    writer->pending = writer->pending << count | value;
    for (writer->bits += count; writer->bits >= 8; writer->bits -= 8) {
        uint8_t byte = *writer->at++ = (uint8_t)(writer->pending >> (writer->bits - 8));
        if (byte == 0xFF) *writer->at++ = 0;
    }
}

#endif
