"""`skipped.jsonl`: images that `on_error=skip` did without. The data path writes it, here it is read."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from effloop.system.untrusted import NewLines

SKIPPED = "skipped.jsonl"
"""Its name in a run folder."""


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """One image, in one epoch (0 for `val`): number and name of the sample, and the one that was loaded `instead`."""

    split: str
    epoch: int
    id: int
    name: str
    reason: str
    instead: int | None


class SkippedFile:
    """The list of a run folder, of which only what is new is read."""

    def __init__(self, run_dir: Path) -> None:
        self._lines = NewLines(run_dir / SKIPPED)
        self._found: dict[tuple[str, int, int], SkippedRow] = {}

    def read(self) -> list[SkippedRow]:
        """The rows in the order of epochs and samples; without what isn't a row."""
        for line in self._lines.read():
            with suppress(LookupError, TypeError, ValueError, OverflowError, RecursionError):
                row = json.loads(line)
                instead = None if row["instead"] is None else int(row["instead"])
                key = str(row["split"]), int(row["epoch"]), int(row["id"])
                self._found[key] = SkippedRow(*key, str(row["name"]), str(row["reason"]), instead)
        return [self._found[key] for key in sorted(self._found)]


def counted(rows: list[SkippedRow]) -> dict[str, int]:
    """{split: how many different images}."""
    splits = {row.split for row in rows}
    return {split: len({row.id for row in rows if row.split == split}) for split in sorted(splits)}


def lines_of(rows: list[SkippedRow], epoch: int, *, first: bool) -> list[str]:
    """Lines for the log at the end of an epoch; `first`: the validation split was evaluated for the first time."""
    lines = []
    for split, different in counted(rows).items():
        now = [row for row in rows if row.split == split and (row.epoch == epoch if split == "train" else first)]
        if now:
            what = "were replaced" if split == "train" else "were left out"
            more = f"; {different:,} different ones until now" if different > len(now) else ""
            lines.append(
                f"skipped  {len(now):,} of {split} can't be loaded and {what}: {now[0].name} {now[0].reason}"
                f"{', and others' * (len(now) > 1)} ({SKIPPED}){more}"
            )
    return lines
