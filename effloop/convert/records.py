"""The samples of a split as a writer takes them: as they are, or re-encoded; and the bad ones among them."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from effloop.convert.reencode import shrunk
from effloop.data.check import check_image, check_mask, listed
from effloop.data.decode import Decoder, decoders
from effloop.data.image.header import Encoded, read_header
from effloop.data.image.jpeg import build_index
from effloop.data.image.mask import check_size, decode_mask, encode_mask, mask_digest, resize_mask
from effloop.data.source.base import Fingerprint, Kind, Source, target_bytes
from effloop.data.source.storage.writing import Record
from effloop.data.source.view import View
from effloop.errors import DataError, warn
from effloop.system.progress import Meter, in_threads

_AHEAD = 256  # samples that the source is asked to read ahead
_LABELS = 1 << 20  # that are sorted at a time

R = TypeVar("R")


def read(source: Source, sample: int) -> Encoded:
    """A sample's encoded image, compared with its checksum.

    Raises:
        DataError: it can't be read or is damaged; the message names it.
    """
    try:
        source.verify(sample)  # whatever `data.checksums` says: a copy gets a checksum of its own
        return source.read(sample)
    except DataError as error:
        raise DataError(f"{source.where}/{source.key(sample)} {error}") from error


def each_sample(
    source: Source,
    look: Callable[[int], R],
    num_threads: int,
    advance: Callable[[int], None],
    start: int = 0,
    run: int = 32,
) -> Iterator[R]:
    """`look` at each sample, from one on, in order; threads take `run` at a time, and `advance` gets their number."""

    def look_at(first: int) -> list[R]:
        samples = range(first, min(first + run, len(source)))
        source.will_need(samples)
        return [look(sample) for sample in samples]

    for found in in_threads(look_at, range(start, len(source), run), num_threads):
        yield from found
        advance(len(found))


def _stored_size(data: Encoded) -> tuple[int, int]:
    header = read_header(data)
    return header.height, header.width


EVERY = 16
"""One in so many images is compared while indexes are built: at 27 KB it takes 0.33 ms an image, for 0.29 without, and
1.6 where all are compared."""


def build_compared(data: Encoded, number: int, name: str) -> bytes | None:
    """Build the index of an image; a crop by it is compared with the image if the image's number is a multiple of
    `EVERY`.

    Args:
        data: any file.
        number: of the image in its split; chooses, so that the same files get the same indexes in every run.
        name: of the image, for the warning.

    Returns:
        The index, or None if the image can't have one or it gives other pixels.
    """
    index = build_index(data)
    if index is None or number % EVERY:
        return index
    try:
        differs = differs_from(_decoder().decode(data), _decoder(), data, index)
    except DataError:  # damaged or too large: it is refused where it is used
        return index
    if differs:
        warn(f"{name} gets no entropy index: a crop by it has other pixels; please report that as a bug")
    return None if differs else index


def differs_from(whole: NDArray[np.uint8], decoder: Decoder, data: Encoded, index: Encoded) -> bool:
    """Whether a crop by an index has other pixels than the whole image.

    The crop is an eighth of the image's width and all of its height, which takes a state of every row of MCUs; where
    it lies depends on the file's bytes.

    Args:
        whole: (H, W, C) uint8, the image decoded by the same decoder.
        decoder: decodes the crop.
        data: the file.
        index: that belongs to these bytes.

    Raises:
        DataError: the crop can't be decoded.
    """
    height, width = whole.shape[:2]
    columns = -(-width // 8)
    left = zlib.crc32(data) % (width - columns + 1)
    info = decoder.with_index(decoder.read_info(data), index)
    crop = decoder.decode_with_info(data, info, (0, left, height, columns))
    return not np.array_equal(crop, whole[:, left : left + columns])


@functools.cache
def _decoder() -> Decoder:
    config: Any = decoders["auto"].config
    return decoders.build(config())


@dataclass
class SplitRecords:
    """The samples of a split for a writer, with their masks, where targets are masks, and entropy indexes.

    Args:
        source: the split.
        meter: shows the progress.
        title: of the progress.
        image: a sample -> its encoded image; None reads it, and compares it with its checksum.
        ids: the samples; None takes all.
        num_bytes: of these images; -1 takes the source's sizes.
        copies: whether images are the source's, which then have the sizes that its index says.
        threads: how many encode masks and build indexes.
        indexes: whether JPEGs get entropy indexes.
        max_side: pixels of a mask's longer side, at most, as of its image.
        size_of: an encoded image -> its (height, width) as decoded, which its mask has to have.

    Attributes:
        bytes_taken: of the images that a writer took in its last iteration.
    """

    source: Source
    meter: Meter
    title: str
    image: Callable[[int], Encoded] | None = None
    ids: Sequence[int] | None = None
    num_bytes: int = -1
    copies: bool = True
    threads: int = 1
    indexes: bool = False
    max_side: int | None = None
    size_of: Callable[[Encoded], tuple[int, int]] = _stored_size

    def __post_init__(self) -> None:
        if self.num_bytes < 0:  # writers make room for them
            whole = self.ids is None
            self.num_bytes = self.source.fingerprint()["bytes"] if whole else sum(map(self.source.size, self.ids or ()))
        self.ids = range(len(self.source)) if self.ids is None else self.ids
        self._begin()

    def _begin(self) -> None:
        self.bytes_taken = 0
        self._seen = Fingerprint()

    def __len__(self) -> int:
        assert self.ids is not None
        return len(self.ids)

    def __iter__(self) -> Iterator[Record]:
        self._begin()
        if self.indexes or self.source.kind is Kind.masks:
            records = in_threads(self._complete, self._numbered(), self.threads)
        else:
            records = (record for _, _, record in self._numbered())
        for record in self.meter.track(records, f"{self.title}: writing", len(self)):
            self.bytes_taken += len(record.data)
            self._seen.add(record.key, record.label, len(record.data), record.target)
            yield record

    def fingerprint(self) -> dict[str, Any]:
        """Of the records that a writer took in its last iteration."""
        return self._seen.result()

    def _numbered(self) -> Iterator[tuple[int, int, Record]]:
        """(number, sample, its record without mask and index)."""
        assert self.ids is not None
        for start in range(0, len(self), _AHEAD):
            ids = self.ids[start : start + _AHEAD]
            self.source.will_need(ids)
            rows = self.source.target_rows[slice(ids.start, ids.stop) if isinstance(ids, range) else ids]
            for place, (sample, target) in enumerate(zip(ids, rows, strict=True)):
                data = self.image(sample) if self.image else read(self.source, sample)
                if self.copies and len(data) != self.source.size(sample):
                    raise DataError(
                        f"{self.source.where}/{self.source.key(sample)} has {len(data):,} bytes, the index says "
                        f"{self.source.size(sample):,}; if it was replaced, touch its folder and convert again"
                    )
                label, stored = (int(target), b"") if self.source.kind is Kind.classes else (0, target_bytes(target))
                yield start + place, sample, Record(self.source.raw_key(sample), label, data, stored)

    def _complete(self, numbered: tuple[int, int, Record]) -> Record:
        """A record with mask and index."""
        number, sample, record = numbered
        if self.source.kind is Kind.masks:
            record = self._with_mask(sample, record)
        if not self.indexes:
            return record
        return record._replace(entropy=build_compared(record.data, number, self.source.name(sample)) or b"")

    def _with_mask(self, sample: int, record: Record) -> Record:
        try:
            mask = decode_mask(self.source.read_mask(sample), self.source.mask_format)
            if mask_digest(mask) != record.target:
                raise DataError("has a mask that was changed since it was looked at; convert again")
            height, width = mask.shape
            mask = resize_mask(mask, *shrunk(height, width, self.max_side))
            check_size(mask.shape, *self.size_of(record.data))
        except DataError as error:
            raise DataError(f"{self.source.where}/{self.source.key(sample)} {error}") from error
        return record._replace(target=mask_digest(mask), mask=encode_mask(mask))


def first_of_each_class(source: Source) -> list[int]:
    """Samples to try a writer with before hours of work: the first one, or that of each class."""
    if source.kind is not Kind.classes:
        return [0]
    first: dict[int, int] = {}
    for start in range(0, len(source), _LABELS):
        labels, places = np.unique(source.labels[start : start + _LABELS], return_index=True)
        first = dict(zip(labels.tolist(), (start + places).tolist(), strict=True)) | first
        if len(first) == len(source.classes):
            break
    return sorted(first.values())


class Spool:
    """Re-encoded images of a split in a file, one behind the other: writers need the number of their bytes beforehand.

    Args:
        source: the split.
        path: of the file.
        recode: re-encodes an image.

    Attributes:
        ends: where each ends.
    """

    def __init__(self, source: Source, path: Path, recode: Callable[[Encoded], bytes]) -> None:
        self.source, self.path, self.recode = source, path, recode

    def write(self, num_threads: int, meter: Meter, title: str) -> None:
        """Re-encode the images.

        Raises:
            DataError: an image can't be read or re-encoded; the message names it.
            OSError: the file can't be written.
        """
        meter.begin(f"{title}: recoding", len(self.source))
        sizes: list[int] = []
        with self.path.open("wb") as file:
            for image in each_sample(self.source, self._recoded, num_threads, meter.advance, run=4):
                sizes.append(file.write(image))
        self.ends = np.cumsum(sizes)
        self._mapped = np.memmap(self.path, np.uint8, "r").data

    def _recoded(self, sample: int) -> bytes:
        data = read(self.source, sample)
        try:
            return self.recode(data)
        except DataError as error:
            raise DataError(f"{self.source.where}/{self.source.key(sample)} {error}") from error

    def image(self, sample: int) -> Encoded:
        """A sample's image as it was written."""
        return self._mapped[int(self.ends[sample - 1]) if sample else 0 : int(self.ends[sample])]

    def estimate(self, num_threads: int) -> float:
        """Bytes of all images when re-encoded, extrapolated from 64."""
        count = len(self.source)
        ids = np.unique(np.linspace(0, count - 1, min(64, count)).astype(np.int64)).tolist()
        return count * sum(map(len, in_threads(self._recoded, ids, num_threads))) / len(ids)


