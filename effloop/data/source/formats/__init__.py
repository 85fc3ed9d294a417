"""One module per storage format: its source, its writer, or both."""

from effloop.data.source.formats import (  # noqa: F401
    folder_writer,
    hdf5,
    lmdb,
    memmap,
    pth,
    recordio,
    tar,
    tar_writer,
    tfrecord,
    zarr,
)
