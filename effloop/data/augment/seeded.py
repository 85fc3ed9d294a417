"""torch's random functions with numbers from a key: the global generator isn't used, and threads share none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from effloop.system.hardware import set_own_threads

_DRAWS = (
    "rand randn randint randperm rand_like randn_like bernoulli_ exponential_ normal_ random_ uniform_ "
    "_sample_dirichlet bernoulli multinomial normal poisson"
)
_DRAWING = frozenset(_DRAWS.split())


def seeded(key: int) -> Seeded:
    """A context in which this thread's random numbers by torch come from `key`, 64 bits.

    It takes 3 µs, and 1 to 2 for each torch function called inside. torch's generator uses a key's lower 32 bits only.
    """
    mode: Seeded | None = getattr(_own, "mode", None)
    if mode is None:
        mode = _own.mode = Seeded()
    mode.generator.manual_seed(key)
    return mode


_own = threading.local()


class Seeded(TorchFunctionMode):
    """The context of `seeded`: one per thread, not reentrant.

    torch computes on one thread inside, so that no sum depends on the number of threads, and an engine's threads don't
    start others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def __enter__(self) -> Seeded:
        self._threads = set_own_threads(1)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        set_own_threads(self._threads)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name not in _DRAWING:
            return func(*args, **kwargs)
        if name.endswith("_like"):  # torch.randn_like(x) takes no generator; in row-major order
            func, kwargs = (
                torch.rand if name == "rand_like" else torch.randn,
                {"dtype": kwargs.get("dtype") or args[0].dtype},
            )
            args = (args[0].shape,)
        return func(*args, **{**kwargs, "generator": self.generator})
