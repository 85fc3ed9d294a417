"""Images and labels as other programs write them, by their own code."""

import gzip
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import torch
import zarr
from images import encode, photo
from numpy.typing import NDArray

Splits = Mapping[str, tuple[NDArray[np.uint8], NDArray[Any]]]  # {split: (images, labels)}


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
    """Groups of compressed chunks, of version 3 in shards."""
    group = zarr.open_group(str(root), mode="w", zarr_format=version)
    for split, (images, labels) in splits.items():
        of = group.create_group(split)
        shards = (8, 9, 8, 3) if version == 3 else None
        of.create_array("images", data=images, chunks=(4, 9, 8, 3), shards=shards)
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


def tensors(split: tuple[NDArray[np.uint8], NDArray[Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels, as torch has them."""
    return torch.from_numpy(split[0]), torch.from_numpy(split[1].astype(np.int64))


def write_pairs(root: Path, splits: Splits) -> Path:
    """As torchvision once kept MNIST: (images, labels)."""
    root.mkdir()
    for split, arrays in splits.items():
        file = root / f"{'training' if split == 'train' else split}.pt"
        torch.save(tensors(arrays), file)
    return root


def write_planes(path: Path, splits: Splits) -> Path:
    """A dict of views: channels first, and from the second sample of a longer tensor."""
    found = {}
    for split, arrays in splits.items():
        images, labels = tensors(arrays)
        found[f"{split}_images"] = torch.cat([images[:1], images]).permute(0, 3, 1, 2)[1:]
        found[f"{split}_labels"] = labels
    torch.save(found, path)
    return path


def write_nested(path: Path, splits: Splits) -> Path:
    """Dicts of a tensor and a list of labels, and the names of the classes, which are no labels."""
    found = {split: dict(zip(("data", "targets"), tensors(arrays), strict=True)) for split, arrays in splits.items()}
    lists = {split: {**each, "targets": each["targets"].tolist()} for split, each in found.items()}
    torch.save({**lists, "classes": ["a", "b", "c"]}, path)
    return path


def write_zarr_folders(root: Path, splits: Splits) -> Path:
    """train.zarr beside test.zarr."""
    for split, (images, labels) in splits.items():
        group = zarr.open_group(str(root / f"{split}.zarr"), mode="w")
        group.create_array("images", data=images)
        group.create_array("labels", data=labels)
    return root


def put(path: Path, records: Mapping[bytes, bytes], *, subdir: bool = False) -> Path:
    """An LMDB environment of these records."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with lmdb.open(str(path), subdir=subdir, map_size=1 << 26) as opened, opened.begin(write=True) as transaction:
        for key, value in records.items():
            transaction.put(key, value)
    return path


def folder2lmdb(protocol: int) -> Callable[[Path, Splits], Path]:
    """As Efficient-PyTorch's tools/folder2lmdb.py writes a split, with pickle for its pyarrow."""

    def write(root: Path, splits: Splits) -> Path:
        for split, (images, labels) in splits.items():
            keys = [str(number).encode() for number in range(len(images))]
            pairs = [(encode(image, "PNG"), label) for image, label in zip(images, labels.tolist(), strict=True)]
            records = {**dict(zip(keys, pairs, strict=True)), b"__keys__": keys, b"__len__": len(keys)}
            put(root / f"{split}.lmdb", {key: pickle.dumps(value, protocol) for key, value in records.items()})
        return root

    return write


def pickled(of: Callable[[NDArray[np.uint8], int], Any], protocol: int = 4) -> Callable[[Path, Splits], Path]:
    """LMDB of pickles of what `of` makes of image and label, and the count as text."""

    def write(root: Path, splits: Splits) -> Path:
        for split, (images, labels) in splits.items():
            pairs = enumerate(zip(images, labels.tolist(), strict=True))
            records = {b"%05d" % number: pickle.dumps(of(*pair), protocol) for number, pair in pairs}
            put(root / f"{split}.lmdb", {**records, b"__len__": b"%d" % len(images)})
        return root

    return write


def write_zip(path: Path, splits: Splits, before: str = "photos/", method: int = zipfile.ZIP_DEFLATED) -> Path:
    """An archive of class folders, as macOS makes it, in any order."""
    with zipfile.ZipFile(path, "w", method) as file:
        for split, (images, labels) in splits.items():
            for number, label in reversed([*enumerate(labels.tolist())]):
                file.writestr(f"{before}{split}/{'abc'[label]}/{number:02}.png", encode(images[number], "PNG"))
        file.writestr("__MACOSX/train/a/._00.png", b"no image")
    return path


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
