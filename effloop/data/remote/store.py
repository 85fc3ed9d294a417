"""The interface of a store with remote files, and what its failures become."""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import ClassVar, TypeVar

from effloop.data.remote.location import Location, redacted
from effloop.data.remote.manifest import Manifest, RemoteFile, manifest_of
from effloop.errors import DataError

T = TypeVar("T")
R = TypeVar("R")

TIMEOUT_S = 30.0
"""For a connection, and for the next bytes of an answer."""
ATTEMPTS = 4
"""At what the libraries don't repeat themselves."""
MOST_FILES = 100_000
"""In a dataset behind a URL."""
FIRST_PAUSE_S = 1.0
_LONGEST_REASON = 300


class FetchError(Exception):
    """A request that failed, and why.

    Args:
        reason: in words.
        again: whether another attempt may succeed.
    """

    def __init__(self, reason: str, *, again: bool = False) -> None:
        super().__init__(redacted(reason)[:_LONGEST_REASON])
        self.again = again


class ChangedError(FetchError):
    """A file isn't the one that was listed."""

    def __init__(self) -> None:
        super().__init__("it has changed since it was listed; start again, which lists it anew")


class TooManyError(FetchError):
    """There are more files than a dataset behind a URL may have."""

    def __init__(self) -> None:
        super().__init__(f"it has more than {MOST_FILES:,} files; pack them into shards, or name some by a pattern")


def retried(url: str, call: Callable[[], T], done: str = "fetched") -> T:
    """The result of the first of `ATTEMPTS` calls that succeeds; `done` is what it does with the URL, for messages.

    Raises:
        DataError: none does.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return call()
        except FetchError as error:
            line = f"{redacted(url)} can't be {done}: {error}"
            if not error.again:
                raise DataError(line) from None
            if attempt == ATTEMPTS:
                raise DataError(f"{line} ({ATTEMPTS} attempts); start again: what was {done} is kept") from None
            time.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1) * random.uniform(0.5, 1))
    raise AssertionError


def in_threads(call: Callable[[T], R], items: Iterable[T], at_once: int) -> list[R]:
    """The result for each item. The first call that fails ends it: calls that are under way aren't waited for."""
    pool = ThreadPoolExecutor(at_once)
    try:
        futures = [pool.submit(call, item) for item in items]
        for each in wait(futures, return_when=FIRST_EXCEPTION).done:
            each.result()
        return [each.result() for each in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class Store(ABC):
    """A store with files. Reading is thread-safe; a store doesn't survive a fork.

    Args:
        location: what is read there.
    """

    done: ClassVar[str] = "fetched"
    """The work on its files, for messages."""
    at_once: int = 16
    """Requests at the same time."""

    def __init__(self, location: Location) -> None:
        self.location = location

    def manifest(self) -> Manifest:
        """The files that the location names.

        Raises:
            ConfigError: a package is missing.
            DataError: they can't be listed, or there are none.
        """
        location, path = self.location, self.location.path
        if location.has_patterns:
            listed = self.listed(location.base)
            found = [file for file in listed if location.matches(file.key)]
            return manifest_of(location, found, alone=False, base=location.base, listed=listed)
        folder = path.rstrip("/") + "/" if path else ""
        found = self.listed(folder)
        if found or not path or path.endswith("/"):
            return manifest_of(location, found, alone=False, base=folder)
        return manifest_of(location, [self.described(path)], alone=True, base=location.base)

    @abstractmethod
    def listed(self, folder: str) -> list[RemoteFile]:
        """All files below a folder, which ends with `/` or is empty; none where there is no such folder.

        Raises:
            DataError: it can't be listed.
        """

    @abstractmethod
    def described(self, key: str) -> RemoteFile:
        """A single file.

        Raises:
            DataError: it isn't there, or can't be described.
        """

    @abstractmethod
    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[bytes | memoryview]:
        """Yield the bytes from `start` to `stop`, piece by piece.

        Raises:
            FetchError: they can't be read, or the file has changed.
        """

    def check(self, file: RemoteFile) -> None:
        """Compare a file, once all of it was read, with what was listed; buckets do so with each part.

        Raises:
            ChangedError: it has changed.
            DataError: it can't be described.
        """
        return
