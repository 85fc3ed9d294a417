from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tabled import Tabled

from effloop.data.source import counts
from effloop.data.source.counts import class_counts, classes_without_samples


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        pytest.param([0, 2, 2, 3, 2], [1, 0, 3], id="classes"),  # 3 is no class
        pytest.param([[1, 0, 0], [1, 0, 1], [0, 0, 1], [0, 0, 0], [0, 0, 1]], [2, 0, 3], id="flags"),
        pytest.param(np.ones((5, 3), np.float32), [], id="numbers"),
    ],
)
@pytest.mark.parametrize("piece", [2, 1 << 20])
def test_class_counts(targets: Any, expected: list[int], piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "_LABELS", piece)
    source = Tabled("vwxyz", targets, "abc" if expected else None)
    assert class_counts(source).tolist() == expected
    assert classes_without_samples(source) == (["b"] if expected else [])
