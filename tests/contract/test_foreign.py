"""What other programs write: the same pixels and labels, whatever the format; what can't be read, in one line."""

import gzip
import json
import lzma
import os
import pickle
import random
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import stores
import torch
import zarr
from arrays import BOMB
from images import encode
from plans import line, make_decoder, open_source, read_bytes
from runs import train

from effloop.cli.main import main
from effloop.data.image.header import pnm_header, read_header
from effloop.data.source import Kind, NoSplitError, sources
from effloop.data.source.folder import FolderSource
from effloop.errors import DataError, EffLoopError

SPLITS = stores.make_splits(train=16, test=8)
IMAGES, LABELS = SPLITS["train"]
STORES: dict[str, tuple[str, Callable[[Path, stores.Splits], Path]]] = {
    "set.npz": ("npz", stores.write_npz),
    "npy": ("npz", stores.write_npy),
    "mnist": ("idx", stores.write_idx),
    "set.h5": ("hdf5", stores.write_hdf5),
    "files": ("hdf5", stores.write_hdf5_files),
    "set.zarr": ("zarr", stores.write_zarr),
    "set2.zarr": ("zarr", stores.write_zarr2),
    "folders of zarr": ("zarr", stores.write_zarr_folders),
    "beton": ("beton", stores.write_beton),
    "pairs": ("pth", stores.write_pairs),
    "planes.pt": ("pth", stores.write_planes),
    "nested.pth": ("pth", stores.write_nested),
    **{f"folder2lmdb {protocol}": ("lmdb", stores.folder2lmdb(protocol)) for protocol in range(6)},
    # As pytorch-lmdb's folder_2_lmdb.py writes a split: what a `DataLoader` gives for a batch of one.
    "lmdb of batches": ("lmdb", stores.pickled(lambda image, label: ([encode(image, "PNG")], np.array([label])))),
    "lmdb of dicts": ("lmdb", stores.pickled(lambda image, label: {"label": label, "image": encode(image, "PNG")})),
    "lmdb of bare dicts": ("lmdb", stores.pickled(lambda image, label: {"img": encode(image, "PNG"), "y": label}, 1)),
    "lmdb of planes": ("lmdb", stores.pickled(lambda image, y: (np.ascontiguousarray(image.transpose(2, 0, 1)), y))),
    "lmdb of pixels": ("lmdb", stores.pickled(lambda image, label: (image, np.int64(label)))),
    "set.zip": ("zip", stores.write_zip),
    "stored.zip": ("zip", lambda root, splits: stores.write_zip(root, splits, "", zipfile.ZIP_STORED)),
}
NAMED = {"set.h5", "set.zip", "stored.zip"}  # stores whose classes are a, b and c
OF_PNG = ("folder2lmdb", "files", "lmdb of batches", "lmdb of dicts", "lmdb of bare")


def wanted(name: str, split: str, number: int) -> bytes:
    """The bytes of a sample."""
    image = SPLITS[split][0][number]
    if name.startswith(OF_PNG) or name.endswith("d.zip") or name == "set.zip":
        return encode(image, "PNG")
    if name == "beton" and number % 3 == 0:
        return stores.jpeg_of(number)
    if name == "mnist":
        return pnm_header(9, 8, 1) + image[:, :, 0].tobytes()
    return pnm_header(9, 8, 3) + image.tobytes()


@pytest.mark.parametrize("name", STORES)
def test_the_same_pixels_and_labels(name, tmp_path):
    data, write = STORES[name]
    root = write(tmp_path / name, SPLITS)
    for split, (images, labels) in SPLITS.items():
        usual = "training" if name.endswith("pairs") and split == "train" else split
        source = open_source("auto", root, usual)
        assert type(source) is sources[data].factory
        assert source.classes == (("a", "b", "c") if name in NAMED else ("0", "1", "2"))
        expected = [(label, wanted(name, split, number)) for number, label in enumerate(labels.tolist())]
        if data == "zip":  # in the order of their paths
            expected.sort(key=lambda sample: sample[0])
        found = [read_bytes(source, index) for index in range(len(source))]
        assert [*zip(source.labels.tolist(), found, strict=True)] == expected
        assert [bytes(image) for image in source.read_run(np.arange(len(images))[::-1])] == found[::-1]
        source.will_need(range(len(source)))
        source.verify_index()
        again = pickle.loads(pickle.dumps(source))
        assert (read_bytes(again, 3), again.fingerprint()) == (found[3], source.fingerprint())
    with pytest.raises(NoSplitError, match=r"has no .*'extra'; it has.*: set data.train_split or|set data.train_split"):
        open_source(data, root, "extra")


