"""The stages of a pipeline, as pictures need them: what is missing, or isn't what it should be, is unknown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from effloop.report.values import as_number, to_text

_LOADING = ("storage", "decode", "augment", "batch")
_SUMS = ("loader", "loop")
_STAGE_OF = {"compute": "step", "sync": "step", "logging": "log"}
_NARROWEST, _SPAN = 0.12, 100  # a stage's size is this for the slowest, and 1 for those 100 times as fast


@dataclass(frozen=True)
class Stage:
    """A stage, or several together.

    Attributes:
        name: `decode`.
        rate: images/s if it were the only one; NaN if that isn't known.
        detail: what was measured.
        size: of its bar, from 0 to 1: the logarithm of the rate, from the slowest stage to a hundred times that.
        marked: whether it holds the others back.
    """

    name: str
    rate: float
    detail: str
    size: float = 0.0
    marked: bool = False


@dataclass(frozen=True)
class Override:
    """What would help.

    Attributes:
        text: as it is typed.
        rate, measured: images/s with it, predicted and tried; NaN if they aren't known.
        gain: predicted, as a factor.
        why: in words.
        exact: whether the same is trained, to the bit.
        learned: what the prediction was learned from; often empty.
        commands: what to type for it.
    """

    text: str
    rate: float
    measured: float
    gain: float
    why: str
    exact: bool
    learned: str
    commands: Sequence[str] = ()


@dataclass(frozen=True)
class Pipeline:
    """What was measured of a run's stages, and what follows from it.

    Attributes:
        loading, training: the stages before and after the wait for data, in order.
        loader, loop: the first ones together, and all of them; None if that wasn't measured.
        rate: images/s of the training loop.
        wait: share of the loop's time that waits for data; NaN if it isn't known.
        evaluation: share of an epoch's time that evaluation takes; NaN if it isn't known.
        evaluation_marked: whether evaluation is what holds the run back.
        verdict: in words; empty if there is none.
        findings: what else was found.
        overrides: the best first.
    """

    loading: Sequence[Stage]
    training: Sequence[Stage]
    loader: Stage | None
    loop: Stage | None
    rate: float
    wait: float
    evaluation: float
    evaluation_marked: bool
    verdict: str
    findings: Sequence[str]
    overrides: Sequence[Override]

    @property
    def is_known(self) -> bool:
        """Whether there is anything to tell beside a speed and a wait, which every run has."""
        return bool(self.stages or self.verdict or self.overrides)

    @property
    def stages(self) -> list[Stage]:
        """All stages, in order."""
        return [*self.loading, *self.training]

    @property
    def rows(self) -> list[Stage]:
        """All stages, their sums in their places."""
        sums = [[stage] if stage else [] for stage in (self.loader, self.loop)]
        return [*self.loading, *sums[0], *self.training, *sums[1]]

    @property
    def marked(self) -> str:
        """What holds the run back, in a word; empty if that isn't known."""
        names = [stage.name for stage in self.stages if stage.marked]
        return "evaluation" if self.evaluation_marked else names[0] if names else ""


def read_pipeline(found: Mapping[str, Any]) -> Pipeline:
    """Read the result of a diagnosis, or a run's efficiency.json."""
    verdict = found.get("verdict") if isinstance(found.get("verdict"), Mapping) else {}
    assert isinstance(verdict, Mapping)
    bound = to_text(verdict.get("bound") or "")
    stages, held = _stages(found, _STAGE_OF.get(bound, bound))
    parts = [stage for name, stage in stages.items() if name not in _SUMS]
    rate = _rate(found.get("images_per_s"))
    if math.isnan(rate) and "loop" in stages:
        rate = stages["loop"].rate
    return Pipeline(
        loading=[stage for stage in parts if stage.name in _LOADING],
        training=[stage for stage in parts if stage.name not in _LOADING],
        loader=stages.get("loader"),
        loop=stages.get("loop"),
        rate=rate,
        wait=_share(found.get("wait")),
        evaluation=_evaluation(found),
        evaluation_marked=held == "evaluation",
        verdict=to_text(verdict.get("line") or (f"{bound}-bound" if bound else "")),
        findings=[to_text(each) for each in _list(found.get("findings"))],
        overrides=[_override(each, rate) for each in dicts(found.get("overrides") or [found.get("override")])],
    )


