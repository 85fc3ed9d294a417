"""`bench what=loop`, `step`, `ablate`: what `Trainer` costs, and what each key of a run gains."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from torch import nn

from effloop.assemble.environment import num_workers
from effloop.assemble.model import seconds_of
from effloop.batch import Batch, ImageSize
from effloop.checkpoint import rng
from effloop.config import Config
from effloop.config.overrides import key_of
from effloop.data.decode import DecodeConfig
from effloop.errors import EffLoopError
from effloop.measure import loops
from effloop.measure.benchmark import Column, Report, Row
from effloop.measure.loops import Loop, Updates
from effloop.measure.turns import Turn, apart, chosen, in_turns, ratio_of, scratch_folder
from effloop.runs.reader import format_value
from effloop.system.hardware import find_device
from effloop.train.trainer import Trainer

_NUM_BATCHES = 20  # of an epoch of what=loop: many short epochs


def _bare_epoch(trainer: Trainer, batches: Sequence[Batch]) -> None:
    """The shortest PyTorch loop with the trainer's model, optimizer and loss."""
    trainer.model.train()
    for batch in batches:
        trainer.optimizer.zero_grad()
        with trainer.precision.autocast():
            loss = trainer.task.loss(trainer.model(batch.images), batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        trainer.optimizer.step()
        trainer.schedule.step()


def loop(config: Config, repeats: int) -> Report:
    """Seconds of a training epoch by `Trainer` and by a bare loop, on batches in memory.

    Everything that a run does in an epoch is on: meters, log, metrics.jsonl, TensorBoard, timers.
    """
    config = loops.alone(config, "progressive=[]")
    with tempfile.TemporaryDirectory() as folder:
        # One model for both: two equal ones differ by up to 5 %, depending on where their memory is.
        trainer = loops.trainer_in(Path(folder), config)
        with closing(trainer.train), closing(trainer.val):
            trainer.train = loops.reloaded(trainer.train, config, 0, _NUM_BATCHES * config.batch_size)
            batches = list(trainer.train.epoch(0))
        trainer.train.close()

        def by_trainer() -> None:
            trainer.progress.samples_seen = 0
            trainer.train_epoch(batches)

        def seeded_seconds(epoch: Callable[[], None]) -> float:
            rng.seed_all(0)
            return seconds_of(epoch)

        sides = {"Trainer": partial(seeded_seconds, by_trainer)}
        sides["bare"] = partial(seeded_seconds, partial(_bare_epoch, trainer, batches))
        with trainer.recorder:
            seconds = in_turns(sides, repeats, warm_up=1)
    bare = seconds["bare"]
    rows = [
        {"name": name, "seconds": each, "best_s": min(each), "ratio": ratio_of(each, bare)[0]}
        | {"best_ratio": min(each) / min(bare)}
        for name, each in seconds.items()
    ]
    columns = [Column("name", "loop"), Column("seconds", "median s", "{:.3f}"), Column("best_s", "best s", "{:.3f}")]
    columns += [Column("ratio", "over bare", "{:.3f}"), Column("best_ratio", "best over best", "{:.3f}")]
    title = f"an epoch of {len(batches)} batches in memory, {repeats} times each, alternating"
    facts = {"what": "loop", "batches": len(batches), **loops.facts(config)}
    return Report(facts=facts, rows=rows, columns=columns, title=title, drawn={"seconds": "s"})


@dataclass(frozen=True)
class Knob:
    """One option, measured off and on.

    Attributes:
        off, on: overrides of the config for each side, the first as users type it.
        unavailable: why it can't be measured or changes nothing here; empty where it can.
        apart: whether it can't be undone in a process.
    """

    off: tuple[str, ...] = ()
    on: tuple[str, ...] = ()
    unavailable: str = ""
    apart: bool = False


def step(config: Config, repeats: int, *, knobs: str = "all", work: str = "") -> Report:
    """Images/s of training updates with each knob on and off, all else being as configured.

    Two trainers, built as for a run but as `alone` has it, take turns on batches in memory.

    Raises:
        ConfigError, DataError: no such knob, or the config itself can't be trained.
    """
    base = loops.alone(config, "record=none")
    names = chosen("knobs", knobs, step_knobs(base, nn.Identity()), "knob")
    with scratch_folder(work) as scratch, loops.process_state_restored():
        every = step_knobs(base, Updates.of(base, scratch).trainer.model)
        rows = _compared({name: every[name] for name in names}, base, partial(_updates, scratch), repeats)
    return _report("step", base, rows, repeats, Column("on", "override"))


def ablate(config: Config, repeats: int, *, knobs: str = "all", work: str = "") -> Report:
    """Images/s of the training loop as configured, and with one thing after the other switched off.

    Loading and steps, a second in each turn, without a log or checkpoints.

    Raises:
        ConfigError, DataError: no such knob, or the config itself can't be trained.
    """
    base = loops.alone(config, "record=none")
    every = ablations(base)
    names = chosen("knobs", knobs, every, "knob")
    with scratch_folder(work) as scratch, loops.process_state_restored():
        with closing(Loop(base, scratch)) as usual:  # raises what is wrong with the config
            data = usual.loader.describe()
        build = partial(_loop, scratch, repeats)
        rows = _compared({name: every[name] for name in names}, base, build, repeats)
    return _report("ablate", base, rows, repeats, Column("off", "switched off by"), data)


def _updates(scratch: Path, config: Config) -> Updates:
    return Updates.of(config, scratch)


def _loop(scratch: Path, repeats: int, config: Config) -> Loop:
    return Loop(config, scratch, repeats)


def _turn(build: Callable[[], Updates | Loop]) -> Callable[[], Turn]:
    """A side's turns in a process of its own."""
    return build().turn


def _compared(
    knobs: Mapping[str, Knob], base: Config, build: Callable[[Config], Updates | Loop], repeats: int
) -> list[Row]:
    """A row for each knob: both sides in turns, in this process unless it can't be undone there; or a reason."""
    rows: list[Row] = []
    console = Console(stderr=True)
    for name, knob in knobs.items():
        off = knob.off if knob.on else knob.off[:1]  # ablations keep the rest of a part that is replaced
        row: Row = {"name": name, "off": " ".join(off), "on": " ".join(knob.on), "remark": knob.unavailable}
        rows.append(row)
        if knob.unavailable:
            continue
        with console.status(f"{name}: {row['on'] or row['off']}"), ExitStack() as stack:
            stack.enter_context(loops.process_state_restored())
            try:
                sides: dict[str, Callable[[], Turn]] = {}
                for side in ("on", "off"):
                    made = partial(build, loops.with_overrides(base, *getattr(knob, side), "data.check=0"))
                    if knob.apart:
                        sides[side] = stack.enter_context(apart(name, partial(_turn, made)))
                        continue
                    trained = stack.enter_context(closing(made()))
                    sides[side] = trained.turn
                    if isinstance(trained, Updates):
                        row[f"bytes_{side}"] = trained.bytes()
                found = in_turns(sides, repeats, warm_up=1)
            except Exception as error:  # a compiler's, a kernel's: none of them ends the table
                known = isinstance(error, EffLoopError)
                row["remark"] = str(error) if known else f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
                continue
        on, without = (loops.per_s(found[side]) for side in ("on", "off"))
        row |= {"images_per_s": on, "without": without, "ratios": [a / b for a, b in zip(on, without, strict=True)]}
        row["gain"], row["spread"] = ratio_of(on, without)
    return rows


def _report(what: str, config: Config, rows: Sequence[Row], repeats: int, typed: Column, data: str = "") -> Report:
    device = find_device(config.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
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
        drawn={"ratios": "images/s with / without"},
    )


_OFF = """
decode=pillow decode.region=false decode.dct_scaling=false data.cache=none augment.device=cpu
engine=inline engine.prefetch=1 threads=1 channels_last=false compile=false precision=fp32 cudnn_benchmark=false
deterministic=false optim.fused=null max_grad_norm=null reuse_memory=false model.checkpointing=false model.freeze=[]
progressive=[] optim.ema=0 optim.decay_norm_and_bias=true task.label_smoothing=0 augment.mixup=0 augment.cutmix=0
"""
OFF = {
    **{key_of(word).rpartition(".")[2]: word for word in _OFF.split()},
    **{"workers": "num_workers=1", "overlap": "num_workers=0"},
}
"""Knob -> the override without it."""

_OF_THE_STEP = ("deterministic", "max_grad_norm", "decay_norm_and_bias")  # not in `ablate`
# What torch has once chosen for a shape it keeps; cuBLAS reads the size of its workspace at its start.
_APART = ("threads", "cudnn_benchmark", "deterministic", "reuse_memory")


def step_knobs(config: Config, model: nn.Module) -> dict[str, Knob]:
    """All knobs of the step by name, for this config's model."""
    half, group = config.batch_size // 2, config.accumulate
    small = ImageSize(*(max(1, side // 2) for side in config.size)).word
    frozen = ",".join(first_half(model))
    switches = {
        **dict.fromkeys(("channels_last", "compile", "deterministic", "reuse_memory", "cudnn_benchmark"), "true"),
        **{"fused": "true", "checkpointing": "true", "ema": "0.999", "max_grad_norm": "1"},
        **{"progressive": f"[{small}]", "freeze": f"[{frozen}]", "decay_norm_and_bias": "false"},
    }
    more = {"cudnn_benchmark": ("deterministic=false",), "deterministic": ("cudnn_benchmark=null",)}
    knobs = {"nothing": Knob()}
    for name in ("tf32", "bf16", "fp16", "amp"):
        knobs[name] = Knob((OFF["precision"],), (f"precision={name}",))
    for name, on in switches.items():
        both = more.get(name, ())
        knobs[name] = Knob((OFF[name], *both), (f"{key_of(OFF[name])}={on}", *both), apart=name in _APART)
    halves = (f"accumulate={2 * group}", f"batch_size={half}")
    single = "" if half else "batch_size: a single image can't be halved"
    knobs["accumulate"] = Knob((f"batch_size={2 * half}",), halves, single)
    lacking = {"cudnn_benchmark": _without_gpu(config)}
    lacking["freeze"] = "" if frozen else "the model has no parts of which some could be frozen"
    return knobs | {name: replace(knobs[name], unavailable=why) for name, why in lacking.items()}


def _without_gpu(config: Config) -> str:
    gpu = torch.cuda.is_available() and config.device != "cpu"
    return "" if gpu else "without a GPU it changes nothing"


def first_half(model: nn.Module) -> list[str]:
    """Names of the submodules that `freeze` turns off: `features`, or else the first half of them."""

    def trained_parts(module: nn.Module) -> dict[str, nn.Module]:
        return {name: each for name, each in module.named_children() if next(each.parameters(), None) is not None}

    prefix, parts = "", trained_parts(model)
    while len(parts) == 1:  # a wrapper of the model
        (name,) = parts
        prefix, parts = f"{prefix}{name}.", trained_parts(parts[name])
    names = ["features"] if "features" in parts else [*parts][: len(parts) // 2]
    return [f"{prefix}{name}" for name in names]


def ablations(config: Config) -> dict[str, Knob]:
    """What can be switched off, and why something can't."""
    decode = [f"decode.{each.name}={format_value(getattr(config.decode, each.name))}" for each in fields(DecodeConfig)]
    more = {"decode": decode[1:], "precision": ["amp=null"]}  # what else is chosen is kept
    workers = num_workers(config)
    off = ["nothing is loaded ahead, as num_workers is 0"] * (workers == 0)
    inline = config.engine.name in ("auto", "threads", "processes")
    tuned = config.cudnn_benchmark is not False and not config.deterministic
    lacking = {
        **dict.fromkeys(("workers", "overlap", "engine", "prefetch"), off),
        "workers": off or ["there is one worker"] * (workers == 1),
        "engine": off or ["it is what num_workers=0 does"] * inline,
        "threads": ["there is one thread"] * (torch.get_num_threads() == 1),
        "cudnn_benchmark": [_without_gpu(config)] if _without_gpu(config) else ["it is off"] * (not tuned),
    }
    knobs = {"nothing": Knob()}
    for name, word in OFF.items():
        if name in _OF_THE_STEP:
            continue
        key, _, without = word.partition("=")
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part, None)
        value = value.value if isinstance(value, Enum) else getattr(value, "name", value)  # a part is its name
        is_off = value == yaml.safe_load(without) or not (value or yaml.safe_load(without))
        reasons = lacking[name] if name in lacking else ["it is off"] * is_off
        knobs[name] = Knob((word, *more.get(name, ())), (), "".join(reasons), name in _APART)
    return knobs
