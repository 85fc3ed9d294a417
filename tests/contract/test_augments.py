"""What every registered augmentation has to do."""

import pickle
from collections.abc import Callable

import numpy as np
import pytest
from images import photo
from runs import composed

from effloop.batch import ImageSize
from effloop.data.augment import Augment, augments
from effloop.data.random import sample_keys

Build = Callable[[bool], Augment]
SIZES = np.array([(40, 60), (33, 33), (90, 20), (1, 1), (7, 300)])
KEYS = sample_keys(0, 0, np.arange(len(SIZES)))
SIDE = 24


@pytest.fixture(params=augments.names())
def build(request: pytest.FixtureRequest) -> Build:
    config = composed(f"augment={request.param}").augment
    return lambda train: augments.build(config, size=ImageSize.of(SIDE), train=train)


def run(augment: Augment, keys: np.ndarray = KEYS, sizes: np.ndarray = SIZES) -> np.ndarray:
    """(N, 24, 24, 3): photographs of these sizes, each the same for its size, through the augmentation."""
    draws = augment.draw(keys, sizes)
    out = np.full((len(keys), SIDE, SIDE, 3), 77, np.uint8)
    for row, (height, width) in enumerate(sizes.tolist()):
        top, left, h, w = draws.boxes[row]
        assert 0 <= top < top + h <= height
        assert 0 <= left < left + w <= width
        augment.apply(photo(height, width)[top : top + h, left : left + w], draws, row, out[row])
    return out


@pytest.mark.parametrize("train", [True, False])
def test_a_sample_looks_the_same_alone_and_in_any_run(build, train):
    whole = run(build(train))
    np.testing.assert_array_equal(run(build(train)), whole)
    for row in range(len(SIZES)):
        np.testing.assert_array_equal(run(build(train), KEYS[row : row + 1], SIZES[row : row + 1])[0], whole[row])
    np.testing.assert_array_equal(run(build(train), KEYS[::-1], SIZES[::-1]), whole[::-1])
    np.testing.assert_array_equal(run(pickle.loads(pickle.dumps(build(train)))), whole)


@pytest.mark.parametrize("train", [True, False])
def test_every_pixel_is_written(build, train):
    augment = build(train)
    for size in SIZES:
        draws = augment.draw(KEYS[:1], size[None])
        height, width = draws.boxes[0, 2:]
        region = photo(height, width)
        outs = [np.full((SIDE, SIDE, 3), value, np.uint8) for value in (0, 255)]
        for out in outs:
            augment.apply(region, draws, 0, out)
        np.testing.assert_array_equal(*outs)
