"""Where a conversion writes its outputs until all of them are complete; and the room on that disk."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from rich.filesize import decimal

from effloop.errors import ConfigError
from effloop.system.files import describe_failure, fsync, locked

_FULL = 1 << 20  # a disk with less than this free is full: a writer that failed may not say why


class WorkFolder:
    """A folder for the outputs until all are complete, `.NAME.partial/` beside the first. One process at a time holds
    its lock, and removes what a killed one has left.

        work = WorkFolder([out])  # what will be published, all of it at once, in one folder
        with work.held():
            write(work.writing(out))
            work.publish()
    """

    def __init__(self, outs: Sequence[Path]) -> None:
        self.outs = outs
        self.path = outs[0].parent / f".{outs[0].name}.partial"
        self._needed = 0

    def check_absent(self) -> None:
        """Refuse outputs that are there."""
        for out in self.outs:
            if os.path.lexists(out):
                raise ConfigError(f"out: {out} is there already, and nothing is overwritten; remove it or set out=PATH")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder, which is empty at first, and removed at the end.

        Raises:
            ConfigError: it can't be made or written, another process holds it, an output is there already, or the disk
                is full.
        """
        missing = [each for each in self.path.parents if not os.path.isdir(each)]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with locked(self.path) as free:
                if not free:
                    raise ConfigError(
                        f"out: another process is writing {self.outs[0]}, it holds {self.path}; wait for it or set "
                        "out=PATH"
                    )
                try:
                    self.check_absent()
                    for path in self.path.iterdir():
                        if path.is_dir() and not path.is_symlink():
                            shutil.rmtree(path)
                        else:
                            path.unlink()
                    yield
                except Exception as error:
                    if is_disk_full(error, self.path):
                        raise ConfigError(
                            f"out: the disk of {self.path.parent} is full; {decimal(self._needed)} of images are "
                            "needed, and what the format adds; make room or set out=PATH"
                        ) from error
                    raise
                finally:
                    shutil.rmtree(self.path, ignore_errors=True)
        except OSError as error:
            raise ConfigError(f"out: {describe_failure(self.path, error)}; set out=PATH") from error
        finally:
            for each in missing:
                with suppress(OSError):  # it has the output
                    each.rmdir()

    def written(self, out: Path) -> Path:
        """An output while it is here."""
        return self.path / str(self.outs.index(out)) / out.name

    def writing(self, out: Path) -> Path:
        """Where to write an output: a path that isn't there, in a folder without anything else."""
        path = self.written(out)
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir()
        return path

    def publish(self) -> None:
        """Give all outputs ordinary permissions, sync them to the disk, and move them to their places."""
        mask = os.umask(0)
        os.umask(mask)
        for out in self.outs:
            path = self.written(out)
            for each in chain([path], path.rglob("*")):
                each.chmod((0o777 if each.is_dir() else 0o666) & ~mask)
                fsync(each)
        self.check_absent()
        for out in self.outs:
            os.rename(self.written(out), out)
        fsync(self.path.parent)

    def check_free(self, needed: int, what: str) -> None:
        """Refuse to write what doesn't fit on the disk."""
        self._needed = needed
        if needed > (free := shutil.disk_usage(self.path).free):
            raise ConfigError(
                f"out: {what} needs {decimal(needed)}, {self.path} has {decimal(free)} free; make room or set out=PATH"
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
