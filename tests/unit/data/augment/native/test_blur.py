from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms.v2 as T
import torchvision.transforms.v2.functional as F
from images import photo
from laws import assert_same_law, drawn

from effloop.data.augment.native import blur
from effloop.data.augment.native.blur import GaussianBlur
from effloop.data.augment.operation import BadParameterError


@pytest.mark.parametrize("size", [(64, 48), (37, 51), (13, 12)])
@pytest.mark.parametrize("kernel", [1, 3, 9, 23, [5, 3]])
@pytest.mark.parametrize("way", ["batch", "one", "one without OpenCV"])
def test_the_pixels_are_torchvisions(
    size: tuple[int, int], kernel: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "one without OpenCV":
        monkeypatch.setattr(blur, "opencv", lambda: None)
    noise = np.random.default_rng(0).integers(0, 256, (4, *size, 3), np.uint8)
    pixels = np.concatenate([noise, np.stack([photo(*size, row) for row in range(4)])])
    operation = GaussianBlur(kernel, [0.1, 3.0])
    found, tensors = drawn(operation, len(pixels), size), torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2)
    both = kernel if isinstance(kernel, list) else [kernel, kernel]
    sigmas = zip(tensors.contiguous(), found.sigma.tolist(), strict=True)
    wanted = torch.stack([F.gaussian_blur(image, both, [sigma, sigma]) for image, sigma in sigmas])
    if way == "batch":
        tensors = operation.apply_batch(tensors, found)
        assert tensors.is_contiguous(memory_format=torch.channels_last)
        assert tensors.dtype == torch.uint8
    else:
        for row in range(len(pixels)):
            operation.apply_inplace(pixels[row], found, row)
        tensors = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    difference = (tensors.int() - wanted.int()).abs()
    assert difference.max() <= 1
    assert int((difference > 0).sum()) <= 1 + 1e-4 * difference.numel()


def test_sigma_follows_torchvisions_law() -> None:
    torch.manual_seed(0)
    transform = T.GaussianBlur(5, (0.3, 1.7))
    wanted = [transform.make_params([])["sigma"][0] for _ in range(10_000)]
    assert_same_law(drawn(GaussianBlur(5, [0.3, 1.7])).sigma, wanted)
    assert (drawn(GaussianBlur(5, 0.8)).sigma == np.float32(0.8)).all()


@pytest.mark.parametrize("kernel", [1, 3, 23])
def test_the_narrowest_is_the_image_and_the_widest_a_mean(kernel: int) -> None:
    pixels = photo(64, 48)[None]
    tensors = torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2)
    operation = GaussianBlur(kernel, 1e-3)
    assert torch.equal(operation.apply_batch(tensors, drawn(operation, 1)), tensors)
    assert np.ptp(drawn(GaussianBlur(kernel, 1e4), 1).across) < 1e-6


def test_images_may_be_as_small_as_the_kernel_reaches() -> None:
    assert GaussianBlur(7).out_sizes(np.array([[4, 4], [9, 5]])).tolist() == [[4, 4], [9, 5]]
    with pytest.raises(BadParameterError, match=r"^kernel_size: \[7, 7\] is not allowed where images are 4x3; set at"):
        GaussianBlur(7).out_sizes(np.array([[4, 4], [9, 3]]))


@pytest.mark.parametrize(
    ("given", "start"),
    [
        ({"kernel_size": 4}, "kernel_size: 4 is not allowed; set an odd number"),
        ({"kernel_size": [3, 5, 7]}, "kernel_size: [3, 5, 7] is not"),
        ({"kernel_size": -1}, "kernel_size: -1 is not"),
        ({"kernel_size": 3.5}, "kernel_size: 3.5 is not"),
        ({"kernel_size": "large"}, "kernel_size: large is not"),
        ({"kernel_size": 3, "sigma": 0}, "sigma: "),
        ({"kernel_size": 3, "sigma": [2, 1]}, "sigma: [2, 1] is not"),
        (
            {"kernel_size": 3, "sigma": 1e-300},
            "sigma: [1e-300, 1e-300] is not allowed; set [smallest, largest], at least 0.001 and",
        ),
        ({"kernel_size": 3, "sigma": [1, 1e5]}, "sigma: [1, 100000.0] is not"),
    ],
)
def test_bad_parameters(given: dict[str, Any], start: str) -> None:
    with pytest.raises(BadParameterError) as error:
        GaussianBlur(**given)
    assert str(error.value).startswith(start)
