from __future__ import annotations

import numpy as np
import pytest

from effloop.data.source.storage.writing import SplitColumns


@pytest.mark.parametrize(
    ("largest", "dtype"),
    [(0, np.uint8), (255, np.uint8), (256, np.uint16), (65535, np.uint16), (65536, np.uint32)],
)
def test_labels_in_the_smallest_type(largest: int, dtype: type) -> None:
    assert SplitColumns(largest + 1).columns()["label"].dtype == dtype


def test_a_duplicate_by_what_identifies_a_key() -> None:
    columns, stems = SplitColumns(), SplitColumns(identity=lambda key: key.partition(b".")[0])
    for key in (b"a.jpg", b"b.jpg", b"a.png"):
        columns.add(key, 0, 1)
        stems.add(key, 0, 1)
    assert columns.duplicate() is None
    assert stems.duplicate() == (b"a", 0, 2)
