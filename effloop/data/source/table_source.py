"""A table with a row for each image: its path, and its targets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from effloop.data.image.mask import PLAIN, MaskFormat
from effloop.data.source import parquet_files, tables
from effloop.data.source.base import USUAL, WHOLE, Kind, NoSplitError, ScanError, printable, sources
from effloop.data.source.config import DataConfig
from effloop.data.source.files import Images
from effloop.data.source.masks import format_of, in_parallel, look_at_file, names_of, numbered, refuse_larger
from effloop.data.source.root import expand_root, fetched_path
from effloop.data.source.storage.columns import ColumnFile, Spool
from effloop.data.source.storage.kept import file_state, folder_times
from effloop.data.source.storage.loose import Facts, Listed, Listing, Looked, LooseSource, find_image, open_listing
from effloop.data.source.storage.targets import NAME as TARGETS
from effloop.data.source.storage.targets import read_targets
from effloop.data.source.tables import Column, NoTargetsError, Parser, Row, Table, encoded, infer, shown
from effloop.data.source.vocabulary import IMAGE_PATH, LABEL, MASK_PATH, is_group
from effloop.errors import ConfigError, DataError, check_value
from effloop.registry import choices

# Which tables a dataset has, and what their columns are.


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

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, names in (("label", self.labels()), ("classes", self.classes)):
            if names is not None and len({*names}) < max(1, len(names)):
                raise ConfigError(f"data.{key}: {names} is not allowed; name one or several, each once, or set null")
        known = self.targets in (None, *(kind.value for kind in Kind))
        check_value("data.targets", repr(self.targets), known, "classes, flags, numbers, masks or null")
        if self.mask is not None:
            if self.label is not None or self.targets not in (None, Kind.masks.value):
                other = f"data.label={self.label}" if self.label is not None else f"targets that are {self.targets}"
                raise ConfigError(f"data.mask: '{self.mask}' contradicts {other}; drop one of them")
            self.targets = Kind.masks.value

    def labels(self) -> list[str] | None:
        """`label` as a list."""
        return None if self.label is None else [*map(str, self.label if isinstance(self.label, list) else [self.label])]


SPLIT = ("split", "is_valid")  # names of columns, in any case; of several the first here is taken
FOLD = "fold"  # name of the column that says which fold a row is of, for `data.fold`
METADATA = "metadata"  # name of the table in each split's folder, as Hugging Face's datasets have it
MOST_SPLITS = 32  # each has files of its own while the index is written
_SPLITS = {"0": "train", "false": "train", "1": "val", "true": "val"}  # of a column like `is_valid`
_LISTED, _SHOWN = 3, 200
_VERSION = 2  # of what an index has: another number's are read again


def find_tables(config: CsvConfig, split: str) -> dict[str | None, Path]:
    """{split: its table} of training, validation and `split`; the split is None where one table has all."""
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
    usual = [(name, *USUAL.get(name, ())) for name in (config.train_split, config.val_split) if name]
    for names in (*usual, (split,)):
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


def table_of(root: Path, split: str) -> Path | None:
    """`ROOT/SPLIT.csv`, `ROOT/SPLIT/metadata.csv` or the like."""
    places = (f"{split}{{}}", f"{split}/{METADATA}{{}}")
    paths = (root / place.format(ending) for place in places for ending in tables.ENDINGS)
    return next((path for path in paths if path.is_file()), None)


@dataclass(frozen=True)
class Part:
    """A table of the dataset, and the places of its columns."""

    table: Table
    split: str | None  # that all rows are of; None if a column says it, or nothing does
    folder: bytes  # what paths are relative to
    image: int
    labels: tuple[int, ...]
    by: int | None  # of the column that says the split, if there is one
    kept: Mapping[str, int]  # of those that the index has, too: what `data.group` names, `fold`, and what `is_group`
    sure: bool  # whether the columns of the targets were named, by the user or as usual
    masked: bool = False  # whether the targets are paths of masks

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the columns of the targets."""
        return tuple(self.table.columns[place] for place in self.labels)

    def rows(self, form: MaskFormat) -> Iterator[tuple[int, Sequence[str], Looked | None]]:
        """Each row: its number, its path, targets, split and `kept`, and what is in its mask, if targets are masks."""
        by = () if self.by is None else (self.by,)
        rows = self.table.rows([self.image, *self.labels, *by, *self.kept.values()])
        if not self.masked:
            yield from ((number, texts, None) for number, texts in rows)
            return

        def look(row: Row) -> Looked:
            path = encoded(row[1][1].strip())
            if not path:
                return Looked(wrong="no path of a mask; write one, or leave the row out")
            return look_at_file(os.path.join(self.folder, path), form)

        yield from ((number, texts, seen) for (number, texts), seen in in_parallel(rows, look))

    def split_of(self, texts: Sequence[str]) -> str:
        """The split of a row of `rows`; a DataError, which doesn't name the row, if nothing says it."""
        if self.by is None:
            return self.split or WHOLE
        word = texts[1 + len(self.labels)].strip()
        if not word:
            raise DataError(f"nothing in the column '{self.table.columns[self.by]}'; write train or val")
        return shown(_SPLITS.get(word.lower(), word))


