"""Where the bytes come from: id -> (bytes, label)."""

from effloop.data.source import auto, embedded, folder, memmap
from effloop.data.source.base import DataConfig, Fingerprint, Source, Tail, expand_root, printable, sources

__all__ = [
    "DataConfig",
    "Fingerprint",
    "Source",
    "Tail",
    "auto",
    "embedded",
    "expand_root",
    "folder",
    "memmap",
    "printable",
    "sources",
]
