"""What every registered source has to do."""

import gc
import multiprocessing
import os
import pickle
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from multiprocessing.pool import Pool
from pathlib import Path

import numpy as np
import pytest
from masked import make_masks
from plans import open_source, read_bytes, write_as, write_table
from runs import make_photos
from stores import make_splits, write_cifar10, write_npz

from effloop.data.image.encoded import read_headers
from effloop.data.image.header import read_header
from effloop.data.source import Kind, Source, sources
from effloop.data.source.base import printable
from effloop.data.source.storage.loose import LooseSource
from effloop.data.source.view import View

Open = Callable[[str], Source]

SAMPLES: dict[str, Callable[[Path, Path], Path | None]] = {
    "auto": lambda photos, folder: photos,
    "cifar": lambda photos, folder: write_cifar10(folder / "set", train=400, test=3),
    "csv": lambda photos, folder: write_table("csv", photos, folder),
    "embedded": lambda photos, folder: None,
    "folder": lambda photos, folder: photos,
    "hdf5": lambda photos, folder: write_as("hdf5", photos, folder / "photos.h5"),
    "lmdb": lambda photos, folder: write_as("lmdb", photos, folder / "photos.lmdb"),
    "masks": lambda photos, folder: make_masks(folder, {"train": 400, "val": 3}),
    "memmap": lambda photos, folder: write_as("memmap", photos, folder / "photos.effloop"),
    "npz": lambda photos, folder: write_npz(folder / "set.npz", make_splits(train=400, val=3)),
    "parquet": lambda photos, folder: write_as("parquet", photos, folder / "photos", 100_000),
    "pth": lambda photos, folder: write_as("pth", photos, folder / "photos.pth"),
    "recordio": lambda photos, folder: write_as("recordio", photos, folder / "photos"),
    "tfrecord": lambda photos, folder: write_as("tfrecord", photos, folder / "photos", 100_000),
    "zarr": lambda photos, folder: write_as("zarr", photos, folder / "photos.zarr", 100_000),
    "tar": lambda photos, folder: write_as("tar", photos, folder / "photos", 300_000),
}
"""Source -> what makes of a folder of photographs the same in its format, and returns `data.root`."""


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many samples in train, few in val."""
    return make_photos(tmp_path_factory.mktemp("uneven"), train=400, val=3)


@pytest.fixture(scope="module")
def root_of(uneven: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path | None]:
    """Source -> `data.root` of the dataset in its format, which is made once; not to be changed."""
    return cache(lambda name: SAMPLES[name](uneven, tmp_path_factory.mktemp(name)))


READ_AS_OTHERS = {"hf": "what it is", "idx": "npz", "beton": "npz", "zip": "npz"}


@pytest.fixture(params=[name for name in sources.names() if name not in READ_AS_OTHERS])
def opened(request: pytest.FixtureRequest, root_of: Callable[[str], Path | None]) -> Open:
    """Opens a split of a dataset in the format of one source after the other."""
    if request.param not in SAMPLES:
        pytest.fail(f"data={request.param} is registered, but SAMPLES in this file makes no data for it: add that")
    root, names = root_of(request.param), {"val": "test"} if request.param == "cifar" else {}
    return lambda split: open_source(request.param, root, names.get(split, split))


@pytest.fixture
def source(opened: Open) -> Source:
    return opened("train")


@pytest.fixture(scope="module")
def spawned() -> Iterator[Pool]:
    """A fresh process; one for all tests, because each imports torch."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool


