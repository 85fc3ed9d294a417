"""When a run is saved besides at the end of each epoch, and how it ends where it is asked to."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

from effloop.batch import Batch
from effloop.errors import PreemptedRunError
from effloop.record import Position
from effloop.system.signals import STOPPING, StopRequest, names
from effloop.train.state import Parts

_SAVE = 1 << len(STOPPING)
"""The bit of a wish to save, after those of the signals."""


class Saving:
    """Saves at the end of an update, on all ranks at the same one.

    Args:
        trainer: whose state is saved.
        request: what asks this process to stop.
    """

    def __init__(self, trainer: Parts, request: StopRequest) -> None:
        self._trainer, self._request = trainer, request
        config = trainer.checkpoints.config
        self._every_steps, self._every_minutes = config.every_steps, config.every_minutes
        request.patience_s = config.patience_s
        self._saved_at = time.monotonic()
        self._wished = False
        """Whether the wish to save is on its way to all ranks."""

    def caught(self) -> AbstractContextManager[None]:
        """Signals inside the block are requests to stop."""
        return self._request.caught()

    def trained(self) -> None:
        """After each batch."""
        self._request.progress()

    def updated(self) -> None:
        """After each update: save where it is time.

        Raises:
            CheckpointError: an earlier checkpoint could not be written.
            PreemptedRunError: this run was asked to stop; it is saved.
        """
        self._trainer.checkpoints.check()
        agreed, position = self._agreed(), self._trainer.position()
        if (agreed & _SAVE and position.update < position.updates) or self._due(position):
            self.save(position, is_best=False)

    def _due(self, position: Position) -> bool:
        """Whether it is time by the number of updates; at the end of an epoch that is saved with its scores."""
        within = position.update < position.updates
        return bool(within and self._every_steps and position.step % self._every_steps == 0)

    def evaluating(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches; a run that is asked to stop is saved as before the evaluation, which is done again.

        Raises:
            PreemptedRunError: this run was asked to stop.
        """
        for batch in batches:
            yield batch
            self._request.progress()
            self._agreed()

    def save(self, position: Position, *, is_best: bool) -> None:
        """Save the state as it is between two updates; `position` is for the times that are recorded."""
        with self._request.busy(), self._trainer.recorder.span("checkpoint", position):
            self._trainer.checkpoints.save(self._trainer.state_dict(), is_best=is_best)
        self._saved_at, self._wished = time.monotonic(), False

    def _agreed(self) -> int:
        """What all ranks know of each other's wishes."""
        agreed = self._trainer.parallel.agree(self._request.wish | self._wish_to_save())
        if asked := agreed & (_SAVE - 1):
            self._request.taken()
            self._stop(names(asked))
        return agreed

    def _wish_to_save(self) -> int:
        """Rank 0's clock counts, once until it is saved."""
        if self._every_minutes is None or self._trainer.parallel.rank or self._wished:
            return 0
        self._wished = time.monotonic() - self._saved_at >= 60 * self._every_minutes
        return _SAVE * self._wished

    def _stop(self, asked_by: str) -> None:
        """Save until the checkpoint is on the disk."""
        position = self._trainer.position()
        if self._due(position):
            self.save(position, is_best=False)
        else:
            state = self._trainer.state_dict()
            state["recorder"]["unrecorded"] = True  # a run that was never stopped has no row of this checkpoint
            self._trainer.checkpoints.save(state, is_best=False)
        self._trainer.checkpoints.close()
        raise PreemptedRunError(f"stopped by {asked_by} after update {self._trainer.progress.step:,}")
