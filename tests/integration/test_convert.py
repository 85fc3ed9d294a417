"""`effloop convert`, from the command to the dataset."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from images import encode, photo
from plans import Listed, open_source, read_bytes
from runs import make_photos, start

from effloop.cli.main import main
from effloop.convert.convert import ConvertOptions, convert
from effloop.convert.reencode import Recipe, Recode
from effloop.data.decode import decoders
from effloop.data.image.header import read_header
from effloop.data.source import Source
from effloop.data.source.folder import FolderConfig, FolderSource
from effloop.data.source.storage.columns import ColumnFile
from effloop.data.source.storage.writing import Dataset, writers
from effloop.data.source.view import shuffled
from effloop.errors import ConfigError, DataError

DECODER = decoders.build(decoders["auto"].config(name="auto"))


def run(*words: str) -> int:
    return main(["convert", *words])


def failure(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a conversion which fails prints."""
    capsys.readouterr()
    assert run(*words) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err.removeprefix("effloop: ").removesuffix("\n")


def reopened(root: Path, split: str = "train") -> Source:
    return open_source("auto", root, split)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Six images of all kinds in two classes, in both splits."""
    kinds = {
        "a/jpeg.jpg": encode(photo(90, 120), "JPEG", quality=90),
        "a/progressive.jpg": encode(photo(80, 60), "JPEG", progressive=True),
        "a/grey.jpg": encode(photo(50, 70)[:, :, 0], "JPEG"),
        "b/cmyk.jpg": encode(photo(64, 64), "JPEG", mode="CMYK"),
        "b/small.png": encode(photo(20, 10), "PNG"),
        "b/weird \xff\n.webp": encode(photo(40, 44), "WEBP"),
    }
    for split in ("train", "val"):
        for name, data in kinds.items():
            path = tmp_path / "mixed" / split / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return tmp_path / "mixed"


def test_images_are_re_encoded_into_folders_of_classes(mixed, tmp_path):
    assert run(f"data.root={mixed}", "to=folder", f"out={tmp_path}/small", "max_side=32") == 0
    source = reopened(tmp_path / "small")
    assert source.classes == ("a", "b")
    assert source.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert max(max(DECODER.size(source.read(index))) for index in range(len(source))) == 32


def test_originals_stay_the_same(photos: Path, here: Path) -> None:  # contract/test_formats.py has every format
    assert run(f"data.root={photos}", "to=tar", "out=set") == 0
    for split in ("train", "val"):
        folder, converted = open_source("folder", photos, split), reopened(here / "set", split)
        assert converted.classes == folder.classes
        assert converted.fingerprint() == folder.fingerprint()
        for index in range(len(folder)):
            assert read_bytes(converted, index) == read_bytes(folder, index)
    assert [path.name for path in here.iterdir()] == ["set"]


def test_shuffled(photos, here):
    """The training split has the same samples in another order, of the seed; the other one stays as it is."""
    assert run(f"data.root={photos}", "to=memmap", "out=set", "shuffle=true", "seed=3") == 0
    folder, converted = open_source("folder", photos), reopened(here / "set")
    ids = shuffled(folder, 3).ids
    assert ids.tolist() != shuffled(folder, 4).ids.tolist() != list(range(len(folder)))
    assert sorted(ids) == list(range(len(folder)))
    assert converted.labels.tolist() == folder.labels[ids].tolist()
    for index, sample in enumerate(ids.tolist()):
        assert read_bytes(converted, index) == read_bytes(folder, sample)
    assert reopened(here / "set", "val").fingerprint() == open_source("folder", photos, "val").fingerprint()


@pytest.mark.parametrize(
    ("words", "recipe"),
    [
        (["max_side=60"], Recipe(max_side=60)),
        (["quality=75", "restart=none"], Recipe(quality=75, restart="none")),
        (["quality=source"], Recipe(quality="source")),
        (["payload=raw", "max_side=32", "color=rgb"], Recipe("raw", max_side=32, color="rgb")),
        (["payload=jpeg", "color=gray"], Recipe(color="gray")),
    ],
)
def test_re_encoded_images(words, recipe, mixed, here):
    assert run(f"data.root={mixed}", "to=memmap", "out=set", *words) == 0
    folder, converted = open_source("folder", mixed), reopened(here / "set")
    recode = Recode(recipe, DECODER)
    assert [converted.raw_key(i) for i in range(6)] == [folder.raw_key(i) for i in range(6)]
    assert converted.labels.tolist() == folder.labels.tolist()
    for index in range(6):
        assert read_bytes(converted, index) == recode(folder.read(index))
    assert getattr(converted, "about") == recipe.about()  # noqa: B009  only packed sources have it


def test_one_dataset_for_each_size(mixed, here, capsys):
    assert run(f"data.root={mixed}", "to=memmap", "out=set.bin", "max_side=60,30") == 0
    assert sorted(path.name for path in here.iterdir()) == ["set-30.bin", "set-60.bin"]
    for size in (60, 30):
        header = read_header(reopened(here / f"set-{size}.bin").read(1))
        assert max(header.height, header.width) == size
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.endswith("is written")] == [
        f"{here}/set-60.bin is written",
        f"{here}/set-30.bin is written",
    ]


def test_one_split(photos, here):
    assert run(f"data.root={photos}", "data.val_split=train", "to=memmap", "out=set", "split=val") == 0
    assert reopened(here / "set", "val").fingerprint() == open_source("folder", photos).fingerprint()
    with pytest.raises(DataError, match="has no split 'train'; it has val"):
        reopened(here / "set")


def test_again_gives_the_same_bytes(photos, here):
    for name, threads in (("one", 1), ("two", 3)):
        assert run(f"data.root={photos}", "to=memmap", f"out={name}", "max_side=20", f"num_workers={threads}") == 0
    assert (here / "one").read_bytes() == (here / "two").read_bytes()


class TestFailures:
    def test_splits_with_different_classes(self, photos, mixed, here, capsys):
        os.rename(mixed / "val" / "b", mixed / "val" / "c")
        wanted = (
            f"train and val have different classes ({mixed}/train, {mixed}/val): only in train: b; only in val: c; "
            "give both the same classes, or set data.allow_missing_classes=true"
        )
        assert failure(capsys, f"data.root={mixed}", "to=memmap", "out=set") == wanted
        assert not list(here.iterdir())

    def test_bad_image(self, mixed, here, capsys):
        image = mixed / "train/b/small.png"
        image.write_bytes(image.read_bytes()[:-30])
        said = failure(capsys, f"data.root={mixed}", "to=memmap", "out=set", "max_side=30")
        assert said.startswith(f"{image} is a truncated PNG: ")
        assert not list(here.iterdir())  # it was looked at before the others were re-encoded

    @pytest.mark.parametrize("words", [[], ["quality=80"]])
    def test_bad_images_are_named_or_left_out(self, words, mixed, here, capsys):
        good = sum(len(open_source("folder", mixed, split)) for split in ("train", "val"))
        jpeg = encode(photo(), "JPEG")
        bad = {"train/a/0.gif": b"GIF89a", "train/b/404.jpg": b"<html>", "val/a/cut.jpg": jpeg[:-9]}
        if words:  # what only decoding tells
            bad["val/b/within.jpg"] = damaged_within(jpeg)
        for name, data in bad.items():
            (mixed / name).write_bytes(data)
        command = ["convert", f"data.root={mixed}", "to=lmdb", "out=set", *words]
        assert main(command) == 2
        lines = capsys.readouterr().err.splitlines()
        of = f"3 of {good + len(bad)} images can't be used"
        assert lines[0] == f"effloop: {of}; repair or remove what is bad, or set skip_bad=true:"
        assert [line.split()[0] for line in lines[1:]] == [str(mixed / name) for name in [*bad][:3]]
        assert not list(here.iterdir())
        assert main([*command, "skip_bad=true"]) == 0
        out, err = capsys.readouterr()
        assert [line.split()[0] for line in err.splitlines()[1:]] == [str(mixed / name) for name in bad]
        assert ("nothing is decoded: " in out) == (not words)
        assert sum(len(open_source("lmdb", here / "set", split)) for split in ("train", "val")) == good
        assert main(["verify", "data.root=set"]) == 0

    def test_nothing_is_left(self, photos, here, capsys):
        root = shutil.copytree(photos, here / "bad")
        for path in root.glob("val/*/*"):
            path.write_bytes(b"<html>")
        assert run(f"data.root={root}", "to=lmdb", "out=set", "skip_bad=true") == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(f"effloop: {root}/val: no image can be used; ")
        assert [path.name for path in here.iterdir()] == ["bad"]

    def test_damaged_record(self, photos, here, capsys):
        assert run(f"data.root={photos}", "to=memmap", "out=set") == 0
        whole = (here / "set").read_bytes()
        at = whole.index(read_bytes(reopened(here / "set"), 7)) + 200
        (here / "set").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        wanted = f"{here}/set:train/{reopened(here / 'set').key(7)} is damaged: its bytes don't match their checksum"
        wanted += "; repair or remove what is bad, or set skip_bad=true"
        words = (f"data.root={here}/set", "data.checksums=false", "data=memmap", "out=copy")
        for options in (["to=memmap"], ["to=memmap", "quality=90"]):
            assert failure(capsys, *words, *options) == wanted
        assert [path.name for path in here.iterdir()] == ["set"]

    @pytest.mark.parametrize("words", [[], ["quality=90"]])
    def test_bad_index(self, words, photos, here, capsys):
        assert run(f"data.root={photos}", "to=memmap", "out=set") == 0
        with (here / "set").open("r+b") as file:
            file.seek(ColumnFile(here / "set").place("train/label")[2] + 3)
            file.write(b"\x01")
        wanted = (
            f"{here}/set is damaged: its column 'train/label' doesn't match the checksum that it was written with; "
            "convert it again; or take 'val' alone: set split=val"
        )
        assert failure(capsys, f"data.root={here}/set", "to=tar", "out=copy", *words) == wanted
        assert [path.name for path in here.iterdir()] == ["set"]

    @pytest.mark.parametrize(("to", "words"), [("memmap", []), ("tar", ["quality=90"])])
    def test_writer_that_loses_a_sample(self, to, words, photos, here, capsys, monkeypatch):
        def forgetful(path: Path, dataset: Dataset) -> None:
            splits = {name: Listed(list(records)[: min(39, len(records))]) for name, records in dataset.splits.items()}
            true(path, Dataset(dataset.classes, splits, dataset.about))

        true = writers[to]
        monkeypatch.setattr("effloop.convert.convert.writers", {**writers, to: forgetful})
        said = failure(capsys, f"data.root={photos}", f"to={to}", "out=set", *words)
        assert said.startswith(
            f"out: what was written as {to} reads back differently, split 'train': samples 39, should be 40; bytes "
        )
        assert not (here / "set").exists()

    def test_replaced_after_the_scan(self, photos, here, capsys):
        root = shutil.copytree(photos, here / "photos")
        for folder in (root / "train").rglob("*"):
            os.utime(folder, (1e9, 1e9))
        os.utime(root / "train", (1e9, 1e9))
        image = root / "train/a/003.jpg"
        size = len(image.read_bytes())
        assert len(open_source("folder", root)) == 40
        image.write_bytes(image.read_bytes() + b"more")
        wanted = (
            f"{image} has {size + 4:,} bytes, the index says {size:,}; if it was replaced, touch its folder and "
            "convert again"
        )
        assert failure(capsys, f"data.root={root}", "to=memmap", "out=set", "split=train") == wanted
        image.parent.touch()
        assert run(f"data.root={root}", "to=memmap", "out=set", "split=train") == 0


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough for a kill in the middle."""
    return make_photos(tmp_path_factory.mktemp("many"), train=1100, val=300)


