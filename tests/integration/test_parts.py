"""`convert`, `verify` and `index` in parts: what comes of them, and what is said when they don't fit together."""

import itertools
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from images import encode, photo
from masked import make_masks
from runs import make_photos, start

from effloop.cli.main import main
from effloop.data.source.entropy import EntropyFile, index_path
from effloop.data.source.folder import FolderConfig, FolderSource

NIGHTLY = [pytest.param(to, marks=pytest.mark.nightly) for to in ("parquet", "tfrecord")]
ORIGINAL, SMALL = (), ("max_side=20", "color=rgb")


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def convert(root: Path, out: str, *words: str) -> int:
    return main(["convert", f"data.root={root}", f"out={out}", *words])


def write_parts(root: Path, out: str, of: int, *words: str) -> None:
    for number in random.Random(of).sample(range(1, of + 1), of):
        assert convert(root, out, f"part={number}/{of}", *words) == 0


@pytest.fixture(scope="module")
def awkward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs of which some have one name but for the ending, some an index, and one can't be decoded."""
    root = make_photos(tmp_path_factory.mktemp("awkward"), 23, 5, classes=2)
    for number in (0, 4, 20):
        (root / f"train/a/{number:03}.png").write_bytes(encode(photo(9, 8, number), "PNG"))
    (root / "train/b/x y.jpg").write_bytes(encode(photo(150, 160), "JPEG"))
    (root / "train/a/020.jpg").write_bytes(encode(photo(), "JPEG")[:-40])
    return root


@pytest.mark.parametrize(
    ("to", "shards", "words"),
    [
        ("tar", "shards=7", ("skip_bad=true",)),
        pytest.param("parquet", "shards=3", ("skip_bad=true", *SMALL), marks=pytest.mark.slow),
        pytest.param("tfrecord", "shards=4", ("skip_bad=true", "shuffle=true"), marks=pytest.mark.slow),
        pytest.param("tar", "shards=6", ("skip_bad=true", "shuffle=true", *SMALL), marks=pytest.mark.nightly),
        pytest.param("parquet", "shards=7", ("skip_bad=true", "split=train"), marks=pytest.mark.nightly),
        pytest.param("tfrecord", "shards=8", ("skip_bad=true", *SMALL), marks=pytest.mark.nightly),
    ],
)
def test_parts_are_what_one_process_writes(to, shards, words, awkward, here, capsys):
    assert convert(awkward, "whole", f"to={to}", shards, *words) == 0
    write_parts(awkward, "set", 3, f"to={to}", shards, *words)
    assert convert(awkward, "set", f"to={to}", shards, "part=2/3", *words) == 0  # a job that is started again
    assert f"{here}/set.parts/2-of-3 is there already" in capsys.readouterr().out
    assert main(["convert", f"to={to}", "out=set", "merge=true", *words]) == 0  # without the data
    assert files_of(here / "set") == files_of(here / "whole")
    assert sorted(path.name for path in here.iterdir()) == ["set", "whole"]
    assert main(["verify", "data.root=set", *(word for word in words if "split" in word)]) == 0


@pytest.mark.parametrize("to", [pytest.param("tar", marks=pytest.mark.slow), *NIGHTLY])
def test_masks(to, here):
    make_masks(here / "masks", {"train": 9, "val": 2})
    words = ("data=masks", f"to={to}", "max_side=24")
    assert convert(here / "masks", "whole", "shards=4", *words) == 0
    write_parts(here / "masks", "set", 2, "shards=4", *words)
    assert convert(here / "masks", "set", "merge=true", *words) == 0
    assert files_of(here / "set") == files_of(here / "whole")


