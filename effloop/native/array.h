/* What NumPy's array objects say of themselves: the first fields of PyArrayObject_fields, which are its ABI.
 *
 * Read here because Python takes 3 µs for an address, and 10 for all that a call on two arrays has to know. */

#ifndef EFFLOOP_ARRAY_H
#define EFFLOOP_ARRAY_H

#include <stddef.h>
#include <stdint.h>

/* An array behind its PyObject_HEAD, whose bytes are `object.__basicsize__`. */
typedef struct {
    uint8_t *data;
    int dims;
    const ptrdiff_t *shape, *strides; /* strides in bytes */
    const void *base, *type;
    int flags;
} Array;

#define ARRAY_WRITEABLE 0x0400 /* of `flags` */

#endif
