"""The two sides of a knob, ready to be measured: in this process, in two of their own, or as whole runs."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import effloop
from effloop.batch import Batch
from effloop.bench.baselines import Epoch, Work
from effloop.bench.harness import Row, served
from effloop.bench.interleave import take_turns
from effloop.build.race import seconds_of, warm_up
from effloop.build.trainer import build_trainer
from effloop.checkpoint import rng
from effloop.config import Config
from effloop.errors import ConfigError

TURN_S = 0.2
"""Seconds that one side goes on before it is the other's turn, if that is more than one update."""

_GROUPS = 4  # updates' worth of batches that lie in memory; a single one is soon learned by heart
_RUN_S = 600  # longer than any run of the photographs that come along should take


@dataclass(frozen=True)
class Found:
    """What was measured of a knob's two sides, `off` and `on`.

    Attributes:
        images_per_s: of each side, in each of its turns.
        bytes: memory of each side, by what `memory` says; empty where that isn't known.
        memory: what is counted.
        remark: for people.
    """

    images_per_s: dict[str, list[float]]
    bytes: dict[str, float]
    memory: str = ""
    remark: str = ""


class Side:
    """A trainer whose updates are on batches that lie in memory.

    Raises:
        ConfigError, DataError: the config can't be built here.
    """

    def __init__(self, config: Config, place: Path) -> None:
        self.trainer = build_trainer(config, run_dir=Path(tempfile.mkdtemp(dir=place)) / "run")
        with closing(self.trainer.train), closing(self.trainer.val):
            count = _GROUPS * config.accumulate
            batches = list(itertools.islice(self.trainer.train.epoch(0), count))
        whole = len(batches) - len(batches) % config.accumulate
        self.groups: list[list[Batch]] = [
            batches[first : first + config.accumulate] for first in range(0, whole, config.accumulate)
        ]
        self.images = sum(map(len, self.groups[0]))
        self._turn = itertools.cycle(self.groups)
        self._flags = flags()
        self.trainer.model.train()
        warm_up(self.update)
        self._calls = max(1, int(TURN_S / seconds_of(self.update)))

    def update(self) -> None:
        """One update, of the next batches."""
        group = next(self._turn)
        for number, batch in enumerate(group, start=1):
            self.trainer.forward_backward(batch, sync=number == len(group))
        self.trainer.update()

    def turn(self) -> float:
        """Images/s of some updates, with the process's switches as this side's config wants them."""
        set_flags(self._flags)
        return self.images * self._calls / seconds_of(self.update, self._calls)

    def bytes(self) -> int:
        """Memory that an update takes beside weights and optimizer, as `memory_counted` says."""
        set_flags(self._flags)
        device = self.trainer.parallel.device
        if device.type != "cuda":
            return self._kept()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        self.update()
        return torch.cuda.max_memory_allocated(device) - before

    def _kept(self) -> int:
        """Bytes of the tensors that lie between forward and backward, weights left out."""
        model = self.trainer.model
        own = {_storage(each) for each in itertools.chain(model.parameters(), model.buffers())}
        kept: set[tuple[int, int]] = set()

        def note(tensor: Tensor) -> Tensor:
            kept.add(_storage(tensor))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            self.trainer.forward_backward(self.groups[0][0], sync=True)
        self.trainer.optimizer.zero_grad()
        return sum(size for _, size in kept - own)


def _storage(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor's memory is, and how much."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def memory_counted(device: torch.device) -> str:
    """What `Side.bytes` counts."""
    return "an update's peak on the GPU" if device.type == "cuda" else "kept from forward to backward"


Flags = dict[str, Any]
"""Switch of the whole process -> its value."""

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def flags() -> Flags:
    """What building a trainer may change for the whole process."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "matmul": torch.get_float32_matmul_precision(),
        _WORKSPACE: os.environ.get(_WORKSPACE),
    }


def set_flags(values: Flags) -> None:
    """Put back what `flags` gave."""
    torch.use_deterministic_algorithms(values["deterministic"], warn_only=values["warn_only"])
    torch.backends.cudnn.deterministic = values["cudnn.deterministic"]
    torch.backends.cudnn.benchmark = values["cudnn.benchmark"]
    torch.backends.cudnn.allow_tf32 = values["cudnn.allow_tf32"]
    torch.set_float32_matmul_precision(values["matmul"])
    if values[_WORKSPACE] is None:
        os.environ.pop(_WORKSPACE, None)
    else:
        os.environ[_WORKSPACE] = values[_WORKSPACE]


@contextmanager
def process_kept() -> Iterator[None]:
    """The process's switches and random generators are afterwards as they were, and nothing compiled is left."""
    before, generators = flags(), rng.capture()
    try:
        yield
    finally:
        set_flags(before)
        rng.restore(generators)
        if "torch._dynamo" in sys.modules:  # else nothing was compiled, and the import alone takes 2 s
            torch.compiler.reset()


Sides = Mapping[str, Config]
"""`off` and `on`."""


def in_turns(configs: Sides, repeats: int, place: Path) -> Found:
    """Both sides in this process, where they share everything but their model and optimizer."""
    sides = {name: Side(config, place) for name, config in configs.items()}
    speed = take_turns({name: side.turn for name, side in sides.items()}, repeats, warm_up=0)
    memory = {name: float(side.bytes()) for name, side in sides.items()}
    on = sides["on"].trainer
    remark = "; ".join(note for note in on.notes if note.startswith("compile "))
    return Found(speed, memory, memory_counted(on.parallel.device), " ".join(remark.split()))


def apart(configs: Sides, repeats: int, place: Path) -> Found:
    """Each side in a process of its own, for what a process can't take back."""
    with ExitStack() as stack:
        runs: dict[str, Row] = {
            name: stack.enter_context(served(name, _child, Work(config, place, place)))
            for name, config in configs.items()
        }
        turns = take_turns(runs, repeats)
    return Found(
        {name: [turn["per_s"] for turn in found] for name, found in turns.items()},
        {name: statistics.median(turn["bytes"] for turn in found) for name, found in turns.items()},
        "of two processes: held by each",
        "two processes, in turns",
    )


def _child(work: Work) -> Epoch:
    side = Side(work.config, work.scratch)

    def epoch() -> tuple[int, float]:
        calls = max(1, int(TURN_S / seconds_of(side.update)))
        seconds_of(side.update, calls)  # waits for a GPU
        return side.images * (calls + 1), 0.0

    return epoch


def as_runs(words: Mapping[str, Sequence[str]], repeats: int, place: Path) -> Found:
    """Whole runs by the command line, whose images/s are those of their summary: loading is part of it."""

    def run(overrides: Sequence[str]) -> float:
        folder = Path(tempfile.mkdtemp(dir=place)) / "run"
        return _run([*overrides, f"hydra.run.dir='{folder}'"], folder)

    runs: dict[str, Callable[[], float]] = {name: lambda own=own: run(own) for name, own in words.items()}  # type: ignore[misc]
    return Found(take_turns(runs, repeats, warm_up=0), {}, remark="whole runs, loading included")


def _run(overrides: Sequence[str], folder: Path) -> float:
    """Images/s of one training.

    Raises:
        ConfigError: it failed; what it said last.
    """
    paths = [str(Path(effloop.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "effloop", "train", *overrides]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_RUN_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"a run took more than {_RUN_S} s") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise ConfigError(said[-1].removeprefix("effloop: "))
    return float(json.loads((folder / "summary.json").read_text())["images_per_s"])
