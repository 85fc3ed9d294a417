from typing import Any

import numpy as np
import pytest
import torch
from images import photo
from laws import assert_same_law, keys, pictures
from laws import drawn as drawn_by
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from effloop.data.augment.native import affine
from effloop.data.augment.native.affine import RandomAffine, RandomRotation, Sampling, inverse_matrices, warp, warp_one
from effloop.data.random import uniforms

SIZES = [(64, 64), (67, 53), (54, 67), (33, 33)]
SAMPLINGS = [("nearest", None), ("nearest", [10, 20.5, 255]), ("bilinear", None), ("bilinear", 0), ("bilinear", 77)]
# Where a coordinate lies on a pixel's edge, its last bit decides, and torchvision's is its matrix product's: none
# differs on the machine this was written on, but a product that rounds once for two operations may choose the other.
TIES = 0.02
ELSEWHERE = 0.001


def alone(image: Tensor, matrix: NDArray[np.float32], sampling: Sampling) -> Tensor:
    pixels = image.permute(1, 2, 0).numpy().copy()
    warp_one(pixels, matrix, sampling)
    return torch.from_numpy(pixels).permute(2, 0, 1)


def differing(left: Tensor, right: Tensor) -> float:
    return float((left != right).any(0).float().mean())


def assert_torchvisions(images: Tensor, matrices: NDArray[np.float32], expected: list[Tensor], how: Any) -> None:
    """`warp` gives what torchvision gives, and `warp_one` the same to the bit."""
    sampling = Sampling.of(*how)
    got = warp(images, matrices, sampling)
    assert got.is_contiguous(memory_format=torch.channels_last)
    for row, image in enumerate(got):
        if sampling.bilinear:
            assert (image.int() - expected[row].int()).abs().max() <= 1
        else:
            assert differing(image, expected[row]) <= ELSEWHERE
        assert torch.equal(alone(images[row], matrices[row], sampling), image)


@pytest.mark.parametrize("how", SAMPLINGS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_an_affine_is_torchvisions(size, how):
    numbers, count = np.random.default_rng(1), 8
    images = pictures(count, *size)
    angle, scale = numbers.uniform(-180, 180, count), numbers.uniform(0.5, 2, count)
    translate, shear = numbers.integers(-20, 21, (count, 2)).astype(float), numbers.uniform(-40, 40, (count, 2))
    centre = numbers.uniform(0, 50, (count, 2))
    middle = np.array([size[1], size[0]]) * 0.5
    interpolation = v2.InterpolationMode(how[0])
    expected = [
        F.affine(
            images[row],
            angle[row],
            translate[row].tolist(),
            scale[row],
            shear[row].tolist(),
            interpolation,
            how[1],
            centre[row].tolist(),
        )
        for row in range(count)
    ]
    assert_torchvisions(images, inverse_matrices(angle, translate, scale, shear, centre - middle), expected, how)


@pytest.mark.parametrize("how", SAMPLINGS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_rotation_is_torchvisions(size, how):
    # torchvision turns 180 degrees, and a square by 90, without sampling.
    square = [0.0, 90.0, -90.0, 270.0] if size[0] == size[1] else []
    angles = np.array([4.5, -30.0, 133.7, 180.0, -180.0, *square])
    images = pictures(len(angles), *size)
    interpolation = v2.InterpolationMode(how[0])
    expected = [F.rotate(image, angle, interpolation, fill=how[1]) for image, angle in zip(images, angles, strict=True)]
    assert_torchvisions(images, inverse_matrices(angle=-(angles % 360)), expected, how)


def test_a_shear_whose_coordinates_lie_on_pixels_edges_is_torchvisions():
    (image,), shear = pictures(1, 64, 64), [float(np.degrees(np.arctan(0.04))), 0.0]
    expected = F.affine(image, 0.0, [0, 0], 1.0, shear, center=[0.0, 0.0])
    matrices = inverse_matrices(shear=np.array([shear]), centre=np.array([[-32.0, -32.0]]))
    (got,) = warp(image[None], matrices, Sampling())
    assert torch.equal(alone(image, matrices[0], Sampling()), got)
    assert differing(got, expected) <= TIES
    assert differing(got, image) > 0.5


def test_a_batch_larger_than_what_is_done_at_once_is_the_same(monkeypatch):
    images, matrices = pictures(7, 40, 30), inverse_matrices(np.linspace(-50.0, 70.0, 7))
    for how in SAMPLINGS:
        whole = warp(images, matrices, Sampling.of(*how))
        with monkeypatch.context() as patch:
            patch.setattr(affine, "_ON_CPU", 3 * 40 * 30)
            assert torch.equal(warp(images, matrices, Sampling.of(*how)), whole)


def test_a_rotation_turns_by_what_it_drew_and_each_row_by_its_own_key():
    rotation, images = RandomRotation([-50, 20], "bilinear", 5), pictures(6, 64, 48)
    angles = -50 + 70 * uniforms(keys(6), 1)[:, 0]
    drawn = drawn_by(rotation, 6, (64, 48))
    batch = rotation.apply_batch(images.clone(memory_format=torch.channels_last), drawn)
    for row, image in enumerate(images):
        expected = F.rotate(image, angles[row], v2.InterpolationMode.BILINEAR, fill=5)
        assert (expected.int() - batch[row].int()).abs().max() <= 1
        own = rotation.draw(keys(6)[row : row + 1], np.array([[64, 48]]))
        pixels = image.permute(1, 2, 0).numpy().copy()
        rotation.apply_inplace(pixels, own, 0)
        assert torch.equal(torch.from_numpy(pixels).permute(2, 0, 1), batch[row])


@pytest.mark.parametrize(
    "options",
    [
        {"degrees": 30},
        {"degrees": [10, 90], "scale": [0.5, 2.0]},
        {"degrees": 0, "translate": [0.1, 0.4], "shear": 20},
        {"degrees": 5, "shear": [-30, 10]},
        {"degrees": 5, "translate": [0.3, 0], "scale": [0.9, 1.1], "shear": [-30, 10, 0, 5]},
    ],
    ids=str,
)
@pytest.mark.nightly
def test_an_affines_matrices_are_distributed_as_torchvisions(options):
    count, (height, width) = 10_000, (60, 40)
    torch.manual_seed(0)
    theirs, image = v2.RandomAffine(**options), torch.empty(3, height, width)
    made = [theirs.make_params([image]) for _ in range(count)]
    expected = inverse_matrices(
        *(np.array([params[name] for params in made], float) for name in ("angle", "translate", "scale", "shear"))
    )
    got = drawn_by(RandomAffine(**options), count, (height, width))
    for ours, others in zip(got.reshape(-1, 6).T, expected.reshape(-1, 6).T, strict=True):
        if not np.allclose(np.sort(ours), np.sort(others), atol=1e-6):
            assert_same_law(ours, others)


@pytest.mark.parametrize("how", ["nearest", "bilinear"])
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_the_largest_and_smallest_scale(scale, how):
    affine, pixels = RandomAffine(0, scale=[scale, scale], interpolation=how), photo(64, 48)
    found = affine.draw(keys(1), np.array([[64, 48]]))
    batch = affine.apply_batch(torch.from_numpy(pixels.copy())[None].permute(0, 3, 1, 2), found)
    affine.apply_inplace(pixels, found, 0)
    np.testing.assert_array_equal(batch[0].permute(1, 2, 0), pixels)
    assert (pixels == 0).all() == (scale < 1)  # smaller than a pixel; or four pixels, and no black
