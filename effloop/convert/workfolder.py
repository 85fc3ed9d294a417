"""A hidden folder beside an output while it is written, so that the output is atomic."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from effloop.convert.disk import unwritable
from effloop.data.remote.location import Url
from effloop.errors import ConfigError
from effloop.system.files import fsync, try_lock


class WorkFolder:
    """`.NAME.partial/` beside `out`: locked by one process at a time, and reused by the same job.

    It holds the job's description (`job.json`), finished outputs (`done/`) with notes on them (`notes/`), the
    output that is being written (`writing/`), and whatever else the job keeps to continue from. A folder left
    by another job is emptied.

        with WorkFolder([out], job) as work:
            write(work.writing(out))
            work.finish(out, {})
            work.publish()

    Args:
        outs: what will be published, all of it at once; in one folder. The first names the work folder.
        job: a description for JSON; equal descriptions give equal outputs.
        path: of the work folder, where it isn't beside them; its name ends with `.partial`.
    """

    example = "out=PATH"
    """How another output is named, for messages."""
    room = "out=PATH"
    """How another disk is named."""

    def __init__(self, outs: Sequence[Path | Url], job: Mapping[str, Any], path: Path | None = None) -> None:
        self.outs = outs
        self.path = path or Path(outs[0]).parent / f".{outs[0].name}.partial"
        self._away = self.path.with_suffix(".deleted")  # as long: a name that fits makes both fit
        self._job = json.dumps(job, indent=1, sort_keys=True)

    def __enter__(self) -> WorkFolder:
        """Take the folder.

        Raises:
            ConfigError: it can't be made, another process holds it, or an output is there already.
        """
        shutil.rmtree(self._away, ignore_errors=True)  # left by a kill during `remove`
        try:
            self.check_absent()
            self._lock = self._take()
        except OSError as error:
            raise unwritable(self.path, error, self.room) from None
        try:
            self._adopt()
        except BaseException as error:
            if isinstance(error, ConfigError) and self._is_over:  # left by a kill before or after all the work
                self.remove()
            os.close(self._lock)
            if isinstance(error, OSError):
                raise unwritable(self.path, error, self.room) from None
            raise
        return self

    def check_absent(self) -> None:
        """Refuse outputs that are there, unless they may be of this job.

        Raises:
            ConfigError: one is.
        """
        if not self.path.exists():
            self._refuse_existing()

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    @property
    def complete(self) -> bool:
        """Whether all outputs are finished: those missing in `done/` were published before a kill."""
        return (self.path / "complete").exists()

    def is_finished(self, out: Path | Url) -> bool:
        """Whether this output is finished."""
        return self.complete or (self.path / "done" / out.name).exists()

    @property
    def is_finished_any(self) -> bool:
        """Whether any output is finished."""
        return any(map(self.is_finished, self.outs))

    def noted(self, out: Path | Url) -> dict[str, int]:
        """What was noted of an output when it was finished."""
        noted: dict[str, int] = json.loads(self._note(out).read_text())
        return noted

    def writing(self, out: Path | Url) -> Path:
        """Where to write an output: a path that isn't there, in a folder without anything else."""
        self.discard()
        (self.path / "writing").mkdir()
        return self.path / "writing" / out.name

    def discard(self) -> None:
        """Remove the output that is half written."""
        shutil.rmtree(self.path / "writing", ignore_errors=True)

    def finish(self, out: Path | Url, note: Mapping[str, int]) -> None:
        """The output is complete: give it ordinary permissions and sync it to the disk.

        Args:
            out: the output.
            note: what `noted` returns for it.
        """
        self._note(out).parent.mkdir(exist_ok=True)
        self._note(out).write_text(json.dumps(dict(note)))
        fsync(self._note(out))
        written = self.path / "writing" / out.name
        _settle(written)
        (self.path / "done").mkdir(exist_ok=True)
        os.rename(written, self.path / "done" / out.name)
        fsync(self.path / "done")
        self.discard()

    def publish(self) -> None:
        """Move all outputs to their places, and remove the work folder."""
        if not self.complete:
            self._refuse_existing()
            (self.path / "complete").touch()
            fsync(self.path)
        for out in self.outs:
            if (done := self.path / "done" / out.name).exists():
                self._place(done, out)
        fsync(self.path.parent)
        self.remove()

    def _place(self, done: Path, out: Path | Url) -> None:
        """Move an output to its place."""
        self._refuse_existing([out])
        os.rename(done, out)

    def _exists(self, out: Path | Url) -> bool:
        """Whether something is in an output's place."""
        return os.path.lexists(out)

    def remove(self) -> None:
        """Remove the work folder. It is renamed first, so that no run ever continues from half of it."""
        shutil.rmtree(self._away, ignore_errors=True)
        os.rename(self.path, self._away)
        shutil.rmtree(self._away, ignore_errors=True)

    def _note(self, out: Path | Url) -> Path:
        return self.path / "notes" / f"{out.name}.json"

    @property
    def _is_over(self) -> bool:
        """Whether nothing is here that a run could continue from."""
        done = self.path / "done"
        return not (self.path / "job.json").exists() or (self.complete and not (done.exists() and any(done.iterdir())))

    @property
    def _is_lost(self) -> bool:
        """Whether an output is neither here nor where it was published: it was moved since."""
        return any(not (self.path / "done" / out.name).exists() and not self._exists(out) for out in self.outs)

    def _refuse_existing(self, outs: Sequence[Path | Url] | None = None) -> None:
        for out in outs or self.outs:
            if self._exists(out):
                raise ConfigError(
                    f"out: {out} is there already, and nothing is overwritten; remove it or set {self.example}"
                )

    def _take(self) -> int:
        """Make the folder and lock it."""
        while True:
            self.path.mkdir(exist_ok=True)
            try:
                fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            except FileNotFoundError:  # whoever held it has just removed the folder
                continue
            if not try_lock(fd):
                os.close(fd)
                raise ConfigError(
                    f"out: another process is writing {self.outs[0]}, it holds {self.path}; wait for it or set "
                    f"{self.example}"
                ) from None
            try:
                if os.path.samestat(os.stat(self.path / "lock"), os.fstat(fd)):
                    return fd
            except FileNotFoundError:
                pass
            os.close(fd)
            time.sleep(0.01)

    def _adopt(self) -> None:
        """Keep what is there if it is of the same job, else start from scratch."""
        description = self.path / "job.json"
        same = description.exists() and description.read_text() == self._job and not (self.complete and self._is_lost)
        if not (same and self.complete):  # else outputs that are there have been published by this job
            self._refuse_existing()
        if not same:
            _remove(description)  # first: no job may reuse a folder that is half removed
            for name in os.listdir(self.path):
                if name != "lock":
                    _remove(self.path / name)
            description.write_text(self._job)
            fsync(description)
        self.discard()


def _settle(path: Path) -> None:
    """Ordinary permissions for a file, or for a folder and all in it; and all of it on the disk."""
    mask = os.umask(0)
    os.umask(mask)
    for folder, _, files in os.walk(path):
        for name in files:
            _settle_one(Path(folder, name), 0o666 & ~mask)
        _settle_one(Path(folder), 0o777 & ~mask)
    if path.is_file():
        _settle_one(path, 0o666 & ~mask)


def _settle_one(path: Path, mode: int) -> None:
    os.chmod(path, mode)
    fsync(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
