"""What `effloop convert` is asked for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from effloop.convert.reencode import Recipe
from effloop.data.source.storage.writing import SHARD_BYTES, writers
from effloop.errors import ConfigError

Splits = Annotated[
    Literal["both"] | tuple[Literal["train", "val"], ...],
    "their names in the data are data.train_split and data.val_split",
]
Side = Annotated[int, range(1, 65_501)]
"""Pixels that a JPEG's side may have, for libjpeg."""

_MB = 1 << 20
_RECODING = ("max_side", "quality", "color", "restart")
"""Options that ask for other bytes than the original's."""
_EXCLUDED = {
    ("to", "folder"): ("shuffle",),
    ("payload", "original"): _RECODING,
    ("payload", "raw"): ("quality", "restart"),
}
"""Options that contradict an option's value."""


@dataclass(frozen=True)
class ConvertOptions:
    """What is to be written.

    Attributes:
        to: the format.
        out: the file or folder to write; with several sizes a dataset for each, NAME-500, NAME-256.
        payload: the images' bytes as they are, JPEG, or decoded pixels; without it original, and jpeg with any of
            max_side, quality, color and restart.
        quality: of a JPEG, 90 without it; source keeps the original's tables.
        max_side: scale the longer side down to so many pixels.
        restart: MCUs between restart markers, which let a crop be decoded alone; auto, without it: every 32 pixels
            or so.
        index: auto adds entropy indexes, up to 3 % of the bytes, with which crops of JPEGs without restart markers
            are decoded alone, if they are baseline; none leaves them out.
        color: make all images RGB, or all grey; without it grey ones stay grey.
        skip_bad: leave out images that can't be read or decoded, instead of writing nothing.
        shuffle: write the samples of the training split in an order that `seed` shuffles, instead of the source's.
        split: which of the splits data.train_split and data.val_split.
        shard_mb: a file of a format that has several ends with the sample that reaches this (MiB).

    Raises:
        ConfigError: options contradict each other, or `out` can't be written.
    """

    to: Annotated[str, writers]
    out: Path
    payload: Literal["original", "jpeg", "raw"] | None = None
    quality: Literal["source"] | Annotated[int, range(1, 101)] | None = None
    max_side: tuple[Side, ...] = ()
    restart: Literal["auto", "none"] | Side | None = None
    index: Literal["auto", "none"] = "auto"
    color: Literal["rgb", "gray"] | None = None
    skip_bad: bool = False
    shuffle: bool = False
    split: Splits = "both"
    shard_mb: Annotated[int, range(1, (1 << 30) + 1)] = SHARD_BYTES // _MB

    def __post_init__(self) -> None:
        for (key, value), others in _EXCLUDED.items():
            for other in others:
                if getattr(self, key) == value and getattr(self, other):
                    raise ConfigError(f"{other}: contradicts {key}={value}; drop one of them")
        if self.shuffle and "train" not in self.splits:
            raise ConfigError("shuffle: only the training split is shuffled; drop it, or split=val")
        if not os.path.isdir(self._out.parent):  # unlike Path's own, it never raises
            raise ConfigError(
                f"out: '{self.out}' can't be made, the folder {self._out.parent} is not there; make it or set out=PATH"
            )
        if not self._out.name:
            raise ConfigError(f"out: '{self.out}' has no name; set out=PATH")

    @property
    def _out(self) -> Path:
        return Path(os.path.abspath(os.path.expanduser(self.out)))

    @property
    def outputs(self) -> dict[Path, Recipe | None]:
        """{path or URL: how its images are re-encoded}, a dataset for each size; None copies them as they are."""
        if self.payload == "original" or not any(getattr(self, key) for key in ("payload", *_RECODING)):
            return {self._out: None}
        keys = ("payload", "quality", "restart", "color")
        recipe: dict[str, Any] = {key: getattr(self, key) for key in keys if getattr(self, key)}
        if len(self.max_side) < 2:
            return {self._out: Recipe(**recipe, max_side=next(iter(self.max_side), None))}
        name = PurePosixPath(self._out.name)
        sized = {size: self._out.with_name(f"{name.stem}-{size}{name.suffix}") for size in self.max_side}
        return {out: Recipe(**recipe, max_side=size) for size, out in sized.items()}

    @property
    def splits(self) -> tuple[str, ...]:
        """Which of `train` and `val`."""
        return split_names(self.split)

    @property
    def writes_indexes(self) -> bool:
        """Whether entropy indexes are written; images in files of their own have no column for them."""
        return self.index == "auto" and self.to != "folder"

    @property
    def shard_bytes(self) -> int:
        """A file of a format that has several ends with the sample that reaches this."""
        return self.shard_mb * _MB


def split_names(split: Splits) -> tuple[str, ...]:
    """`train`, `val`, or both in this order."""
    return tuple(name for name in ("train", "val") if split == "both" or name in split)
