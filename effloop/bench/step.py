"""`bench what=step`: what each option of the training step (a knob) gains on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from effloop import config as configs
from effloop.batch import ImageSize
from effloop.bench.interleave import scratch_folder
from effloop.bench.step_sides import (
    Side,
    SideResults,
    measure_in_processes,
    measure_interleaved,
    measure_runs,
    process_state_restored,
)
from effloop.bench.tables import print_table
from effloop.config import Config
from effloop.errors import ConfigError, EffLoopError
from effloop.registry import choices
from effloop.system.hardware import available_cores

_MAX_RUNS = 2
"""Rounds at most where each side is a whole training, of 10 s and more."""

_EPOCHS = {"cpu": 2, "cuda": 20}
"""Epochs of such a run: a GPU's first step takes seconds, in which it could process the photographs many times."""


@dataclass(frozen=True)
class Knob:
    """One option of the training step, measured off and on.

    Attributes:
        off, on: overrides of the config for each side.
        unavailable: why it can't be measured or changes nothing here; empty where it can.
        measure: how the two sides are measured, unless they are whole runs.
        runs: whether they are whole runs.
    """

    off: tuple[str, ...]
    on: tuple[str, ...]
    unavailable: str = ""
    measure: Callable[[Mapping[str, Config], int, Path], SideResults] = measure_interleaved
    runs: bool = False


