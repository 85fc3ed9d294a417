"""The interface of a data source: sample index in, encoded image and label out."""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.encoded import EncodedImages
from effloop.data.image.header import Encoded
from effloop.data.image.mask import IGNORED, PLAIN, MaskFormat, decode_mask, mask_digest
from effloop.data.in_progress import in_progress
from effloop.errors import ConfigError, DataError
from effloop.registry import F, PartConfig, Registry
from effloop.system.cached import cached_property, default_property

WHOLE = "."  # the split of data that has no splits: all samples

USUAL = {"train": ("training",), "val": ("valid", "validation", "dev", "eval")}
"""Other names that splits usually have, for data without `train` or `val`."""


class NoSplitError(DataError):
    """The data has no split of that name."""


class ScanError(DataError):
    """A full scan found no split that can be opened."""


class Kind(Enum):
    """What the targets of a dataset are."""

    classes = "classes"  # (N,) one class for each sample, unsigned integers
    flags = "flags"  # (N, K) uint8, 0 or 1: which of K classes each sample has
    numbers = "numbers"  # (N, K) float32
    masks = "masks"  # (N, 0) uint8: the class of each pixel, see `Source.read_mask`


class Source(ABC):
    """One split of a dataset: sample index -> (encoded image, target).

    Reading is thread-safe. A source is picklable and survives fork and spawn: files are opened in the process that
    reads them. What it knows about its samples is held in numpy columns over a mapped file, never in one Python
    object per sample.

    Attributes:
        kind: what the targets are.
        any_kind: whether `kind` is known only when a split is open.
        classes: class names, in the order of their labels or flags, or of the values in masks; empty if the targets
            are numbers.
        labels: (len,) class indices, in the smallest unsigned integer type; unset if `targets` are something else.
        note: a line for users about how the split was found, if there is something to say.
        left_out: number and kinds of files beside the images that aren't taken for images, such as `2 .txt, 1 .webm`.
        targets_note: how it was found out what the targets are, for users; empty where the format says it.
        columns: names of what else is known of each sample, such as the patient it is of; see `column`.
        about: how the images were encoded, as in `writing.Dataset.about`; None where nothing says it.
        mask_format: how the stored values of masks become classes.
        stores_indexes: whether its files have entropy indexes; see `entropy_index`.
        has_checksums: whether `verify` compares anything.
    """

    kind: Kind = Kind.classes
    any_kind: ClassVar[bool] = False
    note: str = ""
    left_out: str = ""
    targets_note: str = ""
    columns: tuple[str, ...] = ()
    about: Mapping[str, Any] | None = None
    mask_format: MaskFormat = PLAIN
    stores_indexes: bool = False
    has_checksums: bool = False
    classes: tuple[str, ...]
    labels: NDArray[Any]

    def __init_subclass__(cls) -> None:
        _check_names(cls.__name__, vars(cls))

    @classmethod
    def claims(cls, root: Path) -> bool:
        """Whether `root` looks like a dataset in this format; used by `data=auto`."""
        return False

    @default_property
    def targets(self) -> NDArray[Any]:
        """(len, ...) what a model learns: `targets[ids]` is what a batch holds.

        By default `labels`, (len,). Another one has the dtype that batches hold, e.g. (len, K) uint8 flags or float32.
        """
        return self.labels

    @property
    def target_rows(self) -> NDArray[Any]:
        """(len, ...) what distinguishes targets: `targets`, or for masks (len, 12) uint8 `mask.mask_digest`s."""
        return self._mask_digests if self.kind is Kind.masks else self.targets

    @cached_property
    def _mask_digests(self) -> NDArray[Any]:
        masks = (decode_mask(self.read_mask(index), self.mask_format) for index in range(len(self)))
        return np.frombuffer(b"".join(map(mask_digest, masks)), np.uint8).reshape(len(self), -1)

    @default_property
    def target_names(self) -> tuple[str, ...]:
        """Names of what the K outputs of a model are: the classes, or of each of the numbers."""
        return self.classes

    def target_name(self, index: int) -> str:
        """The target of sample `index` as text: its class, its classes, or its numbers."""
        if self.kind is Kind.masks:
            return self.mask_name(index)
        target = self.targets[index]
        if self.kind is Kind.flags:
            return ", ".join(self.classes[place] for place in np.flatnonzero(target).tolist()) or "none"
        return self.classes[int(target)] if self.classes else ", ".join(f"{float(value):g}" for value in target.flat)

    def __len__(self) -> int:
        return len(self.targets)

    @abstractmethod
    def read(self, index: int) -> Encoded:
        """The encoded image of sample `index`; may be a view of a mapped file.

        Raises:
            DataError: it can't be read. The message doesn't repeat the key.
        """

    def read_run(self, samples: NDArray[np.int64]) -> EncodedImages:
        """`read` of (N,) samples; overridden where all at once are faster."""
        images = []
        for row, index in enumerate(samples.tolist()):
            in_progress.reach(row)
            images.append(self.read(index))
        return EncodedImages.of(images)

    def read_mask(self, index: int) -> Encoded:
        """The encoded mask of sample `index`, where targets are masks; `mask.decode_mask` takes it with `mask_format`.

        Raises:
            DataError: it has none, or it can't be read. The message doesn't repeat the key.
        """
        raise DataError("has no mask")

    def mask_name(self, index: int) -> str:
        """What identifies the mask of sample `index` in messages."""
        return f"the mask of {self.key(index)}"

    def entropy_indexes(self, samples: NDArray[np.int64], images: EncodedImages) -> EncodedImages | None:
        """The entropy indexes (`image.jpeg`) of (N,) samples, empty where there is none of these very bytes, which
        `read` has returned; None where none has one.
        """
        return None

    def entropy_index(self, index: int, data: Encoded) -> Encoded | None:
        """`entropy_indexes` of one sample; None where there is none."""
        found = self.entropy_indexes(np.array([index]), EncodedImages.of([data]))
        return None if found is None else found[0] or None

    @abstractmethod
    def raw_key(self, index: int) -> bytes:
        """The name of sample `index`: its path in the split, or a record's key."""

    def raw_keys(self, samples: NDArray[np.int64]) -> EncodedImages:
        """`raw_key` of (N,) samples, for millions of them at once."""
        return EncodedImages.of([self.raw_key(index) for index in samples.tolist()])

    def file_path(self, index: int) -> bytes:
        """The path of sample `index`'s own file; its `raw_key` where it has none."""
        return self.raw_key(index)

    def column(self, name: str, start: int, stop: int) -> Sequence[bytes]:
        """What one of `columns` has of the samples `start` to `stop`, as text."""
        raise KeyError(name)

    def key(self, index: int) -> str:
        """`raw_key` as text on one line, for messages."""
        return printable(self.raw_key(index))

    def name(self, index: int) -> str:
        """What identifies sample `index` in messages: the path of its file, or its key and where that is."""
        return f"{self.where}/{self.key(index)}"

    def size(self, index: int) -> int:
        """Bytes of the encoded image of sample `index`; overridden where they are known without reading it."""
        return len(self.read(index))

    def digests(self) -> NDArray[np.int64] | None:
        """(len,) sizes of the encoded images in bytes, shifted by 32 bits, and their CRC-32C where the format stores it
        (`has_checksums`); None where they aren't known without reading the images.
        """
        return None

    def bad_samples(self) -> NDArray[np.int64]:
        """(n,) samples that can't be loaded, as far as the index tells: without a byte, or with a damaged mask."""
        return np.empty(0, np.int64)

    def will_need(self, indices: Sequence[int]) -> None:  # noqa: B027  a hint
        """Announce which samples are read next, so that the kernel can fetch them concurrently."""

    @default_property
    def where(self) -> str:
        """The file or folder of this split, for messages."""
        return type(self).__name__

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data: `samples`, `bytes`, and `sha256` over keys, labels and sizes."""
        return self._fingerprint_of_all

    @cached_property
    def _fingerprint_of_all(self) -> dict[str, Any]:
        return fingerprint_of(self)

    def identity(self) -> dict[str, Any]:
        """The fingerprint, and where the files are and when they changed: what is derived from the data and kept
        elsewhere (a memory cache, a conversion) is valid as long as this is unchanged.
        """
        return {**self.fingerprint(), "where": self.where}

    def file_paths(self) -> Iterable[bytes]:
        """Paths of the files of this split, possibly with others; empty if unknown."""
        return ()

    def verify(self, index: int) -> None:  # noqa: B027  most formats store no checksum
        """Compare sample `index` with its checksum, if the format stores one.

        Raises:
            DataError: they differ. The message doesn't repeat the key.
        """

    def modified_ns(self, index: int) -> int | None:
        """When the file of sample `index` was modified last; None if that isn't known. A DataError if it is gone."""
        return None

    def verify_index(self) -> None:  # noqa: B027  most formats store no fingerprint
        """Compare the index of all samples with what the format stores to check it by; a DataError if they differ."""

    def check_unchanged(self, fingerprint: dict[str, Any]) -> None:
        """Last step of unpickling: a worker that starts late must not number the samples differently."""
        if self.fingerprint() != fingerprint:
            raise DataError(f"{self.where} has changed since this run opened it; start the run again")


