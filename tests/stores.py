"""Arrays of images and labels as other programs write them, by their own code."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import zarr
from images import encode, photo
from numpy.typing import NDArray

Splits = Mapping[str, tuple[NDArray[np.uint8], NDArray[Any]]]
"""{split: (images, labels)}."""


def make_splits(**counts: int) -> Splits:
    """For each split so many images, (N, 9, 8, 3) uint8, and labels from 0 to 2, (N,) uint8."""
    draw = np.random.default_rng(7)
    return {
        split: (draw.integers(0, 256, (count, 9, 8, 3), np.uint8), (np.arange(count) % 3).astype(np.uint8))
        for split, count in counts.items()
    }


def write_npz(root: Path, splits: Splits) -> Path:
    """As MedMNIST has them: train_images, train_labels of shape (N, 1)."""
    images = {f"{split}_images": images for split, (images, _) in splits.items()}
    np.savez_compressed(root, **images, **{f"{split}_labels": labels[:, None] for split, (_, labels) in splits.items()})
    return root


def write_npy(root: Path, splits: Splits) -> Path:
    """A folder of x_train.npy and y_train.npy, one-hot."""
    root.mkdir()
    for split, (images, labels) in splits.items():
        np.save(root / f"x_{split}.npy", images)
        np.save(root / f"y_{split}.npy", np.eye(3)[labels])
    return root


def write_idx(root: Path, splits: Splits) -> Path:
    """As MNIST is distributed: gzipped, grey (the first channel)."""
    root.mkdir()
    for split, (images, labels) in splits.items():
        name = "t10k" if split == "test" else split
        for what, values in (("images", images[:, :, :, 0]), ("labels", labels)):
            sizes = struct.pack(f">{values.ndim}I", *values.shape)
            file = root / f"{name}-{what}-idx{values.ndim}-ubyte.gz"
            file.write_bytes(gzip.compress(bytes([0, 0, 8, values.ndim]) + sizes + values.tobytes()))
    return root


def write_hdf5(path: Path, splits: Splits) -> Path:
    """A group for each split, channels first, in compressed chunks; labels are text."""
    with h5py.File(path, "w") as file:
        for split, (images, labels) in splits.items():
            planes = images.transpose(0, 3, 1, 2)
            file.create_dataset(f"{split}/images", data=planes, chunks=(5, 3, 9, 8), compression="gzip")
            file[f"{split}/labels"] = ["abc"[label] for label in labels]
    return path


def write_hdf5_files(root: Path, splits: Splits) -> Path:
    """A file for each split, with the images as PNG in byte strings of any length."""
    root.mkdir()
    for split, (images, labels) in splits.items():
        with h5py.File(root / f"{split}.h5", "w") as file:
            found = file.create_dataset("images", len(images), h5py.vlen_dtype(np.uint8))
            for number, image in enumerate(images):
                found[number] = np.frombuffer(encode(image, "PNG"), np.uint8)
            file["labels"] = labels.astype(np.int64)
    return root


def write_zarr(root: Path, splits: Splits, version: int = 3) -> Path:
    """Groups of compressed chunks."""
    group = zarr.open_group(str(root), mode="w", zarr_format=version)
    for split, (images, labels) in splits.items():
        of = group.create_group(split)
        of.create_array("images", data=images, chunks=(7, 9, 8, 3))
        of.create_array("labels", data=labels.astype(np.int64))
    return root


def write_zarr2(root: Path, splits: Splits) -> Path:
    """`write_zarr` in version 2."""
    return write_zarr(root, splits, 2)


def write_beton(root: Path, splits: Splits) -> Path:
    """As FFCV 1.0 lays out `.beton` files, one for each split: every third image as JPEG, the others raw."""
    header = np.dtype([("", "<u2"), ("", "<u2"), ("", "<u4"), ("", "<u8"), ("", "<u8")], align=True)
    field = np.dtype([("type", "<u1"), ("name", "S16"), ("", "<u1", 1024)], align=True)
    image = np.dtype([("mode", "<u1"), ("width", "<u2"), ("height", "<u2"), ("at", "<u8")])
    row = np.dtype([("image", image), ("label", "<i8")], align=True)
    root.mkdir()
    for split, (images, labels) in splits.items():
        fields = np.zeros(2, field)
        fields["type"], fields["name"] = (2, 1), (b"image", b"label")
        rows, pages, table = np.zeros(len(images), row), bytearray(), []
        page = 1 << 21
        for number, (pixels, label) in enumerate(zip(images, labels, strict=True)):
            data = pixels.tobytes() if number % 3 else jpeg_of(number)
            rows[number]["image"] = (number % 3 > 0, 8, 9, page + len(pages))
            rows[number]["label"] = label
            table.append((number, page + len(pages), len(data)))
            pages += data
        pages += bytes(-len(pages) % page)
        start = np.array([(2, 2, page, len(images), page + len(pages))], header)
        before = start.tobytes() + fields.tobytes() + rows.tobytes()
        (root / f"{split}.beton").write_bytes(
            before + bytes(page - len(before)) + pages + np.array(table[::-1], "<u8").tobytes()
        )
    return root


def jpeg_of(number: int) -> bytes:
    """The JPEG, 9 x 8, that `write_beton` has of a sample."""
    return encode(photo(9, 8, seed=number), "JPEG")


CIFAR_NAMES = ["airplane", "automobile", "bird"]


def _text(value: str) -> bytes:
    return b"U" + bytes([len(value)]) + value.encode()


def by_python_2(content: dict[str, Any]) -> bytes:
    """As cPickle wrote CIFAR: protocol 2, with text of bytes."""
    out = b"\x80\x02}"
    for key, value in content.items():
        out += _text(key)
        if isinstance(value, np.ndarray):
            rows, columns = (b"M" + struct.pack("<H", length) for length in value.shape)
            out += b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01" + rows + columns
            out += (
                b"\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
            )
            out += b"T" + struct.pack("<I", value.size) + value.tobytes() + b"tb"
        elif isinstance(value, list):
            out += b"](" + b"".join(_text(v) if isinstance(v, str) else b"K" + bytes([v]) for v in value) + b"e"
        else:
            out += _text(value)
        out += b"s"
    return out + b"."


def cifar_batch(seed: int, count: int) -> dict[str, Any]:
    """A batch of CIFAR-10: (count, 3072) uint8 and labels from 0 to 2."""
    labels = [(number + seed) % 3 for number in range(count)]
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 3072), np.uint8)
    return {"batch_label": f"batch {seed}", "labels": labels, "data": pixels}


def write_cifar10(
    root: Path, write: Callable[[dict[str, Any]], bytes] = by_python_2, *, train: int = 30, test: int = 5
) -> Path:
    """As its archive unpacks: ROOT/cifar-10-batches-py with five batches, a test batch and the names of the classes."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for number in range(1, 6):
        (folder / f"data_batch_{number}").write_bytes(write(cifar_batch(number, train // 5)))
    (folder / "test_batch").write_bytes(write(cifar_batch(6, test)))
    (folder / "batches.meta").write_bytes(write({"label_names": CIFAR_NAMES}))
    return root
