"""What evaluation makes of an image: its centre, all of it between bars, or all of it stretched; against Pillow."""

import numpy as np
import pytest
from images import photo
from PIL import Image
from plans import native_config

from effloop.batch import ImageSize
from effloop.data.augment.base import Evaluation
from effloop.data.augment.native.augment import NativeAugment
from effloop.data.augment.native.crops import PADDING, shaped_boxes

SIZE = ImageSize(24, 40)
SHAPES = [(50, 80), (81, 50), (60, 100), (99, 41), (12, 20), (1, 300), (7, 3)]


def evaluated(pixels: np.ndarray, evaluation: Evaluation) -> np.ndarray:
    augment = NativeAugment(native_config(eval=evaluation, eval_ratio=1.0), size=SIZE, train=False)
    draws = augment.draw(np.zeros(1, np.uint64), np.array([pixels.shape[:2]]))
    top, left, height, width = draws.boxes[0]
    out = np.empty((*SIZE, 3), np.uint8)
    augment.apply(pixels[top : top + height, left : left + width], draws, 0, out)
    return out


def assert_near(got: np.ndarray, wanted: Image.Image) -> None:
    difference = np.abs(got.astype(int) - np.asarray(wanted).astype(int))
    assert difference.max() <= 1


@pytest.mark.parametrize("shape", SHAPES)
def test_squash_is_pillows_resize(shape):
    pixels = photo(*shape)
    wanted = Image.fromarray(pixels).resize(SIZE[::-1], Image.Resampling.BILINEAR)
    assert_near(evaluated(pixels, Evaluation.squash), wanted)


@pytest.mark.parametrize("shape", SHAPES)
def test_letterbox_is_all_of_the_image_in_the_centre(shape):
    pixels, (height, width) = photo(*shape), shape
    scale = min(SIZE.height / height, SIZE.width / width)
    rows, columns = max(1, round(height * scale)), max(1, round(width * scale))
    assert rows == SIZE.height or columns == SIZE.width
    wanted = Image.new("RGB", SIZE[::-1], (PADDING,) * 3)
    inside = Image.fromarray(pixels).resize((columns, rows), Image.Resampling.BILINEAR)
    wanted.paste(inside, ((SIZE.width - columns) // 2, (SIZE.height - rows) // 2))
    assert_near(evaluated(pixels, Evaluation.letterbox), wanted)


@pytest.mark.parametrize(
    ("image", "size", "share", "box"),
    [
        ((100, 100), (24, 40), 1.0, [20, 0, 60, 100]),
        ((50, 200), (24, 40), 1.0, [0, 58, 50, 83]),
        ((50, 200), (24, 40), 0.5, [12, 79, 25, 42]),
        ((300, 100), (40, 24), 1.0, [66, 0, 167, 100]),
        ((7, 9), (224, 320), 0.1, [3, 4, 1, 1]),
        ((100, 200), (8, 8), 1.0, [0, 50, 100, 100]),
        ((101, 100), (8, 8), 0.875, [6, 6, 88, 88]),
    ],
)
def test_boxes_have_the_shape_of_the_output(image, size, share, box):
    assert shaped_boxes(np.array([image]), size, share).tolist() == [box]