@dataclass
class Inspector:
    """Finds samples that can't be read, and images whose header or end is damaged; 5 µs an image, besides reading it.

    Attributes:
        splits: name -> opened split.
        decoder: reads headers, and decodes what has no end marker.
        num_threads: how many samples are looked at at the same time; 0 means one.
        meter: shows the progress.
        whole: decode every image.
    """

    splits: Mapping[str, Source]
    decoder: Decoder
    num_threads: int
    meter: Meter
    whole: bool = False

    def read(self, split: str, sample: int) -> Encoded:
        """Read a sample, and, if it is bad, look at all behind it.

        Raises:
            DataError: it is bad; the message names up to 20 that are.
        """
        source = self.splits[split]
        try:
            data = read(source, sample)
            check_mask(source, sample, *check_image(data, self.decoder))
        except DataError:
            self.refuse(split, sample)
            raise  # it is readable by now
        return data

    def refuse(self, split: str | None = None, sample: int = 0) -> None:
        """Look at every sample, from one on.

        Raises:
            DataError: some are bad; the message names up to 20 of them.
        """
        names = [*self.splits]
        later = names[names.index(split) :] if split else names
        bad = {name: self._find(name, sample if name == split else 0) for name in later}
        if any(bad.values()):
            raise DataError(self._described(bad, "repair or remove what is bad, or set skip_bad=true"))

    def sound(self) -> dict[str, Source]:
        """The splits without what is bad, of which a warning tells.

        Raises:
            DataError: nothing of a split is left.
        """
        bad = {name: self._find(name) for name in self.splits}
        if any(bad.values()):
            warn(self._described(bad, "left out"))
        sound: dict[str, Source] = {}
        for name, source in self.splits.items():
            if len(bad[name]) == len(source):
                raise DataError(f"{source.where}: no image can be used; set data.root=PATH to images, or split=NAME")
            sound[name] = View(source, np.delete(np.arange(len(source)), [*bad[name]])) if bad[name] else source
        return sound

    def _find(self, split: str, start: int = 0) -> dict[int, str]:
        """{bad sample of a split, from one on: what is wrong with it}."""
        source = self.splits[split]
        self.meter.begin(f"{split}: checking", total=len(source), done=start)
        found = each_sample(
            source, lambda sample: self._look(source, sample), self.num_threads, self.meter.advance, start
        )
        return {sample: line for sample, line in enumerate(found, start) if line}

    def _look(self, source: Source, sample: int) -> str:
        try:
            data = read(source, sample)
        except DataError as error:
            return str(error)
        try:
            size = check_image(data, self.decoder)
            check_mask(source, sample, *size, whole=self.whole)
            if self.whole:
                self.decoder.decode(data)
        except DataError as error:
            return f"{source.where}/{source.key(sample)} {error}"
        return ""

    def _described(self, bad: Mapping[str, Mapping[int, str]], fix: str) -> str:
        lines = [line for found in bad.values() for line in found.values()]
        of = f"{len(lines):,} of {sum(map(len, self.splits.values())):,} images can't be used"
        return listed(of, lines, fix)
