"""Models: images in, logits out."""

from effloop.model.backbone import load_backbone
from effloop.model.base import ModelConfig, models
from effloop.model.checkpointing import checkpoint_blocks
from effloop.model.freezing import freeze
from effloop.model.groups import parameter_groups
from effloop.model.head import find_head
from effloop.model.probe import Probe, norms_of_one_value, probe
from effloop.model.rates import Layer, modules_above_backbone, rates_by_layer, with_head
from effloop.model.weights import load_weights, weights_file

__all__ = [
    "Layer",
    "ModelConfig",
    "Probe",
    "checkpoint_blocks",
    "find_head",
    "freeze",
    "load_backbone",
    "load_weights",
    "models",
    "modules_above_backbone",
    "norms_of_one_value",
    "parameter_groups",
    "probe",
    "rates_by_layer",
    "weights_file",
    "with_head",
]
