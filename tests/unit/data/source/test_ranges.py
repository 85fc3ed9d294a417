"""Samples by where they begin and end."""

import numpy as np
import pytest

from effloop.data.source import ranges
from effloop.data.source.ranges import Ranges


@pytest.mark.parametrize("piece", [1, 3, 1 << 20])
@pytest.mark.parametrize("values", [[], [7], [2, 2, 2], [0, 0, 1, 1, 1, 3, 3, 0]])
def test_equal_values_that_follow_each_other_are_a_range(values, piece, monkeypatch):
    monkeypatch.setattr(ranges, "_PIECE", piece)
    array = np.array(values, np.uint16)
    found = Ranges.of_equal(array)
    assert len(found) == len(values)
    assert np.repeat(array[found.starts], found.lengths).tolist() == values
    assert all(array[start - 1] != array[start] for start in found.starts[1:].tolist())


def test_places_in_ranges_are_samples():
    found = Ranges(np.array([3, 10, 20]), np.array([5, 11, 24]))
    samples = np.array([3, 4, 10, 20, 21, 22, 23])
    assert found[np.arange(len(found))].tolist() == samples.tolist()
    assert found[np.array([6, 0])].tolist() == [23, 3]
    assert found.holding(np.arange(30)).tolist() == samples.tolist()
    assert Ranges(found.starts[:0], found.stops[:0]).holding(np.arange(30)).tolist() == []
