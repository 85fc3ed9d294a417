"""One module per storage format: its source, its writer, or both."""

from effloop.data.source.formats import (  # noqa: F401
    beton,
    cifar,
    folder_writer,
    hdf5,
    idx,
    lmdb,
    memmap,
    npz,
    parquet,
    pth,
    recordio,
    tar,
    tfrecord,
    zarr,
)
