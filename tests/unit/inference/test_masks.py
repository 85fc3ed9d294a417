"""Masks at their images' own sizes."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from runs import composed

from effloop.batch import ImageSize
from effloop.data.augment import augments
from effloop.data.augment.base import Evaluation
from effloop.inference import predict
from effloop.inference.predict import Frame, file_names, mask_of, showing_all

SIZES = [ImageSize(48, 64), ImageSize(64, 48), ImageSize(31, 97), ImageSize(200, 150), ImageSize(1, 300)]


@pytest.mark.parametrize("image", SIZES, ids=str)
@pytest.mark.parametrize("how", ["letterbox", "squash", "crop"])
def test_a_frame_is_where_the_augmentation_puts_the_image(how, image):
    """A white image: what isn't a bar's grey, and how large it was made."""
    config = showing_all(composed(f"augment.eval={how}", "image_size=[60,80]"))
    augment = augments.build_for(3, config.augment, size=config.size, train=False)
    draws = augment.draw(np.zeros(1, np.uint64), np.array([image]))
    assert draws.boxes[0].tolist() == [0, 0, *image]  # all of it
    out = np.zeros((*config.size, 3), np.uint8)
    augment.apply(np.full((*image, 3), 255, np.uint8), draws, 0, out)
    rows, columns = np.nonzero(out[..., 0] == 255)
    frame = Frame.of(config.augment.eval, image, config.size)
    assert (rows.min(), rows.max() + 1) == (frame.top, frame.top + frame.height)
    assert (columns.min(), columns.max() + 1) == (frame.left, frame.left + frame.width)
    assert len(rows) == frame.height * frame.width


@pytest.mark.parametrize("image", SIZES, ids=str)
@pytest.mark.parametrize("how", list(Evaluation)[1:], ids=lambda how: how.value)
def test_rows_at_a_time_are_as_all_at_once(how, image, monkeypatch):
    size = ImageSize(24, 32)
    outputs = torch.randn(5, *size, generator=torch.Generator().manual_seed(0))
    frame = Frame.of(how, image, size)
    part = outputs[:, frame.top : frame.top + frame.height, frame.left : frame.left + frame.width]
    wanted = F.interpolate(part[None], tuple(image), mode="bilinear", align_corners=False)[0]
    monkeypatch.setattr(predict, "_AT_ONCE", 5 * 300 * 7)
    found = mask_of(outputs, frame, image)
    assert (found.dtype, found.shape) == (torch.uint8, tuple(image))
    best, second = wanted.topk(2, dim=0).values
    sure = best - second > 1e-5  # rounding may decide about the others
    assert sure.float().mean() > 0.999
    assert torch.equal(found[sure], wanted.argmax(dim=0)[sure].to(torch.uint8))


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        (["photos/a/1.jpg", "photos/b/1.jpg"], ["a/1.png", "b/1.png"]),
        (["photos/1.jpg"], ["1.png"]),
        (["1.jpg", "1.png", "1.png.jpg"], ["1.png", "1.png.png", "1.png.jpg.png"]),
        (["/x/y/1.jpg", "x/z/2"], ["y/1.png", "z/2.png"]),
        (["../../a/1.jpg", "/etc/passwd", "./..", "", "a\0b"], ["a/1.png", "etc/passwd.png", "_.png", "_.png.png"]),
        ([".hidden", "a.b/c"], [".hidden.png", "a.b/c.png"]),
    ],
)
def test_names_of_files(keys, wanted):
    """Below the folder that all images are in; never outside of it; all different."""
    found = file_names(keys, ".png")
    assert found[: len(wanted)] == wanted
    assert len({*found}) == len(keys)
    assert "\0" not in "".join(found)
