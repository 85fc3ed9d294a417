"""`bench what=step` and `ablate`: what each key of a run gains."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial

import torch
from rich.console import Console

from effloop.assemble.environment import num_workers
from effloop.batch import ImageSize
from effloop.config import Config, with_overrides
from effloop.errors import EffLoopError
from effloop.measure import loops
from effloop.measure.benchmark import Column, Report, Row
from effloop.measure.loops import Loop, Updates
from effloop.measure.turns import Turn, apart, chosen, in_turns, ratio_of, scratch_folder
from effloop.system import gpu

_KNOBS = """
nothing
tf32: precision=fp32 amp=null | precision=tf32 amp=null
bf16: precision=fp32 amp=null | precision=bf16 amp=null
fp16: precision=fp32 amp=null | precision=fp16 amp=null
amp: precision=fp32 amp=null | precision=amp amp=null
precision: precision=fp32 amp=null
channels_last: channels_last=false | channels_last=true
compile: compile=false | compile=true
cudnn_benchmark: cudnn_benchmark=false deterministic=false | cudnn_benchmark=true deterministic=false
deterministic: deterministic=false cudnn_benchmark=null | deterministic=true cudnn_benchmark=null
reuse_memory: reuse_memory=false | reuse_memory=true
fused: optim.fused=null | optim.fused=true
ema: optim.ema=0 | optim.ema=0.999
decay_norm_and_bias: optim.decay_norm_and_bias=true | optim.decay_norm_and_bias=false
max_grad_norm: max_grad_norm=null | max_grad_norm=1
checkpointing: model.checkpointing=false | model.checkpointing=true
progressive: progressive=[] | progressive=[SIDE]
accumulate: accumulate=NOW batch_size=WHOLE | accumulate=TWICE batch_size=HALF
freeze: model.freeze=[]
decode: decode=pillow
region: decode.region=false
dct_scaling: decode.dct_scaling=false
cache: data.cache=none
device: augment.device=cpu
mixup: augment.mixup=0
cutmix: augment.cutmix=0
engine: engine=inline
prefetch: engine.prefetch=1
workers: num_workers=1
overlap: num_workers=0
threads: threads=1
label_smoothing: task.label_smoothing=0
"""
"""Name: overrides without it | with it. Of those without the latter, the config as given is the side that has it."""

_APART = ("threads", "cudnn_benchmark", "deterministic", "reuse_memory")
"""What can't be undone in a process: what torch has once chosen for a shape, the size of cuBLAS's workspace."""


def knobs_of(config: Config) -> dict[str, tuple[str, str]]:
    """Name -> the overrides without it and with it, which may be empty."""
    half, group = max(1, config.batch_size // 2), config.accumulate
    small = ImageSize(*(max(1, side // 2) for side in config.size)).word
    values = {"HALF": f"{half}", "WHOLE": f"{2 * half}", "NOW": f"{group}", "TWICE": f"{2 * group}", "SIDE": small}
    table, knobs = re.sub("[A-Z]+", lambda found: values[found[0]], _KNOBS), {}
    for line in table.strip().splitlines():
        name, _, sides = line.partition(": ")
        off, _, on = sides.partition(" | ")
        knobs[name] = off, on
    return knobs


def step(config: Config, repeats: int, *, knobs: str = "all", work: str = "") -> Report:
    """Images/s of training updates with each knob on and off, all else being as configured.

    Two trainers, built as for a run but as `alone` has it, take turns on batches in memory.
    """
    base = loops.alone(config, "record=none")
    every = {name: sides for name, sides in knobs_of(base).items() if sides[1] or name == "nothing"}
    names = chosen("knobs", knobs, every, "knob")
    with scratch_folder(work) as scratch, loops.process_state_restored():
        Updates.of(base, scratch)  # raises what is wrong with the config
        rows = _compared({name: every[name] for name in names}, base, partial(Updates.of, scratch=scratch), repeats)
    return _report("step", base, rows, repeats, Column("on", "override"))


def ablate(config: Config, repeats: int, *, knobs: str = "all", work: str = "") -> Report:
    """Images/s of the training loop as configured, and with one thing after the other switched off.

    Loading and steps, a second in each turn, without a log or checkpoints.
    """
    base = loops.alone(config, "record=none")
    several = ("tf32", "bf16", "fp16", "amp", "accumulate")  # `precision` is the first four
    every = {name: (off, "") for name, (off, _) in knobs_of(base).items() if name not in several}
    names = chosen("knobs", knobs, every, "knob")
    with scratch_folder(work) as scratch, loops.process_state_restored():
        with closing(Loop(base, scratch)) as usual:  # raises what is wrong with the config
            data = usual.loader.describe()
        rows = _compared({name: every[name] for name in names}, base, partial(Loop, scratch=scratch), repeats)
    return _report("ablate", base, rows, repeats, Column("off", "switched off by"), data)


def _turn(build: Callable[[], Updates | Loop]) -> Callable[[], Turn]:
    """A side's turns in a process of its own."""
    return build().turn


