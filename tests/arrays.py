"""What tests of the formats that hold a split as arrays have in common."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from plans import open_source, read_bytes, write_records

from effloop.errors import DataError

DIFFERS = "doesn't match the checksum that it was written with; convert it again"

Listing = list[tuple[bytes, int, bytes]]

TRAIN: Listing = [(b"a/1", 0, b"one"), (b"b/\xff\n", 1, b""), (b"b/3", 1, b"three" * 100)]
VAL: Listing = [(b"a/9", 0, b"nine")]


def write(name: str, path: Path) -> Path:
    """A dataset of two classes and the splits above."""
    return write_records(name, path, ["a", "b"], train=TRAIN, val=VAL)


def listing(name: str, path: Path, split: str = "train") -> Listing:
    """All samples of a split, looked at as `verify` does."""
    source = open_source(name, path, split)
    source.verify_index()
    for index in range(len(source)):
        source.verify(index)
    return [(source.raw_key(i), int(label), read_bytes(source, i)) for i, label in enumerate(source.labels.tolist())]


def slices(ends: NDArray[np.uint64], data: NDArray[np.uint8]) -> list[bytes]:
    """The byte strings that stand end to end in an array, as any reader would get them."""
    starts = [0, *ends.tolist()]
    return [data[start:end].tobytes() for start, end in zip(starts, ends.tolist(), strict=False)]


def survive_flips(reader: str, path: Path, wanted: Listing, count: int = 200) -> int:
    """Flip `count` bytes of a dataset, one at a time: it reads as before or not at all.

    Returns:
        How many of them were noticed.
    """
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    whole = {file: file.read_bytes() for file in files}
    draw, noticed = random.Random(5), 0
    for file in draw.choices(files, [len(data) for data in whole.values()], k=count):
        damaged = bytearray(whole[file])
        damaged[draw.randrange(len(damaged))] ^= draw.randrange(1, 256)
        file.unlink()  # not written in place: what is mapped stays what it was
        file.write_bytes(damaged)
        try:
            read, classes = listing(reader, path), open_source(reader, path).classes
        except DataError:
            noticed += 1
        else:
            assert (read, classes) == (wanted, ("a", "b"))
        file.unlink()
        file.write_bytes(whole[file])
    return noticed
