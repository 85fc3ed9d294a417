"""Checkpoints that are damaged, or made to do harm: refused in one line, and nothing in them runs."""

import functools
import os
import pickle
import random
import re
import shutil
import stat
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from saves import write

from effloop.checkpoint import files
from effloop.errors import CheckpointError, warn

STATE: dict[str, Any] = {
    "config": {"model": {"name": "cnn"}},
    "classes": ["a", "b"],
    "model": {"weight": torch.arange(3000.0), "bias": torch.zeros(2)},
    "progress": {"epoch": 1, "samples_seen": 0, "step": 5},
    "optimizer": {"state": {0: {"momentum_buffer": torch.ones(3000)}}, "param_groups": []},
    "checkpoints": {"best": {"loss": 1.5, "epoch": 0}},
}
POSITION = STATE["progress"]
FLIPS, CUTS = int(os.environ.get("EFFLOOP_FLIPS", "1000")), int(os.environ.get("EFFLOOP_CUTS", "200"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "x.ckpt", STATE)
    return tmp_path / "x.ckpt"


def refused(path: Path, read: Callable[[Path], Any] = files.read) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def flip(path: Path, whole: bytes, place: int, bit: int) -> None:
    changed = bytearray(whole)
    changed[place] ^= 1 << bit
    path.write_bytes(changed)


def damage(path: Path, flips: int, cuts: int) -> None:
    """A flipped bit is found, or it is in what only pads; each truncation is found by reading."""
    whole, rng = path.read_bytes(), random.Random(0)
    for _ in range(flips):
        place, bit = rng.randrange(len(whole)), rng.randrange(8)
        flip(path, whole, place, bit)
        with suppress(CheckpointError):
            found = files.read(path)
            assert found["progress"] == POSITION
            assert torch.equal(found["model"]["weight"], STATE["model"]["weight"])
        with suppress(CheckpointError):
            assert files.position(path) == POSITION, (place, bit)
    for size in rng.sample(range(len(whole)), cuts):
        path.write_bytes(whole[:size])
        assert f"({size} bytes)" in refused(path)
        assert f"({size} bytes)" in refused(path, files.position)


def test_a_flipped_bit_or_a_missing_end(path):
    damage(path, 60, 30)


@pytest.mark.nightly
def test_many_flipped_bits_and_missing_ends(path):
    damage(path, FLIPS, CUTS)


def test_the_crc_of_each_record(path):
    """It is compared, which torch leaves out, in files of any version: of some the zip has a comment."""
    for comment in (b"", b"\nEffLoop sha256 " + b"0" * 64 + b"\n"):
        torch.save({"format": 5, **STATE}, path)
        with zipfile.ZipFile(path, "a") as archive:
            archive.comment = comment
        assert files.position(path) == POSITION
        assert torch.equal(files.read(path)["model"]["weight"], STATE["model"]["weight"])
        whole = path.read_bytes()
        flip(path, whole, whole.index(torch.arange(3000.0).numpy().tobytes()) + 100, 0)
        assert torch.load(path, weights_only=True)  # torch doesn't see it
        assert "Bad CRC-32" in refused(path)


BAD_FIELDS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"progress": {}}, "not whole numbers of epoch, samples_seen, step"),
    ({"progress": {**POSITION, "epoch": float("nan")}}, "not whole numbers"),
    ({"progress": {**POSITION, "step": -1}}, "not whole numbers"),
    ({"progress": {**POSITION, "extra": 1}}, "not whole numbers"),
    ({"progress": {**POSITION, "step": True}}, "not whole numbers"),
    ({"progress": [1]}, "progress is list, not a dict"),
    ({"config": "x"}, "config is 'x', not a dict"),
    ({"config": None}, "config is None, not a dict"),
    ({"classes": 3}, "classes is 3, not a list"),
    ({"classes": [3]}, "classes have 3 among them"),
    ({"model": torch.ones(1)}, "model is Tensor, not a dict"),
    ({"optimizer": 1}, "optimizer is 1, not a dict"),
    ({"checkpoints": {"best": {"loss": "low"}}}, "not numbers"),
    ({"format": "4"}, "format is '4', not a number"),
    ({"format": 7}, "format 7, this EffLoop reads formats up to 6; pip install --upgrade effloop"),
    ({"model": {"w": torch.zeros(1).expand(1 << 40)}}, "more elements than are stored"),
    ({"model": {"w": torch.zeros(3).to_sparse()}}, "more elements than are stored"),
    ({"more": functools.reduce(lambda inner, _: [inner, inner], range(45), [])}, "more values, or more levels"),
    ({"more": functools.reduce(lambda inner, _: [inner], range(70), [])}, "more values, or more levels"),
)


@pytest.mark.filterwarnings("ignore:Validating sparse")
def test_fields_of_another_kind(path, monkeypatch):
    monkeypatch.setattr(files, "_MOST_VALUES", 100_000)  # all of them take seconds
    for fields, words in BAD_FIELDS:
        write(path, {**STATE, **fields})
        for read in (files.read, files.peek):
            assert words in refused(path, read)


def test_a_missing_field(path):
    write(path, {key: value for key, value in STATE.items() if key not in ("progress", "classes")})
    assert "it has no classes and no progress" in refused(path)


