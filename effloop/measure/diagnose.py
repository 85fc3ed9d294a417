"""What holds a run back, and what helps: by measuring and trying, or by a short look at its end."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console

from effloop.config import Config
from effloop.data.loader import Loader
from effloop.data.source.storage.kept import opening_once
from effloop.errors import PROGRAM, warn
from effloop.measure.costs import loading_costs
from effloop.measure.loops import facts
from effloop.measure.measured import Measured, measured, stages, verdict, workers_of
from effloop.measure.tries import proposals, tried
from effloop.record.efficiency import Efficiency, Override, Stage, Verdict
from effloop.registry import plugin_words
from effloop.runs.environment import effloop_version
from effloop.system.hardware import available_cores
from effloop.train.trainer import Trainer

_BUSY = 0.2
"""Cores that other programs use from which the figures are doubtful."""

_STAGES = ("storage", "decode", "augment", "batch", "step", "loop")
"""What is known of a run at its end."""

_WAITS = 0.10
"""Share of waiting from which loading is what holds a run back, and an override is named."""


def review(config: Config, trainer: Trainer, efficiency: Efficiency) -> Mapping[str, Any]:
    """`stages`, `verdict` and `override` of a run that has ended.

    Loading is measured on some images, now that the machine is free; for so short a time that it doesn't count.
    """
    loader = trainer.train
    # An engine that isn't exact has decoders of its own, which can't be measured apart.
    if not isinstance(loader, Loader) or not efficiency.steady_images_per_s or not loader.engine.exact:
        return {}
    try:
        found = _measured_at_end(config, trainer, loader, efficiency)
        held, best = verdict(found), None
        if efficiency.wait > _WAITS or held.bound == "evaluation":
            helps = next((each for each in proposals(found, held.bound) if each.exact), None)
            best = helps and Override(helps.override, helps.why, gain=helps.gain)
        known = [each for each in stages(found) if each.name in _STAGES]
        return {"stages": known, "verdict": held, "override": best}
    except KeyboardInterrupt:  # the run is done, and its summary is still to be written: also below
        return {}
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        warn(f"what held the run back is unknown: {type(error).__name__}: {reason}; its results are complete")
        return {}


def _measured_at_end(config: Config, trainer: Trainer, loader: Loader, efficiency: Efficiency) -> Measured:
    """What is known of the run, and what loading costs."""
    seconds = min(2.0, 0.005 * sum(efficiency.seconds.values()))
    costs = loading_costs(loader.plan, seconds, at_once=4)
    ranks, workers = trainer.parallel.world_size, workers_of(config, loader)
    cores = max(1, available_cores() // trainer.parallel.sharing)
    rate = efficiency.steady_images_per_s / ranks
    ideal_s = max(costs.total.wall_s / max(1, workers), costs.total.cpu_s / cores)
    val_samples = len(trainer.val.plan.source) if isinstance(trainer.val, Loader) else 0
    evaluations = -(-trainer.progress.epoch // config.eval_every)
    evaluation_s = efficiency.seconds["evaluation"]
    return Measured(
        config=config,
        loader=loader,
        device=trainer.parallel.device,
        ranks=ranks,
        cores=cores,
        workers=workers,
        samples=len(loader) * loader.plan.order.batch_per_rank,
        val_samples=val_samples,
        loading=costs,
        loader_per_s=1 / ideal_s,
        step_s=(1 - efficiency.wait) / rate,
        images_per_s=rate,
        wait=efficiency.wait,
        starved=efficiency.wait > _WAITS,
        evaluation_per_s=val_samples * evaluations / evaluation_s if evaluation_s else 0.0,
    )


def _findings(found: Measured, config: Config, bound: str) -> list[str]:
    """Lines about what an override doesn't help with."""
    lines = []
    if found.other_cores > _BUSY:
        lines.append(
            f"other programs used {found.other_cores:.1f} of the {available_cores()} cores meanwhile, so all figures "
            "are of a busy machine; end them and measure again"
        )
    for (file, line, function, what), count in found.syncs.items():
        times = f"{count} times" if count > 1 else "once"
        lines.append(
            f"{os.path.relpath(file)}:{line} ({function}) reads a tensor {times} in each update, by {what}: on a GPU "
            "the host waits there until all its work is done; keep the value on the device, and read it every few "
            "updates"
        )
    if bound == "compute" and not found.config.compile:
        lines.append(f"compile=true may make the step faster: {PROGRAM} bench what=step knobs=compile measures it")
    if config.parallel.name != "none":
        lines.append(f"measured without parallel={config.parallel.name}, in one process: ranks share cores and storage")
    if config.progressive:
        lines.append(f"measured at image_size={config.size.word} throughout, without progressive")
    return lines


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result, as `diagnosis.json` has it."""

    version: str  # of EffLoop
    date: str
    command: str  # as it was typed
    machine: Mapping[str, Any]  # what the figures depend on
    data: str
    run: Mapping[str, Any]
    images_per_s: float  # this and the next four as of `Measured`
    wait: float
    stages: Sequence[Stage]
    evaluation: float
    verdict: Verdict
    findings: Sequence[str]  # lines about what an override doesn't help with
    overrides: Sequence[Override]  # what helps, tried, the best first
    memory: Mapping[str, Any]  # what the run takes, as `Memory.to_plain` has it

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"what": "diagnosis", **asdict(self)}


@opening_once()
def diagnose(config: Config, command: Sequence[str], seconds: float, *, top: int, rounds: int) -> Diagnosis:
    """Measure a run for about so many seconds, find what holds it back, and try the `top` overrides that may help.

    Raises:
        ConfigError, DataError: the run can't be built.
    """
    with Console(stderr=True).status("") as status:

        def progress(what: str) -> None:
            status.update(f"measuring: {what}")

        with measured(config, seconds, progress) as found:
            held = verdict(found)
            progress("what may help")
            offered = list(proposals(found, held.bound, seconds / 50))[:top]
            found.loader.close()  # its workers would take turns with those that are tried
            overrides = tried(found, offered, command, rounds, min(1.0, max(0.2, seconds / 10)), progress)
        precision, on_gpu = found.config.precision, found.device.type == "cuda"
        assert precision is not None
        return Diagnosis(
            version=effloop_version(),
            date=time.strftime("%Y-%m-%d %H:%M"),
            command=f"{PROGRAM} {shlex.join(['diagnose', *command, *plugin_words()])}",
            machine={"cores": found.cores, "device": torch.cuda.get_device_name(found.device) if on_gpu else "cpu"},
            data=found.loader.describe(),
            run=facts(found.config) | {"num_workers": found.workers, "precision": precision.name},
            images_per_s=found.images_per_s,
            wait=found.wait,
            stages=stages(found),
            evaluation=found.evaluation,
            verdict=held,
            findings=_findings(found, config, held.bound),
            overrides=overrides,
            memory=found.memory,
        )
