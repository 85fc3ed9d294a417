/* Looks up kept entropy indexes, many in one call: effloop/data/source/entropy.py says how they are kept. */

#include <stdint.h>
#include <string.h>

#include "crc32c.h"
#include "export.h"
#include "random.h"

enum { START = 64, PROBED = 64, SUMMED = 28 }; /* SUMMED: bytes of a slot's numbers and the image's size */

typedef struct {
    uint64_t key, offset;
    uint32_t length, checksum;
} Slot;

/* The hash of a sample's name. */
EXPORT uint64_t effloop_entropy_key(const uint8_t *name, int64_t size) {
    uint64_t key = mix((uint64_t)size + GOLDEN);
    for (; size > 0; name += 8, size -= 8) {
        uint64_t eight = 0;
        memcpy(&eight, name, size < 8 ? (size_t)size : 8);
        key = mix((key ^ eight) + GOLDEN);
    }
    return key;
}

/* The checksum in a slot. */
EXPORT uint32_t effloop_entropy_checksum(uint64_t key, uint64_t offset, uint64_t image_size, const uint8_t *index,
                                         int64_t length) {
    uint32_t size = (uint32_t)length;
    uint8_t head[SUMMED];
    memcpy(head, &key, 8);
    memcpy(head + 8, &offset, 8);
    memcpy(head + 16, &size, 4);
    memcpy(head + 20, &image_size, 8);
    return effloop_crc32c(effloop_crc32c(0, head, SUMMED), index, length);
}

/* The slot of a key; 0 if it has none. */
static int find(const uint8_t *file, uint64_t slots, uint64_t key, Slot *slot) {
    for (uint64_t step = 0; step < PROBED; step++) {
        memcpy(slot, file + START + sizeof *slot * ((key + step) & (slots - 1)), sizeof *slot);
        if (!slot->offset) return 0;
        if (slot->key == key) return 1;
    }
    return 0;
}

/* Where the indexes of several images are in a mapped file of `size` bytes, which holds all of its `slots`, a power of two.
 *
 * at[i]: 0 if nothing is known, -1 if it is behind the end of what is mapped.
 * lengths[i]: its bytes; 0 if the image is known to have none, which isn't asked for images that are no JPEG. */
EXPORT void effloop_entropy_find(const uint8_t *file, int64_t size, int64_t slots, const uint8_t *const *names,
                                 const int64_t *name_sizes, const uint8_t *const *images, const int64_t *image_sizes,
                                 int64_t count, int64_t *at, int64_t *lengths) {
    const uint64_t end = (uint64_t)size, first = START + sizeof(Slot) * (uint64_t)slots;
    for (int64_t i = 0; i < count; i++) {
        Slot slot;
        at[i] = lengths[i] = 0;
        if (images && (image_sizes[i] < 2 || images[i][0] != 0xFF || images[i][1] != 0xD8)) {
            at[i] = START;
            continue;
        }
        uint64_t key = effloop_entropy_key(names[i], name_sizes[i]);
        if (!find(file, (uint64_t)slots, key, &slot) || slot.offset < first) continue;
        if (slot.offset > end || slot.length > end - slot.offset) {
            at[i] = -1;
            continue;
        }
        const uint8_t *index = file + slot.offset;
        uint64_t of = (uint64_t)image_sizes[i];
        if (effloop_entropy_checksum(key, slot.offset, of, index, slot.length) != slot.checksum) continue;
        at[i] = (int64_t)slot.offset;
        lengths[i] = slot.length;
    }
}