def step(config: Config, repeats: int, *, knobs: str, work: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Images/s of training updates with each knob on and off, all else being as configured.

    Two trainers, built as for a run, take turns on batches in memory; `nothing` has the same config on both sides and
    shows by how much two equal ones differ here. What can't be undone in a process is measured in one process for each
    side. `ddp` compares whole runs, of 2 ranks and of one process with the same global batch, on the embedded
    photographs. A knob that is unavailable is a row with the reason.

    Args:
        config: what is measured; but in one process, at a constant learning rate, without logging or checkpoints, and
            with the default of what is `auto`.
        repeats: rounds; at most 2 of whole runs.
        knobs: names with commas between, or `all`.
        work: where the run folders are meanwhile; empty is the system's place for temporary files.
        overrides: what the config was composed from.

    Raises:
        ConfigError: no such knob, or the config itself can't be trained.
        DataError: its data can't be read.
    """
    base = configs.from_dict(configs.to_dict(config), neutral_overrides(config), "the config")
    check_knobs(knobs, [*_knobs(base, nn.Identity(), torch.device("cpu"))])
    console = Console(stderr=True)
    with scratch_folder(work) as scratch, process_state_restored():
        first = Side(base, scratch).trainer
        device = first.parallel.device
        every = _knobs(base, first.model, device)
        del first
        rows = []
        for name in every if knobs == "all" else dict.fromkeys(knobs.split(",")):
            with console.status(f"{name}: {' '.join(every[name].on)}"), process_state_restored():
                rows.append(_row(name, every[name], base, overrides, repeats, scratch))
    result = {"what": "step", **facts(base, device), "repeats": repeats, "rows": rows}
    _show(result)
    return result


def facts(config: Config, device: torch.device) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "model": getattr(config.model, "arch", config.model.name),
        "batch_size": config.batch_size,
        "image_size": config.image_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cores": available_cores(),
        "torch": torch.__version__,
    }


def neutral_overrides(config: Config) -> list[str]:
    """Overrides that leave nothing in the config but the training step."""
    return [
        "parallel=none",
        "record=none",
        "checkpoint=none",
        "schedule=constant",
        "resume=null",
        *usual_values(config),
    ]


def usual_values(config: Config) -> list[str]:
    """Overrides that give what is `auto` in the step its default, so that nothing is measured for it."""
    defaults = {"channels_last": "true", "cudnn_benchmark": "null", "compile": "false"}
    return [f"{key}={value}" for key, value in defaults.items() if getattr(config, key) == "auto"]


def check_knobs(knobs: str, names: list[str]) -> None:
    """Refuse unknown names before anything is built.

    Raises:
        ConfigError: there is one.
    """
    for name in knobs.split(",") if knobs != "all" else ():
        if name not in names:
            raise ConfigError(f"knobs: no knob '{name}'; {choices(name, ['all', *names])}")


def _knobs(config: Config, model: nn.Module, device: torch.device) -> dict[str, Knob]:
    """All knobs by name, for this config's model on this device."""
    half, group = config.batch_size // 2, config.accumulate
    small = ImageSize(*(max(1, side // 2) for side in config.size)).word
    even, halved = f"batch_size={2 * half}", f"batch_size={half}"
    single = "" if half else "batch_size: a single image can't be halved"
    no_gpu = "" if device.type == "cuda" else "without a GPU it changes nothing"
    frozen = ",".join(first_half(model))
    whole = "" if frozen else "the model has no parts of which some could be frozen"
    apart = measure_in_processes
    return {
        "nothing": Knob((), ()),
        "channels_last": _switch("channels_last", "false", "true"),
        "compile": _switch("compile", "false", "true"),
        **{name: _switch("precision", "fp32", name) for name in ("tf32", "bf16", "fp16", "amp")},
        # What torch has once chosen for a shape, either way, it keeps.
        "cudnn_benchmark": _switch(
            *("cudnn_benchmark", "false", "true"), "deterministic=false", unavailable=no_gpu, measure=apart
        ),
        # cuBLAS reads the size of its workspace when it starts.
        "deterministic": _switch("deterministic", "false", "true", "cudnn_benchmark=null", measure=apart),
        "fused": _switch("optim.fused", "null", "true"),
        "ema": _switch("optim.ema", "0", "0.999"),
        "max_grad_norm": _switch("max_grad_norm", "null", "1"),
        "checkpointing": _switch("model.checkpointing", "false", "true"),
        "accumulate": Knob((even,), (f"accumulate={2 * group}", halved), unavailable=single),
        "progressive": _switch("progressive", "[]", f"[{small}]"),
        "freeze": _switch("model.freeze", "[]", f"[{frozen}]", unavailable=whole),
        "decay_norm_and_bias": _switch("optim.decay_norm_and_bias", "true", "false"),
        "reuse_memory": _switch("reuse_memory", "false", "true", measure=apart),
        "ddp": Knob(
            ("parallel=none", even), ("parallel=ddp", "parallel.processes=2", halved), unavailable=single, runs=True
        ),
    }


def _switch(key: str, off: str, on: str, *both: str, **facts: Any) -> Knob:
    """A knob that is one key of the config; `both` are overrides of either side."""
    return Knob((f"{key}={off}", *both), (f"{key}={on}", *both), **facts)


def first_half(model: nn.Module) -> list[str]:
    """Names of the submodules that `freeze` turns off: `features`, or else the first half of them."""
    prefix, parts = "", _parts(model)
    while len(parts) == 1:  # a wrapper of the model
        (name,) = parts
        prefix, parts = f"{prefix}{name}.", _parts(parts[name])
    names = ["features"] if "features" in parts else [*parts][: len(parts) // 2]
    return [f"{prefix}{name}" for name in names]


def _parts(model: nn.Module) -> dict[str, nn.Module]:
    """Its children that have parameters."""
    return {name: each for name, each in model.named_children() if next(each.parameters(), None) is not None}


def _row(name: str, knob: Knob, base: Config, overrides: Sequence[str], repeats: int, scratch: Path) -> dict[str, Any]:
    """A knob's row of the result."""
    row = {"knob": name, "off": " ".join(knob.off), "on": " ".join(knob.on), "reason": knob.unavailable}
    if knob.unavailable:
        return row
    try:
        found = _measure(knob, base, overrides, repeats, scratch)
    except Exception as error:  # a compiler's, a kernel's: none of them ends the table
        return row | {"reason": reason_of(error)}
    return row | {
        **gain_of(found.images_per_s),
        "bytes": found.bytes,
        "memory": found.memory,
        "remark": found.remark,
    }


def _measure(knob: Knob, base: Config, overrides: Sequence[str], repeats: int, scratch: Path) -> SideResults:
    if not knob.runs:
        plain = configs.to_dict(base)
        sides = {name: configs.from_dict(plain, getattr(knob, name), "the config") for name in ("off", "on")}
        return knob.measure(sides, repeats, scratch)
    common = ["data=embedded", "data.root=null", "progressive=[]", "resume=null", "checkpoint=none"]
    common += ["record=run", "record.console=false", "record.tensorboard=false", *resolved_overrides(base)]
    common += [f"epochs={_EPOCHS['cuda' if torch.cuda.is_available() and base.device != 'cpu' else 'cpu']}"]
    runs = {name: [*overrides, *common, *getattr(knob, name)] for name in ("on", "off")}  # what may fail comes first
    return measure_runs(runs, min(repeats, _MAX_RUNS), scratch)


def resolved_overrides(base: Config) -> list[str]:
    """Overrides that set what may have been `auto` as it is in the config."""
    values = {key: getattr(base, key) for key in ("compile", "channels_last", "cudnn_benchmark")}
    return [f"{key}={'null' if value is None else str(value).lower()}" for key, value in values.items()]


def reason_of(error: Exception) -> str:
    """Why a side can't be measured, in one line."""
    words = " ".join(str(error).split())
    return str(error) if isinstance(error, EffLoopError) else f"{type(error).__name__}: {words[:160]}"


def gain_of(images_per_s: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """What a row has of its two sides' turns: `images_per_s`, and the median ratio, `gain`, with its `spread`."""
    ratios = [on / off for off, on in zip(images_per_s["off"], images_per_s["on"], strict=True)]
    gain = statistics.median(ratios)
    spread = statistics.median(abs(ratio - gain) for ratio in ratios) if len(ratios) > 1 else None
    return {"images_per_s": images_per_s, "gain": gain, "spread": spread}


_COLUMNS = ("knob", "override", "images/s off", "on", "gain", "MB off", "on", "remark")


def _show(result: Mapping[str, Any]) -> None:
    print_table(
        _COLUMNS,
        [
            [row["knob"], row["on"], *(["-"] * 5 if row["reason"] else _cells(row)), row["reason"] or row["remark"]]
            for row in result["rows"]
        ],
        left=("knob", "override", "remark"),
        min_width=120,
        title=f"{result['model']}, {result['batch_size']} images of {ImageSize.of(result['image_size'])} pixels on "
        f"{result['device']} ({result['cores']} cores), torch {result['torch']}; turns of each: {result['repeats']}",
    )
    memory = "; ".join(dict.fromkeys(row["memory"] for row in result["rows"] if row.get("memory")))
    print("medians; gain: images/s with it over images/s without, median of all turns ± median deviation")
    print(f"MB: {memory or 'not counted'}")


def _cells(row: Mapping[str, Any]) -> list[str]:
    speed = [f"{statistics.median(row['images_per_s'][side]):,.0f}" for side in ("off", "on")]
    spread = "" if row["spread"] is None else f" ± {row['spread']:.2f}"
    memory = [f"{row['bytes'][side] / 1e6:,.0f}" if row["bytes"] else "" for side in ("off", "on")]
    return [*speed, f"{row['gain']:.2f}{spread}", *memory]