# Not even a checkpoint ---------------------------------------------------------------------------


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.place,))


def again(path: Path) -> dict[str, bytes]:
    """The records of a checkpoint, to be written by `rewrite`."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def rewrite(path: Path, records: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in records.items():
            archive.writestr(name, data)


def _pickle_in_zip(path: Path, evil: Evil) -> None:
    torch.save({"format": 3, **STATE, "model": evil}, path)


def _pickle(path: Path, evil: Evil) -> None:
    path.write_bytes(pickle.dumps({"format": 3, **STATE, "model": evil}))


def _legacy(path: Path, evil: Evil) -> None:
    torch.save({"format": 3, **STATE, "model": evil}, path, _use_new_zipfile_serialization=False)


def _script(path: Path, evil: Evil) -> None:
    torch.save({"format": 3, **STATE}, path)
    rewrite(path, {**again(path), "x/constants.pkl": pickle.dumps(evil), "x/code/x.py": b"import os"})


def _bomb(path: Path, evil: Evil) -> None:
    torch.save({"format": 3, **STATE}, path)
    rewrite(path, {**again(path), "x/data/9": bytes(20 << 20)}, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 20


def _big(path: Path, evil: Evil) -> None:
    """A record that says it has 4 GB, in the zip's list."""
    torch.save({"format": 3, **STATE}, path)
    data = bytearray(path.read_bytes())
    place = data.rindex(b"PK\x01\x02")
    data[place + 20 : place + 28] = b"\xf0\xff\xff\xff" * 2
    path.write_bytes(data)


def _other_list(path: Path, evil: Evil) -> None:
    """A second list of records, for who believes the one at the end less than another."""
    torch.save({"format": 3, **STATE}, path)
    path.write_bytes(b"PK\x03\x04" + path.read_bytes())


def _after(path: Path, evil: Evil) -> None:
    path.write_bytes(path.read_bytes() + b"PK\x05\x06" + bytes(18))


EXPLOITS = {
    _pickle_in_zip: "is refused: it holds more than tensors",
    _pickle: "not a checkpoint that EffLoop wrote",
    _legacy: "not a checkpoint that EffLoop wrote",
    _script: "not a checkpoint that EffLoop wrote",
    _bomb: "not stored as torch.save stores them",
    _big: "not stored as torch.save stores them",
    _other_list: "not stored as torch.save stores them",
    _after: "not a checkpoint that EffLoop wrote",
}


@pytest.mark.parametrize("make", EXPLOITS)
def test_exploits(path, tmp_path, make):
    make(path, Evil(tmp_path / "pwned"))
    for read in (files.read, files.peek, files.verify):
        assert EXPLOITS[make] in refused(path, read)
    assert not (tmp_path / "pwned").exists()
    assert not (tmp_path.parent / "escape").exists()


@pytest.mark.parametrize("kind", ["FIFO", "folder", "device", "socket"])
def test_what_is_no_file(tmp_path, kind):
    path = tmp_path / "checkpoints" / "last.ckpt"
    path.parent.mkdir()
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        os.mknod(path, stat.S_IFSOCK)
    assert f"it is a {kind}, not a file" in refused(path)
    assert f"it is a {kind}, not a file" in refused(path, files.peek)
    assert files.find(tmp_path, "last") == path
    if kind != "folder":
        assert files.find(path, "last") == path


# A whole one beside it ---------------------------------------------------------------------------


def a_run(folder: Path) -> Path:
    for name, step in (("last", 12), ("step-00000008", 8), ("step-00000004", 4), ("best", 8)):
        progress = {**POSITION, "step": step}
        write(folder / "checkpoints" / f"{name}.ckpt", {**STATE, "progress": progress})
    return folder


def test_the_newest_whole_one(tmp_path, capsys):
    run = a_run(tmp_path)
    names = [path.name for path in files.checkpoints(run)]
    assert names == ["last.ckpt", "step-00000008.ckpt", "best.ckpt", "step-00000004.ckpt"]
    last, older, best, oldest = files.checkpoints(run)
    assert files.newest_whole(run) == last
    flip(last, last.read_bytes(), last.read_bytes().index(torch.arange(3000.0).numpy().tobytes()), 3)
    assert files.newest_whole(run) == older
    assert f"warning: passed over: {last} can't be read" in capsys.readouterr().err
    line = refused(last)
    assert re.search(r"Bad CRC-32 for file .*; step-00000008.ckpt is whole \(step 8\)", line)
    assert f"name {older} instead" in line
    older.write_bytes(b"")
    assert files.newest_whole(run) == best
    best.unlink()
    os.mkfifo(best)
    assert files.newest_whole(run) == oldest
    shutil.copy(older, oldest)
    with pytest.raises(CheckpointError, match="has no whole checkpoint: last\\.ckpt, "):
        files.newest_whole(run)


def test_one_that_others_can_write(path, capsys):
    files.read(path)
    assert capsys.readouterr().err == ""
    path.chmod(0o666)
    warn.cache_clear()
    files.read(path)
    assert "may be written by every user of this machine; chmod o-w it" in capsys.readouterr().err
    if not os.geteuid():
        os.chown(path, 4711, -1)
        files.read(path)
        assert "belongs to another user (uid 4711)" in capsys.readouterr().err
