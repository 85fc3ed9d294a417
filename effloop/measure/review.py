"""A look at a run at its end: its stages, what held it back, and the override that would help most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from effloop.config import Config
from effloop.data.loader import Loader
from effloop.data.source import Cache
from effloop.errors import warn
from effloop.measure.costs import LoopCosts, StepCosts, StorageCosts, loading_costs
from effloop.measure.diagnosis import ranked, stages, verdict
from effloop.measure.experience import note_outcome
from effloop.measure.forecast import Forecast, Load
from effloop.measure.measured import Measured, workers_of
from effloop.measure.overrides import changes
from effloop.record.efficiency import Efficiency
from effloop.runs.findings import Findings
from effloop.system.hardware import available_cores, available_memory
from effloop.train.trainer import Trainer

_SHARE = 0.005
"""Of a run's time that the look may take."""

_MOST_S = 2.0
_OUTCOME_S = 20.0
"""Seconds of training from which the speed is an outcome of what was predicted."""

_STAGES = ("storage", "decode", "augment", "batch", "step", "loop")
"""What is known of a run at its end."""

_WAITS = 0.10
"""Share of waiting from which an override is named."""


def review(config: Config, trainer: Trainer, efficiency: Efficiency) -> Mapping[str, Any]:
    """`stages`, `verdict` and `override` of a run that has ended.

    Loading is measured on some images, now that the machine is free; for so short a time that it doesn't count.

    Args:
        config: of the run.
        trainer: that has trained.
        efficiency: its figures.
    """
    seconds = min(_MOST_S, _SHARE * sum(efficiency.seconds.values()))
    loader = trainer.train
    if not isinstance(loader, Loader) or not efficiency.steady_images_per_s:
        return {}
    if not loader.engine.exact:  # it has decoders of its own, which can't be measured apart
        return {}
    try:
        return _look(config, trainer, loader, efficiency, seconds)
    except KeyboardInterrupt:  # the run is done, and its summary is still to be written: also below
        return {}
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        warn(f"what held the run back can't be told: {type(error).__name__}: {reason}; its results are complete")
        return {}


def _look(
    config: Config, trainer: Trainer, loader: Loader, efficiency: Efficiency, seconds: float
) -> Mapping[str, Any]:
    found = _measured(config, trainer, loader, efficiency, seconds)
    ranks = trainer.parallel.world_size
    if ranks == 1 and _is_typical(config, trainer, efficiency):
        note_outcome(Findings.of(config, loader.plan.source.fingerprint()), config, found.loop.images_per_s)
    bound, line = verdict(found)
    best = None
    if efficiency.wait > _WAITS or bound == "evaluation":
        best = next((each.plain for each in ranked(found, changes(found)) if each.exact), None)
    known = [each for each in stages(found) if each["name"] in _STAGES]
    return {"stages": known, "verdict": {"bound": bound, "line": line}, "override": best}


def _is_typical(config: Config, trainer: Trainer, efficiency: Efficiency) -> bool:
    """Whether a run's speed is what others can expect: it was long enough, and not only filling a cache."""
    trained_s = efficiency.seconds["step"] + efficiency.seconds["wait"]
    return trained_s >= _OUTCOME_S and (config.data.cache is Cache.none or trainer.progress.epoch > 2)


def _measured(config: Config, trainer: Trainer, loader: Loader, efficiency: Efficiency, seconds: float) -> Measured:
    """What is known of the run, and what loading costs."""
    ranks, device = trainer.parallel.world_size, trainer.parallel.device
    costs = loading_costs(loader.plan, seconds, at_once=4)
    total = int(loader.plan.source.fingerprint()["bytes"])
    storage = StorageCosts(
        costs.storage, None, total / max(1, len(loader.plan.source)), None, total, total < available_memory(), ""
    )
    rate = efficiency.steady_images_per_s / ranks
    cores = max(1, available_cores() // trainer.parallel.sharing)
    busy_s = (1 - efficiency.wait) / rate
    workers = workers_of(config, loader)
    load = Load(costs, workers, 0.0, 0.0, busy_s, 0.0)
    evaluations = -(-trainer.progress.epoch // config.eval_every)
    val_samples = len(trainer.val.plan.source) if isinstance(trainer.val, Loader) else 0
    evaluation_s = efficiency.seconds["evaluation"]
    ideal = max(costs.total.wall_s / max(1, workers), costs.total.cpu_s / cores)
    return Measured(
        config=config,
        loader=loader,
        ranks=ranks,
        cores=cores,
        samples=len(loader) * loader.plan.order.batch_per_rank,
        task=trainer.task,
        device=device,
        val_samples=val_samples,
        storage=storage,
        step=StepCosts(0.0, 0.0, 0.0, busy_s, busy_s, 1, {}),
        loop=LoopCosts(rate, efficiency.wait, 0.0),
        loader_per_s=1 / ideal,
        evaluation_per_s=val_samples * evaluations / evaluation_s if evaluation_s else 0.0,
        load=load,
        forecast=Forecast.of(load, cores, rate, efficiency.wait),
        memory={},
        other_cores=0.0,
        seconds=0.0,
    )
