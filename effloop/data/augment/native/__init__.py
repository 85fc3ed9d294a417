"""Native augmentation: operations on uint8 images that draw whole batches at a time."""
