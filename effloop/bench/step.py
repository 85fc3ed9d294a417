"""`bench what=step`: what each knob of the training step brings on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from effloop import config as configs
from effloop.bench.interleave import scratch
from effloop.bench.step_sides import Found, Side, apart, as_runs, in_turns, process_kept
from effloop.config import Config
from effloop.errors import ConfigError, EffLoopError
from effloop.registry import choices
from effloop.system.hardware import available_cores

_RUNS = 2
"""Runs of each side at most where a run is a whole training, of 10 s and more."""

_EPOCHS = {"cpu": 2, "cuda": 20}
"""Epochs of such a run: a GPU's first step takes seconds, in which it could go through the photographs often."""


@dataclass(frozen=True)
class Knob:
    """What is turned.

    Attributes:
        off, on: overrides of the config for either side.
        lack: why it is no use here; empty where it may be.
        measure: by which the two sides are measured, unless these are whole runs.
        runs: whether they are.
    """

    off: tuple[str, ...]
    on: tuple[str, ...]
    lack: str = ""
    measure: Callable[[Mapping[str, Config], int, Path], Found] = in_turns
    runs: bool = False


def step(config: Config, repeats: int, *, knobs: str, work: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Images/s of training updates with each knob on, beside those with it off, all else being as configured.

    Two trainers, built as for a run, take turns on batches that lie in memory; `nothing` has the same config on both
    sides and tells how far two equal ones differ here. Where a process can't take a knob back, each side has one of
    its own. `ddp` compares whole runs, of 2 ranks and of one process with the same global batch, on the photographs
    that come along. What can't be had here is a row with the reason.

    Args:
        config: what is measured; but in one process, at a constant rate, with nothing written down, and with
            what is `auto` as it is by default.
        repeats: turns of each side; at most 2 where each is a whole run.
        knobs: names of them with commas between, or `all`.
        work: where the run folders are meanwhile; empty is the system's place for temporary files.
        overrides: what the config was composed from.

    Raises:
        ConfigError: no such knob, or the config itself can't be trained.
        DataError: its data can't be read.
    """
    base = configs.from_dict(configs.to_dict(config), plain(config), "the config")
    _check_names(knobs, [*_knobs(base, nn.Identity(), torch.device("cpu"))])
    console = Console(stderr=True)
    with scratch(work) as place, process_kept():
        first = Side(base, place).trainer
        device = first.parallel.device
        every = _knobs(base, first.model, device)
        del first
        rows = []
        for name in every if knobs == "all" else dict.fromkeys(knobs.split(",")):
            with console.status(f"{name}: {' '.join(every[name].on)}"), process_kept():
                rows.append(_row(name, every[name], base, overrides, repeats, place))
    result = {
        "what": "step",
        "model": getattr(base.model, "arch", base.model.name),
        "batch_size": base.batch_size,
        "image_size": base.image_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cores": available_cores(),
        "torch": torch.__version__,
        "repeats": repeats,
        "rows": rows,
    }
    show(result)
    return result


def plain(config: Config) -> list[str]:
    """Overrides that leave the step alone in the config."""
    plain = ["parallel=none", "record=none", "checkpoint=none", "schedule=constant", "resume=null"]
    usual = {"channels_last": "true", "cudnn_benchmark": "null", "compile": "false"}
    return plain + [f"{key}={value}" for key, value in usual.items() if getattr(config, key) == "auto"]


def _check_names(knobs: str, names: list[str]) -> None:
    """Refuse names that aren't, before anything is built.

    Raises:
        ConfigError: one isn't.
    """
    for name in knobs.split(",") if knobs != "all" else ():
        if name not in names:
            raise ConfigError(f"knobs: no knob '{name}'; {choices(name, ['all', *names])}")


def _knobs(config: Config, model: nn.Module, device: torch.device) -> dict[str, Knob]:
    """All there are, by name, for this config's model on this device."""
    halves = config.batch_size // 2
    alone = "" if halves else "batch_size: a single image can't be halved"
    fp32 = ("precision=fp32",)
    whole = f"batch_size={2 * halves}"
    group = config.accumulate
    ranks = ("parallel=ddp", "parallel.processes=2", f"batch_size={halves}")
    frozen = ",".join(first_half(model))
    small = max(1, config.image_size // 2)
    return {
        "nothing": Knob((), ()),
        "channels_last": Knob(("channels_last=false",), ("channels_last=true",)),
        "compile": Knob(("compile=false",), ("compile=true",)),
        **{name: Knob(fp32, (f"precision={name}",)) for name in ("tf32", "bf16", "fp16", "amp")},
        "cudnn_benchmark": Knob(  # what torch once chose for a shape, either way, it keeps
            ("cudnn_benchmark=false", "deterministic=false"),
            ("cudnn_benchmark=true", "deterministic=false"),
            lack="" if device.type == "cuda" else "without a GPU it changes nothing",
            measure=apart,
        ),
        "deterministic": Knob(  # cuBLAS reads what it may take when it starts
            ("deterministic=false", "cudnn_benchmark=null"),
            ("deterministic=true", "cudnn_benchmark=null"),
            measure=apart,
        ),
        "fused": Knob(("optim.fused=null",), ("optim.fused=true",)),
        "ema": Knob(("optim.ema=0",), ("optim.ema=0.999",)),
        "max_grad_norm": Knob(("max_grad_norm=null",), ("max_grad_norm=1",)),
        "checkpointing": Knob(("model.checkpointing=false",), ("model.checkpointing=true",)),
        "accumulate": Knob((whole,), (f"accumulate={2 * group}", f"batch_size={halves}"), lack=alone),
        "progressive": Knob(("progressive=[]",), (f"progressive=[{small}]",)),
        "freeze": Knob(
            ("model.freeze=[]",),
            (f"model.freeze=[{frozen}]",),
            lack="" if frozen else "the model has no parts of which some could be frozen",
        ),
        "decay_norm_and_bias": Knob(("optim.decay_norm_and_bias=true",), ("optim.decay_norm_and_bias=false",)),
        "reuse_memory": Knob(("reuse_memory=false",), ("reuse_memory=true",), measure=apart),
        "ddp": Knob(("parallel=none", whole), ranks, lack=alone, runs=True),
    }


def first_half(model: nn.Module) -> list[str]:
    """Names of the parts that freezing the first layers would freeze: `features`, or else half of the parts."""
    prefix, parts = "", _parts(model)
    while len(parts) == 1:  # what only wraps the model
        (name,) = parts
        prefix, parts = f"{prefix}{name}.", _parts(parts[name])
    names = ["features"] if "features" in parts else [*parts][: len(parts) // 2]
    return [f"{prefix}{name}" for name in names]


def _parts(model: nn.Module) -> dict[str, nn.Module]:
    """Its children that have something to train."""
    return {name: each for name, each in model.named_children() if next(each.parameters(), None) is not None}


def _row(name: str, knob: Knob, base: Config, overrides: Sequence[str], repeats: int, place: Path) -> dict[str, Any]:
    """What goes to JSON of one knob."""
    row: dict[str, Any] = {"knob": name, "off": " ".join(knob.off), "on": " ".join(knob.on), "reason": knob.lack}
    if knob.lack:
        return row
    try:
        found = _found(knob, base, overrides, repeats, place)
    except Exception as error:  # a compiler's, a kernel's: none of them ends the table
        row["reason"] = str(error) if isinstance(error, EffLoopError) else _first_line(error)
        return row
    ratios = [on / off for off, on in zip(found.images_per_s["off"], found.images_per_s["on"], strict=True)]
    gain = statistics.median(ratios)
    return row | {
        "images_per_s": found.images_per_s,
        "gain": gain,
        "spread": statistics.median(abs(ratio - gain) for ratio in ratios) if len(ratios) > 1 else None,
        "bytes": found.bytes,
        "memory": found.memory,
        "remark": found.remark,
    }


def _found(knob: Knob, base: Config, overrides: Sequence[str], repeats: int, place: Path) -> Found:
    """Both sides, measured."""
    if not knob.runs:
        plain = configs.to_dict(base)
        sides = {name: configs.from_dict(plain, getattr(knob, name), "the config") for name in ("off", "on")}
        return knob.measure(sides, repeats, place)
    ours = ["data=embedded", "data.root=null", "progressive=[]", "resume=null", "checkpoint=none"]
    ours += ["record=run", "record.console=false", "record.tensorboard=false", *as_words(base)]
    ours += [f"epochs={_EPOCHS['cuda' if torch.cuda.is_available() and base.device != 'cpu' else 'cpu']}"]
    words = {name: [*overrides, *ours, *getattr(knob, name)] for name in ("on", "off")}  # what may not start first
    return as_runs(words, min(repeats, _RUNS), place)


def as_words(base: Config) -> list[str]:
    """Overrides for what may have been `auto`, as it is in the config."""
    words = {key: getattr(base, key) for key in ("compile", "channels_last", "cudnn_benchmark")}
    return [f"{key}={'null' if value is None else str(value).lower()}" for key, value in words.items()]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


_COLUMNS = ("knob", "override", "images/s off", "on", "gain", "MB off", "on", "remark")


def show(result: Mapping[str, Any]) -> None:
    """Print the table of a result."""
    table = Table(
        title=f"{result['model']}, {result['batch_size']} images of {result['image_size']} pixels on "
        f"{result['device']} ({result['cores']} cores), torch {result['torch']}; turns of each: {result['repeats']}"
    )
    for heading in _COLUMNS:
        table.add_column(heading, justify="left" if heading in ("knob", "override", "remark") else "right")
    for row in result["rows"]:
        table.add_row(row["knob"], row["on"], *(["-"] * 5 if row["reason"] else _cells(row)), _remark(row))
    Console(width=max(120, Console().width)).print(table, markup=False)
    memory = "; ".join(dict.fromkeys(row["memory"] for row in result["rows"] if row.get("memory")))
    print("medians; gain: images/s with it over images/s without, in the middle of all turns ± how far they differ")
    print(f"MB: {memory or 'not counted'}")


def _cells(row: Mapping[str, Any]) -> list[str]:
    speed = [f"{statistics.median(row['images_per_s'][side]):,.0f}" for side in ("off", "on")]
    spread = "" if row["spread"] is None else f" ± {row['spread']:.2f}"
    memory = [f"{row['bytes'][side] / 1e6:,.0f}" if row["bytes"] else "" for side in ("off", "on")]
    return [*speed, f"{row['gain']:.2f}{spread}", *memory]


def _remark(row: Mapping[str, Any]) -> str:
    return str(row["reason"] or row["remark"])
