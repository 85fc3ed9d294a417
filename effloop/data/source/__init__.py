"""Where the bytes come from: id -> (bytes, label)."""

from effloop.data.source import auto, embedded, folder  # noqa: F401  (they register)
from effloop.data.source.base import Cache, DataConfig, Fingerprint, Source, Tail, expand_root, printable, sources
from effloop.data.source.formats import hdf5, lmdb, memmap, pth, recordio, tar, tfrecord, zarr  # noqa: F401

__all__ = ["Cache", "DataConfig", "Fingerprint", "Source", "Tail", "expand_root", "printable", "sources"]
