"""Diagnoses a run from its config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from effloop.config import Config
from effloop.measure.diagnosis import diagnose, ranked
from effloop.measure.experience import Experience
from effloop.measure.measured import measured
from effloop.measure.overrides import changes
from effloop.measure.verify import verified
from effloop.runs.findings import Findings


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
            findings = Findings.of(found.config, found.loader.plan.source.fingerprint())
            experience = Experience(findings, found.config)
            overrides = ranked(found, changes(found), experience.corrected)
            if try_best:
                overrides = verified(found, overrides, try_best, progress)
            experience.keep(found, overrides)
            result = diagnose(found, overrides, command)
    return result | {"findings": [*result["findings"], *_left_out(config)]}


def _left_out(config: Config) -> list[str]:
    """What a run of this config does, and the one that was measured didn't."""
    lines = []
    if config.parallel.name != "none":
        lines.append(f"measured without parallel={config.parallel.name}, in one process: ranks share cores and storage")
    if config.progressive:
        lines.append(f"measured at image_size={config.size.word} throughout, without progressive")
    return lines
