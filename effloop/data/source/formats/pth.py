"""A file of `torch.save`: `{"header": JSON, "splits": {split: {column: tensor}}}`.

Of other people's files the tensors are copied once.

Such a file is a zip archive of a pickle, `data.pkl`, and the values of every tensor, uncompressed. It is loaded with
`weights_only`, which allows tensors, numbers and text and executes nothing, and onto the device "meta", which leaves
the values in the file: `torch.load(mmap=True)` maps the whole file private and writable, which Linux refuses for
files larger than memory.
"""

from __future__ import annotations

import json
import pickle
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.source.base import sources
from effloop.data.source.formats.arrays import ArraysConfig, ArraysSource, StoredArray, sliced
from effloop.data.source.root import expand_root
from effloop.data.source.storage.arrays import DTYPES, Array, pack, payload_of
from effloop.data.source.storage.columns import Spool
from effloop.data.source.storage.packed import MappedFiles, Split, check_header, no_split
from effloop.data.source.storage.writing import Dataset, SplitColumns, register_writer
from effloop.errors import DataError, reason
from effloop.lazy import torch

_DEEPEST = 4  # dicts in dicts
_PICKLE = "/data.pkl"
_LOCAL_HEADER, _LENGTHS_AT = 30, 26
_DTYPES = {
    "torch.uint8": np.uint8,
    "torch.uint16": np.uint16,
    "torch.uint32": np.uint32,
    "torch.int64": np.uint64,  # most of torch has no uint64; no value is that large
    "torch.float32": np.float32,
}


@sources.register("pth", ArraysConfig)
class PthSource(ArraysSource):
    """torch.save without a pickle that could run code: EffLoop's file is mapped, tensors of others are copied once."""

    endings = (".pt", ".pth")
    wanted = ".pt or .pth files"

    def open_split(self) -> Split:
        path = expand_root(self.config)
        if path.is_dir():
            return super().open_split()
        records, content = _records(path), _load(path, "meta")
        if not isinstance(content, dict) or not {"header", "splits"} <= content.keys():
            return super().open_split()
        splits = content["splits"]
        try:
            headers = json.loads(content["header"])
        except (TypeError, ValueError, RecursionError):
            headers = None
        described = isinstance(headers, dict) and isinstance(splits, dict)
        if not described or not all(isinstance(tensors, dict) for tensors in splits.values()):
            raise DataError(f"{path} is damaged: its header doesn't describe its splits; convert it again")
        if self.split not in headers or self.split not in splits:
            raise no_split(path, self.split, [split for split in headers if split in splits])
        where, tensors = f"{path}:{self.split}", splits[self.split]
        arrays = {name: _array(tensors[name], records, f"{where}/{name}") for name in DTYPES if name in tensors}
        return pack(check_header(headers[self.split], where), where, MappedFiles([path]), arrays)

    @classmethod
    def is_one(cls, path: Path) -> bool:
        try:
            return bool(path.is_file() and _records(path))
        except DataError:
            return False

    def arrays_of(self, path: Path) -> Mapping[str, Callable[[], StoredArray]]:
        found = {name: _values(value) for name, value in _named(_load(path, mapped=True), "", 0)}
        return {name: partial(sliced, f"{path}:{name}", each) for name, each in found.items() if each is not None}


def _load(path: Path, device: str = "cpu", *, mapped: bool = False) -> Any:
    """Tensors, numbers, text, and lists and dicts of these; a DataError if it holds anything else, or is damaged."""
    try:
        with warnings.catch_warnings(), path.open("rb") as file:
            warnings.simplefilter("ignore")  # the DataError is the only line to print
            return torch.load(path if mapped else file, device, weights_only=True, mmap=mapped)
    except pickle.UnpicklingError:
        raise DataError(
            f"{path} holds more than tensors, numbers and text, and is not run; save tensors of images and labels "
            "alone, or convert the images again"
        ) from None
    except Exception as error:  # a damaged or crafted pickle can raise anything
        raise DataError(f"{path} is damaged: torch.load says: {reason(error)[:200]}; convert it again") from None


