"""Failures that one line explains: what, got, allowed, fix."""

from __future__ import annotations

import functools
import importlib
import shutil
import sys
from types import ModuleType

PROGRAM = "effloop" if shutil.which("effloop") else "python -m effloop"
"""How a command line begins, in messages that say what to type."""


class EffLoopError(Exception):
    """A failure whose message is the whole explanation.

    The command line prints the message as one line, without a traceback, and exits with
    `exit_code`. Everything else that is raised is a bug of EffLoop's and keeps its traceback.
    """

    exit_code = 2


class ConfigError(EffLoopError):
    """A config key, choice or value that can't be taken."""


class DataError(EffLoopError):
    """A dataset, a file or a sample that can't be read."""


class WorkerError(EffLoopError):
    """A worker process that ended before its work did."""


class RankError(EffLoopError):
    """A rank that ended, or stopped answering, before its work was done."""


class CheckpointError(EffLoopError):
    """A checkpoint or run folder that can't be written, found or read."""


class ParityError(EffLoopError):
    """An exported model whose outputs aren't those of the trained one."""

    exit_code = 1


class InterruptedRunError(EffLoopError):
    """Ctrl-C during training; the message says how to resume."""

    exit_code = 130


def optional_package(module: str, part: str, install: str) -> ModuleType:
    """Import `module` when the part that needs it is built.

    Args:
        module: import name, e.g. `timm`.
        part: what asks for it, as the user wrote it, e.g. `model=timm`.
        install: what to pip install, e.g. `effloop[timm]`.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # it is there, and misses something itself
            raise
        raise ConfigError(f"{part} needs the package '{error.name}'; pip install '{install}'") from None


@functools.cache
def warn(line: str) -> None:
    """Say on stderr what is no reason to stop; each line once per process."""
    print(f"effloop: warning: {line}", file=sys.stderr, flush=True)
