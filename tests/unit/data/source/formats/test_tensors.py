"""Tensors that other people saved, N5 by tensorstore, archives of zarr; and names of classes in arrays."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from numpy.typing import NDArray
from plans import open_source, read_bytes
from runs import train
from stores import make_splits

from effloop.cli.main import main
from effloop.data.image.header import pnm_header
from effloop.data.source import NoSplitError
from effloop.data.source.formats.pth import PthSource
from effloop.data.source.formats.zarr import ZarrSource
from effloop.errors import ConfigError, DataError, EffLoopError

SPLITS = make_splits(train=16, test=8)


def tensors(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = SPLITS[split]
    return torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))


def pairs(root: Path, legacy: bool = False) -> None:
    """As torchvision once kept MNIST: (images, labels) in MNIST/processed."""
    (root / "MNIST" / "processed").mkdir(parents=True)
    for split, name in (("train", "training"), ("test", "test")):
        file = root / "MNIST" / "processed" / f"{name}.pt"
        torch.save(tensors(split), file, _use_new_zipfile_serialization=not legacy)


def dict_of_planes(root: Path) -> None:
    """Views: channels first, and from the second sample of a longer tensor."""
    found = {}
    for split in SPLITS:
        images, labels = tensors(split)
        longer = torch.cat([images[:1], images]).permute(0, 3, 1, 2)
        found |= {f"{split}_images": longer[1:], f"{split}_labels": labels}
    torch.save(found, root)


def nested(root: Path) -> None:
    """With the labels as a list, and the classes' names."""
    found: dict[str, Any] = {
        split: {"data": tensors(split)[0], "targets": tensors(split)[1].tolist()} for split in SPLITS
    }
    torch.save({**found, "classes": ["a", "b", "c"]}, root)


def n5(root: Path, turned: bool) -> None:
    """By tensorstore, which doesn't turn dimensions around; turned, as z5py 3.0 and zarr 2.18 have them."""
    for split, (images, labels) in SPLITS.items():
        for name, values in (("images", images), ("labels", labels)):
            write_n5(root / split / name, values, turned)
    if turned:  # those also write a root
        (root / "attributes.json").write_text('{"n5": "2.0.0"}')


def write_n5(path: Path, values: NDArray[Any], turned: bool) -> None:
    store = pytest.importorskip("tensorstore")
    values = values.T if turned else values
    block = [min(5, length) for length in values.shape]
    meta = {"dimensions": values.shape, "blockSize": block, "dataType": "uint8", "compression": {"type": "gzip"}}
    spec = {"driver": "n5", "kvstore": {"driver": "file", "path": str(path)}, "metadata": meta}
    store.open(spec, create=True).result()[...].write(values).result()


def zipped(root: Path) -> None:
    store = zarr.storage.ZipStore(root, mode="w")
    write_group(zarr.open_group(store, mode="w"))
    store.close()


def write_group(group: zarr.Group) -> None:
    for split, (images, labels) in SPLITS.items():
        of = group.create_group(split)
        of.create_array("images", data=images, chunks=(4, 9, 8, 3), shards=(8, 9, 8, 3))
        of.create_array("labels", data=labels)


def folders(root: Path) -> None:
    """train.zarr beside test.zarr."""
    for split, (images, labels) in SPLITS.items():
        group = zarr.open_group(str(root / f"{split}.zarr"), mode="w")
        group.create_array("images", data=images)
        group.create_array("labels", data=labels)


STORES: dict[str, tuple[type, Callable[[Path], None]]] = {
    "pairs": (PthSource, pairs),
    "legacy": (PthSource, lambda root: pairs(root, legacy=True)),
    "planes.pt": (PthSource, dict_of_planes),
    "nested.pth": (PthSource, nested),
    "n5": (ZarrSource, lambda root: n5(root, turned=False)),
    "turned.n5": (ZarrSource, lambda root: n5(root, turned=True)),
    "set.zarr.zip": (ZarrSource, zipped),
    "folders": (ZarrSource, folders),
}


@pytest.mark.parametrize("name", STORES)
def test_is_read_to_the_bit(name: str, tmp_path: Path) -> None:
    kind, write = STORES[name]
    write(tmp_path / name)
    for split, (images, labels) in SPLITS.items():
        usual = "training" if kind is PthSource and "." not in name and split == "train" else split
        source = open_source("auto", tmp_path / name, usual)
        assert type(source) is kind
        assert source.classes == (("a", "b", "c") if name == "nested.pth" else ("0", "1", "2"))
        assert source.labels.tolist() == labels.tolist()
        found = [read_bytes(source, index) for index in range(len(source))]
        assert found == [pnm_header(9, 8, 3) + image.tobytes() for image in images]


def test_trained_on_and_converted(here: Path) -> None:
    pairs(here / "set")
    assert train(here / "set", "epochs=1") == 0
    assert main(["convert", "data.root=set", "to=pth", "out=packed"]) == 0
    packed, source = open_source("pth", here / "packed"), open_source("pth", here / "set", "training")
    assert packed.fingerprint() == source.fingerprint()