def open_part(config: CsvConfig, split: str | None, path: Path) -> Part:
    """A table of the dataset; a DataError if it can't be read, or lacks a column."""
    table, base, image = open_paths(config, path)
    by = None if split is not None else table.named("split", config.split) if config.split else table.first(SPLIT)
    asked = [name for name in (FOLD, config.group) if name]
    kept = {name: place for name in asked if (place := table.first([name.casefold()])) is not None}
    label, named, mask = table.first(LABEL), config.labels(), None
    if config.mask is not None:
        mask = table.named("mask", config.mask)
    elif config.targets == Kind.masks.value or (config.targets is None and named is None and label is None):
        mask = table.first(MASK_PATH)
    if mask is None and config.targets == Kind.masks.value:
        raise lacking(table, "paths of masks", "mask", MASK_PATH)
    sure = mask is not None or named is not None or label is not None
    if mask is not None:
        labels: tuple[int, ...] = (mask,)
    elif named is not None:
        labels = tuple(table.named("label", name) for name in named)
    elif label is not None:
        labels = (label,)
    else:  # all other columns
        labels = tuple(sorted({*range(len(table.columns))} - {image, by, *kept.values()}))
        if not labels:
            raise lacking(table, "targets", "label", LABEL)
    known = {image, by, *labels, *kept.values()}
    kept |= {name: at for at, name in enumerate(table.columns) if at not in known and is_group(name)}
    return Part(table, split, base, image, labels, by, kept, sure, masked=mask is not None)


def open_paths(config: CsvConfig, path: Path) -> tuple[Table, bytes, int]:
    """A table, the folder of its images, and the place of the column with their paths."""
    folder = Path(config.images) if config.images else path.parent
    if not folder.is_dir():
        raise ConfigError(f"data.images: '{config.images}' is no folder that is there; set data.images=FOLDER")
    table = tables.open_table(path)
    image = table.named("image", config.image) if config.image else table.first(IMAGE_PATH)
    if image is None:
        raise lacking(table, "paths of images", "image", IMAGE_PATH)
    return table, os.fsencode(folder), image


def lacking(table: Table, what: str, key: str, usual: Iterable[str]) -> DataError:
    """The error for a column that isn't there under any usual name."""
    error = table.wrong(
        f"has no column of {what} (looked for {', '.join(usual)}); {choices('', table.columns)}: set data=csv "
        f"data.{key}=COLUMN"
    )
    return error if key == "image" else NoTargetsError(str(error))


