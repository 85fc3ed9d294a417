"""The training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from effloop.batch import Batch, Preview
from effloop.checkpoint import Checkpoints, files, rng
from effloop.errors import ConfigError
from effloop.optim import NoEMA, restore
from effloop.parallel import Parallel
from effloop.precision import Precision
from effloop.profile import Profiler
from effloop.record import Metrics, Position, Recorder
from effloop.task import Task


class BatchStream(Protocol):
    """What the loop asks of a loader."""

    @property
    def global_batch(self) -> int:
        """Samples in a batch of all ranks together."""

    def __len__(self) -> int:
        """Batches in an epoch."""

    def describe(self) -> str:
        """One line that says what is loaded."""

    def epoch(self, epoch: int, samples_seen: int = 0) -> Iterable[Batch]:
        """The batches of one epoch, from a position on."""

    def preview(self, num_samples: int, num_epochs: int, most: Callable[[int], int]) -> Preview:
        """Some samples in the first epochs, to look at; may be none. At most `most(side in pixels)` samples."""

    def close(self) -> None:
        """Stop the workers."""


@dataclass
class LoopConfig:
    """Settings of the loop itself.

    Attributes:
        epochs: passes over the training split.
        eval_every: epochs from one evaluation to the next; there is always one after the last epoch.
        accumulate: batches per optimizer update.
        max_grad_norm: L2 norm that an update's gradients are clipped to; None is no limit.
    """

    epochs: int
    eval_every: int = 1
    accumulate: int = 1
    max_grad_norm: float | None = None


@dataclass
class Progress:
    """The position of a run.

    Attributes:
        epoch: epochs done.
        samples_seen: samples of the current epoch that all ranks together have trained on.
        step: updates done.
    """

    epoch: int = 0
    samples_seen: int = 0
    step: int = 0


_PARTS = ("precision", "checkpoints")
"""Parts whose state is saved and loaded as it is."""


@dataclass(kw_only=True)
class Trainer:
    """One loop for every combination of parts; it states the order, the parts state how.

    Attributes:
        model: what is trained, its names as in checkpoints.
        train_step: the `Step` around it, as `parallel` wrapped it.
        average: has the weights that are evaluated.
        train, val: the two splits' batches, on the device.
        metrics: of the current training epoch and of the validation; both on the device.
        notes: lines for the log, written when training begins.
        prunes: (epochs done, epochs) -> whether the run ends early; the same on all ranks.
        recorded: gives a context around `fit`, which notes how the run ends.
        profiler: looks at some updates, after which the run ends.
        progress: the position.
    """

    model: nn.Module
    train_step: nn.Module
    average: NoEMA
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    task: Task
    metrics: Metrics
    parallel: Parallel
    precision: Precision
    recorder: Recorder
    checkpoints: Checkpoints
    train: BatchStream
    val: BatchStream
    loop: LoopConfig
    notes: Sequence[str] = ()
    prunes: Callable[[int, int], bool] = lambda done, epochs: False
    recorded: Callable[[], AbstractContextManager[None]] = nullcontext
    profiler: Profiler = field(default_factory=Profiler)
    progress: Progress = field(default_factory=Progress)

    def fit(self) -> dict[str, float]:
        """Train to the end and return the last validation scores, as the task names them.

        A run that is profiled ends after the profile, without scores.

        Raises:
            ConfigError: nothing is left to train.
        """
        if self.progress.epoch >= self.loop.epochs:
            raise ConfigError(f"epochs: {self.loop.epochs} are done; build a trainer with resume=RUN and more epochs")
        scores: dict[str, float] = {}
        summary: dict[str, Any] = {}
        with self.recorded(), self.recorder, self.profiler, closing(self.train), closing(self.val):
            for line in self.notes:
                self.recorder.note(line)
            if not self.progress.step:  # a run that continues has been looked at
                self.recorder.images("samples", self.train.preview)
            while self.progress.epoch < self.loop.epochs:
                self.train_epoch(self.train.epoch(self.progress.epoch, self.progress.samples_seen))
                if self.profiler.done:
                    for line in self.profiler.report():
                        self.recorder.note(line)
                    return scores
                position = self.position()
                scores = self.end_epoch(position)
                self.recorder.epoch(position, scores)
                is_best = bool(scores) and self.checkpoints.note(self.progress.epoch, scores)
                self.progress.epoch += 1
                self.progress.samples_seen = 0
                with self.recorder.span("checkpoint", position):
                    self.checkpoints.save(self.state_dict(), is_best=is_best)
                if scores and self.prunes(self.progress.epoch, self.loop.epochs):
                    summary["pruned"] = self.progress.epoch
                    self.recorder.note(f"pruned after epoch {self.progress.epoch - 1}: other runs were better by then")
                    break
            last = {**scores, "epoch": self.progress.epoch - 1}
            summary |= {"best": self.checkpoints.best, "last": last, "step": self.progress.step}
            self.recorder.finish(summary)
        return scores

    def train_epoch(self, batches: Iterable[Batch]) -> None:
        """Train on one epoch's batches; the gradients of a short last group are dropped."""
        self.model.train()
        if not self.progress.samples_seen:
            self.metrics.reset()
        self.optimizer.zero_grad()
        for number, batch in enumerate(self.parallel.monitored(self.recorder.wait(batches)), start=1):
            update = number % self.loop.accumulate == 0
            self.forward_backward(batch, sync=update)
            self.progress.samples_seen += self.train.global_batch
            if update:
                lr = self.update()
                self.recorder.step(self.position(), self.metrics, lr)
                self.profiler.step()
                if self.profiler.done:
                    return

    def end_epoch(self, position: Position) -> dict[str, float]:
        """Evaluate if it is this epoch's turn; the scores, or {} without an evaluation."""
        done = self.progress.epoch + 1
        if done % self.loop.eval_every and done < self.loop.epochs:
            self.average_buffers()  # a run that is resumed here has those of rank 0 on all ranks
            return {}
        with self.recorder.span("evaluation", position):
            return self.evaluate(self.recorder.validation(self.val.epoch(0)))

    def forward_backward(self, batch: Batch, *, sync: bool) -> None:
        """Add one batch's gradients; loss and scores stay on the device."""
        with self.parallel.gradients(self.train_step, sync=sync):
            loss, sums = self.train_step(batch.images, batch.targets, batch.valid)
            self.precision.backward(loss / self.loop.accumulate)
        self.metrics.add(sums)

    def update(self) -> float:
        """One step of optimizer, schedule and average; the learning rate it was done with."""
        lr: float = self.optimizer.param_groups[0]["lr"]
        if self.precision.step(self.optimizer, self.loop.max_grad_norm):
            self.schedule.step()
            self.average.update()
        self.optimizer.zero_grad()
        self.progress.step += 1
        return lr

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Validation scores of the averaged weights, as `evaluate` gives them."""
        self.average_buffers()
        batches = self.parallel.monitored(batches)
        return evaluate(self.average.model, batches, self.task, self.metrics, self.precision)

    def average_buffers(self) -> None:
        """Give all ranks the mean of their running statistics."""
        for model in dict.fromkeys((self.model, self.average.model)):  # one and the same where nothing is averaged
            self.parallel.average_buffers(model)

    def position(self) -> Position:
        """Where the run is, for the recorder."""
        group = self.train.global_batch * self.loop.accumulate
        return Position(
            epoch=self.progress.epoch,
            epochs=self.loop.epochs,
            update=self.progress.samples_seen // group,
            updates=len(self.train) // self.loop.accumulate,
            step=self.progress.step,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that a run continues from: tensors and plain values. Every rank has to call this.

        `model` has the weights that were evaluated; if they are an average, `trained` has those it is of.
        """
        states = {name: getattr(self, name).state_dict() for name in ("average", *_PARTS, "optimizer", "schedule")}
        sums = self.parallel.sum(self.metrics.sums).clone()
        averaged = self.average.model is not self.model
        return {
            "model": self.average.model.state_dict(),
            **({"trained": self.model.state_dict()} if averaged else {}),
            **states,
            "progress": asdict(self.progress),
            "metrics": sums,
            "rng": self.parallel.gather(rng.capture()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`, with the learning rate and other settings of this run."""
        self.model.load_state_dict(files.trained(state))
        self.average.load_state_dict(state["average"], state["model"])
        for name in _PARTS:
            getattr(self, name).load_state_dict(state[name])
        restore(self.optimizer, self.schedule, state["optimizer"], state["schedule"])
        self.progress = Progress(**state["progress"])
        self.metrics.sums.copy_(state["metrics"] * (self.parallel.rank == 0))  # they are all ranks' sums
        if len(state["rng"]) == self.parallel.world_size:  # otherwise each rank keeps its own seed
            rng.restore(state["rng"][self.parallel.rank])


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task,
    metrics: Metrics,
    precision: Precision,
) -> dict[str, float]:
    """The task's scores over all valid samples of all ranks, each counted once."""
    model.eval()
    metrics.reset()
    for batch in batches:
        with precision.autocast():
            outputs = model(batch.images)
        metrics.add(task.sums(outputs, batch.targets, batch.valid))
    return task.scores(metrics.read())