def bad(path: Path, content: Any) -> str:
    torch.save(content, path)
    with pytest.raises(EffLoopError) as caught:
        open_source("auto", path, ".")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("turned", [False, True])
def test_n5_of_as_many_images_as_they_have_rows(turned: bool, tmp_path: Path) -> None:
    """The other split, or the colours, say which dimension is the samples'; where nothing does, it is refused."""
    images, labels = SPLITS["train"]

    def write(root: Path, of: dict[str, tuple[int, ...]]) -> Path:
        for split, shape in of.items():
            write_n5(root / split / "images", np.resize(images, shape), turned)
            write_n5(root / split / "labels", np.resize(labels, shape[:1]), turned)
        return root

    root = write(tmp_path / "set", {"train": (16, 9, 16), "test": (8, 9, 16)})
    for split, count in (("train", 16), ("test", 8)):
        source = open_source("zarr", root, split)
        found = [read_bytes(source, index) for index in range(len(source))]
        wanted = np.resize(images, (count, 9, 16))
        assert found == [pnm_header(9, 16, 1) + image.tobytes() for image in wanted]
    with pytest.raises(DataError, match="has images of as many pixels as it has samples, so that their dimensions"):
        open_source("zarr", write(tmp_path / "square", {"train": (16, 16, 16)}))


@pytest.mark.parametrize("turned", [False, True])
def test_n5_with_labels_of_two_dimensions(turned: bool, tmp_path: Path) -> None:
    images, labels = SPLITS["train"]
    for number, values in enumerate((labels[:, None], np.eye(4, dtype=np.uint8)[labels])):
        root = tmp_path / str(number)
        write_n5(root / "train/images", images, turned)
        write_n5(root / "train/labels", values, turned)
        source = open_source("zarr", root)
        assert source.labels.tolist() == labels.tolist()
        assert read_bytes(source, 3) == pnm_header(9, 8, 3) + images[3].tobytes()


def test_two_datasets_in_a_folder(tmp_path: Path) -> None:
    """As torchvision kept MNIST beside FashionMNIST: none is taken for the other."""
    pairs(tmp_path)
    (tmp_path / "MNIST").rename(tmp_path / "Other")
    pairs(tmp_path)
    several = f"has several datasets, {tmp_path}/MNIST/processed, {tmp_path}/Other/processed; set data.root=PATH"
    for data in ("pth", "auto"):
        with pytest.raises(ConfigError, match=several):
            open_source(data, tmp_path, "training")
    assert len(open_source("auto", tmp_path / "Other", "training")) == 16


def test_what_is_no_dataset(tmp_path: Path) -> None:
    images, labels = tensors("train")
    path = tmp_path / "set.pt"
    assert "images is float32, (16, 9, 8, 3); images are read as uint8" in bad(path, (images / 255, labels))
    assert "holds more than tensors, numbers and text" in bad(path, torch.utils.data.TensorDataset(images, labels))
    assert "has several arrays that may be labels, y, label" in bad(path, {"x": images, "y": labels, "label": labels})
    assert "images has 16 images, " in bad(path, (images, labels[1:]))
    assert "has no array that looks like images; it has labels" in bad(path, {"images": ["a", 1], "labels": labels})
    many = torch.zeros(1, dtype=torch.uint8).expand(1 << 33)  # takes a byte of the file
    assert "which takes 154.6 GB of memory, " in bad(path, (many[:, None, None], many))
    torch.save((images, labels[1:]), path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 199):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError):
            open_source("pth", path)


NAMES = ["ant", "bee", "cow"]


@pytest.mark.parametrize("name", ["classes", "class_names", "label_names", "list_classes", "names"])
def test_names_of_the_classes(name: str, tmp_path: Path) -> None:
    """Beside the labels, by h5py and numpy; not what has too few names, or a name twice."""
    images, labels = SPLITS["train"]

    def classes(names: list[str]) -> tuple[str, ...]:
        path = tmp_path / f"{len(names)}{names[-1]}.h5"
        with h5py.File(path, "w") as file:
            file["train/images"], file["train/labels"] = images, labels
            file.create_dataset(name, data=names, dtype=h5py.string_dtype())
        return open_source("hdf5", path).classes

    assert classes(NAMES) == tuple(NAMES)
    assert classes([*NAMES, "dog"]) == (*NAMES, "dog")
    assert classes(NAMES[:2]) == classes(["ant", "bee", "ant"]) == ("0", "1", "2")
    np.savez(tmp_path / "set.npz", x_train=images, y_train=labels, **{name: np.array(NAMES)})
    assert open_source("npz", tmp_path / "set.npz").classes == tuple(NAMES)


