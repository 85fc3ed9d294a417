"""Predicted masks as files: one for each image, by the image's name."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from effloop.data.source import Source
from effloop.errors import ConfigError
from effloop.record.masks import overlay
from effloop.system.files import replacing

_QUALITY = 90


class MaskFiles:
    """A folder with a file for each image of a source: FOLDER/NAME, with the folders below the one that all are in.

    Args:
        key: of the command, that named the folder.
        folder: made if it isn't there.
        suffix: of the files; of two images whose names differ by theirs the second one keeps its own, too.
        source: of the images.

    Raises:
        ConfigError: the folder can't be written to, or a file would take the place of one of the source.
    """

    def __init__(self, key: str, folder: Path, suffix: str, source: Source) -> None:
        self.key, self.folder = key, folder
        self.names = file_names([os.fsdecode(each) for each in source.raw_keys(0, len(source))], suffix)
        folders = cache(os.path.realpath)  # there are a few: that of each file takes 20 µs

        def real(path: str) -> str:
            return os.path.join(folders(os.path.dirname(path)), os.path.basename(path))

        given = {real(os.fsdecode(each)) for each in source.file_paths()}
        for path in (os.path.join(folder, name) for name in self.names):
            if real(path) in given:
                raise ConfigError(
                    f"{key}: '{path}' would take the place of a file of the data; set {key} to another folder"
                )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise self._error(folder, error) from None

    def write(self, sample: int, content: bytes) -> None:
        """Write the file of a sample.

        Raises:
            ConfigError: it can't be written.
        """
        path = self.folder / self.names[sample]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(content)
        except OSError as error:
            raise self._error(path, error) from error

    def _error(self, path: Path, error: OSError) -> ConfigError:
        return ConfigError(f"{self.key}: '{path}' can't be written: {error.strerror}; set {self.key}=FOLDER")


def file_names(keys: Sequence[str], suffix: str) -> list[str]:
    """Names of files by keys of samples, all different and below the folder that they are put into, whatever the keys.

    Args:
        keys: paths, or what a packed format calls its samples.
        suffix: of the files.
    """
    pieces = [[part for part in key.replace("\0", "_").split("/") if part not in ("", ".", "..")] for key in keys]
    common = os.path.commonpath({"/".join(each[:-1]) for each in pieces})
    shared = len(common.split("/")) if common else 0
    names: dict[str, None] = {}
    for each in pieces:
        path = "/".join(each[shared:]) or "_"
        name = os.path.splitext(path)[0] + suffix
        while name in names:
            path = name = path + suffix
        names[name] = None
    return [*names]


def overlay_jpeg(image: NDArray[np.uint8], mask: NDArray[np.uint8]) -> bytes:
    """(height, width, 3) uint8 RGB and the classes of its pixels -> both, blended, as a JPEG file."""
    file = io.BytesIO()
    Image.fromarray(overlay(image, mask, borders=True)).save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()
