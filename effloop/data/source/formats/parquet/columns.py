"""Which columns of parquet files are images and targets, and what these say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from effloop.data.source.formats.parquet import layout
from effloop.data.source.formats.parquet.table import Table, card_names, class_names
from effloop.data.source.formats.parquet.targets import Learner
from effloop.data.source.storage.columns import Spool
from effloop.data.source.storage.index import read_names
from effloop.data.source.storage.scanned import MAX_UNNAMED, IndexedConfig
from effloop.data.source.storage.targets import MASKS, Targets
from effloop.errors import ConfigError, DataError


@dataclass
class ParquetConfig(IndexedConfig):
    """Fields of `data=parquet`.

    Attributes:
        image: the column of encoded images; null is image, or the only one that there is.
        label: the column of targets: classes as numbers or text, lists of them, or floats; null is label, labels,
            class or target, or the only one whose classes are named.
        classes: names of the classes, in the order of their labels; null takes those in the files, in README.md or in
            classes.txt, or else the texts, sorted, or the numbers themselves.
        mask: the column of masks, where these are the targets; null is mask, masks, annotation, annotations or
            segmentation, where there is no column of other targets.
        subset: which of several datasets in a folder is read: a `config_name` of its README.md, or a folder.
    """

    image: str | None = None
    label: str | None = None
    classes: list[str] | None = None
    mask: str | None = None
    subset: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask is not None and self.label is not None:
            raise ConfigError(f"data.mask: '{self.mask}' contradicts data.label={self.label}; drop one of them")
        if self.subset is not None and (not self.subset.strip("./") or "/" in self.subset):
            raise ConfigError(f"data.subset: '{self.subset}' is not allowed; set the name of a folder or null")


@dataclass(frozen=True)
class Columns:
    """The columns of a dataset's files.

    Attributes:
        config: which are chosen.
        root: the dataset's folder, or its only file.
        files: of all splits, as classes without names are numbered over all.
        opened: opens one of them, or what was kept of one that isn't here.
    """

    config: ParquetConfig
    root: Path
    files: Callable[[], Sequence[Path]]
    opened: Callable[[Path], Table] = Table

    def image(self, table: Table) -> str:
        """The column of images; raises as all here if it isn't there."""
        return table.image(self.config.image)

    def mask(self, table: Table) -> str:
        """The column of masks."""
        found = table.mask(self.config.mask)
        if found is None:
            raise table.no_label()
        return found

    def label(self, table: Table) -> str | None:
        """The column of labels; None where the targets are masks."""
        if self.config.mask is not None:
            return None
        label = table.label(self.config.label)
        if label is None and table.mask(None) is None:
            raise table.no_label()
        return label

    def targets(self, file: Path) -> Targets:
        """What the targets are, by one of the files."""
        with self.opened(file) as table:
            label = self.label(table)
            return MASKS if label is None else self._learner(table, label).targets(lambda: self._texts(label, "texts"))

    def classes(self, file: Path) -> list[str]:
        """Names of the classes, by one of the files."""
        with self.opened(file) as table:
            label = self.label(table)
            if label is None:
                raise table.no_label()
            names = self._names(table, label)
            if names is not None:
                return names
            return self._texts(label, "text") if table.form(label) == "text" else self._numbers(label)

    def keys(self, files: Sequence[Path]) -> Callable[[Path, int, str | None], bytes]:
        """What makes a key of a file, a row and the path that is stored with the image: this, if all have one, and no
        two the same.
        """
        unique = self._are_unique(files)
        several = len({file.name for file in files}) < len(files)  # of one name, in different folders

        def key(file: Path, row: int, path: str | None) -> bytes:
            name = file.relative_to(self.root) if several else file.name
            found = path if unique and path else f"{name}/{row}" + (f"/{path}" if path else "")
            return found.encode("utf-8", "surrogateescape")

        return key

    def _are_unique(self, files: Sequence[Path]) -> bool:
        hashes = Spool("q")
        for file in files:
            with self.opened(file) as table:
                leaf = table.path_leaf(self.image(table))
                for (path,) in table.values(leaf) if leaf else [(None,)]:
                    if not path:
                        return False
                    hashes.append(hash(path))
        found = np.sort(hashes.array())
        return not bool((found[1:] == found[:-1]).any())

    def learned(
        self, table: Table, targets: Targets, names: Sequence[str] | None
    ) -> Iterator[tuple[str | None, int, bytes]]:
        """The path that is stored with each image, its label, and its target, as of `Record`.

        Args:
            table: one of the files.
            targets: what they are read as.
            names: of classes.
        """
        label = self.label(table)
        if label is None:
            raise table.no_label()
        learner = self._learner(table, label)
        for row, (path, value) in enumerate(table.values(table.path_leaf(self.image(table)), label)):
            try:
                number, target = learner.read(value, targets, names)
            except DataError as error:
                raise DataError(f"{table.path}: row {row:,} {error}") from None
            yield path, number, target

    def paths(self, table: Table) -> Iterator[tuple[str | None, int, bytes]]:
        """As `learned`, where nothing but the path is in a column."""
        for (path,) in table.values(table.path_leaf(self.image(table))):
            yield path, 0, b""

    def _learner(self, table: Table, label: str) -> Learner:
        return Learner(table, label, self._names(table, label))

    def _names(self, table: Table, label: str) -> list[str] | None:
        """The classes of a column by the config, README.md, the file or classes.txt; None if nothing names them."""
        if self.config.classes is not None:
            return self.config.classes
        own = class_names(table.features.get(label))
        if not self.root.is_dir():
            return own
        subset = layout.subset_of(self.root, self.config.subset)
        return card_names(layout.card(self.root), label, subset) or own or read_names(self.root)

    def same_names(self) -> Callable[[Table], None]:
        """What refuses a file in which the classes have other names, or another order, than in those before it."""
        first: list[tuple[Path, list[str]]] = []

        def check(table: Table) -> None:
            label = self.label(table)
            names = class_names(table.features.get(label)) if label and self.config.classes is None else None
            if names and not first:
                first.append((table.path, names))
            if names and names != first[0][1]:
                path, others = first[0]
                raise DataError(
                    f"{table.path} names the classes {', '.join(names[:8])}, but {path} {', '.join(others[:8])}: write "
                    "them with the same names, or set data.classes=[NAME,…] if their numbers mean the same"
                )

        return check

    def mask_names(self) -> list[str] | None:
        """The classes of masks by the config or classes.txt; None if nothing names them."""
        return self.config.classes or (read_names(self.root) if self.root.is_dir() else None)

    def _texts(self, label: str, form: str) -> list[str]:
        """The different texts in a column of all splits, sorted; the form is `text` or `texts`."""
        found: set[str] = set()
        for _, value in self._values(label, form):
            found.update(value if isinstance(value, list) else [value])
        return sorted(text for text in found if text is not None)

    def _numbers(self, label: str) -> list[str]:
        """The numbers up to the largest in a column of all splits.

        Raises:
            DataError: one is so large that it can't be a class.
        """
        largest = 0
        for file, value in self._values(label, "integer"):
            if value is not None and value > largest:
                largest = int(value)
                if largest >= MAX_UNNAMED:
                    raise DataError(
                        f"{file} has the label {largest}; without names of the classes, {MAX_UNNAMED - 1} is the "
                        "largest: correct the label, or name the classes in a classes.txt beside it"
                    )
        return [str(number) for number in range(largest + 1)]

    def _values(self, label: str, form: str) -> Iterator[tuple[Path, Any]]:
        """The values of a column in all splits, each with its file.

        Raises:
            DataError: they aren't of this form in one of them.
        """
        for file in dict.fromkeys(self.files()):
            with self.opened(file) as table:
                if (found := table.form(table.label(label) or label)) != form:
                    raise DataError(
                        f"data.label: the column '{label}' of {file} is of the kind {found}, in others of the "
                        f"kind {form}; write all alike, or set data.classes=[NAME,…]"
                    )
                for (value,) in table.values(table.label(label)):
                    yield file, value
