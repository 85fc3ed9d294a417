"""Where a program waits for the device: lines that read a tensor's value or copy it."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {  # operations that need a result on the host -> how they are written
    "aten::_local_scalar_dense": "item(), float() or bool()",
    "aten::nonzero": "nonzero()",
    "aten::masked_select": "masked_select()",
    "aten::equal": "equal()",
    "aten::allclose": "allclose()",
    "aten::_unique2": "unique()",
    "aten::unique_consecutive": "unique_consecutive()",
    "aten::bincount": "bincount()",
    "aten::repeat_interleave": "repeat_interleave() without output_size",
    "aten::_linalg_check_errors": "a check of linear algebra",
}

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OPTIM = os.path.join(_TORCH, "optim") + os.sep


class SyncFinder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, while it is entered, where the host waits for the device, in the thread that has entered it.

    `found` is (file, line, function, what) -> how often. On a CPU what would wait on a GPU counts, but for copies:
    nobody can tell there which side is which. What waits is as in torch's CUDA sources, and what
    `torch.cuda.set_sync_debug_mode` has; it doesn't know of `non_blocking` copies of memory that isn't pinned.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind, self._calls = device.type, _Calls(self)
        self.inside = False  # a call that was counted by itself
        self.found: Counter[tuple[str, int, str, str]] = Counter()

    def __enter__(self) -> Any:
        self._thread = threading.get_ident()
        self._calls.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._calls.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; see torch.utils._python_dispatch."""
        kwargs, name = kwargs or {}, function.name().partition(".")[0]
        result = function(*args, **kwargs)
        if name in ("aten::copy_", "aten::_to_copy"):
            to, of = args[:2] if name == "aten::copy_" else (result, args[0])
            what = _copy_waits(to, of, kwargs.get("non_blocking", len(args) > 2 and args[2]))
        else:
            what = _waits(name, args, kwargs, self.kind)
        if what and not self.inside:
            self.note(what)
        return result

    def note(self, what: str) -> None:
        """Count the innermost line that isn't torch's; not an optimizer's counters, which stay on the host."""
        for innermost in (sys._getframe(), sys._current_frames()[self._thread]):  # a GPU's gradients have a thread
            frames = traceback.extract_stack(innermost)
            own = [number for number, frame in enumerate(frames) if not frame.filename.startswith((_TORCH, __file__))]
            if own:
                break
        counts = any(frame.filename.startswith(_OPTIM) for frame in frames[own[-1] :]) and self.kind != "cuda"
        if not counts:
            frame = frames[own[-1]]
            self.found[frame.filename, frame.lineno or 0, frame.name, what] += 1


class _Calls(TorchFunctionMode):
    """For a finder, calls that do other operations on a CPU: there `one_hot` always reads its values, to check them,
    and a new tensor isn't copied; one for the model's device has a `torch.device` there.
    """

    def __init__(self, finder: SyncFinder) -> None:
        super().__init__()
        self._finder = finder

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.tensor and self._finder.kind == "cpu" and isinstance(kwargs.get("device"), torch.device):
            self._finder.note("a tensor of Python's values")
        if function is not torch.nn.functional.one_hot:
            return function(*args, **kwargs)
        if (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) == -1:
            self._finder.note("one_hot() without num_classes")
        self._finder.inside = True
        try:
            return function(*args, **kwargs)
        finally:
            self._finder.inside = False


def _waits(name: str, args: Any, kwargs: Any, kind: str) -> str:
    """How an operation is written if the host waits for a device of this kind in it; empty if it doesn't."""
    source = next((each for each in args if isinstance(each, Tensor)), None)
    if source is None or source.device.type != kind:
        return ""
    if name in ("aten::index", "aten::index_put", "aten::index_put_"):
        indices = [each for each in args[1] if each is not None]
        masks = [each.device.type for each in indices if each.dtype in (torch.bool, torch.uint8)]
        number = len(args) > 2 and len(indices) == 1 and args[2].numel() == 1 and args[2].device.type == "cpu"
        if kind in masks:
            return "" if number else "a mask as an index"  # a number is filled in
        return "an index on the host" if not masks and any(each.device.type != kind for each in indices) else ""
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is not None:
        return ""
    if kind != "cpu" and name in ("aten::masked_fill", "aten::masked_fill_") and isinstance(args[2], Tensor):
        return "masked_fill() with a tensor's value" if args[2].device.type == kind else ""
    if kind != "cpu" and name == "aten::lift_fresh":  # as by torch.tensor(), or of a list as an index
        return "a tensor of Python's values"
    return _READS.get(name, "")


def _copy_waits(to: Tensor, of: Tensor, asynchronous: bool) -> str:
    """As `_waits` for a copy: the driver waits unless its side on the host is pinned, too."""
    host = of if of.device.type == "cpu" else to
    if to.device.type == of.device.type or (asynchronous and host.is_pinned()):
        return ""
    return "a copy to the host" if host is to else "a copy from the host without pinned memory and non_blocking"
