"""What a scan has found in each shard of data whose shards come and go: a file of columns for each, which stays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from effloop.data.source.base import Kind, printable
from effloop.data.source.storage.checksum import crc32c
from effloop.data.source.storage.columns import BlobSpool, ColumnFile, ColumnWriter, Spool
from effloop.data.source.storage.index import Entry
from effloop.data.source.storage.targets import Targets
from effloop.errors import DataError

_NUMBERS = ("label", "offset", "size", "crc32c", "mask_offset", "mask_size", "mask_crc32c", "largest")
_LABELS = 1 << 32
_ROWS = 1 << 14  # in memory


def write_part(path: Path, shard: Path, entries: Iterable[Entry], targets: Targets, table: bytes = b"") -> None:
    """Write what a scan of one shard yields; the file appears when it is complete.

    Args:
        path: of the file.
        shard: for messages.
        entries: all of the shard.
        targets: what theirs are.
        table: what else has to be known of the shard; see `Part.table`.

    Raises:
        DataError: a label can't be one.
    """
    spool = partial(Spool, folder=path.parent)
    numbers = [spool("q") for _ in _NUMBERS]
    keys, learned = BlobSpool(path.parent), BlobSpool(path.parent)
    for entry in entries:
        if not 0 <= entry.label < _LABELS:
            raise DataError(
                f"{shard}: {printable(entry.key)} has the label {entry.label}; allowed are 0 to {_LABELS - 1}: correct "
                "it or leave it out"
            )
        mask = (len(entry.mask), crc32c(entry.mask)) if entry.mask_offset else (0, 0)
        checksum = -1 if entry.crc32c is None else entry.crc32c
        values = (entry.label, entry.offset, entry.size, checksum, entry.mask_offset, *mask, entry.largest)
        for column, value in zip(numbers, values, strict=True):
            column.append(value)
        keys.append(entry.key)
        learned.append(entry.target)
    with ColumnWriter(path, {"targets": targets.header()}) as writer:
        for name, column in zip(_NUMBERS, numbers, strict=True):
            writer.add(name, column.array())
        for name, blobs in (("key", keys), ("target", learned)):
            writer.add(name, blobs.data.array())
            writer.add(f"{name}_end", blobs.ends.array())
        with writer.blobs("table") as append:
            append(table)


class Part:
    """What a scan has found in one shard.

    Args:
        path: of the file.

    Raises:
        DataError: it is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._file = ColumnFile(path)
        self._file.check()

    @property
    def targets(self) -> Targets:
        """What those of the samples are."""
        header = self._file.meta["targets"]
        return Targets(Kind(header["kind"]), tuple(header["names"]))

    @property
    def table(self) -> memoryview:
        """What else has to be known of the shard."""
        return self._file.blob("table")

    def entries(self, number: int) -> Iterator[Entry]:
        """Those of all samples, in order, as of file `number`."""
        keys, targets = self._file.blobs("key"), self._file.blobs("target")
        columns = [self._file[name] for name in _NUMBERS]
        for start in range(0, len(keys), _ROWS):
            stop = min(start + _ROWS, len(keys))
            rows = zip(*(column[start:stop].tolist() for column in columns), strict=True)
            learned = zip(keys.items(start, stop), targets.items(start, stop), strict=True)
            for (key, target), row in zip(learned, rows, strict=True):
                label, offset, size, checksum, mask_offset, mask_size, mask_crc32c, largest = row
                entry = Entry(key, label, number, offset, size, None if checksum < 0 else checksum, target)
                if mask_offset:
                    measured = mask_size, mask_crc32c
                    entry = entry._replace(mask_offset=mask_offset, mask_measured=measured, largest=largest)
                yield entry
