"""Looks for bad images before and while they are copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from effloop.convert.records import read
from effloop.data.check import check_image, check_mask, listed
from effloop.data.decode import Decoder
from effloop.data.image.header import Encoded
from effloop.data.source.base import Source
from effloop.data.source.view import View
from effloop.errors import DataError, warn
from effloop.system.progress import Meter, in_order

_RUN = 256  # samples that a thread takes at a time
Bad = tuple[str, int, str]
"""(split, sample, what is wrong with it)."""


class Inspector:
    """Finds samples that can't be read, and images whose header or end is damaged; 5 µs an image, besides reading it.

    Args:
        splits: name -> opened split.
        decoder: reads headers, and decodes what has no end marker.
        num_threads: how many samples are looked at at the same time; 0 means one.
        meter: shows the progress.
        whole: decode every image.
    """

    def __init__(
        self, splits: Mapping[str, Source], decoder: Decoder, num_threads: int, meter: Meter, *, whole: bool = False
    ) -> None:
        self.splits, self.decoder, self.num_threads, self.meter = splits, decoder, max(1, num_threads), meter
        self.whole = whole

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
        bad = [each for name in later for each in self.find(name, sample if name == split else 0)]
        if bad:
            raise DataError(self._described(bad, "repair or remove what is bad, or set skip_bad=true"))

    def sound(self) -> dict[str, Source]:
        """The splits without what is bad, which is said.

        Raises:
            DataError: nothing of a split is left.
        """
        bad = [each for name in self.splits for each in self.find(name)]
        if bad:
            warn(self._described(bad, "left out"))
        left_out = {name: [sample for split, sample, _ in bad if split == name] for name in self.splits}
        for name, source in self.splits.items():
            if len(left_out[name]) == len(source):
                raise DataError(f"{source.where}: no image can be used; set data.root=PATH to images, or split=NAME")
        return {
            name: View(source, np.delete(np.arange(len(source)), left_out[name])) if left_out[name] else source
            for name, source in self.splits.items()
        }

    def find(self, split: str, start: int = 0) -> Iterator[Bad]:
        """The bad samples of a split, from one on."""
        source = self.splits[split]
        self.meter.begin(f"{split}: checking", total=len(source), done=start)
        with ThreadPoolExecutor(self.num_threads, thread_name_prefix="effloop-inspect") as pool:
            starts = range(start, len(source), _RUN)
            for first, lines in zip(starts, in_order(pool, lambda at: self._run(source, at), starts, 8), strict=True):
                self.meter.advance(len(lines))
                yield from ((split, sample, line) for sample, line in enumerate(lines, first) if line)

    def _run(self, source: Source, start: int) -> list[str]:
        """What is wrong with each of a run of samples, or nothing."""
        ids = range(start, min(start + _RUN, len(source)))
        source.will_need(ids)
        return [self._look(source, sample) for sample in ids]

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

    def _described(self, bad: list[Bad], fix: str) -> str:
        of = f"{len(bad):,} of {sum(map(len, self.splits.values())):,} images can't be used"
        return listed(of, [line for _, _, line in bad], fix)
