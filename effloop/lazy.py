"""torch, imported when something of it is first used: that takes seconds, and a misspelt key needs none of it.

Modules with options and checks take it from here. `Tensor` and `Store` are for annotations only: isinstance takes
torch.Tensor.
"""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

__all__ = ["F", "Store", "Tensor", "dist", "nn", "no_grad", "torch"]

C = TypeVar("C", bound=Callable[..., Any])


class LazyModule(ModuleType):
    """The module of this name; from its first use on a plain copy, as fast. What that gains later is found there."""

    def __getattr__(self, name: str) -> Any:
        module = importlib.import_module(self.__name__)
        vars(self).update(vars(module), __getattr__=functools.partial(getattr, module))
        self.__class__ = ModuleType  # type: ignore[assignment]
        return getattr(module, name)


if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import Tensor, nn
    from torch.distributed import Store  # type: ignore[attr-defined]
else:
    torch, nn = LazyModule("torch"), LazyModule("torch.nn")
    F, dist = LazyModule("torch.nn.functional"), LazyModule("torch.distributed")
    Store = Tensor = Any


def no_grad(call: C) -> C:
    """Decorator: as `torch.no_grad()`."""

    @functools.wraps(call)
    def without(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return call(*args, **kwargs)

    return cast("C", without)
