"""Headers of other people's files with bytes changed, left out and put in: one line or data, and nothing else."""

from __future__ import annotations

import gzip
import random
import tokenize
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from plans import open_source, read_bytes
from stores import make_splits, write_beton, write_cifar10, write_idx, write_npy

from effloop.data.source.formats.npz import npy_header
from effloop.errors import DataError, EffLoopError

SPLITS = make_splits(train=6)


def npy(root: Path) -> Path:
    return write_npy(root, SPLITS) / "x_train.npy"


def idx(root: Path) -> Path:
    packed = write_idx(root, SPLITS) / "train-images-idx3-ubyte.gz"
    file = packed.with_suffix("")
    file.write_bytes(gzip.decompress(packed.read_bytes()))
    packed.unlink()
    return file


def beton(root: Path) -> Path:
    return write_beton(root, SPLITS) / "train.beton"


def cifar(root: Path) -> Path:
    return write_cifar10(root, train=10) / "cifar-10-batches-py" / "data_batch_1"


def tensors(root: Path) -> Path:
    root.mkdir()
    images, labels = SPLITS["train"]
    file = root / "train.pt"
    torch.save((torch.from_numpy(images), torch.from_numpy(labels)), file, _use_new_zipfile_serialization=False)
    return file


STORES: dict[str, tuple[str, Callable[[Path], Path], int]] = {
    "npy": ("npz", npy, 128),
    "idx": ("idx", idx, 16),
    "beton": ("beton", beton, 64),
    "cifar": ("cifar", cifar, 260),
    "tensors": ("pth", tensors, 700),
}


def mutated(rng: random.Random, whole: bytes, end: int) -> bytes:
    data = bytearray(whole)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(min(end, len(data)))
        new = rng.choice((b"", rng.randbytes(1), rng.randbytes(1), b"\xff\xff\xff\x7f", b"\xff" * 8, b"(", b"0"))
        data[at : at + rng.choice((len(new), 1, 0))] = new
    return bytes(data[: rng.randrange(1, len(data))] if rng.random() < 0.1 else data)


@pytest.mark.parametrize("name", STORES)
def test_one_line_or_data(name: str, tmp_path: Path) -> None:
    data, write, end = STORES[name]
    file = write(tmp_path / "set")
    whole, rng, refused = file.read_bytes(), random.Random(3), list[str]()
    for _ in range(60):
        file.unlink()
        file.write_bytes(mutated(rng, whole, end))
        try:
            source = open_source(data, tmp_path / "set", index_dir=str(tmp_path / "cache"))
            for index in range(len(source)):
                read_bytes(source, index)
        except EffLoopError as error:
            refused.append(str(error))
    assert len(refused) > 10
    assert not [line for line in refused if "\n" in line]


def test_a_header_of_numpy_that_is_no_python(tmp_path: Path) -> None:
    """What raises tokenize.TokenError within numpy."""
    file = tmp_path / "x_train.npy"
    np.save(file, SPLITS["train"][0])
    np.save(tmp_path / "y_train.npy", SPLITS["train"][1])
    file.write_bytes(file.read_bytes().replace(b"(6, 9, 8, 3), }", b"(6, 9, 8, 3(((("))
    with pytest.raises(tokenize.TokenError):
        np.load(file)
    with pytest.raises(ValueError, match="its header is damaged"), file.open("rb") as stream:
        npy_header(stream)
    with pytest.raises(DataError, match=r"x_train\.npy can't be read: its header is damaged"):
        open_source("npz", tmp_path)
