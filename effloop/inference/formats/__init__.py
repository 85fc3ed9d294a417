"""Formats that models are exported to."""

from effloop.inference.formats import onnx, openvino, program, state_dict
from effloop.inference.formats.base import (
    INPUT,
    KEY,
    OUTPUT,
    Format,
    format_of,
    formats,
    one_line_errors,
    register_format,
)

__all__ = [
    "INPUT",
    "KEY",
    "OUTPUT",
    "Format",
    "format_of",
    "formats",
    "one_line_errors",
    "onnx",
    "openvino",
    "program",
    "register_format",
    "state_dict",
]
