"""Models: images in, logits out."""

from effloop.model import cnn, small_resnet, zoo
from effloop.model.base import ModelConfig, models

__all__ = ["ModelConfig", "cnn", "models", "small_resnet", "zoo"]
