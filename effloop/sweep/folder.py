"""A sweep's folder: made or found again, owned by one process, and continued only with the same overrides."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from hydra.core.override_parser.overrides_parser import OverridesParser

from effloop.config import Config
from effloop.errors import ConfigError
from effloop.runs.folder import TIMESTAMP
from effloop.runs.reader import SWEEP
from effloop.sweep.shared import shared_overrides
from effloop.system.files import describe_failure, numbered, try_lock
from effloop.system.untrusted import MOST_JSON

_ABOUT_THE_SWEEP = ("out", "run", "objective", "sweep.resume", "sweep.prune")
"""Keys that change nothing about what a job is."""


@contextmanager
def owned_folder(
    planned: Path, overrides: list[str], shared: Mapping[str, str], config: Config, count: int
) -> Iterator[Path]:
    """A sweep's folder, new or of an earlier start, that is this process's alone for as long as it lives.

    Raises:
        ConfigError: another sweep's, or another process is at it.
    """
    folder = _folder(planned, config)
    place = os.path.relpath(folder)
    with _opened(folder / SWEEP) as file:
        if not try_lock(file.fileno()):
            owner = _earlier(file)
            raise ConfigError(
                f"run: {place} is being worked on by process {owner.get('pid')} on {owner.get('host')}; "
                "wait for its end or set run=ANOTHER_NAME"
            )
        earlier = _earlier(file)
        if earlier:  # nothing, where a start was killed at once
            _check_same(earlier, shared, folder)
        facts = {
            "overrides": overrides,
            "objective": config.objective,
            "jobs": count,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        _overwrite(file, json.dumps(facts, indent=2) + "\n")
        yield folder


def _overwrite(file: TextIO, text: str) -> None:
    """Replace the contents of a file, at once: a kill in the middle must not leave a part of each.

    Raises:
        ConfigError: it can't be written.
    """
    size = os.fstat(file.fileno()).st_size
    try:
        os.pwrite(file.fileno(), text.encode().ljust(size), 0)
    except OSError as error:
        raise ConfigError(f"run: {describe_failure(Path(file.name), error)}; make room there") from None


def _opened(path: Path) -> TextIO:
    """What keeps a sweep's facts, to be read and written."""
    try:
        return path.open("r+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"run: {os.path.relpath(path)} can't be written: {error.strerror}; set run=ANOTHER_NAME"
        ) from None


def _earlier(file: TextIO) -> dict[str, Any]:
    """The facts of an earlier start; empty where there was none."""
    try:
        return dict(json.loads(file.read(MOST_JSON) or "{}"))
    except (ValueError, TypeError, RecursionError):
        place = os.path.relpath(file.name)
        raise ConfigError(f"{place} is damaged; delete it, and start again with the same overrides") from None


def _folder(planned: Path, config: Config) -> Path:
    """The folder; made now, unless the sweep in it is continued."""
    place = os.path.relpath(planned)
    stamped = TIMESTAMP.search(planned.as_posix())
    if config.sweep.resume and (planned / SWEEP).is_file():
        return planned
    if config.sweep.resume and stamped:
        raise ConfigError(
            f"sweep.resume: {place} holds no sweep; say which: run=NAME, as it stands below {config.out}/multirun/"
        )
    candidates = numbered(planned)
    while True:
        folder = next(candidates)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / SWEEP).touch(exist_ok=False)  # whoever makes the file owns the folder
        except FileExistsError:
            if not stamped:
                raise ConfigError(
                    f"run: {place} holds a sweep already; continue it with sweep.resume=true, or set run=ANOTHER_NAME"
                ) from None
        except OSError as error:
            raise ConfigError(f"run: {place} can't be made: {error.strerror}; set out=FOLDER") from None
        else:
            return folder


def _check_same(earlier: Mapping[str, Any], shared: Mapping[str, str], folder: Path) -> None:
    """Refuse to continue with other values of what all jobs share.

    Raises:
        ConfigError: they differ.
    """
    before = shared_overrides(OverridesParser.create().parse_overrides(list(earlier.get("overrides", []))))
    for key in {**before, **shared}:
        if key not in _ABOUT_THE_SWEEP and not key.startswith("hydra") and before.get(key) != shared.get(key):
            raise ConfigError(
                f"sweep.resume: {os.path.relpath(folder)} was started with {before.get(key, f'no {key}')}, now it is "
                f"{shared.get(key, f'no {key}')}; start it with the same, or set run=ANOTHER_NAME"
            )
