"""The columns of a parquet file, by pyarrow: which are images and targets, and what they are called."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from effloop.data.image.header import extension
from effloop.data.source.base import printable
from effloop.data.source.formats.parquet.pages import Chunk, chunks
from effloop.data.source.storage.mapped import MappedFiles
from effloop.errors import DataError, optional_package
from effloop.registry import choices

LABEL = ("label", "labels", "class", "target")
MASK = ("mask", "masks", "annotation", "annotations", "segmentation")
"""Names of columns that are looked for, in this order."""

FEATURES = b"huggingface"
"""Key of the metadata in which the package `datasets` says what the columns are."""

_ARROW = b"ARROW:schema"
_ROWS = 1 << 14  # of labels in memory
_BUFFERED = 1 << 20  # bytes of a column that are read at a time, instead of all of a row group
_LISTS = ("Sequence", "List", "LargeList")


class Table:
    """One file.

    Args:
        path: of it.
        data: its bytes, where they are elsewhere.

    Raises:
        ConfigError: pyarrow is missing.
        DataError: it is no parquet file, or a damaged one.
    """

    def __init__(self, path: Path, data: memoryview | None = None) -> None:
        self.path = path
        self._arrow = optional_package("pyarrow", "data=parquet", "effloop[parquet]")
        parquet: Any = optional_package("pyarrow.parquet", "data=parquet", "effloop[parquet]")
        with self.reading():
            place = path if data is None else self._arrow.BufferReader(data)
            self.file = parquet.ParquetFile(place, buffer_size=_BUFFERED, pre_buffer=False)
            self.schema = self.file.schema_arrow
        self.names: list[str] = list(self.schema.names)
        if len({*self.names}) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise DataError(f"{path} has two columns '{shown(twice)}'; write it again with other names")

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close(force=True)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Makes an error of pyarrow one that names the file."""
        try:
            yield
        except (self._arrow.ArrowException, ValueError, OSError, UnicodeDecodeError) as error:
            if isinstance(error, PermissionError | FileNotFoundError) and error.errno:
                raise OSError(error.errno, os.strerror(error.errno), str(self.path)) from None
            line = (str(error).splitlines() or ["no parquet"])[0]
            raise DataError(f"{self.path} can't be read: {line}; copy or write it again") from None

    @property
    def rows(self) -> int:
        """How many there are."""
        found: int = self.file.metadata.num_rows
        return found

    def leaf(self, column: str) -> str | None:
        """The path of the bytes of a column of images, as parquet has it; None if it is none."""
        types, kind = self._arrow.types, self.schema.field(column).type
        if types.is_struct(kind) and (place := kind.get_field_index("bytes")) >= 0:
            return f"{column}.bytes" if self._is_binary(kind.field(place).type) else None
        return column if self._is_binary(kind) else None

    def path_leaf(self, column: str) -> str | None:
        """The path of the names of a column of images."""
        kind = self.schema.field(column).type
        if not self._arrow.types.is_struct(kind) or (place := kind.get_field_index("path")) < 0:
            return None
        return f"{column}.path" if self._is_text(kind.field(place).type) else None

    def _is_binary(self, kind: Any) -> bool:
        types = self._arrow.types
        return bool(types.is_binary(kind) or types.is_large_binary(kind))

    def _is_text(self, kind: Any) -> bool:
        types = self._arrow.types
        return bool(types.is_string(kind) or types.is_large_string(kind))

    def holds_images(self) -> bool:
        """Whether a column has images in it: structures with bytes, or bytes that begin as an image does."""
        for name in self.names:
            if (leaf := self.leaf(name)) is not None and (leaf != name or self._begins_an_image(name)):
                return True
        return False

    def _begins_an_image(self, column: str) -> bool:
        with self.reading():
            batch = next(self.file.iter_batches(1, columns=[column]), None)
            value = batch.column(0)[0].as_py() if batch is not None and batch.num_rows else None
        try:
            return value is not None and bool(extension(value))
        except DataError:
            return False

    def image(self, asked: str | None) -> str:
        """The column of images: `data.image`, or `image`, or the only one but masks."""
        found = [name for name in self.names if self.leaf(name) is not None]
        if asked is not None:
            return self._named("image", asked, found, "images")
        likely = [name for name in found if name not in MASK]
        if "image" in likely or len(likely) == 1:
            return "image" if "image" in likely else likely[0]
        raise self._lacking("image", "images", found)

    def mask(self, asked: str | None) -> str | None:
        """The column of masks: `data.mask`, or of a usual name; None if there is none."""
        found = [name for name in self.names if self.leaf(name) is not None]
        if asked is not None:
            return self._named("mask", asked, found, "images")
        return next((name for name in MASK if name in found), None)

    def label(self, asked: str | None) -> str | None:
        """The column of labels: `data.label`, of a usual name, or the only one with named classes; None if there is
        none.
        """
        if asked is not None:
            return self._named("label", asked, self.names, "labels")
        others = [name for name in self.names if self.leaf(name) is None]
        if usual := next((name for name in LABEL if name in others), None):
            return usual
        named = [name for name in others if class_names(self.features.get(name))]
        return named[0] if len(named) == 1 else None

    def no_label(self) -> DataError:
        """The error for a file without a column of labels or masks."""
        return self._lacking("label", "labels", [name for name in self.names if self.leaf(name) is None])

    def _named(self, key: str, name: str, allowed: Sequence[str], what: str) -> str:
        if name not in self.names:
            raise DataError(f"data.{key}: {self.path} has no column '{name}'; {choices(name, self.names)}")
        if name not in allowed:
            raise DataError(
                f"data.{key}: the column '{name}' of {self.path} holds no {what}, it is "
                f"{self.schema.field(name).type}; {choices(name, allowed)}"
            )
        return name

    def _lacking(self, key: str, what: str, found: Sequence[str]) -> DataError:
        have = choices("", found) if found else f"none of {', '.join(self.names[:8])} can be one"
        return DataError(f"{self.path} has no column '{key}' of {what}; {have}: set data=parquet data.{key}=COLUMN")

    @property
    def features(self) -> Mapping[str, Any]:
        """What `datasets` says of each column; empty if it didn't write the file."""
        try:
            found = json.loads((self.file.metadata.metadata or {})[FEATURES])["info"]["features"]
        except (KeyError, TypeError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def form(self, column: str) -> str:
        """What a column of targets holds: integer, text, float, integers, texts or floats; anything else by its
        type.
        """
        types, kind = self._arrow.types, self.schema.field(column).type
        many = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        one = kind.value_type if many else kind
        one = one.value_type if types.is_dictionary(one) else one
        if types.is_integer(one) or types.is_boolean(one):
            return "integers" if many else "integer"
        if types.is_floating(one):
            return "floats" if many else "float"
        return ("texts" if many else "text") if self._is_text(one) else str(kind)

    def values(self, *leaves: str | None, rows: int = _ROWS) -> Iterator[Sequence[Any]]:
        """The values of some columns, row by row; None for one that is None.

        Args:
            leaves: paths of columns: `image.path` is the part `path` of the column `image`.
            rows: how many are in memory.
        """
        asked = [leaf for leaf in leaves if leaf is not None]
        nothing = [None] * rows
        with self.reading():
            for batch in self.file.iter_batches(rows, columns=asked) if asked else ():
                columns = [nothing[: batch.num_rows] if leaf is None else _column(batch, leaf) for leaf in leaves]
                yield from zip(*columns, strict=True)
        if not asked:
            yield from ([None] * len(leaves) for _ in range(self.rows))

    def without_images(self, images: Sequence[str], label: str | None) -> bytes:
        """A parquet file of the same rows with columns of images, without their bytes, and one of labels."""
        arrow, sink = self._arrow, self._arrow.BufferOutputStream()
        parquet: Any = optional_package("pyarrow.parquet", "data=parquet", "effloop[parquet]")
        with self.reading():
            columns = {name: self._paths(name) for name in images}
            if label is not None:
                columns[label] = self.file.read(columns=[label]).column(label)
            said = {key: value for key, value in (self.file.metadata.metadata or {}).items() if key != _ARROW}
            parquet.write_table(arrow.table(columns).replace_schema_metadata(said), sink, compression="zstd")
        found: bytes = sink.getvalue().to_pybytes()
        return found

    def _paths(self, column: str) -> Any:
        """A column of images of which only the paths are left."""
        arrow, kind = self._arrow, self.schema.field(column).type
        if self.leaf(column) == column:
            return arrow.nulls(self.rows, kind)
        leaf = self.path_leaf(column)
        paths = self.file.read(columns=[leaf]).column(column).combine_chunks() if leaf else None
        texts = arrow.nulls(self.rows, arrow.string()) if paths is None else paths.field("path")
        return arrow.StructArray.from_arrays([arrow.nulls(self.rows, arrow.binary()), texts], ["bytes", "path"])

    def chunks(self, leaf: str) -> list[Chunk] | None:
        """Where the values of a column of bytes are, by row groups; None if they can't be read as they are stored."""
        return self._chunks(leaf)[0]

    def num_bytes(self, leaf: str) -> int:
        """Bytes of the values of a column, without compression."""
        return self._chunks(leaf)[1]

    def _chunks(self, leaf: str) -> tuple[list[Chunk] | None, int]:
        # pyarrow's own view of them ends the process where a number in the footer is of no codec.
        with self.reading():
            schema = self.file.schema
            (column,) = (each for each in (schema.column(place) for place in range(len(schema))) if each.path == leaf)
        try:
            return chunks(MappedFiles([self.path])[0], leaf, int(column.max_definition_level))
        except DataError as error:
            raise DataError(f"{self.path} {error}") from None


def _column(batch: Any, leaf: str) -> list[Any]:
    name, _, part = leaf.partition(".") if leaf not in batch.schema.names else (leaf, "", "")
    values: list[Any] = batch.column(name).to_pylist()
    return [None if value is None else value[part] for value in values] if part else values


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
    found = [_said(feature) for feature in features if feature.get("name") == column]
    return found[0] if found and all(names == found[0] for names in found) else None


def _said(feature: Mapping[str, Any]) -> list[str] | None:
    """The classes of a feature in README.md."""
    inner = next((feature[key] for key in ("dtype", "list", "sequence") if key in feature), None)
    inner = inner.get("dtype", inner) if isinstance(inner, dict) else None
    label = inner.get("class_label") if isinstance(inner, dict) else None
    names = label.get("names") if isinstance(label, dict) else None
    return _texts(_numbered(names) if isinstance(names, dict) else names)


def _numbered(names: Mapping[Any, Any]) -> list[Any]:
    """The names of 0, 1, … by their numbers, in whatever order these are; None for one that is missing."""
    found = {str(number): name for number, name in names.items()}
    return [found.get(str(number)) for number in range(len(found))]


def _texts(names: Any) -> list[str] | None:
    if not isinstance(names, list) or not names:
        return None
    return [str(name) for name in names] if all(isinstance(name, str | int) for name in names) else None


def shown(name: str) -> str:
    """A text of a file on one line, for messages."""
    return printable(name.encode("utf-8", "backslashreplace"))
