"""Locates the members of a mapped tar archive, and makes the header of a member.

Reads ustar, pax, and the long names and large sizes of GNU tar; writes ustar, which every reader supports (DALI's
doesn't support pax). Definitions: POSIX.1-2017, `pax`, and "Basic Tar Format" in the manual of GNU tar.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from zlib import adler32

from effloop.data.source.base import printable
from effloop.errors import DataError

BLOCK = 512
END = bytes(2 * BLOCK)
"""What ends an archive."""

_FIELDS = struct.Struct("100s24x12s12x8sc100x6s82x155s12x")  # name, size, checksum, kind, magic, prefix
_WRITTEN = struct.Struct("100s8s8s8s12s12s8sc100x8s80x155s12x")
_NAME, _PREFIX = 100, 155
_ZEROS = bytes(BLOCK)
_REGULAR = frozenset({b"0", b"\0", b"7"})
_SKIPPED = frozenset({b"5", b"V"})  # a folder, the archive's label
_EXTENDING = frozenset({b"L", b"K", b"x", b"X", b"g"})  # attributes of the members that follow
_REFUSED = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a pipe",
    b"S": "a sparse file",
}
_SPARSE = b"GNU.sparse."
_LONGEST = 1 << 20  # bytes of an extended header; a path has at most 4,096
_PIECE = 1 << 20
_COMPRESSED = re.compile(rb"\x1f\x8b|\x28\xb5\x2f\xfd|\xfd7zXZ\0|BZh[1-9]1AY&SY|\x04\x22\x4d\x18")
"""The first bytes of files of gzip, zstd, xz, bzip2 and lz4."""

Member = tuple[bytes, int, int]
"""A file in an archive: (name, offset, size). A plain tuple: a named one takes 14 % of the scan."""


def header(name: bytes, size: int) -> bytes:
    """A ustar header: mode 0644, user, group and time 0, so that the same name and size give the same bytes.

    Args:
        name: for which `fits` is true.
        size: bytes, below 8 GiB.
    """
    prefix = b""
    if len(name) > _NAME:
        cut = name.rfind(b"/", 0, _PREFIX + 1)
        prefix, name = name[:cut], name[cut + 1 :]
    nobody, digits, never = b"0000000\0", b"%011o\0" % size, b"00000000000\0"
    kind = (b" " * 8, b"0", b"ustar\x0000", prefix)  # the checksum counts itself as spaces
    block = _WRITTEN.pack(name, b"0000644\0", nobody, nobody, digits, never, *kind)
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def fits(name: bytes) -> bool:
    """Whether a ustar header can hold this name: 100 bytes, or a folder of up to 155 bytes and 100 after it."""
    cut = name.rfind(b"/", 0, _PREFIX + 1)
    return len(name) <= _NAME or (cut > 0 and len(name) - cut - 1 <= _NAME)


def padding(size: int) -> int:
    """Number of zeros that follow `size` bytes."""
    return -size % BLOCK


def members(data: mmap.mmap, where: str) -> Iterator[Member]:
    """Every file of an archive, in order; folders are skipped.

    Args:
        data: the mapped archive.
        where: its path, for messages.

    Raises:
        DataError: compressed, damaged or cut short, or with a member that isn't a plain file in the archive.
    """
    if _COMPRESSED.match(data):
        raise DataError(f"{where} is compressed, so no sample can be read by itself; decompress it")
    at, lasting, following = 0, dict[bytes, bytes](), dict[bytes, bytes]()
    while (block := data[at : at + BLOCK]) != _ZEROS:
        name, size, kind = _read_header(block, at, where)
        start = at + BLOCK
        if kind in _EXTENDING:
            found = _extension(data, at, size, kind, where)
            (lasting if kind == b"g" else following).update(found)
            at = start + size + padding(size)
            continue
        if lasting or following:
            name, size = _extended(name, size, {**lasting, **following}, at, where)
            following.clear()
        if not name or name[0] == 0x2F or b".." in name:
            _check_name(name, at, where)
        if kind not in _REGULAR and kind not in _SKIPPED:
            what = _REFUSED.get(kind, f"of the unknown kind {kind!r}")
            raise DataError(f"{where}: '{printable(name)}' is {what}; write the archive again with plain files only")
        if kind in _SKIPPED or (kind == b"\0" and name.endswith(b"/")):  # a folder before ustar
            at = start
            continue
        if start + size > len(data):
            raise DataError(
                f"{where} is cut: '{printable(name)}' is {size:,} bytes at byte {start:,}, "
                f"but the file has {len(data):,}; get it again"
            )
        yield name, start, size
        at = start + size + -size % BLOCK
    _check_end(data, at, where)


def _read_header(block: bytes, at: int, where: str) -> tuple[bytes, int, bytes]:
    """(name, size, kind) from a header whose checksum is verified: 1.3 µs."""
    if len(block) < BLOCK:
        raise DataError(f"{where} is cut at byte {at:,}: no two blocks of zeros end it; get it again")
    name, size, checksum, kind, magic, prefix = _FIELDS.unpack(block)
    try:
        # The lower half of Adler-32 is 1 + the sum of the bytes, modulo 65,521: 0.5 µs where sum() takes 3.6.
        # The checksum's own 8 bytes count as spaces, 256 in sum.
        found = adler32(block[156:], adler32(block[:148])) & 0xFFFF
        if (int(checksum.strip(b" \0"), 8) - 255) % 65521 != found:
            raise ValueError
        number = _number(size)
    except ValueError:
        raise _damaged(where, at, "the header there doesn't match its checksum") from None
    name = name.partition(b"\0")[0]
    if magic == b"ustar\0" and prefix[0]:  # GNU tar's own headers use this field otherwise
        name = prefix.partition(b"\0")[0] + b"/" + name
    return name, number, kind


def _number(field: bytes) -> int:
    """A size: octal digits, or a byte 0x80 and a big-endian integer."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    number = int(field.strip(b" \0") or b"0", 8)
    if number < 0:
        raise ValueError(field)
    return number


