"""What a run is: all that another process needs to carry it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effloop import config as configs
from effloop.checkpoint import files
from effloop.config import Config
from effloop.runs.folder import has_checkpoints


@dataclass(frozen=True)
class RunSpec:
    """A run: a new one, or what is left of one.

    Attributes:
        config: of the run.
        overrides: what it was composed from, or is changed by.
        folder: the run folder; a new one that is named after the time gets `-2` where it is taken.
        resume: whether to continue in that folder; from its beginning, where it has no checkpoint.
        note: a line for the log.
        checkpoint: of that folder, to continue from; None is the last one.
    """

    config: Config
    overrides: Sequence[str]
    folder: Path
    resume: bool = False
    note: str = ""
    checkpoint: Path | None = None

    @property
    def start(self) -> Path | None:
        """What to continue from in the run's own folder: a checkpoint, or the folder itself to begin again; else None.

        Raises:
            CheckpointError: a folder with checkpoints, but not the last.
        """
        if not self.resume or self.checkpoint:
            return self.checkpoint
        return files.find(self.folder, "last") if has_checkpoints(self.folder) else self.folder

    def to_plain(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "config": configs.to_dict(self.config),
            "overrides": list(self.overrides),
            "folder": str(self.folder),
            "resume": self.resume,
            "note": self.note,
            "checkpoint": str(self.checkpoint or ""),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RunSpec:
        """What `to_plain` gave."""
        config = configs.from_dict(plain["config"], (), "the config of this run")
        checkpoint = Path(plain["checkpoint"]) if plain["checkpoint"] else None
        return cls(config, plain["overrides"], Path(plain["folder"]), plain["resume"], plain["note"], checkpoint)
