"""`diff`: what differs between runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from effloop.cli.command import command
from effloop.errors import PROGRAM, ConfigError
from effloop.registry import load_plugins
from effloop.runs import compare
from effloop.runs.reader import find_runs


@dataclass(frozen=True)
class DiffOptions:
    """Options of `diff`.

    Attributes:
        runs: folders of runs, or of sweeps, which stand for all their jobs.
    """

    runs: tuple[Path, ...] = field(metadata={"positional": "RUN"})


@command("diff", DiffOptions, "outputs/first outputs/second", overrides=False)
def diff_runs(options: DiffOptions, _: list[str]) -> int:
    """What differs between runs: config, environment, data, result."""
    load_plugins()  # which may have the runs' task
    found = find_runs(options.runs)
    if len(found) < 2:
        raise ConfigError(f"diff needs two runs or more: {PROGRAM} diff RUN RUN [RUN ...]")
    Console().print(*compare.difference_tables(found), sep="\n")
    return 0
