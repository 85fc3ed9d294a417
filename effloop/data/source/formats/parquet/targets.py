"""What a column of a parquet file says about each image: its class, all that it has, or numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from effloop.data.source.base import Kind
from effloop.data.source.formats.parquet.table import Table, shown
from effloop.data.source.storage.targets import CLASSES, Targets, flags_of, row_of
from effloop.errors import DataError


class Learner:
    """Reads the values of a column of targets.

    Args:
        table: the file.
        column: of it.
        names: the classes that the file names, or README.md.

    Raises:
        DataError: the column can't be one of targets.
    """

    def __init__(self, table: Table, column: str, names: Sequence[str] | None) -> None:
        self._table, self._column, self._names = table, column, names
        self._form = table.form(column)
        self._places: dict[str, int] = {}
        if self._form not in ("integer", "text", "float", "integers", "texts", "floats"):
            raise DataError(
                f"data.label: the column '{column}' of {table.path} is {self._form}; name one of numbers, of text, or "
                "of lists of these"
            )

    def targets(self, texts: Callable[[], Sequence[str]]) -> Targets:
        """What the targets are; `texts` gives the different texts of the column.

        Raises:
            DataError: lists of numbers, and nothing says what they mean.
        """
        if self._form in ("integer", "text"):
            return CLASSES
        if self._form == "float":
            return Targets(Kind.numbers, (self._column,))
        if self._form == "floats":
            return Targets(Kind.numbers, tuple(f"{self._column}{place}" for place in range(self._width())))
        names = self._names if self._form == "integers" else texts()
        if not names:
            raise DataError(
                f"data.label: the column '{self._column}' of {self._table.path} has lists of numbers without names; "
                'name the classes in a targets.json beside it: {"kind": "flags", "names": ["name of 0", ...]}'
            )
        return Targets(Kind.flags, tuple(names))

    def _width(self) -> int:
        """Numbers in the first list."""
        first = next((value for (value,) in self._table.values(self._column)), None)
        if not first:
            raise DataError(f"{self._table.path}: row 0 has no numbers in the column '{self._column}'; add them")
        return len(first)

    def read(self, value: Any, targets: Targets, names: Sequence[str] | None) -> tuple[int, bytes]:
        """Label and target of a row, as of `Record`.

        Args:
            value: of the column.
            targets: what it is read as.
            names: of classes that are texts.

        Raises:
            DataError: it can't be one; the message doesn't name the row.
        """
        if value is None:
            raise DataError(f"has nothing in the column '{self._column}'; label it, or leave it out")
        if targets.kind is Kind.numbers:
            return 0, row_of(value if isinstance(value, list) else [value], targets)
        if targets.kind is Kind.flags:
            return 0, self._flags(value, targets)
        if isinstance(value, str):
            return self._place(value, names or ()), b""
        if not isinstance(value, int):
            raise DataError(f"has {value!r:.40} in the column '{self._column}', which is no class; label it")
        if value < 0:
            unknown = " (unknown)" if value == -1 else ""
            raise DataError(f"has the label {value}{unknown}; label it, or leave it out: a class is a number from 0")
        return value, b""

    def _flags(self, value: Any, targets: Targets) -> bytes:
        if not isinstance(value, list):
            raise DataError(f"has no list in the column '{self._column}', as targets.json or the first file says")
        found = [self._place(each, targets.names) if isinstance(each, str) else each for each in value]
        if not all(isinstance(each, int) for each in found):
            raise DataError(f"has a list in the column '{self._column}' with something that is no class; correct it")
        return flags_of(found, len(targets.names))

    def _place(self, name: str, names: Sequence[str]) -> int:
        if not self._places:
            self._places = {each: place for place, each in enumerate(names)}
        if name not in self._places:
            raise DataError(f"has the class '{shown(name)[:80]}', which isn't one of {len(names):,} that are named")
        return self._places[name]
