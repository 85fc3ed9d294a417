"""Fields of `data=csv`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from effloop.data.source.base import Kind
from effloop.data.source.config import DataConfig
from effloop.errors import ConfigError


@dataclass
class CsvConfig(DataConfig):
    """Fields of `data=csv`.

    Attributes:
        images: the folder that paths are relative to, or its URL; null is that of the table.
        image: the column with the paths of the images; null is file_name, path, image, filename or id.
        label: the column with the targets, or a list of several; null is label, labels, class or target.
        classes: names of the classes, in the order of their labels; null sorts them.
        mask: the column with the paths of masks, where these are the targets; null is mask, masks, mask_path or
            segmentation, where there is no column of other targets.
        reduce_zero, colors: how masks are read, as of `data=masks`.
        split: the column that says which split a row is of; null is split or is_valid, if there is one.
        val_root: a second table, of the validation split, or its URL; `root` is then the training split's.
        targets: what the targets are: classes, flags, numbers or masks; null is what `task` takes if it is set, or
            else what the values look like.
        index_dir: where the index is kept; null is $XDG_CACHE_HOME/effloop or ~/.cache/effloop.
    """

    url_keys = ("root", "val_root", "images")

    images: str | None = None
    image: str | None = None
    label: Any = None
    classes: list[str] | None = None
    mask: str | None = None
    reduce_zero: bool = False
    colors: str | None = None
    split: str | None = None
    val_root: str | None = None
    targets: str | None = None
    index_dir: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        labels = self.label if isinstance(self.label, list) else [self.label]
        if self.label is not None and (not labels or any(type(name) not in (str, int) for name in labels)):
            raise ConfigError(f"data.label: {self.label!r} is not allowed; set the name of a column, or [NAME,NAME]")
        if self.classes == []:
            raise ConfigError("data.classes: [] is not allowed; set [NAME,NAME], or null to sort those of the table")
        for key, names in (("label", self.labels() or []), ("classes", self.classes or [])):
            if twice := {name for name in names if names.count(name) > 1}:
                raise ConfigError(f"data.{key}: '{min(twice)}' comes twice; name each once")
        if self.targets not in (None, *(kind.value for kind in Kind)):
            raise ConfigError(
                f"data.targets: {self.targets!r} is not allowed; set classes, flags, numbers, masks or null"
            )
        if self.mask is not None:
            if self.label is not None:
                raise ConfigError(f"data.mask: '{self.mask}' contradicts data.label={self.label}; drop one of them")
            if self.targets not in (None, Kind.masks.value):
                raise ConfigError(
                    f"data.mask: '{self.mask}', but targets are to be {self.targets}; drop it, or set task=segmentation"
                )
            self.targets = Kind.masks.value

    def labels(self) -> list[str] | None:
        """`label` as a list."""
        return None if self.label is None else [*map(str, self.label if isinstance(self.label, list) else [self.label])]
