"""One module per storage format: its source, its writer, or both."""

from . import folder_writer, hdf5, lmdb, memmap, pth, recordio, tar, tar_writer, tfrecord, zarr  # noqa: F401