@pytest.mark.parametrize("name", ["set.npz", "mnist", "set.h5", "pairs", "folder2lmdb 4"])
@pytest.mark.slow
def test_is_trained_on_and_converted(name, here, capfd):
    data, write = STORES[name]
    root = write(here / name, SPLITS)
    assert train(root, "epochs=1") == 0
    assert "there is no 'val', so 'test' is used" in capfd.readouterr().out
    assert main(["convert", f"data.root={root}", "to=memmap", "out=packed"]) == 0
    assert open_source("memmap", here / "packed", "val").fingerprint() == open_source(data, root, "test").fingerprint()
    pixels = make_decoder().decode(open_source("memmap", here / "packed").read(1))
    np.testing.assert_array_equal(pixels, IMAGES[1][:, :, :1].repeat(3, 2) if name == "mnist" else IMAGES[1])


def test_without_a_validation_split(here, capsys):
    root = stores.write_idx(here / "set", stores.make_splits(train=16))
    assert train(root, "epochs=1") == 2
    assert "has no split 'val'; it has train: set data.train_split or data.val_split, or data.val=0.2" in " ".join(
        capsys.readouterr().err.split()
    )
    assert train(root, "epochs=1", "data.val=0.25") == 0
    np.savez(here / "whole.npz", x=SPLITS["train"][0], y=SPLITS["train"][1])
    assert train(here / "whole.npz", "epochs=1", "data.val=0.25") == 0


def test_arrays_beside_folders_of_images_are_not_the_dataset(photos, tmp_path):
    root = stores.write_npy(tmp_path / "set", SPLITS)
    for split in ("train", "val"):
        (root / split).symlink_to(photos / split)
    assert type(open_source("auto", root)) is FolderSource


def save(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def test_names_that_are_given(tmp_path):
    path = save(
        tmp_path / "set.npz", train_fine=LABELS, train_coarse=LABELS // 2, train_pictures=IMAGES, train_x=IMAGES[::-1]
    )
    several = f"{path} has several arrays that may be images, train_pictures, train_x: set data.image=NAME"
    with pytest.raises(DataError, match=line(several)):
        open_source("npz", path)
    source = open_source("npz", path, image="pictures", label="coarse", classes=["near", "far"])
    assert source.classes == ("near", "far")
    assert source.labels.tolist() == (LABELS // 2).tolist()
    assert read_bytes(source, 0).endswith(IMAGES[0].tobytes())


def test_targets_that_are_not_classes(tmp_path):
    flags = np.eye(3, dtype=np.uint8)[LABELS]
    flags[0] = 1
    source = open_source("npz", save(tmp_path / "flags.npz", train_images=IMAGES, train_labels=flags))
    assert source.kind is Kind.flags
    np.testing.assert_array_equal(source.targets, flags)
    numbers = LABELS + 0.5
    source = open_source("npz", save(tmp_path / "numbers.npz", x_train=IMAGES, y_train=numbers))
    assert source.kind is Kind.numbers
    np.testing.assert_array_equal(source.targets[:, 0], numbers.astype(np.float32))


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[: -path.stat().st_size // 3])
    return path


def cut_gzip(root: Path) -> Path:
    file = cut(stores.write_idx(root, SPLITS) / "train-images-idx3-ubyte.gz")
    return file.parent


def pickled_zarr(root: Path) -> Path:
    """Its codec would run what is in the chunk."""
    group = zarr.open_group(str(root), mode="w", zarr_format=2)
    group.create_array("x_train", data=IMAGES)
    group.create_array("y_train", data=LABELS, compressors=None)
    meta = root / "y_train" / ".zarray"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "compressor": {"id": "pickle", "protocol": 5}}))
    (root / "y_train" / "0").write_bytes(BOMB)
    return root


def elsewhere(root: Path) -> Path:
    with h5py.File(root, "w") as file:
        file["x_train"] = IMAGES
        file.create_dataset("y_train", data=LABELS, external=[(str(root) + ".raw", 0, 16)])
    return root


