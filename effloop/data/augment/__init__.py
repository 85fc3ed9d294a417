"""What happens to a sample between decoding and the batch."""

from effloop.data.augment import blur, colour, erasing, native
from effloop.data.augment.base import Augment, AugmentConfig, Draws, augments

__all__ = ["Augment", "AugmentConfig", "Draws", "augments", "blur", "colour", "erasing", "native"]
