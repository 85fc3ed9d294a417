"""Parameter groups by weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from effloop.model.base import NORMS
from effloop.model.rates import Layer


def parameter_groups(
    model: nn.Module, *, decay_norm_and_bias: bool, weight_decay: float, layers: Sequence[Layer] = ()
) -> list[dict[str, Any]]:
    """The parameters to train, in groups for a torch optimizer.

    Args:
        model: its frozen parameters are left out.
        decay_norm_and_bias: True is one group, in the model's order. With False parameters of norms, biases and all
            others of one dimension are a second group without decay (He et al. 2018, "Bag of tricks"): a norm cancels
            the scale of the weights before it, but not its own. Class tokens, position embeddings and tables of
            relative positions have more dimensions and decay.
        weight_decay: of the group that decays.
        layers: parameters with a learning rate of their own: then these are such groups for each layer, in this
            order. None is the optimizer's rate for all.

    Returns:
        `[{"params": [...], "weight_decay": ...}, ...]`, with `lr` if there are layers, without empty groups.
    """
    norms = {id(each) for module in model.modules() if isinstance(module, NORMS) for each in module.parameters()}
    parameters = dict(model.named_parameters())
    groups: list[dict[str, Any]] = []
    for names, settings in [(each.parameters, {"lr": each.lr}) for each in layers] or [(tuple(parameters), {})]:
        decaying: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name in names:
            parameter = parameters[name]
            if not parameter.requires_grad:
                continue
            plain = parameter.ndim <= 1 or id(parameter) in norms or name.rpartition(".")[2].endswith("bias")
            (others if plain and not decay_norm_and_bias else decaying).append(parameter)
        groups.append({"params": decaying, "weight_decay": weight_decay, **settings})
        groups.append({"params": others, "weight_decay": 0.0, **settings})
    return [group for group in groups if group["params"]]
