"""What is said of an update whose numbers aren't finite: in a run's list of them, and in the line that it ends with."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from effloop.errors import CheckpointError, DivergedError, warn
from effloop.parallel import Parallel

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