@pytest.fixture(scope="module")
def parts(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three parts; not to be changed."""
    folder = tmp_path_factory.mktemp("parts")
    write_parts(photos, str(folder / "set"), 3, "to=tar")
    return folder


def cut(parts: Path) -> None:
    with open(parts / "2-of-3/train-000001.tar", "r+b") as file:
        file.truncate(700)


def damage(parts: Path) -> None:
    for name in ("2-of-3/train.index", "3-of-3/val-000002.tar"):
        whole = bytearray((parts / name).read_bytes())
        whole[len(whole) // 2] ^= 1
        (parts / name).write_bytes(whole)


def mix(old: str, new: str) -> Callable[[Path], None]:
    def change(parts: Path) -> None:
        text = (parts / "3-of-3/part.json").read_text()
        assert old in text
        (parts / "3-of-3/part.json").write_text(text.replace(old, new))

    return change


AGAIN = "; remove what is there of it and give the same command with "
REFUSED: list[tuple[Callable[[Path], object], tuple[str, ...], str]] = [
    (lambda at: shutil.rmtree(at / "2-of-3"), (), f"{{at}}/2-of-3 is missing{AGAIN}part=2/3"),
    (
        lambda at: shutil.copytree(at / "1-of-3", at / "again"),
        (),
        "{at} has again, which is none of its 3 parts, or one twice; remove it",
    ),
    (
        lambda at: (at / "1-of-3/part.json").write_text((at / "2-of-3/part.json").read_text()),
        (),
        "{at} has 1-of-3, which is none of its 3 parts, or one twice; remove it",
    ),
    (mix("3/3", "2/4"), (), "{at} has 3-of-3, which is none of its 3 parts, or one twice; remove it"),
    (
        mix('"payload": null', '"payload": "raw"'),
        (),
        f"{{at}}/3-of-3 has payload=raw, should be None as in others{AGAIN}part=3/3",
    ),
    (
        mix('"train.samples": 40', '"train.samples": 41'),
        (),
        f"{{at}}/3-of-3 has train.samples=41, should be 40 as in others{AGAIN}part=3/3",
    ),
    (
        cut,
        (),
        f"{{at}}/2-of-3/train-000001.tar is cut or damaged: it has 700 of 34,304 bytes, or not its checksum{AGAIN}"
        "part=2/3",
    ),
    (
        damage,
        (),
        "{at}/2-of-3/train.index is cut or damaged: it has 1,399 of 1,399 bytes, or not its checksum"
        f"{AGAIN}part=2/3, part=3/3",
    ),
    (lambda at: (at / "1-of-3/classes.txt").unlink(), (), "{at}/1-of-3/classes.txt can't be read: No such file or "),
    (lambda at: None, ("max_side=9",), "{at} has max_side=[], should be [9]; give the options of its parts"),
    (lambda at: None, ("shards=4",), "{at} has shards=3, should be 4; give the options of its parts"),
    (shutil.rmtree, (), "{at} has no parts; give the same command with part=1/N, ..., part=N/N before"),
]


@pytest.mark.parametrize(("change", "words", "wanted"), REFUSED)
def test_parts_that_do_not_fit(change, words, wanted, parts, here, capsys):
    at = shutil.copytree(parts / "set.parts", here / "set.parts")
    change(at)
    before = files_of(here)
    assert main(["convert", "to=tar", "out=set", "merge=true", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"effloop: merge: {wanted.format(at=at)}")
    assert err.count("\n") == 1
    assert files_of(here) == before  # nothing is lost, and nothing left


@pytest.mark.slow
def test_a_part_of_other_data_or_after_the_merge(parts, photos, here, capsys):
    shutil.copytree(parts / "set.parts", here / "set.parts")
    root = shutil.copytree(photos, here / "photos")
    (root / "val/a/000.jpg").unlink()
    assert convert(root, "set", "to=tar", "part=2/3") == 2
    wanted = "with val.samples=13, should be 12; remove it"
    assert capsys.readouterr().err == f"effloop: part: {here}/set.parts/2-of-3 is there already, {wanted}\n"
    (here / "set.parts").rename(here / ".set.merged")  # as a merge leaves it that is killed at its end, before
    assert main(["convert", "to=tar", "out=set", "merge=true"]) == 0
    shutil.copytree(parts / "set.parts", here / ".set.merged")  # and afterwards
    assert main(["convert", "to=tar", "out=set", "merge=true"]) == 0
    assert sorted(path.name for path in here.iterdir()) == ["photos", "set"]
    capsys.readouterr()
    assert convert(photos, "new", "to=tar", "part=41/41") == 2
    wanted = "part: 41/41 has more parts than there are samples in a split; set part=N/40"
    assert capsys.readouterr().err == f"effloop: {wanted}\n"
    for name in ("new.parts", ".new.merged"):  # a job was started again after a merge had been killed
        shutil.copytree(parts / "set.parts", here / name)
    assert convert(photos, "new", "to=tar", "merge=true") == 2
    wanted = f"merge: {here}/new.parts was written while {here}/.new.merged has all parts; remove one of them"
    assert capsys.readouterr().err == f"effloop: {wanted}\n"
    for words in ("part=1/3", "merge=true"):
        assert convert(photos, "set", "to=tar", words) == 2
        assert capsys.readouterr().err.startswith(f"effloop: out: {here}/set is there already, and nothing is ")


@pytest.mark.slow
def test_no_links(parts, here, monkeypatch):
    shutil.copytree(parts / "set.parts", here / "set.parts")
    shutil.copytree(parts / "set.parts", here / "other.parts")
    assert main(["convert", "to=tar", "out=set", "merge=true"]) == 0

    def link(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    assert main(["convert", "to=tar", "out=other", "merge=true"]) == 0
    assert files_of(here / "set") == files_of(here / "other")


@pytest.mark.slow
def test_verify(photos, here, capsys):
    root = shutil.copytree(photos, here / "bad")
    for name in ("train/a/003.jpg", "train/c/005.jpg", "val/c/002.jpg"):
        (root / name).write_bytes((root / name).read_bytes()[:-9])
    (root / "val/d").mkdir()
    (root / "val/d/1.jpg").write_bytes((root / "val/a/000.jpg").read_bytes())

    def found(*words: str) -> tuple[int, list[str]]:
        code = main(["verify", f"data.root={root}", *words])
        lines = capsys.readouterr().out.partition("└")[2].splitlines()[1:]
        return code, [line for line in lines if not line.startswith(("problems: ", "nothing is wrong"))]

    code, wanted = found()
    codes, lines = zip(*(found(f"part={number}/4") for number in range(1, 5)), strict=True)
    assert (code, codes, len(wanted)) == (1, (1, 0, 1, 0), 4)
    assert sorted(itertools.chain(*lines)) == sorted(wanted)


@pytest.mark.slow
def test_index(here, capsys):
    for number in range(7):
        path = here / f"data/train/{'ab'[number % 2]}/{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(photo(200, 180, number), "JPEG"))
    words = ["index", "data.root=data", "split=train"]
    for number in (3, 1, 2):
        assert main([*words, "data.index_dir=parts", f"part={number}/3"]) == 0
    assert main([*words, "data.index_dir=whole"]) == 0
    source, found = FolderSource(FolderConfig(name="folder", root="data"), "train"), []
    for folder in ("parts", "whole"):
        file = EntropyFile(index_path(source, folder))
        found.append([bytes(file.get(source.raw_key(n), source.size(n)) or b"") for n in range(len(source))])
    assert found[0] == found[1]
    assert all(found[0])
    capsys.readouterr()
    assert main([*words, "data.index_dir=parts"]) == 0
    assert "│ train │      7 │       7 │         0 │" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.parametrize("words", [ORIGINAL, SMALL])
@pytest.mark.parametrize("to", ["tar", "parquet", "tfrecord"])
def test_killed(to, words, here):
    """16 parts by 4 processes that are killed at random, then the merge."""
    root = make_photos(here / "photos", 400, 100)
    kills, draw = 30, np.random.default_rng(len(to) + len(words))
    command = ("convert", "data.root=photos", f"to={to}", "num_workers=1", *words)
    began = time.monotonic()
    assert convert(root, "whole", f"to={to}", "shards=16", "num_workers=1", *words) == 0
    whole_s = time.monotonic() - began
    left, running = [*range(1, 17)], dict[int, subprocess.Popen[str]]()
    while left or running:
        while left and len(running) < 4:
            number = left.pop(0)
            running[number] = start(*command, "out=set", f"part={number}/16", cwd=here)
        time.sleep(draw.uniform(0, 1.5 * whole_s / 16 + 0.1))
        number = int(draw.choice([*running]))
        if kills and running[number].poll() is None:
            running[number].send_signal(signal.SIGKILL)
            kills -= 1
        for number in [number for number, process in running.items() if process.poll() is not None]:
            with running.pop(number) as process:
                assert process.wait() in (0, -9), process.communicate()[1]
            if process.returncode:
                left.append(number)
    for fraction in (0.2, 0.5, 0.8, 0.95):
        with start("convert", f"to={to}", "out=set", "merge=true", *words, cwd=here) as process:
            time.sleep(fraction * draw.uniform(0.2, 1.5))
            process.send_signal(signal.SIGKILL)
            process.communicate()
    if not (here / "set").exists() or (here / ".set.merged").exists() or (here / "set.parts").exists():
        assert main(["convert", f"to={to}", "out=set", "merge=true", *words]) == 0
    assert files_of(here / "set") == files_of(here / "whole")
    left_over = {path.name for path in here.iterdir()} - {"set", "whole", "photos", ".set.partial"}
    assert not left_over
