"""Policies for a loss or gradient that is not finite: end the run, or skip the update."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from effloop.batch import Batch
from effloop.errors import CheckpointError, DivergedError, warn
from effloop.parallel import Parallel


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Whether all values are finite: () bool, on the tensors' device, without a sync on a GPU.

    The L2 norm on a CPU is 4 times as fast as any other look (20 million values in 6 ms on a core), but overflows where
    values are above 1e19: these are looked at one by one.
    """
    each = [tensor for tensor in tensors if tensor.numel()]
    if not each:
        return torch.tensor(True)
    order = math.inf if each[0].is_cuda else 2
    norms = [norm.float() for norm in torch._foreach_norm(each, order)]
    finite = torch.stack(norms).isfinite().all()
    if order == 2 and not host_value(finite):
        return torch.tensor(all(bool(tensor.isfinite().all()) for tensor in each))
    return finite


def host_value(tensor: Tensor) -> float:
    """The number of a () tensor on the host; unlike `item`, no operator, which a profile has for a wait."""
    return float(tensor.float().numpy())


LIST = "nan.jsonl"
"""File of a run folder: the updates whose loss, gradients or weights were not finite."""
_NAMED = 5  # samples in a line; all are in the file
_TRY = "try a lower lr, max_grad_norm=1, or precision=bf16 or fp32"


@dataclass(frozen=True)
class Update:
    """What went into an update on this rank: its place, its batches' samples and their losses on the device."""

    epoch: int
    step: int
    lr: float
    ids: list[Tensor]
    losses: list[Tensor]


@dataclass(frozen=True)
class NanContext:
    """What a policy works with.

    Attributes:
        model: what is trained.
        averaged: what is evaluated and saved; the same, or an average.
        parallel: its ranks decide together.
        sums: of the training epoch, in which skipped updates don't count.
        accumulate: batches of an update.
        scaler: of the loss; where it is enabled it leaves updates out itself.
        run_dir: the run folder.
        name: a sample's name, by its number in the source.
        saved: waits for the checkpoint that is being written.
    """

    model: nn.Module
    averaged: nn.Module
    parallel: Parallel
    sums: Tensor
    accumulate: int
    scaler: torch.amp.GradScaler
    run_dir: Path
    name: Callable[[int], str]
    saved: Callable[[], None] = lambda: None


class NanList:
    """`nan.jsonl`, which rank 0 writes.

    Args:
        context: of the run.
    """

    def __init__(self, context: NanContext) -> None:
        self._context = context

    def note(self, update: Update, what: str = "gradient") -> dict[str, Any]:
        """List an update; every rank calls it.

        Args:
            update: whose loss isn't finite, or else what `what` says.
            what: `gradient`, or `weights` after it.

        Returns:
            What the file says: the samples of the batches whose loss isn't finite, or of all.
        """
        losses = [float(loss) for loss in update.losses]
        odd = [number for number, loss in enumerate(losses) if not math.isfinite(loss)]
        ids = [ids.tolist() for ids in update.ids]
        own = {"loss": [losses[each] for each in odd], "ids": [ids[each] for each in odd], "all": ids}
        parts: list[dict[str, Any]] = self._context.parallel.gather(own)
        is_loss = any(part["ids"] for part in parts)
        found = sorted({id_ for part in parts for ids in part["ids" if is_loss else "all"] for id_ in ids})
        ranks = [rank for rank, part in enumerate(parts) if part["ids"]]
        entry: dict[str, Any] = {"epoch": update.epoch, "step": update.step, "lr": update.lr}
        entry["what"] = "loss" if is_loss else what
        entry |= {"loss": [str(loss) for part in parts for loss in part["loss"]], "ranks": ranks, "ids": found}
        if not self._context.parallel.rank:
            self._write({**entry, "names": [self._context.name(id_) for id_ in found]})
        return entry

    def _write(self, entry: Mapping[str, Any]) -> None:
        try:
            with (self._context.run_dir / LIST).open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            warn(f"{self._context.run_dir / LIST}: {error.strerror}; updates that weren't finite are not listed")

    def end(self, update: Update, what: str, entry: Mapping[str, Any] | None = None) -> NoReturn:
        """End the run on every rank.

        Args:
            update: that it ends after.
            what: isn't finite, in words.
            entry: what `note` gave.

        Raises:
            DivergedError: always.
        """
        line = self._context.parallel.on_rank0(lambda: self._line(update, what, entry or {}))
        raise DivergedError(line)

    def _line(self, update: Update, what: str, entry: Mapping[str, Any]) -> str:
        ids = entry.get("ids", [])
        names = [f"{id_} ({self._context.name(id_)})" for id_ in ids[:_NAMED]]
        more = f" and {len(ids) - _NAMED} more, all in {self._context.run_dir / LIST}" if len(ids) > _NAMED else ""
        of = f", samples {', '.join(names)}{more}" if names else ""
        with suppress(CheckpointError):  # then the one before is the last good one
            self._context.saved()
        last = self._context.run_dir / "checkpoints" / "last.ckpt"
        kept = f"; the last good checkpoint is {last}" if last.is_file() else ""
        return f"nan: epoch {update.epoch}, step {update.step}, lr {update.lr:g}: {what}{of}; {_TRY}{kept}"


