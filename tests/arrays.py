"""Made-up samples for tests of formats, and what comes back of them."""

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from plans import READ_BY, open_source, read_bytes, write_records

from effloop.data.source import Source
from effloop.data.source.storage.arrays import header_crc32c

Listing = list[tuple[bytes, int, bytes]]

TRAIN: Listing = [(b"a/1", 0, b"one"), (b"b/\xff\n", 1, b""), (b"b/3", 1, b"three" * 100)]
VAL: Listing = [(b"a/9", 0, b"nine")]

ARRAYS = ("hdf5", "n5", "pth", "zarr", "zarr2")  # formats that hold a split as named arrays, with a header
META = {"zarr": ("zarr.json", "zarr.json"), "zarr2": (".zattrs", ".zarray"), "n5": ("attributes.json",) * 2}
"""Files of a group's attributes, and of an array's metadata."""


def write(name: str, path: Path) -> Path:
    """A dataset of two classes and the splits above."""
    return write_records(name, path, ["a", "b"], train=TRAIN, val=VAL)


def opened(name: str, root: Path, split: str = "train", **options: Any) -> Source:
    """What `convert to=NAME` wrote."""
    return open_source(READ_BY.get(name, name), root, split, **options)


def samples(source: Source) -> Listing:
    """All of a split."""
    labels = source.labels.tolist()
    return [(source.raw_key(index), int(label), read_bytes(source, index)) for index, label in enumerate(labels)]


def verified(name: str, path: Path, split: str = "train", **options: Any) -> Listing:
    """All samples of a split, looked at as `verify` does."""
    source = opened(name, path, split, **options)
    source.verify_index()
    for index in range(len(source)):
        source.verify(index)
    return samples(source)


def slices(ends: NDArray[np.uint64], data: NDArray[np.uint8]) -> list[bytes]:
    """The byte strings that stand end to end in an array, as any reader would get them."""
    starts = [0, *ends.tolist()]
    return [data[start:end].tobytes() for start, end in zip(starts, ends.tolist(), strict=False)]


def save(path: Path, content: Any) -> None:
    """`torch.save` to a new file, because the old one may be mapped."""
    path.unlink(missing_ok=True)
    torch.save(content, path)


def edit(path: Path, how: Callable[[dict[str, Any]], object]) -> None:
    """Change a file of JSON."""
    meta = json.loads(path.read_text())
    how(meta)
    path.write_text(json.dumps(meta))


def set_header(name: str, path: Path, how: Callable[[dict[str, Any]], object], checksum: bool = True) -> None:
    """Change the header of the split `train` of a format in `ARRAYS`, and its checksum, if it has one."""
    if name == "hdf5":
        with h5py.File(path, "r+") as file:
            header = json.loads(file["train"].attrs["effloop"])
            how(header)
            file["train"].attrs["effloop"] = json.dumps(header)  # of variable length, as others write text
            if checksum:
                file["train"].attrs["effloop_crc32c"] = header_crc32c(header)
    elif name == "pth":
        content = torch.load(path, weights_only=True)
        headers = json.loads(content["header"])
        how(headers["train"])
        save(path, {**content, "header": json.dumps(headers)})
    else:

        def change(meta: dict[str, Any]) -> None:
            attributes = meta["attributes"] if name == "zarr" else meta
            how(attributes["effloop"])
            if checksum:
                attributes["effloop_crc32c"] = header_crc32c(attributes["effloop"])

        edit(path / "train" / META[name][0], change)


def drop(name: str, path: Path, array: str) -> None:
    """Remove an array of the split `train` of a format in `ARRAYS`."""
    if name == "hdf5":
        with h5py.File(path, "r+") as file:
            del file["train"][array]
    elif name == "pth":
        content = torch.load(path, weights_only=True)
        del content["splits"]["train"][array]
        save(path, content)
    else:
        (path / "train" / array / META[name][1]).unlink()


def rezip(path: Path, compression: int = zipfile.ZIP_STORED, **records: bytes) -> None:
    """Pack an archive again, some records with other content."""
    with zipfile.ZipFile(path) as archive:
        old = {name: archive.read(name) for name in archive.namelist()}
    path.unlink()
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in old.items():
            archive.writestr(name, records.get(name.split("/")[-1], data))


class Bomb:
    """Fails the test when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _explode, ()


def _explode() -> None:
    raise AssertionError("unpickled")


BOMB = pickle.dumps(Bomb())
