"""What one start of the ranks leaves to the next."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Protocol

from torch.distributed import Store  # type: ignore[attr-defined]

from effloop.parallel.reports import cause, read
from effloop.system.files import write_text


class Notes(Protocol):
    """What outlasts a start of the ranks."""

    def begun(self, run_dir: Path) -> None:
        """Remember the run folder."""

    def run_dir(self) -> Path | None:
        """The one remembered."""

    def why(self) -> str:
        """Why the ranks were started again, for people."""


class FolderNotes:
    """Notes in a folder of the process that has started the ranks on this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begun(self, run_dir: Path) -> None:
        """Remember the run folder."""
        write_text(self._folder / "run_dir", str(run_dir))

    def run_dir(self) -> Path | None:
        """The one remembered."""
        with suppress(FileNotFoundError):
            return Path((self._folder / "run_dir").read_text())
        return None

    def why(self) -> str:
        """Why the last start ended."""
        found = cause(read(self._folder))
        return found.sentence if found else "a rank ended"


class StoreNotes:
    """Notes in the store of torchrun."""

    def __init__(self, base: Store) -> None:
        self._base = base

    def begun(self, run_dir: Path) -> None:
        """Remember the run folder."""
        self._base.set("effloop/run_dir", str(run_dir))

    def run_dir(self) -> Path | None:
        """The one remembered."""
        return Path(self._base.get("effloop/run_dir").decode()) if self._base.check(["effloop/run_dir"]) else None

    def why(self) -> str:
        """The store isn't told."""
        return "a rank ended"
