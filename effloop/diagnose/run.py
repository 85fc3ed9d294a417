"""Diagnoses a run from its config; keeps what was predicted and what came out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from effloop.config import Config
from effloop.diagnose.diagnosis import Override, diagnose, ranked
from effloop.diagnose.measured import Measured, measured
from effloop.diagnose.overrides import Candidates
from effloop.diagnose.verify import verified
from effloop.runs.findings import Findings, pipeline_key


def diagnose_run(config: Config, command: Sequence[str], seconds: float, *, try_best: int = 0) -> dict[str, Any]:
    """Measure a run and say what holds it back, as `diagnosis.json` has it.

    Args:
        config: of the run, from `compose`.
        command: the overrides that it was composed from.
        seconds: that measuring may take, about.
        try_best: how many of the best overrides are tried.

    Raises:
        ConfigError, DataError: the run can't be built.
    """
    with Console(stderr=True).status("") as status:

        def progress(what: str) -> None:
            status.update(f"measuring: {what}")

        with measured(config, seconds, progress) as found:
            progress("what would help")
            overrides = ranked(found, Candidates(found))
            memory = Memory.of(found)
            overrides = memory.corrected(overrides)
            if try_best:
                overrides = verified(found, overrides, try_best, progress)
                memory.keep(overrides)
            return diagnose(found, overrides, command)


class Memory:
    """What was predicted before on this machine for this data and pipeline, and what came out.

    Args:
        findings: of this machine and data.
        pipeline: of the run.
        images_per_s: of the run as it is.
    """

    def __init__(self, findings: Findings, pipeline: str, images_per_s: float) -> None:
        self._findings = findings
        self._pipeline = pipeline
        self._now = images_per_s

    @classmethod
    def of(cls, found: Measured) -> Memory:
        """That of a run."""
        findings = Findings.of(found.config, found.loader.plan.source.fingerprint())
        return cls(findings, pipeline_key(found.config), found.loop.images_per_s)

    def corrected(self, overrides: Sequence[Override]) -> list[Override]:
        """Predictions times what came out over what was predicted, where an override has been tried before."""
        known = {row["override"]: row for row in self._findings.rows("prediction", self._pipeline) if _whole(row)}
        return [self._corrected(each, known.get(_name(each))) for each in overrides]

    def _corrected(self, override: Override, row: dict[str, Any] | None) -> Override:
        if row is None or override.images_per_s is None:
            return override
        factor = row["measured"] / row["predicted"]
        why = f"predicted x {factor:.2f}, as measured here on {row['date'].partition(' ')[0]}"
        rate, gain = override.images_per_s * factor, override.gain * factor
        return replace(override, images_per_s=rate, gain=gain, learned=why, factor=factor)

    def keep(self, overrides: Sequence[Override]) -> None:
        """Remember what was tried."""
        for each in overrides:
            if each.measured is not None and each.images_per_s is not None:
                self._findings.add(
                    "prediction",
                    self._pipeline,
                    override=_name(each),
                    predicted=each.images_per_s / each.factor / self._now,
                    measured=each.measured / self._now,
                )


def _name(override: Override) -> str:
    """What an override is remembered by: a converted copy may have any path."""
    return override.command.partition("to=memmap ")[2].partition(" ")[2] or override.override


def _whole(row: dict[str, Any]) -> bool:
    """Whether a row has what it needs: it may be of another version."""
    numbers = [row.get("predicted"), row.get("measured")]
    return all(isinstance(each, float) and each > 0 for each in numbers) and "override" in row
