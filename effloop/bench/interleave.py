"""Measuring in turns, in one run, because a machine's speed drifts by 10 % within a minute."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from effloop.errors import ConfigError

T = TypeVar("T")


def take_turns(runs: Mapping[str, Callable[[], T]], repeats: int, warm_up: int = 1) -> dict[str, list[T]]:
    """What each run returns, `repeats` times, in turns whose order turns about.

    Args:
        runs: name -> measures once.
        repeats: how often each.
        warm_up: rounds before, whose results are dropped.
    """
    found: dict[str, list[T]] = {name: [] for name in runs}
    for number in range(repeats + warm_up):
        for name, measure in list(runs.items())[:: -1 if number % 2 else 1]:
            value = measure()
            if number >= warm_up:
                found[name].append(value)
    return found


@contextmanager
def scratch(work: str) -> Iterator[Path]:
    """A folder for what a benchmark makes, gone in the end; below `work`, or the system's place if that is empty.

    Raises:
        ConfigError: it can't be made, or what is written doesn't fit; the line has the system's reason.
    """
    try:
        if work:
            Path(work).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="effloop-bench-", dir=work or None) as folder:
            yield Path(folder)
    except OSError as error:
        place = work or tempfile.gettempdir()
        raise ConfigError(f"work: {place} can't be written: {error.strerror or error}; set work=FOLDER") from error
