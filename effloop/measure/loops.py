"""Training as a side that takes turns: whole loops with their loading, or updates on batches in memory."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from effloop.assemble.environment import batches_of_update, num_workers
from effloop.assemble.model import seconds_of
from effloop.assemble.trainer import build_trainer
from effloop.batch import Batch
from effloop.checkpoint import rng
from effloop.config import Config, with_overrides
from effloop.data.engine import engines
from effloop.data.loader import Loader
from effloop.data.source import Cache
from effloop.measure.turns import Turn, for_seconds
from effloop.precision import set_tf32, tf32_switches
from effloop.system import gpu
from effloop.system.hardware import available_cores
from effloop.system.memory import SavedForBackward
from effloop.train.trainer import BatchStream, Trainer

TURN_S = 1.0  # seconds of one turn of a training loop

_FILLING, _LEAST_UPDATES = 3, 4  # batches before the clock runs, and updates of a turn
_LIMIT = 4  # times a turn's seconds after which it ends, however slowly batches come
_UPDATES_S = 0.2  # of updates on batches in memory in one turn
_WARM_UP_S = 2.0  # of updates before, from which on two of them do


def alone(config: Config, *more: str) -> Config:
    """The config of a run that is measured in this process: nothing but loading, training, logging, evaluation.

    What is `auto` in the step has its default, so that nothing is measured for it, and images aren't checked before;
    `more` are further overrides.
    """
    overrides = ["parallel=none", "checkpoint=none", "schedule=constant", "profile=none", "resume=null", "data.check=0"]
    defaults = {"channels_last": "true", "cudnn_benchmark": "null", "compile": "false"}
    overrides += [f"{key}={value}" for key, value in defaults.items() if getattr(config, key) == "auto"]
    if "progressive=[]" in more and len(config.progressive) == 1:
        overrides.append(f"image_size={config.train_sizes[0].word}")
    if config.global_batch or config.parallel.virtual:
        images, accumulate = batches_of_update(config, 1)
        overrides += ["parallel.virtual=null", "global_batch=null", f"batch_size={images}", f"accumulate={accumulate}"]
    if "record=none" not in more:
        overrides += [f"record.{key}=false" for key in ("console", "mlflow", "wandb") if hasattr(config.record, key)]
    return with_overrides(config, *overrides, *more)


def facts(config: Config) -> dict[str, Any]:
    """What figures depend on, as benchmarks write it to JSON."""
    return {
        "model": getattr(config.model, "arch", config.model.name),
        "batch_size": config.batch_size,
        "image_size": config.image_size,
        "engine": config.engine.name,
        "decode": config.decode.name,
        "num_workers": num_workers(config),
        "cores": available_cores(),
        "torch": torch.__version__,
    }


def trainer_in(scratch: Path, config: Config, **options: Any) -> Trainer:
    """A trainer with a run folder of its own in `scratch`; options as of `build_trainer`."""
    return build_trainer(config, run_dir=Path(tempfile.mkdtemp(dir=scratch)) / "run", **options)


def endless(loader: BatchStream, epochs: Iterable[int]) -> Generator[Batch, None, None]:
    """The batches of these epochs; closing it ends what loads."""
    for epoch in epochs:
        yield from loader.epoch(epoch)


def turn_of(
    train: Callable[[Iterator[Batch]], object],
    batches: Iterable[Batch],
    seconds: float,
    filling: int = _FILLING,
    group: int = 1,
) -> Turn:
    """Images/s of `train` on an endless stream that begins with nothing loaded; in whole groups of batches.

    The clock runs after `filling` batches, which fill the pipeline, for some groups and so many `seconds`. Where
    that would take `_LIMIT` times as long, it ends then, and what came while the pipeline was filled counts, too.
    """
    filling = -(-filling // group) * group
    taken, images, waited = 0, 0, 0.0
    started = began = time.perf_counter()

    def bounded() -> Iterator[Batch]:
        nonlocal taken, images, waited, began
        requested = time.perf_counter()
        for batch in batches:
            waited += time.perf_counter() - requested
            images += len(batch)
            taken += 1
            yield batch
            del batch  # frees its memory for the next one
            if taken == filling and time.perf_counter() - started < seconds * _LIMIT / 2:
                gpu.wait_for_all()
                images, waited, began = 0, 0.0, time.perf_counter()
            requested = time.perf_counter()
            enough = taken >= filling + _LEAST_UPDATES * group and requested - began > seconds
            if taken % group == 0 and (enough or (taken > group and requested - started > seconds * _LIMIT)):
                return

    train(bounded())
    gpu.wait_for_all()
    total = time.perf_counter() - began
    return Turn(images / total, waited / total)


def train_turn(
    trainer: Trainer, batches: Iterable[Batch], seconds: float | None = None, filling: int = _FILLING
) -> Turn:
    """Train for a turn, as `turn_of`. The trainer's recorder has been entered; its model is trained."""
    trainer.progress.samples_seen = 0
    found = turn_of(
        trainer.train_epoch, batches, TURN_S if seconds is None else seconds, filling, trainer.loop.accumulate
    )
    trainer.progress.samples_seen = 0
    return found


