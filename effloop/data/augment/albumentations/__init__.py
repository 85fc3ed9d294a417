"""Augmentation by Albumentations."""
