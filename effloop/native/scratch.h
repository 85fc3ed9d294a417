/* Memory that is used again, and grows. */

#ifndef EFFLOOP_SCRATCH_H
#define EFFLOOP_SCRATCH_H

#include <stdint.h>
#include <stdlib.h>

typedef struct {
    uint8_t *bytes;
    size_t room;
} Memory;

/* At least `size` bytes, whose contents are lost; NULL: no memory. */
static inline uint8_t *reserve(Memory *memory, size_t size) {
    if (memory->room < size) {
        free(memory->bytes);
        memory->room = size + size / 4;
        memory->bytes = malloc(memory->room);
        if (!memory->bytes) memory->room = 0;
    }
    return memory->bytes;
}

/* Frees what is larger than this. */
static inline void shrink(Memory *memory, size_t most) {
    if (memory->room > most) free(memory->bytes), *memory = (Memory){NULL, 0};
}

#endif
