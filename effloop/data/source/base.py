"""What every source is: a sample's number in, its encoded bytes and label out."""

from __future__ import annotations

import hashlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

from numpy.typing import NDArray
from omegaconf import MISSING

from effloop.data.image.header import Encoded
from effloop.errors import ConfigError, DataError
from effloop.registry import PartConfig, Registry


class Tail(Enum):
    """What becomes of the samples that don't fill a last global batch."""

    drop = "drop"  # left out of this epoch
    wrap = "wrap"  # the batch is filled up from the epoch's beginning
    pad = "pad"  # the batch is filled up with images that count nowhere; evaluation does this


class Cache(Enum):
    """What is kept in memory after its first reading, one copy per machine."""

    none = "none"
    bytes = "bytes"  # the encoded image
    pixels = "pixels"  # the decoded image


@dataclass
class DataConfig(PartConfig):
    """Fields that every source has.

    Attributes:
        root: path of the dataset.
        train_split, val_split: names of the two splits inside the dataset.
        tail: what training does with the samples that don't fill a last global batch: drop or wrap.
        check: how many samples per split are looked at (header and end of file) before the first
            step, evenly spread; all of them where there are no more than that; 0 is none.
        cache: what is kept in memory, one copy per machine: none, bytes (encoded) or pixels (decoded).
        cache_gb: GB (10^9 bytes) for it, both splits together; of what doesn't fit, the part is kept that
            does. null is half of the memory that is free.
        mean, std: (R, G, B) in units of 0-1, subtracted and divided by on the device. Both null leave
            the images uint8.
    """

    root: str | None = MISSING
    train_split: str = "train"
    val_split: str = "val"
    tail: Tail = Tail.drop
    check: int = 2000  # 1,856 photographs of 27 KB take 0.1 s
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
    """One split of a dataset: id -> (bytes, label).

    Reading is thread-safe. A source is picklable and survives fork and spawn: files are opened in
    the process that reads. What it knows of its samples are numpy columns over a mapped file, never
    a Python object per sample.

    Attributes:
        classes: class names, in the order of their labels.
        labels: (len,) the samples' class indices, in the smallest unsigned integer type.
    """

    classes: tuple[str, ...]
    labels: NDArray[Any]

    @classmethod
    def claims(cls, root: Path) -> bool:
        """Whether `root` looks like a dataset of this format; `data=auto` asks."""
        return False

    @property
    def targets(self) -> NDArray[Any]:
        """What a model learns of each sample, as a batch takes it: `targets[ids]` is (len(ids), ...).

        Class indices unless a source overrides it: `labels`, (len,), in their unsigned type. Other targets keep
        the samples on the first axis, in the dtype that batches carry, e.g. (len, K) uint8 flags or (len, K) float32.
        """
        return self.labels

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def read(self, index: int) -> Encoded:
        """The encoded image of sample `index`, maybe a view of a mapped file.

        Raises:
            DataError: it can't be read. The message does not repeat the key.
        """

    @abstractmethod
    def raw_key(self, index: int) -> bytes:
        """What sample `index` is called: a path inside the split, or a record's key."""

    def key(self, index: int) -> str:
        """`raw_key` as text on one line, for messages."""
        return printable(self.raw_key(index))

    @abstractmethod
    def size(self, index: int) -> int:
        """Bytes of sample `index`'s encoded image, from the index, without reading it."""

    def will_need(self, indices: Sequence[int]) -> None:  # noqa: B027  a hint, that not all can pass on
        """Say which samples are read next, so that the kernel may fetch them side by side."""

    @property
    @abstractmethod
    def where(self) -> str:
        """The file or folder that holds this split, for messages: `{where}/{key}` names a sample."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data: `samples`, `bytes` and `sha256` over keys, labels and sizes."""

    def identity(self) -> dict[str, Any]:
        """What tells this data from other data of the same fingerprint: for what is kept of it elsewhere, for a while.

        Beside the fingerprint, where its files are and when they last changed.
        """
        return {**self.fingerprint(), "where": self.where}

    def files(self) -> Iterable[bytes]:
        """Paths of the files that hold this split, and maybe others; empty if it doesn't say."""
        return ()

    def verify(self, index: int) -> None:  # noqa: B027  most formats hold no checksum
        """Compare sample `index` with its checksum, where the format holds one.

        Raises:
            DataError: they differ. The message does not repeat the key.
        """

    @property
    def has_checksums(self) -> bool:
        """Whether `verify` has anything to compare a sample with."""
        return False

    def verify_index(self) -> None:  # noqa: B027  most formats say nothing twice
        """Compare what the index says of all samples with what else the format says of them.

        Raises:
            DataError: they differ.
        """

    def check_unchanged(self, fingerprint: dict[str, Any]) -> None:
        """What unpickling does last: a worker that starts late must not number the samples anew.

        Raises:
            DataError: the data is not what it was when the source was pickled.
        """
        if self.fingerprint() != fingerprint:
            raise DataError(f"{self.where} has changed since this run opened it; start the run again")


