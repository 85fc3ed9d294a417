"""The samples of a split as a writer takes them: as they are, or re-encoded; and the bad ones among them."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from effloop.convert.reencode import shrunk
from effloop.data.check import check_image, check_mask, listed
from effloop.data.decode import DecodeConfig, Decoder, decoders
from effloop.data.image.header import Encoded, read_header
from effloop.data.image.jpeg import build_index
from effloop.data.image.mask import check_size, decode_mask, encode_mask, mask_digest, resize_mask
from effloop.data.source.base import Fingerprint, Kind, Source, fingerprint_of, target_bytes
from effloop.data.source.storage.writing import Files, Record
from effloop.data.source.view import View
from effloop.errors import DataError, warn
from effloop.system.hardware import in_threads
from effloop.system.progress import Meter

_AHEAD = 256  # samples that the source is asked to read ahead
_LABELS = 1 << 20  # that are sorted at a time
_RUN = 8  # samples that a thread takes at a time

R = TypeVar("R")


def read(source: Source, sample: int) -> Encoded:
    """A sample's encoded image, compared with its checksum; an error names it."""
    with _named(source, sample):
        source.verify(sample)  # whatever `data.checksums` says: a copy gets a checksum of its own
        return source.read(sample)


@contextmanager
def _named(source: Source, sample: int) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise DataError(f"{source.name(sample)} {error}") from error


def each_sample(source: Source, look: Callable[[int], R], num_threads: int, meter: Meter, title: str) -> Iterator[R]:
    """`look` at each sample, by threads, in order; `meter` shows the progress."""

    def look_at(first: int) -> list[R]:
        samples = range(first, min(first + _RUN, len(source)))
        source.will_need(samples)
        return [look(sample) for sample in samples]

    meter.begin(title, total=len(source))
    for found in in_threads(look_at, range(0, len(source), _RUN), num_threads):
        yield from found
        meter.advance(len(found))


def _stored_size(data: Encoded) -> tuple[int, int]:
    header = read_header(data)
    return header.height, header.width


EVERY = 16
"""One in so many images is compared while indexes are built: at 27 KB it takes 0.33 ms an image, for 0.29 without, and
1.6 where all are compared."""


