"""Re-encoded images, kept in chunks on disk until a writer takes them, so that a killed conversion can continue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from effloop.convert.entropy import Built, build_compared
from effloop.convert.masks import SizeOf, with_mask, with_masks
from effloop.data.image.header import Encoded, read_header
from effloop.data.source.base import Fingerprint, Kind, Source, target_bytes
from effloop.data.source.storage.columns import ColumnFile, ColumnWriter
from effloop.data.source.storage.writing import Record
from effloop.errors import DataError
from effloop.system.progress import Meter, in_order

CHUNK = 256
"""Images in a file of the spool: the most that a thread loses by a kill."""
_LABELS = 1 << 20  # labels read at a time
_STEP = 16  # images between two reports of a thread


class Originals:
    """The samples of a split as they are, for a writer; each is compared with its checksum, if it has one.

    Args:
        source: the split.
        meter: shows the progress.
        name: of the split.
        reader: reads a sample, given the split's name and its index; None is `read`.

    Attributes:
        indexing: how many threads build the entropy indexes of the records; 0 leaves them out.
        compared, refused: of so many of these, in the last iteration, a crop was compared with the whole image; and so
            many had other pixels there, and are left without an index.
        masking: how many threads encode masks, where targets are masks.
        max_side: pixels of a mask's longer side, at most; None leaves its size.
        size_of: height and width of an encoded image, as large as which its mask has to be: the decoder's.
    """

    def __init__(
        self, source: Source, meter: Meter, name: str, reader: Callable[[str, int], Encoded] | None = None
    ) -> None:
        self.source, self.meter, self.name, self.indexing = source, meter, name, 0
        self.masking = 1
        self.max_side: int | None = None
        self.size_of: SizeOf = _stored_size
        self.compared = self.refused = 0
        self._read = reader or (lambda _, index: read(source, index))
        self._seen = Fingerprint()
        self.num_bytes: int = source.fingerprint()["bytes"]
        self.bytes_taken = 0

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Record]:
        self.bytes_taken, self._seen = 0, Fingerprint()
        records = with_masks(self.source, enumerate(self._records()), self.max_side, self.masking, self.size_of)
        if self.indexing:
            records = self._indexed(records)
        for record in self.meter.track(records, f"{self.name}: writing", len(self)):
            self.bytes_taken += len(record.data)
            self._seen.add(record.key, record.label, len(record.data), record.target)
            yield record

    def fingerprint(self) -> dict[str, Any]:
        """Of the records that a writer took in its last iteration."""
        return self._seen.result()

    def _indexed(self, records: Iterator[Record]) -> Iterator[Record]:
        """The same records, with entropy indexes of those that can have one."""
        with ThreadPoolExecutor(self.indexing, thread_name_prefix="effloop-index") as pool:
            try:
                self.compared = self.refused = 0
                for record, built in in_order(pool, _with_index, enumerate(records), 4 * self.indexing):
                    self.compared += built.compared
                    self.refused += built.refused
                    yield record
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _records(self) -> Iterator[Record]:
        for start in range(0, len(self), CHUNK):
            ids = range(start, min(start + CHUNK, len(self)))
            self.source.will_need(ids)
            for index, (label, target) in zip(ids, _learned(self.source, ids), strict=True):
                data = self._read(self.name, index)
                if len(data) != self.source.size(index):
                    raise DataError(
                        f"{self.source.where}/{self.source.key(index)} has {len(data):,} bytes, the index says "
                        f"{self.source.size(index):,}; if it was replaced, touch its folder and convert again"
                    )
                yield Record(self.source.raw_key(index), label, data, target)


class Recoded(Originals):
    """The samples of a split, re-encoded by several threads and kept in a folder.

    Args:
        source: the split.
        meter: shows the progress.
        name: of the split, for the progress.
        folder: of the chunks; existing ones are used as they are.
        recode: re-encodes an image.
    """

    def __init__(
        self, source: Source, meter: Meter, name: str, folder: Path, recode: Callable[[Encoded], bytes]
    ) -> None:
        super().__init__(source, meter, name)
        self.folder, self.recode = folder, recode
        self.num_chunks = -(-len(source) // CHUNK)
        self._stopped = threading.Event()

    def encode(self, num_threads: int) -> int:
        """Write the chunks that are missing; returns how many images they have.

        Raises:
            DataError: an image can't be read or re-encoded; the message names it.
            OSError: a chunk can't be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(".*"):  # half a chunk of a run that was killed
            leftover.unlink()
        missing = [number for number in range(self.num_chunks) if not self._path(number).exists()]
        todo = sum(len(self._ids(number)) for number in missing)
        self.meter.begin(f"{self.name}: recoding", len(self), len(self) - todo)
        with ThreadPoolExecutor(max(1, num_threads), thread_name_prefix="effloop-convert") as pool:
            try:
                for _ in in_order(pool, self._write_chunk, missing, 2 * num_threads):
                    pass
            finally:
                self._stopped.set()
                pool.shutdown(cancel_futures=True)
        self.num_bytes = sum(len(self._chunk(number).blob("data")) for number in range(self.num_chunks))
        return todo

    def _write_chunk(self, number: int) -> None:
        ids = self._ids(number)
        self.source.will_need(ids)
        with ColumnWriter(self._path(number), {}) as writer, writer.blobs("data") as append:
            for index in ids:
                if self._stopped.is_set():
                    raise InterruptedError  # another thread has failed
                append(recoded(self.source, index, self.recode))
                if index % _STEP == _STEP - 1 or index == ids[-1]:
                    self.meter.advance(index % _STEP + 1)

    def _records(self) -> Iterator[Record]:
        for number in range(self.num_chunks):
            ids, images = self._ids(number), self._chunk(number).blobs("data")
            for place, (index, (label, target)) in enumerate(zip(ids, _learned(self.source, ids), strict=True)):
                yield Record(self.source.raw_key(index), label, images[place], target)

    def _ids(self, number: int) -> range:
        return range(number * CHUNK, min((number + 1) * CHUNK, len(self)))

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06}.chunk"

    def _chunk(self, number: int) -> ColumnFile:
        return ColumnFile(self._path(number))


