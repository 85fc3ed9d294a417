"""Everything that a run continues from, as tensors and plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from effloop.checkpoint import Checkpoints, files, rng
from effloop.errors import ConfigError
from effloop.optim import NoEMA, restore
from effloop.parallel import Parallel
from effloop.record import Metrics, Position, Recorder
from effloop.train.stopping import EarlyStop

_PARTS = ("precision", "checkpoints", "task", "nan")
"""Parts whose state is saved and loaded as it is."""


@dataclass
class Progress:
    """The position of a run.

    Attributes:
        epoch: epochs done, with their evaluation and checkpoint.
        samples_seen: the position in the next epoch: its samples that all ranks together have trained on. All of them
            if its evaluation is what comes next.
        step: updates done.
    """

    epoch: int = 0
    samples_seen: int = 0
    step: int = 0


class Parts(Protocol):
    """What of a `Trainer` is saved, and how."""

    model: nn.Module
    average: NoEMA
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    metrics: Metrics
    parallel: Parallel
    recorder: Recorder
    checkpoints: Checkpoints
    notes: Sequence[str]
    stop: EarlyStop | None
    progress: Progress
    last: dict[str, float]

    @property
    def global_batch(self) -> int:
        """Samples in a batch of all ranks together."""

    def position(self) -> Position:
        """Where the run is, for the recorder."""

    def state_dict(self) -> dict[str, Any]:
        """See `capture`."""


def capture(trainer: Parts) -> dict[str, Any]:
    """The state of a trainer between two updates; every rank has to call this.

    `model` has the weights that are evaluated; if they are an average, `trained` has those it is of. What differs
    between ranks is there for each: `rng`, `metrics` and, within an epoch, `buffers` such as BatchNorm's statistics,
    of which `model` and `trained` have the mean then.
    """
    states = {name: getattr(trainer, name).state_dict() for name in ("average", *_PARTS, "optimizer", "schedule")}
    within, models = trainer.progress.samples_seen > 0, _models(trainer)
    own: dict[str, Any] = {"rng": rng.capture(), "metrics": trainer.metrics.sums.clone()}
    if within and trainer.parallel.world_size > 1:
        own["buffers"] = [dict(model.named_buffers()) for model in models]
    ranks = trainer.parallel.gather(own)
    weights = [model.state_dict() for model in models]
    if "buffers" in own:
        weights = [_with_mean(each, [rank["buffers"][n] for rank in ranks]) for n, each in enumerate(weights)]
    return {
        "model": weights[-1],
        **({"trained": weights[0]} if len(weights) > 1 else {}),
        **states,
        "progress": asdict(trainer.progress),
        **({"stop": trainer.stop.state_dict(within=within)} if trainer.stop else {}),
        "metrics": [rank["metrics"] for rank in ranks],
        "rng": [rank["rng"] for rank in ranks],
        **({"buffers": [rank["buffers"] for rank in ranks]} if "buffers" in own else {}),
        "recorder": trainer.recorder.state_dict(),
        "last": dict(trainer.last),
    }


def load(trainer: Parts, state: Mapping[str, Any]) -> None:
    """Continue from what `capture` gave, with the learning rate and other settings of this run.

    Raises:
        ConfigError: the position is inside of a batch of this run.
    """
    trainer.model.load_state_dict(files.trained(state))
    trainer.average.load_state_dict(state["average"], state["model"])
    for name in _PARTS:
        getattr(trainer, name).load_state_dict(state.get(name, {}))
    restore(trainer.optimizer, trainer.schedule, state["optimizer"], state["schedule"])
    trainer.progress = Progress(**state["progress"])
    if rest := trainer.progress.samples_seen % trainer.global_batch:
        raise ConfigError(
            f"batch_size: the checkpoint is {rest} samples into a batch of {trainer.global_batch} on all ranks; "
            "keep batch_size and the number of ranks"
        )
    if trainer.stop:
        trainer.stop.load_state_dict(state.get("stop", {}), trainer.checkpoints.best)
    trainer.recorder.load_state_dict(state.get("recorder", {}))
    trainer.last = dict(state.get("last", {}))
    _load_ranks(trainer, state)


def _load_ranks(trainer: Parts, state: Mapping[str, Any]) -> None:
    """What each rank has for itself; with another number of ranks the sums are rank 0's, and the buffers the mean."""
    rank, count = trainer.parallel.rank, trainer.parallel.world_size
    sums: list[Tensor] = state["metrics"]
    if isinstance(sums, Tensor):  # format 3 has those of all ranks together
        sums = [sums, *[torch.zeros_like(sums)] * (count - 1)]
    if len(sums) != count:
        total = torch.stack(list(sums)).sum(0)
        sums = [total, *[torch.zeros_like(total)] * (count - 1)]
    trainer.metrics.sums.copy_(sums[rank])
    if len(state["rng"]) == count:  # otherwise each rank keeps its own seed
        rng.restore(state["rng"][rank])
    else:
        line = f"other topology: {len(state['rng'])} ranks then, {count} now: same sample order, other sums"
        trainer.notes = [*trainer.notes, line]
    if len(buffers := state.get("buffers", [])) == count:
        for model, saved in zip(_models(trainer), buffers[rank], strict=True):
            for name, buffer in model.named_buffers():
                buffer.copy_(saved[name])


def _models(trainer: Parts) -> list[nn.Module]:
    """What is trained, and what is evaluated; one where nothing is averaged."""
    return list(dict.fromkeys((trainer.model, trainer.average.model)))


def _with_mean(weights: Mapping[str, Tensor], ranks: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """Weights in which the floating-point buffers are the mean of all ranks'."""
    means = {
        name: torch.stack([rank[name].double() for rank in ranks]).mean(0).to(first.dtype)
        for name, first in ranks[0].items()
        if first.is_floating_point() and name in weights
    }
    return {**weights, **means}
