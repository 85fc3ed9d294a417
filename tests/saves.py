"""A process that saves a checkpoint once it is told to, `python tests/saves.py RUN STEP`, and what tests ask of it."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from effloop.checkpoint import CheckpointConfig, Checkpoints, checkpointers, files
from effloop.checkpoint.checkpointer import dump
from effloop.errors import CheckpointError
from effloop.system.files import replacing
from effloop.task import LOSS


def checkpoints_of(run: Path, **options: Any) -> Checkpoints:
    """The checkpoints of a run, as training has them."""
    facts = {"config": {}, "classes": ["a"]}
    return checkpointers.build(CheckpointConfig(name="last_best", **options), LOSS, run, facts)


def state(step: int, numbers: int = 5000) -> dict[str, Any]:
    """What a run could save after so many updates; it is the best one."""
    return {
        "model": {"weight": torch.full((numbers,), float(step)), "bias": torch.ones(3) * step},
        "optimizer": {"state": {0: {"momentum_buffer": torch.full((numbers,), 0.5 * step)}}, "param_groups": []},
        "progress": {"epoch": step, "samples_seen": 0, "step": step},
        "checkpoints": {"best": {"loss": 1 / step, "epoch": step - 1}},
    }


def write(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint that holds whatever it may be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, buffering=0) as file:
        dump(state, file)


def check(path: Path) -> int:
    """Look that a checkpoint is whole and of one save; returns the updates that it is of."""
    found = files.read(path)
    step = found["progress"]["step"]
    assert torch.equal(found["model"]["weight"], state(step)["model"]["weight"])
    assert torch.equal(found["optimizer"]["state"][0]["momentum_buffer"], torch.full((5000,), 0.5 * step))
    return int(step)


def main(run: Path, step: int) -> None:
    """Save, and say how that went, by another call than those of a save."""
    with tempfile.TemporaryDirectory() as folder:  # all is imported then
        checkpoints = checkpoints_of(Path(folder))
        checkpoints.save(state(1), is_best=True)
        checkpoints.close()
    checkpoints = checkpoints_of(run, background=False)  # strace counts the calls of each thread
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        checkpoints.save(state(step), is_best=True)
        checkpoints.close()
    except CheckpointError as error:
        os.writev(1, [f"{error}\n".encode()])
    else:
        os.writev(1, [b"saved\n"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
