import numpy as np
import pytest
import torch
from images import photo
from torchvision.transforms.v2 import functional as v2

from effloop.data.augment import operation as framing

N, HEIGHT, WIDTH = 5, 61, 47


@pytest.fixture
def images() -> torch.Tensor:
    """(5, 3, 61, 47) uint8, channels_last."""
    batch = np.stack([photo(HEIGHT, WIDTH, seed=number) for number in range(N)])
    return torch.from_numpy(batch).permute(0, 3, 1, 2)


def boxes(height: int, width: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    corners = rng.integers(0, [HEIGHT - height + 1, WIDTH - width + 1], (N, 2))
    return np.concatenate([corners, np.tile([height, width], (N, 1))], axis=1)


def with_target(boxes: np.ndarray, height: int, width: int) -> np.ndarray:
    return np.concatenate([boxes, np.tile([height, width], (N, 1))], axis=1)


FLIPS = np.array([True, False, False, True, True])


@pytest.mark.parametrize("size", [(32, 24), (61, 47), (1, 1)])
def test_crops_and_flips(images, size):
    where = boxes(*size)
    got = framing.crop_and_flip_batch(images, with_target(where, *size), FLIPS)
    assert got.is_contiguous(memory_format=torch.channels_last)
    for image, (top, left, height, width), flip, one in zip(images, where.tolist(), FLIPS, got, strict=True):
        wanted = image[:, top : top + height, left : left + width]
        assert torch.equal(one, wanted.flip(2) if flip else wanted)


def test_beyond_the_image_it_is_black(images):
    corners = [[-4, -3], [50, 40], [0, 0], [-2, 30], [20, -19]]
    where = with_target(np.array([[*corner, 20, 20] for corner in corners]), 20, 20)
    got = framing.crop_and_flip_batch(images, where, np.zeros(N, np.bool_))
    for image, box, one in zip(images, where.tolist(), got, strict=True):
        padded = v2.pad(image, [25, 25, 25, 25])
        assert torch.equal(one, v2.crop(padded, box[0] + 25, box[1] + 25, 20, 20))
        canvas = np.full((20, 20, 3), 99, np.uint8)
        sizes = np.array([[HEIGHT, WIDTH]])
        top, left, height, width = framing.clip_boxes(np.array([box[:4]]), sizes)[0]
        region = image.permute(1, 2, 0).numpy()[top : top + height, left : left + width]
        framing.write_crop(region, box, canvas)
        np.testing.assert_array_equal(canvas, one.permute(1, 2, 0))


@pytest.mark.parametrize("size", [(32, 24), (61, 47), (7, 40)])
@pytest.mark.parametrize("target", [(16, 16), (64, 48)])
def test_resized_is_torchvisions(images, size, target):
    where = boxes(*size)
    got = framing.crop_and_flip_batch(images, with_target(where, *target), FLIPS)
    assert got.is_contiguous(memory_format=torch.channels_last)
    for image, box, flip, one in zip(images, where.tolist(), FLIPS, got, strict=True):
        wanted = v2.resized_crop(image, *box, list(target), antialias=True)
        assert torch.equal(one, wanted.flip(2) if flip else wanted)
        top, left, height, width = box
        as_on_a_gpu = torch.empty((*target, 3), dtype=torch.uint8)
        framing.resize_on_gpu(image[:, top : top + height, left : left + width], as_on_a_gpu)
        assert (as_on_a_gpu.permute(2, 0, 1).int() - wanted.int()).abs().max() <= 1
