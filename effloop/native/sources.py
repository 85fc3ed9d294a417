"""What the shared library is compiled from, and whether it is still what the compiler wrote."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

_HERE = Path(__file__).parent
_MARK = b"EffLoop SHA-256:"
_TRAILER = len(_MARK) + hashlib.sha256().digest_size


def digest() -> str:
    """A checksum of the C files and their headers; the library holds it, so that one made of others is noticed."""
    found = sorted([*_HERE.glob("*.c"), *_HERE.glob("*.h")])
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in found)).hexdigest()[:16]


def sealed(library: bytes) -> bytes:
    """The bytes of a shared library and a checksum of them, which the dynamic linker doesn't look at."""
    return library + _MARK + hashlib.sha256(library).digest()


def is_damaged(library: bytes) -> bool:
    """Whether a library differs from its checksum; of one without, as `strip` leaves it, whether its end is missing."""
    if library[-_TRAILER:].startswith(_MARK):
        return sealed(library[:-_TRAILER]) != library
    if len(library) < 64 or not library.startswith(b"\x7fELF"):
        return True
    sections_at, size, count = struct.unpack_from("<Q10xHH", library, 40)
    end: int = sections_at + size * count  # the table of sections is the last that a linker writes
    return end > len(library)
