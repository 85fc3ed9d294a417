"""Where a program waits for the device: lines that read a tensor's value."""

from __future__ import annotations

import os
import traceback
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {
    "aten::_local_scalar_dense": "item(), float() or bool()",
    "aten::nonzero": "nonzero()",
    "aten::masked_select": "masked_select()",
    "aten::equal": "equal()",
    "aten::_unique2": "unique()",
    "aten::index": "a mask as an index",
    "aten::_to_copy": "a copy to the host",
}
"""Operations that need a result on the host -> how they are written."""

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OPTIM = os.path.join(_TORCH, "optim") + os.sep


class SyncFinder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, while it is entered, where the host reads values, in the thread that has entered it.

    `found` is (file, line, function, what) -> how often. On a CPU every read counts, as it would wait on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.found: Counter[tuple[str, int, str, str]] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; see torch.utils._python_dispatch."""
        name = function.name().partition(".")[0]
        kwargs = kwargs or {}
        source = next((each for each in args if isinstance(each, torch.Tensor)), None)
        here = source is not None and source.device.type == self._device.type
        if here and name in _READS and _reads(name, source, args, kwargs):
            self._note(_READS[name], on_gpu=self._device.type == "cuda")
        return function(*args, **kwargs)

    def _note(self, what: str, *, on_gpu: bool) -> None:
        """Count the innermost line that isn't torch's; not an optimizer's counters, which stay on the host."""
        frames = traceback.extract_stack()[:-2]
        own = [number for number, frame in enumerate(frames) if not frame.filename.startswith(_TORCH)]
        counts = any(frame.filename.startswith(_OPTIM) for frame in frames[own[-1] :]) and not on_gpu
        if not counts:
            frame = frames[own[-1]]
            self.found[frame.filename, frame.lineno or 0, frame.name, what] += 1


def _reads(name: str, source: Any, args: Any, kwargs: Any) -> bool:
    """Whether such an operation does need a result on the host: an index may be numbers, a copy to anywhere."""
    if name == "aten::index":
        return any(each is not None and each.dtype is torch.bool for each in args[1])
    if name == "aten::_to_copy":
        device = kwargs.get("device")
        waits = device is not None and torch.device(device).type == "cpu" and not kwargs.get("non_blocking")
        return source.is_cuda and waits
    return True
