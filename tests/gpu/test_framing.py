"""Cutting, mirroring and resizing a batch on a CUDA device: as on the CPU, without waiting."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from images import photo
from torch import Tensor

from effloop.data.augment.operation import crop_and_flip_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

N, HEIGHT, WIDTH = 9, 61, 47
FLIPS = np.arange(N) % 2 == 0


@pytest.fixture
def images() -> Tensor:
    """(9, 3, 61, 47) uint8, channels_last."""
    return torch.from_numpy(np.stack([photo(HEIGHT, WIDTH, seed) for seed in range(N)])).permute(0, 3, 1, 2)


def on_the_device(images: Tensor, boxes: np.ndarray, flips: np.ndarray) -> Tensor:
    """`crop_and_flip_batch`, where it must not wait; brought back."""
    arrived = images.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = crop_and_flip_batch(arrived, boxes, flips)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert got.is_cuda
    assert got.is_contiguous(memory_format=torch.channels_last)
    return got.cpu()


def boxes(beyond: int, height: int, width: int, target: tuple[int, int]) -> np.ndarray:
    """(9, 6) as `crop_and_flip_batch` takes them, which reach up to `beyond` pixels out of the images."""
    room = [HEIGHT - height + 2 * beyond + 1, WIDTH - width + 2 * beyond + 1]
    corners = np.random.default_rng(0).integers(0, room, (N, 2)) - beyond
    return np.concatenate([corners, np.tile([height, width, *target], (N, 1))], axis=1)


@pytest.mark.parametrize("flips", [FLIPS, ~FLIPS, np.zeros(N, np.bool_)], ids=["even", "odd", "none"])
@pytest.mark.parametrize(("beyond", "size"), [(0, (32, 24)), (0, (HEIGHT, WIDTH)), (0, (1, 1)), (8, (40, 40))])
def test_cuts_and_mirrors_as_on_the_cpu(images: Tensor, beyond: int, size: tuple[int, int], flips: np.ndarray) -> None:
    where = boxes(beyond, *size, size)
    assert torch.equal(on_the_device(images, where, flips), crop_and_flip_batch(images, where, flips))


@pytest.mark.parametrize("size", [(32, 24), (HEIGHT, WIDTH), (7, 40), (9, 9)])
@pytest.mark.parametrize("target", [(16, 16), (64, 48), (24, 24)])
def test_resizes_within_a_level_as_in_a_batch(images: Tensor, size: tuple[int, int], target: tuple[int, int]) -> None:
    where = boxes(0, *size, target)
    got = on_the_device(images, where, FLIPS)
    assert (got.int() - crop_and_flip_batch(images, where, FLIPS).int()).abs().max() <= 1
    for row in range(N):
        only = slice(row, row + 1)
        assert torch.equal(on_the_device(images[only], where[only], FLIPS[only]), got[only])
