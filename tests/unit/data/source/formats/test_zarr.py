from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import META, TRAIN, edit, verified, write
from plans import Copied, line, open_source, read_bytes, write_as

from effloop.data.source.formats.zarr import N5, ChunkWriter, Layout
from effloop.data.source.storage.writing import Dataset, writers
from effloop.errors import ConfigError, DataError

FORMATS = ("zarr", "zarr2", "n5")


@pytest.fixture(params=FORMATS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def path(name: str, tmp_path: Path) -> Path:
    return write(name, tmp_path / "set")


def chunks(path: Path, name: str, array: str) -> list[Path]:
    """The files of an array of the split `train`, in order."""
    folder = path / "train" / array
    files = (folder / "c" if name == "zarr" else folder).iterdir()
    return sorted((file for file in files if file.name.isdigit()), key=lambda file: int(file.name))


@pytest.mark.parametrize(("shard_bytes", "count"), [(1, 503), (100, 6), (252, 2), (503, 1)])
def test_samples_cross_the_borders_of_chunks(
    name: str, path: Path, tmp_path: Path, shard_bytes: int, count: int
) -> None:
    split = open_source("zarr", path)
    cut = tmp_path / "cut"
    writers[name](cut, Dataset(split.classes, {"train": Copied(split)}, {}), shard_bytes)
    assert verified("zarr", cut) == TRAIN
    files = chunks(cut, name, "payload")
    assert len(files) == count
    open_source("zarr", cut).will_need(range(3))
    sizes = {file.stat().st_size for file in files}
    assert max(sizes) <= shard_bytes + 8  # before the values of n5
    assert len(sizes) == 1 or name == "n5"  # which has a shorter last one


FOREIGN = """
import json, sys
import numpy as np

package, name, path, out = sys.argv[1:]
if package == "zarr":
    import zarr
    group = zarr.open_group(path, mode="r")["train"]
    header = dict(group.attrs)["effloop"]
    get = lambda array: group[array][:]
else:
    import tensorstore
    driver = {"zarr": "zarr3", "zarr2": "zarr", "n5": "n5"}[name]
    attributes = {"zarr": "zarr.json", "zarr2": ".zattrs", "n5": "attributes.json"}[name]
    meta = json.load(open(f"{path}/train/{attributes}"))
    header = meta.get("attributes", meta)["effloop"]
    def get(array):
        store = {"driver": "file", "path": f"{path}/train/{array}/"}
        return tensorstore.open({"driver": driver, "kvstore": store}, read=True, open=True).result().read().result()
arrays = {array: get(array) for array in ("label", "key", "key_end", "end", "crc32c", "payload")}
assert all(values.dtype.kind == "u" for values in arrays.values())
json.dump({"header": header, **{array: values.tolist() for array, values in arrays.items()}}, open(out, "w"))
"""


@pytest.mark.parametrize(
    ("package", "name"), [("zarr", "zarr"), ("zarr", "zarr2"), *(("tensorstore", name) for name in FORMATS)]
)
def test_other_packages_read_it(package: str, name: str, photos: Path, tmp_path: Path) -> None:
    """In a process of their own: tensorstore's threads must not be there when another test forks."""
    path = write_as(name, photos, tmp_path / "set", shard_bytes=5000)
    script = tmp_path / "read.py"
    script.write_text(FOREIGN)
    subprocess.run([sys.executable, script, package, name, path, tmp_path / "out"], check=True, timeout=120)
    found, folder = json.loads((tmp_path / "out").read_text()), open_source("folder", photos)
    assert found["header"]["fingerprint"] == folder.fingerprint()
    assert found["label"] == folder.labels.tolist()
    keys = [folder.raw_key(index) for index in range(len(folder))]
    images = [read_bytes(folder, index) for index in range(len(folder))]
    assert (bytes(found["key"]), bytes(found["payload"])) == (b"".join(keys), b"".join(images))
    assert found["key_end"] == np.cumsum([len(key) for key in keys]).tolist()
    assert found["end"] == np.cumsum([len(image) for image in images]).tolist()


@pytest.mark.parametrize("array", ["payload", "end"])
def test_missing_chunk(path: Path, name: str, array: str) -> None:
    """To zarr it would be zeros."""
    (file,) = chunks(path, name, array)
    size = file.stat().st_size
    file.unlink()
    wanted = f"{file} is missing (No such file or directory); it should have {size} bytes: put it back or convert again"
    with pytest.raises(DataError, match=line(wanted)):
        open_source("zarr", path)


@pytest.mark.parametrize("array", ["payload", "crc32c"])
def test_cut_chunk(path: Path, name: str, array: str) -> None:
    (file,) = chunks(path, name, array)
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    wanted = f"{file} has {len(data) - 1} bytes, it should have {len(data)}: put it back or convert again"
    with pytest.raises(DataError, match=line(wanted)):
        open_source("zarr", path)


@pytest.mark.parametrize("file", ["zarr.json", ".zgroup", "attributes.json"])
def test_foreign_folder(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text('{"n5": "4.0.0"}')
    (tmp_path / "train").mkdir()
    wanted = f"{tmp_path} has no array that looks like images; it has none: set data.image=NAME"
    with pytest.raises(DataError, match=line(wanted)):
        open_source("zarr", tmp_path)


@pytest.mark.parametrize("content", [None, "{}", "{", "[1]"])
def test_folder_of_another_kind(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "attributes.json").write_text(content)
    wanted = (
        f"{tmp_path} is no zarr or n5 folder: it has no zarr.json, no .zgroup and no attributes.json of n5; "
        "set data.root=PATH"
    )
    with pytest.raises(DataError, match=line(wanted)):
        open_source("zarr", tmp_path)


def test_file_instead_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"...")
    wanted = f"data.root: '{tmp_path}/file' is a file; data=zarr reads a folder: set data.root=FOLDER"
    with pytest.raises(ConfigError, match=line(wanted)):
        open_source("zarr", tmp_path / "file")


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff", '{"a":' * 100_000])
def test_damaged_metadata(path: Path, name: str, text: str) -> None:
    for file in (path / "train" / "end" / META[name][1], path / "train" / META[name][0]):
        file.write_text(text, encoding="latin-1")
        wanted = f"{file} is damaged: it doesn't hold metadata as JSON; put it back or convert again"
        with pytest.raises(DataError, match=line(wanted)):
            open_source("zarr", path)


SHAPES = {"zarr": "shape", "zarr2": "shape", "n5": "dimensions"}
OTHERS: list[tuple[str, str, Any]] = [
    ("zarr", "codecs", [{"name": "bytes"}, {"name": "zstd"}]),
    ("zarr", "codecs", [{"name": "sharding_indexed"}]),
    ("zarr", "chunk_grid", {"name": "rectilinear"}),
    ("zarr", "chunk_grid", 3),
    ("zarr", "chunk_key_encoding", {"name": "v2"}),
    ("zarr", "storage_transformers", [{"name": "x"}]),
    ("zarr2", "compressor", {"id": "blosc"}),
    ("zarr2", "filters", [{"id": "delta"}]),
    ("zarr2", "dtype", ">u8"),
    ("n5", "compression", {"type": "gzip"}),
    *((name, SHAPES[name], found) for name in FORMATS for found in ([503, 1], 503, [-1], [5.0], ["5"], [True], [])),
]


@pytest.mark.parametrize(("name", "field", "found"), OTHERS)
def test_what_can_not_be_mapped(name: str, path: Path, field: str, found: Any) -> None:
    file = path / "train" / "payload" / META[name][1]
    edit(file, lambda meta: meta.update({field: found}))
    with pytest.raises(DataError, match=rf"^{file} is not as `convert` writes it, .*; convert it again$"):
        open_source("zarr", path)


@pytest.mark.parametrize("found", [10**18, 10**4000])
def test_a_length_is_not_believed(path: Path, name: str, found: int) -> None:
    edit(path / "train" / "payload" / META[name][1], lambda meta: meta.update({SHAPES[name]: [found]}))
    with pytest.raises(DataError, match=r"/train/payload/.* is missing .*: put it back or convert again$"):
        open_source("zarr", path)


def test_column_in_chunks(path: Path, name: str) -> None:
    def halve(meta: dict[str, Any]) -> None:
        where = meta["chunk_grid"]["configuration"] if name == "zarr" else meta
        where[{"zarr": "chunk_shape", "zarr2": "chunks", "n5": "blockSize"}[name]] = [2]

    edit(path / "train" / "end" / META[name][1], halve)
    wanted = f"{path}/train/end is in several chunks, only one can be mapped; convert it again"
    with pytest.raises(DataError, match=line(wanted)):
        open_source("zarr", path)


def test_block_that_n5_does_not_allow(tmp_path: Path) -> None:
    layout = Layout(np.dtype(">u8"), 1 << 28, 1 << 28)
    folder = tmp_path / "key_end"
    wanted = f"{folder} would take 2,147,483,656 bytes in one block, n5 allows 2,147,483,647; choose another format"
    with pytest.raises(DataError, match=line(wanted)):
        ChunkWriter(N5, folder, layout).__enter__()
