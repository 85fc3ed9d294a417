"""Config -> what a run trains in: seeds, ranks, precision, task, and values for what is `auto`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib import import_module
from typing import Any

from effloop.checkpoint import rng
from effloop.config import Config
from effloop.data.engine.base import chosen_engine
from effloop.data.random import derive
from effloop.data.source import Kind, Source
from effloop.data.source.base import class_counts, pixel_counts
from effloop.data.source.splits import open_split
from effloop.errors import ConfigError
from effloop.lazy import nn
from effloop.parallel import Parallel, Slice, own_slice, parallels
from effloop.precision import Precision, PrecisionConfig, precisions
from effloop.runs import findings
from effloop.system import gpu, hardware
from effloop.task import Task, check_objective, tasks


@dataclass
class Resolved(Config):
    """What parts are built from: the fields of `Config` that may be `auto` or null there have their values here.

    Attributes:
        num_workers: threads or processes that load for one rank; 0 loads in the training thread.
        tuned: whether `tune` found that number.
        engine: threads or processes, where `auto` was asked for.
        compile, channels_last, cudnn_benchmark: as in `Config`, decided.
        precision: the part that `amp` or `precision` chose.
    """

    num_workers: int = 0
    tuned: bool = False
    compile: bool = False
    channels_last: bool = True
    cudnn_benchmark: bool = True
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)


def resolved(config: Config, parallel: Slice | None = None, **measured: bool) -> Resolved:
    """A config with a value for whatever is `auto`, for a rank of `parallel`, and with what measuring has found."""
    values: dict[str, Any] = {each.name: getattr(config, each.name) for each in fields(Config)}
    values["num_workers"] = num_workers(config, parallel)
    values["batch_size"], values["accumulate"] = batches_of_update(config, parallel.world_size if parallel else 1)
    values["engine"] = chosen_engine(config.engine, values["num_workers"])
    values["compile"] = config.compile is True
    values["channels_last"] = config.channels_last is not False
    if not isinstance(config.cudnn_benchmark, bool):
        values["cudnn_benchmark"] = not config.deterministic
    return Resolved(**{**values, **measured})


def batches_of_update(config: Config, ranks: int) -> tuple[int, int]:
    """Images of a rank's batch, and batches of an update, as `global_batch` wants them."""
    virtual, parts = config.parallel.virtual, config.parallel.virtual or ranks
    if parts % ranks:
        allowed = ", ".join(str(each) for each in range(1, parts + 1) if parts % each == 0)
        raise ConfigError(f"parallel.virtual: {parts} can't be divided among {ranks} ranks; start one of {allowed}")
    if config.global_batch is None:
        return config.batch_size, parts // ranks if virtual else config.accumulate
    images, rest = divmod(config.global_batch, parts)
    if rest:
        among, other = (f"parallel.virtual={parts}", "") if virtual else (f"{ranks} ranks", "start ")
        raise ConfigError(
            f"global_batch: {config.global_batch} images can't be divided among {among}; set "
            f"global_batch={(images + 1) * parts}, or {other}another number of {'parts' if virtual else 'ranks'}"
        )
    if virtual:
        return images, parts // ranks
    most = min(images, config.batch_size)
    batch = next(each for each in range(most, 0, -1) if images % each == 0)
    if 2 * batch < most:
        raise ConfigError(
            f"global_batch: {config.global_batch} images make batches of {batch}, far below batch_size="
            f"{config.batch_size}; set global_batch={images // most * most * ranks}, or batch_size={batch} to have them"
        )
    return batch, images // batch


