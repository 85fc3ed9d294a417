"""State that one start of the ranks leaves to the next: the run folder, and the reason of the restart."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Protocol

from torch.distributed import Store  # type: ignore[attr-defined]

from effloop.parallel.failures import read, root_cause
from effloop.system.files import write_text


class RestartState(Protocol):
    """State that outlives a start of the ranks."""

    def remember(self, run_dir: Path) -> None:
        """Keep the run folder, as soon as this run owns it."""

    def run_dir(self) -> Path | None:
        """The run folder of an earlier start; None if there was none that got so far."""

    def reason(self) -> str:
        """Why the ranks were restarted, for messages."""


class FolderRestartState:
    """State in a folder of the process that started the ranks on this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def remember(self, run_dir: Path) -> None:
        write_text(self._folder / "run_dir", str(run_dir))

    def run_dir(self) -> Path | None:
        with suppress(FileNotFoundError):
            return Path((self._folder / "run_dir").read_text())
        return None

    def reason(self) -> str:
        failure = root_cause(read(self._folder))
        return failure.sentence if failure else "a rank ended"


class StoreRestartState:
    """State in torchrun's store."""

    def __init__(self, base: Store) -> None:
        self._base = base

    def remember(self, run_dir: Path) -> None:
        self._base.set("effloop/run_dir", str(run_dir))

    def run_dir(self) -> Path | None:
        return Path(self._base.get("effloop/run_dir").decode()) if self._base.check(["effloop/run_dir"]) else None

    def reason(self) -> str:
        return "a rank ended"


class NoRestartState:
    """No state, for a process that isn't restarted."""

    def remember(self, run_dir: Path) -> None:
        pass

    def run_dir(self) -> Path | None:
        return None

    def reason(self) -> str:
        return ""
