"""A parquet file of images, read by pyarrow: which columns are images and targets, and what their values mean."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from effloop.data.image.header import extension
from effloop.data.source.base import Kind, printable
from effloop.data.source.storage.targets import CLASSES, MASKS, Targets, flags_of, row_of
from effloop.data.source.vocabulary import LABEL, MASK
from effloop.errors import DataError, optional_package, reason
from effloop.registry import choices

FEATURES = b"huggingface"
"""Key of the metadata in which the package `datasets` describes the columns."""

_ROWS = 64  # with their images, in memory
_BUFFERED = 1 << 20  # bytes of a column that are read at a time, instead of all of a row group
_LISTS = ("Sequence", "List", "LargeList")
_FORMS = ("integer", "text", "float", "integers", "texts", "floats")


class Table:
    """One file.

    Args:
        path: of it.
        image, label, mask: names of its columns, as of `ParquetConfig`.

    Raises:
        ConfigError: pyarrow is missing.
        DataError: it is no parquet file, or a damaged one.
    """

    def __init__(self, path: Path, image: str | None = None, label: str | None = None, mask: str | None = None) -> None:
        self.path, self._image, self._label, self._mask = path, image, label, mask
        self._arrow = optional_package("pyarrow", "data=parquet", "effloop[parquet]")
        parquet: Any = optional_package("pyarrow.parquet", "data=parquet", "effloop[parquet]")
        with self._reading():
            self._file = parquet.ParquetFile(path, buffer_size=_BUFFERED, pre_buffer=False)
            self._schema = self._file.schema_arrow
        self.names: list[str] = list(self._schema.names)
        if len({*self.names}) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise DataError(f"{path} has two columns '{shown(twice)}'; write it again with other names")

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close(force=True)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Makes an error of pyarrow one that names the file."""
        try:
            yield
        except (self._arrow.ArrowException, ValueError, OSError, UnicodeDecodeError) as error:
            if isinstance(error, PermissionError | FileNotFoundError) and error.errno:
                raise OSError(error.errno, os.strerror(error.errno), str(self.path)) from None
            raise DataError(f"{self.path} can't be read: {reason(error)}; copy or write it again") from None

    @property
    def rows(self) -> int:
        """How many there are."""
        return int(self._file.metadata.num_rows)

    @property
    def num_bytes(self) -> int:
        """Of all columns, without compression."""
        metadata = self._file.metadata
        return sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))

    def holds_images(self) -> bool:
        """Whether a column has images in it: structures with bytes, or bytes that begin as an image does."""
        return any(self._of_images(name) and (self._is_struct(name) or self._begins_image(name)) for name in self.names)

    def _begins_image(self, column: str) -> bool:
        with self._reading():
            batch = next(self._file.iter_batches(1, columns=[column]), None)
            value = batch.column(0)[0].as_py() if batch is not None and batch.num_rows else None
        try:
            return value is not None and bool(extension(value))
        except DataError:
            return False

    def _is_struct(self, column: str) -> bool:
        return bool(self._arrow.types.is_struct(self._schema.field(column).type))

    def _of_images(self, column: str) -> bool:
        """Whether a column has bytes, by themselves or as the part `bytes` of a structure."""
        types, kind = self._arrow.types, self._schema.field(column).type
        if types.is_struct(kind):
            place = kind.get_field_index("bytes")
            kind = kind.field(place).type if place >= 0 else None
        return kind is not None and bool(types.is_binary(kind) or types.is_large_binary(kind))

    def image(self) -> str:
        """The column of images: `data.image`, or `image`, or the only one but masks."""
        found = [*filter(self._of_images, self.names)]
        if self._image is not None:
            return self._named("image", self._image, found, "images")
        likely = [name for name in found if name not in MASK]
        if "image" in likely or len(likely) == 1:
            return "image" if "image" in likely else likely[0]
        raise self._lacking("image", "images", found)

    def mask(self) -> str | None:
        """The column of masks, where these are the targets; None where they are labels.

        Raises:
            DataError: there is neither.
        """
        found = [*filter(self._of_images, self.names)]
        if self._mask is not None:
            return self._named("mask", self._mask, found, "images")
        if self.label() is not None:
            return None
        if usual := next((name for name in MASK if name in found), None):
            return usual
        raise self._lacking("label", "labels", [name for name in self.names if name not in found])

    def label(self) -> str | None:
        """The column of labels: `data.label`, of a usual name, or the only one with named classes."""
        if self._mask is not None:
            return None
        if self._label is not None:
            return self._named("label", self._label, self.names, "labels")
        others = [name for name in self.names if not self._of_images(name)]
        if usual := next((name for name in LABEL if name in others), None):
            return usual
        named = [name for name in others if class_names(self.features.get(name))]
        return named[0] if len(named) == 1 else None

    def _named(self, key: str, name: str, allowed: Sequence[str], what: str) -> str:
        if name not in self.names:
            raise DataError(f"data.{key}: {self.path} has no column '{name}'; {choices(name, self.names)}")
        if name not in allowed:
            raise DataError(
                f"data.{key}: the column '{name}' of {self.path} holds no {what}, it is "
                f"{self._schema.field(name).type}; {choices(name, allowed)}"
            )
        return name

    def _lacking(self, key: str, what: str, found: Sequence[str]) -> DataError:
        have = choices("", found) if found else f"none of {', '.join(self.names[:8])} can be one"
        return DataError(f"{self.path} has no column '{key}' of {what}; {have}: set data=parquet data.{key}=COLUMN")

    @property
    def features(self) -> Mapping[str, Any]:
        """What `datasets` says of each column; empty if it didn't write the file."""
        try:
            found = json.loads((self._file.metadata.metadata or {})[FEATURES])["info"]["features"]
        except (KeyError, TypeError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def form(self, column: str) -> str:
        """What a column of targets holds: integer, text, float, integers, texts or floats.

        Raises:
            DataError: anything else.
        """
        types, kind = self._arrow.types, self._schema.field(column).type
        many = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        one = kind.value_type if many else kind
        one = one.value_type if types.is_dictionary(one) else one
        for form, tests in (
            ("integer", (types.is_integer, types.is_boolean)),
            ("float", (types.is_floating,)),
            ("text", (types.is_string, types.is_large_string)),
        ):
            if any(test(one) for test in tests):
                return f"{form}s" if many else form
        raise DataError(
            f"data.label: the column '{column}' of {self.path} is {kind}; name one of numbers, of text, or of lists of "
            "these"
        )

    def paths_and_images(self, target: str | None = None) -> Iterator[Sequence[Any]]:
        """(path that is stored with it, image, value of the column `target`) of each row."""
        column = self.image()
        parts = [f"{column}.path", f"{column}.bytes"] if self._is_struct(column) else [None, column]
        return self.values(*parts, target)

    def paths(self) -> Iterator[str | None]:
        """The path that is stored with each image."""
        column = self.image()
        return (path for (path,) in self.values(f"{column}.path" if self._is_struct(column) else None))

    def values(self, *columns: str | None, rows: int = _ROWS) -> Iterator[Sequence[Any]]:
        """The values of some columns, row by row: `image.path` is the part `path` of the column `image`, if it has one;
        None for a column that is None. Of masks, the bytes.
        """
        chosen = [self._part(column) for column in columns]
        asked = [part for part in chosen if part is not None]
        with self._reading():
            for batch in self._file.iter_batches(rows, columns=asked) if asked else ():
                found = [_column(batch, part) if part else [None] * batch.num_rows for part in chosen]
                yield from zip(*found, strict=True)
        if not asked:
            yield from ([None] * len(columns) for _ in range(self.rows))

    def _part(self, column: str | None) -> str | None:
        if column is None or column in self.names:
            is_image = column is not None and self._is_struct(column)
            return f"{column}.bytes" if is_image else column
        name, _, part = column.rpartition(".")
        return column if self._schema.field(name).type.get_field_index(part) >= 0 else None


def _column(batch: Any, leaf: str) -> list[Any]:
    if leaf in batch.schema.names:
        return list(batch.column(leaf).to_pylist())
    name, _, part = leaf.rpartition(".")
    parts = batch.column(name)
    return list(parts.flatten()[parts.type.get_field_index(part)].to_pylist())


class Learner:
    """Reads the values of a column of targets.

    Args:
        table: a file.
        column: of it; None where the targets are masks.
        names: of classes, where the config, the file or README.md names them.
    """

    def __init__(self, table: Table, column: str | None, names: Sequence[str] | None) -> None:
        self._table, self._column, self._names = table, column, names
        self.form = "masks" if column is None else table.form(column)
        self._places: dict[str, int] = {}

    def targets(self, texts: Callable[[], Sequence[str]]) -> Targets:
        """What the targets are; `texts` gives the different texts of the column.

        Raises:
            DataError: lists of numbers, and nothing says what they mean.
        """
        if self._column is None:
            return MASKS
        if self.form in ("integer", "text"):
            return CLASSES
        if self.form == "float":
            return Targets(Kind.numbers, (self._column,))
        if self.form == "floats":
            first = next((value for (value,) in self._table.values(self._column)), None)
            if not first:
                raise DataError(f"{self._table.path}: row 0 has no numbers in the column '{self._column}'; add them")
            return Targets(Kind.numbers, tuple(f"{self._column}{place}" for place in range(len(first))))
        names = self._names if self.form == "integers" else texts()
        if not names:
            raise DataError(
                f"data.label: the column '{self._column}' of {self._table.path} has lists of numbers without names; "
                'name the classes in a targets.json beside it: {"kind": "flags", "names": ["name of 0", ...]}'
            )
        return Targets(Kind.flags, tuple(names))

    def read(self, value: Any, targets: Targets, names: Sequence[str]) -> tuple[int, bytes]:
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
            if not isinstance(value, list):
                raise DataError(f"has no list in the column '{self._column}', as targets.json or the first file says")
            found = [self._place(each, targets.names) if isinstance(each, str) else each for each in value]
            if not all(isinstance(each, int) for each in found):
                raise DataError(
                    f"has a list in the column '{self._column}' with something that is no class; correct it"
                )
            return 0, flags_of(found, len(targets.names))
        if isinstance(value, str):
            return self._place(value, names), b""
        if not isinstance(value, int):
            raise DataError(f"has {value!r:.40} in the column '{self._column}', which is no class; label it")
        if value < 0:
            unknown = " (unknown)" if value == -1 else ""
            raise DataError(f"has the label {value}{unknown}; label it, or leave it out: a class is a number from 0")
        if names and value >= len(names):
            raise DataError(f"has the label {value}; allowed are 0 to {len(names) - 1}")
        return value, b""

    def _place(self, name: str, names: Sequence[str]) -> int:
        if not self._places:
            self._places = {each: place for place, each in enumerate(names)}
        if name not in self._places:
            raise DataError(f"has the class '{shown(name)[:80]}', which isn't one of {len(names):,} that are named")
        return self._places[name]


def class_names(feature: Any) -> list[str] | None:
    """The classes of a feature, or of what is in its list; None if it names none."""
    while True:
        if isinstance(feature, list) and len(feature) == 1:  # as older releases write a list
            feature = feature[0]
        elif isinstance(feature, dict) and feature.get("_type") in _LISTS:
            feature = feature.get("feature")
        else:
            break
    is_label = isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
    return _texts(feature.get("names")) if is_label else None


def card_names(card: Mapping[str, Any], column: str, subset: str | None) -> list[str] | None:
    """The classes of a column by the YAML of README.md; None if it names none, or other ones for another subset."""
    info = card.get("dataset_info")
    infos = [each for each in (info if isinstance(info, list) else [info]) if isinstance(each, dict)]
    if subset is not None:
        infos = [each for each in infos if each.get("config_name", "default") == subset]
    features = [each for one in infos for each in one.get("features") or () if isinstance(each, dict)]
    found = [_named_in_card(feature) for feature in features if feature.get("name") == column]
    return found[0] if found and all(names == found[0] for names in found) else None


def _named_in_card(feature: Mapping[str, Any]) -> list[str] | None:
    """The classes of a feature in README.md."""
    inner = next((feature[key] for key in ("dtype", "list", "sequence") if key in feature), None)
    inner = inner.get("dtype", inner) if isinstance(inner, dict) else None
    label = inner.get("class_label") if isinstance(inner, dict) else None
    names = label.get("names") if isinstance(label, dict) else None
    if isinstance(names, dict):  # by their numbers, in whatever order these are
        by_number = {str(number): name for number, name in names.items()}
        names = [by_number.get(str(number)) for number in range(len(by_number))]
    return _texts(names)


def _texts(names: Any) -> list[str] | None:
    if not isinstance(names, list) or not names:
        return None
    return [str(name) for name in names] if all(isinstance(name, str | int) for name in names) else None


def shown(name: str) -> str:
    """A text of a file on one line, for messages."""
    return printable(name.encode("utf-8", "backslashreplace"))
