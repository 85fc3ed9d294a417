"""The interface of a data source: sample index in, encoded image and label out."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import MISSING

from effloop.data.image.header import Encoded
from effloop.errors import ConfigError, DataError
from effloop.registry import PartConfig, Registry


class Tail(Enum):
    """What happens to the samples that don't fill the last global batch."""

    drop = "drop"  # left out of this epoch
    wrap = "wrap"  # the batch is filled from the beginning of the epoch
    pad = "pad"  # the batch is filled with images that don't count (`Batch.valid`); for evaluation


class Cache(Enum):
    """What is kept in memory after it was first read, one copy per machine."""

    none = "none"
    bytes = "bytes"  # the encoded image
    pixels = "pixels"  # the decoded image


@dataclass
class DataConfig(PartConfig):
    """Fields that every source has.

    Attributes:
        root: path of the dataset.
        train_split, val_split: names of the two splits in the dataset.
        tail: what training does with the samples that don't fill the last global batch: drop or wrap.
        check: number of samples per split, evenly spaced, whose header and end of file are checked before the
            first step; 0 checks none.
        cache: what is kept in memory, one copy per machine: none, bytes (encoded) or pixels (decoded).
        allow_missing_classes: a split may lack classes that the other one has, or have empty class folders. Labels then
            follow the training split; classes that only the validation split has come after.
        cache_gb: GB (10^9 bytes) for the cache of both splits; what doesn't fit is read from disk. null is half of
            the free memory.
        mean, std: (R, G, B) in units of 0-1, used to normalize on the device. If both are null, images stay uint8.
    """

    root: str | None = MISSING
    train_split: str = "train"
    val_split: str = "val"
    tail: Tail = Tail.drop
    check: int = 2000  # 1,856 photographs of 27 KB take 0.1 s
    allow_missing_classes: bool = False
    cache: Cache = Cache.none
    cache_gb: float | None = None
    mean: list[float] | None = field(default_factory=lambda: [0.485, 0.456, 0.406])  # ImageNet's
    std: list[float] | None = field(default_factory=lambda: [0.229, 0.224, 0.225])

    def __post_init__(self) -> None:
        if self.check < 0:
            raise ConfigError(f"data.check: {self.check} is not allowed; set 0 (none) or a number above it")
        if self.cache_gb is not None and not 0 < self.cache_gb < math.inf:
            raise ConfigError(f"data.cache_gb: {self.cache_gb} is not allowed; set a number above 0, or null")
        if self.tail is Tail.pad:
            raise ConfigError("data.tail: pad is for evaluation, BatchNorm would see the padding; set drop or wrap")
        if (self.mean is None) != (self.std is None):
            raise ConfigError("data.mean, data.std: one is null and the other isn't; set both or neither")
        for key, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and (len(values) != 3 or not all(map(math.isfinite, values))):
                raise ConfigError(f"data.{key}: {values} is not allowed; set three finite numbers, for R, G, B")
        if self.std is not None and min(self.std) <= 0:
            raise ConfigError(f"data.std: {self.std} is not allowed; set three numbers above 0")


