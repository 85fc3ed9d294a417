"""Native augmentation: operations on uint8 images that draw whole batches at a time."""

from effloop.data.augment.native import affine, pixels, policy  # noqa: F401  (they register)
