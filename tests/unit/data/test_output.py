"""Images that are normalised in the batch's own memory: as torch normalises them, to the bit."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from plans import make_plan, native_config, open_source, pairwise

from effloop.batch import ImageSize
from effloop.data.augment import Augment
from effloop.data.augment.base import Device
from effloop.data.augment.native.augment import NativeAugment
from effloop.data.output import NormalizedOutput, Output, normalized_like
from effloop.data.transfer import Transfer
from effloop.native import library

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
CPU = torch.device("cpu")


def make_transfer(channels: int = 3, *, channels_last: bool = True, augment: Augment | None = None) -> Transfer:
    return Transfer(CPU, MEAN[:channels], STD[:channels], channels_last=channels_last, augment=augment)


def finished(output: Output, pixels: np.ndarray, start: int, stop: int) -> torch.Tensor:
    """Images of a batch that had been 7 all over, whose rows `start` to `stop` are now of these pixels."""
    count, height, width, channels = pixels.shape
    memory = torch.full((count, height, width, channels * output.dtype.itemsize), 7, dtype=torch.uint8)
    images = output.images(memory)
    output.pixels(images)[start:stop] = pixels[start:stop]
    output.finish(images, start, stop)
    return images


@pytest.mark.parametrize(
    ("size", "channels", "channels_last"), pairwise([(1, 1), (1, 2), (8, 24), (33, 7), (64, 63)], [1, 3], [True, False])
)
def test_as_torch_to_the_bit(size, channels, channels_last):
    transfer = make_transfer(channels, channels_last=channels_last)
    output = transfer.host_output()
    assert isinstance(output, NormalizedOutput)
    pixels = np.random.default_rng(0).integers(0, 256, (4, *size, channels), np.uint8)
    got = finished(output, pixels, 1, 3)
    wanted = transfer.normalize(torch.from_numpy(pixels).permute(0, 3, 1, 2))
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    assert got.is_contiguous(memory_format=transfer.memory_format)
    assert torch.equal(got[1:3], wanted[1:3])
    assert (got[[0, 3]].view(torch.int32) == 0x07070707).all()  # the other rows are as they were
    assert transfer.normalize(got) is got


@pytest.mark.parametrize(("fused", "channels", "channels_last"), pairwise([True, False], [1, 2, 3, 4], [True, False]))
def test_rounding(fused, channels, channels_last):
    """Each level of each channel, by numbers that round differently once and twice."""
    generator = np.random.default_rng(1)
    scale, offset = generator.uniform(0.001, 0.02, channels), generator.uniform(-3, 3, channels)
    scale, offset = scale.astype(np.float32), offset.astype(np.float32)
    output = NormalizedOutput(tuple(scale.tolist()), tuple(offset.tolist()), channels_last, fused)
    pixels = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(channels, 3)
    got = finished(output, pixels, 0, 1).permute(0, 2, 3, 1).numpy()
    once = (pixels.astype(np.float64) * scale + offset).astype(np.float32)
    twice = pixels.astype(np.float32) * scale + offset
    assert (once != twice).any()
    np.testing.assert_array_equal(got, once if fused else twice)


def test_who_rounds_otherwise_gets_pixels():
    scale, offset = torch.tensor([0.01, 0.02, 0.03]), torch.tensor([-1.0, 0.0, 1.0])
    by, plus = scale.reshape(1, 3, 1, 1), offset.reshape(1, 3, 1, 1)
    found = normalized_like(lambda images: images * by + plus, scale, offset, channels_last=True)
    assert isinstance(found, NormalizedOutput)
    assert not found.fused
    assert type(normalized_like(lambda images: (images + plus / by) * by, scale, offset, channels_last=True)) is Output


def test_where_pixels_stay_pixels():
    assert type(Transfer(CPU, None, None, channels_last=True).host_output()) is Output
    assert type(Transfer(torch.device("meta"), MEAN, STD, channels_last=True).host_output()) is Output
    later = NativeAugment(native_config(device=Device.gpu), size=ImageSize.of(24), train=True)
    assert later.has_device_part
    assert type(make_transfer(augment=later).host_output()) is Output
    now = NativeAugment(native_config(), size=ImageSize.of(24), train=True)
    assert type(make_transfer(augment=now).host_output()) is NormalizedOutput


@pytest.mark.parametrize("channels_last", [True, False])
def test_a_plan_with_it(photos, channels_last):
    """Padding, and what is left out, are pixels of 0, normalised; a copy in another process does the same."""
    plan = make_plan(open_source("folder", photos, "val"), train=False)
    transfer = make_transfer(channels_last=channels_last)
    request = list(plan.requests(0))[-1]
    wanted = plan.empty_batch(request)
    plan.fill(request, wanted.images, 0, 8)
    made = pickle.loads(pickle.dumps(replace(plan, output=transfer.host_output())))
    batch = made.empty_batch(request)
    for start, stop in ((2, 5), (5, 8), (0, 2)):
        made.fill(request, batch.images, start, stop)
    assert torch.equal(batch.images, transfer.normalize(wanted.images))
    made.leave_out(batch.images, 1, 2)
    assert torch.equal(batch.images[1], transfer.normalize(torch.zeros(1, 3, 24, 24, dtype=torch.uint8))[0])


def test_what_is_no_image_is_left_alone():
    numbers = np.ones(8, np.float32)
    address = numbers.ctypes.data
    for size, channels in ((8, 5), (8, 0), (7, 3)):
        assert library().effloop_normalize(address, 1, size, channels, 0, 1, address, address) == -1
    assert (numbers == 1).all()
