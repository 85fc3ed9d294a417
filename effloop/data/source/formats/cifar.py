"""CIFAR-10 and CIFAR-100 as their authors give them for Python: pickles of arrays.

An image is 32x32, 3,072 bytes: the planes of red, green and blue. A pickle is a dict of `data`, (N, 3072) uint8,
and `labels`, or `fine_labels`; nothing in it is run (`pickles`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from effloop.data.source.base import NoSplitError, sources
from effloop.data.source.formats.pickles import Array, unpickle
from effloop.data.source.root import expand_root
from effloop.data.source.storage import imported, packed, writing
from effloop.errors import ConfigError, DataError

_SIDE = 32
_BYTES = 3 * _SIDE * _SIDE
_FILES: dict[str, dict[str, list[str]]] = {
    "cifar-10-batches-py": {
        "train": [f"data_batch_{number}" for number in range(1, 6)],
        "test": ["test_batch"],
        "names": ["batches.meta"],
    },
    "cifar-100-python": {"train": ["train"], "test": ["test"], "names": ["meta"]},
}
"""Of the splits, and of the names of the classes, by the folder that the archive unpacks."""


@sources.register("cifar", packed.PackedConfig)
class CifarSource(imported.ImportedSource):
    """CIFAR-10 and CIFAR-100, in the python version, or a folder that has one of them in its own."""

    @classmethod
    def claims(cls, root: Path) -> bool:
        return bool(_found(root))

    def originals(self) -> Sequence[Path]:
        found = _found(expand_root(self.config))
        if len(found) != 1:
            there = f"several datasets, {' and '.join(map(str, found))}" if found else f"none of {', '.join(_FILES)}"
            raise ConfigError(
                f"data.root: '{self.config.root}' has {there} (the binary version isn't read); set data.root=FOLDER to "
                "one that an archive was unpacked into"
            )
        [(folder, files)] = found.items()
        if self.split not in files or self.split == "names":
            raise NoSplitError(f"data.root: '{self.config.root}' has the splits train and test, and no '{self.split}'")
        paths = [folder / name for name in (*files[self.split], *files["names"])]
        if missing := [path for path in paths if not path.is_file()]:
            raise DataError(f"{missing[0]} is missing; unpack the archive again")
        return paths

    def contents(self, files: Sequence[Path]) -> imported.Contents:
        *batches, names = files
        prefix = "" if names.name == "batches.meta" else "fine_"
        found = [_batch(file, f"{prefix}labels") for file in batches]
        texts = _dict(names).get(f"{prefix}label_names")
        if not isinstance(texts, list) or not all(isinstance(text, str | bytes) for text in texts):
            raise DataError(f"{names} has no list '{prefix}label_names' of texts; unpack the archive again")
        classes = [text if isinstance(text, str) else text.decode("utf-8", "backslashreplace") for text in texts]
        count = sum(map(len, found))

        def records() -> Iterator[writing.Record]:
            for file, batch in zip(batches, found, strict=True):
                for number, (label, planes) in enumerate(batch):
                    image = imported.raw_image(planes.reshape(3, _SIDE, _SIDE).transpose(1, 2, 0))
                    yield writing.Record(f"{file.name}/{number:05}".encode(), label, image)

        return imported.Contents(records(), count, count * (_BYTES + 16), classes, about=imported.RAW)


def _found(root: Path) -> Mapping[Path, Mapping[str, list[str]]]:
    """The folders that have a dataset's files, which are `root` or in it."""
    return {
        folder: files
        for name, files in _FILES.items()
        for folder in (root, root / name)
        if all((folder / file).is_file() for file in (files["train"][0], *files["test"], *files["names"]))
    }


def _batch(file: Path, key: str) -> list[tuple[int, Any]]:
    """Label and (3072,) pixels of each image."""
    found = _dict(file)
    pixels, labels = found.get("data"), found.get(key)
    values = pixels.values if isinstance(pixels, Array) else np.empty(0)
    numbers = isinstance(labels, list) and all(type(label) is int and 0 <= label < 256 for label in labels)
    if not isinstance(labels, list) or not numbers or (values.dtype, *values.shape) != (np.uint8, len(labels), _BYTES):
        raise DataError(
            f"{file} has no array 'data' of (N, {_BYTES:,}) uint8, or no list '{key}' of N numbers from 0 to 255; "
            "unpack the archive again"
        )
    return [*zip(labels, values, strict=True)]


def _dict(file: Path) -> dict[str, Any]:
    """The dict in a pickle, with keys as text."""
    try:
        found = unpickle(file.read_bytes())
    except DataError as error:
        raise DataError(f"{file} {error}; unpack the archive again") from None
    if not isinstance(found, dict):
        raise DataError(f"{file} holds a pickle that is no dict; unpack the archive again")
    return {key.decode("latin-1") if isinstance(key, bytes) else str(key): value for key, value in found.items()}
