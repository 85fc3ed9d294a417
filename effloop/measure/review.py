"""A look at a run at its end: its stages, what held it back, and an override that may help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from effloop.config import Config
from effloop.data.loader import Loader
from effloop.errors import warn
from effloop.measure.costs import loading_costs
from effloop.measure.diagnose import Measured, stages, verdict, workers_of
from effloop.measure.tries import proposals
from effloop.record.efficiency import Efficiency, Override
from effloop.system.hardware import available_cores
from effloop.train.trainer import Trainer

_SHARE = 0.005
"""Of a run's time that the look may take."""

_MOST_S = 2.0

_STAGES = ("storage", "decode", "augment", "batch", "step", "loop")
"""What is known of a run at its end."""

_WAITS = 0.10
"""Share of waiting from which loading is what holds a run back, and an override is named."""


def review(config: Config, trainer: Trainer, efficiency: Efficiency) -> Mapping[str, Any]:
    """`stages`, `verdict` and `override` of a run that has ended.

    Loading is measured on some images, now that the machine is free; for so short a time that it doesn't count.

    Args:
        config: of the run.
        trainer: that has trained.
        efficiency: its figures.
    """
    if not isinstance(trainer.train, Loader) or not efficiency.steady_images_per_s:
        return {}
    if not trainer.train.engine.exact:  # it has decoders of its own, which can't be measured apart
        return {}
    try:
        found = _measured(config, trainer, trainer.train, efficiency)
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
        warn(f"what held the run back can't be told: {type(error).__name__}: {reason}; its results are complete")
        return {}


def _measured(config: Config, trainer: Trainer, loader: Loader, efficiency: Efficiency) -> Measured:
    """What is known of the run, and what loading costs."""
    costs = loading_costs(loader.plan, min(_MOST_S, _SHARE * sum(efficiency.seconds.values())), at_once=4)
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
        storage=None,
        loading=costs,
        loader_per_s=1 / ideal_s,
        transfer_s=0.0,
        step_s=(1 - efficiency.wait) / rate,
        log_s=0.0,
        images_per_s=rate,
        wait=efficiency.wait,
        starved=efficiency.wait > _WAITS,
        evaluation_per_s=val_samples * evaluations / evaluation_s if evaluation_s else 0.0,
    )
