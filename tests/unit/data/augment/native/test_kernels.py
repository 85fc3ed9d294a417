"""Both the kernels for batches and those for one image, against torchvision's functions on one image."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as F
from images import photo
from torch import Tensor

from effloop.data.augment.native import host, kernels

FACTORS = [0.0, 0.3, 1.0, 1.37, 2.5]
WANTED: dict[str, tuple[Callable[..., Tensor], list[Any]]] = {
    "brightness": (F.adjust_brightness, FACTORS),
    "contrast": (F.adjust_contrast, FACTORS),
    "saturation": (F.adjust_saturation, FACTORS),
    "sharpness": (F.adjust_sharpness, FACTORS),
    "hue": (F.adjust_hue, [-0.5, -0.21, 0.0, 0.33, 0.5]),
    "posterize": (F.posterize, [0, 1, 5, 7, 8]),
    "solarize": (F.solarize, [0.0, 0.5, 100.0, 127.3, 255.0]),
    "autocontrast": (F.autocontrast, []),
    "equalize": (F.equalize, []),
    "grayscale": (lambda image: F.rgb_to_grayscale(image, 3), []),
    "invert": (F.invert, []),
}
SIZES = [(64, 64), (67, 53), (5, 8), (3, 3), (2, 9), (1, 1)]


def images(size: tuple[int, int]) -> np.ndarray:
    """(5, H, W, 3): noise; a photo; one of few values; grey noise; one with two channels of one value each."""
    noise = np.random.default_rng(0).integers(0, 256, (3, *size, 3), np.uint8)
    noise[1] = noise[1, :, :, :1]
    noise[2, :, :, :2] = 7, 255
    return np.stack([noise[0], photo(*size), photo(*size) // 3 + 40, noise[1], noise[2]])


def batched(pixels: np.ndarray) -> Tensor:
    return torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2)


def torchvisions(name: str, pixels: np.ndarray, values: list[Any]) -> np.ndarray:
    function, _ = WANTED[name]
    rows = [[value] for value in values] or [[]] * len(pixels)
    found = [function(image, *row) for image, row in zip(batched(pixels).contiguous(), rows, strict=True)]
    return torch.stack(found).permute(0, 2, 3, 1).numpy()


BLENDS = ("contrast", "saturation", "sharpness")


def arguments(name: str, values: list[Any], device: str = "cpu") -> list[Tensor]:
    """(N,) each: the values, and of a blend also what is left."""
    both = [torch.tensor(values), (1 - torch.tensor(values, dtype=torch.float64)).float()]
    return [each.to(device) for each in both[: 1 + (name in BLENDS)]] if values else []


def by_batch(name: str, pixels: np.ndarray, values: list[Any]) -> np.ndarray:
    given = arguments(name, values)
    out = getattr(kernels, name)(batched(pixels), *given)
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert out.dtype == torch.uint8
    return out.permute(0, 2, 3, 1).numpy()


def by_one(name: str, pixels: np.ndarray, values: list[Any]) -> np.ndarray:
    out = pixels.copy()
    for row, image in enumerate(out):
        getattr(host, name)(image, *rests(name, values[row : row + 1]))
    return out


def rests(name: str, values: list[Any]) -> list[Any]:
    return [*values, *(1 - value for value in values if name in BLENDS)]


@pytest.fixture(params=[by_batch, by_one])
def way(request: pytest.FixtureRequest) -> Callable[..., np.ndarray]:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", WANTED)
@pytest.mark.parametrize("size", SIZES)
def test_the_pixels_are_torchvisions(name, size, way):
    pixels = images(size)
    for turn in range(len(pixels)):  # each value meets each image
        values = WANTED[name][1][turn:] + WANTED[name][1][:turn]
        got, wanted = way(name, pixels, values), torchvisions(name, pixels, values)
        if name == "hue":
            difference = np.abs(got.astype(int) - wanted)
            assert difference.max() <= 1
            assert np.count_nonzero(difference) <= 1 + 5e-5 * difference.size
        else:
            np.testing.assert_array_equal(got, wanted)


def test_hue_of_every_kind():
    """Every sixteenth level of each channel, with every neighbour of black and white."""
    levels = np.r_[0:256:15, 1, 254].astype(np.uint8)
    pixels = np.stack(np.meshgrid(levels, levels, levels), -1).reshape(1, 80, -1, 3)
    for shift in np.linspace(-0.5, 0.5, 21):
        difference = np.abs(by_batch("hue", pixels, [shift]).astype(int) - torchvisions("hue", pixels, [shift]))
        assert difference.max() <= 1
        assert (difference > 0).mean() < 2e-3


def test_luma_of_every_colour():
    """(2989 r + 5870 g + 1140 b) / 10000, cut off; what rounds elsewhere is 20 of 16.7 million colours at most."""
    green, blue = np.meshgrid(np.arange(256), np.arange(256))
    wrong = 0
    for red in range(0, 256, 5):
        image = np.stack([np.full_like(green, red), green, blue], -1).astype(np.uint8)
        wanted = (2989 * red + 5870 * green + 1140 * blue) // 10000
        host.grayscale(image)
        wrong += np.count_nonzero(image[..., 0] != wanted)
    assert wrong <= 5


@pytest.mark.parametrize("name", WANTED)
def test_nothing_waits_for_the_device(name):
    """A tensor on `meta` has no values to be read."""
    batch = batched(images((9, 7))).to("meta")
    given = arguments(name, WANTED[name][1], "meta")
    assert getattr(kernels, name)(batch, *given).shape == batch.shape


@pytest.mark.parametrize("chosen", [[1, 3, 4], [0, 1, 2, 3, 4]])
def test_on_rows(chosen):
    pixels, rows, factors = images((6, 7)), torch.tensor(chosen), torch.linspace(0.2, 1.5, len(chosen))
    wanted = pixels.copy()
    wanted[chosen] = by_batch("contrast", pixels[chosen], factors.tolist())
    got = kernels.on_rows(batched(pixels), rows, kernels.contrast, factors, 1 - factors)
    np.testing.assert_array_equal(got.permute(0, 2, 3, 1), wanted)
    assert got.is_contiguous(memory_format=torch.channels_last)


def test_neighbours_in_memory_stay():
    """An image in a batch is written in place, and no other."""
    for name, (_, values) in WANTED.items():
        pixels = images((9, 11))
        getattr(host, name)(pixels[1], *rests(name, values[1:2]))
        np.testing.assert_array_equal(np.delete(pixels, 1, 0), np.delete(images((9, 11)), 1, 0), err_msg=name)
