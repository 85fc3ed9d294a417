"""`bench what=loop`, `step`, `ablate`: what `Trainer` costs, and what each key of a run gains."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from rich.console import Console
from torch import nn

import effloop
from effloop import config as configs
from effloop.assemble.model import seconds_of
from effloop.assemble.resolve import num_workers
from effloop.assemble.trainer import build_trainer
from effloop.batch import Batch, ImageSize, Preview
from effloop.checkpoint import CheckpointConfig, rng
from effloop.config import Config
from effloop.data.decode import DecodeConfig
from effloop.errors import ConfigError, EffLoopError
from effloop.measure.loops import (
    Loop,
    Updates,
    alone,
    loop_of,
    per_s,
    process_state_restored,
    turns_apart,
    updates_of,
)
from effloop.measure.turns import in_turns, print_table, ratio_of, scratch_folder
from effloop.registry import choices
from effloop.report.figures import BarPanel, plot_bars, write_csv
from effloop.runs.compare import format_value
from effloop.system.hardware import available_cores
from effloop.train.trainer import Trainer

_NUM_BATCHES = 20  # of an epoch of what=loop: many short epochs
_MAX_RUNS = 2  # rounds at most where each side is a whole training, of 10 s and more
_RUN_TIMEOUT_S = 600  # longer than any run on the embedded photographs should take
_EPOCHS = {"cpu": 2, "cuda": 20}
"""Epochs of such a run: a GPU's first step takes seconds, in which it could process the photographs many times."""