def _compared(
    knobs: Mapping[str, tuple[str, str]], base: Config, build: Callable[[Config], Updates | Loop], repeats: int
) -> list[Row]:
    """A row for each knob: both sides in turns, in this process unless it can't be undone there; or a reason."""
    rows: list[Row] = []
    console = Console(stderr=True)
    for name, (off, on) in knobs.items():
        row: Row = {"name": name, "off": off, "on": on, "remark": ""}
        rows.append(row)
        with console.status(f"{name}: {on or off}"), ExitStack() as stack:
            stack.enter_context(loops.process_state_restored())
            try:
                configs = {side: with_overrides(base, *row[side].split()) for side in ("on", "off")}
                if off and configs["on"] == configs["off"]:
                    row["remark"] = "it is off"
                    continue
                sides: dict[str, Callable[[], Turn]] = {}
                for side, config in configs.items():
                    if name in _APART:
                        sides[side] = stack.enter_context(apart(name, partial(_turn, partial(build, config))))
                        continue
                    trained = stack.enter_context(closing(build(config)))
                    sides[side] = trained.turn
                    if isinstance(trained, Updates):
                        row[f"bytes_{side}"] = trained.bytes()
                found = in_turns(sides, repeats, warm_up=1)
            except Exception as error:  # a compiler's, a kernel's: none of them ends the table
                known = isinstance(error, EffLoopError)
                row["remark"] = str(error) if known else f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
                continue
        with_it, without = (loops.per_s(found[side]) for side in ("on", "off"))
        row |= {"images_per_s": with_it, "without": without}
        row["ratios"] = [a / b for a, b in zip(with_it, without, strict=True)]
        row["gain"], row["spread"] = ratio_of(with_it, without)
    return rows


def _report(what: str, config: Config, rows: Sequence[Row], repeats: int, typed: Column, data: str = "") -> Report:
    device = gpu.find_device(config.device)
    name = gpu.name(device)
    facts = {"what": what, **loops.facts(config), "device": name, "repeats": repeats, "data": data}
    title = f"{facts['model']}, {config.batch_size} images of {config.size} pixels on {name} ({facts['cores']} cores)"
    title += f", engine={config.engine.name}, {num_workers(config)} workers" * bool(data)
    return Report(
        facts=facts,
        rows=rows,
        columns=[
            *(Column("name", "knob"), typed, Column("images_per_s", "images/s"), Column("without", "without")),
            *(Column("gain", "gain", "{:.2f}"), Column("spread", "±", "{:.2f}")),
            *(Column("bytes_on", "MB", unit=1e6), Column("bytes_off", "without", unit=1e6), Column("remark", "remark")),
        ],
        title="\n".join(filter(None, (data, f"{title}, torch {torch.__version__}; turns of each: {repeats}"))),
        notes=[
            "medians; gain: images/s with it over images/s without, median of all turns ± median deviation; "
            "nothing: the same config twice"
        ],
    )
