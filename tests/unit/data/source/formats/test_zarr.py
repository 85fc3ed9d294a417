import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import META, TRAIN, edit, verified, write
from plans import Copied, line, open_source, read_bytes, write_as

from effloop.data.source.storage.writing import Dataset, writers
from effloop.errors import DataError

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
def test_samples_cross_borders_of_chunks(name, path, tmp_path, shard_bytes, count):
    split = open_source("zarr", path)
    cut = tmp_path / "cut"
    writers[name](cut, Dataset(split.classes, {"train": Copied(split)}, {}, shard_bytes=shard_bytes))
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
def test_other_packages_read_it(package, name, photos, tmp_path):
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


def test_missing_or_cut_chunk(path, name):
    """To zarr it would be zeros."""
    for array, fix in (("payload", "it should have"), ("end", "put it back or convert again")):
        (file,) = chunks(path, name, array)
        data = file.read_bytes()
        file.write_bytes(data[:-1])
        with pytest.raises(DataError, match=f"^{file} has {len(data) - 1} bytes, .*{fix}"):
            open_source("zarr", path)
        file.unlink()
        with pytest.raises(DataError, match=rf"^{file} can't be read \(No such file or directory\), .*{fix}"):
            open_source("zarr", path)
        file.write_bytes(data)


FOLDERS = {
    "zarr.json": ('{"zarr_format": 3, "node_type": "group"}', "has no array that looks like images; it has none"),
    ".zgroup": ('{"zarr_format": 2}', "has no array that looks like images; it has none"),
    "attributes.json": ('{"n5": "4.0.0"}', "has no array that looks like images; it has none"),
    "no n5": ("{}", "is no folder of zarr, and no n5 that EffLoop wrote; set data.root=PATH"),
}


@pytest.mark.parametrize("file", FOLDERS)
def test_folder_of_another_kind(tmp_path, file):
    content, wanted = FOLDERS[file]
    (tmp_path / file.replace("no n5", "attributes.json")).write_text(content)
    with pytest.raises(DataError, match=f"^{tmp_path} {wanted}"):
        open_source("zarr", tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"a":' * 100_000])
def test_damaged_metadata(path, name, text):
    for file in (path / "train" / "end" / META[name][1], path / "train" / META[name][0]):
        file.write_text(text)
        wanted = f"{file} is damaged: it doesn't hold metadata as JSON; put it back or convert again"
        with pytest.raises(DataError, match=line(wanted)):
            open_source("zarr", path)


SHAPES = {"zarr": "shape", "zarr2": "shape", "n5": "dimensions"}
OTHERS: list[tuple[str, str, Any]] = [
    ("zarr", "codecs", [{"name": "bytes"}, {"name": "zstd"}]),
    ("zarr", "chunk_grid", 3),
    ("zarr2", "compressor", {"id": "blosc"}),
    ("zarr2", "dtype", ">u8"),
    ("n5", "compression", {"type": "gzip"}),
    *((name, SHAPES[name], found) for name in FORMATS for found in ([503, 1], 503, [-1], [5.0], [])),
]


def test_what_can_not_be_mapped(tmp_path):
    for number, (name, field, found) in enumerate(OTHERS):
        path = write(name, tmp_path / f"{number}")
        file = path / "train" / "payload" / META[name][1]
        edit(file, lambda meta: meta.update({field: found}))  # noqa: B023
        with pytest.raises(DataError, match=rf"^{file} is not as `convert` writes it, .*; convert it again$"):
            open_source("zarr", path)


def test_a_length_is_not_believed(path, name):
    for found in (10**18, 10**4000):
        edit(path / "train" / "payload" / META[name][1], lambda meta: meta.update({SHAPES[name]: [found]}))  # noqa: B023
        with pytest.raises(DataError, match=r"/train/payload/.* can't be read .*: put it back or convert again$"):
            open_source("zarr", path)


@pytest.mark.parametrize("root", ["data", "../here/data"])
def test_relative_root_of_another_program(root, tmp_path, monkeypatch):
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(str(tmp_path / "here" / "data"), mode="w")
    for split in ("train", "val"):
        group.create_array(f"{split}_images", data=np.zeros((4, 8, 8, 3), np.uint8))
        group.create_array(f"{split}_labels", data=np.arange(4) % 2)
    monkeypatch.chdir(tmp_path / "here")
    source = open_source("zarr", Path(root), index_dir=str(tmp_path / "kept"))
    assert source.labels.tolist() == [0, 1, 0, 1]