def described(entry: Mapping[str, Any]) -> str:
    """What wasn't finite, in words."""
    if entry["what"] == "weights":
        return "the weights are not finite after it"
    if entry["what"] == "gradient":
        return "a gradient is not finite, though the loss is"
    return f"the loss is {', '.join(dict.fromkeys(entry['loss']))}"


_IN_A_ROW = 10
_SHARE, _SHARE_FROM = 0.1, 100
"""Skipped updates that end a run: so many in a row, or more than this share of all, from so many updates on."""
_SMALL = 16384  # values of a tensor whose gradient a CPU looks at in each update
_EVERY = 16  # updates of a CPU from one look at the weights to the next
_LAG = 2  # updates of a GPU after which the host looks at a flag, which is there by then: it doesn't wait


class At(Protocol):
    """Where a run is: the trainer's `Progress`."""

    epoch: int
    step: int


class NanPolicy:
    """Doesn't look; the base class of policies that do."""

    def before(self) -> None:
        """Before the forward pass of a batch."""

    def loss(self, loss: Tensor, batch: Batch) -> Tensor:
        """The loss whose gradients are computed: () -> (), of the same value.

        Args:
            loss: of a batch of this rank.
            batch: whose samples are named where the loss isn't finite.
        """
        del batch
        return loss

    def update(self, step: Callable[[], bool], at: At, lr: float) -> bool:
        """Update the weights, or not; every rank calls it.

        Args:
            step: updates them; False if it didn't, as scaled gradients overflowed.
            at: where the run is, for messages.
            lr: learning rate of the update, for messages.

        Raises:
            DivergedError: the run ends; raised on every rank.
        """
        del at, lr
        return step()

    def check(self) -> None:
        """Before a checkpoint: make sure that the weights may be saved; every rank calls it.

        Raises:
            DivergedError: they aren't finite; raised on every rank.
        """

    def state_dict(self) -> dict[str, int]:
        """What a run continues from: the same on all ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a `state_dict`; {} is one of another policy."""


