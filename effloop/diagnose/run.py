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
            findings = Findings.of(found.config, found.loader.plan.source.fingerprint())
            experience = Experience(findings, found.config)
            overrides = experience.corrected(overrides)
            if try_best:
                overrides = verified(found, overrides, try_best, progress)
            experience.keep(found, overrides)
            return diagnose(found, overrides, command)


class Experience:
    """What was predicted before on this machine for this data and pipeline, and what came out.

    Args:
        findings: of this machine and data.
        config: of the run.
    """

    def __init__(self, findings: Findings, config: Config) -> None:
        self._findings = findings
        self._pipeline = pipeline_key(config)

    def corrected(self, overrides: Sequence[Override]) -> list[Override]:
        """Predictions times what came out over what was predicted, where that is known of an override."""
        rows = self._findings.rows("outcome", self._pipeline)
        known = {row["override"]: row for row in rows if _is_whole(row)}
        return [_corrected(each, known.get(_name(each))) for each in overrides]

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
            facts = {"override": _name(each), "predicted": each.images_per_s / each.factor / now}
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


def _name(override: Override) -> str:
    """What an override is remembered by: a converted copy may have any path."""
    return override.command.partition("to=memmap ")[2].partition(" ")[2] or override.override


def _is_whole(row: dict[str, Any]) -> bool:
    """Whether a row has what it needs: it may be of another version."""
    numbers = [row.get("predicted"), row.get("measured")]
    return all(isinstance(each, float) and each > 0 for each in numbers) and "override" in row