def reloaded(loader: Any, config: Config, workers: int, images: int | None = None) -> Loader:
    """The data of a `Loader`, the first `images` of it, loaded by the config's engine."""
    assert isinstance(loader, Loader)  # neither progressive nor a probe
    plan, order = loader.plan, loader.plan.order
    count = min(images or order.num_samples, order.num_samples)
    plan = replace(plan, order=replace(order, num_samples=count))
    engine = engines.build(config.engine, plan, num_workers=workers, device=loader.transfer.device)
    return Loader(plan, engine, loader.transfer)


class Loop:
    """A trainer that trains on what its loader loads, or the first `images` of it, for a turn at a time."""

    def __init__(self, config: Config, scratch: Path, images: int | None = None, **options: Any) -> None:
        self.trainer = trainer_in(scratch, config, **options)
        self._open = ExitStack()
        self._open.enter_context(self.trainer.recorder)
        self._open.callback(self.trainer.val.close)
        self._open.callback(self.trainer.train.close)
        if images:
            self.trainer.train = reloaded(self.trainer.train, config, num_workers(config), images)
            self._open.callback(self.trainer.train.close)
        self._flags = process_flags()
        # The first epoch of each image size, or a new one for each turn.
        stages = len(config.progressive)
        firsts = [number * config.epochs // stages for number in range(stages)]
        self._epochs = itertools.repeat(firsts) if stages else ([epoch] for epoch in itertools.count())
        if config.data.cache is not Cache.none:
            for _ in self.trainer.train.epoch(0):  # fills it
                pass

    @property
    def loader(self) -> Loader:
        """Of the training split."""
        assert isinstance(self.trainer.train, Loader)
        return self.trainer.train

    def turn(self, seconds: float | None = None) -> Turn:
        """Train for a turn in an epoch of its own, or one of each image size, with this side's flags of the process."""
        set_process_flags(self._flags)
        epochs, parts = next(self._epochs), list[Turn]()
        for epoch in epochs:
            with closing(endless(self.trainer.train, itertools.repeat(epoch))) as batches:
                parts.append(train_turn(self.trainer, batches, (seconds or TURN_S) / len(epochs)))
        times = [1 / part.images_per_s for part in parts]  # of an image of each size, of which there are equally many
        waited = sum(time * part.wait for time, part in zip(times, parts, strict=True))
        return Turn(len(parts) / sum(times), waited / sum(times))

    def close(self) -> None:
        """Stop the workers, and what records."""
        self._open.close()


class Updates:
    """A trainer's updates on its first batches, kept in memory: `count` different ones, as one is soon overfitted."""

    def __init__(self, trainer: Trainer, count: int = 4) -> None:
        self.trainer, size = trainer, trainer.loop.accumulate
        batches = [
            replace(batch, images=batch.images.clone(), targets=batch.targets.clone())  # those are used again
            for batch in itertools.islice(trainer.train.epoch(0), count * size)
        ]
        self.groups = [batches[first : first + size] for first in range(0, len(batches) // size * size, size)]
        self.images = sum(map(len, self.groups[0]))
        self._next_groups = itertools.cycle(self.groups)
        self._flags = process_flags()
        trainer.model.train()
        for _ in for_seconds(range(4), _WARM_UP_S, 2):  # compiles, allocates the optimizer's state
            seconds = seconds_of(self.update)
        self._updates_per_turn = max(1, int(_UPDATES_S / seconds))

    @classmethod
    def of(cls, config: Config, scratch: Path) -> Updates:
        """Those of a trainer that is built for it."""
        trainer = trainer_in(scratch, config)
        with closing(trainer.train), closing(trainer.val):
            return cls(trainer)

    def update(self) -> None:
        """One update, of the next batches."""
        group = next(self._next_groups)
        for number, batch in enumerate(group, start=1):
            self.trainer.forward_backward(batch, sync=number == len(group))
        self.trainer.update()

    def turn(self) -> Turn:
        """Train for a turn, with the process's flags as this side's config sets them."""
        set_process_flags(self._flags)
        return Turn(self.images * self._updates_per_turn / seconds_of(self.update, self._updates_per_turn))

    def bytes(self) -> int:
        """Of an update, beside weights and optimizer: its peak on a GPU, else what is kept from forward to backward."""
        set_process_flags(self._flags)
        device = self.trainer.parallel.device
        if device.type == "cuda":
            return gpu.peak_of(self.update, device)
        model = self.trainer.model
        with SavedForBackward(itertools.chain(model.parameters(), model.buffers())) as saved:
            self.trainer.forward_backward(self.groups[0][0], sync=True)
        self.trainer.optimizer.zero_grad()
        return saved.bytes

    def close(self) -> None:
        """There is nothing to stop: the batches are in memory."""


_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def process_flags() -> dict[str, Any]:
    """What building a trainer may change for the whole process."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "tf32": tf32_switches(),
        "threads": torch.get_num_threads(),
        _WORKSPACE: os.environ.get(_WORKSPACE),
    }


def set_process_flags(values: dict[str, Any]) -> None:
    """Restore what `process_flags` returned."""
    torch.use_deterministic_algorithms(values["deterministic"], warn_only=values["warn_only"])
    torch.backends.cudnn.deterministic = values["cudnn.deterministic"]
    torch.backends.cudnn.benchmark = values["cudnn.benchmark"]
    set_tf32(**values["tf32"])
    if torch.get_num_threads() != values["threads"]:
        torch.set_num_threads(values["threads"])
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


def per_s(turns: Sequence[Turn]) -> list[float]:
    """Images/s of turns."""
    return [turn.images_per_s for turn in turns]