class Stop(NanPolicy):
    """The run ends with the first loss or gradient that isn't finite.

    A batch whose loss isn't finite has gradients that aren't, whatever its backward pass makes of it, and ranks have
    the same gradients after they were averaged: so all ranks decide alike, without a message. One rank alone looks at
    the loss itself.

    Looking at all gradients is 3 % of an update of a CPU. It looks at the loss and at those of small tensors, before
    the weights are updated. A gradient of another tensor makes weights that aren't finite, and these the next loss:
    then the update before is named. Weights that no loss shows are looked at every 16 updates. A GPU looks at all
    gradients; its host would have to wait to know, so it looks two updates later. Weights that are spoilt by then are
    never saved.

    Args:
        context: what it works with.
    """

    def __init__(self, context: NanContext) -> None:
        self.context, self._list = context, NanList(context)
        self._parameters = [each for each in context.model.parameters() if each.requires_grad]
        small = [each for each in self._parameters if each.dim() <= 2 and each.numel() <= _SMALL]
        self._small = small or self._parameters
        self._host = not any(each.is_cuda for each in self._parameters) and not context.scaler.is_enabled()
        self._alone = self._host and context.parallel.world_size == 1
        self._ids: deque[Tensor] = deque(maxlen=context.accumulate)
        self._losses: deque[Tensor] = deque(maxlen=context.accumulate)
        self._pending: deque[tuple[Tensor, torch.cuda.Event, Update]] = deque()
        self._last: Update | None = None

    def loss(self, loss: Tensor, batch: Batch) -> Tensor:
        self._ids.append(batch.ids.clone())
        self._losses.append(loss.detach())
        if self._alone:
            return loss
        return loss * (1 + 0 * loss.detach())  # the factor of the gradients is 1, or NaN

    def update(self, step: Callable[[], bool], at: At, lr: float) -> bool:
        before, self._last = self._last, self._taken(at, lr)
        if self.context.scaler.is_enabled():
            return self._scaled(step, self._last)
        if not self._host:
            self._look_later(self._finite(), self._last)
        elif not self._seems_finite(self._last.losses):
            if before and not host_value(all_finite(self._parameters)):
                self._spoilt(before)
            self._found(self._last)
        elif before and at.step % _EVERY == 0 and not host_value(all_finite(self._parameters)):
            self._spoilt(before)
        return step()

    def check(self) -> None:
        self._ids.clear()  # of a short last group, whose gradients are dropped
        self._losses.clear()
        while self._pending:
            self._look()
        models = dict.fromkeys((self.context.model, self.context.averaged))
        saved = [each for model in models for each in model.state_dict().values() if each.is_floating_point()]
        bad = torch.stack([1 - all_finite(each).double().cpu() for each in (saved, self._parameters)])
        any_bad, bad_weights = self.context.parallel.sum(bad).tolist()
        if bad_weights and self._last:
            self._spoilt(self._last)
        if any_bad:
            self._list.end(self._last or Update(0, 0, math.nan, [], []), "the weights are not finite any more")

    def _taken(self, at: At, lr: float) -> Update:
        """This update's batches; those of the next are collected from now on."""
        taken = Update(at.epoch, at.step, lr, list(self._ids), list(self._losses))
        self._ids.clear()
        self._losses.clear()
        return taken

    def _finite(self) -> Tensor:
        return all_finite([each.grad for each in self._parameters if each.grad is not None])

    def _seems_finite(self, losses: Sequence[Tensor]) -> bool:
        """Whether losses and gradients of small tensors are: NaN and infinity stay in a sum, which may overflow."""
        if self._alone and not all(math.isfinite(host_value(each)) for each in losses):
            return False
        gradients = [each.grad for each in self._small if each.grad is not None]
        if not gradients or math.isfinite(host_value(torch.cat([each.reshape(-1) for each in gradients]).sum())):
            return True
        return bool(all_finite(gradients))

    def _scaled(self, step: Callable[[], bool], update: Update) -> bool:
        """With a loss scale gradients overflow until it is right; below 1 it isn't the scale."""
        if step():
            return True
        if self.context.scaler.get_scale() < 1:
            self._found(update)
        return False

    def _look_later(self, finite: Tensor, update: Update) -> None:
        flag = torch.empty((), dtype=torch.bool, pin_memory=True)
        flag.copy_(finite, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._pending.append((flag, event, update))
        if len(self._pending) > _LAG:
            self._look()

    def _look(self) -> None:
        flag, event, update = self._pending.popleft()
        event.synchronize()
        if not flag:
            self._found(update)

    def _found(self, update: Update) -> None:
        """A loss or gradient of this update isn't finite, as all ranks know."""
        entry = self._list.note(update)
        self._list.end(update, described(entry), entry)

    def _spoilt(self, update: Update) -> NoReturn:
        """The weights aren't finite after this update, as all ranks know."""
        entry = self._list.note(update, "weights")
        self._list.end(update, described(entry), entry)


class Skip(Stop):
    """The update is left out, as if its batches didn't exist: weights, statistics, average and schedule stay.

    On a GPU the host waits for every update to know. The run ends after 10 such updates in a row, and from the
    100th update on where they are more than a tenth.
    """

    def __init__(self, context: NanContext) -> None:
        super().__init__(context)
        self._kept = [*context.model.buffers(), context.sums]
        self._copies = [each.clone() for each in self._kept]
        self._updates = self._skipped = self._in_a_row = 0

    def before(self) -> None:
        if not self._ids:
            for copy, each in zip(self._copies, self._kept, strict=True):
                copy.copy_(each)

    def update(self, step: Callable[[], bool], at: At, lr: float) -> bool:
        self._last = update = self._taken(at, lr)
        self._updates += 1
        scaled = self.context.scaler.is_enabled()
        if (scaled or bool(self._finite())) and step():
            self._in_a_row = 0
            return True
        self._restore()
        if not scaled or self.context.scaler.get_scale() < 1:
            self._found(update)
        return False

    def state_dict(self) -> dict[str, int]:
        return {"updates": self._updates, "skipped": self._skipped, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._updates, self._skipped, self._in_a_row = (
            state.get(name, 0) for name in ("updates", "skipped", "in_a_row")
        )

    def check(self) -> None:
        if self._ids and not all_finite([each for each in self._kept if each.is_floating_point()]):
            self._restore()
        super().check()

    def _restore(self) -> None:
        for copy, each in zip(self._copies, self._kept, strict=True):
            each.copy_(copy)

    def _found(self, update: Update) -> None:
        entry = self._list.note(update)
        self._skipped += 1
        self._in_a_row += 1
        if self._in_a_row >= _IN_A_ROW:
            self._list.end(update, f"{described(entry)}, the {_IN_A_ROW}th skipped update in a row", entry)
        if self._updates >= _SHARE_FROM and self._skipped > _SHARE * self._updates:
            self._list.end(
                update, f"{described(entry)}, {self._skipped} of {self._updates} updates were skipped", entry
            )
        if not self.context.parallel.rank:
            where = self.context.run_dir / LIST
            warn(f"nan=skip: updates whose loss or gradients aren't finite are left out, and listed in {where}")


POLICIES: dict[str, Callable[[NanContext], NanPolicy]] = {"stop": Stop, "skip": Skip}
"""By the name that users type."""
