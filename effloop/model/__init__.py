"""Models: images in, logits out."""

from effloop.model import cnn, packaged, small_resnet, zoo
from effloop.model.base import ModelConfig, models
from effloop.model.checkpointing import checkpoint_blocks
from effloop.model.freezing import freeze
from effloop.model.groups import parameter_groups
from effloop.model.head import find_head
from effloop.model.probe import Probe, probe
from effloop.model.rates import Layer, rates_by_layer, with_head
from effloop.model.weights import load_weights, weights_file

__all__ = [
    "Layer",
    "ModelConfig",
    "Probe",
    "checkpoint_blocks",
    "cnn",
    "find_head",
    "freeze",
    "load_weights",
    "models",
    "packaged",
    "parameter_groups",
    "probe",
    "rates_by_layer",
    "small_resnet",
    "weights_file",
    "with_head",
    "zoo",
]
