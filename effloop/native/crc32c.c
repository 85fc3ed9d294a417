/* CRC-32C (Castagnoli). */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "crc32c.h"
#include "export.h"
#include "progress.h"

#define POLYNOMIAL 0x82F63B78u

#if defined(__SSE4_2__)
#include <nmmintrin.h>

#define LANE 4096 /* bytes of each of three lanes: an instruction takes three cycles, and one can begin in each */
#define ONE 0x35d73a62u /* x^(8 * LANE) modulo the polynomial: what a checksum is multiplied with for a lane that follows */
#define TWO 0x28461564u /* its square: for two lanes */

/* a * b modulo the polynomial, bits reversed. */
static uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (int bit = 31; bit >= 0; bit--) {
        product ^= b & (0u - (a >> bit & 1));
        b = b >> 1 ^ (POLYNOMIAL & (0u - (b & 1)));
    }
    return product;
}

static uint64_t eight(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint32_t update(uint32_t crc, const uint8_t *data, size_t size) {
    for (; size >= 3 * LANE; data += 3 * LANE, size -= 3 * LANE) {
        uint64_t a = crc, b = 0, c = 0;
        for (size_t at = 0; at < LANE; at += 8) {
            a = _mm_crc32_u64(a, eight(data + at));
            b = _mm_crc32_u64(b, eight(data + LANE + at));
            c = _mm_crc32_u64(c, eight(data + 2 * LANE + at));
        }
        crc = multiply(TWO, (uint32_t)a) ^ multiply(ONE, (uint32_t)b) ^ (uint32_t)c;
    }
    uint64_t wide = crc;
    for (; size >= 8; data += 8, size -= 8) wide = _mm_crc32_u64(wide, eight(data));
    for (crc = (uint32_t)wide; size; size--) crc = _mm_crc32_u8(crc, *data++);
    return crc;
}

#else

static uint32_t update(uint32_t crc, const uint8_t *data, size_t size) {
    static const uint32_t table[16] = {0x00000000, 0x105EC76F, 0x20BD8EDE, 0x30E349B1, 0x417B1DBC, 0x5125DAD3,
                                       0x61C69362, 0x7198540D, 0x82F63B78, 0x92A8FC17, 0xA24BB5A6, 0xB21572C9,
                                       0xC38D26C4, 0xD3D3E1AB, 0xE330A81A, 0xF36E6F75}; /* of four bits */
    for (; size; size--) {
        crc ^= *data++;
        crc = crc >> 4 ^ table[crc & 15];
        crc = crc >> 4 ^ table[crc & 15];
    }
    return crc;
}

#endif

EXPORT uint32_t effloop_crc32c(uint32_t crc, const uint8_t *data, int64_t size) {
    return size > 0 ? ~update(~crc, data, (size_t)size) : crc;
}

/* The first of several pieces of memory whose CRC-32C isn't the one wanted; -1 if there is none. */
EXPORT int64_t effloop_crc32c_differs(const uint8_t *const *data, const int64_t *sizes, const uint64_t *wanted,
                                      int64_t count, const int64_t *samples, int64_t *reached) {
    for (int64_t i = 0; i < count; i++) {
        reach(samples, reached, i);
        if (effloop_crc32c(0, data[i], sizes[i]) != wanted[i]) return i;
    }
    return -1;
}