def look(parts: Sequence[Part], wanted: Kind | None) -> list[Column]:
    """What the columns of the targets look like, all rows of all tables read."""
    names = parts[0].label_names
    columns = [Column(name, lists=len(names) == 1 and wanted in (None, Kind.flags)) for name in names]
    for part in parts:
        if len(names) != len(part.labels) or (len(names) > 1 and names != part.label_names):
            raise part.table.wrong(
                f"has the targets {', '.join(part.label_names)}, {parts[0].table.path} has {', '.join(names)}; "
                "give both the same columns, or name them by data.label"
            )
        for number, texts in part.table.rows(part.labels):
            for column, text in zip(columns, texts, strict=True):
                column.add(part.table, number, text)
    if not columns[0].count:
        raise parts[0].table.wrong("has no rows; write a row for each image")
    if not parts[0].sure and len(columns) > 1 and any(each.has("no flag") for each in columns):
        raise lacking(parts[0].table, "targets", "label", LABEL)
    return columns


class Rows:
    """Collects the rows of all splits; columns grow in `folder`."""

    def __init__(self, config: CsvConfig, parts: Sequence[Part], folder: Path) -> None:
        self.config, self.parts, self.folder = config, parts, folder
        self.splits: dict[str, tuple[Part, Listed]] = {}
        self.folders: dict[bytes, tuple[int, int]] = {}
        self._hashes, self._lines, self._tables = Spool("q", folder), Spool("I", folder), Spool("B", folder)
        self._missing: list[str] = []
        self._count = self._num_missing = 0
        if any(part.masked for part in parts):
            if plain := [part for part in parts if not part.masked]:
                raise lacking(plain[0].table, "paths of masks", "mask", MASK_PATH)
            self.parser = Parser(Kind.masks, (), "", lambda _: ())
        else:
            wanted = None if config.targets is None else Kind(config.targets)
            self.parser = infer(look(parts, wanted), wanted, config.classes)
        for place, part in enumerate(parts):
            self._read(part, place)
        self._check(parts[0])

    def _read(self, part: Part, place: int) -> None:
        labels = slice(1, 1 + len(part.labels))
        for number, texts, seen in part.rows(format_of(self.config)[0]):
            self._count += 1
            try:
                if seen is not None and seen.wrong:
                    raise DataError(f"{printable(encoded(texts[1].strip()))} {seen.wrong}".strip())
                label, target = self.parser(texts[labels]) if seen is None else (0, seen.digest)
                split = self._split(part, part.split_of(texts))
                if not (path := encoded(texts[0])):
                    raise DataError("no path; write one, or leave the row out")
            except DataError as error:
                raise DataError(f"{part.table.at(number)}: {error}") from None
            found = find_image(part.folder, path if b".." in path else os.path.normpath(path))
            if found is None:
                self._num_missing += 1
                if len(self._missing) < _LISTED:
                    self._missing.append(f"'{printable(path[:_SHOWN])}' ({part.table.unit} {number:,})")
                continue
            key, status = found
            split.add(key, label, status.st_size, target=target)
            self._hashes.append(hash(split.identity(key)))
            self._lines.append(number)
            self._tables.append(place)
            if seen is not None:
                mask = encoded(texts[1].strip())
                split.add_mask_file(mask, os.path.join(part.folder, mask), seen)
            for column, text in zip(part.kept, texts[len(texts) - len(part.kept) :], strict=True):
                split.add_text(column, encoded(text.strip()))
            folder = os.path.dirname(split.identity(key))
            if folder not in self.folders:
                self.folders[folder] = folder_times(folder)

    def _split(self, part: Part, name: str) -> Listed:
        if name not in self.splits:
            if len(self.splits) > MOST_SPLITS:
                column = part.table.columns[part.by or 0]
                raise DataError(
                    f"more than {MOST_SPLITS} different values in '{column}' are no splits; set data.split=COLUMN"
                )
            num_classes = len(self.parser.names) if self.parser.kind is Kind.classes else None
            listed = Listed(num_classes, self.folder, lambda key: os.path.join(part.folder, key), self.parser.targets)
            self.splits[name] = part, listed
        return self.splits[name][1]

    def _check(self, part: Part) -> None:
        """Refuse tables without rows, missing images, and two rows of one image."""
        if not self._count:
            raise part.table.wrong("has no rows; write a row for each image")
        if self._num_missing:
            listed = ", ".join(self._missing) + (", …" if self._num_missing > _LISTED else "")
            fix = "URL, that of their folder" if self.config.urls else "FOLDER"
            raise part.table.wrong(
                f"names {self._num_missing:,} of {self._count:,} images that are not there, below "
                f"{printable(part.folder)}: {listed}; set data.images={fix}, or correct the rows"
            )
        hashes, lines, places = self._hashes.array(), self._lines.array(), self._tables.array()
        order = np.argsort(hashes, kind="stable")
        for at in np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]]).tolist():
            first, second = (self.parts[places[row]].table.at(int(lines[row])) for row in order[at : at + 2])
            raise DataError(f"{second}: its image is in {first} already; give each image one row")

    def listing(self) -> Listing:
        """What the index is written from."""
        parser = self.parser
        meta: dict[str, Any] = {"kind": parser.kind.value, "names": parser.names, "told_by": parser.told_by}
        meta["splits"] = {name: self._facts(*split) for name, split in self.splits.items()}
        return meta, {f"{number}/": rows for number, (_, rows) in enumerate(self.splits.values())}, self.folders

    def _facts(self, part: Part, rows: Listed) -> dict[str, Any]:
        """What the index says of a split."""
        known = {part.image, *part.labels, *part.kept.values()}
        others = [name for place, name in enumerate(part.table.columns) if place not in known]
        lacking: list[str] = []  # classes that no row has
        if self.parser.kind is Kind.classes:
            there = set(np.unique(rows.columns()["label"]).tolist())
            lacking = [name for label, name in enumerate(self.parser.names) if label not in there]
        return {
            "root": os.fsdecode(part.folder),
            "table": str(part.table.path),
            "whole": part.by is None,
            "lacking": lacking,
            "columns": [*part.kept, *others],
            **rows.meta(),
        }


