"""Images with a mask each, in files of their own."""

from effloop.data.source.masks.source import MasksSource

__all__ = ["MasksSource"]
