"""A config with nothing left to `auto`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from effloop.config import Config
from effloop.data.engine.base import chosen_engine
from effloop.data.source.splits import open_split
from effloop.parallel import Slice
from effloop.precision import PrecisionConfig
from effloop.runs.findings import TUNED, Findings, pipeline_key
from effloop.system.hardware import available_cores, check_batch_memory, check_open_files, check_workers


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
    """A config with a value for whatever is `auto`, for a rank of `parallel`: what measuring has found, or else not
    compiled and channels_last, and cuDNN may choose its algorithms unless `deterministic`.
    """
    values: dict[str, Any] = {each.name: getattr(config, each.name) for each in fields(Config)}
    values["num_workers"] = num_workers(config, parallel)
    values["engine"] = chosen_engine(config.engine, values["num_workers"])
    values["compile"] = config.compile is True
    values["channels_last"] = config.channels_last is not False
    if not isinstance(config.cudnn_benchmark, bool):
        values["cudnn_benchmark"] = not config.deterministic
    return Resolved(**{**values, **measured})


def num_workers(config: Config, parallel: Slice | None = None) -> int:
    """Threads or processes that load for one rank: what was asked for, or its share of the cores."""
    if isinstance(config.num_workers, int):
        return config.num_workers
    return max(1, available_cores() // (parallel.sharing if parallel else 1))


def tuned_workers(config: Config, parallel: Slice) -> tuple[int, str] | None:
    """What `num_workers=auto` is where `tune` has measured this pipeline, on this machine and data; a line for users.

    None where a number was asked for, several ranks share the machine, or nothing was measured.
    """
    if isinstance(config.num_workers, int) or parallel.world_size > 1 or not Findings.any_here(config):
        return None
    fingerprint = open_split(config.data, "train").fingerprint()
    rows = Findings.of(config, fingerprint).rows(pipeline_key(config, without=TUNED))
    numbers = [row for row in rows if isinstance(row.get("num_workers"), int) and row["num_workers"] >= 0]
    if not numbers:
        return None
    count, prefetch, date = (numbers[-1].get(key) for key in ("num_workers", "prefetch", "date"))
    other = prefetch not in (None, config.engine.prefetch)
    more = f"; it was measured with engine.prefetch={prefetch}: set that, too" * other
    return int(str(count)), f"num_workers: auto took {count}, as tune found on {date}{more}"


def check_limits(config: Config, ranks: Slice, *, on_host: bool) -> None:
    """Refuse more workers, open files or memory than this machine has, before anything is loaded; `on_host` says
    whether the images are normalised in the host's memory, too.
    """
    workers = num_workers(config, ranks)
    check_workers(workers, ranks.sharing)
    check_open_files(workers if chosen_engine(config.engine, workers).worker_bytes else 0)
    pixels = max(size.pixels for size in config.train_sizes)
    check_batch_memory(config.batch_size, pixels * config.data.channels * (5 if on_host else 1))


def memory_hint(config: Config) -> str:
    """What a run that needs less memory is started with, for messages."""
    half = f"batch_size={max(1, config.batch_size // 2)} (it is {config.batch_size})"
    more = f" with accumulate={2 * config.accumulate}" if config.batch_size > 1 else ""
    words = ["" if config.precision and config.precision.mixed else "precision=amp", "a smaller image_size"]
    if not getattr(config.model, "checkpointing", True):
        words.insert(1, "model.checkpointing=true")
    return f"set {half}{more}; or {', '.join(filter(None, words))}"
