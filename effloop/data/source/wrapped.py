"""Sources around another source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.encoded import EncodedImages
from effloop.data.image.header import Encoded
from effloop.data.random import Permutation
from effloop.data.source.base import Kind, Source, at_most
from effloop.data.source.fingerprint import fingerprint_of
from effloop.data.source.ranges import Ranges
from effloop.system.cached import cached_property


class Wrapped(Source):
    """The samples of another source; a subclass changes something about them.

    A subclass that leaves their bytes as they are hands on `read_run`, `entropy_index` and `entropy_indexes`; without
    that they are read one by one, and have no indexes.

    Args:
        source: whose samples these are.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.kind = source.kind
        self.classes = source.classes
        self.note, self.columns = source.note, source.columns
        self.stores_indexes = source.stores_indexes
        self.mask_format = source.mask_format
        self.about = getattr(source, "about", None)

    @property
    def labels(self) -> NDArray[Any]:  # type: ignore[override]  # read when used: not every source has labels
        return self.source.labels

    @property
    def targets(self) -> NDArray[Any]:
        return self.source.targets

    @property
    def target_rows(self) -> NDArray[Any]:
        return self.source.target_rows if self.kind is Kind.masks else self.targets

    @property
    def about_targets(self) -> str:
        return self.source.about_targets

    @property
    def target_names(self) -> tuple[str, ...]:
        return self.source.target_names

    def present(self) -> Ranges | None:
        return self.source.present()

    def read(self, index: int) -> Encoded:
        return self.source.read(index)

    def read_mask(self, index: int) -> Encoded:
        return self.source.read_mask(index)

    def mask_name(self, index: int) -> str:
        return self.source.mask_name(index)

    def raw_key(self, index: int) -> bytes:
        return self.source.raw_key(index)

    def raw_keys(self, start: int, stop: int) -> list[bytes]:
        return self.source.raw_keys(start, stop)

    def raw_keys_of(self, samples: NDArray[np.int64]) -> EncodedImages:
        return self.source.raw_keys_of(samples)

    def column(self, name: str, start: int, stop: int) -> Sequence[bytes]:
        return self.source.column(name, start, stop)

    def name(self, index: int) -> str:
        return self.source.name(index)

    def size(self, index: int) -> int:
        return self.source.size(index)

    def bad_samples(self) -> NDArray[np.int64]:
        return self.source.bad_samples()

    def will_need(self, indices: Sequence[int]) -> None:
        self.source.will_need(indices)

    @property
    def where(self) -> str:
        return self.source.where

    def fingerprint(self) -> dict[str, Any]:
        return self.source.fingerprint()

    def identity(self) -> dict[str, Any]:
        return self.source.identity()

    def files(self) -> Iterable[bytes]:
        return self.source.files()

    @property
    def has_checksums(self) -> bool:
        return self.source.has_checksums

    def verify(self, index: int) -> None:
        self.source.verify(index)

    @property
    def stored_in(self) -> str:
        return self.source.stored_in

    def modified_ns(self, index: int) -> int | None:
        return self.source.modified_ns(index)

    def verify_index(self) -> None:
        self.source.verify_index()


class Relabelled(Wrapped):
    """A source whose classes are some of a longer list, in any order; labels and flags are the places in that list.

    Args:
        source: has classes.
        classes: all of its classes are among them.
    """

    def __init__(self, source: Source, classes: Sequence[str]) -> None:
        super().__init__(source)
        self.classes = tuple(classes)
        place = {name: number for number, name in enumerate(classes)}
        self._places = np.array([*(place[name] for name in source.classes), len(classes)])

    def read_run(self, samples: NDArray[np.int64]) -> EncodedImages:
        return self.source.read_run(samples)

    def entropy_index(self, index: int, data: Encoded) -> Encoded | None:
        return self.source.entropy_index(index, data)

    def entropy_indexes(self, samples: NDArray[np.int64], images: EncodedImages) -> EncodedImages | None:
        return self.source.entropy_indexes(samples, images)

    @cached_property
    def labels(self) -> NDArray[Any]:  # type: ignore[override]
        known = at_most(self.source.labels, len(self._places) - 1)  # a label without a class stays without
        labels: NDArray[Any] = self._places.astype(np.min_scalar_type(len(self.classes)))[known]
        return labels

    @cached_property
    def _flags(self) -> NDArray[Any]:
        flags = np.zeros((len(self.source), len(self.classes)), np.uint8)
        flags[:, self._places[:-1]] = self.source.targets
        return flags

    @property
    def targets(self) -> NDArray[Any]:
        return self._flags if self.kind is Kind.flags else self.labels

    @property
    def target_names(self) -> tuple[str, ...]:
        return self.classes

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        if self.kind is Kind.classes and np.array_equal(self._places[:-1], np.arange(len(self._places) - 1)):
            return self.source.fingerprint()
        return fingerprint_of(self)

    def fingerprint(self) -> dict[str, Any]:
        return self._fingerprint

    def identity(self) -> dict[str, Any]:
        return {**self.source.identity(), **self.fingerprint()}

    def __reduce__(self) -> tuple[Any, ...]:
        return Relabelled, (self.source, self.classes)


