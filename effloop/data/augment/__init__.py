"""Augmentation: what happens to a sample between decoding and the model."""

from effloop.data.augment.base import Augment, AugmentConfig, Draws, augments

__all__ = ["Augment", "AugmentConfig", "Draws", "augments"]
