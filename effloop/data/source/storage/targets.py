"""Targets that aren't classes, as they are stored: K flags or numbers for each sample, or what identifies its mask."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.mask import DIGEST_BYTES
from effloop.data.source.base import Kind, Source
from effloop.errors import DataError

NAME = "targets.json"
"""What targets are, beside files that hold nothing but their values: `{"kind": "flags", "names": ["cat", "dog"]}`."""


@dataclass(frozen=True)
class Targets:
    """What the targets of a split are."""

    kind: Kind = Kind.classes  # these have no more to say; flags and numbers have K values a sample, masks a digest
    names: tuple[str, ...] = ()  # of these K; of the classes of masks

    @classmethod
    def of(cls, source: Source) -> Targets:
        """Those of a source."""
        return CLASSES if source.kind is Kind.classes else cls(source.kind, source.target_names)

    def __bool__(self) -> bool:
        """Whether they are anything else than classes."""
        return self.kind is not Kind.classes

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of one value as it is stored: uint8, or float32 little-endian."""
        return np.dtype("<f4" if self.kind is Kind.numbers else np.uint8)

    @property
    def columns(self) -> int:
        """Values that each sample has; of masks the bytes of a digest."""
        return DIGEST_BYTES if self.kind is Kind.masks else len(self.names)

    @property
    def row_bytes(self) -> int:
        """Of one sample; 0 for classes, which are stored as labels."""
        return self.columns * self.dtype.itemsize

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of flags or masks' classes; numbers are of no class."""
        return () if self.kind is Kind.numbers else self.names

    def rows(self, values: NDArray[Any]) -> NDArray[Any]:
        """(N, K) view of N * K values, or of their bytes; a `ValueError` if these are no whole rows."""
        stored = values if values.dtype.newbyteorder("=") == self.dtype.newbyteorder("=") else values.view(self.dtype)
        return stored.reshape(-1, self.columns)

    def values(self, target: bytes) -> NDArray[Any]:
        """(K,) one sample's."""
        return np.frombuffer(target, self.dtype)

    def wrong(self, values: NDArray[Any]) -> str | None:
        """What is wrong with one sample's (K,) values; None if nothing is."""
        if self.kind is Kind.masks:
            return None
        right = (values == 0) | (values == 1) if self.kind is Kind.flags else np.isfinite(values)
        if right.all():
            return None
        place = int(np.argmin(right))
        allowed = "0 and 1" if self.kind is Kind.flags else "finite numbers"
        return f"has {values[place]:g} for '{self.names[place]}'; allowed are {allowed}"

    def header(self) -> dict[str, Any]:
        """For JSON."""
        return {"kind": self.kind.value, "names": list(self.names)}


CLASSES = Targets()
MASKS = Targets(Kind.masks)  # whose classes aren't named yet

_STORED = tuple(kind.value for kind in (Kind.flags, Kind.numbers, Kind.masks))


def parse_targets(found: Any) -> Targets | None:
    """What `Targets.header` gave; None if it is anything else."""
    if not isinstance(found, Mapping) or found.get("kind") not in _STORED:
        return None
    names = found.get("names")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        return None
    return Targets(Kind(found["kind"]), tuple(names))


def write_targets(root: Path, targets: Targets) -> None:
    """Write what targets are, for files that hold only values: `ROOT/targets.json`."""
    (root / NAME).write_text(json.dumps(targets.header(), indent=1) + "\n")


def read_targets(root: Path) -> Targets:
    """What `ROOT/targets.json` says; classes if there is no such file."""
    path = root / NAME
    if not path.is_file():
        return CLASSES
    try:
        found = parse_targets(json.loads(path.read_bytes()))
    except (ValueError, RecursionError):
        found = None
    if found is None:
        raise DataError(
            f"{path} doesn't say what targets are; it should be like "
            '{"kind": "flags" or "numbers", "names": ["name of each value", ...]}'
        )
    return found


def flags_of(classes: Sequence[int], count: int) -> bytes:
    """The flags, stored as uint8, of a sample that has these of `count` classes; a DataError if there are fewer."""
    row = np.zeros(count, np.uint8)
    for label in classes:
        if not 0 <= label < count:
            raise DataError(f"has the label {label}; allowed are 0 to {count - 1}")
        row[label] = 1
    return row.tobytes()


def row_of(values: Any, targets: Targets) -> bytes:
    """One sample's values, found in a file, as they are stored; a DataError, which doesn't name the sample, if they are
    no list of so many numbers, or one of them may not be there.
    """
    if not isinstance(values, Sequence) or not all(isinstance(value, int | float) for value in values):
        raise DataError(f"holds no list of {len(targets.names):,} numbers, as {NAME} or the first sample says")
    if len(values) != len(targets.names):
        count = f"{len(targets.names):,} by {NAME} or the first sample"
        raise DataError(f"has {len(values):,} values, not {count}; correct either of them")
    with np.errstate(over="ignore"):  # what float32 can't hold is infinite, which is refused
        row = np.array([min(max(value, -1e300), 1e300) for value in values], "<f4")
    if problem := targets.wrong(row):
        raise DataError(problem)
    return row.astype(targets.dtype).tobytes()
