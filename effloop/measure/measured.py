"""Measures a run's parts one by one and together: what all that `diagnose` says comes from."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from effloop import config as configs
from effloop.assemble.loader import build_loader
from effloop.assemble.resolve import num_workers
from effloop.assemble.trainer import build_trainer
from effloop.config import Config
from effloop.data.cache.cached import CachedSource
from effloop.data.loader import Loader
from effloop.errors import ConfigError
from effloop.measure.costs import (
    Cost,
    LoadingCosts,
    LoopCosts,
    OtherPrograms,
    StepCosts,
    StorageCosts,
    evaluation_rate,
    loader_rate,
    loading_costs,
    loop_costs,
    step_costs,
    storage_costs,
    transfer_cost,
)
from effloop.measure.forecast import Forecast, Load
from effloop.measure.loops import alone
from effloop.measure.memory import measured_memory
from effloop.system.hardware import available_cores
from effloop.task import Task
from effloop.train.trainer import Trainer

_SHARES = {"storage": 0.06, "loading": 0.06, "loader": 0.08, "transfer": 0.02, "step": 0.1, "loop": 0.25, "val": 0.06}
"""Of the time that there is; the rest is for overrides."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A run, measured.

    Attributes:
        config: of the run, on one rank, with what was `auto` as it is by default.
        loader: of its training split.
        ranks: of the run, each with a loop of its own; figures are of one.
        cores: that this rank may use.
        samples: of an epoch, on this rank.
        task, device: what is trained, and where.
        val_samples: images of an evaluation.
        storage, step, loop: what was measured of them.
        loader_per_s: images/s of the workers alone.
        evaluation_per_s: images/s of an evaluation; 0 if there is nothing to evaluate.
        load: what is done for each image.
        forecast: calibrated by the loop.
        memory: what it takes, as `Memory.to_plain` has it.
        other_cores: that other programs used meanwhile.
        seconds: for each measurement that overrides need; 0 is none at all: what can be predicted without.
    """

    config: Config
    loader: Loader
    ranks: int
    cores: int
    samples: int
    task: Task
    device: torch.device
    val_samples: int
    storage: StorageCosts
    step: StepCosts
    loop: LoopCosts
    loader_per_s: float
    evaluation_per_s: float
    load: Load
    forecast: Forecast
    memory: Mapping[str, Any]
    other_cores: float
    seconds: float

    def with_overrides(self, *overrides: str) -> Config:
        """The config with overrides.

        Raises:
            ConfigError: one can't be taken.
        """
        return configs.from_dict(configs.to_dict(self.config), overrides, "the config")

    @property
    def epoch_s(self) -> float:
        """Seconds to train on the whole split once."""
        return self.samples / self.loop.images_per_s

    @property
    def evaluation_s(self) -> float:
        """Seconds of evaluation for each epoch, on average."""
        each = self.val_samples / self.evaluation_per_s if self.evaluation_per_s else 0.0
        return each / min(self.config.eval_every, self.config.epochs)

    @property
    def evaluation(self) -> float:
        """Share of the run's time that evaluation takes."""
        return self.evaluation_s / (self.epoch_s + self.evaluation_s)


Progress = Callable[[str], None]
"""Called with what is measured next."""


@contextmanager
def measured(config: Config, seconds: float, progress: Progress = lambda what: None) -> Iterator[Measured]:
    """Measure a run on its own data; inside the block its loaders are there for more.

    Args:
        config: of the run, from `compose`. It is measured in this process alone, without checkpoints, without servers
            that are logged to, and at `image_size` throughout.
        seconds: that the measurements may take, about.
        progress: called with what is measured next.

    Raises:
        ConfigError, DataError: the run can't be built.
    """
    if config.probe:
        raise ConfigError(
            "probe: a probe trains one layer on features in memory; set probe=0 to diagnose the whole model"
        )
    single = alone(config, "progressive=[]")
    folder = Path(tempfile.mkdtemp(prefix="effloop-diagnose-"))
    try:
        progress("data and model")
        trainer = build_trainer(single, run_dir=folder / "run")
        with closing(trainer.train), closing(trainer.val), trainer.recorder:
            with OtherPrograms() as others:
                found = _measure(single, trainer, seconds, progress)
            yield replace(found, other_cores=others.cores)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class _Parts:
    """What was measured of a run's parts, as it was measured: see `Measured`; `transfer_s` is of an image."""

    memory: Mapping[str, Any]
    storage: StorageCosts
    loading: LoadingCosts
    loader_per_s: float
    transfer_s: float
    step: StepCosts
    loop: LoopCosts
    evaluation_per_s: float


