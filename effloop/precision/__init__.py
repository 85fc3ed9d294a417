"""Precisions: the number formats of a training step."""

from effloop.precision.base import Precision, PrecisionConfig, precisions

__all__ = ["Precision", "PrecisionConfig", "precisions"]
