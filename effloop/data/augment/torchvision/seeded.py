"""torch's random functions with numbers from a key: the global generator isn't used, and threads share none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from effloop.system.hardware import set_own_threads

Function = Callable[..., Any]


def seeded(key: int) -> Seeded:
    """A context in which this thread's random numbers by torch come from `key`, on any device.

    It takes 3 µs, and 1 to 2 for each torch function called inside. torch's generator uses the lower 32 bits of a
    key only.

    Args:
        key: from 0 to 2**64 - 1.
    """
    mode: Seeded | None = getattr(_own, "mode", None)
    if mode is None:
        mode = _own.mode = Seeded()
    mode.generator.manual_seed(key)
    return mode


_own = threading.local()


class Seeded(TorchFunctionMode):
    """The context of `seeded`: one per thread, not reentrant.

    torch computes on one thread inside, so that no sum depends on the number of threads, and an engine's threads
    don't start others. Numbers for a GPU are drawn on the host, so that the pixels are the same.

    Attributes:
        generator: source of the numbers.
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
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        draw = _DRAWS.get(getattr(func, "__name__", ""))
        if draw is None:
            return func(*args, **(kwargs or {}))
        return draw(self.generator, func, args, kwargs or {})


def _made(generator: torch.Generator, func: Function, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """torch.rand(2, 3, device=...)"""
    device = kwargs.get("device")
    return _moved(func(*args, **{**kwargs, "device": "cpu", "generator": generator}), device)


def _alike(generator: torch.Generator, func: Function, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """torch.randn_like(x), in row-major order whatever the memory layout."""
    (like,) = args
    make = {"rand_like": torch.rand, "randn_like": torch.randn}[func.__name__]
    drawn = make(like.shape, dtype=kwargs.get("dtype") or like.dtype, device="cpu", generator=generator)
    return _moved(drawn, kwargs.get("device") or like.device)


def _filled(generator: torch.Generator, func: Function, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """x.uniform_(0, 1)"""
    target, *rest = args
    if target.device.type == "cpu":
        return func(target, *rest, **{**kwargs, "generator": generator})  # type: ignore[no-any-return]
    drawn = torch.empty(target.shape, dtype=target.dtype, device="cpu")
    func(drawn, *rest, **{**kwargs, "generator": generator})
    return target.copy_(_moved(drawn, target.device), non_blocking=True)  # type: ignore[no-any-return]


def _chosen(generator: torch.Generator, func: Function, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """torch.multinomial(weights, 1); the host waits for weights on a device."""
    device = next((value.device for value in args if isinstance(value, Tensor)), None)
    args = [value.cpu() if isinstance(value, Tensor) else value for value in args]
    return _moved(func(*args, **{**kwargs, "generator": generator}), device)


def _refused(generator: torch.Generator, func: Function, args: Any, kwargs: dict[str, Any]) -> Tensor:
    del generator, args, kwargs
    raise RuntimeError(f"torch's {func.__name__} would draw from the global generator")


def _moved(drawn: Tensor, device: Any) -> Tensor:
    """To the requested device, without a sync."""
    where = torch.device("cpu" if device is None else device)
    if where.type == "cuda":
        drawn = drawn.pin_memory()
    return drawn.to(where, non_blocking=True)


_KNOWN: dict[Callable[..., Tensor], str] = {
    _made: "rand randn randint randperm",
    _alike: "rand_like randn_like",
    _filled: "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_",
    _chosen: "_sample_dirichlet _standard_gamma bernoulli binomial multinomial normal poisson",
    # All others in torch that draw, and functions of torch.nn.functional that call them unseen by the mode.
    _refused: "alpha_dropout alpha_dropout_ cauchy dropout dropout1d dropout2d dropout3d dropout_ exponential "
    "feature_alpha_dropout feature_alpha_dropout_ feature_dropout feature_dropout_ fractional_max_pool2d "
    "fractional_max_pool2d_with_indices fractional_max_pool3d fractional_max_pool3d_with_indices geometric gru "
    "gumbel_softmax log_normal lstm miopen_rnn multi_head_attention_forward native_dropout normal_functional "
    "randint_like random rnn_relu rnn_tanh rrelu rrelu_ rrelu_with_noise rrelu_with_noise_ "
    "rrelu_with_noise_functional scaled_dot_product_attention uniform",
}

_DRAWS = {name: how for how, names in _KNOWN.items() for name in names.split()}
"""Names of torch's drawing functions -> their replacements."""
