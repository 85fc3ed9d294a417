"""EffLoop's own augmentation."""
