"""Augmentation by torchvision."""
