"""What happens to a sample between decoding and the batch."""

from effloop.data.augment import affine, albumentations, blur, colour, erasing, native, policy, torchvision
from effloop.data.augment.base import Augment, AugmentConfig, Draws, augments

__all__ = [
    "Augment",
    "AugmentConfig",
    "Draws",
    "affine",
    "albumentations",
    "augments",
    "blur",
    "colour",
    "erasing",
    "native",
    "policy",
    "torchvision",
]
