import numpy as np
import pytest
import torch
from images import photo
from plans import native_config
from torchvision.transforms import RandomResizedCrop

from effloop.batch import ImageSize
from effloop.data.augment.base import RecipeConfig
from effloop.data.augment.native.augment import NativeAugment
from effloop.data.augment.native.crops import random_resized_boxes
from effloop.data.random import sample_keys, uniforms

SCALE, RATIO = [0.08, 1.0], [3 / 4, 4 / 3]


def keys(count: int) -> np.ndarray:
    return sample_keys(0, 0, np.arange(count))


def flipping(p: float) -> RecipeConfig:
    return native_config(ops={"RandomResizedCrop": {}, "RandomHorizontalFlip": {"p": p}})


def boxes(size: tuple[int, int], count: int, scale: list[float] = SCALE, ratio: list[float] = RATIO) -> np.ndarray:
    return random_resized_boxes(keys(count), np.tile(size, (count, 1)), scale, ratio)


def boxes_by_numpy(keys: np.ndarray, sizes: np.ndarray, scale: list[float], ratio: list[float]) -> np.ndarray:
    """What `random_resized_boxes` was, before it was C."""
    numbers = uniforms(keys, 23)[:, 1:]
    height, width = sizes.T
    area = (height * width)[:, None] * (scale[0] + (scale[1] - scale[0]) * numbers[:, :10])
    low, high = np.log(ratio)
    aspect = np.exp(low + (high - low) * numbers[:, 10:20])
    w, h = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    fits = (w > 0) & (w <= width[:, None]) & (h > 0) & (h <= height[:, None])
    rows, first = np.arange(len(sizes)), fits.argmax(axis=1)
    found = fits[rows, first]
    w = np.where(found, w[rows, first], np.minimum(width, np.maximum(np.rint(height * ratio[1]), 1)))
    h = np.where(found, h[rows, first], np.minimum(height, np.maximum(np.rint(width / ratio[0]), 1)))
    top = np.where(found, numbers[:, -2] * (height - h + 1), (height - h) // 2)
    left = np.where(found, numbers[:, -1] * (width - w + 1), (width - w) // 2)
    return np.stack([top, left, h, w], axis=1).astype(np.int64)


@pytest.mark.parametrize("scale", [SCALE, [0.9, 1.0], [50.0, 50.0], [1e-9, 1e-9]])
@pytest.mark.parametrize("ratio", [RATIO, [1.0, 1.0], [1e-3, 1e3], [2.0, 3.0]])
def test_boxes_are_numpys_to_the_bit(scale, ratio):
    sides = np.random.default_rng(0).integers(1, [700, 20, 30_000], (2000, 3))
    for sizes in (sides[:, :2], sides[:, 1:], sides[:, ::2]):
        found = random_resized_boxes(keys(2000), sizes, scale, ratio)
        np.testing.assert_array_equal(found, boxes_by_numpy(keys(2000), sizes, scale, ratio))
        assert (found >= [0, 0, 1, 1]).all()
        assert (found[:, :2] + found[:, 2:] <= sizes).all()


def torchvision_boxes(size: tuple[int, int], count: int, scale: list[float], ratio: list[float]) -> np.ndarray:
    torch.manual_seed(0)
    image = torch.empty(1, *size)
    return np.array([RandomResizedCrop.get_params(image, scale, ratio) for _ in range(count)])


@pytest.mark.parametrize("size", [(10, 1000), (1000, 10), (51, 2), (31, 30)])
@pytest.mark.parametrize("ratio", [[1.0, 1.0], [0.5, 0.5], [1.1, 1.7], [0.9, 1.1]])
def test_the_fallback_is_torchvisions(size, ratio):
    never = [50.0, 50.0]  # fifty times the image's area
    np.testing.assert_array_equal(boxes(size, 1, never, ratio), torchvision_boxes(size, 1, never, ratio))


def test_every_position_is_reached():
    found = boxes((12, 12), 20_000, [0.4, 0.6], [1.0, 1.0])
    nines = found[found[:, 2] == 9]
    assert {tuple(box[:2]) for box in nines.tolist()} == {(top, left) for top in range(4) for left in range(4)}


def test_crops_are_what_they_always_were():
    """Changing these values changes everybody's crops: it needs a new major version."""
    augment = NativeAugment(native_config(), size=ImageSize.of(8), train=True)
    draws = augment.draw(keys(3), np.array([[400, 500], [300, 300], [50, 2000]]))
    assert draws.boxes.tolist() == [[49, 80, 257, 202], [3, 81, 92, 90], [0, 966, 50, 67]]
    assert draws.flips.tolist() == [False, True, False]


def test_flip_mirrors_left_to_right():
    size = np.array([[30, 40]])
    images = []
    for flip in (0.0, 1.0):
        augment = NativeAugment(flipping(flip), size=ImageSize.of(16), train=True)
        draws, out = augment.draw(keys(1), size), np.empty((16, 16, 3), np.uint8)
        augment.apply(photo(30, 40), draws, 0, out)
        images.append(out)
    np.testing.assert_array_equal(images[1], images[0][:, ::-1])
    augment = NativeAugment(flipping(0.1), size=ImageSize.of(16), train=True)
    assert abs(augment.draw(keys(10_000), np.full((10_000, 2), 50)).flips.mean() - 0.1) < 0.02
    assert (images[1] != images[0]).any()
