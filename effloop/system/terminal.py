"""What is printed does nothing to a terminal but show: names of files, classes and runs may hold its commands."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from effloop.errors import printable

_COLOURS_AND_BARS = r"\x1b\[[\d;]*m|\x1b\[\d*[AK]|\x1b\[\?25[hl]|\r"
"""What Rich writes to a terminal: colours, one line up, erase the line, hide and show the cursor."""
_KEPT = {
    True: re.compile(rf"({_COLOURS_AND_BARS}|[\n\t])"),
    False: re.compile(r"([\n\t])"),
}
"""What stays as it is, on a terminal and elsewhere."""


@contextmanager
def escaped_output() -> Iterator[None]:
    """Inside the block, what this process prints is escaped; see `EscapedStream`."""
    before = sys.stdout, sys.stderr
    ours = tuple(cast("TextIO", EscapedStream(each)) for each in before)
    sys.stdout, sys.stderr = ours
    try:
        yield
    finally:
        if (sys.stdout, sys.stderr) == ours:
            sys.stdout, sys.stderr = before


class EscapedStream:
    r"""A text stream in which control characters are written as `\x1b`, but for colours and progress bars."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._kept = _KEPT[stream.isatty()]

    def write(self, text: str) -> int:
        """Write a text, escaped."""
        size = len(text)
        if not text.isprintable():
            text = "".join(part if index % 2 else printable(part) for index, part in enumerate(self._kept.split(text)))
        self._stream.write(text)
        return size

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts, escaped."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
