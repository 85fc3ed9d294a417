"""Models: images in, logits out."""

from effloop.model.base import ModelConfig, models
from effloop.model.parameters import (
    Layer,
    blocks_of,
    checkpoint_blocks,
    find_head,
    freeze,
    modules_above_backbone,
    parameter_groups,
    rates_by_layer,
    with_factors,
    with_head,
)
from effloop.model.probe import Probe, probe
from effloop.model.weights import load_backbone, load_weights, weights_file

__all__ = ["Layer", "ModelConfig", "Probe", "checkpoint_blocks", "find_head", "freeze", "load_backbone", "load_weights"]
__all__ += ["blocks_of", "models", "modules_above_backbone", "parameter_groups", "probe", "rates_by_layer"]
__all__ += ["weights_file", "with_factors", "with_head"]
