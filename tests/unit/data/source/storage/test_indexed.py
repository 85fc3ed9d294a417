"""What of an index is looked at before it is believed, and whose fault it is if a file can't be read."""

import json
import os
import shutil
import struct
import tempfile
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from archives import make, pairs
from images import encode, photo
from plans import line, make_plan, open_source, write_records

from effloop.data.source.storage.columns import ColumnFile
from effloop.errors import DataError

JPEG = encode(photo(40, 40), "JPEG")
TRAIN = [(b"a/1.jpg", 0, JPEG), (b"b/2.jpg", 1, JPEG + b"2"), (b"b/3.jpg", 1, JPEG + b"3")]
_PREFIX = struct.Struct("<8sQQI")


def rewrite(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change a column file's header, with a checksum that fits; its columns have none, as in older files."""
    whole = path.read_bytes()
    magic, offset, length, _ = _PREFIX.unpack_from(whole)
    header = json.loads(whole[offset : offset + length])
    header.pop("crc32c", None)
    edit(header)
    raw = json.dumps(header).encode()
    prefix = _PREFIX.pack(magic, offset, len(raw), zlib.crc32(raw))
    path.write_bytes(prefix + whole[_PREFIX.size : offset] + raw)


def overwrite(path: Path, column: str, at: int, value: int) -> None:
    """Change one value of a column."""
    dtype, _, offset = ColumnFile(path).place(column)
    with path.open("r+b") as file:
        file.seek(offset + at * np.dtype(dtype).itemsize)
        file.write(np.array(value).astype(dtype).tobytes())
    rewrite(path, lambda header: header)


@pytest.fixture(params=["tar", "recordio"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def root(name: str, tmp_path: Path) -> Path:
    return write_records(name, tmp_path / "set", ["a", "b"], train=TRAIN, val=TRAIN)


def test_a_file_that_is_none_of_the_indexs(name, root):
    overwrite(root / "train.index", "file", 1, 7)
    source = open_source(name, root)
    with pytest.raises(DataError, match=line("is damaged: it should be in file 7, counted from 0, of 1")):
        source.read(1)
    source.will_need([1])
    assert bytes(source.read(2)) == JPEG + b"3"


def test_a_label_that_no_class_has(name, root):
    overwrite(root / "train.index", "label", 2, 9)
    plan = make_plan(open_source(name, root), batch=3)
    wanted = f"{root}:train/b/3.jpg has the label 9; allowed are 0 to 1: convert the dataset again"
    with pytest.raises(DataError, match=line(wanted)):
        plan.empty_batch(next(plan.requests(0)))


def _set(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["meta"]["header"].update({name: value})


NO_COUNTS = "its header has no classes or no counts; convert it again"
NO_FILES = "it doesn't say which files it is of; convert again"
SUMS = {"samples": 3, "bytes": 3, "sha256": ""}


@pytest.mark.parametrize(
    ("edit", "wanted"),
    [
        (_set("classes", [1, 2]), NO_COUNTS),
        (_set("fingerprint", {**SUMS, "samples": True}), NO_COUNTS),
        (lambda header: header["meta"].pop("files"), NO_FILES),
        (lambda header: header["meta"]["files"][0].pop("size"), NO_FILES),
        (
            lambda header: header["meta"]["files"][0].update(name="../set/x"),
            "it names a file outside its folder, '../set/x'; convert again",
        ),
        (
            lambda header: header["meta"]["files"][0].update(name="/etc/passwd"),
            "it names a file outside its folder, '/etc/passwd'; convert again",
        ),
        (lambda header: header["columns"].pop("offset"), "it has no column 'offset'; convert it again"),
        (
            lambda header: header["columns"]["label"].__setitem__(0, "|i1"),
            "its column 'label' is int8, not of unsigned integers; convert it again",
        ),
    ],
)
def test_an_index_with_a_wrong_header(name, root, edit, wanted):
    rewrite(root / "train.index", edit)
    with pytest.raises(DataError, match=line(f"{root}/train.index is damaged: {wanted}")):
        open_source(name, root)


@pytest.mark.parametrize("column", ["file", "offset", "size"])
def test_fewer_places_than_samples(name, root, column):
    rewrite(root / "train.index", lambda header: header["columns"][column].__setitem__(1, 2))
    wanted = f"{root}:train is damaged: its header says 3 samples, its columns hold 3, 3, 3, 2; convert it again"
    with pytest.raises(DataError, match=line(wanted)):
        open_source(name, root)


def test_an_index_without_its_header(root, name):
    rewrite(root / "train.index", lambda header: header["meta"].pop("header"))
    with pytest.raises(DataError, match="is not a dataset written by EffLoop: it has no header"):
        open_source(name, root)


def test_a_size_from_a_damaged_index_is_not_allocated(root, name):
    """The file's ends don't match, so samples are looked at: by sizes that can't be."""
    for at in range(3):
        overwrite(root / "train.index", "size", at, (1 << 32) - 1)
    (file,) = root.glob("train*.tar") if name == "tar" else root.glob("train.rec")
    whole = file.read_bytes()
    file.write_bytes(whole[:1] + b"!" + whole[2:])
    tracemalloc.start()
    with pytest.raises(DataError, match=r"is not the file that .* was written for"):
        open_source(name, root)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20


def test_a_walk_is_not_believed_of_another_file(tmp_path):
    """Of the same size and time of change, which rsync and tar set."""
    first = make(tmp_path / "train-0.tar", [("a.jpg", JPEG), ("a.cls", b"0"), ("b.jpg", JPEG), ("b.cls", b"1")])
    assert open_source("tar", tmp_path).labels.tolist() == [0, 1]
    times = first.stat()
    first.unlink()
    make(first, [("a.jpg", JPEG), ("a.cls", b"1"), ("b.jpg", JPEG), ("b.cls", b"0")])
    os.utime(first, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert first.stat().st_size == times.st_size
    assert open_source("tar", tmp_path).labels.tolist() == [1, 0]


def test_names_of_classes_that_are_no_text(tmp_path):
    make(tmp_path / "train-0.tar", pairs("a", "b"))
    (tmp_path / "classes.txt").write_bytes(b"caf\xe9\nb\n")
    wanted = f"{tmp_path}/classes.txt is not UTF-8 text: invalid continuation byte at byte 3; write it again"
    with pytest.raises(DataError, match=line(wanted)):
        open_source("tar", tmp_path)


@pytest.fixture
def public(name: str, root: Path) -> Iterator[Path]:
    """The dataset where anybody may read it, and this process without the rights of root."""
    folder = Path(tempfile.mkdtemp())
    shutil.copytree(root, folder / "set")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777)
    open_source(name, folder / "set")  # imports what it needs
    former = os.geteuid()
    if former == 0:
        os.seteuid(65534)
    try:
        yield folder / "set"
    finally:
        os.seteuid(former)
        shutil.rmtree(folder, ignore_errors=True)


def forbid(path: Path) -> None:
    """Nobody but root may read it; changed by its owner."""
    effective = os.geteuid()
    os.seteuid(os.getuid())
    path.chmod(0)
    os.seteuid(effective)


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("auto", [True, False])
def test_an_unreadable_file(name, public, tmp_path, auto, indexed):
    (file,) = public.glob("train*.tar") if name == "tar" else public.glob("train.rec")
    if not indexed:
        (public / "train.index").unlink()
    forbid(file)
    with pytest.raises(DataError, match=line(f"{file} can't be read: Permission denied")):
        open_source("auto" if auto else name, public)


def test_an_unreadable_list(public, name):
    if name != "recordio":
        pytest.skip("has none")
    (public / "train.index").unlink()
    forbid(public / "train.lst")
    with pytest.raises(DataError, match=line(f"{public}/train.lst can't be read: Permission denied")):
        open_source(name, public)
