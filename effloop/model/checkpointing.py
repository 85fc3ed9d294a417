"""Activation checkpointing: less memory for more computing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from effloop.errors import ConfigError
from effloop.model.base import subclassed


def checkpoint_blocks(model: nn.Module) -> int:
    """Make each block of a model store only its input for the backward pass, and recompute the rest there; how many.

    Gradients, BatchNorm's statistics and dropout are the same as without; timm's own switch (`set_grad_checkpointing`)
    updates BatchNorm's statistics twice.
    """
    # A ResNet's residual blocks, a ViT's layers, the stages of a plainer network; without lists (Inception v3)
    # they are direct children. A plain sequence has none.
    direct = [child for child in model.children() if _is_composite(child) and not _is_list(child)]
    if not (blocks := [*_blocks(model)] or direct):
        raise ConfigError(
            f"model.checkpointing: {type(model).__name__} has no blocks, it is a plain sequence of layers; "
            "set model.checkpointing=false or choose another model"
        )
    for block in blocks:
        subclassed(block, _checkpointed)
    return len(blocks)


def _blocks(module: nn.Module, *, in_list: bool = False) -> Iterator[nn.Module]:
    """The outermost modules in lists that have children themselves; lists of lists are entered."""
    for child in module.children():
        if _is_list(child) and any(map(_is_composite, child.children())):
            yield from _blocks(child, in_list=True)
        elif in_list and _is_composite(child) and not _is_stage(child):
            yield child
        else:
            yield from _blocks(child)


def _is_composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _is_list(module: nn.Module) -> bool:
    """Whether it is a plain list of its children, without its own forward."""
    return isinstance(module, nn.ModuleList) or type(module).forward is nn.Sequential.forward


def _is_stage(module: nn.Module) -> bool:
    """Whether it contains a list of equal blocks (timm's ConvNeXt), 9 to 27 of which would be recomputed at once."""
    for child in module.children():
        kinds = {type(block) for block in child.children()} if _is_list(child) else set()
        if len(kinds) == 1 and all(_is_composite(block) and not _is_list(block) for block in child.children()):
            return True
    return False


def _checkpointed(kind: Any) -> type[nn.Module]:
    class Checkpointed(kind):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if not (self.training and torch.is_grad_enabled()):
                return super().forward(*args, **kwargs)
            if torch.compiler.is_compiling():  # the compiler keeps updates of buffers out of the recomputation
                return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)

            contexts = lambda: (nullcontext(), _statistics_kept(self))  # noqa: E731
            return checkpoint(super().forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return Checkpointed


@contextmanager
def _statistics_kept(block: nn.Module) -> Iterator[None]:
    """Keep the running statistics of the block's norms unchanged by forwards inside, without copying them."""
    # A momentum of 0 keeps mean and variance to the bit. The buffers can't be removed: the recomputation must save as
    # many tensors as the forward did.
    modules: Iterator[Any] = block.modules()
    norms = [each for each in modules if getattr(each, "num_batches_tracked", None) is not None]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    try:
        for norm in norms:
            norm.momentum, norm.num_batches_tracked = 0.0, torch.empty_like(norm.num_batches_tracked)
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
