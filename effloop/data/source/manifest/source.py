"""A table with a row for each image: its path, and its targets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.mask import PLAIN, MaskFormat
from effloop.data.source import tables
from effloop.data.source.base import WHOLE, Kind, NoSplitError, ScanError, printable, sources
from effloop.data.source.config import DataConfig
from effloop.data.source.files import ImageFiles
from effloop.data.source.formats.parquet.source import holds_images
from effloop.data.source.manifest.config import CsvConfig
from effloop.data.source.manifest.indexing import IndexWriter
from effloop.data.source.manifest.layout import (
    SPLIT,
    NoTargetsError,
    find_image,
    find_tables,
    open_part,
    open_paths,
    table_of,
)
from effloop.data.source.masks.layout import format_of, names_of, numbered, refuse_larger
from effloop.data.source.masks.scan import masks_unchanged, refuse_unusable
from effloop.data.source.root import expand_root, fetched_path
from effloop.data.source.storage.columns import ColumnFile
from effloop.data.source.storage.kept import folders_unchanged, open_kept, times_digest
from effloop.data.source.storage.loose import LooseSource
from effloop.data.source.storage.states import file_state
from effloop.data.source.storage.targets import NAME as TARGETS
from effloop.data.source.storage.targets import Targets, read_targets
from effloop.errors import DataError


@sources.register("csv", CsvConfig)
class CsvSource(LooseSource):
    """A table with a row for each image: CSV, TSV, JSON lines or parquet.

    Samples are numbered in the order of the split's rows.
    """

    any_kind = True

    def __init__(self, config: CsvConfig, split: str) -> None:
        index = _index(config, split)
        splits = index.meta["splits"]
        if split not in splits:
            raise NoSplitError(_no_split(config, split, [*splits]))
        refuse_unusable(splits[split])
        self._open(index, split, *self._mask_classes(config, index))
        if (lacking := splits[split]["lacking"]) and not config.allow_missing_classes:
            raise DataError(
                f"{self.where} has no rows of {len(lacking):,} of {len(self.classes):,} classes: "
                f"{', '.join(lacking[:8])}; add some, or set data.allow_missing_classes=true"
            )

    @staticmethod
    def _mask_classes(config: CsvConfig, index: ColumnFile) -> tuple[MaskFormat, tuple[str, ...], str]:
        """How masks are read, names of their classes, and what says so; nothing of that where targets aren't masks.

        Raises:
            DataError: a mask has a value of no class.
        """
        if index.meta["kind"] != Kind.masks.value:
            return PLAIN, (), ""
        form, colour_names = format_of(config)
        splits = [*index.meta["splits"].values()]
        at = max(range(len(splits)), key=lambda number: splits[number]["largest"])
        root = expand_root(config).absolute()
        names, told_by = names_of(config, root if root.is_dir() else root.parent, (), colour_names)
        names, told_by = numbered(names, told_by, splits[at]["largest"])
        folder, path = os.fsencode(splits[at]["root"]), index.blobs(f"{at}/mask")[splits[at]["largest_at"]]
        refuse_larger(splits[at]["largest"], names, told_by, os.path.join(folder, bytes(path)))
        return form, names, told_by

    def _open(
        self,
        index: ColumnFile,
        split: str,
        mask_format: MaskFormat = PLAIN,
        mask_classes: tuple[str, ...] = (),
        told_by: str = "",
    ) -> None:
        self.mask_format, self._mask_names, self._told_by = mask_format, mask_classes, told_by
        self._index, self._split = index, split
        self._said = index.meta["splits"][split]
        number = self._number = [*index.meta["splits"]].index(split)
        self.kind = Kind(index.meta["kind"])
        names = mask_classes or tuple(index.meta["names"])
        self.classes = () if self.kind is Kind.numbers else names
        if self.kind is Kind.classes:
            self._targets = self.labels = index[f"{number}/label"]
        else:
            self._targets = self._rows = Targets(self.kind, names).rows(index[f"{number}/target"])
        if self.kind is Kind.masks:
            self._targets = np.empty((len(self._rows), 0), np.uint8)
            self._masks = index.blobs(f"{number}/mask")
        self._keys = index.blobs(f"{number}/key")
        self._ends = index[f"{number}/end"]
        self._folder = self._mask_folder = os.fsencode(self._said["root"])
        self.columns = tuple(self._said["columns"])

    @classmethod
    def claims(cls, root: Path) -> bool:
        if root.is_file():
            return root.suffix.lower() in tables.ENDINGS and not _has_images_in_it(root)
        if (root / TARGETS).is_file():  # what `convert to=folder` wrote, of any splits
            return any(table_of(root, path.name) for path in root.iterdir() if path.is_dir())
        images = root / "train"  # its folders would be classes, which need no table
        if not root.is_dir() or (table := table_of(root, "train")) is None or _has_images_in_it(table):
            return False
        return not images.is_dir() or not any(path.is_dir() for path in images.iterdir())

    @property
    def targets(self) -> NDArray[Any]:
        return self._targets

    @property
    def target_rows(self) -> NDArray[Any]:
        return self._rows if self.kind is Kind.masks else self._targets

    @property
    def about_targets(self) -> str:
        told_by: str = self._told_by or self._index.meta["told_by"]
        return told_by

    @property
    def target_names(self) -> tuple[str, ...]:
        return self._mask_names or tuple(self._index.meta["names"])

    def column(self, name: str, start: int, stop: int) -> Sequence[bytes]:
        return self._index.blobs(f"{self._number}/column/{name}").items(start, stop)

    def name(self, index: int) -> str:
        return printable(self.path(index))

    @property
    def where(self) -> str:
        table = tables.shown(self._said["table"])
        return table if self._said["whole"] else f"{table}:{self._split}"

    def fingerprint(self) -> dict[str, Any]:
        fingerprint: dict[str, Any] = self._said["fingerprint"]
        return fingerprint

    def identity(self) -> dict[str, Any]:
        return {
            **super().identity(),
            "root": self._said["root"],
            "tables": self._index.meta["tables"],
            "folders": times_digest(self._index),
        }

    def __getstate__(self) -> dict[str, Any]:
        masks = (self.mask_format, self._mask_names, self._told_by)
        return {"index": self._index, "split": self._split, "masks": masks, "fingerprint": self.fingerprint()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["split"] not in state["index"].meta["splits"]:
            raise DataError(f"the split '{state['split']}' is gone since this run opened it; start the run again")
        self._open(state["index"], state["split"], *state["masks"])
        self.check_unchanged(state["fingerprint"])


def _has_images_in_it(table: Path) -> bool:
    """Whether a table has encoded images instead of their paths: then it is of `data=parquet`."""
    return table.suffix.lower() == ".parquet" and holds_images(table)


def listed_images(path: Path) -> ImageFiles:
    """The images that a table's rows name, whatever else it has; what isn't there is found when it is read.

    Raises:
        DataError: it can't be read, has no column of paths, or no rows.
    """
    table, _, folder, place = open_paths(CsvConfig("csv", str(path)), path)
    paths = []
    for _, (text,) in table.rows([place]):
        name = tables.encoded(text)
        found = find_image(folder, name)
        paths.append(os.path.join(folder, name if found is None else found[0]))
    if not paths:
        raise table.wrong("has no rows; write a row for each image")
    return ImageFiles(paths, tables.shown(path))


def _index(config: CsvConfig, split: str) -> ColumnFile:
    """The index of the tables: kept from an earlier reading if they haven't changed, or from a new one."""
    config = _as_said(config)
    found = find_tables(config, split)
    try:
        states = [file_state(path) for path in found.values()]
    except OSError as error:
        raise DataError(f"{error.filename} can't be read: {error.strerror}") from None
    # Each choice of columns and tables is an index of its own.
    own = [getattr(config, field.name) for field in fields(config)[len(fields(DataConfig)) :]]
    read_as = f"\0{format_of(config)[0]}" if config.colors else ""
    identity = f"{[*map(str, found.values())]}\0{[*found]}\0{config.group}\0{own}{read_as}".encode(
        errors="surrogateescape"
    )

    def is_current(index: ColumnFile) -> bool:
        same = index.meta.get("tables") == states and "told_by" in index.meta and folders_unchanged(index)
        if not same or index.meta["kind"] != Kind.masks.value:
            return same
        roots = [os.fsencode(said["root"]) for said in index.meta["splits"].values()]
        return all(masks_unchanged(index, root, f"{number}/") for number, root in enumerate(roots))

    def write(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            parts = [open_part(config, name, table) for name, table in found.items()]
            writer = IndexWriter(config, parts, path.parent)
        except OSError as error:
            if error.filename is None:  # of a column that grows beside the index
                raise
            raise DataError(f"{error.filename} can't be read: {error.strerror}") from None
        except NoTargetsError:
            raise
        except DataError as error:
            raise ScanError(str(error)) from None
        writer.write(path, {"tables": states})

    return open_kept("csv", config.index_dir, identity, is_current, write)


def _as_said(config: CsvConfig) -> CsvConfig:
    """The config with whole paths, and what `ROOT/targets.json` says of the columns, where the user doesn't."""
    if config.images:
        images = fetched_path(config, "images") or os.path.abspath(os.path.expanduser(config.images))
        config = replace(config, images=str(images))
    targets = read_targets(expand_root(config))
    if not targets or config.label is not None or config.targets is not None:
        return config
    return replace(config, label=list(targets.names), targets=targets.kind.value)


def _no_split(config: CsvConfig, split: str, have: list[str]) -> str:
    if have == [WHOLE]:
        return (
            f"data.root: '{config.root}' doesn't say what '{split}' is (looked for the columns {', '.join(SPLIT)}); "
            "set data=csv data.split=COLUMN or data.val_root=FILE"
        )
    line = f"data.root: '{config.root}' has no split '{split}'; it has {', '.join(have[:8])}"
    if split not in (config.train_split, config.val_split):  # that a command was given
        return f"{line}: set split to one of them"
    return f"{line}: set data.{'val_split' if split == config.val_split else 'train_split'}=NAME"
