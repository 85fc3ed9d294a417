"""Which columns are compared with their checksums when data is opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum

CHECKED_UP_TO = 64 << 20
"""Bytes of a column up to which it is compared with its checksum when it is opened: 8 ms for 10 million samples.
Larger ones (their keys and positions) are by `verify`; what is learned about each sample always is, as nothing else
would notice."""

LEARNED = ("label", "target")


INDEXES = ("entropy", "entropy_end", "mask")
"""Only when all are: each entropy index is compared with the image when it is used, and an image is decoded without;
each mask has a checksum of its own."""


class Comparing(Enum):
    """Which columns are compared with their checksums where data is opened."""

    usual = "usual"  # those up to CHECKED_UP_TO, and what is learned
    all = "all"
    kept = "kept"  # of a dataset none, of what is kept elsewhere for it as usual: that can be made again
    none = "none"  # a worker opens what the process that started it has compared


_comparing: ContextVar[Comparing] = ContextVar("_comparing", default=Comparing.usual)


@contextmanager
def comparing(which: Comparing) -> Iterator[None]:
    """Within it these columns are compared."""
    token = _comparing.set(which)
    try:
        yield
    finally:
        _comparing.reset(token)


def is_verified() -> bool:
    """Whether data is opened to list all that is wrong with it: a bad sample is no reason to refuse it."""
    return _comparing.get() is Comparing.kept


def is_compared(name: str, num_bytes: int, *, kept: bool = False) -> bool:
    """Whether a column of a dataset, or of what is kept for it, is compared with its checksum now."""
    which = _comparing.get()
    if which is Comparing.none or (which is Comparing.kept and not kept):
        return False
    column = name.rpartition("/")[2]
    if which is Comparing.all or column in LEARNED:
        return True
    return num_bytes <= CHECKED_UP_TO and column not in INDEXES