def some(source: Source) -> list[int]:
    return [0, 1, len(source) // 2, len(source) - 1]


def test_samples_and_targets(source):
    """Each sample is an image with a name of its own; files and fingerprint are theirs."""
    assert all(Path(os.fsdecode(file)).is_file() for file in source.file_paths())
    assert [*source.file_paths()]
    contents = [source.read(index) for index in range(len(source))]
    for data in contents:
        assert isinstance(data, bytes | bytearray | memoryview)
        assert read_header(data).complete
    keys = [source.key(index) for index in range(len(source))]
    assert len(set(keys)) == len(keys)
    assert all(key.isprintable() for key in keys)
    for index in some(source):  # a file is named by its own path, also in a part
        path = source.file_path(index)
        assert Path(os.fsdecode(path)).is_file() if isinstance(source, LooseSource) else path == source.raw_key(index)
        part = View(source, np.array([index]), where="a part")
        assert (part.file_path(0), part.name(0)) == (path, source.name(index))
        assert source.name(index) in (printable(path), f"{source.where}/{printable(path)}")
    fingerprint = source.fingerprint()
    assert set(fingerprint) == {"samples", "bytes", "sha256"}
    assert (fingerprint["samples"], fingerprint["bytes"]) == (len(source), sum(map(len, contents)))
    assert len(bytes.fromhex(fingerprint["sha256"])) == 32
    assert len(source.targets) == len(source)
    if source.kind is Kind.masks:
        assert source.targets.shape == (len(source), 0)
        return
    assert source.labels.shape == (len(source),)
    assert source.labels.dtype == np.min_scalar_type(len(source.classes) - 1)
    assert set(source.labels.tolist()) == set(range(len(source.classes)))
    assert all(isinstance(name, str) for name in source.classes)
    if type(source).targets is Source.targets:
        assert source.targets is source.labels


def test_splits_have_the_same_classes(opened):
    assert opened("train").classes == opened("val").classes
    assert opened("train").where != opened("val").where


def test_pickle(source):
    copy = pickle.loads(pickle.dumps(source))
    assert type(copy) is type(source)
    assert (copy.classes, copy.where, copy.fingerprint()) == (source.classes, source.where, source.fingerprint())
    np.testing.assert_array_equal(copy.target_rows, source.target_rows)
    for index in some(source):
        assert read_bytes(copy, index) == read_bytes(source, index)
        assert copy.key(index) == source.key(index)


@pytest.mark.nightly
def test_a_spawned_process_reads_the_same(source, spawned):
    got = spawned.starmap(read_bytes, [(source, index) for index in some(source)])
    assert got == [read_bytes(source, index) for index in some(source)]


def test_a_forked_process_reads_the_same(source):
    wanted = [read_bytes(source, index) for index in some(source)]
    context = multiprocessing.get_context("fork")
    with context.Pool(1, initializer=_inherit, initargs=(source,)) as pool:  # inherited, not pickled
        assert pool.map(_read_inherited, some(source)) == wanted


def _inherit(source: Source) -> None:
    global _inherited
    _inherited = source


def _read_inherited(index: int) -> bytes:
    return read_bytes(_inherited, index)


def test_threads_read_the_same(source):
    indices = list(range(len(source))) * 4
    wanted = [read_bytes(source, index) for index in range(len(source))] * 4
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda index: read_bytes(source, index), indices)) == wanted


def _taken(opened: Open, split: str) -> tuple[int, int]:
    """Bytes that an opened source takes in memory, and pickled."""
    tracemalloc.start()
    source = opened(split)
    gc.collect()
    taken = (tracemalloc.get_traced_memory()[0], len(pickle.dumps(source)))
    tracemalloc.stop()
    return taken


def test_nothing_is_kept_per_sample(opened):
    """400 or 1,515 samples take as much memory and as much to pickle as 3 or 341."""
    taken = {}
    for split in ("train", "val"):
        opened(split)  # once before: what is imported or cached at first use is not the source's
    gc.collect()
    gc.freeze()  # so that the collections below look at the source alone
    for split in ("train", "val"):
        taken[split] = min(_taken(opened, split) for _ in range(3))  # h5py's own table grows now and then, by 9 KB
    assert abs(taken["train"][0] - taken["val"][0]) < 4000  # 400 of the smallest objects are 12,800 bytes
    assert abs(taken["train"][1] - taken["val"][1]) < 32


def test_a_run_is_what_is_read_one_by_one(source):
    """Of many samples at once: their bytes, names and headers, in any order."""
    samples = np.random.default_rng(0).integers(0, len(source), 50)
    images, names = source.read_run(samples), source.raw_keys(samples)
    assert [bytes(image) for image in images] == [read_bytes(source, index) for index in samples.tolist()]
    assert [bytes(name) for name in names] == [source.raw_key(index) for index in samples.tolist()]
    headers = read_headers(images, lambda row: read_header(images[row]))
    assert [*headers] == [read_header(image) for image in images]
