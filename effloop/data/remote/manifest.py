"""The files of a remote dataset, as they were when a run began."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from effloop.data.remote.location import Location
from effloop.errors import DataError
from effloop.system.files import write_text

_LONGEST_NAME = 60


@dataclass(frozen=True)
class RemoteFile:
    """A file in a store.

    Attributes:
        key: its whole path there.
        size: bytes.
        version: identifies its content: the ETag, or else the time of its last change; empty if neither is known.
        ranges: whether a part of it can be read.
    """

    key: str
    size: int
    version: str
    ranges: bool = True

    def identity(self, place: str) -> str:
        """A name for its content at a place."""
        return hashlib.sha256(f"{place}/{self.key}\0{self.size}\0{self.version}".encode()).hexdigest()


@dataclass(frozen=True)
class Manifest:
    """The files that a `data.root` names.

    Attributes:
        root: as typed.
        place: the URL of the bucket or host.
        base: what the keys begin with, which local names leave out.
        alone: whether the root is one file.
        files: by key.
    """

    root: str
    place: str
    base: str
    alone: bool
    files: Sequence[RemoteFile]

    @property
    def bytes(self) -> int:
        """Sum of the files' sizes."""
        return sum(file.size for file in self.files)

    @cached_property
    def sha256(self) -> str:
        """Over the names, sizes and versions of all files, wherever they are."""
        rows = [[self.name(file), file.size, file.version] for file in self.files]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    @property
    def folder(self) -> str:
        """The name of the local folder for these files in these versions."""
        name = re.sub(r"[^A-Za-z0-9]+", "-", self.root.partition("://")[2]).strip("-")[:_LONGEST_NAME]
        digest = hashlib.sha256(f"{self.place}/{self.base}\0{self.alone}\0{self.sha256}".encode())
        return f"{name}-{digest.hexdigest()[:16]}"

    def name(self, file: RemoteFile) -> str:
        """The path of a file in the local folder."""
        return file.key.removeprefix(self.base)

    def fingerprint(self) -> dict[str, Any]:
        """`files`, `bytes` and `sha256`."""
        return {"files": len(self.files), "bytes": self.bytes, "sha256": self.sha256}

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**vars(self), "files": [asdict(file) for file in self.files]} | {"sha256": self.sha256}

    def write(self, path: Path) -> None:
        """Write it as JSON, atomically."""
        write_text(path, json.dumps(self.to_plain()) + "\n")

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Manifest:
        """The inverse of `to_plain`."""
        files = tuple(RemoteFile(**file) for file in plain["files"])
        return cls(plain["root"], plain["place"], plain["base"], plain["alone"], files)

    @classmethod
    def read(cls, path: Path) -> Manifest | None:
        """Read a file; None if it isn't there or is something else."""
        try:
            return cls.of(json.loads(path.read_text()))
        except (OSError, ValueError, LookupError, TypeError):
            return None


def manifest_of(location: Location, files: Sequence[RemoteFile], *, alone: bool, base: str) -> Manifest:
    """The manifest of a listing; empty files and the markers of folders are left out.

    Args:
        location: what was listed.
        files: the files that it names.
        alone: see `Manifest`.
        base: see `Manifest`.

    Raises:
        DataError: there are no files, or one that is named is missing or can't be a local file's name.
    """
    missing = location.missing({file.key for file in files}) if location.has_patterns else []
    found = sorted((file for file in files if file.size and not file.key.endswith("/")), key=lambda file: file.key)
    root = location.root
    if missing:
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise DataError(
            f"data.root: '{root}' names files that aren't there: {location.url(missing[0])}{more}; correct it"
        )
    if not found:
        raise DataError(f"data.root: '{root}' has no files; set data.root to the URL of a folder, a file or a pattern")
    names = {file.key.removeprefix(base) for file in found}
    for name in names:
        parts = PurePosixPath(name).parts
        strange = "/".join(parts) != name or ".." in parts or "\0" in name or "\\" in name or not name
        if strange or any("/".join(parts[:depth]) in names for depth in range(1, len(parts))):
            raise DataError(f"data.root: '{root}' has a file '{name}', which can't be a local file's name; rename it")
    return Manifest(root, location.place, base, alone, tuple(found))
