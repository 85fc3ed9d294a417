"""IDX files, as MNIST, Fashion-MNIST, KMNIST and EMNIST are distributed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from effloop.data.source.base import sources
from effloop.data.source.formats.array_names import ArrayNames, ArraysConfig
from effloop.data.source.formats.array_records import contents_of
from effloop.data.source.formats.array_streams import StreamedArray, idx_header, plain_or_gzip
from effloop.data.source.root import root_folder
from effloop.data.source.storage.imported import Contents, ImportedSource
from effloop.errors import ConfigError

_PLACES = (".", "raw", "*/raw", "gzip")
"""Where torchvision and EMNIST's archive have them."""


@sources.register("idx", ArraysConfig)
class IdxSource(ImportedSource):
    """A folder of IDX files, gzipped or not: train-images-idx3-ubyte and so on; t10k is the split test."""

    config: ArraysConfig

    def originals(self) -> Sequence[Path]:
        root = root_folder(self.config)
        folders = _folders(root)
        if len(folders) == 1:
            return _files(folders[0])
        there = f"several datasets, {', '.join(map(str, folders))}" if folders else "no files *-idx3-ubyte or *.gz"
        raise ConfigError(f"data.root: '{self.config.root}' has {there}; set data.root=FOLDER")

    def contents(self, files: Sequence[Path]) -> Contents:
        places = {file.name.removesuffix(".gz"): file for file in files}
        names = ArrayNames([*places], str(self.config.root), self.config)

        def opened(name: str) -> StreamedArray:
            return StreamedArray(str(places[name]), partial(plain_or_gzip, places[name]), idx_header)

        return contents_of(names, self.split, self.config, opened)

    @classmethod
    def claims(cls, root: Path) -> bool:
        return root.is_dir() and bool(_folders(root))


def _folders(root: Path) -> list[Path]:
    return [
        folder
        for place in _PLACES
        for folder in ([root] if place == "." else sorted(root.glob(place)))
        if _files(folder)
    ]


def _files(folder: Path) -> list[Path]:
    """The IDX files of a folder, each once: decompressed, where there are both."""
    found = sorted(file for file in folder.glob("*[-.]idx[1-9]-*") if file.is_file())
    plain = {file.name for file in found}
    return [file for file in found if file.suffix != ".gz" or file.stem not in plain]
