"""Fewer operations with the same outputs: branches merged, BatchNorm folded into the layer before it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from effloop.inference.formats.program import trace

_ATEN = torch.ops.aten
_FUSE: dict[Any, Callable[..., tuple[Tensor, Tensor]]] = {
    _ATEN.conv1d.default: fuse_conv_bn_weights,
    _ATEN.conv2d.default: fuse_conv_bn_weights,
    _ATEN.conv3d.default: fuse_conv_bn_weights,
    _ATEN.conv2d.padding: fuse_conv_bn_weights,
    _ATEN.linear.default: fuse_linear_bn_weights,
}
"""Operations with (input, weight, bias), which a BatchNorm after them can be folded into."""

_CLOSE = 1e-3
"""Difference of fused outputs, as a share of the largest output. Float32 gives 1e-6 to 1e-5."""


@dataclass(frozen=True)
class Simplified:
    """A model with fewer operations.

    Attributes:
        model: on the CPU, in eval mode.
        reparameterized: how many parameters merging branches has saved.
        fused: how many BatchNorms were folded.
        note: why it is less than could be; empty if it isn't.
    """

    model: nn.Module
    reparameterized: int = 0
    fused: int = 0
    note: str = ""


def simplify(model: nn.Module, example: Tensor, *, dynamic: bool) -> Simplified:
    """A model re-parameterised and fused, if its outputs for random images stay the same; else as it is.

    Args:
        model: on the CPU, in eval mode; it is changed.
        example: (N, 3, H, W) images of the shape to export for.
        dynamic: whether the graph has to take any number of images.
    """
    with torch.no_grad():
        expected = model(example)
        merged = reparameterize(model)
        if not _close(merged(example), expected):
            return Simplified(model, note="re-parameterising changes its outputs, and was left out")
        saved = _parameters(model) - _parameters(merged)
        try:
            graph = trace(merged, example, dynamic=dynamic).module(check_guards=False)
            assert isinstance(graph, fx.GraphModule)
            count = fold_batch_norm(graph)
            same = _close(graph(example), expected)
        except Exception as error:  # tracing fails in many ways, of which the export itself will tell
            return Simplified(merged, saved, note=f"BatchNorm isn't fused: {str(error).partition(chr(10))[0]}")
    if not same:
        return Simplified(merged, saved, note="fusing BatchNorm changes its outputs, and was left out")
    return Simplified(graph if count else merged, saved, count)


def reparameterize(model: nn.Module) -> nn.Module:
    """A copy in which the parallel branches of RepVGG, MobileOne, FastViT and others of timm are one convolution."""
    if importlib.util.find_spec("timm") is None:
        return model
    from timm.utils.model import reparameterize_model

    merged: nn.Module = reparameterize_model(model)
    return merged


def fold_batch_norm(graph: fx.GraphModule) -> int:
    """Fold each BatchNorm into the convolution or linear layer that it alone reads (Jacob et al. 2018, "Quantization
    and training of neural networks for efficient integer-arithmetic-only inference", section 3.2).

    Args:
        graph: of ATen operations, in eval mode, as torch.export's `module()` has it; it is changed.

    Returns:
        How many.
    """
    count = 0
    for node in list(graph.graph.nodes):
        if node.target is not _ATEN.batch_norm.default or node.args[5]:  # [5]: in training
            continue
        layer = node.args[0]
        if layer.target in _FUSE and len(layer.users) == 1 and _fold(graph, layer, node, f"fused_{count}"):
            count += 1
    graph.graph.eliminate_dead_code()
    graph.delete_all_unused_submodules()
    graph.recompile()
    return count


def _fold(graph: fx.GraphModule, layer: fx.Node, norm: fx.Node, name: str) -> bool:
    """Fold one; False if a weight of theirs is computed, or used twice."""
    weight, bias, *_ = [*layer.args[1:3], None]
    scale, shift, mean, variance = norm.args[1:5]
    stored = [each for each in (weight, bias, scale, shift, mean, variance) if each is not None]
    if any(not isinstance(each, fx.Node) or each.op != "get_attr" for each in stored):
        return False
    if not isinstance(weight, fx.Node) or len(weight.users) > 1:
        return False
    tensors = [None if each is None else _tensor(graph, each) for each in (weight, bias, mean, variance, scale, shift)]
    fused = _FUSE[layer.target](*tensors[:4], norm.args[7], *tensors[4:])
    with graph.graph.inserting_before(layer):
        made = []
        for part, value in zip(("weight", "bias"), fused, strict=True):
            graph.register_parameter(f"{name}_{part}", nn.Parameter(value.detach().clone(), requires_grad=False))
            made.append(graph.graph.get_attr(f"{name}_{part}"))
    layer.args = (layer.args[0], *made, *layer.args[3:])
    norm.replace_all_uses_with(layer)
    graph.graph.erase_node(norm)
    return True


def _tensor(graph: fx.GraphModule, node: Any) -> Tensor:
    found: Any = graph
    for name in node.target.split("."):
        found = getattr(found, name)
    assert isinstance(found, Tensor)
    return found


def _close(outputs: Tensor, expected: Tensor) -> bool:
    return bool((outputs - expected).abs().max() <= _CLOSE * expected.abs().max())


def _parameters(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())
