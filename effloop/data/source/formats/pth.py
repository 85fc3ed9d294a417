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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from effloop.data.source.base import sources
from effloop.data.source.formats.arrays import ArraysConfig, ArraysSource, HeldArray, StoredArray, named_after_splits
from effloop.data.source.root import begins_with, expand_root
from effloop.data.source.storage.arrays import DIMENSIONS, DTYPES, Array, pack, write_payload
from effloop.data.source.storage.columns import Spool
from effloop.data.source.storage.mapped import MappedFiles
from effloop.data.source.storage.packed import Split, check_header, no_split
from effloop.data.source.storage.writing import SHARD_BYTES, Dataset, SplitColumns, register_writer
from effloop.errors import ConfigError, DataError

LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""How files of torch up to 1.5 begin: a pickle of a number."""

_PAIR = ("images", "labels")
_DEEPEST = 4  # dicts in dicts
_MOST_NAMES = 4096


def load(path: Path, device: str = "cpu", *, mapped: bool = False) -> Any:
    """What a file of `torch.save` holds: tensors, numbers, text, and lists and dicts of these.

    Raises:
        DataError: it holds anything else, or is damaged.
    """
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
        text = " ".join(str(error).split())[:200]
        raise DataError(f"{path} is damaged: torch.load says: {text}; convert the images again") from None


def _named(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """(name, value) of all that a file holds; of a pair, the first are the images."""
    before = f"{name}/" if name else ""
    pair = isinstance(value, tuple | list) and len(value) == len(_PAIR) and isinstance(value[0], torch.Tensor)
    items = zip(_PAIR, value, strict=True) if pair else value.items() if isinstance(value, Mapping) else None
    if items is None and name:
        yield name, value
    elif items is not None and depth < _DEEPEST:
        for key, each in items:
            if isinstance(key, str):
                yield from _named(each, before + key, depth + 1)


def _values(value: Any) -> NDArray[Any] | None:
    """A dense tensor, or a list of numbers or of text; None for anything else."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized and value.dim():
        try:
            return value.detach().numpy()
        except (TypeError, RuntimeError):  # of a dtype that numpy hasn't
            return None
    if isinstance(value, tuple | list) and value and (kind := type(value[0])) in (int, float, bool, str):
        same = all(type(each) is kind for each in value)
        try:
            return np.array(value, object if kind is str else None) if same else None
        except OverflowError:
            return None
    return None


MAGIC = b"PK\x03\x04"
_PICKLE = "/data.pkl"
_LOCAL_HEADER, _LENGTHS_AT = 30, 26
_UNREADABLE = (zipfile.BadZipFile, ValueError, EOFError, OverflowError, NotImplementedError)

_DTYPES: dict[int, dict[torch.dtype, type]] = {
    1: {
        torch.uint8: np.uint8,
        torch.uint16: np.uint16,
        torch.uint32: np.uint32,
        torch.int64: np.uint64,  # most of torch has no uint64; no value is that large
    },
    2: {torch.uint8: np.uint8, torch.float32: np.float32},
}
"""What tensors may be, by their number of dimensions."""


@sources.register("pth", ArraysConfig)
class PthSource(ArraysSource):
    """torch.save without a pickle that could run code: EffLoop's file is mapped, tensors of others are copied once."""

    endings = (".pt", ".pth")
    wanted = "files of torch.save"

    def open_split(self) -> Split:
        path = expand_root(self.config)
        if path.is_dir() or begins_with(path, LEGACY):
            return super().open_split()
        records = _records(path)
        content = load(path, "meta")
        if not isinstance(content, dict) or not {"header", "splits"} <= content.keys():
            return super().open_split()
        splits = content["splits"]
        if not isinstance(content["header"], str) or not isinstance(splits, dict):
            raise _not_ours(path, "it has no header")
        try:
            headers = json.loads(content["header"])
        except (ValueError, RecursionError):
            headers = None
        if not isinstance(headers, dict) or not all(isinstance(tensors, dict) for tensors in splits.values()):
            raise DataError(f"{path} is damaged: its header doesn't describe its splits; convert it again")
        if self.split not in headers or self.split not in splits:
            raise no_split(path, self.split, [split for split in headers if split in splits])
        where = f"{path}:{self.split}"
        tensors = splits[self.split]
        arrays = {name: _array(tensors, name, records, where) for name in DTYPES if name in tensors}
        return pack(check_header(headers[self.split], where), where, MappedFiles([path]), arrays)

    def originals(self) -> Sequence[Path]:
        root = expand_root(self.config)
        if root.is_file():
            return [root]
        found = _folders(root)
        if len(found) == 1:
            return self.files_of(found[0])
        there = f"several datasets, {', '.join(map(str, found))}" if found else "no .pt or .pth files"
        raise ConfigError(f"data.root: '{self.config.root}' has {there}; set data.root=PATH")

    @classmethod
    def is_one(cls, path: Path) -> bool:
        """Whether `torch.save` wrote a file."""
        if begins_with(path, LEGACY):
            return True
        if not begins_with(path, MAGIC):
            return False
        try:
            with zipfile.ZipFile(path) as archive:
                return any(name.endswith(_PICKLE) for name in archive.namelist())
        except (*_UNREADABLE, OSError):
            return False

    def arrays_of(self, path: Path) -> Mapping[str, Callable[[], StoredArray]]:
        legacy = begins_with(path, LEGACY)
        if not legacy:
            _records(path)
        found: dict[str, Callable[[], StoredArray]] = {}
        for name, value in _named(load(path, mapped=not legacy), "", 0):
            array = _values(value)
            if array is not None and len(found) < _MOST_NAMES:
                found[name] = partial(HeldArray, f"{path}:{name}", array)
        return found

    @classmethod
    def claims(cls, root: Path) -> bool:
        if root.is_dir():
            return any(named_after_splits(root, cls.files_of(folder)) for folder in _folders(root))
        return cls.is_one(root)


