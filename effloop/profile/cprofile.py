"""Python's own profiler: which functions of the training thread take the time."""

from __future__ import annotations

import cProfile
import pstats
from dataclasses import dataclass
from typing import Any

from effloop.profile.base import ProfileConfig, StepProfiler, as_lines, place, profilers

_ROWS = 15


@dataclass
class CProfileConfig(ProfileConfig):
    """Fields of `profile=cprofile`."""


@profilers.register("cprofile", CProfileConfig)
class CProfiler(StepProfiler):
    """Python functions of the training thread, by cProfile: a table, and a file for pstats or snakeviz.

    On a GPU the time of an operation is that of the thread that waits for it.
    """

    def start(self) -> None:
        self._profile = cProfile.Profile()
        self._profile.enable()

    def stop(self) -> None:
        self._profile.disable()
        self._profile.dump_stats(self.folder / "cprofile.pstats")

    def report(self) -> list[str]:
        if not self.active:
            return []
        stats: Any = pstats.Stats(self._profile)
        total = stats.total_tt or 1.0
        found = sorted(stats.stats.items(), key=lambda each: -each[1][2])[:_ROWS]
        rows = [
            [place(*where), f"{calls:,}", f"{1e3 * own:.1f}", f"{own / total:.1%}", f"{1e3 * whole:.1f}"]
            for where, (_, calls, own, whole, _) in found
        ]
        title = f"Python functions of {self.config.steps} updates, {1e3 * total:.0f} ms"
        lines = as_lines(title, ["function", "calls", "own ms", "share", "with callees ms"], rows)
        return [*lines, f"profile  {self.folder / 'cprofile.pstats'}   look: python -m pstats, or snakeviz"]
