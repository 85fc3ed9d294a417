"""`bench what=ablate`: what each thing that makes a run fast, or good, is worth: everything on but one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from effloop import config as configs
from effloop.assemble.resolve import num_workers
from effloop.bench.ablate_tables import print_ablations
from effloop.bench.interleave import scratch_folder
from effloop.bench.loop_sides import LoopSide, compare_loops, compare_loops_apart, train_scores
from effloop.bench.step import check_knobs, facts, gain_of, neutral_overrides, reason_of
from effloop.bench.step_sides import process_state_restored
from effloop.config import Config
from effloop.data.decode import DecodeConfig
from effloop.errors import ConfigError
from effloop.runs.compare import format_value


@dataclass(frozen=True)
class Ablation:
    """One thing that is switched off.

    Attributes:
        off: overrides that do it, the first as users type it.
        unavailable: why there is nothing to switch off, or it changes nothing here; empty where there is.
        exact: whether the model sees the same images without it, to the bit, so that its score is the same.
        apart: whether it can't be undone in a process.
    """

    off: tuple[str, ...]
    unavailable: str = ""
    exact: bool = False
    apart: bool = False


def ablate(
    config: Config, repeats: int, *, knobs: str, seeds: str, work: str, overrides: Sequence[str]
) -> dict[str, Any]:
    """Images/s of the training loop as configured, and with one thing after the other switched off.

    Loading and steps, some batches in each turn, without a log or checkpoints. `nothing` is the same config twice and
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
    check_knobs(knobs, [*ablations(config)])
    count = _parse_seeds(seeds) if any(word.startswith("epochs=") for word in overrides) else 0
    plain = configs.to_dict(config)
    base = configs.from_dict(plain, [*neutral_overrides(config), "profile=none"], "the config")
    console = Console(stderr=True)
    with scratch_folder(work) as scratch, process_state_restored():
        with closing(LoopSide(base, scratch, repeats)) as on:
            every = ablations(base)
            names = every if knobs == "all" else dict.fromkeys(knobs.split(","))
            rows = []
            for name in names:
                with console.status(f"{name}: {' '.join(every[name].off)}"):
                    rows.append(_row(name, every[name], base, on, scratch))
        score = {"epochs": config.epochs, "seeds": count, "score": config.checkpoint.best_by}
        result = {**_facts(base, on), "repeats": repeats, **score, "rows": rows}
        if count:
            _add_scores(result, every, config, scratch, console)
    print_ablations(result)
    return result


def _parse_seeds(word: str) -> int:
    if not (word.isascii() and word.isdigit()) or int(word) < 1:
        raise ConfigError(f"seeds: '{word}' is not allowed; set a whole number above 0")
    return int(word)


def _facts(base: Config, on: LoopSide) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "what": "ablate",
        **facts(base, on.trainer.parallel.device),
        "data": on.trainer.train.describe(),
        "engine": base.engine.name,
        "num_workers": num_workers(base),
        "batches": on.batches,
    }


