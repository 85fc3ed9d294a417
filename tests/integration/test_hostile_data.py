"""Files that were made to run code, read or write elsewhere, or fill the memory: refused in one line, or inert."""

import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from images import encode, photo
from plans import write_records

from effloop.cli.main import main

pytestmark = pytest.mark.slow

IMAGE = encode(photo(), "JPEG")
SECRET = "the secret of another file"
CANARY = "canary"
TRAIN = [(b"%d.jpg" % number, number % 2, IMAGE) for number in range(4)]


class Payload:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (CANARY,)


def packed(name: str) -> Path:
    return write_records(name, Path("set"), ["a", "b"], train=TRAIN, val=TRAIN)


def lmdb_of_pickles() -> str:
    lmdb = pytest.importorskip("lmdb")
    for split in ("train", "val"):
        Path("set", split).mkdir(parents=True)
        with lmdb.open(f"set/{split}", map_size=1 << 20) as environment, environment.begin(write=True) as transaction:
            transaction.put(b"0", pickle.dumps([Payload()]))
    return "holds posix.mkdir, which is never run"


def a_pth_with_code() -> str:
    path = packed("pth")
    with zipfile.ZipFile(path) as archive:
        records = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in records.items():
            archive.writestr(name, pickle.dumps(Payload(), 2) if name.endswith("data.pkl") else data)
    return "holds more than tensors, numbers and text, and is not run"


def edited(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def zarr_of_objects() -> str:
    edited(packed("zarr2") / "train/label/.zarray", dtype="|O", filters=[{"id": "pickle"}])
    (Path("set") / "train/label/0").write_bytes(pickle.dumps(Payload()))
    return "train/label"


def zarr_of_another_codec() -> str:
    edited(packed("zarr") / "train/label/zarr.json", codecs=[{"name": "numcodecs.pickle", "configuration": {}}])
    return "train/label"


def zarr_chunk_that_is_a_link_elsewhere() -> str:
    chunk = next(path for path in (packed("zarr") / "train/label").rglob("*") if path.name != "zarr.json")
    chunk = chunk if chunk.is_file() else next(path for path in chunk.rglob("*") if path.is_file())
    chunk.unlink()
    chunk.symlink_to(Path("secret").absolute())
    return "label"


def hdf5_link_to_another_file() -> str:
    h5py = pytest.importorskip("h5py")
    packed("hdf5").rename("other")
    with h5py.File("set", "w") as file:
        file["train"] = h5py.ExternalLink("other", "/train")
        file["val"] = h5py.ExternalLink("other", "/val")
    return "is not an array in one piece"


def hdf5_external_storage() -> str:
    h5py = pytest.importorskip("h5py")
    with h5py.File(packed("hdf5"), "r+") as file:
        del file["train/key"]
        file["train"].create_dataset("key", (20,), np.uint8, external=[("secret", 0, 20)])
    return "is not an array in one piece"


def tar_member(name: str) -> Callable[[], str]:
    def make() -> str:
        from archives import make as archive

        for split in ("train", "val"):
            archive(Path("set") / f"{split}-0.tar", [(f"{name}.jpg", IMAGE), (f"{name}.cls", b"0")])
        return "leads out of the archive"

    return make


def table_of(path: str, says: str) -> Callable[[], str]:
    def make() -> str:
        Path("set").mkdir()
        for split, hostile in (("train", f"{path},a\n"), ("val", "")):
            for name in ("a", "b"):
                (Path("set") / f"{split}-{name}.jpg").write_bytes(IMAGE)
            rows = f"image,label\n{split}-a.jpg,a\n{split}-b.jpg,b\n{hostile}"
            (Path("set") / f"{split}.csv").write_text(rows)
        return says

    return make


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_that_inflates(kind: bytes) -> Callable[[], str]:
    """64 MB of zeros in 64 KB."""

    def make() -> str:
        header = struct.pack(">IIBBBBB", 8, 8, 8, 0, 0, 0, 0)
        bomb = b"k\0\0" + zlib.compress(bytes(64 << 20), 9)
        parts = (
            chunk(b"IHDR", header),
            chunk(kind, bomb),
            chunk(b"IDAT", zlib.compress(bytes(72))),
            chunk(b"IEND", b""),
        )
        for split in ("train", "val"):
            for name in ("a", "b"):
                (folder := Path("set") / split / name).mkdir(parents=True)
                (folder / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
        return "is a damaged PNG"

    return make


OUTSIDE = "images that are not there"
HOSTILE = {
    "lmdb of pickles": ("lmdb", lmdb_of_pickles),
    "pth with code": ("pth", a_pth_with_code),
    "zarr of objects": ("zarr", zarr_of_objects),
    "zarr of another codec": ("zarr", zarr_of_another_codec),
    "zarr chunk that is a link": ("zarr", zarr_chunk_that_is_a_link_elsewhere),
    "hdf5 link": ("hdf5", hdf5_link_to_another_file),
    "hdf5 external storage": ("hdf5", hdf5_external_storage),
    "tar with ..": ("tar", tar_member("../x")),
    "tar with an absolute name": ("tar", tar_member("/tmp/x")),
    "table of a URL": ("csv", table_of("http://127.0.0.1:1/x.jpg", OUTSIDE)),
    "table of a file URL": ("csv", table_of("file:///etc/passwd", OUTSIDE)),
    "table of a command": ("csv", table_of("pipe:mkdir canary", OUTSIDE)),
    "table of a device": ("csv", table_of("/dev/zero", OUTSIDE)),
    "table of a file that is no image": ("csv", table_of("../secret", "is not an image")),
    "png zTXt": ("folder", png_that_inflates(b"zTXt")),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_refused_in_one_line(name, here, capsys):
    data, make = HOSTILE[name]
    Path("secret").write_text(SECRET * 9)
    wanted = make()
    before = {path for path in here.parent.rglob("*") if not {"cache", "outputs"} & {*path.parts}}
    assert main(["train", f"data={data}", "data.root=set", "image_size=16", "num_workers=0", "batch_size=2"]) == 2
    err = capsys.readouterr().err
    assert wanted in err
    refusals = [line for line in err.splitlines() if not line.startswith("effloop: warning: ")]
    assert len(refusals) == 1
    assert SECRET not in err
    assert not Path(CANARY).exists()
    assert {path for path in here.parent.rglob("*") if not {"cache", "outputs"} & {*path.parts}} == before


def test_names_that_lead_elsewhere_are_not_written_there(here, capsys):
    """A packed file may have any keys; a folder made of it stays below `out`."""
    names = [b"../../evil.jpg", b"/evil.jpg", b"a/../../../evil.jpg", b"a/./evil.jpg", b"a//evil.jpg", b"b/good.jpg"]
    train = [(name, number // 5, IMAGE) for number, name in enumerate(names)]
    write_records("memmap", here / "set", ["a", "b"], train=train)
    assert main(["convert", "data.root=set", "to=folder", "out=made", "split=train"]) == 0
    capsys.readouterr()
    assert not list(here.parent.rglob("*evil*"))
    found = sorted(path.relative_to("made").as_posix() for path in Path("made").rglob("*.jpg"))
    assert found == [*(f"train/a/{number:09}.jpg" for number in range(5)), "train/b/good.jpg"]
