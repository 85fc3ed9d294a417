"""In which number formats a step computes."""

from effloop.precision.base import Precision, PrecisionConfig, precisions

__all__ = ["Precision", "PrecisionConfig", "precisions"]
