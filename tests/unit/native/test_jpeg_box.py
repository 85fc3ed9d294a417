"""EffLoop's own JPEG decoder: the files that it takes, and that its pixels are libjpeg-turbo's on any processor."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import simplejpeg
from jpegs import KINDS, Box, boxes, by_opencv, by_pillow, decode_part, picture
from numpy.typing import NDArray

from effloop.data.image import jpeg as module
from effloop.data.image.jpeg import build_index, with_interval_lengths

MARKED = {  # restart markers at intervals that divide a row of 272 pixels
    "4:4:4": lambda pixels: by_opencv(pixels, "4:4:4", rst_interval=2),
    "4:2:2": lambda pixels: by_opencv(pixels, "4:2:2", rst_interval=17),
    "4:2:0": lambda pixels: with_interval_lengths(by_opencv(pixels, "4:2:0", rst_interval=1)),
    "4:4:0": lambda pixels: by_opencv(pixels, "4:4:0", rst_interval=34),
    "grey": by_pillow(mode="L", restart_marker_blocks=17),
}
LEFT = ("4:1:1", "RGB")  # kinds that it leaves to libjpeg-turbo


@pytest.fixture(autouse=True)
def small_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose indexes take more than their share."""
    monkeypatch.setattr(module, "_SHARE", 2.0)


def scaled(data: bytes, factor: int) -> NDArray[np.uint8]:
    """The whole image at 1 / factor, by libjpeg-turbo."""
    height, width = simplejpeg.decode_jpeg_header(data)[:2]
    least = {"min_height": -(-height // factor), "min_width": -(-width // factor), "min_factor": factor}
    return simplejpeg.decode_jpeg(data, "RGB", **(least if factor > 1 else {}))


def check(data: bytes, index: bytes | None, count: int, rng: np.random.Generator) -> None:
    """Decode boxes at all scales."""
    for factor in (1, 2, 4, 8):
        whole = scaled(data, factor)
        for box in boxes(*whole.shape[:2], count, rng):
            top, left, height, width = box
            found = decode_part(data, index, box, factor=factor)
            np.testing.assert_array_equal(found, whole[top : top + height, left : left + width], f"{box} {factor}")


@pytest.mark.parametrize("kind", KINDS)
def test_with_an_index_and_without(kind):
    rng = np.random.default_rng(3)
    for size in ((131, 272), (40, 53), (24, 17)):
        data = KINDS[kind](picture(*size, rng))
        for index in (build_index(data), None):
            if kind in LEFT:
                assert decode_part(data, index, (0, 0, 9, 9)) is None
            else:
                check(data, index, 6, rng)


@pytest.mark.parametrize("kind", MARKED)
def test_by_restart_markers(kind):
    check(MARKED[kind](picture(150, 272, np.random.default_rng(1))), None, 20, np.random.default_rng(2))


def test_markers_that_do_not_divide_a_row_are_left_to_libjpeg():
    data = by_opencv(picture(150, 272, np.random.default_rng(1)), rst_interval=4)
    assert decode_part(data, None, (0, 0, 9, 9)) is None


def test_a_damaged_index_is_ignored():
    data, box = by_opencv(picture(150, 272, np.random.default_rng(1))), (9, 20, 60, 70)
    found = bytearray(build_index(data) or b"")
    found[40] ^= 1
    np.testing.assert_array_equal(decode_part(data, bytes(found), box), scaled(data, 1)[9:69, 20:90])


def test_only_damage_down_to_a_box_is_found():
    data = by_opencv(picture(150, 272, np.random.default_rng(1)))
    damaged = data[:-300] + bytes(298) + data[-2:]
    np.testing.assert_array_equal(decode_part(damaged, None, (0, 0, 50, 99)), scaled(data, 1)[:50, :99])
    assert decode_part(damaged, None, (0, 0, 150, 99)) is None
    assert decode_part(data[:-9] + data[-2:], None, (100, 0, 50, 99)) is None


def _cases() -> Iterator[tuple[bytes, bytes | None, Box, int, int]]:
    """JPEG, index, box, factor, channels."""
    rng = np.random.default_rng(4)
    for make in (*KINDS.values(), *MARKED.values()):
        data = make(picture(150, 272, rng))
        for number, box in enumerate(boxes(18, 34, 9, rng)):
            yield data, build_index(data) if number % 2 else None, box, (1, 8, 2, 4)[number % 4], 1 + number % 2 * 2


def _digest() -> str:
    found = [decode_part(data, index, box, channels, factor) for data, index, box, factor, channels in _cases()]
    return hashlib.sha256(b"".join(b"" if each is None else each.tobytes() for each in found)).hexdigest()


@pytest.mark.parametrize("most", ["plain", "avx2"])
def test_the_same_pixels_from_every_processor(most, monkeypatch):
    monkeypatch.setattr(module, "_SHARE", 0.03)  # as in the other process
    script = "import test_jpeg_box; print(test_jpeg_box._digest())"
    folders = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = os.environ | {"EFFLOOP_CPU": most, "PYTHONPATH": folders}
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert found.stdout.strip() == _digest()