def _stages(found: Mapping[str, Any], held: str) -> tuple[dict[str, Stage], str]:
    """The stages by name, and which one holds the others back: `held`, or the slowest if that is none of them."""
    rows = {to_text(row["name"]): row for row in dicts(found.get("stages")) if row.get("name")}
    rates = {name: _rate(row.get("images_per_s")) for name, row in rows.items()}
    known = {name: rate for name, rate in rates.items() if not math.isnan(rate)}
    if held not in rows and held != "evaluation":
        held = min(known.keys() - _SUMS, key=known.__getitem__, default="")
    lowest = min(known.values(), default=math.nan)
    stages = {}
    for name, rate in rates.items():
        detail = to_text(rows[name].get("detail") or "")
        stages[name] = Stage(name, rate, detail, _size(rate, lowest), marked=name == held)
    return stages, held


def _size(rate: float, lowest: float) -> float:
    if math.isnan(rate):
        return 0.0
    return _NARROWEST + (1 - _NARROWEST) * min(1.0, math.log(rate / lowest) / math.log(_SPAN))


def _override(found: Mapping[str, Any], now: float) -> Override:
    rate, gain = _rate(found.get("images_per_s")), as_number(found.get("gain"))
    return Override(
        text=to_text(found.get("override", "")),
        rate=rate,
        measured=_rate(found.get("measured")),
        gain=rate / now if math.isnan(gain) else gain,
        why=to_text(found.get("why") or ""),
        exact=found.get("exact") is not False,
        learned=to_text(found.get("learned") or ""),
        commands=[to_text(each) for each in _list(found.get("commands"))],
    )


def _evaluation(found: Mapping[str, Any]) -> float:
    """Told as a share, or by the seconds of a run's parts."""
    seconds = found.get("seconds")
    if "evaluation" in found or not isinstance(seconds, Mapping):
        return _share(found.get("evaluation"))
    parts = [as_number(seconds.get(part, 0)) for part in ("warm_up", "step", "wait", "evaluation")]
    return _share(parts[-1] / sum(parts)) if sum(parts) > 0 else math.nan


def _rate(value: Any) -> float:
    number = as_number(value)
    return number if 0 < number < math.inf else math.nan


def _share(value: Any) -> float:
    number = as_number(value)
    return number if 0 <= number <= 1 else math.nan


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else []


def dicts(value: Any) -> list[Mapping[str, Any]]:
    """The mappings in a list; none if it isn't one."""
    return [each for each in _list(value) if isinstance(each, Mapping)]


def read_facts(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was diagnosed: names and texts of the data, the model, the loader, the machine and the date."""
    run, machine = (next(iter(dicts([result.get(key)])), {}) for key in ("run", "machine"))
    size, batch, workers = run.get("image_size"), run.get("batch_size"), run.get("num_workers")
    known = {
        "data": [result.get("data")],
        "model": [
            run.get("model"),
            size and f"{_pixels(size)} px",
            batch and f"batch_size={to_text(batch)}",
            run.get("precision"),
        ],
        "loader": [run.get("engine"), None if workers is None else f"num_workers={to_text(workers)}"],
        "machine": [machine.get("device"), machine.get("cores") and f"{to_text(machine['cores'])} cores"],
        "date": [result.get("date")],
    }
    texts = {name: ", ".join(to_text(value) for value in values if value) for name, values in known.items()}
    return [(name, text) for name, text in texts.items() if text]


def _pixels(value: Any) -> str:
    """Of images: a number, or height and width."""
    return "x".join(map(to_text, value)) if isinstance(value, list) else to_text(value)


def format_rate(rate: float) -> str:
    """Images/s: `2,100`, `7.3`; a dash if it isn't known."""
    return "-" if not math.isfinite(rate) else f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


def format_gain(gain: float) -> str:
    """A factor: `1.58x`, `12x`; a dash if it isn't known."""
    return "-" if not math.isfinite(gain) else f"{gain:.2f}x" if gain < 10 else f"{gain:,.0f}x"


def format_share(share: float) -> str:
    """A share from 0 to 1: `12 %`; a dash if it isn't known."""
    if math.isnan(share):
        return "-"
    return f"{100 * share:.1f} %" if 0 < share < 0.01 else f"{100 * share:.0f} %"
