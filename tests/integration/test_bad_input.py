"""The list of bad inputs of the project's fault model, and the very line that the user sees of each.

A row says what is arranged, which command is given and what comes of it: exit code 2, one line on standard error, nothing
on standard output, and no run folder; or, of the few inputs that are taken, a run.
"""
# ruff: noqa: E501  lines as users see them

import io
import json
import os
import pickle
import re
import shutil
import socket
import struct
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import lmdb
import numpy as np
import pytest
import torch
from images import encode, photo, png
from PIL import Image
from ranks import done, environment, free_port, started
from runs import TINY, make_photos, once

from effloop.cli.main import main
from effloop.data.source.formats import lmdb as lmdb_format
from effloop.data.source.formats.lmdb import HEADER_KEY
from effloop.data.source.storage.columns import crc32c
from effloop.data.source.storage.writing import Record
from effloop.errors import PROGRAM, warn
from effloop.system import hardware


@dataclass
class Place:
    """Where a row is arranged.

    Attributes:
        here: the current folder.
        photos: a folder of images, which isn't to be changed.
        finished: a run, which isn't to be changed.
        patch: undone after the row.
    """

    here: Path
    photos: Path
    finished: Path
    patch: pytest.MonkeyPatch

    def data(self) -> Path:
        """Images that may be damaged."""
        return make_photos(self.here / "data", train=24, val=9)

    def victim(self) -> Path:
        """One of them."""
        return self.data() / "train/b/007.jpg"

    def run(self) -> Path:
        """A run that may be damaged."""
        return Path(shutil.copytree(self.finished, self.here / "run"))

    def experiment(self, text: str) -> str:
        """A YAML file of the user's; returns the override that chooses it."""
        file = self.here / "configs/experiment/mine.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(f"# @package _global_\n{text}\n")
        return "experiment=mine"

    def packed(self, name: str) -> Path:
        """The images in another format."""
        out = self.here / f"data.{name}"
        assert main(["convert", f"data.root={self.photos}", f"to={name}", f"out={out}"]) == 0
        return out

    def tar(self, *members: tuple[str, bytes]) -> str:
        """A tar as the training split; returns the override that chooses it."""
        (self.here / "tars").mkdir()
        with tarfile.open(self.here / "tars/train-000000.tar", "w") as file:
            for name, data in members:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))
        return "data=tar data.root=tars"


Arrange = Callable[[Place], str]
JPEG = encode(photo(30, 30), "JPEG")
ROWS: list[tuple[str, Arrange, str]] = []


def row(name: str, line: str) -> Callable[[Arrange], Arrange]:
    """Decorator: a row with its number, and the line; `…` is any text. `taken:` is a run, with a warning or without."""

    def add(arrange: Arrange) -> Arrange:
        ROWS.append((name, arrange, line))
        return arrange

    return add


def typed(name: str, words: str | Arrange, line: str, arrange: Callable[[Place], object] = lambda place: None) -> None:
    """A row of these words, or of those that a function returns, after something small is arranged."""
    ROWS.append((name, lambda place: (arrange(place), words(place) if callable(words) else words)[1], line))


# The config --------------------------------------------------------------------------------------

