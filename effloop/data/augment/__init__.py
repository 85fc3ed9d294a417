"""Augmentation: what happens to a sample between decoding and the model."""

import effloop.data.augment.albumentations
import effloop.data.augment.native.augment
import effloop.data.augment.torchvision  # noqa: F401  these register themselves
from effloop.data.augment.base import Augment, AugmentConfig, Draws, augments
from effloop.data.augment.native import affine, pixels, policy  # noqa: F401

__all__ = ["Augment", "AugmentConfig", "Draws", "augments"]