class Source(ABC):
    """One split of a dataset: sample index -> (encoded image, target).

    Reading is thread-safe. A source is picklable and survives fork and spawn: files are opened in the process that
    reads them. What it knows about its samples is held in numpy columns over a mapped file, never in one Python
    object per sample.

    Attributes:
        classes: class names, in the order of their labels; empty if the targets aren't classes.
        labels: (len,) class indices, in the smallest unsigned integer type; unset if `targets` are something else.
    """

    classes: tuple[str, ...]
    labels: NDArray[Any]

    @classmethod
    def claims(cls, root: Path) -> bool:
        """Whether `root` looks like a dataset in this format; used by `data=auto`."""
        return False

    @property
    def targets(self) -> NDArray[Any]:
        """What a model learns about each sample: `targets[ids]` is what a batch holds, (len(ids), ...).

        By default the class indices: `labels`, (len,). A source that overrides it keeps the samples on the first
        axis, in the dtype that batches hold, e.g. (len, K) uint8 flags or (len, K) float32.
        """
        return self.labels

    def target_name(self, index: int) -> str:
        """The target of sample `index` in words: its class, or its numbers."""
        target = self.targets[index]
        return self.classes[int(target)] if self.classes else str(target.tolist())

    def __len__(self) -> int:
        return len(self.targets)

    @abstractmethod
    def read(self, index: int) -> Encoded:
        """The encoded image of sample `index`; may be a view of a mapped file.

        Raises:
            DataError: it can't be read. The message doesn't repeat the key.
        """

    @abstractmethod
    def raw_key(self, index: int) -> bytes:
        """The name of sample `index`: its path in the split, or a record's key."""

    def key(self, index: int) -> str:
        """`raw_key` as text on one line, for messages."""
        return printable(self.raw_key(index))

    def name(self, index: int) -> str:
        """What identifies sample `index` in messages: its key, and where it is."""
        return f"{self.where}/{self.key(index)}"

    @abstractmethod
    def size(self, index: int) -> int:
        """Bytes of the encoded image of sample `index`, from the index: the image isn't read."""

    def empty_samples(self) -> NDArray[np.int64]:
        """(n,) samples without a single byte, as far as the index tells."""
        return np.empty(0, np.int64)

    def will_need(self, indices: Sequence[int]) -> None:  # noqa: B027  a hint
        """Announce which samples are read next, so that the kernel can fetch them concurrently."""

    @property
    @abstractmethod
    def where(self) -> str:
        """The file or folder of this split, for messages."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data: `samples`, `bytes`, and `sha256` over keys, labels and sizes."""

    def identity(self) -> dict[str, Any]:
        """The fingerprint, and where the files are and when they changed: what is derived from the data and kept
        elsewhere (a memory cache, a conversion) is valid as long as this is unchanged.
        """
        return {**self.fingerprint(), "where": self.where}

    def files(self) -> Iterable[bytes]:
        """Paths of the files of this split, possibly with others; empty if unknown."""
        return ()

    def verify(self, index: int) -> None:  # noqa: B027  most formats store no checksum
        """Compare sample `index` with its checksum, if the format stores one.

        Raises:
            DataError: they differ. The message doesn't repeat the key.
        """

    @property
    def has_checksums(self) -> bool:
        """Whether `verify` compares anything."""
        return False

    def verify_index(self) -> None:  # noqa: B027  most formats store no fingerprint
        """Compare the index of all samples with what the format stores to check it by.

        Raises:
            DataError: they differ.
        """

    def check_unchanged(self, fingerprint: dict[str, Any]) -> None:
        """Last step of unpickling: a worker that starts late must not number the samples differently.

        Raises:
            DataError: the data has changed since the source was pickled.
        """
        if self.fingerprint() != fingerprint:
            raise DataError(f"{self.where} has changed since this run opened it; start the run again")


class Fingerprint:
    """Identifies a split's data, updated sample by sample; independent of the storage format."""

    def __init__(self) -> None:
        self.samples = self._bytes = 0
        self._digest = hashlib.sha256()

    def add(self, key: bytes, label: int, size: int) -> None:
        """Add one sample of `size` bytes."""
        self.samples += 1
        self._bytes += size
        self._digest.update(b"%d %d %s\n" % (label, size, key))

    def result(self) -> dict[str, Any]:
        """`samples`, `bytes` and `sha256`, as `Source.fingerprint` returns them."""
        return {"samples": self.samples, "bytes": self._bytes, "sha256": self._digest.hexdigest()}


def fingerprint_of(source: Source) -> dict[str, Any]:
    """The fingerprint of a source, from the keys, labels and sizes of all samples."""
    fingerprint = Fingerprint()
    for index, label in enumerate(source.labels.tolist()):
        fingerprint.add(source.raw_key(index), label, source.size(index))
    return fingerprint.result()


sources: Registry[Source] = Registry("data")


def printable(key: bytes) -> str:
    r"""A key as text on one line: bytes that aren't UTF-8 and control characters as `\x..`."""
    text = key.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
