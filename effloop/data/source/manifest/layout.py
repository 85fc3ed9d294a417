"""Which tables a dataset has, and what their columns are."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from effloop.data.source import tables
from effloop.data.source.base import USUAL, WHOLE, Kind, ScanError
from effloop.data.source.config import DataConfig
from effloop.data.source.folder import ENDINGS, EXTENSIONS
from effloop.data.source.root import expand_root, fetched_path
from effloop.data.source.tables import Row, Table, shown
from effloop.data.source.vocabulary import IMAGE_PATH, LABEL, MASK_PATH
from effloop.errors import ConfigError, DataError
from effloop.registry import choices


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


IS_VALID = "is_valid"
SPLIT = ("split", IS_VALID)
"""Names of columns, in any case; of several the first here is taken."""

FOLD = "fold"
"""Name of the column that says which fold a row is of, for `data.fold`."""

METADATA = "metadata"
"""Name of the table in each split's folder, as Hugging Face's datasets have it."""

_SPLITS = {"0": "train", "false": "train", "1": "val", "true": "val"}
"""What a column like `is_valid` says."""


class NoTargetsError(ScanError):
    """A table has no column that looks like targets."""


@dataclass(frozen=True)
class Part:
    """A table of the dataset, with its columns found.

    Attributes:
        table: the rows.
        split: the split that all of them are of; None if a column says it, or nothing does.
        folder: what paths are relative to.
        image, labels: places of these columns.
        by: place of the column that says the split; None if there is none.
        kept: name -> place of the columns that the index has, too: what `data.group` names, and `fold`.
        sure: whether the columns of the targets were named, by the user or as usual.
        masked: whether the targets are paths of masks.
    """

    table: Table
    split: str | None
    folder: bytes
    image: int
    labels: tuple[int, ...]
    by: int | None
    kept: Mapping[str, int]
    sure: bool
    masked: bool = False

    def rows(self, *places: int) -> Iterator[Row]:
        """The table's."""
        return self.table.rows(places)

    def others(self) -> list[str]:
        """Names of the columns beside paths and targets, those `kept` first."""
        known = {self.image, *self.labels, *self.kept.values()}
        return [*self.kept, *(name for place, name in enumerate(self.table.columns) if place not in known)]

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the columns of the targets."""
        return tuple(self.table.columns[place] for place in self.labels)


def split_of(column: str, value: str) -> str:
    """The split that a value of a column names: `1`, `True` are val, `0`, `False` train; `is_valid` has no others.

    Raises:
        DataError: nothing, or none of these; the message doesn't name the row.
    """
    word = value.strip()
    if not word:
        raise DataError(f"nothing in the column '{column}'; write train or val")
    if column.casefold() == IS_VALID and word.lower() not in _SPLITS:
        raise DataError(
            f"'{shown(word[:80])}' in the column '{column}' is not allowed; write 0 or false for train, 1 or true for "
            "val, or set data.split=COLUMN"
        )
    return _SPLITS.get(word.lower(), word)


def find_tables(config: CsvConfig, split: str) -> dict[str | None, Path]:
    """{split: its table} of a dataset; the split is None where one table has all.

    These are the training and the validation split, and `split` if it is another.

    Raises:
        ConfigError, DataError: they are not there.
    """
    root = expand_root(config).absolute()
    if config.val_root:
        if root.is_dir():
            raise ConfigError(f"data.root: '{config.root}' is a folder; with data.val_root it is a table: name a file")
        val = fetched_path(config, "val_root") or Path(os.path.expanduser(config.val_root)).absolute()
        if not val.is_file():
            raise ConfigError(f"data.val_root: '{config.val_root}' is no file that is there; set data.val_root=FILE")
        return {config.train_split: root, config.val_split or "val": val}
    if not root.is_dir():
        return {None: root}
    found: dict[str | None, Path] = {}
    for names in (_called(config.train_split), _called(config.val_split), (split,)):
        there = ((name, table) for name in names if name != WHOLE and (table := table_of(root, name)))
        found |= dict(islice(there, 1))
    if found:
        return found
    several = sorted(path for path in root.iterdir() if path.suffix.lower() in tables.ENDINGS)
    if len(several) == 1:
        return {None: several[0]}
    have = ", ".join(shown(path.name) for path in several[:8]) or "none"
    raise DataError(
        f"data.root: '{config.root}' has no table of '{config.train_split}' or '{config.val_split}' (looked for "
        f"{config.train_split}.csv, {config.train_split}/{METADATA}.csv and the like; have {have}); set data.root=FILE"
    )


def _called(split: str | None) -> tuple[str, ...]:
    """A split's name, and what else it is usually called."""
    return () if split is None else (split, *USUAL.get(split, ()))


def table_of(root: Path, split: str) -> Path | None:
    """`ROOT/SPLIT.csv`, `ROOT/SPLIT/metadata.csv` or the like."""
    places = (f"{split}{{}}", f"{split}/{METADATA}{{}}")
    paths = (root / place.format(ending) for place in places for ending in tables.ENDINGS)
    return next((path for path in paths if path.is_file()), None)