def num_workers(config: Config, parallel: Slice | None = None) -> int:
    """Threads or processes that load for one rank: what was asked for, or its share of the cores."""
    if isinstance(config.num_workers, int):
        return config.num_workers
    return max(1, hardware.available_cores() // (parallel.sharing if parallel else 1))


def tuned_workers(config: Config, parallel: Slice) -> tuple[int, str] | None:
    """What `num_workers=auto` is where `tune` has measured this pipeline, machine and data; a line for users."""
    if isinstance(config.num_workers, int) or parallel.world_size > 1 or not findings.any_here(config):
        return None
    rows = findings.kept(config, open_split(config.data, "train").fingerprint())
    numbers = [row for row in rows if isinstance(row.get("num_workers"), int) and row["num_workers"] >= 0]
    if not numbers:
        return None
    count, prefetch, date = (numbers[-1].get(key) for key in ("num_workers", "prefetch", "date"))
    other = prefetch not in (None, config.engine.prefetch)
    more = f"; it was measured with engine.prefetch={prefetch}: set that, too" * other
    return int(str(count)), f"num_workers: auto took {count}, as tune found on {date}{more}"


def check_limits(config: Config, ranks: Slice, *, on_host: bool) -> None:
    """Refuse more workers, open files or memory than this machine has; `on_host`: images are normalised there, too."""
    workers = num_workers(config, ranks)
    hardware.check_workers(workers, ranks.sharing)
    hardware.check_open_files(workers if chosen_engine(config.engine, workers).worker_bytes else 0)
    pixels = max(size.pixels for size in config.train_sizes)
    images, _ = batches_of_update(config, ranks.world_size)
    hardware.check_batch_memory(images, pixels * config.data.channels * (5 if on_host else 1))


def memory_hint(config: Config) -> str:
    """What a run that needs less memory is started with, for messages."""
    size = min(config.batch_size, config.global_batch or config.batch_size)
    half = f"batch_size={max(1, size // 2)} (it is {size})"
    is_open = size > 1 and not config.global_batch and not config.parallel.virtual
    more = f" with accumulate={2 * config.accumulate}" if is_open else ""
    words = ["" if config.precision and config.precision.mixed else "precision=amp", "a smaller image_size"]
    if not getattr(config.model, "checkpointing", True):
        words.insert(1, "model.checkpointing=true")
    return f"set {f'{half}{more}; or ' * (size > 1)}{', '.join(filter(None, words))}"


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
    module: nn.Module | None = None  # that was given to `build_trainer`; None is what the config describes

    def fitted(self, source: Source) -> Environment:
        """The same with a task that knows the training split, which has to have the scores that the config names."""
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
    device, recorded, notes = gpu.find_device(config.device), config, []
    if config.parallel.virtual:  # what sums depend on, beside their order
        on_gpu = device.type == "cuda"
        config = replace(config, deterministic=on_gpu or config.deterministic, cudnn_benchmark=False)
        if config.threads == "auto" and not on_gpu:
            config = replace(config, threads=1)
            notes = ["threads  1 in each rank, as sums would depend on their number; for parallel.virtual"]
    assert config.precision is not None  # `compose` decided it
    rng.seed_all(config.seed)
    hardware.set_threads(config.threads)
    hardware.set_reproducible(deterministic=config.deterministic, cudnn_benchmark=not config.deterministic)
    if not config.parallel.of_ranks and (count := own_slice(device).world_size) > 1:
        raise ConfigError(
            f"parallel: {config.parallel.name} would train {count} models, one in each of the {count} ranks; "
            "set parallel=ddp, or leave torchrun or srun out"
        )
    check_limits(config, own_slice(device), on_host=device.type == "cpu")
    parallel = parallels.build(config.parallel, device)
    if parts := config.parallel.virtual:
        from effloop.parallel.virtual import Virtual

        seed = config.seed
        parallel = Virtual.over(
            parallel, parts, lambda *part: rng.seed_all(derive(seed, *part)), averages=bool(config.optim.ema)
        )
    parallel.on_rank0(config.record.require)
    precision = precisions.build(config.precision, parallel.device)
    task = tasks.build(config.task)
    if config.reuse_memory:
        hardware.keep_freed_memory()  # before anything is measured
    found = resolved(config, parallel)
    if "auto" in (config.channels_last, config.cudnn_benchmark, config.compile):
        # A tool: imported only where there is something to measure.
        found, lines = import_module("effloop.measure.auto").measure_auto(config, task, parallel)
        if lines:
            rng.seed_all(config.seed)  # measuring drew from it
        notes += lines
    hardware.set_reproducible(deterministic=config.deterministic, cudnn_benchmark=found.cudnn_benchmark)
    if workers := tuned_workers(config, parallel):
        engine = chosen_engine(config.engine, workers[0])
        found = replace(found, num_workers=workers[0], engine=engine, tuned=True)
        notes = [*notes, workers[1]]
    recorded = replace(
        recorded, compile=found.compile, channels_last=found.channels_last, cudnn_benchmark=found.cudnn_benchmark
    )
    return Environment(found, recorded, task, parallel, precision, notes)
