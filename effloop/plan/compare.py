"""A plan beside what this machine's own GPU does, and the factor between them, which is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import isclose
from typing import Any, TypeAlias

import torch

from effloop.config import Config, with_overrides
from effloop.errors import EffLoopError, reason
from effloop.record.efficiency import rate_text
from effloop.runs import findings

Measure: TypeAlias = "Callable[[Config, int], tuple[float, int]]"
"""Config and number of outputs -> images/s of its updates on this machine's GPU, and bytes of tensors at their peak."""

_ALONE = "progressive=[] parallel=none parallel.virtual=null global_batch=null accumulate=1 compile=false"


@dataclass(frozen=True)
class Comparison:
    """A training step on this machine's GPU, as planned and as measured."""

    card: str  # its short name
    batch: int  # images of a batch
    predicted: float  # images/s
    measured: float  # images/s
    measured_bytes: int  # of tensors at the peak
    predicted_bytes: int

    @property
    def factor(self) -> float:
        """By which the step is faster than predicted."""
        return self.measured / self.predicted

    def note(self) -> str:
        """A line for users."""
        memory = f"{self.measured_bytes / self.predicted_bytes:.2f} x the memory"
        return (
            f"this machine's {self.card} does {rate_text(self.measured)} images/s in batches of {self.batch}, "
            f"{self.factor:.2f} x what was predicted, with {memory}; all images/s above are multiplied by it"
        )


def compared(
    config: Config, batch: int, outputs: int, planned: Callable[[Config], Any], measure: Measure
) -> tuple[Comparison | None, str]:
    """Compare a step on this machine's GPU with its plan, and say so in a line for users; None where it can't be.

    The figures are kept in the user's cache folder, and taken from there as long as the prediction and torch are the
    same.

    Args:
        config: of the run.
        batch: images of the step; if they don't fit, it is of as many as do.
        outputs: of the model.
        planned: config -> `CardPlan` for this machine's GPU.
        measure: measures the step.
    """
    version = torch.__version__
    try:
        plan = planned(alone := with_overrides(config, *_ALONE.split(), f"batch_size={batch}"))
        if not plan.fits:
            plan = planned(alone := with_overrides(alone, f"batch_size={max(1, plan.largest_batch)}"))
        key = {"plan": plan.card, "outputs": outputs}
        for row in findings.kept(alone, key)[-1:]:
            if row.get("torch") == version and isclose(row["predicted"], plan.images_per_s, rel_tol=1e-3):
                found = Comparison(**{name: row[name] for name in Comparison.__dataclass_fields__})
                return found, f"{found.note()} ({row['date']})"
        tensors = sum(size for part, size in plan.memory.items() if part not in ("fragmentation", "context"))
        found = Comparison(plan.card, plan.batch, plan.images_per_s, *measure(alone, outputs), tensors)
    except (EffLoopError, RuntimeError) as error:  # such as a GPU that others use
        return None, f"this machine's GPU isn't compared with its plan: {reason(error)}"
    findings.keep(alone, key, torch=version, **asdict(found))
    return found, found.note()
