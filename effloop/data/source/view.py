"""Some samples of another source, or all of them with other classes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.encoded import EncodedImages
from effloop.data.image.header import Encoded
from effloop.data.random import Permutation
from effloop.data.source.base import Kind, Source, at_most, fingerprint_of
from effloop.system.cached import cached_property

_FACTS = (  # attributes of a source that hold for each of its samples
    *("kind", "note", "left_out", "columns", "stores_indexes", "mask_format", "about", "targets_note", "has_checksums"),
)


class View(Source):
    """Samples of another source, which reads them. Sample `index` of the view is its sample `ids[index]`.

    A subclass may give other bytes by its own `read`: these are read one by one, and have no entropy indexes.

    Args:
        source: whose samples these are.
        ids: (n,) which ones, in this order; may be a column of a mapped file. None takes all.
        classes: a longer list in which all of the source's classes are, in any order; labels and flags are the places
            in that list. None keeps the source's.
        where: what messages call the samples; None is what they call the source.
        fingerprint: of these samples; None computes it when it is asked for.
    """

    def __init__(
        self,
        source: Source,
        ids: NDArray[Any] | None = None,
        *,
        classes: Sequence[str] | None = None,
        where: str | None = None,
        fingerprint: dict[str, Any] | None = None,
    ) -> None:
        self.source, self.ids = source, ids
        for fact in _FACTS:
            setattr(self, fact, getattr(source, fact))
        self.classes = source.classes if classes is None else tuple(classes)
        self._where, self._given = where, fingerprint
        place = {name: number for number, name in enumerate(self.classes)}
        self._places = None if classes is None else np.array([place[name] for name in source.classes], np.int64)

    def __getstate__(self) -> dict[str, Any]:  # without what was taken from the source's columns
        return {name: value for name, value in vars(self).items() if name not in ("targets", "_fingerprint")}

    def _of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """(N,) samples of the view -> their numbers in the source."""
        return samples if self.ids is None else self.ids[samples].astype(np.int64, copy=False)

    def _at(self, index: int) -> int:
        return index if self.ids is None else int(self.ids[index])

    def __len__(self) -> int:
        return len(self.source) if self.ids is None else len(self.ids)

    @cached_property
    def targets(self) -> NDArray[Any]:
        rows = self.source.targets if self.ids is None else self.source.targets[self.ids]
        if (places := self._places) is None:
            return rows
        if self.kind is Kind.flags:
            flags = np.zeros((len(rows), len(self.classes)), np.uint8)
            flags[:, places] = rows
            return flags
        # A label without a class stays without: it becomes one more than the last.
        table = np.append(places, len(self.classes)).astype(np.min_scalar_type(len(self.classes)))
        return np.asarray(table[at_most(rows, len(places))])

    @property
    def labels(self) -> NDArray[Any]:  # type: ignore[override]
        return self.targets

    @property
    def target_rows(self) -> NDArray[Any]:
        if self.kind is not Kind.masks:
            return self.targets
        return self.source.target_rows if self.ids is None else self.source.target_rows[self.ids]

    @property
    def target_names(self) -> tuple[str, ...]:
        return self.source.target_names if self._places is None else self.classes

    def read(self, index: int) -> Encoded:
        return self.source.read(self._at(index))

    def read_run(self, samples: NDArray[np.int64]) -> EncodedImages:
        return self.source.read_run(self._of(samples)) if type(self).read is View.read else super().read_run(samples)

    def read_mask(self, index: int) -> Encoded:
        return self.source.read_mask(self._at(index))

    def mask_name(self, index: int) -> str:
        return self.source.mask_name(self._at(index))

    def entropy_indexes(self, samples: NDArray[np.int64], images: EncodedImages) -> EncodedImages | None:
        return self.source.entropy_indexes(self._of(samples), images) if type(self).read is View.read else None

    def raw_key(self, index: int) -> bytes:
        return self.source.raw_key(self._at(index))

    def raw_keys(self, samples: NDArray[np.int64]) -> EncodedImages:
        return self.source.raw_keys(self._of(samples))

    def file_path(self, index: int) -> bytes:
        return self.source.file_path(self._at(index))

    def column(self, name: str, start: int, stop: int) -> Sequence[bytes]:
        if self.ids is None:
            return self.source.column(name, start, stop)
        return [self.source.column(name, index, index + 1)[0] for index in self.ids[start:stop].tolist()]

    def name(self, index: int) -> str:
        return self.source.name(self._at(index))

    def size(self, index: int) -> int:
        return self.source.size(self._at(index))

    def digests(self) -> NDArray[np.int64] | None:
        found = self.source.digests() if type(self).read is View.read else None
        return found if found is None or self.ids is None else found[self.ids]

    def bad_samples(self) -> NDArray[np.int64]:
        bad = self.source.bad_samples()
        return bad if self.ids is None else np.flatnonzero(np.isin(self.ids, bad))

    def will_need(self, indices: Sequence[int]) -> None:
        self.source.will_need(indices if self.ids is None else self.ids[np.asarray(indices, np.int64)].tolist())

    def verify(self, index: int) -> None:
        self.source.verify(self._at(index))

    def verify_index(self) -> None:
        self.source.verify_index()

    def modified_ns(self, index: int) -> int | None:
        return self.source.modified_ns(self._at(index))

    @property
    def where(self) -> str:
        return self._where or self.source.where

    def file_paths(self) -> Iterable[bytes]:
        return self.source.file_paths()

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        if self._given is not None:
            return self._given
        same = self._places is None or (
            self.kind is Kind.classes and np.array_equal(self._places, np.arange(len(self._places)))
        )
        return self.source.fingerprint() if same and self.ids is None else fingerprint_of(self)

    def fingerprint(self) -> dict[str, Any]:
        return self._fingerprint

    def identity(self) -> dict[str, Any]:
        return {**self.source.identity(), **self.fingerprint()}


def unwrapped(source: Source) -> tuple[Source, NDArray[np.int64]]:
    """The source that a view is of, or a view of a view, and (N,) which of its samples are the view's."""
    samples = np.arange(len(source))
    while isinstance(source, View):
        samples, source = source._of(samples), source.source
    return source, samples


def shuffled(source: Source, seed: int) -> View:
    """All samples of a source, in an order that is a function of the seed and of how many there are."""
    return View(source, Permutation.of_epoch(len(source), seed, 0)(np.arange(len(source))))
