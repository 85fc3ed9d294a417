"""Policies for a loss or gradient that is not finite: end the run, or skip the update."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from effloop.batch import Batch
from effloop.errors import CheckpointError, DivergedError, warn
from effloop.parallel import Parallel

LIST = "nan.jsonl"
"""File of a run folder: the updates whose loss, gradients or weights were not finite."""
_NAMED = 5  # samples in a message; all are in the file
_IN_A_ROW = 10
_SHARE, _SHARE_FROM = 0.1, 100
"""Skipped updates that end a run: so many in a row, or more than this share of all, from so many updates on."""
_LAG = 2  # updates of a GPU after which the host reads a flag, which has been copied by then: it doesn't wait


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Whether all values are finite: () bool, on the tensors' device, without a sync on a GPU."""
    each = [tensor for tensor in tensors if tensor.numel()]
    if not each:
        return torch.tensor(True)
    # On a CPU the L2 norm is 4 times as fast as any other check (20 million values in 6 ms on a core), but overflows
    # where values are above 1e19: these are checked one by one.
    order = math.inf if each[0].is_cuda else 2
    finite = torch.stack([norm.float() for norm in torch._foreach_norm(each, order)]).isfinite().all()
    if order == 2 and not finite.numpy():  # not `bool`, an operator that a profile would list as a wait
        return torch.tensor(all(bool(tensor.isfinite().all()) for tensor in each))
    return finite


@dataclass(frozen=True)
class NanContext:
    """The parts of a run that a policy works with.

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


@dataclass(frozen=True)
class Update:
    """An update on this rank: its position, and of each of its batches the samples' ids and the loss on the device."""

    epoch: int
    step: int
    lr: float
    batches: list[tuple[Tensor, Tensor]]


class At(Protocol):
    """The position of a run: the trainer's `Progress`."""

    epoch: int
    step: int


class NanPolicy:
    """Checks nothing; the base class of policies that do."""

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
            at: the position of the run, for messages.
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
        """The state to resume from: the same on all ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a `state_dict`; {} is one of another policy."""


class Stop(NanPolicy):
    """The run ends with the first loss or gradient that isn't finite.

    Ranks have the same gradients after they were averaged: so all of them decide alike, without a message. A CPU checks
    the gradients before it updates the weights. The host of a GPU would have to wait for that, so it reads the flag two
    updates later; weights that are spoilt by then are never saved.
    """

    def __init__(self, context: NanContext) -> None:
        self.context = context
        self._parameters = [each for each in context.model.parameters() if each.requires_grad]
        self._batches: deque[tuple[Tensor, Tensor]] = deque(maxlen=context.accumulate)
        self._pending: deque[tuple[Tensor, torch.cuda.Event, Update]] = deque()
        self._last: Update | None = None

    def loss(self, loss: Tensor, batch: Batch) -> Tensor:
        self._batches.append((batch.ids.clone(), loss.detach()))
        # The factor is 1, or NaN where the loss isn't finite: so are the gradients, whatever the backward pass does.
        return loss * (1 + 0 * loss.detach())

    def update(self, step: Callable[[], bool], at: At, lr: float) -> bool:
        update = self._take(at, lr)
        if self.context.scaler.is_enabled():
            return self._scaled(step, update)
        finite = self._finite()
        if finite.is_cuda:
            self._check_later(finite, update)
        elif not finite.numpy():
            self._found(update)
        return step()

    def check(self) -> None:
        self._batches.clear()  # of a short last group, whose gradients are dropped
        while self._pending:
            self._check_pending()
        models = dict.fromkeys((self.context.model, self.context.averaged))
        saved = [each for model in models for each in model.state_dict().values() if each.is_floating_point()]
        bad = torch.stack([1 - all_finite(each).double().cpu() for each in (saved, self._parameters)])
        any_bad, bad_weights = self.context.parallel.sum(bad).tolist()
        if bad_weights and self._last:
            entry = self._note(self._last, "weights")
            self._end(self._last, _describe(entry), entry)
        if any_bad:
            self._end(self._last or Update(0, 0, math.nan, []), "the weights are not finite any more")

    def _take(self, at: At, lr: float) -> Update:
        """This update with its batches; those of the next are collected from now on."""
        self._last = Update(at.epoch, at.step, lr, list(self._batches))
        self._batches.clear()
        return self._last

    def _finite(self) -> Tensor:
        return all_finite([each.grad for each in self._parameters if each.grad is not None])

    def _scaled(self, step: Callable[[], bool], update: Update) -> bool:
        """With a loss scale gradients overflow until it is right; below 1 it isn't the scale."""
        if step():
            return True
        if self.context.scaler.get_scale() < 1:
            self._found(update)
        return False

    def _check_later(self, finite: Tensor, update: Update) -> None:
        flag = torch.empty((), dtype=torch.bool, pin_memory=True)
        flag.copy_(finite, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._pending.append((flag, event, update))
        if len(self._pending) > _LAG:
            self._check_pending()

    def _check_pending(self) -> None:
        flag, event, update = self._pending.popleft()
        event.synchronize()
        if not flag:
            self._found(update)

    def _found(self, update: Update) -> None:
        """A loss or gradient of this update isn't finite, as all ranks know."""
        entry = self._note(update)
        self._end(update, _describe(entry), entry)

    def _note(self, update: Update, what: str = "gradient") -> dict[str, Any]:
        """List an update in `nan.jsonl`, which rank 0 writes; every rank calls it.

        Args:
            update: whose loss isn't finite, or else `what`.
            what: `gradient`, or `weights` after it.

        Returns:
            The row: with the samples of the batches whose loss isn't finite, or of all.
        """
        all_ids = [ids.tolist() for ids, _ in update.batches]
        losses = [float(loss) for _, loss in update.batches]
        bad = [number for number, loss in enumerate(losses) if not math.isfinite(loss)]
        own = {"loss": [losses[each] for each in bad], "ids": [all_ids[each] for each in bad], "all": all_ids}
        ranks: list[dict[str, Any]] = self.context.parallel.gather(own)
        by_loss = any(rank["ids"] for rank in ranks)
        entry: dict[str, Any] = {
            "epoch": update.epoch,
            "step": update.step,
            "lr": update.lr,
            "what": "loss" if by_loss else what,
            "loss": [str(loss) for rank in ranks for loss in rank["loss"]],
            "ranks": [number for number, rank in enumerate(ranks) if rank["ids"]],
            "ids": sorted({id_ for rank in ranks for ids in rank["ids" if by_loss else "all"] for id_ in ids}),
        }
        if not self.context.parallel.rank:
            path = self.context.run_dir / LIST
            try:
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**entry, "names": [*map(self.context.name, entry["ids"])]}) + "\n")
            except OSError as error:
                warn(f"{path}: {error.strerror}; updates that weren't finite are not listed")
        return entry

    def _end(self, update: Update, what: str, entry: Mapping[str, Any] | None = None) -> NoReturn:
        """End the run on every rank.

        Args:
            update: that it ends after.
            what: isn't finite, in words.
            entry: the row of `_note`.

        Raises:
            DivergedError: always.
        """
        line = self.context.parallel.on_rank0(lambda: self._message(update, what, (entry or {}).get("ids", [])))
        raise DivergedError(line)

    def _message(self, update: Update, what: str, ids: list[int]) -> str:
        folder = self.context.run_dir
        names = ", ".join(f"{id_} ({self.context.name(id_)})" for id_ in ids[:_NAMED])
        more = f" and {len(ids) - _NAMED} more, all in {folder / LIST}" if len(ids) > _NAMED else ""
        with suppress(CheckpointError):  # then the one before is the last good one
            self.context.saved()
        last = folder / "checkpoints" / "last.ckpt"
        return (
            f"nan: epoch {update.epoch}, step {update.step}, lr {update.lr:g}: {what}"
            f"{f', samples {names}{more}' if names else ''}; try a lower lr, max_grad_norm=1, or precision=bf16 or fp32"
            f"{f'; the last good checkpoint is {last}' if last.is_file() else ''}"
        )