def _folders(root: Path) -> list[Path]:
    """The folder itself, or those in it that torchvision once kept its datasets in, which have files."""
    if PthSource.files_of(root):
        return [root]
    places = [*root.glob("processed"), *sorted(root.glob("*/processed"))]
    return [place for place in places if place.is_dir() and PthSource.files_of(place)]


def _records(path: Path) -> dict[int, int]:
    """Offset -> length of every record of an uncompressed archive; the checksum of the pickle is verified."""
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            entries = archive.infolist()
            folders = [entry.filename[: -len(_PICKLE)] for entry in entries if entry.filename.endswith(_PICKLE)]
            if len(folders) != 1:
                raise _not_ours(path, f"it is a zip archive with {len(folders)} files named data.pkl")
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise _not_ours(path, "it is compressed, and can't be mapped")
            archive.read(folders[0] + _PICKLE)  # compares its CRC-32; torch.load doesn't
            says = f"{folders[0]}/byteorder"  # torch up to 2.0 wrote none
            order = archive.read(says).decode() if says in archive.NameToInfo else sys.byteorder
            records = {}
            for entry in entries:
                file.seek(entry.header_offset + _LENGTHS_AT)
                name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
                records[entry.header_offset + _LOCAL_HEADER + name + extra] = entry.file_size
    except (*_UNREADABLE, OSError, KeyError, RuntimeError) as error:
        text = " ".join(str(error.args[0] if isinstance(error, KeyError) else error).split())
        raise DataError(f"{path} is damaged, or no archive of torch.save: {text}; convert the images again") from None
    if order != sys.byteorder:
        raise DataError(f"{path} holds {order}-endian tensors, this machine is {sys.byteorder}; convert it again here")
    return records


def _not_ours(path: Path, why: str) -> DataError:
    return DataError(f"{path} is not a dataset written by EffLoop: {why}; convert the images again")


def _array(tensors: Mapping[str, Any], name: str, records: Mapping[int, int], split: str) -> Array:
    """Where the values of a tensor are in the file; it must fill a record of the archive."""
    tensor, where, dimensions = tensors[name], f"{split}/{name}", DIMENSIONS.get(name, 1)
    dtypes = _DTYPES[dimensions]
    plain = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.dim() == dimensions
    if not plain or tensor.dtype not in dtypes:
        found = f"{tensor.dtype} of shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else "no tensor"
        wanted = "a vector of unsigned integers" if dimensions == 1 else "a matrix of uint8 or float32"
        raise DataError(f"{where} is {found}, not {wanted}; convert it again")
    # The offset that torch.load sets on a "meta" storage has no public name; below, a record must begin there.
    offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", -1)
    array = Array(0, offset, np.dtype(dtypes[tensor.dtype]), tensor.numel())
    whole = tensor.is_contiguous() and tensor.storage_offset() == 0
    if array.count and (not whole or records.get(array.offset) != array.end - array.offset):
        raise DataError(f"{where} is not the whole of a record of the archive; convert it again")
    return array


@register_writer("pth")
def write_pth(path: Path, dataset: Dataset, shard_bytes: int = SHARD_BYTES) -> None:
    """One file; the images are first collected in an unnamed file beside it, so they take twice their space."""
    del shard_bytes  # always one file
    headers, splits, spools = {}, {}, []
    for split, records in dataset.splits.items():
        columns, payload = SplitColumns.of(dataset, path.parent), Spool("B", path.parent)
        write_payload(records, columns, payload.extend)
        arrays = {**columns.columns(), "payload": payload.array()}
        # Interned, as pickle writes equal texts once only where they are one object: else the file's bytes would vary.
        splits[split] = {sys.intern(name): _tensor(values) for name, values in arrays.items()}
        headers[split] = dataset.header(columns.fingerprint(), columns.checksums())
        spools.append((columns, payload))  # keeps their files until they are saved
    with path.open("xb") as file:  # given a path, torch.save would name the archive after it
        try:
            torch.save({"header": json.dumps(headers), "splits": splits}, file)
        except RuntimeError as error:  # "unexpected pos 704 vs 598" is what torch.save says of a full disk
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def _tensor(values: NDArray[Any]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about read-only values, which nothing writes to
        return torch.from_numpy(values.view(np.int64) if values.dtype == np.uint64 else values)
