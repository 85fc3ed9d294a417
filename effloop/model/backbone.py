"""Initial weights of the backbone of a model of pixels: those of a model of images."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from effloop.errors import ConfigError
from effloop.model.base import Zoo
from effloop.model.weights import Normalisation, find_weights, sum_over_rgb

_BEFORE = re.compile(r"^(?:module\.|_orig_mod\.|backbone\.|encoder\.|model\.|features\.)+")
"""Prefixes of what is the backbone in some networks; torchvision's MobileNets have `features`, encoders that are
timm's `model`."""

_KEY = "model.backbone_weights"

_COUNTER = "num_batches_tracked"
"""Of BatchNorm, which loads files without it, too: those of torch 0.4."""


def load_backbone(
    model: nn.Module, weights: str, zoo: Zoo | None, image_size: Any, normalisation: Normalisation
) -> str:
    """Load weights of a model of images into the backbone of one of pixels; its heads stay as initialised.

    Args:
        model: has a `backbone`, or an `encoder`; changed in place.
        weights: as in `load_weights`: a run folder, a file, or a name of `zoo`.
        zoo: the package that has weights of the backbone, if one has.
        image_size: as in the config.
        normalisation: mean and std of the run's images.

    Returns:
        A line of text, as of `load_weights`.

    Raises:
        ConfigError: the model has no backbone, or the weights aren't there, can't be read, or are of another network.
    """
    children = dict(model.named_children())
    backbone = children.get("backbone", children.get("encoder"))
    if backbone is None:
        raise ConfigError(f"{_KEY}: {weights}, but this model has no backbone; set {_KEY}=null, or model.weights")
    found, own = find_weights(weights, zoo, image_size, normalisation, _KEY), backbone.state_dict()
    names = {_BEFORE.sub("", name): name for name in found.tensors}
    pairs = {name: names.get(_BEFORE.sub("", name)) for name in own}
    tensors = {name: found.tensors[theirs] for name, theirs in pairs.items() if theirs is not None}
    summed = "".join(f"; {name} summed over R, G, B" for name in sum_over_rgb(own, tensors))
    wrong = [f"{name} is missing there" for name in own if name not in tensors and not name.endswith(_COUNTER)]
    wrong += [
        f"{name} is {tuple(tensor.shape)} there, {tuple(own[name].shape)} here"
        for name, tensor in tensors.items()
        if tensor.shape != own[name].shape
    ]
    if wrong:
        first = "; ".join(wrong[:5]) + "; …" * (len(wrong) > 5)
        raise ConfigError(
            f"{_KEY}: tensors of {found.where} that don't match: {len(wrong)} ({first}); name weights of the network "
            "that the model is built on"
        )
    backbone.load_state_dict(tensors)
    return f"weights: {len(tensors)} tensors of the backbone from {found.where}{summed}{found.expects}"
