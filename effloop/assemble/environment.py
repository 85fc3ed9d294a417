"""Config -> what a run trains in: seeds, ranks, precision, task, and values for what is `auto`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module

from effloop.assemble.resolve import Resolved, check_limits, resolved, tuned_workers
from effloop.checkpoint import rng
from effloop.config import Config
from effloop.data.engine.base import chosen_engine
from effloop.data.source import Kind, Source
from effloop.data.source.counts import class_counts, pixel_counts
from effloop.errors import ConfigError
from effloop.parallel import Parallel, own_slice, parallels
from effloop.precision import Precision, precisions
from effloop.system.hardware import find_device, keep_freed_memory, set_reproducible, set_threads
from effloop.task import Task, check_objective, tasks


@dataclass(frozen=True)
class Environment:
    """What a run trains in."""

    config: Resolved  # what the parts are built from
    # what the run folder and checkpoints keep; `num_workers` is as requested, so that a run can continue on another
    # machine
    recorded: Config
    task: Task  # the parts
    parallel: Parallel
    precision: Precision
    notes: list[str]  # lines for users

    def fitted(self, source: Source) -> Environment:
        """The same with a task that knows the training split; a ConfigError for scores in `checkpoint.best_by` or
        `objective` that a model of so many outputs hasn't.
        """
        num_outputs, best_by = self.task.num_outputs(source), self.config.checkpoint.best_by
        task = self.task.for_outputs(num_outputs)
        assert self.config.objective is not None  # `compose` decided it
        check_objective(self.config.objective, task.meters)
        if best_by not in (names := [meter.name for meter in task.meters]):
            raise ConfigError(f"checkpoint.best_by: no '{best_by}' of {num_outputs} outputs; have {', '.join(names)}")
        counts = pixel_counts if source.kind is Kind.masks else class_counts
        return replace(self, task=task.fitted(source, partial(counts, source)).to(self.parallel.device))


def build_environment(config: Config) -> Environment:
    """Seed the process, meet the other ranks, and decide what is `auto`."""
    if config.data.mean is None:
        raise ConfigError("data.mean: null leaves the images uint8, which no model takes; set data.mean and data.std")
    assert config.precision is not None  # `compose` decided it
    rng.seed_all(config.seed)
    set_threads(config.threads)
    set_reproducible(deterministic=config.deterministic, cudnn_benchmark=not config.deterministic)
    device = find_device(config.device)
    if not config.parallel.of_ranks and (count := own_slice(device).world_size) > 1:
        raise ConfigError(
            f"parallel: {config.parallel.name} would train {count} models, one in each of the {count} ranks; "
            "set parallel=ddp, or leave torchrun or srun out"
        )
    check_limits(config, own_slice(device), on_host=device.type == "cpu")
    parallel = parallels.build(config.parallel, device)
    parallel.on_rank0(config.record.require)
    precision = precisions.build(config.precision, parallel.device)
    task = tasks.build(config.task)
    if config.reuse_memory:
        keep_freed_memory()  # before anything is measured
    found, notes = resolved(config, parallel), []
    if "auto" in (config.channels_last, config.cudnn_benchmark, config.compile):
        # A tool: imported only where there is something to measure.
        found, notes = import_module("effloop.measure.auto").measure_auto(config, task, parallel)
    set_reproducible(deterministic=config.deterministic, cudnn_benchmark=found.cudnn_benchmark)
    if notes:
        rng.seed_all(config.seed)  # measuring drew from it
    if workers := tuned_workers(config, parallel):
        engine = chosen_engine(config.engine, workers[0])
        found = replace(found, num_workers=workers[0], engine=engine, tuned=True)
        notes = [*notes, workers[1]]
    recorded = replace(
        config, compile=found.compile, channels_last=found.channels_last, cudnn_benchmark=found.cudnn_benchmark
    )
    return Environment(found, recorded, task, parallel, precision, notes)