def _with_index(numbered: tuple[int, Record]) -> tuple[Record, Built]:
    number, record = numbered
    built = build_compared(record.data, number)
    return record._replace(entropy=built.index or b""), built


class FirstOfEachClass:
    """The first sample of each class, or of all, to try a writer with before hours of work."""

    def __init__(self, source: Source, size_of: SizeOf) -> None:
        self.source, self.size_of = source, size_of
        self._ids = _first_ids(source)
        self.num_bytes = sum(map(source.size, self._ids))

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[Record]:
        for index in self._ids:
            ((label, target),) = _learned(self.source, range(index, index + 1))
            record = Record(self.source.raw_key(index), label, read(self.source, index), target)
            yield with_mask(self.source, index, record, self.size_of) if self.source.kind is Kind.masks else record


def _stored_size(data: Encoded) -> tuple[int, int]:
    header = read_header(data)
    return header.height, header.width


def _learned(source: Source, ids: range) -> Iterable[tuple[int, bytes]]:
    """Label and target of these samples, as of `Record`."""
    targets = source.target_rows[ids.start : ids.stop]
    if source.kind is Kind.classes:
        return [(label, b"") for label in targets.tolist()]
    return ((0, target_bytes(target)) for target in targets)


def _first_ids(source: Source) -> list[int]:
    if source.kind is not Kind.classes:
        return [0]
    first: dict[int, int] = {}
    for start in range(0, len(source), _LABELS):
        labels, places = np.unique(source.labels[start : start + _LABELS], return_index=True)
        for label, place in zip(labels.tolist(), places.tolist(), strict=True):
            first.setdefault(label, start + place)
        if len(first) >= len(source.classes):
            break
    return sorted(first.values())


def mean_size(source: Source, ids: Sequence[int], recode: Callable[[Encoded], bytes], num_threads: int) -> float:
    """Mean bytes of these samples when re-encoded."""
    with ThreadPoolExecutor(max(1, num_threads), thread_name_prefix="effloop-convert") as pool:
        return sum(pool.map(lambda index: len(recoded(source, index, recode)), ids)) / len(ids)


def read(source: Source, index: int) -> Encoded:
    """A sample's encoded image, compared with its checksum.

    Raises:
        DataError: it can't be read or is damaged; the message names it.
    """
    try:
        source.verify(index)  # whatever `data.checksums` says: a copy gets a checksum of its own
        return source.read(index)
    except DataError as error:
        raise DataError(f"{source.where}/{source.key(index)} {error}") from error


def recoded(source: Source, index: int, recode: Callable[[Encoded], bytes]) -> bytes:
    """A sample's image, re-encoded.

    Raises:
        DataError: as from `read`, or it can't be decoded; the message names it.
    """
    data = read(source, index)
    try:
        return recode(data)
    except DataError as error:
        raise DataError(f"{source.where}/{source.key(index)} {error}") from error
