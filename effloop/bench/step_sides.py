"""The two sides of a knob, measured in this process, in a process each, or as whole runs."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import effloop
from effloop.assemble.race import seconds_of, warm_up
from effloop.assemble.trainer import build_trainer
from effloop.batch import Batch
from effloop.bench.baselines import EpochRunner, Workload
from effloop.bench.harness import epoch_process
from effloop.bench.interleave import interleave
from effloop.checkpoint import rng
from effloop.config import Config
from effloop.errors import ConfigError
from effloop.system.saved import SavedForBackward

TURN_S = 0.2
"""Seconds of updates in one turn; one update if that takes longer."""

_NUM_UPDATES = 4  # different ones in memory: a single one is soon overfitted
_RUN_TIMEOUT_S = 600  # longer than any run on the embedded photographs should take


@dataclass(frozen=True)
class SideResults:
    """What was measured of a knob's two sides, `off` and `on`.

    Attributes:
        images_per_s: of each side, in each of its turns.
        bytes: memory of each side, as `memory` says; empty where that isn't known.
        memory: what is counted.
        remark: for the table.
    """

    images_per_s: dict[str, list[float]]
    bytes: dict[str, float]
    memory: str = ""
    remark: str = ""


class Side:
    """A trainer whose updates are on batches in memory.

    Raises:
        ConfigError, DataError: the config can't be built here.
    """

    def __init__(self, config: Config, scratch: Path) -> None:
        self.trainer = build_trainer(config, run_dir=Path(tempfile.mkdtemp(dir=scratch)) / "run")
        with closing(self.trainer.train), closing(self.trainer.val):
            count = _NUM_UPDATES * config.accumulate
            batches = list(itertools.islice(self.trainer.train.epoch(0), count))
        whole = len(batches) - len(batches) % config.accumulate
        self.groups: list[list[Batch]] = [
            batches[first : first + config.accumulate] for first in range(0, whole, config.accumulate)
        ]
        self.images = sum(map(len, self.groups[0]))
        self._next_groups = itertools.cycle(self.groups)
        self._flags = process_flags()
        self.trainer.model.train()
        warm_up(self.update)
        self._updates_per_turn = max(1, int(TURN_S / seconds_of(self.update)))

    def update(self) -> None:
        """One update, of the next batches."""
        group = next(self._next_groups)
        for number, batch in enumerate(group, start=1):
            self.trainer.forward_backward(batch, sync=number == len(group))
        self.trainer.update()

    def images_per_s(self) -> float:
        """Measure one turn, with the process's flags as this side's config sets them."""
        set_process_flags(self._flags)
        return self.images * self._updates_per_turn / seconds_of(self.update, self._updates_per_turn)

    def bytes(self) -> int:
        """Memory of an update beside weights and optimizer, as `memory_counted` says."""
        set_process_flags(self._flags)
        device = self.trainer.parallel.device
        if device.type != "cuda":
            return self._saved_for_backward()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        self.update()
        return torch.cuda.max_memory_allocated(device) - before

    def _saved_for_backward(self) -> int:
        """Bytes of the tensors that autograd saves in the forward pass, without weights."""
        model = self.trainer.model
        with SavedForBackward(itertools.chain(model.parameters(), model.buffers())) as saved:
            self.trainer.forward_backward(self.groups[0][0], sync=True)
        self.trainer.optimizer.zero_grad()
        return saved.bytes


def memory_counted(device: torch.device) -> str:
    """What `Side.bytes` counts."""
    return "an update's peak on the GPU" if device.type == "cuda" else "kept from forward to backward"


Flags = dict[str, Any]
"""Flags of the whole process by name."""

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def process_flags() -> Flags:
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


def set_process_flags(values: Flags) -> None:
    """Restore what `process_flags` returned."""
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
def process_state_restored() -> Iterator[None]:
    """Restore the process's flags and random generators afterwards, and drop what was compiled."""
    before, generators = process_flags(), rng.capture()
    try:
        yield
    finally:
        set_process_flags(before)
        rng.restore(generators)
        if "torch._dynamo" in sys.modules:  # else nothing was compiled, and the import alone takes 2 s
            torch.compiler.reset()


Sides = Mapping[str, Config]
"""`off` and `on`."""


def measure_interleaved(configs: Sides, repeats: int, scratch: Path) -> SideResults:
    """Both sides in this process, where they share everything but their model and optimizer."""
    sides = {name: Side(config, scratch) for name, config in configs.items()}
    speed = interleave({name: side.images_per_s for name, side in sides.items()}, repeats, warm_up=0)
    memory = {name: float(side.bytes()) for name, side in sides.items()}
    on = sides["on"].trainer
    remark = "; ".join(note for note in on.notes if note.startswith("compile "))
    return SideResults(speed, memory, memory_counted(on.parallel.device), " ".join(remark.split()))


def measure_in_processes(configs: Sides, repeats: int, scratch: Path) -> SideResults:
    """Each side in a process of its own, for what can't be undone in a process."""
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(epoch_process(name, _build_turn, Workload(config, scratch, scratch)))
            for name, config in configs.items()
        }
        rounds = interleave(runs, repeats)
    return SideResults(
        {name: [each["per_s"] for each in found] for name, found in rounds.items()},
        {name: statistics.median(each["bytes"] for each in found) for name, found in rounds.items()},
        "of two processes: held by each",
        "two processes, in turns",
    )


def _build_turn(workload: Workload) -> EpochRunner:
    side = Side(workload.config, workload.scratch)

    def turn() -> tuple[int, float]:
        calls = max(1, int(TURN_S / seconds_of(side.update)))
        seconds_of(side.update, calls)  # waits for a GPU
        return side.images * (calls + 1), 0.0

    return turn


def measure_runs(overrides: Mapping[str, Sequence[str]], repeats: int, scratch: Path) -> SideResults:
    """Each side as whole runs from the command line; images/s are those of their summaries, loading included."""

    def run(own: Sequence[str]) -> float:
        folder = Path(tempfile.mkdtemp(dir=scratch)) / "run"
        return _run([*own, f"out='{folder.parent}'", f"run={folder.name}"], folder)

    runs = {name: partial(run, own) for name, own in overrides.items()}
    return SideResults(interleave(runs, repeats, warm_up=0), {}, remark="whole runs, loading included")


def _run(overrides: Sequence[str], folder: Path) -> float:
    """Images/s of one training.

    Raises:
        ConfigError: it failed; the message is its last line.
    """
    paths = [str(Path(effloop.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "effloop", "train", *overrides]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_RUN_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"a run took more than {_RUN_TIMEOUT_S} s") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise ConfigError(said[-1].removeprefix("effloop: "))
    return float(json.loads((folder / "summary.json").read_text())["images_per_s"])
