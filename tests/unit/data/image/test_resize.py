from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from images import photo
from PIL import Image
from torchvision.transforms.v2 import functional

from effloop.data.image import resize
from effloop.data.image.resize import FastResize, hflip, resize_into


def resized(region: np.ndarray, height: int, width: int) -> np.ndarray:
    batch = np.full((3, height, width, 3), 99, np.uint8)
    resize_into(region, batch[1])
    assert (batch[[0, 2]] == 99).all()  # the neighbours in the batch
    return batch[1]


def by_pillow(region: np.ndarray, height: int, width: int) -> np.ndarray:
    """The width first: Pillow 13 begins with the height of some images, and rounds 0.2 levels differently."""
    across = Image.fromarray(region).resize((width, len(region)), Image.Resampling.BILINEAR)
    return np.asarray(across.resize((width, height), Image.Resampling.BILINEAR)).astype(float)


def read_only() -> np.ndarray:
    region = photo(90, 70)
    region.flags.writeable = False
    return region


REGIONS = {
    "whole": photo(375, 500),
    "odd": photo(67, 53),
    "small": photo(5, 3),
    "one pixel": photo(1, 1),
    "long": photo(4, 700),
    "crop": photo(375, 500)[31:230, 47:390],
    "crop of one column": photo(50, 50)[:, 7:8],
    "read-only": read_only(),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [(64, 64), (224, 224), (33, 57), (1, 1)])
@pytest.mark.parametrize("name", REGIONS)
def test_as_pillow_and_torchvision_do_it(name: str, size: tuple[int, int]) -> None:
    region = REGIONS[name]
    got = resized(region, *size)
    assert np.abs(got - by_pillow(region, *size)).mean() <= 0.1
    tensor = torch.from_numpy(region.copy()).permute(2, 0, 1)
    torchvision = functional.resize(tensor, list(size), antialias=True).permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(got, torchvision)


def test_same_size_is_a_copy() -> None:
    np.testing.assert_array_equal(resized(photo(40, 30), 40, 30), photo(40, 30))


def test_the_region_is_left_alone() -> None:
    region = photo(50, 50)
    resized(region, 20, 20)
    np.testing.assert_array_equal(region, photo(50, 50))


@pytest.mark.parametrize("opencv", [True, False])
def test_mirror(opencv: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not opencv:
        monkeypatch.setattr(resize, "opencv", lambda: None)
    batch = np.random.default_rng(0).integers(0, 256, (3, 5, 7, 3), np.uint8)
    wanted = batch.copy()
    wanted[1] = wanted[1, :, ::-1]
    hflip(batch[1])
    np.testing.assert_array_equal(batch, wanted)


def test_mirroring_leaves_opencv_no_threads() -> None:
    """In a process of its own: here another part may have asked for the module."""
    code = (
        "import numpy, cv2; cv2.setNumThreads(3); from effloop.data.image.resize import hflip; "
        "hflip(numpy.zeros((9, 9, 3), numpy.uint8)); print(cv2.getNumThreads())"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "1"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize("size", [(64, 64), (224, 224), (33, 57), (1, 1)])
def test_fast(name: str, size: tuple[int, int]) -> None:
    region, batch = REGIONS[name], np.full((3, *size, 3), 99, np.uint8)
    pickle.loads(pickle.dumps(FastResize()))(region, batch[1])
    assert (batch[[0, 2]] == 99).all()
    exact = resized(region, *size)
    difference = np.abs(batch[1].astype(float) - exact).mean()
    enlarged = region.shape[0] <= size[0] and region.shape[1] <= size[1]
    far_shrunk = region.shape[0] > 2 * size[0] or region.shape[1] > 2 * size[1]
    assert difference <= (0.0 if far_shrunk else 0.3 if enlarged else 8)
