"""Predictions and what came out, kept for later ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from effloop.config import Config
from effloop.measure.diagnosis import Override
from effloop.measure.measured import Measured
from effloop.runs.findings import Findings, pipeline_key


class Experience:
    """What was predicted before on this machine for this data and pipeline, and what came out.

    Args:
        findings: of this machine and data.
        config: of the run.
    """

    def __init__(self, findings: Findings, config: Config) -> None:
        self._findings = findings
        self._pipeline = pipeline_key(config)

    def corrected(self, override: Override) -> Override:
        """A prediction times what came out over what was predicted, where that is known of the override."""
        rows = self._findings.rows("outcome", self._pipeline)
        known = [row for row in rows if _is_whole(row) and row["override"] == override.override]
        return _corrected(override, known[-1] if known else None)

    def keep(self, found: Measured, overrides: Sequence[Override]) -> None:
        """Remember what was predicted, and what came out where it was tried.

        Args:
            found: the run that it was predicted for.
            overrides: what was predicted.
        """
        now = found.loop.images_per_s
        for each in overrides:
            if each.images_per_s is None:
                continue
            facts = {"override": each.override, "predicted": each.images_per_s / each.factor / now}
            if each.measured is not None:
                self._findings.add("outcome", self._pipeline, **facts, measured=each.measured / now)
            elif not each.recipe:  # else nobody can tell which run has it
                target = pipeline_key(found.with_overrides(*each.override.split()))
                self._findings.add("prediction", self._pipeline, **facts, now=now, target=target)


def note_outcome(findings: Findings, config: Config, images_per_s: float) -> None:
    """Remember how fast a run was, if a diagnosis has predicted it; once for each prediction.

    Args:
        findings: of this machine and data.
        config: of the run.
        images_per_s: of its loop.
    """
    target = pipeline_key(config)
    rows = [row for row in findings.rows("prediction") if row.get("target") == target]
    if not (rows and _is_whole({**rows[-1], "measured": rows[-1].get("now")})):
        return
    row = rows[-1]
    outcomes = findings.rows("outcome", row["pipeline"])
    if any(each.get("of") == row["date"] and each.get("override") == row["override"] for each in outcomes):
        return
    facts = {"override": row["override"], "predicted": row["predicted"], "of": row["date"]}
    findings.add("outcome", row["pipeline"], **facts, measured=images_per_s / row["now"])


def _corrected(override: Override, row: dict[str, Any] | None) -> Override:
    if row is None or override.images_per_s is None:
        return override
    factor = row["measured"] / row["predicted"]
    why = f"predicted x {factor:.2f}, as measured here on {row['date'].partition(' ')[0]}"
    rate, gain = override.images_per_s * factor, override.gain * factor
    return replace(override, images_per_s=rate, gain=gain, learned=why, factor=factor)


def _is_whole(row: dict[str, Any]) -> bool:
    """Whether a row has what it needs: it may be of another version."""
    numbers = [row.get("predicted"), row.get("measured")]
    return all(isinstance(each, float) and each > 0 for each in numbers) and "override" in row
