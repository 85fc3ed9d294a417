"""A source of names and targets without images, for tests of what is done with names and targets."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.source import Kind, Source
from effloop.data.source.base import fingerprint_of


class Tabled(Source):
    """A sample for each key, with its target.

    Args:
        keys: of N samples.
        targets: (N,) class indices, (N, K) uint8 flags, or (N, K) float32.
        classes: their names; a letter for each by default.
    """

    def __init__(self, keys: Sequence[str], targets: Any, classes: Sequence[str] | None = None) -> None:
        self._keys, self._targets = [key.encode() for key in keys], np.asarray(targets)
        self.kind = Kind.classes
        if self._targets.ndim > 1:
            self.kind = Kind.numbers if self._targets.dtype.kind == "f" else Kind.flags
        else:
            self.labels = self._targets.astype(np.uint8)
        count = 0 if self.kind is Kind.numbers else self._targets.shape[-1]
        count = int(self._targets.max()) + 1 if self.kind is Kind.classes else count
        self.classes = tuple(classes or map(chr, range(97, 97 + count)))

    @property
    def targets(self) -> NDArray[Any]:
        return self.labels if self.kind is Kind.classes else self._targets

    def read(self, index: int) -> bytes:
        return self._keys[index]

    def raw_key(self, index: int) -> bytes:
        return self._keys[index]

    def size(self, index: int) -> int:
        return len(self._keys[index])

    @property
    def where(self) -> str:
        return "table"

    def fingerprint(self) -> dict[str, Any]:
        return fingerprint_of(self)