def at_most(labels: NDArray[Any], largest: int) -> NDArray[Any]:
    """Labels, and `largest` instead of those above it, which their dtype may be too small to hold."""
    return labels if largest > np.iinfo(labels.dtype).max else np.minimum(labels, largest)


# What a source of a plugin's may get wrong: said when its class is made, registered, or built for a split.


def _check_names(owner: str, names: Mapping[str, Any]) -> None:
    """Refuse what takes the place of a method of every source and can't be called as it is, or the other way round."""
    for name, own in names.items():
        base = None if name.startswith("_") else getattr(Source, name, None)
        good = callable(base) == (callable(own) or isinstance(own, classmethod))
        takes = ", ".join(inspect.signature(base).parameters) if callable(base) else ""
        if base is not None and good and isinstance(own, FunctionType):
            try:
                inspect.signature(own).bind(*takes.split(", "))
            except TypeError:
                good = False
        if base is not None and not good:
            what = f"a method of every source, {name}({takes})" if callable(base) else "no method of a source"
            raise ConfigError(f"{owner}: '{name}' is {what}; rename yours")


class SourceRegistry(Registry[Source]):
    """The sources; those of plugins are checked."""

    def register(self, name: str, config: type[PartConfig]) -> Callable[[F], F]:
        def add(factory: F) -> F:
            if lacking := sorted(getattr(factory, "__abstractmethods__", ())):
                raise ConfigError(f"data={name}: {factory.__qualname__} lacks {' and '.join(lacking)}")
            try:
                inspect.signature(factory).bind(config, "train")
            except TypeError as error:
                raise ConfigError(f"data={name}: {factory.__qualname__} gets a config and a split: {error}") from None
            return registered(factory)

        registered = super().register(name, config)
        return add

    def build(self, config: PartConfig, /, *args: Any, **kwargs: Any) -> Source:
        source = super().build(config, *args, **kwargs)
        if type(source).__module__.partition(".")[0] != "effloop":
            _check(source, f"data={config.name}")
        return source


