"""Files of numpy: an `.npz` with arrays of images and labels, or a folder of `.npz` or `.npy` files.

Nothing is ever unpickled.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from effloop.data.source.base import sources
from effloop.data.source.formats.array_names import ArrayNames, ArraysConfig, named_after_splits
from effloop.data.source.formats.array_records import contents_of
from effloop.data.source.formats.array_streams import DAMAGED, StreamedArray, npy_header
from effloop.data.source.formats.stored_array import StoredArray
from effloop.data.source.root import begins_with, expand_root
from effloop.data.source.storage.imported import Contents, ImportedSource
from effloop.errors import ConfigError, DataError

_ZIP, _NPY = b"PK\x03\x04", b"\x93NUMPY"
_ENDINGS = ("*.npz", "*.npy")


@sources.register("npz", ArraysConfig)
class NpzSource(ImportedSource):
    """Arrays of numpy: one `.npz` as MedMNIST and Keras have it, or a folder of `.npz` and `.npy` files."""

    config: ArraysConfig

    def originals(self) -> Sequence[Path]:
        root = expand_root(self.config)
        if root.is_file():
            return [root]
        if found := _files(root):
            return found
        raise ConfigError(f"data.root: '{self.config.root}' has no .npz or .npy files; set data.root=PATH")

    def contents(self, files: Sequence[Path]) -> Contents:
        names = [name for file in files for name in _names(file, alone=len(files) == 1)]
        arrays = ArrayNames([name for name, _, _ in names], str(self.config.root), self.config)
        places = {name: (file, member) for name, file, member in names}
        return contents_of(arrays, self.split, self.config, lambda name: _open(*places[name]))

    @classmethod
    def claims(cls, root: Path) -> bool:
        if root.is_dir():
            return named_after_splits(root, _files(root))
        if begins_with(root, _NPY):
            return True
        if not begins_with(root, _ZIP):
            return False
        try:
            with zipfile.ZipFile(root) as archive:
                return any(name.endswith(".npy") for name in archive.namelist())
        except (*DAMAGED, ValueError):
            return root.suffix == ".npz"


def _files(root: Path) -> list[Path]:
    return sorted({file for ending in _ENDINGS for file in root.glob(ending) if file.is_file()})


def _names(file: Path, *, alone: bool) -> list[tuple[str, Path, str | None]]:
    """(name, file, member) of each array in a file."""
    if begins_with(file, _NPY):
        return [(file.stem, file, None)]
    try:
        with zipfile.ZipFile(file) as archive:
            members = [name for name in archive.namelist() if name.endswith(".npy")]
    except (*DAMAGED, ValueError) as error:
        raise DataError(f"{file} is damaged or cut short, or no .npz: {error}; get it again") from None
    before = "" if alone else f"{file.name}/"
    return [(before + member.removesuffix(".npy"), file, member) for member in members]


def _open(file: Path, member: str | None) -> StoredArray:
    if member is None:
        return StreamedArray(str(file), partial(_open_file, file), npy_header)
    return StreamedArray(f"{file}:{member.removesuffix('.npy')}", partial(_open_member, file, member), npy_header)


def _open_file(file: Path) -> BinaryIO:
    return file.open("rb")


def _open_member(file: Path, member: str) -> BinaryIO:
    with zipfile.ZipFile(file) as archive:  # the member keeps the file open
        return cast("BinaryIO", archive.open(member))