def _extension(data: mmap.mmap, at: int, size: int, kind: bytes, where: str) -> dict[bytes, bytes]:
    """The records of an extended header; a long name becomes the record `path`."""
    start = at + BLOCK
    if size > _LONGEST or start + size > len(data):
        raise _damaged(where, at, f"a long name or a list of attributes of {size:,} bytes")
    text = data[start : start + size]
    if kind in (b"L", b"K"):
        return {b"path": text.partition(b"\0")[0]} if kind == b"L" else {}
    try:
        return _records(text)
    except ValueError:
        raise _damaged(where, at, "a list of attributes that can't be read") from None


def _records(text: bytes) -> dict[bytes, bytes]:
    """Lines of pax: LENGTH KEY=VALUE, with the length of the whole line, newline included."""
    records, at = {}, 0
    while at < len(text):
        length = text[at : at + 20].partition(b" ")[0]
        end = at + int(length)
        key, equals, value = text[at + len(length) + 1 : end - 1].partition(b"=")
        if not at < end <= len(text) or not equals or text[end - 1 : end] != b"\n":
            raise ValueError(text)
        if key.startswith(_SPARSE):
            records[_SPARSE] = value
        elif key in (b"path", b"size"):  # the others aren't needed
            records[key] = value
        at = end
    return records


def _extended(name: bytes, size: int, records: dict[bytes, bytes], at: int, where: str) -> tuple[bytes, int]:
    """Name and size of a member, from the records before it if they have them."""
    name = records.get(b"path") or name
    if _SPARSE in records:
        raise DataError(f"{where}: '{printable(name)}' is a sparse file; write the archive again with plain files only")
    digits = records.get(b"size")
    if not digits:
        return name, size
    if not digits.isdigit() or len(digits) > 20:
        raise _damaged(where, at, f"the size {digits[:20]!r}")
    return name, int(digits)


def _check_name(name: bytes, at: int, where: str) -> None:
    if not name:
        raise _damaged(where, at, "a member without a name")
    if name[0] == 0x2F or b".." in name.split(b"/"):
        raise DataError(f"{where}: '{printable(name)}' leads out of the archive; write it again with relative paths")


def _check_end(data: mmap.mmap, at: int, where: str) -> None:
    if len(data) < at + len(END):
        raise DataError(f"{where} is cut at byte {len(data):,}: no two blocks of zeros end it; get it again")
    for start in range(at, len(data), _PIECE):
        if data[start : start + _PIECE].strip(b"\0"):
            raise _damaged(where, at, "a block of zeros ends the archive, but more follows (archives joined by cat?)")


def _damaged(where: str, at: int, what: str) -> DataError:
    return DataError(f"{where} is damaged at byte {at:,}: {what}; get it again")
