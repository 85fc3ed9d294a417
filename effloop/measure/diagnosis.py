"""The diagnosis of a run: its stages, the verdict, and the overrides that help, the best first."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from effloop.config.typed import key_of
from effloop.convert.reencode import Recipe
from effloop.data.source import DataConfig
from effloop.errors import PROGRAM
from effloop.measure.costs import Cost
from effloop.measure.measured import Measured
from effloop.measure.trial import Change
from effloop.registry import plugin_words
from effloop.runs.environment import effloop_version
from effloop.system.hardware import available_cores

_LOADING = ("storage", "decode", "augment", "batch")
_OVERHEAD = 0.25
"""Share of the time that evaluation or logging may take before they are the verdict: neither trains anything."""

_HELPS = 1.03
"""Gain below which an override isn't listed."""

_LISTED = 8

_BUSY = 0.2
"""Cores that other programs use from which the figures are doubtful."""


_INTERNAL = {"factor", "then", "recipe"}


@dataclass(frozen=True)
class Override:
    """An override, and what it is predicted to bring.

    Attributes:
        override: words for the command line, or for `convert`.
        images_per_s: of the loop with it; None where it doesn't change the loop.
        gain: seconds of an epoch with its evaluation now, over those with it.
        why: a few words.
        exact: whether the same images are trained on, in the same precision.
        measured: images/s of the loop with it, if it was tried.
        learned: where the prediction was corrected by what was measured before; else None.
        factor: what the prediction was multiplied by for that.
        then: the override for the converted data, where it is a conversion.
        recipe: how that re-encodes the images.
    """

    override: str
    images_per_s: float | None
    gain: float
    why: str
    exact: bool = True
    measured: float | None = None
    learned: str | None = None
    factor: float = 1.0
    then: str = ""
    recipe: Recipe | None = None

    @property
    def plain(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {key: value for key, value in asdict(self).items() if key not in _INTERNAL}


Correction = Callable[[Override], Override]
"""An override as it is predicted -> as it is expected by what came out before."""


def diagnose(found: Measured, overrides: Sequence[Override], command: Sequence[str]) -> dict[str, Any]:
    """What was measured, said in plain values, as `diagnosis.json` has them.

    Args:
        found: a run, measured.
        overrides: what helps, from `ranked`.
        command: the words that it was asked for by.
    """
    bound, line = verdict(found)
    device = found.device
    config, precision = found.config, found.config.precision
    assert precision is not None
    return {
        "what": "diagnosis",
        "version": effloop_version(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "command": f"{PROGRAM} {shlex.join(['diagnose', *command, *plugin_words()])}",
        "machine": {
            "cores": available_cores(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        },
        "data": found.loader.describe(),
        "run": {
            "model": getattr(config.model, "arch", config.model.name),
            "batch_size": config.batch_size,
            "image_size": config.image_size,
            "engine": config.engine.name,
            "num_workers": found.load.workers,
            "precision": precision.name,
        },
        "images_per_s": found.loop.images_per_s,
        "wait": found.loop.wait,
        "stages": stages(found),
        "evaluation": found.evaluation,
        "verdict": {"bound": bound, "line": line},
        "findings": [*findings(found), *_untried(found, bound)],
        "overrides": [each.plain | {"commands": commands(each, command)} for each in overrides],
        "memory": found.memory,
    }


def commands(override: Override, words: Sequence[str]) -> list[str]:
    """What to type for an override.

    Args:
        override: the override.
        words: overrides of the run; those of the same keys are left out.
    """
    new = ["data=auto", override.then] if override.then else shlex.split(override.override)
    keys = {key_of(word) for word in new}
    kept = [word for word in words if key_of(word) not in keys and not (override.then and _of_the_original(word))]
    before = []
    if override.then:
        data = [word for word in words if key_of(word).partition(".")[0] in ("data", "decode")]
        where = override.then.partition("=")[2]
        convert = shlex.join(["convert", *data, *plugin_words(), "to=memmap", f"out={where}"])
        before = [f"{PROGRAM} {convert} {override.override.removeprefix('convert ')}"]
    return [*before, f"{PROGRAM} {shlex.join([*kept, *new, *plugin_words()])}"]


_OF_ANY = {field.name for field in fields(DataConfig)}
_OF_THE_ORIGINAL = {"root", "train_split", "val_split", "val", "folds", "fold", "group"}


def _of_the_original(word: str) -> bool:
    """Whether an override doesn't hold for converted data: it says how the original is read."""
    part, _, key = key_of(word).partition(".")
    return part == "data" and (key in _OF_THE_ORIGINAL or key not in _OF_ANY)


def stages(found: Measured) -> list[dict[str, Any]]:
    """Each stage's rate if it were the only one, with the run's workers."""
    load, step, loop = found.load, found.step, found.loop
    workers = max(1, load.workers)

    def loading(name: str) -> float:
        cost: Cost = getattr(load.loading, name)
        return 1 / max(cost.wall_s / workers, cost.cpu_s / found.cores, 1e-9)

    parts = {"forward": step.forward, "backward": step.backward, "update": step.update}
    whole = sum(parts.values())  # 0 where only the step as a whole is known
    shares = ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in parts.items() if whole)
    details = {name: f"{1e3 * getattr(load.loading, name).wall_s:.3g} ms an image and worker" for name in _LOADING}
    details["storage"] = found.storage.describe()
    rows = [(name, loading(name), details[name]) for name in _LOADING]
    rows += [
        ("loader", found.loader_per_s, f"together, {_by(load.workers)}"),
        ("transfer", 1 / max(load.transfer_s, 1e-9), "to float32, normalised" if found.config.data.mean else "uint8"),
        ("step", 1 / load.step_s, shares),
        ("log", 1 / max(load.log_s, 1e-9), f"{loop.log:.1%} of the loop"),
        ("loop", loop.images_per_s, f"all of it; {loop.wait:.0%} waits for data"),
    ]
    return [{"name": name, "images_per_s": found.ranks * rate, "detail": detail} for name, rate, detail in rows]


def verdict(found: Measured) -> tuple[str, str]:
    """What holds the run back: a name, and a sentence."""
    if found.evaluation > _OVERHEAD:
        return "evaluation", f"evaluation-bound: evaluation takes {found.evaluation:.0%} of the run's time"
    if found.loop.log > _OVERHEAD:
        return "logging", f"logging-bound: the recorder takes {found.loop.log:.0%} of the loop's time"
    now = found.ranks * found.loop.images_per_s
    free = {name: found.ranks * found.forecast.without(found.load, name) for name in (*_LOADING, "transfer", "step")}
    stage = max(free, key=lambda name: free[name])
    if stage == "step" and found.device.type == "cuda" and found.step.syncs:
        return "sync", f"sync-bound: the host waits for the GPU {sum(found.step.syncs.values())} times in each update"
    name = {"step": "compute"}.get(stage, stage)
    line = f"{name}-bound: if {_WHAT[stage]} took no time, {free[stage]:,.0f} images/s instead of {now:,.0f}"
    cores, workers = found.cores, found.load.workers
    if stage in _LOADING and workers < cores:
        line += f"; images are loaded {_by(workers)}, on {cores} cores"
    return name, line


def _by(workers: int) -> str:
    """By whom images are loaded."""
    return f"by {workers} worker{'s' * (workers > 1)}" if workers else "in the training thread"


_WHAT = {
    "storage": "reading the images",
    "decode": "decoding",
    "augment": "augmentation",
    "batch": "putting batches together",
    "transfer": "moving batches to the device and normalising them",
    "step": "the training step",
}


def findings(found: Measured) -> list[str]:
    """Lines about what an override doesn't help with."""
    lines = []
    if found.other_cores > _BUSY:
        lines.append(
            f"other programs used {found.other_cores:.1f} of the {available_cores()} cores meanwhile, so all figures "
            "are of a busy machine; end them and measure again"
        )
    for (file, line, function, what), count in found.step.syncs.items():
        times = f"{count} times" if count > 1 else "once"
        lines.append(
            f"{os.path.relpath(file)}:{line} ({function}) reads a tensor {times} in each update, by {what}: on a GPU "
            "the host waits there until all its work is done; keep the value on the device, and read it every few "
            "updates"
        )
    return lines


def _untried(found: Measured, bound: str) -> list[str]:
    """What may help, and takes too long to be tried here."""
    if bound != "compute" or found.config.compile:
        return []
    return [f"compile=true may make the step faster: {PROGRAM} bench what=step knobs=compile measures it"]


def ranked(
    found: Measured, changes: Iterable[Change], correct: Correction = lambda override: override
) -> list[Override]:
    """What helps, the best first; more workers come first of all where cores are idle.

    Args:
        found: a run, measured.
        changes: what may help, `overrides.changes` for instance.
        correct: makes better predictions of them.
    """
    rows: list[tuple[float, Override]] = []
    usual = found.epoch_s + found.evaluation_s
    for change in changes:
        rate = found.forecast.images_per_s(change.load)
        gain = usual / (found.samples / rate + change.evaluation_s)
        same = change.load is found.load
        row = Override(change.override, None if same else found.ranks * rate, gain, change.why, change.exact)
        row = correct(replace(row, then=change.then, recipe=change.recipe))
        if row.gain < _HELPS:
            continue
        first = 1e3 * change.override.endswith(f"num_workers={found.cores}")
        rows.append((first + (row.gain - 1) * change.ease, row))
    return [each for _, each in sorted(rows, key=lambda row: -row[0])][:_LISTED]
