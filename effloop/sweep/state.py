"""The state of a sweep's job, in its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effloop.runs.reader import JOB
from effloop.system.files import write_text


@dataclass(frozen=True)
class JobState:
    """Writes a job's job.json.

    Attributes:
        folder: of the job.
        number: counted from 0.
        overrides: what makes it this job.
    """

    folder: str
    number: int
    overrides: list[str]

    def write(self, state: str, reason: str = "", **more: Any) -> None:
        """Write job.json, whole or not at all."""
        fields = {"number": self.number, "overrides": self.overrides, "state": state, "reason": reason, **more}
        write_text(Path(self.folder, JOB), json.dumps(fields, indent=2) + "\n")
