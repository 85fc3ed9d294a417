"""Failures that one line explains: what, got, allowed, fix."""

from __future__ import annotations

import functools
import importlib
import shutil
import sys
from collections.abc import Sequence
from types import ModuleType

PROGRAM = "effloop" if shutil.which("effloop") else "python -m effloop"
"""How a command line begins, in messages that say what to type."""


BUG = 70  # exit code of what no line explains
_INDENTED = "\n  "


class EffLoopError(Exception):
    """A failure whose message is the whole explanation.

    The command line prints the message as one line, without a traceback, and exits with
    `exit_code`. Everything else that is raised is a bug, a plugin's or EffLoop's, and keeps its traceback.
    """

    exit_code = 2


class ConfigError(EffLoopError):
    """A config key, choice or value that can't be taken."""


class DataError(EffLoopError):
    """A dataset, a file or a sample that can't be read."""


class WorkerError(EffLoopError):
    """A worker process that ended before its work did."""


class PluginError(EffLoopError):
    """An exception that somebody's plugin raised, which is its cause."""


class RankError(EffLoopError):
    """A rank that ended, or stopped answering, before its work was done."""


class RankBugError(RankError):
    """A rank that ended by a bug of EffLoop's; it has printed the traceback."""

    exit_code = BUG


class CheckpointError(EffLoopError):
    """A checkpoint or run folder that can't be written, found or read."""


class DivergedError(EffLoopError):
    """Training whose loss, gradients or weights aren't finite any more; all ranks raise it together."""


class OutOfMemoryError(EffLoopError):
    """More memory than there is, on the device or the host."""


class ParityError(EffLoopError):
    """An exported model whose outputs aren't those of the trained one."""

    exit_code = 1


class InterruptedRunError(EffLoopError):
    """Ctrl-C during training; the message says how to resume."""

    exit_code = 130


class PreemptedRunError(EffLoopError):
    """SIGTERM, SIGUSR1 or SIGHUP during training; the message says what was saved, and how to resume."""

    exit_code = 75


def optional_package(module: str, part: str, install: str) -> ModuleType:
    """Import `timm` when the part that needs it, `model=timm`, is built; a ConfigError says to `install` it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # it is there, and misses something itself
            raise
        raise ConfigError(f"{part} needs the package '{error.name}'; pip install '{install}'") from None


def check_value(key: str, value: object, good: bool, allowed: str) -> None:
    """Refuse the value of a config key, by a ConfigError that says what is `allowed`, unless it is good."""
    if not good:
        raise ConfigError(f"{key}: {value} is not allowed; set {allowed}")


def reason(error: BaseException) -> str:
    """The first line of an exception's message, or its type's name where it has none."""
    return str(error).strip().partition("\n")[0].rstrip() or type(error).__name__


def few(texts: Sequence[str]) -> str:
    """One or two texts; of more the first, and how many others there are."""
    return ", and ".join(texts) if len(texts) < 3 else f"{texts[0]}, and {len(texts) - 1:,} others"


def how_ended(error: BaseException) -> tuple[str, str]:
    """State and reason of a run that an exception has ended: `preempted`, `stopped by SIGTERM after update 2`."""
    if isinstance(error, KeyboardInterrupt):
        return "stopped", "interrupted"
    if isinstance(error, EffLoopError):
        return "preempted" if isinstance(error, PreemptedRunError) else "failed", str(error)
    return "failed", f"{type(error).__name__}: {error}".removesuffix(": ")


@functools.cache
def warn(line: str) -> None:
    """Say on stderr what is no reason to stop; each line once per process."""
    print(f"effloop: warning: {printable_lines(line)}", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    r"""A text on one line that does nothing to a terminal: line breaks, control and format characters as `\x1b`."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """As `printable`, but indented lines of a list stay lines; nobody takes such a line for one of the program's."""
    return _INDENTED.join(map(printable, text.split(_INDENTED)))