def _named(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """(name, value) of all that a file holds; of a pair, the first are the images."""
    if isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[0], torch.Tensor):
        value = {"images": value[0], "labels": value[1]}
    if not isinstance(value, Mapping):
        yield name, value
    elif depth < _DEEPEST:
        for key, each in value.items():
            if isinstance(key, str):
                yield from _named(each, f"{name}/{key}" if name else key, depth + 1)


def _values(value: Any) -> NDArray[Any] | None:
    """A dense tensor, or a list of numbers or of text; None for anything else."""
    kinds = {*map(type, value)} if isinstance(value, tuple | list) else set()
    try:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized and value.dim():
            return value.detach().numpy()
        if len(kinds) == 1 and kinds <= {int, float, bool, str}:
            return np.array(value, object if kinds == {str} else None)
    except (TypeError, RuntimeError, OverflowError):  # of a dtype or a size that numpy hasn't
        pass
    return None


def _records(path: Path) -> dict[int, int]:
    """Offset -> length of every record of an uncompressed archive; the checksum of the pickle is verified."""
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            entries = archive.infolist()
            pickles = [entry.filename for entry in entries if entry.filename.endswith(_PICKLE)]
            if len(pickles) != 1 or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise ValueError("it is compressed, or has no data.pkl")
            archive.read(pickles[0])  # compares its CRC-32; torch.load doesn't
            records = {}
            for entry in entries:
                file.seek(entry.header_offset + _LENGTHS_AT)
                name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
                records[entry.header_offset + _LOCAL_HEADER + name + extra] = entry.file_size
            return records
    except (zipfile.BadZipFile, ValueError, EOFError, OverflowError, RuntimeError, OSError) as error:
        raise DataError(f"{path} is damaged, or not of torch.save since 1.6: {reason(error)}; save it anew") from None


def _array(tensor: Any, records: Mapping[int, int], where: str) -> Array:
    """Where the values of a tensor are in the file; it must fill a record of the archive."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or str(tensor.dtype) not in _DTYPES:
        raise DataError(f"{where} is {getattr(tensor, 'dtype', 'no tensor')}; convert it again")
    # The offset that torch.load sets on a "meta" storage has no public name; below, a record must begin there.
    offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", -1)
    array = Array(0, offset, np.dtype(_DTYPES[str(tensor.dtype)]), tensor.numel(), tensor.dim())
    whole = tensor.is_contiguous() and tensor.storage_offset() == 0
    if array.count and (not whole or records.get(array.offset) != array.end - array.offset):
        raise DataError(f"{where} is not the whole of a record of the archive; convert it again")
    return array


@register_writer("pth")
def write_pth(path: Path, dataset: Dataset) -> None:
    """One file; the images are first collected in an unnamed file beside it, so they take twice their space."""
    headers, splits, spools = {}, {}, []
    for split, records in dataset.splits.items():
        columns, payload = SplitColumns.of(dataset, path.parent), Spool("B", path.parent)
        for data in payload_of(records, columns):
            payload.extend(data)
        arrays = {**columns.columns(), "payload": payload.array()}
        # Interned, as pickle writes equal texts once only where they are one object: else the file's bytes would vary.
        splits[split] = {sys.intern(name): _tensor(values) for name, values in arrays.items()}
        headers[split] = dataset.header(columns.fingerprint(), columns.checksums())
        spools.append((columns, payload))  # keeps their files until they are saved
    with path.open("xb") as file:  # given a path, torch.save would name the archive after it
        torch.save({"header": json.dumps(headers), "splits": splits}, file)


def _tensor(values: NDArray[Any]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about read-only values, which nothing writes to
        return torch.from_numpy(values.view(np.int64) if values.dtype == np.uint64 else values)
