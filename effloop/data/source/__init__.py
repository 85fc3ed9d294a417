"""Data sources: sample index -> (encoded image, target)."""

from effloop.data.source.auto import kind_of
from effloop.data.source.base import Fingerprint, Kind, NoSplitError, ScanError, Source, printable, sources
from effloop.data.source.config import Cache, DataConfig, Tail
from effloop.data.source.root import expand_root

__all__ = [
    "Cache",
    "DataConfig",
    "Fingerprint",
    "Kind",
    "NoSplitError",
    "ScanError",
    "Source",
    "Tail",
    "expand_root",
    "kind_of",
    "printable",
    "sources",
]
