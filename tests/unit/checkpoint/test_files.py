"""Checkpoints on disk, and which of them are kept."""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path

import pytest
import torch

from effloop.checkpoint import CheckpointConfig, checkpointers, files
from effloop.errors import CheckpointError
from effloop.task import LOSS, Meter

STATE = {
    "config": {},
    "classes": ["a"],
    "model": {"w": torch.arange(4.0)},
    "progress": {"epoch": 0, "samples_seen": 0, "step": 0},
}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.ckpt"
    files.write(path, STATE)
    assert torch.equal(files.read(path)["model"]["w"], STATE["model"]["w"])
    assert os.listdir(path.parent) == ["x.ckpt"]


def test_a_position_is_read_without_tensors(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    state = {**STATE, "model": {"w": torch.ones(5_000_000)}, "progress": {"epoch": 3, "samples_seen": 0, "step": 7}}
    files.write(path, state)
    before = _bytes_read()
    assert files.position(path) == {"epoch": 3, "samples_seen": 0, "step": 7}
    assert _bytes_read() - before < path.stat().st_size / 20
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)  # inside of the tensor, whose checksum is wrong now
    assert files.position(path) == {"epoch": 3, "samples_seen": 0, "step": 7}
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="can't be read"):
        files.position(path)


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    files.write(path, STATE)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # Python ignores the signal
    try:
        with pytest.raises(
            CheckpointError, match=r"last\.ckpt could not be written: .*File too large.* it needs 3\.8 MiB"
        ):
            files.write(path, {"model": torch.zeros(1_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_place_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="could not be written"):
        files.write(tmp_path / "file" / "last.ckpt", STATE)


@pytest.mark.parametrize(
    ("score", "values", "best"),
    [
        (Meter("top1", "Top@1"), [0.1, 0.3, 0.2, 0.3], [True, True, False, False]),
        (LOSS, [2.0, 1.0, 3.0, 0.5], [True, True, False, True]),
        (LOSS, [math.nan, 1.0, math.nan, 2.0], [True, True, False, False]),
        (LOSS, [math.nan, math.nan], [True, False]),
    ],
)
def test_which_epoch_was_the_best(tmp_path: Path, score: Meter, values: list[float], best: list[bool]) -> None:
    checkpointer = checkpointers.build(CheckpointConfig(name="none"), score, tmp_path, {})
    found = [checkpointer.note(epoch, {score.name: value}) for epoch, value in enumerate(values)]
    assert found == best
    assert checkpointer.best["epoch"] == max(epoch for epoch, is_best in enumerate(best) if is_best)
    assert not checkpointer.doubt()


def test_a_score_that_is_no_number_decides_nothing(tmp_path: Path) -> None:
    checkpointer = checkpointers.build(CheckpointConfig(name="none"), Meter("r2", "R2"), tmp_path, {})
    checkpointer.note(0, {"loss": 1.0, "r2": math.nan, "mae": 2.0})
    assert checkpointer.doubt().endswith("the first epoch counts as the best; set checkpoint.best_by=loss or mae")
