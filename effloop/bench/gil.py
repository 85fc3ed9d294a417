"""How long a process holds its interpreter lock (GIL): Python's share of an epoch, which threads wait for."""

from __future__ import annotations

import ctypes
import threading
from types import TracebackType
from typing import Any, Self

from effloop.native import library

_MEAN_NS = 500_000  # between probes: 2,000 a second find a share of 0.2 within 0.01, and cost 0.3 % of the time


class GilProbe:
    """Context in which a thread asks for the GIL at random times, and counts how often it has to wait.

    It sees this process alone. A probe that waits is a context switch of its thread, so what other programs do to
    the machine is no wait.

    Attributes:
        share: of the time that the GIL was held, from 0 to 1.
    """

    share = 0.0

    def __enter__(self) -> Self:
        self._stop, self._found = ctypes.c_int32(0), (ctypes.c_int64 * 2)()
        api = [ctypes.cast(getattr(ctypes.pythonapi, f"PyGILState_{name}"), ctypes.c_void_p) for name in _LOCK]
        found: Any = (*api, ctypes.c_int64(_MEAN_NS), ctypes.byref(self._stop), self._found)
        self._thread = threading.Thread(target=library().effloop_probe_gil, args=found, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.value = 1
        self._thread.join()
        probes, waits = self._found
        self.share = waits / probes if probes else 0.0


_LOCK = ("Ensure", "Release")