def ablations(config: Config) -> dict[str, Ablation]:
    """All of them by name, in the order in which an image meets them; and those that change what is learned."""
    decode = [f"decode.{each.name}={format_value(getattr(config.decode, each.name))}" for each in fields(DecodeConfig)]
    workers, threads = num_workers(config), torch.get_num_threads()
    none = "" if workers else "nothing is loaded ahead, as num_workers is 0"
    inline = none or ("it is what num_workers=0 does" if config.engine.name in ("threads", "processes") else "")
    one = none or ("there is one worker" if workers == 1 else "")
    no_gpu = "" if torch.cuda.is_available() and config.device != "cpu" else "without a GPU it changes nothing"
    return {
        "nothing": Ablation((), exact=True),
        "cache": _switch(config, "data.cache", "none", exact=True),
        "decoder": _switch(config, "decode", "pillow", *decode[1:]),
        "region": _switch(config, "decode.region", "false", exact=True),
        "dct_scaling": _switch(config, "decode.dct_scaling", "false"),
        "resize": _switch(config, "augment.resize", "exact"),
        "device": _switch(config, "augment.device", "cpu"),
        "workers": Ablation(("num_workers=1",), one, exact=True),
        "overlap": Ablation(("num_workers=0",), none, exact=True),
        "engine": Ablation(("engine=inline",), inline, exact=True),
        "prefetch": _switch(config, "engine.prefetch", "1", unavailable=none, exact=True),
        "threads": Ablation(("threads=1",), "" if threads > 1 else "there is one thread", apart=True),
        "channels_last": _switch(config, "channels_last", "false"),
        "compile": _switch(config, "compile", "false"),
        "precision": _switch(config, "precision", "fp32", "amp=null"),
        "cudnn_benchmark": Ablation(
            ("cudnn_benchmark=false",),
            no_gpu or ("" if config.cudnn_benchmark is not False and not config.deterministic else "it is off"),
            apart=True,
        ),
        "fused": _switch(config, "optim.fused", "null"),
        "reuse_memory": _switch(config, "reuse_memory", "false", exact=True, apart=True),
        "checkpointing": _switch(config, "model.checkpointing", "false"),
        "freeze": _switch(config, "model.freeze", "[]"),
        "progressive": _switch(config, "progressive", "[]"),
        "ema": _switch(config, "optim.ema", "0"),
        "label_smoothing": _switch(config, "task.label_smoothing", "0"),
        "mixup": _switch(config, "augment.mixup", "0"),
        "cutmix": _switch(config, "augment.cutmix", "0"),
        "distill": _switch(config, "distill.teacher", "null"),
    }


def _switch(config: Config, key: str, off: str, *more: str, unavailable: str = "", **flags: bool) -> Ablation:
    """One that is a key of the config; `more` are overrides that go with it."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    value, without = _plain(value), yaml.safe_load(off)
    is_off = value == without or not (value or without)
    return Ablation((f"{key}={off}", *more), unavailable or ("it is off" if is_off else ""), **flags)


def _plain(value: Any) -> Any:
    """A value as YAML has it; a part is its name."""
    return value.value if isinstance(value, Enum) else getattr(value, "name", value)


def _row(name: str, knob: Ablation, base: Config, on: LoopSide, scratch: Path) -> dict[str, Any]:
    """A knob's row of the result."""
    row = {"knob": name, "off": " ".join(knob.off[:1]), "reason": knob.unavailable}
    if knob.unavailable:
        return row
    try:
        plain = configs.to_dict(base)
        off = configs.from_dict(plain, [*knob.off, "data.check=0"], "the config")
        if knob.apart:
            found = compare_loops_apart(base, off, on.turns, scratch, on.batches)
        else:
            found = compare_loops(on, off, on.turns, scratch)
    except Exception as error:  # a compiler's, a kernel's: none of them ends the table
        return row | {"reason": reason_of(error)}
    return row | gain_of(found)


def _add_scores(
    result: dict[str, Any], every: Mapping[str, Ablation], config: Config, scratch: Path, console: Console
) -> None:
    """Train whole runs with and without each knob that may change the score."""
    plain, seeds = configs.to_dict(config), result["seeds"]
    alone = ["parallel=none", "record=none", "checkpoint=none", "profile=none", "resume=null", "data.check=0"]
    own = [f"checkpoint.best_by={result['score']}"]
    rows = [row for row in result["rows"] if not row["reason"] and not every[row["knob"]].exact]
    on: list[float] = []
    for row in rows:
        with console.status(f"{row['knob']}: {seeds} runs of {config.epochs} epochs"):
            try:
                on = on or train_scores(configs.from_dict(plain, [*alone, *own], "the config"), seeds, scratch)
                knob = [*alone, *own, *every[row["knob"]].off]
                off = train_scores(configs.from_dict(plain, knob, "the config"), seeds, scratch)
            except Exception as error:
                row["remark"] = reason_of(error)
                continue
        row |= {"scores": {"on": on, "off": off}}