typed(
    "1 unknown key",
    "optim.momentm=1",
    "'optim.momentm' is not a key of the config; did you mean 'optim.momentum' of optim=sgd?",
)
typed("2 wrong type", "batch_size=abc", "batch_size: 'abc' is not allowed; set a whole number")
typed("2 of two parts", "task=regression task.loss=mae", "task.loss: 'mae' is not allowed; set mse, l1 or huber")
typed("3 missing", "data=folder data.root=???", "data.root is missing; set data.root=VALUE")
typed(
    "6 cycle",
    "lr=${optim.lr} optim.lr=${lr}",
    "optim.lr: its interpolations refer to each other in a circle; set optim.lr=VALUE",
)
typed(
    "7 unset variable", "lr=${oc.env:NOT_SET_HERE}", "lr: Environment variable 'NOT_SET_HERE' not found; set lr=VALUE"
)
typed(
    "8 target",
    "+optim._target_=sympy.sympify",
    "optim._target_: 'sympy.sympify' is not allowed; a config names no code; choose a part by optim=NAME; have adamw, sgd, timm, torch",
)
typed("10 batch size", "batch_size=0", "batch_size: 0 is not allowed; set a whole number above 0, e.g. 1")
typed("11 negative", "lr=-1", "lr: -1.0 is not allowed; set a finite number above 0")
typed("11 nan", "lr=nan", "lr: nan is not allowed; set a finite number above 0")
typed("12 empty sweep", "-m seed=range(0,0)", "seed=range(0,0): an empty sweep, 0 values; give at least one")
typed(
    "12 large sweep", "-m seed=range(0,500) lr=1,2,3", "the sweep has 1,500 jobs, more than 1,000; sweep fewer values"
)
typed("13 choice", "optim=adamm", "optim: no choice 'adamm'; have adamw, sgd, timm, torch, … did you mean 'adam'?")
typed(
    "14 precision",
    "precision=fp16 device=cpu",
    "precision: 'fp16' is not supported on device 'cpu', which supports fp32, bf16, amp; set precision=amp",
)
typed("15 classes", "model.num_classes=7", "model.num_classes: 7, but the data has 3; set model.num_classes=3 or null")
typed("16 climbs out", "run=../x", "run: '../x' is not allowed; set a name without '..'; out=FOLDER sets where it is")
typed("16 absolute", "run=/tmp/x", "run: '/tmp/x' is a path, not a name; set out=/tmp run=x")
typed("57 empty folder", "hydra.run.dir=", "hydra.run.dir: '' is not allowed; set out=FOLDER and run=NAME")
typed(
    "4 duplicate key",
    lambda place: place.experiment("epochs: 2\nepochs: 3"),
    "{here}/configs/experiment/mine.yaml, line 3: found duplicate key epochs",
)
typed(
    "5 unsafe tag",
    lambda place: place.experiment("run: !!python/object/apply:os.mkdir [pwned]"),
    "{here}/configs/experiment/mine.yaml, line 2: could not determine a constructor for the tag 'tag:yaml.org,2002:python/object/apply:os.mkdir'",
)
typed(
    "9 aliased target",
    lambda place: place.experiment("augment: {ops: {a: {_target_: logging.os.system}}}"),
    "augment.ops.a._target_: 'logging.os.system' is not allowed; a config names no code; choose a part by augment=NAME; have albumentations, native, torchvision",
)


# Data --------------------------------------------------------------------------------------------

typed(
    "17 missing root",
    "data.root=nope/there",
    "data.root: 'nope/there' is not there (looked at {here}/nope/there); set data.root=PATH",
)
typed(
    "18 empty root",
    "data.root=data",
    "data.root: 'data' has no folder 'train'; it has no folders at all, where SPLIT/CLASS/ with images should be (looked for .jpg, .png, .webp, .gif, .tif and the like): set data.root=PATH, or data.val=0.2 if it has no splits",
    lambda place: (place.here / "data").mkdir(),
)
typed(
    "19 empty class",
    "data.root=data",
    "{here}/data/train: the class folder 'empty' has no images (looked for .jpg, .png, .webp, .gif, .tif and the like); remove it, fill it, or set data.allow_missing_classes=true",
    lambda place: (place.data() / "train/empty").mkdir(),
)


@row(
    "20 other classes",
    "train and val have different classes ({here}/data/train, {here}/data/val): only in train: c; only in val: d; give both the same classes, or set data.allow_missing_classes=true",
)
def _(place: Place) -> str:
    data = place.data()
    (data / "val/c").rename(data / "val/d")
    return "data.root=data"


typed(
    "21 empty file",
    "data.root=data",
    "{here}/data/train/b/007.jpg is empty (0 bytes); set on_error=skip max_errors=1 to do without it; {program} verify data.root=data checks every sample",
    lambda place: place.victim().write_bytes(b""),
)


