#ifndef EFFLOOP_CRC32C_H
#define EFFLOOP_CRC32C_H

#include <stdint.h>

/* The CRC-32C of what `crc` is of, followed by `size` bytes; the checksum of nothing is 0. */
uint32_t effloop_crc32c(uint32_t crc, const uint8_t *data, int64_t size);

#endif