def test_labels_that_are_called_classes(tmp_path: Path) -> None:
    images, labels = SPLITS["train"]
    np.savez(tmp_path / "set.npz", images=images, classes=np.array(NAMES)[labels])
    assert open_source("npz", tmp_path / "set.npz", ".").classes == tuple(NAMES)


def test_names_that_are_not_of_the_classes(tmp_path: Path) -> None:
    """Of several lists, the shortest that has enough, or all of the texts; as many as there are samples are files."""
    images, labels = SPLITS["train"]
    files = np.array([f"{number}.png" for number in range(len(labels))])

    def classes(labels: NDArray[Any] = labels, **names: Any) -> tuple[str, ...]:
        np.savez(tmp_path / "set.npz", train_images=images, train_labels=labels, **names)
        return open_source("npz", tmp_path / "set.npz").classes

    assert classes(names=files) == ("0", "1", "2")
    assert classes(names=files, class_names=np.array(NAMES)) == tuple(NAMES)
    assert classes(list_classes=np.array([*NAMES, "dog", "elk"]), label_names=np.array(NAMES)) == tuple(NAMES)
    assert classes(np.array(NAMES)[labels], names=files, class_names=np.array(NAMES[::-1])) == tuple(NAMES[::-1])
    flags = np.minimum(1, np.eye(3, dtype=np.uint8)[labels] + np.eye(3, dtype=np.uint8)[0])
    assert classes(flags, names=files, class_names=np.array(NAMES)) == tuple(NAMES)
    assert classes(flags, class_names=np.array([*NAMES, "dog"])) == ("0", "1", "2")
    with pytest.raises(DataError, match=r"has 3 columns, but data\.classes names 4; name as many"):
        open_source("npz", tmp_path / "set.npz", classes=[*NAMES, "dog"])


def test_names_that_take_gigabytes(tmp_path: Path) -> None:
    """Texts that take no space in the file aren't read."""
    images, labels = SPLITS["train"]
    with h5py.File(tmp_path / "set.h5", "w") as file:
        file["train/images"], file["train/labels"] = images, labels
        file.create_dataset("names", 1 << 18, "S2048", chunks=(1 << 10,))
    tracemalloc.start()
    assert open_source("hdf5", tmp_path / "set.h5").classes == ("0", "1", "2")
    assert tracemalloc.get_traced_memory()[1] < 1 << 26
    tracemalloc.stop()


def test_names_of_two_splits(tmp_path: Path) -> None:
    """`train_val` is neither of both; of groups and files in each other the inner name counts."""
    images, labels = SPLITS["train"]
    np.savez(tmp_path / "set.npz", x_train_val=images, y_train_val=labels)
    for split in ("train", "val"):
        with pytest.raises(NoSplitError, match=f"has no split '{split}'; it has train_val: set data.train_split"):
            open_source("npz", tmp_path / "set.npz", split)
    assert len(open_source("npz", tmp_path / "set.npz", "train_val")) == 16
    with h5py.File(tmp_path / "set.h5", "w") as file:
        for split in SPLITS:
            file[f"train_test/{split}_images"], file[f"train_test/{split}_labels"] = SPLITS[split]
    assert [len(open_source("hdf5", tmp_path / "set.h5", split)) for split in SPLITS] == [16, 8]


@pytest.mark.parametrize("what", ["images", "labels"])
@pytest.mark.parametrize("chunks", [4, None])
def test_hdf5_that_was_written_in_part(what: str, chunks: int | None, tmp_path: Path) -> None:
    """What wasn't is no black image of class 0."""
    with h5py.File(tmp_path / "set.h5", "w") as file:
        for split, arrays in SPLITS.items():
            for name, values in zip(("images", "labels"), arrays, strict=True):
                shape = (chunks, *values.shape[1:]) if chunks else None
                found = file.create_dataset(f"{split}/{name}", values.shape, np.uint8, chunks=shape)
                if (split, name) != ("train", what):
                    found[:] = values
                elif chunks:
                    found[:8] = values[:8]
    there = "2 of its 4" if chunks else "0 of its 1"
    with pytest.raises(DataError, match=rf"set\.h5:train/{what} was written in part: {there} chunks are there, the"):
        open_source("hdf5", tmp_path / "set.h5")
    assert len(open_source("hdf5", tmp_path / "set.h5", "test")) == 8


def test_zarr_that_was_written_in_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Chunks of zeros are left out as a rule, so it is a warning, and of images alone."""
    images, labels = SPLITS["train"]
    group = zarr.open_group(str(tmp_path / "set.zarr"), mode="w")
    group.create_array("train/images", shape=images.shape, dtype="u1", chunks=(4, 9, 8, 3))[:8] = images[:8]
    group.create_array("train/labels", data=np.sort(labels), chunks=(4,))
    assert len(open_source("zarr", tmp_path / "set.zarr")) == 16
    lines = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert [": 2 of 4 chunks are there, the others are black images" in line for line in lines] == [True]
