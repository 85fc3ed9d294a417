"""Sources around another source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.header import Encoded
from effloop.data.source.base import Source, fingerprint_of


class Wrapped(Source):
    """The samples of another source; a subclass changes something about them.

    Args:
        source: whose samples these are.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.classes = source.classes
        self.about = getattr(source, "about", None)

    @property
    def labels(self) -> NDArray[Any]:  # type: ignore[override]  # read when used: not every source has labels
        return self.source.labels

    @property
    def targets(self) -> NDArray[Any]:
        return self.source.targets

    def read(self, index: int) -> Encoded:
        return self.source.read(index)

    def raw_key(self, index: int) -> bytes:
        return self.source.raw_key(index)

    def size(self, index: int) -> int:
        return self.source.size(index)

    def empty_samples(self) -> NDArray[np.int64]:
        return self.source.empty_samples()

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

    def verify_index(self) -> None:
        self.source.verify_index()


class Relabelled(Wrapped):
    """A source whose classes are some of a longer list, in any order; labels are the places in that list.

    Args:
        source: has classes.
        classes: all of its classes are among them.
    """

    def __init__(self, source: Source, classes: Sequence[str]) -> None:
        super().__init__(source)
        self.classes = tuple(classes)
        place = {name: number for number, name in enumerate(classes)}
        self._places = np.array([*(place[name] for name in source.classes), len(classes)])

    @cached_property
    def labels(self) -> NDArray[Any]:  # type: ignore[override]
        known = np.minimum(self.source.labels, len(self._places) - 1)  # a label without a class stays without
        labels: NDArray[Any] = self._places.astype(np.min_scalar_type(len(self.classes)))[known]
        return labels

    @property
    def targets(self) -> NDArray[Any]:
        return self.labels

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        if np.array_equal(self._places[:-1], np.arange(len(self._places) - 1)):
            return self.source.fingerprint()
        return fingerprint_of(self)

    def fingerprint(self) -> dict[str, Any]:
        return self._fingerprint

    def identity(self) -> dict[str, Any]:
        return {**self.source.identity(), **self.fingerprint()}

    def __reduce__(self) -> tuple[Any, ...]:
        return Relabelled, (self.source, self.classes)


class Without(Wrapped):
    """A source without some of its samples; the others move up.

    Args:
        source: whose samples these are.
        left_out: which not.
    """

    def __init__(self, source: Source, left_out: Sequence[int]) -> None:
        super().__init__(source)
        self.left_out = left_out
        self._ids = np.delete(np.arange(len(source)), left_out)

    @cached_property
    def labels(self) -> NDArray[Any]:  # type: ignore[override]
        labels: NDArray[Any] = self.source.labels[self._ids]
        return labels

    @property
    def targets(self) -> NDArray[Any]:
        targets: NDArray[Any] = self.source.targets[self._ids]
        return targets

    def read(self, index: int) -> Encoded:
        return self.source.read(int(self._ids[index]))

    def raw_key(self, index: int) -> bytes:
        return self.source.raw_key(int(self._ids[index]))

    def size(self, index: int) -> int:
        return self.source.size(int(self._ids[index]))

    def empty_samples(self) -> NDArray[np.int64]:
        return np.flatnonzero(np.isin(self._ids, self.source.empty_samples()))

    def will_need(self, indices: Sequence[int]) -> None:
        self.source.will_need(self._ids[np.asarray(indices)].tolist())

    def verify(self, index: int) -> None:
        self.source.verify(int(self._ids[index]))

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        return fingerprint_of(self)

    def fingerprint(self) -> dict[str, Any]:
        return self._fingerprint

    def identity(self) -> dict[str, Any]:
        return {**self.source.identity(), **self.fingerprint()}
