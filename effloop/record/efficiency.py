"""Time and memory of a run by part, for `efficiency.json` and three lines at the end."""

from __future__ import annotations

import resource
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.filesize import decimal

from effloop.record.clock import Span


@dataclass(frozen=True)
class Stage:
    """A part of a run, such as `decode`: its images/s if it were the only one, and what was measured."""

    name: str
    images_per_s: float
    detail: str = ""


@dataclass(frozen=True)
class Verdict:
    """What holds a run back: a stage or part, and a sentence."""

    bound: str
    line: str


@dataclass(frozen=True)
class Override:
    """What would help.

    Attributes:
        override: words for the command line, or for `convert`.
        why: a few words.
        exact: whether the same images are trained on, in the same precision.
        images_per_s: of the training loop with it, measured; None where it wasn't tried.
        gain: seconds of an epoch with its evaluation now, over those with it; None where it wasn't tried.
        commands: what to type for it.
    """

    override: str
    why: str
    exact: bool = True
    images_per_s: float | None = None
    gain: float | None = None
    commands: Sequence[str] = ()


@dataclass(frozen=True)
class Efficiency:
    """Speed, time and memory of a run, measured on rank 0.

    Attributes:
        images_per_s: of all ranks, in training, the wait for data included.
        steady_images_per_s: the median over the intervals between two lines of the log, without the first one.
        wait: share of the training that waited for data.
        device_idle: share of the training in which the device had nothing to do. On a CPU that is the wait.
        seconds: {part: its seconds}. `start`: of the command, until the config is known, 0 for a trainer built in
            Python; `build`: data and model, until there is a run folder; `compile`; `warm_up`: what the first interval
            took more than a steady one; `step` and `wait`: the rest of the training; `evaluation`; `checkpoint`;
            `other`. Together, the time from the command's start to its end; of a resumed run's earlier parts, that of
            training, evaluation and checkpoints.
        peak_bytes: {place: bytes}. `host`: this process, pages of files included; `gpu`: tensors on the current GPU, 0
            without one.
        stages: of loading, the step and the loop; empty where nobody looked.
        verdict: what holds the run back; None where nobody looked.
        override: one that may help; None if there is none, or little is waited for.
    """

    images_per_s: float
    steady_images_per_s: float
    wait: float
    device_idle: float
    seconds: Mapping[str, float]
    peak_bytes: Mapping[str, int]
    stages: Sequence[Stage] = ()
    verdict: Verdict | None = None
    override: Override | None = None

    @classmethod
    def of(
        cls, training: Span, intervals: Sequence[Span], seconds: Mapping[str, float], startup: Mapping[str, float]
    ) -> Efficiency:
        """Of a run's whole training and its parts, and the seconds of what comes after and before it."""
        steady = statistics.median([each.images_per_s for each in intervals[1:]] or [training.images_per_s])
        first = intervals[0] if len(intervals) > 1 else Span()
        warm_up = max(0.0, first.seconds - first.waited_s - first.samples / steady) if steady else 0.0
        parts = {"warm_up": warm_up, "step": training.seconds - training.waited_s - warm_up, "wait": training.waited_s}
        cuda: Any = torch.cuda  # without types
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        peak = {"host": host, "gpu": cuda.max_memory_allocated() if cuda.is_initialized() else 0}
        seconds = {**startup, **parts, **seconds}
        return cls(training.images_per_s, steady, training.wait, training.idle, seconds, peak)

    def lines(self) -> list[str]:
        """Three lines: speed, time, memory; and where it is known, what holds the run back, and what would help."""
        total = sum(self.seconds.values())
        parts = ", ".join(f"{name.replace('_', '-')} {each:.1f}" for name, each in self.seconds.items() if each >= 0.05)
        gpu = f", {decimal(self.peak_bytes['gpu'])} on the GPU" if self.peak_bytes["gpu"] else ""
        idle = f", device idle {self.device_idle:.1%}" if self.device_idle != self.wait else ""  # a GPU
        waited = f"{self.wait:.1%} of training waited for data"
        lines = [
            f"speed  {self.steady_images_per_s:,.0f} images/s steady; {waited}{idle}",
            f"time   {total:.1f} s: {parts}",
            f"memory {decimal(self.peak_bytes['host'])} at most{gpu}",
        ]
        if self.verdict:
            lines.append(f"bound  {self.verdict.line}")
        if self.override:
            gain = f", about {self.override.gain:.2f}x" if self.override.gain else ""
            lines.append(f"try    {self.override.override}{gain}: {self.override.why}")
        return lines