def negative(root: Path) -> Path:
    header = {"descr": "|u1", "fortran_order": False, "shape": (-16, 9, 8)}
    root.mkdir()
    with (root / "x_train.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
    np.save(root / "y_train.npy", LABELS)
    return root


def saved(content: Any) -> Callable[[Path], Path]:
    """By torch.save, arrays as tensors."""

    def tensor(value: Any) -> Any:
        if isinstance(value, tuple | dict):
            each = {key: tensor(one) for key, one in (value.items() if isinstance(value, dict) else enumerate(value))}
            return each if isinstance(value, dict) else tuple(each.values())
        return torch.from_numpy(value) if isinstance(value, np.ndarray) else value

    def make(at: Path) -> Path:
        torch.save(tensor(content), at / "set.pt")
        return at / "set.pt"

    return make


def expanded() -> tuple[torch.Tensor, torch.Tensor]:
    """2^33 images that take a byte of the file."""
    many = torch.zeros(1, dtype=torch.uint8).expand(1 << 33)
    return many[:, None, None], many


def flipped(path: Path) -> Path:
    data = bytearray(path.read_bytes())
    data[200] ^= 255
    path.write_bytes(data)
    return path


def cifar(change: Callable[[Path], object]) -> Callable[[Path], Path]:
    def make(at: Path) -> Path:
        change(stores.write_cifar10(at / "set") / "cifar-10-batches-py")
        return at / "set"

    return make


def third(**content: Any) -> Callable[[Path], object]:
    """Other values in CIFAR's third batch."""
    return lambda folder: (folder / "data_batch_3").write_bytes(pickle.dumps({**stores.cifar_batch(3, 6), **content}))


CIFAR: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda folder: (folder / "data_batch_4").unlink(), "data_batch_4 is missing; unpack the archive again"),
    "code": (third(data=print), "data_batch_3 holds builtins.print, which is never run"),
    "no dict": (lambda at: (at / "data_batch_3").write_bytes(pickle.dumps([1])), "holds a pickle that is no dict"),
    "other dtype": (third(data=np.zeros((6, 3072))), "data_batch_3 has no array 'data' of (N, 3,072) uint8"),
    "names as labels": (third(labels=["a"] * 6), "or no list 'labels' of N numbers from 0 to 255"),
    "few labels": (third(labels=[1] * 5), "data_batch_3 has no array 'data' of (N, 3,072) uint8, or no list 'labels'"),
    "no class": (third(labels=[7] * 6), "has the label 7, but 3 classes"),
    "names": (lambda at: (at / "batches.meta").write_bytes(pickle.dumps({})), "has no list 'label_names'"),
}


def environment(records: dict[bytes, Any]) -> Callable[[Path], Path]:
    def make(at: Path) -> Path:
        values = {key: value if isinstance(value, bytes) else pickle.dumps(value) for key, value in records.items()}
        stores.put(at / "train.lmdb", values)
        return at

    return make


JPEG = b"\xff\xd8\xff\xe0 a JPEG"
LMDB: dict[str, tuple[dict[bytes, Any], str]] = {
    "code": ({b"0": os.system}, "train.lmdb: the value of '0' holds posix.system, which is never run"),
    "code behind": (
        {b"0": (b"x", 1), b"1": (b"x", os.system)},
        "the value of '1' holds posix.system, which is never run",
    ),
    "a dict": ({b"0": {"photo": b"x", "label": 1}}, "holds 2 values, not (image, label)"),
    "a text as label": (
        {b"0": (b"x", "cat")},
        "has the label 'cat'; allowed are whole numbers from 0, or set the names of all classes",
    ),
    "a number": ({b"0": (b"x", 1.5)}, "has the label 1.5; allowed are whole numbers"),
    "another array": (
        {b"0": (np.zeros((5, 4, 2), np.uint8), 1)},
        "holds an array of uint8 and shape (5, 4, 2); allowed",
    ),
    "floats": ({b"0": (np.zeros((3, 4)), 1)}, "holds an array of float64 and shape (3, 4); allowed are uint8 pixels"),
    "mixed": ({b"0": (b"x", 1), b"1": (np.zeros((3, 4), np.uint8), 1)}, "'1' isn't stored as the first one is"),
    "nothing": ({}, "has no samples in its main database, which alone is read (no named one)"),
    **{
        name: ({b"0": data}, "the value of '0' is no pickle of (image, label); write it as one")
        for name, data in {
            "an image": JPEG,
            "something else": b"\x01\x02 what",
            "Caffe's": b"\x08\x03\x10\x1e\x18\x1e\x22\x01x\x28\x01",
            "lz4": b"\x04\x22\x4d\x18" + b"x" * 9,
            "zlib": zlib.compress(b"x" * 99),
            "msgpack": b"\x92\xc4\x03abc\x01",
        }.items()
    },
}


def arrays(**found: Any) -> tuple[str, Callable[[Path], Path]]:
    """An .npz with the images as x_train, if no others are given."""
    return "npz", lambda at: save(at / "a.npz", **({"x_train": IMAGES} | found))


