"""The training loop, its checkpoints within an epoch, and the state that a run resumes from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from effloop.batch import Batch
from effloop.checkpoint import Checkpoints, files, rng
from effloop.errors import ConfigError, PreemptedRunError
from effloop.optim import NoEMA, restore
from effloop.parallel import Parallel
from effloop.precision import Precision
from effloop.profile import Profiler
from effloop.record import Metrics, Position, Recorder
from effloop.system.signals import STOPPING, StopRequest, names
from effloop.task import Task
from effloop.train.evaluation import Scorer, evaluate
from effloop.train.nan import NanPolicy
from effloop.train.stopping import EarlyStop


class BatchStream(Protocol):
    """The interface of loaders that the loop uses."""

    @property
    def global_batch(self) -> int: ...  # samples in a batch of all ranks together
    def __len__(self) -> int: ...  # batches in an epoch
    def describe(self) -> str: ...  # one line that describes the data
    # The batches of one epoch, from a position on.
    def epoch(self, epoch: int, samples_seen: int = 0) -> Iterable[Batch]: ...
    def close(self) -> None: ...  # stop the workers


class Step(nn.Module):
    """Images and targets in, loss and the task's sums out; the model's outputs don't leave it, so that nothing large is
    gathered where a strategy runs copies of it on several devices.
    """

    def __init__(self, model: nn.Module, task: Task, precision: Precision) -> None:
        super().__init__()
        self.model, self.task, self.precision = model, task, precision

    def forward(self, images: Tensor, targets: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """(N, 3, H, W) float32, targets as the task wants them, (N,) bool -> () float32 mean loss of the batch, and
        (M,) float64 sums of the valid samples, as `Task.sums` gives them.
        """
        with self.precision.autocast():
            outputs = self.model(images)
            loss = self.task.loss(outputs, targets)
        with torch.no_grad():
            own = self.task.scored_outputs(outputs).detach()
        return loss, self.task.sums(own, targets, valid, loss.detach())


@dataclass
class LoopConfig:
    """Settings of the loop itself."""

    epochs: int  # passes over the training split
    eval_every: int = 1  # epochs from one evaluation to the next; there is always one after the last epoch
    accumulate: int = 1  # batches per optimizer update
    clip: Callable[[torch.optim.Optimizer], None] | None = None  # clips an update's gradients


@dataclass
class Progress:
    """The position of a run."""

    epoch: int = 0  # epochs done, with their evaluation and checkpoint
    # the position in the next epoch: its samples that all ranks together have trained on. All of them if its evaluation
    # is what comes next
    samples_seen: int = 0
    step: int = 0  # updates done


_PARTS = ("precision", "checkpoints", "task", "nan")  # parts whose state is saved and loaded as it is


@dataclass(kw_only=True)
class Trainer:
    """One loop for every combination of parts; it states the order, the parts state how."""

    model: nn.Module  # what is trained, its names as in checkpoints
    train_step: nn.Module  # the `Step` around it, as `parallel` wrapped it
    average: NoEMA  # has the weights that are evaluated
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    task: Task
    metrics: Metrics  # of the current training epoch and of the validation; both on the device
    parallel: Parallel
    precision: Precision
    recorder: Recorder
    checkpoints: Checkpoints
    train: BatchStream  # the two splits' batches, on the device
    val: BatchStream
    loop: LoopConfig
    notes: Sequence[str] = ()  # lines for the log, written when training begins
    stop: EarlyStop | None = None  # when the run ends before its last epoch; None never
    # (epochs done, epochs) -> whether the run ends early; the same on all ranks
    prunes: Callable[[int, int], bool] = lambda done, epochs: False
    # gives a context around `fit`, which notes how the run ends
    recorded: Callable[[], AbstractContextManager[None]] = nullcontext
    nan: NanPolicy = field(default_factory=NanPolicy)  # what happens where a loss or a gradient isn't finite
    profiler: Profiler = field(default_factory=Profiler)  # looks at some updates, after which the run ends
    progress: Progress = field(default_factory=Progress)  # the position
    last: dict[str, float] = field(default_factory=dict)  # scores of the last evaluation, and its `epoch`
    request: StopRequest = field(default_factory=StopRequest)  # to save and stop; by signals, while `fit` runs

    def __post_init__(self) -> None:
        self.saving = Saving(self, self.request)

    def fit(self) -> dict[str, float]:
        """Train to the end and return the last validation scores, as the task names them.

        A run that is profiled ends after the profile, without scores. SIGTERM, SIGUSR1 and SIGHUP are caught in the
        meantime, if this is the main thread and they have no handlers: as `request.ask()`, they save the run, to be
        resumed, and raise a PreemptedRunError.
        """
        if self.request.is_taken:
            raise ConfigError("fit: this trainer was stopped; build one with resume=RUN to continue")
        if self.progress.epoch >= self.loop.epochs:
            raise ConfigError(f"epochs: {self.loop.epochs} are done; build a trainer with resume=RUN and more epochs")
        scores: dict[str, float] = {}
        summary: dict[str, Any] = {}
        self.saving = saving = Saving(self, self.request)
        with (
            self.request.caught(),  # signals are requests to stop
            self.recorded(),
            self.recorder,
            self.profiler,
            closing(self.train),
            closing(self.val),
            closing(self.checkpoints),
        ):
            for line in self.notes:
                self.recorder.note(line)
            while self.progress.epoch < self.loop.epochs and not summary:
                self.train_epoch(self.train.epoch(self.progress.epoch, self.progress.samples_seen))
                if self.profiler.done:
                    for line in self.profiler.report():
                        self.recorder.note(line)
                    return scores
                self.nan.check()
                position = self.position()
                scores = self.end_epoch(position)
                self.recorder.epoch(position, scores)
                is_best = bool(scores) and self.checkpoints.note(self.progress.epoch, scores)
                if is_best and (line := self.checkpoints.best_score_warning()):
                    self.recorder.note(line)
                if scores:
                    self.last = {**scores, "epoch": self.progress.epoch}
                    if self.stop:
                        self.stop.scored(self.progress.epoch, scores)
                self.progress.epoch += 1
                self.progress.samples_seen = 0
                saving.save(position, is_best=is_best)
                summary = self.early_end() if scores else {}
            with self.request.busy():
                self.checkpoints.close()  # a summary means that all is saved
            summary |= {"best": self.checkpoints.best, "last": self.last, "step": self.progress.step}
            summary["precision"] = self.precision.name
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
            self.request.progress()
            if update:
                lr = self.update()
                self.recorder.step(self.position(), self.metrics, lr)
                self.profiler.step()
                if self.profiler.done:
                    return
                self.saving.updated()
        self.recorder.trained(self.position(), self.metrics, self.optimizer.param_groups[0]["lr"])

    def early_end(self) -> dict[str, Any]:
        """After an epoch was evaluated and saved: the summary's entry for a run that ends early; {} to continue."""
        done, epochs = self.progress.epoch, self.loop.epochs
        if done >= epochs:
            return {}
        if reason := self.stop.out_of_patience(done) if self.stop else "":
            self.recorder.note(f"stopped early, after epoch {done - 1} of {epochs}: {reason}")
            return {"stopped": reason}
        if self.prunes(done, epochs):
            self.recorder.note(f"pruned after epoch {done - 1}: other runs were better by then")
            return {"pruned": done}
        return {}

    def end_epoch(self, position: Position) -> dict[str, float]:
        """Evaluate if it is this epoch's turn; the scores, or {} without an evaluation."""
        done = self.progress.epoch + 1
        if done % self.loop.eval_every and done < self.loop.epochs:
            self.average_buffers()  # a run that is resumed here has those of rank 0 on all ranks
            return {}
        with self.recorder.span("evaluation", position):
            return self.evaluate(self.saving.evaluating(self.recorder.validation(self.val.epoch(0))))

    def forward_backward(self, batch: Batch, *, sync: bool) -> None:
        """Add one batch's gradients; loss and scores stay on the device."""
        self.nan.before()
        with self.parallel.gradients(self.train_step, sync=sync):
            try:
                loss, sums = self.train_step(batch.images, batch.targets, batch.valid)
            except ValueError as error:
                if "more than 1 value per channel" not in str(error):
                    raise
                synced = ", parallel.sync_batchnorm=true" * (self.parallel.world_size == self.parallel.num_parts > 1)
                raise ConfigError(
                    "batch_size: too small: BatchNorm has one value of each channel, which has no variance; set a "
                    f"larger one{synced}, or another model"
                ) from None
            self.precision.backward(self.nan.loss(loss, batch) / (self.loop.accumulate * self.parallel.summed))
        self.metrics.add(sums)

    def update(self) -> float:
        """One step of optimizer, schedule and average; the learning rate it was done with."""
        lr: float = self.optimizer.param_groups[0]["lr"]
        step = partial(self.precision.step, self.optimizer, self.loop.clip)
        if self.nan.update(step, self.progress.epoch, self.progress.step, lr):
            self.schedule.step()
            self.average.update()
        self.optimizer.zero_grad()
        self.progress.step += 1
        return lr

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Validation scores of the averaged weights, as `evaluate` gives them."""
        self.average_buffers()
        scorers = [Scorer(self.task, self.metrics, self.parallel.gather)]
        model, batches = self.task.with_output_transform(self.average.model), self.parallel.monitored(batches)
        return evaluate(model, batches, scorers, self.precision, tune=True)[0]

    def average_buffers(self) -> None:  # running statistics, of all ranks
        for model in _models(self):
            self.parallel.average_buffers(model)

    def position(self) -> Position:
        """Where the run is, for the recorder."""
        group = self.train.global_batch * self.loop.accumulate
        update, updates = self.progress.samples_seen // group, len(self.train) // self.loop.accumulate
        return Position(self.progress.epoch, self.loop.epochs, update, updates, self.progress.step)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a run continues from, between two updates; every rank has to call this.

        `model` has the weights that are evaluated; if they are an average, `trained` has those it is of. What differs
        between ranks, or parts of an update, is there for each: `metrics` and, `packed`, `rng` and, within an epoch,
        `buffers` such as BatchNorm's statistics, of which `model` and `trained` have the mean then.
        """
        self.nan.check()
        states = {name: getattr(self, name).state_dict() for name in ("average", *_PARTS, "optimizer", "schedule")}
        within, models = self.progress.samples_seen > 0, _models(self)
        generators, sums = files.packed(rng.capture()), self.metrics.sums.clone()
        own = [{"rng": generators, "metrics": each} for each in sums]
        weights: list[Mapping[str, Any]] = [model.state_dict() for model in models]
        if within and self.parallel.num_parts > 1:
            for part, buffers in zip(own, _part_buffers(self), strict=True):
                part["buffers"] = files.packed(buffers)
            weights = [_with_mean(self.parallel, model) for model in models]
        parts = [part for rank in self.parallel.gather(own) for part in rank]
        return {
            "model": weights[-1],
            **({"trained": weights[0]} if len(weights) > 1 else {}),
            **states,
            "progress": asdict(self.progress),
            **({"stop": self.stop.state_dict()} if self.stop else {}),
            **{key: [part[key] for part in parts] for key in parts[0]},
            "recorder": self.recorder.state_dict(),
            "last": dict(self.last),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, with the learning rate and other settings of this run."""
        own, optimizer = self.parallel.own, state["optimizer"]
        parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        self.model.load_state_dict(own(files.trained(state), self.model.state_dict()))
        self.average.load_state_dict(state["average"], own(state["model"], self.average.model.state_dict()))
        if "shards" in state:
            from effloop.parallel.sharded import with_shards

            optimizer = {**optimizer, "state": with_shards(optimizer["state"], state["shards"], parameters)}
        optimizer = {**optimizer, "state": own(optimizer["state"], dict(enumerate(parameters)))}
        for name in _PARTS:
            getattr(self, name).load_state_dict(state.get(name, {}))
        restore(self.optimizer, self.schedule, optimizer, state["schedule"])
        self.progress = Progress(**state["progress"])
        self.parallel.resumed(self.progress.step)
        if self.stop:
            self.stop.load_state_dict(state.get("stop", {}), self.checkpoints.best)
        self.recorder.load_state_dict(state.get("recorder", {}))
        self.last = dict(state.get("last", {}))
        _load_ranks(self, state)


_SAVE = 1 << len(STOPPING)  # the bit of a request to save, after those of the signals


class Saving:
    """Checkpoints within an epoch, and on preemption: all ranks save after the same update."""

    def __init__(self, trainer: Trainer, request: StopRequest) -> None:
        self._trainer, self._request = trainer, request
        config = trainer.checkpoints.config
        self._every_steps, self._every_minutes = config.every_steps, config.every_minutes
        request.patience_s = config.stop_timeout_s
        self._saved_at = time.monotonic()
        self._requested = False  # a save, of all ranks

    def updated(self) -> None:
        """After each update: save where it is time."""
        self._trainer.checkpoints.check()
        agreed, position = self._agreed(), self._trainer.position()
        if (agreed & _SAVE and position.update < position.updates) or self._due(position):
            self.save(position, is_best=False)

    def _due(self, position: Position) -> bool:
        """Whether it is time by the number of updates; the end of an epoch is saved with its scores."""
        within = position.update < position.updates
        return bool(within and self._every_steps and position.step % self._every_steps == 0)

    def evaluating(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches; a run that is stopped is saved as before the evaluation, which is then repeated."""
        for batch in batches:
            yield batch
            self._request.progress()
            self._agreed()

    def save(self, position: Position, *, is_best: bool) -> None:
        """Save the state as it is between two updates; `position` is for the times that are recorded."""
        with self._request.busy(), self._trainer.recorder.span("checkpoint", position):
            self._write(self._trainer.state_dict(), is_best=is_best)
        self._saved_at, self._requested = time.monotonic(), False

    def _write(self, state: dict[str, Any], *, is_best: bool) -> None:
        checkpoints = self._trainer.checkpoints
        if checkpoints.config.writes:
            state = self._trainer.parallel.whole(state, checkpoints.folder)
        checkpoints.save(state, is_best=is_best)

    def _agreed(self) -> int:
        """Requests of all ranks, as far as they have been exchanged; saves and ends the run if one is to stop."""
        agreed = self._trainer.parallel.agree(self._request.bits | self._save_bit())
        if asked := agreed & (_SAVE - 1):
            self._request.is_taken = True
            self._stop(names(asked))
        return agreed

    def _save_bit(self) -> int:
        """The bit of a time-based save, requested once by rank 0, whose clock counts."""
        if self._every_minutes is None or self._trainer.parallel.rank or self._requested:
            return 0
        self._requested = time.monotonic() - self._saved_at >= 60 * self._every_minutes
        return _SAVE * self._requested

    def _stop(self, asked_by: str) -> None:
        """Save, wait until the checkpoint is on the disk, and end the run."""
        position = self._trainer.position()
        if self._due(position):
            self.save(position, is_best=False)
        else:
            state = self._trainer.state_dict()
            state["recorder"]["unrecorded"] = True  # a run that was never stopped has no row of this checkpoint
            self._write(state, is_best=False)
        self._trainer.checkpoints.close()
        raise PreemptedRunError(f"stopped by {asked_by} after update {self._trainer.progress.step:,}")


def _load_ranks(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """The state of each part; with another number of them the first gets all sums, and the buffers are the mean."""
    own, count = trainer.parallel.parts, trainer.parallel.num_parts
    sums: list[Tensor] = state["metrics"]
    if isinstance(sums, Tensor):  # format 3 has those of all ranks together
        sums = [sums, *[torch.zeros_like(sums)] * (count - 1)]
    if len(sums) != count:
        total = torch.stack(list(sums)).sum(0)
        sums = [total, *[torch.zeros_like(total)] * (count - 1)]
    trainer.metrics.sums.copy_(torch.stack([sums[part] for part in own]))
    if len(state["rng"]) == count:  # otherwise each rank keeps its own seed
        rng.restore(files.unpacked(state["rng"][own[0]]))
    else:
        line = f"other topology: {len(state['rng'])} ranks then, {count} now: same sample order, other sums"
        trainer.notes = [*trainer.notes, line]
    if len(buffers := state.get("buffers", [])) == count:
        for part, models in zip(own, _part_buffers(trainer), strict=True):
            for found, saved in zip(models, files.unpacked(buffers[part]), strict=True):
                for name, buffer in found.items():
                    buffer.copy_(saved[name])


def _part_buffers(trainer: Trainer) -> list[list[dict[str, Tensor]]]:
    """Of each part of this rank the buffers of each model."""
    return [[*each] for each in zip(*map(trainer.parallel.part_buffers, _models(trainer)), strict=True)]


def _models(trainer: Trainer) -> list[nn.Module]:
    """The trained and the evaluated model; one where nothing is averaged."""
    return list(dict.fromkeys((trainer.model, trainer.average.model)))


def _with_mean(parallel: Parallel, model: nn.Module) -> dict[str, Any]:
    """A model's weights with the mean of all parts' buffers, which stay as they are."""
    own = parallel.part_buffers(model)
    kept = [(buffer, buffer.clone()) for part in own for buffer in part.values()]
    parallel.average_buffers(model)
    weights = {name: value.clone() if name in own[0] else value for name, value in model.state_dict().items()}
    for buffer, value in kept:
        buffer.copy_(value)
    return weights