def damaged_within(jpeg: bytes) -> bytes:
    """Its header and its end are in order, its pixels aren't."""
    return jpeg[:-150] + b"\xff\x02" + jpeg[-148:]


@pytest.mark.slow
def test_killed_interrupted_and_two_at_once(many, here, capsys):
    words = (f"data.root={many}", "to=memmap", "max_side=24")
    assert run(*words, "out=wanted") == 0
    for signum, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        with start("convert", *words, "out=set", cwd=here) as process:
            while not (here / ".set.partial/train.images").exists():
                assert process.poll() is None
                time.sleep(0.001)
            said = failure(capsys, *words, "out=set")
            process.send_signal(signum)
            _, err = process.communicate()
        assert said.startswith(f"out: another process is writing {here}/set, it holds {here}/.set.partial; wait for")
        assert (process.returncode, err) == (code, "effloop: interrupted\n" * (code == 130))
        assert not (here / "set").exists()
        assert (here / ".set.partial").exists() == (code == -9)
    assert run(*words, "out=set") == 0
    assert (here / "set").read_bytes() == (here / "wanted").read_bytes()
    assert sorted(path.name for path in here.iterdir()) == ["set", "wanted"]


class Filling(FolderSource):
    """A folder, and somebody who fills up the disk while its sample `at` is read."""

    disk: Path
    at: int

    def read(self, index: int) -> bytes | bytearray | memoryview:
        if index == self.at and not (self.disk / "filler").exists():
            with open(self.disk / "filler", "wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError:
                    pass
        return super().read(index)


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4.31 MB in 400 images: more than what any writer keeps in memory."""
    folder = tmp_path_factory.mktemp("noise") / "train" / "a"
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (64, 56, 3), dtype=np.uint8)
    for number in range(400):
        (folder / f"{number:03}.ppm").write_bytes(encode(np.roll(pixels, number, 0), "PPM"))
    return folder.parents[1]


class TestFullDisk:
    @pytest.fixture
    def disk(self, tmp_path: Path) -> Iterator[Path]:
        """A disk of 24 MB."""
        disk = tmp_path / "disk"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)]
        try:
            done = subprocess.run(mount, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("no mount command")
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        with ExitStack() as stack:
            stack.callback(subprocess.run, ["umount", "-l", str(disk)], check=True)
            yield disk

    def convert(self, noise: Path, disk: Path, to: str, quality: int | None, at: int) -> str:
        source = Filling(FolderConfig(name="folder", root=str(noise)), "train")
        source.disk, source.at = disk, at
        options = ConvertOptions(to, disk / "set", quality=quality, split=("train",))
        with pytest.raises(ConfigError) as caught:
            convert(options, {"train": source}, DECODER, 2)
        assert [path.name for path in disk.iterdir()] == ["filler"]
        return str(caught.value)

    @pytest.mark.parametrize("to", ["folder", "lmdb", "memmap"])  # test_damage.py has every one
    def test_while_originals_are_written(self, to, noise, disk):
        said = self.convert(noise, disk, to, None, at=50)
        wanted = "4.3 MB of images are needed, and what the format adds; make room or set out=PATH"
        assert said == f"out: the disk of {disk} is full; {wanted}"

    def test_while_images_are_re_encoded(self, noise, disk):
        said = self.convert(noise, disk, "memmap", 100, at=201)
        assert said.startswith(f"out: the disk of {disk} is full; ")

    @pytest.mark.parametrize("words", [[], ["payload=raw"]])
    def test_known_before(self, words, noise, disk, capsys):
        (disk / "filler").write_bytes(bytes(21 << 20))
        options = (f"data.root={noise}", "to=memmap", "split=train", *words)
        said = failure(capsys, *options, f"out={disk}/set")
        assert "free; make room or set out=PATH" in said
        assert said.startswith(f"out: {disk}/set{' with its temporary files' * bool(words)} needs ")
        assert [path.name for path in disk.iterdir()] == ["filler"]
