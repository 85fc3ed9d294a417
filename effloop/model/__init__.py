"""Models: images in, logits out."""

from effloop.model import cnn, small_resnet, zoo
from effloop.model.base import ModelConfig, models
from effloop.model.checkpointing import checkpoint_blocks
from effloop.model.freezing import freeze
from effloop.model.groups import parameter_groups

__all__ = [
    "ModelConfig",
    "checkpoint_blocks",
    "cnn",
    "freeze",
    "models",
    "parameter_groups",
    "small_resnet",
    "zoo",
]
