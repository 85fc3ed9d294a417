import ctypes
import mmap
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from images import photo
from PIL import Image
from torchvision.transforms.v2 import functional

from effloop.data.image.pixels import flip, resize_into, resized_by_vectors


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
def test_as_pillow_and_torchvision_do_it(name, size):
    region = REGIONS[name]
    got = resized(region, *size)
    assert np.abs(got - by_pillow(region, *size)).mean() <= 0.1
    np.testing.assert_array_equal(got, by_torch(region, *size))


def by_torch(region: np.ndarray, height: int, width: int, flip: bool = False) -> np.ndarray:
    tensor = torch.from_numpy(region.copy()).permute(2, 0, 1)
    resized = functional.resize(tensor, [height, width], antialias=True)
    return (resized.flip(2) if flip else resized).permute(1, 2, 0).numpy()


def guarded(pixels: np.ndarray) -> np.ndarray:
    """The same pixels, where a byte behind them can't be read: it would end the process."""
    pages = -(-pixels.size // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    flat = np.frombuffer(memory, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    behind = ctypes.c_void_p(flat.ctypes.data + pages * mmap.PAGESIZE)
    assert libc.mprotect(behind, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    end = pages * mmap.PAGESIZE
    found = flat[end - pixels.size : end].reshape(pixels.shape)
    found[...] = pixels
    return found


def random_region(rng: np.random.Generator, channels: int) -> tuple[np.ndarray, tuple[int, int]]:
    """A view of noise, which shows each tap's weight, and a size for it; shrunk to a quarter at most, mostly."""
    size = np.array([224, 224]) if rng.random() < 0.3 else rng.integers(1, 150, 2)
    height, width = np.clip(size * np.exp(rng.uniform(-1.5, 1.45, 2)), 1, 600).astype(int)
    top, left, rest = rng.integers(0, 9, 3)
    levels = 256 if rng.random() < 0.7 else 2
    image = rng.integers(0, levels, (top + height, left + width + rest, channels)) * (255 // (levels - 1))
    return guarded(image.astype(np.uint8))[top:, left : left + width], (int(size[0]), int(size[1]))


@pytest.mark.parametrize("channels", [1, 3])
def test_vectors_make_the_pixels_of_torch(channels):
    rng, taken = np.random.default_rng(channels), dict.fromkeys(range(3), 0)
    for number in range(80):
        region, size = random_region(rng, channels)
        flip = bool(number % 2)
        wanted = by_torch(region, *size, flip)
        for level in range(3):
            batch = np.full((3, *size, channels), 99, np.uint8)
            if resized_by_vectors(region, batch[1], flip, level):
                taken[level] += 1
                np.testing.assert_array_equal(batch[1], wanted)
            else:
                assert (batch[1] == 99).all()
            assert (batch[[0, 2]] == 99).all()
    assert all(count == 0 or count > 30 for count in taken.values()), taken


@pytest.mark.parametrize("out", [1, 2, 32, 224])
def test_every_width_and_height(out):
    """The weights of each size: 6 rows or columns, resized on one side; to 1 or 2 pixels they are the smallest."""
    rng = np.random.default_rng(out)
    for side in range(1, max(4 * out, 16), 7 if out == 224 else 1):
        for region, size in (((6, side, 3), (6, out)), ((side, 6, 3), (out, 6))):
            pixels = rng.integers(0, 256, region, np.uint8)
            np.testing.assert_array_equal(resized(pixels, *size), by_torch(pixels, *size))


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("flip", [False, True])
def test_channels_and_flips(channels, flip):
    for height, width in ((90, 120), (600, 900)):  # the second is shrunk to less than a quarter
        region = np.random.default_rng(0).integers(0, 256, (height, width, channels), np.uint8)
        out = np.empty((60, 64, channels), np.uint8)
        resize_into(region, out, flip)
        np.testing.assert_array_equal(out, by_torch(region, 60, 64, flip))


def test_many_threads():
    rng = np.random.default_rng(0)
    regions = [rng.integers(0, 256, (*size, 3), np.uint8) for size in rng.integers(20, 90, (40, 2))]
    wanted = [resized(region, 48, 40) for region in regions]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            for one, other in zip(wanted, pool.map(lambda region: resized(region, 48, 40), regions), strict=True):
                np.testing.assert_array_equal(one, other)


def refused() -> dict[str, tuple[object, object]]:
    region, out = np.zeros((20, 30, 3), np.uint8), np.zeros((12, 14, 3), np.uint8)
    shared = np.zeros(9000, np.uint8)
    return {
        "list": ([[[1, 2, 3]]], out),
        "tensor": (torch.zeros(20, 30, 3, dtype=torch.uint8), out),
        "None": (region, None),
        "dtype": (region.astype(np.uint16), out),
        "dtype of the output": (region, out.astype(np.int8)),
        "two dimensions": (region[:, :, 0], out),
        "four dimensions": (region[None], out[None]),
        "no dimension": (np.zeros((), np.uint8), out),
        "channels": (region[:, :, :1], out),
        "channels apart": (np.zeros((20, 30, 4), np.uint8)[:, :, :3], out),
        "channels first": (np.zeros((3, 20, 30), np.uint8).transpose(1, 2, 0), out),
        "columns apart": (region[:, ::2], out),
        "upside down": (region[::-1], out),
        "mirrored": (region[:, ::-1], out),
        "the same row": (np.broadcast_to(region[:1], region.shape), out),
        "output with a stride": (region, np.zeros((12, 20, 3), np.uint8)[:, :14]),
        "no row": (region[:0], out),
        "no column": (region[:, :0], out),
        "no output": (region, out[:0]),
        "too wide": (np.zeros((1, 70_000, 3), np.uint8), out),
        "too wide an output": (region, np.zeros((1, 70_000, 3), np.uint8)),
        "shrunk to less than a quarter": (np.zeros((20, 99, 3), np.uint8), out),
        "shared memory": (shared[:1800].reshape(20, 30, 3), shared[1700:2204].reshape(12, 14, 3)),
    }


@pytest.mark.parametrize("name", refused())
def test_what_vectors_leave_to_others(name):
    region, out = refused()[name]
    for level in range(3):
        assert not resized_by_vectors(region, out, False, level)  # type: ignore[arg-type]
    assert out is None or not np.asarray(out).any()


def test_mirror():
    batch = np.random.default_rng(0).integers(0, 256, (3, 5, 7, 3), np.uint8)
    wanted = batch.copy()
    wanted[1] = wanted[1, :, ::-1]
    flip(batch[1])
    np.testing.assert_array_equal(batch, wanted)


@pytest.mark.slow
def test_mirroring_leaves_opencv_no_threads():
    """In a process of its own: here another part may have asked for the module."""
    code = (
        "import numpy, cv2; cv2.setNumThreads(3); from effloop.data.image.pixels import flip; "
        "flip(numpy.zeros((9, 9, 3), numpy.uint8)); print(cv2.getNumThreads())"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "1"


def test_a_read_only_output_is_refused():
    out = np.zeros((8, 8, 3), np.uint8)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        resize_into(photo(20, 20), out)
    assert not out.any()
