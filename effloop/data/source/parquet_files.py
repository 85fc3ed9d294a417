"""Parquet files of images: which a split has, by README.md, as on Hugging Face's hub, or else by their names; and
which of a file's columns are images and targets, read by pyarrow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain, count
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.source.base import WHOLE
from effloop.data.source.root import CARD
from effloop.data.source.storage.indexed import check_complete, find_shards
from effloop.data.source.vocabulary import LABEL, MASK
from effloop.errors import ConfigError, DataError, optional_package, reason
from effloop.registry import choices
from effloop.system.untrusted import MOST_YAML, parse_yaml

ENDING = ".parquet"
FEATURES = b"huggingface"  # key of the metadata in which the package `datasets` describes the columns
_FOLDERS = ("", "data", "default")
_ROWS = 64  # with their images, in memory
_BUFFERED = 1 << 20  # bytes of a column that are read at a time, instead of all of a row group


def find_files(root: Path, split: str, splits: set[str], subset: str | None) -> list[Path]:
    """The files of a split, in order, or of all for `WHOLE`; empty if there are none. `splits` may be there."""
    if named := _configs(root, there=True):
        return [*dict.fromkeys(_files(root, _chosen(named, root, subset), None if split == WHOLE else split))]
    if subset is not None and not (root / subset).is_dir():
        folders = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
        raise ConfigError(f"data.subset: '{subset}' is no folder in {root}; {choices(subset, folders)}")
    for folder in _FOLDERS:
        base = root / (subset or "") / folder
        if found := find_shards(base, split, [f"*{ENDING}"], splits) if base.is_dir() else []:
            check_complete(found)
            return found
    return []


def first_file(root: Path) -> Path | None:
    """A file of a dataset that is here, to look at; None if there is none of any split."""
    found = (file for config in _configs(root) for file in _files(root, config, None))
    bases = [root / folder for folder in _FOLDERS]
    places = (path for base in bases for path in (base, base / "train", base / "val", base / "test"))
    return next(found, None) or next(
        (file for place in places for file in sorted(place.glob(f"*{ENDING}")) if file.is_file()), None
    )


def patterns(root: Path, subset: str | None) -> list[str] | None:
    """What README.md says the files of a subset are called, in all splits; None if it says nothing."""
    named = [each for each in _configs(root) if any(path.endswith(ENDING) or "*" in path for path in _paths(each))]
    return [*_paths(_chosen(named, root, subset))] if named else None


@lru_cache(maxsize=16)
def _card(path: Path, size: int, mtime_ns: int) -> Mapping[str, Any]:
    """The YAML at the beginning of README.md; empty if there is none that can be read."""
    del size, mtime_ns  # which card it is
    with open(path, encoding="utf-8", errors="replace") as file:
        before, _, rest = file.read(MOST_YAML).partition("---\n")
    text, end, _ = rest.partition("\n---")
    try:
        found = parse_yaml(text) if end and not before.strip() else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _configs(root: Path, *, there: bool = False) -> list[Mapping[str, Any]]:
    """The subsets that README.md lists with files; of which some are here."""
    path = root / CARD
    status = path.stat() if path.is_file() else None
    found = _card(path, status.st_size, status.st_mtime_ns).get("configs") if status else None
    named = [each for each in found if isinstance(each, dict) and [*_paths(each)]] if isinstance(found, list) else []
    return [each for each in named if not there or any(True for _ in _files(root, each, None))]


def _chosen(configs: Sequence[Mapping[str, Any]], root: Path, subset: str | None) -> Mapping[str, Any]:
    """The subset that is read: the one that was set, the default one, or the only one."""
    by_name = {str(each.get("config_name", "default")): each for each in configs}
    if subset is not None:
        if subset not in by_name:
            raise ConfigError(f"data.subset: {root / CARD} has no '{subset}'; {choices(subset, [*by_name])}")
        return by_name[subset]
    if len(by_name) == 1:
        return configs[0]
    default = next((each for each in configs if each.get("default") is True), by_name.get("default"))
    if default is None:
        raise ConfigError(
            f"data.subset: {root / CARD} has several: {', '.join(by_name)}; set data=parquet data.subset=NAME"
        )
    return default


def _files(root: Path, config: Mapping[str, Any], split: str | None) -> Iterator[Path]:
    """The parquet files of a split in a subset; of all splits if it is None."""
    for pattern in _paths(config, split):
        path = PurePosixPath(pattern)
        if path.is_absolute() or ".." in path.parts:
            raise DataError(f"{root / CARD} names files outside of its folder, '{pattern}'; correct its data_files")
        parts = [part if part == "**" else part.replace("**", "*") for part in path.parts]
        last = ["*"] if parts[-1] == "**" else []  # which Python takes for folders only
        found = root.glob("/".join([*parts, *last]))
        yield from sorted(file for file in found if file.suffix == ENDING and file.is_file())


def _paths(config: Mapping[str, Any], split: str | None = None) -> Iterator[str]:
    """The patterns of a split's files in a subset; of all splits if it is None."""
    found = config.get("data_files")
    for entry in found if isinstance(found, list) else [found]:
        name, patterns = (entry.get("split"), entry.get("path")) if isinstance(entry, dict) else ("train", entry)
        if split in (None, name):
            for each in patterns if isinstance(patterns, list) else [patterns]:
                if isinstance(each, str) and each.strip("./"):
                    yield each


