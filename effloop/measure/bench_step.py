"""`bench what=loop`, `step`, `ablate`: what `Trainer` costs, and what each key of a run gains."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from torch import nn

import effloop
from effloop import config as configs
from effloop.assemble.model import seconds_of
from effloop.assemble.resolve import num_workers
from effloop.batch import Batch, ImageSize
from effloop.checkpoint import rng
from effloop.config import Config
from effloop.data.decode import DecodeConfig
from effloop.errors import ConfigError, EffLoopError
from effloop.measure import loops
from effloop.measure.loops import Loop, Updates
from effloop.measure.turns import chosen, in_turns, print_table, ratio_of, scratch_folder, spread
from effloop.report.figures import Bar, BarPanel, plot_bars, write_csv
from effloop.runs.reader import format_value
from effloop.train.trainer import Trainer

_NUM_BATCHES = 20  # of an epoch of what=loop: many short epochs
_MAX_RUNS = 2  # rounds at most where each side is a whole training, of 10 s and more
_RUN_TIMEOUT_S = 600  # longer than any run on the embedded photographs should take
_EPOCHS = {"cpu": 2, "cuda": 20}
"""Epochs of such a run: a GPU's first step takes seconds, in which it could process the photographs many times."""

Row = dict[str, Any]


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


def loop(config: Config, repeats: int) -> dict[str, Any]:
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
    return {"what": "loop", "batches": len(batches), **loops.facts(config), "seconds": seconds, **ratios}


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


