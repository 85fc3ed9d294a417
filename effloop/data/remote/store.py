"""Where remote files are: the interface of a store, and how its failures are told."""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from threading import Event
from typing import ClassVar, TypeVar

from effloop.data.remote.location import Location, redacted
from effloop.data.remote.manifest import Manifest, RemoteFile
from effloop.errors import DataError

T = TypeVar("T")
B = TypeVar("B", bound=bytes | memoryview)

TIMEOUT_S = 30.0
"""For a connection, and for the next bytes of an answer."""
ATTEMPTS = 8
MOST_FILES = 100_000
"""In a dataset behind a URL."""
NO_TLS = "it doesn't answer by HTTPS, perhaps by http://"
"""Of a server whose first bytes are no TLS."""
_FIRST_S, _LONGEST_S = 0.5, 30.0
_MOST_PATIENT_S = 300.0  # a server that asks for more has a quota that is used up
_LONGEST_REASON = 300
_SLOW_S, _SLOW_BYTES = 60.0, 64 << 10
"""A connection that brings less in that time is tried anew."""


class FetchError(Exception):
    """An attempt that failed.

    Args:
        reason: why, in words.
        final: whether another attempt would fail the same way.
        after_s: seconds that the server wants to be left alone.
        answered: whether the server has said so: it is there, and is asked `ATTEMPTS` times.
    """

    def __init__(
        self, reason: str, *, final: bool = False, after_s: float | None = None, answered: bool = False
    ) -> None:
        super().__init__(redacted(reason)[:_LONGEST_REASON])
        self.final, self.after_s, self.answered = final, after_s, answered


class ChangedError(FetchError):
    """A file isn't the one that was listed."""

    def __init__(self) -> None:
        super().__init__("it has changed since it was listed; start again, which lists it anew", final=True)


class TooManyError(FetchError):
    """There are more files than a dataset behind a URL may have."""

    def __init__(self) -> None:
        super().__init__(
            f"it has more than {MOST_FILES:,} files; pack them into shards, or name some by a pattern", final=True
        )


class Attempts:
    """Failed attempts at something, with pauses between them that become longer.

    Args:
        what: the URL.
        most: attempts without any progress.
        stopped: is set when others have failed for good.
        done: what is to be done with it, as `fetched`.
    """

    def __init__(self, what: str, most: int = ATTEMPTS, stopped: Event | None = None, done: str = "fetched") -> None:
        self._what, self._most, self._stopped, self._done = what, most, stopped or Event(), done
        self._failed, self._began = 0, time.monotonic()

    def progress(self) -> None:
        """Begin to count again."""
        self._failed, self._began = 0, time.monotonic()

    def failed(self, error: FetchError) -> None:
        """Wait before the next attempt.

        Raises:
            DataError: there is none.
        """
        self._failed += 1
        seconds = time.monotonic() - self._began
        told = f"{redacted(self._what)} can't be {self._done}: {error}"
        if (error.after_s or 0) > _MOST_PATIENT_S:
            raise DataError(f"{told}; the server asks to wait {error.after_s:,.0f} s: start again then")
        if error.final:
            raise DataError(told)
        most = max(self._most, ATTEMPTS) if error.answered else self._most
        asked = error.after_s is not None and seconds < _MOST_PATIENT_S  # a rate limit: its turn comes
        if self._failed >= most and not asked:
            raise DataError(
                f"{told} (attempt {self._failed} of {most}, {seconds:.0f} s); look at the server and the "
                f"network, and start again: what was {self._done} is kept"
            )
        pause = min(_LONGEST_S, _FIRST_S * 2 ** (self._failed - 1)) * random.uniform(0.5, 1)
        self._stopped.wait(pause + (error.after_s or 0))  # longer by a pause of its own: all threads were told the same


def retried(
    what: str, call: Callable[[], T], most: int = ATTEMPTS, stopped: Event | None = None, done: str = "fetched"
) -> T:
    """What a call returns, at the first attempt that succeeds; arguments as of `Attempts`.

    Raises:
        DataError: none does, or others have failed for good.
    """
    attempts = Attempts(what, most, stopped, done)
    while True:
        try:
            return call()
        except FetchError as error:
            attempts.failed(error)
            if stopped and stopped.is_set():
                raise DataError(f"{redacted(what)} can't be {done}: {error}") from None


def steady(pieces: Iterator[B]) -> Iterator[B]:
    """What comes piece by piece, unless it is as good as nothing.

    Raises:
        FetchError: it is.
    """
    since, count = time.monotonic(), 0
    for data in pieces:
        count += len(data)
        if (now := time.monotonic()) - since > _SLOW_S:
            if count < _SLOW_BYTES:
                raise FetchError(f"{count:,} bytes in {_SLOW_S:g} s are too slow")
            since, count = now, 0
        yield data


class Store(ABC):
    """A place with files. Reading is thread-safe; no store crosses a fork.

    Args:
        location: what is read there.
    """

    done: ClassVar[str] = "fetched"
    """What is done there, for messages."""
    at_once: int = 16
    """Requests at the same time."""

    def __init__(self, location: Location) -> None:
        self.location = location

    @abstractmethod
    def manifest(self) -> Manifest:
        """The files that the location names.

        Raises:
            ConfigError: a package is missing.
            DataError: they can't be listed, or there are none.
        """

    @abstractmethod
    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[bytes | memoryview]:
        """The bytes from `start` to `stop`, piece by piece.

        Raises:
            FetchError: they can't be read, or the file has changed.
        """

    def check(self, file: RemoteFile) -> None:
        """Whether a file, once all of it was read, is still the one that was listed; buckets say so with each part.

        Raises:
            FetchError: it has changed, or doesn't answer.
        """
        return
