"""A run's parts, measured one by one and together, and which of them holds it back."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from effloop.assemble.environment import num_workers
from effloop.config import Config
from effloop.data.cache.cached import CachedSource
from effloop.data.loader import Loader
from effloop.errors import ConfigError
from effloop.measure import costs
from effloop.measure.costs import Cost, LoadingCosts, StorageCosts
from effloop.measure.loops import alone, trainer_in
from effloop.measure.memory import expected_memory
from effloop.record.efficiency import Stage, Verdict
from effloop.system.hardware import available_cores
from effloop.train.trainer import Trainer

LOADING = {
    "storage": "reading",
    "decode": "decoding",
    "augment": "augmenting",
    "batch": "putting batches together",
}
"""Stages of loading, and what they do."""

_OVERHEAD = 0.25
"""Share of the time that evaluation or logging may take before they are the verdict: neither trains anything."""

_STARVES = 0.25
"""Share of the loop's time that waits for data from which loading holds it back, whatever the step takes alone."""

_WAITS = 1.5
"""Times that loading takes longer than its cores compute, from which on more workers than cores help."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A run, measured; figures are of one rank."""

    config: Config  # of the run, on one rank, with what was `auto` as it is by default
    loader: Loader  # of its training split
    device: torch.device  # where it is trained
    ranks: int = 1  # of the run, each with a loop of its own
    cores: int  # that this rank may use
    workers: int  # threads or processes that load; 0 is the training thread itself
    samples: int  # of an epoch
    val_samples: int  # of an evaluation
    storage: StorageCosts | None = None  # None where it wasn't measured apart from loading
    loading: LoadingCosts  # of an image in one thread, of what most epochs read
    loader_per_s: float  # images/s of the workers alone
    # seconds per image of the training thread
    transfer_s: float = 0.0
    step_s: float
    log_s: float = 0.0
    images_per_s: float  # of the training loop
    wait: float  # share of its time that waits for data
    starved: bool  # whether loading is slower than the training thread
    evaluation_per_s: float  # images/s of an evaluation; 0 if there is nothing to evaluate
    # (file, line, function, what) that reads a tensor's value -> how often in an update
    syncs: Mapping[tuple[str, int, str, str], int] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)  # what it takes, as `Memory.to_plain` has it
    other_cores: float = 0.0  # that other programs used meanwhile

    @property
    def epoch_s(self) -> float:
        """Seconds to train on the whole split once."""
        return self.samples / self.images_per_s

    @property
    def evaluation_s(self) -> float:
        """Seconds of evaluation for each epoch, on average."""
        each = self.val_samples / self.evaluation_per_s if self.evaluation_per_s else 0.0
        return each / min(self.config.eval_every, self.config.epochs)

    @property
    def evaluation(self) -> float:
        """Share of the run's time that evaluation takes."""
        return self.evaluation_s / (self.epoch_s + self.evaluation_s)

    @property
    def waits(self) -> bool:
        """Whether loading waits, for a disk, a network or a sleep, more than its cores compute."""
        return self.loading.total.wall_s > _WAITS * self.loading.total.cpu_s

    @property
    def slowest(self) -> str:
        """The stage of loading that takes most."""
        return max(LOADING, key=lambda name: getattr(self.loading, name).wall_s)


Progress = Callable[[str], None]
"""Called with what is measured next."""


@contextmanager
def measured(config: Config, seconds: float, progress: Progress = lambda what: None) -> Iterator[Measured]:
    """Measure a run on its own data, for about so many seconds; inside the block its loaders are there for more.

    In this process alone, without checkpoints, without servers that are logged to, and at `image_size` throughout.

    Raises:
        ConfigError, DataError: the run can't be built.
    """
    if config.probe:
        raise ConfigError(
            "probe: a probe trains one layer on features in memory; set probe=0 to diagnose the whole model"
        )
    single = alone(config, "progressive=[]")
    with tempfile.TemporaryDirectory(prefix="effloop-diagnose-", ignore_cleanup_errors=True) as folder:
        progress("data and model")
        memory: dict[str, Any] = {}

        def keep(*parts: Any) -> list[str]:  # stands for `advise`
            memory.update(expected_memory(*parts[:-1]).to_plain())
            return []

        trainer = trainer_in(Path(folder), single, advise=keep)
        with closing(trainer.train), closing(trainer.val), trainer.recorder:
            with costs.OtherPrograms() as others:
                found = _measured(single, trainer, seconds, progress)
            yield replace(found, memory=memory, other_cores=others.cores)


