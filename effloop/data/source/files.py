"""Images that are no dataset: files by their paths, and images in memory. They have no targets."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.header import Encoded
from effloop.data.source.base import Kind, Source, printable
from effloop.data.source.storage.loose import SOUGHT, folders, images_in, kinds_of, left_out, read_file
from effloop.data.source.view import View
from effloop.errors import DataError


class Unlabelled(View):
    """A source without its targets."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.classes = ()
        self.kind = Kind.classes if source.kind is Kind.masks else source.kind

    @property
    def targets(self) -> NDArray[Any]:
        """(len,) zeros, which nothing reads."""
        return np.zeros(len(self.source), np.uint8)


class Images(Source):
    """Images without targets: files by their paths, or `encoded` ones in memory with names.

    What isn't an image is found when it is read. `where` is what messages call them.
    """

    classes = ()

    def __init__(self, names: Sequence[bytes], where: str, encoded: Sequence[Encoded] | None = None) -> None:
        self.names, self._where, self._encoded = names, where, encoded
        self.labels = np.zeros(len(names), np.uint8)

    def read(self, index: int) -> Encoded:
        return read_file(self.names[index]) if self._encoded is None else self._encoded[index]

    def size(self, index: int) -> int:
        return os.stat(self.names[index]).st_size if self._encoded is None else len(self._encoded[index])

    def raw_key(self, index: int) -> bytes:
        return self.names[index]

    def name(self, index: int) -> str:
        return self.key(index)

    @property
    def where(self) -> str:
        return self._where

    def file_paths(self) -> Iterable[bytes]:
        return self.names if self._encoded is None else ()


def find_images(paths: Sequence[Path]) -> Images:
    """The images that paths name, in this order, each once: files, which are taken whatever their names are; folders,
    whose images are taken with those in all folders below, sorted; or patterns such as `photos/**/*.jpg`.
    """
    found, kinds = dict[bytes, None](), Counter[bytes]()
    for path in dict.fromkeys(paths):
        before = len(found)
        matches = [path] if os.path.lexists(path) else map(Path, sorted(glob.glob(str(path), recursive=True)))
        for match in matches:
            name = os.fsencode(match)
            found.update(dict.fromkeys(_below(name, kinds) if os.path.isdir(match) else [name]))
        if len(found) == before and os.path.isdir(path):
            raise DataError(f"'{path}' has no images ({SOUGHT}); name another folder")
        if len(found) == before and not os.path.lexists(path):
            what = "matches nothing" if glob.has_magic(str(path)) else "is not there"
            raise DataError(f"'{path}' {what}; name images, folders of images, or patterns such as 'photos/*.jpg'")
    names = ", ".join(printable(os.fsencode(path)) for path in paths[:3])
    source = Images([*found], names + (f" and {len(paths) - 3} more" if len(paths) > 3 else ""))
    source.left_out = left_out(kinds_of(kinds))
    return source


def _below(folder: bytes, kinds: Counter[bytes]) -> Iterator[bytes]:
    """Paths of the images in a folder and those below, sorted within each folder."""
    for each in sorted(folders(folder), key=os.fsdecode):
        yield from (entry.path for entry in images_in(each, kinds))