def open_part(config: CsvConfig, split: str | None, path: Path) -> Part:
    """A table of the dataset.

    Raises:
        ConfigError, DataError: it can't be read, or it lacks a column.
    """
    table, columns, base, image = open_paths(config, path)
    by = None
    if split is None:
        by = columns.named("split", config.split) if config.split else columns.first(SPLIT)
    asked = [name for name in (FOLD, config.group) if name]
    kept = {name: place for name in asked if (place := columns.first([name.casefold()])) is not None}
    label, mask = columns.first(LABEL), _mask(config, columns)
    if mask is not None and (config.targets or label is None):
        return Part(table, split, base, image, (mask,), by, kept, sure=True, masked=True)
    if (labels := config.labels()) is not None:
        found = tuple(columns.named("label", name) for name in labels)
    else:
        found = (label,) if label is not None else columns.rest({image, by, *kept.values()})
    return Part(table, split, base, image, found, by, kept, sure=labels is not None or label is not None)


def _mask(config: CsvConfig, columns: Columns) -> int | None:
    """The place of the column with the paths of masks, if targets may be masks and there is one.

    Raises:
        DataError: there is none, and they are to be masks.
    """
    if config.mask is not None:
        return columns.named("mask", config.mask)
    if config.labels() is not None or config.targets not in (None, Kind.masks.value):
        return None
    found = columns.first(MASK_PATH)
    if found is None and config.targets is not None:
        raise lacking(columns.table, "paths of masks", "mask", MASK_PATH)
    return found


def open_paths(config: CsvConfig, path: Path) -> tuple[Table, Columns, bytes, int]:
    """A table, its columns, the folder of its images, and the place of the column with their paths.

    Raises:
        ConfigError, DataError: it can't be read, or it lacks that column.
    """
    folder = Path(config.images) if config.images else path.parent
    if not folder.is_dir():
        raise ConfigError(f"data.images: '{config.images}' is no folder that is there; set data.images=FOLDER")
    base = os.fsencode(folder)
    known = {name.casefold() for name in (*IMAGE_PATH, *([config.image] if config.image else []))}

    def is_data(first: Sequence[str]) -> bool:
        names = [field.strip().casefold() for field in first]
        return known.isdisjoint(names) and find_image(base, tables.encoded(first[0])) is not None

    table = tables.open_table(path, is_data)
    columns = Columns(table)
    image = columns.named("image", config.image) if config.image else columns.first(IMAGE_PATH)
    if image is None:
        if table.has_names:
            raise lacking(table, "paths of images", "image", IMAGE_PATH)
        image = 0
    return table, columns, base, image


class Columns:
    """The columns of a table, by their names in any case."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._places = {name.casefold(): place for place, name in reversed([*enumerate(table.columns)])}

    def first(self, names: Iterable[str]) -> int | None:
        """The place of the first of these that is there."""
        return next((self._places[name] for name in names if name in self._places), None)

    def named(self, key: str, name: str) -> int:
        """The place of a column that `data.KEY` names.

        Raises:
            DataError: there is no such column.
        """
        if name in self.table.columns:
            return self.table.columns.index(name)
        if name.casefold() not in self._places:
            raise DataError(
                f"data.{key}: {shown(self.table.path)} has no column '{name}'; {choices(name, self.table.columns)}"
            )
        return self._places[name.casefold()]

    def rest(self, others: Iterable[int | None]) -> tuple[int, ...]:
        """The columns of the targets where none has a usual name: all others; of a table without names the second."""
        left = tuple(sorted({*range(len(self.table.columns))} - {*others}))
        if not left:
            raise lacking(self.table, "targets", "label", LABEL)
        return left if self.table.has_names else left[:1]


def lacking(table: Table, what: str, key: str, usual: Iterable[str]) -> DataError:
    """The error for a column that isn't there under any usual name."""
    error = table.wrong(
        f"has no column of {what} (looked for {', '.join(usual)}); {choices('', table.columns)}: set data=csv "
        f"data.{key}=COLUMN"
    )
    return NoTargetsError(str(error)) if key == "label" else error


def find_image(folder: bytes, name: bytes) -> tuple[bytes, os.stat_result] | None:
    """The path of an image below `folder`, and the file's status; None if there is none.

    A name without the extension of an image is completed by one.
    """
    found = _status(os.path.join(folder, name))
    if found is not None:
        return name, found
    if name[name.rfind(b".") :].lower() in ENDINGS:
        return None
    for ending in (*EXTENSIONS, *map(bytes.upper, EXTENSIONS)):
        found = _status(os.path.join(folder, name + ending))
        if found is not None:
            return name + ending, found
    return None


def _status(path: bytes) -> os.stat_result | None:
    """The status of a file; None if there is no such file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # ValueError: a null byte in it
        return None
    return status if stat.S_ISREG(status.st_mode) else None