class Fingerprint:
    """What identifies a split, summed up sample by sample; the same for every storage format."""

    def __init__(self) -> None:
        self.samples = self._bytes = 0
        self._digest = hashlib.sha256()

    def add(self, key: bytes, label: int, size: int) -> None:
        """Count one sample of `size` bytes."""
        self.samples += 1
        self._bytes += size
        self._digest.update(b"%d %d %s\n" % (label, size, key))

    def result(self) -> dict[str, Any]:
        return {"samples": self.samples, "bytes": self._bytes, "sha256": self._digest.hexdigest()}


sources: Registry[Source] = Registry("data")


def expand_root(config: DataConfig) -> Path:
    """`data.root` as a path, `~` expanded.

    Raises:
        ConfigError: unset, or nothing is there, or neither a file nor a folder (a FIFO would wait for ever); the
            line has the resolved path.
    """
    if not config.root:
        raise ConfigError(f"data.root is missing; data={config.name} needs it: set data.root=PATH")
    root = Path(os.path.expanduser(config.root))
    try:
        mode = os.stat(root).st_mode
    except PermissionError as error:
        raise ConfigError(f"data.root: '{config.root}' can't be read: {error.strerror}; set data.root=PATH") from None
    except (OSError, ValueError):  # ValueError: a null byte in it
        raise ConfigError(
            f"data.root: '{config.root}' is not there (looked at {root.absolute()}); set data.root=PATH"
        ) from None
    if not (S_ISREG(mode) or S_ISDIR(mode)):
        raise ConfigError(f"data.root: '{config.root}' is neither a file nor a folder; set data.root=PATH")
    return root


def check_same_classes(train: Source, val: Source) -> None:
    """Both splits must number the same classes in the same order, or every score is wrong.

    Raises:
        DataError: they don't; the line says which are only in one of them.
    """
    if train.classes == val.classes:
        return
    only = {
        "train": sorted(set(train.classes) - set(val.classes)),
        "val": sorted(set(val.classes) - set(train.classes)),
    }
    differences = "; ".join(f"only in {split}: {', '.join(names[:8])}" for split, names in only.items() if names)
    raise DataError(
        f"train and val have different classes ({train.where}, {val.where}): "
        f"{differences or 'same names, other order'}; give both the same class folders"
    )


def stamp(root: Path) -> dict[str, Any]:
    """Where a file or folder is, and the names, sizes, inodes and times of change of all files in it."""
    root = root.resolve()
    digest = hashlib.sha256()
    for file in files_in(root):
        status = file.stat()
        digest.update(
            b"%s %d %d %d %d\n"
            % (os.fsencode(file), *(status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns)
        )
    return {"root": os.fsencode(root).hex(), "files": digest.hexdigest()}


def files_in(root: Path) -> list[Path]:
    """A file, or all that are in a folder, sorted."""
    return [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())


def index_folder(index_dir: str | None) -> Path:
    """Where indexes of data that has none of its own are kept: `data.index_dir` or the user's cache."""
    if index_dir:
        return Path(index_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "effloop"


def printable(key: bytes) -> str:
    r"""A key as text on one line: bytes that aren't UTF-8 and control characters as `\x..`."""
    text = key.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
