"""Data sources: sample index -> (encoded image, target)."""

from effloop.data.source import auto, embedded, folder, formats  # noqa: F401  (they register)
from effloop.data.source.base import Cache, DataConfig, Fingerprint, Source, Tail, printable, sources
from effloop.data.source.root import expand_root

__all__ = ["Cache", "DataConfig", "Fingerprint", "Source", "Tail", "expand_root", "printable", "sources"]