@row(
    "22 truncated",
    "{here}/data/train/b/007.jpg is a truncated JPEG: ends after 500 bytes without its end marker; set on_error=skip max_errors=1 to do without it; {program} verify data.root=data checks every sample",
)
def _(place: Place) -> str:
    victim = place.victim()
    victim.write_bytes(victim.read_bytes()[:500])
    return "data.root=data"


typed(
    "23 PNG named .jpg",
    "data.root=data",
    "taken: ",
    lambda place: place.victim().write_bytes(encode(photo(30, 30), "PNG")),
)


@row("24 unusual pixels", "taken: ")
def _(place: Place) -> str:
    folder, pixels = place.victim().parent, photo(30, 30)
    (folder / "cmyk.jpg").write_bytes(encode(pixels, "JPEG", "CMYK"))
    (folder / "palette.png").write_bytes(encode(pixels, "PNG", "P"))
    (folder / "deep.png").write_bytes(encode(pixels[:, :, 0].astype(np.uint16) * 256, "PNG"))
    frames = [Image.fromarray(photo(30, 30, seed=seed)) for seed in (1, 2)]
    frames[0].save(folder / "animated.webp", save_all=True, append_images=frames[1:])
    return "data.root=data"


typed(
    "25 pixel bomb",
    "data.root=data",
    "{here}/data/train/b/007.jpg is too large: 40000 x 50000 (height x width) are 2,000,000,000 pixels; allowed are 178,956,970; if that is intended, set decode.max_pixels=2000000000; set on_error=skip max_errors=1 to do without it; {program} verify data.root=data checks every sample",
    lambda place: place.victim().write_bytes(png(50_000, 40_000, 8, 2, b"\0" * 40_000)),
)


@row("26 bad EXIF", "taken: ")
def _(place: Place) -> str:
    victim = place.victim()
    exif = b"Exif\0\0MM\0*\xff\xff\xff\xff" + b"\xff" * 30
    jpeg = victim.read_bytes()
    victim.write_bytes(jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + jpeg[2:])
    return "data.root=data decode.exif=true"


typed(
    "27 file name",
    "data.root=data",
    "{here}/data/train/b/\\xff\\n\\x1b[31m.jpg is empty (0 bytes); set on_error=skip max_errors=1 to do without it; {program} verify data.root=data checks every sample",
    lambda place: Path(os.fsdecode(os.fsencode(place.data() / "train/b") + b"/\xff\n\x1b[31m.jpg")).touch(),
)
typed(
    "28 link",
    "data.root=data",
    "{here}/data/train/b/loop/b is a symbolic link to a folder above it ({here}/data/train/b); remove the link",
    lambda place: (place.data() / "train/b/loop").symlink_to(".."),
)
typed(
    "29 label",
    lambda place: place.tar(("1.jpg", JPEG), ("1.cls", b"cat")),
    "{here}/tars/train-000000.tar: '1.cls' is b'cat'; a label is a whole number from 0: set data=tar data.label=EXTENSION to the one that holds it, or json.KEY",
)


def changed(folder: Path, change: Callable[[dict[bytes, bytes]], None]) -> str:
    """An LMDB of one split, changed or made; returns the overrides that choose it."""
    (folder / "train").mkdir(exist_ok=True, parents=True)
    for index in folder.glob("*.index"):  # else it is compared with that first
        index.unlink()
    with lmdb.open(str(folder / "train"), map_size=1 << 24) as env, env.begin(write=True) as txn:
        records = {bytes(key): bytes(value) for key, value in txn.cursor()}
        change(records)
        for key, _ in txn.cursor():
            txn.delete(key)
        for key, value in records.items():
            txn.put(key, value)
    return f"data=lmdb data.root={folder}"


typed(
    "30 not ours",
    lambda place: changed(place.here / "data.lmdb", lambda records: records.update({b"a": b"b"})),
    "{here}/data.lmdb/train/data.mdb: the value of 'a' is no pickle of (image, label); write it as one",
)


