"""The emulated CUDA device, and training on it."""

from __future__ import annotations

import emulator
import torch


def race(waits: bool) -> tuple[bool, list[float]]:
    """A copy on a stream of its own; whether it has passed at once, and what the current stream reads of it."""
    source, stream = torch.arange(1.0, 4).pin_memory(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        copied = source.to("cuda", non_blocking=True)
    passed = stream.query()
    if waits:
        torch.cuda.current_stream().wait_stream(stream)
    return passed, (copied * 2).cpu().tolist()


def test_who_does_not_wait_finds_what_is_not_written_yet() -> None:
    assert emulator.call(race, True) == (False, [2, 4, 6])
    passed, values = emulator.call(race, False)
    assert not passed
    assert all(each != each for each in values)  # NaN