def holds_paths(path: Path) -> bool:
    """Whether a file has no images but their paths, by its first rows."""
    with Table(path) as table:
        images = table.images_in()
        return not images or all(each is None for column in next(table._parts(images), []) for each in column)


class Table:
    """A file, and which of its columns are images and targets; `image`, `label`, `mask` are of `ParquetConfig`."""

    def __init__(self, path: Path, image: str | None = None, label: str | None = None, mask: str | None = None) -> None:
        self.path, self._image, self._label, self._mask = path, image, label, mask
        self._arrow = optional_package("pyarrow", "data=parquet", "effloop[parquet]")
        parquet: Any = optional_package("pyarrow.parquet", "data=parquet", "effloop[parquet]")
        with self._reading():
            self._file = parquet.ParquetFile(path, buffer_size=_BUFFERED, pre_buffer=False)
            self._schema = self._file.schema_arrow
        self.names: list[str] = list(self._schema.names)
        metadata = self._file.metadata
        self.rows = int(metadata.num_rows)
        self.num_bytes = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close(force=True)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Makes an error of pyarrow one that names the file."""
        try:
            yield
        except (self._arrow.ArrowException, ValueError, OSError, KeyError) as error:
            if isinstance(error, PermissionError | FileNotFoundError) and error.errno:
                raise OSError(error.errno, os.strerror(error.errno), str(self.path)) from None
            raise DataError(f"{self.path} can't be read: {reason(error)}; copy or write it again") from None

    @property
    def features(self) -> Mapping[str | None, Any]:
        """What `datasets` says of each column; empty if it didn't write the file."""
        try:
            found = json.loads((self._file.metadata.metadata or {})[FEATURES])["info"]["features"]
        except (KeyError, TypeError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _is_struct(self, column: str) -> bool:
        return bool(self._arrow.types.is_struct(self._schema.field(column).type))

    def images_in(self) -> list[str]:
        """The columns of bytes, by themselves or as the part `bytes` of a structure."""
        found, types = [], self._arrow.types
        for name in self.names:
            kind = self._schema.field(name).type
            if types.is_struct(kind):
                kind = kind.field("bytes").type if kind.get_field_index("bytes") >= 0 else kind
            if types.is_binary(kind) or types.is_large_binary(kind):
                found.append(name)
        return found

    def image(self) -> str:
        """The column of images: `data.image`, or `image`, or the only one but masks."""
        found = self.images_in()
        if self._image is not None:
            return self._named("image", self._image, found, "images")
        likely = [name for name in found if name not in MASK]
        if "image" in likely or len(likely) == 1:
            return "image" if "image" in likely else likely[0]
        raise self._lacking("image", "images", found)

    def mask(self) -> str | None:
        """The column of masks, where these are the targets; None where they are labels, a DataError without any."""
        found = self.images_in()
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
        others = [name for name in self.names if name not in self.images_in()]
        named = [name for name in others if names_in(self.features.get(name))]
        return next((name for name in LABEL if name in others), named[0] if len(named) == 1 else None)

    def _named(self, key: str, name: str, allowed: Sequence[str], what: str) -> str:
        if name not in allowed:
            raise DataError(f"data.{key}: {self.path} has no column '{name}' of {what}; {choices(name, allowed)}")
        return name

    def _lacking(self, key: str, what: str, found: Sequence[str]) -> DataError:
        have = choices("", found) if found else f"none of {', '.join(self.names[:8])} can be one (paths: data=csv)"
        return DataError(f"{self.path} has no column '{key}' of {what}; {have}: set data=parquet data.{key}=COLUMN")

    def values(self, column: str) -> NDArray[Any]:
        """A column of targets: (N,) integers, floats or texts, (N, K) floats, or (N,) lists of integers or texts."""
        types = self._arrow.types
        with self._reading():
            found = self._file.read([column]).column(0).combine_chunks()
        is_list = types.is_list(found.type) or types.is_large_list(found.type) or types.is_fixed_size_list(found.type)
        inner = found.flatten() if is_list else found
        inner = inner.dictionary_decode() if types.is_dictionary(inner.type) else inner
        is_number = types.is_integer(inner.type) or types.is_boolean(inner.type)
        is_text = types.is_string(inner.type) or types.is_large_string(inner.type)
        if not (is_number or is_text or types.is_floating(inner.type)):
            raise DataError(
                f"data.label: the column '{column}' of {self.path} is {found.type}; name one of numbers, of text, or "
                "of lists of these"
            )
        if found.null_count or inner.null_count:
            row = max(0, found.is_null().index(True).as_py())
            raise DataError(f"{self.path}: row {row:,} has nothing in the column '{column}'; label it, or leave it out")
        if not is_list:
            values = inner.to_numpy(zero_copy_only=False)
            return np.asarray(values.astype(np.int64) if is_number else values)
        lists = found.to_pylist()
        if not types.is_floating(inner.type):
            return np.fromiter(lists, object, len(lists))
        if len({*map(len, lists)}) > 1:
            raise DataError(f"{self.path}: the lists in the column '{column}' have different lengths; correct them")
        return np.array(lists).reshape(len(lists), -1)

    def _parts(self, columns: Sequence[str]) -> Iterator[list[list[Any]]]:
        """Of some rows, the values of each column; of a structure, its bytes. `image.path` is a part of `image`."""
        with self._reading():
            for batch in self._file.iter_batches(_ROWS, columns=[*columns]):
                found = []
                for name in columns:
                    column, _, part = name.rpartition(".") if name not in batch.schema.names else (name, "", "bytes")
                    values = batch.column(column)
                    if self._is_struct(column):
                        values = values.flatten()[values.type.get_field_index(part)]
                    found.append(values.to_pylist())
                yield found

    def objects(self, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Each row of a file of paths, from 1 on: column -> value; of a named class its name, or None, of an image its
        path. Others, such as embeddings, aren't read.
        """
        named, numbers = {column: names_in(feature) for column, feature in self.features.items()}, count(1)
        with self._reading():
            for batch in self._file.iter_batches(_ROWS, columns=[*columns]):
                for row in batch.to_pylist():
                    yield next(numbers), {name: _plain(value, named.get(name)) for name, value in row.items()}

    def images(self, mask: str | None = None) -> Iterator[tuple[bytes, str | None, bytes | None]]:
        """Each row's image, the path that is stored with it, and what is in the column `mask`."""
        column, row, has_paths = self.image(), 0, self._has_paths()
        data_in = f"{column}.bytes" if self._is_struct(column) else column
        for found in self._parts([data_in, *([f"{column}.path"] if has_paths else []), *([mask] if mask else [])]):
            paths = found[1] if has_paths else [None] * len(found[0])
            for data, path, last in zip(found[0], paths, found[-1] if mask else found[0], strict=True):
                if data is None or last is None:
                    raise DataError(
                        f"{self.path}: the column '{column if data is None else mask}' has no bytes in row {row:,}; "
                        "leave it out, or store the images in the file, as push_to_hub of datasets does; if it has "
                        f"paths alone, set data=csv data.root={self.path}"
                    )
                yield data, path, last
                row += 1

    def _has_paths(self) -> bool:
        column = self.image()
        return self._is_struct(column) and self._schema.field(column).type.get_field_index("path") >= 0

    def paths(self) -> Iterator[str | None]:
        """The path that is stored with each image."""
        if not self._has_paths():
            return iter([None] * self.rows)
        return chain.from_iterable(paths for (paths,) in self._parts([f"{self.image()}.path"]))


def _plain(value: Any, names: Sequence[str] | None) -> Any:
    if isinstance(value, list):
        return [_plain(each, names) for each in value]
    if names and isinstance(value, int):
        return names[value] if 0 <= value < len(names) else None
    return value.get("path", value) if isinstance(value, dict) else value


def names_in(feature: Any) -> list[str] | None:
    """The classes of a feature, or of what is in its list, as `datasets` describes it in files."""
    while True:
        if isinstance(feature, list) and len(feature) == 1:  # as older releases write a list
            feature = feature[0]
        elif isinstance(feature, dict) and "feature" in feature:
            feature = feature["feature"]
        else:
            break
    names = feature.get("names") if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" else None
    return [*names] if isinstance(names, list) and names and all(isinstance(name, str) for name in names) else None