@row(
    "31 other version", "{here}/data.lmdb/train/data.mdb has format version 99, this EffLoop reads 1; convert it again"
)
def _(place: Place) -> str:
    def later(records: dict[bytes, bytes]) -> None:
        text = records[HEADER_KEY][records[HEADER_KEY].index(b"{") :]
        header = json.dumps({**json.loads(text), "effloop": 99}).encode()
        records[HEADER_KEY] = lmdb_format._value(Record(b"", 0, header), crc32c(header))

    return changed(place.packed("lmdb"), later)


typed(
    "32 count",
    lambda place: changed(
        place.packed("lmdb"), lambda records: records.pop(sorted(records)[len(records) // 2]) and None
    ),
    "{here}/data.lmdb:train is damaged: its header says 40 samples, it holds 39; convert it again",
)


@row(
    "33 pickled records",
    "{here}/data.lmdb/train/data.mdb: the value of '0' holds builtins.complex, which is never run: only numbers, text, bytes, lists, dicts and numpy's arrays are read",
)
def _(place: Place) -> str:
    pickled = {b"__len__": pickle.dumps(1), b"__keys__": pickle.dumps([b"0"]), b"0": pickle.dumps((JPEG, 1j))}
    return changed(place.here / "data.lmdb", lambda records: records.update(pickled))


typed(
    "34 climbs out of a tar",
    lambda place: place.tar(("../../1.jpg", JPEG), ("../../1.cls", b"0")),
    "{here}/tars/train-000000.tar: '../../1.jpg' leads out of the archive; write it again with relative paths",
)
typed(
    "35 no label",
    lambda place: place.tar(("1.jpg", JPEG), ("1.cls", b"0"), ("2.jpg", JPEG)),
    "{here}/tars/train-000000.tar: the sample '2' has no label (looked for .cls); its members must stand together: set data.label=EXTENSION or json.KEY, or write the archive again",
)
typed(
    "35 twice",
    lambda place: place.tar(("1.jpg", JPEG), ("1.cls", b"0"), ("1.jpg", JPEG)),
    "{here}/tars/train-000000.tar: '1.jpg' comes twice; remove one of the two",
)


@row(
    "36 index of another",
    "{here}/data.tar/train-000000.tar is missing (No such file or directory); {here}/data.tar/train.index expects it with … bytes: put it back",
)
def _(place: Place) -> str:
    tar = place.packed("tar")
    shard = next(tar.glob("train*.tar"))
    shard.unlink()
    return f"data=tar data.root={tar}"


# Checkpoints -------------------------------------------------------------------------------------


@row("37 missing", "'run' has no checkpoints/best.ckpt (checkpoints: none); name a run folder or a file")
def _(place: Place) -> str:
    run = place.run()
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    return "eval run"


typed(
    "37 missing, an older one is there",
    "resume run epochs=9",
    "'run' has no checkpoints/last.ckpt (checkpoints: best.ckpt, step-00000010.ckpt); name a run folder or a file; best.ckpt is whole (step 15): name run/checkpoints/best.ckpt instead",
    lambda place: (place.run() / "checkpoints/last.ckpt").unlink(),
)


@row(
    "38 truncated",
    "run/checkpoints/best.ckpt can't be read (… bytes): it is damaged: File is not a zip file; last.ckpt is whole (step 15): name run/checkpoints/last.ckpt instead",
)
def _(place: Place) -> str:
    path = place.run() / "checkpoints/best.ckpt"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[: len(data) // 2])
    return "eval run"


@row(
    "39 flipped byte",
    "run/checkpoints/best.ckpt can't be read (… bytes): it is damaged: Bad CRC-32 for file '…'; last.ckpt is whole (step 15): name run/checkpoints/last.ckpt instead",
)
def _(place: Place) -> str:
    path = place.run() / "checkpoints/best.ckpt"
    data, largest = bytearray(path.read_bytes()), max(ZipFile(path).infolist(), key=lambda each: each.file_size)
    data[largest.header_offset + largest.file_size] ^= 1
    path.unlink()
    path.write_bytes(data)
    return "eval run"


@row("40 pickle", "evil.ckpt is not a checkpoint that EffLoop wrote; name a run folder or its .ckpt file")
def _(place: Place) -> str:
    path = place.here / "evil.ckpt"
    path.write_bytes(pickle.dumps(Evil()))
    return "eval evil.ckpt"


class Evil:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> object:
        return os.mkdir, ("pwned",)


@row(
    "41 newer schema",
    "newer.ckpt has checkpoint format 99, this EffLoop reads formats up to 6; pip install --upgrade effloop",
)
def _(place: Place) -> str:
    path = place.run() / "checkpoints/last.ckpt"
    state = torch.load(path, weights_only=True)
    path.unlink()
    torch.save({**state, "format": 99}, place.here / "newer.ckpt")
    return "eval newer.ckpt"


typed(
    "42 other shapes",
    lambda place: f"resume={place.finished} model.width=8 epochs=9",
    "model: the checkpoint holds width 4, not width 8; keep the model",
)
typed(
    "43 other config",
    lambda place: f"resume={place.finished} optim=sgd epochs=9",
    "optim: the checkpoint was trained with adamw, not sgd; keep optim=adamw, …",
)


@row(
    "44 other data",
    "the data is not what the run was trained on: train: 40 samples, … then, 24 samples, … now; val: 13 samples, … then, 9 samples, … now; put it back, or continue with it in a new run: {program} resume=RUN OVERRIDE ...",
)
def _(place: Place) -> str:
    place.data()
    place.run()
    return "resume run data.root=data epochs=9"


@row(
    "46 writable by all",
    "taken: warning: run/checkpoints/best.ckpt may be written by every user of this machine; chmod o-w it",
)
def _(place: Place) -> str:
    (place.run() / "checkpoints/best.ckpt").chmod(0o666)
    return "eval run"


# The environment ---------------------------------------------------------------------------------


typed(
    "47 unwritable",
    "out=file",
    "run: 'file/…' can't be made in {here}/file: Not a directory; set out=FOLDER",
    lambda place: (place.here / "file").touch(),
)
typed(
    "49 no GPU", "device=cuda:99", "device: 'cuda:99' is not there, this machine shows … CUDA devices; set device=cpu"
)
typed(
    "50 no address",
    "",
    "WORLD_SIZE is 2 in the environment, but RANK, MASTER_ADDR, MASTER_PORT not set; start with torchrun --nproc-per-node N -m effloop ..., or unset WORLD_SIZE",
    lambda place: place.patch.setenv("WORLD_SIZE", "2"),
)


@row(
    "52 local rank",
    "LOCAL_RANK: '7' in the environment; it has to be a whole number from 0 to 1, as torchrun --nproc-per-node N -m effloop ... or srun set it",
)
def _(place: Place) -> str:
    for name, value in {**environment(0, 2, free_port()), "LOCAL_RANK": "7"}.items():
        place.patch.setenv(name, value)
    return ""


@row("53 package", "model=timm needs the package 'timm'; pip install 'effloop[timm]'")
def _(place: Place) -> str:
    place.patch.setitem(sys.modules, "timm", None)
    return f"train data.root={place.photos} model=timm model.arch=resnet18 image_size=32"


@row(
    "55 descriptors",
    "data.root: its 1 files need 257 open files, this process may open 200; raise the limit (ulimit -n 257) or convert to larger shards",
)
def _(place: Place) -> str:
    words = f"data=lmdb data.root={place.packed('lmdb')}"
    place.patch.setattr(hardware.resource, "getrlimit", lambda which: (200, 200))  # a lower one can't be raised again
    return words


@row(
    "48 disk",
    "run: outputs/x: … are needed for the first checkpoint, of …, and 1.0 kB are free; make room there, or set out=FOLDER",
)
def _(place: Place) -> str:
    """What a full tmpfs does is a test of its own."""
    place.patch.setattr(
        "effloop.assemble.trainer.shutil", SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=1000))
    )
    return "run=x"


@row(
    "56 LMDB on NFS",
    "taken: warning: data.root: '{here}/data.lmdb' is on a network file system (nfs4): LMDB doesn't support that, and a lost connection kills whoever reads the mapped file (SIGBUS); copy the dataset to a local disk",
)
def _(place: Place) -> str:
    place.packed("lmdb")
    (place.here / "mounts").write_text(f"31 1 0:41 / {place.here} rw - nfs4 server:/data rw\n")
    place.patch.setattr("effloop.system.hardware.MOUNTS", place.here / "mounts")
    return f"data=lmdb data.root={place.here}/data.lmdb"


@pytest.mark.parametrize(("arrange", "line"), [each[1:] for each in ROWS], ids=[each[0] for each in ROWS])
def test_row(arrange, line, here, photos, finished, monkeypatch, capsys):
    warn.cache_clear()
    words = arrange(Place(here, photos, finished, monkeypatch)).split()
    if not {*words[:1]} & {"eval", "resume", "train"}:
        words = once(f"data.root={photos}", *TINY, "epochs=1", *words)
    before = {*here.rglob("*")}
    capsys.readouterr()
    code = main(words)
    out, err = capsys.readouterr()
    monkeypatch.undo()
    if line.startswith("taken: "):
        assert code == 0, err
        assert_line(err, line.removeprefix("taken: "), here)
    else:
        assert_line(err, line, here)
        assert (code, out) == (2, "")
        assert {*here.rglob("*")} == before


def assert_line(err: str, line: str, here: Path) -> None:
    """Standard error is the line, and nothing else."""
    assert not line or err.count("\n") == 1, err
    text = err.removeprefix("effloop: ").rstrip("\n").replace(str(here), "{here}")
    text = re.sub(rf"(?<!-m ){PROGRAM} (?=verify|resume|convert|eval)", "{program} ", text)
    assert re.fullmatch(".+".join(map(re.escape, line.split("…"))), text), text


@pytest.mark.slow
class TestProcesses:
    """Rows that take processes: ranks, which end by themselves."""

    @pytest.mark.nightly
    def test_45_other_number_of_ranks(self, here, photos):
        words = (f"data.root={photos}", *TINY, "epochs=1", "run=x", "checkpoint.every_steps=3", "checkpoint.keep=2")
        assert main(["train", *once(*words)]) == 0
        step = "outputs/x/checkpoints/step-00000003.ckpt"
        again = ("effloop", "resume", step, "parallel=ddp", "parallel.processes=2", "batch_size=8")
        code, _, err = done(started([*again], here))
        assert code == 2
        line = "batch_size: the checkpoint was trained with 8 on 1 rank, not 8 on 2 ranks; keep batch_size=4 on 2 ranks"
        assert_line(err, line, here)

    def test_51_port_in_use(self, here):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            code, out, err = done(started(["effloop", "seed=1"], here, **environment(0, 2, port)))
        assert (code, out) == (2, "")
        line = f"MASTER_PORT: {port} is in use on …; end the process that listens there (…), or take another port (…)"
        assert_line(err, line, here)

    def test_54_started_differently(self, here):
        port = free_port()
        processes = [started(["effloop", f"seed={rank}"], here, **environment(rank, 2, port)) for rank in (0, 1)]
        ended = [done(process) for process in processes]
        assert [code for code, _, _ in ended] == [2, 2]
        line = "…'seed=0' (rank 0 on …); 'seed=1' (rank 1 on …)…"
        assert_line("".join(err for _, _, err in ended), line, here)


def test_every_row_is_there():
    numbers = {int(name.split()[0]) for name, _, _ in ROWS}
    numbers |= {int(found[1]) for name in vars(TestProcesses) if (found := re.match(r"test_(\d+)", name))}
    assert numbers == {*range(1, 58)}
