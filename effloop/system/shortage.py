"""Too little of what a machine has: memory, processes, open files; as one line each."""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from rich.filesize import decimal

from effloop.errors import ConfigError, OutOfMemoryError
from effloop.system.hardware import available_cores, available_memory

_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "cudnn_status_alloc_failed", "bad_alloc")
_FILES, _FILES_PER_WORKER = 32, 6
"""Open files of a run, and of each worker process of its two splits: 30 with one worker, 48 with 4, 96 with 12."""
_WORKERS_PER_CORE, _WORKERS, _MOST_WORKERS = 32, 256, 4096  # the engine of processes has a table of so many


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory could not be allocated, on the host or a GPU, as Python, torch or the system says it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WORDS)


@contextmanager
def memory_explained(what_to_lower: str, ended: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """Context of what may need more memory than there is.

    Args:
        what_to_lower: keys with their values, for the message.
        ended: is given the line, too.

    Raises:
        OutOfMemoryError: memory could not be allocated.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        where = "the GPU" if isinstance(error, torch.OutOfMemoryError) else "this machine"
        free = "" if isinstance(error, torch.OutOfMemoryError) else f"; {decimal(available_memory())} are free"
        line = f"out of memory on {where} ({reason.rstrip('.')}){free}; {what_to_lower}"
        ended(line)
        raise OutOfMemoryError(line) from None


def check_workers(count: int, ranks: int) -> None:
    """Refuse more workers than any machine has a use for.

    Args:
        count: of a rank.
        ranks: that share this machine's cores.

    Raises:
        ConfigError: with the most that are allowed.
    """
    most = min(_MOST_WORKERS, max(_WORKERS, _WORKERS_PER_CORE * available_cores() // ranks))
    if count > most:
        raise ConfigError(
            f"num_workers: {count} is not allowed: {available_cores()} cores are here, and at most {most} workers; "
            "set num_workers=auto"
        )


def check_open_files(processes: int) -> None:
    """Raise this process's limit of open files to what so many worker processes need.

    Raises:
        ConfigError: the hard limit is lower; the line has both numbers.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES + _FILES_PER_WORKER * processes
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        workers = f" with {processes} worker processes" if processes else ""
        less = ", or set engine=threads" if processes else ""
        raise ConfigError(
            f"open files: a run{workers} needs {needed}, this process may open {hard}; raise the limit "
            f"(ulimit -n {max(1024, needed)}){less}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def check_batch_memory(batch_size: int, bytes_of_image: int, key: str = "batch_size") -> None:
    """Refuse a batch whose images alone are larger than this machine's memory.

    Args:
        batch_size: images of a batch.
        bytes_of_image: of one of them, as it is loaded.
        key: that the message names.

    Raises:
        ConfigError: with the bytes needed, those that are free, and a size that fits.
    """
    needed, free = batch_size * bytes_of_image, available_memory()
    if needed > free:
        raise ConfigError(
            f"{key}: {batch_size} images need {decimal(needed)} of memory for one batch, {decimal(free)} are free; "
            f"set {key}={max(1, free // bytes_of_image // 8)} or less"
        )
