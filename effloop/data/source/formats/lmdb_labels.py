"""A file with the labels of images that have none: a name and a label in each row."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from effloop.data.source.base import printable
from effloop.data.source.tables import IMAGE, LABEL, encoded, open_table, shown
from effloop.errors import ConfigError, DataError


class Labels:
    """Name -> label, from CSV, TSV, JSON lines, parquet, or lines `NAME LABEL`.

    Labels that are all whole numbers are classes' numbers; otherwise they are classes' names, which are sorted.

    Args:
        path: of the file.
        is_name: whether a text is the name of a sample, as in a first row that has no columns' names.
        names: of the classes, in order, where `data.classes` says them.

    Attributes:
        classes: their names; None where labels are numbers.

    Raises:
        ConfigError: there is no such file.
        DataError: it can't be read.
    """

    def __init__(self, path: Path, is_name: Callable[[bytes], bool], names: Sequence[str] | None = None) -> None:
        self._path = path
        if not path.is_file():
            raise ConfigError(
                f"data.labels: '{path}' is not there; set data.labels=FILE (a column, of other formats, is data.label)"
            )
        found = self._rows(path, is_name)
        texts = set(found.values())
        numbers = all(text.isascii() and text.isdigit() and len(text) < 10 for text in texts)
        self.classes = None if numbers else [*(names or sorted(texts))]
        places = {text: int(text) if numbers else place for place, text in enumerate(self.classes or texts)}
        if missing := texts - places.keys():
            raise DataError(f"{path} has the class '{shown(min(missing))}', which data.classes doesn't name; add it")
        self._labels = {name: places[text] for name, text in found.items()}

    def _rows(self, path: Path, is_name: Callable[[bytes], bool]) -> dict[bytes, str]:
        def is_data(fields: list[str]) -> bool:
            return is_name(encoded(fields[0].strip())) or (len(fields) == 1 and len(fields[0].split()) == 2)

        table = open_table(path, lambda fields: is_data([*fields]))
        lower = [name.lower() for name in table.columns]
        name = next((lower.index(usual) for usual in IMAGE if usual in lower), 0)
        label = next((lower.index(usual) for usual in LABEL if usual in lower and lower.index(usual) != name), None)
        if label is None:
            label = 1 if name == 0 else 0
        several = len(table.columns) > 1
        found: dict[bytes, str] = {}
        for number, row in table.rows([name, label] if several else [0]):
            fields = [*row] if several else row[0].rsplit(None, 1)
            if len(fields) != 2 or not fields[1].strip():
                raise DataError(f"{table.at(number)}: no name and label; write both in each row")
            key, text = encoded(fields[0].strip()), fields[1].strip()
            if found.setdefault(key, text) != text:
                raise DataError(f"{table.at(number)}: '{shown(fields[0])}' comes twice, with another label; remove one")
        return found

    def __getitem__(self, key: bytes) -> int:
        """The label of a sample, by its key, or by its key without an extension.

        Raises:
            DataError: there is none; the message has the key.
        """
        label = self._labels.get(key)
        if label is None:
            label = self._labels.get(os.path.splitext(key)[0])
        if label is None:
            raise DataError(f"{self._path} has no label for '{printable(key)}'; add a row for each sample")
        return label