def build_compared(data: Encoded, name: str) -> bytes | None:
    """Build the index of an image; a crop by it is compared with the image if its size is a multiple of `EVERY`: the
    same files get the same indexes in every run. None if it can't have one or it gives other pixels.
    """
    index = build_index(data)
    if index is None or len(data) % EVERY:
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
    it lies depends on the file's bytes. `whole` is (H, W, C) uint8, by the same decoder.
    """
    height, width = whole.shape[:2]
    columns = -(-width // 8)
    left = zlib.crc32(data) % (width - columns + 1)
    info = replace(decoder.read_info(data), index=index)
    crop = decoder.decode_with_info(data, info, (0, left, height, columns))
    return not np.array_equal(crop, whole[:, left : left + columns])


@functools.cache
def _decoder() -> Decoder:
    return decoders.build(DecodeConfig("auto"))


@dataclass
class SplitRecords:
    """The samples of a split for a writer, with their masks, where targets are masks, and entropy indexes.

    Writers make room for `num_bytes` of images.
    """

    source: Source
    meter: Meter
    title: str
    read: Callable[[Source, int], Encoded] = read  # an image, compared with its checksum
    threads: int = 1  # that encode masks and build indexes
    indexes: bool = False  # whether JPEGs get entropy indexes
    max_side: int | None = None  # pixels of a mask's longer side, at most, as of its image
    size_of: Callable[[Encoded], tuple[int, int]] = _stored_size  # (height, width) as decoded, which a mask has to have
    files: Files | None = None  # that they are written into; None where their size ends them

    def __post_init__(self) -> None:
        self.num_bytes: int = self.source.fingerprint()["bytes"]
        self._seen = Fingerprint()

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Record]:
        self._seen = Fingerprint()
        if self.indexes or self.source.kind is Kind.masks:
            records = in_threads(self._complete, self._numbered(), self.threads)
        else:
            records = (record for _, record in self._numbered())
        for record in self.meter.track(records, f"{self.title}: writing", len(self)):
            self._seen.add(record.key, record.label, len(record.data), record.target)
            yield record

    def fingerprint(self) -> dict[str, Any]:
        """Of the records that a writer took in its last iteration."""
        return self._seen.result()

    def _numbered(self) -> Iterator[tuple[int, Record]]:
        """(sample, its record without mask and index)."""
        source = self.source
        for start in range(0, len(self), _AHEAD):
            samples = range(start, min(start + _AHEAD, len(self)))
            source.will_need(samples)
            for sample, target in zip(samples, source.target_rows[start : samples.stop], strict=True):
                data = self.read(source, sample)
                if len(data) != source.size(sample):
                    raise DataError(
                        f"{source.name(sample)} has {len(data):,} bytes, the index says "
                        f"{source.size(sample):,}; if it was replaced, touch its folder and convert again"
                    )
                label, stored = (int(target), b"") if source.kind is Kind.classes else (0, target_bytes(target))
                yield sample, Record(source.raw_key(sample), label, data, stored)

    def _complete(self, numbered: tuple[int, Record]) -> Record:
        """A record with mask and index."""
        sample, record = numbered
        if self.source.kind is Kind.masks:
            record = self._with_mask(sample, record)
        if not self.indexes:
            return record
        return record._replace(entropy=build_compared(record.data, self.source.name(sample)) or b"")

    def _with_mask(self, sample: int, record: Record) -> Record:
        with _named(self.source, sample):
            mask = decode_mask(self.source.read_mask(sample), self.source.mask_format)
            if mask_digest(mask) != record.target:
                raise DataError("has a mask that was changed since it was looked at; convert again")
            height, width = mask.shape
            mask = resize_mask(mask, *shrunk(height, width, self.max_side))
            check_size(mask.shape, *self.size_of(record.data))
        return record._replace(target=mask_digest(mask), mask=encode_mask(mask))


def first_of_each_class(source: Source) -> NDArray[np.int64]:
    """Samples to try a writer with before hours of work: folders need one of each class, others the first."""
    first: dict[int, int] = {}
    for start in range(0, len(source) if source.kind is Kind.classes else 0, _LABELS):
        labels, places = np.unique(source.labels[start : start + _LABELS], return_index=True)
        first = dict(zip(labels.tolist(), (start + places).tolist(), strict=True)) | first
    return np.array(sorted(first.values()) or [0])


class Reencoded(View):
    """A split whose images are re-encoded, into a file, one behind the other: writers need the number of their bytes
    beforehand.
    """

    def __init__(
        self, source: Source, path: Path, recode: Callable[[Encoded], bytes], num_threads: int, meter: Meter, title: str
    ) -> None:
        super().__init__(source)
        look, sizes = functools.partial(_recoded, source, recode), []
        with path.open("wb") as file:
            for image in each_sample(source, look, num_threads, meter, f"{title}: recoding"):
                sizes.append(file.write(image))
        self._ends = np.cumsum([0, *sizes])
        self._mapped = np.memmap(path, np.uint8, "r").data

    def read(self, index: int) -> Encoded:
        return self._mapped[self._ends[index] : self._ends[index + 1]]

    def size(self, index: int) -> int:
        return int(self._ends[index + 1] - self._ends[index])

    def verify(self, index: int) -> None:
        """Nothing: the original was compared when it was re-encoded."""

    def fingerprint(self) -> dict[str, Any]:
        return fingerprint_of(self)


def _recoded(source: Source, recode: Callable[[Encoded], bytes], sample: int) -> bytes:
    data = read(source, sample)
    with _named(source, sample):
        return recode(data)


def estimated_bytes(source: Source, recode: Callable[[Encoded], bytes], num_threads: int) -> int:
    """Bytes of all images when re-encoded, extrapolated from 64."""
    count = len(source)
    ids = np.unique(np.linspace(0, count - 1, min(64, count)).astype(np.int64)).tolist()
    look = functools.partial(_recoded, source, recode)
    return count * sum(map(len, in_threads(look, ids, num_threads))) // len(ids)


@dataclass
class Inspector:
    """Finds samples that can't be read, and images whose header or end is damaged; 5 µs an image, and its reading."""

    splits: Mapping[str, Source]
    decoder: Decoder  # reads headers, and decodes what has no end marker
    num_threads: int
    meter: Meter
    whole: bool = False  # decode every image

    def read(self, source: Source, sample: int) -> Encoded:
        """Read a sample, and, if it is bad, look at all; the error names up to 20 that are."""
        try:
            return self._look(source, sample)
        except DataError:
            self.refuse()
            raise  # it is readable by now

    def refuse(self) -> None:
        """Look at every sample; the error names up to 20 that are bad."""
        if any(bad := [*self._find().values()]):
            raise DataError(self._described(bad, "repair or remove what is bad, or set skip_bad=true"))

    def kept(self) -> dict[str, NDArray[np.int64]]:
        """The samples of each split that has any bad one, which a warning names, without these; it is an error if none
        is left.
        """
        bad, kept = self._find(), {}
        if any(bad.values()):
            warn(self._described([*bad.values()], "left out"))
        for name, source in self.splits.items():
            if len(bad[name]) == len(source):
                raise DataError(f"{source.where}: no image can be used; set data.root=PATH to images, or split=NAME")
            if bad[name]:
                kept[name] = np.delete(np.arange(len(source)), [*bad[name]])
        return kept

    def _find(self) -> dict[str, dict[int, str]]:
        """Split -> {bad sample: what is wrong with it}."""

        def line(source: Source, sample: int) -> str:
            try:
                self._look(source, sample)
            except DataError as error:
                return str(error)
            return ""

        found = {}
        for name, source in self.splits.items():
            look = functools.partial(line, source)
            lines = each_sample(source, look, self.num_threads, self.meter, f"{name}: checking")
            found[name] = {sample: text for sample, text in enumerate(lines) if text}
        return found

    def _look(self, source: Source, sample: int) -> Encoded:
        data = read(source, sample)
        with _named(source, sample):
            info = check_image(data, self.decoder)
            check_mask(source, sample, info.height, info.width, whole=self.whole)
            if self.whole:
                self.decoder.decode(data)
        return data

    def _described(self, bad: Sequence[Mapping[int, str]], fix: str) -> str:
        lines = [line for found in bad for line in found.values()]
        of = f"{len(lines):,} of {sum(map(len, self.splits.values())):,} images can't be used"
        return listed(of, lines, fix)
