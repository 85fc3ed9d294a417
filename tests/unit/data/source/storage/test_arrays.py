from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plans import line

from effloop.data.source.storage.arrays import Array, header_crc32c, pack
from effloop.data.source.storage.packed import MappedFiles
from effloop.errors import DataError

COLUMNS = {
    "label": np.array([0, 1], np.uint8),
    "key": np.frombuffer(b"ab", np.uint8),
    "key_end": np.array([1, 2], np.uint64),
    "end": np.array([3, 7], np.uint64),
    "crc32c": np.array([5, 6], np.uint32),
    "payload": np.frombuffer(b"onefour", np.uint8),
}


def lay_out(path: Path, order: str = "<") -> dict[str, Array]:
    """The columns end to end in a file, and where each is."""
    arrays, data = {}, b""
    for name, values in COLUMNS.items():
        dtype: np.dtype[Any] = values.dtype.newbyteorder(order)  # type: ignore[arg-type]
        arrays[name] = Array(0, len(data), dtype, len(values))
        data += values.astype(dtype).tobytes()
    path.write_bytes(data)
    return arrays


@pytest.mark.parametrize("order", ["<", ">"])
def test_columns_of_either_byte_order(tmp_path, order):
    arrays = lay_out(tmp_path / "file", order)
    packed = pack({}, "here", MappedFiles([tmp_path / "file"]), arrays)
    assert packed.targets.tolist() == [0, 1]
    assert packed.checksums is not None
    assert packed.checksums.tolist() == [5, 6]
    assert [bytes(packed.payload[index]) for index in range(2)] == [b"one", b"four"]
    assert [bytes(packed.keys[index]) for index in range(2)] == [b"a", b"b"]
    assert not packed.targets.flags.writeable


def test_an_empty_array_is_nowhere():
    arrays = {name: Array(0, 1 << 60, values.dtype, 0) for name, values in COLUMNS.items()}
    packed = pack({}, "here", MappedFiles([]), arrays, [])
    assert [len(packed.targets), len(packed.keys)] == [0, 0]


@pytest.mark.parametrize("name", ["crc32c", "payload"])
def test_array_outside_of_its_file(tmp_path, name):
    path = tmp_path / "file"
    arrays, size = lay_out(path), (tmp_path / "file").stat().st_size
    arrays[name] = replace(arrays[name], offset=size - 1)
    end = size - 1 + COLUMNS[name].nbytes
    wanted = f"here is cut short: its array '{name}' ends at byte {end}, {path} has {size}; convert it again"
    with pytest.raises(DataError, match=line(wanted)):
        pack({}, "here", MappedFiles([path]), arrays)


def test_ends_that_do_not_fit(tmp_path):
    arrays = lay_out(tmp_path / "file")
    arrays["end"] = arrays["key_end"]
    wanted = (
        "here is damaged: 2 labels and 2 images with 2 bytes of keys and 2 of images should be there; the keys have 2, "
        "the images 7: convert it again"
    )
    with pytest.raises(DataError, match=line(wanted)):
        pack({}, "here", MappedFiles([tmp_path / "file"]), arrays)


def test_checksum_of_a_header_is_of_what_it_says():
    assert header_crc32c({"a": 1, "b": [2]}) == header_crc32c({"b": [2], "a": 1}) != header_crc32c({"b": [2], "a": 2})