def _measured(config: Config, trainer: Trainer, seconds: float, progress: Progress) -> Measured:
    loader, val, device = trainer.train, trainer.val, trainer.parallel.device
    assert isinstance(loader, Loader)
    assert isinstance(val, Loader)
    progress("storage")
    storage = costs.storage_costs(loader.plan, 0.1 * seconds)
    progress("decoding, augmentation")
    cached = isinstance(loader.plan.source, CachedSource)
    if cached:
        costs.loading_costs(loader.plan, 0.1 * seconds)  # fills it
    loading = costs.loading_costs(loader.plan, 0.1 * seconds)
    progress("the loader as a whole")
    loader_per_s = costs.loader_rate(loader, 0.12 * seconds, config.engine.prefetch)
    progress("transfer")
    transfer_s = costs.transfer_cost(loader, 0.03 * seconds)
    progress("the training step")
    step_s, syncs = costs.step_costs(trainer, 0.15 * seconds)
    progress("the training loop")
    turn, log = costs.loop_costs(trainer, 0.25 * seconds)
    progress("evaluation")
    evaluation_per_s = costs.evaluation_rate(trainer, 0.1 * seconds)
    workers = workers_of(config, loader)
    if not loader.engine.exact:  # it has decoders of its own
        rest = Cost(max(1, workers) / loader_per_s) - loading.storage
        loading = replace(loading, decode=rest, augment=Cost(), batch=Cost())
    if not cached:  # what most epochs read may be on the disk
        loading = replace(loading, storage=max(storage.usual, loading.storage, key=lambda cost: cost.wall_s))
    # On a CPU batches are moved while the loop asks for one.
    wait = max(0.0, turn.wait - transfer_s * turn.images_per_s) if device.type == "cpu" else turn.wait
    loader_per_s = max(loader_per_s, turn.images_per_s)  # it isn't slower alone
    log_s = log / turn.images_per_s
    return Measured(
        config=config,
        loader=loader,
        device=device,
        cores=available_cores(),
        workers=workers,
        samples=len(loader) * loader.plan.order.batch_per_rank,
        val_samples=len(val.plan.source),
        storage=storage,
        loading=loading,
        loader_per_s=loader_per_s,
        transfer_s=transfer_s,
        step_s=step_s,
        log_s=log_s,
        images_per_s=turn.images_per_s,
        wait=wait,
        starved=1 / loader_per_s > transfer_s + step_s + log_s or wait > _STARVES,
        evaluation_per_s=evaluation_per_s,
        syncs=syncs,
    )


def workers_of(config: Config, loader: Loader) -> int:
    """Threads or processes that load; 0 is the training thread itself. `tune` may have found another number."""
    if not config.engine.host_batches("cpu"):
        return 0
    return int(getattr(loader.engine, "num_workers", num_workers(config)))


def stages(found: Measured) -> list[Stage]:
    """Each stage's rate if it were the only one, with the run's workers and ranks."""
    rows, workers = [], max(1, found.workers)

    def add(name: str, seconds: float, detail: str) -> None:
        rows.append(Stage(name, found.ranks / max(seconds, 1e-9), detail))

    for name in LOADING:
        cost: Cost = getattr(found.loading, name)
        detail = f"{1e3 * cost.wall_s:.3g} ms an image and worker"
        detail = found.storage.describe() if name == "storage" and found.storage else detail
        add(name, max(cost.wall_s / workers, cost.cpu_s / found.cores), detail)
    add("loader", 1 / found.loader_per_s, f"together, {_by(found.workers)}")
    add("transfer", found.transfer_s, "to float32, normalised" if found.config.data.mean else "uint8")
    add("step", found.step_s, "forward, backward and update")
    add("log", found.log_s, f"{found.log_s * found.images_per_s:.1%} of the loop")
    add("loop", 1 / found.images_per_s, f"all of it; {found.wait:.0%} waits for data")
    return rows


def verdict(found: Measured) -> Verdict:
    """What holds the run back: of loading and the training thread what is slower alone, and the most of that."""
    if found.evaluation > _OVERHEAD:
        return Verdict("evaluation", f"evaluation-bound: evaluation takes {found.evaluation:.0%} of the run's time")
    if (log := found.log_s * found.images_per_s) > _OVERHEAD:
        return Verdict("logging", f"logging-bound: the recorder takes {log:.0%} of the loop's time")
    trained = 1 / (found.transfer_s + found.step_s + found.log_s)
    load, train, both = (f"{found.ranks * rate:,.0f}" for rate in (found.loader_per_s, trained, found.images_per_s))
    if not found.starved:
        bound = "transfer" if found.transfer_s > found.step_s else "compute"
        if bound == "compute" and found.device.type == "cuda" and found.syncs:
            count = sum(found.syncs.values())
            return Verdict("sync", f"sync-bound: the host waits for the GPU {count} times in each update")
        line = f"the training step alone could take {train} images/s, loading yields {load}; together {both}"
        return Verdict(bound, f"{bound}-bound: {line}")
    bound = found.slowest
    share = getattr(found.loading, bound).wall_s / found.loading.total.wall_s
    line = f"{bound}-bound: loading yields {load} images/s, {share:.0%} of it is {LOADING[bound]}"
    line += ", most of that waiting" * found.waits
    line += f"; the step alone could take {train}; {found.wait:.0%} of the loop's time waits for data"
    if found.workers < found.cores:
        line += f"; images are loaded {_by(found.workers)}, on {found.cores} cores"
    return Verdict(bound, line)


def _by(workers: int) -> str:
    return f"by {workers} worker{'s' * (workers > 1)}" if workers else "in the training thread"
