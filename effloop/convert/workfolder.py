"""A hidden folder beside an output while it is written, so that the output is atomic."""

from __future__ import annotations

import errno
import json
import os
import pwd
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
    """

    def __init__(self, outs: Sequence[Path], job: Mapping[str, Any]) -> None:
        self.outs = outs
        self.path = outs[0].parent / f".{outs[0].name}.partial"
        self._away = outs[0].parent / f".{outs[0].name}.deleted"  # as long: a name that fits makes both fit
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
            raise unwritable(self.path, error) from None
        try:
            self._adopt()
        except BaseException as error:
            if isinstance(error, ConfigError) and self._is_over:  # left by a kill before or after all the work
                self.remove()
            os.close(self._lock)
            if isinstance(error, OSError):
                raise unwritable(self.path, error) from None
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

    def is_finished(self, out: Path) -> bool:
        """Whether this output is finished."""
        return self.complete or (self.path / "done" / out.name).exists()

    @property
    def is_finished_any(self) -> bool:
        """Whether any output is finished."""
        return any(map(self.is_finished, self.outs))

    def noted(self, out: Path) -> dict[str, int]:
        """What was noted of an output when it was finished."""
        noted: dict[str, int] = json.loads(self._note(out).read_text())
        return noted

    def writing(self, out: Path) -> Path:
        """Where to write an output: a path that isn't there, in a folder without anything else."""
        self.discard()
        (self.path / "writing").mkdir()
        return self.path / "writing" / out.name

    def discard(self) -> None:
        """Remove the output that is half written."""
        shutil.rmtree(self.path / "writing", ignore_errors=True)

    def finish(self, out: Path, note: Mapping[str, int]) -> None:
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
            if (self.path / "done" / out.name).exists():
                self._refuse_existing([out])
                os.rename(self.path / "done" / out.name, out)
        fsync(self.path.parent)
        self.remove()

    def remove(self) -> None:
        """Remove the work folder. It is renamed first, so that no run ever continues from half of it."""
        shutil.rmtree(self._away, ignore_errors=True)
        os.rename(self.path, self._away)
        shutil.rmtree(self._away, ignore_errors=True)

    def _note(self, out: Path) -> Path:
        return self.path / "notes" / f"{out.name}.json"

    @property
    def _is_over(self) -> bool:
        """Whether nothing is here that a run could continue from."""
        done = self.path / "done"
        return not (self.path / "job.json").exists() or (self.complete and not (done.exists() and any(done.iterdir())))

    @property
    def _is_lost(self) -> bool:
        """Whether an output is neither here nor where it was published: it was moved since."""
        return any(not (self.path / "done" / out.name).exists() and not os.path.lexists(out) for out in self.outs)

    def _refuse_existing(self, outs: Sequence[Path] | None = None) -> None:
        for out in outs or self.outs:
            if os.path.lexists(out):
                raise ConfigError(f"out: {out} is there already, and nothing is overwritten; remove it or set out=PATH")

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
                    f"out: another process is writing {self.outs[0]}, it holds {self.path}; wait for it or set out=PATH"
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


def check_free(folder: Path, needed: int, what: str, there: int = 0) -> None:
    """Refuse to write what doesn't fit on the disk.

    Args:
        folder: where it goes.
        needed: bytes in all.
        what: named in the message.
        there: bytes of them that are on the disk already.

    Raises:
        ConfigError: with both numbers.
    """
    free = free_bytes(folder)
    if needed - there > free:
        raise ConfigError(
            f"out: {what} needs {size(needed - there)}, {folder} has {size(free)} free; make room or set out=PATH"
        )


def free_bytes(folder: Path) -> int:
    """Bytes that this user can still write there."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


_FULL = 1 << 20  # a disk with less than this free is full: a writer that failed may not say why


def is_disk_full(error: BaseException | None, folder: Path) -> bool:
    """Whether an exception comes from a full disk; each library raises its own."""
    link = error
    while link is not None:
        if isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if os.strerror(errno.ENOSPC) in str(link) or "MDB_MAP_FULL" in str(link):
            return True
        link = link.__cause__ or link.__context__
    return isinstance(error, OSError | RuntimeError) and free_bytes(folder) < _FULL


def unwritable(path: Path, error: OSError) -> ConfigError:
    """The error for a path that can't be written."""
    folder = path.parent
    if error.errno == errno.ENAMETOOLONG:
        return ConfigError(f"out: {path} can't be written: {error.strerror}; set out=PATH")
    try:
        owner = pwd.getpwuid(folder.stat().st_uid).pw_name
        whose = f"; {folder} belongs to {owner}"
    except (OSError, KeyError):
        whose = ""
    return ConfigError(f"out: {path} can't be written: {error.strerror or error}{whose}; set out=PATH")


def tree_size(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0


def size(num_bytes: float) -> str:
    """`1.30 MB`: three digits and a decimal unit."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if num_bytes < 999.5 or unit == "TB":
            break
        num_bytes /= 1000
    digits = 0 if unit == "bytes" or num_bytes >= 99.95 else 1 if num_bytes >= 9.995 else 2
    return f"{num_bytes:,.{digits}f} {unit}"


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
