"""Where the bytes come from: id -> (bytes, label)."""

from effloop.data.source import auto, embedded, folder, hdf5, lmdb, memmap, pth, recordio, tar, tfrecord, zarr
from effloop.data.source.base import Cache, DataConfig, Fingerprint, Source, Tail, expand_root, printable, sources

__all__ = [
    "Cache",
    "DataConfig",
    "Fingerprint",
    "Source",
    "Tail",
    "auto",
    "embedded",
    "expand_root",
    "folder",
    "hdf5",
    "lmdb",
    "memmap",
    "printable",
    "pth",
    "recordio",
    "sources",
    "tar",
    "tfrecord",
    "zarr",
]