X, Y = "{root}:x_train", "{root}:y_train"
BAD: dict[str, tuple[tuple[str, Callable[[Path], Path]], str]] = {
    "floats": (
        arrays(x_train=IMAGES / 255, y_train=LABELS),
        f"{X} is float64, (16, 9, 8, 3); images are read as uint8 from 0 to 255: write them anew as uint8, "
        "e.g. (255 * images).round().astype('uint8') if they are from 0 to 1",
    ),
    "flat": (
        arrays(x_train=IMAGES.reshape(16, -1), y_train=LABELS),
        f"{X} is uint8, (16, 216); images are read of shape ",
    ),
    "fewer labels": (arrays(y_train=LABELS[1:]), f"{X} has 16 images, {Y} 15 labels; correct either"),
    "no labels": (
        arrays(other=LABELS),
        "{root} has no array that looks like labels; it has x_train, other: set data.label=NAME",
    ),
    "a negative label": (arrays(y_train=LABELS.astype(int) - 1), f"{Y} has the label -1; allowed are 0 to 1"),
    "objects": (
        arrays(y_train=LABELS.astype(object)),
        f"{Y} holds Python objects, which only unpickling reads, and that could run code: save it anew",
    ),
    "nothing": (arrays(x_train=IMAGES[:0], y_train=LABELS[:0]), "{root}"),
    "half an npz": (("npz", lambda at: cut(stores.write_npz(at / "a.npz", SPLITS))), "{root} is damaged or cut short"),
    "a negative shape": (
        ("npz", lambda at: negative(at / "a")),
        "{root}/x_train.npy is damaged: its shape is (-16, 9, 8); get it again",
    ),
    "half a gz": (
        ("idx", lambda at: cut_gzip(at / "a")),
        "{root}/train-images-idx3-ubyte.gz is damaged or cut short: ",
    ),
    "half an h5": (
        ("hdf5", lambda at: cut(stores.write_hdf5(at / "a.h5", SPLITS))),
        "{root} is damaged, or no HDF5 file: ",
    ),
    "values elsewhere": (("hdf5", lambda at: elsewhere(at / "a.h5")), f"{Y} has its values in another file; copy them"),
    "half a beton": (
        ("beton", lambda at: cut(stores.write_beton(at / "a", SPLITS) / "train.beton").parent),
        "{root}/train.beton is damaged or cut short: ",
    ),
    "a pickle in zarr": (
        ("zarr", lambda at: pickled_zarr(at / "a")),
        "y_train/.zarray holds pickled objects, which cou",
    ),
    "float tensors": (("pth", saved((IMAGES / 255, LABELS))), "images is float64, (16, 9, 8, 3); images are read as"),
    "a Dataset": (
        ("pth", saved(torch.utils.data.TensorDataset(*stores.tensors(SPLITS["train"])))),
        "{root} holds more than tensors, numbers and text",
    ),
    "labels twice": (
        ("pth", saved({"x": IMAGES, "y": LABELS, "label": LABELS})),
        "has several arrays that may be labels, y, label",
    ),
    "texts as images": (
        ("pth", saved({"images": ["a", 1], "labels": LABELS})),
        "{root} has no array that looks like images; it has labels",
    ),
    "much memory": (("pth", lambda at: saved(expanded())(at)), ": 8.6 GB, too many for the memory, of which "),
    **{f"cifar: {name}": (("cifar", cifar(change)), message) for name, (change, message) in CIFAR.items()},
    **{f"lmdb: {name}": (("lmdb", environment(records)), message) for name, (records, message) in LMDB.items()},
    "half a zip": (
        ("zip", lambda at: cut(stores.write_zip(at / "a.zip", SPLITS))),
        "{root} is damaged, or no ZIP archive: ",
    ),
    "a damaged zip": (("zip", lambda at: flipped(stores.write_zip(at / "a.zip", SPLITS))), " is damaged: "),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_line(what, tmp_path):
    (data, make), message = BAD[what]
    root = make(tmp_path)
    with pytest.raises(EffLoopError) as caught:
        open_source(data, root, "." if data == "pth" else "train")
    assert "\n" not in str(caught.value)
    assert message.format(root=root) in str(caught.value)
    assert str(root) in str(caught.value)


def plain_idx(root: Path) -> Path:
    packed = stores.write_idx(root, SPLITS) / "train-images-idx3-ubyte.gz"
    file = packed.with_suffix("")
    file.write_bytes(gzip.decompress(packed.read_bytes()))
    packed.unlink()
    return file


HEADERS: dict[str, tuple[str, Callable[[Path], Path], int]] = {
    "npy": ("npz", lambda root: stores.write_npy(root, SPLITS) / "x_train.npy", 128),
    "idx": ("idx", plain_idx, 16),
    "beton": ("beton", lambda root: stores.write_beton(root, SPLITS) / "train.beton", 64),
    "cifar": ("cifar", lambda root: stores.write_cifar10(root, train=10) / "cifar-10-batches-py" / "data_batch_1", 260),
    "tensors": ("pth", lambda root: stores.write_pairs(root, SPLITS) / "training.pt", 700),
}


def mutated(rng: random.Random, whole: bytes, end: int) -> bytes:
    data = bytearray(whole)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(min(end, len(data)))
        new = rng.choice((b"", rng.randbytes(1), rng.randbytes(1), b"\xff\xff\xff\x7f", b"\xff" * 8, b"(", b"0"))
        data[at : at + rng.choice((len(new), 1, 0))] = new
    return bytes(data[: rng.randrange(1, len(data))] if rng.random() < 0.1 else data)


@pytest.mark.parametrize("name", HEADERS)
def test_headers_with_bytes_changed_are_one_line_or_data(name, tmp_path):
    data, write, end = HEADERS[name]
    file = write(tmp_path / "set")
    whole, rng, refused = file.read_bytes(), random.Random(3), list[str]()
    for _ in range(60):
        file.unlink()
        file.write_bytes(mutated(rng, whole, end))
        try:
            split = "training" if name == "tensors" else "train"
            source = open_source(data, tmp_path / "set", split, index_dir=str(tmp_path / "cache"))
            for index in range(len(source)):
                read_bytes(source, index)
        except EffLoopError as error:
            refused.append(str(error))
    assert len(refused) > 10
    assert not [line for line in refused if "\n" in line]


def test_labels_that_are_called_classes(tmp_path):
    np.savez(tmp_path / "set.npz", images=IMAGES, classes=np.array(["ant", "bee", "cow"])[LABELS])
    assert open_source("npz", tmp_path / "set.npz", ".").classes == ("ant", "bee", "cow")


def test_names_of_two_splits(tmp_path):
    """`train_val` is neither of both; of groups and files in each other the inner name counts."""
    np.savez(tmp_path / "set.npz", x_train_val=IMAGES, y_train_val=LABELS)
    for split in ("train", "val"):
        with pytest.raises(NoSplitError, match=f"has no split '{split}'; it has train_val: set data.train_split"):
            open_source("npz", tmp_path / "set.npz", split)
    assert len(open_source("npz", tmp_path / "set.npz", "train_val")) == 16
    with h5py.File(tmp_path / "set.h5", "w") as file:
        for split in SPLITS:
            file[f"train_test/{split}_images"], file[f"train_test/{split}_labels"] = SPLITS[split]
    assert [len(open_source("hdf5", tmp_path / "set.h5", split)) for split in SPLITS] == [16, 8]


@pytest.mark.parametrize("chunks", [4, None])
def test_hdf5_that_was_written_in_part(chunks, tmp_path):
    """What wasn't is no black image of class 0."""
    for what in ("images", "labels"):
        path = tmp_path / f"{what}.h5"
        with h5py.File(path, "w") as file:
            for name, values in zip(("images", "labels"), SPLITS["train"], strict=True):
                shape = (chunks, *values.shape[1:]) if chunks else None
                found = file.create_dataset(f"train/{name}", values.shape, np.uint8, chunks=shape)
                if chunks or name != what:
                    found[: 8 if name == what else None] = values[: 8 if name == what else None]
        there = "2 of its 4" if chunks else "0 of its 1"
        with pytest.raises(DataError, match=rf"h5:train/{what} was written in part: {there} chunks are there, the"):
            open_source("hdf5", path)


def test_what_ffcv_wrote(tmp_path):
    """FFCV 1.0.2, `write_mode="proportion"`: images (9, 8, 3), raw or JPEG, of 40 x the number + the column."""
    (tmp_path / "set.beton").write_bytes(lzma.decompress((Path(__file__).parent / "ffcv.beton.xz").read_bytes()))
    source = open_source("auto", tmp_path / "set.beton", ".")
    assert source.labels.tolist() == [0, 1, 2, 0]
    formats = [read_header(read_bytes(source, index)).format for index in range(4)]
    assert {*formats} == {"PNM", "JPEG"}
    for index, name in enumerate(formats):
        pixels = make_decoder().decode(source.read(index)).astype(int)
        wanted = np.broadcast_to(40 * index + np.arange(8)[None, :, None], (9, 8, 3))
        assert abs(pixels - wanted).max() <= (0 if name == "PNM" else 3)