def _measure_parts(
    config: Config, trainer: Trainer, loaders: tuple[Loader, Loader], seconds: float, progress: Progress
) -> _Parts:
    loader, spans = loaders[0], {name: share * seconds for name, share in _SHARES.items()}
    progress("memory")
    memory = measured_memory(config, trainer, loaders).to_plain()
    progress("storage")
    storage = storage_costs(loader.plan, spans["storage"])
    progress("decoding, augmentation")
    if isinstance(loader.plan.source, CachedSource):
        loading_costs(loader.plan, spans["loading"])  # fills it
    loading = loading_costs(loader.plan, spans["loading"])
    progress("the loader as a whole")
    alone_per_s = loader_rate(loader, spans["loader"], config.engine.prefetch)
    progress("transfer")
    transfer_s = transfer_cost(loader, spans["transfer"])
    progress("the training step")
    step = step_costs(trainer, spans["step"])
    progress("the training loop")
    loop = loop_costs(trainer, spans["loop"])
    progress("evaluation")
    evaluation_per_s = evaluation_rate(trainer, spans["val"])
    alone_per_s = max(alone_per_s, loop.images_per_s)  # it isn't slower alone
    return _Parts(memory, storage, loading, alone_per_s, transfer_s, step, loop, evaluation_per_s)


def _measure(config: Config, trainer: Trainer, seconds: float, progress: Progress) -> Measured:
    loader, device = trainer.train, trainer.parallel.device
    assert isinstance(loader, Loader)
    assert isinstance(trainer.val, Loader)
    parts = _measure_parts(config, trainer, (loader, trainer.val), seconds, progress)
    if device.type == "cpu":  # there, batches are moved while the loop asks for one
        moved = parts.transfer_s * parts.loop.images_per_s
        parts = replace(parts, loop=replace(parts.loop, wait=max(0.0, parts.loop.wait - moved)))
    load, loop = _load(config, loader, parts, on_cpu=device.type == "cpu"), parts.loop
    usual = load
    if not isinstance(loader.plan.source, CachedSource):  # what most epochs read, which may be from the disk
        reading = max(parts.storage.usual, load.loading.storage, key=lambda cost: cost.wall_s)
        usual = replace(load, loading=replace(load.loading, storage=reading))
    return Measured(
        config=config,
        loader=loader,
        ranks=1,
        cores=available_cores(),
        samples=len(loader) * loader.plan.order.batch_per_rank,
        task=trainer.task,
        device=device,
        val_samples=len(trainer.val.plan.source),
        storage=parts.storage,
        step=parts.step,
        loop=loop,
        loader_per_s=parts.loader_per_s,
        evaluation_per_s=parts.evaluation_per_s,
        load=usual,
        forecast=Forecast.of(load, available_cores(), loop.images_per_s, loop.wait),
        memory=parts.memory,
        other_cores=0.0,
        seconds=(1 - sum(_SHARES.values())) * seconds / _TRIALS,
    )


def _load(config: Config, loader: Loader, parts: _Parts, *, on_cpu: bool) -> Load:
    """What the loop that was measured does for each image."""
    loading, loop, step, workers = parts.loading, parts.loop, parts.step, workers_of(config, loader)
    if not loader.engine.exact:  # it has decoders of its own
        each = Cost(max(1, workers) / parts.loader_per_s)
        loading = replace(loading, decode=each - loading.storage, augment=Cost(), batch=Cost())
    moved = parts.transfer_s * loop.images_per_s * on_cpu
    left_s = max(1e-9, (1 - loop.wait - loop.log - moved) / loop.images_per_s)
    load = Load(
        loading=loading,
        workers=workers,
        serial_s=0.0,
        transfer_s=parts.transfer_s,
        step_s=min(step.whole_s / step.images, left_s),  # it isn't slower alone
        log_s=loop.log / loop.images_per_s,
        step_cores=min(step.cpu_s / step.whole_s, available_cores()) if on_cpu else 0.0,
    )
    return replace(load, serial_s=serial_s(load, loading, parts.loader_per_s))


_TRIALS = 20
"""Measurements that overrides need, about."""

_SERIAL = 1.4
"""Times that workers are slower than their stages, from which on they wait for each other."""


def serial_s(load: Load, loading: LoadingCosts, images_per_s: float) -> float:
    """Seconds between two images where threads wait for each other's Python; 0 where they don't.

    Args:
        load: tells the number of workers.
        loading: of the samples as they are now, in the page cache or not.
        images_per_s: of the workers alone.
    """
    ideal = max(loading.total.wall_s / max(1, load.workers), loading.total.cpu_s / available_cores())
    return 1 / images_per_s if load.workers > 1 and 1 / images_per_s > _SERIAL * ideal else 0.0


def workers_of(config: Config, loader: Loader) -> int:
    """Threads or processes that load; 0 is the training thread itself. `tune` may have found another number."""
    if not config.engine.host_batches("cpu"):
        return 0
    return int(getattr(loader.engine, "num_workers", num_workers(config)))


def rate_of(config: Config, seconds: float) -> float:
    """Images/s of the workers of another config, alone.

    Raises:
        ConfigError, DataError: it can't be built.
    """
    with closing(build_loader(config)) as loader:
        return loader_rate(loader, seconds, config.engine.prefetch)
