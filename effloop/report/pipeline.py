"""The stages of a run as pictures show them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from effloop.record import efficiency
from effloop.record.efficiency import Override, Verdict
from effloop.report.values import as_number, to_text

SUMS = ("loader", "loop")  # of stages
_LOADING = ("storage", "decode", "augment", "batch")
_STAGE_OF = {"compute": "step", "sync": "step", "logging": "log"}
_NARROWEST, _SPAN = 0.12, 100  # a stage's size is this for the slowest, and 1 for those 100 times as fast


@dataclass(frozen=True)
class Stage:
    """A stage, or several together.

    Attributes:
        name: `decode`.
        rate: images/s if it were the only one.
        detail: what was measured.
        size: of its bar, from 0 to 1: the logarithm of the rate, from the slowest stage to a hundred times that.
        marked: whether it holds the others back.
    """

    name: str
    rate: float
    detail: str
    size: float
    marked: bool


@dataclass(frozen=True)
class Pipeline:
    """What was measured of a run's stages, and what follows from it.

    Attributes:
        rows: the stages in order, with their sums: `loader` before the wait for data, and `loop`, all of them.
        rate: images/s of the training loop.
        wait: share of the loop's time that waits for data.
        evaluation: share of an epoch's time that evaluation takes; NaN if it isn't known.
        marked: what holds the run back, in a word; empty if that isn't known.
        verdict: the same in a sentence.
        findings: what else was found.
        overrides: the best first.
    """

    rows: Sequence[Stage]
    rate: float
    wait: float
    evaluation: float
    marked: str
    verdict: str
    findings: Sequence[str]
    overrides: Sequence[Override]

    @classmethod
    def of(
        cls,
        rate: float,
        wait: float,
        stages: Sequence[efficiency.Stage],
        verdict: Verdict | None,
        overrides: Sequence[Override],
        evaluation: float = math.nan,
        findings: Sequence[str] = (),
    ) -> Pipeline:
        """From what was measured; arguments as the attributes have them."""
        if not all(0 < stage.images_per_s < math.inf for stage in stages):
            raise ValueError("a stage without a rate")
        held = _STAGE_OF.get(verdict.bound, verdict.bound) if verdict else ""
        lowest, rows = min((stage.images_per_s for stage in stages), default=1.0), []
        for each in stages:
            size = _NARROWEST + (1 - _NARROWEST) * min(1.0, math.log(each.images_per_s / lowest) / math.log(_SPAN))
            rows.append(Stage(to_text(each.name), each.images_per_s, to_text(each.detail), size, each.name == held))
        line, found = to_text(verdict.line) if verdict else "", [to_text(each) for each in findings]
        return cls(rows, rate, wait, evaluation, to_text(held), line, found, overrides)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Pipeline | None:
        """Of a run's efficiency.json; None where nobody looked at the stages, or it isn't such a file."""
        try:
            seconds = [float(found["seconds"][part]) for part in ("warm_up", "step", "wait", "evaluation")]
            stages = [
                efficiency.Stage(each["name"], float(each["images_per_s"]), each["detail"]) for each in found["stages"]
            ]
            verdict = Verdict(found["verdict"]["bound"], found["verdict"]["line"])
            overrides = []
            if each := found.get("override"):
                override, why = to_text(each["override"]), to_text(each["why"])
                rate, gain = as_number(each["images_per_s"]), as_number(each["gain"])
                overrides.append(Override(override, why, bool(each["exact"]), rate, gain))
            share = seconds[-1] / (sum(seconds) or math.nan)
            return cls.of(float(found["images_per_s"]), float(found["wait"]), stages, verdict, overrides, share)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
            return None

    @property
    def loading(self) -> list[Stage]:
        """The stages before the wait for data."""
        return [stage for stage in self.rows if stage.name in _LOADING]

    @property
    def training(self) -> list[Stage]:
        """Those after it."""
        return [stage for stage in self.rows if stage.name not in (*_LOADING, *SUMS)]

    @property
    def stages(self) -> list[Stage]:
        """All stages, in order."""
        return [*self.loading, *self.training]

    @property
    def loader(self) -> Stage | None:
        """The stages of loading together; None if that wasn't measured."""
        return next((stage for stage in self.rows if stage.name == "loader"), None)

    @property
    def evaluation_marked(self) -> bool:
        """Whether evaluation is what holds the run back."""
        return self.marked == "evaluation"


def format_rate(rate: float | None) -> str:
    """Images/s: `2,100`, `7.3`; a dash if it isn't known."""
    rate = as_number(rate)
    return "-" if not math.isfinite(rate) else f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


def format_gain(gain: float | None) -> str:
    """A factor: `1.58x`, `12x`; a dash if it isn't known."""
    gain = as_number(gain)
    return "-" if not math.isfinite(gain) else f"{gain:.2f}x" if gain < 10 else f"{gain:,.0f}x"


def format_share(share: float) -> str:
    """A share from 0 to 1: `12 %`; a dash if it isn't known."""
    if math.isnan(share):
        return "-"
    return f"{100 * share:.1f} %" if 0 < share < 0.01 else f"{100 * share:.0f} %"