def _check(source: Source, name: str) -> None:
    """Refuse attributes or a first sample that aren't as `Source` says; lists and tensors become tuples and arrays."""

    def need(good: bool, what: str) -> None:
        if not good:
            raise ConfigError(f"{name}: {what}")

    need(isinstance(source, Source), "is not derived from effloop.data.source.Source")
    _check_names(name, vars(source))
    need(hasattr(source, "classes") and hasattr(source, "targets"), "has no classes or no labels; set both")
    for each, kind in {"kind": Kind, "note": str, "columns": tuple | list, "about": Mapping | None}.items():
        of = f"{each} is {(own := getattr(source, each))!r}"
        need(isinstance(own, kind), f"{of}; of every source it is a {getattr(kind, '__name__', kind)}: rename yours")
    if not len(source):
        raise DataError(f"{name}: {source.where} has no samples")
    names, targets, key = source.classes, np.asarray(source.targets), source.raw_key(0)
    listed = not isinstance(names, str | None) and len({*map(str, names)}) == len(names)
    need(listed, f"classes are {names!r}; set different names, or none where targets are numbers")
    with suppress(AttributeError):  # a property stays as it is
        source.classes = tuple(map(str, names))
    if source.kind is Kind.classes and source.classes:
        whole = targets.ndim == 1 and targets.dtype.kind in "iub"
        good = whole and targets.min(initial=0) >= 0 and targets.max(initial=0) < len(names)
        of = f"labels are {targets.dtype} {targets.shape}" + (f" up to {targets.max(initial=0)}" if whole else "")
        need(good, f"{of}; set (N,) whole numbers from 0 to {len(names) - 1}, the places of their classes in classes")
        if targets.dtype.kind != "u":
            with suppress(AttributeError):
                source.labels = targets.astype(np.min_scalar_type(int(targets.max(initial=0))))
    need(len(source) == len(targets), f"has {len(source)} samples by len() and {len(targets)} targets")
    need(isinstance(key, bytes), f"raw_key(0) is {key!r}; return bytes, such as b'train/0'")
    with suppress(DataError):
        data = source.read(0)
        need(isinstance(data, Encoded), f"read(0) returns a {type(data).__name__}; return the bytes of an image file")
    if type(source).fingerprint is not Source.fingerprint:
        found = source.fingerprint()
        parts = [found.get(part) for part in ("samples", "bytes", "sha256")] if isinstance(found, dict) else []
        good = [*map(type, parts)] == [int, int, str] and parts[0] == len(source)
        need(good, f"fingerprint() is {found!r}; return samples (as len()), bytes (0 if unknown) and sha256 (a text)")


