"""Checkpoints on disk, and which of them are kept."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import effloop
from effloop.checkpoint import CheckpointConfig, checkpointers, files
from effloop.errors import CheckpointError
from effloop.task import LOSS, Meter

STATE = {"config": {}, "classes": ["a"], "model": {"w": torch.arange(4.0)}, "progress": {}}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.ckpt"
    files.write(path, STATE)
    assert torch.equal(files.read(path)["model"]["w"], STATE["model"]["w"])
    assert os.listdir(path.parent) == ["x.ckpt"]


def test_a_position_is_read_without_tensors(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    state = {**STATE, "model": {"w": torch.ones(5_000_000)}, "progress": {"epoch": 3, "step": 7}}
    files.write(path, state)
    before = _bytes_read()
    assert files.position(path) == {"epoch": 3, "step": 7}
    assert _bytes_read() - before < path.stat().st_size / 20
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)  # inside of the tensor, whose checksum is wrong now
    assert files.position(path) == {"epoch": 3, "step": 7}
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="can't be read"):
        files.position(path)


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


WRITE_TOO_MUCH = """
import resource, signal, sys, torch
from pathlib import Path
from effloop.checkpoint import files
from effloop.errors import CheckpointError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    files.write(Path(sys.argv[1]), {"model": torch.zeros(1_000_000)})
except CheckpointError as error:
    print(error)
"""


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    files.write(path, STATE)
    before = path.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", WRITE_TOO_MUCH, str(path)],
        env={**os.environ, "PYTHONPATH": str(Path(effloop.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{path} could not be written" in done.stdout
    assert done.stdout.count("\n") == 1
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_place_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="could not be written"):
        files.write(tmp_path / "file" / "last.ckpt", STATE)


def test_best_is_a_link_that_survives_the_next_save(tmp_path: Path) -> None:
    checkpointer = checkpointers.build(
        CheckpointConfig(name="last_best"), LOSS, tmp_path, {"config": {}, "classes": ["a"]}
    )
    last, best = (tmp_path / "checkpoints" / name for name in ("last.ckpt", "best.ckpt"))
    checkpointer.save({"model": {"epoch": 0}, "progress": {}}, is_best=True)
    assert last.samefile(best)
    checkpointer.save({"model": {"epoch": 1}, "progress": {}}, is_best=False)
    assert [files.read(path)["model"]["epoch"] for path in (last, best)] == [1, 0]
    checkpointer.save({"model": {"epoch": 2}, "progress": {}}, is_best=True)
    assert files.read(best)["model"]["epoch"] == 2
    assert sorted(os.listdir(checkpointer.folder)) == ["best.ckpt", "last.ckpt"]


@pytest.mark.parametrize(
    ("score", "values", "best"),
    [
        (Meter("top1", "Top@1"), [0.1, 0.3, 0.2, 0.3], [True, True, False, False]),
        (LOSS, [2.0, 1.0, 3.0, 0.5], [True, True, False, True]),
        (LOSS, [math.nan, 1.0, math.nan, 2.0], [True, True, False, False]),
    ],
)
def test_which_epoch_was_the_best(tmp_path: Path, score: Meter, values: list[float], best: list[bool]) -> None:
    checkpointer = checkpointers.build(CheckpointConfig(name="none"), score, tmp_path, {})
    found = [checkpointer.note(epoch, {score.name: value}) for epoch, value in enumerate(values)]
    assert found == best
    assert checkpointer.best["epoch"] == max(epoch for epoch, is_best in enumerate(best) if is_best)