def step(
    config: Config, repeats: int, *, knobs: str = "all", work: str = "", overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Images/s of training updates with each knob on and off, all else being as configured.

    Two trainers, built as for a run but as `alone` has it, take turns on batches in memory; `nothing` has the same
    config on both sides and shows by how much two equal ones differ here. What can't be undone in a process is measured
    in one process for each side. `ddp` compares whole runs, of 2 ranks and of one process with the same global batch,
    on the embedded photographs, in 2 rounds at most. A knob that is unavailable is a row with the reason.

    Raises:
        ConfigError, DataError: no such knob, or the config itself can't be trained.
    """
    base = loops.alone(config, "record=none")
    names = chosen("knobs", knobs, _step_knobs(base, nn.Identity(), torch.device("cpu")), "knob")
    with scratch_folder(work) as scratch, loops.process_state_restored():
        first = Updates.of(base, scratch).trainer
        device = first.parallel.device
        every = _step_knobs(base, first.model, device)
        del first

        def compared(knob: Knob) -> Row:
            if knob.runs:
                return _compare_runs(knob, base, overrides, min(repeats, _MAX_RUNS), scratch)
            sides = {name: _with(base, getattr(knob, name)) for name in ("off", "on")}
            with loops.process_state_restored():
                return _compare_updates(sides, repeats, scratch, apart=knob.apart)

        rows = _rows({name: every[name] for name in names}, compared)
    result = {"what": "step", **_facts(base, device), "repeats": repeats, "rows": rows}
    _print(result, "on")
    return result


def ablate(
    config: Config,
    repeats: int,
    *,
    knobs: str = "all",
    seeds: int = 3,
    work: str = "",
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Images/s of the training loop as configured, and with one thing after the other switched off.

    Loading and steps, a second in each turn, without a log or checkpoints. `nothing` is the same config twice and
    shows by how much two equal ones differ here. What is off already is a row with the reason.

    With `epochs=N` among the overrides, as many runs of N epochs as there are `seeds` give each side's score, of what
    may change it.

    Raises:
        ConfigError, DataError: no such knob, or the config itself can't be trained.
    """
    names = chosen("knobs", knobs, ablations(config), "knob")
    count = seeds if any(word.startswith("epochs=") for word in overrides) else 0
    base = loops.alone(config, "record=none")
    every = {name: ablations(base)[name] for name in names}
    with scratch_folder(work) as scratch, loops.process_state_restored():
        with closing(Loop(base, scratch, repeats)) as on:

            def compared(knob: Knob) -> Row:
                off = _with(base, [*knob.off, "data.check=0"])
                if knob.apart:
                    builds = {"on": partial(Loop, base, scratch, repeats), "off": partial(Loop, off, scratch, repeats)}
                    turns, _ = loops.turns_apart(builds, repeats)
                else:
                    with loops.process_state_restored(), closing(Loop(off, scratch, repeats)) as other:
                        turns = in_turns({"on": on.turn, "off": other.turn}, repeats, warm_up=1)
                return _gain({name: loops.per_s(each) for name, each in turns.items()})

            rows = _rows(every, compared)
            facts = {**_facts(base, on.trainer.parallel.device), "data": on.trainer.train.describe()}
        score = {"epochs": config.epochs, "seeds": count, "score": config.checkpoint.best_by}
        result = {"what": "ablate", **facts, "repeats": repeats, **score, "rows": rows}
        if count:
            _add_scores(result, every, config, scratch)
    _print(result, "off")
    return result


def _with(config: Config, overrides: Iterable[str]) -> Config:
    return configs.from_dict(configs.to_dict(config), [*overrides], "the config")


def _facts(config: Config, device: torch.device) -> Row:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {**loops.facts(config), "device": name}


def _rows(knobs: Mapping[str, Knob], compared: Callable[[Knob], Row]) -> list[Row]:
    """A row of the result for each knob; one that fails has the reason."""
    rows, console = [], Console(stderr=True)
    for name, knob in knobs.items():
        off = knob.off if knob.on else knob.off[:1]  # ablations keep the rest of a part that is replaced
        row = {"knob": name, "off": " ".join(off), "on": " ".join(knob.on), "reason": knob.unavailable}
        if not knob.unavailable:
            with console.status(f"{name}: {' '.join(knob.on or off)}"):
                try:
                    row |= compared(knob)
                except Exception as error:  # a compiler's, a kernel's: none of them ends the table
                    row["reason"] = _reason(error)
        rows.append(row)
    return rows


def _reason(error: Exception) -> str:
    words = " ".join(str(error).split())
    return str(error) if isinstance(error, EffLoopError) else f"{type(error).__name__}: {words[:160]}"


def _gain(images_per_s: Mapping[str, Sequence[float]]) -> Row:
    """What a row has of its two sides' turns: `images_per_s`, and the median ratio, `gain`, with its `spread`."""
    gain, deviation = ratio_of(images_per_s["on"], images_per_s["off"])
    return {"images_per_s": images_per_s, "gain": gain, "spread": deviation if len(images_per_s["on"]) > 1 else None}


def _compare_updates(sides: Mapping[str, Config], repeats: int, scratch: Path, *, apart: bool) -> Row:
    """Updates of both sides, in this process, where they share everything but model and optimizer, or in two."""
    sizes: Mapping[str, int]
    if apart:
        turns, sizes = loops.turns_apart(
            {name: partial(Updates.of, each, scratch) for name, each in sides.items()}, repeats
        )
        memory, remark = "of two processes: held by each", "two processes, in turns"
    else:
        here = {name: Updates.of(config, scratch) for name, config in sides.items()}
        turns = in_turns({name: side.turn for name, side in here.items()}, repeats)
        sizes = {name: side.bytes() for name, side in here.items()}
        on = here["on"].trainer
        memory = "an update's peak on the GPU" if on.parallel.device.type == "cuda" else "kept from forward to backward"
        remark = " ".join("; ".join(note for note in on.notes if note.startswith("compile ")).split())
    rates = {name: loops.per_s(each) for name, each in turns.items()}
    return {**_gain(rates), "bytes": sizes, "memory": memory, "remark": remark}


def _compare_runs(knob: Knob, base: Config, overrides: Sequence[str], repeats: int, scratch: Path) -> Row:
    """Both sides as whole runs from the command line; images/s are those of their summaries, loading included."""
    words = [*overrides, "data=embedded", "data.root=null", "progressive=[]", "resume=null", "checkpoint=none"]
    words += ["record=run", "record.console=false", "record.tensorboard=false"]
    values = {key: getattr(base, key) for key in ("compile", "channels_last", "cudnn_benchmark")}  # none is `auto`
    words += [f"{key}={'null' if value is None else str(value).lower()}" for key, value in values.items()]
    words += [f"epochs={_EPOCHS['cuda' if torch.cuda.is_available() and base.device != 'cpu' else 'cpu']}"]
    # What may fail comes first.
    sides = {name: partial(run_apart, [*words, *getattr(knob, name)], scratch) for name in ("on", "off")}
    remark = "whole runs, loading included"
    return {**_gain(in_turns(sides, repeats)), "bytes": {}, "memory": "", "remark": remark}


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
    # What torch has once chosen for a shape, either way, it keeps; cuBLAS reads the size of its workspace at its start.
    benchmark = ("cudnn_benchmark", "false", "true", "deterministic=false")
    return {
        "nothing": Knob(),
        "channels_last": switch("channels_last", "false", "true"),
        "compile": switch("compile", "false", "true"),
        **{name: switch("precision", "fp32", name) for name in ("tf32", "bf16", "fp16", "amp")},
        "cudnn_benchmark": switch(*benchmark, unavailable=no_gpu, apart=True),
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
    inline = none or ("it is what num_workers=0 does" if config.engine.name in ("auto", "threads", "processes") else "")
    one = none or ("there is one worker" if workers == 1 else "")
    no_gpu = "" if torch.cuda.is_available() and config.device != "cpu" else "without a GPU it changes nothing"
    no_choice = "" if config.cudnn_benchmark is not False and not config.deterministic else "it is off"
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
        "cudnn_benchmark": Knob(("cudnn_benchmark=false",), unavailable=no_gpu or no_choice, apart=True),
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


def _add_scores(result: Mapping[str, Any], every: Mapping[str, Knob], config: Config, scratch: Path) -> None:
    """Train whole runs with and without each knob that may change the score."""
    seeds, console = result["seeds"], Console(stderr=True)
    own = ["parallel=none", "record=none", "checkpoint=none", "profile=none", "resume=null", "data.check=0"]
    own += [f"checkpoint.best_by={result['score']}", f"eval_every={config.epochs}"]

    def scores(off: Sequence[str]) -> list[float]:
        """The validation score after whole runs, with as many seeds from the config's on."""
        found = []
        for number in range(seeds):
            with loops.process_state_restored():
                trainer = loops.trainer_in(scratch, _with(config, [*own, *off, f"seed={config.seed + number}"]))
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


def _print(result: Mapping[str, Any], typed: str) -> None:
    """Print a result's table; `typed` is the side whose overrides are shown: `on` or `off`."""

    def mean(values: Sequence[float]) -> str:
        return f"{statistics.fmean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else "")

    def cells(row: Row) -> Iterator[str]:
        yield from (f"{statistics.median(row['images_per_s'][side]):,.0f}" for side in ("on", "off"))
        yield f"{row['gain']:.2f}" + ("" if row["spread"] is None else f" ± {row['spread']:.2f}")
        for side in sized:
            yield f"{row['bytes'][side] / 1e6:,.0f}" if row["bytes"] else ""
        if scored:
            scores = row.get("scores", {})
            yield from (mean(scores[side]) if scores else "" for side in ("on", "off"))
            yield mean([a - b for a, b in zip(scores["on"], scores["off"], strict=True)]) if scores else ""

    sized = ("on", "off") * any("bytes" in row for row in result["rows"])
    scored = [str(result.get("score")), "without", "worth"] * bool(result.get("seeds"))
    numbers = ["images/s", "without", "gain", *["MB", "without"] * bool(sized), *scored]
    rows = []
    for row in result["rows"]:
        own = ["-"] * len(numbers) if row["reason"] else [*cells(row)]
        rows.append([row["knob"], row[typed], *own, row["reason"] or row.get("remark", "")])
    title = f"{_workload(result)}, torch {result['torch']}; turns of each: {result['repeats']}"
    title = f"{result['data']}\n{title}" if "data" in result else title
    words = ("knob", "override" if typed == "on" else "switched off by", "remark")
    width = 150 if scored else 120
    print_table([*words[:2], *numbers, words[2]], rows, left=words, min_width=width, title=title)
    print("medians; gain: images/s with it over images/s without, median of all turns ± median deviation")
    if sized:
        found = dict.fromkeys(row["memory"] for row in result["rows"] if row.get("memory"))
        print(f"MB: {'; '.join(found) or 'not counted'}")
    if scored:
        print(
            f"{result['score']} after {result['epochs']} epochs, mean ± standard deviation of {result['seeds']} seeds; "
            "worth: with it less without, seed by seed"
        )


def _workload(result: Mapping[str, Any]) -> str:
    size, engine = ImageSize.of(result["image_size"]), ""
    if result["what"] == "ablate":
        engine = f", engine={result['engine']}, {result['num_workers']} workers"
    images = f"{result['model']}, {result['batch_size']} images of {size} pixels"
    return f"{images} on {result['device']} ({result['cores']} cores){engine}"


def write_ablate_files(result: Mapping[str, Any], out: Path) -> None:
    """Write a result of `ablate` as CSV and as a plot, beside its JSON file `out`."""
    table, sides = [], {"on": "with", "off": "without"}
    for row in result["rows"]:
        speed, scores = row.get("images_per_s"), row.get("scores", {})
        cells = {"knob": row["knob"], "off": row["off"], "reason": row["reason"] or row.get("remark", "")}
        cells |= {f"images_per_s_{side}": speed and statistics.median(speed[side]) for side in sides}
        cells |= {"worth": row.get("gain"), "spread": row.get("spread")}
        for side in sides:
            values = scores.get(side, [])
            cells[f"score_{side}"] = statistics.fmean(values) if values else None
            cells[f"score_deviation_{side}"] = statistics.stdev(values) if len(values) > 1 else None
        table.append(cells)
    write_csv(out.with_suffix(".csv"), table)

    bars, scored = [], []
    for row in result["rows"]:
        if not row["reason"]:
            on, off = (row["images_per_s"][side] for side in ("on", "off"))
            bars.append(Bar(row["knob"], "worth", spread([a / b for a, b in zip(on, off, strict=True)])))
        for side, values in row.get("scores", {}).items():
            scored.append(Bar(row["knob"], sides[side], (statistics.fmean(values), min(values), max(values))))
    panels = [BarPanel(f"worth in images/s\n{_workload(result)}", "with / without", "", bars)]
    title = f"{result['score']} after {result['epochs']} epochs, {result['seeds']} seeds"
    panels.append(BarPanel(title, str(result["score"]), "", scored))
    if panels := [panel for panel in panels if panel.bars]:
        plot_bars(out.with_suffix(".png"), panels)
