"""What identifies the data of a split, in whatever format."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.source.base import Kind, Source


class Fingerprint:
    """Identifies a split's data, updated sample by sample; independent of the storage format."""

    def __init__(self) -> None:
        self.samples = self._bytes = 0
        self._digest = hashlib.sha256()

    def add(self, key: bytes, label: int, size: int, target: bytes = b"") -> None:
        """Add one sample of `size` bytes.

        Args:
            key: its name.
            label: its class; 0 where targets aren't classes.
            size: bytes of the encoded image.
            target: where targets aren't classes: the sample's, as `target_bytes` gives it.
        """
        self.samples += 1
        self._bytes += size
        self._digest.update(b"%d %d %s%s\n" % (label, size, target.hex().encode() + b" " if target else b"", key))

    def result(self) -> dict[str, Any]:
        """`samples`, `bytes` and `sha256`, as `Source.fingerprint` returns them."""
        return {"samples": self.samples, "bytes": self._bytes, "sha256": self._digest.hexdigest()}


def fingerprint_of(source: Source) -> dict[str, Any]:
    """The fingerprint of a source, from the keys, labels and sizes of all samples."""
    fingerprint = Fingerprint()
    if source.kind is Kind.classes:
        for index, label in enumerate(source.labels):
            fingerprint.add(source.raw_key(index), int(label), source.size(index))
    else:
        for index, target in enumerate(source.target_rows):
            fingerprint.add(source.raw_key(index), 0, source.size(index), target_bytes(target))
    return fingerprint.result()


def target_bytes(target: NDArray[Any]) -> bytes:
    """One sample's (K,) flags or numbers, or (12,) mask's digest, as bytes: uint8, or float32 little-endian."""
    return target.astype(np.dtype(target.dtype).newbyteorder("<"), copy=False).tobytes()
