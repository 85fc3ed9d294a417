"""The share of time that the GIL is held."""

from __future__ import annotations

import time

from effloop.bench.gil import GilProbe


def test_python_holds_it_and_waiting_does_not() -> None:
    with GilProbe() as computing:
        end = time.thread_time() + 0.1
        while time.thread_time() < end:
            pass
    with GilProbe() as waiting:
        time.sleep(0.1)
    assert waiting.share < 0.5 < computing.share <= 1
