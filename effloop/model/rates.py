"""Learning rates by layer, for fine-tuning."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from effloop.model.checkpointing import blocks_of


@dataclass(frozen=True)
class Layer:
    """Parameters with a learning rate.

    Attributes:
        name: the module that they are in, or those of the first and the last.
        lr: the rate.
        parameters: their names.
    """

    name: str
    lr: float
    parameters: tuple[str, ...]


def rates_by_layer(model: nn.Module, lr: float, layer_decay: float | None) -> list[Layer]:
    """The layers of a model with their learning rates, from the last to the first.

    Args:
        model: its frozen parameters count, too.
        lr: the rate of the last layer.
        layer_decay: what a layer's rate is multiplied by for the layer below it (Bao et al. 2022, "BEiT"); None makes
            all parameters one layer.
    """
    names = [name for name, _ in model.named_parameters()]
    if layer_decay is None:
        return [Layer("all", lr, tuple(names))]
    places = layers_of(model)
    last = max(places.values())
    layers = [[name for name in names if places[name] == place] for place in range(last, -1, -1)]
    return [Layer(_name(layer), lr * layer_decay**depth, tuple(layer)) for depth, layer in enumerate(layers)]


def with_head(layers: Sequence[Layer], head: Sequence[str], lr: float) -> list[Layer]:
    """The same with a rate of its own for the modules `head`, which come last."""
    prefixes = tuple(f"{name}." for name in head)
    own = [name for layer in layers for name in layer.parameters if name.startswith(prefixes)]
    kept = [(layer, [name for name in layer.parameters if name not in own]) for layer in layers]
    last = Layer(", ".join(head), lr, tuple(own))
    return [*(Layer(layer.name, layer.lr, tuple(names)) for layer, names in kept if names), last]


def modules_above_backbone(model: nn.Module) -> list[str]:
    """The modules of a model of pixels that aren't its `backbone`, or `encoder`; none where it has neither."""
    names = [name for name, _ in model.named_children()]
    backbone = next((name for name in ("backbone", "encoder") if name in names), None)
    return [name for name in names if name != backbone] if backbone else []


def layers_of(model: nn.Module) -> dict[str, int]:
    """{name of a parameter: its layer, counted from the input}.

    A model of timm says itself (`group_matcher`). Of others each block (residual block, transformer layer, stage of a
    plainer network) is a layer, in the order in which they are registered. What comes before the first block is the
    first layer; what comes between two belongs to the one that follows; what comes after the last belongs to the
    head. Without blocks, as in VGG, each convolution or linear layer is one, with the norms behind it.
    """
    matcher: Any = getattr(model, "group_matcher", None)
    if matcher is None:
        layers = _by_block(model, _blocks(model)) or _one_by_one(model)
        return {name: place for place, layer in enumerate(layers) for name in layer}
    from timm.models import group_parameters

    found = group_parameters(model, matcher(coarse=False), reverse=True)
    places = {layer: place for place, layer in enumerate(sorted(set(found.values())))}
    return {name: places[layer] for name, layer in found.items()}


def _blocks(model: nn.Module) -> list[nn.Module]:
    children = [child for child in model.children() if not isinstance(child, nn.Sequential) and any(child.children())]
    if children and max(Counter(map(type, children)).values()) > 1:  # GoogLeNet's: no list holds its blocks
        return children
    return blocks_of(model)


def _by_block(model: nn.Module, blocks: Sequence[nn.Module]) -> list[list[str]]:
    owner = {id(parameter): number for number, block in enumerate(blocks) for parameter in block.parameters()}
    layers = list[list[str]]()
    last, waiting = None, list[str]()
    for name, parameter in model.named_parameters():
        block = owner.get(id(parameter))
        if block is None:
            waiting.append(name)
        elif block == last:
            layers[-1].append(name)
        else:
            if waiting and not layers:
                layers.append(waiting)
                waiting = []
            layers.append([*waiting, name])
            last, waiting = block, []
    return [*layers, waiting] if layers and waiting else layers


def _one_by_one(model: nn.Module) -> list[list[str]]:
    layers = list[list[str]]()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 or not layers:  # else a bias, or of a norm
            layers.append([])
        layers[-1].append(name)
    return layers


def _name(names: Sequence[str]) -> str:
    """The module that all of a layer's parameters are in, or those of its first and last."""
    modules = [(name.rpartition(".")[0] or name).replace(".", "/") for name in names]
    return (os.path.commonpath(modules) or f"{modules[0]} to {modules[-1]}").replace("/", ".")
