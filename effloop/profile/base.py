"""The base class of profilers, and the one that does nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.console import Console
from rich.table import Table

from effloop.errors import PROGRAM, ConfigError
from effloop.registry import PartConfig, Registry


@dataclass
class ProfileConfig(PartConfig):
    """Fields that every profiler has.

    Attributes:
        wait: updates before the profile begins: the first ones choose algorithms and fill caches.
        steps: updates that are profiled; the run ends after them.
    """

    wait: int = 10
    steps: int = 20
    more: ClassVar[int] = 0
    """Updates after these that the profiler needs, too."""

    def __post_init__(self) -> None:
        if self.wait < 0:
            raise ConfigError(f"profile.wait: {self.wait} is not allowed; set a number of updates, or 0")
        if self.steps < 1:
            raise ConfigError(f"profile.steps: {self.steps} is not allowed; set a number of updates above 0")

    def check(self, updates: int, device: torch.device, *, in_place: bool) -> None:
        """Raise a ConfigError if fewer `updates` are left than needed, or the run resumes `in_place`, in its folder."""
        del device
        if in_place:
            raise ConfigError(
                f"profile: {self.name} ends the run, and this one is to be finished; start a separate one: "
                f"{PROGRAM} resume=RUN profile={self.name}"
            )
        needed = self.wait + self.steps + self.more
        if needed > updates:
            raise ConfigError(
                f"profile: wait={self.wait} and steps={self.steps} need {needed} updates, and {updates} are left; "
                f"set profile.wait={min(self.wait, updates // 4)} profile.steps={max(1, updates // 2)}, or more epochs"
            )


@dataclass
class NoneConfig(ProfileConfig):
    """Fields of `profile=none`, which have no effect."""

    def check(self, updates: int, device: torch.device, *, in_place: bool) -> None:
        pass


class Profiler:
    """Profiles nothing; the base class of profilers that do.

    Attributes:
        done: whether the run may end.
    """

    done = False

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        """The run has ended, maybe in the middle of a profile."""

    def step(self) -> None:
        """An update of the run is done."""

    def report(self) -> list[str]:
        """Lines about the profile, once it is done."""
        return []


profilers: Registry[Profiler] = Registry(
    "profile", dict.fromkeys(("cprofile", "nvtx", "torch"), "effloop.profile.tools")
)


@profilers.register("none", NoneConfig)
def null_profiler(config: NoneConfig, *context: Any) -> Profiler:
    """Nothing is profiled."""
    del config, context
    return Profiler()


class StepProfiler(Profiler, ABC):
    """Profiles the updates after the first `wait`; subclasses implement how.

    Args:
        config: which updates.
        run_dir: the run folder.
        device: of the model.
        rank: only rank 0 profiles; the others do as many updates.
    """

    def __init__(self, config: ProfileConfig, run_dir: Path, device: torch.device, rank: int) -> None:
        self.config = config
        self.folder = run_dir / "profile"
        self.device = device
        self.active = rank == 0
        self.updates = 0

    def __enter__(self) -> Profiler:
        if self.active:
            self.folder.mkdir(exist_ok=True)
            if not self.config.wait:
                self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.active and 0 <= self.updates - self.config.wait < self.config.steps:
            self.stop()

    def step(self) -> None:
        self.updates += 1
        profiled = self.updates - self.config.wait
        if self.active and profiled == 0:
            self.start()
        if self.active and profiled == self.config.steps:
            self.stop()
        self.done = profiled >= self.config.steps + self.config.more

    @abstractmethod
    def start(self) -> None:
        """Begin to profile."""

    @abstractmethod
    def stop(self) -> None:
        """End it."""


def as_lines(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as lines of text; the first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    text = StringIO()
    Console(file=text, width=120, color_system=None).print(table, markup=False)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def place(file: str, line: int, function: str) -> str:
    """`mine.py:12 (forward)`, with at most one folder; a built-in function's name."""
    return function if file == "~" else f"{'/'.join(file.split('/')[-2:])}:{line} ({function})"