class Subset(Wrapped):
    """Some samples of another source, numbered from 0.

    Args:
        source: whose samples these are.
        ids: (n,) which ones, in this order; may be a column of a mapped file.
        where: what messages call them; None is what they call the source.
        fingerprint: of these samples; None computes it when it is asked for.
    """

    def __init__(
        self, source: Source, ids: NDArray[Any], where: str | None = None, fingerprint: dict[str, Any] | None = None
    ) -> None:
        super().__init__(source)
        self.ids = ids
        self._where, self._given = where, fingerprint

    @cached_property
    def labels(self) -> NDArray[Any]:  # type: ignore[override]
        labels: NDArray[Any] = self.source.labels[self.ids]
        return labels

    @cached_property
    def _targets(self) -> NDArray[Any]:
        targets: NDArray[Any] = self.source.targets[self.ids]
        return targets

    @property
    def targets(self) -> NDArray[Any]:
        return self.labels if self.kind is Kind.classes and self.classes else self._targets

    @property
    def target_rows(self) -> NDArray[Any]:
        return self.source.target_rows[self.ids] if self.kind is Kind.masks else self.targets

    def __len__(self) -> int:
        return len(self.ids)

    def present(self) -> Ranges | None:
        here = self.source.present()
        return None if here is None else Ranges.of_each(np.flatnonzero(np.isin(self.ids, here.holding(self.ids))))

    def read(self, index: int) -> Encoded:
        return self.source.read(int(self.ids[index]))

    def read_run(self, samples: NDArray[np.int64]) -> EncodedImages:
        return self.source.read_run(self._of(samples))

    def read_mask(self, index: int) -> Encoded:
        return self.source.read_mask(int(self.ids[index]))

    def mask_name(self, index: int) -> str:
        return self.source.mask_name(int(self.ids[index]))

    def entropy_index(self, index: int, data: Encoded) -> Encoded | None:
        return self.source.entropy_index(int(self.ids[index]), data)

    def entropy_indexes(self, samples: NDArray[np.int64], images: EncodedImages) -> EncodedImages | None:
        return self.source.entropy_indexes(self._of(samples), images)

    def _of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """(N,) samples of this source -> their numbers in the other one."""
        return self.ids[samples].astype(np.int64, copy=False)

    def raw_key(self, index: int) -> bytes:
        return self.source.raw_key(int(self.ids[index]))

    def raw_keys(self, start: int, stop: int) -> list[bytes]:
        return [self.source.raw_key(index) for index in self.ids[start:stop].tolist()]

    def raw_keys_of(self, samples: NDArray[np.int64]) -> EncodedImages:
        return self.source.raw_keys_of(self._of(samples))

    def column(self, name: str, start: int, stop: int) -> Sequence[bytes]:
        return [self.source.column(name, index, index + 1)[0] for index in self.ids[start:stop].tolist()]

    def name(self, index: int) -> str:
        return self.source.name(int(self.ids[index]))

    def size(self, index: int) -> int:
        return self.source.size(int(self.ids[index]))

    def bad_samples(self) -> NDArray[np.int64]:
        return np.flatnonzero(np.isin(self.ids, self.source.bad_samples()))

    def will_need(self, indices: Sequence[int]) -> None:
        self.source.will_need(self.ids[np.asarray(indices, np.int64)].tolist())

    def verify(self, index: int) -> None:
        self.source.verify(int(self.ids[index]))

    def modified_ns(self, index: int) -> int | None:
        return self.source.modified_ns(int(self.ids[index]))

    @property
    def where(self) -> str:
        return self._where or self.source.where

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        return self._given or fingerprint_of(self)

    def fingerprint(self) -> dict[str, Any]:
        return self._fingerprint

    def identity(self) -> dict[str, Any]:
        return {**self.source.identity(), **self.fingerprint()}


def shuffled(source: Source, seed: int) -> Subset:
    """All samples of a source, in an order that is a function of the seed and of how many there are."""
    return Subset(source, Permutation.of_epoch(len(source), seed, 0)(np.arange(len(source))))
