"""What a recorder keeps of the epoch that is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

from effloop.record.base import Position
from effloop.record.clock import Span
from effloop.record.sinks import StepReport
from effloop.task import Task


@dataclass
class EpochSoFar:
    """What is known of the epoch that is trained, of the last line of its log.

    Attributes:
        sums: the task's, of all ranks; None before the first line.
        before: those of the line before; None is the start of the epoch.
        span: times.
        position, lr: of the update.
        begun: whether there is one; False from its end until the next one begins.
        resumed: whether it goes on from a checkpoint.
    """

    sums: list[float] | None = None
    before: list[float] | None = None
    span: Span = field(default_factory=Span)
    position: Position | None = None
    lr: float = 0.0
    begun: bool = False
    resumed: bool = False

    def report(self, task: Task, span: Span) -> StepReport:
        """The last line of the log; `span` is of what came since the one before."""
        assert self.position is not None
        assert self.sums is not None
        now, mean = task.scores(self.sums, since=self.before), task.scores(self.sums)
        return StepReport(self.position, self.lr, task.meters, now, mean, span, self.span)

    def state_dict(self, clock: Span) -> dict[str, Any]:
        """As plain values; `clock` is what was measured until now, maybe after the last line."""
        spans = {"span": list(astuple(self.span)), "clock": list(astuple(clock))}
        position = asdict(self.position) if self.position else None
        return {"sums": self.sums, "before": self.before, "position": position, "lr": self.lr, **spans}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> EpochSoFar:
        """What `state_dict` gave."""
        position = Position(**state["position"]) if state["position"] else None
        span = Span(*state["span"])
        return cls(state["sums"], state["before"], span, position, state["lr"], begun=True, resumed=True)
