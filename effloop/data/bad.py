"""What becomes of samples that can't be loaded: a function of (seed, epoch, sample), as everything about a sample; and
the list of those that `on_error=skip` did without.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from effloop.batch import Batch, Skipped
from effloop.data.order import REPEAT, SAMPLE
from effloop.data.random import sample_keys, stream, words
from effloop.errors import DataError, warn
from effloop.system.untrusted import NewLines, append


class OnError(Enum):
    """What a run does about a sample that can't be loaded: end, or do without it."""

    fail = "fail"
    skip = "skip"


class OnBad(Enum):
    """What a plan does about it: raise, load another sample into its row, or leave the row out."""

    fail = "fail"
    replace = "replace"
    leave_out = "leave_out"


_ATTEMPTS = 100
_INSTEAD = 7  # purpose of a key
_REPLACES = 1 << 22  # of the 23 bits from `REPEAT` on: one that no repeat within an epoch reaches


def drawn_instead(seed: int, epoch: int, num_samples: int, number: int) -> list[int]:
    """The samples that take the place of another one, the first of them that can be loaded, as a request numbers them.

    Each is augmented as it is nowhere else in the epoch.
    """
    keys = stream(sample_keys(seed, epoch, np.array([number])), _INSTEAD)
    samples, repeats = words(keys, 0, 2 * _ATTEMPTS).reshape(2, _ATTEMPTS)
    others = (samples % np.uint64(num_samples)).astype(np.int64)
    times = (repeats % np.uint64(_REPLACES)).astype(np.int64) | _REPLACES
    found: list[int] = (others | times << REPEAT).tolist()
    return found


def quota(max_errors: float, num_samples: int) -> int:
    """How many different samples of a split may be bad: below 1 a share of it, but one at least."""
    return int(max_errors) if max_errors >= 1 else max(1, int(max_errors * num_samples))


_WARNED = 5


class Ledger:
    """The skipped samples of a split, each once an epoch. It is nothing that a run continues from.

    There may be `quota(max_errors, num_samples)` different ones.
    """

    def __init__(self, split: str, where: str, num_samples: int, max_errors: float) -> None:
        self.split, self.where, self.num_samples = split, where, num_samples
        self.max_errors = max_errors
        self.most = quota(max_errors, num_samples)
        self._listed: set[tuple[int, int]] = set()  # epoch and sample
        self._bad: set[int] = set()
        self._path: Path | None = None
        self._lines: NewLines | None = None

    def keep_in(self, path: Path) -> None:
        """List them in a file from now on, which all ranks append to; what it has already counts."""
        self._path, self._lines = path, NewLines(path)
        self._read()

    def note(self, epoch: int, batch: Batch) -> Batch:
        """The same batch; what was skipped in it is listed.

        Raises:
            DataError: there are more than the quota.
        """
        if batch.skipped:
            self._add(epoch, batch.skipped)
        return batch

    def _add(self, epoch: int, skipped: Sequence[Skipped]) -> None:
        rows = []
        for each in skipped:
            sample = each.id & SAMPLE
            if (epoch, sample) not in self._listed:
                self._listed.add((epoch, sample))
                self._bad.add(sample)
                instead = None if each.instead is None else each.instead & SAMPLE
                rows.append({"split": self.split, "epoch": epoch, "id": sample, "name": each.name})
                rows[-1] |= {"reason": each.reason, "instead": instead}
        if rows and self._path:
            self._append(rows)
            self._read()
        for row in rows if self._path is None else []:
            if len(self._listed) <= _WARNED:
                warn(f"on_error=skip: {row['name']} {row['reason']}")
        self._check()

    def _check(self) -> None:
        if len(self._bad) > self.most:
            share = f" of {self.num_samples:,}" if self.max_errors < 1 else ""
            listed = f"; {self._path} lists them" if self._path else ""
            raise DataError(
                f"on_error: {len(self._bad):,} samples in {self.where} can't be loaded, and max_errors="
                f"{self.max_errors:g} allows {self.most:,}{share}{listed}: repair or remove them, or set max_errors "
                "higher"
            )

    def _append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append rows in one write, which other ranks' writes don't come between."""
        assert self._path is not None
        text = "".join(json.dumps(row) + "\n" for row in rows)
        try:
            append(self._path, text.encode())
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            warn(f"on_error: {self._path} can't be written: {reason}; the run continues without it")

    def _read(self) -> None:
        """Take note of what other ranks, and this run before it was resumed, have listed."""
        assert self._lines is not None
        for row in self._lines.read():
            try:
                found = json.loads(row)
                if found["split"] == self.split:
                    self._listed.add((int(found["epoch"]), int(found["id"])))
                    self._bad.add(int(found["id"]))
            except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
                continue