@sources.register("csv", CsvConfig)
class CsvSource(LooseSource):
    """A table with a row for each image: CSV, TSV or JSON lines; samples have the order of the split's rows."""

    any_kind = True

    def __init__(self, config: CsvConfig, split: str) -> None:
        index = _index(config, split)
        splits = index.meta["splits"]
        if split not in splits:
            what = f"has no split '{split}'; it has {', '.join([*splits][:8])}: {config.fix_split(split)}"
            if [*splits] == [WHOLE]:
                what = f"doesn't say what '{split}' is (looked for the columns {', '.join(SPLIT)}); set data=csv "
                what += "data.split=COLUMN or data.val_root=FILE"
            raise NoSplitError(f"data.root: '{config.root}' {what}")
        said = splits[split]
        kind, names, note, form = Kind(index.meta["kind"]), tuple(index.meta["names"]), index.meta["told_by"], PLAIN
        if kind is Kind.masks:
            form, names, note = _mask_classes(config, index)
        root = os.fsencode(said["root"])
        table = tables.shown(said["table"])
        where = table if said["whole"] else f"{table}:{split}"
        identity = {"where": where, "root": said["root"], "tables": index.meta["tables"]}
        columns = tuple(said["columns"])
        self._open(index, split, Facts(root, where, identity, kind, names, columns, note, root, form))
        if (lacking := splits[split]["lacking"]) and not config.allow_missing_classes:
            raise DataError(
                f"{self.where} has no rows of {len(lacking):,} of {len(self.classes):,} classes: "
                f"{', '.join(lacking[:8])}; add some, or set data.allow_missing_classes=true"
            )

    @classmethod
    def claims(cls, root: Path) -> bool:
        if root.is_file():
            ending = root.suffix.lower()
            return ending in tables.ENDINGS and (ending != parquet_files.ENDING or parquet_files.holds_paths(root))
        if (root / TARGETS).is_file():  # what `convert to=folder` wrote, of any splits
            return any(table_of(root, path.name) for path in root.iterdir() if path.is_dir())
        images = root / "train"  # its folders would be classes, which need no table
        table = table_of(root, "train") if root.is_dir() else None
        if table is None or not cls.claims(table):
            return False
        return not images.is_dir() or not any(path.is_dir() for path in images.iterdir())