sources: Registry[Source] = SourceRegistry(
    "data",
    {
        "auto": "effloop.data.source.auto",
        "beton": "effloop.data.source.formats.beton",
        "cifar": "effloop.data.source.formats.cifar",
        "csv": "effloop.data.source.table_source",
        "embedded": "effloop.data.source.formats.memmap",
        "folder": "effloop.data.source.folder",
        "hdf5": "effloop.data.source.formats.hdf5",
        "hf": "effloop.data.source.hub",
        "idx": "effloop.data.source.formats.npz",
        "lmdb": "effloop.data.source.formats.lmdb",
        "masks": "effloop.data.source.masks",
        "memmap": "effloop.data.source.formats.memmap",
        "npz": "effloop.data.source.formats.npz",
        "parquet": "effloop.data.source.formats.parquet",
        "pth": "effloop.data.source.formats.pth",
        "recordio": "effloop.data.source.formats.recordio",
        "tar": "effloop.data.source.formats.tar",
        "tfrecord": "effloop.data.source.formats.tfrecord",
        "zarr": "effloop.data.source.formats.zarr",
        "zip": "effloop.data.source.formats.zip",
    },
)


def printable(key: bytes) -> str:
    r"""A key as text on one line: bytes that aren't UTF-8 and control characters as `\x..`."""
    text = key.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# What identifies the data of a split, in whatever format.


class Fingerprint:
    """Identifies a split's data, updated sample by sample; independent of the storage format."""

    def __init__(self) -> None:
        self.samples = self._bytes = 0
        self._digest = hashlib.sha256()

    def add(self, key: bytes, label: int, size: int, target: bytes = b"") -> None:
        """Add one sample of `size` bytes; where targets aren't classes, label 0 and its `target_bytes`."""
        self.samples += 1
        self._bytes += size
        self._digest.update(b"%d %d %s%s\n" % (label, size, target.hex().encode() + b" " if target else b"", key))

    def result(self) -> dict[str, Any]:
        """`samples`, `bytes` and `sha256`, as `Source.fingerprint` returns them."""
        return {"samples": self.samples, "bytes": self._bytes, "sha256": self._digest.hexdigest()}


def fingerprint_of(source: Source) -> dict[str, Any]:
    """The fingerprint of a source, from the keys, labels and sizes of all samples."""
    fingerprint = Fingerprint()
    if source.kind is Kind.classes and source.targets.ndim == 1:  # a task of a plugin's has targets of its own kind
        for index, label in enumerate(source.targets):
            fingerprint.add(source.raw_key(index), int(label), source.size(index))
    else:
        for index, target in enumerate(source.target_rows):
            fingerprint.add(source.raw_key(index), 0, source.size(index), target_bytes(target))
    return fingerprint.result()


def target_bytes(target: NDArray[Any]) -> bytes:
    """One sample's (K,) flags or numbers, or (12,) mask's digest, as bytes: uint8, or float32 little-endian."""
    return target.astype(np.dtype(target.dtype).newbyteorder("<"), copy=False).tobytes()


# How many samples, or pixels, of each class there are.

_LABELS = 1 << 20  # samples counted at a time
_MASKS = 1_000  # masks whose pixels are counted


def class_counts(source: Source) -> NDArray[np.int64]:
    """(K,) samples of each class of a source; of flags, samples that have it. Labels that no class has aren't counted.

    Samples are counted piece by piece: 10^8 of them take no more memory than 10^6.
    """
    num_classes = len(source.classes)
    counts = np.zeros(num_classes + 1, np.int64)  # the last one: labels that no class has
    for start in range(0, len(source) if num_classes else 0, _LABELS):
        piece = slice(start, start + _LABELS)
        if source.kind is Kind.flags:
            counts[:-1] += source.targets[piece].sum(axis=0, dtype=np.int64)
        else:
            counts += np.bincount(at_most(source.labels[piece], num_classes), minlength=num_classes + 1)
    return counts[:-1]


def pixel_counts(source: Source) -> NDArray[np.int64]:
    """(K,) pixels of each class in a source's masks, in 1,000 of them, evenly spaced, where there are more.

    A mask that can't be read isn't counted: training says so, or does without its sample.
    """
    counts = np.zeros(IGNORED + 1, np.int64)
    for index in np.unique(np.linspace(0, len(source) - 1, _MASKS).astype(np.int64)).tolist():
        with suppress(DataError):
            mask = decode_mask(source.read_mask(index), source.mask_format)
            counts += np.bincount(mask.ravel(), minlength=len(counts))
    return counts[: len(source.classes)]


def classes_without_samples(source: Source) -> list[str]:
    """Names of the classes that no sample has; none of masks, which aren't looked at for that."""
    if source.kind is Kind.masks:
        return []
    return [name for name, count in zip(source.classes, class_counts(source), strict=True) if not count]


def targets_of(source: Source) -> str:
    """How many classes, labels or numbers a source has, and how these were found, for `describe`."""
    count = len(source.target_names)
    words = {
        Kind.classes: f" in {count} classes",
        Kind.flags: f" with {count} labels",
        Kind.masks: f" with masks of {count} classes",
    }
    about = f" ({source.targets_note})" if source.targets_note else ""
    return words.get(source.kind, f" with {count} number{'s' * (count > 1)}") + about if count else ""
