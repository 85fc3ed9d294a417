"""What happens to a sample between decoding and the batch."""

from effloop.data.augment.albumentations import augment as _albumentations  # noqa: F401  (they register)
from effloop.data.augment.base import Augment, AugmentConfig, Draws, augments
from effloop.data.augment.native import affine, blur, colour, erasing, policy  # noqa: F401
from effloop.data.augment.native import augment as _native  # noqa: F401
from effloop.data.augment.torchvision import augment as _torchvision  # noqa: F401

__all__ = ["Augment", "AugmentConfig", "Draws", "augments"]
