"""Interleaved measurements in one run, because a machine's speed drifts by 10 % within a minute."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from effloop.errors import ConfigError

T = TypeVar("T")


def interleave(runs: Mapping[str, Callable[[], T]], repeats: int, warm_up: int = 1) -> dict[str, list[T]]:
    """What each run returns, `repeats` times: all runs take turns, every other round in reverse order.

    Args:
        runs: name -> a function that measures once.
        repeats: measurements of each.
        warm_up: rounds before these, whose results are dropped.
    """
    results: dict[str, list[T]] = {name: [] for name in runs}
    for number in range(repeats + warm_up):
        for name, measure in list(runs.items())[:: -1 if number % 2 else 1]:
            value = measure()
            if number >= warm_up:
                results[name].append(value)
    return results


@contextmanager
def scratch_folder(work: str) -> Iterator[Path]:
    """A temporary folder for what a benchmark writes: in `work`, or in the system's place for them if that is empty.

    Raises:
        ConfigError: it can't be created, or the disk is full; the line has the system's reason.
    """
    try:
        if work:
            Path(work).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="effloop-bench-", dir=work or None) as folder:
            yield Path(folder)
    except OSError as error:
        parent = work or tempfile.gettempdir()
        raise ConfigError(f"work: {parent} can't be written: {error.strerror or error}; set work=FOLDER") from error