def _describe(entry: Mapping[str, Any]) -> str:
    """The cause, in words."""
    if entry["what"] == "weights":
        return "the weights are not finite after it"
    if entry["what"] == "gradient":
        return "a gradient is not finite, though the loss is"
    return f"the loss is {', '.join(dict.fromkeys(entry['loss']))}"


class Skip(Stop):
    """The update is left out, as if its batches didn't exist: weights, statistics, average and schedule stay.

    On a GPU the host waits for every update to know. The run ends after 10 such updates in a row, and from the
    100th update on where they are more than a tenth.
    """

    def __init__(self, context: NanContext) -> None:
        super().__init__(context)
        self._kept = [*context.model.buffers(), context.sums]
        self._copies = [each.clone() for each in self._kept]
        self._counts = dict.fromkeys(("updates", "skipped", "in_a_row"), 0)

    def before(self) -> None:
        if not self._batches:
            torch._foreach_copy_(self._copies, self._kept)

    def update(self, step: Callable[[], bool], at: At, lr: float) -> bool:
        update = self._take(at, lr)
        self._counts["updates"] += 1
        scaled = self.context.scaler.is_enabled()
        if (scaled or bool(self._finite())) and step():
            self._counts["in_a_row"] = 0
            return True
        torch._foreach_copy_(self._kept, self._copies)
        if not scaled or self.context.scaler.get_scale() < 1:
            self._found(update)
        return False

    def state_dict(self) -> dict[str, int]:
        return dict(self._counts)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._counts = {name: state.get(name, 0) for name in self._counts}

    def check(self) -> None:
        if self._batches and not all_finite([each for each in self._kept if each.is_floating_point()]):
            torch._foreach_copy_(self._kept, self._copies)
        super().check()

    def _found(self, update: Update) -> None:
        entry, counts = self._note(update), self._counts
        counts["skipped"] += 1
        counts["in_a_row"] += 1
        if counts["in_a_row"] >= _IN_A_ROW:
            self._end(update, f"{_describe(entry)}, the {_IN_A_ROW}th skipped update in a row", entry)
        updates, skipped = counts["updates"], counts["skipped"]
        if updates >= _SHARE_FROM and skipped > _SHARE * updates:
            self._end(update, f"{_describe(entry)}, {skipped} of {updates} updates were skipped", entry)
        if not self.context.parallel.rank:
            where = self.context.run_dir / LIST
            warn(f"nan=skip: updates whose loss or gradients aren't finite are left out, and listed in {where}")


POLICIES: dict[str, Callable[[NanContext], NanPolicy]] = {"stop": Stop, "skip": Skip}
"""By the name that users type."""
