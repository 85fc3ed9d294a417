"""Where a conversion works, and its outputs until all of them are complete; and the room on that disk."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from effloop.errors import ConfigError
from effloop.system.files import describe_failure, fsync, try_lock, write_text

_FULL = 1 << 20  # a disk with less than this free is full: a writer that failed may not say why


class WorkFolder:
    """A folder that keeps what a conversion has done: `.NAME.partial/` beside the output. One process at a time holds
    its lock.

        job.json         determines the bytes of the outputs; a folder of another job is emptied
        N/NAME           output N while it is written, and until it is published
        N.json           what was noted of output N when it was finished: there is no output without
        journal/N/SPLIT/ re-encoded images, see `records.Journal`

    An output that is finished and not here has been published: all that a killed process knew follows from the files.

        work = WorkFolder([out])
        with work.held(job):
            write(work.writing(out))
            work.finish(out, {"train": 1000})
            work.publish()

    Args:
        outs: what will be published, all of it at once, in one folder.
    """

    def __init__(self, outs: Sequence[Path]) -> None:
        self.outs = outs
        self.path = outs[0].parent / f".{outs[0].name}.partial"
        self._away = self.path.with_suffix(".deleted")  # as long: a name that fits makes both fit

    def check_absent(self) -> None:
        """Refuse outputs that are there, unless they may be of this job.

        Raises:
            ConfigError: one is.
        """
        for out in self.outs:
            if os.path.lexists(out) and not self.path.exists():
                self._refuse(out)

    @contextmanager
    def held(self, job: Mapping[str, Any]) -> Iterator[None]:
        """Hold the folder for a job, and keep what is there if it is of the same one.

        Args:
            job: a description for JSON; equal descriptions give equal outputs.

        Raises:
            ConfigError: the folder can't be made, another process holds it, or an output is there already.
        """
        shutil.rmtree(self._away, ignore_errors=True)  # left by a kill during `remove`
        with self._explained():
            self.check_absent()
            lock = self._lock()
        try:
            with self._explained():
                self._adopt(json.dumps(job, indent=1, sort_keys=True))
            yield
        finally:
            os.close(lock)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self.unwritable(error) from None

    def _lock(self) -> int:
        lock = self.path / "lock"
        while True:
            self.path.mkdir(exist_ok=True)
            with suppress(FileNotFoundError):  # whoever held it has just removed the folder
                fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
                held = try_lock(fd)
                if held and lock.exists() and os.path.samestat(lock.stat(), os.fstat(fd)):
                    return fd
                os.close(fd)
                if not held:
                    raise ConfigError(
                        f"out: another process is writing {self.outs[0]}, it holds {self.path}; wait for it or set "
                        "out=PATH"
                    )
            time.sleep(0.01)

    def _adopt(self, job: str) -> None:
        """Keep what is there if it is of the same job, else start from scratch."""
        description = self.path / "job.json"
        known = description.exists()
        same = known and description.read_text() == job
        published = [out for out in self.outs if self.is_finished(out) and not self.written(out).exists()]
        lost = not all(map(os.path.lexists, published))  # one was moved away since
        ours = published if same and self.complete and not lost else []  # nothing is published before all are finished
        for out in self.outs:
            if out not in ours and os.path.lexists(out):
                if not known or len(published) == len(self.outs):  # a kill before or after all the work left it
                    self.remove()
                self._refuse(out)
        if not same or lost:
            description.unlink(missing_ok=True)  # first: no job may reuse a folder that is half removed
            for path in self.path.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != "lock":
                    path.unlink()
            write_text(description, job, sync=True)
        self.discard()

    @property
    def complete(self) -> bool:
        """Whether all outputs are finished: those that aren't here were published before a kill."""
        return all(map(self.is_finished, self.outs))

    def is_finished(self, out: Path) -> bool:
        """Whether this output is finished."""
        return self._note(out).exists()

    def noted(self, out: Path) -> dict[str, int]:
        """What was noted of an output when it was finished."""
        noted: dict[str, int] = json.loads(self._note(out).read_text())
        return noted

    def writing(self, out: Path) -> Path:
        """Where to write an output: a path that isn't there, in a folder without anything else."""
        self.discard()
        path = self.written(out)
        path.parent.mkdir()
        return path

    def discard(self) -> None:
        """Remove what is half written."""
        for out in self.outs:
            if not self.is_finished(out):
                shutil.rmtree(self.written(out).parent, ignore_errors=True)

    def finish(self, out: Path, note: Mapping[str, int]) -> None:
        """The output is complete: give it ordinary permissions, sync it to the disk, and keep a note of it."""
        path = self.written(out)
        mask = os.umask(0)
        os.umask(mask)
        for each in chain([path], path.rglob("*")):
            each.chmod((0o777 if each.is_dir() else 0o666) & ~mask)
            fsync(each)
        fsync(path.parent)
        write_text(self._note(out), json.dumps(dict(note)), sync=True)

    def publish(self) -> None:
        """Move all outputs to their places, and remove the folder."""
        here = [out for out in self.outs if self.written(out).exists()]
        for out in here:
            if os.path.lexists(out):
                self._refuse(out)
        for out in here:
            os.rename(self.written(out), out)
        fsync(self.path.parent)
        self.remove()

    def remove(self) -> None:
        """Remove the folder. It is renamed first, so that no run ever continues from half of it."""
        shutil.rmtree(self._away, ignore_errors=True)
        os.rename(self.path, self._away)
        shutil.rmtree(self._away, ignore_errors=True)

    def journal(self, out: Path, split: str) -> Path:
        """The folder of an output's re-encoded images."""
        return self.path / "journal" / str(self.outs.index(out)) / split

    def written(self, out: Path) -> Path:
        """An output while it is here."""
        return self.path / str(self.outs.index(out)) / out.name

    def _note(self, out: Path) -> Path:
        return self.path / f"{self.outs.index(out)}.json"

    def _refuse(self, out: Path) -> None:
        raise ConfigError(f"out: {out} is there already, and nothing is overwritten; remove it or set out=PATH")

    def unwritable(self, error: OSError) -> ConfigError:
        """The error where the folder can't be written."""
        return ConfigError(f"out: {describe_failure(self.path, error)}; set out=PATH")

    def check_free(self, needed: int, what: str, there: int = 0) -> None:
        """Refuse to write what doesn't fit on the disk.

        Args:
            needed: bytes in all.
            what: is written.
            there: bytes of them that are on the disk already.

        Raises:
            ConfigError: with both numbers.
        """
        if needed - there > (free := shutil.disk_usage(self.path).free):
            raise ConfigError(
                f"out: {what} needs {size(needed - there)}, {self.path} has {size(free)} free; make room or set "
                "out=PATH"
            )


def is_disk_full(error: BaseException | None, folder: Path) -> bool:
    """Whether an exception comes from a full disk; each library raises its own."""
    link = error
    while link is not None:
        if isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if os.strerror(errno.ENOSPC) in str(link) or "MDB_MAP_FULL" in str(link):
            return True
        link = link.__cause__ or link.__context__
    return isinstance(error, OSError | RuntimeError) and shutil.disk_usage(folder).free < _FULL


def tree_size(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def size(num_bytes: float) -> str:
    """`1.30 MB`: three digits and a decimal unit."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if num_bytes < 999.5 or unit == "TB":
            break
        num_bytes /= 1000
    digits = 0 if unit == "bytes" or num_bytes >= 99.95 else 1 if num_bytes >= 9.995 else 2
    return f"{num_bytes:,.{digits}f} {unit}"
