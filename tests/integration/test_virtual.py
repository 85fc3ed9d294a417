"""`parallel.virtual`: the same weights and rows on any number of ranks, and where it changes at a kill."""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from kills_train import check_same
from masked import make_masks
from ranks import all_gone, started
from runs import TINY, make_photos, once

from effloop.checkpoint import files
from effloop.cli.main import main

COMMON = (*TINY, "batch_size=2", "device=cpu", "run=x", "optim.ema=0.9", "max_grad_norm=1", "parallel.virtual=4")
VIT = "model.args={patch_size: 4, depth: 2, embed_dim: 48, num_heads: 3, proj_drop_rate: 0.1, drop_path_rate: 0.2}"
MODELS = {
    "cnn": (*COMMON, "augment.mixup=0.4", "precision=bf16"),
    "vit": (*(word for word in COMMON if "width" not in word), "model=timm", "model.arch=vit_tiny_patch16_224", VIT),
    "unet": (*(word for word in COMMON if "width" not in word), "model=unet", "image_size=32", "nan=skip"),
}
ROUNDS = int(os.environ.get("EFFLOOP_KILLS", "3"))


def data_for(model: str, folder: Path) -> Path:
    return make_masks(folder, {"train": 48, "val": 6}) if model == "unet" else make_photos(folder, train=96, val=13)


def start(folder: Path, words: Sequence[str], ranks: int) -> tuple[int, str]:
    """Start the run of a folder, or go on with it, on so many ranks, until it ends; exit code and standard error."""
    process = begin(folder, words, ranks)
    _, errors = process.communicate(timeout=300)
    return process.returncode, errors


def begin(folder: Path, words: Sequence[str], ranks: int) -> subprocess.Popen[str]:
    strategy = ["parallel=ddp", f"parallel.processes={ranks}"] if ranks > 1 else ["parallel=none"]
    return started(["effloop", "train", *once(*words, *strategy), "resume=auto", "checkpoint.every_steps=3"], folder)


@pytest.mark.slow
def test_one_two_and_four_ranks(tmp_path, monkeypatch, capsys):
    """And a run that is begun by two, asked to stop, gone on with by four, stopped, and ended by one process."""
    words = [f"data.root={data_for('cnn', tmp_path / 'data')}", *MODELS["cnn"]]
    reference, changing = tmp_path / "one", tmp_path / "changing"
    for folder in (reference, changing):
        folder.mkdir()
    monkeypatch.chdir(reference)
    assert main(["train", *once(*words, "checkpoint.every_steps=3")]) == 0
    for ranks in (2, 4):
        process = begin(changing, words, ranks)
        until(changing, step_of(changing) + 3, process)
        process.terminate()
        _, errors = process.communicate(timeout=60)
        assert process.returncode in (75, 0), errors
    monkeypatch.chdir(changing)
    assert main(["resume", "outputs/x", "parallel=none"]) == 2  # the group's defaults
    assert "parallel.virtual: the checkpoint was trained with 4, not null; keep" in capsys.readouterr().err
    assert main(["resume", "outputs/x", "parallel=none", "parallel.virtual=4"]) == 0
    check_same(changing, reference, but=["rng"])
    assert "other sums" not in (changing / "outputs/x/log.txt").read_text()


def step_of(folder: Path) -> int:
    last = folder / "outputs/x/checkpoints/last.ckpt"
    return int(files.position(last)["step"]) if last.is_file() else 0


def until(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    while process.poll() is None and step_of(folder) < step:
        time.sleep(0.01)


@pytest.mark.nightly
@pytest.mark.parametrize("model", MODELS)
def test_kills(model, tmp_path):
    """The number of ranks changes at random kills; EFFLOOP_KILLS is the number of runs."""
    words = [f"data.root={data_for(model, tmp_path / 'data')}", *MODELS[model]]
    rng, references = random.Random(model), []
    for ranks in (1, 2, 4):
        references.append(tmp_path / f"reference-{ranks}")
        references[-1].mkdir()
        assert start(references[-1], words, ranks) == (0, "")
        check_same(references[-1], references[0], but=["rng"])
    for number in range(ROUNDS):
        folder, path = tmp_path / f"run-{number}", list[str]()
        folder.mkdir()
        for how in kills(rng):
            ranks = rng.choice([1, 2, 4])
            process = begin(folder, words, ranks)
            if how:
                until(folder, step_of(folder) + 1, process)
                time.sleep(rng.uniform(0, 0.3))
                with suppress(ProcessLookupError):  # it has ended
                    (os.killpg if how == signal.SIGKILL else os.kill)(process.pid, how)
            _, errors = process.communicate(timeout=300)
            path.append(f"{ranks}:{process.returncode}")
            assert process.returncode in (0, 75, -9), errors
            assert all_gone(process.pid)
        check_same(folder, references[0], but=["rng"])
        weights = files.read(folder / "outputs/x/checkpoints/last.ckpt")["model"].values()
        digest = hashlib.sha256(b"".join(each.contiguous().numpy().tobytes() for each in weights)).hexdigest()
        print(model, " ".join(path), digest)
        shutil.rmtree(folder)


def kills(rng: random.Random) -> Iterator[int]:
    """Signals, and 0 for a start that nothing disturbs."""
    yield from (rng.choice([signal.SIGKILL, signal.SIGTERM]) for _ in range(rng.randint(2, 4)))
    yield 0