@dataclass
class Preloaded:
    """Batches in memory, as a `BatchStream`."""

    batches: list[Batch]
    global_batch: int

    def __len__(self) -> int:
        return len(self.batches)

    def describe(self) -> str:
        return f"{len(self)} batches in memory"

    def epoch(self, epoch: int, samples_seen: int = 0) -> Iterable[Batch]:
        del epoch
        return self.batches[samples_seen // self.global_batch :]

    def preview(self, num_samples: int, num_epochs: int, most: Callable[[ImageSize], int]) -> Preview:
        del num_samples, num_epochs, most
        return Preview(np.empty((0, 0, 1, 1, 3), np.uint8), rows=(), columns=())

    def close(self) -> None:
        pass


def bare_epoch(trainer: Trainer, batches: Sequence[Batch]) -> None:
    """The shortest PyTorch loop with the trainer's model, optimizer and loss."""
    trainer.model.train()
    for batch in batches:
        trainer.optimizer.zero_grad()
        with trainer.precision.autocast():
            loss = trainer.task.loss(trainer.model(batch.images), batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        trainer.optimizer.step()
        trainer.schedule.step()


def loop(config: Config, repeats: int) -> dict[str, Any]:
    """Seconds of a training epoch by `Trainer` and by a bare loop, on batches in memory.

    Everything that a run does in an epoch is on: meters, log, metrics.jsonl, TensorBoard, timers.
    """
    config.record.console = False  # type: ignore[attr-defined]
    config.checkpoint = CheckpointConfig("none", config.checkpoint.best_by)
    with tempfile.TemporaryDirectory() as folder:
        # One model for both: two equal ones differ by up to 5 %, depending on where their memory is.
        trainer = build_trainer(config, run_dir=Path(folder) / "run")
        batches = list(itertools.islice(trainer.train.epoch(0), _NUM_BATCHES))
        trainer.train.close()
        trainer.train = Preloaded(batches, len(batches[0]))

        def trainer_epoch() -> None:
            trainer.progress.samples_seen = 0
            trainer.train_epoch(batches)

        def seeded_seconds(epoch: Callable[[], None]) -> float:
            rng.seed_all(0)
            return seconds_of(epoch)

        bare = partial(bare_epoch, trainer, batches)
        epochs: dict[str, Callable[[], None]] = {"Trainer": trainer_epoch, "bare": bare}
        with trainer.recorder:
            sides = {name: partial(seeded_seconds, epoch) for name, epoch in epochs.items()}
            seconds = in_turns(sides, repeats, warm_up=1)
    ours, theirs = seconds["Trainer"], seconds["bare"]
    ratios = {
        "ratio_of_medians": statistics.median(ours) / statistics.median(theirs),
        "ratio_of_best": min(ours) / min(theirs),
        "median_of_ratios": ratio_of(ours, theirs)[0],
    }
    rows = [[name, f"{statistics.median(values):.3f}", f"{min(values):.3f}"] for name, values in seconds.items()]
    rows.append(["Trainer / bare", f"{ratios['ratio_of_medians']:.3f}", f"{ratios['ratio_of_best']:.3f}"])
    title = f"an epoch of {len(batches)} batches in memory, {repeats} times each, alternating"
    print_table(("loop", "median s", "best s"), rows, left=("loop",), title=title)
    facts = {"batch_size": config.batch_size, "image_size": config.image_size, "model": config.model.name}
    return {"what": "loop", "batches": len(batches), **facts, "seconds": seconds, **ratios}


@dataclass(frozen=True)
class Knob:
    """One option, measured off and on.

    Attributes:
        off, on: overrides of the config for each side, the first as users type it.
        unavailable: why it can't be measured or changes nothing here; empty where it can.
        apart: whether it can't be undone in a process.
        runs: whether the sides are whole runs.
        exact: whether the model sees the same images either way, to the bit, so that its score is the same.
    """

    off: tuple[str, ...] = ()
    on: tuple[str, ...] = ()
    unavailable: str = ""
    apart: bool = False
    runs: bool = False
    exact: bool = False


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
    base = alone(config, "record=none")
    _check_knobs(knobs, [*_step_knobs(base, nn.Identity(), torch.device("cpu"))])
    with scratch_folder(work) as scratch, process_state_restored():
        first = Updates(base, scratch).trainer
        device = first.parallel.device
        every = _step_knobs(base, first.model, device)
        del first

        def compared(knob: Knob) -> dict[str, Any]:
            if knob.runs:
                return _compare_runs(knob, base, overrides, min(repeats, _MAX_RUNS), scratch)
            with process_state_restored():
                return _compare_updates(_sides(base, knob), repeats, scratch, apart=knob.apart)

        result = {"what": "step", **_facts(base, device), "repeats": repeats}
        result["rows"] = _rows(every, knobs, compared, lambda knob: knob.on)
    _show_step(result)
    return result


def ablate(
    config: Config, repeats: int, *, knobs: str, seeds: str, work: str, overrides: Sequence[str]
) -> dict[str, Any]:
    """Images/s of the training loop as configured, and with one thing after the other switched off.

    Loading and steps, a second in each turn, without a log or checkpoints. `nothing` is the same config twice and
    shows by how much two equal ones differ here. What is off already is a row with the reason.

    Args:
        config: with everything on.
        repeats: turns of each side.
        knobs: names with commas between, or `all`.
        seeds: with `epochs=N` among the overrides, how many runs of N epochs give each side's score, of what may
            change it.
        work: where the run folders are meanwhile; empty is the system's place for temporary files.
        overrides: what the config was composed from.

    Raises:
        ConfigError: no such knob, or the config itself can't be trained.
        DataError: its data can't be read.
    """
    _check_knobs(knobs, [*ablations(config)])
    if not (seeds.isascii() and seeds.isdigit()) or int(seeds) < 1:
        raise ConfigError(f"seeds: '{seeds}' is not allowed; set a whole number above 0")
    count = int(seeds) if any(word.startswith("epochs=") for word in overrides) else 0
    base = alone(config, "record=none")
    with scratch_folder(work) as scratch, process_state_restored():
        with closing(Loop(base, scratch, repeats)) as on:
            every = ablations(base)

            def compared(knob: Knob) -> dict[str, Any]:
                off = configs.from_dict(configs.to_dict(base), [*knob.off, "data.check=0"], "the config")
                if knob.apart:
                    builds = {
                        name: partial(loop_of, each, scratch, repeats) for name, each in (("on", base), ("off", off))
                    }
                    return _gain({name: per_s(each) for name, each in turns_apart(builds, repeats)[0].items()})
                with process_state_restored(), closing(Loop(off, scratch, repeats)) as other:
                    turns = in_turns({"on": on.turn, "off": other.turn}, repeats, warm_up=1)
                return _gain({name: per_s(each) for name, each in turns.items()})

            rows = _rows(every, knobs, compared, lambda knob: knob.off[:1])
            facts = {**_facts(base, on.trainer.parallel.device), "data": on.trainer.train.describe()}
        loading = {"engine": base.engine.name, "num_workers": num_workers(base), "repeats": repeats}
        score = {"epochs": config.epochs, "seeds": count, "score": config.checkpoint.best_by}
        result = {"what": "ablate", **facts, **loading, **score, "rows": rows}
        if count:
            _add_scores(result, every, config, scratch)
    _show_ablate(result)
    return result


def _check_knobs(knobs: str, names: list[str]) -> None:
    """Refuse unknown names before anything is built."""
    for name in knobs.split(",") if knobs != "all" else ():
        if name not in names:
            raise ConfigError(f"knobs: no knob '{name}'; {choices(name, ['all', *names])}")


def _facts(config: Config, device: torch.device) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "model": getattr(config.model, "arch", config.model.name),
        "batch_size": config.batch_size,
        "image_size": config.image_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cores": available_cores(),
        "torch": torch.__version__,
    }


def _rows(
    every: Mapping[str, Knob],
    knobs: str,
    compared: Callable[[Knob], dict[str, Any]],
    switch: Callable[[Knob], Sequence[str]],
) -> list[dict[str, Any]]:
    """A row of the result for each knob that is asked for; one that fails has the reason."""
    rows, console = [], Console(stderr=True)
    for name in every if knobs == "all" else dict.fromkeys(knobs.split(",")):
        knob = every[name]
        row = {"knob": name, "off": " ".join(knob.off), "on": " ".join(knob.on), "reason": knob.unavailable}
        if not knob.on:
            row |= {"off": " ".join(switch(knob))}
        if not knob.unavailable:
            with console.status(f"{name}: {' '.join(switch(knob))}"):
                try:
                    row |= compared(knob)
                except Exception as error:  # a compiler's, a kernel's: none of them ends the table
                    row["reason"] = _reason(error)
        rows.append(row)
    return rows


def _reason(error: Exception) -> str:
    words = " ".join(str(error).split())
    return str(error) if isinstance(error, EffLoopError) else f"{type(error).__name__}: {words[:160]}"


def _gain(images_per_s: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """What a row has of its two sides' turns: `images_per_s`, and the median ratio, `gain`, with its `spread`."""
    gain, spread = ratio_of(images_per_s["on"], images_per_s["off"])
    return {"images_per_s": images_per_s, "gain": gain, "spread": spread if len(images_per_s["on"]) > 1 else None}


def _sides(base: Config, knob: Knob) -> dict[str, Config]:
    plain = configs.to_dict(base)
    return {name: configs.from_dict(plain, getattr(knob, name), "the config") for name in ("off", "on")}


def _compare_updates(sides: Mapping[str, Config], repeats: int, scratch: Path, *, apart: bool) -> dict[str, Any]:
    """Updates of both sides, in this process, where they share everything but model and optimizer, or in two."""
    if apart:
        turns, held = turns_apart({name: partial(updates_of, each, scratch) for name, each in sides.items()}, repeats)
        memory, remark = "of two processes: held by each", "two processes, in turns"
        sizes: Mapping[str, float] = held
    else:
        here = {name: Updates(config, scratch) for name, config in sides.items()}
        turns = in_turns({name: side.turn for name, side in here.items()}, repeats)
        sizes = {name: float(side.bytes()) for name, side in here.items()}
        on = here["on"].trainer
        memory = "an update's peak on the GPU" if on.parallel.device.type == "cuda" else "kept from forward to backward"
        remark = " ".join("; ".join(note for note in on.notes if note.startswith("compile ")).split())
    rates = {name: per_s(each) for name, each in turns.items()}
    return {**_gain(rates), "bytes": sizes, "memory": memory, "remark": remark}


def _compare_runs(knob: Knob, base: Config, overrides: Sequence[str], repeats: int, scratch: Path) -> dict[str, Any]:
    """Both sides as whole runs from the command line; images/s are those of their summaries, loading included."""
    common = ["data=embedded", "data.root=null", "progressive=[]", "resume=null", "checkpoint=none"]
    common += ["record=run", "record.console=false", "record.tensorboard=false", *resolved_overrides(base)]
    common += [f"epochs={_EPOCHS['cuda' if torch.cuda.is_available() and base.device != 'cpu' else 'cpu']}"]
    sides = {name: partial(run_apart, [*overrides, *common, *getattr(knob, name)], scratch) for name in ("on", "off")}
    remark = "whole runs, loading included"
    return {**_gain(in_turns(sides, repeats)), "bytes": {}, "memory": "", "remark": remark}  # what may fail comes first


def resolved_overrides(base: Config) -> list[str]:
    """Overrides that set what may have been `auto` as it is in the config."""
    values = {key: getattr(base, key) for key in ("compile", "channels_last", "cudnn_benchmark")}
    return [f"{key}={'null' if value is None else str(value).lower()}" for key, value in values.items()]


def run_apart(overrides: Sequence[str], scratch: Path) -> float:
    """Images/s of one training from the command line.

    Raises:
        ConfigError: it failed; the message is its last line.
    """
    folder = Path(tempfile.mkdtemp(dir=scratch)) / "run"
    paths = [str(Path(effloop.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "effloop", "train", *overrides, f"out='{folder.parent}'", f"run={folder.name}"]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_RUN_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"a run took more than {_RUN_TIMEOUT_S} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise ConfigError(lines[-1].removeprefix("effloop: "))
    return float(json.loads((folder / "summary.json").read_text())["images_per_s"])


def _step_knobs(config: Config, model: nn.Module, device: torch.device) -> dict[str, Knob]:
    """All knobs of the step by name, for this config's model on this device."""

    def switch(key: str, off: str, on: str, *both: str, **facts: Any) -> Knob:
        return Knob((f"{key}={off}", *both), (f"{key}={on}", *both), **facts)

    half, group = config.batch_size // 2, config.accumulate
    small = ImageSize(*(max(1, side // 2) for side in config.size)).word
    even, halved = f"batch_size={2 * half}", f"batch_size={half}"
    single = "" if half else "batch_size: a single image can't be halved"
    no_gpu = "" if device.type == "cuda" else "without a GPU it changes nothing"
    frozen = ",".join(first_half(model))
    whole = "" if frozen else "the model has no parts of which some could be frozen"
    both_ranks = ("parallel=ddp", "parallel.processes=2", halved)
    return {
        "nothing": Knob(),
        "channels_last": switch("channels_last", "false", "true"),
        "compile": switch("compile", "false", "true"),
        **{name: switch("precision", "fp32", name) for name in ("tf32", "bf16", "fp16", "amp")},
        # What torch has once chosen for a shape, either way, it keeps.
        "cudnn_benchmark": switch(
            *("cudnn_benchmark", "false", "true"), "deterministic=false", unavailable=no_gpu, apart=True
        ),
        # cuBLAS reads the size of its workspace when it starts.
        "deterministic": switch("deterministic", "false", "true", "cudnn_benchmark=null", apart=True),
        "fused": switch("optim.fused", "null", "true"),
        "ema": switch("optim.ema", "0", "0.999"),
        "max_grad_norm": switch("max_grad_norm", "null", "1"),
        "checkpointing": switch("model.checkpointing", "false", "true"),
        "accumulate": Knob((even,), (f"accumulate={2 * group}", halved), unavailable=single),
        "progressive": switch("progressive", "[]", f"[{small}]"),
        "freeze": switch("model.freeze", "[]", f"[{frozen}]", unavailable=whole),
        "decay_norm_and_bias": switch("optim.decay_norm_and_bias", "true", "false"),
        "reuse_memory": switch("reuse_memory", "false", "true", apart=True),
        "ddp": Knob(("parallel=none", even), both_ranks, unavailable=single, runs=True),
    }


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
    """What can be switched off, in the order in which an image meets it; and what changes what is learned."""

    def switch(key: str, off: str, *more: str, unavailable: str = "", **facts: Any) -> Knob:
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name, None)
        value = value.value if isinstance(value, Enum) else getattr(value, "name", value)  # a part is its name
        without = yaml.safe_load(off)
        is_off = value == without or not (value or without)
        return Knob((f"{key}={off}", *more), unavailable=unavailable or "it is off" * is_off, **facts)

    decode = [f"decode.{each.name}={format_value(getattr(config.decode, each.name))}" for each in fields(DecodeConfig)]
    workers, threads = num_workers(config), torch.get_num_threads()
    none = "" if workers else "nothing is loaded ahead, as num_workers is 0"
    inline = none or ("it is what num_workers=0 does" if config.engine.name in ("threads", "processes") else "")
    one = none or ("there is one worker" if workers == 1 else "")
    no_gpu = "" if torch.cuda.is_available() and config.device != "cpu" else "without a GPU it changes nothing"
    chosen = "" if config.cudnn_benchmark is not False and not config.deterministic else "it is off"
    return {
        "nothing": Knob(exact=True),
        "cache": switch("data.cache", "none", exact=True),
        "decoder": switch("decode", "pillow", *decode[1:]),
        "region": switch("decode.region", "false", exact=True),
        "dct_scaling": switch("decode.dct_scaling", "false"),
        "resize": switch("augment.resize", "exact"),
        "device": switch("augment.device", "cpu"),
        "workers": Knob(("num_workers=1",), unavailable=one, exact=True),
        "overlap": Knob(("num_workers=0",), unavailable=none, exact=True),
        "engine": Knob(("engine=inline",), unavailable=inline, exact=True),
        "prefetch": switch("engine.prefetch", "1", unavailable=none, exact=True),
        "threads": Knob(("threads=1",), unavailable="" if threads > 1 else "there is one thread", apart=True),
        "channels_last": switch("channels_last", "false"),
        "compile": switch("compile", "false"),
        "precision": switch("precision", "fp32", "amp=null"),
        "cudnn_benchmark": Knob(("cudnn_benchmark=false",), unavailable=no_gpu or chosen, apart=True),
        "fused": switch("optim.fused", "null"),
        "reuse_memory": switch("reuse_memory", "false", exact=True, apart=True),
        "checkpointing": switch("model.checkpointing", "false"),
        "freeze": switch("model.freeze", "[]"),
        "progressive": switch("progressive", "[]"),
        "ema": switch("optim.ema", "0"),
        "label_smoothing": switch("task.label_smoothing", "0"),
        "mixup": switch("augment.mixup", "0"),
        "cutmix": switch("augment.cutmix", "0"),
        "distill": switch("distill.teacher", "null"),
    }


def _add_scores(result: dict[str, Any], every: Mapping[str, Knob], config: Config, scratch: Path) -> None:
    """Train whole runs with and without each knob that may change the score."""
    plain, seeds, console = configs.to_dict(config), result["seeds"], Console(stderr=True)
    own = ["parallel=none", "record=none", "checkpoint=none", "profile=none", "resume=null", "data.check=0"]
    own += [f"checkpoint.best_by={result['score']}", f"eval_every={config.epochs}"]

    def scores(off: Sequence[str]) -> list[float]:
        """The validation score after whole runs, with as many seeds from the config's on."""
        found = []
        for number in range(seeds):
            run = configs.from_dict(plain, [*own, *off, f"seed={config.seed + number}"], "the config")
            with process_state_restored():
                trainer = build_trainer(run, run_dir=Path(tempfile.mkdtemp(dir=scratch)) / "run")
                found.append(trainer.fit()[trainer.checkpoints.meter.name])
        return found

    on: list[float] = []
    for row in result["rows"]:
        knob = every[row["knob"]]
        if row["reason"] or knob.exact:
            continue
        with console.status(f"{row['knob']}: {seeds} runs of {config.epochs} epochs"):
            try:
                on = on or scores(())
                row["scores"] = {"on": on, "off": scores(knob.off)}
            except Exception as error:
                row["remark"] = _reason(error)


def _speed_cells(row: Mapping[str, Any], sides: Sequence[str]) -> list[str]:
    speed = [f"{statistics.median(row['images_per_s'][side]):,.0f}" for side in sides]
    return [*speed, f"{row['gain']:.2f}" + ("" if row["spread"] is None else f" ± {row['spread']:.2f}")]


def _show_step(result: Mapping[str, Any]) -> None:
    def cells(row: Mapping[str, Any]) -> list[str]:
        if row["reason"]:
            return [*["-"] * 5, row["reason"]]
        memory = [f"{row['bytes'][side] / 1e6:,.0f}" if row["bytes"] else "" for side in ("off", "on")]
        return [*_speed_cells(row, ("off", "on")), *memory, row["remark"]]

    print_table(
        ("knob", "override", "images/s off", "on", "gain", "MB off", "on", "remark"),
        [[row["knob"], row["on"], *cells(row)] for row in result["rows"]],
        left=("knob", "override", "remark"),
        min_width=120,
        title=f"{result['model']}, {result['batch_size']} images of {ImageSize.of(result['image_size'])} pixels on "
        f"{result['device']} ({result['cores']} cores), torch {result['torch']}; turns of each: {result['repeats']}",
    )
    memory = "; ".join(dict.fromkeys(row["memory"] for row in result["rows"] if row.get("memory")))
    print("medians; gain: images/s with it over images/s without, median of all turns ± median deviation")
    print(f"MB: {memory or 'not counted'}")


def _show_ablate(result: Mapping[str, Any]) -> None:
    def mean(values: Sequence[float]) -> str:
        return f"{statistics.fmean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else "")

    def cells(row: Mapping[str, Any]) -> list[str]:
        if row["reason"]:
            return ["-"] * (3 + len(scored))
        speed = _speed_cells(row, ("on", "off"))
        if "scores" not in row:
            return [*speed, *[""] * len(scored)]
        on, off = row["scores"]["on"], row["scores"]["off"]
        return [*speed, mean(on), mean(off), mean([a - b for a, b in zip(on, off, strict=True)])]

    scored = [result["score"], "without it", "worth "] if result["seeds"] else []
    print_table(
        ("knob", "switched off by", "images/s", "without", "worth", *scored, "remark"),
        [[row["knob"], row["off"], *cells(row), row["reason"] or row.get("remark", "")] for row in result["rows"]],
        left=("knob", "switched off by", "remark"),
        min_width=150 if scored else 120,
        title=f"{result['data']}\n{_workload(result)}\nturns of each: {result['repeats']}",
    )
    print("medians; worth: images/s with it over images/s without, median of all turns ± median deviation")
    if result["seeds"]:
        print(
            f"{result['score']} after {result['epochs']} epochs, mean ± standard deviation of {result['seeds']} seeds; "
            "worth: with it less without, seed by seed"
        )


def _workload(result: Mapping[str, Any]) -> str:
    size = ImageSize.of(result["image_size"])
    return (
        f"{result['model']}, {result['batch_size']} images of {size} pixels on {result['device']} "
        f"({result['cores']} cores), engine={result['engine']}, {result['num_workers']} workers"
    )


def write_ablate_files(result: Mapping[str, Any], out: Path) -> None:
    """Write a result of `ablate` as CSV and as a plot, beside its JSON file `out`."""

    def flat(row: Mapping[str, Any]) -> dict[str, Any]:
        speed, scores = row.get("images_per_s"), row.get("scores")
        cells = {"knob": row["knob"], "off": row["off"], "reason": row["reason"] or row.get("remark", "")}
        cells |= {f"images_per_s_{side}": statistics.median(speed[side]) if speed else None for side in ("on", "off")}
        cells |= {"worth": row.get("gain"), "spread": row.get("spread")}
        for side in ("on", "off"):
            values = scores[side] if scores else []
            cells[f"score_{side}"] = statistics.fmean(values) if values else None
            cells[f"score_deviation_{side}"] = statistics.stdev(values) if len(values) > 1 else None
        return cells

    def bar(middle: Callable[[Sequence[float]], float], values: Sequence[float]) -> tuple[float, float, float]:
        return middle(values), min(values), max(values)

    write_csv(out.with_suffix(".csv"), [flat(row) for row in result["rows"]])
    timed = [row for row in result["rows"] if not row["reason"]]
    pairs = [zip(row["images_per_s"]["on"], row["images_per_s"]["off"], strict=True) for row in timed]
    worth = {"worth": [bar(statistics.median, [on / off for on, off in each]) for each in pairs]}
    title = f"worth in images/s\n{_workload(result)}"
    panels = [BarPanel(title, "with / without", "", [row["knob"] for row in timed], worth)]
    scored = [row for row in result["rows"] if "scores" in row]
    scores = {name: [bar(statistics.fmean, row["scores"][side]) for row in scored] for name, side in _WITH.items()}
    title = f"{result['score']} after {result['epochs']} epochs, {result['seeds']} seeds"
    panels.append(BarPanel(title, result["score"], "", [row["knob"] for row in scored], scores))
    if panels := [panel for panel in panels if panel.groups]:
        plot_bars(out.with_suffix(".png"), panels)


_WITH = {"with": "on", "without": "off"}
