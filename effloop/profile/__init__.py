"""Profilers: some updates of a run, looked at closely. Here are their base class, and the one that does nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from effloop.errors import PROGRAM, ConfigError, check_value
from effloop.lazy import torch
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
    more: ClassVar[int] = 0  # updates after these that the profiler needs, too

    def __post_init__(self) -> None:
        check_value("profile.wait", self.wait, self.wait >= 0, "a number of updates, or 0")
        check_value("profile.steps", self.steps, self.steps > 0, "a number of updates above 0")

    def check(self, updates: int, device: torch.device, *, in_place: bool) -> None:
        """Raise a ConfigError if fewer `updates` are left than needed, or the run resumes `in_place`, in its folder."""
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
    return Profiler()
