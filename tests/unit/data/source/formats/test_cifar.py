"""CIFAR's files, as its authors write them: the pixels and labels that torchvision gives."""

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plans import open_source
from stores import CIFAR_NAMES, by_python_2, cifar_batch, make_splits, write_cifar10, write_idx

from effloop.data.image.header import pnm_pixels, read_header
from effloop.data.source import Source
from effloop.data.source.formats.cifar import CifarSource
from effloop.errors import ConfigError

WRITE: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "Python 2": by_python_2,
    **{f"protocol {n}": lambda content, n=n: pickle.dumps(content, n) for n in (0, 2, 4, 5)},  # type: ignore[misc]
}


def cifar100(root: Path) -> Path:
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    for name, seed, count in (("train", 1, 12), ("test", 2, 5)):
        found = cifar_batch(seed, count)
        fine = found.pop("labels")
        coarse = [label // 2 for label in fine]
        (folder / name).write_bytes(by_python_2({**found, "fine_labels": fine, "coarse_labels": coarse}))
    (folder / "meta").write_bytes(
        by_python_2({"fine_label_names": CIFAR_NAMES, "coarse_label_names": ["vehicle", "animal"]})
    )
    return root


def images(source: Source) -> np.ndarray[Any, Any]:
    found = [source.read(index) for index in range(len(source))]
    return np.stack([pnm_pixels(data, read_header(data)) for data in found])


def by_torchvision(folder: Path, *names: str) -> tuple[np.ndarray[Any, Any], list[int]]:
    """What torchvision.datasets.CIFAR10 makes of these files."""
    data, targets = [], []
    for name in names:
        with open(folder / name, "rb") as file:
            entry = pickle.load(file, encoding="latin1")
        data.append(entry["data"])
        targets.extend(entry["labels"] if "labels" in entry else entry["fine_labels"])
    return np.vstack(data).reshape(-1, 3, 32, 32).transpose((0, 2, 3, 1)), targets


@pytest.mark.parametrize("name", WRITE)
def test_cifar_10(name, tmp_path):
    root = write_cifar10(tmp_path, WRITE[name])
    pixels, labels = by_torchvision(root / "cifar-10-batches-py", *(f"data_batch_{n}" for n in range(1, 6)))
    for path in (root, root / "cifar-10-batches-py"):
        source = open_source("auto", path)
        assert source.classes == tuple(CIFAR_NAMES)
        assert source.labels.tolist() == labels
        np.testing.assert_array_equal(images(source), pixels)
    test = open_source("cifar", root, "test")
    np.testing.assert_array_equal(images(test), by_torchvision(root / "cifar-10-batches-py", "test_batch")[0])
    assert [test.key(index) for index in (0, 4)] == ["test_batch/00000", "test_batch/00004"]


def test_cifar_100(tmp_path):
    root = cifar100(tmp_path)
    pixels, labels = by_torchvision(root / "cifar-100-python", "train")
    source = open_source("auto", root)
    assert (source.classes, source.labels.tolist()) == (tuple(CIFAR_NAMES), labels)
    np.testing.assert_array_equal(images(source), pixels)


def test_claims(photos, tmp_path):
    assert not CifarSource.claims(photos)
    for name in ("train", "test"):
        (tmp_path / name).write_bytes(b"")
    assert not CifarSource.claims(tmp_path)
    with pytest.raises(ConfigError, match=r"has none of cifar-10-batches-py, .*; set data\.root=FOLDER"):
        open_source("cifar", tmp_path)


def test_several_datasets_in_a_folder(tmp_path):
    """As torchvision keeps them side by side."""
    write_cifar10(tmp_path)
    assert len(open_source("auto", tmp_path, "test")) == 5
    write_idx(tmp_path / "gzip", make_splits(train=4, test=4))
    with pytest.raises(ConfigError, match=r"has several datasets, of data=cifar and data=idx; set data\.root=FOLDER"):
        open_source("auto", tmp_path, "test")
    assert len(open_source("cifar", tmp_path, "test")) == 5
    cifar100(tmp_path)
    several = f"has several datasets, {tmp_path}/cifar-10-batches-py and {tmp_path}/cifar-100-python (the"
    with pytest.raises(ConfigError, match=re.escape(several)):
        open_source("cifar", tmp_path, "test")
