"""Tiny datasets and runs for tests."""

import copy
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from forks import Forked
from images import encode, photo

import effloop
from effloop.cli.main import main
from effloop.config import Config
from effloop.train.trainer import Trainer

TINY = ("image_size=16", "epochs=2", "batch_size=8", "model.width=4", "num_workers=0", "record.log_every=2")


def make_photos(root: Path, train: int = 40, val: int = 13, classes: int = 3) -> Path:
    """ROOT/{train,val}/{a,b,c}/000.jpg, about 30 pixels wide; a class is bright in a colour of its own."""
    for split, count in (("train", train), ("val", val)):
        for number in range(count):
            label = number % classes
            pixels = photo(28 + number % 5, 30 + number % 3, seed=number)
            pixels[:, :, label % 3] = 255 - pixels[:, :, label % 3] // 4
            path = root / split / "abcdefgh"[label] / f"{number:03}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode(pixels, "JPEG", comment="" if split == "train" else split))  # none is in both
    return root


def train(photos: Path, *overrides: str) -> int:
    """Train a tiny run in this process, without TensorBoard's files unless asked for; returns the exit code."""
    shown = any(word.startswith("record=") or word == "record.tensorboard=true" for word in overrides)
    quiet = [] if shown else ["record.tensorboard=false"]
    return main(once("train", f"data.root={photos}", *TINY, *quiet, *overrides))


def composed(*overrides: str) -> Config:
    """As `effloop.compose`, which takes 0.1 s, but once for the same overrides; each test gets a config of its own."""
    return copy.deepcopy(_composed(*overrides))


@functools.cache
def _composed(*overrides: str) -> Config:
    return effloop.compose(overrides)


@contextmanager
def stopping_at(epoch: int) -> Iterator[None]:
    """Runs in this process are interrupted where this epoch begins, counted from 0."""
    train_epoch = Trainer.train_epoch

    def until(trainer: Trainer, batches: Any) -> None:
        if trainer.progress.epoch == epoch:
            raise KeyboardInterrupt
        train_epoch(trainer, batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_epoch", until)
        yield


def once(*words: str) -> list[str]:
    """Words for the command line, of several `KEY=VALUE` with a key only the last: two would contradict each other."""
    last = {word.partition("=")[0]: number for number, word in enumerate(words)}
    return [word for number, word in enumerate(words) if "=" not in word or last[word.partition("=")[0]] == number]


def start(*args: str, cwd: Path, path: Path | None = None, forked: bool = True) -> subprocess.Popen[str]:
    """`effloop ARGS` in a process and a group of its own; `path` is put on its import path.

    It is forked from a process that has imported torch, unless the test is about what happens before.
    """
    places = [str(path)] * (path is not None) + [str(Path(effloop.__file__).parents[1])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    options: Any = {"cwd": cwd, "env": env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    if forked:
        return Forked(["effloop", *once(*args)], **options)
    return subprocess.Popen([sys.executable, "-m", "effloop", *once(*args)], start_new_session=True, **options)


def call(*args: str, cwd: Path, path: Path | None = None, forked: bool = True) -> tuple[int, str, str]:
    """`effloop ARGS`: exit code, standard output and standard error."""
    with start(*args, cwd=cwd, path=path, forked=forked) as process:
        out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def rows(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The rows of a JSON lines file in a run folder."""
    return [json.loads(line) for line in (run / name).read_text().splitlines()]