def _mask_classes(config: CsvConfig, index: ColumnFile) -> tuple[MaskFormat, tuple[str, ...], str]:
    """How masks are read, names of their classes, and what says so."""
    form, colour_names = format_of(config)
    splits = [*index.meta["splits"].values()]
    at = max(range(len(splits)), key=lambda number: splits[number]["largest"])
    root = expand_root(config).absolute()
    names, told_by = names_of(config, root if root.is_dir() else root.parent, (), colour_names)
    names, told_by = numbered(names, told_by, splits[at]["largest"])
    folder, path = os.fsencode(splits[at]["root"]), index.blobs(f"{at}/mask")[splits[at]["largest_at"]]
    refuse_larger(splits[at]["largest"], names, told_by, os.path.join(folder, bytes(path)))
    return form, names, told_by


def listed_images(config: DataConfig, path: Path) -> Images:
    """The images that a table's rows name, whatever else it has; what isn't there is found when it is read."""
    found = config.found()
    assert isinstance(found, CsvConfig)
    table, folder, place = open_paths(_with_images(found), path)
    paths = []
    for _, (text,) in table.rows([place]):
        name = tables.encoded(text)
        there = find_image(folder, name)
        paths.append(os.path.join(folder, name if there is None else there[0]))
    if not paths:
        raise table.wrong("has no rows; write a row for each image")
    return Images(paths, tables.shown(path))


def _with_images(config: CsvConfig) -> CsvConfig:
    """With `images` as a path of this machine."""
    if not config.images:
        return config
    return replace(config, images=str(fetched_path(config, "images") or os.path.expanduser(config.images)))


def _index(config: CsvConfig, split: str) -> ColumnFile:
    """The index of the tables: kept from an earlier reading if they haven't changed, or from a new one."""
    config = _with_images(config)
    config = replace(config, images=config.images and os.path.abspath(config.images))
    if (targets := read_targets(expand_root(config))) and config.label is None and config.targets is None:
        config = replace(config, label=list(targets.names), targets=targets.kind.value)  # as targets.json says
    found = find_tables(config, split)
    try:
        states = [file_state(path) for path in found.values()]
    except OSError as error:
        raise DataError(f"{error.filename} can't be read: {error.strerror}") from None
    # Each choice of columns and tables is an index of its own.
    own = [getattr(config, field.name) for field in fields(config)[len(fields(DataConfig)) :]] + [config.index_dir]
    read_as = f"\0{format_of(config)[0]}" if config.colors else ""
    identity = f"{_VERSION}\0{[*map(str, found.values())]}\0{[*found]}\0{config.group}\0{own}{read_as}"

    def masks(index: ColumnFile) -> dict[str, bytes]:
        masked = index.meta["kind"] == Kind.masks.value
        roots = [os.fsencode(said["root"]) for said in index.meta["splits"].values()] if masked else []
        return {f"{number}/": root for number, root in enumerate(roots)}

    def read(folder: Path) -> Listing:
        try:
            parts = [open_part(config, name, table) for name, table in found.items()]
            return Rows(config, parts, folder).listing()
        except NoTargetsError:
            raise
        except DataError as error:
            raise ScanError(str(error)) from None

    return open_listing(config, identity, {"tables": states}, "told_by", read, masks)
